#!/bin/bash
# llm.c's train_gpt2.cu on cddp, with llm.c's own optimizer. zero.cuh, which has llm.c's NCCL, MPI and sockets, is replaced by the
# file below, and three places of train_gpt2.cu change.
#
#   git clone https://github.com/karpathy/llm.c
#   tests/gpu/llmc.sh LLMC_FOLDER         compiles, and on a machine with a GPU trains: two ranks that share it, and one rank with
#                                         the whole batch, have the same losses. Ends with the lines added and removed
#   GPU_ARCH=sm_90 tests/gpu/llmc.sh LLMC_FOLDER       without a GPU: compiles only
#
# NCCL before 2.30 takes the ranks for those of two hosts (NCCL_HOSTID). Nothing of llm.c is kept.
set -u
cd "$(dirname "$0")/../.." || exit 1
top=$PWD llmc=${1:?usage: tests/gpu/llmc.sh LLMC_FOLDER} steps=20
work=$(mktemp -d "${TMPDIR:-/tmp}/cddp-llmc.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
fail() { echo "$*"; exit 1; }

cp -r "$llmc/llmc" "$llmc/train_gpt2.cu" "$work" || exit 1
cat >"$work/llmc/zero.cuh" <<'END'
#ifndef LLMC_ZERO_CUH
#define LLMC_ZERO_CUH
#include "utils.h"
#include <vector>

#define TRY(call) if ((call) != CDDP_OK) fprintf(stderr, "%s\n", cddp_error()), exit(1)

typedef struct {
  int process_rank, num_processes, local_device_idx, zero_stage;
  size_t shard_num_parameters;
  cddp_group *group;
  cddp_ddp *ddp;
  std::vector<cddp_param> *params; /* by address of the gradient */
} MultiGpuConfig;
typedef struct {
  ptrdiff_t offset;
  size_t size;
} ShardInfo;

MultiGpuConfig multi_gpu_config;

void printf0(const char *format, ...) {
  va_list args;
  va_start(args, format);
  if (multi_gpu_config.process_rank == 0) vprintf(format, args);
  va_end(args);
}

MultiGpuConfig multi_gpu_config_init(int, int, int, char *, char *, char *) {
  MultiGpuConfig c = {0, 1, 0, 0, 0, NULL, NULL, new std::vector<cddp_param>};
  cddp_group_desc desc = cddp_group_desc();
  desc.device = "cuda";
  TRY(cddp_init(&c.group, &desc));
  c.process_rank = cddp_rank(c.group);
  c.num_processes = cddp_world_size(c.group);
  cudaGetDevice(&c.local_device_idx);
  return c;
}

void multi_gpu_config_free(MultiGpuConfig *c) {
  cddp_ddp_destroy(c->ddp);
  cddp_destroy(c->group);
}

void multi_gpu_barrier(const MultiGpuConfig *c) { TRY(cddp_barrier(c->group)); }

ShardInfo multi_gpu_get_shard_offset(size_t elements, const MultiGpuConfig *, int) {
  return {0, elements};
}

void set_zero_configs(MultiGpuConfig *c, int, size_t parameters) {
  c->shard_num_parameters = parameters;
}

float multi_gpu_cpu_float_sum(float value, MultiGpuConfig *c) {
  TRY(cddp_all_reduce(c->group, &value, 1, CDDP_F32, CDDP_SUM, NULL));
  return value;
}

/* Tensors 2 to 13 have a part for each layer. llm.c marks the parts as it has computed them. */
void multi_gpu_model(MultiGpuConfig *c, void *weights, void *grads, const size_t *elements,
                     int tensors, int layers, cudaStream_t stream) {
  floatX *w = (floatX *)weights, *g = (floatX *)grads;
  for (int i = 0; i < tensors; i++)
    for (int l = 0, n = i < 2 || i > 13 ? 1 : layers; l < n; l++) {
      cddp_param p = {NULL, w, g, elements[i] / n, sizeof(floatX) == 4 ? CDDP_F32 : CDDP_BF16};
      c->params->push_back(p);
      w += elements[i] / n, g += elements[i] / n;
    }
  cddp_set_stream(c->group, stream);
  TRY(cddp_ddp_create(&c->ddp, c->group, c->params->data(), (int)c->params->size(), NULL));
}

template <int N>
void multi_gpu_async_reduce_gradient(floatX *const (&pointers)[N], const size_t (&)[N],
                                     MultiGpuConfig *c, cudaStream_t) {
  for (int k = 0; k < N; k++) {
    int i = 0;
    while ((*c->params)[i].grad != pointers[k]) i++;
    TRY(cddp_ddp_ready(c->ddp, i));
  }
  if (N == 4) TRY(cddp_ddp_wait(c->ddp)); /* the last: embeddings and the final LayerNorm */
}
#endif
END
cat >"$work/edit.py" <<'END'
import sys
path = sys.argv[1]
text = open(path).read()
def sub(old, new):
    global text
    assert text.count(old) == 1, old
    text = text.replace(old, new)
sub('#include <unistd.h>', '#define CDDP_IMPLEMENTATION\n#define CDDP_KERNELS_NO_CUBLAS\n#include "cddp_kernels.cuh"\n#include <unistd.h>')
sub('    gpt2_allocate_state(&model, B, T);\n', '''    gpt2_allocate_state(&model, B, T);
    multi_gpu_model(&multi_gpu_config, model.params_memory, model.grads_memory, model.param_elements,
                    NUM_PARAMETER_TENSORS, model.config.num_layers, main_stream);
''')
sub('''        #if MULTI_GPU
        ncclCheck(ncclAllReduce(model->accumulated_mean_loss, model->accumulated_mean_loss, sizeof(float), ncclFloat, ncclAvg, multi_gpu_config.nccl_comm, main_stream));
        #endif
''', '''        TRY(cddp_all_reduce(multi_gpu_config.group, model->accumulated_mean_loss, 1, CDDP_F32, CDDP_AVG, NULL));
''')
open(path, "w").write(text)
END
python3 "$work/edit.py" "$work/train_gpt2.cu" || fail "this train_gpt2.cu has other lines than the recipe expects"
# llm.c is older than CUDA 13, which has another cudaMemAdvise.
[ "$(nvcc --version | sed -n 's/.*release \([0-9]*\).*/\1/p')" -lt 13 ] ||
  sed -i 's/\(cudaMemAdvise(.*\), cudaCpuDeviceId)/\1, cudaMemLocation{cudaMemLocationTypeHost, 0})/' "$work/llmc/cuda_utils.cuh"
for f in train_gpt2.cu llmc/zero.cuh; do
  diff "$llmc/$f" "$work/$f" | awk -v f="$f" '/^>/ { a++ } /^</ { r++ } END { print f ": " a + 0 " lines added, " r + 0 " removed" }'
done
nvcc -O3 -std=c++17 "-arch=${GPU_ARCH:-native}" --use_fast_math -DENABLE_FP32 -I"$top" "$work/train_gpt2.cu" -o "$work/train" \
  -lnccl -lcublas -lcublasLt ${LLMC_FLAGS:-} >"$work/out" 2>&1 || fail "$(grep -E -m 5 -A 3 'error|undefined' "$work/out")"
echo "compiled"
timeout 60 nvidia-smi -L >/dev/null 2>&1 || { echo "not run: there is no GPU here" && exit 0; }

# Bytes of Shakespeare as tokens: llm.c's header of 256 ints, then 16 bits a token.
python3 - "$work/tokens.bin" <<'END' || exit 1
import struct, sys
text = open("examples/data/shakespeare.txt", "rb").read()
open(sys.argv[1], "wb").write(struct.pack("<256i", 20240520, 1, len(text), *[0] * 253) + struct.pack(f"<{len(text)}H", *text))
END
cd "$work" || exit 1
options=(-i tokens.bin -j tokens.bin -e d6 -t 128 -a 1 -x "$steps" -v 0 -s 0 -h 0 -f 0)
losses() { sed -n 's/.*step *\([0-9]*\)\/.*loss \([0-9.]*\).*/\1 \2/p' "$1"; }
./train "${options[@]}" -b 8 >one.log 2>&1 || fail "one rank: $(tail -n 5 one.log)"
export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 10000)) NCCL_MULTI_RANK_GPU_ENABLE=1
for r in 1 0; do RANK=$r NCCL_HOSTID=rank-$r ./train "${options[@]}" -b 4 >two.$r.log 2>&1 & done
wait
losses one.log >one
losses two.0.log >two
paste -d ' ' one two | head -n $steps
paste -d ' ' one two | awk -v n=$steps '{ d = $2 - $4; if ($1 != $3 || d > 0.002 || d < -0.002) bad++ } END { exit !(NR == n && !bad) }' ||
  fail "other losses; two ranks: $(tail -n 5 two.0.log two.1.log)"
echo "the same losses: one rank with 8 sequences, two ranks with 4 each"
