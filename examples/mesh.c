/* mesh.c - a two-dimensional mesh of ranks: data parallel by tensor parallel, by cddp_group_split.

     cc -O2 examples/mesh.c -o mesh -lpthread -lm
     ./mesh                                     4 ranks, as child processes: 2 by 2
     ./mesh -n 8                                8 ranks: 4 data parallel by 2 tensor parallel
     mpirun -n 4 ./mesh                         4 ranks, started by mpirun, srun or torchrun

   The model is y = W2 relu(W1 x). Tensor parallel ranks hold some hidden units each: rows of W1 and
   columns of W2. Each computes its part of y, and an all_reduce in their group adds up the parts.
   Data parallel ranks hold the same units and have different batches: a cddp_ddp in their group
   averages the gradients.

                      tensor group 0   tensor group 1
     data group 0     rank 0           rank 2            units 0 to 15
     data group 1     rank 1           rank 3            units 16 to 31

   Each rank also trains the whole model alone, on the whole batch. The example fails if a
   weight of the mesh differs from that model's by more than rounding. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IN = 8, HIDDEN = 32, OUT = 4, BATCH = 16, STEPS = 50, TENSOR_RANKS = 2 };

#define TRY(call) \
  do { \
    if ((call) != CDDP_OK) return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1; \
  } while (0)

/* Hidden units `first` to `first + units - 1` of the model. */
typedef struct model {
  float w1[HIDDEN * IN];  /* [units][IN] */
  float w2[HIDDEN * OUT]; /* [units][OUT]: a unit's weights are together */
  float dw1[HIDDEN * IN], dw2[HIDDEN * OUT];
  int first, units;
} model;

/* Uniform in -1 .. 1, the same on every rank: a hash of the arguments (splitmix64). */
static float noise(uint64_t stream, uint64_t index) {
  uint64_t z = (stream << 32) + index * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (float)((z ^ (z >> 31)) >> 40) / 8388608.0f - 1.0f;
}

static void model_init(model *m, int first, int units) {
  memset(m, 0, sizeof *m);
  m->first = first;
  m->units = units;
  for (int i = 0; i < units * IN; i++) m->w1[i] = noise(1, (uint64_t)(first * IN + i)) / sqrtf(IN);
  for (int i = 0; i < units * OUT; i++)
    m->w2[i] = noise(2, (uint64_t)(first * OUT + i)) / sqrtf(HIDDEN);
}

/* Loads sample `index` of the training set, and its label. */
static void load_sample(int index, float *x, float *label) {
  for (int i = 0; i < IN; i++) x[i] = noise(3, (uint64_t)(index * IN + i));
  for (int o = 0; o < OUT; o++) label[o] = sinf(3 * x[o % IN]) * x[(o + 1) % IN];
}

/* h = relu(W1 x), y = W2 h, of this model's units. */
static void forward(const model *m, const float *x, float *h, float *y) {
  memset(y, 0, OUT * sizeof *y);
  for (int u = 0; u < m->units; u++) {
    h[u] = 0;
    for (int i = 0; i < IN; i++) h[u] += m->w1[u * IN + i] * x[i];
    if (h[u] < 0) h[u] = 0;
    for (int o = 0; o < OUT; o++) y[o] += m->w2[u * OUT + o] * h[u];
  }
}

/* Adds to the gradients of this model's units, given dy, the gradient of the whole y. */
static void backward(model *m, const float *x, const float *h, const float *dy) {
  for (int u = 0; u < m->units; u++) {
    float dh = 0;
    for (int o = 0; o < OUT; o++) {
      m->dw2[u * OUT + o] += dy[o] * h[u];
      dh += dy[o] * m->w2[u * OUT + o];
    }
    for (int i = 0; i < IN && h[u] > 0; i++) m->dw1[u * IN + i] += dh * x[i];
  }
}

/* Gradients of the mean loss over samples `start` to `start + count - 1`, and that loss. With a
   tensor group the model has some of the units, and y is the sum over the group. */
static cddp_result run_batch(model *m, cddp_group *tensor, int start, int count, double *loss) {
  float x[BATCH][IN], label[BATCH][OUT], h[BATCH][HIDDEN], y[BATCH][OUT], dy[OUT];
  cddp_result r = CDDP_OK;
  for (int s = 0; s < count; s++) {
    load_sample(start + s, x[s], label[s]);
    forward(m, x[s], h[s], y[s]);
  }
  if (tensor) r = cddp_all_reduce(tensor, y, (size_t)(count * OUT), CDDP_F32, CDDP_SUM, NULL);
  *loss = 0;
  for (int s = 0; s < count; s++) {
    for (int o = 0; o < OUT; o++) {
      float error = y[s][o] - label[s][o];
      *loss += (double)(error * error) / (count * OUT);
      dy[o] = 2 * error / (float)(count * OUT);
    }
    backward(m, x[s], h[s], dy);
  }
  return r;
}

/* The largest difference between the weights of m and those of the same units in `whole`. */
static double compare(const model *m, const model *whole) {
  double most = 0;
  for (int i = 0; i < m->units * IN; i++)
    most = fmax(most, fabs((double)(m->w1[i] - whole->w1[m->first * IN + i])));
  for (int i = 0; i < m->units * OUT; i++)
    most = fmax(most, fabs((double)(m->w2[i] - whole->w2[m->first * OUT + i])));
  return most;
}

static int train(int rank, void *arg) {
  static model whole, part; /* static: zero, and not on the stack */
  cddp_group *world, *tensor, *data;
  cddp_ddp *ddp[2];
  cddp_optim *sgd[2];
  double loss[2], difference;
  (void)arg;

  TRY(cddp_init(&world, NULL));
  int size = cddp_world_size(world);
  if (size % TENSOR_RANKS != 0 || size > BATCH * TENSOR_RANKS) {
    if (rank == 0)
      fprintf(stderr, "%d ranks: the number must be a multiple of %d, and at most %d\n", size,
              TENSOR_RANKS, BATCH * TENSOR_RANKS);
    return 1;
  }
  TRY(cddp_group_split(world, rank / TENSOR_RANKS, rank, &tensor)); /* neighbours */
  TRY(cddp_group_split(world, rank % TENSOR_RANKS, rank, &data));   /* every second one */

  int units = HIDDEN / TENSOR_RANKS, batch = BATCH / cddp_world_size(data);
  model_init(&part, cddp_rank(tensor) * units, units);
  model_init(&whole, 0, HIDDEN);
  cddp_param params[2][2] = {{{"w1", part.w1, part.dw1, (size_t)(units * IN), CDDP_F32},
                              {"w2", part.w2, part.dw2, (size_t)(units * OUT), CDDP_F32}},
                             {{"w1", whole.w1, whole.dw1, HIDDEN * IN, CDDP_F32},
                              {"w2", whole.w2, whole.dw2, HIDDEN * OUT, CDDP_F32}}};
  cddp_sgd_desc rule;
  memset(&rule, 0, sizeof rule);
  rule.lr = 0.1;
  rule.momentum = 0.9;
  TRY(cddp_ddp_create(&ddp[0], data, params[0], 2, NULL));
  TRY(cddp_sgd_create(&sgd[0], params[0], 2, &rule));
  TRY(cddp_sgd_create(&sgd[1], params[1], 2, &rule)); /* the model to compare with: no cddp_ddp */

  for (int step = 0; step < STEPS; step++) {
    int start = step * BATCH;
    TRY(run_batch(&part, tensor, start + cddp_rank(data) * batch, batch, &loss[0]));
    TRY(cddp_ddp_ready(ddp[0], 0));
    TRY(cddp_ddp_ready(ddp[0], 1));
    TRY(cddp_ddp_step(ddp[0], sgd[0]));

    TRY(run_batch(&whole, NULL, start, batch * cddp_world_size(data), &loss[1]));
    TRY(cddp_optim_step(sgd[1]));
    TRY(cddp_optim_zero_grad(sgd[1]));
  }
  difference = compare(&part, &whole);
  TRY(cddp_all_reduce(world, &difference, 1, CDDP_F64, CDDP_MAX, NULL));
  TRY(cddp_all_reduce(data, &loss[0], 1, CDDP_F64, CDDP_AVG, NULL));
  if (rank == 0) {
    printf("mesh of %d by %d ranks, %d hidden units each\n", cddp_world_size(data),
           cddp_world_size(tensor), units);
    printf("loss %.6f, of one process %.6f\n", loss[0], loss[1]);
    printf("largest difference of a weight: %.2g%s\n", difference, difference < 1e-5 ? "" : " (!)");
  }
  cddp_optim_destroy(sgd[1]);
  cddp_optim_destroy(sgd[0]);
  cddp_ddp_destroy(ddp[0]);
  cddp_destroy(data);
  cddp_destroy(tensor);
  cddp_destroy(world);
  return difference < 1e-5 ? 0 : 1;
}

int main(int argc, char **argv) {
  int ranks = argc == 3 && strcmp(argv[1], "-n") == 0 ? atoi(argv[2]) : argc == 1 ? 4 : 0;
  bool help = argc == 2 && strcmp(argv[1], "--help") == 0;
  if (ranks < 1) {
    fprintf(help ? stdout : stderr, "usage: %s [-n N]: N ranks, a multiple of %d (4)\n", argv[0],
            TENSOR_RANKS);
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
