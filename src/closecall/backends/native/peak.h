// What the multiply-add units of this core deliver when nothing but registers is involved: the ceiling benchmarks quote.
#pragma once
#include <ctime>

#include "dot.h"

namespace {

inline double seconds_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

template <class Dot>
double peak_of(double seconds, int flops_per_lane) {
  constexpr int N = 12, INNER = 256;  // independent sums, enough to hide the latency of any core's units
  alignas(64) float zeros[LANES] = {0};
  typename Dot::A a = Dot::lanes(zeros);
  V acc[N];
  for (V& x : acc) x = set1(0.0f);
  double best = 0, begin = seconds_now();
  do {
    double t = seconds_now();
    for (int rep = 0; rep < 64; ++rep)
      for (int i = 0; i < INNER; ++i) {
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
          acc[n] = Dot::mac(a, a, acc[n]);
          asm volatile("" : "+x"(acc[n]));  // each sum is really computed, in a register
        }
      }
    double rate = 64.0 * INNER * N * LANES * flops_per_lane / (seconds_now() - t);
    if (rate > best) best = rate;
  } while (seconds_now() - begin < seconds);
  return best;
}

double peak(int64_t dtype, double seconds) {
#ifdef CC_BF16_DOT
  if (dtype == BF16) return peak_of<DotBF16>(seconds, 4);
#endif
  (void)dtype;  // other types are multiplied as float32
  return peak_of<DotF32>(seconds, 2);
}

}  // namespace
