/* gpt.c - trains a small GPT on the bytes of any text, with each batch divided among the ranks.

     cc -O2 examples/gpt.c -o gpt -lopenblas -lpthread -lm
     ./gpt                                       2 ranks; ends with a text that the network writes
     ./gpt --plot loss.svg --csv loss.csv        also a picture and a table of the training
     ./gpt -n 4 --shards 4 --text FILE           4 shards: the same weights on 1, 2, 3 or 4 ranks
     ./gpt -n 4 --shards 4 --save FILE           a checkpoint each 100 steps; see also --resume
     ./gpt -n 4 --shards 4 --elastic 9           survives lost ranks; up to 9 are started again
   --help lists all options. Run it in the folder that contains examples/, or name --text. OpenBLAS
   is required (Debian: libopenblas-dev). The training takes about half a minute on 2 cores. It
   shows a bar on a terminal, or a line each 50 steps; then a hash of each rank's weights, and the
   text that the network writes.

   The network and the names in checkpoints are GPT-2's, the shapes torch.nn.Linear's. gpt.h has the
   parameters; digits.c is the simpler example to read first. As in the literature, B is the number
   of sequences in a batch, T of bytes in a sequence, C of channels. */
#define CDDP_IMPLEMENTATION /* in one file of a program, before its other includes */
#include "../cddp.h"

#include "gpt.h"
#include "options.h"
#include "progress.h"
#include <cblas.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const option options[] = { /* name, type, variable, default, least, most, help */
    {"-n", INTEGER, &config.ranks, "2", 1, 1e6, "ranks, as child processes"},
    {"--steps", INTEGER, &config.steps, "800", 1, 1e6, "in all, with those of a checkpoint"},
    {"--stop", INTEGER, &config.stop, "1e6", 1, 1e6, "step to end after, as if interrupted"},
    {"--batch", INTEGER, &config.batch, "8", 1, MAX_BATCH, "sequences a step of a rank or shard"},
    {"--context", INTEGER, &config.context, "64", 1, 1e6, "bytes of a sequence"},
    {"--layers", INTEGER, &config.layers, "4", 1, MAX_LAYERS, "of the network"},
    {"--heads", INTEGER, &config.heads, "4", 1, MAX_CHANNELS, "of attention"},
    {"--channels", INTEGER, &config.channels, "128", 1, MAX_CHANNELS, "a multiple of --heads"},
    {"--shards", INTEGER, &config.shards, "0", 0, 4096, "of the global batch; 0: one a rank"},
    {"--seed", INTEGER, &config.seed, "1", 0, 1e9, "of weights and batches"},
    {"--lr", REAL, &config.lr, "2e-3", 0, 1e6, "highest learning rate"},
    {"--decay", REAL, &config.decay, "0.1", 0, 1e6, "weight decay"},
    {"--clip", REAL, &config.clip, "1", 0, 1e6, "largest norm of the gradient; 0: any"},
    {"--elastic", INTEGER, &config.elastic, "-1", -1, 1e6, "lost ranks to start again; -1: none"},
    {"--sample", INTEGER, &config.sample, "300", 0, 1e6, "bytes to write at the end"},
    {"--text", TEXT, &config.text, "examples/data/shakespeare.txt", 0, 0, "file to learn"},
    {"--plot", TEXT, &config.plot, NULL, 0, 0, "file for a picture of the training (SVG)"},
    {"--csv", TEXT, &config.csv, NULL, 0, 0, "file for the numbers of the picture (CSV)"},
    {"--save", TEXT, &config.save, NULL, 0, 0, "checkpoint each 100 steps, and at the end"},
    {"--resume", TEXT, &config.resume, NULL, 0, 0, "checkpoint to continue from"},
};

/* --- The network --- */

static const unsigned char *sequences[MAX_BATCH]; /* T bytes of text each, and the one after */

/* torch.nn.Linear of n rows, with the weight p and the bias p + 1: out = in weight^T + bias. Adds
   `add`, unless NULL. */
static void linear(float *out, const float *add, const float *in, int n, int p) {
  int from = columns(p), to = rows(p);
  for (int i = 0; i < n; i++)
    for (int k = 0; k < to; k++) out[i * to + k] = weight(p + 1)[k] + (add ? add[i * to + k] : 0);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, to, from, 1, in, from, weight(p), from, 1,
              out, to);
}

/* d_ is a gradient. grad(p) += d_out^T in; grad(p + 1) += the sum of d_out's rows;
   d_in = d_out weight. */
static void linear_backward(float *d_in, const float *d_out, const float *in, int n, int p) {
  int from = columns(p), to = rows(p);
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, to, from, n, 1, d_out, to, in, from, 1,
              grad(p), from);
  for (int i = 0; i < n; i++)
    for (int k = 0; k < to; k++) grad(p + 1)[k] += d_out[i * to + k];
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, from, to, 1, d_out, to, weight(p), from,
              0, d_in, from);
}

/* Subtracts the mean of a row of C. Returns 1 / standard deviation. */
static float center(float *centered, const float *in) {
  int C = config.channels;
  float sum = 0, squares = 0;
  for (int c = 0; c < C; c++) sum += in[c];
  for (int c = 0; c < C; c++) {
    centered[c] = in[c] - sum / (float)C;
    squares += centered[c] * centered[c];
  }
  return 1 / sqrtf(squares / (float)C + 1e-5f);
}

/* torch.nn.LayerNorm of n rows, with the weight p and the bias p + 1. */
static void layer_norm(float *out, const float *in, int n, int p) {
  int C = config.channels;
  for (int i = 0; i < n; i++, out += C, in += C) {
    float scale = center(out, in);
    for (int c = 0; c < C; c++) out[c] = out[c] * scale * weight(p)[c] + weight(p + 1)[c];
  }
}

/* Adds to the gradients of p and p + 1, and to d_in. out = x weight + bias, and x depends on all of
   its row, by the mean and by the deviation: the two sums. */
static void layer_norm_backward(float *d_in, const float *d_out, const float *in, int n, int p) {
  int C = config.channels;
  float x[MAX_CHANNELS], d[MAX_CHANNELS]; /* the normalized row, and its gradient */
  for (int i = 0; i < n; i++, d_in += C, d_out += C, in += C) {
    float scale = center(x, in), sum = 0, dot = 0;
    for (int c = 0; c < C; c++) {
      x[c] *= scale;
      d[c] = d_out[c] * weight(p)[c];
      sum += d[c];
      dot += d[c] * x[c];
      grad(p)[c] += d_out[c] * x[c];
      grad(p + 1)[c] += d_out[c];
    }
    for (int c = 0; c < C; c++) d_in[c] += scale * (d[c] - (sum + x[c] * dot) / (float)C);
  }
}

/* GELU, by GPT-2's formula: x (1 + tanh(u)) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3). Here
   (1 + tanh(u)) / 2 is s = 1 / (1 + exp(-2 u)), and 2 u = 1.595769 (x + ...). *slope is the
   derivative, for backward; 0.134145 is 3 * 0.044715. */
static float gelu(float x, float *slope) {
  float s = 1 / (1 + expf(-1.5957691216f * (x + 0.044715f * x * x * x)));
  *slope = s + x * s * (1 - s) * 1.5957691216f * (1 + 0.134145f * x * x);
  return x * s;
}

/* p becomes exp(p) / sum(exp(p)). Returns log(sum(exp(p))). */
static float softmax(float *p, int n) {
  float highest = p[0], sum = 0;
  for (int k = 1; k < n; k++) highest = fmaxf(highest, p[k]);
  for (int k = 0; k < n; k++) {
    p[k] = expf(p[k] - highest);
    sum += p[k];
  }
  for (int k = 0; k < n; k++) p[k] /= sum;
  return highest + logf(sum);
}

/* Head h of sequence b: mix = a v, a = softmax(q k^T / sqrt(size)). A row of qkv has the C channels
   of q, then those of k and v; a head has `size` of each. A byte does not see later bytes: row i of
   a has numbers up to column i. */
static void attention(const layer *l, int b, int h) {
  int T = config.context, C = config.channels, size = C / config.heads, row = 3 * C;
  const float *q = l->qkv + b * T * row + h * size, *k = q + C, *v = k + C;
  float *a = l->attention + (b * config.heads + h) * T * T;
  float *mix = l->mix + b * T * C + h * size;
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, T, T, size, 1 / sqrtf((float)size), q, row,
              k, row, 0, a, T);
  for (int i = 0; i < T; i++) {
    softmax(a + i * T, i + 1);
    for (int j = i + 1; j < T; j++) a[i * T + j] = 0;
  }
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, T, size, T, 1, a, T, v, row, 0, mix, C);
}

/* Given d_row, the gradient of mix, sets the head's part of d_qkv: d_v = a^T d_mix;
   d_a = d_mix v^T, taken back through softmax; d_q = d_a k and d_k = d_a^T q, both scaled. */
static void attention_backward(const layer *l, int b, int h) {
  int T = config.context, C = config.channels, size = C / config.heads, row = 3 * C;
  int at = b * T * row + h * size;
  const float *q = l->qkv + at, *k = q + C, *v = k + C;
  float *d_q = d_qkv + at, *d_k = d_q + C, *d_v = d_k + C;
  const float *a = l->attention + (b * config.heads + h) * T * T;
  const float *d_mix = d_row + b * T * C + h * size, scale = 1 / sqrtf((float)size);
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, T, size, T, 1, a, T, d_mix, C, 0, d_v, row);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, T, T, size, 1, d_mix, C, v, row, 0,
              d_attention, T);
  for (int i = 0; i < T; i++) { /* back through softmax */
    float *d = d_attention + i * T, dot = 0;
    for (int j = 0; j <= i; j++) dot += d[j] * a[i * T + j];
    for (int j = 0; j < T; j++) d[j] = a[i * T + j] * (d[j] - dot);
  }
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, T, size, T, scale, d_attention, T, k, row,
              0, d_q, row);
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, T, size, T, scale, d_attention, T, q, row, 0,
              d_k, row);
}

/* Sets logits: for each byte of the first B sequences, what the network expects after it. The
   embedding is the last layer's weight, too, as in GPT-2. */
static void forward(int B) {
  int T = config.context, C = config.channels, n = B * T;
  for (int i = 0; i < n; i++) {
    const float *byte = weight(EMBEDDING) + sequences[i / T][i % T] * C;
    const float *position = weight(POSITION) + i % T * C;
    for (int c = 0; c < C; c++) layers[0].in[i * C + c] = byte[c] + position[c];
  }
  for (int i = 0; i < config.layers; i++) {
    layer *l = &layers[i];
    int p = LAYER + PER_LAYER * i;
    layer_norm(l->norm1, l->in, n, p + LN_1);
    linear(l->qkv, NULL, l->norm1, n, p + QKV);
    for (int k = 0; k < B * config.heads; k++) attention(l, k / config.heads, k % config.heads);
    linear(l->mid, l->in, l->mix, n, p + PROJECT);
    layer_norm(l->norm2, l->mid, n, p + LN_2);
    linear(l->up, NULL, l->norm2, n, p + UP);
    for (int k = 0; k < n * 4 * C; k++) l->act[k] = gelu(l->up[k], &l->up[k]); /* up: slopes now */
    linear(i + 1 < config.layers ? l[1].in : last, l->mid, l->act, n, p + DOWN);
  }
  layer_norm(norm_f, last, n, LN_F);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, BYTES, C, 1, norm_f, C, weight(EMBEDDING),
              C, 0, logits, BYTES);
}

/* Returns the mean cross-entropy of the n bytes: log(sum(exp(logits))) - the right byte's logit.
   Turns logits into its gradient: (softmax - 1 at the right byte) / n. */
static double cross_entropy(int n) {
  int T = config.context;
  double loss = 0;
  for (int i = 0; i < n; i++) {
    float *p = logits + i * BYTES, *right = p + sequences[i / T][i % T + 1], wanted = *right;
    loss += (double)(softmax(p, BYTES) - wanted) / n;
    *right -= 1;
    for (int k = 0; k < BYTES; k++) p[k] /= (float)n;
  }
  return loss;
}

/* Adds to all gradients, the last layer's first. cddp_ddp_ready: the gradient can be averaged. The
   residual stream's gradient d_stream goes through all layers, and each adds to it. The embedding's
   gradient has two parts: as the last layer's weight, and for the bytes that were read. */
static int backward(cddp_ddp *ddp, int rank) {
  int B = config.batch, T = config.context, C = config.channels, H = config.heads, n = B * T;
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, BYTES, C, n, 1, logits, BYTES, norm_f, C, 1,
              grad(EMBEDDING), C);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, C, BYTES, 1, logits, BYTES,
              weight(EMBEDDING), C, 0, d_row, C);
  memset(d_stream, 0, (size_t)(n * C) * sizeof *d_stream);
  layer_norm_backward(d_stream, d_row, last, n, LN_F);
  TRY(cddp_ddp_ready(ddp, LN_F));
  TRY(cddp_ddp_ready(ddp, LN_F + 1));
  for (int i = config.layers - 1; i >= 0; i--) {
    layer *l = &layers[i];
    int p = LAYER + PER_LAYER * i;
    linear_backward(d_up, d_stream, l->act, n, p + DOWN);
    for (int k = 0; k < n * 4 * C; k++) d_up[k] *= l->up[k];
    linear_backward(d_row, d_up, l->norm2, n, p + UP);
    layer_norm_backward(d_stream, d_row, l->mid, n, p + LN_2);
    linear_backward(d_row, d_stream, l->mix, n, p + PROJECT);
    for (int k = 0; k < B * H; k++) attention_backward(l, k / H, k % H);
    linear_backward(d_row, d_qkv, l->norm1, n, p + QKV);
    layer_norm_backward(d_stream, d_row, l->in, n, p + LN_1);
    for (int k = 0; k < PER_LAYER; k++) TRY(cddp_ddp_ready(ddp, p + k));
  }
  for (int i = 0; i < n; i++) {
    float *d_byte = grad(EMBEDDING) + sequences[i / T][i % T] * C;
    float *d_position = grad(POSITION) + i % T * C;
    for (int c = 0; c < C; c++) {
      d_byte[c] += d_stream[i * C + c];
      d_position[c] += d_stream[i * C + c];
    }
  }
  TRY(cddp_ddp_ready(ddp, POSITION));
  TRY(cddp_ddp_ready(ddp, EMBEDDING));
  return 0;
}

/* --- Text --- */

/* A random sequence of the text. It follows from --seed and the counter alone (splitmix64). */
static const unsigned char *pick(uint64_t counter) {
  uint64_t z = (uint64_t)config.seed * 0xd1342543de82ef95u + (counter + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return gpt_text + (z ^ z >> 31) % (gpt_text_size - (size_t)config.context);
}

/* Prints what the network thinks likely after a line's end, byte by byte: the last T bytes run
   forward, and the next byte is drawn with the probabilities behind the last of them. */
static void write_text(int length) {
  int T = config.context;
  unsigned char *bytes = (unsigned char *)allocate((size_t)(T + length), 1);
  bytes[0] = '\n';
  for (int i = 0; i < length; i++) {
    int newest = i < T ? i : T - 1, next = 0; /* newest: of the sequence's bytes, an index */
    float *p = logits + newest * BYTES, left = (float)drand48();
    sequences[0] = bytes + i - newest;
    forward(1);
    for (int k = 0; k < BYTES; k++) p[k] /= 0.8f; /* the temperature */
    softmax(p, BYTES);
    while (next < BYTES - 1 && (left -= p[next]) >= 0) next++;
    bytes[i + 1] = (unsigned char)next;
    putchar(next);
  }
  puts("");
  free(bytes);
}

/* --- Training --- */

enum { LOSS, LEARNING_RATE, COLUMNS };

/* Writes the files of --plot and --csv. */
static bool write_history(const double *history, int first) {
  static const char *const names[] = {"loss", "learning rate"};
  /* title, first curve, number of curves */
  static const panel panels[] = {{"loss (nats per byte)", LOSS, 1},
                                 {"learning rate", LEARNING_RATE, 1}};
  curve c = {.title = "GPT",
             .unit = "step",
             .values = history,
             .first = first,
             .rows = config.stop,
             .columns = COLUMNS,
             .names = names};
  if (config.csv && !curve_write_csv(&c, config.csv)) return false;
  return !config.plot || curve_write_svg(&c, panels, 2, config.plot);
}

/* Forward and backward of this rank's shards of a step. Adds their losses to *loss. */
static int train_shards(cddp_ddp *ddp, int step, int shards, double *loss, int rank) {
  int B = config.batch, shard;
  while (cddp_ddp_next_shard(ddp, &shard)) {
    for (int b = 0; b < B; b++) /* depends on step and shard, not on the rank */
      sequences[b] = pick((uint64_t)(((long)step * shards + shard) * B + b));
    forward(B);
    *loss += cross_entropy(B * config.context);
    if (backward(ddp, rank)) return 1;
  }
  return 0;
}

/* Sums the loss over the ranks, and shows the mean. Each rank calls it after a step. */
static cddp_result report(cddp_group *alive, progress *bar, int done, int shards, double *loss) {
  cddp_result result = cddp_all_reduce(alive, loss, 1, CDDP_F64, CDDP_SUM, NULL);
  *loss = result == CDDP_OK ? *loss / shards : NAN; /* unknown: a lost rank had a part of it */
  if (result != CDDP_OK || cddp_rank(alive) != 0) return result;
  progress_bar(bar, done, *loss);
  if (!isatty(STDOUT_FILENO) && (done % 50 == 0 || done == config.stop)) /* else: the bar */
    printf("step %d/%d  loss %.4f  %.0f bytes/s\n", done, config.stop, *loss,
           progress_speed(bar, done));
  return CDDP_OK;
}

/* Saves a checkpoint each 100 steps, and after the last one. All ranks call it, and rank 0 writes:
   without --elastic the ranks of a host share AdamW's states, and each has updated its part. */
static cddp_result save_step(cddp_group *alive, int done, const cddp_checkpoint_desc *file) {
  if (!config.save || (done % 100 != 0 && done < config.stop)) return CDDP_OK;
  return cddp_save(alive, config.save, params, param_count, file);
}

static float *floats(long n) { return (float *)allocate((size_t)n, sizeof(float)); }

static int train(int rank, void *arg) {
  cddp_group *g, *alive; /* alive: the ranks that are not lost */
  cddp_ddp *ddp;
  cddp_optim *adamw;
  (void)arg;
  openblas_set_num_threads(1); /* a rank has one core */
  TRY(cddp_init(&g, NULL));    /* with CDDP_JOIN=1 in the environment it joins a running job */
  if (rank == 0 && !(curve_can_write(config.plot) && curve_can_write(config.csv))) return 1;
  int shards = config.shards > 0 ? config.shards : cddp_world_size(g);
  float *weights = (float *)cddp_alloc(g, gpt_bytes());
  TRY(weights ? CDDP_OK : CDDP_OUT_OF_MEMORY);
  gpt_init(weights, weights); /* (gpt.cu: on the GPU and in host memory) */
  gpt_allocate(floats);

  cddp_ddp_desc model = {
      .max_grad_norm = config.clip, .shards = config.shards, .elastic = config.elastic >= 0};
  cddp_adamw_desc rule = {.beta2 = 0.99, .weight_decays = decays};
  TRY(cddp_ddp_create(&ddp, g, params, param_count, &model));
  TRY(cddp_adamw_create(&adamw, params, param_count, &rule));
  cddp_checkpoint_desc file = {.shapes = shapes, .optim = adamw, .ddp = ddp};
  if (config.resume && !gpt_joins()) /* a joining process receives the weights from the others */
    TRY(cddp_load(g, config.resume, params, param_count, &file));

  double(*history)[COLUMNS] = allocate((size_t)config.steps, sizeof *history); /* zeros */
  int first = (int)cddp_ddp_steps(ddp);
  if (first >= config.stop && rank == 0)
    fprintf(stderr, "nothing to train: the checkpoint is of step %d\n", first);
  progress bar = {.unit = "step",
                  .samples = "bytes",
                  .samples_each = (double)shards * config.batch * config.context,
                  .first = first,
                  .last = config.stop,
                  .start = progress_now()};
  alive = g;
  for (int step = first; step < config.stop; step = (int)cddp_ddp_steps(ddp)) {
    double *row = history[step];
    row[LEARNING_RATE] = gpt_learning_rate(step);
    TRY(cddp_optim_set_lr(adamw, row[LEARNING_RATE]));
    if (train_shards(ddp, step, shards, &row[LOSS], rank)) return 1;
    TRY(cddp_ddp_step(ddp, adamw)); /* mean over shards, clipping, AdamW, zero gradients */

    alive = cddp_ddp_group(ddp); /* not g: with --elastic ranks may be lost or have joined */
    cddp_result result = report(alive, &bar, step + 1, shards, &row[LOSS]);
    if (result == CDDP_OK) result = save_step(alive, step + 1, &file);
    /* A lost rank is an error of the last save only: the next step continues without the rank. */
    bool last_save = config.save && step + 1 == config.stop;
    if (result != CDDP_PEER_LOST || last_save) TRY(result);
  }

  if (cddp_rank(alive) == 0 && !write_history(history[0], first)) return 1;
  cddp_result result = show_weights(alive, weights, gpt_bytes());
  if (result != CDDP_OK && !(result == CDDP_PEER_LOST && model.elastic)) return 1;
  if (cddp_rank(alive) == 0) write_text(config.sample);
  cddp_optim_destroy(adamw);
  cddp_ddp_destroy(ddp);
  cddp_free(g, weights);
  cddp_destroy(g);
  return 0;
}

int main(int argc, char **argv) {
  int code = options_read(options, sizeof options / sizeof *options, argc, argv);
  if (code >= 0) return code;
  if (!gpt_check_options() || !gpt_load_text()) return 1;
  setvbuf(stdout, NULL, _IOLBF, 0); /* whole lines, also into a file that the ranks share */

  int rank = gpt_launcher_rank(option_given("-n", argc, argv));
  if (rank >= 0) return train(rank, NULL);
  cddp_result result = config.elastic < 0
                           ? cddp_spawn(train, NULL, config.ranks)
                           : cddp_spawn_elastic(train, NULL, config.ranks, config.elastic);
  if (result == CDDP_OK) return 0; /* no launcher: forks the ranks */
  fprintf(stderr, "%s\n", cddp_error());
  return 1;
}
