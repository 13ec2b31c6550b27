#!/bin/bash
# A C program as the ranks of PyTorch's torchrun, whose agent serves the store.
#
# Three ranks must meet in the agent's store, with MASTER_ADDR and with --standalone, in rank 0's own
# store, and again after a restart, when the first attempt's keys are still there. The other way round, a PyTorch program runs as
# the ranks of cddprun. Needs a torchrun of PyTorch 2.2 or later: $TORCHRUN, or the one in PATH, with its
# python beside it; skipped without.
set -u
cd "$(dirname "$0")/../.." || exit 1
torchrun=${TORCHRUN:-$(command -v torchrun)}
python=$(dirname "${torchrun:-/none/}")/python3

fail() { echo "$*"; exit 1; }
[ -n "$torchrun" ] || { echo "SKIP: torchrun is not installed"; exit 77; }
[ -x "$python" ] || python=python3
version=$("$python" -c 'import torch, torch.distributed as d; assert d.is_available(); print(torch.__version__)' 2>&1) ||
  { echo "SKIP: $python cannot import torch.distributed"; exit 77; }
case $version in 1.* | 2.[01].*) echo "SKIP: this is for PyTorch 2.2 and later, here is $version"; exit 77 ;; esac

work=$(mktemp -d "${TMPDIR:-/tmp}/cddp-torchrun.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
export CDDP_TIMEOUT_S=40 OPENBLAS_NUM_THREADS=1
cc -O2 examples/toy.c -o "$work/toy" -lpthread -lm || fail "toy does not compile"

check() { # NAME: the output is that of three ranks that met
  local r
  for r in 0 1 2; do
    [ "$(grep -c -E "Loss on rank $r: " "$work/out")" = 1 ] || { cat "$work/out"; fail "$1: rank $r"; }
  done
  echo "$1: ok"
}

under_torchrun() { # NAME OPTIONS...
  local name=$1
  shift
  timeout -k 5 60 "$torchrun" --no-python --nproc-per-node 3 "$@" "$work/toy" >"$work/out" 2>&1 ||
    { cat "$work/out"; fail "$name: exit code $?"; }
  check "$name"
}

port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
under_torchrun "with MASTER_ADDR and MASTER_PORT" --master-addr 127.0.0.1 --master-port "$port"
under_torchrun "standalone" --standalone
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 under_torchrun "where rank 0 serves the store itself" --standalone

# The other way round: a PyTorch program as the ranks of cddprun.
cat >"$work/sum.py" <<'END'
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(2) * (dist.get_rank() + 1)
dist.all_reduce(x)
print("sum", int(x[0]))
END
cc -O2 examples/cddprun.c -o "$work/cddprun" -lpthread -lm || fail "cddprun does not compile"
timeout -k 5 60 "$work/cddprun" -n 3 --serve-store "$python" "$work/sum.py" >"$work/out" 2>&1 ||
  { cat "$work/out"; fail "PyTorch under cddprun: exit code $?"; }
[ "$(grep -c -x '\[[012]\] sum 6' "$work/out")" = 3 ] || { cat "$work/out"; fail "PyTorch under cddprun"; }
echo "PyTorch under cddprun: ok"

# A restart meets in the same store, where the first attempt's keys still are.
cat >"$work/second" <<'END'
#!/bin/sh
"$1" || exit 2
[ "$TORCHELASTIC_RESTART_COUNT" = 1 ]
END
chmod +x "$work/second"
timeout -k 5 60 "$torchrun" --standalone --max-restarts 1 --no-python --nproc-per-node 3 "$work/second" "$work/toy" \
  >"$work/both" 2>&1 || { cat "$work/both"; fail "after a restart: exit code $?"; }
[ "$(grep -c '^Loss on rank 2: ' "$work/both")" = 2 ] || { cat "$work/both"; fail "after a restart: not two runs"; }
echo "after a restart: ok"
