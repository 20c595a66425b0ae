// 4 lanes of float32 by the compiler's vector extension (gcc, clang): SSE2, NEON or whatever the machine has.
#pragma once
#include <cstdint>
#include <cstring>

#define OWN_FUNCTION __attribute__((noinline))

namespace {

typedef float V __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));
constexpr int LANES = 4;
constexpr int ROW_VECTORS = 2, KEYS_AT_ONCE = 4, DIMS_AT_ONCE = 4;
constexpr bool FETCH_INSIDE = false;
constexpr int SCORE_VECTORS = 2, BLOCKS_AT_ONCE = 4;
constexpr bool SLABS_PAY = true;  // (slab.h)
constexpr int FEW_SUMS = 8;  // of few rows: accumulators

inline V load(const float* p) { V v; memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, V a) { memcpy(p, &a, sizeof a); }
inline V set1(float x) { return V{x, x, x, x}; }
inline V add(V a, V b) { return a + b; }
inline V sub(V a, V b) { return a - b; }
inline V mul(V a, V b) { return a * b; }
inline V divide(V a, V b) { return a / b; }
inline V fma(V a, V b, V c) { return a * b + c; }  // fused where the machine can and the compiler may contract
inline V choose(I mask, V yes, V no) { return (V)(((I)yes & mask) | ((I)no & ~mask)); }
inline V max(V a, V b) { return choose(a > b, a, b); }  // b where either is NaN, like the x86 instruction
inline V min(V a, V b) { return choose(a < b, a, b); }
inline bool any(I m) { return (m[0] | m[1] | m[2] | m[3]) != 0; }
inline bool any_above(V a, V b) { return any(a > b); }
inline V where_equal(V a, V b, V yes, V no) { return choose(a == b, yes, no); }
inline V nan_where_nan(V a, V b, V otherwise) { return choose((a == a) & (b == b), otherwise, set1(__builtin_nanf(""))); }
constexpr int LANE_BITS = 2;  // lanes meet in sum() in the order of their numbers
inline int lane_in_turn(int turn) { return turn; }
inline float sum(V a) { return (a[0] + a[1]) + (a[2] + a[3]); }
inline float larger(float a, float b) { return a > b ? a : b; }
inline float largest(V a) { return larger(larger(a[0], a[1]), larger(a[2], a[3])); }
inline V add_exactly(V a, V b) {
  volatile V t = a + b;  // volatile: the compiler must not simplify a later subtraction away
  return t;
}
inline V raise_exponent(V a, V n) { return (V)((I)a + (I)((U)n << 23)); }

inline float bf16_to_float(uint16_t h) { uint32_t u = (uint32_t)h << 16; float f; memcpy(&f, &u, 4); return f; }
inline uint16_t float_to_bf16(float f) {
  uint32_t u; memcpy(&u, &f, 4);
  if (f != f) return 0x7fc0;
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline float f16_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023, u;
  if (exponent == 0) {  // zero and subnormal: fraction * 2^-24
    float f = (float)fraction * 5.9604644775390625e-8f;
    memcpy(&u, &f, 4);
  } else {
    u = (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  }
  u |= sign;
  float f; memcpy(&f, &u, 4); return f;
}
inline uint16_t float_to_f16(float f) {
  uint32_t u; memcpy(&u, &f, 4);
  uint16_t sign = (uint16_t)((u >> 16) & 0x8000);
  u &= 0x7fffffff;
  if (u > 0x7f800000) return sign | 0x7e00;
  if (u >= 0x477ff000) return sign | 0x7c00;  // 65520 and above round to infinity
  if (u < 0x38800000) {  // below 2^-14: the addition rounds to a multiple of 2^-24 for us
    float g; memcpy(&g, &u, 4);
    g += 0.5f;
    uint32_t w; memcpy(&w, &g, 4);
    return sign | (uint16_t)(w - 0x3f000000);
  }
  u += 0xfff + ((u >> 13) & 1);
  return sign | (uint16_t)((u >> 13) - (112 << 10));
}
inline V load_bf16(const uint16_t* p) { return V{bf16_to_float(p[0]), bf16_to_float(p[1]), bf16_to_float(p[2]), bf16_to_float(p[3])}; }
inline V load_f16(const uint16_t* p) { return V{f16_to_float(p[0]), f16_to_float(p[1]), f16_to_float(p[2]), f16_to_float(p[3])}; }
inline void store_bf16(uint16_t* p, V a) { for (int i = 0; i < 4; ++i) p[i] = float_to_bf16(a[i]); }
inline void store_f16(uint16_t* p, V a) { for (int i = 0; i < 4; ++i) p[i] = float_to_f16(a[i]); }

using Side = I;
inline Side positive(V a) { return a > set1(0.0f); }
inline V pick(Side s, V yes, V no) { return choose(s, yes, no); }

inline void transpose(V (&x)[LANES]) {
  for (int i = 0; i < LANES; ++i)
    for (int j = 0; j < i; ++j) { float t = x[i][j]; x[i][j] = x[j][i]; x[j][i] = t; }
}

}  // namespace
