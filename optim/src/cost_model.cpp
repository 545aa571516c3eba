#include "cost_model.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "newton_schulz_cost.h"

namespace dmuon::optim {
namespace {

constexpr int64_t kSteps = 5;

struct Rate {
  double s, gflops;
};
// fp32, one thread, one core of an AVX-512 server CPU: printed by tests/perf/gemm_rate.py. Only
// ratios matter to the plan; between the sizes the rate is linear in log s.
constexpr std::array<Rate, 8> kRates = {
    {{16, 61}, {32, 117}, {64, 155}, {128, 169}, {256, 157}, {512, 155}, {1024, 162}, {2048, 156}}};
// What an update does besides products (momentum, direction, normalization, weights), and its
// calls.
constexpr double kNanosecondsPerElement = 2.1;
constexpr double kNanosecondsPerMatrix = 33500.0;

double gemmRate(double s) {
  if (s <= kRates.front().s) return kRates.front().gflops;
  for (size_t i = 1; i < kRates.size(); ++i) {
    const Rate low = kRates[i - 1], high = kRates[i];
    if (s > high.s) continue;
    const double part = std::log(s / low.s) / std::log(high.s / low.s);
    return low.gflops + part * (high.gflops - low.gflops);
  }
  return kRates.back().gflops;
}

}  // namespace

double cheaperFlops(double s, double l) {
  const NewtonSchulzWork gram = newtonSchulzWork(kSteps, fastRestarts(kSteps));
  return std::min(gram.flops(s, l), directWork(kSteps).flops(s, l));
}

double measuredNanoseconds(double s, double l) {
  return cheaperFlops(s, l) / gemmRate(s) + kNanosecondsPerElement * s * l + kNanosecondsPerMatrix;
}

}  // namespace dmuon::optim
