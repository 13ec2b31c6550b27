"""gpt_torch.py WEIGHTS TEXT STEP SHARDS BATCH CONTEXT HEADS: prints the loss that a PyTorch GPT-2 with the weights of
examples/gpt.c has on that step's batch, and the names that the file has for AdamW's state."""
import sys
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

path, text, step, shards, batch, context, heads = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
w = load_file(path)
text = torch.tensor(list(open(text, "rb").read()))
mask = (1 << 64) - 1


def place(counter, seed=1):  # splitmix64, as in gpt.c
    z = (seed * 0xD1342543DE82EF95 + (counter + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return (z ^ z >> 31) % (len(text) - context)


def linear(x, name):
    return F.linear(x, w[name + ".weight"], w[name + ".bias"])


def norm(x, name):
    return F.layer_norm(x, x.shape[-1:], w[name + ".weight"], w[name + ".bias"])


def logits(tokens):
    x = w["wte.weight"][tokens] + w["wpe.weight"]
    split = lambda t: t.unflatten(-1, (heads, -1)).transpose(-3, -2)
    for i in range(sum(name.endswith("attn.c_attn.weight") and not name.startswith("optimizer") for name in w)):
        q, k, v = map(split, linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, -1))
        mix = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2).flatten(-2)
        x = x + linear(mix, f"h.{i}.attn.c_proj")
        up = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        x = x + linear(F.gelu(up, approximate="tanh"), f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


places = [place((step * shards + s) * batch + b) for s in range(shards) for b in range(batch)]
windows = torch.stack([text[p : p + context + 1] for p in places])
with torch.no_grad():
    print("%.6f" % F.cross_entropy(logits(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()).item())
