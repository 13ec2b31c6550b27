/* cddp_send and cddp_recv: order, tags, sizes, and patterns that deadlock simpler code.

   Ranks as processes and as threads send what depends on sender, tag and number, and compare.
   Pairs, rings, all to all, many messages in flight, receives from CDDP_ANY, tags out of order,
   receivers that come late or never. Blocking sends larger than any buffer must end if the other
   rank waits in another call. Lost, leaving and mismatched ranks are errors with names; nothing
   hangs. */
#define CDDP_IMPLEMENTATION
#include "../../cddp.h"
#include "../ranks.h"

#include <pthread.h>

static void fill(void *buf, size_t bytes, uint64_t seed) {
  unsigned char *p = (unsigned char *)buf;
  size_t i;
  for (i = 0; i < bytes; i++) p[i] = (unsigned char)(ranks_mix(seed, i >> 3, 5) >> (8 * (i & 7)));
}

static bool holds(const void *buf, size_t bytes, uint64_t seed) {
  const unsigned char *p = (const unsigned char *)buf;
  size_t i;
  for (i = 0; i < bytes; i++)
    if (p[i] != (unsigned char)(ranks_mix(seed, i >> 3, 5) >> (8 * (i & 7)))) return false;
  return true;
}

static bool mentions(const char *text) { return strcasestr(cddp_error(), text) != NULL; }

/* ONE PAIR: every dtype, sizes from nothing to 8 MB, memory of each kind at each end. ---------- */

static int run_pair(cddp_group *g, void *arg) {
  static const size_t counts[] = {0, 1, 2, 1000, 4099, 100003, 1000000};
  int before = test_failures, rank = cddp_rank(g), dtype, i, k = 0;
  size_t room = 8000000 + 256;
  unsigned char *shared = (unsigned char *)cddp_alloc(g, room),
                *heap = (unsigned char *)malloc(room);
  (void)arg;
  CHECK(shared != NULL && heap != NULL);
  if (shared == NULL || heap == NULL) return 1;
  for (i = 0; i < 7; i++)
    for (dtype = CDDP_F32; dtype <= CDDP_I64; dtype++, k++) {
      size_t size = cddp_dtype_size((cddp_dtype)dtype), bytes = counts[i] * size;
      unsigned char *base = (k >> rank) & 1 ? shared : heap, *buf = base + 64 + size;
      int sender = k & 1;
      if (counts[i] > 5000 && dtype % 3 != 0) continue;
      memset(base, 0xc3, 64 + size);
      memset(buf, 0xa5, bytes);
      memset(buf + bytes, 0xc3, 64);
      if (rank == sender) {
        fill(buf, bytes, (uint64_t)k);
        CHECK_OK(cddp_send(g, buf, counts[i], (cddp_dtype)dtype, 1 - rank, k, NULL));
      } else if (rank == 1 - sender) {
        CHECK_OK(cddp_recv(g, buf, counts[i], (cddp_dtype)dtype, sender, k, NULL));
      }
      CHECK(rank > 1 || holds(buf, bytes, (uint64_t)k));
      CHECK(buf[-1] == 0xc3 && buf[-32] == 0xc3 && buf[bytes] == 0xc3 && buf[bytes + 63] == 0xc3);
    }
  CHECK_OK(cddp_barrier(g));
  cddp_free(g, shared);
  free(heap);
  return test_failures != before;
}

static void test_pair(void) {
  CHECK_OK(ranks_run(run_pair, NULL, 2, false));
  CHECK_OK(ranks_run(run_pair, NULL, 3, false)); /* the third looks on */
  CHECK_OK(ranks_run(run_pair, NULL, 2, true));
}

/* TAGS: a recv takes the oldest send with its tag; the others wait their turn. ----------------- */

static int run_tags(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g), order[24], i;
  size_t n = *(const size_t *)arg;
  int32_t *x = (int32_t *)malloc(n * 24 * 4);
  cddp_work *w[24];
  CHECK(x != NULL);
  if (x == NULL) return 1;
  ranks_shuffle(order, 24, 3);
  for (i = 0; i < 24; i++) {
    int32_t *one = x + (size_t)i * n;
    if (rank == 0) {
      fill(one, n * 4, (uint64_t)i);
      CHECK_OK(cddp_send(g, one, n, CDDP_I32, 1, i, &w[i]));
    }
  }
  for (i = 0; rank == 1 && i < 24; i++) {
    CHECK_OK(cddp_recv(g, x, n, CDDP_I32, 0, order[i], NULL));
    CHECK(holds(x, n * 4, (uint64_t)order[i]));
  }
  for (i = 0; rank == 0 && i < 24; i++) CHECK_OK(cddp_wait(w[order[23 - i]]));
  for (i = 0; i < 24; i++) { /* one tag: in the order of sending */
    if (rank == 0) {
      fill(x, n * 4, (uint64_t)(100 + i));
      CHECK_OK(cddp_send(g, x, n, CDDP_I32, 1, 2147483647, NULL));
    } else {
      CHECK_OK(cddp_recv(g, x, n, CDDP_I32, 0, 2147483647, NULL));
      CHECK(holds(x, n * 4, (uint64_t)(100 + i)));
    }
  }
  free(x);
  return test_failures != before;
}

static void test_tags(void) {
  static const size_t counts[] = {1, 700, 40000};
  size_t i;
  for (i = 0; i < 3; i++) {
    size_t n = counts[i];
    CHECK_OK(ranks_run(run_tags, &n, 2, false));
    CHECK_OK(ranks_run(run_tags, &n, 2, true));
  }
}

/* IN FLIGHT: all pairs at once, every handle waited for in another order. ---------------------- */

#define PER_PEER 6

static size_t message_count(int from, int to, int k) {
  static const size_t counts[PER_PEER] = {1, 300, 0, 5000, 17, 90001};
  return counts[(from + to + k) % PER_PEER];
}

static uint64_t message_seed(int from, int to, int k) {
  return (uint64_t)(from * 10000 + to * 100 + k);
}

static int run_all_pairs(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g), world = cddp_world_size(g), peer, k, i = 0, all;
  cddp_work *w[2 * 8 * PER_PEER];
  unsigned char *in[8 * PER_PEER], *out[8 * PER_PEER];
  int order[2 * 8 * PER_PEER];
  bool recv_first = *(const bool *)arg;
  for (peer = 0; peer < world; peer++)
    for (k = 0; k < PER_PEER; k++) {
      size_t from = message_count(peer, rank, k), to = message_count(rank, peer, k);
      int at = peer * PER_PEER + k;
      in[at] = (unsigned char *)(k & 1 ? malloc(from * 2 + 1) : cddp_alloc(g, from * 2 + 1));
      out[at] = (unsigned char *)(k & 2 ? malloc(to * 2 + 1) : cddp_alloc(g, to * 2 + 1));
      CHECK(in[at] != NULL && out[at] != NULL);
      if (in[at] == NULL || out[at] == NULL) return 1;
      fill(out[at], to * 2, message_seed(rank, peer, k));
    }
  for (all = 0; all < 2; all++)
    for (k = 0; k < PER_PEER; k++)
      for (peer = 0; peer < world; peer++) {
        int at = peer * PER_PEER + k;
        if (peer == rank) continue;
        if ((all == 0) == recv_first)
          CHECK_OK(cddp_recv(g, in[at], message_count(peer, rank, k), CDDP_F16, peer, k, &w[i++]));
        else
          CHECK_OK(cddp_send(g, out[at], message_count(rank, peer, k), CDDP_F16, peer, k, &w[i++]));
      }
  ranks_shuffle(order, i, (uint64_t)rank);
  for (k = 0; k < i; k++) {
    bool done = false;
    if (k % 5 == 0) CHECK_OK(cddp_test(w[order[k]], &done));
    CHECK_OK(cddp_wait(w[order[k]]));
  }
  for (peer = 0; peer < world; peer++)
    for (k = 0; k < PER_PEER; k++) {
      int at = peer * PER_PEER + k;
      CHECK(peer == rank ||
            holds(in[at], message_count(peer, rank, k) * 2, message_seed(peer, rank, k)));
      CHECK(holds(out[at], message_count(rank, peer, k) * 2, message_seed(rank, peer, k)));
    }
  CHECK_OK(cddp_barrier(g));
  for (peer = 0; peer < world; peer++)
    for (k = 0; k < PER_PEER; k++) {
      int at = peer * PER_PEER + k;
      if (k & 1)
        free(in[at]);
      else
        cddp_free(g, in[at]);
      if (k & 2)
        free(out[at]);
      else
        cddp_free(g, out[at]);
    }
  return test_failures != before;
}

static void test_all_pairs(void) {
  bool recv_first;
  int i;
  for (i = 0; i < 2; i++) {
    recv_first = i == 0;
    CHECK_OK(ranks_run(run_all_pairs, &recv_first, 2, false));
    CHECK_OK(ranks_run(run_all_pairs, &recv_first, 7, false));
    CHECK_OK(ranks_run(run_all_pairs, &recv_first, 3, true));
    CHECK_OK(ranks_run(run_all_pairs, &recv_first, 8, true));
  }
}

/* Many small messages on their way with one tag: they come in the order in which they were sent. */
static int run_in_order(cddp_group *g, void *arg) {
  int32_t i, x = -1, n = *(const int *)arg, wrong = 0;
  for (i = 0; i < n && wrong < 4; i++) {
    cddp_result r;
    if (cddp_rank(g) == 0) {
      if ((r = cddp_send(g, &i, 1, CDDP_I32, 1, 0, NULL)) == CDDP_OK && i % 7 == 0) sched_yield();
    } else if ((r = cddp_recv(g, &x, 1, CDDP_I32, 0, 0, NULL)) == CDDP_OK && x != i) {
      wrong++;
    }
    if (r != CDDP_OK) return 1;
  }
  CHECK_EQ(wrong, 0);
  return wrong != 0;
}

static void test_in_order(void) {
  int n = RANKS_SLOW ? 40000 : 100000;
  CHECK_OK(ranks_run(run_in_order, &n, 2, true));
  CHECK_OK(ranks_run(run_in_order, &n, 2, false));
}

/* EXCHANGES: async recv, then a blocking send that no small buffer holds. ---------------------- */

static int run_ring(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g), world = cddp_world_size(g), step;
  int next = (rank + 1) % world, last = (rank + world - 1) % world;
  size_t n = *(const size_t *)arg;
  int64_t *out = (int64_t *)cddp_alloc(g, n * 8), *in = (int64_t *)malloc(n * 8);
  CHECK(in != NULL && out != NULL);
  if (in == NULL || out == NULL) return 1;
  fill(out, n * 8, (uint64_t)rank);
  for (step = 1; step <= world;
       step++) { /* pass on what came: all see everybody's, then their own */
    cddp_work *w;
    CHECK_OK(cddp_recv(g, in, n, CDDP_I64, last, 0, &w));
    CHECK_OK(cddp_send(g, out, n, CDDP_I64, next, 0, NULL));
    CHECK_OK(cddp_wait(w));
    CHECK(holds(in, n * 8, (uint64_t)((rank - step + world) % world)));
    memcpy(out, in, n * 8);
  }
  CHECK_OK(cddp_barrier(g));
  cddp_free(g, out);
  free(in);
  return test_failures != before;
}

static void test_ring(void) {
  static const size_t counts[] = {1, 60000};
  size_t i;
  for (i = 0; i < 2; i++) {
    size_t n = counts[i];
    CHECK_OK(ranks_run(run_ring, &n, 2, false));
    CHECK_OK(ranks_run(run_ring, &n, 5, false));
    CHECK_OK(ranks_run(run_ring, &n, 16, false));
    CHECK_OK(ranks_run(run_ring, &n, 2, true));
    CHECK_OK(ranks_run(run_ring, &n, 5, true));
  }
}

/* A collective that waits must not keep an older recv from completing, nor the other way round. */
static int run_beside_collective(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g), loop, loops = 30;
  size_t n = *(const size_t *)arg;
  float *x = (float *)malloc(n * 4), one;
  cddp_work *w, *w2;
  CHECK(x != NULL);
  if (x == NULL) return 1;
  for (loop = 0; loop < loops; loop++) {
    one = 1;
    if (rank == 0) { /* recv in flight, blocked in the collective: rank 1's send completes first */
      CHECK_OK(cddp_recv(g, x, n, CDDP_F32, 1, 9, &w));
      CHECK_OK(cddp_all_reduce(g, &one, 1, CDDP_F32, CDDP_SUM, NULL));
      CHECK_OK(cddp_wait(w));
      CHECK(holds(x, n * 4, (uint64_t)loop));
    } else {
      fill(x, n * 4, (uint64_t)loop);
      CHECK_OK(cddp_send(g, x, n, CDDP_F32, 0, 9, NULL));
      CHECK_OK(cddp_all_reduce(g, &one, 1, CDDP_F32, CDDP_SUM, NULL));
    }
    CHECK(one == 2);
    one = 1;
    if (rank == 0) { /* a collective in flight on one side, point to point before it on the other */
      CHECK_OK(cddp_all_reduce(g, &one, 1, CDDP_F32, CDDP_SUM, &w2));
      CHECK_OK(cddp_recv(g, x, n, CDDP_F32, 1, 9, NULL));
      CHECK_OK(cddp_wait(w2));
    } else {
      CHECK_OK(cddp_send(g, x, n, CDDP_F32, 0, 9, NULL));
      CHECK_OK(cddp_all_reduce(g, &one, 1, CDDP_F32, CDDP_SUM, NULL));
    }
    CHECK(one == 2);
    one = 1;
    if (rank == 0) { /* an asynchronous send that nobody takes until after the collective */
      fill(x, n * 4, 5);
      CHECK_OK(cddp_send(g, x, n, CDDP_F32, 1, 4, &w));
      CHECK_OK(cddp_all_reduce(g, &one, 1, CDDP_F32, CDDP_SUM, NULL));
      CHECK_OK(cddp_wait(w));
    } else {
      CHECK_OK(cddp_all_reduce(g, &one, 1, CDDP_F32, CDDP_SUM, NULL));
      CHECK_OK(cddp_recv(g, x, n, CDDP_F32, 0, 4, NULL));
      CHECK(holds(x, n * 4, 5));
    }
    CHECK(one == 2);
  }
  free(x);
  return test_failures != before;
}

/* The receiver takes the message and leaves at once: it has not gone without it. */
static int run_take_and_leave(cddp_group *g, void *arg) {
  int32_t x[1000] = {7};
  size_t count = *(const int *)arg % 2 ? 1000 : 1;
  if (cddp_rank(g) == 0) CHECK_OK(cddp_send(g, x, count, CDDP_I32, 1, 0, NULL));
  if (cddp_rank(g) == 1) {
    x[0] = 0;
    CHECK_OK(cddp_recv(g, x, count, CDDP_I32, 0, 0, NULL));
    CHECK_EQ(x[0], 7);
  }
  return 0;
}

static void test_take_and_leave(void) {
  int i;
  for (i = 0; i < (RANKS_SLOW ? 40 : 200); i++)
    CHECK_OK(ranks_run(run_take_and_leave, &i, 2, i % 4 > 1));
}

static void test_beside_collective(void) {
  static const size_t counts[] = {3, 200000};
  size_t i;
  for (i = 0; i < 2; i++) {
    size_t n = counts[i];
    CHECK_OK(ranks_run(run_beside_collective, &n, 2, false));
    CHECK_OK(ranks_run(run_beside_collective, &n, 2, true));
  }
}

/* THREADS: four threads of each rank, each on a tag of its own. -------------------------------- */

typedef struct talker {
  cddp_group *g;
  int tag;
} talker;

static void *talk(void *arg) {
  talker *t = (talker *)arg;
  int rank = cddp_rank(t->g), i;
  int32_t x[2000];
  for (i = 0; i < 60; i++) {
    size_t n = i % 3 == 0 ? 2000 : (size_t)i % 7 + 1;
    uint64_t seed = (uint64_t)(t->tag * 1000 + i);
    if (rank == i % 2) {
      fill(x, n * 4, seed);
      CHECK_OK(cddp_send(t->g, x, n, CDDP_I32, 1 - rank, t->tag, NULL));
    } else {
      CHECK_OK(cddp_recv(t->g, x, n, CDDP_I32, 1 - rank, t->tag, NULL));
      CHECK(holds(x, n * 4, seed));
    }
  }
  return NULL;
}

static int run_talkers(cddp_group *g, void *arg) {
  int before = test_failures, i, loop;
  pthread_t thread[4];
  talker t[4];
  (void)arg;
  for (i = 0; i < 4; i++) {
    t[i].g = g;
    t[i].tag = i;
    CHECK(pthread_create(&thread[i], NULL, talk, &t[i]) == 0);
  }
  for (loop = 0; loop < 50; loop++) CHECK_OK(cddp_barrier(g)); /* and collectives beside them */
  for (i = 0; i < 4; i++) pthread_join(thread[i], NULL);
  return test_failures != before;
}

static void test_talkers(void) {
  CHECK_OK(ranks_run(run_talkers, NULL, 2, false));
  CHECK_OK(ranks_run(run_talkers, NULL, 2, true));
}

/* SELF ----------------------------------------------------------------------------------------- */

static int run_self(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g);
  size_t n = 100000;
  int32_t *a = (int32_t *)malloc(n * 4), *b = (int32_t *)malloc(n * 4), small = 41, got = 0;
  cddp_work *w;
  (void)arg;
  CHECK(a != NULL && b != NULL);
  if (a == NULL || b == NULL) return 1;
  fill(a, n * 4, 6);
  CHECK_OK(cddp_recv(g, b, n, CDDP_I32, rank, 1, &w));
  CHECK_OK(cddp_send(g, a, n, CDDP_I32, rank, 1, NULL));
  CHECK_OK(cddp_wait(w));
  CHECK(holds(b, n * 4, 6));
  fill(a, n * 4, 7);
  CHECK_OK(cddp_send(g, a, n, CDDP_I32, rank, 1, &w));
  CHECK_OK(cddp_recv(g, b, n, CDDP_I32, rank, 1, NULL));
  CHECK_OK(cddp_wait(w));
  CHECK(holds(b, n * 4, 7));
  CHECK_OK(cddp_send(g, &small, 1, CDDP_I32, rank, 0, &w));
  CHECK_OK(cddp_recv(g, &got, 1, CDDP_I32, rank, 0, NULL));
  CHECK_OK(cddp_wait(w));
  CHECK(got == 41);
  free(a);
  free(b);
  return test_failures != before;
}

/* Messages that wait for one rank do not hold up those to another. */
static int run_two_boxes(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g), k, x = 7;
  (void)arg;
  for (k = 0; rank == 0 && k < 256; k++)
    CHECK_OK(cddp_send(g, &x, 1, CDDP_I32, 1 + k / 128, 0, NULL)); /* as many as do not block */
  CHECK_OK(cddp_barrier(g));
  for (k = 0; rank > 0 && k < 128; k++) CHECK_OK(cddp_recv(g, &x, 1, CDDP_I32, 0, 0, NULL));
  return test_failures != before;
}

static void test_two_boxes(void) {
  CHECK_OK(ranks_run(run_two_boxes, NULL, 3, false));
  CHECK_OK(ranks_run(run_two_boxes, NULL, 3, true));
}

static void test_self(void) {
  CHECK_OK(ranks_run(run_self, NULL, 1, true));
  CHECK_OK(ranks_run(run_self, NULL, 2, true));
  CHECK_OK(ranks_run(run_self, NULL, 2, false));
}

/* MISUSE --------------------------------------------------------------------------------------- */

#define CHECK_INVALID(call)                                                                        \
  do {                                                                                             \
    CHECK_IS(call, CDDP_INVALID_ARGUMENT);                                                         \
    CHECK(cddp_error()[0] != 0);                                                                   \
  } while (0)

static int run_misuse(cddp_group *g, void *arg) {
  int before = test_failures, world = cddp_world_size(g), peer = (cddp_rank(g) + 1) % world;
  float x[4] = {0};
  (void)arg;
  CHECK_INVALID(cddp_send(NULL, x, 1, CDDP_F32, peer, 0, NULL));
  CHECK_INVALID(cddp_recv(NULL, x, 1, CDDP_F32, peer, 0, NULL));
  CHECK_INVALID(cddp_send(g, NULL, 1, CDDP_F32, peer, 0, NULL));
  CHECK_INVALID(cddp_recv(g, NULL, 1, CDDP_F32, peer, 0, NULL));
  CHECK_INVALID(cddp_send(g, x, 1, (cddp_dtype)8, peer, 0, NULL));
  CHECK_INVALID(cddp_recv(g, x, 1, (cddp_dtype)-1, peer, 0, NULL));
  CHECK_INVALID(cddp_send(g, x, 1, CDDP_F32, world, 0, NULL));
  CHECK_INVALID(cddp_recv(g, x, 1, CDDP_F32, world, 0, NULL));
  CHECK_INVALID(cddp_send(g, x, 1, CDDP_F32, -1, 0, NULL));
  CHECK_INVALID(cddp_recv(g, x, 1, CDDP_F32, -1, 0, NULL));
  CHECK_INVALID(cddp_send(g, x, 1, CDDP_F32, CDDP_ANY, 0, NULL));
  CHECK_INVALID(cddp_recv(g, x, 1, CDDP_F32, CDDP_ANY, -1, NULL));
  CHECK_INVALID(cddp_send(g, x, 1, CDDP_F32, peer, -1, NULL));
  CHECK_INVALID(cddp_recv(g, x, 1, CDDP_F32, peer, -2, NULL));
  CHECK_INVALID(cddp_send(g, x, SIZE_MAX, CDDP_F32, peer, 0, NULL));
  CHECK_INVALID(cddp_recv(g, x, SIZE_MAX / 2, CDDP_F32, peer, 0, NULL));
  CHECK_OK(cddp_barrier(g));
  return test_failures != before;
}

static void test_misuse(void) {
  CHECK_OK(ranks_run(run_misuse, NULL, 2, false));
  CHECK_OK(ranks_run(run_misuse, NULL, 3, true));
}

/* MISMATCH: both sides hear of it, at once or in the next call when the send has returned. ----- */

typedef struct pairing {
  size_t sent, wanted;
  cddp_dtype sent_type, wanted_type;
  bool both, async; /* both: shared memory, which a large send does not copy, so it waits */
} pairing;

static int run_mismatch(cddp_group *g, void *arg) {
  const pairing *p = (const pairing *)arg;
  int before = test_failures, rank = cddp_rank(g);
  size_t bytes = (p->sent > p->wanted ? p->sent : p->wanted) * 8 + 8;
  char text[24];
  unsigned char *x = (unsigned char *)(p->both ? cddp_alloc(g, bytes) : malloc(bytes));
  cddp_work *w = NULL;
  cddp_result r;
  CHECK(x != NULL);
  if (x == NULL) return 1;
  memset(x, 0, bytes);
  if (rank == 0)
    r = cddp_send(g, x, p->sent, p->sent_type, 1, 3, p->async ? &w : NULL);
  else
    r = cddp_recv(g, x, p->wanted, p->wanted_type, 0, 3, p->async ? &w : NULL);
  if (w != NULL) r = cddp_wait(w);
  if (rank == 1 || (p->both && getenv("TEST_HOSTS") == NULL)) CHECK_IS(r, CDDP_MISMATCH);
  CHECK_IS(cddp_barrier(g), CDDP_MISMATCH);
  snprintf(text, sizeof text, "%zu", p->sent);
  CHECK(mentions(text));
  snprintf(text, sizeof text, "%zu", p->wanted);
  CHECK(mentions(text));
  if (p->both)
    cddp_free(g, x);
  else
    free(x);
  return test_failures != before;
}

static void test_mismatch(void) {
  static const pairing pairings[] = {
      {1000000, 999999, CDDP_F32, CDDP_F32, true, false},
      {999999, 1000000, CDDP_F32, CDDP_F32, true, true},
      {1000000, 1, CDDP_F32, CDDP_F32, true, false},
      {1000000, 0, CDDP_F32, CDDP_F32, true, false},
      {1000000, 1000000, CDDP_F32, CDDP_I32, true, true},
      {10, 11, CDDP_F32, CDDP_F32, false, false},
      {11, 10, CDDP_F32, CDDP_F32, false, true},
      {1, 1000000, CDDP_F32, CDDP_F32, false, false},
      {0, 5, CDDP_F64, CDDP_F64, false, false},
      {8, 8, CDDP_F32, CDDP_I32, false, false},
  };
  size_t i;
  for (i = 0; i < sizeof pairings / sizeof *pairings; i++) {
    pairing p = pairings[i];
    CHECK_OK(ranks_run(run_mismatch, &p, 2, false));
    CHECK_OK(ranks_run(run_mismatch, &p, 2, true));
  }
}

/* LOST AND LATE -------------------------------------------------------------------------------- */

typedef struct loss {
  double *died_at;
  int how; /* 0: recv waits, 1: large send waits, 2: async recv, 3: recv from any rank */
  char file[256];
} loss;

static int lossy_rank(int rank, void *arg) {
  const loss *l = (const loss *)arg;
  int before = test_failures;
  size_t n = 1000000;
  float *x;
  cddp_group_desc desc;
  cddp_group *g;
  cddp_work *w = NULL;
  cddp_result r;
  memset(&desc, 0, sizeof desc);
  desc.init_method = l->file;
  desc.rank = rank;
  desc.world_size = 3;
  CHECK_OK(cddp_init(&g, &desc));
  if (g == NULL) return 1;
  x = (float *)cddp_alloc(g, n * 4); /* a large send of shared memory waits for its receiver */
  CHECK(x != NULL);
  CHECK_OK(cddp_barrier(g));
  if (rank == 1) {
    ranks_sleep(0.1);
    *l->died_at = test_now();
    kill(getpid(), SIGKILL);
  }
  if (l->how == 1)
    r = cddp_send(g, x, n, CDDP_F32, 1, 0, NULL);
  else
    r = cddp_recv(g, x, n, CDDP_F32, l->how == 3 ? CDDP_ANY : 1, 0, l->how == 2 ? &w : NULL);
  if (w != NULL) {
    CHECK_OK(r);
    r = cddp_wait(w);
  }
  CHECK_IS(r, CDDP_PEER_LOST);
  CHECK(mentions("rank 1"));
  CHECK(*l->died_at > 0 && test_now() - *l->died_at < RANKS_WITHIN(1.0));
  ranks_sleep(0.05);
  CHECK_IS(cddp_send(g, x, 1, CDDP_F32, 1, 0, NULL), CDDP_PEER_LOST);
  cddp_free(g, x);
  cddp_destroy(g);
  return test_failures != before;
}

static void test_dead_peer(void) {
  char dir[] = P_tmpdir "/cddp_p2p_XXXXXX";
  loss l;
  int status[3];
  memset(&l, 0, sizeof l);
  l.died_at = (double *)ranks_shared(4096);
  CHECK(mkdtemp(dir) != NULL);
  for (l.how = 0; l.how < 4; l.how++) {
    if (l.how == 1 && getenv("TEST_HOSTS") != NULL) continue; /* sends to other hosts do not wait */
    *l.died_at = 0;
    snprintf(l.file, sizeof l.file, "file://%s/%d", dir, l.how);
    ranks_script(lossy_rank, &l, 3, 30, status);
    CHECK(status[0] == 0 && status[2] == 0);
    CHECK(WIFSIGNALED(status[1]));
    unlink(l.file + 7);
  }
  CHECK(rmdir(dir) == 0);
  munmap(l.died_at, 4096);
}

/* Rank 0 has so many messages on their way to rank 1 that one more waits, and fails when rank 1
   goes. One to rank 2 does not wait. */
typedef struct gone {
  double at; /* the time */
  int told;  /* rank 0's send has failed */
  bool killed;
} gone;

static int fill_up_rank(int rank, void *arg) {
  gone *l = (gone *)arg;
  double until = test_now() + RANKS_WITHIN(10);
  cddp_group_desc desc;
  cddp_group *g;
  cddp_work *w;
  float x = 1;
  int i;
  memset(&desc, 0, sizeof desc);
  desc.timeout_s = RANKS_WITHIN(5);
  CHECK_OK(cddp_init(&g, &desc));
  if (g == NULL) return 1;
  for (i = 0; rank == 0 && i < 129; i++) {
    CHECK_OK(cddp_send(g, &x, 1, CDDP_F32, 1, 5, &w));
    CHECK_OK(cddp_wait(w));
  }
  if (rank == 0) CHECK_OK(cddp_send(g, &x, 1, CDDP_F32, 2, 5, NULL));
  CHECK_OK(cddp_barrier(g));
  if (rank == 1) {
    ranks_sleep(0.05);
    l->at = test_now();
    if (l->killed) raise(SIGKILL);
  } else if (rank == 0) {
    CHECK_IS(cddp_send(g, &x, 1, CDDP_F32, 1, 5, NULL), CDDP_PEER_LOST);
    CHECK(mentions("rank 1") && mentions(l->killed ? "signal 9" : "left the group"));
    CHECK(test_now() - l->at < RANKS_WITHIN(1));
    __atomic_store_n(&l->told, 1, __ATOMIC_SEQ_CST);
  }
  while (rank == 2 && __atomic_load_n(&l->told, __ATOMIC_SEQ_CST) == 0 && test_now() < until)
    ranks_sleep(0.001);
  cddp_destroy(g);
  return 0;
}

static void test_messages_for_the_gone(void) {
  gone *l = (gone *)ranks_shared(sizeof *l);
  int status[3], i;
  if (getenv("TEST_HOSTS") != NULL) return; /* sends to other hosts do not wait */
  for (i = 0; i < 2; i++) {
    memset(l, 0, sizeof *l);
    l->killed = i == 1;
    ranks_script(fill_up_rank, l, 3, RANKS_WITHIN(20), status);
    CHECK(status[0] == 0 && status[2] == 0);
    CHECK(l->killed ? WIFSIGNALED(status[1]) : status[1] == 0);
  }
  munmap(l, sizeof *l);
}

static int late_rank(int rank, void *arg) {
  int before = test_failures;
  cddp_group_desc desc;
  cddp_group *g;
  double x[3], t;
  (void)arg;
  memset(&desc, 0, sizeof desc);
  desc.timeout_s = 1;
  CHECK_OK(cddp_init(&g, &desc));
  if (g == NULL) return 1;
  CHECK_OK(cddp_barrier(g));
  if (rank == 0) {
    t = test_now();
    CHECK_IS(cddp_recv(g, x, 3, CDDP_F64, 1, 0, NULL), CDDP_TIMEOUT);
    t = test_now() - t;
    CHECK(t > 0.95 && t < 1 + RANKS_WITHIN(0.3));
    CHECK(mentions("rank 1"));
  } else {
    ranks_sleep(2);
  }
  cddp_destroy(g);
  return test_failures != before;
}

static void test_late_peer(void) {
  int status[2];
  if (RANKS_SLOW) return; /* 1 s may be too short for a sanitizer's start */
  ranks_script(late_rank, NULL, 2, 20, status);
  CHECK(ranks_exited_well(status, 2));
}

static int run_thread_leaves(cddp_group *g, void *arg) {
  int before = test_failures;
  double x;
  (void)arg;
  if (cddp_rank(g) == 1) return 1;
  CHECK_IS(cddp_recv(g, &x, 1, CDDP_F64, 1, 0, NULL), CDDP_PEER_LOST);
  CHECK(mentions("rank 1"));
  return test_failures != before;
}

static void test_thread_leaves(void) {
  CHECK_IS(ranks_run(run_thread_leaves, NULL, 2, true), CDDP_PEER_LOST);
}

/* What a rank has sent before it leaves is still received. ------------------------------------- */

static int run_send_and_leave(cddp_group *g, void *arg) {
  static const size_t counts[] = {1, 3, 1000, 100000, 1 << 20, (1 << 20) + 1}; /* to 4 MiB */
  enum { COUNTS = sizeof counts / sizeof *counts };
  int before = test_failures, rank = cddp_rank(g), k;
  int32_t *x = (int32_t *)calloc((1 << 20) + 1, sizeof *x);
  size_t i;
  (void)arg;
  CHECK(x != NULL);
  for (k = 0; k < COUNTS && rank == 0; k++) {
    for (i = 0; i < counts[k]; i++) x[i] = (int32_t)i + k;
    CHECK_OK(cddp_send(g, x, counts[k], CDDP_I32, 1, k, NULL));
  }
  if (rank == 1) ranks_sleep(0.2); /* the sender has left the group, as a process it has ended */
  for (k = 0; k < COUNTS && rank == 1; k++) {
    CHECK_OK(cddp_recv(g, x, counts[k], CDDP_I32, 0, k, NULL));
    for (i = 0; i < counts[k] && x[i] == (int32_t)i + k;) i++;
    CHECK_EQ(i, counts[k]);
  }
  free(x);
  return test_failures != before;
}

static void test_send_and_leave(void) {
  CHECK_OK(ranks_run(run_send_and_leave, NULL, 2, false));
  CHECK_OK(ranks_run(run_send_and_leave, NULL, 2, true));
}

/* SENDS FIRST: each rank posts all its sends with handles, then receives. They return at once,
   however many there are, and in whatever order they are wanted. ------------------------------- */

enum { MANY = 1000, LARGE = 5, LARGE_BYTES = 56 << 20 };

static void exchange_many(cddp_group *g, cddp_work **w) {
  int rank = cddp_rank(g), other = 1 - rank, i;
  for (i = 0; i < MANY; i++) {
    int32_t x[4] = {i, rank, 0, 0};
    CHECK_OK(cddp_send(g, x, 4, CDDP_I32, other, i / 2, &w[i])); /* is copied: x may go */
  }
  for (i = MANY - 2; i >= 0; i -= 2) { /* the last tag first, two messages of each in order */
    int32_t x[4] = {-1, -1, -1, -1}, y[4] = {-1, -1, -1, -1};
    CHECK_OK(cddp_recv(g, x, 4, CDDP_I32, other, i / 2, NULL));
    CHECK_OK(cddp_recv(g, y, 4, CDDP_I32, other, i / 2, NULL));
    CHECK(x[0] == i && y[0] == i + 1 && x[1] == other && y[1] == other);
    if (x[0] != i) break;
  }
  for (i = 0; i < MANY; i++) CHECK_OK(cddp_wait(w[i]));
}

static void exchange_large(cddp_group *g, cddp_work **w) {
  int other = 1 - cddp_rank(g), i;
  char *x = (char *)calloc(1, LARGE_BYTES + LARGE), *y = (char *)malloc(LARGE_BYTES);
  CHECK(x != NULL && y != NULL);
  if (x == NULL || y == NULL) return;
  for (i = 0; i < LARGE; i++) x[i] = x[i + LARGE_BYTES - 1] = (char)(i + 1);
  for (i = 0; i < LARGE; i++) CHECK_OK(cddp_send(g, x + i, LARGE_BYTES, CDDP_I8, other, 0, &w[i]));
  for (i = 0; i < LARGE; i++) {
    CHECK_OK(cddp_recv(g, y, LARGE_BYTES, CDDP_I8, other, 0, NULL));
    CHECK(y[0] == i + 1 && y[LARGE_BYTES - 1] == i + 1);
  }
  for (i = 0; i < LARGE; i++) CHECK_OK(cddp_wait(w[i]));
  free(x);
  free(y);
}

static int run_sends_first(cddp_group *g, void *arg) {
  int before = test_failures;
  cddp_work *w[MANY];
  double t = test_now();
  (void)arg;
  exchange_many(g, w);
  exchange_many(g, w); /* in what is there by now */
  CHECK(test_now() - t < RANKS_WITHIN(20));
  if (!RANKS_SLOW && test_failures == before) exchange_large(g, w);
  CHECK_OK(cddp_barrier(g));
  return test_failures != before;
}

/* POLLED: cddp_test names the sender, and ends when the sender has left. Finished sends whose
   handles nobody has waited for yet do not hold up others. ------------------------------------- */

static bool poll_work(cddp_work *w) {
  double until = test_now() + RANKS_WITHIN(5);
  bool done = false;
  while (!done && test_now() < until) {
    CHECK_OK(cddp_test(w, &done));
    ranks_sleep(0.0005);
  }
  return done;
}

static int run_polled(cddp_group *g, void *arg) {
  enum { SENDS = 130, FLOATS = 20000 }; /* more than are copied */
  int before = test_failures, rank = cddp_rank(g), k;
  float *x = (float *)cddp_alloc(g, FLOATS * sizeof(float)), y = 0;
  cddp_work *w[SENDS], *late;
  (void)arg;
  CHECK(x != NULL);
  if (x == NULL) return 1;
  if (rank == 0) {
    CHECK_OK(cddp_recv(g, &y, 1, CDDP_F32, 1, 1, &w[0]));
    CHECK(poll_work(w[0]));
    CHECK_EQ(cddp_source(), 1);
    CHECK_OK(cddp_wait(w[0]));
    for (k = 0; k < SENDS; k++) CHECK_OK(cddp_send(g, x, FLOATS, CDDP_F32, 1, 2, &w[k]));
    for (k = 0; k < SENDS; k++) CHECK(poll_work(w[k]));
    CHECK_OK(cddp_send(g, &y, 1, CDDP_F32, 1, 3, NULL));
    for (k = 0; k < SENDS; k++) CHECK_OK(cddp_wait(w[k]));
    CHECK_OK(cddp_recv(g, &y, 1, CDDP_F32, 1, 4, &late)); /* never sent */
    CHECK(poll_work(late));
    CHECK_IS(cddp_wait(late), CDDP_PEER_LOST);
  } else {
    CHECK_OK(cddp_send(g, &y, 1, CDDP_F32, 0, 1, NULL));
    for (k = 0; k < SENDS; k++) CHECK_OK(cddp_recv(g, x, FLOATS, CDDP_F32, 0, 2, NULL));
    CHECK_OK(cddp_recv(g, &y, 1, CDDP_F32, 0, 3, NULL));
  }
  cddp_free(g, x);
  return test_failures != before;
}

static void test_polled(void) {
  CHECK_OK(ranks_run(run_polled, NULL, 2, false));
  CHECK_OK(ranks_run(run_polled, NULL, 2, true));
}

static void on_two_hosts(ranks_fn fn) {
  const char *given = getenv("TEST_HOSTS");
  if (given != NULL) return;
  setenv("TEST_HOSTS", "ab", 1);
  CHECK_OK(ranks_run(fn, NULL, 2, false));
  unsetenv("TEST_HOSTS");
}

/* Rank 1 of three hosts leaves without the messages that rank 0 has sent to it, more than may wait
   in copies. They delay neither a message to rank 2 nor the end of rank 0's group. */
static int unwanted_rank(int rank, void *arg) {
  volatile int *stage = (volatile int *)arg; /* 1: rank 0 has sent, 2: rank 1 has left */
  int before = test_failures, i;
  double until = test_now() + RANKS_WITHIN(10), t;
  cddp_group_desc desc;
  char *x = rank == 0 ? (char *)calloc(1, LARGE_BYTES) : NULL, y = (char)rank;
  cddp_work *w;
  cddp_group *g;
  memset(&desc, 0, sizeof desc);
  desc.timeout_s = RANKS_WITHIN(10);
  CHECK_OK(cddp_init(&g, &desc));
  if (g == NULL) return 1;
  CHECK_OK(cddp_barrier(g));
  for (i = 0; x != NULL && i < LARGE; i++) { /* rank 1 is not in cddp: it stores none of them */
    CHECK_OK(cddp_send(g, x, LARGE_BYTES, CDDP_I8, 1, i, &w));
    CHECK_OK(cddp_wait(w));
  }
  free(x);
  if (rank == 0) *stage = 1;
  while (*stage < (rank == 1 ? 1 : 2) && test_now() < until) ranks_sleep(0.001);
  t = test_now();
  if (rank == 0) {
    CHECK_OK(cddp_send(g, &y, 1, CDDP_I8, 2, 0, NULL));
    CHECK(test_now() - t < RANKS_WITHIN(0.5));
  }
  if (rank == 2) {
    CHECK_OK(cddp_recv(g, &y, 1, CDDP_I8, 0, 0, NULL));
    CHECK(y == 0);
  }
  t = test_now();
  cddp_destroy(g);
  if (rank == 0) CHECK(test_now() - t < RANKS_WITHIN(0.5)); /* 1 s is the limit for waiting bytes */
  if (rank == 1) *stage = 2;
  return test_failures != before;
}

static void test_unwanted(void) {
  int *stage, status[3];
  if (getenv("TEST_HOSTS") != NULL || RANKS_SLOW) return;
  stage = (int *)ranks_shared(sizeof *stage);
  setenv("TEST_HOSTS", "abc", 1);
  ranks_script(unwanted_rank, stage, 3, 40, status);
  unsetenv("TEST_HOSTS");
  CHECK(ranks_exited_well(status, 3));
  munmap(stage, sizeof *stage);
}

static void test_sends_first(void) {
  CHECK_OK(ranks_run(run_sends_first, NULL, 2, false));
  CHECK_OK(ranks_run(run_sends_first, NULL, 2, true));
  on_two_hosts(run_sends_first);
}

/* WAITING FOR A WHILE, AND GIVING UP. 2 ranks; rank 1 does what rank 0 has just asked for. ----- */

static void go_on(cddp_group *g) { /* rank 0 lets rank 1 go on */
  int32_t word = 1;
  if (cddp_rank(g) == 0)
    CHECK_OK(cddp_send(g, &word, 1, CDDP_I32, 1, 77, NULL));
  else
    CHECK_OK(cddp_recv(g, &word, 1, CDDP_I32, 0, 77, NULL));
}

static void wait_for_recv(cddp_group *g) {
  int32_t x = -1;
  cddp_work *w;
  double t;
  if (cddp_rank(g) == 0) {
    CHECK_OK(cddp_recv(g, &x, 1, CDDP_I32, 1, 3, &w));
    t = test_now();
    CHECK_IS(cddp_wait_for(w, 0.1), CDDP_TIMEOUT);
    t = test_now() - t;
    CHECK(t > 0.09 && t < RANKS_WITHIN(2));
    CHECK(mentions("rank 1") && mentions("tag 3"));
    CHECK_IS(cddp_wait_for(w, 0), CDDP_TIMEOUT);
    CHECK_IS(cddp_wait_for(w, NAN), CDDP_INVALID_ARGUMENT); /* w stays valid */
    CHECK(strstr(cddp_error(), "timeout_s is nan; it must be at least 0") != NULL ||
          strstr(cddp_error(), "timeout_s is -nan; it must be at least 0") != NULL);
    CHECK(x == -1);
  }
  go_on(g);
  x = cddp_rank(g) == 1 ? 42 : x;
  if (cddp_rank(g) == 1) CHECK_OK(cddp_send(g, &x, 1, CDDP_I32, 0, 3, NULL));
  if (cddp_rank(g) == 0) CHECK_OK(cddp_wait_for(w, 20)); /* has freed w */
  CHECK_EQ(x, 42);
}

static void wait_for_collective(cddp_group *g) {
  int32_t x = cddp_rank(g) + 1;
  cddp_work *w = NULL;
  bool done = true;
  if (cddp_rank(g) == 0) {
    CHECK_OK(cddp_all_reduce(g, &x, 1, CDDP_I32, CDDP_SUM, &w));
    CHECK_IS(cddp_wait_for(w, 0.05), CDDP_TIMEOUT);
    CHECK(mentions("all_reduce"));
    CHECK_OK(cddp_test(w, &done));
    CHECK(!done);
    CHECK_IS(cddp_cancel(w), CDDP_UNSUPPORTED);
    CHECK(mentions("collective"));
  }
  go_on(g);
  if (cddp_rank(g) == 1) CHECK_OK(cddp_all_reduce(g, &x, 1, CDDP_I32, CDDP_SUM, &w));
  CHECK_OK(cddp_wait_for(w, 20));
  CHECK_EQ(x, 3);
}

static void cancel_recvs(cddp_group *g) {
  int32_t x[4] = {-1, -1, -1, -1}, y = -1, i;
  cddp_work *w[4];
  if (cddp_rank(g) == 0) {
    for (i = 0; i < 4; i++) CHECK_OK(cddp_recv(g, &x[i], 1, CDDP_I32, 1, i, &w[i]));
    CHECK_OK(cddp_cancel(w[1]));
    CHECK_OK(cddp_cancel(w[3])); /* the last: another goes behind it */
    CHECK_OK(cddp_recv(g, &x[3], 1, CDDP_I32, 1, 4, &w[3]));
  }
  go_on(g);
  if (cddp_rank(g) == 1) {
    for (i = 0; i < 5; i++) CHECK_OK(cddp_send(g, (y = 10 + i, &y), 1, CDDP_I32, 0, i, NULL));
    return;
  }
  CHECK_OK(cddp_wait(w[0]));
  CHECK_OK(cddp_wait(w[2]));
  CHECK_OK(cddp_wait(w[3]));
  CHECK(x[0] == 10 && x[1] == -1 && x[2] == 12 && x[3] == 14);
  CHECK_OK(cddp_recv(g, &y, 1, CDDP_I32, 1, 1, NULL)); /* what the first has left alone */
  CHECK_EQ(y, 11);
  CHECK_OK(cddp_recv(g, &y, 1, CDDP_I32, 1, 3, NULL));
  CHECK_EQ(y, 13);
}

static void cancel_too_late(cddp_group *g) {
  int32_t x = 5, y = -1;
  cddp_work *w;
  bool done = false;
  if (cddp_rank(g) == 1) {
    CHECK_OK(cddp_send(g, &x, 1, CDDP_I32, 0, 8, &w));
    CHECK_IS(cddp_cancel(w), CDDP_UNSUPPORTED);
    CHECK(mentions("message"));
    CHECK_OK(cddp_wait(w));
  } else {
    CHECK_OK(cddp_recv(g, &y, 1, CDDP_I32, 1, 8, &w));
    while (!done) CHECK_OK(cddp_test(w, &done));
    CHECK_IS(cddp_cancel(w), CDDP_UNSUPPORTED);
    CHECK_OK(cddp_wait(w));
    CHECK_EQ(y, 5);
  }
}

static int run_patience(cddp_group *g, void *arg) {
  int before = test_failures;
  (void)arg;
  CHECK_IS(cddp_cancel(NULL), CDDP_INVALID_ARGUMENT);
  CHECK_IS(cddp_wait_for(NULL, 1), CDDP_INVALID_ARGUMENT);
  wait_for_recv(g);
  wait_for_collective(g);
  cancel_recvs(g);
  cancel_too_late(g);
  CHECK_OK(cddp_barrier(g)); /* the group is as good as ever */
  return test_failures != before;
}

static void test_patience(void) {
  CHECK_OK(ranks_run(run_patience, NULL, 2, false));
  CHECK_OK(ranks_run(run_patience, NULL, 2, true));
  on_two_hosts(run_patience);
}

/* A receive that nobody will answer is given up, and its group left as usual. */
static int run_unanswered(cddp_group *g, void *arg) {
  int before = test_failures;
  cddp_work *w = NULL;
  cddp_group *s;
  double x;
  (void)arg;
  CHECK_OK(cddp_group_split(g, 0, cddp_rank(g), &s));
  CHECK_OK(cddp_recv(s, &x, 1, CDDP_F64, 1 - cddp_rank(g), 0, &w));
  CHECK_IS(cddp_wait_for(w, 0.02), CDDP_TIMEOUT);
  CHECK_OK(cddp_cancel(w));
  CHECK_OK(cddp_barrier(s));
  cddp_destroy(s);
  CHECK_OK(cddp_barrier(g));
  return test_failures != before;
}

static void test_unanswered(void) {
  CHECK_OK(ranks_run(run_unanswered, NULL, 2, false));
  CHECK_OK(ranks_run(run_unanswered, NULL, 2, true));
  on_two_hosts(run_unanswered);
}

/* The operation fails by itself while somebody waits for it with a limit of his own. */
static int own_limit_rank(int rank, void *arg) {
  int before = test_failures;
  cddp_group_desc desc;
  cddp_group *g;
  cddp_work *w = NULL;
  double x = 0;
  (void)arg;
  memset(&desc, 0, sizeof desc);
  desc.timeout_s = 0.4;
  CHECK_OK(cddp_init(&g, &desc));
  if (g == NULL) return 1;
  CHECK_OK(cddp_barrier(g));
  if (rank == 0) {
    CHECK_OK(cddp_all_reduce(g, &x, 1, CDDP_F64, CDDP_SUM, &w));
    CHECK_IS(cddp_wait_for(w, 10), CDDP_ABORTED); /* not its own limit: w is freed */
    CHECK(mentions("timed out after 0.4 s") && mentions("rank 1"));
  } else {
    ranks_sleep(1.0);
  }
  cddp_destroy(g);
  return test_failures != before;
}

static void test_own_limit(void) {
  int status[2];
  if (RANKS_SLOW) return;
  ranks_script(own_limit_rank, NULL, 2, 20, status);
  CHECK(ranks_exited_well(status, 2));
}

/* FROM ANY RANK: every message comes once, each sender's in order, and cddp_source tells whose. */

enum { ANY_EACH = 30, ANY_LARGE = 30000 };

static size_t any_count(int k) { return k % 10 == 9 ? ANY_LARGE : 2; }

static int run_any(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g), world = cddp_world_size(g), k, n;
  int32_t *x = (int32_t *)cddp_alloc(g, ANY_LARGE * sizeof *x); /* large ones wait for their recv */
  int next[16] = {0};
  cddp_work *w = NULL;
  bool handles = *(const bool *)arg;
  for (k = 0; rank > 0 && k < ANY_EACH; k++) {
    x[0] = rank, x[1] = k;
    CHECK_OK(cddp_send(g, x, any_count(k), CDDP_I32, 0, k, NULL));
  }
  for (k = 0; rank == 0 && k < ANY_EACH; k++)
    for (n = 1; n < world; n++) {
      CHECK_OK(cddp_recv(g, x, any_count(k), CDDP_I32, CDDP_ANY, k, handles ? &w : NULL));
      if (handles) CHECK_OK(cddp_wait(w));
      CHECK_EQ(cddp_source(), x[0]);
      if (x[0] < 1 || x[0] >= world) return 1;
      CHECK_EQ(x[1], k);
      CHECK_EQ(next[x[0]]++, k);
    }
  for (n = 1; rank == 0 && n < world; n++) CHECK_EQ(next[n], ANY_EACH);
  CHECK_OK(cddp_barrier(g));
  cddp_free(g, x);
  return test_failures != before;
}

/* What one rank sends keeps its order; a rank that sends much does not keep others out. */
static int run_any_in_turn(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g), i, x = 0, next[3] = {0}, late = 0;
  (void)arg;
  for (i = 0; rank > 0 && i < (rank == 1 ? 60 : 3); i++)
    CHECK_OK(cddp_send(g, &i, 1, CDDP_I32, 0, 4, NULL));
  CHECK_OK(cddp_barrier(g));
  for (i = 0; rank == 0 && i < 63; i++) {
    CHECK_OK(cddp_recv(g, &x, 1, CDDP_I32, CDDP_ANY, 4, NULL));
    CHECK(cddp_source() == 1 || cddp_source() == 2);
    CHECK_EQ(x, next[cddp_source() % 3]++);
    if (cddp_source() == 2) late = i;
  }
  CHECK(late <= 6 || getenv("TEST_HOSTS") != NULL); /* there messages are still under way */
  CHECK_OK(cddp_barrier(g));
  return test_failures != before;
}

/* Beside receives from one rank: those posted before have the first claim, those after the last. */
static int run_any_among_others(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g), x = rank * 10, a = -1, b = -1, c = -1;
  cddp_work *one, *any, *last;
  (void)arg;
  if (rank == 0) {
    CHECK_OK(cddp_recv(g, &a, 1, CDDP_I32, 1, 6, &one));
    CHECK_OK(cddp_recv(g, &b, 1, CDDP_I32, CDDP_ANY, 6, &any));
    CHECK_OK(cddp_recv(g, &c, 1, CDDP_I32, 1, 6, &last));
    CHECK_IS(cddp_wait_for(any, 0.02), CDDP_TIMEOUT);
    CHECK(mentions("any rank") && mentions("tag 6"));
  }
  CHECK_OK(cddp_barrier(g));
  if (rank == 2) CHECK_OK(cddp_send(g, &x, 1, CDDP_I32, 0, 6, NULL));
  if (rank == 0) {
    CHECK_OK(cddp_wait(any)); /* although the older one still waits */
    CHECK(b == 20 && cddp_source() == 2 && a == -1);
    CHECK_OK(cddp_recv(g, &b, 1, CDDP_I32, CDDP_ANY, 6, &any));
  }
  CHECK_OK(cddp_barrier(g));
  for (x = 7; rank == 1 && x < 10; x++) CHECK_OK(cddp_send(g, &x, 1, CDDP_I32, 0, 6, NULL));
  if (rank == 0) {
    CHECK_OK(cddp_wait(one));
    CHECK_OK(cddp_wait(any));
    CHECK_EQ(cddp_source(), 1);
    CHECK_OK(cddp_wait(last));
    CHECK(a == 7 && c == 8 && b == 9);
    CHECK_OK(cddp_recv(g, &a, 1, CDDP_I32, CDDP_ANY, 6, &any));
    CHECK_OK(cddp_cancel(any));
    CHECK_OK(cddp_recv(g, &a, 1, CDDP_I32, CDDP_ANY, 2, &any));
    x = 5;
    CHECK_OK(cddp_send(g, &x, 1, CDDP_I32, 0, 2, NULL)); /* its own */
    CHECK_OK(cddp_wait(any));
    CHECK(a == 5 && cddp_source() == 0);
  }
  CHECK_OK(cddp_barrier(g));
  return test_failures != before;
}

/* Ranks that have sent and left are no loss until all have. */
static int run_any_leave(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g), n, x = rank, sum = 0;
  (void)arg;
  if (rank > 0) {
    ranks_sleep(0.05 * rank);
    CHECK_OK(cddp_send(g, &x, 1, CDDP_I32, 0, 0, NULL));
    return test_failures != before;
  }
  for (n = 1; n < cddp_world_size(g); n++) {
    CHECK_OK(cddp_recv(g, &x, 1, CDDP_I32, CDDP_ANY, 0, NULL));
    CHECK_EQ(cddp_source(), x);
    sum += x;
  }
  CHECK_EQ(sum, 6);
  CHECK_IS(cddp_recv(g, &x, 1, CDDP_I32, CDDP_ANY, 0, NULL), CDDP_PEER_LOST);
  CHECK(mentions("left the group"));
  return test_failures != before;
}

static void on_any(ranks_fn fn, void *arg, int n) {
  CHECK_OK(ranks_run(fn, arg, n, false));
  CHECK_OK(ranks_run(fn, arg, n, true));
  if (getenv("TEST_HOSTS") != NULL) return;
  setenv("TEST_HOSTS", "aab", 1);
  CHECK_OK(ranks_run(fn, arg, n, false));
  unsetenv("TEST_HOSTS");
}

static void test_any(void) {
  bool handles;
  for (handles = false;; handles = true) {
    on_any(run_any, &handles, 4);
    CHECK_OK(ranks_run(run_any, &handles, 9, false));
    if (handles) break;
  }
  on_any(run_any_in_turn, NULL, 3);
  on_any(run_any_among_others, NULL, 3);
  on_any(run_any_leave, NULL, 4);
}

/* AFTER A LOSS cddp_test decides: a receive that it calls done has its source, or fails. Rank 2
   dies; rank 1 sends once before that, and again after cddp_test. */
static int decided_rank(int rank, void *arg) {
  int before = test_failures;
  uint32_t *told = (uint32_t *)arg; /* [0] rank 0 has tested, [1] the loss is noticed before */
  cddp_group *g;
  cddp_work *first = NULL, *second = NULL;
  int32_t x = 7, a = 0, b = 0;
  bool done = false;
  CHECK_OK(cddp_init(&g, NULL));
  if (g == NULL) return 1;
  if (rank == 0) {
    CHECK_OK(cddp_recv(g, &a, 1, CDDP_I32, 1, 0, &first));
    CHECK_OK(cddp_recv(g, &b, 1, CDDP_I32, told[1] ? 1 : CDDP_ANY, 1, &second));
  }
  if (rank == 1) CHECK_OK(cddp_send(g, &x, 1, CDDP_I32, 0, 0, NULL));
  CHECK_OK(cddp_barrier(g));
  if (rank == 2) raise(SIGKILL);
  if (told[1]) CHECK_IS(cddp_barrier(g), CDDP_PEER_LOST);
  if (rank == 0) {
    CHECK_EQ(cddp_source(), -1);
    while (!done) CHECK_OK(cddp_test(first, &done));
    CHECK_EQ(cddp_source(), 1);
    for (done = false; !done; ranks_sleep(1e-3)) CHECK_OK(cddp_test(second, &done));
    __atomic_store_n(&told[0], 1, __ATOMIC_RELEASE);
    ranks_sleep(0.1); /* rank 1 sends, if its group still can */
    CHECK_IS(cddp_wait(second), CDDP_PEER_LOST);
    CHECK(mentions("rank 2") && b == 0);
    CHECK_OK(cddp_wait(first));
    CHECK(a == 7 && cddp_source() == 1);
  } else {
    while (__atomic_load_n(&told[0], __ATOMIC_ACQUIRE) == 0) ranks_sleep(1e-3);
    (void)cddp_send(g, &x, 1, CDDP_I32, 0, 1, NULL);
  }
  cddp_destroy(g);
  return test_failures != before;
}

static void test_decided(void) {
  uint32_t *told = (uint32_t *)ranks_shared(2 * sizeof *told);
  int status[3], i;
  for (i = 0; i < 4; i++) {
    told[0] = 0, told[1] = (uint32_t)i % 2;
    if (i >= 2) setenv("TEST_HOSTS", "aab", 1);
    ranks_script(decided_rank, told, 3, RANKS_WITHIN(20.0), status);
    CHECK(WIFSIGNALED(status[2]) && WTERMSIG(status[2]) == SIGKILL);
    CHECK(ranks_exited_well(status, 2));
    unsetenv("TEST_HOSTS");
  }
}

int main(void) {
  setenv("CDDP_TIMEOUT_S", RANKS_SLOW ? "120" : "30", 0);
  RUN(test_misuse);
  RUN(test_pair);
  RUN(test_tags);
  RUN(test_all_pairs);
  RUN(test_in_order);
  RUN(test_ring);
  RUN(test_take_and_leave);
  RUN(test_beside_collective);
  RUN(test_talkers);
  RUN(test_two_boxes);
  RUN(test_self);
  RUN(test_mismatch);
  RUN(test_thread_leaves);
  RUN(test_send_and_leave);
  RUN(test_sends_first);
  RUN(test_unwanted);
  RUN(test_polled);
  RUN(test_patience);
  RUN(test_unanswered);
  RUN(test_own_limit);
  RUN(test_any);
  RUN(test_late_peer);
  RUN(test_messages_for_the_gone);
  RUN(test_dead_peer);
  RUN(test_decided);
  return TEST_END();
}
