#!/bin/bash
# Runs the targets of tests/fuzz/fuzz.c under libFuzzer with the address and undefined sanitizers; needs
# clang and its runtime (on Debian: clang, libclang-rt-dev).
#
#   tests/fuzz/fuzz.sh SECONDS [TARGET...]    each target for so long, one after the other
#   tests/fuzz/fuzz.sh merge [TARGET...]      takes what was found into tests/fuzz/corpus, minimised
#
# New inputs are kept in build/fuzz/TARGET, those that fail in build/fuzz/TARGET-crash-*. To see one
# again: build/asan/fuzz TARGET FILE
set -u
cd "$(dirname "$0")/../.." || exit 1

seconds=${1:?usage: tests/fuzz/fuzz.sh SECONDS|merge [TARGET...]}
case $seconds in merge) ;; *[!0-9]*) echo "how many seconds is $seconds?" >&2; exit 2 ;; esac
shift
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(sed -n 's/^ *{"\([a-z_]*\)", target_\1}.*/\1/p;
  s/^} targets\[\] = {{"\([a-z_]*\)", target_\1}.*/\1/p' tests/fuzz/fuzz.c)

export ASAN_OPTIONS=allocator_may_return_null=1
mkdir -p build/fuzz
failed=0
for t in "${targets[@]}"; do
  program=build/fuzz/fuzz-$t found=build/fuzz/$t
  mkdir -p "$found" "tests/fuzz/corpus/$t"
  clang -std=c11 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
    -DFUZZ_TARGET="target_$t" -Wno-unused-function tests/fuzz/fuzz.c -o "$program" -lpthread -lm || exit 1
  if [ "$seconds" = merge ]; then
    rm -rf "$found-small" && mkdir "$found-small"
    "$program" -merge=1 -max_len=4096 "$found-small" "tests/fuzz/corpus/$t" "$found" >"$found.log" 2>&1 || exit 1
    # the smallest ones first, a hundred of them: the rest is found again in seconds
    find "tests/fuzz/corpus/$t" -type f -name '[0-9a-f]*' -delete
    find "$found-small" -type f -size -5 -printf '%s %p\n' | sort -n | head -n 100 | cut -d' ' -f2- |
      xargs -r cp -t "tests/fuzz/corpus/$t"
    continue
  fi
  nice "$program" -max_total_time="$seconds" -max_len=4096 -timeout=20 -rss_limit_mb=2048 \
    -print_final_stats=1 -artifact_prefix="$found-" "$found" "tests/fuzz/corpus/$t" >"$found.log" 2>&1
  code=$?
  echo "$t: $(sed -n 's/^stat::number_of_executed_units: *//p' "$found.log") executions in $seconds s," \
    "$(find "$found" -type f | wc -l) inputs kept, exit code $code"
  if [ $code != 0 ]; then
    failed=1
    grep -E -m 3 'ERROR|runtime error|is false|Test unit written' "$found.log"
  fi
done
exit $failed
