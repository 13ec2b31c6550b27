/* Failures on GPUs: each rank that lives returns the right error, soon, and can end.

   A `scenario` (nccl.h) makes ranks disagree, die, stop, leave or meet an error of CUDA or NCCL;
   its `outcome` per rank is compared with the error that the manual promises. The double
   (tests/gpu/hostcuda) has calls fail, operations stall and communicators never come up, as
   HOSTCUDA_FAIL and HOSTNCCL_FAIL say: test_injection has each function that cddp calls fail once.
   A rank that hangs is killed after 20 s and fails the test. */
#include "nccl.h"

static void test_no_device(void) {
  static const char *const wrong[] = {"01", "+1", "1x", " 1", "-1"};
  scenario *o = scenario_new(NULL);
  int i;
  if (!on_double("it changes the number of GPUs") || !own_gpus("it has ranks of several"))
    return;
  o->environment = "LOCAL_RANK";
  for (i = 0; i < 5; i++) {
    o->value = wrong[i];
    run_scenario(o, 1);
    check_outcome(o, 0, CDDP_INVALID_ARGUMENT, "LOCAL_RANK is ");
  }
  o->environment = "HOSTCUDA_DEVICES";
  o->value = "0";
  run_scenario(o, 2);
  for (i = 0; i < 2; i++) check_outcome(o, i, CDDP_CUDA, "finds no GPU");
  o->value = "no-driver";
  run_scenario(o, 1);
  check_outcome(o, 0, CDDP_CUDA, "the NVIDIA driver is missing or too old for CUDA ");
  o->value = "2";
  run_scenario(o, 3);
  for (i = 0; i < 3; i++)
    check_outcome(o, i, CDDP_INVALID_ARGUMENT,
                  "visible here are 2, from cuda:0 on: start at most 2");
  o->backend = "cpu"; /* they share */
  run_scenario(o, 3);
  for (i = 0; i < 3; i++) check_outcome(o, i, CDDP_OK, "");
  o->device = "cuda:5";
  run_scenario(o, 2);
  for (i = 0; i < 2; i++) check_outcome(o, i, CDDP_INVALID_ARGUMENT, "needs cuda:5, but");
  o->device = "cuda:1";
  o->backend = "nccl";
  run_scenario(o, 2);
  for (i = 0; i < 2; i++) {
    check_outcome(o, i, CDDP_INVALID_ARGUMENT, "rank 0 (pid ");
    check_outcome(o, i, CDDP_INVALID_ARGUMENT, "and rank 1 (pid ");
    check_outcome(o, i, CDDP_INVALID_ARGUMENT, "both have cuda:1");
  }
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1); /* as NCCL has it from 2.30 on */
  o->environment = "HOSTNCCL_VERSION";
  o->value = "22809";
  run_scenario(o, 2);
  for (i = 0; i < 2; i++) check_outcome(o, i, CDDP_INVALID_ARGUMENT, "both have cuda:1");
  o->value = "23000";
  run_scenario(o, 2);
  for (i = 0; i < 2; i++) check_outcome(o, i, CDDP_OK, "");
  setenv("HOSTCUDA_PARTS", "1", 1); /* which are no GPUs of their own to NCCL */
  run_scenario(o, 2);
  for (i = 0; i < 2; i++) check_outcome(o, i, CDDP_OK, "");
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  run_scenario(o, 2);
  for (i = 0; i < 2; i++) check_outcome(o, i, CDDP_NCCL, "Set NCCL_MULTI_RANK_GPU_ENABLE=1");
  unsetenv("HOSTCUDA_PARTS");
  run_scenario(o, 2);
  for (i = 0; i < 2; i++) check_outcome(o, i, CDDP_INVALID_ARGUMENT, "both have cuda:1");
  for (i = 0; i < 2; i++)
    check_outcome(o, i, CDDP_INVALID_ARGUMENT, "NCCL_MULTI_RANK_GPU_ENABLE=1");
  o->environment = NULL;
  run_scenario_on(o, "ab"); /* a cuda:1 each */
  for (i = 0; i < 2; i++) check_outcome(o, i, CDDP_OK, "");
  run_scenario_on(o, "baa");
  for (i = 0; i < 3; i++) check_outcome(o, i, CDDP_INVALID_ARGUMENT, "and rank 2 (pid ");
  o->device = "cuda:x";
  run_scenario(o, 1);
  check_outcome(o, 0, CDDP_INVALID_ARGUMENT, "device \"cuda:x\" with backend");
}

/* On the CPU this build needs no driver, nor a word with CUDA; kernels or not. */
static int without_driver(int rank, void *arg) {
  const cddp_kernels *kernels = inside_kernels();
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
  if (!on_double("CUDA has a driver")) return;
  int status[2];
  setenv("HOSTCUDA_DEVICES", "no-driver", 1);
  ranks_script(without_driver, NULL, 2, RANKS_WITHIN(20), status);
  unsetenv("HOSTCUDA_DEVICES");
  CHECK(ranks_exited_well(status, 2));
}

static int disagree(cddp_group *g, scenario *o, outcome *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  int i;
  for (i = 0; i < 3; i++) CHECK_OK(work_on(g, x, 10));
  (void)cddp_barrier(g); /* what follows disturbs nobody's first three */
  f->result = work_on(g, x, cddp_rank(g) == o->victim ? 11 : 10);
  if (f->result == CDDP_OK) f->result = work_on(g, x, 10);
  cddp_free(g, x);
  return 0;
}

static int disagree_memory(cddp_group *g, scenario *o, outcome *f) {
  float host[10], *x = (float *)cddp_alloc(g, 40);
  memset(host, 0, sizeof host);
  f->result = work_on(g, cddp_rank(g) == o->victim ? host : x, 10);
  if (f->result == CDDP_OK) f->result = work_on(g, x, 10);
  return 0;
}

/* After steps that all ranks take alike, in which no host waits for another, rank 1 has another
   learning rate, waits instead of stepping, or forgets a gradient. That breaks the group. */
static int disagree_step(cddp_group *g, scenario *o, outcome *f) {
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
  keep_error(f);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  CHECK_IS(cddp_barrier(g), f->result);
  return test_failures != 0;
}

/* Calls that NCCL does not see differ: ranks of different hosts learn of it where they meet. */
static int disagree_unseen(cddp_group *g, scenario *o, outcome *f) {
  float *x = (float *)cddp_alloc(g, 40);
  cddp_group *half = NULL;
  CHECK_OK(work_on(g, x, 10));
  (void)cddp_barrier(g); /* what follows disturbs nobody's first call */
  if (cddp_rank(g) == o->victim)
    f->result = cddp_all_reduce(g, x, 0, CDDP_F32, CDDP_SUM, NULL);
  else
    f->result = cddp_broadcast(g, x, 0, CDDP_F32, 0, NULL);
  if (f->result == CDDP_OK)
    f->result = o->victim % 2 != 0 ? cddp_barrier(g) : cddp_group_split(g, 0, 0, &half);
  return 0;
}

/* Models that differ: all ranks learn of it where they make them, and the group lives on. */
static int disagree_model(cddp_group *g, scenario *o, outcome *f) {
  bool odd = cddp_rank(g) == 1;
  cddp_param p[2];
  cddp_ddp *d = NULL;
  cddp_ddp_desc desc;
  memset(&desc, 0, sizeof desc);
  if (odd && o->victim == 1) desc.max_grad_norm = 1;
  model_of(g, p, 2, odd && o->victim == 0 ? 1001 : 1000);
  f->result = cddp_ddp_create(&d, g, p, odd && o->victim == 2 ? 1 : 2, &desc);
  keep_error(f);
  CHECK(d == NULL);
  check_sum(g, 3);
  CHECK_OK(cddp_barrier(g));
  return test_failures != 0;
}

static void test_mismatch(void) {
  static const char *const says[] = {"with other settings", "rank 1 called ddp_wait",
                                     "was not marked ready on rank 1"};
  scenario *o = scenario_new(disagree);
  int i, k;
  for (k = 0; k < 3; k++) {
    memset(o, 0, sizeof *o);
    o->fn = disagree_step;
    o->victim = k;
    run_scenario(o, 2);
    for (i = 0; i < 2; i++)
      check_outcome(o, i, k < 2 ? CDDP_MISMATCH : CDDP_INVALID_ARGUMENT, says[k]);
  }
  for (k = 0; k < 6; k++) {
    memset(o, 0, sizeof *o);
    o->fn = disagree_model;
    o->victim = k % 3;
    if (k < 3)
      run_scenario(o, 2);
    else
      run_scenario_on(o, "ab");
    for (i = 0; i < 2; i++) check_outcome(o, i, CDDP_MISMATCH, "the ranks' models differ");
  }
  memset(o, 0, sizeof *o);
  o->fn = disagree;
  o->victim = 1;
  run_scenario(o, 3);
  for (i = 0; i < 3; i++) {
    check_outcome(o, i, CDDP_MISMATCH, "call 4 of the group");
    check_outcome(o, i, CDDP_MISMATCH, "all_reduce(count 10, f32, sum)");
    check_outcome(o, i, CDDP_MISMATCH, "rank 1 called all_reduce(count 11, f32, sum) at tests/");
  }
  o->fn = disagree_memory;
  run_scenario(o, 2);
  for (i = 0; i < 2; i++) check_outcome(o, i, CDDP_MISMATCH, "host memory");
}

static int die_before(cddp_group *g, scenario *o, outcome *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  int i;
  for (i = 0; i < 3; i++) CHECK_OK(work_on(g, x, 10));
  (void)cddp_barrier(g); /* what follows disturbs nobody's first three */
  if (cddp_rank(g) == o->victim) {
    o->began = test_now();
    raise(SIGKILL);
  }
  if (o->late) inside_set_timeout(g, RANKS_WITHIN(0.05));
  f->result = work_on(g, x, 1000);
  return 0;
}

/* With no operation under way: the next one tells. */
static int die_idle(cddp_group *g, scenario *o, outcome *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  CHECK_OK(work_on(g, x, 10));
  (void)cddp_barrier(g);
  if (cddp_rank(g) == o->victim) {
    o->began = test_now();
    raise(SIGKILL);
  }
  while (!inside_rank_gone(g, o->victim)) ranks_sleep(0.001);
  f->result = work_on(g, x, 1000);
  return 0;
}

static int die_in_step(cddp_group *g, scenario *o, outcome *f) {
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
  keep_error(f);
  f->when = test_now();
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  return 0;
}

/* Between two shards of a step: cddp_ddp_step tells of the loss, not of the missing shards. */
static int die_in_shards(cddp_group *g, scenario *o, outcome *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  int step, shard = -1;
  cddp_ddp_desc desc;
  cddp_ddp *d = NULL;
  cddp_param p;
  memset(&p, 0, sizeof p);
  memset(&desc, 0, sizeof desc);
  p.data = cddp_alloc(g, 40000);
  p.count = 10000;
  desc.shards = 2 * cddp_world_size(g);
  f->result = cddp_ddp_create(&d, g, &p, 1, &desc);
  for (step = 0; f->result == CDDP_OK && step < 2; step++) {
    CHECK(cddp_ddp_next_shard(d, &shard));
    if (step == 1 && cddp_rank(g) == o->victim) {
      o->began = test_now();
      raise(SIGKILL);
    }
    CHECK_OK(cddp_ddp_ready(d, 0));
    if (step == 1) { /* the second shard is left */
      while (!inside_rank_gone(g, o->victim)) ranks_sleep(0.001);
      CHECK_IS(work_on(g, x, 10), CDDP_PEER_LOST);
    } else {
      CHECK(cddp_ddp_next_shard(d, &shard));
      CHECK_OK(cddp_ddp_ready(d, 0));
    }
    f->result = cddp_ddp_wait(d);
  }
  keep_error(f);
  f->when = test_now();
  cddp_ddp_destroy(d);
  return test_failures != 0;
}

/* While another rank's program waits in cudaFree, with CUDA's lock, for what will never end. */
static int die_at_free(cddp_group *g, scenario *o, outcome *f) {
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

/* Rank 1 is stopped, and NCCL waits for it on rank 0 without end, but cddp for NCCL only
   inside_await_end_s. */
static int stop_there(cddp_group *g, scenario *o, outcome *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  (void)o;
  inside_await_end_s = 0.2;
  CHECK_OK(work_on(g, x, 10));
  (void)cddp_barrier(g);
  if (cddp_rank(g) == 1) {
    raise(SIGSTOP);
    while (true) ranks_sleep(1);
  }
  inside_set_timeout(g, RANKS_WITHIN(0.05));
  f->result = work_on(g, x, 10);
  cddp_free(g, x);
  return 0;
}

static void test_stopped(void) {
  scenario *o = scenario_new(stop_there);
  pid_t pid[2];
  int status[2];
  o->timeout_s = 60;
  ranks_begin(scenario_rank, o, 2, pid);
  ranks_join(pid, 1, RANKS_WITHIN(10), status);
  CHECK_EQ(status[0], 0);
  check_outcome(o, 0, CDDP_TIMEOUT, "timed out after");
  CHECK_EQ(kill(pid[1], SIGKILL), 0);
  ranks_join(pid + 1, 1, RANKS_WITHIN(10), status + 1);
}

/* Rank 1 dies while communicators connect. */
static void lose_at_start(scenario *o) {
  if (!on_double("no call of NCCL waits on demand")) return;
  memset(o, 0, sizeof *o);
  o->victim = 1;
  o->fuse = RANKS_SLOW ? 0.9 : 0.3; /* on a busy machine it dies before they do: no matter */
  o->environment = "HOSTNCCL_FAIL";
  o->value = "init:1@1";
}

static int leave_early(cddp_group *g, scenario *o, outcome *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  CHECK_OK(work_on(g, x, 10));
  if (cddp_rank(g) != o->victim) f->result = work_on(g, x, 10);
  return 0;
}

static void test_lost(void) {
  int (*const ways[])(cddp_group *, scenario *, outcome *) = {die_before, die_idle, die_in_step,
                                                              die_at_free, die_in_shards};
  scenario *o = scenario_new(NULL);
  int n, i, k;
  for (k = 0; k < 5; k++) {
    for (n = 2; n <= MOST_RANKS; n *= 2) {
      if (n == MOST_RANKS && RANKS_SLOW) break;
      memset(o, 0, sizeof *o);
      o->fn = ways[k];
      o->victim = 1;
      run_scenario(o, n);
      for (i = 0; i < n; i++) {
        if (i == 1) continue;
        check_outcome(o, i, CDDP_PEER_LOST, "rank 1 (pid ");
        CHECK(o->outcomes[i].when - o->began < RANKS_WITHIN(2));
      }
    }
  }
  memset(o, 0, sizeof *o);
  o->fn = leave_early;
  run_scenario(o, 2);
  check_outcome(o, 1, CDDP_PEER_LOST, "rank 0 (pid ");
  check_outcome(o, 1, CDDP_PEER_LOST, "left the group");
  lose_at_start(o);
  if (o->environment == NULL) return;
  run_scenario(o, 3);
  check_outcome(o, 0, CDDP_PEER_LOST, "rank 1 (pid ");
  check_outcome(o, 2, CDDP_PEER_LOST, "rank 1 (pid ");
  CHECK(o->outcomes[0].when - o->began < RANKS_WITHIN(2));
}

/* The last rank leaves; rank 0 waits for a message from it. way: 1: they have exchanged messages
   before, 2: with a handle, 4: the rank sends one message before it leaves, which arrives. */
enum { LEFT_KNOWN = 1, LEFT_HANDLE = 2, LEFT_SENT = 4, LEFT_WAYS = 8 };
static int left_message(cddp_group *g, scenario *o, outcome *f) {
  enum { COUNT = 100000 };
  float *x = (float *)cddp_alloc(g, 4 * COUNT);
  size_t counts[] = {1, COUNT};
  int last = cddp_world_size(g) - 1, k;
  cddp_work *w = NULL;
  check_sum(g, (last + 1) * (last + 2) / 2.0);
  for (k = 0; k < 4 && (o->way & LEFT_KNOWN); k++) {
    if (cddp_rank(g) == (k % 2 != 0 ? 0 : last))
      CHECK_OK(cddp_send(g, x, counts[k / 2], CDDP_F32, k % 2 != 0 ? last : 0, 0, NULL));
    if (cddp_rank(g) == (k % 2 != 0 ? last : 0))
      CHECK_OK(cddp_recv(g, x, counts[k / 2], CDDP_F32, k % 2 != 0 ? 0 : last, 0, NULL));
  }
  CHECK_OK(cddp_barrier(g));
  if (cddp_rank(g) == last && (o->way & LEFT_SENT)) {
    fill_on((cudaStream_t)cddp_stream(g), x, COUNT, 7, false);
    CHECK_OK(cddp_send(g, x, COUNT, CDDP_F32, 0, 0, NULL));
  }
  if (cddp_rank(g) != 0) return 0;
  if (o->way & LEFT_SENT) {
    ranks_sleep(0.05);
    CHECK_OK(cddp_recv(g, x, COUNT, CDDP_F32, last, 0, NULL));
    check_fill(g, x, COUNT, 7);
  } else if (o->way & LEFT_HANDLE) { /* else it may leave before or after rank 0 waits */
    while (!inside_rank_gone(g, last)) ranks_sleep(0.001);
  }
  o->began = test_now();
  f->result = cddp_recv(g, x, 10, CDDP_F32, last, 0, o->way & LEFT_HANDLE ? &w : NULL);
  if (w != NULL) f->result = cddp_wait(w);
  if (f->result == CDDP_OK) f->result = cddp_synchronize(g);
  return test_failures != 0;
}

/* Rank 1 sends by a graph that it launches twice, and leaves; rank 0 receives without a graph. That
   rank 1 has fewer calls is no loss to rank 0, which waits for rank 2. */
static int left_graph(cddp_group *g, scenario *o, outcome *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  int me = cddp_rank(g), k;
  cudaGraphExec_t exec = NULL;
  cudaGraph_t graph = NULL;
  cudaStream_t s;
  (void)o;
  check_sum(g, 6);
  if (me == 1) {
    CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
    cddp_set_stream(g, s);
    CHECK_OK(cddp_send(g, x, 10, CDDP_F32, 0, 0, NULL)); /* connects the ranks */
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK_OK(cddp_send(g, x, 10, CDDP_F32, 0, 0, NULL));
    CHECK(cudaStreamEndCapture(s, &graph) == cudaSuccess);
    CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    for (k = 0; k < 2; k++) CHECK(cudaGraphLaunch(exec, s) == cudaSuccess);
    CHECK_OK(cddp_synchronize(g));
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cddp_set_stream(g, NULL);
    cudaStreamDestroy(s);
  }
  for (k = 0; me == 0 && k < 3; k++) CHECK_OK(cddp_recv(g, x, 10, CDDP_F32, 1, 0, NULL));
  if (me == 1) return test_failures != 0;
  while (!inside_rank_gone(g, 1)) ranks_sleep(0.001);
  if (me == 2) ranks_sleep(0.2);
  f->result = me == 0 ? cddp_recv(g, x, 10, CDDP_F32, 2, 0, NULL)
                      : cddp_send(g, x, 10, CDDP_F32, 0, 0, NULL);
  if (f->result == CDDP_OK) f->result = cddp_synchronize(g);
  return test_failures != 0;
}

static void test_left_messages(void) {
  scenario *o = (scenario *)ranks_shared(LEFT_WAYS * sizeof *o);
  int n, k;
  for (n = 2; n <= 4; n++) {
    memset(o, 0, LEFT_WAYS * sizeof *o);
    for (k = 0; k < LEFT_WAYS; k++) o[k].fn = left_message, o[k].way = k;
    run_scenarios(o, LEFT_WAYS, n);
    for (k = 0; k < LEFT_WAYS; k++) {
      check_outcome(&o[k], 0, CDDP_PEER_LOST, "left the group (cddp_destroy)");
      CHECK(o[k].outcomes[0].when - o[k].began < RANKS_WITHIN(3));
    }
  }
  memset(o, 0, sizeof *o);
  o->fn = left_graph;
  run_scenario(o, 3);
  for (k = 0; k < 3; k++) check_outcome(o, k, CDDP_OK, "");
  munmap(o, LEFT_WAYS * sizeof *o);
}

/* The victim does not come to the others' second operation. */
static int stay_away(cddp_group *g, scenario *o, outcome *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  CHECK_OK(work_on(g, x, 10));
  (void)cddp_barrier(g); /* what follows disturbs nobody's first call */
  inside_set_timeout(g, RANKS_WITHIN(0.05));
  while (cddp_rank(g) == o->victim && f->result == CDDP_OK) {
    ranks_sleep(0.001);
    f->result = inside_check_group(g);
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
  scenario *o = scenario_new(NULL);
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
      run_scenario_on(o, cases[c].hosts);
      snprintf(says, sizeof says, "rank %d (pid ", o->victim);
      for (i = 0; i < (int)strlen(cases[c].hosts); i++) {
        if (i == o->victim && way < 2) continue;
        if (way < 2)
          check_outcome(o, i, CDDP_PEER_LOST, says);
        else if (way == 2)
          check_outcome(o, i, CDDP_MISMATCH, "ranks disagree in ");
        else
          check_outcome(o, i, CDDP_TIMEOUT, "latest is all_reduce(count 10, f32, sum) at tests/");
        if (way < 2) CHECK(o->outcomes[i].when - o->began < RANKS_WITHIN(2));
      }
    }
  memset(o, 0, sizeof *o);
  o->fn = disagree_step; /* in the learning rate: a cddp_ddp's calls count as the group's */
  run_scenario_on(o, "ab");
  for (i = 0; i < 2; i++) check_outcome(o, i, CDDP_MISMATCH, "and its cddp_ddps");
  lose_at_start(o);
  if (o->environment == NULL) return;
  run_scenario_on(o, "aba");
  for (i = 0; i < 3; i += 2) check_outcome(o, i, CDDP_PEER_LOST, "rank 1 (pid ");
}

/* A device that fails on rank 1, in an operation that rank 0 never comes to. */
static int fault(cddp_group *g, scenario *o, outcome *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  (void)o;
  f->result = cddp_rank(g) == 0 ? cddp_barrier(g) : work_on(g, x, 10);
  return 0;
}

/* Ranks disagree while NCCL's thread has not put the operation on its stream yet, which cudaFree
   would wait for. The call returns when no kernel will touch its memory any more. */
static int free_at_once(cddp_group *g, scenario *o, outcome *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  (void)o;
  CHECK_OK(work_on(g, x, 10));
  hostnccl_late();
  f->result = cddp_all_reduce(g, x, cddp_rank(g) == 0 ? 10 : 11, CDDP_F32, CDDP_SUM, NULL);
  cddp_free(g, x);
  return test_failures != 0;
}

/* A communicator is aborted when the thread that is inside NCCL has come out. */
static int abort_waits(cddp_group *g, scenario *o, outcome *f) {
  double start, now;
  (void)o;
  inside_enter_nccl(g);
  inside_meet(g); /* before either rank breaks the group */
  start = test_now();
  inside_break(g, "a test breaks the group");
  for (now = start; now < start + 0.1; now = test_now()) {
    bool called = hostcuda_calls("ncclCommAbort") != 0;
    CHECK(!called || test_now() - start > 0.9 * inside_calls_s);
    ranks_sleep(0.002);
  }
  inside_leave_nccl(g);
  while (hostcuda_calls("ncclCommAbort") == 0 && test_now() - start < RANKS_WITHIN(10))
    ranks_sleep(0.002);
  CHECK_EQ(hostcuda_calls("ncclCommAbort"), 1);
  f->result = inside_check_group(g);
  return test_failures != 0;
}

static void test_device_failures(void) {
  scenario *o = scenario_new(fault);
  int i;
  o->environment = "HOSTCUDA_FAIL";
  o->value = "cudaSetDevice:1:46@1"; /* a GPU in the mode EXCLUSIVE_PROCESS */
  run_scenario(o, 2);
  for (i = 0; i < 2; i++)
    check_outcome(o, i, CDDP_CUDA, "another process uses the GPU, and its compute mode allows one");
  o->value = "cudaEventQuery:1:700@1";
  run_scenario(o, 2);
  for (i = 0; i < 2; i++)
    check_outcome(o, i, CDDP_CUDA,
                  getenv("TEST_SHARE") != NULL ? "rank 1: cuda:0 failed during the group's"
                                               : "rank 1: cuda:1 failed during the group's");
  memset(o, 0, sizeof *o);
  o->fn = free_at_once;
  run_scenario(o, 2);
  for (i = 0; i < 2; i++) check_outcome(o, i, CDDP_MISMATCH, "ranks disagree");
  memset(o, 0, sizeof *o);
  o->fn = abort_waits;
  run_scenario(o, 2);
  for (i = 0; i < 2; i++) check_outcome(o, i, CDDP_ABORTED, "a test breaks the group");
}

/* A checkpoint of sharded states: every rank's copies are counted, then one of them fails. */
static uint64_t *save_copies; /* shared: [rank][0]: copies before cddp_save, [1]: after it */
static int save_sharded(cddp_group *g, scenario *o, outcome *f) {
  const char *tmp = getenv("TMPDIR");
  cddp_checkpoint_desc file;
  cddp_adamw_desc rule;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cddp_param p[3];
  char path[300];
  int i;
  memset(&rule, 0, sizeof rule);
  memset(&file, 0, sizeof file);
  model_of(g, p, 3, 5000);
  for (i = 0; i < 3; i++) p[i].name = i == 0 ? "a" : i == 1 ? "b" : "c";
  f->result = cddp_ddp_create(&d, g, p, 3, NULL);
  rule.ddp = d;
  rule.sharded_states = true;
  if (f->result == CDDP_OK) f->result = cddp_adamw_create(&s, p, 3, &rule);
  for (i = 2; f->result == CDDP_OK && i >= 0; i--) f->result = cddp_ddp_ready(d, i);
  if (f->result == CDDP_OK) f->result = cddp_ddp_step(d, s);
  if (f->result == CDDP_OK) f->result = cddp_synchronize(g);
  file.optim = s;
  snprintf(path, sizeof path, "%.200s/cddp-save-%d-%d", tmp != NULL ? tmp : "/tmp", (int)getppid(),
           o->way);
  if (o->value == NULL) save_copies[2 * cddp_rank(g)] = hostcuda_calls("cudaMemcpyAsync");
  o->began = test_now();
  if (f->result == CDDP_OK) f->result = cddp_save(g, path, p, 3, &file);
  f->when = test_now();
  if (o->value == NULL) save_copies[2 * cddp_rank(g) + 1] = hostcuda_calls("cudaMemcpyAsync");
  keep_error(f);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  (void)unlink(path);
  return 0;
}

static void check_failed_saves(int n, const char *backend, int stride) {
  enum { MOST = 40, AT_ONCE = 8 };
  scenario *o = (scenario *)ranks_shared(MOST * sizeof *o);
  char values[MOST][64], says[32];
  int count = 0, rank, i, k;
  uint64_t c;
  save_copies = (uint64_t *)ranks_shared(16 * sizeof *save_copies);
  o[0].fn = save_sharded;
  o[0].backend = backend;
  run_scenario(&o[0], n);
  for (i = 0; i < n; i++) check_outcome(&o[0], i, CDDP_OK, "");
  for (rank = 0; rank < n; rank++)
    for (c = save_copies[2 * rank] + 1; c <= save_copies[2 * rank + 1] && count < MOST;
         c += (uint64_t)stride) {
      memset(&o[count], 0, sizeof *o);
      snprintf(values[count], sizeof values[0], "cudaMemcpyAsync:%d:700@%d", (int)c, rank);
      o[count].fn = save_sharded;
      o[count].backend = backend;
      o[count].environment = "HOSTCUDA_FAIL";
      o[count].value = values[count];
      o[count].victim = rank;
      o[count].way = count;
      count++;
    }
  CHECK(count >= n);
  for (k = 0; k < count; k += AT_ONCE)
    run_scenarios(&o[k], count - k < AT_ONCE ? count - k : AT_ONCE, n);
  for (k = 0; k < count; k++) {
    snprintf(says, sizeof says, "rank %d", o[k].victim);
    for (i = 0; i < n; i++) {
      check_outcome(&o[k], i, CDDP_CUDA, i == o[k].victim ? "cudaMemcpyAsync" : says);
      CHECK(o[k].outcomes[i].when - o[k].began < RANKS_WITHIN(5));
    }
  }
  munmap(o, MOST * sizeof *o);
}

static void test_failed_saves(void) {
  check_failed_saves(2, NULL, RANKS_SLOW ? 4 : 1);
  if (RANKS_SLOW) return;
  check_failed_saves(3, NULL, 4);
  check_failed_saves(2, "cpu", 4);
}

/* On rank 1 CUDA does not tell where a buffer is, and the rank lives on: rank 0 does not wait for
   it until timeout_s. Without o->value: counts the calls that can fail. */
static uint64_t *asked; /* shared: on rank 1, before and after the call */
enum { ASKS_BUFFERS, ASKS_STATES, ASKS_REDUCE, ASKS };
static int memory_unknown(cddp_group *g, scenario *o, outcome *f) {
  int me = cddp_rank(g), way = o->way % ASKS;
  cddp_ddp_desc desc;
  cddp_ddp *d = NULL;
  cddp_param p[2], b[2];
  double until;
  memset(&desc, 0, sizeof desc);
  model_of(g, p, 2, 100);
  model_of(g, b, 2, 100);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  desc.buffers = b;
  desc.buffer_count = 2;
  CHECK_OK(cddp_ddp_create(&d, g, p, 2, &desc));
  CHECK_OK(cddp_barrier(g));
  o->began = test_now();
  if (me == 1 && o->value == NULL) asked[0] = hostcuda_calls("cudaPointerGetAttributes");
  f->result = way == ASKS_BUFFERS  ? cddp_ddp_sync_buffers(d)
              : way == ASKS_STATES ? cddp_ddp_gather_states(d, b)
                                   : cddp_all_reduce(g, b[0].data, 100, CDDP_F32, CDDP_SUM, NULL);
  if (me == 1 && o->value == NULL) asked[1] = hostcuda_calls("cudaPointerGetAttributes");
  if (f->result == CDDP_OK) f->result = cddp_synchronize(g);
  keep_error(f);
  f->when = test_now();
  for (until = f->when + RANKS_WITHIN(3); o->outcomes[!me].when == 0 && test_now() < until;)
    ranks_sleep(0.001);
  cddp_ddp_destroy(d);
  return test_failures != 0;
}

static void test_memory_unknown(void) {
  enum { MOST = 8 };
  scenario *o = (scenario *)ranks_shared(MOST * sizeof *o);
  char values[MOST][64];
  int count, failed, i, k;
  uint64_t c;
  if (!on_double("cudaPointerGetAttributes does not fail on demand")) return;
  asked = (uint64_t *)ranks_shared(2 * sizeof *asked);
  for (k = 0; k < 2 * ASKS; k++) {
    const char *backend = k < ASKS ? NULL : "cpu";
    memset(o, 0, MOST * sizeof *o);
    o[0].fn = memory_unknown;
    o[0].backend = backend;
    o[0].way = k;
    run_scenario(&o[0], 2);
    for (i = 0; i < 2; i++) check_outcome(&o[0], i, CDDP_OK, "");
    memset(o, 0, sizeof *o);
    for (count = 0, c = asked[0] + 1; c <= asked[1] && count < MOST; c++, count++) {
      snprintf(values[count], sizeof values[0], "cudaPointerGetAttributes:%d:700@1", (int)c);
      o[count].fn = memory_unknown;
      o[count].backend = backend;
      o[count].environment = "HOSTCUDA_FAIL";
      o[count].value = values[count];
      o[count].way = k;
    }
    run_scenarios(o, count, 2);
    for (failed = i = 0; i < count; i++) {
      const outcome *f = &o[i].outcomes[1]; /* OK: cddp tries again; not CUDA: NCCL has asked */
      failed += f->result == CDDP_CUDA;
      if (f->result != CDDP_OK) check_outcome(&o[i], 0, f->result, "rank 1: ");
    }
    CHECK(failed > 0);
  }
  munmap(o, MOST * sizeof *o);
  munmap(asked, 2 * sizeof *asked);
}

/* The copy of the rank's own share fails: all ranks learn of CUDA's error. */
static int own_share(cddp_group *g, scenario *o, outcome *f) {
  size_t counts[] = {100, 100, 100};
  float *x = (float *)cddp_alloc(g, 4000), *y = (float *)cddp_alloc(g, 4000);
  f->result = o->way == 0   ? cddp_gather(g, x, y, 100, CDDP_F32, 1, NULL)
              : o->way == 1 ? cddp_scatter(g, x, y, 100, CDDP_F32, 1, NULL)
              : o->way == 2 ? cddp_all_to_all(g, x, y, 100, CDDP_F32, NULL)
              : o->way == 3 ? cddp_all_to_all_v(g, x, counts, y, counts, CDDP_F32, NULL)
                            : cddp_all_gather_v(g, x, y, counts, CDDP_F32, NULL);
  if (f->result == CDDP_OK) f->result = cddp_synchronize(g);
  return test_failures != 0;
}

static void test_own_shares(void) {
  enum { WAYS = 5 };
  scenario *o = (scenario *)ranks_shared(WAYS * sizeof *o);
  int n, i, k;
  for (n = 2; n <= 3; n++) {
    memset(o, 0, WAYS * sizeof *o);
    for (k = 0; k < WAYS; k++) {
      o[k].fn = own_share;
      o[k].way = k;
      o[k].environment = "HOSTCUDA_FAIL";
      o[k].value = "cudaMemcpyAsync:1:700@1";
    }
    run_scenarios(o, WAYS, n);
    for (k = 0; k < WAYS; k++)
      for (i = 0; i < n; i++)
        check_outcome(&o[k], i, CDDP_CUDA, "rank 1: cudaMemcpyAsync: an illegal memory access");
  }
  munmap(o, WAYS * sizeof *o);
}

/* NCCL_COMM_BLOCKING=1 in a file that NCCL reads. */
static void test_blocking_setting(void) {
  const char *tmp = getenv("TMPDIR");
  scenario *o = scenario_new(leave_early);
  char path[300];
  FILE *file;
  int n, i;
  snprintf(path, sizeof path, "%.200s/cddp-nccl-%d.conf", tmp != NULL ? tmp : "/tmp",
           (int)getpid());
  file = fopen(path, "w");
  CHECK(file != NULL && fputs("# a comment\nNCCL_COMM_BLOCKING=1\n", file) >= 0);
  if (file != NULL) fclose(file);
  for (n = 2; n <= 3; n++) {
    memset(o, 0, sizeof *o);
    o->fn = leave_early;
    o->environment = "NCCL_CONF_FILE";
    o->value = path;
    run_scenario(o, n);
    for (i = 0; i < n; i++)
      check_outcome(o, i, CDDP_INVALID_ARGUMENT, "NCCL_COMM_BLOCKING=1 makes NCCL's calls block");
  }
  (void)unlink(path);
}

/* A group without a device, in a program with CUDA, refuses memory that the host cannot read. Where
   the processor has no protection keys, pages without access stand in for device memory. */
static int device_memory(int rank, void *arg) {
  void *own = mmap(NULL, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  char *bad = (char *)(arg != NULL ? hostcuda_unreadable(1 << 20) : own);
  float *good, host[100] = {0};
  size_t counts[] = {1, 1, 1};
  cddp_group *g = NULL;
  cddp_work *w = NULL;
  cddp_ddp_desc desc;
  cddp_ddp *d = NULL;
  cddp_param p[2];
  int peer, k;
  test_failures = 0;
  if (bad == NULL) bad = (char *)own;
  CHECK_OK(cddp_init(&g, NULL));
  peer = (rank + 1) % cddp_world_size(g);
  good = (float *)cddp_alloc(g, 4000);
  for (k = 0; k < 12; k++) {
    size_t n = k % 2 == 0 ? 1 : 30000;
    void *at = k == 11 ? bad + (1 << 20) - 4 : bad; /* the last word before a guard page */
    cddp_result r =
        k < 2    ? cddp_all_reduce(g, at, n, CDDP_F32, CDDP_SUM, NULL)
        : k < 4  ? cddp_all_reduce(g, at, n, CDDP_F32, CDDP_SUM, &w)
        : k == 4 ? cddp_broadcast(g, at, n, CDDP_F32, 0, NULL)
        : k == 5 ? cddp_all_gather(g, host, at, 1, CDDP_F32, NULL)
        : k == 6 ? cddp_reduce_scatter(g, at, host, 1, CDDP_F32, CDDP_SUM, NULL)
        : k == 7 ? cddp_all_to_all(g, at, host, 1, CDDP_F32, NULL)
        : k == 8 ? cddp_all_gather_v(g, at, host, counts, CDDP_F32, NULL)
        : k == 9 ? cddp_send(g, at, n, CDDP_F32, peer, 0, NULL)
        : k == 10 ? cddp_recv(g, at, n, CDDP_F32, peer, 0, NULL)
                  : cddp_all_reduce(g, at, 1, CDDP_F32, CDDP_SUM, NULL);
    CHECK_IS(r, CDDP_INVALID_ARGUMENT);
    CHECK(strstr(cddp_error(), "device \"cuda\"") != NULL && w == NULL);
  }
  for (k = 0; k < 3; k++) { /* weights, gradient, buffer */
    memset(p, 0, sizeof p);
    memset(&desc, 0, sizeof desc);
    p[0].data = k == 0 ? (void *)bad : (void *)good;
    p[0].grad = k == 1 ? bad : NULL;
    p[0].count = 100;
    p[1].data = bad;
    p[1].count = 10;
    desc.buffers = k == 2 ? &p[1] : NULL;
    desc.buffer_count = k == 2;
    CHECK_IS(cddp_ddp_create(&d, g, p, 1, &desc), CDDP_INVALID_ARGUMENT);
    CHECK(strstr(cddp_error(), k == 1 ? "grad of" : "data of") != NULL);
    CHECK(strstr(cddp_error(), "device \"cuda\"") != NULL);
  }
  memset(p, 0, sizeof p); /* the group is as before */
  p[0].data = good;
  p[0].count = 100;
  CHECK_OK(cddp_ddp_create(&d, g, p, 1, NULL));
  cddp_ddp_destroy(d);
  host[0] = 1;
  CHECK_OK(cddp_all_reduce(g, host, 1, CDDP_F32, CDDP_SUM, NULL));
  CHECK_EQ((int)host[0], cddp_world_size(g));
  cddp_destroy(g);
  munmap(own, 1 << 20);
  return test_failures != 0;
}

static void test_device_memory(void) {
  int n;
  for (n = 1; n <= 3; n++) {
    CHECK_OK(cddp_spawn(device_memory, NULL, n));
    CHECK_OK(cddp_spawn(device_memory, (void *)1, n));
  }
}

/* One operation never ends, and others follow all the time: its deadline is its own. */
static int keep_going(cddp_group *g, scenario *o, outcome *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  double start = test_now();
  (void)o;
  inside_set_timeout(g, RANKS_WITHIN(0.05));
  while (f->result == CDDP_OK && test_now() < start + RANKS_WITHIN(5)) {
    f->result = cddp_all_reduce(g, x, 10, CDDP_F32, CDDP_SUM, NULL);
    ranks_sleep(0.01);
  }
  return 0;
}

static int split_in_two(cddp_group *g, scenario *o, outcome *f) {
  cddp_group *half = NULL;
  (void)o;
  f->result = cddp_group_split(g, cddp_rank(g) % 2, 0, &half);
  cddp_destroy(half);
  return 0;
}

static void test_stall(void) {
  static const struct {
    int (*fn)(cddp_group *, scenario *, outcome *);
    const char *value, *says;
    cddp_result result;
  } cases[] = {{die_before, "stall:12@1", "has not ended", CDDP_TIMEOUT},
               {keep_going, "stall:12@1", "has not ended", CDDP_TIMEOUT},
               {die_before, "init:1@1", "ncclCommInitRankConfig", CDDP_TIMEOUT},
               {die_before, "error:12@0", "injected asynchronous error", CDDP_NCCL},
               {split_in_two, "init:2@1", "ncclCommInitRankConfig", CDDP_TIMEOUT}};
  enum { CASES = sizeof cases / sizeof *cases, HALVES = CASES - 1 };
  scenario *o = (scenario *)ranks_shared(CASES * sizeof *o);
  int i, k;
  if (!on_double("no call of NCCL stalls on demand")) return;
  for (k = 0; k < CASES; k++) {
    o[k].fn = cases[k].fn;
    o[k].victim = -1;
    o[k].late = cases[k].result == CDDP_TIMEOUT;
    o[k].environment = "HOSTNCCL_FAIL";
    o[k].value = cases[k].value;
    if (strncmp(o[k].value, "init", 4) == 0) o[k].timeout_s = RANKS_WITHIN(0.3);
  }
  run_scenarios(o, HALVES, 3);
  for (k = 0; k < HALVES; k++)
    for (i = 0; i < 3; i++) check_outcome(&o[k], i, cases[k].result, cases[k].says);
  run_scenario(&o[HALVES], 4); /* the communicator of one of the halves */
  for (i = 0; i < 4; i++)
    check_outcome(&o[HALVES], i, i % 2 != 0 ? CDDP_TIMEOUT : CDDP_OK,
                  i % 2 != 0 ? cases[k].says : "");
  munmap(o, CASES * sizeof *o);
}

/* Two steps with gradients that cddp copies to its own memory. The program ignores what
   cddp_ddp_ready returns. */
static int copied_gradients(cddp_group *g, scenario *o, outcome *f) {
  cddp_sgd_desc rule;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cddp_param p[2];
  int step, i;
  (void)o;
  memset(&rule, 0, sizeof rule);
  rule.lr = 1;
  model_of(g, p, 2, 100);
  for (i = 0; i < 2; i++) p[i].grad = on_device(NULL, 400);
  f->result = cddp_ddp_create(&d, g, p, 2, NULL);
  if (f->result == CDDP_OK) f->result = cddp_sgd_create(&s, p, 2, &rule);
  for (step = 0; step < 2 && f->result == CDDP_OK; step++) {
    for (i = 1; i >= 0; i--) (void)cddp_ddp_ready(d, i);
    f->result = cddp_ddp_step(d, s);
    if (f->result == CDDP_OK) f->result = cddp_synchronize(g);
  }
  keep_error(f);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  for (i = 0; i < 2; i++) cudaFree(p[i].grad);
  return 0;
}

/* Each copy fails on rank 1: the step fails, on both ranks, and soon. */
static void test_failed_copies(void) {
  enum { CASES = 12 };
  scenario *o = (scenario *)ranks_shared(CASES * sizeof *o);
  char value[CASES][48];
  int k, failed = 0;
  for (k = 0; k < CASES; k++) {
    o[k].fn = copied_gradients;
    o[k].victim = -1;
    o[k].backend = k % 2 != 0 ? "cpu" : NULL;
    o[k].timeout_s = 60;
    o[k].environment = "HOSTCUDA_FAIL";
    snprintf(value[k], sizeof value[k], "cudaMemcpyAsync:%d:1@1", 1 + k / 2);
    o[k].value = value[k];
  }
  for (k = 0; k < CASES; k += 4) run_scenarios(&o[k], 4, 2);
  for (k = 0; k < CASES; k++) {
    CHECK((o[k].outcomes[0].result == CDDP_OK) == (o[k].outcomes[1].result == CDDP_OK));
    if (o[k].outcomes[1].result == CDDP_OK) continue;
    check_outcome(&o[k], 1, CDDP_CUDA, "cudaMemcpyAsync");
    failed++;
  }
  CHECK(failed > 3);
  munmap(o, CASES * sizeof *o);
}

/* A run through everything; any call may fail in it. */
static int everything(cddp_group *g, scenario *o, outcome *f) {
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
  keep_error(f);
  cddp_destroy(half);
  if (f->result == CDDP_OK) die_in_step(g, o, f);
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
  scenario *all = (scenario *)ranks_shared(CASES * sizeof *all), *o = all;
  int i, k, n = 0, rank;
  bool names;
  for (i = 0; i < CASES; i += RANKS_SLOW ? 3 : 1, n++) {
    o[n].fn = everything;
    o[n].victim = -1;
    o[n].environment = "HOSTCUDA_FAIL";
    o[n].value = cases[i].fail;
    o[n].ends = cases[i].result == CDDP_OK;
  }
  for (k = 0; k < n; k += AT_ONCE) run_scenarios(&o[k], n - k < AT_ONCE ? n - k : AT_ONCE, 2);
  for (i = 0; i < CASES; i += RANKS_SLOW ? 3 : 1, o++) {
    rank = cases[i].fail[strlen(cases[i].fail) - 1] - '0';
    test_count();
#ifdef HOSTCUDA
    names = true;
#else
    names = strncmp(cases[i].fail, "nccl", 4) != 0; /* the double's own texts name its functions */
#endif
    if (o->outcomes[rank].result != cases[i].result ||
        (names && strstr(o->outcomes[rank].text, cases[i].says) == NULL) ||
        (cases[i].result != CDDP_OK) != (o->outcomes[!rank].result != CDDP_OK))
      test_fail(__FILE__, __LINE__, "%s: rank %d: %s \"%s\", the other: %s \"%s\"", cases[i].fail,
                rank, cddp_result_name(o->outcomes[rank].result), o->outcomes[rank].text,
                cddp_result_name(o->outcomes[!rank].result), o->outcomes[!rank].text);
  }
  munmap(all, CASES * sizeof *all);
}

int main(void) {
  RUN(test_no_device);
  RUN(test_no_driver);
  RUN(test_mismatch);
  RUN(test_lost);
  RUN(test_left_messages);
  RUN(test_failed_saves);
  RUN(test_own_shares);
  RUN(test_memory_unknown);
  RUN(test_blocking_setting);
  RUN(test_device_memory);
  RUN(test_stopped);
  RUN(test_failing_hosts);
  RUN(test_stall);
  RUN(test_device_failures);
  RUN(test_failed_copies);
  RUN(test_injection);
  return TEST_END();
}
