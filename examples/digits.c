/* digits.c - trains a network on handwritten digits, each rank on its own share of the images.
     cc -O2 examples/digits.c -o digits -lopenblas -lpthread -lm
     ./digits -n 2 --svg loss.svg               2 ranks, data in examples/data; draws the loss
     ./digits --data DIR --epochs 10            MNIST's files, named like those in examples/data
   The table below has all options; the same ones give the same weights. toy.c explains calls. */
#define CDDP_IMPLEMENTATION /* includes stdio.h, stdlib.h, string.h, math.h, time.h and unistd.h */
#include "../cddp.h"
#include <cblas.h> /* Debian: libopenblas-dev */
#define FAIL(...) return fprintf(stderr, __VA_ARGS__), 1
#define TRY(calls) if (calls) FAIL("rank %d: %s\n", rank, cddp_error())
#define UNIFORM(bound) ((float)((2 * drand48() - 1) * (bound))) /* random, from -bound to bound */
#define MATMUL(at, bt, m, n, k, a, lda, b, ldb, c, beta) /* c[m][n] = beta * c + a * b */ \
  cblas_sgemm(CblasRowMajor, Cblas##at, Cblas##bt, m, n, k, 1, a, lda, b, ldb, beta, c, n)
enum { N, EPOCHS, BATCH, HIDDEN, SEED, LR, MOMENTUM, DATA, SVG, OPTIONS, CLASSES = 10, MAX = 4096 };
static struct { const char *name, *value; } option[OPTIONS] = {{"-n", "2"}, {"--epochs", "60"},
    {"--batch", "32"}, {"--hidden", "1024"}, {"--seed", "1"}, {"--lr", "0.1"}, /* of a rank */
    {"--momentum", "0.9"}, {"--data", "examples/data"}, {"--svg", NULL}};
static double number(int k) { return atof(option[k].value); }
static struct set { unsigned char *bytes[2]; unsigned count; int size, columns; } training, testing;
static int in, hidden; /* x[n][in] -> h[n][hidden], ReLU -> y[n][CLASSES]; weights are [out][in] */
static float *w1, *w2, *x, *h, *y, *dh;
static double loss[MAX + 1], hits[MAX + 1]; /* of each epoch, then of the test */

/* Reads a set's two IDX files: big-endian magic number and sizes, then bytes. 0 is success. */
static int load(struct set *d, const char *name) {
  for (unsigned dims = 1; dims <= 3; dims += 2) { /* bytes[0] are labels, bytes[1] images */
    const char *kind = dims == 3 ? "images-idx3" : "labels-idx1";
    unsigned v[4] = {1, 1, 1, 1}; char path[MAX];
    snprintf(path, MAX, "%s/digits-%s-%s-ubyte", option[DATA].value, name, kind);
    FILE *f = fopen(path, "rb"); if (!f) return perror(path), 1;
    for (unsigned i = 0; i < 4 + 4 * dims; i++) v[i / 4] = v[i / 4] << 8 | (unsigned)fgetc(f);
    if (v[0] != 0x800 + dims || v[1] - 1 >= 1 << 24 || v[2] - 1 >= 512 || v[3] - 1 >= 512)
      FAIL("%s: not an IDX file: magic %#x, sizes %u %u %u\n", path, v[0], v[1], v[2], v[3]);
    size_t all = (size_t)v[1] * v[2] * v[3];
    unsigned char *p = (unsigned char *)malloc(all + 1); /* room to notice a byte too many */
    if (!p || fread(p, 1, all + 1, f) != all || fclose(f)) FAIL("%s: not %zu bytes\n", path, all);
    if (dims == 3 && v[1] != d->count) FAIL("%s: %u images, %u labels\n", path, v[1], d->count);
    for (; dims == 1 && all > 0; all--) if (p[all - 1] >= CLASSES) FAIL("%s: label over 9\n", path);
    d->bytes[dims / 2] = p, d->count = v[1], d->size = (int)(v[2] * v[3]), d->columns = (int)v[3];
  }
  return 0;
}

/* Runs the network on the rank's next images; leaves the gradient of their mean loss in y. */
static int forward(cddp_sampler *s, const struct set *d, int epoch, double noise) {
  unsigned char label[MAX]; /* noise also moves the images a little: no two epochs see the same */
  int n = 0, size = d->size, step[] = {-d->columns, -1, 1, d->columns};
  for (size_t i; n < (int)number(BATCH) && cddp_sampler_next(s, &i); label[n++] = d->bytes[0][i]) {
    const unsigned char *p = d->bytes[1] + i * (size_t)size;
    float *image = x + n * in, part = fabsf(UNIFORM(noise)), light = 1;
    int to = size + step[lrand48() % 4];
    for (int k = 0; k < size; k++) light = fmaxf(light, p[k]);
    for (int k = 0; k < size; k++)
      image[k] = ((1 - part) * p[k] + part * p[(k + to) % size]) / light + UNIFORM(0.6 * noise);
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
    loss[epoch] += (double)(top - right + logf(sum)), hits[epoch] += right >= top;
  }
  return n;
}

static int write_svg(const char *path, int epochs) {
  FILE *f = fopen(path, "w"); if (!f) return perror(path), 1;
  fputs("<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 640 400' font-family='sans-serif'>\n"
        "<rect width='640' height='400' fill='white'/><text x='290' y='30'>Training loss</text>\n"
        "<text x='320' y='392'>epoch</text><text x='4' y='200'>loss</text>\n", f);
  for (int i = 5; i >= 0; i--) /* the last two lines of the grid are the axes */
    fprintf(f, "<path d='M70 %dH620M%d 45V345' stroke='%s'/><text x='40' y='%d'>%.1f</text><text "
            "x='%d' y='368'>%g</text>\n", 345 - 60 * i, 70 + 110 * i, i ? "#ccc" : "#000",
            350 - 60 * i, i / 2.0, 62 + 110 * i, epochs * i / 5.0);
  for (int e = 0; e < epochs; e++)
    fprintf(f, "%s%.1f %.1f", e ? " " : "<polyline fill='none' stroke='#16a' points='",
            70 + 550.0 * (e + 1) / epochs, 345 - 120 * fmin(loss[e], 2.5));
  return fputs("'/></svg>\n", f) < 0 || fclose(f);
}

static double now(void) {
  struct timespec t;
  return clock_gettime(CLOCK_MONOTONIC, &t), (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int train(int rank, void *group_desc) {
  int epochs = (int)number(EPOCHS), batch = (int)number(BATCH), n, xhy = in + 2 * hidden + CLASSES;
  size_t n1 = (size_t)(hidden * in), n2 = (size_t)(CLASSES * hidden), n3 = (size_t)(batch * xhy);
  uint64_t seed = (uint64_t)number(SEED), hash = 0xcbf29ce484222325u, hashes[MAX];
  cddp_group *g; cddp_ddp *ddp; cddp_sgd *sgd; cddp_sampler samples, test;
  TRY(cddp_init(&g, (const cddp_group_desc *)group_desc));
  int world = cddp_world_size(g), bar = rank == 0 && isatty(2);
  TRY(!(w1 = (float *)cddp_alloc(g, (n1 + n2 + n3) * sizeof *w1)));
  w2 = w1 + n1, x = w2 + n2, h = x + batch * in, dh = h + batch * hidden, y = dh + batch * hidden;
  openblas_set_num_threads(1), srand48((long)seed + rank); /* one core, and noise of its own */
  for (size_t i = 0; i < n1 + n2; i++) w1[i] = UNIFORM(1 / sqrt(i < n1 ? in : hidden));
  cddp_param p[] = {{"w1", w1, NULL, n1, CDDP_F32}, {"w2", w2, NULL, n2, CDDP_F32}};
  cddp_sgd_desc options = {0, number(MOMENTUM), 0, 0, false, false, false, NULL};
  cddp_sampler_desc shuffled = {training.count, rank, world, seed, true, false, false};
  cddp_sampler_desc exact = {testing.count, rank, world, seed, false, false, true};
  TRY(cddp_ddp_create(&ddp, g, p, 2, NULL) || cddp_sgd_create(&sgd, p, 2, &options));
  TRY(cddp_sampler_init(&samples, &shuffled) || cddp_sampler_init(&test, &exact));
  double size = (double)cddp_sampler_size(&samples), seen = 0, start = now();
  for (int e = 0; e < epochs; e++, seen = 0) {
    cddp_sampler_set_epoch(&samples, (uint64_t)e); /* a new order */
    TRY(cddp_sgd_set_lr(sgd, number(LR) * world * (epochs - e) / epochs)); /* falls to nearly 0 */
    while ((n = forward(&samples, &training, e, 0.6)) > 0) {
      MATMUL(Trans, NoTrans, CLASSES, hidden, n, y, CLASSES, h, hidden, (float *)p[1].grad, 1);
      TRY(cddp_ddp_ready(ddp, 1)); /* the ranks average it while ... */
      MATMUL(NoTrans, NoTrans, n, hidden, CLASSES, y, CLASSES, w2, hidden, dh, 0);
      for (int i = 0; i < n * hidden; i++) dh[i] = h[i] > 0 ? dh[i] : 0;
      MATMUL(Trans, NoTrans, hidden, in, n, dh, hidden, x, in, (float *)p[0].grad, 1);
      TRY(cddp_ddp_ready(ddp, 0) || cddp_ddp_step(ddp, sgd)); /* ... this one is computed */
      double time = now() - start, done = (e + (seen += n) / size) / epochs;
      if (bar) fprintf(stderr, "\r[%-20.*s] loss %.4f  %.0f samples/s  %.0f s left  %s",
                   (int)(20 * done), "====================", loss[e] / seen,
                   done * epochs * size * world / time, time / done - time, done < 1 ? "" : "\n");
    }
    loss[e] /= size;
    TRY(cddp_all_reduce(g, &loss[e], 1, CDDP_F64, CDDP_AVG, NULL));
    if (rank == 0 && !bar) printf("epoch %2d/%d  loss %.4f\n", e + 1, epochs, loss[e]);
  }
  if (rank == 0 && option[SVG].value && write_svg(option[SVG].value, epochs)) return 1;
  while (forward(&test, &testing, epochs, 0) > 0) {}
  TRY(cddp_all_reduce(g, &hits[epochs], 1, CDDP_F64, CDDP_SUM, NULL));
  if (rank == 0) printf("test accuracy: %.1f %%\n", 100 * hits[epochs] / testing.count);
  for (size_t i = 0; i < (n1 + n2) * sizeof *w1; i++) /* 64-bit FNV-1a */
    hash = (hash ^ ((unsigned char *)w1)[i]) * 0x100000001b3u;
  TRY(cddp_all_gather(g, &hash, hashes, 1, CDDP_I64, NULL));
  for (int r = 0; r < world && !rank; r++) printf("rank %d weights %016" PRIx64 "\n", r, hashes[r]);
  for (int r = 0; r < world; r++) if (hashes[r] != hash) FAIL("rank %d's weights differ\n", r);
  return cddp_sgd_destroy(sgd), cddp_ddp_destroy(ddp), cddp_free(g, w1), cddp_destroy(g), 0;
}
int main(int argc, char **argv) {
  for (int i = 1, k = 0; i < argc; i += 2, k = 0) {
    while (k < OPTIONS && strcmp(argv[i], option[k].name)) k++;
    if (k == OPTIONS || i + 1 == argc) FAIL("%s: unknown, or needs a value\n", argv[i]);
    option[k].value = argv[i + 1];
    if (k < DATA && !(number(k) >= (k < SEED) && number(k) <= 4096)) FAIL("bad %s\n", argv[i]);
  }
  if (load(&training, "train") || load(&testing, "test")) return 1;
  if (training.size != testing.size) FAIL("train and test images differ in size\n");
  in = training.size + 1, hidden = (int)number(HIDDEN), setvbuf(stdout, NULL, _IOLBF, 0);
  if (cddp_launcher_rank() >= 0) return train(cddp_launcher_rank(), NULL); /* torchrun, mpirun */
  return cddp_spawn(train, NULL, (int)number(N)) ? fprintf(stderr, "%s\n", cddp_error()), 1 : 0;
}
