// Scores and ranks many cells (a tile of one query head) together, where each has only a few rows left: the means of its
// runs of `pool` rows, and with `outlying` behind them the rows most distant from the tile's mean, as if they were runs.
//
// With rows in lanes a tile of 8 means would leave most lanes empty. Here the lanes are cells that read the same key head,
// neighbouring tiles and the heads of a group, and the vectors are their means: a maximum over a cell's means is a maximum
// of vectors, and nothing is ever reduced across lanes. Scores come out as [block][cell] and are turned once.
//
// Where slab.h scores them, blocks are in the lanes, and the means of several cells are so many runs more.
//
// Cells of different tiles do not see the same blocks. All blocks that any of them sees are scored, and what a cell does not
// see is left out where rows are normalised, and never ranked.
#pragma once
#include "rank.h"

namespace {

// How runs lie in the vectors of a panel: vector r holds run `r % runs` of the pass, of the cells of vector r / runs.
struct Layout {
  int runs, cell_vectors;
  int64_t passes;  // panels until all runs have been seen
  explicit Layout(const RankArgs& a) {
    runs = 1;
    while (runs < SCORE_VECTORS && runs < a.runs) runs *= 2;
    cell_vectors = SCORE_VECTORS / runs;
    passes = (a.runs + runs - 1) / runs;
  }
  int cells() const { return cell_vectors * LANES; }
};

// Cells that are scored together, of those that a head alone decides.
int64_t scored_together(const RankArgs& a) { return by_slabs(a) ? least(MOST_CELLS, most(1, RUNS_AT_ONCE / a.runs)) : Layout(a).cells(); }
int64_t cells_at_once(const RankArgs& a) { return most(1, scored_together(a) / a.heads); }

// The running maximum of exponents and the sum of their powers of two: the maximum is raised where it must be.
struct Sums {
  V top[SCORE_VECTORS], total[SCORE_VECTORS];
  template <int DEGREE, int J>
  inline void take(const V (&x)[J][SCORE_VECTORS]) {
#pragma GCC unroll 8
    for (int r = 0; r < SCORE_VECTORS; ++r) {
      V above = top[r];
      for (int i = 0; i < J; ++i) above = max(x[i][r], above);
      V all = total[r];  // exp2(0) is not quite one: a lane that did not rise stays as it is, whatever the cells beside it do
      if (any_above(above, top[r])) all = pick(positive(sub(above, top[r])), mul(all, exp2<DEGREE>(sub(top[r], above))), all);
      for (int i = 0; i < J; ++i) all = add(all, exp2<DEGREE>(sub(x[i][r], above)));
      top[r] = above, total[r] = all;
    }
  }
};

// Blocks whose summaries stay in cache while every panel meets them.
constexpr int64_t BLOCKS_IN_CACHE = 24 * BLOCKS_AT_ONCE;

struct CellScratch {
  RankScratch one;
  float *panels, *row, *far, *found, *turned;
  int32_t* outlying;  // [cell][which]: rows
  float* centres;     // [cell][coordinate]: means of all rows, where outlying ones are looked for
  char* sides;
  Sums* sums;  // of every pass
  int64_t n_padded, panel_size, sides_size;
  CellScratch(Arena& arena, const RankArgs& a) : one(arena, a) {
    bool panelled = !by_slabs(a);
    int64_t cells = scored_together(a), passes = panelled ? Layout(a).passes : 0;
    n_padded = panelled ? round_up(a.tiles.n_blocks, LANES) : one.slab.n_padded;
    panel_size = padded_dim(a) * SCORE_GROUP;
    sides_size = padded_dim(a) * SCORE_VECTORS * (int64_t)most(sizeof(Side), 4);
    panels = arena.take<float>(passes * panel_size);
    sides = arena.take<char>(passes * sides_size);
    row = arena.take<float>(2 * padded_dim(a));
    far = arena.take<float>(a.runs * a.pool);  // at least the rows of a tile
    outlying = arena.take<int32_t>(cells * a.outlying);
    centres = arena.take<float>(a.outlying ? cells * padded_dim(a) : 0);
    found = arena.take<float>(panelled ? (n_padded + BLOCKS_AT_ONCE) * cells : 0);  // [block][cell]
    turned = arena.take<float>(cells * n_padded);                    // [cell][block]
    sums = arena.take<Sums>(passes);
    if (panelled && a.aggregate == AGG_SOFTMAX) one.logs = arena.take<float>(passes * logs_size(a));  // [pass][block][lane]
  }
  RankScratch pass(int64_t p) const {  // with that pass's panel
    RankScratch found = one;
    found.q = panels + p * panel_size;
    found.sides = sides + p * sides_size;
    return found;
  }
};

int64_t cells_scratch(const RankArgs& a) {
  Arena arena{nullptr};
  CellScratch scratch(arena, a);
  return arena.used;
}

inline int64_t means_of(const RankArgs& a, const Cell& cell) { return (cell.rows + a.pool - 1) / a.pool; }
inline int64_t runs_of(const RankArgs& a, const Cell& cell) { return means_of(a, cell) + least(a.outlying, cell.rows); }

inline void read_cell_row(const RankArgs& a, const Cell& cell, int64_t r, float* row) {
  read_row(cell.q + r * a.q.sn * item_size(a.shape.dtype), a.shape.dtype, a.shape.D, a.q.sd, padded_dim(a), row);
}

void mean_of_rows(const RankArgs& a, const Cell& cell, int64_t first, int64_t last, float* row, float* mean) {
  int64_t d = padded_dim(a);
  for (int64_t i = 0; i < d; ++i) mean[i] = 0.0f;
  for (int64_t r = first; r < last; ++r) {
    read_cell_row(a, cell, r, row);
    for (int64_t i = 0; i < d; i += LANES) store(mean + i, add(load(mean + i), load(row + i)));
  }
  for (int64_t i = 0; i < d; ++i) mean[i] /= (float)(last - first);
}

// The rows of cell `c` most distant from the mean of all, one after the other, of equally distant ones the earlier; and that mean.
void find_outlying(const RankArgs& a, const Cell& cell, int64_t c, const CellScratch& scratch) {
  constexpr float EQUALLY_DISTANT = 1.0f / 4096;  // as in scorers/base.py, which says why
  int64_t d = padded_dim(a);
  float *row = scratch.row, *mean = scratch.centres + c * d, *far = scratch.far;
  int32_t* rows = scratch.outlying + c * a.outlying;
  mean_of_rows(a, cell, 0, cell.rows, row, mean);
  for (int64_t r = 0; r < cell.rows; ++r) {
    read_cell_row(a, cell, r, row);
    V total = set1(0.0f);
    for (int64_t i = 0; i < d; i += LANES) {
      V x = sub(load(row + i), load(mean + i));
      total = fma(x, x, total);
    }
    far[r] = sum(total);
    if (far[r] != far[r]) far[r] = 0.0f;
  }
  for (int64_t m = 0; m < least(a.outlying, cell.rows); ++m) {
    float furthest = 0.0f;
    for (int64_t r = 0; r < cell.rows; ++r) furthest = far[r] > furthest ? far[r] : furthest;
    int64_t found = 0;
    while (far[found] < furthest * (1 - EQUALLY_DISTANT)) ++found;
    rows[m] = (int32_t)found, far[found] = -1.0f;
  }
}

// What cell `c` is scored by: means of runs of its rows, each rounded to their type as if it were a row, then its outlying
// rows; in float32, or in raw bfloat16 for PAIRS.
template <bool PAIRS>
void pool_rows(const RankArgs& a, const Cell& cell, int64_t c, int64_t run, const CellScratch& scratch, float* to, int64_t cols) {
  int64_t d = padded_dim(a), means = means_of(a, cell), first = run * a.pool;
  float *row = scratch.row, *mean = row + d;
  if (run >= means) read_cell_row(a, cell, scratch.outlying[c * a.outlying + run - means], mean);
  else if (means == 1 && a.outlying) mean = scratch.centres + c * d;
  else mean_of_rows(a, cell, first, least(first + a.pool, cell.rows), row, mean);
  if (PAIRS) {
    write_row((char*)to, BF16, d, mean);
    memset((char*)to + d * 2, 0, cols * 4 - d * 2);
    return;
  }
  round_row(a.shape.dtype, d, mean, to);
}

// Packs the runs of one pass. A cell with fewer runs repeats its first one, which no maximum notices; for a
// mean they are zero, and so are cells that are not there.
template <bool PAIRS>
void pack_cells(const RankArgs& a, const Cell* cells, int64_t n, int64_t pass, const Layout& layout, const CellScratch& scratch) {
  int64_t cols = panel_cols<PAIRS>(a), first = pass * layout.runs;
  for (int64_t i = 0; i < SCORE_GROUP; ++i) {
    int64_t vector = i / LANES, c = vector / layout.runs * LANES + i % LANES, run = first + vector % layout.runs;
    float* to = scratch.one.rows + i * cols;
    bool there = c < n && run < runs_of(a, cells[c]);
    if (there || (c < n && a.aggregate != AGG_MEAN)) pool_rows<PAIRS>(a, cells[c], c, there ? run : 0, scratch, to, cols);
    else memset(to, 0, cols * 4);
  }
  RankScratch panel = scratch.pass(pass);
  pack_panel(panel.rows, SCORE_GROUP, panel.rows, cols, SCORE_GROUP, panel.q);
  pack_sides<PAIRS>(a, cols, panel);
}

// One number of every cell, by its lane.
template <class Of>
void by_cell(const Layout& layout, int64_t n, float absent, V (&to)[SCORE_VECTORS], Of&& of) {
  float lanes[SCORE_GROUP];
  for (int64_t i = 0; i < SCORE_GROUP; ++i) {
    int64_t vector = i / LANES, c = vector / layout.runs * LANES + i % LANES;
    lanes[i] = c < n ? of(c, vector % layout.runs) : absent;
  }
  for (int r = 0; r < SCORE_VECTORS; ++r) to[r] = load(lanes + r * LANES);
}

// From the vectors of a panel to the best (or the sum) of each cell's, with what earlier passes found.
template <bool SUM>
inline void keep(const Layout& layout, const V* from, float* found) {
  for (int c = 0; c < layout.cell_vectors; ++c) {
    V all = load(found + c * LANES);
    for (int r = 0; r < layout.runs; ++r) {
      V x = from[c * layout.runs + r];
      all = SUM ? add(all, x) : max(x, all);  // max(x, y) is y where x is NaN: a NaN has no say
    }
    store(found + c * LANES, all);
  }
}

// Which blocks the cells score: [low, high) of all of them.
struct Range { int64_t low, high; };

// The best of a block's parts, of J blocks. A NaN has no say where there are several.
template <class First, class Stored, int J>
inline void best_part(const RankArgs& a, const RankScratch& panel, const char* summary, int64_t stride, V (&best)[J][SCORE_VECTORS]) {
  row_scores(First{}, a, panel, summary, stride, best);
  for (int64_t part = 1; part < parts(a); ++part) {
    V acc[J][SCORE_VECTORS];
    row_scores(Stored{}, a, panel, summary + plane_of(a, part), stride, acc);
#pragma GCC unroll 16
    for (int i = 0; i < J; ++i)
#pragma GCC unroll 8
      for (int r = 0; r < SCORE_VECTORS; ++r) best[i][r] = max(acc[i][r], max(best[i][r], set1(-INF)));
  }
}

// All blocks of a range meet all panels, a few blocks at a time: each(how many blocks at once, pass, its panel, block).
template <class Each>
inline void each_panel(const Layout& layout, int64_t low, int64_t high, const CellScratch& scratch, Each&& each) {
  for (int64_t from = low; from < high; from += BLOCKS_IN_CACHE) {
    int64_t to = least(from + BLOCKS_IN_CACHE, high);
    for (int64_t p = 0; p < layout.passes; ++p) {
      RankScratch panel = scratch.pass(p);
      int64_t j = from;
      for (; j + BLOCKS_AT_ONCE <= to; j += BLOCKS_AT_ONCE) each(Count<BLOCKS_AT_ONCE>{}, p, panel, j);
      for (; j < to; ++j) each(Count<1>{}, p, panel, j);
    }
  }
}

template <class First, class Stored>
void score_cells(const RankArgs& a, const Layout& layout, const Range& range, const char* summaries, const CellScratch& scratch) {
  int64_t stride = summary_bytes(a), cells = layout.cells();
  each_panel(layout, range.low, range.high, scratch, [&](auto count, int64_t, const RankScratch& panel, int64_t j) {
    constexpr int J = decltype(count)::VALUE;
    V acc[J][SCORE_VECTORS];
    best_part<First, Stored, J>(a, panel, summaries + j * stride, stride, acc);
    for (int i = 0; i < J; ++i) {
      float* found = scratch.found + (j - range.low + i) * cells;
      if (a.aggregate == AGG_MEAN) keep<true>(layout, acc[i], found);
      else keep<false>(layout, acc[i], found);
    }
  });
}

// As softmax_tile: every mean's log-softmax over the blocks that its tile sees, then the maximum over means. Sums are taken in
// whole groups of blocks, from block 0 on, what a cell does not see as nothing: so they are the same whichever cells are beside it.
template <class First, class Stored>
void softmax_cells(const RankArgs& a, const Cell* cells, int64_t n, const Layout& layout, const Range& range, const char* summaries,
                   const CellScratch& scratch) {
  constexpr int DEGREE = First::PAIRS ? 4 : 5;
  int64_t stride = summary_bytes(a), n_cells = layout.cells(), least_seen = range.high, pass_size = range.high * SCORE_GROUP;
  for (int64_t c = 0; c < n; ++c) least_seen = least(least_seen, cells[c].seen);
  V scale = set1((float)a.scale * LOG2E), seen[SCORE_VECTORS];
  by_cell(layout, n, 0.0f, seen, [&](int64_t c, int64_t) { return (float)cells[c].seen; });
  for (int64_t p = 0; p < layout.passes; ++p)
    for (int r = 0; r < SCORE_VECTORS; ++r) scratch.sums[p].top[r] = set1(-LARGEST), scratch.sums[p].total[r] = set1(0.0f);
  each_panel(layout, 0, range.high, scratch, [&](auto count, int64_t p, const RankScratch& panel, int64_t j) {
    constexpr int J = decltype(count)::VALUE;
    V acc[J][SCORE_VECTORS];
    best_part<First, Stored, J>(a, panel, summaries + j * stride, stride, acc);
    float* to = panel.logs + p * pass_size + j * SCORE_GROUP;
#pragma GCC unroll 16
    for (int i = 0; i < J; ++i)
#pragma GCC unroll 8
      for (int r = 0; r < SCORE_VECTORS; ++r) {
        V x = known(mul(acc[i][r], scale));
        if (j + i >= least_seen) x = pick(positive(sub(seen[r], set1((float)(j + i)))), x, set1(-INF));
        store(to + i * SCORE_GROUP + r * LANES, x);
        acc[i][r] = x;
      }
    if constexpr (J == BLOCKS_AT_ONCE) scratch.sums[p].template take<DEGREE>(acc);
  });
  int64_t whole = range.high / BLOCKS_AT_ONCE * BLOCKS_AT_ONCE;
  for (int64_t p = 0; p < layout.passes; ++p) {
    const float* logs = scratch.one.logs + p * pass_size;
    if (whole < range.high) {
      V rest[BLOCKS_AT_ONCE][SCORE_VECTORS];
      for (int64_t i = 0; i < BLOCKS_AT_ONCE; ++i)
        for (int r = 0; r < SCORE_VECTORS; ++r)
          rest[i][r] = whole + i < range.high ? load(logs + (whole + i) * SCORE_GROUP + r * LANES) : set1(-INF);
      scratch.sums[p].template take<DEGREE>(rest);
    }
    float totals[SCORE_GROUP], tops[SCORE_GROUP];
    for (int r = 0; r < SCORE_VECTORS; ++r)
      store(totals + r * LANES, scratch.sums[p].total[r]), store(tops + r * LANES, scratch.sums[p].top[r]);
    for (int64_t i = 0; i < SCORE_GROUP; ++i) totals[i] = totals[i] > 0.0f ? tops[i] + __builtin_log2f(totals[i]) : INF;
    V all[SCORE_VECTORS];
    for (int r = 0; r < SCORE_VECTORS; ++r) all[r] = load(totals + r * LANES);
    for (int64_t j = range.low; j < range.high; ++j) {
      V x[SCORE_VECTORS];
      for (int r = 0; r < SCORE_VECTORS; ++r) x[r] = sub(load(logs + j * SCORE_GROUP + r * LANES), all[r]);
      keep<false>(layout, x, scratch.found + (j - range.low) * n_cells);
    }
  }
}

// As mass_tile: shares of the softmax mass, forced blocks' included, of which a mean has the geometric mean of its rows'.
template <class First, class Stored>
void mass_cells(const RankArgs& a, const Cell* cells, int64_t n, int64_t pass, const Layout& layout, const Range& range,
                const char* summaries, const CellScratch& scratch) {
  constexpr int DEGREE = First::PAIRS ? 4 : 5;
  int64_t first = pass * layout.runs;
  RankScratch panel = scratch.pass(pass);
  int64_t stride = summary_bytes(a), n_cells = layout.cells(), per = parts(a), n_blocks = range.high - range.low;
  V scale = set1((float)a.scale * LOG2E), others = set1(__builtin_log2f((float)(a.tiles.block - (per - 1))));
  V low[SCORE_VECTORS], high[SCORE_VECTORS], own[SCORE_VECTORS], there[SCORE_VECTORS], top[SCORE_VECTORS], total[SCORE_VECTORS];
  by_cell(layout, n, 0.0f, low, [&](int64_t c, int64_t) { return (float)(cells[c].low - range.low) - 0.5f; });
  by_cell(layout, n, 0.0f, high, [&](int64_t c, int64_t) { return (float)(cells[c].high - range.low) - 0.5f; });
  by_cell(layout, n, 0.0f, there, [&](int64_t c, int64_t run) { return first + run < runs_of(a, cells[c]) ? 1.0f : 0.0f; });
  by_cell(layout, n, 0.0f, own, [&](int64_t c, int64_t run) {
    int64_t at = first + run < runs_of(a, cells[c]) ? first + run : 0, means = means_of(a, cells[c]);
    if (at >= means) return cells[c].forced[scratch.outlying[c * a.outlying + at - means]] * LOG2E;
    int64_t from = at * a.pool, to = least(from + a.pool, cells[c].rows);
    float mean = 0.0f;
    for (int64_t i = from; i < to; ++i) mean += cells[c].forced[i];
    return mean / (float)(to - from) * LOG2E;
  });
  for (int r = 0; r < SCORE_VECTORS; ++r) top[r] = own[r];
  float* logs = panel.logs;
  each_part<First, Stored>(a, summaries + range.low * stride, n_blocks, panel, [&](auto score, auto count, int64_t part, int64_t j, const char* plane) {
    constexpr int J = decltype(count)::VALUE;
    V acc[J][SCORE_VECTORS], keys = part ? set1(0.0f) : others;
    row_scores(score, a, panel, plane, stride, acc);
    for (int i = 0; i < J; ++i)
      for (int r = 0; r < SCORE_VECTORS; ++r) {
        V x = known(fma(acc[i][r], scale, keys)), at = set1((float)(j + i));
        x = pick(positive(sub(at, low[r])), pick(positive(sub(high[r], at)), x, set1(-INF)), set1(-INF));
        store(logs + ((j + i) * per + part) * SCORE_GROUP + r * LANES, x);
        top[r] = max(x, top[r]);
      }
  });
  for (int r = 0; r < SCORE_VECTORS; ++r) total[r] = exp2<DEGREE>(sub(own[r], top[r]));
  for (int64_t j = 0; j < n_blocks; ++j) {
    const float* from = logs + j * per * SCORE_GROUP;
    for (int r = 0; r < SCORE_VECTORS; ++r) {
      V share = set1(0.0f);
      for (int64_t p = 0; p < per; ++p) share = add(share, exp2<DEGREE>(sub(load(from + p * SCORE_GROUP + r * LANES), top[r])));
      share = max(share, set1(0.0f));  // a NaN is no mass
      total[r] = add(total[r], share);
      store(logs + j * SCORE_GROUP + r * LANES, share);  // never ahead of what is still to be read
    }
  }
  for (int r = 0; r < SCORE_VECTORS; ++r)  // runs that are not there have no say, nor have those whose sum is no number
    total[r] = pick(positive(total[r]), divide(there[r], total[r]), set1(0.0f));
  for (int64_t j = 0; j < n_blocks; ++j) {
    V share[SCORE_VECTORS];
    for (int r = 0; r < SCORE_VECTORS; ++r) share[r] = max(mul(load(logs + j * SCORE_GROUP + r * LANES), total[r]), set1(0.0f));
    if (a.aggregate == AGG_MASS) keep<true>(layout, share, scratch.found + j * n_cells);
    else keep<false>(layout, share, scratch.found + j * n_cells);
  }
}

// [block][cell] to [cell][block].
void turn(const Layout& layout, int64_t n_blocks, const CellScratch& scratch) {
  int64_t cells = layout.cells();
  for (int64_t j = 0; j < n_blocks; j += LANES)
    for (int64_t c = 0; c < cells; c += LANES) {
      V x[LANES];
      for (int i = 0; i < LANES; ++i) x[i] = load(scratch.found + least(j + i, n_blocks - 1) * cells + c);
      transpose(x);
      for (int i = 0; i < LANES; ++i) store(scratch.turned + (c + i) * scratch.n_padded + j, x[i]);
    }
}

template <class First, class Stored>
void judge_cells(const RankArgs& a, const Cell* cells, int64_t n, const Layout& layout, const Range& range, const char* summaries,
                 const CellScratch& scratch) {
  bool softmax = a.aggregate == AGG_SOFTMAX;
  float least_score = a.aggregate == AGG_MAX || softmax ? -INF : 0.0f;
  for (int64_t i = 0; i < (range.high - range.low) * layout.cells(); ++i) scratch.found[i] = least_score;
  for (int64_t c = 0; a.outlying && c < n; ++c) find_outlying(a, cells[c], c, scratch);
  for (int64_t p = 0; p < layout.passes; ++p) pack_cells<First::PAIRS>(a, cells, n, p, layout, scratch);
  if (softmax) return softmax_cells<First, Stored>(a, cells, n, layout, range, summaries, scratch);
  if (!is_mass(a)) return score_cells<First, Stored>(a, layout, range, summaries, scratch);
  for (int64_t p = 0; p < layout.passes; ++p) mass_cells<First, Stored>(a, cells, n, p, layout, range, summaries, scratch);
}

// The same by slabs, which find scores as [cell][block].
void slabs_cells(const RankArgs& a, const Cell* cells, int64_t n, const Range& range, const char* summaries, const CellScratch& scratch) {
  int64_t d = padded_dim(a), count = 0;
  Run runs[RUNS_AT_ONCE];
  auto score = [&] { score_runs(a, runs, count, summaries, nullptr, range.high, scratch.one.slab); count = 0; };
  for (int64_t c = 0; c < n; ++c) {
    float* best = scratch.turned + c * scratch.n_padded;
    for (int64_t j = 0; j < scratch.n_padded; ++j) best[j] = -INF;
    if (a.outlying) find_outlying(a, cells[c], c, scratch);
    for (int64_t run = 0; run < runs_of(a, cells[c]); ++run) {
      pool_rows<false>(a, cells[c], c, run, scratch, scratch.one.rows, d);
      write_coordinates(scratch.one.rows, d, scratch.one.slab.coordinates + count * d);
      runs[count++] = {best, a.aggregate == AGG_SOFTMAX ? cells[c].seen : cells[c].high};
      if (count == RUNS_AT_ONCE) score();
    }
  }
  if (count) score();
}

// Scores `n` cells, no more than scored_together, to scratch.turned; `range` is that of all of them.
void score_together(const RankArgs& a, const Cell* cells, int64_t n, const Layout& layout, const Range& range, const char* summaries,
                    const CellScratch& scratch) {
  if (by_slabs(a)) return slabs_cells(a, cells, n, range, summaries, scratch);
  auto judged = [&](auto first, auto stored) {
    judge_cells<decltype(first), decltype(stored)>(a, cells, n, layout, range, summaries, scratch);
  };
#ifdef CC_BF16_DOT
  if (paired(a)) {
    if (boxed(a)) judged(ScoreQuestPairs{}, ScoreMeanPairs{});
    else judged(ScoreMeanPairs{}, ScoreMeanPairs{});
  } else
#endif
  if (boxed(a)) judged(ScoreQuest{}, ScoreMean{});
  else judged(ScoreMean{}, ScoreMean{});
  turn(layout, range.high - range.low, scratch);
}

// Ranks a cell by scores that are not scaled yet.
void rank_cell(const RankArgs& a, const Cell& cell, float* found, const CellScratch& scratch) {
  int64_t n_blocks = cell.high - cell.low;
  float factor = a.aggregate == AGG_SOFTMAX ? LN2 : is_mass(a) ? 1.0f : (float)a.scale;
  float runs = a.aggregate == AGG_MEAN || a.aggregate == AGG_MASS ? (float)runs_of(a, cell) : 1.0f;
  for (int64_t j = 0; j < n_blocks; ++j) {
    float x = found[j] * factor / runs;
    found[j] = x == x ? x : -INF;
  }
  take_best(scratch.one, found, n_blocks, least(n_blocks, cell.want), cell.low, cell.ascending, cell.order, cell.scores);
}

// Ranks `n` cells, at most cells_at_once of them, that read the summaries of one sequence and key head. Heads that are ranked
// together are scored side by side, as cells of their own; if they are too many, one lot after the other.
void rank_cells(const RankArgs& a, const Cell* cells, int64_t n, const char* summaries, char* memory) {
  Arena arena{memory};
  CellScratch scratch(arena, a);
  Layout layout(a);
  int64_t size = item_size(a.shape.dtype), lot = least(a.heads, scored_together(a));
  Range range{cells[0].low, cells[0].high};
  for (int64_t c = 0; c < n; ++c) {
    range.low = least(range.low, cells[c].low);
    range.high = most(range.high, a.aggregate == AGG_SOFTMAX ? cells[c].seen : cells[c].high);
    for (int64_t i = 0; i < a.width; ++i) cells[c].order[i] = (int32_t)a.tiles.n_blocks, cells[c].scores[i] = -INF;
  }
  if (range.high <= range.low) return;
  if (by_slabs(a)) range.low = 0;
  for (int64_t h = 0; h < a.heads; h += lot) {
    int64_t here = least(lot, a.heads - h);
    Cell scored[MOST_CELLS];
    for (int64_t i = 0; i < n * here; ++i) {
      Cell& one = scored[i] = cells[i / here];
      int64_t head = h + i % here;
      one.q += head * a.q.sh * size;
      if (one.forced) one.forced += head * a.M;
    }
    score_together(a, scored, n * here, layout, range, summaries, scratch);
    for (int64_t c = 0; c < n; ++c) {
      int64_t n_blocks = cells[c].high - cells[c].low;
      if (n_blocks <= 0) continue;
      float* found = scratch.turned + c * here * scratch.n_padded + (cells[c].low - range.low);
      if (a.heads == 1) {
        rank_cell(a, cells[c], found, scratch);
        continue;
      }
      float* best = scratch.one.best;
      for (int64_t j = 0; h == 0 && j < n_blocks; ++j) best[j] = -INF;
      for (int64_t i = 0; i < here; ++i) take_larger(found + i * scratch.n_padded, n_blocks, best);
      if (h + here == a.heads) rank_cell(a, cells[c], best, scratch);
    }
  }
}

}  // namespace
