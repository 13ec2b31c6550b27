/* embedding.c - Embedding 1000-10 and Linear 10-10, trained on whole numbers, twice: with a dense
   gradient of the embedding, then with a sparse one, of which only the used rows are sent.

     cc -O2 examples/embedding.c -o embedding -lpthread -lm
     ./embedding                                2 ranks, as child processes
     ./embedding -n 4                           4 ranks
     mpirun -n 4 ./embedding                    4 ranks, started by mpirun, srun or torchrun

   A sample is a number below 1000, and its label is the last digit. Both ways give the same
   weights, bit for bit. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NUMBERS = 1000, WIDTH = 10, CLASSES = 10, BATCH = 32, STEPS = 600, MAX_RANKS = 64 };
enum { TABLE, WEIGHT, BIAS, PARAMS };

#define TRY(call) \
  do { \
    if ((call) != CDDP_OK) return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1; \
  } while (0)

typedef struct model {
  float table[NUMBERS][WIDTH], weight[CLASSES][WIDTH], bias[CLASSES];
} model;

/* The next of a sequence of random numbers (splitmix64). */
static uint64_t draw(uint64_t *state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/* One sample, forward and backward: adds to the gradients of the linear layer, sets the embedding
   row's. Returns the cross-entropy. */
static double sample(const model *m, int64_t number, float *weight_grad, float *bias_grad,
                     float *row_grad) {
  const float *row = m->table[number];
  float p[CLASSES], top = -INFINITY, sum = 0;
  int label = (int)(number % CLASSES);
  for (int c = 0; c < CLASSES; c++) {
    p[c] = m->bias[c];
    for (int k = 0; k < WIDTH; k++) p[c] += m->weight[c][k] * row[k];
    top = fmaxf(top, p[c]);
  }
  double right = (double)(p[label] - top);
  for (int c = 0; c < CLASSES; c++) sum += p[c] = expf(p[c] - top);
  memset(row_grad, 0, WIDTH * sizeof *row_grad);
  for (int c = 0; c < CLASSES; c++) {
    float d = (p[c] / sum - (c == label)) / BATCH; /* of the mean loss by this output */
    for (int k = 0; k < WIDTH; k++) {
      weight_grad[c * WIDTH + k] += d * row[k];
      row_grad[k] += d * m->weight[c][k];
    }
    bias_grad[c] += d;
  }
  return log((double)sum) - right;
}

static int train(cddp_group *g, int sparse, uint64_t *hash) {
  static model m;
  int rank = cddp_rank(g);
  uint64_t weights_rng = 42, rng = 1000 + (uint64_t)rank; /* each rank draws its own numbers */
  double loss = 0, sent = 0;
  float *w = m.table[0];
  for (size_t i = 0; i < sizeof m / sizeof *w; i++)
    w[i] = (float)(draw(&weights_rng) >> 40) / 16777216.0f - 0.5f;
  cddp_param p[PARAMS] = {{"table", m.table, NULL, NUMBERS * WIDTH, CDDP_F32},
                          {"weight", m.weight, NULL, CLASSES * WIDTH, CDDP_F32},
                          {"bias", m.bias, NULL, CLASSES, CDDP_F32}};
  size_t sparse_rows[PARAMS] = {NUMBERS, 0, 0}; /* the table's gradient is sent as rows */
  cddp_ddp_desc ddp_options;
  cddp_sgd_desc sgd_options;
  cddp_ddp *ddp;
  cddp_optim *sgd;
  memset(&ddp_options, 0, sizeof ddp_options);
  memset(&sgd_options, 0, sizeof sgd_options);
  sgd_options.lr = 4;
  if (sparse) ddp_options.sparse_rows = sparse_rows;
  TRY(cddp_ddp_create(&ddp, g, p, PARAMS, &ddp_options));
  TRY(cddp_sgd_create(&sgd, p, PARAMS, &sgd_options));
  for (int step = 1; step <= STEPS; step++) {
    int64_t numbers[BATCH];
    float rows[BATCH][WIDTH];
    char seen[NUMBERS] = {0};
    size_t distinct = 0;
    for (int i = 0; i < BATCH; i++) {
      numbers[i] = (int64_t)(draw(&rng) % NUMBERS);
      distinct += !seen[numbers[i]];
      seen[numbers[i]] = 1;
      loss += sample(&m, numbers[i], (float *)p[WEIGHT].grad, (float *)p[BIAS].grad, rows[i]);
      if (!sparse)
        for (int k = 0; k < WIDTH; k++)
          ((float *)p[TABLE].grad)[numbers[i] * WIDTH + k] += rows[i][k];
    }
    if (sparse) TRY(cddp_ddp_add_rows(ddp, TABLE, numbers, rows, BATCH));
    sent += (double)(sparse ? distinct * (sizeof *numbers + sizeof rows[0]) : sizeof m.table);
    for (int i = PARAMS - 1; i >= 0; i--) TRY(cddp_ddp_ready(ddp, i));
    TRY(cddp_ddp_step(ddp, sgd));
    if (step % 100 == 0) {
      loss /= 100 * BATCH;
      TRY(cddp_all_reduce(g, &loss, 1, CDDP_F64, CDDP_AVG, NULL));
      if (rank == 0) printf("%s, step %d: loss %.6f\n", sparse ? "sparse" : "dense", step, loss);
      loss = 0;
    }
  }
  TRY(cddp_all_reduce(g, &sent, 1, CDDP_F64, CDDP_AVG, NULL));
  *hash = 0xcbf29ce484222325u; /* 64-bit FNV-1a */
  for (size_t i = 0; i < sizeof m; i++) *hash = (*hash ^ ((unsigned char *)&m)[i]) * 0x100000001b3u;
  if (rank == 0)
    printf("%s: %.0f bytes of the table's gradient sent by a rank in a step, weights %016" PRIx64
           "\n", sparse ? "sparse" : "dense", sent / STEPS, *hash);
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  return 0;
}

static int both(int rank, void *arg) {
  uint64_t hash[2];
  cddp_group *g;
  (void)arg;
  TRY(cddp_init(&g, NULL));
  if (train(g, 0, &hash[0]) || train(g, 1, &hash[1])) return 1;
  cddp_destroy(g);
  if (hash[0] != hash[1]) fprintf(stderr, "rank %d: the weights differ\n", rank);
  return hash[0] != hash[1];
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
  if (rank >= 0) return both(rank, NULL);
  if (cddp_spawn(both, NULL, ranks) == CDDP_OK) return 0; /* no launcher: forks the ranks */
  fprintf(stderr, "%s\n", cddp_error());
  return 1;
}
