/* gpt.cu - gpt.c on GPUs: the same network, first weights, batches, learning rates and files.

     nvcc -O3 -arch=native examples/gpt.cu -o gpt -lnccl -lcublas
     ./gpt                                      1 rank on a GPU
     ./gpt -n 2 --save FILE                     2 ranks, each on its own GPU; a checkpoint
     ./gpt -n 2 --backend cpu                   2 ranks that can share a GPU: slower, for tests
     ./gpt -n 2 --shards 2 --elastic 9          survives lost ranks; up to 9 are started again
   --help lists all options.

   gpt.c, with as many --shards as here are ranks, has the same losses, up to rounding. It needs no
   GPU, and resumes from FILE too: with the same --steps it only writes a text. cuBLAS multiplies
   matrices. cddp_kernels.cuh has most other layers, this file the rest. All are deterministic. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp_kernels.cuh" /* includes cddp.h, stdio.h, stdlib.h, string.h and math.h */
#include "gpt.h"
#include "options.h"
#include "progress.h"

#define CUDA(call) ((call) ? (void)fprintf(stderr, "%s failed\n", #call), exit(1) : (void)0)

static const option options[] = {
    {"-n", INTEGER, &config.ranks, "1", 1, 1e6, "ranks, as child processes"},
    {"--steps", INTEGER, &config.steps, "800", 1, 1e6, "in all, with those of a checkpoint"},
    {"--stop", INTEGER, &config.stop, "1e6", 1, 1e6, "step to end after, as if interrupted"},
    {"--batch", INTEGER, &config.batch, "8", 1, 1e6, "sequences a step of a rank"},
    {"--context", INTEGER, &config.context, "64", 1, 1e6, "bytes of a sequence"},
    {"--layers", INTEGER, &config.layers, "4", 1, MAX_LAYERS, "of the network"},
    {"--heads", INTEGER, &config.heads, "4", 1, 1e6, "of attention"},
    {"--channels", INTEGER, &config.channels, "128", 1, 1e6, "a multiple of --heads"},
    {"--shards", INTEGER, &config.shards, "0", 0, 4096, "of the global batch; 0: one a rank"},
    {"--seed", INTEGER, &config.seed, "1", 0, 1e9, "of weights and batches"},
    {"--lr", REAL, &config.lr, "2e-3", 0, 1e6, "highest learning rate"},
    {"--decay", REAL, &config.decay, "0.1", 0, 1e6, "weight decay"},
    {"--clip", REAL, &config.clip, "1", 0, 1e6, "largest norm of the gradient; 0: any"},
    {"--text", TEXT, &config.text, "examples/data/shakespeare.txt", 0, 0, "file to learn"},
    {"--save", TEXT, &config.save, NULL, 0, 0, "checkpoint each 50 steps, and at the end"},
    {"--resume", TEXT, &config.resume, NULL, 0, 0, "checkpoint to continue from"},
    {"--elastic", INTEGER, &config.elastic, "-1", -1, 1e6, "lost ranks to start again; -1: none"},
    {"--backend", TEXT, &config.backend, NULL, 0, 0, "nccl, or cpu: ranks can share a GPU"},
};

/* --- Memory --- */

static float *terms, *ones;       /* [B * T][C] summands; [B * T] ones */
static int32_t *bytes, *labels;   /* [B * T] the batch; the byte of the text after each */
static double *stats;             /* the mean loss of the batch, and the right guesses */
static double *scratch, *order;   /* memory for kernels of cddp_kernels.cuh */
static unsigned char *device_text;
static cublasHandle_t blas;

static float *floats(long n) { /* on the device */
  float *memory;
  CUDA(cudaMalloc((void **)&memory, (size_t)n * sizeof *memory));
  return memory;
}

static void allocate_all(void) {
  long n = (long)config.batch * config.context, row = n * config.channels;
  gpt_allocate(floats);
  terms = floats(row);
  ones = floats(n);
  bytes = (int32_t *)floats(n);
  labels = (int32_t *)floats(n);
  stats = (double *)floats(4);
  scratch = (double *)floats(CDDP_CUDA_SCRATCH_BYTES / sizeof(float));
  order = (double *)floats((long)(CDDP_CUDA_ORDER_BYTES(n) / sizeof(float)));
  device_text = (unsigned char *)floats((long)(gpt_text_size / sizeof(float)) + 1);
  CUDA(cudaMemcpy(device_text, gpt_text, gpt_text_size, cudaMemcpyDefault));
  CUDA(cddp_cuda_fill(ones, CDDP_F32, (size_t)n, 1, NULL));
}

/* --- Kernels --- */

enum { THREADS = 256 /* of a block */ };
#define KERNEL static __global__ void __launch_bounds__(THREADS)

/* Runs a kernel in blocks of THREADS; the last block can have threads too many. */
template <typename... P, typename... A>
static void launch(void (*kernel)(P...), long threads, A... arguments) {
  cudaLaunchConfig_t c;
  memset((void *)&c, 0, sizeof c);
  c.gridDim = dim3((unsigned)((threads + THREADS - 1) / THREADS));
  c.blockDim = dim3(THREADS);
  CUDA(cudaLaunchKernelEx(&c, kernel, static_cast<P>(arguments)...));
}

static __device__ long thread() { return (long)blockIdx.x * THREADS + threadIdx.x; }
static __device__ int lane() { return (int)threadIdx.x % 32; }

static __device__ float warp_sum(float x) { /* in all 32 lanes */
  for (int k = 16; k > 0; k /= 2) x += __shfl_xor_sync(0xffffffffu, x, k);
  return x;
}

static __device__ float warp_max(float x) {
  for (int k = 16; k > 0; k /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, k));
  return x;
}

/* A thread for each byte of the batch. Sequence s begins at random place first + s (splitmix64). */
KERNEL pick(const unsigned char *from, uint64_t places, uint64_t seed, uint64_t first, int32_t *in,
            int32_t *right, long n, int length) {
  long i = thread(), s = i / length;
  if (i >= n) return;
  uint64_t z = seed * 0xd1342543de82ef95u + (first + (uint64_t)s + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  from += (z ^ z >> 31) % places + (uint64_t)(i % length);
  in[i] = from[0];
  right[i] = from[1];
}

/* out = a + b, where b has `repeated` numbers. */
KERNEL add(float *out, const float *a, const float *b, long n, long repeated) {
  long i = thread();
  if (i < n) out[i] = a[i] + b[i % repeated];
}

/* A warp computes the mean of a row, and returns 1 / standard deviation. */
static __device__ float row_scale(const float *in, int width, float *mean) {
  float sum = 0, squares = 0;
  for (int c = lane(); c < width; c += 32) sum += in[c];
  *mean = warp_sum(sum) / (float)width;
  for (int c = lane(); c < width; c += 32) squares += (in[c] - *mean) * (in[c] - *mean);
  return 1 / sqrtf(warp_sum(squares) / (float)width + 1e-5f);
}

/* torch.nn.LayerNorm of n rows with weight w and bias b, a warp for each row. */
KERNEL norm_rows(float *out, const float *in, const float *w, const float *b, long n, int width) {
  long at = thread() / 32 * width;
  if (at >= n * width) return;
  float mean, scale = row_scale(in + at, width, &mean);
  for (int c = lane(); c < width; c += 32) out[at + c] = (in[at + c] - mean) * scale * w[c] + b[c];
}

/* Adds to d_in. Sets dw to what each row adds to the gradient of w. */
KERNEL norm_rows_backward(float *d_in, float *dw, const float *d_out, const float *in,
                          const float *w, long n, int width) {
  long at = thread() / 32 * width;
  if (at >= n * width) return;
  float mean, scale = row_scale(in + at, width, &mean), sum = 0, dot = 0;
  for (int c = lane(); c < width; c += 32) {
    dw[at + c] = d_out[at + c] * (in[at + c] - mean) * scale;
    sum += d_out[at + c] * w[c];
    dot += dw[at + c] * w[c];
  }
  sum = warp_sum(sum) / (float)width;
  dot = warp_sum(dot) / (float)width;
  for (int c = lane(); c < width; c += 32)
    d_in[at + c] += scale * (d_out[at + c] * w[c] - sum - (in[at + c] - mean) * scale * dot);
}

/* GELU, by GPT-2's formula with tanh. */
KERNEL gelu(float *out, const float *in, long n) {
  long i = thread();
  if (i >= n) return;
  float x = in[i], t = tanhf(0.7978845608f * (x + 0.044715f * x * x * x)), half = 0.5f * (1 + t);
  out[i] = half * x;
}

/* d, the gradient of GELU's result, becomes the gradient of in. */
KERNEL gelu_backward(float *d, const float *in, long n) {
  long i = thread();
  if (i >= n) return;
  float x = in[i], t = tanhf(0.7978845608f * (x + 0.044715f * x * x * x)), half = 0.5f * (1 + t);
  d[i] *= half + 0.5f * x * (1 - t * t) * 0.7978845608f * (1 + 0.134145f * x * x);
}

/* Softmax of the first i + 1 numbers of row i of each matrix, in place; a warp for each row. */
KERNEL softmax_rows(float *p, long n, int length) {
  long row = thread() / 32;
  if (row >= n) return;
  int end = (int)(row % length) + 1;
  float highest = -INFINITY, sum = 0;
  p += row * length;
  for (int j = lane(); j < end; j += 32) highest = fmaxf(highest, p[j]);
  highest = warp_max(highest);
  for (int j = lane(); j < end; j += 32) {
    p[j] = expf(p[j] - highest);
    sum += p[j];
  }
  sum = warp_sum(sum);
  for (int j = lane(); j < length; j += 32) p[j] = j < end ? p[j] / sum : 0;
}

/* With a, the results of softmax_rows, d becomes the gradient of the inputs of softmax_rows. */
KERNEL softmax_rows_backward(float *d, const float *a, long n, int length) {
  long row = thread() / 32;
  if (row >= n) return;
  int end = (int)(row % length) + 1;
  float dot = 0;
  d += row * length;
  a += row * length;
  for (int j = lane(); j < end; j += 32) dot += d[j] * a[j];
  dot = warp_sum(dot);
  for (int j = lane(); j < length; j += 32) d[j] = j < end ? a[j] * (d[j] - dot) : 0;
}

/* --- Layers --- */

/* torch.nn.Linear of n rows, with the weight p and the bias p + 1. Adds `plus`, unless NULL. */
static void linear(float *out, const float *plus, const float *in, int n, int p) {
  float *to = plus ? terms : out;
  long size = (long)n * rows(p);
  CUDA(cddp_cuda_linear(blas, in, weight(p), weight(p + 1), to, n, columns(p), rows(p), false,
                        NULL));
  if (plus) launch(add, size, out, plus, terms, size, size);
}

/* Adds to the gradients of p and p + 1. Sets d_in. */
static void linear_backward(float *d_in, const float *d_out, const float *in, int n, int p) {
  CUDA(cddp_cuda_linear_backward(blas, in, weight(p), d_out, d_in, grad(p), grad(p + 1), n,
                                 columns(p), rows(p), NULL));
}

/* sums += the sum of the n rows of x: a row of ones times x. */
static void add_rows(float *sums, const float *x, int n, int width) {
  CUDA(cddp_cuda_linear_backward(blas, ones, NULL, x, NULL, sums, NULL, n, 1, width, NULL));
}

static void layer_norm(float *out, const float *in, int n, int p) {
  launch(norm_rows, 32L * n, out, in, weight(p), weight(p + 1), n, config.channels);
}

/* Adds to the gradients of p and p + 1, and to d_in. */
static void layer_norm_backward(float *d_in, const float *d_out, const float *in, int n, int p) {
  int C = config.channels;
  launch(norm_rows_backward, 32L * n, d_in, terms, d_out, in, weight(p), n, C);
  add_rows(grad(p), terms, n, C);
  add_rows(grad(p + 1), d_out, n, C);
}

/* A matrix for each head of each sequence: where the first one is, and how far the next row, the
   next head's matrix and the next sequence's are. */
typedef struct matrices {
  float *at;
  int row, head, sequence;
  cublasOperation_t op;
} matrices;

static matrices heads(float *x, int row) {
  return {x, row, config.channels / config.heads, config.context * row, CUBLAS_OP_N};
}

static matrices squares(float *x) {
  int T = config.context;
  return {x, T, T * T, config.heads * T * T, CUBLAS_OP_N};
}

static matrices transpose(matrices m) {
  m.op = CUBLAS_OP_T;
  return m;
}

/* c[m][n] = scale a b, for all heads. cuBLAS takes rows for columns, so that b comes first. */
static void matmul(matrices c, int m, int n, int k, float scale, matrices a, matrices b) {
  const float zero = 0;
  for (int h = 0; h < config.heads; h++) {
    CUDA(cublasSgemmStridedBatched(blas, b.op, a.op, n, m, k, &scale, b.at, b.row, b.sequence, a.at,
                                   a.row, a.sequence, &zero, c.at, c.row, c.sequence,
                                   config.batch));
    a.at += a.head;
    b.at += b.head;
    c.at += c.head;
  }
}

/* mix = softmax(q k^T / sqrt(size)) v, for all heads. A byte does not see later bytes. */
static void attention(const layer *l) {
  int T = config.context, C = config.channels, size = C / config.heads;
  long n = (long)config.batch * config.heads * T;
  matrices q = heads(l->qkv, 3 * C), k = heads(l->qkv + C, 3 * C), v = heads(l->qkv + 2 * C, 3 * C);
  matrices a = squares(l->attention);
  matmul(a, T, T, size, 1 / sqrtf((float)size), q, transpose(k));
  launch(softmax_rows, 32 * n, a.at, n, T);
  matmul(heads(l->mix, C), T, size, T, 1, a, v);
}

/* Given d_row, the gradient of mix, sets d_qkv. */
static void attention_backward(const layer *l) {
  int T = config.context, C = config.channels, size = C / config.heads;
  long n = (long)config.batch * config.heads * T;
  float scale = 1 / sqrtf((float)size);
  matrices q = heads(l->qkv, 3 * C), k = heads(l->qkv + C, 3 * C), v = heads(l->qkv + 2 * C, 3 * C);
  matrices d_q = heads(d_qkv, 3 * C), d_k = heads(d_qkv + C, 3 * C);
  matrices d_v = heads(d_qkv + 2 * C, 3 * C), d_mix = heads(d_row, C);
  matrices a = squares(l->attention), d_a = squares(d_attention);
  matmul(d_v, T, size, T, 1, transpose(a), d_mix);
  matmul(d_a, T, T, size, 1, d_mix, transpose(v));
  launch(softmax_rows_backward, 32 * n, d_a.at, a.at, n, T);
  matmul(d_q, T, size, T, scale, d_a, k);
  matmul(d_k, T, size, T, scale, transpose(d_a), q);
}

/* --- The network --- */

/* Sets logits: for each byte of the batch, what the network expects after it. */
static void forward(void) {
  int T = config.context, C = config.channels, n = config.batch * T;
  long size = (long)n * C;
  CUDA(cddp_cuda_embedding(weight(EMBEDDING), bytes, terms, n, BYTES, C, NULL));
  launch(add, size, layers[0].in, terms, weight(POSITION), size, T * C);
  for (int i = 0; i < config.layers; i++) {
    layer *l = &layers[i];
    int p = LAYER + PER_LAYER * i;
    layer_norm(l->norm1, l->in, n, p + LN_1);
    linear(l->qkv, NULL, l->norm1, n, p + QKV);
    attention(l);
    linear(l->mid, l->in, l->mix, n, p + PROJECT);
    layer_norm(l->norm2, l->mid, n, p + LN_2);
    linear(l->up, NULL, l->norm2, n, p + UP);
    launch(gelu, 4 * size, l->act, l->up, 4 * size);
    linear(i + 1 < config.layers ? l[1].in : last, l->mid, l->act, n, p + DOWN);
  }
  layer_norm(norm_f, last, n, LN_F);
  CUDA(cddp_cuda_linear(blas, norm_f, weight(EMBEDDING), NULL, logits, n, C, BYTES, false, NULL));
}

/* Adds to all gradients, the last layer's first. cddp_ddp_ready: the gradient can be averaged. */
static int backward(cddp_ddp *ddp, int rank) {
  int B = config.batch, T = config.context, C = config.channels, n = B * T;
  long size = (long)n * C;
  CUDA(cddp_cuda_cross_entropy(logits, labels, logits, stats, scratch, n, BYTES, NULL));
  CUDA(cddp_cuda_linear_backward(blas, norm_f, weight(EMBEDDING), logits, d_row, grad(EMBEDDING),
                                 NULL, n, C, BYTES, NULL));
  CUDA(cudaMemsetAsync(d_stream, 0, (size_t)size * sizeof *d_stream, NULL));
  layer_norm_backward(d_stream, d_row, last, n, LN_F);
  TRY(cddp_ddp_ready(ddp, LN_F));
  TRY(cddp_ddp_ready(ddp, LN_F + 1));
  for (int i = config.layers - 1; i >= 0; i--) {
    layer *l = &layers[i];
    int p = LAYER + PER_LAYER * i;
    linear_backward(d_up, d_stream, l->act, n, p + DOWN);
    launch(gelu_backward, 4 * size, d_up, l->up, 4 * size);
    linear_backward(d_row, d_up, l->norm2, n, p + UP);
    layer_norm_backward(d_stream, d_row, l->mid, n, p + LN_2);
    linear_backward(d_row, d_stream, l->mix, n, p + PROJECT);
    attention_backward(l);
    linear_backward(d_row, d_qkv, l->norm1, n, p + QKV);
    layer_norm_backward(d_stream, d_row, l->in, n, p + LN_1);
    for (int k = 0; k < PER_LAYER; k++) TRY(cddp_ddp_ready(ddp, p + k));
  }
  CUDA(cddp_cuda_embedding_backward(d_stream, bytes, grad(EMBEDDING), order, n, BYTES, C, NULL));
  add_rows(grad(POSITION), d_stream, B, T * C);
  TRY(cddp_ddp_ready(ddp, POSITION));
  TRY(cddp_ddp_ready(ddp, EMBEDDING));
  return 0;
}

/* Forward and backward of this rank's shards of a step. stats[0] = the sum of their losses. */
static int train_shards(cddp_ddp *ddp, int step, int shards, int rank) {
  int B = config.batch, T = config.context, shard;
  uint64_t places = gpt_text_size - (size_t)T, seed = (uint64_t)config.seed;
  CUDA(cudaMemsetAsync(stats, 0, 2 * sizeof *stats, NULL));
  while (cddp_ddp_next_shard(ddp, &shard)) {
    uint64_t first = (uint64_t)(((long)step * shards + shard) * B); /* the same on any rank */
    launch(pick, B * T, device_text, places, seed, first, bytes, labels, B * T, T);
    forward();
    if (backward(ddp, rank)) return 1;
  }
  return 0;
}

/* Waits for the GPU, and shows the mean loss over the shards. */
static cddp_result report(cddp_group *alive, int done, int shards) {
  double loss;
  cddp_result result = cddp_synchronize(alive); /* returns what failed on the GPU */
  CUDA(cudaMemcpy(&loss, stats, sizeof loss, cudaMemcpyDefault));
  if (result == CDDP_OK) /* of host memory */
    result = cddp_all_reduce(alive, &loss, 1, CDDP_F64, CDDP_SUM, NULL);
  if (result == CDDP_OK && cddp_rank(alive) == 0)
    printf("step %d/%d  loss %.4f\n", done, config.stop, loss / shards);
  return result;
}

static int train(int rank, void *group_desc) {
  cddp_group *g, *alive; /* alive: the ranks that are not lost */
  cddp_ddp *ddp;
  cddp_optim *adamw;
  TRY(cddp_init(&g, (const cddp_group_desc *)group_desc)); /* makes rank's GPU the current one */
  int shards = config.shards > 0 ? config.shards : cddp_world_size(g);
  CUDA(cublasCreate(&blas));
  float *weights = (float *)cddp_alloc(g, gpt_bytes()); /* on the device */
  TRY(weights ? CDDP_OK : CDDP_OUT_OF_MEMORY);
  float *host = (float *)allocate(gpt_bytes(), 1);
  gpt_init(weights, host);
  allocate_all();
  CUDA(cudaMemcpy(weights, host, gpt_bytes(), cudaMemcpyDefault));

  cddp_ddp_desc model = cddp_ddp_desc();
  model.max_grad_norm = config.clip;
  model.shards = config.shards;
  model.elastic = config.elastic >= 0;
  cddp_adamw_desc rule = cddp_adamw_desc();
  rule.beta2 = 0.99;
  rule.weight_decays = decays;
  TRY(cddp_ddp_create(&ddp, g, params, param_count, &model));
  rule.ddp = ddp; /* the device of the parameters; without it cddp asks CUDA */
  TRY(cddp_adamw_create(&adamw, params, param_count, &rule));
  cddp_checkpoint_desc file = cddp_checkpoint_desc();
  file.shapes = shapes;
  file.optim = adamw;
  file.ddp = ddp;
  if (config.resume && !gpt_joins()) /* a joining process receives the weights from the others */
    TRY(cddp_load(g, config.resume, params, param_count, &file));

  for (int step; (step = (int)cddp_ddp_steps(ddp)) < config.stop;) {
    TRY(cddp_optim_set_lr(adamw, gpt_learning_rate(step)));
    if (train_shards(ddp, step, shards, rank)) return 1;
    TRY(cddp_ddp_step(ddp, adamw)); /* enqueues the mean, clipping, AdamW, zero gradients */
    int done = step + 1;
    if (done % 50 != 0 && done < config.stop) continue; /* the host does not wait for the GPU */

    alive = cddp_ddp_group(ddp); /* not g: with --elastic ranks may be lost or have joined */
    cddp_result result = report(alive, done, shards);
    if (result == CDDP_OK && config.save)
      result = cddp_save(alive, config.save, params, param_count, &file);
    bool last_save = config.save && done == config.stop; /* the next step goes on without a rank */
    if (result != CDDP_PEER_LOST || !model.elastic || last_save) TRY(result);
  }

  CUDA(cudaMemcpy(host, weights, gpt_bytes(), cudaMemcpyDefault));
  cddp_result result = show_weights(cddp_ddp_group(ddp), host, gpt_bytes());
  if (result != CDDP_OK && !(result == CDDP_PEER_LOST && model.elastic)) return 1;
  cddp_optim_destroy(adamw);
  cddp_ddp_destroy(ddp);
  cddp_free(g, weights);
  cublasDestroy(blas);
  cddp_destroy(g);
  return 0;
}

int main(int argc, char **argv) {
  int code = options_read(options, sizeof options / sizeof *options, argc, argv);
  if (code >= 0) return code;
  if (!gpt_check_options() || !gpt_load_text()) return 1;
  setvbuf(stdout, NULL, _IOLBF, 0); /* whole lines, also into a file that the ranks share */
  cddp_group_desc desc = cddp_group_desc();
  desc.device = "cuda";
  desc.backend = config.backend;

  int rank = gpt_launcher_rank(option_given("-n", argc, argv));
  if (rank >= 0) return train(rank, &desc);
  cddp_result result = config.elastic < 0 /* forks the ranks: no CUDA before */
                           ? cddp_spawn(train, &desc, config.ranks)
                           : cddp_spawn_elastic(train, &desc, config.ranks, config.elastic);
  if (result == CDDP_OK) return 0;
  if (result != CDDP_PEER_LOST) fprintf(stderr, "%s\n", cddp_error());
  return 1; /* a rank that failed has printed its error */
}
