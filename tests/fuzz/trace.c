/* trace.c - the reader of flight recorder files, examples/cddptrace.c, fed with anything.

   clang -fsanitize=fuzzer,address -DFUZZ tests/fuzz/trace.c -lpthread -lm    for libFuzzer
   build/asan/trace                  changes a good file in 2,000 ways; part of ninja test

   The reader opens its files by name; here the name stands for bytes in memory. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdio.h>
#include <string.h>

static const unsigned char *fed;
static size_t fed_bytes;

static FILE *open_bytes(const char *path, const char *mode) {
  static unsigned char copy[1 << 20];
  if (strcmp(path, "memory") != 0) return fopen(path, mode);
  if (fed_bytes > 0) memcpy(copy, fed, fed_bytes < sizeof copy ? fed_bytes : sizeof copy);
  return fmemopen(copy, fed_bytes > 0 ? fed_bytes : 1, "rb");
}

#define fopen open_bytes
#define main cddptrace_main
int cddptrace_main(int argc, char **argv);
#include "../../examples/cddptrace.c"
#undef main
#undef fopen

#include "../test.h"

/* The reader, on the bytes as the file of a job, and once more as a second file. */
static void read_trace(const unsigned char *data, size_t n) {
  int i, k;
  fed = data;
  fed_bytes = n;
  for (k = 0; k < 2; k++) load("memory");
  if (size > 0) report(), trace("/dev/null");
  for (i = 0; i < MAX_RANKS + MAX_EARLIER; i++) free(ranks[i].records);
  memset(ranks, 0, sizeof ranks);
  size = 0, earlier = 0, job = 0, born = last = 0;
}

#ifdef FUZZ
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  if (n > 0) read_trace(data, n);
  return 0;
}
#else
static uint64_t next_random(uint64_t *state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

static const size_t file_bytes = sizeof(cddp_record_header) + CDDP_RECORDS * sizeof(cddp_record);

static void make_good(unsigned char *file) {
  cddp_record_header *h = (cddp_record_header *)(void *)file;
  cddp_record *r = (cddp_record *)(void *)(h + 1);
  int i;
  memset(file, 0, file_bytes);
  memcpy(h->magic, "cddprec1", 8);
  h->record_size = sizeof *r;
  h->capacity = CDDP_RECORDS;
  h->world_size = 3;
  h->rank = 1;
  h->job = 7;
  for (i = 0; i < 40; i++) {
    r[i].number = (uint64_t)i + 1;
    r[i].sequence = (uint64_t)i + 1;
    r[i].enqueued = r[i].started = 1000 + i;
    r[i].ended = i < 39 ? 1001 + i : 0;
    memcpy(r[i].what, "all_reduce", 10);
  }
}

static void test_changed_files(void) {
  unsigned char *file = (unsigned char *)malloc(file_bytes);
  uint64_t state = 1;
  int i, k;
  CHECK(file != NULL);
  for (i = 0; file != NULL && i < 2000; i++) {
    make_good(file);
    for (k = (int)(next_random(&state) % 8); k > 0; k--) {
      uint64_t at = next_random(&state);
      size_t span = at & 1 ? sizeof(cddp_record_header) : file_bytes / 20;
      file[(at >> 8) % span] = (unsigned char)next_random(&state);
    }
    read_trace(file, i % 10 ? file_bytes : next_random(&state) % file_bytes);
    CHECK(size == 0);
  }
  free(file);
}

static void test_good_file(void) {
  unsigned char *file = (unsigned char *)malloc(file_bytes);
  CHECK(file != NULL);
  if (file == NULL) return;
  make_good(file);
  fed = file, fed_bytes = file_bytes;
  CHECK(load("memory") == NULL);
  CHECK_EQ(size, 3);
  CHECK_EQ(ranks[1].count, 40);
  read_trace(file, file_bytes);
  free(file);
}

int main(void) {
  int out = dup(STDOUT_FILENO);
  if (freopen("/dev/null", "w", stdout) == NULL) return 1; /* the reports */
  RUN(test_good_file);
  RUN(test_changed_files);
  fflush(stdout);
  dup2(out, STDOUT_FILENO);
  return TEST_END();
}
#endif
