/* Room >>reduce: the canonical sum, half precision, and every instruction set.

   Sums of 1 to 4,096 sources are compared, bit by bit, with a naive tree written here, in every
   dtype and operation. Half precision is checked against arithmetic in double for all 65,536
   values. The loops for plain code, AVX2 and AVX-512 must agree. Room >>collectives: how staging
   buffers are filled, and which way to copy is taken. This file includes the implementation: it
   calls the loops themselves. */
#include <stddef.h>
static size_t cache_of_rank(void);
#define CDDP__L2 cache_of_rank()
#define CDDP_IMPLEMENTATION
#include "../../cddp.h"

#include "../ranks.h"

#include <fenv.h>

static uint64_t state = 1;

static uint32_t noise(void) {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)(state >> 32);
}

/* For the next calls; main runs all tests with each set of instructions that this machine has. */
static void use(int isa) { __atomic_store_n(&cddp__isa_found, isa, __ATOMIC_RELAXED); }

/* Half precision with ldexp and nearbyint: slow, and nothing like the code under test. */

static double decode(unsigned h, int fraction, int bias) {
  int exponent_bits = 15 - fraction, special = (1 << exponent_bits) - 1;
  int e = (int)(h >> fraction) & special;
  double m = (double)(h & ((1u << fraction) - 1)), v;
  if (e == special) v = m != 0 ? NAN : INFINITY;
  else if (e == 0) v = ldexp(m, 1 - bias - fraction);
  else v = ldexp(m + ldexp(1, fraction), e - bias - fraction);
  return h >> 15 ? -v : v;
}

static unsigned encode(double x, int fraction, int bias) {
  unsigned sign = signbit(x) ? 0x8000u : 0, infinity = 0x7fffu >> fraction << fraction;
  int e;
  double m;
  if (x != x) return sign | infinity | 1u << (fraction - 1);
  x = fabs(x);
  if (x == 0) return sign;
  if (isinf(x)) return sign | infinity;
  frexp(x, &e); /* x = 0.1... * 2^e */
  e -= 1;
  if (e < 1 - bias) e = 1 - bias;
  m = nearbyint(ldexp(x, fraction - e)); /* units in the last place, ties to even */
  if (m >= ldexp(1, fraction + 1)) {
    m /= 2;
    e++;
  }
  if (e > bias) return sign | infinity;
  if (m < ldexp(1, fraction)) return sign | (unsigned)m;
  return sign | (unsigned)(e + bias) << fraction | ((unsigned)m & ((1u << fraction) - 1));
}

static double half_value(unsigned h, cddp_dtype t) {
  return t == CDDP_F16 ? decode(h, 10, 15) : decode(h, 7, 127);
}
static unsigned half_bits(double x, cddp_dtype t) {
  return t == CDDP_F16 ? encode(x, 10, 15) : encode(x, 7, 127);
}
static bool half_nan(unsigned h, cddp_dtype t) {
  return (h & 0x7fff) > (t == CDDP_F16 ? 0x7c00u : 0x7f80u);
}

static void test_half_values(void) {
  static uint16_t half[65536], back[65536];
  static float wide[65536];
  static double wider[65536];
  int t;
  unsigned i;
  for (i = 0; i < 65536; i++) half[i] = (uint16_t)i;
  for (t = CDDP_F16; t <= CDDP_BF16; t++) {
    bool same = true;
    cddp__convert(wide, CDDP_F32, half, (cddp_dtype)t, 65536);
    cddp__convert(wider, CDDP_F64, half, (cddp_dtype)t, 65536);
    cddp__convert(back, (cddp_dtype)t, wide, CDDP_F32, 65536);
    for (i = 0; i < 65536; i++) {
      float one = t == CDDP_F16 ? cddp__f16_to_f32((uint16_t)i) : cddp__bf16_to_f32((uint16_t)i);
      double want = half_value(i, (cddp_dtype)t);
      if (half_nan(i, (cddp_dtype)t)) {
        same = same && one != one && wide[i] != wide[i] && wider[i] != wider[i] &&
               half_nan(back[i], (cddp_dtype)t);
      } else {
        same = same && (double)one == want && (double)wide[i] == want && wider[i] == want &&
               !signbit(wide[i]) == !signbit(want) && back[i] == i;
      }
    }
    CHECK(same);
  }
}

/* Around every half value: itself, the point half way to its neighbour, and one step off that. */
static void test_half_rounding(void) {
  static float x[8 * 65536];
  static uint16_t got[8 * 65536], portable[8 * 65536];
  int t, found = cddp__isa();
  size_t i, n;
  for (t = CDDP_F16; t <= CDDP_BF16; t++) {
    bool same = true;
    n = 0;
    for (i = 0; i < 65536; i++) {
      double a = half_value((unsigned)i, (cddp_dtype)t);
      double b = half_value((unsigned)(i + 1) & 0xffff, (cddp_dtype)t);
      float middle = (float)((a + b) / 2);
      uint32_t bits = noise();
      if (isinf(b)) middle = t == CDDP_F16 ? 65520.0f : FLT_MAX;
      x[n++] = (float)a;
      x[n++] = middle;
      x[n++] = nextafterf(middle, INFINITY);
      x[n++] = nextafterf(middle, -INFINITY);
      memcpy(&x[n++], &bits, 4);
    }
    x[n++] = 1e30f;
    x[n++] = -1e-30f;
    x[n++] = FLT_TRUE_MIN;
    fesetround(FE_UPWARD); /* of which the result is independent */
    cddp__convert(got, (cddp_dtype)t, x, CDDP_F32, n);
    use(CDDP__ISA_BASE);
    cddp__convert(portable, (cddp_dtype)t, x, CDDP_F32, n);
    use(found);
    fesetround(FE_TONEAREST);
    CHECK(memcmp(got, portable, n * sizeof *got) == 0);
    for (i = 0; i < n; i++) {
      uint16_t one = t == CDDP_F16 ? cddp__f32_to_f16(x[i]) : cddp__f32_to_bf16(x[i]);
      same = same && one == got[i];
      if (x[i] != x[i]) same = same && half_nan(got[i], (cddp_dtype)t);
      else same = same && got[i] == half_bits((double)x[i], (cddp_dtype)t);
    }
    CHECK(same);
  }
}

/* From f64 directly: rounded once, also where a detour over f32 would round twice. */
static void test_double_to_half(void) {
  static double x[30000];
  static uint16_t got[30000];
  int t;
  size_t i;
  for (t = CDDP_F16; t <= CDDP_BF16; t++) {
    bool same = true;
    double tie = ldexp(1, t == CDDP_F16 ? -11 : -8);
    for (i = 0; i < 30000; i++) {
      double a = half_value(noise() & 0xffff, (cddp_dtype)t);
      if (isnan(a) || isinf(a)) a = 1.0;
      switch (i % 5) {
        case 0: x[i] = a * (1 + tie); break;
        case 1: x[i] = a * (1 + tie) * (1 + ldexp(1, -50)); break;
        case 2: x[i] = a * (1 + tie) * (1 - ldexp(1, -50)); break;
        case 3: x[i] = ldexp((double)noise() * 4294967296.0 + 1, (int)(noise() % 400) - 260); break;
        default: x[i] = a;
      }
    }
    x[0] = DBL_MAX;
    x[1] = -DBL_MAX;
    x[2] = NAN;
    x[3] = INFINITY;
    x[4] = DBL_TRUE_MIN;
    x[5] = (double)FLT_MAX * (1 + ldexp(1, -30));
    cddp__convert(got, (cddp_dtype)t, x, CDDP_F64, 30000);
    for (i = 0; i < 30000; i++) {
      if (x[i] != x[i]) same = same && half_nan(got[i], (cddp_dtype)t);
      else same = same && got[i] == half_bits(x[i], (cddp_dtype)t);
    }
    CHECK(same);
  }
}

static void test_convert_between(void) {
  double d[5] = {1.0, -0.1, 1e300, -INFINITY, 0x1.000001p0}, back[5];
  float f[5], g[5];
  uint16_t h[5], b[5];
  cddp__convert(f, CDDP_F32, d, CDDP_F64, 5);
  CHECK(f[0] == 1.0f && f[1] == -0.1f && isinf(f[2]) && isinf(f[3]) && f[4] == 1.0f);
  cddp__convert(back, CDDP_F64, f, CDDP_F32, 5);
  CHECK(back[1] == (double)-0.1f && isinf(back[3]) && back[3] < 0);
  cddp__convert(h, CDDP_F16, f, CDDP_F32, 5);
  cddp__convert(b, CDDP_BF16, h, CDDP_F16, 5); /* over f32, exact, then rounded */
  cddp__convert(g, CDDP_F32, b, CDDP_BF16, 5);
  CHECK(g[0] == 1.0f && b[1] == half_bits(half_value(h[1], CDDP_F16), CDDP_BF16));
  cddp__convert(h, CDDP_F16, b, CDDP_BF16, 5);
  CHECK(h[0] == 0x3c00);
  cddp__convert(f, CDDP_F32, g, CDDP_F32, 5);
  CHECK(memcmp(f, g, sizeof f) == 0);
  cddp__convert(f, CDDP_F16, g, CDDP_F32, 0);
}

/* The naive tree: one element, recursion, every operation on its own. */

typedef union number {
  float f;
  double d;
  int64_t i; /* integers, sign or zero extended */
} number;

static bool is_integer(cddp_dtype t) { return t >= CDDP_I8; }

static number load(const void *p, size_t i, cddp_dtype t) {
  number x;
  uint16_t h;
  memset(&x, 0, sizeof x);
  switch (t) {
    case CDDP_F32: memcpy(&x.f, (const char *)p + 4 * i, 4); break;
    case CDDP_F64: memcpy(&x.d, (const char *)p + 8 * i, 8); break;
    case CDDP_F16: case CDDP_BF16:
      memcpy(&h, (const char *)p + 2 * i, 2);
      x.f = (float)half_value(h, t);
      break;
    case CDDP_I8: x.i = ((const int8_t *)p)[i]; break;
    case CDDP_U8: x.i = ((const uint8_t *)p)[i]; break;
    case CDDP_I32: {
      int32_t v;
      memcpy(&v, (const char *)p + 4 * i, 4);
      x.i = v;
      break;
    }
    default: memcpy(&x.i, (const char *)p + 8 * i, 8);
  }
  return x;
}

static int64_t wrap(int64_t v, cddp_dtype t) {
  switch (t) {
    case CDDP_I8: return (int8_t)(v & 255);
    case CDDP_U8: return v & 255;
    case CDDP_I32: return (int32_t)(uint32_t)((uint64_t)v & 0xffffffffu);
    default: return v;
  }
}

#define BEST(x, y, op) \
  (x != x ? x : y != y ? y : (op) == CDDP_MIN ? (x < y ? x : y) : (x > y ? x : y))

static number combine(number a, number b, cddp_dtype t, cddp_op op) {
  number r;
  memset(&r, 0, sizeof r);
  if (is_integer(t)) {
    if (op == CDDP_PROD) r.i = wrap((int64_t)((uint64_t)a.i * (uint64_t)b.i), t);
    else if (op == CDDP_MIN || op == CDDP_MAX) r.i = BEST(a.i, b.i, op);
    else if (op == CDDP_BAND) r.i = a.i & b.i;
    else if (op == CDDP_BOR) r.i = a.i | b.i;
    else if (op == CDDP_BXOR) r.i = a.i ^ b.i;
    else r.i = wrap((int64_t)((uint64_t)a.i + (uint64_t)b.i), t);
  } else if (t == CDDP_F64) {
    if (op == CDDP_PROD) r.d = a.d * b.d;
    else if (op == CDDP_MIN || op == CDDP_MAX) r.d = BEST(a.d, b.d, op);
    else r.d = a.d + b.d;
  } else {
    if (op == CDDP_PROD) r.f = a.f * b.f;
    else if (op == CDDP_MIN || op == CDDP_MAX) r.f = BEST(a.f, b.f, op);
    else r.f = a.f + b.f;
  }
  return r;
}

static number tree(const void *const *srcs, int lo, int hi, size_t i, cddp_dtype t, cddp_op op) {
  int p = 1;
  if (hi - lo == 1) return load(srcs[lo], i, t);
  while (p * 2 < hi - lo) p *= 2;
  return combine(tree(srcs, lo, lo + p, i, t, op), tree(srcs, lo + p, hi, i, t, op), t, op);
}

static void store(void *p, size_t i, number x, cddp_dtype t) {
  size_t size = cddp_dtype_size(t);
  uint64_t bits = (uint64_t)x.i; /* little-endian machines */
  if (t == CDDP_F16 || t == CDDP_BF16) bits = half_bits((double)x.f, t);
  memcpy((char *)p + size * i, &bits, size);
}

static void naive(void *dst, const void *const *srcs, int k, size_t n, cddp_dtype t, cddp_op op) {
  size_t i;
  for (i = 0; i < n; i++) {
    number x = tree(srcs, 0, k, i, t, op);
    if (op == CDDP_AVG) {
      if (is_integer(t)) x.i /= k;
      else if (t == CDDP_F64) x.d /= k;
      else x.f /= (float)k;
    }
    store(dst, i, x, t);
  }
}

/* Equal bits; any NaN equals any other, as C says nothing about which one an operation returns. */
static bool equal(const void *a, const void *b, size_t n, cddp_dtype t) {
  size_t i, size = cddp_dtype_size(t);
  for (i = 0; i < n; i++) {
    number x = load(a, i, t), y = load(b, i, t);
    if (memcmp((const char *)a + i * size, (const char *)b + i * size, size) == 0) continue;
    if (is_integer(t)) return false;
    if (t == CDDP_F64 ? x.d == x.d || y.d == y.d : x.f == x.f || y.f == y.f) return false;
  }
  return true;
}

/* Any bits at all for integers; floats of many sizes, with zeros, infinities, NaNs, subnormals. */
static void fill(void *p, size_t n, cddp_dtype t) {
  size_t i, size = cddp_dtype_size(t);
  for (i = 0; i < n; i++) {
    uint64_t bits = (uint64_t)noise() << 32 | noise();
    unsigned kind = noise() % 64;
    if (!is_integer(t) && kind > 2) { /* mostly moderate numbers, so that sums stay finite */
      double x = ldexp((double)(int32_t)noise(), (int)(noise() % 12) - 36);
      uint16_t h = 0;
      float f = (float)x;
      if (kind == 3) x = f = 0.0f;
      if (t == CDDP_F32) memcpy((char *)p + i * size, &f, size);
      else if (t == CDDP_F64) memcpy((char *)p + i * size, &x, size);
      else {
        h = (uint16_t)half_bits(x, t);
        memcpy((char *)p + i * size, &h, size);
      }
      continue;
    }
    memcpy((char *)p + i * size, &bits, size);
  }
}

enum { MOST = 64 };
static char *memory[MOST], *keep[MOST];
static const void *srcs[MOST];

static void compare(int k, size_t n, cddp_dtype t, cddp_op op, size_t shift) {
  size_t size = cddp_dtype_size(t), bytes = n * size;
  char *want = (char *)malloc(bytes + 1), *raw = (char *)malloc(bytes + 65);
  char *dst = raw + shift * size;
  int i, alias;
  if (want == NULL || raw == NULL) exit(1);
  for (i = 0; i < k; i++) {
    fill(keep[i], n, t);
    srcs[i] = memory[i] + (shift * (size_t)(i + 1)) % 8 * size;
    memcpy(memory[i] + (shift * (size_t)(i + 1)) % 8 * size, keep[i], bytes);
  }
  naive(want, srcs, k, n, t, op);
  cddp__reduce(dst, srcs, k, n, t, op);
  CHECK(equal(dst, want, n, t));
  for (alias = 0; alias < k; alias = alias < 9 ? alias + 1 : alias * 2) { /* dst is a source */
    char *target = memory[alias] + (shift * (size_t)(alias + 1)) % 8 * size;
    cddp__reduce(target, srcs, k, n, t, op);
    CHECK(equal(target, want, n, t));
    memcpy(target, keep[alias], bytes);
  }
  for (i = 0; i < k; i++) CHECK(memcmp(srcs[i], keep[i], bytes) == 0);
  {
    void *bufs[MOST];
    for (i = 0; i < k; i++) bufs[i] = memory[i] + (shift * (size_t)(i + 1)) % 8 * size;
    cddp__reduce_all(bufs, k, n, t, op);
    for (i = 0; i < k; i++) {
      CHECK(equal(bufs[i], want, n, t));
      CHECK(memcmp(bufs[i], bufs[0], bytes) == 0);
    }
  }
  free(want);
  free(raw);
}

static void test_sums(void) {
  static const size_t lengths[] = {1, 37, 2051};
  int k, t, op;
  for (k = 1; k <= MOST; k = k < 17 ? k + 1 : k == 17 ? 33 : k == 33 ? 64 : k + 1) {
    for (t = CDDP_F32; t <= CDDP_I64; t++) {
      for (op = CDDP_SUM; op <= (t <= CDDP_BF16 ? CDDP_MAX : CDDP_BXOR); op++) {
        size_t n = lengths[(unsigned)(k + t + op) % 3];
        compare(k, n, (cddp_dtype)t, (cddp_op)op, (size_t)(k + op) % 4);
      }
    }
  }
}

/* Two sources are what counts most: every length up to some vectors, every alignment. */
static void test_lengths(void) {
  int t, k;
  size_t n;
  for (t = CDDP_F32; t <= CDDP_I64; t++) {
    for (n = 0; n < 70; n++) {
      for (k = 2; k <= 4; k++) compare(k, n, (cddp_dtype)t, CDDP_AVG, n % 8);
    }
  }
}

static void test_shape_of_the_tree(void) { /* 7: ((a+b)+(c+d))+((e+f)+g), seen in the rounding */
  float v[7] = {1e8f, 1.0f, -1e8f, 3.0f, 0x1p24f, 1.0f, 1.0f}, r;
  volatile float left = v[0] + v[1], right = v[2] + v[3], want = left + right;
  volatile float third = v[4] + v[5], last = third + v[6];
  int i;
  for (i = 0; i < 7; i++) srcs[i] = &v[i];
  cddp__reduce(&r, srcs, 7, 1, CDDP_F32, CDDP_SUM);
  want = want + last;
  CHECK(r == want);
}

static void test_integer_edges(void) {
  int32_t a = INT32_MIN, b = 0, c = -7, d = 0, r;
  int8_t x = -128, y = -128, z;
  const void *p[4];
  p[0] = &a;
  p[1] = &b;
  cddp__reduce(&r, p, 2, 1, CDDP_I32, CDDP_AVG);
  CHECK_EQ(r, INT32_MIN / 2);
  cddp__reduce(&r, p, 1, 1, CDDP_I32, CDDP_AVG);
  CHECK_EQ(r, INT32_MIN);
  p[0] = &c;
  p[1] = &d;
  cddp__reduce(&r, p, 2, 1, CDDP_I32, CDDP_AVG);
  CHECK_EQ(r, -3); /* towards zero */
  p[0] = &x;
  p[1] = &y;
  cddp__reduce(&z, p, 2, 1, CDDP_I8, CDDP_SUM);
  CHECK_EQ(z, 0); /* wraps around */
}

static void test_nan_and_infinity(void) {
  float f[3] = {NAN, 1.0f, -INFINITY}, r;
  const void *p[3];
  int i, j, op;
  for (op = CDDP_MIN; op <= CDDP_MAX; op++) {
    for (i = 0; i < 3; i++) {
      for (j = 0; j < 3; j++) p[(i + j) % 3] = &f[j];
      cddp__reduce(&r, p, 3, 1, CDDP_F32, (cddp_op)op);
      CHECK(r != r);
    }
    p[0] = &f[1];
    p[1] = &f[2];
    cddp__reduce(&r, p, 2, 1, CDDP_F32, (cddp_op)op);
    CHECK(r == (op == CDDP_MIN ? -INFINITY : 1.0f));
  }
}

/* As many ranks as there may be; the sum of k equal integers is exact. */
static void test_most_sources(void) {
  static const void *many[CDDP__MAX_RANKS];
  static float ones[3000], sum[3000];
  int i, k;
  for (i = 0; i < 3000; i++) ones[i] = (float)(i % 7);
  for (i = 0; i < CDDP__MAX_RANKS; i++) many[i] = ones;
  for (k = CDDP__MAX_RANKS - 1; k <= CDDP__MAX_RANKS; k++) {
    cddp__reduce(sum, many, k, 3000, CDDP_F32, CDDP_SUM);
    for (i = 0; i < 3000; i++) CHECK(sum[i] == (float)(k * (i % 7)));
    cddp__reduce(sum, many, k, 3000, CDDP_F32, CDDP_MAX);
    CHECK(memcmp(sum, ones, sizeof sum) == 0);
  }
}

static void test_scale(void) {
  static const cddp_dtype types[] = {CDDP_F32, CDDP_F64, CDDP_F16, CDDP_BF16};
  static double p[1500], q[1500];
  size_t t, i;
  int found = cddp__isa();
  for (t = 0; t < 4; t++) {
    bool same = true;
    fill(p, 1500, types[t]);
    memcpy(q, p, sizeof p);
    cddp__scale(p, 1500, types[t], 0.3);
    for (i = 0; i < 1500; i++) {
      number x = load(q, i, types[t]), y;
      memset(&y, 0, sizeof y);
      if (types[t] == CDDP_F64) y.d = x.d * 0.3;
      else y.f = x.f * 0.3f;
      store(q, i, y, types[t]);
      same = same && equal((char *)p + i * cddp_dtype_size(types[t]),
                           (char *)q + i * cddp_dtype_size(types[t]), 1, types[t]);
    }
    CHECK(same);
    memcpy(q, p, sizeof p);
    cddp__scale(p, 1500, types[t], 1.7);
    use(CDDP__ISA_BASE);
    cddp__scale(q, 1500, types[t], 1.7);
    use(found);
    CHECK(equal(p, q, 1500, types[t]));
  }
}

static void test_sum_of_squares(void) {
  static const cddp_dtype types[] = {CDDP_F32, CDDP_F64, CDDP_F16, CDDP_BF16};
  static double raw[5003 + 8];
  size_t t, i, n, shift;
  int found = cddp__isa();
  for (t = 0; t < 4; t++) {
    size_t size = cddp_dtype_size(types[t]);
    for (n = 0; n < 5003; n = n * 3 + 1) {
      double first = 0, exact = 0;
      for (shift = 0; shift < 8; shift++) {
        char *p = (char *)raw + shift * size;
        double got, portable;
        for (i = 0; i < n; i++) {
          number x;
          memset(&x, 0, sizeof x);
          if (types[t] == CDDP_F64) x.d = (double)(i % 100) / 7;
          else x.f = (float)(i % 100) / 7;
          store(p, i, x, types[t]);
        }
        got = cddp__sum_squares(p, n, types[t]);
        use(CDDP__ISA_BASE);
        portable = cddp__sum_squares(p, n, types[t]);
        use(found);
        CHECK(memcmp(&got, &portable, sizeof got) == 0);
        if (shift == 0) {
          for (i = 0; i < n; i++) {
            number x = load(p, i, types[t]);
            double v = types[t] == CDDP_F64 ? x.d : (double)x.f;
            exact += v * v;
          }
          first = got;
        }
        CHECK(memcmp(&got, &first, sizeof got) == 0);
        CHECK(fabs(got - exact) <= 1e-12 * exact);
      }
    }
  }
}

static void test_types(void) {
  static const size_t sizes[] = {4, 8, 2, 2, 1, 1, 4, 8};
  int t, bad = 8;
  cddp_dtype no_dtype;
  memcpy(&no_dtype, &bad, sizeof no_dtype);
  for (t = 0; t < 8; t++) {
    CHECK_EQ(cddp_dtype_size((cddp_dtype)t), sizes[t]);
    CHECK(cddp__dtype_ok((cddp_dtype)t));
  }
  CHECK_EQ(cddp_dtype_size(no_dtype), 0);
  CHECK(!cddp__dtype_ok(no_dtype));
}

/* Ranks that find caches of different sizes send pieces of one size, that of the first of them. */
static int cache_asked;
static const size_t caches[] = {(size_t)512 << 10, 0, (size_t)2 << 20};

static size_t cache_of_rank(void) {
  return caches[__atomic_fetch_add(&cache_asked, 1, __ATOMIC_RELAXED) % 3];
}

static int sum_in_pieces(cddp_group *g, void *arg) {
  enum { N = 400000 };
  float *x = (float *)malloc(N * sizeof *x);
  cddp__call c;
  const cddp__copy_timing *p = &g->timings[CDDP__KIND_ALL_REDUCE][1];
  int i, k, rank = cddp_rank(g), bad = 0;
  if (x == NULL) return 1;
  for (i = 0; i < N; i++) x[i] = (float)(i * (rank + 1));
  ((size_t *)arg)[rank] = g->staging_size;
  c = cddp__make_call(CDDP__KIND_ALL_REDUCE, x, x, N, CDDP_F32, CDDP_SUM, -1);
  bad = cddp__run_staged(g, &c, 0 /* begin */) != CDDP_OK;
  for (i = 0; i < N; i++) bad += x[i] != (float)i + (float)(2 * i) + (float)(3 * i);
  /* As where each rank has a core: through caches and past them. */
  bad += p->chunks != 0 && g->size > g->host->cores;
  g->oversubscribed = false;
  g->spin = 0;
  for (k = 0; k < 2; k++) {
    c = cddp__make_call(CDDP__KIND_ALL_REDUCE, x + k, x + k, (size_t)(k == 0 ? N : N / 16) - 1,
                        CDDP_F32, CDDP_SUM, -1);
    for (i = 0; i < N; i++) x[i] = (float)(i * (rank + 1));
    bad += cddp__run_staged(g, &c, 0 /* begin */) != CDDP_OK;
    for (i = k; (size_t)(i - k) < c.count; i++)
      bad += x[i] != (float)i + (float)(2 * i) + (float)(3 * i);
  }
  bad += p->chunks < 3 || p->seconds[0] <= 0 || p->seconds[1] <= 0;
  free(x);
  return bad != 0;
}

static void test_pieces(void) {
  size_t pieces[3];
  int first, rank;
  for (first = 0; first < 3; first++) {
    cache_asked = first;
    CHECK_EQ(cddp_run_threads(sum_in_pieces, pieces, 3), CDDP_OK);
    for (rank = 0; rank < 3; rank++)
      CHECK_EQ(pieces[rank], caches[first] == caches[0] ? CDDP__STAGING_MIN : CDDP__STAGING_MAX);
  }
}

/* Copies past the cache: ranks time both ways now and then, and go on with the faster one. */

static void check_pace(cddp_group *g, int kind, size_t bytes, uint32_t pieces) {
  const cddp__copy_timing *p = &g->timings[kind][bytes >= CDDP__NT_LARGE];
  CHECK_EQ(p->chunks, pieces);
  CHECK(p->seconds[0] > 0 && p->seconds[1] > 0);
  CHECK_EQ(cddp__uses_nontemporal(p), p->seconds[1] < 0.8 * p->seconds[0]);
}

static int run_paces(cddp_group *g, void *arg) {
  static const size_t counts[] = {6000, 40000};
  int before = test_failures, rank = cddp_rank(g), world = cddp_world_size(g), i, k;
  uint32_t calls = CDDP__TIMING_PERIOD + 2 * CDDP__TIMING_RUNS + 1;
  float *x = (float *)calloc(40000, sizeof *x), *y = (float *)malloc(4 * 40000 * sizeof *y);
  cddp__chunk chunk = {0, 6000, false};
  cddp__call call = cddp__make_call(CDDP__KIND_BROADCAST, x, x, 6000, CDDP_F32, CDDP_SUM, 0);
  size_t n, c, wrong = 0;
  (void)arg;
  CHECK_OK(cddp_barrier(g));
  g->oversubscribed = false; /* as where each rank has a core */
  for (k = 0; k < 2; k++)
    for (n = counts[k], i = 0; i < (int)calls && test_failures == before; i++) {
      for (c = 0; c < n; c++) x[c] = (float)(i + rank);
      CHECK_OK(cddp_all_gather(g, x, y, n, CDDP_F32, NULL));
      for (c = 0; c < n * (size_t)world; c++) wrong += y[c] != (float)(i + (int)(c / n));
      CHECK_OK(cddp_all_reduce(g, x, n, CDDP_F32, CDDP_MAX, NULL));
      for (c = 0; c < n; c++) wrong += x[c] != (float)(i + world - 1);
      for (c = 0; c < n; c++) x[c] = (float)(i + rank);
      CHECK_OK(cddp_broadcast(g, x, n, CDDP_F32, 1, NULL));
      for (c = 0; c < n; c++) wrong += x[c] != (float)(i + 1);
      CHECK_EQ(wrong, 0);
    }
  for (k = 0; k < 2; k++) {
    check_pace(g, CDDP__KIND_ALL_GATHER, counts[k] * 4, calls);
    check_pace(g, CDDP__KIND_ALL_REDUCE, counts[k] * 4, calls);
    /* The short one is one piece; the long one goes in two long pieces and a short one. */
    check_pace(g, CDDP__KIND_BROADCAST, counts[k] * 4, (uint32_t)(k + 1) * calls);
  }
  CHECK(cddp__timing_of(g, &call, &chunk) == NULL);
  call.count = 12000;
  CHECK(cddp__timing_of(g, &call, &chunk) == &g->timings[CDDP__KIND_BROADCAST][0]);
  chunk.n = CDDP__NT_MIN / 4 - 1;
  CHECK(cddp__timing_of(g, &call, &chunk) == NULL);
  chunk.n = 6000;
  g->oversubscribed = true;
  CHECK(cddp__timing_of(g, &call, &chunk) == NULL);
  free(y);
  free(x);
  return test_failures != before;
}

static void test_paces(void) {
  cddp__copy_timing p = {{0, 0}, 0, 0};
  int i;
  for (i = 0; i < (int)(2 * CDDP__TIMING_RUNS); i++) {
    CHECK(cddp__is_timed(&p));
    CHECK_EQ(cddp__uses_nontemporal(&p), i >= (int)CDDP__TIMING_RUNS);
    p.clock = i % 4 < 2 ? 0 : i < 4 ? 5 - i : i - 3; /* 3, 2; 3, 4 */
    cddp__count_chunk(&p, 1);
  }
  CHECK(!cddp__is_timed(&p) && !cddp__uses_nontemporal(&p));
  p.clock = 1;
  cddp__count_chunk(&p, 1);
  CHECK(p.seconds[0] == 2 && p.seconds[1] == 3);
  p.seconds[0] = 4;
  CHECK(cddp__uses_nontemporal(&p));
  p.chunks = CDDP__TIMING_PERIOD; /* it looks again */
  CHECK(cddp__is_timed(&p) && !cddp__uses_nontemporal(&p));
  cache_asked = 1; /* pieces of 256 KiB */
  CHECK_OK(ranks_run(run_paces, NULL, 2, false));
  CHECK_OK(ranks_run(run_paces, NULL, 3, false));
}

int main(void) {
  int i;
  RUN(test_pieces);
  RUN(test_paces);
  for (i = 0; i < MOST; i++) {
    memory[i] = (char *)malloc(2051 * 8 + 128);
    keep[i] = (char *)malloc(2051 * 8 + 128);
    if (memory[i] == NULL || keep[i] == NULL) return 1;
  }
  for (i = test_best_isa(); i >= CDDP__ISA_BASE; i--) {
    test_use_isa(i);
    RUN(test_types);
    RUN(test_half_values);
    RUN(test_half_rounding);
    RUN(test_double_to_half);
    RUN(test_convert_between);
    RUN(test_sums);
    RUN(test_lengths);
    RUN(test_shape_of_the_tree);
    RUN(test_integer_edges);
    RUN(test_nan_and_infinity);
    RUN(test_most_sources);
    RUN(test_scale);
    RUN(test_sum_of_squares);
  }
  for (i = 0; i < MOST; i++) {
    free(memory[i]);
    free(keep[i]);
  }
  return TEST_END();
}
