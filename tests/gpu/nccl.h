/* nccl.h - what tests/gpu/nccl_*.c share: ranks with a GPU of the test double (tests/gpu/hostcuda),
   device memory, work on streams, and ranks that fail.

     static int sum(cddp_group *g, void *arg) { ... CHECK(...); return 0; }      on each rank
     CHECK_OK(run(sum, NULL, 4, NULL));                    4 processes with a GPU each, and NCCL
     CHECK_OK(run(sum, NULL, 4, "cpu"));                   through host memory and the CPU backend
     CHECK_OK(run_on("aab", sum, NULL, NULL));             3 processes on hosts a, a and b
     CHECK_OK(run_threads(sum, NULL, 4, NULL));            4 threads of one process

   On a GPU (tests/gpu/gpu.sh suite) real.c stands for the double, and the ranks share cuda:0
   (TEST_SHARE=1). What needs the double, or a GPU for each rank, asks on_double or own_gpus first.

   A `scenario` is the description of ranks that fail: scenario.fn runs on each rank and leaves in
   its `outcome` the error and the time at which the rank learned of it. */
#ifndef NCCL_H
#define NCCL_H

#define CDDP_KERNELS_NO_CUBLAS
#include "../../cddp_kernels.cuh"

#include "../inside.h"
#include "../ranks.h"
#include "hostcuda/hostcuda.h"
#include "setup.h"

#include <nccl.h> /* of hostcuda, or the real one */

#include <sys/time.h>

#ifdef HOSTCUDA
enum { MOST_RANKS = 8 }; /* the main tests run on 1 to 8 ranks */
#else
enum { MOST_RANKS = 4 }; /* each process takes a second for the start of CUDA */
#endif

/* Whether the test can go on; else it says why not. */
RANKS_DEF bool goes_on(bool can, const char *why) {
  if (!can) fprintf(stderr, "  skip of %s: %s\n", test_running, why);
  test_count(); /* a test without checks fails */
  return can;
}

RANKS_DEF bool on_double(const char *what) {
#ifdef HOSTCUDA
  return goes_on(true, what);
#else
  return goes_on(false, what);
#endif
}

RANKS_DEF bool own_gpus(const char *what) { return goes_on(getenv("TEST_SHARE") == NULL, what); }

/* --- ranks with a device --- */

typedef struct job {
  ranks_fn fn;
  void *arg;
  const char *backend, *device; /* NULL device: "cuda" */
  double timeout_s;
} job;

/* TEST_HOSTS=aab: see ranks.h. Each host's GPUs are then given out from cuda:0 on, and NCCL, which
   goes by a name of its own, takes them for hosts too. */
RANKS_DEF void place_on_host(int rank) {
  int i, local = 0;
  if (getenv("TEST_HOSTS") == NULL) return;
  ranks_place(rank);
  for (i = 0; i < rank; i++) local += ranks_together(i, rank);
  ranks_setenv("LOCAL_RANK", local);
  setenv("NCCL_HOSTID", getenv("CDDP_HOST_ID"), 1);
}

/* TEST_SHARE=1: all ranks share cuda:0. NCCL supports that from 2.30 on. Before, each rank gets a
   host's name of its own: NCCL then takes the ranks for those of several hosts. */
RANKS_DEF bool shares_by_name(void) {
  int version = 0;
  return ncclGetVersion(&version) != ncclSuccess || version < 23000;
}

RANKS_DEF void place(int rank) {
  char name[32];
  place_on_host(rank);
  if (getenv("TEST_SHARE") == NULL) return;
  ranks_setenv("LOCAL_RANK", 0);
  snprintf(name, sizeof name, "rank-%d", rank);
  if (shares_by_name()) setenv("NCCL_HOSTID", name, 1);
  else setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
}

RANKS_DEF int rank_process(int rank, void *p) {
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

RANKS_DEF cddp_result run(ranks_fn fn, void *arg, int n, const char *backend) {
  job j;
  memset(&j, 0, sizeof j);
  j.fn = fn;
  j.arg = arg;
  j.backend = backend;
  return cddp_spawn(rank_process, &j, n);
}

RANKS_DEF cddp_result run_on(const char *hosts, ranks_fn fn, void *arg, const char *backend) {
  cddp_result r;
  setenv("TEST_HOSTS", hosts, 1);
  r = run(fn, arg, (int)strlen(hosts), backend);
  unsetenv("TEST_HOSTS");
  return r;
}

/* --- device memory --- */

RANKS_DEF void *on_device(const void *host,
                          size_t bytes) { /* a copy of host; NULL: uninitialised */
  void *p = NULL;
  if (cudaMalloc(&p, bytes > 0 ? bytes : 1) != cudaSuccess) {
    fprintf(stderr, "cudaMalloc of %zu bytes failed\n", bytes);
    exit(1);
  }
  if (host != NULL) CHECK(cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
  return p;
}

RANKS_DEF void to_host(cddp_group *g, void *host, const void *device, size_t bytes) {
  cudaStream_t s = (cudaStream_t)cddp_stream(g);
  CHECK_OK(cddp_synchronize(g));
  CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, s) == cudaSuccess);
  CHECK(cudaStreamSynchronize(s) == cudaSuccess);
}

/* Ranks as threads of one process, with a GPU each. */
RANKS_DEF int with_device(cddp_group *g, void *arg) {
  const job *j = (const job *)arg;
  CHECK_OK(cddp_set_device(g, j->device, j->backend));
  return j->fn(g, j->arg);
}

RANKS_DEF cddp_result run_threads(ranks_fn fn, void *arg, int n, const char *backend) {
  job j;
  memset(&j, 0, sizeof j);
  j.fn = fn;
  j.arg = arg;
  j.backend = backend;
  j.device = "cuda";
  return cddp_run_threads(with_device, &j, n);
}

/* --- work on streams --- */

typedef struct fill {
  float *p, v;
  size_t n;
  bool times;
} fill;

RANKS_DEF void fill_run(void *arg) {
  const fill *f = (const fill *)arg;
  size_t i;
  for (i = 0; i < f->n; i++) f->p[i] = f->times ? f->p[i] * f->v : f->v;
}

RANKS_DEF void fill_on(cudaStream_t s, float *p, size_t n, float v, bool times) {
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

RANKS_DEF void check_fill(cddp_group *g, const float *p, size_t n, double want) {
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

RANKS_DEF void check_sum(cddp_group *g,
                         double want) { /* of what each rank of g gives: its own rank + 1 */
  float *x = (float *)cddp_alloc(g, 100 * sizeof *x);
  fill_on((cudaStream_t)cddp_stream(g), x, 100, (float)cddp_rank(g) + 1, false);
  CHECK_OK(cddp_all_reduce(g, x, 100, CDDP_F32, CDDP_SUM, NULL));
  check_fill(g, x, 100, want);
  cddp_free(g, x);
}

RANKS_DEF void model_of(cddp_group *g, cddp_param *p, int n,
                        size_t count) { /* weights side by side */
  float *w = (float *)cddp_alloc(g, (size_t)n * count * sizeof *w);
  int i;
  memset(p, 0, (size_t)n * sizeof *p);
  CHECK(cudaMemset(w, 0, (size_t)n * count * sizeof *w) == cudaSuccess);
  for (i = 0; i < n; i++) { /* the last first, as gradients lie */
    p[i].data = w + (size_t)(n - 1 - i) * count;
    p[i].count = count;
  }
}

/* A misused model fails its group too when they share NCCL's communicator. */
RANKS_DEF void check_misused(cddp_group *g, bool nccl) {
  CHECK_IS(cddp_synchronize(g), nccl ? CDDP_INVALID_ARGUMENT : CDDP_OK);
}

/* --- ranks that fail --- */

/* What happened to one rank; shared. */
typedef struct outcome {
  cddp_result result;
  double when; /* it learned of it */
  char text[512];
} outcome;

/* Before calls that end the model: cddp_error() is the last failed call's. */
RANKS_DEF void keep_error(outcome *f) {
  snprintf(f->text, sizeof f->text, "%s", f->result != CDDP_OK ? cddp_error() : "");
}

/* How ranks are made to fail. */
typedef struct scenario {
  int (*fn)(cddp_group *g, struct scenario *o, outcome *f);
  const char *device, *backend, *environment, *value; /* value: of the variable, set in all ranks */
  int victim;                                         /* the rank that does it */
  int way;
  double timeout_s, began;
  double fuse; /* seconds after which the victim dies, wherever it is */
  bool ends;   /* NCCL has let go of all communicators at the end */
  bool late;   /* an operation is to be late: see shorten */
  outcome outcomes[8];
} scenario;

RANKS_DEF int scenario_rank(int rank, void *p) {
  scenario *o = (scenario *)p;
  outcome *f = &o->outcomes[rank];
  cddp_group_desc d;
  cddp_group *g = NULL;
  memset(&d, 0, sizeof d);
  if (o->environment != NULL) setenv(o->environment, o->value, 1); /* place calls NCCL */
  place(rank);
  d.device = o->device != NULL ? o->device : "cuda";
  d.backend = o->backend;
  d.timeout_s = o->timeout_s;
  if (o->fuse > 0 && rank == o->victim) {
    struct itimerval t;
    memset(&t, 0, sizeof t);
    t.it_value.tv_usec = (suseconds_t)(o->fuse * 1e6);
    o->began = test_now() + o->fuse;
    setitimer(ITIMER_REAL, &t, NULL); /* SIGALRM */
  }
  f->text[0] = 0;
  f->result = cddp_init(&g, &d);
  if (f->result == CDDP_OK && o->fn != NULL && o->fn(g, o, f) != 0) return 1;
  f->when = test_now();
  if (f->text[0] == 0) keep_error(f);
  cddp_destroy(g);
  return (o->ends && hostnccl_communicators() != 0) || hostcuda_contexts() > 1;
}

/* Several at a time, of n ranks each: most of the time they wait. */
RANKS_DEF void run_scenarios(scenario *o, int count, int n) {
  pid_t pid[8][8];
  int status[8], k, i;
  for (k = 0; k < count; k++) {
    if (o[k].timeout_s == 0) o[k].timeout_s = 60;
    ranks_begin(scenario_rank, &o[k], n, pid[k]);
  }
  for (k = 0; k < count; k++) {
    const char *value = o[k].value != NULL ? o[k].value : "";
    ranks_join(pid[k], n, RANKS_WITHIN(20), status);
    for (i = 0; i < n; i++)
      if (status[i] == -1)
        test_fail(__FILE__, __LINE__, "rank %d of %d hung; %s", i, n, value);
      else if (WIFEXITED(status[i]) && WEXITSTATUS(status[i]) != 0)
        test_fail(__FILE__, __LINE__, "rank %d of %d failed its own checks; %s", i, n, value);
      else if (WIFSIGNALED(status[i]) && WTERMSIG(status[i]) != SIGKILL &&
               WTERMSIG(status[i]) != SIGALRM) /* of these victims die */
        test_fail(__FILE__, __LINE__, "rank %d of %d died of signal %d; %s", i, n,
                  WTERMSIG(status[i]), value);
  }
}

RANKS_DEF void run_scenario(scenario *o, int n) { run_scenarios(o, 1, n); }

RANKS_DEF void run_scenario_on(scenario *o, const char *hosts) {
  setenv("TEST_HOSTS", hosts, 1);
  run_scenario(o, (int)strlen(hosts));
  unsetenv("TEST_HOSTS");
  unsetenv("CDDP_HOST_ID"); /* the last rank's */
}

RANKS_DEF void check_outcome(const scenario *o, int rank, cddp_result want, const char *says) {
  const outcome *f = &o->outcomes[rank];
  test_count();
  if (f->result != want || strstr(f->text, says) == NULL)
    test_fail(__FILE__, __LINE__, "rank %d: %s \"%s\"; wanted %s with \"%s\"", rank,
              cddp_result_name(f->result), f->text, cddp_result_name(want), says);
}

RANKS_DEF scenario *scenario_new(int (*fn)(cddp_group *, scenario *, outcome *)) {
  scenario *o = (scenario *)ranks_shared(sizeof *o);
  o->fn = fn;
  return o;
}

/* A stream synchronised by the program itself, as programs do. */
RANKS_DEF cddp_result work_on(cddp_group *g, float *x, size_t count) {
  cddp_result r = cddp_all_reduce(g, x, count, CDDP_F32, CDDP_SUM, NULL);
  (void)cudaStreamSynchronize((cudaStream_t)cddp_stream(g));
  return r == CDDP_OK ? cddp_synchronize(g) : r;
}

#endif
