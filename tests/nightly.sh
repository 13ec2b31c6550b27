#!/bin/bash
# The long runs, an hour or two: `ninja nightly` builds what they need first.
#
#   tests/nightly.sh [TEST...] [FUZZ_SECONDS]     tests that run first; seconds for each fuzz target, 600
#
# A failure names its seed; `build/plain/programs --seed SEED`, `build/plain/simulate SEED` and
# `build/plain/kills --seed SEED` run it again.
set -u
cd "$(dirname "$0")/.." || exit 1

tests=()
while [[ ${1:-} == build/* ]]; do tests+=("$1") && shift; done
seconds=${1:-600}
case $seconds in *[!0-9]*) echo "tests/nightly.sh [TEST...] [FUZZ_SECONDS]" >&2; exit 2 ;; esac
failed=0
run() { # NAME COMMAND...
  local name=$1 start=$SECONDS
  shift
  mkdir -p build/log
  if "$@" >"build/log/nightly-$name.log" 2>&1; then
    echo "ok     $name $((SECONDS - start)) s: $(tail -n 1 "build/log/nightly-$name.log")"
  else
    failed=1
    echo "FAIL   $name: build/log/nightly-$name.log ends in"
    tail -n 12 "build/log/nightly-$name.log" | cut -c 1-400 | sed 's/^/       | /'
  fi
}

fixed=()
setarch -R true 2>/dev/null && fixed=(setarch -R)
export ASAN_OPTIONS=allocator_may_return_null=1:detect_stack_use_after_return=1
export TSAN_OPTIONS=die_after_fork=0
run tests env TEST_TIMEOUT=600 tests/run.sh "${tests[@]+"${tests[@]}"}" tests/valgrind.sh:groups
run programs build/plain/programs --seed 10000 --seconds 3600
run nccl_programs build/plain/nccl_programs --seed 10000 --seconds 600
run kills build/plain/kills --seeds 1000
run programs-sweep build/plain/programs --sweep 1
run join env ROUNDS=300 ONLY=test_many build/plain/join
run join-descriptors env ROUNDS=600 ONLY=test_descriptors build/plain/join
run join-memory env ROUNDS=100 ONLY=test_memory_of_lost_processes build/plain/join
run simulate build/plain/simulate --seeds 10000
if command -v spin >/dev/null; then run models tests/models/models.sh
else echo "skip   models (needs spin)"; fi
run faults build/plain/faults --thorough
run late env LATE=40 ONLY=test_late_receiver build/plain/hosts
[ -s build/asan/missing ] || run programs-asan "${fixed[@]+"${fixed[@]}"}" build/asan/programs --seed 40000 --seconds 600
[ -s build/tsan/missing ] || run programs-tsan "${fixed[@]+"${fixed[@]}"}" build/tsan/programs --seed 60000 --seconds 600
[ -s build/asan/missing ] || run nccl_programs-asan "${fixed[@]+"${fixed[@]}"}" build/asan/nccl_programs --seed 40000 --seconds 300
[ -s build/tsan/missing ] || run nccl_programs-tsan "${fixed[@]+"${fixed[@]}"}" build/tsan/nccl_programs --seed 60000 --seconds 300
[ -s build/asan/missing ] || run kills-asan "${fixed[@]+"${fixed[@]}"}" build/asan/kills --seeds 100
[ -s build/asan/missing ] || run simulate-asan "${fixed[@]+"${fixed[@]}"}" build/asan/simulate --seeds 1000 100000
[ -s build/tsan/missing ] || run simulate-tsan "${fixed[@]+"${fixed[@]}"}" build/tsan/simulate --seeds 1000 200000
if command -v clang >/dev/null && clang -fsanitize=fuzzer -xc -c /dev/null -o /dev/null 2>/dev/null; then
  run fuzz tests/fuzz/fuzz.sh "$seconds"
else
  echo "skip   fuzz (needs clang)"
fi
if command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64 >/dev/null; then
  run aarch64 tests/aarch64.sh
else
  echo "skip   aarch64 (needs gcc-aarch64-linux-gnu and qemu-user)"
fi
if command -v bochs >/dev/null; then
  run avx512 tests/avx512.sh
else
  echo "skip   avx512 (needs bochs: tests/avx512.sh)"
fi
exit $failed
