// The multiply-accumulate core of both attention products and of block scoring.
//
// Lanes are query rows. `a` is a packed panel [depth][R * LANES]: one vector per depth step and row vector. `b` holds the
// other operand in place: element (j, d) is broadcast from b + j * b_j + d * b_d (bytes), so keys and values are read
// straight from the caller's tensors, never repacked.
#pragma once
#include "convert.h"

namespace {

struct DotF32 {
  using A = V;
  static constexpr int STEP_BYTES = 4;  // bytes of `b` per depth step
  static A lanes(const void* p) { return load((const float*)p); }
  static A one(const char* p) { float f; memcpy(&f, p, 4); return set1(f); }
  static V mac(A a, A b, V acc) { return fma(a, b, acc); }
};

#ifdef CC_BF16_DOT
// Two bfloat16 products per lane and step, accumulated in float32.
struct DotBF16 {
  using A = __m512i;
  static constexpr int STEP_BYTES = 4;
  static A lanes(const void* p) { return _mm512_loadu_si512(p); }
  static A one(const char* p) { int32_t pair; memcpy(&pair, p, 4); return _mm512_set1_epi32(pair); }
  static V mac(A a, A b, V acc) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
};
#endif

// Brings rows of memory that are not neighbours into L2, a few lines at a time: a burst of requests would fill the core's
// miss buffers and stall the very loads it is meant to help.
struct Fetch {
  const char* row = nullptr;
  int64_t row_step = 0, row_bytes = 0, rows = 0;  // what is left
  int64_t at = 0, lines = 0;                      // place in the row; lines per call
  void some() {
    for (int64_t i = 0; i < lines && rows > 0; ++i) {
      __builtin_prefetch(row + at, 0, 2);
      at += 64;
      if (at >= row_bytes) { at = 0; row += row_step; --rows; }
    }
  }
};
constexpr int64_t DEPTH_PER_FETCH = FETCH_INSIDE ? 8 : 1 << 20;

// Always inlined: the accumulators must stay in registers, and only there can the compiler know that nothing else holds them.
template <class Dot, int J, int R>
__attribute__((always_inline)) inline void panel(const float* a, int64_t depth, const char* b, int64_t b_j, int64_t b_d, V (&acc)[J][R],
                  Fetch* fetch = nullptr) {
  if (!FETCH_INSIDE && fetch) fetch->some();
  for (int64_t d = 0; d < depth; ++d) {
    if (FETCH_INSIDE && fetch && d % DEPTH_PER_FETCH == 0) fetch->some();
    typename Dot::A row[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) row[r] = Dot::lanes(a + r * LANES);
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) {
      typename Dot::A one = Dot::one(b + j * b_j);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[j][r] = Dot::mac(row[r], one, acc[j][r]);
    }
    a += R * LANES;
    b += b_d;
  }
}

}  // namespace
