/* data_parallel.c - each batch split over several devices (threads here), as nn.DataParallel does.

     cc -O2 examples/data_parallel.c -o data_parallel -lpthread -lm
     ./data_parallel -n 4 --output 1            4 devices (1, 2, 4 or 8); which one holds the model

   The output device scatters the batch and broadcasts its weights; all devices run forward. The
   loss is worked out either there, outputs being gathered and their gradients scattered, or on each
   device. Weight gradients are reduced to the output device, which alone steps. Trains Linear 64-10
   on one device, in both ways, and by cddp_ddp, which has no master. All sums follow one tree, over
   blocks of 8 samples: the losses are the same to the last bit; the program fails if not. */
#define CDDP_IMPLEMENTATION /* includes stdio.h, stdlib.h, string.h, math.h and time.h */
#include "../cddp.h"
#define TRY(calls) if (calls) return fprintf(stderr, "device %d: %s\n", me, cddp_error()), 1
enum { PIXELS = 64, CLASSES = 10, BIAS = CLASSES * PIXELS, WEIGHTS = BIAS + CLASSES };
enum { IMAGES = 1500, BATCH = 64, BLOCK = 8, BATCHES = IMAGES / BATCH, EPOCHS = 10, MOST = 8 };
enum { ONE_DEVICE, LOSS_ON_OUTPUT, LOSS_ON_EACH, DDP, WAYS };

static unsigned char images[16 + IMAGES * PIXELS], labels[8 + IMAGES]; /* with their headers */
static int devices = 2, output;
typedef struct job {
  int way;
  double loss[EPOCHS], milliseconds; /* of each epoch's mean; of a step */
  size_t bytes[MOST];                /* of each device's arrays */
} job;

static void load(float *x, unsigned char *label, const size_t *index, int n) {
  for (int i = 0; i < n * PIXELS; i++)
    x[i] = (float)images[16 + index[i / PIXELS] * PIXELS + (size_t)(i % PIXELS)] / 16;
  for (int i = 0; i < n; i++) label[i] = labels[8 + index[i]];
}

static void forward(const float *w, const float *x, float *y, int n) { /* n samples */
  for (; n > 0; n--, x += PIXELS, y += CLASSES)
    for (int c = 0; c < CLASSES; c++) {
      y[c] = w[BIAS + c];
      for (int k = 0; k < PIXELS; k++) y[c] += w[c * PIXELS + k] * x[k];
    }
}

/* The summed cross-entropy of n samples; y becomes its gradient, divided by `of`. */
static double criterion(float *y, const unsigned char *label, int n, float of) {
  double loss = 0;
  if (n > BLOCK) /* the canonical sum: one half plus the other */
    return criterion(y, label, n / 2, of) +
           criterion(y + n / 2 * CLASSES, label + n / 2, n / 2, of);
  for (; n > 0; n--, y += CLASSES, label++) {
    float top = y[0], sum = 0, right = y[*label];
    for (int c = 1; c < CLASSES; c++) top = fmaxf(top, y[c]);
    for (int c = 0; c < CLASSES; c++) sum += y[c] = expf(y[c] - top);
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

static int train(cddp_group *g, void *arg) { /* on one device */
  job *j = (job *)arg;
  int me = cddp_rank(g), out = output % cddp_world_size(g), share = BATCH / cddp_world_size(g);
  int each = j->way == LOSS_ON_EACH, ddp_way = j->way == DDP, master = me == out && !ddp_way;
  size_t n = (size_t)share, xs = n * PIXELS, ys = n * CLASSES, index[BATCH];
  size_t whole = master ? BATCH : 0, gathered = each ? 0 : whole; /* samples */
  size_t floats = 5 * WEIGHTS + xs + ys + whole * PIXELS + gathered * CLASSES;
  float *w = (float *)calloc(floats, sizeof *w), *grad = w + WEIGHTS, *x = grad + 4 * WEIGHTS;
  float *y = x + xs, *all_x = y + ys, *all_y = all_x + whole * PIXELS;
  unsigned char label[BATCH], all_labels[BATCH];
  cddp_param p = {"weights", w, ddp_way ? NULL : grad, WEIGHTS, CDDP_F32};
  cddp_sgd_desc options = {0}; options.lr = 0.25, options.momentum = 0.9;
  cddp_sampler_desc order = {IMAGES, 0, 1, 7, true, false, false}; /* the same on all devices */
  cddp_sampler samples; cddp_ddp *ddp = NULL; cddp_optim *sgd;
  j->bytes[me] = floats * sizeof *w + (master ? WEIGHTS * sizeof *w : 0); /* with SGD's momentum */
  if (ddp_way) TRY(cddp_ddp_create(&ddp, g, &p, 1, NULL));
  TRY(!w || cddp_sgd_create(&sgd, &p, 1, &options) || cddp_sampler_init(&samples, &order));
  struct timespec from, to; double loss = 0;
  clock_gettime(CLOCK_MONOTONIC, &from);
  for (int e = 0; e < EPOCHS; e++) {
    cddp_sampler_set_epoch(&samples, (uint64_t)e);
    for (int b = 0; b < BATCHES; b++, loss = 0) {
      for (int i = 0; i < BATCH; i++) cddp_sampler_next(&samples, &index[i]);
      if (ddp_way) load(x, label, index + me * share, share); /* each fetches its own */
      if (master) load(all_x, all_labels, index, BATCH);
      if (!ddp_way) /* scatter the batch, replicate the model */
        TRY(cddp_scatter(g, all_x, x, xs, CDDP_F32, out, NULL) ||
            cddp_broadcast(g, w, WEIGHTS, CDDP_F32, out, NULL));
      forward(w, x, y, share);
      if (!ddp_way && !each) {
        TRY(cddp_gather(g, y, all_y, ys, CDDP_F32, out, NULL));
        if (master) loss = criterion(all_y, all_labels, BATCH, BATCH);
        TRY(cddp_scatter(g, all_y, y, ys, CDDP_F32, out, NULL));
      } else {
        if (each) TRY(cddp_scatter(g, all_labels, label, n, CDDP_U8, out, NULL));
        loss = criterion(y, label, share, each ? BATCH : (float)share); /* cddp_ddp takes a mean */
        TRY(cddp_reduce(g, &loss, 1, CDDP_F64, CDDP_SUM, out, NULL));
      }
      backward(x, y, grad, share);
      if (ddp_way) memcpy(p.grad, grad, WEIGHTS * sizeof *w);
      if (ddp_way) TRY(cddp_ddp_ready(ddp, 0) || cddp_ddp_step(ddp, sgd));
      if (!ddp_way) TRY(cddp_reduce(g, grad, WEIGHTS, CDDP_F32, CDDP_SUM, out, NULL));
      if (master) TRY(cddp_optim_step(sgd));
      if (me == out) j->loss[e] += loss / (BATCHES * BATCH);
    }
  }
  clock_gettime(CLOCK_MONOTONIC, &to);
  if (me == out) j->milliseconds = (1e3 * (double)(to.tv_sec - from.tv_sec) +
                                    1e-6 * (double)(to.tv_nsec - from.tv_nsec)) / EPOCHS / BATCHES;
  return cddp_optim_destroy(sgd), cddp_ddp_destroy(ddp), cddp_sampler_destroy(&samples), free(w), 0;
}
static int usage(bool help) {
  fprintf(help ? stdout : stderr, "usage: data_parallel [-n N] [--output DEVICE]\n"
                                  "  -n        devices, which are threads: 1, 2, 4 or 8 (2)\n"
                                  "  --output  device of the outputs, from 0 to N - 1 (0)\n");
  return help ? 0 : 2;
}

int main(int argc, char **argv) {
  static job jobs[WAYS];
  int bad = 0;
  for (int i = 1; i < argc; i += 2) {
    int *value = strcmp(argv[i], "-n") == 0         ? &devices
                 : strcmp(argv[i], "--output") == 0 ? &output
                                                    : NULL;
    if (value == NULL || i + 1 == argc) return usage(strcmp(argv[i], "--help") == 0);
    *value = atoi(argv[i + 1]);
  }
  if (devices < 1 || MOST % devices || output < 0 || output >= devices) return usage(false);
  FILE *f = fopen("examples/data/digits-train-images-idx3-ubyte", "rb");
  if (!f || fread(images, sizeof images, 1, f) != 1 || fclose(f)) return perror("images"), 1;
  f = fopen("examples/data/digits-train-labels-idx1-ubyte", "rb");
  if (!f || fread(labels, sizeof labels, 1, f) != 1 || fclose(f)) return perror("labels"), 1;
  for (int way = 0; way < WAYS; way++) {
    if (jobs[way].way = way, cddp_run_threads(train, &jobs[way], way ? devices : 1))
      return fprintf(stderr, "%s\n", cddp_error()), 1;
  }
  puts("epoch  one device          loss on output      loss on each        cddp_ddp");
  for (int e = 0; e < EPOCHS; e++) {
    printf("%5d", e + 1);
    for (int w = 0; w < WAYS; bad |= jobs[w++].loss[e] != jobs[0].loss[e])
      printf("  %.16f", jobs[w].loss[e]);
    puts("");
  }
  for (int w = LOSS_ON_OUTPUT; w <= LOSS_ON_EACH; w++)
    printf("loss on %s: %zu bytes on device %d, %zu on each other, %.3f ms a step\n",
           w == LOSS_ON_EACH ? "each" : "output", jobs[w].bytes[output], output,
           jobs[w].bytes[(output + 1) % devices], jobs[w].milliseconds);
  return bad ? puts("The losses differ."), 1 : 0;
}
