/* sync_batchnorm.c - batch normalization over the batches of all ranks, forward and backward.

     cc -O2 examples/sync_batchnorm.c -o sync_batchnorm -lpthread -lm
     ./sync_batchnorm                           4 ranks, as child processes
     ./sync_batchnorm -n 3                      3 ranks
     mpirun -n 4 ./sync_batchnorm               4 ranks, started by mpirun, srun or torchrun

   Like torch.nn.SyncBatchNorm, the layer takes mean and variance over all ranks, by one all_reduce
   in the forward pass and one in the backward pass. The ranks' batches can differ in size.

   The model is Linear and BatchNorm. Rank 0 also trains it alone, on the whole batch. The
   example fails if a weight differs by more than rounding. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IN = 12, CHANNELS = 16, BATCH = 24, MAX_BATCH = 4096, STEPS = 60 };

#define TRY(call) \
  do { \
    if ((call) != CDDP_OK) return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1; \
  } while (0)

enum { WEIGHT, GAMMA, BETA, PARAMS };
static const size_t counts[PARAMS] = {CHANNELS * IN, CHANNELS, CHANNELS};
typedef struct model {
  float data[PARAMS][CHANNELS * IN], grad[PARAMS][CHANNELS * IN];
} model;

typedef struct activations {
  float x[MAX_BATCH][IN], label[MAX_BATCH][CHANNELS];
  float a[MAX_BATCH][CHANNELS];          /* output of Linear, then of BatchNorm, then gradients */
  float normalized[MAX_BATCH][CHANNELS]; /* (a - mean) / standard deviation */
  double inverse_std[CHANNELS], total;   /* total: samples of all ranks */
} activations;

/* Uniform in -1 .. 1, the same on every rank: a hash of the arguments (splitmix64). */
static float noise(uint64_t stream, uint64_t index) {
  uint64_t z = (stream << 32) + index * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (float)((z ^ (z >> 31)) >> 40) / 8388608.0f - 1.0f;
}

static void model_init(model *m) { /* all else is zero */
  for (int i = 0; i < CHANNELS * IN; i++) m->data[WEIGHT][i] = noise(1, (uint64_t)i);
  for (int c = 0; c < CHANNELS; c++) m->data[GAMMA][c] = 1;
}

/* Normalizes a[batch][CHANNELS] by the mean and variance over the batches of all ranks of g. With g
   NULL this batch is the whole. */
static cddp_result batchnorm_forward(cddp_group *g, activations *t, const float *gamma,
                                     const float *beta, int batch) {
  double sums[2 * CHANNELS + 1] = {0}; /* of a, of its squares, and the number of samples */
  cddp_result r = CDDP_OK;
  for (int s = 0; s < batch; s++)
    for (int c = 0; c < CHANNELS; c++) {
      sums[c] += (double)t->a[s][c];
      sums[CHANNELS + c] += (double)t->a[s][c] * (double)t->a[s][c];
    }
  sums[2 * CHANNELS] = batch;
  if (g) r = cddp_all_reduce(g, sums, 2 * CHANNELS + 1, CDDP_F64, CDDP_SUM, NULL);
  t->total = sums[2 * CHANNELS];
  for (int c = 0; c < CHANNELS; c++) {
    double mean = sums[c] / t->total;
    double variance = sums[CHANNELS + c] / t->total - mean * mean;
    t->inverse_std[c] = 1 / sqrt(variance + 1e-5);
    for (int s = 0; s < batch; s++) {
      t->normalized[s][c] = (float)(((double)t->a[s][c] - mean) * t->inverse_std[c]);
      t->a[s][c] = gamma[c] * t->normalized[s][c] + beta[c];
    }
  }
  return r;
}

/* a[batch][CHANNELS] is the gradient of the layer's output on entry, and of its input on return.
   Adds this rank's part to dgamma and dbeta: the cddp_ddp averages them as all other gradients. */
static cddp_result batchnorm_backward(cddp_group *g, activations *t, const float *gamma,
                                      float *dgamma, float *dbeta, int batch) {
  double sums[2 * CHANNELS] = {0}; /* of the gradient, and of it times the normalized input */
  cddp_result r = CDDP_OK;
  for (int s = 0; s < batch; s++)
    for (int c = 0; c < CHANNELS; c++) {
      sums[c] += (double)t->a[s][c];
      sums[CHANNELS + c] += (double)t->a[s][c] * (double)t->normalized[s][c];
    }
  for (int c = 0; c < CHANNELS; c++) dbeta[c] += (float)sums[c];
  for (int c = 0; c < CHANNELS; c++) dgamma[c] += (float)sums[CHANNELS + c];
  if (g) r = cddp_all_reduce(g, sums, 2 * CHANNELS, CDDP_F64, CDDP_SUM, NULL);
  for (int s = 0; s < batch; s++)
    for (int c = 0; c < CHANNELS; c++) {
      double centered = (double)t->a[s][c] - sums[c] / t->total -
                        (double)t->normalized[s][c] * sums[CHANNELS + c] / t->total;
      t->a[s][c] = (float)((double)gamma[c] * t->inverse_std[c] * centered);
    }
  return r;
}

/* Adds up the gradients of samples `first` to `first + batch - 1`, each multiplied by scale. *loss
   is their part of the mean loss over all ranks. */
static cddp_result run_batch(model *m, cddp_group *g, activations *t, int first, int batch,
                             double scale, double *loss) {
  for (int s = 0; s < batch; s++) {
    for (int i = 0; i < IN; i++) t->x[s][i] = noise(2, (uint64_t)((first + s) * IN + i));
    for (int c = 0; c < CHANNELS; c++) {
      t->label[s][c] = t->x[s][c % IN] + t->x[s][0] * t->x[s][1];
      t->a[s][c] = 0;
      for (int i = 0; i < IN; i++) t->a[s][c] += m->data[WEIGHT][c * IN + i] * t->x[s][i];
    }
  }
  cddp_result r = batchnorm_forward(g, t, m->data[GAMMA], m->data[BETA], batch);
  if (r != CDDP_OK) return r;
  *loss = 0;
  for (int s = 0; s < batch; s++)
    for (int c = 0; c < CHANNELS; c++) { /* the mean of the squared errors */
      double error = (double)(t->a[s][c] - t->label[s][c]) / CHANNELS;
      *loss += error * error * CHANNELS / t->total;
      t->a[s][c] = (float)(2 * scale * error);
    }
  r = batchnorm_backward(g, t, m->data[GAMMA], m->grad[GAMMA], m->grad[BETA], batch);
  for (int s = 0; s < batch; s++)
    for (int c = 0; c < CHANNELS; c++)
      for (int i = 0; i < IN; i++) m->grad[WEIGHT][c * IN + i] += t->a[s][c] * t->x[s][i];
  return r;
}

static int train(int rank, void *arg) {
  static model models[2]; /* that of all ranks, and the one that rank 0 trains alone */
  static activations t;
  cddp_param params[2][PARAMS];
  cddp_group *g;
  cddp_ddp *ddp;
  cddp_optim *sgd[2];
  cddp_sgd_desc rule;
  double loss[2], difference = 0;
  (void)arg;

  TRY(cddp_init(&g, NULL));
  int size = cddp_world_size(g);
  int batch = BATCH + rank; /* each rank has one sample more than the rank before it */
  int first = rank * BATCH + rank * (rank - 1) / 2;
  int whole = size * BATCH + size * (size - 1) / 2; /* samples of all ranks */
  if (whole > MAX_BATCH) return fprintf(stderr, "rank %d: too many ranks\n", rank), 1;
  for (int k = 0; k < 2; k++) {
    model_init(&models[k]);
    for (int i = 0; i < PARAMS; i++)
      params[k][i] = (cddp_param){NULL, models[k].data[i], models[k].grad[i], counts[i], CDDP_F32};
  }
  memset(&rule, 0, sizeof rule);
  rule.lr = 0.5;
  TRY(cddp_ddp_create(&ddp, g, params[0], PARAMS, NULL));
  TRY(cddp_sgd_create(&sgd[0], params[0], PARAMS, &rule));
  TRY(cddp_sgd_create(&sgd[1], params[1], PARAMS, &rule));

  for (int start = 0; start < STEPS * whole; start += whole) {
    /* The mean over all samples, times size: cddp_ddp divides by the number of ranks. */
    TRY(run_batch(&models[0], g, &t, start + first, batch, (double)size / whole, &loss[0]));
    for (int i = 0; i < PARAMS; i++) TRY(cddp_ddp_ready(ddp, i));
    TRY(cddp_ddp_step(ddp, sgd[0]));
    if (rank != 0) continue;
    TRY(run_batch(&models[1], NULL, &t, start, whole, 1.0 / whole, &loss[1]));
    TRY(cddp_optim_step(sgd[1]));
    TRY(cddp_optim_zero_grad(sgd[1]));
  }
  TRY(cddp_all_reduce(g, &loss[0], 1, CDDP_F64, CDDP_SUM, NULL));
  for (int i = 0; i < PARAMS && rank == 0; i++)
    for (size_t k = 0; k < counts[i]; k++)
      difference = fmax(difference, fabs((double)(models[0].data[i][k] - models[1].data[i][k])));
  if (rank == 0)
    printf("loss of %d ranks %.6f, of one process %.6f; largest difference of a weight: %.2g\n",
           size, loss[0], loss[1], difference);
  cddp_optim_destroy(sgd[1]);
  cddp_optim_destroy(sgd[0]);
  cddp_ddp_destroy(ddp);
  cddp_destroy(g);
  return difference < 1e-5 ? 0 : 1;
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
