/* Gradients of the caller's own, in memory of cddp_alloc, are reduced where they are.

   A model whose gradients lie in shared memory of the caller is trained beside one whose
   gradients cddp_ddp_create places: both must have the same bits, on one host and on several,
   with hooks and in every layout: all gradients in one block, some of them, or on some ranks
   only. Bytes between gradients must stay as they were. What cannot be reduced so is refused. */
#include "../../cddp.h"
#include "../ranks.h"

enum { LAYERS = 3, KINDS = 4 /* of tensors: [LAYERS][size] */, STEPS = 6 };
enum { PARAMS = LAYERS * KINDS + 2 };
enum { TABLE = PARAMS - 2, EMPTY = PARAMS - 1, ROWS = 9 };
enum { FUSED, APART, CLIPPED, SCATTERED, UNUSED, SHARDS, JOINED, CALLS };
enum {
  PLACED,  /* by cddp_ddp_create */
  STACKED, /* one block of cddp_alloc, a tensor after the other as llm.c has them */
  MIXED,   /* every third one is there, every third in the heap, every third placed */
  UNEVEN,  /* in the block on all ranks but the last one */
  HEAP,
  LAYOUTS
};

static size_t tensor_size[KINDS] = {1501, 37, 901, 50}; /* most begin within a cache line */
static const cddp_dtype tensor_type[KINDS] = {CDDP_F32, CDDP_F32, CDDP_F16, CDDP_F64};

typedef struct plan {
  int call, layout;
  bool threads;
  size_t own_bytes; /* parameters of fewer bytes are copied */
  cddp_comm_hook hook;
} plan;

typedef struct model {
  cddp_param p[PARAMS];
  char names[PARAMS][16];
  char *block, *before; /* of gradients, and what was in it */
  size_t bytes;
  void *heap[PARAMS];
  float *momentum[PARAMS]; /* of SCATTERED */
  cddp_ddp *ddp;
  cddp_optim *optim;
} model;

static size_t bytes_of(const cddp_param *p) { return p->count * cddp_dtype_size(p->dtype); }

/* A byte between gradients, where there are any. */
static char noise(size_t i) { return (char)(i * 7 + 3); }

/* Places gradient k as the layout says; at: where it is in the block. */
static void place(model *m, cddp_group *g, const plan *c, int layout, int k, size_t at) {
  bool last = cddp_rank(g) == cddp_world_size(g) - 1;
  bool block = layout == STACKED || (layout == MIXED && k % 3 == 0) || (layout == UNEVEN && !last);
  (void)c;
  if (k == TABLE) return;
  if (layout != PLACED && !block && !(layout == MIXED && k % 3 == 1))
    m->p[k].grad = m->heap[k] = calloc(1, bytes_of(&m->p[k]) + 1);
  if (!block) return;
  m->p[k].grad = m->block + at;
  memset(m->p[k].grad, 0, bytes_of(&m->p[k]));
}

static void model_open(model *m, cddp_group *g, const plan *c, int layout) {
  static const size_t rows[PARAMS] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ROWS};
  size_t at = 4096, i;
  cddp_ddp_desc d;
  cddp_sgd_desc o;
  int k, kind, layer;
  memset(m, 0, sizeof *m);
  memset(&d, 0, sizeof d);
  memset(&o, 0, sizeof o);
  for (kind = 0, m->bytes = 8192; kind < KINDS; kind++)
    m->bytes += LAYERS * (tensor_size[kind] * 8 + 64);
  m->block = (char *)cddp_alloc(g, m->bytes);
  m->before = (char *)malloc(m->bytes);
  for (i = 0; i < m->bytes; i++) m->block[i] = noise(i);
  for (kind = 0; kind < KINDS; kind++) {
    at = (at + 8 * 3) / 8 * 8;
    for (layer = 0; layer < LAYERS; layer++) {
      cddp_param *p = &m->p[k = layer * KINDS + kind];
      p->count = tensor_size[kind];
      p->dtype = tensor_type[kind];
      place(m, g, c, layout, k, at);
      at += bytes_of(p); /* of one tensor's layers no byte lies between two */
    }
  }
  m->p[TABLE].count = ROWS * 5;
  memcpy(m->before, m->block, m->bytes);
  for (k = 0; k < PARAMS; k++) {
    snprintf(m->names[k], sizeof m->names[k], "p%d", k);
    m->p[k].name = m->names[k];
    m->p[k].data =
        k % 2 == 0 ? cddp_alloc(g, bytes_of(&m->p[k]) + 1) : malloc(bytes_of(&m->p[k]) + 1);
    for (i = 0; i < m->p[k].count; i++)
      ranks_put(m->p[k].data, m->p[k].dtype, i, ranks_mix(3, (uint64_t)k, i));
    m->momentum[k] = (float *)calloc(m->p[k].count + 1, sizeof(float));
  }
  d.bucket_cap_mb = 0.02;
  d.max_grad_norm = c->call == CLIPPED ? 5 : 0;
  d.find_unused_parameters = c->call == UNUSED;
  d.shards = c->call == SHARDS ? 5 : 0;
  d.sparse_rows = rows;
  d.comm_hook = c->hook;
  CHECK_OK(cddp_ddp_create(&m->ddp, g, m->p, PARAMS, &d));
  o.lr = 0.0625;
  o.momentum = 0.9;
  o.ddp = m->ddp;
  CHECK_OK(cddp_sgd_create(&m->optim, m->p, PARAMS, &o));
}

static void model_close(model *m, cddp_group *g) {
  int k;
  size_t i;
  cddp_optim_destroy(m->optim);
  cddp_ddp_destroy(m->ddp);
  for (k = 0; k < PARAMS; k++) {
    char *grad = (char *)m->p[k].grad;
    if (grad >= m->block && grad < m->block + m->bytes)
      memset(m->before + (grad - m->block), 0, bytes_of(&m->p[k]));
  }
  for (i = 0; i < m->bytes; i++)
    if (m->block[i] != m->before[i]) break;
  CHECK_EQ(i, m->bytes); /* gradients are zero, and nothing else of the caller's has changed */
  CHECK_OK(cddp_barrier(g));
  for (k = 0; k < PARAMS; k++) {
    if (k % 2 == 0)
      cddp_free(g, m->p[k].data);
    else
      free(m->p[k].data);
    free(m->heap[k]);
    free(m->momentum[k]);
  }
  cddp_free(g, m->block);
  free(m->before);
}

/* Whether gradients that lie in the block on all ranks are reduced there, and no others: partitions
   say where. */
static void check_places(const model *m, cddp_group *g, const plan *c) {
  const cddp_partition *part;
  int n = cddp_ddp_partitions(m->ddp, &part), i;
  for (i = 0; i < n; i++) {
    const cddp_param *p = &m->p[part[i].param];
    char *at = (char *)p->grad + part[i].first * cddp_dtype_size(p->dtype);
    bool block = (char *)p->grad >= m->block && (char *)p->grad < m->block + m->bytes;
    bool seen = (block && c->layout != UNEVEN) || c->threads || cddp_world_size(g) == 1;
    if (m->heap[part[i].param] == NULL && !block) continue; /* placed */
    if (c->hook != NULL || bytes_of(p) < c->own_bytes) seen = false;
    if (seen)
      CHECK(part[i].grad == at);
    else
      CHECK((char *)part[i].grad + 1 <= (char *)p->grad ||
            (char *)part[i].grad >= (char *)p->grad + bytes_of(p));
  }
}

static bool uses(const plan *c, int shard, int step, int k) {
  if (c->call != UNUSED) return true;
  return k % 5 == 1 ? step % 3 != 1 : k % 5 != 2 || shard % 2 == 0;
}

static void backward(model *m, const plan *c, int step, int shard, int micro) {
  int k;
  size_t i;
  for (k = PARAMS - 1; k >= 0; k--) {
    uint64_t seed = (uint64_t)(1000 * step + 10 * shard + micro);
    if (!uses(c, shard, step, k)) continue;
    if (k == TABLE) {
      float values[5];
      int64_t row = (step + shard) % ROWS;
      for (i = 0; i < 5; i++) ranks_put(values, CDDP_F32, i, ranks_mix(seed, 99, i));
      CHECK_OK(cddp_ddp_add_rows(m->ddp, k, &row, values, 1));
    }
    for (i = 0; k != TABLE && i < m->p[k].count; i++) {
      char add[8], *at = (char *)m->p[k].grad + i * cddp_dtype_size(m->p[k].dtype);
      ranks_put(add, m->p[k].dtype, 0, ranks_mix(seed, (uint64_t)k, i));
      if (m->p[k].dtype == CDDP_F32)
        *(float *)(void *)at += *(float *)(void *)add;
      else if (m->p[k].dtype == CDDP_F64)
        *(double *)(void *)at += *(double *)(void *)add;
      else
        memcpy(at, add, 2);
    }
    CHECK_OK(cddp_ddp_ready(m->ddp, k));
  }
}

/* An optimizer of the caller's own; f16 and f64 are left as they are. */
static void own_step(model *m) {
  const cddp_partition *part;
  int n = cddp_ddp_partitions(m->ddp, &part), i;
  size_t k;
  CHECK_OK(cddp_ddp_reduce_scatter(m->ddp));
  for (i = 0; i < n; i++)
    for (k = 0; m->p[part[i].param].dtype == CDDP_F32 && k < part[i].count; k++) {
      float *v = &m->momentum[part[i].param][part[i].first + k];
      *v = 0.9f * *v + ((float *)part[i].grad)[k];
      ((float *)part[i].data)[k] -= 0.0625f * *v;
    }
  CHECK_OK(cddp_ddp_all_gather(m->ddp));
}

/* One step; which call depends on the plan, and on the step where they may change. */
static void take_step(model *m, const plan *c, int step) {
  if (c->call == SCATTERED && step % 3 != 2) {
    own_step(m);
  } else if (c->call == FUSED || c->call == CLIPPED || (c->call != APART && step % 2 == 1)) {
    CHECK_OK(cddp_ddp_step(m->ddp, m->optim));
  } else {
    CHECK_OK(cddp_ddp_wait(m->ddp));
    CHECK_OK(cddp_ddp_clip_grad_norm(m->ddp, 7, NULL));
    CHECK_OK(cddp_optim_step(m->optim));
    CHECK_OK(cddp_optim_zero_grad(m->optim));
  }
}

static uint64_t train(cddp_group *g, const plan *c, int layout) {
  int rank = cddp_rank(g), step, shard, k, before = test_failures;
  uint64_t h = RANKS_HASH;
  double norm = 0;
  model m;
  model_open(&m, g, c, layout);
  if (layout == c->layout) check_places(&m, g, c);
  for (step = 0; step < STEPS && test_failures == before; step++) {
    if (c->call == JOINED && rank == 1 && step == 3) break;
    if (c->call == UNUSED && step % 2 == 0) { /* two micro-batches */
      cddp_ddp_no_sync(m.ddp, true);
      backward(&m, c, step, rank, 1);
      cddp_ddp_no_sync(m.ddp, false);
    }
    if (c->call != SHARDS) backward(&m, c, step, rank, 0);
    while (c->call == SHARDS && cddp_ddp_next_shard(m.ddp, &shard)) {
      if (shard % 2 == 0) CHECK(ranks_zero(m.p[0].grad, bytes_of(&m.p[0])));
      backward(&m, c, step, shard, 0);
    }
    take_step(&m, c, step);
    for (k = 0; k < PARAMS; k++)
      if (k != TABLE) CHECK(ranks_zero(m.p[k].grad, c->call == UNUSED ? 0 : bytes_of(&m.p[k])));
    if (c->call != SCATTERED && cddp_ddp_grad_norm(m.ddp, &norm) == CDDP_OK)
      h = ranks_hash(h, &norm, sizeof norm);
  }
  if (c->call == JOINED) CHECK_OK(cddp_ddp_join(m.ddp, m.optim));
  for (k = 0; k < PARAMS; k++)
    if (m.p[k].grad != NULL)
      memset(m.p[k].grad, 0, bytes_of(&m.p[k])); /* what no rank has used is left alone */
  for (k = 0; k < PARAMS; k++) h = ranks_hash(h, m.p[k].data, bytes_of(&m.p[k]));
  if (c->call == JOINED) { /* not of the norms: a rank that has joined has none */
    h = RANKS_HASH;
    for (k = 0; k < PARAMS; k++) h = ranks_hash(h, m.p[k].data, bytes_of(&m.p[k]));
  }
  model_close(&m, g);
  return h;
}

static int body(cddp_group *g, void *arg) {
  plan *c = (plan *)arg, reference = *c;
  int before = test_failures;
  reference.layout = PLACED;
  if (train(g, c, c->layout) != train(g, &reference, PLACED))
    test_fail(__FILE__, __LINE__, "call %d, layout %d differs on rank %d of %d", c->call, c->layout,
              cddp_rank(g), cddp_world_size(g));
  test_count();
  return test_failures != before;
}

static void test_calls(void) {
  int n;
  plan c;
  memset(&c, 0, sizeof c);
  for (c.call = 0; c.call < CALLS; c.call++)
    for (c.layout = STACKED; c.layout < LAYOUTS; c.layout++)
      for (n = 1; n <= 4; n++) {
        plan mine = c; /* of each rank, where these are threads */
        if ((n + c.call + c.layout) % (RANKS_SLOW ? 6 : 2) != 0 || (c.call == JOINED && n == 1))
          continue;
        mine.threads = (c.call + n) % 3 == 0 || RANKS_TSAN;
        CHECK_OK(ranks_run(body, &mine, n, mine.threads));
      }
}

/* Between hosts the large ones alone stay where they are, and none where nodes of shards are
   gathered. */
static void test_hosts(void) {
  static const char *const hosts[] = {"ab", "aab"};
  size_t small = tensor_size[0];
  int h;
  plan c;
  memset(&c, 0, sizeof c);
  c.own_bytes = 1 << 20;
  tensor_size[0] = (1 << 18) + 3;
  c.layout = STACKED;
  for (h = 0; h < 2; h++)
    for (c.call = h; c.call < CALLS; c.call += RANKS_TSAN ? 6 : 2) {
      plan mine = c;
      if (c.call == SHARDS) mine.own_bytes = SIZE_MAX;
      setenv("TEST_HOSTS", hosts[h], 1);
      CHECK_OK(ranks_run(body, &mine, 2 + h, false));
      unsetenv("TEST_HOSTS");
    }
  tensor_size[0] = small;
}

static void test_hook(void) {
  plan c;
  memset(&c, 0, sizeof c);
  c.layout = STACKED;
  c.hook = cddp_bf16_compress_hook;
  CHECK_OK(ranks_run(body, &c, 2, false));
}

/* A second model of the same gradients cannot be created: those of the first one stay placed. */
static int refused_body(cddp_group *g, void *arg) {
  float weights[2] = {0, 0}, *grad;
  int before = test_failures;
  cddp_param p;
  cddp_ddp *d, *other;
  cddp_ddp_desc desc;
  (void)arg;
  memset(&p, 0, sizeof p);
  memset(&desc, 0, sizeof desc);
  p.data = weights;
  p.count = 2;
  CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
  grad = (float *)p.grad;
  desc.shards = 1;
  CHECK_IS(cddp_ddp_create(&other, g, &p, 1, &desc), CDDP_INVALID_ARGUMENT);
  CHECK(p.grad == grad && grad != NULL);
  desc.shards = 2;
  CHECK_OK(cddp_ddp_create(&other, g, &p, 1, &desc));
  cddp_ddp_destroy(other);
  CHECK(p.grad == grad);
  cddp_ddp_destroy(d);
  CHECK(p.grad == NULL);
  return test_failures != before;
}

static void test_refused(void) { CHECK_OK(ranks_run(refused_body, NULL, 2, false)); }

int main(void) {
  RUN(test_refused);
  RUN(test_calls);
  RUN(test_hosts);
  RUN(test_hook);
  return TEST_END();
}
