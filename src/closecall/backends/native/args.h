// What Python hands to the native code: plain structs of 64-bit fields, packed by backends/cpu.py in this order.
// Pointers are raw addresses, strides count elements. Everything here was checked in Python; the drivers still clamp
// whatever indexes memory, so that a selection changed behind our back cannot make us read out of bounds.
#pragma once
#include <cstdint>

enum DType : int64_t { F32 = 0, BF16 = 1, F16 = 2 };
enum ScorerKind : int64_t { MEAN = 0, QUEST = 1, BOX = 2, OUTLIERS = 3 };
enum AggregateKind : int64_t { AGG_MAX = 0, AGG_MEAN = 1, AGG_MASS = 2, AGG_MASS_MAX = 3, AGG_SOFTMAX = 4 };

struct View {  // [B, H, N, D] with any strides
  void* data;
  int64_t sb, sh, sn, sd;
};

struct Tiles {  // the geometry of the call: [B, T] tables, see closecall/geometry.py
  const int64_t *row, *rows, *key, *pos, *sequence;
  int64_t count, block, n_blocks;
};

// Keys and values in pages: a View's `sb` is then the step from page to page, and key x of the call lies on page
// table[x / page], at place x % page of it. (Every sequence has its own run of table entries, so `Tiles.key` is the run's
// first entry times `page`.) Without a table, `sb` is the step from batch row to batch row.
struct Pages {
  const int32_t* table;
  int64_t page, entries, count;  // keys of a page, a whole number of blocks; entries of the table; pages there are
};

struct Shape {
  int64_t B, H, Hkv, D, Dv, dtype;
};

struct AttendArgs {
  View q, k, v, out;
  float* lse;             // [B, H, M], contiguous
  int64_t M;
  Shape shape;
  Tiles tiles;
  const int32_t* kv_idx;  // null: every visible block
  int64_t ib, ih, it, width;
  const int32_t* counts;
  int64_t cb, ch, ct;
  int64_t heads;          // consecutive query heads whose lists are the same: 1, or those of a key head
  double scale, softcap;  // softcap 0: none; else scores s become softcap * tanh(scale * s / softcap)
  int64_t threads, tier;
  Pages pages;
};

struct RankArgs {
  View q, k;
  Shape shape;
  Tiles tiles;
  int64_t scorer, aggregate, sinks, width;
  int32_t* order;  // [B, H / heads, T, width], contiguous
  float* scores;   // likewise
  const int32_t* limits;  // [B, T], contiguous: how far to rank each tile, at most `width`, or null: all that far
  const float* forced;  // [B, H, M], contiguous: log-sum-exp over each row's forced blocks; for the mass aggregates
  int64_t M;
  double shrink;        // of BOX, and of the box of the others of OUTLIERS: 0 is the mean, 1 the whole box
  int64_t outliers;     // of OUTLIERS: keys stored as they are
  char* kept;           // [B, Hkv, room] summaries, written here and read at later calls, or null: nothing is kept. The
  int64_t room, done;   // sequences then fill their rows; the first `done` blocks of each are summarised already
  int64_t pool;         // rows per mean; 1: the rows themselves
  int64_t outlying;     // rows of a tile that are scored beside the means: the most distant from its mean
  int64_t runs;         // what a whole tile is scored by: rows, or means and outlying rows
  const uint8_t* every_row;  // [B, T], contiguous: tiles whose rows are not pooled, or null: none
  int64_t heads;        // consecutive query heads that are ranked together, by the largest of their scores: 1, or those of a key head
  int64_t candidates;   // how many of a pooled tile's best blocks are scored again by every row, at least `width`; 0: none
  double scale;
  int64_t threads, tier;
  Pages pages;          // with a table, `kept` is [pages, Hkv, blocks of a page], and blocks before the first row are there
};

struct GatherArgs {
  const int32_t* order;   // [B, H, T, order_width], contiguous
  const int64_t* counts;  // [B, H, T]
  int64_t cb, ch, ct;
  int32_t* kv_idx;        // [B, H, T, width], contiguous
  int64_t B, H, order_width, width, sinks;
  Tiles tiles;
};
