/* toy.c - the ToyModel of PyTorch's DDP tutorial: Linear 10-10, ReLU, Linear 10-5, MSE loss, SGD.

     cc -O2 examples/toy.c -o toy -lpthread -lm
     ./toy                                      2 ranks, as child processes
     ./toy -n 4                                 4 ranks
     mpirun -n 4 ./toy                          4 ranks, started by mpirun or srun
     export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
     RANK=0 ./toy & RANK=1 ./toy; wait          2 ranks, started one by one
     unset WORLD_SIZE MASTER_ADDR MASTER_PORT   before the other ways work again

   Each rank draws its own batch and computes its own gradients. cddp averages them, and every rank
   takes the same step from the same weights. The six calls are numbered as in the first lines of
   cddp.h. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 20, IN = 10, HIDDEN = 10, OUT = 5, STEPS = 10 };

typedef struct model { /* each weight is [out][in], as in torch.nn.Linear */
  float w1[HIDDEN * IN], b1[HIDDEN], w2[OUT * HIDDEN], b2[OUT];
} model;

/* After a rank has returned, the other ranks' next call fails with CDDP_PEER_LOST. */
#define TRY(call) \
  do { \
    if ((call) != CDDP_OK) return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1; \
  } while (0)

/* The next number of a rank's own random sequence, uniform in -bound .. bound (splitmix64). */
static float uniform(uint64_t *state, float bound) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return ((float)((z ^ (z >> 31)) >> 40) / 8388608.0f - 1.0f) * bound;
}

static void fill(float *x, int n, uint64_t *state, float bound) {
  for (int i = 0; i < n; i++) x[i] = uniform(state, bound);
}

/* y = x W^T + b for a batch of rows. */
static void linear(const float *x, const float *w, const float *b, float *y, int in, int out) {
  for (int r = 0; r < BATCH; r++)
    for (int o = 0; o < out; o++) {
      y[r * out + o] = b[o];
      for (int i = 0; i < in; i++) y[r * out + o] += x[r * in + i] * w[o * in + i];
    }
}

/* Adds to the gradients of w and b, given dy, the gradient of y. */
static void linear_backward(const float *x, const float *dy, float *dw, float *db, int in,
                            int out) {
  for (int r = 0; r < BATCH; r++)
    for (int o = 0; o < out; o++) {
      db[o] += dy[r * out + o];
      for (int i = 0; i < in; i++) dw[o * in + i] += dy[r * out + o] * x[r * in + i];
    }
}

static int train(int rank, void *arg) {
  static float x[BATCH * IN], labels[BATCH * OUT], h[BATCH * HIDDEN], y[BATCH * OUT];
  static float dh[BATCH * HIDDEN], dy[BATCH * OUT];
  uint64_t rng = 1000 + (uint64_t)rank; /* a seed for each rank: each has other data */
  double loss = 0;
  cddp_group *g;
  cddp_ddp *ddp;
  cddp_optim *sgd;
  (void)arg;

  TRY(cddp_init(&g, NULL)); /* 1  the variables of the launcher, or cddp_spawn, say where */
  printf("Running on rank %d.\n", cddp_rank(g));

  model *m = (model *)cddp_alloc(g, sizeof *m); /* weights the ranks share without a copy */
  TRY(m ? CDDP_OK : CDDP_OUT_OF_MEMORY);
  fill(m->w1, HIDDEN * IN, &rng, 1 / sqrtf(IN)); /* other values on each rank, until call 2 */
  fill(m->b1, HIDDEN, &rng, 1 / sqrtf(IN));
  fill(m->w2, OUT * HIDDEN, &rng, 1 / sqrtf(HIDDEN));
  fill(m->b2, OUT, &rng, 1 / sqrtf(HIDDEN));

  cddp_param params[] = {{"net1.weight", m->w1, NULL, HIDDEN * IN, CDDP_F32},
                         {"net1.bias", m->b1, NULL, HIDDEN, CDDP_F32},
                         {"net2.weight", m->w2, NULL, OUT * HIDDEN, CDDP_F32},
                         {"net2.bias", m->b2, NULL, OUT, CDDP_F32}};
  cddp_sgd_desc options;
  memset(&options, 0, sizeof options);
  options.lr = 0.001;
  TRY(cddp_ddp_create(&ddp, g, params, 4, NULL)); /* 2  copies rank 0's weights, sets grad */
  TRY(cddp_sgd_create(&sgd, params, 4, &options)); /* 3 */
  float *grad[4];
  for (int i = 0; i < 4; i++) grad[i] = (float *)params[i].grad;

  fill(x, BATCH * IN, &rng, 1.7f); /* about the variance of torch.randn */
  fill(labels, BATCH * OUT, &rng, 1.7f);
  for (int step = 0; step < STEPS; step++) {
    linear(x, m->w1, m->b1, h, IN, HIDDEN);
    for (int i = 0; i < BATCH * HIDDEN; i++) h[i] = h[i] > 0 ? h[i] : 0;
    linear(h, m->w2, m->b2, y, HIDDEN, OUT);

    loss = 0;
    for (int i = 0; i < BATCH * OUT; i++) {
      float error = y[i] - labels[i];
      loss += (double)(error * error) / (BATCH * OUT);
      dy[i] = 2 * error / (BATCH * OUT);
    }

    /* Backward, last layer first. Gradients start at zero. cddp_ddp_ready marks a gradient as
       complete. Between hosts and on GPUs it is averaged while the next ones are computed. */
    linear_backward(h, dy, grad[2], grad[3], HIDDEN, OUT);
    TRY(cddp_ddp_ready(ddp, 3)); /* 4 */
    TRY(cddp_ddp_ready(ddp, 2));
    for (int r = 0; r < BATCH; r++)
      for (int i = 0; i < HIDDEN; i++) {
        float sum = 0;
        for (int o = 0; o < OUT; o++) sum += dy[r * OUT + o] * m->w2[o * HIDDEN + i];
        dh[r * HIDDEN + i] = h[r * HIDDEN + i] > 0 ? sum : 0; /* ReLU's slope is 0 there */
      }
    linear_backward(x, dh, grad[0], grad[1], IN, HIDDEN);
    TRY(cddp_ddp_ready(ddp, 1));
    TRY(cddp_ddp_ready(ddp, 0));

    TRY(cddp_ddp_step(ddp, sgd)); /* 5  waits for the mean over ranks, SGD, zeroes the gradients */
  }
  printf("Loss on rank %d: %f\n", cddp_rank(g), loss);

  cddp_optim_destroy(sgd); /* 6 */
  cddp_ddp_destroy(ddp);
  cddp_free(g, m);
  cddp_destroy(g);
  return 0;
}

int main(int argc, char **argv) {
  int ranks = argc == 3 && strcmp(argv[1], "-n") == 0 ? atoi(argv[2]) : argc == 1 ? 2 : 0;
  bool help = argc == 2 && strcmp(argv[1], "--help") == 0;
  if (ranks < 1) {
    fprintf(help ? stdout : stderr, "usage: %s [-n N]: N ranks, as child processes (2)\n", argv[0]);
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
