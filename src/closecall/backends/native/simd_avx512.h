// 16 lanes of float32. Included by both AVX-512 tiers.
#pragma once
#include <immintrin.h>

#include <cstdint>

// Inlined or not as the tier does best.
#define OWN_FUNCTION

namespace {

using V = __m512;
constexpr int LANES = 16;
constexpr int ROW_VECTORS = 2, KEYS_AT_ONCE = 12, DIMS_AT_ONCE = 8;         // attention: 24 and 16 accumulators of 32 registers
constexpr bool FETCH_INSIDE = true;  // 32 registers: the fetching fits beside the accumulators
constexpr int SCORE_VECTORS = 4, BLOCKS_AT_ONCE = 6;     // scoring: 24 accumulators
constexpr bool SLABS_PAY = false;  // a blend by mask runs beside the multiply-add: rows in lanes are 10 to 25% faster (slab.h)
constexpr int FEW_SUMS = 24;  // of few rows: accumulators

inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, V a) { _mm512_storeu_ps(p, a); }
inline V set1(float x) { return _mm512_set1_ps(x); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V divide(V a, V b) { return _mm512_div_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V max(V a, V b) { return _mm512_max_ps(a, b); }  // b where either is NaN
inline V min(V a, V b) { return _mm512_min_ps(a, b); }
inline bool any_above(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
inline V where_equal(V a, V b, V yes, V no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), no, yes);
}
inline V nan_where_nan(V a, V b, V otherwise) {  // NaN where a or b is
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q), otherwise, _mm512_set1_ps(__builtin_nanf("")));
}
inline float sum(V a) {
  __m256 b = _mm256_add_ps(_mm512_extractf32x8_ps(a, 1), _mm512_castps512_ps256(a));
  __m128 c = _mm_add_ps(_mm256_extractf128_ps(b, 1), _mm256_castps256_ps128(b));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
// sum() adds lanes half a vector apart, until one is left: the lanes in the order in which they meet.
constexpr int LANE_BITS = 4;
inline int lane_in_turn(int turn) { return (turn & 1) << 3 | (turn & 2) << 1 | (turn & 4) >> 1 | turn >> 3; }
inline float largest(V a) { return _mm512_reduce_max_ps(a); }
inline V add_exactly(V a, V b) { return add(a, b); }  // never reassociated
inline V raise_exponent(V a, V n) {  // by the low bits of n; a NaN a stays one, whatever n is
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_castps_si512(n), 23)));
}

inline V load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline V load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline void store_f16(uint16_t* p, V a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, 0)); }
inline void store_bf16(uint16_t* p, V a) {  // to nearest even; a NaN stays one
  __m512i u = _mm512_castps_si512(a);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  r = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), r, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(r));
}

// One side or the other by a lane mask made when the queries are packed: cheaper than a second multiply-add.
using Side = __mmask16;
inline Side positive(V a) { return _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_GT_OQ); }
inline V pick(Side s, V yes, V no) {  // the integer form of the blend runs beside the multiply-adds, the float form does not
  return _mm512_castsi512_ps(_mm512_mask_blend_epi32(s, _mm512_castps_si512(no), _mm512_castps_si512(yes)));
}

// 16 x 16 in registers: pairs of lanes, of pairs, then of quarters twice.
inline void transpose(V (&x)[LANES]) {
  V t[LANES], u[LANES];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  auto low = [](V a, V b) { return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); };
  auto high = [](V a, V b) { return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); };
  for (int i = 0; i < 16; i += 4) {
    u[i] = low(t[i], t[i + 2]), u[i + 1] = high(t[i], t[i + 2]);
    u[i + 2] = low(t[i + 1], t[i + 3]), u[i + 3] = high(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    V a = _mm512_shuffle_f32x4(u[i], u[i + 4], 0x88), b = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0x88);
    V c = _mm512_shuffle_f32x4(u[i], u[i + 4], 0xdd), d = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0xdd);
    x[i] = _mm512_shuffle_f32x4(a, b, 0x88), x[i + 8] = _mm512_shuffle_f32x4(a, b, 0xdd);
    x[i + 4] = _mm512_shuffle_f32x4(c, d, 0x88), x[i + 12] = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
}

}  // namespace
