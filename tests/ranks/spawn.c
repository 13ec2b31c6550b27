/* cddp_spawn and cddp_run_threads: how ranks are started, and what is told of those that fail.

   Each test starts ranks that succeed, exit with a code, die of a signal, ignore signals, write
   to closed output, or leave other children; cddp_spawn must return in time, name the first
   failure, and leave no process, descriptor or changed signal mask behind. A parent that dies
   takes its ranks along. Nested starts, threads that exit, and systems without pidfds are tried
   too. */
#define CDDP_IMPLEMENTATION
#include "../../cddp.h"
#include "../ranks.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/utsname.h>

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

static int sum_ranks_by_hand(board *b) {
  return sum_ranks(getenv("RANK")[0] - '0', b);
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

/* ELASTIC -------------------------------------------------------------------------------------- */

static ranks_death *death(int n, int victim, int place, int deaths) {
  ranks_death *c = (ranks_death *)ranks_shared(sizeof *c);
  c->n = n;
  c->victim = victim;
  c->place = place;
  c->deaths = deaths;
  return c;
}

/* Starts n ranks, with one restart, and kills rank k % n at place k / n: before the model exists
   all start again, later the victim alone. */
static int die_once(int n, void *arg) {
  int k = *(int *)arg, part = k / n - RANKS_IN_CREATE, fds;
  ranks_death *c = death(n, k % n, k / n < RANKS_IN_CREATE ? k / n : RANKS_IN_CREATE, 0);
  char want[64];
  cddp_result r;
  if (part >= 0 && part < 3) { /* the first allocation, one in the middle, the last */
    c->stop_at = 1;
    CHECK_OK(cddp_spawn_elastic(ranks_dies, c, n, 0));
    c->allocation = part == 0 ? 1 : part == 1 ? c->allocations / 2 : c->allocations;
    CHECK(c->allocations > 10);
    memset(c->lives, 0, sizeof c->lives);
    c->stop_at = 0;
  }
  if (part >= 3) c->place = part == 3 ? RANKS_AFTER_CREATE : RANKS_IN_STEP;
  c->deaths = 1;
  fds = ranks_open_fds();
  r = cddp_spawn_elastic(ranks_dies, c, n, 1);
  snprintf(want, sizeof want, "rank %d (pid ", c->victim);
  if (n == 1 && part >= 3) {
    CHECK_IS(r, CDDP_PEER_LOST);
    CHECK(mentions(want) && mentions("killed by signal 9") &&
          mentions("no rank that has the elastic model is left"));
    CHECK(ranks_started_again(c, 0, 0));
  } else {
    CHECK_OK(r);
    if (part < 2) CHECK(ranks_started_again(c, 1, 0));
    else if (part > 2) CHECK(ranks_started_again(c, 0, 1));
    else CHECK(ranks_started_again(c, 1, 0) || ranks_started_again(c, 0, 1));
  }
  CHECK_EQ(ranks_open_fds(), fds);
  CHECK(ranks_no_children());
  if (test_failures > 0) fprintf(stderr, "%d ranks, case %d\n", n, k);
  munmap(c, sizeof *c);
  return test_failures != 0;
}

static void test_every_death(void) {
  pid_t pid[64];
  int status[64], n, k, count = 0;
  for (n = 1; n <= 4; n++)
    for (k = 0; k < 7 * n; k++) {
      bool in_create = k / n >= RANKS_IN_CREATE && k / n < 5;
      if (n >= 3 && (in_create || k / n == 6) && k % n != 4 - n) continue; /* to save time */
      pid[count++] = ranks_fork(die_once, n, &k);
      if (count % 10 != 0) continue; /* at the same time: they mostly wait */
      ranks_join(pid, 10, RANKS_WITHIN(20.0), status);
      CHECK(ranks_exited_well(status, 10));
      count = 0;
    }
  ranks_join(pid, count, RANKS_WITHIN(20.0), status);
  CHECK(ranks_exited_well(status, count));
}

/* Restarts before and after the model exists count together. */
static void test_restarts(void) {
  ranks_death *c = death(2, 1, RANKS_BEFORE_CREATE, 3);
  CHECK_OK(cddp_spawn_elastic(ranks_dies, c, 2, 3));
  CHECK(ranks_started_again(c, 3, 0));
  memset(c->lives, 0, sizeof c->lives);
  c->stop_at = 0;
  CHECK_IS(cddp_spawn_elastic(ranks_dies, c, 2, 2), CDDP_PEER_LOST);
  CHECK(mentions("rank 1 (pid ") && mentions("signal 9") && mentions("before the ranks had"));
  CHECK(ranks_started_again(c, 2, 0));
  memset(c->lives, 0, sizeof c->lives);
  c->place = RANKS_IN_STEP;
  CHECK_OK(cddp_spawn_elastic(ranks_dies, c, 2, 3));
  CHECK(c->lives[0] == 1 && c->lives[1] == 4 && c->joins[1] == 3);
  CHECK_IS(cddp_spawn_elastic(ranks_dies, c, 0, 4), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_spawn_elastic(ranks_dies, c, 2, -1), CDDP_INVALID_ARGUMENT);
  munmap(c, sizeof *c);
}

/* When the ranks that have the model are dead, one that waits to join does not keep the job. */
static void test_all_die(void) {
  ranks_death *c = death(3, 1, RANKS_IN_STEP, 1);
  double start = test_now();
  c->all_die = true;
  CHECK_IS(cddp_spawn_elastic(ranks_dies, c, 3, 50), CDDP_PEER_LOST);
  CHECK(mentions("signal 9") && mentions("no rank that has the elastic model is left"));
  CHECK(c->lives[1] == 2 && c->lives[0] + c->lives[2] <= 4);
  CHECK(test_now() - start < RANKS_WITHIN(5.0));
  CHECK(ranks_no_children());
  munmap(c, sizeof *c);
}

/* A rank of cddp_spawn inside an elastic job has no word with that job's supervisor. */
static int look_for_supervisor(int rank, void *arg) {
  (void)rank;
  (void)arg;
  return getenv("CDDP_SUPERVISOR") != NULL;
}

static int spawn_elastic_inside(int rank, void *arg) {
  if (getenv("CDDP_SUPERVISOR") == NULL) return 5;
  return rank == 0 ? cddp_spawn(look_for_supervisor, NULL, 2) != CDDP_OK
                   : cddp_spawn_elastic(ranks_dies, arg, 2, 1) != CDDP_OK;
}

static void test_nested_elastic(void) {
  ranks_death *c = death(2, 1, RANKS_AFTER_CREATE, 1);
  CHECK_OK(cddp_spawn_elastic(spawn_elastic_inside, c, 2, 0));
  CHECK(ranks_started_again(c, 0, 1));
  munmap(c, sizeof *c);
}

/* In shared memory: how many forks there are until one fails, as where a container has all the
   processes that it may. Children that begin before they should do so meanwhile. */
static int *forks_left;

pid_t fork(void) {
  __typeof__(fork) *real = (__typeof__(fork) *)dlsym(RTLD_NEXT, "fork");
  if (forks_left == NULL || __atomic_sub_fetch(forks_left, 1, __ATOMIC_SEQ_CST) != 0) return real();
  ranks_sleep(0.2);
  errno = EAGAIN;
  return -1;
}

/* A lost rank that cannot be replaced is no reason to end the others. */
static void test_no_replacement(void) {
  ranks_death *c = death(3, 1, RANKS_IN_STEP, 9);
  int *left = (int *)ranks_shared(sizeof *left);
  *left = 4;
  c->stop_at = 300;
  forks_left = left;
  CHECK_OK(cddp_spawn_elastic(ranks_dies, c, 3, 5));
  forks_left = NULL;
  CHECK_EQ(*left, 0);
  CHECK(ranks_started_again(c, 0, 0));
  CHECK(ranks_no_children());
  munmap(left, sizeof *left);
  munmap(c, sizeof *c);
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
  CHECK(is_set("OMP_NUM_THREADS", 1));
  return test_failures != 0;
}

static void test_environment(void) {
  static const char *const names[] = {"RANK",        "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                      "MASTER_ADDR", "MASTER_PORT"};
  int n = 3, i;
  setenv("CDDP_TEST_KEEPS", "5", 1);
  unsetenv("OMP_NUM_THREADS");
  CHECK_OK(cddp_spawn(look_at_environment, &n, n));
  for (i = 0; i < 6; i++) CHECK(getenv(names[i]) == NULL); /* the parent's own stays as it was */
  ranks_environment(7, 9, 1);                              /* and is overridden in the ranks */
  CHECK_OK(cddp_spawn(look_at_environment, &n, n));
  CHECK(is_set("RANK", 7) && is_set("WORLD_SIZE", 9) && is_set("MASTER_PORT", 1));
  for (i = 0; i < 6; i++) unsetenv(names[i]);
  unsetenv("CDDP_TEST_KEEPS");
}

/* A store of the caller's own, without a secret, is open to ranks that have one. */
static int look_for_secret(int rank, void *arg) {
  cddp_store_desc desc;
  cddp_store *server, *client;
  cddp_group *g;
  char where[64];
  (void)arg;
  memset(&desc, 0, sizeof desc);
  desc.init_method = "tcp://127.0.0.1:0";
  desc.is_server = true;
  CHECK_OK(cddp_store_create(&server, &desc));
  snprintf(where, sizeof where, "tcp://127.0.0.1:%d", cddp_store_port(server));
  desc.init_method = where;
  desc.is_server = false;
  CHECK_OK(cddp_store_create(&client, &desc));
  cddp_store_destroy(client);
  cddp_store_destroy(server);
  CHECK_OK(cddp_init(&g, NULL));
  CHECK(cddp_rank(g) == rank);
  cddp_destroy(g);
  return test_failures != 0;
}

static int meet_stranger(int rank, void *arg) { return ranks_meet_stranger(rank, *(int *)arg); }

/* Another user can disturb neither these ranks nor, with the user's own secret, any. */
static void test_stranger(void) {
  int n = 3;
  CHECK_OK(cddp_spawn(meet_stranger, &n, n));
  setenv("CDDP_SECRET", "mine", 1);
  CHECK_OK(cddp_spawn(look_for_secret, NULL, 2));
  unsetenv("CDDP_SECRET");
  CHECK_OK(cddp_spawn(look_for_secret, NULL, 2));
  CHECK(getenv("CDDP_JOB_SECRET") == NULL);
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

/* Each way in which fn can end without a return. */
enum { EXIT_0, EXIT_3, END_0, ABORTS, EXECS_TRUE, EXECS_FALSE, EXITS_THREAD, CANCELS, WAYS };

static void *sleep_on(void *arg) {
  ranks_sleep(60);
  return arg;
}

static int end_somehow(int rank, void *arg) {
  const int *how = (const int *)arg;
  pthread_t thread;
  (void)rank;
  switch (*how) {
  case EXIT_0: exit(0);
  case EXIT_3: exit(3);
  case END_0: _exit(0);
  case ABORTS:
    signal(SIGABRT, SIG_DFL);
    abort();
  case EXECS_TRUE: execl("/bin/sh", "sh", "-c", "exit 0", (char *)NULL); break;
  case EXECS_FALSE: execl("/bin/sh", "sh", "-c", "exit 4", (char *)NULL); break;
  case EXITS_THREAD: /* the process would end when its last thread does, by exit(0) */
    if (pthread_create(&thread, NULL, sleep_on, NULL) == 0) pthread_exit(NULL);
    break;
  default:
    pthread_cancel(pthread_self());
    pthread_testcancel();
  }
  return 77;
}

static void test_ends(void) {
  static const char *const words[WAYS] = {NULL, "code 3", NULL,       "signal 6",
                                          NULL, "code 4", "code 255", "code 255"};
  double start = test_now();
  int how;
  for (how = 0; how < WAYS; how++) {
    cddp_result want = words[how] == NULL ? CDDP_OK : CDDP_PEER_LOST;
    CHECK_IS(cddp_spawn(end_somehow, &how, 1), want);
    if (words[how] != NULL) CHECK(mentions("rank 0") && mentions(words[how]));
    CHECK_IS(cddp_spawn_elastic(end_somehow, &how, 1, 0), want);
    if (words[how] != NULL) CHECK(mentions("rank 0") && mentions(words[how]));
  }
  CHECK(test_now() - start < RANKS_WITHIN(10.0));
  CHECK(ranks_no_children());
}

/* The first to fail is named, not those that it took along. On a busy machine the parent can find
   several that have ended at once, and then names the lowest. */
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
  CHECK(named >= 3);
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

/* cddp_spawn's pipe gets the number of a closed stdout. What the program has printed must not get
   there: a byte of it is a child's sign to begin. */
static int note_begin(int rank, void *arg) {
  ((board *)arg)->word[rank] = 1;
  return 0;
}

static int spawn_closed(int rank, void *arg) {
  board *b = (board *)arg;
  (void)rank;
  close(0);
  close(1);
  printf("<before>\n");
  forks_left = &b->how;
  CHECK_IS(cddp_spawn(note_begin, b, 3), CDDP_SYSTEM);
  CHECK(mentions("fork") && b->how == 0);
  CHECK(b->word[0] == 0 && b->word[1] == 0);
  return 0;
}

static void test_closed_output(void) {
  board *b = shared_board();
  int status;
  pid_t pid;
  b->how = 3;
  pid = ranks_fork(spawn_closed, 0, b);
  CHECK(waitpid(pid, &status, 0) == pid && status == 0);
  munmap(b, sizeof *b);
}

enum { LINES = 3000 };

static int print_lines(int rank, void *arg) {
  int i, k, n;
  (void)arg;
  for (i = 0; i < LINES; i++) {
    n = i % 100 == 0 ? 3900 : (int)(ranks_mix((uint64_t)rank, (uint64_t)i, 3) % 90);
    printf("%d:%d:", rank, i);
    for (k = 0; k < n; k++) putchar('a' + rank);
    printf(":%d\n", n);
  }
  return 0;
}

static int print_lines_into(int fd, void *arg) {
  (void)arg;
  return dup2(fd, 1) < 0 || cddp_spawn(print_lines, NULL, 4) != CDDP_OK;
}

/* Every line is one of print_lines, whole, and each rank's are in order. */
static void check_lines(FILE *f) {
  static char line[8192];
  int next[4] = {0}, rank, i, n, used, count = 0;
  bool all = true;
  while (fgets(line, sizeof line, f) != NULL) { /* to its end, or who writes would wait for ever */
    bool good = sscanf(line, "%d:%d:%n", &rank, &i, &used) == 2 && rank >= 0 && rank < 4;
    const char *a = line + used, *end = a;
    while (good && *end == 'a' + rank) end++;
    good = good && sscanf(end, ":%d\n%n", &n, &used) == 1 && n == end - a && end[used] == 0;
    all = all && good && i == next[rank];
    if (good) next[rank] = i + 1;
    count++;
  }
  CHECK(all);
  CHECK_EQ(count, 4 * LINES);
}

/* Lines that ranks print at once are not cut into each other, in a file or in a pipe. */
static void test_lines(void) {
  char path[] = P_tmpdir "/cddp_spawn_XXXXXX";
  int fd = mkstemp(path), ends[2], status;
  FILE *f;
  pid_t pid;
  CHECK(fd >= 0);
  pid = ranks_fork(print_lines_into, fd, NULL);
  CHECK(waitpid(pid, &status, 0) == pid && status == 0);
  CHECK(lseek(fd, 0, SEEK_SET) == 0);
  CHECK((f = fdopen(fd, "r")) != NULL);
  check_lines(f);
  fclose(f);
  unlink(path);
  CHECK(pipe(ends) == 0);
  pid = ranks_fork(print_lines_into, ends[1], NULL);
  close(ends[1]);
  CHECK((f = fdopen(ends[0], "r")) != NULL);
  check_lines(f);
  fclose(f);
  CHECK(waitpid(pid, &status, 0) == pid && status == 0);
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

/* Exit codes that somebody else takes: SIGCHLD ignored, or a program that reaps all. */

enum { IGNORED, NO_ZOMBIES, HANDLER, THREAD, WAYS_TO_REAP };

static void reap_all(int number) {
  int saved = errno;
  (void)number;
  while (waitpid(-1, NULL, WNOHANG) > 0) {}
  errno = saved;
}

static void *reap_forever(void *p) {
  (void)p;
  for (;;) {
    if (waitpid(-1, NULL, 0) < 0) ranks_sleep(0.0002);
  }
  return NULL;
}

/* Whether the kernel keeps the status of a process that has been reaped: Linux 6.15. */
static bool kernel_keeps_status(void) {
  struct utsname u;
  int major = 0, minor = 0;
  return uname(&u) == 0 && sscanf(u.release, "%d.%d", &major, &minor) == 2 &&
         major * 1000 + minor >= 6015;
}

static void check_reaped(cddp_result r, const char *word) {
  if (r == CDDP_SYSTEM) {
    CHECK(mentions("another part of this program took its exit status"));
    CHECK(!kernel_keeps_status());
  } else {
    CHECK_IS(r, word != NULL ? CDDP_PEER_LOST : CDDP_OK);
    if (word != NULL) CHECK(mentions("rank 2") && mentions(word));
  }
}

static int spawn_reaped(int how, void *arg) {
  board *b = (board *)arg;
  struct sigaction a;
  pthread_t thread;
  int i;
  memset(&a, 0, sizeof a);
  a.sa_handler = how == IGNORED ? SIG_IGN : how == HANDLER ? reap_all : SIG_DFL;
  a.sa_flags = how == NO_ZOMBIES ? SA_NOCLDWAIT : 0;
  sigaction(SIGCHLD, &a, NULL);
  if (how == THREAD) CHECK_EQ(pthread_create(&thread, NULL, reap_forever, NULL), 0);
  for (i = 0; i < 200; i++) check_reaped(cddp_spawn(do_nothing, NULL, 3), NULL);
  check_reaped(cddp_spawn(sum_ranks, b, 3), NULL);
  b->how = RETURNS_7;
  check_reaped(cddp_spawn(fail_somehow, b, 3), "7");
  b->how = KILLS;
  check_reaped(cddp_spawn(fail_somehow, b, 3), "signal 9");
  _exit(test_failures != 0); /* the thread goes on to the end */
}

static void test_reaped(void) {
  board *b = (board *)ranks_shared(WAYS_TO_REAP * sizeof *b);
  int how, status[WAYS_TO_REAP];
  pid_t pid[WAYS_TO_REAP];
  for (how = 0; how < WAYS_TO_REAP; how++) pid[how] = ranks_fork(spawn_reaped, how, b + how);
  ranks_join(pid, WAYS_TO_REAP, RANKS_WITHIN(8.0), status); /* it spun for ever */
  for (how = 0; how < WAYS_TO_REAP; how++) CHECK_EQ(status[how], 0);
  munmap(b, WAYS_TO_REAP * sizeof *b);
}

/* NO PIDFDS: a kernel without them, or a container that denies them. -------------------------- */

static bool deny(uint32_t call, uint32_t error) {
  struct sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (error & SECCOMP_RET_DATA)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  struct sock_fprog program;
  program.len = sizeof code / sizeof *code;
  program.filter = code;
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static int doze(int rank, void *arg) {
  (void)rank;
  (void)arg;
  ranks_sleep(1.2);
  return 0;
}

static int spawn_without_pidfds(int error, void *arg) {
  board *b = (board *)arg;
  struct rlimit few = {24, 24};
  struct rusage use;
  CHECK(deny(SYS_pidfd_open, (uint32_t)error));
  CHECK_OK(cddp_spawn(sum_ranks, b, 3));
  CHECK(b->word[2] == 6);
  b->how = KILLS;
  CHECK_IS(cddp_spawn(fail_somehow, b, 3), CDDP_PEER_LOST);
  CHECK(mentions("rank 2") && mentions("signal 9"));
  CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0); /* fewer than there are children */
  CHECK_OK(cddp_spawn(doze, NULL, 40));
  getrusage(RUSAGE_SELF, &use);
  CHECK(use.ru_stime.tv_sec + use.ru_utime.tv_sec == 0); /* it slept, too */
  return 0;
}

static int spawn_too_many(int rank, void *arg) {
  struct rlimit few = {24, 24};
  double t = test_now();
  (void)rank;
  (void)arg;
  CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
  CHECK_IS(cddp_spawn(stay, NULL, 40), CDDP_SYSTEM);
  CHECK(mentions("ulimit -n") && ranks_no_children());
  CHECK(test_now() - t < RANKS_WITHIN(1.0));
  return 0;
}

static int spawn_without_port(int error, void *arg) {
  CHECK(deny(SYS_getsockname, (uint32_t)error));
  CHECK_IS(arg == NULL ? cddp_spawn(do_nothing, NULL, 2)
                       : cddp_spawn_elastic(do_nothing, NULL, 1, 3),
           CDDP_SYSTEM);
  CHECK(mentions("getsockname") && mentions(strerror(error)) && !mentions("MASTER_PORT"));
  return test_failures != 0;
}

/* Without getsockname nobody knows the port that the system has chosen. */
static void test_no_getsockname(void) {
  static const int errors[] = {EPERM, ENOSYS};
  int i, status[4];
  pid_t pid[4];
  for (i = 0; i < 4; i++)
    pid[i] = ranks_fork(spawn_without_port, errors[i % 2], i < 2 ? NULL : pid);
  ranks_join(pid, 4, RANKS_WITHIN(8.0), status);
  CHECK(ranks_exited_well(status, 4));
}

static void test_no_pidfds(void) {
  static const int errors[] = {EPERM, ENOSYS};
  board *b = (board *)ranks_shared(2 * sizeof *b);
  int i, status[2];
  pid_t pid[2];
  pid[0] = ranks_fork(spawn_too_many, 0, NULL);
  CHECK(waitpid(pid[0], status, 0) == pid[0] && status[0] == 0);
  for (i = 0; i < 2; i++) pid[i] = ranks_fork(spawn_without_pidfds, errors[i], b + i);
  ranks_join(pid, 2, RANKS_WITHIN(8.0), status);
  CHECK(status[0] == 0 && status[1] == 0);
  munmap(b, 2 * sizeof *b);
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

/* A rank that ends without coming back from fn: the others hear of it at once. */
static int leave_thread_1(cddp_group *g, void *arg) {
  int cancelled = *(int *)arg;
  if (cddp_rank(g) != 1) {
    CHECK_IS(cddp_barrier(g), CDDP_PEER_LOST);
    CHECK(mentions("rank 1"));
    return 0;
  }
  if (!cancelled) pthread_exit(NULL);
  pthread_cancel(pthread_self());
  pthread_testcancel();
  return 0;
}

static void test_thread_exit(void) {
  int cancelled, tasks = ranks_threads(), fds = ranks_open_fds();
  for (cancelled = 0; cancelled < 2; cancelled++) {
    double t = test_now();
    CHECK_IS(cddp_run_threads(leave_thread_1, &cancelled, 3), CDDP_PEER_LOST);
    CHECK(mentions("rank 1") && mentions("pthread_exit"));
    CHECK(test_now() - t < RANKS_WITHIN(1.0));
  }
  CHECK_EQ(ranks_open_fds(), fds);
  CHECK(ranks_threads_left(tasks));
}

/* fn may destroy its group itself, and then end well or not. */
static int destroy_group(cddp_group *g, void *arg) {
  int rank = cddp_rank(g);
  CHECK_OK(cddp_barrier(g));
  cddp_destroy(g);
  return rank == 1 ? *(int *)arg : 0;
}

static void test_thread_destroys(void) {
  int code, tasks = ranks_threads(), fds = ranks_open_fds();
  for (code = 0; code < 2; code++) {
    CHECK_IS(cddp_run_threads(destroy_group, &code, 3), code == 0 ? CDDP_OK : CDDP_PEER_LOST);
    CHECK(code == 0 || (mentions("rank 1") && mentions("returned 1")));
  }
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

static int sum_ranks_late(int rank, void *arg) {
  if (rank != 0) ranks_sleep(0.1); /* rank 0 has looked for other hosts by then */
  return sum_ranks(rank, arg);
}

/* Elastic ranks do connect, but only after a loss: creating the model says what is missing. */
static int create_elastic_without_network(int rank, void *arg) {
  float w = 1;
  cddp_param p = {"w", &w, NULL, 1, CDDP_F32};
  cddp_ddp_desc desc = {0};
  cddp_ddp *ddp;
  cddp_group *g;
  board *b = (board *)arg;
  desc.elastic = true;
  if (cddp_init(&g, NULL) != CDDP_OK) return 1;
  if (cddp_ddp_create(&ddp, g, &p, 1, &desc) != CDDP_NETWORK) return 2;
  if (strstr(cddp_error(), "ip link set lo up") == NULL) return 3;
  desc.elastic = false;
  if (cddp_ddp_create(&ddp, g, &p, 1, &desc) != CDDP_OK) return 4;
  cddp_ddp_destroy(ddp);
  cddp_destroy(g);
  b->word[rank] = -1;
  return 0;
}

/* A host without any network, loopback neither: its ranks need none. By cddp_spawn, and by hand. */
static void test_no_network(void) {
  pid_t pid = fork();
  int status = -1, i;
  CHECK(pid >= 0);
  if (pid == 0) {
    board *b = shared_board();
    pid_t ranks[2];
    if (unshare(CLONE_NEWNET) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) _exit(77);
    setenv("CDDP_TIMEOUT_S", RANKS_SLOW ? "60" : "5", 1);
    CHECK_OK(cddp_spawn(sum_ranks, b, 3));
    CHECK_EQ(b->word[2], 6);
    CHECK_OK(cddp_spawn(sum_ranks_late, b, 3));
    for (i = 1; i <= 3; i++) CHECK_OK(cddp_spawn(create_elastic_without_network, b, i));
    CHECK(b->word[0] == -1 && b->word[1] == -1 && b->word[2] == -1);
    setenv("WORLD_SIZE", "2", 1);
    setenv("MASTER_ADDR", "localhost", 1);
    setenv("MASTER_PORT", "29600", 1);
    for (i = 0; i < 2; i++) {
      setenv("RANK", i == 0 ? "0" : "1", 1);
      if ((ranks[i] = fork()) == 0) {
        int code = sum_ranks_by_hand(b);
        if (code != 0) printf("%s\n", cddp_error());
        fflush(NULL);
        _exit(code);
      }
    }
    for (i = 0; i < 2; i++) CHECK(waitpid(ranks[i], &status, 0) == ranks[i] && status == 0);
    setenv("RANK", "0", 1);
    setenv("MASTER_ADDR", "::1", 1);
    CHECK(sum_ranks_by_hand(b) != 0); /* or there is no IPv6: "not supported" */
    CHECK(strstr(cddp_error(), "loopback interface is down") || strstr(cddp_error(), " not supp"));
    fflush(NULL);
    _exit(test_failures != 0);
  }
  CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) printf("no right to make a namespace: test_no_network left out\n");
  else CHECK_EQ(WEXITSTATUS(status), 0);
}

/* One thread: its group's memory is unmapped once, so what fn allocates afterwards stays. */
static int destroys_and_allocates(cddp_group *g, void *arg) {
  size_t n = 400000, i;
  char **out = (char **)arg;
  cddp_destroy(g);
  *out = (char *)malloc(n);
  if (*out == NULL) return 1;
  for (i = 0; i < n; i++) (*out)[i] = (char)i;
  return 0;
}

/* Rank 0 returns and leaves a group of cddp_group_split: rank 1, which waits there, hears of it. */
static int leaves_a_split_group(cddp_group *g, void *arg) {
  cddp_group *both = NULL;
  (void)arg;
  CHECK_OK(cddp_group_split(g, 0, cddp_rank(g), &both));
  if (cddp_rank(g) == 0) return 0;
  CHECK_IS(cddp_barrier(both), CDDP_PEER_LOST);
  cddp_destroy(both);
  return 0;
}

/* Rank 0 returns after the first step, without cddp_ddp_destroy: rank 1's next step fails, or with
   an elastic model (arg not NULL) continues alone. */
static int leaves_a_model(cddp_group *g, void *arg) {
  float w[100] = {0};
  cddp_param p = {"w", w, NULL, 100, CDDP_F32};
  cddp_ddp_desc desc;
  cddp_sgd_desc rule;
  cddp_ddp *d = NULL;
  cddp_optim *o = NULL;
  cddp_result r = CDDP_OK;
  int step, shard, steps = cddp_rank(g) == 0 ? 1 : 4;
  memset(&desc, 0, sizeof desc);
  memset(&rule, 0, sizeof rule);
  desc.elastic = arg != NULL;
  desc.shards = 2;
  rule.lr = 0.1;
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, &desc));
  CHECK_OK(cddp_sgd_create(&o, &p, 1, &rule));
  for (step = 0; step < steps && r == CDDP_OK; step++) {
    while (cddp_ddp_next_shard(d, &shard)) CHECK_OK(cddp_ddp_ready(d, 0));
    r = cddp_ddp_step(d, o);
  }
  CHECK_IS(r, cddp_rank(g) == 0 || arg != NULL ? CDDP_OK : CDDP_PEER_LOST);
  cddp_optim_destroy(o);
  if (cddp_rank(g) != 0) cddp_ddp_destroy(d);
  return 0;
}

static void test_thread_leftovers(void) {
  char *out = NULL;
  double t = test_now();
  size_t i;
  int k;
  for (k = 0; k < 3; k++) {
    CHECK_OK(cddp_run_threads(destroys_and_allocates, &out, 1));
    for (i = 0; i < 400000 && out[i] == (char)i;) i++;
    CHECK_EQ(i, 400000);
    free(out);
  }
  CHECK_OK(cddp_run_threads(leaves_a_split_group, NULL, 2));
  CHECK_OK(cddp_run_threads(leaves_a_model, NULL, 2));
  CHECK_OK(cddp_run_threads(leaves_a_model, &k, 2));
  CHECK(test_now() - t < RANKS_WITHIN(5.0));
}

int main(void) {
  setenv("CDDP_TIMEOUT_S", RANKS_SLOW ? "120" : "30", 0);
  RUN(test_success);
  RUN(test_no_network);
  RUN(test_invalid);
  RUN(test_every_death);
  RUN(test_restarts);
  RUN(test_all_die);
  RUN(test_nested_elastic);
  RUN(test_no_replacement);
  RUN(test_environment);
  RUN(test_stranger);
  RUN(test_failure);
  RUN(test_ends);
  RUN(test_first_is_named);
  RUN(test_nested);
  RUN(test_other_children);
  RUN(test_parent_dies);
  RUN(test_output);
  RUN(test_closed_output);
  RUN(test_lines);
  RUN(test_signals);
  RUN(test_reaped);
  RUN(test_no_pidfds);
  RUN(test_no_getsockname);
  RUN(test_threads);
  RUN(test_thread_exit);
  RUN(test_thread_leftovers);
  RUN(test_thread_destroys);
  RUN(test_both);
  RUN(test_stubborn);
  return TEST_END();
}
