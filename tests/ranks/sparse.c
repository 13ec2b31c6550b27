/* Uneven inputs (cddp_ddp_join), and gradients that are rows of a parameter (cddp_ddp_add_rows).

   Ranks run out of data at different steps, or mark different rows of an embedding. The result is
   compared, bit for bit, with one model that is trained on means worked out here. Also: hooks and
   buffers in joined steps, ranks that die or leave while others join, few, many, repeated, wrong
   and unused rows, rows of elastic models, and the memory that rows take. */
#include "../../cddp.h"
#include "../ranks.h"

enum { PARAMS = 4, MOST_STEPS = 7, LARGE = 3001, STEPS = 3 /* kinds of step */ };
enum { FUSED, APART, BOTH };

static const size_t sizes[PARAMS] = {LARGE, 5, 64, 130};
static const char *const names[PARAMS] = {"w1", "b1", "w2", "b2"};

static bool mentions(const char *text) { return strstr(cddp_error(), text) != NULL; }

/* UNEVEN INPUTS. ------------------------------------------------------------------------------- */

typedef struct uneven {
  int kind;                      /* of step */
  bool shared, own, unused; /* weights shared; gradients own; find_unused_parameters */
  double momentum;
} uneven;

/* How many steps the rank has data for in an epoch; in one epoch rank 0 has none, in one all have
   the same. */
static int steps_of(int rank, int epoch, int world) {
  if (epoch == 2) return 2;
  return (rank * 3 + 4 * epoch) % (world + 2) % MOST_STEPS;
}

typedef struct element {
  int active[64], step, param;
  size_t i;
} element;

static float gradient_of(int rank, int step, int param, size_t i) {
  uint64_t h = ranks_mix((uint64_t)(rank * 100 + param), (uint64_t)step, i);
  return (float)((double)(int64_t)(h >> 20) * 0x1p-43) - 1;
}

static float term(void *arg, int k) {
  const element *e = (const element *)arg;
  return gradient_of(e->active[k], e->step, e->param, e->i);
}

/* The model on one rank without cddp_ddp. */
typedef struct reference {
  cddp_param p[PARAMS];
  float weights[LARGE * PARAMS], grads[LARGE * PARAMS];
  cddp_optim *sgd;
} reference;

static void reference_open(reference *f, const cddp_sgd_desc *o) {
  int k;
  size_t i;
  memset(f, 0, sizeof *f);
  for (k = 0; k < PARAMS; k++) {
    f->p[k].data = f->weights + k * LARGE;
    f->p[k].grad = f->grads + k * LARGE;
    f->p[k].count = sizes[k];
    for (i = 0; i < sizes[k]; i++) f->weights[(size_t)k * LARGE + i] = gradient_of(0, -1, k, i);
  }
  CHECK_OK(cddp_sgd_create(&f->sgd, f->p, PARAMS, o));
}

/* One step with the mean over the listed ranks. Parameter 1 is used by even ranks only when the
   case says so. */
static void reference_step(reference *f, element *e, int n, const uneven *c) {
  int k, r;
  for (k = 0; k < PARAMS; k++) {
    e->param = k;
    for (e->i = 0; e->i < sizes[k]; e->i++) {
      float sum, values[64];
      for (r = 0; r < n; r++)
        values[r] = k == 1 && c->unused && e->active[r] % 2 ? 0 : term(e, r);
      sum = ranks_tree_f32(term, e, 0, n);
      if (k == 1 && c->unused) /* in any order: at most two ranks use it */
        for (sum = 0, r = 0; r < n; r++) sum += values[r];
      ((float *)f->p[k].grad)[e->i] = sum / (float)n;
    }
  }
  CHECK_OK(cddp_optim_step(f->sgd));
}

static cddp_result take_step(cddp_ddp *ddp, cddp_optim *sgd, int kind, int step) {
  cddp_result r;
  if (kind == FUSED || (kind == BOTH && step % 3 == 1)) return cddp_ddp_step(ddp, sgd);
  if ((r = cddp_ddp_wait(ddp)) != CDDP_OK || (r = cddp_optim_step(sgd)) != CDDP_OK) return r;
  return cddp_optim_zero_grad(sgd);
}

/* One epoch on this rank: its own steps, then join. */
static void uneven_epoch(cddp_ddp *ddp, cddp_optim *sgd, cddp_param *p, const uneven *c, int epoch,
                         int rank, int world, float *buffer) {
  int step, k, mine = steps_of(rank, epoch, world);
  size_t i;
  for (step = 0; step < mine; step++) {
    int n = 0, even = 0, first = -1, r, global = epoch * MOST_STEPS + step;
    for (r = 0; r < world; r++) {
      if (steps_of(r, epoch, world) <= step) continue;
      if (first < 0) first = r;
      even += r % 2 == 0;
      n++;
    }
    *buffer = (float)(100 * rank + step);
    CHECK_OK(cddp_ddp_sync_buffers(ddp));
    CHECK_EQ(*buffer, 100 * first + step);
    CHECK_OK(cddp_optim_set_lr(sgd, 0.125 / (1 + global)));
    for (k = PARAMS - 1; k >= 0; k--) {
      if (k == 1 && c->unused && rank % 2) continue;
      for (i = 0; i < sizes[k]; i++)
        ((float *)p[k].grad)[i] += gradient_of(rank, global, k, i);
      CHECK_OK(cddp_ddp_ready(ddp, k));
    }
    CHECK_OK(take_step(ddp, sgd, c->kind, step));
    CHECK_EQ(cddp_ddp_present(ddp), n);
    CHECK(cddp_ddp_used(ddp, 1) == (!c->unused || even > 0));
  }
  CHECK_OK(cddp_ddp_join(ddp, sgd));
}

static void reference_epoch(reference *f, const uneven *c, int epoch, int world) {
  int step, r, n;
  element e;
  for (step = 0; step < MOST_STEPS; step++) {
    e.step = epoch * MOST_STEPS + step;
    for (n = 0, r = 0; r < world; r++)
      if (steps_of(r, epoch, world) > step) e.active[n++] = r;
    if (n == 0) break;
    CHECK_OK(cddp_optim_set_lr(f->sgd, 0.125 / (1 + e.step)));
    reference_step(f, &e, n, c);
  }
}

static int run_uneven(cddp_group *g, void *arg) {
  const uneven *c = (const uneven *)arg;
  int before = test_failures, k, epoch, rank = cddp_rank(g), world = cddp_world_size(g);
  float buffer = (float)rank;
  reference *f = (reference *)malloc(2 * sizeof *f), *own = f + 1;
  cddp_param p[PARAMS], extra;
  void *copies[PARAMS];
  cddp_ddp_desc d;
  cddp_sgd_desc o;
  cddp_ddp *ddp;
  cddp_optim *sgd;
  CHECK(f != NULL);
  memset(&d, 0, sizeof d);
  memset(&o, 0, sizeof o);
  memset(&extra, 0, sizeof extra);
  extra.data = &buffer;
  extra.count = 1;
  d.first_bucket_mb = d.bucket_cap_mb = 0.001;
  d.find_unused_parameters = c->unused;
  d.buffers = &extra;
  d.buffer_count = 1;
  o.lr = 0.125;
  o.momentum = c->momentum;
  reference_open(f, &o);
  memcpy(own->weights, f->weights, sizeof f->weights);
  for (k = 0; k < PARAMS; k++) {
    p[k] = f->p[k];
    p[k].name = names[k];
    p[k].grad = c->own ? own->grads + k * LARGE : NULL;
    p[k].data = c->shared ? cddp_alloc(g, sizes[k] * 4) : own->weights + k * LARGE;
    memcpy(p[k].data, f->p[k].data, sizes[k] * 4);
    copies[k] = malloc(sizes[k] * 2 + 1);
  }
  memset(own->grads, 0, sizeof own->grads);
  CHECK_OK(cddp_ddp_create(&ddp, g, p, PARAMS, &d));
  o.copies = copies;
  o.copy_dtype = CDDP_BF16;
  CHECK_OK(cddp_sgd_create(&sgd, p, PARAMS, &o));
  for (epoch = 0; epoch < 4 && test_failures == before; epoch++) {
    uneven_epoch(ddp, sgd, p, c, epoch, rank, world, &buffer);
    reference_epoch(f, c, epoch, world);
    CHECK(cddp_optim_lr(sgd) == cddp_optim_lr(f->sgd));
    for (k = 0; k < PARAMS; k++) CHECK(memcmp(p[k].data, f->p[k].data, sizes[k] * 4) == 0);
    for (k = 0; k < PARAMS; k++)
      CHECK(ranks_is_copy(CDDP_BF16, copies[k], p[k].data, sizes[k]));
  }
  cddp_optim_destroy(sgd);
  cddp_optim_destroy(f->sgd);
  cddp_ddp_destroy(ddp);
  for (k = 0; c->shared && k < PARAMS; k++) cddp_free(g, p[k].data);
  for (k = 0; k < PARAMS; k++) free(copies[k]);
  free(f);
  return test_failures != before;
}

static void test_uneven(void) {
  static const int worlds[] = {3, 2, 4, 1};
  uneven c;
  int i, w;
  memset(&c, 0, sizeof c);
  for (w = 0; w < 4; w++)
    for (i = 0; i < 2 * STEPS; i++) {
      c.kind = i % STEPS;
      c.shared = i >= STEPS;
      c.own = (i + w) % 2 != 0;
      c.unused = w > 0 && i % 4 == 3; /* of at most two even ranks */
      c.momentum = i % 2 ? 0.9 : 0;
      if (c.kind == BOTH) c.momentum = 0.5;
      CHECK_OK(ranks_run(run_uneven, &c, worlds[w], i % 2 == 0));
    }
}

/* A model of one parameter, for what needs no numbers. */
typedef struct small {
  float w[8];
  cddp_param p[1];
  cddp_ddp *ddp;
  cddp_optim *sgd;
} small;

static bool small_open(small *m, cddp_group *g, double momentum, const cddp_ddp_desc *d) {
  cddp_sgd_desc o;
  memset(m, 0, sizeof *m);
  memset(&o, 0, sizeof o);
  o.lr = 0.5;
  o.momentum = momentum;
  m->p[0].name = "w";
  m->p[0].data = m->w;
  m->p[0].count = 8;
  CHECK_OK(cddp_ddp_create(&m->ddp, g, m->p, 1, d));
  CHECK_OK(cddp_sgd_create(&m->sgd, m->p, 1, &o));
  return m->ddp != NULL && m->sgd != NULL;
}

static void small_close(small *m) {
  cddp_optim_destroy(m->sgd);
  cddp_ddp_destroy(m->ddp);
}

/* A hook's mean is over all ranks; what comes out is over those with data. */
static int run_joined_hook(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g), step, i, fused;
  cddp_ddp_desc d;
  (void)arg;
  memset(&d, 0, sizeof d);
  d.comm_hook = cddp_bf16_compress_hook;
  for (fused = 0; fused < 2; fused++) {
    small m;
    float want = 0;
    if (!small_open(&m, g, 0, &d)) return 1;
    for (step = 0; step < 4; step++) want -= 0.5f * (step < 2 ? 2.5f : 3.5f);
    for (step = 0; step < (rank < 2 ? 2 : 4); step++) { /* then ranks 2 and 3 are left */
      for (i = 0; i < 8; i++) ((float *)m.p[0].grad)[i] = (float)(rank + 1);
      CHECK_OK(cddp_ddp_ready(m.ddp, 0));
      CHECK_OK(take_step(m.ddp, m.sgd, fused ? FUSED : APART, step));
    }
    CHECK_OK(cddp_ddp_join(m.ddp, m.sgd));
    for (i = 0; i < 8; i++) CHECK_EQ(m.w[i], want);
    small_close(&m);
  }
  return test_failures != before;
}

static void test_joined_hook(void) {
  CHECK_OK(ranks_run(run_joined_hook, NULL, 4, true));
  CHECK_OK(ranks_run(run_joined_hook, NULL, 4, false));
}

static int run_join_misuse(cddp_group *g, void *arg) {
  int before = test_failures, shard;
  small a, b;
  (void)arg;
  if (!small_open(&a, g, 0, NULL) || !small_open(&b, g, 0, NULL)) return 1;
  CHECK_IS(cddp_ddp_join(NULL, a.sgd), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_ddp_join(a.ddp, b.sgd), CDDP_INVALID_ARGUMENT);
  CHECK(mentions("other parameters"));
  cddp_ddp_no_sync(a.ddp, true);
  CHECK_IS(cddp_ddp_join(a.ddp, NULL), CDDP_INVALID_ARGUMENT);
  CHECK(mentions("no_sync"));
  cddp_ddp_no_sync(a.ddp, false);
  CHECK_OK(cddp_ddp_ready(a.ddp, 0));
  CHECK_IS(cddp_ddp_join(a.ddp, a.sgd), CDDP_INVALID_ARGUMENT);
  CHECK(mentions("\"w\" is ready"));
  CHECK_OK(cddp_ddp_step(a.ddp, a.sgd));
  CHECK(cddp_ddp_next_shard(a.ddp, &shard)); /* for which there is no data left */
  CHECK_OK(cddp_ddp_join(a.ddp, a.sgd)); /* nothing was broken */
  CHECK(cddp_ddp_next_shard(a.ddp, &shard) && shard == cddp_rank(g)); /* of the next epoch */
  CHECK_OK(cddp_ddp_ready(a.ddp, 0));
  CHECK(!cddp_ddp_next_shard(a.ddp, &shard));
  CHECK_OK(cddp_ddp_step(a.ddp, a.sgd));
  CHECK_OK(cddp_ddp_join(a.ddp, NULL));
  CHECK_EQ(cddp_ddp_present(a.ddp), cddp_world_size(g));
  CHECK_EQ(cddp_ddp_present(NULL), -1);
  small_close(&a);
  small_close(&b);
  return test_failures != before;
}

static void test_join_misuse(void) { CHECK_OK(ranks_run(run_join_misuse, NULL, 2, true)); }

/* Ranks that disagree, while one has joined: all hear of it. */
static int run_join_mismatch(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g), which = *(const int *)arg;
  small m;
  if (!small_open(&m, g, which == 1 && rank == 0 ? 0.5 : 0, NULL)) return 1;
  if (rank > 0) CHECK_OK(cddp_ddp_ready(m.ddp, 0));
  switch (which) {
  case 0: /* joins without the cddp_optim that the others step with */
    CHECK_IS(rank ? cddp_ddp_step(m.ddp, m.sgd) : cddp_ddp_join(m.ddp, NULL), CDDP_MISMATCH);
    CHECK(mentions("rank 0 called ddp_join without a cddp_optim, rank 1 called ddp_step"));
    break;
  case 1: /* with another */
    CHECK_IS(rank ? cddp_ddp_step(m.ddp, m.sgd) : cddp_ddp_join(m.ddp, m.sgd), CDDP_MISMATCH);
    CHECK(mentions("momentum is 0 on rank 1, 0.5 on rank 0"));
    break;
  case 2: /* the others call different things */
    CHECK_IS(rank == 0   ? cddp_ddp_join(m.ddp, m.sgd)
             : rank == 1 ? cddp_ddp_step(m.ddp, m.sgd)
                         : cddp_ddp_wait(m.ddp),
             CDDP_MISMATCH);
    CHECK(mentions("rank 1 called ddp_step at") && mentions("rank 2 called ddp_wait at"));
    CHECK(!mentions("rank 0 called"));
    break;
  default: /* one of them stepped by itself, and joins without saying with what */
    if (rank > 0) {
      CHECK_OK(cddp_ddp_wait(m.ddp));
      CHECK_OK(cddp_optim_step(m.sgd));
    }
    CHECK_IS(cddp_ddp_join(m.ddp, rank == 0 ? NULL : m.sgd), CDDP_MISMATCH);
    CHECK(mentions("with a cddp_optim, the other without"));
  }
  CHECK_IS(cddp_ddp_join(m.ddp, m.sgd), CDDP_MISMATCH); /* broken for good */
  CHECK(mentions("cddp_ddp_join: "));
  small_close(&m);
  return test_failures != before;
}

static void test_join_mismatch(void) {
  int which;
  for (which = 0; which < 4; which++) CHECK_OK(ranks_run(run_join_mismatch, &which, 3, true));
}

/* A loop with two optimizers, which differ in lr only: the rank without data has passed one. */
static int run_join_of_two(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g), first = *(const int *)arg, i;
  cddp_result r = CDDP_OK;
  cddp_optim *both[2] = {NULL, NULL};
  cddp_sgd_desc o;
  small m;
  memset(&o, 0, sizeof o);
  o.momentum = 0.5;
  if (!small_open(&m, g, 0.5, NULL)) return 1;
  CHECK_OK(cddp_sgd_create(&both[1], m.p, 1, &o));
  both[0] = m.sgd;
  for (i = 0; r == CDDP_OK && i < (rank == 0 ? first : 8); i++) {
    CHECK_OK(cddp_ddp_ready(m.ddp, 0));
    r = cddp_ddp_step(m.ddp, both[i % 2]);
  }
  if (rank == 0) r = cddp_ddp_join(m.ddp, both[0]);
  CHECK_IS(r, CDDP_MISMATCH);
  if (first > 1) /* else both[1] has no shared states yet: another text */
    CHECK(mentions("rank 0 called ddp_join with one cddp_optim, rank 1 called ddp_step with"));
  CHECK(i == first + (first % 2 == 1 ? 1 : 2) || rank == 0); /* at the first step of both[1] */
  cddp_optim_destroy(both[1]);
  small_close(&m);
  return test_failures != before;
}

static void test_join_of_two(void) {
  int first;
  for (first = 0; first < 4; first++) CHECK_OK(ranks_run(run_join_of_two, &first, 3, true));
}

static int late_fn(cddp_group *g, void *arg) {
  int *let_go = (int *)arg, before = test_failures;
  small m;
  if (!small_open(&m, g, 0, NULL)) return 1;
  if (cddp_rank(g) == 0) {
    CHECK_IS(cddp_ddp_join(m.ddp, m.sgd), CDDP_TIMEOUT);
    CHECK(mentions("rank 1") && mentions("did not reach ddp_join at"));
    __atomic_store_n(let_go, 1, __ATOMIC_SEQ_CST);
  }
  while (!__atomic_load_n(let_go, __ATOMIC_SEQ_CST)) ranks_sleep(0.001);
  CHECK_IS(cddp_ddp_join(m.ddp, m.sgd), CDDP_TIMEOUT);
  small_close(&m);
  return test_failures != before;
}

static void test_join_late(void) {
  const char *old = getenv("CDDP_TIMEOUT_S");
  char saved[32];
  int let_go = 0;
  snprintf(saved, sizeof saved, "%s", old);
  setenv("CDDP_TIMEOUT_S", RANKS_SLOW ? "2" : "0.3", 1);
  CHECK_OK(ranks_run(late_fn, &let_go, 2, true));
  setenv("CDDP_TIMEOUT_S", saved, 1);
}

/* A rank dies while another has joined. */
static int joined_and_lost(int rank, void *arg) {
  double *died_at = (double *)arg;
  int before = test_failures, step;
  cddp_result r = CDDP_OK;
  cddp_group *g;
  small m;
  CHECK_OK(cddp_init(&g, NULL));
  if (g == NULL || !small_open(&m, g, 0.9, NULL)) return 1;
  for (step = 0; r == CDDP_OK && rank > 0; step++) {
    if (rank == 2 && step == 5) {
      *died_at = test_now();
      kill(getpid(), SIGKILL);
    }
    CHECK_OK(cddp_ddp_ready(m.ddp, 0));
    r = step == 3 ? cddp_ddp_wait(m.ddp) : cddp_ddp_step(m.ddp, m.sgd);
  }
  if (rank == 0) r = cddp_ddp_join(m.ddp, m.sgd);
  CHECK_IS(r, CDDP_PEER_LOST);
  CHECK(mentions("rank 2") && (mentions("signal 9") || !ranks_has_company(2, 3)));
  CHECK(test_now() - *died_at < RANKS_WITHIN(1.0));
  small_close(&m);
  cddp_destroy(g);
  return test_failures != before;
}

static void test_joined_and_lost(void) {
  double *died_at = (double *)ranks_shared(4096);
  int status[3];
  ranks_script(joined_and_lost, died_at, 3, 30, status);
  CHECK(status[0] == 0 && status[1] == 0 && WIFSIGNALED(status[2]));
  munmap(died_at, 4096);
}

/* GRADIENTS THAT ARE ROWS. A twin with a dense gradient must get the same weights. ------------ */

enum { EMBEDDING, BIAS, SECOND, TWIN, ROWS = 400, WIDTH = 10 };

typedef struct rows_case {
  cddp_dtype dtype;
  int kind, option;
  bool unused;
} rows_case;

static const size_t twin_rows[TWIN] = {ROWS, 0, 7};
static const size_t twin_counts[TWIN] = {ROWS * WIDTH, 33, 7 * 3};

static void rows_options(int which, cddp_sgd_desc *o) {
  memset(o, 0, sizeof *o);
  o->lr = 0.1;
  if (which >= 1) o->momentum = 0.9;
  if (which == 2) o->nesterov = true;
  if (which == 3) o->dampening = 0.3;
  if (which == 4) o->maximize = true;
  if (which == 4) o->momentum = 0;
}

static void fill(void *to, cddp_dtype dtype, size_t n, uint64_t seed) {
  size_t i;
  for (i = 0; i < n; i++)
    ranks_store(dtype, to, i, (double)(int64_t)(ranks_mix(seed, 3, i) >> 20) * 0x1p-43 - 1);
}

/* Some rows, with repetitions, into one model's sparse parameter and the other's dense one. */
static void add_rows(cddp_ddp *sparse, int k, cddp_param *dense, uint64_t seed, size_t n) {
  size_t width = twin_counts[k] / twin_rows[k], i, j, size = cddp_dtype_size(dense->dtype);
  int64_t *numbers = (int64_t *)calloc(n + 1, sizeof *numbers);
  char *values = (char *)calloc(n + 1, width * size);
  CHECK(numbers != NULL && values != NULL);
  fill(values, dense->dtype, n * width, seed);
  for (i = 0; i < n; i++) {
    numbers[i] = (int64_t)(ranks_mix(seed, 5, i) % (i % 2 ? twin_rows[k] : 1 + twin_rows[k] / 9));
    for (j = 0; j < width; j++) {
      size_t at = (size_t)numbers[i] * width + j;
      double old = ranks_load(dense->dtype, dense->grad, at);
      ranks_store(dense->dtype, dense->grad, at,
                  old + ranks_load(dense->dtype, values, i * width + j));
    }
  }
  CHECK_OK(cddp_ddp_add_rows(sparse, k, numbers, values, n / 2));
  CHECK_OK(cddp_ddp_add_rows(sparse, k, numbers + n / 2, values + n / 2 * width * size, n - n / 2));
  free(numbers);
  free(values);
}

/* What cddp_ddp_rows shows is the dense gradient's rows. */
static void check_rows(const cddp_ddp *sparse, int k, const cddp_param *dense) {
  size_t width = twin_counts[k] / twin_rows[k], n, i, size = width * cddp_dtype_size(dense->dtype);
  const int64_t *numbers;
  const void *values;
  n = cddp_ddp_rows(sparse, k, &numbers, &values);
  CHECK(n <= twin_rows[k]);
  for (i = 0; i < n; i++) {
    CHECK(i == 0 || numbers[i] > numbers[i - 1]);
    CHECK(memcmp((const char *)values + i * size, (char *)dense->grad + (size_t)numbers[i] * size,
                 size) == 0);
  }
}

static void rows_step(cddp_ddp **ddp, cddp_optim **sgd, cddp_param p[][TWIN], const rows_case *c,
                      int rank, int step) {
  int i, k, round;
  bool skip = c->unused && (step % 3 == 0 || (step + rank) % 2 == 0);
  for (round = 0; round < 2; round++) { /* accumulates, then sends */
    for (i = 0; i < 2; i++) cddp_ddp_no_sync(ddp[i], round == 0);
    for (k = 0; k < TWIN; k++) {
      uint64_t seed = (uint64_t)(((rank * 100 + step) * 2 + round) * TWIN + k);
      char some[64 * 8];
      if (k == SECOND && skip) continue;
      fill(some, c->dtype, twin_counts[BIAS], seed);
      if (k != BIAS) add_rows(ddp[0], k, &p[1][k], seed, (size_t)(seed % 5 * (k ? 2 : 60)));
      for (i = 0; k == BIAS && i < 2; i++)
        memcpy(p[i][k].grad, some, twin_counts[k] * cddp_dtype_size(c->dtype));
      for (i = 0; i < 2; i++) CHECK_OK(cddp_ddp_ready(ddp[i], k));
    }
  }
  for (i = 0; i < 2; i++) {
    if (c->kind == APART && step % 2) {
      double norm[2];
      CHECK_OK(cddp_ddp_wait(ddp[i]));
      if (i == 1) check_rows(ddp[0], EMBEDDING, &p[1][EMBEDDING]);
      CHECK_OK(cddp_ddp_clip_grad_norm(ddp[i], 1e9, &norm[i]));
      if (i == 1) CHECK(fabs(norm[0] - norm[1]) <= 1e-9 * norm[1]);
      CHECK_OK(cddp_optim_step(sgd[i]));
      CHECK_OK(cddp_optim_zero_grad(sgd[i]));
    } else {
      CHECK_OK(take_step(ddp[i], sgd[i], c->kind, step));
    }
  }
  CHECK_EQ(cddp_ddp_rows(ddp[0], EMBEDDING, NULL, NULL), 0);
}

static int run_rows(cddp_group *g, void *arg) {
  const rows_case *c = (const rows_case *)arg;
  int before = test_failures, rank = cddp_rank(g), i, k, step;
  cddp_param p[2][TWIN];
  cddp_ddp *ddp[2];
  cddp_optim *sgd[2];
  uint16_t embedding[ROWS * WIDTH] = {0};
  void *copies[TWIN] = {NULL};
  memset(p, 0, sizeof p);
  if (c->dtype == CDDP_F32) copies[EMBEDDING] = embedding;
  for (i = 0; i < 2; i++) {
    cddp_ddp_desc d;
    cddp_sgd_desc o;
    memset(&d, 0, sizeof d);
    rows_options(c->option, &o);
    d.first_bucket_mb = d.bucket_cap_mb = 0.0001;
    d.find_unused_parameters = c->unused;
    d.sparse_rows = i == 0 ? twin_rows : NULL;
    for (k = 0; k < TWIN; k++) {
      p[i][k].name = names[k];
      p[i][k].count = twin_counts[k];
      p[i][k].dtype = c->dtype;
      p[i][k].data = malloc(twin_counts[k] * 8);
      fill(p[i][k].data, c->dtype, twin_counts[k], (uint64_t)(rank * 10 + k));
    }
    CHECK_OK(cddp_ddp_create(&ddp[i], g, p[i], TWIN, &d));
    o.ddp = ddp[i];
    o.copies = i == 0 ? copies : NULL;
    o.copy_dtype = CDDP_F16;
    CHECK_OK(cddp_sgd_create(&sgd[i], p[i], TWIN, &o));
  }
  CHECK(p[0][EMBEDDING].grad == NULL && p[0][BIAS].grad != NULL);
  for (step = 0; step < 7 && test_failures == before; step++) {
    rows_step(ddp, sgd, p, c, rank, step);
    for (k = 0; k < TWIN; k++)
      CHECK(memcmp(p[0][k].data, p[1][k].data, twin_counts[k] * cddp_dtype_size(c->dtype)) == 0);
    if (copies[EMBEDDING] != NULL)
      CHECK(ranks_is_copy(CDDP_F16, embedding, p[0][EMBEDDING].data, twin_counts[EMBEDDING]));
  }
  for (i = 0; i < 2; i++) {
    cddp_optim_destroy(sgd[i]);
    cddp_ddp_destroy(ddp[i]);
  }
  for (k = 0; k < TWIN; k++)
    CHECK(memcmp(p[0][k].data, p[1][k].data, twin_counts[k] * cddp_dtype_size(c->dtype)) == 0);
  for (k = 0; k < TWIN; k++) free(p[0][k].data), free(p[1][k].data);
  return test_failures != before;
}

static void test_rows(void) {
  static const int worlds[] = {2, 3, 4, 1};
  rows_case c;
  int i, w;
  memset(&c, 0, sizeof c);
  for (w = 0; w < 4; w++)
    for (i = 0; i < (RANKS_TSAN ? 4 : 8); i++) {
      c.dtype = (cddp_dtype)((i + w) % 4);
      c.kind = (i + w) % STEPS;
      c.option = (i + 2 * w) % 5;
      c.unused = i % 4 == 3;
      CHECK_OK(ranks_run(run_rows, &c, worlds[w], i % 2 == 0));
    }
}

/* Rows that nobody named keep their bits; those sent are the ones named, divided by all ranks. */
static int run_few_rows(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g), i;
  float w[6 * 2] = {0}, v[2 * 2] = {3, 6, 30, 60};
  int64_t mine[2];
  size_t rows = 6;
  const int64_t *numbers = NULL;
  const void *values = NULL;
  cddp_param p[1];
  cddp_ddp_desc d;
  cddp_sgd_desc o;
  cddp_ddp *ddp;
  cddp_optim *sgd;
  (void)arg;
  memset(p, 0, sizeof p);
  memset(&d, 0, sizeof d);
  memset(&o, 0, sizeof o);
  p[0].data = w;
  p[0].count = 12;
  d.sparse_rows = &rows;
  CHECK_OK(cddp_ddp_create(&ddp, g, p, 1, &d));
  o.lr = 1;
  o.ddp = ddp;
  CHECK_OK(cddp_sgd_create(&sgd, p, 1, &o));
  mine[0] = 4; /* all name row 4, rank r also row r; rank 2 nothing but row 4 */
  mine[1] = rank;
  CHECK_OK(cddp_ddp_add_rows(ddp, 0, mine, v, rank == 2 ? 1 : 2));
  CHECK_OK(cddp_ddp_ready(ddp, 0));
  CHECK_OK(cddp_ddp_wait(ddp));
  CHECK_EQ(cddp_ddp_rows(ddp, 0, &numbers, &values), 3);
  CHECK(numbers[0] == 0 && numbers[1] == 1 && numbers[2] == 4);
  for (i = 0; i < 2; i++) {
    CHECK_EQ(((const float *)values)[i], i == 0 ? 10 : 20);
    CHECK_EQ(((const float *)values)[4 + i], i == 0 ? 3 : 6);
  }
  CHECK_OK(cddp_optim_step(sgd));
  CHECK_OK(cddp_optim_zero_grad(sgd));
  CHECK(w[0] == -10 && w[3] == -20 && w[8] == -3 && w[9] == -6);
  for (i = 4; i < 8; i++) CHECK(w[i] == 0);
  if (rank < 2) { /* two ranks go on, the third has joined: the mean is over two */
    mine[0] = 5;
    CHECK_OK(cddp_ddp_add_rows(ddp, 0, mine, v, (size_t)rank)); /* rank 0: none at all */
    CHECK_OK(cddp_ddp_ready(ddp, 0));
    CHECK_OK(cddp_ddp_step(ddp, sgd));
    CHECK_EQ(cddp_ddp_present(ddp), 2);
  }
  CHECK_OK(cddp_ddp_join(ddp, sgd));
  CHECK(w[10] == -1.5f && w[11] == -3 && w[8] == -3);
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  return test_failures != before;
}

static void test_few_rows(void) {
  CHECK_OK(ranks_run(run_few_rows, NULL, 3, true));
  CHECK_OK(ranks_run(run_few_rows, NULL, 3, false));
}

/* Rows of a parameter that no rank says is ready stay for later; those of a rank that does not say
   so when another does are dropped, as a dense gradient is. */
/* Clipping scales the rows of the mean: in cddp_ddp_clip_grad_norm and in the step. */
static int run_clipped_rows(cddp_group *g, void *arg) {
  enum { CLIPPED_WIDTH = 3 };
  static const size_t rows[] = {8};
  float w[8 * CLIPPED_WIDTH] = {0};
  int64_t number = 5;
  cddp_param p = {"w", NULL, NULL, 8 * CLIPPED_WIDTH, CDDP_F32};
  cddp_ddp_desc d;
  cddp_sgd_desc o;
  cddp_ddp *ddp;
  cddp_optim *sgd;
  int step, k;
  memset(&d, 0, sizeof d);
  memset(&o, 0, sizeof o);
  p.data = w;
  d.sparse_rows = rows;
  d.max_grad_norm = 2.5;
  d.elastic = arg != NULL;
  CHECK_OK(cddp_ddp_create(&ddp, g, &p, 1, &d));
  o.ddp = ddp;
  o.lr = 1;
  CHECK_OK(cddp_sgd_create(&sgd, &p, 1, &o));
  for (step = 0; step < 2; step++) { /* a norm of 5 is clipped to 2.5 */
    static const float values[CLIPPED_WIDTH] = {3, 0, -4};
    int shard;
    while (cddp_ddp_next_shard(ddp, &shard)) {
      CHECK_OK(cddp_ddp_add_rows(ddp, 0, &number, values, 1));
      CHECK_OK(cddp_ddp_ready(ddp, 0));
    }
    if (step == 1) {
      CHECK_OK(cddp_ddp_step(ddp, sgd));
      for (k = 0; k < CLIPPED_WIDTH; k++)
        CHECK(fabs(w[number * CLIPPED_WIDTH + k] + values[k] / 2) < 1e-5);
    } else {
      const int64_t *numbers;
      const void *mean;
      CHECK_OK(cddp_ddp_wait(ddp));
      CHECK_OK(cddp_ddp_clip_grad_norm(ddp, 2.5, NULL));
      CHECK_EQ(cddp_ddp_rows(ddp, 0, &numbers, &mean), 1);
      for (k = 0; k < CLIPPED_WIDTH; k++)
        CHECK(fabs(((const float *)mean)[k] - values[k] / 2) < 1e-5);
      CHECK_OK(cddp_optim_zero_grad(sgd));
    }
  }
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  return 0;
}

static void test_clipped_rows(void) {
  int n;
  for (n = 1; n <= 3; n++) CHECK_OK(ranks_run(run_clipped_rows, NULL, n, n == 2));
  CHECK_OK(ranks_run(run_clipped_rows, &n, 2, false));
}

static int run_unused_rows(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g);
  float w[6 * 2] = {0}, v[2] = {4, 8};
  int64_t mine = rank;
  size_t rows = 6;
  const int64_t *numbers = NULL;
  const void *values = NULL;
  cddp_param p[1];
  cddp_ddp_desc d;
  cddp_ddp *ddp;
  (void)arg;
  memset(p, 0, sizeof p);
  memset(&d, 0, sizeof d);
  p[0].data = w;
  p[0].count = 12;
  d.sparse_rows = &rows;
  d.find_unused_parameters = true;
  CHECK_OK(cddp_ddp_create(&ddp, g, p, 1, &d));
  CHECK_OK(cddp_ddp_add_rows(ddp, 0, &mine, v, 1));
  CHECK_OK(cddp_ddp_wait(ddp));
  CHECK(!cddp_ddp_used(ddp, 0));
  CHECK_EQ(cddp_ddp_rows(ddp, 0, NULL, NULL), 0);
  if (rank == 0) CHECK_OK(cddp_ddp_ready(ddp, 0));
  CHECK_OK(cddp_ddp_wait(ddp));
  CHECK_EQ(cddp_ddp_rows(ddp, 0, &numbers, &values), 1);
  CHECK(numbers != NULL && numbers[0] == 0);
  CHECK(values != NULL && ((const float *)values)[0] == 2 && ((const float *)values)[1] == 4);
  CHECK_OK(cddp_ddp_ready(ddp, 0));
  CHECK_OK(cddp_ddp_wait(ddp));
  CHECK_EQ(cddp_ddp_rows(ddp, 0, NULL, NULL), 0);
  cddp_ddp_destroy(ddp);
  return test_failures != before;
}

static void test_unused_rows(void) { CHECK_OK(ranks_run(run_unused_rows, NULL, 2, true)); }

static int run_rows_misuse(cddp_group *g, void *arg) {
  int before = test_failures;
  float w[12] = {0}, u[4] = {0}, v[12] = {0};
  int64_t row = 6;
  size_t rows[2] = {6, 0};
  cddp_param p[2];
  cddp_ddp_desc d;
  cddp_sgd_desc o;
  cddp_ddp *ddp;
  cddp_optim *sgd, *blind, *decays;
  (void)arg;
  memset(p, 0, sizeof p);
  memset(&d, 0, sizeof d);
  memset(&o, 0, sizeof o);
  p[0].name = "table";
  p[0].data = w;
  p[0].count = 12;
  p[1].data = u;
  p[1].count = 4;
  d.sparse_rows = rows;
  rows[0] = 5;
  CHECK_IS(cddp_ddp_create(&ddp, g, p, 2, &d), CDDP_INVALID_ARGUMENT);
  CHECK(mentions("\"table\" cannot have 5 sparse rows, with 12 elements"));
  rows[0] = 6;
  p[0].grad = v;
  CHECK_IS(cddp_ddp_create(&ddp, g, p, 2, &d), CDDP_INVALID_ARGUMENT);
  CHECK(mentions("its grad must be NULL"));
  p[0].grad = NULL;
  rows[0] = cddp_rank(g) == 0 ? 6 : 12;
  CHECK_IS(cddp_ddp_create(&ddp, g, p, 2, &d), CDDP_MISMATCH);
  CHECK(mentions("\"table\" (12 f32, 12 sparse rows) on rank 1, \"table\" (12 f32, 6 sparse"));
  rows[0] = 6;
  CHECK_OK(cddp_ddp_create(&ddp, g, p, 2, &d));
  CHECK_IS(cddp_ddp_add_rows(NULL, 0, &row, v, 1), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_ddp_add_rows(ddp, 2, &row, v, 1), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_ddp_add_rows(ddp, 1, &row, v, 1), CDDP_INVALID_ARGUMENT);
  CHECK(mentions("is dense"));
  CHECK_IS(cddp_ddp_add_rows(ddp, 0, &row, v, 1), CDDP_INVALID_ARGUMENT);
  CHECK(mentions("row 6 of parameter \"table\", which has rows 0 to 5"));
  row = -1;
  CHECK_IS(cddp_ddp_add_rows(ddp, 0, &row, v, 1), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_ddp_add_rows(ddp, 0, NULL, v, 1), CDDP_INVALID_ARGUMENT);
  CHECK_EQ(cddp_ddp_rows(ddp, 1, NULL, NULL) + cddp_ddp_rows(NULL, 0, NULL, NULL), 0);
  CHECK_OK(cddp_sgd_create(&blind, p, 2, &o));
  o.ddp = ddp;
  CHECK_OK(cddp_sgd_create(&sgd, p, 2, &o));
  o.weight_decay = 0.1;
  CHECK_OK(cddp_sgd_create(&decays, p, 2, &o));
  CHECK_OK(cddp_ddp_ready(ddp, 0));
  CHECK_OK(cddp_ddp_ready(ddp, 1));
  CHECK_IS(cddp_ddp_step(ddp, decays), CDDP_UNSUPPORTED);
  CHECK(mentions("table") && mentions("weight_decay"));
  CHECK_OK(cddp_ddp_wait(ddp));
  CHECK_IS(cddp_optim_step(decays), CDDP_UNSUPPORTED);
  CHECK_IS(cddp_optim_step(blind), CDDP_INVALID_ARGUMENT);
  CHECK(mentions("(sparse rows) set ddp in cddp_sgd_desc"));
  CHECK_OK(cddp_optim_step(sgd));
  cddp_optim_destroy(sgd);
  cddp_optim_destroy(blind);
  cddp_optim_destroy(decays);
  cddp_ddp_destroy(ddp);
  return test_failures != before;
}

static void test_rows_misuse(void) { CHECK_OK(ranks_run(run_rows_misuse, NULL, 2, true)); }

/* Rows of a micro-batch that is given up by cddp_optim_zero_grad are gone, as dense gradients. */
static int run_rows_dropped(cddp_group *g, void *arg) {
  static const size_t rows[1] = {4};
  float table[8] = {0}, x[2] = {100, 100};
  cddp_param p = {"table", NULL, NULL, 8, CDDP_F32};
  int before = test_failures, step;
  cddp_ddp_desc d;
  cddp_sgd_desc o;
  cddp_optim *sgd;
  cddp_ddp *ddp;
  (void)arg;
  memset(&d, 0, sizeof d);
  memset(&o, 0, sizeof o);
  p.data = table;
  d.sparse_rows = rows;
  CHECK_OK(cddp_ddp_create(&ddp, g, &p, 1, &d));
  o.lr = 1;
  o.ddp = ddp;
  CHECK_OK(cddp_sgd_create(&sgd, &p, 1, &o));
  for (step = 0; step < 2; step++) {
    int64_t row = 1 + step;
    cddp_ddp_no_sync(ddp, step == 0);
    CHECK_OK(cddp_ddp_add_rows(ddp, 0, &row, x, 1));
    CHECK_OK(cddp_ddp_ready(ddp, 0));
    if (step == 0) CHECK_OK(cddp_optim_zero_grad(sgd));
  }
  CHECK_OK(cddp_ddp_step(ddp, sgd));
  CHECK(table[2] == 0 && table[3] == 0);
  CHECK(table[4] == -100 && table[5] == -100);
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  return test_failures != before;
}

static void test_rows_dropped(void) { CHECK_OK(ranks_run(run_rows_dropped, NULL, 2, true)); }

/* An elastic model whose optimizer was made without desc.ddp. */
static int run_elastic_rows(cddp_group *g, void *arg) {
  static const size_t rows[2] = {0, 64};
  cddp_param p[2] = {{"w", NULL, NULL, 400, CDDP_F32}, {"table", NULL, NULL, 64 * 8, CDDP_F32}};
  float *w, *table, ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  int before = test_failures, step, shard, i;
  cddp_ddp_desc d;
  cddp_sgd_desc o;
  cddp_optim *sgd;
  cddp_ddp *ddp;
  (void)arg;
  memset(&d, 0, sizeof d);
  memset(&o, 0, sizeof o);
  p[0].data = w = (float *)cddp_alloc(g, 400 * sizeof(float));
  p[1].data = table = (float *)cddp_alloc(g, 64 * sizeof ones);
  d.shards = 2;
  d.elastic = true;
  d.sparse_rows = rows;
  o.lr = 0.125;
  CHECK_OK(cddp_ddp_create(&ddp, g, p, 2, &d));
  CHECK_OK(cddp_sgd_create(&sgd, p, 2, &o));
  for (step = 0; step < 3; step++) {
    while (cddp_ddp_next_shard(ddp, &shard)) {
      int64_t row = shard;
      for (i = 0; i < 400; i++) ((float *)p[0].grad)[i] += 1;
      CHECK_OK(cddp_ddp_add_rows(ddp, 1, &row, ones, 1));
      CHECK_OK(cddp_ddp_ready(ddp, 1));
      CHECK_OK(cddp_ddp_ready(ddp, 0));
    }
    CHECK_OK(cddp_ddp_step(ddp, sgd));
  }
  for (i = 0; i < 400 && w[i] == -0.375f;) i++;
  CHECK_EQ(i, 400);
  for (i = 0; i < 64 * 8 && table[i] == (i < 2 * 8 ? -0.1875f : 0);) i++;
  CHECK_EQ(i, 64 * 8);
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  cddp_free(g, table);
  cddp_free(g, w);
  return test_failures != before;
}

static void test_elastic_rows(void) {
  CHECK_OK(ranks_run(run_elastic_rows, NULL, 2, false));
  setenv("TEST_HOSTS", "ab", 1);
  CHECK_OK(ranks_run(run_elastic_rows, NULL, 2, false));
  unsetenv("TEST_HOSTS");
}

/* Every allocation fails once: an error, no leak, no crash. */
static int budget;

static void *meagre(size_t n, void *user_data) {
  (void)user_data;
  return budget-- > 0 ? malloc(n) : NULL;
}

static void meagre_free(void *p, void *user_data) {
  (void)user_data;
  free(p);
}

static cddp_result use_rows(cddp_group *g, bool fused) {
  float w[12] = {0}, v[24] = {0};
  int64_t numbers[12] = {5, 4, 3, 2, 1, 0, 5, 4, 3, 2, 1, 0};
  size_t rows = 6;
  cddp_param p[1];
  cddp_ddp_desc d;
  cddp_sgd_desc o;
  cddp_ddp *ddp = NULL;
  cddp_optim *sgd = NULL;
  cddp_result r;
  memset(p, 0, sizeof p);
  memset(&d, 0, sizeof d);
  memset(&o, 0, sizeof o);
  o.momentum = 0.5;
  p[0].data = w;
  p[0].count = 12;
  d.sparse_rows = &rows;
  if ((r = cddp_ddp_create(&ddp, g, p, 1, &d)) != CDDP_OK) return r;
  o.ddp = ddp;
  r = cddp_sgd_create(&sgd, p, 1, &o);
  if (r == CDDP_OK) r = cddp_ddp_add_rows(ddp, 0, numbers, v, 12);
  if (r == CDDP_OK) r = cddp_ddp_ready(ddp, 0);
  if (r == CDDP_OK) r = fused ? cddp_ddp_step(ddp, sgd) : cddp_ddp_wait(ddp);
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  return r;
}

static void test_rows_memory(void) {
  int n, failed = 0, done = 0;
  for (n = 0; n < 400 && done < 2; n++) {
    cddp_group_desc o;
    cddp_group *g;
    cddp_result r;
    memset(&o, 0, sizeof o);
    o.world_size = 1;
    o.allocator.alloc = meagre;
    o.allocator.free = meagre_free;
    budget = 1000000;
    CHECK_OK(cddp_init(&g, &o));
    if (g == NULL) return;
    budget = n;
    r = use_rows(g, done == 1);
    if (r == CDDP_OK) done++, n = 0;
    else failed++;
    if (r != CDDP_OK) CHECK_IS(r, CDDP_OUT_OF_MEMORY);
    cddp_destroy(g);
  }
  CHECK(done == 2 && failed > 20);
}

enum { COUNTED = 2000, COUNTED_WIDTH = 60 };
static size_t live; /* bytes */

static void *counted(size_t n, void *user_data) {
  size_t *p = (size_t *)malloc(n + 16);
  (void)user_data;
  if (p == NULL) return NULL;
  *p = n;
  live += n;
  return (char *)p + 16;
}

static void counted_free(void *p, void *user_data) {
  size_t *head = p != NULL ? (size_t *)(void *)((char *)p - 16) : NULL;
  (void)user_data;
  if (head != NULL) live -= *head;
  free(head);
}

/* Each row is kept twice, as added and in the mean, with its number; 16 bytes serve the sort. */
static void test_rows_bytes(void) {
  static float w[COUNTED * COUNTED_WIDTH], values[COUNTED * COUNTED_WIDTH];
  static int64_t numbers[COUNTED];
  size_t rows = COUNTED, before, each = 2 * (8 + COUNTED_WIDTH * sizeof(float)) + 16;
  cddp_param p[] = {{"w", w, NULL, COUNTED * COUNTED_WIDTH, CDDP_F32}};
  cddp_group_desc gd;
  cddp_ddp_desc d;
  cddp_group *g;
  cddp_ddp *ddp;
  int i;
  memset(&gd, 0, sizeof gd);
  memset(&d, 0, sizeof d);
  gd.world_size = 1;
  gd.allocator.alloc = counted;
  gd.allocator.free = counted_free;
  d.sparse_rows = &rows;
  for (i = 0; i < COUNTED; i++) numbers[i] = i;
  CHECK_OK(cddp_init(&g, &gd));
  CHECK_OK(cddp_ddp_create(&ddp, g, p, 1, &d));
  before = live;
  CHECK_OK(cddp_ddp_add_rows(ddp, 0, numbers, values, COUNTED));
  CHECK_OK(cddp_ddp_ready(ddp, 0));
  CHECK_OK(cddp_ddp_wait(ddp));
  CHECK(live - before <= COUNTED * each + 4096);
  cddp_ddp_destroy(ddp);
  cddp_destroy(g);
  CHECK_EQ(live, 0);
}

int main(void) {
  setenv("CDDP_TIMEOUT_S", RANKS_SLOW ? "120" : "30", 0);
  RUN(test_uneven);
  RUN(test_joined_hook);
  RUN(test_join_misuse);
  RUN(test_join_mismatch);
  RUN(test_join_of_two);
  RUN(test_join_late);
  RUN(test_joined_and_lost);
  RUN(test_rows);
  RUN(test_few_rows);
  RUN(test_clipped_rows);
  RUN(test_unused_rows);
  RUN(test_rows_misuse);
  RUN(test_rows_dropped);
  RUN(test_elastic_rows);
  RUN(test_rows_memory);
  RUN(test_rows_bytes);
  return TEST_END();
}
