/* cddp_alloc and cddp_free: shared memory that is cheap, private until used, and given back.

   Any number of allocations takes few memory mappings, in the rank and in its peers, and the time
   of each does not depend on their number. Memory is zero, belongs to one caller, and goes back
   to the system. The tests allocate and free in random order, by many threads, alone and in
   groups, at the limit of mappings, and count mappings, descriptors and resident bytes. */
#include "../../cddp.h"
#include "../ranks.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

enum { MANY = 200000, STEPS = 6000, LIVE = 700 };

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static long resident_pages(void) {
  FILE *f = fopen("/proc/self/statm", "r");
  long size = 0, resident = 0;
  if (f == NULL || fscanf(f, "%ld %ld", &size, &resident) != 2) resident = 0;
  if (f != NULL) fclose(f);
  return resident;
}

/* MANY ----------------------------------------------------------------------------------------- */

/* The last tenth of as many takes about as long as the first. */
static int many_body(cddp_group *g, void *arg) {
  int before = test_failures, maps = ranks_mappings(""), i, j;
  bool forked = cddp_world_size(g) > 1;
  char **p = (char **)calloc(MANY, sizeof *p);
  double part[10], begin = now(), end;
  int *order = (int *)malloc(MANY * sizeof *order);
  long long shared = ranks_shared_bytes();
  long resident = resident_pages();
  (void)arg;
  if (p == NULL || order == NULL) return 1;
  for (j = 0; j < 10; j++, begin = end) {
    for (i = j * (MANY / 10); i < (j + 1) * (MANY / 10); i++) {
      p[i] = (char *)cddp_alloc(g, 100);
      if (p[i] == NULL) break;
      p[i][99] = 1;
    }
    end = now();
    part[j] = end - begin;
    CHECK(p[(j + 1) * (MANY / 10) - 1] != NULL);
    if (test_failures != before) return 1;
  }
  CHECK(part[9] < 4 * part[0] + RANKS_WITHIN(1));
  CHECK(ranks_mappings("") < maps + 400);
  for (i = 0; i < MANY; i++) order[i] = i;
  ranks_shuffle(order, MANY, 1);
  begin = now();
  for (j = 0; j < 10; j++, begin = end) {
    for (i = j * (MANY / 10); i < (j + 1) * (MANY / 10); i++) cddp_free(g, p[order[i]]);
    end = now();
    part[j] = end - begin;
  }
  CHECK(part[0] < 4 * part[9] + RANKS_WITHIN(1));
  CHECK(ranks_mappings("") < maps + 100);
  CHECK_OK(cddp_barrier(g));
  CHECK(!forked || ranks_shared_bytes() <= shared + (2 << 20));
  if (!RANKS_SLOW)
    CHECK(forked || resident_pages() < resident + MANY / 10); /* of it 56 bytes each stay */
  CHECK_OK(cddp_barrier(g));
  free(p);
  free(order);
  return test_failures != before;
}

static int many_alone(int rank, void *arg) {
  cddp_group *g = NULL;
  int r;
  (void)rank;
  unsetenv("WORLD_SIZE"), unsetenv("RANK");
  CHECK_OK(cddp_init(&g, NULL));
  if (g == NULL) return 1;
  r = many_body(g, arg);
  cddp_destroy(g);
  return r;
}

static void test_many_alone(void) {
  pid_t pid = ranks_fork(many_alone, 0, NULL);
  int status = -1;
  ranks_join(&pid, 1, 60, &status);
  CHECK_EQ(status, 0);
}

static void test_many_in_group(void) { CHECK_OK(ranks_run(many_body, NULL, 2, false)); }

static int many_thread(cddp_group *g, void *arg) { /* mappings are of all threads */
  char *p[2000];
  int i;
  (void)arg;
  for (i = 0; i < 2000; i++) CHECK((p[i] = (char *)cddp_alloc(g, 5000)) != NULL);
  for (i = 0; i < 2000; i++) CHECK(ranks_zero(p[i], 5000));
  CHECK(ranks_mappings("") < 1500);
  CHECK_OK(cddp_barrier(g));
  for (i = 0; i < 2000; i += 2) cddp_free(g, p[i]);
  return 0; /* the others go with the group */
}

static void test_many_threads(void) { CHECK_OK(ranks_run(many_thread, NULL, 4, true)); }

/* PEERS ---------------------------------------------------------------------------------------- */

/* Models of many parameters: each rank maps the weights of all others. */
typedef struct zoo {
  int params, ranks, most; /* mappings */
  size_t count;
} zoo;

static int zoo_body(cddp_group *g, void *arg) {
  const zoo *z = (const zoo *)arg;
  int before = test_failures, i;
  cddp_param *p = (cddp_param *)calloc((size_t)z->params, sizeof *p);
  cddp_ddp *d = NULL;
  cddp_sgd_desc desc;
  cddp_optim *o = NULL;
  for (i = 0; i < z->params; i++) {
    p[i].count = z->count + (size_t)i % 5;
    p[i].data = cddp_alloc(g, p[i].count * sizeof(float));
    if (p[i].data == NULL) break;
    ((float *)p[i].data)[0] = (float)(i + cddp_rank(g));
  }
  CHECK_EQ(i, z->params);
  CHECK_OK(cddp_ddp_create(&d, g, p, z->params, NULL));
  if (d == NULL) return 1;
  memset(&desc, 0, sizeof desc);
  desc.lr = 1;
  CHECK_OK(cddp_sgd_create(&o, p, z->params, &desc));
  for (i = 0; i < z->params; i++) ((float *)p[i].grad)[0] = (float)cddp_rank(g);
  for (i = z->params - 1; i >= 0; i--) CHECK_OK(cddp_ddp_ready(d, i));
  CHECK_OK(cddp_ddp_step(d, o));
  for (i = 0; i < z->params; i++) {
    float want = (float)i - (float)(cddp_world_size(g) - 1) / 2;
    if (((float *)p[i].data)[0] != want) break;
  }
  CHECK_EQ(i, z->params);
  CHECK(RANKS_SLOW || ranks_mappings("") < z->most);
  CHECK_OK(cddp_barrier(g));
  cddp_optim_destroy(o);
  cddp_ddp_destroy(d);
  for (i = 0; i < z->params; i++) cddp_free(g, p[i].data);
  free(p);
  return test_failures != before;
}

static void test_models(void) {
  static zoo small = {2000, 8, 1500, 20}, large = {24, 2, 200, 600000}, full = {2000, 64, 10000, 4};
  CHECK_OK(ranks_run(zoo_body, &small, small.ranks, false));
  CHECK_OK(ranks_run(zoo_body, &large, large.ranks, false));
  if (!RANKS_SLOW) CHECK_OK(ranks_run(zoo_body, &full, full.ranks, false));
}

/* REUSE ---------------------------------------------------------------------------------------- */

static size_t some_size(uint64_t h) {
  switch (h % 16) {
  case 0:
    return (size_t)(h >> 8) % (5 << 20);
  case 1:
  case 2:
    return (size_t)(h >> 8) % 300000;
  case 3:
    return 0;
  default:
    return (size_t)(h >> 8) % 20000;
  }
}

/* Blocks of all sizes are freed and allocated in an order of each rank's own. Each is zero at first
   and holds what its owner wrote; peers reduce in them what is there now. */
static int reuse_body(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g), n = cddp_world_size(g), step, k;
  static __thread unsigned char *p[LIVE], fill[LIVE];
  static __thread size_t size[LIVE];
  long long shared = ranks_shared_bytes();
  const size_t count = 40000;
  (void)arg;
  memset(p, 0, sizeof p);
  for (step = 0; step < STEPS / (RANKS_SLOW ? 20 : 1) && test_failures == before; step++) {
    uint64_t h = ranks_mix(5, (uint64_t)rank, (uint64_t)step);
    k = (int)(h >> 40) % LIVE;
    if (p[k] != NULL) {
      CHECK(size[k] == 0 || (p[k][0] == fill[k] && memcmp(p[k], p[k] + 1, size[k] - 1) == 0));
      cddp_free(g, p[k]);
    }
    size[k] = some_size(h);
    fill[k] = (unsigned char)(h >> 32 | 1);
    CHECK((p[k] = (unsigned char *)cddp_alloc(g, size[k])) != NULL);
    if (p[k] == NULL) break;
    CHECK(ranks_zero(p[k], size[k]));
    memset(p[k], fill[k], size[k]);
    if (step % 500 == 0) { /* read in place by all peers */
      float *x = (float *)cddp_alloc(g, count * sizeof *x);
      for (k = 0; k < (int)count; k++) x[k] = (float)(k + rank);
      CHECK_OK(cddp_all_reduce(g, x, count, CDDP_F32, CDDP_SUM, NULL));
      for (k = 0; k < (int)count && x[k] == (float)(n * k + n * (n - 1) / 2);) k++;
      CHECK_EQ(k, count);
      cddp_free(g, x);
    }
  }
  for (k = 0; k < LIVE; k++) cddp_free(g, p[k]);
  cddp_free(g, NULL);
  CHECK_OK(cddp_barrier(g));
  if (shared > 0) CHECK(ranks_shared_bytes() <= shared + (4 << 20));
  CHECK_OK(cddp_barrier(g));
  return test_failures != before;
}

static void test_reuse(void) {
  CHECK_OK(ranks_run(reuse_body, NULL, 3, false));
  CHECK_OK(ranks_run(reuse_body, NULL, 3, true));
  CHECK_OK(ranks_run(reuse_body, NULL, 1, true));
}

/* Addresses within a block, and other processes' or freed ones, are ignored. */
static int wrong_body(cddp_group *g, void *arg) {
  char *a = (char *)cddp_alloc(g, 30000), *b = (char *)cddp_alloc(g, 30000), local = 0;
  (void)arg;
  cddp_free(g, a + 1);
  cddp_free(g, a + 4096);
  cddp_free(g, &local);
  memset(a, 1, 30000);
  memset(b, 2, 30000);
  cddp_free(g, a);
  CHECK(b[0] == 2 && b[29999] == 2);
  cddp_free(g, b);
  return 0;
}

static void test_wrong_addresses(void) {
  CHECK_OK(ranks_run(wrong_body, NULL, 2, false));
  CHECK_OK(ranks_run(wrong_body, NULL, 2, true));
}

/* ELASTIC MODELS ------------------------------------------------------------------------------- */

/* Elastic models of weights of any size, beside other allocations. */
typedef struct weights {
  size_t bytes; /* of the weights */
  float fill;
  bool own;   /* malloc's memory, else cddp_alloc's */
  bool first; /* allocated before all others */
  int models; /* one after the other, on the same weights */
} weights;

/* Bytes that none of cddp's calls may change. */
static unsigned char *guard(cddp_group *g, size_t bytes, int fill) {
  unsigned char *p = (unsigned char *)cddp_alloc(g, bytes);
  CHECK(p != NULL && ranks_zero(p, bytes));
  if (p != NULL) memset(p, fill, bytes);
  return p;
}

static bool intact(const unsigned char *p, size_t bytes, int fill) {
  return p[0] == fill && memcmp(p, p + 1, bytes - 1) == 0;
}

static bool all_are(const float *w, size_t n, float x) {
  size_t i;
  for (i = 0; i < n && w[i] == x;) i++;
  return i == n;
}

/* Each model takes two steps with gradients of 1. */
static void train_weights(cddp_group *g, cddp_param *p, float *x) {
  cddp_ddp_desc desc;
  cddp_adamw_desc adamw;
  cddp_sgd_desc sgd;
  cddp_ddp *d = NULL;
  cddp_optim *o = NULL, *other = NULL;
  int shard, t;
  size_t i;
  memset(&desc, 0, sizeof desc);
  memset(&sgd, 0, sizeof sgd);
  memset(&adamw, 0, sizeof adamw);
  desc.elastic = true;
  desc.shards = cddp_world_size(g) + 1;
  CHECK_OK(cddp_ddp_create(&d, g, p, 1, &desc));
  CHECK(all_are((float *)p->data, p->count, *x));
  sgd.lr = adamw.lr = 0.125;
  sgd.momentum = 0.5;
  if (d == NULL) return;
  CHECK_OK(cddp_sgd_create(&o, p, 1, &sgd));
  CHECK_OK(cddp_adamw_create(&other, p, 1, &adamw));
  for (t = 0; t < 2; t++) {
    while (cddp_ddp_next_shard(d, &shard)) {
      for (i = 0; i < p->count; i++) ((float *)p->grad)[i] += 1;
      if (cddp_ddp_ready(d, 0) != CDDP_OK) break;
    }
    CHECK_OK(cddp_ddp_step(d, o));
    *x -= 0.125f * (t == 0 ? 1.0f : 1.5f);
    CHECK(all_are((float *)p->data, p->count, *x));
  }
  cddp_optim_destroy(other);
  cddp_optim_destroy(o);
  cddp_ddp_destroy(d);
}

static int weights_body(cddp_group *g, void *arg) {
  static const size_t sizes[] = {100, 70000, (2 << 20) - 4096, 2 << 20, 5 << 20};
  enum { GUARDS = sizeof sizes / sizeof *sizes };
  const weights *v = (const weights *)arg;
  unsigned char *before[GUARDS], *after[GUARDS];
  cddp_param p;
  float x = v->fill;
  size_t i;
  int k;
  memset(&p, 0, sizeof p);
  p.name = "w";
  p.count = v->bytes / sizeof(float);
  for (k = 0; k < GUARDS && !v->first; k++) before[k] = guard(g, sizes[k], 17 + k);
  p.data = v->own ? malloc(v->bytes) : cddp_alloc(g, v->bytes);
  CHECK(p.data != NULL);
  if (p.data == NULL) return 1;
  for (k = 0; k < GUARDS && v->first; k++) before[k] = guard(g, sizes[k], 17 + k);
  for (i = 0; i < p.count; i++) ((float *)p.data)[i] = x;
  for (k = 0; k < v->models && test_failures == 0; k++) train_weights(g, &p, &x);
  for (k = 0; k < GUARDS; k++) after[k] = guard(g, sizes[k], 27 + k);
  for (k = 0; k < GUARDS; k++) {
    CHECK(intact(before[k], sizes[k], 17 + k) && intact(after[k], sizes[k], 27 + k));
    cddp_free(g, before[k]);
  }
  CHECK(all_are((float *)p.data, p.count, x));
  if (v->own) free(p.data);
  else cddp_free(g, p.data);
  return test_failures != 0;
}

/* As a launcher starts it, so that processes could join a job of one rank too. */
static int weights_rank(int rank, void *arg) {
  cddp_group *g;
  int r;
  (void)rank;
  CHECK_OK(cddp_init(&g, NULL));
  if (g == NULL) return 1;
  r = weights_body(g, arg);
  cddp_destroy(g);
  return r;
}

static void test_elastic_weights(void) {
  static const size_t sizes[] = {4,          12000,     (2 << 20) - 4, 2 << 20,
                                 (2 << 20) + 4, 2000000, 4 << 20,       16 << 20, 64 << 20};
  static const float fills[] = {0, 0.3f, 1};
  enum { SIZES = sizeof sizes / sizeof *sizes };
  int status[6], i, k, n;
  weights v;
  memset(&v, 0, sizeof v);
  for (n = 1; n <= 6; n++)
    for (i = 0; i < (n == 1 && !RANKS_SLOW ? SIZES : SIZES - 2); i++) {
      if (n > 1 && i % 5 != n % 5) continue; /* each size with some numbers of ranks */
      v.bytes = sizes[i];
      v.fill = fills[(i + n) % 3];
      v.models = sizes[i] < ((size_t)8 << 20) ? 2 : 1;
      for (k = 0; k < (n == 1 && v.models == 2 ? 3 : 1); k++) {
        v.own = k == 2;
        v.first = k == 0;
        ranks_script(weights_rank, &v, n, RANKS_WITHIN(60.0), status);
        CHECK(ranks_exited_well(status, n));
      }
    }
}

/* CORE DUMPS. A rank of an elastic model calls abort. A dump of holes, or of its peers' memory,
   would allocate pages and delay the notice of its death. -------------------------------------- */

enum { CRASH_WRITTEN = 4 << 20 }; /* bytes that each rank writes */

typedef struct crash {
  size_t bytes;   /* of the weights */
  size_t freed;   /* bytes that `rank` allocates and frees */
  size_t holes;   /* the least bytes that it has mapped when it calls abort */
  int shards, ranks, rank; /* rank 2 is killed first, if there is one; then `rank` calls abort */
  bool dumps;     /* the system may write a core file into `directory` */
  char directory[200];
  double died;    /* when it called abort */
  double noticed; /* seconds until its peer's call failed */
  long long grew; /* bytes of the host's shared memory meanwhile */
} crash;

/* Bytes of the host's shared memory that this rank has mapped. */
static size_t mapped_bytes(void) {
  FILE *f = fopen("/proc/self/maps", "r");
  unsigned long from, to;
  char line[512];
  size_t bytes = 0;
  while (f != NULL && fgets(line, sizeof line, f) != NULL)
    if (strstr(line, "/memfd:cddp ") != NULL && sscanf(line, "%lx-%lx", &from, &to) == 2)
      bytes += to - from;
  if (f != NULL) fclose(f);
  return bytes;
}

static void crash_step(cddp_ddp *d) {
  int shard;
  while (cddp_ddp_next_shard(d, &shard)) CHECK_OK(cddp_ddp_ready(d, 0));
  CHECK_OK(cddp_ddp_wait(d));
}

static void crash_now(crash *c, const cddp_param *p) {
  struct rlimit most;
  CHECK(getrlimit(RLIMIT_CORE, &most) == 0);
  most.rlim_cur = c->dumps ? most.rlim_max : 0;
  CHECK(setrlimit(RLIMIT_CORE, &most) == 0 && chdir(c->directory) == 0);
  /* What the rank itself has written is in the core file. The test can do without most of it. */
  CHECK(madvise(p->data, c->bytes, MADV_DONTDUMP) == 0);
  CHECK(madvise(p->grad, c->bytes, MADV_DONTDUMP) == 0);
  if (test_failures > 0) _exit(1);
  c->died = now();
  abort();
}

static int crash_rank(int rank, void *arg) {
  crash *c = (crash *)arg;
  cddp_param p = {"w", NULL, NULL, c->bytes / sizeof(float), CDDP_F32};
  cddp_ddp_desc desc;
  cddp_ddp *d = NULL;
  cddp_group *g;
  long long bytes;
  char name[32];
  void *written, *freed;
  int k;
  memset(&desc, 0, sizeof desc);
  desc.elastic = true;
  desc.shards = c->shards;
  CHECK_OK(cddp_init(&g, NULL));
  CHECK((p.data = cddp_alloc(g, c->bytes)) != NULL);
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, &desc));
  if (d == NULL) return 1;
  for (k = 0; k < 3; k++) {
    if (k == 1 && rank == 2) raise(SIGKILL);
    crash_step(d); /* maps memory of its peers; the second one, after a loss, other blocks, too */
  }
  CHECK((written = cddp_alloc(g, CRASH_WRITTEN)) != NULL);
  if (written != NULL) memset(written, 1, CRASH_WRITTEN);
  CHECK((freed = cddp_alloc(g, rank == c->rank ? c->freed : 1)) != NULL);
  cddp_free(g, freed);
  CHECK_OK(cddp_barrier(cddp_ddp_group(d)));
  bytes = ranks_shared_bytes();
  CHECK_OK(cddp_barrier(cddp_ddp_group(d)));
  if (rank == c->rank) CHECK(mapped_bytes() >= c->holes);
  if (rank == c->rank) crash_now(c, &p);
  CHECK_IS(cddp_barrier(cddp_ddp_group(d)), CDDP_PEER_LOST);
  c->noticed = now() - c->died;
  snprintf(name, sizeof name, "rank %d (pid", c->rank);
  CHECK(strncmp(cddp_error(), name, strlen(name)) == 0);
  c->grew = ranks_shared_bytes() - bytes;
  cddp_ddp_destroy(d);
  cddp_free(g, p.data);
  cddp_destroy(g);
  return test_failures != 0;
}

/* Bytes of the core files in the directory, which it deletes. */
static long long delete_cores(const char *directory) {
  DIR *d = opendir(directory);
  char path[512];
  struct dirent *e;
  struct stat s;
  long long bytes = 0;
  while (d != NULL && (e = readdir(d)) != NULL) {
    snprintf(path, sizeof path, "%s/%s", directory, e->d_name);
    if (e->d_name[0] == '.' || stat(path, &s) != 0) continue;
    bytes += s.st_blocks * 512;
    CHECK(unlink(path) == 0);
  }
  if (d != NULL) closedir(d);
  return bytes;
}

/* A program that reads dumps decides when they end, and where they are. */
static bool dumps_are_piped(void) {
  FILE *f = fopen("/proc/sys/kernel/core_pattern", "r");
  bool piped = f != NULL && getc(f) == '|';
  if (f != NULL) fclose(f);
  return piped;
}

static void test_core_dump(void) {
  /* With 1,024 shards the control blocks, which are in rank 0's memory, have 156 MiB each. Rank 0
     has 2 GiB of them and of freed memory. */
  static const crash crashes[] = {
    {.bytes = 64 << 20, .freed = 32 << 20, .shards = 2, .ranks = 2, .rank = 1},
    {.bytes = 4096, .freed = (size_t)1800 << 20, .holes = (size_t)2 << 30, .shards = 1024,
     .ranks = 3, .rank = 0},
    {.bytes = 4096, .freed = 32 << 20, .shards = 256, .ranks = 3, .rank = 1},
  };
  const char *parent = getenv("TMPDIR");
  crash *c = (crash *)ranks_shared(sizeof *c);
  char directory[sizeof c->directory];
  double without = 0;
  long long core;
  int status[3], i, aborted;
  snprintf(directory, sizeof directory, "%s/cddp-core.XXXXXX", parent != NULL ? parent : "/tmp");
  CHECK(mkdtemp(directory) != NULL);
  for (i = 0; i < 6 && test_failures == 0; i++) {
    *c = crashes[i / 2];
    c->dumps = i % 2 != 0;
    memcpy(c->directory, directory, sizeof directory);
    ranks_script(crash_rank, c, c->ranks, RANKS_WITHIN(20.0), status);
    aborted = status[c->rank];
    CHECK(status[1 - c->rank] == 0 && WIFSIGNALED(aborted) && WTERMSIG(aborted) == SIGABRT);
    core = delete_cores(directory);
    if (!c->dumps) without = c->noticed;
    CHECK(c->noticed < without + RANKS_WITHIN(0.5));
    CHECK(core < (c->dumps ? CRASH_WRITTEN + (10 << 20) : 1));
    CHECK(core == 0 || core > CRASH_WRITTEN);
    CHECK(c->grew < (c->ranks == 2 ? 512 << 10 : 8 << 20)); /* free extents below 2 MiB */
    if (c->dumps)
      fprintf(stderr, "  %s of %lld KiB; noticed in %.0f ms, without in %.0f ms; grew %lld KiB\n",
              core > 0 ? "core file" : WCOREDUMP(aborted) ? "core elsewhere" : "no core",
              core >> 10, 1e3 * c->noticed, 1e3 * without, c->grew >> 10);
  }
  CHECK(rmdir(directory) == 0);
}

/* LIMITS --------------------------------------------------------------------------------------- */

/* Takes all mappings that a process may have: pages that differ in turn. */
static void take_mappings(void) {
  size_t pages = 140000, i, page = 4096;
  char *p = (char *)mmap(NULL, pages * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                         -1, 0);
  for (i = 1; i < pages && mprotect(p + i * page, page, PROT_READ) == 0;) i += 2;
}

static int limit_body(cddp_group *g, void *arg) {
  enum { ARRAYS = 16 };
  size_t count = 100000;
  float *mine[ARRAYS];
  cddp_result r = CDDP_OK;
  int k;
  (void)arg;
  for (k = 0; k < ARRAYS; k++)
    mine[k] = (float *)cddp_alloc(g, (size_t)(8 + k % 8) << (17 + k / 8));
  CHECK_OK(cddp_barrier(g));
  if (cddp_rank(g) == 0) {
    take_mappings();
    for (k = 0; k < ARRAYS; k++) /* a place or two may be left */
      if (cddp_alloc(g, (size_t)6 << 20 << k) == NULL) break;
    CHECK(k < ARRAYS);
    CHECK(strstr(cddp_error(), "vm.max_map_count") != NULL);
  }
  for (k = 0; k < ARRAYS && r == CDDP_OK; k++) /* rank 0 cannot map rank 1's */
    r = cddp_all_reduce(g, mine[k], count, CDDP_F32, CDDP_SUM, NULL);
  CHECK(r == CDDP_OUT_OF_MEMORY);
  CHECK(strstr(cddp_error(), "vm.max_map_count") != NULL);
  return test_failures != 0;
}

static void test_out_of_mappings(void) {
  FILE *f = fopen("/proc/sys/vm/max_map_count", "r");
  long most = 0;
  if (f == NULL || fscanf(f, "%ld", &most) != 1) most = 0;
  if (f != NULL) fclose(f);
  if (most > 130000 || RANKS_SLOW) return; /* too many to take; a sanitizer needs some */
  CHECK_OK(ranks_run(limit_body, NULL, 2, false));
}

/* Makes fallocate of more than `above` bytes fail with `error`, as where memory is short: with
   vm.overcommit_memory=2, or in a full tmpfs. Holes can still be made. */
static bool deny_more(unsigned above, int error) {
  struct sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fallocate, 0, 5),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[3])),
      BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, above, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {sizeof code / sizeof *code, code};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static bool deny_memory(int error) { return deny_more(0, error); }

/* In older kernels each tick of a profiler's timer undoes the fallocate that it interrupts: no
   large one ever ends. */
static int profiled_body(cddp_group *g, void *arg) {
  enum { COUNT = 10 << 20 };
  float *x;
  (void)arg;
  CHECK(deny_more(200000, EINTR));
  x = (float *)cddp_alloc(g, COUNT * sizeof *x);
  CHECK(x != NULL);
  x[COUNT - 1] = 1;
  CHECK_OK(cddp_all_reduce(g, x, COUNT, CDDP_F32, CDDP_SUM, NULL));
  CHECK(x[COUNT - 1] == 2);
  cddp_free(g, x);
  return test_failures != 0;
}

static void test_profiled(void) { CHECK_OK(ranks_run(profiled_body, NULL, 2, false)); }

/* Rank 0 has no memory left: that is NULL and a text, for any size, and rank 0 goes on with what it
   has. The other ranks do not notice. */
static int short_body(cddp_group *g, void *arg) {
  static const size_t sizes[] = {1, 4096, 100000, (2 << 20) - 1, 2 << 20, 40 << 20};
  enum { COUNT = 50000 };
  int before = test_failures;
  float *had = (float *)cddp_alloc(g, COUNT * sizeof *had), x;
  bool is_short = cddp_rank(g) == 0;
  cddp_group *all = NULL;
  unsigned char *p;
  size_t i;
  CHECK(had != NULL);
  CHECK_OK(cddp_barrier(g));
  if (is_short) CHECK(deny_memory(*(int *)arg));
  for (i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    p = (unsigned char *)cddp_alloc(g, sizes[i]);
    CHECK((p == NULL) == is_short);
    if (is_short) CHECK(strstr(cddp_error(), strerror(*(int *)arg)) != NULL);
    if (is_short) CHECK(strstr(cddp_error(), "cddp_alloc") != NULL);
    if (p == NULL) continue;
    memset(p, 1, sizes[i]);
    cddp_free(g, p);
  }
  for (i = 0; i < COUNT; i++) had[i] = 1;
  CHECK_OK(cddp_all_reduce(g, had, COUNT, CDDP_F32, CDDP_SUM, NULL));
  x = (float)cddp_world_size(g);
  CHECK(all_are(had, COUNT, x));
  cddp_free(g, had);
  CHECK_IS(cddp_group_split(g, 0, 0, &all), CDDP_OUT_OF_MEMORY); /* rank 0 allocates for it */
  CHECK(all == NULL && strstr(cddp_error(), "shared memory") != NULL);
  CHECK_OK(cddp_group_split(g, is_short ? -1 : 0, 0, &all));
  CHECK((all == NULL) == is_short);
  cddp_destroy(all);
  CHECK_OK(cddp_barrier(g));
  return test_failures != before;
}

/* The first rank of a host lacks memory for the first group. */
static int short_start(int rank, void *arg) {
  bool is_short = rank == *(int *)arg;
  cddp_group *g = NULL;
  if (is_short) CHECK(deny_memory(ENOMEM));
  CHECK(cddp_init(&g, NULL) != CDDP_OK && g == NULL);
  CHECK(strstr(cddp_error(), "control block of a group") != NULL);
  if (is_short) CHECK(strstr(cddp_error(), strerror(ENOMEM)) != NULL);
  return test_failures != 0;
}

static void test_short_start(void) {
  static const char *const hosts[] = {"", "", "aabb", "aabb"};
  static int is_short[] = {0, 0, 0, 2};
  int status[4], i, n;
  for (i = 0; i < 4; i++) {
    n = i < 2 ? 2 + i : 4;
    setenv("TEST_HOSTS", hosts[i], 1);
    ranks_script(short_start, &is_short[i], n, RANKS_WITHIN(20.0), status);
    CHECK(ranks_exited_well(status, n));
  }
  unsetenv("TEST_HOSTS");
}

static void test_short_memory(void) {
  static int errors[] = {ENOMEM, ENOSPC};
  int i, n;
  for (i = 0; i < 2; i++)
    for (n = 2; n <= 3; n++) CHECK_OK(ranks_run(short_body, &errors[i], n, false));
}

/* Memory of a model that is committed when it is used: means and optimizer states. */
typedef struct shortage {
  size_t bytes; /* of the weights */
  int ranks, is_short, lost; /* the ranks that are short, and that die in the next step */
  bool elastic, own; /* own: the weights are malloc's memory */
  int port;
} shortage;

static int shortage_rank(int rank, void *arg) {
  const shortage *v = (const shortage *)arg;
  bool is_short = rank == v->is_short;
  cddp_param p = {"w", NULL, NULL, v->bytes / sizeof(float), CDDP_F32};
  cddp_result r = CDDP_OK;
  cddp_ddp_desc desc;
  cddp_sgd_desc sgd;
  cddp_ddp *d = NULL;
  cddp_optim *o = NULL;
  cddp_group *g;
  char name[32];
  int shard, t;
  size_t i;
  memset(&desc, 0, sizeof desc);
  memset(&sgd, 0, sizeof sgd);
  desc.elastic = v->elastic;
  sgd.lr = 0.125;
  sgd.momentum = 0.5;
  CHECK_OK(cddp_init(&g, NULL));
  p.data = v->own ? malloc(v->bytes) : cddp_alloc(g, v->bytes);
  CHECK(p.data != NULL);
  for (i = 0; i < p.count; i++) ((float *)p.data)[i] = 1;
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, &desc));
  sgd.ddp = d;
  CHECK_OK(cddp_sgd_create(&o, &p, 1, &sgd));
  if (test_failures > 0) return 1;
  for (t = 0; t < 3 && r == CDDP_OK; t++) {
    if (t == (v->elastic ? 1 : 0)) CHECK_OK(cddp_barrier(cddp_ddp_group(d)));
    if (t == (v->elastic ? 1 : 0) && is_short) CHECK(deny_memory(ENOMEM));
    while (v->elastic && r == CDDP_OK && cddp_ddp_next_shard(d, &shard)) {
      if (t == 1 && rank == v->lost) raise(SIGKILL);
      for (i = 0; i < p.count; i++) ((float *)p.grad)[i] += 1;
      r = cddp_ddp_ready(d, 0);
    }
    for (i = 0; i < p.count && !v->elastic; i++) ((float *)p.grad)[i] = 1;
    if (!v->elastic) r = cddp_ddp_ready(d, 0);
    if (r == CDDP_OK) r = cddp_ddp_step(d, o);
  }
  snprintf(name, sizeof name, "rank %d", v->is_short);
  if (v->elastic && !is_short) {
    CHECK_OK(r);
    CHECK(all_are((float *)p.data, p.count, 1 - 0.125f - 0.1875f - 0.21875f));
  } else {
    CHECK_IS(r, CDDP_OUT_OF_MEMORY);
    CHECK((is_short && !v->elastic) || strncmp(cddp_error(), name, strlen(name)) == 0);
    CHECK(strstr(cddp_error(), "shared memory: Cannot allocate memory") != NULL);
    if (v->elastic && rank == 0) CHECK(strstr(cddp_error(), "control block of a group") != NULL);
  }
  cddp_optim_destroy(o);
  cddp_ddp_destroy(d);
  if (v->own) free(p.data);
  else cddp_free(g, p.data);
  cddp_destroy(g);
  return test_failures != 0;
}

/* A rank has no memory for its part of a mean or of the states. In an elastic job it ends alone. */
static void test_short_model_memory(void) {
  static const size_t sizes[] = {100000, (2 << 20) - 4, 2 << 20, 5 << 20};
  shortage *v = (shortage *)ranks_shared(sizeof *v);
  int status[4], i, k, n = 0;
  for (v->ranks = 2; v->ranks <= 4; v->ranks++)
    for (i = 0; i < 8; i++, n++) {
      v->bytes = sizes[i % 4];
      v->elastic = i / 4 == 0;
      v->own = n % 3 == 0;
      v->is_short = n % v->ranks;
      v->lost = (v->is_short + 1 + n / v->ranks % (v->ranks - 1)) % v->ranks;
      ranks_script(shortage_rank, v, v->ranks, RANKS_WITHIN(20.0), status);
      for (k = 0; k < v->ranks; k++)
        CHECK_EQ(status[k], v->elastic && k == v->lost ? SIGKILL : 0);
    }
}

/* The program closes descriptors that are not its own, and its files get their numbers. */
static int closed_body(cddp_group *g, void *arg) {
  const size_t count = 300000;
  char name[] = "/tmp/cddp-closed.XXXXXX", text[64] = "";
  float *x = (float *)cddp_alloc(g, count * sizeof *x), *heap = (float *)calloc(count, sizeof *x);
  bool reused = *(int *)arg != 0;
  cddp_group *half = NULL;
  void *p;
  int i, fd;
  CHECK(x != NULL && heap != NULL);
  CHECK_OK(cddp_all_reduce(g, x, count, CDDP_F32, CDDP_SUM, NULL)); /* its peers know x now */
  cddp_free(g, cddp_alloc(g, 5000));
  if (cddp_rank(g) == 0) {
    close_range(3, ~0u, 0);
    fd = reused ? mkstemp(name) : -1;
    if (reused) CHECK(write(fd, "the user's", 10) == 10);
    for (i = 0; i < 40 && reused; i++) CHECK(dup(fd) >= 0);
    if (reused) unlink(name);
    ranks_sleep(0.3); /* the other rank, and then this one, look whether their peer lives */
    CHECK_OK(cddp_barrier(g));
  } else {
    CHECK_OK(cddp_barrier(g));
    ranks_sleep(0.3);
  }
  for (i = 0; i < (int)count; i++) x[i] = heap[i] = 1;
  CHECK_OK(cddp_all_reduce(g, x, count, CDDP_F32, CDDP_SUM, NULL));
  CHECK_OK(cddp_all_reduce(g, heap, count, CDDP_F32, CDDP_SUM, NULL));
  CHECK(x[count - 1] == 2 && heap[count - 1] == 2);
  for (i = 0; i < 50; i++) cddp_free(g, cddp_alloc(g, 5000)); /* the program's file does not grow */
  if (cddp_rank(g) == 0) {
    p = cddp_alloc(g, 40 * count);
    CHECK(p == NULL);
    CHECK(strstr(cddp_error(), "closefrom") != NULL);
  }
  CHECK(cddp_group_split(g, 0, 0, &half) != CDDP_OK);
  CHECK(strstr(cddp_error(), "closefrom") != NULL);
  cddp_free(g, x);
  if (reused && cddp_rank(g) == 0) {
    for (fd = 3; fd < 43; fd++) CHECK(pread(fd, text, sizeof text, 0) == 10);
    CHECK(strcmp(text, "the user's") == 0);
  }
  free(heap);
  return 0;
}

static void test_closed_descriptors(void) {
  int reused;
  for (reused = 0; reused < 2; reused++) CHECK_OK(ranks_run(closed_body, &reused, 2, false));
}

int main(void) {
  RUN(test_wrong_addresses);
  RUN(test_reuse);
  RUN(test_many_alone);
  RUN(test_many_in_group);
  RUN(test_many_threads);
  RUN(test_out_of_mappings);
  RUN(test_closed_descriptors);
  RUN(test_profiled);
  RUN(test_short_memory);
  RUN(test_short_start);
  RUN(test_short_model_memory);
  RUN(test_elastic_weights);
  if (dumps_are_piped())
    fprintf(stderr, "  not run: test_core_dump: core_pattern is a pipe\n");
  else if (!RANKS_SLOW)
    RUN(test_core_dump); /* a sanitizer maps terabytes */
  RUN(test_models);
  return TEST_END();
}
