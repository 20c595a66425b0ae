// A persistent pool of threads that share one loop at a time.
#pragma once
#include <cstdint>
#include <functional>

// Runs body(item, worker) for every item in [0, items) on at most `threads` threads, the caller among them. Worker numbers
// are below `threads`. Runs alone where another caller holds the pool.
void parallel_for(int64_t items, int64_t threads, const std::function<void(int64_t item, int64_t worker)>& body);
