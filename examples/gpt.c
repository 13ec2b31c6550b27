/* gpt.c - trains a small GPT on the bytes of any text; each rank does its part of every batch.
     cc -O2 examples/gpt.c -o gpt -lopenblas -lpthread -lm
     ./gpt -n 2 --plot loss.svg --save FILE       on 2 ranks; then it writes a text of its own
     ./gpt -n 4 --shards 4 --text FILE            4 shards: the same weights on 1, 2, 3 or 4 ranks
     ./gpt -n 4 --shards 4 --elastic 9            and whoever is killed: up to 9 are started again
   --help lists all options. Network and file are GPT-2's, shapes torch.nn.Linear's. */
#define CDDP_IMPLEMENTATION /* includes stdio.h, stdlib.h, string.h, math.h, time.h and unistd.h */
#include "../cddp.h"
#include <cblas.h> /* Debian: libopenblas-dev */
#define FAIL(...) return fprintf(stderr, __VA_ARGS__), 1
#define TRY(calls) if (calls) FAIL("rank %d: %s\n", rank, cddp_error())
#define MATMUL(at, bt, m, n, k, scale, a, lda, b, ldb, beta, c, ldc) /* c = beta c + scale a b */ \
  cblas_sgemm(CblasRowMajor, Cblas##at, Cblas##bt, m, n, k, scale, a, lda, b, ldb, beta, c, ldc)
enum { N, STEPS, STOP, BATCH, CONTEXT, LAYERS, HEADS, CHANNELS, SHARDS, SEED, LR, DECAY, CLIP,
       ELASTIC, SAMPLE, TEXT, PLOT, SAVE, RESUME, OPTIONS };
static struct { const char *name, *value; double least, most; const char *help; } option[] = {
    {"-n", "2", 1, 1e6, "ranks, as child processes"},
    {"--steps", "800", 1, 1e6, "in all, those of a resumed checkpoint among them"},
    {"--stop", "1e6", 1, 1e6, "end after this step, as if interrupted"},
    {"--batch", "8", 1, 1e6, "sequences of a rank or shard in a step"},
    {"--context", "64", 1, 1e6, "bytes of a sequence"},
    {"--layers", "4", 1, 1e6, "of the network"},
    {"--heads", "4", 1, 1e6, "of attention"},
    {"--channels", "128", 1, 1e6, "a multiple of --heads"},
    {"--shards", "0", 0, 4096, "the global batch, in shards; 0: one a rank"},
    {"--seed", "1", 0, 1e18, "of weights and batches"},
    {"--lr", "2e-3", 0, 1e6, "highest learning rate"},
    {"--decay", "0.1", 0, 1e6, "weight decay"},
    {"--clip", "1", 0, 1e6, "largest norm of the gradient; 0: any"},
    {"--elastic", "-1", -1, 1e6, "survive lost ranks, start as many again; -1: no"},
    {"--sample", "300", 0, 1e6, "bytes to write at the end"},
    {"--text", "examples/data/shakespeare.txt", 0, 0, "file to learn"},
    {"--plot", NULL, 0, 0, "file for a picture of the loss (SVG)"},
    {"--save", NULL, 0, 0, "file for a checkpoint each 100 steps and at the end"},
    {"--resume", NULL, 0, 0, "checkpoint to go on from"},
};
static const char *word(int k) { return option[k].value; }
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

/* The parameters, in this order; after each weight comes its bias or, of an embedding, nothing. */
enum { EMBEDDING, POSITION, LN, LAYER = 4, LN1 = 0, QKV = 2, OUT = 4, LN2 = 6, UP = 8, DOWN = 10,
       PARTS = 12, BYTES = 256, MAX_LAYERS = 64, MAX = LAYER + PARTS * MAX_LAYERS,
       MAX_CHANNELS = 4096, MAX_BATCH = 4096, MAX_TEXT = 1 << 28 };
static const struct { const char *name; int rows, columns; } parts[] = { /* in channels; 0: none */
    {"wte.weight", 0, 1}, {"wpe.weight", 0, 1}, {"ln_f.weight", 1, 0}, {"ln_f.bias", 1, 0},
    {"ln_1.weight", 1, 0}, {"ln_1.bias", 1, 0}, {"attn.c_attn.weight", 3, 1},
    {"attn.c_attn.bias", 3, 0}, {"attn.c_proj.weight", 1, 1}, {"attn.c_proj.bias", 1, 0},
    {"ln_2.weight", 1, 0}, {"ln_2.bias", 1, 0}, {"mlp.c_fc.weight", 4, 1}, {"mlp.c_fc.bias", 4, 0},
    {"mlp.c_proj.weight", 1, 4}, {"mlp.c_proj.bias", 1, 0}};
static int B, T, L, H, C, count; /* sequences, bytes of each, layers, heads, channels; parameters */
static cddp_param params[MAX]; static cddp_shape shapes[MAX]; static double decays[MAX];
static float *data(int p) { return (float *)params[p].data; }
static float *grad(int p) { return (float *)params[p].grad; }
static int rows(int p) { return (int)shapes[p].size[0]; }
static int columns(int p) { return (int)shapes[p].size[1]; }
typedef struct layer {          /* what forward keeps for backward; rows of C floats, or as said */
  float *in, *norm1, *qkv;      /* the residual stream; qkv, rows of 3 C: queries, keys, values */
  float *attention, *mix, *mid; /* [B][H][T][T]; all heads' results; the stream with them added */
  float *norm2, *up, *act;      /* rows of 4 C: up, GELU's slope there; act, its value */
} layer; static layer layers[MAX_LAYERS];
static float *top, *norm, *logits, *d_stream, *d_row, *d_qkv, *d_up, *d_attention; /* gradients */
static unsigned char *text; static size_t text_size;
static const unsigned char *sequences[MAX_BATCH]; /* of this shard: T bytes and the one after */
/* torch.nn.Linear of n rows: out = add (or NULL) + in * weights of parameter p + bias of p + 1 */
static void linear(float *out, const float *add, const float *in, int n, int p) {
  int from = columns(p), to = rows(p);
  for (int i = 0; i < n; i++)
    for (int k = 0; k < to; k++) out[i * to + k] = data(p + 1)[k] + (add ? add[i * to + k] : 0);
  MATMUL(NoTrans, Trans, n, to, from, 1, in, from, data(p), from, 1, out, to);
}
static void linear_backward(float *d_in, const float *d_out, const float *in, int n, int p) {
  int from = columns(p), to = rows(p);
  MATMUL(Trans, NoTrans, to, from, n, 1, d_out, to, in, from, 1, grad(p), from);
  for (int i = 0; i < n; i++) for (int k = 0; k < to; k++) grad(p + 1)[k] += d_out[i * to + k];
  MATMUL(NoTrans, NoTrans, n, from, to, 1, d_out, to, data(p), from, 0, d_in, from);
}
/* torch.nn.LayerNorm of n rows of C, and its backward, which adds to d_in */
static float center(float *x, const float *in) { /* subtracts the mean; returns 1 / deviation */
  float sum = 0, squares = 0;
  for (int c = 0; c < C; c++) sum += in[c];
  for (int c = 0; c < C; c++) x[c] = in[c] - sum / (float)C, squares += x[c] * x[c];
  return 1 / sqrtf(squares / (float)C + 1e-5f);
}
static void layer_norm(float *out, const float *in, int n, int p) {
  for (int i = 0; i < n; i++, out += C, in += C) {
    float scale = center(out, in);
    for (int c = 0; c < C; c++) out[c] = out[c] * scale * data(p)[c] + data(p + 1)[c];
  }
}
static void layer_norm_backward(float *d_in, const float *d_out, const float *in, int n, int p) {
  for (int i = 0; i < n; i++, d_in += C, d_out += C, in += C) {
    float x[MAX_CHANNELS], d[MAX_CHANNELS], scale = center(x, in), sum = 0, dot = 0;
    for (int c = 0; c < C; c++) {
      x[c] *= scale, d[c] = d_out[c] * data(p)[c], sum += d[c], dot += d[c] * x[c];
      grad(p)[c] += d_out[c] * x[c], grad(p + 1)[c] += d_out[c];
    }
    for (int c = 0; c < C; c++) d_in[c] += scale * (d[c] - (sum + x[c] * dot) / (float)C);
  }
}
/* GELU with tanh, as GPT-2's; slope: its derivative. (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)) */
static float gelu(float x, float *slope) {
  float s = 1 / (1 + expf(-1.5957691216f * (x + 0.044715f * x * x * x)));
  *slope = s + x * s * (1 - s) * 1.5957691216f * (1 + 0.134145f * x * x);
  return x * s;
}
static float softmax(float *p, int n) { /* in place; returns log(sum(exp(p))) */
  float most = p[0], sum = 0;
  for (int k = 1; k < n; k++) most = fmaxf(most, p[k]);
  for (int k = 0; k < n; k++) sum += p[k] = expf(p[k] - most);
  for (int k = 0; k < n; k++) p[k] /= sum;
  return most + logf(sum);
}
/* Head h of sequence b: mix = softmax(q k^T / sqrt(C / H)) v, each byte looking at no later one */
static void attend(const layer *l, int b, int h) {
  int size = C / H, row = 3 * C;
  const float *q = l->qkv + b * T * row + h * size, *k = q + C, *v = k + C;
  float *a = l->attention + (b * H + h) * T * T;
  MATMUL(NoTrans, Trans, T, T, size, 1 / sqrtf((float)size), q, row, k, row, 0, a, T);
  for (int i = 0; i < T; i++) {
    softmax(a + i * T, i + 1);
    for (int j = i + 1; j < T; j++) a[i * T + j] = 0;
  }
  MATMUL(NoTrans, NoTrans, T, size, T, 1, a, T, v, row, 0, l->mix + b * T * C + h * size, C);
}
static void attend_backward(const layer *l, int b, int h) { /* d_row: of mix; sets d_qkv */
  int size = C / H, row = 3 * C, at = b * T * row + h * size;
  const float *q = l->qkv + at, *k = q + C, *v = k + C, *d_mix = d_row + b * T * C + h * size;
  const float *a = l->attention + (b * H + h) * T * T, scale = 1 / sqrtf((float)size);
  float *d_q = d_qkv + at, *d_k = d_q + C, *d_v = d_k + C;
  MATMUL(Trans, NoTrans, T, size, T, 1, a, T, d_mix, C, 0, d_v, row);
  MATMUL(NoTrans, Trans, T, T, size, 1, d_mix, C, v, row, 0, d_attention, T);
  for (int i = 0; i < T; i++) {
    float *p = d_attention + i * T, dot = 0;
    for (int j = 0; j <= i; j++) dot += p[j] * a[i * T + j];
    for (int j = 0; j < T; j++) p[j] = a[i * T + j] * (p[j] - dot);
  }
  MATMUL(NoTrans, NoTrans, T, size, T, scale, d_attention, T, k, row, 0, d_q, row);
  MATMUL(Trans, NoTrans, T, size, T, scale, d_attention, T, q, row, 0, d_k, row);
}

/* The logits of what follows each byte of the first so many sequences. */
static void forward(int sequence_count) {
  int n = sequence_count * T;
  for (int i = 0; i < n; i++)
    for (int c = 0, byte = sequences[i / T][i % T]; c < C; c++)
      layers[0].in[i * C + c] = data(EMBEDDING)[byte * C + c] + data(POSITION)[i % T * C + c];
  for (int i = 0, p = LAYER; i < L; i++, p += PARTS) {
    layer *l = &layers[i];
    layer_norm(l->norm1, l->in, n, p + LN1);
    linear(l->qkv, NULL, l->norm1, n, p + QKV);
    for (int k = 0; k < sequence_count * H; k++) attend(l, k / H, k % H);
    linear(l->mid, l->in, l->mix, n, p + OUT);
    layer_norm(l->norm2, l->mid, n, p + LN2);
    linear(l->up, NULL, l->norm2, n, p + UP);
    for (int k = 0; k < n * 4 * C; k++) l->act[k] = gelu(l->up[k], &l->up[k]);
    linear(i + 1 < L ? l[1].in : top, l->mid, l->act, n, p + DOWN);
  }
  layer_norm(norm, top, n, LN);
  MATMUL(NoTrans, Trans, n, BYTES, C, 1, norm, C, data(EMBEDDING), C, 0, logits, BYTES);
}

/* The gradients of the mean cross-entropy, which is added to *loss. ready: may be averaged now. */
static int backward(cddp_ddp *ddp, int rank, double *loss) {
  int n = B * T;
  for (int i = 0; i < n; i++) {
    float *p = logits + i * BYTES, *right = p + sequences[i / T][i % T + 1], wanted = *right;
    *loss += (double)(softmax(p, BYTES) - wanted) / n, *right -= 1;
    for (int k = 0; k < BYTES; k++) p[k] /= (float)n;
  }
  MATMUL(Trans, NoTrans, BYTES, C, n, 1, logits, BYTES, norm, C, 1, grad(EMBEDDING), C);
  MATMUL(NoTrans, NoTrans, n, C, BYTES, 1, logits, BYTES, data(EMBEDDING), C, 0, d_row, C);
  memset(d_stream, 0, (size_t)(n * C) * sizeof *d_stream);
  layer_norm_backward(d_stream, d_row, top, n, LN);
  TRY(cddp_ddp_ready(ddp, LN) || cddp_ddp_ready(ddp, LN + 1));
  for (int i = L - 1, p = LAYER + PARTS * i; i >= 0; i--, p -= PARTS) {
    layer *l = &layers[i];
    linear_backward(d_up, d_stream, l->act, n, p + DOWN);
    for (int k = 0; k < n * 4 * C; k++) d_up[k] *= l->up[k];
    linear_backward(d_row, d_up, l->norm2, n, p + UP);
    layer_norm_backward(d_stream, d_row, l->mid, n, p + LN2);
    linear_backward(d_row, d_stream, l->mix, n, p + OUT);
    for (int k = 0; k < B * H; k++) attend_backward(l, k / H, k % H);
    linear_backward(d_row, d_qkv, l->norm1, n, p + QKV);
    layer_norm_backward(d_stream, d_row, l->in, n, p + LN1);
    for (int k = 0; k < PARTS; k++) TRY(cddp_ddp_ready(ddp, p + k));
  }
  for (int i = 0; i < n; i++) {
    float *in = grad(EMBEDDING) + sequences[i / T][i % T] * C, *place = grad(POSITION) + i % T * C;
    for (int c = 0; c < C; c++) in[c] += d_stream[i * C + c], place[c] += d_stream[i * C + c];
  }
  TRY(cddp_ddp_ready(ddp, POSITION) || cddp_ddp_ready(ddp, EMBEDDING));
  return 0;
}
static const unsigned char *pick(uint64_t counter) { /* a place in the text (splitmix64) */
  uint64_t z = (uint64_t)number(SEED) * 0xd1342543de82ef95u + (counter + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u, z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return text + (z ^ z >> 31) % (text_size - (size_t)T);
}
static double normal(void) { return sqrt(-2 * log(1 - drand48())) * cos(6.283185307 * drand48()); }
static float *floats(int n) { float *p = (float *)calloc((size_t)n, sizeof *p);
  return p ? p : (perror("calloc"), exit(1), p); }
/* GPT-2's start: N(0, 0.02), less where the residual stream is added to; norms 1, biases 0. */
static void init_model(float *w) {
  int r = B * T * C;
  for (int i = 0; i < count; w += params[i++].count) {
    int part = i < LAYER ? i : LAYER + (i - LAYER) % PARTS, wide = parts[part].columns * C;
    const char *name = parts[part].name;
    char *label = (char *)floats(12); /* "ln_f.weight", "h.0.ln_1.weight" */
    if (sprintf(label, "h.%d.%s", (i - LAYER) / PARTS, name) && i < LAYER) strcpy(label, name);
    int high = i == EMBEDDING ? BYTES : i == POSITION ? T : parts[part].rows * C;
    cddp_shape shape = {wide > 0 ? 2 : 1, {(uint64_t)high, (uint64_t)wide}};
    cddp_param param = {label, w, NULL, (size_t)(high * (wide > 0 ? wide : 1)), CDDP_F32};
    params[i] = param, shapes[i] = shape, decays[i] = wide > 0 ? number(DECAY) : 0;
    double spread = strstr(name, "c_proj") ? 0.02 / sqrt(2.0 * L) : 0.02;
    float constant = strstr(name, "ln_") && strstr(name, "weight") ? 1 : 0;
    for (size_t k = 0; k < param.count; k++) w[k] = wide ? (float)(spread * normal()) : constant;
  }
  for (layer *l = layers; l < layers + L; l++) {
    l->in = floats(r), l->norm1 = floats(r), l->qkv = floats(3 * r), l->mix = floats(r);
    l->mid = floats(r), l->norm2 = floats(r), l->up = floats(4 * r), l->act = floats(4 * r);
    l->attention = floats(B * H * T * T);
  }
  top = floats(r), norm = floats(r), d_stream = floats(r), d_row = floats(r), d_qkv = floats(3 * r);
  d_up = floats(4 * r), d_attention = floats(T * T), logits = floats(B * T * BYTES);
}

/* Whether the file can be written: asked before an hour of training. */
static bool can_write(const char *path) {
  FILE *f = fopen(path, "a");
  if (!f) return perror(path), false;
  return fclose(f) == 0;
}
static int plot(const char *path, const double *curve, int steps) {
  FILE *f = fopen(path, "w"); if (!f) return perror(path), 1;
  fprintf(f, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 680 400' fill='none'>\n<text "
          "x='60' y='385' fill='#333'>%d steps: 0 to 6 nats a byte</text>\n<path d='M60 15V345"
          "H650' stroke='#999'/><polyline stroke='#16a' points='", steps);
  for (int t = 0; t < steps; t++)
    fprintf(f, "%.1f,%.1f ", 60 + 590.0 * (t + 1) / steps, 345 - 55 * fmin(curve[t], 6));
  return fputs("'/>\n</svg>\n", f) < 0 || fclose(f);
}
/* Prints what the network thinks likely after a line's end, byte by byte. */
static void write_text(int length) {
  unsigned char *bytes = (unsigned char *)floats(T + length);
  bytes[0] = '\n';
  for (int i = 0, next = 0; i < length; i++, next = 0) {
    int last = i < T ? i : T - 1;
    float *p = logits + last * BYTES, left = (float)drand48();
    sequences[0] = bytes + i - last, forward(1);
    for (int k = 0; k < BYTES; k++) p[k] /= 0.8f; /* the temperature */
    for (softmax(p, BYTES); next < BYTES - 1 && (left -= p[next]) >= 0;) next++;
    putchar(bytes[i + 1] = (unsigned char)next);
  }
  puts(""), free(bytes);
}

static int train(int rank, void *group_desc) {
  int steps = (int)number(STEPS), stop = (int)fmin(steps, number(STOP)), warm = steps / 20 + 1;
  size_t size = (size_t)(C * (BYTES + T + 2 + L * (12 * C + 13))) * sizeof(float);
  uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
  cddp_group *g, *here; cddp_ddp *ddp; cddp_optim *adamw; float *w;
  TRY(cddp_init(&g, (const cddp_group_desc *)group_desc) || !(w = (float *)cddp_alloc(g, size)));
  if (rank == 0 && word(PLOT) && !can_write(word(PLOT))) return 1;
  int S = number(SHARDS) > 0 ? (int)number(SHARDS) : cddp_world_size(g);
  double *curve = (double *)floats(2 * steps); /* the loss of each step */
  here = g, openblas_set_num_threads(1), srand48((long)number(SEED)), init_model(w); /* one core */
  cddp_ddp_desc sharded = {0}; sharded.max_grad_norm = number(CLIP);
  sharded.shards = (int)number(SHARDS), sharded.elastic = number(ELASTIC) >= 0;
  cddp_adamw_desc options = {0}; options.beta2 = 0.99, options.weight_decays = decays;
  TRY(cddp_ddp_create(&ddp, g, params, count, &sharded) ||
      cddp_adamw_create(&adamw, params, count, &options));
  cddp_checkpoint_desc all = {0}; all.shapes = shapes, all.optim = adamw, all.ddp = ddp;
  TRY(word(RESUME) && !getenv("CDDP_JOIN") && cddp_load(g, word(RESUME), params, count, &all));
  double start = now(), first = (double)cddp_ddp_steps(ddp);
  for (int t = (int)first, shard; t < stop; t = (int)cddp_ddp_steps(ddp)) {
    while (cddp_ddp_next_shard(ddp, &shard)) { /* this rank's part of the batch */
      for (int b = 0; b < B; b++) /* by step, shard and b, whatever the rank */
        sequences[b] = pick((uint64_t)((t * (long)S + shard) * B + b));
      forward(B);
      if (backward(ddp, rank, &curve[t])) return 1;
    }
    double rate = t < warm ? (t + 1.0) / warm : 0.55 + 0.45 * cos(3.14159265 * t / steps);
    TRY(cddp_optim_set_lr(adamw, number(LR) * rate) || cddp_ddp_step(ddp, adamw));
    here = cddp_ddp_group(ddp); /* without those that were lost */
    cddp_result r = cddp_all_reduce(here, &curve[t], 1, CDDP_F64, CDDP_SUM, NULL);
    curve[t] /= S;
    double speed = (t + 1 - first) / (now() - start), left = (stop - t - 1) / speed;
    if (cddp_rank(here) == 0 && (isatty(2) || (t + 1) % 50 == 0 || t + 1 == stop))
      fprintf(stderr, "[%-20.*s] step %d  loss %.4f  %.0f bytes/s  %.0f s left   %c",
              20 * (t + 1) / steps, "====================", t + 1, curve[t], speed * S * B * T,
              left, isatty(2) && left > 0 ? '\r' : '\n');
    if (r == CDDP_OK && word(SAVE) && ((t + 1) % 100 == 0 || t + 1 == stop))
      r = cddp_save(here, word(SAVE), params, count, &all);
    TRY(r && (r != CDDP_PEER_LOST || (word(SAVE) && t + 1 == stop))); /* the next step goes on */
  }
  if (cddp_rank(here) == 0 && word(PLOT) && plot(word(PLOT), curve, stop)) return 1;
  if (cddp_rank(here) == 0) write_text((int)number(SAMPLE));
  for (size_t i = 0; i < size; i++) hash = (hash ^ ((uint8_t *)w)[i]) * 0x100000001b3u;
  printf("rank %d of %d: weights %016" PRIx64 "\n", rank, cddp_world_size(here), hash);
  return cddp_optim_destroy(adamw), cddp_ddp_destroy(ddp), cddp_free(g, w), cddp_destroy(g), 0;
}

int main(int argc, char **argv) {
  int code = read_options(argc, argv);
  if (code >= 0) return code;
  B = (int)number(BATCH), T = (int)number(CONTEXT), L = (int)number(LAYERS), H = (int)number(HEADS);
  C = (int)number(CHANNELS), count = LAYER + PARTS * L;
  if (C % H || L > MAX_LAYERS || C > MAX_CHANNELS || B > MAX_BATCH)
    FAIL("--channels: a multiple of --heads, to %d; --layers: to %d\n", MAX_CHANNELS, MAX_LAYERS);
  FILE *f = fopen(word(TEXT), "rb"); if (!f) return perror(word(TEXT)), 1;
  text = (unsigned char *)malloc(MAX_TEXT), text_size = text ? fread(text, 1, MAX_TEXT, f) : 0;
  if (ferror(f) || text_size <= (size_t)T) FAIL("%s: shorter than --context\n", word(TEXT));
  fclose(f), setvbuf(stdout, NULL, _IOLBF, 0);
  for (int i = 1; i < argc && cddp_launcher_rank() == 0; i += 2)
    if (strcmp(argv[i], "-n") == 0) fprintf(stderr, "-n is ignored: a launcher started this\n");
  if (cddp_launcher_rank() >= 0) return train(cddp_launcher_rank(), NULL); /* torchrun, mpirun */
  int n = (int)number(N), more = (int)number(ELASTIC);
  cddp_result r = more < 0 ? cddp_spawn(train, NULL, n) : cddp_spawn_elastic(train, NULL, n, more);
  return r ? fprintf(stderr, "%s\n", cddp_error()), 1 : 0;
}
