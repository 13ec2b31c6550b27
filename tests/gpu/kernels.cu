/* The kernels of cddp_kernels.cuh against references in double precision, and SGD against cddp.h's
   own to the last bit.

   Each kernel runs on arrays of many lengths and alignments, and in every dtype: sums, means and
   scaling, norms, casts, the optimizers' updates, embedding and cross entropy of the examples. The
   same file runs on the test double (compiled by g++, in ninja test) and on a GPU (nvcc,
   tests/gpu/gpu.sh). */
#define CDDP_KERNELS_IMPLEMENTATION
#include "../../cddp_kernels.cuh"

#include "../test.h"

#include <vector>

#include "hostcuda/half.h"

#define CUDA(call) CHECK_EQ((int)(call), (int)cudaSuccess)

static cudaStream_t stream;
static double *scratch, *stats;
static uint64_t seed = 1;

static double uniform(double bound) {
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return ((double)(seed >> 11) / 4503599627370496.0 - 1.0) * bound;
}

/* n elements on the device, shift elements after a 256-byte boundary, between canaries. */
template <typename T> struct array {
  enum { EDGE = 64 };
  size_t n, shift;
  T *base;
  explicit array(size_t n_, size_t shift_ = 0) : n(n_), shift(shift_), base(NULL) {
    size_t bytes = (n + shift + 2 * EDGE) * sizeof(T);
    CUDA(cudaMalloc((void **)&base, bytes));
    CUDA(cudaMemsetAsync(base, 0xa5, bytes, stream));
  }
  explicit array(const std::vector<T> &x, size_t shift_ = 0) : array(x.size(), shift_) { put(x); }
  array(const array &) = delete;
  array &operator=(const array &) = delete;
  T *p() { return base + EDGE + shift; }
  void put(const std::vector<T> &x) {
    CUDA(cudaMemcpyAsync(p(), x.data(), n * sizeof(T), cudaMemcpyHostToDevice, stream));
    CUDA(cudaStreamSynchronize(stream)); /* x may go away */
  }
  std::vector<T> get() {
    std::vector<T> all(n + shift + 2 * EDGE), x;
    CUDA(cudaMemcpyAsync(all.data(), base, all.size() * sizeof(T), cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    const unsigned char *bytes = (const unsigned char *)(const void *)all.data();
    size_t bad = 0, first = (EDGE + shift) * sizeof(T), last = first + n * sizeof(T);
    for (size_t i = 0; i < all.size() * sizeof(T); i++)
      bad += (i < first || i >= last) && bytes[i] != 0xa5;
    CHECK_EQ(bad, 0);
    x.assign(all.begin() + (ptrdiff_t)(EDGE + shift), all.begin() + (ptrdiff_t)(EDGE + shift + n));
    return x;
  }
  ~array() { cudaFree(base); }
};

static std::vector<float> floats(size_t n, double bound) {
  std::vector<float> x(n);
  for (size_t i = 0; i < n; i++) x[i] = (float)uniform(bound);
  return x;
}

static size_t size_of(cddp_dtype d) { return cddp_dtype_size(d); }

/* Bytes of n random elements of a dtype. */
static std::vector<char> random_bytes(cddp_dtype d, size_t n) {
  std::vector<char> x(n * size_of(d));
  for (size_t i = 0; i < n; i++) {
    double v = uniform(2);
    float f = (float)v;
    uint16_t h = d == CDDP_F16 ? hostcuda_float_to_half(f) : hostcuda_float_to_bf16(f);
    const void *from = d == CDDP_F64 ? (const void *)&v : d == CDDP_F32 ? (const void *)&f : &h;
    memcpy(&x[i * size_of(d)], from, size_of(d));
  }
  return x;
}

static double value_of(cddp_dtype d, const char *p) {
  double v;
  float f;
  uint16_t h;
  memcpy(&v, p, d == CDDP_F64 ? 8 : 2);
  memcpy(&f, p, d == CDDP_F32 ? 4 : 2);
  memcpy(&h, p, 2);
  return d == CDDP_F64   ? v
         : d == CDDP_F32 ? (double)f
         : d == CDDP_F16 ? (double)hostcuda_half_to_float(h)
                         : (double)hostcuda_bf16_to_float(h);
}

/* Of the two elements around x the nearer; the even one when both are as near. */
static double nearest(cddp_dtype d, double x) {
  int digits = d == CDDP_F64 ? 53 : d == CDDP_F32 ? 24 : d == CDDP_F16 ? 11 : 8, e;
  double unit;
  frexp(x, &e);
  if (d == CDDP_F16 && e < -13) e = -13;
  unit = ldexp(1.0, e - digits);
  x = nearbyint(x / unit) * unit;
  return d == CDDP_F16 && fabs(x) >= 65520 ? copysign(HUGE_VAL, x) : x;
}

static double distance(const std::vector<float> &x, const std::vector<double> &want) {
  double off = 0, norm = 0;
  for (size_t i = 0; i < x.size(); i++) {
    off += ((double)x[i] - want[i]) * ((double)x[i] - want[i]);
    norm += want[i] * want[i];
  }
  return off == off ? sqrt(off / (norm > 0 ? norm : 1)) : HUGE_VAL;
}

/* --- SGD --- */

static cddp_sgd_desc rule(int kind) {
  cddp_sgd_desc d;
  memset(&d, 0, sizeof d);
  d.lr = 0.1;
  if (kind >= 1) d.momentum = 0.9;
  if (kind == 2) d.nesterov = true;
  if (kind == 3) d.dampening = 0.3;
  if (kind >= 2) d.weight_decay = 0.01;
  if (kind == 4) d.maximize = true;
  return d;
}

#ifndef __CUDACC__ /* counts on the host */
/* Counts what is moved by packs, and what by single elements. */
static size_t by_packs, by_elements;
struct moves : cddp__cu_each {
  enum { READS = CDDP__CU_GRAD, WRITES = 0 };
  void begin() const {}
  void apply(float &, float &, float &) const {}
  template <size_t N> void copy(const cddp__cu_piece &, size_t, const float *) const {
    (N == 1 ? by_elements : by_packs) += N;
  }
};

/* Of a segment's last, incomplete chunk packs are moved too, and no more than 3 elements alone. */
static void test_tails(void) {
  array<float> x((size_t)3 * 4096 + 4095);
  cddp_segment s[3] = {{NULL, x.p(), NULL, 4096 + 4095, NULL},
                       {NULL, x.p() + 8192, NULL, 17, NULL},
                       {NULL, x.p() + 8224, NULL, 4, NULL}};
  CUDA(cddp__cu_segments<float>(s, NULL, 3, moves(), stream));
  CUDA(cudaStreamSynchronize(stream));
  CHECK_EQ(by_packs, 4096 + 4092 + 16 + 4);
  CHECK_EQ(by_elements, 3 + 1);
}
#endif

/* Three steps on a parameter of n elements; the weights' bits are cddp_optim_step's. */
static void compare_sgd(cddp_dtype t, size_t n, size_t shift, int kind, unsigned flags) {
  size_t bytes = n * size_of(t), move = shift * size_of(t);
  std::vector<char> w = random_bytes(t, n), g;
  array<char> dw(w, move), dg(bytes, move), dm(bytes, move);
  cddp_sgd_desc d = rule(kind);
  cddp_param p = {"w", w.data(), NULL, n, t};
  cddp_optim *sgd;
  g.resize(bytes);
  p.grad = g.data();
  CHECK_OK(cddp_sgd_create(&sgd, &p, 1, &d));
  for (int step = 0; step < 3; step++) {
    cddp_segment s = {dw.p(), dg.p(), d.momentum != 0 ? dm.p() : NULL, n, NULL};
    std::vector<char> fresh = random_bytes(t, n);
    memcpy(g.data(), fresh.data(), bytes);
    dg.put(fresh);
    CHECK_OK(cddp_optim_step(sgd));
    CUDA(cddp_cuda_sgd(&s, 1, t, &d, flags | (step == 0 ? 1u * CDDP_SGD_FIRST : 0u), stream));
    CHECK(dw.get() == w);
    fresh = dg.get();
    if ((flags & CDDP_SGD_ZERO) != 0) CHECK(fresh == std::vector<char>(bytes));
    else CHECK(fresh == g);
  }
  if (d.momentum != 0) dm.get();
  cddp_optim_destroy(sgd);
}

static void test_sgd(void) {
  static const size_t sizes[] = {1, 3, 1023, 4096, 8195, 20001};
  for (int t = 0; t < 4; t++)
    for (int kind = 0; kind < 5; kind++)
      for (int i = 0; i < 6; i++) {
        if (t > 0 && (i + kind) % 3 != 0) continue; /* f32 in full, a third of the others */
        compare_sgd((cddp_dtype)t, sizes[i], (size_t)(i + kind) % 4, kind,
                    kind % 2 == 0 ? 0u : (unsigned)CDDP_SGD_ZERO);
      }
}

static void compare_close(const double *a, const double *b, size_t n) {
  size_t bad = 0;
  for (size_t i = 0; i < n; i++) bad += !(fabs(a[i] - b[i]) <= 1e-12 * (1 + fabs(b[i])));
  CHECK_EQ(bad, 0);
}

/* Four steps of AdamW on a parameter of n elements; the weights' bits are cddp_optim_step's. */
static void compare_adamw(cddp_dtype t, size_t n, size_t shift, int kind, unsigned flags) {
  size_t bytes = n * size_of(t), move = shift * size_of(t), each = (bytes + move + 15) / 16 * 16;
  std::vector<char> w = random_bytes(t, n), g(bytes);
  array<char> dw(w, move), dg(bytes, move), states(3 * each, move);
  cddp_adamw_desc d;
  cddp_adamw_step a;
  cddp_param p = {"w", w.data(), g.data(), n, t};
  cddp_optim *o;
  memset((void *)&d, 0, sizeof d);
  memset((void *)&a, 0, sizeof a);
  d.lr = 0.1;
  d.weight_decay = kind == 0 ? 0 : 0.01;
  d.beta1 = kind == 3 ? 0.25 : 0.9;
  d.beta2 = 0.95;
  d.eps = 1e-6;
  a.amsgrad = d.amsgrad = kind >= 2;
  a.maximize = d.maximize = kind == 1;
  a.decay = 1 - d.lr * d.weight_decay;
  a.lerp = 1 - d.beta1;
  a.keep = d.beta2;
  a.take = 1 - d.beta2;
  a.eps = d.eps;
  a.stride = each;
  CHECK_OK(cddp_adamw_create(&o, &p, 1, &d));
  CUDA(cudaMemsetAsync(states.p(), 0, 3 * each, stream));
  double power1 = 1, power2 = 1;
  for (int step = 0; step < 4; step++) {
    cddp_segment s = {dw.p(), dg.p(), states.p(), n, NULL};
    std::vector<char> fresh = random_bytes(t, n);
    power1 *= d.beta1, power2 *= d.beta2;
    a.step = -d.lr / (1 - power1);
    a.root = sqrt(1 - power2);
    memcpy(g.data(), fresh.data(), bytes);
    dg.put(fresh);
    CHECK_OK(cddp_optim_step(o));
    CUDA(cddp_cuda_adamw(&s, 1, t, &a, flags, stream));
    if (t == CDDP_F32) CHECK(dw.get() == w); /* f64 has all bits of 1 - beta^t */
    else compare_close((const double *)(const void *)dw.get().data(), (const double *)p.data, n);
    fresh = dg.get();
    if ((flags & CDDP_SGD_ZERO) != 0) CHECK(fresh == std::vector<char>(bytes));
    else CHECK(fresh == g);
  }
  states.get();
  cddp_optim_destroy(o);
}

static void test_adamw(void) {
  static const size_t sizes[] = {1, 3, 1023, 4096, 8195, 20001};
  cddp_segment s = {NULL, NULL, NULL, 0, NULL};
  cddp_adamw_step a;
  memset((void *)&a, 0, sizeof a);
  for (int t = 0; t < 2; t++)
    for (int kind = 0; kind < 4; kind++)
      for (int i = 0; i < 6; i++)
        compare_adamw((cddp_dtype)t, sizes[i], (size_t)(i + kind) % 4, kind,
                      (i + kind) % 2 == 0 ? 0u : (unsigned)CDDP_SGD_ZERO);
  CUDA(cddp_cuda_adamw(&s, 1, CDDP_F32, &a, 0, stream));
  CHECK_EQ((int)cddp_cuda_adamw(&s, 1, CDDP_F16, &a, 0, stream), (int)cudaErrorInvalidValue);
  s.count = 1; /* without memory */
  CHECK_EQ((int)cddp_cuda_adamw(&s, 1, CDDP_F32, &a, 0, stream), (int)cudaErrorInvalidValue);
  s.data = s.grad = s.momentum = s.master = scratch;
  a.stride = 48; /* packs of masters are of 32 bytes */
  CHECK_EQ((int)cddp_cuda_adamw(&s, 1, CDDP_F16, &a, 0, stream), (int)cudaErrorInvalidValue);
}

static void test_many_segments(void) { /* more than a launch takes; some empty, some unaligned */
  enum { COUNT = 150 };
  std::vector<float> w = floats(COUNT * 41, 1), g = floats(COUNT * 41, 1);
  array<float> dw(w), dg(g, 1), dm(COUNT * 41);
  std::vector<cddp_segment> s(COUNT);
  std::vector<float> got;
  cddp_sgd_desc d = rule(0);
  size_t bad = 0;
  for (int i = 0; i < COUNT; i++) {
    cddp_segment one = {dw.p() + i * 41, dg.p() + i * 41, NULL, (size_t)(i % 42), NULL};
    s[(size_t)i] = one;
  }
  CUDA(cddp_cuda_sgd(s.data(), COUNT, CDDP_F32, &d, 0, stream));
  got = dw.get();
  for (size_t i = 0; i < got.size(); i++)
    bad += got[i] != (i % 41 < i / 41 % 42 ? fmaf(-0.1f, g[i], w[i]) : w[i]);
  CHECK_EQ(bad, 0);
  CUDA(cddp_cuda_sgd(NULL, 0, CDDP_F32, &d, 0, stream));
  CHECK_EQ((int)cddp_cuda_sgd(s.data(), 2, CDDP_I32, &d, 0, stream), (int)cudaErrorInvalidValue);
  d.momentum = 0.5; /* without memory for it */
  CHECK_EQ((int)cddp_cuda_sgd(s.data(), 2, CDDP_F32, &d, 0, stream), (int)cudaErrorInvalidValue);
}

static void test_copies(void) {
  for (int i = 0; i < 6; i++) {
    size_t n = 5000 + (size_t)i, shift = (size_t)i % 3, bad = 0;
    bool half = i % 2 == 0;
    std::vector<float> w = floats(n, 1), g = floats(n, 1), got;
    array<float> dw(w, shift), dg(g, shift);
    array<uint16_t> dc(n, i < 4 ? shift : shift + 1);
    void *copy = dc.p();
    std::vector<uint16_t> c;
    cddp_segment s = {dw.p(), dg.p(), NULL, n, NULL};
    cddp_sgd_desc d = rule(0);
    CUDA(
        cddp_cuda_sgd_copies(&s, &copy, 1, half ? CDDP_F16 : CDDP_BF16, &d, CDDP_SGD_ZERO, stream));
    got = dw.get(), c = dc.get();
    for (size_t k = 0; k < n; k++) {
      bad += got[k] != fmaf(-0.1f, g[k], w[k]);
      bad += c[k] != (half ? hostcuda_float_to_half(got[k]) : hostcuda_float_to_bf16(got[k]));
    }
    CHECK_EQ(bad, 0);
  }
}

static void test_copies_alone(void) { /* more than a launch takes; f16 and bf16; some empty */
  enum { COUNT = 70, EACH = 1031 };
  std::vector<float> w = floats(COUNT * EACH, 1);
  std::vector<cddp_segment> s(COUNT);
  std::vector<void *> to(COUNT);
  array<float> dw(w);
  for (int half = 0; half < 2; half++) {
    array<uint16_t> dc(COUNT * EACH, 1);
    std::vector<uint16_t> c;
    size_t bad = 0;
    for (size_t i = 0; i < COUNT; i++) {
      cddp_segment one = {dw.p() + i * EACH, NULL, NULL, i % 5 == 0 ? 0 : (size_t)EACH, NULL};
      s[i] = one;
      to[i] = dc.p() + i * EACH;
    }
    CUDA(cddp_cuda_copies(s.data(), to.data(), COUNT, half ? CDDP_F16 : CDDP_BF16, stream));
    c = dc.get();
    for (size_t i = 0; i < c.size(); i++)
      bad += c[i] != (i / EACH % 5 == 0 ? 0xa5a5 /* not touched */
                      : half            ? hostcuda_float_to_half(w[i])
                                        : hostcuda_float_to_bf16(w[i]));
    CHECK_EQ(bad, 0);
    CHECK(dw.get() == w);
  }
  CUDA(cddp_cuda_copies(NULL, NULL, 0, CDDP_F16, stream));
  CHECK_EQ((int)cddp_cuda_copies(s.data(), to.data(), 2, CDDP_F32, stream),
           (int)cudaErrorInvalidValue);
  to[1] = NULL;
  CHECK_EQ((int)cddp_cuda_copies(s.data(), to.data(), 2, CDDP_F16, stream),
           (int)cudaErrorInvalidValue);
}

/* --- sums --- */

static void test_norm(void) {
  std::vector<float> g = floats(40001, 3), h = floats(777, 3), got;
  array<float> dg(g), dh(h, 3);
  cddp_segment s[2] = {{NULL, dg.p(), NULL, g.size(), NULL}, {NULL, dh.p(), NULL, h.size(), NULL}};
  double want = 0, first[2], again[2], factor;
  size_t bad = 0;
  for (float x : g) want += (double)x * (double)x;
  for (float x : h) want += (double)x * (double)x;
  CUDA(cddp_cuda_squares(s, 2, CDDP_F32, scratch, false, stream));
  CUDA(cddp_cuda_factor(scratch, 7.0, stream));
  CUDA(cudaMemcpyAsync(first, scratch, 16, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
  CHECK(fabs(first[0] - want) <= 1e-12 * want);
  CHECK(fabs(first[1] - 7.0 / (sqrt(want) + 1e-6)) <= 1e-12);
  CUDA(cddp_cuda_squares(s, 2, CDDP_F32, scratch, false, stream));
  CUDA(cddp_cuda_scale(s, 2, CDDP_F32, scratch, stream));
  CUDA(cudaMemcpyAsync(again, scratch, 16, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
  CHECK_EQ(first[0], again[0]);
  factor = (double)(float)first[1];
  got = dg.get();
  for (size_t i = 0; i < got.size(); i++) bad += got[i] != g[i] * (float)factor;
  got = dh.get();
  for (size_t i = 0; i < got.size(); i++) bad += got[i] != h[i] * (float)factor;
  CHECK_EQ(bad, 0);
  CUDA(cddp_cuda_squares(s, 1, CDDP_F32, scratch, true, stream)); /* adds */
  CUDA(cddp_cuda_factor(scratch, 1e30, stream));
  CUDA(cudaMemcpyAsync(again, scratch, 16, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
  CHECK(again[0] > first[0]);
  CHECK_EQ(again[1], 1);
  again[0] = NAN; /* makes all gradients NaN, unless only the norm is asked for */
  CUDA(cudaMemcpyAsync(scratch, again, 8, cudaMemcpyHostToDevice, stream));
  CUDA(cddp_cuda_factor(scratch, 7.0, stream));
  CUDA(cudaMemcpyAsync(first, scratch, 16, cudaMemcpyDeviceToHost, stream));
  CUDA(cddp_cuda_factor(scratch, INFINITY, stream));
  CUDA(cudaMemcpyAsync(again, scratch, 16, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
  CHECK(isnan(first[1]));
  CHECK_EQ(again[1], 1);
  CUDA(cddp_cuda_squares(s, 0, CDDP_F32, scratch, false, stream));
  CUDA(cudaMemcpyAsync(again, scratch, 8, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
  CHECK_EQ(again[0], 0);
}

/* More segments than a launch takes, and on a device more chunks than it has blocks. */
static void test_norm_of_many(void) {
#ifdef __CUDACC__
  std::vector<float> g = floats(6000001, 3);
#else
  std::vector<float> g = floats(600001, 3);
#endif
  array<float> dg(g);
  std::vector<cddp_segment> s;
  double want = 0, got;
  size_t at = 0;
  for (size_t i = 0; at < g.size(); i++) {
    cddp_segment one = {NULL, dg.p() + at, NULL, i < 200 ? 37 * i % 4999 : g.size() - at, NULL};
    s.push_back(one);
    at += one.count;
  }
  for (float x : g) want += (double)x * (double)x;
  CUDA(cddp_cuda_squares(s.data(), (int)s.size(), CDDP_F32, scratch, false, stream));
  CUDA(cudaMemcpyAsync(&got, scratch, 8, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
  CHECK(fabs(got - want) <= 1e-12 * want);
}

/* Element i of n nodes, merged while the two last sums are equally wide, or no node is left. */
static double merged(const std::vector<std::vector<char>> &nodes, const std::vector<int> &widths,
                     cddp_dtype dtype, cddp_dtype last, size_t i) {
  std::vector<double> sums;
  std::vector<int> sizes;
  for (size_t k = 0; k < nodes.size(); k++) {
    cddp_dtype of = k + 1 == nodes.size() ? last : dtype == CDDP_F64 ? CDDP_F64 : CDDP_F32;
    sums.push_back(value_of(of, &nodes[k][i * size_of(of)]));
    sizes.push_back(widths[k]);
    while (sums.size() > 1 &&
           (k + 1 == nodes.size() || sizes.back() == sizes[sizes.size() - 2])) {
      double top = sums.back();
      int size = sizes.back();
      sums.pop_back(), sizes.pop_back();
      sums.back() = dtype == CDDP_F64 ? sums.back() + top
                                      : (double)((float)sums.back() + (float)top);
      sizes.back() += size;
    }
  }
  return sums[0];
}

/* The sum's bits, with a divisor or without one; shift: elements from a multiple of 16 bytes. */
static void compare_sum(cddp_dtype dtype, const std::vector<int> &widths, int divisor, size_t n,
                        size_t shift) {
  cddp_dtype wide = dtype == CDDP_F64 ? CDDP_F64 : CDDP_F32;
  cddp_dtype last = divisor == 0 ? dtype : wide, to = divisor == 0 ? wide : dtype;
  std::vector<std::vector<char>> nodes;
  std::vector<array<char> *> device;
  std::vector<const void *> at;
  array<char> out(n * size_of(to), shift * size_of(to));
  size_t bad = 0;
  for (size_t k = 0; k < widths.size(); k++) {
    cddp_dtype of = k + 1 == widths.size() ? last : wide;
    nodes.push_back(random_bytes(of, n));
    device.push_back(new array<char>(nodes[k], shift * size_of(of)));
    at.push_back(device[k]->p());
  }
  CUDA(cddp__cu_table.sum(out.p(), dtype, at.data(), widths.data(), (int)widths.size(), divisor, n,
                          stream));
  std::vector<char> got = out.get();
  for (size_t i = 0; i < n; i++) {
    double want = merged(nodes, widths, dtype, last, i);
    if (divisor != 0)
      want = wide == CDDP_F64 ? want / divisor
                              : nearest(dtype, (double)((float)want / (float)divisor));
    bad += value_of(to, &got[i * size_of(to)]) != want;
  }
  CHECK_EQ(bad, 0);
  for (array<char> *a : device) delete a;
}

static void test_sum_of_nodes(void) {
  std::vector<int> deep, widths;
  for (int t = 0; t < 4; t++)
    for (int n = 1; n <= 19; n++) { /* 16 equal nodes need a stack of 5 */
      cddp_dtype dtype = (cddp_dtype)t;
      compare_sum(dtype, std::vector<int>((size_t)n, 1), 0, 1030, (size_t)n % 5 == 4);
      compare_sum(dtype, std::vector<int>((size_t)n, 2), 3, 1030, (size_t)n % 7 == 6);
    }
  for (int seed_ = 0; seed_ < 40; seed_++) { /* as ranks with unequal numbers of shards have them */
    widths.clear();
    for (int left = 1 + seed_, begin = 0; left > 0;) {
      int width = 1, most = 1 + (int)((uniform(1) + 1) * 8);
      while (2 * width <= left && 2 * width <= most && begin % (2 * width) == 0) width *= 2;
      widths.push_back(width);
      begin += width, left -= width;
    }
    compare_sum((cddp_dtype)(seed_ % 4), widths, seed_ % 3, 517, 0);
  }
  for (int width = 1 << 15; width > 0; width /= 2) deep.push_back(width); /* the deepest */
  compare_sum(CDDP_F32, deep, 0, 1030, 0);
  compare_sum(CDDP_BF16, deep, 5, 1030, 1);
  deep.insert(deep.begin(), 1 << 16);
  const void *at[17];
  for (const void *&a : at) a = scratch;
  CHECK_EQ(cddp__cu_table.sum(scratch, CDDP_F32, at, deep.data(), 17, 0, 1, stream),
           (int)cudaErrorInvalidValue);
}

/* --- arrays --- */

static void test_convert(void) {
  for (int from = 0; from < 4; from++)
    for (int to = 0; to < 4; to++) {
      cddp_dtype f = (cddp_dtype)from, t = (cddp_dtype)to;
      size_t n = 4099, shift = (size_t)(from + to) % 2, bad = 0;
      std::vector<char> x = random_bytes(f, n), y;
      if (f == CDDP_F64)
        for (size_t i = 0; i < n; i += 3) { /* ties, near ties, subnormals, what overflows */
          double v = i % 2 == 0 ? 1 + ldexp((double)(i % 64) + 0.5, -11) + (i % 5 == 0 ? 1e-14 : 0)
                                : ldexp(uniform(1), (int)(i % 40) - 24);
          memcpy(&x[i * 8], &v, 8);
        }
      array<char> dx(x, shift * size_of(f)), dy(n * size_of(t), shift * size_of(t));
      CUDA(cddp_cuda_convert(dy.p(), t, dx.p(), f, n, stream));
      y = dy.get();
      for (size_t i = 0; i < n; i++)
        bad += value_of(t, &y[i * size_of(t)]) != nearest(t, value_of(f, &x[i * size_of(f)]));
      CHECK_EQ(bad, 0);
    }
  CUDA(cddp_cuda_convert(NULL, CDDP_F32, NULL, CDDP_F16, 0, stream));
  CHECK_EQ((int)cddp_cuda_convert(scratch, CDDP_I8, scratch, CDDP_F16, 1, stream),
           (int)cudaErrorInvalidValue);
}

static void test_fill(void) {
  array<float> x(10001, 1);
  double sum = 0;
  size_t bad = 0;
  std::vector<float> got, again;
  CUDA(cddp_cuda_fill(x.p(), CDDP_F32, x.n, 0.1, stream));
  for (float f : x.get()) bad += f != 0.1f;
  CHECK_EQ(bad, 0);
  CUDA(cddp_cuda_uniform(x.p(), x.n, 2.0f, 42, stream));
  got = x.get();
  for (float f : got) bad += !(f >= -2 && f < 2), sum += (double)f;
  CHECK_EQ(bad, 0);
  CHECK(fabs(sum / (double)x.n) < 0.05);
  CUDA(cddp_cuda_uniform(x.p(), x.n, 2.0f, 42, stream));
  CHECK(x.get() == got);
  CUDA(cddp_cuda_uniform(x.p(), x.n, 2.0f, 43, stream));
  CHECK(x.get() != got);
}

/* --- layers --- */

static void read_stats(double *to) {
  CUDA(cudaMemcpyAsync(to, stats, 16, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
  CUDA(cudaMemsetAsync(stats, 0, 16, stream));
}

static void test_mse(void) {
  std::vector<float> y = floats(3001, 2), target = floats(3001, 2);
  std::vector<double> dy(3001);
  array<float> d(y), t(target, 1);
  double loss = 0, got[2];
  for (size_t i = 0; i < y.size(); i++) {
    double error = (double)y[i] - (double)target[i];
    loss += error * error / 3001, dy[i] = 2 * error / 3001;
  }
  CUDA(cddp_cuda_mse(d.p(), t.p(), d.p(), stats, scratch, y.size(), stream));
  read_stats(got);
  CHECK(fabs(got[0] - loss) < 1e-6 * loss);
  CHECK(distance(d.get(), dy) < 1e-6);
}

static void compare_cross_entropy(size_t rows, int classes, double bound) {
  size_t wide = (size_t)classes;
  std::vector<float> y = floats(rows * wide, bound);
  std::vector<double> dy(rows * wide);
  std::vector<int32_t> labels(rows);
  array<float> d(y, 1);
  double loss = 0, hits = 0, got[2];
  for (size_t r = 0; r < rows; r++) {
    const float *row = &y[r * wide];
    size_t best = 0, label = r * 7 % wide;
    double sum = 0;
    labels[r] = (int32_t)label;
    for (size_t k = 0; k < wide; k++) best = row[k] > row[best] ? k : best;
    for (size_t k = 0; k < wide; k++) sum += exp((double)row[k] - (double)row[best]);
    for (size_t k = 0; k < wide; k++)
      dy[r * wide + k] = (exp((double)row[k] - (double)row[best]) / sum - (k == label ? 1 : 0)) /
                         (double)rows;
    loss += ((double)row[best] - (double)row[label] + log(sum)) / (double)rows;
    hits += best == label;
  }
  array<int32_t> l(labels);
  CUDA(cddp_cuda_cross_entropy(d.p(), l.p(), d.p(), stats, scratch, (int64_t)rows, classes,
                               stream));
  read_stats(got);
  CHECK(fabs(got[0] - loss) <= 1e-5 * (loss + 1));
  CHECK_EQ(got[1], hits);
  CHECK(distance(d.get(), dy) < 1e-5);
}

static void test_cross_entropy(void) {
  int32_t wrong = 10;
  double got[2];
  compare_cross_entropy(1, 1, 1);
  compare_cross_entropy(7, 10, 3);
  compare_cross_entropy(99, 33, 3);
  compare_cross_entropy(20, 1000, 3);
  compare_cross_entropy(64, 10, 10000); /* exp alone would overflow */
  array<float> y(floats(10, 1));
  array<int32_t> l(std::vector<int32_t>(1, wrong));
  CUDA(cddp_cuda_cross_entropy(y.p(), l.p(), NULL, stats, scratch, 1, 10, stream));
  read_stats(got);
  CHECK(got[0] != got[0]);
}

static void test_relu_backward(void) {
  std::vector<float> y = floats(1001, 1), dy = floats(1001, 1), got;
  array<float> d(dy), h(y);
  size_t bad = 0;
  CUDA(cddp_cuda_relu_backward(d.p(), h.p(), y.size(), stream));
  got = d.get();
  for (size_t i = 0; i < y.size(); i++) bad += got[i] != (y[i] > 0 ? dy[i] : 0.0f);
  CHECK_EQ(bad, 0);
}

static void test_embedding(void) {
  const int n = 300, vocabulary = 50, width = 37;
  std::vector<float> table = floats(50 * 37, 1), dout = floats(300 * 37, 1), got, want = table;
  std::vector<int32_t> ids(300);
  size_t bad = 0;
  for (int i = 0; i < n; i++) ids[(size_t)i] = i * i % 53 - 1; /* -1, 50 and 51 are no ids */
  array<float> t(table), o((size_t)(n * width)), d(dout);
  array<int32_t> at(ids);
  CUDA(cddp_cuda_embedding(t.p(), at.p(), o.p(), n, vocabulary, width, stream));
  got = o.get();
  for (int i = 0; i < n; i++)
    for (int k = 0; k < width; k++) {
      int id = ids[(size_t)i];
      float x = got[(size_t)(i * width + k)];
      if (id < 0 || id >= vocabulary) {
        bad += x == x;
        continue;
      }
      bad += x != table[(size_t)(id * width + k)];
      want[(size_t)(id * width + k)] += dout[(size_t)(i * width + k)];
    }
  array<uint64_t> order(CDDP_CUDA_ORDER_BYTES(n) / sizeof(uint64_t));
  CUDA(cddp_cuda_embedding_backward(d.p(), at.p(), t.p(), order.p(), n, vocabulary, width, stream));
  CHECK(t.get() == want); /* the same order, so the same bits */
  CHECK_EQ(bad, 0);
}

/* n ids, of `kinds` different ones; rows are added up in the order of ids. */
static void compare_embedding_backward(size_t n, int kinds, int vocabulary, int width) {
  std::vector<float> dout = floats(n * (size_t)width, 1), table, want;
  std::vector<int32_t> ids(n);
  table = floats((size_t)(vocabulary * width), 1);
  want = table;
  for (size_t i = 0; i < n; i++) {
    ids[i] = (int32_t)(uniform(0.5) * kinds + 0.5 * kinds) - 1;
    for (size_t k = 0; ids[i] >= 0 && ids[i] < vocabulary && k < (size_t)width; k++)
      want[(size_t)(ids[i] * width) + k] += dout[i * (size_t)width + k];
  }
  array<float> d(dout), t(table);
  array<int32_t> at(ids);
  array<uint64_t> order(CDDP_CUDA_ORDER_BYTES(n) / sizeof(uint64_t));
  CUDA(cddp_cuda_embedding_backward(d.p(), at.p(), t.p(), order.p(), (int64_t)n, vocabulary, width,
                                    stream));
  CHECK(t.get() == want);
}

static void test_embedding_order(void) {
  const size_t sizes[] = {1, 2, 31, 32, 33, 63, 64, 65, 96, 97, 128, 1000, 4097};
  size_t i;
  CUDA(cddp_cuda_embedding_backward(NULL, NULL, NULL, NULL, 0, 1, 1, stream));
  for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    compare_embedding_backward(sizes[i], 1, 3, 2);    /* no id at all */
    compare_embedding_backward(sizes[i], 2, 3, 3);    /* half of them are one id */
    compare_embedding_backward(sizes[i], 40, 30, 5);  /* some are no ids */
    compare_embedding_backward(sizes[i], 5000, 6000, 1);
  }
  compare_embedding_backward(3000, 7, 6, 300); /* wider than a block */
}

/* More ids than n * n steps would suit. */
static void test_embedding_of_many(void) { compare_embedding_backward(60000, 30000, 30000, 1); }

static void compare_linear(cublasHandle_t blas, size_t rows, size_t in, size_t out, bool relu) {
  std::vector<float> x = floats(rows * in, 1), w = floats(out * in, 1), b = floats(out, 1);
  std::vector<float> dy = floats(rows * out, 1), dw = floats(out * in, 1), db = floats(out, 1);
  std::vector<double> y(rows * out), dx(rows * in), gw(dw.begin(), dw.end()),
      gb(db.begin(), db.end());
  array<float> ax(x, 1), aw(w), ab(b), ay(rows * out), ady(dy), adx(rows * in), adw(dw), adb(db, 1);
  for (size_t r = 0; r < rows; r++)
    for (size_t o = 0; o < out; o++) {
      double sum = (double)b[o], d = (double)dy[r * out + o];
      for (size_t i = 0; i < in; i++) {
        sum += (double)x[r * in + i] * (double)w[o * in + i];
        gw[o * in + i] += d * (double)x[r * in + i];
        dx[r * in + i] += d * (double)w[o * in + i];
      }
      gb[o] += d;
      y[r * out + o] = relu && sum < 0 ? 0 : sum;
    }
  int R = (int)rows, I = (int)in, O = (int)out;
  CUDA(cddp_cuda_linear(blas, ax.p(), aw.p(), ab.p(), ay.p(), R, I, O, relu, stream));
  CUDA(cddp_cuda_linear_backward(blas, ax.p(), aw.p(), ady.p(), adx.p(), adw.p(), adb.p(), R, I, O,
                                 stream));
  CHECK(distance(ay.get(), y) < 1e-5);
  CHECK(distance(adx.get(), dx) < 1e-5);
  CHECK(distance(adw.get(), gw) < 1e-5);
  CHECK(distance(adb.get(), gb) < 1e-5);
}

/* No sum of a bias gradient is one of more than rows / 128 elements on end: 2^24 swallows the ones
   that are added to it by themselves. */
static void test_bias_sums(void) {
  const size_t rows = 2048, out = 40;
  std::vector<float> dy(rows * out, 1), got;
  for (size_t o = 0; o < out; o++) dy[o * 7 * out + o] = 16777216;
  array<float> x(rows), w(out), ady(dy), dw(out), db(std::vector<float>(out, 0));
  cublasHandle_t blas;
  size_t bad = 0;
  CHECK_EQ((int)cublasCreate(&blas), (int)CUBLAS_STATUS_SUCCESS);
  CUDA(cddp_cuda_linear_backward(blas, x.p(), w.p(), ady.p(), NULL, dw.p(), db.p(), (int)rows, 1,
                                 (int)out, stream));
  got = db.get();
  for (float f : got) bad += !(f >= (float)(16777216 + rows - rows / 128));
  CHECK_EQ(bad, 0);
  CHECK_EQ((int)cublasDestroy(blas), (int)CUBLAS_STATUS_SUCCESS);
}

static void test_linear(void) {
  cublasHandle_t blas;
  CHECK_EQ((int)cublasCreate(&blas), (int)CUBLAS_STATUS_SUCCESS);
  compare_linear(blas, 1, 1, 1, false);
  compare_linear(blas, 17, 33, 65, true);
  compare_linear(blas, 40, 10, 5, false);
  compare_linear(blas, 301, 10, 33, true); /* more rows than the bias sums at once, two blocks */
  CUDA(cddp_cuda_linear(blas, NULL, NULL, NULL, NULL, 0, 3, 4, true, stream));
  CHECK_EQ((int)cublasDestroy(blas), (int)CUBLAS_STATUS_SUCCESS);
}

/* --- sizes --- */

static void test_large_indices(void) {
  static cddp__cu_pieces t;
  cddp_segment s = {NULL, NULL, NULL, ((size_t)1 << 40) + 5, NULL};
  cddp__cu_add_piece(&t, &s, NULL, 0, s.count, 4, true);
  cddp__cu_add_piece(&t, &s, NULL, 0, 10, 4, true);
  CHECK_EQ(t.piece[1].first_chunk, ((size_t)1 << 28) + 1);
  CHECK_EQ(cddp__cu_blocks((size_t)1 << 40, 4 * CDDP__CU_THREADS, 1u << 16), 1u << 16);
  CHECK_EQ(cddp__cu_blocks(0, 256, 10), 0);
}

/* More than 2^31 elements, where there is memory for them: HUGE=1 in the environment. */
static void test_huge(void) {
  size_t n = ((size_t)1 << 31) + 4097;
  cddp_segment s = {NULL, NULL, NULL, n, NULL};
  double got;
  if (getenv("HUGE") == NULL) return;
  CUDA(cudaMalloc(&s.grad, n * 2));
  CUDA(cddp_cuda_fill(s.grad, CDDP_F16, n, 0.5, stream));
  CUDA(cddp_cuda_squares(&s, 1, CDDP_F16, scratch, false, stream));
  CUDA(cddp_cuda_fill((char *)s.grad + (n - 1) * 2, CDDP_F16, 1, 2.0, stream));
  CUDA(cddp_cuda_squares(&s, 1, CDDP_F16, scratch, true, stream));
  CUDA(cudaMemcpyAsync(&got, scratch, 8, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
  CHECK_EQ(got, 0.5 * (double)n + 3.75);
  CUDA(cudaFree(s.grad));
}

int main(void) {
  int devices = 0;
  cudaError_t e = cudaGetDeviceCount(&devices);
  if (e != cudaSuccess) return TEST_SKIP(cudaGetErrorString(e));
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA(cudaMalloc((void **)&scratch, CDDP_CUDA_SCRATCH_BYTES));
  CUDA(cudaMalloc((void **)&stats, 16));
  CUDA(cudaMemsetAsync(stats, 0, 16, stream));
#ifndef __CUDACC__
  RUN(test_tails);
#endif
  RUN(test_sgd);
  RUN(test_adamw);
  RUN(test_many_segments);
  RUN(test_copies);
  RUN(test_copies_alone);
  RUN(test_norm);
  RUN(test_norm_of_many);
  RUN(test_sum_of_nodes);
  RUN(test_convert);
  RUN(test_fill);
  RUN(test_mse);
  RUN(test_cross_entropy);
  RUN(test_relu_backward);
  RUN(test_embedding);
  RUN(test_embedding_order);
  RUN(test_embedding_of_many);
  RUN(test_linear);
  RUN(test_bias_sums);
  RUN(test_large_indices);
  RUN(test_huge);
  CUDA(cudaFree(stats));
  CUDA(cudaFree(scratch));
  CUDA(cudaStreamDestroy(stream));
  return TEST_END();
}
