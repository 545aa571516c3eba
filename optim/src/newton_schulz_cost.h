// FLOPs of the Newton-Schulz engine, free of ATen so that the ownership plan can use them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace dmuon::optim {

// Both forms are sums a * s^2 l + b * s^3 of GEMM FLOPs.
struct NewtonSchulzWork {
  double s2l = 0, s3 = 0;
  double flops(double s, double l) const { return s * s * (s2l * l + s3 * s); }
};

// The Gram form; with a restart before every step it is the direct form. Counts what the engine
// does.
inline NewtonSchulzWork newtonSchulzWork(int64_t steps, const std::vector<int64_t>& restarts) {
  NewtonSchulzWork work;
  const auto starts = [&](int64_t i) {
    return i == 0 || std::find(restarts.begin(), restarts.end(), i) != restarts.end();
  };
  for (int64_t i = 0; i < steps; ++i) {
    const bool last_of_segment = i + 1 == steps || starts(i + 1);
    if (starts(i)) work.s2l += 2;        // R = X X^T
    work.s3 += 2;                        // Z = b R + c R^2
    if (!starts(i)) work.s3 += 2;        // Q = a Q + Q Z
    if (last_of_segment) work.s2l += 2;  // X = Q X
    if (!last_of_segment) work.s3 += 4;  // T = a R + R Z, R = a T + Z T
  }
  return work;
}

inline NewtonSchulzWork directWork(int64_t steps) {
  const auto t = static_cast<double>(steps);
  return {4 * t, 2 * t};
}

// The restarts of mode "fast": before step 2, then every third.
inline std::vector<int64_t> fastRestarts(int64_t steps) {
  std::vector<int64_t> restarts;
  for (int64_t i = 2; i < steps; i += 3) restarts.push_back(i);
  return restarts;
}

// The restarts of mode "accurate": before step 1, then every second.
inline std::vector<int64_t> accurateRestarts(int64_t steps) {
  std::vector<int64_t> restarts;
  for (int64_t i = 1; i < steps; i += 2) restarts.push_back(i);
  return restarts;
}

}  // namespace dmuon::optim
