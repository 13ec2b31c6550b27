/* AdamW, and SGD with settings of its own for each parameter, in data-parallel steps.

   The reference is a loop of one process over the mean gradient, with one optimizer for each
   parameter: the weights of all ranks must have its bits. This is asked of fused steps and of
   wait plus step, of unused parameters, shards, uneven inputs, several hosts, masters of half
   precision, clipping, and of training that goes on from a checkpoint. Settings that ranks do not
   share, and damaged checkpoints, are errors. */
#define CDDP_IMPLEMENTATION
#include "../../cddp.h"

#include "../ranks.h"

enum { PARAMS = 6, LARGE = 5003, STEPS = 12, DOUBLES = 4 /* this parameter is f64 */ };
enum { SHARED, HEAP, OWN_GRADS };

static const size_t counts[PARAMS] = {LARGE, 17, 0, 2048, 300, 1};
static const double decays[PARAMS] = {0.1, 0, 0.1, 0.02, 0, 0.3};
static const double scales[PARAMS] = {1, 0.5, 1, 1, 2, 0};

typedef struct plan {
  int memory, mode; /* mode: 0: all steps are fused; 1: every other; 2: none */
  bool sgd, amsgrad, maximize, groups, copies, unused, uneven, same;
  int first, steps; /* of all; same: every rank has rank 0's gradients */
  int shards;       /* 0: one a rank, without asking */
  double clip;      /* to this norm; 0: not */
  cddp_dtype half;  /* not F32: of even parameters, with masters. Then their reference is an f32
                       loop with copies, whose gradients are the rounded means */
  const char *save, *load;
} plan;

typedef struct element {
  int ranks[64], step, param;
  size_t i;
} element;

static bool is_half(const plan *c, int param) {
  return c->half != CDDP_F32 && param % 2 == 0 && param != DOUBLES;
}

static double rounded(cddp_dtype dtype, double x) {
  double space = 0;
  ranks_store(dtype, &space, 0, x);
  return ranks_load(dtype, &space, 0);
}

static double gradient_of(int rank, int step, int param, size_t i) {
  uint64_t h = ranks_mix((uint64_t)(rank * 100 + param), (uint64_t)step, i);
  if (h % 13 == 0) return 0;
  return ldexp((double)(int64_t)(h >> 20) * 0x1p-43 - 1, (int)(h % 9) - 6);
}

/* Whether a rank uses a parameter: nobody uses 0 in some steps, odd ranks never use 3. */
static bool uses(const plan *c, int rank, int step, int param) {
  if (!c->unused) return true;
  return param == 0 ? step % 3 != 1 : param != 3 || rank % 2 == 0 || c->same;
}

static int steps_of(const plan *c, int rank) { return c->uneven ? c->steps - 2 * rank : c->steps; }

static double tree(const plan *c, const element *e, int from, int to) {
  int half = 1;
  double a, b;
  if (to - from == 1) {
    if (!uses(c, e->ranks[from], e->step, e->param)) return 0;
    a = gradient_of(c->same ? 0 : e->ranks[from], e->step, e->param, e->i);
    return is_half(c, e->param) ? rounded(c->half, a) : a;
  }
  while (half * 2 < to - from) half *= 2;
  a = tree(c, e, from, from + half);
  b = tree(c, e, from + half, to);
  return e->param == DOUBLES ? a + b : (double)((float)a + (float)b);
}

static void set_number(const cddp_param *p, void *at, size_t i, double x) {
  if (cddp_dtype_size(p->dtype) == 2) ranks_store(p->dtype, at, i, x);
  else if (p->dtype == CDDP_F64) ((double *)at)[i] = x;
  else ((float *)at)[i] = (float)x;
}

static void describe(cddp_param *p, char name[PARAMS][16]) {
  int k;
  memset(p, 0, PARAMS * sizeof *p);
  for (k = 0; k < PARAMS; k++) {
    snprintf(name[k], sizeof name[k], "p%d", k);
    p[k].name = name[k];
    p[k].count = counts[k];
    p[k].dtype = k == DOUBLES ? CDDP_F64 : CDDP_F32;
  }
}

/* An optimizer of n parameters from `first` on; ddp NULL: of the reference. */
static cddp_optim *make(const plan *c, cddp_param *p, int first, int n, cddp_ddp *ddp,
                        void *const *copies) {
  cddp_optim *o = NULL;
  if (c->sgd) {
    cddp_sgd_desc d;
    memset(&d, 0, sizeof d);
    d.lr = 0.05, d.momentum = 0.9, d.maximize = c->maximize;
    d.weight_decay = c->groups ? decays[first] : 0.01;
    if (c->groups && n > 1) d.lr_scales = scales, d.weight_decays = decays;
    else if (c->groups) d.lr *= scales[first];
    d.ddp = ddp, d.copies = copies, d.copy_dtype = c->half != CDDP_F32 ? c->half : CDDP_BF16;
    d.master_weights = c->half != CDDP_F32;
    CHECK_OK(cddp_sgd_create(&o, p, n, &d));
  } else {
    cddp_adamw_desc d;
    memset(&d, 0, sizeof d);
    d.lr = 0.01, d.beta2 = 0.98, d.amsgrad = c->amsgrad, d.maximize = c->maximize;
    d.weight_decay = c->groups ? decays[first] : 0.01;
    if (c->groups && n > 1) d.lr_scales = scales, d.weight_decays = decays;
    else if (c->groups) d.lr *= scales[first];
    d.ddp = ddp, d.copies = copies, d.copy_dtype = c->half != CDDP_F32 ? c->half : CDDP_F16;
    d.master_weights = c->half != CDDP_F32;
    CHECK_OK(cddp_adamw_create(&o, p, n, &d));
  }
  return o;
}

/* One process's own loop. */
typedef struct reference {
  cddp_param p[PARAMS];
  char names[PARAMS][16];
  double weights[PARAMS][LARGE], grads[PARAMS][LARGE];
  uint16_t copies[PARAMS][LARGE];
  cddp_optim *o[PARAMS];
  bool used[PARAMS];
} reference;

static void start(cddp_param *p, int k) {
  size_t i;
  for (i = 0; i < p->count; i++) set_number(p, p->data, i, gradient_of(7, -1, k, i));
}

static void reference_open(reference *f, const plan *c) {
  void *copy[1];
  size_t i;
  int k;
  describe(f->p, f->names);
  for (k = 0; k < PARAMS; k++) {
    f->p[k].data = f->weights[k];
    f->p[k].grad = f->grads[k];
    start(&f->p[k], k);
    for (i = 0; is_half(c, k) && i < counts[k]; i++) /* begins as the half weights are */
      set_number(&f->p[k], f->p[k].data, i, rounded(c->half, ((float *)f->p[k].data)[i]));
    copy[0] = k % 2 == 0 && k != DOUBLES ? f->copies[k] : NULL;
    f->o[k] = make(c, &f->p[k], k, 1, NULL, c->copies || is_half(c, k) ? copy : NULL);
  }
}

/* The mean gradients, of which `norm` has been found, are near it. */
static void reference_clip(reference *f, const plan *c, double norm) {
  double sum = 0, factor = c->clip / (norm + 1e-6);
  size_t i;
  int k;
  for (k = 0; k < PARAMS; k++)
    for (i = 0; i < counts[k]; i++) {
      double x = k == DOUBLES ? f->grads[k][i] : (double)((float *)f->grads[k])[i];
      sum += x * x;
      if (!(factor < 1)) continue;
      if (k == DOUBLES) f->grads[k][i] *= factor;
      else ((float *)f->grads[k])[i] *= (float)factor;
      if (is_half(c, k))
        ((float *)f->grads[k])[i] = (float)rounded(c->half, ((float *)f->grads[k])[i]);
    }
  CHECK(fabs(sqrt(sum) - norm) <= 1e-12 * norm);
}

/* norm: what the data-parallel step has found, if it clips. */
static void reference_step(reference *f, const plan *c, int step, int world, double norm) {
  element e;
  int k, r, n = 0;
  for (r = 0; r < world; r++)
    if (step < steps_of(c, r)) e.ranks[n++] = r;
  e.step = step;
  for (k = 0; k < PARAMS; k++) {
    cddp_param *p = &f->p[k];
    bool used = false;
    for (r = 0; r < n; r++) used = used || uses(c, e.ranks[r], step, k);
    e.param = k;
    for (e.i = 0; e.i < p->count; e.i++) {
      double sum = tree(c, &e, 0, n);
      if (k != DOUBLES) sum = (double)((float)sum / (float)n);
      if (is_half(c, k)) sum = rounded(c->half, sum);
      set_number(p, p->grad, e.i, k == DOUBLES ? sum / n : sum);
    }
    if (!used) memset(p->grad, 0, sizeof f->grads[k]);
    f->used[k] = used;
  }
  if (c->clip > 0) reference_clip(f, c, norm);
  for (k = 0; k < PARAMS; k++) {
    if (f->used[k]) CHECK_OK(cddp_optim_step(f->o[k]));
    if (step == 4) /* the rate changes for all parameters */
      CHECK_OK(cddp_optim_set_lr(f->o[k], cddp_optim_lr(f->o[k]) * 0.5));
  }
}

static void reference_close(reference *f) {
  int k;
  for (k = 0; k < PARAMS; k++) cddp_optim_destroy(f->o[k]);
}

typedef struct model {
  cddp_group *g;
  cddp_param p[PARAMS];
  char names[PARAMS][16];
  void *copies[PARAMS];
  cddp_ddp *ddp;
  cddp_optim *o;
} model;

static bool model_open(model *m, cddp_group *g, const plan *c) {
  cddp_ddp_desc d;
  int k;
  memset(m, 0, sizeof *m);
  memset(&d, 0, sizeof d);
  m->g = g;
  describe(m->p, m->names);
  for (k = 0; k < PARAMS; k++) {
    size_t bytes = counts[k] * 8 + 8;
    if (is_half(c, k)) m->p[k].dtype = c->half;
    m->p[k].data = c->memory == SHARED ? cddp_alloc(g, bytes) : malloc(bytes);
    m->p[k].grad = c->memory == OWN_GRADS ? calloc(1, bytes) : NULL;
    m->copies[k] = c->copies && k % 2 == 0 && k != DOUBLES ? calloc(1, bytes) : NULL;
    if (m->p[k].data == NULL) return false;
    if (cddp_rank(g) == 0) start(&m->p[k], k);
    else memset(m->p[k].data, 0, bytes);
  }
  d.find_unused_parameters = c->unused;
  d.shards = c->shards;
  d.max_grad_norm = c->clip;
  CHECK_OK(cddp_ddp_create(&m->ddp, g, m->p, PARAMS, &d));
  if (m->ddp == NULL) return false;
  m->o = make(c, m->p, 0, PARAMS, m->ddp, c->copies ? m->copies : NULL);
  return m->o != NULL;
}

static void model_close(model *m, const plan *c) {
  int k;
  cddp_optim_destroy(m->o);
  cddp_ddp_destroy(m->ddp);
  for (k = 0; k < PARAMS; k++) {
    if (c->memory == SHARED) cddp_free(m->g, m->p[k].data);
    else free(m->p[k].data);
    if (c->memory == OWN_GRADS) free(m->p[k].grad);
    free(m->copies[k]);
  }
}

static void shard_backward(model *m, const plan *c, int step, int rank) {
  size_t i;
  int k;
  for (k = PARAMS - 1; k >= 0; k--) {
    if (!uses(c, rank, step, k)) continue;
    for (i = 0; i < m->p[k].count; i++)
      set_number(&m->p[k], m->p[k].grad, i, gradient_of(c->same ? 0 : rank, step, k, i));
    CHECK_OK(cddp_ddp_ready(m->ddp, k));
  }
}

static void backward(model *m, const plan *c, int step) {
  int shard;
  if (c->shards == 0) shard_backward(m, c, step, cddp_rank(m->g));
  else while (cddp_ddp_next_shard(m->ddp, &shard)) shard_backward(m, c, step, shard);
}

static double take_step(model *m, const plan *c, int step) { /* the norm, if it clips */
  double norm = 0, again = 0;
  if (c->mode == 0 || (c->mode == 1 && step % 2 == 0)) {
    CHECK_OK(cddp_ddp_step(m->ddp, m->o));
    if (c->clip > 0) CHECK_OK(cddp_ddp_grad_norm(m->ddp, &norm));
    return norm;
  }
  CHECK_OK(cddp_ddp_wait(m->ddp));
  if (c->clip > 0) CHECK_OK(cddp_ddp_clip_grad_norm(m->ddp, c->clip, &norm));
  if (c->clip > 0) CHECK_OK(cddp_ddp_grad_norm(m->ddp, &again));
  CHECK(again == norm);
  CHECK_OK(cddp_optim_step(m->o));
  CHECK_OK(cddp_optim_zero_grad(m->o));
  return norm;
}

static void compare(const model *m, const reference *f, const plan *c, int step) {
  int k;
  for (k = 0; k < PARAMS; k++) {
    size_t size = cddp_dtype_size(m->p[k].dtype);
    const void *want = is_half(c, k) ? (const void *)f->copies[k] : (const void *)f->weights[k];
    bool same = memcmp(m->p[k].data, want, counts[k] * size) == 0;
    if (!same)
      fprintf(stderr, "  rank %d of %d, step %d, parameter %d, mode %d, memory %d\n",
              cddp_rank(m->g), cddp_world_size(m->g), step, k, c->mode, c->memory);
    CHECK(same);
    if (m->copies[k] != NULL)
      CHECK(memcmp(m->copies[k], f->copies[k], counts[k] * sizeof(uint16_t)) == 0);
  }
}

static int run_plan(cddp_group *g, void *arg) {
  const plan *c = (const plan *)arg;
  reference *f = (reference *)calloc(1, sizeof *f);
  int before = test_failures, step, mine = steps_of(c, cddp_rank(g));
  int world = c->shards > 0 ? c->shards : cddp_world_size(g);
  double norm;
  cddp_checkpoint_desc all;
  model m;
  CHECK(f != NULL);
  memset(&all, 0, sizeof all);
  if (f != NULL && model_open(&m, g, c)) {
    all.optim = m.o;
    reference_open(f, c);
    for (step = 0; step < c->first; step++) reference_step(f, c, step, world, 0);
    if (c->load != NULL) CHECK_OK(cddp_load(g, c->load, m.p, PARAMS, &all));
    if (c->load != NULL) compare(&m, f, c, -1);
    for (step = c->first; step < c->steps && test_failures == before; step++) {
      if (step >= mine) {
        reference_step(f, c, step, world, 0);
        continue;
      }
      backward(&m, c, step);
      norm = take_step(&m, c, step);
      reference_step(f, c, step, world, norm);
      compare(&m, f, c, step);
      if (step == 4) CHECK_OK(cddp_optim_set_lr(m.o, cddp_optim_lr(m.o) * 0.5));
    }
    if (c->uneven) CHECK_OK(cddp_ddp_join(m.ddp, m.o));
    if (c->uneven) compare(&m, f, c, c->steps);
    if (c->uneven) { /* states and steps are the same too: all go on together */
      plan even = *c;
      even.uneven = false;
      even.steps++;
      reference_step(f, &even, c->steps, world, 0);
      backward(&m, &even, c->steps);
      take_step(&m, &even, c->steps);
      compare(&m, f, &even, c->steps);
    }
    if (c->save != NULL) CHECK_OK(cddp_save(g, c->save, m.p, PARAMS, &all));
    reference_close(f);
  }
  model_close(&m, c);
  free(f);
  return test_failures != before;
}

static void run_on(const plan *c, int n, bool threads) {
  plan copy = *c;
  if (copy.steps == 0) copy.steps = STEPS;
  CHECK_OK(ranks_run(run_plan, &copy, n, threads));
}

static void test_bits(void) {
  static const int worlds[] = {1, 2, 3, 4};
  int w, k;
  for (w = 0; w < (RANKS_SLOW ? 3 : 4); w++)
    for (k = 0; k < (RANKS_SLOW ? 6 : 12); k++) {
      plan c;
      memset(&c, 0, sizeof c);
      c.memory = k % 3;
      c.mode = (k + w) / 2 % 3;
      c.amsgrad = k % 4 == 3;
      c.maximize = k % 5 == 2;
      c.groups = k % 2 == 1;
      c.copies = k % 3 != 1;
      c.sgd = k % 6 == 5;
      run_on(&c, worlds[w], (k + w) % 4 == 0);
    }
}

static void test_unused(void) {
  int mode, n;
  for (n = 1; n <= 3; n++)
    for (mode = 0; mode < 3; mode++) {
      plan c;
      memset(&c, 0, sizeof c);
      c.unused = true;
      c.mode = mode;
      c.amsgrad = mode == 1;
      c.memory = mode;
      c.copies = c.groups = n == 2;
      run_on(&c, n, n == 2);
    }
}

/* The bits of as many ranks as there are shards, on any number. */
static void test_shards(void) {
  int n, mode;
  for (n = 1; n <= 4; n++)
    for (mode = 0; mode < (RANKS_SLOW ? 1 : 3); mode++) {
      plan c;
      memset(&c, 0, sizeof c);
      c.shards = 4 + mode;
      c.mode = mode;
      c.amsgrad = n == 2;
      c.groups = c.copies = true;
      c.memory = (n + mode) % 3;
      run_on(&c, n, n == 3);
    }
}

/* Ranks run out of data one after the other; a step after all have is everybody's. */
static void test_uneven(void) {
  int mode;
  for (mode = 0; mode < 3; mode++) {
    plan c;
    memset(&c, 0, sizeof c);
    c.uneven = true;
    c.mode = mode;
    c.amsgrad = mode == 0;
    c.copies = c.groups = true;
    run_on(&c, 2, false);
    run_on(&c, 4, mode == 1);
  }
}

static void test_hosts(void) {
  static const char *const hosts[] = {"ab", "aab"};
  int h, mode;
  for (h = 0; h < 2; h++)
    for (mode = 0; mode < 2; mode++) {
      plan c;
      memset(&c, 0, sizeof c);
      c.mode = mode;
      c.groups = c.copies = mode == 0;
      c.uneven = h == 1;
      c.amsgrad = h == 1;
      setenv("TEST_HOSTS", hosts[h], 1);
      run_on(&c, 2 + h, false);
      c.uneven = false;
      c.clip = 3;
      c.shards = h == 1 ? 5 : 0;
      run_on(&c, 2 + h, false);
      unsetenv("TEST_HOSTS");
    }
}

/* Saved by some ranks and resumed by others, fused or not: the bits of the run that was not
   interrupted. Ranks have the same gradients, so that the mean is theirs for any power of two. */
static void test_resume(void) {
  static const int worlds[][2] = {{2, 1}, {1, 4}, {4, 2}};
  char folder[] = "/tmp/cddp-adamw-XXXXXX", path[64];
  int k;
  CHECK(mkdtemp(folder) != NULL);
  snprintf(path, sizeof path, "%s/checkpoint", folder);
  for (k = 0; k < 6; k++) {
    plan c;
    memset(&c, 0, sizeof c);
    c.same = true;
    c.mode = k % 3;
    c.memory = k % 2;
    c.unused = k >= 3; /* parameters have taken different numbers of steps */
    c.amsgrad = k % 2 == 1;
    c.groups = true;
    c.copies = k < 4;
    c.half = k >= 4 ? CDDP_BF16 : CDDP_F32; /* masters are in the file too */
    c.sgd = k == 5;
    c.steps = 5;
    c.save = path;
    run_on(&c, worlds[k % 3][0], false);
    c.save = NULL;
    c.load = path;
    c.first = 5;
    c.steps = STEPS;
    c.mode = (k + 1) % 3;
    run_on(&c, worlds[k % 3][1], false);
  }
  CHECK_EQ(unlink(path), 0);
  CHECK_EQ(rmdir(folder), 0);
}

/* A file whose count of steps is nonsense, and one without optimizer state of a parameter. */
static void test_damaged(void) {
  static float w[3] = {1, 2, 3}, g[3] = {1, 1, 1};
  static const char name[] = "optimizer.step.w";
  char folder[] = "/tmp/cddp-adamw-XXXXXX", path[64], *bytes = (char *)calloc(1, 65536), *at;
  cddp_param p = {"w", w, g, 3, CDDP_F32};
  cddp_adamw_desc d;
  cddp_checkpoint_desc all;
  cddp_optim *o;
  const char *offsets;
  long begin;
  size_t n;
  FILE *file;
  float one = 1, nonsense[] = {-1, NAN, INFINITY, 3e9f};
  int k;
  memset(&d, 0, sizeof d);
  memset(&all, 0, sizeof all);
  d.lr = 0.1;
  CHECK(mkdtemp(folder) != NULL && bytes != NULL);
  snprintf(path, sizeof path, "%s/checkpoint", folder);
  CHECK_OK(cddp_adamw_create(&o, &p, 1, &d));
  CHECK_OK(cddp_optim_step(o));
  all.optim = o;
  CHECK_OK(cddp_save(NULL, path, &p, 1, &all));
  file = fopen(path, "rb");
  CHECK(file != NULL);
  if (file == NULL) return;
  n = fread(bytes, 1, 65536, file);
  fclose(file);
  at = (char *)memmem(bytes, n, name, sizeof name - 1);
  CHECK(at != NULL);
  CHECK(memmem(bytes, n, "optimizer.exp_avg.w", 19) != NULL);
  CHECK(memmem(bytes, n, "optimizer.exp_avg_sq.w", 22) != NULL);
  if (at == NULL) return;
  CHECK(strstr(at, "\"F32\",\"shape\":[]") != NULL); /* as torch.optim's: a scalar */
  offsets = strstr(at, "\"data_offsets\":[");
  begin = offsets != NULL ? atol(offsets + 16) : 0;
  begin += 8 + (long)(*(const uint64_t *)(const void *)bytes);
  CHECK(memcmp(bytes + begin, &one, 4) == 0);
  for (k = 0; k < 4; k++) {
    memcpy(bytes + begin, &nonsense[k], 4);
    file = fopen(path, "wb");
    CHECK(file != NULL && fwrite(bytes, 1, n, file) == n && fclose(file) == 0);
    CHECK_IS(cddp_load(NULL, path, &p, 1, &all), CDDP_IO);
    CHECK(strstr(cddp_error(), "optimizer.step.w") != NULL);
    CHECK_OK(cddp_optim_step(o)); /* goes on all the same */
  }
  cddp_optim_destroy(o);
  free(bytes);
  CHECK_EQ(unlink(path), 0);
  CHECK_EQ(rmdir(folder), 0);
}

/* Parameters in half precision whose masters the optimizer keeps. */
static void test_masters(void) {
  int n, k;
  for (n = 1; n <= 4; n++)
    for (k = 0; k < (RANKS_SLOW ? 2 : 6); k++) {
      plan c;
      memset(&c, 0, sizeof c);
      c.half = k % 2 == 0 ? CDDP_BF16 : CDDP_F16;
      c.mode = k % 3;
      c.memory = (n + k) % 3;
      c.shards = k == 3 ? 6 : 0;
      c.clip = k == 4 ? 3 : 0;
      c.sgd = k == 1;
      c.amsgrad = k == 2;
      c.unused = k == 5;
      c.groups = k % 2 == 1;
      run_on(&c, n, n == 3);
      c.shards = 0;
      c.uneven = n > 1 && k < 3 && c.clip == 0;
      if (c.uneven) run_on(&c, n, n == 2);
    }
  for (k = 0; k < 2; k++) {
    plan c;
    memset(&c, 0, sizeof c);
    c.half = CDDP_BF16;
    c.mode = k;
    c.shards = k * 4;
    setenv("TEST_HOSTS", k == 0 ? "ab" : "aab", 1);
    run_on(&c, 2 + k, false);
    unsetenv("TEST_HOSTS");
  }
}

enum { HALVES = 300 };

static cddp_optim *half_optim(cddp_param *p, bool sgd, cddp_ddp *ddp) {
  cddp_adamw_desc a;
  cddp_sgd_desc s;
  cddp_optim *o = NULL;
  memset(&a, 0, sizeof a);
  memset(&s, 0, sizeof s);
  a.lr = s.lr = 0.01, s.momentum = 0.9;
  a.ddp = s.ddp = ddp;
  a.master_weights = s.master_weights = true;
  if (sgd) CHECK_OK(cddp_sgd_create(&o, p, 1, &s));
  else CHECK_OK(cddp_adamw_create(&o, p, 1, &a));
  return o;
}

static void half_gradient(cddp_param *p, int step) {
  size_t i;
  for (i = 0; i < p->count; i++) ranks_store(p->dtype, p->grad, i, gradient_of(0, step, 0, i));
}

/* Weights that the program has changed itself, saved before a step: who loads the file goes on from
   these weights, not from the masters before. */
static void test_saved_after_a_change(void) {
  static uint16_t w[2][HALVES], g[2][HALVES];
  char folder[] = "/tmp/cddp-adamw-XXXXXX", path[64];
  cddp_checkpoint_desc all;
  cddp_param p[2];
  cddp_optim *o[2];
  int sgd, k, step;
  size_t i;
  CHECK(mkdtemp(folder) != NULL);
  snprintf(path, sizeof path, "%s/checkpoint", folder);
  for (sgd = 0; sgd < 2; sgd++) {
    memset(w, 0, sizeof w);
    memset(p, 0, sizeof p);
    memset(&all, 0, sizeof all);
    for (k = 0; k < 2; k++) {
      p[k].name = "w", p[k].data = w[k], p[k].grad = g[k];
      p[k].count = HALVES, p[k].dtype = CDDP_BF16;
      o[k] = half_optim(&p[k], sgd == 1, NULL);
    }
    for (step = 0; step < 3; step++) {
      half_gradient(&p[0], step);
      CHECK_OK(cddp_optim_step(o[0]));
    }
    for (i = 0; i < HALVES; i++) ranks_store(CDDP_BF16, w[0], i, 2);
    CHECK_OK(cddp_optim_write_copies(o[0]));
    all.optim = o[0];
    CHECK_OK(cddp_save(NULL, path, &p[0], 1, &all));
    all.optim = o[1];
    CHECK_OK(cddp_load(NULL, path, &p[1], 1, &all));
    for (k = 0; k < 2; k++) {
      half_gradient(&p[k], 3);
      CHECK_OK(cddp_optim_step(o[k]));
    }
    CHECK(memcmp(w[0], w[1], sizeof w[0]) == 0);
    for (k = 0; k < 2; k++) cddp_optim_destroy(o[k]);
  }
  CHECK_EQ(unlink(path), 0);
  CHECK_EQ(rmdir(folder), 0);
}

/* A rank that had no data in the whole first epoch, in which the others stepped behind
   cddp_ddp_wait, gets their masters. */
static int no_data(cddp_group *g, void *arg) {
  int sgd, step;
  (void)arg;
  for (sgd = 0; sgd < 2; sgd++) {
    uint16_t w[HALVES] = {0}, all[2 * HALVES];
    cddp_param p = {"w", w, NULL, HALVES, CDDP_BF16};
    cddp_optim *o;
    cddp_ddp *d;
    CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
    o = half_optim(&p, sgd == 1, d);
    for (step = 0; step < 8; step++) {
      if (step == 5) CHECK_OK(cddp_ddp_join(d, o));
      if (step < 5 && cddp_rank(g) == 1) continue;
      half_gradient(&p, step);
      CHECK_OK(cddp_ddp_ready(d, 0));
      CHECK_OK(cddp_ddp_wait(d));
      CHECK_OK(cddp_optim_step(o));
      CHECK_OK(cddp_optim_zero_grad(o));
    }
    CHECK_OK(cddp_all_gather(g, w, all, HALVES, CDDP_BF16, NULL));
    CHECK(memcmp(all, all + HALVES, sizeof w) == 0);
    cddp_optim_destroy(o);
    cddp_ddp_destroy(d);
  }
  return 0;
}

static void test_masters_of_a_rank_without_data(void) {
  CHECK_OK(ranks_run(no_data, NULL, 2, false));
  CHECK_OK(ranks_run(no_data, NULL, 2, true));
}

static cddp_result half_step(cddp_ddp *d, cddp_param *p, cddp_optim *o, int step) {
  half_gradient(p, step);
  CHECK_OK(cddp_ddp_ready(d, 0));
  return cddp_ddp_step(d, o);
}

/* Two optimizers with masters step a model in turn: those of the first would undo the other's
   steps, so they are refused until they begin anew. A twin with one optimizer, whose masters begin
   anew as often, and lr 0 in the other's steps, gets the same weights. */
static int in_turn(cddp_group *g, void *arg) {
  enum { FIRST, SECOND, TWIN };
  uint16_t w[HALVES] = {0}, twin[HALVES] = {0};
  cddp_param p[2] = {{"w", w, NULL, HALVES, CDDP_BF16}, {"w", twin, NULL, HALVES, CDDP_BF16}};
  cddp_optim *o[3];
  cddp_ddp *d[2];
  int step, k;
  (void)arg;
  for (k = 0; k < 2; k++) CHECK_OK(cddp_ddp_create(&d[k], g, &p[k], 1, NULL));
  for (k = 0; k < 3; k++) o[k] = half_optim(&p[k / 2], true, d[k / 2]);
  CHECK_OK(cddp_optim_set_lr(o[SECOND], 0));
  for (step = 0; step < 9; step++) {
    cddp_optim *now = o[step % 3 == 2 ? SECOND : FIRST];
    if (step > 2 && step % 3 != 1) {
      CHECK_IS(cddp_ddp_step(d[0], now), CDDP_INVALID_ARGUMENT);
      CHECK(strstr(cddp_error(), "cddp_optim_write_copies") != NULL);
      CHECK_OK(cddp_optim_write_copies(now));
    }
    CHECK_OK(half_step(d[0], &p[0], now, step));
    if (step % 3 == 2) CHECK_OK(cddp_optim_write_copies(o[TWIN]));
    else CHECK_OK(half_step(d[1], &p[1], o[TWIN], step));
  }
  CHECK(memcmp(w, twin, sizeof w) == 0);
  for (k = 0; k < 3; k++) cddp_optim_destroy(o[k]);
  for (k = 0; k < 2; k++) cddp_ddp_destroy(d[k]);
  return 0;
}

static void test_masters_in_turn(void) {
  CHECK_OK(ranks_run(in_turn, NULL, 1, false));
  CHECK_OK(ranks_run(in_turn, NULL, 2, false));
  CHECK_OK(ranks_run(in_turn, NULL, 2, true));
}

/* Two optimizers in turn that step different parameters (the other's are unused): their masters do
   not undo each other's steps, and stay: also after a load, with one of them unused from then on.
   A twin with one optimizer gets the same weights. */
static int in_parts(cddp_group *g, void *arg) {
  enum { FIRST, SECOND, TWIN };
  static const char *const names[] = {"a", "b", "c"};
  uint16_t w[2][3][HALVES];
  cddp_param p[2][3];
  cddp_sgd_desc s;
  cddp_ddp_desc dd;
  cddp_checkpoint_desc all;
  cddp_optim *o[3];
  cddp_ddp *d[2];
  int step, k, i;
  memset(w, 0, sizeof w);
  memset(p, 0, sizeof p);
  memset(&s, 0, sizeof s);
  memset(&dd, 0, sizeof dd);
  memset(&all, 0, sizeof all);
  s.lr = 0.01, s.momentum = 0.9, s.master_weights = true;
  dd.find_unused_parameters = true;
  for (k = 0; k < 2; k++) {
    for (i = 0; i < 3; i++) {
      p[k][i].name = names[i], p[k][i].data = w[k][i];
      p[k][i].count = HALVES, p[k][i].dtype = CDDP_BF16;
    }
    CHECK_OK(cddp_ddp_create(&d[k], g, p[k], 3, &dd));
  }
  for (k = 0; k < 3; k++) {
    s.ddp = d[k / 2];
    CHECK_OK(cddp_sgd_create(&o[k], p[k / 2], 3, &s));
  }
  for (step = 0; step < 14; step++)
    for (k = 0; k < 2; k++) {
      cddp_optim *now = o[k == 1 ? TWIN : step % 2 ? SECOND : FIRST];
      if (step == 10) {
        all.optim = now;
        CHECK_OK(cddp_save(g, (const char *)arg, p[k], 3, &all));
        CHECK_OK(cddp_load(g, (const char *)arg, p[k], 3, &all));
      }
      for (i = 0; i < 3; i++) {
        if ((i == 2) != (step % 2 == 1) || (i == 1 && step >= 10)) continue; /* unused */
        half_gradient(&p[k][i], step);
        CHECK_OK(cddp_ddp_ready(d[k], i));
      }
      CHECK_OK(cddp_ddp_step(d[k], now));
    }
  CHECK(memcmp(w[0], w[1], sizeof w[0]) == 0);
  for (k = 0; k < 3; k++) cddp_optim_destroy(o[k]);
  for (k = 0; k < 2; k++) cddp_ddp_destroy(d[k]);
  return 0;
}

static void test_masters_in_parts(void) {
  char folder[] = "/tmp/cddp-adamw-XXXXXX", path[64];
  CHECK(mkdtemp(folder) != NULL);
  snprintf(path, sizeof path, "%s/checkpoint", folder);
  CHECK_OK(ranks_run(in_parts, path, 1, false));
  CHECK_OK(ranks_run(in_parts, path, 2, false));
  CHECK_OK(ranks_run(in_parts, path, 2, true));
  CHECK_EQ(unlink(path), 0);
  CHECK_EQ(rmdir(folder), 0);
}

/* Clipping, in one pass or between wait and step: the same bits, and with shards on any number of
   ranks. */
static void test_clip(void) {
  int n, k;
  for (n = 1; n <= 4; n++)
    for (k = 0; k < (RANKS_SLOW ? 2 : 6); k++) {
      plan c;
      memset(&c, 0, sizeof c);
      c.clip = k == 5 ? INFINITY : 3; /* above some steps' norms */
      c.mode = k % 3;
      c.memory = (n + k) % 3;
      c.shards = k % 2 == 0 ? 4 + n % 2 : 0;
      c.sgd = k == 3;
      c.unused = k == 1 || k == 5;
      c.groups = c.copies = k % 2 == 1;
      c.maximize = k == 4;
      run_on(&c, n, n == 3);
    }
}

/* The norm has the same bits on any number of ranks, also in a tensor that is cut between them. */
static double norms[8];
static int run_norm(cddp_group *g, void *arg) {
  static const cddp_dtype dtypes[2] = {CDDP_F32, CDDP_BF16};
  enum { N = 40000 };
  int k, shard, which = *(int *)arg;
  cddp_param p[2];
  cddp_ddp_desc d;
  cddp_sgd_desc o;
  cddp_ddp *ddp;
  cddp_optim *sgd;
  double norm;
  size_t i;
  memset(&d, 0, sizeof d);
  memset(&o, 0, sizeof o);
  memset(p, 0, sizeof p);
  for (k = 0; k < 2; k++) {
    p[k].count = N + (size_t)k;
    p[k].dtype = dtypes[k];
    p[k].data = calloc(N + 1, 4);
  }
  d.shards = 4;
  d.max_grad_norm = which == 0 ? 1 : INFINITY;
  o.lr = 1;
  CHECK_OK(cddp_ddp_create(&ddp, g, p, 2, &d));
  CHECK_OK(cddp_sgd_create(&sgd, p, 2, &o));
  CHECK_IS(cddp_ddp_grad_norm(ddp, &norm), CDDP_INVALID_ARGUMENT); /* none yet */
  while (cddp_ddp_next_shard(ddp, &shard))
    for (k = 0; k < 2; k++) {
      for (i = 0; i < p[k].count; i++) {
        float x = (float)gradient_of(shard, 0, k, i);
        if (k == 0) ((float *)p[k].grad)[i] = x;
        else ((uint16_t *)p[k].grad)[i] = (uint16_t)(0x3e00 + (i * 7 + (size_t)shard) % 0x180);
      }
      CHECK_OK(cddp_ddp_ready(ddp, k));
    }
  CHECK_OK(cddp_ddp_step(ddp, sgd));
  CHECK_OK(cddp_ddp_grad_norm(ddp, &norm));
  CHECK(norm > 0);
  if (cddp_rank(g) == 0) norms[cddp_world_size(g)] = norm;
  if (which == 0) { /* all of it clipped: w = -g, of norm 1 */
    double sum = 0;
    for (i = 0; i < N; i++) sum += ((float *)p[0].data)[i] * ((float *)p[0].data)[i];
    CHECK(sum > 0.01 && sum < 1);
  }
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  for (k = 0; k < 2; k++) free(p[k].data);
  return test_failures != 0;
}

static void test_norm(void) {
  int n, which;
  for (which = 0; which < 2; which++)
    for (n = 1; n <= 4; n++) {
      CHECK_OK(ranks_run(run_norm, &which, n, true)); /* threads: they share norms */
      CHECK(norms[n] == norms[1]);
    }
}

/* Ranks with other limits, and limits that are none. */
static int run_clip_refused(cddp_group *g, void *arg) {
  float w[2] = {0, 0};
  cddp_param p = {"w", w, NULL, 2, CDDP_F32};
  cddp_ddp_desc d;
  cddp_ddp *ddp;
  (void)arg;
  memset(&d, 0, sizeof d);
  d.max_grad_norm = 1 + cddp_rank(g);
  CHECK_IS(cddp_ddp_create(&ddp, g, &p, 1, &d), CDDP_MISMATCH);
  CHECK(strstr(cddp_error(), "the model has max_grad_norm 2 on rank 1, max_grad_norm 1 on rank 0"));
  d.max_grad_norm = -1;
  CHECK_IS(cddp_ddp_create(&ddp, g, &p, 1, &d), CDDP_INVALID_ARGUMENT);
  d.max_grad_norm = NAN;
  CHECK_IS(cddp_ddp_create(&ddp, g, &p, 1, &d), CDDP_INVALID_ARGUMENT);
  return test_failures != 0;
}

static void test_clip_refused(void) { CHECK_OK(ranks_run(run_clip_refused, NULL, 2, false)); }

/* Gradients that are rows are refused, in a sentence; other settings on another rank are, too. */
static int run_refused(cddp_group *g, void *arg) {
  static const size_t rows = 4;
  float w[8] = {0}, x[2] = {0, 0};
  cddp_param p = {"table", w, NULL, 8, CDDP_F32}, q = {"w", x, NULL, 2, CDDP_F32};
  cddp_ddp_desc d;
  cddp_adamw_desc a;
  cddp_ddp *ddp;
  cddp_optim *o;
  double scale = cddp_rank(g) == 1 ? 2 : 1;
  int k;
  (void)arg;
  memset(&d, 0, sizeof d);
  memset(&a, 0, sizeof a);
  a.lr = 0.1;
  d.sparse_rows = &rows;
  CHECK_OK(cddp_ddp_create(&ddp, g, &p, 1, &d));
  a.ddp = ddp;
  CHECK_OK(cddp_adamw_create(&o, &p, 1, &a));
  CHECK_IS(cddp_ddp_step(ddp, o), CDDP_UNSUPPORTED);
  CHECK(strstr(cddp_error(), "table") != NULL && strstr(cddp_error(), "AdamW") != NULL);
  CHECK_IS(cddp_optim_step(o), CDDP_UNSUPPORTED);
  cddp_optim_destroy(o);
  cddp_ddp_destroy(ddp);
  for (k = 0; k < 4; k++) {
    cddp_result r;
    memset(&a, 0, sizeof a);
    a.lr = 0.1;
    CHECK_OK(cddp_ddp_create(&ddp, g, &q, 1, NULL));
    if (k == 0) a.beta2 = cddp_rank(g) == 1 ? 0.95 : 0.999;
    if (k == 1) a.weight_decays = &scale;
    if (k == 2) a.lr_scales = &scale;
    if (k == 3) a.amsgrad = cddp_rank(g) == 1;
    CHECK_OK(cddp_adamw_create(&o, &q, 1, &a));
    CHECK_OK(cddp_ddp_ready(ddp, 0));
    r = cddp_ddp_step(ddp, o);
    CHECK_IS(r, CDDP_MISMATCH);
    cddp_optim_destroy(o);
    cddp_ddp_destroy(ddp);
    CHECK_OK(cddp_barrier(g)); /* the group is not broken */
  }
  return test_failures != 0;
}

/* Optimizers that differ on one rank, or on all: every rank names the setting, the values and the
   ranks. */
static int run_settings(cddp_group *g, void *arg) {
  static const struct { const char *says; bool sgd; } cases[] = {
      {"learning rate (lr) is 0.1 on rank 0, 0.30000000000000004 on rank 2", true},
      {"momentum is 0.9 on rank 0, 0.8 on rank 2", true},
      {"dampening is 0 on rank 0, 0.5 on rank 2", true},
      {"nesterov is 0 on rank 0, 1 on rank 2", true},
      {"maximize is 0 on rank 0, 1 on rank 2", true},
      {"weight_decay of parameter \"v\" is 0 on rank 0, 0.01 on rank 2", true},
      {"weight_decay of parameter \"w\" is 1 on rank 0, 2 on rank 2", true},
      {"lr_scales of parameter \"w\" is 1 on rank 0, 2 on rank 2", true},
      {"master_weights is 0 on rank 0, 1 on rank 2", true},
      {"beta1 is 0.9 on rank 0, 0.85 on rank 2", false},
      {"beta2 is 0.999 on rank 0, 0.95 on rank 2", false},
      {"eps is 1e-08 on rank 0, 1e-06 on rank 2", false},
      {"amsgrad is 0 on rank 0, 1 on rank 2", false},
      {"(0: SGD, 1: AdamW) is 0 on rank 0, 1 on rank 2", false},
      {"lr) is 0.1 on rank 0, 0.2 on rank 1, 0.4 on rank 2, and 1 more differ", true},
      {"learning rate (lr) is 0.1 on rank 0, 0.2 on rank 2", true},
      {"made other steps on rank 2 than on rank 0", true},
  };
  int rank = cddp_rank(g), k, n = (int)(sizeof cases / sizeof *cases);
  bool odd = rank == 2;
  float v[2] = {0, 0}, w[2] = {0, 0};
  double ones[2] = {1, odd ? 2 : 1};
  cddp_param p[] = {{"v", v, NULL, 2, CDDP_F32}, {"w", w, NULL, 2, CDDP_F32}};
  (void)arg;
  for (k = 0; k < n; k++) {
    cddp_sgd_desc o;
    cddp_adamw_desc a;
    cddp_ddp *ddp;
    cddp_optim *s;
    memset(&o, 0, sizeof o);
    memset(&a, 0, sizeof a);
    o.lr = k == 0 && odd ? 3 * 0.1 : k == 14 ? 0.1 * (1 << rank) : 0.1;
    o.momentum = k == 1 && odd ? 0.8 : 0.9;
    o.dampening = k == 2 && odd ? 0.5 : 0;
    o.nesterov = k == 3 && odd;
    o.maximize = k == 4 && odd;
    o.weight_decay = k == 5 && odd ? 0.01 : 0;
    o.weight_decays = k == 6 ? ones : NULL;
    o.lr_scales = k == 7 ? ones : NULL;
    o.master_weights = k == 8 && odd;
    a.lr = 0.1;
    a.beta1 = k == 9 && odd ? 0.85 : 0;
    a.beta2 = k == 10 && odd ? 0.95 : 0;
    a.eps = k == 11 && odd ? 1e-6 : 0;
    a.amsgrad = k == 12 && odd;
    CHECK_OK(cddp_ddp_create(&ddp, g, p, 2, NULL));
    if (cases[k].sgd || (k == 13 && !odd)) CHECK_OK(cddp_sgd_create(&s, p, 2, &o));
    else CHECK_OK(cddp_adamw_create(&s, p, 2, &a));
    if (k == 16 && odd) CHECK_OK(cddp_optim_step(s)); /* alone, as cddp_load with group NULL */
    CHECK(cddp_ddp_ready(ddp, 0) == CDDP_OK && cddp_ddp_ready(ddp, 1) == CDDP_OK);
    if (k == 15) { /* later, after a step that agreed */
      CHECK_OK(cddp_ddp_step(ddp, s));
      CHECK_OK(cddp_optim_set_lr(s, odd ? 0.2 : 0.1));
      CHECK(cddp_ddp_ready(ddp, 0) == CDDP_OK && cddp_ddp_ready(ddp, 1) == CDDP_OK);
    }
    CHECK_IS(cddp_ddp_step(ddp, s), CDDP_MISMATCH);
    CHECK(strstr(cddp_error(), cases[k].says) != NULL);
    CHECK(strstr(cddp_error(), "in ddp_step at tests/ranks/adamw.c:") != NULL);
    CHECK_IS(cddp_ddp_step(ddp, s), CDDP_MISMATCH); /* the model is broken */
    cddp_optim_destroy(s);
    cddp_ddp_destroy(ddp);
    CHECK_OK(cddp_barrier(g)); /* the group is not */
  }
  return test_failures != 0;
}

static void test_settings(void) {
  CHECK_OK(ranks_run(run_settings, NULL, 4, true));
  CHECK_OK(ranks_run(run_settings, NULL, 4, false));
}

/* A cddp_optim goes on when its model is made anew, as if nothing had been: kind 0 is SGD with
   momentum, 1 AdamW, 2 AdamW with masters. With a model that has failed it begins anew, and masters
   as the weights are. */
enum { NEXT_COUNT = 5000 };

static int next_step(cddp_group *g, cddp_param *p, cddp_ddp *ddp, cddp_optim *o, int t) {
  size_t i;
  for (i = 0; i < NEXT_COUNT; i++)
    ranks_put(p->grad, p->dtype, i, ranks_mix((uint64_t)t, (uint64_t)cddp_rank(g), i));
  CHECK_OK(cddp_ddp_ready(ddp, 0));
  CHECK_OK(cddp_ddp_step(ddp, o));
  return test_failures != 0;
}

static int run_next_model(cddp_group *g, void *arg) {
  int kind = *(const int *)arg, k, t;
  cddp_dtype dtype = kind == 2 ? CDDP_BF16 : CDDP_F32;
  size_t bytes = NEXT_COUNT * cddp_dtype_size(dtype), i;
  cddp_param p[2];
  cddp_ddp *ddp[2];
  cddp_optim *o[2];
  cddp_adamw_desc a;
  cddp_sgd_desc s;
  memset(p, 0, sizeof p);
  memset(&a, 0, sizeof a);
  memset(&s, 0, sizeof s);
  a.lr = s.lr = 0.01;
  a.master_weights = kind == 2;
  s.momentum = 0.9;
  for (k = 0; k < 2; k++) {
    p[k].name = "w";
    p[k].data = calloc(1, bytes);
    p[k].count = NEXT_COUNT;
    p[k].dtype = dtype;
    for (i = 0; i < NEXT_COUNT; i++) ranks_put(p[k].data, dtype, i, ranks_mix(7, 7, i));
    CHECK_OK(cddp_ddp_create(&ddp[k], g, &p[k], 1, NULL));
    if (kind == 0) CHECK_OK(cddp_sgd_create(&o[k], &p[k], 1, &s));
    else CHECK_OK(cddp_adamw_create(&o[k], &p[k], 1, &a));
  }
  for (t = 0; t < 6; t++) {
    if (t == 3) {
      cddp_ddp_destroy(ddp[0]);
      CHECK_OK(cddp_ddp_create(&ddp[0], g, &p[0], 1, NULL));
    }
    for (k = 0; k < 2; k++) next_step(g, &p[k], ddp[k], o[k], t);
    CHECK(memcmp(p[0].data, p[1].data, bytes) == 0);
  }
  CHECK_OK(cddp_ddp_ready(ddp[0], 0));
  CHECK_IS(cddp_ddp_ready(ddp[0], 0), CDDP_INVALID_ARGUMENT);
  CHECK(cddp_ddp_step(ddp[0], o[0]) != CDDP_OK);
  cddp_ddp_destroy(ddp[0]);
  CHECK_OK(cddp_ddp_create(&ddp[0], g, &p[0], 1, NULL));
  CHECK_OK(cddp_optim_set_lr(o[0], 0));
  next_step(g, &p[0], ddp[0], o[0], t);
  CHECK(memcmp(p[0].data, p[1].data, bytes) == 0);
  for (k = 0; k < 2; k++) {
    cddp_ddp_destroy(ddp[k]);
    cddp_optim_destroy(o[k]);
    free(p[k].data);
  }
  return test_failures != 0;
}

static void test_next_model(void) {
  int kind, n;
  for (kind = 0; kind < 3; kind++)
    for (n = 1; n <= 3; n++) {
      CHECK_OK(ranks_run(run_next_model, &kind, n, false));
      CHECK_OK(ranks_run(run_next_model, &kind, n, true));
    }
}

static void test_refused(void) { CHECK_OK(ranks_run(run_refused, NULL, 2, false)); }

int main(void) {
  RUN(test_bits);
  RUN(test_unused);
  RUN(test_shards);
  RUN(test_uneven);
  RUN(test_hosts);
  RUN(test_resume);
  RUN(test_damaged);
  RUN(test_masters);
  RUN(test_saved_after_a_change);
  RUN(test_masters_of_a_rank_without_data);
  RUN(test_masters_in_turn);
  RUN(test_masters_in_parts);
  RUN(test_clip);
  RUN(test_norm);
  RUN(test_clip_refused);
  RUN(test_next_model);
  RUN(test_refused);
  RUN(test_settings);
  return TEST_END();
}
