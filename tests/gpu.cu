/* Checks and measurements for a machine with a GPU; tests/gpu.sh builds and runs it. The checks run on
   the test double too.

     gpu check RANKS BACKEND [share]   training, collectives and (NCCL) a captured step; with share all
                                       ranks are on cuda:0, and NCCL takes each for a host of its own
     gpu bench                         lines 'NAME VALUE UNIT' */
#define CDDP_IMPLEMENTATION
#include "../cddp_kernels.cuh"

#define FAIL(...) return fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), 1
#define TRY(call) if (call) FAIL("rank %d: %s: %s", rank, #call, cddp_error())
#define CUDA(call) if (call) FAIL("rank %d: %s failed", rank, #call)

enum { PARAMS = 3, STEPS = 8, GRAPH = 6 }; /* steps from GRAPH on are launches of one captured step */
static const size_t sizes[PARAMS] = {5000, 3, 100003};
static const char *backend;
static int ranks, share;

static __host__ __device__ float noise(int rank, int step, size_t i) {
  return (float)((i * 7 + (size_t)(rank * 3 + step * 5)) % 17) / 8 - 1;
}

static __global__ void backward_kernel(float *grad, const float *w, size_t n, int rank, int step) {
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) grad[i] += 0.25f * w[i] + noise(rank, step, i);
}

static int launch_backward(cudaStream_t s, const cddp_param *p, int rank, int step) {
  cudaLaunchConfig_t c = {dim3((unsigned)((p->count + 255) / 256)), dim3(256), 0, s, NULL, 0};
  return cudaLaunchKernelEx(&c, backward_kernel, (float *)p->grad, (const float *)p->data, p->count,
                            rank, step) != cudaSuccess;
}

static int one_step(cddp_ddp *d, cddp_sgd *sgd, cddp_param *p, cudaStream_t s, int rank, int step) {
  for (int i = PARAMS - 1; i >= 0; i--) {
    CUDA(launch_backward(s, &p[i], rank, step));
    TRY(cddp_ddp_ready(d, i));
  }
  if (step != 3) {
    TRY(cddp_ddp_step(d, sgd));
    return 0;
  }
  TRY(cddp_ddp_wait(d));
  TRY(cddp_ddp_clip_grad_norm(d, 1e9, NULL));
  TRY(cddp_sgd_step(sgd));
  TRY(cddp_sgd_zero_grad(sgd));
  return 0;
}

/* Steps GRAPH and later: one capture, launched as often. */
static int graph_steps(cddp_ddp *d, cddp_sgd *sgd, cddp_param *p, cudaStream_t s, int rank) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
  if (one_step(d, sgd, p, s, rank, GRAPH)) return 1;
  CUDA(cudaStreamEndCapture(s, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
#ifdef __CUDACC__
  size_t nodes = 0;
  CUDA(cudaGraphGetNodes(graph, NULL, &nodes));
  if (rank == 0) printf("graph of a step: %zu nodes\n", nodes);
#endif
  for (int step = GRAPH; step < STEPS; step++) CUDA(cudaGraphLaunch(exec, s));
  CUDA(cudaStreamSynchronize(s));
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  return 0;
}

/* The weights that training must end with, in double. */
static double expected(size_t i, int world) {
  double w = (double)noise(0, 0, i), m = 0;
  for (int step = 0; step < STEPS; step++) {
    double g = 0.25 * w;
    for (int r = 0; r < world; r++) g += (double)noise(r, step < GRAPH ? step : GRAPH, i) / world;
    m = step == 0 ? g : 0.9 * m + g;
    w -= 0.05 * m;
  }
  return w;
}

static int check_training(cddp_group *g, cudaStream_t s) {
  int rank = cddp_rank(g), world = cddp_world_size(g), step;
  cddp_param p[PARAMS];
  cddp_ddp *d;
  cddp_sgd *sgd;
  cddp_sgd_desc rule = cddp_sgd_desc();
  cddp_ddp_desc desc = cddp_ddp_desc();
  static float host[100003];
  uint64_t hash = 0xcbf29ce484222325u, all[64];
  memset(p, 0, sizeof p);
  for (int i = 0; i < PARAMS; i++) {
    for (size_t k = 0; k < sizes[i]; k++) host[k] = noise(rank, 0, k); /* rank 0's win */
    TRY((p[i].data = cddp_alloc(g, sizes[i] * sizeof *host)) == NULL);
    CUDA(cudaMemcpy(p[i].data, host, sizes[i] * sizeof *host, cudaMemcpyHostToDevice));
    p[i].count = sizes[i];
  }
  desc.bucket_cap_mb = 0.1;
  rule.lr = 0.05, rule.momentum = 0.9, rule.stream = s;
  TRY(cddp_ddp_create(&d, g, p, PARAMS, &desc));
  TRY(cddp_sgd_create(&sgd, p, PARAMS, &rule));
  for (step = 0; step < GRAPH; step++)
    if (one_step(d, sgd, p, s, rank, step)) return 1;
  if (strcmp(backend, "nccl") == 0 && graph_steps(d, sgd, p, s, rank)) return 1;
  for (; strcmp(backend, "nccl") != 0 && step < STEPS; step++)
    if (one_step(d, sgd, p, s, rank, GRAPH)) return 1;
  TRY(cddp_synchronize(g));
  for (int i = 0; i < PARAMS; i++) {
    CUDA(cudaMemcpy(host, p[i].data, sizes[i] * sizeof *host, cudaMemcpyDeviceToHost));
    for (size_t k = 0; k < sizes[i]; k++) {
      double e = expected(k, world);
      if (!(fabs((double)host[k] - e) <= 1e-5 * (1 + fabs(e))))
        FAIL("rank %d: weight %zu of parameter %d is %g, not %g", rank, k, i, (double)host[k], e);
    }
    for (size_t k = 0; k < sizes[i] * sizeof *host; k++)
      hash = (hash ^ ((unsigned char *)host)[k]) * 0x100000001b3u;
  }
  TRY(cddp_all_gather(g, &hash, all, 1, CDDP_I64, NULL));
  for (int r = 0; r < world; r++)
    if (all[r] != hash) FAIL("ranks %d and %d have other weights", rank, r);
  cddp_sgd_destroy(sgd);
  cddp_ddp_destroy(d);
  for (int i = 0; i < PARAMS; i++) cddp_free(g, p[i].data);
  return 0;
}

static int check_collectives(cddp_group *g, cudaStream_t s) {
  enum { N = 3000 };
  int rank = cddp_rank(g), world = cddp_world_size(g), last = world - 1;
  size_t all = (size_t)world * N;
  float *host = (float *)malloc(all * sizeof *host), *a, *b;
  cddp_work *w;
  TRY((a = (float *)cddp_alloc(g, 2 * all * sizeof *a)) == NULL);
  b = a + all;
  for (size_t i = 0; i < all; i++) host[i] = (float)(i % 100 + (size_t)rank);
  CUDA(cudaMemcpy(a, host, all * sizeof *a, cudaMemcpyHostToDevice));
  TRY(cddp_all_reduce(g, a, all, CDDP_F32, CDDP_SUM, &w));
  TRY(cddp_wait(w));
  TRY(cddp_reduce_scatter(g, a, b, N, CDDP_F32, CDDP_MAX, NULL)); /* all ranks have the same */
  TRY(cddp_all_gather(g, b, a, N, CDDP_F32, NULL));
  TRY(cddp_all_to_all(g, a, a, N, CDDP_F32, NULL)); /* share of mine from everybody: all alike */
  TRY(cddp_scatter(g, rank == last ? a : NULL, b, N, CDDP_F32, last, NULL));
  TRY(cddp_gather(g, b, rank == 0 ? a : NULL, N, CDDP_F32, 0, NULL));
  TRY(cddp_broadcast(g, a, all, CDDP_F32, 0, NULL));
  TRY(cddp_synchronize(g));
  CUDA(cudaMemcpyAsync(host, a, all * sizeof *a, cudaMemcpyDeviceToHost, s));
  CUDA(cudaStreamSynchronize(s));
  for (size_t i = 0; i < all; i++) { /* share `last` of the sum, over and over */
    size_t k = (size_t)last * N + i % N;
    float want = (float)((k % 100) * (size_t)world + (size_t)(world * last / 2));
    if (host[i] != want) FAIL("rank %d: element %zu is %g, not %g", rank, i, (double)host[i],
                              (double)want);
  }
  cddp_free(g, a);
  free(host);
  return 0;
}

static int check(int rank, void *unused) {
  cddp_group_desc desc = cddp_group_desc();
  cudaStream_t s;
  cddp_group *g;
  char host[32];
  snprintf(host, sizeof host, "cddp-test-%d", rank);
  if (share) setenv("NCCL_HOSTID", host, 1);
  desc.device = share ? "cuda:0" : "cuda";
  desc.backend = backend;
  desc.timeout_s = 60;
  TRY(cddp_init(&g, &desc));
  CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  cddp_set_stream(g, s);
  int bad = check_collectives(g, s) || check_training(g, s);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(s);
  cddp_destroy(g);
  return unused != NULL || bad;
}

#ifdef __CUDACC__
enum { ROWS = 128, IN = 784, HIDDEN = 2048, OUT = 10, WEIGHTS = 6, ROUNDS = 7, REPEAT = 50 };
static const size_t weights[WEIGHTS] = {(size_t)HIDDEN * IN, HIDDEN, (size_t)HIDDEN * HIDDEN,
                                        HIDDEN, (size_t)OUT * HIDDEN, OUT};

static int by_value(const void *a, const void *b) {
  return (*(const float *)a > *(const float *)b) - (*(const float *)a < *(const float *)b);
}

/* Median over rounds of the stream's time for one call of fn, ms. */
template <typename F> static float median_ms(cudaStream_t s, F fn) {
  float ms[ROUNDS + 1];
  cudaEvent_t from, to;
  cudaEventCreate(&from), cudaEventCreate(&to);
  for (int r = 0; r <= ROUNDS; r++) { /* the first does not count */
    cudaEventRecord(from, s);
    for (int i = 0; i < REPEAT; i++) fn();
    cudaEventRecord(to, s);
    cudaEventSynchronize(to);
    cudaEventElapsedTime(&ms[r], from, to);
  }
  cudaEventDestroy(from), cudaEventDestroy(to);
  qsort(ms + 1, ROUNDS, sizeof *ms, by_value);
  return ms[1 + ROUNDS / 2] / REPEAT;
}

static int bench_sgd(cudaStream_t s) { /* against a copy on the same device */
  const size_t n = 100000000, bytes = n * sizeof(float);
  int rank = 0;
  cddp_segment g;
  cddp_sgd_desc rule = cddp_sgd_desc();
  CUDA(cudaMalloc(&g.data, bytes));
  CUDA(cudaMalloc(&g.grad, bytes));
  CUDA(cudaMalloc(&g.momentum, bytes));
  CUDA(cudaMemset(g.data, 0, bytes) || cudaMemset(g.grad, 0, bytes) ||
       cudaMemset(g.momentum, 0, bytes));
  g.count = n;
  rule.lr = 0.1, rule.momentum = 0.9;
  double copy = 2.0 * (double)bytes / 1e6 /
                (double)median_ms(s, [&] { cudaMemcpyAsync(g.grad, g.data, bytes, cudaMemcpyDefault, s); });
  double sgd = 6.0 * (double)bytes / 1e6 / /* three read, three written */
               (double)median_ms(s, [&] { cddp_cuda_sgd(&g, 1, CDDP_F32, &rule, CDDP_SGD_ZERO, s); });
  printf("copy %.0f GB/s\nsgd %.0f GB/s\nsgd_share %.1f %%\n", copy, sgd, 100 * sgd / copy);
  return cudaFree(g.data) || cudaFree(g.grad) || cudaFree(g.momentum);
}

/* The step of tests/bench/step.c on a GPU: plain (gradients added up, SGD, nothing else) and with
   cddp_ddp_ready and cddp_ddp_step on one rank. */
static int bench_step(cddp_group *g, cudaStream_t s) {
  int rank = 0;
  cublasHandle_t blas;
  float *x, *h1, *h2, *y, *d1, *d2;
  int32_t *labels;
  double *stats;
  cddp_param p[2][WEIGHTS];
  cddp_segment plain[WEIGHTS];
  cddp_ddp *ddp;
  cddp_sgd *sgd;
  cddp_sgd_desc rule = cddp_sgd_desc();
  rule.lr = 0.01, rule.momentum = 0.9;
  CUDA(cublasCreate(&blas) != CUBLAS_STATUS_SUCCESS);
  CUDA(cudaMalloc(&x, ROWS * IN * 4) || cudaMalloc(&y, ROWS * OUT * 4) ||
       cudaMalloc(&labels, ROWS * 4) || cudaMalloc(&stats, 16 + CDDP_CUDA_SCRATCH_BYTES));
  CUDA(cudaMalloc(&h1, ROWS * HIDDEN * 4) || cudaMalloc(&h2, ROWS * HIDDEN * 4) ||
       cudaMalloc(&d1, ROWS * HIDDEN * 4) || cudaMalloc(&d2, ROWS * HIDDEN * 4));
  CUDA(cddp_cuda_uniform(x, ROWS * IN, 1, 1, s) || cudaMemset(labels, 0, ROWS * 4));
  memset(p, 0, sizeof p);
  for (int k = 0; k < 2; k++)
    for (int i = 0; i < WEIGHTS; i++) {
      CUDA(cudaMalloc(&p[k][i].data, weights[i] * 4) ||
           cddp_cuda_uniform((float *)p[k][i].data, weights[i], 0.02f, 2, s));
      p[k][i].count = weights[i];
    }
  for (int i = 0; i < WEIGHTS; i++) {
    plain[i].data = p[0][i].data, plain[i].count = weights[i];
    CUDA(cudaMalloc(&plain[i].momentum, weights[i] * 4) || cudaMalloc(&plain[i].grad, weights[i] * 4));
    CUDA(cudaMemset(plain[i].momentum, 0, weights[i] * 4) || cudaMemset(plain[i].grad, 0, weights[i] * 4));
    p[0][i].grad = plain[i].grad;
  }
  TRY(cddp_ddp_create(&ddp, g, p[1], WEIGHTS, NULL));
  TRY(cddp_sgd_create(&sgd, p[1], WEIGHTS, &rule));
  bool failed = false;
  auto step = [&](const cddp_param *q, bool data_parallel) {
    auto w = [&](int i) { return (const float *)q[i].data; };
    auto dw = [&](int i) { return (float *)q[i].grad; };
    auto ready = [&](int i) {
      if (data_parallel) failed |= cddp_ddp_ready(ddp, i + 1) || cddp_ddp_ready(ddp, i);
    };
    cddp_cuda_linear(blas, x, w(0), w(1), h1, ROWS, IN, HIDDEN, true, s);
    cddp_cuda_linear(blas, h1, w(2), w(3), h2, ROWS, HIDDEN, HIDDEN, true, s);
    cddp_cuda_linear(blas, h2, w(4), w(5), y, ROWS, HIDDEN, OUT, false, s);
    cddp_cuda_cross_entropy(y, labels, y, stats, stats + 2, ROWS, OUT, s);
    cddp_cuda_linear_backward(blas, h2, w(4), y, d2, dw(4), dw(5), ROWS, HIDDEN, OUT, s);
    ready(4);
    cddp_cuda_relu_backward(d2, h2, ROWS * HIDDEN, s);
    cddp_cuda_linear_backward(blas, h1, w(2), d2, d1, dw(2), dw(3), ROWS, HIDDEN, HIDDEN, s);
    ready(2);
    cddp_cuda_relu_backward(d1, h1, ROWS * HIDDEN, s);
    cddp_cuda_linear_backward(blas, x, w(0), d1, NULL, dw(0), dw(1), ROWS, IN, HIDDEN, s);
    ready(0);
    if (data_parallel) failed |= cddp_ddp_step(ddp, sgd) != CDDP_OK;
    else failed |= cddp_cuda_sgd(plain, WEIGHTS, CDDP_F32, &rule, CDDP_SGD_ZERO, s) != cudaSuccess;
  };
  double alone = (double)median_ms(s, [&] { step(p[0], false); });
  double with = (double)median_ms(s, [&] { step(p[1], true); });
  TRY(failed || cddp_synchronize(g));
  printf("plain_step %.4f ms\nddp_step %.4f ms\nddp_cost %.1f %%\n", alone, with,
         100 * (with / alone - 1));
  cddp_sgd_destroy(sgd);
  cddp_ddp_destroy(ddp);
  return cublasDestroy(blas) != CUBLAS_STATUS_SUCCESS;
}

static int bench(int rank, void *unused) {
  cddp_group_desc desc = cddp_group_desc();
  cudaStream_t s;
  cddp_group *g;
  desc.device = "cuda:0";
  TRY(unused != NULL || cddp_init(&g, &desc));
  CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  cddp_set_stream(g, s);
  int bad = bench_sgd(s) || bench_step(g, s);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(s);
  cddp_destroy(g);
  return bad;
}
#endif

int main(int argc, char **argv) {
  cddp_result r;
#ifdef __CUDACC__
  if (argc == 2 && strcmp(argv[1], "bench") == 0) {
    r = cddp_spawn(bench, NULL, 1);
    if (r != CDDP_OK) FAIL("%s", cddp_error());
    return 0;
  }
#endif
  if (argc < 4 || strcmp(argv[1], "check") != 0 || atoi(argv[2]) < 1 || atoi(argv[2]) > 64)
    FAIL("usage: %s check RANKS nccl|cpu [share] | bench", argv[0]);
  ranks = atoi(argv[2]);
  backend = argv[3];
  share = argc > 4 && strcmp(argv[4], "share") == 0;
  r = cddp_spawn(check, NULL, ranks);
  if (r != CDDP_OK) FAIL("%s", cddp_error());
  printf("ok: %d rank%s, %s%s\n", ranks, ranks == 1 ? "" : "s", backend, share ? ", shared" : "");
  return 0;
}
