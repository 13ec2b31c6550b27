"""The training step of step.c in PyTorch: DistributedDataParallel over gloo on 2 ranks, and the same without it.

  step_torch.py [--rounds N] [--optim adamw]
prints 'step torch_alone MS', 'step torch_ddp MS' and 'step torch_update MS': all_reduce, optimizer and zeroing alone
"""
import os
import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist

BATCH, STEPS = 128, 10


def model():
    torch.manual_seed(42)
    nn = torch.nn
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


def train(net, sgd, x, label):
    dist.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        torch.nn.functional.cross_entropy(net(x), label).backward()
        sgd.step()
        sgd.zero_grad()
    t = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t.item() / STEPS * 1e3


def update(net, opt):
    """An all_reduce of all gradients in one piece, which gloo does fastest, and the step; without copies."""
    flat = torch.zeros(sum(p.numel() for p in net.parameters()))
    at = 0
    for p in net.parameters():
        p.grad = flat[at:at + p.numel()].view_as(p)
        at += p.numel()
    taken = []
    for _ in range(20):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(flat)
        flat.div_(2)
        opt.step()
        flat.zero_()
        t = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        taken.append(t.item() * 1e3)
    return statistics.median(taken)


def optimizer(net, adamw):
    if not adamw:
        return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    try:
        return torch.optim.AdamW(net.parameters(), lr=0.001, weight_decay=0.01, fused=True)
    except (RuntimeError, TypeError):  # before PyTorch 2.4: none for the CPU
        return torch.optim.AdamW(net.parameters(), lr=0.001, weight_decay=0.01)


def run(rank, port, rounds, adamw):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= 2:
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    x, label = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))
    nets = {"alone": model(), "ddp": torch.nn.parallel.DistributedDataParallel(model())}
    sgds = {k: optimizer(n, adamw) for k, n in nets.items()}
    taken = {k: [] for k in nets}
    for i in range(rounds + 1):
        for k, net in nets.items():
            t = train(net, sgds[k], x, label)
            if i > 0:
                taken[k].append(t)
    for k in nets:
        if rank == 0:
            print(f"step torch_{k} {statistics.median(taken[k]):.3f}", flush=True)
    alone = model()
    ms = update(alone, optimizer(alone, adamw))
    if rank == 0:
        print(f"step torch_update {ms:.3f}", flush=True)
    dist.barrier()
    os._exit(0)  # an orderly end hangs at times in PyTorch 1.13


if __name__ == "__main__":
    count = int(sys.argv[sys.argv.index("--rounds") + 1]) if "--rounds" in sys.argv else 7
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    adamw = sys.argv[-2:] == ["--optim", "adamw"]
    torch.multiprocessing.spawn(run, args=(free, count, adamw), nprocs=2)
