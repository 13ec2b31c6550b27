#!/usr/bin/env python3
"""Writes golden_ddp.h: ToyModel parameters after training with PyTorch's DistributedDataParallel.

    python3 tests/peers/golden_ddp.py > tests/peers/golden_ddp.h        (needs torch with gloo)

Weights and data come from the generator below, which golden_ddp.c repeats: every number is a
small multiple of 1/64, so both sides start from the same bits.
"""
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

IN, HIDDEN, OUT, BATCH, STEPS, EVERY, RANKS = 10, 10, 5, 20, 20, 5, 2
CASES = [
    ("plain", dict(lr=0.05)),
    ("momentum", dict(lr=0.05, momentum=0.9)),
    ("nesterov", dict(lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01)),
    ("dampening", dict(lr=0.05, momentum=0.8, dampening=0.3)),
    ("maximize", dict(lr=0.01, momentum=0.5, maximize=True)),
]


def numbers(seed, count):
    """count multiples of 1/64 in [-1, 1), from a 64-bit linear congruential generator."""
    state, out = seed, []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out.append(((state >> 33) % 128 - 64) / 64)
    return torch.tensor(out, dtype=torch.float32)


class ToyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = torch.nn.Linear(IN, HIDDEN)
        self.net2 = torch.nn.Linear(HIDDEN, OUT)

    def forward(self, x):
        return self.net2(torch.relu(self.net1(x)))


def train(rank, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    for name, options in CASES:
        model = ToyModel()
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_(numbers(1 + i, p.numel()).view_as(p) / 2)
        ddp = DistributedDataParallel(model)
        sgd = torch.optim.SGD(ddp.parameters(), **options)
        for step in range(STEPS):
            seed = 1000 + step * RANKS + rank
            x = numbers(2 * seed, BATCH * IN).view(BATCH, IN)
            y = numbers(2 * seed + 1, BATCH * OUT).view(BATCH, OUT)
            sgd.zero_grad()
            torch.nn.functional.mse_loss(ddp(x), y).backward()
            sgd.step()
            if rank == 0 and (step + 1) % EVERY == 0:
                flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
                results.put((name, step + 1, flat.tolist()))
    if rank == 0:
        results.put(None)
    dist.barrier()
    dist.destroy_process_group()


def main():
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    port = 29400 + os.getpid() % 1000
    ranks = [context.Process(target=train, args=(r, port, results)) for r in range(RANKS)]
    for p in ranks:
        p.start()
    rows = {}
    while True:
        row = results.get()
        if row is None:
            break
        rows[row[0], row[1]] = row[2]
    for p in ranks:
        p.join()
    count = IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT
    print("/* Made by golden_ddp.py with PyTorch %s (gloo, %d processes); do not edit. */" %
          (torch.__version__.split("+")[0], RANKS))
    print("#ifndef GOLDEN_DDP_H\n#define GOLDEN_DDP_H\n")
    print("enum { GOLDEN_CASES = %d, GOLDEN_CHECKPOINTS = %d, GOLDEN_EVERY = %d, "
          "GOLDEN_PARAMS = %d };\n" % (len(CASES), STEPS // EVERY, EVERY, count))
    print("/* All parameters, flat, after each GOLDEN_EVERY steps. */")
    print("static const float golden_ddp[GOLDEN_CASES][GOLDEN_CHECKPOINTS][GOLDEN_PARAMS] = {")
    for name, options in CASES:
        print("    {/* %s: %s */" % (name, ", ".join("%s %s" % o for o in options.items())))
        for step in range(EVERY, STEPS + 1, EVERY):
            values = ["%.9gf" % v if "." in "%.9g" % v or "e" in "%.9g" % v else "%.1ff" % v
                      for v in rows[name, step]]
            print("     {/* after %d steps */" % step)
            for i in range(0, count, 6):
                print("      " + ", ".join(values[i:i + 6]) + ",")
            print("     },")
        print("    },")
    print("};\n\n#endif")


if __name__ == "__main__":
    sys.exit(main())
