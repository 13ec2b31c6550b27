/* collectives.c - times the collective operations of one implementation. One source, compiled once
   for each of them by bench.sh: -DBENCH_CDDP, -DBENCH_MPI, or -DBENCH_FLOOR, the least that any of
   them has to do. Prints lines
     CONFIG OPERATION RANKS BYTES MICROSECONDS WAY
   and, first, the round trip of a cache line between the first two cores: CONFIG line RANKS 0
   MICROSECONDS. WAY: of cddp, how the operation was done (>>collectives in cddp.h), and with which
   instruction set sums are.

   Works as follows. Each size has several buffers, used in turn, so that a large one is not in any
   cache when its turn comes. An iteration is a barrier, then the operation once, or for up to 16
   KiB as often as fills 100 us. Each rank takes the time; the longest over the ranks counts; the
   result is the median of the iterations. The first use of a size, on every buffer, is checked and
   not timed.

   Options: --config NAME, --ranks N, --memory alloc|malloc|huge, --slots (floor: through small
   slots), --handle (cddp: with a work handle, waited for at once), --quick (fewer sizes), --small
   (up to 1 KiB), --op NAME (this one alone), --sizes BYTES,... (these, instead of the usual ones),
   --start (no measurement: start the ranks and end) */

#ifdef BENCH_CDDP
#define CDDP_IMPLEMENTATION
#include "../../cddp.h"
#endif
#include "bench.h"
#ifdef BENCH_MPI
#include <mpi.h>
#endif

enum { ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, BARRIER, OPS };
static const char *const op_names[OPS] = {"all_reduce", "broadcast", "all_gather", "reduce_scatter",
                                          "barrier"};
#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define SLAB (512 * MIB) /* of all buffers of a rank */
#define SMALL (16 * KIB)
#define ITERATIONS 1000 /* at most */

#define SIZES 32 /* at most */
static size_t sizes[SIZES] = {4,       64,      KIB,      16 * KIB,  256 * KIB,
                              1 * MIB, 4 * MIB, 25 * MIB, 100 * MIB, 256 * MIB};
static size_t size_count = 10;

static struct {
  const char *config, *memory, *op;
  int ranks; /* replicas that take part */
  bool slots, handle, quick, small, start;
} option = {"?", "malloc", "", 2, false, false, false, false, false};

static int rank, ranks; /* that measure: for the floor, at most one per core */

/* --- the implementations: memory, the operation in place on one buffer of count floats, the
 * greatest of the ranks' values --- */

#ifdef BENCH_CDDP
static cddp_group *group;

static void check(cddp_result r) {
  if (r == CDDP_OK) return;
  fprintf(stderr, "%s: %s\n", option.config, cddp_error());
  exit(1);
}

static float *memory_new(size_t bytes) {
  float *p;
  if (strcmp(option.memory, "alloc") == 0) {
    p = cddp_alloc(group, bytes);
    check(p == NULL ? CDDP_OUT_OF_MEMORY : CDDP_OK);
    return p;
  }
  p = (float *)(void *)bench_map(bytes, false);
  bench_touch((char *)p, bytes, strcmp(option.memory, "huge") == 0);
  return p;
}

static void operate(int op, float *p, size_t count) {
  size_t share = count / (size_t)ranks;
  float *mine = p + share * (size_t)rank;
  cddp_work *work = NULL, **w = option.handle ? &work : NULL;
  switch (op) {
  case ALL_REDUCE: check(cddp_all_reduce(group, p, count, CDDP_F32, CDDP_SUM, w)); break;
  case BROADCAST: check(cddp_broadcast(group, p, count, CDDP_F32, 0, w)); break;
  case ALL_GATHER: check(cddp_all_gather(group, mine, p, share, CDDP_F32, w)); break;
  case REDUCE_SCATTER:
    check(cddp_reduce_scatter(group, p, mine, share, CDDP_F32, CDDP_SUM, w));
    break;
  default: check(cddp_barrier(group));
  }
  if (work != NULL) check(cddp_wait(work));
}

/* How an operation was done that has just ended, in so many rounds. */
static const char *way_of(int op, uint32_t rounds) {
  static const char *const sets[] = {"", ",base", ",avx2", ",avx512"};
  static char way[32];
  uint32_t phase = cddp__op_header_of(group, rank, group->round)->call >> 24;
  snprintf(way, sizeof way, "%s%s",
           phase == CDDP__PHASE_DONE ? "direct" : rounds == 1 ? "one-round" : "staged",
           op == ALL_REDUCE || op == REDUCE_SCATTER ? sets[cddp__isa()] : "");
  return way;
}

static double greatest(double x) {
  check(cddp_all_reduce(group, &x, 1, CDDP_F64, CDDP_MAX, NULL));
  return x;
}
#endif

#ifdef BENCH_MPI
static float *memory_new(size_t bytes) {
  char *p = bench_map(bytes, false);
  bench_touch(p, bytes, strcmp(option.memory, "huge") == 0);
  return (float *)(void *)p;
}

static void operate(int op, float *p, size_t count) {
  int n = (int)count, share = (int)(count / (size_t)ranks);
  float *mine = p + (size_t)share * (size_t)rank;
  MPI_Comm w = MPI_COMM_WORLD;
  switch (op) {
  case ALL_REDUCE: MPI_Allreduce(MPI_IN_PLACE, p, n, MPI_FLOAT, MPI_SUM, w); break;
  case BROADCAST: MPI_Bcast(p, n, MPI_FLOAT, 0, w); break;
  case ALL_GATHER:
    MPI_Allgather(MPI_IN_PLACE, share, MPI_FLOAT, p, share, MPI_FLOAT, w);
    break;
  case REDUCE_SCATTER: /* not in place: that would leave the result in the first share */
    MPI_Reduce_scatter_block(MPI_IN_PLACE, p, share, MPI_FLOAT, MPI_SUM, w);
    if (count == (size_t)ranks && rank > 0) *mine = *p; /* what the check looks at */
    break;
  default: MPI_Barrier(w);
  }
}

static double greatest(double x) {
  MPI_Allreduce(MPI_IN_PLACE, &x, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return x;
}
#endif

#ifdef BENCH_FLOOR
/* Every replica is mapped in one piece, seen by all processes; each process does its part of the
   bytes, with one flag in front and one behind. */
#define SLOT (256 * KIB)
#define APART (SLAB + 2 * MIB) /* of replicas; see README.md on addresses 2^28 apart */
static struct shared {
  bench_flag flags[64];
  struct { double x; char pad[56]; } greatest[64];
} *shared;
static char *replicas, *slots;
static uint32_t seq;

static void meet(void) { bench_flags(shared->flags, ranks, rank, ++seq); }

static float *memory_new(size_t bytes) {
  int r;
  for (r = rank; r < option.ranks; r += ranks)
    bench_touch(replicas + (size_t)r * APART, bytes, true);
  meet();
  return (float *)(void *)(replicas + (size_t)rank * APART);
}

static void sum_both(float *restrict a, float *restrict b, size_t n) {
  size_t i;
  for (i = 0; i < n; i++) {
    float t = a[i] + b[i];
    a[i] = t;
    b[i] = t;
  }
}

static void sum_four(float *restrict a, float *restrict b, float *restrict c, float *restrict d,
                     size_t n) {
  size_t i;
  for (i = 0; i < n; i++) {
    float t = (a[i] + b[i]) + (c[i] + d[i]);
    a[i] = t;
    b[i] = t;
    c[i] = t;
    d[i] = t;
  }
}

static void add(float *restrict a, const float *restrict b, size_t n) {
  size_t i;
  for (i = 0; i < n; i++) a[i] += b[i];
}

static void add_three(float *restrict a, const float *restrict b, const float *restrict c,
                      const float *restrict d, size_t n) {
  size_t i;
  for (i = 0; i < n; i++) a[i] = (a[i] + b[i]) + (c[i] + d[i]);
}

static float *at(const float *p, int replica) { /* the buffer that p is in this rank's slab */
  size_t offset = (size_t)((const char *)(const void *)p - replicas) - (size_t)rank * APART;
  return (float *)(void *)(replicas + (size_t)replica * APART + offset);
}

/* Elements [begin, end) of n for this process, in whole cache lines. */
static void part(size_t n, size_t *begin, size_t *end) {
  size_t lines = (n + 15) / 16, one = (lines + (size_t)ranks - 1) / (size_t)ranks * 16;
  *begin = one * (size_t)rank < n ? one * (size_t)rank : n;
  *end = *begin + one < n ? *begin + one : n;
}

static void floor_share(int op, float *p, size_t share) {
  int r, s, n = option.ranks;
  for (r = rank; r < n; r += ranks) {
    float *to = at(p, r);
    size_t mine = share * (size_t)r;
    if (op == REDUCE_SCATTER && n == 2) {
      add(to + mine, at(p, 1 - r) + mine, share);
    } else if (op == REDUCE_SCATTER && n == 4) {
      add_three(to + mine, at(p, (r + 1) % 4) + mine, at(p, (r + 2) % 4) + mine,
                at(p, (r + 3) % 4) + mine, share);
    } else if (op == ALL_GATHER) {
      for (s = 0; s < n; s++) {
        if (s != r) memcpy(to + share * (size_t)s, at(p, s) + share * (size_t)s, share * 4);
      }
    }
  }
}

static void floor_slots(float *p, size_t count) { /* all_reduce of memory that is not shared */
  size_t i, n;
  for (i = 0; i < count; i += n) {
    char *pair = slots + (seq & 1) * 64 * SLOT;
    n = count - i < SLOT / 4 ? count - i : SLOT / 4;
    memcpy(pair + (size_t)rank * SLOT, p + i, n * 4);
    meet();
    add(p + i, (float *)(void *)(pair + (size_t)(1 - rank) * SLOT), n);
  }
}

static void operate(int op, float *p, size_t count) {
  size_t begin, end;
  int r;
  if (op == ALL_REDUCE && option.slots) {
    floor_slots(p, count);
    return;
  }
  meet();
  if (op == BARRIER) return;
  part(count, &begin, &end);
  if (op == ALL_REDUCE && option.ranks == 2)
    sum_both(at(p, 0) + begin, at(p, 1) + begin, end - begin);
  else if (op == ALL_REDUCE && option.ranks == 4)
    sum_four(at(p, 0) + begin, at(p, 1) + begin, at(p, 2) + begin, at(p, 3) + begin, end - begin);
  else if (op == BROADCAST)
    for (r = 1; r < option.ranks; r++)
      memcpy(at(p, r) + begin, at(p, 0) + begin, 4 * (end - begin));
  else
    floor_share(op, p, count / (size_t)option.ranks);
  meet();
}

static double greatest(double x) {
  int r;
  shared->greatest[rank].x = x;
  meet();
  for (r = 0; r < ranks; r++) x = shared->greatest[r].x > x ? shared->greatest[r].x : x;
  meet();
  return x;
}
#endif

/* --- measuring --- */

static char way[32]; /* of the last operation that was measured */

static void report(const char *what, size_t bytes, double us) {
  if (rank != 0) return;
  printf("%s %s %d %zu %.4f %s\n", option.config, what, option.ranks, bytes, us, way);
  fflush(stdout);
}

/* Each rank's first value of a buffer is rank + 1; whether the operation made of it what it
   should. */
static void prove(int op, const float *p, size_t count) {
  float n = (float)option.ranks, want;
  const float *got = p;
  if (op == ALL_REDUCE) want = n * (n + 1) / 2;
  else if (op == BROADCAST) want = 1;
  else if (op == ALL_GATHER) want = n, got = p + count - 1;
  else return;
  if (*got == want) return;
  fprintf(stderr, "%s %s of %zu floats: rank %d has %g, not %g\n", option.config, op_names[op],
          count, rank, (double)*got, (double)want);
  exit(1);
}

static void fill(float *slab, size_t bytes) {
  size_t i;
#ifdef BENCH_FLOOR
  int r;
  for (r = rank; r < option.ranks; r += ranks) {
    float *p = at(slab, r);
    for (i = 0; i < bytes / 4; i++) p[i] = (float)(r + 1);
  }
#else
  for (i = 0; i < bytes / 4; i++) slab[i] = (float)(rank + 1);
#endif
}

static double timed(int op, float *slab, size_t stride, size_t count, int buffers, int *next,
                    int times) {
  double start;
  int i;
  operate(BARRIER, NULL, 0);
  start = bench_now();
  for (i = 0; i < times; i++) {
    operate(op, slab + stride / 4 * (size_t)*next, count);
    *next = (*next + 1) % buffers;
  }
  return greatest(bench_now() - start);
}

/* For the first time: notes how it is done. */
static void once(int op, float *p, size_t count) {
#ifdef BENCH_CDDP
  uint32_t round = group->round;
  operate(op, p, count);
  snprintf(way, sizeof way, "%s", way_of(op, group->round - round));
#else
  operate(op, p, count);
#endif
}

/* Of the buffers of the largest size: room for eight of them, and no more than SLAB. */
static size_t slab_bytes(void) {
  size_t i, most = KIB;
  for (i = 0; i < size_count && !option.small; i++) most = sizes[i] > most ? sizes[i] : most;
  most = 8 * most < 64 * MIB && most > 256 * KIB ? 64 * MIB : 8 * most;
  return most < 4 * MIB ? 4 * MIB : most < SLAB ? most : SLAB;
}

/* The median time of one operation, in us. */
static double measure(int op, float *slab, size_t bytes) {
  size_t count = bytes / 4 < (size_t)option.ranks && op >= ALL_GATHER ? (size_t)option.ranks
                                                                        : bytes / 4;
  size_t stride = (count * 4 + 127) / 128 * 128, most = bytes < MIB ? 8 : 64 * MIB / bytes;
  int buffers = (int)(most < 8 ? 8 : most), times = 1, next = 0, n = 0;
  double t[ITERATIONS], spent = 0, budget = option.quick ? 0.02 : 0.06;
  if ((size_t)buffers > slab_bytes() / stride) buffers = (int)(slab_bytes() / stride);
  fill(slab, stride * (size_t)buffers);
  once(op, slab, count);
  next = buffers > 1;
  prove(op, slab, count);
  timed(op, slab, stride, count, buffers, &next, buffers > 1 ? buffers - 1 : 1);
  memset(slab, 0, stride * (size_t)buffers); /* sums of sums would overflow */
#ifdef BENCH_FLOOR
  for (n = rank; n < option.ranks; n += ranks) memset(at(slab, n), 0, stride * (size_t)buffers);
  n = 0;
#endif
  if (bytes <= SMALL) {
    while (times < 4096 && timed(op, slab, stride, count, buffers, &next, times) < 100e-6)
      times *= 2;
  }
  while (n < ITERATIONS && (n < 5 || spent < budget) && (n < 3 || spent < 1)) {
    t[n] = timed(op, slab, stride, count, buffers, &next, times);
    spent += t[n++];
  }
  return bench_median(t, n) / times * 1e6;
}

static void measure_all(void) {
  float *slab;
  size_t i;
  int op;
  if (option.start) return;
  slab = memory_new(slab_bytes());
  for (op = 0; op < OPS; op++) {
    if (option.slots && op != ALL_REDUCE) continue;
    if (*option.op != 0 && strcmp(option.op, op_names[op]) != 0) continue;
    for (i = 0; i < size_count && (op != BARRIER || i == 0); i++) {
      if (option.quick && (sizes[i] == 64 || sizes[i] > 25 * MIB)) continue;
      if (option.small && sizes[i] > KIB) continue;
      report(op_names[op], op == BARRIER ? 0 : sizes[i], measure(op, slab, sizes[i]));
    }
  }
}

/* --- the round trip of a cache line between two pinned processes --- */

static bench_flag *line;

static void bounce(int me) {
  uint32_t i, n = 20000;
  double start = 0;
  bench_pin(me, 2);
  for (i = 0; i < n; i++) {
    if (i == 1000) start = bench_now();
    while (__atomic_load_n(&line->seq, __ATOMIC_ACQUIRE) != 2 * i + (uint32_t)me) BENCH_PAUSE();
    __atomic_store_n(&line->seq, 2 * i + (uint32_t)me + 1, __ATOMIC_RELEASE);
  }
  if (me == 0) report("line", 0, (bench_now() - start) / (n - 1000) * 1e6);
}

BENCH_DEF void round_trip(void) {
  if (bench_cores() < 2) return;
  line = (bench_flag *)(void *)bench_map(BENCH_HUGE, true);
  bench_fork(2, bounce);
}

/* --- starting ranks --- */

static void take_sizes(const char *list) {
  char *end;
  for (size_count = 0; *list != 0 && size_count < SIZES; list = *end == ',' ? end + 1 : end) {
    sizes[size_count] = (size_t)strtoull(list, &end, 10);
    if (end == list || sizes[size_count] < 4 || sizes[size_count] > SLAB)
      fprintf(stderr, "what size is %s?\n", list), exit(2);
    size_count++;
  }
}

static void options(int argc, char **argv) {
  int i;
  for (i = 1; i < argc; i++) {
    const char *a = argv[i], *v = i + 1 < argc ? argv[i + 1] : "";
    if (strcmp(a, "--config") == 0) option.config = v, i++;
    else if (strcmp(a, "--ranks") == 0) option.ranks = atoi(v), i++;
    else if (strcmp(a, "--memory") == 0) option.memory = v, i++;
    else if (strcmp(a, "--op") == 0) option.op = v, i++;
    else if (strcmp(a, "--sizes") == 0) take_sizes(v), i++;
    else if (strcmp(a, "--slots") == 0) option.slots = true;
    else if (strcmp(a, "--handle") == 0) option.handle = true;
    else if (strcmp(a, "--quick") == 0) option.quick = true;
    else if (strcmp(a, "--small") == 0) option.small = true;
    else if (strcmp(a, "--start") == 0) option.start = true;
    else fprintf(stderr, "what is %s?\n", a), exit(2);
  }
}

#ifdef BENCH_CDDP
static int as_rank(int r, void *arg) {
  (void)arg;
  rank = r;
  ranks = option.ranks;
  check(cddp_init(&group, NULL));
  bench_pin(rank, ranks);
  measure_all();
  cddp_destroy(group);
  return 0;
}

int main(int argc, char **argv) {
  options(argc, argv);
  if (cddp_launcher_rank() >= 0) return as_rank(cddp_launcher_rank(), NULL); /* hosts.sh */
  if (!option.start) round_trip();
  check(cddp_spawn(as_rank, NULL, option.ranks));
  return 0;
}
#endif

#ifdef BENCH_MPI
int main(int argc, char **argv) {
  int cores = bench_cores();
  MPI_Init(&argc, &argv);
  options(argc, argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  option.ranks = ranks;
  if (ranks <= cores) bench_pin(rank, ranks);
  measure_all();
  MPI_Finalize();
  return 0;
}
#endif

#ifdef BENCH_FLOOR
static void as_rank(int r) {
  rank = r;
  bench_pin(rank, ranks);
  measure_all();
}

int main(int argc, char **argv) {
  options(argc, argv);
  round_trip();
  ranks = bench_cores() < option.ranks ? bench_cores() : option.ranks;
  if ((option.ranks != 2 && option.ranks != 4) || (option.slots && option.ranks != 2)) return 2;
  shared = (struct shared *)(void *)bench_map(sizeof *shared, true);
  slots = bench_map(2 * 64 * SLOT, true);
  replicas = bench_map((size_t)option.ranks * APART, true);
  return !bench_fork(ranks, as_rank);
}
#endif
