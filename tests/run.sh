#!/bin/bash
# Runs tests, side by side while cores are idle, and prints one line for each. tests/suites.ninja has the lists of `ninja
# check`, `ninja test` and `ninja all-tests`.
#
#   tests/run.sh TEST...      build/VARIANT/NAME      a program that ninja has built
#                             tests/SCRIPT.sh         a script
#                             tests/SCRIPT.sh:A,B     a script's tests A and B: called twice, with that argument
#
# A test skips itself by exit code 77 and a line 'SKIP: reason'. Ends with 'N passed, N failed' and fails when a test
# failed. A test's output is kept in build/log. TEST_TIMEOUT: the seconds that a test may take, 300, and twice that
# under a sanitizer. TEST_JOBS: so many tests at a time, however busy the machine is.
set -u
cd "$(dirname "$0")/.." || exit 1

passed=0 failed=0 skipped=0
failures=()
mkdir -p build/log
scratch=$(mktemp -d "${TMPDIR:-/tmp}/cddp-run.XXXXXX") || exit 1
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM

# No variable of the caller's launcher may leak into a test.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT CDDP_SECRET CDDP_JOB_SECRET CDDP_TIMEOUT_S ONLY
# shellcheck disable=SC2086
unset ${!OMPI_@} ${!PMIX_@} ${!PMI_@} ${!MPI_LOCAL@} ${!SLURM_@}
export ASAN_OPTIONS=allocator_may_return_null=1:detect_stack_use_after_return=1
export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=die_after_fork=0:atexit_sleep_ms=0
export OPENBLAS_NUM_THREADS=1
TIMEFORMAT='%1U + %1S'
export TEST_SLACK=${TEST_SLACK:-4} # what may take a second may take so many: others run beside it
fixed= # sanitizers want fixed addresses: tests/variant.sh
setarch -R true 2>/dev/null && fixed='setarch -R'

# MARK: ends processes that carry it in their environment a second after their test has ended; prints them.
end_orphans() {
  local try pid pids=
  for try in 1 2 3 4 5 6 7 8 9 10 11; do
    pids=$(grep -lsz "^CDDP_TEST_MARK=$1$" /proc/[0-9]*/environ | cut -d/ -f3)
    [ -z "$pids" ] && return
    [ "$try" = 11 ] || sleep 0.1
  done
  for pid in $pids; do
    echo "left a process behind: $pid $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null)"
    kill -KILL "$pid" 2>/dev/null
  done
}

# TEST: runs it; leaves build/log/NAME.log, and NAME.result with 'code tenths-of-a-second CPU-seconds'.
run() {
  local test=$1 name command log tmp start end code mark limit=${TEST_TIMEOUT:-300}
  name=$(name_of "$test")
  case $test in
  build/plain/*) command=$test ;;
  build/*) command="$fixed $test" ;;
  *) command=${test/:/ } ;;
  esac
  case $test in build/[at]san/*) limit=$((2 * limit)) ;; esac
  log=build/log/$name.log tmp=$scratch/$name mark=$$-$name
  mkdir -p "$tmp" "${log%/*}"
  start=$(date +%s%N)
  # shellcheck disable=SC2086
  { time CDDP_TEST_MARK=$mark TMPDIR=$tmp timeout -k 5 "$limit" $command >"$log" 2>&1 </dev/null; } 2>"$tmp.cpu"
  code=$? # of the braces: they keep bash from naming the signal that ended it
  end=$(date +%s%N)
  [ $code = 124 ] || [ $code = 137 ] && echo "no end after $limit s" >>"$log"
  end_orphans "$mark" >"$tmp.orphans"
  if [ -s "$tmp.orphans" ]; then
    cat "$tmp.orphans" >>"$log"
    code=1
  fi
  # What a sanitizer saw in a rank may be lost on the way to the exit code.
  if [ $code = 0 ] && grep -q -E 'ERROR: [A-Za-z]*Sanitizer|WARNING: ThreadSanitizer|: runtime error: ' "$log"; then
    code=1
  fi
  rm -rf "$tmp"
  echo "$code $(((end - start) / 100000000)) $(tail -n 1 "$tmp.cpu")" >"build/log/$name.new" &&
    mv "build/log/$name.new" "build/log/$name.result"
}

name_of() { # TEST: as it is called in what this prints
  local name=${1#build/}
  name=${name#tests/}
  name=${name/.sh:/\/}
  echo "${name%.sh}"
}

skip() { # NAME REASON
  skipped=$((skipped + 1))
  printf 'skip   %s (%s)\n' "$1" "$2"
}

excerpt() { # FILE: its head, where sanitizers say what is wrong, and its tail, where tests sum up
  local lines
  # What gcc's address sanitizer says of each process that the double has device threads in.
  grep -v "fully support makecontext" "$1" >"$scratch/excerpt"
  lines=$(wc -l <"$scratch/excerpt")
  if [ "$lines" -le 40 ]; then
    cat "$scratch/excerpt"
  else
    head -n 16 "$scratch/excerpt"
    echo "... $((lines - 40)) lines more: $1"
    tail -n 24 "$scratch/excerpt"
  fi
}

report() { # TEST: prints the line of one that has run, and counts it
  local name log code tenths cpu
  name=$(name_of "$1")
  log=build/log/$name.log
  read -r code tenths cpu <"build/log/$name.result"
  rm -f "build/log/$name.result"
  if [ "$code" = 0 ]; then
    passed=$((passed + 1))
    printf 'ok     %s %d.%d s (CPU %s s)\n' "$name" $((tenths / 10)) $((tenths % 10)) "$cpu"
  elif [ "$code" = 77 ]; then
    skip "$name" "$(sed -n 's/^SKIP: //p' "$log" | head -n 1)"
  else
    failed=$((failed + 1))
    failures+=("$1")
    printf 'FAIL   %s %d.%d s (exit code %d)\n' "$name" $((tenths / 10)) $((tenths % 10)) "$code"
    excerpt "$log" | cut -c 1-400 | sed 's/^/       | /'
  fi
}

# Programs, which mostly wait, and scripts, which mostly compile, wait in two lines.
programs=() scripts=() without=
for arg in "$@"; do
  case $arg in
  build/*/*)
    variant=${arg%/*}
    if [ -x "$arg" ] || [ ! -s "$variant/missing" ]; then
      programs+=("$arg")
    else
      case " $without " in *" $variant "*) ;; *) skip "${variant#build/}" "$(head -n 1 "$variant/missing")" ;; esac
      without="$without $variant"
    fi
    ;;
  *.sh:*) for one in $(echo "${arg#*.sh:}" | tr , ' '); do scripts+=("${arg%%.sh:*}.sh:$one"); done ;;
  *) scripts+=("$arg") ;;
  esac
done

cores=$(nproc 2>/dev/null || echo 1)
idle() { # whether a core was idle, twice in a row. (One that runs is this script.)
  local try threads
  [ -z "${TEST_JOBS:-}" ] || return 0
  for try in 1 2; do
    sleep 0.05
    read -r _ _ _ threads _ </proc/loadavg
    [ "${threads%/*}" -le "$cores" ] || return 1
  done
}

most=${TEST_JOBS:-$((cores + 4))} # tests at a time, of which one script beside programs, after them as many as there are cores
declare -A running=()
p=0 s=0 scripts_running=0
while :; do
  while [ ${#running[@]} = 0 ] || { [ ${#running[@]} -lt $most ] && idle; }; do
    allowed=$cores
    [ $p = ${#programs[@]} ] || allowed=$((${#running[@]} > scripts_running))
    if [ $s -lt ${#scripts[@]} ] && [ $scripts_running -lt $allowed ]; then
      test=${scripts[s]}
      s=$((s + 1)) scripts_running=$((scripts_running + 1))
    elif [ $p -lt ${#programs[@]} ]; then
      test=${programs[p]}
      p=$((p + 1))
    else break
    fi
    rm -f "build/log/$(name_of "$test").result"
    running[$test]=1
    run "$test" &
  done
  [ ${#running[@]} -gt 0 ] || break
  sleep 0.1
  for test in "${!running[@]}"; do
    [ -e "build/log/$(name_of "$test").result" ] || continue
    report "$test"
    unset "running[$test]"
    case $test in build/*) ;; *) scripts_running=$((scripts_running - 1)) ;; esac
  done
done

if [ $failed != 0 ]; then
  printf 'failed: %s\n' "${failures[@]}"
  echo "To run one again: tests/run.sh ${failures[0]}. All of its output is in build/log/$(name_of "${failures[0]}").log"
fi
summary="$passed passed, $failed failed"
[ $skipped = 0 ] || summary="$summary, $skipped skipped"
echo "$summary" | tee build/log/summary
for test in "${failures[@]}"; do echo "build/log/$(name_of "$test").log"; done >build/log/failed
[ $failed = 0 ] && [ $((passed + skipped)) != 0 ]
