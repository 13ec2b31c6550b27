/* cddp_launch: this program starts itself as ranks, which do what their second argument says. */
#define CDDP_IMPLEMENTATION
#include "../cddp.h"
#include "ranks.h"

#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

static bool mentions(const char *text) { return strstr(cddp_error(), text) != NULL; }
static bool gone(pid_t pid) { return pid <= 0 || (kill(pid, 0) != 0 && errno == ESRCH); }

/* What ranks tell the test: a file in memory whose descriptor they inherit. */
typedef struct board {
  pid_t pid[8], grandchild[8];
  int started, signals, word[8];
} board;
static board *shared;

static void bump(int *counter) { __atomic_add_fetch(counter, 1, __ATOMIC_SEQ_CST); }
static int look(const int *counter) { return __atomic_load_n(counter, __ATOMIC_SEQ_CST); }

static board *map_board(int fd) {
  void *p = mmap(NULL, sizeof(board), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) exit(99);
  return (board *)p;
}

static void make_board(void) {
  int fd = (int)syscall(SYS_memfd_create, "board", 0u); /* open in what is executed */
  if (fd < 0 || ftruncate(fd, (off_t)sizeof(board)) != 0) exit(99);
  ranks_setenv("CDDP_TEST_BOARD", fd);
  shared = map_board(fd);
}

/* Waits until *counter is n. */
static void await(const int *counter, int n) {
  double deadline = test_now() + RANKS_WITHIN(10.0);
  while (look(counter) < n && test_now() < deadline) ranks_sleep(0.001);
  CHECK_EQ(look(counter), n);
}

static void check_gone(void) { /* at once, or when the kernel comes to it */
  double deadline = test_now() + RANKS_WITHIN(2.0);
  int i;
  for (i = 0; i < 8; i++) {
    while ((!gone(shared->pid[i]) || !gone(shared->grandchild[i])) && test_now() < deadline) {
      while (waitpid(shared->grandchild[i], NULL, WNOHANG) > 0) {}
      while (waitpid(shared->pid[i], NULL, WNOHANG) > 0) {} /* adopted by this process */
      ranks_sleep(0.001);
    }
    CHECK(gone(shared->pid[i]));
    CHECK(gone(shared->grandchild[i]));
  }
}

/* THE RANKS ------------------------------------------------------------------------------------ */

static void on_signal(int number) {
  (void)number;
  bump(&shared->signals);
}

static int env_int(const char *name) {
  const char *text = getenv(name);
  return text != NULL ? atoi(text) : -1;
}

static int rank_sums(void) {
  int32_t x = env_int("RANK") + 1;
  cddp_group *g;
  if (cddp_init(&g, NULL) != CDDP_OK) return fprintf(stderr, "%s\n", cddp_error()), 1;
  if (cddp_all_reduce(g, &x, 1, CDDP_I32, CDDP_SUM, NULL) != CDDP_OK) return 2;
  shared->word[cddp_rank(g)] = x;
  cddp_destroy(g);
  return 0;
}

/* Lines in pieces, of all lengths, on both outputs at once, the last one without its end. */
static int rank_prints(int rank) {
  static char text[5000];
  int i, n, fd;
  memset(text, 'a' + rank, sizeof text);
  for (i = 0; i < 600; i++) {
    fd = i % 3 == 0 ? 2 : 1;
    n = (int)(ranks_mix((uint64_t)rank, (uint64_t)i, 1) % (i % 50 == 0 ? 5000 : 80));
    dprintf(fd, "%d:", i);
    if (write(fd, text, (size_t)n / 2) < 0 || write(fd, text, (size_t)(n - n / 2)) < 0) return 1;
    dprintf(fd, i < 599 ? ":%d\n" : ":%d", n);
  }
  return 0;
}

static int rank_has_grandchild(int rank, bool leaves) {
  pid_t pid = fork();
  if (pid == 0) {
    for (;;) pause();
  }
  shared->grandchild[rank] = pid;
  bump(&shared->started);
  while (look(&shared->started) < env_int("LOCAL_WORLD_SIZE")) ranks_sleep(0.001);
  if (leaves) return 0;
  for (;;) pause();
}

static int rank_waits(int rank, void (*handler)(int)) {
  (void)rank;
  signal(SIGTERM, handler);
  signal(SIGUSR1, on_signal);
  bump(&shared->started);
  if (handler == SIG_IGN || handler == SIG_DFL)
    for (;;) pause();
  while (look(&shared->signals) < env_int("LOCAL_WORLD_SIZE")) ranks_sleep(0.001);
  return 0;
}

/* Rank 0 has its socket, nobody else can take the port, and no other rank has the descriptor. */
static int rank_checks_port(int rank) {
  struct sockaddr_in a;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
  socklen_t n = sizeof a;
  memset(&a, 0, sizeof a);
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  a.sin_port = htons((uint16_t)env_int("MASTER_PORT"));
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 1) == 0) return 1;
  if ((rank == 0) != (getenv("CDDP_LISTEN_FD") != NULL)) return 2;
  for (fd = 3; fd < 64; fd++) {
    bool same = getsockname(fd, (struct sockaddr *)&a, &n) == 0 && a.sin_family == AF_INET &&
                ntohs(a.sin_port) == env_int("MASTER_PORT");
    if (same != (rank == 0 && fd == env_int("CDDP_LISTEN_FD"))) return 3;
    n = sizeof a;
  }
  return rank_sums();
}

static bool is(const char *name, const char *value) {
  return getenv(name) != NULL && strcmp(getenv(name), value) == 0;
}

static int rank_environment(int rank) {
  char text[8];
  snprintf(text, sizeof text, "%d", rank);
  CHECK(is("RANK", text) && is("LOCAL_RANK", text));
  CHECK(is("WORLD_SIZE", "3") && is("LOCAL_WORLD_SIZE", "3"));
  CHECK(is("GROUP_RANK", "0") && is("GROUP_WORLD_SIZE", "1"));
  CHECK(is("MASTER_ADDR", "127.0.0.1") && env_int("MASTER_PORT") > 0);
  CHECK(is("OMP_NUM_THREADS", "1") && is("CDDP_TEST_KEEPS", "5"));
  CHECK(getenv("TORCHELASTIC_USE_AGENT_STORE") == NULL && getenv("TORCHELASTIC_RUN_ID") == NULL);
  CHECK(getpgrp() == getpid());
  return test_failures != 0;
}

/* As behind a program that keeps descriptors to itself. */
static int rank_without_descriptor(int rank) {
  setenv("CDDP_TIMEOUT_S", "2", 1);
  if (rank == 0 && fork() == 0)
    for (;;) pause();
  if (rank == 0) close(env_int("CDDP_LISTEN_FD"));
  return rank_sums();
}

static int rank_main(const char *what) {
  int rank = env_int("RANK");
  shared = map_board(env_int("CDDP_TEST_BOARD"));
  shared->pid[rank % 8] = getpid();
  if (strcmp(what, "sums") == 0) return rank_sums();
  if (strcmp(what, "prints") == 0) return rank_prints(rank);
  if (strcmp(what, "environment") == 0) return rank_environment(rank);
  if (strcmp(what, "port") == 0) return rank_checks_port(rank);
  if (strcmp(what, "leaves") == 0) return rank_has_grandchild(rank, true);
  if (strcmp(what, "stays") == 0) return rank_has_grandchild(rank, false);
  if (strcmp(what, "ends") == 0) return rank_waits(rank, on_signal);
  if (strcmp(what, "ignores") == 0) return rank_waits(rank, SIG_IGN);
  if (strcmp(what, "waits") == 0) return rank_waits(rank, SIG_DFL);
  if (strcmp(what, "floods") == 0)
    for (bump(&shared->started);;) printf("%0100d\n", 7);
  if (strcmp(what, "fails") == 0) return rank == 1 ? 7 : (ranks_sleep(60), 0);
  if (strcmp(what, "dies") == 0) return rank == 1 ? kill(getpid(), SIGKILL) : (ranks_sleep(60), 0);
  if (strcmp(what, "third time") == 0) return env_int("TORCHELASTIC_RESTART_COUNT") < 2 ? 4 : 0;
  if (strcmp(what, "without") == 0) return rank_without_descriptor(rank);
  return 98;
}

/* THE TESTS ------------------------------------------------------------------------------------ */

static const char *arguments[3];

static cddp_launch_desc describe(const char *what, int n) {
  cddp_launch_desc d;
  memset(&d, 0, sizeof d);
  memset(shared, 0, sizeof *shared);
  arguments[0] = "/proc/self/exe";
  arguments[1] = what;
  d.argv = arguments;
  d.nproc_per_node = n;
  d.color = -1;
  return d;
}

static void test_ranks(void) {
  cddp_launch_desc d = describe("sums", 4);
  cddp_launch_report report;
  sigset_t before, after;
  int fds = ranks_open_fds(), i;
  sigprocmask(SIG_SETMASK, NULL, &before);
  CHECK_OK(cddp_launch(&d, &report));
  for (i = 0; i < 4; i++) CHECK_EQ(shared->word[i], 10);
  CHECK(report.rank == -1 && report.signal == 0 && report.restarts == 0);
  setenv("CDDP_TEST_KEEPS", "5", 1);
  setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
  d = describe("environment", 3);
  CHECK_OK(cddp_launch(&d, NULL));
  unsetenv("TORCHELASTIC_USE_AGENT_STORE");
  CHECK(getenv("RANK") == NULL);
  d = describe("port", 3);
  CHECK_OK(cddp_launch(&d, NULL));
  d.master_addr = "localhost";
  CHECK_OK(cddp_launch(&d, NULL));
  CHECK_EQ(shared->word[2], 6);
  d = describe("sums", 3);
  d.serve_store = true; /* the ranks are its clients */
  CHECK_OK(cddp_launch(&d, NULL));
  CHECK_EQ(shared->word[2], 6);
  sigprocmask(SIG_SETMASK, NULL, &after);
  for (i = 1; i < 32; i++) CHECK(sigismember(&before, i) == sigismember(&after, i));
  CHECK(ranks_no_children());
  CHECK_EQ(ranks_open_fds(), fds);
}

static void test_invalid(void) {
  static const struct {
    int n, nodes, node, port;
    bool alone;
    const char *word;
  } bad[] = {{-1, 0, 0, 0, false, "nproc_per_node"}, {1 << 20, 0, 0, 0, false, "nproc_per_node"},
             {2, -1, 0, 0, false, "nnodes"},         {2, 2, 2, 0, false, "node_rank"},
             {2, 1, -1, 0, false, "node_rank"},      {2, 2, 1, 0, false, "master_addr"},
             {2, 2, 1, 0, true, "standalone"},       {2, 1, 0, 65536, false, "master_port"}};
  cddp_launch_report report;
  size_t i;
  for (i = 0; i < sizeof bad / sizeof *bad; i++) {
    cddp_launch_desc d = describe("sums", bad[i].n);
    d.nnodes = bad[i].nodes;
    d.node_rank = bad[i].node;
    d.master_port = bad[i].port;
    d.standalone = bad[i].alone;
    CHECK_IS(cddp_launch(&d, &report), CDDP_INVALID_ARGUMENT);
    CHECK(mentions(bad[i].word) && report.rank == -1);
  }
  CHECK_IS(cddp_launch(NULL, NULL), CDDP_INVALID_ARGUMENT);
  CHECK(ranks_no_children());
}

/* A file's bytes in memory; freed by the next call. */
static const char *contents(int fd) {
  static char text[1 << 20];
  ssize_t n = pread(fd, text, sizeof text - 1, 0);
  text[n > 0 ? n : 0] = 0;
  return text;
}

/* Every line is a whole one of rank_prints, and each rank's come in order on each output. */
static void check_lines(const char *text, int ranks, int want) {
  int next[2][8] = {{0}}, count = 0, rank, i, n, used;
  while (*text != 0) {
    size_t size = strcspn(text, "\n");
    bool good = sscanf(text, "[%d] %d:%n", &rank, &i, &used) == 2 && rank >= 0 && rank < ranks;
    const char *a = text + used, *end = a;
    while (good && *end == 'a' + rank) end++;
    good = good && sscanf(end, ":%d%n", &n, &used) == 1 && n == end - a &&
           end + used == text + size && text[size] == '\n' && i >= next[i % 3 == 0][rank];
    CHECK(good);
    if (!good) return;
    next[i % 3 == 0][rank] = i + 1;
    count++;
    text += size + 1;
  }
  CHECK_EQ(count, want);
}

static int temporary(void) {
  char path[] = P_tmpdir "/cddp_launch_XXXXXX";
  int fd = mkstemp(path);
  unlink(path);
  return fd;
}

static void test_lines(void) {
  cddp_launch_desc d = describe("prints", 4);
  int out = temporary(), err = temporary();
  d.out_fd = out;
  d.err_fd = err;
  CHECK_OK(cddp_launch(&d, NULL));
  check_lines(contents(out), 4, 4 * 400);
  check_lines(contents(err), 4, 4 * 200);
  CHECK(ftruncate(out, 0) == 0 && lseek(out, 0, SEEK_SET) == 0);
  d.err_fd = out; /* both in one */
  CHECK_OK(cddp_launch(&d, NULL));
  check_lines(contents(out), 4, 4 * 600);
  CHECK(ftruncate(out, 0) == 0 && lseek(out, 0, SEEK_SET) == 0);
  d = describe("prints", 1);
  d.out_fd = out;
  d.err_fd = -1;
  d.color = 1;
  CHECK_OK(cddp_launch(&d, NULL));
  CHECK(strncmp(contents(out), "\033[31m[0]\033[0m 1:", 15) == 0);
  CHECK(ftruncate(out, 0) == 0 && lseek(out, 0, SEEK_SET) == 0);
  d.no_prefix = true;
  CHECK_OK(cddp_launch(&d, NULL));
  CHECK(strncmp(contents(out), "1:", 2) == 0);
  close(out);
  close(err);
}

static void test_failure(void) {
  cddp_launch_desc d = describe("fails", 4);
  cddp_launch_report report;
  double t = test_now();
  CHECK_IS(cddp_launch(&d, &report), CDDP_PEER_LOST);
  CHECK(test_now() - t < RANKS_WITHIN(2.5));
  CHECK(report.rank == 1 && report.exit_code == 7 && report.signal == 0);
  CHECK(report.pid == shared->pid[1]);
  CHECK(mentions("rank 1") && mentions("code 7"));
  check_gone();
  d = describe("dies", 3);
  CHECK_IS(cddp_launch(&d, &report), CDDP_PEER_LOST);
  CHECK(report.rank == 1 && report.exit_code == -1 && report.signal == SIGKILL);
  CHECK(mentions("rank 1") && mentions("signal 9 (SIGKILL)"));
  check_gone();
  arguments[0] = "cddp-no-such-program";
  CHECK_IS(cddp_launch(&d, &report), CDDP_SYSTEM);
  CHECK(mentions("cddp-no-such-program") && mentions("PATH") && report.exit_code == 127);
  arguments[0] = "/";
  CHECK_IS(cddp_launch(&d, &report), CDDP_SYSTEM);
  CHECK_EQ(report.exit_code, 126);
  CHECK(ranks_no_children());
}

static void test_lost_descriptor(void) { /* somebody closed it on the way to rank 0 */
  cddp_launch_desc d = describe("without", 2);
  int err = temporary();
  d.err_fd = err;
  CHECK_IS(cddp_launch(&d, NULL), CDDP_PEER_LOST);
  CHECK(strstr(contents(err), "[0] cddp_init: descriptor ") != NULL);
  CHECK(strstr(contents(err), "(CDDP_LISTEN_FD)") != NULL);
  close(err);
}

static int restarts;
static void count_line(int level, const char *line, void *data) {
  CHECK(level == 1 && strstr(line, "rank ") != NULL && strstr(line, "code 4") != NULL);
  ++*(int *)data;
}

static void test_restarts(void) {
  cddp_launch_desc d = describe("third time", 2);
  cddp_launch_report report;
  char folder[] = P_tmpdir "/cddp_logs_XXXXXX", path[128];
  int i, fd;
  CHECK(mkdtemp(folder) != NULL);
  d.max_restarts = 1;
  d.logger.log = count_line;
  d.logger.user_data = &restarts;
  CHECK_IS(cddp_launch(&d, &report), CDDP_PEER_LOST);
  CHECK(report.restarts == 1 && restarts == 1 && mentions("after 1 restart, rank"));
  d.max_restarts = 3;
  CHECK_OK(cddp_launch(&d, &report));
  CHECK(report.restarts == 2 && restarts == 3 && report.rank == -1);
  d = describe("prints", 2);
  d.log_dir = folder;
  d.out_fd = d.err_fd = -1;
  CHECK_OK(cddp_launch(&d, &report));
  for (i = 0; i < 2; i++) {
    snprintf(path, sizeof path, "%s/rank%d.log", folder, i);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0 && strstr(contents(fd), "598:") != NULL);
    close(fd);
    unlink(path);
  }
  CHECK(rmdir(folder) == 0);
}

/* A launcher in a process of its own. */
static int launch_here(int rank, void *p) {
  cddp_launch_report report;
  cddp_result r = cddp_launch((const cddp_launch_desc *)p, &report);
  (void)rank;
  if (r == CDDP_ABORTED && report.rank == -1 && report.signal == SIGTERM) return 0;
  return fprintf(stderr, "%s: %s\n", cddp_result_name(r), cddp_error()), 1;
}

static int end_of(pid_t pid) {
  int status = -1;
  ranks_join(&pid, 1, RANKS_WITHIN(5.0), &status);
  return status;
}

static void test_leftovers(void) {
  cddp_launch_desc d = describe("leaves", 3);
  int number;
  pid_t pid;
  CHECK_OK(cddp_launch(&d, NULL)); /* a rank's own child ends with it */
  prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
  check_gone();
  for (number = SIGKILL; number != 0; number = number == SIGKILL ? SIGQUIT : 0) {
    d = describe("stays", 3);
    pid = ranks_fork(launch_here, 0, &d);
    await(&shared->started, 3);
    kill(pid, number);
    end_of(pid);
    check_gone();
  }
  while (waitpid(-1, NULL, 0) > 0) {} /* guards: they end as well */
  prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0);
}

static void test_signals(void) {
  cddp_launch_desc d = describe("ends", 3);
  pid_t pid = ranks_fork(launch_here, 0, &d);
  await(&shared->started, 3);
  kill(pid, SIGTERM); /* ranks handle it and end well, and still the launch was ended */
  CHECK_EQ(end_of(pid), 0);
  CHECK_EQ(shared->signals, 3);
  d = describe("waits", 3);
  pid = ranks_fork(launch_here, 0, &d);
  await(&shared->started, 3);
  kill(pid, SIGUSR1); /* passed on, nothing ends */
  await(&shared->signals, 3);
  kill(pid, SIGTERM);
  CHECK_EQ(end_of(pid), 0);
  d = describe("ignores", 3);
  pid = ranks_fork(launch_here, 0, &d);
  await(&shared->started, 3);
  kill(pid, SIGTERM);
  ranks_sleep(0.05); /* two at once would be one */
  kill(pid, SIGTERM); /* the second time it is SIGKILL */
  CHECK_EQ(end_of(pid), 0);
  check_gone();
}

/* Outputs that nobody reads: the launch can still be ended; that are gone: it ends by itself. */
static void test_outputs(void) {
  cddp_launch_desc d = describe("floods", 2);
  int ends[2];
  pid_t pid;
  CHECK(pipe(ends) == 0);
  d.out_fd = ends[1];
  pid = ranks_fork(launch_here, 0, &d);
  await(&shared->started, 2);
  ranks_sleep(0.05); /* until the pipe is full */
  kill(pid, SIGTERM);
  CHECK_EQ(end_of(pid), 0);
  check_gone();
  close(ends[0]);
  CHECK_IS(cddp_launch(&d, NULL), CDDP_IO);
  CHECK(mentions("Broken pipe"));
  close(ends[1]);
  check_gone();
  CHECK((d.out_fd = open("/dev/full", O_WRONLY | O_CLOEXEC)) >= 0);
  CHECK_IS(cddp_launch(&d, NULL), CDDP_IO);
  close(d.out_fd);
}

static int launch_node(int node, void *p) {
  cddp_launch_desc d = *(const cddp_launch_desc *)p;
  d.node_rank = node;
  return cddp_launch(&d, NULL) != CDDP_OK;
}

static void test_nodes(void) { /* two launchers, as on two machines */
  cddp_launch_desc d = describe("sums", 2);
  pid_t pid[2];
  int status[2], i;
  d.nnodes = 2;
  d.master_addr = "127.0.0.1";
  d.master_port = ranks_free_port();
  for (i = 0; i < 2; i++) pid[i] = ranks_fork(launch_node, i, &d);
  ranks_join(pid, 2, RANKS_WITHIN(15.0), status);
  CHECK(status[0] == 0 && status[1] == 0);
  for (i = 0; i < 4; i++) CHECK_EQ(shared->word[i], 10);
}

int main(int argc, char **argv) {
  if (argc > 1) return rank_main(argv[1]);
  setenv("CDDP_TIMEOUT_S", RANKS_SLOW ? "120" : "30", 0);
  make_board();
  RUN(test_ranks);
  RUN(test_invalid);
  RUN(test_lines);
  RUN(test_failure);
  RUN(test_lost_descriptor);
  RUN(test_restarts);
  RUN(test_leftovers);
  RUN(test_signals);
  RUN(test_outputs);
  RUN(test_nodes);
  return TEST_END();
}
