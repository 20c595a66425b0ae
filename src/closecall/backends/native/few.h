// Attention of a few rows (decode, speculative decode, short tails): lanes along the head dimension, because a vector of
// rows would be mostly empty. Bound by the memory that keys and values come from, so each is read once for all query heads
// that share it.
#pragma once
#include "attend.h"

namespace {

struct FewScratch {
  float *q, *s, *k, *v;
  FewScratch(Arena& arena, const Shape& shape) {
    int64_t d = round_up(shape.D, LANES), dv = round_up(shape.Dv, LANES);
    q = arena.take<float>(FEW_ROWS * (shape.H / shape.Hkv) * d);
    s = arena.take<float>(STEP);
    k = arena.take<float>(STEP * d);
    v = arena.take<float>(STEP * dv);
  }
};

// Four dot products at a time, to have enough independent sums in flight.
inline void dots(const float* q, const float* k, int64_t k_row, int64_t d, int64_t n, float* s) {
  int64_t j = 0;
  for (; j + 4 <= n; j += 4, k += 4 * k_row) {
    V a = set1(0.0f), b = a, c = a, e = a;
    for (int64_t i = 0; i < d; i += LANES) {
      V x = load(q + i);
      a = fma(x, load(k + i), a);
      b = fma(x, load(k + k_row + i), b);
      c = fma(x, load(k + 2 * k_row + i), c);
      e = fma(x, load(k + 3 * k_row + i), e);
    }
    s[j] = sum(a); s[j + 1] = sum(b); s[j + 2] = sum(c); s[j + 3] = sum(e);
  }
  for (; j < n; ++j, k += k_row) {
    V a = set1(0.0f);
    for (int64_t i = 0; i < d; i += LANES) a = fma(load(q + i), load(k + i), a);
    s[j] = sum(a);
  }
}

// Adds vectors half of them apart, until one is left, as sum() adds lanes.
template <int HALF>
inline void halve(V (&acc)[LANES]) {
#pragma GCC unroll 16
  for (int l = 0; l < HALF; ++l) acc[l] = add(acc[l], acc[l + HALF]);
  if constexpr (HALF > 1) halve<HALF / 2>(acc);
}

// The same for LANES keys that lie side by side, their coordinates `step` floats apart: lanes along keys, and for each key
// the same sums in the same order. No lane ever meets another, which makes it the faster form.
inline V dots_across(const float* q, const float* k, int64_t step, int64_t dim) {
  V acc[LANES];
#pragma GCC unroll 16
  for (int l = 0; l < LANES; ++l) acc[l] = set1(0.0f);
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES)
#pragma GCC unroll 16
    for (int l = 0; l < LANES; ++l) acc[l] = fma(set1(q[i + l]), load(k + (i + l) * step), acc[l]);
  // Every index into acc is known when compiled, or it would not stay in registers.
#pragma GCC unroll 16
  for (int l = 0; l < LANES; ++l)
    if (i + l < dim) acc[l] = fma(set1(q[i + l]), load(k + (i + l) * step), acc[l]);
  halve<LANES / 2>(acc);
  return acc[0];
}

// o += sum of p[j] * v[j], R vectors of each.
template <int R>
inline void weigh_vectors(const float* p, const float* v, int64_t v_row, int64_t n, float* o) {
  V acc[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) acc[r] = load(o + r * LANES);
  for (int64_t j = 0; j < n; ++j) {
    V w = set1(p[j]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r] = fma(w, load(v + j * v_row + r * LANES), acc[r]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store(o + r * LANES, acc[r]);
}

// o[0, dv) += sum of p[j] * v[j][0, dv), as many vectors of o at a time as hide the latency of adding to one.
inline void weigh(const float* p, const float* v, int64_t v_row, int64_t dv, int64_t n, float* o) {
  int64_t i = 0;
  for (; i + 8 * LANES <= dv; i += 8 * LANES) weigh_vectors<8>(p, v + i, v_row, n, o + i);
  for (; i + 4 * LANES <= dv; i += 4 * LANES) weigh_vectors<4>(p, v + i, v_row, n, o + i);
  for (; i < dv; i += LANES) weigh_vectors<1>(p, v + i, v_row, n, o + i);
}

inline int64_t few_width(const Shape& shape) { return round_up(shape.Dv, LANES) + LANES; }  // output, then max and sum

int64_t few_scratch(const Shape& shape) {
  Arena arena{nullptr};
  FewScratch scratch(arena, shape);
  return arena.used;
}
int64_t few_partial(const Shape& shape, const Rows& tile) { return tile.heads * tile.rows * few_width(shape); }

// Takes n scores and values into one row's partial result.
inline void take_in(const AttendArgs& args, float* s, int64_t n, const float* v, int64_t v_row, float* partial) {
  int64_t dv = round_up(args.shape.Dv, LANES);
  float* state = partial + dv;
  float scale = (float)args.scale * LOG2E;
  if (args.softcap > 0) {
    for (int64_t j = n; j < round_up(n, LANES); ++j) s[j] = 0.0f;
    for (int64_t j = 0; j < n; j += LANES)
      store(s + j, mul(tanh(mul(load(s + j), set1((float)(args.scale / args.softcap)))), set1((float)args.softcap)));
    scale = LOG2E;
  }
  for (int64_t j = n; j < round_up(n, LANES); ++j) s[j] = -INF;
  V tops = set1(-INF);
  for (int64_t j = 0; j < n; j += LANES) {
    V x = mul(load(s + j), set1(scale));
    store(s + j, x);
    tops = max(x, tops);  // never a NaN
  }
  float top = largest(tops);
  if (top > state[0]) {
    float factor = state[0] == -INF ? 0.0f : exp2(state[0] - top);
    state[0] = top;
    state[1] *= factor;
    for (int64_t i = 0; i < dv; i += LANES) store(partial + i, mul(load(partial + i), set1(factor)));
  }
  V shift = set1(state[0] == -INF ? 0.0f : state[0]), total = set1(0.0f);
  for (int64_t j = 0; j < n; j += LANES) {
    V p = exp2(sub(load(s + j), shift));
    total = add(total, p);
    store(s + j, p);
  }
  state[1] += sum(total);
  weigh(s, v, v_row, dv, n, partial);
}

void attend_few(const AttendArgs& args, const Rows& tile, int64_t from, int64_t to, float* partial, char* memory) {
  Arena arena{memory};
  FewScratch scratch(arena, args.shape);
  const Shape& shape = args.shape;
  int64_t size = item_size(shape.dtype), d = round_up(shape.D, LANES), dv = round_up(shape.Dv, LANES);
  int64_t all = tile.heads * tile.rows, width = few_width(shape);
  for (int64_t h = 0; h < tile.heads; ++h)
    read_rows(tile.q + h * tile.q_head * size, shape.dtype, tile.rows, tile.q_row, shape.D, tile.q_dim, d,
              scratch.q + h * tile.rows * d);
  // Rows read in place must be whole vectors of floats.
  bool k_there = shape.dtype == F32 && tile.k_dim == 1 && shape.D == d;
  // Keys that lie across are read in place; 16-bit ones would have to be widened first, and turning them around is cheaper.
  bool across = SUMS_ACROSS && shape.dtype == F32 && tile.k_row == 1 && tile.k_dim != 1;
  bool v_there = shape.dtype == F32 && tile.v_dim == 1 && shape.Dv == dv;
  int64_t per_piece = most(1, PIECE / tile.block);
  for (int64_t piece = from; piece < to; ++piece) {
    float* mine = partial + piece * all * width;
    for (int64_t i = 0; i < all; ++i) {
      memset(mine + i * width, 0, sizeof(float) * width);
      mine[i * width + dv] = -INF;
    }
    for (int64_t b = piece * per_piece; b < least((piece + 1) * per_piece, tile.count); ++b) {
      int64_t block = tile.idx ? tile.idx[b] : b;
      int64_t low = block * tile.block, high = least(low + tile.block, tile.pos + tile.rows);
      for (int64_t first = low; first < high; first += STEP) {
        int64_t count = least(STEP, high - first);
        const char* k = place(tile, tile.k, tile.k_row, tile.k_page, first, size);
        const char* v = place(tile, tile.v, tile.v_row, tile.v_page, first, size);
        int64_t k_row = d, v_row = dv;
        const float* side_by_side = scratch.k;  // keys that lie across: their coordinates are k_row apart
        if (across) {
          int64_t whole = round_up(count, LANES);
          bool room = whole == count || (tile.pages && first % tile.page + whole <= tile.page);
          if (room) {
            side_by_side = (const float*)k, k_row = tile.k_dim;
          } else {
            for (int64_t i = 0; i < shape.D; ++i)
              read_row(k + i * tile.k_dim * size, shape.dtype, count, 1, whole, scratch.k + i * STEP);
            k_row = STEP;
          }
        } else if (k_there) k_row = tile.k_row;
        else read_rows(k, shape.dtype, count, tile.k_row, shape.D, tile.k_dim, d, scratch.k);
        if (v_there) v_row = tile.v_row;
        else read_rows(v, shape.dtype, count, tile.v_row, shape.Dv, tile.v_dim, dv, scratch.v);
        for (int64_t i = 0; i < all; ++i) {
          int64_t n = least(count, tile.pos + i % tile.rows + 1 - first);  // the keys this row sees
          if (n <= 0) continue;
          if (across)
            for (int64_t j = 0; j < n; j += LANES)
              store(scratch.s + j, dots_across(scratch.q + i * d, side_by_side + j, k_row, shape.D));
          else
            dots(scratch.q + i * d, k_there ? (const float*)k : scratch.k, k_row, d, n, scratch.s);
          take_in(args, scratch.s, n, v_there ? (const float*)v : scratch.v, v_row, mine + i * width);
        }
      }
    }
  }
}

// Merges the pieces in order (so the result does not depend on who computed which) and writes the rows.
void merge_few(const AttendArgs& args, const Rows& tile, int64_t pieces, float* partial) {
  int64_t size = item_size(args.shape.dtype), dv = round_up(args.shape.Dv, LANES);
  int64_t all = tile.heads * tile.rows, width = few_width(args.shape);
  for (int64_t i = 0; i < all; ++i) {
    float* sum = partial + i * width;
    for (int64_t piece = 1; piece < pieces; ++piece) {
      const float* other = partial + (piece * all + i) * width;
      float a = sum[dv], b = other[dv], top = a > b ? a : b;
      float keep = a == top ? 1.0f : exp2(a - top), take = b == top ? 1.0f : exp2(b - top);
      sum[dv] = top;
      sum[dv + 1] = sum[dv + 1] * keep + other[dv + 1] * take;
      for (int64_t x = 0; x < dv; x += LANES)
        store(sum + x, fma(load(other + x), set1(take), mul(load(sum + x), set1(keep))));
    }
    float l = pieces ? sum[dv + 1] : 0.0f, inverse = l == 0.0f ? 0.0f : 1.0f / l;
    int64_t head = i / tile.rows, row = i % tile.rows;
    for (int64_t x = 0; x < dv; x += LANES) store(sum + x, mul(load(sum + x), set1(inverse)));
    write_row(tile.out + (head * tile.out_head + row * tile.out_row) * size, args.shape.dtype, args.shape.Dv, sum);
    tile.lse[head * tile.lse_head + row] = l == 0.0f ? -INF : LN2 * (sum[dv] + __builtin_log2f(l));
  }
}

}  // namespace
