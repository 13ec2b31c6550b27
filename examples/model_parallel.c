/* model_parallel.c - a model split over two ranks, which work on several micro-batches at a time.

     cc -O2 examples/model_parallel.c -o model_parallel -lpthread -lm
     ./model_parallel                           2 ranks: one pipeline of two stages
     ./model_parallel -n 4                      two pipelines, data parallel
     mpirun -n 4 ./model_parallel               the same, started by mpirun, srun or torchrun
     ./model_parallel --ahead 0                 one micro-batch at a time, for comparison

   Even ranks have stage 0, Linear 32-64 and tanh. The odd rank after each has stage 1, Linear 64-8
   and the loss. Stage 0 sends the activations of a micro-batch and starts the next one. It is up
   to `ahead` micro-batches ahead of the gradients that stage 1 returns, so that both stages work at
   the same time. The stage 0 ranks of all pipelines are one group, the stage 1 ranks another. Each
   group averages its gradients by a cddp_ddp. Sums have a fixed order: --ahead changes no loss. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IN = 32, MIDDLE = 64, OUT = 8, SAMPLES = 32 /* of a micro-batch */, MICRO = 8, STEPS = 200 };
enum { ACTIVATIONS = SAMPLES * MIDDLE, FORWARD = 1, BACKWARD = 2 /* tags of messages */ };

static int ranks = 2, ahead = 2;

#define TRY(call) \
  do { \
    if ((call) != CDDP_OK) return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1; \
  } while (0)

/* A micro-batch of the task: x is random, t[o] = sin(x[o] + 2 x[o + 1]). */
static void draw(float *x, float *t, uint64_t seed) {
  for (int i = 0; i < SAMPLES * IN; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    x[i] = (float)(seed >> 40) / 8388608.0f - 1;
  }
  for (int s = 0; s < SAMPLES; s++)
    for (int o = 0; o < OUT; o++)
      t[s * OUT + o] = sinf(x[s * IN + o % IN] + 2 * x[s * IN + (o + 1) % IN]);
}

/* y[SAMPLES][out] = w x + b; w is [out][in], b follows it. */
static void linear(const float *w, const float *x, float *y, int in, int out) {
  for (int s = 0; s < SAMPLES; s++, x += in, y += out)
    for (int o = 0; o < out; o++) {
      y[o] = w[out * in + o];
      for (int i = 0; i < in; i++) y[o] += w[o * in + i] * x[i];
    }
}

/* Adds to grad, laid out as w; dx, unless NULL, becomes the gradient of x. */
static void linear_backward(const float *w, const float *x, const float *dy, float *grad, float *dx,
                            int in, int out) {
  for (int s = 0; s < SAMPLES; s++, x += in, dy += out) {
    for (int i = 0; dx && i < in; i++) dx[s * in + i] = 0;
    for (int o = 0; o < out; o++) {
      for (int i = 0; i < in; i++) grad[o * in + i] += dy[o] * x[i];
      for (int i = 0; dx && i < in; i++) dx[s * in + i] += dy[o] * w[o * in + i];
      grad[out * in + o] += dy[o];
    }
  }
}

/* Stage 0 of a step: forward of micro-batch m, then backward of micro-batch m - ahead. */
static int first_stage(cddp_group *g, const float *w, float *grad, uint64_t seed, int micro,
                       int *most) {
  static float x[MICRO][SAMPLES * IN], h[MICRO][ACTIVATIONS], dh[MICRO][ACTIVATIONS];
  float t[SAMPLES * OUT];
  cddp_work *sent[MICRO], *back[MICRO];
  int rank = cddp_rank(g), next = rank + 1, flying = 0;
  for (int m = 0; m < micro + ahead; m++) {
    int done = m - ahead; /* the batch with gradients due */
    if (m < micro) {
      draw(x[m], t, seed + (uint64_t)m);
      linear(w, x[m], h[m], IN, MIDDLE);
      for (int i = 0; i < ACTIVATIONS; i++) h[m][i] = tanhf(h[m][i]);
      TRY(cddp_send(g, h[m], ACTIVATIONS, CDDP_F32, next, FORWARD, &sent[m]));
      TRY(cddp_recv(g, dh[m], ACTIVATIONS, CDDP_F32, next, BACKWARD, &back[m]));
      if (++flying > *most) *most = flying;
    }
    if (done < 0) continue;
    TRY(cddp_wait(sent[done]));
    TRY(cddp_wait(back[done]));
    for (int i = 0; i < ACTIVATIONS; i++) dh[done][i] *= 1 - h[done][i] * h[done][i];
    linear_backward(w, x[done], dh[done], grad, NULL, IN, MIDDLE);
    flying--;
  }
  return 0;
}

/* Stage 1 of a step: the second half of forward, the loss, the first half of backward. */
static int last_stage(cddp_group *g, const float *w, float *grad, uint64_t seed, int micro,
                      double *loss) {
  float x[SAMPLES * IN], t[SAMPLES * OUT], h[ACTIVATIONS], dh[ACTIVATIONS], y[SAMPLES * OUT];
  int rank = cddp_rank(g), previous = rank - 1;
  for (int m = 0; m < micro; m++) {
    draw(x, t, seed + (uint64_t)m);
    TRY(cddp_recv(g, h, ACTIVATIONS, CDDP_F32, previous, FORWARD, NULL));
    linear(w, h, y, MIDDLE, OUT);
    for (int i = 0; i < SAMPLES * OUT; i++) {
      float error = y[i] - t[i];
      *loss += (double)(error * error) / (SAMPLES * OUT) / micro;
      y[i] = 2 * error / (float)(SAMPLES * OUT * micro);
    }
    linear_backward(w, h, y, grad, dh, MIDDLE, OUT);
    TRY(cddp_send(g, dh, ACTIVATIONS, CDDP_F32, previous, BACKWARD, NULL));
  }
  return 0;
}

static int train(int rank, void *arg) {
  static float w[(IN + 1) * MIDDLE + (MIDDLE + 1) * OUT]; /* enough for either stage */
  int stage = rank % 2, micro, most = 0;
  cddp_param p = {"stage", w, NULL, stage ? (MIDDLE + 1) * OUT : (IN + 1) * MIDDLE, CDDP_F32};
  cddp_sgd_desc options = {0};
  cddp_group *g, *alike;
  cddp_ddp *ddp;
  cddp_optim *sgd;
  double loss = 0;
  (void)arg;
  TRY(cddp_init(&g, NULL));
  TRY(cddp_group_split(g, stage, rank, &alike)); /* the ranks with the same stage */
  ranks = cddp_world_size(g); /* a launcher's number, if there is one */
  if (ranks < 2 || ranks % 2 || 2 * MICRO % ranks)
    return fprintf(stderr, "%d ranks; it takes 2, 4, 8 or 16\n", ranks), 1;
  micro = MICRO / (ranks / 2);
  options.lr = 0.2;
  options.momentum = 0.9;
  for (size_t i = 0; i < p.count; i++) w[i] = 0.25f * sinf((float)(i * i + 1));
  TRY(cddp_ddp_create(&ddp, alike, &p, 1, NULL));
  TRY(cddp_sgd_create(&sgd, &p, 1, &options));
  for (int step = 0; step < STEPS; step++, loss = 0) {
    uint64_t seed = (uint64_t)(step * MICRO + rank / 2 * micro); /* of its first micro-batch */
    int failed = stage == 0 ? first_stage(g, w, (float *)p.grad, seed, micro, &most)
                            : last_stage(g, w, (float *)p.grad, seed, micro, &loss);
    if (failed) return 1;
    TRY(cddp_ddp_ready(ddp, 0));
    TRY(cddp_ddp_step(ddp, sgd));
    if (stage == 1) TRY(cddp_all_reduce(alike, &loss, 1, CDDP_F64, CDDP_AVG, NULL));
    if (rank == 1 && step % 40 == 39) printf("step %d: loss %.12f\n", step + 1, loss);
  }
  TRY(cddp_barrier(g)); /* rank 1 has printed its last line */
  if (rank == 0) printf("%d micro-batches on their way at once, %d ranks\n", most, ranks);
  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  cddp_destroy(alike);
  cddp_destroy(g);
  return 0;
}

static int usage(bool help) {
  fprintf(help ? stdout : stderr, "usage: model_parallel [-n N] [--ahead N]\n"
                                  "  -n       ranks, two to a pipeline: 2, 4, 8 or 16 (2)\n"
                                  "  --ahead  micro-batches that stage 0 is ahead, 0 to %d (2)\n",
          MICRO);
  return help ? 0 : 2;
}

int main(int argc, char **argv) {
  bool given = false; /* -n */
  for (int i = 1; i < argc; i += 2) {
    int *value = strcmp(argv[i], "-n") == 0        ? &ranks
                 : strcmp(argv[i], "--ahead") == 0 ? &ahead
                                                   : NULL;
    if (value == NULL || i + 1 == argc) return usage(strcmp(argv[i], "--help") == 0);
    *value = atoi(argv[i + 1]);
    given = given || value == &ranks;
  }
  if (ranks < 2 || ranks % 2 || 2 * MICRO % ranks || ahead < 0 || ahead > MICRO)
    return usage(false);
  setvbuf(stdout, NULL, _IOLBF, 0); /* whole lines, also into a file that the ranks share */

  int rank = cddp_launcher_rank(); /* of torchrun, mpirun, srun, ...; or -1 */
  if (rank == 0 && given)
    fprintf(stderr, "-n %d is ignored: the launcher sets the number of ranks\n", ranks);
  if (rank >= 0) return train(rank, NULL);
  if (cddp_spawn(train, NULL, ranks) == CDDP_OK) return 0; /* no launcher: forks the ranks */
  fprintf(stderr, "%s\n", cddp_error());
  return 1;
}
