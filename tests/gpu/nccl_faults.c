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
   inside_left_s. */
static int stop_there(cddp_group *g, scenario *o, outcome *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  (void)o;
  inside_left_s = 0.2;
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

static int leave_early(cddp_group *g, scenario *o, outcome *f) {
  float *x = (float *)cddp_alloc(g, 4000);
  CHECK_OK(work_on(g, x, 10));
  if (cddp_rank(g) != o->victim) f->result = work_on(g, x, 10);
  return 0;
}

static void test_lost(void) {
  int (*const ways[])(cddp_group *, scenario *, outcome *) = {die_before, die_idle, die_in_step,
                                                              die_at_free};
  scenario *o = scenario_new(NULL);
  int n, i, k;
  for (k = 0; k < 4; k++) {
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
  memset(o, 0, sizeof *o); /* while communicators connect */
  o->victim = 1;
  o->fuse = RANKS_SLOW ? 0.9 : 0.3; /* on a busy machine it dies before they do: no matter */
  o->environment = "HOSTNCCL_FAIL";
  o->value = "init:1@1";
  run_scenario(o, 3);
  check_outcome(o, 0, CDDP_PEER_LOST, "rank 1 (pid ");
  check_outcome(o, 2, CDDP_PEER_LOST, "rank 1 (pid ");
  CHECK(o->outcomes[0].when - o->began < RANKS_WITHIN(2));
  memset(o, 0, sizeof *o);
  o->fn = leave_early;
  run_scenario(o, 2);
  check_outcome(o, 1, CDDP_PEER_LOST, "rank 0 (pid ");
  check_outcome(o, 1, CDDP_PEER_LOST, "left the group");
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
  memset(o, 0, sizeof *o); /* while communicators connect */
  o->victim = 1;
  o->fuse = RANKS_SLOW ? 0.9 : 0.3;
  o->environment = "HOSTNCCL_FAIL";
  o->value = "init:1@1";
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
    check_outcome(o, i, CDDP_CUDA, "rank 1: cuda:1 failed during the group's");
  memset(o, 0, sizeof *o);
  o->fn = free_at_once;
  run_scenario(o, 2);
  for (i = 0; i < 2; i++) check_outcome(o, i, CDDP_MISMATCH, "ranks disagree");
  memset(o, 0, sizeof *o);
  o->fn = abort_waits;
  run_scenario(o, 2);
  for (i = 0; i < 2; i++) check_outcome(o, i, CDDP_ABORTED, "a test breaks the group");
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
    if (o->outcomes[rank].result != cases[i].result ||
        strstr(o->outcomes[rank].text, cases[i].says) == NULL ||
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
  RUN(test_stopped);
  RUN(test_failing_hosts);
  RUN(test_stall);
  RUN(test_device_failures);
  RUN(test_injection);
  return TEST_END();
}
