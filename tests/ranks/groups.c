/* Sub-groups: cddp_group_split, cddp_group_new, groups of groups, and several in use at once.

   Each rank adds its number in the world plus one: the sum tells whether the right ranks are in a
   group. Groups are made in trees, in cycles of making and destroying, by many threads, and while
   one of their members fails: the error must reach the group's ranks and no others. Descriptors,
   mappings and threads are counted before and after: nothing may stay behind. */
#define CDDP_IMPLEMENTATION
#include "../../cddp.h"
#include "../ranks.h"

#include <pthread.h>
#include <sys/resource.h>

/* The sum over the group of (rank in the world + 1), large and small, tells whether the right
   ranks met. */
static void check_members(cddp_group *g, int world_rank, int expected_sum) {
  size_t n = 20000, i;
  int32_t one = world_rank + 1, *many = (int32_t *)cddp_alloc(g, n * 4);
  CHECK_OK(cddp_all_reduce(g, &one, 1, CDDP_I32, CDDP_SUM, NULL));
  CHECK_EQ(one, expected_sum);
  CHECK(many != NULL);
  if (many == NULL) return;
  for (i = 0; i < n; i++) many[i] = world_rank + 1;
  CHECK_OK(cddp_all_reduce(g, many, n, CDDP_I32, CDDP_SUM, NULL));
  for (i = 0; i < n && many[i] == expected_sum; i++) {}
  CHECK(i == n);
  cddp_free(g, many);
}

/* The group's order: member i is rank order[i] of the world. */
static void check_order(cddp_group *g, int world_rank, const int *order, int count) {
  int32_t mine = world_rank, all[64];
  int i;
  CHECK_EQ(cddp_world_size(g), count);
  if (getenv("TEST_HOSTS") == NULL) {
    CHECK_EQ(cddp_local_world_size(g), count);
    CHECK_EQ(cddp_local_rank(g), cddp_rank(g));
  }
  CHECK_OK(cddp_all_gather(g, &mine, all, 1, CDDP_I32, NULL));
  for (i = 0; i < count; i++) CHECK_EQ(all[i], order[i]);
  CHECK(cddp_rank(g) >= 0 && cddp_rank(g) < count && order[cddp_rank(g)] == world_rank);
}

/* SPLIT ---------------------------------------------------------------------------------------- */

static int run_split(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g), world = cddp_world_size(g), i, count = 0,
      sum = 0;
  int order[64];
  cddp_group *s = NULL;
  (void)arg;
  CHECK_OK(cddp_group_split(g, rank % 2, 0, &s)); /* equal keys: by rank */
  for (i = rank % 2; i < world; i += 2) {
    order[count++] = i;
    sum += i + 1;
  }
  check_order(s, rank, order, count);
  check_members(s, rank, sum);
  cddp_destroy(s);

  CHECK_OK(cddp_group_split(g, 7, -rank, &s)); /* keys turn the order round; any color >= 0 */
  for (i = 0; i < world; i++) order[i] = world - 1 - i;
  check_order(s, rank, order, world);
  cddp_destroy(s);

  CHECK_OK(cddp_group_split(g, 1000000 + rank, 0, &s)); /* each alone */
  check_order(s, rank, &rank, 1);
  check_members(s, rank, rank + 1);
  cddp_destroy(s);

  s = (cddp_group *)(void *)&i; /* must be overwritten */
  CHECK_OK(cddp_group_split(g, rank == 0 ? -1 : 0, rank == world - 1 ? -5 : rank, &s));
  CHECK((s == NULL) == (rank == 0));
  if (s != NULL) { /* the last rank's key puts it first */
    order[0] = world - 1;
    for (i = 1; i < world - 1; i++) order[i] = i;
    check_order(s, rank, order, world - 1);
    cddp_destroy(s);
  }
  CHECK_OK(cddp_group_split(g, -1, 0, &s)); /* nobody */
  CHECK(s == NULL);
  CHECK_IS(cddp_group_split(NULL, 0, 0, &s), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_group_split(g, 0, 0, NULL), CDDP_INVALID_ARGUMENT);
  check_members(g, rank, world * (world + 1) / 2);
  return test_failures != before;
}

static void test_split(void) {
  static const int ranks[] = {1, 2, 3, 5, 8, 16};
  int i;
  for (i = 1; i < 6; i++) {
    CHECK_OK(ranks_run(run_split, NULL, ranks[i], false));
    CHECK_OK(ranks_run(run_split, NULL, ranks[i], true));
  }
}

/* RANK LISTS ----------------------------------------------------------------------------------- */

static void list_misuse(cddp_group *g) {
  static const int twice[] = {1, 0, 1}, outside[] = {0, 5}, negative[] = {-1, 0};
  cddp_group *s;
  CHECK_IS(cddp_group_new(g, twice, 3, &s), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_group_new(g, outside, 2, &s), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_group_new(g, negative, 2, &s), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_group_new(g, NULL, 2, &s), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_group_new(g, twice, 0, &s), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_group_new(g, twice, -1, &s), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_group_new(g, twice, 2, NULL), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_group_new(NULL, twice, 2, &s), CDDP_INVALID_ARGUMENT);
}

static int run_list(cddp_group *g, void *arg) { /* 5 ranks */
  static const int order[] = {3, 0, 4}, all[] = {4, 2, 0, 1, 3}, one[] = {2};
  int before = test_failures, rank = cddp_rank(g);
  cddp_group *s, *again, *nested;
  (void)arg;
  CHECK_OK(cddp_group_new(g, order, 3, &s));
  CHECK((s != NULL) == (rank == 3 || rank == 0 || rank == 4));
  if (s != NULL) {
    static const int inner[] = {2, 0}; /* of s: ranks 4 and 3 of the world */
    static const int inner_world[] = {4, 3};
    check_order(s, rank, order, 3);
    check_members(s, rank, 10);
    CHECK_OK(cddp_group_new(s, inner, 2, &nested));
    CHECK((nested != NULL) == (rank != 0));
    if (nested != NULL) {
      check_order(nested, rank, inner_world, 2);
      check_members(nested, rank, 9);
    }
    cddp_destroy(nested);
  }
  CHECK_OK(cddp_group_new(g, all, 5, &again));
  check_order(again, rank, all, 5);
  if (s != NULL) check_members(s, rank, 10); /* two at once, in turn */
  check_members(again, rank, 15);
  cddp_destroy(s);
  check_members(again, rank, 15);
  CHECK_OK(cddp_group_new(g, one, 1, &s));
  CHECK((s != NULL) == (rank == 2));
  if (s != NULL) check_members(s, rank, 3);
  cddp_destroy(again);
  cddp_destroy(s);
  list_misuse(g);
  check_members(g, rank, 15);
  return test_failures != before;
}

static void test_list(void) {
  CHECK_OK(ranks_run(run_list, NULL, 5, false));
  CHECK_OK(ranks_run(run_list, NULL, 5, true));
}

static int run_lists_differ(cddp_group *g, void *arg) {
  static const int a[] = {0, 1}, b[] = {1, 2};
  int before = test_failures;
  cddp_group *s = NULL;
  (void)arg;
  CHECK_IS(cddp_group_new(g, cddp_rank(g) == 2 ? b : a, 2, &s), CDDP_MISMATCH);
  CHECK(s == NULL);
  CHECK(strstr(cddp_error(), "rank 2 called group_new/split at ") != NULL);
  CHECK(strstr(cddp_error(), " with another list of ranks") != NULL);
  return test_failures != before;
}

static int run_split_against_all_reduce(cddp_group *g, void *arg) {
  int before = test_failures;
  cddp_group *s = NULL;
  float x = 1;
  (void)arg;
  if (cddp_rank(g) == 1)
    CHECK_IS(cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL), CDDP_MISMATCH);
  else
    CHECK_IS(cddp_group_split(g, 0, 0, &s), CDDP_MISMATCH);
  CHECK(s == NULL);
  return test_failures != before;
}

static void test_disagreement(void) {
  CHECK_OK(ranks_run(run_lists_differ, NULL, 3, false));
  CHECK_OK(ranks_run(run_lists_differ, NULL, 3, true));
  CHECK_OK(ranks_run(run_split_against_all_reduce, NULL, 3, false));
  CHECK_OK(ranks_run(run_split_against_all_reduce, NULL, 3, true));
}

/* NESTING: halves of halves down to single ranks, all alive at once. --------------------------- */

static int run_nested(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g), depth = 0, lo = 0, hi = cddp_world_size(g), i;
  cddp_group *level[8];
  bool inner_first = *(const bool *)arg;
  level[depth++] = g;
  while (hi - lo > 1) {
    int mid = (lo + hi) / 2;
    CHECK_OK(cddp_group_split(level[depth - 1], rank >= mid, rank, &level[depth]));
    if (rank >= mid)
      lo = mid;
    else
      hi = mid;
    check_members(level[depth], rank, (lo + 1 + hi) * (hi - lo) / 2);
    depth++;
  }
  for (i = 0; i < depth; i++) CHECK_OK(cddp_barrier(level[i])); /* outer ones still work */
  CHECK_OK(cddp_barrier(g));
  if (inner_first || depth < 3) {
    for (i = depth - 1; i > 0; i--) cddp_destroy(level[i]);
  } else { /* siblings of one parent, in an odd order; each after those made from it */
    cddp_group *a, *b;
    for (i = depth - 1; i > 1; i--) cddp_destroy(level[i]);
    CHECK_OK(cddp_group_split(level[0], 0, rank, &a));
    CHECK_OK(cddp_group_split(level[0], 0, -rank, &b));
    cddp_destroy(level[1]);
    CHECK_OK(cddp_barrier(b));
    cddp_destroy(a);
    CHECK_OK(cddp_barrier(b));
    cddp_destroy(b);
  }
  CHECK_OK(cddp_barrier(g));
  return test_failures != before;
}

static void test_nested(void) {
  bool inner_first = true;
  int i;
  for (i = 0; i < 2; i++) {
    inner_first = i == 0;
    CHECK_OK(ranks_run(run_nested, &inner_first, 7, false));
    CHECK_OK(ranks_run(run_nested, &inner_first, 8, true));
    CHECK_OK(ranks_run(run_nested, &inner_first, 16, false));
  }
}

/* AT ONCE: two sub-groups and their parent, each from a thread of its own. --------------------- */

typedef struct user {
  cddp_group *g;
  int world_rank, sum, loops;
  uint64_t seed;
} user;

static void *use_group(void *arg) {
  user *u = (user *)arg;
  size_t n = 0, most = 5000, i, k;
  int32_t *x = (int32_t *)malloc(most * 4);
  int loop;
  for (loop = 0; x != NULL && loop < u->loops; loop++) {
    cddp_work *w[4];
    n = (size_t)(ranks_mix(u->seed, (uint64_t)loop, 0) % (most / 4)) + 1;
    for (i = 0; i < 4 * n; i++) x[i] = u->world_rank + 1;
    if (loop % 3 == 0) {
      for (k = 0; k < 4; k++)
        CHECK_OK(cddp_all_reduce(u->g, x + k * n, n, CDDP_I32, CDDP_SUM, &w[k]));
      for (k = 0; k < 4; k++) CHECK_OK(cddp_wait(w[3 - k]));
    } else {
      CHECK_OK(cddp_all_reduce(u->g, x, 4 * n, CDDP_I32, CDDP_SUM, NULL));
    }
    for (i = 0; i < 4 * n && x[i] == u->sum; i++) {}
    CHECK(i == 4 * n);
    if (i != 4 * n) break;
    if (loop % 8 == 0) CHECK_OK(cddp_barrier(u->g));
  }
  CHECK(x != NULL);
  free(x);
  return NULL;
}

static int run_at_once(cddp_group *g, void *arg) { /* 4 ranks */
  static const int list[] = {3, 2, 1, 0};
  int before = test_failures, rank = cddp_rank(g), i;
  user u[3];
  pthread_t t[3];
  (void)arg;
  memset(u, 0, sizeof u);
  u[0].g = g;
  u[0].sum = 10;
  CHECK_OK(cddp_group_split(g, rank / 2, rank, &u[1].g));
  u[1].sum = rank < 2 ? 3 : 7;
  CHECK_OK(cddp_group_new(g, list, 4, &u[2].g));
  u[2].sum = 10;
  for (i = 0; i < 3; i++) {
    u[i].world_rank = rank;
    u[i].loops = RANKS_SLOW ? 30 : 150;
    u[i].seed = (uint64_t)i;
    CHECK(pthread_create(&t[i], NULL, use_group, &u[i]) == 0);
  }
  for (i = 0; i < 3; i++) pthread_join(t[i], NULL);
  cddp_destroy(u[1].g);
  cddp_destroy(u[2].g);
  return test_failures != before;
}

static void test_at_once(void) {
  CHECK_OK(ranks_run(run_at_once, NULL, 4, false));
  CHECK_OK(ranks_run(run_at_once, NULL, 4, true));
}

/* A sub-group's failure is its own: the parent and the other half go on. ----------------------- */

static int run_broken_child(cddp_group *g, void *arg) { /* 4 ranks */
  int before = test_failures, rank = cddp_rank(g);
  cddp_group *s;
  float x = 1;
  (void)arg;
  CHECK_OK(cddp_group_split(g, rank / 2, 0, &s));
  if (rank < 2) {
    CHECK_IS(cddp_all_reduce(s, &x, rank == 0 ? 1 : 0, CDDP_F32, CDDP_SUM, NULL), CDDP_MISMATCH);
    CHECK_IS(cddp_barrier(s), CDDP_MISMATCH);
  } else {
    check_members(s, rank, 7);
  }
  check_members(g, rank, 10);
  cddp_destroy(s);
  CHECK_OK(cddp_group_split(g, 0, 0, &s));
  check_members(s, rank, 10);
  cddp_destroy(s);
  return test_failures != before;
}

static void test_broken_child(void) {
  CHECK_OK(ranks_run(run_broken_child, NULL, 4, false));
  CHECK_OK(ranks_run(run_broken_child, NULL, 4, true));
}

/* Destroying is local; a member that still waits hears of it. ---------------------------------- */

static int run_left_behind(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g);
  cddp_group *s;
  double t;
  (void)arg;
  CHECK_OK(cddp_group_split(g, 0, 0, &s));
  if (rank == 1) {
    ranks_sleep(0.05);
    t = test_now();
    cddp_destroy(s);
    CHECK(test_now() - t < RANKS_WITHIN(0.5));
  } else {
    t = test_now();
    CHECK_IS(cddp_barrier(s), CDDP_PEER_LOST);
    CHECK(test_now() - t < RANKS_WITHIN(1.0));
    CHECK(strstr(cddp_error(), "rank 1") != NULL);
    cddp_destroy(s);
  }
  check_members(g, rank, 6);
  return test_failures != before;
}

static void test_left_behind(void) {
  CHECK_OK(ranks_run(run_left_behind, NULL, 3, false));
  CHECK_OK(ranks_run(run_left_behind, NULL, 3, true));
}

/* Splits that fail on rank 1 alone, which has no memory for a cddp_group: the parent stays usable,
   and the ranks' shared memory does not grow. */
static bool refuses;

static void *grudging(size_t bytes, void *user_data) {
  (void)user_data;
  return refuses && bytes > 1500 ? NULL : malloc(bytes);
}
static void release(void *p, void *user_data) {
  (void)user_data;
  free(p);
}

static int failing_splits(int rank, void *arg) {
  cddp_group *g = NULL, *s;
  long long begin = 0;
  cddp_group_desc d;
  int i;
  (void)arg;
  memset(&d, 0, sizeof d);
  d.allocator.alloc = grudging;
  d.allocator.free = release;
  CHECK_OK(cddp_init(&g, &d));
  for (i = 0; i < 50 && test_failures == 0; i++) {
    refuses = rank == 1;
    CHECK_IS(cddp_group_split(g, 0, 0, &s), CDDP_OUT_OF_MEMORY);
    refuses = false;
    CHECK_OK(cddp_barrier(g));
    if (i == 4) begin = ranks_shared_bytes();
  }
  CHECK(ranks_shared_bytes() < begin + 30000);
  cddp_destroy(g);
  return 0;
}

static void test_failing_splits(void) {
  int status[2];
  ranks_script(failing_splits, NULL, 2, 60, status);
  CHECK(ranks_exited_well(status, 2));
}

/* LEAKS ---------------------------------------------------------------------------------------- */

static void cycle(cddp_group *g, int i) {
  int rank = cddp_rank(g), world = cddp_world_size(g), list[64], k;
  cddp_group *a, *b, *c;
  for (k = 0; k < world; k++) list[k] = (k + i) % world;
  CHECK_OK(cddp_group_split(g, (rank + i) % 2, 0, &a));
  CHECK_OK(cddp_group_new(g, list, world - 1, &b));
  CHECK_OK(cddp_group_split(g, 0, -rank, &c));
  CHECK_OK(cddp_barrier(c));
  if (b != NULL) CHECK_OK(cddp_barrier(b));
  if (i % 3 == 0) {
    void *p = cddp_alloc(c, 100000);
    CHECK(p != NULL);
    CHECK_OK(cddp_all_reduce(c, &k, 1, CDDP_I32, CDDP_SUM, NULL));
    cddp_free(c, p);
  }
  if (i % 2 == 0) {
    cddp_destroy(a);
    cddp_destroy(b);
    CHECK_OK(cddp_barrier(c));
    cddp_destroy(c);
  } else {
    CHECK_OK(cddp_barrier(c));
    cddp_destroy(c);
    cddp_destroy(b);
    cddp_destroy(a);
  }
}

static int run_cycles(cddp_group *g, void *arg) {
  int before = test_failures, fds = 0, maps = 0, tasks = 0, i, cycles = RANKS_SLOW ? 20 : 100;
  bool threads = *(const bool *)arg;
  for (i = 0; i < cycles && test_failures == before; i++) {
    if (i == 3) { /* whatever is made once has been made */
      CHECK_OK(cddp_barrier(g));
      fds = ranks_open_fds();
      maps = ranks_mappings("");
      tasks = ranks_threads();
    }
    cycle(g, i);
  }
  CHECK_OK(cddp_barrier(g));
  if (!threads) {
    CHECK(ranks_open_fds() <= fds + (getenv("TEST_HOSTS") != NULL ? 3 : 0)); /* calls coming in */
    CHECK(ranks_threads_left(tasks));
    CHECK(ranks_mappings("") < maps + 20);
  }
  return test_failures != before;
}

static void test_cycles(void) {
  int fds = ranks_open_fds(), tasks = ranks_threads();
  bool threads = false;
  CHECK_OK(ranks_run(run_cycles, &threads, 4, false));
  CHECK_EQ(ranks_open_fds(), fds);
  threads = true;
  CHECK_OK(ranks_run(run_cycles, &threads, 4, true));
  CHECK_EQ(ranks_open_fds(), fds);
  CHECK(ranks_threads_left(tasks));
}

/* Messages whose sender has left the group before they were received go when their receiver leaves,
   too. */
static int run_unreceived(cddp_group *g, void *arg) {
  int before = test_failures, maps = 0, i, k, sends = 3;
  float x[3] = {1, 2, 3}, y[3];
  cddp_group *s;
  (void)arg;
  for (i = 0; i < 60 && test_failures == before; i++) {
    if (i == 10) maps = ranks_mappings("");
    CHECK_OK(cddp_group_split(g, 0, 0, &s));
    for (k = 0; k < sends && cddp_rank(g) == 1; k++)
      CHECK_OK(cddp_send(s, x, 3, CDDP_F32, 0, k, NULL));
    if (cddp_rank(g) == 1) cddp_destroy(s);
    CHECK_OK(cddp_barrier(g));
    for (k = 0; k < sends && cddp_rank(g) == 0; k++) {
      memset(y, 0, sizeof y);
      CHECK_OK(cddp_recv(s, y, 3, CDDP_F32, 1, k, NULL));
      CHECK(memcmp(x, y, sizeof x) == 0);
    }
    if (cddp_rank(g) != 1) cddp_destroy(s);
    CHECK_OK(cddp_barrier(g));
  }
  CHECK(ranks_mappings("") < maps + 20);
  return test_failures != before;
}

static void test_unreceived(void) { CHECK_OK(ranks_run(run_unreceived, NULL, 3, false)); }

/* Messages that nobody receives, as above, but a group without their sender begins at once in the
   place that theirs had, and stays. */
static int run_place_taken(cddp_group *g, void *arg) { /* 3 ranks */
  enum { COUNT = 1 << 20, ROUNDS = 6 };
  static const int pair[] = {0, 1}, others[] = {0, 2};
  static float x[COUNT];
  int before = test_failures, rank = cddp_rank(g), i;
  cddp_group *s, *kept[ROUNDS];
  double least = 0;
  (void)arg;
  memset(x, 1, sizeof x);
  for (i = 0; i < ROUNDS && test_failures == before; i++) {
    CHECK_OK(cddp_group_new(g, pair, 2, &s));
    if (rank == 1) CHECK_OK(cddp_send(s, x, COUNT, CDDP_F32, 0, 1, NULL));
    CHECK_OK(cddp_barrier(g));
    if (rank == 1) cddp_destroy(s);
    CHECK_OK(cddp_barrier(g));
    if (rank != 1) cddp_destroy(s);
    CHECK_OK(cddp_group_new(g, others, 2, &kept[i]));
    cddp_free(g, cddp_alloc(g, 1)); /* gives back what may go */
    CHECK_OK(cddp_barrier(g));
    if (i == 0) least = (double)ranks_shared_bytes() / 0x1p20;
    CHECK_OK(cddp_barrier(g));
  }
  CHECK((double)ranks_shared_bytes() / 0x1p20 < least + 12); /* a message has 4 */
  while (i > 0) cddp_destroy(kept[--i]);
  return test_failures != before;
}

static void test_place_taken(void) { CHECK_OK(ranks_run(run_place_taken, NULL, 3, false)); }

/* Under a limit on the size of files a free place serves smaller requests, too, when no other is
   left. */
static int fill_window(int rank, void *arg) {
  const size_t mib = (size_t)1 << 20;
  struct rlimit limit = {96 * mib, 96 * mib};
  size_t most = 64 * mib, third;
  cddp_group *g;
  void *p;
  (void)rank;
  (void)arg;
  CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
  CHECK_OK(cddp_init(&g, NULL));
  if (g == NULL) return 1;
  while ((p = cddp_alloc(g, most)) == NULL && most > 8 * mib) most -= 2 * mib;
  CHECK(p != NULL && (most < 64 * mib || cddp_local_world_size(g) == 1));
  cddp_free(g, p);
  third = most / 3 / mib * mib;
  CHECK((p = cddp_alloc(g, third)) != NULL);
  cddp_free(g, p);
  CHECK((p = cddp_alloc(g, most)) != NULL); /* the place is whole again */
  cddp_free(g, p);
  cddp_destroy(g);
  return 0;
}

static void test_full_window(void) {
  int status[2];
  ranks_script(fill_window, NULL, 2, RANKS_WITHIN(20), status);
  CHECK(ranks_exited_well(status, 2));
}

/* A group for each run of threads, over and over. */
static int run_nothing(cddp_group *g, void *arg) {
  (void)arg;
  CHECK_OK(cddp_barrier(g));
  return 0;
}

static void test_many_runs(void) {
  int i, fds = ranks_open_fds(), tasks = ranks_threads(), runs = RANKS_SLOW ? 20 : 100;
  for (i = 0; i < runs; i++) CHECK_OK(cddp_run_threads(run_nothing, NULL, 1 + i % 5));
  CHECK_EQ(ranks_open_fds(), fds);
  CHECK(ranks_threads_left(tasks));
}

/* Threads of one rank that split and destroy groups at once, each with a parent of its own. The
   sums of groups that shared a control block would be each other's. ---------------------------- */

enum { SPLITTERS = 3 };

typedef struct splitter {
  cddp_group *parent;
  int number, rounds;
} splitter;

static void *split_often(void *arg) {
  const splitter *s = (const splitter *)arg;
  int world = cddp_world_size(s->parent), rank = cddp_rank(s->parent), i;
  int before = __atomic_load_n(&test_failures, __ATOMIC_RELAXED);
  for (i = 0; i < s->rounds; i++) {
    cddp_group *g = NULL;
    int32_t x = s->number * 1000 + i, all[16] = {0};
    int members = i % 2 == 0 ? world : (world - rank % 2 + 1) / 2, m;
    CHECK_OK(cddp_group_split(s->parent, i % 2 == 0 ? 5 : rank % 2, rank, &g));
    if (g == NULL) return NULL;
    CHECK_EQ(cddp_world_size(g), members);
    CHECK_OK(cddp_all_gather(g, &x, all, 1, CDDP_I32, NULL));
    for (m = 0; m < members; m++) CHECK_EQ(all[m], x);
    cddp_destroy(g);
    if (__atomic_load_n(&test_failures, __ATOMIC_RELAXED) != before) return NULL;
  }
  return NULL;
}

static int run_splitters(cddp_group *g, void *arg) {
  int before = test_failures, i;
  splitter s[SPLITTERS];
  pthread_t thread[SPLITTERS];
  for (i = 0; i < SPLITTERS; i++) {
    CHECK_OK(cddp_group_split(g, 0, cddp_rank(g), &s[i].parent));
    s[i].number = i;
    s[i].rounds = *(const int *)arg;
  }
  for (i = 0; i < SPLITTERS; i++)
    CHECK(pthread_create(&thread[i], NULL, split_often, &s[i]) == 0);
  for (i = 0; i < SPLITTERS; i++) pthread_join(thread[i], NULL);
  CHECK_OK(test_failures == before ? cddp_barrier(g) : CDDP_OK);
  for (i = 0; i < SPLITTERS; i++) cddp_destroy(s[i].parent);
  return test_failures != before;
}

static void test_splitters(void) {
  int rounds = RANKS_SLOW ? 30 : 150;
  CHECK_OK(ranks_run(run_splitters, &rounds, 2, false));
  CHECK_OK(ranks_run(run_splitters, &rounds, 3, false));
  CHECK_OK(ranks_run(run_splitters, &rounds, 3, true));
}

/* HUGE PAGES ----------------------------------------------------------------------------------- */

enum { HUGE = 2 << 20, PIECES = 4 };

static long huge_kib(const void *p) { /* of the shared mapping at p */
  FILE *f = fopen("/proc/self/smaps", "r");
  unsigned long begin = 0, end = 0, at = (unsigned long)(uintptr_t)p, a, b;
  char line[256];
  long kib = 0;
  while (f != NULL && fgets(line, sizeof line, f) != NULL) {
    if (sscanf(line, "%lx-%lx ", &a, &b) == 2) begin = a, end = b;
    if (begin <= at && at < end && sscanf(line, "ShmemPmdMapped: %ld", &kib) == 1) break;
  }
  if (f != NULL) fclose(f);
  return kib;
}

static bool system_has_huge_pages(void) { /* for shared memory that is asked for them by hand */
  int fd = memfd_create("huge", MFD_CLOEXEC), i;
  char *area = (char *)mmap(NULL, (PIECES + 1) * (size_t)HUGE, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  char *at = area + (HUGE - (uintptr_t)area % HUGE) % HUGE;
  bool has;
  CHECK(fd >= 0 && ftruncate(fd, PIECES * (off_t)HUGE) == 0 && area != (char *)MAP_FAILED);
  CHECK(mmap(at, PIECES * (size_t)HUGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) ==
        at);
  madvise(at, PIECES * (size_t)HUGE, MADV_HUGEPAGE);
  for (i = 0; i < PIECES; i++) at[i * HUGE] = 1;
  has = madvise(at, PIECES * (size_t)HUGE, 25 /* MADV_COLLAPSE */) == 0 && huge_kib(at) > 0;
  munmap(area, (PIECES + 1) * (size_t)HUGE);
  close(fd);
  return has;
}

static int run_huge_pages(cddp_group *g, void *arg) {
  float *p = (float *)cddp_alloc(g, PIECES * (size_t)HUGE);
  (void)arg;
  CHECK(p != NULL);
  CHECK_OK(cddp_all_reduce(g, p, PIECES * (size_t)HUGE / 4, CDDP_F32, CDDP_SUM, NULL));
  CHECK(p != NULL && (cddp_local_world_size(g) == 1 || huge_kib(p) > 0));
  cddp_free(g, p);
  return 0;
}

static void test_huge_pages(void) {
  if (system_has_huge_pages())
    CHECK_OK(ranks_run(run_huge_pages, NULL, 2, false));
  else
    printf("  this system has none for shared memory\n");
}

/* What a call has said is still there after cddp_destroy, even of a group with a call in flight. */
static int destroy_in_flight(int rank, void *arg) {
  char said[256];
  cddp_group *g;
  cddp_work *w;
  float x = 1;
  (void)arg;
  CHECK_OK(cddp_init(&g, NULL));
  if (rank == 0) CHECK_OK(cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, &w));
  else ranks_sleep(0.1);
  CHECK_IS(cddp_wait(NULL), CDDP_INVALID_ARGUMENT);
  snprintf(said, sizeof said, "%s", cddp_error());
  cddp_destroy(g);
  CHECK(said[0] != 0 && strcmp(said, cddp_error()) == 0);
  _exit(test_failures != 0); /* the handle is lost on purpose */
}

static void test_error_stays(void) {
  int status[2];
  ranks_script(destroy_in_flight, NULL, 2, RANKS_WITHIN(20), status);
  CHECK(status[0] == 0 && status[1] == 0);
}

int main(void) {
  setenv("CDDP_TIMEOUT_S", RANKS_SLOW ? "120" : "30", 0);
  cddp_destroy(NULL);
  RUN(test_split);
  RUN(test_list);
  RUN(test_disagreement);
  RUN(test_nested);
  RUN(test_at_once);
  RUN(test_broken_child);
  RUN(test_left_behind);
  RUN(test_failing_splits);
  RUN(test_cycles);
  RUN(test_unreceived);
  RUN(test_place_taken);
  RUN(test_full_window);
  RUN(test_splitters);
  RUN(test_many_runs);
  RUN(test_huge_pages);
  RUN(test_error_stays);
  return TEST_END();
}
