/* digits.c - trains a network on handwritten digits, each rank on its own share of the images.

     cc -O2 examples/digits.c -o digits -lopenblas -lpthread -lm
     ./digits                                   2 ranks, the images in examples/data
     ./digits -n 4 --svg loss.svg               4 ranks; draws the loss curve
     ./digits --data DIR --epochs 10            MNIST's files, named like those in examples/data
   All options are in a table below; the same ones give the same weights. toy.c explains the calls. */
#define CDDP_IMPLEMENTATION /* it includes stdio.h, stdlib.h, string.h, math.h, time.h and unistd.h */
#include "../cddp.h"
#include <cblas.h> /* Debian: libopenblas-dev */
#define FAIL(...) return fprintf(stderr, __VA_ARGS__), 1
#define TRY(calls) if (calls) FAIL("rank %d: %s\n", rank, cddp_error())
#define MATMUL(at, bt, m, n, k, a, lda, b, ldb, c, beta) /* c[m][n] = beta * c + a * b */ \
  cblas_sgemm(CblasRowMajor, Cblas##at, Cblas##bt, m, n, k, 1, a, lda, b, ldb, beta, c, n)

enum { RANKS, EPOCHS, BATCH, HIDDEN, SEED, LR, MOMENTUM, DATA, SVG, OPTIONS, CLASSES = 10, MAX = 4096 };
static struct { const char *name, *value; } option[OPTIONS] = { /* batch and lr are of one rank */
    {"-n", "2"}, {"--epochs", "60"}, {"--batch", "32"}, {"--hidden", "1024"}, {"--seed", "1"},
    {"--lr", "0.1"}, {"--momentum", "0.9"}, {"--data", "examples/data"}, {"--svg", NULL}};
static double number(int k) { return atof(option[k].value); }
static struct set { unsigned char *image, *label; unsigned count; int pixels, columns; } train_set, test_set;
static int in, hidden; /* x[n][in] -> h[n][hidden], ReLU -> y[n][CLASSES]; weights are [out][in] */
static float *w1, *w2, *x, *h, *y, *dh;
static double loss[MAX + 1]; /* of each epoch, then of the test; hits: the digits recognised */
static int64_t hits[MAX + 1];
static uint64_t rng; /* the state of this rank's random numbers */

/* Reads a set's two IDX files: big-endian magic number and sizes, then bytes. 0 is success. */
static int load(struct set *d, const char *name) {
  for (unsigned dims = 3; dims <= 3; dims -= 2) {
    const char *kind = dims == 3 ? "images-idx3" : "labels-idx1";
    unsigned v[4] = {1, 1, 1, 1};
    char path[MAX];
    snprintf(path, MAX, "%s/digits-%s-%s-ubyte", option[DATA].value, name, kind);
    FILE *f = fopen(path, "rb");
    if (!f) return perror(path), 1;
    for (unsigned i = 0; i < 4 + 4 * dims; i++) v[i / 4] = v[i / 4] << 8 | (unsigned)fgetc(f);
    size_t total = (size_t)v[1] * v[2] * v[3];
    if (v[0] != 0x800 + dims) FAIL("%s: not an IDX file of bytes in %u dimensions\n", path, dims);
    if (v[1] - 1 >= 1 << 24 || v[2] - 1 >= 512 || v[3] - 1 >= 512) FAIL("%s: bad sizes\n", path);
    unsigned char *p = (unsigned char *)malloc(total + 1); /* room to notice a byte too many */
    if (!p || fread(p, 1, total + 1, f) != total) FAIL("%s: not %zu bytes long\n", path, total);
    for (size_t i = 0; dims == 1 && i < total; i++)
      if (p[i] >= CLASSES) FAIL("%s: label %zu is %d\n", path, i, p[i]);
    if (dims == 1 && v[1] != d->count) FAIL("%s: %u labels, %u images\n", path, v[1], d->count);
    if (dims == 1) d->label = p;
    else d->image = p, d->count = v[1], d->pixels = (int)(v[2] * v[3]), d->columns = (int)v[3];
    fclose(f);
  }
  return 0;
}

static float uniform(double bound) { /* the next random number, from -bound to bound */
  rng = rng * 6364136223846793005u + 1442695040888963407u;
  return (float)(((double)(rng >> 40) / 8388608 - 1) * bound);
}

/* Runs the network on the rank's next images; leaves the gradient of the mean loss in y. Noise, for
   training, moves them a little too: no two epochs see the same. Returns the number of images. */
static int forward(cddp_sampler *s, const struct set *d, int epoch, double noise) {
  unsigned char label[MAX];
  int n = 0, batch = (int)number(BATCH), size = d->pixels, step[] = {-d->columns, -1, 1, d->columns};
  for (size_t i; n < batch && cddp_sampler_next(s, &i); label[n++] = d->label[i]) {
    const unsigned char *p = d->image + i * (size_t)size;
    int to = size + step[(int)(2 + uniform(2))];
    float *image = x + n * in, part = fabsf(uniform(noise)), light = 1;
    for (int k = 0; k < size; k++) light = fmaxf(light, p[k]);
    for (int k = 0; k < size; k++)
      image[k] = ((1 - part) * p[k] + part * p[(k + to) % size]) / light + uniform(0.6 * noise);
    image[size] = 1; /* its weight is the bias */
  }
  MATMUL(NoTrans, Trans, n, hidden, in, x, in, w1, in, h, 0);
  for (int i = 0; i < n * hidden; i++) h[i] = fmaxf(h[i], 0);
  MATMUL(NoTrans, Trans, n, CLASSES, hidden, h, hidden, w2, hidden, y, 0);
  for (int i = 0; i < n; i++) { /* softmax and cross-entropy */
    float *p = y + i * CLASSES, right = p[label[i]], top = right, sum = 0;
    for (int k = 0; k < CLASSES; k++) top = fmaxf(top, p[k]);
    for (int k = 0; k < CLASSES; k++) sum += p[k] = expf(p[k] - top);
    for (int k = 0; k < CLASSES; k++) p[k] = (p[k] / sum - (k == label[i] ? 1 : 0)) / (float)n;
    loss[epoch] += (double)(top - right + logf(sum));
    hits[epoch] += right >= top;
  }
  return n;
}

static int write_svg(const char *path, int epochs) {
  FILE *f = fopen(path, "w");
  if (!f) return perror(path), 1;
  fputs("<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 640 400' font-family='sans-serif'>"
        "<rect width='640' height='400' fill='white'/><text x='290' y='30'>Training loss</text>\n"
        "<text x='320' y='392'>epoch</text><text x='4' y='200'>loss</text>\n", f);
  for (int i = 5; i >= 0; i--) /* the last two lines of the grid are the axes */
    fprintf(f, "<path d='M70 %dH620M%d 45V345' stroke='%s'/><text x='40' y='%d'>%.1f</text><text "
            "x='%d' y='368'>%g</text>\n", 345 - 60 * i, 70 + 110 * i, i ? "#ccc" : "#000",
            350 - 60 * i, i / 2.0, 62 + 110 * i, epochs * i / 5.0);
  fputs("<polyline fill='none' stroke='#16a' stroke-width='2' points='", f);
  for (int e = 0; e < epochs; e++)
    fprintf(f, "%.1f %.1f ", 70 + 550.0 * (e + 1) / epochs, 345 - 120 * fmin(loss[e], 2.5));
  return fputs("'/></svg>\n", f) < 0 || fclose(f);
}

static void show_progress(double done, double mean, double images) { /* images: seen by all ranks */
  static struct timespec a, b;
  clock_gettime(CLOCK_MONOTONIC, a.tv_sec ? &b : &a);
  double s = fmax(1e-3, (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec));
  fprintf(stderr, "\r[%-20.*s] loss %.4f  %.0f samples/s  %.0f s left  %s", (int)(20 * done),
          "====================", mean, images / s, s / done - s, done < 1 ? "" : "\n");
}

static int train(int rank, void *arg) {
  int epochs = (int)number(EPOCHS), batch = (int)number(BATCH), n;
  size_t n1 = (size_t)(hidden * in), n2 = (size_t)(CLASSES * hidden);
  uint64_t seed = (uint64_t)number(SEED), hash = 0xcbf29ce484222325u, hashes[MAX];
  cddp_group *g; cddp_ddp *ddp; cddp_sgd *sgd; cddp_sampler samples, test;
  TRY(cddp_init(&g, (const cddp_group_desc *)arg)); /* NULL */
  int world = cddp_world_size(g), bar = rank == 0 && isatty(1);
  w1 = (float *)cddp_alloc(g, sizeof *w1 * (n1 + n2 + (size_t)(batch * (in + 2 * hidden + CLASSES))));
  TRY(!w1);
  w2 = w1 + n1, x = w2 + n2, h = x + batch * in, dh = h + batch * hidden, y = dh + batch * hidden;
  rng = seed + (uint64_t)rank; /* other noise on each rank */
  for (size_t i = 0; i < n1 + n2; i++) w1[i] = uniform(1 / sqrt(i < n1 ? in : hidden));
  cddp_param p[] = {{"w1", w1, NULL, n1, CDDP_F32}, {"w2", w2, NULL, n2, CDDP_F32}};
  cddp_sgd_desc options = {0, number(MOMENTUM), 0, 0, false, false, false, NULL};
  cddp_sampler_desc shuffled = {train_set.count, rank, world, seed, true, false, false};
  cddp_sampler_desc exact = {test_set.count, rank, world, seed, false, false, true};
  TRY(cddp_ddp_create(&ddp, g, p, 2, NULL) || cddp_sgd_create(&sgd, p, 2, &options));
  TRY(cddp_sampler_init(&samples, &shuffled) || cddp_sampler_init(&test, &exact));
  double size = (double)cddp_sampler_size(&samples);
  openblas_set_num_threads(1); /* the ranks share the cores */

  for (int e = 0; e < epochs; e++) {
    double seen = 0;
    cddp_sampler_set_epoch(&samples, (uint64_t)e); /* a new order */
    TRY(cddp_sgd_set_lr(sgd, number(LR) * world * (epochs - e) / epochs)); /* falls to nearly 0 */
    while ((n = forward(&samples, &train_set, e, 0.6)) > 0) {
      MATMUL(Trans, NoTrans, CLASSES, hidden, n, y, CLASSES, h, hidden, (float *)p[1].grad, 1);
      TRY(cddp_ddp_ready(ddp, 1)); /* the ranks average it while ... */
      MATMUL(NoTrans, NoTrans, n, hidden, CLASSES, y, CLASSES, w2, hidden, dh, 0);
      for (int i = 0; i < n * hidden; i++) dh[i] = h[i] > 0 ? dh[i] : 0;
      MATMUL(Trans, NoTrans, hidden, in, n, dh, hidden, x, in, (float *)p[0].grad, 1);
      TRY(cddp_ddp_ready(ddp, 0) || cddp_ddp_step(ddp, sgd)); /* ... this one is computed */
      seen += n;
      if (bar) show_progress((e + seen / size) / epochs, loss[e] / seen, (e * size + seen) * world);
    }
    loss[e] /= size;
    TRY(cddp_all_reduce(g, &loss[e], 1, CDDP_F64, CDDP_AVG, NULL));
    if (rank == 0 && !bar) printf("epoch %2d/%d  loss %.4f\n", e + 1, epochs, loss[e]);
  }
  if (rank == 0 && option[SVG].value && write_svg(option[SVG].value, epochs)) return 1;

  while (forward(&test, &test_set, epochs, 0) > 0) {}
  TRY(cddp_all_reduce(g, &hits[epochs], 1, CDDP_I64, CDDP_SUM, NULL));
  if (rank == 0) printf("test accuracy: %.1f %%\n", 100.0 * (double)hits[epochs] / test_set.count);
  for (size_t i = 0; i < (n1 + n2) * sizeof *w1; i++) /* 64-bit FNV-1a */
    hash = (hash ^ ((unsigned char *)w1)[i]) * 0x100000001b3u;
  TRY(cddp_all_gather(g, &hash, hashes, 1, CDDP_I64, NULL));
  for (int r = 0; r < world && rank == 0; r++) printf("rank %d weights %016" PRIx64 "\n", r, hashes[r]);
  for (int r = 0; r < world; r++)
    if (hashes[r] != hash) FAIL("rank %d: rank %d has other weights\n", rank, r);
  cddp_sgd_destroy(sgd), cddp_ddp_destroy(ddp), cddp_free(g, w1), cddp_destroy(g);
  return 0;
}

int main(int argc, char **argv) {
  for (int i = 1, k; i < argc; i += 2) {
    for (k = 0; k < OPTIONS && strcmp(argv[i], option[k].name);) k++;
    if (k == OPTIONS || i + 1 == argc) FAIL("%s: unknown, or needs a value\n", argv[i]);
    option[k].value = argv[i + 1];
    if (k < DATA && !(number(k) >= (k < SEED) && number(k) <= MAX)) FAIL("%s: bad number\n", argv[i]);
  }
  if (load(&train_set, "train") || load(&test_set, "test")) return 1;
  if (train_set.pixels != test_set.pixels) FAIL("train and test images differ in size\n");
  in = train_set.pixels + 1, hidden = (int)number(HIDDEN);
  setvbuf(stdout, NULL, _IOLBF, 0);
  if (getenv("RANK")) return train(atoi(getenv("RANK")), NULL);
  if (cddp_spawn(train, NULL, (int)number(RANKS))) FAIL("%s\n", cddp_error());
  return 0;
}
