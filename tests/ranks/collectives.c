/* Every collective against references computed here: values, bits, memory and failures.

   A matrix of calls runs on 1 to 64 processes and threads: each kind, dtype, operation and size,
   in memory of cddp_alloc and others, in place or not, asynchronous or not, several in flight.
   Sums are compared bit by bit with the canonical tree, which is written down in ranks.h. Further
   tests: NaN, rounding of half precision, misuse, ranks that call something else, that are late,
   that stop in the middle of their writes, or that die. */
#define CDDP_IMPLEMENTATION
#include "../../cddp.h"
#include "../ranks.h"

#include <fenv.h>
#include <float.h>

enum {
  ALL_REDUCE,
  REDUCE,
  BROADCAST,
  ALL_GATHER,
  GATHER,
  SCATTER,
  REDUCE_SCATTER,
  ALL_TO_ALL,
  KINDS
};
enum { SHARED, HEAP, MIXED, OFFSET, MEMORIES }; /* where the buffers lie */

typedef struct call {
  int kind, root, memory;
  cddp_dtype dtype;
  cddp_op op;
  size_t n;
  uint64_t seed;
  bool in_place, exact; /* exact: values that sum exactly in any order */
} call;

/* One call's buffers: two regions of `capacity` bytes in shared memory, two on the heap. */
typedef struct flight {
  call c;
  unsigned char *shared, *heap;
  size_t capacity;
  unsigned char *send, *recv;
  unsigned char *outer; /* the larger one when the other lies in it, else NULL */
  size_t outer_bytes;
  int rank, world;
  cddp_work *work;
} flight;

#define GUARD 64
#define GUARD_BYTE 0xc3
#define POISON 0xa5

/* VALUES --------------------------------------------------------------------------------------- */

static bool is_float(cddp_dtype t) { return t <= CDDP_BF16; }

/* Small integers; for products powers of two near one. */
static double exact_value(const call *c, uint64_t h) {
  static const double factors[] = {1, -1, 2, 0.5, -2, -0.5, 1, 1};
  return c->op == CDDP_PROD ? factors[h & 7] : (double)((int)(h % 17) - 8);
}

/* Any mantissa, and exponents far enough apart that the order of a sum shows in its bits. */
static double random_value(const call *c, uint64_t h) {
  double mantissa = 1.0 + (double)(h >> 12) * 0x1p-52;
  int spread = c->op == CDDP_PROD ? 2 : c->dtype == CDDP_F16 ? 20 : 30;
  double v = ldexp(mantissa, (int)((h >> 1) % (uint64_t)spread) - spread / 2);
  return h & 1 ? -v : v;
}

/* Element i of what `rank` contributes. */
static void contribution(const call *c, int rank, size_t i, unsigned char out[8]) {
  uint64_t h = ranks_mix(c->seed, (uint64_t)rank, i);
  if (is_float(c->dtype))
    ranks_store(c->dtype, out, 0, c->exact ? exact_value(c, h) : random_value(c, h));
  else
    memcpy(out, &h, 8); /* little-endian truncation to any width */
}

static double contribution_f(const call *c, int rank, size_t i) {
  unsigned char b[8];
  contribution(c, rank, i, b);
  return ranks_load(c->dtype, b, 0);
}

static int64_t contribution_i(const call *c, int rank, size_t i) { /* sign- or zero-extended */
  uint64_t h = ranks_mix(c->seed, (uint64_t)rank, i);
  switch (c->dtype) {
  case CDDP_I8:
    return (int8_t)(uint8_t)h;
  case CDDP_U8:
    return (uint8_t)h;
  case CDDP_I32:
    return (int32_t)(uint32_t)h;
  default:
    return (int64_t)h;
  }
}

/* REFERENCES ----------------------------------------------------------------------------------- */

static double combine_f64(cddp_op op, double a, double b) {
  if (op == CDDP_PROD) return a * b;
  if (op == CDDP_MIN) return b < a ? b : a;
  if (op == CDDP_MAX) return b > a ? b : a;
  return a + b;
}

static float combine_f32(cddp_op op, float a, float b) {
  if (op == CDDP_PROD) return a * b;
  if (op == CDDP_MIN) return b < a ? b : a;
  if (op == CDDP_MAX) return b > a ? b : a;
  return a + b;
}

/* Canonical order; left to right when the values are exact, which must make no difference. */
static double tree_f64(const call *c, int lo, int hi, size_t i) {
  int mid = c->exact ? hi - 1 : lo + ranks_split(hi - lo);
  if (hi - lo == 1) return contribution_f(c, lo, i);
  return combine_f64(c->op, tree_f64(c, lo, mid, i), tree_f64(c, mid, hi, i));
}

static float tree_f32(const call *c, int lo, int hi, size_t i) {
  int mid = c->exact ? hi - 1 : lo + ranks_split(hi - lo);
  if (hi - lo == 1) return (float)contribution_f(c, lo, i);
  return combine_f32(c->op, tree_f32(c, lo, mid, i), tree_f32(c, mid, hi, i));
}

static int64_t extend(cddp_dtype t, uint64_t v) {
  if (t == CDDP_I8) return (int8_t)(uint8_t)v;
  if (t == CDDP_U8) return (uint8_t)v;
  if (t == CDDP_I32) return (int32_t)(uint32_t)v;
  return (int64_t)v;
}

static int64_t fold_integers(const call *c, int world, size_t i) {
  int64_t v = contribution_i(c, 0, i);
  int r;
  for (r = 1; r < world; r++) {
    int64_t b = contribution_i(c, r, i);
    if (c->op == CDDP_MIN)
      v = b < v ? b : v;
    else if (c->op == CDDP_MAX)
      v = b > v ? b : v;
    else if (c->op == CDDP_PROD)
      v = (int64_t)((uint64_t)v * (uint64_t)b);
    else if (c->op == CDDP_BAND)
      v &= b;
    else if (c->op == CDDP_BOR)
      v |= b;
    else if (c->op == CDDP_BXOR)
      v ^= b;
    else
      v = (int64_t)((uint64_t)v + (uint64_t)b);
  }
  v = extend(c->dtype, (uint64_t)v); /* sums and products wrap */
  return c->op == CDDP_AVG ? v / world : v;
}

static void reduced(const call *c, int world, size_t i, unsigned char out[8]) {
  if (c->dtype == CDDP_F64) {
    double v = tree_f64(c, 0, world, i);
    ranks_store(c->dtype, out, 0, c->op == CDDP_AVG ? v / world : v);
  } else if (is_float(c->dtype)) {
    float v = tree_f32(c, 0, world, i);
    if (c->op == CDDP_AVG) v /= (float)world;
    ranks_store(c->dtype, out, 0, (double)v);
  } else {
    int64_t v = fold_integers(c, world, i);
    memcpy(out, &v, 8);
  }
}

/* What recv[i] must hold on this rank; false when the call leaves that rank's buffer alone. */
static bool expected(const flight *f, size_t i, unsigned char out[8]) {
  const call *c = &f->c;
  size_t n = c->n;
  switch (c->kind) {
  case ALL_REDUCE:
    reduced(c, f->world, i, out);
    break;
  case REDUCE:
    if (f->rank == c->root)
      reduced(c, f->world, i, out);
    else
      contribution(c, f->rank, i, out);
    break;
  case BROADCAST:
    contribution(c, c->root, i, out);
    break;
  case GATHER:
    if (f->rank != c->root) return false;
    contribution(c, (int)(i / n), i % n, out);
    break;
  case ALL_GATHER:
    contribution(c, (int)(i / n), i % n, out);
    break;
  case SCATTER:
    contribution(c, c->root, (size_t)f->rank * n + i, out);
    break;
  case REDUCE_SCATTER:
    reduced(c, f->world, (size_t)f->rank * n + i, out);
    break;
  default:
    contribution(c, (int)(i / n), (size_t)f->rank * n + i % n, out);
    break;
  }
  return true;
}

/* BUFFERS -------------------------------------------------------------------------------------- */

static size_t send_count(const flight *f) {
  bool all = f->c.kind == SCATTER || f->c.kind == REDUCE_SCATTER || f->c.kind == ALL_TO_ALL;
  return all ? f->c.n * (size_t)f->world : f->c.n;
}

static size_t recv_count(const flight *f) {
  bool all = f->c.kind == ALL_GATHER || f->c.kind == GATHER || f->c.kind == ALL_TO_ALL;
  return all ? f->c.n * (size_t)f->world : f->c.n;
}

/* Region 0 or 1 at the call's place: at the start of the memory, or off any cache line. */
static unsigned char *region(const flight *f, int which) {
  size_t size = cddp_dtype_size(f->c.dtype), r = (size_t)f->rank;
  size_t base = (size_t)which * f->capacity;
  switch (f->c.memory) {
  case SHARED:
    return f->shared + base;
  case HEAP:
    return f->heap + base + GUARD;
  case MIXED:
    return (f->rank & 1 ? f->heap : f->shared) + base + GUARD + size;
  default:
    return (f->rank == 1 ? f->heap : f->shared) + base + GUARD + (3 + r) * size;
  }
}

static void guard(const flight *f, const unsigned char *buf, size_t bytes, bool check) {
  unsigned char *p = f->shared <= buf && buf < f->shared + 2 * f->capacity ? f->shared : f->heap;
  size_t at = (size_t)(buf - p), before = at < GUARD ? at : GUARD, i;
  p += at;
  if (!check) {
    memset(p - before, GUARD_BYTE, before);
    memset(p + bytes, GUARD_BYTE, GUARD);
    return;
  }
  for (i = 0; i < before && p[-1 - (ptrdiff_t)i] == GUARD_BYTE; i++) {}
  CHECK(i == before);
  for (i = 0; i < GUARD && p[bytes + i] == GUARD_BYTE; i++) {}
  CHECK(i == GUARD);
}

static void prepare(flight *f) {
  size_t size = cddp_dtype_size(f->c.dtype), s = send_count(f), r = recv_count(f), n = f->c.n, i;
  size_t share = (size_t)f->rank * n * size;
  bool root = f->rank == f->c.root, one = f->c.kind <= BROADCAST;
  f->send = region(f, 0);
  f->recv = one ? f->send : region(f, 1);
  if (f->c.in_place && !one) {
    if (f->c.kind == ALL_GATHER || (f->c.kind == GATHER && root)) f->send = f->recv + share;
    if (f->c.kind == REDUCE_SCATTER || (f->c.kind == SCATTER && root)) f->recv = f->send + share;
    if (f->c.kind == ALL_TO_ALL) f->recv = f->send;
  }
  if (s > 0 && r > 0 && f->send < f->recv + r * size &&
      f->recv < f->send + s * size) { /* one in the other */
    f->outer = s > r ? f->send : f->recv;
    f->outer_bytes = (s > r ? s : r) * size;
  } else {
    f->outer = NULL;
    guard(f, f->send, s * size, false);
  }
  guard(f, f->outer != NULL ? f->outer : f->recv, f->outer != NULL ? f->outer_bytes : r * size,
        false);
  memset(f->recv, POISON, r * size);
  for (i = 0; i < s; i++) {
    unsigned char b[8];
    contribution(&f->c, f->rank, i, b);
    memcpy(f->send + i * size, b, size);
  }
}

static cddp_result start(cddp_group *g, flight *f, bool async) {
  call *c = &f->c;
  cddp_work **w = async ? &f->work : NULL;
  bool root = f->rank == c->root, bare = (c->seed & 1) != 0; /* NULL where the manual allows it */
  switch (c->kind) {
  case ALL_REDUCE:
    return cddp_all_reduce(g, f->recv, c->n, c->dtype, c->op, w);
  case REDUCE:
    return cddp_reduce(g, f->recv, c->n, c->dtype, c->op, c->root, w);
  case BROADCAST:
    return cddp_broadcast(g, f->recv, c->n, c->dtype, c->root, w);
  case ALL_GATHER:
    return cddp_all_gather(g, f->send, f->recv, c->n, c->dtype, w);
  case GATHER:
    return cddp_gather(g, f->send, root || !bare ? f->recv : NULL, c->n, c->dtype, c->root, w);
  case SCATTER:
    return cddp_scatter(g, root || !bare ? f->send : NULL, f->recv, c->n, c->dtype, c->root, w);
  case REDUCE_SCATTER:
    return cddp_reduce_scatter(g, f->send, f->recv, c->n, c->dtype, c->op, w);
  default:
    return cddp_all_to_all(g, f->send, f->recv, c->n, c->dtype, w);
  }
}

static bool nan_pair(cddp_dtype t, const unsigned char *a, const unsigned char *b) {
  return is_float(t) && isnan(ranks_load(t, a, 0)) && isnan(ranks_load(t, b, 0));
}

static const char *const kind_names[] = {"all_reduce", "reduce",  "broadcast",      "all_gather",
                                         "gather",     "scatter", "reduce_scatter", "all_to_all"};

static void describe(const flight *f, size_t i, const unsigned char *want,
                     const unsigned char *got) {
  static int said; /* a few are enough */
  if (__atomic_add_fetch(&said, 1, __ATOMIC_RELAXED) > 5) return;
  fprintf(stderr,
          "%s n=%zu dtype=%d op=%d root=%d memory=%d in_place=%d exact=%d rank %d of %d at %zu: ",
          kind_names[f->c.kind], f->c.n, (int)f->c.dtype, (int)f->c.op, f->c.root, f->c.memory,
          f->c.in_place, f->c.exact, f->rank, f->world, i);
  if (is_float(f->c.dtype))
    fprintf(stderr, "want %.17g got %.17g\n", ranks_load(f->c.dtype, want, 0),
            ranks_load(f->c.dtype, got, 0));
  else
    fprintf(stderr, "want %02x.. got %02x..\n", want[0], got[0]);
}

static bool reduces(int kind) {
  return kind == ALL_REDUCE || kind == REDUCE || kind == REDUCE_SCATTER;
}

static bool compare(const flight *f) {
  size_t size = cddp_dtype_size(f->c.dtype), r = recv_count(f), i;
  bool striped = reduces(f->c.kind) && r > 5000;
  unsigned char b[8];
  for (i = 0; i < r; i++) {
    /* of a long reduction each rank checks its stripe and the ends; verify() compares the whole
       across ranks */
    if (striped && i > 64 && i + 64 < r && (i >> 4) % (size_t)f->world != (size_t)f->rank) continue;
    if (!expected(f, i, b)) {
      memset(b, POISON, sizeof b); /* gather leaves recv alone off the root */
      if (f->send >= f->recv && f->send < f->recv + r * size) continue;
    }
    if (memcmp(f->recv + i * size, b, size) == 0 || nan_pair(f->c.dtype, b, f->recv + i * size))
      continue;
    describe(f, i, b, f->recv + i * size);
    return false;
  }
  return true;
}

static uint64_t hash(const unsigned char *p, size_t n) {
  uint64_t h = 0xcbf29ce484222325ull;
  size_t i;
  for (i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3ull;
  return h;
}

/* The whole result has one hash on all ranks. */
static void same_everywhere(cddp_group *g, const void *p, size_t bytes) {
  uint64_t mine = hash((const unsigned char *)p, bytes), all[64];
  int i, n = cddp_world_size(g);
  CHECK_OK(cddp_all_gather(g, &mine, all, 1, CDDP_I64, NULL));
  for (i = 0; i < n; i++) CHECK(all[i] == mine);
}

static void verify(flight *f) {
  size_t size = cddp_dtype_size(f->c.dtype), s = send_count(f), i;
  unsigned char b[8];
  CHECK(compare(f));
  guard(f, f->outer != NULL ? f->outer : f->recv,
        f->outer != NULL ? f->outer_bytes : recv_count(f) * size, true);
  if (f->outer != NULL) return;
  guard(f, f->send, s * size, true);
  for (i = 0; i < s; i++) { /* send is only read */
    contribution(&f->c, f->rank, i, b);
    if (memcmp(f->send + i * size, b, size) != 0) break;
  }
  CHECK(i == s);
}

static bool flight_open(flight *f, cddp_group *g, size_t capacity) {
  memset(f, 0, sizeof *f);
  f->rank = cddp_rank(g);
  f->world = cddp_world_size(g);
  f->capacity = capacity;
  f->shared = (unsigned char *)cddp_alloc(g, 2 * capacity);
  f->heap = (unsigned char *)malloc(2 * capacity);
  CHECK(f->shared != NULL && f->heap != NULL);
  return f->shared != NULL && f->heap != NULL;
}

static void flight_close(flight *f, cddp_group *g) {
  cddp_free(g, f->shared);
  free(f->heap);
}

/* THE MATRIX: every collective, dtype, op and count; memory, place, root and values rotate. ---- */

typedef struct matrix {
  const size_t *counts;
  int count_count, passes;
} matrix;

static void run_one(cddp_group *g, flight *f, const call *c) {
  cddp_result r;
  f->c = *c;
  prepare(f);
  r = start(g, f, false);
  CHECK_OK(r);
  if (r != CDDP_OK) return;
  verify(f);
  if (c->kind == ALL_REDUCE && c->n > 5000)
    same_everywhere(g, f->recv, c->n * cddp_dtype_size(c->dtype));
}

static int run_matrix(cddp_group *g, void *arg) {
  const matrix *m = (const matrix *)arg;
  int before = test_failures, world = cddp_world_size(g), pass, i, dtype, op, kind, k = 0;
  size_t capacity = (size_t)1 << 20;
  flight f;
  if (flight_open(&f, g, capacity + 4096)) {
    for (pass = 0; pass < m->passes; pass++)
      for (i = 0; i < m->count_count; i++)
        for (dtype = CDDP_F32; dtype <= CDDP_I64; dtype++)
          for (kind = 0; kind < KINDS; kind++)
            for (op = CDDP_SUM; op <= (dtype <= CDDP_BF16 ? CDDP_MAX : CDDP_BXOR) &&
                                test_failures == before; op++) {
              call c;
              size_t factor = kind <= BROADCAST ? 1 : (size_t)world;
              if (op != CDDP_SUM && !reduces(kind)) continue;
              c.kind = kind;
              c.dtype = (cddp_dtype)dtype;
              c.op = (cddp_op)op;
              c.n = m->counts[i];
              if (c.n * factor * cddp_dtype_size(c.dtype) > capacity) continue;
              if (c.n > 2000 && reduces(kind) && op != (dtype + i) % 5 + (dtype > CDDP_U8 ? 3 : 0))
                continue; /* one op each */
              k++;
              c.memory = (k + pass) % MEMORIES;
              c.in_place = (k / 3 + pass) % 2 == 0;
              c.exact = (k / 5 + pass) % 2 == 0;
              c.root = (k / 2) % world;
              c.seed = ranks_mix((uint64_t)k, (uint64_t)pass, 1);
              run_one(g, &f, &c);
            }
    CHECK_OK(cddp_barrier(g));
  }
  flight_close(&f, g);
  return test_failures != before;
}

static const size_t small_counts[] = {0, 1, 2, 3, 7, 15, 16, 17, 100, 1000};
static const size_t large_counts[] = {4099, 65537};
static const size_t few_counts[] = {1, 17};

static void run_matrix_on(int ranks, const size_t *counts, int count, int passes, bool threads) {
  matrix m;
  m.counts = counts;
  m.count_count = count;
  m.passes = passes;
  CHECK_OK(ranks_run(run_matrix, &m, ranks, threads));
}

static void test_processes(void) {
  static const int ranks[] = {2, 5, 1, 3, 4, 7, 8, 16};
  int i;
  for (i = 0; i < (RANKS_TSAN ? 2 : RANKS_SLOW ? 4 : 8); i++) {
    run_matrix_on(ranks[i], small_counts, 10, ranks[i] == 2 && !RANKS_SLOW ? 2 : 1, false);
    run_matrix_on(ranks[i], large_counts, RANKS_SLOW || ranks[i] > 4 ? 1 : 2, 1, false);
  }
  run_matrix_on(64, few_counts, 1, 1, false);
}

static void test_threads(void) {
  static const int ranks[] = {1, 2, 3, 7, 4, 16};
  int i;
  for (i = 0; i < (RANKS_TSAN ? 3 : RANKS_SLOW ? 2 : 6); i++) {
    run_matrix_on(ranks[i], small_counts, 10, ranks[i] == 2 && !RANKS_SLOW ? 2 : 1, true);
    run_matrix_on(ranks[i], large_counts, RANKS_SLOW || ranks[i] > 4 ? 1 : 2, 1, true);
  }
  run_matrix_on(64, few_counts, 1, 1, true);
}

/* HUGE ----------------------------------------------------------------------------------------- */

static void huge_call(call *c, int kind, size_t n, uint64_t seed) {
  memset(c, 0, sizeof *c);
  c->kind = kind;
  c->dtype = seed & 2 ? CDDP_BF16 : CDDP_F32;
  c->op = CDDP_AVG;
  c->n = n;
  c->seed = seed;
  c->memory = (int)(seed % MEMORIES);
}

static int run_huge(cddp_group *g, void *arg) {
  int before = test_failures, kind;
  size_t n = RANKS_TSAN ? 500011 : 5000011, world = (size_t)cddp_world_size(g);
  flight f;
  (void)arg;
  if (flight_open(&f, g, n * 4 + 4096)) {
    for (kind = 0; kind < KINDS; kind++) {
      call c;
      huge_call(&c, kind, kind == ALL_REDUCE ? n : n / 4 / world, (uint64_t)kind + 40);
      run_one(g, &f, &c);
      if (kind != ALL_REDUCE) continue;
      huge_call(&c, kind, n, 3); /* the other memory, the other dtype */
      run_one(g, &f, &c);
    }
  }
  flight_close(&f, g);
  return test_failures != before;
}

static void test_huge(void) {
  if (!RANKS_SLOW) CHECK_OK(ranks_run(run_huge, NULL, 3, false));
  CHECK_OK(ranks_run(run_huge, NULL, 2, true));
}

/* ONE RESULT: the same bits in every run, on processes and on threads. ------------------------- */

static int run_hashed(cddp_group *g, void *arg) {
  int before = test_failures;
  uint64_t *out = (uint64_t *)arg;
  flight f;
  if (flight_open(&f, g, (size_t)1 << 20)) {
    memset(&f.c, 0, sizeof f.c);
    f.c.op = CDDP_SUM;
    f.c.n = 20011;
    f.c.seed = 77;
    f.c.memory = (int)(out[1] % MEMORIES);
    prepare(&f);
    CHECK_OK(start(g, &f, false));
    same_everywhere(g, f.recv, f.c.n * 4);
    if (f.rank == 0) out[0] = hash(f.recv, f.c.n * 4);
  }
  flight_close(&f, g);
  return test_failures != before;
}

static void test_runs_agree(void) {
  static const int ranks[] = {2, 3, 4, 7, 16};
  uint64_t *shared = (uint64_t *)ranks_shared(4096), first;
  int i, run;
  for (i = 0; i < 5; i++) {
    first = 0;
    for (run = 0; run < 4; run++) {
      shared[1] = (uint64_t)run;
      CHECK_OK(ranks_run(run_hashed, shared, ranks[i], run >= 2));
      if (run == 0) first = shared[0];
      CHECK(shared[0] == first);
    }
  }
  munmap(shared, 4096);
}

#define CHECK_INVALID(call)                                                                        \
  do {                                                                                             \
    CHECK_IS(call, CDDP_INVALID_ARGUMENT);                                                         \
    CHECK(cddp_error()[0] != 0);                                                                   \
  } while (0)

/* COUNTS: all_gather_v and all_to_all_v. Rank a has counted(p, a, b) elements for rank b. */

enum { COUNTS_FEW, COUNTS_MANY, COUNTS_SKEWED, COUNTS_ONE_SENDS, COUNTS_NONE, COUNTS_KINDS };

typedef struct uneven {
  int kind, memory; /* 0: malloc, 1: shared, 2: by rank */
  cddp_dtype dtype;
  bool gather, async, in_place;
} uneven;

static size_t counted(const uneven *p, int a, int b) {
  uint64_t h = ranks_mix((uint64_t)a, p->gather ? 99 : (uint64_t)b, (uint64_t)p->kind);
  switch (p->kind) {
  case COUNTS_FEW: return h % 4;
  case COUNTS_MANY: return h % 3 == 0 ? 0 : h % 5000;
  case COUNTS_SKEWED: return a == 1 && (b == 0 || p->gather) ? 150001 : h % 2;
  case COUNTS_ONE_SENDS: return a == 1 ? 3000 + h % 7 : 0;
  default: return 0;
  }
}

static uint64_t counts_seed(const uneven *p, int a, int b) {
  return (uint64_t)(a * 100 + (p->gather ? 0 : b) + 1);
}

static void counts_fill(unsigned char *at, size_t bytes, uint64_t seed) {
  size_t i;
  for (i = 0; i < bytes; i++) at[i] = (unsigned char)(seed * 31 + i * 7 + (i >> 8));
}

static bool counts_hold(const unsigned char *at, size_t bytes, uint64_t seed) {
  size_t i;
  for (i = 0; i < bytes; i++)
    if (at[i] != (unsigned char)(seed * 31 + i * 7 + (i >> 8))) return false;
  return true;
}

static unsigned char *counts_memory(cddp_group *g, const uneven *p, size_t bytes, bool back,
                                    unsigned char *old) {
  bool shared = p->memory == 1 || (p->memory == 2 && cddp_rank(g) % 2 == 0);
  if (back && shared) cddp_free(g, old);
  if (back && !shared) free(old);
  if (back) return NULL;
  return (unsigned char *)(shared ? cddp_alloc(g, bytes) : malloc(bytes));
}

static void check_counts(cddp_group *g, const uneven *p) {
  int me = cddp_rank(g), n = cddp_world_size(g), r;
  size_t size = cddp_dtype_size(p->dtype), sent = 0, got = 0, out[16], in[16];
  unsigned char *send, *recv, *from, *at;
  cddp_work *w = NULL;
  cddp_result result;
  for (r = 0; r < n; r++) {
    out[r] = counted(p, me, r);
    in[r] = counted(p, r, me);
    sent = p->gather ? out[r] * size : sent + out[r] * size;
    got += in[r] * size;
  }
  send = counts_memory(g, p, sent + 1, false, NULL);
  recv = counts_memory(g, p, got + GUARD, false, NULL);
  CHECK(send != NULL && recv != NULL);
  if (send == NULL || recv == NULL) return;
  memset(recv, POISON, got);
  memset(recv + got, GUARD_BYTE, GUARD);
  for (r = 0, from = send; r < (p->gather ? 1 : n); r++) {
    counts_fill(from, out[r] * size, counts_seed(p, me, r));
    from += out[r] * size;
  }
  for (r = 0, from = send, at = recv; p->in_place && r < n; at += in[r++] * size)
    if (r == me) from = (unsigned char *)memcpy(at, send, sent);
  if (!p->in_place) from = send;
  if (p->gather)
    result = cddp_all_gather_v(g, sent > 0 ? from : NULL, got > 0 ? recv : NULL, in, p->dtype,
                               p->async ? &w : NULL);
  else
    result = cddp_all_to_all_v(g, sent > 0 ? send : NULL, out, recv, in, p->dtype,
                               p->async ? &w : NULL);
  CHECK_OK(result);
  CHECK((w != NULL) == p->async);
  if (p->async) memset(in, 0xff, sizeof in), memset(out, 0xff, sizeof out); /* copied */
  if (w != NULL) CHECK_OK(cddp_wait(w));
  for (r = 0, at = recv; r < n; at += counted(p, r, me) * size, r++)
    if (!counts_hold(at, counted(p, r, me) * size, counts_seed(p, r, me)))
      test_fail(__FILE__, __LINE__, "kind %d, memory %d, dtype %d, gather %d: from %d to %d",
                p->kind, p->memory, (int)p->dtype, p->gather, r, me);
  test_count();
  CHECK(recv[got] == GUARD_BYTE && recv[got + GUARD - 1] == GUARD_BYTE);
  (void)counts_memory(g, p, 0, true, send);
  (void)counts_memory(g, p, 0, true, recv);
}

static int run_counts(cddp_group *g, void *arg) {
  int before = test_failures, k = 0;
  uneven p;
  (void)arg;
  memset(&p, 0, sizeof p);
  for (p.kind = 0; p.kind < COUNTS_KINDS; p.kind++)
    for (p.memory = 0; p.memory < 3; p.memory++)
      for (k = 0; k < 4; k++) {
        p.gather = k % 2 == 0;
        p.async = k / 2 == 1;
        p.in_place = p.gather && (p.memory + p.kind) % 2 == 0;
        p.dtype = (cddp_dtype)((p.kind + p.memory * 3 + k) % 8);
        check_counts(g, &p);
      }
  CHECK_OK(cddp_barrier(g));
  return test_failures != before;
}

/* Ranks that disagree about a count: all hear of it, by name, and nothing is written. */
typedef struct disagreement {
  int how; /* 0: rank 1 sends more to rank 2 than that expects, 1: less; 2: all_gather_v; 3: another
              type; 4: another call; 5: nothing for one that waits */
} disagreement;

static int run_counts_mismatch(cddp_group *g, void *arg) {
  const disagreement *d = (const disagreement *)arg;
  int before = test_failures, me = cddp_rank(g), i;
  int32_t out[3000], in[3000];
  size_t counts[3] = {900, 900, 900}, other[3] = {900, 900, 900};
  cddp_result r;
  memset(out, 0, sizeof out);
  memset(in, POISON, sizeof in);
  if (me == 1) counts[2] = d->how == 0 ? 901 : d->how == 1 ? 899 : d->how == 5 ? 0 : 900;
  if (me == 1 && d->how == 2) other[2] = 899;
  if (d->how == 2)
    r = cddp_all_gather_v(g, out, in, other, CDDP_I32, NULL);
  else if (d->how == 4 && me == 1)
    r = cddp_all_to_all(g, out, in, 900, CDDP_I32, NULL);
  else
    r = cddp_all_to_all_v(g, out, counts, in, other, d->how == 3 && me == 1 ? CDDP_F32 : CDDP_I32,
                          NULL);
  CHECK_IS(r, CDDP_MISMATCH);
  CHECK(strstr(cddp_error(), d->how == 2 ? "all_gather_v" : "all_to_all_v") != NULL);
  CHECK(strstr(cddp_error(), "rank 1") != NULL);
  if (d->how < 2 || d->how == 5)
    CHECK(strstr(cddp_error(), d->how == 0 ? "901" : d->how == 1 ? "899" : "sends 0") != NULL);
  for (i = 0; i < 3000; i++)
    if (in[i] != (int32_t)0xa5a5a5a5) break;
  CHECK_EQ(i, 3000);
  return test_failures != before;
}

static int run_counts_misuse(cddp_group *g, void *arg) {
  int before = test_failures;
  int32_t x[64] = {0}, y[64] = {0};
  size_t one[3] = {1, 1, 1}, huge[3] = {1, SIZE_MAX / 4, 1};
  size_t more[3] = {SIZE_MAX / 16, SIZE_MAX / 16, SIZE_MAX / 16};
  cddp_work *w = (cddp_work *)(void *)x; /* a call that fails leaves none */
  (void)arg;
  CHECK_INVALID(cddp_all_gather_v(NULL, x, y, one, CDDP_I32, NULL));
  CHECK_INVALID(cddp_all_gather_v(g, x, y, NULL, CDDP_I32, &w));
  CHECK(w == NULL);
  CHECK_INVALID(cddp_all_to_all_v(g, x, NULL, y, one, CDDP_I32, NULL));
  CHECK_INVALID(cddp_all_to_all_v(g, x, one, y, NULL, CDDP_I32, NULL));
  CHECK_INVALID(cddp_all_to_all_v(g, NULL, one, y, one, CDDP_I32, NULL));
  CHECK_INVALID(cddp_all_to_all_v(g, x, one, NULL, one, CDDP_I32, NULL));
  CHECK_INVALID(cddp_all_to_all_v(g, x, one, y, one, (cddp_dtype)9, NULL));
  CHECK_INVALID(cddp_all_to_all_v(g, x, huge, y, one, CDDP_I32, NULL));
  CHECK(strstr(cddp_error(), "rank 1") != NULL);
  CHECK_INVALID(cddp_all_gather_v(g, x, y, more, CDDP_I32, NULL));
  CHECK_INVALID(cddp_all_to_all_v(g, x, one, x, one, CDDP_I32, NULL));
  CHECK_INVALID(cddp_all_to_all_v(g, x, one, x + 1, one, CDDP_I32, &w));
  CHECK_INVALID(cddp_all_gather_v(g, x + (cddp_rank(g) + 1) % 3, x, one, CDDP_I32, NULL));
  CHECK_INVALID(cddp_barrier_async(g, NULL));
  CHECK_INVALID(cddp_barrier_async(NULL, &w));
  CHECK(w == NULL);
  CHECK_OK(cddp_all_to_all_v(g, x, one, y, one, CDDP_I32, NULL));
  return test_failures != before;
}

static int run_counts_alone(cddp_group *g, void *arg) {
  int before = test_failures;
  int32_t x[3] = {1, 2, 3}, y[3] = {0};
  size_t n = 3, m = 2;
  (void)arg;
  CHECK_OK(cddp_all_to_all_v(g, x, &n, y, &n, CDDP_I32, NULL));
  CHECK(memcmp(x, y, sizeof x) == 0);
  CHECK_OK(cddp_all_gather_v(g, x, x, &n, CDDP_I32, NULL));
  CHECK_IS(cddp_all_to_all_v(g, x, &n, y, &m, CDDP_I32, NULL), CDDP_MISMATCH);
  n = 0;
  CHECK_OK(cddp_all_to_all_v(g, NULL, &n, NULL, &n, CDDP_I32, NULL));
  return test_failures != before;
}

static void test_counts(void) {
  static const char *const layouts[] = {"aab", "abab", "abc", "aabbbc"};
  disagreement d;
  int i;
  for (i = 2; i < (RANKS_SLOW ? 4 : 6); i++) {
    CHECK_OK(ranks_run(run_counts, NULL, i, false));
    CHECK_OK(ranks_run(run_counts, NULL, i, true));
  }
  CHECK_OK(ranks_run(run_counts_alone, NULL, 1, true));
  CHECK_OK(ranks_run(run_counts_misuse, NULL, 3, true));
  for (d.how = 0; d.how < 6; d.how++) {
    CHECK_OK(ranks_run(run_counts_mismatch, &d, 3, false));
    CHECK_OK(ranks_run(run_counts_mismatch, &d, 3, true));
  }
  if (getenv("TEST_HOSTS") != NULL) return;
  for (i = 0; i < 4; i++) {
    setenv("TEST_HOSTS", layouts[i], 1);
    CHECK_OK(ranks_run(run_counts, NULL, (int)strlen(layouts[i]), false));
    for (d.how = 0; i == 0 && d.how < 6; d.how++)
      CHECK_OK(ranks_run(run_counts_mismatch, &d, 3, false));
  }
  unsetenv("TEST_HOSTS");
}

/* A BARRIER WITH A HANDLE: not done before the last rank has come, whichever way that comes. */

static int run_barrier_async(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g), i;
  int32_t go = 1, x = 1;
  bool done = true;
  cddp_work *w[3];
  (void)arg;
  if (rank == 0) {
    CHECK_OK(cddp_barrier_async(g, &w[0]));
    CHECK_OK(cddp_all_reduce(g, &x, 1, CDDP_I32, CDDP_SUM, &w[1]));
    CHECK_OK(cddp_barrier_async(g, &w[2]));
    ranks_sleep(0.02);
    CHECK_OK(cddp_test(w[0], &done));
    CHECK(!done);
    CHECK_IS(cddp_wait_for(w[2], 0.02), CDDP_TIMEOUT);
    CHECK(strstr(cddp_error(), "barrier") != NULL);
    CHECK_IS(cddp_cancel(w[2]), CDDP_UNSUPPORTED);
    for (i = 1; i < cddp_world_size(g); i++) CHECK_OK(cddp_send(g, &go, 1, CDDP_I32, i, 0, NULL));
    for (i = 2; i >= 0; i--) CHECK_OK(cddp_wait(w[i]));
  } else {
    CHECK_OK(cddp_recv(g, &go, 1, CDDP_I32, 0, 0, NULL));
    CHECK_OK(cddp_barrier(g)); /* without a handle it is the same barrier */
    CHECK_OK(cddp_all_reduce(g, &x, 1, CDDP_I32, CDDP_SUM, NULL));
    CHECK_OK(cddp_barrier_async(g, &w[2]));
    CHECK_OK(cddp_wait(w[2]));
  }
  CHECK_EQ(x, cddp_world_size(g));
  return test_failures != before;
}

static void test_barrier_async(void) {
  CHECK_OK(ranks_run(run_barrier_async, NULL, 3, false));
  CHECK_OK(ranks_run(run_barrier_async, NULL, 3, true));
  if (getenv("TEST_HOSTS") != NULL) return;
  setenv("TEST_HOSTS", "aab", 1);
  CHECK_OK(ranks_run(run_barrier_async, NULL, 3, false));
  unsetenv("TEST_HOSTS");
}

/* NaN ------------------------------------------------------------------------------------------ */

static int run_nan(cddp_group *g, void *arg) {
  int before = test_failures, dtype, op, rank = cddp_rank(g), world = cddp_world_size(g);
  unsigned char buf[64];
  (void)arg;
  for (dtype = CDDP_F32; dtype <= CDDP_BF16; dtype++)
    for (op = CDDP_SUM; op <= CDDP_MAX; op++) {
      int i;
      for (i = 0; i < 8; i++)
        ranks_store((cddp_dtype)dtype, buf, (size_t)i, i == rank ? (double)NAN : 1.0);
      CHECK_OK(cddp_all_reduce(g, buf, 8, (cddp_dtype)dtype, (cddp_op)op, NULL));
      for (i = 0; i < 8; i++)
        CHECK(!!isnan(ranks_load((cddp_dtype)dtype, buf, (size_t)i)) == (i < world));
    }
  return test_failures != before;
}

static void test_nan(void) {
  CHECK_OK(ranks_run(run_nan, NULL, 3, false));
  CHECK_OK(ranks_run(run_nan, NULL, 4, true));
  CHECK_OK(ranks_run(run_nan, NULL, 1, true));
}

/* ASYNCHRONOUS --------------------------------------------------------------------------------- */

#define FLIGHTS 100

static void flight_call(flight *f, int j, uint64_t seed) {
  static const size_t counts[] = {5, 64, 333, 0, 1, 600};
  memset(&f->c, 0, sizeof f->c);
  f->c.kind = j % KINDS;
  f->c.dtype = (cddp_dtype)(j / 3 % 8);
  f->c.op = (cddp_op)(j / 2 % 5);
  f->c.n = counts[j % 6];
  f->c.root = j % f->world;
  f->c.memory = j / 5 % MEMORIES;
  f->c.in_place = j % 7 == 0;
  f->c.exact = j % 4 == 0;
  f->c.seed = seed + (uint64_t)j;
}

/* Blocking calls go between asynchronous ones and see the order of the calls. */
static void sync_between(cddp_group *g) {
  int32_t one = 1;
  CHECK_OK(cddp_all_reduce(g, &one, 1, CDDP_I32, CDDP_SUM, NULL));
  CHECK(one == cddp_world_size(g));
  CHECK_OK(cddp_barrier(g));
}

static void poll_until_done(cddp_work *w) {
  double deadline = test_now() + 20;
  bool done = false;
  while (!done && test_now() < deadline) {
    CHECK_OK(cddp_test(w, &done));
    if (!done) ranks_sleep(1e-5);
  }
  CHECK(done);
}

/* Frees w; its end and that of a short wait come together now and then. */
static cddp_result short_waits(cddp_work *w) {
  double deadline = test_now() + 20;
  cddp_result r;
  while ((r = cddp_wait_for(w, 1e-4)) == CDDP_TIMEOUT && test_now() < deadline) {}
  return r;
}

static int run_in_flight(cddp_group *g, void *arg) {
  int before = test_failures, order[FLIGHTS], round, j, opened = 0;
  flight *f = (flight *)calloc(FLIGHTS, sizeof *f);
  (void)arg;
  for (j = 0; f != NULL && j < FLIGHTS; j++) {
    if (!flight_open(&f[j], g, (size_t)cddp_world_size(g) * 600 * 8 + 512)) break;
    opened++;
  }
  for (round = 0; opened == FLIGHTS && round < 10 && test_failures == before; round++) {
    ranks_shuffle(order, FLIGHTS,
                  (uint64_t)(round * 100 + cddp_rank(g))); /* another order on each rank */
    for (j = 0; round == 0 && j < FLIGHTS; j++) order[j] = FLIGHTS - 1 - j;
    for (j = 0; j < FLIGHTS; j++) {
      flight_call(&f[j], j, (uint64_t)round * 1000);
      prepare(&f[j]);
    }
    for (j = 0; j < FLIGHTS; j++) {
      CHECK_OK(start(g, &f[j], true));
      if (round == 2 && j % 40 == 39) sync_between(g);
    }
    if (round == 1) sync_between(g);
    for (j = 0; j < FLIGHTS; j++) {
      flight *one = &f[order[j]];
      if (round == 3) poll_until_done(one->work);
      CHECK_OK(round >= 4 ? short_waits(one->work) : cddp_wait(one->work));
      verify(one);
    }
    sync_between(g);
  }
  for (j = 0; j < opened; j++) flight_close(&f[j], g);
  free(f);
  return test_failures != before;
}

static void test_in_flight(void) {
  static const int ranks[] = {1, 2, 3, 7, 16};
  int i;
  for (i = 0; i < 5; i++) {
    CHECK_OK(ranks_run(run_in_flight, NULL, ranks[i], false));
    CHECK_OK(ranks_run(run_in_flight, NULL, ranks[i] > 7 ? 5 : ranks[i], true));
  }
}

/* A call with a handle has the rounding that its caller had, whichever thread runs it: 1 + 2^-30 is
   1 to nearest, and more upward. */
static int run_rounding(cddp_group *g, void *arg) {
  enum { MOST = 4096 };
  int before = test_failures, rank = cddp_rank(g), k;
  float x[MOST] = {0};
  cddp_work *w;
  (void)arg;
  for (k = 0; k < 8 && test_failures == before; k++) {
    bool upward = k & 1, late = (k >> 1 & 1) == rank;
    size_t n = k < 4 ? 4 : MOST, i;
    float want = upward ? 1 + FLT_EPSILON : 1;
    CHECK_OK(cddp_all_reduce(g, x, 1, CDDP_F32, CDDP_MAX, NULL)); /* cddp sees: to nearest */
    for (i = 0; i < n; i++) x[i] = rank == 0 ? 1 : 0x1p-30f;
    if (upward) fesetround(FE_UPWARD);
    CHECK_OK(cddp_all_reduce(g, x, n, CDDP_F32, CDDP_SUM, &w));
    if (late) ranks_sleep(0.03); /* cddp's thread runs it */
    if (!upward) fesetround(FE_UPWARD);
    CHECK_OK(cddp_wait(w));
    CHECK_EQ(fegetround(), FE_UPWARD);
    fesetround(FE_TONEAREST);
    for (i = 0; i < n && x[i] == want; i++) {}
    CHECK_EQ(i, n);
  }
  return test_failures != before;
}

static void test_rounding(void) {
  CHECK_OK(ranks_run(run_rounding, NULL, 2, false));
  CHECK_OK(ranks_run(run_rounding, NULL, 2, true));
}

/* A large operation in flight: cddp_test says "not yet" without blocking while a peer is late. */
static int run_test_does_not_block(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g);
  size_t n = 300000, i;
  int32_t *buf = (int32_t *)malloc(n * 4);
  cddp_work *w;
  bool done = true;
  double entered;
  (void)arg;
  CHECK(buf != NULL);
  if (buf == NULL) return 1;
  for (i = 0; i < n; i++) buf[i] = rank + 1;
  entered = test_now();
  CHECK_OK(cddp_barrier(g));
  if (rank == 1) ranks_sleep(0.4);
  {
    double t = test_now();
    CHECK_OK(cddp_all_reduce(g, buf, n, CDDP_I32, CDDP_SUM, &w));
    CHECK(test_now() - t < RANKS_WITHIN(0.2));
    if (rank != 1 && !RANKS_SLOW) {
      CHECK_OK(cddp_test(w, &done));
      if (test_now() - entered < 0.4) CHECK(!done); /* rank 1 still sleeps */
    }
  }
  CHECK_OK(cddp_wait(w));
  for (i = 0; i < n && buf[i] == 6; i++) {}
  CHECK(i == n);
  free(buf);
  return test_failures != before;
}

static void test_test_does_not_block(void) {
  CHECK_OK(ranks_run(run_test_does_not_block, NULL, 3, false));
  CHECK_OK(ranks_run(run_test_does_not_block, NULL, 3, true));
}

/* MISUSE --------------------------------------------------------------------------------------- */

static void misuse_dtype_op_root(cddp_group *g, void *a, void *b) {
  int w = cddp_world_size(g);
  CHECK_INVALID(cddp_all_reduce(g, a, 1, (cddp_dtype)8, CDDP_SUM, NULL));
  CHECK_INVALID(cddp_all_reduce(g, a, 1, (cddp_dtype)-1, CDDP_SUM, NULL));
  CHECK_INVALID(cddp_all_reduce(g, a, 1, CDDP_I32, (cddp_op)8, NULL));
  CHECK_INVALID(cddp_all_reduce(g, a, 1, CDDP_F32, CDDP_BAND, NULL));
  CHECK_INVALID(cddp_reduce(g, a, 1, CDDP_BF16, CDDP_BXOR, 0, NULL));
  CHECK(strstr(cddp_error(), "for integers") != NULL);
  CHECK_INVALID(cddp_all_reduce(g, a, 1, CDDP_F32, (cddp_op)-1, NULL));
  CHECK_INVALID(cddp_reduce(g, a, 1, (cddp_dtype)99, CDDP_SUM, 0, NULL));
  CHECK_INVALID(cddp_reduce(g, a, 1, CDDP_F32, (cddp_op)99, 0, NULL));
  CHECK_INVALID(cddp_reduce_scatter(g, a, b, 1, (cddp_dtype)99, CDDP_SUM, NULL));
  CHECK_INVALID(cddp_reduce_scatter(g, a, b, 1, CDDP_F32, (cddp_op)99, NULL));
  CHECK_INVALID(cddp_broadcast(g, a, 1, (cddp_dtype)99, 0, NULL));
  CHECK_INVALID(cddp_all_gather(g, a, b, 1, (cddp_dtype)99, NULL));
  CHECK_INVALID(cddp_gather(g, a, b, 1, (cddp_dtype)99, 0, NULL));
  CHECK_INVALID(cddp_scatter(g, a, b, 1, (cddp_dtype)99, 0, NULL));
  CHECK_INVALID(cddp_all_to_all(g, a, b, 1, (cddp_dtype)99, NULL));
  CHECK_INVALID(cddp_reduce(g, a, 1, CDDP_F32, CDDP_SUM, w, NULL));
  CHECK_INVALID(cddp_reduce(g, a, 1, CDDP_F32, CDDP_SUM, -1, NULL));
  CHECK_INVALID(cddp_broadcast(g, a, 1, CDDP_F32, w, NULL));
  CHECK_INVALID(cddp_broadcast(g, a, 1, CDDP_F32, -1, NULL));
  CHECK_INVALID(cddp_gather(g, a, b, 1, CDDP_F32, w, NULL));
  CHECK_INVALID(cddp_scatter(g, a, b, 1, CDDP_F32, -1, NULL));
}

/* The wrong root is told as the caller gave it. */
static void misuse_root_text(cddp_group *g, void *a) {
  CHECK_INVALID(cddp_broadcast(g, a, 1, CDDP_F32, -1, NULL));
  CHECK(strstr(cddp_error(), "root is -1;") != NULL);
  CHECK_INVALID(cddp_reduce(g, a, 1, CDDP_F32, CDDP_SUM, INT_MIN, NULL));
  CHECK(strstr(cddp_error(), "root is -2147483648;") != NULL);
}

/* Buffers that overlap, but not as in place. 3 ranks; those that use one buffer only are right. */
static void misuse_overlap(cddp_group *g) {
  int32_t x[16] = {0};
  int rank = cddp_rank(g);
  CHECK_INVALID(cddp_all_gather(g, x + (rank + 1) % 3, x, 1, CDDP_I32, NULL));
  CHECK_INVALID(cddp_all_gather(g, (char *)(x + rank) + 2, x, 2, CDDP_I32, NULL));
  CHECK_INVALID(cddp_reduce_scatter(g, x, x + (rank + 2) % 3, 1, CDDP_I32, CDDP_SUM, NULL));
  CHECK_INVALID(cddp_all_to_all(g, x, x + 2, 1, CDDP_I32, NULL));
  CHECK_INVALID(cddp_all_to_all(g, x + 2, x, 1, CDDP_I32, NULL));
  CHECK_INVALID(cddp_gather(g, x + (rank + 1) % 3, x, 1, CDDP_I32, rank, NULL));
  CHECK_INVALID(cddp_scatter(g, x, x + (rank + 1) % 3, 1, CDDP_I32, rank, NULL));
  CHECK(strstr(cddp_error(), "overlap") != NULL);
  CHECK_OK(cddp_all_to_all(g, x, x + 3, 1, CDDP_I32, NULL)); /* side by side */
  CHECK_OK(cddp_all_gather(g, x + rank, x, 1, CDDP_I32, NULL)); /* in place */
  CHECK_OK(cddp_gather(g, x + rank, x, 1, CDDP_I32, 1, NULL));
  CHECK_OK(cddp_scatter(g, x, x + rank, 1, CDDP_I32, 2, NULL));
  CHECK_OK(cddp_reduce_scatter(g, x, x + rank, 1, CDDP_I32, CDDP_SUM, NULL));
  CHECK_OK(cddp_all_to_all(g, x, x, 1, CDDP_I32, NULL));
}

static void misuse_pointers(cddp_group *g, void *a, void *b) {
  int rank = cddp_rank(g);
  bool done;
  CHECK_INVALID(cddp_all_reduce(NULL, a, 1, CDDP_F32, CDDP_SUM, NULL));
  CHECK_INVALID(cddp_reduce(NULL, a, 1, CDDP_F32, CDDP_SUM, 0, NULL));
  CHECK_INVALID(cddp_broadcast(NULL, a, 1, CDDP_F32, 0, NULL));
  CHECK_INVALID(cddp_all_gather(NULL, a, b, 1, CDDP_F32, NULL));
  CHECK_INVALID(cddp_gather(NULL, a, b, 1, CDDP_F32, 0, NULL));
  CHECK_INVALID(cddp_scatter(NULL, a, b, 1, CDDP_F32, 0, NULL));
  CHECK_INVALID(cddp_reduce_scatter(NULL, a, b, 1, CDDP_F32, CDDP_SUM, NULL));
  CHECK_INVALID(cddp_all_to_all(NULL, a, b, 1, CDDP_F32, NULL));
  CHECK_INVALID(cddp_barrier(NULL));
  CHECK_INVALID(cddp_all_reduce(g, NULL, 1, CDDP_F32, CDDP_SUM, NULL));
  CHECK_INVALID(cddp_reduce(g, NULL, 1, CDDP_F32, CDDP_SUM, 0, NULL));
  CHECK_INVALID(cddp_broadcast(g, NULL, 1, CDDP_F32, 0, NULL));
  CHECK_INVALID(cddp_all_gather(g, NULL, b, 1, CDDP_F32, NULL));
  CHECK_INVALID(cddp_all_gather(g, a, NULL, 1, CDDP_F32, NULL));
  CHECK_INVALID(cddp_gather(g, NULL, b, 1, CDDP_F32, 0, NULL));
  CHECK_INVALID(cddp_gather(g, a, NULL, 1, CDDP_F32, rank, NULL));
  CHECK_INVALID(cddp_scatter(g, NULL, b, 1, CDDP_F32, rank, NULL));
  CHECK_INVALID(cddp_scatter(g, a, NULL, 1, CDDP_F32, 0, NULL));
  CHECK_INVALID(cddp_reduce_scatter(g, NULL, b, 1, CDDP_F32, CDDP_SUM, NULL));
  CHECK_INVALID(cddp_reduce_scatter(g, a, NULL, 1, CDDP_F32, CDDP_SUM, NULL));
  CHECK_INVALID(cddp_all_to_all(g, NULL, b, 1, CDDP_F32, NULL));
  CHECK_INVALID(cddp_all_to_all(g, a, NULL, 1, CDDP_F32, NULL));
  CHECK_INVALID(cddp_wait(NULL));
  CHECK_INVALID(cddp_test(NULL, &done));
  CHECK(cddp_alloc(NULL, 16) == NULL);
  CHECK(cddp_error()[0] != 0);
  cddp_free(g, NULL);
}

static void misuse_counts(cddp_group *g, void *a, void *b) {
  size_t huge = SIZE_MAX / 4 + 2;
  CHECK_INVALID(cddp_all_reduce(g, a, SIZE_MAX, CDDP_F32, CDDP_SUM, NULL));
  CHECK_INVALID(cddp_all_reduce(g, a, huge, CDDP_F32, CDDP_SUM, NULL));
  CHECK_INVALID(cddp_reduce(g, a, huge, CDDP_F32, CDDP_SUM, 0, NULL));
  CHECK_INVALID(cddp_broadcast(g, a, huge, CDDP_F32, 0, NULL));
  CHECK_INVALID(cddp_all_gather(g, a, b, huge, CDDP_F32, NULL));
  CHECK_INVALID(cddp_gather(g, a, b, huge, CDDP_F32, 0, NULL));
  CHECK_INVALID(cddp_scatter(g, a, b, huge, CDDP_F32, 0, NULL));
  CHECK_INVALID(cddp_reduce_scatter(g, a, b, huge, CDDP_F32, CDDP_SUM, NULL));
  CHECK_INVALID(cddp_all_to_all(g, a, b, huge, CDDP_F32, NULL));
  CHECK_INVALID(
      cddp_all_gather(g, a, b, SIZE_MAX / 8 - 1, CDDP_I64, NULL)); /* overflows times the world */
  CHECK_INVALID(cddp_all_gather(g, a, b, SIZE_MAX, CDDP_U8, NULL));
}

static void null_with_count_zero(cddp_group *g) {
  CHECK_OK(cddp_all_reduce(g, NULL, 0, CDDP_F32, CDDP_SUM, NULL));
  CHECK_OK(cddp_broadcast(g, NULL, 0, CDDP_F32, 0, NULL));
  CHECK_OK(cddp_all_gather(g, NULL, NULL, 0, CDDP_F32, NULL));
  CHECK_OK(cddp_reduce_scatter(g, NULL, NULL, 0, CDDP_F32, CDDP_AVG, NULL));
  CHECK_OK(cddp_all_to_all(g, NULL, NULL, 0, CDDP_F32, NULL));
}

/* A buffer at an address that is no multiple of the element's size is refused before anything
   moves, with a handle too; the group goes on. */
static int run_misaligned(cddp_group *g, void *arg) {
  static uint64_t memory[2][64];
  size_t counts[8], at, sides;
  bool root = cddp_rank(g) == 0;
  cddp_work *w, **handle;
  int dtype, k;
  (void)arg;
  for (at = 0; at < 8; at++) counts[at] = 1;
  for (dtype = CDDP_F32; dtype <= CDDP_I64; dtype++)
    for (at = 1; at < cddp_dtype_size((cddp_dtype)dtype); at++)
      for (sides = 1; sides < 4; sides++)
        for (k = 0; k < 24; k++) {
          char *a = (char *)memory[0] + (sides & 1 ? at : 0);
          char *b = (char *)memory[1] + (sides & 2 ? at : 0);
          cddp_dtype d = (cddp_dtype)dtype;
          cddp_result r = CDDP_OK;
          handle = k % 2 ? &w : NULL;
          if (k / 2 < 5 && sides != 1) continue; /* calls with one buffer */
          switch (k / 2) {
          case 0: r = cddp_all_reduce(g, a, 1, d, CDDP_SUM, handle); break;
          case 1: r = cddp_reduce(g, a, 1, d, CDDP_SUM, 0, handle); break;
          case 2: r = cddp_broadcast(g, a, 1, d, 0, handle); break;
          case 3: r = cddp_send(g, a, 1, d, 0, 0, handle); break;
          case 4: r = cddp_recv(g, a, 1, d, 0, 0, handle); break;
          case 5: r = cddp_all_gather(g, a, b, 1, d, handle); break;
          case 6: r = cddp_reduce_scatter(g, a, b, 1, d, CDDP_SUM, handle); break;
          case 7: r = cddp_all_to_all(g, a, b, 1, d, handle); break;
          case 8: r = cddp_all_gather_v(g, a, b, counts, d, handle); break;
          case 9: r = cddp_all_to_all_v(g, a, counts, b, counts, d, handle); break;
          case 10: /* only the root's b is used */
            if (!root && sides == 2) continue;
            r = cddp_gather(g, a, b, 1, d, 0, handle);
            break;
          default: /* only the root's a */
            if (!root && sides == 1) continue;
            r = cddp_scatter(g, a, b, 1, d, 0, handle);
          }
          CHECK_IS(r, CDDP_INVALID_ARGUMENT);
          CHECK(strstr(cddp_error(), "aligned") != NULL);
          CHECK(handle == NULL || w == NULL);
        }
  CHECK_OK(cddp_barrier(g));
  return 0;
}

static int run_misuse(cddp_group *g, void *arg) {
  int before = test_failures;
  double a[16] = {0}, b[16] = {0};
  int32_t one = 1;
  (void)arg;
  misuse_dtype_op_root(g, a, b);
  misuse_pointers(g, a, b);
  misuse_root_text(g, a);
  if (cddp_world_size(g) > 1) misuse_counts(g, a, b);
  if (cddp_world_size(g) == 3) misuse_overlap(g);
  null_with_count_zero(g);
  CHECK_OK(
      cddp_all_reduce(g, &one, 1, CDDP_I32, CDDP_SUM, NULL)); /* nothing was sent, nothing broke */
  CHECK(one == cddp_world_size(g));
  return test_failures != before;
}

static void test_misaligned(void) {
  CHECK_OK(ranks_run(run_misaligned, NULL, 3, false));
  CHECK_OK(ranks_run(run_misaligned, NULL, 2, true));
  CHECK_OK(ranks_run(run_misaligned, NULL, 1, false));
}

static void test_misuse(void) {
  CHECK_OK(ranks_run(run_misuse, NULL, 3, false));
  CHECK_OK(ranks_run(run_misuse, NULL, 3, true));
  CHECK_OK(ranks_run(run_misuse, NULL, 1, true));
}

/* A NULL work handle from a call that failed at once is not left dangling. */
static int run_failed_async(cddp_group *g, void *arg) {
  int before = test_failures;
  double a[2] = {1, 1};
  cddp_work *w = NULL;
  (void)arg;
  CHECK_IS(cddp_all_reduce(g, NULL, 1, CDDP_F32, CDDP_SUM, &w), CDDP_INVALID_ARGUMENT);
  CHECK(w == NULL);
  CHECK_OK(cddp_all_reduce(g, a, 2, CDDP_F64, CDDP_SUM, &w));
  CHECK(w != NULL);
  CHECK_OK(cddp_wait(w));
  CHECK(a[1] == 2.0);
  return test_failures != before;
}

static void test_failed_async(void) {
  CHECK_OK(ranks_run(run_failed_async, NULL, 2, false));
  CHECK_OK(ranks_run(run_failed_async, NULL, 2, true));
}

/* MISMATCH: rank 1 of 3 does something else. --------------------------------------------------- */

#define MISMATCHES 12

static cddp_result mismatched(cddp_group *g, int variant, bool odd, void *buf, cddp_work **w) {
  char *b = (char *)buf, *b2 = b + (4 << 20);
  switch (variant) {
  case 0:
    if (odd) return cddp_broadcast(g, b, 10, CDDP_F32, 0, w);
    return cddp_all_reduce(g, b, 10, CDDP_F32, CDDP_SUM, w);
  case 1:
    return cddp_all_reduce(g, b, odd ? 11 : 10, CDDP_F32, CDDP_SUM, w);
  case 2:
    return cddp_all_reduce(g, b, 10, odd ? CDDP_I32 : CDDP_F32, CDDP_SUM, w);
  case 3:
    return cddp_all_reduce(g, b, 10, CDDP_F32, odd ? CDDP_MAX : CDDP_SUM, w);
  case 4:
    return cddp_broadcast(g, b, 10, CDDP_F32, odd ? 1 : 0, w);
  case 5:
    if (odd) return cddp_barrier(g);
    return cddp_all_gather(g, b, b2, 10, CDDP_F32, w);
  case 6:
    return cddp_all_reduce(g, b, odd ? 100001 : 100000, CDDP_F32, CDDP_SUM, w);
  case 7:
    if (odd) return cddp_reduce_scatter(g, b, b2, 10, CDDP_F32, CDDP_SUM, w);
    return cddp_all_to_all(g, b, b2, 10, CDDP_F32, w);
  case 8:
    return cddp_all_reduce(g, b, odd ? 1 : 1000000, CDDP_F32, CDDP_SUM, w);
  case 9:
    return cddp_all_reduce(g, b, odd ? 1000000 : 1, CDDP_F32, CDDP_SUM, w);
  case 10:
    return cddp_gather(g, b, b2, 10, CDDP_F32, odd ? 2 : 0, w);
  default:
    if (odd) return cddp_scatter(g, b, b2, 100000, CDDP_F32, 0, w);
    return cddp_gather(g, b, b2, 100000, CDDP_F32, 0, w);
  }
}

/* Both texts must be in the error on every rank. */
static const char *const mismatch_texts[MISMATCHES][2] = {{"all_reduce", "broadcast"},
                                                          {"10", "11"},
                                                          {"all_reduce", "f32"},
                                                          {"all_reduce", "max"},
                                                          {"broadcast", "1"},
                                                          {"all_gather", "barrier"},
                                                          {"100000", "100001"},
                                                          {"reduce_scatter", "all_to_all"},
                                                          {"1000000", "all_reduce"},
                                                          {"1000000", "all_reduce"},
                                                          {"gather", "2"},
                                                          {"scatter", "gather"}};

static bool mentions(const char *text) { return strcasestr(cddp_error(), text) != NULL; }

typedef struct variant {
  int which;
  bool async;
} variant;

static int run_mismatch(cddp_group *g, void *arg) {
  const variant *v = (const variant *)arg;
  int before = test_failures, rank = cddp_rank(g);
  char *buf = (char *)calloc(1, 8 << 20);
  cddp_work *w = NULL;
  cddp_result r;
  bool told;
  double t;
  CHECK(buf != NULL);
  if (buf == NULL) return 1;
  CHECK_OK(cddp_barrier(g));
  if (rank == 1 && v->which % 2 == 0) ranks_sleep(0.02);
  r = mismatched(g, v->which, rank == 1, buf, v->async ? &w : NULL);
  if (w != NULL) {
    CHECK_OK(r);
    r = cddp_wait(w);
  }
  CHECK_IS(r, CDDP_MISMATCH);
  told = mentions(mismatch_texts[v->which][0]) && mentions(mismatch_texts[v->which][1]);
  CHECK(told); /* the text says who called what */
  if (!told) fprintf(stderr, "variant %d of mismatched()\n", v->which);
  t = test_now();
  CHECK_IS(cddp_barrier(g), CDDP_MISMATCH); /* broken: the same answer, at once */
  CHECK(mentions(mismatch_texts[v->which][0]));
  CHECK_IS(cddp_all_reduce(g, buf, 1, CDDP_F32, CDDP_SUM, NULL), CDDP_MISMATCH);
  CHECK(test_now() - t < RANKS_WITHIN(0.2));
  free(buf);
  return test_failures != before;
}

static int run_good(cddp_group *g, void *arg) {
  int32_t one = 1;
  (void)arg;
  CHECK_OK(cddp_all_reduce(g, &one, 1, CDDP_I32, CDDP_SUM, NULL));
  CHECK(one == cddp_world_size(g));
  return one != cddp_world_size(g);
}

static void test_mismatch(void) {
  variant v;
  for (v.which = 0; v.which < MISMATCHES; v.which++) {
    v.async = v.which % 2 == 1 && v.which != 5;
    CHECK_OK(ranks_run(run_mismatch, &v, 3, true));
    v.async = v.which % 3 == 1 && v.which != 5;
    CHECK_OK(ranks_run(run_mismatch, &v, 3, false));
  }
  CHECK_OK(ranks_run(run_good, NULL, 3, true)); /* new groups work */
  CHECK_OK(ranks_run(run_good, NULL, 3, false));
}

/* Operations in another order on one rank: found at the first, told by both. */
static int run_swapped(cddp_group *g, void *arg) {
  int before = test_failures, odd = cddp_rank(g) == 1;
  float a = 1, b = 2;
  cddp_work *w[2] = {NULL, NULL};
  cddp_result second;
  (void)arg;
  if (odd) {
    CHECK_OK(cddp_broadcast(g, &b, 1, CDDP_F32, 0, &w[0]));
    second = cddp_all_reduce(g, &a, 1, CDDP_F32, CDDP_SUM, &w[1]);
  } else {
    CHECK_OK(cddp_all_reduce(g, &a, 1, CDDP_F32, CDDP_SUM, &w[0]));
    second = cddp_broadcast(g, &b, 1, CDDP_F32, 0, &w[1]);
  }
  if (second == CDDP_OK) second = cddp_wait(w[1]); /* the first may have failed already */
  CHECK_IS(second, CDDP_MISMATCH);
  CHECK(mentions("all_reduce") && mentions("broadcast"));
  CHECK_IS(cddp_wait(w[0]), CDDP_MISMATCH);
  return test_failures != before;
}

static void test_swapped(void) {
  CHECK_OK(ranks_run(run_swapped, NULL, 3, true));
  CHECK_OK(ranks_run(run_swapped, NULL, 3, false));
}

/* LOST RANKS ----------------------------------------------------------------------------------- */

enum { KILLED, EXITED, LEFT, KILLED_LARGE, KILLED_ASYNC, KILLED_BARRIER, LOSSES };

typedef struct loss {
  int how;
  double *died_at; /* shared */
  char file[256];
} loss;

static cddp_result lossy_step(cddp_group *g, int how, float *buf) {
  cddp_work *w[3];
  cddp_result r = CDDP_OK, one;
  int i;
  if (how == KILLED_BARRIER) return cddp_barrier(g);
  if (how == KILLED_LARGE) return cddp_all_reduce(g, buf, 500000, CDDP_F32, CDDP_SUM, NULL);
  if (how != KILLED_ASYNC) return cddp_all_reduce(g, buf, 16, CDDP_F32, CDDP_SUM, NULL);
  for (i = 0; i < 3; i++)
    if (cddp_all_reduce(g, buf + i * 16, 16, CDDP_F32, CDDP_AVG, &w[i]) != CDDP_OK) break;
  if (i == 0) return cddp_all_reduce(g, buf, 16, CDDP_F32, CDDP_AVG, NULL);
  while (i > 0) {
    one = cddp_wait(w[--i]);
    if (one != CDDP_OK) r = one;
  }
  return r;
}

static void die(cddp_group *g, const loss *l) {
  *l->died_at = test_now();
  if (l->how == LEFT) {
    cddp_destroy(g);
    ranks_sleep(1.5);
    _exit(0);
  }
  if (l->how == EXITED) _exit(0);
  kill(getpid(), SIGKILL);
}

static int lossy_rank(int rank, void *arg) {
  const loss *l = (const loss *)arg;
  int before = test_failures, i, loops = 50;
  float *buf = (float *)calloc(500000, sizeof *buf);
  cddp_group_desc desc;
  cddp_result r = CDDP_OK;
  cddp_group *g;
  double t;
  memset(&desc, 0, sizeof desc);
  desc.init_method = l->file;
  desc.rank = rank;
  desc.world_size = 3;
  desc.timeout_s = 30;
  CHECK_OK(cddp_init(&g, &desc));
  if (g == NULL || buf == NULL) return 1;
  for (i = 0; r == CDDP_OK && i < 100000; i++) {
    if (i == loops && rank == 2) die(g, l);
    r = lossy_step(g, l->how, buf);
  }
  CHECK_IS(r, CDDP_PEER_LOST);
  CHECK(*l->died_at > 0 && test_now() - *l->died_at < RANKS_WITHIN(1.0));
  CHECK(mentions("rank 2"));
  t = test_now();
  CHECK_IS(cddp_barrier(g), CDDP_PEER_LOST);
  CHECK(mentions("rank 2"));
  CHECK(test_now() - t < RANKS_WITHIN(0.2));
  ranks_sleep(0.1); /* a survivor that leaves must not be taken for the dead rank by the other */
  cddp_destroy(g);
  CHECK(test_now() - t < RANKS_WITHIN(0.5));
  free(buf);
  return test_failures != before;
}

static void test_dead_rank(void) {
  char dir[] = P_tmpdir "/cddp_collectives_XXXXXX";
  loss l;
  int status[3];
  memset(&l, 0, sizeof l);
  l.died_at = (double *)ranks_shared(4096);
  CHECK(mkdtemp(dir) != NULL);
  for (l.how = 0; l.how < LOSSES; l.how++) {
    *l.died_at = 0;
    snprintf(l.file, sizeof l.file, "file://%s/%d", dir, l.how);
    ranks_script(lossy_rank, &l, 3, 30, status);
    CHECK(status[0] == 0);
    CHECK(status[1] == 0);
    CHECK(l.how == EXITED || l.how == LEFT ? status[2] == 0 : WIFSIGNALED(status[2]));
    CHECK(ranks_no_children());
    unlink(l.file + 7);
  }
  CHECK(rmdir(dir) == 0);
  munmap(l.died_at, 4096);
}

static int run_thread_leaves(cddp_group *g, void *arg) {
  int before = test_failures, rank = cddp_rank(g), i;
  float x[4] = {0};
  cddp_result r = CDDP_OK;
  (void)arg;
  for (i = 0; r == CDDP_OK && i < 100000; i++) {
    if (i == 20 && rank == 1) return 5;
    r = cddp_all_reduce(g, x, 4, CDDP_F32, CDDP_SUM, NULL);
  }
  CHECK_IS(r, CDDP_PEER_LOST);
  CHECK(mentions("rank 1"));
  return test_failures != before;
}

static void test_thread_leaves(void) {
  double t = test_now();
  CHECK_IS(ranks_run(run_thread_leaves, NULL, 3, true), CDDP_PEER_LOST);
  CHECK(mentions("rank 1"));
  CHECK(test_now() - t < RANKS_WITHIN(1.5));
}

/* TIMEOUTS ------------------------------------------------------------------------------------- */

static int late_rank(int rank, void *arg) {
  const variant *v = (const variant *)arg;
  int before = test_failures;
  float *x = (float *)calloc(200000, sizeof *x);
  size_t n = v->which & 1 ? 200000 : 3;
  cddp_group_desc desc;
  cddp_group *g;
  cddp_work *w = NULL;
  cddp_result r;
  double t;
  memset(&desc, 0, sizeof desc);
  if (v->which & 2)
    setenv("CDDP_TIMEOUT_S", "0.3", 1);
  else
    desc.timeout_s = 0.3;
  CHECK_OK(cddp_init(&g, &desc));
  if (g == NULL || x == NULL) return 1;
  CHECK_OK(cddp_barrier(g));
  if (rank == 2) ranks_sleep(0.9);
  t = test_now();
  r = cddp_all_reduce(g, x, n, CDDP_F32, CDDP_SUM, v->async ? &w : NULL);
  if (w != NULL) r = cddp_wait(w);
  t = test_now() - t;
  if (rank == 2) {
    CHECK(r != CDDP_OK);
  } else {
    CHECK_IS(r, CDDP_TIMEOUT);
    CHECK(mentions("rank 2") && strstr(cddp_error(), "rank ") == strstr(cddp_error(), "rank 2"));
    CHECK(mentions("all_reduce"));
    CHECK(t > 0.28 && t < 0.3 + RANKS_WITHIN(0.25));
    t = test_now();
    CHECK_IS(cddp_barrier(g), CDDP_TIMEOUT);
    CHECK(test_now() - t < RANKS_WITHIN(0.1));
    ranks_sleep(0.7);
  }
  t = test_now();
  cddp_destroy(g);
  CHECK(test_now() - t < RANKS_WITHIN(0.5));
  free(x);
  return test_failures != before;
}

/* STOPPED IN THE MIDDLE. Rank 1 is stopped while it writes its part of an all_reduce into the
   others' memory, and goes on when they have had their failure, have freed that memory and have
   allocated again: nothing of it may arrive there. Their own group goes on. -------------------- */

/* Ranks 0 and 2 after their failure, with the victim stopped, and then not. */
static void after_stop(cddp_group *pair, float *buf, pid_t victim) {
  float *again;
  cddp_free(pair, buf);
  again = (float *)cddp_alloc(pair, RANKS_STOP_COUNT * sizeof *buf);
  CHECK(again != NULL && again != buf);
  ranks_fill(again, 5);
  buf = (float *)cddp_alloc(pair, RANKS_STOP_COUNT * sizeof *buf);
  ranks_fill(buf, 7);
  CHECK_OK(cddp_all_reduce(pair, buf, RANKS_STOP_COUNT, CDDP_F32, CDDP_SUM, NULL));
  CHECK(ranks_holds(buf, 14));
  if (cddp_rank(pair) == 0) kill(victim, SIGCONT);
  ranks_sleep(0.5);
  CHECK(ranks_holds(buf, 14) && ranks_holds(again, 5));
  CHECK_OK(cddp_all_reduce(pair, buf, RANKS_STOP_COUNT, CDDP_F32, CDDP_AVG, NULL));
  CHECK(ranks_holds(buf, 14));
}

static int stopped_rank(int rank, void *arg) {
  int before = test_failures;
  cddp_group_desc desc;
  cddp_group *g, *pair;
  int32_t pids[3];
  cddp_result r;
  float *buf;
  (void)arg;
  memset(&desc, 0, sizeof desc);
  desc.timeout_s = RANKS_STOP_TIMEOUT;
  CHECK_OK(cddp_init(&g, &desc));
  if (g == NULL) return 1;
  CHECK_OK(cddp_group_split(g, rank == 1 ? -1 : 0, rank, &pair));
  pids[rank] = (int32_t)getpid();
  CHECK_OK(cddp_all_gather(g, &pids[rank], pids, 1, CDDP_I32, NULL));
  buf = (float *)cddp_alloc(g, RANKS_STOP_COUNT * sizeof *buf);
  ranks_fill(buf, 1);
  CHECK_OK(cddp_barrier(g));
  if (rank == 1) ranks_stop_inside(buf);
  r = cddp_all_reduce(g, buf, RANKS_STOP_COUNT, CDDP_F32, CDDP_SUM, NULL);
  CHECK(rank == 1 || r != CDDP_OK);
  CHECK(rank != 0 || ranks_stopped_inside(buf, 1));
  if (rank != 1) after_stop(pair, buf, (pid_t)pids[1]);
  CHECK(rank == 1 || cddp_barrier(pair) == CDDP_OK);
  cddp_destroy(pair);
  cddp_destroy(g);
  return test_failures != before;
}

static void test_stopped_inside(void) {
  int status[3];
  ranks_script(stopped_rank, NULL, 3, 100, status);
  CHECK(ranks_exited_well(status, 3));
}

static void test_timeout(void) {
  variant v;
  int status[3];
  if (RANKS_SLOW) return; /* 0.3 s is too short for a sanitizer's start */
  for (v.which = 0; v.which < 4; v.which++) {
    v.async = v.which == 1 || v.which == 2;
    ranks_script(late_rank, &v, 3, 20, status);
    CHECK(ranks_exited_well(status, 3));
  }
}

/* MEMORY --------------------------------------------------------------------------------------- */

static int run_alloc(cddp_group *g, void *arg) {
  int before = test_failures, i;
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  unsigned char *p[64];
  (void)arg;
  for (i = 0; i < 64; i++) { /* sizes may differ from rank to rank: cddp_alloc is local */
    size_t bytes = (size_t)(i * i * 977 + cddp_rank(g) * 5000 + 1);
    p[i] = (unsigned char *)cddp_alloc(g, bytes);
    CHECK(p[i] != NULL && (uintptr_t)p[i] % page == 0);
    if (p[i] == NULL) return 1;
    memset(p[i], i + cddp_rank(g), bytes);
  }
  for (i = 0; i < 64; i++) {
    size_t bytes = (size_t)(i * i * 977 + cddp_rank(g) * 5000 + 1);
    CHECK(p[i][0] == i + cddp_rank(g) && p[i][bytes - 1] == i + cddp_rank(g));
    if (i % 3 != 0) cddp_free(g, p[i]);
  }
  for (i = 0; i < 64; i += 3) {
    int32_t *x = (int32_t *)(void *)p[i];
    if (i == 0) continue;
    x[0] = 1;
    CHECK_OK(cddp_all_reduce(g, x, 1, CDDP_I32, CDDP_SUM, NULL));
    CHECK(x[0] == cddp_world_size(g));
  }
  for (i = 0; i < 64; i += 3) cddp_free(g, p[i]);
  for (i = 0; i < (RANKS_TSAN ? 30 : 300); i++) { /* memory comes back */
    void *q = cddp_alloc(g, (size_t)8 << 20);
    CHECK(q != NULL);
    if (q == NULL) break;
    memset(q, 1, 4096);
    cddp_free(g, q);
  }
  CHECK(cddp_alloc(g, SIZE_MAX / 2) == NULL);
  CHECK(cddp_error()[0] != 0);
  CHECK_OK(cddp_barrier(g));
  return test_failures != before;
}

static void test_alloc(void) {
  CHECK_OK(ranks_run(run_alloc, NULL, 3, false));
  CHECK_OK(ranks_run(run_alloc, NULL, 3, true));
  CHECK_OK(ranks_run(run_alloc, NULL, 1, true));
}

int main(void) {
  setenv("CDDP_TIMEOUT_S", RANKS_SLOW ? "120" : "30", 0);
  RUN(test_misuse);
  RUN(test_misaligned);
  RUN(test_failed_async);
  RUN(test_counts);
  RUN(test_barrier_async);
  RUN(test_nan);
  RUN(test_alloc);
  RUN(test_processes);
  RUN(test_threads);
  RUN(test_runs_agree);
  RUN(test_in_flight);
  RUN(test_rounding);
  RUN(test_test_does_not_block);
  RUN(test_huge);
  RUN(test_mismatch);
  RUN(test_swapped);
  RUN(test_thread_leaves);
  RUN(test_timeout);
  RUN(test_stopped_inside);
  RUN(test_dead_rank);
  return TEST_END();
}
