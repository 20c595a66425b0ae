// Scores runs (rows, or means of rows) against blocks, where a tile's score is the largest over its runs.
//
// Lanes are blocks. A box's side depends on the run and the coordinate only, so with blocks in lanes it is the same for a
// whole vector, and choosing it costs nothing: it is the address that the multiply-add reads from. Runs are never packed into
// vectors, so a tile of five means wastes no lane, and scores come out in the order in which they are ranked.
//
// Summaries are turned into panels of SLAB blocks by a few coordinates, which stay in L1 while all runs meet them.
#pragma once
#include "summary.h"

namespace {

constexpr int SLAB_VECTORS = 12, SLAB = SLAB_VECTORS * LANES;
constexpr int DEPTH = 3072 / SLAB;  // coordinates of a panel: both sides of its boxes take 24 KiB
constexpr int RUNS_AT_ONCE = 96;  // what turning a panel costs is shared by them; their logs are scratch

// Whether tiles are scored this way: the tier gains by it, the reduction is a maximum, and summaries are no pairs.
bool by_slabs(const RankArgs& a) { return SLABS_PAY && (a.aggregate == AGG_MAX || a.aggregate == AGG_SOFTMAX) && !paired(a); }

// A run's coordinate, and how many bytes behind a panel's upper side the side lies that it takes.
struct Coordinate { float x; int32_t side; };
constexpr int32_t LOWER = DEPTH * SLAB * 4;

// Where a run's scores go, if they are larger than what is there, and how many blocks it sees.
struct Run { float* best; int64_t seen; };

struct SlabScratch {
  int64_t n_padded;
  Coordinate* coordinates;    // [run][coordinate]
  float *panel, *first, *part, *logs;  // first, part: [run][SLAB]; logs: [run][n_padded]
  SlabScratch(Arena& arena, const RankArgs& a) {
    int64_t runs = by_slabs(a) ? RUNS_AT_ONCE : 0;
    n_padded = round_up(a.tiles.n_blocks, SLAB);
    coordinates = arena.take<Coordinate>(runs * padded_dim(a));
    panel = arena.take<float>(runs ? 2 * DEPTH * SLAB : 0);
    first = arena.take<float>(runs * SLAB);
    part = arena.take<float>(runs * SLAB);
    logs = arena.take<float>(a.aggregate == AGG_SOFTMAX ? runs * n_padded : 0);
  }
};

inline void write_coordinates(const float* row, int64_t d, Coordinate* to) {
  for (int64_t i = 0; i < d; ++i) to[i] = {row[i], row[i] > 0.0f ? 0 : LOWER};
}

// Asks for the summaries of a slab, a few lines at a time while runs meet the slab before it.
struct NextSlab {
  const char* summaries;
  const int32_t* blocks;
  int64_t stride, block, last, lines;  // blocks from `block` to `last`; lines of a call
  int64_t at = 0;
  void some() {
    for (int64_t i = 0; i < lines && block < last; ++i) {
      __builtin_prefetch(summaries + (blocks ? blocks[block] : block) * stride + at, 0, 2);
      if ((at += 64) >= stride) at = 0, ++block;
    }
  }
};

// `depth` coordinates of R vectors of blocks, those from `first` to `last`; what is behind the last repeats it.
template <int R>
void turn_planes(const char* plane, int64_t stride, const int32_t* blocks, int64_t first, int64_t last, int64_t depth, float* to) {
  for (int64_t c = 0; c < R * LANES; c += LANES) {
    const float* from[LANES];
    for (int i = 0; i < LANES; ++i) {
      int64_t j = least(first + c + i, last - 1);
      from[i] = (const float*)(plane + (blocks ? blocks[j] : j) * stride);
    }
    for (int64_t d = 0; d < depth; d += LANES) {
      V x[LANES];
      for (int i = 0; i < LANES; ++i) x[i] = load(from[i] + d);
      transpose(x);
      for (int i = 0; i < LANES; ++i) store(to + (d + i) * (R * LANES) + c, x[i]);
    }
  }
}

// The sums of J runs and R vectors of blocks, which live in registers while a part of the coordinates passes.
template <int J, int R>
[[gnu::always_inline]] inline void take_sums(V (&acc)[J][R], bool begin, const float* scores) {
#pragma GCC unroll 16
  for (int j = 0; j < J; ++j)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[j][r] = begin ? set1(0.0f) : load(scores + j * SLAB + r * LANES);
}

template <int J, int R>
[[gnu::always_inline]] inline void put_sums(const V (&acc)[J][R], float* scores) {
#pragma GCC unroll 16
  for (int j = 0; j < J; ++j)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) store(scores + j * SLAB + r * LANES, acc[j][r]);
}

// J runs meet R vectors of boxes.
template <int J, int R>
[[gnu::noinline]] void meet_boxes(const Coordinate* q, int64_t dim, const float* panel, int64_t depth, bool begin, float* scores) {
  V acc[J][R];
  take_sums(acc, begin, scores);
#pragma GCC unroll 2
  for (int64_t d = 0; d < depth; ++d) {
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) {
      const Coordinate& at = q[j * dim + d];
      V x = set1(at.x);
      const float* side = (const float*)((const char*)(panel + d * R * LANES) + at.side);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) acc[j][r] = fma(x, load(side + r * LANES), acc[j][r]);
    }
  }
  put_sums(acc, scores);
}

// J runs meet R vectors of keys or means, of `width` blocks.
template <int J, int R>
[[gnu::noinline]] void meet_keys(const Coordinate* q, int64_t dim, const float* panel, int64_t width, int64_t depth, bool begin, float* scores) {
  V acc[J][R];
  take_sums(acc, begin, scores);
#pragma GCC unroll 2
  for (int64_t d = 0; d < depth; ++d) {
    V x[J];
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) x[j] = set1(q[j * dim + d].x);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      V keys = load(panel + d * width + r * LANES);
#pragma GCC unroll 16
      for (int j = 0; j < J; ++j) acc[j][r] = fma(x[j], keys, acc[j][r]);
    }
  }
  put_sums(acc, scores);
}

// Runs meet one part of R vectors of blocks: boxes, or what has one plane.
template <int R>
void meet_part(const RankArgs& a, const Coordinate* q, int64_t runs, const char* plane, bool box, const int32_t* blocks, int64_t first,
               int64_t last, NextSlab* next, float* panel, float* scores) {
  constexpr int J = SLAB_VECTORS / R;  // of boxes: as many sums as fill the registers
  int64_t dim = padded_dim(a), stride = summary_bytes(a);
  for (int64_t d = 0; d < dim; d += DEPTH) {
    int64_t depth = least(DEPTH, dim - d), i = 0;
    turn_planes<R>(plane + d * 4, stride, blocks, first, last, depth, panel);
    if (box) {
      turn_planes<R>(plane + plane_bytes(a) + d * 4, stride, blocks, first, last, depth, panel + DEPTH * SLAB);
      for (; i + J <= runs; i += J) {
        next->some();
        meet_boxes<J, R>(q + i * dim + d, dim, panel, depth, d == 0, scores + i * SLAB);
      }
      for (; i < runs; ++i) meet_boxes<1, R>(q + i * dim + d, dim, panel, depth, d == 0, scores + i * SLAB);
      continue;
    }
    constexpr int K = R % 4 ? 2 : 3, WIDE = 12 / K;  // of keys: runs and vectors that share the most loads
    for (; i + K <= runs; i += K) {
      next->some();
      for (int c = 0; c < R * LANES; c += WIDE * LANES)
        meet_keys<K, WIDE>(q + i * dim + d, dim, panel + c, R * LANES, depth, d == 0, scores + i * SLAB + c);
    }
    for (; i < runs; ++i) meet_keys<1, R>(q + i * dim + d, dim, panel, R * LANES, depth, d == 0, scores + i * SLAB);
  }
}

// A NaN counts as -inf, an infinity as the largest number, so that a row's infinities share what there is.
inline V known(V x) { return min(max(x, set1(-INF)), set1(LARGEST)); }  // max(x, y) is y where x is NaN

// The running maximum of exponents and the sum of their powers of two, lane by lane: the maximum is raised where it must be.
struct LaneSums {
  V top = set1(-LARGEST), total = set1(0.0f);
  template <int R>
  inline void take(const float* x, V above) {  // `above`: the largest of them and of `top`
    if (any_above(above, top)) total = mul(total, exp2(sub(top, above)));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) total = add(total, exp2(sub(load(x + r * LANES), above)));
    top = above;
  }
  float log2() const {  // of nothing it is infinite
    float most_of = largest(top), all = sum(mul(total, exp2(sub(top, set1(most_of)))));
    return all > 0.0f ? most_of + __builtin_log2f(all) : INF;
  }
};

// The largest over parts of R vectors of blocks from `at` on, for runs from `from` to `n`: to their scores, or as
// exponents to their logs and sums.
template <int R>
void score_slab(const RankArgs& a, const Run* runs, int64_t from, int64_t n, const char* summaries, const int32_t* blocks, int64_t at,
                int64_t end, const SlabScratch& scratch, LaneSums* sums) {
  const Coordinate* q = scratch.coordinates + from * padded_dim(a);
  float *first = scratch.first, *part = scratch.part;
  int64_t stride = summary_bytes(a), calls = (padded_dim(a) + DEPTH - 1) / DEPTH * most(1, (n - from) / 3) * (parts(a) + 2 * boxed(a));
  NextSlab next{summaries, blocks, stride, least(at + SLAB, end), least(at + 2 * SLAB, end), SLAB * stride / 64 / calls + 1};
  meet_part<R>(a, q, n - from, summaries, boxed(a), blocks, at, end, &next, scratch.panel, first);
  auto larger = [&](int64_t x) { return max(load(part + x), max(load(first + x), set1(-INF))); };  // a NaN has no say
  for (int64_t p = 1; p < parts(a); ++p) {
    if (p > 1)
      for (int64_t i = 0; i < (n - from) * SLAB; i += LANES) store(first + i, larger(i));
    meet_part<R>(a, q, n - from, summaries + plane_of(a, p), false, blocks, at, end, &next, scratch.panel, part);
  }
  bool several = parts(a) > 1;
  V scale = set1((float)a.scale * LOG2E), count;
  float lanes[LANES];
  for (int i = 0; i < LANES; ++i) lanes[i] = (float)i + 0.5f;
  count = load(lanes);
  for (int64_t i = from; i < n; ++i, first += SLAB, part += SLAB) {
    if (a.aggregate == AGG_MAX) {
      float* best = runs[i].best + at;
      for (int64_t x = 0; x < R * LANES; x += LANES) store(best + x, max(several ? larger(x) : load(first + x), load(best + x)));
      continue;
    }
    float *logs = scratch.logs + i * scratch.n_padded + at, left = (float)(runs[i].seen - at);
    V above = sums[i].top;
    for (int64_t x = 0; x < R * LANES; x += LANES) {
      V log = known(mul(several ? larger(x) : load(first + x), scale));
      if (left < R * LANES) log = pick(positive(sub(set1(left - (float)x), count)), log, set1(-INF));
      above = max(log, above);
      store(logs + x, log);
    }
    sums[i].template take<R>(logs, above);
  }
}

// `n` runs, their coordinates in scratch, meet the blocks [0, end), or those of `end` blocks that are named. What a run keeps of
// a block does not depend on the others: slabs begin where they begin for everybody.
void score_runs(const RankArgs& a, const Run* runs, int64_t n, const char* summaries, const int32_t* blocks, int64_t end,
                const SlabScratch& scratch) {
  LaneSums sums[RUNS_AT_ONCE];
  for (int64_t at = 0, from = 0; at < end; at += SLAB) {
    while (from < n && runs[from].seen <= at) ++from;  // runs that see fewer blocks come first
    int64_t vectors = (end - at + LANES - 1) / LANES;
    if (vectors <= 4) score_slab<4>(a, runs, from, n, summaries, blocks, at, end, scratch, sums);
    else if (vectors <= 6) score_slab<6>(a, runs, from, n, summaries, blocks, at, end, scratch, sums);
    else if (vectors <= 8) score_slab<8>(a, runs, from, n, summaries, blocks, at, end, scratch, sums);
    else score_slab<SLAB_VECTORS>(a, runs, from, n, summaries, blocks, at, end, scratch, sums);
  }
  if (a.aggregate == AGG_MAX) return;
  for (int64_t i = 0, last; i < n; i = last) {  // the runs of a tile follow each other
    V all[RUNS_AT_ONCE];
    for (last = i; last < n && runs[last].best == runs[i].best; ++last) all[last] = set1(sums[last].log2());
    for (int64_t j = 0; j < runs[i].seen; j += 4 * LANES) {
      V best[4];
      for (int x = 0; x < 4; ++x) best[x] = load(runs[i].best + j + x * LANES);
      for (int64_t r = i; r < last; ++r)
        for (int x = 0; x < 4; ++x) best[x] = max(sub(load(scratch.logs + r * scratch.n_padded + j + x * LANES), all[r]), best[x]);
      for (int x = 0; x < 4; ++x) store(runs[i].best + j + x * LANES, best[x]);
    }
  }
}

}  // namespace
