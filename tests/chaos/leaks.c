/* Starting and ending, many times over: no hang, no descriptor and no process may stay behind.

     build/plain/leaks [starts of 8 ranks]      (rank file:///... : one rank, started by itself)

   Jobs start by every way there is (spawn, threads, the environment, a file), with groups and
   models, small stacks and deadlines that pass, and end again; descriptors, threads, mappings and
   processes are counted. Files are the matter of tests/chaos/leaks.sh, which runs this program
   with 200 starts. */
#define CDDP_IMPLEMENTATION
#include "../../cddp.h"

#include "../test.h"

#include "../ranks.h"

#include <locale.h>
#include <sys/resource.h>

enum { RANKS = 8, PROCESSES = 4, PROCESS_STARTS = 20 };

static int starts = 20;

static int one_rank(int rank, void *arg) {
  cddp_group_desc desc;
  cddp_group *g;
  int64_t sum;
  int n;
  (void)rank;
  memset(&desc, 0, sizeof desc);
  desc.init_method = (const char *)arg;
  desc.timeout_s = 60;
  if (cddp_init(&g, &desc) != CDDP_OK) {
    fprintf(stderr, "cddp_init: %s\n", cddp_error());
    return 1;
  }
  n = cddp_world_size(g);
  sum = cddp_rank(g) + 1;
  CHECK_OK(cddp_all_reduce(g, &sum, 1, CDDP_I64, CDDP_SUM, NULL));
  CHECK_EQ(sum, n * (n + 1) / 2);
  cddp_destroy(g);
  return test_failures != 0;
}

static void test_spawn(void) {
  int before = ranks_open_fds(), i;
  for (i = 0; i < starts; i++) CHECK_OK(cddp_spawn(one_rank, NULL, RANKS));
  CHECK_EQ(ranks_open_fds(), before);
  CHECK(ranks_no_children());
}

static int one_thread(cddp_group *g, void *arg) {
  float x = 1;
  (void)arg;
  CHECK_OK(cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL));
  CHECK_EQ(x, cddp_world_size(g));
  return 0;
}

static void test_threads(void) {
  int before = ranks_open_fds(), i;
  for (i = 0; i < starts; i++) CHECK_OK(cddp_run_threads(one_thread, NULL, RANKS));
  CHECK_EQ(ranks_open_fds(), before);
}

/* Groups made and destroyed by one process again and again: its descriptors stay the same. */
static int many_groups(int rank, void *arg) {
  int before = 0, i;
  for (i = 0; i < 10 && test_failures == 0; i++) {
    CHECK(one_rank(rank, arg) == 0);
    if (i == 0) before = ranks_open_fds(); /* the first may open something for good */
  }
  CHECK_EQ(ranks_open_fds(), before);
  return test_failures != 0;
}

static void test_many_groups(void) {
  CHECK_OK(cddp_spawn(many_groups, NULL, PROCESSES));
}

/* Elastic models made, stepped and destroyed in one group: memory and mappings stay the same. Every
   third time rank 1 leaves in the middle of a step. */
static int blocks; /* of cddp, atomic */

static void *take(size_t bytes, void *unused) {
  (void)unused;
  __atomic_add_fetch(&blocks, 1, __ATOMIC_SEQ_CST);
  return malloc(bytes);
}

static void give(void *p, void *unused) {
  (void)unused;
  if (p != NULL) __atomic_sub_fetch(&blocks, 1, __ATOMIC_SEQ_CST);
  free(p);
}

static void step_once(cddp_ddp *ddp, cddp_param *p, const int64_t *row, bool half) {
  float value[2] = {1, 2};
  cddp_optim *o;
  cddp_sgd_desc d;
  int shard;
  memset(&d, 0, sizeof d);
  d.ddp = ddp;
  CHECK_OK(cddp_sgd_create(&o, p, 2, &d));
  while (cddp_ddp_next_shard(ddp, &shard)) {
    CHECK_OK(cddp_ddp_add_rows(ddp, 1, row, value, 1));
    CHECK_OK(cddp_ddp_ready(ddp, 0));
    CHECK_OK(cddp_ddp_ready(ddp, 1));
  }
  if (!half) CHECK_OK(cddp_ddp_step(ddp, o));
  cddp_optim_destroy(o);
}

static int many_models(int rank, void *arg) {
  static const size_t sparse[2] = {0, 2};
  static const int64_t row = 1;
  float w[4] = {0}, v[4] = {0};
  cddp_param p[2] = {{"w", w, NULL, 4, CDDP_F32}, {"v", v, NULL, 4, CDDP_F32}};
  int mappings = 0, before = 0, i;
  cddp_group_desc desc;
  cddp_ddp_desc d;
  cddp_group *g;
  cddp_ddp *ddp;
  (void)arg;
  ranks_place(rank);
  memset(&desc, 0, sizeof desc);
  memset(&d, 0, sizeof d);
  desc.allocator.alloc = take;
  desc.allocator.free = give;
  d.elastic = true;
  d.shards = 4;
  d.sparse_rows = sparse;
  CHECK_OK(cddp_init(&g, &desc));
  for (i = 0; i < 30 && test_failures == 0; i++) {
    CHECK_OK(cddp_ddp_create(&ddp, g, p, 2, &d));
    step_once(ddp, p, &row, rank == 1 && i % 3 == 2);
    cddp_ddp_destroy(ddp);
    CHECK_OK(cddp_barrier(g)); /* all have left: the next allocation gives back what they shared */
    if (i == 5) before = blocks, mappings = ranks_mappings("memfd:");
  }
  CHECK(blocks < before + 10); /* a call may be coming in */
  CHECK(ranks_mappings("memfd:") < mappings + 8); /* whoever begins a step has a block more */
  cddp_destroy(g);
  CHECK_EQ(blocks, 0);
  return test_failures != 0;
}

static void test_many_models(void) {
  CHECK_OK(cddp_spawn(many_models, NULL, 2));
  setenv("TEST_HOSTS", "ab", 1);
  CHECK_OK(cddp_spawn(many_models, NULL, 2));
  unsetenv("TEST_HOSTS");
}

/* Processes that share nothing, as from a launcher script: each one executes this program again. */
static void start_processes(const char *init_method) {
  pid_t pids[PROCESSES];
  int status[PROCESSES], port = ranks_free_port(), r;
  fflush(NULL);
  for (r = 0; r < PROCESSES; r++) {
    pids[r] = fork();
    if (pids[r] != 0) continue;
    ranks_environment(r, PROCESSES, port);
    execl("/proc/self/exe", "starts", "rank", init_method, (char *)NULL);
    _exit(127);
  }
  ranks_join(pids, PROCESSES, 60, status);
  CHECK(ranks_exited_well(status, PROCESSES));
}

static void test_env(void) {
  int before = ranks_open_fds(), i;
  for (i = 0; i < PROCESS_STARTS; i++) start_processes("env://");
  CHECK_EQ(ranks_open_fds(), before);
  CHECK(ranks_no_children());
}

static void test_file(void) { /* one file for all: what one start leaves, the next meets */
  const char *tmp = getenv("TMPDIR");
  char path[512], url[600];
  int before = ranks_open_fds(), i;
  snprintf(path, sizeof path, "%s/cddp-starts.%d", tmp != NULL ? tmp : "/tmp", (int)getpid());
  snprintf(url, sizeof url, "file://%s", path);
  for (i = 0; i < PROCESS_STARTS; i++) start_processes(url);
  unlink(path);
  CHECK_EQ(ranks_open_fds(), before);
  CHECK(ranks_no_children());
}

/* A STACK OF 64 KiB. --------------------------------------------------------------------------- */

/* Sums and averages of all types and operations, in this thread and in the engine's. */
static int reduce_everything(cddp_group *g) {
  static double a[20000];
  int dtype, op, size = cddp_world_size(g);
  cddp_work *w;
  for (dtype = CDDP_F32; dtype <= CDDP_I64; dtype++) {
    for (op = CDDP_SUM; op <= CDDP_MAX; op++) {
      double *own = (double *)malloc(sizeof a);
      memset(own, 0, sizeof a);
      CHECK_OK(cddp_all_reduce(g, own, 20000, (cddp_dtype)dtype, (cddp_op)op, NULL));
      CHECK_OK(cddp_all_reduce(g, own, 20000, (cddp_dtype)dtype, (cddp_op)op, &w));
      CHECK_OK(cddp_wait(w));
      free(own);
    }
  }
  return size <= 0;
}

static int train(cddp_group *g, void *arg) {
  enum { N = 30000, STEPS = 4 };
  const char *path = (const char *)arg;
  cddp_sgd_desc o;
  cddp_param p[2];
  cddp_ddp *ddp;
  cddp_optim *sgd;
  float *w = (float *)cddp_alloc(g, N * sizeof *w);
  uint16_t *half = (uint16_t *)calloc(N, sizeof *half);
  int step, i;
  CHECK(w != NULL && half != NULL);
  memset(w, 0, N * sizeof *w);
  memset(p, 0, sizeof p);
  memset(&o, 0, sizeof o);
  p[0].name = "w", p[0].data = w, p[0].count = N, p[0].dtype = CDDP_F32;
  p[1].name = "half", p[1].data = half, p[1].count = N, p[1].dtype = CDDP_F16;
  CHECK_OK(cddp_ddp_create(&ddp, g, p, 2, NULL));
  o.lr = 0.1, o.momentum = 0.9;
  CHECK_OK(cddp_sgd_create(&sgd, p, 2, &o));
  for (step = 0; step < STEPS; step++) {
    for (i = 1; i >= 0; i--) CHECK_OK(cddp_ddp_ready(ddp, i));
    if (step % 2 == 0) {
      CHECK_OK(cddp_ddp_step(ddp, sgd));
      continue;
    }
    CHECK_OK(cddp_ddp_wait(ddp));
    CHECK_OK(cddp_ddp_clip_grad_norm(ddp, 1, NULL));
    CHECK_OK(cddp_optim_step(sgd));
    cddp_optim_zero_grad(sgd);
  }
  if (path != NULL) CHECK_OK(cddp_save(g, path, p, 2, NULL));
  if (path != NULL) CHECK_OK(cddp_load(g, path, p, 2, NULL));
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  cddp_free(g, w);
  free(half);
  return reduce_everything(g);
}

static int train_rank(int rank, void *arg) {
  cddp_group *g;
  int r;
  (void)rank;
  if (cddp_init(&g, NULL) != CDDP_OK) return 1;
  r = train(g, arg);
  cddp_destroy(g);
  return r != 0 || test_failures != 0;
}

/* The user's code on threads of cddp: a function's variables may take 8 MiB. */
static int use_stack(void) {
  volatile char deep[8 << 20];
  size_t i;
  for (i = sizeof deep; i > 0; i -= i < 4096 ? i : 4096) deep[i - 1] = 1;
  return deep[sizeof deep - 1];
}

static cddp_result deep_hook(cddp_bucket *b, void *calls) {
  (void)b;
  __atomic_add_fetch((int *)calls, use_stack(), __ATOMIC_SEQ_CST);
  return CDDP_OK;
}

static int hook_deep(cddp_group *g, bool here) {
  float *w = (float *)cddp_alloc(g, 64);
  cddp_ddp_desc desc;
  cddp_param p;
  cddp_ddp *ddp;
  int calls = 0, i;
  memset(&p, 0, sizeof p);
  p.data = w;
  p.count = 16;
  memset(&desc, 0, sizeof desc);
  desc.comm_hook = deep_hook;
  desc.comm_hook_data = &calls;
  CHECK_OK(cddp_ddp_create(&ddp, g, &p, 1, &desc));
  CHECK_OK(cddp_ddp_ready(ddp, 0));
  for (i = 0; i < 3000 && !here && __atomic_load_n(&calls, __ATOMIC_SEQ_CST) == 0; i++)
    ranks_sleep(0.01); /* until the engine has called it: this thread's stack is small */
  CHECK_OK(cddp_ddp_wait(ddp));
  CHECK_EQ(calls, 1);
  cddp_ddp_destroy(ddp);
  cddp_free(g, w);
  return test_failures != 0;
}

static int deep_rank(int rank, void *unused) {
  cddp_group *g;
  (void)rank, (void)unused;
  if (cddp_init(&g, NULL) != CDDP_OK) return 1;
  CHECK_EQ(hook_deep(g, false), 0);
  cddp_destroy(g);
  return test_failures != 0;
}

static int deep_thread(cddp_group *g, void *unused) {
  (void)unused;
  CHECK_EQ(use_stack(), 1);
  return hook_deep(g, true);
}

static int on_small_stack(char *path) {
  CHECK_OK(cddp_spawn(deep_rank, NULL, 2));
  CHECK_OK(cddp_run_threads(deep_thread, NULL, 2));
  CHECK_OK(cddp_spawn(train_rank, path, 3));
  CHECK_OK(cddp_spawn(train_rank, path, 2));
  CHECK_OK(cddp_run_threads(train, NULL, 3));
  return test_failures != 0;
}

static void test_small_stack(void) {
  const char *tmp = getenv("TMPDIR");
  struct rlimit small;
  char path[512];
  int status = -1;
  pid_t pid;
  if (RANKS_SLOW) return; /* a sanitizer's frames are several times as large */
  snprintf(path, sizeof path, "%s/cddp-stack.%d", tmp != NULL ? tmp : "/tmp", (int)getpid());
  fflush(NULL);
  if ((pid = fork()) == 0) {
    small.rlim_cur = small.rlim_max = 65536;
    setrlimit(RLIMIT_STACK, &small);
    execl("/proc/self/exe", "starts", "small", path, (char *)NULL);
    _exit(99);
  }
  ranks_join(&pid, 1, 30, &status);
  CHECK_EQ(status, 0);
  unlink(path);
}

/* CDDP_TIMEOUT_S is read alike whatever the locale's decimal point. */
static void check_timeouts(void) {
  static const char *const bad[] = {"2,5", "-1", "0", "0.0", ".", "soon", "2.5.1", "1e10", "nan",
                                    "inf", "2 "};
  static const char *const good[] = {"2.5", "2", "600.", ".5", "0.25"};
  cddp_store_desc desc;
  cddp_store *store;
  cddp_group *g;
  size_t i;
  memset(&desc, 0, sizeof desc);
  desc.init_method = "tcp://127.0.0.1:0";
  desc.is_server = true;
  for (i = 0; i < sizeof good / sizeof *good; i++) {
    setenv("CDDP_TIMEOUT_S", good[i], 1);
    CHECK_OK(cddp_store_create(&store, &desc));
    cddp_store_destroy(store);
    CHECK_OK(cddp_init(&g, NULL));
    cddp_destroy(g);
    CHECK_OK(cddp_run_threads(one_thread, NULL, 1));
  }
  for (i = 0; i < sizeof bad / sizeof *bad; i++) {
    setenv("CDDP_TIMEOUT_S", bad[i], 1);
    CHECK_IS(cddp_store_create(&store, &desc), CDDP_INVALID_ARGUMENT);
    CHECK(strstr(cddp_error(), "CDDP_TIMEOUT_S") != NULL && strstr(cddp_error(), bad[i]) != NULL);
    CHECK_IS(cddp_init(&g, NULL), CDDP_INVALID_ARGUMENT);
    CHECK_IS(cddp_run_threads(one_thread, NULL, 1), CDDP_INVALID_ARGUMENT);
  }
}

/* Ranks need not have one decimal point. */
static int rank_of_a_locale(int rank, void *arg) {
  float w = 1;
  cddp_param p = {"w", &w, NULL, 1, CDDP_F32};
  cddp_ddp_desc d;
  cddp_ddp *ddp;
  cddp_group *g;
  (void)arg;
  memset(&d, 0, sizeof d);
  d.max_grad_norm = 0.5;
  if (rank == 1) setlocale(LC_ALL, "C");
  CHECK_OK(cddp_init(&g, NULL));
  CHECK_OK(cddp_ddp_create(&ddp, g, &p, 1, &d));
  cddp_ddp_destroy(ddp);
  cddp_destroy(g);
  return test_failures != 0;
}

static void test_timeouts(void) {
  const char *tmp = getenv("TMPDIR");
  const char *old = getenv("CDDP_TIMEOUT_S");
  char folder[512], command[1200], saved[64];
  snprintf(saved, sizeof saved, "%s", old != NULL ? old : "");
  check_timeouts();
  snprintf(folder, sizeof folder, "%s/cddp-locale.XXXXXX", tmp != NULL ? tmp : "/tmp");
  CHECK(mkdtemp(folder) != NULL);
  snprintf(command, sizeof command, "localedef -i de_DE -f UTF-8 %s/de_DE.utf8 2>/dev/null",
           folder);
  if (system(command) != 0) fprintf(stderr, "no localedef or no de_DE: the C locale only\n");
  setenv("LOCPATH", folder, 1);
  if (setlocale(LC_ALL, "de_DE.utf8") != NULL) {
    CHECK(strcmp(localeconv()->decimal_point, ",") == 0);
    check_timeouts();
    setenv("CDDP_TIMEOUT_S", "60", 1);
    CHECK_OK(cddp_spawn(rank_of_a_locale, NULL, 2));
    setlocale(LC_ALL, "C");
  }
  unsetenv("LOCPATH");
  snprintf(command, sizeof command, "rm -r '%s'", folder);
  CHECK(system(command) == 0);
  if (old != NULL) setenv("CDDP_TIMEOUT_S", saved, 1);
  else unsetenv("CDDP_TIMEOUT_S");
}

int main(int argc, char **argv) {
  if (argc == 3 && strcmp(argv[1], "rank") == 0) return one_rank(0, argv[2]);
  if (argc == 3 && strcmp(argv[1], "small") == 0) return on_small_stack(argv[2]);
  if (argc == 2) starts = atoi(argv[1]);
  RUN(test_spawn);
  RUN(test_threads);
  RUN(test_many_groups);
  RUN(test_many_models);
  RUN(test_env);
  RUN(test_file);
  RUN(test_small_stack);
  RUN(test_timeouts);
  return TEST_END();
}
