/* gpt.cu - gpt.c on GPUs: the same network, start, batches, rates and files.
     nvcc -O3 -arch=native examples/gpt.cu -o gpt -lnccl -lcublas
     ./gpt -n 2 --save FILE                     2 ranks, each on a GPU of its own
     ./gpt -n 2 --backend cpu                   2 ranks that may share a GPU: slower, for tests
   gpt.c with as many --shards as here are ranks has the same losses, up to rounding; it needs no
   GPU, and resumes from FILE too: with as many --steps it only writes a text. cuBLAS multiplies,
   cddp_kernels.cuh does most else, the kernels below the rest, all deterministic. */
#define CDDP_IMPLEMENTATION
#include "../cddp_kernels.cuh" /* includes cddp.h, which brings stdio.h and others */
#define FAIL(...) return fprintf(stderr, __VA_ARGS__), 1
#define TRY(calls) if (calls) FAIL("rank %d: %s\n", rank, cddp_error())
#define CUDA(call) ((call) ? (void)fprintf(stderr, "%s failed\n", #call), exit(1) : (void)0)
#define KERNEL static __global__ void __launch_bounds__(THREADS)
enum { N, STEPS, STOP, BATCH, CONTEXT, LAYERS, HEADS, CHANNELS, SEED, LR, DECAY, CLIP, TEXT, SAVE,
       RESUME, BACKEND, OPTIONS };
static struct { const char *name, *value; double least, most; const char *help; } option[] = {
    {"-n", "1", 1, 1e6, "ranks, as child processes"},
    {"--steps", "800", 1, 1e6, "in all, those of a resumed checkpoint among them"},
    {"--stop", "1e6", 1, 1e6, "end after this step, as if interrupted"},
    {"--batch", "8", 1, 1e6, "sequences of a rank in a step"},
    {"--context", "64", 1, 1e6, "bytes of a sequence"},
    {"--layers", "4", 1, 1e6, "of the network"},
    {"--heads", "4", 1, 1e6, "of attention"},
    {"--channels", "128", 1, 1e6, "a multiple of --heads"},
    {"--seed", "1", 0, 1e18, "of weights and batches"},
    {"--lr", "2e-3", 0, 1e6, "highest learning rate"},
    {"--decay", "0.1", 0, 1e6, "weight decay"},
    {"--clip", "1", 0, 1e6, "largest norm of the gradient; 0: any"},
    {"--text", "examples/data/shakespeare.txt", 0, 0, "file to learn"},
    {"--save", NULL, 0, 0, "file for a checkpoint"},
    {"--resume", NULL, 0, 0, "checkpoint to go on from"},
    {"--backend", NULL, 0, 0, "nccl, or cpu: ranks may share a GPU"},
};
static double number(int k) { return atof(option[k].value); }
/* Reads the command line. Returns -1, or what main must return. */
static int read_options(int argc, char **argv) {
  bool help = argc == 2 && strcmp(argv[1], "--help") == 0;
  int i, k;
  for (i = 1; i + 1 < argc && !help; i += 2) {
    double x = atof(argv[i + 1]);
    for (k = 0; k < OPTIONS && strcmp(argv[i], option[k].name) != 0;) k++;
    if (k == OPTIONS) break;
    if (option[k].most > 0 && !(x >= option[k].least && x <= option[k].most)) break;
    option[k].value = argv[i + 1];
  }
  if (i == argc) return -1;
  if (!help) fprintf(stderr, "%s: no such option, or a wrong value\n", argv[i]);
  for (k = 0; k < OPTIONS; k++)
    fprintf(help ? stdout : stderr, "  %-10s  %s (%s)\n", option[k].name, option[k].help,
            option[k].value ? option[k].value : "none");
  return help ? 0 : 2;
}

/* The parameters, in this order; after each weight comes its bias or, of an embedding, nothing. */
enum { EMBEDDING, POSITION, LN, LAYER = 4, LN1 = 0, QKV = 2, OUT = 4, LN2 = 6, UP = 8, DOWN = 10,
       PARTS = 12, BYTES = 256, MAX_LAYERS = 64, MAX = LAYER + PARTS * MAX_LAYERS,
       MAX_TEXT = 1 << 28, THREADS = 256 /* of a block */ };
static const struct { const char *name; int rows, columns; } parts[] = { /* in channels; 0: none */
    {"wte.weight", 0, 1}, {"wpe.weight", 0, 1}, {"ln_f.weight", 1, 0}, {"ln_f.bias", 1, 0},
    {"ln_1.weight", 1, 0}, {"ln_1.bias", 1, 0}, {"attn.c_attn.weight", 3, 1},
    {"attn.c_attn.bias", 3, 0}, {"attn.c_proj.weight", 1, 1}, {"attn.c_proj.bias", 1, 0},
    {"ln_2.weight", 1, 0}, {"ln_2.bias", 1, 0}, {"mlp.c_fc.weight", 4, 1}, {"mlp.c_fc.bias", 4, 0},
    {"mlp.c_proj.weight", 1, 4}, {"mlp.c_proj.bias", 1, 0}};
static int B, T, L, H, C, count; /* sequences, bytes of each, layers, heads, channels; parameters */
static cddp_param params[MAX]; static cddp_shape shapes[MAX]; static double decays[MAX];
static float *data(int p) { return (float *)params[p].data; }
static float *grad(int p) { return (float *)params[p].grad; }
static int rows(int p) { return (int)shapes[p].size[0]; }
static int columns(int p) { return (int)shapes[p].size[1]; }
typedef struct layer {          /* what forward keeps for backward; rows of C floats, or as said */
  float *in, *norm1, *qkv;      /* the residual stream; qkv, rows of 3 C: queries, keys, values */
  float *attention, *mix, *mid; /* [B][H][T][T]; all heads' results; the stream with them added */
  float *norm2, *up, *act;      /* up, rows of 4 C; act: GELU of it */
} layer; static layer layers[MAX_LAYERS];
static float *top, *normed, *logits, *d_stream, *d_row, *d_qkv, *d_up, *d_attention; /* gradients */
static float *more, *ones; /* rows of C that are added to others; n ones */
static int32_t *bytes, *labels; /* [B][T]: the batch, and after each byte the right next one */
static double *stats, *scratch, *order; /* stats: the batch's mean loss and right guesses */
static unsigned char *text; static size_t text_size; static cublasHandle_t blas;

template <typename... P, typename... A> /* in blocks of THREADS, the last one with some too many */
static void launch(void (*kernel)(P...), long threads, A... arguments) {
  cudaLaunchConfig_t c; memset((void *)&c, 0, sizeof c);
  c.gridDim = dim3((unsigned)((threads + THREADS - 1) / THREADS)), c.blockDim = dim3(THREADS);
  CUDA(cudaLaunchKernelEx(&c, kernel, static_cast<P>(arguments)...));
}
static __device__ long thread() { return (long)blockIdx.x * THREADS + threadIdx.x; }
static __device__ int lane() { return (int)threadIdx.x % 32; }
static __device__ float warp_sum(float x) { /* in all 32 lanes */
  for (int k = 16; k > 0; k /= 2) x += __shfl_xor_sync(0xffffffffu, x, k);
  return x;
}
/* A thread for each byte of the batch; sequence s is at random place first + s (splitmix64) */
KERNEL pick(const unsigned char *from, uint64_t places, uint64_t seed, uint64_t first, int32_t *in,
            int32_t *right, long n, int length) {
  long i = thread(), s = i / length; if (i >= n) return;
  uint64_t z = seed * 0xd1342543de82ef95u + (first + (uint64_t)s + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u, z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  from += (z ^ z >> 31) % places + (uint64_t)(i % length), in[i] = from[0], right[i] = from[1];
}
KERNEL add(float *out, const float *a, const float *b, long n, long repeated) { /* b's size */
  long i = thread(); if (i < n) out[i] = a[i] + b[i % repeated];
}
/* torch.nn.LayerNorm of rows of width w and b, a warp for each row */
static __device__ float center(const float *in, int width, float *mean) { /* 1 / deviation */
  float sum = 0, squares = 0;
  for (int c = lane(); c < width; c += 32) sum += in[c];
  *mean = warp_sum(sum) / (float)width;
  for (int c = lane(); c < width; c += 32) squares += (in[c] - *mean) * (in[c] - *mean);
  return 1 / sqrtf(warp_sum(squares) / (float)width + 1e-5f);
}
KERNEL norm_rows(float *out, const float *in, const float *w, const float *b, long n, int width) {
  long at = thread() / 32 * width; if (at >= n * width) return;
  float mean, scale = center(in + at, width, &mean);
  for (int c = lane(); c < width; c += 32) out[at + c] = (in[at + c] - mean) * scale * w[c] + b[c];
}
/* Adds to d_in; dw: what each row adds to the gradient of w */
KERNEL norm_rows_backward(float *d_in, float *dw, const float *d_out, const float *in,
                          const float *w, long n, int width) {
  long at = thread() / 32 * width; if (at >= n * width) return;
  float mean, scale = center(in + at, width, &mean), sum = 0, dot = 0;
  for (int c = lane(); c < width; c += 32) {
    dw[at + c] = d_out[at + c] * (in[at + c] - mean) * scale;
    sum += d_out[at + c] * w[c], dot += dw[at + c] * w[c];
  }
  sum = warp_sum(sum) / (float)width, dot = warp_sum(dot) / (float)width;
  for (int c = lane(); c < width; c += 32)
    d_in[at + c] += scale * (d_out[at + c] * w[c] - sum - (in[at + c] - mean) * scale * dot);
}
/* GELU with tanh, as GPT-2's; without out, its backward: d becomes the gradient of in */
KERNEL gelu(float *out, float *d, const float *in, long n) {
  long i = thread(); if (i >= n) return;
  float x = in[i], t = tanhf(0.7978845608f * (x + 0.044715f * x * x * x)), half = 0.5f * (1 + t);
  if (out) out[i] = half * x;
  else d[i] *= half + 0.5f * x * (1 - t * t) * 0.7978845608f * (1 + 0.134145f * x * x);
}
/* Softmax of the first i + 1 numbers of row i of each matrix, in place, a warp for each row; with
   the results a, its backward: p becomes the gradient of what went in */
KERNEL softmax_rows(float *p, const float *a, long n, int length) {
  long row = thread() / 32; if (row >= n) return;
  int last = (int)(row % length); float most = -INFINITY, sum = 0;
  p += row * length, a += a ? row * length : 0;
  for (int j = lane(); j <= last && !a; j += 32) most = fmaxf(most, p[j]);
  for (int k = 16; k > 0; k /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, k));
  for (int j = lane(); j <= last; j += 32) sum += a ? p[j] * a[j] : (p[j] = expf(p[j] - most));
  sum = warp_sum(sum);
  for (int j = lane(); j < length; j += 32)
    p[j] = j > last ? 0 : a ? a[j] * (p[j] - sum) : p[j] / sum;
}
/* torch.nn.Linear of n rows, with the weights of parameter p and the bias of p + 1, and plus */
static void linear(float *out, const float *plus, const float *in, int n, int p) {
  float *to = plus ? more : out; long size = (long)n * rows(p);
  CUDA(cddp_cuda_linear(blas, in, data(p), data(p + 1), to, n, columns(p), rows(p), false, NULL));
  if (plus) launch(add, size, out, plus, more, size, size);
}
static void linear_backward(float *d_in, const float *d_out, const float *in, int n, int p) {
  CUDA(cddp_cuda_linear_backward(blas, in, data(p), d_out, d_in, grad(p), grad(p + 1), n,
                                 columns(p), rows(p), NULL));
}
static void add_columns(float *sums, const float *x, int n, int width) { /* sums += ones x */
  CUDA(cddp_cuda_linear_backward(blas, ones, NULL, x, NULL, sums, NULL, n, 1, width, NULL));
}
static void layer_norm_backward(float *d_in, const float *d_out, const float *in, int n, int p) {
  launch(norm_rows_backward, 32L * n, d_in, more, d_out, in, data(p), n, C);
  add_columns(grad(p), more, n, C), add_columns(grad(p + 1), d_out, n, C);
}
/* A matrix for each head of each sequence: the first; how far to the next row, head, sequence */
typedef struct { float *at; int row, head, sequence; cublasOperation_t op; } matrices;
static matrices heads(float *x, int row) { return {x, row, C / H, T * row, CUBLAS_OP_N}; }
static matrices squares(float *x) { return {x, T, T * T, H * T * T, CUBLAS_OP_N}; }
static matrices flip(matrices m) { m.op = CUBLAS_OP_T; return m; } /* transposed */
/* c[m][n] = scale a b, of all heads; cuBLAS takes rows for columns, so that b comes first */
static void matmul(matrices c, int m, int n, int k, float scale, matrices a, matrices b) {
  const float zero = 0;
  for (int h = 0; h < H; h++, a.at += a.head, b.at += b.head, c.at += c.head)
    CUDA(cublasSgemmStridedBatched(blas, b.op, a.op, n, m, k, &scale, b.at, b.row, b.sequence, a.at,
                                   a.row, a.sequence, &zero, c.at, c.row, c.sequence, B));
}
/* mix = softmax(q k' / sqrt(C / H)) v of each head; with d_mix, the gradients of q, k and v */
static void attend(const layer *l, float *d_mix) {
  matrices q = heads(l->qkv, 3 * C), k = heads(l->qkv + C, 3 * C), v = heads(l->qkv + 2 * C, 3 * C);
  matrices a = squares(l->attention), d_a = squares(d_attention), d = heads(d_mix, C);
  int size = C / H; float scale = 1 / sqrtf((float)size); long n = (long)B * H * T;
  if (!d_mix) {
    matmul(a, T, T, size, scale, q, flip(k));
    launch(softmax_rows, 32 * n, a.at, (float *)NULL, n, T);
    return matmul(heads(l->mix, C), T, size, T, 1, a, v);
  }
  matmul(heads(d_qkv + 2 * C, 3 * C), T, size, T, 1, flip(a), d);
  matmul(d_a, T, T, size, 1, d, flip(v));
  launch(softmax_rows, 32 * n, d_a.at, a.at, n, T);
  matmul(heads(d_qkv, 3 * C), T, size, T, scale, d_a, k);
  matmul(heads(d_qkv + C, 3 * C), T, size, T, scale, flip(d_a), q);
}
/* The logits of what follows each byte of the batch */
static void forward(void) {
  int n = B * T; long size = (long)n * C;
  CUDA(cddp_cuda_embedding(data(EMBEDDING), bytes, more, n, BYTES, C, NULL));
  launch(add, size, layers[0].in, more, data(POSITION), size, T * C);
  for (int i = 0, p = LAYER; i < L; i++, p += PARTS) {
    layer *l = &layers[i];
    launch(norm_rows, 32L * n, l->norm1, l->in, data(p + LN1), data(p + LN1 + 1), n, C);
    linear(l->qkv, NULL, l->norm1, n, p + QKV);
    attend(l, NULL);
    linear(l->mid, l->in, l->mix, n, p + OUT);
    launch(norm_rows, 32L * n, l->norm2, l->mid, data(p + LN2), data(p + LN2 + 1), n, C);
    linear(l->up, NULL, l->norm2, n, p + UP);
    launch(gelu, 4 * size, l->act, (float *)NULL, l->up, 4 * size);
    linear(i + 1 < L ? l[1].in : top, l->mid, l->act, n, p + DOWN);
  }
  launch(norm_rows, 32L * n, normed, top, data(LN), data(LN + 1), n, C);
  CUDA(cddp_cuda_linear(blas, normed, data(EMBEDDING), NULL, logits, n, C, BYTES, false, NULL));
}
/* The gradients of the mean cross-entropy, which stats get. ready: may be averaged now. */
static int backward(cddp_ddp *ddp, int rank) {
  int n = B * T; long size = (long)n * C;
  CUDA(cudaMemsetAsync(stats, 0, 2 * sizeof *stats, NULL));
  CUDA(cddp_cuda_cross_entropy(logits, labels, logits, stats, scratch, n, BYTES, NULL));
  CUDA(cddp_cuda_linear_backward(blas, normed, data(EMBEDDING), logits, d_row, grad(EMBEDDING),
                                 NULL, n, C, BYTES, NULL));
  CUDA(cudaMemsetAsync(d_stream, 0, (size_t)size * sizeof *d_stream, NULL));
  layer_norm_backward(d_stream, d_row, top, n, LN);
  TRY(cddp_ddp_ready(ddp, LN) || cddp_ddp_ready(ddp, LN + 1));
  for (int i = L - 1, p = LAYER + PARTS * i; i >= 0; i--, p -= PARTS) {
    layer *l = &layers[i];
    linear_backward(d_up, d_stream, l->act, n, p + DOWN);
    launch(gelu, 4 * size, (float *)NULL, d_up, l->up, 4 * size);
    linear_backward(d_row, d_up, l->norm2, n, p + UP);
    layer_norm_backward(d_stream, d_row, l->mid, n, p + LN2);
    linear_backward(d_row, d_stream, l->mix, n, p + OUT);
    attend(l, d_row);
    linear_backward(d_row, d_qkv, l->norm1, n, p + QKV);
    layer_norm_backward(d_stream, d_row, l->in, n, p + LN1);
    for (int k = 0; k < PARTS; k++) TRY(cddp_ddp_ready(ddp, p + k));
  }
  CUDA(cddp_cuda_embedding_backward(d_stream, bytes, grad(EMBEDDING), order, n, BYTES, C, NULL));
  add_columns(grad(POSITION), d_stream, B, T * C);
  TRY(cddp_ddp_ready(ddp, POSITION) || cddp_ddp_ready(ddp, EMBEDDING));
  return 0;
}
static double normal(void) { return sqrt(-2 * log(1 - drand48())) * cos(6.283185307 * drand48()); }
static float *floats(long n) { float *p; /* on the device */
  return CUDA(cudaMalloc((void **)&p, (size_t)n * sizeof *p)), p; }
/* GPT-2's start: N(0, 0.02), less where the residual stream is added to; norms 1, biases 0. */
static void init_model(float *device, float *w) { /* w: the same on the host */
  for (int i = 0; i < count; device += params[i].count, w += params[i++].count) {
    int part = i < LAYER ? i : LAYER + (i - LAYER) % PARTS, wide = parts[part].columns * C;
    const char *name = parts[part].name;
    char *label = (char *)malloc(48); if (!label) exit(1); /* "ln_f.weight", "h.0.ln_1.weight" */
    if (sprintf(label, "h.%d.%s", (i - LAYER) / PARTS, name) && i < LAYER) strcpy(label, name);
    int high = i == EMBEDDING ? BYTES : i == POSITION ? T : parts[part].rows * C;
    cddp_shape shape = {wide > 0 ? 2 : 1, {(uint64_t)high, (uint64_t)wide}};
    cddp_param param = {label, device, NULL, (size_t)(high * (wide > 0 ? wide : 1)), CDDP_F32};
    params[i] = param, shapes[i] = shape, decays[i] = wide > 0 ? number(DECAY) : 0;
    double spread = strstr(name, "c_proj") ? 0.02 / sqrt(2.0 * L) : 0.02;
    float constant = strstr(name, "ln_") && strstr(name, "weight") ? 1 : 0;
    for (size_t k = 0; k < param.count; k++) w[k] = wide ? (float)(spread * normal()) : constant;
  }
  long n = (long)B * T, r = n * C, squared = n * H * T;
  for (layer *l = layers; l < layers + L; l++) {
    l->in = floats(r), l->norm1 = floats(r), l->qkv = floats(3 * r), l->mix = floats(r);
    l->mid = floats(r), l->norm2 = floats(r), l->up = floats(4 * r), l->act = floats(4 * r);
    l->attention = floats(squared);
  }
  top = floats(r), normed = floats(r), d_stream = floats(r), d_row = floats(r);
  d_qkv = floats(3 * r), d_up = floats(4 * r), d_attention = floats(squared);
  logits = floats(n * BYTES), more = floats(r), bytes = (int32_t *)floats(2 * n);
  stats = (double *)floats(4 + CDDP_CUDA_SCRATCH_BYTES / sizeof(float)), scratch = stats + 2;
  order = (double *)floats((long)(CDDP_CUDA_ORDER_BYTES(n) / sizeof(float)));
  labels = bytes + n, ones = floats(n), CUDA(cddp_cuda_fill(ones, CDDP_F32, (size_t)n, 1, NULL));
}

static int train(int rank, void *group_desc) {
  int steps = (int)number(STEPS), stop = (int)fmin(steps, number(STOP)), warm = steps / 20 + 1;
  size_t size = (size_t)(C * (BYTES + T + 2 + L * (12 * C + 13))) * sizeof(float);
  uint64_t hash = 0xcbf29ce484222325u, same; /* FNV-1a */
  cddp_group *g; cddp_ddp *ddp; cddp_optim *adamw; float *w, *weights = (float *)malloc(size);
  TRY(cddp_init(&g, (const cddp_group_desc *)group_desc) || !(w = (float *)cddp_alloc(g, size)));
  if (!weights || cublasCreate(&blas)) FAIL("rank %d: no memory or no cuBLAS\n", rank);
  unsigned char *device_text = (unsigned char *)floats((long)(text_size / sizeof(float)) + 1);
  CUDA(cudaMemcpy(device_text, text, text_size, cudaMemcpyDefault));
  srand48((long)number(SEED)), init_model(w, weights);
  CUDA(cudaMemcpy(w, weights, size, cudaMemcpyDefault));
  cddp_adamw_desc options = {}; options.beta2 = 0.99, options.weight_decays = decays;
  cddp_ddp_desc clipped = {}; clipped.max_grad_norm = number(CLIP);
  TRY(cddp_ddp_create(&ddp, g, params, count, &clipped));
  options.ddp = ddp;
  TRY(cddp_adamw_create(&adamw, params, count, &options));
  cddp_checkpoint_desc all = {}; all.shapes = shapes, all.optim = adamw, all.ddp = ddp;
  TRY(option[RESUME].value && cddp_load(g, option[RESUME].value, params, count, &all));
  for (int t = (int)cddp_ddp_steps(ddp); t < stop; t++) { /* enqueues; each 50 steps it waits */
    launch(pick, B * T, device_text, text_size - (size_t)T, (uint64_t)number(SEED),
           (uint64_t)((t * (long)cddp_world_size(g) + rank) * B), bytes, labels, B * T, T);
    forward();
    if (backward(ddp, rank)) return 1;
    double rate = t < warm ? (t + 1.0) / warm : 0.55 + 0.45 * cos(3.14159265 * t / steps);
    TRY(cddp_optim_set_lr(adamw, number(LR) * rate) || cddp_ddp_step(ddp, adamw));
    if ((t + 1) % 50 && t + 1 < stop) continue;
    double loss; TRY(cddp_synchronize(g)); /* says what failed */
    CUDA(cudaMemcpy(&loss, stats, sizeof loss, cudaMemcpyDefault));
    TRY(cddp_all_reduce(g, &loss, 1, CDDP_F64, CDDP_AVG, NULL));
    if (rank == 0) fprintf(stderr, "step %d/%d  loss %.4f\n", t + 1, steps, loss);
    TRY(option[SAVE].value && cddp_save(g, option[SAVE].value, params, count, &all));
  }
  CUDA(cudaMemcpy(weights, w, size, cudaMemcpyDefault));
  for (size_t i = 0; i < size; i++) hash = (hash ^ ((uint8_t *)weights)[i]) * 0x100000001b3u;
  TRY((same = hash, cddp_broadcast(g, &same, 1, CDDP_I64, 0, NULL)));
  if (same != hash) FAIL("rank %d's weights differ from rank 0's\n", rank);
  if (rank == 0) printf("%d ranks, weights %016" PRIx64 "\n", cddp_world_size(g), hash);
  cddp_optim_destroy(adamw), cddp_ddp_destroy(ddp), cddp_free(g, w), cublasDestroy(blas);
  return cddp_destroy(g), 0;
}

int main(int argc, char **argv) {
  int code = read_options(argc, argv);
  if (code >= 0) return code;
  B = (int)number(BATCH), T = (int)number(CONTEXT), L = (int)number(LAYERS), H = (int)number(HEADS);
  C = (int)number(CHANNELS), count = LAYER + PARTS * L;
  if (C % H || L > MAX_LAYERS) FAIL("--channels: a multiple of --heads; --layers: to 64\n");
  FILE *f = fopen(option[TEXT].value, "rb"); if (!f) return perror(option[TEXT].value), 1;
  text = (unsigned char *)malloc(MAX_TEXT), text_size = text ? fread(text, 1, MAX_TEXT, f) : 0;
  if (ferror(f) || text_size <= (size_t)T) FAIL("%s: shorter than --context\n", option[TEXT].value);
  fclose(f), setvbuf(stdout, NULL, _IOLBF, 0);
  cddp_group_desc desc = {}; desc.device = "cuda", desc.backend = option[BACKEND].value;
  for (int i = 1; i < argc && cddp_launcher_rank() == 0; i += 2)
    if (strcmp(argv[i], "-n") == 0) fprintf(stderr, "-n is ignored: a launcher started this\n");
  if (cddp_launcher_rank() >= 0) return train(cddp_launcher_rank(), &desc); /* torchrun, mpirun */
  cddp_result r = cddp_spawn(train, &desc, (int)number(N)); /* a rank that fails says why itself */
  return r && r != CDDP_PEER_LOST ? fprintf(stderr, "%s\n", cddp_error()), 1 : r != CDDP_OK;
}
