#!/bin/bash
# PyTorch programs on cddp: the engine of examples/torch.
#
# Builds it by README's command, unless it is newer than its sources. Part of PyTorch's own tests must pass on 2 and 3
# ranks; then torch_backend.py: what those leave out. FULL=1 adds PyTorch's tests on gloo, torch_backend.py over two hosts
# and under torchrun, and all_reduce and a training step of both engines in turns (printed, not judged). Needs
# $PYTHON, or python3, with torch 2.5 or later, expecttest, numpy and ninja, and g++; skipped without.
set -u
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3}

fail() { echo "$*"; exit 1; }
PATH=$(dirname "$(command -v "$python")"):$PATH # a virtual environment's ninja
version=$("$python" -c 'import torch, torch.distributed as d; assert d.is_gloo_available(); print(torch.__version__)' 2>&1) ||
  { echo "SKIP: $python cannot import torch.distributed with gloo"; exit 77; }
case $version in 1.* | 2.[0-4].*) echo "SKIP: this is for PyTorch 2.5 and later, here is $version"; exit 77 ;; esac
"$python" -c 'import expecttest, numpy' 2>/dev/null ||
  { echo "SKIP: PyTorch's tests need its packages: pip install expecttest numpy"; exit 77; }
for tool in g++ ninja; do command -v $tool >/dev/null || { echo "SKIP: there is no $tool"; exit 77; }; done
[ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
  { echo "SKIP: there is no Python.h: apt-get install python3-dev"; exit 77; }
work=$(mktemp -d "${TMPDIR:-/tmp}/cddp-torch.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

library=examples/torch/cddp_backend-$version.so
if [ ! "$library" -nt cddp.h ] || [ ! "$library" -nt examples/torch/cddp_backend.cpp ]; then
  "$python" examples/torch/cddp_torch.py >"$work/build" 2>&1 || { tail -n 40 "$work/build"; fail "it does not build"; }
fi

tests="test_all_to_all_single_unequal_split test_all_to_all test_all_gather test_all_gather_coalesced_simple test_gather
  test_scatter_complex test_reduce_product test_all_reduce_coalesced_sum test_send_recv_any_source test_isend
  test_batch_isend_irecv_gloo test_barrier_timeout_full_group test_monitored_barrier_gloo test_accumulate_gradients_no_sync
  test_accumulate_gradients_no_sync_allreduce_hook test_DistributedDataParallelCPU test_ddp_logging_data_cpu
  test_all_to_all_single_equal_split test_all_to_all_full_group"
suite() { # ENGINE RANKS
  # shellcheck disable=SC2086
  "$python" tests/peers/torch_suite.py "$1" "$2" $tests >"$work/$1$2" 2>&1
  code=$?
  tail -n 1 "$work/$1$2"
  [ $code = 0 ] && grep -q -E ' (1[0-9]|20) passed, 0 failed' "$work/$1$2"
}
for ranks in 2 3; do
  suite cddp $ranks || { grep -v -E ' ok$' "$work/cddp$ranks" | tail -n 60; fail "PyTorch's tests on cddp"; }
done
[ -z "${FULL:-}" ] || suite gloo 2 || echo "gloo fails"

for how in "2" ${FULL:+"3 2"}; do # ranks, hosts
  # shellcheck disable=SC2086
  "$python" tests/peers/torch_backend.py $how 2>&1 || fail "torch_backend.py $how"
done
[ -n "${FULL:-}" ] || exit 0
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 tests/peers/torch_backend.py 2>&1 ||
  fail "under torchrun"
PYTHONPATH=examples/torch timeout 60 "$python" tests/bench/torch_engines.py --rounds 2
code=$? # 124: this machine is too busy for timings
[ $code = 0 ] || [ $code = 124 ] || fail "torch_engines.py: exit code $code"
