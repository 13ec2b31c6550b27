/* digits.cu - trains a network on handwritten digits on GPUs, with the images divided among ranks.

     nvcc -O3 -arch=native examples/digits.cu -o digits -lnccl -lcublas
     ./digits                                   1 rank on a GPU
     ./digits -n 2                              2 ranks, each on its own GPU
     ./digits -n 2 --backend cpu                2 ranks that can share a GPU: slower, for tests
     ./digits -n 2 --device cpu --epochs 5      needs no GPU; digits.c is faster there
   --help lists all options. --data FOLDER takes MNIST's files, if they are named like those in
   examples/data.

   The network is Linear, ReLU, Linear. The layers are kernels of cddp_kernels.cuh and cuBLAS, which
   enqueue on the default stream; the program waits for the GPU once in an epoch. toy.cu explains
   the calls one by one. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp_kernels.cuh" /* includes cddp.h, stdio.h, stdlib.h, string.h and math.h */

#include "idx.h"
#include "options.h"
#include "progress.h"

#define TRY(call) \
  do { \
    if ((call) != CDDP_OK) return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1; \
  } while (0)
#define CUDA(call) ((call) ? (void)fprintf(stderr, "%s failed\n", #call), exit(1) : (void)0)

enum { CLASSES = 10, BATCH = 32, MOST = 4096 /* of any option that is a number */ };

static struct config {
  int ranks, epochs, hidden;
  double lr;
  const char *data, *device, *backend;
} config;

static const option options[] = {
    {"-n", INTEGER, &config.ranks, "1", 1, MOST, "ranks, as child processes"},
    {"--epochs", INTEGER, &config.epochs, "60", 1, MOST, "through all images"},
    {"--hidden", INTEGER, &config.hidden, "1024", 1, MOST, "units of the hidden layer"},
    {"--lr", REAL, &config.lr, "0.1", 0, MOST, "learning rate of the first epoch, for each rank"},
    {"--data", TEXT, &config.data, "examples/data", 0, 0, "folder of the images and labels"},
    {"--device", TEXT, &config.device, "cuda", 0, 0, "cuda, or cpu: needs no GPU"},
    {"--backend", TEXT, &config.backend, NULL, 0, 0, "nccl, or cpu: ranks can share a GPU"},
};

static data_set training, testing;
static bool gpu; /* else the functions of the network compute the same on the CPU */
static cublasHandle_t blas;

/* --- Network: logits = w2 relu(w1 x) --- */

typedef struct network { /* in the memory of the device */
  int inputs, hidden;    /* inputs: the pixels, and a 1 for the biases */
  float *w1, *w2;        /* [hidden][inputs], [CLASSES][hidden], as in torch.nn.Linear */
  float *x, *h, *y;      /* of a batch: [BATCH][inputs], [BATCH][hidden], [BATCH][CLASSES] */
  float *dh;             /* the gradient of h; the gradient of y is in y */
  int32_t *labels;       /* [BATCH] */
  double *stats;         /* of an epoch: the sum of the batches' mean losses, right guesses */
  double *scratch;       /* of cddp_cuda_cross_entropy */
  float *host;           /* host memory for the weights, or for a batch of images */
} network;

static float uniform(double bound) { return (float)((2 * drand48() - 1) * bound); }

/* Between host and device. */
static void copy(void *to, const void *from, size_t bytes) {
  if (gpu) CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
  else memcpy(to, from, bytes);
}

/* y[n][out] = x[n][in] times the transpose of w[out][in], then ReLU if asked. */
static void linear(const float *x, const float *w, float *y, int n, int in, int out, bool relu) {
  if (gpu) {
    CUDA(cddp_cuda_linear(blas, x, w, NULL, y, n, in, out, relu, NULL));
    return;
  }
  for (int i = 0; i < n; i++)
    for (int o = 0; o < out; o++) {
      float sum = 0;
      for (int k = 0; k < in; k++) sum += x[i * in + k] * w[o * in + k];
      y[i * out + o] = relu && sum < 0 ? 0 : sum;
    }
}

/* Adds to dw, the gradient of w, given dy. dx, unless NULL, becomes the gradient of x. */
static void linear_backward(const float *x, const float *w, const float *dy, float *dx, float *dw,
                            int n, int in, int out) {
  if (gpu) {
    CUDA(cddp_cuda_linear_backward(blas, x, w, dy, dx, dw, NULL, n, in, out, NULL));
    return;
  }
  for (int i = 0; i < n; i++)
    for (int o = 0; o < out; o++) {
      float d = dy[i * out + o];
      for (int k = 0; k < in; k++) dw[o * in + k] += d * x[i * in + k];
      for (int k = 0; k < in && dx; k++)
        dx[i * in + k] = (o > 0 ? dx[i * in + k] : 0) + d * w[o * in + k];
    }
}

/* dh becomes 0 where ReLU's result h is 0. */
static void relu_backward(float *dh, const float *h, int n) {
  if (gpu) CUDA(cddp_cuda_relu_backward(dh, h, (size_t)n, NULL));
  for (int i = 0; i < n && !gpu; i++) dh[i] = h[i] > 0 ? dh[i] : 0;
}

/* y becomes the gradient of the mean cross-entropy of n rows of logits. Adds to stats. */
static void cross_entropy(network *net, int n) {
  if (gpu) {
    CUDA(cddp_cuda_cross_entropy(net->y, net->labels, net->y, net->stats, net->scratch, n, CLASSES,
                                 NULL));
    return;
  }
  for (int i = 0; i < n; i++) {
    float *logits = net->y + i * CLASSES;
    float right = logits[net->labels[i]], highest = right, sum = 0;
    for (int k = 0; k < CLASSES; k++) highest = fmaxf(highest, logits[k]);
    for (int k = 0; k < CLASSES; k++) {
      logits[k] = expf(logits[k] - highest);
      sum += logits[k];
    }
    for (int k = 0; k < CLASSES; k++)
      logits[k] = (logits[k] / sum - (k == net->labels[i])) / (float)n;
    net->stats[0] += (double)(highest - right + logf(sum)) / n;
    net->stats[1] += right >= highest;
  }
}

/* Copies an image to x and adds noise. Of x, the last number is 1: its weights are the biases. */
static void load_image(const data_set *set, size_t image, double noise, float *x) {
  int pixels = set->rows * set->columns;
  const unsigned char *pixel = set->images + image * (size_t)pixels;
  float brightest = 1;
  for (int k = 0; k < pixels; k++) brightest = fmaxf(brightest, pixel[k]);
  for (int k = 0; k < pixels; k++) x[k] = pixel[k] / brightest + uniform(noise);
  x[pixels] = 1;
}

/* Runs the next batch. y becomes the gradient. Returns the number of images, 0 at the end. */
static int forward(network *net, cddp_sampler *sampler, const data_set *set, double noise) {
  int32_t labels[BATCH];
  int n = 0;
  for (size_t image; n < BATCH && cddp_sampler_next(sampler, &image); n++) {
    load_image(set, image, noise, net->host + n * net->inputs);
    labels[n] = set->labels[image];
  }
  copy(net->x, net->host, (size_t)(n * net->inputs) * sizeof *net->x);
  copy(net->labels, labels, (size_t)n * sizeof *labels);
  linear(net->x, net->w1, net->h, n, net->inputs, net->hidden, true);
  linear(net->h, net->w2, net->y, n, net->hidden, CLASSES, false);
  cross_entropy(net, n);
  return n;
}

/* Adds to the gradients of w1 and w2. */
static cddp_result backward(network *net, cddp_ddp *ddp, float *dw1, float *dw2, int n) {
  linear_backward(net->h, net->w2, net->y, net->dh, dw2, n, net->hidden, CLASSES);
  cddp_result result = cddp_ddp_ready(ddp, 1); /* NCCL averages it while ... */
  if (result != CDDP_OK) return result;
  relu_backward(net->dh, net->h, n * net->hidden);
  linear_backward(net->x, net->w1, net->dh, NULL, dw1, n, net->inputs, net->hidden);
  return cddp_ddp_ready(ddp, 0); /* ... this one is computed */
}

/* All arrays, in one piece of the device's memory, and random weights. */
static int network_create(network *net, cddp_group *g, int rank) {
  int inputs = training.rows * training.columns + 1, hidden = config.hidden;
  size_t n1 = (size_t)(hidden * inputs), n2 = (size_t)(CLASSES * hidden);
  size_t floats = n1 + n2 + (size_t)(BATCH * (inputs + 2 * hidden + CLASSES + 1));
  size_t bytes = 2 * sizeof(double) + CDDP_CUDA_SCRATCH_BYTES + floats * sizeof(float);
  net->inputs = inputs;
  net->hidden = hidden;
  net->stats = (double *)cddp_alloc(g, bytes);
  TRY(net->stats ? CDDP_OK : CDDP_OUT_OF_MEMORY);
  net->scratch = net->stats + 2;
  net->w1 = (float *)(net->scratch + CDDP_CUDA_SCRATCH_BYTES / sizeof *net->scratch);
  net->w2 = net->w1 + n1;
  net->x = net->w2 + n2;
  net->h = net->x + BATCH * inputs;
  net->dh = net->h + BATCH * hidden;
  net->y = net->dh + BATCH * hidden;
  net->labels = (int32_t *)(net->y + BATCH * CLASSES);

  net->host = (float *)calloc(floats, sizeof *net->host);
  if (!net->host) return fprintf(stderr, "rank %d: out of memory\n", rank), 1;
  srand48(rank + 1); /* each rank draws different noise; cddp_ddp_create copies rank 0's weights */
  for (size_t i = 0; i < n1; i++) net->host[i] = uniform(1 / sqrt(inputs));
  for (size_t i = n1; i < n1 + n2; i++) net->host[i] = uniform(1 / sqrt(hidden));
  copy(net->w1, net->host, (n1 + n2) * sizeof *net->host);
  return 0;
}

/* --- Training --- */

static void reset_stats(network *net) {
  double zeros[2] = {0, 0};
  copy(net->stats, zeros, sizeof zeros);
}

/* One pass over the training images. *loss is the mean over all ranks. */
static int train_epoch(network *net, cddp_group *g, cddp_ddp *ddp, cddp_optim *sgd,
                       const cddp_param *params, cddp_sampler *images, double *loss) {
  int rank = cddp_rank(g), steps = 0, n;
  reset_stats(net);
  while ((n = forward(net, images, &training, 0.36)) > 0) {
    TRY(backward(net, ddp, (float *)params[0].grad, (float *)params[1].grad, n));
    TRY(cddp_ddp_step(ddp, sgd)); /* enqueues the mean over ranks, SGD, zero gradients */
    steps++;
  }
  TRY(cddp_synchronize(g)); /* waits for the GPU, and returns what failed there */
  copy(loss, net->stats, sizeof *loss);
  *loss /= steps;
  TRY(cddp_all_reduce(g, loss, 1, CDDP_F64, CDDP_AVG, NULL)); /* of host memory */
  return 0;
}

/* Each rank tests its part of the test images. *accuracy is that of all ranks, in percent. */
static int test(network *net, cddp_group *g, cddp_sampler *images, double *accuracy) {
  double stats[2];
  int rank = cddp_rank(g);
  reset_stats(net);
  while (forward(net, images, &testing, 0) > 0) {}
  copy(stats, net->stats, sizeof stats);
  TRY(cddp_all_reduce(g, &stats[1], 1, CDDP_F64, CDDP_SUM, NULL));
  *accuracy = 100 * stats[1] / testing.count;
  return 0;
}

static int train(int rank, void *group_desc) {
  network net;
  cddp_group *g;
  cddp_ddp *ddp;
  cddp_optim *sgd;
  cddp_sampler images, test_images;
  double loss, accuracy;
  TRY(cddp_init(&g, (const cddp_group_desc *)group_desc)); /* makes rank's GPU the current one */
  int world = cddp_world_size(g);
  if (gpu && cublasCreate(&blas) != CUBLAS_STATUS_SUCCESS)
    return fprintf(stderr, "rank %d: no cuBLAS\n", rank), 1;
  if (network_create(&net, g, rank)) return 1;

  size_t n1 = (size_t)(net.hidden * net.inputs), n2 = (size_t)(CLASSES * net.hidden);
  cddp_param params[] = {{"w1", net.w1, NULL, n1, CDDP_F32}, {"w2", net.w2, NULL, n2, CDDP_F32}};
  cddp_sgd_desc rule = cddp_sgd_desc();
  rule.momentum = 0.9;
  cddp_sampler_desc shuffled = {(size_t)training.count, rank, world, 1, true, false, false};
  cddp_sampler_desc exact = {(size_t)testing.count, rank, world, 1, false, false, true};
  TRY(cddp_ddp_create(&ddp, g, params, 2, NULL)); /* all ranks have rank 0's weights */
  rule.ddp = ddp; /* the device of the parameters; without it cddp asks CUDA */
  TRY(cddp_sgd_create(&sgd, params, 2, &rule));
  TRY(cddp_sampler_init(&images, &shuffled));
  TRY(cddp_sampler_init(&test_images, &exact)); /* no image twice */

  for (int epoch = 0; epoch < config.epochs; epoch++) {
    double lr = config.lr * world * (config.epochs - epoch) / config.epochs; /* falls linearly */
    cddp_sampler_set_epoch(&images, (uint64_t)epoch); /* a new order */
    TRY(cddp_optim_set_lr(sgd, lr));
    if (train_epoch(&net, g, ddp, sgd, params, &images, &loss)) return 1;
    if (rank == 0) printf("epoch %2d/%d  loss %.4f\n", epoch + 1, config.epochs, loss);
  }

  if (test(&net, g, &test_images, &accuracy)) return 1;
  if (rank == 0) printf("test accuracy: %.1f %%\n", accuracy);
  copy(net.host, net.w1, (n1 + n2) * sizeof *net.host);
  if (show_weights(g, net.host, (n1 + n2) * sizeof *net.host)) return 1;

  cddp_optim_destroy(sgd);
  cddp_ddp_destroy(ddp);
  cddp_free(g, net.stats);
  free(net.host);
  if (gpu) cublasDestroy(blas);
  cddp_destroy(g);
  return 0;
}

int main(int argc, char **argv) {
  int code = options_read(options, sizeof options / sizeof *options, argc, argv);
  if (code >= 0) return code;
  if (!idx_load(&training, config.data, "train") || !idx_load(&testing, config.data, "test"))
    return 1;
  if (training.rows != testing.rows || training.columns != testing.columns)
    return fprintf(stderr, "train and test images differ in size\n"), 1;
  setvbuf(stdout, NULL, _IOLBF, 0); /* whole lines, also into a file that the ranks share */
  gpu = strcmp(config.device, "cpu") != 0;
  cddp_group_desc desc = cddp_group_desc();
  desc.device = config.device;
  desc.backend = config.backend;

  int rank = cddp_launcher_rank(); /* of torchrun, mpirun, srun, ...; or -1 */
  if (rank == 0 && option_given("-n", argc, argv))
    fprintf(stderr, "-n %d is ignored: the launcher sets the number of ranks\n", config.ranks);
  if (rank >= 0) return train(rank, &desc);
  cddp_result result = cddp_spawn(train, &desc, config.ranks); /* forks the ranks: no CUDA before */
  if (result == CDDP_OK) return 0;
  if (result != CDDP_PEER_LOST) fprintf(stderr, "%s\n", cddp_error());
  return 1; /* a rank that failed has printed its error */
}
