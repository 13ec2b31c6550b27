"""Times the engines gloo and cddp in PyTorch, in turns: all_reduce, and a DDP step of step.c's network.

  torch_engines.py [--rounds N]       2 ranks, one thread each; medians of N rounds (7)

Prints for all_reduce and for the step what each engine takes, and what it adds to a step alone: wall time, and in
brackets the CPU time of both ranks, which tells more on a busy machine. view: with gradient_as_bucket_view=True, which
saves DDP's own copies of the gradients.
PYTHONPATH must name examples/torch, whose cddp_torch.py says how the engine is built.
"""
import os
import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist

BATCH, STEPS, ENGINES = 128, 3, ["gloo", "cddp"]
TIMES = {4: 400, 1 << 20: 20, 25 << 20: 2}  # bytes, calls in a row


def model():
    torch.manual_seed(42)
    nn = torch.nn
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


def timed(work, times):
    """Wall time of the slower rank, and CPU time of both, of one call."""
    dist.barrier()
    start = time.perf_counter(), time.process_time()
    for _ in range(times):
        work()
    wall, cpu = torch.tensor([time.perf_counter() - start[0]]), torch.tensor([time.process_time() - start[1]])
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return wall.item() / times, cpu.item() / times


def medians(works, rounds):
    """works: name -> (function, calls in a row). One round to warm up, then all of them in turns."""
    taken = {name: [] for name in works}
    for i in range(rounds + 1):
        for name, (work, times) in works.items():
            t = timed(work, times)
            if i > 0:
                taken[name].append(t)
    return {name: [statistics.median(column) for column in zip(*t)] for name, t in taken.items()}


def run(rank, port, rounds):
    import cddp_torch  # noqa: F401

    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= 2:
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    groups = {e: dist.new_group(backend=e) for e in ENGINES}
    for size, times in TIMES.items():
        x = torch.zeros(size // 4)
        t = medians({e: (lambda e=e: dist.all_reduce(x, group=groups[e]), times) for e in ENGINES}, rounds)
        if rank == 0:
            each = ", ".join(f"{e} {t[e][0] * 1e6:.1f} us ({t[e][1] * 1e6:.1f})" for e in ENGINES)
            print(f"all_reduce {size}: {each}, ratio {t['gloo'][0] / t['cddp'][0]:.1f} "
                  f"({t['gloo'][1] / t['cddp'][1]:.1f})", flush=True)

    x, label = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))
    ways = [(e, view) for view in (False, True) for e in ENGINES]
    ddp = torch.nn.parallel.DistributedDataParallel
    nets = {w: ddp(model(), process_group=groups[w[0]], gradient_as_bucket_view=w[1]) for w in ways}
    nets["alone"] = model()
    sgds = {k: torch.optim.SGD(n.parameters(), lr=0.01, momentum=0.9) for k, n in nets.items()}

    def step(k):
        torch.nn.functional.cross_entropy(nets[k](x), label).backward()
        sgds[k].step()
        sgds[k].zero_grad()

    t = medians({k: (lambda k=k: step(k), STEPS) for k in nets}, rounds)
    if rank == 0:
        print(f"step alone {t['alone'][0] * 1e3:.1f} ms ({t['alone'][1] * 1e3:.1f})")
        for w in ways:
            adds = [a - b for a, b in zip(t[w], t["alone"])]
            print(f"step {w[0]}{' view' if w[1] else ''} {t[w][0] * 1e3:.1f} ms ({t[w][1] * 1e3:.1f}), "
                  f"adds {adds[0] * 1e3:.1f} ms ({adds[1] * 1e3:.1f})", flush=True)
    dist.barrier()
    os._exit(0)  # an orderly end hangs at times in PyTorch 1.13


if __name__ == "__main__":
    count = int(sys.argv[sys.argv.index("--rounds") + 1]) if "--rounds" in sys.argv else 7
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    torch.multiprocessing.spawn(run, args=(free, count), nprocs=2)
