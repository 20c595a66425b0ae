// What the multiply-add units of this core deliver when nothing but registers is involved: the ceiling benchmarks quote.
#pragma once
#include <ctime>

#include "dot.h"
#ifdef CC_AMX
#include "amx.h"
#endif

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
template <class Burst>
double peak_of(double seconds, double flops, Burst burst) {
  alignas(64) float operand[2 * LANES + SUMS] = {0};
  volatile float sink = 0;
  double best = 0, begin = seconds_now();
  do {
    double t = seconds_now();
    sink = burst(operand);
    double rate = flops / (seconds_now() - t);
    if (rate > best) best = rate;
  } while (seconds_now() - begin < seconds);
  (void)sink;
  return best;
}

#ifdef CC_AMX
// Four sums of two left and two right operands, as the kernels have them. Registers begin as zeros.
__attribute__((noinline)) float amx_burst(const float*) {
  AmxTurn turn;
  for (int i = 0; i < BURST; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  return 0;
}
#endif

double peak(int64_t dtype, double seconds) {
  constexpr double LANE_STEPS = (double)BURST * SUMS * LANES;
#ifdef CC_AMX
  if (dtype == BF16) return peak_of(seconds, BURST * 4.0 * 2 * AMX_ROWS * LANES * AMX_DEPTH, amx_burst);
#endif
#ifdef CC_BF16_DOT
  if (dtype == BF16) return peak_of(seconds, LANE_STEPS * 4, burst<DotBF16>);
#endif
  (void)dtype;  // other types are multiplied as float32
  return peak_of(seconds, LANE_STEPS * 2, burst<DotF32>);
}

}  // namespace
