/* digits.c - trains a network on handwritten digits, with the images divided among the ranks.

     cc -O2 examples/digits.c -o digits -lopenblas -lpthread -lm
     ./digits                                        2 ranks, as child processes
     ./digits -n 4 --plot curve.svg --csv curve.csv  4 ranks; a picture and a table of the training
     ./digits --save FILE                            a checkpoint after each epoch
     ./digits -n 3 --resume FILE                     continues from the checkpoint, on 3 ranks
   --help lists all options. Run it in the folder that contains examples/, or name --data. OpenBLAS
   is required (Debian: libopenblas-dev). The training takes about a second. It shows a bar on a
   terminal, or a line each epoch; then the test accuracy and a hash of each rank's weights.

   The network is Linear (with bias), ReLU, Linear (without). An epoch shows each image once (a few
   twice if the shards do not divide them), with random noise. The same options give the same
   weights. With --shards 8 the weights are the same on 1 to 8 ranks. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp.h"

#include "idx.h"
#include "options.h"
#include "progress.h"
#include <cblas.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define TRY(call) /* in functions that have the variable rank */ \
  do { \
    if ((call) != CDDP_OK) return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1; \
  } while (0)

enum { CLASSES = 10, MOST = 4096 /* of any option that is a number */ };

static struct config {
  int ranks, epochs, batch, hidden, shards, seed;
  double lr, momentum;
  const char *data, *plot, *csv, *save, *resume;
} config;
static data_set training, testing;

static const option options[] = { /* name, type, variable, default, least, most, help */
    {"-n", INTEGER, &config.ranks, "2", 1, MOST, "ranks, as child processes"},
    {"--epochs", INTEGER, &config.epochs, "60", 1, MOST, "in all, with those of a checkpoint"},
    {"--batch", INTEGER, &config.batch, "32", 1, MOST, "images of a rank or shard in a step"},
    {"--hidden", INTEGER, &config.hidden, "1024", 1, MOST, "units of the hidden layer"},
    {"--shards", INTEGER, &config.shards, "0", 0, MOST, "of the global batch; 0: one a rank"},
    {"--seed", INTEGER, &config.seed, "1", 0, MOST, "of weights, noise and order"},
    {"--lr", REAL, &config.lr, "0.1", 0, MOST, "learning rate of the first epoch, for each shard"},
    {"--momentum", REAL, &config.momentum, "0.9", 0, MOST, "of SGD"},
    {"--data", TEXT, &config.data, "examples/data", 0, 0, "folder of the images and labels"},
    {"--plot", TEXT, &config.plot, NULL, 0, 0, "file for a picture of the training (SVG)"},
    {"--csv", TEXT, &config.csv, NULL, 0, 0, "file for the numbers of the picture (CSV)"},
    {"--save", TEXT, &config.save, NULL, 0, 0, "file for a checkpoint after each epoch"},
    {"--resume", TEXT, &config.resume, NULL, 0, 0, "checkpoint to continue from"},
};

/* --- Network: logits = w2 relu(w1 x) --- */

typedef struct network {
  int inputs, hidden; /* inputs: the pixels, and a 1 for the biases */
  float *w1, *w2;     /* [hidden][inputs], [CLASSES][hidden], as in torch.nn.Linear */
  float *x, *h, *y;   /* of a batch: [batch][inputs], [batch][hidden], [batch][CLASSES] */
  float *dh;          /* the gradient of h; the gradient of y is in y */
} network;

typedef struct totals {          /* of an epoch */
  double loss, correct, samples; /* cddp_all_reduce sums them as an array of 3 */
} totals;

static float uniform(double bound) { return (float)((2 * drand48() - 1) * bound); }

/* Copies an image to x, its brightest pixel as 1, with noise: a share of a neighbouring pixel, up
   to `noise`, and a random amount, up to 0.6 of that. Image, epoch and seed determine both. */
static void load_image(const data_set *set, size_t image, int epoch, double noise, float *x) {
  int pixels = set->rows * set->columns;
  int neighbours[] = {-set->columns, -1, 1, set->columns};
  const unsigned char *pixel = set->images + image * (size_t)pixels;
  unsigned short seed[] = {image, epoch, config.seed};
  srand48(jrand48(seed)); /* one step mixes the three numbers */
  float share = fabsf(uniform(noise));
  int neighbour = pixels + neighbours[lrand48() % 4]; /* + pixels: k + neighbour is not negative */
  float brightest = 1;
  for (int k = 0; k < pixels; k++) brightest = fmaxf(brightest, pixel[k]); /* not 0 */
  for (int k = 0; k < pixels; k++) {
    float mixed = (1 - share) * pixel[k] + share * pixel[(k + neighbour) % pixels]; /* wraps */
    x[k] = mixed / brightest + uniform(0.6 * noise);
  }
  x[pixels] = 1; /* the input of the biases */
}

/* Turns n rows of logits into the gradient of their mean loss: (softmax - 1 at the label) / n. */
static void cross_entropy(float *y, const int *labels, int n, totals *sum) {
  for (int i = 0; i < n; i++) {
    float *logits = y + i * CLASSES;
    float right = logits[labels[i]], highest = right, exp_sum = 0;
    for (int k = 0; k < CLASSES; k++) highest = fmaxf(highest, logits[k]);
    for (int k = 0; k < CLASSES; k++) {
      logits[k] = expf(logits[k] - highest);
      exp_sum += logits[k];
    }
    for (int k = 0; k < CLASSES; k++)
      logits[k] = (logits[k] / exp_sum - (k == labels[i] ? 1 : 0)) / (float)n;
    sum->loss += (double)(highest - right + logf(exp_sum));
    sum->correct += right >= highest;
  }
  sum->samples += n;
}

/* Runs batch b of a shard of the sampler. y becomes the gradient. Returns the number of images. */
static int forward(network *net, cddp_sampler *sampler, int shard, size_t b, const data_set *set,
                   int epoch, double noise, totals *sum) {
  size_t images[MOST];
  int labels[MOST];
  int n = (int)cddp_sampler_batch(sampler, shard, b, (size_t)config.batch, images);
  for (int i = 0; i < n; i++) {
    load_image(set, images[i], epoch, noise, net->x + i * net->inputs);
    labels[i] = set->labels[images[i]];
  }
  int inputs = net->inputs, hidden = net->hidden;
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, hidden, inputs, 1, net->x, inputs,
              net->w1, inputs, 0, net->h, hidden); /* h = x w1^T */
  for (int i = 0; i < n * hidden; i++) net->h[i] = fmaxf(net->h[i], 0);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, CLASSES, hidden, 1, net->h, hidden,
              net->w2, hidden, 0, net->y, CLASSES); /* y = h w2^T */
  cross_entropy(net->y, labels, n, sum);
  return n;
}

/* Adds to the gradients of w1 and w2, which cddp_ddp_step sets to zero. */
static cddp_result backward(network *net, cddp_ddp *ddp, float *dw1, float *dw2, int n) {
  int inputs = net->inputs, hidden = net->hidden;
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, CLASSES, hidden, n, 1, net->y, CLASSES,
              net->h, hidden, 1, dw2, hidden); /* dw2 += y^T h */
  cddp_result result = cddp_ddp_ready(ddp, 1); /* complete; between hosts averaged while ... */
  if (result != CDDP_OK) return result;
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, hidden, CLASSES, 1, net->y, CLASSES,
              net->w2, hidden, 0, net->dh, hidden); /* dh = y w2 */
  for (int i = 0; i < n * hidden; i++) net->dh[i] = net->h[i] > 0 ? net->dh[i] : 0;
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, hidden, inputs, n, 1, net->dh, hidden,
              net->x, inputs, 1, dw1, inputs); /* dw1 += dh^T x */
  return cddp_ddp_ready(ddp, 0); /* ... this one is computed */
}

/* Random weights, and memory for the activations of a batch. */
static cddp_result network_create(network *net, cddp_group *g) {
  net->inputs = training.rows * training.columns + 1;
  net->hidden = config.hidden;
  size_t n1 = (size_t)(net->hidden * net->inputs), n2 = (size_t)(CLASSES * net->hidden);
  size_t activations = (size_t)(config.batch * (net->inputs + 2 * net->hidden + CLASSES));
  net->w1 = (float *)cddp_alloc(g, (n1 + n2 + activations) * sizeof(float));
  if (!net->w1) return CDDP_OUT_OF_MEMORY;
  net->w2 = net->w1 + n1;
  net->x = net->w2 + n2;
  net->h = net->x + config.batch * net->inputs;
  net->dh = net->h + config.batch * net->hidden;
  net->y = net->dh + config.batch * net->hidden;
  srand48(config.seed);
  for (size_t i = 0; i < n1; i++) net->w1[i] = uniform(1 / sqrt(net->inputs));
  for (size_t i = 0; i < n2; i++) net->w2[i] = uniform(1 / sqrt(net->hidden));
  return CDDP_OK;
}

/* --- Training --- */

enum { LOSS, TRAINING_ACCURACY, TEST_ACCURACY, LEARNING_RATE, COLUMNS };
static double history[MOST][COLUMNS]; /* a row for each epoch; it is saved in checkpoints */

typedef struct trainer {
  cddp_group *g;
  cddp_ddp *ddp;
  cddp_optim *sgd;
  cddp_sampler order; /* of the training images */
  int shards;
  network net;
  cddp_param params[3]; /* w1, w2; of checkpoints also the history */
  progress bar;
} trainer;

/* One pass over the training images. S shards: 1/S of the steps, at S times the learning rate. */
static int train_epoch(trainer *t, int epoch, int rank) {
  double size = (double)cddp_sampler_size(&t->order); /* images of a shard */
  double lr = config.lr * t->shards * (config.epochs - epoch) / config.epochs; /* falls linearly */
  totals sum = {0};
  TRY(cddp_optim_set_lr(t->sgd, lr));
  for (int b = 0; b * config.batch < size; b++) {
    int shard;
    while (cddp_ddp_next_shard(t->ddp, &shard)) { /* this rank's; 0.6: the noise */
      int n = forward(&t->net, &t->order, shard, (size_t)b, &training, epoch, 0.6, &sum);
      TRY(backward(&t->net, t->ddp, (float *)t->params[0].grad, (float *)t->params[1].grad, n));
    }
    TRY(cddp_ddp_step(t->ddp, t->sgd)); /* mean over shards, SGD, zero gradients */
    double done = epoch + fmin(1, (b + 1) * config.batch / size);
    if (rank == 0) progress_bar(&t->bar, done, sum.loss / sum.samples);
  }
  TRY(cddp_all_reduce(t->g, &sum, 3, CDDP_F64, CDDP_SUM, NULL));
  history[epoch][LOSS] = sum.loss / sum.samples;
  history[epoch][TRAINING_ACCURACY] = 100 * sum.correct / sum.samples;
  history[epoch][LEARNING_RATE] = lr;
  return 0;
}

/* Each rank tests its shard of the test images. *accuracy is that of all ranks, in percent. */
static int test(trainer *t, double *accuracy, int rank) {
  cddp_sampler_desc exact = {(size_t)testing.count, .rank = rank, .exact = true}; /* none twice */
  exact.world_size = cddp_world_size(t->g);
  cddp_sampler images;
  totals sum = {0};
  TRY(cddp_sampler_init(&images, &exact));
  for (size_t b = 0; forward(&t->net, &images, rank, b, &testing, 0, 0, &sum) > 0; b++) {}
  TRY(cddp_all_reduce(t->g, &sum, 3, CDDP_F64, CDDP_SUM, NULL));
  *accuracy = 100 * sum.correct / sum.samples;
  cddp_sampler_destroy(&images);
  return 0;
}

static bool write_history(void) {
  static const char *const names[] = {"loss", "training accuracy", "test accuracy",
                                      "learning rate"};
  static const panel panels[] = {{"loss", LOSS, 1}, /* title, first curve, number of curves */
                                 {"accuracy, %", TRAINING_ACCURACY, 2},
                                 {"learning rate", LEARNING_RATE, 1}};
  curve c = {"Handwritten digits", "epoch", history[0], 0, config.epochs, COLUMNS, names};
  if (config.csv && !curve_write_csv(&c, config.csv)) return false;
  return !config.plot || curve_write_svg(&c, panels, 3, config.plot);
}

/* The model, its optimizer and the order of the images, on all ranks. */
static int trainer_create(trainer *t, int rank) {
  t->shards = config.shards > 0 ? config.shards : cddp_world_size(t->g);
  TRY(network_create(&t->net, t->g));
  size_t n1 = (size_t)(t->net.hidden * t->net.inputs), n2 = (size_t)(CLASSES * t->net.hidden);
  t->params[0] = (cddp_param){"w1", t->net.w1, NULL, n1, CDDP_F32};
  t->params[1] = (cddp_param){"w2", t->net.w2, NULL, n2, CDDP_F32};
  t->params[2] = (cddp_param){"history", history, NULL, MOST * COLUMNS, CDDP_F64};
  cddp_ddp_desc model = {.shards = config.shards}; /* 0: one a rank; --resume accepts any number */
  cddp_sgd_desc rule = {.momentum = config.momentum};
  cddp_sampler_desc shuffled = {.dataset_size = (size_t)training.count,
                                .world_size = t->shards,
                                .seed = (uint64_t)config.seed,
                                .shuffle = true};
  TRY(cddp_ddp_create(&t->ddp, t->g, t->params, 2, &model)); /* all ranks have rank 0's weights */
  TRY(cddp_sgd_create(&t->sgd, t->params, 2, &rule));
  TRY(cddp_sampler_init(&t->order, &shuffled));
  return 0;
}

static int train(int rank, void *arg) {
  trainer t = {0};
  double accuracy;
  (void)arg, openblas_set_num_threads(1); /* a rank has one core */
  TRY(cddp_init(&t.g, NULL));  /* the launcher's variables say where; or those of cddp_spawn */
  if (rank == 0 && !(curve_can_write(config.plot) && curve_can_write(config.csv))) return 1;
  if (trainer_create(&t, rank)) return 1;
  cddp_shape shapes[] = {
      {2, {t.net.hidden, t.net.inputs}}, {2, {CLASSES, t.net.hidden}}, {2, {MOST, COLUMNS}}};
  cddp_checkpoint_desc file = {.shapes = shapes, .optim = t.sgd, .sampler = &t.order, .ddp = t.ddp};
  if (config.resume) TRY(cddp_load(t.g, config.resume, t.params, 3, &file));
  int first = (int)cddp_sampler_epoch(&t.order);
  double samples = (double)cddp_sampler_size(&t.order) * t.shards;
  t.bar = (progress){"epoch", "samples", samples, first, config.epochs, progress_now(), 0};
  for (int epoch = first; epoch < config.epochs; epoch++) {
    if (train_epoch(&t, epoch, rank)) return 1;
    if (test(&t, &history[epoch][TEST_ACCURACY], rank)) return 1;
    if (rank == 0 && !isatty(STDOUT_FILENO)) /* a terminal shows the bar instead */
      printf("epoch %2d/%d  loss %.4f  training accuracy %.1f %%  test accuracy %.1f %%\n",
             epoch + 1, config.epochs, history[epoch][LOSS], history[epoch][TRAINING_ACCURACY],
             history[epoch][TEST_ACCURACY]);
    cddp_sampler_set_epoch(&t.order, (uint64_t)epoch + 1); /* before the save, which stores it */
    if (config.save) TRY(cddp_save(t.g, config.save, t.params, 3, &file));
  }

  if (test(&t, &accuracy, rank)) return 1;
  if (rank == 0) printf("test accuracy: %.1f %%\n", accuracy);
  if (rank == 0 && !write_history()) return 1;
  if (show_weights(t.g, t.net.w1, (t.params[0].count + t.params[1].count) * 4)) return 1; /* hash */

  cddp_optim_destroy(t.sgd);
  cddp_ddp_destroy(t.ddp);
  cddp_sampler_destroy(&t.order);
  cddp_free(t.g, t.net.w1);
  cddp_destroy(t.g);
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

  int rank = cddp_launcher_rank(); /* of torchrun, mpirun, srun, ...; or -1 */
  if (rank == 0 && option_given("-n", argc, argv))
    fprintf(stderr, "-n %d is ignored: the launcher sets the number of ranks\n", config.ranks);
  if (rank >= 0) return train(rank, NULL);
  if (cddp_spawn(train, NULL, config.ranks) == CDDP_OK) return 0; /* no launcher: forks the ranks */
  fprintf(stderr, "%s\n", cddp_error());
  return 1;
}
