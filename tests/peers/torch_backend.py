"""What PyTorch's own tests leave out of examples/torch: other types and layouts, unequal sizes, refusals, deaths, hosts.

  torch_backend.py RANKS [HOSTS]      forks RANKS ranks, as if on HOSTS hosts (1)
  torchrun ... torch_backend.py       the same checks on torchrun's ranks

Results are compared with gloo's, bit for bit, where gloo has the operation.
"""
import datetime
import os
import re
import signal
import socket
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples/torch"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: E402
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

import cddp_torch  # noqa: E402

Op = dist.ReduceOp


def equal(a, b):
    assert a.dtype == b.dtype and torch.equal(a, b), f"{a} is not {b}"


def refused(words, call, *args, **options):
    try:
        call(*args, **options)
    except (RuntimeError, ValueError) as e:
        assert re.search(words, str(e)), f"{e} lacks: {words}"
        return
    raise AssertionError(f"no error with: {words}")


def reductions(rank, ranks, gloo):
    for dtype in [torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64]:
        x = (torch.arange(1000) % 5 + rank % 2).to(dtype)
        for op in [Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX]:
            a, b = x.clone(), x.clone()
            dist.all_reduce(a, op)
            dist.all_reduce(b, op, group=gloo)
            equal(a, b)
    a = torch.full((3,), float(rank))
    dist.all_reduce(a, Op.AVG)
    equal(a, torch.full((3,), (ranks - 1) / 2))
    a = torch.tensor([rank == 0, False, True])
    dist.all_reduce(a)
    equal(a, torch.tensor([True, False, True]))
    a = torch.arange(6.0).reshape(2, 3).t()  # not contiguous
    dist.all_reduce(a)
    equal(a, torch.arange(6.0).reshape(2, 3).t() * ranks)
    refused("cddp lacks reductions of Short", dist.all_reduce, torch.zeros(2, dtype=torch.int16))
    s = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (10,))
    t = s.clone()
    dist.all_reduce(s)
    dist.all_reduce(t, group=gloo)
    equal(s.to_dense(), t.to_dense())


def movements(rank, ranks, gloo):
    for x in [torch.tensor([1 + 2j, rank + 0j]), torch.full((3,), rank, dtype=torch.int16), torch.empty(0)]:
        dist.broadcast(x, ranks - 1)
        assert x.numel() == 0 or x[-1].real == ranks - 1
    parts = [torch.full((r + 1, 2), -1) for r in range(ranks)]  # unequal
    dist.all_gather(parts, torch.full((rank + 1, 2), rank))
    for r in range(ranks):
        equal(parts[r], torch.full((r + 1, 2), r))
    sends = [torch.full((rank + r,), 10 * rank + r) for r in range(ranks)]
    gets = [torch.empty(rank + r, dtype=torch.int64) for r in range(ranks)]
    dist.all_to_all(gets, sends)
    for r in range(ranks):
        equal(gets[r], torch.full((rank + r,), 10 * r + rank))
    whole = torch.empty(2 * ranks)
    dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))
    equal(whole, torch.arange(ranks).repeat_interleave(2).float())
    one = torch.empty(2)
    dist.reduce_scatter_tensor(one, whole)
    equal(one, torch.full((2,), float(rank * ranks)))
    a, b = torch.ones(3), torch.ones(5)
    with dist._coalescing_manager():
        dist.all_reduce(a)
        dist.all_reduce(b)
    equal(torch.cat([a, b]), torch.full((8,), float(ranks)))
    refused("not .* times", dist.all_gather_into_tensor, torch.empty(1), torch.empty(2))


def works(rank, ranks, gloo):
    x = torch.ones(1000)
    equal(dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] * 2).wait(), x * 2)
    forgotten = [torch.ones(10) for _ in range(200)]
    for t in forgotten:
        dist.all_reduce(t, async_op=True)  # nobody waits
    dist.barrier()
    for t in forgotten:
        equal(t, torch.full((10,), float(ranks)))
    if rank == 0:
        got = torch.empty(1)
        work = dist.irecv(got, 1, tag=7)
        refused("Timed out|not finished", work.wait, datetime.timedelta(milliseconds=50))
        assert not work.is_completed()
        refused("cddp lacks futures", work.get_future)
        dist.barrier()
        work.wait()
        assert got[0] == 5
        senders = sorted(dist.recv(got) for _ in range(ranks - 1))  # of any rank
        assert senders == list(range(1, ranks)), senders
    else:
        dist.barrier()
        if rank == 1:
            dist.send(torch.full((1,), 5.0), 0, tag=7)
        dist.send(torch.full((1,), float(rank)), 0)
    pair = dist.new_group([0, ranks - 1])
    if rank in (0, ranks - 1):
        x = torch.ones(1)
        dist.all_reduce(x, group=pair)
        assert x[0] == 2
    cddp_torch.monitored_barrier()
    if rank == 0:
        refused("Rank 0 timed out in monitoredBarrier .*Ranks 1.* failed", cddp_torch.monitored_barrier, None, 0.2, True)
    dist.barrier()  # the group is as before


def train(group, zero, hook):
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 1))
    ddp = DDP(net, process_group=group, bucket_cap_mb=0.01)
    if hook:
        ddp.register_comm_hook(group, hook)
    sgd = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, process_group=group, lr=0.01) if zero else \
        torch.optim.SGD(ddp.parameters(), lr=0.1)
    rank = dist.get_rank(group)
    batches = torch.utils.data.DataLoader(torch.randn(8 + 4 * rank, 20), batch_size=2, num_workers=1)  # forked
    with Join([ddp, sgd] if zero else [ddp]):
        for x in batches:
            ddp(x).square().mean().backward()
            sgd.step()
            sgd.zero_grad()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def models(rank, ranks, gloo):
    cddp = dist.new_group()
    for zero, hook in [(False, None), (True, None), (False, default_hooks.bf16_compress_hook)]:
        a = train(cddp, zero, hook)
        assert torch.allclose(a, train(gloo, zero, hook), rtol=1e-3, atol=1e-4 if hook is None else 1e-2)
        b = a.clone()
        dist.broadcast(b, 0)
        equal(a, b)


def death(rank, ranks):
    if rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.time()
    refused(f"rank {ranks - 1} .*(killed by signal 9|died|lost)", dist.all_reduce, torch.ones(3))
    assert time.time() - start < 20


def run(rank, ranks, hosts, port):
    if port:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if hosts > 1:
        os.environ["CDDP_HOST_ID"] = str(rank % hosts)
    torch.set_num_threads(1)
    dist.init_process_group("cddp", timeout=datetime.timedelta(seconds=60))
    gloo = dist.new_group(backend="gloo")
    for check in [reductions, movements, works, models]:
        check(rank, ranks, gloo)
        if rank == 0:
            print(f"{ranks} ranks, {hosts} hosts: {check.__name__}", flush=True)
    if port:
        death(rank, ranks)
    os._exit(0)  # gloo's orderly end can hang after a death


if __name__ == "__main__":
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 1, 0)
    count = int(sys.argv[1])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    args = (count, int(sys.argv[2]) if len(sys.argv) > 2 else 1, free)
    processes = torch.multiprocessing.start_processes(run, args, count, start_method="fork", join=False).processes
    for p in processes:
        p.join()
    codes = [p.exitcode for p in processes]
    sys.exit(codes != [0] * (count - 1) + [-signal.SIGKILL])
