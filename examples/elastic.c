/* elastic.c - training that survives lost ranks, with the same weights, bit for bit.

     cc -O2 examples/elastic.c -o elastic -lpthread -lm
     ./elastic                          4 ranks, as child processes; a lost one is started again
     ./elastic -n 1                     the same weights from one rank
     cc -O2 examples/cddprun.c -o cddprun -lpthread -lm
     ./cddprun -n 3 --elastic --max-restarts 9 ./elastic     the same, started by cddprun
   In another terminal, kill -9 any of the processes that it names, as often as you like.
     export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
     RANK=0 ./elastic & RANK=1 ./elastic &                   the same, started one by one
     CDDP_JOIN=1 RANK=2 ./elastic                            a third rank joins them
     unset WORLD_SIZE MASTER_ADDR MASTER_PORT                before the other ways work again
   Every rank that completes the training prints the hash of its weights. The hash is always the
   same.

   A small network learns the distance of two points on a torus. The global batch of a step is
   split into 12 shards. cddp divides the shards among the ranks: the loop asks for the next one
   until none is left, and the other ranks compute the shards of a dead rank. The contents of a
   shard depend on its number and the step's alone. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SHARDS = 12, BATCH = 16 /* samples of a shard */, IN = 4, HIDDEN = 96, PARAMS = 6 };
static int steps = 2000;

#define TRY(call) \
  do { \
    if ((call) != CDDP_OK) return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1; \
  } while (0)

/* Uniform in 0 .. 1, from the number itself (splitmix64). */
static float uniform(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (float)((z ^ (z >> 31)) >> 40) / 16777216.0f;
}

static float around(float a, float b) { /* the shorter way between two points of a circle */
  float d = fabsf(a - b);
  return d < 0.5f ? d : 1 - d;
}

/* y = x W^T + b, then ReLU unless it is the last layer. */
static void forward(const float *x, const float *w, const float *b, float *y, int in, int out) {
  for (int o = 0; o < out; o++) {
    float sum = b[o];
    for (int i = 0; i < in; i++) sum += x[i] * w[o * in + i];
    y[o] = sum > 0 || out == 1 ? sum : 0;
  }
}

/* Adds to the gradients of w and b; dx is that of x, which is 0 where ReLU was. */
static void backward(const float *x, const float *w, const float *dy, float *dw, float *db,
                     float *dx, int in, int out) {
  memset(dx, 0, (size_t)in * sizeof *dx);
  for (int o = 0; o < out; o++) {
    db[o] += dy[o];
    for (int i = 0; i < in; i++) {
      dw[o * in + i] += dy[o] * x[i];
      if (x[i] > 0) dx[i] += dy[o] * w[o * in + i];
    }
  }
}

/* Forward and backward of one shard of one step; returns its loss. */
static double do_shard(cddp_ddp *ddp, const cddp_param *p, uint64_t step, int shard) {
  float h1[HIDDEN], h2[HIDDEN], y, dy, d2[HIDDEN], d1[HIDDEN], dx[IN], x[IN];
  const float *w[PARAMS];
  float *g[PARAMS];
  double loss = 0;
  for (int i = 0; i < PARAMS; i++) {
    w[i] = (const float *)p[i].data;
    g[i] = (float *)p[i].grad;
  }
  for (uint64_t sample = 0; sample < BATCH; sample++) {
    uint64_t number = (step * SHARDS + (uint64_t)shard) * BATCH + sample;
    for (uint64_t i = 0; i < IN; i++) x[i] = uniform((number * IN + i + 1) * 0x9e3779b97f4a7c15u);
    forward(x, w[0], w[1], h1, IN, HIDDEN);
    forward(h1, w[2], w[3], h2, HIDDEN, HIDDEN);
    forward(h2, w[4], w[5], &y, HIDDEN, 1);
    y -= hypotf(around(x[0], x[1]), around(x[2], x[3]));
    loss += (double)(y * y) / BATCH;
    dy = 2 * y / BATCH;
    backward(h2, w[4], &dy, g[4], g[5], d2, HIDDEN, 1);
    backward(h1, w[2], d2, g[2], g[3], d1, HIDDEN, HIDDEN);
    backward(x, w[0], d1, g[0], g[1], dx, IN, HIDDEN);
  }
  for (int i = PARAMS - 1; i >= 0; i--)
    if (cddp_ddp_ready(ddp, i) != CDDP_OK) break; /* cddp_ddp_step says why */
  return loss;
}

static int train(int rank, void *arg) {
  static const size_t sizes[PARAMS] = {HIDDEN * IN, HIDDEN, HIDDEN * HIDDEN, HIDDEN, HIDDEN, 1};
  cddp_param p[PARAMS];
  cddp_ddp_desc desc;
  cddp_adamw_desc options;
  cddp_group *g;
  cddp_ddp *ddp;
  cddp_optim *adamw;
  uint64_t hash = 0xcbf29ce484222325u, n = 0;
  (void)arg;
  memset(p, 0, sizeof p);
  memset(&desc, 0, sizeof desc);
  memset(&options, 0, sizeof options);

  TRY(cddp_init(&g, NULL)); /* with CDDP_JOIN=1 in the environment it joins a running job, */
  for (int k = 0; k < PARAMS; k++) {
    float *w = (float *)cddp_alloc(g, sizes[k] * sizeof *w);
    TRY(w ? CDDP_OK : CDDP_OUT_OF_MEMORY);
    for (size_t i = 0; i < sizes[k]; i++)
      w[i] = k % 2 ? 0 : (uniform(++n * 0x9e3779b97f4a7c15u) - 0.5f) * (k == 0 ? 2.0f : 0.4f);
    p[k].data = w;
    p[k].count = sizes[k];
    p[k].dtype = CDDP_F32;
  }
  desc.shards = SHARDS;
  desc.elastic = true;
  TRY(cddp_ddp_create(&ddp, g, p, PARAMS, &desc)); /* which sends it the weights */
  options.lr = 0.002;
  options.ddp = ddp;
  TRY(cddp_adamw_create(&adamw, p, PARAMS, &options)); /* and the optimizer's state */
  printf("rank %d is process %d, from step %d on\n", rank, (int)getpid(), (int)cddp_ddp_steps(ddp));

  for (uint64_t t = cddp_ddp_steps(ddp); t < (uint64_t)steps; t = cddp_ddp_steps(ddp)) {
    double loss = 0;
    int shard, count = 0;
    for (; cddp_ddp_next_shard(ddp, &shard); count++) loss += do_shard(ddp, p, t, shard);
    TRY(cddp_ddp_step(ddp, adamw)); /* returns errors of next_shard and ready, too */
    if (t % 100 == 99 && cddp_rank(cddp_ddp_group(ddp)) == 0)
      printf("step %d: loss %.5f of %d shards, %d ranks\n", (int)t + 1, loss / (count ? count : 1),
             count, cddp_world_size(cddp_ddp_group(ddp)));
  }
  for (int k = 0; k < PARAMS; k++) /* FNV-1a */
    for (size_t i = 0; i < sizes[k] * sizeof(float); i++)
      hash = (hash ^ ((const unsigned char *)p[k].data)[i]) * 0x100000001b3u;
  printf("rank %d: weights %016llx\n", rank, (unsigned long long)hash);
  cddp_optim_destroy(adamw);
  cddp_ddp_destroy(ddp);
  for (int k = 0; k < PARAMS; k++) cddp_free(g, p[k].data);
  cddp_destroy(g);
  return 0;
}

static int usage(bool help) {
  fprintf(help ? stdout : stderr, "usage: elastic [-n N] [--steps N]\n"
                                  "  -n       ranks, as child processes (4)\n"
                                  "  --steps  steps in all, at least 1 (2000)\n");
  return help ? 0 : 2;
}

int main(int argc, char **argv) {
  int ranks = 4;
  bool given = false; /* -n */
  for (int i = 1; i < argc; i += 2) {
    int *value = strcmp(argv[i], "-n") == 0        ? &ranks
                 : strcmp(argv[i], "--steps") == 0 ? &steps
                                                   : NULL;
    if (value == NULL || i + 1 == argc) return usage(strcmp(argv[i], "--help") == 0);
    *value = atoi(argv[i + 1]);
    given = given || value == &ranks;
  }
  if (ranks < 1 || steps < 1) return usage(false);
  setvbuf(stdout, NULL, _IOLBF, 0); /* whole lines, also into a file that the ranks share */

  int rank = cddp_launcher_rank(); /* of torchrun, mpirun, srun, ...; or -1 */
  if (rank == 0 && given)
    fprintf(stderr, "-n %d is ignored: the launcher sets the number of ranks\n", ranks);
  if (rank >= 0) return train(rank, NULL);
  if (cddp_spawn_elastic(train, NULL, ranks, 100) == CDDP_OK) return 0;
  fprintf(stderr, "%s\n", cddp_error());
  return 1;
}
