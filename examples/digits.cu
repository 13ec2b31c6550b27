/* digits.cu - trains a network on handwritten digits on GPUs, each rank on its share of the images.
     nvcc -O3 -arch=native examples/digits.cu -o digits -lnccl -lcublas
     ./digits -n 2                              2 ranks, each on a GPU of its own
     ./digits -n 2 --device cpu --epochs 5      needs no GPU; digits.c is faster there
   --data DIR takes MNIST's files, named like those in examples/data. toy.cu explains calls. */
#define CDDP_IMPLEMENTATION
#include "../cddp_kernels.cuh" /* includes cddp.h, which brings stdio.h and others */
#define FAIL(...) return fprintf(stderr, __VA_ARGS__), 1
#define TRY(calls) if (calls) FAIL("rank %d: %s\n", rank, cddp_error())
#define CUDA(call) ((call) ? (void)fprintf(stderr, "%s failed\n", #call), exit(1) : (void)0)
#define UNIFORM(bound) ((float)((2 * drand48() - 1) * (bound))) /* random, from -bound to bound */
enum {N, EPOCHS, HIDDEN, LR, DATA, DEVICE, BACKEND, OPTIONS, CLASSES = 10, BATCH = 32, MAX = 4096};
static struct { const char *name, *value; double least, most; const char *help; } option[] = {
    {"-n", "1", 1, MAX, "ranks, as child processes"},
    {"--epochs", "60", 1, MAX, "through all images"},
    {"--hidden", "1024", 1, MAX, "neurons of the hidden layer"},
    {"--lr", "0.1", 0, MAX, "learning rate, for each rank"},
    {"--data", "examples/data", 0, 0, "directory of the images and labels"},
    {"--device", "cuda", 0, 0, "cuda, or cpu: needs no GPU"},
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
static struct set { unsigned char *bytes[2]; unsigned count; int size; } training, testing;
static bool gpu; static cublasHandle_t blas; /* each function of the network does either */
static int in, hidden; /* x[n][in] -> h[n][hidden], ReLU -> y[n][CLASSES]; weights are [out][in] */
static float *w1, *w2, *x, *h, *y, *dh;
static double *stats, *scratch; static int32_t *labels; /* stats: sum of mean losses, hits */

static void copy(void *to, const void *from, size_t bytes) { /* between host and device */
  if (gpu) CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDefault)); else memcpy(to, from, bytes);
}
static void linear(const float *a, const float *w, float *out, int n, int from, int to, bool relu) {
  if (gpu) CUDA(cddp_cuda_linear(blas, a, w, NULL, out, n, from, to, relu, NULL));
  else for (int i = 0; i < n * to; i++) {
    float sum = 0;
    for (int k = 0; k < from; k++) sum += a[i / to * from + k] * w[i % to * from + k];
    out[i] = relu && sum < 0 ? 0 : sum;
  }
}
static void backward(const float *a, const float *w, const float *d, float *da, float *dw, int n,
                     int from, int to) { /* adds to dw */
  if (gpu) CUDA(cddp_cuda_linear_backward(blas, a, w, d, da, dw, NULL, n, from, to, NULL));
  else for (int i = 0; i < n * to; i++) {
    int u = i / to * from, v = i % to * from;
    for (int k = 0; k < from; k++) dw[v + k] += d[i] * a[u + k];
    for (int k = 0; k < from && da; k++) da[u + k] = (v ? da[u + k] : 0) + d[i] * w[v + k];
  }
}
/* y becomes the gradient of the mean loss of n rows; stats grow. */
static void cross_entropy(int n) {
  if (gpu) CUDA(cddp_cuda_cross_entropy(y, labels, y, stats, scratch, n, CLASSES, NULL));
  else for (int i = 0; i < n; i++) {
    float *p = y + i * CLASSES, right = p[labels[i]], top = right, sum = 0;
    for (int k = 0; k < CLASSES; k++) top = fmaxf(top, p[k]);
    for (int k = 0; k < CLASSES; k++) sum += p[k] = expf(p[k] - top);
    for (int k = 0; k < CLASSES; k++) p[k] = (p[k] / sum - (k == labels[i])) / (float)n;
    stats[0] += (double)(top - right + logf(sum)) / n, stats[1] += right >= top;
  }
}
/* Reads a set's two IDX files: big-endian magic number and sizes, then bytes. 0 is success. */
static int load(struct set *d, const char *name) {
  for (unsigned dims = 1; dims <= 3; dims += 2) { /* bytes[0] are labels, bytes[1] images */
    unsigned v[4] = {1, 1, 1, 1}; char path[MAX];
    snprintf(path, MAX, "%s/digits-%s-%s-ubyte", option[DATA].value, name,
             dims == 3 ? "images-idx3" : "labels-idx1");
    FILE *f = fopen(path, "rb"); if (!f) return perror(path), 1;
    for (unsigned i = 0; i < 4 + 4 * dims; i++) v[i / 4] = v[i / 4] << 8 | (unsigned)fgetc(f);
    size_t all = (size_t)v[1] * v[2] * v[3];
    unsigned char *p = (unsigned char *)malloc(all);
    if (v[0] != 0x800 + dims || !p || fread(p, 1, all, f) != all || fclose(f))
      FAIL("%s: no good IDX file\n", path);
    for (; dims == 1 && all > 0; all--) if (p[all - 1] >= CLASSES) FAIL("%s: label over 9\n", path);
    d->bytes[dims / 2] = p, d->count = v[1], d->size = (int)(v[2] * v[3]);
  }
  return 0;
}
/* Runs the network on the rank's next images, with noise; leaves their loss's gradient in y. */
static int forward(cddp_sampler *s, const struct set *d, float *images, double noise) {
  int32_t label[BATCH], n = 0;
  for (size_t i; n < BATCH && cddp_sampler_next(s, &i); label[n++] = d->bytes[0][i]) {
    const unsigned char *p = d->bytes[1] + i * (size_t)d->size;
    float light = 1;
    for (int k = 0; k < d->size; k++) light = fmaxf(light, p[k]);
    for (int k = 0; k < d->size; k++) images[n * in + k] = p[k] / light + UNIFORM(noise);
    images[n * in + d->size] = 1; /* its weight is the bias */
  }
  copy(x, images, (size_t)(n * in) * sizeof *x), copy(labels, label, (size_t)n * sizeof *label);
  linear(x, w1, h, n, in, hidden, true), linear(h, w2, y, n, hidden, CLASSES, false);
  return cross_entropy(n), n;
}
static int train(int rank, void *group_desc) {
  int epochs = (int)number(EPOCHS), n, steps;
  size_t n1 = (size_t)(hidden * in), n2 = (size_t)(CLASSES * hidden), floats = n1 + n2;
  uint64_t hash = 0xcbf29ce484222325u, hashes[MAX]; double seen[2], zero[2] = {0, 0};
  cddp_group *g; cddp_ddp *ddp; cddp_optim *sgd; cddp_sampler samples, test;
  TRY(cddp_init(&g, (const cddp_group_desc *)group_desc));
  if (gpu && cublasCreate(&blas) != CUBLAS_STATUS_SUCCESS) FAIL("rank %d: no cuBLAS\n", rank);
  int world = cddp_world_size(g);
  floats += (size_t)(BATCH * (in + 2 * hidden + CLASSES + 1));
  TRY(!(stats = (double *)cddp_alloc(g, 16 + CDDP_CUDA_SCRATCH_BYTES + floats * sizeof *x)));
  scratch = stats + 2, w1 = (float *)(scratch + CDDP_CUDA_SCRATCH_BYTES / sizeof *scratch);
  w2 = w1 + n1, x = w2 + n2, h = x + BATCH * in, dh = h + BATCH * hidden, y = dh + BATCH * hidden;
  labels = (int32_t *)(y + BATCH * CLASSES);
  float *host = (float *)calloc(floats, sizeof *host); if (!host) FAIL("out of memory\n");
  srand48(rank + 1); /* noise of its own for each rank */
  for (size_t i = 0; i < n1 + n2; i++) host[i] = UNIFORM(1 / sqrt(i < n1 ? in : hidden));
  copy(w1, host, (n1 + n2) * sizeof *host);
  cddp_param p[] = {{"w1", w1, NULL, n1, CDDP_F32}, {"w2", w2, NULL, n2, CDDP_F32}};
  cddp_sgd_desc options = cddp_sgd_desc(); options.momentum = 0.9;
  cddp_sampler_desc shuffled = {training.count, rank, world, 1, true, false, false}, exact = {
      testing.count, rank, world, 1, false, false, true};
  TRY(cddp_ddp_create(&ddp, g, p, 2, NULL));
  options.ddp = ddp; /* tells where parameters are: without a GPU CUDA is not asked */
  TRY(cddp_sgd_create(&sgd, p, 2, &options));
  TRY(cddp_sampler_init(&samples, &shuffled) || cddp_sampler_init(&test, &exact));
  for (int e = 0; e < epochs; e++) {
    cddp_sampler_set_epoch(&samples, (uint64_t)e), copy(stats, zero, sizeof zero);
    TRY(cddp_optim_set_lr(sgd, number(LR) * world * (epochs - e) / epochs)); /* falls to nearly 0 */
    for (steps = 0; (n = forward(&samples, &training, host, 0.36)) > 0; steps++) {
      backward(h, w2, y, dh, (float *)p[1].grad, n, hidden, CLASSES);
      TRY(cddp_ddp_ready(ddp, 1)); /* the ranks average it while ... */
      if (gpu) CUDA(cddp_cuda_relu_backward(dh, h, (size_t)(n * hidden), NULL));
      else for (int i = 0; i < n * hidden; i++) dh[i] = h[i] > 0 ? dh[i] : 0;
      backward(x, w1, dh, NULL, (float *)p[0].grad, n, in, hidden);
      TRY(cddp_ddp_ready(ddp, 0) || cddp_ddp_step(ddp, sgd)); /* ... this one is computed */
    }
    TRY(cddp_synchronize(g)); copy(seen, stats, sizeof seen), seen[0] /= steps;
    TRY(cddp_all_reduce(g, seen, 1, CDDP_F64, CDDP_AVG, NULL));
    if (rank == 0) printf("epoch %2d/%d  loss %.4f\n", e + 1, epochs, seen[0]);
  }
  for (copy(stats, zero, sizeof zero); forward(&test, &testing, host, 0) > 0;) {}
  copy(seen, stats, sizeof seen);
  TRY(cddp_all_reduce(g, &seen[1], 1, CDDP_F64, CDDP_SUM, NULL));
  if (rank == 0) printf("test accuracy: %.1f %%\n", 100 * seen[1] / testing.count);
  copy(host, w1, (n1 + n2) * sizeof *host);
  for (size_t i = 0; i < (n1 + n2) * sizeof *host; i++) /* 64-bit FNV-1a */
    hash = (hash ^ ((unsigned char *)host)[i]) * 0x100000001b3u;
  TRY(cddp_all_gather(g, &hash, hashes, 1, CDDP_I64, NULL));
  for (int r = 0; r < world && !rank; r++) printf("rank %d weights %016" PRIx64 "\n", r, hashes[r]);
  for (int r = 0; r < world; r++) if (hashes[r] != hash) FAIL("rank %d's weights differ\n", r);
  cddp_optim_destroy(sgd), cddp_ddp_destroy(ddp), cddp_free(g, stats), free(host);
  return gpu ? (void)cublasDestroy(blas) : (void)0, cddp_destroy(g), 0;
}
int main(int argc, char **argv) {
  int code = read_options(argc, argv);
  if (code >= 0) return code;
  if (load(&training, "train") || load(&testing, "test") || training.size != testing.size) return 1;
  in = training.size + 1, hidden = (int)number(HIDDEN), setvbuf(stdout, NULL, _IOLBF, 0);
  cddp_group_desc desc = cddp_group_desc(); desc.device = option[DEVICE].value;
  desc.backend = option[BACKEND].value, gpu = strcmp(desc.device, "cpu") != 0;
  for (int i = 1; i < argc && cddp_launcher_rank() == 0; i += 2)
    if (strcmp(argv[i], "-n") == 0) fprintf(stderr, "-n is ignored: a launcher started this\n");
  if (cddp_launcher_rank() >= 0) return train(cddp_launcher_rank(), &desc); /* torchrun, mpirun */
  cddp_result r = cddp_spawn(train, &desc, (int)number(N)); /* a rank that fails says why itself */
  return r && r != CDDP_PEER_LOST ? fprintf(stderr, "%s\n", cddp_error()), 1 : r != CDDP_OK;
}
