/* Room >>plan: how bytes are cut into slices, and parameters into buckets.

   Slices of every size, granule and number of parts must cover all elements once and differ by
   one granule at most. Buckets are those that PyTorch computes for the same parameters and
   limits: golden.h has 60 of its answers (tests/peers/golden.py). No ranks are needed. */
#include "../../cddp.h"

#include "../inside.h"
#include "../peers/golden.h"
#include "../test.h"

static void test_slices(void) {
  static const size_t sizes[] = {0, 1, 2, 7, 16, 17, 100, 1000, 4097, (size_t)1 << 40};
  static const size_t granules[] = {1, 2, 16, 64};
  size_t a, b, begin, end, least, most, before;
  int parts, i;
  for (a = 0; a < sizeof sizes / sizeof *sizes; a++) {
    for (b = 0; b < sizeof granules / sizeof *granules; b++) {
      for (parts = 1; parts <= 64; parts = parts < 9 ? parts + 1 : parts * 2) {
        before = most = 0;
        least = SIZE_MAX;
        for (i = 0; i < parts; i++) {
          inside_slice(sizes[a], granules[b], parts, i, &begin, &end);
          CHECK(begin == before && end >= begin);
          CHECK(begin % granules[b] == 0 || begin == sizes[a]);
          if (end - begin < least) least = end - begin;
          if (end - begin > most) most = end - begin;
          before = end;
        }
        CHECK(before == sizes[a]);
        CHECK(most - least <= granules[b]);
      }
    }
  }
  inside_slice(SIZE_MAX, 64, 3, 2, &begin, &end);
  CHECK(end == SIZE_MAX);
}

static void test_buckets_of_pytorch(void) {
  const long long *p = golden_buckets;
  int i, c, b;
  for (c = 0; c < GOLDEN_BUCKET_CASES; c++) {
    cddp_param params[32];
    size_t limits[4];
    int order[32], offsets[34], sorted[96], buckets;
    int n = (int)*p++, explicit_order = (int)*p++, limit_count = (int)*p++;
    memset(params, 0, sizeof params);
    for (i = 0; i < limit_count; i++) limits[i] = (size_t)*p++;
    for (i = 0; i < n; i++) params[i].count = (size_t)*p++;
    for (i = 0; i < n; i++) { /* the script's dtypes are F32, F64, F16, BF16 */
      params[i].dtype = (cddp_dtype)*p++;
    }
    for (i = 0; i < n; i++) order[i] = (int)*p++;
    buckets = inside_plan_buckets(offsets, sorted, params, n, explicit_order ? order : NULL, limits,
                                 limit_count);
    CHECK_EQ(buckets, *p);
    p++;
    for (b = 0; b < buckets; b++) { /* PyTorch lists them first to last */
      int k = explicit_order ? b : buckets - 1 - b;
      CHECK_EQ(offsets[k + 1] - offsets[k], *p);
      p++;
      for (i = offsets[k]; i < offsets[k + 1]; i++) CHECK_EQ(sorted[i], *p++);
    }
    CHECK_EQ(offsets[buckets], n);
  }
  CHECK(p == golden_buckets + sizeof golden_buckets / sizeof *golden_buckets);
}

static void test_example(void) {
  static const size_t bytes[] = {800000, 400000, 40, 28000000, 2000, 600, 2400000};
  static const size_t limits[] = {1048576, 26214400};
  static const int want[] = {5, 4, 6, 2, 3, 0, 1}, begin[] = {0, 1, 3, 5, 7};
  cddp_param params[7];
  int offsets[9], sorted[21], i;
  memset(params, 0, sizeof params);
  for (i = 0; i < 7; i++) {
    params[i].dtype = i == 5 ? CDDP_F16 : CDDP_F32;
    params[i].count = bytes[i] / cddp_dtype_size(params[i].dtype);
  }
  CHECK_EQ(inside_plan_buckets(offsets, sorted, params, 7, NULL, limits, 2), 4);
  CHECK(memcmp(sorted, want, sizeof want) == 0);
  CHECK(memcmp(offsets, begin, sizeof begin) == 0);
}

/* Buckets still open at the end follow the first appearance of their dtype. */
static void test_arrival_order(void) {
  static const size_t limits[] = {SIZE_MAX};
  static const int order[] = {3, 0, 2, 1}, want[] = {3, 2, 0, 1};
  cddp_param params[4];
  int offsets[6], sorted[12], i;
  memset(params, 0, sizeof params);
  for (i = 0; i < 4; i++) {
    params[i].dtype = i < 2 ? CDDP_F32 : CDDP_F64;
    params[i].count = 10;
  }
  CHECK_EQ(inside_plan_buckets(offsets, sorted, params, 4, order, limits, 1), 2);
  CHECK(memcmp(sorted, want, sizeof want) == 0);
}

int main(void) {
  RUN(test_slices);
  RUN(test_buckets_of_pytorch);
  RUN(test_example);
  RUN(test_arrival_order);
  return TEST_END();
}
