/* hosts.c - Ranks of several hosts, as far as cddp can tell: CDDP_HOST_ID keeps them from sharing
   memory, so they talk by TCP over 127.0.0.1.

   TEST_HOSTS=aab puts three ranks on hosts a, a and b. What they compute must have the bits of
   one host. Connections are cut, filled by strangers, stopped, refused for want of descriptors;
   hosts and their leaders die at each moment: survivors must name the lost rank within seconds.
   Real hosts, in network namespaces, are in tests/ranks/netns.sh. */
#include "../../cddp.h"

#include "../ranks.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <sys/resource.h>

#define MOST 12

typedef struct outcome { /* of a rank */
  uint64_t hash;
  cddp_result result;
  double told;
  char text[512];
} outcome;

typedef struct board {
  outcome ranks[MOST];
  pid_t pids[MOST];
  int locals[MOST];
  int port; /* of a rank's links */
  int turns, stop, out;
  double died;
} board;

static board *shared;

/* Runs fn on n ranks of hosts given by letters, as an array of outcomes in shared. */
static cddp_result run_on(const char *hosts, ranks_fn fn, void *arg, int n) {
  cddp_result r;
  memset(shared, 0, sizeof *shared);
  if (hosts != NULL)
    setenv("TEST_HOSTS", hosts, 1);
  r = ranks_run(fn, arg, n, false);
  unsetenv("TEST_HOSTS");
  return r;
}

/* --- the same bits as on one host ------------------------------------------------------------- */

typedef struct program {
  bool shared_memory; /* buffers from cddp_alloc on all ranks, else on those with an odd number */
  size_t count;
  cddp_dtype dtype;
} program;

static uint64_t hash_bytes(uint64_t h, const void *p, size_t n) {
  const unsigned char *b = (const unsigned char *)p;
  uint64_t word = 0;
  size_t i;
  for (i = 0; i < n; i += 8) {
    memcpy(&word, b + i, n - i < 8 ? n - i : 8);
    h = (h ^ word) * 0x9e3779b97f4a7c15u;
    h ^= h >> 32;
  }
  return h;
}

/* Values whose sum depends on the order; no NaN. */
static void fill(void *p, size_t n, cddp_dtype dtype, uint64_t seed) {
  static const double scales[] = {1, -2, 0.5, -0.25, 4, -1, 0.125, -8};
  size_t i, esize = cddp_dtype_size(dtype);
  for (i = 0; i < n; i++) {
    uint64_t h = ranks_mix(seed, i, 77);
    if (dtype <= CDDP_BF16)
      ranks_store(dtype, p, i, (1 + (double)(h >> 12) * 0x1p-52) * scales[h % 8]);
    else
      memcpy((char *)p + i * esize, &h, esize);
  }
}

typedef struct worker {
  cddp_group *g;
  const program *p;
  char *send, *recv;
  size_t esize;
  int rank, size;
  uint64_t hash, seed;
} worker;

static void renew(worker *k, size_t shares) {
  k->seed++;
  fill(k->send, shares * k->p->count, k->p->dtype, k->seed * 100 + (uint64_t)k->rank);
  memset(k->recv, 0x5a, (size_t)k->size * k->p->count * k->esize);
}

static void note(worker *k, const void *p, size_t shares) {
  k->hash = hash_bytes(k->hash, p, shares * k->p->count * k->esize);
}

static void reductions(worker *k) {
  size_t n = k->p->count, all = (size_t)k->size;
  cddp_dtype t = k->p->dtype;
  cddp_group *g = k->g;
  int op, last = k->size - 1;
  for (op = CDDP_SUM; op <= (t <= CDDP_BF16 ? CDDP_MAX : CDDP_BXOR); op++) {
    renew(k, 1);
    CHECK_OK(cddp_all_reduce(g, k->send, n, t, (cddp_op)op, NULL));
    note(k, k->send, 1);
    if (n > 100000 && op == CDDP_AVG) break;
    if (op == CDDP_MIN || n > 100000) continue;
    renew(k, 1);
    CHECK_OK(cddp_reduce(g, k->send, n, t, (cddp_op)op, op % k->size, NULL));
    note(k, k->send, 1);
    renew(k, all);
    CHECK_OK(cddp_reduce_scatter(g, k->send, k->recv, n, t, (cddp_op)op, NULL));
    note(k, k->recv, 1);
  }
  renew(k, 1);
  CHECK_OK(cddp_broadcast(g, k->send, n, t, last, NULL));
  note(k, k->send, 1);
}

static void movements(worker *k) {
  size_t n = k->p->count, all = (size_t)k->size;
  cddp_dtype t = k->p->dtype;
  cddp_group *g = k->g;
  int last = k->size - 1, next = (k->rank + 1) % k->size, before = (k->rank + last) % k->size;
  cddp_work *w = NULL;
  renew(k, 1);
  CHECK_OK(cddp_all_gather(g, k->send, k->recv, n, t, NULL));
  note(k, k->recv, all);
  renew(k, 1);
  CHECK_OK(cddp_gather(g, k->send, k->recv, n, t, last, NULL));
  if (k->rank == last) note(k, k->recv, all);
  renew(k, all);
  CHECK_OK(cddp_scatter(g, k->send, k->recv, n, t, 1, NULL));
  note(k, k->recv, 1);
  renew(k, all);
  CHECK_OK(cddp_all_to_all(g, k->send, k->recv, n, t, NULL));
  note(k, k->recv, all);
  CHECK_OK(cddp_all_to_all(g, k->recv, k->recv, n, t, NULL));
  note(k, k->recv, all);
  renew(k, 1);
  CHECK_OK(cddp_recv(g, k->recv, n, t, before, 3, &w));
  CHECK_OK(cddp_send(g, k->send, n, t, next, 3, NULL));
  CHECK_OK(cddp_wait(w));
  note(k, k->recv, 1);
}

static int run_program(cddp_group *g, void *arg) {
  static const size_t counts[] = {1, 5, 2500, 9001, 25000}; /* between two ranks: each way */
  static const cddp_dtype dtypes[] = {CDDP_F32, CDDP_F64, CDDP_F16, CDDP_BF16,
                                      CDDP_I8,  CDDP_U8,  CDDP_I32, CDDP_I64};
  bool large = *(const bool *)arg;
  size_t c, d, bytes;
  program p;
  worker k;
  memset(&k, 0, sizeof k);
  k.g = g;
  k.p = &p;
  k.rank = cddp_rank(g);
  k.size = cddp_world_size(g);
  shared->locals[k.rank] = cddp_local_world_size(g);
  for (d = 0; d < (large ? 1 : 8); d += RANKS_TSAN ? 2 : 1)
    for (c = 0; c < (large ? 1 : 5); c++) {
      if (c >= 3 && d % (RANKS_SLOW ? 8 : 2) != 0) continue; /* spot checks */
      p.dtype = dtypes[d];
      p.count = large ? (RANKS_TSAN ? 100001 : 400001) : counts[c];
      p.shared_memory = (c + d) % 2 == 0;
      k.esize = cddp_dtype_size(p.dtype);
      bytes = p.count * k.esize * (size_t)k.size;
      if (p.shared_memory || k.rank % 2 != 0) {
        k.send = (char *)cddp_alloc(g, bytes), k.recv = (char *)cddp_alloc(g, bytes);
      } else {
        k.send = (char *)malloc(bytes), k.recv = (char *)malloc(bytes);
      }
      CHECK(k.send != NULL && k.recv != NULL);
      if (k.send == NULL || k.recv == NULL) return 1;
      reductions(&k);
      movements(&k);
      CHECK_OK(cddp_barrier(g));
      if (p.shared_memory || k.rank % 2 != 0)
        cddp_free(g, k.send), cddp_free(g, k.recv);
      else
        free(k.send), free(k.recv);
    }
  shared->ranks[k.rank].hash = k.hash;
  return 0;
}

/* fn leaves a hash for each rank: that of one host is that of all layouts. */
static void same_everywhere(ranks_fn fn, void *arg, int n, const char *const *layouts) {
  uint64_t want[MOST];
  int r, i;
  CHECK_OK(run_on(NULL, fn, arg, n));
  for (r = 0; r < n; r++) want[r] = shared->ranks[r].hash;
  for (i = 0; layouts[i] != NULL; i++) {
    CHECK_OK(run_on(layouts[i], fn, arg, n));
    for (r = 0; r < n; r++)
      if (shared->ranks[r].hash != want[r])
        test_fail(__FILE__, __LINE__, "layout %s: rank %d differs", layouts[i], r);
    for (r = 0; r < n; r++) CHECK(shared->locals[r] == 0 || shared->locals[r] < n);
  }
}

static void test_collectives(void) {
  static const char *const four[] = {"aabb", "abbb", "abab", NULL};
  static const char *const two[] = {"ab", NULL};
  static const char *const three[] = {"aab", "abc", NULL};
  static const char *const five[] = {"aaabb", NULL}; /* uneven: one rank acts for several */
  bool large = false;
  if (!RANKS_SLOW) same_everywhere(run_program, &large, 2, two);
  if (!RANKS_SLOW) same_everywhere(run_program, &large, 3, three);
  if (!RANKS_SLOW) same_everywhere(run_program, &large, 5, five);
  same_everywhere(run_program, &large, 4, RANKS_SLOW ? four + 1 : four);
}

static void test_large(void) { /* many pieces, slices and buffers of the system */
  static const char *const four[] = {"aabb", "abbb", NULL};
  bool large = true;
  same_everywhere(run_program, &large, 4, four + RANKS_SLOW);
}

static void test_secret(void) { /* links prove that they know it */
  static const char *const three[] = {"aba", NULL};
  bool large = false;
  setenv("CDDP_SECRET", "between hosts", 1);
  same_everywhere(run_program, &large, 3, three);
  unsetenv("CDDP_SECRET");
}

/* Many hosts: leaders pass lines on in rounds. */
static int run_rounds(cddp_group *g, void *arg) {
  int rank = cddp_rank(g), n = cddp_world_size(g), i;
  float x[3000];
  (void)arg;
  for (i = 0; i < 20; i++) {
    size_t count = i % 5 == 4 ? 3000 : 3;
    fill(x, count, CDDP_F32, (uint64_t)(i * 50 + rank));
    CHECK_OK(cddp_all_reduce(g, x, count, CDDP_F32, CDDP_AVG, NULL));
    shared->ranks[rank].hash = hash_bytes(shared->ranks[rank].hash, x, count * sizeof *x);
  }
  CHECK_EQ(cddp_world_size(g), n);
  return 0;
}

static void test_many_hosts(void) {
  static const char *const layouts[] = {"abcdefghijkl", "abcdefghiabc", NULL};
  same_everywhere(run_rounds, NULL, 12, layouts);
}

/* --- data parallel ---------------------------------------------------------------------------- */

enum { WEIGHTS = 9000, BIAS = 7 };

static int run_training(cddp_group *g, void *arg) {
  const bool *options = (const bool *)arg; /* fused, shared weights */
  int rank = cddp_rank(g), step, i;
  static float heap[WEIGHTS];
  static double bias[BIAS];
  float *w = options[1] ? (float *)cddp_alloc(g, sizeof heap) : heap;
  cddp_param p[2];
  cddp_ddp_desc d;
  cddp_sgd_desc o;
  cddp_ddp *ddp;
  cddp_optim *sgd;
  memset(p, 0, sizeof p);
  memset(&d, 0, sizeof d);
  memset(&o, 0, sizeof o);
  fill(w, WEIGHTS, CDDP_F32, (uint64_t)rank + 1);
  fill(bias, BIAS, CDDP_F64, (uint64_t)rank + 50);
  p[0].name = "w", p[0].data = w, p[0].count = WEIGHTS, p[0].dtype = CDDP_F32;
  p[1].name = "b", p[1].data = bias, p[1].count = BIAS, p[1].dtype = CDDP_F64;
  o.lr = 0.1, o.momentum = 0.9;
  CHECK_OK(cddp_ddp_create(&ddp, g, p, 2, &d));
  CHECK_OK(cddp_sgd_create(&sgd, p, 2, &o));
  if (test_failures > 0) return 1;
  for (step = 0; step < 8; step++) {
    fill(p[0].grad, WEIGHTS, CDDP_F32, (uint64_t)(step * 100 + rank));
    fill(p[1].grad, BIAS, CDDP_F64, (uint64_t)(step * 100 + rank + 50));
    cddp_ddp_no_sync(ddp, step == 3);
    for (i = 1; i >= 0; i--) CHECK_OK(cddp_ddp_ready(ddp, i));
    if (step == 3) continue;
    if (options[0]) {
      CHECK_OK(cddp_ddp_step(ddp, sgd));
    } else {
      CHECK_OK(cddp_ddp_wait(ddp));
      CHECK_OK(cddp_optim_step(sgd));
      CHECK_OK(cddp_optim_zero_grad(sgd));
    }
  }
  shared->ranks[rank].hash = hash_bytes(hash_bytes(1, w, sizeof heap), bias, sizeof bias);
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  if (options[1]) cddp_free(g, w);
  return 0;
}

static void test_ddp(void) {
  static const char *const layouts[] = {"abbb", "abab", NULL};
  bool options[2];
  int i;
  for (i = 0; i < 4; i++) {
    options[0] = i & 1;
    options[1] = i & 2;
    same_everywhere(run_training, options, 4, layouts + (i & 1));
  }
}

/* --- groups of some ranks --------------------------------------------------------------------- */

static int run_splits(cddp_group *g, void *arg) {
  static const int listed[] = {3, 0, 1};
  int rank = cddp_rank(g), i;
  bool in = rank != 2;
  (void)arg;
  for (i = 0; i < 5; i++) {
    cddp_group *half = NULL, *some = NULL;
    float x[900];
    int64_t r = rank;
    CHECK_OK(cddp_group_split(g, rank % 2, -rank, &half));
    CHECK_OK(cddp_group_new(g, listed, 3, &some));
    CHECK((some != NULL) == in);
    CHECK_EQ(cddp_world_size(half), 2);
    CHECK_EQ(cddp_rank(half), rank < 2);
    fill(x, 900, CDDP_F32, (uint64_t)(rank + i * 10));
    CHECK_OK(cddp_all_reduce(half, x, 900, CDDP_F32, CDDP_SUM, NULL));
    if (in) {
      CHECK_OK(cddp_all_reduce(some, &r, 1, CDDP_I64, CDDP_SUM, NULL));
      CHECK_EQ(r, 4);
      CHECK_OK(cddp_broadcast(some, x, 900, CDDP_F32, 0, NULL));
    }
    CHECK_OK(cddp_all_reduce(g, x, 900, CDDP_F32, CDDP_MAX, NULL));
    shared->ranks[rank].hash = hash_bytes(shared->ranks[rank].hash, x, sizeof x);
    cddp_destroy(some);
    cddp_destroy(half);
  }
  return 0;
}

static void test_groups(void) {
  static const char *const layouts[] = {"aabb", "abbb", "abcd", NULL};
  same_everywhere(run_splits, NULL, 4, layouts);
}

/* Messages of many sizes and tags, both ways at once, received in another order. */
static int run_mail(cddp_group *g, void *arg) {
  enum { MESSAGES = 12 };
  int me = cddp_rank(g), n = cddp_world_size(g), to = (me + 1) % n, from = (me + n - 1) % n, i;
  static char out[MESSAGES][300000], in[MESSAGES][300000];
  cddp_work *sent[MESSAGES], *got[MESSAGES];
  (void)arg;
  for (i = 0; i < MESSAGES; i++) {
    size_t size = i % 4 == 3 ? sizeof out[0] : (size_t)i * 17;
    fill(out[i], size, CDDP_U8, (uint64_t)(me * 100 + i));
    CHECK_OK(cddp_send(g, out[i], size, CDDP_U8, to, i, &sent[i]));
  }
  for (i = MESSAGES - 1; i >= 0; i--)
    CHECK_OK(cddp_recv(g, in[i], i % 4 == 3 ? sizeof in[0] : (size_t)i * 17, CDDP_U8, from, i,
                       &got[i]));
  for (i = 0; i < MESSAGES; i++) CHECK_OK(cddp_wait(sent[i]));
  for (i = 0; i < MESSAGES; i++) CHECK_OK(cddp_wait(got[i]));
  shared->ranks[me].hash = hash_bytes(9, in, sizeof in);
  return 0;
}

/* Sends that the system has no room for stand in a queue, the first of them half sent. */
static int run_backlog(cddp_group *g, void *arg) {
  enum { N = 3000000 };
  uint32_t *x = (uint32_t *)malloc(N * sizeof *x), i, bad;
  int k;
  (void)arg;
  for (k = 0; k < 3; k++) {
    for (i = 0; i < N && cddp_rank(g) == 0; i++) x[i] = 3 * i + (uint32_t)k;
    if (cddp_rank(g) == 0) {
      CHECK_OK(cddp_send(g, x, N, CDDP_I32, 1, k, NULL));
      __atomic_store_n(&shared->turns, k + 1, __ATOMIC_SEQ_CST);
      continue;
    }
    while (__atomic_load_n(&shared->turns, __ATOMIC_SEQ_CST) < 3) ranks_sleep(0.001);
    CHECK_OK(cddp_recv(g, x, N, CDDP_I32, 0, k, NULL));
    for (i = bad = 0; i < N; i++) bad += x[i] != 3 * i + (uint32_t)k;
    CHECK_EQ(bad, 0);
  }
  CHECK_OK(cddp_barrier(g));
  free(x);
  return 0;
}

/* A message that has come in part, as its sender does something else: into the buffer of its
   receive, which may be given up, time out, or not be the only one of its tag. */
#define HALVES 20000000 /* more than the system takes */
static int run_halves(cddp_group *g, void *arg) {
  enum { TURNS = 4 };
  int32_t *x = (int32_t *)malloc(HALVES * sizeof *x), other = 0;
  int me = cddp_rank(g), turn, i, bad;
  cddp_work *w, *w2;
  bool done;
  double until;
  (void)arg;
  for (turn = 0; turn < TURNS; turn++) {
    for (i = 0; i < HALVES; i++) x[i] = me == 0 ? 3 * i + turn : -1;
    CHECK_OK(cddp_barrier(g));
    if (me == 1) __atomic_store_n(&shared->out, turn + 1, __ATOMIC_SEQ_CST);
    if (me == 0) {
      until = test_now() + RANKS_WITHIN(30); /* or it would come while rank 1 is in the barrier */
      while (__atomic_load_n(&shared->out, __ATOMIC_SEQ_CST) <= turn && test_now() < until)
        ranks_sleep(0.001);
      CHECK_OK(cddp_send(g, x, HALVES, CDDP_I32, 1, 5, &w));
      __atomic_store_n(&shared->stop, turn + 1, __ATOMIC_SEQ_CST);
      until = test_now() + RANKS_WITHIN(30);
      while (__atomic_load_n(&shared->turns, __ATOMIC_SEQ_CST) <= turn && test_now() < until)
        ranks_sleep(0.001);
      CHECK_OK(cddp_wait(w));
      if (turn == 3) CHECK_OK(cddp_send(g, &turn, 1, CDDP_I32, 1, 5, NULL));
    }
    if (me == 1) {
      until = test_now() + RANKS_WITHIN(30);
      while (__atomic_load_n(&shared->stop, __ATOMIC_SEQ_CST) <= turn && test_now() < until)
        ranks_sleep(0.001);
      CHECK_OK(cddp_recv(g, x, HALVES, CDDP_I32, 0, 5, &w));
      if (turn == 3) CHECK_OK(cddp_recv(g, &other, 1, CDDP_I32, 0, 5, &w2));
      for (until = test_now() + 0.3, done = false; !done && test_now() < until;)
        CHECK_OK(cddp_test(w, &done));
      CHECK(!done);
      CHECK_EQ(x[0], turn); /* it is in place */
      CHECK(x[HALVES - 1] == -1);
      CHECK_IS(cddp_wait_for(w, 0.01), CDDP_TIMEOUT);
      if (turn == 1) { /* given up: the buffer is this rank's, and the next receive gets all */
        CHECK_OK(cddp_cancel(w));
        for (i = 0; i < HALVES; i++) x[i] = -2;
      }
      __atomic_store_n(&shared->turns, turn + 1, __ATOMIC_SEQ_CST);
      if (turn == 1) {
        ranks_sleep(0.1);
        for (i = bad = 0; i < HALVES; i++) bad += x[i] != -2;
        CHECK_EQ(bad, 0);
        CHECK_OK(cddp_recv(g, x, HALVES, CDDP_I32, CDDP_ANY, 5, &w));
      }
      if (turn == 3) CHECK_OK(cddp_wait(w2));
      CHECK_OK(cddp_wait(w));
      for (i = bad = 0; i < HALVES; i++) bad += x[i] != 3 * i + turn;
      CHECK_EQ(bad, 0);
      CHECK_EQ(other, turn == 3 ? 3 : 0);
      CHECK_EQ(cddp_source(), 0);
    }
    CHECK_OK(cddp_barrier(g));
  }
  free(x);
  return 0;
}

/* A receiver that is late, as one that writes a checkpoint: LATE=40 is more than the 20 s after
   which a host that answers nothing is given up. */
static int run_late(cddp_group *g, void *arg) {
  enum { N = 8000000 };
  const char *late = getenv("LATE");
  float *x = (float *)malloc(N * sizeof *x);
  int i, bad = 0;
  (void)arg;
  for (i = 0; i < N; i++) x[i] = cddp_rank(g) == 0 ? (float)i : 0;
  if (cddp_rank(g) == 1) ranks_sleep(late != NULL ? atof(late) : 0.5);
  if (cddp_rank(g) == 0) CHECK_OK(cddp_send(g, x, N, CDDP_F32, 1, 0, NULL));
  if (cddp_rank(g) == 1) CHECK_OK(cddp_recv(g, x, N, CDDP_F32, 0, 0, NULL));
  for (i = 0; i < N; i++) bad += x[i] != (float)i;
  CHECK_EQ(bad, 0);
  CHECK_OK(cddp_barrier(g));
  free(x);
  return 0;
}

/* Messages without a recv, both ways at once as the first thing in a group, lie before what
   collectives send on the same connection; another thread goes on with messages meanwhile. */
typedef struct chat {
  cddp_group *g;
  int rank, turns, wrong;
} chat;

static void *chatter(void *arg) {
  chat *c = (chat *)arg;
  int i, n = cddp_world_size(c->g), to = (c->rank + 1) % n, from = (c->rank + n - 1) % n;
  cddp_work *w;
  for (i = 0; i < c->turns; i++) {
    int32_t out = i * 10 + c->rank, in = -1;
    bool ok = cddp_recv(c->g, &in, 1, CDDP_I32, from, 900, &w) == CDDP_OK;
    ok = ok && cddp_send(c->g, &out, 1, CDDP_I32, to, 900, NULL) == CDDP_OK;
    c->wrong += !ok || cddp_wait(w) != CDDP_OK || in != i * 10 + from;
  }
  return NULL;
}

static int run_mixed(cddp_group *g, void *arg) {
  enum { UNREAD = 8, N = 300000 };
  int me = cddp_rank(g), n = cddp_world_size(g), to = (me + 1) % n, from = (me + n - 1) % n, i;
  static float out[N], in[N], x[50000];
  cddp_work *sent[UNREAD], *sums[3];
  pthread_t thread;
  chat c;
  (void)arg;
  c.g = g, c.rank = me, c.wrong = 0, c.turns = RANKS_SLOW ? 50 : 400;
  for (i = 0; i < UNREAD; i++) {
    out[0] = (float)(me * 100 + i);
    CHECK_OK(cddp_send(g, out, i % 2 ? N : 1, CDDP_F32, to, i, &sent[i]));
    CHECK_OK(cddp_wait(sent[i]));
  }
  CHECK(pthread_create(&thread, NULL, chatter, &c) == 0);
  for (i = 0; i < 60; i++) {
    fill(x, 50000, CDDP_F32, (uint64_t)(i * 50 + me));
    CHECK_OK(cddp_all_reduce(g, x, i % 2 ? 50000 : 3, CDDP_F32, CDDP_SUM, &sums[i % 3]));
    CHECK_OK(cddp_wait(sums[i % 3]));
    shared->ranks[me].hash = hash_bytes(shared->ranks[me].hash, x, sizeof x);
  }
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK_EQ(c.wrong, 0);
  for (i = UNREAD - 1; i >= 0; i--) {
    CHECK_OK(cddp_recv(g, in, i % 2 ? N : 1, CDDP_F32, from, i, NULL));
    CHECK(in[0] == (float)(from * 100 + i));
  }
  return 0;
}

static void test_mixed(void) {
  static const char *const layouts[] = {"abc", "aab", NULL};
  static const char *const two[] = {"ab", NULL};
  same_everywhere(run_mixed, NULL, 2, two);
  same_everywhere(run_mixed, NULL, 3, layouts + RANKS_SLOW);
}

/* Messages to a rank to which a piece of a collective is half sent, by the thread that has begun
   it: they go behind that piece. */
static int run_beside_gather(cddp_group *g, void *arg) {
  enum { N = 4 << 20 };
  int me = cddp_rank(g), i, k;
  unsigned char *x = (unsigned char *)malloc(N), *all = (unsigned char *)malloc(2 * (size_t)N);
  cddp_work *w;
  (void)arg;
  CHECK(x != NULL && all != NULL);
  if (x == NULL || all == NULL) return 1;
  for (i = 0; i < (RANKS_SLOW ? 8 : 40); i++) {
    memset(x, 10 * i + me, N);
    CHECK_OK(cddp_all_gather(g, x, all, N, CDDP_U8, &w));
    ranks_sleep(5e-4 * (i % 4));
    for (k = 0; k < 20; k++) {
      int32_t number = i * 20 + k;
      if (me == 0) CHECK_OK(cddp_send(g, &number, 1, CDDP_I32, 1, 3, NULL));
      if (me == 1) CHECK_OK(cddp_recv(g, &number, 1, CDDP_I32, 0, 3, NULL));
      CHECK_EQ(number, i * 20 + k);
    }
    CHECK_OK(cddp_wait(w));
    CHECK(all[0] == (unsigned char)(10 * i) && all[2 * N - 1] == (unsigned char)(10 * i + 1));
  }
  free(x);
  free(all);
  return 0;
}

static void test_beside_gather(void) { CHECK_OK(run_on("ab", run_beside_gather, NULL, 2)); }

static void test_late_receiver(void) {
  setenv("CDDP_TIMEOUT_S", "120", 1);
  CHECK_OK(run_on("ab", run_late, NULL, 2));
  setenv("CDDP_TIMEOUT_S", RANKS_SLOW ? "120" : "30", 1);
}

static void test_mail(void) {
  static const char *const layouts[] = {"aab", "abc", NULL};
  same_everywhere(run_mail, NULL, 3, layouts);
  CHECK_OK(run_on("ab", run_backlog, NULL, 2));
  CHECK_OK(run_on("ab", run_halves, NULL, 2));
}

/* The first message between two ranks that lead no host: its receiver waits for it while its sender
   computes for 6 s, and so cannot prove that it knows the secret. Other tests run beside it. */
static pid_t computing[4];

static int compute_after_send(int rank, void *arg) {
  cddp_group *g;
  float x = rank == 1 ? 42 : 0;
  (void)arg;
  CHECK_OK(cddp_init(&g, NULL));
  if (g == NULL) return 1;
  if (rank == 1) CHECK_OK(cddp_send(g, &x, 1, CDDP_F32, 3, 0, NULL));
  if (rank == 1) ranks_sleep(6);
  if (rank == 3) CHECK_OK(cddp_recv(g, &x, 1, CDDP_F32, 1, 0, NULL));
  CHECK(rank != 3 || x == 42);
  CHECK_OK(cddp_barrier(g));
  cddp_destroy(g);
  return 0;
}

static void begin_computing(void) {
  setenv("TEST_HOSTS", "aabb", 1);
  setenv("CDDP_SECRET", "between hosts", 1);
  ranks_begin(compute_after_send, NULL, 4, computing);
  unsetenv("CDDP_SECRET");
  unsetenv("TEST_HOSTS");
  unsetenv("CDDP_HOST_ID");
}

static void test_computing_sender(void) {
  int status[4];
  if (computing[0] == 0) begin_computing();
  ranks_join(computing, 4, 40, status);
  CHECK(ranks_exited_well(status, 4));
}

/* --- failures --------------------------------------------------------------------------------- */

enum { KILLED, STOPPED, LEFT, OTHER_CALL, OTHER_COUNT, NO_SHARE };
static double absent; /* seconds that the ranks of host a spend elsewhere when trouble comes */

typedef struct trouble {
  const char *hosts;
  int n, how;
  unsigned who; /* bit for each rank that makes it */
  double timeout;
  size_t count; /* of the call in question; 0: 2 */
} trouble;

static int in_trouble(int rank, void *arg) {
  const trouble *t = (const trouble *)arg;
  outcome *mine = &shared->ranks[rank];
  bool culprit = t->who >> rank & 1;
  static float x[50000];
  cddp_group *g;
  int i;
  shared->pids[rank] = getpid();
  CHECK_OK(cddp_init(&g, NULL));
  if (g == NULL) return 1;
  for (i = 0; mine->result == CDDP_OK && i < 1000; i++) {
    size_t count = i % 3 == 2 ? 50000 : i == 7 && t->count > 0 ? t->count : 2;
    if (i == 7 && t->hosts[rank] == 'a') ranks_sleep(absent);
    if (i == 7 && culprit) {
      shared->died = test_now();
      if (t->how == KILLED) raise(SIGKILL);
      if (t->how == STOPPED) raise(SIGSTOP);
      if (t->how == LEFT) break;
      if (t->how == OTHER_COUNT) count++;
      if (t->how == NO_SHARE) count = 1;
    }
    if (i == 7 && culprit && t->how == OTHER_CALL)
      mine->result = cddp_broadcast(g, x, count, CDDP_F32, 0, NULL);
    else
      mine->result = cddp_all_reduce(g, x, count, CDDP_F32, CDDP_SUM, NULL);
  }
  mine->told = test_now();
  snprintf(mine->text, sizeof mine->text, "%s", cddp_error());
  if (mine->result != CDDP_OK) CHECK_IS(cddp_barrier(g), mine->result); /* at once, alike */
  cddp_destroy(g);
  CHECK(test_now() - mine->told < RANKS_WITHIN(3));
  return 0;
}

static void in_trouble_all(const trouble *t, int *status) {
  pid_t pids[MOST];
  trouble copy = *t;
  int i, port = ranks_free_port();
  double deadline;
  memset(shared, 0, sizeof *shared);
  setenv("TEST_HOSTS", t->hosts, 1);
  for (i = 0; i < t->n; i++) {
    ranks_environment(i, t->n, port);
    if (t->timeout > 0) ranks_setenv("CDDP_TIMEOUT_S", (long)t->timeout);
    pids[i] = ranks_fork(in_trouble, i, &copy);
  }
  setenv("CDDP_TIMEOUT_S", RANKS_SLOW ? "120" : "30", 1);
  unsetenv("TEST_HOSTS");
  unsetenv("CDDP_HOST_ID");
  deadline = test_now() + 60;
  for (i = 0; i < t->n && t->how == STOPPED; i++) /* they are stopped still when the others end */
    while (!(t->who >> i & 1) && shared->ranks[i].told == 0 && test_now() < deadline)
      ranks_sleep(0.005);
  for (i = 0; i < t->n && t->how == STOPPED; i++)
    if (t->who >> i & 1) kill(pids[i], SIGKILL);
  ranks_join(pids, t->n, 60, status);
}

/* Every rank but the culprits gets `want` and a text with one of the words. */
static void expect(const trouble *t, cddp_result want, double within, const char *word,
                   const char *other) {
  int status[MOST], r;
  in_trouble_all(t, status);
  for (r = 0; r < t->n; r++) {
    const outcome *o = &shared->ranks[r];
    if ((t->who >> r & 1) && t->how <= LEFT) continue;
    CHECK(status[r] == 0);
    if (o->result != want || (strstr(o->text, word) == NULL && strstr(o->text, other) == NULL))
      test_fail(__FILE__, __LINE__, "%s, rank %d: %s: %s", t->hosts, r,
                cddp_result_name(o->result), o->text);
    test_count();
    if (o->told - shared->died > RANKS_WITHIN(within))
      test_fail(__FILE__, __LINE__, "%s, rank %d knew after %.2f s", t->hosts, r,
                o->told - shared->died);
  }
}

static void test_killed(void) {
  static const char *const hosts[] = {"aabb", "abbb", "abab", "abcd"};
  trouble t;
  int i;
  memset(&t, 0, sizeof t);
  t.n = 4;
  t.how = KILLED;
  for (i = 0; i < 4; i++) {
    t.hosts = hosts[i];
    t.who = 1u << (i == 2 ? 0 : 3);
    expect(&t, CDDP_PEER_LOST, 2, i == 2 ? "rank 0 (pid" : "rank 3 (pid", "signal 9");
  }
  t.hosts = "aabb"; /* a whole host */
  t.who = 12;
  expect(&t, CDDP_PEER_LOST, 2, "rank 2 (pid", "rank 3 (pid");
  t.who = 3;
  expect(&t, CDDP_PEER_LOST, 2, "rank 0 (pid", "rank 1 (pid");
}

/* The sender of a message that has come in part is killed: its receive fails, and nothing is
   written there any more. */
static int half_lost(int rank, void *arg) {
  int32_t *x = (int32_t *)calloc(HALVES, sizeof *x);
  cddp_group *g;
  cddp_work *w;
  int i, bad;
  (void)arg;
  for (i = 0; i < HALVES && rank == 0; i++) x[i] = i + 1;
  CHECK_OK(cddp_init(&g, NULL));
  CHECK_OK(cddp_barrier(g));
  if (rank == 1) __atomic_store_n(&shared->out, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&shared->out, __ATOMIC_SEQ_CST) == 0) ranks_sleep(0.001);
  if (rank == 0) {
    CHECK_OK(cddp_send(g, x, HALVES, CDDP_I32, 1, 5, &w));
    __atomic_store_n(&shared->stop, 1, __ATOMIC_SEQ_CST);
    ranks_sleep(0.3);
    raise(SIGKILL);
  }
  while (__atomic_load_n(&shared->stop, __ATOMIC_SEQ_CST) == 0) ranks_sleep(0.001);
  CHECK_OK(cddp_recv(g, x, HALVES, CDDP_I32, 0, 5, &w));
  CHECK_IS(cddp_wait(w), CDDP_PEER_LOST);
  CHECK(strstr(cddp_error(), "rank 0") != NULL);
  CHECK_EQ(x[0], 1);
  CHECK(x[HALVES - 1] == 0);
  memset(x, 255, HALVES * sizeof *x);
  CHECK_IS(cddp_barrier(g), CDDP_PEER_LOST);
  for (i = bad = 0; i < HALVES; i++) bad += x[i] != -1;
  CHECK_EQ(bad, 0);
  cddp_destroy(g);
  free(x);
  return 0;
}

static void test_half_lost(void) {
  pid_t pids[2];
  int status[2], r, port = ranks_free_port();
  memset(shared, 0, sizeof *shared);
  setenv("TEST_HOSTS", "ab", 1);
  for (r = 0; r < 2; r++) {
    ranks_environment(r, 2, port);
    pids[r] = ranks_fork(half_lost, r, NULL);
  }
  unsetenv("TEST_HOSTS");
  unsetenv("CDDP_HOST_ID");
  ranks_join(pids, 2, 60, status);
  CHECK_EQ(status[1], 0);
}

/* Nobody of host a was in a call of cddp when a rank of host b died, and the others gave up. */
static void test_killed_unseen(void) {
  static const char *const secrets[] = {NULL, "known to the ranks"};
  trouble t;
  int i;
  memset(&t, 0, sizeof t);
  t.n = 4;
  t.how = KILLED;
  t.hosts = "aabb";
  t.who = 8;
  absent = 1.2;
  for (i = 0; i < 2; i++) {
    if (secrets[i] != NULL) setenv("CDDP_SECRET", secrets[i], 1);
    expect(&t, CDDP_PEER_LOST, 3, "killed by signal 9", "killed by signal 9");
  }
  unsetenv("CDDP_SECRET");
  absent = 0;
}

static void test_stopped(void) {
  trouble t;
  memset(&t, 0, sizeof t);
  t.hosts = "aabb";
  t.n = 4;
  t.how = STOPPED;
  t.timeout = 1;
  t.who = 8;
  expect(&t, CDDP_TIMEOUT, 3, "rank 3 (pid", "rank 3 (pid");
  t.who = 12; /* a whole host: its leader is named */
  expect(&t, CDDP_TIMEOUT, 3, "rank 2 (pid", "rank 3 (pid");
}

/* Ranks of two hosts wait for each other in different groups. Who times out later says so. */
static int wait_apart(cddp_group *g, void *arg) {
  int rank = cddp_rank(g);
  outcome *mine = &shared->ranks[rank];
  cddp_group *sub = NULL;
  (void)arg;
  CHECK_OK(cddp_group_split(g, 0, rank, &sub));
  if (rank == 1) ranks_sleep(0.5);
  mine->result = cddp_barrier(rank == 0 ? g : sub);
  snprintf(mine->text, sizeof mine->text, "%s", cddp_error());
  __atomic_add_fetch(&shared->turns, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&shared->turns, __ATOMIC_SEQ_CST) < 2) ranks_sleep(0.01);
  cddp_destroy(sub);
  return 0;
}

static void test_waits_apart(void) {
  ranks_setenv("CDDP_TIMEOUT_S", (long)RANKS_WITHIN(1.0));
  CHECK_OK(run_on("ab", wait_apart, NULL, 2));
  setenv("CDDP_TIMEOUT_S", RANKS_SLOW ? "120" : "30", 1);
  CHECK_IS(shared->ranks[0].result, CDDP_TIMEOUT);
  CHECK_IS(shared->ranks[1].result, CDDP_TIMEOUT);
  if (strstr(shared->ranks[1].text, "call 1 of the group") == NULL ||
      strstr(shared->ranks[1].text, "another group failed: timed out") == NULL)
    test_fail(__FILE__, __LINE__, "rank 1: %s", shared->ranks[1].text);
  test_count();
}

static void test_left(void) {
  trouble t;
  memset(&t, 0, sizeof t);
  t.hosts = "abb";
  t.n = 3;
  t.how = LEFT;
  t.who = 4;
  expect(&t, CDDP_PEER_LOST, 2, "rank 2 (pid", "rank 2 (pid");
  t.who = 1;
  expect(&t, CDDP_PEER_LOST, 2, "rank 0 (pid", "rank 0 (pid");
}

/* Rank 1 left a group long before a rank of the other host first receives from it there. */
static int left_long_ago(cddp_group *g, void *arg) {
  int rank = cddp_rank(g), i;
  cddp_group *sub = NULL, *other = NULL;
  float x = 0;
  (void)arg;
  CHECK_OK(cddp_group_split(g, 0, 0, &sub));
  CHECK_OK(cddp_barrier(g));
  if (rank == 1) cddp_destroy(sub);
  for (i = 0; i < 270; i++) {
    CHECK_OK(cddp_group_split(g, rank > 0 ? 0 : -1, 0, &other));
    cddp_destroy(other);
  }
  CHECK_OK(cddp_barrier(g));
  if (rank == 2) CHECK_IS(cddp_recv(sub, &x, 1, CDDP_F32, 1, 7, NULL), CDDP_PEER_LOST);
  if (rank == 2) CHECK(strstr(cddp_error(), "left the group") != NULL);
  CHECK_OK(cddp_barrier(g));
  if (rank != 1) cddp_destroy(sub);
  return 0;
}

static void test_left_long_ago(void) {
  ranks_setenv("CDDP_TIMEOUT_S", (long)RANKS_WITHIN(5.0));
  CHECK_OK(run_on("aab", left_long_ago, NULL, 3));
  setenv("CDDP_TIMEOUT_S", RANKS_SLOW ? "120" : "30", 1);
}

/* Rank 2 leaves a group, for which rank 0 leaves the first group: at once, or, handled, after
   another call. Only at once is that the cause of what fails later. */
static int earlier_loss(int rank, void *arg) {
  bool handled = *(const bool *)arg;
  cddp_group *g = NULL, *sub = NULL;
  float x = 0;
  CHECK_OK(cddp_init(&g, NULL));
  CHECK_OK(cddp_group_split(g, 0, 0, &sub));
  if (rank == 0) CHECK_IS(cddp_barrier(sub), CDDP_PEER_LOST);
  if (rank != 1) cddp_destroy(sub);
  if (handled) CHECK_OK(cddp_barrier(g));
  if (rank == 1) {
    CHECK_IS(cddp_recv(g, &x, 1, CDDP_F32, 0, 1, NULL), CDDP_PEER_LOST);
    CHECK(strncmp(cddp_error(), "rank 0", 6) == 0);
    CHECK((strstr(cddp_error(), "in another group: rank 2") == NULL) == handled);
    __atomic_store_n(&shared->stop, 1, __ATOMIC_SEQ_CST);
  }
  while (rank == 2 && !__atomic_load_n(&shared->stop, __ATOMIC_SEQ_CST)) ranks_sleep(0.001);
  if (rank == 1) cddp_destroy(sub);
  cddp_destroy(g);
  return 0;
}

static void test_earlier_loss(void) {
  int status[3], i;
  for (i = 0; i < 2; i++) {
    bool handled = i == 1;
    memset(shared, 0, sizeof *shared);
    setenv("TEST_HOSTS", "abc", 1);
    ranks_script(earlier_loss, &handled, 3, 60, status);
    unsetenv("TEST_HOSTS");
    unsetenv("CDDP_HOST_ID");
    CHECK(ranks_exited_well(status, 3));
  }
}

/* --- a forked child lives on ------------------------------------------------------------------ */

/* A child as data loaders are, that has nothing to do with cddp; it ends with the test. */
static pid_t fork_sleeper(void) {
  pid_t pid = fork();
  double end = test_now() + 60;
  if (pid != 0) return pid;
  while (!__atomic_load_n(&shared->stop, __ATOMIC_SEQ_CST) && test_now() < end) ranks_sleep(0.01);
  _exit(0);
}

static int survived_by_child(int rank, void *arg) {
  outcome *mine = &shared->ranks[rank];
  float x[2] = {1, 1};
  cddp_group *g;
  int i;
  (void)arg;
  CHECK_OK(cddp_init(&g, NULL));
  if (g == NULL) return 1;
  for (i = 0; mine->result == CDDP_OK && i < 1000; i++) {
    mine->result = cddp_all_reduce(g, x, 2, CDDP_F32, CDDP_SUM, NULL);
    if (i != 3 || rank != 1) continue;
    CHECK(fork_sleeper() > 0);
    shared->died = test_now();
    raise(SIGKILL);
  }
  mine->told = test_now();
  snprintf(mine->text, sizeof mine->text, "%s", cddp_error());
  cddp_destroy(g);
  return 0;
}

/* Rank 1 of 3 has a child when it dies while all meet: rank 2 never comes. */
static void *meet_in_vain(void *arg) {
  cddp_group *g;
  return cddp_init(&g, NULL) != CDDP_OK ? arg : NULL;
}

static int dead_before_meeting(int rank, void *arg) {
  outcome *mine = &shared->ranks[rank];
  pthread_t thread;
  cddp_group *g;
  (void)arg;
  if (rank == 2) return 0;
  if (rank == 0) {
    mine->result = cddp_init(&g, NULL);
    mine->told = test_now();
    snprintf(mine->text, sizeof mine->text, "%s", cddp_error());
    return 0;
  }
  CHECK(pthread_create(&thread, NULL, meet_in_vain, NULL) == 0);
  ranks_sleep(RANKS_WITHIN(0.3));
  CHECK(fork_sleeper() > 0);
  shared->died = test_now();
  return raise(SIGKILL);
}

static void test_child_lives_on(void) {
  int (*const lives[])(int, void *) = {survived_by_child, dead_before_meeting};
  int status[3], i, r;
  for (i = 0; i < 2; i++) {
    memset(shared, 0, sizeof *shared);
    setenv("TEST_HOSTS", "abc", 1);
    ranks_setenv("CDDP_TIMEOUT_S", (long)RANKS_WITHIN(6.0)); /* to meet, on a busy machine */
    ranks_script(lives[i], NULL, 3, 100, status);
    setenv("CDDP_TIMEOUT_S", RANKS_SLOW ? "120" : "30", 1);
    unsetenv("TEST_HOSTS");
    unsetenv("CDDP_HOST_ID");
    __atomic_store_n(&shared->stop, 1, __ATOMIC_SEQ_CST);
    for (r = 0; r < 3 - i; r += 2) {
      const outcome *o = &shared->ranks[r];
      CHECK(status[r] == 0);
      CHECK_IS(o->result, CDDP_PEER_LOST);
      if (strstr(o->text, "rank 1") == NULL || o->told - shared->died > RANKS_WITHIN(2))
        test_fail(__FILE__, __LINE__, "case %d, rank %d, after %.2f s: %s", i, r,
                  o->told - shared->died, o->text);
      test_count();
    }
  }
}

/* --- who died first --- */

enum { GO_ON, EXIT, LEAVE, MATES };      /* the dead rank's host-mates: see meet_the_end */
enum { SMALL, LARGE, BETWEEN, MAIL, WORKS }; /* what all do meanwhile */

typedef struct ending {
  const char *hosts;
  int n, victim, work, mates;
  uint64_t seed;
} ending;

static cddp_result work_once(cddp_group *g, const ending *e, int turn) {
  static float x[50000];
  int rank = cddp_rank(g), n = cddp_world_size(g);
  cddp_work *w = NULL;
  cddp_result r, sent;
  if (e->work == BETWEEN)
    ranks_sleep((double)(ranks_mix(e->seed, (uint64_t)turn, (uint64_t)rank) % 2000) * 1e-6);
  if (e->work != MAIL)
    return cddp_all_reduce(g, x, e->work == LARGE ? 50000 : 2, CDDP_F32, CDDP_SUM, NULL);
  if ((r = cddp_recv(g, x, 5, CDDP_F32, (rank + n - 1) % n, 0, &w)) != CDDP_OK) return r;
  sent = cddp_send(g, x + 9, 5, CDDP_F32, (rank + 1) % n, 0, NULL);
  r = cddp_wait(w);
  return sent != CDDP_OK ? sent : r;
}

/* Works until it fails. Of the dead rank's host-mates some exit then without a word, and some leave
   a group that is healthy still, because they have seen the death by themselves. */
static int meet_the_end(int rank, void *arg) {
  const ending *e = (const ending *)arg;
  outcome *mine = &shared->ranks[rank];
  bool mate = e->hosts[rank] == e->hosts[e->victim], last;
  cddp_group *g = NULL;
  int turn;
  CHECK_OK(cddp_init(&g, NULL));
  if (g == NULL) return 1;
  for (turn = 0; mine->result == CDDP_OK; turn++) {
    if (turn == 3) __atomic_add_fetch(&shared->turns, 1, __ATOMIC_SEQ_CST);
    last = turn == 7 && mate && e->mates == LEAVE;
    while (last && !__atomic_load_n(&shared->stop, __ATOMIC_SEQ_CST)) ranks_sleep(2e-4);
    if (last) break;
    mine->result = work_once(g, e, turn);
  }
  if (mine->result != CDDP_OK) snprintf(mine->text, sizeof mine->text, "%s", cddp_error());
  mine->told = test_now();
  if (mate && e->mates == EXIT) _exit(0);
  cddp_destroy(g);
  return 0;
}

static void end_one(const ending *e) {
  pid_t pids[MOST];
  ending copy = *e;
  siginfo_t info;
  char who[64];
  int status[MOST], i, port = ranks_free_port();
  double deadline = test_now() + 60;
  memset(shared, 0, sizeof *shared);
  setenv("TEST_HOSTS", e->hosts, 1);
  for (i = 0; i < e->n; i++) {
    ranks_environment(i, e->n, port);
    pids[i] = ranks_fork(meet_the_end, i, &copy);
  }
  unsetenv("TEST_HOSTS");
  unsetenv("CDDP_HOST_ID");
  while (__atomic_load_n(&shared->turns, __ATOMIC_SEQ_CST) < e->n && test_now() < deadline)
    ranks_sleep(2e-4);
  ranks_sleep((double)(ranks_mix(e->seed, 1, 1) % 1000) * 2e-6);
  shared->died = test_now();
  kill(pids[e->victim], SIGKILL);
  waitid(P_PID, (id_t)pids[e->victim], &info, WEXITED | WNOWAIT); /* it stays, to be looked at */
  __atomic_store_n(&shared->stop, 1, __ATOMIC_SEQ_CST);
  snprintf(who, sizeof who, "rank %d (pid %d on ", e->victim, (int)pids[e->victim]);
  for (i = 0; i < e->n; i++) {
    const outcome *o = &shared->ranks[i];
    if (i == e->victim) continue;
    ranks_join(&pids[i], 1, 60, &status[i]);
    CHECK(status[i] == 0);
    if (e->mates == LEAVE && e->hosts[i] == e->hosts[e->victim] && o->result == CDDP_OK) continue;
    test_count();
    if (o->result != CDDP_PEER_LOST || strncmp(o->text, who, strlen(who)) != 0 ||
        strstr(o->text, "was killed by signal 9") == NULL)
      test_fail(__FILE__, __LINE__, "%s, seed %d, rank %d dies, work %d, mates %d; rank %d: %s: %s",
                e->hosts, (int)e->seed, e->victim, e->work, e->mates, i,
                cddp_result_name(o->result), o->text);
    CHECK(o->told - shared->died < RANKS_WITHIN(2));
  }
  ranks_join(&pids[e->victim], 1, 60, &status[e->victim]);
}

/* Whoever fails because of a death names the dead and how it died, on the other hosts too, however
   its host-mates end. */
static void test_first_cause(void) {
  static const char *const layouts[] = {"aabb", "aabbcc", "abab", "abcabc"};
  const char *more = getenv("SEEDS"); /* SEEDS=1000 ONLY=test_first_cause build/plain/hosts */
  int seeds = more != NULL ? atoi(more) : RANKS_SLOW ? 12 : 18, i;
  for (i = 0; i < seeds; i++) {
    ending e;
    e.seed = (uint64_t)i;
    e.hosts = layouts[ranks_mix(e.seed, 2, 0) % 4];
    e.n = (int)strlen(e.hosts);
    e.victim = (int)(ranks_mix(e.seed, 3, 0) % (uint64_t)e.n);
    e.work = i % WORKS;
    e.mates = i / WORKS % MATES;
    if (i % 2 == 1) setenv("CDDP_SECRET", "known to the ranks", 1);
    end_one(&e);
    unsetenv("CDDP_SECRET");
  }
}

static void test_mismatch(void) {
  trouble t;
  memset(&t, 0, sizeof t);
  t.hosts = "aabb";
  t.n = 4;
  t.how = OTHER_CALL;
  t.who = 8;
  expect(&t, CDDP_MISMATCH, 2, "rank 3 called broadcast(count 2, f32, root 0)", "?");
  t.how = OTHER_COUNT;
  t.who = 2;
  expect(&t, CDDP_MISMATCH, 2, "rank 1 called all_reduce(count 3, f32, sum)", "?");
}

/* Shares that ride with the lines of a step: leaders then expect messages of other lengths. */
static void test_mismatch_riding(void) {
  static const char *const words[] = {"broadcast(count 600, f32, root 0)",
                                      "all_reduce(count 601, f32, sum)",
                                      "all_reduce(count 1, f32, sum)"};
  trouble t;
  int i;
  char text[96];
  memset(&t, 0, sizeof t);
  t.count = 600;
  for (i = 0; i < 6; i++) {
    t.hosts = i % 2 ? "abc" : "aabb";
    t.n = (int)strlen(t.hosts);
    t.how = OTHER_CALL + i / 2;
    t.who = 1u << (i < 3 ? 0 : 2); /* a leader */
    snprintf(text, sizeof text, "rank %d called %s", i < 3 ? 0 : 2, words[i / 2]);
    expect(&t, CDDP_MISMATCH, 2, text, "?");
  }
}

/* --- strangers at a rank's port --------------------------------------------------------------- */

/* The port of the one socket of this process that listens on an IPv4 or IPv6 address; 0: none. */
static int listening_port(void) {
  int fd;
  for (fd = 3; fd < 256; fd++) {
    struct sockaddr_in a;
    int listens = 0;
    socklen_t n = sizeof listens, size = sizeof a;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &n) != 0 || !listens) continue;
    if (getsockname(fd, (struct sockaddr *)&a, &size) == 0 && a.sin_family == AF_INET)
      return ntohs(a.sin_port);
  }
  return 0;
}

/* A forked child keeps no rank's listening socket open. */
static int fork_deaf(cddp_group *g, void *arg) {
  int status = -1;
  pid_t pid;
  (void)g;
  (void)arg;
  CHECK(listening_port() != 0);
  if ((pid = fork()) == 0) _exit(listening_port() != 0);
  CHECK(waitpid(pid, &status, 0) == pid && status == 0);
  return test_failures != 0;
}

static void test_child_is_deaf(void) {
  setenv("TEST_HOSTS", "aab", 1);
  CHECK_OK(ranks_run(fork_deaf, NULL, 3, false));
  unsetenv("TEST_HOSTS");
  unsetenv("CDDP_HOST_ID");
}

static int run_among_strangers(cddp_group *g, void *arg) {
  int64_t x[40], i;
  int turn;
  (void)arg;
  if (cddp_rank(g) == 1) __atomic_store_n(&shared->port, listening_port(), __ATOMIC_SEQ_CST);
  for (turn = 0; turn < 100000; turn++) {
    int64_t stop = __atomic_load_n(&shared->stop, __ATOMIC_SEQ_CST);
    for (i = 0; i < 40; i++) x[i] = i + turn + cddp_rank(g);
    CHECK_OK(cddp_all_reduce(g, x, 40, CDDP_I64, CDDP_SUM, NULL));
    for (i = 0; i < 40; i++) CHECK(x[i] == 3 * (i + turn) + 3);
    CHECK_OK(cddp_all_reduce(g, &stop, 1, CDDP_I64, CDDP_MAX, NULL));
    __atomic_store_n(&shared->turns, turn, __ATOMIC_SEQ_CST);
    if (stop || test_failures > 0) break;
  }
  return 0;
}

static int call_port(int port) {
  struct sockaddr_in a;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  memset(&a, 0, sizeof a);
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  a.sin_port = htons((uint16_t)port);
  if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0) return fd;
  close(fd);
  return -1;
}

static int strangers_rank(int rank, void *arg) {
  cddp_group *g;
  (void)rank;
  CHECK_OK(cddp_init(&g, NULL));
  if (g != NULL) run_among_strangers(g, arg);
  cddp_destroy(g);
  return 0;
}

static void test_strangers(void) {
  unsigned char hello[80], noise[400];
  pid_t pids[3];
  int status[3], i, port = ranks_free_port(), fds[60], kind;
  double deadline = test_now() + 30;
  memset(shared, 0, sizeof *shared);
  setenv("TEST_HOSTS", "abb", 1);
  for (i = 0; i < 3; i++) {
    ranks_environment(i, 3, port);
    pids[i] = ranks_fork(strangers_rank, i, NULL);
  }
  unsetenv("TEST_HOSTS");
  unsetenv("CDDP_HOST_ID");
  while ((port = __atomic_load_n(&shared->port, __ATOMIC_SEQ_CST)) == 0 && test_now() < deadline)
    ranks_sleep(0.002);
  CHECK(port != 0);
  memset(hello, 0, sizeof hello);
  memcpy(hello, "CDLK", 4); /* the right magic, then nothing right */
  fill(noise, sizeof noise, CDDP_U8, 3);
  for (i = 0; i < 60 && port != 0; i++) {
    char byte;
    kind = i % 5;
    CHECK((fds[i] = call_port(port)) >= 0);
    if (kind == 0 && send(fds[i], noise, sizeof noise, MSG_NOSIGNAL) < 0) continue;
    if (kind == 1 && send(fds[i], hello, 30, MSG_NOSIGNAL) < 0) continue; /* half, then silence */
    if (kind == 2 && send(fds[i], hello, sizeof hello, MSG_NOSIGNAL) < 0) continue;
    if (kind == 3) shutdown(fds[i], SHUT_RDWR);
    if (kind == 0 || kind == 2) CHECK(recv(fds[i], &byte, 1, 0) <= 0); /* dropped */
  }                                                                   /* kind 4 says nothing */
  i = __atomic_load_n(&shared->turns, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&shared->turns, __ATOMIC_SEQ_CST) < i + 10 && test_now() < deadline)
    ranks_sleep(0.002); /* the strangers do not hold up the ranks */
  __atomic_store_n(&shared->stop, 1, __ATOMIC_SEQ_CST);
  ranks_join(pids, 3, 60, status);
  CHECK(ranks_exited_well(status, 3));
  CHECK(shared->turns > 10);
  for (i = 0; i < 60; i++) close(fds[i]);
}

/* --- first messages with a secret, which the receiver hears late ------------------------------ */

enum { SENDERS = 299, SILENT = 320 };

/* All ranks of another host send rank 0 their first message, and compute; so does rank 0. Later
   they look for its answer now and then: 300 processes that wait in cddp leave rank 0 no time. */
static int run_many_senders(cddp_group *g, void *arg) {
  int rank = cddp_rank(g), size = cddp_world_size(g), p;
  float x = (float)rank;
  cddp_work *answer = NULL;
  (void)arg;
  if (rank > 0) CHECK_OK(cddp_send(g, &x, 1, CDDP_F32, 0, 7, NULL));
  ranks_sleep(rank > 0 ? 4 : 2);
  if (rank > 0) CHECK_OK(cddp_recv(g, &x, 1, CDDP_F32, 0, 8, &answer));
  while (rank > 0 && cddp_wait_for(answer, 0) == CDDP_TIMEOUT) ranks_sleep(0.3);
  for (p = 1; rank == 0 && p < size && test_failures == 0; p++) {
    CHECK_OK(cddp_recv(g, &x, 1, CDDP_F32, p, 7, NULL));
    CHECK(x == (float)p);
  }
  for (p = 1; rank == 0 && p < size; p++) CHECK_OK(cddp_send(g, &x, 1, CDDP_F32, p, 8, NULL));
  return test_failures != 0;
}

static void test_many_senders(void) {
  char hosts[SENDERS + 2] = "a";
  memset(hosts + 1, 'b', SENDERS);
  setenv("CDDP_SECRET", "of many", 1);
  setenv("CDDP_TIMEOUT_S", "120", 1); /* 300 processes on few cores */
  CHECK_OK(run_on(hosts, run_many_senders, NULL, SENDERS + 1));
  unsetenv("CDDP_SECRET");
}

/* Strangers make connections to each port of this process, and say nothing. */
static void call_silently(void) {
  int fd, i;
  for (fd = 3; fd < 64; fd++) {
    struct sockaddr_in a;
    int listens = 0;
    socklen_t n = sizeof listens, size = sizeof a;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &n) != 0 || !listens) continue;
    if (getsockname(fd, (struct sockaddr *)&a, &size) != 0 || a.sin_family != AF_INET) continue;
    for (i = 0; i < SILENT; i++) CHECK(call_port(ntohs(a.sin_port)) >= 0);
  }
}

static void more_descriptors(void) {
  struct rlimit most;
  CHECK(getrlimit(RLIMIT_NOFILE, &most) == 0);
  most.rlim_cur = most.rlim_max < 8192 ? most.rlim_max : 8192;
  CHECK(setrlimit(RLIMIT_NOFILE, &most) == 0);
}

/* Rank 3 sends rank 1 a first message, as neither leads its host, and computes; then the strangers
   come. In another group they come first. */
static int run_silent_strangers(cddp_group *g, void *arg) {
  cddp_group *groups[2] = {g, NULL};
  int rank = cddp_rank(g), turn;
  float x = rank == 3 ? 42 : 0;
  (void)arg;
  more_descriptors();
  CHECK_OK(cddp_group_split(g, 0, rank, &groups[1]));
  for (turn = 0; turn < 2 && test_failures == 0; turn++) {
    if (rank == 1) x = 0;
    if (rank == 1 && turn == 1) call_silently();
    if (rank == 3) CHECK_OK(cddp_send(groups[turn], &x, 1, CDDP_F32, 1, 7, NULL));
    ranks_sleep(rank == 3 ? 2 : 1);
    if (rank == 1 && turn == 0) call_silently();
    if (rank == 1) CHECK_OK(cddp_recv(groups[turn], &x, 1, CDDP_F32, 3, 7, NULL));
    CHECK(x == (rank % 2 == 1 ? 42 : 0));
    CHECK_OK(cddp_barrier(g));
  }
  cddp_destroy(groups[1]);
  return test_failures != 0;
}

static void test_silent_strangers(void) {
  setenv("CDDP_SECRET", "of few", 1);
  CHECK_OK(run_on("aabb", run_silent_strangers, NULL, 4));
  unsetenv("CDDP_SECRET");
}

/* Which descriptors of this process are connections. */
static void list_connections(bool *is) {
  struct sockaddr_storage a;
  int fd;
  for (fd = 0; fd < 64; fd++) {
    socklen_t size = sizeof a;
    is[fd] = getpeername(fd, (struct sockaddr *)&a, &size) == 0;
  }
}

/* Rank 3's first connection to rank 1 ends while rank 3 computes, and has not proven the secret. */
static int run_cut_call(cddp_group *g, void *arg) {
  int rank = cddp_rank(g), fd, cut = 0;
  bool before[64], now[64];
  float x = rank == 3 ? 42 : 0;
  cddp_work *w = NULL;
  (void)arg;
  CHECK_OK(cddp_barrier(g));
  list_connections(before);
  if (rank == 3) CHECK_OK(cddp_send(g, &x, 1, CDDP_F32, 1, 7, NULL));
  ranks_sleep(rank == 3 ? 2 : 0.5);
  if (rank == 1) {
    CHECK_OK(cddp_recv(g, &x, 1, CDDP_F32, 3, 7, &w));
    CHECK_IS(cddp_wait_for(w, 0.3), CDDP_TIMEOUT);
    list_connections(now);
    for (fd = 0; fd < 64; fd++)
      if (now[fd] && !before[fd] && ++cut > 0) shutdown(fd, SHUT_RDWR);
    CHECK(cut > 0);
    CHECK_OK(cddp_wait(w));
    CHECK(x == 42);
  }
  CHECK_OK(cddp_barrier(g));
  return test_failures != 0;
}

static void test_cut_call(void) {
  setenv("CDDP_SECRET", "of four", 1);
  CHECK_OK(run_on("aabb", run_cut_call, NULL, 4));
  unsetenv("CDDP_SECRET");
}

/* Elastic ranks meet after a loss: rank 1 has called rank 0, which leads, and is
   stopped for a while; then the strangers come. */
static int meet_among_strangers(int rank, void *arg) {
  int shard, t, called = 0;
  cddp_ddp_desc desc;
  cddp_sgd_desc o;
  cddp_param p;
  cddp_group *g;
  cddp_ddp *d;
  cddp_optim *sgd;
  cddp_result r = CDDP_OK;
  float w = 0;
  (void)arg;
  more_descriptors();
  shared->pids[rank] = getpid();
  memset(&desc, 0, sizeof desc);
  memset(&o, 0, sizeof o);
  memset(&p, 0, sizeof p);
  p.data = &w;
  p.count = 1;
  desc.shards = 4;
  desc.elastic = true;
  o.lr = 1;
  CHECK_OK(cddp_init(&g, NULL));
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, &desc));
  o.ddp = d;
  CHECK_OK(cddp_sgd_create(&sgd, &p, 1, &o));
  for (t = 0; t < 3 && r == CDDP_OK; t++) {
    if (t == 1 && rank == 2) raise(SIGKILL);
    while (cddp_ddp_next_shard(d, &shard)) {
      ((float *)p.grad)[0] += 1;
      if (t == 1 && rank == 0 && called++ == 0) {
        ranks_sleep(1);
        kill(shared->pids[1], SIGSTOP);
        if (fork() == 0) {
          ranks_sleep(2);
          _exit(kill(shared->pids[1], SIGCONT));
        }
        call_silently();
      }
      if ((r = cddp_ddp_ready(d, 0)) != CDDP_OK) break;
    }
    r = cddp_ddp_step(d, sgd);
  }
  CHECK_OK(r);
  CHECK(w == -3);
  CHECK_EQ(cddp_world_size(cddp_ddp_group(d)), 2);
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(d);
  cddp_destroy(g);
  return 0;
}

static void test_meeting_among_strangers(void) {
  int status[3];
  setenv("TEST_HOSTS", "abc", 1);
  setenv("CDDP_SECRET", "of three", 1);
  ranks_script(meet_among_strangers, NULL, 3, 60, status);
  CHECK(status[0] == 0 && status[1] == 0);
  unsetenv("CDDP_SECRET");
  unsetenv("TEST_HOSTS");
  unsetenv("CDDP_HOST_ID");
}

/* No descriptor is left and a stranger calls: who waits must not spin. */
static int wait_without_descriptors(int rank, void *arg) {
  cddp_group *g;
  float x = 1;
  (void)arg;
  CHECK_OK(cddp_init(&g, NULL));
  if (g == NULL) return 1;
  CHECK_OK(cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL));
  if (rank == 1) {
    struct timespec before, after;
    int fds[1024], n = 0;
    struct rlimit limit = {64, 64};
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    while (n < 1024 && (fds[n] = dup(0)) >= 0) n++;
    CHECK(n > 0 && errno == EMFILE);
    __atomic_store_n(&shared->port, listening_port(), __ATOMIC_SEQ_CST);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    CHECK_OK(cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL));
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    CHECK((double)(after.tv_sec - before.tv_sec) + 1e-9 * (double)(after.tv_nsec - before.tv_nsec) <
          RANKS_WITHIN(0.3));
    while (n > 0) close(fds[--n]);
  } else {
    while (!__atomic_load_n(&shared->stop, __ATOMIC_SEQ_CST)) ranks_sleep(0.01);
    CHECK_OK(cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL));
  }
  CHECK_OK(cddp_barrier(g)); /* the port is heard again */
  cddp_destroy(g);
  return 0;
}

static void test_no_descriptors(void) {
  pid_t pids[2];
  int status[2], i, fd = -1, port = ranks_free_port();
  double deadline = test_now() + 30;
  memset(shared, 0, sizeof *shared);
  setenv("TEST_HOSTS", "ab", 1);
  for (i = 0; i < 2; i++) {
    ranks_environment(i, 2, port);
    pids[i] = ranks_fork(wait_without_descriptors, i, NULL);
  }
  unsetenv("TEST_HOSTS");
  unsetenv("CDDP_HOST_ID");
  while ((port = __atomic_load_n(&shared->port, __ATOMIC_SEQ_CST)) == 0 && test_now() < deadline)
    ranks_sleep(0.002);
  CHECK(port != 0 && (fd = call_port(port)) >= 0);
  ranks_sleep(1);
  __atomic_store_n(&shared->stop, 1, __ATOMIC_SEQ_CST);
  ranks_join(pids, 2, 60, status);
  CHECK(ranks_exited_well(status, 2));
  close(fd);
}

/* What has too few descriptors says so: groups between hosts, and stores. */
static int run_with_few_descriptors(cddp_group *g, void *arg) {
  struct rlimit limit, few;
  cddp_store_desc desc;
  cddp_store *store;
  cddp_group *half;
  cddp_result r = CDDP_SYSTEM;
  int refused = 0; /* stores whose server had no descriptor for its own rank's call */
  (void)arg;
  memset(&desc, 0, sizeof desc);
  desc.init_method = "tcp://127.0.0.1:0";
  desc.is_server = true;
  CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  few = limit;
  few.rlim_cur = 3;
  CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
  CHECK_IS(cddp_group_split(g, 0, 0, &half), CDDP_SYSTEM);
  CHECK(strstr(cddp_error(), strerror(EMFILE)) != NULL);
  CHECK(strstr(cddp_error(), "ulimit -n") != NULL);
  for (; r != CDDP_OK && few.rlim_cur < 64; few.rlim_cur++) {
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
    r = cddp_store_create(&store, &desc);
    if (r == CDDP_OK) break;
    CHECK_IS(r, CDDP_SYSTEM);
    CHECK(strstr(cddp_error(), strerror(EMFILE)) != NULL);
    CHECK(strstr(cddp_error(), "ulimit -n") != NULL);
    refused += strstr(cddp_error(), "the server's process") != NULL;
  }
  CHECK_OK(r);
  CHECK(refused > 0);
  if (r == CDDP_OK) cddp_store_destroy(store);
  CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  return test_failures != 0;
}

/* Rank 1 or 3 has no descriptor when 1 is to connect to 3: its host's ranks get the cause at once,
   the other host's learn that these are gone. */
static int run_without_descriptors(cddp_group *g, void *arg) {
  enum { COUNT = 1 << 20 };
  float *x = (float *)calloc(COUNT, sizeof *x);
  struct rlimit limit, few;
  int rank = cddp_rank(g), poor = *(const int *)arg;
  bool told = rank / 2 == poor / 2;
  double start = test_now();
  CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  few = limit;
  few.rlim_cur = 3;
  if (rank == poor) CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
  CHECK_IS(cddp_all_reduce(g, x, COUNT, CDDP_F32, CDDP_SUM, NULL),
           told ? CDDP_SYSTEM : CDDP_PEER_LOST);
  CHECK((strstr(cddp_error(), strerror(EMFILE)) != NULL) == told);
  CHECK((strstr(cddp_error(), "ulimit -n") != NULL) == told);
  CHECK(test_now() - start < RANKS_WITHIN(5));
  CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  free(x);
  return test_failures != 0;
}

static void test_few_descriptors(void) {
  int poor;
  setenv("TEST_HOSTS", "ab", 1);
  CHECK_OK(ranks_run(run_with_few_descriptors, NULL, 2, false));
  setenv("TEST_HOSTS", "aabb", 1);
  for (poor = 1; poor < 4; poor += 2)
    CHECK_OK(ranks_run(run_without_descriptors, &poor, 4, false));
  unsetenv("TEST_HOSTS");
  unsetenv("CDDP_HOST_ID");
}

/* --- meeting ---------------------------------------------------------------------------------- */

typedef struct meeting {
  int n, wrong; /* what is wrong with the last rank */
  char url[96];
} meeting;
enum { NOTHING, TAKEN_RANK, OTHER_SIZE, OTHER_SECRET, ABSENT };

static int meet(int rank, void *arg) {
  const meeting *m = (const meeting *)arg;
  outcome *mine = &shared->ranks[rank];
  bool last = rank == m->n - 1;
  cddp_group_desc d;
  cddp_group *g = NULL;
  int64_t x = rank + 1;
  memset(&d, 0, sizeof d);
  d.init_method = m->url;
  d.rank = last && m->wrong == TAKEN_RANK ? 1 : rank;
  d.world_size = m->n + (last && m->wrong == OTHER_SIZE);
  d.timeout_s = m->wrong == NOTHING ? 60 : RANKS_SLOW ? 1.5 : 0.8;
  d.secret = last && m->wrong == OTHER_SECRET ? "another" : "secret";
  if (last && m->wrong == ABSENT) return 0;
  mine->result = cddp_init(&g, &d);
  snprintf(mine->text, sizeof mine->text, "%s", cddp_error());
  if (g != NULL) {
    CHECK_OK(cddp_all_reduce(g, &x, 1, CDDP_I64, CDDP_SUM, NULL));
    CHECK_EQ(x, m->n * (m->n + 1) / 2);
  }
  cddp_destroy(g);
  return 0;
}

static void meet_all(meeting *m, const char *hosts) {
  pid_t pids[MOST];
  int status[MOST], i;
  memset(shared, 0, sizeof *shared);
  setenv("TEST_HOSTS", hosts, 1);
  for (i = 0; i < m->n; i++) {
    ranks_place(i);
    pids[i] = ranks_fork(meet, i, m);
  }
  unsetenv("TEST_HOSTS");
  unsetenv("CDDP_HOST_ID");
  ranks_join(pids, m->n, 60, status);
  CHECK(ranks_exited_well(status, m->n));
}

static void test_meeting(void) {
  const char *tmp = getenv("TMPDIR");
  char folder[64]; /* of this test's own: another user may have any name there */
  meeting m;
  int i, r;
  snprintf(folder, sizeof folder, "%.40s/cddp-meet.XXXXXX", tmp != NULL ? tmp : "/tmp");
  CHECK(mkdtemp(folder) != NULL);
  m.n = 3;
  m.wrong = NOTHING;
  for (i = 0; i < 4; i++) {
    if (i == 0) snprintf(m.url, sizeof m.url, "tcp://127.0.0.1:%d", ranks_free_port());
    if (i == 1) snprintf(m.url, sizeof m.url, "tcp://[::1]:%d", ranks_free_port());
    if (i == 2) snprintf(m.url, sizeof m.url, "tcp://[::ffff:127.0.0.1]:%d", ranks_free_port());
    if (i == 3) snprintf(m.url, sizeof m.url, "file://%s/meet", folder);
    if (i == 1 && access("/proc/net/if_inet6", R_OK) != 0) continue;
    meet_all(&m, "aab");
    for (r = 0; r < m.n; r++)
      if (shared->ranks[r].result != CDDP_OK)
        test_fail(__FILE__, __LINE__, "%s, rank %d: %s", m.url, r, shared->ranks[r].text);
  }
  unlink(m.url + 7);
  rmdir(folder);
}

static void test_wrong_meetings(void) {
  static const char *const words[] = {"", "taken twice", "WORLD_SIZE", "secret", "rank 2"};
  meeting m;
  m.n = 3;
  for (m.wrong = TAKEN_RANK; m.wrong <= ABSENT; m.wrong++) {
    int named = 0, r;
    snprintf(m.url, sizeof m.url, "tcp://127.0.0.1:%d", ranks_free_port());
    meet_all(&m, "aab");
    for (r = 0; r < m.n; r++) {
      if (m.wrong == ABSENT && r == 2) continue;
      CHECK(shared->ranks[r].result != CDDP_OK);
      named += strstr(shared->ranks[r].text, words[m.wrong]) != NULL;
    }
    if (named == 0)
      test_fail(__FILE__, __LINE__, "case %d: \"%s\" is in none of: %s; %s; %s", m.wrong,
                words[m.wrong], shared->ranks[0].text, shared->ranks[1].text,
                shared->ranks[2].text);
    test_count();
  }
}

int main(void) {
  setenv("CDDP_TIMEOUT_S", RANKS_SLOW ? "120" : "30", 0);
  shared = (board *)ranks_shared(sizeof *shared);
  RUN(begin_computing);
  RUN(test_collectives);
  RUN(test_large);
  RUN(test_secret);
  RUN(test_many_hosts);
  RUN(test_ddp);
  RUN(test_groups);
  RUN(test_mail);
  RUN(test_mixed);
  RUN(test_beside_gather);
  RUN(test_late_receiver);
  RUN(test_computing_sender);
  RUN(test_killed);
  RUN(test_half_lost);
  RUN(test_killed_unseen);
  RUN(test_stopped);
  RUN(test_child_lives_on);
  RUN(test_waits_apart);
  RUN(test_left);
  RUN(test_left_long_ago);
  RUN(test_earlier_loss);
  RUN(test_first_cause);
  RUN(test_mismatch);
  RUN(test_mismatch_riding);
  RUN(test_child_is_deaf);
  RUN(test_strangers);
  RUN(test_silent_strangers);
  RUN(test_cut_call);
  RUN(test_meeting_among_strangers);
  RUN(test_no_descriptors);
  RUN(test_few_descriptors);
  RUN(test_meeting);
  RUN(test_wrong_meetings);
  if (!RANKS_SLOW) RUN(test_many_senders); /* 300 processes, at last: other time-outs */
  return TEST_END();
}
