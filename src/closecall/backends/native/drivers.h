// Whole calls: tiles to work items, items to threads. Baseline instructions only.
#pragma once
#include "args.h"

// Tiers this machine can run, best first, as indices into tier_name.
int tier_count();
const char* tier_name(int tier);

// Each returns null, or what went wrong.
const char* run_attend(const AttendArgs&);
const char* run_rank(const RankArgs&);
// Only the summaries of complete blocks that the call's rows lie in, into pages.
const char* run_update(const RankArgs&);
// Bytes of one block's summary; 0 if there is no such tier.
int64_t run_summary_bytes(const RankArgs&);
const char* run_gather(const GatherArgs&);
double run_peak(int64_t tier, int64_t dtype, double seconds);
