/* linear.c - one step of Linear 10-10: the losses differ, the weights do not.

     cc -O2 examples/linear.c -o linear -lpthread -lm
     ./linear                                   2 ranks, as child processes
     ./linear -n 3                              3 ranks
     mpirun -n 3 ./linear                       3 ranks, started by mpirun, srun or torchrun

   Each rank has its own data, so its loss and its gradients are its own. After the step the
   parameters are the same on every rank to the last bit: each rank prints them in turn, all of them
   compare a hash of their bytes, and the program exits with 1 if two differ. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 20, IN = 10, OUT = 10, MAX_RANKS = 64 };

typedef struct layer {
  float weight[OUT][IN], bias[OUT]; /* y = weight x + bias */
} layer;

#define TRY(call) \
  do { \
    if ((call) != CDDP_OK) return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1; \
  } while (0)

/* The next number of a rank's own random sequence, uniform in -1 .. 1 (splitmix64). */
static float uniform(uint64_t *state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (float)((z ^ (z >> 31)) >> 40) / 8388608.0f - 1.0f;
}

/* One random sample, forward and backward: adds its gradients to *grad, returns its mean error. */
static double sample(const layer *l, layer *grad, uint64_t *rng) {
  double loss = 0;
  float x[IN];
  for (int i = 0; i < IN; i++) x[i] = uniform(rng);
  for (int o = 0; o < OUT; o++) {
    float error = l->bias[o] - uniform(rng); /* the label is random too */
    for (int i = 0; i < IN; i++) error += l->weight[o][i] * x[i];
    float d = 2 * error / (BATCH * OUT); /* of the mean squared error by this output */
    for (int i = 0; i < IN; i++) grad->weight[o][i] += d * x[i];
    grad->bias[o] += d;
    loss += (double)(error * error) / (BATCH * OUT);
  }
  return loss;
}

/* 64-bit FNV-1a: two ranks with the same hash have the same bytes. */
static uint64_t hash(const void *data, size_t size) {
  const unsigned char *byte = (const unsigned char *)data;
  uint64_t h = 0xcbf29ce484222325u;
  for (size_t i = 0; i < size; i++) h = (h ^ byte[i]) * 0x100000001b3u;
  return h;
}

static int train(int rank, void *arg) {
  uint64_t rng = 1000 + (uint64_t)rank, mine, all[MAX_RANKS];
  double loss = 0;
  cddp_group *g;
  cddp_ddp *ddp;
  cddp_optim *sgd;
  layer weights, grad; /* any memory will do; cddp_alloc saves a copy, see toy.c */
  (void)arg;

  TRY(cddp_init(&g, NULL));
  if (cddp_world_size(g) > MAX_RANKS) return fprintf(stderr, "at most %d ranks\n", MAX_RANKS), 1;
  for (int o = 0; o < OUT; o++) {
    for (int i = 0; i < IN; i++) weights.weight[o][i] = uniform(&rng) / 3;
    weights.bias[o] = uniform(&rng) / 3;
  }
  memset(&grad, 0, sizeof grad);

  cddp_param params[] = {{"weight", weights.weight, grad.weight, OUT * IN, CDDP_F32},
                         {"bias", weights.bias, grad.bias, OUT, CDDP_F32}};
  cddp_sgd_desc options;
  memset(&options, 0, sizeof options);
  options.lr = 0.1;
  TRY(cddp_ddp_create(&ddp, g, params, 2, NULL)); /* every rank has rank 0's weights now */
  TRY(cddp_sgd_create(&sgd, params, 2, &options));

  for (int i = 0; i < BATCH; i++) loss += sample(&weights, &grad, &rng);
  TRY(cddp_ddp_ready(ddp, 1)); /* both gradients are complete: summing over ranks may start */
  TRY(cddp_ddp_ready(ddp, 0));
  TRY(cddp_ddp_wait(ddp)); /* grad is the mean over all ranks */
  TRY(cddp_optim_step(sgd)); /* toy.c has both in one call, cddp_ddp_step, which also zeroes grad */

  for (int turn = 0; turn < cddp_world_size(g); turn++) {
    if (turn == cddp_rank(g)) {
      printf("Loss on rank %d: %f\nParameters on rank %d:\n", rank, loss, rank);
      for (int o = 0; o < OUT; o++) {
        for (int i = 0; i < IN; i++) printf("%9.6f ", (double)weights.weight[o][i]);
        printf("| %9.6f\n", (double)weights.bias[o]);
      }
    }
    TRY(cddp_barrier(g)); /* waits until rank `turn` has printed */
  }

  mine = hash(&weights, sizeof weights);
  TRY(cddp_all_gather(g, &mine, all, 1, CDDP_I64, NULL)); /* all[r] = rank r's */
  int differ = 0;
  for (int r = 0; r < cddp_world_size(g); r++) differ |= all[r] != all[0];
  if (rank == 0) printf("Hash %016" PRIx64 ", %s\n", mine, differ ? "NOT the same on all ranks" :
                                                                     "the same on all ranks");
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  cddp_destroy(g);
  return differ;
}

int main(int argc, char **argv) {
  int ranks = argc == 3 && strcmp(argv[1], "-n") == 0 ? atoi(argv[2]) : argc == 1 ? 2 : 0;
  bool help = argc == 2 && strcmp(argv[1], "--help") == 0;
  if (ranks < 1 || ranks > MAX_RANKS) {
    fprintf(help ? stdout : stderr, "usage: %s [-n N]: N ranks, as child processes, 1 to %d (2)\n",
            argv[0], MAX_RANKS);
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
