// Attention of one tile over its kept blocks, lanes along query rows.
//
//   S^T = K Q^T       [keys][rows]   Q packed once per tile, K read in place
//   P   = 2^(S - m)   vertical: each row has its lane, no shuffles anywhere
//   O^T += V^T P^T    [dims][rows]   V read in place (bfloat16 products: packed in key pairs, once per block; AMX: turned
//                                    around too)
//
// A tile's rows are taken in groups of ROW_VECTORS vectors, so that the group's Q, its P and the accumulators stay in
// registers and L1 while K and V stream from L2. Heads that keep the same blocks follow each other within a step: its K and V
// are brought in, and packed, once for all of them. The running maximum is only raised when a block exceeds it by more than
// 2^8: until then the sums stay comfortably inside float32 and nothing has to be rescaled.
#pragma once
#include "dot.h"
#ifdef CC_AMX
#include "amx.h"
#endif

namespace {

constexpr int DIMS_AT_END = 4;  // where the dimensions are no multiple of DIMS_AT_ONCE

// How many of dv dimensions (a multiple of DIMS_AT_END) to take DIMS_AT_END at a time.
inline int64_t dims_at_end(int64_t dv) {
  int64_t n = 0;
  while (n < dv && (dv - n) % DIMS_AT_ONCE) n += DIMS_AT_END;
  return n;
}
constexpr float SLACK = 8.0f;

struct AttendScratch {
  float *q, *rows, *zeros, *s, *o, *m, *l;
  float *k, *v;  // one step of keys and values, where they cannot be read in place
  AttendScratch(Arena& arena, const Shape& shape, int64_t heads) {
    int64_t d = round_up(shape.D, 2 * LANES), dv = round_up(shape.Dv, 2 * LANES);
    rows = arena.take<float>(CHUNK * d);
    zeros = arena.take<float>(d);
    q = arena.take<float>(heads * CHUNK * d);
    s = arena.take<float>(STEP * ROW_VECTORS * LANES);
    o = arena.take<float>(heads * CHUNK * dv + ROW_VECTORS * LANES * LANES);  // whole vectors of dimensions are read at the end
    m = arena.take<float>(heads * CHUNK);
    l = arena.take<float>(heads * CHUNK);
    k = arena.take<float>(STEP * d);
    v = arena.take<float>(STEP * dv);
  }
};

// Hides the lanes below n: a table of LANES hidden marks followed by LANES open ones, read at the right place.
struct HideTable {
  float mark[2 * LANES];
  constexpr HideTable() : mark() {
    for (int i = 0; i < 2 * LANES; ++i) mark[i] = i < LANES ? -INF : 0.0f;
  }
};
constexpr HideTable HIDE;
inline V hide_below(V s, int64_t n) {
  n = n < 0 ? 0 : n > LANES ? LANES : n;
  return where_equal(load(HIDE.mark + LANES - n), set1(-INF), set1(-INF), s);
}

// How a tier multiplies: how panels are packed and what one depth step covers.
template <bool PAIRS>
struct Mode;
template <>
struct Mode<false> {
  using Dot = DotF32;
  static constexpr int DEPTH = 1;  // elements of D, or keys, per depth step
  static constexpr int64_t TOGETHER = 1;  // keys whose values are added at once, those without weight included
  static constexpr int64_t D = 2, KEYS = 1, DIMS = DIMS_AT_END;  // what the products take multiples of
  static constexpr int EXP_DEGREE = 5;
  static constexpr bool AMX = false;
  // How often a product of `rows`, some at once, by `depth` lets more be fetched.
  static int64_t fetches(int64_t rows, int64_t at_once, int64_t depth) {
    return most(1, rows / at_once) * most(1, depth / DEPTH / DEPTH_PER_FETCH);
  }
};
#ifdef CC_BF16_DOT
template <>
struct Mode<true> {
  using Dot = DotBF16;
  static constexpr int DEPTH = 2;
#ifdef CC_AMX
  static constexpr int64_t TOGETHER = AMX_DEPTH, D = AMX_DEPTH, KEYS = AMX_ROWS, DIMS = 2 * AMX_ROWS;
  static constexpr bool AMX = true;
  static int64_t fetches(int64_t rows, int64_t, int64_t depth) {
    return most(1, rows / (2 * AMX_ROWS)) * most(1, depth / AMX_DEPTH);
  }
#else
  static constexpr int64_t TOGETHER = 2, D = 2, KEYS = 1, DIMS = DIMS_AT_END;
  static constexpr bool AMX = false;
  static int64_t fetches(int64_t rows, int64_t at_once, int64_t depth) { return Mode<false>::fetches(rows, at_once, depth / DEPTH); }
#endif
  static constexpr int EXP_DEGREE = 4;  // its error is a thousandth of a bfloat16 rounding
};

inline __m512i pair_of(V low, V high) {  // per lane (bf16(low), bf16(high)), each rounded to nearest even
  const __m512i order = _mm512_set_epi16(
      31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}
#endif

// R: vectors in a group of rows. One for tiles that fill no more, or half of every product would be of rows that are not there.
template <bool PAIRS, int R>
struct TileAttention {
  using M = Mode<PAIRS>;
  using Dot = typename M::Dot;
  static constexpr int GROUP = R * LANES;

  const AttendArgs& args;
  const Rows& tile;
  AttendScratch scratch;
  int64_t rows, pos, groups, d, dv;  // `groups` of rows in each head; head h's are numbered from h * groups on
  int64_t dims_first;  // dimensions taken DIMS_AT_ONCE at a time; the others DIMS_AT_END
  const char* q;
  char* out;
  float* lse;
  V to_log2;

  TileAttention(const AttendArgs& a, const Rows& t, int64_t first, Arena arena)
      : args(a), tile(t), scratch(arena, a.shape, t.heads), rows(least(CHUNK, t.rows - first)), pos(t.pos + first),
        groups((rows + GROUP - 1) / GROUP), d(round_up(a.shape.D, M::D)), dv(round_up(a.shape.Dv, M::DIMS)),
        dims_first(dv - dims_at_end(dv)),
        q(t.q + first * t.q_row * item_size(a.shape.dtype)), out(t.out + first * t.out_row * item_size(a.shape.dtype)),
        lse(t.lse + first), to_log2(set1((float)a.scale * LOG2E)) {}

  // Elements of 32 bits per packed query row: floats, or pairs of bfloat16.
  static int64_t q_cols(const Shape& shape) { return round_up((shape.D + M::DEPTH - 1) / M::DEPTH, LANES); }

  void pack_queries() const {
    int64_t cols = q_cols(args.shape);
    for (int64_t h = 0; h < tile.heads; ++h) {
      const char* from = q + h * tile.q_head * item_size(args.shape.dtype);
      if constexpr (PAIRS)
        copy_rows_16(from, rows, tile.q_row, args.shape.D, tile.q_dim, 2 * cols, (uint16_t*)scratch.rows);
      else
        read_rows(from, args.shape.dtype, rows, tile.q_row, args.shape.D, tile.q_dim, cols, scratch.rows);
      for (int64_t g = 0; g < groups; ++g)
        pack_panel(scratch.rows + g * GROUP * cols, rows - g * GROUP, scratch.zeros, cols, GROUP,
                   scratch.q + (h * groups + g) * GROUP * cols);
    }
  }

  struct Operand { const char* p; int64_t row; };  // bytes

  const char* key_at(int64_t n) const { return place(tile, tile.k, tile.k_row, tile.k_page, n, item_size(args.shape.dtype)); }
  const char* value_at(int64_t n) const { return place(tile, tile.v, tile.v_row, tile.v_page, n, item_size(args.shape.dtype)); }

  // Keys [first, first + n) for the first product.
  Operand keys(int64_t first, int64_t n) const {
    int64_t size = item_size(args.shape.dtype);
    bool there = tile.k_dim == 1 && args.shape.D == d && n % M::KEYS == 0 && (PAIRS || args.shape.dtype == F32);
    if (there && on_page(tile, first, n) == n) return {key_at(first), tile.k_row * size};
    return copied_keys(first, n);
  }

  [[gnu::noinline]] Operand copied_keys(int64_t first, int64_t n) const {
    constexpr int64_t WIDE = PAIRS ? 2 : 4;  // odd D, strided or on two pages: copied, as bfloat16 or as floats
    for (int64_t j = 0, here; j < n; j += here) {
      here = on_page(tile, first + j, n - j);
      char* to = (char*)scratch.k + j * d * WIDE;
      if constexpr (PAIRS) copy_keys_16(key_at(first + j), here, (uint16_t*)to);
      else read_rows(key_at(first + j), args.shape.dtype, here, tile.k_row, args.shape.D, tile.k_dim, d, (float*)to);
    }
    memset((char*)scratch.k + n * d * WIDE, 0, (round_up(n, M::KEYS) - n) * d * WIDE);
    return {(const char*)scratch.k, d * WIDE};
  }

  // n numbers of 16 bits, each `step` of them behind the last.
  static void copy_16(const char* p, int64_t step, int64_t n, uint16_t* to) {
    if (step == 1) memcpy(to, p, n * 2);
    else for (int64_t i = 0; i < n; ++i) memcpy(to + i, p + i * step * 2, 2);
  }

  // n keys as rows of d bfloat16. Keys that lie across are turned around in pairs of coordinates.
  void copy_keys_16(const char* p, int64_t n, uint16_t* to) const {
    int64_t dim = args.shape.D, turned = 0;
#ifdef CC_BF16_DOT
    if (tile.k_row == 1 && tile.k_dim != 1 && n % LANES == 0)
      for (; turned + 2 * LANES <= dim; turned += 2 * LANES)
        for (int64_t j = 0; j < n; j += LANES) {
          V x[LANES];
          for (int i = 0; i < LANES; ++i) {
            const char* even = p + ((turned + 2 * i) * tile.k_dim + j) * 2;
            __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)even));
            __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(even + tile.k_dim * 2)));
            x[i] = _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
          }
          transpose(x);
          for (int i = 0; i < LANES; ++i) _mm512_storeu_ps(to + (j + i) * d + turned, x[i]);
        }
#endif
    for (int64_t j = 0; j < n; ++j, to += d) {
      copy_16(p + (j * tile.k_row + turned * tile.k_dim) * 2, tile.k_dim, dim - turned, to + turned);
      memset(to + dim, 0, (d - dim) * 2);
    }
  }

#ifdef CC_BF16_DOT
  // Coordinates [i, i + LANES) of two values as pairs; zeros where there is no second value, or no such coordinate.
  __m512i pairs_at(const char* even, const char* odd, int64_t i) const {
    if (tile.v_dim == 1 && i + LANES <= args.shape.Dv) {
      __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(even + i * 2)));
      if (!odd) return low;
      __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(odd + i * 2)));
      return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    }
    uint16_t pair[2 * LANES] = {0};
    for (int64_t j = 0; j < least(LANES, args.shape.Dv - i); ++j) {
      memcpy(pair + 2 * j, even + (i + j) * tile.v_dim * 2, 2);
      if (odd) memcpy(pair + 2 * j + 1, odd + (i + j) * tile.v_dim * 2, 2);
    }
    return _mm512_loadu_si512(pair);
  }
#endif

#ifdef CC_AMX
  // Values as left operands: registers of 16 coordinates by 32 keys, those of the same keys one behind the other.
  [[gnu::noinline]] void turn_values(int64_t first, int64_t n) const {
    char* to = (char*)scratch.v;
    for (int64_t j = 0; j < n; j += AMX_DEPTH) {
      bool whole = j + AMX_DEPTH <= n && tile.v_dim == 1 && on_page(tile, first + j, AMX_DEPTH) == AMX_DEPTH;
      for (int64_t i = 0; i < dv; i += AMX_DEPTH, to += 2 * AMX_BYTES) {
        if (whole && i + AMX_DEPTH <= args.shape.Dv) {
          turn_32(value_at(first + j) + i * 2, tile.v_row * 2, to);
          continue;
        }
        uint16_t some[AMX_DEPTH][AMX_DEPTH] = {{0}};
        int64_t there = least(AMX_DEPTH, args.shape.Dv - i);
        for (int64_t x = 0; x < least(AMX_DEPTH, n - j) && there > 0; ++x)
          copy_16(value_at(first + j + x) + i * tile.v_dim * 2, tile.v_dim, there, some[x]);
        turn_32((const char*)some, sizeof some[0], to);
      }
    }
  }

  // S^T of n keys and one group of rows; raises `top`.
  void amx_scores(const float* q_group, Operand k, int64_t n, float* s, V (&top)[R], Fetch* fetch) const {
    AmxLeft left{k.p, k.row, AMX_ROWS * k.row, 2 * AMX_DEPTH};
    for (int64_t j = 0; j < n; left.p += 2 * left.next) {
      float* to = s + j * GROUP;
      int64_t end = least(n, j + 2 * AMX_ROWS);
      if (end - j > AMX_ROWS) amx_product<2, R>(left, q_group, GROUP, d / AMX_DEPTH, true, to, fetch);
      else amx_product<1, R>(left, q_group, GROUP, d / AMX_DEPTH, true, to, fetch);
      for (; j < end; ++j)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) top[r] = max(load(s + j * GROUP + r * LANES), top[r]);
    }
  }

  // O^T += V^T P^T of n keys and one group of rows.
  void amx_add(float* p, int64_t n, Operand v, float* o, Fetch* fetch) const {
    for (int64_t j = (n + 1) / 2; j < round_up(n, AMX_DEPTH) / 2; ++j)  // keys that are not there have no weight
      for (int r = 0; r < R; ++r) store(p + j * GROUP + r * LANES, set1(0.0f));
    AmxLeft left{v.p, 64, AMX_BYTES, v.row};
    for (int64_t i = 0; i < dv; i += 2 * AMX_ROWS, left.p += 2 * AMX_BYTES)
      amx_product<2, R>(left, p, GROUP, (n + AMX_DEPTH - 1) / AMX_DEPTH, false, o + i * GROUP, fetch);
  }
#endif

  // Values [first, first + n) for the second product: rows of floats, or of (even key, odd key) pairs; for AMX, `row` is the
  // way from some keys to the next.
  Operand values(int64_t first, int64_t n) const {
    int64_t size = item_size(args.shape.dtype), dim = args.shape.Dv;
    const char* p = value_at(first);
    bool together = on_page(tile, first, n) == n;
    if (!PAIRS && args.shape.dtype == F32 && tile.v_dim == 1 && dim == dv && together) return {p, tile.v_row * size};
#ifdef CC_BF16_DOT
#ifdef CC_AMX
    if constexpr (M::AMX) {
      turn_values(first, n);
      return {(const char*)scratch.v, dv * 2 * AMX_DEPTH};
    }
#endif
    if constexpr (PAIRS) {
      uint32_t* to = (uint32_t*)scratch.v;
      for (int64_t j = 0; j < n; j += 2, to += dv) {
        bool both = j + 1 < n;
        const char *even = together ? p + j * tile.v_row * 2 : value_at(first + j);
        const char* odd = !both ? nullptr : together ? even + tile.v_row * 2 : value_at(first + j + 1);
        for (int64_t i = 0; i < dv; i += LANES) _mm512_mask_storeu_epi32(to + i, (1u << least(LANES, dv - i)) - 1, pairs_at(even, odd, i));
      }
      return {(const char*)scratch.v, dv * 4};
    }
#endif
    return copied_values(first, n);
  }

  [[gnu::noinline]] Operand copied_values(int64_t first, int64_t n) const {
    int64_t dim = args.shape.Dv;
    for (int64_t j = 0, here; j < n; j += here) {
      here = on_page(tile, first + j, n - j);
      read_rows(value_at(first + j), args.shape.dtype, here, tile.v_row, dim, tile.v_dim, dv, scratch.v + j * dv);
    }
    return {(const char*)scratch.v, dv * 4};
  }

  // S^T of J keys and one group of rows; raises `top`. With 16 registers its own function, like add_values: inlined, the
  // addresses of its inner loop would no longer fit in registers.
  template <int J>
  OWN_FUNCTION void score_keys(const float* q_group, Operand k, float* s, V (&top)[R], Fetch* fetch) const {
    V acc[J][R];
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[j][r] = set1(0.0f);
    panel<Dot, J, R>(q_group, d / M::DEPTH, k.p, k.row, Dot::STEP_BYTES, acc, fetch);
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        store(s + j * GROUP + r * LANES, acc[j][r]);
        top[r] = max(acc[j][r], top[r]);
      }
  }

  // O^T += V^T P^T of J dimensions and one group of rows.
  template <int J>
  OWN_FUNCTION void add_values(const float* p, int64_t depth, Operand v, float* o, Fetch* fetch) const {
    V acc[J][R];
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[j][r] = load(o + j * GROUP + r * LANES);
    panel<Dot, J, R>(p, depth, v.p, 4, v.row, acc, fetch);
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) store(o + j * GROUP + r * LANES, acc[j][r]);
  }

  // Scores of n keys to weights, in place; keeps the running maximum and sum; rescales the output when the maximum moves.
  void soften(int64_t g, float* s, int64_t n, V (&top)[R]) const {
    float *m = scratch.m + g * GROUP, *l = scratch.l + g * GROUP, *o = scratch.o + g * GROUP * dv;
    V shift[R], total[R];
    bool rise = false;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      top[r] = mul(top[r], to_log2);
      rise |= any_above(top[r], add(load(m + r * LANES), set1(SLACK)));
    }
    if (rise) {
      V factor[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        V before = load(m + r * LANES), now = max(top[r], before);
        factor[r] = where_equal(before, now, set1(1.0f), exp2(sub(before, now)));
        store(m + r * LANES, now);
        store(l + r * LANES, mul(load(l + r * LANES), factor[r]));
      }
      for (int64_t i = 0; i < dv; ++i)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          float* at = o + i * GROUP + r * LANES;
          store(at, mul(load(at), factor[r]));
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      V now = load(m + r * LANES);
      shift[r] = sub(set1(0.0f), where_equal(now, set1(-INF), set1(0.0f), now));  // a row that has seen nothing yet
      total[r] = load(l + r * LANES);
    }
    for (int64_t j = 0; j < n; j += M::DEPTH) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        float* at = s + j * GROUP + r * LANES;
        V p = exp2<M::EXP_DEGREE>(fma(load(at), to_log2, shift[r]));
        total[r] = add(total[r], p);
        if constexpr (!PAIRS) store(at, p);
#ifdef CC_BF16_DOT
        if constexpr (PAIRS) {
          V next = set1(0.0f);
          if (j + 1 < n) next = exp2<M::EXP_DEGREE>(fma(load(at + GROUP), to_log2, shift[r]));
          total[r] = add(total[r], next);
          _mm512_storeu_si512(s + j / 2 * GROUP + r * LANES, pair_of(p, next));
        }
#endif
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(l + r * LANES, total[r]);
  }

  // Gemma's softcap: scores flatten out towards +-softcap. Kept in units of the raw product, as soften() expects them.
  void cap(float* s, int64_t n, V (&top)[R]) const {
    V inner = set1((float)(args.scale / args.softcap)), outer = set1((float)(args.softcap / args.scale));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      top[r] = set1(-INF);
      for (int64_t j = 0; j < n; ++j) {
        float* at = s + j * GROUP + r * LANES;
        V capped = mul(tanh(mul(load(at), inner)), outer);
        store(at, capped);
        top[r] = max(capped, top[r]);
      }
    }
  }

  // Some rows of the group do not see all n keys: hide those scores and take the maximum again.
  void hide_future(float* s, int64_t first, int64_t n, int64_t row, V (&top)[R]) const {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      top[r] = set1(-INF);
      for (int64_t j = 0; j < n; ++j) {
        float* at = s + j * GROUP + r * LANES;
        V seen = hide_below(load(at), first + j - row - r * LANES);
        store(at, seen);
        top[r] = max(seen, top[r]);
      }
    }
  }

  bool finite_values(int64_t first, int64_t n) const {
    int64_t size = item_size(args.shape.dtype), dim = args.shape.Dv;
    V spoilt = set1(0.0f);  // x - x is zero for a number and NaN for NaN and infinities, and a NaN stays in the sum
    for (int64_t j = 0; j < n; ++j) {
      const char* p = value_at(first + j);
      int64_t i = 0;
      if (tile.v_dim == 1)
        for (; i + LANES <= dim; i += LANES) {
          V x = load_any(p + i * size, args.shape.dtype);
          spoilt = add(spoilt, sub(x, x));
        }
      for (; i < dim; ++i) {
        float x = read_one(p + i * tile.v_dim * size, args.shape.dtype);
        spoilt = add(spoilt, set1(x - x));
      }
    }
    return sum(spoilt) == 0.0f;
  }

  // The weights of key j for vector r of the group.
  static V weights_of(const float* p, int64_t j, int r) {
#ifdef CC_BF16_DOT
    if constexpr (PAIRS) {
      __m512i pair = _mm512_loadu_si512(p + j / 2 * GROUP + r * LANES);
      return _mm512_castsi512_ps(j & 1 ? _mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000u)) : _mm512_slli_epi32(pair, 16));
    }
#endif
    return load(p + j * GROUP + r * LANES);
  }

  // The second product, key by key, for steps in which a non-finite value must not reach the rows that do not see it.
  void add_values_carefully(const float* p, int64_t first, int64_t n, int64_t row, float* o) const {
    int64_t size = item_size(args.shape.dtype);
    for (int64_t j = 0; j < n; ++j)
      for (int r = 0; r < R; ++r) {
        V weight = weights_of(p, j, r), hidden = hide_below(set1(0.0f), first + j - row - r * LANES);
        for (int64_t i = 0; i < args.shape.Dv; ++i) {
          float* at = o + i * GROUP + r * LANES;
          float x = read_one(value_at(first + j) + i * tile.v_dim * size, args.shape.dtype);
          V before = load(at);
          store(at, where_equal(hidden, set1(-INF), before, fma(weight, set1(x), before)));
        }
      }
  }

  // S^T of n keys and one group of rows, to scratch.s; raises `top`.
  void score_group(const float* q_group, Operand k, int64_t n, V (&top)[R], Fetch* fetch) const {
#ifdef CC_AMX
    if constexpr (M::AMX) return amx_scores(q_group, k, n, scratch.s, top, fetch);
#endif
    int64_t j = 0;
    for (; j + KEYS_AT_ONCE <= n; j += KEYS_AT_ONCE)
      score_keys<KEYS_AT_ONCE>(q_group, {k.p + j * k.row, k.row}, scratch.s + j * GROUP, top, fetch);
    for (; j + 4 <= n; j += 4) score_keys<4>(q_group, {k.p + j * k.row, k.row}, scratch.s + j * GROUP, top, nullptr);
    for (; j < n; ++j) score_keys<1>(q_group, {k.p + j * k.row, k.row}, scratch.s + j * GROUP, top, nullptr);
  }

  // O^T += V^T P^T of n keys and one group of rows, with the weights in scratch.s.
  void add_group(int64_t n, Operand v, float* o, Fetch* fetch) const {
#ifdef CC_AMX
    if constexpr (M::AMX) return amx_add(scratch.s, n, v, o, fetch);
#endif
    int64_t depth = (n + M::DEPTH - 1) / M::DEPTH, i = 0;
    for (; i < dims_first; i += DIMS_AT_ONCE)
      add_values<DIMS_AT_ONCE>(scratch.s, depth, {v.p + i * 4, v.row}, o + i * GROUP, fetch);
    for (; i < dv; i += DIMS_AT_END) add_values<DIMS_AT_END>(scratch.s, depth, {v.p + i * 4, v.row}, o + i * GROUP, nullptr);
  }

  // One step of at most STEP keys for every group of rows; `next` are the keys of the following step, to be fetched.
  void step(int64_t first, int64_t count, int64_t next, int64_t next_count) const {
    int64_t size = item_size(args.shape.dtype);
    Operand k = keys(first, count), v = values(first, count);
    // The next keys come in during the first products, the next values during the second ones.
    int64_t every = tile.heads * groups, calls = every * M::fetches(count, KEYS_AT_ONCE, d);
    Fetch next_k{next_count ? key_at(next) : nullptr, tile.k_row * size, d * size, next_count};
    if (tile.k_row == 1) next_k.row_step = tile.k_dim * size, next_k.row_bytes = next_count * size, next_k.rows = d;
    next_k.lines = (next_k.rows * ((next_k.row_bytes + 63) / 64) + calls - 1) / calls;
    calls = every * M::fetches(dims_first, DIMS_AT_ONCE, count);
    Fetch next_v{next_count ? value_at(next) : nullptr, tile.v_row * size, dv * size, next_count};
    next_v.lines = (next_count * ((dv * size + 63) / 64) + calls - 1) / calls;
    for (int64_t g = 0; g < every; ++g) {
      int64_t row = pos + g % groups * GROUP;
      int64_t n = least(count, least(row + GROUP, pos + rows) - first);
      if (n <= 0) continue;
      V top[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) top[r] = set1(-INF);
      const float* q_group = scratch.q + g * GROUP * q_cols(args.shape);
      score_group(q_group, k, n, top, &next_k);
      if (args.softcap > 0) cap(scratch.s, n, top);
      bool diagonal = first + n - 1 > row;
      if (diagonal) hide_future(scratch.s, first, n, row, top);
      soften(g, scratch.s, n, top);
      float* o = scratch.o + g * GROUP * dv;
      if (diagonal && !finite_values(first, least(count, round_up(n, M::TOGETHER)))) {
        add_values_carefully(scratch.s, first, n, row, o);
        continue;
      }
      add_group(n, v, o, &next_v);
    }
  }

  void finish(int64_t h) const {
    int64_t size = item_size(args.shape.dtype), row = h * groups * GROUP;
    float *sums = scratch.l + row, *to = lse + h * tile.lse_head;
    for (int64_t r = 0; r < rows; ++r) {
      float l = sums[r];
      to[r] = l == 0.0f ? -INF : LN2 * (scratch.m[row + r] + __builtin_log2f(l));
      sums[r] = l == 0.0f ? 0.0f : 1.0f / l;
    }
    for (int64_t first = 0; first < rows; first += LANES) {
      const float* o = scratch.o + (row + first / GROUP * GROUP) * dv + first % GROUP;
      V inverse = load(sums + first);
      for (int64_t i = 0; i < args.shape.Dv; i += LANES) {
        V x[LANES];
        for (int j = 0; j < LANES; ++j) x[j] = mul(load(o + (i + j) * GROUP), inverse);
        transpose(x);
        float wide[LANES];
        for (int64_t r = first; r < least(first + LANES, rows); ++r) {
          store(wide, x[r - first]);
          write_row(out + (h * tile.out_head + r * tile.out_row + i) * size, args.shape.dtype, least(LANES, args.shape.Dv - i), wide);
        }
      }
    }
  }

  // The kept keys come in spans of at most STEP. A span runs on through neighbouring blocks, so that where every block is
  // kept the spans, and with them every rounding, are the same with and without a list of blocks.
  struct Span { int64_t first, count, block; };  // `block` counts kept blocks

  // The span that starts at key `from` if that key is kept, else at the next kept block; `block` is the kept block before.
  Span span(int64_t from, int64_t block = 0) const {
    int64_t end = pos + rows;  // keys this chunk can see
    if (!tile.idx) return {from, least(STEP, end - from), 0};
    auto low = [&](int64_t i) { return (int64_t)tile.idx[i] * tile.block; };
    while (block < tile.count && low(block) + tile.block <= from) ++block;
    if (block == tile.count) return {0, 0, block};
    from = most(from, low(block));
    int64_t last = block;  // how far the run of neighbours goes, as far as it matters
    while (low(last) + tile.block < from + STEP && last + 1 < tile.count && tile.idx[last + 1] == tile.idx[last] + 1) ++last;
    return {from, least(STEP, least(low(last) + tile.block, end) - from), block};
  }

  void run() {
    memset(scratch.zeros, 0, sizeof(float) * q_cols(args.shape));
    pack_queries();
    for (int64_t i = 0; i < tile.heads * CHUNK; ++i) { scratch.m[i] = -INF; scratch.l[i] = 0.0f; }
    memset(scratch.o, 0, sizeof(float) * tile.heads * groups * GROUP * dv);
    Span now = span(0);
    while (now.count > 0) {
      Span next = span(now.first + now.count, now.block);
      step(now.first, now.count, next.first, next.count);
      now = next;
    }
    for (int64_t h = 0; h < tile.heads; ++h) finish(h);
  }
};

int64_t attend_scratch(const Shape& shape, int64_t heads) {
  Arena arena{nullptr};
  AttendScratch scratch(arena, shape, heads);
  return arena.used;
}

template <bool PAIRS>
void attend_chunk(const AttendArgs& args, const Rows& tile, int64_t first, char* scratch) {
  if constexpr (LANES > FEW_ROWS)  // else so few rows have a kernel of their own
    if (tile.rows - first <= LANES) return TileAttention<PAIRS, 1>(args, tile, first, Arena{scratch}).run();
  TileAttention<PAIRS, ROW_VECTORS>(args, tile, first, Arena{scratch}).run();
}

void attend(const AttendArgs& args, const Rows& tile, char* scratch) {
#ifdef CC_AMX
  AmxTurn turn;
#endif
  for (int64_t first = 0; first < tile.rows; first += CHUNK) {
#ifdef CC_BF16_DOT
    if (args.shape.dtype == BF16) {
      attend_chunk<true>(args, tile, first, scratch);
      continue;
    }
#endif
    attend_chunk<false>(args, tile, first, scratch);
  }
}

}  // namespace
