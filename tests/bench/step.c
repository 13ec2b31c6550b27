/* step.c - times a training step: the network 784-2048-2048-10, 128 images a rank, 2 ranks, SGD
   with momentum. Prints lines 'step NAME MILLISECONDS'; the names:
     alone         the ranks do not communicate: each has all of the SGD to itself
     lockstep      the same, but they wait for each other before and after the SGD, as ranks that
                   step together must: what is above alone is the unevenness of the cores
     ddp_step      cddp_ddp_step
     ddp_wait      cddp_ddp_wait, cddp_optim_step, cddp_optim_zero_grad
     elastic       cddp_ddp_step of an elastic model, a shard a rank
   each with its parts (.forward .backward .update), and without the network around it
     update        cddp_ddp_ready for all parameters and cddp_ddp_step
     update_floor  the same bytes: sum, SGD, publish, zero, by a plain loop on both cores. With
                   AdamW two states and no arithmetic that could take longer than the bytes
   step.c is compiled with -O3 -march=native, which only the loop of update_floor needs: cddp.h
   picks its own. Options: --rounds N (of which the median counts), --steps N (in a round), --optim
   adamw, --clip NORM (of cddp_ddp_step alone), --grads own (the program's, in one block of
   cddp_alloc, in place of those that cddp_ddp_create places).
   --lost STEP: instead of all this trains an elastic model for --steps, rank 1 is killed in that
   step's forward (-1: never) and started again; prints the whole time, 'step lost SECONDS'. */

#define CDDP_IMPLEMENTATION
#include "../../cddp.h"
#include "bench.h"
#include <cblas.h>
#include <signal.h>

#if CDDP_VERSION < 300 /* v0.2 is compared with what is here */
#define cddp_optim cddp_sgd
#define cddp_optim_step cddp_sgd_step
#define cddp_optim_zero_grad cddp_sgd_zero_grad
#define cddp_optim_destroy cddp_sgd_destroy
#endif

enum { RANKS = 2, BATCH = 128, IN = 784, HIDDEN = 2048, OUT = 10, PARAMS = 6, ROUNDS = 64 };
#if CDDP_VERSION < 300
enum { ALONE, LOCKSTEP, STEP, WAIT, MODES, ELASTIC };
#else
enum { ALONE, LOCKSTEP, STEP, WAIT, ELASTIC, MODES };
#endif
static const char *const mode_names[] = {"alone", "lockstep", "ddp_step", "ddp_wait",
                                         "elastic"};
static int rounds = 7, steps = 10;
static bool adamw;
static bool own_grads;
static double clip;
static int lost = -2; /* --lost */

static const size_t param_size[PARAMS] = {(size_t)HIDDEN *IN, HIDDEN, (size_t)HIDDEN *HIDDEN,
                                          HIDDEN,             (size_t)OUT *HIDDEN, OUT};
static const char *const param_name[PARAMS] = {"w1", "b1", "w2", "b2", "w3", "b3"};
#define TOTAL ((size_t)HIDDEN * IN + HIDDEN + (size_t)HIDDEN * HIDDEN + HIDDEN + OUT * HIDDEN + OUT)

typedef struct model {
  cddp_param p[PARAMS];
  float *grads;  /* own_grads: of all parameters, one after the other */
  cddp_ddp *ddp; /* NULL: alone */
  cddp_optim *sgd;
} model;

static cddp_group *group;
static int rank;
static float *x, *h1, *h2, *y, *d1, *d2;
static int label[BATCH];
static double taken[MODES][4][ROUNDS]; /* whole step, forward, backward, update; s */

static void check(cddp_result r) {
  if (r == CDDP_OK) return;
  fprintf(stderr, "step: %s\n", cddp_error());
  exit(1);
}

static double greatest(double v) {
  check(cddp_all_reduce(group, &v, 1, CDDP_F64, CDDP_MAX, NULL));
  return v;
}

static float *fresh(size_t count) { /* on huge pages, as what cddp_alloc gives */
  char *p = bench_map(count * 4, false);
  bench_touch(p, count * 4, true);
  return (float *)(void *)p;
}

static float noise(uint64_t *state) { /* -1 .. 1 */
  *state = *state * 6364136223846793005ull + 1442695040888963407ull;
  return (float)(int32_t)(*state >> 32) * 0x1p-31f;
}

/* --- the network: weights are [out][in] --- */

#define MATMUL(at, bt, m, n, k, a, lda, b, ldb, c, beta)                                           \
  cblas_sgemm(CblasRowMajor, Cblas##at, Cblas##bt, m, n, k, 1, a, lda, b, ldb, beta, c, n)

static void layer(const float *in, int ins, const float *w, const float *b, float *out, int outs,
                  bool relu) {
  int i, j;
  for (i = 0; i < BATCH; i++) memcpy(out + (size_t)i * (size_t)outs, b, (size_t)outs * 4);
  MATMUL(NoTrans, Trans, BATCH, outs, ins, in, ins, w, ins, out, 1);
  for (i = 0; relu && i < BATCH; i++) {
    float *row = out + (size_t)i * (size_t)outs;
    for (j = 0; j < outs; j++) row[j] = row[j] > 0 ? row[j] : 0;
  }
}

static void forward(const model *m) {
  layer(x, IN, m->p[0].data, m->p[1].data, h1, HIDDEN, true);
  layer(h1, HIDDEN, m->p[2].data, m->p[3].data, h2, HIDDEN, true);
  layer(h2, HIDDEN, m->p[4].data, m->p[5].data, y, OUT, false);
}

static void ready(model *m, int i) {
  if (m->ddp != NULL) check(cddp_ddp_ready(m->ddp, i));
}

/* Adds to the gradients of weights w and w + 1 what d, the loss's derivative by out, says. */
static void layer_back(model *m, int w, const float *in, int ins, const float *d, int outs) {
  float *db = m->p[w + 1].grad;
  int i, j;
  for (i = 0; i < BATCH; i++) {
    const float *row = d + (size_t)i * (size_t)outs;
    for (j = 0; j < outs; j++) db[j] += row[j];
  }
  ready(m, w + 1);
  MATMUL(Trans, NoTrans, outs, ins, BATCH, d, outs, in, ins, (float *)m->p[w].grad, 1);
  ready(m, w);
}

/* to = d times the weights, where the layer below had let it through */
static void through(const float *d, int outs, const float *w, int ins, const float *h, float *to) {
  size_t i;
  MATMUL(NoTrans, NoTrans, BATCH, ins, outs, d, outs, w, ins, to, 0);
  for (i = 0; i < (size_t)BATCH * (size_t)ins; i++) to[i] = h[i] > 0 ? to[i] : 0;
}

static void backward(model *m) {
  int i, j;
  for (i = 0; i < BATCH; i++) { /* softmax, cross-entropy */
    float *row = y + i * OUT, most = row[0], sum = 0;
    for (j = 1; j < OUT; j++) most = row[j] > most ? row[j] : most;
    for (j = 0; j < OUT; j++) sum += row[j] = expf(row[j] - most);
    for (j = 0; j < OUT; j++) row[j] = (row[j] / sum - (j == label[i] ? 1 : 0)) / BATCH;
  }
  layer_back(m, 4, h2, HIDDEN, y, OUT);
  through(y, OUT, m->p[4].data, HIDDEN, h2, d2);
  layer_back(m, 2, h1, HIDDEN, d2, HIDDEN);
  through(d2, HIDDEN, m->p[2].data, HIDDEN, h1, d1);
  layer_back(m, 0, x, IN, d1, HIDDEN);
}

static void update(model *m, int mode) {
  if (mode == STEP || mode == ELASTIC) {
    check(cddp_ddp_step(m->ddp, m->sgd));
    return;
  }
  if (mode == LOCKSTEP) check(cddp_barrier(group));
  if (mode == WAIT) check(cddp_ddp_wait(m->ddp));
  check(cddp_optim_step(m->sgd));
  check(cddp_optim_zero_grad(m->sgd));
  if (mode == LOCKSTEP) check(cddp_barrier(group));
}

static void model_init(model *m, int mode) {
  cddp_sgd_desc o;
  cddp_ddp_desc d;
  uint64_t seed = 42;
  int i;
  size_t k, at;
  memset(m, 0, sizeof *m);
  memset(&o, 0, sizeof o);
  o.lr = 0.01;
  o.momentum = 0.9;
  if (own_grads && mode > LOCKSTEP) {
    m->grads = cddp_alloc(group, TOTAL * 4);
    if (m->grads == NULL) check(CDDP_OUT_OF_MEMORY);
    memset(m->grads, 0, TOTAL * 4);
  }
  for (i = 0, at = 0; i < PARAMS; at += param_size[i++]) {
    float *w = mode <= LOCKSTEP ? fresh(param_size[i]) : cddp_alloc(group, param_size[i] * 4);
    if (w == NULL) check(CDDP_OUT_OF_MEMORY);
    for (k = 0; k < param_size[i]; k++) w[k] = i % 2 ? 0 : noise(&seed) * 0.04f;
    m->p[i].name = param_name[i];
    m->p[i].data = w;
    m->p[i].grad = mode <= LOCKSTEP ? fresh(param_size[i]) : NULL;
    if (m->grads != NULL) m->p[i].grad = m->grads + at;
    m->p[i].count = param_size[i];
  }
  memset(&d, 0, sizeof d);
#if CDDP_VERSION >= 300
  d.max_grad_norm = mode == ELASTIC ? 0 : clip;
  d.elastic = mode == ELASTIC;
  d.shards = mode == ELASTIC ? RANKS : 0;
#endif
  if (mode > LOCKSTEP) check(cddp_ddp_create(&m->ddp, group, m->p, PARAMS, &d));
#if CDDP_VERSION >= 300
  if (adamw) {
    cddp_adamw_desc a;
    memset(&a, 0, sizeof a);
    a.lr = 0.001;
    a.weight_decay = 0.01;
    check(cddp_adamw_create(&m->sgd, m->p, PARAMS, &a));
    return;
  }
#endif
  check(cddp_sgd_create(&m->sgd, m->p, PARAMS, &o));
}

static void train(model *m, int mode, int round) { /* round -1: to warm up */
  double sum[4] = {0, 0, 0, 0}, t0, t1, t2, t3;
  int i, shard = 0;
  check(cddp_barrier(group));
  for (i = 0; i < steps; i++) {
    t0 = bench_now();
#if CDDP_VERSION >= 300
    if (mode == ELASTIC && !cddp_ddp_next_shard(m->ddp, &shard)) check(CDDP_ABORTED);
#endif
    forward(m);
    t1 = bench_now();
    backward(m);
    t2 = bench_now();
#if CDDP_VERSION >= 300
    while (mode == ELASTIC && cddp_ddp_next_shard(m->ddp, &shard)) check(CDDP_ABORTED);
#endif
    update(m, mode);
    t3 = bench_now();
    sum[0] += t3 - t0, sum[1] += t1 - t0, sum[2] += t2 - t1, sum[3] += t3 - t2;
  }
  for (i = 0; i < 4; i++) {
    double slowest = greatest(sum[i] / steps);
    if (round >= 0) taken[mode][i][round] = slowest;
  }
}

/* --- the update alone, and its floor --- */

static struct plain {
  bench_flag flags[RANKS];
  float *weights[RANKS], *grads[RANKS], *momentum, *squares; /* squares: AdamW's second state */
  uint32_t seq[RANKS];
} *plain;

static void plain_map(void) { /* before the fork: all ranks have it at the same address */
  int r;
  plain = (struct plain *)(void *)bench_map(sizeof *plain, true);
  for (r = 0; r < RANKS; r++) {
    plain->weights[r] = (float *)(void *)bench_map(TOTAL * 4, true);
    plain->grads[r] = (float *)(void *)bench_map(TOTAL * 4, true);
  }
  plain->momentum = (float *)(void *)bench_map(TOTAL * 4, true);
  plain->squares = (float *)(void *)bench_map(TOTAL * 4, true);
}

static void plain_touch(void) {
  size_t half = TOTAL / 2 / BENCH_HUGE * BENCH_HUGE;
  bench_touch((char *)plain->weights[rank], TOTAL * 4, true);
  bench_touch((char *)plain->grads[rank], TOTAL * 4, true);
  bench_touch((char *)plain->momentum + (rank ? half * 4 : 0), half * 4, true);
  if (adamw) bench_touch((char *)plain->squares + (rank ? half * 4 : 0), half * 4, true);
}

static void plain_loop(float *restrict w0, float *restrict w1, float *restrict g0,
                       float *restrict g1, float *restrict m, size_t n) {
  size_t i;
  for (i = 0; i < n; i++) {
    float g = (g0[i] + g1[i]) * 0.5f, v = 0.9f * m[i] + g, w = w0[i] - 0.01f * v;
    m[i] = v;
    w0[i] = w;
    w1[i] = w;
    g0[i] = 0;
    g1[i] = 0;
  }
}

static void plain_adamw(float *restrict w0, float *restrict w1, float *restrict g0,
                        float *restrict g1, float *restrict m, float *restrict q, size_t n) {
  size_t i;
  for (i = 0; i < n; i++) {
    float g = (g0[i] + g1[i]) * 0.5f, v = 0.9f * m[i] + 0.1f * g, s = 0.999f * q[i] + g * g;
    float w = w0[i] - 0.01f * v * s;
    m[i] = v;
    q[i] = s;
    w0[i] = w;
    w1[i] = w;
    g0[i] = 0;
    g1[i] = 0;
  }
}

static double plain_update(void) {
  size_t begin = rank == 0 ? 0 : TOTAL / 32 * 16, end = rank == 0 ? TOTAL / 32 * 16 : TOTAL;
  double start = bench_now();
  bench_flags(plain->flags, RANKS, rank, ++plain->seq[rank]);
  if (adamw)
    plain_adamw(plain->weights[0] + begin, plain->weights[1] + begin, plain->grads[0] + begin,
                plain->grads[1] + begin, plain->momentum + begin, plain->squares + begin,
                end - begin);
  else
    plain_loop(plain->weights[0] + begin, plain->weights[1] + begin, plain->grads[0] + begin,
               plain->grads[1] + begin, plain->momentum + begin, end - begin);
  bench_flags(plain->flags, RANKS, rank, ++plain->seq[rank]);
  return bench_now() - start;
}

static double cddp_update(model *m) {
  double start = bench_now();
  int i;
  for (i = PARAMS - 1; i >= 0; i--) ready(m, i);
  update(m, STEP);
  return bench_now() - start;
}

static void compare_updates(model *m) {
  double t[2][ROUNDS], all[2][ROUNDS];
  int i, k, which;
  for (i = 0; i < rounds; i++) {
    for (which = 0; which < 2; which++) {
      for (k = 0; k < 20; k++) {
        check(cddp_barrier(group));
        t[which][k] = greatest(which == 0 ? cddp_update(m) : plain_update());
      }
      all[which][i] = bench_median(t[which], 20);
    }
  }
  if (rank != 0) return;
  printf("step update %.3f\n", bench_median(all[0], rounds) * 1e3);
  printf("step update_floor %.3f\n", bench_median(all[1], rounds) * 1e3);
}

/* --- */

static void report(void) {
  static const char *const part[4] = {"", ".forward", ".backward", ".update"};
  int mode, i;
  for (mode = 0; mode < MODES; mode++) {
    for (i = 0; i < 4; i++)
      printf("step %s%s %.3f\n", mode_names[mode], part[i],
             bench_median(taken[mode][i], rounds) * 1e3);
  }
}

static void begin(int r) {
  uint64_t seed = (uint64_t)r + 7;
  int i;
  rank = r;
  check(cddp_init(&group, NULL));
  bench_pin(rank, RANKS);
  openblas_set_num_threads(1);
  x = fresh(BATCH * IN);
  h1 = fresh(BATCH * HIDDEN), h2 = fresh(BATCH * HIDDEN), y = fresh(BATCH * OUT);
  d1 = fresh(BATCH * HIDDEN), d2 = fresh(BATCH * HIDDEN);
  for (i = 0; i < BATCH * IN; i++) x[i] = noise(&seed);
  for (i = 0; i < BATCH; i++) label[i] = (int)((noise(&seed) + 1) * 4.99f);
}

#if CDDP_VERSION >= 300
static int as_elastic_rank(int r, void *arg) {
  model m;
  int t, shard;
  (void)arg;
  begin(r);
  model_init(&m, ELASTIC);
  for (t = (int)cddp_ddp_steps(m.ddp); t < steps; t = (int)cddp_ddp_steps(m.ddp)) {
    while (cddp_ddp_next_shard(m.ddp, &shard)) {
      forward(&m);
      if (t == lost && rank == 1 && getenv("CDDP_JOIN") == NULL) raise(SIGKILL);
      backward(&m);
    }
    update(&m, ELASTIC);
  }
  cddp_optim_destroy(m.sgd);
  cddp_ddp_destroy(m.ddp);
  cddp_destroy(group);
  return 0;
}
#endif

static int as_rank(int r, void *arg) {
  model models[MODES];
  size_t i;
  int mode, round;
  (void)arg;
  begin(r);
  for (mode = 0; mode < MODES; mode++) model_init(&models[mode], mode);
  plain_touch();
  for (round = -1; round < rounds; round++) {
    for (mode = 0; mode < MODES; mode++) train(&models[mode], mode, round);
  }
  if (rank == 0) report();
  compare_updates(&models[STEP]);
  for (mode = 0; mode < MODES; mode++) {
    cddp_optim_destroy(models[mode].sgd);
    cddp_ddp_destroy(models[mode].ddp);
    for (i = 0; mode > LOCKSTEP && i < PARAMS; i++) cddp_free(group, models[mode].p[i].data);
    cddp_free(group, models[mode].grads);
  }
  cddp_destroy(group);
  return 0;
}

int main(int argc, char **argv) {
  int i;
  for (i = 1; i + 1 < argc; i += 2) {
    if (strcmp(argv[i], "--rounds") == 0) rounds = atoi(argv[i + 1]);
    if (strcmp(argv[i], "--steps") == 0) steps = atoi(argv[i + 1]);
    if (strcmp(argv[i], "--clip") == 0) clip = atof(argv[i + 1]);
    if (strcmp(argv[i], "--lost") == 0) lost = atoi(argv[i + 1]);
    if (strcmp(argv[i], "--grads") == 0) own_grads = strcmp(argv[i + 1], "own") == 0;
    if (strcmp(argv[i], "--optim") == 0) adamw = strcmp(argv[i + 1], "adamw") == 0;
  }
  if (rounds < 1 || rounds > ROUNDS || steps < 1) return 2;
#if CDDP_VERSION >= 300
  if (lost >= -1) {
    double start = bench_now();
    check(cddp_spawn_elastic(as_elastic_rank, NULL, RANKS, 1));
    printf("step lost %.3f\n", bench_now() - start);
    return 0;
  }
#endif
  plain_map();
  check(cddp_spawn(as_rank, NULL, RANKS));
  return 0;
}
