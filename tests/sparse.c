/* Uneven inputs (cddp_ddp_join) and gradients that are rows of a parameter. What comes out is
   compared, bit for bit, with one model that is trained on means worked out here. */
#include "../cddp.h"
#include "ranks.h"

enum { PARAMS = 4, MOST_STEPS = 7, LARGE = 3001, STEPS = 3 /* kinds of step */ };
enum { FUSED, APART, BOTH };

static const size_t sizes[PARAMS] = {LARGE, 5, 64, 130};
static const char *const names[PARAMS] = {"w1", "b1", "w2", "b2"};

static bool mentions(const char *text) { return strstr(cddp_error(), text) != NULL; }

/* UNEVEN INPUTS. ------------------------------------------------------------------------------- */

typedef struct uneven {
  int kind;                      /* of step */
  bool shared, own, unused, hook; /* weights shared; gradients own; find_unused_parameters */
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
  cddp_sgd *sgd;
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
   case says so, and by none if no even rank is there. */
static int reference_step(reference *f, element *e, int n, const uneven *c) {
  int k, r, users = 0;
  for (r = 0; r < n; r++) users += e->active[r] % 2 == 0;
  for (k = 0; k < PARAMS; k++) {
    e->param = k;
    for (e->i = 0; e->i < sizes[k]; e->i++) {
      float sum = 0, values[64];
      for (r = 0; r < n; r++)
        values[r] = k == 1 && c->unused && e->active[r] % 2 ? 0 : term(e, r);
      sum = ranks_tree_f32(term, e, 0, n);
      if (k == 1 && c->unused) /* in any order: at most two ranks use it */
        for (sum = 0, r = 0; r < n; r++) sum += values[r];
      ((float *)f->p[k].grad)[e->i] = sum / (float)n;
    }
  }
  CHECK_OK(cddp_sgd_step(f->sgd));
  return users;
}

static cddp_result take_step(cddp_ddp *ddp, cddp_sgd *sgd, int kind, int step) {
  cddp_result r;
  if (kind == FUSED || (kind == BOTH && step % 3 == 1)) return cddp_ddp_step(ddp, sgd);
  if ((r = cddp_ddp_wait(ddp)) != CDDP_OK || (r = cddp_sgd_step(sgd)) != CDDP_OK) return r;
  return cddp_sgd_zero_grad(sgd);
}

/* One epoch on this rank: its own steps, then join. */
static void uneven_epoch(cddp_ddp *ddp, cddp_sgd *sgd, cddp_param *p, const uneven *c, int epoch,
                         int rank, int world, float *buffer) {
  int step, k, mine = steps_of(rank, epoch, world);
  size_t i;
  for (step = 0; step < mine; step++) {
    int n = 0, first = -1, r, global = epoch * MOST_STEPS + step;
    for (r = 0; r < world; r++)
      if (steps_of(r, epoch, world) > step) first = first < 0 ? r : first, n++;
    *buffer = (float)(100 * rank + step);
    CHECK_OK(cddp_ddp_sync_buffers(ddp));
    CHECK_EQ(*buffer, 100 * first + step);
    CHECK_OK(cddp_sgd_set_lr(sgd, 0.125 / (1 + global)));
    for (k = PARAMS - 1; k >= 0; k--) {
      if (k == 1 && c->unused && rank % 2) continue;
      for (i = 0; i < sizes[k]; i++)
        ((float *)p[k].grad)[i] += gradient_of(rank, global, k, i);
      CHECK_OK(cddp_ddp_ready(ddp, k));
    }
    CHECK_OK(take_step(ddp, sgd, c->kind, step));
    CHECK_EQ(cddp_ddp_present(ddp), n);
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
    CHECK_OK(cddp_sgd_set_lr(f->sgd, 0.125 / (1 + e.step)));
    reference_step(f, &e, n, c);
  }
}

static int run_uneven(cddp_group *g, void *arg) {
  const uneven *c = (const uneven *)arg;
  int before = test_failures, k, epoch, rank = cddp_rank(g), world = cddp_world_size(g);
  float buffer = (float)rank;
  reference *f = (reference *)malloc(2 * sizeof *f), *own = f + 1;
  cddp_param p[PARAMS], extra;
  cddp_ddp_desc d;
  cddp_sgd_desc o;
  cddp_ddp *ddp;
  cddp_sgd *sgd;
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
  }
  memset(own->grads, 0, sizeof own->grads);
  CHECK_OK(cddp_ddp_create(&ddp, g, p, PARAMS, &d));
  CHECK_OK(cddp_sgd_create(&sgd, p, PARAMS, &o));
  for (epoch = 0; epoch < 4 && test_failures == before; epoch++) {
    uneven_epoch(ddp, sgd, p, c, epoch, rank, world, &buffer);
    reference_epoch(f, c, epoch, world);
    CHECK(cddp_sgd_lr(sgd) == cddp_sgd_lr(f->sgd));
    for (k = 0; k < PARAMS; k++) CHECK(memcmp(p[k].data, f->p[k].data, sizes[k] * 4) == 0);
  }
  cddp_sgd_destroy(sgd);
  cddp_sgd_destroy(f->sgd);
  cddp_ddp_destroy(ddp);
  for (k = 0; c->shared && k < PARAMS; k++) cddp_free(g, p[k].data);
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
  cddp_sgd *sgd;
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
  cddp_sgd_destroy(m->sgd);
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
  int before = test_failures;
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
  CHECK_OK(cddp_ddp_join(a.ddp, a.sgd)); /* nothing was broken */
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
  case 0: /* joins without the cddp_sgd that the others step with */
    CHECK_IS(rank ? cddp_ddp_step(m.ddp, m.sgd) : cddp_ddp_join(m.ddp, NULL), CDDP_MISMATCH);
    CHECK(mentions("rank 0 called ddp_join without a cddp_sgd, rank 1 called ddp_step"));
    break;
  case 1: /* with another */
    CHECK_IS(rank ? cddp_ddp_step(m.ddp, m.sgd) : cddp_ddp_join(m.ddp, m.sgd), CDDP_MISMATCH);
    CHECK(mentions("that rank 0 passed to ddp_join has other settings"));
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
      CHECK_OK(cddp_sgd_step(m.sgd));
    }
    CHECK_IS(cddp_ddp_join(m.ddp, rank == 0 ? NULL : m.sgd), CDDP_MISMATCH);
    CHECK(mentions("cddp_sgd's of other settings"));
  }
  CHECK_IS(cddp_ddp_join(m.ddp, m.sgd), CDDP_MISMATCH); /* broken for good */
  small_close(&m);
  return test_failures != before;
}

static void test_join_mismatch(void) {
  int which;
  for (which = 0; which < 4; which++) CHECK_OK(ranks_run(run_join_mismatch, &which, 3, true));
}

static int late_fn(cddp_group *g, void *arg) {
  int *let_go = (int *)arg, before = test_failures;
  small m;
  if (!small_open(&m, g, 0, NULL)) return 1;
  if (cddp_rank(g) == 0) {
    CHECK_IS(cddp_ddp_join(m.ddp, m.sgd), CDDP_TIMEOUT);
    CHECK(mentions("rank 1") && mentions("did not come to ddp_join at"));
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
  CHECK(mentions("rank 2") && mentions("SIGKILL"));
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

int main(void) {
  setenv("CDDP_TIMEOUT_S", RANKS_SLOW ? "120" : "30", 0);
  RUN(test_uneven);
  RUN(test_joined_hook);
  RUN(test_join_misuse);
  RUN(test_join_mismatch);
  RUN(test_join_late);
  RUN(test_joined_and_lost);
  return TEST_END();
}
