/* mpi.c - backend "mpi". Run by tests/peers/mpirun.sh under each mpirun there is, as 4 ranks:

     mpi         collectives, sub-groups, training, mismatch
     mpi die     rank 1 is killed in an all_reduce; the others must hear of it soon
     mpi exit C COUNT HOSTS HOW   rank 1 exits with code C instead of an all_reduce of COUNT
                 elements, on so many hosts; HOW: 0 exit, 1 return, 2 MPI_Finalize and return
     mpi quit HOSTS   all ranks return without cddp_destroy, rank 1 first: no error
     mpi slow    MPI's start takes longer than the time-out of cddp_init, which must not matter

   Collectives of each kind and dtype are compared with sums computed here, of small whole numbers,
   which are exact in any order. Training by two models at once must give both, and all ranks, the
   same weights. */
#define CDDP_MPI
#define CDDP_IMPLEMENTATION
#include "../../cddp.h"

#include "../ranks.h"

#include <signal.h>

static double start_s; /* by how much MPI's start is delayed */

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
  ranks_sleep(start_s);
  return PMPI_Init_thread(argc, argv, required, provided);
}

static double value(int rank, size_t i) { return (double)((i * 7 + (size_t)rank * 3) % 5); }

static void put(cddp_dtype t, void *p, size_t i, double v) {
  switch (t) {
  case CDDP_F32: ((float *)p)[i] = (float)v; break;
  case CDDP_F64: ((double *)p)[i] = v; break;
  case CDDP_F16:
  case CDDP_BF16: ranks_store(t, p, i, v); break;
  case CDDP_I8: ((int8_t *)p)[i] = (int8_t)v; break;
  case CDDP_U8: ((uint8_t *)p)[i] = (uint8_t)v; break;
  case CDDP_I32: ((int32_t *)p)[i] = (int32_t)v; break;
  default: ((int64_t *)p)[i] = (int64_t)v;
  }
}

static double get(cddp_dtype t, const void *p, size_t i) {
  switch (t) {
  case CDDP_F32: return (double)((const float *)p)[i];
  case CDDP_F64: return ((const double *)p)[i];
  case CDDP_F16:
  case CDDP_BF16: return ranks_load(t, p, i);
  case CDDP_I8: return (double)((const int8_t *)p)[i];
  case CDDP_U8: return (double)((const uint8_t *)p)[i];
  case CDDP_I32: return (double)((const int32_t *)p)[i];
  default: return (double)((const int64_t *)p)[i];
  }
}

static double reduced(cddp_op op, cddp_dtype t, int n, size_t i) {
  double v = value(0, i);
  int r;
  for (r = 1; r < n; r++) {
    double x = value(r, i);
    v = op == CDDP_PROD   ? v * x
        : op == CDDP_MIN  ? fmin(v, x)
        : op == CDDP_MAX  ? fmax(v, x)
        : op == CDDP_BAND ? (double)((int)v & (int)x)
        : op == CDDP_BOR  ? (double)((int)v | (int)x)
        : op == CDDP_BXOR ? (double)((int)v ^ (int)x)
                          : v + x;
  }
  if (op != CDDP_AVG) return v;
  return t >= CDDP_I8 ? floor(v / n) : v / n;
}

static bool near(double a, double b, cddp_dtype t) {
  double e = t == CDDP_F16 || t == CDDP_BF16 ? 0.01 : t == CDDP_F32 ? 1e-6 : 1e-12;
  return fabs(a - b) <= e * fabs(b);
}

static cddp_group *g;
static int me, n;

static void fill(cddp_dtype t, void *p, int rank, size_t from, size_t count) {
  size_t i;
  for (i = 0; i < count; i++) put(t, p, i, value(rank, from + i));
}

static bool holds(cddp_dtype t, const void *p, int rank, size_t from, size_t count) {
  size_t i;
  for (i = 0; i < count; i++)
    if (!near(get(t, p, i), value(rank, from + i), t)) return false;
  return true;
}

static void reductions(cddp_dtype t, size_t count, cddp_op op) {
  size_t es = cddp_dtype_size(t), i;
  char *a = (char *)malloc((size_t)n * count * es + 1), *b = (char *)malloc(count * es + 1);
  bool good = true, whole = true, kept = true, share = true;
  fill(t, b, me, 0, count);
  CHECK_OK(cddp_all_reduce(g, b, count, t, op, NULL));
  for (i = 0; i < count; i++) good = good && near(get(t, b, i), reduced(op, t, n, i), t);
  CHECK(good);
  fill(t, b, me, 0, count);
  CHECK_OK(cddp_reduce(g, b, count, t, op, n - 1, NULL));
  if (me == n - 1)
    for (i = 0; i < count; i++) whole = whole && near(get(t, b, i), reduced(op, t, n, i), t);
  else
    kept = holds(t, b, me, 0, count);
  CHECK(whole && kept);
  fill(t, a, me, 0, (size_t)n * count);
  CHECK_OK(cddp_reduce_scatter(g, a, b, count, t, op, NULL));
  for (i = 0; i < count; i++)
    share = share && near(get(t, b, i), reduced(op, t, n, (size_t)me * count + i), t);
  CHECK(share);
  CHECK(holds(t, a, me, 0, (size_t)n * count));
  free(a);
  free(b);
}

static void moves(cddp_dtype t, size_t count) {
  size_t es = cddp_dtype_size(t), share = count * es, all = (size_t)n * count;
  char *a = (char *)calloc(all, es), *b = (char *)calloc(all, es);
  int r;
  fill(t, a, me, 0, count);
  CHECK_OK(cddp_broadcast(g, a, count, t, 1, NULL));
  CHECK(holds(t, a, 1, 0, count));
  fill(t, a, me, 0, count);
  CHECK_OK(cddp_all_gather(g, a, b, count, t, NULL));
  for (r = 0; r < n; r++) CHECK(holds(t, b + (size_t)r * share, r, 0, count));
  memset(b, 0, all * es);
  memcpy(b + (size_t)me * share, a, share); /* in place */
  CHECK_OK(cddp_all_gather(g, b + (size_t)me * share, b, count, t, NULL));
  for (r = 0; r < n; r++) CHECK(holds(t, b + (size_t)r * share, r, 0, count));
  CHECK_OK(cddp_gather(g, a, me == 2 ? b : NULL, count, t, 2, NULL));
  for (r = 0; me == 2 && r < n; r++) CHECK(holds(t, b + (size_t)r * share, r, 0, count));
  fill(t, b, 3, 0, all);
  CHECK_OK(cddp_scatter(g, me == 0 ? b : NULL, a, count, t, 0, NULL));
  CHECK(holds(t, a, 3, (size_t)me * count, count));
  fill(t, a, me, 0, all);
  CHECK_OK(cddp_all_to_all(g, a, b, count, t, NULL));
  for (r = 0; r < n; r++) CHECK(holds(t, b + (size_t)r * share, r, (size_t)me * count, count));
  free(a);
  free(b);
}

/* Rank a has (a * 7 + b * 5) % 4 times `count` elements for rank b, and one more where a is b. */
static size_t share(int a, int b, size_t count) {
  return (size_t)((a * 7 + b * 5) % 4) * count + (a == b);
}

static void counted(cddp_dtype t, size_t count, bool gathers) {
  size_t es = cddp_dtype_size(t), out[4], in[4], sent = 0, got = 0, at;
  char *a, *b;
  int r;
  for (r = 0; r < n; r++) {
    out[r] = share(me, r, count);
    in[r] = gathers ? share(r, r, count) : share(r, me, count);
    sent += out[r];
    got += in[r];
  }
  a = (char *)calloc(sent + 1, es);
  b = (char *)calloc(got + 1, es);
  for (r = 0, at = 0; r < n; at += out[r++]) fill(t, a + at * es, me * n + r, 0, out[r]);
  if (gathers) fill(t, a, me * n + me, 0, out[me]);
  if (gathers) CHECK_OK(cddp_all_gather_v(g, a, b, in, t, NULL));
  else CHECK_OK(cddp_all_to_all_v(g, a, out, b, in, t, NULL));
  for (r = 0, at = 0; r < n; at += in[r++])
    CHECK(holds(t, b + at * es, r * n + (gathers ? r : me), 0, in[r]));
  if (gathers) { /* in place */
    for (r = 0, at = 0; r < me; r++) at += in[r];
    memset(b, 0, got * es);
    fill(t, b + at * es, me * n + me, 0, in[me]);
    CHECK_OK(cddp_all_gather_v(g, b + at * es, b, in, t, NULL));
    for (r = 0, at = 0; r < n; at += in[r++]) CHECK(holds(t, b + at * es, r * n + r, 0, in[r]));
  }
  free(a);
  free(b);
}

static void test_counts(void) {
  static const size_t counts[] = {0, 1, 50, 70001};
  size_t c, out[4] = {0, 0, 0, 0}, in[4] = {0, 0, 0, 0};
  cddp_group *other = NULL;
  float x[8] = {0}, y[8] = {0};
  int32_t own[50], got[50] = {0};
  int t;
  for (t = 0; t < 50; t++) own[t] = 21;
  for (c = 0; c < 4; c++)
    for (t = CDDP_F32; t <= (c < 3 ? CDDP_I64 : CDDP_F32); t++) {
      counted((cddp_dtype)t, counts[c], false);
      counted((cddp_dtype)t, counts[c], true);
    }
  out[0] = in[0] = me == 0 ? 50 : 0; /* only rank 0 has elements, for itself; then another call */
  CHECK_OK(cddp_all_to_all_v(g, own, out, got, in, CDDP_I32, NULL));
  CHECK_OK(cddp_broadcast(g, got, 50, CDDP_I32, 0, NULL));
  CHECK_EQ(got[49], 21);
  out[0] = in[0] = 0;
  CHECK_OK(cddp_group_split(g, 0, me, &other));
  out[3] = me == 2 ? 7 : 0; /* which rank 3 does not expect */
  CHECK_IS(cddp_all_to_all_v(other, x, out, y, in, CDDP_F32, NULL), CDDP_MISMATCH);
  CHECK(strstr(cddp_error(), "rank 2 sends 7 elements to rank 3, which expects 0") != NULL);
  cddp_destroy(other);
}

static void test_collectives(void) {
  static const size_t counts[] = {1, 50, 4099, 70001};
  size_t c;
  int t, op;
  for (c = 0; c < 4; c++)
    for (t = CDDP_F32; t <= (c < 3 ? CDDP_I64 : CDDP_F16); t++) {
      for (op = CDDP_SUM; op <= (t <= CDDP_BF16 ? CDDP_MAX : CDDP_BXOR); op++)
        if (t != CDDP_I8 || op != CDDP_PROD) /* 4 * 4 * 4 * 4 is too much for it */
          reductions((cddp_dtype)t, counts[c], (cddp_op)op);
      moves((cddp_dtype)t, counts[c]);
    }
}

static void test_in_flight(void) {
  float *x = (float *)malloc(3 * 5000 * sizeof *x);
  cddp_work *w[3];
  int k;
  size_t i;
  for (k = 0; k < 3; k++) {
    fill(CDDP_F32, x + k * 5000, me, 0, 5000);
    CHECK_OK(cddp_all_reduce(g, x + k * 5000, 5000, CDDP_F32, CDDP_SUM, &w[k]));
  }
  for (k = 0; k < 3; k++) {
    bool good = true;
    CHECK_OK(cddp_wait(w[k]));
    for (i = 0; i < 5000; i++)
      good = good && (double)x[k * 5000 + (int)i] == reduced(CDDP_SUM, CDDP_F32, n, i);
    CHECK(good);
  }
  free(x);
}

static void test_groups(void) {
  const int pair[] = {3, 1};
  cddp_group *half = NULL, *two = NULL;
  float x[100];
  int i;
  CHECK_OK(cddp_group_split(g, me % 2, -me, &half));
  for (i = 0; i < 100; i++) x[i] = (float)me;
  CHECK_OK(cddp_all_reduce(half, x, 100, CDDP_F32, CDDP_SUM, NULL));
  CHECK_EQ(x[99], me % 2 ? 4 : 2);
  CHECK_EQ(cddp_rank(half), me < 2 ? 1 : 0);
  CHECK_OK(cddp_group_new(g, pair, 2, &two));
  CHECK((two != NULL) == (me % 2 == 1));
  if (two != NULL) {
    for (i = 0; i < 100; i++) x[i] = (float)me;
    CHECK_OK(cddp_broadcast(two, x, 100, CDDP_F32, 0, NULL));
    CHECK_EQ(x[50], 3);
  }
  cddp_destroy(two);
  cddp_destroy(half);
}

/* Two models on the same gradients: stepped in one call and in two. */
static void test_training(void) {
  static float w[2][3][3000], mean;
  cddp_param p[2][3];
  cddp_ddp *d[2];
  cddp_optim *s[2];
  cddp_sgd_desc o;
  uint64_t hash, *all = (uint64_t *)calloc((size_t)n, sizeof *all);
  int m, k, step, r;
  memset(&o, 0, sizeof o);
  memset(p, 0, sizeof p);
  o.lr = 0.125;
  o.momentum = 0.5;
  for (m = 0; m < 2; m++) {
    for (k = 0; k < 3; k++) {
      p[m][k].name = k == 0 ? "a" : k == 1 ? "b" : "c";
      p[m][k].data = w[m][k];
      p[m][k].count = (size_t)(1000 * (k + 1));
      w[m][k][0] = (float)me;
    }
    CHECK_OK(cddp_ddp_create(&d[m], g, p[m], 3, NULL));
    CHECK_OK(cddp_sgd_create(&s[m], p[m], 3, &o));
  }
  for (step = 0; step < 4; step++)
    for (m = 0; m < 2; m++) {
      for (k = 2; k >= 0; k--) {
        float *grad = (float *)p[m][k].grad;
        size_t i;
        for (i = 0; i < p[m][k].count; i++) grad[i] += (float)value(me, i + (size_t)step);
        CHECK_OK(cddp_ddp_ready(d[m], k));
      }
      if (m == 1) {
        CHECK_OK(cddp_ddp_step(d[m], s[m]));
        continue;
      }
      CHECK_OK(cddp_ddp_wait(d[m]));
      mean = (float)reduced(CDDP_AVG, CDDP_F32, n, 5 + (size_t)step);
      CHECK(((float *)p[m][1].grad)[5] == mean);
      CHECK_OK(cddp_optim_step(s[m]));
      CHECK_OK(cddp_optim_zero_grad(s[m]));
    }
  for (k = 0; k < 3; k++) CHECK(memcmp(w[0][k], w[1][k], sizeof w[0][k]) == 0);
  CHECK(w[0][0][5] != 0);
  hash = ranks_hash(RANKS_HASH, w, sizeof w);
  CHECK_OK(cddp_all_gather(g, &hash, all, 1, CDDP_I64, NULL));
  for (r = 0; r < n; r++) CHECK(all[r] == hash);
  for (m = 0; m < 2; m++) {
    cddp_optim_destroy(s[m]);
    cddp_ddp_destroy(d[m]);
  }
  free(all);
}

static void test_mismatch(void) {
  cddp_group *other = NULL;
  float x[600] = {0};
  CHECK_OK(cddp_group_split(g, 0, me, &other));
  CHECK_IS(cddp_all_reduce(other, x, me == 1 ? 500 : 600, CDDP_F32, CDDP_SUM, NULL), CDDP_MISMATCH);
  CHECK(strstr(cddp_error(), "rank 1 called all_reduce(count 500, f32, sum)") != NULL);
  cddp_destroy(other);
  CHECK_OK(cddp_barrier(g));
}

static int be_told(void) {
  size_t count = 4 << 20, k;
  float *x = (float *)calloc(count, sizeof *x);
  cddp_result r = CDDP_OK;
  double since = test_now();
  for (k = 0; r == CDDP_OK && k < 10000; k++) {
    if (me == 1 && k == 5) raise(SIGKILL);
    since = test_now();
    r = cddp_all_reduce(g, x, count, CDDP_F32, CDDP_SUM, NULL);
  }
  CHECK_IS(r, CDDP_PEER_LOST);
  CHECK(strstr(cddp_error(), "rank 1 (pid ") != NULL);
  CHECK(test_now() - since < RANKS_WITHIN(1.5));
  CHECK_IS(cddp_barrier(g), CDDP_PEER_LOST);
  cddp_destroy(g);
  printf("told rank %d%s\n", me, test_failures ? ": wrong" : "");
  fflush(stdout);
  _exit(test_failures != 0); /* MPI_Finalize would wait for the dead */
}

/* rank 1 ends in good order, as far as MPI knows, while the others wait for it. */
static int be_left(int code, size_t count, int how) {
  float *x = (float *)calloc(count, sizeof *x);
  cddp_group *half = NULL;
  double since;
  CHECK_OK(cddp_group_split(g, me / 2, me, &half));
  CHECK_OK(cddp_all_reduce(g, x, count, CDDP_F32, CDDP_SUM, NULL));
  if (me == 1 && how == 0) exit(code);
  if (me == 1 && how == 2) MPI_Finalize();
  if (me == 1) return code;
  since = test_now();
  if (me == 0) CHECK_IS(cddp_all_reduce(half, x, count, CDDP_F32, CDDP_SUM, NULL), CDDP_PEER_LOST);
  else CHECK_IS(cddp_all_reduce(g, x, count, CDDP_F32, CDDP_SUM, NULL), CDDP_PEER_LOST);
  CHECK(strstr(cddp_error(), "rank 1 (pid ") != NULL && strstr(cddp_error(), "exited, or") != NULL);
  CHECK(test_now() - since < RANKS_WITHIN(1.0));
  if (me == 0) CHECK_IS(cddp_barrier(g), CDDP_PEER_LOST);
  printf("told rank %d%s\n", me, test_failures ? ": wrong" : "");
  return test_failures != 0;
}

static int quit(void) {
  float x[3000] = {0};
  int k;
  for (k = 0; k < 20; k++)
    if (cddp_all_reduce(g, x, k % 2 ? 3000 : 3, CDDP_F32, CDDP_SUM, NULL) != CDDP_OK)
      return fprintf(stderr, "rank %d: %s\n", me, cddp_error()), 1;
  if (me != 1) ranks_sleep(0.2);
  printf("quit rank %d\n", me);
  return 0;
}

int main(int argc, char **argv) {
  int hosts = argc > 5 ? atoi(argv[4]) : argc == 3 ? atoi(argv[2]) : 1;
  cddp_group_desc d;
  memset(&d, 0, sizeof d);
  d.backend = "mpi";
  if (hosts > 1) ranks_setenv("CDDP_HOST_ID", cddp_launcher_rank() % hosts);
  if (argc > 1 && strcmp(argv[1], "slow") == 0) {
    start_s = 4;
    d.timeout_s = 2;
  }
  CHECK_OK(cddp_init(&g, &d));
  if (g == NULL) return 1;
  me = cddp_rank(g);
  n = cddp_world_size(g);
  CHECK_EQ(n, 4);
  if (argc > 1 && strcmp(argv[1], "die") == 0) return be_told();
  if (argc > 5 && strcmp(argv[1], "exit") == 0)
    return be_left(atoi(argv[2]), (size_t)atol(argv[3]), atoi(argv[5]));
  if (argc > 2 && strcmp(argv[1], "quit") == 0) return quit();
  RUN(test_collectives);
  if (start_s > 0) {
    cddp_destroy(g);
    return TEST_END();
  }
  RUN(test_counts);
  RUN(test_in_flight);
  RUN(test_groups);
  RUN(test_training);
  RUN(test_mismatch);
  cddp_destroy(g);
  return TEST_END();
}
