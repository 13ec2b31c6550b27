#!/bin/bash
# examples/gpt.c agrees with PyTorch.
#
# gpt.c trains a few steps and saves a checkpoint. gpt_torch.py loads it into a GPT-2 written with
# torch.nn, and computes the loss of the next batch; gpt.c resumes and prints it too: the two differ by
# less than 1e-4. Needs $PYTHON, or python3, with torch and safetensors; skipped without.
set -u
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3}

fail() { echo "$*"; exit 1; }
"$python" -c 'import torch, safetensors.torch' 2>/dev/null ||
  { echo "SKIP: $python cannot import torch and safetensors"; exit 77; }
work=$(mktemp -d "${TMPDIR:-/tmp}/cddp-gpt.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT

cc -O2 examples/gpt.c -o "$work/gpt" -lopenblas -lpthread -lm || fail "gpt.c does not compile"
options="--shards 2 --batch 4 --context 32 --layers 2 --channels 64 --sample 1"
# shellcheck disable=SC2086
timeout 60 "$work/gpt" -n 2 --steps 20 $options --save "$work/model" || fail "gpt.c fails"
# shellcheck disable=SC2086
timeout 60 "$work/gpt" -n 2 --steps 21 $options --resume "$work/model" >"$work/out" || fail "it does not resume"
here=$(sed -n 's,^step 21/21  loss \([0-9.]*\).*,\1,p' "$work/out")
there=$("$python" tests/peers/gpt_torch.py "$work/model" examples/data/shakespeare.txt 20 2 4 32 4) || fail "PyTorch fails"
echo "loss of step 21: $here here, $there in PyTorch"
awk -v a="$here" -v b="$there" 'BEGIN { exit !(a > 1 && a - b < 1e-4 && b - a < 1e-4) }' || fail "that is not the same"
