/* Room >>optim: SGD and AdamW have PyTorch's bits, with every instruction set.

   golden.h and golden_adamw.h are weights after steps of torch.optim (tests/peers/golden.py). SGD
   must have them to the last bit, AdamW within rounding. The loops for plain code, AVX2 and
   AVX-512 are compared with each other bit by bit, over whole arrays and pieces of them, in every
   dtype, with copies and masters. Bad arguments and allocations that fail are errors. This file
   includes the implementation: it calls the loops themselves. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdlib.h>

static long mallocs_left = 1L << 40; /* until one fails */

static void *failing_malloc(size_t bytes) { return mallocs_left-- > 0 ? malloc(bytes) : NULL; }
#define malloc failing_malloc

#define CDDP_IMPLEMENTATION
#include "../../cddp.h"

#include "../peers/golden.h"
#include "../peers/golden_adamw.h"
#include "../test.h"

enum { CONFIGS = sizeof golden_sgd / sizeof *golden_sgd, SHOWN = 3 };

static cddp_sgd_desc desc_of(int config) {
  cddp_sgd_desc d;
  memset(&d, 0, sizeof d);
  d.lr = golden_sgd[config][0];
  d.momentum = golden_sgd[config][1];
  d.dampening = golden_sgd[config][2];
  d.weight_decay = golden_sgd[config][3];
  d.nesterov = golden_sgd[config][4] != 0;
  d.maximize = golden_sgd[config][5] != 0;
  return d;
}

static void trajectory(cddp_dtype dtype, const void *inputs, const void *want, int config) {
  size_t bytes = GOLDEN_ELEMENTS * cddp_dtype_size(dtype);
  double weights[GOLDEN_ELEMENTS], gradient[GOLDEN_ELEMENTS];
  cddp_sgd_desc desc = desc_of(config);
  cddp_param p;
  cddp_optim *s;
  int step, shown = 0;
  memset(&p, 0, sizeof p);
  p.data = weights;
  p.grad = gradient;
  p.count = GOLDEN_ELEMENTS;
  p.dtype = dtype;
  memcpy(weights, inputs, bytes);
  CHECK_OK(cddp_sgd_create(&s, &p, 1, &desc));
  for (step = 1; step <= GOLDEN_STEPS; step++) {
    memcpy(gradient, (const char *)inputs + (size_t)step * bytes, bytes);
    CHECK_OK(cddp_optim_step(s));
    if (shown < SHOWN && golden_shown[shown] == step) {
      const char *w = (const char *)want + (size_t)(config * SHOWN + shown) * bytes;
      if (memcmp(weights, w, bytes) != 0)
        fprintf(stderr, "dtype %d, configuration %d, step %d\n", (int)dtype, config, step);
      CHECK(memcmp(weights, w, bytes) == 0);
      shown++;
    }
  }
  CHECK_EQ(shown, SHOWN);
  cddp_optim_destroy(s);
}

static void test_of_pytorch(void) {
  int c;
  for (c = 0; c < CONFIGS; c++) {
    trajectory(CDDP_F32, golden_f32_inputs, golden_f32, c);
    trajectory(CDDP_F64, golden_f64_inputs, golden_f64, c);
    trajectory(CDDP_BF16, golden_bf16_inputs, golden_bf16, c);
    trajectory(CDDP_F16, golden_f16_inputs, golden_f16, c);
  }
}

static cddp_adamw_desc adamw_of(int config) {
  const double *g = golden_adamw[config];
  cddp_adamw_desc d;
  memset(&d, 0, sizeof d);
  d.lr = g[0];
  d.beta1 = g[1];
  d.beta2 = g[2];
  d.eps = g[3];
  d.weight_decay = g[4];
  d.amsgrad = g[5] != 0;
  d.maximize = g[6] != 0;
  return d;
}

/* n numbers of PyTorch's; off: by how much they may differ, relative to 1 or to themselves. */
static void compare(cddp_dtype dtype, const void *have, const void *want, double off, int config) {
  double a[GOLDEN_ADAMW_ELEMENTS], b[GOLDEN_ADAMW_ELEMENTS];
  int i;
  cddp__convert(a, CDDP_F64, have, dtype, GOLDEN_ADAMW_ELEMENTS);
  cddp__convert(b, CDDP_F64, want, dtype, GOLDEN_ADAMW_ELEMENTS);
  for (i = 0; i < GOLDEN_ADAMW_ELEMENTS; i++) {
    if (!(fabs(a[i] - b[i]) <= off * fmax(1.0, fabs(b[i]))))
      fprintf(stderr, "dtype %d, configuration %d: %.17g, not %.17g\n", (int)dtype, config, a[i],
              b[i]);
    CHECK(fabs(a[i] - b[i]) <= off * fmax(1.0, fabs(b[i])));
  }
}

/* fused, in f32: to the last bit; else as near as roundings in another order come. */
static void adamw_trajectory(cddp_dtype dtype, const void *inputs, const void *fused,
                             const void *want, int config) {
  size_t bytes = GOLDEN_ADAMW_ELEMENTS * cddp_dtype_size(dtype);
  double weights[GOLDEN_ADAMW_ELEMENTS], gradient[GOLDEN_ADAMW_ELEMENTS];
  double off = dtype == CDDP_F32 ? 1e-5 : 1e-13;
  cddp_adamw_desc desc = adamw_of(config);
  cddp_param p = {NULL, weights, gradient, GOLDEN_ADAMW_ELEMENTS, CDDP_F32};
  cddp_optim *s;
  int step, shown = 0;
  p.dtype = dtype;
  memcpy(weights, inputs, bytes);
  CHECK_OK(cddp_adamw_create(&s, &p, 1, &desc));
  for (step = 1; step <= GOLDEN_ADAMW_STEPS; step++) {
    memcpy(gradient, (const char *)inputs + (size_t)step * bytes, bytes);
    CHECK_OK(cddp_optim_step(s));
    CHECK(memcmp(gradient, (const char *)inputs + (size_t)step * bytes, bytes) == 0);
    if (shown < 2 && golden_adamw_shown[shown] == step) {
      size_t at = (size_t)(config * 2 + shown) * bytes;
      if (dtype == CDDP_F32) CHECK(memcmp(weights, (const char *)fused + at, bytes) == 0);
      compare(dtype, weights, (const char *)fused + at, off, config);
      compare(dtype, weights, (const char *)want + at, off, config);
      shown++;
    }
  }
  CHECK_EQ(shown, 2);
  cddp_optim_destroy(s);
}

enum { ADAMW_CONFIGS = sizeof golden_adamw / sizeof *golden_adamw };

static void test_adamw_of_pytorch(void) {
  int c;
  for (c = 0; c < ADAMW_CONFIGS; c++) {
    adamw_trajectory(CDDP_F32, golden_adamw_f32_inputs, golden_adamw_f32_fused, golden_adamw_f32,
                     c);
    adamw_trajectory(CDDP_F64, golden_adamw_f64_inputs, golden_adamw_f64_fused, golden_adamw_f64,
                     c);
  }
}

/* The values in protocols.md E. */
static void test_check_values(void) {
  static const float g[2][3] = {{0.5f, 0.25f, -1.0f}, {0.1f, -0.2f, 0.7f}};
  static const float nesterov[2][3] = {
      {0.9031000137329102f, -2.0436999797821045f, 0.4894300103187561f},
      {0.8410741090774536f, -2.020447015762329f, 0.43625709414482117f}};
  static const float damped[2][3] = {
      {0.949999988079071f, -2.0250000953674316f, 0.4000000059604645f},
      {0.8999999761581421f, -2.0375001430511475f, 0.45500001311302185f}};
  static const float first[3] = {0.5099999904632568f, 0.23000000417232513f, -0.996999979019165f};
  static const float second[3] = {0.5f, 0.1249999925494194f, -0.5499999523162842f};
  int which, step;
  for (which = 0; which < 2; which++) {
    float w[3] = {1.0f, -2.0f, 0.3f}, grad[3];
    cddp_param p;
    cddp_sgd_desc d;
    cddp_optim *s;
    memset(&p, 0, sizeof p);
    memset(&d, 0, sizeof d);
    p.data = w;
    p.grad = grad;
    p.count = 3;
    d.lr = 0.1;
    d.momentum = 0.9;
    d.weight_decay = which == 0 ? 0.01 : 0;
    d.nesterov = which == 0;
    d.dampening = which == 0 ? 0 : 0.5;
    CHECK_OK(cddp_sgd_create(&s, &p, 1, &d));
    for (step = 0; step < 2; step++) {
      memcpy(grad, g[step], sizeof grad);
      CHECK_OK(cddp_optim_step(s));
      CHECK(memcmp(w, which == 0 ? nesterov[step] : damped[step], sizeof w) == 0);
      if (which == 0 && step == 0) CHECK(memcmp(s->state[0], first, sizeof first) == 0);
      if (which == 1 && step == 1) CHECK(memcmp(s->state[0], second, sizeof second) == 0);
    }
    cddp_optim_destroy(s);
  }
}

/* f16 and bf16 copies of f32 weights: at creation, after a step and when asked for. */
static void test_copies(void) {
  enum { N = 3001 };
  static float w[N], plain[N], grad[N];
  static uint16_t half[N], want[N];
  void *copies[2] = {half, NULL};
  cddp_sgd_desc d = desc_of(CONFIGS - 1), none = d;
  cddp_param p[2], q;
  cddp_optim *s, *t;
  int k, step, i;
  for (k = 0; k < 2; k++) {
    d.copies = copies;
    d.copy_dtype = k == 0 ? CDDP_BF16 : CDDP_F16;
    memset(p, 0, sizeof p);
    for (i = 0; i < N; i++) w[i] = plain[i] = (float)(i - 1500) / 7.0f;
    p[0].data = w, p[0].grad = grad, p[0].count = N;
    p[1].dtype = CDDP_F64; /* has none */
    q = p[0];
    q.data = plain;
    CHECK_OK(cddp_sgd_create(&s, p, 2, &d));
    CHECK_OK(cddp_sgd_create(&t, &q, 1, &none));
    for (step = 0; step < 4; step++) {
      cddp__convert(want, d.copy_dtype, plain, CDDP_F32, N);
      CHECK(memcmp(half, want, sizeof half) == 0);
      for (i = 0; i < N; i++) grad[i] = 1e-3f * (float)((i * 37 + step * 101) % 211 - 105);
      CHECK_OK(cddp_optim_step(s));
      CHECK_OK(cddp_optim_step(t));
      CHECK(memcmp(w, plain, sizeof w) == 0); /* small steps count: they are of the masters */
    }
    w[7] = plain[7] = 1.0f + 0x1p-7f; /* a bf16 */
    CHECK_OK(cddp_optim_write_copies(s));
    cddp__convert(want, d.copy_dtype, plain, CDDP_F32, N);
    CHECK(memcmp(half, want, sizeof half) == 0);
    CHECK_OK(cddp_optim_write_copies(t)); /* has none */
    cddp_optim_destroy(s);
    cddp_optim_destroy(t);
  }
  d.copy_dtype = CDDP_F32;
  CHECK_IS(cddp_sgd_create(&s, p, 2, &d), CDDP_INVALID_ARGUMENT);
  d.copy_dtype = CDDP_F16;
  copies[1] = half;
  CHECK_IS(cddp_sgd_create(&s, p, 2, &d), CDDP_INVALID_ARGUMENT);
  CHECK(s == NULL && strstr(cddp_error(), "f64") != NULL);
  CHECK_IS(cddp_optim_write_copies(NULL), CDDP_INVALID_ARGUMENT);
}

/* Any cut into pieces, and any instruction set, gives the same bits. */
static void test_pieces(void) {
  enum { N = 5003 };
  static const cddp_dtype dtypes[] = {CDDP_F32, CDDP_F64, CDDP_F16, CDDP_BF16};
  static double start[N], whole[N], parts[N], grad[N], whole_m[N], parts_m[N];
  uint64_t x = 1;
  size_t i, t, size, at, n;
  int c, found = cddp__isa();
  for (t = 0; t < 4; t++) {
    size = cddp_dtype_size(dtypes[t]);
    for (i = 0; i < N; i++) { /* any bits that are numbers of moderate size */
      x = x * 6364136223846793005ull + 1442695040888963407ull;
      start[i] = (double)(int64_t)(x >> 11) * 0x1p-50 - 4.0;
      grad[i] = (double)(int64_t)(x * 77 >> 11) * 0x1p-52 - 1.0;
    }
    cddp__convert(whole, dtypes[t], start, CDDP_F64, N);
    memcpy(start, whole, N * size);
    cddp__convert(whole, dtypes[t], grad, CDDP_F64, N);
    memcpy(grad, whole, N * size);
    for (c = 0; c < CONFIGS; c++) {
      cddp_sgd_desc d = desc_of(c);
      cddp_param p = {NULL, start, NULL, N, CDDP_F32};
      cddp__update all, part;
      cddp_optim *s;
      int step;
      p.dtype = dtypes[t];
      CHECK_OK(cddp_sgd_create(&s, &p, 1, &d));
      memcpy(whole, start, sizeof whole);
      memcpy(parts, start, sizeof parts);
      for (step = 0; step < 3; step++) {
        all = part = cddp__update_of(s, 0, s->state, s->count);
        if (s->state_count > 0) all.states[0] = (char *)whole_m, part.states[0] = (char *)parts_m;
        cddp__update_run(&all, 0, whole, grad, N);
        __atomic_store_n(&cddp__isa_found, CDDP__ISA_BASE, __ATOMIC_RELAXED);
        for (at = 0, n = 1; at < N; at += n, n = n * 2 + 1) {
          size_t m = n < N - at ? n : N - at;
          part.loops = cddp__pick_loops();
          cddp__update_run(&part, at, (char *)parts + at * size,
                           (char *)grad + at * size, m);
        }
        __atomic_store_n(&cddp__isa_found, found, __ATOMIC_RELAXED);
        s->steps[0]++;
      }
      CHECK(memcmp(whole, parts, N * size) == 0);
      if (s->state_count > 0) CHECK(memcmp(whole_m, parts_m, N * size) == 0);
      cddp_optim_destroy(s);
    }
  }
}

/* Numbers of moderate size, some of them 0. */
static void fill(void *to, cddp_dtype dtype, size_t n, uint64_t seed) {
  uint64_t x = seed * 2654435761u + 1;
  double v;
  size_t i;
  for (i = 0; i < n; i++) {
    x = x * 6364136223846793005ull + 1442695040888963407ull;
    v = x >> 60 == 3 ? 0 : (double)(int64_t)(x >> 11) * 0x1p-52 - 1.0;
    cddp__convert((char *)to + i * cddp_dtype_size(dtype), dtype, &v, CDDP_F64, 1);
  }
}

/* AdamW: any cut into pieces, any instruction set, and the loop that does the whole step of 1, 2 or
   4 ranks: the same bits. */
static void adamw_pieces(cddp_dtype dtype, int config, int ranks) {
  enum { N = 2099 };
  static double w[3][4][N], g[4][N], mean[N], states[3][3][N];
  size_t size = cddp_dtype_size(dtype), at, n, k;
  cddp_adamw_desc d = adamw_of(config);
  cddp_param p = {NULL, w[0][0], NULL, N, CDDP_F32};
  const void *srcs[4];
  cddp_optim *o;
  int step, which, found = cddp__isa();
  p.dtype = dtype;
  CHECK_OK(cddp_adamw_create(&o, &p, 1, &d));
  memset(states, 0, sizeof states);
  for (which = 0; which < 3; which++) fill(w[which][0], dtype, N, 1);
  for (step = 0; step < 3; step++) {
    cddp__update u[3];
    for (k = 0; k < (size_t)ranks; k++) fill(g[k], dtype, N, (uint64_t)step * 4 + k + 2);
    for (k = 0; k < (size_t)ranks; k++) srcs[k] = g[k];
    cddp__reduce(mean, srcs, ranks, N, dtype, CDDP_AVG);
    for (which = 0; which < 3; which++) {
      if (which == 1) __atomic_store_n(&cddp__isa_found, CDDP__ISA_BASE, __ATOMIC_RELAXED);
      u[which] = cddp__update_of(o, 0, o->state, o->count);
      for (k = 0; k < 3; k++)
        u[which].states[k] = (int)k < o->state_count ? (char *)states[which][k] : NULL;
      __atomic_store_n(&cddp__isa_found, found, __ATOMIC_RELAXED);
    }
    cddp__update_run(&u[0], 0, w[0][0], mean, N);
    for (at = 0, n = 1; at < N; at += n, n = n * 2 + 1) {
      size_t m = n < N - at ? n : N - at;
      cddp__update_run(&u[1], at, (char *)w[1][0] + at * size, (char *)mean + at * size, m);
    }
    CHECK(memcmp(w[0][0], w[1][0], N * size) == 0);
    CHECK(memcmp(states[0], states[1], sizeof states[0]) == 0);
    CHECK((u[2].loop == NULL) == d.amsgrad);
    if (u[2].loop != NULL && dtype == CDDP_F32) {
      cddp__fused_args a;
      memset(&a, 0, sizeof a);
      a.scalars = &u[2].scalars;
      a.mean = (float)u[2].scalars.sign / (float)ranks;
      a.clip = 1;
      for (k = 0; k < 3; k++) a.states[k] = (cddp__f32 *)(void *)u[2].states[k];
      for (k = 0; k < (size_t)ranks; k++) {
        a.gradients[k] = (cddp__f32 *)(void *)g[k];
        a.weights[k] = (cddp__f32 *)(void *)w[2][k];
      }
      cddp__fuse(u[2].loop, &a, ranks, N);
      for (k = 0; k < (size_t)ranks; k++) {
        CHECK(memcmp(w[0][0], w[2][k], N * size) == 0);
        memset(mean, 0, N * size);
        CHECK(memcmp(g[k], mean, N * size) == 0);
      }
      CHECK(memcmp(states[0], states[2], sizeof states[0]) == 0);
    }
    o->steps[0]++;
  }
  cddp_optim_destroy(o);
}

static void test_adamw_pieces(void) {
  int c, ranks;
  for (c = 0; c < ADAMW_CONFIGS; c++)
    for (ranks = 1; ranks <= 4; ranks *= 2) {
      adamw_pieces(CDDP_F32, c, ranks);
      if (ranks == 1) adamw_pieces(CDDP_F64, c, ranks);
    }
}

/* Settings of a parameter's own are those of an optimizer of its own; set_lr changes all rates. */
static void test_groups(void) {
  static const double scales[3] = {1, 0.25, 0}, decays[3] = {0, 0.1, 0.2};
  int adamw, i, step;
  for (adamw = 0; adamw < 2; adamw++) {
    float w[2][3] = {{1, 2, 3}, {1, 2, 3}}, g[3] = {0.5f, -0.25f, 1};
    cddp_param p[2][3];
    cddp_sgd_desc s;
    cddp_adamw_desc a;
    cddp_optim *all, *one[3];
    memset(p, 0, sizeof p);
    memset(&s, 0, sizeof s);
    memset(&a, 0, sizeof a);
    for (i = 0; i < 6; i++) {
      cddp_param *q = &p[i / 3][i % 3];
      q->data = &w[i / 3][i % 3], q->grad = &g[i % 3], q->count = 1;
    }
    s.lr = a.lr = 0.1, s.momentum = 0.9, s.weight_decay = a.weight_decay = 7;
    s.lr_scales = a.lr_scales = scales, s.weight_decays = a.weight_decays = decays;
    CHECK_OK(adamw ? cddp_adamw_create(&all, p[0], 3, &a) : cddp_sgd_create(&all, p[0], 3, &s));
    s.lr_scales = a.lr_scales = s.weight_decays = a.weight_decays = NULL;
    for (i = 0; i < 3; i++) {
      s.lr = a.lr = 0.1 * scales[i], s.weight_decay = a.weight_decay = decays[i];
      CHECK_OK(adamw ? cddp_adamw_create(&one[i], &p[1][i], 1, &a)
                     : cddp_sgd_create(&one[i], &p[1][i], 1, &s));
    }
    for (step = 0; step < 4; step++) {
      CHECK_OK(cddp_optim_step(all));
      for (i = 0; i < 3; i++) CHECK_OK(cddp_optim_step(one[i]));
      CHECK(memcmp(w[0], w[1], sizeof w[0]) == 0);
      CHECK_OK(cddp_optim_set_lr(all, 0.05));
      for (i = 0; i < 3; i++) CHECK_OK(cddp_optim_set_lr(one[i], 0.05 * scales[i]));
    }
    CHECK(w[0][0] != 1 && w[0][1] != 2 && w[0][2] == 3); /* the last one's rate is 0 */
    cddp_optim_destroy(all);
    for (i = 0; i < 3; i++) cddp_optim_destroy(one[i]);
  }
}

static cddp_result adamw_with(double lr, double beta1, double beta2, double eps, double decay) {
  cddp_adamw_desc d;
  cddp_optim *o;
  cddp_result r;
  memset(&d, 0, sizeof d);
  d.lr = lr, d.beta1 = beta1, d.beta2 = beta2, d.eps = eps, d.weight_decay = decay;
  r = cddp_adamw_create(&o, NULL, 0, &d);
  CHECK((r == CDDP_OK) == (o != NULL));
  cddp_optim_destroy(o);
  return r;
}

static void test_adamw_arguments(void) {
  static const double bad[2] = {1, -1};
  float w[2] = {1, 1};
  uint16_t half[2] = {0, 0};
  cddp_param p[2] = {{"a", w, w, 1, CDDP_F32}, {"b", half, half, 1, CDDP_BF16}};
  cddp_adamw_desc d;
  cddp_optim *o;
  CHECK_OK(adamw_with(0.1, 0, 0, 0, 0));
  CHECK_OK(adamw_with(0, 0.99, 0.99, 1, 1));
  CHECK_IS(adamw_with(-1, 0, 0, 0, 0), CDDP_INVALID_ARGUMENT);
  CHECK_IS(adamw_with(0.1, 1, 0, 0, 0), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "beta1 is 1") != NULL);
  CHECK_IS(adamw_with(0.1, 0, NAN, 0, 0), CDDP_INVALID_ARGUMENT);
  CHECK_IS(adamw_with(0.1, 0, -0.5, 0, 0), CDDP_INVALID_ARGUMENT);
  CHECK_IS(adamw_with(0.1, 0, 0, -1, 0), CDDP_INVALID_ARGUMENT);
  CHECK_IS(adamw_with(0.1, 0, 0, INFINITY, 0), CDDP_INVALID_ARGUMENT);
  CHECK_IS(adamw_with(0.1, 0, 0, 0, -1), CDDP_INVALID_ARGUMENT);
  memset(&d, 0, sizeof d);
  d.lr = 0.1;
  CHECK_IS(cddp_adamw_create(NULL, p, 1, &d), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_adamw_create(&o, p, 1, NULL), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_adamw_create(&o, p, 2, &d), CDDP_UNSUPPORTED);
  CHECK(o == NULL && strstr(cddp_error(), "\"b\" is bf16") != NULL);
  CHECK(strstr(cddp_error(), "copies") != NULL);
  d.lr_scales = bad;
  p[1] = p[0];
  p[1].name = "b";
  CHECK_IS(cddp_adamw_create(&o, p, 2, &d), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "lr_scales of parameter \"b\" is -1") != NULL);
  d.lr_scales = NULL, d.weight_decays = bad;
  CHECK_IS(cddp_adamw_create(&o, p, 2, &d), CDDP_INVALID_ARGUMENT);
}

static void test_learning_rate_and_zero(void) {
  float w[2] = {1.0f, 2.0f}, g[2] = {1.0f, 1.0f};
  cddp_param p;
  cddp_sgd_desc d;
  cddp_optim *s;
  memset(&p, 0, sizeof p);
  memset(&d, 0, sizeof d);
  p.data = w;
  p.grad = g;
  p.count = 2;
  CHECK_OK(cddp_sgd_create(&s, &p, 1, &d));
  CHECK_EQ(cddp_optim_lr(s), 0);
  CHECK_OK(cddp_optim_step(s));
  CHECK(w[0] == 1.0f && w[1] == 2.0f);
  CHECK_EQ(s->state_count, 0);
  CHECK_OK(cddp_optim_set_lr(s, 0.5));
  CHECK_EQ(cddp_optim_lr(s), 0.5);
  CHECK_OK(cddp_optim_step(s));
  CHECK(w[0] == 0.5f && w[1] == 1.5f);
  CHECK_IS(cddp_optim_set_lr(s, -1), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_optim_set_lr(s, NAN), CDDP_INVALID_ARGUMENT);
  CHECK_EQ(cddp_optim_lr(s), 0.5);
  CHECK_OK(cddp_optim_zero_grad(s));
  CHECK(g[0] == 0 && g[1] == 0);
  cddp_optim_destroy(s);
}

/* A parameter that no rank used keeps its weights and its momentum. */
static void test_unused(void) {
  float w[2] = {1.0f, 1.0f}, g[2] = {1.0f, 1.0f};
  unsigned char used[2] = {1, 0};
  cddp_param p[2];
  cddp_sgd_desc d;
  cddp_optim *s;
  int i;
  memset(p, 0, sizeof p);
  memset(&d, 0, sizeof d);
  for (i = 0; i < 2; i++) {
    p[i].data = &w[i];
    p[i].grad = &g[i];
    p[i].count = 1;
  }
  d.lr = 0.5;
  d.momentum = 0.5;
  d.dampening = 0.5;
  CHECK_OK(cddp_sgd_create(&s, p, 2, &d));
  s->used = used;
  CHECK_OK(cddp_optim_step(s));
  CHECK(w[0] == 0.5f && w[1] == 1.0f);
  CHECK(s->state[1] == NULL && s->steps[1] == 0);
  used[1] = 1;
  CHECK_OK(cddp_optim_step(s));
  CHECK(w[0] == 0.0f);
  CHECK(w[1] == 0.5f); /* its first gradient is not dampened */
  cddp_optim_destroy(s);
}

static int dropped;

static void drop(cddp_optim *s) {
  dropped++;
  s->shared_by = NULL;
}

/* While a cddp_ddp keeps the momentum in shares, a step of its own would use a stale one. */
static void test_shared_states(void) {
  cddp_sgd_desc d;
  cddp_optim *s;
  dropped = 0;
  memset(&d, 0, sizeof d);
  CHECK_OK(cddp_sgd_create(&s, NULL, 0, &d));
  s->unshare = drop;
  s->shared_by = (cddp_ddp *)(void *)s;
  CHECK_IS(cddp_optim_step(s), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "cddp_ddp_wait") != NULL);
  CHECK_EQ(dropped, 0);
  cddp_optim_destroy(s);
  CHECK_EQ(dropped, 1);
}

static cddp_result made_with(double lr, double momentum, double dampening, double decay,
                             bool nesterov) {
  cddp_sgd_desc d;
  cddp_optim *s;
  cddp_result r;
  memset(&d, 0, sizeof d);
  d.lr = lr;
  d.momentum = momentum;
  d.dampening = dampening;
  d.weight_decay = decay;
  d.nesterov = nesterov;
  r = cddp_sgd_create(&s, NULL, 0, &d);
  CHECK((r == CDDP_OK) == (s != NULL));
  cddp_optim_destroy(s);
  return r;
}

static void test_bad_arguments(void) {
  float w = 0, g = 0;
  cddp_param p;
  cddp_sgd_desc d;
  cddp_optim *s;
  memset(&d, 0, sizeof d);
  memset(&p, 0, sizeof p);
  CHECK_OK(made_with(0.1, 0.9, 0, 0.1, true));
  CHECK_IS(made_with(-0.1, 0, 0, 0, false), CDDP_INVALID_ARGUMENT);
  CHECK_IS(made_with(NAN, 0, 0, 0, false), CDDP_INVALID_ARGUMENT);
  CHECK_IS(made_with(0.1, -0.9, 0, 0, false), CDDP_INVALID_ARGUMENT);
  CHECK_IS(made_with(0.1, NAN, 0, 0, false), CDDP_INVALID_ARGUMENT);
  CHECK_IS(made_with(0.1, 0.9, NAN, 0, false), CDDP_INVALID_ARGUMENT);
  CHECK_IS(made_with(INFINITY, 0, 0, 0, false), CDDP_INVALID_ARGUMENT);
  CHECK_IS(made_with(0.1, INFINITY, 0, 0, false), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "momentum is inf") != NULL);
  CHECK_IS(made_with(0.1, 0.9, INFINITY, 0, false), CDDP_INVALID_ARGUMENT);
  CHECK_IS(made_with(0.1, 0, 0, INFINITY, false), CDDP_INVALID_ARGUMENT);
  CHECK_IS(made_with(0.1, 0, 0, -1, false), CDDP_INVALID_ARGUMENT);
  CHECK_IS(made_with(0.1, 0, 0, NAN, false), CDDP_INVALID_ARGUMENT);
  CHECK_IS(made_with(0.1, 0, 0, 0, true), CDDP_INVALID_ARGUMENT);
  CHECK_IS(made_with(0.1, 0.9, 0.1, 0, true), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_sgd_create(NULL, NULL, 0, &d), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_sgd_create(&s, NULL, 0, NULL), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_sgd_create(&s, NULL, 1, &d), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_sgd_create(&s, &p, -1, &d), CDDP_INVALID_ARGUMENT);
  p.name = "conv";
  p.count = 1;
  p.dtype = CDDP_I32;
  CHECK_IS(cddp_sgd_create(&s, &p, 1, &d), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "conv") != NULL);
  p.dtype = CDDP_F32;
  CHECK_OK(cddp_sgd_create(&s, &p, 1, &d));
  p.data = &w;
  CHECK_IS(cddp_optim_step(s), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "conv") != NULL && strstr(cddp_error(), "gradient") != NULL);
  CHECK_OK(cddp_optim_zero_grad(s));
  p.grad = &g;
  p.count = 2; /* the optimizer has states for one element */
  CHECK_IS(cddp_optim_step(s), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "now has 2 elements") != NULL);
  CHECK_IS(cddp_optim_write_copies(s), CDDP_INVALID_ARGUMENT);
  p.count = 1;
  p.dtype = CDDP_F64; /* longer states */
  CHECK_IS(cddp_optim_step(s), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "1 elements of type f64") != NULL);
  CHECK_IS(cddp_optim_write_copies(s), CDDP_INVALID_ARGUMENT);
  p.dtype = CDDP_I32;
  CHECK_IS(cddp_optim_step(s), CDDP_INVALID_ARGUMENT);
  p.dtype = CDDP_F32;
  p.data = NULL;
  CHECK_IS(cddp_optim_step(s), CDDP_INVALID_ARGUMENT);
  cddp_optim_destroy(s);
  CHECK_IS(cddp_optim_step(NULL), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_optim_zero_grad(NULL), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_optim_set_lr(NULL, 1), CDDP_INVALID_ARGUMENT);
  cddp_optim_destroy(NULL);
}

static void test_no_memory(void) {
  float w[2] = {1, 1}, g[2] = {1, 1};
  cddp_param p[2];
  cddp_sgd_desc d;
  cddp_optim *s;
  int i;
  memset(&d, 0, sizeof d);
  memset(p, 0, sizeof p);
  d.lr = 1;
  d.momentum = 1;
  for (i = 0; i < 2; i++) {
    p[i].data = &w[i];
    p[i].grad = &g[i];
    p[i].count = 1;
  }
  CHECK_OK(cddp_sgd_create(&s, p, 2, &d));
  mallocs_left = 1; /* one of the two momentum buffers: nothing may have changed */
  CHECK_IS(cddp_optim_step(s), CDDP_OUT_OF_MEMORY);
  CHECK(w[0] == 1 && w[1] == 1);
  mallocs_left = 1L << 40;
  CHECK_OK(cddp_optim_step(s));
  CHECK(w[0] == 0 && w[1] == 0);
  cddp_optim_destroy(s);
}

/* The one loop of a data-parallel step is the mean, the update, the others' weights and zeros. */
static void sweep_as(int ranks, size_t n, double decay, double dampening,
                     bool maximize) {
  enum { MOST = 2100 };
  static float g[4][MOST], w[4][MOST], m[MOST], mean[MOST], want_w[MOST], want_m[MOST];
  static const float odd[] = {0.0f, -0.0f, 1e-42f, -3e38f, 3e38f, 1e-30f};
  const void *srcs[4];
  cddp_sgd_desc desc;
  cddp_param p = {NULL, w, NULL, MOST, CDDP_F32};
  cddp__update u;
  cddp_optim *o;
  cddp__fused_args s;
  uint32_t state = 12345;
  size_t i;
  int k;
  memset(&desc, 0, sizeof desc);
  desc.lr = 0.1;
  desc.momentum = 0.9;
  desc.dampening = dampening;
  desc.weight_decay = decay;
  desc.maximize = maximize;
  CHECK_OK(cddp_sgd_create(&o, &p, 1, &desc));
  u = cddp__update_of(o, 0, o->state, o->count);
  CHECK(u.loop == NULL); /* the first step has no momentum */
  o->steps[0] = 1;
  u = cddp__update_of(o, 0, o->state, o->count);
  u.states[0] = (char *)want_m;
  s.scalars = &u.scalars;
  s.mean = (maximize ? -1.0f : 1.0f) / (float)ranks;
  s.clip = 1;
  for (i = 0; i < MOST; i++) {
    for (k = 0; k < 4; k++) {
      state = state * 1664525u + 1013904223u;
      g[k][i] = state >> 28 == 0 ? odd[(state >> 8) % 6] : (float)(int32_t)state * 0x1p-31f;
      w[k][i] = 7;
    }
    state = state * 1664525u + 1013904223u;
    m[i] = want_m[i] = (float)(int32_t)state * 0x1p-33f;
    w[0][i] = want_w[i] = (float)(int32_t)(state * 2654435761u) * 0x1p-30f;
  }
  for (k = 0; k < ranks; k++) srcs[k] = s.gradients[k] = (cddp__f32 *)g[k];
  for (k = 0; k < ranks; k++) s.weights[k] = (cddp__f32 *)w[k];
  cddp__reduce(mean, srcs, ranks, n, CDDP_F32, CDDP_AVG);
  cddp__update_run(&u, 0, want_w, mean, n);
  s.states[0] = (cddp__f32 *)m;
  cddp__fuse(u.loop, &s, ranks, n);
  cddp_optim_destroy(o);
  CHECK(memcmp(m, want_m, sizeof m) == 0);
  for (k = 0; k < ranks; k++) {
    CHECK(memcmp(w[k], want_w, n * sizeof(float)) == 0);
    for (i = 0; i < n; i++)
      if (g[k][i] != 0 || signbit(g[k][i])) break;
    CHECK_EQ(i, n);
    CHECK(w[k][n] == (k == 0 ? want_w[n] : 7));
  }
}

static void test_sweep(void) {
  static const size_t sizes[] = {0, 1, 7, 16, 33, 1000, 2048, 2099};
  size_t i;
  int ranks;
  for (i = 0; i < sizeof sizes / sizeof *sizes; i++)
    for (ranks = 1; ranks <= 4; ranks *= 2) {
      sweep_as(ranks, sizes[i], 0, 0, false);
      sweep_as(ranks, sizes[i], 1e-4, 0, false);
      sweep_as(ranks, sizes[i], 0, 0.25, true);
      sweep_as(ranks, sizes[i], 1e-4, 0.25, false);
    }
}

int main(void) {
  int isa;
  for (isa = test_best_isa(); isa >= CDDP__ISA_BASE; isa--) {
    test_use_isa(isa);
    RUN(test_of_pytorch);
    RUN(test_adamw_of_pytorch);
    RUN(test_check_values);
    RUN(test_copies);
    RUN(test_pieces);
    RUN(test_adamw_pieces);
    RUN(test_groups);
    RUN(test_adamw_arguments);
    RUN(test_learning_rate_and_zero);
    RUN(test_unused);
    RUN(test_shared_states);
    RUN(test_bad_arguments);
    RUN(test_no_memory);
    RUN(test_sweep);
  }
  return TEST_END();
}
