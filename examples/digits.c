/* digits.c - trains a network on handwritten digits, each rank on its own share of the images.
     cc -O2 examples/digits.c -o digits -lopenblas -lpthread -lm
     ./digits -n 2 --plot curve.svg --save FILE   on 2 ranks; a picture, a checkpoint each epoch
     ./digits -n 3 --resume FILE --data DIR       goes on from there; data as in examples/data
   --help lists all options. The same ones give the same weights; --shards 8 on 1 to 8 ranks. */
#define CDDP_IMPLEMENTATION /* includes stdio.h, stdlib.h, string.h, math.h, time.h and unistd.h */
#include "../cddp.h"
#include <cblas.h> /* Debian: libopenblas-dev */
#define FAIL(...) return fprintf(stderr, __VA_ARGS__), 1
#define TRY(calls) if (calls) FAIL("rank %d: %s\n", rank, cddp_error())
#define UNIFORM(bound) ((float)((2 * drand48() - 1) * (bound))) /* random, from -bound to bound */
#define MATMUL(at, bt, m, n, k, a, lda, b, ldb, c, beta) /* c[m][n] = beta * c + a * b */ \
  cblas_sgemm(CblasRowMajor, Cblas##at, Cblas##bt, m, n, k, 1, a, lda, b, ldb, beta, c, n)
enum { CLASSES = 10, MAX = 4096 };
enum { N, EPOCHS, BATCH, HIDDEN, SHARDS, SEED, LR, MOMENTUM, DATA, PLOT, SAVE, RESUME, OPTIONS };
static struct { const char *name, *value; double least, most; const char *help; } option[] = {
    {"-n", "2", 1, MAX, "ranks, as child processes"},
    {"--epochs", "60", 1, MAX, "in all, those of a resumed checkpoint among them"},
    {"--batch", "32", 1, MAX, "images of a rank or shard in a step"},
    {"--hidden", "1024", 1, MAX, "neurons of the hidden layer"},
    {"--shards", "0", 0, MAX, "the global batch, in shards; 0: one a rank"},
    {"--seed", "1", 0, MAX, "of weights, noise and order"},
    {"--lr", "0.1", 0, MAX, "learning rate, for each shard"},
    {"--momentum", "0.9", 0, MAX, "of SGD"},
    {"--data", "examples/data", 0, 0, "directory of the images and labels"},
    {"--plot", NULL, 0, 0, "file for a picture of loss and accuracy (SVG)"},
    {"--save", NULL, 0, 0, "file for a checkpoint after each epoch"},
    {"--resume", NULL, 0, 0, "checkpoint to go on from"},
};
static const char *text(int k) { return option[k].value; }
static double number(int k) { return atof(option[k].value); }
/* Reads the command line. Returns -1, or what main must return. */
static int read_options(int argc, char **argv) {
  bool help = argc == 2 && strcmp(argv[1], "--help") == 0;
  int i, k;
  for (i = 1; i + 1 < argc && !help; i += 2) {
    double x = atof(argv[i + 1]);
    for (k = 0; k < OPTIONS && strcmp(argv[i], option[k].name) != 0;) k++;
    if (k == OPTIONS) break;
    if (option[k].most > 0 && !(x >= option[k].least && x <= option[k].most)) break;
    option[k].value = argv[i + 1];
  }
  if (i == argc) return -1;
  if (!help) fprintf(stderr, "%s: no such option, or a wrong value\n", argv[i]);
  for (k = 0; k < OPTIONS; k++)
    fprintf(help ? stdout : stderr, "  %-10s  %s (%s)\n", option[k].name, option[k].help,
            option[k].value ? option[k].value : "none");
  return help ? 0 : 2;
}
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec; }
static struct set { unsigned char *bytes[2]; unsigned count; int size, columns; } training, testing;
static int in, hidden; /* x[n][in] -> h[n][hidden], ReLU -> y[n][CLASSES]; weights are [out][in] */
static float *w1, *w2, *x, *h, *y, *dh; static struct { double loss, hits; } curve[MAX + 1];
/* Reads a set's two IDX files: big-endian magic number and sizes, then bytes. 0 is success. */
static int load(struct set *d, const char *name) {
  for (unsigned dims = 1; dims <= 3; dims += 2) { /* bytes[0] are labels, bytes[1] images */
    const char *kind = dims == 3 ? "images-idx3" : "labels-idx1";
    unsigned v[4] = {1, 1, 1, 1}; char path[MAX];
    snprintf(path, MAX, "%s/digits-%s-%s-ubyte", text(DATA), name, kind);
    FILE *f = fopen(path, "rb"); if (!f) return perror(path), 1;
    for (unsigned i = 0; i < 4 + 4 * dims; i++) v[i / 4] = v[i / 4] << 8 | (unsigned)fgetc(f);
    if (v[0] != 0x800 + dims || v[1] - 1 >= 1 << 24 || v[2] - 1 >= 512 || v[3] - 1 >= 512)
      FAIL("%s: not an IDX file: magic %#x, sizes %u %u %u\n", path, v[0], v[1], v[2], v[3]);
    size_t all = (size_t)v[1] * v[2] * v[3]; unsigned char *p = (unsigned char *)malloc(all + 1);
    if (!p || fread(p, 1, all + 1, f) != all || fclose(f)) FAIL("%s: not %zu bytes\n", path, all);
    if (dims == 3 && v[1] != d->count) FAIL("%s: %u images, %u labels\n", path, v[1], d->count);
    for (; dims == 1 && all > 0; all--) if (p[all - 1] >= CLASSES) FAIL("%s: label over 9\n", path);
    d->bytes[dims / 2] = p, d->count = v[1], d->size = (int)(v[2] * v[3]), d->columns = (int)v[3];
  }
  return 0;
}
/* Runs the network on a shard's batch b, a little changed by noise; leaves the gradient in y. */
static int forward(cddp_sampler *s, int shard, size_t b, struct set *d, int epoch, double noise) {
  size_t index[MAX], got = cddp_sampler_batch(s, shard, b, (size_t)number(BATCH), index);
  int n = 0, size = d->size, step[] = {-d->columns, -1, 1, d->columns}, label[MAX];
  for (; n < (int)got; label[n] = d->bytes[0][index[n]], n++) {
    const unsigned char *p = d->bytes[1] + index[n] * (size_t)size;
    srand48(jrand48((unsigned short[]){index[n], epoch, number(SEED)})); /* alike on any rank */
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
    curve[epoch].loss += (double)(top - right + logf(sum)), curve[epoch].hits += right >= top;
  }
  return n;
}
/* Whether the file can be written: asked before an hour of training. */
static bool can_write(const char *path) {
  FILE *f = fopen(path, "a");
  if (!f) return perror(path), false;
  return fclose(f) == 0;
}
static int plot(const char *path, int epochs) {
  FILE *f = fopen(path, "w"); if (!f) return perror(path), 1;
  fprintf(f, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 680 400' style='background:"
          "#fff'>\n<text x='60' y='385'>%d epochs: loss (blue), accuracy (red)</text>\n", epochs);
  for (int i = 0; i <= 5; i++)
    fprintf(f, "<path d='M60 %dH610' stroke='#ccc'/><text x='20' y='%d' fill='#16a'>%.1f</text>\n"
            "<text x='620' y='%d' fill='#b33'>%d %%</text>\n", 345 - 60 * i, 350 - 60 * i, i / 2.0,
            350 - 60 * i, 20 * i);
  for (int e = 0, k = 0; e < epochs; k = !k, e += !k) /* two dots for each epoch */
    fprintf(f, "<circle r='3' cx='%.1f' cy='%.1f' fill='%s'/>\n", 60 + 550.0 * (e + 1) / epochs,
            345 - 300 * (k ? curve[e].hits : fmin(curve[e].loss / 2.5, 1)), k ? "#b33" : "#16a");
  return fputs("</svg>\n", f) < 0 || fclose(f);
}
static int train(int rank, void *group_desc) {
  int epochs = (int)number(EPOCHS), batch = (int)number(BATCH), n, xhy = in + 2 * hidden + CLASSES;
  size_t n1 = (size_t)(hidden * in), n2 = (size_t)(CLASSES * hidden), n3 = (size_t)(batch * xhy);
  uint64_t seed = (uint64_t)number(SEED), hash = 0xcbf29ce484222325u, hashes[MAX]; /* FNV-1a */
  cddp_group *g; cddp_ddp *ddp; cddp_optim *sgd; cddp_sampler samples, test; int first, shard;
  TRY(cddp_init(&g, (const cddp_group_desc *)group_desc));
  if (rank == 0 && text(PLOT) && !can_write(text(PLOT))) return 1;
  int world = cddp_world_size(g), bar = !rank && isatty(2), shards = fmax(world, number(SHARDS));
  TRY(!(w1 = (float *)cddp_alloc(g, (n1 + n2 + n3) * sizeof *w1)));
  w2 = w1 + n1, x = w2 + n2, h = x + batch * in, dh = h + batch * hidden, y = dh + batch * hidden;
  openblas_set_num_threads(1), srand48((long)seed); /* a rank has one core */
  for (size_t i = 0; i < n1 + n2; i++) w1[i] = UNIFORM(1 / sqrt(i < n1 ? in : hidden));
  cddp_param p[] = {{"w1", w1, NULL, n1, CDDP_F32}, {"w2", w2, NULL, n2, CDDP_F32},
                    {"curve", curve, NULL, 2 * MAX, CDDP_F64}}; /* saved, but not trained */
  cddp_shape shapes[] = {{2, {hidden, in}}, {2, {CLASSES, hidden}}, {2, {MAX, 2}}};
  cddp_sgd_desc options = {0}; options.momentum = number(MOMENTUM);
  cddp_ddp_desc parts = {0}; parts.shards = (int)number(SHARDS); /* 0: one a rank */
  cddp_sampler_desc shuffled = {training.count, 0, shards, seed, true, false, false};
  cddp_sampler_desc exact = {testing.count, rank, world, seed, false, false, true};
  TRY(cddp_ddp_create(&ddp, g, p, 2, &parts) || cddp_sgd_create(&sgd, p, 2, &options));
  TRY(cddp_sampler_init(&samples, &shuffled) || cddp_sampler_init(&test, &exact));
  cddp_checkpoint_desc all = {shapes, sgd, &samples, NULL, 0, NULL, 0, false, ddp};
  double size = (double)cddp_sampler_size(&samples), seen = 0, start = now();
  TRY(text(RESUME) && cddp_load(g, text(RESUME), p, 3, &all));
  for (int e = first = (int)cddp_sampler_epoch(&samples); e < epochs; e++, seen = 0) {
    TRY(cddp_optim_set_lr(sgd, number(LR) * shards * (epochs - e) / epochs)); /* falls to 0 */
    curve[e].loss = curve[e].hits = 0;
    for (size_t b = 0; (double)b * batch < size; b++) {
      while (cddp_ddp_next_shard(ddp, &shard)) {
        seen += n = forward(&samples, shard, b, &training, e, 0.6);
        MATMUL(Trans, NoTrans, CLASSES, hidden, n, y, CLASSES, h, hidden, (float *)p[1].grad, 1);
        TRY(cddp_ddp_ready(ddp, 1)); /* the ranks average it while ... */
        MATMUL(NoTrans, NoTrans, n, hidden, CLASSES, y, CLASSES, w2, hidden, dh, 0);
        for (int i = 0; i < n * hidden; i++) dh[i] = h[i] > 0 ? dh[i] : 0;
        MATMUL(Trans, NoTrans, hidden, in, n, dh, hidden, x, in, (float *)p[0].grad, 1);
        TRY(cddp_ddp_ready(ddp, 0)); /* ... this one is computed */
      }
      TRY(cddp_ddp_step(ddp, sgd));
      double at = e + fmin(1, (b + 1.0) * batch / size), rate = (at - first) / (now() - start);
      if (bar) fprintf(stderr, "\r[%-20.*s] loss %.4f  %.0f samples/s  %.0f s left  %s",
                   (int)(20 * at / epochs), "====================", curve[e].loss / seen,
                   rate * size * shards, (epochs - at) / rate, at < epochs ? "" : "\n");
    }
    curve[e].loss *= world / size / shards, curve[e].hits *= world / size / shards;
    TRY(cddp_all_reduce(g, &curve[e], 2, CDDP_F64, CDDP_AVG, NULL));
    if (rank == 0 && !bar) printf("epoch %2d/%d  loss %.4f\n", e + 1, epochs, curve[e].loss);
    cddp_sampler_set_epoch(&samples, (uint64_t)e + 1); /* a new order */
    TRY(text(SAVE) && cddp_save(g, text(SAVE), p, 3, &all));
  }
  if (rank == 0 && text(PLOT) && plot(text(PLOT), epochs)) return 1;
  curve[epochs].hits = 0; /* a checkpoint of more epochs has trained there */
  for (size_t b = 0; forward(&test, rank, b, &testing, epochs, 0) > 0; b++) {}
  TRY(cddp_all_reduce(g, &curve[epochs].hits, 1, CDDP_F64, CDDP_SUM, NULL));
  if (rank == 0) printf("test accuracy: %.1f %%\n", 100 * curve[epochs].hits / testing.count);
  for (size_t i = 0; i < 4 * (n1 + n2); i++) hash = (hash ^ ((uint8_t *)w1)[i]) * 0x100000001b3u;
  TRY(cddp_all_gather(g, &hash, hashes, 1, CDDP_I64, NULL));
  for (int r = 0; r < world && !rank; r++) printf("rank %d weights %016" PRIx64 "\n", r, hashes[r]);
  for (int r = 0; r < world; r++) if (hashes[r] != hash) FAIL("rank %d's weights differ\n", r);
  return cddp_optim_destroy(sgd), cddp_ddp_destroy(ddp), cddp_free(g, w1), cddp_destroy(g), 0;
}
int main(int argc, char **argv) {
  int code = read_options(argc, argv);
  if (code >= 0) return code;
  if (load(&training, "train") || load(&testing, "test")) return 1;
  if (training.size != testing.size) FAIL("train and test images differ in size\n");
  in = training.size + 1, hidden = (int)number(HIDDEN), setvbuf(stdout, NULL, _IOLBF, 0);
  for (int i = 1; i < argc && cddp_launcher_rank() == 0; i += 2)
    if (strcmp(argv[i], "-n") == 0) fprintf(stderr, "-n is ignored: a launcher started this\n");
  if (cddp_launcher_rank() >= 0) return train(cddp_launcher_rank(), NULL); /* torchrun, mpirun */
  return cddp_spawn(train, NULL, (int)number(N)) ? fprintf(stderr, "%s\n", cddp_error()), 1 : 0;
}
