/* Optimizers of the caller's own: cddp_ddp_reduce_scatter, a loop over this rank's partitions, and
   cddp_ddp_all_gather.

   SGD written that way must have the bits of cddp_ddp_step, for each number of ranks, on several
   hosts, with hooks, clipping and shards. Partitions of all ranks must cover every element once.
   Checkpoints hold the gathered states; calls out of order and ranks that leave are errors. */
#define CDDP_IMPLEMENTATION
#include "../../cddp.h"

#include "../ranks.h"

enum { PARAMS = 5, STEPS = 7, SPARSE = 4, ROWS = 10 };
enum { SHARED, HEAP, OWN_GRADS };

static const size_t counts[PARAMS] = {5003, 17, 0, 30000, 40 * ROWS};

typedef struct plan {
  int memory, shards;
  double clip, momentum;
  bool unused, waits; /* every third step is a cddp_ddp_wait */
  bool sparse;        /* the last parameter's gradient is rows */
  cddp_comm_hook hook;
  const char *path; /* of a checkpoint, written half-way by some ranks and read by others */
  int from, to;     /* steps */
} plan;

typedef struct model {
  cddp_param p[PARAMS];
  cddp_ddp *ddp;
  float *momentum[PARAMS]; /* whole; only this rank's partitions are in use */
} model;

static float gradient_of(int rank, int step, int param, size_t i) {
  uint64_t h = ranks_mix((uint64_t)(rank * 100 + param), (uint64_t)step, i);
  return (float)ldexp((double)(int64_t)(h >> 20) * 0x1p-43 - 1, (int)(h % 9) - 6);
}

static bool uses(const plan *c, int rank, int step, int param) {
  return !c->unused || (param == 0 ? step % 3 != 1 : param != 3 || rank % 2 == 0);
}

static void model_open(model *m, cddp_group *g, const plan *c) {
  static const char *const names[PARAMS] = {"a", "b", "c", "d", "e"};
  static const size_t rows[PARAMS] = {0, 0, 0, 0, ROWS};
  cddp_ddp_desc d;
  size_t i;
  int k;
  memset(m, 0, sizeof *m);
  memset(&d, 0, sizeof d);
  for (k = 0; k < PARAMS; k++) {
    size_t bytes = counts[k] * sizeof(float) + 8;
    m->p[k].name = names[k];
    m->p[k].count = counts[k];
    m->p[k].data = c->memory == SHARED ? cddp_alloc(g, bytes) : malloc(bytes);
    if (c->memory == OWN_GRADS && !(c->sparse && k == SPARSE)) m->p[k].grad = calloc(1, bytes);
    m->momentum[k] = (float *)calloc(1, bytes);
    for (i = 0; i < counts[k]; i++) ((float *)m->p[k].data)[i] = gradient_of(7, -1, k, i);
  }
  d.find_unused_parameters = c->unused;
  d.shards = c->shards;
  d.max_grad_norm = c->clip;
  d.comm_hook = c->hook;
  if (c->sparse) d.sparse_rows = rows;
  CHECK_OK(cddp_ddp_create(&m->ddp, g, m->p, PARAMS, &d));
}

static void model_close(model *m, cddp_group *g, const plan *c) {
  int k;
  void *grads[PARAMS];
  for (k = 0; k < PARAMS; k++) grads[k] = m->p[k].grad;
  cddp_ddp_destroy(m->ddp);
  for (k = 0; k < PARAMS; k++) {
    if (c->memory == SHARED) cddp_free(g, m->p[k].data);
    else free(m->p[k].data);
    if (c->memory == OWN_GRADS) free(grads[k]);
    free(m->momentum[k]);
  }
}

static void backward(model *m, const plan *c, cddp_group *g, int step) {
  int shard = cddp_rank(g), k;
  bool more = c->shards == 0 || cddp_ddp_next_shard(m->ddp, &shard);
  size_t i;
  for (; more; more = c->shards > 0 && cddp_ddp_next_shard(m->ddp, &shard))
    for (k = PARAMS - 1; k >= 0; k--) {
      if (!uses(c, shard, step, k)) continue;
      if (c->sparse && k == SPARSE) {
        float values[2][40];
        int64_t rows[2];
        rows[0] = step % ROWS, rows[1] = (shard * 3 + 1) % ROWS;
        for (i = 0; i < 80; i++) values[i / 40][i % 40] = gradient_of(shard, step, k, i);
        CHECK_OK(cddp_ddp_add_rows(m->ddp, k, rows, values, 2));
      }
      for (i = 0; m->p[k].grad != NULL && i < counts[k]; i++)
        ((float *)m->p[k].grad)[i] += gradient_of(shard, step, k, i);
      CHECK_OK(cddp_ddp_ready(m->ddp, k));
    }
}

static void sgd(float *w, const float *g, float *m, size_t n, bool first, const plan *c) {
  size_t i;
  for (i = 0; i < n; i++) {
    if (c->momentum > 0) m[i] = first ? g[i] : (float)c->momentum * m[i] + g[i];
    w[i] = fmaf(-0.05f, c->momentum > 0 ? m[i] : g[i], w[i]);
  }
}

static void own_step(model *m, const plan *c, bool *first) {
  const cddp_partition *part;
  const int64_t *rows;
  const void *values;
  size_t n, k;
  int i, parts = cddp_ddp_partitions(m->ddp, &part);
  for (i = 0; i < parts; i++) {
    if (!cddp_ddp_used(m->ddp, part[i].param)) continue;
    CHECK(part[i].data == (float *)m->p[part[i].param].data + part[i].first);
    sgd((float *)part[i].data, (const float *)part[i].grad,
        m->momentum[part[i].param] + part[i].first, part[i].count, first[part[i].param], c);
  }
  for (i = 0; i < PARAMS; i++)
    if (cddp_ddp_used(m->ddp, i)) first[i] = false;
  if (!c->sparse) return;
  n = cddp_ddp_rows(m->ddp, SPARSE, &rows, &values);
  for (k = 0; k < n; k++)
    sgd((float *)m->p[SPARSE].data + rows[k] * 40, (const float *)values + k * 40, NULL, 40, false,
        c);
}

static void wait_step(model *m, cddp_group *g, const plan *c, bool *first) {
  int k;
  cddp_param states[PARAMS];
  for (k = 0; k < PARAMS; k++) {
    states[k] = m->p[k];
    states[k].data = m->momentum[k];
  }
  CHECK_OK(cddp_ddp_wait(m->ddp));
  if (c->clip > 0) CHECK_OK(cddp_ddp_clip_grad_norm(m->ddp, c->clip, NULL));
  CHECK_OK(cddp_ddp_gather_states(m->ddp, states));
  for (k = 0; k < PARAMS; k++) {
    if (!cddp_ddp_used(m->ddp, k)) continue;
    sgd((float *)m->p[k].data, (const float *)m->p[k].grad, m->momentum[k], counts[k], first[k],
        c);
    first[k] = false;
  }
  for (k = 0; k < PARAMS; k++) memset(m->p[k].grad, 0, counts[k] * sizeof(float));
  (void)g;
}

/* The partitions of this host's ranks are all elements, each once. */
static void check_cover(const model *m, cddp_group *g, const plan *c) {
  const cddp_partition *part;
  int n = cddp_ddp_partitions(m->ddp, &part), i, k;
  for (k = 0; k < PARAMS; k++) {
    int32_t *times = (int32_t *)calloc(counts[k] + 1, sizeof *times), hosts;
    size_t e;
    hosts = cddp_local_rank(g) == 0;
    CHECK_OK(cddp_all_reduce(g, &hosts, 1, CDDP_I32, CDDP_SUM, NULL));
    for (i = 0; i < n; i++)
      for (e = 0; part[i].param == k && e < part[i].count; e++) times[part[i].first + e]++;
    CHECK_OK(cddp_all_reduce(g, times, counts[k], CDDP_I32, CDDP_SUM, NULL));
    for (e = 0; e < counts[k]; e++)
      if (times[e] != (c->sparse && k == SPARSE ? 0 : hosts)) break;
    CHECK(e == counts[k]);
    free(times);
  }
}

static void checkpoint(model *m, cddp_group *g, const plan *c, bool *first) {
  cddp_param all[2 * PARAMS];
  char names[PARAMS][16];
  int k;
  memcpy(all, m->p, sizeof m->p);
  for (k = 0; k < PARAMS; k++) {
    snprintf(names[k], sizeof names[k], "momentum.%s", m->p[k].name);
    all[PARAMS + k] = m->p[k];
    all[PARAMS + k].name = names[k];
    all[PARAMS + k].data = m->momentum[k];
  }
  if (c->from == 0) {
    CHECK_OK(cddp_ddp_gather_states(m->ddp, all + PARAMS));
    CHECK_OK(cddp_save(g, c->path, all, 2 * PARAMS, NULL));
  } else {
    CHECK_OK(cddp_load(g, c->path, all, 2 * PARAMS, NULL));
    for (k = 0; k < PARAMS; k++) first[k] = false;
  }
}

static int run_plan(cddp_group *g, void *arg) {
  const plan *c = (const plan *)arg;
  int before = test_failures, step, k, to = c->to > 0 ? c->to : STEPS;
  bool first[PARAMS] = {true, true, true, true, true};
  cddp_sgd_desc o;
  cddp_optim *fused;
  model mine, theirs;
  double norm[2];
  memset(&o, 0, sizeof o);
  model_open(&mine, g, c);
  model_open(&theirs, g, c);
  check_cover(&mine, g, c);
  o.lr = 0.05;
  o.momentum = c->momentum;
  o.ddp = theirs.ddp;
  CHECK_OK(cddp_sgd_create(&fused, theirs.p, PARAMS, &o));
  if (c->from > 0) checkpoint(&mine, g, c, first);
  for (step = 0; step < to && test_failures == before; step++) {
    backward(&theirs, c, g, step);
    CHECK_OK(cddp_ddp_step(theirs.ddp, fused));
    if (step < c->from) continue;
    backward(&mine, c, g, step);
    if (c->waits && step % 3 == 2) {
      wait_step(&mine, g, c, first);
    } else {
      CHECK_OK(cddp_ddp_reduce_scatter(mine.ddp));
      own_step(&mine, c, first);
      CHECK_OK(cddp_ddp_all_gather(mine.ddp));
    }
    CHECK_EQ(cddp_ddp_steps(mine.ddp), (uint64_t)(step - c->from + 1));
    for (k = 0; k < 2 && c->clip > 0; k++)
      CHECK_OK(cddp_ddp_grad_norm(k == 0 ? mine.ddp : theirs.ddp, &norm[k]));
    CHECK(c->clip == 0 || norm[0] == norm[1]);
    for (k = 0; k < PARAMS; k++) {
      size_t i, bytes = counts[k] * sizeof(float);
      CHECK(memcmp(mine.p[k].data, theirs.p[k].data, bytes) == 0);
      for (i = 0; mine.p[k].grad != NULL && i < counts[k]; i++)
        if (((float *)mine.p[k].grad)[i] != 0) break;
      CHECK(mine.p[k].grad == NULL || i == counts[k]);
    }
  }
  if (c->path != NULL && c->from == 0) checkpoint(&mine, g, c, first);
  cddp_optim_destroy(fused);
  model_close(&mine, g, c);
  model_close(&theirs, g, c);
  return test_failures != before;
}

static void test_bits(void) {
  int n, k;
  for (n = 1; n <= 4; n++)
    for (k = 0; k < (RANKS_SLOW ? 3 : 8); k++) {
      plan c;
      memset(&c, 0, sizeof c);
      c.memory = (n + k) % 3;
      c.shards = k % 4 == 1 ? 5 : 0;
      c.clip = k % 3 == 2 ? 3 : 0;
      c.momentum = k % 2 == 0 ? 0.9 : 0;
      c.unused = k == 2 || k == 6;
      c.waits = k == 4 || k == 6 || k == 5;
      c.sparse = k == 1 || k == 3 || k == 7;
      CHECK_OK(ranks_run(run_plan, &c, n, n == 3));
    }
}

static void test_hosts(void) {
  static const char *const hosts[] = {"ab", "aab"};
  int h, k;
  for (h = 0; h < 2; h++)
    for (k = 0; k < 2; k++) {
      plan c;
      memset(&c, 0, sizeof c);
      c.momentum = 0.9;
      c.waits = c.unused = k == 0;
      c.shards = k == 1 ? 4 : 0;
      c.clip = h == 1 ? 3 : 0;
      c.memory = h;
      setenv("TEST_HOSTS", hosts[h], 1);
      CHECK_OK(ranks_run(run_plan, &c, 2 + h, false));
      unsetenv("TEST_HOSTS");
    }
}

/* A hook's buckets are reduced before; the bits are those of the step after the same hook. */
static void test_hook(void) {
  plan c;
  memset(&c, 0, sizeof c);
  c.momentum = 0.9;
  c.hook = cddp_bf16_compress_hook;
  CHECK_OK(ranks_run(run_plan, &c, 2, false));
  CHECK_OK(ranks_run(run_plan, &c, 3, false));
}

/* States of 2 ranks' partitions, continued by 3, 1 and 4. */
static void test_checkpoint(void) {
  static const int worlds[] = {3, 1, 4};
  char folder[] = "/tmp/cddp-partition-XXXXXX", path[64];
  plan c;
  int k;
  CHECK(mkdtemp(folder) != NULL);
  snprintf(path, sizeof path, "%s/checkpoint", folder);
  memset(&c, 0, sizeof c);
  c.momentum = 0.9;
  c.shards = 4;
  c.path = path;
  c.to = 3;
  CHECK_OK(ranks_run(run_plan, &c, 2, false));
  c.from = 3;
  c.to = STEPS;
  for (k = 0; k < 3; k++) CHECK_OK(ranks_run(run_plan, &c, worlds[k], false));
  CHECK_EQ(unlink(path), 0);
  CHECK_EQ(rmdir(folder), 0);
}

static int run_misused(cddp_group *g, void *arg) {
  plan c;
  model m;
  cddp_sgd_desc o;
  cddp_optim *s;
  cddp_param states[PARAMS];
  (void)arg;
  memset(&c, 0, sizeof c);
  memset(&o, 0, sizeof o);
  model_open(&m, g, &c);
  CHECK_OK(cddp_sgd_create(&s, m.p, PARAMS, &o));
  CHECK_IS(cddp_ddp_all_gather(m.ddp), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "cddp_ddp_reduce_scatter") != NULL);
  CHECK_IS(cddp_ddp_reduce_scatter(NULL), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_ddp_all_gather(NULL), CDDP_INVALID_ARGUMENT);
  CHECK_EQ(cddp_ddp_partitions(NULL, NULL), 0);
  memcpy(states, m.p, sizeof states);
  states[1].count++;
  CHECK_IS(cddp_ddp_gather_states(m.ddp, states), CDDP_INVALID_ARGUMENT);
  backward(&m, &c, g, 0);
  CHECK_OK(cddp_ddp_reduce_scatter(m.ddp));
  CHECK_IS(cddp_ddp_reduce_scatter(m.ddp), CDDP_INVALID_ARGUMENT); /* twice, and others */
  CHECK_IS(cddp_ddp_wait(m.ddp), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_ddp_step(m.ddp, s), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "cddp_ddp_all_gather") != NULL);
  CHECK_IS(cddp_ddp_join(m.ddp, s), CDDP_INVALID_ARGUMENT);
  CHECK_OK(cddp_ddp_all_gather(m.ddp)); /* all is as it was */
  CHECK_IS(cddp_ddp_all_gather(m.ddp), CDDP_INVALID_ARGUMENT);
  backward(&m, &c, g, 1);
  CHECK_IS(cddp_rank(g) == 1 ? cddp_ddp_wait(m.ddp) : cddp_ddp_reduce_scatter(m.ddp),
           CDDP_MISMATCH);
  CHECK(strstr(cddp_error(), "ddp_reduce_scatter") != NULL);
  CHECK(strstr(cddp_error(), "ddp_wait") != NULL);
  CHECK_IS(cddp_ddp_all_gather(m.ddp), CDDP_MISMATCH); /* the model stays failed */
  cddp_optim_destroy(s);
  model_close(&m, g, &c);
  CHECK_OK(cddp_barrier(g));
  model_open(&m, g, &c); /* one joins, the others cannot have it step for them */
  if (cddp_rank(g) != 1) backward(&m, &c, g, 0);
  CHECK_IS(cddp_rank(g) == 1 ? cddp_ddp_join(m.ddp, NULL) : cddp_ddp_reduce_scatter(m.ddp),
           CDDP_MISMATCH);
  model_close(&m, g, &c);
  return test_failures != 0;
}

static void test_misused(void) { CHECK_OK(ranks_run(run_misused, NULL, 2, false)); }

/* A rank that leaves between the two calls. */
static int run_left(cddp_group *g, void *arg) {
  plan c;
  model m;
  (void)arg;
  memset(&c, 0, sizeof c);
  model_open(&m, g, &c);
  backward(&m, &c, g, 0);
  CHECK_OK(cddp_ddp_reduce_scatter(m.ddp));
  if (cddp_rank(g) != 0) CHECK_IS(cddp_ddp_all_gather(m.ddp), CDDP_PEER_LOST);
  model_close(&m, g, &c);
  return test_failures != 0;
}

static void test_left(void) { CHECK_OK(ranks_run(run_left, NULL, 3, false)); }

/* Gradients that cddp_ddp_create places lie as its comment says. */
static int run_layout(cddp_group *g, void *arg) {
  static const cddp_dtype dtypes[] = {CDDP_BF16, CDDP_F32, CDDP_F64, CDDP_F32, CDDP_F16, CDDP_F32};
  static const size_t sizes[] = {33, 1, 9, 1000, 17, 0}, rows[] = {0, 0, 0, 0, 0, 0};
  static const cddp_dtype order[] = {CDDP_F32, CDDP_F64, CDDP_F16, CDDP_BF16};
  static double w[6][1000];
  cddp_param p[6];
  cddp_ddp_desc d;
  cddp_ddp *ddp;
  char *next = NULL;
  int i, k;
  (void)arg;
  memset(p, 0, sizeof p);
  memset(&d, 0, sizeof d);
  d.sparse_rows = rows;
  for (i = 0; i < 6; i++) p[i].data = w[i], p[i].count = sizes[i], p[i].dtype = dtypes[i];
  CHECK_OK(cddp_ddp_create(&ddp, g, p, 6, &d));
  for (k = 0; k < 4; k++)
    for (i = 5; i >= 0; i--) {
      if (p[i].dtype != order[k]) continue;
      CHECK(next == NULL || p[i].grad == next);
      CHECK((uintptr_t)p[i].grad % 64 == 0);
      next = (char *)p[i].grad + (sizes[i] * cddp_dtype_size(dtypes[i]) + 63) / 64 * 64;
    }
  cddp_ddp_destroy(ddp);
  return test_failures != 0;
}

static void test_layout(void) { CHECK_OK(ranks_run(run_layout, NULL, 2, false)); }

int main(void) {
  RUN(test_layout);
  RUN(test_bits);
  RUN(test_hosts);
  RUN(test_hook);
  RUN(test_checkpoint);
  RUN(test_misused);
  RUN(test_left);
  return TEST_END();
}
