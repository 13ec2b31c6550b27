/* Data parallel on GPUs ends in the weights of data parallel on CPUs.

   Each test describes training as a `plan` (nccl_train.h) and runs it twice, on the GPUs of the
   test double and on the CPU backend: all ranks must have the same weights, and those of the CPUs
   within rounding. The plans go through SGD and AdamW, clipping, given gradients, unused
   parameters, no_sync, communication hooks, buffers, sparse rows, uneven inputs, master weights of
   half precision, several hosts, and gradients that go through host memory. A checkpoint that one
   kind of group wrote is loaded by all others, and training goes on with the same bits. */
#include "nccl_train.h"

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
  static const int ranks[] = {1, 2, 3, 5, MOST_RANKS};
  plan p;
  int i, n;
  for (i = 0; i < 5; i++) {
    n = ranks[i];
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

/* A model without elements. */
static int empty(cddp_group *g, void *arg) {
  cddp_param p = {"w", NULL, NULL, 0, CDDP_F32};
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  cddp_sgd_desc rule;
  int step;
  (void)arg;
  memset(&rule, 0, sizeof rule);
  rule.lr = 0.1;
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
  CHECK_OK(cddp_sgd_create(&s, &p, 1, &rule));
  for (step = 0; step < 3; step++) {
    CHECK_OK(cddp_ddp_ready(d, 0));
    CHECK_OK(cddp_ddp_step(d, s));
  }
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  return 0;
}

static void test_empty(void) {
  int n;
  for (n = 1; n <= 2; n++) {
    CHECK_OK(run(empty, NULL, n, NULL));
    CHECK_OK(run(empty, NULL, n, "cpu"));
  }
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
    if (p.cpu)
      CHECK_OK(ranks_run(train, &p, ranks[i], false));
    else
      CHECK_OK(run(train, &p, ranks[i], i == 3 ? "cpu" : NULL));
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
  unsetenv("CUDA_LAUNCH_BLOCKING");
}

int main(void) {
  RUN(test_training);
  RUN(test_training_over_hosts);
  if (!RANKS_TSAN) RUN(test_training_options); /* its threads are those of test_training */
  RUN(test_training_masters);
  RUN(test_uneven_and_sparse);
  if (!RANKS_TSAN) RUN(test_checkpoints);
  RUN(test_adamw);
  RUN(test_beside_a_model);
  RUN(test_empty);
  RUN(test_training_staged);
  RUN(test_blocking_launches);
  return TEST_END();
}
