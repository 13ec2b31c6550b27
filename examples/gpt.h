/* gpt.h - what gpt.c and gpt.cu share: GPT-2's parameters and their first values, the memory for
   activations, the text, the learning rate. Include it after cddp.h.

   As in the literature, B is the number of sequences in a batch, T of bytes in a sequence, C of
   channels. */
#ifndef GPT_H
#define GPT_H

#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TRY(call) /* in functions that have the variable rank */ \
  do { \
    if ((call) != CDDP_OK) return fprintf(stderr, "rank %d: %s\n", rank, cddp_error()), 1; \
  } while (0)

enum { BYTES = 256, MAX_LAYERS = 64, MAX_CHANNELS = 4096, MAX_BATCH = 4096, MAX_TEXT = 1 << 28 };

static struct config { /* the options; gpt.c and gpt.cu do not have all of them */
  int ranks, steps, stop, batch, context, layers, heads, channels, shards, seed, elastic, sample;
  double lr, decay, clip;
  const char *text, *plot, *csv, *save, *resume, *backend;
} config;

/* The numbers of the parameters. The bias of LN_F is LN_F + 1. Those of layer i begin at
   LAYER + PER_LAYER * i, in the order of the second list: each weight, and after it its bias. */
enum { EMBEDDING, POSITION, LN_F, LAYER = 4 };
enum { LN_1 = 0, QKV = 2, PROJECT = 4, LN_2 = 6, UP = 8, DOWN = 10, PER_LAYER = 12 };
enum { MAX_PARAMS = LAYER + PER_LAYER * MAX_LAYERS };

static const struct {
  const char *name;
  int rows, columns; /* in channels; columns 0: a vector */
} gpt_parts[LAYER + PER_LAYER] = {
    {"wte.weight", 0, 1}, /* BYTES rows */
    {"wpe.weight", 0, 1}, /* config.context rows */
    {"ln_f.weight", 1, 0},
    {"ln_f.bias", 1, 0},
    {"ln_1.weight", 1, 0},
    {"ln_1.bias", 1, 0},
    {"attn.c_attn.weight", 3, 1},
    {"attn.c_attn.bias", 3, 0},
    {"attn.c_proj.weight", 1, 1},
    {"attn.c_proj.bias", 1, 0},
    {"ln_2.weight", 1, 0},
    {"ln_2.bias", 1, 0},
    {"mlp.c_fc.weight", 4, 1},
    {"mlp.c_fc.bias", 4, 0},
    {"mlp.c_proj.weight", 1, 4},
    {"mlp.c_proj.bias", 1, 0},
};

static int param_count;
static cddp_param params[MAX_PARAMS];
static cddp_shape shapes[MAX_PARAMS];
static double decays[MAX_PARAMS]; /* weight decay: of matrices only */

/* The rank that torchrun, mpirun, srun, ... gave this process; -1: there is no launcher. */
static inline int gpt_launcher_rank(bool has_n) {
  int rank = cddp_launcher_rank();
  if (rank == 0 && has_n)
    fprintf(stderr, "-n %d is ignored: the launcher sets the number of ranks\n", config.ranks);
  return rank;
}

static inline bool gpt_joins(void) { /* whether this process joins a running job */
  const char *joins = getenv("CDDP_JOIN");
  return joins && strcmp(joins, "1") == 0;
}

static inline float *weight(int p) { return (float *)params[p].data; }
static inline float *grad(int p) { return (float *)params[p].grad; }
static inline int rows(int p) { return (int)shapes[p].size[0]; }
static inline int columns(int p) { return (int)shapes[p].size[1]; }

static inline void *allocate(size_t count, size_t size) {
  void *memory = calloc(count, size);
  if (!memory) {
    perror("calloc");
    exit(1);
  }
  return memory;
}

static inline double normal(void) { /* Box and Muller's method */
  double radius = sqrt(-2 * log(1 - drand48()));
  return radius * cos(6.283185307 * drand48());
}

/* Checks the options that depend on each other, and limits --stop to --steps. Returns false after
   it has printed the error. */
static inline bool gpt_check_options(void) {
  double n = (double)config.batch * config.context, C = config.channels;
  if (config.stop > config.steps) config.stop = config.steps;
  double largest =
      fmax(fmax(n * 4 * C, n * BYTES), fmax(n * config.heads * config.context, 4 * C * C));
  if (config.channels % config.heads != 0)
    fprintf(stderr, "--channels must be a multiple of --heads\n");
  else if (largest > INT_MAX) /* indices are ints */
    fprintf(stderr,
            "an array of the network has %.0f numbers, more than %d: use a smaller --batch, "
            "--context or --channels\n",
            largest, INT_MAX);
  else return true;
  return false;
}

/* Bytes of all parameters. */
static inline size_t gpt_bytes(void) {
  size_t C = (size_t)config.channels, context = (size_t)config.context;
  return C * (BYTES + context + 2 + (size_t)config.layers * (12 * C + 13)) * sizeof(float);
}

/* Describes parameter i, which is at `data`, and writes its first values to `host`: matrices are
   N(0, 0.02), or less where their results are added to the residual stream; LayerNorm's weights are
   1, biases 0. */
static inline void gpt_param_init(int i, float *data, float *host) {
  int part = i < LAYER ? i : LAYER + (i - LAYER) % PER_LAYER;
  int high = gpt_parts[part].rows * config.channels;
  int wide = gpt_parts[part].columns * config.channels;
  const char *name = gpt_parts[part].name;
  char *label = (char *)allocate(48, 1); /* "ln_f.weight", "h.0.ln_1.weight" */
  if (i == EMBEDDING) high = BYTES;
  if (i == POSITION) high = config.context;
  if (i < LAYER) snprintf(label, 48, "%s", name);
  else snprintf(label, 48, "h.%d.%s", (i - LAYER) / PER_LAYER, name);

  params[i].name = label;
  params[i].data = data;
  params[i].count = (size_t)high * (size_t)(wide > 0 ? wide : 1);
  params[i].dtype = CDDP_F32;
  shapes[i].dims = wide > 0 ? 2 : 1;
  shapes[i].size[0] = (uint64_t)high;
  shapes[i].size[1] = (uint64_t)wide;
  decays[i] = wide > 0 ? config.decay : 0;

  double deviation = strstr(name, "c_proj") ? 0.02 / sqrt(2.0 * config.layers) : 0.02;
  float constant = strstr(name, "ln_") && strstr(name, "weight") ? 1 : 0;
  for (size_t k = 0; k < params[i].count; k++)
    host[k] = wide > 0 ? (float)(deviation * normal()) : constant;
}

/* Describes all parameters, which are one after the other at `data`. */
static inline void gpt_init(float *data, float *host) {
  srand48(config.seed);
  param_count = LAYER + PER_LAYER * config.layers;
  for (int i = 0; i < param_count; i++) {
    gpt_param_init(i, data, host);
    data += params[i].count;
    host += params[i].count;
  }
}

typedef struct layer { /* what forward keeps for backward: a row for each byte of the batch */
  float *in;           /* [B * T][C] the residual stream */
  float *norm1;        /* [B * T][C] LayerNorm of it */
  float *qkv;          /* [B * T][3 * C] queries, keys, values */
  float *attention;    /* [B][heads][T][T] after softmax */
  float *mix;          /* [B * T][C] the results of all heads */
  float *mid;          /* [B * T][C] the residual stream, with the heads' results added */
  float *norm2;        /* [B * T][C] LayerNorm of it */
  float *up;           /* [B * T][4 * C] before GELU; gpt.c keeps GELU's slope there */
  float *act;          /* [B * T][4 * C] after GELU */
} layer;

static layer layers[MAX_LAYERS];
static float *last;   /* [B * T][C] the residual stream after all layers */
static float *norm_f; /* [B * T][C] LayerNorm of it */
static float *logits; /* [B * T][BYTES] what the network expects after each byte */

/* Gradients, of one layer after the other. */
static float *d_stream;    /* [B * T][C] of the residual stream */
static float *d_row;       /* [B * T][C] of what a layer reads: norm1, norm2, mix, norm_f */
static float *d_qkv;       /* [B * T][3 * C] */
static float *d_up;        /* [B * T][4 * C] */
static float *d_attention; /* [B][heads][T][T]; gpt.c computes one [T][T] at a time */

/* Memory for all of these, by a function that gives n floats. */
static inline void gpt_allocate(float *(*floats)(long n)) {
  long n = (long)config.batch * config.context, row = n * config.channels;
  long squares = n * config.heads * config.context;
  for (layer *l = layers; l < layers + config.layers; l++) {
    l->in = floats(row);
    l->norm1 = floats(row);
    l->qkv = floats(3 * row);
    l->attention = floats(squares);
    l->mix = floats(row);
    l->mid = floats(row);
    l->norm2 = floats(row);
    l->up = floats(4 * row);
    l->act = floats(4 * row);
  }
  last = floats(row);
  norm_f = floats(row);
  logits = floats(n * BYTES);
  d_stream = floats(row);
  d_row = floats(row);
  d_qkv = floats(3 * row);
  d_up = floats(4 * row);
  d_attention = floats(squares);
}

/* Rises over the first twentieth of the steps, then falls to a tenth, as a cosine. */
static inline double gpt_learning_rate(int step) {
  int warm = config.steps / 20 + 1;
  double rate = step < warm ? (step + 1.0) / warm
                            : 0.55 + 0.45 * cos(3.14159265 * step / config.steps);
  return config.lr * rate;
}

static unsigned char *gpt_text; /* what the network learns */
static size_t gpt_text_size;

/* Reads the text, at most MAX_TEXT bytes. Returns false after it has printed the error. */
static inline bool gpt_load_text(void) {
  FILE *f = fopen(config.text, "rb");
  if (!f) {
    perror(config.text);
    return false;
  }
  gpt_text = (unsigned char *)allocate(MAX_TEXT, 1);
  gpt_text_size = fread(gpt_text, 1, MAX_TEXT, f);
  bool failed = ferror(f);
  if (failed) perror(config.text); /* a folder, for example */
  fclose(f);
  if (failed) return false;
  bool enough = gpt_text_size > (size_t)config.context; /* a sequence, and the byte after it */
  if (!enough) fprintf(stderr, "%s: not longer than --context\n", config.text);
  return enough;
}

#endif
