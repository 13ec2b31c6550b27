"""A run of 100 steps of step.c's network in PyTorch (DistributedDataParallel over gloo, SGD with momentum), of which rank 1
is killed in step LOST, once; torchrun starts all ranks again, and they go on from the last checkpoint.

  torchrun --nproc-per-node 2 --max-restarts 1 lost_torch.py LOST STEPS EVERY DIRECTORY    LOST -1: nobody is killed
"""
import os
import signal
import sys

import torch
import torch.distributed as dist

from step_torch import BATCH, model


def main():
    lost, steps, every = map(int, sys.argv[1:4])
    path = os.path.join(sys.argv[4], "checkpoint.pt")
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    net = torch.nn.parallel.DistributedDataParallel(model())
    sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    begin = 0
    if os.path.exists(path):
        saved = torch.load(path)
        net.load_state_dict(saved["model"])
        sgd.load_state_dict(saved["sgd"])
        begin = saved["step"]
    x, label = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))
    for t in range(begin, steps):
        loss = torch.nn.functional.cross_entropy(net(x), label)
        if t == lost and rank == 1 and first_life:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        if (t + 1) % every == 0 and rank == 0:
            torch.save({"model": net.state_dict(), "sgd": sgd.state_dict(), "step": t + 1}, path + ".new")
            os.replace(path + ".new", path)
    dist.barrier()
    os._exit(0)  # an orderly end hangs at times in PyTorch 1.13


if __name__ == "__main__":
    main()
