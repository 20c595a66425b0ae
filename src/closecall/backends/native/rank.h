// Block summaries, tile scores and the ranking of one tile, fused: the scores of a tile live in scratch and nowhere else.
//
// Quest's score of a row and a block is sum_d q_d * (q_d > 0 ? kmax_d : kmin_d). The side taken depends on the row and the
// coordinate only, so it is packed with the queries as lane masks; choosing the side then costs a blend beside each
// multiply-add instead of a second multiply-add (the [max(q,0), min(q,0)] . [kmax; kmin] form of depth 2D).
#pragma once
#include "dot.h"

namespace {

constexpr int SCORE_GROUP = SCORE_VECTORS * LANES;
constexpr int MOST_DIM = 1024, MOST_BLOCK = 1024;  // of OUTLIERS; Python asks for no more

// Whether summaries are kept as bfloat16: Quest's bounds are coordinates of keys, outlying keys are keys, and the mean of
// the others is defined to be rounded like one. MEAN and BOX are not rounded.
inline bool paired(const RankArgs& a) {
#ifdef CC_BF16_DOT
  return a.shape.dtype == BF16 && (a.scorer == QUEST || a.scorer == OUTLIERS);
#else
  (void)a;
  return false;
#endif
}
inline int64_t padded_dim(const RankArgs& a) { return round_up(a.shape.D, LANES); }

// Vectors of a summary. Those of OUTLIERS are scored one by one, as if each were a block.
inline int64_t planes(const RankArgs& a) { return a.scorer == MEAN ? 1 : a.scorer == OUTLIERS ? a.outliers + 1 : 2; }
inline int64_t scored_planes(const RankArgs& a) { return a.scorer == OUTLIERS ? planes(a) : 1; }
inline int64_t plane_bytes(const RankArgs& a) { return padded_dim(a) * (paired(a) ? 2 : 4); }

int64_t summary_bytes(const RankArgs& a) { return plane_bytes(a) * planes(a); }

// From a to b, exact at both ends: rounded as torch.lerp rounds it.
inline float between(float a, float b, float w) { return w < 0.5f ? a + w * (b - a) : b - (b - a) * (1.0f - w); }

// A block's mean key, or its largest and then its smallest coordinates, drawn towards the mean for BOX; a NaN among them
// makes its coordinate NaN.
// Rounds a plane as its type is rounded, and writes it.
void write_plane(const RankArgs& a, const float* from, char* plane) {
  int64_t d = padded_dim(a);
  if (paired(a)) {
    write_row(plane, BF16, d, from);
    return;
  }
  float* to = (float*)plane;
  memcpy(to, from, d * 4);
  if (a.shape.dtype == F32) return;
  char narrow[LANES * 4];
  for (int64_t i = 0; i < d; i += LANES) {
    write_row(narrow, a.shape.dtype, LANES, from + i);
    store(to + i, load_any(narrow, a.shape.dtype));
  }
}

// The mean of all keys but the `outliers` most distant from the mean of all, then those; of equally distant ones the
// earlier. A short block may have fewer keys than that: it is never ranked, and its planes are left zero.
void summarise_outliers(const RankArgs& a, const char* keys, int64_t n, char* summary) {
  int64_t dtype = a.shape.dtype, size = item_size(dtype), d = padded_dim(a), m = a.outliers;
  memset(summary, 0, summary_bytes(a));
  if (n <= m) return;
  float row[MOST_DIM], mean[MOST_DIM], far[MOST_BLOCK];
  auto read = [&](int64_t j) { read_row(keys + j * a.k.sn * size, dtype, a.shape.D, a.k.sd, d, row); };
  auto sum_all = [&](auto&& takes) {
    for (int64_t i = 0; i < d; ++i) mean[i] = 0.0f;
    int64_t count = 0;
    for (int64_t j = 0; j < n; ++j) {
      if (!takes(j)) continue;
      read(j);
      for (int64_t i = 0; i < d; i += LANES) store(mean + i, add(load(mean + i), load(row + i)));
      ++count;
    }
    for (int64_t i = 0; i < d; ++i) mean[i] /= (float)count;
  };
  if (m > 0) {
    sum_all([](int64_t) { return true; });
    for (int64_t j = 0; j < n; ++j) {
      read(j);
      V total = set1(0.0f);
      for (int64_t i = 0; i < d; i += LANES) {
        V apart = sub(load(row + i), load(mean + i));
        total = fma(apart, apart, total);
      }
      float distance = sum(total);
      far[j] = distance == distance ? distance : INF;  // a NaN is as far away as can be
    }
  }
  for (int64_t p = 1; p <= m; ++p) {
    int64_t best = 0;
    for (int64_t j = 1; j < n; ++j)
      if (far[j] > far[best]) best = j;
    far[best] = -1.0f;
    read(best);
    write_plane(a, row, summary + p * plane_bytes(a));
  }
  sum_all([&](int64_t j) { return m == 0 || far[j] >= 0.0f; });
  write_plane(a, mean, summary);
}

void summarise(const RankArgs& a, const char* keys, int64_t n, char* summary) {
  if (a.scorer == OUTLIERS) return summarise_outliers(a, keys, n, summary);
  int64_t dtype = a.shape.dtype, size = item_size(dtype), d = padded_dim(a);
  for (int64_t i = 0; i < d; i += LANES) {
    int64_t dims = least(LANES, a.shape.D - i);
    V total = set1(0.0f), high = set1(-INF), low = set1(INF), spoilt = set1(0.0f);
    for (int64_t j = 0; j < n; ++j) {
      const char* p = keys + (j * a.k.sn + i * a.k.sd) * size;
      V x;
      if (dims == LANES && a.k.sd == 1) {
        x = load_any(p, dtype);
      } else {
        float row[LANES];
        read_row(p, dtype, dims, a.k.sd, LANES, row);
        x = load(row);
      }
      if (a.scorer != QUEST) total = add(total, x);
      if (a.scorer != MEAN) {
        spoilt = nan_where_nan(x, x, spoilt);
        high = max(x, high);
        low = min(x, low);
      }
    }
    float mean[LANES];
    store(mean, total);
    for (int lane = 0; lane < LANES; ++lane) mean[lane] /= (float)n;  // rounded as the reference rounds it
    if (a.scorer == MEAN) {
      memcpy(summary + i * 4, mean, sizeof mean);
      continue;
    }
    high = add(high, spoilt);
    low = add(low, spoilt);
    if (a.scorer == BOX) {
      float lanes[LANES];
      V* sides[] = {&high, &low};
      for (V* side : sides) {
        store(lanes, *side);
        for (int lane = 0; lane < LANES; ++lane) lanes[lane] = between(mean[lane], lanes[lane], (float)a.shrink);
        *side = load(lanes);
      }
    }
    if (dims < LANES) {  // padding scores nothing
      float lanes[LANES];
      V* sides[] = {&high, &low};
      for (V* side : sides) {
        store(lanes, *side);
        for (int64_t x = dims; x < LANES; ++x) lanes[x] = 0.0f;
        *side = load(lanes);
      }
    }
    if (paired(a)) {
      store_bf16((uint16_t*)summary + i, high);
      store_bf16((uint16_t*)summary + d + i, low);
    } else {
      store((float*)summary + i, high);
      store((float*)summary + d + i, low);
    }
  }
}

inline bool is_mass(const RankArgs& a) { return a.aggregate == AGG_MASS || a.aggregate == AGG_MASS_MAX; }

struct RankScratch {
  float *rows, *q, *scores;
  float* logs;  // mass aggregates: [n_blocks][SCORE_GROUP], what a group of rows thinks of every block
  char* sides;
  uint32_t* ordered;
  uint64_t *keys, *sorted;
  RankScratch(Arena& arena, const RankArgs& a) {
    int64_t d = padded_dim(a);
    rows = arena.take<float>((CHUNK + 1) * d);
    q = arena.take<float>(CHUNK * d);
    sides = arena.take<char>(d * SCORE_VECTORS * (int64_t)most(sizeof(Side), 4));
    int64_t most_scored = a.tiles.n_blocks * scored_planes(a);
    scores = arena.take<float>(most_scored + BLOCKS_AT_ONCE);
    logs = arena.take<float>(is_mass(a) ? most_scored * SCORE_GROUP : 0);
    ordered = arena.take<uint32_t>(a.tiles.n_blocks + LANES);
    keys = arena.take<uint64_t>(a.width + 1);
    sorted = arena.take<uint64_t>(a.width + 1);
  }
};

int64_t rank_scratch(const RankArgs& a) {
  Arena arena{nullptr};
  RankScratch scratch(arena, a);
  return arena.used;
}

// The ways a panel of queries meets the summaries.
struct ScoreMean {
  static constexpr bool PAIRS = false;
  template <int J>
  static void run(const float* q, const char*, int64_t d, const char* summary, int64_t stride, V (&acc)[J][SCORE_VECTORS]) {
    panel<DotF32, J, SCORE_VECTORS>(q, d, summary, stride, 4, acc);
  }
};

struct ScoreQuest {
  static constexpr bool PAIRS = false;
  template <int J>
  static void run(const float* q, const char* sides, int64_t d, const char* summary, int64_t stride,
                  V (&acc)[J][SCORE_VECTORS]) {
    const char* low = summary + d * 4;
    for (int64_t i = 0; i < d; ++i, q += SCORE_GROUP, sides += SCORE_VECTORS * sizeof(Side)) {
      V x[SCORE_VECTORS];
      Side side[SCORE_VECTORS];
#pragma GCC unroll 8
      for (int r = 0; r < SCORE_VECTORS; ++r) {
        x[r] = load(q + r * LANES);
        memcpy(&side[r], sides + r * sizeof(Side), sizeof(Side));
      }
#pragma GCC unroll 16
      for (int j = 0; j < J; ++j) {
        V yes = DotF32::one(summary + j * stride + i * 4), no = DotF32::one(low + j * stride + i * 4);
#pragma GCC unroll 8
        for (int r = 0; r < SCORE_VECTORS; ++r) acc[j][r] = fma(x[r], pick(side[r], yes, no), acc[j][r]);
      }
    }
  }
};

#ifdef CC_BF16_DOT
struct ScoreMeanPairs {
  static constexpr bool PAIRS = true;
  template <int J>
  static void run(const float* q, const char*, int64_t d, const char* summary, int64_t stride, V (&acc)[J][SCORE_VECTORS]) {
    panel<DotBF16, J, SCORE_VECTORS>(q, d / 2, summary, stride, 4, acc);
  }
};

struct ScoreQuestPairs {
  static constexpr bool PAIRS = true;
  template <int J>
  static void run(const float* q, const char* sides, int64_t d, const char* summary, int64_t stride,
                  V (&acc)[J][SCORE_VECTORS]) {
    const char* low = summary + d * 2;
    for (int64_t i = 0; i < d; i += 2, q += SCORE_GROUP, sides += SCORE_VECTORS * 4) {
      __m512i x[SCORE_VECTORS];
      __mmask32 side[SCORE_VECTORS];
#pragma GCC unroll 8
      for (int r = 0; r < SCORE_VECTORS; ++r) {
        x[r] = DotBF16::lanes(q + r * LANES);
        memcpy(&side[r], sides + r * 4, 4);
      }
#pragma GCC unroll 16
      for (int j = 0; j < J; ++j) {
        __m512i yes = DotBF16::one(summary + j * stride + i * 2), no = DotBF16::one(low + j * stride + i * 2);
#pragma GCC unroll 8
        for (int r = 0; r < SCORE_VECTORS; ++r)
          acc[j][r] = DotBF16::mac(x[r], _mm512_mask_blend_epi16(side[r], no, yes), acc[j][r]);
      }
    }
  }
};
#endif

// Packs up to SCORE_GROUP rows and the side each coordinate takes. Lanes without a row repeat the first one, which no
// maximum notices; for a mean they are zero. (Shares of mass weigh every lane.)
template <bool PAIRS>
void pack_rows(const RankArgs& a, const char* q, int64_t n, const RankScratch& scratch) {
  int64_t cols = padded_dim(a);
  if constexpr (PAIRS) {
    cols = round_up(cols / 2, LANES);
    copy_rows_16(q, n, a.q.sn, a.shape.D, a.q.sd, 2 * cols, (uint16_t*)scratch.rows);
  } else {
    read_rows(q, a.shape.dtype, n, a.q.sn, a.shape.D, a.q.sd, cols, scratch.rows);
  }
  float* filler = scratch.rows;
  if (a.aggregate == AGG_MEAN) {
    filler = scratch.rows + CHUNK * cols;
    memset(filler, 0, cols * 4);
  }
  pack_panel(scratch.rows, n, filler, cols, SCORE_GROUP, scratch.q);
  if (a.scorer == MEAN || a.scorer == OUTLIERS) return;
  const float* x = scratch.q;
  char* sides = scratch.sides;
  for (int64_t i = 0; i < cols * SCORE_VECTORS; ++i, x += LANES) {
#ifdef CC_BF16_DOT
    if constexpr (PAIRS) {  // two coordinates a lane; above zero as integers is above zero as bfloat16, NaN apart
      __m512i pair = _mm512_loadu_si512(x), magnitude = _mm512_and_si512(pair, _mm512_set1_epi16(0x7fff));
      __mmask32 side = _mm512_cmpgt_epi16_mask(pair, _mm512_setzero_si512()) &
                       _mm512_cmple_epi16_mask(magnitude, _mm512_set1_epi16(0x7f80));
      memcpy(sides, &side, 4);
      sides += 4;
      continue;
    }
#endif
    Side side = positive(load(x));
    memcpy(sides, &side, sizeof side);
    sides += sizeof side;
  }
}

template <class Score, int J>
inline void row_scores(const RankArgs& a, const RankScratch& scratch, const char* summary, int64_t stride,
                       V (&acc)[J][SCORE_VECTORS]) {
#pragma GCC unroll 16
  for (int j = 0; j < J; ++j)
#pragma GCC unroll 8
    for (int r = 0; r < SCORE_VECTORS; ++r) acc[j][r] = set1(0.0f);
  Score::template run<J>(scratch.q, scratch.sides, padded_dim(a), summary, stride, acc);
}

template <class Score, int J>
inline void score_blocks(const RankArgs& a, const RankScratch& scratch, const char* summary, int64_t stride, float* out) {
  V acc[J][SCORE_VECTORS];
  row_scores<Score, J>(a, scratch, summary, stride, acc);
#pragma GCC unroll 16
  for (int j = 0; j < J; ++j) {
    if (a.aggregate == AGG_MEAN) {
      V total = acc[j][0];
      for (int r = 1; r < SCORE_VECTORS; ++r) total = add(total, acc[j][r]);
      out[j] += sum(total);
      continue;
    }
    V top = set1(-INF);  // max(x, top) is top where x is NaN: a NaN row has no say
#pragma GCC unroll 8
    for (int r = 0; r < SCORE_VECTORS; ++r) top = max(acc[j][r], top);
    float best = largest(top);
    out[j] = best > out[j] ? best : out[j];
  }
}

template <class Score>
void score_tile(const RankArgs& a, const char* q, int64_t rows, const char* summaries, int64_t n, const RankScratch& scratch) {
  int64_t size = item_size(a.shape.dtype), stride = summary_bytes(a) / scored_planes(a);
  n *= scored_planes(a);
  for (int64_t j = 0; j < n; ++j) scratch.scores[j] = a.aggregate == AGG_MAX ? -INF : 0.0f;
  for (int64_t first = 0; first < rows; first += SCORE_GROUP) {
    int64_t here = least(SCORE_GROUP, rows - first);
    pack_rows<Score::PAIRS>(a, q + first * a.q.sn * size, here, scratch);
    int64_t j = 0;
    for (; j + BLOCKS_AT_ONCE <= n; j += BLOCKS_AT_ONCE)
      score_blocks<Score, BLOCKS_AT_ONCE>(a, scratch, summaries + j * stride, stride, scratch.scores + j);
    for (; j < n; ++j) score_blocks<Score, 1>(a, scratch, summaries + j * stride, stride, scratch.scores + j);
  }
  // A positive scale does not change a maximum, rounding included, so it can wait until here.
  float scale = (float)a.scale;
  for (int64_t j = 0; j < n; ++j) {
    float x = scratch.scores[j] * scale;
    if (a.aggregate == AGG_MEAN) x /= (float)rows;
    scratch.scores[j] = x == x ? x : -INF;
  }
  // A maximum over rows and one over a block's planes can be taken in any order; a mean and one cannot.
  if (scored_planes(a) > 1)
    for (int64_t j = 0, p = scored_planes(a); j < n / p; ++j) {
      float best = scratch.scores[j * p];
      for (int64_t i = 1; i < p; ++i) best = scratch.scores[j * p + i] > best ? scratch.scores[j * p + i] : best;
      scratch.scores[j] = best;
    }
}

// Estimated log2 masses of J blocks (or planes) for a group of rows, to scratch; `top` keeps each row's largest.
// `keys`: log2 of how many keys the first of them stands for, and the others in turn.
template <class Score, int J>
inline void log_masses(const RankArgs& a, const RankScratch& scratch, const char* summary, int64_t stride,
                       const float* keys, float* logs, V (&top)[SCORE_VECTORS]) {
  V acc[J][SCORE_VECTORS];
  row_scores<Score, J>(a, scratch, summary, stride, acc);
  V scale = set1((float)a.scale * LOG2E);
#pragma GCC unroll 16
  for (int j = 0; j < J; ++j)
#pragma GCC unroll 8
    for (int r = 0; r < SCORE_VECTORS; ++r) {
      V x = fma(acc[j][r], scale, set1(keys[j]));
      store(logs + j * SCORE_GROUP + r * LANES, x);
      top[r] = max(x, top[r]);
    }
}

// Tile scores as shares of softmax mass: every row's estimated masses over what it has in all, its forced blocks' exact
// mass included, then the mean or the maximum over rows. A block that is not forced is never short: its score stands for
// all `block` keys, or the first plane of OUTLIERS for those that have no plane of their own. A row whose sum is not a
// number has no say.
template <class Score>
void mass_tile(const RankArgs& a, const char* q, int64_t rows, const float* forced, const char* summaries, int64_t n,
               const RankScratch& scratch) {
  int64_t size = item_size(a.shape.dtype), per = scored_planes(a), stride = summary_bytes(a) / per, all = n * per;
  float keys[BLOCKS_AT_ONCE];
  auto keys_from = [&](int64_t plane) {
    for (int64_t i = 0; i < BLOCKS_AT_ONCE; ++i)
      keys[i] = (plane + i) % per ? 0.0f : __builtin_log2f((float)(a.tiles.block - (per - 1)));
    return keys;
  };
  for (int64_t j = 0; j < n; ++j) scratch.scores[j] = 0.0f;
  for (int64_t first = 0; first < rows; first += SCORE_GROUP) {
    int64_t here = least(SCORE_GROUP, rows - first);
    pack_rows<Score::PAIRS>(a, q + first * a.q.sn * size, here, scratch);
    float lanes[SCORE_GROUP];
    V own[SCORE_VECTORS], top[SCORE_VECTORS], total[SCORE_VECTORS];
    for (int64_t i = 0; i < SCORE_GROUP; ++i) lanes[i] = forced[first + (i < here ? i : 0)] * LOG2E;
    for (int r = 0; r < SCORE_VECTORS; ++r) own[r] = top[r] = load(lanes + r * LANES);
    int64_t j = 0;
    for (; j + BLOCKS_AT_ONCE <= all; j += BLOCKS_AT_ONCE)
      log_masses<Score, BLOCKS_AT_ONCE>(a, scratch, summaries + j * stride, stride, keys_from(j), scratch.logs + j * SCORE_GROUP, top);
    for (; j < all; ++j)
      log_masses<Score, 1>(a, scratch, summaries + j * stride, stride, keys_from(j), scratch.logs + j * SCORE_GROUP, top);
    constexpr int DEGREE = Score::PAIRS ? 4 : 5;  // as attention takes it
    for (int r = 0; r < SCORE_VECTORS; ++r) total[r] = exp2<DEGREE>(sub(own[r], top[r]));
    for (j = 0; j < n; ++j) {
      const float* from = scratch.logs + j * per * SCORE_GROUP;
      V share[SCORE_VECTORS];
      for (int r = 0; r < SCORE_VECTORS; ++r) share[r] = exp2<DEGREE>(sub(load(from + r * LANES), top[r]));
      for (int64_t p = 1; p < per; ++p)
        for (int r = 0; r < SCORE_VECTORS; ++r)
          share[r] = add(share[r], exp2<DEGREE>(sub(load(from + p * SCORE_GROUP + r * LANES), top[r])));
      for (int r = 0; r < SCORE_VECTORS; ++r) {
        share[r] = max(share[r], set1(0.0f));  // a NaN is no mass: max(x, y) is y where x is NaN
        total[r] = add(total[r], share[r]);
        store(scratch.logs + j * SCORE_GROUP + r * LANES, share[r]);  // never ahead of what is still to be read
      }
    }
    for (int r = 0; r < SCORE_VECTORS; ++r) store(lanes + r * LANES, total[r]);
    for (int64_t i = 0; i < SCORE_GROUP; ++i) lanes[i] = i < here && lanes[i] > 0.0f ? 1.0f / lanes[i] : 0.0f;
    for (int r = 0; r < SCORE_VECTORS; ++r) total[r] = load(lanes + r * LANES);
    for (j = 0; j < n; ++j) {
      const float* at = scratch.logs + j * SCORE_GROUP;
      V sums = set1(0.0f), best = set1(0.0f);
      for (int r = 0; r < SCORE_VECTORS; ++r) {
        V share = max(mul(load(at + r * LANES), total[r]), set1(0.0f));  // a NaN is no share
        sums = add(sums, share);
        best = max(share, best);
      }
      if (a.aggregate == AGG_MASS) {
        scratch.scores[j] += sum(sums);
      } else {
        float most_of = largest(best);
        scratch.scores[j] = most_of > scratch.scores[j] ? most_of : scratch.scores[j];
      }
    }
  }
  if (a.aggregate == AGG_MASS)
    for (int64_t j = 0; j < n; ++j) scratch.scores[j] /= (float)rows;
}

// Floats to integers of the same order. The two zeros are one value.
inline uint32_t ordered_bits(float x) {
  x += 0.0f;
  uint32_t u;
  memcpy(&u, &x, 4);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// The `want` largest scores, largest first, ties to the lower block: the want-th largest value by bisection over its bits
// (each step is one counting pass that vectorises), then everything above it and the first of its ties, then a sort.
void take_best(const RankScratch& scratch, int64_t n, int64_t want, int64_t first_block, int32_t* order, float* scores) {
  uint32_t* ordered = scratch.ordered;
  for (int64_t j = 0; j < n; ++j) ordered[j] = ordered_bits(scratch.scores[j]);
  int64_t n_padded = round_up(n, LANES);
  for (int64_t j = n; j < n_padded; ++j) ordered[j] = 0;  // below every score: no number maps to 0
  uint32_t cut = 0;
  if (n > want)
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1) {
      uint32_t tried = cut | bit;
      uint32_t count = 0;
      for (int64_t j = 0; j < n_padded; ++j) count += ordered[j] >= tried;
      if (count >= want) cut = tried;
    }
  int64_t above = 0, found = 0;
  for (int64_t j = 0; j < n; ++j) above += ordered[j] > cut;
  int64_t ties = want - above;  // may exceed the ties there are when everything is taken
  for (int64_t j = 0; j < n; ++j) {
    bool tie = ordered[j] == cut && ties > 0;
    ties -= tie;
    scratch.keys[found] = (uint64_t)ordered[j] << 32 | (uint32_t)~(uint32_t)j;
    found += ordered[j] > cut || tie;
  }
  uint64_t* sorted = scratch.sorted;
  if (found <= 512) {  // distinct keys: each goes to the place that counting says
    for (int64_t i = 0; i < found; ++i) {
      int64_t place = 0;
      for (int64_t j = 0; j < found; ++j) place += scratch.keys[j] > scratch.keys[i];
      sorted[place] = scratch.keys[i];
    }
  } else {  // heap sort: smallest to the end
    uint64_t* heap = scratch.keys;
    auto sift = [&](int64_t at, int64_t size) {
      for (int64_t child; (child = 2 * at + 1) < size; at = child) {
        if (child + 1 < size && heap[child + 1] < heap[child]) ++child;
        if (heap[at] <= heap[child]) return;
        uint64_t t = heap[at]; heap[at] = heap[child]; heap[child] = t;
      }
    };
    for (int64_t i = found / 2; i-- > 0;) sift(i, found);
    for (int64_t size = found; size > 0;) {
      sorted[size - 1] = heap[0];
      heap[0] = heap[--size];
      sift(0, size);
    }
  }
  for (int64_t i = 0; i < found; ++i) {
    int64_t j = (uint32_t)~(uint32_t)sorted[i];
    order[i] = (int32_t)(first_block + j);
    scores[i] = scratch.scores[j];
  }
}

template <class Score>
void judge(const RankArgs& a, const char* q, int64_t rows, const float* forced, const char* summaries, int64_t n,
           const RankScratch& scratch) {
  if (is_mass(a)) mass_tile<Score>(a, q, rows, forced, summaries, n, scratch);
  else score_tile<Score>(a, q, rows, summaries, n, scratch);
}

void rank(const RankArgs& a, const char* q, int64_t rows, const float* forced, const char* summaries, int64_t low,
          int64_t high, int32_t* order, float* scores, char* memory) {
  Arena arena{memory};
  RankScratch scratch(arena, a);
  for (int64_t i = 0; i < a.width; ++i) { order[i] = (int32_t)a.tiles.n_blocks; scores[i] = -INF; }
  int64_t n = high - low;
  if (n <= 0) return;
  const char* from = summaries + low * summary_bytes(a);
  bool plain = a.scorer == MEAN || a.scorer == OUTLIERS;
#ifdef CC_BF16_DOT
  if (plain && paired(a)) judge<ScoreMeanPairs>(a, q, rows, forced, from, n, scratch);
  else if (paired(a)) judge<ScoreQuestPairs>(a, q, rows, forced, from, n, scratch);
  else
#endif
  if (plain) judge<ScoreMean>(a, q, rows, forced, from, n, scratch);
  else judge<ScoreQuest>(a, q, rows, forced, from, n, scratch);
  take_best(scratch, n, least(n, a.width), low, order, scores);
}

}  // namespace
