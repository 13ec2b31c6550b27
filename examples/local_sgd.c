/* local_sgd.c - ranks that talk seldom: local SGD and DiLoCo, for slow networks between the ranks.

     cc -O2 examples/local_sgd.c -o local_sgd -lpthread -lm
     ./local_sgd                                4 ranks, as child processes
     ./local_sgd -n 2 --every 50                2 ranks, an average after each 50 steps
     mpirun -n 4 ./local_sgd                    4 ranks, started by mpirun, srun or torchrun

   Three ways to train one small network, with the same number of samples:
     data parallel   each step averages the gradients (cddp_ddp_step)
     local SGD       each rank trains alone for `every` steps; then all ranks average their weights
                     (Stich, 2019)
     DiLoCo          the same, but the mean change of the weights counts as a gradient, and an outer
                     SGD with Nesterov momentum takes a step along it (Douillard et al., 2023)
   The last two need one call of cddp: cddp_all_reduce with CDDP_AVG. A rank's optimizer states stay
   its own. The example prints, for each way, the bytes that a rank passed to cddp and the loss on
   samples that no rank trained on. It fails if a loss is far above the first. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IN = 8, HIDDEN = 64, WEIGHTS = HIDDEN * (IN + 2), BATCH = 16, STEPS = 2000 };
typedef enum way { DATA_PARALLEL, LOCAL_SGD, DILOCO, WAYS } way;
static const char *const names[WAYS] = {"data parallel", "local SGD", "DiLoCo"};
static int every = 20;

#define TRY(call) \
  do { \
    if ((call) != CDDP_OK) return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1; \
  } while (0)

/* Uniform in -1 .. 1, from the number itself (splitmix64). */
static float noise(uint64_t number) {
  uint64_t z = number * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (float)((z ^ (z >> 31)) >> 40) / 8388608.0f - 1.0f;
}

/* The network is y = sum of v[h] * relu(w[h] x + b[h]); w has the rows (w[h], b[h], v[h]). Adds to
   dw, unless NULL, the gradient of the samples first .. first + count - 1; returns their loss. */
static double run(const float *w, float *dw, uint64_t first, int count) {
  double loss = 0;
  for (uint64_t s = first; s < first + (uint64_t)count; s++) {
    float x[IN], h[HIDDEN], y = 0;
    for (uint64_t i = 0; i < IN; i++) x[i] = noise(s * IN + i + 1);
    for (int k = 0; k < HIDDEN; k++) {
      const float *row = w + k * (IN + 2);
      h[k] = row[IN];
      for (int i = 0; i < IN; i++) h[k] += row[i] * x[i];
      h[k] = h[k] > 0 ? h[k] : 0;
      y += row[IN + 1] * h[k];
    }
    float error = y - sinf(2 * x[0] + x[1]) - x[2] * x[3]; /* minus the label */
    loss += (double)(error * error) / count;
    for (int k = 0; dw && k < HIDDEN; k++) {
      const float *row = w + k * (IN + 2);
      float *grad = dw + k * (IN + 2), d = 2 * error / (float)count;
      grad[IN + 1] += d * h[k];
      if (h[k] > 0) {
        grad[IN] += d * row[IN + 1];
        for (int i = 0; i < IN; i++) grad[i] += d * row[IN + 1] * x[i];
      }
    }
  }
  return loss;
}

/* The weights become the mean over the ranks. */
static int average_weights(cddp_group *g, float *w, size_t *sent) {
  int rank = cddp_rank(g);
  TRY(cddp_all_reduce(g, w, WEIGHTS, CDDP_F32, CDDP_AVG, NULL));
  *sent += WEIGHTS * sizeof *w;
  return 0;
}

/* The outer step of DiLoCo. start: the weights after the last outer step, the same on all ranks.
   The outer gradient is start - mean of w; SGD with Nesterov momentum takes start along it. */
static int outer_step(cddp_group *g, float *w, float *start, float *momentum, size_t *sent) {
  const float lr = 0.7f, mu = 0.6f;
  if (average_weights(g, w, sent)) return 1;
  for (int i = 0; i < WEIGHTS; i++) {
    float grad = start[i] - w[i];
    momentum[i] = mu * momentum[i] + grad;
    start[i] -= lr * (grad + mu * momentum[i]);
    w[i] = start[i];
  }
  return 0;
}

/* Trains from the same weights in one of the ways. The inner optimizer is SGD with momentum. */
static int train_one(cddp_group *g, way how, double *loss, size_t *sent) {
  static float w[WEIGHTS], start[WEIGHTS], momentum[WEIGHTS];
  int rank = cddp_rank(g), ranks = cddp_world_size(g);
  for (int i = 0; i < WEIGHTS; i++) w[i] = start[i] = 0.3f * noise((uint64_t)i + 1);
  memset(momentum, 0, sizeof momentum);
  *sent = 0;

  /* With local steps the model is this rank's alone: a group of one rank, which sends nothing. */
  cddp_group *own, *models = g;
  TRY(cddp_group_split(g, rank, 0, &own));
  if (how != DATA_PARALLEL) models = own;
  cddp_param params[] = {{"weights", w, NULL, WEIGHTS, CDDP_F32}};
  cddp_sgd_desc rule = {0};
  cddp_ddp *ddp;
  cddp_optim *sgd;
  rule.lr = 0.08;
  rule.momentum = 0.9;
  TRY(cddp_ddp_create(&ddp, models, params, 1, NULL));
  TRY(cddp_sgd_create(&sgd, params, 1, &rule));

  for (int step = 1; step <= STEPS; step++) {
    uint64_t batch = (uint64_t)step * (uint64_t)ranks + (uint64_t)rank;
    run(w, (float *)params[0].grad, batch * BATCH, BATCH);
    TRY(cddp_ddp_ready(ddp, 0));
    TRY(cddp_ddp_step(ddp, sgd));
    if (how == DATA_PARALLEL) *sent += WEIGHTS * sizeof *w;
    if (how == DATA_PARALLEL || (step % every != 0 && step != STEPS)) continue;
    if (how == LOCAL_SGD && average_weights(g, w, sent)) return 1;
    if (how == DILOCO && outer_step(g, w, start, momentum, sent)) return 1;
  }
  *loss = run(w, NULL, (uint64_t)1 << 40, 2000);
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  cddp_destroy(own);
  return 0;
}

static int train(int rank, void *arg) {
  double loss, first_loss = 0;
  size_t sent;
  bool failed = false;
  cddp_group *g;
  (void)arg;
  TRY(cddp_init(&g, NULL));
  for (int how = 0; how < WAYS; how++) {
    if (train_one(g, (way)how, &loss, &sent)) return 1;
    if (how == DATA_PARALLEL) first_loss = loss;
    failed = failed || !(loss < 1.5 * first_loss + 0.001);
    if (rank == 0) printf("%-13s  %8zu bytes a rank, loss %.5f\n", names[how], sent, loss);
  }
  if (rank == 0 && failed)
    fprintf(stderr, "failed: a loss is above 1.5 times that of data parallel training\n");
  cddp_destroy(g);
  return failed;
}

static int usage(bool help) {
  fprintf(help ? stdout : stderr, "usage: local_sgd [-n N] [--every H]\n"
                                  "  -n       ranks, as child processes (4)\n"
                                  "  --every  steps from one average to the next (20)\n");
  return help ? 0 : 2;
}

int main(int argc, char **argv) {
  int ranks = 4;
  for (int i = 1; i < argc; i += 2) {
    int *value = strcmp(argv[i], "-n") == 0        ? &ranks
                 : strcmp(argv[i], "--every") == 0 ? &every
                                                   : NULL;
    if (value == NULL || i + 1 == argc) return usage(strcmp(argv[i], "--help") == 0);
    *value = atoi(argv[i + 1]);
  }
  if (ranks < 1 || every < 1) return usage(false);
  setvbuf(stdout, NULL, _IOLBF, 0); /* whole lines, also into a file that the ranks share */

  int rank = cddp_launcher_rank(); /* of torchrun, mpirun, srun, ...; or -1 */
  if (rank >= 0) return train(rank, NULL);
  if (cddp_spawn(train, NULL, ranks) == CDDP_OK) return 0; /* no launcher: forks the ranks */
  fprintf(stderr, "%s\n", cddp_error());
  return 1;
}
