/* Checks and measurements for a machine with a GPU; tests/gpu/gpu.sh builds and runs it. All but
   bench runs on the test double too.

     gpu MODE [RANKS [nccl|cpu [share]]]     1 rank and nccl by default; with share all ranks are on
                                             cuda:0, and NCCL takes each for a host of its own
     check     training, collectives and (NCCL) a captured step
     sharded   SGD and AdamW with sharded_states: the bits of whole states on 1 and 2 ranks
     outlive   a captured step whose graph is destroyed after its cddp_ddp
     replay    the captured step, a step by cddp_ddp_wait, the captured step: right or refused
     self      each rank sends messages to itself, eagerly and by a graph: NCCL has no short cut for these
     lone      2 ranks; rank 1 does not launch the captured step
     lost      2 ranks; rank 1 is killed while rank 0 has operations with it on the device
     lost0     the same the other way round
     lostfree  lost, while rank 0 waits for these operations in cudaFree
     contexts  each rank has a context on its own GPU alone, as far as nvidia-smi knows
     bench     lines 'NAME VALUE UNIT', of one rank
     overlap   the same of several ranks: how much of the communication a backward pass hides
     devices   how many GPUs CUDA sees

   A process that a launcher started (RANK and the others are set) is that rank itself, so that a
   sanitizer sees CUDA in the process that it has started; GPU_MEET is an init_method for these.
   With GPU_ALONE a single rank has a communicator too. */
#define CDDP_IMPLEMENTATION
#define CDDP__COMM_MIN_RANKS (getenv("GPU_ALONE") != NULL ? 1 : 2)
#include "../../cddp_kernels.cuh"

#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define FAIL(...) return complain(__VA_ARGS__)
#define TRY(call) if (call) FAIL("rank %d: %s: %s", me, #call, cddp_error())
#define CUDA(call) if (call) FAIL("rank %d: %s failed", me, #call)

enum { PARAMS = 3, LARGEST = 100003, GRAPH = 6 }; /* GRAPH: number of the step that is captured */
static const size_t sizes[PARAMS] = {5000, 3, LARGEST};
static const double PATIENCE_S = 10; /* for a destruction that waits for a peer or a graph */
static const double SHORT_S = 15;    /* a deadline that is to pass, but not before NCCL connects */
static const char *backend = "nccl";
static int me, share; /* this process's rank; whether ranks share a GPU */
static bool adamw, sharded; /* of the optimizer that build makes */
static float host[LARGEST];

typedef struct model {
  cddp_group *g;
  cudaStream_t s;
  cddp_param p[PARAMS];
  cddp_ddp *ddp;
  cddp_optim *sgd;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
} model;

/* One write: ranks that fail together do not mix. */
__attribute__((format(printf, 1, 2))) static int complain(const char *format, ...) {
  char text[2000];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  return fprintf(stderr, "%s\n", text), 1;
}

static double now(void) { /* seconds */
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void nap(double seconds) {
  struct timespec t = {(time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds))};
  nanosleep(&t, NULL);
}

static __host__ __device__ float noise(int rank, int step, size_t i) {
  return (float)((i * 7 + (size_t)(rank * 3 + step * 5)) % 17) / 8 - 1;
}

static __global__ void backward_kernel(float *grad, const float *w, size_t n, int rank, int step) {
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) grad[i] += 0.25f * w[i] + noise(rank, step, i);
}

/* Copies on the stream and waits: the host's memory can be used again. A copy without a stream
   would not be ordered with m->s, which does not wait for the legacy default stream. */
static int copy(const model *m, void *to, const void *from, size_t bytes) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, m->s) != cudaSuccess ||
         cudaStreamSynchronize(m->s) != cudaSuccess;
}

static int enter(model *m, int rank, double timeout_s) {
  cddp_group_desc desc = cddp_group_desc();
  char name[32];
  memset(m, 0, sizeof *m);
  me = rank;
  snprintf(name, sizeof name, "cddp-test-%d", rank);
  if (share) setenv("NCCL_HOSTID", name, 1);
  desc.init_method = getenv("GPU_MEET");
  desc.device = share ? "cuda:0" : "cuda";
  desc.backend = backend;
  desc.timeout_s = timeout_s;
  TRY(cddp_init(&m->g, &desc));
  CUDA(cudaStreamCreateWithFlags(&m->s, cudaStreamNonBlocking));
  cddp_set_stream(m->g, m->s);
  return 0;
}

static int build(model *m) {
  cddp_sgd_desc rule = cddp_sgd_desc();
  cddp_adamw_desc other = cddp_adamw_desc();
  cddp_ddp_desc desc = cddp_ddp_desc();
  for (int i = 0; i < PARAMS; i++) {
    for (size_t k = 0; k < sizes[i]; k++) host[k] = noise(me, 0, k); /* rank 0's win */
    TRY((m->p[i].data = cddp_alloc(m->g, sizes[i] * sizeof *host)) == NULL);
    CUDA(copy(m, m->p[i].data, host, sizes[i] * sizeof *host));
    m->p[i].count = sizes[i];
  }
  desc.bucket_cap_mb = 0.1;
  rule.lr = 0.05, rule.momentum = 0.9, rule.stream = m->s;
  TRY(cddp_ddp_create(&m->ddp, m->g, m->p, PARAMS, &desc));
  rule.ddp = other.ddp = sharded ? m->ddp : NULL;
  rule.sharded_states = other.sharded_states = sharded;
  other.lr = 0.01, other.weight_decay = 0.01, other.stream = m->s;
  TRY(adamw ? cddp_adamw_create(&m->sgd, m->p, PARAMS, &other)
            : cddp_sgd_create(&m->sgd, m->p, PARAMS, &rule));
  return 0;
}

static int drop_graph(model *m) {
  if (m->exec != NULL) CUDA(cudaGraphExecDestroy(m->exec));
  if (m->graph != NULL) CUDA(cudaGraphDestroy(m->graph));
  m->exec = NULL, m->graph = NULL;
  return 0;
}

static void demolish(model *m) {
  cddp_optim_destroy(m->sgd);
  cddp_ddp_destroy(m->ddp);
  for (int i = 0; i < PARAMS; i++) cddp_free(m->g, m->p[i].data);
  memset(m->p, 0, sizeof m->p);
  m->sgd = NULL, m->ddp = NULL;
}

static int leave(model *m) {
  int bad = drop_graph(m);
  demolish(m);
  cddp_set_stream(m->g, NULL);
  cudaStreamDestroy(m->s);
  cddp_destroy(m->g);
  return bad;
}

/* --- training --- */

static cddp_result backward(model *m, int step) {
  cddp_result r = CDDP_OK;
  for (int i = PARAMS - 1; i >= 0 && r == CDDP_OK; i--) {
    cddp_param *p = &m->p[i];
    cudaLaunchConfig_t c = {dim3((unsigned)((p->count + 255) / 256)), dim3(256), 0, m->s, NULL, 0};
    cudaError_t e = cudaLaunchKernelEx(&c, backward_kernel, (float *)p->grad,
                                       (const float *)p->data, p->count, me, step);
    if (e != cudaSuccess) complain("rank %d: the kernel: %s", me, cudaGetErrorString(e));
    r = e == cudaSuccess ? cddp_ddp_ready(m->ddp, i) : CDDP_CUDA;
  }
  return r;
}

static cddp_result step_by_wait(model *m, int step) {
  cddp_result r = backward(m, step);
  if (r == CDDP_OK) r = cddp_ddp_wait(m->ddp);
  if (r == CDDP_OK) r = cddp_ddp_clip_grad_norm(m->ddp, 1e9, NULL);
  if (r == CDDP_OK) r = cddp_optim_step(m->sgd);
  return r == CDDP_OK ? cddp_optim_zero_grad(m->sgd) : r;
}

static int one_step(model *m, int step) {
  TRY(backward(m, step));
  TRY(cddp_ddp_step(m->ddp, m->sgd));
  return 0;
}

static int capture(model *m) {
  size_t nodes = 0;
  CUDA(cudaStreamBeginCapture(m->s, cudaStreamCaptureModeThreadLocal));
  if (one_step(m, GRAPH)) return 1;
  CUDA(cudaStreamEndCapture(m->s, &m->graph));
  CUDA(cudaGraphInstantiate(&m->exec, m->graph, 0));
  CUDA(cudaGraphGetNodes(m->graph, NULL, &nodes));
  if (me == 0) printf("graph of a step: %zu nodes\n", nodes);
  return 0;
}

static int launch(model *m) {
  CUDA(cudaGraphLaunch(m->exec, m->s));
  return 0;
}

/* Two eager steps and a captured one, not yet launched. */
static int prepare(model *m) {
  return build(m) || one_step(m, 0) || one_step(m, 1) || capture(m);
}

/* The weight that these steps end with, in double. */
static double expected(size_t i, int world, const int *steps, int n) {
  double w = (double)noise(0, 0, i), momentum = 0;
  for (int k = 0; k < n; k++) {
    double g = 0.25 * w;
    for (int r = 0; r < world; r++) g += (double)noise(r, steps[k], i) / world;
    momentum = k == 0 ? g : 0.9 * momentum + g;
    w -= 0.05 * momentum;
  }
  return w;
}

/* Waits, then compares the weights with what is expected and with the other ranks'. */
static int compare(model *m, const int *steps, int n) {
  int world = cddp_world_size(m->g);
  uint64_t hash = 0xcbf29ce484222325u, all[64];
  TRY(cddp_synchronize(m->g));
  for (int i = 0; i < PARAMS; i++) {
    CUDA(copy(m, host, m->p[i].data, sizes[i] * sizeof *host));
    for (size_t k = 0; k < sizes[i]; k++) {
      double e = expected(k, world, steps, n);
      if (!(fabs((double)host[k] - e) <= 1e-5 * (1 + fabs(e))))
        FAIL("rank %d: weight %zu of parameter %d is %g, not %g", me, k, i, (double)host[k], e);
    }
    for (size_t k = 0; k < sizes[i] * sizeof *host; k++)
      hash = (hash ^ ((unsigned char *)host)[k]) * 0x100000001b3u;
  }
  TRY(cddp_all_gather(m->g, &hash, all, 1, CDDP_I64, NULL));
  for (int r = 0; r < world; r++)
    if (all[r] != hash) FAIL("ranks %d and %d have other weights", me, r);
  return 0;
}

static int check_training(model *m) {
  static const int steps[] = {0, 1, 2, 3, 4, 5, GRAPH, GRAPH};
  bool nccl = strcmp(backend, "nccl") == 0;
  if (build(m)) return 1;
  for (int k = 0; k < 8; k++) {
    if (k == 3) TRY(step_by_wait(m, 3));
    if (k == 6 && nccl && capture(m)) return 1;
    if (k == 3) continue;
    if (k >= 6 && nccl ? launch(m) : one_step(m, steps[k])) return 1;
  }
  return compare(m, steps, 8) || drop_graph(m);
}

static int check_collectives(model *m) {
  enum { N = 3000 };
  cddp_group *g = m->g;
  int world = cddp_world_size(g), last = world - 1;
  size_t all = (size_t)(world > 0 ? world : 1) * N; /* gcc sees no bound */
  float *numbers = (float *)malloc(all * sizeof *numbers), *a, *b;
  cddp_work *w;
  if (numbers == NULL) FAIL("out of memory");
  TRY((a = (float *)cddp_alloc(g, 2 * all * sizeof *a)) == NULL);
  b = a + all;
  for (size_t i = 0; i < all; i++) numbers[i] = (float)(i % 100 + (size_t)me);
  CUDA(copy(m, a, numbers, all * sizeof *a));
  TRY(cddp_all_reduce(g, a, all, CDDP_F32, CDDP_SUM, &w));
  TRY(cddp_wait(w));
  TRY(cddp_reduce_scatter(g, a, b, N, CDDP_F32, CDDP_MAX, NULL)); /* all ranks have the same */
  TRY(cddp_all_gather(g, b, a, N, CDDP_F32, NULL));
  TRY(cddp_all_to_all(g, a, a, N, CDDP_F32, NULL)); /* share of mine from everybody: all alike */
  TRY(cddp_scatter(g, me == last ? a : NULL, b, N, CDDP_F32, last, NULL));
  TRY(cddp_gather(g, b, me == 0 ? a : NULL, N, CDDP_F32, 0, NULL));
  TRY(cddp_broadcast(g, a, all, CDDP_F32, 0, NULL));
  TRY(cddp_synchronize(g));
  CUDA(copy(m, numbers, a, all * sizeof *a));
  for (size_t i = 0; i < all; i++) { /* share `last` of the sum, over and over */
    size_t k = (size_t)last * N + i % N;
    float want = (float)((k % 100) * (size_t)world + (size_t)(world * last / 2));
    if (numbers[i] != want)
      FAIL("rank %d: element %zu is %g, not %g", me, i, (double)numbers[i], (double)want);
  }
  cddp_free(g, a);
  free(numbers);
  return 0;
}

static int check(int rank, void *unused) {
  model m;
  if (unused != NULL || enter(&m, rank, 60)) return 1;
  return check_collectives(&m) || check_training(&m) || leave(&m);
}

/* The weights after these steps, by whole states and by sharded ones. With more than two ranks NCCL
   may add up in another order when it reduces to one rank. */
static int check_sharded(int rank, void *unused) {
  static float want[PARAMS][LARGEST];
  model m;
  if (unused != NULL || enter(&m, rank, 60)) return 1;
  for (int way = 0; way < 4; way++) {
    adamw = way >= 2, sharded = way % 2 == 1;
    if (build(&m)) return 1;
    for (int k = 0; k < 6; k++)
      if (one_step(&m, k)) return 1;
    TRY(cddp_synchronize(m.g));
    for (int i = 0; i < PARAMS; i++) {
      CUDA(copy(&m, sharded ? host : want[i], m.p[i].data, sizes[i] * sizeof *host));
      for (size_t k = 0; sharded && k < sizes[i]; k++) {
        double most = cddp_world_size(m.g) > 2 ? 1e-5 * (1 + fabs((double)want[i][k])) : 0;
        if (!(fabs((double)host[k] - (double)want[i][k]) <= most))
          FAIL("rank %d: %s: weight %zu of parameter %d is %.9g, not %.9g", me,
               adamw ? "AdamW" : "SGD", k, i, (double)host[k], (double)want[i][k]);
      }
    }
    demolish(&m);
  }
  adamw = sharded = false;
  return leave(&m);
}

/* --- what nobody has seen on a GPU --- */

static int outlive(int rank, void *unused) {
  static const int steps[] = {0, 1, GRAPH};
  double from, took;
  model m;
  if (unused != NULL || enter(&m, rank, 60) || prepare(&m) || launch(&m) || compare(&m, steps, 3))
    return 1;
  printf("on rank %d now cddp_ddp_destroy, before its graph's end\n", me);
  from = now();
  cddp_ddp_destroy(m.ddp);
  m.ddp = NULL;
  took = now() - from;
  printf("on rank %d cddp_ddp_destroy: %.2f s; now the rest\n", me, took);
  if (drop_graph(&m) || leave(&m)) return 1;
  if (took > PATIENCE_S) FAIL("rank %d: cddp_ddp_destroy took %.1f s", me, took);
  return 0;
}

enum { BLOCKS = 16, BLOCK = 1 << 18 }; /* memory that takes the place of what was freed */

static int fill_blocks(model *m, void **blocks) {
  for (int i = 0; i < BLOCKS; i++)
    CUDA(cudaMalloc(&blocks[i], BLOCK) || cudaMemsetAsync(blocks[i], 0xff, BLOCK, m->s));
  return 0;
}

static int blocks_intact(model *m, void **blocks) {
  for (int i = 0; i < BLOCKS; i++) {
    CUDA(copy(m, host, blocks[i], BLOCK));
    for (size_t k = 0; k < BLOCK; k++)
      if (((unsigned char *)host)[k] != 0xff)
        FAIL("rank %d: the graph wrote to memory that cddp had freed", me);
    CUDA(cudaFree(blocks[i]));
  }
  return 0;
}

static int replay(int rank, void *unused) {
  static const int steps[] = {0, 1, GRAPH, GRAPH, GRAPH};
  void *blocks[BLOCKS];
  cddp_result r;
  model m;
  if (unused != NULL || enter(&m, rank, 60) || prepare(&m) || launch(&m)) return 1;
  TRY(cddp_synchronize(m.g));
  r = step_by_wait(&m, GRAPH);
  if (r == CDDP_INVALID_ARGUMENT || r == CDDP_UNSUPPORTED) {
    printf("rank %d: refused: %s\n", me, cddp_error());
    return leave(&m);
  }
  if (r != CDDP_OK) FAIL("rank %d: a step by cddp_ddp_wait: %s", me, cddp_error());
  if (fill_blocks(&m, blocks) || launch(&m)) return 1;
  TRY(cddp_synchronize(m.g));
  return blocks_intact(&m, blocks) || compare(&m, steps, 5) || leave(&m);
}

/* All is done on the device, and everybody has come so far; pids of both. */
static int assemble(model *m, int64_t *pids) {
  int64_t mine = getpid();
  TRY(cddp_all_gather(m->g, &mine, pids, 1, CDDP_I64, NULL));
  TRY(cddp_synchronize(m->g));
  TRY(cddp_barrier(m->g));
  return 0;
}

static int lone(int rank, void *unused) {
  double from, waited, took;
  char text[512];
  int64_t pids[2];
  cddp_result r;
  model m;
  if (unused != NULL || enter(&m, rank, SHORT_S) || prepare(&m) || assemble(&m, pids)) return 1;
  if (me == 1) {
    while (kill((pid_t)pids[0], 0) == 0) nap(0.01); /* until it has ended */
    return leave(&m);
  }
  from = now();
  if (launch(&m)) return 1;
  r = cddp_synchronize(m.g);
  snprintf(text, sizeof text, "%s", cddp_error());
  waited = now() - from, from = now();
  printf("cddp_synchronize: %.2f s: %s; now cddp_ddp_destroy\n", waited, text);
  cddp_ddp_destroy(m.ddp);
  m.ddp = NULL;
  printf("cddp_ddp_destroy: %.2f s; now the rest\n", now() - from);
  if (leave(&m)) return 1;
  took = now() - from;
  printf("the end of all: %.2f s\n", took);
  if (r != CDDP_TIMEOUT) FAIL("cddp_synchronize gave %s: %s", cddp_result_name(r), text);
  if (waited > SHORT_S + PATIENCE_S || took > SHORT_S + PATIENCE_S)
    FAIL("cddp_synchronize took %.1f s, the end of all %.1f s", waited, took);
  return 0;
}

enum { SELF = 1 << 20 }; /* elements of a message to oneself */

/* Puts a message from this rank to itself on the group's stream. Of all operations of a group of one
   rank NCCL launches a kernel for these alone: its collectives are copies there. */
static int send_to_self(model *m, const float *from, float *to) {
  cddp_work *received, *sent;
  TRY(cddp_recv(m->g, to, SELF, CDDP_F32, me, 0, &received));
  TRY(cddp_send(m->g, from, SELF, CDDP_F32, me, 0, &sent));
  TRY(cddp_wait(received));
  TRY(cddp_wait(sent));
  return 0;
}

/* Fills `from` with the noise of `step`, and `to` with what no message holds. */
static int write_message(model *m, float *from, float *to, int step) {
  float *block = (float *)malloc(SELF * sizeof *block);
  if (block == NULL) FAIL("out of memory");
  for (size_t i = 0; i < SELF; i++) block[i] = noise(me, step, i);
  CUDA(copy(m, from, block, SELF * sizeof *block));
  CUDA(cudaMemsetAsync(to, 0xff, SELF * sizeof *block, m->s));
  free(block);
  return 0;
}

static int read_message(model *m, const float *to, int step) {
  float *block = (float *)malloc(SELF * sizeof *block);
  if (block == NULL) FAIL("out of memory");
  TRY(cddp_synchronize(m->g));
  CUDA(copy(m, block, to, SELF * sizeof *block));
  for (size_t i = 0; i < SELF; i++)
    if (block[i] != noise(me, step, i))
      FAIL("rank %d: message %d has %g as element %zu, not %g", me, step, (double)block[i], i,
           (double)noise(me, step, i));
  free(block);
  return 0;
}

/* A message by itself, a graph of one launched three times, and one by itself again; the group is
   destroyed before its graph. Then a receive that nothing is sent for: NCCL refuses it, the group
   breaks, and its communicator is aborted. */
static int self(int rank, void *unused) {
  double from, destroyed, aborted;
  cddp_work *work;
  cddp_result r;
  float *x, *y;
  model m;
  if (unused != NULL || enter(&m, rank, 60)) return 1;
  TRY((x = (float *)cddp_alloc(m.g, 2 * SELF * sizeof *x)) == NULL);
  y = x + SELF;
  if (write_message(&m, x, y, 0) || send_to_self(&m, x, y) || read_message(&m, y, 0)) return 1;
  CUDA(cudaStreamBeginCapture(m.s, cudaStreamCaptureModeThreadLocal));
  if (send_to_self(&m, x, y)) return 1;
  CUDA(cudaStreamEndCapture(m.s, &m.graph));
  CUDA(cudaGraphInstantiate(&m.exec, m.graph, 0));
  for (int k = 1; k <= 3; k++)
    if (write_message(&m, x, y, k) || launch(&m) || read_message(&m, y, k)) return 1;
  if (write_message(&m, x, y, 4) || send_to_self(&m, x, y) || read_message(&m, y, 4)) return 1;
  cddp_free(m.g, x);
  printf("rank %d: messages are right; now cddp_destroy, before the graph's end\n", me);
  from = now();
  cddp_set_stream(m.g, NULL);
  cddp_destroy(m.g);
  destroyed = now() - from;
  printf("rank %d: cddp_destroy: %.2f s; now the graph\n", me, destroyed);
  if (drop_graph(&m)) return 1;
  cudaStreamDestroy(m.s);

  if (enter(&m, rank, 10)) return 1;
  TRY((x = (float *)cddp_alloc(m.g, SELF * sizeof *x)) == NULL);
  r = cddp_recv(m.g, x, SELF, CDDP_F32, me, 0, &work);
  if (r == CDDP_OK) r = cddp_wait(work);
  if (r == CDDP_OK) r = cddp_synchronize(m.g);
  printf("rank %d: a receive without a send: %s\n", me, cddp_error());
  from = now();
  cddp_free(m.g, x);
  if (leave(&m)) return 1;
  aborted = now() - from;
  printf("rank %d: the end of a broken group: %.2f s\n", me, aborted);
  if (r == CDDP_OK) FAIL("rank %d: a receive without a send succeeded", me);
  if (destroyed > PATIENCE_S || aborted > PATIENCE_S)
    FAIL("rank %d: cddp_destroy took %.1f s, that of a broken group %.1f s", me, destroyed, aborted);
  return 0;
}

enum { IN_FREE = 100 };

static void *kill_soon(void *pid) {
  nap(1);
  if (kill((pid_t)*(int64_t *)pid, SIGKILL) != 0) complain("kill failed");
  return NULL;
}

/* how: the rank that is killed, plus IN_FREE. */
static int lose(int rank, int how) {
#ifdef __CUDACC__
  enum { N = 1 << 24 }; /* 64 MB: NCCL's other protocols */
#else
  enum { N = 30000 };
#endif
  int victim = how % IN_FREE;
  double from, took;
  char text[512];
  int64_t pids[2];
  pthread_t killer;
  cddp_result r;
  void *y;
  float *x;
  model m;
  if (enter(&m, rank, 60) || build(&m)) return 1;
  TRY((x = (float *)cddp_alloc(m.g, N * sizeof *x)) == NULL);
  CUDA(cudaMalloc(&y, 1000));
  CUDA(cudaMemsetAsync(x, 0, N * sizeof *x, m.s));
  if (one_step(&m, 0) || one_step(&m, 1) || one_step(&m, 2)) return 1;
  TRY(cddp_all_reduce(m.g, x, N, CDDP_F32, CDDP_SUM, NULL)); /* NCCL connects at the first */
  if (assemble(&m, pids)) return 1;
  while (me == victim) pause();
  TRY(cddp_all_reduce(m.g, x, N, CDDP_F32, CDDP_SUM, NULL));
  TRY(backward(&m, 3));
  nap(0.5); /* so that kernels run by now, the harder case */
  from = now();
  if (how >= IN_FREE) {
    CUDA(pthread_create(&killer, NULL, kill_soon, &pids[victim]));
    printf("now cudaFree; rank %d is killed in 1 s\n", victim);
    cudaFree(y);
    pthread_join(killer, NULL);
    printf("cudaFree: %.2f s\n", now() - from);
  } else if (kill((pid_t)pids[victim], SIGKILL) != 0) {
    FAIL("kill failed");
  }
  printf("rank %d is killed; now cddp_ddp_destroy\n", victim);
  cddp_ddp_destroy(m.ddp);
  m.ddp = NULL;
  printf("cddp_ddp_destroy: %.2f s; now cddp_synchronize\n", now() - from);
  r = cddp_synchronize(m.g);
  snprintf(text, sizeof text, "%s", cddp_error());
  printf("cddp_synchronize: %s; now the rest\n", text);
  cddp_free(m.g, x);
  if (leave(&m)) return 1;
  took = now() - from;
  printf("the end of all: %.2f s\n", took);
  if (r != CDDP_PEER_LOST) FAIL("cddp_synchronize gave %s: %s", cddp_result_name(r), text);
  if (took > PATIENCE_S) FAIL("the end of all took %.1f s", took);
  return 0;
}

static int lost(int rank, void *unused) { return unused != NULL || lose(rank, 1); }
static int lost0(int rank, void *unused) { return unused != NULL || lose(rank, 0); }
static int lostfree(int rank, void *unused) { return unused != NULL || lose(rank, 1 + IN_FREE); }

static int contexts(int rank, void *unused) {
  char command[160];
  int found = 0;
  FILE *f;
  model m;
  if (unused != NULL || enter(&m, rank, 60)) return 1;
  nap(0.1); /* the watcher's threads are at work */
  TRY(cddp_barrier(m.g));
  snprintf(command, sizeof command,
           "nvidia-smi --query-compute-apps=pid --format=csv,noheader | grep -c '^%d$'",
           (int)getpid());
  if ((f = popen(command, "r")) == NULL || fscanf(f, "%d", &found) != 1) found = 0;
  if (f != NULL) pclose(f);
  printf("rank %d: %d contexts\n", me, found); /* 0: in a container it may know other pids */
  TRY(cddp_barrier(m.g));
  if (found > 1) FAIL("rank %d has contexts on %d GPUs", me, found);
  return leave(&m);
}

/* --- measurements --- */

#ifdef __CUDACC__
enum { ROWS = 128, IN = 784, HIDDEN = 2048, OUT = 10, WEIGHTS = 6, ROUNDS = 7, REPEAT = 50 };
static const size_t weights[WEIGHTS] = {(size_t)HIDDEN * IN, HIDDEN, (size_t)HIDDEN * HIDDEN,
                                        HIDDEN, (size_t)OUT * HIDDEN, OUT};

static int by_value(const void *a, const void *b) {
  return (*(const float *)a > *(const float *)b) - (*(const float *)a < *(const float *)b);
}

/* Median over rounds of the stream's time for one call of fn, ms; NaN when a call of it failed. */
template <typename F> static double median_ms(cudaStream_t s, F fn) {
  float ms[ROUNDS + 1];
  cudaEvent_t from, to;
  bool bad = cudaEventCreate(&from) != cudaSuccess || cudaEventCreate(&to) != cudaSuccess;
  for (int r = 0; r <= ROUNDS && !bad; r++) { /* the first does not count */
    bad |= cudaEventRecord(from, s) != cudaSuccess;
    for (int i = 0; i < REPEAT; i++) bad |= fn() != 0;
    bad |= cudaEventRecord(to, s) != cudaSuccess || cudaEventSynchronize(to) != cudaSuccess ||
           cudaEventElapsedTime(&ms[r], from, to) != cudaSuccess;
  }
  if (bad) return NAN;
  cudaEventDestroy(from), cudaEventDestroy(to);
  qsort(ms + 1, ROUNDS, sizeof *ms, by_value);
  return (double)ms[1 + ROUNDS / 2] / REPEAT;
}

static int bench_sgd(cudaStream_t s) { /* against a copy on the same device */
  const size_t n = 100000000, bytes = n * sizeof(float);
  cddp_segment g = {};
  cddp_sgd_desc rule = cddp_sgd_desc();
  CUDA(cudaMalloc(&g.data, bytes) || cudaMalloc(&g.grad, bytes) || cudaMalloc(&g.momentum, bytes));
  CUDA(cddp_cuda_uniform((float *)g.data, n, 1, 1, s) ||
       cddp_cuda_uniform((float *)g.grad, n, 1, 2, s) ||
       cddp_cuda_uniform((float *)g.momentum, n, 1, 3, s));
  g.count = n;
  rule.lr = 0.1, rule.momentum = 0.9;
  double copy_ms = median_ms(s, [&] {
    return (int)cudaMemcpyAsync(g.grad, g.data, bytes, cudaMemcpyDefault, s);
  });
  double sgd_ms = median_ms(s, [&] {
    return (int)cddp_cuda_sgd(&g, 1, CDDP_F32, &rule, CDDP_SGD_ZERO, s);
  });
  if (!(copy_ms > 0 && sgd_ms > 0)) FAIL("the copy or SGD failed: %g and %g ms", copy_ms, sgd_ms);
  double megabytes = (double)bytes / 1e6, copies = 2 * megabytes / copy_ms;
  double sgd = 6 * megabytes / sgd_ms; /* three read, three written */
  printf("copy %.0f GB/s\nsgd %.0f GB/s\nsgd_share %.1f %%\n", copies, sgd, 100 * sgd / copies);
  return cudaFree(g.data) || cudaFree(g.grad) || cudaFree(g.momentum);
}

static int bench_adamw(cudaStream_t s) {
  const size_t n = 50000000, bytes = n * sizeof(float);
  cddp_segment g = {};
  cddp_adamw_step rule;
  memset(&rule, 0, sizeof rule);
  CUDA(cudaMalloc(&g.data, bytes) || cudaMalloc(&g.grad, bytes) ||
       cudaMalloc(&g.momentum, 2 * bytes)); /* both states, side by side */
  CUDA(cddp_cuda_uniform((float *)g.data, n, 1, 1, s) ||
       cddp_cuda_uniform((float *)g.grad, n, 1, 2, s) ||
       cddp_cuda_fill(g.momentum, CDDP_F32, 2 * n, 0.01, s));
  g.count = n;
  rule.step = -1e-3, rule.decay = 0.9999, rule.lerp = 0.1, rule.keep = 0.999, rule.take = 0.001;
  rule.root = 1, rule.eps = 1e-8, rule.stride = bytes;
  double copy_ms = median_ms(s, [&] {
    return (int)cudaMemcpyAsync(g.momentum, g.data, bytes, cudaMemcpyDefault, s);
  });
  CUDA(cddp_cuda_fill(g.momentum, CDDP_F32, n, 0.01, s));
  double ms = median_ms(s, [&] {
    return (int)cddp_cuda_adamw(&g, 1, CDDP_F32, &rule, CDDP_SGD_ZERO, s);
  });
  if (!(copy_ms > 0 && ms > 0)) FAIL("the copy or AdamW failed: %g and %g ms", copy_ms, ms);
  double megabytes = (double)bytes / 1e6, adamw = 8 * megabytes / ms; /* four read, four written */
  printf("adamw %.0f GB/s\nadamw_share %.1f %%\n", adamw, 100 * adamw / (2 * megabytes / copy_ms));
  return cudaFree(g.data) || cudaFree(g.grad) || cudaFree(g.momentum);
}

typedef struct network { /* that of tests/bench/step.c */
  cublasHandle_t blas;
  float *x, *h1, *h2, *y, *d1, *d2;
  int32_t *labels;
  double *stats;
  cudaStream_t s;
  cddp_ddp *ddp;
} network;

static int network_create(network *n, cudaStream_t s) {
  n->s = s;
  CUDA(cublasCreate(&n->blas) != CUBLAS_STATUS_SUCCESS);
  CUDA(cudaMalloc(&n->x, ROWS * IN * 4) || cudaMalloc(&n->y, ROWS * OUT * 4) ||
       cudaMalloc(&n->labels, ROWS * 4) || cudaMalloc(&n->stats, 16 + CDDP_CUDA_SCRATCH_BYTES));
  CUDA(cudaMalloc(&n->h1, ROWS * HIDDEN * 4) || cudaMalloc(&n->h2, ROWS * HIDDEN * 4) ||
       cudaMalloc(&n->d1, ROWS * HIDDEN * 4) || cudaMalloc(&n->d2, ROWS * HIDDEN * 4));
  CUDA(cddp_cuda_uniform(n->x, ROWS * IN, 1, 1, s) ||
       cudaMemsetAsync(n->labels, 0, ROWS * 4, s) || cudaMemsetAsync(n->stats, 0, 16, s));
  return 0;
}

/* Adds up the gradients of p; with a ddp each layer is told to it. 0: all was enqueued. */
static int network_run(const network *n, const cddp_param *p, cddp_ddp *d) {
  cudaStream_t s = n->s;
  auto w = [&](int i) { return (const float *)p[i].data; };
  auto dw = [&](int i) { return (float *)p[i].grad; };
  auto ready = [&](int i) {
    return d != NULL && (cddp_ddp_ready(d, i + 1) || cddp_ddp_ready(d, i));
  };
  return cddp_cuda_linear(n->blas, n->x, w(0), w(1), n->h1, ROWS, IN, HIDDEN, true, s) ||
         cddp_cuda_linear(n->blas, n->h1, w(2), w(3), n->h2, ROWS, HIDDEN, HIDDEN, true, s) ||
         cddp_cuda_linear(n->blas, n->h2, w(4), w(5), n->y, ROWS, HIDDEN, OUT, false, s) ||
         cddp_cuda_cross_entropy(n->y, n->labels, n->y, n->stats, n->stats + 2, ROWS, OUT, s) ||
         cddp_cuda_linear_backward(n->blas, n->h2, w(4), n->y, n->d2, dw(4), dw(5), ROWS, HIDDEN,
                                   OUT, s) ||
         ready(4) || cddp_cuda_relu_backward(n->d2, n->h2, ROWS * HIDDEN, s) ||
         cddp_cuda_linear_backward(n->blas, n->h1, w(2), n->d2, n->d1, dw(2), dw(3), ROWS, HIDDEN,
                                   HIDDEN, s) ||
         ready(2) || cddp_cuda_relu_backward(n->d1, n->h1, ROWS * HIDDEN, s) ||
         cddp_cuda_linear_backward(n->blas, n->x, w(0), n->d1, NULL, dw(0), dw(1), ROWS, IN, HIDDEN,
                                   s) ||
         ready(0);
}

/* One step of it, plain (gradients added up, SGD, nothing else) and with cddp_ddp_ready and
   cddp_ddp_step; each is measured twice, in turn. On several ranks also the sum of all gradients by
   itself: what of it does not make the step longer is hidden behind the backward pass. */
static int bench_step(cddp_group *g, cudaStream_t s) {
  network n;
  cddp_param p[2][WEIGHTS];
  cddp_segment plain[WEIGHTS] = {};
  cddp_ddp *ddp;
  cddp_optim *sgd;
  cddp_sgd_desc rule = cddp_sgd_desc();
  double alone = 0, with = 0, sum = 0;
  size_t all = 0;
  float *x;
  rule.lr = 0.01, rule.momentum = 0.9, rule.stream = s;
  if (network_create(&n, s)) return 1;
  memset(p, 0, sizeof p);
  for (int k = 0; k < 2; k++)
    for (int i = 0; i < WEIGHTS; i++) {
      CUDA(cudaMalloc(&p[k][i].data, weights[i] * 4) ||
           cddp_cuda_uniform((float *)p[k][i].data, weights[i], 0.02f, 2, s));
      p[k][i].count = weights[i];
    }
  for (int i = 0; i < WEIGHTS; i++) {
    size_t bytes = weights[i] * 4;
    all += weights[i];
    plain[i].data = p[0][i].data, plain[i].count = weights[i];
    CUDA(cudaMalloc(&plain[i].momentum, bytes) || cudaMalloc(&plain[i].grad, bytes));
    CUDA(cudaMemsetAsync(plain[i].momentum, 0, bytes, s) ||
         cudaMemsetAsync(plain[i].grad, 0, bytes, s));
    p[0][i].grad = plain[i].grad;
  }
  TRY(cddp_ddp_create(&ddp, g, p[1], WEIGHTS, NULL));
  TRY(cddp_sgd_create(&sgd, p[1], WEIGHTS, &rule));
  for (int twice = 0; twice < 2; twice++) {
    alone += 0.5 * median_ms(s, [&] {
      return network_run(&n, p[0], NULL) ||
             cddp_cuda_sgd(plain, WEIGHTS, CDDP_F32, &rule, CDDP_SGD_ZERO, s) != cudaSuccess;
    });
    with += 0.5 * median_ms(s, [&] {
      return network_run(&n, p[1], ddp) || cddp_ddp_step(ddp, sgd) != CDDP_OK;
    });
  }
  CUDA(cudaMalloc(&x, all * 4) || cudaMemsetAsync(x, 0, all * 4, s));
  if (cddp_world_size(g) > 1)
    sum = median_ms(s, [&] {
      return cddp_all_reduce(g, x, all, CDDP_F32, CDDP_SUM, NULL) != CDDP_OK;
    });
  TRY(cddp_synchronize(g));
  if (!(alone > 0 && with > 0)) FAIL("a step failed: %g and %g ms; %s", alone, with, cddp_error());
  if (me == 0)
    printf("plain_step %.4f ms\nddp_step %.4f ms\nddp_cost %.1f %%\n", alone, with,
           100 * (with / alone - 1));
  if (me == 0 && sum > 0)
    printf("sum_alone %.4f ms\noverlap %.1f %%\n", sum, 100 * (alone + sum - with) / sum);
  CUDA(cudaFree(x));
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  return cublasDestroy(n.blas) != CUBLAS_STATUS_SUCCESS;
}

/* The host's time for one message to oneself by NCCL alone, us; NaN when it fails. */
static double time_nccl(float *x, cudaStream_t s, int blocking) {
  enum { CALLS = 200 };
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclResult_t e;
  ncclUniqueId id;
  ncclComm_t comm = NULL;
  double from = 0;
  config.blocking = blocking;
  auto settle = [&] {
    if (!blocking && (e == ncclSuccess || e == ncclInProgress))
      do ncclCommGetAsyncError(comm, &e);
      while (e == ncclInProgress);
  };
  e = ncclGetUniqueId(&id);
  if (e == ncclSuccess) e = ncclCommInitRankConfig(&comm, 1, id, 0, &config);
  settle();
  for (int i = -5; i < CALLS && e == ncclSuccess; i++) { /* the first five do not count */
    if (i == 0) from = cudaStreamSynchronize(s) == cudaSuccess ? now() : NAN;
    ncclGroupStart();
    ncclSend(x, 1, ncclFloat, 0, comm, s);
    ncclRecv(x + 1, 1, ncclFloat, 0, comm, s);
    e = ncclGroupEnd();
    settle();
  }
  from = e == ncclSuccess ? now() - from : NAN;
  cudaStreamSynchronize(s);
  if (comm != NULL) ncclCommAbort(comm);
  return 1e6 * from / CALLS;
}

/* The host's time for a message to oneself: by cddp (the calls of two handles and both waits), by
   NCCL with a communicator that does not block, as cddp's, and with one that does. */
static int bench_calls(model *m) {
  enum { CALLS = 200 };
  double from = 0, ours, waiting, blocking;
  cddp_work *received, *sent;
  float *x;
  CUDA(cudaMalloc(&x, 2 * sizeof *x) || cudaMemsetAsync(x, 0, 2 * sizeof *x, m->s));
  for (int i = 0; i < CALLS + 5; i++) { /* the first five do not count */
    if (i == 5) TRY(cddp_synchronize(m->g));
    if (i == 5) from = now();
    TRY(cddp_recv(m->g, x + 1, 1, CDDP_F32, 0, 0, &received));
    TRY(cddp_send(m->g, x, 1, CDDP_F32, 0, 0, &sent));
    TRY(cddp_wait(received));
    TRY(cddp_wait(sent));
  }
  ours = 1e6 * (now() - from) / CALLS;
  TRY(cddp_synchronize(m->g));
  waiting = time_nccl(x, m->s, 0);
  blocking = time_nccl(x, m->s, 1);
  CUDA(cudaFree(x));
  return printf("nccl_call %.1f us\nnccl_alone_call %.1f us\nnccl_blocking_call %.1f us\n", ours, waiting,
                blocking) < 0;
}

static int overlap(int rank, void *unused) {
  model m;
  return unused != NULL || enter(&m, rank, 60) || bench_step(m.g, m.s) || leave(&m);
}

static int bench(int rank, void *unused) {
  model m;
  setenv("GPU_ALONE", "1", 1);
  if (unused != NULL || enter(&m, rank, 60)) return 1;
  return bench_sgd(m.s) || bench_adamw(m.s) || bench_step(m.g, m.s) || bench_calls(&m) ||
         leave(&m);
}
#endif

/* --- ranks --- */

/* cddp_spawn ends all ranks when one dies; here the others go on. The victim is to be killed, all
   others are to end well; after a failure the rest is killed. */
static int fork_ranks(int (*fn)(int, void *), int ranks, int victim) {
  char meet[64], number[16];
  pid_t pids[64], pid, parent = getpid();
  int failed = 0, status = 0;
  snprintf(meet, sizeof meet, "unix://cddp-gpu-%d", (int)parent);
  setenv("GPU_MEET", meet, 1);
  fflush(NULL);
  for (int i = 0; i < ranks; i++) {
    if ((pids[i] = fork()) < 0) FAIL("fork failed");
    if (pids[i] > 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    snprintf(number, sizeof number, "%d", i);
    setenv("RANK", number, 1), setenv("LOCAL_RANK", number, 1);
    snprintf(number, sizeof number, "%d", ranks);
    setenv("WORLD_SIZE", number, 1), setenv("LOCAL_WORLD_SIZE", number, 1);
    status = fn(i, NULL);
    fflush(NULL);
    _exit(status);
  }
  while ((pid = wait(&status)) > 0) {
    int i = 0;
    while (i < ranks - 1 && pids[i] != pid) i++;
    pids[i] = 0;
    if (i == victim && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) continue;
    if (i != victim && status == 0) continue;
    if (!failed) complain("rank %d ended with wait status %d", i, status);
    failed = 1;
    for (i = 0; i < ranks; i++)
      if (pids[i] > 0) kill(pids[i], SIGKILL);
  }
  return failed;
}

enum { SPAWN = -2, NOBODY = -1 };
typedef struct mode {
  const char *name;
  int (*fn)(int rank, void *unused);
  int ranks, victim; /* how many it takes, 0: any; who is killed; SPAWN: cddp_spawn starts them */
} mode;

static const mode modes[] = {{"check", check, 0, SPAWN}, {"sharded", check_sharded, 0, SPAWN},
                             {"outlive", outlive, 0, SPAWN}, {"replay", replay, 0, SPAWN},
                             {"self", self, 0, SPAWN},
                             {"lone", lone, 2, NOBODY},
                             {"lost", lost, 2, 1}, {"lost0", lost0, 2, 0},
                             {"lostfree", lostfree, 2, 1}, {"contexts", contexts, 0, SPAWN},
#ifdef __CUDACC__
                             {"bench", bench, 1, SPAWN}, {"overlap", overlap, 0, SPAWN},
#endif
};

static int run(const mode *m, int ranks) {
  if (cddp_launcher_rank() >= 0) return m->fn(cddp_launcher_rank(), NULL);
  if (m->victim != SPAWN) return fork_ranks(m->fn, ranks, m->victim);
  if (cddp_spawn(m->fn, NULL, ranks) != CDDP_OK) FAIL("%s", cddp_error());
  return 0;
}

int main(int argc, char **argv) {
  int ranks = argc > 2 ? atoi(argv[2]) : 1, count = 0;
  size_t i = 0, n = sizeof modes / sizeof *modes;
  if (argc == 2 && strcmp(argv[1], "devices") == 0) {
    if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
    return printf("%d\n", count) < 0;
  }
  while (i < n && (argc < 2 || strcmp(argv[1], modes[i].name) != 0)) i++;
  if (argc > 3) backend = argv[3];
  share = argc > 4 && strcmp(argv[4], "share") == 0;
  setvbuf(stdout, NULL, _IOLBF, 0); /* what was printed last tells where it hangs */
  if (i == n || ranks < 1 || ranks > 64 || (modes[i].ranks > 0 && modes[i].ranks != ranks) ||
      (strcmp(backend, "nccl") != 0 && strcmp(backend, "cpu") != 0) || argc > 4 + share)
    FAIL("usage: %s MODE [RANKS [nccl|cpu [share]]]: see the top of tests/gpu/gpu.cu", argv[0]);
  if (run(&modes[i], ranks)) return 1;
  if (modes[i].ranks != 1)
    printf("ok: %s, %d rank%s, %s%s\n", argv[1], ranks, ranks == 1 ? "" : "s", backend,
           share ? ", one GPU" : "");
  return 0;
}
