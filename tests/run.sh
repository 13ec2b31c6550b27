#!/bin/bash
# Runs what `ninja test` has built, one test after the other, and prints one line for each.
#
#   tests/run.sh                      everything
#   tests/run.sh plain/store          one test
#   tests/run.sh 'asan/*' 'check/*'   those whose name matches a pattern
#
# Ends with 'N passed, N failed' and fails when a test failed. A test's output is kept in build/log. Set
# TEST_TIMEOUT to the seconds a test may take (plain: 120, with a sanitizer or valgrind: 300).
set -u
cd "$(dirname "$0")/.." || exit 1

patterns=("$@")
variants="plain asan tsan clang"
valgrind_tests="groups"
waiting="store discovery spawn launch init strangers faults simulate" # mostly asleep: they run side by side
tests=$(sed -n 's/^build $dir\/\([a-z0-9_]*\): \(room\|public\) .*/\1/p' tests/variant.ninja)
gpu_tests=$(sed -n 's/^build $dir\/\([a-z0-9_]*\): \(gpu\|gpu_room\|kernels\) .*/\1/p' tests/gpu.ninja)
passed=0 failed=0 skipped=0
failures=()
mkdir -p build/log
scratch=$(mktemp -d "${TMPDIR:-/tmp}/cddp-run.XXXXXX") || exit 1
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM

# No variable of the caller's launcher may leak into a test.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT CDDP_SECRET CDDP_TIMEOUT_S ONLY
# shellcheck disable=SC2086
unset ${!OMPI_@} ${!PMIX_@} ${!PMI_@} ${!MPI_LOCAL@} ${!SLURM_@}
export ASAN_OPTIONS=allocator_may_return_null=1:detect_stack_use_after_return=1
export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=die_after_fork=0:atexit_sleep_ms=0
export OPENBLAS_NUM_THREADS=1

wanted() { # NAME: whether a pattern of the command line asks for it
  local p
  [ ${#patterns[@]} -eq 0 ] && return 0
  for p in "${patterns[@]}"; do
    # shellcheck disable=SC2053
    [[ $1 == $p ]] && return 0
  done
  return 1
}

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

# NAME SECONDS COMMAND...: runs it; leaves build/log/NAME.log, and NAME.result with 'code seconds'.
run() {
  local name=$1 limit=$2 log=build/log/$1.log tmp=$scratch/$1 start end code mark
  shift 2
  mkdir -p "$tmp" "${log%/*}"
  mark=$$-$name
  start=$(date +%s%N)
  { CDDP_TEST_MARK=$mark TMPDIR=$tmp timeout -k 5 "$limit" "$@" >"$log" 2>&1 </dev/null; } 2>/dev/null
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
  echo "$code $(((end - start) / 100000000))" >"build/log/$name.result"
}

skip() { # NAME REASON
  skipped=$((skipped + 1))
  printf 'skip   %s (%s)\n' "$1" "$2"
}

excerpt() { # FILE: its head, where sanitizers say what is wrong, and its tail, where tests sum up
  local lines
  lines=$(wc -l <"$1")
  if [ "$lines" -le 40 ]; then
    cat "$1"
  else
    head -n 16 "$1"
    echo "... $((lines - 40)) lines more: $1"
    tail -n 24 "$1"
  fi
}

report() { # NAME: prints the line of a test that has run, and counts it
  local name=$1 log=build/log/$1.log code tenths
  read -r code tenths <"build/log/$name.result"
  rm -f "build/log/$name.result"
  if [ "$code" = 0 ]; then
    passed=$((passed + 1))
    printf 'ok     %s %d.%d s\n' "$name" $((tenths / 10)) $((tenths % 10))
  elif [ "$code" = 77 ]; then
    skip "$name" "$(sed -n 's/^SKIP: //p' "$log" | head -n 1)"
  else
    failed=$((failed + 1))
    failures+=("$name")
    printf 'FAIL   %s %d.%d s (exit code %d)\n' "$name" $((tenths / 10)) $((tenths % 10)) "$code"
    excerpt "$log" | cut -c 1-400 | sed 's/^/       | /'
  fi
}

one() { # NAME SECONDS COMMAND...
  wanted "$1" || return 0
  run "$@"
  report "$1"
}

# N: runs the lines of standard input, 'NAME SECONDS COMMAND...', so many at a time.
spread() {
  local n=$1 name fields names=()
  while read -r -a fields; do
    wanted "${fields[0]}" || continue
    names+=("${fields[0]}")
    while [ "$(jobs -rp | wc -l)" -ge "$n" ]; do wait -n; done
    run "${fields[@]}" &
  done
  wait
  for name in ${names[@]+"${names[@]}"}; do report "$name"; done
}

# Why a variant cannot run here, or nothing. Random addresses of 32 bits are too many for some sanitizers;
# setarch -R turns them off where a process may do so.
fixed=()
setarch -R true 2>/dev/null && fixed=(setarch -R)
obstacle() { # VARIANT
  local i
  if [ ! -x "build/$1/ok" ]; then
    echo "its compiler says: $(grep -m 1 . "build/$1/ok.log" 2>/dev/null || echo "nothing; run ninja test")"
    return
  fi
  for i in 1 2 3 4 5; do
    ${fixed[@]+"${fixed[@]}"} "build/$1/ok" >"$scratch/ok.log" 2>&1 && continue
    echo "an empty program with it fails: $(grep -m 1 . "$scratch/ok.log")"
    return
  done
}

built_by_default() { # VARIANT TEST: whether `ninja test` builds it for this variant
  local list='$name|${name}-more|${name}-gpu'
  case $1 in
  asan) list='$name|${name}-parsers' ;;
  tsan) list='${name}-threads|${name}-gpu-short' ;;
  clang) list='${name}-short' ;;
  esac
  cat tests/variant.ninja tests/gpu.ninja | awk -v list="|$list|" '
    /^build / { on = index(list, "|" substr($2, 1, length($2) - 1) "|") } on' | grep -q -w "\$dir/$2"
}

run_variant() { # VARIANT
  local v=$1 t why limit=300 prefix=("${fixed[@]+"${fixed[@]}"}") any= waits cores=2 tests=$tests
  [ "$v" = clang ] || tests="$tests $gpu_tests"
  for t in $tests; do wanted "$v/$t" && any=1; done
  [ -n "$any" ] || return 0
  why=$(obstacle "$v")
  if [ -n "$why" ] && [ "$v" != plain ]; then
    skip "$v" "$why"
    return
  fi
  [ "$v" = plain ] && limit=120 prefix=()
  for t in $tests; do
    [ ${#patterns[@]} -gt 0 ] || built_by_default "$v" "$t" || continue
    echo "$v/$t" "${TEST_TIMEOUT:-$limit}" ${prefix[@]+"${prefix[@]}"} "build/$v/$t"
  done >"$scratch/lines"
  waits="^$v/(${waiting// /|}) "
  spread 3 < <(grep -E "$waits" "$scratch/lines")
  # With asan deadlines are longer: there is room for two at a time.
  [[ $v == *asan ]] || cores=1
  spread "$cores" < <(grep -v -E "$waits" "$scratch/lines")
}

valgrind_lines() {
  local t
  for t in $valgrind_tests; do
    echo "valgrind/$t" "${TEST_TIMEOUT:-300}" valgrind -q --error-exitcode=9 --leak-check=full \
      --show-leak-kinds=definite --errors-for-leak-kinds=definite \
      --track-fds=no --child-silent-after-fork=no "build/plain/$t"
  done
}

cores=$(nproc 2>/dev/null || echo 1)
spread "$cores" < <(for t in $(tests/checks.sh list); do
  [ "$t" = cuda-full ] && [[ "${patterns[*]-}" != *cuda* ]] && continue # `ninja cuda` asks for it
  echo "check/$t" "${TEST_TIMEOUT:-300}" tests/checks.sh "$t"
done)
for v in $variants; do run_variant "$v"; done
if command -v valgrind >/dev/null; then
  spread "$cores" < <(valgrind_lines)
else
  wanted valgrind && skip valgrind "not installed"
fi
for t in $(tests/leaks.sh list); do one "leaks/$t" "${TEST_TIMEOUT:-120}" tests/leaks.sh "$t"; done
spread "$cores" < <(echo mpirun "${TEST_TIMEOUT:-300}" tests/mpirun.sh # the longest first
echo torchrun "${TEST_TIMEOUT:-300}" tests/torchrun.sh
echo safetensors "${TEST_TIMEOUT:-300}" tests/safetensors.sh
for t in $(tests/examples.sh list); do
  echo "examples/$t" "${TEST_TIMEOUT:-120}" tests/examples.sh "$t"
done
echo netns "${TEST_TIMEOUT:-300}" tests/netns.sh)

if [ $failed != 0 ]; then
  printf 'failed: %s\n' "${failures[@]}"
  echo "To run one again: tests/run.sh ${failures[0]}. All of its output is in build/log/${failures[0]}.log"
fi
if [ $((passed + failed + skipped)) = 0 ]; then
  echo "no test has such a name"
  failed=1
fi
summary="$passed passed, $failed failed"
[ $skipped = 0 ] || summary="$summary, $skipped skipped"
echo "$summary" >build/log/summary
echo "$summary"
[ $failed = 0 ]
