#include "normalize.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <type_traits>

namespace dmuon::optim {
namespace {

// x / scale in fp64. Only fp64 itself needs the scale: squares of fp32 neither overflow nor vanish
// in fp64. A division, because 1 / scale overflows for a denormal scale.
template <typename T>
double scaled(T x, double scale) {
  if constexpr (std::is_same_v<T, double>) return x / scale;
  return static_cast<double>(x);
}

// Sum of scaled squares. Several accumulators: one chain of additions is bound by its latency.
template <typename T>
double sumOfSquares(const T* x, int64_t size, double scale) {
  constexpr int64_t kLanes = 8;
  std::array<double, kLanes> sums{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double y = scaled(x[i + lane], scale);
      sums[lane] += y * y;
    }
  }
  for (; i < size; ++i) {
    const double y = scaled(x[i], scale);
    sums[0] += y * y;
  }
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

template <typename T>
double safeScale(const T* x, int64_t size) {
  if constexpr (!std::is_same_v<T, double>) return 1.0;
  double largest = 0;
  for (int64_t i = 0; i < size; ++i)
    largest = std::max(largest, std::abs(static_cast<double>(x[i])));
  return largest > 0 ? largest : 1.0;
}

template <typename In, typename Out>
void normalizeOne(const In* in, Out* out, int64_t size) {
  const double scale = safeScale(in, size);
  const double sum = sumOfSquares(in, size, scale);
  if (!std::isfinite(sum)) {
    std::fill_n(out, size, static_cast<Out>(std::numeric_limits<float>::quiet_NaN()));
    return;
  }
  const double inverse = sum > 0 ? 1.0 / std::sqrt(sum) : 0.0;
  for (int64_t i = 0; i < size; ++i) {
    out[i] = static_cast<Out>(scaled(in[i], scale) * inverse);
  }
}

}  // namespace

void normalizeOnCpu(const at::Tensor& g, at::Tensor& out_tensor) {
  const at::Tensor dense = g.contiguous();
  const int64_t size = g.size(-1) * g.size(-2);
  const int64_t batch = size == 0 ? 0 : g.numel() / size;
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, g.scalar_type(), "dmuon_normalize_in", [&] {
        using In = scalar_t;
        const In* in = dense.const_data_ptr<In>();
        AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out_tensor.scalar_type(),
                                        "dmuon_normalize_out", [&] {
                                          scalar_t* out = out_tensor.mutable_data_ptr<scalar_t>();
                                          for (int64_t b = 0; b < batch; ++b) {
                                            normalizeOne(in + b * size, out + b * size, size);
                                          }
                                        });
      });
}

void normalizeOnDevice(const at::Tensor& g, at::Tensor& out) {
  const at::ScalarType wide = g.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor x = g.to(wide);
  at::Tensor largest = at::amax(x.abs(), {-2, -1}, /*keepdim=*/true);
  // In two stages: x / largest is at most 1, whatever the scale of x.
  const at::Tensor y = x.div(largest.masked_fill(largest.eq(0), 1.0));
  // The short dimension in x's type, the long one in fp64: that is where the error would build up.
  const int64_t first = g.size(-2) < g.size(-1) ? -2 : -1;
  const at::Tensor parts = at::linalg_vector_norm(y, 2, {first}, /*keepdim=*/true);
  at::Tensor norm = at::linalg_vector_norm(parts, 2, {-3 - first}, /*keepdim=*/true, at::kDouble);
  norm = norm.masked_fill(norm.eq(0), 1.0);
  norm =
      norm.masked_fill(largest.isfinite().logical_not(), std::numeric_limits<double>::quiet_NaN());
  out.copy_(y.mul_(norm.reciprocal().to(wide)));
}

void normalizeMatrices(const at::Tensor& g, at::Tensor& out) {
  g.is_cpu() ? normalizeOnCpu(g, out) : normalizeOnDevice(g, out);
}

}  // namespace dmuon::optim
