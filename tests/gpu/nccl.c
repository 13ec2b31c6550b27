/* GPUs without GPUs: the NCCL backend, data parallel on devices and the CPU backend with device
   memory, run by real processes on tests/gpu/hostcuda. */
#define CDDP_CUDA
#define CDDP_IMPLEMENTATION
#define CDDP__FILE_STAGING ((size_t)12288) /* many pieces */
#define CDDP__GRACE_LEFT_S left_s
#define CDDP__WARM_UP ((size_t)1 << 18)
#define CDDP__COMM_MIN_RANKS comm_from
#define CDDP__SHARD_CHUNK ((size_t)700)
static double left_s = 2; /* a rank sets its own */
static int comm_from = 2;
#define CDDP__POINT(name) at_point(name)
static void at_point(const char *name);
#include <time.h>
static int nap(const struct timespec *t, struct timespec *left);
#define nanosleep nap
#include "../../cddp.h"
#undef nanosleep

#include "hostcuda/hostcuda.h"
#include "../ranks.h"

#include <sys/time.h>

#if RANKS_TSAN /* a rank with threads would linger for a second at its end */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "atexit_sleep_ms=0"; }
#endif

/* A thread of the double may be on its way out when its process ends. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void) { return "leak:__cxa_thread_atexit_impl"; }

enum { MOST_RANKS = 8 }; /* the main tests run on 1 to so many */

/* --- ranks with a device --- */

typedef struct job {
  ranks_fn fn;
  void *arg;
  const char *backend, *device; /* NULL device: "cuda" */
  double timeout_s;
} job;

/* TEST_HOSTS=aab: see ranks.h. Each host's GPUs are then given out from cuda:0 on, and NCCL, which
   goes by a name of its own, takes them for hosts too. */
static void place(int rank) {
  const char *hosts = getenv("TEST_HOSTS");
  int i, local = 0;
  if (hosts == NULL) return;
  ranks_place(rank);
  for (i = 0; i < rank; i++) local += ranks_together(i, rank);
  ranks_setenv("LOCAL_RANK", local);
  setenv("NCCL_HOSTID", getenv("CDDP_HOST_ID"), 1);
}

static int rank_process(int rank, void *p) {
  enum cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal; /* this thread's must stay so */
  const job *j = (const job *)p;
  cddp_group_desc d;
  cddp_group *g;
  int r;
  test_failures = 0;
  place(rank);
  memset(&d, 0, sizeof d);
  d.backend = j->backend;
  d.device = j->device != NULL ? j->device : "cuda";
  d.timeout_s = j->timeout_s;
  if (cddp_init(&g, &d) != CDDP_OK) {
    fprintf(stderr, "rank %d: %s\n", rank, cddp_error());
    return 1;
  }
  r = j->fn(g, j->arg);
  cddp_destroy(g);
  CHECK(hostcuda_contexts() <= 1); /* on the rank's own GPU */
  CHECK_EQ(hostnccl_communicators(), 0);
  CHECK(cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess);
  CHECK_EQ((int)mode, (int)cudaStreamCaptureModeGlobal);
  return r != 0 || test_failures != 0;
}

static cddp_result run(ranks_fn fn, void *arg, int n, const char *backend) {
  job j;
  memset(&j, 0, sizeof j);
  j.fn = fn;
  j.arg = arg;
  j.backend = backend;
  return cddp_spawn(rank_process, &j, n);
}

static cddp_result run_on(const char *hosts, ranks_fn fn, void *arg, const char *backend) {
  cddp_result r;
  setenv("TEST_HOSTS", hosts, 1);
  r = run(fn, arg, (int)strlen(hosts), backend);
  unsetenv("TEST_HOSTS");
  return r;
}

/* --- device memory --- */

static void *on_device(const void *host, size_t bytes) { /* a copy of host; NULL: uninitialised */
  void *p = NULL;
  if (cudaMalloc(&p, bytes > 0 ? bytes : 1) != cudaSuccess) {
    fprintf(stderr, "cudaMalloc of %zu bytes failed\n", bytes);
    exit(1);
  }
  if (host != NULL) CHECK(cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
  return p;
}

static void to_host(cddp_group *g, void *host, const void *device, size_t bytes) {
  cudaStream_t s = (cudaStream_t)cddp_stream(g);
  CHECK_OK(cddp_synchronize(g));
  CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, s) == cudaSuccess);
  CHECK(cudaStreamSynchronize(s) == cudaSuccess);
}

/* --- collectives --- */

/* Element i of rank r's input: small whole numbers, exact in every type and order. */
static double value(int r, size_t i, cddp_op op) {
  uint64_t h = ranks_mix((uint64_t)r, i, 1);
  return op == CDDP_PROD ? (double)(1 + h % 2) : (double)(h % 7);
}

static double reduced(int n, size_t i, cddp_op op) {
  double v = value(0, i, op), w;
  int r;
  for (r = 1; r < n; r++) {
    w = value(r, i, op);
    v = op == CDDP_PROD   ? v * w
        : op == CDDP_MIN  ? fmin(v, w)
        : op == CDDP_MAX  ? fmax(v, w)
        : op == CDDP_BAND ? (double)((int)v & (int)w)
        : op == CDDP_BOR  ? (double)((int)v | (int)w)
        : op == CDDP_BXOR ? (double)((int)v ^ (int)w)
                          : v + w;
  }
  return v;
}

static void put(cddp_dtype t, void *p, size_t i, double v) {
  int64_t whole = (int64_t)v;
  int32_t w32 = (int32_t)v;
  if (t <= CDDP_BF16)
    ranks_store(t, p, i, v);
  else if (t == CDDP_I64)
    memcpy((char *)p + 8 * i, &whole, 8);
  else if (t == CDDP_I32)
    memcpy((char *)p + 4 * i, &w32, 4);
  else
    ((unsigned char *)p)[i] = (unsigned char)w32;
}

static double get(cddp_dtype t, const void *p, size_t i) {
  int64_t whole;
  int32_t w32;
  if (t <= CDDP_BF16) return ranks_load(t, p, i);
  if (t == CDDP_I64) return memcpy(&whole, (const char *)p + 8 * i, 8), (double)whole;
  if (t == CDDP_I32) return memcpy(&w32, (const char *)p + 4 * i, 4), (double)w32;
  return (double)((const unsigned char *)p)[i];
}

/* One collective on n ranks: fills, runs, compares. */
typedef struct one {
  cddp_group *g;
  int kind, root;
  cddp_dtype t;
  cddp_op op;
  size_t count;
  bool async;
} one;

static cddp_result call(const one *o, const void *send, void *recv, cddp_work **w) {
  static char nothing; /* in host memory, but nobody looks at it */
  if (cddp_rank(o->g) != o->root) {
    if (o->kind == CDDP__KIND_SCATTER) send = &nothing;
    if (o->kind == CDDP__KIND_GATHER) recv = &nothing;
  }
  switch (o->kind) {
  case CDDP__KIND_ALL_REDUCE:
    return cddp_all_reduce(o->g, recv, o->count, o->t, o->op, w);
  case CDDP__KIND_REDUCE:
    return cddp_reduce(o->g, recv, o->count, o->t, o->op, o->root, w);
  case CDDP__KIND_BROADCAST:
    return cddp_broadcast(o->g, recv, o->count, o->t, o->root, w);
  case CDDP__KIND_ALL_GATHER:
    return cddp_all_gather(o->g, send, recv, o->count, o->t, w);
  case CDDP__KIND_GATHER:
    return cddp_gather(o->g, send, recv, o->count, o->t, o->root, w);
  case CDDP__KIND_SCATTER:
    return cddp_scatter(o->g, send, recv, o->count, o->t, o->root, w);
  case CDDP__KIND_REDUCE_SCATTER:
    return cddp_reduce_scatter(o->g, send, recv, o->count, o->t, o->op, w);
  default:
    return cddp_all_to_all(o->g, send, recv, o->count, o->t, w);
  }
}

/* What rank `me` must have at i of its result; NAN: anything. */
static double wanted(const one *o, int me, int n, size_t i) {
  size_t c = o->count, q = i / c, k = i % c;
  double v;
  switch (o->kind) {
  case CDDP__KIND_REDUCE:
    if (me != o->root) return value(me, i, o->op);
    /* fall through */
  case CDDP__KIND_ALL_REDUCE:
    v = reduced(n, i, o->op);
    break;
  case CDDP__KIND_BROADCAST:
    return value(o->root, i, o->op);
  case CDDP__KIND_ALL_GATHER:
    return value((int)q, k, o->op);
  case CDDP__KIND_GATHER:
    return me == o->root ? value((int)q, k, o->op) : (double)NAN;
  case CDDP__KIND_SCATTER:
    return value(o->root, (size_t)me * c + k, o->op);
  case CDDP__KIND_REDUCE_SCATTER:
    v = reduced(n, (size_t)me * c + k, o->op);
    break;
  default:
    return value((int)q, (size_t)me * c + k, o->op);
  }
  if (o->op != CDDP_AVG) return v;
  return o->t <= CDDP_BF16 ? v / n : floor(v / n);
}

static void check_one(const one *o) {
  int n = cddp_world_size(o->g), me = cddp_rank(o->g);
  size_t all = o->count * (size_t)n, bytes = all * cddp_dtype_size(o->t), i, out;
  bool in_place = o->kind <= CDDP__KIND_BROADCAST;
  void *host = malloc(bytes), *send, *recv;
  cddp_work *w = NULL;
  int bad = 0;
  for (i = 0; i < all; i++) put(o->t, host, i, value(me, i, o->op));
  send = on_device(host, bytes);
  recv = in_place ? send : on_device(NULL, bytes);
  CHECK_OK(call(o, send, recv, o->async ? &w : NULL));
  if (o->async) CHECK_OK(cddp_wait(w));
  to_host(o->g, host, recv, bytes);
  out = in_place || o->kind == CDDP__KIND_SCATTER || o->kind == CDDP__KIND_REDUCE_SCATTER ? o->count
                                                                                          : all;
  for (i = 0; i < out; i++) {
    double want = wanted(o, me, n, i), got = get(o->t, host, i);
    double slack = o->op == CDDP_AVG && o->t <= CDDP_BF16 ? 0.05 * want : 0;
    if (want == want && !(fabs(got - want) <= slack) && bad++ == 0)
      test_fail(__FILE__, __LINE__,
                "kind %d, dtype %d, op %d, root %d, count %zu, rank %d of %d: "
                "element %zu is %g, not %g",
                o->kind, (int)o->t, (int)o->op, o->root, o->count, me, n, i, got, want);
  }
  CHECK_EQ(bad, 0);
  if (!in_place) cudaFree(recv);
  cudaFree(send);
  free(host);
}

static int every_collective(cddp_group *g, void *arg) {
  static const size_t counts[] = {1, 7, 1000, 20001};
  one o;
  int kind, t, n = cddp_world_size(g);
  bool few = RANKS_TSAN && n != 3;
  (void)arg;
  memset(&o, 0, sizeof o);
  o.g = g;
  for (kind = CDDP__KIND_ALL_REDUCE; kind <= CDDP__KIND_ALL_TO_ALL; kind++) {
    for (t = few ? (kind + n) % 4 : 0; t <= CDDP_I64; t += few ? 4 : 1) {
      o.kind = kind;
      o.t = (cddp_dtype)t;
      o.op = (cddp_op)((kind + t) % 5);
      o.count = counts[(kind + t) % 4];
      o.root = (kind + t) % n;
      o.async = t % 2 != 0;
      if (o.t == CDDP_I8 || o.t == CDDP_U8) o.count = counts[(kind + t) % 3];
      check_one(&o);
    }
    o.t = CDDP_F32;
    for (o.op = CDDP_SUM; !few && kind != CDDP__KIND_BROADCAST && o.op <= CDDP_MAX;
         o.op = (cddp_op)(o.op + 1))
      check_one(&o);
    o.op = CDDP_SUM;
  }
  CHECK_OK(cddp_barrier(g));
  return 0;
}

static int with_nccl(cddp_group *g, void *arg) {
  every_collective(g, arg);
  CHECK(hostcuda_calls("ncclAllReduce") > 8);
  return 0;
}

/* --- means --- */

enum { MEANS = 20000 };

static double mean_input(int rank, size_t i) { /* in [1, 2) */
  return 1 + (double)(ranks_mix((uint64_t)rank, i, 9) % 65536) / 65536;
}

/* Got are means over n ranks: no element is off by more than its type's rounding of n inputs, n
   sums and the mean, nor all of them together by what 1/n is in bf16 and f16. */
static void check_means(cddp_dtype t, const void *got, int n, size_t count) {
  const double unit[] = {0x1p-24, 0x1p-53, 0x1p-11, 0x1p-8};
  double sum = 0, bias = 0;
  size_t i, bad = 0;
  int r;
  for (i = 0; i < count; i++) {
    for (sum = 0, r = 0; r < n; r++) sum += mean_input(r, i);
    sum = fabs(get(t, got, i)) * n / sum - 1;
    bias += sum / (double)count;
    bad += !(fabs(sum) < (n + 3) * unit[t]);
  }
  CHECK_EQ(bad, 0);
  CHECK(fabs(bias) < (t == CDDP_BF16 ? 0.1 : 1) * unit[t]);
}

/* In collectives and as a model's gradients; nor does a mean pass f16's range on the way. */
static int means(cddp_group *g, void *arg) {
  int n = cddp_world_size(g), me = cddp_rank(g), t, k;
  char *host = (char *)malloc(MEANS * 8), *grad, *data;
  size_t i, bytes;
  (void)arg;
  for (t = CDDP_F32; t <= CDDP_BF16; t++) {
    cddp_param p;
    cddp_ddp *d = NULL;
    cddp_optim *o = NULL;
    cddp_sgd_desc rule;
    bytes = MEANS * cddp_dtype_size((cddp_dtype)t);
    for (i = 0; i < MEANS; i++) put((cddp_dtype)t, host, i, mean_input(me, i));
    grad = (char *)on_device(host, bytes);
    CHECK_OK(cddp_all_reduce(g, grad, MEANS, (cddp_dtype)t, CDDP_AVG, NULL));
    to_host(g, host, grad, bytes);
    check_means((cddp_dtype)t, host, n, MEANS);
    for (i = 0; t == CDDP_F16 && i < 64; i++) put(CDDP_F16, host, i, 60000);
    CHECK(cudaMemcpy(grad, host, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
    CHECK_OK(cddp_all_reduce(g, grad, 64, (cddp_dtype)t, CDDP_AVG, NULL));
    to_host(g, host, grad, 64);
    for (i = 0; t == CDDP_F16 && i < 32; i++) CHECK(fabs(get(CDDP_F16, host, i) - 60000) < 100);
    memset(&p, 0, sizeof p);
    memset(&rule, 0, sizeof rule);
    p.count = MEANS;
    p.dtype = (cddp_dtype)t;
    p.data = data = (char *)cddp_alloc(g, bytes);
    CHECK(cudaMemset(data, 0, bytes) == cudaSuccess);
    rule.lr = 1;
    CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
    CHECK_OK(cddp_sgd_create(&o, &p, 1, &rule));
    for (k = 0; k < 6; k++) { /* step, step, wait, wait, step, step: each after either */
      for (i = 0; i < MEANS; i++) put((cddp_dtype)t, host, i, mean_input(me, i));
      CHECK(cudaMemset(data, 0, bytes) == cudaSuccess);
      CHECK(cudaMemcpy(p.grad, host, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
      CHECK_OK(cddp_ddp_ready(d, 0));
      if (k / 2 == 1) {
        CHECK_OK(cddp_ddp_wait(d));
        CHECK_OK(cddp_optim_step(o));
      } else {
        CHECK_OK(cddp_ddp_step(d, o));
      }
      to_host(g, host, data, bytes); /* 0 - 1 * mean */
      check_means((cddp_dtype)t, host, n, MEANS);
    }
    cddp_optim_destroy(o);
    cddp_ddp_destroy(d);
    cudaFree(grad);
  }
  free(host);
  return 0;
}

/* A rank without kernels: all use NCCL's mean. */
static int without_kernels(cddp_group *g, void *arg) {
  uint64_t launched = hostcuda_calls("kernel");
  (void)arg;
  return every_collective(g, NULL) || hostcuda_calls("kernel") != launched;
}

static int one_without_kernels(int rank, void *arg) {
  if (rank == 1) cddp_register_kernels(NULL);
  return rank_process(rank, arg);
}

static void test_means(void) {
  job j;
  CHECK_OK(run(means, NULL, 3, NULL));
  if (RANKS_TSAN) return;
  CHECK_OK(run(means, NULL, 2, NULL));
  CHECK_OK(run(means, NULL, 7, NULL));
  CHECK_OK(run(means, NULL, 3, "cpu"));
  memset(&j, 0, sizeof j);
  j.fn = without_kernels;
  CHECK_OK(cddp_spawn(one_without_kernels, &j, 3));
}

static void test_collectives(void) {
  int n;
  for (n = 1; n <= MOST_RANKS; n++) CHECK_OK(run(every_collective, NULL, n, NULL));
  comm_from = 1;
  CHECK_OK(run(with_nccl, NULL, 1, NULL));
  comm_from = 2;
  for (n = 1; n <= MOST_RANKS; n += RANKS_SLOW ? 5 : 2)
    CHECK_OK(run(every_collective, NULL, n, "cpu"));
}

/* Ranks as threads of one process, with a GPU each. */
static int with_device(cddp_group *g, void *arg) {
  const job *j = (const job *)arg;
  CHECK_OK(cddp_set_device(g, j->device, j->backend));
  return j->fn(g, j->arg);
}

static cddp_result run_threads(ranks_fn fn, void *arg, int n, const char *backend) {
  job j;
  memset(&j, 0, sizeof j);
  j.fn = fn;
  j.arg = arg;
  j.backend = backend;
  j.device = "cuda";
  return cddp_run_threads(with_device, &j, n);
}

/* --- data parallel; the kernels are those of cddp_kernels.cuh --- */

/* The backward pass of a made-up model: grad += f(weight, rank, step), on the stream. */
typedef struct backward {
  void *grad;
  const void *data;
  size_t count;
  cddp_dtype dtype;
  uint64_t seed;
} backward;

static void backward_run(void *arg) {
  const backward *b = (const backward *)arg;
  size_t i;
  for (i = 0; b->data == NULL && i < b->count; i++) { /* many digits: sums depend on their order */
    uint64_t h = ranks_mix(b->seed, i, 9);
    double x = ((double)(h >> 11) * 0x1p-52 - 1) * (double)(1 << (h & 7));
    ranks_store(b->dtype, b->grad, i, ranks_load(b->dtype, b->grad, i) + x);
  }
  for (i = 0; b->data != NULL && i < b->count; i++) {
    double noise = (double)(int64_t)(ranks_mix(b->seed, i, 5) % 17) / 8 - 1;
    double g = 0.25 * ranks_load(b->dtype, b->data, i) + noise;
    ranks_store(b->dtype, b->grad, i, ranks_load(b->dtype, b->grad, i) + g);
  }
}

static void backward_on(cudaStream_t s, const cddp_param *p, uint64_t seed) {
  backward *b = (backward *)malloc(sizeof *b);
  hostcuda_op op;
  b->grad = p->grad;
  b->data = p->data;
  b->count = p->count;
  b->dtype = p->dtype;
  b->seed = seed;
  op.run = backward_run;
  op.drop = free;
  op.arg = b;
  if (s == (cudaStream_t)-1) {
    backward_run(b);
    free(b);
  } else {
    CHECK(hostcuda_enqueue(s, op, false) == cudaSuccess);
  }
}

#define PARAMS 6
static const size_t sizes[PARAMS] = {3000, 17, 1, 0, 12000, 129};

/* How a model is trained; out: this rank's weights after it, all of them. */
typedef struct plan {
  int steps,
      steps_a_mode; /* every so many steps the other of wait and step is used; 0: step only */
  double cap_mb, clip;
  bool given_grads, unused, graph, no_momentum, buffers;
  bool adamw, amsgrad, groups; /* groups: some parameters have settings of their own */
  cddp_comm_hook hook;
  bool cpu; /* the reference: host memory, on the CPU backend */
  bool nosync;
  bool uneven; /* each rank takes one step less than the one before it, then joins */
  bool sparse; /* parameter 4's gradient is rows */
  cddp_dtype last; /* of the last parameter */
  bool masters;    /* of it, if it is half precision */
  const char *load, *save; /* files; NULL: none */
  int from, save_at;       /* steps: the first after loading, that before which to save */
  bool alone;              /* load and save without the group, of one rank */
  bool parts;              /* the caller's own optimizer, each rank for its part of the weights */
  int shards;
  bool sharded;    /* sharded_states */
  float *out;      /* shared, [ranks][sum of sizes] */
} plan;

static size_t plan_floats(void) {
  size_t n = 0;
  int i;
  for (i = 0; i < PARAMS; i++) n += sizes[i];
  return n;
}

static void *plan_memory(const plan *p, size_t bytes) {
  void *q;
  if (p->cpu) return calloc(1, bytes + 1);
  q = on_device(NULL, bytes);
  if (bytes > 0) CHECK(cudaMemset(q, 0, bytes) == cudaSuccess);
  return q;
}

static void plan_release(const plan *p, void *q) {
  if (p->cpu)
    free(q);
  else
    cudaFree(q);
}

static void plan_params(const plan *p, cddp_param *params, int rank) {
  static const char *const names[PARAMS] = {"a", "b", "c", "d", "e", "f"};
  size_t k;
  int i;
  for (i = 0; i < PARAMS; i++) {
    cddp_dtype t = i == PARAMS - 1 ? p->last : CDDP_F32;
    size_t bytes = sizes[i] * cddp_dtype_size(t);
    void *host = calloc(1, bytes + 1);
    for (k = 0; k < sizes[i]; k++)
      ranks_store(t, host, k,
                  rank == 0 ? (double)(ranks_mix((uint64_t)i, k, 3) % 64) / 32 - 1 : 99);
    params[i].name = names[i];
    params[i].count = sizes[i];
    params[i].dtype = t;
    params[i].data = plan_memory(p, bytes);
    params[i].grad = p->given_grads && i % 2 == 0 ? plan_memory(p, bytes) : NULL;
    if (p->cpu)
      memcpy(params[i].data, host, bytes);
    else if (bytes > 0)
      CHECK(cudaMemcpy(params[i].data, host, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
    free(host);
  }
}

#define ROWS 100 /* of parameter 4 */

/* Some rows, more than once some of them; none on one rank. */
static void plan_rows(const plan *p, cddp_ddp *d, int rank, int step) {
  size_t width = sizes[4] / ROWS, n = rank == 1 ? 0 : 7, k;
  float *values = (float *)malloc(n * width * sizeof *values + 1), *given = values;
  int64_t rows[7];
  for (k = 0; k < n; k++) {
    uint64_t row = ranks_mix((uint64_t)step, k / 2, (uint64_t)rank) % ROWS;
    rows[k] = k > 4 ? 50 + (int64_t)k : (int64_t)row;
  }
  for (k = 0; k < n * width; k++)
    values[k] = (float)(ranks_mix((uint64_t)rank, k, (uint64_t)step) % 64) / 32 - 1;
  if (!p->cpu && step % 2) {
    given = (float *)on_device(values, n * width * sizeof *values + 1);
    CHECK(cudaDeviceSynchronize() == cudaSuccess); /* cddp's streams do not wait for the copy */
  }
  CHECK_OK(cddp_ddp_add_rows(d, 4, rows, given, n));
  if (given != values) cudaFree(given);
  free(values);
}

/* One micro-batch: backward in an order that is not that of declaration. */
static void plan_backward(const plan *p, cddp_ddp *d, const cddp_param *params, cddp_group *g,
                          int step) {
  static const int order[PARAMS] = {5, 3, 4, 1, 2, 0};
  cudaStream_t s = p->cpu ? (cudaStream_t)-1 : (cudaStream_t)cddp_stream(g);
  int i, k;
  for (k = 0; k < PARAMS; k++) {
    i = order[k];
    if (p->unused && (i == 1 || (i == 4 && cddp_rank(g) == 0 && step % 2 == 0))) continue;
    if (p->sparse && i == 4)
      plan_rows(p, d, cddp_rank(g), step);
    else if (params[i].count > 0)
      backward_on(s, &params[i], ranks_mix((uint64_t)i, (uint64_t)cddp_rank(g), (uint64_t)step));
    CHECK_OK(cddp_ddp_ready(d, i));
  }
}

/* SGD on this rank's partitions, with cddp's kernel. */
static void plan_parts(const plan *p, cddp_ddp *d, cddp_group *g, char **momentum, bool *first) {
  const cddp_partition *part;
  int n = cddp_ddp_partitions(d, &part), i;
  cddp_sgd_desc rule;
  memset(&rule, 0, sizeof rule);
  rule.lr = 0.05;
  rule.momentum = 0.9;
  rule.weight_decay = p->sparse ? 0 : 0.01;
  CHECK_OK(cddp_ddp_reduce_scatter(d));
  for (i = 0; i < n; i++) {
    cddp_dtype t = part[i].param == PARAMS - 1 ? p->last : CDDP_F32;
    cddp_segment s = {part[i].data, part[i].grad,
                      momentum[part[i].param] + part[i].first * cddp_dtype_size(t), part[i].count,
                      NULL};
    if (!cddp_ddp_used(d, part[i].param)) continue;
    CHECK(cddp__registered_kernels->sgd(&s, 1, t, &rule, 1, NULL,
                                        first[part[i].param] ? CDDP_SGD_FIRST : 0,
                                        cddp_stream(g)) == 0);
  }
  for (i = 0; i < PARAMS; i++)
    if (cddp_ddp_used(d, i)) first[i] = false;
  CHECK_OK(cddp_ddp_all_gather(d));
}

/* All ranks' parts of the states: then all have the same. */
static void check_states(cddp_ddp *d, cddp_group *g, const cddp_param *params, char **momentum) {
  cddp_param states[PARAMS];
  float low[12000], high[12000];
  size_t k, none = 0;
  int i;
  for (i = 0; i < PARAMS; i++) {
    states[i] = params[i];
    states[i].data = i == 1 ? NULL : momentum[i];
  }
  CHECK_OK(cddp_ddp_gather_states(d, states));
  for (i = 0; i < PARAMS; i++) {
    if (i == 1 || params[i].dtype != CDDP_F32) continue;
    if (sizes[i] > 0) to_host(g, low, momentum[i], sizes[i] * sizeof *low);
    memcpy(high, low, sizes[i] * sizeof *low);
    CHECK_OK(cddp_all_reduce(g, low, sizes[i], CDDP_F32, CDDP_MIN, NULL));
    CHECK_OK(cddp_all_reduce(g, high, sizes[i], CDDP_F32, CDDP_MAX, NULL));
    CHECK(memcmp(low, high, sizes[i] * sizeof *low) == 0);
    for (k = 0; k < sizes[i]; k++) none += low[k] == 0;
  }
  CHECK(none < 100);
}

static void plan_own(const plan *p, cddp_ddp *d, cddp_optim *o, cddp_param *params, cddp_group *g) {
  bool first[PARAMS] = {true, true, true, true, true, true};
  cudaStream_t stream = (cudaStream_t)cddp_stream(g);
  cudaGraphExec_t exec = NULL;
  cudaGraph_t graph = NULL;
  char *momentum[PARAMS];
  int i, step, shard;
  for (i = 0; i < PARAMS; i++)
    momentum[i] = (char *)plan_memory(p, sizes[i] * cddp_dtype_size(params[i].dtype));
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK_IS(cddp_ddp_all_gather(d), CDDP_INVALID_ARGUMENT);
  for (step = 0; step < p->steps; step++) {
    if (p->graph && step == 2)
      CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    if (p->shards == 0) plan_backward(p, d, params, g, p->graph ? 7 : step);
    while (p->shards > 0 && cddp_ddp_next_shard(d, &shard))
      plan_backward(p, d, params, g, 100 * step + shard);
    plan_parts(p, d, g, momentum, first);
    if (!p->graph || step != 2) continue;
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    CHECK(graph != NULL && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    for (; exec != NULL && step < p->steps; step++)
      CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess);
    CHECK_OK(cddp_synchronize(g));
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
  }
  CHECK_OK(cddp_optim_write_copies(o));
  check_states(d, g, params, momentum);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  for (i = 0; i < PARAMS; i++) plan_release(p, momentum[i]);
}

static void plan_step(const plan *p, cddp_ddp *d, cddp_optim *s, const cddp_param *params,
                      cddp_group *g, int step) {
  int shard;
  if (p->nosync) {
    cddp_ddp_no_sync(d, true);
    plan_backward(p, d, params, g, step + 1000);
    CHECK_OK(cddp_ddp_wait(d));
    cddp_ddp_no_sync(d, false);
  }
  if (p->shards == 0) plan_backward(p, d, params, g, step);
  while (p->shards > 0 && cddp_ddp_next_shard(d, &shard))
    plan_backward(p, d, params, g, 100 * step + shard);
  if (p->buffers && !p->graph && !p->uneven) /* while buckets are reduced */
    CHECK_OK(cddp_ddp_sync_buffers(d));
  if ((p->cpu && p->clip > 0) || (p->steps_a_mode > 0 && step / p->steps_a_mode % 2 == 0)) {
    double norm = 0, *asked = step % 2 && !p->graph ? &norm : NULL;
    CHECK_OK(cddp_ddp_wait(d));
    if (p->clip > 0) CHECK_OK(cddp_ddp_clip_grad_norm(d, p->clip, asked));
    CHECK_OK(cddp_optim_step(s));
    CHECK_OK(cddp_optim_zero_grad(s));
  } else {
    double norm = 0;
    CHECK_OK(cddp_ddp_step(d, s));
    if (p->clip > 0 && !p->graph) CHECK_OK(cddp_ddp_grad_norm(d, &norm));
    if (p->clip > 0 && !p->graph) CHECK(norm > p->clip); /* or the test shows nothing */
  }
}

/* Steps 2 and later as launches of one graph: the captured step is `step` each time. */
static void plan_graph(const plan *p, cddp_ddp *d, cddp_optim *s, const cddp_param *params,
                       cddp_group *g) {
  cudaStream_t stream = (cudaStream_t)cddp_stream(g);
  cudaGraphExec_t exec = NULL;
  cudaGraph_t graph = NULL;
  int step;
  for (step = 0; step < 2; step++) plan_step(p, d, s, params, g, 7);
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  plan_step(p, d, s, params, g, 7);
  CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  CHECK(graph != NULL && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
  for (step = 2; exec != NULL && step < p->steps; step++)
    CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess);
  CHECK_OK(cddp_synchronize(g));
  if (exec != NULL) cudaGraphExecDestroy(exec);
  if (graph != NULL) cudaGraphDestroy(graph);
}

static void plan_save(const plan *p, cddp_group *g, const cddp_param *params, cddp_optim *s) {
  cddp_checkpoint_desc k;
  memset(&k, 0, sizeof k);
  k.optim = s;
  CHECK_OK(cddp_save(p->alone ? NULL : g, p->save, params, PARAMS, &k));
}

static void plan_run(const plan *p, cddp_ddp *d, cddp_optim *s, cddp_param *params, cddp_group *g) {
  cddp_checkpoint_desc k;
  int step;
  memset(&k, 0, sizeof k);
  k.optim = s;
  if (p->load != NULL)
    CHECK_OK(cddp_load(p->alone ? NULL : g, p->load, params, PARAMS, &k));
  for (step = p->from; step < p->steps - (p->uneven ? cddp_rank(g) : 0); step++) {
    if (p->save != NULL && step == p->save_at) plan_save(p, g, params, s);
    plan_step(p, d, s, params, g, p->graph ? 7 : step);
  }
  if (p->save != NULL && step == p->save_at) plan_save(p, g, params, s);
  if (p->uneven) CHECK_OK(cddp_ddp_join(d, s));
}

/* Half precision for every f32 parameter but one. */
static void plan_copies(const plan *p, const cddp_param *params, void **copies,
                        cddp_sgd_desc *rule) {
  int i;
  for (i = 0; i < PARAMS; i++)
    copies[i] = params[i].dtype == CDDP_F32 && i != 2 ? plan_memory(p, sizes[i] * 2) : NULL;
  if (!p->cpu) CHECK(cudaDeviceSynchronize() == cudaSuccess);
  rule->copies = copies;
  rule->copy_dtype = p->given_grads ? CDDP_F16 : CDDP_BF16;
}

/* data: a parameter's weights, on the host. */
static void check_copy(const plan *p, cddp_group *g, const void *copy, const char *data, int i,
                       cddp_dtype dtype) {
  char *host = (char *)calloc(2, sizes[i] + 1);
  if (p->cpu) memcpy(host, copy, sizes[i] * 2);
  else if (sizes[i] > 0) to_host(g, host, copy, sizes[i] * 2);
  CHECK(ranks_is_copy(dtype, host, data, sizes[i]));
  free(host);
}

/* rule: for SGD; AdamW takes what it says too. */
static cddp_optim *plan_optim(const plan *p, cddp_param *params, cddp_sgd_desc *rule) {
  static const double scales[PARAMS] = {1, 0.5, 1, 1, 2, 0}, decays[PARAMS] = {0.1, 0, 0, 0.1, 0};
  cddp_optim *s = NULL;
  cddp_adamw_desc a;
  if (p->groups) rule->lr_scales = scales, rule->weight_decays = decays;
  if (!p->adamw) {
    CHECK_OK(cddp_sgd_create(&s, params, PARAMS, rule));
    return s;
  }
  memset(&a, 0, sizeof a);
  a.lr = 0.01;
  a.eps = 1e-3; /* what is rounded otherwise in a small gradient makes no other step */
  a.beta2 = 0.98;
  a.weight_decay = rule->weight_decay;
  a.amsgrad = p->amsgrad;
  a.ddp = rule->ddp;
  a.sharded_states = rule->sharded_states;
  a.stream = rule->stream;
  a.copies = rule->copies;
  a.master_weights = rule->master_weights;
  a.copy_dtype = rule->copy_dtype;
  a.lr_scales = rule->lr_scales;
  a.weight_decays = rule->weight_decays;
  CHECK_OK(cddp_adamw_create(&s, params, PARAMS, &a));
  return s;
}

static int train(cddp_group *g, void *arg) {
  const plan *p = (const plan *)arg;
  cddp_param params[PARAMS], buffer;
  void *copies[PARAMS];
  cddp_ddp_desc desc;
  cddp_sgd_desc rule;
  cudaStream_t stream = NULL;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  float *out = p->out + (size_t)cddp_rank(g) * plan_floats();
  size_t k, rows[PARAMS] = {0, 0, 0, 0, ROWS, 0};
  int i;
  memset(&desc, 0, sizeof desc);
  memset(&rule, 0, sizeof rule);
  if (!p->cpu) {
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    cddp_set_stream(g, stream);
  }
  plan_params(p, params, cddp_rank(g));
  if (!p->cpu) CHECK(cudaDeviceSynchronize() == cudaSuccess);
  desc.bucket_cap_mb = p->cap_mb;
  desc.find_unused_parameters = p->unused;
  desc.comm_hook = p->hook;
  desc.uneven_inputs = p->uneven;
  desc.max_grad_norm = p->clip;
  desc.shards = p->shards;
  if (p->sparse) desc.sparse_rows = rows;
  buffer = params[0];
  if (p->buffers) desc.buffers = &buffer, desc.buffer_count = 1;
  CHECK_OK(cddp_ddp_create(&d, g, params, PARAMS, &desc));
  if (d == NULL) return 1;
  rule.lr = 0.05;
  rule.momentum = p->no_momentum ? 0 : 0.9;
  rule.weight_decay = p->sparse ? 0 : 0.01;
  if (p->unused || p->sparse || p->sharded) rule.ddp = d;
  rule.sharded_states = p->sharded;
  rule.stream = stream;
  rule.master_weights = p->masters;
  plan_copies(p, params, copies, &rule);
  if ((s = plan_optim(p, params, &rule)) == NULL) return 1;
  if (p->parts)
    plan_own(p, d, s, params, g);
  else if (p->graph && !p->cpu)
    plan_graph(p, d, s, params, g);
  else
    plan_run(p, d, s, params, g);
  if (p->buffers) CHECK_OK(cddp_ddp_sync_buffers(d));
  for (i = 0; i < PARAMS; i++) {
    char *host = (char *)calloc(1, sizes[i] * 8 + 1);
    size_t bytes = sizes[i] * cddp_dtype_size(params[i].dtype);
    if (p->cpu)
      memcpy(host, params[i].data, bytes);
    else if (bytes > 0)
      to_host(g, host, params[i].data, bytes);
    for (k = 0; k < sizes[i]; k++) *out++ = (float)ranks_load(params[i].dtype, host, k);
    if (copies[i] != NULL) check_copy(p, g, copies[i], host, i, rule.copy_dtype);
    free(host);
  }
  if (!p->cpu) CHECK(cudaDeviceSynchronize() == cudaSuccess);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  for (i = 0; i < PARAMS; i++) {
    plan_release(p, params[i].data);
    if (params[i].grad != NULL) plan_release(p, params[i].grad);
    if (copies[i] != NULL) plan_release(p, copies[i]);
  }
  if (stream != NULL) {
    cddp_set_stream(g, NULL);
    cudaStreamDestroy(stream);
  }
  return 0;
}

/* The plan on n ranks, on a device and on the CPU: all ranks alike, and close to the CPU's. */
static void check_plan(plan *p, int n, const char *backend) {
  size_t count = plan_floats(), i;
  float *got = (float *)ranks_shared((size_t)n * count * sizeof *got), *want;
  double worst = 0;
  int r, cut = 0;
  want = (float *)ranks_shared((size_t)n * count * sizeof *want);
  p->out = got;
  p->cpu = false;
  CHECK_OK(run(train, p, n, backend));
  p->out = want;
  p->cpu = true;
  CHECK_OK(ranks_run(train, p, n, false));
  for (r = 1; r < n; r++) CHECK(memcmp(got, got + (size_t)r * count, count * sizeof *got) == 0);
  for (i = 0; i < count; i++) {
    double e = fabs((double)got[i] - (double)want[i]) / (1 + fabs((double)want[i]));
    if (!(e <= worst)) worst = e;
    if (!(e == e)) cut = 1;
  }
  if (p->masters && n == 1) /* nothing is added up: the same bits */
    CHECK(worst == 0);
  if (!(worst < (p->hook != NULL || p->last >= CDDP_F16 ? 0.02 : 1e-5)) || cut)
    test_fail(__FILE__, __LINE__, "%d ranks on %s: worst difference to the CPU %g", n,
              backend != NULL ? backend : "nccl", worst);
  munmap(got, (size_t)n * count * sizeof *got);
  munmap(want, (size_t)n * count * sizeof *want);
}

/* Both halves of the group train the same. */
static int train_halves(cddp_group *g, void *arg) {
  cddp_group *half = NULL;
  int r = 1;
  CHECK_OK(cddp_group_split(g, cddp_rank(g) % 2, 0, &half));
  if (half != NULL) r = train(half, arg);
  cddp_destroy(half);
  return r;
}

static void test_training(void) {
  plan p;
  int n;
  for (n = 1; n <= MOST_RANKS; n++) {
    memset(&p, 0, sizeof p);
    p.steps = 4;
    p.cap_mb = 0.02;
    if (!RANKS_TSAN || n % 2) check_plan(&p, n, NULL);
    if (RANKS_TSAN && n % 2) continue;
    p.steps_a_mode = 1;
    p.steps = 6;
    p.given_grads = true;
    p.clip = n % 4 > 1 ? 0.5 : 0;
    p.unused = n % 3 == 0;
    check_plan(&p, n, NULL);
  }
  memset(&p, 0, sizeof p);
  p.steps = 3;
  p.out = (float *)ranks_shared(2 * plan_floats() * sizeof *p.out);
  CHECK_OK(run(train_halves, &p, 4, NULL));
  CHECK(memcmp(p.out, p.out + plan_floats(), plan_floats() * sizeof *p.out) == 0);
}

/* On any hosts the plan ends in the bits of one. */
static void check_hosts(plan *p, const char *const *layouts, const char *backend) {
  size_t bytes = strlen(layouts[0]) * plan_floats() * sizeof(float);
  float *want = (float *)ranks_shared(bytes), *got = (float *)ranks_shared(bytes);
  p->out = want;
  CHECK_OK(run(train, p, (int)strlen(layouts[0]), backend));
  p->out = got;
  for (; *layouts != NULL; layouts++) {
    memset(got, 0, bytes);
    CHECK_OK(run_on(*layouts, train, p, backend));
    if (memcmp(got, want, bytes) != 0) test_fail(__FILE__, __LINE__, "layout %s differs", *layouts);
  }
  munmap(want, bytes);
  munmap(got, bytes);
}

static void test_training_over_hosts(void) {
  static const char *const three[] = {"aab", "abc", NULL}, *const four[] = {"abba", NULL};
  plan p;
  memset(&p, 0, sizeof p);
  p.steps = 4;
  p.cap_mb = 0.02;
  if (!RANKS_TSAN) check_hosts(&p, three, NULL);
  p.steps_a_mode = 1;
  p.given_grads = p.buffers = true;
  check_hosts(&p, four, NULL);
  if (!RANKS_TSAN) check_hosts(&p, three + 1, "cpu");
}

static void test_training_options(void) {
  plan p;
  memset(&p, 0, sizeof p);
  p.steps = 4;
  p.cap_mb = 0.02;
  p.clip = 0.5;
  check_plan(&p, 2, NULL);
  p.adamw = p.given_grads = true;
  check_plan(&p, 3, NULL);
  p.adamw = p.given_grads = false;
  p.steps_a_mode = 1;
  check_plan(&p, 2, NULL);
  p.clip = p.steps_a_mode = 0;
  p.nosync = true;
  p.no_momentum = true;
  check_plan(&p, 2, NULL);
  p.nosync = false;
  p.steps_a_mode = 1;
  check_plan(&p, 3, NULL);
  p.steps_a_mode = 0;
  p.no_momentum = false;
  p.unused = true;
  check_plan(&p, 2, NULL);
  p.steps_a_mode = 1;
  check_plan(&p, 3, NULL);
  memset(&p, 0, sizeof p);
  p.steps = 4;
  p.cap_mb = 0.02;
  p.last = CDDP_BF16;
  p.buffers = true;
  check_plan(&p, 2, NULL);
  p.last = CDDP_F32;
  p.hook = cddp_bf16_compress_hook;
  check_plan(&p, 2, NULL);
}

/* An optimizer of the caller's own, each rank for its part of the weights, ends in the bits of
   cddp_ddp_step. */
static void check_parts(plan *p, const char *hosts, const char *backend) {
  size_t n = strlen(hosts), bytes = n * plan_floats() * sizeof(float);
  float *want = (float *)ranks_shared(bytes), *got = (float *)ranks_shared(bytes);
  p->out = want;
  p->parts = false;
  CHECK_OK(run_on(hosts, train, p, backend));
  p->out = got;
  p->parts = true;
  CHECK_OK(run_on(hosts, train, p, backend));
  if (memcmp(got, want, bytes) != 0)
    test_fail(__FILE__, __LINE__, "%s on %s: clip %g, %d shards: other bits than cddp_ddp_step's",
              hosts, backend != NULL ? backend : "nccl", p->clip, p->shards);
  munmap(want, bytes);
  munmap(got, bytes);
}

static void test_parts(void) {
  plan p;
  memset(&p, 0, sizeof p);
  p.steps = 4;
  p.cap_mb = 0.02;
  check_parts(&p, "aaa", NULL);
  p.clip = 0.5;
  p.given_grads = true;
  check_parts(&p, "aa", NULL);
  check_parts(&p, "aba", NULL);
  check_parts(&p, "aa", "cpu");
  p.graph = true;
  check_parts(&p, "aaa", NULL);
  p.graph = false;
  p.shards = 5;
  p.last = CDDP_BF16;
  check_parts(&p, "aa", NULL);
  if (RANKS_TSAN) return;
  p.clip = 0;
  check_parts(&p, "aaa", "cpu");
  p.shards = 0;
  p.last = CDDP_F64;
  p.unused = true;
  check_parts(&p, "a", NULL);
  check_parts(&p, "aaaa", NULL);
}

/* With sharded_states the plan ends in the bits of one without, on all ranks. */
static void check_sharded(plan *p, const char *hosts, const char *backend) {
  size_t n = strlen(hosts), bytes = n * plan_floats() * sizeof(float);
  float *want = (float *)ranks_shared(bytes), *got = (float *)ranks_shared(bytes);
  p->out = want;
  p->sharded = false;
  CHECK_OK(run_on(hosts, train, p, backend));
  p->out = got;
  p->sharded = true;
  CHECK_OK(run_on(hosts, train, p, backend));
  if (ranks_zero(got, bytes) || memcmp(got, want, bytes) != 0)
    test_fail(__FILE__, __LINE__, "%s on %s: sharded states end in other bits", hosts,
              backend != NULL ? backend : "nccl");
  munmap(want, bytes);
  munmap(got, bytes);
}

/* AdamW's states with a master are 12 bytes an element. A wait between two sharded steps gets all
   of the gradient. */
static int sharded_memory(cddp_group *g, void *arg) {
  cddp_param p;
  cddp_adamw_desc a;
  cddp_ddp *d = NULL;
  cddp_optim *o = NULL;
  size_t n = 1 << 18, ranks = (size_t)cddp_world_size(g), before, bytes, i;
  uint16_t *host = (uint16_t *)calloc(n, sizeof *host);
  int step;
  (void)arg;
  memset(&p, 0, sizeof p);
  memset(&a, 0, sizeof a);
  p.name = "w", p.count = n, p.dtype = CDDP_BF16, p.data = on_device(host, 2 * n);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
  before = hostcuda_bytes();
  a.lr = 0.01, a.ddp = d, a.master_weights = a.sharded_states = true;
  CHECK_OK(cddp_adamw_create(&o, &p, 1, &a));
  bytes = hostcuda_bytes() - before;
  CHECK(bytes + 65536 >= 12 * n / ranks && bytes <= 12 * n / ranks + 65536);
  for (step = 0; step < 6; step++) {
    for (i = 0; i < n; i++) host[i] = (uint16_t)(0x3f80 + cddp_rank(g) * 8); /* 1 + rank / 16 */
    CHECK_OK(cddp_synchronize(g));
    CHECK(cudaMemcpy(p.grad, host, 2 * n, cudaMemcpyHostToDevice) == cudaSuccess);
    CHECK_OK(cddp_ddp_ready(d, 0));
    if (step % 2 == 0) {
      CHECK_OK(cddp_ddp_step(d, o));
      continue;
    }
    CHECK_OK(cddp_ddp_wait(d));
    to_host(g, host, p.grad, 2 * n);
    for (i = 1; i < n && host[i] == host[0];) i++;
    CHECK(i == n && host[0] >= 0x3f80 && host[0] <= 0x3f80 + 8 * (ranks - 1));
  }
  CHECK_IS(cddp_optim_step(o), CDDP_INVALID_ARGUMENT);
  CHECK_OK(cddp_synchronize(g));
  cddp_optim_destroy(o);
  cddp_ddp_destroy(d);
  cudaFree(p.data);
  free(host);
  return 0;
}

static void test_sharded_states(void) {
  static const char *const hosts[] = {"a", "aa", "aba", "aaaa", "aaaaa", "aaaaaa", "aaaaaaa",
                                      "aaaaaaaa"};
  plan p;
  int n, k;
  for (n = RANKS_TSAN ? 2 : 1; n <= MOST_RANKS; n += RANKS_SLOW ? 2 : 1) {
    memset(&p, 0, sizeof p);
    p.steps = 4;
    p.cap_mb = 0.02;
    p.adamw = p.amsgrad = n % 2 == 0;
    p.given_grads = n % 3 == 0;
    p.groups = n % 4 == 1;
    p.last = n % 4 == 2 ? CDDP_F64 : CDDP_F32;
    check_sharded(&p, hosts[n - 1], NULL);
  }
  for (k = 0; k < (RANKS_TSAN ? 2 : 8); k++) {
    memset(&p, 0, sizeof p);
    p.steps = 5;
    p.cap_mb = 0.02;
    p.adamw = k % 2 == 0;
    p.last = k < 4 ? k % 2 == 0 ? CDDP_BF16 : CDDP_F16 : CDDP_F32;
    p.masters = k < 4;
    p.clip = k == 1 || k == 5 ? 0.5 : 0;
    p.unused = k == 2 || k == 4;
    p.shards = k == 3 ? 7 : 0;
    p.uneven = k == 6;
    p.hook = k == 5 ? cddp_bf16_compress_hook : NULL;
    p.graph = k == 7;
    check_sharded(&p, hosts[1 + k % 3], k == 4 ? "cpu" : NULL);
  }
  CHECK_OK(run(sharded_memory, NULL, 2, NULL));
  if (!RANKS_TSAN) CHECK_OK(run(sharded_memory, NULL, 3, NULL));
}

/* f16 and bf16 weights and gradients, f32 masters. */
static void test_training_masters(void) {
  plan p;
  int k;
  for (k = 0; k < 4; k++) {
    memset(&p, 0, sizeof p);
    p.steps = 5;
    p.cap_mb = 0.02;
    p.masters = true;
    p.last = k % 2 ? CDDP_F16 : CDDP_BF16;
    p.adamw = k < 2;
    p.amsgrad = k == 1;
    p.no_momentum = k == 3;
    p.given_grads = k % 2 == 0;
    check_plan(&p, 1, NULL);
    p.steps_a_mode = 1;
    check_plan(&p, 1, NULL);
    check_plan(&p, 2, k == 2 ? "cpu" : NULL);
    p.steps_a_mode = 0;
    p.clip = 0.5;
    p.unused = k == 2;
    check_plan(&p, 3, NULL);
  }
}

/* Ranks without data, and gradients that are rows, as on the CPU. */
static void test_uneven_and_sparse(void) {
  static const char *const backends[] = {NULL, "cpu"}, *const layouts[] = {"aab", "abc", NULL};
  plan p;
  int i;
  for (i = 0; i < 2; i++) {
    memset(&p, 0, sizeof p);
    p.steps = 6;
    p.cap_mb = 0.02;
    p.uneven = true;
    check_plan(&p, 3, backends[i]);
    p.steps_a_mode = 1;
    p.unused = p.buffers = true;
    check_plan(&p, 3, backends[i]);
    p.unused = false;
    p.hook = cddp_bf16_compress_hook;
    check_plan(&p, 3, backends[i]);
    p.hook = NULL;
    p.uneven = false;
    p.sparse = true;
    check_plan(&p, 2, backends[i]);
    p.clip = 0.5;
    check_plan(&p, 3, backends[i]);
    p.steps_a_mode = 0;
    check_plan(&p, 3, backends[i]);
    p.clip = 0;
    p.no_momentum = p.uneven = true;
    check_plan(&p, 3, backends[i]);
    p.cpu = false;
    if (i == 0) check_hosts(&p, layouts, NULL);
  }
}

/* --- checkpoints --- */

static char file_a[300], file_b[300], file_c[300];

static bool same_files(const char *kept, const char *made) {
  static char a[1 << 18], b[1 << 18];
  FILE *f[2];
  size_t n[2] = {0, 1};
  f[0] = fopen(kept, "rb");
  f[1] = fopen(made, "rb");
  if (f[0] != NULL) n[0] = fread(a, 1, sizeof a, f[0]);
  if (f[1] != NULL) n[1] = fread(b, 1, sizeof b, f[1]);
  if (f[0] != NULL) fclose(f[0]);
  if (f[1] != NULL) fclose(f[1]);
  CHECK(n[0] > 2 * plan_floats()); /* momentum too */
  unlink(made);
  return n[0] == n[1] && n[0] < sizeof a && memcmp(a, b, n[0]) == 0;
}

/* What was loaded is saved again, unchanged, by all kinds of groups. */
static void check_round_trips(const plan *made) {
  static const int ranks[] = {1, 3, 1, 2, 2, 1};
  plan p = *made;
  int i;
  p.load = file_a;
  p.save = file_b;
  p.from = p.steps = p.save_at;
  for (i = 0; i < 6; i += RANKS_TSAN ? 2 : 1) {
    p.out = (float *)ranks_shared((size_t)ranks[i] * plan_floats() * sizeof *p.out);
    p.cpu = i >= 4;
    p.alone = ranks[i] == 1 && i > 0;
    if (p.cpu) CHECK_OK(ranks_run(train, &p, ranks[i], false));
    else CHECK_OK(run(train, &p, ranks[i], i == 3 ? "cpu" : NULL));
    if (!same_files(file_a, file_b)) test_fail(__FILE__, __LINE__, "the file of way %d differs", i);
    munmap(p.out, (size_t)ranks[i] * plan_floats() * sizeof *p.out);
  }
}

/* A run that is saved, and goes on; another begins with the file and must end the same. */
static void check_resume(plan *p, int n, const char *backend) {
  size_t bytes = (size_t)n * plan_floats() * sizeof(float);
  float *want = (float *)ranks_shared(bytes), *got = (float *)ranks_shared(bytes);
  p->out = want;
  p->save = file_a;
  CHECK_OK(run(train, p, n, backend));
  check_round_trips(p);
  p->out = got;
  p->load = file_a;
  p->save = NULL;
  p->from = p->save_at;
  CHECK_OK(run(train, p, n, backend));
  CHECK(memcmp(got, want, bytes) == 0);
  p->load = NULL;
  p->from = 0;
  munmap(got, bytes);
  munmap(want, bytes);
}

static int failing_files(cddp_group *g, void *arg) {
  plan p;
  cddp_param params[PARAMS];
  cddp_checkpoint_desc k;
  cddp_sgd_desc rule;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  (void)arg;
  memset(&p, 0, sizeof p);
  memset(&k, 0, sizeof k);
  memset(&rule, 0, sizeof rule);
  rule.momentum = 0.5;
  plan_params(&p, params, 0);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK_OK(cddp_ddp_create(&d, g, params, PARAMS, NULL));
  CHECK_OK(cddp_sgd_create(&s, params, PARAMS, &rule));
  plan_step(&p, d, s, params, g, 0);
  k.optim = s;
  CHECK_IS(cddp_save(g, "/nowhere/at/all", params, PARAMS, &k), CDDP_IO);
  CHECK_IS(cddp_load(g, "/nowhere/at/all", params, PARAMS, &k), CDDP_IO);
  plan_step(&p, d, s, params, g, 1); /* nothing is lost */
  CHECK_OK(cddp_synchronize(g));
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  return 0;
}

/* Another dtype than the file's: as the CPU converts it. */
static void check_conversion(const plan *made) {
  size_t bytes = 2 * plan_floats() * sizeof(float);
  plan p = *made;
  p.out = (float *)ranks_shared(bytes);
  p.from = p.steps = p.save_at;
  p.load = file_a;
  p.last = p.last == CDDP_F32 ? CDDP_BF16 : CDDP_F32;
  p.save = file_b;
  CHECK_OK(run(train, &p, 2, NULL));
  p.save = file_c;
  p.cpu = true;
  CHECK_OK(ranks_run(train, &p, 2, false));
  CHECK(same_files(file_c, file_b));
  unlink(file_c);
  munmap(p.out, bytes);
}

static void test_checkpoints(void) {
  const char *tmp = getenv("TMPDIR");
  plan p;
  snprintf(file_a, sizeof file_a, "%.250s/cddp-nccl-%d.a", tmp ? tmp : "/tmp", (int)getpid());
  snprintf(file_b, sizeof file_b, "%.250s/cddp-nccl-%d.b", tmp ? tmp : "/tmp", (int)getpid());
  snprintf(file_c, sizeof file_c, "%.250s/cddp-nccl-%d.c", tmp ? tmp : "/tmp", (int)getpid());
  memset(&p, 0, sizeof p);
  p.cap_mb = 0.02;
  p.steps = 5;
  p.save_at = 3;
  p.last = CDDP_BF16;
  check_resume(&p, 2, NULL);
  check_conversion(&p);
  p.sharded = true; /* alone it is whole */
  check_resume(&p, 3, NULL);
  check_conversion(&p);
  p.adamw = p.masters = true;
  check_resume(&p, 2, "cpu");
  p.adamw = p.masters = p.sharded = false;
  p.steps_a_mode = 1;
  check_resume(&p, 3, NULL);
  if (!RANKS_TSAN) check_resume(&p, 2, "cpu");
  CHECK_OK(run(failing_files, NULL, 2, NULL));
  unlink(file_a);
}

static int captured_adamw(cddp_group *g, void *arg) {
  plan p;
  cddp_param params[PARAMS];
  cddp_adamw_desc a;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cudaStream_t stream = NULL;
  cudaGraph_t graph = NULL;
  int step;
  (void)arg;
  memset(&p, 0, sizeof p);
  memset(&a, 0, sizeof a);
  a.lr = 0.1;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  cddp_set_stream(g, stream);
  plan_params(&p, params, 0);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK_OK(cddp_ddp_create(&d, g, params, PARAMS, NULL));
  CHECK_OK(cddp_adamw_create(&s, params, PARAMS, &a));
  for (step = 0; step < 2; step++) plan_step(&p, d, s, params, g, step);
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  plan_backward(&p, d, params, g, 2);
  CHECK_IS(cddp_ddp_step(d, s), CDDP_UNSUPPORTED);
  CHECK(strstr(cddp_error(), "AdamW") != NULL);
  (void)cudaStreamEndCapture(stream, &graph);
  if (graph != NULL) cudaGraphDestroy(graph);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  return 0;
}

static void test_adamw(void) {
  const char *tmp = getenv("TMPDIR");
  plan p;
  int i;
  snprintf(file_a, sizeof file_a, "%.250s/cddp-nccl-%d.a", tmp ? tmp : "/tmp", (int)getpid());
  snprintf(file_b, sizeof file_b, "%.250s/cddp-nccl-%d.b", tmp ? tmp : "/tmp", (int)getpid());
  for (i = 0; i < 8; i++) {
    memset(&p, 0, sizeof p);
    p.adamw = i != 7;
    p.steps = 5;
    p.cap_mb = 0.02;
    p.last = i % 2 == 1 ? CDDP_F64 : CDDP_F32;
    p.amsgrad = i % 3 == 1;
    p.groups = i >= 4;
    p.given_grads = i % 4 == 1;
    p.steps_a_mode = i % 4 == 2;
    p.unused = i == 3 || i == 5;
    p.uneven = i == 6;
    check_plan(&p, 1 + i % 3, i == 4 ? "cpu" : NULL);
  }
  memset(&p, 0, sizeof p);
  p.adamw = p.amsgrad = p.groups = p.unused = true;
  p.steps = 5;
  p.save_at = 3;
  p.cap_mb = 0.02;
  check_resume(&p, 2, NULL);
  unlink(file_a);
  CHECK_OK(run(captured_adamw, NULL, 1, NULL));
}

static void test_graph(void) {
  plan p;
  memset(&p, 0, sizeof p);
  p.steps = 6;
  p.cap_mb = 0.02;
  p.graph = true;
  check_plan(&p, 1, NULL);
  check_plan(&p, 2, NULL);
  check_plan(&p, 4, NULL);
  p.clip = 0.5;
  check_plan(&p, 2, NULL);
  p.steps_a_mode = 8; /* cddp_ddp_wait, then the clip by itself */
  check_plan(&p, 2, NULL);
}

static void test_training_staged(void) {
  plan p;
  memset(&p, 0, sizeof p);
  p.steps = 4;
  p.cap_mb = 0.02;
  p.steps_a_mode = 1;
  check_plan(&p, 2, "cpu");
  p.unused = true;
  p.steps_a_mode = 0;
  check_plan(&p, 3, "cpu");
  p.unused = false;
  p.given_grads = true;
  p.hook = cddp_fp16_compress_hook;
  check_plan(&p, 2, "cpu");
}

/* --- streams --- */

typedef struct fill {
  float *p, v;
  size_t n;
  bool times;
} fill;

static void fill_run(void *arg) {
  const fill *f = (const fill *)arg;
  size_t i;
  for (i = 0; i < f->n; i++) f->p[i] = f->times ? f->p[i] * f->v : f->v;
}

static void fill_on(cudaStream_t s, float *p, size_t n, float v, bool times) {
  fill *f = (fill *)malloc(sizeof *f);
  hostcuda_op op;
  f->p = p;
  f->n = n;
  f->v = v;
  f->times = times;
  op.run = fill_run;
  op.drop = free;
  op.arg = f;
  CHECK(hostcuda_enqueue(s, op, false) == cudaSuccess);
}

static void check_fill(cddp_group *g, const float *p, size_t n, double want) {
  float *host = (float *)malloc(n * sizeof *host);
  size_t i, bad = 0;
  to_host(g, host, p, n * sizeof *host);
  for (i = 0; i < n; i++) bad += (double)host[i] != want;
  if (bad > 0)
    test_fail(__FILE__, __LINE__, "rank %d: %zu of %zu are not %g; the first is %g", cddp_rank(g),
              bad, n, want, (double)host[0]);
  test_count();
  free(host);
}

/* Three all_to_alls in place, the first beside the stream: they share what they are copied to. What
   the last one gave is overwritten. */
static void check_in_place(cddp_group *g, cudaStream_t s) {
  enum { N = 5000 };
  int n = cddp_world_size(g) & 7, q, k;
  size_t all = (size_t)n * N, i;
  float *x[3], *host = (float *)malloc(all * sizeof *host);
  size_t bad = 0;
  cddp_work *w;
  for (k = 0; k < 3; k++) {
    x[k] = (float *)on_device(NULL, all * sizeof(float));
    for (i = 0; i < 30; i++) fill_on(s, x[k], all, -1, false); /* the stream is late */
    fill_on(s, x[k], all, (float)(10 * k + cddp_rank(g)), false);
    CHECK_OK(cddp_all_to_all(g, x[k], x[k], N, CDDP_F32, k == 0 ? &w : NULL));
  }
  fill_on(s, x[2], all, 77, false);
  CHECK_OK(cddp_wait(w));
  for (k = 0; k < 3; k++) {
    to_host(g, host, x[k], all * sizeof *host);
    for (q = 0; q < n; q++)
      for (i = 0; i < N; i++)
        bad += host[(size_t)q * N + i] != (k < 2 ? (float)(10 * k + q) : 77.0f);
    cudaFree(x[k]);
  }
  CHECK_EQ(bad, 0);
  free(host);
}

/* Work handles: the group's stream and cddp's run side by side, ordered by events alone. */
static int stream_order(cddp_group *g, void *arg) {
  enum { N = 5000 };
  int n = cddp_world_size(g), step, ranks = n * (n - 1) / 2;
  float *x = (float *)cddp_alloc(g, N * sizeof *x), *y = (float *)on_device(NULL, N * sizeof *y);
  cudaStream_t s;
  bool done = false;
  (void)arg;
  CHECK(x != NULL);
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  cddp_set_stream(g, s);
  CHECK(cddp_stream(g) == (void *)s);
  for (step = 0; step < 8; step++) {
    cddp_work *w[2];
    fill_on(s, x, N, (float)(cddp_rank(g) + step), false);
    CHECK_OK(cddp_all_reduce(g, x, N, CDDP_F32, CDDP_SUM, &w[0]));
    fill_on(s, y, N, (float)(cddp_rank(g) + 1), false);
    CHECK_OK(cddp_all_reduce(g, y, N, CDDP_F32, CDDP_MAX, &w[1]));
    CHECK_OK(cddp_wait(w[step % 2]));
    fill_on(s, step % 2 ? y : x, N, 2, true);
    CHECK_OK(cddp_test(w[!(step % 2)], &done));
    CHECK_OK(cddp_wait(w[!(step % 2)]));
    fill_on(s, step % 2 ? x : y, N, 2, true);
    CHECK_OK(cddp_all_reduce(g, x, N, CDDP_F32, CDDP_SUM, NULL)); /* on s itself */
    check_fill(g, x, N, 2.0 * n * (ranks + n * step));
    check_fill(g, y, N, 2.0 * n);
    check_in_place(g, s);
  }
  CHECK(cudaStreamSynchronize(s) == cudaSuccess);
  CHECK(cudaSetDevice(99) == cudaErrorInvalidDevice);
  CHECK_OK(cddp_synchronize(g)); /* finds the stream empty, and leaves the program its error */
  CHECK(cudaGetLastError() == cudaErrorInvalidDevice);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(s);
  cudaFree(y);
  cddp_free(g, x);
  return 0;
}

static void test_streams(void) {
  CHECK_OK(run(stream_order, NULL, 2, NULL));
  CHECK_OK(run(stream_order, NULL, 4, NULL));
  CHECK_OK(run(stream_order, NULL, 2, "cpu"));
}

/* --- groups, messages, host memory --- */

static void check_sum(cddp_group *g,
                      double want) { /* of what each rank of g gives: its own rank + 1 */
  float *x = (float *)cddp_alloc(g, 100 * sizeof *x);
  fill_on((cudaStream_t)cddp_stream(g), x, 100, (float)cddp_rank(g) + 1, false);
  CHECK_OK(cddp_all_reduce(g, x, 100, CDDP_F32, CDDP_SUM, NULL));
  check_fill(g, x, 100, want);
  cddp_free(g, x);
}

static int sub_groups(cddp_group *g, void *arg) {
  int n = cddp_world_size(g), me = cddp_rank(g), k;
  int order[2] = {2, 0};
  cddp_group *half = NULL, *pair = NULL, *inner = NULL, *none = NULL;
  (void)arg;
  check_sum(g, n * (n + 1) / 2);
  CHECK_OK(cddp_group_split(g, me % 2, -me, &half));
  k = cddp_world_size(half);
  CHECK_EQ(k, n / 2 + (n % 2 != 0 && me % 2 == 0));
  CHECK_EQ(cddp_rank(half), k - 1 - me / 2);
  check_sum(half, k * (k + 1) / 2);
  CHECK_OK(cddp_group_new(g, order, 2, &pair));
  CHECK((pair != NULL) == (me == 0 || me == 2));
  if (pair != NULL) CHECK_EQ(cddp_rank(pair), me == 0);
  if (pair != NULL) check_sum(pair, 3);
  CHECK_OK(cddp_group_split(half, cddp_rank(half) == 0 ? 1 : -1, 0, &inner)); /* a single rank */
  if (inner != NULL) check_sum(inner, 1);
  CHECK_OK(cddp_group_split(g, -1, 0, &none));
  CHECK(none == NULL);
  check_sum(g, n * (n + 1) / 2);
  CHECK_OK(cddp_barrier(half));
  cddp_destroy(inner);
  cddp_destroy(pair);
  cddp_destroy(half);
  check_sum(g, n * (n + 1) / 2);
  return 0;
}

static void *wait_for_three(void *handles) {
  cddp_work **w = (cddp_work **)handles;
  int i;
  for (i = 0; i < 3; i++) CHECK_OK(cddp_wait(w[i]));
  return NULL;
}

static int messages(cddp_group *g, void *arg) {
  enum { N = 3000 };
  int n = cddp_world_size(g), me = cddp_rank(g), next = (me + 1) % n, before = (me + n - 1) % n, i;
  float *out[3], *in[3], host = (float)me;
  cudaStream_t s = (cudaStream_t)cddp_stream(g);
  cddp_work *w[6];
  pthread_t other;
  (void)arg;
  for (i = 0; i < 3; i++) {
    out[i] = (float *)on_device(NULL, N * sizeof(float));
    in[i] = (float *)on_device(NULL, N * sizeof(float));
    fill_on(s, out[i], N, (float)(10 * me + i), false);
    CHECK_OK(cddp_send(g, out[i], N, CDDP_F32, next, i, &w[i]));
    CHECK_OK(cddp_recv(g, in[i], N, CDDP_F32, before, i, &w[3 + i]));
  }
  CHECK_EQ(pthread_create(&other, NULL, wait_for_three, w), 0); /* whoever is first sends all */
  wait_for_three(w + 3);
  pthread_join(other, NULL);
  for (i = 0; i < 3; i++) check_fill(g, in[i], N, 10 * before + i);
  fill_on(s, in[1], N, -1, false); /* one without a handle goes with those that wait: all ranks */
  CHECK_OK(cddp_recv(g, in[1], N, CDDP_F32, before, 1, &w[0])); /* receive first */
  CHECK_OK(cddp_send(g, out[1], N, CDDP_F32, next, 1, NULL));
  CHECK_OK(cddp_wait(w[0]));
  check_fill(g, in[1], N, 10 * before + 1);
  for (i = 0; me > 0 && i < 30; i++) fill_on(s, in[0], N, -1, false); /* received after them */
  if (me > 0)
    CHECK_OK(cddp_recv(g, in[0], N, CDDP_F32, before, 0, NULL)); /* a chain of ranks */
  else
    fill_on(s, in[0], N, 1, false);
  fill_on(s, in[0], N, 2, true);
  if (next != 0) CHECK_OK(cddp_send(g, in[0], N, CDDP_F32, next, 0, NULL));
  check_fill(g, in[0], N, (double)(2 << me));
  CHECK_OK(cddp_send(g, &host, 1, CDDP_F32, next, 9, NULL)); /* host memory, with tags */
  CHECK_OK(cddp_recv(g, &host, 1, CDDP_F32, before, 9, NULL));
  CHECK_EQ(host, before);
  for (i = 0; i < 3; i++) {
    cudaFree(out[i]);
    cudaFree(in[i]);
  }
  return 0;
}

static void model_of(cddp_group *g, cddp_param *p, int n, size_t count) { /* weights side by side */
  float *w = (float *)cddp_alloc(g, (size_t)n * count * sizeof *w);
  int i;
  memset(p, 0, (size_t)n * sizeof *p);
  CHECK(cudaMemset(w, 0, (size_t)n * count * sizeof *w) == cudaSuccess);
  for (i = 0; i < n; i++) { /* the last first, as gradients lie */
    p[i].data = w + (size_t)(n - 1 - i) * count;
    p[i].count = count;
  }
}

/* The group's own calls around a model's: a message that some ranks wait for before the buckets and
   others after them, an all_to_all in place that is under way, a metric between the last ready and
   the end of the step. arg: the hook. Buckets are packed for it: each has every other gradient. */
static int beside_a_model(cddp_group *g, void *arg) {
  enum { N = 3000, PARTS = 4 };
  static const int order[PARTS] = {3, 1, 2, 0};
  int n = cddp_world_size(g), me = cddp_rank(g), step, i, k;
  cudaStream_t s = (cudaStream_t)cddp_stream(g);
  float *all = (float *)on_device(NULL, (size_t)n * N * sizeof(float)), *in, *out, *metric;
  cddp_work *exchange, *sent, *received, *sum;
  cddp_ddp_desc desc;
  cddp_param p[PARTS];
  cddp_ddp *d = NULL;
  memset(&desc, 0, sizeof desc);
  desc.comm_hook = (cddp_comm_hook)(uintptr_t)arg;
  desc.bucket_cap_mb = desc.first_bucket_mb = 2.0 * N * sizeof(float) / (1 << 20);
  in = (float *)on_device(NULL, N * sizeof *in);
  out = (float *)on_device(NULL, N * sizeof *out);
  metric = (float *)on_device(NULL, N * sizeof *metric);
  model_of(g, p, PARTS, N);
  CHECK_OK(cddp_ddp_create(&d, g, p, PARTS, &desc));
  for (step = 0; step < 4; step++) {
    for (i = 0; i < 30; i++) fill_on(s, all, (size_t)n * N, -1, false); /* the stream is late */
    fill_on(s, all, (size_t)n * N, (float)(me + step), false);
    CHECK_OK(cddp_all_to_all(g, all, all, N, CDDP_F32, &exchange));
    fill_on(s, out, N, (float)(10 * me + step), false);
    fill_on(s, metric, N, (float)(me + 1), false);
    CHECK_OK(cddp_send(g, out, N, CDDP_F32, (me + 1) % n, 0, &sent));
    CHECK_OK(cddp_recv(g, in, N, CDDP_F32, (me + n - 1) % n, 0, &received));
    if (me % 2 == 0) CHECK_OK(cddp_wait(sent));
    for (i = 0; i < PARTS; i++) {
      k = order[i];
      fill_on(s, (float *)p[k].grad, N, (float)(me + k + step), false);
      CHECK_OK(cddp_ddp_ready(d, k));
    }
    CHECK(cddp_stream(g) == (void *)s);
    CHECK_OK(cddp_all_reduce(g, metric, N, CDDP_F32, CDDP_SUM, step % 2 ? &sum : NULL));
    CHECK_OK(cddp_ddp_wait(d));
    if (step % 2) CHECK_OK(cddp_wait(sum));
    if (me % 2 != 0) CHECK_OK(cddp_wait(sent));
    CHECK_OK(cddp_wait(received));
    CHECK_OK(cddp_wait(exchange));
    for (k = 0; k < PARTS; k++) check_fill(g, (float *)p[k].grad, N, (n - 1) / 2.0 + k + step);
    for (k = 0; k < n; k++) check_fill(g, all + (size_t)k * N, N, k + step);
    check_fill(g, metric, N, n * (n + 1) / 2);
    check_fill(g, in, N, 10 * ((me + n - 1) % n) + step);
  }
  CHECK(desc.comm_hook != NULL || cddp_ddp_bucket_count(d) == 2);
  cddp_ddp_destroy(d);
  cudaFree(metric);
  cudaFree(out);
  cudaFree(in);
  cudaFree(all);
  return 0;
}

static void test_beside_a_model(void) {
  void *hook = (void *)(uintptr_t)cddp_bf16_compress_hook;
  int n;
  for (n = 2; n <= (RANKS_SLOW ? 3 : 5); n++) {
    CHECK_OK(run(beside_a_model, NULL, n, NULL));
    CHECK_OK(run(beside_a_model, hook, n, NULL));
  }
  CHECK_OK(run(beside_a_model, hook, 2, "cpu"));
  CHECK_OK(run_on("aab", beside_a_model, hook, NULL));
}

/* cddp_wait_for on a device: the host waits, gives up in time, and may come again; cddp_cancel
   leaves such an operation alone. */
static int wait_for_late(cddp_group *g, void *arg) {
  int me = cddp_rank(g);
  float *x = (float *)cddp_alloc(g, 100 * sizeof *x);
  cudaStream_t s = (cudaStream_t)cddp_stream(g);
  cddp_work *w = NULL;
  bool done = true;
  (void)arg;
  check_sum(g, 3);
  fill_on(s, x, 100, (float)me + 1, false);
  if (me == 0) {
    double t = test_now();
    CHECK_OK(cddp_all_reduce(g, x, 100, CDDP_F32, CDDP_SUM, &w));
    CHECK_IS(cddp_wait_for(w, 0.05), CDDP_TIMEOUT);
    CHECK(strstr(cddp_error(), "all_reduce on rank 0 has not finished") != NULL);
    CHECK(test_now() - t >= 0.05);
    CHECK_IS(cddp_wait_for(w, 0), CDDP_TIMEOUT);
    CHECK_OK(cddp_test(w, &done));
    CHECK(!done);
    CHECK_IS(cddp_cancel(w), CDDP_UNSUPPORTED);
    CHECK_OK(cddp_send(g, &me, 1, CDDP_I32, 1, 5, NULL)); /* host memory: the other may begin */
    CHECK_OK(cddp_wait_for(w, 20));
  } else {
    int32_t go = -1;
    CHECK_OK(cddp_recv(g, &go, 1, CDDP_I32, 0, 5, NULL));
    CHECK_OK(cddp_all_reduce(g, x, 100, CDDP_F32, CDDP_SUM, &w));
    CHECK_OK(cddp_wait_for(w, 20));
  }
  check_fill(g, x, 100, 3);
  cddp_free(g, x);
  return 0;
}

/* What NCCL has not, PyTorch's neither: bitwise operations, receives from any rank. Through the
   host, and in host memory, there is both. 3 ranks; arg: the backend. */
static int beyond_nccl(cddp_group *g, void *arg) {
  bool nccl = arg == NULL;
  int me = cddp_rank(g), i, k;
  int32_t x = 1 << me, *d = (int32_t *)on_device(&x, sizeof x), sum = 0;
  cddp_work *w = NULL;
  cddp_op op;
  for (op = CDDP_BAND; op <= CDDP_BXOR; op = (cddp_op)(op + 1))
    for (i = 0; i < 2; i++) {
      x = 7 - (1 << me);
      CHECK(cudaMemcpy(d, &x, sizeof x, cudaMemcpyHostToDevice) == cudaSuccess);
      CHECK_IS(cddp_all_reduce(g, d, 1, CDDP_I32, op, i == 1 ? &w : NULL),
               nccl ? CDDP_UNSUPPORTED : CDDP_OK);
      if (nccl) CHECK(strstr(cddp_error(), "host memory") != NULL && w == NULL);
      if (w != NULL) CHECK_OK(cddp_wait(w));
      w = NULL;
      k = 7 - (1 << me);
      CHECK_OK(cddp_all_reduce(g, &k, 1, CDDP_I32, op, NULL));
      CHECK_EQ(k, op == CDDP_BAND || op == CDDP_BXOR ? 0 : 7);
      to_host(g, &x, d, sizeof x);
      CHECK_EQ(x, nccl ? 7 - (1 << me) : k);
    }
  for (i = 0; i < 2; i++) {
    x = me;
    if (me > 0 && i == 1) CHECK_OK(cddp_send(g, &x, 1, CDDP_I32, 0, 3, NULL));
    if (me > 0 && i == 0 && !nccl) CHECK_OK(cddp_send(g, d, 1, CDDP_I32, 0, 3, NULL));
    for (k = 1; me == 0 && k < 3; k++) {
      cddp_result r = cddp_recv(g, i == 0 ? d : &x, 1, CDDP_I32, CDDP_ANY, 3, k == 2 ? &w : NULL);
      CHECK_IS(r, i == 0 && nccl ? CDDP_UNSUPPORTED : CDDP_OK);
      if (k == 2 && r == CDDP_OK) CHECK_OK(cddp_wait(w));
      sum += cddp_source();
    }
  }
  if (me == 0) CHECK_EQ(sum, nccl ? 1 : 6); /* -1 - 1 + 1 + 2: none yet, in the first */
  w = NULL;
  if (me == 0 && !nccl) { /* a receive through the host can be given up */
    CHECK_OK(cddp_recv(g, d, 1, CDDP_I32, 1, 4, &w));
    CHECK_IS(cddp_wait_for(w, 0.02), CDDP_TIMEOUT);
    CHECK_OK(cddp_cancel(w));
  }
  CHECK_OK(cddp_barrier(g));
  cudaFree(d);
  return 0;
}

/* Calls with counts on device memory, then ranks that disagree in one, which fails on all. */
static int with_counts(cddp_group *g, void *arg) {
  enum { MOST = 4000 };
  int n = cddp_world_size(g), me = cddp_rank(g), kind, r;
  int32_t *host = (int32_t *)malloc(8 * MOST * sizeof *host), *send, *recv;
  size_t out[8], in[8], i, k, all, bad;
  cddp_group *sub = NULL;
  cddp_work *w = NULL;
  (void)arg;
  for (kind = 0; kind < 6; kind++) { /* all_to_all_v and all_gather_v, with a handle or not */
    bool gathers = kind % 2 != 0;
    for (r = 0, all = 0; r < n; r++) {
      out[r] = kind < 4 ? ranks_mix((uint64_t)me, gathers ? 9 : (uint64_t)r, 3) % MOST : 0;
      in[r] = kind < 4 ? ranks_mix((uint64_t)r, gathers ? 9 : (uint64_t)me, 3) % MOST : 0;
      for (i = 0; i < out[r]; i++)
        host[gathers ? i : all + i] = (int32_t)(ranks_mix((uint64_t)me, gathers ? 0 : (uint64_t)r,
                                                          i) & 0xffffff);
      all += out[r];
    }
    send = (int32_t *)on_device(host, all * sizeof *host);
    for (r = 0, all = 0; r < n; r++) all += in[r];
    recv = (int32_t *)on_device(NULL, all * sizeof *host);
    if (gathers) CHECK_OK(cddp_all_gather_v(g, send, recv, in, CDDP_I32, kind & 2 ? &w : NULL));
    else CHECK_OK(cddp_all_to_all_v(g, send, out, recv, in, CDDP_I32, kind & 2 ? &w : NULL));
    if (w != NULL) CHECK_OK(cddp_wait(w));
    CHECK((w != NULL) == ((kind & 2) != 0));
    w = NULL;
    to_host(g, host, recv, all * sizeof *host);
    for (r = 0, k = 0, bad = 0; r < n; r++)
      for (i = 0; i < in[r]; i++, k++)
        bad += host[k] !=
               (int32_t)(ranks_mix((uint64_t)r, gathers ? 0 : (uint64_t)me, i) & 0xffffff);
    CHECK_EQ(bad, 0);
    cudaFree(send);
    cudaFree(recv);
  }
  for (r = 0; r < n; r++) in[r] = r == 0 ? 0 : 2; /* host memory, of which rank 0 has none */
  for (i = 0; i < 2; i++) host[i] = me;
  CHECK_OK(cddp_all_gather_v(g, me == 0 ? NULL : host, host + 2, in, CDDP_I32, NULL));
  for (r = 1; r < n; r++) CHECK(host[2 * r] == r && host[2 * r + 1] == r);
  send = (int32_t *)on_device(host, 8 * MOST * sizeof *host);
  recv = (int32_t *)on_device(NULL, 8 * MOST * sizeof *host);
  CHECK_OK(cddp_group_split(g, 0, me, &sub));
  for (r = 0; r < n; r++) out[r] = in[r] = 1000;
  if (me == 0) out[n - 1] = 1001;
  if (n > 1 && sub != NULL) {
    cddp_result result = cddp_all_to_all_v(sub, send, out, recv, in, CDDP_I32, NULL);
    if (result == CDDP_OK) result = cddp_synchronize(sub); /* with NCCL it may be told there */
    CHECK_IS(result, CDDP_MISMATCH);
    CHECK(strstr(cddp_error(), "rank 0 sends 1001 elements to rank") != NULL);
  }
  cddp_destroy(sub);
  check_sum(g, n * (n + 1) / 2);
  cudaFree(send);
  cudaFree(recv);
  free(host);
  return 0;
}

/* A barrier with a handle ends when all ranks have come to it, with a handle or without. */
static int late_barrier(cddp_group *g, void *arg) {
  int me = cddp_rank(g), n = cddp_world_size(g), r;
  float *x = (float *)cddp_alloc(g, 1000 * sizeof *x);
  cudaStream_t s = (cudaStream_t)cddp_stream(g);
  int32_t go = 1;
  bool done = true;
  cddp_work *w = NULL;
  (void)arg;
  check_sum(g, n * (n + 1) / 2);
  fill_on(s, x, 1000, (float)me + 1, false);
  if (me == 0) {
    CHECK_OK(cddp_barrier_async(g, &w));
    CHECK_IS(cddp_wait_for(w, 0.05), CDDP_TIMEOUT);
    CHECK_OK(cddp_test(w, &done));
    CHECK(!done);
    for (r = 1; r < n; r++) CHECK_OK(cddp_send(g, &go, 1, CDDP_I32, r, 5, NULL));
  } else {
    CHECK_OK(cddp_recv(g, &go, 1, CDDP_I32, 0, 5, NULL));
    if (me == 1) CHECK_OK(cddp_barrier_async(g, &w));
    else CHECK_OK(cddp_barrier(g));
  }
  CHECK_OK(cddp_all_reduce(g, x, 1000, CDDP_F32, CDDP_SUM, NULL)); /* may begin before it ends */
  if (w != NULL) CHECK_OK(cddp_wait(w));
  check_fill(g, x, 1000, n * (n + 1) / 2);
  CHECK_OK(cddp_barrier(g));
  cddp_free(g, x);
  return 0;
}

static void gate_run(void *open) {
  while (__atomic_load_n((int *)open, __ATOMIC_ACQUIRE) == 0) ranks_sleep(1e-4);
}

/* The group's thread asks for a barrier's event while this one captures a stream in global mode. */
static int barrier_beside_capture(cddp_group *g, void *arg) {
  static int open; /* what is on the group's stream ends then */
  hostcuda_op gate = {gate_run, NULL, &open};
  double until = test_now() + RANKS_WITHIN(5);
  cudaGraph_t graph = NULL;
  cudaStream_t s;
  uint64_t asked;
  cddp_work *w;
  (void)arg;
  CHECK_OK(cddp_synchronize(g));
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  CHECK(hostcuda_enqueue((cudaStream_t)cddp_stream(g), gate, false) == cudaSuccess);
  CHECK_OK(cddp_barrier_async(g, &w));
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal) == cudaSuccess);
  asked = hostcuda_calls("cudaEventQuery");
  while (hostcuda_calls("cudaEventQuery") < asked + 2 && test_now() < until) ranks_sleep(1e-4);
  CHECK(hostcuda_calls("cudaEventQuery") >= asked + 2);
  CHECK(cudaStreamEndCapture(s, &graph) == cudaSuccess); /* not void */
  cudaGraphDestroy(graph);
  __atomic_store_n(&open, 1, __ATOMIC_RELEASE);
  CHECK_OK(cddp_wait(w));
  cudaStreamDestroy(s);
  return 0;
}

static int host_memory(cddp_group *g, void *arg) {
  int n = cddp_world_size(g), me = cddp_rank(g), i;
  float x[3000], *d = (float *)cddp_alloc(g, sizeof x);
  cddp_work *w;
  (void)arg;
  for (i = 0; i < 3000; i++) x[i] = (float)me;
  CHECK_OK(cddp_all_reduce(g, x, 3000, CDDP_F32, CDDP_SUM, NULL));
  CHECK_EQ(x[2999], n * (n - 1) / 2);
  CHECK_OK(cddp_broadcast(g, x, 3000, CDDP_F32, 0, &w));
  CHECK_OK(cddp_wait(w));
  CHECK_IS(cddp_all_gather(g, x, d, 1, CDDP_F32, NULL), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "both") != NULL);
  check_sum(g, n * (n + 1) / 2);
  cddp_free(g, d);
  return 0;
}

static void test_groups(void) {
  CHECK_OK(run(sub_groups, NULL, 4, NULL));
  CHECK_OK(run(sub_groups, NULL, 3, "cpu"));
  CHECK_OK(run(messages, NULL, 2, NULL));
  CHECK_OK(run(messages, NULL, 3, NULL));
  CHECK_OK(run(messages, NULL, 3, "cpu"));
  CHECK_OK(run(wait_for_late, NULL, 2, NULL));
  CHECK_OK(run(wait_for_late, NULL, 2, "cpu"));
  CHECK_OK(run(with_counts, NULL, 3, NULL));
  CHECK_OK(run(with_counts, NULL, 3, "cpu"));
  CHECK_OK(run(with_counts, NULL, 1, NULL));
  CHECK_OK(run(late_barrier, NULL, 3, NULL));
  CHECK_OK(run(late_barrier, NULL, 3, "cpu"));
  CHECK_OK(run(barrier_beside_capture, NULL, 2, NULL));
  CHECK_OK(run(beyond_nccl, NULL, 3, NULL));
  CHECK_OK(run(beyond_nccl, &comm_from, 3, "cpu"));
  CHECK_OK(run(host_memory, NULL, 2, NULL));
  CHECK_OK(run(host_memory, NULL, 2, "cpu"));
}

static void test_hosts(void) { /* the same between hosts */
  if (!RANKS_TSAN) CHECK_OK(run_on("aab", every_collective, NULL, NULL));
  CHECK_OK(run_on("abba", sub_groups, NULL, NULL));
  CHECK_OK(run_on("aba", messages, NULL, NULL));
  CHECK_OK(run_on("ab", host_memory, NULL, NULL));
  if (RANKS_TSAN) return;
  CHECK_OK(run_on("ab", every_collective, NULL, "cpu"));
  CHECK_OK(run_on("aba", sub_groups, NULL, "cpu"));
  CHECK_OK(run_on("aab", messages, NULL, "cpu"));
  CHECK_OK(run_on("aab", with_counts, NULL, NULL));
  CHECK_OK(run_on("aab", late_barrier, NULL, NULL));
}

/* --- what a step costs, and what it refuses --- */

/* Until rank 0 says that it is through with its calls, for which it needs no other rank. */
static void come_second(void *arg, uint32_t through) {
  double until = test_now() + RANKS_WITHIN(5);
  while (cddp__load32((cddp__atomic_u32 *)arg) < through && test_now() < until) ranks_sleep(0.001);
  CHECK(cddp__load32((cddp__atomic_u32 *)arg) >= through);
}

/* The first all-reduces of a group and of its halves wait for no other rank's host, nor does a
   model's step, from the second on. */
static int unwaiting(cddp_group *g, void *arg) {
  float *x = (float *)cddp_alloc(g, 400000);
  cddp_group *both = NULL;
  cddp_sgd_desc rule;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cddp_param p[2];
  int i;
  CHECK_OK(cddp_group_split(g, 0, 0, &both));
  (void)cddp_barrier(g);
  if (cddp_rank(g) == 1) come_second(arg, 1);
  for (i = 0; i < 4; i++)
    CHECK_OK(cddp_all_reduce(i / 2 ? both : g, x, i % 2 ? 100000 : 10, CDDP_F32, CDDP_SUM, NULL));
  if (cddp_rank(g) == 0) cddp__store32((cddp__atomic_u32 *)arg, 1);
  CHECK_OK(cddp_synchronize(g));
  CHECK_OK(cddp_synchronize(both));
  cddp_destroy(both);
  memset(&rule, 0, sizeof rule);
  rule.lr = 0.1;
  model_of(g, p, 2, 1024);
  CHECK_OK(cddp_ddp_create(&d, g, p, 2, NULL));
  CHECK_OK(cddp_sgd_create(&s, p, 2, &rule));
  for (i = 0; i < 4; i++) {
    if (i == 1) (void)cddp_barrier(g);
    if (i == 1 && cddp_rank(g) == 1) come_second(arg, 2);
    CHECK_OK(cddp_ddp_ready(d, 1));
    CHECK_OK(cddp_ddp_ready(d, 0));
    CHECK_OK(cddp_ddp_step(d, s));
  }
  if (cddp_rank(g) == 0) cddp__store32((cddp__atomic_u32 *)arg, 2);
  CHECK_OK(cddp_synchronize(g));
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  return 0;
}

/* A bucket's operation is issued while later gradients are still to come; a step synchronises
   nothing and allocates nothing. */
static int frugal(cddp_group *g, void *arg) {
  static const char *const never[] = {"cudaDeviceSynchronize", "cudaStreamSynchronize",
                                      "cudaEventSynchronize",  "cudaMalloc",
                                      "cudaEventCreateWithFlags"};
  uint64_t before[5], reduced_before, launched;
  bool alone = cddp_world_size(g) == 1, clips = arg != NULL;
  cddp_sgd_desc rule;
  cddp_ddp_desc desc;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cddp_param p[4];
  int step, i;
  memset(&rule, 0, sizeof rule);
  memset(&desc, 0, sizeof desc);
  desc.bucket_cap_mb = 0.001;
  desc.max_grad_norm = clips ? 0.1 : 0;
  rule.lr = 0.1;
  rule.momentum = 0.9;
  model_of(g, p, 4, 1024);
  CHECK_OK(cddp_ddp_create(&d, g, p, 4, &desc));
  CHECK_OK(cddp_sgd_create(&s, p, 4, &rule));
  for (step = 0; step < 5; step++) {
    for (i = 0; i < 5; i++) before[i] = hostcuda_calls(never[i]);
    reduced_before = hostcuda_calls("ncclAllReduce");
    launched = hostcuda_calls("kernel");
    for (i = 3; i >= 0; i--) {
      if (i == 0 && !alone)
        CHECK(hostcuda_calls("ncclAllReduce") == reduced_before + 3);
      CHECK_OK(cddp_ddp_ready(d, i));
    }
    CHECK_OK(cddp_ddp_step(d, s));
    for (i = 0; step >= 2 && i < 5; i++) CHECK_EQ(hostcuda_calls(never[i]), before[i]);
    if (clips) /* 4 buckets that are divided; squares, sum, factor, and the step, which scales */
      CHECK_EQ(hostcuda_calls("kernel") - launched, alone ? 4 : 8);
    else if (alone || step > 0)
      CHECK_EQ(hostcuda_calls("kernel") - launched, 1); /* it divides, too */
  }
  if (alone) CHECK_EQ(hostcuda_calls("ncclAllReduce") + hostcuda_calls("ncclBroadcast"), 0);
  for (i = 3; i >= 0; i--) CHECK_OK(cddp_ddp_ready(d, i));
  CHECK_OK(cddp_ddp_wait(d));
  for (i = 3; i >= 0; i--) CHECK_OK(cddp_ddp_ready(d, i));
  launched = hostcuda_calls("kernel");
  CHECK_OK(cddp_ddp_wait(d)); /* the buckets have been divided as they were reduced */
  CHECK_EQ(hostcuda_calls("kernel"), launched);
  CHECK_OK(cddp_ddp_clip_grad_norm(d, 1, NULL));
  CHECK_EQ(hostcuda_calls("kernel") - launched, 4); /* squares, sum, factor, scale: for all four */
  CHECK_OK(cddp_synchronize(g));
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  return 0;
}

/* Each call in a thread of its own, whose current device is 0: the rank's GPU becomes it. */
typedef struct stranger {
  cddp_group *g;
  cddp_ddp *d;
  cddp_ddp *sparse;
  cddp_optim *s, *alone;
  cddp_group *both;
  cddp_param p[2];
  char path[64], own_path[80];
  cddp_work *w;
  float *x;
  int call;
} stranger;

static void *strange_call(void *arg) {
  stranger *c = (stranger *)arg;
  cddp_sgd_desc rule, no_ddp;
  int64_t row = 1;
  double norm;
  bool done;
  memset(&rule, 0, sizeof rule);
  rule.momentum = 0.9;
  no_ddp = rule;
  rule.ddp = c->d;
  switch (c->call) {
  case 0: CHECK((c->x = (float *)cddp_alloc(c->g, 4000)) != NULL); break;
  case 1: CHECK_OK(cddp_all_reduce(c->g, c->x, 10, CDDP_F32, CDDP_SUM, &c->w)); break;
  case 2: CHECK_OK(cddp_test(c->w, &done)); break;
  case 3: CHECK_OK(cddp_wait(c->w)); break;
  case 4: CHECK_OK(cddp_synchronize(c->g)); break;
  case 5: CHECK_OK(cddp_barrier(c->g)); break;
  case 6: CHECK_OK(cddp_ddp_create(&c->d, c->g, c->p, 1, NULL)); break;
  case 7: CHECK_OK(cddp_sgd_create(&c->s, c->p, 1, &rule)); break;
  case 8: CHECK_OK(cddp_ddp_ready(c->d, 0)); break;
  case 9: CHECK_OK(cddp_ddp_wait(c->d)); break;
  case 10: CHECK_OK(cddp_ddp_clip_grad_norm(c->d, 1, &norm)); break;
  case 11: CHECK_OK(cddp_optim_step(c->s)); break;
  case 12: CHECK_OK(cddp_optim_zero_grad(c->s)); break;
  case 13: CHECK_OK(cddp_ddp_ready(c->d, 0)); break;
  case 14: CHECK_OK(cddp_ddp_step(c->d, c->s)); break;
  case 15: cddp_optim_destroy(c->s); break;
  case 16: cddp_ddp_destroy(c->d); break;
  case 17: CHECK_OK(cddp_optim_step(c->alone)); break;
  case 18: cddp_optim_destroy(c->alone); break;
  case 19: CHECK_OK(cddp_ddp_add_rows(c->sparse, 0, &row, c->x, 1)); break;
  case 20: CHECK_OK(cddp_ddp_sync_buffers(c->sparse)); break;
  case 21: cddp_ddp_destroy(c->sparse); break;
  case 22: CHECK_OK(cddp_save(c->g, c->path, c->p, 1, NULL)); break;
  case 23: CHECK_OK(cddp_load(c->g, c->path, c->p, 1, NULL)); break;
  case 24: CHECK_OK(cddp_group_split(c->g, 0, 0, &c->both)); break;
  case 25: cddp_destroy(c->both); break;
  case 26: CHECK_OK(cddp_sgd_create(&c->s, c->p + 1, 1, &no_ddp)); break;
  case 27: cddp_optim_destroy(c->s); break;
  case 28: CHECK_OK(cddp_save(NULL, c->own_path, c->p, 1, NULL)); break;
  case 29: CHECK_OK(cddp_load(NULL, c->own_path, c->p, 1, NULL)); break;
  default: cddp_free(c->g, c->x);
  }
  return NULL;
}

static int strangers(cddp_group *g, void *arg) {
  const char *tmp = getenv("TMPDIR");
  size_t rows[1] = {10};
  cddp_sgd_desc rule;
  cddp_ddp_desc desc;
  cddp_param table;
  pthread_t thread;
  stranger c;
  (void)arg;
  memset(&c, 0, sizeof c);
  c.g = g;
  memset(&rule, 0, sizeof rule);
  rule.momentum = 0.9;
  rule.stream = cddp_stream(g);
  model_of(g, c.p, 2, 100);
  c.p[0].name = "p";
  c.p[1].grad = on_device(NULL, 400);
  model_of(g, &table, 1, 100);
  CHECK_OK(cddp_sgd_create(&c.alone, &c.p[1], 1, &rule));
  memset(&desc, 0, sizeof desc);
  desc.sparse_rows = rows;
  CHECK_OK(cddp_ddp_create(&c.sparse, g, &table, 1, &desc));
  snprintf(c.path, sizeof c.path, "%.40s/cddp-strangers-%d", tmp != NULL ? tmp : "/tmp",
           (int)getppid());
  snprintf(c.own_path, sizeof c.own_path, "%s-%d", c.path, cddp_rank(g));
  for (c.call = 0; c.call < 31; c.call++) {
    CHECK_EQ(pthread_create(&thread, NULL, strange_call, &c), 0);
    pthread_join(thread, NULL);
    if (hostcuda_contexts() != 1)
      test_fail(__FILE__, __LINE__, "call %d made a context on GPU 0", c.call);
  }
  (void)unlink(c.path);
  (void)unlink(c.own_path);
  return 0;
}

static _Thread_local int naps, greedy; /* greedy: too early or too long */
static _Thread_local double nap_s;     /* the last one's */
static _Thread_local double entered;   /* when the watched call began; 0: none is watched */

static int nap(const struct timespec *t, struct timespec *left) {
  double waited = entered > 0 ? cddp__now() - entered : 1e9;
  naps++;
  nap_s = (double)t->tv_sec + 1e-9 * (double)t->tv_nsec;
  greedy += waited < 3e-4 || nap_s > waited / 16;
  return nanosleep(t, left);
}

static void late_run(void *seconds) { ranks_sleep(*(double *)seconds); }

/* A wait on the host yields for as long as NCCL works on a call, and then naps for no more than a
   sixteenth of its time so far: in general, while NCCL has a call, and at the end of a stream. */
static int naps_little(cddp_group *g, void *arg) {
  static const double waited[] = {1e-3, 8e-3, 1};
  static double late[] = {5e-3, 1e-3, 2e-4};
  float *x = (float *)cddp_alloc(g, 40);
  cddp__device *p = cddp__device_of(g);
  double start;
  int i;
  (void)arg;
  for (i = 0, naps = 1; i < 1000 && naps > 0; i++) { /* it may be held up between two clocks */
    naps = 0;
    CHECK_OK(cddp__device_poll(p, cddp__now(), "a test"));
  }
  CHECK_EQ(naps, 0);
  for (i = 0; i < 3; i++) {
    start = cddp__now() - waited[i];
    CHECK_OK(cddp__device_poll(p, start, "a test"));
    CHECK_EQ(naps, i + 1);
    CHECK(nap_s > 0 && nap_s <= 1e-3 && 16 * nap_s <= cddp__now() - start);
  }
  for (i = 0, naps = 0; i < 30; i++) {
    hostcuda_op op = {late_run, NULL, &late[i % 3]};
    hostnccl_busy(130); /* as often as a host asks in a tenth of a millisecond or two */
    entered = cddp__now();
    CHECK_OK(cddp_all_reduce(g, x, 10, CDDP_F32, CDDP_SUM, NULL));
    CHECK(hostcuda_enqueue((cudaStream_t)cddp_stream(g), op, false) == cudaSuccess);
    entered = cddp__now();
    CHECK_OK(cddp_synchronize(g));
    entered = 0;
  }
  CHECK(naps > 0);
  CHECK_EQ(greedy, 0);
  return 0;
}

/* A process was stopped for longer than the deadline while its operation ended: its threads look at
   the device before they call that late. */
static int was_stopped(cddp_group *g, void *arg) {
  cddp__device *p = cddp__device_of(g);
  float *x = (float *)cddp_alloc(g, 40);
  int i, stops = 0;
  (void)arg;
  for (i = 0; i < 100; i++) { /* as many on both ranks */
    CHECK_OK(cddp_all_reduce(g, x, 10, CDDP_F32, CDDP_SUM, NULL));
    CHECK(cudaStreamSynchronize((cudaStream_t)cddp_stream(g)) == cudaSuccess);
    pthread_mutex_lock(&p->lock);
    if (stops < 8 && p->issued != p->seen) { /* the poller has not been there yet */
      p->markers[p->seen % CDDP__MARKER_COUNT].since -= 10 * g->timeout_s;
      stops++;
    }
    pthread_mutex_unlock(&p->lock);
    while (cddp__device_busy(p) > 0 && cddp__check_group(g) == CDDP_OK) ranks_sleep(0.001);
    CHECK_OK(cddp__check_group(g));
  }
  CHECK_EQ(stops, 8);
  return 0;
}

/* What else is to take few calls: buffers go in one NCCL group, gradients that cddp has placed are
   cleared by one memset, and handles take their events from those before them. */
static int thrifty(cddp_group *g, void *arg) {
  uint64_t groups, clears, events;
  cddp_sgd_desc rule;
  cddp_ddp_desc desc;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cddp_param p[4], buffers[4];
  cddp_work *w[4];
  int i, k;
  (void)arg;
  memset(&rule, 0, sizeof rule);
  memset(&desc, 0, sizeof desc);
  rule.lr = 0.1;
  model_of(g, p, 4, 1024);
  model_of(g, buffers, 4, 100);
  desc.buffers = buffers;
  desc.buffer_count = 4;
  CHECK_OK(cddp_ddp_create(&d, g, p, 4, &desc));
  rule.ddp = d;
  CHECK_OK(cddp_sgd_create(&s, p, 4, &rule));
  groups = hostcuda_calls("ncclGroupEnd");
  CHECK_OK(cddp_ddp_sync_buffers(d));
  CHECK_EQ(hostcuda_calls("ncclGroupEnd") - groups, 1);
  clears = hostcuda_calls("cudaMemsetAsync");
  CHECK_OK(cddp_optim_zero_grad(s));
  CHECK_EQ(hostcuda_calls("cudaMemsetAsync") - clears, 1);
  for (k = 0, events = 0; k < 5; k++) {
    if (k == 1) events = hostcuda_calls("cudaEventCreateWithFlags");
    for (i = 0; i < 4; i++)
      CHECK_OK(cddp_all_reduce(g, p[i].data, 1024, CDDP_F32, CDDP_SUM, &w[i]));
    for (i = 0; i < 4; i++) CHECK_OK(cddp_wait(w[i]));
  }
  CHECK_EQ(hostcuda_calls("cudaEventCreateWithFlags"), events);
  CHECK_OK(cddp_synchronize(g));
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  return 0;
}

/* A gradient that no rank marked ready is as it was after a wait. */
static int leaves_unused(cddp_group *g, void *arg) {
  cddp_sgd_desc rule;
  cddp_ddp_desc desc;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cddp_param p[2];
  int step;
  (void)arg;
  memset(&rule, 0, sizeof rule);
  memset(&desc, 0, sizeof desc);
  desc.find_unused_parameters = true;
  rule.lr = 0.1;
  model_of(g, p, 2, 1024);
  CHECK_OK(cddp_ddp_create(&d, g, p, 2, &desc));
  rule.ddp = d;
  CHECK_OK(cddp_sgd_create(&s, p, 2, &rule));
  for (step = 0; step < 4; step++) { /* a wait after a step, and after a wait */
    fill_on(NULL, (float *)p[0].grad, 1024, (float)(1 + cddp_rank(g)), false);
    fill_on(NULL, (float *)p[1].grad, 1024, 5, false);
    CHECK_OK(cddp_ddp_ready(d, 0));
    if (step == 0) CHECK_OK(cddp_ddp_ready(d, 1));
    CHECK_OK(step < 2 ? cddp_ddp_step(d, s) : cddp_ddp_wait(d));
    check_fill(g, (float *)p[0].grad, 1024, step < 2 ? 0 : 2);
    check_fill(g, (float *)p[1].grad, 1024, step == 0 ? 0 : step == 1 ? 0 : 5);
  }
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  return 0;
}

static int join_refused(cddp_group *g, void *arg) {
  cddp_param p[2];
  cddp_ddp *d = NULL;
  (void)arg;
  model_of(g, p, 2, 64);
  CHECK_OK(cddp_ddp_create(&d, g, p, 2, NULL));
  CHECK_IS(cddp_ddp_join(d, NULL), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "uneven_inputs") != NULL);
  cddp_ddp_destroy(d);
  return 0;
}

/* A misused model takes its group along with NCCL, whose communicator it uses, and only there. */
static void check_misused(cddp_group *g) {
  CHECK_IS(cddp_synchronize(g),
           cddp__device_of(g)->staged ? CDDP_OK : CDDP_INVALID_ARGUMENT);
}

static int refusals(cddp_group *g, void *arg) {
  const cddp_kernels *kernels = cddp__registered_kernels;
  float host[64];
  cddp_ddp_desc desc;
  cddp_sgd_desc rule;
  cddp_ddp *d = NULL, *other = NULL;
  cddp_optim *s = NULL, *none = NULL;
  cddp_param p[2];
  int i;
  (void)arg;
  memset(&desc, 0, sizeof desc);
  memset(&rule, 0, sizeof rule);
  rule.lr = 0.1;
  model_of(g, p, 2, 64);
  if (cddp_rank(g) == cddp_world_size(g) - 1) p[1].data = host;
  CHECK_IS(cddp_ddp_create(&d, g, p, 2, NULL), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "data of parameter \"#1\" is in host memory") != NULL);
  CHECK_IS(cddp_sgd_create(&s, p, 2, &rule),
           cddp_rank(g) == cddp_world_size(g) - 1 ? CDDP_INVALID_ARGUMENT : CDDP_OK);
  cddp_optim_destroy(s);
  check_sum(g, cddp_world_size(g) * (cddp_world_size(g) + 1) / 2); /* the group lives on */
  model_of(g, p, 2, 64);
  CHECK_OK(cddp_ddp_create(&d, g, p, 2, NULL));
  CHECK_OK(cddp_sgd_create(&s, p, 2, &rule));
  for (i = 0; i < 2; i++) CHECK_OK(cddp_ddp_ready(d, i));
  cddp_register_kernels(NULL);
  desc.max_grad_norm = 1;
  CHECK_IS(cddp_ddp_create(&other, g, p, 2, &desc), CDDP_UNSUPPORTED);
  CHECK(strstr(cddp_error(), "max_grad_norm") != NULL);
  CHECK_IS(cddp_sgd_create(&none, p, 2, &rule), CDDP_UNSUPPORTED);
  CHECK(strstr(cddp_error(), "include cddp_kernels.cuh") != NULL);
  CHECK_IS(cddp_ddp_clip_grad_norm(d, 1, NULL), CDDP_UNSUPPORTED);
  cddp_register_kernels(kernels);
  CHECK_OK(cddp_ddp_step(d, s));
  CHECK_OK(cddp_ddp_ready(d, 0)); /* one is missing */
  CHECK_IS(cddp_ddp_wait(d), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "\"#1\"") != NULL);
  check_misused(g);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  return 0;
}

/* Shards: what is left of training with S of them on n ranks is one hash for each S. */
enum { SHARD_PARAMS = 6, SHARD_STEPS = 4, MOST_SHARDS = 8 };

typedef struct sharding {
  bool cpu, sparse, elastic;
  int victims[8], steps[8]; /* of an elastic model: rank i is killed in that step, if [i], */
  const char *points[8];    /* when it comes to that point; "ready" is one */
  bool random; /* they may not come to it */
  int ranks, joins; /* at the start; those that join, as the victims if there are some */
  int length;       /* steps; 0: SHARD_STEPS */
  double norm;      /* max_grad_norm */
  bool masters;
  const char *backend;
  int shards;
  bool repeats;     /* all steps are the same, on a GPU from the third on launches of one graph */
  uint64_t *hashes; /* [ranks][MOST_SHARDS + 1] */
} sharding;

/* Of a process that may be killed; read by the library's threads. */
static const sharding *elastic_now;
static int elastic_rank;
static cddp__atomic_u32 elastic_step;

/* Whether a rank is in; one that joins may come too late, or where another one has not died. */
static bool made(cddp_result r) {
  const char *text = cddp_error();
  bool late = strstr(text, "has ended") || strstr(text, "is full") || strstr(text, "in the job;");
  if (r != CDDP_OK && late && getenv("CDDP_JOIN") != NULL) return false;
  CHECK_OK(r);
  return r == CDDP_OK;
}

static void at_point(const char *name) {
  const sharding *c = __atomic_load_n(&elastic_now, __ATOMIC_ACQUIRE);
  if (c == NULL || !c->victims[elastic_rank]) return;
  if ((int)cddp__load32(&elastic_step) < c->steps[elastic_rank]) return;
  if (strcmp(name, c->points[elastic_rank]) == 0) raise(SIGKILL);
}

static void shard_backward(const sharding *c, cddp_group *g, cddp_ddp *d, cddp_param *p,
                           uint64_t seed) {
  cudaStream_t s = c->cpu ? (cudaStream_t)-1 : (cudaStream_t)cddp_stream(g);
  float values[6 * 10];
  int64_t rows[6];
  size_t i;
  int k;
  for (k = SHARD_PARAMS - 1; k >= 0; k--) {
    cddp_param bare = p[k];
    bare.data = NULL;
    if (bare.grad != NULL) backward_on(s, &bare, ranks_mix(seed, (uint64_t)k, 1));
    for (i = 0; i < 60; i++) values[i] = (float)ranks_mix(seed, i, 4) * 0x1p-63f - 1;
    for (i = 0; i < 6; i++) rows[i] = (int64_t)(ranks_mix(seed, i, 5) % 7);
    if (c->sparse && k == 1) CHECK_OK(cddp_ddp_add_rows(d, 1, rows, values, 1 + seed % 6));
    CHECK_OK(cddp_ddp_ready(d, k));
  }
}

static uint64_t hash_shards(const sharding *c, cddp_group *g, int count) {
  static const size_t counts[SHARD_PARAMS] = {3001, 70, 1, 700, 900, 0};
  static const cddp_dtype dtypes[SHARD_PARAMS] = {CDDP_F32, CDDP_F32, CDDP_F64,
                                                  CDDP_F16, CDDP_BF16, CDDP_F32};
  size_t rows[SHARD_PARAMS] = {0, 7, 0, 0, 0, 0}, i;
  uint64_t hash = 1;
  double host[3001];
  plan memory;
  cddp_param p[SHARD_PARAMS];
  cddp_ddp_desc desc;
  cddp_sgd_desc rule;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cudaStream_t stream = NULL;
  cudaGraph_t graph = NULL;
  cudaGraphExec_t exec = NULL;
  int step, k, shard = -1, steps = c->length > 0 ? c->length : SHARD_STEPS;
  memset(&memory, 0, sizeof memory);
  memset(&desc, 0, sizeof desc);
  memset(&rule, 0, sizeof rule);
  memset(p, 0, sizeof p);
  memory.cpu = c->cpu;
  for (k = 0; k < SHARD_PARAMS; k++) {
    p[k].count = counts[k];
    p[k].dtype = dtypes[k];
    p[k].data = plan_memory(&memory, counts[k] * cddp_dtype_size(dtypes[k]));
    if (k == 3) p[k].grad = plan_memory(&memory, counts[k] * cddp_dtype_size(dtypes[k]));
  }
  if (!c->cpu) {
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    if (count % 2 == 0) cddp_set_stream(g, stream);
  }
  desc.shards = count;
  desc.elastic = c->elastic;
  desc.max_grad_norm = c->norm;
  if (c->sparse) desc.sparse_rows = rows;
  rule.lr = 0.01;
  rule.momentum = 0.9;
  rule.stream = stream;
  rule.master_weights = c->masters;
  if (!made(cddp_ddp_create(&d, g, p, SHARD_PARAMS, &desc))) return 0;
  rule.ddp = d;
  CHECK_OK(cddp_sgd_create(&s, p, SHARD_PARAMS, &rule));
  if (!c->cpu && count % 2 != 0) { /* as late as may be */
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    cddp_set_stream(g, stream);
  }
  for (step = (int)cddp_ddp_steps(d); step < steps && exec == NULL; step++) {
    bool captures = c->repeats && !c->cpu && step == 2;
    CHECK_EQ(cddp_ddp_steps(d), step);
    cddp__store32(&elastic_step, (uint32_t)step);
    if (c->joins > 0) ranks_sleep(2e-3);
    if (captures)
      CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    while (cddp_ddp_next_shard(d, &shard))
      shard_backward(c, g, d, p, (uint64_t)((c->repeats ? 0 : 100 * step) + shard));
    if (c->repeats || step % 2 == 0) {
      CHECK_OK(cddp_ddp_step(d, s));
      if (!captures) continue;
      CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
      CHECK(graph != NULL && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
      for (; step < SHARD_STEPS; step++) CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess);
      CHECK_OK(cddp_synchronize(g));
    } else {
      CHECK_OK(cddp_ddp_wait(d));
      CHECK_OK(cddp_optim_step(s));
      CHECK_OK(cddp_optim_zero_grad(s));
    }
  }
  for (k = 0; k < SHARD_PARAMS; k++) {
    size_t bytes = counts[k] * cddp_dtype_size(dtypes[k]);
    if (c->cpu) memcpy(host, p[k].data, bytes);
    else if (c->elastic) /* g has lost ranks */
      CHECK(cudaStreamSynchronize(stream) == cudaSuccess &&
            cudaMemcpy(host, p[k].data, bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
    else if (bytes > 0) to_host(g, host, p[k].data, bytes);
    for (i = 0; i < bytes; i++) hash = ranks_mix(hash, ((unsigned char *)host)[i], i);
  }
  if (exec != NULL) cudaGraphExecDestroy(exec);
  if (graph != NULL) cudaGraphDestroy(graph);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  cddp_set_stream(g, NULL);
  if (stream != NULL) cudaStreamDestroy(stream);
  for (k = 0; k < SHARD_PARAMS; k++) plan_release(&memory, p[k].data);
  plan_release(&memory, p[3].grad);
  return hash;
}

static int train_shards(cddp_group *g, void *arg) {
  const sharding *c = (const sharding *)arg;
  int count;
  for (count = cddp_world_size(g); count <= MOST_SHARDS; count++)
    c->hashes[cddp_rank(g) * (MOST_SHARDS + 1) + count] = hash_shards(c, g, count);
  return 0;
}

static void check_shards(const sharding *want, int n, const char *hosts, const char *backend) {
  size_t bytes = (size_t)n * (MOST_SHARDS + 1) * sizeof(uint64_t);
  sharding c = *want;
  int rank, count;
  c.cpu = false;
  c.hashes = (uint64_t *)ranks_shared(bytes);
  CHECK_OK(hosts != NULL ? run_on(hosts, train_shards, &c, backend)
                         : run(train_shards, &c, n, backend));
  for (rank = 0; rank < n; rank++)
    for (count = n; count <= MOST_SHARDS; count++)
      if (c.hashes[rank * (MOST_SHARDS + 1) + count] != want->hashes[count])
        test_fail(__FILE__, __LINE__, "%d shards: rank %d of %d on %s has other bits", count, rank,
                  n, backend != NULL ? backend : "nccl");
  munmap(c.hashes, bytes);
}

/* The rank that a process joins as: a victim's, or a further one. */
static int elastic_as(const sharding *c, int process) {
  int i, k = process - c->ranks;
  for (i = 0; process >= c->ranks && i < c->ranks; i++)
    if (c->victims[i] && k-- == 0) return i;
  return process;
}

static int elastic_life(int process, void *arg) {
  const sharding *c = (const sharding *)arg;
  int rank = elastic_as(c, process);
  cddp_group_desc d;
  cddp_group *g;
  bool joins = process >= c->ranks;
  memset(&d, 0, sizeof d);
  ranks_environment(rank, c->ranks, atoi(getenv("MASTER_PORT")));
  place(rank);
  d.device = "cuda";
  d.backend = c->backend;
  d.timeout_s = RANKS_WITHIN(20);
  if (joins) {
    setenv("CDDP_JOIN", "1", 1);
    ranks_sleep(0.03 + 0.01 * (double)(c->shards % 4)); /* a dead one cannot be replaced before */
  }
  elastic_rank = process;
  __atomic_store_n(&elastic_now, c, __ATOMIC_RELEASE);
  if (!made(cddp_init(&g, &d))) return 0;
  c->hashes[process] = hash_shards(c, g, c->shards);
  __atomic_store_n(&elastic_now, NULL, __ATOMIC_RELEASE);
  cddp_destroy(g);
  return 0;
}

static int elastic_joined; /* processes that joined, in all checks */

/* Those that live have the weights of an undisturbed run. */
static void check_elastic(sharding *c, uint64_t want, int n, const char *hosts) {
  int status[8], i;
  bool victim;
  c->elastic = true;
  c->ranks = n;
  memset(c->hashes, 0, 8 * sizeof *c->hashes);
  if (hosts != NULL) setenv("TEST_HOSTS", hosts, 1);
  ranks_script(elastic_life, c, n + c->joins, RANKS_WITHIN(60), status);
  unsetenv("TEST_HOSTS");
  unsetenv("CDDP_HOST_ID");
  for (i = 0; i < n + c->joins; i++) {
    test_count();
    victim = c->victims[i] != 0;
    if (victim && WIFSIGNALED(status[i]) && status[i] != -1) continue;
    if (i >= n && status[i] == 0 && c->hashes[i] == 0) continue; /* it was not let in */
    elastic_joined += i >= n;
    if (status[i] != 0 || (victim && !c->random) || (want != 0 && c->hashes[i] != want))
      test_fail(__FILE__, __LINE__, "%d shards, %d ranks on %s: rank %d%s ended with %x%s",
                c->shards, n, c->backend != NULL ? c->backend : "nccl", elastic_as(c, i),
                i >= n ? " (joined)" : "", (unsigned)status[i],
                victim ? ", and should have died" : " or has other bits");
  }
}

static const char *const elastic_points[] = {
    "ready", "elastic shard end", "elastic met", "elastic exchanged", "elastic reduced",
    "elastic update", "elastic updated", "elastic rows", "elastic rows gathered",
    "elastic grouped", "elastic passed", "elastic table"};
#define ELASTIC_POINTS (sizeof elastic_points / sizeof *elastic_points)

static void test_elastic(void) {
  sharding want, c;
  int i, n;
  memset(&want, 0, sizeof want);
  memset(&c, 0, sizeof c);
  want.hashes = (uint64_t *)ranks_shared((MOST_SHARDS + 1) * sizeof *want.hashes);
  c.hashes = (uint64_t *)ranks_shared(8 * sizeof *c.hashes);
  want.cpu = want.sparse = c.sparse = true;
  CHECK_OK(ranks_run(train_shards, &want, 1, false));
  for (n = 1; n <= 3; n++) {
    c.shards = MOST_SHARDS - n;
    check_elastic(&c, want.hashes[c.shards], n, NULL);
  }
  for (i = 0; i < 10; i++) {
    memset(c.victims, 0, sizeof c.victims);
    n = i == 9 ? 3 : 2 + i % 3;
    c.shards = MOST_SHARDS - i % 2;
    c.backend = i % 4 == 3 ? "cpu" : NULL;
    c.victims[i % n] = 1;
    c.steps[i % n] = 1;
    c.points[i % n] = elastic_points[i];
    if (i == 9) { /* another one, while they meet again */
      c.victims[2] = c.steps[2] = 1;
      c.points[2] = "ready";
    }
    check_elastic(&c, want.hashes[c.shards], n, i % 4 == 2 ? "aabb" : NULL);
  }
  munmap(c.hashes, 8 * sizeof *c.hashes);
  munmap(want.hashes, (MOST_SHARDS + 1) * sizeof *want.hashes);
}

/* Random ranks die, and processes join; with norms and masters what one rank alone comes to is what
   all must have. */
static void test_elastic_joins(void) {
  int i, k, seeds = getenv("SEEDS") != NULL ? atoi(getenv("SEEDS")) : 4;
  uint64_t alone;
  sharding c;
  memset(&c, 0, sizeof c);
  c.hashes = (uint64_t *)ranks_shared(8 * sizeof *c.hashes);
  c.random = true;
  for (i = 0; i < seeds; i++) {
    uint64_t seed = (uint64_t)(i + (RANKS_TSAN ? 8 : RANKS_SLOW ? 4 : 0));
#define ELASTIC_DRAW(what, below) ((int)(ranks_mix(seed, what, 51) % (uint64_t)(below)))
    int n = 1 + ELASTIC_DRAW(1, 4);
    c.shards = n + ELASTIC_DRAW(2, MOST_SHARDS + 1 - n);
    c.backend = ELASTIC_DRAW(3, 4) == 0 ? "cpu" : NULL;
    c.norm = ELASTIC_DRAW(8, 2) ? 2 : 0;
    c.masters = ELASTIC_DRAW(9, 2);
    c.sparse = ELASTIC_DRAW(12, 2);
    c.length = ELASTIC_DRAW(10, 3) ? 60 : SHARD_STEPS;
    c.joins = 0;
    memset(c.victims, 0, sizeof c.victims);
    check_elastic(&c, 0, 1, NULL);
    alone = c.hashes[0];
    c.joins = ELASTIC_DRAW(11, 4);
    for (k = 0; k < n + c.joins; k++) { /* one lives */
      c.victims[k] = k != n - 1 && ranks_mix(seed, 4, (uint64_t)k) % 2 == 0;
      c.steps[k] = (int)(ranks_mix(seed, 5, (uint64_t)k) % SHARD_STEPS);
      c.points[k] = elastic_points[ranks_mix(seed, 6, (uint64_t)k) % ELASTIC_POINTS];
    }
    check_elastic(&c, alone, n, ELASTIC_DRAW(7, 3) == 0 ? "abab" : NULL);
#undef ELASTIC_DRAW
  }
  fprintf(stderr, "  %d seeds: %d processes joined\n", seeds, elastic_joined);
  CHECK(elastic_joined > 0);
  munmap(c.hashes, 8 * sizeof *c.hashes);
}

/* What shards need, and what a step with them needs. */
static int shards_refused(cddp_group *g, void *arg) {
  const cddp_kernels *kernels = cddp__registered_kernels;
  int rank = cddp_rank(g), shard = -1;
  cddp_ddp_desc desc;
  cddp_sgd_desc rule;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cddp_param p[2];
  (void)arg;
  memset(&desc, 0, sizeof desc);
  memset(&rule, 0, sizeof rule);
  rule.lr = 0.1;
  model_of(g, p, 2, 64);
  desc.shards = cddp_world_size(g) + 1;
  if (rank == 0) cddp_register_kernels(NULL); /* one rank has none */
  CHECK_IS(cddp_ddp_create(&d, g, p, 2, &desc), CDDP_UNSUPPORTED);
  CHECK(strstr(cddp_error(), "include cddp_kernels.cuh") != NULL);
  cddp_register_kernels(kernels);
  desc.shards--;
  CHECK_OK(cddp_ddp_create(&d, g, p, 2, &desc));
  CHECK_OK(cddp_sgd_create(&s, p, 2, &rule));
  CHECK(cddp_ddp_next_shard(d, &shard));
  CHECK_EQ(shard, rank);
  CHECK_OK(cddp_ddp_ready(d, 0));
  CHECK_OK(cddp_ddp_ready(d, 1));
  CHECK(!cddp_ddp_next_shard(d, &shard));
  CHECK_OK(cddp_ddp_step(d, s));
  CHECK_OK(cddp_barrier(g)); /* with NCCL ranks do not wait for each other in a step */
  CHECK_IS(cddp_ddp_step(d, s), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "shards of this step") != NULL);
  check_misused(g);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  return 0;
}

static void test_shards(void) {
  sharding want;
  int n, count;
  memset(&want, 0, sizeof want);
  want.hashes = (uint64_t *)ranks_shared((MOST_SHARDS + 1) * sizeof *want.hashes);
  for (n = 0; n < 3; n++) {
    want.sparse = n == 1;
    want.repeats = n == 2;
    want.cpu = true;
    CHECK_OK(ranks_run(train_shards, &want, 1, false));
    for (count = 2; count <= MOST_SHARDS; count++)
      CHECK(want.hashes[count] != want.hashes[count - 1]);
    if (n == 2) check_shards(&want, 2, NULL, NULL);
    if (n == 2) break;
    check_shards(&want, 2, NULL, "cpu");
    if (n == 0 || !RANKS_SLOW) check_shards(&want, 3, NULL, NULL);
    if (n == 1) check_shards(&want, 3, "aba", NULL);
    if (n == 1) continue;
    check_shards(&want, 1, NULL, NULL);
    check_shards(&want, 2, NULL, NULL);
    check_shards(&want, 4, NULL, NULL);
    check_shards(&want, 1, NULL, "cpu");
    check_shards(&want, 3, NULL, "cpu");
  }
  CHECK_OK(run(shards_refused, NULL, 2, NULL));
  CHECK_OK(run(shards_refused, NULL, 2, "cpu"));
}

/* More barriers of device threads than the thread sanitizer has room for in one host thread, had
   the double's fibers not returned from what they called. */
static int many_blocks(cddp_group *g, void *arg) {
  enum { COUNT = 1200000 };
  float *grad = (float *)cddp_alloc(g, COUNT * sizeof *grad);
  float *ones = (float *)malloc(COUNT * sizeof *ones);
  const cddp_kernels *kernels = cddp__registered_kernels;
  double *scratch = (double *)cddp_alloc(g, kernels->scratch_bytes), sum;
  cddp_segment s;
  size_t i;
  (void)arg;
  memset(&s, 0, sizeof s);
  for (i = 0; i < COUNT; i++) ones[i] = 1;
  CHECK(cudaMemcpy(grad, ones, COUNT * sizeof *ones, cudaMemcpyHostToDevice) == cudaSuccess);
  s.grad = grad;
  s.count = COUNT;
  CHECK_EQ(kernels->squares(&s, 1, CDDP_F32, scratch, false, cddp_stream(g)), 0);
  CHECK_OK(cddp_synchronize(g));
  CHECK(cudaMemcpy(&sum, scratch, sizeof sum, cudaMemcpyDeviceToHost) == cudaSuccess);
  CHECK_EQ((long long)sum, COUNT);
  free(ones);
  return 0;
}

static void test_steps(void) {
  CHECK_OK(run(many_blocks, NULL, 1, NULL));
  CHECK_OK(run(unwaiting, ranks_shared(sizeof(cddp__atomic_u32)), 2, NULL));
  CHECK_OK(run(frugal, NULL, 1, NULL));
  CHECK_OK(run(frugal, NULL, 2, NULL));
  CHECK_OK(run(frugal, (void *)1, 1, NULL)); /* it clips, too */
  CHECK_OK(run(frugal, (void *)1, 2, NULL));
  CHECK_OK(run(thrifty, NULL, 2, NULL));
  CHECK_OK(run(strangers, NULL, 2, NULL));
  comm_from = 1;
  CHECK_OK(run(naps_little, NULL, 1, NULL));
  comm_from = 2;
  CHECK_OK(run(was_stopped, NULL, 2, NULL));
  CHECK_OK(run(leaves_unused, NULL, 3, NULL));
  CHECK_OK(run(join_refused, NULL, 2, NULL));
  CHECK_OK(run(refusals, NULL, 2, NULL));
  CHECK_OK(run(refusals, NULL, 2, "cpu"));
}

/* --- ranks as threads of one process, a GPU each --- */

static int refused_devices(cddp_group *g, void *arg) {
  (void)arg;
  CHECK_IS(cddp_set_device(g, "cuda", NULL), CDDP_INVALID_ARGUMENT); /* it has one */
  return 0;
}

static int refuses_devices(cddp_group *g, void *arg) {
  (void)arg;
  CHECK_IS(cddp_set_device(g, "cpu", NULL), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_set_device(g, "cuda", "gloo"), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_set_device(g, "cuda:1", NULL), CDDP_INVALID_ARGUMENT); /* for both */
  CHECK(strstr(cddp_error(), "both have cuda:1") != NULL);
  CHECK_OK(cddp_barrier(g));
  return 0;
}

static int one_gives_up(cddp_group *g, void *arg) {
  float *x = (float *)cddp_alloc(g, 4000);
  cddp_result r;
  (void)arg;
  if (cddp_rank(g) == 1) return 1;
  r = cddp_all_reduce(g, x, 1000, CDDP_F32, CDDP_SUM, NULL);
  (void)cudaStreamSynchronize((cudaStream_t)cddp_stream(g));
  if (r == CDDP_OK) r = cddp_synchronize(g);
  CHECK_IS(r, CDDP_PEER_LOST);
  CHECK(strstr(cddp_error(), "rank 1 (a thread of pid ") != NULL);
  return 0;
}

/* An abort that is not the process's last ends nothing. Still no kernel of rank 0's call, to which
   NCCL comes late, touches what rank 0 frees when it has heard of the failure. */
static int one_frees_at_once(cddp_group *g, void *arg) {
  float *x = (float *)cddp_alloc(g, 4000);
  uint64_t calls;
  cddp_result r;
  (void)arg;
  CHECK_OK(cddp_all_reduce(g, x, 10, CDDP_F32, CDDP_SUM, NULL));
  CHECK_OK(cddp_barrier(g));
  calls = hostcuda_calls("ncclGroupEnd");
  CHECK_OK(cddp_barrier(g));
  if (cddp_rank(g) == 0) hostnccl_late();
  while (cddp_rank(g) != 0 && hostcuda_calls("ncclGroupEnd") == calls) ranks_sleep(0.01);
  r = cddp_all_reduce(g, x, cddp_rank(g) == 0 ? 10 : 11, CDDP_F32, CDDP_SUM, NULL);
  cddp_free(g, x);
  if (r == CDDP_OK) r = cddp_synchronize(g);
  CHECK_IS(r, CDDP_MISMATCH);
  return 0;
}

/* A thread fails while its model lives: its group is destroyed, the model later. */
static cddp_ddp *left_models[2];
static cddp_param left_params[2][2]; /* a model's params stay in place as long as the model */

static int one_leaves_a_model(cddp_group *g, void *arg) {
  cddp_param own[2], *p = cddp_rank(g) == 1 ? left_params[arg != NULL] : own;
  cddp_ddp *d = NULL;
  cddp_result r = CDDP_OK;
  cddp_ddp_desc desc;
  memset(&desc, 0, sizeof desc);
  desc.comm_hook = (cddp_comm_hook)(uintptr_t)arg;
  model_of(g, p, 2, 1000);
  CHECK_OK(cddp_ddp_create(&d, g, p, 2, &desc));
  if (cddp_rank(g) == 1) {
    left_models[arg != NULL] = d;
    return 1;
  }
  while (!cddp__rank_gone(g, 1)) ranks_sleep(0.001);
  ranks_sleep(0.05); /* watchers look meanwhile */
  r = cddp_ddp_ready(d, 1);
  if (r == CDDP_OK) r = cddp_ddp_ready(d, 0);
  if (r == CDDP_OK) r = cddp_ddp_wait(d);
  if (r == CDDP_OK) r = cddp_synchronize(g);
  CHECK_IS(r, CDDP_PEER_LOST);
  cddp_ddp_destroy(d);
  return 0;
}

/* A group destroyed before its model, whose calls then fail, and which can be destroyed. */
typedef struct early {
  const char *backend;
  cddp_comm_hook hook;
  bool elastic, steps, pending; /* pending: buckets are under way */
} early;

static int destroys_group_first(int rank, void *arg) {
  const early *e = (const early *)arg;
  cddp_group_desc desc;
  cddp_ddp_desc model;
  cddp_group *g = NULL;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cddp_sgd_desc rule;
  cddp_param p[2];
  double norm;
  int i, shard;
  test_failures = 0;
  memset(&desc, 0, sizeof desc);
  memset(&model, 0, sizeof model);
  memset(&rule, 0, sizeof rule);
  desc.device = "cuda";
  desc.backend = e->backend;
  model.comm_hook = e->hook;
  model.elastic = e->elastic;
  model.shards = e->elastic ? 2 : 0;
  rule.lr = 0.1;
  rule.momentum = 0.9;
  CHECK_OK(cddp_init(&g, &desc));
  model_of(g, p, 2, 1000);
  for (i = 0; i < 2; i++) p[i].data = on_device(NULL, 4000); /* not the group's */
  CHECK_OK(cddp_ddp_create(&d, g, p, 2, &model));
  CHECK_OK(cddp_sgd_create(&s, p, 2, &rule));
  for (i = 0; i < 3 && e->steps; i++) {
    if (e->elastic) CHECK(cddp_ddp_next_shard(d, &shard));
    CHECK_OK(cddp_ddp_ready(d, 1));
    CHECK_OK(cddp_ddp_ready(d, 0));
    while (e->elastic && cddp_ddp_next_shard(d, &shard)) {
      CHECK_OK(cddp_ddp_ready(d, 1));
      CHECK_OK(cddp_ddp_ready(d, 0));
    }
    CHECK_OK(cddp_ddp_step(d, s));
  }
  if (e->pending) CHECK_OK(cddp_ddp_ready(d, 1));
  if (e->pending) CHECK_OK(cddp_ddp_ready(d, 0));
  CHECK_OK(cddp_barrier(g));
  cddp_destroy(g);
  ranks_sleep(rank == 0 ? 0.05 : 0); /* watchers look meanwhile */
  if (!e->pending) CHECK_IS(cddp_ddp_ready(d, 1), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "the group of the cddp_ddp was destroyed") != NULL || e->pending);
  CHECK_IS(cddp_ddp_clip_grad_norm(d, 1, &norm), CDDP_INVALID_ARGUMENT);
  CHECK(cddp_ddp_sync_buffers(d) != CDDP_OK);
  CHECK(cddp_ddp_step(d, s) != CDDP_OK);
  CHECK(cddp_ddp_wait(d) != CDDP_OK);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  for (i = 0; i < 2; i++) cudaFree(p[i].data);
  CHECK_EQ(hostnccl_communicators(), 0);
  return test_failures != 0;
}

/* In a process of its own: CUDA does not survive a fork. arg: where the weights go. */
static int threads_of_a_process(int rank, void *arg) {
  plan p;
  int i;
  (void)rank;
  memset(&p, 0, sizeof p);
  p.steps = 4;
  p.cap_mb = 0.02;
  p.steps_a_mode = 1;
  p.out = (float *)arg;
  CHECK_OK(run_threads(train, &p, 4, NULL));
  CHECK_OK(run_threads(every_collective, NULL, 2, NULL));
  if (RANKS_TSAN) return test_failures != 0;
  CHECK_OK(run_threads(sub_groups, NULL, 4, NULL));
  CHECK_OK(run_threads(messages, NULL, 2, "cpu"));
  CHECK_OK(run_threads(refused_devices, NULL, 2, NULL));
  CHECK_OK(cddp_run_threads(refuses_devices, NULL, 2));
  CHECK_IS(run_threads(one_gives_up, NULL, 3, NULL), CDDP_PEER_LOST);
  CHECK_OK(run_threads(one_frees_at_once, NULL, 3, NULL));
  CHECK_IS(run_threads(one_leaves_a_model, NULL, 2, NULL), CDDP_PEER_LOST);
  CHECK_IS(run_threads(one_leaves_a_model, (void *)(uintptr_t)cddp_bf16_compress_hook, 2, NULL),
           CDDP_PEER_LOST);
  for (i = 0; i < 2; i++) cddp_ddp_destroy(left_models[i]);
  CHECK_EQ(hostnccl_communicators(), 0);
  return test_failures != 0;
}

/* A process whose last group is gone ends with NCCL out of its way, which waits for rank 1 to
   leave, too; not if that takes longer than left_s: then it ends in the middle of that. */
typedef struct leaving {
  double late, left; /* seconds */
} leaving;

static int leave(int rank, void *arg) {
  const leaving *l = (const leaving *)arg;
  cddp_group_desc d;
  cddp_group *g = NULL;
  double t;
  test_failures = 0;
  left_s = l->left;
  memset(&d, 0, sizeof d);
  d.device = "cuda";
  CHECK_OK(cddp_init(&g, &d));
  check_sum(g, 3);
  if (rank == 1) ranks_sleep(l->late);
  t = test_now();
  cddp_destroy(g);
  t = test_now() - t;
  CHECK_EQ(hostnccl_communicators(), rank == 0 && l->late > l->left ? 1 : 0);
  if (rank == 0) CHECK(t > 0.8 * (l->late < l->left ? l->late : l->left));
  if (rank == 0) CHECK(t < l->left + RANKS_WITHIN(1));
  return test_failures != 0;
}

static void test_leaving(void) {
  leaving l;
  l.late = 0.3;
  l.left = 20;
  CHECK_OK(cddp_spawn(leave, &l, 2));
  l.late = 1;
  l.left = 0.1;
  CHECK_OK(cddp_spawn(leave, &l, 2));
}

/* Rank 1 has left in good order while rank 0 waited for rank 2. That it waits for that rank again,
   later than left_s after the first time, is no loss either. turn: 1 and 3: rank 2 may send. */
static void go_to(int *turn, int next) { __atomic_store_n(turn, next, __ATOMIC_SEQ_CST); }

static void wait_until(const int *turn, int is) {
  double until = test_now() + RANKS_WITHIN(10);
  while (__atomic_load_n(turn, __ATOMIC_SEQ_CST) < is && test_now() < until) ranks_sleep(0.001);
}

static int leave_first(int rank, void *arg) {
  int *turn = (int *)arg, i;
  cddp_group_desc d;
  cddp_group *g = NULL;
  void *x;
  test_failures = 0;
  left_s = RANKS_WITHIN(RANKS_SLOW ? 0.2 : 0.5);
  memset(&d, 0, sizeof d);
  d.device = "cuda";
  CHECK_OK(cddp_init(&g, &d));
  if (g == NULL) return 1;
  check_sum(g, 6);
  CHECK_OK(cddp_barrier(g));
  if (rank == 1) {
    left_s = 0;
    cddp_destroy(g);
    wait_until(turn, 4); /* its process goes on */
    return test_failures != 0;
  }
  x = cddp_alloc(g, 4);
  while (!cddp__rank_gone(g, 1)) ranks_sleep(0.001);
  for (i = 0; i < 2; i++) {
    if (rank == 0) go_to(turn, 2 * i + 1);
    if (rank == 2) wait_until(turn, 2 * i + 1);
    if (rank == 2) ranks_sleep(0.1);
    CHECK_OK(rank == 0 ? cddp_recv(g, x, 1, CDDP_F32, 2, 0, NULL)
                       : cddp_send(g, x, 1, CDDP_F32, 0, 0, NULL));
    CHECK_OK(cddp_synchronize(g));
    ranks_sleep(i == 0 ? left_s : 0);
  }
  cddp_free(g, x);
  if (rank == 0) go_to(turn, 4);
  cddp_destroy(g);
  return test_failures != 0;
}

static void test_left_first(void) {
  int *turn = (int *)ranks_shared(sizeof *turn);
  CHECK_OK(cddp_spawn(leave_first, turn, 3));
  munmap(turn, sizeof *turn);
}

/* The weights are those of processes, bit for bit. */
static void test_destroyed_first(void) {
  early e;
  int k;
  for (k = 0; k < 9; k++) { /* with NCCL, with a hook, through the host; new, trained, in a step */
    memset(&e, 0, sizeof e);
    e.backend = k / 3 == 2 ? "cpu" : NULL;
    e.hook = k / 3 == 1 ? cddp_bf16_compress_hook : NULL;
    e.steps = k % 3 > 0;
    e.pending = k % 3 == 2;
    CHECK_OK(cddp_spawn(destroys_group_first, &e, 2));
  }
  for (k = 0; k < 4; k++) {
    memset(&e, 0, sizeof e);
    e.elastic = true;
    e.backend = k / 2 != 0 ? "cpu" : NULL;
    e.steps = k % 2 != 0;
    CHECK_OK(cddp_spawn(destroys_group_first, &e, 2));
  }
}

static void test_threads(void) {
  size_t bytes = 4 * plan_floats() * sizeof(float);
  float *want = (float *)ranks_shared(bytes), *got = (float *)ranks_shared(bytes);
  pid_t pid;
  int status = -1;
  plan p;
  memset(&p, 0, sizeof p);
  p.steps = 4;
  p.cap_mb = 0.02;
  p.steps_a_mode = 1;
  p.out = want;
  CHECK_OK(run(train, &p, 4, NULL));
  pid = ranks_fork(threads_of_a_process, 0, got);
  ranks_join(&pid, 1, RANKS_WITHIN(20), &status);
  CHECK_EQ(status, 0);
  CHECK(memcmp(got, want, bytes) == 0);
  munmap(got, bytes);
  munmap(want, bytes);
}

/* CUDA_LAUNCH_BLOCKING=1: NCCL's thread waits for the other ranks, so a call's host does. */
static void test_blocking_launches(void) {
  plan p;
  memset(&p, 0, sizeof p);
  p.steps = 4;
  p.cap_mb = 0.02;
  p.clip = 0.5;
  setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
  check_plan(&p, 2, NULL);
  p.graph = true;
  check_plan(&p, 2, NULL);
  CHECK_OK(run(messages, NULL, 3, NULL));
  if (!RANKS_TSAN) CHECK_OK(run(every_collective, NULL, 2, NULL));
  unsetenv("CUDA_LAUNCH_BLOCKING");
}

/* --- failures --- */

/* What happened to one rank; shared. */
typedef struct fate {
  cddp_result result;
  double when; /* it learned of it */
  char text[512];
} fate;

/* How ranks are made to fail. */
typedef struct ordeal {
  int (*fn)(cddp_group *g, struct ordeal *o, fate *f);
  const char *device, *backend, *environment, *value; /* value: of the variable, set in all ranks */
  int victim;                                         /* the rank that does it */
  double timeout_s, began;
  double fuse; /* seconds after which the victim dies, wherever it is */
  bool ends;   /* NCCL has let go of all communicators at the end */
  bool late;   /* an operation is to be late: see shorten */
  fate fates[8];
} ordeal;

static int ordeal_rank(int rank, void *p) {
  ordeal *o = (ordeal *)p;
  fate *f = &o->fates[rank];
  cddp_group_desc d;
  cddp_group *g = NULL;
  memset(&d, 0, sizeof d);
  place(rank);
  d.device = o->device != NULL ? o->device : "cuda";
  d.backend = o->backend;
  d.timeout_s = o->timeout_s;
  if (o->environment != NULL) setenv(o->environment, o->value, 1);
  if (o->fuse > 0 && rank == o->victim) {
    struct itimerval t;
    memset(&t, 0, sizeof t);
    t.it_value.tv_usec = (suseconds_t)(o->fuse * 1e6);
    o->began = test_now() + o->fuse;
    setitimer(ITIMER_REAL, &t, NULL); /* SIGALRM */
  }
  f->result = cddp_init(&g, &d);
  if (f->result == CDDP_OK && o->fn != NULL && o->fn(g, o, f) != 0) return 1;
  f->when = test_now();
  snprintf(f->text, sizeof f->text, "%s", f->result != CDDP_OK ? cddp_error() : "");
  cddp_destroy(g);
  return (o->ends && hostnccl_communicators() != 0) || hostcuda_contexts() > 1;
}

/* Several at a time, of n ranks each: most of the time they wait. */
static void endure_all(ordeal *o, int count, int n) {
  pid_t pid[8][8];
  int status[8], k, i;
  for (k = 0; k < count; k++) {
    if (o[k].timeout_s == 0) o[k].timeout_s = 60;
    ranks_begin(ordeal_rank, &o[k], n, pid[k]);
  }
  for (k = 0; k < count; k++) {
    const char *value = o[k].value != NULL ? o[k].value : "";
    ranks_join(pid[k], n, RANKS_WITHIN(20), status);
    for (i = 0; i < n; i++)
      if (status[i] == -1) test_fail(__FILE__, __LINE__, "rank %d of %d hung; %s", i, n, value);
      else if (WIFEXITED(status[i]) && WEXITSTATUS(status[i]) != 0)
        test_fail(__FILE__, __LINE__, "rank %d of %d failed its own checks; %s", i, n, value);
      else if (WIFSIGNALED(status[i]) && WTERMSIG(status[i]) != SIGKILL &&
               WTERMSIG(status[i]) != SIGALRM) /* of these victims die */
        test_fail(__FILE__, __LINE__, "rank %d of %d died of signal %d; %s", i, n,
                  WTERMSIG(status[i]), value);
  }
}

static void endure(ordeal *o, int n) { endure_all(o, 1, n); }

/* From here on the group's operations are late sooner than what made it, on a busy machine. */
#if defined(__has_attribute)
#if __has_attribute(no_sanitize)
__attribute__((no_sanitize("thread"))) /* the watcher reads it */
#endif
#endif
__attribute__((noinline)) static void shorten(cddp_group *g) {
  g->timeout_s = RANKS_WITHIN(0.05);
}

static void endure_on(ordeal *o, const char *hosts) {
  setenv("TEST_HOSTS", hosts, 1);
  endure(o, (int)strlen(hosts));
  unsetenv("TEST_HOSTS");
  unsetenv("CDDP_HOST_ID"); /* the last rank's */
}

static void check_fate(const ordeal *o, int rank, cddp_result want, const char *says) {
  const fate *f = &o->fates[rank];
  test_count();
  if (f->result != want || strstr(f->text, says) == NULL)
    test_fail(__FILE__, __LINE__, "rank %d: %s \"%s\"; wanted %s with \"%s\"", rank,
              cddp_result_name(f->result), f->text, cddp_result_name(want), says);
}

static ordeal *ordeal_new(int (*fn)(cddp_group *, ordeal *, fate *)) {
  ordeal *o = (ordeal *)ranks_shared(sizeof *o);
  o->fn = fn;
  return o;
}

static void test_no_device(void) {
  static const char *const wrong[] = {"01", "+1", "1x", " 1", "-1"};
  ordeal *o = ordeal_new(NULL);
  int i;
  o->environment = "LOCAL_RANK";
  for (i = 0; i < 5; i++) {
    o->value = wrong[i];
    endure(o, 1);
    check_fate(o, 0, CDDP_INVALID_ARGUMENT, "LOCAL_RANK is ");
  }
  o->environment = "HOSTCUDA_DEVICES";
  o->value = "0";
  endure(o, 2);
  for (i = 0; i < 2; i++) check_fate(o, i, CDDP_CUDA, "finds no GPU");
  o->value = "no-driver";
  endure(o, 1);
  check_fate(o, 0, CDDP_CUDA, "the NVIDIA driver is missing or too old for CUDA ");
  o->value = "2";
  endure(o, 3);
  for (i = 0; i < 3; i++)
    check_fate(o, i, CDDP_INVALID_ARGUMENT, "visible here are 2, from cuda:0 on: start at most 2");
  o->backend = "cpu"; /* they share */
  endure(o, 3);
  for (i = 0; i < 3; i++) check_fate(o, i, CDDP_OK, "");
  o->device = "cuda:5";
  endure(o, 2);
  for (i = 0; i < 2; i++) check_fate(o, i, CDDP_INVALID_ARGUMENT, "needs cuda:5, but");
  o->device = "cuda:1";
  o->backend = "nccl";
  endure(o, 2);
  for (i = 0; i < 2; i++) {
    check_fate(o, i, CDDP_INVALID_ARGUMENT, "rank 0 (pid ");
    check_fate(o, i, CDDP_INVALID_ARGUMENT, "and rank 1 (pid ");
    check_fate(o, i, CDDP_INVALID_ARGUMENT, "both have cuda:1");
  }
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1); /* as NCCL has it from 2.30 on */
  o->environment = "HOSTNCCL_VERSION";
  o->value = "22809";
  endure(o, 2);
  for (i = 0; i < 2; i++) check_fate(o, i, CDDP_INVALID_ARGUMENT, "both have cuda:1");
  o->value = "23000";
  endure(o, 2);
  for (i = 0; i < 2; i++) check_fate(o, i, CDDP_OK, "");
  setenv("HOSTCUDA_PARTS", "1", 1); /* which are no GPUs of their own to NCCL */
  endure(o, 2);
  for (i = 0; i < 2; i++) check_fate(o, i, CDDP_OK, "");
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  endure(o, 2);
  for (i = 0; i < 2; i++) check_fate(o, i, CDDP_NCCL, "Set NCCL_MULTI_RANK_GPU_ENABLE=1");
  unsetenv("HOSTCUDA_PARTS");
  endure(o, 2);
  for (i = 0; i < 2; i++) check_fate(o, i, CDDP_INVALID_ARGUMENT, "both have cuda:1");
  for (i = 0; i < 2; i++) check_fate(o, i, CDDP_INVALID_ARGUMENT, "NCCL_MULTI_RANK_GPU_ENABLE=1");
  o->environment = NULL;
  endure_on(o, "ab"); /* a cuda:1 each */
  for (i = 0; i < 2; i++) check_fate(o, i, CDDP_OK, "");
  endure_on(o, "baa");
  for (i = 0; i < 3; i++) check_fate(o, i, CDDP_INVALID_ARGUMENT, "and rank 2 (pid ");
  o->device = "cuda:x";
  endure(o, 1);
  check_fate(o, 0, CDDP_INVALID_ARGUMENT, "device \"cuda:x\" with backend");
}

/* On the CPU this build needs no driver, nor a word with CUDA; kernels or not. */
static int without_driver(int rank, void *arg) {
  const cddp_kernels *kernels = cddp__registered_kernels;
  float w[2][10], grad[10];
  cddp_sgd_desc rule;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cddp_group *g;
  cddp_param p;
  int i;
  (void)rank;
  (void)arg;
  memset(&rule, 0, sizeof rule);
  memset(&p, 0, sizeof p);
  memset(w, 0, sizeof w);
  memset(grad, 0, sizeof grad);
  p.count = 10;
  rule.lr = 0.5;
  CHECK_OK(cddp_init(&g, NULL));
  for (i = 0; i < 2; i++) {
    cddp_register_kernels(i == 0 ? NULL : kernels);
    p.data = w[i];
    p.grad = grad;
    CHECK_OK(cddp_sgd_create(&s, &p, 1, &rule));
    grad[3] = 1;
    CHECK_OK(cddp_optim_step(s));
    CHECK_EQ(w[i][3], -0.5);
    cddp_optim_destroy(s);
    p.grad = NULL;
    CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
    CHECK_OK(cddp_sgd_create(&s, &p, 1, &rule));
    ((float *)p.grad)[3] = 1;
    CHECK_OK(cddp_ddp_ready(d, 0));
    CHECK_OK(cddp_ddp_step(d, s));
    CHECK_EQ(w[i][3], -1);
    cddp_optim_destroy(s);
    cddp_ddp_destroy(d);
  }
  CHECK_EQ(hostcuda_calls("cudaPointerGetAttributes") + hostcuda_calls("cudaGetDevice"), 0);
  CHECK_EQ(cudaPeekAtLastError(), cudaSuccess);
  cddp_destroy(g);
  return test_failures != 0;
}

static void test_no_driver(void) {
  int status[2];
  setenv("HOSTCUDA_DEVICES", "no-driver", 1);
  ranks_script(without_driver, NULL, 2, RANKS_WITHIN(20), status);
  unsetenv("HOSTCUDA_DEVICES");
  CHECK(ranks_exited_well(status, 2));
}

/* A stream synchronised by the program itself, as programs do. */
static cddp_result work_on(cddp_group *g, float *x, size_t count) {
  cddp_result r = cddp_all_reduce(g, x, count, CDDP_F32, CDDP_SUM, NULL);
  (void)cudaStreamSynchronize((cudaStream_t)cddp_stream(g));
  return r == CDDP_OK ? cddp_synchronize(g) : r;
}

static int disagree(cddp_group *g, ordeal *o, fate *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  int i;
  for (i = 0; i < 3; i++) CHECK_OK(work_on(g, x, 10));
  (void)cddp_barrier(g); /* what follows disturbs nobody's first three */
  f->result = work_on(g, x, cddp_rank(g) == o->victim ? 11 : 10);
  if (f->result == CDDP_OK) f->result = work_on(g, x, 10);
  cddp_free(g, x);
  return 0;
}

static int disagree_memory(cddp_group *g, ordeal *o, fate *f) {
  float host[10], *x = (float *)cddp_alloc(g, 40);
  memset(host, 0, sizeof host);
  f->result = work_on(g, cddp_rank(g) == o->victim ? host : x, 10);
  if (f->result == CDDP_OK) f->result = work_on(g, x, 10);
  return 0;
}

/* After steps that all ranks take alike, in which no host waits for another, rank 1 has another
   learning rate, waits instead of stepping, or forgets a gradient. That breaks the group. */
static int disagree_step(cddp_group *g, ordeal *o, fate *f) {
  enum { RATE, WAITS, FORGETS };
  bool odd = cddp_rank(g) == 1;
  cddp_sgd_desc rule;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cddp_param p[2];
  int step;
  memset(&rule, 0, sizeof rule);
  rule.lr = 0.1;
  model_of(g, p, 2, 1000);
  CHECK_OK(cddp_ddp_create(&d, g, p, 2, NULL));
  CHECK_OK(cddp_sgd_create(&s, p, 2, &rule));
  for (step = 0; step < 3; step++) {
    CHECK_OK(cddp_ddp_ready(d, 1));
    CHECK_OK(cddp_ddp_ready(d, 0));
    CHECK_OK(cddp_ddp_step(d, s));
  }
  CHECK_OK(cddp_synchronize(g));
  (void)cddp_barrier(g); /* what follows disturbs nobody's first three */
  if (odd && o->victim == RATE) CHECK_OK(cddp_optim_set_lr(s, 0.2));
  o->began = test_now();
  while (f->result == CDDP_OK && test_now() < o->began + 10) { /* a look takes milliseconds */
    f->result = cddp_ddp_ready(d, 1);
    if (f->result == CDDP_OK && !(odd && o->victim == FORGETS)) f->result = cddp_ddp_ready(d, 0);
    if (f->result == CDDP_OK)
      f->result = odd && o->victim == WAITS ? cddp_ddp_wait(d) : cddp_ddp_step(d, s);
    (void)cudaStreamSynchronize((cudaStream_t)cddp_stream(g));
    if (f->result == CDDP_OK && getenv("TEST_HOSTS") != NULL) f->result = cddp_barrier(g);
  }
  snprintf(f->text, sizeof f->text, "%s", cddp_error());
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  CHECK_IS(cddp_barrier(g), f->result);
  if (f->result != CDDP_OK) cddp__fail(f->result, "%s", f->text);
  return test_failures != 0;
}

/* Calls that NCCL does not see differ: ranks of different hosts learn of it where they meet. */
static int disagree_unseen(cddp_group *g, ordeal *o, fate *f) {
  float *x = (float *)cddp_alloc(g, 40);
  cddp_group *half = NULL;
  CHECK_OK(work_on(g, x, 10));
  (void)cddp_barrier(g); /* what follows disturbs nobody's first call */
  if (cddp_rank(g) == o->victim) f->result = cddp_all_reduce(g, x, 0, CDDP_F32, CDDP_SUM, NULL);
  else f->result = cddp_broadcast(g, x, 0, CDDP_F32, 0, NULL);
  if (f->result == CDDP_OK)
    f->result = o->victim % 2 != 0 ? cddp_barrier(g) : cddp_group_split(g, 0, 0, &half);
  return 0;
}

/* Models that differ: all ranks learn of it where they make them, and the group lives on. */
static int disagree_model(cddp_group *g, ordeal *o, fate *f) {
  bool odd = cddp_rank(g) == 1;
  cddp_param p[2];
  cddp_ddp *d = NULL;
  cddp_ddp_desc desc;
  memset(&desc, 0, sizeof desc);
  if (odd && o->victim == 1) desc.max_grad_norm = 1;
  model_of(g, p, 2, odd && o->victim == 0 ? 1001 : 1000);
  f->result = cddp_ddp_create(&d, g, p, odd && o->victim == 2 ? 1 : 2, &desc);
  snprintf(f->text, sizeof f->text, "%s", cddp_error());
  CHECK(d == NULL);
  check_sum(g, 3);
  CHECK_OK(cddp_barrier(g));
  if (f->result != CDDP_OK) cddp__fail(f->result, "%s", f->text);
  return test_failures != 0;
}

static void test_mismatch(void) {
  static const char *const says[] = {"with other settings", "rank 1 called ddp_wait",
                                     "was not marked ready on rank 1"};
  ordeal *o = ordeal_new(disagree);
  int i, k;
  for (k = 0; k < 3; k++) {
    memset(o, 0, sizeof *o);
    o->fn = disagree_step;
    o->victim = k;
    endure(o, 2);
    for (i = 0; i < 2; i++)
      check_fate(o, i, k < 2 ? CDDP_MISMATCH : CDDP_INVALID_ARGUMENT, says[k]);
  }
  for (k = 0; k < 6; k++) {
    memset(o, 0, sizeof *o);
    o->fn = disagree_model;
    o->victim = k % 3;
    if (k < 3) endure(o, 2);
    else endure_on(o, "ab");
    for (i = 0; i < 2; i++) check_fate(o, i, CDDP_MISMATCH, "the ranks' models differ");
  }
  memset(o, 0, sizeof *o);
  o->fn = disagree;
  o->victim = 1;
  endure(o, 3);
  for (i = 0; i < 3; i++) {
    check_fate(o, i, CDDP_MISMATCH, "call 4 of the group");
    check_fate(o, i, CDDP_MISMATCH, "all_reduce(count 10, f32, sum)");
    check_fate(o, i, CDDP_MISMATCH, "rank 1 called all_reduce(count 11, f32, sum) at tests/");
  }
  o->fn = disagree_memory;
  endure(o, 2);
  for (i = 0; i < 2; i++) check_fate(o, i, CDDP_MISMATCH, "host memory");
}

static int die_before(cddp_group *g, ordeal *o, fate *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  int i;
  for (i = 0; i < 3; i++) CHECK_OK(work_on(g, x, 10));
  (void)cddp_barrier(g); /* what follows disturbs nobody's first three */
  if (cddp_rank(g) == o->victim) {
    o->began = test_now();
    raise(SIGKILL);
  }
  if (o->late) shorten(g);
  f->result = work_on(g, x, 1000);
  return 0;
}

/* With no operation under way: the next one tells. */
static int die_idle(cddp_group *g, ordeal *o, fate *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  CHECK_OK(work_on(g, x, 10));
  (void)cddp_barrier(g);
  if (cddp_rank(g) == o->victim) {
    o->began = test_now();
    raise(SIGKILL);
  }
  while (!cddp__rank_gone(g, o->victim)) ranks_sleep(0.001);
  f->result = work_on(g, x, 1000);
  return 0;
}

static int die_in_step(cddp_group *g, ordeal *o, fate *f) {
  cddp_sgd_desc rule;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cddp_param p[2];
  int step;
  memset(p, 0, sizeof p);
  memset(&rule, 0, sizeof rule);
  p[0].data = cddp_alloc(g, 40000);
  p[1].data = cddp_alloc(g, 40000);
  p[0].count = p[1].count = 10000;
  rule.lr = 0.1;
  rule.momentum = 0.9;
  f->result = cddp_ddp_create(&d, g, p, 2, NULL);
  if (f->result == CDDP_OK) f->result = cddp_sgd_create(&s, p, 2, &rule);
  for (step = 0; f->result == CDDP_OK && step < 6; step++) {
    f->result = cddp_ddp_ready(d, 1);
    if (step == 4 && cddp_rank(g) == o->victim) {
      o->began = test_now();
      raise(SIGKILL);
    }
    if (f->result == CDDP_OK) f->result = cddp_ddp_ready(d, 0);
    if (f->result == CDDP_OK) f->result = cddp_ddp_step(d, s);
  }
  if (f->result == CDDP_OK) f->result = cddp_synchronize(g);
  snprintf(f->text, sizeof f->text, "%s", cddp_error());
  f->when = test_now();
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  cddp__fail(f->result, "%s", f->text);
  return 0;
}

/* While another rank's program waits in cudaFree, with CUDA's lock, for what will never end. */
static int die_at_free(cddp_group *g, ordeal *o, fate *f) {
  float *x = (float *)cddp_alloc(g, 4000), *y = (float *)on_device(NULL, 4000);
  CHECK_OK(work_on(g, x, 10));
  (void)cddp_barrier(g);
  if (cddp_rank(g) == o->victim) {
    ranks_sleep(0.1); /* the others are in there */
    o->began = test_now();
    raise(SIGKILL);
  }
  f->result = cddp_all_reduce(g, x, 10, CDDP_F32, CDDP_SUM, NULL);
  (void)cudaFree(y);
  if (f->result == CDDP_OK) f->result = cddp_synchronize(g);
  return 0;
}

/* Rank 1 is stopped, and NCCL waits for it on rank 0 without end, but cddp for NCCL only left_s. */
static int stop_there(cddp_group *g, ordeal *o, fate *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  (void)o;
  left_s = 0.2;
  CHECK_OK(work_on(g, x, 10));
  (void)cddp_barrier(g);
  if (cddp_rank(g) == 1) {
    raise(SIGSTOP);
    while (true) ranks_sleep(1);
  }
  shorten(g);
  f->result = work_on(g, x, 10);
  cddp_free(g, x);
  return 0;
}

static void test_stopped(void) {
  ordeal *o = ordeal_new(stop_there);
  pid_t pid[2];
  int status[2];
  o->timeout_s = 60;
  ranks_begin(ordeal_rank, o, 2, pid);
  ranks_join(pid, 1, RANKS_WITHIN(10), status);
  CHECK_EQ(status[0], 0);
  check_fate(o, 0, CDDP_TIMEOUT, "timed out after");
  CHECK_EQ(kill(pid[1], SIGKILL), 0);
  ranks_join(pid + 1, 1, RANKS_WITHIN(10), status + 1);
}

static int leave_early(cddp_group *g, ordeal *o, fate *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  CHECK_OK(work_on(g, x, 10));
  if (cddp_rank(g) != o->victim) f->result = work_on(g, x, 10);
  return 0;
}

static void test_lost(void) {
  int (*const ways[])(cddp_group *, ordeal *, fate *) = {die_before, die_idle, die_in_step,
                                                         die_at_free};
  ordeal *o = ordeal_new(NULL);
  int n, i, k;
  for (k = 0; k < 4; k++) {
    for (n = 2; n <= MOST_RANKS; n *= 2) {
      if (n == MOST_RANKS && RANKS_SLOW) break;
      memset(o, 0, sizeof *o);
      o->fn = ways[k];
      o->victim = 1;
      endure(o, n);
      for (i = 0; i < n; i++) {
        if (i == 1) continue;
        check_fate(o, i, CDDP_PEER_LOST, "rank 1 (pid ");
        CHECK(o->fates[i].when - o->began < RANKS_WITHIN(2));
      }
    }
  }
  memset(o, 0, sizeof *o); /* while communicators connect */
  o->victim = 1;
  o->fuse = RANKS_SLOW ? 0.9 : 0.3; /* on a busy machine it dies before they do: no matter */
  o->environment = "HOSTNCCL_FAIL";
  o->value = "init:1@1";
  endure(o, 3);
  check_fate(o, 0, CDDP_PEER_LOST, "rank 1 (pid ");
  check_fate(o, 2, CDDP_PEER_LOST, "rank 1 (pid ");
  CHECK(o->fates[0].when - o->began < RANKS_WITHIN(2));
  memset(o, 0, sizeof *o);
  o->fn = leave_early;
  endure(o, 2);
  check_fate(o, 1, CDDP_PEER_LOST, "rank 0 (pid ");
  check_fate(o, 1, CDDP_PEER_LOST, "left the group");
}

/* The victim does not come to the others' second operation. */
static int stay_away(cddp_group *g, ordeal *o, fate *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  CHECK_OK(work_on(g, x, 10));
  (void)cddp_barrier(g); /* what follows disturbs nobody's first call */
  shorten(g);
  while (cddp_rank(g) == o->victim && f->result == CDDP_OK) {
    ranks_sleep(0.001);
    f->result = cddp__check_group(g);
  }
  if (cddp_rank(g) != o->victim) f->result = work_on(g, x, 10);
  return 0;
}

/* Failures over hosts: who dies alone on a host, leads others there, or is led. */
static void test_failing_hosts(void) {
  static const struct {
    const char *hosts;
    int victim;
  } cases[] = {{"ab", 1}, {"abb", 1}, {"abba", 2}, {"abcdee", 3}};
  ordeal *o = ordeal_new(NULL);
  char says[64];
  size_t c;
  int i, way;
  for (c = 0; c < 4; c += RANKS_TSAN ? 3 : 1)
    for (way = 0; way < 4; way++) {
      if (way % 2 != 0 && (way == 1) != (c % 2 == 0)) continue; /* enough */
      memset(o, 0, sizeof *o);
      o->victim = cases[c].victim;
      o->fn = way == 0   ? die_before
              : way == 1 ? die_in_step
              : way == 2 ? disagree_unseen
                         : stay_away;
      if (way == 0 && c % 2 != 0) { /* NCCL's connections end too */
        o->environment = "HOSTNCCL_TRANSPORT";
        o->value = "net";
      }
      endure_on(o, cases[c].hosts);
      snprintf(says, sizeof says, "rank %d (pid ", o->victim);
      for (i = 0; i < (int)strlen(cases[c].hosts); i++) {
        if (i == o->victim && way < 2) continue;
        if (way < 2) check_fate(o, i, CDDP_PEER_LOST, says);
        else if (way == 2) check_fate(o, i, CDDP_MISMATCH, "ranks disagree in ");
        else check_fate(o, i, CDDP_TIMEOUT, "latest is all_reduce(count 10, f32, sum) at tests/");
        if (way < 2) CHECK(o->fates[i].when - o->began < RANKS_WITHIN(2));
      }
    }
  memset(o, 0, sizeof *o);
  o->fn = disagree_step; /* in the learning rate: a cddp_ddp's calls count as the group's */
  endure_on(o, "ab");
  for (i = 0; i < 2; i++) check_fate(o, i, CDDP_MISMATCH, "and its cddp_ddps");
  memset(o, 0, sizeof *o); /* while communicators connect */
  o->victim = 1;
  o->fuse = RANKS_SLOW ? 0.9 : 0.3;
  o->environment = "HOSTNCCL_FAIL";
  o->value = "init:1@1";
  endure_on(o, "aba");
  for (i = 0; i < 3; i += 2) check_fate(o, i, CDDP_PEER_LOST, "rank 1 (pid ");
}

/* A device that fails on rank 1, in an operation that rank 0 never comes to. */
static int fault(cddp_group *g, ordeal *o, fate *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  (void)o;
  f->result = cddp_rank(g) == 0 ? cddp_barrier(g) : work_on(g, x, 10);
  return 0;
}

/* Ranks disagree while NCCL's thread has not put the operation on its stream yet, which cudaFree
   would wait for. The call returns when no kernel will touch its memory any more. */
static int free_at_once(cddp_group *g, ordeal *o, fate *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  (void)o;
  CHECK_OK(work_on(g, x, 10));
  hostnccl_late();
  f->result = cddp_all_reduce(g, x, cddp_rank(g) == 0 ? 10 : 11, CDDP_F32, CDDP_SUM, NULL);
  cddp_free(g, x);
  return test_failures != 0;
}

/* A communicator is aborted when the thread that is inside NCCL has come out. */
static int abort_waits(cddp_group *g, ordeal *o, fate *f) {
  cddp__device *p = cddp__device_of(g);
  double start, now;
  (void)o;
  pthread_mutex_lock(&p->issue_lock); /* as if it were this one */
  (void)cddp__consensus(g, CDDP_OK, NULL, 0, NULL); /* on both ranks, before either breaks it */
  start = test_now();
  cddp__fail(CDDP_ABORTED, "a test breaks the group");
  (void)cddp__break(g, CDDP_ABORTED);
  for (now = start; now < start + 0.1; now = test_now()) {
    bool called = hostcuda_calls("ncclCommAbort") != 0;
    CHECK(!called || test_now() - start > 0.9 * CDDP__CALLS_S);
    ranks_sleep(0.002);
  }
  pthread_mutex_unlock(&p->issue_lock);
  while (hostcuda_calls("ncclCommAbort") == 0 && test_now() - start < RANKS_WITHIN(10))
    ranks_sleep(0.002);
  CHECK_EQ(hostcuda_calls("ncclCommAbort"), 1);
  f->result = cddp__check_group(g);
  return test_failures != 0;
}

/* A graph that rank 1 does not launch: no event tells of its operations, the deadline does. */
static int lone_graph(cddp_group *g, ordeal *o, fate *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  cudaGraphExec_t exec = NULL;
  cudaGraph_t graph = NULL;
  cudaStream_t s;
  (void)o;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  cddp_set_stream(g, s);
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  CHECK_OK(cddp_all_reduce(g, x, 10, CDDP_F32, CDDP_SUM, NULL));
  CHECK(cudaStreamEndCapture(s, &graph) == cudaSuccess);
  CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
  if (cddp_rank(g) == 0) shorten(g); /* before the barrier of rank 1 */
  if (cddp_rank(g) == 0) CHECK(cudaGraphLaunch(exec, s) == cudaSuccess);
  f->result = cddp_rank(g) == 0 ? cddp_synchronize(g) : cddp_barrier(g);
  (void)cudaStreamSynchronize(s); /* the watcher has ended it */
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(s);
  return 0;
}

/* A graph that has been launched on all ranks; then rank 0 leaves, or dies. Rank 1 may go on only
   if it left: nobody knows whether the graph, which waits for rank 0, is to be launched again. */
static int graph_over(cddp_group *g, ordeal *o, fate *f) {
  enum { LEAVES, DIES };
  float *x = (float *)cddp_alloc(g, 4000);
  cudaGraphExec_t exec = NULL;
  cudaGraph_t graph = NULL;
  cudaStream_t s;
  double until;
  left_s = 0.1;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  cddp_set_stream(g, s);
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  CHECK_OK(cddp_all_reduce(g, x, 10, CDDP_F32, CDDP_SUM, NULL));
  CHECK_OK(cddp_all_reduce(g, x, 20, CDDP_F32, CDDP_SUM, NULL));
  CHECK(cudaStreamEndCapture(s, &graph) == cudaSuccess);
  CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
  CHECK(cudaGraphLaunch(exec, s) == cudaSuccess);
  CHECK_OK(cddp_synchronize(g));
  cudaGraphDestroy(graph);
  if (cddp_rank(g) == 0) {
    cudaGraphExecDestroy(exec);
    exec = NULL;
  }
  (void)cddp_barrier(g);
  if (cddp_rank(g) == 0 && o->victim != LEAVES) raise(SIGKILL);
  if (cddp_rank(g) != 0) {
    while (!cddp__rank_gone(g, 0)) ranks_sleep(0.001);
    for (until = test_now() + 2.5 * left_s; test_now() < until; ranks_sleep(0.01)) {}
    f->result = cddp_synchronize(g);
    snprintf(f->text, sizeof f->text, "%s", cddp_error());
  }
  if (exec != NULL) cudaGraphExecDestroy(exec);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(s);
  if (f->result != CDDP_OK) cddp__fail(f->result, "%s", f->text);
  return 0;
}

/* A blocking stream is captured while the group has the default one: an error, and no more. */
static int capture_elsewhere(cddp_group *g, ordeal *o, fate *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  cudaGraph_t graph = NULL;
  cudaStream_t s;
  cddp_ddp *d = NULL;
  cddp_param p;
  (void)o;
  model_of(g, &p, 1, 100);
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
  CHECK(cudaStreamCreate(&s) == cudaSuccess);
  (void)cddp_barrier(g);
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  CHECK_IS(cddp_all_reduce(g, x, 10, CDDP_F32, CDDP_SUM, NULL), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "cddp_set_stream") != NULL);
  CHECK_IS(cddp_ddp_ready(d, 0), CDDP_INVALID_ARGUMENT);
  CHECK(cudaStreamEndCapture(s, &graph) == cudaSuccess); /* not void */
  cudaGraphDestroy(graph);
  f->result = work_on(g, x, 10);
  cddp_ddp_destroy(d);
  cudaStreamDestroy(s);
  return 0;
}

/* A model's first step is captured. */
static int capture_too_early(cddp_group *g, ordeal *o, fate *f) {
  cddp_sgd_desc rule;
  cudaGraph_t graph = NULL;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cudaStream_t stream;
  cddp_param p;
  (void)o;
  memset(&p, 0, sizeof p);
  memset(&rule, 0, sizeof rule);
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  cddp_set_stream(g, stream);
  p.data = cddp_alloc(g, 40000);
  p.count = 10000;
  rule.momentum = 0.9;
  rule.stream = stream;
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
  CHECK_OK(cddp_sgd_create(&s, &p, 1, &rule));
  (void)cddp_barrier(g);
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  f->result = cddp_ddp_ready(d, 0); /* or the other rank was first with the failure */
  if (f->result == CDDP_OK) f->result = cddp_ddp_step(d, s);
  snprintf(f->text, sizeof f->text, "%s", cddp_error());
  (void)cudaStreamEndCapture(stream, &graph);
  if (graph != NULL) cudaGraphDestroy(graph);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(stream);
  cddp__fail(f->result, "%s", f->text);
  return 0;
}

/* A model whose step has been captured after two eager ones. */
typedef struct captured {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cddp_param p;
  cddp_ddp *d;
  cddp_optim *s;
} captured;

static void captured_open(captured *c, cddp_group *g) {
  cddp_sgd_desc rule;
  int step;
  memset(c, 0, sizeof *c);
  memset(&rule, 0, sizeof rule);
  CHECK(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking) == cudaSuccess);
  cddp_set_stream(g, c->stream);
  c->p.data = cddp_alloc(g, 40000);
  c->p.count = 10000;
  rule.momentum = 0.9;
  rule.lr = 0.1;
  CHECK_OK(cddp_ddp_create(&c->d, g, &c->p, 1, NULL));
  rule.ddp = c->d;
  CHECK_OK(cddp_sgd_create(&c->s, &c->p, 1, &rule));
  for (step = 0; step < 3; step++) {
    if (step == 2)
      CHECK(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK_OK(cddp_ddp_ready(c->d, 0));
    CHECK_OK(cddp_ddp_step(c->d, c->s));
  }
  CHECK(cudaStreamEndCapture(c->stream, &c->graph) == cudaSuccess);
  CHECK(cudaGraphInstantiate(&c->exec, c->graph, 0) == cudaSuccess);
}

static void captured_drop_graph(captured *c) {
  if (c->exec != NULL) cudaGraphExecDestroy(c->exec);
  if (c->graph != NULL) cudaGraphDestroy(c->graph);
  c->exec = NULL;
  c->graph = NULL;
}

/* What may become of a captured step: the model is destroyed before the graph; rank 1 does not
   launch it, or dies instead; an eager wait comes between. */
static int step_graph(cddp_group *g, ordeal *o, fate *f) {
  enum { MODEL_FIRST, ONE_LAUNCHES, DIES, WAITS };
  bool launches;
  captured c;
  left_s = o->victim == DIES ? 30 : 0.2; /* nobody waits so long for what a graph holds up */
  captured_open(&c, g);
  (void)cddp_barrier(g);
  if (cddp_rank(g) == 1 && o->victim == DIES) {
    o->began = test_now();
    raise(SIGKILL);
  }
  launches = cddp_rank(g) == 0 || o->victim != ONE_LAUNCHES;
  if (cddp_rank(g) == 0 && o->victim == ONE_LAUNCHES) shorten(g);
  if (launches) CHECK(cudaGraphLaunch(c.exec, c.stream) == cudaSuccess);
  f->result = launches ? cddp_synchronize(g) : cddp_barrier(g);
  if (o->victim == WAITS) {
    CHECK_OK(f->result);
    CHECK_OK(cddp_ddp_ready(c.d, 0)); /* nothing of the graph's moves */
    CHECK_OK(cddp_ddp_wait(c.d));
    CHECK_OK(cddp_optim_step(c.s));
    CHECK(cudaGraphLaunch(c.exec, c.stream) == cudaSuccess);
    f->result = cddp_synchronize(g);
  }
  snprintf(f->text, sizeof f->text, "%s", cddp_error());
  cddp_optim_destroy(c.s);
  cddp_ddp_destroy(c.d);
  captured_drop_graph(&c);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(c.stream);
  if (f->result != CDDP_OK) cddp__fail(f->result, "%s", f->text);
  return 0;
}

static void test_step_graphs(void) {
  static const cddp_result want[] = {CDDP_OK, CDDP_TIMEOUT, CDDP_PEER_LOST, CDDP_OK};
  ordeal *o = ordeal_new(NULL);
  int i, k;
  for (k = 0; k < 4; k++) {
    memset(o, 0, sizeof *o);
    o->fn = step_graph;
    o->victim = k;
    endure(o, 2);
    if (k == 2) CHECK(o->fates[0].when - o->began < RANKS_WITHIN(2));
    for (i = 0; i < (k == 2 ? 1 : 2); i++)
      check_fate(o, i, want[k], k == 1 ? "timed out after" : k == 2 ? "rank 1 (pid " : "");
  }
}

/* Rank 1 dies; rank 0 has one group's operation on a stream ahead of another's: neither can end
   before the other is told to. */
static int die_ahead(cddp_group *g, ordeal *o, fate *f) {
  captured c;
  float *x = (float *)cddp_alloc(g, 4000);
  captured_open(&c, g);
  captured_drop_graph(&c);
  (void)cddp_barrier(g);
  if (cddp_rank(g) == 1) {
    o->began = test_now();
    raise(SIGKILL);
  }
  f->result = cddp_all_reduce(g, x, 10, CDDP_F32, CDDP_SUM, NULL);
  if (f->result == CDDP_OK) f->result = cddp_ddp_ready(c.d, 0);
  if (f->result == CDDP_OK) f->result = cddp_ddp_step(c.d, c.s);
  if (f->result == CDDP_OK) f->result = cddp_synchronize(g); /* no host waits in a step */
  snprintf(f->text, sizeof f->text, "%s", cddp_error());
  cddp_optim_destroy(c.s);
  cddp_ddp_destroy(c.d);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(c.stream);
  cddp__fail(f->result, "%s", f->text);
  return 0;
}

static void test_device_failures(void) {
  ordeal *o = ordeal_new(fault);
  int i;
  o->environment = "HOSTCUDA_FAIL";
  o->value = "cudaSetDevice:1:46@1"; /* a GPU in the mode EXCLUSIVE_PROCESS */
  endure(o, 2);
  for (i = 0; i < 2; i++)
    check_fate(o, i, CDDP_CUDA, "another process uses the GPU, and its compute mode allows one");
  o->value = "cudaEventQuery:1:700@1";
  endure(o, 2);
  for (i = 0; i < 2; i++) check_fate(o, i, CDDP_CUDA, "rank 1: cuda:1 failed during the group's");
  memset(o, 0, sizeof *o);
  o->fn = free_at_once;
  endure(o, 2);
  for (i = 0; i < 2; i++) check_fate(o, i, CDDP_MISMATCH, "ranks disagree");
  memset(o, 0, sizeof *o);
  o->fn = abort_waits;
  endure(o, 2);
  for (i = 0; i < 2; i++) check_fate(o, i, CDDP_ABORTED, "a test breaks the group");
  memset(o, 0, sizeof *o);
  o->fn = lone_graph;
  endure(o, 2);
  for (i = 0; i < 2; i++) check_fate(o, i, CDDP_TIMEOUT, "timed out after");
  for (i = 0; i < 2; i++) {
    memset(o, 0, sizeof *o);
    o->fn = graph_over;
    o->victim = i;
    endure(o, 2);
    check_fate(o, 1, i == 0 ? CDDP_OK : CDDP_PEER_LOST, i == 0 ? "" : "rank 0 (pid ");
  }
  memset(o, 0, sizeof *o);
  o->fn = capture_too_early;
  endure(o, 2);
  for (i = 0; i < 2; i++) check_fate(o, i, CDDP_INVALID_ARGUMENT, "take two steps");
  memset(o, 0, sizeof *o);
  o->fn = capture_elsewhere;
  endure(o, 2);
  for (i = 0; i < 2; i++) check_fate(o, i, CDDP_OK, "");
  memset(o, 0, sizeof *o);
  o->fn = die_ahead;
  endure(o, 2);
  check_fate(o, 0, CDDP_PEER_LOST, "rank 1 (pid ");
  CHECK(o->fates[0].when - o->began < RANKS_WITHIN(2));
}

/* One operation never ends, and others follow all the time: its deadline is its own. */
static int keep_going(cddp_group *g, ordeal *o, fate *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  double start = test_now();
  (void)o;
  shorten(g);
  while (f->result == CDDP_OK && test_now() < start + RANKS_WITHIN(5)) {
    f->result = cddp_all_reduce(g, x, 10, CDDP_F32, CDDP_SUM, NULL);
    ranks_sleep(0.01);
  }
  return 0;
}

static int split_in_two(cddp_group *g, ordeal *o, fate *f) {
  cddp_group *half = NULL;
  (void)o;
  f->result = cddp_group_split(g, cddp_rank(g) % 2, 0, &half);
  cddp_destroy(half);
  return 0;
}

static void test_stall(void) {
  static const struct {
    int (*fn)(cddp_group *, ordeal *, fate *);
    const char *value, *says;
    cddp_result result;
  } cases[] = {{die_before, "stall:12@1", "has not ended", CDDP_TIMEOUT},
               {keep_going, "stall:12@1", "has not ended", CDDP_TIMEOUT},
               {die_before, "init:1@1", "ncclCommInitRankConfig", CDDP_TIMEOUT},
               {die_before, "error:12@0", "injected asynchronous error", CDDP_NCCL},
               {split_in_two, "init:2@1", "ncclCommInitRankConfig", CDDP_TIMEOUT}};
  enum { CASES = sizeof cases / sizeof *cases, HALVES = CASES - 1 };
  ordeal *o = (ordeal *)ranks_shared(CASES * sizeof *o);
  int i, k;
  for (k = 0; k < CASES; k++) {
    o[k].fn = cases[k].fn;
    o[k].victim = -1;
    o[k].late = cases[k].result == CDDP_TIMEOUT;
    o[k].environment = "HOSTNCCL_FAIL";
    o[k].value = cases[k].value;
    if (strncmp(o[k].value, "init", 4) == 0) o[k].timeout_s = RANKS_WITHIN(0.3);
  }
  endure_all(o, HALVES, 3);
  for (k = 0; k < HALVES; k++)
    for (i = 0; i < 3; i++) check_fate(&o[k], i, cases[k].result, cases[k].says);
  endure(&o[HALVES], 4); /* the communicator of one of the halves */
  for (i = 0; i < 4; i++)
    check_fate(&o[HALVES], i, i % 2 != 0 ? CDDP_TIMEOUT : CDDP_OK, i % 2 != 0 ? cases[k].says : "");
  munmap(o, CASES * sizeof *o);
}

/* A run through everything; any call may fail in it. */
static int everything(cddp_group *g, ordeal *o, fate *f) {
  cddp_group *half = NULL;
  float *x = NULL;
  cddp_work *w = NULL;
  (void)o;
  f->result = cddp_group_split(g, 0, 0, &half);
  if (f->result == CDDP_OK && (x = (float *)cddp_alloc(half, 4000)) == NULL)
    f->result = CDDP_OUT_OF_MEMORY;
  if (f->result == CDDP_OK) f->result = cddp_all_reduce(half, x, 10, CDDP_F32, CDDP_SUM, &w);
  if (w != NULL && f->result == CDDP_OK) f->result = cddp_wait(w);
  if (f->result == CDDP_OK) f->result = cddp_gather(half, x, x + 100, 10, CDDP_F32, 0, NULL);
  if (f->result == CDDP_OK)
    f->result = cddp_reduce_scatter(half, x, x + 100, 10, CDDP_F32, CDDP_SUM, NULL);
  if (f->result == CDDP_OK) f->result = cddp_all_gather(half, x, x + 100, 10, CDDP_F32, NULL);
  if (f->result == CDDP_OK) f->result = cddp_barrier(half);
  snprintf(f->text, sizeof f->text, "%s", cddp_error());
  cddp_destroy(half);
  if (f->result == CDDP_OK)
    die_in_step(g, o, f);
  else
    cddp__fail(f->result, "%s", f->text);
  return 0;
}

/* Every function of NCCL and CUDA that is called fails on rank 1 at one of its calls: nobody hangs,
   and rank 1 gets an error that names the function. */
static void test_injection(void) {
  static const struct {
    const char *fail, *says;
    cddp_result result;
  } cases[] = {{"ncclCommInitRankConfig:1:2@1", "ncclCommInitRankConfig", CDDP_NCCL},
               {"ncclGetUniqueId:1:2@0", "ncclGetUniqueId", CDDP_NCCL},
               {"ncclCommInitRankConfig:2:3@1", "ncclCommInitRankConfig", CDDP_NCCL},
               {"ncclGetUniqueId:2:2@0", "ncclGetUniqueId", CDDP_NCCL},
               {"ncclAllReduce:1:1@1", "ncclAllReduce", CDDP_NCCL}, /* in warm-ups */
               {"ncclAllReduce:8:3@1", "ncclAllReduce", CDDP_NCCL},
               {"ncclAllReduce:9:1@1", "ncclAllReduce", CDDP_NCCL},
               {"ncclAllReduce:14:3@1", "ncclAllReduce", CDDP_NCCL},
               {"ncclReduceScatter:1:3@1", "ncclReduceScatter", CDDP_NCCL},
               {"ncclAllGather:1:3@1", "ncclAllGather", CDDP_NCCL},
               {"ncclBroadcast:1:3@1", "ncclBroadcast", CDDP_NCCL},
               {"ncclSend:1:3@1", "ncclSend", CDDP_NCCL},
               {"ncclGroupEnd:1:3@1", "ncclGroupEnd", CDDP_NCCL},
               {"ncclGroupEnd:2:3@1", "ncclGroupEnd", CDDP_NCCL},
               {"ncclCommDestroy:1:6@1", "", CDDP_OK},
               {"cudaStreamCreateWithPriority:1:2@1", "cudaStreamCreateWithPriority", CDDP_CUDA},
               {"cudaEventCreateWithFlags:2:2@1", "cudaEventCreateWithFlags", CDDP_CUDA},
               {"cudaEventRecord:2:700@1", "cudaEventRecord", CDDP_CUDA},
               {"cudaStreamWaitEvent:3:700@1", "cudaStreamWaitEvent", CDDP_CUDA},
               {"cudaMalloc:1:2@1", "cudaMalloc", CDDP_CUDA},
               {"cudaMalloc:7:2@1", "cudaMalloc", CDDP_CUDA},
               {"cudaMemsetAsync:1:700@1", "cudaMemsetAsync", CDDP_CUDA}};
  enum { CASES = sizeof cases / sizeof *cases, AT_ONCE = 8 };
  ordeal *all = (ordeal *)ranks_shared(CASES * sizeof *all), *o = all;
  int i, k, n = 0, rank;
  for (i = 0; i < CASES; i += RANKS_SLOW ? 3 : 1, n++) {
    o[n].fn = everything;
    o[n].victim = -1;
    o[n].environment = "HOSTCUDA_FAIL";
    o[n].value = cases[i].fail;
    o[n].ends = cases[i].result == CDDP_OK;
  }
  for (k = 0; k < n; k += AT_ONCE) endure_all(&o[k], n - k < AT_ONCE ? n - k : AT_ONCE, 2);
  for (i = 0; i < CASES; i += RANKS_SLOW ? 3 : 1, o++) {
    rank = cases[i].fail[strlen(cases[i].fail) - 1] - '0';
    test_count();
    if (o->fates[rank].result != cases[i].result ||
        strstr(o->fates[rank].text, cases[i].says) == NULL ||
        (cases[i].result != CDDP_OK) != (o->fates[!rank].result != CDDP_OK))
      test_fail(__FILE__, __LINE__, "%s: rank %d: %s \"%s\", the other: %s \"%s\"", cases[i].fail,
                rank, cddp_result_name(o->fates[rank].result), o->fates[rank].text,
                cddp_result_name(o->fates[!rank].result), o->fates[!rank].text);
  }
  munmap(all, CASES * sizeof *all);
}

int main(void) {
  RUN(test_collectives);
  RUN(test_means);
  RUN(test_streams);
  RUN(test_groups);
  RUN(test_hosts);
  RUN(test_training);
  RUN(test_training_over_hosts);
  if (!RANKS_TSAN) RUN(test_training_options); /* its threads are those of test_training */
  RUN(test_parts);
  RUN(test_sharded_states);
  RUN(test_training_masters);
  RUN(test_uneven_and_sparse);
  if (!RANKS_TSAN) RUN(test_checkpoints);
  RUN(test_adamw);
  RUN(test_graph);
  RUN(test_beside_a_model);
  RUN(test_training_staged);
  RUN(test_steps);
  RUN(test_shards);
  RUN(test_elastic);
  RUN(test_elastic_joins);
  RUN(test_leaving);
  RUN(test_left_first);
  RUN(test_threads);
  RUN(test_destroyed_first);
  RUN(test_blocking_launches);
  RUN(test_no_device);
  RUN(test_no_driver);
  RUN(test_mismatch);
  RUN(test_lost);
  RUN(test_stopped);
  RUN(test_failing_hosts);
  RUN(test_stall);
  RUN(test_device_failures);
  RUN(test_step_graphs);
  RUN(test_injection);
  return TEST_END();
}
