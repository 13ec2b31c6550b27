/* idx.h - reads the files of MNIST and of examples/data: images of digits, and their labels. */
#ifndef IDX_H
#define IDX_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct data_set {
  int count, rows, columns;
  unsigned char *images; /* [count][rows][columns] */
  unsigned char *labels; /* [count], each from 0 to 9 */
} data_set;

/* Reads a file in the IDX format: a magic number and sizes, all of them big-endian, then bytes.
   Returns the bytes, or NULL after it has printed the error. */
static inline unsigned char *idx_read(const char *path, unsigned dimensions, unsigned *size) {
  unsigned header[4] = {0, 1, 1, 1};
  FILE *f = fopen(path, "rb");
  if (!f) {
    perror(path);
    return NULL;
  }
  for (unsigned i = 0; i < 4 + 4 * dimensions; i++)
    header[i / 4] = header[i / 4] << 8 | (unsigned)fgetc(f);
  memcpy(size, header + 1, 3 * sizeof *size);
  size_t total = (size_t)size[0] * size[1] * size[2];
  if (header[0] != 0x800 + dimensions || size[0] - 1 >= 1 << 24 || size[1] - 1 >= 512 ||
      size[2] - 1 >= 512) {
    fprintf(stderr, "%s: not an IDX file: magic %#x, sizes %u %u %u\n", path, header[0], size[0],
            size[1], size[2]);
    fclose(f);
    return NULL;
  }

  unsigned char *bytes = (unsigned char *)malloc(total + 1);
  size_t found = bytes ? fread(bytes, 1, total + 1, f) : 0;
  fclose(f);
  if (found == total) return bytes;
  fprintf(stderr, "%s: not %zu bytes\n", path, total);
  free(bytes);
  return NULL;
}

/* Reads the images and labels of a set, "train" or "test", from a folder. Returns false after it
   has printed the error. */
static inline bool idx_load(data_set *set, const char *folder, const char *name) {
  unsigned labels[3], images[3];
  char path[4096];
  snprintf(path, sizeof path, "%s/digits-%s-labels-idx1-ubyte", folder, name);
  set->labels = idx_read(path, 1, labels);
  if (!set->labels) return false;
  for (unsigned i = 0; i < labels[0]; i++)
    if (set->labels[i] > 9) {
      fprintf(stderr, "%s: label over 9\n", path);
      return false;
    }

  snprintf(path, sizeof path, "%s/digits-%s-images-idx3-ubyte", folder, name);
  set->images = idx_read(path, 3, images);
  if (!set->images) return false;
  if (images[0] != labels[0]) {
    fprintf(stderr, "%s: %u images, %u labels\n", path, images[0], labels[0]);
    return false;
  }
  set->count = (int)images[0];
  set->rows = (int)images[1];
  set->columns = (int)images[2];
  return true;
}

#endif
