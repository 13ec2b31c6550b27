/* ranks.h - ranks for tests, and the small tools that several tests need.

     CHECK_OK(ranks_run(fn, arg, 4, false));     fn(group, arg) on 4 processes; true: on threads
     ranks_script(fn, arg, 4, seconds, status);  fn(rank, arg) on 4 processes, which call cddp_init

   TEST_HOSTS=aab in the environment puts three ranks on hosts a, a and b (CDDP_HOST_ID). Further:
   test data (ranks_mix), hashes, deadlines that a slow machine gets more of (RANKS_WITHIN), ports,
   counts of descriptors and threads, and the tests' own half precision and canonical sum, written
   from the manual. Included after cddp.h; brings test.h with it. */
#ifndef RANKS_H
#define RANKS_H

#include "test.h"

#include <dirent.h>
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RANKS_DEF static __attribute__((unused))

#if defined(__SANITIZE_THREAD__)
#define RANKS_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define RANKS_TSAN 1
#endif
#endif
#ifndef RANKS_TSAN
#define RANKS_TSAN 0
#endif

#if defined(__SANITIZE_ADDRESS__) || RANKS_TSAN
#define RANKS_SLOW 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define RANKS_SLOW 1
#endif
#endif
#ifndef RANKS_SLOW
#define RANKS_SLOW 0
#endif

/* `seconds` that a deadline test may take; ten times that where a sanitizer slows it down, or as
   TEST_SLACK in the environment says, where tests run side by side. */
RANKS_DEF double ranks_slack(void) {
  const char *slack = getenv("TEST_SLACK");
  double times = slack != NULL ? atof(slack) : 1;
  return RANKS_SLOW && times < 10 ? 10 : times;
}
#define RANKS_WITHIN(seconds) ((seconds) * ranks_slack())

typedef int (*ranks_fn)(cddp_group *g, void *arg);

typedef struct ranks_job {
  ranks_fn fn;
  void *arg;
} ranks_job;

RANKS_DEF void ranks_sleep(double seconds) {
  struct timespec t;
  t.tv_sec = (time_t)seconds;
  t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
  while (nanosleep(&t, &t) != 0 && errno == EINTR) {}
}

/* A good hash of three numbers: the source of all test data. */
RANKS_DEF uint64_t ranks_mix(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t h = a * 0x9e3779b97f4a7c15ull ^ (b + 0x632be59bd9b4e019ull) * 0xff51afd7ed558ccdull;
  h ^= (c + 0x1b873593ull) * 0xc4ceb9fe1a85ec53ull;
  h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9ull;
  h = (h ^ h >> 27) * 0x94d049bb133111ebull;
  return h ^ h >> 31;
}

/* Writes element i of p, of a type that trains: around 1, with as many digits as the type has. */
RANKS_DEF void ranks_put(void *p, cddp_dtype d, size_t i, uint64_t h) {
  uint64_t sign = h >> 63;
  double x = ((double)(int64_t)(h >> 11) * 0x1p-52 - 1) * (double)(1 << (h & 7));
  if (d == CDDP_F64) ((double *)p)[i] = x;
  else if (d == CDDP_F32) ((float *)p)[i] = (float)x;
  else if (d == CDDP_F16)
    ((uint16_t *)p)[i] = (uint16_t)(sign << 15 | (9 + (h >> 40) % 8) << 10 | (h & 1023));
  else ((uint16_t *)p)[i] = (uint16_t)(sign << 15 | (121 + (h >> 40) % 8) << 7 | (h & 127));
}

/* FNV-1a, going on from h; RANKS_HASH: its beginning. */
#define RANKS_HASH 0xcbf29ce484222325ull
RANKS_DEF uint64_t ranks_hash(uint64_t h, const void *p, size_t n) {
  const unsigned char *b = (const unsigned char *)p;
  size_t i;
  for (i = 0; i < n; i++) h = (h ^ b[i]) * 0x100000001b3ull;
  return h;
}

RANKS_DEF bool ranks_zero(const void *p, size_t n) {
  const unsigned char *b = (const unsigned char *)p;
  return n == 0 || (b[0] == 0 && memcmp(b, b + 1, n - 1) == 0);
}

RANKS_DEF int ranks_entries(const char *directory) {
  DIR *d = opendir(directory);
  struct dirent *e;
  int n = 0;
  if (d == NULL) return -1;
  while ((e = readdir(d)) != NULL) n += e->d_name[0] != '.';
  closedir(d);
  return n;
}

static __attribute__((unused)) int ranks_port_fds; /* that hold blocks of ports for this process */

RANKS_DEF int ranks_open_fds(void) { /* but for those of tests themselves */
  return ranks_entries("/proc/self/fd") - 1 /* opendir's own */ - ranks_port_fds;
}

/* Mappings whose line in /proc/self/maps has that text; "": all. */
RANKS_DEF int ranks_mappings(const char *with) {
  FILE *f = fopen("/proc/self/maps", "r");
  char line[512];
  int n = 0;
  while (f != NULL && fgets(line, sizeof line, f) != NULL) n += strstr(line, with) != NULL;
  if (f != NULL) fclose(f);
  return n;
}

/* Bytes of the memory that the ranks of this host share; 0: there is none. */
RANKS_DEF long long ranks_shared_bytes(void) {
  DIR *d = opendir("/proc/self/fd");
  char path[300], name[16];
  struct dirent *e;
  struct stat s;
  long long bytes = 0;
  while (d != NULL && (e = readdir(d)) != NULL) {
    snprintf(path, sizeof path, "/proc/self/fd/%s", e->d_name);
    if (readlink(path, name, sizeof name) > 11 && memcmp(name, "/memfd:cddp", 11) == 0 &&
        stat(path, &s) == 0)
      bytes += s.st_blocks * 512;
  }
  if (d != NULL) closedir(d);
  return bytes;
}

/* The thread sanitizer adds one of its own at some point, so there is nothing to count with it. */
RANKS_DEF int ranks_threads(void) { return RANKS_TSAN ? 1 : ranks_entries("/proc/self/task"); }

/* Whether this process comes down to n threads: the kernel lists a joined one for a moment more. */
RANKS_DEF bool ranks_threads_left(int n) {
  double deadline = test_now() + 1;
  while (ranks_threads() > n && test_now() < deadline) ranks_sleep(0.001);
  return ranks_threads() <= n;
}

/* The descriptors beyond n, after at most a second: an ending thread can hold one. */
RANKS_DEF int ranks_fds_left(int n) {
  double deadline = test_now() + 1;
  while (ranks_open_fds() != n && test_now() < deadline) ranks_sleep(0.001);
  return ranks_open_fds() - n;
}

RANKS_DEF bool ranks_no_children(void) {
  int status;
  return waitpid(-1, &status, WNOHANG) == -1 && errno == ECHILD;
}

/* Zeroed memory that forked processes share. */
RANKS_DEF void *ranks_shared(size_t bytes) {
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    perror("mmap");
    exit(1);
  }
  return p;
}

/* TEST_HOSTS=aab in the environment: ranks 0, 1, 3, 4 ... are on one host, 2, 5, ... on another, as
   far as cddp can tell. Any test of ranks can be run so: TEST_HOSTS=ab build/plain/groups. */
RANKS_DEF void ranks_place(int rank) {
  const char *hosts = getenv("TEST_HOSTS");
  char id[2] = {0, 0};
  if (hosts == NULL || hosts[0] == 0) return;
  id[0] = hosts[(size_t)rank % strlen(hosts)];
  setenv("CDDP_HOST_ID", id, 1);
}

/* Whether two ranks (processes) are on one host then. */
RANKS_DEF bool ranks_together(int a, int b) {
  const char *hosts = getenv("TEST_HOSTS");
  size_t n = hosts != NULL ? strlen(hosts) : 0;
  return n == 0 || hosts[(size_t)a % n] == hosts[(size_t)b % n];
}

/* Whether one of the n ranks shares that rank's host: only there is it known how a rank died. */
RANKS_DEF bool ranks_has_company(int rank, int n) {
  int i;
  for (i = 0; i < n; i++)
    if (i != rank && ranks_together(i, rank)) return true;
  return false;
}

RANKS_DEF int ranks_process(int rank, void *p) {
  ranks_job *job = (ranks_job *)p;
  cddp_group *g;
  int r;
  ranks_place(rank);
  test_failures = 0;
  if (cddp_init(&g, NULL) != CDDP_OK) {
    fprintf(stderr, "rank %d: cddp_init: %s\n", rank, cddp_error());
    return 1;
  }
  r = job->fn(g, job->arg);
  cddp_destroy(g);
  return r != 0 || test_failures != 0;
}

/* fn(group, arg) on n ranks; CDDP_OK when all returned 0 without a failed check. */
RANKS_DEF cddp_result ranks_run(ranks_fn fn, void *arg, int n, bool threads) {
  ranks_job job;
  if (threads) return cddp_run_threads(fn, arg, n);
  job.fn = fn;
  job.arg = arg;
  return cddp_spawn(ranks_process, &job, n);
}

/* True when no process listens on the port. */
RANKS_DEF bool ranks_port_is_free(int port) {
  struct sockaddr_in a;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  bool ok;
  memset(&a, 0, sizeof a);
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  a.sin_port = htons((uint16_t)port);
  ok = fd >= 0 && bind(fd, (struct sockaddr *)&a, sizeof a) == 0;
  if (fd >= 0) close(fd);
  return ok;
}

/* A free TCP port of the loopback interface. No other test gets it: an abstract socket reserves a
   block of ports for this process while it lives, which goes round its blocks when it has enough of
   them, or there are no others. Clients get none either: the system takes theirs from 32768 on. -1:
   no block is left. */
RANKS_DEF int ranks_free_port(void) {
  enum { RANKS_FIRST_PORT = 10000, RANKS_BLOCK = 50, RANKS_BLOCKS = 130, RANKS_OWN = 24 };
  static int block, used, owned;
  static bool own[RANKS_BLOCKS];
  static pid_t owner;
  struct sockaddr_un name;
  int tries, fd, port;
  if (owner != getpid()) {
    memset(own, 0, sizeof own);
    owner = getpid();
    owned = 0;
    block = (int)owner;
    used = RANKS_BLOCK;
  }
  for (tries = 0; tries <= 2 * RANKS_BLOCKS; tries++) {
    while (used < RANKS_BLOCK) {
      port = RANKS_FIRST_PORT + block * RANKS_BLOCK + used++;
      if (ranks_port_is_free(port)) return port;
    }
    block = (block + 1) % RANKS_BLOCKS;
    if (own[block] && (owned == RANKS_OWN || tries >= RANKS_BLOCKS)) used = 0;
    if (own[block] || owned == RANKS_OWN) continue;
    if ((fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) < 0) return -1;
    memset(&name, 0, sizeof name);
    name.sun_family = AF_UNIX;
    snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "cddp-test-ports-%d", block);
    if (bind(fd, (struct sockaddr *)&name, sizeof name) != 0) {
      close(fd);
      continue;
    }
    own[block] = true; /* fd stays open */
    owned++;
    ranks_port_fds++;
    used = 0;
  }
  return -1;
}

RANKS_DEF void ranks_setenv(const char *name, long value) {
  char text[32];
  snprintf(text, sizeof text, "%ld", value);
  setenv(name, text, 1);
}

/* What a launcher script does: RANK .. MASTER_PORT for one process. */
RANKS_DEF void ranks_environment(int rank, int world_size, int port) {
  ranks_place(rank);
  ranks_setenv("RANK", rank);
  ranks_setenv("WORLD_SIZE", world_size);
  ranks_setenv("LOCAL_RANK", rank);
  ranks_setenv("LOCAL_WORLD_SIZE", world_size);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  ranks_setenv("MASTER_PORT", port);
}

/* Forks a child that ends with fn's value; stdout and stderr are flushed first. */
RANKS_DEF pid_t ranks_fork(int (*fn)(int rank, void *arg), int rank, void *arg) {
  pid_t pid;
  fflush(NULL);
  pid = fork();
  if (pid == 0) {
    test_failures = 0;
    exit(fn(rank, arg) != 0 || test_failures != 0);
  }
  if (pid < 0) perror("fork");
  return pid;
}

/* What a user without any secret can do at the store of MASTER_PORT: end the job that meets there.
   Another user where this test is root's. Exits with the result of the attempt. */
RANKS_DEF int ranks_stranger(int rank, void *arg) {
  const char *text = "a stranger's text";
  cddp_store_desc desc;
  cddp_store *store;
  cddp_result r;
  char where[64];
  (void)rank;
  (void)arg;
  snprintf(where, sizeof where, "tcp://127.0.0.1:%s", getenv("MASTER_PORT"));
  unsetenv("CDDP_JOB_SECRET");
  if (geteuid() == 0 && setuid(1234) != 0) return 99;
  memset(&desc, 0, sizeof desc);
  desc.init_method = where;
  desc.timeout_s = 5;
  if ((r = cddp_store_create(&store, &desc)) == CDDP_OK)
    r = cddp_store_set(store, "cddp/0/0/failed", text, strlen(text));
  _exit((int)r);
}

/* A rank's life with a stranger in the meeting: the last rank comes when that one is through. */
RANKS_DEF int ranks_meet_stranger(int rank, int world_size) {
  cddp_group *g;
  cddp_result r;
  int status = -1;
  if (rank == world_size - 1) {
    pid_t pid = ranks_fork(ranks_stranger, rank, NULL);
    if (waitpid(pid, &status, 0) != pid || !WIFEXITED(status)) return 90;
    if (WEXITSTATUS(status) != CDDP_UNAUTHORIZED) return 91;
  }
  if ((r = cddp_init(&g, NULL)) != CDDP_OK) return fprintf(stderr, "%s\n", cddp_error()), 92;
  r = cddp_barrier(g);
  cddp_destroy(g);
  return (int)r;
}

/* Connects to the process's abstract Unix socket whose name has `end` behind its hash; -1: none. */
RANKS_DEF int ranks_connect(pid_t pid, const char *end) {
  char path[64], line[512], target[64], name[101];
  unsigned long inode, own;
  struct sockaddr_un a;
  struct dirent *e;
  int fd = -1;
  DIR *d;
  FILE *f = fopen("/proc/net/unix", "r");
  snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
  d = opendir(path);
  while (d != NULL && f != NULL && fd < 0 && (e = readdir(d)) != NULL) {
    ssize_t size = readlinkat(dirfd(d), e->d_name, target, sizeof target - 1);
    target[size > 0 ? size : 0] = 0;
    if (sscanf(target, "socket:[%lu]", &own) != 1) continue;
    rewind(f);
    while (fd < 0 && fgets(line, sizeof line, f) != NULL) {
      if (sscanf(line, "%*s %*s %*s %*s %*s %*s %lu @%100s", &inode, name) != 2) continue;
      if (inode != own || strlen(name) < 37 || strncmp(name + 37, end, strlen(end)) != 0) continue;
      memset(&a, 0, sizeof a);
      a.sun_family = AF_UNIX;
      memcpy(a.sun_path + 1, name, strlen(name));
      fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
      if (connect(fd, (struct sockaddr *)&a, (socklen_t)(sizeof(sa_family_t) + 1 + strlen(name))) ==
          0)
        break;
      close(fd);
      fd = -1;
    }
  }
  if (f != NULL) fclose(f);
  if (d != NULL) closedir(d);
  return fd;
}

/* Waits for children; one that is still there after `seconds` is killed. status[i]: as of waitpid,
   -1 after a kill from here. */
RANKS_DEF void ranks_join(const pid_t *pid, int n, double seconds, int *status) {
  double deadline = test_now() + seconds;
  int left = n, i;
  bool done[64];
  memset(done, 0, sizeof done);
  while (left > 0) {
    for (i = 0; i < n; i++) {
      if (done[i] || waitpid(pid[i], &status[i], WNOHANG) == 0) continue;
      done[i] = true;
      left--;
    }
    if (left > 0 && test_now() > deadline) break;
    if (left > 0) ranks_sleep(0.001);
  }
  for (i = 0; i < n; i++) {
    if (done[i]) continue;
    kill(pid[i], SIGKILL);
    waitpid(pid[i], &status[i], 0);
    status[i] = -1;
  }
}

/* Begins n processes as a launcher script would, none of which ends the others. */
RANKS_DEF void ranks_begin(int (*fn)(int rank, void *arg), void *arg, int n, pid_t *pid) {
  int i, port = ranks_free_port();
  for (i = 0; i < n; i++) {
    ranks_environment(i, n, port);
    pid[i] = ranks_fork(fn, i, arg);
  }
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
  unsetenv("LOCAL_RANK");
  unsetenv("LOCAL_WORLD_SIZE");
  unsetenv("MASTER_ADDR");
  unsetenv("MASTER_PORT");
}

/* The same, and waits for them. */
RANKS_DEF void ranks_script(int (*fn)(int rank, void *arg), void *arg, int n, double seconds,
                            int *status) {
  pid_t pid[64];
  ranks_begin(fn, arg, n, pid);
  ranks_join(pid, n, seconds, status);
}

RANKS_DEF bool ranks_exited_well(const int *status, int n) {
  int i;
  for (i = 0; i < n; i++)
    if (status[i] != 0) return false;
  return true;
}

/* Elastic ranks of which one, the victim, is killed in its first lives. In the life after these it
   ends the training, 5 steps later. In memory that the ranks share. */
enum { RANKS_BEFORE_INIT, RANKS_BEFORE_CREATE, RANKS_IN_CREATE, RANKS_AFTER_CREATE, RANKS_IN_STEP };
typedef struct ranks_death {
  int n, victim, place, deaths;
  int allocation;    /* RANKS_IN_CREATE: the one in which it dies */
  bool all_die;      /* once the victim lives again; that life does not call cddp_init */
  bool ends;         /* its last death ends the training: the others go on without it */
  int lives[8], joins[8]; /* of each rank; those with CDDP_JOIN */
  int allocations;   /* in the last cddp_ddp_create */
  int stop_at;       /* steps; 0: not known yet */
} ranks_death;
static __attribute__((unused)) ranks_death *ranks_dying; /* in a life that dies in an allocation */
static __attribute__((unused)) int ranks_allocated;

RANKS_DEF void *ranks_death_alloc(size_t bytes, void *user_data) {
  (void)user_data;
  if (++ranks_allocated == (ranks_dying != NULL ? ranks_dying->allocation : -1)) raise(SIGKILL);
  return malloc(bytes);
}

RANKS_DEF void ranks_death_free(void *p, void *user_data) {
  (void)user_data;
  free(p);
}

RANKS_DEF int ranks_dies(int rank, void *arg) {
  ranks_death *c = (ranks_death *)arg;
  int life = __atomic_add_fetch(&c->lives[rank], 1, __ATOMIC_SEQ_CST);
  int place = c->place, shard, begin;
  bool dies = rank == c->victim && life <= c->deaths, last = rank == c->victim && !dies;
  float w[4] = {0};
  cddp_param p = {"w", w, NULL, 4, CDDP_F32};
  cddp_group_desc desc;
  cddp_ddp_desc model;
  cddp_group *g = NULL;
  cddp_ddp *d = NULL;
  memset(&desc, 0, sizeof desc);
  memset(&model, 0, sizeof model);
  desc.allocator.alloc = ranks_death_alloc;
  desc.allocator.free = ranks_death_free;
  model.elastic = true;
  model.shards = c->n;
  if (getenv("CDDP_JOIN") != NULL) __atomic_add_fetch(&c->joins[rank], 1, __ATOMIC_SEQ_CST);
  if (dies && place == RANKS_BEFORE_INIT) raise(SIGKILL);
  if (last && c->all_die) ranks_sleep(60);
  if (cddp_init(&g, &desc) != CDDP_OK) return fprintf(stderr, "%s\n", cddp_error()), 1;
  if (dies && place == RANKS_BEFORE_CREATE) raise(SIGKILL);
  if (dies && place == RANKS_IN_CREATE) ranks_dying = c;
  ranks_allocated = 0;
  if (cddp_ddp_create(&d, g, &p, 1, &model) != CDDP_OK) {
    fprintf(stderr, "%s\n", cddp_error());
    cddp_destroy(g);
    return 2;
  }
  c->allocations = ranks_allocated;
  begin = (int)cddp_ddp_steps(d);
  if (dies && place <= RANKS_AFTER_CREATE) raise(SIGKILL);
  if (last) __atomic_store_n(&c->stop_at, begin + 5, __ATOMIC_SEQ_CST);
  for (;;) {
    int stop_at = __atomic_load_n(&c->stop_at, __ATOMIC_SEQ_CST), steps = (int)cddp_ddp_steps(d);
    if (stop_at > 0 && steps >= stop_at) break;
    if (dies && steps >= begin + 2) {
      if (c->ends && life == c->deaths) /* after the supervisor has seen its death */
        __atomic_store_n(&c->stop_at, steps + 300, __ATOMIC_SEQ_CST);
      raise(SIGKILL);
    }
    if (c->all_die && __atomic_load_n(&c->lives[c->victim], __ATOMIC_SEQ_CST) > c->deaths)
      raise(SIGKILL);
    while (cddp_ddp_next_shard(d, &shard))
      if (cddp_ddp_ready(d, 0) != CDDP_OK) break;
    if (cddp_ddp_wait(d) != CDDP_OK) return fprintf(stderr, "%s\n", cddp_error()), 3;
    ranks_sleep(0.001);
  }
  cddp_ddp_destroy(d);
  cddp_destroy(g);
  return 0;
}

/* Whether all ranks have started again together, or only the victim, which joined. */
RANKS_DEF bool ranks_started_again(const ranks_death *c, int times, int joins) {
  int i;
  for (i = 0; i < c->n; i++)
    if (c->lives[i] != 1 + times + (i == c->victim ? joins : 0) ||
        c->joins[i] != (i == c->victim ? joins : 0))
      return false;
  return true;
}

/* A random permutation of 0 .. n-1. */
RANKS_DEF void ranks_shuffle(int *order, int n, uint64_t seed) {
  int i;
  for (i = 0; i < n; i++) order[i] = i;
  for (i = n - 1; i > 0; i--) {
    int j = (int)(ranks_mix(seed, (uint64_t)i, 7) % (uint64_t)(i + 1)), t = order[i];
    order[i] = order[j];
    order[j] = t;
  }
}

/* ELEMENTS. The tests' own conversions and their own canonical sum, written from the manual. --- */

RANKS_DEF float ranks_from_bits(uint32_t u) {
  float f;
  memcpy(&f, &u, sizeof f);
  return f;
}

RANKS_DEF uint32_t ranks_to_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, sizeof u);
  return u;
}

RANKS_DEF float ranks_from_f16(uint16_t h) {
  uint32_t sign = (uint32_t)(h >> 15) << 31, e = (h >> 10) & 31u, m = h & 1023u;
  float f;
  if (e == 31) return ranks_from_bits(sign | 0x7f800000u | m << 13);
  if (e != 0) return ranks_from_bits(sign | (e + 112) << 23 | m << 13);
  f = (float)m * 0x1p-24f;
  return sign ? -f : f;
}

RANKS_DEF uint16_t ranks_to_f16(float f) { /* to nearest, ties to even */
  uint32_t u = ranks_to_bits(f), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
  uint32_t keep, rest, half;
  int shift;
  if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  if (magnitude < 0x33000000u) return (uint16_t)sign;
  if (magnitude >= 0x38800000u) { /* a normal f16 */
    keep = (magnitude - 0x38000000u) >> 13;
    rest = magnitude & 0x1fffu;
    half = 0x1000u;
  } else {
    shift = 126 - (int)(magnitude >> 23);
    magnitude = (magnitude & 0x7fffffu) | 0x800000u;
    keep = shift > 31 ? 0 : magnitude >> shift;
    rest = magnitude & (((uint32_t)1 << shift) - 1);
    half = (uint32_t)1 << (shift - 1);
  }
  if (rest > half || (rest == half && (keep & 1u))) keep++;
  return (uint16_t)(sign | keep);
}

RANKS_DEF float ranks_from_bf16(uint16_t h) { return ranks_from_bits((uint32_t)h << 16); }

RANKS_DEF uint16_t ranks_to_bf16(float f) {
  uint32_t u = ranks_to_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u);
  return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

/* STOPPED INSIDE. Rank 1 of 3 processes stops itself in the middle of an operation in which it
   writes a third of RANKS_STOP_COUNT floats into the memory of all ranks: at its first write to a
   page in the middle of that third, which it has made read-only for itself. -------------------- */

enum { RANKS_STOP_COUNT = 3 << 20 };
#define RANKS_STOP_TIMEOUT (RANKS_SLOW ? 15.0 : 5.0) /* of the group, seconds */

static void *ranks_stop_page;

RANKS_DEF void ranks_fill(float *p, float value) {
  size_t i;
  for (i = 0; i < RANKS_STOP_COUNT; i++) p[i] = value;
}

RANKS_DEF bool ranks_holds(const float *p, float value) {
  size_t i;
  for (i = 0; i < RANKS_STOP_COUNT && p[i] == value; i++) {}
  return i == RANKS_STOP_COUNT;
}

RANKS_DEF void ranks_stop_at_write(int number) { /* of SIGSEGV */
  (void)number;
  mprotect(ranks_stop_page, 1, PROT_READ | PROT_WRITE);
  kill(getpid(), SIGSTOP);
}

/* Rank 1, before the operation. p: its own floats. */
RANKS_DEF void ranks_stop_inside(float *p) {
  uintptr_t middle = (uintptr_t)(p + RANKS_STOP_COUNT / 2);
  struct sigaction a;
  memset(&a, 0, sizeof a);
  a.sa_handler = ranks_stop_at_write;
  a.sa_flags = (int)SA_RESETHAND;
  ranks_stop_page = (void *)(middle - middle % (uintptr_t)sysconf(_SC_PAGESIZE));
  CHECK(sigaction(SIGSEGV, &a, NULL) == 0);
  CHECK(mprotect(ranks_stop_page, 1, PROT_READ) == 0);
}

/* Rank 0, after it. p: its own floats; old: what they held before. */
RANKS_DEF bool ranks_stopped_inside(const float *p, float old) {
  const volatile float *third = p + RANKS_STOP_COUNT / 3; /* another process writes it */
  return third[64] != old && third[RANKS_STOP_COUNT / 3 - 64] == old;
}

/* Where the canonical tree over ranks [0, n) splits: the largest power of two below n. */
RANKS_DEF int ranks_split(int n) {
  int half = 1;
  while (half * 2 < n) half *= 2;
  return half;
}

/* value(arg, rank) summed over [lo, hi) in canonical order. */
RANKS_DEF float ranks_tree_f32(float (*value)(void *arg, int rank), void *arg, int lo, int hi) {
  int mid;
  if (hi - lo == 1) return value(arg, lo);
  mid = lo + ranks_split(hi - lo);
  return ranks_tree_f32(value, arg, lo, mid) + ranks_tree_f32(value, arg, mid, hi);
}

RANKS_DEF double ranks_tree_f64(double (*value)(void *arg, int rank), void *arg, int lo, int hi) {
  int mid;
  if (hi - lo == 1) return value(arg, lo);
  mid = lo + ranks_split(hi - lo);
  return ranks_tree_f64(value, arg, lo, mid) + ranks_tree_f64(value, arg, mid, hi);
}

RANKS_DEF double ranks_load(cddp_dtype dtype, const void *buf, size_t i) {
  const unsigned char *p = (const unsigned char *)buf + i * cddp_dtype_size(dtype);
  uint16_t h;
  float f;
  double d;
  if (dtype == CDDP_F64) return memcpy(&d, p, 8), d;
  if (dtype == CDDP_F32) return memcpy(&f, p, 4), (double)f;
  memcpy(&h, p, 2);
  return (double)(dtype == CDDP_F16 ? ranks_from_f16(h) : ranks_from_bf16(h));
}

/* Stores a float type's element, rounded once (through f32 for the 16-bit types). */
RANKS_DEF void ranks_store(cddp_dtype dtype, void *buf, size_t i, double v) {
  unsigned char *p = (unsigned char *)buf + i * cddp_dtype_size(dtype);
  float f = (float)v;
  uint16_t h = dtype == CDDP_F16 ? ranks_to_f16(f) : ranks_to_bf16(f);
  if (dtype == CDDP_F64)
    memcpy(p, &v, 8);
  else if (dtype == CDDP_F32)
    memcpy(p, &f, 4);
  else
    memcpy(p, &h, 2);
}

/* Whether copy[n] is the f32s of data rounded to dtype, f16 or bf16. */
RANKS_DEF bool ranks_is_copy(cddp_dtype dtype, const void *copy, const void *data, size_t n) {
  unsigned char want[2];
  size_t i;
  for (i = 0; i < n; i++) {
    ranks_store(dtype, want, 0, ranks_load(CDDP_F32, data, i));
    if (memcmp(want, (const char *)copy + 2 * i, 2) != 0) return false;
  }
  return true;
}

#endif
