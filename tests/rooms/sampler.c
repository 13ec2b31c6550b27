/* cddp_sampler: the indices of torch.utils.data.DistributedSampler, and batches of shards.

   golden.h has PyTorch's indices for many sizes, ranks, seeds, epochs, with and without shuffling
   and drop_last (tests/peers/golden.py); permutations of 10 to 100,000 samples are those of
   torch.randperm. Exact shares hand out each sample once. Batches by shard do not depend on the
   number of ranks. CDDP_TEST_HUGE=1 compares a permutation of 214 million samples, which takes
   1.7 GB. */
#include "../../cddp.h"

#include "../peers/golden.h"
#include "../test.h"

/* torch.randperm(n) with that seed: what one rank gets of n samples. */
static void permute(uint64_t *a, size_t n, int seed) {
  cddp_sampler_desc d;
  cddp_sampler s;
  size_t i, index = 0;
  memset(&d, 0, sizeof d);
  d.dataset_size = n;
  d.world_size = 1;
  d.seed = (uint64_t)seed;
  d.shuffle = true;
  CHECK_OK(cddp_sampler_init(&s, &d));
  for (i = 0; i < n && cddp_sampler_next(&s, &index); i++) a[i] = index;
  CHECK(i == n && !cddp_sampler_next(&s, &index));
  cddp_sampler_destroy(&s);
}

static void test_permutations(void) {
  static const int seeds[] = {0, 1, 42, 7};
  static const uint64_t tens[4][10] = {{4, 1, 7, 5, 3, 9, 0, 8, 6, 2},
                                       {5, 6, 1, 2, 0, 8, 9, 3, 7, 4},
                                       {2, 6, 1, 8, 4, 5, 0, 9, 3, 7},
                                       {5, 0, 3, 4, 1, 7, 9, 6, 8, 2}};
  static const uint64_t thousand[] = {382, 974, 946, 31, 512, 42, 918, 564};
  static const uint64_t many[] = {41615, 23657, 92717, 16389};
  uint64_t *a = (uint64_t *)malloc(100000 * sizeof *a);
  int i;
  if (a == NULL) return;
  for (i = 0; i < 4; i++) {
    permute(a, 10, seeds[i]);
    CHECK(memcmp(a, tens[i], sizeof tens[i]) == 0);
  }
  permute(a, 1000, 123);
  CHECK(memcmp(a, thousand, sizeof thousand) == 0);
  permute(a, 100000, 7);
  CHECK(memcmp(a, many, sizeof many) == 0);
  permute(a, 0, 7);
  permute(a, 1, 7);
  CHECK_EQ(a[0], 0);
  free(a);
}

/* From 214748364 samples on PyTorch draws differently. 1.7 GB: only when asked for. */
static void test_huge_permutation(void) {
  static const uint64_t want[] = {91252029, 200188117, 89143689, 193777243};
  uint64_t *a;
  if (getenv("CDDP_TEST_HUGE") == NULL) return;
  a = (uint64_t *)malloc(214748364u * sizeof *a);
  CHECK(a != NULL);
  if (a == NULL) return;
  permute(a, 214748364u, 5);
  CHECK(memcmp(a, want, sizeof want) == 0);
  free(a);
}

static void test_of_pytorch(void) {
  const int *p = golden_indices;
  size_t c, i, index, size;
  int rank;
  for (c = 0; c < sizeof golden_samplers / sizeof *golden_samplers; c++) {
    const golden_sampler *g = &golden_samplers[c];
    for (rank = 0; rank < g->world; rank++) {
      cddp_sampler_desc d;
      cddp_sampler s;
      memset(&d, 0, sizeof d);
      d.dataset_size = (size_t)g->n;
      d.rank = rank;
      d.world_size = g->world;
      d.seed = g->seed;
      d.shuffle = g->shuffle != 0;
      d.drop_last = g->drop_last != 0;
      CHECK_OK(cddp_sampler_init(&s, &d));
      cddp_sampler_set_epoch(&s, (uint64_t)g->epoch);
      size = (size_t)*p++;
      CHECK(cddp_sampler_size(&s) == size);
      for (i = 0; i < size; i++) {
        CHECK(cddp_sampler_next(&s, &index));
        CHECK(index == (size_t)p[i]);
      }
      p += size;
      CHECK(!cddp_sampler_next(&s, &index) && s.result == CDDP_OK && s.order == NULL);
      CHECK(!cddp_sampler_next(&s, &index));
    }
  }
  CHECK(p == golden_indices + sizeof golden_indices / sizeof *golden_indices);
}

/* Every sample once, whatever the number of ranks; a prefix of what PyTorch deals out. */
static void test_exact(void) {
  size_t n, total, index, i;
  int world, rank, shuffle;
  for (n = 0; n < 40; n += 3) {
    for (world = 1; world < 9; world++) {
      for (shuffle = 0; shuffle < 2; shuffle++) {
        unsigned char seen[64] = {0};
        total = 0;
        for (rank = 0; rank < world; rank++) {
          cddp_sampler_desc d;
          cddp_sampler exact, padded;
          memset(&d, 0, sizeof d);
          d.dataset_size = n;
          d.rank = rank;
          d.world_size = world;
          d.shuffle = shuffle != 0;
          CHECK_OK(cddp_sampler_init(&padded, &d));
          d.exact = true;
          CHECK_OK(cddp_sampler_init(&exact, &d));
          total += cddp_sampler_size(&exact);
          for (i = 0; cddp_sampler_next(&exact, &index); i++) {
            size_t other;
            CHECK(cddp_sampler_next(&padded, &other) && other == index);
            CHECK(index < n && seen[index]++ == 0);
          }
          CHECK(i == cddp_sampler_size(&exact));
          cddp_sampler_destroy(&padded);
        }
        CHECK(total == n);
      }
    }
  }
}

/* All batches of a shard, in an order of their own, come to the shard's share of the epoch. */
static void check_batches(cddp_sampler *s, int shard, const size_t *want, size_t n, size_t size) {
  size_t count = (n + size - 1) / size, k, i, got[256];
  for (k = 0; k < count; k++) {
    size_t batch = (k * 1009 + (size_t)shard) % count, from = batch * size; /* each once */
    size_t most = n - from < size ? n - from : size;
    got[most] = 77;
    CHECK_EQ(cddp_sampler_batch(s, shard, batch, size, got), most);
    for (i = 0; i < most; i++) CHECK_EQ(got[i], want[from + i]);
    CHECK(got[most] == 77 && s->result == CDDP_OK);
  }
  CHECK_EQ(cddp_sampler_batch(s, shard, count, size, got), 0);
  CHECK_EQ(cddp_sampler_batch(s, shard, SIZE_MAX, size, got), 0);
  CHECK(s->result == CDDP_OK);
}

static void test_batches_of_pytorch(void) {
  const int *p = golden_indices;
  size_t c, i, size, want[200];
  int shard;
  for (c = 0; c < sizeof golden_samplers / sizeof *golden_samplers; c++) {
    const golden_sampler *g = &golden_samplers[c];
    cddp_sampler_desc d;
    cddp_sampler s;
    memset(&d, 0, sizeof d);
    d.dataset_size = (size_t)g->n;
    d.world_size = g->world;
    d.seed = g->seed;
    d.shuffle = g->shuffle != 0;
    d.drop_last = g->drop_last != 0;
    CHECK_OK(cddp_sampler_init(&s, &d));
    cddp_sampler_set_epoch(&s, (uint64_t)g->epoch);
    for (shard = 0; shard < g->world; shard++) {
      size_t n = (size_t)*p++;
      CHECK(n < 200);
      for (i = 0; i < n; i++) want[i] = (size_t)p[i];
      for (size = 1; size < 200; size += size) check_batches(&s, shard, want, n, size);
      check_batches(&s, shard, want, n, 5);
      p += n;
    }
    cddp_sampler_destroy(&s);
  }
}

/* What cddp_sampler_next gives each rank, whichever rank the sampler was made for, while it gives
   its own rank's indices as ever, and when another epoch is set. */
static void test_batches(void) {
  size_t n, m = 0, index, k, want[64], indices[8];
  int world, rank, epoch, way;
  for (n = 0; n < 40; n += 3) {
    for (world = 1; world < 9; world++) {
      for (way = 0; way < 6; way++) {
        cddp_sampler_desc d;
        cddp_sampler all, own;
        memset(&d, 0, sizeof d);
        d.dataset_size = n;
        d.rank = world - 1;
        d.world_size = world;
        d.shuffle = way % 2 != 0;
        d.drop_last = way / 2 == 1;
        d.exact = way / 2 == 2;
        CHECK_OK(cddp_sampler_init(&all, &d));
        for (epoch = 0; epoch < 2; epoch++) {
          cddp_sampler_set_epoch(&all, (uint64_t)epoch);
          for (rank = 0; rank < world; rank++) {
            d.rank = rank;
            CHECK_OK(cddp_sampler_init(&own, &d));
            cddp_sampler_set_epoch(&own, (uint64_t)epoch);
            for (m = 0; cddp_sampler_next(&own, &want[m]); m++) {}
            check_batches(&all, rank, want, m, 4);
          }
          /* of the last rank, which `all` was made for */
          for (k = 0; cddp_sampler_next(&all, &index); k++) {
            CHECK(index == want[k]);
            CHECK(cddp_sampler_batch(&all, 0, 0, 8, indices) > 0);
          }
          CHECK_EQ(k, m);
        }
        cddp_sampler_destroy(&all);
      }
    }
  }
}

/* One permutation serves all batches, and the epoch's that is set again. */
static void test_batches_share(void) {
  cddp_sampler_desc d;
  cddp_sampler s;
  size_t indices[4];
  const uint64_t *order;
  memset(&d, 0, sizeof d);
  d.dataset_size = 100;
  d.world_size = 4;
  d.shuffle = true;
  CHECK_OK(cddp_sampler_init(&s, &d));
  CHECK_EQ(cddp_sampler_batch(&s, 3, 2, 4, indices), 4);
  order = s.order;
  CHECK(order != NULL);
  cddp_sampler_set_epoch(&s, 0);
  CHECK_EQ(cddp_sampler_batch(&s, 0, 6, 4, indices), 1);
  CHECK_EQ(cddp_sampler_batch(&s, 0, 7, 4, indices), 0);
  CHECK(s.order == order);
  CHECK_EQ(cddp_sampler_batch(&s, 4, 0, 4, indices), 0);
  CHECK(s.result == CDDP_INVALID_ARGUMENT && strstr(cddp_error(), "shard is 4") != NULL);
  CHECK_EQ(cddp_sampler_batch(&s, -1, 0, 4, indices), 0);
  CHECK(s.result == CDDP_INVALID_ARGUMENT && strstr(cddp_error(), "shard is -1") != NULL);
  CHECK_EQ(cddp_sampler_batch(&s, 0, 0, 0, indices), 0);
  CHECK(s.result == CDDP_INVALID_ARGUMENT);
  CHECK_EQ(cddp_sampler_batch(&s, 0, 0, 4, NULL), 0);
  CHECK(s.result == CDDP_INVALID_ARGUMENT);
  CHECK_EQ(cddp_sampler_batch(&s, 0, 0, 4, indices), 4);
  CHECK(s.result == CDDP_OK);
  cddp_sampler_set_epoch(&s, 1);
  CHECK(s.order == NULL);
  CHECK_EQ(cddp_sampler_batch(NULL, 0, 0, 4, indices), 0);
  memset(&s, 0, sizeof s); /* no sampler: cddp_sampler_init has failed */
  CHECK_EQ(cddp_sampler_batch(&s, 0, 0, 4, indices), 0);
  CHECK(s.result == CDDP_INVALID_ARGUMENT);
}

static void test_epochs(void) {
  static const size_t want[2][3] = {{4, 3, 6}, {5, 0, 7}};
  cddp_sampler_desc d;
  cddp_sampler s;
  size_t index = 99;
  int epoch, i;
  memset(&d, 0, sizeof d);
  d.dataset_size = 10;
  d.world_size = 4;
  d.shuffle = true;
  CHECK_OK(cddp_sampler_init(&s, &d));
  for (epoch = 0; epoch < 2; epoch++) {
    cddp_sampler_set_epoch(&s, (uint64_t)epoch);
    for (i = 0; i < 3; i++) {
      CHECK(cddp_sampler_next(&s, &index));
      CHECK_EQ(index, want[epoch][i]);
      CHECK(s.order != NULL);
    }
    if (epoch == 0) cddp_sampler_set_epoch(&s, 0); /* an epoch left early is rewound */
  }
  cddp_sampler_destroy(&s);
  CHECK(s.order == NULL);
  CHECK(!cddp_sampler_next(&s, &index));
  cddp_sampler_destroy(NULL);
}

static void test_bad_arguments(void) {
  cddp_sampler_desc d;
  cddp_sampler s;
  memset(&d, 0, sizeof d);
  CHECK_IS(cddp_sampler_init(NULL, &d), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_sampler_init(&s, NULL), CDDP_INVALID_ARGUMENT);
  CHECK(!cddp_sampler_next(&s, NULL));
  CHECK_OK(cddp_sampler_init(&s, &d)); /* no samples, one rank */
  CHECK(!cddp_sampler_next(&s, NULL));
  d.rank = 2;
  d.world_size = 2;
  CHECK_IS(cddp_sampler_init(&s, &d), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "rank 2") != NULL);
  d.rank = -1;
  CHECK_IS(cddp_sampler_init(&s, &d), CDDP_INVALID_ARGUMENT);
  d.rank = 0;
  d.world_size = -2;
  CHECK_IS(cddp_sampler_init(&s, &d), CDDP_INVALID_ARGUMENT);
  d.world_size = 2;
  d.exact = d.drop_last = true;
  CHECK_IS(cddp_sampler_init(&s, &d), CDDP_INVALID_ARGUMENT);
  d.exact = d.drop_last = false;
  d.dataset_size = SIZE_MAX;
  CHECK_IS(cddp_sampler_init(&s, &d), CDDP_INVALID_ARGUMENT);
  CHECK_EQ(cddp_sampler_size(NULL), 0);
  CHECK(!cddp_sampler_next(NULL, NULL));
  cddp_sampler_set_epoch(NULL, 1);
}

int main(void) {
  RUN(test_permutations);
  RUN(test_huge_permutation);
  RUN(test_of_pytorch);
  RUN(test_exact);
  RUN(test_batches_of_pytorch);
  RUN(test_batches);
  RUN(test_batches_share);
  RUN(test_epochs);
  RUN(test_bad_arguments);
  return TEST_END();
}
