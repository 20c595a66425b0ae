// Block summaries: what stands for a block's keys, and where its planes lie.
#pragma once
#include "dot.h"

namespace {

constexpr int MOST_DIM = 1024, MOST_BLOCK = 1024;  // of OUTLIERS; Python asks for no more

// Whether summaries are kept as bfloat16: all are keys, coordinates of keys, or defined to be rounded like one, except
// MEAN.
inline bool paired(const RankArgs& a) {
#ifdef CC_BF16_DOT
  return a.shape.dtype == BF16 && a.scorer != MEAN;
#else
  (void)a;
  return false;
#endif
}
inline int64_t padded_dim(const RankArgs& a) { return round_up(a.shape.D, LANES); }

// The parts of a summary that a row is scored against: a mean (one plane) or a box (two), then each stored key.
inline bool boxed(const RankArgs& a) { return a.scorer == QUEST || a.scorer == BOX || (a.scorer == OUTLIERS && a.shrink > 0); }
inline int64_t parts(const RankArgs& a) { return a.scorer == OUTLIERS ? a.outliers + 1 : 1; }
inline int64_t plane_bytes(const RankArgs& a) { return padded_dim(a) * (paired(a) ? 2 : 4); }
inline int64_t plane_of(const RankArgs& a, int64_t part) { return part ? (part + boxed(a)) * plane_bytes(a) : 0; }

int64_t summary_bytes(const RankArgs& a) { return plane_of(a, parts(a) - 1) + plane_bytes(a) * (parts(a) == 1 && boxed(a) ? 2 : 1); }

// From a to b, exact at both ends: rounded as torch.lerp rounds it.
inline float between(float a, float b, float w) { return w < 0.5f ? a + w * (b - a) : b - (b - a) * (1.0f - w); }

// `n` floats, whole vectors of them, rounded to a type and back.
void round_row(int64_t dtype, int64_t n, const float* from, float* to) {
  char narrow[LANES * 4];
  for (int64_t i = 0; i < n; i += LANES) {
    write_row(narrow, dtype, LANES, from + i);
    store(to + i, load_any(narrow, dtype));
  }
}

// Rounds a plane as its type is rounded, and writes it.
void write_plane(const RankArgs& a, const float* from, char* plane) {
  int64_t d = padded_dim(a);
  if (paired(a)) {
    write_row(plane, BF16, d, from);
    return;
  }
  round_row(a.shape.dtype, d, from, (float*)plane);
}

// What stands for all keys but the `outliers` most distant from the mean of all, then those; of equally distant ones the
// earlier. A block that is too short for so many repeats its last one. A NaN anywhere makes all of it NaN.
void summarise_outliers(const RankArgs& a, const char* keys, int64_t n, char* summary) {
  int64_t dtype = a.shape.dtype, size = item_size(dtype), d = padded_dim(a), m = a.outliers;
  float row[MOST_DIM], mean[MOST_DIM], high[MOST_DIM], low[MOST_DIM], far[MOST_BLOCK];
  auto read = [&](int64_t j) { read_row(keys + j * a.k.sn * size, dtype, a.shape.D, a.k.sd, d, row); };
  auto pool = [&](auto&& takes) {
    for (int64_t i = 0; i < d; ++i) mean[i] = 0.0f, high[i] = -INF, low[i] = INF;
    int64_t count = 0;
    for (int64_t j = 0; j < n; ++j) {
      if (!takes(j)) continue;
      read(j);
      for (int64_t i = 0; i < d; i += LANES) {
        V x = load(row + i);
        store(mean + i, add(load(mean + i), x));
        store(high + i, max(x, load(high + i)));
        store(low + i, min(x, load(low + i)));
      }
      ++count;
    }
    for (int64_t i = 0; i < d; ++i) mean[i] /= (float)count;
  };
  bool spoilt = false;
  pool([](int64_t) { return true; });
  for (int64_t j = 0; j < n; ++j) {
    read(j);
    V total = set1(0.0f);
    for (int64_t i = 0; i < d; i += LANES) {
      V apart = sub(load(row + i), load(mean + i));
      total = fma(apart, apart, total);
    }
    float distance = sum(total);
    far[j] = distance == distance ? distance : INF;  // a NaN, or infinity less infinity, is as far away as can be
    if (distance != distance)
      for (int64_t i = 0; i < d; ++i) spoilt |= row[i] != row[i];
  }
  int64_t last = 0;
  for (int64_t p = 1; p <= m; ++p) {
    if (p <= n) {
      for (int64_t j = last = 0; j < n; ++j)
        if (far[j] > far[last]) last = j;
      far[last] = -1.0f;
    }
    read(last);
    write_plane(a, row, summary + plane_of(a, p));
  }
  if (n > m) pool([&](int64_t j) { return far[j] >= 0.0f; });
  else pool([&](int64_t j) { return j == last; });
  if (spoilt) mean[0] = high[0] = low[0] = NOT_A_NUMBER;
  if (boxed(a)) {
    for (int64_t i = 0; i < d; ++i) {
      high[i] = between(mean[i], high[i], (float)a.shrink);
      low[i] = between(mean[i], low[i], (float)a.shrink);
    }
    write_plane(a, high, summary);
    write_plane(a, low, summary + plane_bytes(a));
  } else {
    write_plane(a, mean, summary);
  }
  if (spoilt)
    for (int64_t p = 1; p <= m; ++p) write_plane(a, mean, summary + plane_of(a, p));
}

// A block's mean key, or its largest and then its smallest coordinates, for BOX drawn towards the mean and rounded to the
// keys' type; a NaN among them makes its coordinate NaN.
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
        round_row(dtype, LANES, lanes, lanes);
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

}  // namespace
