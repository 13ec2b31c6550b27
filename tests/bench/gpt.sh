#!/bin/bash
# examples/gpt.c at its defaults, bytes of text a second: 2 ranks, against two copies of one rank that run at the same time and
# know nothing of each other, a core each, and against PyTorch. Medians of ROUNDS, in turns.
#
#   tests/bench/gpt.sh [ROUNDS] [STEPS]      5 and 60; $PYTHON, or python3, with torch
set -u
cd "$(dirname "$0")/../.." || exit 1
rounds=${1:-5} steps=${2:-60} python=${PYTHON:-python3} out=build/bench
mkdir -p "$out"
"${CC:-cc}" -O3 -march=native examples/gpt.c -o "$out/gpt" -lopenblas -lpthread -lm || exit 1
"$python" -c 'import torch' 2>/dev/null || { echo "$python cannot import torch: without PyTorch"; python=; }
read -r one two < <(taskset -cp $$ | sed 's/.*: //; s/[-,]/ /') || exit 1

speed() { # COMMAND...: bytes a second of its last progress line
  "$@" --steps "$steps" --sample 1 | sed -n 's/.*loss [0-9.]*  \([0-9]*\) bytes.*/\1/p' | tail -n 1
}
for ((r = 0; r < rounds; r++)); do
  echo "ranks $(speed "$out/gpt" -n 2)"
  speed taskset -c "$one" "$out/gpt" -n 1 >"$out/gpt.first" &
  second=$(speed taskset -c "$two" "$out/gpt" -n 1)
  wait
  echo "copies $(($(cat "$out/gpt.first") + second))"
  [ -z "$python" ] || echo "torch $(timeout 300 "$python" tests/bench/gpt_torch.py 2 "$steps" 2>/dev/null | awk '/^gpt torch/ { print $3 }')"
done | tee "$out/raw-gpt"
sort -k1,1 -k2,2n "$out/raw-gpt" | awk '
  { n[$1]++; v[$1 " " n[$1]] = $2 }
  END {
    for (k in n) m[k] = v[k " " int((n[k] + 1) / 2)]
    printf "2 ranks %d bytes/s, two copies %d: %.2f\n", m["ranks"], m["copies"], m["ranks"] / m["copies"]
    if (m["torch"] > 0) printf "PyTorch, 2 ranks, %d bytes/s: cddp is %.1f times as fast\n", m["torch"], m["ranks"] / m["torch"]
  }'
