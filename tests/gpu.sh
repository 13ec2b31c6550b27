#!/bin/bash
# Everything that needs a GPU: builds for the one at hand, runs the checks, then measures; ends in a table.
# Needs nvcc, nccl.h and at least one NVIDIA GPU; takes some minutes. Record what it prints in
# tests/gpu-results.md.
#
#   tests/gpu.sh            all
#   tests/gpu.sh checks     no measurements
#
# A row is 'ok', 'FAIL' or 'skip'; the logs are in build/gpu. Several NCCL ranks on one GPU are a trick
# (NCCL_HOSTID: each takes the other for another host and goes through sockets) that NCCL does not
# support: they have a deadline, and what they do says nothing about speed.
set -u
cd "$(dirname "$0")/.." || exit 1

command -v nvcc >/dev/null || { echo "tests/gpu.sh: nvcc is not installed" >&2; exit 77; }
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
[ -n "$gpu" ] || { echo "tests/gpu.sh: nvidia-smi finds no GPU here" >&2; exit 77; }
gpus=$(nvidia-smi -L | wc -l)
out=build/gpu
mkdir -p $out
rows=() failed=0

row() { # STATE NAME [REMARK]
  rows+=("$(printf '%-5s %-34s %s' "$1" "$2" "${3:-}")")
  printf '%s\n' "${rows[-1]}"
  [ "$1" != FAIL ] || failed=1
}

try() { # NAME SECONDS COMMAND...: a row for it; its output is in $out/NAME.log
  local name=$1 limit=$2 log start=$SECONDS
  log="$out/${1// /-}.log"
  shift 2
  if timeout -k 5 "$limit" "$@" >"$log" 2>&1 </dev/null; then
    row ok "$name" "$((SECONDS - start)) s"
  else
    row FAIL "$name" "$(grep -m 1 -E 'rank|error|FAIL|failed' "$log" | cut -c 1-120) ($log)"
    return 1
  fi
}

figures() { # LOG: its lines 'NAME VALUE UNIT' as rows
  local name value unit
  while read -r name value unit; do row "" "$name" "$value $unit"; done < <(grep -E '^[a-z_]+ [0-9.-]+ ' "$1")
}

torch_step() { # the step of `gpu bench` in PyTorch, alone and with DDP on one rank over NCCL
  cat <<'END'
import os, torch, torch.distributed as dist, statistics
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
torch.backends.cuda.matmul.allow_tf32 = False
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
    print(f"torch_{name}_step {statistics.median(taken[1:]):.4f} ms")
dist.destroy_process_group()
END
}

flags="-O3 -std=c++17 -arch=native -lnccl -lcublas"
for f in tests/kernels.cu tests/gpu.cu examples/{toy,linear,collectives,digits,data_parallel}.cu; do
  name=${f##*/}
  own=
  [ "$f" = tests/kernels.cu ] && own="-DCDDP_IMPLEMENTATION"
  # shellcheck disable=SC2086
  try "build $name" 600 nvcc $own "$f" -o "$out/${name%.cu}" $flags || exit 1
done

export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 # for ranks that share a GPU; those with one each: below
try "kernels" 300 $out/kernels
try "1 rank, nccl" 120 $out/gpu check 1 nccl
for n in 2 4; do
  try "$n ranks, nccl, one GPU" 120 $out/gpu check $n nccl share
  try "$n ranks, cpu, one GPU" 120 $out/gpu check $n cpu share
done
unset NCCL_P2P_DISABLE NCCL_SHM_DISABLE
for n in 2 4 8; do
  if [ "$gpus" -ge "$n" ]; then try "$n ranks, nccl, $n GPUs" 120 $out/gpu check $n nccl
  else row skip "$n ranks, nccl, $n GPUs" "there are $gpus"; fi
done
try "toy" 60 $out/toy
try "toy, 2 ranks, one GPU" 60 $out/toy -n 2 --backend cpu
try "linear" 60 $out/linear
try "collectives" 60 $out/collectives
try "digits" 300 $out/digits
try "data_parallel" 120 $out/data_parallel -n $((gpus > 7 ? 8 : gpus > 3 ? 4 : gpus > 1 ? 2 : 1))
if command -v compute-sanitizer >/dev/null; then
  try "memcheck, kernels" 600 compute-sanitizer --tool memcheck --error-exitcode 9 $out/kernels
  try "racecheck, kernels" 600 compute-sanitizer --tool racecheck --error-exitcode 9 $out/kernels
  try "memcheck, 1 rank" 600 compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 \
    $out/gpu check 1 nccl
else
  row skip "compute-sanitizer" "not installed"
fi

if [ "${1:-}" != checks ]; then
  try "measurements" 300 $out/gpu bench && figures "$out/measurements.log"
  grep -h '^graph of a step' "$out/1-rank,-nccl.log"
  if python3 -c 'import torch; exit(not torch.cuda.is_available())' 2>/dev/null; then
    torch_step >$out/step.py
    try "PyTorch" 300 python3 $out/step.py && figures "$out/PyTorch.log"
  else
    row skip "PyTorch" "python3 has no torch with CUDA"
  fi
fi

echo
echo "$(date -u +%F)  $gpu (of $gpus)  $(git rev-parse --short HEAD 2>/dev/null || echo "no commit")  nvcc $(nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
printf '%s\n' "${rows[@]}"
exit $failed
