"""PyTorch's own tests of torch.distributed, on cddp or gloo.

  torch_suite.py cddp|gloo RANKS [test_NAME...]      prints 'ENGINE RANKS ranks: N passed, N failed, N skipped'

The tests are the class _DistTestBase of the installed torch.testing._internal.distributed.distributed_test. That file
reserves tests for gloo or MPI by name, because these alone have what the tests need (time-outs, monitored_barrier,
batches of messages, all_to_all of CPU tensors). cddp runs them too. dist.monitored_barrier refuses all engines but gloo: the tests call
cddp_torch.monitored_barrier. Ranks are forked; tests that need a GPU are skipped.
"""
import importlib.util
import os
import sys
import tempfile
import types
import unittest

ENGINE, RANKS, NAMES = sys.argv[1], sys.argv[2], sys.argv[3:]
folder = tempfile.TemporaryDirectory()
os.environ.update(BACKEND=ENGINE, WORLD_SIZE=RANKS, TEMP_DIR=folder.name, MASTER_ADDR="127.0.0.1",
                  INIT_METHOD=f"file://{folder.name}/rendezvous")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples/torch"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402

torch.set_num_threads(1)
if ENGINE == "cddp":
    import cddp_torch

    dist.monitored_barrier = cddp_torch.monitored_barrier
    for feature in DistTestCases.backend_feature.values():
        feature.add("cddp")

path = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test").origin
with open(path) as f:
    text = f.read()
text = text.replace('BACKEND != "gloo"', 'BACKEND not in {"gloo", "cddp"}')
text = text.replace('BACKEND == "gloo":', 'BACKEND in {"gloo", "cddp"}:')
text = text.replace('is_available({"gloo"})', 'is_available({"gloo", "cddp"})')
text = text.replace('BACKEND != "mpi", "Only MPI', 'BACKEND not in {"mpi", "cddp"}, "Only MPI')
tests = types.ModuleType("distributed_test")
tests.__file__ = path
sys.modules["distributed_test"] = tests
exec(compile(text, path, "exec"), tests.__dict__)


class Forked(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class Result(unittest.TextTestResult):
    passed = 0

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed += 1


suite = unittest.TestSuite(Forked(n) for n in NAMES or unittest.TestLoader().getTestCaseNames(Forked))
result = unittest.TextTestRunner(sys.stdout, verbosity=2, resultclass=Result).run(suite)
failed = len(result.failures) + len(result.errors)
print(f"{ENGINE} {RANKS} ranks: {result.passed} passed, {failed} failed, {len(result.skipped)} skipped", flush=True)
sys.exit(failed != 0)
