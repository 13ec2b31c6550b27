/* cddprun, the launcher (examples/cddprun.c), with this program as its ranks.

   A rank does what its second argument says: prints, exits, dies, hangs, writes without newline,
   or trains an elastic model. The tests read cddprun's output, its exit code and its log files,
   and look for processes left behind: the first failure is named and ends the others, signals are
   passed on, restarts and --elastic replace ranks, two launches on one machine do not meet.
   CDDPRUN in the environment names another cddprun. */
#define CDDP_IMPLEMENTATION
#include "../../cddp.h"
#include "../ranks.h"

#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>

static bool gone(pid_t pid) { return pid <= 0 || (kill(pid, 0) != 0 && errno == ESRCH); }

/* What ranks tell the test: a file in memory whose descriptor they inherit. */
typedef struct board {
  pid_t pid[8], grandchild[8];
  int started, signals, word[8];
  ranks_death death;
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

static int rank_prints_bytes(void) { /* 300001 of all values, at uneven times */
  static unsigned char bytes[300001];
  size_t i, at;
  for (i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)ranks_mix(i, 1, 1);
  for (at = 0; at < sizeof bytes; at += i) {
    i = 1 + ranks_mix(at, 2, 2) % 9000;
    if (i > sizeof bytes - at) i = sizeof bytes - at;
    if (write(1, bytes + at, i) != (ssize_t)i) return 1;
    if (at % 7 == 0) ranks_sleep(0.06); /* long enough for a part of a line to leave */
  }
  return 0;
}

/* Each of these lines when the test says so. */
static int rank_prompts(int rank) {
  static const char *const lines[] = {"name? ", NULL, "yes\n", "10%\r20%\r", "1%\r100%\nend\r\n"};
  int i;
  for (i = 0; i < 5; i++) {
    while (look(&shared->started) < i) ranks_sleep(0.001);
    if (rank == 0 && lines[i] != NULL) dprintf(1, "%s", lines[i]);
    if (rank == 1 && i == 1) dprintf(1, "line\n");
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

/* Rank 1 dies in its first two lives, and prints what it is in each. */
static int rank_is_lost(int rank) {
  ranks_death *c = &shared->death;
  if (rank == 1) {
    printf("life %d, to join: %d\n", c->lives[1] + 1, is("CDDP_JOIN", "1"));
    fflush(stdout);
  }
  return ranks_dies(rank, c);
}

/* R, S, T (stopped), Z (dead, but not waited for) and so on; 0: no such process. */
static char state_of(pid_t pid) {
  char name[32], text[512], *end;
  size_t n;
  FILE *f;
  snprintf(name, sizeof name, "/proc/%d/stat", (int)pid);
  if ((f = fopen(name, "r")) == NULL) return 0;
  n = fread(text, 1, sizeof text - 1, f);
  fclose(f);
  text[n] = 0;
  return (end = strrchr(text, ')')) != NULL && end[1] == ' ' ? end[2] : (char)0;
}

static void kill_and_await(pid_t pid, int number, char state) {
  double until = test_now() + 10;
  kill(pid, number);
  while (state_of(pid) != state && test_now() < until) ranks_sleep(0.001);
}

/* Rank 0 lets cddprun see the deaths of both others at once, and outlives them until one has come
   again. */
static int rank_loses_two(int rank) {
  double until = test_now() + 20;
  cddp_group *g = NULL;
  cddp_ddp *d = NULL;
  float w = 0;
  cddp_param p = {"w", &w, NULL, 1, CDDP_F32};
  cddp_ddp_desc desc;
  memset(&desc, 0, sizeof desc);
  desc.elastic = true;
  desc.shards = 3;
  if (rank != 0 && is("CDDP_JOIN", "1")) return bump(&shared->started), 0;
  if (cddp_init(&g, NULL) != CDDP_OK) return fprintf(stderr, "%s\n", cddp_error()), 1;
  if (cddp_ddp_create(&d, g, &p, 1, &desc) != CDDP_OK) return 2;
  bump(&shared->started);
  while (look(&shared->started) < 3 && test_now() < until) ranks_sleep(0.001);
  if (rank == 0) {
    kill_and_await(getppid(), SIGSTOP, 'T');
    kill_and_await(shared->pid[1], SIGKILL, 'Z');
    kill_and_await(shared->pid[2], SIGKILL, 'Z');
    kill(getppid(), SIGCONT);
  }
  while (look(&shared->started) < 4 && test_now() < until) ranks_sleep(0.001);
  return look(&shared->started) != 4;
}

static int rank_main(const char *what) {
  int rank = env_int("RANK");
  shared = map_board(env_int("CDDP_TEST_BOARD"));
  shared->pid[rank % 8] = getpid();
  if (strcmp(what, "sums") == 0) return rank_sums();
  if (strcmp(what, "prints") == 0) return rank_prints(rank);
  if (strcmp(what, "binary") == 0) return rank_prints_bytes();
  if (strcmp(what, "prompts") == 0) return rank_prompts(rank);
  if (strcmp(what, "closed") == 0) return rank_prints(rank) || rank_sums();
  if (strcmp(what, "stranger") == 0) return ranks_meet_stranger(rank, env_int("WORLD_SIZE"));
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
  if (strcmp(what, "lost") == 0) return rank_is_lost(rank);
  if (strcmp(what, "death") == 0) return ranks_dies(rank, &shared->death);
  if (strcmp(what, "loses two") == 0) return rank_loses_two(rank);
  if (strcmp(what, "all fail") == 0) return 3 + rank;
  if (strcmp(what, "fails at once") == 0) return bump(&shared->started), printf("here\n"), 3;
  if (strcmp(what, "skips") == 0)
    return rank == 1 ? 0 : (setenv("CDDP_TIMEOUT_S", "1", 1), rank_sums());
  if (strcmp(what, "without") == 0) return rank_without_descriptor(rank);
  return 98;
}

/* THE TESTS ------------------------------------------------------------------------------------ */

static char self[512], cddprun[600];
static int out = -1, err = -1; /* files that take what cddprun prints; -1: its own outputs */

static int temporary(void) {
  char path[] = P_tmpdir "/cddp_launch_XXXXXX";
  int fd = mkostemp(path, O_CLOEXEC);
  unlink(path);
  return fd;
}

/* The bytes of a file; overwritten by the next call. */
static const char *contents(int fd) {
  static char text[1 << 20];
  ssize_t n = pread(fd, text, sizeof text - 1, 0);
  text[n > 0 ? n : 0] = 0;
  return text;
}

static void empty(int fd) { CHECK(ftruncate(fd, 0) == 0 && lseek(fd, 0, SEEK_SET) == 0); }

static bool said(const char *text) { return strstr(contents(err), text) != NULL; }

/* Starts cddprun with options, words apart, and this program to do `what`. */
static ranks_death plan; /* for "death" and "lost" */
static bool keep_board;  /* another cddprun of the job has started */

static pid_t start(const char *options, const char *what) {
  static char text[1024];
  char *argv[64], *word;
  int n = 0;
  pid_t pid;
  if (!keep_board) memset(shared, 0, sizeof *shared);
  if (!keep_board) shared->death = plan;
  snprintf(text, sizeof text, "%s", options);
  argv[n++] = cddprun;
  for (word = strtok(text, " "); word != NULL && n < 60; word = strtok(NULL, " ")) argv[n++] = word;
  argv[n] = NULL;
  if (what != NULL) {
    argv[n++] = self;
    argv[n] = strdup(what);
    argv[n + 1] = NULL;
  }
  fflush(NULL);
  if ((pid = fork()) == 0) {
    if (out >= 0) dup2(out, 1);
    if (err >= 0) dup2(err, 2);
    execv(cddprun, argv);
    _exit(99);
  }
  if (what != NULL) free(argv[n]);
  return pid;
}

/* The exit code; -1: it did not end, or a signal killed it. */
static int end_of(pid_t pid, double seconds) {
  int status = -1;
  ranks_join(&pid, 1, RANKS_WITHIN(seconds), &status);
  return status >= 0 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int run(const char *options, const char *what) {
  if (err >= 0) empty(err);
  if (out >= 0 && out != err) empty(out);
  return end_of(start(options, what), 15);
}

/* The exit code of a shell's command, which prints into our files. */
static int shell(const char *command) {
  pid_t pid;
  fflush(NULL);
  if ((pid = fork()) == 0) {
    dup2(out, 1);
    dup2(err, 2);
    execl("/bin/sh", "sh", "-c", command, (char *)NULL);
    _exit(99);
  }
  return end_of(pid, 10);
}

static void test_ranks(void) {
  int i;
  CHECK_EQ(run("-n 4", "sums"), 0);
  for (i = 0; i < 4; i++) CHECK_EQ(shared->word[i], 10);
  setenv("CDDP_TEST_KEEPS", "5", 1);
  setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
  CHECK_EQ(run("-n 3", "environment"), 0);
  unsetenv("TORCHELASTIC_USE_AGENT_STORE");
  CHECK_EQ(run("-n 3", "port"), 0);
  CHECK_EQ(run("-n 3 --master-addr localhost", "port"), 0);
  CHECK_EQ(shared->word[2], 6);
  CHECK_EQ(run("-n 3", "stranger"), 0); /* another user cannot disturb their meeting */
  CHECK_EQ(run("-n 3 --serve-store", "sums"), 0); /* the ranks are its clients */
  CHECK_EQ(shared->word[2], 6);
  check_gone();
}

static void test_invalid(void) {
  static const char *const bad[][2] = {
      {"-n -1", "nproc-per-node"},
      {"-n 0", "nproc-per-node"},
      {"-n 1048576", "nproc-per-node"},
      {"-n 2x", "nproc-per-node"},
      {"--nnodes -1", "nnodes"},
      {"--nnodes 0", "nnodes"},
      {"--nnodes 2 --node-rank 2 --master-addr a", "node-rank"},
      {"--node-rank -1", "node-rank"},
      {"--nnodes 2 --node-rank 1", "master-addr"},
      {"--nnodes 2 --standalone", "standalone"},
      {"--master-port 65536", "master-port"},
      {"--nnodes 2 --master-addr a --serve-store", "serve-store"},
      {"--max-restarts -1", "max-restarts"},
      {"--color pink", "color"},
      {"--min-nproc 1", "min-nproc"},
      {"-n 2 --elastic --min-nproc 3", "min-nproc"},
      {"--no-such", "no such option"},
      {"-n", "nproc-per-node"},
      {"--nnodes 2 --master-addr a", "--node-rank"}, /* which machine is this? */
      {"--nnodes 2 --master-addr a --nproc-per-node 2", "--node-rank"},
      {"-n 02", "nproc-per-node"},
      {"-n +2", "nproc-per-node"},
      {"-n 2\r", "not 2\\r"},
      {"--master-port=029500", "master-port"},
      /* torchrun's */
      {"--nproc-per-node=auto", "auto"},
      {"--nproc_per_node gpu", "gpu"},
      {"--no-python", "is not needed"},
      {"--no_python -n 2", "is not needed"},
      {"--rdzv-backend=c10d", "--master-addr"},
      {"--rdzv_endpoint a:1", "torchrun's"},
      {"-m train", "python3 -m"},
      {"--module train", "python3 -m"},
      {"--tee 3", "--log-dir"},
      {"--nnodes=1:2", "nnodes"},
      /* mpirun's */
      {"-n4", "-n N, with a space, not -n4"},
      {"-np 4", "-n N, with a space, not -np"},
      {"-np4", "-n N, with a space, not -np4"},
      {"-nx", "no such option: -nx"},
      /* more ranks than a job can have */
      {"--nnodes 65 -n 64 --node-rank 0 --master-addr a", "at most 4096"},
      {"--nnodes 65536 -n 4096 --node-rank 0 --master-addr a", "at most 4096"},
      {"--nnodes 4097 --node-rank 0 --master-addr a", "at most 4096"}};
  const char *text;
  size_t i;
  for (i = 0; i < sizeof bad / sizeof *bad; i++) {
    CHECK_EQ(run(bad[i][0], strcmp(bad[i][0], "-n") != 0 ? "sums" : NULL), 2);
    test_count();
    if (!said("cddprun: ") || !said(bad[i][1]) || shared->pid[0] != 0)
      test_fail(__FILE__, __LINE__, "%s: not \"%s\" but %s", bad[i][0], bad[i][1], contents(err));
    CHECK(said("see cddprun --help"));
    text = strstr(contents(err), "\ncddprun: "); /* the last line, behind another one */
    CHECK(text != NULL && strchr(text + 1, '\n') == text + strlen(text) - 1);
  }
  empty(out);
  CHECK_EQ(run("--help", NULL), 0);
  CHECK(strstr(contents(out), "--node-rank") != NULL && contents(err)[0] == 0);
  CHECK_EQ(run("-n 2", NULL), 2);
  CHECK(said("no program"));
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

static void test_lines(void) {
  int before = out, errors = err;
  CHECK_EQ(run("-n 4", "prints"), 0);
  check_lines(contents(out), 4, 4 * 400);
  check_lines(contents(err), 4, 4 * 200);
  err = out;
  CHECK_EQ(run("-n 4", "prints"), 0); /* both in one */
  check_lines(contents(out), 4, 4 * 600);
  err = errors;
  CHECK_EQ(run("-n 1 --color always", "prints"), 0);
  CHECK(strncmp(contents(out), "\033[31m[0]\033[0m 1:", 15) == 0);
  CHECK_EQ(run("-n 1 --no-prefix", "prints"), 0);
  CHECK(strncmp(contents(out), "1:", 2) == 0);
  out = before;
}

/* Bytes leave as they came: none added, none lost, with an end of line or without. */
static void test_binary(void) {
  uint64_t i, size;
  const char *text;
  struct stat s;
  CHECK_EQ(run("-n 1 --no-prefix", "binary"), 0);
  CHECK(fstat(out, &s) == 0 && (size = (uint64_t)s.st_size) == 300001);
  text = contents(out);
  for (i = 0; i < 300001 && text[i] == (char)ranks_mix(i, 1, 1); i++) {}
  CHECK_EQ(i, 300001);
}

/* The text that has come into a pipe until `want` is there, or 2 s have passed. */
static bool comes(int fd, const char *want) {
  static char text[4096];
  double deadline = test_now() + RANKS_WITHIN(2.0);
  size_t n = 0;
  ssize_t got;
  while (test_now() < deadline && n < sizeof text - 1) {
    got = read(fd, text + n, sizeof text - 1 - n);
    if (got > 0) n += (size_t)got;
    text[n] = 0;
    if (strcmp(text, want) == 0) return true;
    ranks_sleep(0.002);
  }
  test_fail(__FILE__, __LINE__, "\"%s\" came, not \"%s\"", text, want);
  return false;
}

/* A prompt, a progress bar and another rank's line between them, as they come. */
static void test_prompt(void) {
  int ends[2], before = out;
  pid_t pid;
  CHECK(pipe2(ends, O_CLOEXEC) == 0 && fcntl(ends[0], F_SETFL, O_NONBLOCK) == 0);
  out = ends[1];
  pid = start("-n 2 --color never", "prompts");
  CHECK(comes(ends[0], "[0] name? "));
  bump(&shared->started); /* 1: rank 1 prints a line */
  CHECK(comes(ends[0], "\n[1] line\n"));
  bump(&shared->started); /* 2: rank 0 goes on in its own */
  CHECK(comes(ends[0], "[0] yes\n"));
  bump(&shared->started); /* 3: a progress bar, and the end of its line */
  CHECK(comes(ends[0], "[0] 10%\r[0] 20%\r"));
  bump(&shared->started); /* 4: a whole one, and Windows' end of a line */
  CHECK(comes(ends[0], "[0] 1%\r[0] 100%\n[0] end\r\n"));
  CHECK_EQ(end_of(pid, 5), 0);
  out = before;
  close(ends[0]);
  close(ends[1]);
}

static void test_failure(void) {
  char pid[32];
  double t = test_now();
  CHECK_EQ(run("-n 4", "fails"), 7);
  CHECK(test_now() - t < RANKS_WITHIN(2.5));
  snprintf(pid, sizeof pid, "(pid %d)", (int)shared->pid[1]);
  CHECK(said("rank 1") && said("code 7") && said(pid));
  check_gone();
  CHECK_EQ(run("-n 3", "dies"), 128 + SIGKILL);
  CHECK(said("rank 1") && said("signal 9 (Killed)"));
  check_gone();
  CHECK_EQ(run("-n 3 cddp-no-such-program", NULL), 127);
  CHECK(said("cddp-no-such-program") && said("PATH"));
  CHECK_EQ(run("-n 3 /", NULL), 126);
  CHECK_EQ(run("-n 3", "skips"), 1);
  CHECK(said("exited with code 1") && said("before that rank 1 had exited with code 0") &&
        said("cddp_init"));
  CHECK_EQ(run("-n 4", "fails"), 7); /* nobody had */
  CHECK(!said("code 0"));
}

/* A program that is there and cannot be run; one of PyTorch. */
static void test_programs(void) {
  static const struct {
    const char *name, *text;
    int mode, code;
    const char *says[2];
  } cases[] = {{"script",
                "#!/no/such/interpreter\nexit 0\n",
                0755,
                127,
                {"its first line names an interpreter that is not there", "/no/such/interpreter"}},
               {"crlf",
                "#!/bin/sh\r\nexit 0\r\n",
                0755,
                127,
                {"its first line names an interpreter that is not there", "/bin/sh\\r"}},
               {"plain", "#!/bin/sh\nexit 0\n", 0644, 126, {"chmod +x", "plain"}},
               {"train.py", "#!/bin/sh\nexit 3\n", 0755, 3, {"--serve-store", "PyTorch"}},
               {"train.sh", "#!/bin/sh\nexit 3\n", 0755, 3, {"code 3", ""}}};
  char folder[] = "/tmp/cddp-launch-XXXXXX", path[64], options[128];
  size_t i;
  CHECK(mkdtemp(folder) != NULL);
  for (i = 0; i < sizeof cases / sizeof *cases; i++) {
    FILE *f;
    snprintf(path, sizeof path, "%s/%s", folder, cases[i].name);
    CHECK((f = fopen(path, "w")) != NULL && fputs(cases[i].text, f) >= 0 && fclose(f) == 0);
    CHECK(chmod(path, (mode_t)cases[i].mode) == 0);
    snprintf(options, sizeof options, "-n 2 %s", path);
    CHECK_EQ(run(options, NULL), cases[i].code);
    test_count();
    if (!said(cases[i].says[0]) || !said(cases[i].says[1]))
      test_fail(__FILE__, __LINE__, "%s: %s", cases[i].name, contents(err));
    CHECK(said("--serve-store") == (i == 3));
    unlink(path);
  }
  rmdir(folder);
}

static void test_lost_descriptor(void) { /* somebody closed it on the way to rank 0 */
  CHECK(run("-n 2", "without") > 0);
  CHECK(said("[0] cddp_init: descriptor ") && said("(CDDP_LISTEN_FD)"));
}

/* SIGCHLD ignored by whoever started cddprun: exit codes are not lost, and nothing hangs. */
static void test_ignored_child_signal(void) {
  struct rusage before, after;
  signal(SIGCHLD, SIG_IGN);
  CHECK(getrusage(RUSAGE_CHILDREN, &before) == 0);
  {
    pid_t pid = start("-n 2", "fails");
    int status = 0;
    double deadline = test_now() + RANKS_WITHIN(5.0);
    while (kill(pid, 0) == 0 && test_now() < deadline) ranks_sleep(0.005);
    CHECK(gone(pid));
    if (!gone(pid)) kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
  }
  signal(SIGCHLD, SIG_DFL);
  CHECK(getrusage(RUSAGE_CHILDREN, &after) == 0);
  CHECK(said("rank 1") && said("code 7"));
  check_gone();
}

/* Lines of standard output and error that were closed go nowhere; the ranks run well. */
static void test_closed_files(void) {
  static const char *const closed[] = {"0", "1", "2", "01", "02", "12", "012"};
  char command[1500];
  size_t i, k;
  for (i = 0; i < sizeof closed / sizeof *closed; i++) {
    int n = snprintf(command, sizeof command, "exec '%s' -n 2 '%s' closed", cddprun, self);
    for (k = 0; closed[i][k] != 0; k++)
      n += snprintf(command + n, sizeof command - (size_t)n, " %c>&-", closed[i][k]);
    memset(shared, 0, sizeof *shared);
    CHECK_EQ(shell(command), 0);
    CHECK(shared->word[0] == 3 && shared->word[1] == 3);
  }
}

static void test_restarts(void) {
  const char *line;
  CHECK_EQ(run("-n 2 --max-restarts 1", "third time"), 4);
  CHECK(said("restart 1 of 1") && said("after 1 restart, rank"));
  CHECK_EQ(run("-n 2 --max-restarts 3", "third time"), 0);
  line = strstr(contents(err), "code 4; restart 1 of 3");
  CHECK(line != NULL && strstr(line, "code 4; restart 2 of 3") != NULL && !said("3 of 3"));
}

static void plan_death(int n, int victim, int place, int deaths) {
  memset(&plan, 0, sizeof plan);
  plan.n = n;
  plan.victim = victim;
  plan.place = place;
  plan.deaths = deaths;
}

/* Ranks that are lost and start again while the others go on. */
static void test_elastic(void) {
  char folder[64] = "/tmp/cddp-elastic.XXXXXX", options[160], file[96];
  int i;
  CHECK(mkdtemp(folder) != NULL);
  setenv("CDDP_JOIN", "1", 1); /* the first ranks are not to join */
  snprintf(options, sizeof options, "-n 2 --elastic --max-restarts 5 --log-dir %s", folder);
  plan_death(2, 1, RANKS_IN_STEP, 2);
  CHECK_EQ(run(options, "lost"), 0);
  unsetenv("CDDP_JOIN");
  CHECK(said("signal 9 (Killed); it joins again: restart 1 of 5"));
  CHECK(said("signal 9 (Killed); it joins again: restart 2 of 5") && !said("restart 3"));
  CHECK(strstr(contents(out), "[1] life 1, to join: 0\n") != NULL);
  CHECK(strstr(contents(out), "[1] life 3, to join: 1\n") != NULL);
  for (i = 0; i < 4; i++) {
    snprintf(file, sizeof file, i < 2 ? "%s/rank%d.log" : "%s/rank1.restart%d.log", folder,
             i < 2 ? i : i - 1);
    CHECK(unlink(file) == 0);
  }
  CHECK(rmdir(folder) == 0);
  plan.ends = true;
  CHECK_EQ(run("-n 2 --elastic --max-restarts 1", "death"), 0);
  CHECK(said("restart 1 of 1") && said("signal 9 (Killed); 1 go on"));
  plan_death(2, 1, RANKS_IN_STEP, 1);
  CHECK_EQ(run("-n 2 --elastic --min-nproc 2", "death"), 128 + SIGKILL);
  CHECK(said("(--min-nproc)"));
  check_gone();
}

/* Before the model exists no rank can join: all start again. The deaths and the joins count
   together. */
static void test_elastic_start(void) {
  int n, victim, i;
  for (n = 1; n <= 3; n++)
    for (victim = 0; victim < n; victim += n == 3 ? 2 : 1) {
      char options[64];
      snprintf(options, sizeof options, "-n %d --elastic --max-restarts 1", n);
      plan_death(n, victim, victim == 1 ? RANKS_BEFORE_INIT : RANKS_BEFORE_CREATE, 1);
      CHECK_EQ(run(options, "death"), 0);
      CHECK(said("before the ranks had created the elastic model; all start again: restart 1 of"));
      CHECK(ranks_started_again(&shared->death, 1, 0));
      plan_death(n, victim, RANKS_AFTER_CREATE, 1);
      CHECK_EQ(run(options, "death"), n > 1 ? 0 : 128 + SIGKILL);
      CHECK(said(n > 1 ? "it joins again: restart 1 of 1" : "no rank that has the elastic model"));
      CHECK(ranks_started_again(&shared->death, 0, n > 1));
    }
  plan_death(2, 1, RANKS_BEFORE_CREATE, 2);
  CHECK_EQ(run("-n 2 --elastic --max-restarts 1", "death"), 128 + SIGKILL);
  CHECK(said("cddprun: after 1 restart, rank 1 (pid ") && said("before the ranks had created"));
  CHECK_EQ(run("-n 1 --elastic --max-restarts 9", "all fail"), 3);
  CHECK(said("restart 9 of 9"));
  i = run("-n 3 --elastic --max-restarts 2", "all fail");
  CHECK(i >= 3 && i <= 5);
  plan_death(3, 1, RANKS_IN_STEP, 1); /* one that waits to join keeps no dead job */
  plan.all_die = true;
  CHECK_EQ(run("-n 3 --elastic --max-restarts 50", "death"), 128 + SIGKILL);
  CHECK(said("no rank that has the elastic model is left"));
  CHECK(shared->death.lives[1] == 2 && shared->death.lives[0] + shared->death.lives[2] <= 4);
  check_gone();
}

/* Each cddprun of several restarts its own ranks, and knows of its own alone. */
static void test_elastic_nodes(void) {
  static const int places[] = {RANKS_BEFORE_INIT, RANKS_BEFORE_CREATE, RANKS_AFTER_CREATE};
  static const int victims[] = {3, 0, 2};
  char options[2][160];
  pid_t pid[2];
  int status[2], i, k;
  for (k = 0; k < 3; k++) {
    int port = ranks_free_port();
    plan_death(4, victims[k], places[k], 1);
    for (i = 0; i < 2; i++) {
      snprintf(options[i], sizeof options[i],
               "-n 2 --nnodes=2 --node-rank %d --master-addr 127.0.0.1 --master-port %d --elastic "
               "--max-restarts 2", i, port);
      ranks_setenv("CDDP_HOST_ID", i);
      keep_board = i > 0;
      pid[i] = start(options[i], "death");
    }
    keep_board = false;
    unsetenv("CDDP_HOST_ID");
    ranks_join(pid, 2, RANKS_WITHIN(15.0), status);
    CHECK(status[0] == 0 && status[1] == 0);
    if (k == 2) CHECK(ranks_started_again(&shared->death, 0, 1));
    for (i = 0; i < 4; i++) {
      CHECK(shared->death.lives[i] <= 3);
      CHECK(shared->death.joins[i] == (k == 2 && i == plan.victim));
    }
    if (test_failures > 0) break;
  }
}

/* A rank that fails at once ends the start: the others are not started, and it is told. */
static void test_failure_at_the_start(void) {
  CHECK_EQ(run("-n 400", "fails at once"), 3);
  CHECK(shared->started >= 1 && shared->started < 300);
  CHECK(said("exited with code 3") && strstr(contents(out), "[0] here\n") != NULL);
  check_gone();
}

/* Colors are for a terminal of cddprun's own, not for one that Open MPI gives a rank. */
static void test_color(void) {
  static const char *const launcher[] = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"};
  int terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC), file = out, i, k;
  bool opened = terminal >= 0 && grantpt(terminal) == 0 && unlockpt(terminal) == 0;
  char text[4096];
  ssize_t n;
  CHECK(opened);
  for (i = 0; opened && i < 2; i++) {
    setenv("TERM", "xterm", 1);
    unsetenv("NO_COLOR");
    out = open(ptsname(terminal), O_RDWR | O_NOCTTY | O_CLOEXEC);
    for (k = 0; k < 2 && i == 1; k++) setenv(launcher[k], k == 0 ? "0" : "1", 1);
    empty(err);
    CHECK_EQ(end_of(start("-n 1", "fails at once"), 15), 3);
    n = read(terminal, text, sizeof text - 1);
    text[n > 0 ? n : 0] = 0;
    CHECK(strstr(text, "here") != NULL);
    CHECK((strstr(text, "\033[") != NULL) == (i == 0));
    close(out);
    for (k = 0; k < 2; k++) unsetenv(launcher[k]);
  }
  out = file;
  if (terminal >= 0) close(terminal);
}

/* Two that die between two looks: the one that comes again counts among those that are left. */
static void test_two_at_once(void) {
  CHECK_EQ(run("-n 3 --elastic --max-restarts 1 --min-nproc 2", "loses two"), 0);
  CHECK(said("it joins again: restart 1 of 1") && said("; 2 go on"));
  CHECK_EQ(shared->started, 4);
  check_gone();
}

/* --log-dir makes a file of each rank, in a folder of one's own alone. */
static void test_logs(void) {
  char folder[] = P_tmpdir "/cddp_logs_XXXXXX", path[128], target[128], options[128];
  int i, fd;
  struct stat s;
  CHECK(mkdtemp(folder) != NULL);
  snprintf(options, sizeof options, "-n 2 --log-dir %s", folder);
  CHECK_EQ(run(options, "prints"), 0);
  for (i = 0; i < 2; i++) {
    snprintf(path, sizeof path, "%s/rank%d.log", folder, i);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0 && strstr(contents(fd), "598:") != NULL);
    close(fd);
    unlink(path);
  }
  /* A link in place of a log, to another file: that stays as it is. */
  snprintf(target, sizeof target, "%s/precious", folder);
  fd = open(target, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  CHECK(write(fd, "keep", 4) == 4);
  snprintf(path, sizeof path, "%s/rank1.log", folder);
  CHECK(symlink(target, path) == 0);
  CHECK_EQ(run(options, "prints"), 1);
  CHECK(said("rank1.log") && strcmp(contents(fd), "keep") == 0);
  unlink(path);
  CHECK(link(target, path) == 0);
  CHECK_EQ(run(options, "prints"), 1);
  CHECK(said("rank1.log") && strcmp(contents(fd), "keep") == 0);
  unlink(path);
  CHECK(mkfifo(path, 0600) == 0); /* and one that nobody reads holds nothing up */
  CHECK_EQ(run(options, "prints"), 1);
  CHECK(said("rank1.log"));
  unlink(path);
  snprintf(path, sizeof path, "%s/rank0.log", folder);
  unlink(path);
  close(fd);
  unlink(target);
  if (geteuid() == 0 && chown(folder, 1234, 1234) == 0) { /* a folder of somebody else's */
    CHECK_EQ(run(options, "prints"), 1);
    CHECK(said(folder) && said("1234") && stat(path, &s) != 0);
  }
  CHECK(rmdir(folder) == 0);
}

static void test_leftovers(void) {
  int number;
  pid_t pid;
  CHECK_EQ(run("-n 3", "leaves"), 0); /* a rank's own child ends with it */
  prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
  check_gone();
  pid = start("-n 3", "stays");
  await(&shared->started, 3);
  kill(pid, SIGQUIT);
  CHECK_EQ(end_of(pid, 5), 128 + SIGQUIT);
  check_gone();
  pid = start("-n 3", "waits"); /* killed, it takes its ranks along */
  await(&shared->started, 3);
  kill(pid, SIGKILL);
  CHECK_EQ(end_of(pid, 5), -1);
  check_gone();
  for (number = 0; waitpid(-1, NULL, WNOHANG) > 0; number++) {}
  prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0);
}

static void test_signals(void) {
  pid_t pid;
  empty(err);
  pid = start("-n 3", "ends");
  await(&shared->started, 3);
  kill(pid, SIGTERM); /* ranks handle it and end well, and still the run was ended */
  CHECK_EQ(end_of(pid, 5), 128 + SIGTERM);
  CHECK_EQ(shared->signals, 3);
  CHECK(said("signal 15 (Terminated)"));
  pid = start("-n 3", "waits");
  await(&shared->started, 3);
  kill(pid, SIGUSR1); /* passed on, nothing ends */
  await(&shared->signals, 3);
  kill(pid, SIGTERM);
  CHECK_EQ(end_of(pid, 5), 128 + SIGTERM);
  pid = start("-n 3", "ignores");
  await(&shared->started, 3);
  kill(pid, SIGTERM);
  ranks_sleep(0.05); /* two at once would be one */
  kill(pid, SIGTERM); /* the second time it is SIGKILL */
  CHECK_EQ(end_of(pid, 5), 128 + SIGTERM);
  check_gone();
}

/* Outputs that nobody reads: the run can still be ended; that are gone: it ends by itself. */
static void test_outputs(void) {
  int ends[2], before = out;
  pid_t pid;
  CHECK(pipe2(ends, O_CLOEXEC) == 0);
  out = ends[1];
  pid = start("-n 2", "floods");
  await(&shared->started, 2);
  ranks_sleep(0.05); /* until the pipe is full */
  kill(pid, SIGTERM);
  CHECK_EQ(end_of(pid, 5), 128 + SIGTERM);
  check_gone();
  empty(err);
  pid = start("-n 2", "floods");
  close(ends[0]);
  CHECK_EQ(end_of(pid, 5), 1);
  CHECK(said("Broken pipe"));
  close(ends[1]);
  check_gone();
  CHECK((out = open("/dev/full", O_WRONLY | O_CLOEXEC)) >= 0);
  CHECK_EQ(end_of(start("-n 2", "floods"), 5), 1);
  close(out);
  out = before;
}

/* Shells' limits: a stack of 64 KiB, and few descriptors, of which each rank takes three. */
static void test_limits(void) {
  char command[1500];
  if (!RANKS_SLOW) { /* a sanitizer's frames are several times as large */
    snprintf(command, sizeof command, "ulimit -s 64; exec '%s' -n 3 '%s' sums", cddprun, self);
    memset(shared, 0, sizeof *shared);
    CHECK_EQ(shell(command), 0);
    CHECK_EQ(shared->word[2], 6);
    snprintf(command, sizeof command, "ulimit -s 64; exec '%s' -n 2 --serve-store '%s' sums",
             cddprun, self);
    CHECK_EQ(shell(command), 0);
    CHECK_EQ(shared->word[1], 3);
  }
  empty(err);
  snprintf(command, sizeof command, "ulimit -n 40; exec '%s' -n 20 '%s' waits", cddprun, self);
  memset(shared, 0, sizeof *shared);
  CHECK_EQ(shell(command), 1);
  CHECK(said("ulimit -n"));
  check_gone();
}

static void test_nodes(void) { /* two of them, as on two machines */
  char options[2][128];
  pid_t pid[2];
  int status[2], i, port = ranks_free_port();
  for (i = 0; i < 2; i++) {
    snprintf(options[i], sizeof options[i],
             "-n 2 --nnodes=2 --node_rank %d --master-addr 127.0.0.1 --master-port %d", i, port);
    pid[i] = start(options[i], "sums");
  }
  ranks_join(pid, 2, RANKS_WITHIN(15.0), status);
  CHECK(status[0] == 0 && status[1] == 0);
  for (i = 0; i < 4; i++) CHECK_EQ(shared->word[i], 10);
}

/* The program beside this one that ninja has built. */
static void find_programs(void) {
  ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
  const char *other = getenv("CDDPRUN"), *slash = strrchr(self, '/');
  if (n <= 0 || slash == NULL) exit(99);
  snprintf(cddprun, sizeof cddprun, "%.*s/cddprun.program", (int)(slash - self), self);
  if (other != NULL) snprintf(cddprun, sizeof cddprun, "%s", other);
}

int main(int argc, char **argv) {
  if (argc > 1) return rank_main(argv[1]);
  setenv("CDDP_TIMEOUT_S", RANKS_SLOW ? "120" : "30", 0);
  find_programs();
  make_board();
  out = temporary();
  err = temporary();
  RUN(test_ranks);
  RUN(test_invalid);
  RUN(test_lines);
  RUN(test_binary);
  RUN(test_prompt);
  RUN(test_failure);
  RUN(test_programs);
  RUN(test_ignored_child_signal);
  RUN(test_closed_files);
  RUN(test_lost_descriptor);
  RUN(test_restarts);
  RUN(test_elastic);
  RUN(test_elastic_start);
  RUN(test_elastic_nodes);
  RUN(test_failure_at_the_start);
  RUN(test_color);
  RUN(test_two_at_once);
  RUN(test_logs);
  RUN(test_leftovers);
  RUN(test_signals);
  RUN(test_outputs);
  RUN(test_limits);
  RUN(test_nodes);
  return TEST_END();
}
