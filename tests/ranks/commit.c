/* commit.c - memory that the ranks of a host share is there before it is used. Proves that every
   page of it was allocated by fallocate, which can fail, and none by an access, which would be
   SIGBUS where memory is short; and that a failure at any place is that rank's error.

   How: fallocate is wrapped. A ledger that all processes share has a mark for each page that it
   has allocated. Each rank looks whether the file has a page without a mark. Programs of mixed
   calls run again and again; each time the next call of fallocate fails on one rank, until none
   does. */
#include "../../cddp.h"

#include "../ranks.h"

#include <stdarg.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

enum { MOST = 6, HOSTS = 3, WINDOWS = 8, PAGE = 4096, PAGES = (128 << 20) / PAGE };
enum { LOST = 2, JOINER = 3 }; /* in the elastic job */

typedef struct run {
  unsigned char made[HOSTS][WINDOWS][PAGES]; /* 1: fallocate has allocated it */
  const char *hosts;
  int ranks, victim, number; /* the call of the victim's that fails; 0: none */
  size_t count;              /* elements of what it works with */
  bool own;                  /* malloc's memory, else cddp_alloc's */
  int kind, port, created, joined;
  int calls[MOST], struck;
  cddp_result results[MOST];
  char texts[MOST][400];
} run;

static run *shared;
static int my_rank, stray;
static bool counts = true; /* calls */
static bool thorough;      /* each call of all programs */

/* --- the ledger --- */

static unsigned char *mark_of(int64_t window, int64_t page) {
  int host = shared->hosts[my_rank % (int)strlen(shared->hosts)] - 'a';
  return &shared->made[host][window][page];
}

static void mark(int64_t at, int64_t bytes, int made) {
  int64_t page, window;
  for (page = at / PAGE; page * PAGE < at + bytes; page++) {
    window = page >> 28; /* 1 TiB */
    if (window >= WINDOWS || (page & ((1 << 28) - 1)) >= PAGES) break;
    __atomic_store_n(mark_of(window, page & ((1 << 28) - 1)), (unsigned char)made,
                     __ATOMIC_SEQ_CST);
  }
}

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);
#if defined(__has_attribute)
#if __has_attribute(no_sanitize)
__attribute__((no_sanitize("address"))) /* reads six arguments, also of calls that have fewer */
#endif
#endif
long __wrap_syscall(long number, ...) {
  long a[6], r;
  va_list args;
  int i;
  va_start(args, number);
  for (i = 0; i < 6; i++) a[i] = va_arg(args, long);
  va_end(args);
  if (number == SYS_fallocate && a[1] == 0) {
    i = counts ? __atomic_add_fetch(&shared->calls[my_rank], 1, __ATOMIC_SEQ_CST) : 0;
    if (i > 0 && my_rank == shared->victim && i == shared->number) {
      shared->struck = 1;
      errno = ENOMEM;
      return -1;
    }
    mark(a[2], a[3] == 1 ? 2 << 20 : a[3], 1); /* 1: it is made a huge page next */
  }
  r = __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  if (number == SYS_fallocate && a[1] != 0) mark(a[2], a[3] < (int64_t)1 << 40 ? a[3] : 0, 0);
  return r;
}

/* The host's memory, or -1. */
static int memory_fd(void) {
  char path[64], name[64];
  int fd;
  for (fd = 3; fd < 200; fd++) {
    ssize_t n;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    n = readlink(path, name, sizeof name - 1);
    if (n > 0 && strncmp(name, "/memfd:cddp ", 12) == 0) return fd;
  }
  return -1;
}

/* Whether each page of the host's memory was asked for. */
static void check_pages(const char *when) {
  int fd = memory_fd();
  off_t at = 0, end;
  while (fd >= 0 && stray == 0 && (at = lseek(fd, at, SEEK_DATA)) >= 0) {
    end = lseek(fd, at, SEEK_HOLE);
    for (; at < end && stray == 0; at += PAGE) {
      int64_t page = at / PAGE, window = page >> 28;
      page &= (1 << 28) - 1;
      if (window >= WINDOWS || page >= PAGES) continue;
      if (__atomic_load_n(mark_of(window, page), __ATOMIC_SEQ_CST) != 0) continue;
      stray = lseek(fd, at, SEEK_DATA) == at && /* else it has just been freed */
              __atomic_load_n(mark_of(window, page), __ATOMIC_SEQ_CST) == 0;
      if (stray) fprintf(stderr, "  %s: window %d, page %d of rank %d\n", when, (int)window,
                         (int)page, my_rank);
    }
  }
  CHECK_EQ(stray, 0);
}

/* --- one program --- */

static float *memory(cddp_group *g, size_t n) {
  float *p = (float *)(shared->own ? calloc(n + 1, sizeof *p) : cddp_alloc(g, n * sizeof *p));
  size_t i;
  for (i = 0; i < n && p != NULL; i++) p[i] = 1;
  return p;
}

static void give_back(cddp_group *g, void *p) {
  if (shared->own) free(p);
  else cddp_free(g, p);
}

static bool all_are(const float *p, size_t n, float x) {
  size_t i;
  for (i = 0; i < n && p[i] == x;) i++;
  return i == n;
}

static cddp_result collectives(cddp_group *g, size_t count) {
  int n = cddp_world_size(g), k;
  float *a = memory(g, count * (size_t)n), *b = memory(g, count * (size_t)n);
  cddp_result r = a != NULL && b != NULL ? CDDP_OK : CDDP_OUT_OF_MEMORY;
  for (k = 0; k < 18 && r == CDDP_OK; k++) {
    cddp_work *w = NULL, **work = k >= 8 ? &w : NULL;
    switch (k % 9) {
    case 0: r = cddp_all_reduce(g, a, count, CDDP_F32, CDDP_MAX, work); break;
    case 1: r = cddp_reduce(g, a, count, CDDP_F32, CDDP_MAX, n - 1, work); break;
    case 2: r = cddp_broadcast(g, a, count, CDDP_F32, n - 1, work); break;
    case 3: r = cddp_all_gather(g, a, b, count, CDDP_F32, work); break;
    case 4: r = cddp_gather(g, a, b, count, CDDP_F32, 0, work); break;
    case 5: r = cddp_scatter(g, a, b, count, CDDP_F32, 0, work); break;
    case 6: r = cddp_reduce_scatter(g, a, b, count, CDDP_F32, CDDP_MAX, work); break;
    case 7: r = cddp_all_to_all(g, a, b, count, CDDP_F32, work); break;
    default: r = cddp_send(g, a, count, CDDP_F32, (cddp_rank(g) + 1) % n, 0, work);
    }
    if (k % 9 == 8 && r == CDDP_OK)
      r = cddp_recv(g, b, count, CDDP_F32, (cddp_rank(g) + n - 1) % n, 0, NULL);
    if (w != NULL) { /* also after a failure */
      cddp_result waited = cddp_wait(w);
      if (r == CDDP_OK) r = waited;
    }
    if (r == CDDP_OK) CHECK(all_are(a, count, 1) && all_are(b, count, 1));
  }
  give_back(g, a);
  give_back(g, b);
  return r;
}

static cddp_result groups(cddp_group *g) {
  cddp_group *half = NULL, *all = NULL;
  float x[3000];
  size_t i;
  cddp_result r = cddp_group_split(g, cddp_rank(g) % 2, -cddp_rank(g), &half);
  for (i = 0; i < 3000; i++) x[i] = 1;
  if (r == CDDP_OK) r = cddp_all_reduce(half, x, 3000, CDDP_F32, CDDP_MAX, NULL);
  if (r == CDDP_OK) r = cddp_group_split(g, 0, 0, &all);
  if (r == CDDP_OK) r = cddp_broadcast(all, x, 3000, CDDP_F32, 1, NULL);
  if (r == CDDP_OK && cddp_rank(all) == 0) { /* the message is received after the sender has left */
    r = cddp_send(all, x, 3000, CDDP_F32, 1, 0, NULL);
    cddp_destroy(all);
    all = NULL;
  }
  if (r == CDDP_OK) r = cddp_barrier(g);
  if (r == CDDP_OK && all != NULL && cddp_rank(all) == 1)
    r = cddp_recv(all, x, 3000, CDDP_F32, 0, 0, NULL);
  cddp_destroy(half);
  cddp_destroy(all);
  if (r == CDDP_OK) r = cddp_barrier(g);
  return r;
}

enum { SGD, ADAMW, HALF, SHARDED, HOOK, WAIT, SPARSE, KINDS };

static cddp_result model(cddp_group *g, int kind) {
  size_t rows[2] = {0, 50}, count = shared->count, i;
  cddp_param p[2] = {{"w", NULL, NULL, count, CDDP_F32}, {"e", NULL, NULL, 5000, CDDP_F32}};
  float *bytes[2] = {memory(g, count), memory(g, 5000)};
  cddp_ddp_desc desc;
  cddp_sgd_desc sgd;
  cddp_adamw_desc adamw;
  cddp_ddp *d = NULL;
  cddp_optim *o = NULL;
  int k, step;
  double norm;
  cddp_result r = bytes[0] != NULL && bytes[1] != NULL ? CDDP_OK : CDDP_OUT_OF_MEMORY;
  memset(&desc, 0, sizeof desc);
  memset(&sgd, 0, sizeof sgd);
  memset(&adamw, 0, sizeof adamw);
  desc.bucket_cap_mb = 0.1;
  if (kind == HOOK) desc.comm_hook = cddp_bf16_compress_hook;
  if (kind == SPARSE) desc.sparse_rows = rows;
  if (kind == ADAMW) desc.max_grad_norm = 1;
  sgd.lr = adamw.lr = 0.125;
  sgd.momentum = 0.5;
  for (k = 0; k < 2; k++) p[k].data = bytes[k];
  if (kind == HALF) {
    for (k = 0; k < 2; k++) {
      p[k].dtype = CDDP_BF16;
      for (i = 0; i < p[k].count && bytes[k] != NULL; i++) ((uint16_t *)p[k].data)[i] = 0x3f80;
    }
    sgd.master_weights = adamw.master_weights = true;
  }
  if (r == CDDP_OK) r = cddp_ddp_create(&d, g, p, 2, &desc);
  adamw.sharded_states = kind == SHARDED;
  adamw.ddp = kind == SHARDED ? d : NULL;
  if (r == CDDP_OK)
    r = kind == ADAMW || kind == SHARDED || kind == HALF ? cddp_adamw_create(&o, p, 2, &adamw)
                                                         : cddp_sgd_create(&o, p, 2, &sgd);
  for (step = 0; step < 2 && r == CDDP_OK; step++) {
    int64_t row = step + cddp_rank(g);
    float values[100] = {1};
    if (kind == SPARSE) r = cddp_ddp_add_rows(d, 1, &row, values, 1);
    for (k = 0; k < 2 && r == CDDP_OK; k++) r = cddp_ddp_ready(d, 1 - k);
    if (r == CDDP_OK) r = kind == WAIT ? cddp_ddp_wait(d) : cddp_ddp_step(d, o);
    if (r == CDDP_OK && kind == WAIT) r = cddp_ddp_clip_grad_norm(d, 1, &norm);
    if (r == CDDP_OK && kind == WAIT) r = cddp_optim_step(o);
  }
  cddp_optim_destroy(o);
  cddp_ddp_destroy(d);
  for (k = 0; k < 2; k++) give_back(g, bytes[k]);
  return r;
}

static void note(cddp_result r) {
  shared->results[my_rank] = r;
  if (r != CDDP_OK) snprintf(shared->texts[my_rank], sizeof *shared->texts, "%s", cddp_error());
}

static int life(int rank, void *arg) {
  cddp_group *g = NULL;
  int k;
  cddp_result r;
  my_rank = rank;
  (void)arg;
  r = cddp_init(&g, NULL);
  if (r == CDDP_OK) r = collectives(g, 3);
  if (r == CDDP_OK) r = collectives(g, shared->count);
  for (k = 0; k < 3 && r == CDDP_OK; k++) r = groups(g);
  if (r == CDDP_OK) check_pages("collectives");
  if (r == CDDP_OK && shared->kind < KINDS) r = model(g, shared->kind);
  if (r == CDDP_OK) check_pages("model");
  note(r);
  if (g != NULL) check_pages("end");
  cddp_destroy(g);
  return test_failures != 0;
}

/* --- an elastic job: one rank dies, and one joins --- */

static int look(const int *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }

static int elastic_life(int rank, void *arg) {
  cddp_param p = {"w", NULL, NULL, shared->count, CDDP_F32};
  cddp_ddp_desc desc;
  cddp_sgd_desc sgd;
  cddp_ddp *d = NULL;
  cddp_optim *o = NULL;
  cddp_group *g = NULL;
  float stop = 0;
  size_t i;
  int shard;
  cddp_result r;
  my_rank = rank;
  (void)arg;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  counts = rank == JOINER;
  setenv("CDDP_TIMEOUT_S", "20", 1);
  setenv("TEST_HOSTS", shared->hosts, 1);
  ranks_environment(rank, 3, shared->port);
  if (rank == JOINER) setenv("CDDP_JOIN", "1", 1);
  memset(&desc, 0, sizeof desc);
  memset(&sgd, 0, sizeof sgd);
  desc.elastic = true;
  desc.shards = 5;
  sgd.lr = 0.125;
  sgd.momentum = 0.5;
  r = cddp_init(&g, NULL);
  if (r == CDDP_OK) p.data = memory(g, p.count);
  if (r == CDDP_OK && p.data == NULL) r = CDDP_OUT_OF_MEMORY;
  if (r == CDDP_OK) r = cddp_ddp_create(&d, g, &p, 1, &desc);
  if (r == CDDP_OK) r = cddp_sgd_create(&o, &p, 1, &sgd);
  if (rank < JOINER) __atomic_add_fetch(&shared->created, 1, __ATOMIC_SEQ_CST);
  if (r != CDDP_OK || rank == JOINER) __atomic_store_n(&shared->joined, 1, __ATOMIC_SEQ_CST);
  while (r == CDDP_OK && look(&shared->created) < JOINER) ranks_sleep(0.001);
  while (r == CDDP_OK && stop == 0) {
    counts = counts || cddp_ddp_steps(d) > 0;
    while (r == CDDP_OK && cddp_ddp_next_shard(d, &shard)) {
      if (rank == LOST && cddp_ddp_steps(d) == 2) raise(SIGKILL);
      for (i = 0; i < p.count; i++) ((float *)p.grad)[i] += 1;
      r = cddp_ddp_ready(d, 0);
    }
    if (r == CDDP_OK) r = cddp_ddp_step(d, o);
    stop = (float)(look(&shared->joined) && cddp_ddp_steps(d) > 6);
    if (r == CDDP_OK) r = cddp_all_reduce(cddp_ddp_group(d), &stop, 1, CDDP_F32, CDDP_MAX, NULL);
    if (r == CDDP_PEER_LOST) r = CDDP_OK, stop = 0;
  }
  if (r == CDDP_OK) check_pages("steps");
  note(r);
  if (g != NULL) check_pages("end");
  cddp_optim_destroy(o);
  cddp_ddp_destroy(d);
  if (g != NULL) give_back(g, p.data);
  cddp_destroy(g);
  return test_failures != 0;
}

/* --- runs --- */

static void begin(int victim, int number) {
  memset(shared->made, 0, sizeof shared->made);
  memset(shared->calls, 0, sizeof shared->calls);
  memset(shared->results, 0, sizeof shared->results);
  memset(shared->texts, 0, sizeof shared->texts);
  shared->struck = shared->created = shared->joined = 0;
  shared->victim = victim;
  shared->number = number;
}

static void describe(void) {
  int i;
  fprintf(stderr, "  %d ranks on %s, %zu elements of %s memory, model %d, call %d of rank %d:\n",
          shared->ranks, shared->hosts, shared->count, shared->own ? "own" : "cddp_alloc's",
          shared->kind, shared->number, shared->victim);
  for (i = 0; i < MOST; i++)
    if (shared->results[i] != CDDP_OK || i < shared->ranks)
      fprintf(stderr, "    rank %d, %d calls: %s: %s\n", i, shared->calls[i],
              cddp_result_name(shared->results[i]), shared->texts[i]);
}

/* Who cannot have memory says so. Others have that error, with a rank's number, or lose a rank. */
static void check_texts(int victim) {
  int i, failed = 0;
  for (i = 0; i < shared->ranks; i++) {
    const char *text = shared->texts[i];
    cddp_result r = shared->results[i];
    failed += r != CDDP_OK;
    if (i == victim && r != CDDP_OK) CHECK_IS(r, CDDP_OUT_OF_MEMORY);
    if (r == CDDP_OUT_OF_MEMORY) CHECK(strstr(text, "memory") != NULL);
    else if (r != CDDP_OK) CHECK_IS(r, CDDP_PEER_LOST);
    if (r != CDDP_OK && i != victim)
      CHECK(strstr(text, "rank ") != NULL || strncmp(text, "cddp_init:", 10) == 0);
  }
  CHECK(failed == 0 || shared->results[victim] != CDDP_OK);
}

/* Each call of fallocate fails once; of a long program every third one. */
static int run_all(int stride) {
  int status[MOST], number, i, struck = 0, without = 0, before = test_failures;
  setenv("TEST_HOSTS", shared->hosts, 1);
  for (number = 0; number == 0 || number <= 400; number += number == 0 ? 1 : stride) {
    int most = 0;
    for (i = 0; i < (number == 0 ? 1 : shared->ranks); i++) {
      if (number > 0 && shared->ranks > 2 && (number / stride + i) % shared->ranks != 0) continue;
      begin(i, number);
      ranks_script(life, NULL, shared->ranks, RANKS_WITHIN(20.0), status);
      CHECK(ranks_exited_well(status, shared->ranks));
      check_texts(i);
      CHECK(number > 0 || shared->results[0] == CDDP_OK);
      struck += shared->struck;
      most += shared->struck;
      if (test_failures > before) {
        describe();
        return struck;
      }
    }
    without = most == 0 && number > 0 ? without + 1 : 0; /* ranks without such a call in turn */
    if (without == shared->ranks) break;
  }
  return struck;
}

static void test_any_call(void) {
  static const struct {
    const char *hosts;
    int ranks;
    size_t count;
    bool own;
  } jobs[] = {
    {"a", 2, 3000, true},   {"a", 2, 70000, false},  {"a", 3, 150000, true},
    {"aab", 3, 3000, true}, {"a", 2, 600000, false}, {"aabb", 4, 20000, false},
    {"aabbcc", 6, 500, true},
  };
  size_t i;
  int struck = 0;
  for (i = 0; i < sizeof jobs / sizeof *jobs && test_failures == 0; i++) {
    shared->hosts = jobs[i].hosts;
    shared->ranks = jobs[i].ranks;
    shared->count = jobs[i].count;
    shared->own = jobs[i].own;
    shared->kind = (int)i % KINDS;
    struck += run_all(thorough || i < 2 ? 1 : 3);
  }
  fprintf(stderr, "  %d calls failed\n", struck);
  CHECK(struck > 60);
  unsetenv("TEST_HOSTS");
}

/* Rank 2 dies, and a process joins. A rank without memory ends alone. */
static void run_elastic(int victim, int number) {
  pid_t pids[MOST];
  int status[MOST], i;
  double until = test_now() + RANKS_WITHIN(10);
  begin(victim, number);
  shared->port = ranks_free_port();
  for (i = 0; i < JOINER; i++) pids[i] = ranks_fork(elastic_life, i, NULL);
  while (look(&shared->created) < JOINER && test_now() < until) ranks_sleep(0.001);
  pids[i] = ranks_fork(elastic_life, i, NULL);
  ranks_join(pids, JOINER + 1, RANKS_WITHIN(20.0), status);
  for (i = 0; i <= JOINER; i++) {
    cddp_result r = shared->results[i];
    if (i == LOST) continue;
    CHECK_EQ(status[i], 0);
    CHECK(r == CDDP_OK || (i == victim && r == CDDP_OUT_OF_MEMORY));
    if (r != CDDP_OK) CHECK(strstr(shared->texts[i], strerror(ENOMEM)) != NULL);
  }
}

static void test_elastic(void) {
  static const struct {
    const char *hosts;
    size_t count;
    bool own;
  } jobs[] = {{"a", 3000, false}, {"a", 700000, true}, {"aab", 100000, false}};
  size_t i;
  int struck = 0, number, v;
  shared->ranks = 3;
  for (i = 0; i < sizeof jobs / sizeof *jobs && test_failures == 0; i++) {
    shared->hosts = jobs[i].hosts;
    shared->count = jobs[i].count;
    shared->own = jobs[i].own;
    run_elastic(0, 0);
    for (v = 0; v < 3 && test_failures == 0; v++)
      for (number = 1 + v; number < 60 && test_failures == 0; number += 5) {
        run_elastic(v == 2 ? JOINER : v, number);
        struck += shared->struck;
        if (test_failures > 0) describe();
        if (!shared->struck) break;
      }
  }
  fprintf(stderr, "  %d calls failed\n", struck);
  CHECK(struck > 10);
}

int main(int argc, char **argv) {
  thorough = argc > 1 && strcmp(argv[1], "--thorough") == 0;
  shared = (run *)ranks_shared(sizeof *shared);
  RUN(test_any_call);
  RUN(test_elastic);
  return TEST_END();
}
