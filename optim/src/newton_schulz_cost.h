// FLOPs of the Newton-Schulz engine, free of ATen so that the ownership plan can use them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace dmuon::optim {

// How often a symmetric s x s product is halved (symmetric_product.h): blocks below about 128 rows
// cost the BLAS more than their share.
constexpr int halvingsOf(int64_t s) { return s < 192 ? 0 : s < 768 ? 1 : s < 2048 ? 2 : 3; }

// The share of a full product's FLOPs that a symmetric one then costs.
constexpr double symmetricShare(int64_t s) { return 0.5 + 0.5 / (1 << halvingsOf(s)); }

// FLOPs of GEMM: `whole` s^2 l of products with X, of which `gram` more give symmetric results, and
// `square` s^3 of symmetric products.
struct NewtonSchulzWork {
  double whole = 0, gram = 0, square = 0;
  double flops(double s, double l) const {
    const double share = symmetricShare(static_cast<int64_t>(s));
    return s * s * ((whole + share * gram) * l + share * square * s);
  }
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
    if (starts(i)) work.gram += 2;           // R = X X^T
    work.square += 2;                        // Z = b R + c R^2
    if (!starts(i)) work.square += 2;        // Q = a Q + Q Z
    if (last_of_segment) work.whole += 2;    // X = Q X
    if (!last_of_segment) work.square += 4;  // T = a R + R Z, R = a T + Z T
  }
  return work;
}

inline NewtonSchulzWork directWork(int64_t steps) {
  const auto t = static_cast<double>(steps);
  return {2 * t, 2 * t, 2 * t};
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
