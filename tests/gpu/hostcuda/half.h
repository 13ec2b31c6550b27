/* half.h - f16 and bf16 of hostcuda, by the rules of the hardware: to nearest, ties to even. */
#ifndef HOSTCUDA_HALF_H
#define HOSTCUDA_HALF_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float hostcuda_bits_to_float(uint32_t u) {
  float f;
  memcpy(&f, &u, sizeof f);
  return f;
}

static inline uint32_t hostcuda_float_to_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, sizeof u);
  return u;
}

static inline float hostcuda_bf16_to_float(uint16_t h) {
  return hostcuda_bits_to_float((uint32_t)h << 16);
}

static inline uint16_t hostcuda_float_to_bf16(float f) {
  uint32_t u = hostcuda_float_to_bits(f);
  if (f != f) return 0x7fff; /* the hardware's one NaN */
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

static inline float hostcuda_half_to_float(uint16_t h) {
  int e = h >> 10 & 31, m = h & 1023;
  float f;
  if (e == 31) f = m != 0 ? NAN : INFINITY;
  else f = e == 0 ? ldexpf((float)m, -24) : ldexpf((float)(m + 1024), e - 25);
  return (h & 0x8000) != 0 ? -f : f;
}

static inline uint16_t hostcuda_float_to_half(float f) {
  uint16_t sign = (uint16_t)(hostcuda_float_to_bits(f) >> 16 & 0x8000);
  float a = fabsf(f);
  int e;
  if (f != f) return 0x7fff;
  if (a >= 65520) return (uint16_t)(sign | 0x7c00);
  if (a < 0x1p-14f) return (uint16_t)(sign | (uint16_t)nearbyintf(a * 0x1p24f));
  frexpf(a, &e); /* a = m * 2^e, m in [0.5, 1) */
  return (uint16_t)(sign | (uint16_t)((uint32_t)(e + 13) * 1024 +
                                      (uint32_t)nearbyintf(ldexpf(a, 11 - e)))); /* carries up */
}
#endif
