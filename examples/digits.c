/* digits.c - trains a network on handwritten digits, each rank on its own share of the images.

     cc -O2 examples/digits.c -o digits -lopenblas -lpthread -lm
     ./digits                                   2 ranks, the images in examples/data
     ./digits -n 4 --svg loss.svg               4 ranks; draws the loss curve
     ./digits --data DIR --epochs 10            MNIST's files, named like those in examples/data

   All options are in the table below; the same ones give the same weights. toy.c explains the calls. */
#define CDDP_IMPLEMENTATION
#include "../cddp.h"
#include <cblas.h> /* Debian: libopenblas-dev */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define FAIL(...) return fprintf(stderr, __VA_ARGS__), 1
#define TRY(call) if (call) FAIL("rank %d: %s\n", rank, cddp_error())
enum { RANKS, EPOCHS, BATCH, HIDDEN, SEED, LR, MOMENTUM, DATA, SVG, OPTIONS, CLASSES = 10, MAX = 4096 };
static struct { const char *name, *value; double least, most; } option[OPTIONS] = {
    {"-n", "2", 1, 64}, {"--epochs", "60", 1, MAX}, {"--batch", "32", 1, MAX}, /* of each rank */
    {"--hidden", "1024", 1, MAX}, {"--seed", "1", 0, 1e9}, {"--lr", "0.2", 0, 10},
    {"--momentum", "0.9", 0, 1}, {"--data", "examples/data", 0, 0}, {"--svg", NULL, 0, 0}};
static double number(int k) { return atof(option[k].value); }

static struct dataset { uint32_t size[3], labels; unsigned char *image, *label; } train_set, test_set;
static struct { /* x[n][in] -> h[n][hidden] -> y[n][CLASSES]; weights are w1[hidden][in], w2[CLASSES][hidden] */
  int in, hidden; /* the last column of x and of h is 1, so that of w1 and w2 is the bias */
  float *x, *h, *y, *w1, *w2;
} net;

/* Reads an IDX file: a big-endian magic number and sizes, then that many bytes. 0 is success. */
static int read_idx(unsigned char **out, const char *set, const char *what, unsigned dims, uint32_t *size) {
  char path[MAX];
  unsigned char b[16];
  size_t total = 1;
  snprintf(path, sizeof path, "%s/digits-%s-%s-idx%u-ubyte", option[DATA].value, set, what, dims);
  FILE *f = fopen(path, "rb");
  if (!f) return perror(path), 1;
  if (fread(b, 4, 1 + dims, f) != 1 + dims || b[0] || b[1] || b[2] != 8 || b[3] != dims)
    FAIL("%s: not an IDX file of bytes in %u dimensions\n", path, dims);
  for (unsigned i = 0, k = 4; i < dims; total *= size[i++], k += 4) {
    size[i] = (uint32_t)b[k] << 24 | (uint32_t)b[k + 1] << 16 | (uint32_t)b[k + 2] << 8 | b[k + 3];
    if (size[i] < 1 || size[i] > (i ? 1024 : 1 << 24)) FAIL("%s: bad size %u\n", path, size[i]);
  }
  *out = (unsigned char *)malloc(total + 1); /* room to notice a byte too many */
  if (!*out || fread(*out, 1, total + 1, f) != total) FAIL("%s: not %zu bytes long\n", path, total);
  return fclose(f);
}

static int load(struct dataset *d, const char *set) {
  if (read_idx(&d->image, set, "images", 3, d->size)) return 1;
  if (read_idx(&d->label, set, "labels", 1, &d->labels)) return 1;
  if (d->labels != d->size[0]) FAIL("%s set: %u images, %u labels\n", set, d->size[0], d->labels);
  if (memcmp(d->size + 1, train_set.size + 1, 8)) FAIL("%s set: images of another size\n", set);
  for (uint32_t i = 0; i < d->labels; i++)
    if (d->label[i] >= CLASSES) FAIL("%s set: label %u is %d\n", set, i, d->label[i]);
  return 0;
}

/* The next number of a random sequence, uniform in -bound .. bound. */
static float uniform(uint64_t *state, double bound) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return (float)(((double)(*state >> 40) / 8388608 - 1) * bound);
}

/* Copies image i to x. With noise it is moved a little too, so that no two epochs see the same image. */
static void get_image(const struct dataset *d, size_t i, float *x, uint64_t *rng, double noise) {
  int pixels = net.in - 1, columns = (int)d->size[2], step[] = {-columns, -1, 1, columns};
  int to = step[(int)(2 + uniform(rng, 2))];
  const unsigned char *p = d->image + i * (size_t)pixels;
  float part = fabsf(uniform(rng, noise)), light = 1;
  for (int k = 0; k < pixels; k++) light = fmaxf(light, p[k]);
  for (int k = 0; k < pixels; k++) {
    float next = k + to >= 0 && k + to < pixels ? p[k + to] : 0;
    x[k] = ((1 - part) * p[k] + part * next) / light + uniform(rng, noise);
  }
  x[pixels] = 1;
}

/* c[m][n] = beta * c + a[m][k] * b[k][n]; a or b may be stored transposed. */
static void matmul(bool at, bool bt, int m, int n, int k, const float *a, const float *b, float beta,
                   float *c) {
  cblas_sgemm(CblasRowMajor, at ? CblasTrans : CblasNoTrans, bt ? CblasTrans : CblasNoTrans, m, n, k, 1,
              a, at ? m : k, b, bt ? k : n, beta, c, n);
}

/* Runs the network on the rank's next images; leaves the gradient of their mean loss in net.y. */
static int forward(cddp_sampler *s, const struct dataset *d, uint64_t *rng, double noise, double *loss,
                   int64_t *hits) {
  unsigned char label[MAX];
  int n = 0, hidden = net.hidden;
  for (size_t i; n < (int)number(BATCH) && cddp_sampler_next(s, &i); label[n++] = d->label[i])
    get_image(d, i, net.x + n * net.in, rng, noise);
  matmul(false, true, n, hidden, net.in, net.x, net.w1, 0, net.h);
  for (int i = 0; i < n * hidden; i++) net.h[i] = (i + 1) % hidden ? fmaxf(net.h[i], 0) : 1;
  matmul(false, true, n, CLASSES, hidden, net.h, net.w2, 0, net.y);
  for (int i = 0; i < n; i++) { /* softmax and cross-entropy */
    float *y = net.y + i * CLASSES, top = y[0], sum = 0;
    for (int k = 1; k < CLASSES; k++) top = fmaxf(top, y[k]);
    *hits += y[label[i]] >= top;
    *loss += (double)(top - y[label[i]]);
    for (int k = 0; k < CLASSES; k++) sum += y[k] = expf(y[k] - top);
    *loss += log((double)sum);
    for (int k = 0; k < CLASSES; k++) y[k] = (y[k] / sum - (k == label[i])) / (float)n;
  }
  return n;
}

static void show_progress(double done, double loss, double images) {
  static struct timespec start;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (done <= 0) start = now;
  double s = (double)(now.tv_sec - start.tv_sec) + 1e-9 * (double)(now.tv_nsec - start.tv_nsec) + 1e-9;
  printf("\r[%-30.*s] loss %.4f  %.0f images/s  %.0f s left  ", (int)(30 * done),
         "##############################", loss, images / s, s / (done + 1e-9) * (1 - done));
  fflush(stdout);
}

static int write_svg(const char *path, const double *loss, int epochs) {
  double top = 0.1;
  FILE *f = fopen(path, "w");
  if (!f) return perror(path), 1;
  for (int e = 0; e < epochs; e++) top = fmax(top, ceil(loss[e] * 10) / 10);
  fprintf(f, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 640 400' font-family='sans-serif' "
          "font-size='13' text-anchor='middle'>\n<rect width='640' height='400' fill='white'/>\n"
          "<text x='340' y='28' font-size='17'>Training loss</text>\n<text x='340' y='388'>epoch</text>\n"
          "<text transform='translate(20 195) rotate(-90)'>mean cross-entropy</text>\n");
  for (int i = 0; i <= 5; i++)
    fprintf(f, "<path d='M70 %dH620' stroke='#ddd'/>\n<text x='64' y='%d' text-anchor='end'>%.2f</text>\n"
            "<path d='M%d 345v5' stroke='black'/><text x='%d' y='365'>%g</text>\n", 345 - 59 * i,
            349 - 59 * i, top * i / 5, 70 + 110 * i, 70 + 110 * i, epochs * i / 5.0);
  fprintf(f, "<path d='M70 45V345H620' fill='none' stroke='black'/>\n<polyline fill='none' "
          "stroke='#1f6fb4' stroke-width='2' points='");
  for (int e = 0; e < epochs; e++)
    fprintf(f, "%.1f,%.1f ", 70 + 550.0 * (e + 1) / epochs, 345 - 295 * loss[e] / top);
  fprintf(f, "'/>\n</svg>\n");
  return fclose(f) ? perror(path), 1 : 0;
}

static int train(int rank, void *arg) {
  int epochs = (int)number(EPOCHS), world, in = net.in, hidden = net.hidden;
  size_t n1 = (size_t)(hidden * in), n2 = (size_t)(CLASSES * hidden), batch = (size_t)number(BATCH);
  uint64_t seed = (uint64_t)number(SEED), rng = seed + (uint64_t)rank; /* other noise on each rank */
  uint64_t hash = 0xcbf29ce484222325u, hashes[64];
  double loss[MAX], ignored = 0;
  int64_t hits = 0;
  cddp_group *g;
  cddp_ddp *ddp;
  cddp_sgd *sgd;
  cddp_sampler samples, test;
  (void)arg;

  openblas_set_num_threads(1); /* a rank is a core's worth of work */
  TRY(cddp_init(&g, NULL));
  world = cddp_world_size(g);
  net.w1 = (float *)cddp_alloc(g, (n1 + n2) * sizeof(float));
  TRY(net.w1 == NULL);
  net.w2 = net.w1 + n1;
  net.x = (float *)malloc(batch * (size_t)(in + 2 * hidden + CLASSES) * sizeof(float));
  if (!net.x) FAIL("rank %d: out of memory\n", rank);
  net.h = net.x + batch * (size_t)in;
  net.y = net.h + batch * (size_t)hidden;
  float *dh = net.y + batch * CLASSES;
  for (size_t i = 0; i < n1 + n2; i++) net.w1[i] = uniform(&rng, 1 / sqrt(i < n1 ? in : hidden));

  cddp_param p[] = {{"w1", net.w1, NULL, n1, CDDP_F32}, {"w2", net.w2, NULL, n2, CDDP_F32}};
  cddp_sgd_desc o;
  memset(&o, 0, sizeof o);
  o.momentum = number(MOMENTUM);
  TRY(cddp_ddp_create(&ddp, g, p, 2, NULL));
  TRY(cddp_sgd_create(&sgd, p, 2, &o));
  float *dw1 = (float *)p[0].grad, *dw2 = (float *)p[1].grad;
  cddp_sampler_desc shuffled = {train_set.labels, rank, world, seed, true, false, false};
  cddp_sampler_desc exact = {test_set.labels, rank, world, seed, false, false, true};
  TRY(cddp_sampler_init(&samples, &shuffled));
  TRY(cddp_sampler_init(&test, &exact)); /* each test image on one rank */
  bool bar = rank == 0 && isatty(1);

  for (int e = 0; e < epochs; e++) {
    double size = (double)cddp_sampler_size(&samples), seen = 0;
    loss[e] = 0;
    cddp_sampler_set_epoch(&samples, (uint64_t)e); /* a new order */
    TRY(cddp_sgd_set_lr(sgd, number(LR) * (epochs - e) / epochs)); /* falls to nearly 0 */
    for (int n; (n = forward(&samples, &train_set, &rng, 0.35, &loss[e], &hits)) > 0; seen += n) {
      matmul(true, false, CLASSES, hidden, n, net.y, net.h, 1, dw2); /* adds to the gradient */
      TRY(cddp_ddp_ready(ddp, 1)); /* the ranks may add it up while ... */
      matmul(false, false, n, hidden, CLASSES, net.y, net.w2, 0, dh);
      for (int i = 0; i < n * hidden; i++) dh[i] *= net.h[i] > 0 && (i + 1) % hidden;
      matmul(true, false, hidden, in, n, dh, net.x, 1, dw1); /* ... this is computed */
      TRY(cddp_ddp_ready(ddp, 0));
      TRY(cddp_ddp_step(ddp, sgd));
      if (bar) show_progress((e + seen / size) / epochs, loss[e] / (seen + n), (e * size + seen) * world);
    }
    loss[e] /= size;
    TRY(cddp_all_reduce(g, &loss[e], 1, CDDP_F64, CDDP_AVG, NULL));
    if (rank == 0 && !bar) printf("epoch %2d/%d  loss %.4f\n", e + 1, epochs, loss[e]);
  }
  if (bar) printf("\n");
  if (rank == 0 && option[SVG].value && write_svg(option[SVG].value, loss, epochs)) return 1;

  hits = 0;
  while (forward(&test, &test_set, &rng, 0, &ignored, &hits) > 0) {}
  TRY(cddp_all_reduce(g, &hits, 1, CDDP_I64, CDDP_SUM, NULL));
  if (rank == 0) printf("test accuracy: %.1f %%\n", 100.0 * (double)hits / test_set.labels);

  const unsigned char *byte = (const unsigned char *)net.w1; /* 64-bit FNV-1a of all weights */
  for (size_t i = 0; i < (n1 + n2) * sizeof(float); i++) hash = (hash ^ byte[i]) * 0x100000001b3u;
  TRY(cddp_all_gather(g, &hash, hashes, 1, CDDP_I64, NULL));
  for (int r = 0; r < world && rank == 0; r++) printf("rank %d weights %016" PRIx64 "\n", r, hashes[r]);
  for (int r = 0; r < world; r++) if (hashes[r] != hash) FAIL("rank %d: rank %d has other weights\n", rank, r);
  cddp_sgd_destroy(sgd);
  cddp_ddp_destroy(ddp);
  cddp_free(g, net.w1);
  cddp_destroy(g);
  return 0;
}

int main(int argc, char **argv) {
  for (int i = 1, k = 0; i < argc; i += 2, k = 0) {
    while (k < OPTIONS && strcmp(argv[i], option[k].name)) k++;
    if (k == OPTIONS || i + 1 == argc) FAIL("%s: unknown option, or without a value\n", argv[i]);
    option[k].value = argv[i + 1];
    if (k < DATA && !(number(k) >= option[k].least && number(k) <= option[k].most))
      FAIL("%s: from %g to %g\n", option[k].name, option[k].least, option[k].most);
  }
  if (load(&train_set, "train") || load(&test_set, "test")) return 1;
  net.in = 1 + (int)(train_set.size[1] * train_set.size[2]);
  net.hidden = 1 + (int)number(HIDDEN);
  setvbuf(stdout, NULL, _IOLBF, 0);
  if (getenv("RANK")) return train(atoi(getenv("RANK")), NULL);
  if (cddp_spawn(train, NULL, (int)number(RANKS)) == CDDP_OK) return 0;
  FAIL("%s\n", cddp_error());
}
