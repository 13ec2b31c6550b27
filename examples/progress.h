/* progress.h - what digits and gpt show of their training: a progress bar, a table (CSV), a picture
   (SVG) and hashes of the weights. Include it after cddp.h. */
#ifndef PROGRESS_H
#define PROGRESS_H

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* --- The bar --- */

typedef struct progress {
  const char *unit;    /* "epoch" or "step" */
  const char *samples; /* "samples" or "bytes" */
  double samples_each; /* in an epoch or step, on all ranks */
  double first, last;  /* units: where this run begins, and where the training ends */
  double start, drawn; /* seconds: when the run began, and when the bar was drawn last */
} progress;

static inline double progress_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Samples a second, after `done` units. */
static inline double progress_speed(const progress *p, double done) {
  return (done - p->first) / (progress_now() - p->start) * p->samples_each;
}

/* Draws the bar, at most 10 times a second and at the end; nothing if stdout is not a terminal. */
static inline void progress_bar(progress *p, double done, double loss) {
  double now = progress_now(), speed = progress_speed(p, done);
  if (!isatty(STDOUT_FILENO) || (now - p->drawn < 0.1 && done < p->last)) return;
  p->drawn = now;
  printf("\r[%-20.*s] %s %d/%d  loss %.4f  %.0f %s/s  %.0f s left  %s", (int)(20 * done / p->last),
         "====================", p->unit, (int)ceil(done), (int)p->last, loss, speed, p->samples,
         (p->last - done) * p->samples_each / speed, done < p->last ? "" : "\n");
  fflush(stdout);
}

/* --- The table and the picture --- */

typedef struct curve {
  const char *title, *unit; /* unit: of a row, "epoch" or "step" */
  const double *values;     /* [rows][columns] */
  int first, rows;          /* rows before the first are unknown */
  int columns;
  const char *const *names; /* [columns]: "learning rate" */
} curve;

typedef struct panel { /* a part of the picture, with its own axes */
  const char *name;    /* of the vertical axis */
  int column, columns; /* of the curve: the first one in this panel, and how many */
} panel;

/* Whether the file can be written. Call it before the training. NULL: no file, which is fine. */
static inline bool curve_can_write(const char *path) {
  FILE *f = path ? fopen(path, "a") : NULL;
  if (path && !f) perror(path);
  if (f) fclose(f);
  return !path || f;
}

static inline bool curve_write_csv(const curve *c, const char *path) {
  FILE *f = fopen(path, "w");
  if (!f) {
    perror(path);
    return false;
  }
  fprintf(f, "%s", c->unit);
  for (int k = 0; k < c->columns; k++) fprintf(f, ",%s", c->names[k]);
  for (int row = c->first; row < c->rows; row++) {
    fprintf(f, "\n%d", row + 1);
    for (int k = 0; k < c->columns; k++) fprintf(f, ",%.9g", c->values[row * c->columns + k]);
  }
  fprintf(f, "\n");
  bool written = !ferror(f);
  if (fclose(f) == 0 && written) return true;
  perror(path);
  return false;
}

/* The distance of an axis's numbers: 1, 2 or 5 times a power of 10, about a fifth of the range. */
static inline double curve_tick(double range) {
  double power = pow(10, floor(log10(range / 5)));
  double ratio = range / 5 / power;
  return power * (ratio < 1.5 ? 1 : ratio < 3.5 ? 2 : ratio < 7.5 ? 5 : 10);
}

enum { SVG_LEFT = 95, SVG_WIDTH = 600, SVG_TOP = 50, SVG_HEIGHT = 150, SVG_GAP = 35 };

/* Horizontal position of a row's end. */
static inline double svg_x(const curve *c, double rows) {
  return SVG_LEFT + SVG_WIDTH * rows / c->rows;
}

/* Draws the axes of a panel, which begins `top` pixels from the top. Returns the vertical axis's
   highest value; the lowest is 0. */
static inline double svg_axes(FILE *f, const curve *c, const panel *p, int top) {
  double highest = 0, bottom = top + SVG_HEIGHT;
  for (int row = c->first; row < c->rows; row++)
    for (int k = p->column; k < p->column + p->columns; k++) {
      double value = c->values[row * c->columns + k];
      if (isfinite(value)) highest = fmax(highest, value);
    }
  double tick = curve_tick(highest > 0 ? highest : 1);
  highest = fmax(1, ceil(highest / tick - 1e-9)) * tick;
  for (int i = 0; i * tick < highest + tick / 2; i++) {
    double y = bottom - SVG_HEIGHT * i * tick / highest;
    fprintf(f, "<path d='M%d %.1fh%d' stroke='#ddd'/>\n", SVG_LEFT, y, SVG_WIDTH);
    fprintf(f, "<text x='%d' y='%.1f' text-anchor='end'>%g</text>\n", SVG_LEFT - 8, y + 4,
            i * tick);
  }
  fprintf(f, "<text transform='translate(22 %.1f) rotate(-90)' text-anchor='middle'>%s</text>\n",
          (top + bottom) / 2, p->name);
  fprintf(f, "<path d='M%d %dV%gh%d' stroke='#333' fill='none'/>\n", SVG_LEFT, top, bottom,
          SVG_WIDTH);
  return highest;
}

/* Draws the lines of a panel, and their names if there are several. */
static inline void svg_lines(FILE *f, const curve *c, const panel *p, int top, double highest) {
  static const char *const colors[] = {"#1f77b4", "#d62728", "#2ca02c", "#9467bd"};
  for (int k = p->column; k < p->column + p->columns; k++) {
    fprintf(f, "<polyline fill='none' stroke='%s' stroke-width='1.5' points='", colors[k % 4]);
    for (int row = c->first; row < c->rows; row++) {
      double value = c->values[row * c->columns + k];
      double y = top + SVG_HEIGHT * (1 - value / highest);
      if (isfinite(value)) fprintf(f, "%.1f,%.1f ", svg_x(c, row + 1), y);
    }
    fprintf(f, "'/>\n");
    for (int row = c->first; row < c->rows && c->rows <= 100; row++) { /* a dot for each row */
      double value = c->values[row * c->columns + k];
      double y = top + SVG_HEIGHT * (1 - value / highest);
      if (isfinite(value))
        fprintf(f, "<circle r='2.5' cx='%.1f' cy='%.1f' fill='%s'/>\n", svg_x(c, row + 1), y,
                colors[k % 4]);
    }
    int line = p->columns > 1 ? p->column + p->columns - k : 0; /* of the names, from the bottom */
    if (line > 0)
      fprintf(f, "<text x='%d' y='%d' text-anchor='end' fill='%s'>%s</text>\n",
              SVG_LEFT + SVG_WIDTH - 10, top + SVG_HEIGHT + 6 - 18 * line, colors[k % 4],
              c->names[k]);
  }
}

/* Draws a panel below the other for each of `panels`; they share the horizontal axis. */
static inline bool curve_write_svg(const curve *c, const panel *panels, int count,
                                   const char *path) {
  FILE *f = fopen(path, "w");
  if (!f) {
    perror(path);
    return false;
  }
  int bottom = SVG_TOP + count * (SVG_HEIGHT + SVG_GAP) - SVG_GAP;
  double tick = fmax(1, curve_tick(c->rows));
  fprintf(f,
          "<svg xmlns='http://www.w3.org/2000/svg' width='%d' height='%d' fill='#333' "
          "font-family='sans-serif' font-size='13' style='background:#fff'>\n",
          SVG_LEFT + SVG_WIDTH + 30, bottom + 55);
  fprintf(f, "<text x='%d' y='28' font-size='16'>%s</text>\n", SVG_LEFT, c->title);
  for (int i = 0; i * tick <= c->rows; i++) {
    double x = svg_x(c, i * tick);
    fprintf(f, "<text x='%.1f' y='%d' text-anchor='middle'>%g</text>\n", x, bottom + 18, i * tick);
    for (int k = 0; k < count; k++)
      fprintf(f, "<path d='M%.1f %dv%d' stroke='#ddd'/>\n", x, SVG_TOP + k * (SVG_HEIGHT + SVG_GAP),
              SVG_HEIGHT);
  }
  fprintf(f, "<text x='%d' y='%d' text-anchor='middle'>%s</text>\n", SVG_LEFT + SVG_WIDTH / 2,
          bottom + 40, c->unit);
  for (int k = 0; k < count; k++) {
    int top = SVG_TOP + k * (SVG_HEIGHT + SVG_GAP);
    double highest = svg_axes(f, c, &panels[k], top);
    svg_lines(f, c, &panels[k], top, highest);
  }
  fprintf(f, "</svg>\n");
  bool written = !ferror(f);
  if (fclose(f) == 0 && written) return true;
  perror(path);
  return false;
}

/* --- The weights --- */

/* Rank 0 prints a hash of each rank's weights. If a rank is lost, each other rank prints its own.
   Prints its errors; CDDP_MISMATCH: two hashes differ. */
static inline cddp_result show_weights(cddp_group *g, const void *weights, size_t bytes) {
  int size = cddp_world_size(g), rank = cddp_rank(g);
  uint64_t hash = 0xcbf29ce484222325u; /* 64-bit FNV-1a */
  for (size_t i = 0; i < bytes; i++)
    hash = (hash ^ ((const unsigned char *)weights)[i]) * 0x100000001b3u;

  uint64_t *hashes = (uint64_t *)calloc((size_t)size, sizeof *hashes);
  if (!hashes) {
    perror("calloc");
    return CDDP_OUT_OF_MEMORY;
  }
  cddp_result result = cddp_all_gather(g, &hash, hashes, 1, CDDP_I64, NULL);
  if (result != CDDP_OK) {
    fprintf(stderr, "rank %d: %s\n", rank, cddp_error());
    printf("rank %d weights %016" PRIx64 "\n", rank, hash);
  }
  for (int r = 0; r < size && result == CDDP_OK && rank == 0; r++)
    printf("rank %d weights %016" PRIx64 "\n", r, hashes[r]);
  for (int r = 0; r < size && result == CDDP_OK; r++)
    if (hashes[r] != hash) {
      fprintf(stderr, "the weights of ranks %d and %d differ\n", rank, r);
      result = CDDP_MISMATCH;
    }
  free(hashes);
  return result;
}

#endif
