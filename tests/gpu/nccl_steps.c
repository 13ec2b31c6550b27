/* What a step on GPUs costs, and what it refuses.

   The double (tests/gpu/hostcuda) counts the calls of CUDA and NCCL. A step must not wait for other
   ranks' hosts, must not synchronise or allocate, launches a known number of kernels, and issues a
   bucket while later gradients are still to come. Threads that wait for the device yield first and
   then sleep no longer than a sixteenth of their wait. No call makes a context on a GPU that is not
   the rank's. Wrong arguments and calls out of order are errors that name the parameter. */
#include "nccl.h"

#include <pthread.h>

/* --- what a step costs, and what it refuses --- */

/* Until rank 0 says that it is through with its calls, for which it needs no other rank. */
static void come_second(void *arg, uint32_t through) {
  double until = test_now() + RANKS_WITHIN(5);
  while (__atomic_load_n((uint32_t *)arg, __ATOMIC_SEQ_CST) < through && test_now() < until)
    ranks_sleep(0.001);
  CHECK(__atomic_load_n((uint32_t *)arg, __ATOMIC_SEQ_CST) >= through);
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
  if (cddp_rank(g) == 0) __atomic_store_n((uint32_t *)arg, 1, __ATOMIC_SEQ_CST);
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
  if (cddp_rank(g) == 0) __atomic_store_n((uint32_t *)arg, 2, __ATOMIC_SEQ_CST);
  CHECK_OK(cddp_synchronize(g));
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  return 0;
}

/* A bucket's operation is issued while later gradients are still to come; a step synchronises
   nothing and allocates nothing. */
static int frugal(cddp_group *g, void *arg) {
  static const char *const never[] = {"cudaDeviceSynchronize", "cudaStreamSynchronize",
                                      "cudaEventSynchronize", "cudaMalloc",
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
      if (i == 0 && !alone) CHECK(hostcuda_calls("ncclAllReduce") == reduced_before + 3);
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
  char path[256], own_path[272];
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
  case 0:
    CHECK((c->x = (float *)cddp_alloc(c->g, 4000)) != NULL);
    break;
  case 1:
    CHECK_OK(cddp_all_reduce(c->g, c->x, 10, CDDP_F32, CDDP_SUM, &c->w));
    break;
  case 2:
    CHECK_OK(cddp_test(c->w, &done));
    break;
  case 3:
    CHECK_OK(cddp_wait(c->w));
    break;
  case 4:
    CHECK_OK(cddp_synchronize(c->g));
    break;
  case 5:
    CHECK_OK(cddp_barrier(c->g));
    break;
  case 6:
    CHECK_OK(cddp_ddp_create(&c->d, c->g, c->p, 1, NULL));
    break;
  case 7:
    CHECK_OK(cddp_sgd_create(&c->s, c->p, 1, &rule));
    break;
  case 8:
    CHECK_OK(cddp_ddp_ready(c->d, 0));
    break;
  case 9:
    CHECK_OK(cddp_ddp_wait(c->d));
    break;
  case 10:
    CHECK_OK(cddp_ddp_clip_grad_norm(c->d, 1, &norm));
    break;
  case 11:
    CHECK_OK(cddp_optim_step(c->s));
    break;
  case 12:
    CHECK_OK(cddp_optim_zero_grad(c->s));
    break;
  case 13:
    CHECK_OK(cddp_ddp_ready(c->d, 0));
    break;
  case 14:
    CHECK_OK(cddp_ddp_step(c->d, c->s));
    break;
  case 15:
    cddp_optim_destroy(c->s);
    break;
  case 16:
    cddp_ddp_destroy(c->d);
    break;
  case 17:
    CHECK_OK(cddp_optim_step(c->alone));
    break;
  case 18:
    cddp_optim_destroy(c->alone);
    break;
  case 19:
    CHECK_OK(cddp_ddp_add_rows(c->sparse, 0, &row, c->x, 1));
    break;
  case 20:
    CHECK_OK(cddp_ddp_sync_buffers(c->sparse));
    break;
  case 21:
    cddp_ddp_destroy(c->sparse);
    break;
  case 22:
    CHECK_OK(cddp_save(c->g, c->path, c->p, 1, NULL));
    break;
  case 23:
    CHECK_OK(cddp_load(c->g, c->path, c->p, 1, NULL));
    break;
  case 24:
    CHECK_OK(cddp_group_split(c->g, 0, 0, &c->both));
    break;
  case 25:
    cddp_destroy(c->both);
    break;
  case 26:
    CHECK_OK(cddp_sgd_create(&c->s, c->p + 1, 1, &no_ddp));
    break;
  case 27:
    cddp_optim_destroy(c->s);
    break;
  case 28:
    CHECK_OK(cddp_save(NULL, c->own_path, c->p, 1, NULL));
    break;
  case 29:
    CHECK_OK(cddp_load(NULL, c->own_path, c->p, 1, NULL));
    break;
  default:
    cddp_free(c->g, c->x);
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
  snprintf(c.path, sizeof c.path, "%.200s/cddp-strangers-%d", tmp != NULL ? tmp : "/tmp",
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

/* cddp's nanosleep. */
static int count_nap(const struct timespec *t, struct timespec *left) {
  double waited = entered > 0 ? test_now() - entered : 1e9;
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
  double start;
  int i;
  (void)arg;
  inside_nanosleep = count_nap;
  for (i = 0, naps = 1; i < 1000 && naps > 0; i++) { /* it may be held up between two clocks */
    naps = 0;
    CHECK_OK(inside_poll(g, test_now()));
  }
  CHECK_EQ(naps, 0);
  for (i = 0; i < 3; i++) {
    start = test_now() - waited[i];
    CHECK_OK(inside_poll(g, start));
    CHECK_EQ(naps, i + 1);
    CHECK(nap_s > 0 && nap_s <= 1e-3 && 16 * nap_s <= test_now() - start);
  }
  for (i = 0, naps = 0; i < 30; i++) {
    hostcuda_op op = {late_run, NULL, &late[i % 3]};
    hostnccl_busy(130); /* as often as a host asks in a tenth of a millisecond or two */
    entered = test_now();
    CHECK_OK(cddp_all_reduce(g, x, 10, CDDP_F32, CDDP_SUM, NULL));
    CHECK(hostcuda_enqueue((cudaStream_t)cddp_stream(g), op, false) == cudaSuccess);
    entered = test_now();
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
  float *x = (float *)cddp_alloc(g, 40);
  int i, stops = 0;
  (void)arg;
  for (i = 0; i < 100; i++) { /* as many on both ranks */
    CHECK_OK(cddp_all_reduce(g, x, 10, CDDP_F32, CDDP_SUM, NULL));
    CHECK(cudaStreamSynchronize((cudaStream_t)cddp_stream(g)) == cudaSuccess);
    if (stops < 8) stops += inside_age_operation(g); /* if the poller has not been there yet */
    while (inside_busy(g) && inside_check_group(g) == CDDP_OK) ranks_sleep(0.001);
    CHECK_OK(inside_check_group(g));
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

/* arg: the backend; NULL: NCCL. */
static int refusals(cddp_group *g, void *arg) {
  const cddp_kernels *kernels = inside_kernels();
  float host[64];
  cddp_ddp_desc desc;
  cddp_sgd_desc rule;
  cddp_ddp *d = NULL, *other = NULL;
  cddp_optim *s = NULL, *none = NULL;
  cddp_param p[2];
  int i;
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
  for (i = 0; i < 2; i++) { /* an algorithm without kernels is not stepped by another's */
    CHECK_IS(inside_third_create(&none, p, 2, 0.1, i ? d : NULL), CDDP_UNSUPPORTED);
    CHECK(none == NULL && strstr(cddp_error(), "Third has no kernel for GPUs") != NULL);
  }
  CHECK_OK(cddp_ddp_step(d, s));
  CHECK_OK(cddp_ddp_ready(d, 0)); /* one is missing */
  CHECK_IS(cddp_ddp_wait(d), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "\"#1\"") != NULL);
  check_misused(g, arg == NULL);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  return 0;
}

/* More barriers of device threads than the thread sanitizer has room for in one host thread, had
   the double's fibers not returned from what they called. */
static int many_blocks(cddp_group *g, void *arg) {
  enum { COUNT = 1200000 };
  float *grad = (float *)cddp_alloc(g, COUNT * sizeof *grad);
  float *ones = (float *)malloc(COUNT * sizeof *ones);
  const cddp_kernels *kernels = inside_kernels();
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

/* --- cddp_set_stream: the new stream is behind the old one --- */

/* A model is made while the default stream has work, and trains on another stream. */
static int new_stream(cddp_group *g, void *arg) {
  enum { COUNT = 100000 };
  int n = cddp_world_size(g), me = cddp_rank(g), i;
  float *junk = (float *)on_device(NULL, COUNT * sizeof *junk);
  cddp_sgd_desc rule;
  cddp_ddp *d = NULL;
  cddp_optim *o = NULL;
  cudaStream_t s;
  cddp_param p;
  (void)arg;
  memset(&rule, 0, sizeof rule);
  rule.lr = 1;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  model_of(g, &p, 1, COUNT);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  for (i = 0; i < 60; i++) fill_on(NULL, junk, COUNT, 1, false);
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
  rule.ddp = d;
  CHECK_OK(cddp_sgd_create(&o, &p, 1, &rule));
  cddp_set_stream(g, s);
  fill_on(s, (float *)p.grad, COUNT, (float)(me + 1), false);
  CHECK_OK(cddp_ddp_ready(d, 0));
  CHECK_OK(cddp_ddp_step(d, o));
  check_fill(g, (float *)p.data, COUNT, -(n + 1) / 2.0);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  cddp_optim_destroy(o);
  cddp_ddp_destroy(d);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(s);
  return 0;
}

/* Another stream for each step, also the default one. */
static int alternate_streams(cddp_group *g, void *arg) {
  enum { COUNT = 100000, STEPS = 9 };
  int n = cddp_world_size(g), me = cddp_rank(g), k;
  cudaStream_t s[3] = {NULL, NULL, NULL};
  cddp_sgd_desc rule;
  cddp_ddp *d = NULL;
  cddp_optim *o = NULL;
  cddp_param p;
  (void)arg;
  memset(&rule, 0, sizeof rule);
  rule.lr = 1;
  for (k = 0; k < 2; k++)
    CHECK(cudaStreamCreateWithFlags(&s[k], cudaStreamNonBlocking) == cudaSuccess);
  model_of(g, &p, 1, COUNT);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
  rule.ddp = d;
  CHECK_OK(cddp_sgd_create(&o, &p, 1, &rule));
  for (k = 0; k < STEPS; k++) {
    cddp_set_stream(g, s[k % 3]);
    fill_on(s[k % 3], (float *)p.data, COUNT, 1, true); /* reads the weights of the last step */
    fill_on(s[k % 3], (float *)p.grad, COUNT, (float)(me + 1), false);
    CHECK_OK(cddp_ddp_ready(d, 0));
    CHECK_OK(cddp_ddp_step(d, o));
  }
  check_fill(g, (float *)p.data, COUNT, -STEPS * (n + 1) / 2.0);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  cddp_optim_destroy(o);
  cddp_ddp_destroy(d);
  cddp_set_stream(g, NULL);
  for (k = 0; k < 2; k++) cudaStreamDestroy(s[k]);
  return 0;
}

/* Handles and collectives of the old stream are done for the new one. While another stream is
   captured, cddp_set_stream does not end the capture. */
static int change_stream(cddp_group *g, void *arg) {
  enum { COUNT = 50000 };
  float *x = (float *)on_device(NULL, COUNT * sizeof *x), *y = (float *)cddp_alloc(g, 4 * COUNT);
  int n = cddp_world_size(g), me = cddp_rank(g), k;
  cudaStream_t a, b;
  cudaGraph_t graph;
  cddp_work *w;
  (void)arg;
  CHECK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking) == cudaSuccess);
  CHECK(cudaStreamCreate(&b) == cudaSuccess); /* blocking: the default stream waits for it */
  for (k = 0; k < 4; k++) {
    cddp_set_stream(g, a);
    fill_on(a, x, COUNT, (float)(me + k), false);
    CHECK_OK(cddp_all_reduce(g, x, COUNT, CDDP_F32, CDDP_SUM, k % 2 != 0 ? &w : NULL));
    if (k % 2 != 0) CHECK_OK(cddp_wait(w));
    cddp_set_stream(g, b);
    CHECK(cudaMemcpyAsync(y, x, 4 * COUNT, cudaMemcpyDeviceToDevice, b) == cudaSuccess);
    check_fill(g, y, COUNT, n * (n - 1) / 2 + n * k);
    cddp_set_stream(g, NULL);
    graph = NULL;
    CHECK(cudaStreamBeginCapture(b, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    if (k % 2 == 0) cddp_set_stream(g, a); /* from the default stream: unusable now */
    cddp_set_stream(g, b);
    CHECK_OK(cddp_all_reduce(g, x, COUNT, CDDP_F32, CDDP_SUM, NULL));
    cddp_set_stream(g, a);
    CHECK(cudaStreamEndCapture(b, &graph) == cudaSuccess);
    if (graph != NULL) cudaGraphDestroy(graph);
  }
  CHECK_OK(cddp_synchronize(g));
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(a);
  cudaStreamDestroy(b);
  cudaFree(x);
  return 0;
}

static void test_set_stream(void) {
  int n;
  for (n = 1; n <= 4; n *= 2) {
    CHECK_OK(run(new_stream, NULL, n, NULL));
    CHECK_OK(run(alternate_streams, NULL, n, NULL));
    CHECK_OK(run(change_stream, NULL, n, NULL));
  }
}

static void test_steps(void) {
  static char cpu[] = "cpu";
  CHECK_OK(run(many_blocks, NULL, 1, NULL));
  CHECK_OK(run(unwaiting, ranks_shared(sizeof(uint32_t)), 2, NULL));
  CHECK_OK(run(frugal, NULL, 1, NULL));
  CHECK_OK(run(frugal, NULL, 2, NULL));
  CHECK_OK(run(frugal, (void *)1, 1, NULL)); /* it clips, too */
  CHECK_OK(run(frugal, (void *)1, 2, NULL));
  CHECK_OK(run(thrifty, NULL, 2, NULL));
  CHECK_OK(run(strangers, NULL, 2, NULL));
  inside_comm_min_ranks = 1;
  if (on_double("NCCL is not busy on demand")) CHECK_OK(run(naps_little, NULL, 1, NULL));
  inside_comm_min_ranks = 2;
  CHECK_OK(run(was_stopped, NULL, 2, NULL));
  CHECK_OK(run(leaves_unused, NULL, 3, NULL));
  CHECK_OK(run(join_refused, NULL, 2, NULL));
  CHECK_OK(run(refusals, NULL, 2, NULL));
  CHECK_OK(run(refusals, cpu, 2, cpu));
}

int main(void) {
  RUN(test_set_stream);
  RUN(test_steps);
  return TEST_END();
}
