#define CC_BF16_DOT 1
#define CC_AMX 1
#include "simd_avx512.h"
// The kernels below are compiled once per tier, for the vector type above.
#include "cells.h"
#include "few.h"
#include "peak.h"

const Kernels amx_kernels = {"amx", attend_scratch, attend, few_scratch, few_partial, attend_few,
                             merge_few, summary_bytes, summarise, rank_scratch, by_slabs, rank, cells_at_once, cells_scratch,
                             rank_cells, peak};
