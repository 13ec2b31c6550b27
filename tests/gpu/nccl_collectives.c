/* Collectives, streams, sub-groups and messages on device memory: with NCCL, through host memory,
   and between hosts.

   Real processes, a GPU of the test double (tests/gpu/hostcuda) each. Every collective runs with
   every dtype and operation on 1 to 8 ranks, and its result is compared with sums that the test
   makes by itself: the inputs are small whole numbers, so there is one right answer. The double
   runs streams on threads with random pauses, so that an event wait that cddp forgot shows as wrong
   numbers. Also here: means in half precision, counts that differ between ranks (all_to_all_v),
   barriers with handles, what NCCL cannot do, ranks as threads, CUDA_LAUNCH_BLOCKING=1. */
#include "nccl.h"

#include <pthread.h>

/* --- collectives --- */

/* Element i of rank r's input: small whole numbers, exact in every type and order. */
static double value(int r, size_t i, cddp_op op) {
  uint64_t h = ranks_mix((uint64_t)r, i, 1);
  return op == CDDP_PROD ? (double)(1 + h % 2) : (double)(h % 7);
}

static double reduced(int n, size_t i, cddp_op op) {
  double v = value(0, i, op), w;
  int r;
  for (r = 1; r < n; r++) {
    w = value(r, i, op);
    v = op == CDDP_PROD   ? v * w
        : op == CDDP_MIN  ? fmin(v, w)
        : op == CDDP_MAX  ? fmax(v, w)
        : op == CDDP_BAND ? (double)((int)v & (int)w)
        : op == CDDP_BOR  ? (double)((int)v | (int)w)
        : op == CDDP_BXOR ? (double)((int)v ^ (int)w)
                          : v + w;
  }
  return v;
}

static void put(cddp_dtype t, void *p, size_t i, double v) {
  int64_t whole = (int64_t)v;
  int32_t w32 = (int32_t)v;
  if (t <= CDDP_BF16)
    ranks_store(t, p, i, v);
  else if (t == CDDP_I64)
    memcpy((char *)p + 8 * i, &whole, 8);
  else if (t == CDDP_I32)
    memcpy((char *)p + 4 * i, &w32, 4);
  else
    ((unsigned char *)p)[i] = (unsigned char)w32;
}

static double get(cddp_dtype t, const void *p, size_t i) {
  int64_t whole;
  int32_t w32;
  if (t <= CDDP_BF16) return ranks_load(t, p, i);
  if (t == CDDP_I64) return memcpy(&whole, (const char *)p + 8 * i, 8), (double)whole;
  if (t == CDDP_I32) return memcpy(&w32, (const char *)p + 4 * i, 4), (double)w32;
  return (double)((const unsigned char *)p)[i];
}

enum {
  KIND_ALL_REDUCE,
  KIND_REDUCE,
  KIND_BROADCAST, /* the last that works in place */
  KIND_ALL_GATHER,
  KIND_GATHER,
  KIND_SCATTER,
  KIND_REDUCE_SCATTER,
  KIND_ALL_TO_ALL
};

/* One collective on n ranks: fills, runs, compares. */
typedef struct one {
  cddp_group *g;
  int kind, root;
  cddp_dtype t;
  cddp_op op;
  size_t count;
  bool async;
} one;

static cddp_result call(const one *o, const void *send, void *recv, cddp_work **w) {
  static char nothing; /* in host memory, but nobody looks at it */
  if (cddp_rank(o->g) != o->root) {
    if (o->kind == KIND_SCATTER) send = &nothing;
    if (o->kind == KIND_GATHER) recv = &nothing;
  }
  switch (o->kind) {
  case KIND_ALL_REDUCE:
    return cddp_all_reduce(o->g, recv, o->count, o->t, o->op, w);
  case KIND_REDUCE:
    return cddp_reduce(o->g, recv, o->count, o->t, o->op, o->root, w);
  case KIND_BROADCAST:
    return cddp_broadcast(o->g, recv, o->count, o->t, o->root, w);
  case KIND_ALL_GATHER:
    return cddp_all_gather(o->g, send, recv, o->count, o->t, w);
  case KIND_GATHER:
    return cddp_gather(o->g, send, recv, o->count, o->t, o->root, w);
  case KIND_SCATTER:
    return cddp_scatter(o->g, send, recv, o->count, o->t, o->root, w);
  case KIND_REDUCE_SCATTER:
    return cddp_reduce_scatter(o->g, send, recv, o->count, o->t, o->op, w);
  default:
    return cddp_all_to_all(o->g, send, recv, o->count, o->t, w);
  }
}

/* What rank `me` must have at i of its result; NAN: anything. */
static double wanted(const one *o, int me, int n, size_t i) {
  size_t c = o->count, q = i / c, k = i % c;
  double v;
  switch (o->kind) {
  case KIND_REDUCE:
    if (me != o->root) return value(me, i, o->op);
    /* fall through */
  case KIND_ALL_REDUCE:
    v = reduced(n, i, o->op);
    break;
  case KIND_BROADCAST:
    return value(o->root, i, o->op);
  case KIND_ALL_GATHER:
    return value((int)q, k, o->op);
  case KIND_GATHER:
    return me == o->root ? value((int)q, k, o->op) : (double)NAN;
  case KIND_SCATTER:
    return value(o->root, (size_t)me * c + k, o->op);
  case KIND_REDUCE_SCATTER:
    v = reduced(n, (size_t)me * c + k, o->op);
    break;
  default:
    return value((int)q, (size_t)me * c + k, o->op);
  }
  if (o->op != CDDP_AVG) return v;
  return o->t <= CDDP_BF16 ? v / n : floor(v / n);
}

static void check_one(const one *o) {
  int n = cddp_world_size(o->g), me = cddp_rank(o->g);
  size_t all = o->count * (size_t)n, bytes = all * cddp_dtype_size(o->t), i, out;
  bool in_place = o->kind <= KIND_BROADCAST;
  void *host = malloc(bytes), *send, *recv;
  cddp_work *w = NULL;
  int bad = 0;
  for (i = 0; i < all; i++) put(o->t, host, i, value(me, i, o->op));
  send = on_device(host, bytes);
  recv = in_place ? send : on_device(NULL, bytes);
  CHECK_OK(call(o, send, recv, o->async ? &w : NULL));
  if (o->async) CHECK_OK(cddp_wait(w));
  to_host(o->g, host, recv, bytes);
  out = in_place || o->kind == KIND_SCATTER || o->kind == KIND_REDUCE_SCATTER ? o->count : all;
  for (i = 0; i < out; i++) {
    double want = wanted(o, me, n, i), got = get(o->t, host, i);
    double slack = o->op == CDDP_AVG && o->t <= CDDP_BF16 ? 0.05 * want : 0;
    if (want == want && !(fabs(got - want) <= slack) && bad++ == 0)
      test_fail(__FILE__, __LINE__,
                "kind %d, dtype %d, op %d, root %d, count %zu, rank %d of %d: "
                "element %zu is %g, not %g",
                o->kind, (int)o->t, (int)o->op, o->root, o->count, me, n, i, got, want);
  }
  CHECK_EQ(bad, 0);
  if (!in_place) cudaFree(recv);
  cudaFree(send);
  free(host);
}

static int every_collective(cddp_group *g, void *arg) {
  static const size_t counts[] = {1, 7, 1000, 20001};
  one o;
  int kind, t, n = cddp_world_size(g);
  bool few = RANKS_TSAN && n != 3;
  (void)arg;
  memset(&o, 0, sizeof o);
  o.g = g;
  for (kind = KIND_ALL_REDUCE; kind <= KIND_ALL_TO_ALL; kind++) {
    for (t = few ? (kind + n) % 4 : 0; t <= CDDP_I64; t += few ? 4 : 1) {
      o.kind = kind;
      o.t = (cddp_dtype)t;
      o.op = (cddp_op)((kind + t) % 5);
      o.count = counts[(kind + t) % 4];
      o.root = (kind + t) % n;
      o.async = t % 2 != 0;
      if (o.t == CDDP_I8 || o.t == CDDP_U8) o.count = counts[(kind + t) % 3];
      check_one(&o);
    }
    o.t = CDDP_F32;
    for (o.op = CDDP_SUM; !few && kind != KIND_BROADCAST && o.op <= CDDP_MAX;
         o.op = (cddp_op)(o.op + 1))
      check_one(&o);
    o.op = CDDP_SUM;
  }
  CHECK_OK(cddp_barrier(g));
  return 0;
}

static int with_nccl(cddp_group *g, void *arg) {
  every_collective(g, arg);
  CHECK(hostcuda_calls("ncclAllReduce") > 8);
  return 0;
}

/* --- means --- */

enum { MEANS = 20000 };

static double mean_input(int rank, size_t i) { /* in [1, 2) */
  return 1 + (double)(ranks_mix((uint64_t)rank, i, 9) % 65536) / 65536;
}

/* Got are means over n ranks: no element is off by more than its type's rounding of n inputs, n
   sums and the mean, nor all of them together by what 1/n is in bf16 and f16. */
static void check_means(cddp_dtype t, const void *got, int n, size_t count) {
  const double unit[] = {0x1p-24, 0x1p-53, 0x1p-11, 0x1p-8};
  double sum = 0, bias = 0;
  size_t i, bad = 0;
  int r;
  for (i = 0; i < count; i++) {
    for (sum = 0, r = 0; r < n; r++) sum += mean_input(r, i);
    sum = fabs(get(t, got, i)) * n / sum - 1;
    bias += sum / (double)count;
    bad += !(fabs(sum) < (n + 3) * unit[t]);
  }
  CHECK_EQ(bad, 0);
  CHECK(fabs(bias) < (t == CDDP_BF16 ? 0.1 : 1) * unit[t]);
}

/* In collectives and as a model's gradients; nor does a mean pass f16's range on the way. */
static int means(cddp_group *g, void *arg) {
  int n = cddp_world_size(g), me = cddp_rank(g), t, k;
  char *host = (char *)malloc(MEANS * 8), *grad, *data;
  size_t i, bytes;
  (void)arg;
  for (t = CDDP_F32; t <= CDDP_BF16; t++) {
    cddp_param p;
    cddp_ddp *d = NULL;
    cddp_optim *o = NULL;
    cddp_sgd_desc rule;
    bytes = MEANS * cddp_dtype_size((cddp_dtype)t);
    for (i = 0; i < MEANS; i++) put((cddp_dtype)t, host, i, mean_input(me, i));
    grad = (char *)on_device(host, bytes);
    CHECK_OK(cddp_all_reduce(g, grad, MEANS, (cddp_dtype)t, CDDP_AVG, NULL));
    to_host(g, host, grad, bytes);
    check_means((cddp_dtype)t, host, n, MEANS);
    for (i = 0; t == CDDP_F16 && i < 64; i++) put(CDDP_F16, host, i, 60000);
    CHECK(cudaMemcpy(grad, host, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
    CHECK_OK(cddp_all_reduce(g, grad, 64, (cddp_dtype)t, CDDP_AVG, NULL));
    to_host(g, host, grad, 64);
    for (i = 0; t == CDDP_F16 && i < 32; i++) CHECK(fabs(get(CDDP_F16, host, i) - 60000) < 100);
    memset(&p, 0, sizeof p);
    memset(&rule, 0, sizeof rule);
    p.count = MEANS;
    p.dtype = (cddp_dtype)t;
    p.data = data = (char *)cddp_alloc(g, bytes);
    CHECK(cudaMemset(data, 0, bytes) == cudaSuccess);
    rule.lr = 1;
    CHECK_OK(cddp_ddp_create(&d, g, &p, 1, NULL));
    CHECK_OK(cddp_sgd_create(&o, &p, 1, &rule));
    for (k = 0; k < 6; k++) { /* step, step, wait, wait, step, step: each after either */
      for (i = 0; i < MEANS; i++) put((cddp_dtype)t, host, i, mean_input(me, i));
      CHECK(cudaMemset(data, 0, bytes) == cudaSuccess);
      CHECK(cudaMemcpy(p.grad, host, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
      CHECK_OK(cddp_ddp_ready(d, 0));
      if (k / 2 == 1) {
        CHECK_OK(cddp_ddp_wait(d));
        CHECK_OK(cddp_optim_step(o));
      } else {
        CHECK_OK(cddp_ddp_step(d, o));
      }
      to_host(g, host, data, bytes); /* 0 - 1 * mean */
      check_means((cddp_dtype)t, host, n, MEANS);
    }
    cddp_optim_destroy(o);
    cddp_ddp_destroy(d);
    cudaFree(grad);
  }
  free(host);
  return 0;
}

/* A rank without kernels: all use NCCL's mean. */
static int without_kernels(cddp_group *g, void *arg) {
  uint64_t launched = hostcuda_calls("kernel");
  (void)arg;
  return every_collective(g, NULL) || hostcuda_calls("kernel") != launched;
}

static int one_without_kernels(int rank, void *arg) {
  if (rank == 1) cddp_register_kernels(NULL);
  return rank_process(rank, arg);
}

static void test_means(void) {
  job j;
  CHECK_OK(run(means, NULL, 3, NULL));
  if (RANKS_TSAN) return;
  CHECK_OK(run(means, NULL, 2, NULL));
  CHECK_OK(run(means, NULL, 7, NULL));
  CHECK_OK(run(means, NULL, 3, "cpu"));
  memset(&j, 0, sizeof j);
  j.fn = without_kernels;
  CHECK_OK(cddp_spawn(one_without_kernels, &j, 3));
}

static void test_collectives(void) {
  static const int ranks[] = {1, 2, 3, 4, 5, MOST_RANKS};
  int i, n;
  for (i = 0; i < 6; i++) CHECK_OK(run(every_collective, NULL, ranks[i], NULL));
  inside_comm_min_ranks = 1;
  CHECK_OK(run(with_nccl, NULL, 1, NULL));
  inside_comm_min_ranks = 2;
  for (n = 1; n <= MOST_RANKS; n += RANKS_SLOW ? 5 : 2)
    CHECK_OK(run(every_collective, NULL, n, "cpu"));
}

/* --- streams --- */

/* Three all_to_alls in place, the first beside the stream: they share what they are copied to. What
   the last one gave is overwritten. */
static void check_in_place(cddp_group *g, cudaStream_t s) {
  enum { N = 5000 };
  int n = cddp_world_size(g) & 7, q, k;
  size_t all = (size_t)n * N, i;
  float *x[3], *host = (float *)malloc(all * sizeof *host);
  size_t bad = 0;
  cddp_work *w;
  for (k = 0; k < 3; k++) {
    x[k] = (float *)on_device(NULL, all * sizeof(float));
    for (i = 0; i < 30; i++) fill_on(s, x[k], all, -1, false); /* the stream is late */
    fill_on(s, x[k], all, (float)(10 * k + cddp_rank(g)), false);
    CHECK_OK(cddp_all_to_all(g, x[k], x[k], N, CDDP_F32, k == 0 ? &w : NULL));
  }
  fill_on(s, x[2], all, 77, false);
  CHECK_OK(cddp_wait(w));
  for (k = 0; k < 3; k++) {
    to_host(g, host, x[k], all * sizeof *host);
    for (q = 0; q < n; q++)
      for (i = 0; i < N; i++)
        bad += host[(size_t)q * N + i] != (k < 2 ? (float)(10 * k + q) : 77.0f);
    cudaFree(x[k]);
  }
  CHECK_EQ(bad, 0);
  free(host);
}

/* Work handles: the group's stream and cddp's run side by side, ordered by events alone. */
static int stream_order(cddp_group *g, void *arg) {
  enum { N = 5000 };
  int n = cddp_world_size(g), step, ranks = n * (n - 1) / 2;
  float *x = (float *)cddp_alloc(g, N * sizeof *x), *y = (float *)on_device(NULL, N * sizeof *y);
  cudaStream_t s;
  bool done = false;
  (void)arg;
  CHECK(x != NULL);
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  cddp_set_stream(g, s);
  CHECK(cddp_stream(g) == (void *)s);
  for (step = 0; step < 8; step++) {
    cddp_work *w[2];
    fill_on(s, x, N, (float)(cddp_rank(g) + step), false);
    CHECK_OK(cddp_all_reduce(g, x, N, CDDP_F32, CDDP_SUM, &w[0]));
    fill_on(s, y, N, (float)(cddp_rank(g) + 1), false);
    CHECK_OK(cddp_all_reduce(g, y, N, CDDP_F32, CDDP_MAX, &w[1]));
    CHECK_OK(cddp_wait(w[step % 2]));
    fill_on(s, step % 2 ? y : x, N, 2, true);
    CHECK_OK(cddp_test(w[!(step % 2)], &done));
    CHECK_OK(cddp_wait(w[!(step % 2)]));
    fill_on(s, step % 2 ? x : y, N, 2, true);
    CHECK_OK(cddp_all_reduce(g, x, N, CDDP_F32, CDDP_SUM, NULL)); /* on s itself */
    check_fill(g, x, N, 2.0 * n * (ranks + n * step));
    check_fill(g, y, N, 2.0 * n);
    check_in_place(g, s);
  }
  CHECK(cudaStreamSynchronize(s) == cudaSuccess);
  CHECK(cudaSetDevice(99) == cudaErrorInvalidDevice);
  CHECK_OK(cddp_synchronize(g)); /* finds the stream empty, and leaves the program its error */
  CHECK(cudaGetLastError() == cudaErrorInvalidDevice);
  cddp_set_stream(g, NULL);
  cudaStreamDestroy(s);
  cudaFree(y);
  cddp_free(g, x);
  return 0;
}

static void test_streams(void) {
  CHECK_OK(run(stream_order, NULL, 2, NULL));
  CHECK_OK(run(stream_order, NULL, 4, NULL));
  CHECK_OK(run(stream_order, NULL, 2, "cpu"));
}

/* --- groups, messages, host memory --- */

static int sub_groups(cddp_group *g, void *arg) {
  int n = cddp_world_size(g), me = cddp_rank(g), k;
  int order[2] = {2, 0};
  cddp_group *half = NULL, *pair = NULL, *inner = NULL, *none = NULL;
  (void)arg;
  check_sum(g, n * (n + 1) / 2);
  CHECK_OK(cddp_group_split(g, me % 2, -me, &half));
  k = cddp_world_size(half);
  CHECK_EQ(k, n / 2 + (n % 2 != 0 && me % 2 == 0));
  CHECK_EQ(cddp_rank(half), k - 1 - me / 2);
  check_sum(half, k * (k + 1) / 2);
  CHECK_OK(cddp_group_new(g, order, 2, &pair));
  CHECK((pair != NULL) == (me == 0 || me == 2));
  if (pair != NULL) CHECK_EQ(cddp_rank(pair), me == 0);
  if (pair != NULL) check_sum(pair, 3);
  CHECK_OK(cddp_group_split(half, cddp_rank(half) == 0 ? 1 : -1, 0, &inner)); /* a single rank */
  if (inner != NULL) check_sum(inner, 1);
  CHECK_OK(cddp_group_split(g, -1, 0, &none));
  CHECK(none == NULL);
  check_sum(g, n * (n + 1) / 2);
  CHECK_OK(cddp_barrier(half));
  cddp_destroy(inner);
  cddp_destroy(pair);
  cddp_destroy(half);
  check_sum(g, n * (n + 1) / 2);
  return 0;
}

static void *wait_for_three(void *handles) {
  cddp_work **w = (cddp_work **)handles;
  int i;
  for (i = 0; i < 3; i++) CHECK_OK(cddp_wait(w[i]));
  return NULL;
}

static int messages(cddp_group *g, void *arg) {
  enum { N = 3000 };
  int n = cddp_world_size(g), me = cddp_rank(g), next = (me + 1) % n, before = (me + n - 1) % n, i;
  float *out[3], *in[3], host = (float)me;
  cudaStream_t s = (cudaStream_t)cddp_stream(g);
  cddp_work *w[6];
  pthread_t other;
  (void)arg;
  for (i = 0; i < 3; i++) {
    out[i] = (float *)on_device(NULL, N * sizeof(float));
    in[i] = (float *)on_device(NULL, N * sizeof(float));
    fill_on(s, out[i], N, (float)(10 * me + i), false);
    CHECK_OK(cddp_send(g, out[i], N, CDDP_F32, next, i, &w[i]));
    CHECK_OK(cddp_recv(g, in[i], N, CDDP_F32, before, i, &w[3 + i]));
  }
  CHECK_EQ(pthread_create(&other, NULL, wait_for_three, w), 0); /* whoever is first sends all */
  wait_for_three(w + 3);
  pthread_join(other, NULL);
  for (i = 0; i < 3; i++) check_fill(g, in[i], N, 10 * before + i);
  fill_on(s, in[1], N, -1, false); /* one without a handle goes with those that wait: all ranks */
  CHECK_OK(cddp_recv(g, in[1], N, CDDP_F32, before, 1, &w[0])); /* receive first */
  CHECK_OK(cddp_send(g, out[1], N, CDDP_F32, next, 1, NULL));
  CHECK_OK(cddp_wait(w[0]));
  check_fill(g, in[1], N, 10 * before + 1);
  for (i = 0; me > 0 && i < 30; i++) fill_on(s, in[0], N, -1, false); /* received after them */
  if (me > 0)
    CHECK_OK(cddp_recv(g, in[0], N, CDDP_F32, before, 0, NULL)); /* a chain of ranks */
  else
    fill_on(s, in[0], N, 1, false);
  fill_on(s, in[0], N, 2, true);
  if (next != 0) CHECK_OK(cddp_send(g, in[0], N, CDDP_F32, next, 0, NULL));
  check_fill(g, in[0], N, (double)(2 << me));
  CHECK_OK(cddp_send(g, &host, 1, CDDP_F32, next, 9, NULL)); /* host memory, with tags */
  CHECK_OK(cddp_recv(g, &host, 1, CDDP_F32, before, 9, NULL));
  CHECK_EQ(host, before);
  for (i = 0; i < 3; i++) {
    cudaFree(out[i]);
    cudaFree(in[i]);
  }
  return 0;
}

/* cddp_wait_for on a device: the host waits, gives up in time, and may come again; cddp_cancel
   leaves such an operation alone. */
static int wait_for_late(cddp_group *g, void *arg) {
  int me = cddp_rank(g);
  float *x = (float *)cddp_alloc(g, 100 * sizeof *x);
  cudaStream_t s = (cudaStream_t)cddp_stream(g);
  cddp_work *w = NULL;
  bool done = true;
  (void)arg;
  check_sum(g, 3);
  fill_on(s, x, 100, (float)me + 1, false);
  if (me == 0) {
    double t = test_now();
    CHECK_OK(cddp_all_reduce(g, x, 100, CDDP_F32, CDDP_SUM, &w));
    CHECK_IS(cddp_wait_for(w, 0.05), CDDP_TIMEOUT);
    CHECK(strstr(cddp_error(), "all_reduce on rank 0 has not finished") != NULL);
    CHECK(test_now() - t >= 0.05);
    CHECK_IS(cddp_wait_for(w, 0), CDDP_TIMEOUT);
    CHECK_OK(cddp_test(w, &done));
    CHECK(!done);
    CHECK_IS(cddp_cancel(w), CDDP_UNSUPPORTED);
    CHECK_OK(cddp_send(g, &me, 1, CDDP_I32, 1, 5, NULL)); /* host memory: the other may begin */
    CHECK_OK(cddp_wait_for(w, 20));
  } else {
    int32_t go = -1;
    CHECK_OK(cddp_recv(g, &go, 1, CDDP_I32, 0, 5, NULL));
    CHECK_OK(cddp_all_reduce(g, x, 100, CDDP_F32, CDDP_SUM, &w));
    CHECK_OK(cddp_wait_for(w, 20));
  }
  check_fill(g, x, 100, 3);
  cddp_free(g, x);
  return 0;
}

/* What NCCL has not, PyTorch's neither: bitwise operations, receives from any rank. Through the
   host, and in host memory, there is both. 3 ranks; arg: the backend. */
static int beyond_nccl(cddp_group *g, void *arg) {
  bool nccl = arg == NULL;
  int me = cddp_rank(g), i, k;
  int32_t x = 1 << me, *d = (int32_t *)on_device(&x, sizeof x), sum = 0;
  cddp_work *w = NULL;
  cddp_op op;
  for (op = CDDP_BAND; op <= CDDP_BXOR; op = (cddp_op)(op + 1))
    for (i = 0; i < 2; i++) {
      x = 7 - (1 << me);
      CHECK(cudaMemcpy(d, &x, sizeof x, cudaMemcpyHostToDevice) == cudaSuccess);
      CHECK_IS(cddp_all_reduce(g, d, 1, CDDP_I32, op, i == 1 ? &w : NULL),
               nccl ? CDDP_UNSUPPORTED : CDDP_OK);
      if (nccl) CHECK(strstr(cddp_error(), "host memory") != NULL && w == NULL);
      if (w != NULL) CHECK_OK(cddp_wait(w));
      w = NULL;
      k = 7 - (1 << me);
      CHECK_OK(cddp_all_reduce(g, &k, 1, CDDP_I32, op, NULL));
      CHECK_EQ(k, op == CDDP_BAND || op == CDDP_BXOR ? 0 : 7);
      to_host(g, &x, d, sizeof x);
      CHECK_EQ(x, nccl ? 7 - (1 << me) : k);
    }
  for (i = 0; i < 2; i++) {
    x = me;
    if (me > 0 && i == 1) CHECK_OK(cddp_send(g, &x, 1, CDDP_I32, 0, 3, NULL));
    if (me > 0 && i == 0 && !nccl) CHECK_OK(cddp_send(g, d, 1, CDDP_I32, 0, 3, NULL));
    for (k = 1; me == 0 && k < 3; k++) {
      cddp_result r = cddp_recv(g, i == 0 ? d : &x, 1, CDDP_I32, CDDP_ANY, 3, k == 2 ? &w : NULL);
      CHECK_IS(r, i == 0 && nccl ? CDDP_UNSUPPORTED : CDDP_OK);
      if (k == 2 && r == CDDP_OK) CHECK_OK(cddp_wait(w));
      sum += cddp_source();
    }
  }
  if (me == 0) CHECK_EQ(sum, nccl ? 1 : 6); /* -1 - 1 + 1 + 2: none yet, in the first */
  w = NULL;
  if (me == 0 && !nccl) { /* a receive through the host can be given up */
    CHECK_OK(cddp_recv(g, d, 1, CDDP_I32, 1, 4, &w));
    CHECK_IS(cddp_wait_for(w, 0.02), CDDP_TIMEOUT);
    CHECK_OK(cddp_cancel(w));
  }
  CHECK_OK(cddp_barrier(g));
  cudaFree(d);
  return 0;
}

/* Calls with counts on device memory, then ranks that disagree in one, which fails on all. */
static int with_counts(cddp_group *g, void *arg) {
  enum { MOST = 4000 };
  int n = cddp_world_size(g), me = cddp_rank(g), kind, r;
  int32_t *host = (int32_t *)malloc(8 * MOST * sizeof *host), *send, *recv;
  size_t out[8], in[8], i, k, all, bad;
  cddp_group *sub = NULL;
  cddp_work *w = NULL;
  (void)arg;
  for (kind = 0; kind < 6; kind++) { /* all_to_all_v and all_gather_v, with a handle or not */
    bool gathers = kind % 2 != 0;
    for (r = 0, all = 0; r < n; r++) {
      out[r] = kind < 4 ? ranks_mix((uint64_t)me, gathers ? 9 : (uint64_t)r, 3) % MOST : 0;
      in[r] = kind < 4 ? ranks_mix((uint64_t)r, gathers ? 9 : (uint64_t)me, 3) % MOST : 0;
      for (i = 0; i < out[r]; i++)
        host[gathers ? i : all + i] =
            (int32_t)(ranks_mix((uint64_t)me, gathers ? 0 : (uint64_t)r, i) & 0xffffff);
      all += out[r];
    }
    send = (int32_t *)on_device(host, all * sizeof *host);
    for (r = 0, all = 0; r < n; r++) all += in[r];
    recv = (int32_t *)on_device(NULL, all * sizeof *host);
    if (gathers)
      CHECK_OK(cddp_all_gather_v(g, send, recv, in, CDDP_I32, kind & 2 ? &w : NULL));
    else
      CHECK_OK(cddp_all_to_all_v(g, send, out, recv, in, CDDP_I32, kind & 2 ? &w : NULL));
    if (w != NULL) CHECK_OK(cddp_wait(w));
    CHECK((w != NULL) == ((kind & 2) != 0));
    w = NULL;
    to_host(g, host, recv, all * sizeof *host);
    for (r = 0, k = 0, bad = 0; r < n; r++)
      for (i = 0; i < in[r]; i++, k++)
        bad +=
            host[k] != (int32_t)(ranks_mix((uint64_t)r, gathers ? 0 : (uint64_t)me, i) & 0xffffff);
    CHECK_EQ(bad, 0);
    cudaFree(send);
    cudaFree(recv);
  }
  for (r = 0; r < n; r++) in[r] = r == 0 ? 0 : 2; /* host memory, of which rank 0 has none */
  for (i = 0; i < 2; i++) host[i] = me;
  CHECK_OK(cddp_all_gather_v(g, me == 0 ? NULL : host, host + 2, in, CDDP_I32, NULL));
  for (r = 1; r < n; r++) CHECK(host[2 * r] == r && host[2 * r + 1] == r);
  send = (int32_t *)on_device(host, 8 * MOST * sizeof *host);
  recv = (int32_t *)on_device(NULL, 8 * MOST * sizeof *host);
  CHECK_OK(cddp_group_split(g, 0, me, &sub));
  for (r = 0; r < n; r++) out[r] = in[r] = 1000;
  if (me == 0) out[n - 1] = 1001;
  if (n > 1 && sub != NULL) {
    cddp_result result = cddp_all_to_all_v(sub, send, out, recv, in, CDDP_I32, NULL);
    if (result == CDDP_OK) result = cddp_synchronize(sub); /* with NCCL it may be told there */
    CHECK_IS(result, CDDP_MISMATCH);
    CHECK(strstr(cddp_error(), "rank 0 sends 1001 elements to rank") != NULL);
  }
  cddp_destroy(sub);
  check_sum(g, n * (n + 1) / 2);
  cudaFree(send);
  cudaFree(recv);
  free(host);
  return 0;
}

/* A barrier with a handle ends when all ranks have come to it, with a handle or without. */
static int late_barrier(cddp_group *g, void *arg) {
  int me = cddp_rank(g), n = cddp_world_size(g), r;
  float *x = (float *)cddp_alloc(g, 1000 * sizeof *x);
  cudaStream_t s = (cudaStream_t)cddp_stream(g);
  int32_t go = 1;
  bool done = true;
  cddp_work *w = NULL;
  (void)arg;
  check_sum(g, n * (n + 1) / 2);
  fill_on(s, x, 1000, (float)me + 1, false);
  if (me == 0) {
    CHECK_OK(cddp_barrier_async(g, &w));
    CHECK_IS(cddp_wait_for(w, 0.05), CDDP_TIMEOUT);
    CHECK_OK(cddp_test(w, &done));
    CHECK(!done);
    for (r = 1; r < n; r++) CHECK_OK(cddp_send(g, &go, 1, CDDP_I32, r, 5, NULL));
  } else {
    CHECK_OK(cddp_recv(g, &go, 1, CDDP_I32, 0, 5, NULL));
    if (me == 1)
      CHECK_OK(cddp_barrier_async(g, &w));
    else
      CHECK_OK(cddp_barrier(g));
  }
  CHECK_OK(cddp_all_reduce(g, x, 1000, CDDP_F32, CDDP_SUM, NULL)); /* may begin before it ends */
  if (w != NULL) CHECK_OK(cddp_wait(w));
  check_fill(g, x, 1000, n * (n + 1) / 2);
  CHECK_OK(cddp_barrier(g));
  cddp_free(g, x);
  return 0;
}

static void gate_run(void *open) {
  while (__atomic_load_n((int *)open, __ATOMIC_ACQUIRE) == 0) ranks_sleep(1e-4);
}

/* The group's thread asks for a barrier's event while this one captures a stream in global mode. */
static int barrier_beside_capture(cddp_group *g, void *arg) {
  static int open; /* what is on the group's stream ends then */
  hostcuda_op gate = {gate_run, NULL, &open};
  double until = test_now() + RANKS_WITHIN(5);
  cudaGraph_t graph = NULL;
  cudaStream_t s;
  uint64_t asked;
  cddp_work *w;
  (void)arg;
  CHECK_OK(cddp_synchronize(g));
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  CHECK(hostcuda_enqueue((cudaStream_t)cddp_stream(g), gate, false) == cudaSuccess);
  CHECK_OK(cddp_barrier_async(g, &w));
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal) == cudaSuccess);
  asked = hostcuda_calls("cudaEventQuery");
  while (hostcuda_calls("cudaEventQuery") < asked + 2 && test_now() < until) ranks_sleep(1e-4);
  CHECK(hostcuda_calls("cudaEventQuery") >= asked + 2);
  CHECK(cudaStreamEndCapture(s, &graph) == cudaSuccess); /* not void */
  cudaGraphDestroy(graph);
  __atomic_store_n(&open, 1, __ATOMIC_RELEASE);
  CHECK_OK(cddp_wait(w));
  cudaStreamDestroy(s);
  return 0;
}

static int host_memory(cddp_group *g, void *arg) {
  int n = cddp_world_size(g), me = cddp_rank(g), i;
  float x[3000], *d = (float *)cddp_alloc(g, sizeof x);
  cddp_work *w;
  (void)arg;
  for (i = 0; i < 3000; i++) x[i] = (float)me;
  CHECK_OK(cddp_all_reduce(g, x, 3000, CDDP_F32, CDDP_SUM, NULL));
  CHECK_EQ(x[2999], n * (n - 1) / 2);
  CHECK_OK(cddp_broadcast(g, x, 3000, CDDP_F32, 0, &w));
  CHECK_OK(cddp_wait(w));
  CHECK_IS(cddp_all_gather(g, x, d, 1, CDDP_F32, NULL), CDDP_INVALID_ARGUMENT);
  CHECK(strstr(cddp_error(), "both") != NULL);
  check_sum(g, n * (n + 1) / 2);
  cddp_free(g, d);
  return 0;
}

static void test_groups(void) {
  CHECK_OK(run(sub_groups, NULL, 4, NULL));
  CHECK_OK(run(sub_groups, NULL, 3, "cpu"));
  CHECK_OK(run(messages, NULL, 2, NULL));
  CHECK_OK(run(messages, NULL, 3, NULL));
  CHECK_OK(run(messages, NULL, 3, "cpu"));
  CHECK_OK(run(wait_for_late, NULL, 2, NULL));
  CHECK_OK(run(wait_for_late, NULL, 2, "cpu"));
  CHECK_OK(run(with_counts, NULL, 3, NULL));
  CHECK_OK(run(with_counts, NULL, 3, "cpu"));
  CHECK_OK(run(with_counts, NULL, 1, NULL));
  CHECK_OK(run(late_barrier, NULL, 3, NULL));
  CHECK_OK(run(late_barrier, NULL, 3, "cpu"));
  CHECK_OK(run(barrier_beside_capture, NULL, 2, NULL));
  CHECK_OK(run(beyond_nccl, NULL, 3, NULL));
  CHECK_OK(run(beyond_nccl, &inside_comm_min_ranks, 3, "cpu"));
  CHECK_OK(run(host_memory, NULL, 2, NULL));
  CHECK_OK(run(host_memory, NULL, 2, "cpu"));
}

static void test_hosts(void) { /* the same between hosts */
  if (!RANKS_TSAN) CHECK_OK(run_on("aab", every_collective, NULL, NULL));
  CHECK_OK(run_on("abba", sub_groups, NULL, NULL));
  CHECK_OK(run_on("aba", messages, NULL, NULL));
  CHECK_OK(run_on("ab", host_memory, NULL, NULL));
  if (RANKS_TSAN) return;
  CHECK_OK(run_on("ab", every_collective, NULL, "cpu"));
  CHECK_OK(run_on("aba", sub_groups, NULL, "cpu"));
  CHECK_OK(run_on("aab", messages, NULL, "cpu"));
  CHECK_OK(run_on("aab", with_counts, NULL, NULL));
  CHECK_OK(run_on("aab", late_barrier, NULL, NULL));
}

/* Ranks as threads of a process of its own: CUDA does not survive a fork. */
static int on_threads(int rank, void *arg) {
  (void)rank;
  (void)arg;
  CHECK_OK(run_threads(every_collective, NULL, 2, NULL));
  if (RANKS_TSAN) return test_failures != 0;
  CHECK_OK(run_threads(sub_groups, NULL, 4, NULL));
  CHECK_OK(run_threads(messages, NULL, 2, "cpu"));
  return test_failures != 0;
}

static void test_threads(void) {
  pid_t pid;
  int status = -1;
  if (!own_gpus("threads of a process cannot share a GPU")) return;
  pid = ranks_fork(on_threads, 0, NULL);
  ranks_join(&pid, 1, RANKS_WITHIN(20), &status);
  CHECK_EQ(status, 0);
}

/* CUDA_LAUNCH_BLOCKING=1: NCCL's thread waits for the other ranks, so a call's host does. */
static void test_blocking_launches(void) {
  setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
  CHECK_OK(run(messages, NULL, 3, NULL));
  if (!RANKS_TSAN) CHECK_OK(run(every_collective, NULL, 2, NULL));
  unsetenv("CUDA_LAUNCH_BLOCKING");
}

int main(void) {
  RUN(test_collectives);
  RUN(test_means);
  RUN(test_streams);
  RUN(test_groups);
  RUN(test_hosts);
  RUN(test_threads);
  RUN(test_blocking_launches);
  return TEST_END();
}
