/* data_parallel.cu - each batch split over the GPUs of one process, as nn.DataParallel does.

     nvcc -O3 -arch=native examples/data_parallel.cu -o data_parallel -lnccl -lcublas
     ./data_parallel -n 2 --output 1            2 GPUs (1, 2, 4 or 8); which one holds the model
     ./data_parallel --epochs 3 --images 640    shorter

   data_parallel.c on GPUs, a thread for each. The output GPU scatters the batch and broadcasts its
   weights; all run forward. The loss is worked out either there, outputs being gathered and their
   gradients scattered, or on each GPU. Weight gradients are reduced to the output GPU, which alone
   steps. Trains Linear 64-10 on one GPU, in both ways, and by cddp_ddp, which has no master and no
   weights to broadcast. The mean losses must agree to 1e-4 (the order of sums is NCCL's), or the
   program fails. All calls enqueue on the GPU's default stream; the host waits once an epoch. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp_kernels.cuh" /* includes cddp.h, which brings stdio.h and others */
#include <time.h>
#define TRY(calls) if (calls) return 1 /* cddp_run_threads passes the thread's cddp_error() on */
#define CUDA(call) if (call) return fprintf(stderr, "GPU %d: %s failed\n", me, #call), 1
#define COPY(to, from, bytes) CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, NULL))
enum { PIXELS = 64, CLASSES = 10, BIAS = CLASSES * PIXELS, WEIGHTS = BIAS + CLASSES };
enum { IMAGES = 1500, BATCH = 64, EPOCHS = 10, MOST = 8 };
enum { ONE_GPU, LOSS_ON_OUTPUT, LOSS_ON_EACH, DDP, WAYS };

static unsigned char images[16 + IMAGES * PIXELS], labels[8 + IMAGES]; /* with their headers */
static int gpus = 2, output, epochs = EPOCHS, batches = IMAGES / BATCH;
typedef struct job {
  int way;
  double loss[EPOCHS], milliseconds; /* of each epoch's mean; of a step */
  size_t bytes[MOST];                /* of each GPU's arrays */
} job;

/* n samples, to memory of a GPU. */
static int load(float *x, int32_t *label, const size_t *index, int n, int me) {
  float pixels[BATCH * PIXELS];
  int32_t classes[BATCH];
  for (int i = 0; i < n * PIXELS; i++)
    pixels[i] = (float)images[16 + index[i / PIXELS] * PIXELS + (size_t)(i % PIXELS)] / 16;
  for (int i = 0; i < n; i++) classes[i] = labels[8 + index[i]];
  COPY(x, pixels, (size_t)(n * PIXELS) * sizeof *x);
  COPY(label, classes, (size_t)n * sizeof *label);
  return 0;
}

static int train(cddp_group *g, void *arg) { /* on one GPU */
  job *j = (job *)arg;
  int me = cddp_rank(g), out = output % cddp_world_size(g), share = BATCH / cddp_world_size(g);
  bool each = j->way == LOSS_ON_EACH, ddp_way = j->way == DDP, master = me == out && !ddp_way;
  size_t n = (size_t)share, xs = n * PIXELS, ys = n * CLASSES, index[BATCH];
  size_t whole = master ? BATCH : 0, gathered = each ? 0 : whole; /* samples */
  size_t floats = 2 * WEIGHTS + xs + ys + n + whole * (PIXELS + 1) + gathered * CLASSES;
  TRY(cddp_set_device(g, "cuda", NULL)); /* cuda:0 for thread 0, and so on; joined by NCCL */
  size_t bytes = floats * sizeof(float) + CDDP_CUDA_SCRATCH_BYTES + 2 * sizeof(double);
  double *stats = (double *)cddp_alloc(g, bytes), *scratch = stats + 2, seen[2];
  TRY(!stats);
  float *w = (float *)(scratch + CDDP_CUDA_SCRATCH_BYTES / sizeof *scratch), *grad = w + WEIGHTS;
  float *x = grad + WEIGHTS, *y = x + xs, *all_x = y + ys, *all_y = all_x + whole * PIXELS;
  int32_t *label = (int32_t *)(all_y + gathered * CLASSES), *all_labels = label + n;
  CUDA(cudaMemset(stats, 0, bytes));
  cublasHandle_t blas;
  CUDA(cublasCreate(&blas) != CUBLAS_STATUS_SUCCESS);
  cddp_param p = {"weights", w, ddp_way ? NULL : grad, WEIGHTS, CDDP_F32};
  cddp_sgd_desc options = cddp_sgd_desc();
  options.lr = 0.25, options.momentum = 0.9;
  cddp_sampler_desc order = {(size_t)(batches * BATCH), 0, 1, 7, true, false, false};
  cddp_sampler samples;
  cddp_ddp *ddp = NULL;
  cddp_optim *sgd;
  j->bytes[me] = bytes + (master ? WEIGHTS * sizeof *w : 0); /* with SGD's momentum */
  if (ddp_way) TRY(cddp_ddp_create(&ddp, g, &p, 1, NULL));
  options.ddp = ddp;
  TRY(cddp_sgd_create(&sgd, &p, 1, &options) || cddp_sampler_init(&samples, &order));
  grad = (float *)p.grad; /* cddp_ddp places it where NCCL reduces it without a copy */
  struct timespec from, to;
  clock_gettime(CLOCK_MONOTONIC, &from);
  for (int e = 0; e < epochs; e++) {
    cddp_sampler_set_epoch(&samples, (uint64_t)e);
    CUDA(cudaMemsetAsync(stats, 0, sizeof seen, NULL));
    for (int b = 0; b < batches; b++) {
      for (int i = 0; i < BATCH; i++) cddp_sampler_next(&samples, &index[i]);
      if (ddp_way) TRY(load(x, label, index + me * share, share, me)); /* each fetches its own */
      if (master) TRY(load(all_x, all_labels, index, BATCH, me));
      if (!ddp_way) /* scatter the batch, replicate the model */
        TRY(cddp_scatter(g, all_x, x, xs, CDDP_F32, out, NULL) ||
            cddp_broadcast(g, w, WEIGHTS, CDDP_F32, out, NULL));
      CUDA(cddp_cuda_linear(blas, x, w, w + BIAS, y, share, PIXELS, CLASSES, false, NULL));
      if (!ddp_way && !each) {
        TRY(cddp_gather(g, y, all_y, ys, CDDP_F32, out, NULL));
        if (master)
          CUDA(cddp_cuda_cross_entropy(all_y, all_labels, all_y, stats, scratch, BATCH, CLASSES,
                                       NULL));
        TRY(cddp_scatter(g, all_y, y, ys, CDDP_F32, out, NULL));
      } else {
        if (each) TRY(cddp_scatter(g, all_labels, label, n, CDDP_I32, out, NULL));
        CUDA(cddp_cuda_cross_entropy(y, label, y, stats, scratch, share, CLASSES, NULL));
      }
      if (!ddp_way) CUDA(cudaMemsetAsync(grad, 0, WEIGHTS * sizeof *grad, NULL));
      CUDA(cddp_cuda_linear_backward(blas, x, w, y, NULL, grad, grad + BIAS, share, PIXELS, CLASSES,
                                     NULL)); /* adds; y is its own gradient by now */
      if (ddp_way) TRY(cddp_ddp_ready(ddp, 0) || cddp_ddp_step(ddp, sgd));
      if (!ddp_way) /* each: means over shares */
        TRY(cddp_reduce(g, grad, WEIGHTS, CDDP_F32, each ? CDDP_AVG : CDDP_SUM, out, NULL));
      if (master) TRY(cddp_optim_step(sgd));
    }
    TRY(cddp_synchronize(g)); /* not cudaDeviceSynchronize, which would not hear of a failure */
    CUDA(cudaMemcpy(seen, stats, sizeof seen, cudaMemcpyDefault));
    TRY(cddp_reduce(g, seen, 1, CDDP_F64, CDDP_SUM, out, NULL)); /* host memory: by the CPU */
    if (!ddp_way && !each) seen[0] *= cddp_world_size(g); /* only the output GPU had one */
    if (me == out) j->loss[e] = seen[0] / batches / cddp_world_size(g);
  }
  clock_gettime(CLOCK_MONOTONIC, &to);
  if (me == out) j->milliseconds = (1e3 * (double)(to.tv_sec - from.tv_sec) +
                                    1e-6 * (double)(to.tv_nsec - from.tv_nsec)) / epochs / batches;
  cddp_optim_destroy(sgd), cddp_ddp_destroy(ddp), cddp_sampler_destroy(&samples);
  return cublasDestroy(blas), cddp_free(g, stats), 0;
}

int main(int argc, char **argv) {
  static job jobs[WAYS];
  const char *const names[] = {"-n", "--output", "--epochs", "--images"};
  int *const values[] = {&gpus, &output, &epochs, &batches}, bad = 0;
  bool help = argc == 2 && strcmp(argv[1], "--help") == 0;
  for (int i = 1, k; i < argc; i += 2) {
    for (k = 0; k < 4 && strcmp(argv[i], names[k]); k++) {}
    if (k == 4 || i + 1 == argc) bad = 1;
    else *values[k] = atoi(argv[i + 1]) / (k == 3 ? BATCH : 1);
  }
  if (bad || gpus < 1 || MOST % gpus || output < 0 || output >= gpus || epochs < 1 ||
      epochs > EPOCHS || batches < 1 || batches > IMAGES / BATCH)
    return fprintf(help ? stdout : stderr,
                   "usage: %s [-n N] [--output GPU] [--epochs N] [--images N]\n"
                   "  -n        GPUs, each a thread's: 1, 2, 4 or 8 (2)\n"
                   "  --output  GPU of the outputs, from 0 to N - 1 (0)\n"
                   "  --epochs  1 to %d (%d)\n  --images  %d to %d (all)\n",
                   argv[0], EPOCHS, EPOCHS, BATCH, IMAGES), help ? 0 : 2;
  FILE *f = fopen("examples/data/digits-train-images-idx3-ubyte", "rb");
  if (!f || fread(images, sizeof images, 1, f) != 1 || fclose(f)) return perror("images"), 1;
  f = fopen("examples/data/digits-train-labels-idx1-ubyte", "rb");
  if (!f || fread(labels, sizeof labels, 1, f) != 1 || fclose(f)) return perror("labels"), 1;
  for (int way = 0; way < WAYS; way++) {
    if (jobs[way].way = way, cddp_run_threads(train, &jobs[way], way ? gpus : 1))
      return fprintf(stderr, "%s\n", cddp_error()), 1;
  }
  puts("epoch  one GPU  loss on output  loss on each  cddp_ddp");
  for (int e = 0; e < epochs; e++) {
    printf("%5d  %.5f  %14.5f  %12.5f  %8.5f\n", e + 1, jobs[0].loss[e], jobs[1].loss[e],
           jobs[2].loss[e], jobs[3].loss[e]);
    for (int w = 1; w < WAYS; w++) bad |= !(fabs(jobs[w].loss[e] - jobs[0].loss[e]) < 1e-4);
  }
  for (int w = LOSS_ON_OUTPUT; w <= LOSS_ON_EACH; w++)
    printf("loss on %s: %zu bytes on GPU %d, %zu on each other, %.3f ms a step\n",
           w == LOSS_ON_EACH ? "each" : "output", jobs[w].bytes[output], output,
           jobs[w].bytes[(output + 1) % gpus], jobs[w].milliseconds);
  return bad ? puts("The losses differ."), 1 : 0;
}
