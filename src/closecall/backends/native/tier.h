// The interface between the drivers (baseline instructions, standard library allowed) and the ISA tiers (one translation
// unit per instruction set; no standard library there, since an inline function compiled for AVX-512 and kept by the
// linker for everybody would crash older CPUs).
#pragma once
#include "args.h"

// Rows are processed in chunks of at most CHUNK; keys in steps of at most STEP.
constexpr int CHUNK = 64, STEP = 64;
// Tiles of at most FEW_ROWS rows (decode, speculative decode, tails) run with lanes along the head dimension instead of
// along rows. Their keys are taken in pieces of PIECE keys, merged in order, so that splitting pieces over threads does
// not change a bit of the result.
constexpr int FEW_ROWS = 8, PIECE = 256;

// The part of a sequence that one attention item works on.
struct Rows {
  const char* q;   // first row of the first head
  int64_t q_row, q_head, q_dim;  // strides in elements
  int64_t rows, heads;           // `heads` query heads share the same kept blocks and are worked on together
  int64_t pos;                   // position of the first row
  const char *k, *v;             // first key of the sequence, for this key head
  int64_t k_row, k_dim, v_row, v_dim;
  const int32_t* pages;          // of the sequence, or null: all keys lie in one piece
  int64_t page, k_page, v_page;  // keys of a page; steps from page to page
  const int32_t* idx;            // kept blocks, or null for every visible one
  int64_t count;                 // how many
  int64_t block;
  char* out;
  int64_t out_row, out_head;     // its last stride is 1
  float* lse;
  int64_t lse_head;
};

// Cells that are ranked together, at most.
constexpr int MOST_CELLS = 64;

// One tile of one query head, or of the first of those that are ranked together: as the arguments of `rank` below.
struct Cell {
  const char* q;
  int64_t rows;
  const float* forced;
  int64_t low, high, seen, want;
  int32_t* order;
  float* scores;
  bool ascending = false;  // the best by their number, not by their score: who ranks them again needs no more
};

struct Kernels {
  const char* name;
  int64_t (*attend_scratch)(const Shape&, int64_t heads);  // bytes
  void (*attend)(const AttendArgs&, const Rows&, char* scratch);
  // Few rows: pieces [first, last) of the kept keys to partial[piece], few_partial floats each, then merged in order.
  int64_t (*few_scratch)(const Shape&);
  int64_t (*few_partial)(const Shape&, const Rows&);
  void (*attend_few)(const AttendArgs&, const Rows&, int64_t first, int64_t last, float* partial, char* scratch);
  void (*merge_few)(const AttendArgs&, const Rows&, int64_t pieces, float* partial);

  int64_t (*summary_bytes)(const RankArgs&);  // per block
  void (*summarise)(const RankArgs&, const char* keys, int64_t n, char* summary);  // one block of n keys
  int64_t (*rank_scratch)(const RankArgs&);
  // Ranks blocks [low, high), of `seen` in all, for a tile of `rows` query rows; writes width entries, the best `want` of them. `forced`: of its
  // first row, or null. Both are the first of RankArgs::heads heads. `blocks`: the summaries of those stand for blocks 0, 1, ...;
  // null: of all. Only where `names_blocks` says so.
  bool (*names_blocks)(const RankArgs&);
  void (*rank)(const RankArgs&, const char* q, int64_t rows, const float* forced, const char* summaries, const int32_t* blocks,
               int64_t low, int64_t high, int64_t seen, int64_t want, int32_t* order, float* scores, char* scratch);
  // The same for up to cells_at_once cells of one sequence and key head, whose rows are pooled.
  int64_t (*cells_at_once)(const RankArgs&);
  int64_t (*cells_scratch)(const RankArgs&);
  void (*rank_cells)(const RankArgs&, const Cell*, int64_t n, const char* summaries, char* scratch);
  // Multiply-adds per second this core retires from registers alone, times two. dtype F32, or BF16 where the tier has it.
  double (*peak)(int64_t dtype, double seconds);
};

extern const Kernels portable_kernels;
#ifdef CLOSECALL_X86
extern const Kernels avx2_kernels, avx512_kernels, avx512bf16_kernels, amx_kernels;
#endif
