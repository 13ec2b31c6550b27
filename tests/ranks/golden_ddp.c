/* ToyModel trained by cddp has the parameters that PyTorch's DistributedDataParallel reached.

   tests/peers/golden_ddp.py trained the model with torch.distributed from a fixed start and wrote
   golden_ddp.h: the data of each rank, and losses and parameters after each step. Here the same
   forward and backward passes run in C on the same number of ranks, as processes and as threads.
   They may differ by rounding only. */
#define CDDP_IMPLEMENTATION
#include "../../cddp.h"
#include "../peers/golden_ddp.h"
#include "../ranks.h"

enum { IN = 10, HIDDEN = 10, OUT = 5, BATCH = 20, RANKS = 2 };
enum { W1, B1, W2, B2, PARAMS };

static const size_t sizes[PARAMS] = {HIDDEN * IN, HIDDEN, OUT *HIDDEN, OUT};

typedef struct toy {
  cddp_param p[PARAMS];
  float x[BATCH * IN], y[BATCH * OUT];
} toy;

typedef struct plan {
  int which; /* case of golden_ddp.py */
  bool fused, shared, own_grads;
} plan;

/* The generator of golden_ddp.py. */
static void numbers(uint64_t seed, float *out, size_t count) {
  size_t i;
  for (i = 0; i < count; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    out[i] = (float)((int)((seed >> 33) % 128) - 64) / 64.0f;
  }
}

static void options(int which, cddp_sgd_desc *o) {
  memset(o, 0, sizeof *o);
  switch (which) {
  case 0:
    o->lr = 0.05;
    break;
  case 1:
    o->lr = 0.05;
    o->momentum = 0.9;
    break;
  case 2:
    o->lr = 0.02;
    o->momentum = 0.9;
    o->nesterov = true;
    o->weight_decay = 0.01;
    break;
  case 3:
    o->lr = 0.05;
    o->momentum = 0.8;
    o->dampening = 0.3;
    break;
  default:
    o->lr = 0.01;
    o->momentum = 0.5;
    o->maximize = true;
    break;
  }
}

/* out = w x + b for one sample */
static void linear(const float *w, const float *b, const float *x, int in, int out, float *y) {
  int o, i;
  for (o = 0; o < out; o++) {
    y[o] = b[o];
    for (i = 0; i < in; i++) y[o] += w[o * in + i] * x[i];
  }
}

/* Adds d(loss)/d(w, b) for one sample, given d(loss)/d(y). */
static void linear_backward(float *gw, float *gb, const float *x, const float *gy, int in,
                            int out) {
  int o, i;
  for (o = 0; o < out; o++) {
    gb[o] += gy[o];
    for (i = 0; i < in; i++) gw[o * in + i] += gy[o] * x[i];
  }
}

/* Mean squared error over the batch; gradients are added to t->p[].grad. */
static void forward_backward(toy *t) {
  const float *w2 = (const float *)t->p[W2].data;
  int s, o, h;
  for (s = 0; s < BATCH; s++) {
    float hidden[HIDDEN], act[HIDDEN], y[OUT], gy[OUT], gh[HIDDEN];
    const float *x = t->x + s * IN;
    linear((const float *)t->p[W1].data, (const float *)t->p[B1].data, x, IN, HIDDEN, hidden);
    for (h = 0; h < HIDDEN; h++) act[h] = hidden[h] > 0 ? hidden[h] : 0;
    linear(w2, (const float *)t->p[B2].data, act, HIDDEN, OUT, y);
    for (o = 0; o < OUT; o++) gy[o] = 2.0f * (y[o] - t->y[s * OUT + o]) / (BATCH * OUT);
    linear_backward((float *)t->p[W2].grad, (float *)t->p[B2].grad, act, gy, HIDDEN, OUT);
    for (h = 0; h < HIDDEN; h++) {
      gh[h] = 0;
      for (o = 0; o < OUT; o++) gh[h] += w2[o * HIDDEN + h] * gy[o];
      if (hidden[h] <= 0) gh[h] = 0;
    }
    linear_backward((float *)t->p[W1].grad, (float *)t->p[B1].grad, x, gh, IN, HIDDEN);
  }
}

static void compare_to_golden(const toy *t, int which, int step) {
  const float *want = golden_ddp[which][step / GOLDEN_EVERY - 1];
  size_t i, k = 0;
  int p;
  double worst = 0;
  for (p = 0; p < PARAMS; p++)
    for (i = 0; i < sizes[p]; i++, k++)
      worst = fmax(worst, fabs((double)((const float *)t->p[p].data)[i] - (double)want[k]));
  CHECK(k == GOLDEN_PARAMS);
  CHECK(worst < 2e-5);
  if (worst >= 2e-5) fprintf(stderr, "case %d, step %d: off by %g\n", which, step, worst);
}

static void train(toy *t, cddp_ddp *ddp, cddp_optim *sgd, const plan *pl, int rank) {
  int step, p, steps = GOLDEN_CHECKPOINTS * GOLDEN_EVERY;
  for (step = 0; step < steps; step++) {
    uint64_t seed = (uint64_t)(1000 + step * RANKS + rank);
    numbers(2 * seed, t->x, BATCH * IN);
    numbers(2 * seed + 1, t->y, BATCH * OUT);
    forward_backward(t);
    for (p = PARAMS - 1; p >= 0; p--) CHECK_OK(cddp_ddp_ready(ddp, p));
    if (pl->fused) {
      CHECK_OK(cddp_ddp_step(ddp, sgd));
    } else {
      CHECK_OK(cddp_ddp_wait(ddp));
      CHECK_OK(cddp_optim_step(sgd));
      CHECK_OK(cddp_optim_zero_grad(sgd));
    }
    if ((step + 1) % GOLDEN_EVERY == 0) compare_to_golden(t, pl->which, step + 1);
  }
}

static int run_plan(cddp_group *g, void *arg) {
  static const char *const names[PARAMS] = {"net1.weight", "net1.bias", "net2.weight", "net2.bias"};
  const plan *pl = (const plan *)arg;
  int before = test_failures, rank = cddp_rank(g), p;
  cddp_ddp *ddp = NULL;
  cddp_optim *sgd = NULL;
  cddp_sgd_desc o;
  toy t;
  memset(&t, 0, sizeof t);
  for (p = 0; p < PARAMS; p++) {
    size_t i, bytes = sizes[p] * sizeof(float);
    t.p[p].name = names[p];
    t.p[p].count = sizes[p];
    t.p[p].data = pl->shared ? cddp_alloc(g, bytes) : malloc(bytes);
    t.p[p].grad = pl->own_grads ? calloc(sizes[p], sizeof(float)) : NULL;
    CHECK(t.p[p].data != NULL);
    if (t.p[p].data == NULL) return 1;
    numbers((uint64_t)(1 + p), (float *)t.p[p].data, sizes[p]);
    for (i = 0; i < sizes[p]; i++) /* rank 0's values win */
      ((float *)t.p[p].data)[i] = rank == 0 ? ((float *)t.p[p].data)[i] / 2 : -7.0f;
  }
  options(pl->which, &o);
  CHECK_OK(cddp_ddp_create(&ddp, g, t.p, PARAMS, NULL));
  CHECK_OK(cddp_sgd_create(&sgd, t.p, PARAMS, &o));
  if (ddp != NULL && sgd != NULL) train(&t, ddp, sgd, pl, rank);
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  for (p = 0; p < PARAMS; p++) {
    if (pl->shared)
      cddp_free(g, t.p[p].data);
    else
      free(t.p[p].data);
    if (pl->own_grads) free(t.p[p].grad);
  }
  return test_failures != before;
}

static void all_plans(bool threads) {
  plan pl;
  for (pl.which = 0; pl.which < GOLDEN_CASES; pl.which++) {
    int kind;
    for (kind = 0; kind < 6; kind++) {
      pl.fused = kind % 2 == 0;
      pl.shared = kind % 3 != 0;
      pl.own_grads = kind >= 4;
      CHECK_OK(ranks_run(run_plan, &pl, RANKS, threads));
    }
  }
}

static void test_processes(void) { all_plans(false); }
static void test_threads(void) { all_plans(true); }

int main(void) {
  setenv("CDDP_TIMEOUT_S", "60", 0);
  RUN(test_processes);
  RUN(test_threads);
  return TEST_END();
}
