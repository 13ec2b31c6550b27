#!/bin/bash
# What a killed rank costs: 100 steps on 2 ranks, of which rank 1 is killed in step 55 by SIGKILL, once, against the same
# run undisturbed. cddp: an elastic model, cddp_spawn_elastic starts the rank again. PyTorch: torchrun --max-restarts, which
# starts all ranks again, from a checkpoint of every 10 or every 50 steps.
#
#   tests/bench/lost.sh [ROUNDS]      $PYTHON, or python3, with torch; medians of ROUNDS (3)
set -u
cd "$(dirname "$0")/../.." || exit 1
rounds=${1:-3} python=${PYTHON:-python3} out=build/bench steps=100 lost=55
mkdir -p "$out"
work=$(mktemp -d "${TMPDIR:-/tmp}/cddp-lost.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
"${CC:-cc}" -O3 -march=native -D_GNU_SOURCE tests/bench/step.c -o "$out/step-lost" -lopenblas -lpthread -lm || exit 1
"$python" -c 'import torch' 2>/dev/null || { echo "$python cannot import torch: cddp alone"; python=; }

now() { date +%s%N; }
cddp() { # LOST: seconds
  "$out/step-lost" --steps $steps --lost "$1" 2>>"$work/err" | awk '/^step lost/ { print $3 }'
}
torch() { # LOST EVERY: seconds
  local start
  rm -rf "$work/saved" && mkdir "$work/saved" && start=$(now)
  OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 timeout 300 "$python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    --max-restarts 1 tests/bench/lost_torch.py "$1" $steps "$2" "$work/saved" >>"$work/err" 2>&1 || { echo failed; return; }
  awk -v ns=$(($(now) - start)) 'BEGIN { printf "%.3f\n", ns / 1e9 }'
}
for ((r = 0; r < rounds; r++)); do
  for l in -1 $lost; do
    echo "cddp - $l $(cddp "$l")"
    [ -z "$python" ] || for every in 10 50; do echo "PyTorch $every $l $(torch "$l" $every)"; done
  done
done | tee "$work/raw"
echo
echo "| $steps steps, a rank killed in step $lost | undisturbed, s | killed, s | lost, s |"
echo "|---|---|---|---|"
sort "$work/raw" | awk -v rounds="$rounds" '
  function median(key,   n, i, j, t, v) {
    n = split(all[key], v, " ")
    for (i = 1; i <= n; i++) for (j = i + 1; j <= n; j++) if (v[j] + 0 < v[i] + 0) { t = v[i]; v[i] = v[j]; v[j] = t }
    return v[int((n + 1) / 2)]
  }
  $4 + 0 > 0 { all[$1 " " $2 " " $3] = all[$1 " " $2 " " $3] " " $4; who[$1 " " $2] = 1 }
  END {
    for (w in who) {
      split(w, part, " ")
      label = part[1] == "cddp" ? "cddp, elastic" : "PyTorch, torchrun --max-restarts, checkpoint each " part[2] " steps"
      a = median(w " -1")
      for (key in all) { split(key, k, " "); if (k[1] " " k[2] == w && k[3] != "-1") b = median(key) }
      printf "| %s | %.2f | %.2f | %.2f |\n", label, a, b, b - a
    }
  }' | sort
