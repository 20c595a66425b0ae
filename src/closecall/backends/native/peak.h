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

constexpr int SUMS = 12, BURST = 16384;  // independent sums, enough to hide the latency of any core's units

template <class Dot>
__attribute__((noinline)) float burst(const float* operand) {
  typename Dot::A a = Dot::lanes(operand), b = Dot::lanes(operand + LANES);
  V acc[SUMS];
#pragma GCC unroll 16
  for (int n = 0; n < SUMS; ++n) acc[n] = set1(operand[n]);  // told apart, or the compiler would compute one sum for all
  for (int i = 0; i < BURST; ++i) {
#pragma GCC unroll 16
    for (int n = 0; n < SUMS; ++n) acc[n] = Dot::mac(a, b, acc[n]);
  }
  float total = 0;
  for (int n = 0; n < SUMS; ++n) total += sum(acc[n]);
  return total;
}

// The best of many short bursts: what the core can do, not what its neighbours left of it.
template <class Dot>
double peak_of(double seconds, int flops_per_lane) {
  alignas(64) float operand[2 * LANES + SUMS] = {0};
  volatile float sink = 0;
  double best = 0, begin = seconds_now();
  do {
    double t = seconds_now();
    sink = burst<Dot>(operand);
    double rate = (double)BURST * SUMS * LANES * flops_per_lane / (seconds_now() - t);
    if (rate > best) best = rate;
  } while (seconds_now() - begin < seconds);
  (void)sink;
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
