/* Ranks as threads of one process, a GPU each; and groups that end while something of theirs still
   lives.

   Threads must train to the bits of processes, and a thread that fails must not take the others'
   GPUs along. A group that is destroyed before its model leaves a model whose calls fail and which
   can be destroyed. A rank that leaves waits for NCCL's end for as long as CDDP__AWAIT_END_S
   allows and no longer, and its leaving is not a loss to ranks that wait for others. */
#include "nccl_train.h"

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
  while (!inside_rank_gone(g, 1)) ranks_sleep(0.001);
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
  place(rank);
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

/* arg: groups. Each thread has a GPU of its own also in a group of a part of them, or of it alone;
   LOCAL_RANK is that of the process. */
static int splits_first(cddp_group *g, void *arg) {
  int groups = (int)(uintptr_t)arg, device = -1;
  cddp_group *part = NULL;
  CHECK_OK(cddp_group_split(g, cddp_rank(g) % groups, cddp_rank(g), &part));
  CHECK_OK(cddp_set_device(part, "cuda", NULL));
  CHECK(cudaGetDevice(&device) == cudaSuccess);
  CHECK_EQ(device, cddp_rank(g));
  cddp_destroy(part);
  return 0;
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
  if (RANKS_TSAN) return test_failures != 0;
  CHECK_OK(run_threads(refused_devices, NULL, 2, NULL));
  CHECK_OK(cddp_run_threads(refuses_devices, NULL, 2));
  ranks_setenv("LOCAL_RANK", 0);
  for (i = 1; i <= 4; i *= 2)
    CHECK_OK(cddp_run_threads(splits_first, (void *)(uintptr_t)i, 4));
  unsetenv("LOCAL_RANK");
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
   leave, too; not if that takes longer than inside_await_end_s: then it ends before. */
typedef struct leaving {
  double late, left; /* seconds */
} leaving;

static int leave(int rank, void *arg) {
  const leaving *l = (const leaving *)arg;
  cddp_group_desc d;
  cddp_group *g = NULL;
  double t;
  test_failures = 0;
  place(rank);
  inside_await_end_s = l->left;
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
  if (!own_gpus("NCCL does not wait for ranks that it takes for those of other hosts")) return;
  l.late = 0.3;
  l.left = 20;
  CHECK_OK(cddp_spawn(leave, &l, 2));
  l.late = 1;
  l.left = 0.1;
  CHECK_OK(cddp_spawn(leave, &l, 2));
}

/* Rank 1 has left in good order while rank 0 waited for rank 2. That it waits for that rank again,
   later than inside_await_end_s after the first time, is no loss either. turn: 1 and 3: rank 2 may
   send. */
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
  place(rank);
  inside_await_end_s = RANKS_WITHIN(RANKS_SLOW ? 0.2 : 0.5);
  memset(&d, 0, sizeof d);
  d.device = "cuda";
  CHECK_OK(cddp_init(&g, &d));
  if (g == NULL) return 1;
  check_sum(g, 6);
  CHECK_OK(cddp_barrier(g));
  if (rank == 1) {
    inside_await_end_s = 0;
    cddp_destroy(g);
    wait_until(turn, 4); /* its process goes on */
    return test_failures != 0;
  }
  x = cddp_alloc(g, 4);
  while (!inside_rank_gone(g, 1)) ranks_sleep(0.001);
  for (i = 0; i < 2; i++) {
    if (rank == 0) go_to(turn, 2 * i + 1);
    if (rank == 2) wait_until(turn, 2 * i + 1);
    if (rank == 2) ranks_sleep(0.1);
    CHECK_OK(rank == 0 ? cddp_recv(g, x, 1, CDDP_F32, 2, 0, NULL)
                       : cddp_send(g, x, 1, CDDP_F32, 0, 0, NULL));
    CHECK_OK(cddp_synchronize(g));
    ranks_sleep(i == 0 ? inside_await_end_s : 0);
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

/* The weights are those of processes, bit for bit. */
static void test_threads(void) {
  size_t bytes = 4 * plan_floats() * sizeof(float);
  float *want = (float *)ranks_shared(bytes), *got = (float *)ranks_shared(bytes);
  pid_t pid;
  int status = -1;
  plan p;
  if (!own_gpus("threads of a process cannot share a GPU")) return;
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

int main(void) {
  RUN(test_leaving);
  RUN(test_left_first);
  RUN(test_threads);
  RUN(test_destroyed_first);
  return TEST_END();
}
