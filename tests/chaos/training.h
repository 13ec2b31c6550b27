/* training.h - what tests of elastic models train.

   A recipe draws a random model: dtypes, sizes, sparse rows, an optimizer, clipping, copies. Its
   gradients depend on step and shard alone, so the weights after each step follow from the recipe,
   whoever computes them: one hash tells whether all is well. The reference is one rank without
   failures. Included after ranks.h. */
#ifndef TRAINING_H
#define TRAINING_H

enum { TRAINING_SHARDS = 12, TRAINING_PARAMS = 5, TRAINING_STEPS = 12 };

typedef struct recipe {
  uint64_t seed;
  int shards, count, steps;
  bool adamw, waits, mixed, shared, own, copies, masters; /* mixed: steps and waits by turns */
  double momentum, max_norm;
  size_t rows[TRAINING_PARAMS]; /* the first parameter may have sparse ones */
  cddp_dtype dtypes[TRAINING_PARAMS];
  size_t sizes[TRAINING_PARAMS];
  unsigned pause; /* a shard's work takes up to so many microseconds */
} recipe;

static recipe recipe_draw(uint64_t seed, int least_shards) {
  static const size_t some[] = {1, 7, 300, 2048, 2100, 5000, 9001};
  static const double momenta[] = {0, 0.9, 0.5};
  uint64_t k = 0;
#define DRAW(n) (ranks_mix(seed, ++k, 11) % (uint64_t)(n))
  recipe c;
  int i, kind;
  memset(&c, 0, sizeof c);
  c.seed = seed;
  c.shards = least_shards + (int)DRAW(TRAINING_SHARDS - least_shards + 1);
  c.steps = 2 + (int)DRAW(TRAINING_STEPS - 1);
  c.count = 1 + (int)DRAW(TRAINING_PARAMS);
  kind = (int)DRAW(6); /* of types */
  c.adamw = kind < 3 && DRAW(2);
  for (i = 0; i < c.count; i++) {
    c.sizes[i] = DRAW(24) == 0 ? 40000 : some[DRAW(sizeof some / sizeof *some)];
    c.dtypes[i] = kind < 2    ? CDDP_F32
                  : kind == 2 ? (cddp_dtype)DRAW(2)
                  : kind == 3 ? CDDP_F16
                  : kind == 4 ? CDDP_BF16
                              : (cddp_dtype)DRAW(4);
  }
  c.momentum = momenta[DRAW(3)];
  c.copies = kind < 2 && DRAW(4) == 0;
  c.waits = DRAW(3) == 0;
  c.mixed = DRAW(4) == 0;
  c.shared = DRAW(2);
  c.own = DRAW(4) == 0;
  c.pause = DRAW(2) ? 0 : (unsigned)DRAW(600);
  c.max_norm = DRAW(3) == 0 ? ranks_mix(seed, 99, 11) % 3 ? 2 : 1e9 : 0; /* all clipped, or none */
  c.masters = DRAW(3) == 0;
  if (!c.adamw && DRAW(3) == 0) c.rows[0] = c.sizes[0] % 3 == 0 ? c.sizes[0] / 3 : c.sizes[0];
#undef DRAW
  return c;
}

static void recipe_describe(const recipe *c, char *out, size_t n) {
  snprintf(out, n,
           "%d shards, %d parameters, %d steps, %s, %s weights, %s gradients, %s%s%s%s, norm %g",
           c->shards, c->count, c->steps, c->adamw ? "AdamW" : "SGD",
           c->shared ? "shared" : "malloc'ed", c->own ? "own" : "placed",
           c->mixed   ? "both"
           : c->waits ? "wait"
                      : "step",
           c->copies ? ", copies" : "", c->masters ? ", masters" : "",
           c->rows[0] > 0 ? ", rows" : "", c->max_norm);
}

typedef struct training {
  cddp_param p[TRAINING_PARAMS];
  void *copies[TRAINING_PARAMS];
  cddp_group *g;
  cddp_ddp *ddp;
  cddp_optim *optim;
} training;

static double training_noise(uint64_t a, uint64_t b, uint64_t c) {
  return (double)(int64_t)(ranks_mix(a, b, c) >> 11) * 0x1p-52 - 1;
}

/* In the group m->g. elastic: false for the rank that computes what the others must have. */
static cddp_result training_open(training *m, const recipe *c, bool elastic, bool joins) {
  cddp_ddp_desc desc;
  cddp_sgd_desc s;
  cddp_adamw_desc a;
  cddp_result r;
  int k;
  size_t i;
  memset(&desc, 0, sizeof desc);
  memset(&s, 0, sizeof s);
  memset(&a, 0, sizeof a);
  for (k = 0; k < c->count; k++) {
    size_t bytes = c->sizes[k] * cddp_dtype_size(c->dtypes[k]);
    m->p[k].name = k % 2 ? "odd" : "even";
    m->p[k].count = c->sizes[k];
    m->p[k].dtype = c->dtypes[k];
    m->p[k].data = c->shared ? cddp_alloc(m->g, bytes) : malloc(bytes);
    if (m->p[k].data == NULL) return CDDP_OUT_OF_MEMORY;
    if (c->own && c->rows[k] == 0) m->p[k].grad = calloc(1, bytes);
    for (i = 0; i < c->sizes[k]; i++) /* a rank that joins begins with others */
      ranks_store(c->dtypes[k], m->p[k].data, i,
                  training_noise(joins ? 4 : 3, (uint64_t)k, i));
    if (c->copies) m->copies[k] = malloc(c->sizes[k] * 2);
  }
  desc.shards = c->shards;
  desc.elastic = elastic;
  desc.max_grad_norm = c->max_norm;
  if (c->rows[0] > 0) desc.sparse_rows = c->rows;
  if ((r = cddp_ddp_create(&m->ddp, m->g, m->p, c->count, &desc)) != CDDP_OK) return r;
  if (c->adamw) {
    a.lr = 0.01;
    a.weight_decay = 0.01;
    a.amsgrad = c->seed % 2 == 0;
    a.ddp = m->ddp;
    a.master_weights = c->masters;
    a.copies = c->copies ? m->copies : NULL;
    a.copy_dtype = CDDP_BF16;
    return cddp_adamw_create(&m->optim, m->p, c->count, &a);
  }
  s.lr = 0.1;
  s.momentum = c->momentum;
  s.weight_decay = c->seed % 3 == 0 && c->rows[0] == 0 ? 0.01 : 0;
  s.master_weights = c->masters;
  s.ddp = m->ddp;
  s.copies = c->copies ? m->copies : NULL;
  s.copy_dtype = CDDP_F16;
  return cddp_sgd_create(&m->optim, m->p, c->count, &s);
}

static void training_close(training *m, const recipe *c) {
  int k;
  cddp_optim_destroy(m->optim);
  cddp_ddp_destroy(m->ddp);
  for (k = 0; k < c->count; k++) {
    if (c->shared) cddp_free(m->g, m->p[k].data);
    else free(m->p[k].data);
    if (c->own && c->rows[k] == 0) free(m->p[k].grad);
    free(m->copies[k]);
  }
}

/* A few rows of the first parameter. */
static bool training_rows(training *m, const recipe *c, uint64_t step, int shard) {
  const cddp_param *p = &m->p[0];
  size_t width = p->count / c->rows[0], i;
  uint64_t seed = step * TRAINING_SHARDS + (uint64_t)shard, n;
  for (n = 0; n < 1 + seed % 4; n++) {
    int64_t row = (int64_t)(ranks_mix(seed, n, 7) % c->rows[0]);
    double values[3];
    for (i = 0; i < width; i++)
      ranks_store(p->dtype, values, i,
                  0.1 * ranks_load(p->dtype, p->data, (size_t)row * width + i) +
                      training_noise(seed, 99 + n, i));
    if (cddp_ddp_add_rows(m->ddp, 0, &row, values, 1) != CDDP_OK) return false;
  }
  return true;
}

/* Gradients depend on the weights, so what is wrong once stays wrong. */
static cddp_result training_backward(training *m, const recipe *c, uint64_t step, int shard) {
  int k;
  size_t i;
  for (k = c->count - 1; k >= 0; k--) {
    const cddp_param *p = &m->p[k];
    if (c->rows[k] > 0 && !training_rows(m, c, step, shard)) return CDDP_INVALID_ARGUMENT;
    for (i = 0; i < p->count && c->rows[k] == 0; i++)
      ranks_store(p->dtype, p->grad, i,
                  ranks_load(p->dtype, p->grad, i) + 0.1 * ranks_load(p->dtype, p->data, i) +
                      training_noise(step * TRAINING_SHARDS + (uint64_t)shard, (uint64_t)k, i));
    if (cddp_ddp_ready(m->ddp, k) != CDDP_OK) return CDDP_INVALID_ARGUMENT; /* step says why */
  }
  return CDDP_OK;
}

static uint64_t training_hash(const training *m, const recipe *c) {
  uint64_t h = 1;
  int k;
  for (k = 0; k < c->count; k++) {
    h = ranks_hash(h, m->p[k].data, c->sizes[k] * cddp_dtype_size(c->dtypes[k]));
    if (c->copies) h = ranks_hash(h, m->copies[k], 2 * c->sizes[k]);
  }
  return h;
}

static cddp_result training_step(training *m, const recipe *c, uint64_t t) {
  int shard;
  cddp_result r;
  while (cddp_ddp_next_shard(m->ddp, &shard)) {
    if (c->pause > 0)
      ranks_sleep((double)(ranks_mix(t, (uint64_t)shard, (uint64_t)getpid()) % c->pause) * 1e-6);
    if (training_backward(m, c, t, shard) != CDDP_OK) break;
  }
  if ((r = cddp_optim_set_lr(m->optim, 0.1 / (double)(1 + t % 3))) != CDDP_OK) return r;
  if (c->mixed ? t % 2 == 0 : !c->waits) return cddp_ddp_step(m->ddp, m->optim);
  if ((r = cddp_ddp_wait(m->ddp)) != CDDP_OK) return r;
  if ((r = cddp_optim_step(m->optim)) != CDDP_OK) return r;
  return cddp_optim_zero_grad(m->optim);
}

#endif
