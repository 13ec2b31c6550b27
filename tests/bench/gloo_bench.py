"""Times gloo through PyTorch as collectives.c does: same sizes, buffers, iterations and output.

  gloo_bench.py --ranks N [--quick | --small | --start]      reduce_scatter is not in gloo
  gloo_bench.py --ranks N --rank R --master HOST PORT        one rank of several hosts
"""
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

KIB, MIB = 1 << 10, 1 << 20
SLAB = 512 * MIB
SIZES = [4, 64, KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 25 * MIB, 100 * MIB, 256 * MIB]
QUICK = {4, KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 25 * MIB}


def operation(op, rank, ranks):
    if op == "all_reduce":
        return dist.all_reduce
    if op == "broadcast":
        return lambda t: dist.broadcast(t, 0)
    if op == "all_gather":
        return lambda t: dist.all_gather(list(t.chunk(ranks)), t.chunk(ranks)[rank])
    return lambda t: dist.barrier()


def timed(fn, buffers, times, at):
    dist.barrier()
    start = time.perf_counter()
    for i in range(times):
        fn(buffers[(at + i) % len(buffers)])
    t = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t.item()


def measure(op, slab, size, rank, ranks, quick):
    count = max(size // 4, ranks) if op == "all_gather" else size // 4
    stride = (count * 4 + 127) // 128 * 32
    buffers = min(8 if size < MIB else max(8, 64 * MIB // size), SLAB // 4 // stride)
    views = [slab[i * stride : i * stride + count] for i in range(buffers)]
    fn, budget, times, spent, taken, at = operation(op, rank, ranks), 0.02 if quick else 0.06, 1, 0.0, [], 0
    timed(fn, views, buffers, 0)
    slab[: buffers * stride].zero_()
    if size <= 16 * KIB:
        while times < 4096 and timed(fn, views, times, 0) < 1e-3:
            times *= 2
    while len(taken) < 1000 and (len(taken) < 5 or spent < budget) and (len(taken) < 3 or spent < 1):
        t = timed(fn, views, times, at)
        at += times
        spent += t
        taken.append(t)
    return statistics.median(taken) / times * 1e6


def run(rank, ranks, port, options, host="127.0.0.1"):
    cores = sorted(os.sched_getaffinity(0))
    if ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    start = time.perf_counter()
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=ranks)
    dist.barrier()
    if "--start" in options:
        if rank == 0:
            print(f"gloo startup {ranks} 0 {(time.perf_counter() - start) * 1e6:.1f}", flush=True)
        dist.barrier()
        os._exit(0)
    slab = torch.zeros(SLAB // 4)
    for op in ["all_reduce", "broadcast", "all_gather", "barrier"]:
        for size in SIZES:
            if "--quick" in options and size not in QUICK or "--small" in options and size > KIB:
                continue
            if op == "barrier" and size != 4:
                continue
            us = measure(op, slab, size, rank, ranks, "--quick" in options)
            if rank == 0:
                print(f"gloo {op} {ranks} {0 if op == 'barrier' else size} {us:.4f}", flush=True)
    dist.barrier()
    os._exit(0)  # an orderly end hangs at times in PyTorch 1.13


if __name__ == "__main__":
    import socket

    n = int(sys.argv[sys.argv.index("--ranks") + 1])
    if "--rank" in sys.argv:
        at = sys.argv.index("--master")
        run(int(sys.argv[sys.argv.index("--rank") + 1]), n, sys.argv[at + 2], sys.argv, sys.argv[at + 1])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    torch.multiprocessing.spawn(run, args=(n, free, sys.argv), nprocs=n)
