/* states.c - what a process that joins an elastic job receives, and what it gives to others. Proves
   that all ranks have the weights of one rank that trained alone, bit for bit, also where the
   program's loop is cddp_ddp_wait and then an optimizer: cddp's, created without `ddp`, or one of
   the program's own that lists its states in cddp_ddp_desc.buffers.

   How: each first rank is killed in turn and replaced, rank 0 too. A joining process begins with
   wrong weights and states. After each step every rank compares the hash of its weights with that
   of the others. The test ends a few steps after the last join. Then one rank without failures
   trains for that many steps. A gradient depends on the weights, so a difference stays. */
#include "../../cddp.h"

#include "../ranks.h"

#include <sys/prctl.h>

enum { SHARDS = 6, MOST_STEPS = 20000, SMALL = 7, MORE = 5 /* steps after the last join */ };
enum { MOMENTUM, MASTERS, ADAMW, GROUPS, EARLY, OWN, KINDS };
static const char *const kinds[KINDS] = {"momentum", "masters", "AdamW", "groups",
                                         "created before the model", "own AdamW"};

typedef struct config {
  int kind, ranks, kills;
  size_t count; /* of the first parameter */
  bool alloc;   /* weights, gradients and buffers are from cddp_alloc */
  int moment;   /* a rank dies in a shard (0), behind the wait (1), in the middle of its update */
} config;

typedef struct shared_state {
  config c;
  int port, created, joined, stop;
  uint64_t hashes[MOST_STEPS]; /* after each step; 0: not known */
  uint64_t steps;              /* completed by all */
} shared_state;

static shared_state *shared;

static int look(const int *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static void bump(int *p) { __atomic_add_fetch(p, 1, __ATOMIC_SEQ_CST); }

typedef struct model {
  cddp_param p[2];       /* the second has SMALL elements */
  cddp_param buffers[5]; /* m and v of both, and the number of steps */
  cddp_group *g;
  cddp_ddp *ddp;
  cddp_optim *optim;
} model;

static size_t stride(size_t count) { return count > 1000000 ? 4099 : 1; }

static void *memory(const model *m, size_t bytes) {
  void *p = shared->c.alloc && m->g != NULL ? cddp_alloc(m->g, bytes) : calloc(1, bytes);
  if (p == NULL) exit(3);
  return p;
}

static void set_param(model *m, cddp_param *p, const char *name, size_t count, cddp_dtype dtype) {
  memset(p, 0, sizeof *p);
  p->name = name;
  p->count = count;
  p->dtype = dtype;
  p->data = memory(m, count * cddp_dtype_size(dtype));
}

static cddp_result create_optim(model *m) {
  static const double scales[] = {1, 0.5}, decays[] = {0.25, 0};
  cddp_sgd_desc s;
  cddp_adamw_desc a;
  int kind = shared->c.kind;
  memset(&s, 0, sizeof s);
  memset(&a, 0, sizeof a);
  s.lr = 0.125;
  s.momentum = 0.5;
  s.master_weights = kind == MASTERS;
  a.lr = 0.01;
  a.weight_decay = 0.25;
  if (kind == GROUPS) a.lr_scales = scales, a.weight_decays = decays;
  if (kind == ADAMW || kind == GROUPS) return cddp_adamw_create(&m->optim, m->p, 2, &a);
  return cddp_sgd_create(&m->optim, m->p, 2, &s);
}

/* As after cddp_load, the optimizer of the first ranks has states when the model is created. */
static cddp_result step_before_model(model *m) {
  cddp_result r;
  int k;
  for (k = 0; k < 2; k++) ranks_store(m->p[k].dtype, m->p[k].grad, 0, 1);
  r = cddp_optim_step(m->optim);
  return r == CDDP_OK ? cddp_optim_zero_grad(m->optim) : r;
}

static void fill(model *m, bool joins) {
  size_t i;
  int k;
  for (k = 0; k < 2; k++)
    for (i = 0; i < m->p[k].count; i += stride(m->p[k].count))
      ranks_store(m->p[k].dtype, m->p[k].data, i, joins ? 7 : 1 + (double)(i % 100) / 128);
  for (k = 0; joins && k < 5; k++)
    if (m->buffers[k].count > 0)
      memset(m->buffers[k].data, 3, m->buffers[k].count * cddp_dtype_size(m->buffers[k].dtype));
}

static cddp_result model_open(model *m, int rank, bool joins, bool alone) {
  const config *c = &shared->c;
  cddp_dtype dtype = c->kind == MASTERS ? CDDP_BF16 : CDDP_F32;
  cddp_ddp_desc desc;
  cddp_group_desc one;
  cddp_result r;
  int k;
  memset(m, 0, sizeof *m);
  memset(&desc, 0, sizeof desc);
  memset(&one, 0, sizeof one);
  one.world_size = 1;
  ranks_environment(rank, c->ranks, shared->port);
  setenv("CDDP_TIMEOUT_S", "60", 1);
  if (joins) setenv("CDDP_JOIN", "1", 1);
  if ((r = cddp_init(&m->g, alone ? &one : NULL)) != CDDP_OK) return r;
  set_param(m, &m->p[0], "w", c->count, dtype);
  set_param(m, &m->p[1], "b", SMALL, dtype);
  if (c->kind == OWN || c->kind == EARLY)
    for (k = 0; k < 2; k++)
      m->p[k].grad = memory(m, m->p[k].count * cddp_dtype_size(dtype));
  for (k = 0; c->kind == OWN && k < 4; k++)
    set_param(m, &m->buffers[k], NULL, m->p[k / 2].count, CDDP_F32);
  if (c->kind == OWN) set_param(m, &m->buffers[4], NULL, 1, CDDP_I64);
  fill(m, joins);
  if (c->kind == EARLY && (r = create_optim(m)) != CDDP_OK) return r;
  if (c->kind == EARLY && !joins && (r = step_before_model(m)) != CDDP_OK) return r;
  desc.elastic = !alone;
  desc.shards = SHARDS;
  desc.buffers = m->buffers;
  desc.buffer_count = c->kind == OWN ? 5 : 0;
  r = cddp_ddp_create(&m->ddp, m->g, m->p, 2, &desc);
  return r == CDDP_OK && c->kind < EARLY ? create_optim(m) : r;
}

static void model_close(model *m) {
  int k;
  cddp_optim_destroy(m->optim);
  cddp_ddp_destroy(m->ddp);
  for (k = 0; !shared->c.alloc && k < 2; k++) {
    free(m->p[k].data);
    if (shared->c.kind == OWN || shared->c.kind == EARLY) free(m->p[k].grad);
  }
  for (k = 0; !shared->c.alloc && k < 5; k++) free(m->buffers[k].data);
  cddp_destroy(m->g);
}

static uint64_t model_hash(const model *m) {
  uint64_t h = RANKS_HASH;
  size_t i, size = cddp_dtype_size(m->p[0].dtype), step = stride(m->p[0].count);
  for (i = 0; i < m->p[0].count; i += step)
    h = ranks_hash(h, (const char *)m->p[0].data + i * size, size);
  h = ranks_hash(h, m->p[1].data, m->p[1].count * size);
  return h != 0 ? h : 1;
}

static cddp_result backward(model *m, uint64_t t, int shard) {
  cddp_result r = CDDP_OK;
  size_t i;
  int k;
  for (k = 1; k >= 0 && r == CDDP_OK; k--) {
    const cddp_param *p = &m->p[k];
    for (i = 0; i < p->count; i += stride(p->count))
      ranks_store(p->dtype, p->grad, i,
                  ranks_load(p->dtype, p->grad, i) + 0.1 * ranks_load(p->dtype, p->data, i) +
                      (double)((t * 7 + (uint64_t)shard * 3 + i) % 11) - 5);
    r = cddp_ddp_ready(m->ddp, k);
  }
  return r;
}

/* AdamW of the program's own. Its states are the model's buffers. */
static void own_update(model *m, bool dies) {
  int64_t *steps = (int64_t *)m->buffers[4].data;
  double correct1 = 1, correct2 = 1;
  int64_t t;
  size_t i;
  int k;
  ++*steps;
  for (t = 0; t < *steps && t < 2000; t++) correct1 *= 0.9, correct2 *= 0.99;
  for (k = 0; k < 2; k++) {
    float *w = (float *)m->p[k].data, *g = (float *)m->p[k].grad;
    float *u = (float *)m->buffers[2 * k].data, *v = (float *)m->buffers[2 * k + 1].data;
    for (i = 0; i < m->p[k].count; i += stride(m->p[k].count)) {
      u[i] = 0.9f * u[i] + 0.1f * g[i];
      v[i] = 0.99f * v[i] + 0.01f * g[i] * g[i];
      w[i] -= 0.01f * (u[i] / (float)(1 - correct1)) /
              (sqrtf(v[i] / (float)(1 - correct2)) + 1e-8f);
      if (dies && i >= m->p[k].count / 2) raise(SIGKILL);
    }
    memset(g, 0, m->p[k].count * sizeof *g);
  }
}

static cddp_result one_step(model *m, uint64_t t, bool dies) {
  const config *c = &shared->c;
  cddp_result r = CDDP_OK;
  int shard;
  while (r == CDDP_OK && cddp_ddp_next_shard(m->ddp, &shard)) {
    if (dies && c->moment == 0) raise(SIGKILL);
    if (c->kind == EARLY && t == 0) ranks_sleep(0.05); /* a joining process asks in step 0 */
    r = backward(m, t, shard);
  }
  r = cddp_ddp_wait(m->ddp); /* returns errors of the others */
  if (r != CDDP_OK) return r;
  if (dies && c->moment == 1) raise(SIGKILL);
  if (c->kind == OWN) {
    own_update(m, dies);
    return CDDP_OK;
  }
  if ((r = cddp_optim_set_lr(m->optim, 0.01 + 0.125 / (double)(t % 7 + 1))) != CDDP_OK) return r;
  if ((r = cddp_optim_step(m->optim)) != CDDP_OK) return r;
  if (dies) raise(SIGKILL);
  return cddp_optim_zero_grad(m->optim);
}

/* The first rank to complete step t stores its hash. */
static void compare(uint64_t t, uint64_t hash) {
  uint64_t *at = &shared->hashes[t], none = 0;
  if (!__atomic_compare_exchange_n(at, &none, hash, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) &&
      none != hash)
    test_fail(__FILE__, __LINE__, "%s, %d ranks, %zu elements%s: pid %d has other weights at %d",
              kinds[shared->c.kind], shared->c.ranks, shared->c.count,
              shared->c.alloc ? ", cddp_alloc" : "", (int)getpid(), (int)t);
}

/* joined: how many joins the job waits for in all. */
static int expected_joins(const config *c) { return c->kills + (c->ranks == 1); }

static int life(int rank, void *arg) {
  const config *c = &shared->c;
  bool joins = arg != NULL, counted = false;
  float stop = 0;
  uint64_t t = 0;
  model m;
  cddp_result r;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  r = model_open(&m, rank, joins, false);
  if (r == CDDP_OK && !joins) bump(&shared->created);
  while (r == CDDP_OK && stop == 0 && (t = cddp_ddp_steps(m.ddp)) < MOST_STEPS) {
    bool dies = !joins && rank < c->kills && t >= (c->kind == EARLY ? 0 : 2) &&
                look(&shared->created) == c->ranks &&
                look(&shared->joined) == rank + (c->ranks == 1);
    if (c->count < 100000) ranks_sleep(0.001);
    if ((r = one_step(&m, t, dies)) != CDDP_OK) break;
    compare(t, model_hash(&m));
    stop = (float)look(&shared->stop);
    r = cddp_all_reduce(cddp_ddp_group(m.ddp), &stop, 1, CDDP_F32, CDDP_MAX, NULL);
    if (r == CDDP_OK && joins && !counted) counted = true, bump(&shared->joined);
    if (r == CDDP_PEER_LOST) r = CDDP_OK, stop = 0;
    if (look(&shared->joined) >= expected_joins(c)) bump(&shared->stop); /* from the next one on */
  }
  CHECK_OK(r);
  CHECK(r != CDDP_OK || t < MOST_STEPS);
  for (stop = 0; r == CDDP_OK && stop < MORE; stop++) {
    t = cddp_ddp_steps(m.ddp);
    if ((r = one_step(&m, t, false)) == CDDP_OK) compare(t, model_hash(&m));
  }
  CHECK_OK(r);
  if (r == CDDP_OK) __atomic_store_n(&shared->steps, cddp_ddp_steps(m.ddp), __ATOMIC_SEQ_CST);
  model_close(&m);
  return 0;
}

static int reference(int rank, void *arg) {
  uint64_t t;
  model m;
  (void)arg;
  CHECK_OK(model_open(&m, rank, false, true));
  for (t = 0; t < shared->steps; t++) {
    CHECK_OK(one_step(&m, t, false));
    compare(t, model_hash(&m));
  }
  model_close(&m);
  return 0;
}

static void run(config c) {
  double until = test_now() + RANKS_WITHIN(40.0);
  int status, n = c.ranks, left, i;
  pid_t pids[16], pid;
  memset(shared, 0, sizeof *shared);
  shared->c = c;
  shared->port = ranks_free_port();
  for (i = 0; i < n; i++) pids[i] = ranks_fork(life, i, NULL);
  for (left = n; left > 0 && test_now() < until; ranks_sleep(0.001)) {
    if (n == 1 && c.ranks == 1 && look(&shared->created) == 1) { /* one rank more */
      pids[n] = ranks_fork(life, n, &c);
      n++, left++;
    }
    for (i = 0; i < n; i++) {
      if (pids[i] == 0 || waitpid(pids[i], &status, WNOHANG) != pids[i]) continue;
      pids[i] = 0;
      if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) pids[i] = ranks_fork(life, i, &c);
      else CHECK_EQ(status, 0);
      left -= pids[i] == 0;
    }
  }
  CHECK_EQ(left, 0);
  for (i = 0; i < n; i++)
    if (pids[i] > 0 && kill(pids[i], SIGKILL) == 0) waitpid(pids[i], &status, 0);
  CHECK_EQ(shared->joined, expected_joins(&c));
  if (test_failures > 0) return;
  pid = ranks_fork(reference, 0, NULL);
  CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

static config usual(int kind, int ranks) {
  config c;
  memset(&c, 0, sizeof c);
  c.kind = kind;
  c.ranks = ranks;
  c.kills = 1;
  c.count = 300;
  return c;
}

/* Each kind of optimizer, on one, two and three hosts. */
static void test_kinds(void) {
  static const char *const hosts[] = {NULL, "ab", "abc"};
  int kind, i;
  for (kind = 0; kind < KINDS; kind++) {
    config c = usual(kind, 3);
    i = kind % 3;
    if (hosts[i] != NULL) setenv("TEST_HOSTS", hosts[i], 1);
    c.alloc = kind % 2 == 0;
    c.moment = kind % 3;
    run(c);
    unsetenv("TEST_HOSTS");
  }
}

/* 1 to 6 ranks, all of which die. */
static void test_ranks(void) {
  int n;
  for (n = 1; n <= 6; n++) {
    config c = usual(n % 2 ? OWN : ADAMW, n);
    c.kills = n < 4 ? n : 2;
    c.moment = n % 3;
    c.count = 3000;
    run(c);
  }
}

static void test_hosts(void) {
  static const char *const hosts[] = {"ab", "aab", "abc"};
  int i;
  for (i = 0; i < 3; i++) {
    config c = usual(OWN, 3);
    setenv("TEST_HOSTS", hosts[i], 1);
    c.kills = 2; /* a process on a third host is admitted by a first rank alone */
    c.moment = i;
    c.count = 70001;
    run(c);
    unsetenv("TEST_HOSTS");
  }
}

/* Weights and states of up to 64 MiB. */
static void test_sizes(void) {
  static const size_t counts[] = {1, 9001, 70001, 524289, (size_t)2 << 20, (size_t)16 << 20};
  size_t i;
  for (i = 0; i < sizeof counts / sizeof *counts - (RANKS_SLOW ? 2 : 0); i++) {
    config c = usual(i % 2 ? MOMENTUM : OWN, 2);
    c.alloc = i % 3 == 0;
    c.count = counts[i];
    run(c);
  }
}

/* --- what a joining process must not have --- */

enum { PARTS, WHOLES, RENEWED, SWAPPED }; /* two optimizers, each with a part of the parameters, or
                                             with all, also after the end of the first; buffers in
                                             another order */

static int parts_life(int rank, void *arg) {
  bool joins = arg != NULL, refused;
  cddp_optim *optim[2] = {NULL, NULL};
  cddp_ddp_desc desc;
  cddp_sgd_desc o;
  cddp_result r;
  model m;
  int shard, k, mode = shared->c.kind;
  bool whole = mode == WHOLES || mode == RENEWED;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  memset(&m, 0, sizeof m);
  memset(&desc, 0, sizeof desc);
  memset(&o, 0, sizeof o);
  ranks_environment(rank, 2, shared->port);
  setenv("CDDP_TIMEOUT_S", "20", 1);
  if (joins) setenv("CDDP_JOIN", "1", 1);
  CHECK_OK(cddp_init(&m.g, NULL));
  set_param(&m, &m.p[0], "w", 300, CDDP_F32);
  set_param(&m, &m.p[1], "b", SMALL, CDDP_F32);
  for (k = 0; k < 2; k++) set_param(&m, &m.buffers[joins ? 1 - k : k], k ? "v" : "m", 4, CDDP_F32);
  desc.elastic = true;
  desc.shards = SHARDS;
  desc.buffers = m.buffers;
  desc.buffer_count = mode == SWAPPED ? 2 : 0;
  r = cddp_ddp_create(&m.ddp, m.g, m.p, 2, &desc);
  CHECK_IS(r, joins && mode == SWAPPED ? CDDP_MISMATCH : CDDP_OK);
  o.lr = 0.125;
  for (k = 0; r == CDDP_OK && k < 2; k++) {
    refused = joins && mode != SWAPPED && k == whole;
    o.momentum = k == 0 || whole ? 0.5 : 0; /* else the second has no states */
    if (mode == RENEWED && k == 1) cddp_optim_destroy(optim[0]), optim[0] = NULL;
    r = cddp_sgd_create(&optim[k], whole ? m.p : &m.p[k], whole ? 2 : 1, &o);
    CHECK_IS(r, refused ? CDDP_UNSUPPORTED : CDDP_OK);
    if (refused) CHECK(optim[k] == NULL && strstr(cddp_error(), "one optimizer") != NULL);
    if (refused) r = CDDP_OK;
  }
  if (!joins) bump(&shared->created);
  while (r == CDDP_OK && !joins && look(&shared->stop) == 0) {
    ranks_sleep(0.001);
    while (r == CDDP_OK && cddp_ddp_next_shard(m.ddp, &shard))
      for (k = 0; k < 2; k++) r = cddp_ddp_ready(m.ddp, k);
    CHECK_OK(r = cddp_ddp_wait(m.ddp));
    for (k = 0; r == CDDP_OK && k < 2; k++)
      if (optim[k] != NULL) CHECK_OK(r = cddp_optim_step(optim[k]));
  }
  for (k = 0; k < 2; k++) cddp_optim_destroy(optim[k]);
  model_close(&m);
  return 0;
}

/* A joining process would not get the right states: it is told so, and the job continues. */
static void run_refused(int mode) {
  double until = test_now() + RANKS_WITHIN(20.0);
  pid_t pids[3];
  int status[3];
  memset(shared, 0, sizeof *shared);
  shared->c.kind = mode;
  shared->port = ranks_free_port();
  pids[0] = ranks_fork(parts_life, 0, NULL);
  pids[1] = ranks_fork(parts_life, 1, NULL);
  while (look(&shared->created) < 2 && test_now() < until) ranks_sleep(0.001);
  pids[2] = ranks_fork(parts_life, 2, &shared);
  ranks_join(pids + 2, 1, RANKS_WITHIN(20.0), status + 2);
  bump(&shared->stop);
  ranks_join(pids, 2, RANKS_WITHIN(20.0), status);
  CHECK(ranks_exited_well(status, 3));
}

static void test_parts(void) { run_refused(PARTS); }
static void test_two_optimizers(void) { run_refused(WHOLES); }
static void test_renewed_optimizer(void) { run_refused(RENEWED); }
static void test_swapped_buffers(void) { run_refused(SWAPPED); }

int main(void) {
  shared = (shared_state *)ranks_shared(sizeof *shared);
  RUN(test_kinds);
  RUN(test_ranks);
  RUN(test_hosts);
  RUN(test_sizes);
  RUN(test_parts);
  RUN(test_two_optimizers);
  RUN(test_renewed_optimizer);
  RUN(test_swapped_buffers);
  return TEST_END();
}
