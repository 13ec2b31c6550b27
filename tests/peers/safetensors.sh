#!/bin/bash
# Checkpoints and Python's safetensors package: each loads what the other has saved.
#
# Files of the package, in every dtype, load in C; ours load in Python and are, byte for byte, what the
# package writes itself. With PyTorch beside it a model and its optimizer's momentum go there and back.
# Needs $PYTHON, or python3, with safetensors and numpy; skipped without.
set -u
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3}

fail() { echo "$*"; exit 1; }
version=$("$python" -c 'import numpy, safetensors.numpy; print(safetensors.__version__)' 2>/dev/null) ||
  { echo "SKIP: $python cannot import safetensors and numpy"; exit 77; }
echo "safetensors $version"

work=$(mktemp -d "${TMPDIR:-/tmp}/cddp-safetensors.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT

# copy IN OUT [bf16]: loads f32 layer.weight [3, 5], f64, f16, bf16, i8, u8, i32, i64 and a metadata
# string, saves them again. again IN OUT: any file's tensors, saved again. step OUT: a weight and its
# momentum after two steps on two ranks.
cat >"$work/program.c" <<'C'
#define CDDP_IMPLEMENTATION
#include "cddp.h"
#define TRY(call) if (call) return fprintf(stderr, "%s\n", cddp_error()), 1
static int step(cddp_group *g, void *path) {
  float w[15] = {0};
  cddp_param p = {"layer.weight", w, NULL, 15, CDDP_F32};
  cddp_shape shape = {2, {3, 5}};
  cddp_sgd_desc o = {0};
  o.lr = 0.5, o.momentum = 0.9;
  cddp_checkpoint_desc d = {0};
  d.shapes = &shape;
  cddp_ddp *ddp;
  TRY(cddp_ddp_create(&ddp, g, &p, 1, NULL) || cddp_sgd_create(&d.optim, &p, 1, &o));
  for (int s = 0; s < 2; s++) {
    for (int i = 0; i < 15; i++) ((float *)p.grad)[i] = (float)(i + s + 2 * cddp_rank(g));
    TRY(cddp_ddp_ready(ddp, 0) || cddp_ddp_step(ddp, d.optim));
  }
  TRY(cddp_save(g, (const char *)path, &p, 1, &d));
  return cddp_optim_destroy(d.optim), cddp_ddp_destroy(ddp), 0;
}
static int again(const char *in, const char *out) {
  static cddp_param p[16];
  static cddp_shape shapes[16];
  cddp_checkpoint_desc d = {0};
  d.shapes = shapes;
  cddp_safetensors *f;
  cddp_tensor_info t;
  int i, k, n;
  TRY(cddp_safetensors_open(&f, in));
  n = cddp_safetensors_count(f);
  for (i = 0; i < n && i < 16; i++) {
    if (cddp_safetensors_get(f, i, &t) || t.dtype < 0 || t.dims > 8) return 2;
    p[i].name = t.name, p[i].count = t.count, p[i].dtype = (cddp_dtype)t.dtype, p[i].data = malloc(t.bytes);
    for (shapes[i].dims = t.dims, k = 0; k < t.dims; k++) shapes[i].size[k] = t.shape[k];
    TRY(cddp_safetensors_read(f, i, p[i].data, t.bytes));
  }
  TRY(cddp_save(NULL, out, p, n, &d));
  return cddp_safetensors_close(f), 0;
}
static int copy(const char *in, const char *out, bool bf16) {
  static double data[8][15];
  static const char *const names[] = {"layer.weight", "f64", "f16", "bf16", "i8", "u8", "i32", "i64"};
  cddp_shape shapes[8];
  cddp_param p[8];
  cddp_metadata m = {"note", NULL};
  char text[100];
  cddp_checkpoint_desc d = {0};
  d.metadata = &m, d.metadata_count = 1, d.text = text, d.text_size = sizeof text;
  for (int i = 0; i < 8; i++) {
    cddp_param one = {names[i], data[i], NULL, 15, (cddp_dtype)i};
    cddp_shape shape = {2, {3, 5}}, flat = {1, {15}};
    p[i] = one, shapes[i] = i == 0 ? shape : flat;
  }
  p[3].count = bf16 ? 15 : 0; /* NumPy has none */
  TRY(cddp_load(NULL, in, p, 8, &d));
  d.shapes = shapes;
  shapes[3].size[0] = p[3].count;
  TRY(cddp_save(NULL, out, p, 8, &d));
  return 0;
}
int main(int argc, char **argv) {
  if (argc < 3) return 2;
  if (strcmp(argv[1], "again") == 0) return again(argv[2], argv[3]);
  if (strcmp(argv[1], "copy") == 0) return copy(argv[2], argv[3], argc == 5);
  TRY(cddp_run_threads(step, argv[2], 2));
  return 0;
}
C
cc -O1 -I. "$work/program.c" -o "$work/program" -lpthread -lm || fail "the program does not compile"

cat >"$work/numpy_flavour.py" <<'PY'
import subprocess, sys
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
work = sys.argv[1]
a = np.arange(15) - 7.25
tensors = {"layer.weight": a.astype("f4").reshape(3, 5), "f64": a, "f16": a.astype("f2"), "bf16": np.zeros(0, "f4"),
           "i8": a.astype("i1"), "u8": np.arange(15).astype("u1"), "i32": a.astype("i4"), "i64": a.astype("i8") << 40}
save_file(tensors, work + "/in", metadata={"note": 'a "note" of é\n'})
subprocess.run([work + "/program", "copy", work + "/in", work + "/out"], check=True)
with safe_open(work + "/out", "numpy") as f:
    assert f.metadata() == {"note": 'a "note" of é\n', "format": "pt"}, f.metadata()
    assert sorted(f.keys()) == sorted(tensors)
    for k in tensors:
        if k == "bf16": continue
        t = f.get_tensor(k)
        assert t.dtype == tensors[k].dtype and t.shape == tensors[k].shape and (t == tensors[k]).all(), k
# the same tensors and one metadata key, whose order nobody has to choose: the same bytes
small = {"b": np.arange(6, dtype="f4").reshape(2, 3), "a\n\"é": np.arange(4, dtype="i8"), "c": np.ones(3, "u1")}
save_file(small, work + "/theirs", metadata={"format": "pt"})
subprocess.run([work + "/program", "again", work + "/theirs", work + "/ours"], check=True)
assert open(work + "/theirs", "rb").read() == open(work + "/ours", "rb").read(), "not the same bytes"
subprocess.run([work + "/program", "step", work + "/trained"], check=True)
t = load_file(work + "/trained")
g = np.arange(15, dtype="f4").reshape(3, 5) + 1 # the mean of both ranks' first gradients
m = np.float32(0.9) * g + (g + 1)
assert sorted(t) == ["layer.weight", "optimizer.lr", "optimizer.momentum_buffer.layer.weight"]
assert t["optimizer.lr"] == 0.5 and t["optimizer.lr"].shape == ()
assert np.abs(t["optimizer.momentum_buffer.layer.weight"] - m).max() < 1e-5
assert np.abs(t["layer.weight"] + 0.5 * (g + m)).max() < 1e-5
print("numpy: ok")
PY

"$python" "$work/numpy_flavour.py" "$work" || fail "not as Python sees it"

"$python" -c 'import torch' 2>/dev/null || { echo "no PyTorch beside it: numpy only"; exit 0; }
cat >"$work/torch_flavour.py" <<'PY'
import subprocess, sys
import torch
from safetensors.torch import load_file, save_file, load_model
work = sys.argv[1]
a = torch.arange(15) - 7.25
tensors = {"layer.weight": a.float().reshape(3, 5), "f64": a.double(), "f16": a.half(), "bf16": a.bfloat16(),
           "i8": a.char(), "u8": torch.arange(15, dtype=torch.uint8), "i32": a.int(), "i64": a.long() << 40}
save_file(tensors, work + "/in", metadata={"note": "x"})
subprocess.run([work + "/program", "copy", work + "/in", work + "/out", "bf16"], check=True)
back = load_file(work + "/out")
for k in tensors:
    assert back[k].dtype == tensors[k].dtype and torch.equal(back[k], tensors[k]), k
model = torch.nn.Sequential()
model.add_module("layer", torch.nn.Linear(5, 3, bias=False))
missing, unexpected = load_model(model, work + "/trained", strict=False)
assert not missing and all(k.startswith("optimizer.") for k in unexpected)
trained = load_file(work + "/trained")
assert torch.equal(model.layer.weight, trained["layer.weight"])
sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3, 5))], lr=0.5, momentum=0.9)
for step in range(2): # what the two ranks did, as PyTorch does it
    sgd.param_groups[0]["params"][0].grad = torch.arange(15.0).reshape(3, 5) + step + 1
    sgd.step()
p = sgd.param_groups[0]["params"][0]
assert torch.allclose(p, trained["layer.weight"]), "the weight"
assert torch.allclose(sgd.state[p]["momentum_buffer"], trained["optimizer.momentum_buffer.layer.weight"])
print("torch: ok")
PY
"$python" "$work/torch_flavour.py" "$work" || fail "not as PyTorch sees it"
