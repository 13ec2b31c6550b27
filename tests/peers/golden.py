#!/usr/bin/env python3
"""Writes golden.h: what PyTorch itself gives for samplers, SGD and buckets; and golden_adamw.h, for AdamW.

    python3 golden.py > golden.h                needs PyTorch 2.5 or later and numpy
    python3 golden.py adamw > golden_adamw.h    needs PyTorch 2.4 or later, for fused on a CPU

Half precision: PyTorch's vector kernels compute each operation in f32 and round its result, its scalar code (the
last elements of bf16, all of f16 in old versions) also rounds every product. cddp always does the former, so bf16
is taken from whole vectors, and f16 computed here in numpy.
"""
import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

ELEMENTS, STEPS, SHOWN = 32, 10, (1, 2, 10)
DTYPES = [("f32", torch.float32, torch.int32, 8), ("f64", torch.float64, torch.int64, 16),
          ("bf16", torch.bfloat16, torch.int16, 4), ("f16", torch.float16, torch.int16, 4)]
SGD = [  # lr, momentum, dampening, weight_decay, nesterov, maximize
    (0.1, 0, 0, 0, 0, 0), (0.1, 0.9, 0, 0, 0, 0), (0.1, 0.9, 0, 0.01, 1, 0), (0.1, 0.9, 0.5, 0, 0, 0),
    (0.01, 0.95, 0, 5e-4, 0, 0), (0.3, 0, 0, 0.1, 0, 0), (0.05, 0.8, 0.3, 0.02, 0, 1), (0.1, 0, 0, 0, 0, 1),
    (0.07, 0.9, 0, 0, 1, 1), (0.1, 0.5, 1.0, 0.001, 0, 0), (0, 0.9, 0, 0, 0, 0), (1 / 3, 1 / 7, 1 / 11, 1 / 13, 0, 0)]

ADAMW_STEPS, ADAMW_SHOWN = 20, (1, 20)
ADAMW = [  # lr, beta1, beta2, eps, weight_decay, amsgrad, maximize
    (1e-3, 0.9, 0.999, 1e-8, 0, 0, 0), (0.1, 0.9, 0.999, 1e-8, 0.01, 0, 0), (3e-4, 0.9, 0.95, 1e-8, 0.1, 0, 0),
    (0.05, 0.8, 0.9, 1e-6, 0.02, 1, 0), (0.02, 0.9, 0.98, 1e-9, 0.01, 0, 1), (0.01, 0.3, 0.7, 1e-3, 0.3, 1, 1),
    (0.37, 0.14, 0.913, 0.077, 0.059, 0, 0)]


def row(values, width=100):
    """C initialiser text, wrapped."""
    lines, line = [], "  "
    for v in values:
        v = str(v) + ", "
        if len(line) + len(v) > width:
            lines.append(line.rstrip())
            line = "  "
        line += v
    return "\n".join(lines + [line.rstrip()])


def bits(t, kind, digits):
    mask = (1 << 4 * digits) - 1
    return ["0x%0*x%s" % (digits, v & mask, "ull" if digits == 16 else "u" if digits == 8 else "")
            for v in t.view(kind).tolist()]


def sampler_cases():
    rng = random.Random(1)
    cases = [(0, 1, 0, 0, 1, 0), (0, 3, 0, 0, 1, 1), (1, 1, 0, 0, 1, 0), (1, 4, 3, 0, 1, 0), (1, 4, 3, 0, 1, 1),
             (3, 8, 7, 0, 1, 0), (3, 8, 7, 0, 0, 0), (3, 8, 7, 0, 1, 1), (10, 4, 0, 0, 1, 0), (10, 4, 0, 1, 1, 0),
             (10, 4, 0, 0, 1, 1), (10, 3, 41, 1, 1, 1), (12, 4, 5, 2, 1, 1), (12, 4, 5, 2, 0, 0), (2, 7, 1, 1, 1, 0),
             (10, 2, 2 ** 32, 0, 1, 0), (10, 2, 2 ** 32 - 1, 1, 1, 0), (10, 2, 2 ** 63 + 12345, 9, 1, 0),
             (700, 5, 9, 3, 1, 0)]
    while len(cases) < 45:
        cases.append((rng.randrange(0, 60), rng.randrange(1, 9), rng.randrange(0, 2 ** 40), rng.randrange(0, 100),
                      rng.randrange(2), rng.randrange(2)))
    return cases


def samplers():
    heads, indices = [], []
    for n, w, seed, epoch, shuffle, drop in sampler_cases():
        heads.append("{%d, %d, %dull, %d, %d, %d}" % (n, w, seed, epoch, shuffle, drop))
        for rank in range(w):
            s = DistributedSampler(range(n), w, rank, shuffle=bool(shuffle), seed=seed, drop_last=bool(drop))
            s.set_epoch(epoch)
            part = list(s) if n else []
            indices += [len(part)] + part
    print("/* dataset_size, world_size, seed, epoch, shuffle, drop_last */")
    print("static const golden_sampler golden_samplers[] = {\n%s};" % row(heads))
    print("/* for each case, for each rank: size, then the indices */")
    print("static const int golden_indices[] = {\n%s};\n" % row(indices))


def trajectory(config, start, grads):
    lr, momentum, dampening, decay, nesterov, maximize = config
    p = torch.nn.Parameter(start.clone())
    o = torch.optim.SGD([p], lr=lr, momentum=momentum, dampening=dampening, weight_decay=decay,
                        nesterov=bool(nesterov), maximize=bool(maximize))
    shown = []
    for step in range(1, STEPS + 1):
        p.grad = grads[step - 1].clone()
        o.step()
        if step in SHOWN:
            shown.append(p.detach().clone())
    return shown


def half_trajectory(config, start, grads):
    """f16, one operation after the other: f32 arithmetic, rounded to f16."""
    lr, momentum, dampening, decay, nesterov, maximize = config
    scalar = lambda x: np.float32(np.float16(x))
    add = lambda a, b, s: (a.astype(np.float32) + scalar(s) * b.astype(np.float32)).astype(np.float16)
    p, buf, shown = start.numpy(), None, []
    for step in range(1, STEPS + 1):
        d = grads[step - 1].numpy()
        d = -d if maximize else d
        if decay:
            d = add(d, p, decay)
        if momentum:
            if buf is None:
                buf = d
            else:
                scaled = (np.float32(momentum) * buf.astype(np.float32)).astype(np.float16)  # mul_'s factor stays
                buf = add(scaled, d, 1 - dampening)
            d = add(d, buf, momentum) if nesterov else buf
        p = add(p, d, -lr)
        if step in SHOWN:
            shown.append(torch.from_numpy(p.copy()))
    return shown


def sgd():
    torch.manual_seed(3)
    for name, dtype, kind, digits in DTYPES:
        size = {4: "uint16_t", 8: "uint32_t", 16: "uint64_t"}[digits]
        start = (torch.randn(ELEMENTS, dtype=torch.float64)).to(dtype)
        grads = [(torch.randn(ELEMENTS, dtype=torch.float64) * 0.5).to(dtype) for _ in range(STEPS)]
        run = half_trajectory if name == "f16" else trajectory
        out = [b for c in SGD for t in run(c, start, grads) for b in bits(t, kind, digits)]
        inputs = [b for t in [start] + grads for b in bits(t, kind, digits)]
        print("static const %s golden_%s_inputs[] = {\n%s};" % (size, name, row(inputs)))
        print("static const %s golden_%s[] = {\n%s};\n" % (size, name, row(out)))


def adamw_trajectory(config, start, grads, fused):
    lr, beta1, beta2, eps, decay, amsgrad, maximize = config
    p = torch.nn.Parameter(start.clone())
    o = torch.optim.AdamW([p], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, amsgrad=bool(amsgrad),
                          maximize=bool(maximize), fused=fused, foreach=False)
    shown = []
    for step in range(1, ADAMW_STEPS + 1):
        p.grad = grads[step - 1].clone()
        o.step()
        if step in ADAMW_SHOWN:
            shown.append(p.detach().clone())
    return shown


def adamw():
    print("/* Written by golden.py with PyTorch %s. Do not edit. */" % torch.__version__)
    print("#ifndef GOLDEN_ADAMW_H\n#define GOLDEN_ADAMW_H\n")
    print("/* lr, beta1, beta2, eps, weight_decay, amsgrad, maximize */")
    print("static const double golden_adamw[][7] = {\n%s};" %
          row("{%s}" % ", ".join(repr(x) for x in c) for c in ADAMW))
    print("enum { GOLDEN_ADAMW_ELEMENTS = %d, GOLDEN_ADAMW_STEPS = %d };" % (ELEMENTS, ADAMW_STEPS))
    print("static const int golden_adamw_shown[] = {%s};" % ", ".join(map(str, ADAMW_SHOWN)))
    print("/* inputs: the start, then each step's gradients; for each configuration the weights after the\n"
          "   steps of golden_adamw_shown, fused and not; all as bits */")
    torch.manual_seed(5)
    for name, dtype, kind, digits in DTYPES[:2]:
        size = "uint%d_t" % (4 * digits)
        start = torch.randn(ELEMENTS, dtype=torch.float64).to(dtype)
        grads = [(torch.randn(ELEMENTS, dtype=torch.float64) * 0.5).to(dtype) for _ in range(ADAMW_STEPS)]
        inputs = [b for t in [start] + grads for b in bits(t, kind, digits)]
        print("static const %s golden_adamw_%s_inputs[] = {\n%s};" % (size, name, row(inputs)))
        for fused in (True, False):
            out = [b for c in ADAMW for t in adamw_trajectory(c, start, grads, fused) for b in bits(t, kind, digits)]
            print("static const %s golden_adamw_%s%s[] = {\n%s};" %
                  (size, name, "_fused" if fused else "", row(out)))
    print("\n#endif")


def assign(sizes, keys, limits, order):
    """protocols: the order in which buckets close; open ones by first appearance of their dtype."""
    opened, limit, closed = {}, {}, []
    for i in order:
        k = keys[i]
        limit.setdefault(k, 0)
        opened.setdefault(k, []).append(i)
        if sum(sizes[j] for j in opened[k]) >= limits[limit[k]]:
            closed.append(opened[k])
            opened[k] = []
            limit[k] = min(limit[k] + 1, len(limits) - 1)
    return closed + [b for b in opened.values() if b]


def buckets():
    rng = random.Random(2)
    kinds = [(torch.float32, 4, 0), (torch.float64, 8, 1), (torch.float16, 2, 2), (torch.bfloat16, 2, 3)]
    numbers, count = [], 0
    for case in range(60):
        n = rng.choice([0, 1, 2, 3, 7, 12, 20])
        limits = [rng.choice([1, 64, 400, 1000, 4000, 1 << 40]) for _ in range(rng.choice([1, 1, 2, 3]))]
        explicit = case % 2
        which = [rng.choice(kinds[:1] if case % 3 else kinds) for _ in range(n)]
        counts = [rng.choice([0, 1, 5, 16, 100, 250, 1000]) for _ in range(n)]
        order = list(range(n))
        if explicit:
            rng.shuffle(order)
        sizes = [c * k[1] for c, k in zip(counts, which)]
        mine = assign(sizes, [k[2] for k in which], limits, order)
        if not explicit:
            mine.sort(key=min)
        if n:
            tensors = [torch.empty(counts[i], dtype=which[i][0]) for i in order]
            theirs = dist._compute_bucket_assignment_by_size(tensors, limits, [], order if explicit else [])[0]
            if explicit and len(set(k[2] for k in which)) > 1:  # the order of the last ones is theirs, unspecified
                assert sorted(theirs) == sorted(mine), (theirs, mine)
            else:
                assert theirs == mine, (theirs, mine)
        numbers += [n, explicit, len(limits)] + limits + counts + [k[2] for k in which] + order
        numbers += [len(mine)] + [x for b in mine for x in [len(b)] + b]
        count += 1
    print("/* for each case: parameters, whether an order is given, limits, limit..., count..., dtype...,\n"
          "   order..., buckets, then each bucket's length and parameters */")
    print("enum { GOLDEN_BUCKET_CASES = %d };" % count)
    print("static const long long golden_buckets[] = {\n%s};" % row(numbers))


def main():
    print("/* Written by golden.py with PyTorch %s. Do not edit. */" % torch.__version__)
    print("#ifndef GOLDEN_H\n#define GOLDEN_H\n")
    print("typedef struct golden_sampler {\n  int n, world;\n  unsigned long long seed;\n"
          "  int epoch, shuffle, drop_last;\n} golden_sampler;")
    samplers()
    print("/* lr, momentum, dampening, weight_decay, nesterov, maximize */")
    print("static const double golden_sgd[][6] = {\n%s};" % row("{%s}" % ", ".join(repr(x) for x in c) for c in SGD))
    print("enum { GOLDEN_ELEMENTS = %d, GOLDEN_STEPS = %d };" % (ELEMENTS, STEPS))
    print("static const int golden_shown[] = {%s};" % ", ".join(map(str, SHOWN)))
    print("/* inputs: the start, then each step's gradients; for each configuration the weights after the\n"
          "   steps of golden_shown; all as bits */")
    sys.stdout.flush()
    sgd()
    sys.stdout.flush()
    buckets()
    print("\n#endif")


adamw() if sys.argv[1:] == ["adamw"] else main()
