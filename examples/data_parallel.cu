/* data_parallel.cu - each batch split over the GPUs of one process, as by nn.DataParallel.

     nvcc -O3 -arch=native examples/data_parallel.cu -o data_parallel -lnccl -lcublas
     ./data_parallel -n 2 --output 1            2 GPUs (1, 2, 4 or 8); which one holds the model
     ./data_parallel --epochs 3 --images 640    shorter

   data_parallel.c on GPUs, with a thread for each. The output GPU scatters the batch and broadcasts
   its weights, and all GPUs run forward. The loss is computed in one of two ways: on the output
   GPU, which gathers the outputs and scatters their gradients, or on each GPU. Weight gradients are
   reduced to the output GPU, and only that one steps. The program trains Linear 64-10 on one GPU,
   in both ways, and by cddp_ddp, which has no output GPU. It fails if two mean losses differ by
   1e-4; NCCL has its own order of sums. All work is enqueued on the GPU's default stream, and the
   host waits for it once in an epoch. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp_kernels.cuh" /* includes cddp.h, stdio.h, stdlib.h, string.h and math.h */

#include "idx.h"
#include <time.h>

#define TRY(call) \
  do { \
    if ((call) != CDDP_OK) return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1; \
  } while (0)
#define CUDA(call) \
  do { \
    if ((call) != 0) return fprintf(stderr, "rank %d: %s failed\n", rank, #call), 1; \
  } while (0)

enum { PIXELS = 64, CLASSES = 10, BIAS = CLASSES * PIXELS, WEIGHTS = BIAS + CLASSES };
enum { IMAGES = 1500, BATCH = 64, EPOCHS = 10, MOST = 8 };
enum { ONE_GPU, LOSS_ON_OUTPUT, LOSS_ON_EACH, DDP, WAYS };

static data_set training;
static int gpus = 2, output, epochs = EPOCHS, images = IMAGES, batches;

typedef struct job {
  int way;
  double loss[EPOCHS]; /* the mean of each epoch */
  double milliseconds; /* of a step */
  size_t bytes[MOST];  /* of each GPU's arrays */
} job;

/* The state of a GPU. Arrays of a batch's size are on the output GPU only. */
typedef struct device {
  bool is_output, is_ddp, loss_on_each;
  int rank, output, share; /* share: samples of the batch for each GPU */
  cddp_group *g;
  cddp_ddp *ddp; /* of the way DDP, else NULL */
  cddp_optim *sgd;
  cddp_param param;
  cublasHandle_t blas;
  double *stats;   /* the sum of mean losses, right guesses */
  double *scratch; /* of cddp_cuda_cross_entropy */
  float *weights, *grad, *x, *y, *all_x, *all_y;
  int32_t *labels, *all_labels;
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
  TRY(cddp_set_device(g, "cuda", NULL)); /* cuda:0 for thread 0, and so on; joined by NCCL */
  CUDA(cublasCreate(&d->blas));

  size_t share = (size_t)d->share, whole = d->is_output ? BATCH : 0;
  size_t gathered = d->loss_on_each ? 0 : whole;
  size_t floats = 2 * WEIGHTS + (share + whole) * (PIXELS + 1) + (share + gathered) * CLASSES;
  size_t bytes = floats * sizeof(float) + CDDP_CUDA_SCRATCH_BYTES + 2 * sizeof(double);
  d->stats = (double *)cddp_alloc(g, bytes);
  TRY(d->stats ? CDDP_OK : CDDP_OUT_OF_MEMORY);
  CUDA(cudaMemset(d->stats, 0, bytes));
  d->scratch = d->stats + 2;
  d->weights = (float *)(d->scratch + CDDP_CUDA_SCRATCH_BYTES / sizeof(double));
  d->grad = d->weights + WEIGHTS;
  d->x = d->grad + WEIGHTS;
  d->y = d->x + share * PIXELS;
  d->all_x = d->y + share * CLASSES;
  d->all_y = d->all_x + whole * PIXELS;
  d->labels = (int32_t *)(d->all_y + gathered * CLASSES);
  d->all_labels = d->labels + share;
  j->bytes[rank] = bytes + (d->is_output ? WEIGHTS * sizeof(float) : 0); /* with momentum */

  cddp_param param = {"weights", d->weights, d->is_ddp ? NULL : d->grad, WEIGHTS, CDDP_F32};
  cddp_sgd_desc rule = cddp_sgd_desc();
  d->param = param;
  rule.lr = 0.25;
  rule.momentum = 0.9;
  if (d->is_ddp) TRY(cddp_ddp_create(&d->ddp, g, &d->param, 1, NULL));
  rule.ddp = d->ddp;
  TRY(cddp_sgd_create(&d->sgd, &d->param, 1, &rule));
  d->grad = (float *)d->param.grad; /* cddp_ddp places it where NCCL reduces it without a copy */
  return 0;
}

/* n samples, to memory of a GPU. */
static int load(float *x, int32_t *labels, const size_t *index, int n, int rank) {
  float pixels[BATCH * PIXELS];
  int32_t classes[BATCH];
  for (int i = 0; i < n; i++) {
    const unsigned char *pixel = training.images + index[i] * PIXELS;
    for (int k = 0; k < PIXELS; k++) pixels[i * PIXELS + k] = (float)pixel[k] / 16;
    classes[i] = training.labels[index[i]];
  }
  size_t bytes = (size_t)(n * PIXELS) * sizeof *x;
  CUDA(cudaMemcpyAsync(x, pixels, bytes, cudaMemcpyDefault, NULL));
  CUDA(cudaMemcpyAsync(labels, classes, (size_t)n * sizeof *labels, cudaMemcpyDefault, NULL));
  return 0;
}

static int forward(device *d) {
  int rank = d->rank;
  CUDA(cddp_cuda_linear(d->blas, d->x, d->weights, d->weights + BIAS, d->y, d->share, PIXELS,
                        CLASSES, false, NULL));
  return 0;
}

/* The outputs y of n samples become their gradient. Adds the mean loss to stats. */
static int criterion(device *d, float *y, const int32_t *labels, int n) {
  int rank = d->rank;
  CUDA(cddp_cuda_cross_entropy(y, labels, y, d->stats, d->scratch, n, CLASSES, NULL));
  return 0;
}

/* Adds to grad. */
static int backward(device *d) {
  int rank = d->rank;
  CUDA(cddp_cuda_linear_backward(d->blas, d->x, d->weights, d->y, NULL, d->grad, d->grad + BIAS,
                                 d->share, PIXELS, CLASSES, NULL));
  return 0;
}

/* A step as nn.DataParallel makes it. */
static int data_parallel_step(device *d, const size_t *index) {
  int rank = d->rank, out = d->output;
  size_t pixels = (size_t)(d->share * PIXELS), outputs = (size_t)(d->share * CLASSES);
  if (d->is_output && load(d->all_x, d->all_labels, index, BATCH, rank)) return 1;
  TRY(cddp_scatter(d->g, d->all_x, d->x, pixels, CDDP_F32, out, NULL));
  TRY(cddp_broadcast(d->g, d->weights, WEIGHTS, CDDP_F32, out, NULL)); /* replicates the model */
  if (forward(d)) return 1;
  if (d->loss_on_each) {
    size_t share = (size_t)d->share;
    TRY(cddp_scatter(d->g, d->all_labels, d->labels, share, CDDP_I32, out, NULL));
    if (criterion(d, d->y, d->labels, d->share)) return 1;
  } else {
    TRY(cddp_gather(d->g, d->y, d->all_y, outputs, CDDP_F32, out, NULL));
    if (d->is_output && criterion(d, d->all_y, d->all_labels, BATCH)) return 1;
    TRY(cddp_scatter(d->g, d->all_y, d->y, outputs, CDDP_F32, out, NULL));
  }
  CUDA(cudaMemsetAsync(d->grad, 0, WEIGHTS * sizeof(float), NULL));
  if (backward(d)) return 1;
  cddp_op op = d->loss_on_each ? CDDP_AVG : CDDP_SUM; /* each: means over shares */
  TRY(cddp_reduce(d->g, d->grad, WEIGHTS, CDDP_F32, op, out, NULL));
  if (d->is_output) TRY(cddp_optim_step(d->sgd));
  return 0;
}

/* A step by cddp_ddp: each GPU loads its own samples, and all GPUs step. */
static int ddp_step(device *d, const size_t *index) {
  int rank = d->rank;
  if (load(d->x, d->labels, index + rank * d->share, d->share, rank)) return 1;
  if (forward(d) || criterion(d, d->y, d->labels, d->share) || backward(d)) return 1;
  TRY(cddp_ddp_ready(d->ddp, 0));
  TRY(cddp_ddp_step(d->ddp, d->sgd));
  return 0;
}

/* One pass over the images. *loss is set on the output GPU. */
static int train_epoch(device *d, cddp_sampler *samples, double *loss) {
  int rank = d->rank;
  CUDA(cudaMemsetAsync(d->stats, 0, 2 * sizeof *d->stats, NULL));
  for (int b = 0; b < batches; b++) {
    size_t index[BATCH];
    for (int i = 0; i < BATCH; i++) cddp_sampler_next(samples, &index[i]);
    if (d->is_ddp ? ddp_step(d, index) : data_parallel_step(d, index)) return 1;
  }
  TRY(cddp_synchronize(d->g)); /* cudaDeviceSynchronize does not return cddp's failures */
  CUDA(cudaMemcpy(loss, d->stats, sizeof *loss, cudaMemcpyDefault));
  TRY(cddp_reduce(d->g, loss, 1, CDDP_F64, CDDP_SUM, d->output, NULL)); /* of host memory */
  *loss /= batches;
  if (d->is_ddp || d->loss_on_each) *loss /= cddp_world_size(d->g); /* else one GPU has a loss */
  return 0;
}

static double now(void) { /* in milliseconds */
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static int train(cddp_group *g, void *arg) { /* on one GPU */
  job *j = (job *)arg;
  int rank = cddp_rank(g);
  device d;
  cddp_sampler samples;
  cddp_sampler_desc order = {(size_t)(batches * BATCH), 0, 1, 7, true, false, false};
  memset(&d, 0, sizeof d);
  if (device_create(&d, g, j)) return 1;
  TRY(cddp_sampler_init(&samples, &order)); /* the same on all GPUs */
  double start = now(), loss;
  for (int epoch = 0; epoch < epochs; epoch++) {
    cddp_sampler_set_epoch(&samples, (uint64_t)epoch);
    if (train_epoch(&d, &samples, &loss)) return 1;
    if (rank == d.output) j->loss[epoch] = loss;
  }
  if (rank == d.output) j->milliseconds = (now() - start) / epochs / batches;
  cddp_optim_destroy(d.sgd);
  cddp_ddp_destroy(d.ddp);
  cddp_sampler_destroy(&samples);
  cublasDestroy(d.blas);
  cddp_free(g, d.stats);
  return 0;
}

static int usage(bool help) {
  fprintf(help ? stdout : stderr,
          "usage: data_parallel [-n N] [--output GPU] [--epochs N] [--images N]\n"
          "  -n        GPUs, each with a thread: 1, 2, 4 or 8 (2)\n"
          "  --output  GPU of the outputs, from 0 to N - 1 (0)\n"
          "  --epochs  1 to %d (%d)\n"
          "  --images  %d to %d (%d)\n",
          EPOCHS, EPOCHS, BATCH, IMAGES, IMAGES);
  return help ? 0 : 2;
}

int main(int argc, char **argv) {
  static job jobs[WAYS];
  static const char *const names[] = {"-n", "--output", "--epochs", "--images"};
  static int *const values[] = {&gpus, &output, &epochs, &images};
  bool differ = false;
  for (int i = 1; i < argc; i += 2) {
    int k = 0;
    while (k < 4 && strcmp(argv[i], names[k]) != 0) k++;
    if (k == 4 || i + 1 == argc) return usage(strcmp(argv[i], "--help") == 0);
    *values[k] = atoi(argv[i + 1]);
  }
  if (gpus < 1 || MOST % gpus || output < 0 || output >= gpus) return usage(false);
  if (epochs < 1 || epochs > EPOCHS || images < BATCH || images > IMAGES) return usage(false);
  batches = images / BATCH;
  if (!idx_load(&training, "examples/data", "train")) return 1;
  if (training.count < IMAGES || training.rows * training.columns != PIXELS)
    return fprintf(stderr, "examples/data: %d images of 8 by 8 pixels expected\n", IMAGES), 1;

  for (int way = 0; way < WAYS; way++) {
    jobs[way].way = way;
    if (cddp_run_threads(train, &jobs[way], way == ONE_GPU ? 1 : gpus) != CDDP_OK)
      return fprintf(stderr, "%s\n", cddp_error()), 1;
  }
  puts("epoch  one GPU  loss on output  loss on each  cddp_ddp");
  for (int e = 0; e < epochs; e++) {
    printf("%5d  %.5f  %14.5f  %12.5f  %8.5f\n", e + 1, jobs[0].loss[e], jobs[1].loss[e],
           jobs[2].loss[e], jobs[3].loss[e]);
    for (int way = 1; way < WAYS; way++)
      differ = differ || !(fabs(jobs[way].loss[e] - jobs[0].loss[e]) < 1e-4);
  }
  for (int way = LOSS_ON_OUTPUT; way <= LOSS_ON_EACH; way++)
    printf("loss on %s: %zu bytes on GPU %d, %zu on each other, %.3f ms a step\n",
           way == LOSS_ON_EACH ? "each" : "output", jobs[way].bytes[output], output,
           jobs[way].bytes[(output + 1) % gpus], jobs[way].milliseconds);
  if (differ) puts("The losses differ.");
  return differ;
}
