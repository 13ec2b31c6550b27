#!/bin/bash
# Everything that needs a GPU: builds for the one at hand, runs the checks, looks for bad memory accesses,
# measures; ends in a table. Needs nvcc, NCCL, cuBLAS and at least one NVIDIA GPU. Put what it prints into
# tests/gpu/gpu-results.md.
#
#   tests/gpu/gpu.sh PART...      these parts, in one call of at most nine minutes:
#   tests/gpu/gpu.sh              build, quick, bench, checks and sanitize
#   tests/gpu/gpu.sh build        compiles, side by side; programs of the same sources are kept
#   tests/gpu/gpu.sh quick        what matters most, in about a minute
#   tests/gpu/gpu.sh bench        measures: SGD and AdamW against a copy, examples/gpt.cu with and without cddp, PyTorch
#   tests/gpu/gpu.sh checks       the other checks
#   tests/gpu/gpu.sh sanitize     compute-sanitizer
#   tests/gpu/gpu.sh suite        tests/gpu/nccl_*.c, the tests of the double, on the real CUDA and NCCL
#   tests/gpu/gpu.sh double       the suite on the double, as ninja has built it, with one GPU that all ranks share
#   tests/gpu/gpu.sh table        the table of all calls so far, whose rows add up
#   tests/gpu/gpu.sh coverage     what has run where, of gpu-results.md and of the table: a table for gpu-results.md
#
# Each part builds first what is missing. `GPU_ARCH=sm_90 tests/gpu/gpu.sh build` needs no GPU: it compiles for
# that architecture, and build/gpu/bin can then be copied to a machine that has one. `build-bench`
# and `build-suite` are the same for what bench and suite need. After each part the logs and rows are saved in OUT, if that is set: gpu-logs.tar.gz.
#
# A call ends within GPU_SECONDS, 540: it starts nothing that would end later. Without a limit: GPU_SECONDS=0. quick,
# bench and checks also have limits of their own. A row for which no time was left says 'skip'. A command that got less
# than its time, and did not end, is a warning.
#
# A row is 'ok', 'FAIL', 'skip', 'warn' or 'info'; the logs are in build/gpu/log. Expected is 'ok', but 'skip'
# where GPUs or tools are missing, and of a figure what its row says. The exit code is 0 when no row of the
# table is FAIL. Several NCCL ranks on one GPU are a trick (NCCL_HOSTID: each takes the other
# for another host and goes through sockets) that NCCL does not support: where it does not work is a
# warning, and what it does says nothing about speed. What takes 2 ranks uses 2 GPUs where they are.
set -u
GPU_ARCH=${GPU_ARCH:-}
cd "$(dirname "$0")/../.." || exit 1
out=${GPU_BUILD:-build/gpu} double=

die() { # SENTENCE
  trap - EXIT
  echo "tests/gpu/gpu.sh: $*" >&2
  exit 1
}

usage="tests/gpu/gpu.sh [build|quick|bench|checks|sanitize|build-bench|build-suite|suite]... | double | table | coverage"
phases=
[ $# -gt 0 ] || set -- build quick bench checks sanitize
for part in "$@"; do
  case $part in
  build | build-bench | build-suite) ;;
  quick | checks | sanitize) phases+=" build" ;;
  bench) phases+=" build-bench" ;;
  suite) phases+=" build-suite" ;;
  double | table | coverage) [ $# = 1 ] || { echo "usage: $usage" >&2 && exit 2; } ;;
  *) echo "usage: $usage" >&2 && exit 2 ;;
  esac
  phases+=" $part"
done
case $1 in
double) phases=suite double=1 out=build/gpu-double GPU_SECONDS=0 ;;
table | coverage) phases= ;;
esac
phases=$(tr ' ' '\n' <<<"$phases" | awk 'NF && !seen[$0]++')
! grep -q -x build <<<"$phases" || phases=build$'\n'$(grep -v -x -e build -e build-bench <<<"$phases")
phases=$(paste -s -d ' ' <<<"$phases")
GPU_SECONDS=${GPU_SECONDS:-540}

# No variable of the caller's launcher may make a rank of a check.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GPU_MEET
# shellcheck disable=SC2086
unset ${!CDDP_@} ${!TORCHELASTIC_@} ${!OMPI_@} ${!PMIX_@} ${!PMI_@} ${!MPI_LOCAL@} ${!SLURM_@}

# --- rows, each in a file of its own ---

phase=0 rows=0
declare -A verdict

row() { # STATE NAME [REMARK]
  rows=$((rows + 1))
  verdict[$2]=$1
  printf '%s|%s|%s|%s\n' "$1" "$2" "${3//|//}" "$id" >"$out/rows/$phase-$(printf %02d $rows)"
  printf '%-5s %-38s %s\n' "$1" "$2" "${3:-}"
}

table() {
  local f state name remark of head
  echo
  head=$(cat "$out/rows/head" 2>/dev/null) || { echo "tests/gpu/gpu.sh has not run yet"; return 1; }
  echo "${head#*|}"
  for f in "$out"/rows/[1-9]*; do
    [ -e "$f" ] || continue
    IFS='|' read -r state name remark of <"$f"
    [ "$of" = "${head%%|*}" ] || remark="$remark  [of $of]"
    printf '%-5s %-38s %s\n' "$state" "$name" "$remark"
  done
  ! grep -q '^FAIL' "$out"/rows/*
}

# --- what has run where ---

# A line: feature | rows of one rank | of ranks that share a GPU | of ranks with GPUs of their own | the file of its tests on
# the double. One row that is ok is enough, so a row stands where it proves the feature. NAME* means 'NAME, one GPU' in the
# third column and 'NAME, N GPUs' in the fourth: the suite's.
features='communicator: start, warm-up, end|1 rank with NCCL|2 ranks, nccl, one GPU;4 ranks, nccl, one GPU|2 ranks, nccl, 2 GPUs|threads
collectives of f32 with SUM and MAX, handles, in place, barrier|1 rank, nccl|2 ranks, nccl, one GPU|2 ranks, nccl, 2 GPUs|collectives
all types, operations and roots; means||test_collectives*|test_collectives*|collectives
calls with counts, calls on host memory||test_groups*|test_groups*|collectives
messages to oneself|self, 1 rank with NCCL|self, 2 ranks||steps
messages between ranks||test_groups*|test_groups*|collectives
a receive from a rank that has left||test_left_messages*|test_left_messages*|faults
cddp_group_split, cddp_barrier_async||test_groups*|test_groups*|collectives
step with SGD, buckets, wait, clip, cddp_optim_step|1 rank, nccl|2 ranks, nccl, one GPU|2 ranks, nccl, 2 GPUs|ddp
AdamW|sharded, 1 rank|sharded, 2 ranks|test_adamw*|ddp
max_grad_norm, learning rates that change|gpt|test_training*|test_training*|ddp
amsgrad, parameters with settings of their own||test_adamw*|test_adamw*|ddp
sharded_states|sharded, 1 rank|sharded, 2 ranks|test_sharded_states*|sharded
partitions: reduce_scatter and all_gather of parts||test_parts*|test_parts*|sharded
master weights (one rank: the kernels)|kernels|test_training_masters*|test_training_masters*|ddp
hooks, no_sync, unused parameters, buffers||test_training_options*|test_training_options*|ddp
uneven inputs, sparse rows||test_uneven_and_sparse*|test_uneven_and_sparse*|ddp
shards||test_shards*|test_shards*|elastic
elastic: a rank dies||test_elastic*;gpt, a rank killed|test_elastic*|elastic
elastic: a process joins||test_elastic_joins*;gpt, a rank killed|test_elastic_joins*|elastic
cddp_save, cddp_load||test_checkpoints*|test_checkpoints*|ddp
cddp_save that fails on one rank||test_failed_saves*|test_failed_saves*|faults
a captured step with SGD; graph before and after the model|replay, 1 rank with NCCL|replay, 2 ranks|test_graph*|graphs
calls beside a capture||test_beside_captures*|test_beside_captures*|graphs
cddp_set_stream between steps||test_set_stream*|test_set_stream*|steps
a graph that one rank does not launch||lone, 2 ranks|test_step_graphs*|graphs
a rank killed: in kernels, in cudaFree, rank 0||lost, 2 ranks|test_lost*|faults
a rank stopped||test_stopped*|test_stopped*|faults
ranks that disagree||test_mismatch*|test_mismatch*|faults
each function of CUDA and NCCL fails once||test_injection*|test_injection*|faults
NCCL that stalls, or fails later||||faults
ranks as threads (one rank: one thread)|data_parallel|||threads
backend "cpu"||2 ranks, cpu, one GPU;4 ranks, cpu, one GPU||ddp
several hosts (on one machine, by names)||test_hosts*|test_hosts*|collectives
kernels, layers, linear|kernels|||
contexts: one GPU for each process|||contexts, 2 ranks|steps
communication hidden by the backward pass|||overlap, 2 ranks|'

coverage() { # as Markdown
  local ok feature one share several double cell cells name only column
  ok=$(sed -n 's/^ok    \(.\{38\}\) .*/\1/p' tests/gpu/gpu-results.md | sed 's/ *$//'
    cat "$out"/rows/[1-9]* 2>/dev/null | sed -n 's/^ok|\([^|]*\)|.*/\1/p')
  echo '| feature | one rank | ranks that share a GPU | several GPUs | several ranks: on the double only |'
  echo '|---|---|---|---|---|'
  while IFS='|' read -r feature one share several double; do
    cells='' only=${double:+\`$double\`} column=0
    for cell in "$one" "$share;${share//\*/, one GPU}" "$several;${several//\*/, [0-9]* GPUs}"; do
      name=$(tr ';' '\n' <<<"$cell" | grep -v '[*]$' | grep .)
      column=$((column + 1))
      if [ -n "$name" ] && grep -q -x -f <(echo "$name") <<<"$ok"; then
        cells+=' | yes'
        [ $column = 1 ] || only=
      else cells+=' |'; fi
    done
    echo "| $feature$cells | $only |" | sed 's/  */ /g'
  done <<<"$features"
}

if [ -z "$phases" ]; then
  "$1"
  exit
fi

# --- what is there ---

id=$(git describe --always --dirty 2>/dev/null) || id="files $(cat cddp.h cddp_kernels.cuh | sha256sum | cut -c 1-8)"
bin=$out/bin cores=$(nproc) memory=0 most=1
[ "$cores" -gt 1 ] || cores=2 # two ranks wait for each other
mkdir -p $out/rows $out/log $out/lib $out/bin

find_gpu() {
  local d
  for d in "${CUDA_HOME:-/usr/local/cuda}"/bin /usr/local/cuda-*/bin; do
    command -v nvcc >/dev/null || [ ! -x "$d/nvcc" ] || PATH=$PATH:$d
  done
  command -v nvidia-smi >/dev/null || PATH=$PATH:/usr/local/nvidia/bin
  command -v nvcc >/dev/null ||
    die "nvcc is not installed: install NVIDIA's CUDA toolkit, or add its bin directory to PATH"
  cuda=$(readlink -f "$(command -v nvcc)")
  cuda=${cuda%/bin/*}
  gpus=$(timeout 60 nvidia-smi -L 2>/dev/null | grep -c '^GPU') # not the lines of MIG's parts
  [ "$gpus" -gt 0 ] || { ! tr ' ' '\n' <<<"$phases" | grep -q -v '^build' && [ -n "$GPU_ARCH" ]; } ||
    die "nvidia-smi finds no GPU here: this needs a machine with an NVIDIA GPU and its driver"

  gpu=$(ask name,driver_version)
  arch=$(ask compute_cap | tr -d .)
  [[ $arch =~ ^[0-9]+$ ]] && arch=sm_$arch || arch=native
  arch=${GPU_ARCH:-$arch}
  memory=$(ask memory.total) # MiB
  [[ $memory =~ ^[0-9]+$ ]] || memory=0
}

ask() { timeout 60 nvidia-smi --query-gpu="$1" --format=csv,noheader,nounits 2>/dev/null | head -n 1; }

# Whether nvcc finds a library and its header.
links() { # LIBRARY HEADER
  printf '#include <%s>\nint main() { return 0; }\n' "$2" >$out/probe.cpp
  timeout 120 nvcc $out/probe.cpp -o $out/probe "-l$1" >$out/log/probe.log 2>&1
}

places() { # where pip and others put libraries with their headers
  local d
  for d in "${NCCL_HOME:-}" "${CONDA_PREFIX:-}" "$cuda"/targets/*; do [ -z "$d" ] || echo "$d"; done
  python3 - 2>/dev/null <<'END'
import glob, os, sys
for path in sys.path:
    for d in sorted(glob.glob(os.path.join(path or ".", "nvidia", "*"))):
        print(os.path.abspath(d))
END
}

# Sees to it that nvcc and the programs find a library: pip's lack the name without a version.
need() { # LIBRARY HEADER CURE
  local d f dir
  links "$1" "$2" && return
  while read -r d; do
    [ -f "$d/include/$2" ] || continue
    for dir in "$d/lib" "$d/lib64"; do
      for f in "$dir/lib$1.so" "$dir/lib$1.so".[0-9]*; do
        [ -f "$f" ] || continue
        ln -sf "$f" "$out/lib/lib$1.so"
        export CPATH=$d/include${CPATH:+:$CPATH}
        export LIBRARY_PATH=$PWD/$out/lib${LIBRARY_PATH:+:$LIBRARY_PATH}
        export LD_LIBRARY_PATH=$dir${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        links "$1" "$2" && return
      done
    done
  done < <(places)
  die "nvcc finds no $2 with lib$1.so: $3 ($out/log/probe.log)"
}

callers_libraries=${LD_LIBRARY_PATH:-} # PyTorch brings its own

find_libraries() { # and says in rows/head with what all is built
  local log=$out/log/probe.log nvcc
  links c stdio.h || die "nvcc compiles nothing here; $log ends: $(tail -n 1 "$log")"
  need nccl nccl.h "install NVIDIA's libnccl-dev, or run python3 -m pip install nvidia-nccl-cu13 (cu12 for CUDA 12)"
  need cublas cublas_v2.h "install cuBLAS of the CUDA toolkit, or run python3 -m pip install nvidia-cublas (nvidia-cublas-cu12)"
  cat >$out/probe.cpp <<'END'
#include <cublas_v2.h>
#include <nccl.h>
#include <stdio.h>
int main() {
  int n = 0, major = 0;
  if (ncclGetVersion(&n) || cublasGetProperty(MAJOR_VERSION, &major)) return 1;
  return printf("NCCL %d.%d.%d, cuBLAS %d\n", n / 10000, n / 100 % 100, n % 100, major) < 0;
}
END
  { timeout 120 nvcc $out/probe.cpp -o $out/probe -lnccl -lcublas && timeout 60 $out/probe; } >"$log" 2>&1 ||
    die "a program with NCCL and cuBLAS does not run; $log ends: $(tail -n 1 "$log")"
  libraries=$(tail -n 1 "$log")
  nvcc=$(nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
  echo "$id|$(date -u +%F)  ${gpu:-no GPU} (of $gpus)  $id  nvcc $nvcc ($arch)  $libraries" >$out/rows/head
}

export NCCL_DEBUG=${NCCL_DEBUG:-WARN} # NCCL says why in the logs

# --- running ---

pids=() names=() logs=() limits=() ends=() musts=() softs=() # of the commands begun, by their number
must='' soft='' made='' started=0 part_end=1000000

left() { # seconds until the part's limit and GPU_SECONDS, less those for the table
  local all=$((GPU_SECONDS - SECONDS - 10)) part=$((part_end - SECONDS))
  echo $((GPU_SECONDS == 0 ? 1000000 : part < all ? part : all))
}

# MARK: processes with a mark that begins so. They inherit it from the command that start began.
marked() { grep -lsza "^CDDP_GPU_MARK=$1" /proc/[0-9]*/environ | cut -d/ -f3; }

# MARK: ends them, and says which they were.
end_marked() {
  local pid
  for _ in 1 2 3 4 5 6 7 8 9 10; do # a moment to go by themselves
    [ -n "$(marked "$1")" ] || return 0
    sleep 0.1
  done
  for pid in $(marked "$1"); do
    echo "$pid $(tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | cut -c 1-80)"
    kill -KILL "$pid" 2>/dev/null
  done
}

gist() { # LOG: the line that says most
  { grep -a -m 1 -E '^rank [0-9]+: |[Ee]rror|FAIL|failed|fatal|WARN|usage' "$1" ||
    tail -n 1 "$1" | grep . || echo "no output"; } | cut -c 1-160
}

judge() { # NUMBER of a command that has ended: makes its row
  local name=${names[$1]} log=${logs[$1]} limit=${limits[$1]} code=none seconds=0 state=FAIL why behind
  read -r code seconds 2>/dev/null <"$log.end"
  behind=$(end_marked "$$-$1-")
  case $code in
  0) why="$seconds s" ;;
  124 | 137) why="killed" && [ "$seconds" -lt "$limit" ] || why="no end after $limit s" ;;
  none) why="cannot be ended" ;;
  *) why="exit code $code" ;;
  esac
  if [ "$code" != 0 ]; then why="$why: $(gist "$log")"
  elif [ -n "$behind" ]; then why="left processes behind: $behind"
  elif [ -n "${musts[$1]}" ] && ! grep -q -a -E "${musts[$1]}" "$log"; then why="no line says ${musts[$1]}"
  else state=ok; fi
  [ "$state" = ok ] && why+=$(sed -n 's/^  skip of [a-z_]*: /; not on a GPU: /p' "$log" | tr -d '\n')
  [ "$state" = ok ] || [[ ${softs[$1]} != 1* ]] || state=warn
  if [[ $why = "no end"* && ${softs[$1]} = *cut ]]; then state=warn; fi # it may need the time it did not get
  if [ "$state" != ok ] && [[ $name = *check,* ]] && grep -q -a 'Device not supported' "$log"; then
    state=warn why="compute-sanitizer does not support this device"
  fi
  [ "$state" = ok ] || why="$why ($log)"
  row "$state" "$name" "$why"
  [ "$state" = ok ] || tail -n 8 "$log" | cut -c 1-200 | sed 's/^/      | /'
}

reap() { # makes the rows of commands that have ended
  local i
  for i in "${!pids[@]}"; do
    [ -e "${logs[i]}.end" ] || [ $SECONDS -gt "${ends[i]}" ] || ! kill -0 "${pids[i]}" 2>/dev/null || continue
    judge "$i"
    unset "pids[i]"
  done
  sleep 0.1
}

collect() { # waits for all that start began
  while [ ${#pids[@]} -gt 0 ]; do reap; done
}

# Begins a command in the background; its row comes from collect. With must=REGEX a line of its output
# has to match; with soft=1 a failure is a warning; made=FILE: success makes FILE.stamp of FILE.next.
start() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 log=$out/log/${1//[^a-zA-Z0-9_]/-}.log i word room soft=$soft must=$must
  shift 2
  [[ " ${logs[*]} " != *" $log "* ]] || log=${log%.log}-2.log # two programs have a test of that name
  for word in "$@"; do
    [ -n "$made" ] || [[ $word != */@(gpu|kernels|nccl_*) ]] || must=${must:-'^ok:? '} # their last line
    [[ $word != $out/bin/* ]] || [ -e "$word.stamp" ] || [ "$1" = nvcc ] ||
      { row skip "$name" "$word was not built" && return; }
  done
  while [ ${#pids[@]} -ge "$cores" ]; do reap; done
  room=$(left)
  [ "$room" -gt 5 ] || { row skip "$name" "no time was left" && return; }
  [ "$room" -ge "$limit" ] || limit=$room soft=${soft}cut
  rm -f "$log.end"
  i=$((started += 1))
  {
    begin=$SECONDS
    CDDP_GPU_MARK=$$-$i- timeout -k 5 "$limit" "$@" >"$log" 2>&1 </dev/null
    code=$?
    [ $code != 0 ] || [ -z "$made" ] || mv "$made.next" "$made.stamp"
    echo "$code $((SECONDS - begin))" >"$log.new" && mv "$log.new" "$log.end"
  } 2>/dev/null &
  pids[i]=$! names[i]=$name logs[i]=$log limits[i]=$limit musts[i]=$must softs[i]=$soft
  ends[i]=$((SECONDS + limit + 20)) # a process that waits for the driver may outlast even SIGKILL
}

try() { # NAME SECONDS COMMAND...: runs it and makes its row; fails if that is not ok
  start "$@"
  collect
  [ "${verdict[$1]:-}" = ok ]
}

save_logs() { [ -z "${OUT:-}" ] || tar -czf "$OUT/gpu-logs.tar.gz" -C "$out" log rows; }

# shellcheck disable=SC2317 # the trap calls it
finish() {
  local code=$? i
  trap - EXIT
  trap '' HUP INT TERM
  for i in "${!pids[@]}"; do
    if [ -e "${logs[i]}.end" ]; then judge "$i"
    else row FAIL "${names[i]}" "tests/gpu/gpu.sh was ended during it (${logs[i]})"; fi
  done
  marked "$$-" | xargs -r kill 2>/dev/null
  end_marked "$$-" >/dev/null
  save_logs
  table || [ "$code" != 0 ] || code=1
  exit "$code"
}

# --- build ---

build() { # FILE...
  local f name hash flags="-O3 -std=c++17 -arch=$arch" own
  for f in "$@"; do
    name=${f##*/} name=${name%.cu}
    own=
    [ "$name" != kernels ] || own="-DCDDP_IMPLEMENTATION"
    hash=$({ echo "$flags" &&
      cat "$f" examples/gpt.cu examples/*.h cddp.h cddp_kernels.cuh tests/test.h tests/gpu/hostcuda/half.h; } | sha256sum)
    [ ! -x "$out/bin/$name" ] || [ "$hash" != "$(cat "$out/bin/$name.stamp" 2>/dev/null)" ] ||
      { row ok "build $name" "is there already" && continue; }
    rm -f "$out/bin/$name.stamp" "$out/bin/$name"
    echo "$hash" >"$out/bin/$name.next"
    # shellcheck disable=SC2086
    made=$out/bin/$name start "build $name" 550 nvcc $own "$f" -o "$out/bin/$name" $flags -lnccl -lcublas
  done
  collect
}

# --- the suite: tests/gpu/nccl_*.c with tests/gpu/real.c in place of the double ---

# Left out: test_no_device, test_no_driver, test_stall and test_memory_unknown steer the double; test_threads needs several GPUs.
suite_programs="elastic collectives faults threads sharded graphs steps ddp"

# PROGRAM OUTPUT: compiles it, and links the three objects that all have.
link_suite() {
  local wraps
  wraps=$(sed -n 's/^  X(\(cuda\|nccl\)[A-Za-z_]*, \([A-Za-z]*\),.*/-Xlinker --wrap=\2/p' tests/gpu/real.c)
  # shellcheck disable=SC2086
  "${CC:-cc}" -std=c11 -O0 -D_GNU_SOURCE -DCDDP_IMPLEMENTATION_DONE -isystem "$cuda/include" \
    -c "tests/gpu/nccl_$1.c" -o "$out/suite/nccl_$1.o" &&
    nvcc "$out/suite/nccl_$1.o" "$out"/suite/{inside,real,kernels}.o -o "$2" $wraps -lnccl -lpthread -lm
}

build_suite() {
  local name flags kernels
  [ -n "${SUITE_FLAGS:-}" ] || build examples/gpt.cu
  kernels="-O3 -std=c++17 ${SUITE_FLAGS:--arch=$arch}" # tests/checks.sh: several architectures, not optimised
  flags="$kernels $(cat tests/gpu/*.[ch] tests/gpu/hostcuda/hostcuda.h tests/*.h tests/inside.c cddp.h \
    cddp_kernels.cuh tests/gpu/gpu.sh | sha256sum)"
  mkdir -p "$out/suite"
  for name in $suite_programs; do
    if [ "$flags" != "$(cat "$out/bin/nccl_$name.stamp" 2>/dev/null)" ]; then name=missing && break; fi
  done
  [ "$name" = missing ] || { row ok "build the suite" "is there already" && return; }
  rm -f "$out"/bin/nccl_*.stamp
  # shellcheck disable=SC2086
  start "build the suite's kernels" 550 nvcc $kernels -x cu -DCDDP_KERNELS_IMPLEMENTATION -DCDDP_KERNELS_NO_CUBLAS \
    -c cddp_kernels.cuh -o "$out/suite/kernels.o"
  start "build the suite's cddp.h" 550 "${CC:-cc}" -std=c11 -O1 -D_GNU_SOURCE -DCDDP_CUDA -DCDDP__NO_DISPATCH \
    -isystem "$cuda/include" -c tests/inside.c -o "$out/suite/inside.o"
  start "build the suite's real.c" 550 "${CC:-cc}" -std=c11 -O1 -Wall -Wextra -Werror -isystem "$cuda/include" \
    -c tests/gpu/real.c -o "$out/suite/real.o"
  collect
  for name in $suite_programs; do
    echo "$flags" >"$out/bin/nccl_$name.next"
    made=$out/bin/nccl_$name start "build nccl_$name" 550 bash -c "$(declare -f link_suite); out=$out cuda=$cuda; \
      link_suite $name $out/bin/nccl_$name"
  done
  collect
}

# PROGRAM TEST...: rows of their own. The ranks share the GPU, unless there are as many as most tests have ranks.
suite_tests() {
  local program=$1 test
  shift
  for test in "$@"; do
    start "$test, $suite_where" "${SUITE_LIMIT:-150}" env "ONLY=$test" TEST_SLACK=4 "${suite_way[@]}" \
      "$bin/nccl_$program"
  done
}

# PROGRAM OPTION...: gpt.cu on two ranks that share a GPU. Rank 1 is killed, and a process joins in its place: both ranks have the
# weights of one rank that nobody disturbs. Each rank is a host of its own to NCCL before 2.30.
elastic_gpt() {
  local log want got r pids=() o=(--shards 2 --elastic 0 "${@:2}")
  failed() { echo "$*"; tail -n 5 "$log"/*; rm -rf "$log"; exit 1; }
  log=$(mktemp -d "${TMPDIR:-/tmp}/cddp-gpt.XXXXXX") || return 1
  "$1" "${o[@]}" >"$log/one" 2>&1 || failed "one rank: exit code $?"
  want=$(sed -n 's/^rank 0 weights //p' "$log/one")
  [ -n "$want" ] || failed "one rank: no hash of its weights"
  export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 10000)) LOCAL_RANK=0 \
    NCCL_MULTI_RANK_GPU_ENABLE=1
  for r in 0 1; do
    RANK=$r NCCL_HOSTID=rank-$r "$1" "${o[@]}" >"$log/$r" 2>&1 &
    pids[r]=$!
  done
  until grep -q '^step 50/' "$log/0"; do kill -0 "${pids[0]}" || failed "rank 0 has ended before step 50"; sleep 0.1; done
  kill -KILL "${pids[1]}"
  wait "${pids[1]}"
  r=$?
  [ $r = 137 ] || failed "rank 1 was to be killed; its exit code is $r"
  RANK=1 NCCL_HOSTID=rank-1 CDDP_JOIN=1 "$1" "${o[@]}" >"$log/joined" 2>&1 || failed "the process that joins: exit code $?"
  wait "${pids[0]}" || failed "rank 0: exit code $?"
  got=$(sed -n 's/^rank \([0-9]*\) weights /\1 /p' "$log/0")
  [ "$got" = "0 $want"$'\n'"1 $want" ] || failed "one rank has weights $want; two, of which one was killed: $got"
  rm -rf "$log"
  echo "rank 1 was killed, another process joined: both have the weights of one rank, $want"
}

suite_tests_gpt() { # PROGRAM OPTION...
  must='^rank 1 was killed, another process joined' start "gpt, a rank killed${double:+, the double}" 240 \
    env "${suite_way[@]}" ${double:+HOSTCUDA_DELAY_US=0} \
    bash -c "$(declare -f elastic_gpt); elastic_gpt \"\$@\"" - "$@"
}

# What is worth most comes first: the time may not do for all. A process takes a second for the start of CUDA; several
# tests at a time wait side by side.
suite() {
  local cores=${SUITE_JOBS:-4} suite_way suite_where
  if [ -n "$double" ]; then
    cores=$(nproc) suite_way=(TEST_SHARE=1 HOSTCUDA_DEVICES=1) suite_where="the double" bin=build/plain
  elif [ "$most" -ge 8 ]; then suite_way=() suite_where="$most GPUs"
  elif [[ $libraries =~ NCCL\ 2\.([0-9]+) ]] && [ "${BASH_REMATCH[1]}" -ge 30 ]; then
    suite_way=(TEST_SHARE=1) suite_where="one GPU"
  else suite_way=(TEST_SHARE=1 "${apart[@]:1}") suite_where="one GPU"; fi
  suite_tests elastic test_elastic test_shards test_elastic_joins
  suite_tests collectives test_groups # messages, groups that are split, counts
  suite_tests faults test_left_messages test_lost test_mismatch test_failed_saves
  if [ -n "$double" ]; then
    suite_tests_gpt build/plain/gpt.cu --batch 1 --context 2 --layers 1 --heads 1 --channels 4 --steps 100
    start "gpt, with and without cddp, the double" 300 env HOSTCUDA_DELAY_US=0 bash -c "$(declare -f gpt_speed); gpt_speed \"\$@\"" - \
      build/plain/gpt_speed.cu --batch 1 --context 4 --layers 1 --heads 1 --channels 8 --steps 16
  else suite_tests_gpt $bin/gpt --batch 2 --steps 8000; fi
  suite_tests sharded test_sharded_states test_parts
  suite_tests faults test_stopped test_own_shares test_injection test_blocking_setting test_device_memory
  suite_tests collectives test_collectives test_means test_streams
  suite_tests graphs test_beside_captures test_graph test_step_graphs test_graph_failures test_captured_adamw
  suite_tests steps test_set_stream test_steps
  suite_tests threads test_destroyed_first test_left_first test_leaving
  [ -z "$double" ] || { collect && return; } # on the double ninja test runs the rest
  suite_tests ddp test_uneven_and_sparse test_training_masters test_adamw test_checkpoints test_beside_a_model test_empty
  suite_tests ddp test_training test_training_options test_training_staged
  suite_tests elastic test_lost_in_step test_late_handle test_follows_stream test_joined_devices test_loads_beside test_plain_beside
  suite_tests faults test_failed_copies
  suite_tests graphs test_refused_captures test_halves
  suite_tests collectives test_hosts test_blocking_launches
  suite_tests faults test_failing_hosts test_device_failures
  suite_tests ddp test_training_over_hosts test_blocking_launches
  if [ -n "${LLMC:-}" ]; then must='^the same losses' start "llm.c" 300 tests/gpu/llmc.sh "$LLMC" # a copy of its repository
  else row skip "llm.c" "LLMC names no copy of llm.c's repository"; fi
  collect
}

# --- checks ---

# For ranks that share a GPU: they are to find no way to each other but sockets.
apart=(env NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_MNNVL_ENABLE=0 NCCL_IB_DISABLE=1)

# Of MIG's parts CUDA sees one, and CUDA_VISIBLE_DEVICES may hide some.
count_gpus() { # into most
  most=$gpus
  [ ! -e $bin/gpu.stamp ] || most=$(timeout 60 $bin/gpu devices)
  [[ $most =~ ^[0-9]+$ ]] || most=$gpus
}

two_ranks() { # MODE...: each by two NCCL ranks, on two GPUs or sharing one
  local what way=() word=()
  if [ "$most" -lt 2 ]; then
    way=("${apart[@]}") word=(share)
    [ -n "${verdict[2 ranks, nccl, one GPU]:-}" ] || share_gpu 2
    if [ "${verdict[2 ranks, nccl, one GPU]:-}" != ok ]; then
      for what in "$@"; do row skip "$what, 2 ranks" "two NCCL ranks do not work on one GPU here"; done
      return
    fi
  fi
  for what in "$@"; do try "$what, 2 ranks" 90 "${way[@]}" $bin/gpu "$what" 2 nccl "${word[@]}"; done
}

share_gpu() { # RANKS: NCCL ranks on one GPU
  soft=1
  try "$1 ranks, nccl, one GPU" 100 "${apart[@]}" $bin/gpu check "$1" nccl share
  soft=''
}

quick() {
  try "self, 1 rank with NCCL" 60 env GPU_ALONE=1 $bin/gpu self 1
  try "1 rank, nccl" 60 $bin/gpu check 1 nccl
  try "1 rank with NCCL" 60 env GPU_ALONE=1 $bin/gpu check 1 nccl # start and end of a communicator
  must='^Loss on rank 0: [0-9]' try "toy" 60 $bin/toy
  must='^Loss on rank 1: [0-9]' try "toy, 2 ranks, one GPU" 60 $bin/toy -n 2 --backend cpu
  share_gpu 2
  two_ranks lost outlive
}

checks() {
  local n log huge=() what
  [ "$memory" -lt 16000 ] || huge=(env HUGE=1) # more than 2^31 elements
  try "kernels" 200 "${huge[@]}" $bin/kernels
  for n in 2 4; do try "$n ranks, cpu, one GPU" 100 $bin/gpu check $n cpu share; done
  for n in 2 4 8; do
    if [ "$most" -ge "$n" ]; then try "$n ranks, nccl, $n GPUs" 100 $bin/gpu check $n nccl
    else row skip "$n ranks, nccl, $n GPUs" "CUDA sees $most"; fi
  done
  for log in "$out"/log/1-rank--nccl.log "$out"/log/2-ranks--nccl-*.log; do
    n=$(grep -h -m 1 '^graph of a step' "$log" 2>/dev/null) || continue
    row info "graph of a step, ${log##*/}" "${n#*: }  (expected: 4 for one rank; with NCCL a few more for each bucket)"
  done
  try "sharded, 1 rank" 60 $bin/gpu sharded 1
  try "sharded, 2 ranks, cpu, one GPU" 60 $bin/gpu sharded 2 cpu share
  if [ "$most" -ge 2 ]; then try "contexts, 2 ranks" 60 $bin/gpu contexts 2 nccl
  else row skip "contexts, 2 ranks" "CUDA sees $most"; fi
  for what in outlive replay; do
    try "$what, 1 rank" 60 $bin/gpu $what 1
    try "$what, 1 rank with NCCL" 60 env GPU_ALONE=1 $bin/gpu $what 1
  done
  must='and the same on all ranks' try "linear" 60 $bin/linear
  must='^broadcast, rank 0: 1 10' try "collectives" 60 $bin/collectives
  must='^test accuracy: (9[0-9]|100)' try "digits" 200 $bin/digits
  must='^step 800/800  loss [12]\.' try "gpt" 100 $bin/gpt
  must='^ +1  [0-9.]+ ' try "data_parallel" 100 $bin/data_parallel -n $((most > 7 ? 8 : most > 3 ? 4 : most > 1 ? 2 : 1))
  two_ranks sharded lost0 lostfree replay self lone
  share_gpu 4
}

# --- sanitize ---

sanitize() {
  local tool=compute-sanitizer r memcheck
  local must='SUMMARY: 0 (errors|hazards)' meet=unix://cddp-gpu-$$
  for r in "$cuda/bin/$tool" "$cuda/compute-sanitizer/$tool"; do
    command -v $tool >/dev/null || [ ! -x "$r" ] || PATH=$PATH:${r%/*}
  done
  command -v $tool >/dev/null || { row skip $tool "is not installed" && return; }
  # A rank must be the process that the sanitizer starts, so it gets what a launcher would tell it.
  memcheck=("$tool" --launch-timeout 0 --tool memcheck --report-api-errors no --error-exitcode 9)
  for r in 0 1; do
    start "memcheck, rank $r of 2, cpu" 300 env RANK=$r WORLD_SIZE=2 LOCAL_RANK=$r LOCAL_WORLD_SIZE=2 \
      GPU_MEET=$meet "${memcheck[@]}" $bin/gpu check 2 cpu share
  done
  start "memcheck, kernels" 400 "${memcheck[@]}" $bin/kernels
  start "racecheck, kernels" 400 "${memcheck[@]/memcheck/racecheck}" $bin/kernels
  start "memcheck, 1 rank, nccl" 300 env RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 \
    "${memcheck[@]}" $bin/gpu check 1 nccl
  collect
}

# --- bench ---

torch_step() { # the step of `gpu bench` in PyTorch, alone and with DDP on one rank over NCCL
  cat <<'END'
import statistics, torch, torch.distributed as dist
steps = {}
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
torch.set_float32_matmul_precision("highest")
nn, dev = torch.nn, torch.device("cuda:0")
x, label = torch.randn(128, 784, device=dev), torch.zeros(128, dtype=torch.long, device=dev)
for name in "plain", "ddp":
    net = nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)).to(dev)
    if name == "ddp":
        net = nn.parallel.DistributedDataParallel(net, device_ids=[0])
    sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
    taken = []
    for r in range(8):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        for i in range(50):
            nn.functional.cross_entropy(net(x), label).backward()
            sgd.step()
            sgd.zero_grad(set_to_none=False)
        b.record()
        b.synchronize()
        taken.append(a.elapsed_time(b) / 50)
    steps[name] = statistics.median(taken[1:])
    print(f"torch_{name}_step {steps[name]:.4f} ms", flush=True)
print(f"torch_cost {100 * (steps['ddp'] / steps['plain'] - 1):.1f} %", flush=True)
dist.destroy_process_group()
END
}

# The network of examples/gpt.cu at its defaults in PyTorch (tests/bench/gpt_torch.py): tokens, which are bytes, a second, alone
# and with DDP on one rank.
torch_gpt() {
  cat <<'END'
import sys, time, torch, torch.distributed as dist
sys.path.insert(0, "tests/bench")
import gpt_torch as G
from torch import nn
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
torch.set_float32_matmul_precision("highest")
text = torch.tensor(list(open("examples/data/shakespeare.txt", "rb").read()), device="cuda")
span = torch.arange(G.CONTEXT + 1, device="cuda")
speeds = {}
for name in "plain", "ddp":
    torch.manual_seed(1)
    net = G.GPT().to("cuda")
    if name == "ddp":
        net = nn.parallel.DistributedDataParallel(net, device_ids=[0])
    adamw = torch.optim.AdamW(net.parameters(), fused=True, lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(1100):
        if step == 100:
            torch.cuda.synchronize()
            start = time.perf_counter()
        windows = text[torch.randint(len(text) - G.CONTEXT, (G.BATCH, 1), device="cuda") + span]
        loss = nn.functional.cross_entropy(net(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1)
        adamw.step()
        adamw.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    speeds[name] = 1000 * G.BATCH * G.CONTEXT / (time.perf_counter() - start)
    print(f"torch_gpt_{name} {speeds[name]:.0f} tokens/s", flush=True)
print(f"torch_gpt_cost {100 * (speeds['plain'] / speeds['ddp'] - 1):.1f} %", flush=True)
dist.destroy_process_group()
END
}

# PROGRAM OPTION...: gpt_speed.cu with and without cddp, three times in turn: the medians. All runs have the same weights.
gpt_speed() {
  local r way line all=
  for r in 1 2 3; do
    for way in -uGPT_PLAIN GPT_PLAIN=1; do
      line=$(env "$way" "$@" 2>&1) || { echo "$line" && return 1; }
      line=$(grep -E '^gpt_|^rank 0 weights' <<<"$line" | tr '\n' ' ')
      echo "run $r: $line"
      all+=$line$'\n'
    done
  done
  awk '
    function median(k,   a, b, c) {
      a = speed[k, 1]; b = speed[k, 2]; c = speed[k, 3]
      return a < b ? (b < c ? b : a < c ? c : a) : a < c ? a : b < c ? c : b
    }
    NF == 0 { next }
    $1 !~ /^gpt_(ddp|plain)$/ || !($2 > 0) || $7 == "" || (hash != "" && $7 != hash) { bad = 1 }
    { speed[$1, ++runs[$1]] = $2; hash = $7 }
    END {
      if (bad || runs["gpt_ddp"] != 3 || runs["gpt_plain"] != 3) { print "FAIL: no speed, or other weights"; exit 1 }
      printf "gpt_plain %.0f tokens/s\ngpt_ddp %.0f tokens/s\n", median("gpt_plain"), median("gpt_ddp")
      printf "gpt_cost %.1f %%\n", 100 * (median("gpt_plain") / median("gpt_ddp") - 1)
    }' <<<"$all"
}

# ROW one|several NAME...: the lines 'NAME VALUE UNIT' of its log as rows. Those that fall short of what is expected are warnings; a
# NAME that the log of a command without a failure lacks, and a value that is no number, are failures.
figures() {
  local of=$1 ranks=$2 log=$out/log/${1//[^a-zA-Z0-9_]/-}.log name value unit want state found=' '
  shift 2
  [[ ${verdict[$of]:-skip} != skip ]] || return
  while read -r name value unit; do
    want='' state=info found+="$name "
    case $name in
    copy) want="2700 or more on an H100, 3800 on an H200: 80 % of the memory's peak" ;;
    sgd | adamw) want="90 % of copy, or more" ;;
    gpt_ddp) want="above torch_gpt_ddp" ;;
    plain_step) want="about torch_plain_step" ;;
    ddp_step) [ "$ranks" = one ] && want="at most 3 % above plain_step" ;;
    gpt_plain | torch_* | nccl_alone_call | nccl_blocking_call | sum_alone) want="nothing: for comparison" ;;
    sgd_share | adamw_share) want="90 or more" && awk "BEGIN { exit !($value < 90) }" && state=warn ;;
    ddp_cost) [ "$ranks" = one ] && want="3 or less, and not above torch_cost" &&
      awk "BEGIN { exit !($value > 3) }" && state=warn ;;
    gpt_cost) want="3 or less, and not above torch_gpt_cost" && awk "BEGIN { exit !($value > 3) }" && state=warn ;;
    nccl_call) want="75 or less" && awk "BEGIN { exit !($value > 75) }" && state=warn ;;
    overlap) want="50 or more" && awk "BEGIN { exit !($value < 50) }" && state=warn ;;
    esac
    [[ $value = *[0-9]* ]] || state=FAIL
    row $state "$name" "$value $unit${want:+  (expected: $want)}"
  done < <(grep -a -E '^[a-z_]+ -?([0-9.]+|nan|inf) ' "$log")
  [ "${verdict[$of]}" = ok ] || return
  for name in "$@"; do
    [[ $found = *" $name "* ]] || row FAIL "$name" "no line of $log has it"
  done
}

bench() {
  local torch=(env "LD_LIBRARY_PATH=$callers_libraries" python3 -c) why
  must='^copy ' try "measurements" 60 $bin/gpu bench
  figures "measurements" one copy sgd sgd_share adamw adamw_share plain_step ddp_step ddp_cost nccl_call nccl_alone_call \
    nccl_blocking_call
  try "gpt, with and without cddp" 100 bash -c "$(declare -f gpt_speed); gpt_speed \"\$@\"" - $bin/gpt_speed --steps 3200
  figures "gpt, with and without cddp" one gpt_plain gpt_ddp gpt_cost
  if [ "$most" -ge 2 ]; then
    try "overlap, 2 ranks" 60 $bin/gpu overlap 2 nccl
    figures "overlap, 2 ranks" several plain_step ddp_step ddp_cost sum_alone overlap
  else row skip "overlap, 2 ranks" "CUDA sees $most: two ranks on one only take turns"; fi
  if ! why=$(timeout 60 "${torch[@]}" 'import torch; assert torch.cuda.is_available(), "it sees no GPU"' 2>&1); then
    row skip "PyTorch" "not measured: ${why##*$'\n'}"
    return
  fi
  try "PyTorch" 90 "${torch[@]}" "$(torch_step)"
  figures "PyTorch" one torch_plain_step torch_ddp_step torch_cost
  try "PyTorch, gpt" 90 "${torch[@]}" "$(torch_gpt)"
  figures "PyTorch, gpt" one torch_gpt_plain torch_gpt_ddp torch_gpt_cost
}

trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
if [ -z "$double" ]; then
  find_gpu
  find_libraries
else echo "$id|the double, $id" >$out/rows/head; fi

begin_phase() { # NUMBER [SECONDS]: without a number of seconds it gets what the call has left
  phase=$1 rows=0 part_end=$((SECONDS + ${2:-1000000}))
  rm -f "$out/rows/$1"-*
}

for p in $phases; do
  case $p in
  build)
    begin_phase 1
    build tests/gpu/{kernels,gpu,gpt_speed}.cu examples/{toy,linear,collectives,digits,gpt,data_parallel}.cu
    ;;
  build-bench) begin_phase 1 && build tests/gpu/{gpu,gpt_speed}.cu ;;
  build-suite) begin_phase 6 && build_suite ;;
  suite) begin_phase 7 && { [ -n "$double" ] || count_gpus; } && suite ;;
  quick) begin_phase 2 150 && count_gpus && quick ;;
  bench) begin_phase 3 200 && count_gpus && bench ;;
  checks) begin_phase 4 300 && count_gpus && checks ;;
  sanitize) begin_phase 5 && sanitize ;;
  esac
  save_logs
done
exit 0
