// Matrix products on AMX's tile registers: 16 rows by 16 lanes, 32 products of bfloat16 deep, summed in float32.
//
// They fit the layout that attention has anyway. Panels of packed rows, and weights, are pairs of bfloat16 with lanes
// along query rows: that is a right operand as it stands. Keys are a left operand where they lie in memory, values once
// they are turned around (see attend.h). Every sum of finite numbers is taken in the same order whatever lies beside it, so a
// row's result does not depend on its neighbours. Where something is infinite, sums are AVX-512's, and may round otherwise.
#pragma once
#include "dot.h"

namespace {

constexpr int64_t AMX_ROWS = 16, AMX_DEPTH = 32, AMX_BYTES = 1024;  // of one tile register

// gcc does not know that loads of tile registers read memory: without this it may leave stores for later, or out.
inline void finish_stores(const void* read) { asm volatile("" ::"r"(read) : "memory"); }

struct alignas(64) AmxShape {
  uint8_t palette = 1, start = 0, reserved[14] = {0};
  uint16_t bytes[16] = {0};
  uint8_t rows[16] = {0};
};

// The tile registers of this thread are ours while this lives. Left in use, the system would save them at every switch.
struct AmxTurn {
  // `rows`: of left operands and of sums.
  explicit AmxTurn(int64_t rows = AMX_ROWS) {
    AmxShape shape;
    for (int i = 0; i < 8; ++i) shape.bytes[i] = 64, shape.rows[i] = i < 6 ? (uint8_t)rows : AMX_ROWS;
    finish_stores(&shape);
    _tile_loadconfig(&shape);
  }
  ~AmxTurn() { _tile_release(); }
  AmxTurn(const AmxTurn&) = delete;
};

struct AmxLeft {
  const char* p;
  int64_t row, next, step;  // bytes from row to row, to the next 16 rows, and to the next 32 coordinates
};

// c[16 A][16 B] = or += left [16 A][32 steps] times right [32 steps][16 B]; of `width` lanes each row of c and right.
template <int A, int B>
inline void amx_product(AmxLeft left, const float* right, int64_t width, int64_t steps, bool begin, float* c, Fetch* fetch) {
  static_assert((A == 1 || A == 2) && (B == 1 || B == 2), "four sums, two left and two right operands: eight registers");
  float* below = c + AMX_ROWS * width;
  finish_stores(right);
  if (begin) {
    _tile_zero(0);
    if (B > 1) _tile_zero(1);
    if (A > 1) _tile_zero(2);
    if (A > 1 && B > 1) _tile_zero(3);
  } else {
    _tile_loadd(0, c, width * 4);
    if (B > 1) _tile_loadd(1, c + LANES, width * 4);
    if (A > 1) _tile_loadd(2, below, width * 4);
    if (A > 1 && B > 1) _tile_loadd(3, below + LANES, width * 4);
  }
  for (int64_t i = 0; i < steps; ++i, left.p += left.step, right += AMX_DEPTH / 2 * width) {
    if (fetch) fetch->some();
    _tile_loadd(4, left.p, left.row);
    _tile_loadd(6, right, width * 4);
    _tile_dpbf16ps(0, 4, 6);
    if (B > 1) {
      _tile_loadd(7, right + LANES, width * 4);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (A > 1) {
      _tile_loadd(5, left.p + left.next, left.row);
      _tile_dpbf16ps(2, 5, 6);
      if (B > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, width * 4);
  if (B > 1) _tile_stored(1, c + LANES, width * 4);
  if (A > 1) _tile_stored(2, below, width * 4);
  if (A > 1 && B > 1) _tile_stored(3, below + LANES, width * 4);
}

// 32 rows of 32 numbers of 16 bits turned around: 32 rows of 64 bytes. A quarter of each output row comes from 8 input rows:
// they are gathered quarter by quarter, and turned around 8 by 8 within each.
inline void turn_32(const char* from, int64_t row, char* to) {
  for (int64_t c = 0; c < 4; ++c, from += 16, to += 8 * 64) {
    __m512i x[8], y[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; ++r) {
      auto eight = [&](int64_t quarter) { return _mm_loadu_si128((const __m128i*)(from + (8 * quarter + r) * row)); };
      x[r] = _mm512_castsi128_si512(eight(0));
      x[r] = _mm512_mask_broadcast_i32x4(x[r], 0x00f0, eight(1));
      x[r] = _mm512_mask_broadcast_i32x4(x[r], 0x0f00, eight(2));
      x[r] = _mm512_mask_broadcast_i32x4(x[r], 0xf000, eight(3));
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      y[2 * r] = _mm512_unpacklo_epi16(x[2 * r], x[2 * r + 1]);
      y[2 * r + 1] = _mm512_unpackhi_epi16(x[2 * r], x[2 * r + 1]);
    }
#pragma GCC unroll 2
    for (int r = 0; r < 8; r += 4) {
      x[r] = _mm512_unpacklo_epi32(y[r], y[r + 2]), x[r + 1] = _mm512_unpackhi_epi32(y[r], y[r + 2]);
      x[r + 2] = _mm512_unpacklo_epi32(y[r + 1], y[r + 3]), x[r + 3] = _mm512_unpackhi_epi32(y[r + 1], y[r + 3]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      _mm512_storeu_si512(to + 2 * r * 64, _mm512_unpacklo_epi64(x[r], x[r + 4]));
      _mm512_storeu_si512(to + (2 * r + 1) * 64, _mm512_unpackhi_epi64(x[r], x[r + 4]));
    }
  }
}

}  // namespace
