/* Data parallel (cddp_ddp): the mean of the gradients, and everything that a step can do with it.

   Models with gradients of known values run on 1 to 16 processes and threads. Buckets must be
   those of the limits, means must have the bits of a loop written here, and the fused step
   (cddp_ddp_step) those of its parts: wait, clip, optimizer step, zero. Also: creation with
   weights that differ, buffers, tied parameters, no_sync, unused and forgotten parameters,
   communication hooks, clipping with NaN, steps beside the group's own calls, groups destroyed
   first, dead and stopped ranks. */
#define CDDP_IMPLEMENTATION
#include "../../cddp.h"
#include "../ranks.h"

#include <pthread.h>

enum { MOST = 40 };           /* parameters of a model */
enum { SHARED, HEAP, MIXED }; /* where data and gradients lie */
enum { PLACED = 3 };          /* gradients: by cddp_ddp_create */

static bool mentions(const char *text) { return strcasestr(cddp_error(), text) != NULL; }

/* MODELS --------------------------------------------------------------------------------------- */

typedef struct model {
  cddp_group *g;
  cddp_param p[MOST];
  char name[MOST][32];
  int n, data_memory, grad_memory;
  cddp_ddp *ddp;
  cddp_optim *sgd;
  uint64_t seed;
  void *copies[MOST]; /* of f32 parameters: what the optimizer keeps in half precision */
  cddp_dtype copy_dtype;
} model;

static bool in_shared(const model *m, int memory, int i) {
  return memory == SHARED || (memory == MIXED && (i + cddp_rank(m->g)) % 2 == 0);
}

static void *take(model *m, int memory, int i, size_t bytes) {
  void *p = in_shared(m, memory, i) ? cddp_alloc(m->g, bytes) : malloc(bytes ? bytes : 1);
  CHECK(p != NULL);
  if (p != NULL) memset(p, 0, bytes);
  return p;
}

static void give(model *m, int memory, int i, void *p) {
  if (in_shared(m, memory, i))
    cddp_free(m->g, p);
  else
    free(p);
}

/* A double that has any mantissa and one of several exponents, rounded to dtype. */
static double number(cddp_dtype dtype, uint64_t h) {
  unsigned char b[8];
  double v = ldexp(1.0 + (double)(h >> 12) * 0x1p-52, (int)(h % 7) - 5);
  ranks_store(dtype, b, 0, h & 8 ? -v : v);
  return ranks_load(dtype, b, 0);
}

static double gradient(const model *m, int rank, int step, int param, size_t i) {
  uint64_t h = ranks_mix(m->seed * 64 + (uint64_t)param, (uint64_t)(rank * 1000 + step), i);
  return number(m->p[param].dtype, h);
}

/* n parameters of the given sizes and types (both repeat); data from the seed, different on each
   rank. */
static bool model_open(model *m, cddp_group *g, int n, const size_t *counts, int count_count,
                       const cddp_dtype *types, int type_count, int data_memory, int grad_memory) {
  int k, rank = cddp_rank(g);
  size_t i;
  uint64_t seed = m->seed;
  memset(m, 0, sizeof *m);
  m->seed = seed;
  m->g = g;
  m->n = n;
  m->data_memory = data_memory;
  m->grad_memory = grad_memory;
  for (k = 0; k < n; k++) {
    cddp_param *p = &m->p[k];
    snprintf(m->name[k], sizeof m->name[k], "layer%d.w", k);
    p->name = m->name[k];
    p->count = counts[k % count_count];
    p->dtype = types[k % type_count];
    p->data = take(m, data_memory, k, p->count * cddp_dtype_size(p->dtype));
    if (grad_memory != PLACED)
      p->grad = take(m, grad_memory, k, p->count * cddp_dtype_size(p->dtype));
    if (p->data == NULL) return false;
    for (i = 0; i < p->count; i++)
      ranks_store(p->dtype, p->data, i,
                  number(p->dtype, ranks_mix(seed, (uint64_t)(k + 100 * rank), i)));
  }
  return true;
}

static void model_close(model *m) {
  int k;
  cddp_optim_destroy(m->sgd);
  cddp_ddp_destroy(m->ddp);
  for (k = 0; k < m->n; k++) {
    if (m->ddp != NULL && m->grad_memory == PLACED) CHECK(m->p[k].grad == NULL);
    if (m->grad_memory != PLACED) give(m, m->grad_memory, k, m->p[k].grad);
    give(m, m->data_memory, k, m->p[k].data);
    free(m->copies[k]);
  }
}

/* Every other f32 parameter gets a copy. */
static void model_copies(model *m, cddp_dtype dtype, cddp_sgd_desc *o) {
  int k;
  for (k = 0; k < m->n; k += 2)
    if (m->p[k].dtype == CDDP_F32) m->copies[k] = malloc(m->p[k].count * 2 + 1);
  o->copies = m->copies;
  o->copy_dtype = m->copy_dtype = dtype;
}

static void check_copies(const model *m) {
  int k;
  for (k = 0; k < m->n; k++)
    if (m->copies[k] != NULL)
      CHECK(ranks_is_copy(m->copy_dtype, m->copies[k], m->p[k].data, m->p[k].count));
}

/* What backward does: adds this rank's gradients of the step. */
static void backward_one(model *m, int step, int k) {
  cddp_param *p = &m->p[k];
  size_t i;
  int rank = cddp_rank(m->g);
  for (i = 0; i < p->count; i++)
    ranks_store(p->dtype, p->grad, i,
                ranks_load(p->dtype, p->grad, i) + gradient(m, rank, step, k, i));
}

static void zero_gradients(model *m) {
  int k;
  for (k = 0; k < m->n; k++)
    memset(m->p[k].grad, 0, m->p[k].count * cddp_dtype_size(m->p[k].dtype));
}

typedef struct element {
  const model *m;
  int step, param;
  size_t i;
} element;

static float element_f32(void *arg, int rank) {
  element *e = (element *)arg;
  return (float)gradient(e->m, rank, e->step, e->param, e->i);
}

static double element_f64(void *arg, int rank) {
  element *e = (element *)arg;
  return gradient(e->m, rank, e->step, e->param, e->i);
}

/* The mean over ranks as the manual defines it: canonical sum, one true division, one rounding. */
static void mean(const model *m, int step, int param, size_t i, unsigned char out[8]) {
  int world = cddp_world_size(m->g);
  element e;
  e.m = m;
  e.step = step;
  e.param = param;
  e.i = i;
  if (m->p[param].dtype == CDDP_F64)
    ranks_store(CDDP_F64, out, 0, ranks_tree_f64(element_f64, &e, 0, world) / world);
  else
    ranks_store(m->p[param].dtype, out, 0,
                (double)(ranks_tree_f32(element_f32, &e, 0, world) / (float)world));
}

static void check_means(const model *m, int step) {
  int k;
  for (k = 0; k < m->n; k++) {
    const cddp_param *p = &m->p[k];
    size_t size = cddp_dtype_size(p->dtype), i;
    unsigned char want[8];
    for (i = 0; i < p->count; i++) {
      mean(m, step, k, i, want);
      if (memcmp(want, (const char *)p->grad + i * size, size) != 0) break;
    }
    CHECK(i == p->count);
    if (i < p->count)
      fprintf(
          stderr,
          "  rank %d of %d, step %d, parameter %d (dtype %d) at %zu of %zu: want %.17g got %.17g\n",
          cddp_rank(m->g), cddp_world_size(m->g), step, k, (int)p->dtype, i, p->count,
          ranks_load(p->dtype, want, 0), ranks_load(p->dtype, p->grad, i));
  }
}

static uint64_t hash(const void *data, size_t n) {
  const unsigned char *p = (const unsigned char *)data;
  uint64_t h = 0xcbf29ce484222325ull;
  size_t i;
  for (i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3ull;
  return h;
}

/* Weights (or gradients) have the same bits on every rank. */
static void check_same_everywhere(const model *m, bool grads) {
  uint64_t mine = 0, all[64];
  int k;
  for (k = 0; k < m->n; k++) {
    const cddp_param *p = &m->p[k];
    mine = mine * 31 + hash(grads ? p->grad : p->data, p->count * cddp_dtype_size(p->dtype));
  }
  CHECK_OK(cddp_all_gather(m->g, &mine, all, 1, CDDP_I64, NULL));
  for (k = 0; k < cddp_world_size(m->g); k++) CHECK(all[k] == mine);
}

/* READY: in an order of each rank's own, from one thread or from three. ------------------------ */

typedef struct readier {
  model *m;
  const int *order;
  int step, part, parts;
} readier;

static void *ready_some(void *arg) {
  readier *r = (readier *)arg;
  int i;
  for (i = r->part; i < r->m->n; i += r->parts) {
    backward_one(r->m, r->step, r->order[i]);
    CHECK_OK(cddp_ddp_ready(r->m->ddp, r->order[i]));
  }
  return NULL;
}

static void backward(model *m, int step, int threads) {
  int order[MOST], i;
  pthread_t t[3];
  readier r[3];
  ranks_shuffle(order, m->n, m->seed + (uint64_t)(step * 100 + cddp_rank(m->g)));
  for (i = 0; i < threads; i++) {
    r[i].m = m;
    r[i].order = order;
    r[i].step = step;
    r[i].part = i;
    r[i].parts = threads;
    if (threads > 1)
      CHECK(pthread_create(&t[i], NULL, ready_some, &r[i]) == 0);
    else
      ready_some(&r[i]);
  }
  for (i = 0; threads > 1 && i < threads; i++) pthread_join(t[i], NULL);
}

static void small_buckets(cddp_ddp_desc *d) {
  memset(d, 0, sizeof *d);
  d->bucket_cap_mb = 4096.0 / 1048576;
  d->first_bucket_mb = 512.0 / 1048576;
}

/* MEANS ---------------------------------------------------------------------------------------- */

static const size_t some_counts[] = {1, 3, 17, 64, 1000, 130, 2, 259, 4099, 0, 31, 7};
static const cddp_dtype only_f32[] = {CDDP_F32}, only_f64[] = {CDDP_F64}, only_f16[] = {CDDP_F16},
                        only_bf16[] = {CDDP_BF16}, mixed_types[] = {CDDP_F32, CDDP_F32, CDDP_BF16,
                                                                    CDDP_F64, CDDP_F16, CDDP_F32};

typedef struct type_list {
  const cddp_dtype *types;
  int count;
} type_list;
static const type_list type_lists[] = {
    {only_f32, 1}, {mixed_types, 6}, {only_f64, 1}, {only_f16, 1}, {only_bf16, 1}};

static int run_means(cddp_group *g, void *arg) {
  int before = test_failures, k, step;
  (void)arg;
  for (k = 0; k < 10 && test_failures == before; k++) {
    const type_list *t = &type_lists[k % 5];
    model *m = (model *)calloc(1, sizeof *m);
    cddp_ddp_desc d;
    if (m == NULL) return 1;
    m->seed = (uint64_t)k + 1;
    small_buckets(&d);
    if (model_open(m, g, k == 0 ? 1 : 12, some_counts + k % 3, 12 - k % 3, t->types, t->count,
                   k % 3, k % 4)) {
      CHECK_OK(cddp_ddp_create(&m->ddp, g, m->p, m->n, k % 3 == 0 ? NULL : &d));
      for (step = 0; m->ddp != NULL && step < 4 && test_failures == before; step++) {
        zero_gradients(m);
        backward(m, step, step % 2 ? 3 : 1);
        CHECK_OK(cddp_ddp_wait(m->ddp));
        check_means(m, step);
      }
    }
    model_close(m);
    free(m);
  }
  return test_failures != before;
}

static const int all_ranks[] = {2, 3, 7, 1, 4, 16};

static void test_means(void) {
  int i;
  for (i = 0; i < (RANKS_SLOW ? 3 : 6); i++) {
    if (!RANKS_TSAN) CHECK_OK(ranks_run(run_means, NULL, all_ranks[i], false));
    CHECK_OK(ranks_run(run_means, NULL, all_ranks[i], true));
  }
}

/* CREATION: rank 0's values everywhere; what differs is named. --------------------------------- */

static int run_creation(cddp_group *g, void *arg) {
  int before = test_failures, k, memory, rank = cddp_rank(g);
  size_t i;
  (void)arg;
  for (memory = 0; memory < 3; memory++) {
    model m;
    cddp_ddp_desc d;
    int32_t steps = 5 + rank;
    float running[33];
    uint8_t flags[3] = {1, 2, 3};
    cddp_param buffers[3];
    memset(buffers, 0, sizeof buffers);
    buffers[0].name = "steps";
    buffers[0].data = &steps;
    buffers[0].count = 1;
    buffers[0].dtype = CDDP_I32;
    buffers[1].data = running;
    buffers[1].count = 33;
    buffers[1].dtype = CDDP_F32;
    buffers[2].data = flags;
    buffers[2].count = 3;
    buffers[2].dtype = CDDP_U8;
    for (i = 0; i < 33; i++) running[i] = (float)(rank * 100) + (float)i;
    flags[1] = (uint8_t)(9 + rank);
    memset(&d, 0, sizeof d);
    d.buffers = buffers;
    d.buffer_count = 3;
    m.seed = 40;
    if (!model_open(&m, g, 12, some_counts, 12, mixed_types, 6, memory, PLACED)) return 1;
    CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, &d));
    if (m.ddp == NULL) return 1;
    for (k = 0; k < m.n; k++) {
      cddp_param *p = &m.p[k];
      CHECK(p->grad != NULL || p->count == 0);
      for (i = 0; i < p->count; i++) {
        if (ranks_load(p->dtype, p->data, i) != number(p->dtype, ranks_mix(40, (uint64_t)k, i)))
          break;
        if (ranks_load(p->dtype, p->grad, i) != 0) break;
      }
      CHECK(i == p->count);
    }
    CHECK(steps == 5 && running[32] == 32.0f && flags[1] == 9 && flags[2] == 3);
    steps += rank * 2;
    running[5] = (float)rank - 3;
    flags[0] = (uint8_t)(rank + 50);
    CHECK_OK(cddp_ddp_sync_buffers(m.ddp));
    CHECK(steps == 5 && running[5] == -3.0f && flags[0] == 50);
    model_close(&m);
  }
  return test_failures != before;
}

static void test_creation(void) {
  CHECK_OK(ranks_run(run_creation, NULL, 1, false));
  CHECK_OK(ranks_run(run_creation, NULL, 3, false));
  CHECK_OK(ranks_run(run_creation, NULL, 4, true));
}

static int run_difference(cddp_group *g, void *arg) {
  static const char *const settings[] = {"buckets of", "buckets of", "find_unused_parameters",
                                         "bf16_compress_hook", "buffers of", "types: "};
  int before = test_failures, odd = cddp_rank(g) == *(int *)arg, kind;
  for (kind = 0; kind < 12; kind++) {
    const char *said = kind < 6 ? "layer2.w" : settings[kind - 6];
    char mean[4];
    cddp_param buffer = {"mean", mean, NULL, 4, CDDP_U8};
    cddp_ddp_desc d;
    model m;
    memset(&d, 0, sizeof d);
    m.seed = 3;
    d.buffers = &buffer;
    d.buffer_count = 1;
    if (odd && kind == 6) d.bucket_cap_mb = 3;
    if (odd && kind == 7) d.first_bucket_mb = 3;
    if (odd && kind == 8) d.find_unused_parameters = true;
    if (odd && kind == 9) d.comm_hook = cddp_bf16_compress_hook;
    if (odd && kind == 10) d.buffer_count = 0;
    if (odd && kind == 11) buffer.count = 1, buffer.dtype = CDDP_F32; /* as many bytes */
    if (!model_open(&m, g, 5, some_counts + 1, 5, only_f32, 1, HEAP, PLACED)) return 1;
    if (odd && kind == 0) m.p[2].name = "layer2.bias";
    if (odd && kind == 1) m.p[2].count--;
    if (odd && kind == 2) m.p[2].dtype = CDDP_F16;
    if (odd && kind == 3) m.n = 4;
    if (odd && kind == 4) m.p[2].name = NULL;
    if (odd && kind == 5) { /* two differ: the first is named */
      m.p[2].count = 1;
      m.p[4].count = 1;
    }
    CHECK_IS(cddp_ddp_create(&m.ddp, g, m.p, m.n, &d), CDDP_MISMATCH);
    CHECK(m.ddp == NULL);
    if (kind == 3)
      CHECK(mentions("4 parameters") || mentions("5 parameters"));
    else
      CHECK(mentions(said));
    CHECK(m.p[0].grad == NULL);
    m.n = 5;
    model_close(&m);
    CHECK_OK(cddp_barrier(g)); /* the group is as good as before */
  }
  return test_failures != before;
}

static void test_difference(void) {
  int odd;
  for (odd = 0; odd < 3; odd++) {
    CHECK_OK(ranks_run(run_difference, &odd, 3, false));
    CHECK_OK(ranks_run(run_difference, &odd, 3, true));
    setenv("TEST_HOSTS", "ab", 1);
    CHECK_OK(ranks_run(run_difference, &odd, 3, false));
    unsetenv("TEST_HOSTS");
  }
}

/* MISUSE --------------------------------------------------------------------------------------- */

#define CHECK_INVALID(call)                                                                        \
  do {                                                                                             \
    CHECK_IS(call, CDDP_INVALID_ARGUMENT);                                                         \
    CHECK(cddp_error()[0] != 0);                                                                   \
  } while (0)

static void creation_misuse(cddp_group *g) {
  float w[4] = {0};
  cddp_param p[2] = {{"a", w, NULL, 4, CDDP_F32}, {"b", w, NULL, 4, CDDP_I32}};
  cddp_ddp_desc desc;
  cddp_ddp *d = NULL;
  memset(&desc, 0, sizeof desc);
  CHECK_INVALID(cddp_ddp_create(NULL, g, p, 1, NULL));
  CHECK_INVALID(cddp_ddp_create(&d, NULL, p, 1, NULL));
  CHECK_INVALID(cddp_ddp_create(&d, g, NULL, 1, NULL));
  CHECK_INVALID(cddp_ddp_create(&d, g, p, -1, NULL));
  CHECK_INVALID(cddp_ddp_create(&d, g, p, 2, NULL)); /* i32 has no gradient */
  p[1].dtype = (cddp_dtype)77;
  CHECK_INVALID(cddp_ddp_create(&d, g, p, 2, NULL));
  p[1].dtype = CDDP_F32;
  p[1].data = NULL;
  CHECK_INVALID(cddp_ddp_create(&d, g, p, 2, NULL));
  CHECK(mentions("b"));
  p[1].data = w;
  p[1].count = SIZE_MAX / 2;
  CHECK_INVALID(cddp_ddp_create(&d, g, p, 2, NULL));
  desc.bucket_cap_mb = -1;
  CHECK_INVALID(cddp_ddp_create(&d, g, p, 1, &desc));
  desc.bucket_cap_mb = NAN;
  CHECK_INVALID(cddp_ddp_create(&d, g, p, 1, &desc));
  desc.bucket_cap_mb = 0;
  desc.buffer_count = 2;
  CHECK_INVALID(cddp_ddp_create(&d, g, p, 1, &desc));
  CHECK(d == NULL);
  cddp_ddp_destroy(NULL);
}

static void null_misuse(void) {
  int i;
  CHECK_INVALID(cddp_ddp_ready(NULL, 0));
  CHECK_INVALID(cddp_ddp_wait(NULL));
  CHECK_INVALID(cddp_ddp_step(NULL, NULL));
  CHECK_INVALID(cddp_ddp_sync_buffers(NULL));
  CHECK_INVALID(cddp_ddp_clip_grad_norm(NULL, 1, NULL));
  CHECK(!cddp_ddp_used(NULL, 0));
  CHECK(cddp_ddp_bucket_count(NULL) <= 0);
  CHECK_EQ(cddp_ddp_bucket_params(NULL, 0, &i, 1), -1);
  cddp_ddp_no_sync(NULL, true);
}

static int run_misuse(cddp_group *g, void *arg) {
  int before = test_failures, other[4];
  model m, m2;
  double norm;
  cddp_sgd_desc o;
  (void)arg;
  creation_misuse(g);
  null_misuse();
  m.seed = m2.seed = 5;
  if (!model_open(&m, g, 4, some_counts + 1, 4, only_f32, 1, HEAP, PLACED)) return 1;
  if (!model_open(&m2, g, 4, some_counts + 1, 4, only_f32, 1, HEAP, HEAP)) return 1;
  memset(&o, 0, sizeof o);
  o.lr = 0.1;
  CHECK_OK(cddp_sgd_create(&m.sgd, m.p, m.n, &o));
  CHECK_INVALID(cddp_optim_step(m.sgd)); /* gradients are not placed yet */
  CHECK(mentions("layer0.w"));
  cddp_optim_destroy(m.sgd);
  CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, NULL));
  CHECK_OK(cddp_sgd_create(&m.sgd, m.p, m.n, &o));
  CHECK_OK(cddp_sgd_create(&m2.sgd, m2.p, m2.n, &o));
  if (m.ddp == NULL || m.sgd == NULL) return 1;
  CHECK_INVALID(cddp_ddp_ready(m.ddp, -1));
  CHECK_INVALID(cddp_ddp_ready(m.ddp, 4));
  CHECK_EQ(cddp_ddp_bucket_params(m.ddp, 99, other, 4), -1);
  CHECK_EQ(cddp_ddp_bucket_params(m.ddp, -1, other, 4), -1);
  CHECK(!cddp_ddp_used(m.ddp, 99) && !cddp_ddp_used(m.ddp, -1));
  backward(&m, 0, 1);
  CHECK_INVALID(cddp_ddp_step(m.ddp, m2.sgd)); /* another model's */
  CHECK_INVALID(cddp_ddp_step(m.ddp, NULL));
  CHECK_OK(cddp_ddp_wait(m.ddp));
  check_means(&m, 0);
  CHECK_INVALID(cddp_ddp_clip_grad_norm(m.ddp, 0, &norm));
  CHECK_INVALID(cddp_ddp_clip_grad_norm(m.ddp, -1, &norm));
  zero_gradients(&m);
  backward(&m, 1, 1);
  CHECK_OK(cddp_ddp_wait(m.ddp));
  check_means(&m, 1);
  model_close(&m);
  model_close(&m2);
  return test_failures != before;
}

static void test_misuse(void) {
  CHECK_OK(ranks_run(run_misuse, NULL, 1, false));
  CHECK_OK(ranks_run(run_misuse, NULL, 3, false));
  CHECK_OK(ranks_run(run_misuse, NULL, 3, true));
}

/* An optimizer that was made with one cddp_ddp steps no other one of the same parameters. */
static int run_other_ddp(cddp_group *g, void *arg) {
  int before = test_failures;
  cddp_ddp *other = NULL;
  cddp_sgd_desc o;
  model m;
  (void)arg;
  m.seed = 5;
  if (!model_open(&m, g, 4, some_counts + 1, 4, only_f32, 1, HEAP, HEAP)) return 1;
  CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, NULL));
  CHECK_OK(cddp_ddp_create(&other, g, m.p, m.n, NULL));
  memset(&o, 0, sizeof o);
  o.lr = 0.1;
  o.ddp = other;
  CHECK_OK(cddp_sgd_create(&m.sgd, m.p, m.n, &o));
  if (m.ddp == NULL || other == NULL || m.sgd == NULL) return 1;
  backward(&m, 0, 1);
  CHECK_INVALID(cddp_ddp_step(m.ddp, m.sgd));
  CHECK(mentions("desc.ddp"));
  CHECK_OK(cddp_ddp_wait(m.ddp));
  check_means(&m, 0);
  cddp_ddp_destroy(other);
  model_close(&m);
  return test_failures != before;
}

static void test_other_ddp(void) {
  CHECK_OK(ranks_run(run_other_ddp, NULL, 1, true));
  CHECK_OK(ranks_run(run_other_ddp, NULL, 3, true));
}

/* Rank 1 alone fails, *arg: after rank 0 has destroyed its model. Both ranks then create it anew
   for the same optimizer: they have the same states, or the next step says that they differ. */
static int run_anew(cddp_group *g, void *arg) {
  int before = test_failures, step, late = *(const int *)arg;
  int32_t mine, all[2];
  cddp_adamw_desc o;
  model m;
  m.seed = 26;
  if (!model_open(&m, g, 4, some_counts + 1, 4, only_f32, 1, HEAP, PLACED)) return 1;
  memset(&o, 0, sizeof o);
  o.lr = 0.1;
  CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, NULL));
  CHECK_OK(cddp_adamw_create(&m.sgd, m.p, m.n, &o));
  for (step = 0; step < 3; step++) {
    backward(&m, step, 1);
    CHECK_OK(cddp_ddp_step(m.ddp, m.sgd));
  }
  CHECK_OK(cddp_ddp_ready(m.ddp, 0));
  if (late && cddp_rank(g) == 0) cddp_ddp_destroy(m.ddp);
  if (late) CHECK_OK(cddp_barrier(g));
  if (cddp_rank(g) == 1) CHECK_INVALID(cddp_ddp_ready(m.ddp, 0));
  CHECK_OK(cddp_barrier(g));
  if (!late || cddp_rank(g) == 1) cddp_ddp_destroy(m.ddp);
  CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, NULL));
  backward(&m, 3, 1);
  mine = (int32_t)cddp_ddp_step(m.ddp, m.sgd);
  CHECK_OK(cddp_all_gather(g, &mine, all, 1, CDDP_I32, NULL));
  CHECK_EQ(all[0], all[1]);
  CHECK(mine == (int32_t)CDDP_OK ||
        (mine == (int32_t)CDDP_MISMATCH && (late || getenv("TEST_HOSTS") != NULL)));
  if (mine == (int32_t)CDDP_OK) check_same_everywhere(&m, false);
  model_close(&m);
  return test_failures != before;
}

static void test_anew(void) {
  int late;
  for (late = 0; late < 2; late++) {
    CHECK_OK(ranks_run(run_anew, &late, 2, true));
    CHECK_OK(ranks_run(run_anew, &late, 2, false));
    setenv("TEST_HOSTS", "ab", 1);
    CHECK_OK(ranks_run(run_anew, &late, 2, false));
    unsetenv("TEST_HOSTS");
  }
}

/* A parameter has grown since the creation of its optimizer, which has states for its old count. */
static int run_grown(cddp_group *g, void *arg) {
  static const size_t counts[] = {5000};
  int before = test_failures;
  cddp_checkpoint_desc file;
  cddp_sgd_desc o;
  model m;
  (void)arg;
  m.seed = 27;
  if (!model_open(&m, g, 2, counts, 1, only_f32, 1, HEAP, PLACED)) return 1;
  memset(&o, 0, sizeof o);
  memset(&file, 0, sizeof file);
  o.lr = 0.1, o.momentum = 0.5;
  m.p[1].count = 100;
  CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, NULL));
  CHECK_OK(cddp_sgd_create(&m.sgd, m.p, m.n, &o));
  backward(&m, 0, 1);
  CHECK_OK(cddp_ddp_step(m.ddp, m.sgd));
  cddp_ddp_destroy(m.ddp);
  m.p[1].count = counts[0];
  file.optim = m.sgd;
  CHECK_INVALID(cddp_save(g, "/tmp/cddp-grown-never-written", m.p, m.n, &file));
  CHECK(mentions("\"layer1.w\" now has 5000 elements of type f32, at cddp_optim's creation 100"));
  CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, NULL));
  backward(&m, 1, 1);
  CHECK_INVALID(cddp_ddp_step(m.ddp, m.sgd));
  CHECK(mentions("\"layer1.w\" now has 5000 elements"));
  model_close(&m);
  return test_failures != before;
}

static void test_grown(void) {
  CHECK_OK(ranks_run(run_grown, NULL, 2, false));
  CHECK_OK(ranks_run(run_grown, NULL, 2, true));
}

/* Ready twice: the caller may ignore it, wait and step do not, on any rank. */
static int run_twice(cddp_group *g, void *arg) {
  bool fused = *(const bool *)arg, odd = cddp_rank(g) == cddp_world_size(g) - 1;
  double start = test_now();
  cddp_sgd_desc o;
  cddp_result r;
  model m;
  int k;
  m.seed = 6;
  if (!model_open(&m, g, 4, some_counts + 1, 4, only_f32, 1, HEAP, PLACED)) return 1;
  memset(&o, 0, sizeof o);
  o.lr = 0.1;
  CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, NULL));
  CHECK_OK(cddp_sgd_create(&m.sgd, m.p, m.n, &o));
  if (m.ddp == NULL || m.sgd == NULL) return 1;
  for (k = m.n - 1; k >= 0; k--) {
    backward_one(&m, 0, k);
    CHECK_OK(cddp_ddp_ready(m.ddp, k));
    if (odd && k == 2) CHECK_INVALID(cddp_ddp_ready(m.ddp, k));
    if (odd && k == 2) break;
  }
  for (k = 0; k < 2; k++) {
    r = fused ? cddp_ddp_step(m.ddp, m.sgd) : cddp_ddp_wait(m.ddp);
    CHECK_INVALID(r);
    CHECK(mentions("layer2.w"));
    CHECK(mentions("twice"));
  }
  CHECK(test_now() - start < RANKS_WITHIN(5));
  CHECK_OK(cddp_barrier(g)); /* the group is as it was */
  model_close(&m);
  return 0;
}

static void test_ready_twice(void) {
  bool fused;
  int i;
  for (i = 0; i < 4; i++) {
    fused = i % 2;
    CHECK_OK(ranks_run(run_twice, &fused, 2, i >= 2));
  }
}

/* MEMORY OF TWO PARAMETERS --------------------------------------------------------------------- */

static void check_refused(cddp_group *g, cddp_param *p, int n, const char *one, const char *other) {
  cddp_sgd_desc o;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  memset(&o, 0, sizeof o);
  o.lr = 0.1;
  CHECK_INVALID(cddp_ddp_create(&d, g, p, n, NULL));
  CHECK(d == NULL && mentions("cddp_ddp_create") && mentions(one) && mentions(other));
  CHECK_INVALID(cddp_sgd_create(&s, p, n, &o));
  CHECK(s == NULL && mentions("cddp_sgd_create") && mentions(one) && mentions(other));
}

static int run_tied(cddp_group *g, void *arg) {
  enum { N = 64 };
  float *w = (float *)cddp_alloc(g, 4 * N * sizeof *w), heap[4 * N], grads[4 * N];
  void *copies[3];
  uint16_t half[2 * N];
  cddp_param p[3] = {{"wte", w, NULL, N, CDDP_F32},
                     {"bias", w + 2 * N, NULL, N, CDDP_F32},
                     {"lm_head", w, NULL, N, CDDP_F32}};
  cddp_sgd_desc o;
  cddp_ddp *d = NULL;
  cddp_optim *s = NULL;
  int i;
  (void)arg;
  if (w == NULL) return 1;
  memset(w, 0, 4 * N * sizeof *w);
  memset(heap, 0, sizeof heap);
  memset(grads, 0, sizeof grads);
  check_refused(g, p, 3, "\"wte\"", "\"lm_head\"");
  CHECK(mentions("once"));
  p[0].data = p[2].data = heap;
  check_refused(g, p, 3, "\"wte\"", "\"lm_head\"");
  p[2].data = heap + N - 1; /* its last weight is the other's first */
  check_refused(g, p, 3, "\"wte\"", "\"lm_head\"");
  p[2].data = heap + N;
  p[0].grad = grads, p[1].grad = grads + N, p[2].grad = grads + N + 1;
  check_refused(g, p, 3, "\"bias\"", "\"lm_head\"");
  p[2].grad = heap; /* the weights of another */
  check_refused(g, p, 3, "\"wte\"", "\"lm_head\"");
  p[2].grad = grads + 2 * N;
  memset(&o, 0, sizeof o);
  o.lr = 1;
  o.copies = copies;
  o.copy_dtype = CDDP_BF16;
  copies[0] = half, copies[1] = NULL, copies[2] = half + N - 1;
  CHECK_INVALID(cddp_sgd_create(&s, p, 3, &o));
  CHECK(mentions("wte") && mentions("lm_head") && mentions("copy"));
  o.copies = NULL;
  p[1].data = heap, p[1].count = 0; /* no element is shared */
  CHECK_OK(cddp_ddp_create(&d, g, p, 3, NULL));
  CHECK_OK(cddp_sgd_create(&s, p, 3, &o));
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  /* the cure: one parameter, to whose gradient both places add */
  p[0].grad = NULL;
  CHECK_OK(cddp_ddp_create(&d, g, p, 1, NULL));
  CHECK_OK(cddp_sgd_create(&s, p, 1, &o));
  for (i = 0; i < 2 * N; i++) ((float *)p[0].grad)[i % N] += i < N ? 1.0f : 2.0f;
  CHECK_OK(cddp_ddp_ready(d, 0));
  CHECK_OK(cddp_ddp_step(d, s));
  for (i = 0; i < N; i++) CHECK(heap[i] == -3.0f);
  cddp_optim_destroy(s);
  cddp_ddp_destroy(d);
  cddp_free(g, w);
  return 0;
}

static void test_tied(void) {
  CHECK_OK(ranks_run(run_tied, NULL, 2, false));
  CHECK_OK(ranks_run(run_tied, NULL, 2, true));
}

/* BUCKETS: assigned as PyTorch does (protocol notes F.1, F.2). --------------------------------- */

typedef struct buckets {
  int count, size[MOST], param[MOST][MOST];
} buckets;

static void assign(const model *m, const int *order, double first, double cap, bool declared,
                   buckets *b) {
  int open[8], limited[8], i, k; /* by dtype: the open bucket, -1 none; buckets closed so far */
  buckets all, done;
  size_t bytes[MOST];
  memset(&all, 0, sizeof all);
  memset(&done, 0, sizeof done);
  for (i = 0; i < 8; i++) {
    open[i] = -1;
    limited[i] = 0;
  }
  for (k = 0; k < m->n; k++) {
    int p = order[k], t = (int)m->p[p].dtype, at;
    if (open[t] < 0) {
      bytes[all.count] = 0;
      open[t] = all.count++;
    }
    at = open[t];
    all.param[at][all.size[at]++] = p;
    bytes[at] += m->p[p].count * cddp_dtype_size(m->p[p].dtype);
    if ((double)bytes[at] < (limited[t] ? cap : first)) continue;
    memcpy(done.param[done.count], all.param[at], sizeof all.param[at]);
    done.size[done.count++] = all.size[at];
    limited[t] = 1;
    open[t] = -1;
  }
  for (i = 0; i < 8; i++) {
    if (open[i] < 0) continue;
    memcpy(done.param[done.count], all.param[open[i]], sizeof all.param[0]);
    done.size[done.count++] = all.size[open[i]];
  }
  *b = done;
  if (!declared) return;
  for (i = 0; i < done.count; i++) { /* by smallest (here the first) index, then reversed */
    int place = 0;
    for (k = 0; k < done.count; k++) place += done.param[k][0] > done.param[i][0];
    memcpy(b->param[place], done.param[i], sizeof done.param[i]);
    b->size[place] = done.size[i];
  }
}

static void check_buckets(const model *m, const buckets *want) {
  int i, k, got[MOST];
  CHECK_EQ(cddp_ddp_bucket_count(m->ddp), want->count);
  for (i = 0; i < want->count; i++) {
    CHECK_EQ(cddp_ddp_bucket_params(m->ddp, i, got, MOST), want->size[i]);
    for (k = 0; k < want->size[i]; k++) CHECK_EQ(got[k], want->param[i][k]);
  }
  if (want->size[0] > 1) { /* capacity bounds what is written, not what is told */
    got[1] = -7;
    CHECK_EQ(cddp_ddp_bucket_params(m->ddp, 0, got, 1), want->size[0]);
    CHECK(got[0] == want->param[0][0] && got[1] == -7);
    CHECK_EQ(cddp_ddp_bucket_params(m->ddp, 0, NULL, 0), want->size[0]);
  }
}

/* Every parameter in exactly one bucket, none mixes dtypes. */
static void check_partition(const model *m) {
  int i, k, n, got[MOST], seen[MOST] = {0};
  for (i = 0; i < cddp_ddp_bucket_count(m->ddp); i++) {
    n = cddp_ddp_bucket_params(m->ddp, i, got, MOST);
    CHECK(n > 0);
    for (k = 0; k < n; k++) {
      seen[got[k]]++;
      CHECK(m->p[got[k]].dtype == m->p[got[0]].dtype);
    }
  }
  for (k = 0; k < m->n; k++) CHECK_EQ(seen[k], 1);
}

typedef struct bucket_case {
  int n, count_count, type_count;
  size_t counts[12];
  cddp_dtype types[12];
  double first, cap; /* MiB, as in the description */
} bucket_case;

static const bucket_case bucket_cases[] = {
    /* protocol notes F.1's example; the defaults, 1 and 25 MiB */
    {7,
     7,
     7,
     {200000, 100000, 10, 7000000, 500, 300, 600000},
     {CDDP_F32, CDDP_F32, CDDP_F32, CDDP_F32, CDDP_F32, CDDP_F16, CDDP_F32},
     0,
     0},
    /* F.2's: four Linears, cap 1 */
    {8, 8, 1, {90000, 300, 90000, 300, 300000, 1000, 10000, 10}, {CDDP_F32}, 0, 1},
    {8, 8, 1, {90000, 300, 90000, 300, 300000, 1000, 10000, 10}, {CDDP_F32}, 0.5, 1},
    {30, 7, 1, {100, 300, 1, 57, 1000, 12, 256}, {CDDP_F32}, 1024.0 / 1048576, 4096.0 / 1048576},
    {30, 7, 1, {100, 300, 1, 57, 1000, 12, 256}, {CDDP_F32}, 4096.0 / 1048576, 1024.0 / 1048576},
    {30, 7, 1, {100, 300, 1, 57, 1000, 12, 256}, {CDDP_F64}, 1e-9, 1e-9},  /* one each */
    {30, 7, 1, {100, 300, 1, 57, 1000, 12, 256}, {CDDP_BF16}, 1000, 1000}, /* one for all */
    {36,
     7,
     5,
     {100, 300, 1, 57, 1000, 12, 256},
     {CDDP_F32, CDDP_F16, CDDP_F32, CDDP_F64, CDDP_BF16},
     1024.0 / 1048576,
     4096.0 / 1048576},
    {1, 1, 1, {5}, {CDDP_F32}, 0, 0},
};

static int run_buckets(cddp_group *g, void *arg) {
  const bucket_case *c = (const bucket_case *)arg;
  int before = test_failures, order[MOST], k, step, rank = cddp_rank(g);
  double cap = c->cap != 0 ? c->cap : 25, first = c->first != 0 ? c->first
                                                  : c->cap != 0 ? c->cap
                                                                : 1;
  cddp_ddp_desc d;
  buckets want;
  model m;
  m.seed = 9;
  if (!model_open(&m, g, c->n, c->counts, c->count_count, c->types, c->type_count, HEAP, PLACED))
    return 1;
  memset(&d, 0, sizeof d);
  d.bucket_cap_mb = c->cap;
  d.first_bucket_mb = c->first;
  CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, &d));
  if (m.ddp == NULL) return 1;
  for (k = 0; k < m.n; k++) order[k] = k;
  assign(&m, order, first * 1048576, cap * 1048576, true, &want);
  check_buckets(&m, &want);
  for (step = 0; step < 3; step++) {
    ranks_shuffle(order, m.n, (uint64_t)(step * 10 + rank));
    for (k = 0; k < m.n; k++) CHECK_OK(cddp_ddp_ready(m.ddp, order[k]));
    if (step == 0) check_buckets(&m, &want); /* they change at the wait */
    CHECK_OK(cddp_ddp_wait(m.ddp));
    if (step == 0) { /* rank 0's order of arrival in the first step, on every rank, for good */
      ranks_shuffle(order, m.n, 0);
      assign(&m, order, first * 1048576, cap * 1048576, false, &want);
    }
    if (c->type_count == 1)
      check_buckets(&m, &want);
    else
      check_partition(&m);
    if (step == 0 && c->type_count > 1) CHECK_EQ(cddp_ddp_bucket_count(m.ddp), want.count);
  }
  model_close(&m);
  return test_failures != before;
}

static void test_buckets(void) {
  size_t i;
  for (i = RANKS_TSAN ? 3 : 0; i < sizeof bucket_cases / sizeof *bucket_cases; i++) {
    bucket_case c = bucket_cases[i];
    CHECK_OK(ranks_run(run_buckets, &c, 2, false));
    CHECK_OK(ranks_run(run_buckets, &c, 3, true));
  }
}

static int run_no_limit(cddp_group *g, void *arg) {
  static const size_t counts[] = {400000, 400000, 400000};
  cddp_ddp_desc d;
  model m;
  m.seed = 3;
  if (!model_open(&m, g, 3, counts, 3, only_f32, 1, HEAP, PLACED)) return 1;
  memset(&d, 0, sizeof d);
  d.bucket_cap_mb = *(const double *)arg;
  CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, &d));
  CHECK_EQ(cddp_ddp_bucket_count(m.ddp), 1);
  backward(&m, 0, 1);
  CHECK_OK(cddp_ddp_wait(m.ddp));
  CHECK_EQ(cddp_ddp_bucket_count(m.ddp), 1);
  check_means(&m, 0);
  model_close(&m);
  return 0;
}

static void test_no_limit(void) {
  double caps[2] = {INFINITY, 1e300};
  CHECK_OK(ranks_run(run_no_limit, &caps[0], 2, true));
  CHECK_OK(ranks_run(run_no_limit, &caps[1], 2, true));
}

/* In the order of declaration, the reverse of where they lie: it took seconds to sort them. */
static int run_many(cddp_group *g, void *arg) {
  enum { MANY = RANKS_SLOW ? 20000 : 100000 };
  cddp_param *p = (cddp_param *)calloc(MANY, sizeof *p);
  float *w = (float *)calloc(MANY, sizeof *w);
  cddp_ddp *d = NULL;
  double start;
  int i, step;
  (void)arg;
  if (p == NULL || w == NULL) return 1;
  for (i = 0; i < MANY; i++) p[i].data = w + i, p[i].count = 1;
  CHECK_OK(cddp_ddp_create(&d, g, p, MANY, NULL));
  for (step = 0; step < 2 && d != NULL; step++) {
    start = test_now();
    for (i = 0; i < MANY; i++) CHECK_OK(cddp_ddp_ready(d, i));
    CHECK_OK(cddp_ddp_wait(d));
    CHECK(test_now() - start < RANKS_WITHIN(0.7));
  }
  cddp_ddp_destroy(d);
  free(w);
  free(p);
  return 0;
}

static void test_many_parameters(void) { CHECK_OK(ranks_run(run_many, NULL, 1, true)); }

/* NO_SYNC -------------------------------------------------------------------------------------- */

static void add_to_all(model *m, double v) {
  int k;
  size_t i;
  for (k = 0; k < m->n; k++)
    for (i = 0; i < m->p[k].count; i++)
      ranks_store(m->p[k].dtype, m->p[k].grad, i, ranks_load(m->p[k].dtype, m->p[k].grad, i) + v);
}

static void ready_all(model *m) {
  int k;
  for (k = m->n - 1; k >= 0; k--) CHECK_OK(cddp_ddp_ready(m->ddp, k));
}

static bool all_are(const model *m, int k, double v) {
  size_t i;
  for (i = 0; i < m->p[k].count; i++)
    if (ranks_load(m->p[k].dtype, m->p[k].grad, i) != v) return false;
  return true;
}

static int run_no_sync(cddp_group *g, void *arg) { /* 2 ranks */
  int before = test_failures, rank = cddp_rank(g), round, k, grads;
  (void)arg;
  for (grads = 0; grads < 4; grads++) {
    model m;
    m.seed = 11;
    if (!model_open(&m, g, 6, some_counts + 1, 6, mixed_types, 6, HEAP, grads)) return 1;
    CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, NULL));
    if (m.ddp == NULL) return 1;
    for (round = 0; round < 3; round++) {
      zero_gradients(&m);
      cddp_ddp_no_sync(m.ddp, true);
      add_to_all(&m, 1 + rank);
      ready_all(&m);
      for (k = 0; k < m.n; k++) CHECK(all_are(&m, k, 1 + rank)); /* local until the step */
      if (round == 1) {                                          /* a second micro-batch */
        add_to_all(&m, 100);
        ready_all(&m);
      }
      cddp_ddp_no_sync(m.ddp, false);
      add_to_all(&m, 10 + rank);
      ready_all(&m);
      CHECK_OK(cddp_ddp_wait(m.ddp));
      for (k = 0; k < m.n; k++) CHECK(all_are(&m, k, round == 1 ? 112 : 12));
    }
    model_close(&m);
  }
  return test_failures != before;
}

static void test_no_sync(void) {
  CHECK_OK(ranks_run(run_no_sync, NULL, 2, false));
  CHECK_OK(ranks_run(run_no_sync, NULL, 2, true));
}

/* UNUSED PARAMETERS ---------------------------------------------------------------------------- */

static int run_unused(cddp_group *g, void *arg) { /* 4 ranks */
  int before = test_failures, rank = cddp_rank(g), step, k, grads;
  (void)arg;
  for (grads = 0; grads < 4; grads++) {
    cddp_ddp_desc d;
    model m;
    small_buckets(&d);
    d.find_unused_parameters = true;
    m.seed = 12;
    if (!model_open(&m, g, 6, some_counts + 1, 6, mixed_types, 6, HEAP, grads)) return 1;
    CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, &d));
    if (m.ddp == NULL) return 1;
    for (step = 0; step < 4;
         step++) { /* 0: unused on all; 1: on all but one; 2: on one; others used */
      zero_gradients(&m);
      add_to_all(&m, 8);
      for (k = m.n - 1; k >= 0; k--) {
        bool used = k == 0 ? step == 3 : k == 1 ? rank == step : k == 2 ? rank != step : true;
        if (used) CHECK_OK(cddp_ddp_ready(m.ddp, k));
      }
      CHECK_OK(cddp_ddp_wait(m.ddp));
      CHECK(all_are(&m, 0, 8)); /* untouched, or used by all */
      CHECK(all_are(&m, 1, 2)); /* 8 / 4: what the others held does not count */
      CHECK(all_are(&m, 2, 6));
      for (k = 3; k < m.n; k++) CHECK(all_are(&m, k, 8));
      for (k = 0; k < m.n; k++) CHECK(cddp_ddp_used(m.ddp, k) == (k != 0 || step == 3));
    }
    cddp_ddp_no_sync(m.ddp, true); /* used in a micro-batch counts as used */
    zero_gradients(&m);
    add_to_all(&m, 8);
    CHECK_OK(cddp_ddp_ready(m.ddp, 0));
    cddp_ddp_no_sync(m.ddp, false);
    for (k = m.n - 1; k >= 2; k--) CHECK_OK(cddp_ddp_ready(m.ddp, k));
    CHECK_OK(cddp_ddp_wait(m.ddp));
    CHECK(cddp_ddp_used(m.ddp, 0) && !cddp_ddp_used(m.ddp, 1) && cddp_ddp_used(m.ddp, 2));
    CHECK(all_are(&m, 0, 8));
    zero_gradients(&m); /* no parameter at all, on any rank */
    add_to_all(&m, 3);
    CHECK_OK(cddp_ddp_wait(m.ddp));
    for (k = 0; k < m.n; k++) CHECK(all_are(&m, k, 3) && !cddp_ddp_used(m.ddp, k));
    model_close(&m);
  }
  return test_failures != before;
}

static void test_unused(void) {
  CHECK_OK(ranks_run(run_unused, NULL, 4, false));
  CHECK_OK(ranks_run(run_unused, NULL, 4, true));
}

/* Weights, gradients, buffers, copies and rows at addresses that are no multiple of the element's
   size are refused, and named. */
static int run_misaligned(cddp_group *g, void *arg) {
  static const cddp_dtype types[] = {CDDP_F32, CDDP_F64, CDDP_F16, CDDP_BF16};
  static uint64_t memory[4][8];
  int t, which;
  size_t at;
  (void)arg;
  for (t = 0; t < 4; t++)
    for (at = 1; at < cddp_dtype_size(types[t]); at++)
      for (which = 0; which < 5; which++) {
        cddp_param p[2] = {{"w", memory[0], memory[1], 4, types[t]},
                           {"b", memory[2], NULL, 4, types[t]}};
        size_t rows[1] = {2};
        int64_t row = 0;
        void *copies[1];
        cddp_ddp_desc desc;
        cddp_sgd_desc rule;
        cddp_ddp *d = NULL;
        cddp_optim *s = NULL;
        cddp_result r;
        memset(&desc, 0, sizeof desc);
        memset(&rule, 0, sizeof rule);
        rule.lr = 1;
        if (which == 0) p[0].data = (char *)memory[0] + at;
        if (which == 1) p[0].grad = (char *)memory[1] + at;
        if (which == 2) p[1].data = (char *)memory[2] + at;
        if (which == 2) desc.buffers = p + 1, desc.buffer_count = 1;
        if (which == 4) desc.sparse_rows = rows, p[0].grad = NULL;
        r = cddp_ddp_create(&d, g, p, 1, &desc);
        if (which < 3) CHECK_IS(r, CDDP_INVALID_ARGUMENT);
        else CHECK_OK(r);
        if (which < 2) CHECK_IS(cddp_sgd_create(&s, p, 1, &rule), CDDP_INVALID_ARGUMENT);
        if (which == 3 && types[t] == CDDP_F32 && at == 1) {
          copies[0] = (char *)memory[3] + at;
          rule.copies = copies, rule.copy_dtype = CDDP_BF16;
          CHECK_IS(cddp_sgd_create(&s, p, 1, &rule), CDDP_INVALID_ARGUMENT);
        }
        if (which == 4) r = cddp_ddp_add_rows(d, 0, &row, (char *)memory[3] + at, 1);
        if (which == 4) CHECK_IS(r, CDDP_INVALID_ARGUMENT);
        if (which != 3 || (types[t] == CDDP_F32 && at == 1)) CHECK(mentions("aligned"));
        CHECK(which == 4 || which == 3 || mentions(which == 2 ? "\"b\"" : "\"w\""));
        cddp_ddp_destroy(d);
      }
  return 0;
}

static void test_misaligned(void) {
  CHECK_OK(ranks_run(run_misaligned, NULL, 2, false));
  CHECK_OK(ranks_run(run_misaligned, NULL, 2, true));
}

/* cddp_ddp_desc's flag off: who forgot what is said, and the group survives. */
static int run_forgotten(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g), kind, k;
  (void)arg;
  /* 0: forgotten by all; 1: by rank 1; 2: by rank 0; 3: everything by all; 4, 5: as 0 and 1, but
     marked while no_sync was on */
  for (kind = 0; kind < 6; kind++) {
    cddp_result want = kind % 3 == 0 || kind == 4 ? CDDP_INVALID_ARGUMENT : CDDP_MISMATCH;
    double t = test_now();
    cddp_ddp_desc d;
    model m;
    small_buckets(&d);
    m.seed = 13;
    if (!model_open(&m, g, 6, some_counts + 1, 6, only_f32, 1, HEAP, PLACED)) return 1;
    CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, &d));
    if (m.ddp == NULL) return 1;
    for (k = m.n - 1; k >= 0 && kind != 3; k--) {
      bool forgets = kind % 4 == 0 || (kind % 4 == 1 && rank == 1) || (kind == 2 && rank == 0);
      if (kind >= 4 && k == 3 && forgets) cddp_ddp_no_sync(m.ddp, true);
      if (k != 3 || !forgets || kind >= 4) CHECK_OK(cddp_ddp_ready(m.ddp, k));
      cddp_ddp_no_sync(m.ddp, false);
    }
    CHECK_IS(cddp_ddp_wait(m.ddp), want);
    CHECK(mentions("no_sync") == (kind >= 4));
    CHECK(kind != 5 || mentions("layer3.w\" (only while no_sync was on) (on rank 1)"));
    CHECK(kind == 3 ? mentions("layer") : mentions("layer3.w"));
    CHECK(kind == 3 || !mentions("layer2.w"));
    CHECK(cddp_ddp_wait(m.ddp) != CDDP_OK); /* the model is broken */
    CHECK(cddp_error()[0] != 0);
    CHECK(test_now() - t < RANKS_WITHIN(2.0));
    model_close(&m);
    CHECK_OK(cddp_barrier(g)); /* the group is not */
  }
  return test_failures != before;
}

static void test_forgotten(void) {
  CHECK_OK(ranks_run(run_forgotten, NULL, 3, false));
  CHECK_OK(ranks_run(run_forgotten, NULL, 3, true));
  CHECK_OK(ranks_run(run_means, NULL, 2, true));
}

static int run_forgotten_alone(cddp_group *g, void *arg) { /* a world of one checks the same */
  int before = test_failures;
  model m;
  (void)arg;
  m.seed = 13;
  if (!model_open(&m, g, 3, some_counts + 1, 3, only_f32, 1, HEAP, HEAP)) return 1;
  CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, NULL));
  CHECK_OK(cddp_ddp_ready(m.ddp, 0));
  CHECK_OK(cddp_ddp_ready(m.ddp, 2));
  CHECK_INVALID(cddp_ddp_wait(m.ddp));
  CHECK(mentions("layer1.w"));
  model_close(&m);
  return test_failures != before;
}

static void test_forgotten_alone(void) { CHECK_OK(ranks_run(run_forgotten_alone, NULL, 1, true)); }

/* COMMUNICATION HOOKS -------------------------------------------------------------------------- */

typedef struct hook_log {
  int calls, next;
  bool in_order, fails;
  cddp_result result; /* if it fails */
} hook_log;

static cddp_result sum_and_divide(cddp_bucket *b, void *user_data) {
  hook_log *log = (hook_log *)user_data;
  double world = cddp_world_size(b->group);
  cddp_result r;
  size_t i;
  log->calls++;
  log->in_order = log->in_order && b->index == log->next && b->param_count > 0 && b->params != NULL;
  log->next = b->index + 1 == b->bucket_count ? 0 : b->index + 1;
  if (log->fails) return log->result;
  CHECK_IS(cddp_sampler_init(NULL, NULL), CDDP_INVALID_ARGUMENT); /* no failure of the hook's */
  r = cddp_all_reduce(b->group, b->data, b->count, b->dtype, CDDP_SUM, NULL);
  if (r != CDDP_OK) return r;
  for (i = 0; i < b->count; i++) {
    if (b->dtype == CDDP_F64)
      ((double *)b->data)[i] /= world;
    else
      ((float *)b->data)[i] /= (float)world;
  }
  return CDDP_OK;
}

static int run_hook(cddp_group *g, void *arg) {
  static const cddp_dtype types[] = {CDDP_F32, CDDP_F64, CDDP_F32};
  int before = test_failures, step, grads;
  (void)arg;
  for (grads = 0; grads < 4; grads++) {
    hook_log log = {0, 0, true, false, CDDP_OK};
    cddp_ddp_desc d;
    model m;
    small_buckets(&d);
    d.comm_hook = sum_and_divide;
    d.comm_hook_data = &log;
    m.seed = 14;
    if (!model_open(&m, g, 12, some_counts, 12, types, 3, HEAP, grads)) return 1;
    CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, &d));
    if (m.ddp == NULL) return 1;
    for (step = 0; step < 4; step++) {
      log.calls = 0;
      zero_gradients(&m);
      backward(&m, step, 1);
      CHECK_OK(cddp_ddp_wait(m.ddp));
      check_means(&m, step); /* the same bits as the default */
      CHECK(log.in_order);
      CHECK(log.calls > 0);
      if (step > 0) CHECK_EQ(log.calls, cddp_ddp_bucket_count(m.ddp));
    }
    log.fails = true; /* its error is the wait's, with a text that names it */
    log.result = grads == 1 ? CDDP_IO : grads == 2 ? (cddp_result)77 : CDDP_ABORTED;
    backward(&m, 4, 1);
    CHECK_IS(cddp_ddp_wait(m.ddp), log.result);
    CHECK(strstr(cddp_error(), "communication hook on bucket 0 of rank ") != NULL);
    CHECK(strstr(cddp_error(), grads == 1   ? "it returned 14, CDDP_IO"
                               : grads == 2 ? "it returned 77, not a cddp_result"
                                            : "it returned 9, CDDP_ABORTED") != NULL);
    model_close(&m);
    CHECK_OK(cddp_barrier(g));
  }
  return test_failures != before;
}

/* A hook gets the parameters that have elements in its data: no unused ones, no sparse ones. */
typedef struct members {
  const cddp_param *p;
  int seen; /* a bit for each */
} members;

static cddp_result note_params(cddp_bucket *b, void *user_data) {
  members *in = (members *)user_data;
  size_t elements = 0;
  int k;
  for (k = 0; k < b->param_count; k++) {
    elements += in->p[b->params[k]].count;
    in->seen |= 1 << b->params[k];
  }
  CHECK_EQ(elements, b->count);
  return cddp_all_reduce(b->group, b->data, b->count, b->dtype, CDDP_AVG, NULL);
}

static int run_hook_params(cddp_group *g, void *arg) {
  static const size_t counts[] = {64}, rows[] = {0, 16, 0};
  static const float one[4] = {1};
  const int64_t row = 3;
  int before = test_failures, step, sparse;
  (void)arg;
  for (sparse = 0; sparse < 2; sparse++) {
    cddp_ddp_desc d;
    members in;
    model m;
    memset(&d, 0, sizeof d);
    m.seed = 28;
    if (!model_open(&m, g, 3, counts, 1, only_f32, 1, HEAP, PLACED)) return 1;
    in.p = m.p;
    d.comm_hook = note_params;
    d.comm_hook_data = &in;
    d.find_unused_parameters = sparse == 0;
    if (sparse) d.sparse_rows = rows;
    CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, &d));
    for (step = 0; step < 3; step++) {
      in.seen = 0;
      CHECK_OK(cddp_ddp_ready(m.ddp, 2));
      if (sparse) CHECK_OK(cddp_ddp_add_rows(m.ddp, 1, &row, one, 1));
      if (sparse || (step == 1 && cddp_rank(g) == 0)) CHECK_OK(cddp_ddp_ready(m.ddp, 1));
      CHECK_OK(cddp_ddp_ready(m.ddp, 0));
      CHECK_OK(cddp_ddp_wait(m.ddp));
      CHECK_EQ(in.seen, !sparse && step == 1 ? 7 : 5);
    }
    model_close(&m);
  }
  return test_failures != before;
}

static void test_hook_params(void) {
  CHECK_OK(ranks_run(run_hook_params, NULL, 2, false));
  CHECK_OK(ranks_run(run_hook_params, NULL, 2, true));
}

static void test_hook(void) {
  CHECK_OK(ranks_run(run_hook, NULL, 1, false));
  CHECK_OK(ranks_run(run_hook, NULL, 3, false));
  CHECK_OK(ranks_run(run_hook, NULL, 3, true));
}

static void on_fault(int number) { _exit(number == SIGSEGV ? 42 : 1); }

static cddp_result crash(cddp_bucket *bucket, void *page) {
  (void)bucket;
  *(volatile int *)page = 1;
  return CDDP_OK;
}

static int run_crash(int rank, void *page) {
  struct sigaction how;
  cddp_group *g = NULL;
  cddp_ddp *d = NULL;
  cddp_ddp_desc desc;
  float w[4] = {0};
  cddp_param p[1] = {{"w", w, NULL, 4, CDDP_F32}};
  memset(&how, 0, sizeof how);
  memset(&desc, 0, sizeof desc);
  how.sa_handler = on_fault;
  CHECK_EQ(sigaction(SIGSEGV, &how, NULL), 0);
  desc.comm_hook = crash;
  desc.comm_hook_data = page;
  CHECK_OK(cddp_init(&g, NULL));
  CHECK_OK(cddp_ddp_create(&d, g, p, 1, &desc));
  CHECK_OK(cddp_ddp_ready(d, 0));
  return cddp_ddp_wait(d) == CDDP_OK || rank == 0;
}

/* The program's handler of a fault runs when a hook, on cddp's thread, has the fault. */
static void test_hook_crashes(void) {
  void *page = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  int status = 0;
  pid_t pid = ranks_fork(run_crash, 0, page);
  CHECK_EQ(waitpid(pid, &status, 0), pid);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 42);
  munmap(page, 4096);
}

/* bf16 keeps 8 bits of the mantissa, fp16 11: of each rank's number, of the sum, of the mean. */
static void check_close(const model *m, int step, double relative) {
  int k, rank, world = cddp_world_size(m->g);
  size_t i;
  for (k = 0; k < m->n; k++) {
    for (i = 0; i < m->p[k].count; i++) {
      double size = 0, sum = 0;
      for (rank = 0; rank < world; rank++) {
        sum += gradient(m, rank, step, k, i);
        size += fabs(gradient(m, rank, step, k, i));
      }
      if (fabs(ranks_load(m->p[k].dtype, m->p[k].grad, i) - sum / world) > relative * size / world)
        break;
    }
    CHECK(i == m->p[k].count);
  }
}

static int run_compression(cddp_group *g, void *arg) {
  static const cddp_dtype types[] = {CDDP_F32, CDDP_F64, CDDP_F16, CDDP_BF16};
  int before = test_failures, step, which;
  (void)arg;
  for (which = 0; which < 4; which++) {
    cddp_ddp_desc d;
    model m;
    small_buckets(&d);
    d.comm_hook = which & 1 ? cddp_bf16_compress_hook : cddp_fp16_compress_hook;
    m.seed = 15;
    if (!model_open(&m, g, 12, some_counts, 12, types, which < 2 ? 2 : 4, HEAP, which)) return 1;
    CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, &d));
    if (m.ddp == NULL) return 1;
    for (step = 0; step < 3; step++) {
      zero_gradients(&m);
      backward(&m, step, 1);
      CHECK_OK(cddp_ddp_wait(m.ddp));
      check_close(&m, step, which == 0 ? 0x1p-10 : 0x1p-7);
      check_same_everywhere(&m, true);
    }
    model_close(&m);
  }
  return test_failures != before;
}

static void test_compression(void) {
  CHECK_OK(ranks_run(run_compression, NULL, 2, false));
  CHECK_OK(ranks_run(run_compression, NULL, 5, false));
  CHECK_OK(ranks_run(run_compression, NULL, 3, true));
}

/* CLIPPING ------------------------------------------------------------------------------------- */

static int run_clip(cddp_group *g, void *arg) {
  int before = test_failures, step, k, type;
  (void)arg;
  for (type = 0; type < 3; type++) {
    static const double limits[] = {1.0, 1e6, 0.01, 30};
    model m;
    m.seed = 16;
    if (!model_open(&m, g, 12, some_counts, 12, type_lists[type].types, type_lists[type].count,
                    MIXED, type == 0 ? PLACED : MIXED))
      return 1;
    CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, NULL));
    if (m.ddp == NULL) return 1;
    for (step = 0; step < 4; step++) {
      double norm = -1, square = 0, factor;
      size_t i;
      zero_gradients(&m);
      backward(&m, step, 1);
      CHECK_OK(cddp_ddp_wait(m.ddp));
      CHECK_INVALID(cddp_ddp_grad_norm(m.ddp, &norm)); /* that of the step before is gone */
      for (k = 0; k < m.n; k++)
        for (i = 0; i < m.p[k].count; i++)
          square += pow(ranks_load(m.p[k].dtype, m.p[k].grad, i), 2);
      CHECK_OK(cddp_ddp_clip_grad_norm(m.ddp, limits[step], step == 2 ? NULL : &norm));
      if (step == 2) CHECK_OK(cddp_ddp_grad_norm(m.ddp, &norm));
      CHECK(fabs(norm / sqrt(square) - 1) < 1e-5);
      factor = fmin(1, limits[step] / (sqrt(square) + 1e-6));
      if (factor == 1) check_means(&m, step); /* not touched */
      for (k = 0; k < m.n; k++) {
        bool coarse = m.p[k].dtype == CDDP_BF16 || m.p[k].dtype == CDDP_F16;
        for (i = 0; i < m.p[k].count; i++) {
          unsigned char b[8];
          double want;
          mean(&m, step, k, i, b);
          want = ranks_load(m.p[k].dtype, b, 0) * factor;
          if (fabs(ranks_load(m.p[k].dtype, m.p[k].grad, i) - want) >
              fabs(want) * (coarse ? 0x1p-7 : 1e-5) + 6e-8)
            break;
        }
        CHECK(i == m.p[k].count);
      }
      check_same_everywhere(&m, true);
    }
    model_close(&m);
  }
  return test_failures != before;
}

/* A gradient that is NaN makes all of them so, as in PyTorch; unless only the norm is asked for.
   By cddp_ddp_clip_grad_norm, in the step, in the step of an elastic model. */
static int run_clip_nan(cddp_group *g, void *arg) {
  static const cddp_dtype types[] = {CDDP_F32, CDDP_F64, CDDP_F16, CDDP_BF16};
  enum { COUNT = 1000, WAYS = 3 };
  int before = test_failures, type, way, limit, shard;
  (void)arg;
  for (type = 0; type < 4; type++)
    for (way = 0; way < WAYS; way++)
      for (limit = way == 0; limit < 2; limit++) {
        cddp_param p = {"w", calloc(COUNT, 8), NULL, COUNT, types[type]};
        cddp_sgd_desc rule;
        cddp_ddp_desc desc;
        cddp_ddp *d;
        cddp_optim *o;
        double norm = 0;
        size_t i, bad = 0;
        memset(&rule, 0, sizeof rule);
        memset(&desc, 0, sizeof desc);
        desc.max_grad_norm = way == 0 ? 0 : limit ? 1 : INFINITY;
        desc.elastic = way == 2;
        desc.shards = way == 2 ? 3 : 0;
        CHECK_OK(cddp_ddp_create(&d, g, &p, 1, &desc));
        rule.lr = 1;
        rule.ddp = d;
        CHECK_OK(cddp_sgd_create(&o, &p, 1, &rule));
        while (cddp_ddp_next_shard(d, &shard)) {
          for (i = 0; i < COUNT; i++) ranks_store(p.dtype, p.grad, i, i == 7 ? NAN : 2);
          CHECK_OK(cddp_ddp_ready(d, 0));
        }
        if (way == 0) {
          CHECK_OK(cddp_ddp_wait(d));
          CHECK_OK(cddp_ddp_clip_grad_norm(d, 1, NULL));
          CHECK_OK(cddp_optim_step(o));
        } else {
          CHECK_OK(cddp_ddp_step(d, o));
        }
        CHECK_OK(cddp_ddp_grad_norm(d, &norm));
        CHECK(isnan(norm));
        for (i = 0; i < COUNT; i++) {
          double w = ranks_load(p.dtype, p.data, i);
          if (limit || i == 7 ? !isnan(w) : w != -2) bad++;
        }
        CHECK_EQ(bad, 0);
        while (cddp_ddp_next_shard(d, &shard)) CHECK_OK(cddp_ddp_ready(d, 0));
        CHECK_OK(cddp_ddp_wait(d)); /* without a clip: no norm */
        CHECK_INVALID(cddp_ddp_grad_norm(d, &norm));
        cddp_optim_destroy(o);
        cddp_ddp_destroy(d);
        free(p.data);
      }
  return test_failures != before;
}

static void test_clip_nan(void) {
  CHECK_OK(ranks_run(run_clip_nan, NULL, 1, true));
  CHECK_OK(ranks_run(run_clip_nan, NULL, 3, false));
}

static void test_clip(void) {
  CHECK_OK(ranks_run(run_clip, NULL, 1, true));
  CHECK_OK(ranks_run(run_clip, NULL, 3, false));
  CHECK_OK(ranks_run(run_clip, NULL, 4, true));
}

/* THE FUSED STEP: the same bits as wait + sgd_step + zero_grad. -------------------------------- */

#define OPTIONS 9

static void sgd_options(int which, cddp_sgd_desc *o) {
  memset(o, 0, sizeof *o);
  o->lr = 0.1;
  if (which >= 1) o->momentum = 0.9;
  if (which == 2) o->nesterov = true;
  if (which == 2 || which == 4 || which == 6) o->weight_decay = 0.01;
  if (which == 3) o->dampening = 0.3;
  if (which == 4 || which == 8) o->maximize = true;
  if (which == 5) o->nesterov = true;
  if (which == 7) o->momentum = 0;
  if (which == 8) o->dampening = 0.5;
}

static void compare_models(const model *a, const model *b, int step, int option) {
  int k;
  for (k = 0; k < a->n; k++) {
    const cddp_param *p = &a->p[k], *q = &b->p[k];
    size_t size = cddp_dtype_size(p->dtype), i;
    bool same = memcmp(p->data, q->data, p->count * size) == 0;
    CHECK(same);
    for (i = 0; !same && i < p->count; i++) {
      if (memcmp((char *)p->data + i * size, (char *)q->data + i * size, size) == 0) continue;
      fprintf(
          stderr,
          "  rank %d of %d, step %d, option %d, parameter %d (dtype %d) at %zu: %.17g and %.17g\n",
          cddp_rank(a->g), cddp_world_size(a->g), step, option, k, (int)p->dtype, i,
          ranks_load(p->dtype, p->data, i), ranks_load(q->dtype, q->data, i));
      break;
    }
    for (i = 0; i < p->count * size && ((unsigned char *)p->grad)[i] == 0; i++) {}
    CHECK(i == p->count * size); /* gradients are zero */
  }
}

static void take_step(model *m, bool fused) {
  if (fused) {
    CHECK_OK(cddp_ddp_step(m->ddp, m->sgd));
    return;
  }
  CHECK_OK(cddp_ddp_wait(m->ddp));
  CHECK_OK(cddp_optim_step(m->sgd));
  CHECK_OK(cddp_optim_zero_grad(m->sgd));
}

/* `mode` 0: all steps of a are fused; 1: every other; 2: the first five are not. */
static void compare_training(model *a, model *b, int steps, int mode, int option) {
  int step, before = test_failures;
  for (step = 0; step < steps && test_failures == before; step++) {
    bool fused = mode == 0 || (mode == 1 ? step % 2 == 0 : step >= 5);
    backward(a, step, 1);
    backward(b, step, 1);
    take_step(a, fused);
    take_step(b, false);
    compare_models(a, b, step, option);
    check_copies(a);
    check_copies(b);
    if (step == 7) {
      CHECK_OK(cddp_optim_set_lr(a->sgd, 0.025));
      CHECK_OK(cddp_optim_set_lr(b->sgd, 0.025));
      CHECK(cddp_optim_lr(a->sgd) == 0.025);
    }
  }
  check_same_everywhere(a, false);
}

typedef struct fused_case {
  int option, type, memory, grads, mode, steps;
  size_t large; /* elements of one more parameter; 0: none */
} fused_case;

static void run_fused_case(cddp_group *g, const fused_case *c) {
  model *a = (model *)calloc(2, sizeof *a), *b = a + 1;
  const type_list *t = &type_lists[c->type];
  size_t counts[12];
  int n = 10;
  cddp_sgd_desc o;
  cddp_ddp_desc d;
  small_buckets(&d);
  sgd_options(c->option, &o);
  memcpy(counts, some_counts, sizeof counts);
  if (c->large != 0) counts[1] = c->large;
  CHECK(a != NULL);
  if (a == NULL) return;
  a->seed = b->seed = (uint64_t)(c->option * 100 + c->type);
  if (model_open(a, g, n, counts, 12, t->types, t->count, c->memory, c->grads) &&
      model_open(b, g, n, counts, 12, t->types, t->count, HEAP, PLACED)) {
    CHECK_OK(cddp_ddp_create(&a->ddp, g, a->p, n, c->option % 2 ? &d : NULL));
    CHECK_OK(cddp_ddp_create(&b->ddp, g, b->p, n, &d));
    model_copies(a, c->option % 2 ? CDDP_BF16 : CDDP_F16, &o);
    CHECK_OK(cddp_sgd_create(&a->sgd, a->p, n, &o));
    check_copies(a);
    model_copies(b, CDDP_BF16, &o);
    CHECK_OK(cddp_sgd_create(&b->sgd, b->p, n, &o));
    if (a->sgd != NULL && b->sgd != NULL) compare_training(a, b, c->steps, c->mode, c->option);
  }
  model_close(a);
  model_close(b);
  free(a);
}

static int run_fused(cddp_group *g, void *arg) {
  int before = test_failures, memory, option;
  fused_case c;
  memset(&c, 0, sizeof c);
  c.steps = *(const int *)arg;
  for (memory = SHARED; memory <= MIXED; memory++)
    for (option = 0; option < OPTIONS && test_failures == before; option++) {
      c.option = option;
      c.memory = memory;
      c.type = option % 3 == 0 ? 0 : (option + memory) % 5;
      c.grads = option % 2 == 0 ? PLACED : (option + memory) % 4;
      c.mode = (option + memory) % 5 < 3 ? 0 : (option + memory) % 5 - 2;
      run_fused_case(g, &c);
    }
  return test_failures != before;
}

static void test_fused(void) {
  int i, steps;
  for (i = 0; i < (RANKS_TSAN ? 2 : RANKS_SLOW ? 3 : 6); i++) {
    steps = RANKS_TSAN ? 4 : RANKS_SLOW || all_ranks[i] > 7 ? 5 : 7;
    if (!RANKS_TSAN) CHECK_OK(ranks_run(run_fused, &steps, all_ranks[i], false));
    if (RANKS_TSAN || !RANKS_SLOW || i == 1)
      CHECK_OK(ranks_run(run_fused, &steps, all_ranks[i], true));
  }
}

static int run_fused_large(cddp_group *g, void *arg) {
  int before = test_failures;
  fused_case c;
  (void)arg;
  memset(&c, 0, sizeof c);
  c.steps = 4;
  c.large = RANKS_TSAN ? 60007 : 300007;
  c.grads = PLACED;
  c.option = 2;
  run_fused_case(g, &c);
  c.memory = HEAP;
  c.grads = HEAP;
  c.option = 1;
  run_fused_case(g, &c);
  return test_failures != before;
}

static void test_fused_large(void) {
  CHECK_OK(ranks_run(run_fused_large, NULL, 3, false));
  CHECK_OK(ranks_run(run_fused_large, NULL, 2, true));
}

/* With unused parameters: skipped by the optimizer that knows the model, as PyTorch skips grad
   None. */
static int run_fused_unused(cddp_group *g, void *arg) {
  int before = test_failures, step, k, knows;
  (void)arg;
  for (knows = 0; knows < 2; knows++) {
    model m[2];
    cddp_ddp_desc d;
    cddp_sgd_desc o;
    size_t c;
    int i;
    small_buckets(&d);
    d.find_unused_parameters = true;
    for (i = 0; i < 2; i++) {
      m[i].seed = 21;
      if (!model_open(&m[i], g, 6, some_counts + 1, 6, only_f32, 1, i == 0 ? SHARED : HEAP, PLACED))
        return 1;
      CHECK_OK(cddp_ddp_create(&m[i].ddp, g, m[i].p, m[i].n, &d));
      sgd_options(2, &o);
      o.ddp = knows ? m[i].ddp : NULL;
      CHECK_OK(cddp_sgd_create(&m[i].sgd, m[i].p, m[i].n, &o));
      if (m[i].ddp == NULL || m[i].sgd == NULL) return 1;
    }
    for (step = 0; step < 8; step++) {
      float old = ((float *)m[0].p[1].data)[0];
      for (i = 0; i < 2; i++)
        for (k = 0; k < 6; k++) {
          if (k == 1 && step == 4) /* held, the same on all ranks, but not said to be ready */
            for (c = 0; c < m[i].p[1].count; c++) ((float *)m[i].p[1].grad)[c] = 0.5f;
          if ((k == 1 && step % 3 != 2) || (k == 2 && (cddp_rank(g) + step) % 2 == 0)) continue;
          backward_one(&m[i], step, k);
          CHECK_OK(cddp_ddp_ready(m[i].ddp, k));
        }
      take_step(&m[0], true);
      take_step(&m[1], false);
      compare_models(&m[0], &m[1], step, 2);
      CHECK(cddp_ddp_used(m[0].ddp, 1) == (step % 3 == 2));
      if (knows && step % 3 != 2) CHECK(((float *)m[0].p[1].data)[0] == old);
      if (!knows) CHECK(((float *)m[0].p[1].data)[0] != old); /* weight decay, momentum */
    }
    model_close(&m[0]);
    model_close(&m[1]);
  }
  return test_failures != before;
}

static void test_fused_unused(void) {
  CHECK_OK(ranks_run(run_fused_unused, NULL, 3, false));
  CHECK_OK(ranks_run(run_fused_unused, NULL, 2, true));
}

/* Accumulation, then one fused step; a hook, then one fused step. */
static int run_fused_others(cddp_group *g, void *arg) {
  int before = test_failures, step, i;
  hook_log log[2] = {{0, 0, true, false, CDDP_OK}, {0, 0, true, false, CDDP_OK}};
  (void)arg;
  {
    model m[2];
    cddp_ddp_desc d;
    cddp_sgd_desc o;
    sgd_options(1, &o);
    for (i = 0; i < 2; i++) {
      small_buckets(&d);
      d.comm_hook = sum_and_divide;
      d.comm_hook_data = &log[i];
      m[i].seed = 22;
      if (!model_open(&m[i], g, 8, some_counts, 8, only_f32, 1, SHARED, PLACED)) return 1;
      CHECK_OK(cddp_ddp_create(&m[i].ddp, g, m[i].p, m[i].n, &d));
      CHECK_OK(cddp_sgd_create(&m[i].sgd, m[i].p, m[i].n, &o));
      if (m[i].ddp == NULL || m[i].sgd == NULL) return 1;
    }
    for (step = 0; step < 6; step++) {
      for (i = 0; i < 2; i++) {
        if (step % 2) {
          cddp_ddp_no_sync(m[i].ddp, true);
          backward(&m[i], 100 + step, 1);
          cddp_ddp_no_sync(m[i].ddp, false);
        }
        backward(&m[i], step, 1);
      }
      take_step(&m[0], true);
      take_step(&m[1], false);
      compare_models(&m[0], &m[1], step, 1);
    }
    CHECK(log[0].calls > 0 && log[0].calls == log[1].calls);
    model_close(&m[0]);
    model_close(&m[1]);
  }
  return test_failures != before;
}

static void test_fused_others(void) {
  CHECK_OK(ranks_run(run_fused_others, NULL, 3, false));
  CHECK_OK(ranks_run(run_fused_others, NULL, 3, true));
}

/* BESIDE OTHERS: user collectives between ready() calls, two models on one group. -------------- */

static int run_beside(cddp_group *g, void *arg) {
  int before = test_failures, step, k, world = cddp_world_size(g), order[2][MOST];
  model m[2];
  cddp_ddp_desc d;
  (void)arg;
  small_buckets(&d);
  for (k = 0; k < 2; k++) {
    m[k].seed = (uint64_t)(30 + k);
    if (!model_open(&m[k], g, 10, some_counts + k, 10, only_f32, 1, SHARED, k ? PLACED : HEAP))
      return 1;
    CHECK_OK(cddp_ddp_create(&m[k].ddp, g, m[k].p, m[k].n, &d));
    if (m[k].ddp == NULL) return 1;
  }
  for (step = 0; step < 6; step++) {
    cddp_work *w = NULL;
    int32_t late = 2;
    for (k = 0; k < 2; k++) {
      zero_gradients(&m[k]);
      ranks_shuffle(order[k], m[k].n, (uint64_t)(step * 7 + k * 3 + cddp_rank(g)));
    }
    for (k = 0; k < 10; k++) {
      int32_t one = 1;
      backward_one(&m[0], step, order[0][k]);
      CHECK_OK(cddp_ddp_ready(m[0].ddp, order[0][k]));
      backward_one(&m[1], step, order[1][k]);
      CHECK_OK(cddp_ddp_ready(m[1].ddp, order[1][k]));
      if (k == 3) CHECK_OK(cddp_all_reduce(g, &late, 1, CDDP_I32, CDDP_SUM, &w));
      if (k % 4 == 0) CHECK_OK(cddp_all_reduce(g, &one, 1, CDDP_I32, CDDP_SUM, NULL));
      if (k % 4 == 0) CHECK(one == world);
    }
    CHECK_OK(cddp_ddp_wait(m[step % 2].ddp));
    CHECK_OK(cddp_ddp_wait(m[1 - step % 2].ddp));
    CHECK_OK(cddp_wait(w));
    CHECK(late == 2 * world);
    check_means(&m[0], step);
    check_means(&m[1], step);
  }
  model_close(&m[0]);
  model_close(&m[1]);
  return test_failures != before;
}

static void test_beside(void) {
  CHECK_OK(ranks_run(run_beside, NULL, 2, false));
  CHECK_OK(ranks_run(run_beside, NULL, 4, false));
  CHECK_OK(ranks_run(run_beside, NULL, 3, true));
}

/* ENDS: cycles leak nothing, a model may go in mid-step, a dead rank is named. ----------------- */

static int run_cycles(cddp_group *g, void *arg) {
  int before = test_failures, i, fds = 0, tasks = 0;
  bool threads = *(const bool *)arg;
  for (i = 0; i < 50 && test_failures == before; i++) {
    model m;
    cddp_sgd_desc o;
    m.seed = (uint64_t)i;
    if (i == 2) {
      CHECK_OK(cddp_barrier(g));
      fds = ranks_open_fds();
      tasks = ranks_threads();
    }
    if (!model_open(&m, g, 6, some_counts, 6, only_f32, 1, i % 3, i % 4)) return 1;
    CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, NULL));
    sgd_options(1, &o);
    CHECK_OK(cddp_sgd_create(&m.sgd, m.p, m.n, &o));
    if (m.ddp == NULL || m.sgd == NULL) return 1;
    if (i % 2 == 0) {
      backward(&m, 0, 1);
      take_step(&m, i % 4 == 0);
    }
    model_close(&m);
  }
  CHECK_OK(cddp_barrier(g));
  if (!threads) CHECK_EQ(ranks_open_fds(), fds);
  if (!threads) CHECK(ranks_threads_left(tasks));
  return test_failures != before;
}

static void test_cycles(void) {
  bool threads = false;
  int fds = ranks_open_fds();
  CHECK_OK(ranks_run(run_cycles, &threads, 3, false));
  threads = true;
  CHECK_OK(ranks_run(run_cycles, &threads, 3, true));
  CHECK_EQ(ranks_open_fds(), fds);
}

static int run_given_up(cddp_group *g, void *arg) { /* destroyed between ready() and wait() */
  int before = test_failures, i;
  bool hooked = *(const bool *)arg;
  for (i = 0; i < 5; i++) {
    double t = test_now();
    cddp_ddp_desc d;
    model m;
    small_buckets(&d);
    m.seed = 3;
    if (!model_open(&m, g, 8, some_counts, 8, only_f32, 1, HEAP, i % 4)) return 1;
    if (hooked) d.comm_hook = cddp_bf16_compress_hook;
    CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, &d));
    if (m.ddp == NULL) return 1;
    if (i % 2 == 0 || cddp_rank(g) != 1) backward(&m, 0, 1); /* all ranks, or all but one */
    if (hooked && i % 2 == 1) ranks_sleep(cddp_rank(g) != 1 ? 0.02 : 0.2); /* they are in it */
    model_close(&m);
    CHECK(test_now() - t < RANKS_WITHIN(2.0));
    CHECK_OK(cddp_barrier(g));
  }
  return test_failures != before;
}

static void test_given_up(void) {
  bool hooked = false;
  CHECK_OK(ranks_run(run_given_up, &hooked, 3, false));
  CHECK_OK(ranks_run(run_given_up, &hooked, 3, true));
}

/* The same while a comm_hook waits for ranks that are late. */
static void test_hook_given_up(void) {
  bool hooked = true;
  CHECK_OK(ranks_run(run_given_up, &hooked, 3, false));
  CHECK_OK(ranks_run(run_given_up, &hooked, 3, true));
}

/* A group that is destroyed before its models and their optimizers: harmless, in any order. */
enum { HOOKED = 1, UNUSED = 2, OF_MODEL = 4, SHARDED = 8, ELASTIC = 16, KINDS = 32 };

static void group_first(cddp_group *g, int kind, int order) {
  float w[2][300] = {{0}};
  cddp_param p[] = {{"w", w[0], NULL, 300, CDDP_F32}, {"v", w[1], NULL, 300, CDDP_F32}};
  cddp_ddp_desc d;
  cddp_sgd_desc o;
  cddp_ddp *ddp = NULL;
  cddp_optim *s = NULL;
  cddp_result r = CDDP_OK;
  int step, k, n = cddp_world_size(g), shard;
  memset(&d, 0, sizeof d);
  memset(&o, 0, sizeof o);
  if (kind & HOOKED) d.comm_hook = cddp_bf16_compress_hook;
  d.find_unused_parameters = kind & UNUSED;
  if (kind & (SHARDED | ELASTIC)) d.shards = 2 * n;
  d.elastic = kind & ELASTIC;
  CHECK_OK(cddp_ddp_create(&ddp, g, p, 2, &d));
  o.lr = 0.1;
  o.momentum = 0.9;
  o.ddp = kind & OF_MODEL ? ddp : NULL;
  CHECK_OK(cddp_sgd_create(&s, p, 2, &o));
  for (step = 0; step < 3; step++) {
    if (step == 2) cddp_destroy(g);
    if (step == 2 && order < 2) break;
    while (cddp_ddp_next_shard(ddp, &shard))
      for (k = 0; k < 2; k++) {
        ((float *)p[k].grad)[7] += (float)shard;
        (void)cddp_ddp_ready(ddp, k);
      }
    r = cddp_ddp_step(ddp, s);
    CHECK(step < 2 ? r == CDDP_OK : r == CDDP_OK || cddp_error()[0] != 0);
  }
  if (order == 2) CHECK(cddp_ddp_group(ddp) == NULL || (kind & ELASTIC));
  if (order == 1) cddp_optim_destroy(s);
  cddp_ddp_destroy(ddp);
  if (order == 1) return;
  p[0].grad = w[1];
  p[1].grad = w[1];
  if (!(kind & OF_MODEL)) CHECK_OK(cddp_optim_step(s));
  cddp_optim_destroy(s);
}

static int group_first_threads(cddp_group *g, void *arg) {
  group_first(g, *(int *)arg % KINDS, *(int *)arg / KINDS);
  return test_failures != 0;
}

static int group_first_process(int rank, void *arg) {
  cddp_group *g;
  (void)rank;
  CHECK_OK(cddp_init(&g, NULL));
  group_first(g, *(int *)arg % KINDS, *(int *)arg / KINDS);
  return test_failures != 0;
}

static int group_first_split(cddp_group *g, void *arg) {
  cddp_group *s;
  CHECK_OK(cddp_group_split(g, cddp_rank(g) % 2, 0, &s));
  group_first(s, *(int *)arg % KINDS, *(int *)arg / KINDS);
  CHECK_OK(cddp_barrier(g));
  return test_failures != 0;
}

/* A thread's end destroys its group; its model is destroyed later, by another thread. */
static cddp_ddp *left_behind[3];

static int leave_model(cddp_group *g, void *arg) {
  static float w[3][10];
  cddp_param *p = &((cddp_param *)arg)[cddp_rank(g)];
  p->data = w[cddp_rank(g)];
  p->count = 10;
  CHECK_OK(cddp_ddp_create(&left_behind[cddp_rank(g)], g, p, 1, NULL));
  CHECK_OK(cddp_ddp_ready(left_behind[cddp_rank(g)], 0));
  CHECK_OK(cddp_ddp_wait(left_behind[cddp_rank(g)]));
  return test_failures != 0;
}

static void test_group_destroyed_first(void) {
  static const int kinds[] = {0, HOOKED, UNUSED, OF_MODEL, SHARDED, SHARDED | OF_MODEL};
  cddp_param params[3];
  int order, kind;
  size_t i;
  for (order = 0; order < 3; order++) {
    for (i = 0; i < sizeof kinds / sizeof *kinds; i++) {
      kind = kinds[i] + order * KINDS;
      CHECK_OK(ranks_run(group_first_threads, &kind, 2, true));
      CHECK_OK(cddp_spawn(group_first_process, &kind, 2));
      CHECK_OK(ranks_run(group_first_split, &kind, 3, i % 2));
      CHECK_OK(cddp_spawn(group_first_process, &kind, 1));
    }
    kind = ELASTIC + order * KINDS;
    CHECK_OK(cddp_spawn(group_first_process, &kind, 2));
    memset(params, 0, sizeof params);
    CHECK_OK(cddp_run_threads(leave_model, params, 3));
    for (i = 0; i < 3; i++) cddp_ddp_destroy(left_behind[order == 1 ? 2 - i : i]);
  }
}

typedef struct loss {
  double *died_at;
  bool fused;
} loss;

static int lossy_rank(int rank, void *arg) {
  const loss *l = (const loss *)arg;
  int before = test_failures, step;
  cddp_result r = CDDP_OK;
  cddp_sgd_desc o;
  cddp_group *g;
  double t;
  model m;
  CHECK_OK(cddp_init(&g, NULL));
  if (g == NULL) return 1;
  m.seed = 3;
  if (!model_open(&m, g, 8, some_counts, 8, only_f32, 1, SHARED, PLACED)) return 1;
  CHECK_OK(cddp_ddp_create(&m.ddp, g, m.p, m.n, NULL));
  sgd_options(1, &o);
  CHECK_OK(cddp_sgd_create(&m.sgd, m.p, m.n, &o));
  if (m.ddp == NULL || m.sgd == NULL) return 1;
  for (step = 0; step < 1000 && r == CDDP_OK; step++) {
    int k;
    for (k = m.n - 1; k >= 0 && r == CDDP_OK; k--) {
      if (rank == 1 && step == 20 && k == 3) {
        *l->died_at = test_now();
        kill(getpid(), SIGKILL);
      }
      backward_one(&m, step, k);
      r = cddp_ddp_ready(m.ddp, k);
    }
    if (r == CDDP_OK) r = l->fused ? cddp_ddp_step(m.ddp, m.sgd) : cddp_ddp_wait(m.ddp);
  }
  CHECK_IS(r, CDDP_PEER_LOST);
  CHECK(mentions("rank 1"));
  CHECK(*l->died_at > 0 && test_now() - *l->died_at < RANKS_WITHIN(1.0));
  t = test_now();
  CHECK(cddp_ddp_wait(m.ddp) != CDDP_OK);
  ranks_sleep(0.1);
  model_close(&m);
  cddp_destroy(g);
  CHECK(test_now() - t < 0.1 + RANKS_WITHIN(0.5));
  return test_failures != before;
}

static void test_dead_rank(void) {
  loss l;
  int status[3], i;
  l.died_at = (double *)ranks_shared(4096);
  for (i = 0; i < 2; i++) {
    *l.died_at = 0;
    l.fused = i == 0;
    ranks_script(lossy_rank, &l, 3, 30, status);
    CHECK(status[0] == 0 && status[2] == 0);
    CHECK(WIFSIGNALED(status[1]));
  }
  munmap(l.died_at, 4096);
}

/* STOPPED IN THE MIDDLE of cddp_ddp_step, where rank 1 writes new weights and zeroes into memory of
   its peers. Once they have had their failure they make weights and model anew, and rank 1 changes
   neither weights nor gradients when it goes on. ----------------------------------------------- */

static int stopped_rank(int rank, void *arg) {
  int before = test_failures;
  cddp_group_desc desc;
  cddp_sgd_desc rule;
  cddp_group *g, *pair;
  cddp_param p;
  cddp_ddp *d;
  cddp_optim *o;
  int32_t pids[3];
  cddp_result r;
  float *w;
  (void)arg;
  memset(&desc, 0, sizeof desc);
  memset(&rule, 0, sizeof rule);
  memset(&p, 0, sizeof p);
  desc.timeout_s = RANKS_STOP_TIMEOUT;
  rule.lr = 0.5;
  rule.momentum = 0.5;
  CHECK_OK(cddp_init(&g, &desc));
  if (g == NULL) return 1;
  CHECK_OK(cddp_group_split(g, rank == 1 ? -1 : 0, rank, &pair));
  pids[rank] = (int32_t)getpid();
  CHECK_OK(cddp_all_gather(g, &pids[rank], pids, 1, CDDP_I32, NULL));
  p.data = w = (float *)cddp_alloc(g, RANKS_STOP_COUNT * sizeof *w);
  p.count = RANKS_STOP_COUNT;
  ranks_fill(w, 1);
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
  CHECK_OK(cddp_sgd_create(&o, &p, 1, &rule));
  ranks_fill((float *)p.grad, 1);
  CHECK_OK(cddp_ddp_ready(d, 0));
  CHECK_OK(cddp_ddp_step(d, o));
  CHECK(ranks_holds(w, 0.5f));
  ranks_fill((float *)p.grad, 1);
  CHECK_OK(cddp_barrier(g));
  if (rank == 1) ranks_stop_inside(w);
  CHECK_OK(cddp_ddp_ready(d, 0));
  r = cddp_ddp_step(d, o);
  CHECK(rank == 1 || r != CDDP_OK);
  CHECK(rank != 0 || ranks_stopped_inside(w, 0.5f));
  if (rank != 1) {
    cddp_optim_destroy(o);
    cddp_ddp_destroy(d);
    o = NULL;
    cddp_free(g, w);
    p.data = w = (float *)cddp_alloc(pair, RANKS_STOP_COUNT * sizeof *w);
    p.grad = NULL;
    CHECK_OK(cddp_ddp_create(&d, pair, &p, 1, NULL));
    ranks_fill(w, 7);
    ranks_fill((float *)p.grad, 9);
    CHECK_OK(cddp_barrier(pair));
    if (rank == 0) kill((pid_t)pids[1], SIGCONT);
    ranks_sleep(0.5);
    CHECK(ranks_holds(w, 7) && ranks_holds((const float *)p.grad, 9));
  }
  CHECK(rank == 1 || cddp_barrier(pair) == CDDP_OK);
  cddp_optim_destroy(o);
  cddp_ddp_destroy(d);
  cddp_destroy(pair);
  cddp_destroy(g);
  return test_failures != before;
}

static void test_stopped_inside(void) {
  int status[3];
  ranks_script(stopped_rank, NULL, 3, 100, status);
  CHECK(ranks_exited_well(status, 3));
}

int main(void) {
  setenv("CDDP_TIMEOUT_S", RANKS_SLOW ? "120" : "30", 0);
  RUN(test_creation);
  RUN(test_difference);
  RUN(test_misuse);
  RUN(test_other_ddp);
  RUN(test_ready_twice);
  RUN(test_anew);
  RUN(test_grown);
  RUN(test_tied);
  RUN(test_no_limit);
  RUN(test_many_parameters);
  RUN(test_buckets);
  RUN(test_means);
  RUN(test_no_sync);
  RUN(test_unused);
  RUN(test_misaligned);
  RUN(test_forgotten);
  RUN(test_forgotten_alone);
  RUN(test_hook);
  RUN(test_hook_params);
  RUN(test_hook_crashes);
  RUN(test_compression);
  RUN(test_clip);
  RUN(test_clip_nan);
  RUN(test_fused);
  RUN(test_fused_large);
  RUN(test_fused_unused);
  RUN(test_fused_others);
  RUN(test_beside);
  RUN(test_cycles);
  RUN(test_given_up);
  RUN(test_hook_given_up);
  RUN(test_group_destroyed_first);
  RUN(test_dead_rank);
  RUN(test_stopped_inside);
  return TEST_END();
}
