/* Starting and ending, many times over: no hang, no descriptor and no process may stay behind.
   Files are the matter of tests/leaks.sh, which runs this program with 200 starts.

     build/plain/starts [starts of 8 ranks]      (rank file:///... : one rank, started by itself) */
#define CDDP_IMPLEMENTATION
#include "../cddp.h"

#include "test.h"

#include "ranks.h"

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

int main(int argc, char **argv) {
  if (argc == 3 && strcmp(argv[1], "rank") == 0) return one_rank(0, argv[2]);
  if (argc == 2) starts = atoi(argv[1]);
  RUN(test_spawn);
  RUN(test_threads);
  RUN(test_many_groups);
  RUN(test_env);
  RUN(test_file);
  return TEST_END();
}
