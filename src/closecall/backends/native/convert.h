// Reading rows of any type and stride into float32, and small shared helpers. Included by each tier after its simd header.
#pragma once
#include <cstdint>
#include <cstring>

#include "args.h"
#include "tier.h"

namespace {

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_up(int64_t n, int64_t m) { return (n + m - 1) / m * m; }
inline int64_t item_size(int64_t dtype) { return dtype == F32 ? 4 : 2; }

constexpr float INF = __builtin_inff(), NOT_A_NUMBER = __builtin_nanf(""), LARGEST = __FLT_MAX__;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

// Row n of a sequence's keys or values, `row` and `page` elements apart.
inline const char* place(const Rows& t, const char* base, int64_t row, int64_t page, int64_t n, int64_t size) {
  return base + (t.pages ? t.pages[n / t.page] * page + n % t.page * row : n * row) * size;
}
// How many of n rows from `first` on lie on its page.
inline int64_t on_page(const Rows& t, int64_t first, int64_t n) { return t.pages ? least(n, t.page - first % t.page) : n; }

// Carves aligned pieces from one scratch allocation; with a null base it only counts the bytes.
struct Arena {
  char* base;
  int64_t used = 0;
  template <class T>
  T* take(int64_t n) {
    T* p = base ? (T*)(base + used) : nullptr;
    used = round_up(used + n * (int64_t)sizeof(T), 64);
    return p;
  }
};

inline float scalar_bf16(uint16_t h) { uint32_t u = (uint32_t)h << 16; float f; memcpy(&f, &u, 4); return f; }

// One element of any type.
inline float read_one(const char* p, int64_t dtype) {
  if (dtype == F32) { float f; memcpy(&f, p, 4); return f; }
  uint16_t h;
  memcpy(&h, p, 2);
  if (dtype == BF16) return scalar_bf16(h);
  uint16_t lanes[LANES] = {h};
  float wide[LANES];
  store(wide, load_f16(lanes));
  return wide[0];
}

inline V load_any(const char* p, int64_t dtype) {
  if (dtype == F32) return load((const float*)p);
  return dtype == BF16 ? load_bf16((const uint16_t*)p) : load_f16((const uint16_t*)p);
}

// Row `p` of `dim` elements, `step` apart, to float32; the rest up to `padded` is zero.
inline void read_row(const char* p, int64_t dtype, int64_t dim, int64_t step, int64_t padded, float* to) {
  int64_t d = 0;
  if (step == 1)
    for (; d + LANES <= dim; d += LANES) store(to + d, load_any(p + d * item_size(dtype), dtype));
  for (; d < dim; ++d) to[d] = read_one(p + d * step * item_size(dtype), dtype);
  for (; d < padded; ++d) to[d] = 0;
}

// Rows that lie across, with neighbouring rows side by side in memory: turned around LANES by LANES. Never inlined, nor
// are other copies: inlined beside them, the products in float32 took a third longer.
[[gnu::noinline]] inline void read_across(const char* p, int64_t dtype, int64_t rows, int64_t dim, int64_t step, int64_t padded, float* to) {
  int64_t size = item_size(dtype), r = 0;
  for (; r + LANES <= rows; r += LANES) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
      V x[LANES];
      for (int i = 0; i < LANES; ++i) x[i] = load_any(p + ((d + i) * step + r) * size, dtype);
      transpose(x);
      for (int i = 0; i < LANES; ++i) store(to + (r + i) * padded + d, x[i]);
    }
    for (; d < padded; ++d)
      for (int i = 0; i < LANES; ++i) to[(r + i) * padded + d] = d < dim ? read_one(p + (d * step + r + i) * size, dtype) : 0;
  }
  for (; r < rows; ++r) read_row(p + r * size, dtype, dim, step, padded, to + r * padded);
}

inline void read_rows(const char* p, int64_t dtype, int64_t rows, int64_t row_step, int64_t dim, int64_t step,
                      int64_t padded, float* to) {
  if (row_step == 1 && step != 1) return read_across(p, dtype, rows, dim, step, padded, to);
  for (int64_t r = 0; r < rows; ++r) read_row(p + r * row_step * item_size(dtype), dtype, dim, step, padded, to + r * padded);
}

// Raw 16-bit rows, zero up to `padded` elements.
inline void copy_rows_16(const char* p, int64_t rows, int64_t row_step, int64_t dim, int64_t step, int64_t padded, uint16_t* to) {
  for (int64_t r = 0; r < rows; ++r, to += padded) {
    const char* from = p + r * row_step * 2;
    if (step == 1) memcpy(to, from, dim * 2);
    else for (int64_t i = 0; i < dim; ++i) memcpy(to + i, from + i * step * 2, 2);
    memset(to + dim, 0, (padded - dim) * 2);
  }
}

// Rows of 32-bit elements [n][cols] to a panel [cols][width], lanes along rows; rows from n on are copies of `filler`.
// cols and width are whole vectors.
inline void pack_panel(const float* rows, int64_t n, const float* filler, int64_t cols, int64_t width, float* to) {
  for (int64_t r = 0; r < width; r += LANES)
    for (int64_t c = 0; c < cols; c += LANES) {
      V x[LANES];
      for (int i = 0; i < LANES; ++i) x[i] = load((r + i < n ? rows + (r + i) * cols : filler) + c);
      transpose(x);
      for (int i = 0; i < LANES; ++i) store(to + (c + i) * width + r, x[i]);
    }
}

// `n` floats to a contiguous row of any type.
inline void write_row(char* p, int64_t dtype, int64_t n, const float* from) {
  int64_t d = 0;
  for (; d + LANES <= n; d += LANES) {
    V x = load(from + d);
    if (dtype == F32) store((float*)p + d, x);
    else if (dtype == BF16) store_bf16((uint16_t*)p + d, x);
    else store_f16((uint16_t*)p + d, x);
  }
  if (d == n) return;
  float wide[LANES] = {0};
  uint16_t narrow[LANES];
  for (int64_t i = d; i < n; ++i) wide[i - d] = from[i];
  if (dtype == F32) { memcpy(p + d * 4, wide, (n - d) * 4); return; }
  if (dtype == BF16) store_bf16(narrow, load(wide)); else store_f16(narrow, load(wide));
  memcpy(p + d * 2, narrow, (n - d) * 2);
}

// 2^x for x <= about 16: a polynomial p on [-1/2, 1/2] (minimax, relative error 8e-8 of degree 5, 3e-6 of degree 4) times
// 2^n by adding n to the exponent bits. The whole part n comes out of an addition whose sum has no fraction bits; it stays
// in the low bits of that sum, where a shift finds it. Below -125 the result is exactly zero: x is held at -125, and what
// that gives is subtracted, which no larger result notices. A NaN stays a NaN.
template <int DEGREE = 5>
inline V exp2(V x) {
  constexpr float MAGIC = 12582912.0f, LEAST = DEGREE == 5 ? 1.0000001192092896f : 0.9999992847442627f;
  x = max(set1(-125.0f), x);
  V t = add_exactly(x, set1(MAGIC)), r = sub(x, sub(t, set1(MAGIC))), p;
  if (DEGREE == 5) {
    p = fma(set1(0.0013276472454890609f), r, set1(0.009675540961325169f));
    p = fma(p, r, set1(0.05550713092088699f));
    p = fma(p, r, set1(0.24022120237350464f));
    p = fma(p, r, set1(0.6931469440460205f));
  } else {
    p = fma(set1(0.009570102207362652f), r, set1(0.05591785907745361f));
    p = fma(p, r, set1(0.240247443318367f));
    p = fma(p, r, set1(0.6931217908859253f));
  }
  p = fma(p, r, set1(LEAST));
  return sub(raise_exponent(p, t), set1(LEAST * 0x1p-125f));
}
inline float exp2(float x) { float lanes[LANES]; store(lanes, exp2(set1(x))); return lanes[0]; }

// tanh by 2^x, symmetric; absolute error about 1e-7.
inline V tanh(V x) {
  V size = max(x, sub(set1(0.0f), x));  // max(a, b) is b where either is NaN, and -NaN is a NaN
  V t = exp2(mul(size, set1(-2.0f * LOG2E)));
  V y = divide(sub(set1(1.0f), t), add(set1(1.0f), t));
  return pick(positive(x), y, sub(set1(0.0f), y));
}

}  // namespace
