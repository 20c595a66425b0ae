// 8 lanes of float32.
#pragma once
#include <immintrin.h>

#include <cstdint>

#define OWN_FUNCTION __attribute__((noinline))

namespace {

using V = __m256;
constexpr int LANES = 8;
constexpr int ROW_VECTORS = 2, KEYS_AT_ONCE = 6, DIMS_AT_ONCE = 6;  // 16 registers: 12 accumulators, 8 would just hide the latency of 2 FMA pipes
constexpr bool FETCH_INSIDE = false;  // 16 registers: fetching inside the product would spill the accumulators
constexpr int SCORE_VECTORS = 2, BLOCKS_AT_ONCE = 4;
constexpr bool SLABS_PAY = true;  // a blend takes the place of a multiply-add (slab.h)
constexpr int FEW_SUMS = 12;  // of few rows: accumulators

inline V load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, V a) { _mm256_storeu_ps(p, a); }
inline V set1(float x) { return _mm256_set1_ps(x); }
inline V add(V a, V b) { return _mm256_add_ps(a, b); }
inline V sub(V a, V b) { return _mm256_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V divide(V a, V b) { return _mm256_div_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V max(V a, V b) { return _mm256_max_ps(a, b); }
inline V min(V a, V b) { return _mm256_min_ps(a, b); }
inline bool any_above(V a, V b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
inline V where_equal(V a, V b, V yes, V no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
inline V nan_where_nan(V a, V b, V otherwise) {
  return _mm256_blendv_ps(otherwise, _mm256_set1_ps(__builtin_nanf("")), _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
}
// sum() adds lanes half a vector apart, until one is left: the lanes in the order in which they meet.
constexpr int LANE_BITS = 3;
inline int lane_in_turn(int turn) { return (turn & 1) << 2 | (turn & 2) | turn >> 2; }
inline float sum(V a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline float largest(V a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline V add_exactly(V a, V b) { return add(a, b); }
inline V raise_exponent(V a, V n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
}

inline V load_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline V load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline void store_f16(uint16_t* p, V a) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a, 0)); }
inline void store_bf16(uint16_t* p, V a) {
  __m256i u = _mm256_castps_si256(a);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  __m128i low = _mm256_castsi256_si128(r), high = _mm256_extracti128_si256(r, 1);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(low, high));
}

using Side = V;  // the queries themselves: their sign decides
inline Side positive(V a) { return _mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_GT_OQ); }
inline V pick(Side s, V yes, V no) { return _mm256_blendv_ps(no, yes, s); }

// 8 x 8 in registers: pairs of lanes, of pairs, then of halves.
inline void transpose(V (&x)[LANES]) {
  V t[LANES], u[LANES];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44), u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44), u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    x[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

}  // namespace
