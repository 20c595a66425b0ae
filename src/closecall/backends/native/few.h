// Attention of a few rows (decode, speculative decode, short tails): lanes along the head dimension, because a vector of
// rows would be mostly empty. Bound by the memory that keys and values come from, so each is read once for all query heads
// that share it: HEADS_AT_ONCE of them are multiplied with a vector while it is in a register.
#pragma once
#include "attend.h"

namespace {

constexpr int HEADS_AT_ONCE = 4;
constexpr int64_t FETCH_EVERY = 8;  // keys whose values are added: then some of the next step's lines are asked for

// Vectors of keys, or of values, that G heads are multiplied with together: as many sums as stay in registers, and their
// number divides what there is of most shapes.
constexpr int vectors_at_once(int heads) {
  int n = 1;
  while (2 * n * heads <= FEW_SUMS && 2 * n * LANES <= STEP) n *= 2;
  return n;
}

// How many of `left` heads to take now: lots of nearly equal size.
inline int64_t heads_in_turn(int64_t left) {
  int64_t lots = (left + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;
  return (left + lots - 1) / lots;
}

struct FewScratch {
  float *q, *s, *k, *v;
  FewScratch(Arena& arena, const Shape& shape) {
    int64_t d = round_up(shape.D, LANES), dv = round_up(shape.Dv, LANES);
    q = arena.take<float>(FEW_ROWS * (shape.H / shape.Hkv) * d);
    s = arena.take<float>(HEADS_AT_ONCE * STEP);
    k = arena.take<float>(STEP * d);
    v = arena.take<float>(STEP * dv);
  }
};

// A type in memory, and how its numbers become floats.
struct FromF32 {
  static constexpr int64_t SIZE = 4;
  static V lanes(const char* p) { return load((const float*)p); }
};
struct FromBF16 {
  static constexpr int64_t SIZE = 2;
  static V lanes(const char* p) { return load_bf16((const uint16_t*)p); }
};
struct FromF16 {
  static constexpr int64_t SIZE = 2;
  static V lanes(const char* p) { return load_f16((const uint16_t*)p); }
};

// Rows of query heads that are worked on together: head g's begins at row + g * step.
struct Heads {
  const float* row;
  int64_t step;
};

// s[g][j] of J keys, `k_row` bytes apart, whose coordinates follow each other in memory.
template <class From, int G, int J>
inline void dots(Heads q, const char* k, int64_t k_row, int64_t d, float* s) {
  V acc[J][G];
#pragma GCC unroll 8
  for (int j = 0; j < J; ++j)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) acc[j][g] = set1(0.0f);
  for (int64_t i = 0; i < d; i += LANES) {
    V x[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) x[g] = load(q.row + g * q.step + i);
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) {
      V key = From::lanes(k + j * k_row + i * From::SIZE);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) acc[j][g] = fma(x[g], key, acc[j][g]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < J; ++j)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) s[g * STEP + j] = sum(acc[j][g]);
}

// The same of J * LANES keys that lie side by side, their coordinates `step` bytes apart: lanes along keys, so that no lane
// ever meets another. Bit for bit the same: what one lane adds up above, coordinates LANES apart, is added up here for one
// lane after the other, in the turn in which sum() brings them together. What waits for its other half is kept by how many
// lanes it holds.
template <class From, int G, int J>
inline void dots_across(Heads q, const char* k, int64_t step, int64_t dim, float* s, Fetch& fetch) {
  V waiting[LANE_BITS][J][G];
  for (int turn = 0; turn < LANES; ++turn) {
    fetch.some();
    V acc[J][G];
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j)
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) acc[j][g] = set1(0.0f);
    for (int64_t i = lane_in_turn(turn); i < dim; i += LANES) {
      V key[J];
#pragma GCC unroll 8
      for (int j = 0; j < J; ++j) key[j] = From::lanes(k + i * step + j * LANES * From::SIZE);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        V x = set1(q.row[g * q.step + i]);
#pragma GCC unroll 8
        for (int j = 0; j < J; ++j) acc[j][g] = fma(x, key[j], acc[j][g]);
      }
    }
    int held = 0;
    for (; turn >> held & 1; ++held)
#pragma GCC unroll 8
      for (int j = 0; j < J; ++j)
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) acc[j][g] = add(waiting[held][j][g], acc[j][g]);
    bool last = held == LANE_BITS;
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j)
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g)
        if (last) store(s + g * STEP + j * LANES, acc[j][g]); else waiting[held][j][g] = acc[j][g];
  }
}

// o[g] += sum over n of p[g][j] * v[j], R vectors of each.
template <class From, int G, int R>
inline void weigh_vectors(const float* p, const char* v, int64_t v_row, int64_t n, float* o, int64_t o_step, Fetch& fetch) {
  V acc[G][R];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[g][r] = load(o + g * o_step + r * LANES);
  for (int64_t j = 0; j < n; ++j) {
    if (j % FETCH_EVERY == 0) fetch.some();
    V value[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) value[r] = From::lanes(v + j * v_row + r * LANES * From::SIZE);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      V weight = set1(p[g * STEP + j]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[g][r] = fma(weight, value[r], acc[g][r]);
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(o + g * o_step + r * LANES, acc[g][r]);
}

inline int64_t few_width(const Shape& shape) { return round_up(shape.Dv, LANES) + LANES; }  // output, then max and sum

int64_t few_scratch(const Shape& shape) {
  Arena arena{nullptr};
  FewScratch scratch(arena, shape);
  return arena.used;
}
int64_t few_partial(const Shape& shape, const Rows& tile) { return tile.heads * tile.rows * few_width(shape); }

// Turns n scores of one row into weights, in place, and makes its partial result ready to have their values added.
inline void soften(const AttendArgs& args, float* s, int64_t n, float* partial) {
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
}

// Keys or values of one step: where the first begins, and how far to the next key (or, of keys that lie across, to the next
// coordinate), in bytes.
struct Piece {
  const char* p;
  int64_t step, dtype;
};

// The scores of n keys for G heads.
template <class From, int G>
void score(Heads q, Piece k, bool across, int64_t n, int64_t dim, float* s, Fetch& fetch) {
  constexpr int J = vectors_at_once(G), KEYS = J < 4 ? J : 4;
  int64_t j = 0;
  if (across) {
    for (; j + J * LANES <= n; j += J * LANES) dots_across<From, G, J>(q, k.p + j * From::SIZE, k.step, dim, s + j, fetch);
    for (; j < n; j += LANES) dots_across<From, G, 1>(q, k.p + j * From::SIZE, k.step, dim, s + j, fetch);
    return;
  }
  for (; j + KEYS <= n; j += KEYS) {
    if (j % FETCH_EVERY == 0) fetch.some();
    dots<From, G, KEYS>(q, k.p + j * k.step, k.step, round_up(dim, LANES), s + j);
  }
  for (; j < n; ++j) dots<From, G, 1>(q, k.p + j * k.step, k.step, round_up(dim, LANES), s + j);
}

// Adds n weighted values to the results of G heads.
template <class From, int G>
void weigh(const float* p, Piece v, int64_t n, int64_t dv, float* o, int64_t o_step, Fetch& fetch) {
  constexpr int R = vectors_at_once(G);
  int64_t i = 0;
  for (; i + R * LANES <= dv; i += R * LANES) weigh_vectors<From, G, R>(p, v.p + i * From::SIZE, v.step, n, o + i, o_step, fetch);
  for (; i < dv; i += LANES) weigh_vectors<From, G, 1>(p, v.p + i * From::SIZE, v.step, n, o + i, o_step, fetch);
}

template <class Do>
inline void by_type(int64_t dtype, Do call) {
  if (dtype == F32) call(FromF32{});
  else if (dtype == BF16) call(FromBF16{});
  else call(FromF16{});
}

// The keys and values of the next step, which lie on pages that no hardware foresees: on their way while this one's are used.
struct Ahead {
  Fetch k, v;
};

// Of `count` keys from `first` on, to be asked for a few lines at a time.
Ahead ahead(const AttendArgs& args, const Rows& tile, int64_t first, int64_t count) {
  Ahead next;
  if (count <= 0) return next;
  int64_t size = item_size(args.shape.dtype), lots = (tile.heads + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE * tile.rows;
  bool across = tile.k_row == 1 && tile.k_dim != 1;
  next.k = {place(tile, tile.k, tile.k_row, tile.k_page, first, size), (across ? tile.k_dim : tile.k_row) * size,
            (across ? count : args.shape.D) * size, across ? args.shape.D : count};
  next.v = {place(tile, tile.v, tile.v_row, tile.v_page, first, size), tile.v_row * size, args.shape.Dv * size, count};
  int64_t asked = lots * STEP / FETCH_EVERY;  // at least so many times, for either
  auto share = [asked](Fetch& f) { f.lines = (f.rows * ((f.row_bytes + 63) / 64) + asked - 1) / asked; };
  share(next.k), share(next.v);
  return next;
}

// One row of G heads over n keys.
template <int G>
void take_in(const AttendArgs& args, Heads q, Piece k, bool across, Piece v, int64_t n, float* s, float* o, int64_t o_step,
             Ahead& next) {
  by_type(k.dtype, [&](auto from) { score<decltype(from), G>(q, k, across, n, args.shape.D, s, next.k); });
  for (int g = 0; g < G; ++g) soften(args, s + g * STEP, n, o + g * o_step);
  by_type(v.dtype, [&](auto from) { weigh<decltype(from), G>(s, v, n, round_up(args.shape.Dv, LANES), o, o_step, next.v); });
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
  // Rows read in place must be whole vectors.
  bool across = tile.k_row == 1 && tile.k_dim != 1;
  bool k_there = tile.k_dim == 1 && shape.D == d, v_there = tile.v_dim == 1 && shape.Dv == dv;
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
        Piece k{place(tile, tile.k, tile.k_row, tile.k_page, first, size), tile.k_row * size, shape.dtype};
        Piece v{place(tile, tile.v, tile.v_row, tile.v_page, first, size), tile.v_row * size, shape.dtype};
        if (across) {
          int64_t whole = round_up(count, LANES);  // vectors of keys reach past the last one
          k.step = tile.k_dim * size;
          if (whole != count && !(tile.pages && first % tile.page + whole <= tile.page)) {
            for (int64_t i = 0; i < shape.D; ++i)
              read_row(k.p + i * k.step, shape.dtype, count, 1, whole, scratch.k + i * STEP);
            k = {(const char*)scratch.k, STEP * 4, F32};
          }
        } else if (!k_there) {
          read_rows(k.p, shape.dtype, count, tile.k_row, shape.D, tile.k_dim, d, scratch.k);
          k = {(const char*)scratch.k, d * 4, F32};
        }
        if (!v_there) {
          read_rows(v.p, shape.dtype, count, tile.v_row, shape.Dv, tile.v_dim, dv, scratch.v);
          v = {(const char*)scratch.v, dv * 4, F32};
        }
        // The step that follows: of this block, or of the next one that is kept.
        int64_t then = first + STEP, until = high;
        if (then >= high && b + 1 < tile.count)
          then = (tile.idx ? tile.idx[b + 1] : b + 1) * tile.block, until = least(then + tile.block, tile.pos + tile.rows);
        Ahead next = ahead(args, tile, then, least(STEP, until - then));
        for (int64_t r = 0; r < tile.rows; ++r) {
          int64_t n = least(count, tile.pos + r + 1 - first), step = tile.rows * width;  // the keys this row sees
          if (n <= 0) continue;
          for (int64_t h = 0, here; h < tile.heads; h += here) {
            here = heads_in_turn(tile.heads - h);
            Heads q{scratch.q + (h * tile.rows + r) * d, tile.rows * d};
            float* o = mine + (h * tile.rows + r) * width;
            if (here == 4) take_in<4>(args, q, k, across, v, n, scratch.s, o, step, next);
            else if (here == 3) take_in<3>(args, q, k, across, v, n, scratch.s, o, step, next);
            else if (here == 2) take_in<2>(args, q, k, across, v, n, scratch.s, o, step, next);
            else take_in<1>(args, q, k, across, v, n, scratch.s, o, step, next);
          }
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
