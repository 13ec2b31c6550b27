/* data_parallel.c - each batch split over several devices (here: threads), as by nn.DataParallel.

     cc -O2 examples/data_parallel.c -o data_parallel -lpthread -lm
     ./data_parallel -n 4 --output 1            4 devices (1, 2, 4 or 8); which one holds the model

   The output device scatters the batch and broadcasts its weights, and all devices run forward. The
   loss is computed in one of two ways: on the output device, which gathers the outputs and scatters
   their gradients, or on each device. Weight gradients are reduced to the output device, and only
   that one steps. The program trains Linear 64-10 on one device, in both ways, and by cddp_ddp,
   which has no output device. All sums follow one tree, over blocks of 8 samples. The losses are
   the same, bit for bit, or the program fails. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp.h"

#include "idx.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TRY(call) \
  do { \
    if ((call) != CDDP_OK) return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1; \
  } while (0)

enum { PIXELS = 64, CLASSES = 10, BIAS = CLASSES * PIXELS, WEIGHTS = BIAS + CLASSES };
enum { IMAGES = 1500, BATCH = 64, BLOCK = 8, BATCHES = IMAGES / BATCH, EPOCHS = 10, MOST = 8 };
enum { ONE_DEVICE, LOSS_ON_OUTPUT, LOSS_ON_EACH, DDP, WAYS };

static data_set training;
static int devices = 2, output;

typedef struct job {
  int way;
  double loss[EPOCHS]; /* the mean of each epoch */
  double milliseconds; /* of a step */
  size_t bytes[MOST];  /* of each device's arrays */
} job;

static void load(float *x, unsigned char *label, const size_t *index, int n) {
  for (int i = 0; i < n; i++) {
    const unsigned char *pixel = training.images + index[i] * PIXELS;
    for (int k = 0; k < PIXELS; k++) x[i * PIXELS + k] = (float)pixel[k] / 16;
    label[i] = training.labels[index[i]];
  }
}

/* y = w x + bias, of n samples. */
static void forward(const float *w, const float *x, float *y, int n) {
  for (; n > 0; n--, x += PIXELS, y += CLASSES)
    for (int c = 0; c < CLASSES; c++) {
      y[c] = w[BIAS + c];
      for (int k = 0; k < PIXELS; k++) y[c] += w[c * PIXELS + k] * x[k];
    }
}

/* The summed cross-entropy of n samples; y becomes its gradient, divided by `of`. */
static double criterion(float *y, const unsigned char *label, int n, float of) {
  double loss = 0;
  if (n > BLOCK) { /* the canonical sum: one half plus the other */
    loss = criterion(y, label, n / 2, of);
    return loss + criterion(y + n / 2 * CLASSES, label + n / 2, n / 2, of);
  }
  for (; n > 0; n--, y += CLASSES, label++) {
    float top = y[0], sum = 0, right = y[*label];
    for (int c = 1; c < CLASSES; c++) top = fmaxf(top, y[c]);
    for (int c = 0; c < CLASSES; c++) {
      y[c] = expf(y[c] - top);
      sum += y[c];
    }
    for (int c = 0; c < CLASSES; c++) y[c] = (y[c] / sum - (c == *label)) / of;
    loss += (double)(top - right) + log((double)sum);
  }
  return loss;
}

/* grad[WEIGHTS] = the weights' gradient, summed over n samples; the halves' follow it. */
static void backward(const float *x, const float *dy, float *grad, int n) {
  memset(grad, 0, WEIGHTS * sizeof *grad);
  if (n > BLOCK) {
    backward(x, dy, grad, n / 2);
    backward(x + n / 2 * PIXELS, dy + n / 2 * CLASSES, grad + WEIGHTS, n / 2);
    for (int i = 0; i < WEIGHTS; i++) grad[i] += grad[WEIGHTS + i];
    return;
  }
  for (; n > 0; n--, x += PIXELS, dy += CLASSES)
    for (int c = 0; c < CLASSES; c++) {
      grad[BIAS + c] += dy[c];
      for (int k = 0; k < PIXELS; k++) grad[c * PIXELS + k] += dy[c] * x[k];
    }
}

/* The arrays of a device. Arrays of a batch's size are on the output device only. */
typedef struct device {
  bool is_output, is_ddp, loss_on_each;
  int rank, output, share; /* share: samples of the batch for each device */
  cddp_group *g;
  cddp_ddp *ddp; /* of the way DDP, else NULL */
  cddp_optim *sgd;
  cddp_param param;
  float *weights, *grad, *x, *y, *all_x, *all_y;
  unsigned char labels[BATCH], all_labels[BATCH];
} device;

static int device_create(device *d, cddp_group *g, job *j) {
  int rank = cddp_rank(g), size = cddp_world_size(g);
  d->g = g;
  d->rank = rank;
  d->output = output % size;
  d->share = BATCH / size;
  d->is_ddp = j->way == DDP;
  d->loss_on_each = j->way == LOSS_ON_EACH;
  d->is_output = rank == d->output && !d->is_ddp;

  size_t share = (size_t)d->share, whole = d->is_output ? BATCH : 0;
  size_t gathered = d->loss_on_each ? 0 : whole;
  size_t floats = 5 * WEIGHTS + (share + whole) * PIXELS + (share + gathered) * CLASSES;
  d->weights = (float *)calloc(floats, sizeof(float));
  if (!d->weights) return fprintf(stderr, "rank %d: out of memory\n", rank), 1;
  d->grad = d->weights + WEIGHTS; /* and room for the sums of halves */
  d->x = d->grad + 4 * WEIGHTS;
  d->y = d->x + share * PIXELS;
  d->all_x = d->y + share * CLASSES;
  d->all_y = d->all_x + whole * PIXELS;
  j->bytes[rank] = (floats + (d->is_output ? WEIGHTS : 0)) * sizeof(float); /* with momentum */

  cddp_param param = {"weights", d->weights, d->is_ddp ? NULL : d->grad, WEIGHTS, CDDP_F32};
  cddp_sgd_desc rule = {0};
  d->param = param;
  rule.lr = 0.25;
  rule.momentum = 0.9;
  if (d->is_ddp) TRY(cddp_ddp_create(&d->ddp, g, &d->param, 1, NULL));
  TRY(cddp_sgd_create(&d->sgd, &d->param, 1, &rule));
  return 0;
}

/* A step as nn.DataParallel makes it. *loss is set on the output device. */
static int data_parallel_step(device *d, const size_t *index, double *loss) {
  int rank = d->rank, out = d->output;
  size_t pixels = (size_t)(d->share * PIXELS), outputs = (size_t)(d->share * CLASSES);
  if (d->is_output) load(d->all_x, d->all_labels, index, BATCH);
  TRY(cddp_scatter(d->g, d->all_x, d->x, pixels, CDDP_F32, out, NULL));
  TRY(cddp_broadcast(d->g, d->weights, WEIGHTS, CDDP_F32, out, NULL)); /* replicates the model */
  forward(d->weights, d->x, d->y, d->share);
  if (d->loss_on_each) {
    size_t share = (size_t)d->share;
    TRY(cddp_scatter(d->g, d->all_labels, d->labels, share, CDDP_U8, out, NULL));
    *loss = criterion(d->y, d->labels, d->share, BATCH);
    TRY(cddp_reduce(d->g, loss, 1, CDDP_F64, CDDP_SUM, out, NULL));
  } else {
    TRY(cddp_gather(d->g, d->y, d->all_y, outputs, CDDP_F32, out, NULL));
    if (d->is_output) *loss = criterion(d->all_y, d->all_labels, BATCH, BATCH);
    TRY(cddp_scatter(d->g, d->all_y, d->y, outputs, CDDP_F32, out, NULL));
  }
  backward(d->x, d->y, d->grad, d->share);
  TRY(cddp_reduce(d->g, d->grad, WEIGHTS, CDDP_F32, CDDP_SUM, out, NULL));
  if (d->is_output) TRY(cddp_optim_step(d->sgd));
  return 0;
}

/* A step by cddp_ddp: each device loads its own samples, and all devices step. */
static int ddp_step(device *d, const size_t *index, double *loss) {
  int rank = d->rank;
  load(d->x, d->labels, index + rank * d->share, d->share);
  forward(d->weights, d->x, d->y, d->share);
  *loss = criterion(d->y, d->labels, d->share, (float)d->share); /* cddp_ddp averages over ranks */
  TRY(cddp_reduce(d->g, loss, 1, CDDP_F64, CDDP_SUM, d->output, NULL));
  backward(d->x, d->y, d->grad, d->share);
  memcpy(d->param.grad, d->grad, WEIGHTS * sizeof(float));
  TRY(cddp_ddp_ready(d->ddp, 0));
  TRY(cddp_ddp_step(d->ddp, d->sgd));
  return 0;
}

static double now(void) { /* in milliseconds */
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static int train(cddp_group *g, void *arg) { /* on one device */
  job *j = (job *)arg;
  int rank = cddp_rank(g);
  device d;
  cddp_sampler samples;
  cddp_sampler_desc order = {IMAGES, 0, 1, 7, true, false, false}; /* the same on all devices */
  memset(&d, 0, sizeof d);
  if (device_create(&d, g, j)) return 1;
  TRY(cddp_sampler_init(&samples, &order));
  double start = now();
  for (int epoch = 0; epoch < EPOCHS; epoch++) {
    cddp_sampler_set_epoch(&samples, (uint64_t)epoch);
    for (int b = 0; b < BATCHES; b++) {
      size_t index[BATCH];
      double loss = 0;
      for (int i = 0; i < BATCH; i++) cddp_sampler_next(&samples, &index[i]);
      if (d.is_ddp ? ddp_step(&d, index, &loss) : data_parallel_step(&d, index, &loss)) return 1;
      if (rank == d.output) j->loss[epoch] += loss / (BATCHES * BATCH);
    }
  }
  if (rank == d.output) j->milliseconds = (now() - start) / EPOCHS / BATCHES;
  cddp_optim_destroy(d.sgd);
  cddp_ddp_destroy(d.ddp);
  cddp_sampler_destroy(&samples);
  free(d.weights);
  return 0;
}

static int usage(bool help) {
  fprintf(help ? stdout : stderr, "usage: data_parallel [-n N] [--output DEVICE]\n"
                                  "  -n        devices, which are threads: 1, 2, 4 or 8 (2)\n"
                                  "  --output  device of the outputs, from 0 to N - 1 (0)\n");
  return help ? 0 : 2;
}

int main(int argc, char **argv) {
  static job jobs[WAYS];
  bool differ = false;
  for (int i = 1; i < argc; i += 2) {
    int *value = strcmp(argv[i], "-n") == 0         ? &devices
                 : strcmp(argv[i], "--output") == 0 ? &output
                                                    : NULL;
    if (value == NULL || i + 1 == argc) return usage(strcmp(argv[i], "--help") == 0);
    *value = atoi(argv[i + 1]);
  }
  if (devices < 1 || MOST % devices || output < 0 || output >= devices) return usage(false);
  if (!idx_load(&training, "examples/data", "train")) return 1;
  if (training.count < IMAGES || training.rows * training.columns != PIXELS)
    return fprintf(stderr, "examples/data: %d images of 8 by 8 pixels expected\n", IMAGES), 1;

  for (int way = 0; way < WAYS; way++) {
    jobs[way].way = way;
    if (cddp_run_threads(train, &jobs[way], way == ONE_DEVICE ? 1 : devices) != CDDP_OK)
      return fprintf(stderr, "%s\n", cddp_error()), 1;
  }
  puts("epoch  one device          loss on output      loss on each        cddp_ddp");
  for (int epoch = 0; epoch < EPOCHS; epoch++) {
    printf("%5d", epoch + 1);
    for (int way = 0; way < WAYS; way++) {
      printf("  %.16f", jobs[way].loss[epoch]);
      differ = differ || jobs[way].loss[epoch] != jobs[ONE_DEVICE].loss[epoch];
    }
    puts("");
  }
  for (int way = LOSS_ON_OUTPUT; way <= LOSS_ON_EACH; way++)
    printf("loss on %s: %zu bytes on device %d, %zu on each other, %.3f ms a step\n",
           way == LOSS_ON_EACH ? "each" : "output", jobs[way].bytes[output], output,
           jobs[way].bytes[(output + 1) % devices], jobs[way].milliseconds);
  if (differ) puts("The losses differ.");
  return differ;
}
