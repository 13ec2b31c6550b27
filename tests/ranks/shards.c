/* Shards: the global batch in S parts, whatever the number of ranks.

   Gradients depend on the step and the shard alone. After every step the weights must have the
   bits of S ranks without shards, for 1 to S ranks, in fused steps and by wait, with AdamW and
   clipping. Each shard must be handed out once. Processes check the same over TCP and shared
   memory. Calls that forget a shard or repeat one are errors. */
#include "../../cddp.h"
#include "../ranks.h"

enum { PARAMS = 7, PLAIN = 3 /* of them for AdamW */, STEPS = 4, MOST = 12 /* shards */ };
enum { LARGE = 3001 };
enum { FUSED, APART, CLIPPED, BOTH, KINDS };

static const size_t sizes[PARAMS] = {LARGE, 77, 1, 2500, 2100, 5 * 12, 7 * 9};
static const size_t rows[PARAMS] = {0, 0, 0, 0, 0, 12, 9}; /* of sparse ones */
static const cddp_dtype dtypes[PARAMS] = {CDDP_F32, CDDP_F64, CDDP_F32, CDDP_F16,
                                          CDDP_BF16, CDDP_F32, CDDP_F16};
static const char *const names[PARAMS] = {"wide",  "double", "one", "half",
                                          "brain", "table",  "rows"};

typedef struct plan {
  int shards, kind;
  bool looped;  /* with cddp_ddp_next_shard and shards set; else each rank is one shard */
  bool own;     /* gradients are the program's, not placed by cddp_ddp_create */
  bool shared;  /* weights in shared memory */
  bool adamw;
  double momentum;
  uint64_t *hashes; /* [STEPS] of the weights after each step */
} plan;

static bool mentions(const char *text) { return strstr(cddp_error(), text) != NULL; }

/* Forward and backward of one shard: gradients must be zero before. */
static void backward(cddp_ddp *ddp, cddp_param *p, int count, int step, int shard) {
  char values[LARGE * 8];
  int k, n;
  size_t i;
  for (k = count - 1; k >= 0; k--) {
    uint64_t seed = (uint64_t)(1000 * step + shard);
    if (rows[k] == 0) {
      CHECK(ranks_zero(p[k].grad, p[k].count * cddp_dtype_size(p[k].dtype)));
      for (i = 0; i < p[k].count; i++)
        ranks_put(p[k].grad, p[k].dtype, i, ranks_mix(seed, (uint64_t)k, i));
    }
    for (n = (int)(ranks_mix(seed, (uint64_t)k, 77) % 5); rows[k] != 0 && n > 0; n--) {
      int64_t numbers[3];
      size_t width = sizes[k] / rows[k];
      for (i = 0; i < 3; i++) /* the same one twice, now and then */
        numbers[i] = (int64_t)(ranks_mix(seed, (uint64_t)n, 5 + i) % rows[k]);
      for (i = 0; i < 3 * width; i++)
        ranks_put(values, p[k].dtype, i, ranks_mix(seed, (uint64_t)(k + 100 * n), i));
      CHECK_OK(cddp_ddp_add_rows(ddp, k, numbers, values, 3));
    }
    CHECK_OK(cddp_ddp_ready(ddp, k));
  }
}

static cddp_result take_step(cddp_ddp *ddp, cddp_optim *optim, int kind, int step, double *norm) {
  cddp_result r;
  *norm = 0;
  if (kind == FUSED || (kind == BOTH && step % 2 == 1)) return cddp_ddp_step(ddp, optim);
  if ((r = cddp_ddp_wait(ddp)) != CDDP_OK) return r;
  if (kind == CLIPPED && (r = cddp_ddp_clip_grad_norm(ddp, 3, norm)) != CDDP_OK) return r;
  if ((r = cddp_optim_step(optim)) != CDDP_OK) return r;
  return cddp_optim_zero_grad(optim);
}

typedef struct model {
  cddp_param p[PARAMS];
  cddp_ddp *ddp;
  cddp_optim *optim;
  int count;
  bool own, shared;
} model;

static cddp_result model_open(model *m, cddp_group *g, const plan *c, const cddp_ddp_desc *desc) {
  cddp_sgd_desc o;
  cddp_adamw_desc a;
  cddp_result r;
  int k;
  size_t i;
  memset(m, 0, sizeof *m);
  m->own = c->own;
  m->shared = c->shared;
  m->count = c->adamw ? PLAIN : PARAMS;
  for (k = 0; k < m->count; k++) {
    size_t bytes = sizes[k] * cddp_dtype_size(dtypes[k]);
    m->p[k].name = names[k];
    m->p[k].count = sizes[k];
    m->p[k].dtype = dtypes[k];
    m->p[k].data = c->shared ? cddp_alloc(g, bytes) : malloc(bytes);
    if (c->own && rows[k] == 0) m->p[k].grad = calloc(1, bytes);
    for (i = 0; i < sizes[k]; i++)
      ranks_put(m->p[k].data, dtypes[k], i, ranks_mix(3, (uint64_t)k, i));
  }
  memset(&o, 0, sizeof o);
  memset(&a, 0, sizeof a);
  if ((r = cddp_ddp_create(&m->ddp, g, m->p, m->count, desc)) != CDDP_OK) return r;
  a.lr = 0.125;
  a.weight_decay = 0.01;
  a.ddp = m->ddp;
  if (c->adamw) return cddp_adamw_create(&m->optim, m->p, m->count, &a);
  o.lr = 0.125;
  o.momentum = c->momentum;
  o.ddp = m->ddp;
  return cddp_sgd_create(&m->optim, m->p, m->count, &o);
}

static void model_close(model *m, cddp_group *g) {
  int k;
  cddp_optim_destroy(m->optim);
  cddp_ddp_destroy(m->ddp);
  for (k = 0; k < m->count; k++) {
    if (m->own && rows[k] == 0) free(m->p[k].grad);
    if (m->shared) cddp_free(g, m->p[k].data);
    else free(m->p[k].data);
  }
}

static int train(cddp_group *g, void *arg) {
  const plan *c = (const plan *)arg;
  int rank = cddp_rank(g), n = cddp_world_size(g), step, k, shard, taken, before = test_failures;
  int first = c->shards / n * rank + (rank < c->shards % n ? rank : c->shards % n);
  int count = c->shards / n + (rank < c->shards % n);
  cddp_ddp_desc d;
  model m;
  memset(&d, 0, sizeof d);
  d.sparse_rows = c->adamw ? NULL : rows;
  d.bucket_cap_mb = 0.01;
  d.shards = c->looped ? c->shards : 0;
  CHECK_OK(model_open(&m, g, c, &d));
  for (step = 0; step < STEPS && m.optim != NULL && test_failures == before; step++) {
    uint64_t h = RANKS_HASH;
    double norm;
    CHECK_EQ(cddp_ddp_steps(m.ddp), step);
    if (!c->looped) {
      backward(m.ddp, m.p, m.count, step, rank);
    } else {
      for (taken = 0; cddp_ddp_next_shard(m.ddp, &shard); taken++) {
        CHECK_EQ(shard, first + taken);
        backward(m.ddp, m.p, m.count, step, shard);
      }
      CHECK_EQ(taken, count);
      CHECK(!cddp_ddp_next_shard(m.ddp, &shard));
    }
    CHECK_OK(take_step(m.ddp, m.optim, c->kind, step, &norm));
    for (k = 0; k < m.count; k++)
      h = ranks_hash(h, m.p[k].data, sizes[k] * cddp_dtype_size(dtypes[k]));
    h = ranks_hash(h, &norm, sizeof norm);
    if (!c->looped) {
      if (rank == 0) c->hashes[step] = h;
    } else if (h != c->hashes[step]) {
      test_fail(__FILE__, __LINE__, "%d shards, %d ranks: step %d of kind %d differs, rank %d%s%s",
                c->shards, n, step, c->kind, rank, c->own ? ", own" : "",
                c->shared ? ", shared" : "");
    }
    test_count();
  }
  model_close(&m, g);
  return test_failures != before;
}

/* The hashes of S ranks without shards. */
static void reference(plan *c, uint64_t *hashes) {
  c->hashes = hashes;
  c->looped = false;
  CHECK_OK(ranks_run(train, c, c->shards, true));
  c->looped = true;
}

/* Every kind of step for every number of shards and ranks. */
static void test_world_sizes(void) {
  uint64_t hashes[STEPS];
  int most = RANKS_TSAN ? 5 : RANKS_SLOW ? 7 : MOST, n;
  plan c;
  memset(&c, 0, sizeof c);
  for (c.shards = 1; c.shards <= most; c.shards++)
    for (c.kind = 0; c.kind < KINDS; c.kind++) {
      c.momentum = c.kind == APART ? 0 : 0.9;
      c.own = c.kind == APART || c.kind == BOTH;
      c.shared = c.kind != CLIPPED;
      reference(&c, hashes);
      for (n = 1; n <= c.shards; n++) {
        c.own = n % 2 == 1;
        c.shared = (n + c.kind) % 3 != 0;
        CHECK_OK(ranks_run(train, &c, n, true));
      }
    }
}

static void test_adamw(void) {
  uint64_t hashes[STEPS];
  int n;
  plan c;
  memset(&c, 0, sizeof c);
  c.adamw = true;
  for (c.shards = 4; c.shards <= 7; c.shards += 3)
    for (c.kind = 0; c.kind < KINDS; c.kind++) {
      c.shared = c.kind != CLIPPED;
      reference(&c, hashes);
      for (n = 1; n <= c.shards; n += 1 + RANKS_TSAN) CHECK_OK(ranks_run(train, &c, n, true));
    }
}

/* One kind, with many shards: sums that wait in many slots. */
static void test_many_shards(void) {
  static const int sizes_of[] = {16, 31, 33, 64}, ranks[] = {1, 2, 3, 5, 7};
  uint64_t hashes[STEPS];
  size_t i, k;
  plan c;
  memset(&c, 0, sizeof c);
  for (i = 0; i < (RANKS_TSAN ? 1 : RANKS_SLOW ? 2 : 4); i++) {
    c.shards = sizes_of[i];
    c.kind = i % 2 == 0 ? FUSED : APART;
    c.momentum = 0.5;
    c.shared = true;
    reference(&c, hashes);
    for (k = 0; k < 5; k++) CHECK_OK(ranks_run(train, &c, ranks[k], true));
  }
}

/* Processes on one host, then on two and three: the program's ranks are dealt out in turn. */
static void test_processes(void) {
  static const char *const hosts[] = {"", "ab", "abc"};
  uint64_t hashes[STEPS];
  size_t i;
  int n;
  plan c;
  memset(&c, 0, sizeof c);
  for (c.shards = 3; c.shards <= (RANKS_SLOW ? 3 : 8); c.shards += 5)
    for (c.kind = RANKS_SLOW ? BOTH : 0; c.kind < KINDS; c.kind++) {
      c.momentum = 0.9;
      reference(&c, hashes);
      for (i = 0; i < 3; i++) {
        setenv("TEST_HOSTS", hosts[i], 1);
        for (n = RANKS_SLOW ? 3 : 2; n <= (c.shards == 3 ? 3 : 5); n++) {
          c.own = n % 2 == 0;
          c.shared = n != 3;
          if (n == 2 && i == 2) continue;
          CHECK_OK(ranks_run(train, &c, n, false));
        }
        unsetenv("TEST_HOSTS");
      }
    }
}

/* Without shards in the desc the same loop runs, with one shard a rank. */
static int default_body(cddp_group *g, void *arg) {
  int rank = cddp_rank(g), shard = -1, step, before = test_failures;
  plan *c = (plan *)arg;
  cddp_ddp_desc d;
  model m;
  memset(&d, 0, sizeof d);
  d.sparse_rows = rows;
  CHECK_OK(model_open(&m, g, c, &d));
  for (step = 0; step < STEPS; step++) {
    double norm;
    CHECK(cddp_ddp_next_shard(m.ddp, &shard));
    CHECK_EQ(shard, rank);
    backward(m.ddp, m.p, m.count, step, shard);
    CHECK(!cddp_ddp_next_shard(m.ddp, &shard));
    CHECK_OK(take_step(m.ddp, m.optim, BOTH, step, &norm));
    CHECK_EQ(cddp_ddp_steps(m.ddp), step + 1);
  }
  model_close(&m, g);
  return test_failures != before;
}

static void test_default(void) {
  plan c;
  memset(&c, 0, sizeof c);
  CHECK_OK(ranks_run(default_body, &c, 3, true));
  CHECK_EQ(cddp_ddp_steps(NULL), 0);
  CHECK(!cddp_ddp_next_shard(NULL, NULL));
}

/* ERRORS. -------------------------------------------------------------------------------------- */

static cddp_result no_hook(cddp_bucket *b, void *arg) {
  (void)b, (void)arg;
  return CDDP_OK;
}

/* The result of creation on 3 ranks, which is the same on all of them. */
static cddp_result create(cddp_group *g, const cddp_ddp_desc *d) {
  float weight = 1;
  cddp_param p;
  cddp_ddp *ddp;
  cddp_result r;
  memset(&p, 0, sizeof p);
  p.data = &weight;
  p.count = 1;
  r = cddp_ddp_create(&ddp, g, &p, 1, d);
  cddp_ddp_destroy(ddp);
  return r;
}

static int creation_body(cddp_group *g, void *arg) {
  int before = test_failures;
  cddp_ddp_desc d;
  (void)arg;
  memset(&d, 0, sizeof d);
  d.shards = 2;
  CHECK_IS(create(g, &d), CDDP_INVALID_ARGUMENT);
  CHECK(mentions("2") && mentions("3 ranks"));
  d.shards = -1;
  CHECK_IS(create(g, &d), CDDP_INVALID_ARGUMENT);
  CHECK(mentions("-1"));
  d.shards = cddp_rank(g) == 1 ? 4 : 7;
  CHECK_IS(create(g, &d), CDDP_MISMATCH);
  CHECK(mentions("4 shards") && mentions("7 shards"));
  d.shards = 5;
  d.find_unused_parameters = true;
  CHECK_IS(create(g, &d), CDDP_UNSUPPORTED);
  CHECK(mentions("find_unused_parameters"));
  d.find_unused_parameters = false;
  d.uneven_inputs = true;
  CHECK_IS(create(g, &d), CDDP_UNSUPPORTED);
  CHECK(mentions("uneven_inputs"));
  d.uneven_inputs = false;
  d.comm_hook = no_hook;
  CHECK_IS(create(g, &d), CDDP_UNSUPPORTED);
  CHECK(mentions("comm_hook"));
  d.comm_hook = NULL;
  CHECK_OK(create(g, &d)); /* the group has lived through all of it */
  return test_failures != before;
}

static void test_creation(void) { CHECK_OK(ranks_run(creation_body, NULL, 3, true)); }

enum { LEFT, LEFT_AT_WAIT, NONE_TAKEN, UNREADY, LAST_UNREADY, TWICE, NO_SYNC, JOIN, MISTAKES };

/* Rank 1 of 2 makes a mistake with its 2 or 3 shards; both ranks' steps fail and say so. */
static int mistake_body(cddp_group *g, void *arg) {
  int mistake = *(const int *)arg, rank = cddp_rank(g), shard, taken = 0, before = test_failures;
  cddp_ddp_desc d;
  cddp_result r;
  plan c;
  model m;
  memset(&c, 0, sizeof c);
  memset(&d, 0, sizeof d);
  d.sparse_rows = rows;
  d.shards = 5;
  CHECK_OK(model_open(&m, g, &c, &d));
  if (mistake == JOIN) {
    CHECK_IS(cddp_ddp_join(m.ddp, m.optim), CDDP_UNSUPPORTED);
    model_close(&m, g);
    return test_failures != before;
  }
  if (rank == 0 || mistake > NONE_TAKEN)
    while (cddp_ddp_next_shard(m.ddp, &shard)) {
      bool wrong = rank == 1 && taken++ == (mistake == LAST_UNREADY);
      if (wrong && (mistake == UNREADY || mistake == LAST_UNREADY)) {
        CHECK_OK(cddp_ddp_ready(m.ddp, 6));
        continue;
      }
      backward(m.ddp, m.p, m.count, 0, shard);
      if (wrong && mistake == TWICE) CHECK_IS(cddp_ddp_ready(m.ddp, 2), CDDP_INVALID_ARGUMENT);
      if (wrong && mistake == NO_SYNC) cddp_ddp_no_sync(m.ddp, true);
    }
  else if (mistake != NONE_TAKEN && cddp_ddp_next_shard(m.ddp, &shard))
    backward(m.ddp, m.p, m.count, 0, shard);
  cddp_ddp_no_sync(m.ddp, false);
  r = mistake == LEFT_AT_WAIT ? cddp_ddp_wait(m.ddp) : cddp_ddp_step(m.ddp, m.optim);
  CHECK_IS(r, mistake == LAST_UNREADY ? CDDP_MISMATCH : CDDP_INVALID_ARGUMENT);
  CHECK(mentions(mistake <= NONE_TAKEN     ? "shards of this step"
                 : mistake == UNREADY      ? "was not marked ready on rank 1"
                 : mistake == LAST_UNREADY ? "on rank 1"
                 : mistake == TWICE        ? "twice"
                                           : "no_sync"));
  CHECK(mistake != LAST_UNREADY || mentions("for every parameter, in each shard"));
  CHECK(!cddp_ddp_next_shard(m.ddp, &shard));
  CHECK(cddp_ddp_step(m.ddp, m.optim) != CDDP_OK);
  CHECK_EQ(cddp_ddp_steps(m.ddp), 0);
  CHECK_OK(cddp_barrier(g));
  model_close(&m, g);
  return test_failures != before;
}

static void test_mistakes(void) {
  int mistake;
  for (mistake = 0; mistake < MISTAKES; mistake++)
    if (ranks_run(mistake_body, &mistake, 2, true) != CDDP_OK)
      test_fail(__FILE__, __LINE__, "mistake %d", mistake);
}

/* --- the norm, and where gradients lie --- */

enum { NORM_PARAMS = 5, NORM_STEPS = 4 };

/* A model of three types, all norms of which must be the same in f64 on any number of ranks and
   hosts; and its gradients in one piece, each from the next multiple of 64 bytes on. */
static int norm_body(cddp_group *g, void *arg) {
  static const size_t counts[NORM_PARAMS] = {5000, 2048, 5000, 2048, 1};
  static const cddp_dtype types[NORM_PARAMS] = {CDDP_F32, CDDP_BF16, CDDP_F64, CDDP_F32, CDDP_F32};
  static const int lie[NORM_PARAMS] = {4, 3, 0, 2, 1};
  double *norms = (double *)arg + NORM_STEPS * cddp_rank(g), norm = 0;
  int before = test_failures, step, shard, i;
  char *data[NORM_PARAMS], *at;
  cddp_param p[NORM_PARAMS];
  cddp_ddp_desc desc;
  cddp_ddp *d = NULL;
  size_t k, bytes;
  memset(&desc, 0, sizeof desc);
  memset(p, 0, sizeof p);
  for (i = 0; i < NORM_PARAMS; i++) {
    p[i].count = counts[i];
    p[i].dtype = types[i];
    p[i].data = data[i] = (char *)calloc(counts[i], cddp_dtype_size(types[i]));
  }
  desc.shards = 6;
  CHECK_OK(cddp_ddp_create(&d, g, p, NORM_PARAMS, &desc));
  for (i = 0, at = (char *)p[lie[0]].grad; i < NORM_PARAMS; i++) {
    CHECK((char *)p[lie[i]].grad == at);
    bytes = counts[lie[i]] * cddp_dtype_size(types[lie[i]]);
    at += (bytes + 63) / 64 * 64;
  }
  for (step = 0; step < NORM_STEPS && test_failures == before; step++) {
    while (cddp_ddp_next_shard(d, &shard))
      for (i = 0; i < NORM_PARAMS; i++) {
        uint64_t seed = (uint64_t)(100 * step + shard);
        for (k = 0; k < counts[i]; k++)
          ranks_put(p[i].grad, types[i], k, ranks_mix(seed, (uint64_t)i, k));
        CHECK_OK(cddp_ddp_ready(d, i));
      }
    CHECK_OK(cddp_ddp_wait(d));
    CHECK_OK(cddp_ddp_clip_grad_norm(d, 1.0, &norms[step]));
    CHECK_OK(cddp_ddp_grad_norm(d, &norm));
    CHECK(norm == norms[step] && norm > 1);
    for (i = 0; i < NORM_PARAMS; i++) memset(p[i].grad, 0, counts[i] * cddp_dtype_size(types[i]));
  }
  cddp_ddp_destroy(d);
  for (i = 0; i < NORM_PARAMS; i++) free(data[i]);
  return test_failures != before;
}

static void test_norm(void) {
  static const char *const hosts[] = {"", "abcdef", "aab"};
  double *norms = (double *)ranks_shared(6 * NORM_STEPS * sizeof *norms), want[NORM_STEPS];
  int n, k, i;
  CHECK_OK(ranks_run(norm_body, norms, 1, false));
  memcpy(want, norms, sizeof want);
  for (k = 0; k < 3; k++)
    for (n = 2; n <= 6; n++) {
      setenv("TEST_HOSTS", hosts[k], 1);
      CHECK_OK(ranks_run(norm_body, norms, n, false));
      for (i = 0; i < n; i++)
        if (memcmp(norms + i * NORM_STEPS, want, sizeof want) != 0)
          test_fail(__FILE__, __LINE__, "%d ranks on hosts \"%s\": rank %d has another norm", n,
                    hosts[k], i);
    }
  unsetenv("TEST_HOSTS");
}

int main(void) {
  RUN(test_default);
  RUN(test_creation);
  RUN(test_mistakes);
  RUN(test_world_sizes);
  RUN(test_adamw);
  RUN(test_many_shards);
  RUN(test_processes);
  RUN(test_norm);
  return TEST_END();
}
