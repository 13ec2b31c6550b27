/* toy.cu - the same few calls on GPUs: Linear 10-10, ReLU, Linear 10-5, random data.

     nvcc -O3 -arch=native examples/toy.cu -o toy -lnccl -lcublas
     ./toy                                      1 rank on a GPU
     ./toy -n 2                                 2 ranks, each on its own GPU
     ./toy -n 2 --backend cpu                   2 ranks that may share a GPU: slower, for tests
     ./toy -n 2 --device cpu                    needs no GPU
     torchrun --no-python --nproc-per-node 2 ./toy

   The differences to toy.c: cddp_alloc returns device memory, and the layers are kernels. All work
   is enqueued on a stream; the program waits for the GPU at the end, where it reads the loss. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp_kernels.cuh" /* includes cddp.h, stdio.h, stdlib.h, string.h and math.h */

enum { BATCH = 20, IN = 10, HIDDEN = 10, OUT = 5, STEPS = 100 };
enum { WEIGHTS = HIDDEN * (IN + 1 + OUT) + OUT };

#define TRY(call) \
  do { \
    if ((call) != CDDP_OK) return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1; \
  } while (0)
#define CUDA(call) ((call) ? (void)fprintf(stderr, "%s failed\n", #call), exit(1) : (void)0)

static bool gpu; /* else the functions below compute the same on the CPU */
static cublasHandle_t blas;
static cudaStream_t stream;  /* 0: the default stream, which is cddp's default too */

static void copy(void *to, const void *from, size_t bytes) { /* between host and device */
  if (gpu) CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
  else memcpy(to, from, bytes);
}

/* y = x w' + b, then ReLU if asked. */
static void linear(const float *x, const float *w, const float *b, float *y, int in, int out,
                   bool relu) {
  if (gpu) CUDA(cddp_cuda_linear(blas, x, w, b, y, BATCH, in, out, relu, stream));
  else for (int i = 0; i < BATCH * out; i++) {
    float sum = b[i % out];
    for (int k = 0; k < in; k++) sum += x[i / out * in + k] * w[i % out * in + k];
    y[i] = relu && sum < 0 ? 0 : sum;
  }
}

/* Adds to the gradients of w and b, given dy; dx, unless NULL, is the gradient of x. */
static void linear_backward(const float *x, const float *w, const float *dy, float *dx, float *dw,
                            float *db, int in, int out) {
  if (gpu) CUDA(cddp_cuda_linear_backward(blas, x, w, dy, dx, dw, db, BATCH, in, out, stream));
  else for (int r = 0; r < BATCH; r++)
    for (int o = 0; o < out; o++) {
      db[o] += dy[r * out + o];
      for (int i = 0; i < in; i++) {
        dw[o * in + i] += dy[r * out + o] * x[r * in + i];
        if (dx) dx[r * in + i] = (o > 0 ? dx[r * in + i] : 0) + dy[r * out + o] * w[o * in + i];
      }
    }
}

static void relu_backward(float *dy, const float *y, int n) {
  if (gpu) CUDA(cddp_cuda_relu_backward(dy, y, (size_t)n, stream));
  else for (int i = 0; i < n; i++) dy[i] = y[i] > 0 ? dy[i] : 0;
}

/* dy = the gradient of the mean squared error, which is added to *loss. */
static void mse(const float *y, const float *labels, float *dy, double *loss, double *scratch) {
  const int n = BATCH * OUT;
  if (gpu) CUDA(cddp_cuda_mse(y, labels, dy, loss, scratch, n, stream));
  else for (int i = 0; i < n; i++) {
    dy[i] = 2 * (y[i] - labels[i]) / n;
    *loss += (double)((y[i] - labels[i]) * (y[i] - labels[i])) / n;
  }
}

static int train(int rank, void *group_desc) {
  float host[WEIGHTS], data[BATCH * (IN + OUT)];
  double loss = 0;
  cddp_group *g;
  cddp_ddp *ddp;
  cddp_optim *sgd;
  TRY(cddp_init(&g, (const cddp_group_desc *)group_desc)); /* 1  makes rank's GPU the current one */
  printf("Running on rank %d.\n", cddp_rank(g));
  if (gpu && cublasCreate(&blas) != CUBLAS_STATUS_SUCCESS)
    return fprintf(stderr, "rank %d: no cuBLAS\n", rank), 1;
  srand48(1000 + cddp_rank(g)); /* each rank has other data, and other weights until call 2 */
  for (int i = 0; i < WEIGHTS; i++) host[i] = (float)(2 * drand48() - 1) / sqrtf(IN);
  for (int i = 0; i < BATCH * (IN + OUT); i++) data[i] = (float)(2 * drand48() - 1) * 1.7f;

  /* Weights, data, activations and the loss's memory, all in one piece of device memory. */
  const size_t floats = WEIGHTS + BATCH * (IN + OUT + 2 * HIDDEN + 2 * OUT);
  double *statistics = (double *)cddp_alloc(g, CDDP_CUDA_SCRATCH_BYTES + 16 + floats * 4);
  TRY(statistics ? CDDP_OK : CDDP_OUT_OF_MEMORY);
  double *scratch = statistics + 2;
  float *w1 = (float *)(scratch + CDDP_CUDA_SCRATCH_BYTES / sizeof *scratch);
  float *w2 = w1 + HIDDEN * IN, *b1 = w2 + OUT * HIDDEN, *b2 = b1 + HIDDEN, *x = b2 + OUT;
  float *labels = x + BATCH * IN, *h = labels + BATCH * OUT, *dh = h + BATCH * HIDDEN;
  float *y = dh + BATCH * HIDDEN, *dy = y + BATCH * OUT;
  copy(w1, host, sizeof host);
  copy(x, data, sizeof data);

  cddp_param params[] = {{"net1.weight", w1, NULL, HIDDEN * IN, CDDP_F32},
                         {"net1.bias", b1, NULL, HIDDEN, CDDP_F32},
                         {"net2.weight", w2, NULL, OUT * HIDDEN, CDDP_F32},
                         {"net2.bias", b2, NULL, OUT, CDDP_F32}};
  cddp_sgd_desc options = cddp_sgd_desc();
  options.lr = 0.001;
  TRY(cddp_ddp_create(&ddp, g, params, 4, NULL)); /* 2  copies rank 0's weights, sets grad */
  options.ddp = ddp; /* the device of the parameters; without it cddp asks CUDA */
  TRY(cddp_sgd_create(&sgd, params, 4, &options)); /* 3 */
  float *grad[4];
  for (int i = 0; i < 4; i++) grad[i] = (float *)params[i].grad;

  for (int step = 0; step < STEPS; step++) {
    loss = 0;
    copy(statistics, &loss, sizeof loss);
    linear(x, w1, b1, h, IN, HIDDEN, true);
    linear(h, w2, b2, y, HIDDEN, OUT, false);
    mse(y, labels, dy, statistics, scratch);
    linear_backward(h, w2, dy, dh, grad[2], grad[3], HIDDEN, OUT);
    TRY(cddp_ddp_ready(ddp, 3)); /* 4  averaging starts */
    TRY(cddp_ddp_ready(ddp, 2));
    relu_backward(dh, h, BATCH * HIDDEN);
    linear_backward(x, w1, dh, NULL, grad[0], grad[1], IN, HIDDEN);
    TRY(cddp_ddp_ready(ddp, 1));
    TRY(cddp_ddp_ready(ddp, 0));
    TRY(cddp_ddp_step(ddp, sgd)); /* 5  enqueues the mean, SGD, zero gradients */
  }
  TRY(cddp_synchronize(g)); /* waits for the GPU, and returns what failed there */
  copy(&loss, statistics, sizeof loss);
  printf("Loss on rank %d: %f\n", cddp_rank(g), loss);

  cddp_optim_destroy(sgd); /* 6 */
  cddp_ddp_destroy(ddp);
  cddp_free(g, statistics);
  if (gpu) cublasDestroy(blas);
  cddp_destroy(g);
  return 0;
}

int main(int argc, char **argv) {
  cddp_group_desc desc = cddp_group_desc();
  int ranks = 1, bad = argc % 2 == 0, help = argc == 2 && strcmp(argv[1], "--help") == 0;
  desc.device = "cuda";
  for (int i = 1; i + 1 < argc; i += 2) {
    if (strcmp(argv[i], "-n") == 0) ranks = atoi(argv[i + 1]);
    else if (strcmp(argv[i], "--device") == 0) desc.device = argv[i + 1];
    else if (strcmp(argv[i], "--backend") == 0) desc.backend = argv[i + 1];
    else bad = 1;
  }
  if (bad || ranks < 1) {
    fprintf(help ? stdout : stderr,
            "usage: %s [-n N] [--device DEVICE] [--backend BACKEND]\n"
            "  -n         ranks, as child processes (1)\n"
            "  --device   cuda, or cpu: needs no GPU (cuda)\n"
            "  --backend  nccl, or cpu: ranks may share a GPU (nccl)\n", argv[0]);
    return help ? 0 : 2;
  }
  gpu = strcmp(desc.device, "cpu") != 0;
  setvbuf(stdout, NULL, _IOLBF, 0); /* whole lines, also into a file that the ranks share */

  int rank = cddp_launcher_rank(); /* of torchrun, mpirun, srun, ...; or -1 */
  if (rank == 0 && ranks > 1)
    fprintf(stderr, "-n %d is ignored: the launcher sets the number of ranks\n", ranks);
  if (rank >= 0) return train(rank, &desc);
  cddp_result result = cddp_spawn(train, &desc, ranks); /* forks the ranks: no CUDA before */
  if (result == CDDP_OK) return 0;
  if (result != CDDP_PEER_LOST) fprintf(stderr, "%s\n", cddp_error());
  return 1; /* a rank that failed has printed its error */
}
