// FLOPs of the Newton-Schulz engine, free of ATen so that the ownership plan can use them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace dmuon::optim {

// Rows that a symmetric (s, s) product of (s, k) by (k, s) computes at once (symmetric_product.h):
// the fewer, the less of the half above the diagonal, but the more often the BLAS reads the other
// operand. Measured with MKL on an AVX-512 processor.
constexpr int64_t stripRows(int64_t s, int64_t k) {
  if (s < 128) return s;
  if (2 * k > 3 * s) return s < 384 ? 96 : 128;
  return s < 1024 ? 64 : 192;
}

// The share of a full product's FLOPs that a symmetric one then costs.
constexpr double symmetricShare(int64_t s, int64_t k) {
  const int64_t rows = stripRows(s, k);
  double elements = 0;
  for (int64_t begin = 0; begin < s; begin += rows) {
    const int64_t end = std::min(s, begin + rows);
    elements += static_cast<double>((end - begin) * end);
  }
  return s == 0 ? 1 : elements / (static_cast<double>(s) * static_cast<double>(s));
}

// FLOPs of GEMM: `whole` s^2 l of products with X, of which `gram` more give symmetric results, and
// `square` s^3 of symmetric products.
struct NewtonSchulzWork {
  double whole = 0, gram = 0, square = 0;
  double flops(double s, double l) const {
    const auto rows = static_cast<int64_t>(s), columns = static_cast<int64_t>(l);
    return s * s *
           ((whole + symmetricShare(rows, columns) * gram) * l +
            symmetricShare(rows, rows) * square * s);
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
    work.square += 2;                        // P = a I + b R + c R^2
    if (!starts(i)) work.square += 2;        // Q = Q P
    if (last_of_segment) work.whole += 2;    // X = Q X
    if (!last_of_segment) work.square += 4;  // T = R P, R = T P
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
