"""The training of examples/gpt.c at its defaults in PyTorch: DistributedDataParallel over gloo, AdamW (fused where it is
there), clipping. Prints its speed, 'gpt torch BYTES-PER-SECOND LOSS'.

  gpt_torch.py RANKS STEPS
"""
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

BATCH, CONTEXT, LAYERS, HEADS, CHANNELS, WARM = 8, 64, 4, 4, 128, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.qkv, self.out = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.up, self.down = nn.Linear(CHANNELS, 4 * CHANNELS), nn.Linear(4 * CHANNELS, CHANNELS)

    def forward(self, x):
        heads = (t.unflatten(-1, (HEADS, -1)).transpose(-3, -2) for t in self.qkv(self.ln_1(x)).chunk(3, -1))
        mix = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(-3, -2).flatten(-2)
        x = x + self.out(mix)
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, CHANNELS), nn.Embedding(CONTEXT, CHANNELS)
        self.layers, self.ln_f = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(CHANNELS)
        self.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, (nn.Linear, nn.Embedding)) else None)

    def forward(self, tokens):
        x = self.layers(self.wte(tokens) + self.wpe.weight)
        return self.ln_f(x) @ self.wte.weight.T


def run(rank, ranks, port, steps):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    torch.manual_seed(1)
    text = torch.tensor(list(open("examples/data/shakespeare.txt", "rb").read()))
    net = GPT() if ranks == 1 else nn.parallel.DistributedDataParallel(GPT())
    options = {"lr": 2e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
    try:
        adamw = torch.optim.AdamW(net.parameters(), fused=True, **options)
    except (RuntimeError, TypeError):  # before PyTorch 2.4: none for the CPU
        adamw = torch.optim.AdamW(net.parameters(), **options)
    torch.manual_seed(2 + rank)
    for step in range(steps + WARM):
        if step == WARM:
            dist.barrier()
            start = time.perf_counter()
        places = torch.randint(len(text) - CONTEXT, (BATCH,))
        windows = torch.stack([text[p:p + CONTEXT + 1] for p in places])
        loss = F.cross_entropy(net(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1)
        adamw.step()
        adamw.zero_grad()
    dist.barrier()
    if rank == 0:
        speed = ranks * BATCH * CONTEXT * steps / (time.perf_counter() - start)
        print(f"gpt torch {speed:.0f} {loss.item():.4f}", flush=True)
    dist.barrier()
    os._exit(0)  # an orderly end hangs at times in PyTorch 1.13


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    torch.multiprocessing.spawn(run, args=(int(sys.argv[1]), free, int(sys.argv[2])), nprocs=int(sys.argv[1]))
