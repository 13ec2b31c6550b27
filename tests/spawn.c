/* cddp_spawn and cddp_run_threads: exit codes and signals named, nobody left over, nothing
   inherited twice. */
#define CDDP_IMPLEMENTATION
#include "../cddp.h"
#include "ranks.h"

#include <fcntl.h>
#include <sys/prctl.h>

static bool mentions(const char *text) { return strcasestr(cddp_error(), text) != NULL; }

static bool gone(pid_t pid) { return kill(pid, 0) != 0 && errno == ESRCH; }

/* What the ranks of one spawn tell the test, in shared memory. */
typedef struct board {
  pid_t pid[64];
  int word[64];
  int exit_handlers; /* how often the parent's atexit handler ran */
  int how;
} board;

static board *shared_board(void) { return (board *)ranks_shared(sizeof(board)); }

/* SUCCESS -------------------------------------------------------------------------------------- */

static int sum_ranks(int rank, void *arg) {
  board *b = (board *)arg;
  int32_t x = rank + 1;
  cddp_group *g;
  b->pid[rank] = getpid();
  if (cddp_init(&g, NULL) != CDDP_OK) return 1;
  if (cddp_rank(g) != rank || cddp_local_rank(g) != rank) return 2;
  if (cddp_all_reduce(g, &x, 1, CDDP_I32, CDDP_SUM, NULL) != CDDP_OK) return 3;
  b->word[rank] = x;
  cddp_destroy(g);
  return 0;
}

static void test_success(void) {
  static const int ranks[] = {1, 2, 5, 32};
  board *b = shared_board();
  int i, r;
  for (i = 0; i < 4; i++) {
    int fds = ranks_open_fds(), n = ranks[i];
    CHECK_OK(cddp_spawn(sum_ranks, b, n));
    for (r = 0; r < n; r++) CHECK(b->word[r] == n * (n + 1) / 2);
    for (r = 0; r < n; r++) CHECK(gone(b->pid[r]) && b->pid[r] != getpid());
    CHECK(ranks_no_children());
    CHECK_EQ(ranks_open_fds(), fds);
  }
  munmap(b, sizeof *b);
}

static int do_nothing(int rank, void *arg) {
  (void)rank;
  (void)arg;
  return 0;
}

static void test_invalid(void) {
  CHECK_IS(cddp_spawn(NULL, NULL, 2), CDDP_INVALID_ARGUMENT);
  CHECK(cddp_error()[0] != 0);
  CHECK_IS(cddp_spawn(do_nothing, NULL, 0), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_spawn(do_nothing, NULL, -3), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_spawn(do_nothing, NULL, INT_MAX), CDDP_INVALID_ARGUMENT);
  CHECK(ranks_no_children());
  CHECK_OK(cddp_spawn(do_nothing, NULL, 3)); /* ranks need not call cddp at all */
}

static bool is_set(const char *name, int value) {
  const char *text = getenv(name);
  char want[24];
  snprintf(want, sizeof want, "%d", value);
  return text != NULL && strcmp(text, want) == 0;
}

static int look_at_environment(int rank, void *arg) {
  int n = *(int *)arg, port = getenv("MASTER_PORT") != NULL ? atoi(getenv("MASTER_PORT")) : 0;
  CHECK(is_set("RANK", rank));
  CHECK(is_set("WORLD_SIZE", n));
  CHECK(is_set("LOCAL_RANK", rank));
  CHECK(is_set("LOCAL_WORLD_SIZE", n));
  CHECK(getenv("MASTER_ADDR") != NULL && getenv("MASTER_ADDR")[0] != 0);
  CHECK(port > 0 && port < 65536);
  CHECK(is_set("CDDP_TEST_KEEPS", 5));
  return test_failures != 0;
}

static void test_environment(void) {
  static const char *const names[] = {"RANK",        "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                      "MASTER_ADDR", "MASTER_PORT"};
  int n = 3, i;
  setenv("CDDP_TEST_KEEPS", "5", 1);
  CHECK_OK(cddp_spawn(look_at_environment, &n, n));
  for (i = 0; i < 6; i++) CHECK(getenv(names[i]) == NULL); /* the parent's own stays as it was */
  ranks_environment(7, 9, 1);                              /* and is overridden in the ranks */
  CHECK_OK(cddp_spawn(look_at_environment, &n, n));
  CHECK(is_set("RANK", 7) && is_set("WORLD_SIZE", 9) && is_set("MASTER_PORT", 1));
  for (i = 0; i < 6; i++) unsetenv(names[i]);
  unsetenv("CDDP_TEST_KEEPS");
}

/* FAILURE: named by rank; the others are ended. ------------------------------------------------ */

enum { RETURNS_7, EXITS_3, KILLS, SEGFAULTS, RETURNS_255, FAILURES };

static int fail_somehow(int rank, void *arg) {
  board *b = (board *)arg;
  b->pid[rank] = getpid();
  if (rank != 2) { /* the others would stay for long */
    ranks_sleep(60);
    return 0;
  }
  ranks_sleep(0.1);
  switch (b->how) {
  case RETURNS_7:
    return 7;
  case EXITS_3:
    _exit(3);
  case KILLS:
    kill(getpid(), SIGKILL);
    return 0;
  case SEGFAULTS:
    signal(SIGSEGV, SIG_DFL); /* a sanitizer's handler would make it an exit */
    raise(SIGSEGV);
    return 0;
  default:
    return 255;
  }
}

static void test_failure(void) {
  static const char *const words[FAILURES][2] = {
      {"7", "7"}, {"3", "3"}, {"9", "kill"}, {"11", "seg"}, {"255", "255"}};
  board *b = shared_board();
  int fds = ranks_open_fds(), r;
  for (b->how = 0; b->how < FAILURES; b->how++) {
    double t = test_now();
    CHECK_IS(cddp_spawn(fail_somehow, b, 5), CDDP_PEER_LOST);
    CHECK(test_now() - t < RANKS_WITHIN(1.5));
    CHECK(mentions("rank 2"));
    CHECK(mentions(words[b->how][0]) || mentions(words[b->how][1]));
    for (r = 0; r < 5; r++) CHECK(b->pid[r] > 0 && gone(b->pid[r]));
    CHECK(ranks_no_children());
    CHECK_EQ(ranks_open_fds(), fds);
    memset(b->pid, 0, sizeof b->pid);
  }
  CHECK_OK(cddp_spawn(sum_ranks, b, 4)); /* and the next works */
  munmap(b, sizeof *b);
}

/* The first to fail is named, not those that it took along. */
static int fail_in_group(int rank, void *arg) {
  cddp_group *g;
  float x = 1;
  int i;
  (void)arg;
  if (cddp_init(&g, NULL) != CDDP_OK) return 20;
  for (i = 0; i < 100000; i++) {
    if (rank == 3 && i == 30) return 9;
    if (cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_AVG, NULL) != CDDP_OK) return 30 + rank;
  }
  return 40;
}

static void test_first_is_named(void) {
  int i, named = 0;
  for (i = 0; i < 5; i++) {
    CHECK_IS(cddp_spawn(fail_in_group, NULL, 4), CDDP_PEER_LOST);
    named += mentions("rank 3") && mentions("9");
  }
  CHECK_EQ(named, 5);
}

/* Ranks that block SIGTERM are killed after 5 s. */
static int ignore_sigterm(int rank, void *arg) {
  board *b = (board *)arg;
  b->pid[rank] = getpid();
  if (rank == 0) {
    while (b->word[1] == 0) ranks_sleep(0.001);
    return 1;
  }
  signal(SIGTERM, SIG_IGN);
  __atomic_store_n(&b->word[1], 1, __ATOMIC_SEQ_CST);
  for (;;) ranks_sleep(1);
}

static void test_stubborn(void) {
  board *b = shared_board();
  double t = test_now();
  CHECK_IS(cddp_spawn(ignore_sigterm, b, 2), CDDP_PEER_LOST);
  t = test_now() - t;
  CHECK(t > 4.5 && t < 7 + RANKS_WITHIN(0.5));
  CHECK(mentions("rank 0"));
  CHECK(gone(b->pid[0]) && gone(b->pid[1]));
  munmap(b, sizeof *b);
}

/* A rank may itself fork; its own children are not cddp's. A spawn inside a spawned rank works. */
static int spawn_inside(int rank, void *arg) {
  board *b = (board *)arg;
  CHECK_OK(cddp_spawn(sum_ranks, b + 1 + rank, 2));
  CHECK(b[1 + rank].word[1] == 3);
  CHECK_IS(cddp_spawn(fail_in_group, NULL, 4), CDDP_PEER_LOST);
  return test_failures != 0;
}

static void test_nested(void) {
  board *b = (board *)ranks_shared(3 * sizeof *b);
  CHECK_OK(cddp_spawn(spawn_inside, b, 2));
  munmap(b, 3 * sizeof *b);
}

/* The caller's other children are left alone. */
static int stay(int rank, void *arg) {
  (void)rank;
  (void)arg;
  ranks_sleep(60);
  return 0;
}

static void test_other_children(void) {
  pid_t mine = ranks_fork(stay, 0, NULL);
  int status = 0;
  CHECK_OK(cddp_spawn(do_nothing, NULL, 2));
  CHECK_IS(cddp_spawn(fail_in_group, NULL, 4), CDDP_PEER_LOST);
  CHECK(waitpid(mine, &status, WNOHANG) == 0);
  kill(mine, SIGKILL);
  CHECK(waitpid(mine, &status, 0) == mine);
}

/* ORPHANS: the parent of a spawn is killed. ---------------------------------------------------- */

static int wait_for_death(int rank, void *arg) {
  board *b = (board *)arg;
  b->pid[rank] = getpid();
  __atomic_add_fetch(&b->how, 1, __ATOMIC_SEQ_CST);
  ranks_sleep(60);
  return 0;
}

static int spawn_and_wait(int rank, void *arg) {
  (void)rank;
  return cddp_spawn(wait_for_death, arg, 3) != CDDP_OK;
}

static void test_parent_dies(void) {
  board *b = shared_board();
  double deadline;
  int r, status, signal_number, reaped;
  for (signal_number = SIGKILL; signal_number != 0;
       signal_number = signal_number == SIGKILL ? SIGTERM : 0) {
    pid_t parent;
    memset(b, 0, sizeof *b);
    reaped = 0;
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); /* orphans come to this process */
    parent = ranks_fork(spawn_and_wait, 0, b);
    deadline = test_now() + RANKS_WITHIN(5.0);
    while (__atomic_load_n(&b->how, __ATOMIC_SEQ_CST) < 3 && test_now() < deadline)
      ranks_sleep(0.001);
    CHECK_EQ(b->how, 3);
    kill(parent, signal_number);
    CHECK(waitpid(parent, &status, 0) == parent);
    deadline = test_now() + RANKS_WITHIN(2.0);
    while (reaped < 3 && test_now() < deadline) {
      if (waitpid(-1, &status, WNOHANG) > 0)
        reaped++;
      else
        ranks_sleep(0.001);
    }
    CHECK_EQ(reaped, 3);
    for (r = 0; r < 3; r++) {
      CHECK(gone(b->pid[r]));
      if (!gone(b->pid[r]) && b->pid[r] > 0) kill(b->pid[r], SIGKILL);
    }
    prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0);
  }
  munmap(b, sizeof *b);
}

/* OUTPUT: what was buffered before is printed once, what ranks print is not lost. -------------- */

static board *exit_board;
static void count_exit(void) {
  __atomic_add_fetch(&exit_board->exit_handlers, 1, __ATOMIC_SEQ_CST);
}

static int print_rank(int rank, void *arg) {
  (void)arg;
  printf("<rank %d>\n", rank); /* not flushed: stdout is a file here */
  return 0;
}

static int print_around_spawn(int rank, void *arg) {
  int fd = open((const char *)arg, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
  (void)rank;
  if (fd < 0 || dup2(fd, 1) < 0) return 1;
  close(fd);
  atexit(count_exit);
  printf("<before>\n");
  if (cddp_spawn(print_rank, NULL, 3) != CDDP_OK) return 1;
  printf("<after>\n");
  return 0;
}

static int occurrences(const char *text, const char *word) {
  int n = 0;
  while ((text = strstr(text, word)) != NULL) {
    n++;
    text++;
  }
  return n;
}

static void test_output(void) {
  char path[] = P_tmpdir "/cddp_spawn_XXXXXX", text[512];
  int fd = mkstemp(path), status;
  ssize_t n;
  pid_t pid;
  CHECK(fd >= 0);
  exit_board = shared_board();
  pid = ranks_fork(print_around_spawn, 0, path);
  CHECK(waitpid(pid, &status, 0) == pid && status == 0);
  n = read(fd, text, sizeof text - 1);
  CHECK(n > 0);
  text[n > 0 ? n : 0] = 0;
  CHECK_EQ(occurrences(text, "<before>"), 1);
  CHECK_EQ(occurrences(text, "<after>"), 1);
  CHECK_EQ(occurrences(text, "<rank 0>"), 1);
  CHECK_EQ(occurrences(text, "<rank 1>"), 1);
  CHECK_EQ(occurrences(text, "<rank 2>"), 1);
  CHECK_EQ(exit_board->exit_handlers, 1); /* the parent's alone */
  close(fd);
  unlink(path);
  munmap(exit_board, sizeof *exit_board);
}

/* SIGNALS: the mask of the program and of its ranks is as before. ------------------------------ */

static int look_at_signals(int rank, void *arg) {
  sigset_t set;
  (void)rank;
  (void)arg;
  sigemptyset(&set);
  sigprocmask(SIG_SETMASK, NULL, &set);
  return sigismember(&set, SIGTERM) || sigismember(&set, SIGCHLD) || sigismember(&set, SIGINT);
}

static void test_signals(void) {
  sigset_t before, after;
  int i, same = 1;
  sigprocmask(SIG_SETMASK, NULL, &before);
  CHECK_OK(cddp_spawn(look_at_signals, NULL, 2));
  CHECK_IS(cddp_spawn(fail_in_group, NULL, 4), CDDP_PEER_LOST);
  sigprocmask(SIG_SETMASK, NULL, &after);
  for (i = 1; i < 32; i++) same = same && sigismember(&before, i) == sigismember(&after, i);
  CHECK(same);
}

/* THREADS -------------------------------------------------------------------------------------- */

static int count_threads(cddp_group *g, void *arg) {
  int *calls = (int *)arg;
  int32_t one = 1;
  CHECK(cddp_local_world_size(g) == cddp_world_size(g) && cddp_local_rank(g) == cddp_rank(g));
  __atomic_add_fetch(&calls[cddp_rank(g)], 1, __ATOMIC_SEQ_CST);
  CHECK_OK(cddp_all_reduce(g, &one, 1, CDDP_I32, CDDP_SUM, NULL));
  CHECK(one == cddp_world_size(g));
  return 0;
}

static int fail_thread_2(cddp_group *g, void *arg) {
  float x = 0;
  int i;
  (void)arg;
  for (i = 0; i < 100000; i++) {
    if (i == 10 && cddp_rank(g) == 2) return 6;
    if (cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL) != CDDP_OK) break;
  }
  CHECK_IS(cddp_barrier(g), CDDP_PEER_LOST);
  CHECK(mentions("rank 2"));
  return 0;
}

static void test_threads(void) {
  int calls[32], i, fds = ranks_open_fds(), tasks = ranks_threads();
  CHECK_IS(cddp_run_threads(NULL, NULL, 2), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_run_threads(count_threads, calls, 0), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_run_threads(count_threads, calls, -1), CDDP_INVALID_ARGUMENT);
  memset(calls, 0, sizeof calls);
  CHECK_OK(cddp_run_threads(count_threads, calls, 32));
  for (i = 0; i < 32; i++) CHECK_EQ(calls[i], 1);
  CHECK_OK(cddp_run_threads(count_threads, calls, 1));
  CHECK_IS(cddp_run_threads(fail_thread_2, NULL, 4), CDDP_PEER_LOST);
  CHECK(mentions("rank 2"));
  CHECK(mentions("6"));
  CHECK_OK(cddp_run_threads(count_threads, calls, 4));
  CHECK_EQ(ranks_open_fds(), fds);
  CHECK(ranks_threads_left(tasks));
}

/* Processes after threads: no thread is left to make the fork unsafe. */
static void test_both(void) {
  board *b = shared_board();
  int calls[8] = {0}, i;
  for (i = 0; i < 5; i++) {
    CHECK_OK(cddp_run_threads(count_threads, calls, 3));
    CHECK_OK(cddp_spawn(sum_ranks, b, 3));
  }
  munmap(b, sizeof *b);
}

int main(void) {
  setenv("CDDP_TIMEOUT_S", RANKS_SLOW ? "120" : "30", 0);
  RUN(test_success);
  RUN(test_invalid);
  RUN(test_environment);
  RUN(test_failure);
  RUN(test_first_is_named);
  RUN(test_nested);
  RUN(test_other_children);
  RUN(test_parent_dies);
  RUN(test_output);
  RUN(test_signals);
  RUN(test_threads);
  RUN(test_both);
  RUN(test_stubborn);
  return TEST_END();
}
