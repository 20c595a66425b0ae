// Block summaries, tile scores and the ranking of one tile, fused: the scores of a tile live in scratch and nowhere else.
//
// Quest's score of a row and a block is sum_d q_d * (q_d > 0 ? kmax_d : kmin_d). The side taken depends on the row and the
// coordinate only, so it is packed with the queries as lane masks; choosing the side then costs a blend beside each
// multiply-add instead of a second multiply-add (the [max(q,0), min(q,0)] . [kmax; kmin] form of depth 2D).
#pragma once
#include "slab.h"
#ifdef CC_AMX
#include "amx.h"
#endif

namespace {

constexpr int SCORE_GROUP = SCORE_VECTORS * LANES;

template <int N>
struct Count {  // a number that a lambda can be told at compile time
  static constexpr int VALUE = N;
};

inline bool is_mass(const RankArgs& a) { return a.aggregate == AGG_MASS || a.aggregate == AGG_MASS_MAX; }

// What a group of rows thinks of every block, or of every part: [n_blocks * parts][SCORE_GROUP].
inline int64_t logs_size(const RankArgs& a) {
  if (by_slabs(a)) return 0;
  if (a.aggregate == AGG_SOFTMAX) return a.tiles.n_blocks * SCORE_GROUP;
  return is_mass(a) ? a.tiles.n_blocks * parts(a) * SCORE_GROUP : 0;
}

// Whether AMX scores blocks: all of a summary is bfloat16, and fills its registers.
constexpr int64_t BLOCKS_A_PRODUCT = 32;
inline bool by_amx(const RankArgs& a) {
#ifdef CC_AMX
  return paired(a) && padded_dim(a) % AMX_DEPTH == 0;
#else
  (void)a;
  return false;
#endif
}

struct RankScratch {
  float *rows, *q, *scores;
  float* logs;
  char* sides;
  float* best;  // of all heads that are ranked together
  uint32_t *ordered, *few, *places;
  uint64_t *keys, *sorted;
  float *split, *products;  // for AMX: rows by the side of a box that they meet; what a few blocks came to
  SlabScratch slab;
  RankScratch(Arena& arena, const RankArgs& a) : slab(arena, a) {
    int64_t d = padded_dim(a);
    rows = arena.take<float>((CHUNK + 1) * d);
    q = arena.take<float>(CHUNK * d);
    sides = arena.take<char>(d * SCORE_VECTORS * (int64_t)most(sizeof(Side), 4));
    scores = arena.take<float>(most(slab.n_padded, a.tiles.n_blocks + BLOCKS_AT_ONCE));
    logs = arena.take<float>(logs_size(a));
    best = arena.take<float>(a.heads > 1 ? a.tiles.n_blocks : 0);
    ordered = arena.take<uint32_t>(a.tiles.n_blocks + LANES);
    few = arena.take<uint32_t>(a.tiles.n_blocks + 2 * LANES);
    places = arena.take<uint32_t>(a.tiles.n_blocks + 2 * LANES);
    keys = arena.take<uint64_t>(a.width + 1);
    sorted = arena.take<uint64_t>(a.width + 1);
    split = arena.take<float>(by_amx(a) ? d * SCORE_GROUP : 0);
    products = arena.take<float>(by_amx(a) ? BLOCKS_A_PRODUCT * SCORE_GROUP : 0);
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

#ifdef CC_AMX
// What AMX has multiplied already, BLOCKS_A_PRODUCT blocks at once. A box is two products there, of the rows' positive
// coordinates and of the others. So an infinite side may meet a zero that stands for the other side, and give a NaN: such
// a block is scored as `Careful` does it.
template <class Careful>
struct ScoreProducts {
  static constexpr bool PAIRS = true;
  const float* products;  // of the first block that is asked for
  template <int J>
  void run(const float* q, const char* sides, int64_t d, const char* summary, int64_t stride, V (&acc)[J][SCORE_VECTORS]) const {
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) {
      V (&one)[1][SCORE_VECTORS] = *(V(*)[1][SCORE_VECTORS])&acc[j];
      __mmask16 nan = 0;
#pragma GCC unroll 8
      for (int r = 0; r < SCORE_VECTORS; ++r) {
        one[0][r] = load(products + j * SCORE_GROUP + r * LANES);
        nan |= _mm512_cmp_ps_mask(one[0][r], one[0][r], _CMP_UNORD_Q);
      }
      if (__builtin_expect(!nan, 1)) continue;
      for (int r = 0; r < SCORE_VECTORS; ++r) one[0][r] = set1(0.0f);
      Careful{}.template run<1>(q, sides, d, summary + j * stride, stride, one);
    }
  }
};

// The packed rows twice: their positive coordinates, then the others.
inline void split_rows(const RankArgs& a, const RankScratch& scratch) {
  int64_t half = padded_dim(a) / 2 * SCORE_GROUP;
  for (int64_t i = 0; i < half; i += LANES) {
    __mmask32 side;
    memcpy(&side, scratch.sides + i / LANES * 4, 4);
    __m512i pairs = _mm512_loadu_si512(scratch.q + i);
    _mm512_storeu_si512(scratch.split + i, _mm512_maskz_mov_epi16(side, pairs));
    _mm512_storeu_si512(scratch.split + half + i, _mm512_maskz_mov_epi16(~side, pairs));
  }
}

// Planes of n blocks, no more than BLOCKS_A_PRODUCT, times the packed rows.
inline void multiply_blocks(const RankArgs& a, bool box, const char* plane, int64_t n, const RankScratch& scratch) {
  const float* right = box ? scratch.split : scratch.q;
  int64_t stride = summary_bytes(a), steps = padded_dim(a) / AMX_DEPTH * (box ? 2 : 1), done = 0;
  auto some = [&](auto registers, int64_t rows) {
    AmxTurn turn(rows);
    AmxLeft left{plane + done * stride, stride, AMX_ROWS * stride, 2 * AMX_DEPTH};
    for (int64_t r = 0; r < SCORE_GROUP; r += 2 * LANES)
      amx_product<decltype(registers)::VALUE, 2>(left, right + r, SCORE_GROUP, steps, true, scratch.products + done * SCORE_GROUP + r, nullptr);
    done += rows * decltype(registers)::VALUE;
  };
  if (n == 2 * AMX_ROWS) return some(Count<2>{}, AMX_ROWS);
  if (n >= AMX_ROWS) some(Count<1>{}, AMX_ROWS);
  if (n > done) some(Count<1>{}, n - done);
}

template <class Score>
constexpr bool IS_PRODUCTS = false;
template <class Careful>
constexpr bool IS_PRODUCTS<ScoreProducts<Careful>> = true;

// As each_part, of one part.
template <class Score, class Each>
inline void each_product(const RankArgs& a, int64_t part, const char* plane, int64_t n, const RankScratch& scratch, Each&& each) {
  bool box = part == 0 && boxed(a);
  int64_t stride = summary_bytes(a);
  if (box) split_rows(a, scratch);
  for (int64_t from = 0; from < n; from += BLOCKS_A_PRODUCT) {
    int64_t end = least(n, from + BLOCKS_A_PRODUCT), j = from;
    multiply_blocks(a, box, plane + from * stride, end - from, scratch);
    auto here = [&] { return Score{scratch.products + (j - from) * SCORE_GROUP}; };
    for (; j + 4 <= end; j += 4) each(here(), Count<4>{}, part, j, plane + j * stride);
    for (; j < end; ++j) each(here(), Count<1>{}, part, j, plane + j * stride);
  }
}
#endif

// Columns of 32 bits that a packed row has: numbers, or pairs of bfloat16.
template <bool PAIRS>
inline int64_t panel_cols(const RankArgs& a) { return PAIRS ? round_up(padded_dim(a) / 2, LANES) : padded_dim(a); }

template <bool PAIRS>
void pack_sides(const RankArgs& a, int64_t cols, const RankScratch& scratch);

// Packs up to SCORE_GROUP rows and the side each coordinate takes. Lanes without a row repeat the first one, which no
// maximum notices; for a mean they are zero. (Shares of mass weigh every lane.)
template <bool PAIRS>
void pack_rows(const RankArgs& a, const char* q, int64_t n, const RankScratch& scratch) {
  int64_t cols = panel_cols<PAIRS>(a);
  if constexpr (PAIRS) {
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
  pack_sides<PAIRS>(a, cols, scratch);
}

// The side of a box that each coordinate of the packed rows takes.
template <bool PAIRS>
void pack_sides(const RankArgs& a, int64_t cols, const RankScratch& scratch) {
  if (!boxed(a)) return;
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
inline void row_scores(Score score, const RankArgs& a, const RankScratch& scratch, const char* summary, int64_t stride,
                       V (&acc)[J][SCORE_VECTORS]) {
#pragma GCC unroll 16
  for (int j = 0; j < J; ++j)
#pragma GCC unroll 8
    for (int r = 0; r < SCORE_VECTORS; ++r) acc[j][r] = set1(0.0f);
  score.template run<J>(scratch.q, scratch.sides, padded_dim(a), summary, stride, acc);
}

template <class Score, int J>
inline void score_blocks(Score score, const RankArgs& a, const RankScratch& scratch, const char* summary, int64_t stride, float* out) {
  V acc[J][SCORE_VECTORS];
  row_scores(score, a, scratch, summary, stride, acc);
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

// Every part of the summaries of n blocks, as many blocks at a time as the registers hold: each(score, how many blocks at
// once, part, first block, its summary's plane). FIRST scores a mean or a box, STORED a key.
template <class First, class Stored, class Each>
inline void each_part(const RankArgs& a, const char* summaries, int64_t n, const RankScratch& scratch, Each&& each) {
  int64_t stride = summary_bytes(a);
  (void)scratch;
  auto over = [&](auto score, int64_t part) {
    const char* plane = summaries + plane_of(a, part);
#ifdef CC_AMX
    if constexpr (IS_PRODUCTS<decltype(score)>) return each_product<decltype(score)>(a, part, plane, n, scratch, each);
#endif
    int64_t j = 0;
    for (; j + BLOCKS_AT_ONCE <= n; j += BLOCKS_AT_ONCE)
      each(score, Count<BLOCKS_AT_ONCE>{}, part, j, plane + j * stride);
    for (; j < n; ++j) each(score, Count<1>{}, part, j, plane + j * stride);
  };
  over(First{}, 0);
  for (int64_t part = 1; part < parts(a); ++part) over(Stored{}, part);
}

template <class First, class Stored>
void score_tile(const RankArgs& a, const char* q, int64_t rows, const char* summaries, int64_t n, const RankScratch& scratch) {
  int64_t size = item_size(a.shape.dtype), stride = summary_bytes(a);
  for (int64_t j = 0; j < n; ++j) scratch.scores[j] = a.aggregate == AGG_MAX ? -INF : 0.0f;
  for (int64_t first = 0; first < rows; first += SCORE_GROUP) {
    int64_t here = least(SCORE_GROUP, rows - first);
    pack_rows<First::PAIRS>(a, q + first * a.q.sn * size, here, scratch);
    // A maximum over rows and one over a block's parts can be taken in any order; a mean and one cannot, and OUTLIERS
    // has no mean here.
    each_part<First, Stored>(a, summaries, n, scratch, [&](auto score, auto count, int64_t, int64_t j, const char* plane) {
      score_blocks<decltype(score), decltype(count)::VALUE>(score, a, scratch, plane, stride, scratch.scores + j);
    });
  }
  // A positive scale does not change a maximum, rounding included, so it can wait until here.
  float scale = (float)a.scale;
  for (int64_t j = 0; j < n; ++j) {
    float x = scratch.scores[j] * scale;
    if (a.aggregate == AGG_MEAN) x /= (float)rows;
    scratch.scores[j] = x == x ? x : -INF;
  }
}

// Tile scores as shares of softmax mass: every row's estimated masses over what it has in all, its forced blocks' exact
// mass included, then the mean or the maximum over rows. A block that is not forced is never short: its first part stands
// for all `block` keys but those that are stored. A row whose sum is not a number has no say.
template <class First, class Stored>
void mass_tile(const RankArgs& a, const char* q, int64_t rows, const float* forced, const char* summaries, int64_t n,
               const RankScratch& scratch) {
  int64_t size = item_size(a.shape.dtype), per = parts(a), stride = summary_bytes(a);
  V scale = set1((float)a.scale * LOG2E), others = set1(__builtin_log2f((float)(a.tiles.block - (per - 1))));
  for (int64_t j = 0; j < n; ++j) scratch.scores[j] = 0.0f;
  for (int64_t first = 0; first < rows; first += SCORE_GROUP) {
    int64_t here = least(SCORE_GROUP, rows - first);
    pack_rows<First::PAIRS>(a, q + first * a.q.sn * size, here, scratch);
    float lanes[SCORE_GROUP];
    V own[SCORE_VECTORS], top[SCORE_VECTORS], total[SCORE_VECTORS];
    for (int64_t i = 0; i < SCORE_GROUP; ++i) lanes[i] = forced[first + (i < here ? i : 0)] * LOG2E;
    for (int r = 0; r < SCORE_VECTORS; ++r) own[r] = top[r] = load(lanes + r * LANES);
    each_part<First, Stored>(a, summaries, n, scratch, [&](auto score, auto count, int64_t part, int64_t j, const char* plane) {
      constexpr int J = decltype(count)::VALUE;
      V acc[J][SCORE_VECTORS], keys = part ? set1(0.0f) : others;
      row_scores(score, a, scratch, plane, stride, acc);
#pragma GCC unroll 16
      for (int i = 0; i < J; ++i)
#pragma GCC unroll 8
        for (int r = 0; r < SCORE_VECTORS; ++r) {
          V x = known(fma(acc[i][r], scale, keys));
          store(scratch.logs + ((j + i) * per + part) * SCORE_GROUP + r * LANES, x);
          top[r] = max(x, top[r]);
        }
    });
    int64_t j = 0;
    constexpr int DEGREE = First::PAIRS ? 4 : 5;  // as attention takes it
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

// Tile scores as logs of shares: every row's log-softmax over all n blocks that the tile sees, then the maximum over rows.
// A row of NaN has no say.
template <class First, class Stored>
void softmax_tile(const RankArgs& a, const char* q, int64_t rows, const char* summaries, int64_t n, const RankScratch& scratch) {
  int64_t size = item_size(a.shape.dtype), stride = summary_bytes(a);
  V scale = set1((float)a.scale * LOG2E);
  for (int64_t j = 0; j < n; ++j) scratch.scores[j] = -INF;
  for (int64_t first = 0; first < rows; first += SCORE_GROUP) {
    int64_t here = least(SCORE_GROUP, rows - first);
    pack_rows<First::PAIRS>(a, q + first * a.q.sn * size, here, scratch);
    V top[SCORE_VECTORS], total[SCORE_VECTORS];
    for (int r = 0; r < SCORE_VECTORS; ++r) top[r] = set1(-LARGEST), total[r] = set1(0.0f);
    each_part<First, Stored>(a, summaries, n, scratch, [&](auto score, auto count, int64_t part, int64_t j, const char* plane) {
      constexpr int J = decltype(count)::VALUE;
      V acc[J][SCORE_VECTORS];
      row_scores(score, a, scratch, plane, stride, acc);
#pragma GCC unroll 16
      for (int i = 0; i < J; ++i)
#pragma GCC unroll 8
        for (int r = 0; r < SCORE_VECTORS; ++r) {
          float* at = scratch.logs + (j + i) * SCORE_GROUP + r * LANES;
          V x = known(mul(acc[i][r], scale));
          if (part) x = max(x, load(at));
          store(at, x);
          top[r] = max(x, top[r]);
        }
    });
    constexpr int DEGREE = First::PAIRS ? 4 : 5;  // as attention takes it
    for (int64_t j = 0; j < n; ++j)
#pragma GCC unroll 8
      for (int r = 0; r < SCORE_VECTORS; ++r)
        total[r] = add(total[r], exp2<DEGREE>(sub(load(scratch.logs + j * SCORE_GROUP + r * LANES), top[r])));
    float sums[SCORE_GROUP], tops[SCORE_GROUP];
    for (int r = 0; r < SCORE_VECTORS; ++r) store(sums + r * LANES, total[r]), store(tops + r * LANES, top[r]);
    for (int64_t i = 0; i < SCORE_GROUP; ++i) sums[i] = sums[i] > 0.0f ? tops[i] + __builtin_log2f(sums[i]) : INF;
    for (int r = 0; r < SCORE_VECTORS; ++r) total[r] = load(sums + r * LANES);
    for (int64_t j = 0; j < n; ++j) {
      V best = set1(-INF);
#pragma GCC unroll 8
      for (int r = 0; r < SCORE_VECTORS; ++r) best = max(sub(load(scratch.logs + j * SCORE_GROUP + r * LANES), total[r]), best);
      float most_of = largest(best);
      scratch.scores[j] = most_of > scratch.scores[j] ? most_of : scratch.scores[j];
    }
  }
  for (int64_t j = 0; j < n; ++j) scratch.scores[j] *= LN2;
}

// Floats to integers of the same order. The two zeros are one value.
inline uint32_t ordered_bits(float x) {
  x += 0.0f;
  uint32_t u;
  memcpy(&u, &x, 4);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// How many of n numbers, whole vectors of them, are at least `least_of`.
inline int64_t count_from(const uint32_t* numbers, int64_t n, uint32_t least_of) {
  uint32_t count = 0;
  for (int64_t j = 0; j < n; ++j) count += numbers[j] >= least_of;
  return count;
}

// The largest number that at least `want` of n numbers reach, or one that between `want` and `enough` of them reach, by
// bisection over its bits: each step is one counting pass that vectorises. The first `cut` must be reached by `want`.
inline uint32_t cut_at(const uint32_t* numbers, int64_t n, int64_t want, int64_t enough, uint32_t cut, uint32_t bit) {
  for (; bit; bit >>= 1) {
    uint32_t tried = cut | bit;
    int64_t count = count_from(numbers, n, tried);
    if (count >= want) cut = tried;
    if (count >= want && count <= enough) break;
  }
  return cut;
}

// The `want` largest scores, largest first or the lowest block first, ties to the lower block. A cut that not many more than
// `want` reach is found by a few passes over all of them; the exact cut, and the first of its ties, among those that reach it;
// then they are sorted.
void take_best(const RankScratch& scratch, const float* found_scores, int64_t n, int64_t want, int64_t first_block, bool ascending,
               int32_t* order, float* scores) {
  uint32_t *ordered = scratch.ordered, *few = scratch.few, *places = scratch.places;
  uint32_t lowest = ~0u, highest = 0;
  for (int64_t j = 0; j < n; ++j) {
    ordered[j] = ordered_bits(found_scores[j]);
    lowest = ordered[j] < lowest ? ordered[j] : lowest;
    highest = ordered[j] > highest ? ordered[j] : highest;
  }
  int64_t n_padded = round_up(n, LANES), left = 0;
  for (int64_t j = n; j < n_padded; ++j) ordered[j] = 0;  // below every score: no number maps to 0
  uint32_t rough = 0;
  if (n > want && lowest != highest) {  // the bits that all have in common need no pass
    uint32_t bit = 0x80000000u >> __builtin_clz(lowest ^ highest);
    rough = cut_at(ordered, n_padded, want, most(2 * want, LANES), highest & ~(2 * bit - 1), bit);
  }
  for (int64_t j = 0; j < n_padded; j += LANES) {
    bool any = false;
    for (int i = 0; i < LANES; ++i) any |= ordered[j + i] >= rough;
    if (!any) continue;
    for (int64_t i = j; i < least(j + LANES, n); ++i) {
      few[left] = ordered[i];
      places[left] = (uint32_t)i;
      left += ordered[i] >= rough;
    }
  }
  int64_t left_padded = round_up(left, LANES);
  for (int64_t j = left; j < left_padded; ++j) few[j] = 0;
  uint32_t cut = left > want ? cut_at(few, left_padded, want, want, 0, 0x80000000u) : 0;
  int64_t above = 0, found = 0;
  for (int64_t j = 0; j < left; ++j) above += few[j] > cut;
  int64_t ties = want - above;  // may exceed the ties there are when everything is taken
  for (int64_t j = 0; j < left; ++j) {
    bool tie = few[j] == cut && ties > 0, taken = few[j] > cut || tie;
    ties -= tie;
    if (taken) scratch.keys[found++] = (uint64_t)few[j] << 32 | (uint32_t)~places[j];
  }
  uint64_t* sorted = scratch.sorted;
  if (ascending) {  // as they were found
    sorted = scratch.keys;
  } else if (found <= 512) {  // distinct keys: each goes to the place that counting says
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
    scores[i] = found_scores[j];
  }
}

// As score_tile and softmax_tile, CHUNK rows at a time; of `n` blocks, or those that are named.
void slabs_tile(const RankArgs& a, const char* q, int64_t rows, const char* summaries, const int32_t* blocks, int64_t n,
                const RankScratch& scratch) {
  int64_t size = item_size(a.shape.dtype), d = padded_dim(a);
  for (int64_t j = 0; j < scratch.slab.n_padded; ++j) scratch.scores[j] = -INF;
  for (int64_t first = 0; first < rows; first += CHUNK) {
    int64_t here = least(CHUNK, rows - first);
    read_rows(q + first * a.q.sn * size, a.shape.dtype, here, a.q.sn, a.shape.D, a.q.sd, d, scratch.rows);
    Run runs[CHUNK];
    for (int64_t i = 0; i < here; ++i) {
      write_coordinates(scratch.rows + i * d, d, scratch.slab.coordinates + i * d);
      runs[i] = {scratch.scores, n};
    }
    score_runs(a, runs, here, summaries, blocks, n, scratch.slab);
  }
  float factor = a.aggregate == AGG_SOFTMAX ? LN2 : (float)a.scale;
  for (int64_t j = 0; j < n; ++j) {
    float x = scratch.scores[j] * factor;
    scratch.scores[j] = x == x ? x : -INF;
  }
}

// The scores of blocks [low, high), of which the tile sees `seen` in all.
template <class First, class Stored>
const float* judge(const RankArgs& a, const char* q, int64_t rows, const float* forced, const char* summaries, int64_t low,
                   int64_t high, int64_t seen, const RankScratch& scratch) {
  if (a.aggregate == AGG_SOFTMAX) {
    softmax_tile<First, Stored>(a, q, rows, summaries, seen, scratch);
    return scratch.scores + low;
  }
  const char* from = summaries + low * summary_bytes(a);
  if (is_mass(a)) mass_tile<First, Stored>(a, q, rows, forced, from, high - low, scratch);
  else score_tile<First, Stored>(a, q, rows, from, high - low, scratch);
  return scratch.scores;
}

// The larger of n scores; a NaN has no say.
inline void take_larger(const float* scores, int64_t n, float* best) {
  for (int64_t j = 0; j < n; ++j) best[j] = scores[j] > best[j] ? scores[j] : best[j];
}

void rank(const RankArgs& a, const char* q, int64_t rows, const float* forced, const char* summaries, const int32_t* blocks, int64_t low,
          int64_t high, int64_t seen, int64_t want, int32_t* order, float* scores, char* memory) {
  Arena arena{memory};
  RankScratch scratch(arena, a);
  for (int64_t i = 0; i < a.width; ++i) { order[i] = (int32_t)a.tiles.n_blocks; scores[i] = -INF; }
  int64_t n = high - low, size = item_size(a.shape.dtype);
  if (n <= 0) return;
  auto of_head = [&](int64_t h) {
    if (by_slabs(a)) {
      slabs_tile(a, q + h * a.q.sh * size, rows, summaries, blocks, a.aggregate == AGG_SOFTMAX ? seen : high, scratch);
      return (const float*)scratch.scores + low;
    }
    auto judged = [&](auto first, auto stored) {
      const float* masses = forced ? forced + h * a.M : nullptr;
      return judge<decltype(first), decltype(stored)>(a, q + h * a.q.sh * size, rows, masses, summaries, low, high, seen, scratch);
    };
#ifdef CC_AMX
    using Box = ScoreProducts<ScoreQuestPairs>;
    using Key = ScoreProducts<ScoreMeanPairs>;
    if (by_amx(a)) return boxed(a) ? judged(Box{}, Key{}) : judged(Key{}, Key{});
#endif
#ifdef CC_BF16_DOT
    if (paired(a)) return boxed(a) ? judged(ScoreQuestPairs{}, ScoreMeanPairs{}) : judged(ScoreMeanPairs{}, ScoreMeanPairs{});
#endif
    return boxed(a) ? judged(ScoreQuest{}, ScoreMean{}) : judged(ScoreMean{}, ScoreMean{});
  };
  const float* found = of_head(0);
  if (a.heads > 1) {
    memcpy(scratch.best, found, n * sizeof(float));
    for (int64_t h = 1; h < a.heads; ++h) take_larger(of_head(h), n, scratch.best);
    found = scratch.best;
  }
  take_best(scratch, found, n, least(n, want), low, false, order, scores);
}

}  // namespace
