// Loops over threads: torch's own OpenMP team where Python could find it, else a persistent pool of ours. Sharing the team
// matters because its threads spin for a while after each parallel region of torch's: a second pool would fight them for
// the cores just when a model goes from a matrix product to attention.
#pragma once
#include <cstdint>
#include <functional>

// GOMP_parallel of the OpenMP runtime that torch uses; null to use our own pool.
void share_team(void* gomp_parallel);

// Runs body(item, worker) for every item in [0, items) on at most `threads` threads, the caller among them. Worker numbers
// are below `threads`. Runs alone where another caller holds our pool.
void parallel_for(int64_t items, int64_t threads, const std::function<void(int64_t item, int64_t worker)>& body);
