/* cddp_init: variables, addresses, files, secrets; late, missing and wrong ranks; each error's
   words.

   A `member` is a process with its own environment, descriptor and delay; a test starts several
   and reads what each was told. Ranks come in any order, twice, from another job, with another
   secret or version, with too few descriptors, behind a blocked port, or never: the ranks that
   are there must start, or fail in time with a text that names the rank, the address or the
   variable. Namespaces stand for containers. Hosts are CDDP_HOST_ID; launchers' variables are
   tests/rooms/discovery.c. */
#define CDDP_IMPLEMENTATION
#include "../../cddp.h"
#include "../inside.h"
#include "../ranks.h"

#include <dlfcn.h>
#include <fenv.h>
#include <float.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netdb.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

/* What one process saw, in shared memory. */
typedef struct seen {
  cddp_result result;
  char text[512];
  double seconds;
  int sum, rank, world, fds, threads; /* fds and threads: more than before, after cddp_destroy */
  bool out_is_null;
  int jobs;        /* bits: which jobs its ranks are of */
  cddp_result end; /* how its steps ended, and what that said */
  char end_text[512];
  int local;       /* ranks that share memory */
  char ready[256]; /* what its logger was told once it was a member */
} seen;

/* One process to be: its variables and its description. */
typedef struct member {
  int rank, world; /* for the variables; world 0: none are set */
  int port;
  double delay;
  const char *name, *value; /* one more variable, or one taken away (value NULL) */
  cddp_group_desc desc;
  bool null_desc;
  bool dies;               /* by SIGKILL, once it is a member */
  int fp;                  /* floating-point mode: 1 rounds upward, 2 flushes subnormals to 0 */
  rlim_t files, file_size; /* limits; 0: as they are */
  int denied;              /* number of a system call that gives EPERM; 0: none */
  uid_t user;              /* 0: as this process */
  int job;                 /* which of two at once; 0: there is one */
  double stays;            /* s that it goes on making steps */
  int pinned;              /* to one core: the first that it may use is 1; 0: to none */
  int blocked, free_calls; /* a firewall: 1 refuses its connections to ports other than
                                MASTER_PORT, 2 drops them; after so many */
  pid_t suspends;          /* see the function connect; 0: none */
  const char *stops_at;    /* where it suspends itself, once: a CDDP__POINT; NULL: nowhere */
  double named;            /* seconds from its start until "late.invalid" resolves */
  const char *limit;       /* of its container's processor time, as cgroups write it; or NULL */
  seen *seen;
} member;

static const char *const variables[] = {"RANK",        "WORLD_SIZE",     "LOCAL_RANK",
                                        "MASTER_ADDR", "MASTER_PORT",    "LOCAL_WORLD_SIZE",
                                        "CDDP_SECRET", "CDDP_TIMEOUT_S", "CDDP_PORTS"};

static void clear_variables(void) {
  size_t i;
  for (i = 0; i < sizeof variables / sizeof *variables; i++) unsetenv(variables[i]);
}

static void set_fp_mode(int fp) {
  if (fp == 1) fesetround(FE_UPWARD);
#if defined(__x86_64__)
  if (fp == 2) __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
#elif defined(__aarch64__)
  uint64_t csr;
  __asm__ __volatile__("mrs %0, fpcr" : "=r"(csr));
  if (fp == 2) __asm__ __volatile__("msr fpcr, %0" : : "r"(csr | 1 << 24));
#endif
}

static void limit(__rlimit_resource_t what, rlim_t most) {
  struct rlimit l;
  l.rlim_cur = l.rlim_max = most;
  if (most != 0) CHECK_EQ(setrlimit(what, &l), 0);
}

/* As a container's sandbox may: the call fails with EPERM. */
static void deny(int call) {
  struct sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)call, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  struct sock_fprog program = {4, rules};
  if (call == 0) return;
  CHECK_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  CHECK_EQ(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0), 0);
}

/* Steps like those of training; the ranks end together. Notes of which jobs the ranks are. */
static void train(cddp_group *g, const member *m) {
  double end = test_now() + m->stays;
  int32_t seen_jobs[3] = {0, 0, 1};
  cddp_result r = CDDP_OK;
  while (r == CDDP_OK && seen_jobs[2]) {
    seen_jobs[0] = m->job == 1;
    seen_jobs[1] = m->job == 2;
    seen_jobs[2] = test_now() < end;
    r = cddp_all_reduce(g, seen_jobs, 3, CDDP_I32, CDDP_MAX, NULL);
    if (r == CDDP_OK) m->seen->jobs = seen_jobs[0] | seen_jobs[1] << 1;
    ranks_sleep(0.003);
  }
  m->seen->end = r;
  snprintf(m->seen->end_text, sizeof m->seen->end_text, "%s", r != CDDP_OK ? cddp_error() : "");
}

static void pin(int place) {
  cpu_set_t all, one;
  size_t i = 0;
  CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
  for (;; i++)
    if (CPU_ISSET(i, &all) && --place == 0) break;
  CPU_ZERO(&one);
  CPU_SET(i, &one);
  CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
}

/* As in a container whose processor time is limited. files: "NAME=TEXT;NAME=TEXT" of cgroups. */
static bool contain(const char *files) {
  char all[128], *line, *rest = all;
  FILE *file;
  if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
      mount("none", "/sys/fs/cgroup", "tmpfs", 0, NULL) != 0)
    return false;
  CHECK_EQ(mkdir("/sys/fs/cgroup/cpu", 0700), 0);
  snprintf(all, sizeof all, "%s", files);
  while ((line = strsep(&rest, ";")) != NULL) {
    char path[128], *text = strchr(line, '=');
    *text++ = 0;
    snprintf(path, sizeof path, "/sys/fs/cgroup/%s", line);
    file = fopen(path, "w");
    CHECK(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
  }
  return true;
}

static void note_ready(int level, const char *line, void *user_data) {
  seen *s = (seen *)user_data;
  if (level == 2 && strstr(line, "is ready") != NULL)
    snprintf(s->ready, sizeof s->ready, "%s", line);
}

/* A firewall before this process. What is dropped goes to a socket whose queue is full. */
static int blocked, free_calls, open_port, full_port;

/* A process to which this one connects on this host, and which is suspended while this one sends
   its first message: it finds all that has happened in this time at once. 0: none. -1: this process
   is suspended after that message. */
static pid_t suspends;

int connect(int fd, const struct sockaddr *a, socklen_t n) {
  const struct sockaddr_in *in = (const struct sockaddr_in *)(const void *)a;
  if (blocked != 0 && a->sa_family == AF_INET && ntohs(in->sin_port) != open_port &&
      free_calls-- <= 0) {
    struct sockaddr_in full = *in;
    full.sin_port = htons((uint16_t)full_port);
    errno = ECONNREFUSED;
    return blocked == 1 ? -1 : (int)syscall(SYS_connect, fd, &full, sizeof full);
  }
  if (syscall(SYS_connect, fd, a, n) != 0) return -1;
  if (suspends > 0 && a->sa_family == AF_UNIX) {
    ranks_sleep(0.005); /* it accepts */
    kill(suspends, SIGSTOP);
  }
  return 0;
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
  ssize_t n = syscall(SYS_sendmsg, fd, message, flags);
  pid_t pid = suspends;
  suspends = 0;
  if (pid < 0) raise(SIGSTOP);
  if (pid > 0) {
    ranks_sleep(0.5); /* a coordinator looks for the root every 0.4 s at least */
    kill(pid, SIGCONT);
    ranks_sleep(0.05);
  }
  return n;
}

static const char *stops_at;
static double named_at; /* "late.invalid" is this host, but only from then on */

static void at_point(const char *name) {
  if (stops_at == NULL || strcmp(name, stops_at) != 0) return;
  stops_at = NULL;
  raise(SIGSTOP);
}

static int join_group(int slot, void *arg) {
  member *m = (member *)arg;
  seen *s = m->seen;
  int32_t one = 1;
  cddp_group *g = (cddp_group *)(void *)s;
  double t;
  (void)slot;
  ranks_sleep(m->delay);
  s->fds = ranks_open_fds();
  s->threads = ranks_threads();
  if (m->pinned > 0) pin(m->pinned);
  if (m->limit != NULL && !contain(m->limit)) {
    snprintf(s->ready, sizeof s->ready, "no right");
    return 0;
  }
  set_fp_mode(m->fp);
  limit(RLIMIT_NOFILE, m->files);
  limit(RLIMIT_FSIZE, m->file_size);
  if (m->user != 0) CHECK(setgid(m->user) == 0 && setuid(m->user) == 0);
  blocked = m->blocked;
  free_calls = m->free_calls;
  open_port = m->port;
  suspends = m->suspends;
  stops_at = m->stops_at;
  inside_at_point = at_point;
  named_at = test_now() + m->named;
  deny(m->denied);
  m->desc.logger.log = note_ready;
  m->desc.logger.user_data = s;
  t = test_now();
  s->result = cddp_init(&g, m->null_desc ? NULL : &m->desc);
  s->seconds = test_now() - t;
  s->out_is_null = g == NULL;
  snprintf(s->text, sizeof s->text, "%s", s->result != CDDP_OK ? cddp_error() : "");
  if (s->result == CDDP_OK) {
    s->rank = cddp_rank(g);
    s->world = cddp_world_size(g);
    s->local = cddp_local_world_size(g);
    if (cddp_all_reduce(g, &one, 1, CDDP_I32, CDDP_SUM, NULL) == CDDP_OK) s->sum = one;
    if (m->dies) kill(getpid(), SIGKILL);
    if (m->job != 0) train(g, m);
  }
  cddp_destroy(g);
  ranks_threads_left(s->threads);
  s->threads = ranks_threads() - s->threads;
  s->fds = ranks_open_fds() - s->fds;
  return 0;
}

static pid_t start_member(member *m) {
  pid_t pid;
  clear_variables();
  if (m->world > 0) ranks_environment(m->rank, m->world, m->port);
  if (m->name != NULL) {
    if (m->value != NULL)
      setenv(m->name, m->value, 1);
    else
      unsetenv(m->name);
  }
  memset(m->seen, 0, sizeof *m->seen);
  m->seen->result = CDDP__RESULT_COUNT; /* "it never said" */
  pid = ranks_fork(join_group, 0, m);
  clear_variables();
  return pid;
}

/* Starts members, each as if on the host that its letter names. */
static void start_on(const char *hosts, member *m, int n, pid_t *pid) {
  int i;
  for (i = 0; i < n; i++) {
    char id[2] = {hosts[i], 0};
    setenv("CDDP_HOST_ID", id, 1);
    pid[i] = start_member(&m[i]);
  }
  unsetenv("CDDP_HOST_ID");
}

/* Starts all, waits for all; nothing may hang, crash or leave anything behind. */
static void launch(member *m, int n, double seconds) {
  pid_t pid[64] = {0};
  int status[64], i;
  for (i = 0; i < n; i++) pid[i] = start_member(&m[i]);
  ranks_join(pid, n, seconds, status);
  for (i = 0; i < n; i++) {
    if (m[i].dies) continue;
    CHECK_EQ(status[i], 0);
    CHECK_EQ(m[i].seen->fds, 0);
    CHECK_EQ(m[i].seen->threads, 0);
    CHECK((m[i].seen->result == CDDP_OK) == !m[i].seen->out_is_null);
    CHECK((m[i].seen->result == CDDP_OK) == (m[i].seen->text[0] == 0));
  }
  CHECK(ranks_no_children());
}

static seen *shared_seen;

static void prepare(member *m, int n) {
  int i, port = ranks_free_port();
  memset(m, 0, sizeof *m * (size_t)n);
  for (i = 0; i < n; i++) {
    m[i].rank = i;
    m[i].world = n;
    m[i].port = port;
    m[i].desc.timeout_s = 20;
    m[i].seen = &shared_seen[i];
  }
}

static bool says(const member *m, const char *word) {
  return strcasestr(m->seen->text, word) != NULL;
}

/* The number stands in the text on its own, not as a part of an address or of another number. */
static bool says_number(const member *m, int number) {
  const char *p = m->seen->text;
  char word[16];
  size_t n = (size_t)snprintf(word, sizeof word, "%d", number);
  for (; (p = strstr(p, word)) != NULL; p++) {
    char before = p == m->seen->text ? ' ' : p[-1], after = p[n];
    if (strchr(".:0123456789", before) == NULL && strchr(":0123456789", after) == NULL) return true;
    if (after == 0 && strchr(".:0123456789", before) == NULL) return true;
  }
  return false;
}

/* `m` ended with `want` and its text has both words. */
static void check_seen(const member *m, cddp_result want, const char *word, const char *word2,
                       int line) {
  bool ok = m->seen->result == want && says(m, word) && says(m, word2);
  CHECK(ok);
  if (!ok)
    fprintf(stderr, "  line %d: rank %d got %s: '%s'; wanted %s, '%s', '%s'\n", line, m->rank,
            m->seen->result < CDDP__RESULT_COUNT ? cddp_result_name(m->seen->result) : "nothing",
            m->seen->text, cddp_result_name(want), word, word2);
}
#define CHECK_SEEN(m, want, word, word2) check_seen(m, want, word, word2, __LINE__)

static void check_joined(const member *m, int n) {
  int i;
  for (i = 0; i < n; i++) {
    CHECK_SEEN(&m[i], CDDP_OK, "", "");
    CHECK_EQ(m[i].seen->sum, n);
    CHECK_EQ(m[i].seen->world, n);
    CHECK_EQ(m[i].seen->rank, m[i].rank);
  }
}

static int connect_to(int port) {
  struct sockaddr_in a;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  memset(&a, 0, sizeof a);
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  a.sin_port = htons((uint16_t)port);
  if (fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof a) != 0) {
    close(fd);
    return -1;
  }
  return fd;
}

static int listen_at(int port) { /* of 127.0.0.1; -1: in use */
  struct sockaddr_in a;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
  memset(&a, 0, sizeof a);
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  a.sin_port = htons((uint16_t)port);
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (fd >= 0 && bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 64) == 0) return fd;
  if (fd >= 0) close(fd);
  return -1;
}

/* VARIABLES ------------------------------------------------------------------------------------ */

/* Ranks of one host that may use different numbers of cores go about a round in one way. Those that
   a launcher has bound to cores of their own have a core each. */
static void test_pinned(void) {
  static const int places[][2] = {{1, 0}, {0, 1}, {1, 1}, {1, 2}}; /* 0: all */
  member m[2];
  int have, i, k, cores;
  cpu_set_t all;
  CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
  have = CPU_COUNT(&all);
  for (i = 0; i < 4; i++) {
    if (have < 2 && places[i][1] == 2) continue;
    prepare(m, 2);
    for (k = 0; k < 2; k++) m[k].pinned = places[i][k];
    launch(m, 2, 30);
    check_joined(m, 2);
    cores = i == 2 ? 1 : i == 3 ? 2 : have;
    for (k = 0; k < 2; k++) {
      char words[64];
      snprintf(words, sizeof words, ", %d cores%s)", cores,
               cores < 2 ? ", shared by more ranks" : "");
      CHECK(strstr(m[k].seen->ready, words) != NULL);
    }
  }
}

/* Ranks do not poll with all cores where their container may use the time of fewer. */
static void test_container(void) {
  static const struct {
    const char *files;
    int cores;
  } cases[] = {{"cpu.max=100000 100000", 1},
               {"cpu.max=20000 100000", 1},
               {"cpu.max=150000 100000", 2},
               {"cpu.max=max 100000", 1024},
               {"cpu/cpu.cfs_quota_us=50000;cpu/cpu.cfs_period_us=100000", 1},
               {"cpu/cpu.cfs_quota_us=-1;cpu/cpu.cfs_period_us=100000", 1024}};
  member m[2];
  cpu_set_t all;
  size_t i;
  int k, cores;
  CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
  for (i = 0; i < sizeof cases / sizeof *cases; i++) {
    prepare(m, 2);
    for (k = 0; k < 2; k++) m[k].limit = cases[i].files;
    launch(m, 2, 30);
    if (strcmp(m->seen->ready, "no right") == 0) {
      fprintf(stderr, "  (no right to make a mount namespace: left out)\n");
      return;
    }
    check_joined(m, 2);
    cores = cases[i].cores < CPU_COUNT(&all) ? cases[i].cores : CPU_COUNT(&all);
    for (k = 0; k < 2; k++) {
      char words[64];
      snprintf(words, sizeof words, ", %d cores%s)", cores,
               cores < 2 ? ", shared by more ranks" : "");
      CHECK(strstr(m[k].seen->ready, words) != NULL);
    }
  }
}

static void test_alone(void) {
  member m;
  prepare(&m, 1);
  m.world = 0;
  launch(&m, 1, 20);
  m.world = 1;
  check_joined(&m, 1);
  m.world = 0;
  m.null_desc = true;
  launch(&m, 1, 20);
  check_joined(&m, 1);
  m.world = 1; /* WORLD_SIZE=1 with everything set */
  launch(&m, 1, 20);
  check_joined(&m, 1);
}

/* A job of one rank lives, and another job starts at its port. */
static void test_beside_one_rank(void) {
  member m[3];
  prepare(m, 3);
  m[0].world = m[0].job = 1;
  m[0].stays = RANKS_WITHIN(0.4);
  m[1].rank = 0;
  m[2].rank = 1;
  m[1].world = m[2].world = 2;
  m[1].delay = m[2].delay = 0.1;
  launch(m, 3, 20);
  check_joined(m, 1);
  check_joined(m + 1, 2);
  CHECK(m[1].seen->seconds < RANKS_WITHIN(0.25));
}

/* A launcher that bound the port for rank 0 of one rank: its socket does not stay open. */
static void test_alone_with_a_launcher(void) {
  member m;
  pid_t pid;
  int status, fd;
  char number[16];
  prepare(&m, 1);
  fd = listen_at(m.port);
  snprintf(number, sizeof number, "%d", fd);
  m.name = "CDDP_LISTEN_FD";
  m.value = number;
  pid = start_member(&m);
  ranks_join(&pid, 1, 30, &status);
  close(fd);
  CHECK_EQ(status, 0);
  check_joined(&m, 1);
  CHECK_EQ(m.seen->fds, -1);
}

static void test_no_group(void) {
  cddp_group_desc desc;
  CHECK_EQ(cddp_rank(NULL), -1);
  CHECK_EQ(cddp_world_size(NULL), -1);
  CHECK_EQ(cddp_local_rank(NULL), -1);
  CHECK_EQ(cddp_local_world_size(NULL), -1);
  memset(&desc, 0, sizeof desc);
  CHECK_IS(cddp_init(NULL, &desc), CDDP_INVALID_ARGUMENT);
  CHECK(cddp_error()[0] != 0);
  cddp_destroy(NULL);
}

static void test_missing(void) {
  static const char *const needed[] = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"};
  int i, rank;
  for (i = 0; i < 4; i++)
    for (rank = 0; rank < 2; rank++) {
      member m;
      prepare(&m, 1);
      m.rank = rank;
      m.world = 2;
      m.name = needed[i];
      m.null_desc = rank == 1;
      launch(&m, 1, 20);
      CHECK_SEEN(&m, CDDP_INVALID_ARGUMENT, needed[i], "");
      CHECK(m.seen->seconds < RANKS_WITHIN(0.5)); /* at once, not after the timeout */
    }
}

static void test_bad_values(void) {
  static const char *const bad[][2] = {{"RANK", "2"},
                                       {"RANK", "-1"},
                                       {"RANK", "x"},
                                       {"RANK", ""},
                                       {"RANK", "0x"},
                                       {"RANK", "1.5"},
                                       {"RANK", "99999999999999999999"},
                                       {"WORLD_SIZE", "0"},
                                       {"WORLD_SIZE", "-2"},
                                       {"WORLD_SIZE", "two"},
                                       {"WORLD_SIZE", "2 3"},
                                       {"WORLD_SIZE", "4294967298"},
                                       {"MASTER_PORT", "70000"},
                                       {"MASTER_PORT", "-1"},
                                       {"MASTER_PORT", "http"},
                                       {"MASTER_PORT", ""},
                                       {"MASTER_PORT", "29x"},
                                       {"MASTER_ADDR", ""},
                                       {"CDDP_TIMEOUT_S", "soon"},
                                       {"CDDP_TIMEOUT_S", "-1"}};
  size_t i;
  for (i = 0; i < sizeof bad / sizeof *bad; i++) {
    member m;
    prepare(&m, 1);
    m.world = 2;
    m.name = bad[i][0];
    m.value = bad[i][1];
    m.null_desc = true;
    launch(&m, 1, 5);
    CHECK_SEEN(&m, CDDP_INVALID_ARGUMENT, bad[i][0], bad[i][1]);
    CHECK(m.seen->seconds < RANKS_WITHIN(0.5));
  }
}

static void test_bad_desc(void) {
  static const char *const methods[] = {"",          "tcp://",     "tcp://127.0.0.1",
                                        "tcp://:1",  "tcp://a:b",  "tcp://127.0.0.1:70000",
                                        "udp://a:1", "file://",    "file://relative/path",
                                        "env:/",     "/somewhere", "tcp://127.0.0.1:-5",
                                        "tcp://a:0", "tcp://[::1]:0"};
  size_t i;
  member m;
  for (i = 0; i < sizeof methods / sizeof *methods; i++) {
    const char *after = strstr(methods[i], "://");
    prepare(&m, 1);
    m.world = 0;
    m.desc.world_size = 2;
    m.desc.init_method = methods[i];
    launch(&m, 1, 5);
    CHECK_SEEN(&m, CDDP_INVALID_ARGUMENT, after != NULL ? after + 3 : methods[i], "");
  }
  for (i = 0; i < 4; i++) {
    static const int rank[] = {2, -1, 0, 5}, world[] = {2, 2, -1, 3};
    prepare(&m, 1);
    m.world = 0;
    m.desc.init_method = "tcp://127.0.0.1:29511";
    m.desc.rank = rank[i];
    m.desc.world_size = world[i];
    launch(&m, 1, 5);
    CHECK_SEEN(&m, CDDP_INVALID_ARGUMENT, i == 2 ? "world_size" : "rank", "");
  }
  prepare(&m, 1);
  m.world = 0;
  m.desc.timeout_s = -1;
  launch(&m, 1, 5);
  CHECK_SEEN(&m, CDDP_INVALID_ARGUMENT, "timeout", "");
  m.desc.timeout_s = 1;
  m.desc.backend = "carrier pigeon";
  launch(&m, 1, 5);
  CHECK(m.seen->result == CDDP_UNSUPPORTED || m.seen->result == CDDP_INVALID_ARGUMENT);
  CHECK(says(&m, "carrier pigeon"));
  m.desc.backend = "cpu";
  m.desc.device = "abacus";
  launch(&m, 1, 5);
  CHECK(m.seen->result == CDDP_UNSUPPORTED || m.seen->result == CDDP_INVALID_ARGUMENT);
  CHECK(says(&m, "abacus"));
  m.desc.device = "cpu";
  launch(&m, 1, 5);
  CHECK(m.seen->result == CDDP_OK);
}

/* ADDRESSES ------------------------------------------------------------------------------------ */

static void test_port_in_use(void) {
  struct sockaddr_in a;
  socklen_t n = sizeof a;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  char text[16];
  member m;
  memset(&a, 0, sizeof a);
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 5) == 0);
  CHECK(getsockname(fd, (struct sockaddr *)&a, &n) == 0);
  prepare(&m, 1);
  m.world = 2;
  m.port = ntohs(a.sin_port);
  m.desc.timeout_s = 2;
  snprintf(text, sizeof text, "%d", m.port);
  launch(&m, 1, 10);
  CHECK_SEEN(&m, CDDP_NETWORK, text, "in use");
  close(fd);
}

/* A program that is not cddp, at MASTER_PORT. */
typedef struct alien {
  const char *greets, *answers; /* to a new connection; to what a client says. NULL: nothing */
  size_t size;                  /* bytes of either; 0: its text's */
  bool closes;                  /* then; else it keeps the connection open */
  bool resets;                  /* and so that the client gets a reset */
} alien;

static int alien_main(int slot, void *arg) { /* slot: its socket */
  const alien *a = (const alien *)arg;
  struct linger now = {1, 0};
  for (;;) {
    int fd = accept(slot, NULL, NULL);
    char bytes[256];
    const char *said = a->greets != NULL ? a->greets : a->answers;
    if (fd < 0) return 1;
    if (a->answers != NULL && recv(fd, bytes, sizeof bytes, 0) <= 0) said = NULL;
    if (said != NULL) (void)!send(fd, said, a->size > 0 ? a->size : strlen(said), MSG_NOSIGNAL);
    if (a->resets) setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    if (a->closes) close(fd);
  }
}

/* Another program at MASTER_PORT is a final error for ranks other than 0: it is named long before
   the time is over, also to the other ranks of the host. */
static void test_other_program(void) {
  static const char settings[21] = {0, 0, 12, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 100, 0, 4, 0, 16};
  static const alien aliens[] = {
      {"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", NULL, 0, false, false},
      {NULL, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", 0, true, false},
      {"220 \r\n", NULL, 0, false, false},
      {NULL, "\25\3\3\0\2\2\106", 7, true, false}, /* TLS: an alert */
      {settings, NULL, 21, false, false},          /* HTTP/2 */
      {NULL, NULL, 0, true, false},
      {NULL, NULL, 0, true, true},
  };
  enum { ALIENS = sizeof aliens / sizeof *aliens };
  member m[4 * ALIENS];
  pid_t servers[2 * ALIENS], pid[4 * ALIENS];
  int status[4 * ALIENS], i;
  for (i = 0; i < 2 * ALIENS; i++) {
    const alien *a = &aliens[i / 2];
    int fd = -1, k;
    prepare(&m[2 * i], 2);
    fd = listen_at(m[2 * i].port);
    servers[i] = ranks_fork(alien_main, fd, (void *)(uintptr_t)a);
    close(fd);
    for (k = 2 * i; k < 2 * i + 2; k++) { /* ranks 1 and 2 of 3 */
      m[k].rank = 1 + k % 2;
      m[k].world = 3;
      m[k].desc.timeout_s = 60;
      m[k].desc.secret = i % 2 ? "open sesame" : NULL;
      m[k].seen = &shared_seen[k];
      pid[k] = start_member(&m[k]);
    }
  }
  ranks_join(pid, 4 * ALIENS, 90, status);
  CHECK(ranks_exited_well(status, 4 * ALIENS));
  for (i = 0; i < 4 * ALIENS; i++) {
    const alien *a = &aliens[i / 4];
    char where[32];
    snprintf(where, sizeof where, "127.0.0.1:%d", m[i].port);
    CHECK_SEEN(&m[i], CDDP_NETWORK, where, "neither cddp");
    CHECK(says(&m[i], "MASTER_PORT"));
    if (i < 8) CHECK(says(&m[i], i < 4 ? "SSH-2.0-OpenSSH" : "HTTP/1.1 400"));
    CHECK(m[i].seen->seconds < RANKS_WITHIN(a->answers == NULL && a->greets == NULL ? 7 : 3));
  }
  for (i = 0; i < 2 * ALIENS; i++) {
    kill(servers[i], SIGKILL);
    CHECK_EQ(waitpid(servers[i], NULL, 0), servers[i]);
  }
}

/* A proxy closes connections while rank 0 has not started: that lasts for a moment. */
static void test_closed_for_a_moment(void) {
  static const alien proxy = {NULL, NULL, 0, true, false};
  member m[2];
  pid_t server, pid[2];
  int status[2], fd;
  prepare(m, 2);
  fd = listen_at(m[0].port);
  server = ranks_fork(alien_main, fd, (void *)(uintptr_t)&proxy);
  close(fd);
  setenv("CDDP_HOST_ID", "b", 1);
  pid[1] = start_member(&m[1]);
  unsetenv("CDDP_HOST_ID");
  ranks_sleep(1.5);
  kill(server, SIGKILL);
  CHECK_EQ(waitpid(server, NULL, 0), server);
  pid[0] = start_member(&m[0]);
  ranks_join(pid, 2, 30, status);
  CHECK(ranks_exited_well(status, 2));
  check_joined(m, 2);
}

/* The TCP ports that this process listens on. */
static int listening(int *ports, int most) {
  static const char *const tables[] = {"/proc/self/net/tcp", "/proc/self/net/tcp6"};
  char line[512], path[64], target[64], inode[64];
  unsigned port, state;
  unsigned long number;
  int n = 0, t, fd;
  for (t = 0; t < 2; t++) {
    FILE *f = fopen(tables[t], "r");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
      if (sscanf(line, " %*[^:]: %*[^:]:%x %*[^:]:%*x %x %*s %*s %*s %*s %*s %lu", &port, &state,
                 &number) != 3 ||
          state != 10)
        continue;
      snprintf(inode, sizeof inode, "socket:[%lu]", number);
      for (fd = 0; fd < 256 && n < most; fd++) {
        ssize_t size;
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        if ((size = readlink(path, target, sizeof target - 1)) < 0) continue;
        target[size] = 0;
        if (strcmp(target, inode) != 0) continue;
        ports[n++] = (int)port;
        break;
      }
    }
    if (f != NULL) fclose(f);
  }
  return n;
}

/* A rank of an elastic model over two hosts: with links, a second listener, and one for ranks that
   join. Notes in `seen`: fds, the listening ports outside the range; threads, those in it. */
static void note_ports(seen *s, int port, int first, int last) {
  int ports[32], n = listening(ports, 32), i;
  for (i = 0; i < n; i++) {
    bool inside = ports[i] >= first && ports[i] <= last;
    if (inside)
      s->threads++;
    else if (ports[i] != port)
      s->fds++;
  }
}

typedef struct range {
  int port, first, last, rank;
} range;

static void *watch_ports(void *arg) { /* of a rank that waits for the others */
  const range *x = (const range *)arg;
  ranks_sleep(0.3);
  note_ports(&shared_seen[x->rank], x->port, x->first, x->last);
  return NULL;
}

static int use_ports(int rank, void *arg) {
  range *x = (range *)arg;
  static float w[100];
  cddp_group *g = NULL;
  cddp_ddp *d = NULL;
  cddp_ddp_desc desc;
  cddp_store_desc sd;
  cddp_store *store = NULL;
  cddp_param param;
  pthread_t t;
  memset(&param, 0, sizeof param);
  param.data = w;
  param.count = 100;
  memset(&desc, 0, sizeof desc);
  desc.elastic = true;
  desc.shards = 4;
  x->rank = rank;
  if (rank < 2) CHECK_EQ(pthread_create(&t, NULL, watch_ports, arg), 0);
  if (rank == 3) ranks_sleep(0.6);
  CHECK_OK(cddp_init(&g, NULL));
  if (g == NULL) return 1;
  if (rank < 2) pthread_join(t, NULL);
  CHECK_OK(cddp_ddp_create(&d, g, &param, 1, &desc));
  memset(&sd, 0, sizeof sd);
  sd.init_method = "tcp://127.0.0.1:0";
  sd.is_server = true;
  CHECK_OK(cddp_store_create(&store, &sd));
  CHECK(cddp_store_port(store) >= x->first && cddp_store_port(store) <= x->last);
  note_ports(&shared_seen[rank], x->port, x->first, x->last);
  CHECK_OK(cddp_barrier(g));
  cddp_store_destroy(store);
  cddp_ddp_destroy(d);
  cddp_destroy(g);
  return 0;
}

/* CDDP_PORTS: links, elastic models and stores listen in the range alone. */
static void test_ports(void) {
  range x;
  pid_t pid[4];
  int status[4], i;
  char text[32];
  x.port = ranks_free_port();
  x.first = 50 * (ranks_free_port() / 50 + 200); /* above what the other tests use */
  x.last = x.first + 29;
  snprintf(text, sizeof text, "%d-%d", x.first, x.last);
  memset(shared_seen, 0, 4 * sizeof *shared_seen);
  setenv("CDDP_PORTS", text, 1);
  for (i = 0; i < 4; i++) {
    ranks_environment(i, 4, x.port);
    setenv("CDDP_HOST_ID", i < 2 ? "a" : "b", 1);
    pid[i] = ranks_fork(use_ports, i, &x);
  }
  clear_variables();
  unsetenv("CDDP_HOST_ID");
  ranks_join(pid, 4, 60, status);
  CHECK(ranks_exited_well(status, 4));
  for (i = 0; i < 4; i++) {
    CHECK_EQ(shared_seen[i].fds, 0);
    CHECK(shared_seen[i].threads >= 3); /* links, elastic, a store */
  }
  unsetenv("CDDP_PORTS");
}

/* A range that is none is an error on any number of hosts; a range that is used up names itself. */
static void test_wrong_ports(void) {
  static const char *const wrong[] = {
      "x",           "41000",         "41000-",       "-41000",       "0-10",
      "41010-41000", "1-65536",       " 41000-41010", "41000-41010 ", "41000,41010",
      "+1-2",        "100000-100001", "0x10-0x20",    "41000--41010"};
  int first = 50 * (ranks_free_port() / 50 + 200), fd[2], status[2], i, k;
  char text[32];
  member m[2];
  pid_t pid[2];
  for (i = 0; i < (int)(sizeof wrong / sizeof *wrong); i++) {
    prepare(m, 1);
    m[0].name = "CDDP_PORTS";
    m[0].value = wrong[i];
    launch(m, 1, 10);
    CHECK_SEEN(&m[0], CDDP_INVALID_ARGUMENT, "CDDP_PORTS", wrong[i]);
  }
  while ((fd[0] = listen_at(first)) < 0 || (fd[1] = listen_at(first + 1)) < 0) {
    if (fd[0] >= 0) close(fd[0]);
    first += 2;
  }
  snprintf(text, sizeof text, "%d-%d", first, first + 1);
  for (k = 0; k < 2; k++) { /* on both hosts, and where rank 1 alone lacks a port */
    prepare(m, 2);
    for (i = k; i < 2; i++) {
      m[i].name = "CDDP_PORTS";
      m[i].value = text;
    }
    for (i = 0; i < 2; i++) m[i].desc.timeout_s = 5;
    start_on("ab", m, 2, pid);
    ranks_join(pid, 2, 30, status);
    CHECK(ranks_exited_well(status, 2));
    for (i = 0; i <= k; i++) CHECK_SEEN(&m[i], CDDP_NETWORK, "CDDP_PORTS=", text);
  }
  close(fd[0]);
  close(fd[1]);
}

/* A firewall between hosts, all but MASTER_PORT: all ranks name a port that could not be reached,
   who could not reach it, and the cure. No text takes a rank that lives for late or dead. */
static void test_blocked(void) {
  static const struct {
    const char *hosts;
    int who, free_calls; /* the rank behind the firewall */
    const char *from, *to;
  } cases[] = {{"ab", 1, 0, "rank 1 (", "rank 0 ("},
               {"ab", 0, 0, "rank 0 (", "rank 1 ("},
               {"abc", 2, 1, "rank 2 (", "127.0.0.1"},
               {"aabb", 0, 0, "127.0.0.1", "(pid"},
               {"aabb", 3, 0, "127.0.0.1", "(pid"}};
  static const char *const wrong[] = {"did not", "died", "late", "it has ended", "gave up"};
  enum { CASES = sizeof cases / sizeof *cases };
  int full = -1, waiting[64], status[64], of[64], n = 0, i, k, c;
  struct sockaddr_in a;
  socklen_t size = sizeof a;
  member m[64];
  pid_t pid[64];
  full = listen_at(ranks_free_port());
  CHECK(full >= 0 && listen(full, 0) == 0 && getsockname(full, (struct sockaddr *)&a, &size) == 0);
  for (i = 0; i < 64; i++) { /* more than the queue holds */
    waiting[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    (void)!syscall(SYS_connect, waiting[i], &a, sizeof a);
  }
  full_port = ntohs(a.sin_port);
  for (c = 0; c < 2 * CASES; c++) {
    const char *hosts = cases[c / 2].hosts;
    int ranks = (int)strlen(hosts), who = cases[c / 2].who;
    prepare(&m[n], ranks);
    m[n + who].blocked = 1 + c % 2;
    m[n + who].free_calls = cases[c / 2].free_calls;
    if (ranks == 4) m[n + (who ^ 1)].blocked = 1 + c % 2; /* the other one of its host */
    for (i = n; i < n + ranks; i++) {
      of[i] = c / 2;
      m[i].desc.timeout_s = 60;
      m[i].seen = &shared_seen[i];
    }
    start_on(hosts, &m[n], ranks, &pid[n]);
    n += ranks;
  }
  ranks_join(pid, n, 90, status);
  CHECK(ranks_exited_well(status, n));
  for (i = 0; i < n; i++) {
    CHECK_SEEN(&m[i], CDDP_NETWORK, cases[of[i]].from, cases[of[i]].to);
    CHECK_SEEN(&m[i], CDDP_NETWORK, "cannot connect to 127.0.0.1:", "CDDP_PORTS=");
    CHECK(says(&m[i], "firewall"));
    for (k = 0; k < 5; k++) CHECK(!says(&m[i], wrong[k]));
    CHECK(m[i].seen->seconds < 14 + RANKS_WITHIN(2.0));
  }
  for (i = 0; i < 64; i++) close(waiting[i]);
  close(full);
}

/* A rank with too few descriptors says so, whichever connection between hosts lacks one. */
static void test_descriptors_between_hosts(void) {
  member m[2];
  pid_t pid[2];
  int files, status[2];
  for (files = 6; files < 22; files++) {
    prepare(m, 2);
    m[1].files = (rlim_t)files;
    m[0].desc.timeout_s = m[1].desc.timeout_s = 2;
    start_on("ab", m, 2, pid);
    ranks_join(pid, 2, 60, status);
    if (m[1].seen->result == CDDP_OK && m[0].seen->result == CDDP_OK) continue;
    CHECK(says(&m[1], "open files"));
    CHECK(!says(&m[1], "firewall") && !says(&m[0], "firewall"));
    if (!says(&m[1], "open files")) fprintf(stderr, "  %d: '%s'\n", files, m[1].seen->text);
  }
}

static void test_unknown_host(void) {
  int rank;
  for (rank = 0; rank < 2; rank++) {
    member m;
    prepare(&m, 1);
    m.rank = rank;
    m.world = 2;
    m.name = "MASTER_ADDR";
    m.value = "no-such-host.invalid";
    m.desc.timeout_s = 3;
    launch(&m, 1, 60);
    CHECK_SEEN(&m, CDDP_NETWORK, "no-such-host.invalid", "");
  }
}

int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
                struct addrinfo **list) {
  __typeof__(getaddrinfo) *real = (__typeof__(getaddrinfo) *)dlsym(RTLD_NEXT, "getaddrinfo");
  if (strcmp(host, "late.invalid") != 0) return real(host, service, hints, list);
  return test_now() < named_at ? EAI_NONAME : real("127.0.0.1", service, hints, list);
}

/* A rank may come before rank 0's host has its name, as where a cluster is just starting them. */
static void test_late_name(void) {
  member m[2];
  pid_t pid[2];
  int status[2], i;
  prepare(m, 2);
  m[1].named = 0.5;
  m[0].delay = 0.55;
  for (i = 0; i < 2; i++) {
    m[i].name = "MASTER_ADDR";
    m[i].value = "late.invalid";
    setenv("CDDP_HOST_ID", i == 0 ? "a" : "b", 1);
    pid[i] = start_member(&m[i]);
  }
  unsetenv("CDDP_HOST_ID");
  ranks_join(pid, 2, 30, status);
  CHECK(ranks_exited_well(status, 2));
  check_joined(m, 2);
}

/* A rank whose first look-ups fail belongs to its host all the same, whichever rank it is. */
static void test_late_name_on_one_host(void) {
  member m[4];
  int late, i;
  for (late = 1; late < 4; late++) {
    prepare(m, 4);
    for (i = 0; i < 4; i++) {
      m[i].name = "MASTER_ADDR";
      m[i].value = "late.invalid";
    }
    m[late].named = 0.3;
    launch(m, 4, 30);
    check_joined(m, 4);
    for (i = 0; i < 4; i++) CHECK_EQ(m[i].seen->local, 4);
  }
}

/* A program at rank 0's port accepts a rank's connection and keeps it, without a word, and rank 0
   comes later: as if rank 0's host had been started anew. The rank connects again. */
static void test_silent_root(void) {
  member m[2];
  pid_t pid[2];
  int status[2], listener, silent;
  prepare(m, 2);
  setenv("CDDP_HOST_ID", "b", 1);
  pid[1] = start_member(&m[1]);
  listener = listen_at(m[0].port); /* now, so that rank 1's process has no copy of it */
  silent = accept(listener, NULL, NULL);
  CHECK(silent >= 0);
  close(listener);
  setenv("CDDP_HOST_ID", "a", 1);
  pid[0] = start_member(&m[0]);
  unsetenv("CDDP_HOST_ID");
  ranks_join(pid, 2, 30, status);
  CHECK(ranks_exited_well(status, 2));
  check_joined(m, 2);
  close(silent);
}

static void test_localhost(void) { /* a name with several addresses, or one of either family */
  member m[3];
  int i;
  prepare(m, 3);
  for (i = 0; i < 3; i++) {
    m[i].name = "MASTER_ADDR";
    m[i].value = "localhost";
  }
  launch(m, 3, 30);
  check_joined(m, 3);
}

static void test_spellings(void) { /* of one host: its ranks still share memory */
  static const char *const names[] = {"0.0.0.0", "localhost", "127.0.0.1"};
  member m[3];
  int i;
  prepare(m, 3);
  for (i = 0; i < 3; i++) {
    m[i].name = "MASTER_ADDR";
    m[i].value = names[i];
  }
  launch(m, 3, 30);
  check_joined(m, 3);
  for (i = 0; i < 3; i++) CHECK_EQ(m[i].seen->local, 3);
}

/* CDDP_HOST_ID is, for example, the name of a pod, which can have 253 bytes. Texts show how two of
   them differ. */
static void test_long_host_ids(void) {
  static const int lengths[] = {60, 61, 253};
  char id[2][256];
  member m[3];
  int i, k;
  for (k = 0; k < 3; k++) {
    prepare(m, 3);
    memset(id, 'a', sizeof id);
    for (i = 0; i < 2; i++) {
      id[i][lengths[k] - 1] = i ? 'y' : 'x';
      id[i][lengths[k]] = 0;
    }
    for (i = 0; i < 3; i++) {
      m[i].name = "CDDP_HOST_ID";
      m[i].value = id[i / 2];
      m[i].job = i < 2;
      m[i].stays = 20;
    }
    m[2].dies = true;
    launch(m, 3, 30);
    check_joined(m, 3);
    for (i = 0; i < 2; i++)
      CHECK(m[i].seen->end == CDDP_PEER_LOST && strstr(m[i].seen->end_text, "aaay)") != NULL);
    for (i = 0; i < 3; i++) CHECK_EQ(m[i].seen->local, i < 2 ? 2 : 1);
  }
  unsetenv("CDDP_HOST_ID");
}

static void test_tcp(void) {
  char method[64];
  member m[4];
  int i, from_variables;
  for (from_variables = 0; from_variables < 2; from_variables++) {
    prepare(m, 4);
    snprintf(method, sizeof method, "tcp://127.0.0.1:%d", m[0].port);
    for (i = 0; i < 4; i++) {
      m[i].desc.init_method = method;
      if (from_variables) {
        m[i].port = 1; /* MASTER_PORT is not looked at */
      } else {
        m[i].world = 0;
        m[i].desc.rank = i;
        m[i].desc.world_size = 4;
      }
    }
    launch(m, 4, 30);
    check_joined(m, 4);
  }
}

typedef struct thread_member {
  const char *method;
  int rank, sum;
} thread_member;

static void *join_by_thread(void *arg) {
  thread_member *t = (thread_member *)arg;
  cddp_group_desc desc;
  cddp_group *g;
  cddp_ddp_desc elastic;
  cddp_ddp *ddp;
  float w[4] = {1, 2, 3, 4};
  cddp_param weight = {"w", w, NULL, 4, CDDP_F32};
  int32_t one = 1;
  memset(&desc, 0, sizeof desc);
  desc.init_method = t->method;
  desc.rank = t->rank;
  desc.world_size = 4;
  CHECK_OK(cddp_init(&g, &desc));
  if (g == NULL) return NULL;
  CHECK_OK(cddp_all_reduce(g, &one, 1, CDDP_I32, CDDP_SUM, NULL));
  t->sum = one;
  memset(&elastic, 0, sizeof elastic);
  elastic.elastic = true;
  CHECK_IS(cddp_ddp_create(&ddp, g, &weight, 1, &elastic), CDDP_UNSUPPORTED); /* they share locks */
  CHECK(strstr(cddp_error(), "cddp_run_threads") != NULL);
  CHECK_OK(cddp_ddp_create(&ddp, g, &weight, 1, NULL));
  cddp_ddp_destroy(ddp);
  cddp_destroy(g);
  return NULL;
}

static void
test_threads_of_one_process(void) { /* ranks need not be processes for cddp_init either */
  int fds = ranks_open_fds(), tasks = ranks_threads(), i;
  pthread_t thread[4];
  thread_member t[4];
  char method[64];
  snprintf(method, sizeof method, "tcp://127.0.0.1:%d", ranks_free_port());
  for (i = 0; i < 4; i++) {
    t[i].method = method;
    t[i].rank = i;
    t[i].sum = 0;
    CHECK(pthread_create(&thread[i], NULL, join_by_thread, &t[i]) == 0);
  }
  for (i = 0; i < 4; i++) {
    pthread_join(thread[i], NULL);
    CHECK_EQ(t[i].sum, 4);
  }
  CHECK_EQ(ranks_open_fds(), fds);
  CHECK(ranks_threads_left(tasks));
}

/* ORDER ---------------------------------------------------------------------------------------- */

static void test_late(void) {
  int late, i;
  member m[3];
  for (late = 0; late < 3; late++) {
    prepare(m, 3);
    m[late].delay = 1;
    launch(m, 3, 30);
    check_joined(m, 3);
    for (i = 0; i < 3; i++) CHECK(i == late || m[i].seen->seconds > 0.5);
  }
}

static void test_any_order(void) {
  int round, i, order[8];
  member m[8];
  for (round = 0; round < 4; round++) {
    prepare(m, 8);
    ranks_shuffle(order, 8, (uint64_t)round);
    for (i = 0; i < 8; i++) {
      m[i].rank = order[i];
      m[i].delay = (double)(ranks_mix((uint64_t)round, (uint64_t)i, 0) % 100) * 2e-3;
    }
    launch(m, 8, 30);
    check_joined(m, 8);
  }
}

/* Rank 0 registers with its coordinator just as that would connect to rank 0's port: it does not
   connect to itself. */
static void test_rank_0_on_this_host(void) {
  member m[4];
  pid_t pid[4];
  int status[4];
  prepare(m, 4);
  start_on("a", &m[1], 1, &pid[1]);
  ranks_sleep(0.2);
  m[0].suspends = pid[1];
  start_on("a", m, 1, pid);
  start_on("bb", &m[2], 2, &pid[2]);
  ranks_join(pid, 4, 30, status);
  CHECK(ranks_exited_well(status, 4));
  check_joined(m, 4);
}

/* A rank is suspended after it has registered: nobody calls it dead. */
static void test_suspended_rank(void) {
  member m[2];
  pid_t pid[2];
  int status[2];
  prepare(m, 2);
  m[0].desc.timeout_s = m[1].desc.timeout_s = 1;
  m[1].suspends = -1;
  pid[0] = start_member(&m[0]);
  ranks_sleep(0.1);
  pid[1] = start_member(&m[1]);
  ranks_sleep(4);
  kill(pid[1], SIGCONT);
  ranks_join(pid, 2, 30, status);
  CHECK(ranks_exited_well(status, 2));
  CHECK_SEEN(&m[0], CDDP_TIMEOUT, "rank 1 (", "suspended");
  CHECK(!says(&m[0], "died"));
  CHECK(m[0].seen->seconds < 2 + RANKS_WITHIN(1.0));
  CHECK_SEEN(&m[1], CDDP_TIMEOUT, "rank 1 (", "suspended");
}

/* The last rank registers just before the deadline, when the root is suspended: the job starts. */
static void test_last_moment(void) {
  member m[2];
  pid_t pid[2];
  int status[2];
  prepare(m, 2);
  m[0].desc.timeout_s = 2;
  pid[0] = start_member(&m[0]);
  ranks_sleep(1.6);
  m[1].suspends = pid[0];
  pid[1] = start_member(&m[1]);
  ranks_join(pid, 2, 30, status);
  CHECK(ranks_exited_well(status, 2));
  check_joined(m, 2);
}

/* Two hosts have a process with RANK 1. The second one starts when all ranks have registered, and
   one is not ready: it is refused, and the job starts. */
static void test_late_duplicate(void) {
  member m[5];
  pid_t pid[5];
  int status[5];
  prepare(m, 5);
  m[4].rank = 1;
  m[0].world = m[1].world = m[2].world = m[3].world = m[4].world = 4;
  start_on("aab", m, 3, pid);
  ranks_sleep(0.3);
  m[3].suspends = -1;
  start_on("b", &m[3], 1, &pid[3]);
  ranks_sleep(0.5);
  start_on("b", &m[4], 1, &pid[4]);
  ranks_sleep(0.3);
  kill(pid[3], SIGCONT);
  ranks_join(pid, 5, 60, status);
  CHECK(ranks_exited_well(status, 5));
  check_joined(m, 4);
  CHECK_SEEN(&m[4], CDDP_INVALID_ARGUMENT, "rank 1 is taken twice", "two processes");
}

/* The same in the instant in which the other host's coordinator receives the table: the second
   process has registered with it alone. The job starts. */
static void test_duplicate_with_the_table(void) {
  member m[4];
  pid_t pid[4];
  int status[4];
  prepare(m, 4);
  m[0].world = m[1].world = m[2].world = m[3].world = 3;
  m[3].rank = 2;
  m[3].stops_at = "hello";
  start_on("ab", m, 2, pid);
  ranks_sleep(0.2);
  start_on("b", &m[3], 1, &pid[3]);
  ranks_sleep(0.2); /* it has connected to rank 1 */
  kill(pid[1], SIGSTOP);
  kill(pid[3], SIGCONT);
  start_on("a", &m[2], 1, &pid[2]);
  ranks_sleep(0.3);
  kill(pid[1], SIGCONT);
  ranks_join(pid, 4, 60, status);
  CHECK(ranks_exited_well(status, 4));
  check_joined(m, 3);
  CHECK_SEEN(&m[3], CDDP_INVALID_ARGUMENT, "rank 2 is taken twice", "two processes");
}

/* Rank 0 is suspended when all are ready, until the others have timed out, or rank 3 was killed: it
   fails too. */
static void test_nobody_left(void) {
  static const char *const hosts[] = {"aaaa", "aaaa", "abab", "abac"};
  enum { JOBS = 4 };
  member m[4 * JOBS];
  pid_t pid[4 * JOBS];
  int status[4 * JOBS], k, i;
  for (k = 0; k < JOBS; k++) {
    prepare(m + 4 * k, 4);
    for (i = 4 * k; i < 4 * k + 4; i++) {
      m[i].seen = &shared_seen[i];
      if (k == 0) m[i].desc.timeout_s = 0.3;
    }
    m[4 * k].stops_at = "all ready";
    start_on(hosts[k], m + 4 * k, 1, pid + 4 * k);
  }
  ranks_sleep(0.1); /* rank 0 is its host's coordinator */
  for (k = 0; k < JOBS; k++) start_on(hosts[k] + 1, m + 4 * k + 1, 3, pid + 4 * k + 1);
  ranks_sleep(RANKS_SLOW ? 4 : 0.9);
  for (k = 1; k < JOBS; k++) kill(pid[4 * k + 3], SIGKILL);
  ranks_sleep(RANKS_SLOW ? 3 : 2);
  for (k = 0; k < JOBS; k++) kill(pid[4 * k], SIGCONT);
  ranks_join(pid, 4 * JOBS, 60, status);
  for (i = 0; i < 4; i++) CHECK_SEEN(&m[i], CDDP_TIMEOUT, "timed out", "");
  for (k = 1; k < JOBS; k++)
    for (i = 4 * k; i < 4 * k + 3; i++) CHECK_SEEN(&m[i], CDDP_PEER_LOST, "rank 3 (", "died");
}

/* A rank is killed after the table was sent, and another one finds its port closed first. */
static void test_killed_behind_the_table(void) {
  member m[3];
  pid_t pid[3];
  int status[3];
  prepare(m, 3);
  m[2].stops_at = "greeted";
  start_on("abc", m, 3, pid);
  ranks_sleep(0.5); /* rank 1 has the table */
  kill(pid[0], SIGSTOP);
  kill(pid[1], SIGKILL);
  kill(pid[2], SIGCONT);
  ranks_sleep(0.2);
  kill(pid[0], SIGCONT);
  ranks_join(pid, 3, 60, status);
  CHECK_SEEN(&m[0], CDDP_PEER_LOST, "rank 1 (", "died");
  CHECK_SEEN(&m[2], CDDP_PEER_LOST, "rank 1 (", "died");
}

static void test_never_comes(void) {
  member m[4];
  int i;
  prepare(m, 4);
  m[0].desc.timeout_s = m[2].desc.timeout_s = 0.5;
  m[1] = m[2]; /* ranks 0 and 2 of 4 */
  m[1].seen = &shared_seen[1];
  launch(m, 2, 20);
  for (i = 0; i < 2; i++) {
    CHECK_SEEN(&m[i], CDDP_TIMEOUT, "", "");
    CHECK(m[i].seen->seconds > 0.45 && m[i].seen->seconds < 0.5 + RANKS_WITHIN(0.7));
    CHECK(says_number(&m[i], 1) && says_number(&m[i], 3));
    if (!says_number(&m[i], 1) || !says_number(&m[i], 3))
      fprintf(stderr, "  '%s'\n", m[i].seen->text);
  }
  prepare(m, 2); /* rank 0 never comes */
  m[1].desc.timeout_s = 0.5;
  launch(&m[1], 1, 20);
  CHECK_SEEN(&m[1], CDDP_TIMEOUT, "127.0.0.1", "rank 0");
  CHECK(m[1].seen->seconds > 0.45 && m[1].seen->seconds < 0.5 + RANKS_WITHIN(0.7));
  prepare(m, 2); /* the environment's timeout */
  m[0].null_desc = true;
  m[0].name = "CDDP_TIMEOUT_S";
  m[0].value = "0.5";
  launch(m, 1, 20);
  CHECK_SEEN(&m[0], CDDP_TIMEOUT, "rank", "");
  CHECK(says_number(&m[0], 1));
  CHECK(m[0].seen->seconds > 0.45 && m[0].seen->seconds < 0.5 + RANKS_WITHIN(0.7));
}

/* The first meeting fails on all ranks, as one has another mode. The next, at once and at the same
   place, is another one. */
static int meet_again(int rank, void *hosts) {
  cddp_group *g;
  int32_t one = 1;
  if (hosts != NULL) setenv("CDDP_HOST_ID", rank % 2 == 0 ? "a" : "b", 1);
  if (rank == 1) fesetround(FE_UPWARD);
  CHECK_IS(cddp_init(&g, NULL), CDDP_MISMATCH);
  fesetround(FE_TONEAREST);
  CHECK_OK(cddp_init(&g, NULL));
  if (g == NULL) return 1;
  CHECK_OK(cddp_all_reduce(g, &one, 1, CDDP_I32, CDDP_SUM, NULL));
  CHECK_EQ(one, cddp_world_size(g));
  cddp_destroy(g);
  return 0;
}

/* Again and again, for a moment. */
static void keep_meeting(int ranks, void *hosts) {
  double end = test_now() + 0.5;
  int status[4] = {0};
  while (ranks_exited_well(status, ranks) && test_now() < end)
    ranks_script(meet_again, hosts, ranks, 60, status);
  CHECK(ranks_exited_well(status, ranks));
}

static void test_again(void) {
  int two_hosts = 1;
  ranks_setenv("CDDP_TIMEOUT_S", (long)RANKS_WITHIN(5.0));
  keep_meeting(4, NULL);
  keep_meeting(2, &two_hosts);
  keep_meeting(3, &two_hosts);
  keep_meeting(4, &two_hosts);
  unsetenv("CDDP_TIMEOUT_S");
}

static void test_duplicate(void) {
  double wait_s = RANKS_SLOW ? 3 : 1;
  member m[4];
  int i;
  prepare(m, 3); /* 0, 1 and 1 of 3 */
  for (i = 0; i < 3; i++) m[i].desc.timeout_s = wait_s;
  m[2].rank = 1;
  m[2].delay = 0.1;
  launch(m, 3, 60);
  for (i = 0; i < 3; i++) CHECK(m[i].seen->result != CDDP_OK);
  CHECK(m[2].seen->seconds < wait_s && says(&m[2], "rank 1")); /* it hears at once */

  prepare(m, 2); /* 0 and 0 of 2 */
  for (i = 0; i < 2; i++) m[i].desc.timeout_s = wait_s;
  m[1].rank = 0;
  m[1].delay = 0.1;
  launch(m, 2, 60);
  CHECK(m[0].seen->result != CDDP_OK);
  CHECK(m[1].seen->result != CDDP_OK);
  CHECK(m[1].seen->seconds < wait_s);

  prepare(m, 4); /* 0, 1, 2 and a second 1, of 3 */
  for (i = 0; i < 4; i++) {
    m[i].world = 3;
    m[i].desc.timeout_s = wait_s;
  }
  m[3].rank = 1;
  launch(m, 4, 60);
  CHECK(m[1].seen->result != CDDP_OK || m[3].seen->result != CDDP_OK);

  prepare(m, 3); /* 0 and 1 of 2 have met; then a second 1 comes */
  for (i = 0; i < 3; i++) {
    m[i].world = 2;
    m[i].job = 1;
    m[i].stays = 0.3 + RANKS_WITHIN(0.5);
  }
  m[2].rank = 1;
  m[2].delay = 0.3;
  launch(m, 3, 60);
  CHECK_SEEN(&m[2], CDDP_INVALID_ARGUMENT, "two jobs use port", "rank 1");
  for (i = 0; i < 2; i++) CHECK_EQ(m[i].seen->end, CDDP_OK);
}

/* World sizes that differ between ranks. */
static void test_world_sizes_differ(void) {
  member m[2];
  int i;
  prepare(m, 2);
  m[1].world = 3;
  m[0].desc.timeout_s = m[1].desc.timeout_s = 2;
  launch(m, 2, 20);
  for (i = 0; i < 2; i++) {
    CHECK_SEEN(&m[i], CDDP_MISMATCH, "WORLD_SIZE", "");
    CHECK(m[i].seen->seconds < RANKS_WITHIN(1.0));
  }
}

/* A final error is told within seconds, though a rank is missing and the time is not over. Each
   case on one host, on two, and where rank 0 is the rank that is missing. */
static void test_known_errors(void) {
  static const char *const hosts[] = {"aaa", "aba", "abc"};
  enum { CASES = 4, HOSTS = 3 };
  member m[3 * CASES * HOSTS];
  pid_t pid[3 * CASES * HOSTS];
  int status[3 * CASES * HOSTS], i, n = 0, k, h;
  for (k = 0; k < CASES; k++)
    for (h = 0; h < HOSTS; h++, n += 3) {
      prepare(&m[n], 3);
      for (i = n; i < n + 3; i++) {
        m[i].world = 6;
        m[i].desc.timeout_s = 60;
        m[i].seen = &shared_seen[i];
        m[i].delay = 0.1 * (i - n);
      }
      m[n + 2].delay = 0.5;
      if (k == 0) m[n + 1].world = 7; /* WORLD_SIZE */
      if (k == 1) m[n + 2].rank = 1;  /* two processes with one RANK, on one host or on two */
      if (k == 2) m[n + 1].fp = 1;    /* floating-point modes */
      if (k == 3) {                   /* no rank 0; known on one host alone */
        m[n].rank = 5;
        m[n + 2].world = 8;
      }
      for (i = n; i < n + 3; i++) {
        setenv("CDDP_HOST_ID", k == 3 ? "a" : (char[2]){hosts[h][i - n], 0}, 1);
        pid[i] = start_member(&m[i]);
      }
    }
  unsetenv("CDDP_HOST_ID");
  ranks_join(pid, n, 90, status);
  CHECK(ranks_exited_well(status, n));
  for (i = 0; i < n; i++) {
    static const char *const words[] = {"WORLD_SIZE", "rank 1 is taken", "upward", "WORLD_SIZE"};
    k = i / (3 * HOSTS);
    CHECK_SEEN(&m[i], k == 1 ? CDDP_INVALID_ARGUMENT : CDDP_MISMATCH, words[k], "");
    CHECK(m[i].seen->seconds < RANKS_WITHIN(3.0));
  }
}

/* One wrong rank among ranks that start one after the other, far from their time-outs: a number
   twice, or another WORLD_SIZE. All others end soon, with the text about that rank. */
static void test_one_wrong_rank(void) {
  static const char *const hosts[] = {"aaaaaaa", "aabaaba", "abcabca"};
  enum { CASES = 3, HOSTS = 3, RANKS = 7 };
  member m[CASES * HOSTS * RANKS];
  pid_t pid[CASES * HOSTS * RANKS];
  int status[RANKS], i, k, at;
  for (at = 0; at < CASES * HOSTS; at++) {
    member *job = m + at * RANKS;
    k = at / HOSTS;
    prepare(job, RANKS);
    for (i = 0; i < RANKS; i++) {
      job[i].world = k == 0 ? 6 : 7;
      job[i].desc.timeout_s = 60;
      job[i].seen = &shared_seen[at * RANKS + i];
      job[i].delay = 0.07 * i;
    }
    if (k == 0) job[2].rank = 0, job[0].rank = 2, job[3].rank = 2, job[6].rank = 3; /* 2 twice */
    if (k == 1) job[1].world = 2;
    if (k == 2) job[1].world = 9;
    start_on(hosts[at % HOSTS], job, RANKS, pid + at * RANKS);
  }
  for (at = 0; at < CASES * HOSTS; at++) {
    ranks_join(pid + at * RANKS, RANKS, 70, status);
    CHECK(ranks_exited_well(status, RANKS));
    for (i = at * RANKS; i < (at + 1) * RANKS; i++) {
      if (at < HOSTS)
        CHECK_SEEN(&m[i], CDDP_INVALID_ARGUMENT, "rank 2 is taken twice", "");
      else
        CHECK_SEEN(&m[i], CDDP_MISMATCH, "WORLD_SIZE", at < 2 * HOSTS ? "world size 2" : "size 9");
      CHECK(m[i].seen->seconds < RANKS_WITHIN(3.0));
    }
  }
}

/* A rank whose floats behave in another way would end with other weights, without a word. */
static void test_fp_modes_differ(void) {
  static const char *const words[] = {"", "upward", "FTZ"};
  member m[3];
  int i, fp;
  for (fp = 1; fp <= 2; fp++) {
    prepare(m, 3);
    m[2].fp = fp;
    launch(m, 3, 30);
    for (i = 0; i < 3; i++) CHECK_SEEN(&m[i], CDDP_MISMATCH, "rank 2", words[fp]);
    prepare(m, 3);
    for (i = 0; i < 3; i++) m[i].fp = fp;
    launch(m, 3, 30);
    check_joined(m, 3);
  }
}

/* One rank cannot open its flight recorder's file: no rank begins without it, all know why, and
   none leaves a file behind. */
static void test_no_recorder(void) {
  static const char *const hosts[] = {"aaa", "aba"};
  member m[3];
  pid_t pid[3];
  int status[3], who, h, i;
  char text[64], folder[] = "/tmp/cddp-init-XXXXXX";
  CHECK(mkdtemp(folder) != NULL);
  for (who = 0; who < 3; who++)
    for (h = 0; h < 2; h++) {
      snprintf(text, sizeof text, "CDDP_RECORD: rank %d cannot open", who);
      prepare(m, 3);
      for (i = 0; i < 3; i++) m[i].name = "CDDP_RECORD", m[i].value = folder;
      m[who].value = "/nowhere/at/all";
      start_on(hosts[h], m, 3, pid);
      ranks_join(pid, 3, 30, status);
      CHECK(ranks_exited_well(status, 3));
      for (i = 0; i < 3; i++)
        CHECK_SEEN(&m[i], CDDP_IO, text, "/nowhere/at/all");
      CHECK_EQ(ranks_entries(folder), 0);
    }
  unsetenv("CDDP_RECORD");
  rmdir(folder);
}

static void test_wrong_variables(void) {
  cddp_group *g = NULL;
  cddp_group_desc desc;
  memset(&desc, 0, sizeof desc);
  setenv("CDDP_BACKEND", "gloo", 1);
  CHECK_IS(cddp_init(&g, NULL), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "backend \"gloo\" (CDDP_BACKEND)") != NULL);
  unsetenv("CDDP_BACKEND");
  desc.backend = "nccl";
  CHECK_IS(cddp_init(&g, &desc), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "device \"cpu\" with backend \"nccl\":") != NULL);
  setenv("CDDP_JOIN", "1", 1);
  CHECK_IS(cddp_init(&g, NULL), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "CDDP_JOIN is 1, but RANK and WORLD_SIZE are not set") != NULL);
  unsetenv("CDDP_JOIN");
  CHECK(g == NULL);
}

/* All ranks change the mode. Operations with a handle run on cddp's thread or on the one that
   waits, here on one rank and there on the other: in the caller's mode, of which only a small one
   may not know yet. Rounding tells: 1 + 2^-30 is 1 to nearest, and more upward. */
static int change_fp_mode(cddp_group *g, void *arg) {
  static const size_t counts[] = {1, 900, 5000, 100000};
  float *x = (float *)malloc(100000 * sizeof *x), above = 1 + FLT_EPSILON;
  int me = cddp_rank(g), turn, fp, k, bad = 0;
  cddp_ddp_desc desc;
  cddp_param param;
  cddp_ddp *d;
  cddp_work *w;
  size_t i;
  (void)arg;
  memset(&desc, 0, sizeof desc);
  memset(&param, 0, sizeof param);
  for (turn = 0; turn < 40; turn++) {
    fp = turn % 2;
    fesetround(fp ? FE_UPWARD : FE_TONEAREST);
    for (k = 3; k >= 0; k--) {
      float want = fp ? above : 1;
      for (i = 0; i < counts[k]; i++) x[i] = me == 0 ? 1 : 0x1p-30f;
      CHECK_OK(cddp_all_reduce(g, x, counts[k], CDDP_F32, CDDP_SUM, &w));
      if ((turn / 2 + k + me) % 2) ranks_sleep(0.004); /* cddp's thread runs it */
      CHECK_OK(cddp_wait(w));
      for (i = 0; i < counts[k]; i++) bad += x[i] != want;
    }
    CHECK_EQ(fegetround(), fp ? FE_UPWARD : FE_TONEAREST); /* it is the program's */
  }
  CHECK_EQ(bad, 0);
  for (i = 0; i < 100000; i++) x[i] = 1;
  param.data = x;
  param.count = 100000;
  CHECK_OK(cddp_ddp_create(&d, g, &param, 1, &desc));
  for (turn = 0; turn < 10 && d != NULL; turn++) { /* buckets begin on cddp's thread */
    float *grad = (float *)param.grad;
    fesetround(turn % 2 ? FE_UPWARD : FE_TONEAREST);
    for (i = 0; i < 100000; i++) grad[i] = me == 0 ? 1 : 0x1p-30f;
    CHECK_OK(cddp_ddp_ready(d, 0));
    CHECK_OK(cddp_ddp_wait(d));
    for (i = 0; i < 100000; i++) bad += grad[i] * 2 != (turn % 2 ? above : 1);
  }
  fesetround(FE_TONEAREST);
  CHECK_EQ(bad, 0);
  cddp_ddp_destroy(d);
  free(x);
  return 0;
}

static void test_fp_modes_change(void) {
  CHECK_OK(ranks_run(change_fp_mode, NULL, 2, false));
  CHECK_OK(ranks_run(change_fp_mode, NULL, 2, true));
}

/* PLACES THAT TWO SHARE ------------------------------------------------------------------------ */

/* Two jobs of two ranks, by hand, on one port. Nothing tells the first two ranks that connect that
   they are of two jobs. Each rank ends well, in a group of two, or has an error that has the port's
   name. If ranks of both jobs form a group, another rank is told, unless it starts after they
   ended: then the others form a group too. */
static void check_two_jobs(const member m[4]) {
  int i, k, told_ranks = 0, well = 0;
  char port[16];
  snprintf(port, sizeof port, "%d", m[0].port);
  for (i = 0; i < 4; i++) {
    const seen *s = m[i].seen;
    cddp_result r = s->result != CDDP_OK ? s->result : s->end;
    const char *text = s->result != CDDP_OK ? s->text : s->end_text;
    bool told = r == CDDP_INVALID_ARGUMENT && strstr(text, "two jobs use port") != NULL;
    told_ranks += told;
    well += r == CDDP_OK && s->sum == 2;
    if (r == CDDP_OK && s->sum == 2) continue;
    if (told || r == CDDP_TIMEOUT || r == CDDP_PEER_LOST) told = strstr(text, port) != NULL;
    if (!told)
      fprintf(stderr, "  %d%d %d%d %d%d %d%d: job %d rank %d: %s (jobs %d) '%s'\n", m[0].job,
              m[0].rank, m[1].job, m[1].rank, m[2].job, m[2].rank, m[3].job, m[3].rank, m[i].job,
              m[i].rank, r < CDDP__RESULT_COUNT ? cddp_result_name(r) : "nothing", s->jobs, text);
    CHECK(told);
  }
  for (k = 0; k < 4; k++) CHECK(m[k].seen->jobs != 3 || told_ranks > 0 || well == 4);
}

/* Cases side by side, four ranks each, in the order of `order`, `apart` s between their starts. */
static void two_jobs(int orders[][4], int cases, double apart) {
  member m[64];
  pid_t pid[64];
  int status[64], i, k;
  for (k = 0; k < cases; k++) {
    prepare(m + 4 * k, 4);
    for (i = 0; i < 4; i++) {
      member *one = &m[4 * k + i];
      one->rank = orders[k][i] % 2;
      one->world = 2;
      one->job = 1 + orders[k][i] / 2;
      one->delay = apart * i;
      one->stays = apart * 4 + RANKS_WITHIN(0.2);
      one->desc.timeout_s = apart * 4 + RANKS_WITHIN(0.4);
      one->seen = &shared_seen[4 * k + i];
    }
  }
  for (i = 0; i < 4 * cases; i++) pid[i] = start_member(&m[i]);
  ranks_join(pid, 4 * cases, 60, status);
  CHECK(ranks_exited_well(status, 4 * cases));
  for (k = 0; k < cases; k++) check_two_jobs(m + 4 * k);
}

static void test_two_jobs(void) {
  static const double apart[] = {0, 0, 0.005, 0.02, 0.1, 0.5};
  int first[12][4], loop, i, n, code, most = RANKS_SLOW ? 4 : 12;
  for (n = code = 0; code < 256; code++) { /* every order in which a rank of the first job leads */
    int digit[4], bits = 0;
    for (i = 0; i < 4; i++) bits |= 1 << (digit[i] = code >> 2 * i & 3);
    if (bits == 15 && digit[0] < 2) memcpy(first[n++], digit, sizeof digit);
  }
  CHECK_EQ(n, 12);
  for (loop = 0; loop < 6 && test_failures == 0; loop += RANKS_SLOW ? 4 : 1)
    for (i = 0; i < 12; i += most) two_jobs(first + i, most, apart[loop]);
}

/* Another program of the user, such as a scanner, connects to the names of ranks that wait for the
   last one: silently, or with bytes of its own. */
static void test_scanner(void) {
  static const char *const ends[] = {"-0", "-1"};
  double end;
  member m[3];
  pid_t pid[3];
  int status[3], i, calls = 0;
  prepare(m, 3);
  for (i = 0; i < 2; i++) pid[i] = start_member(&m[i]);
  for (end = test_now() + 10; calls < 30 && test_now() < end; ranks_sleep(0.005))
    for (i = 0; i < 2; i++) {
      int fd = ranks_connect(pid[i], ends[i]);
      if (fd < 0) continue;
      if (++calls % 2 == 0) (void)!send(fd, "GET /\r\n", 7, MSG_NOSIGNAL);
      close(fd);
    }
  CHECK(calls >= 30);
  pid[2] = start_member(&m[2]);
  ranks_join(pid, 3, 20, status);
  CHECK(ranks_exited_well(status, 3));
  check_joined(m, 3);
}

/* A job runs. The same command is started again on its port, at several ages of the first job: on
   the same hosts (one or two), for more ranks, or as if on other hosts. The first job goes on. A
   process of the second start whose rank lives there fails immediately and says what to do. */
static void second_start(bool two_hosts) {
  static const double ages[] = {0.2, 0.5, 1, 1.5, 3};
  member m[2 + 3 * 5];
  int n = 2, i, k;
  prepare(m, 17);
  for (i = 0; i < 2; i++) {
    m[i].job = 1;
    m[i].stays = 4 + RANKS_WITHIN(0.5);
  }
  for (k = 0; k < 5; k++)
    for (i = 0; i < (k == 3 ? 3 : 2); i++, n++) {
      m[n].rank = i;
      m[n].delay = ages[k];
      m[n].desc.timeout_s = 1;
      if (k == 3) m[n].world = 3;
    }
  for (i = 0; i < n; i++) {
    if (i < 2 || m[i].world != 3) m[i].world = 2;
    if (!two_hosts && i < n - 2) continue;
    m[i].name = "CDDP_HOST_ID";
    m[i].value = m[i].rank == 0 ? "a" : "b";
    if (i >= n - 2) m[i].value = m[i].rank == 0 ? "c" : "d"; /* the last start: other hosts */
  }
  launch(m, n, 60);
  for (i = 0; i < n; i++) {
    if (i < 2) {
      CHECK_EQ(m[i].seen->result, CDDP_OK);
      CHECK_EQ(m[i].seen->end, CDDP_OK);
      if (m[i].seen->end != CDDP_OK) fprintf(stderr, "  '%s'\n", m[i].seen->end_text);
    } else if (i >= n - 2) {
      CHECK(m[i].seen->result == CDDP_OK && m[i].seen->sum == 2);
    } else if (m[i].rank < 2) {
      CHECK_SEEN(&m[i], CDDP_INVALID_ARGUMENT, "two jobs use port", "MASTER_PORT");
      CHECK(m[i].seen->seconds < RANKS_WITHIN(0.5));
    } else {
      CHECK_SEEN(&m[i], CDDP_TIMEOUT, "", "");
    }
  }
}

static int train_elastic(int rank, void *arg) {
  static float w[8];
  const double *seconds = (const double *)arg;
  cddp_group *g = NULL;
  cddp_ddp *d = NULL;
  cddp_optim *o = NULL;
  cddp_ddp_desc desc;
  cddp_sgd_desc rule;
  cddp_param param;
  int shard, t;
  (void)rank;
  memset(&param, 0, sizeof param);
  memset(&desc, 0, sizeof desc);
  memset(&rule, 0, sizeof rule);
  param.data = w;
  param.count = 8;
  desc.elastic = true;
  desc.shards = 4;
  rule.lr = 0.1;
  CHECK_OK(cddp_init(&g, NULL));
  CHECK_OK(cddp_ddp_create(&d, g, &param, 1, &desc));
  rule.ddp = d;
  CHECK_OK(cddp_sgd_create(&o, &param, 1, &rule));
  for (t = 0; t < 100 * *seconds && test_failures == 0; t++) {
    while (cddp_ddp_next_shard(d, &shard)) CHECK_OK(cddp_ddp_ready(d, 0));
    CHECK_OK(cddp_ddp_step(d, o));
    ranks_sleep(0.01);
  }
  cddp_optim_destroy(o);
  cddp_ddp_destroy(d);
  cddp_destroy(g);
  return 0;
}

/* An elastic job of two hosts listens at MASTER_PORT for processes that join. A rank of a second
   start that is no rank of the job, on a host of its own, is told what runs there. */
static void second_start_elastic(const char *secret) {
  double seconds = 1 + RANKS_WITHIN(0.5);
  member m;
  pid_t pid[2];
  int status[2], i;
  if (secret != NULL) setenv("CDDP_SECRET", secret, 1);
  prepare(&m, 1);
  for (i = 0; i < 2; i++) {
    ranks_environment(i, 2, m.port);
    setenv("CDDP_HOST_ID", i == 0 ? "a" : "b", 1);
    pid[i] = ranks_fork(train_elastic, i, &seconds);
  }
  clear_variables();
  m.rank = 2;
  m.world = 3;
  m.delay = 0.5;
  m.desc.secret = secret;
  setenv("CDDP_HOST_ID", "c", 1);
  CHECK_EQ(waitpid(start_member(&m), NULL, 0) > 0, 1);
  unsetenv("CDDP_HOST_ID");
  CHECK_SEEN(&m, CDDP_INVALID_ARGUMENT, "an elastic job runs there", "MASTER_PORT");
  ranks_join(pid, 2, 60, status);
  CHECK(ranks_exited_well(status, 2));
}

static void test_second_start(void) {
  second_start(false);
  second_start(true);
  second_start_elastic(NULL);
  second_start_elastic("open sesame");
}

/* cddp_init is called three times, and all three groups live: with the variables of mpirun (0), a
   name (1), a port (2). */
static int again_rank(int rank, void *arg) {
  int how = *(const int *)arg, k;
  cddp_group *g[3] = {NULL, NULL, NULL};
  char name[64];
  cddp_group_desc d;
  memset(&d, 0, sizeof d);
  d.timeout_s = RANKS_WITHIN(5);
  snprintf(name, sizeof name, "%scddp-test-%d", how == 1 ? "unix://" : "", (int)getppid());
  if (how < 2) clear_variables();
  if (how == 0) {
    ranks_setenv("OMPI_COMM_WORLD_RANK", rank);
    ranks_setenv("OMPI_COMM_WORLD_SIZE", 2);
    ranks_setenv("OMPI_COMM_WORLD_LOCAL_SIZE", 2);
    setenv("PMIX_NAMESPACE", name, 1);
  }
  if (how == 1) d.init_method = name, d.rank = rank, d.world_size = 2;
  for (k = 0; k < 3; k++) {
    CHECK_OK(cddp_init(&g[k], &d));
    CHECK_EQ(cddp_rank(g[k]), rank);
    CHECK_OK(cddp_barrier(g[k]));
  }
  for (k = 0; k < 3; k++) cddp_destroy(g[k]);
  return 0;
}

static void test_init_again(void) {
  int how, status[2];
  for (how = 0; how < 3; how++) {
    ranks_script(again_rank, &how, 2, 60, status);
    CHECK(ranks_exited_well(status, 2));
  }
}

/* Of three ranks that have two groups rank 0 dies. The others form the first group anew, while one
   of them still has the old one. */
static int survivor(int rank, void *arg) {
  const int *port = (const int *)arg;
  cddp_group *g[3] = {NULL, NULL, NULL};
  cddp_group_desc d;
  int k;
  memset(&d, 0, sizeof d);
  d.timeout_s = RANKS_WITHIN(5);
  for (k = 0; k < 2; k++) {
    ranks_environment(rank, 3, port[k]);
    CHECK_OK(cddp_init(&g[k], &d));
  }
  CHECK_OK(cddp_barrier(g[1]));
  if (rank == 0) _exit(0);
  CHECK_IS(cddp_barrier(g[0]), CDDP_PEER_LOST);
  cddp_destroy(g[1]);
  if (rank == 1) ranks_sleep(0.3); /* as rank 1 it still has what rank 2 becomes */
  cddp_destroy(g[0]);
  ranks_environment(rank - 1, 2, port[0]);
  CHECK_OK(cddp_init(&g[2], &d));
  CHECK_OK(cddp_barrier(g[2]));
  cddp_destroy(g[2]);
  return 0;
}

static void test_survivors(void) {
  int port[2], status[3];
  port[0] = ranks_free_port();
  port[1] = ranks_free_port();
  ranks_script(survivor, port, 3, 60, status);
  CHECK(ranks_exited_well(status, 3));
}

/* A rank of another user's job at the port is refused by name, and this job goes on. */
static void test_other_user(void) {
  member m[3];
  int i;
  if (geteuid() != 0) {
    fprintf(stderr, "  (only root can be another user: left out)\n");
    return;
  }
  prepare(m, 3);
  for (i = 0; i < 3; i++) m[i].world = 2;
  m[2].rank = 1;
  m[2].user = 65534;
  m[2].desc.timeout_s = 5;
  m[1].delay = 0.5;
  launch(m, 3, 30);
  check_joined(m, 2);
  CHECK_SEEN(&m[2], CDDP_UNAUTHORIZED, "another user", "MASTER_PORT");
  CHECK(m[2].seen->seconds < RANKS_WITHIN(1.0));
}

/* A rank that asks with another secret is known to the one that waits for it. */
static void test_secret_is_named(void) {
  member m[2];
  prepare(m, 2);
  m[0].desc.secret = "open sesame";
  m[1].desc.secret = "open barley";
  m[0].desc.timeout_s = 1;
  launch(m, 2, 30);
  CHECK_SEEN(&m[0], CDDP_TIMEOUT, "secret", "rank 1");
  CHECK_SEEN(&m[1], CDDP_UNAUTHORIZED, "secret", "");
}

/* The ranks of a host need one connection to the store, which may be slow to take them. */
static int connections(int port) { /* established, by their near ends; a line may come twice */
  char line[512];
  unsigned near, far, state, seen_ports[64];
  int n = 0, i;
  FILE *f = fopen("/proc/net/tcp", "r");
  while (f != NULL && n < 64 && fgets(line, sizeof line, f) != NULL) {
    if (sscanf(line, " %*[^:]: %*[^:]:%x %*[^:]:%x %x", &near, &far, &state) != 3) continue;
    if (far != (unsigned)port || state != 1) continue;
    for (i = 0; i < n && seen_ports[i] != near; i++) continue;
    if (i == n) seen_ports[n++] = near;
  }
  if (f != NULL) fclose(f);
  return n;
}

/* As torchrun's agent: serves the store of the port `arg` in a process of its own, since the ranks
   are forked while it serves. Ends when it is told to. */
static int serve_store(int slot, void *arg) {
  cddp_store_desc d;
  cddp_store *s = NULL;
  char url[64];
  (void)slot;
  snprintf(url, sizeof url, "tcp://127.0.0.1:%d", *(const int *)arg);
  memset(&d, 0, sizeof d);
  d.init_method = url;
  d.is_server = true;
  d.secret = "";
  CHECK_OK(cddp_store_create(&s, &d));
  pause();
  return 1;
}

static pid_t start_server(int port) {
  double deadline = test_now() + RANKS_WITHIN(5.0);
  pid_t pid = ranks_fork(serve_store, 0, &port);
  int fd;
  while ((fd = connect_to(port)) < 0 && test_now() < deadline) ranks_sleep(0.01);
  CHECK(fd >= 0);
  close(fd);
  return pid;
}

/* Of torchrun: its agent serves the store. */
static pid_t start_worker(member *m) {
  pid_t pid;
  m->name = "TORCHELASTIC_USE_AGENT_STORE";
  m->value = "True";
  m->desc.secret = "";
  pid = start_member(m);
  unsetenv("TORCHELASTIC_USE_AGENT_STORE");
  return pid;
}

static void test_one_connection(void) {
  member m[8];
  pid_t pid[8], server;
  int status[8], i, most = 0, none;
  prepare(m, 8);
  server = start_server(m[0].port);
  ranks_sleep(0.1);
  none = connections(m[0].port);
  for (i = 0; i < 8; i++) {
    m[i].delay = i == 7 ? 0.5 : 0;
    pid[i] = start_worker(&m[i]);
  }
  for (i = 0; i < 30; i++) {
    int now = connections(m[0].port) - none;
    most = now > most ? now : most;
    ranks_sleep(0.01);
  }
  ranks_join(pid, 8, 30, status);
  CHECK(ranks_exited_well(status, 8));
  check_joined(m, 8);
  CHECK_EQ(most, 1);
  kill(server, SIGKILL);
  CHECK_EQ(waitpid(server, NULL, 0), server);
}

/* The ranks of other hosts read the root's address from the agent's store, also after an earlier
   job has left an address there that leads to nobody. */
static void test_agent_of_two_hosts(void) {
  member m[4];
  pid_t pid[4], server;
  int status[4], i, round;
  prepare(m, 4);
  server = start_server(m[0].port);
  for (round = 0; round < 2; round++) {
    for (i = 0; i < 4; i++) {
      char id[2] = {"abab"[i], 0};
      setenv("CDDP_HOST_ID", id, 1);
      m[i].delay = i % 2 == round ? 0 : 0.3;
      pid[i] = start_worker(&m[i]);
    }
    unsetenv("CDDP_HOST_ID");
    ranks_join(pid, 4, 30, status);
    CHECK(ranks_exited_well(status, 4));
    check_joined(m, 4);
    for (i = 0; i < 4; i++) CHECK_EQ(m[i].seen->local, 2);
  }
  kill(server, SIGKILL);
  CHECK_EQ(waitpid(server, NULL, 0), server);
}

/* The agent is stopped just before the time is up: a question to its store takes no more. */
static void test_agent_stops(void) {
  member m[2];
  pid_t pid, server;
  int status;
  prepare(m, 2); /* rank 0 never comes */
  m[1].desc.timeout_s = 2;
  server = start_server(m[1].port);
  pid = start_worker(&m[1]);
  ranks_sleep(1.8);
  kill(server, SIGSTOP);
  ranks_join(&pid, 1, 30, &status);
  CHECK_EQ(status, 0);
  CHECK_SEEN(&m[1], CDDP_TIMEOUT, "", "");
  CHECK(m[1].seen->seconds > 1.95 && m[1].seen->seconds < 2 + RANKS_WITHIN(0.4));
  kill(server, SIGKILL);
  CHECK_EQ(waitpid(server, NULL, 0), server);
}

/* LIMITS --------------------------------------------------------------------------------------- */

static void test_few_descriptors(void) {
  member m[60];
  int i, named = 0;
  prepare(m, 1); /* waits for 999 others as it should */
  m[0].world = 1000;
  m[0].files = 64;
  m[0].desc.timeout_s = RANKS_WITHIN(0.5);
  launch(m, 1, 20);
  CHECK_SEEN(&m[0], CDDP_TIMEOUT, "did not connect", "");
  prepare(m, 40); /* as many as there are descriptors for */
  for (i = 0; i < 40; i++) m[i].files = 64;
  launch(m, 40, 60);
  check_joined(m, 40);
  prepare(m, 60); /* too many: a sentence with limit and cure */
  for (i = 0; i < 60; i++) {
    m[i].files = 40;
    m[i].desc.timeout_s = RANKS_WITHIN(1.5);
  }
  launch(m, 60, 60);
  for (i = 0; i < 60; i++) {
    CHECK(m[i].seen->result != CDDP_OK);
    named += says(&m[i], "ulimit -n") && says_number(&m[i], 40);
  }
  CHECK(named >= 20); /* those that came before the first one had no descriptor left */
}

/* What ranks share fits any file size limit that has room for it. */
static void test_file_size_limit(void) {
  static const rlim_t sizes[] = {(rlim_t)95 << 30, 100000000, 65536};
  member m[4];
  size_t k;
  int i;
  for (k = 0; k < 3; k++) {
    prepare(m, 4);
    for (i = 0; i < 4; i++) m[i].file_size = sizes[k];
    launch(m, 4, 30);
    if (k < 2) check_joined(m, 4);
    for (i = 0; k == 2 && i < 4; i++) CHECK_SEEN(&m[i], CDDP_SYSTEM, "ulimit -f", "65536");
  }
}

/* A rank needs no descriptor for each other one, once they have met. */
static int count_descriptors(cddp_group *g, void *most) {
  int now = ranks_open_fds(), *highest = (int *)most, old;
  CHECK_OK(cddp_barrier(g));
  old = __atomic_load_n(highest, __ATOMIC_RELAXED);
  while (old < now && !__atomic_compare_exchange_n(highest, &old, now, false, __ATOMIC_RELAXED,
                                                   __ATOMIC_RELAXED)) {}
  return 0;
}

static void test_descriptors(void) {
  int *most = (int *)ranks_shared(2 * sizeof *most);
  CHECK_OK(ranks_run(count_descriptors, &most[0], 3, false));
  CHECK_OK(ranks_run(count_descriptors, &most[1], 24, false));
  CHECK_EQ(most[0], most[1]);
}

/* Ranks that were started with stdin, stdout and stderr closed, and print: cddp has nothing there
   that this could go to. */
static int run_closed(int rank, void *hosts) {
  static const char *const ids[] = {"a", "b"};
  cddp_group *g, *half;
  cddp_work *work;
  float x = 1, *shared;
  int fd, step, bad = 0;
  for (fd = 0; fd < 3; fd++) close(fd);
  if (hosts != NULL) setenv("CDDP_HOST_ID", ids[rank % 2], 1);
  if (cddp_init(&g, NULL) || cddp_group_split(g, 0, 0, &half)) return 8;
  shared = (float *)cddp_alloc(g, 1 << 20);
  for (step = 0; step < 5 && shared != NULL; step++) {
    if (cddp_all_reduce(half, shared, 1 << 18, CDDP_F32, CDDP_SUM, &work)) return 16;
    for (fd = 0; fd < 3; fd++) bad |= (write(fd, "loss 0.5 loss 0.5 loss 0.5\n", 27) == 27) << fd;
    if (cddp_wait(work) || cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_AVG, NULL)) return 16;
    if (cddp_send(g, &x, 1, CDDP_F32, 1 - rank, 0, NULL)) return 16;
    if (cddp_recv(g, &x, 1, CDDP_F32, 1 - rank, 0, NULL)) return 16;
  }
  for (fd = 0; fd < 3; fd++) bad |= (fcntl(fd, F_GETFD) >= 0) << fd;
  cddp_destroy(half);
  cddp_destroy(g);
  return bad;
}

static void test_closed_files(void) {
  int two_hosts = 1;
  CHECK_OK(cddp_spawn(run_closed, NULL, 2));
  CHECK_OK(cddp_spawn(run_closed, &two_hosts, 2));
}

/* Sandboxes that forbid memfd_create or pidfd_open. */
static void test_denied_calls(void) {
  static const char *const hosts[] = {"a", "b"};
  member m[2];
  int i;
  prepare(m, 2);
  m[0].denied = m[1].denied = SYS_memfd_create;
  launch(m, 2, 30);
  for (i = 0; i < 2; i++) CHECK_SEEN(&m[i], CDDP_SYSTEM, "seccomp", "CDDP_HOST_ID");
  prepare(m, 2); /* its cure */
  for (i = 0; i < 2; i++) {
    m[i].denied = SYS_memfd_create;
    m[i].name = "CDDP_HOST_ID";
    m[i].value = hosts[i];
  }
  launch(m, 2, 30);
  unsetenv("CDDP_HOST_ID");
  check_joined(m, 2);
  prepare(m, 2);
  m[0].denied = m[1].denied = SYS_pidfd_open;
  launch(m, 2, 30);
  check_joined(m, 2);
}

/* CONTAINERS: ranks in process namespaces of their own, with one network. ---------------------- */

static cddp_result some_steps(cddp_group *g, int count) {
  float x = 1;
  cddp_result r = CDDP_OK;
  while (r == CDDP_OK && count-- > 0) {
    r = cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_AVG, NULL);
    ranks_sleep(0.001);
  }
  return r;
}

/* An elastic model of ranks whose system clocks began at other times: neither takes the other for
   dead. */
static void train_apart(int rank, bool *left_out) {
  int fd = -1, shard, step, space = unshare(0x80); /* CLONE_NEWTIME; for children */
  const char *offset = rank == 0 ? "boottime 5000 0" : "boottime 900000 0";
  *left_out = space != 0 || (fd = open("/proc/self/timens_offsets", O_WRONLY)) < 0 ||
              write(fd, offset, strlen(offset)) < 0;
  if (fd >= 0) close(fd);
  if (*left_out || fork() != 0) return;
  {
    float w = 0;
    cddp_group *g;
    cddp_ddp *d;
    cddp_optim *o;
    cddp_param p;
    cddp_ddp_desc desc;
    cddp_sgd_desc rule;
    memset(&p, 0, sizeof p);
    memset(&desc, 0, sizeof desc);
    memset(&rule, 0, sizeof rule);
    p.data = &w;
    p.count = 1;
    desc.shards = 2;
    desc.elastic = true;
    rule.lr = 1;
    CHECK_OK(cddp_init(&g, NULL));
    CHECK_OK(cddp_ddp_create(&d, g, &p, 1, &desc));
    CHECK_OK(cddp_sgd_create(&o, &p, 1, &rule));
    for (step = 0; step < 8 && test_failures == 0; step++) {
      while (cddp_ddp_next_shard(d, &shard)) {
        ((float *)p.grad)[0] += 1;
        ranks_sleep(shard == step % 2 ? 0.1 : 0); /* the other one looks after it */
        if (cddp_ddp_ready(d, 0) != CDDP_OK) break;
      }
      CHECK_OK(cddp_ddp_step(d, o));
      CHECK_EQ(cddp_world_size(cddp_ddp_group(d)), 2);
    }
    cddp_optim_destroy(o);
    cddp_ddp_destroy(d);
    cddp_destroy(g);
  }
  _exit(test_failures != 0);
}

static void test_time_namespaces(void) {
  int status, rank, port = ranks_free_port();
  pid_t pid[2];
  for (rank = 0; rank < 2; rank++) {
    ranks_environment(rank, 2, port);
    fflush(NULL);
    pid[rank] = fork();
    if (pid[rank] == 0) {
      bool left_out;
      test_failures = 0;
      train_apart(rank, &left_out);
      if (left_out || wait(&status) < 0 || !WIFEXITED(status)) _exit(left_out ? 77 : 9);
      _exit(WEXITSTATUS(status));
    }
  }
  clear_variables();
  for (rank = 0; rank < 2; rank++) {
    CHECK(waitpid(pid[rank], &status, 0) == pid[rank] && WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
      fprintf(stderr, "  (no right to make a time namespace: left out)\n");
    else
      CHECK_EQ(WEXITSTATUS(status), 0);
  }
}

static void test_pid_namespaces(void) {
  int status, rank, pass;
  for (pass = 0; pass < 2; pass++) { /* one of them dies: the other hears of it, and of no other */
    pid_t pid[2];
    double begin = test_now();
    int port = ranks_free_port();
    for (rank = 0; rank < 2; rank++) {
      ranks_environment(rank, 2, port);
      fflush(NULL);
      pid[rank] = fork();
      if (pid[rank] == 0) {
        pid_t inner;
        if (unshare(CLONE_NEWPID) != 0) _exit(77);
        test_failures = 0;
        inner = fork();
        if (inner == 0) {
          cddp_group_desc d;
          cddp_group *g;
          memset(&d, 0, sizeof d);
          d.timeout_s = 20;
          if (rank == 1) ranks_sleep(0.06);
          if (cddp_init(&g, &d) != CDDP_OK) {
            fprintf(stderr, "%s\n", cddp_error());
            _exit(1);
          }
          if (pass == 1) _exit(some_steps(g, 10000) == CDDP_PEER_LOST ? 0 : 3);
          if (some_steps(g, 200) != CDDP_OK) fprintf(stderr, "%s\n", cddp_error()), _exit(2);
          cddp_barrier(g);
          cddp_destroy(g);
          _exit(0);
        }
        if (pass == 1 && rank == 1) { /* the first of a namespace can only be killed from outside */
          ranks_sleep(RANKS_WITHIN(0.4));
          kill(inner, SIGKILL);
        }
        waitpid(inner, &status, 0);
        _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 9);
      }
    }
    clear_variables();
    for (rank = 0; rank < 2; rank++) {
      CHECK(waitpid(pid[rank], &status, 0) == pid[rank] && WIFEXITED(status));
      if (WEXITSTATUS(status) == 77) {
        fprintf(stderr, "  (no right to make a process namespace: left out)\n");
        return;
      }
      CHECK_EQ(WEXITSTATUS(status), pass == 1 && rank == 1 ? 9 : 0);
    }
    CHECK(test_now() - begin < RANKS_WITHIN(5.0));
  }
}

/* FILES ---------------------------------------------------------------------------------------- */

static void use_file(member *m, int n, const char *method) {
  int i;
  prepare(m, n);
  for (i = 0; i < n; i++) {
    m[i].world = 0;
    m[i].desc.init_method = method;
    m[i].desc.rank = i;
    m[i].desc.world_size = n;
  }
}

static void test_file(void) {
  char dir[] = P_tmpdir "/cddp_init_XXXXXX", method[128];
  member m[4];
  int i, round;
  CHECK(mkdtemp(dir) != NULL);
  snprintf(method, sizeof method, "file://%s/meet", dir);
  for (round = 0; round < 3; round++) { /* one path, one job after the other */
    use_file(m, 4, method);
    m[round].delay = 0.2;
    launch(m, 4, 30);
    check_joined(m, 4);
  }
  use_file(m, 3, method); /* all crash */
  for (i = 0; i < 3; i++) m[i].dies = true;
  launch(m, 3, 30);
  use_file(m, 4, method);
  m[0].delay = 0.2;
  launch(m, 4, 30);
  check_joined(m, 4);
  use_file(m, 4, method); /* one crashes while it waits for the others */
  {
    pid_t pid = start_member(&m[1]);
    int status;
    ranks_sleep(RANKS_WITHIN(0.2));
    kill(pid, SIGKILL);
    CHECK(waitpid(pid, &status, 0) == pid);
  }
  use_file(m, 2, method);
  launch(m, 2, 30);
  check_joined(m, 2);
  for (i = 0; i < 3; i++) { /* rank and world size from the variables */
    use_file(m, 3, method);
    m[0].world = m[1].world = m[2].world = 3;
    m[0].desc.world_size = m[1].desc.world_size = m[2].desc.world_size = 0;
  }
  launch(m, 3, 30);
  check_joined(m, 3);
  use_file(m, 2, method); /* rank 1 never comes */
  m[0].desc.timeout_s = 0.5;
  launch(m, 1, 20);
  CHECK_SEEN(&m[0], CDDP_TIMEOUT, "", "");
  CHECK(says_number(&m[0], 1));
  use_file(m, 2, method);
  launch(m, 2, 30);
  check_joined(m, 2);
  unlink(method + 7);
  CHECK(rmdir(dir) == 0); /* nothing but the file itself */
}

static void test_bad_file(void) {
  char dir[] = P_tmpdir "/cddp_init_XXXXXX", method[128];
  FILE *f;
  member m[2];
  CHECK(mkdtemp(dir) != NULL);
  snprintf(method, sizeof method, "file://%s/none/meet", dir);
  use_file(m, 2, method);
  m[0].desc.timeout_s = m[1].desc.timeout_s = 2;
  launch(m, 2, 20);
  CHECK_SEEN(&m[0], CDDP_IO, dir, "");
  CHECK_SEEN(&m[1], CDDP_IO, dir, "");
  snprintf(method, sizeof method, "file://%s/meet", dir);
  f = fopen(method + 7, "w"); /* somebody's notes */
  CHECK(f != NULL);
  if (f != NULL) {
    fprintf(f, "Dear diary, this is no store at all. %s\n", method);
    fclose(f);
  }
  use_file(m, 2, method);
  m[0].desc.timeout_s = m[1].desc.timeout_s = 2;
  launch(m, 2, 20);
  CHECK((m[0].seen->result == CDDP_OK) == (m[1].seen->result == CDDP_OK));
  CHECK(m[0].seen->result == CDDP_OK || says(&m[0], dir));
  unlink(method + 7);
  CHECK(rmdir(dir) == 0);
}

/* SECRETS -------------------------------------------------------------------------------------- */

static void test_secret(void) {
  member m[3];
  int i;
  prepare(m, 3);
  for (i = 0; i < 3; i++) m[i].desc.secret = "open sesame";
  m[1].desc.secret = NULL; /* from the environment */
  m[1].name = "CDDP_SECRET";
  m[1].value = "open sesame";
  launch(m, 3, 30);
  check_joined(m, 3);
  CHECK(!says(&m[0], "sesame"));
}

static void test_wrong_secret(void) {
  static const char *const wrong[] = {"open barley", NULL, ""};
  member m[4];
  int i, k;
  for (k = 0; k < 3; k++) {
    prepare(m, 3);
    for (i = 0; i < 3; i++) m[i].desc.secret = "open sesame";
    m[1].delay = 0.6; /* after the wrong one */
    m[3] = m[1];
    m[3].delay = 0;
    m[3].desc.secret = wrong[k];
    m[3].desc.timeout_s = 5;
    m[3].seen = &shared_seen[3];
    launch(m, 4, 30);
    check_joined(m, 3); /* the job goes on */
    CHECK_SEEN(&m[3], CDDP_UNAUTHORIZED, "secret", "");
    CHECK(!says(&m[3], "sesame") && !says(&m[3], "barley"));
    CHECK(m[3].seen->seconds < RANKS_WITHIN(2.0));
  }
  prepare(m, 2); /* the server has none, the client insists */
  m[1].desc.secret = "open sesame";
  m[0].desc.timeout_s = m[1].desc.timeout_s = 2;
  launch(m, 2, 30);
  CHECK(m[1].seen->result != CDDP_OK);
  CHECK(m[0].seen->result != CDDP_OK);
}

/* STRANGERS ------------------------------------------------------------------------------------ */

static void test_strangers(void) {
  static const char http[] = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
  int secret, i;
  for (secret = 0; secret < 2; secret++) {
    double deadline = test_now() + RANKS_WITHIN(5.0);
    int fd[12], status[2];
    member m[2];
    pid_t pid[2];
    prepare(m, 2);
    if (secret) m[0].desc.secret = m[1].desc.secret = "s";
    pid[0] = start_member(&m[0]);
    do {
      fd[0] = connect_to(m[0].port);
      if (fd[0] < 0) ranks_sleep(0.01);
    } while (fd[0] < 0 && test_now() < deadline);
    CHECK(fd[0] >= 0);
    for (i = 1; i < 12; i++) {
      unsigned char noise[256];
      size_t k;
      ssize_t sent = 0;
      fd[i] = connect_to(m[0].port);
      for (k = 0; k < sizeof noise; k++)
        noise[k] = (unsigned char)(i % 4 == 3 ? 255 : ranks_mix((uint64_t)i, k, 0));
      if (i % 3 == 1) sent = send(fd[i], http, sizeof http - 1, MSG_NOSIGNAL);
      if (i % 3 == 2) sent = send(fd[i], noise, (size_t)i * 11, MSG_NOSIGNAL); /* else silent */
      CHECK(sent >= 0);
      if (i % 5 == 4) {
        close(fd[i]);
        fd[i] = -1;
      }
    }
    pid[1] = start_member(&m[1]);
    ranks_join(pid, 2, 30, status);
    CHECK(ranks_exited_well(status, 2));
    check_joined(m, 2);
    CHECK(m[1].seen->seconds < RANKS_WITHIN(2.0));
    for (i = 0; i < 12; i++)
      if (fd[i] >= 0) close(fd[i]);
  }
}

/* HOOKS: all of the group's own memory comes from the allocator and returns to it. ------------- */

typedef struct purse {
  int left, taken, returned; /* left: allocations until there is none; -1: never */
} purse;

static void *take(size_t bytes, void *user_data) {
  purse *p = (purse *)user_data;
  int left = __atomic_load_n(&p->left, __ATOMIC_SEQ_CST);
  if (left == 0) return NULL;
  if (left > 0) __atomic_sub_fetch(&p->left, 1, __ATOMIC_SEQ_CST);
  __atomic_add_fetch(&p->taken, 1, __ATOMIC_SEQ_CST);
  return malloc(bytes);
}

static void give(void *what, void *user_data) {
  purse *p = (purse *)user_data;
  if (what != NULL) __atomic_add_fetch(&p->returned, 1, __ATOMIC_SEQ_CST);
  free(what);
}

/* Everything a program does, in a world of one; each call may say that memory is short, none may
   do worse. */
static bool whole_life(purse *p) {
  float w[8] = {1}, x[8] = {1};
  cddp_param param = {"w", w, NULL, 8, CDDP_F32};
  cddp_group_desc desc;
  cddp_group *g = NULL, *s = NULL;
  cddp_ddp *d = NULL;
  cddp_work *work = NULL;
  void *shared = NULL;
  cddp_result r;
  memset(&desc, 0, sizeof desc);
  desc.allocator.alloc = take;
  desc.allocator.free = give;
  desc.allocator.user_data = p;
  r = cddp_init(&g, &desc);
  if (r == CDDP_OK) r = cddp_group_split(g, 0, 0, &s);
  if (r == CDDP_OK && (shared = cddp_alloc(s, 1000)) == NULL) r = CDDP_OUT_OF_MEMORY;
  if (r == CDDP_OK) r = cddp_all_reduce(s, x, 8, CDDP_F32, CDDP_SUM, &work);
  if (work != NULL) r = cddp_wait(work);
  if (r == CDDP_OK) r = cddp_ddp_create(&d, g, &param, 1, NULL);
  if (r == CDDP_OK) r = cddp_ddp_ready(d, 0);
  if (r == CDDP_OK) r = cddp_ddp_wait(d);
  CHECK(r == CDDP_OK || r == CDDP_OUT_OF_MEMORY);
  cddp_ddp_destroy(d);
  CHECK(param.grad == NULL);
  if (shared != NULL) cddp_free(s, shared);
  cddp_destroy(s);
  cddp_destroy(g);
  CHECK_EQ(p->taken, p->returned);
  return r == CDDP_OK;
}

static void test_allocator(void) {
  int n, fds = ranks_open_fds(), tasks = ranks_threads();
  purse p = {-1, 0, 0};
  bool done = false;
  CHECK(whole_life(&p));
  CHECK(p.taken > 0);
  for (n = 0; n < 2000 && !done; n++) { /* the Nth allocation fails, for every N */
    purse q = {n, 0, 0};
    done = whole_life(&q);
    if (!done) CHECK(strstr(cddp_error(), "memory") != NULL);
  }
  CHECK(done);
  CHECK_EQ(ranks_open_fds(), fds);
  CHECK(ranks_threads_left(tasks));
}

int main(void) {
  clear_variables();
  shared_seen = (seen *)ranks_shared(64 * sizeof *shared_seen);
  RUN(test_no_group);
  RUN(test_alone);
  RUN(test_beside_one_rank);
  RUN(test_alone_with_a_launcher);
  RUN(test_pinned);
  RUN(test_container);
  RUN(test_missing);
  RUN(test_bad_values);
  RUN(test_bad_desc);
  RUN(test_port_in_use);
  RUN(test_other_program);
  RUN(test_closed_for_a_moment);
  RUN(test_ports);
  RUN(test_wrong_ports);
  RUN(test_blocked);
  RUN(test_descriptors_between_hosts);
  RUN(test_unknown_host);
  RUN(test_late_name);
  RUN(test_late_name_on_one_host);
  RUN(test_silent_root);
  RUN(test_localhost);
  RUN(test_spellings);
  RUN(test_long_host_ids);
  RUN(test_tcp);
  RUN(test_late);
  RUN(test_any_order);
  RUN(test_rank_0_on_this_host);
  RUN(test_suspended_rank);
  RUN(test_last_moment);
  RUN(test_late_duplicate);
  RUN(test_duplicate_with_the_table);
  RUN(test_nobody_left);
  RUN(test_killed_behind_the_table);
  RUN(test_never_comes);
  RUN(test_again);
  RUN(test_duplicate);
  RUN(test_world_sizes_differ);
  RUN(test_known_errors);
  RUN(test_one_wrong_rank);
  RUN(test_no_recorder);
  RUN(test_wrong_variables);
  RUN(test_fp_modes_differ);
  RUN(test_fp_modes_change);
  RUN(test_two_jobs);
  RUN(test_second_start);
  RUN(test_init_again);
  RUN(test_survivors);
  RUN(test_other_user);
  RUN(test_secret_is_named);
  RUN(test_one_connection);
  RUN(test_agent_of_two_hosts);
  RUN(test_agent_stops);
  RUN(test_few_descriptors);
  RUN(test_file_size_limit);
  RUN(test_descriptors);
  RUN(test_closed_files);
  RUN(test_denied_calls);
  RUN(test_pid_namespaces);
  RUN(test_time_namespaces);
  RUN(test_file);
  RUN(test_bad_file);
  RUN(test_secret);
  RUN(test_wrong_secret);
  RUN(test_strangers);
  RUN(test_allocator);
  RUN(test_threads_of_one_process);
  RUN(test_scanner);
  munmap(shared_seen, 64 * sizeof *shared_seen);
  return TEST_END();
}
