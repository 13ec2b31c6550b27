/* powersgd.c - gradients compressed by a communication hook: PowerSGD, R = 1 to 4.

     cc -O2 examples/powersgd.c -o powersgd -lpthread -lm
     ./powersgd                                 4 ranks, as child processes
     mpirun -n 4 ./powersgd                     4 ranks, started by mpirun, srun or torchrun

   PowerSGD (Vogels et al., 2019) sends a gradient matrix M[n][w] as two thin ones, P[n][R] and
   Q[w][R]. Their product P Q^T is close to M:
     1. M = gradient + error of the last step        nothing is lost, only delayed
     2. P = mean over ranks of M Q                   an all_reduce
     3. P's columns are made orthonormal             by each rank, with the same bits
     4. Q = mean over ranks of M^T P                 an all_reduce
     5. gradient = P Q^T, error = M - P Q^T
   Like PyTorch's powerSGD_hook. It has matrices only: average a vector as it is, by all_reduce.

   The example trains without compression, then with R = 1, 2 and 4, and prints the bytes that each
   rank passed to all_reduce and the loss. It fails if a loss is far above the first. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IN = 64, OUT = 48, PARAMS = 2, BATCH = 16, STEPS = 400, MAX_R = 4 };
static const int rows[PARAMS] = {OUT, OUT}, columns[PARAMS] = {IN, IN};
#define TRY(call) \
  do { \
    if ((call) != CDDP_OK) return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1; \
  } while (0)

typedef struct power_sgd { /* the hook's state */
  int r;                   /* 0: gradients are sent as they are */
  size_t sent;             /* bytes given to all_reduce */
  float error[PARAMS][OUT * IN];
  float q[PARAMS][IN * MAX_R]; /* the last step's is the first guess of the next */
  float p[OUT * MAX_R];
} power_sgd;

/* Uniform in -1 .. 1, the same on every rank: a hash of the arguments (splitmix64). */
static float noise(uint64_t stream, uint64_t index) {
  uint64_t z = (stream << 32) + index * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (float)((z ^ (z >> 31)) >> 40) / 8388608.0f - 1.0f;
}

static cddp_result average(power_sgd *state, cddp_group *g, float *x, int n) {
  state->sent += (size_t)n * sizeof *x;
  return cddp_all_reduce(g, x, (size_t)n, CDDP_F32, CDDP_AVG, NULL);
}

/* Makes the columns of p[n][r] orthonormal, by Gram and Schmidt's method. */
static void orthonormalize(float *p, int n, int r) {
  for (int k = 0; k < r; k++) {
    double norm = 1e-12;
    for (int j = 0; j < k; j++) {
      double dot = 0;
      for (int i = 0; i < n; i++) dot += (double)p[i * r + k] * (double)p[i * r + j];
      for (int i = 0; i < n; i++) p[i * r + k] -= (float)dot * p[i * r + j];
    }
    for (int i = 0; i < n; i++) norm += (double)p[i * r + k] * (double)p[i * r + k];
    for (int i = 0; i < n; i++) p[i * r + k] /= (float)sqrt(norm);
  }
}

/* y[n][r] = m x for x[w][r]; turn: y[w][r] = m^T x for x[n][r]. */
static void multiply(const float *m, const float *x, float *y, int n, int w, int r, bool turn) {
  memset(y, 0, (size_t)((turn ? w : n) * r) * sizeof *y);
  for (int i = 0; i < n; i++)
    for (int j = 0; j < w; j++)
      for (int k = 0; k < r; k++)
        y[(turn ? j : i) * r + k] += m[i * w + j] * x[(turn ? i : j) * r + k];
}

/* M = P Q^T; the error is what M loses. */
static void expand(float *m, float *error, const float *p, const float *q, int n, int w, int r) {
  for (int i = 0; i < n; i++)
    for (int j = 0; j < w; j++) {
      error[i * w + j] = m[i * w + j];
      m[i * w + j] = 0;
      for (int k = 0; k < r; k++) m[i * w + j] += p[i * r + k] * q[j * r + k];
      error[i * w + j] -= m[i * w + j];
    }
}

/* The hook. Each parameter begins at a multiple of 64 bytes in the bucket. */
static cddp_result compress(cddp_bucket *bucket, void *user_data) {
  power_sgd *state = (power_sgd *)user_data;
  float *m = (float *)bucket->data;
  cddp_result result = CDDP_OK;
  int r = state->r;
  if (r == 0) return average(state, bucket->group, m, (int)bucket->count);
  for (int i = 0; i < bucket->param_count && result == CDDP_OK; i++) {
    int param = bucket->params[i], n = rows[param], w = columns[param];
    float *p = state->p, *q = state->q[param], *error = state->error[param];
    for (int k = 0; k < n * w; k++) m[k] += error[k];
    multiply(m, q, p, n, w, r, false);
    if ((result = average(state, bucket->group, p, n * r)) != CDDP_OK) return result;
    orthonormalize(p, n, r);
    multiply(m, p, q, n, w, r, true);
    result = average(state, bucket->group, q, w * r);
    expand(m, error, p, q, n, w, r);
    m += (n * w + 15) / 16 * 16;
  }
  return result;
}

/* The model is y = W0 x + W1 x^2. Adds to the gradients those of BATCH samples from `first` on;
   returns their mean loss. */
static double run_batch(float (*w)[OUT * IN], float (*dw)[OUT * IN], int first) {
  double loss = 0;
  for (int s = first; s < first + BATCH; s++) {
    float x[PARAMS][IN];
    for (int i = 0; i < IN; i++) x[0][i] = noise(1, (uint64_t)(s * IN + i));
    for (int i = 0; i < IN; i++) x[1][i] = x[0][i] * x[0][i];
    for (int o = 0; o < OUT; o++) {
      float error = -sinf(3 * x[0][o % IN] + x[0][(o + 1) % IN]); /* the label */
      for (int p = 0; p < PARAMS; p++)
        for (int i = 0; i < IN; i++) error += w[p][o * IN + i] * x[p][i];
      loss += (double)(error * error) / (OUT * BATCH);
      for (int p = 0; p < PARAMS; p++)
        for (int i = 0; i < IN; i++) dw[p][o * IN + i] += 2 * error * x[p][i] / (OUT * BATCH);
    }
  }
  return loss;
}

/* Trains a model; *loss is a mean over the last steps, of all ranks. */
static int train_model(cddp_group *g, int r, double *loss, size_t *sent) {
  static float w[PARAMS][OUT * IN], dw[PARAMS][OUT * IN]; /* cddp_ddp_step zeroes dw */
  static power_sgd state;
  cddp_param params[PARAMS];
  cddp_ddp_desc desc = {0};
  cddp_sgd_desc rule = {0};
  cddp_ddp *ddp;
  cddp_optim *sgd;
  int rank = cddp_rank(g);
  memset(w, 0, sizeof w);
  memset(&state, 0, sizeof state);
  state.r = r;
  for (int i = 0; i < PARAMS; i++) {
    params[i] = (cddp_param){NULL, w[i], dw[i], (size_t)(rows[i] * columns[i]), CDDP_F32};
    for (int k = 0; k < columns[i] * r; k++) state.q[i][k] = noise(2, (uint64_t)k);
  }
  desc.comm_hook = compress;
  desc.comm_hook_data = &state;
  rule.lr = 0.2;
  rule.momentum = 0.9;
  TRY(cddp_ddp_create(&ddp, g, params, PARAMS, &desc));
  TRY(cddp_sgd_create(&sgd, params, PARAMS, &rule));
  *loss = 0;
  for (int step = 0; step < STEPS; step++) {
    *loss = 0.95 * *loss + 0.05 * run_batch(w, dw, (step * cddp_world_size(g) + rank) * BATCH);
    for (int i = PARAMS - 1; i >= 0; i--) TRY(cddp_ddp_ready(ddp, i));
    TRY(cddp_ddp_step(ddp, sgd));
  }
  TRY(cddp_all_reduce(g, loss, 1, CDDP_F64, CDDP_AVG, NULL));
  *sent = state.sent;
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  return 0;
}

static int train(int rank, void *arg) {
  double loss, first_loss = 0;
  size_t sent;
  bool failed = false;
  cddp_group *g;
  (void)arg;
  TRY(cddp_init(&g, NULL));
  for (int r = 0; r <= MAX_R; r = r == 0 ? 1 : 2 * r) {
    if (train_model(g, r, &loss, &sent)) return 1;
    if (r == 0) first_loss = loss;
    failed = failed || !(loss < 1.25 * first_loss);
    if (rank == 0)
      printf("R = %d: %8zu bytes (%5.1f %%), loss %.4f%s\n", r, sent,
             100 * (double)sent / (4.0 * STEPS * PARAMS * OUT * IN), loss, failed ? " (!)" : "");
  }
  cddp_destroy(g);
  return failed;
}

int main(int argc, char **argv) {
  int ranks = argc == 3 && strcmp(argv[1], "-n") == 0 ? atoi(argv[2]) : argc == 1 ? 4 : 0;
  bool help = argc == 2 && strcmp(argv[1], "--help") == 0;
  if (ranks < 1) {
    fprintf(help ? stdout : stderr, "usage: %s [-n N]: N ranks, as child processes (4)\n", argv[0]);
    return help ? 0 : 2;
  }
  setvbuf(stdout, NULL, _IOLBF, 0); /* whole lines, also into a file that the ranks share */
  int rank = cddp_launcher_rank(); /* of torchrun, mpirun, srun, ...; or -1 */
  if (rank == 0 && argc > 1)
    fprintf(stderr, "-n %d is ignored: the launcher sets the number of ranks\n", ranks);
  if (rank >= 0) return train(rank, NULL);
  if (cddp_spawn(train, NULL, ranks) == CDDP_OK) return 0; /* no launcher: forks the ranks */
  fprintf(stderr, "%s\n", cddp_error());
  return 1;
}
