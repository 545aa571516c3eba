#include <dmuon/optim/newton_schulz.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "newton_schulz_cost.h"
#include "newton_schulz_engine.h"
#include "normalize.h"
#include "symmetric_product.h"

namespace dmuon::optim {
namespace {

// The largest negative eigenvalue that rounding gives X X^T at |X| <= 1, relative to its norm.
double spuriousEigenvalue(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return 5e-4;
    case at::kBFloat16:
      return 4e-3;
    case at::kDouble:
      return 1e-14;
    default:
      return 2e-6;
  }
}

bool contains(const std::vector<int64_t>& list, int64_t value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

void checkOrder(const NewtonSchulzConfig& config) {
  const auto count = static_cast<int64_t>(config.steps.size());
  TORCH_CHECK_VALUE(count >= 1 && count <= kMaxSteps, "dmuon: orthogonalization takes 1 to ",
                    kMaxSteps, " steps, not ", count);
  int64_t previous = 0;
  for (const int64_t restart : config.restarts) {
    TORCH_CHECK_VALUE(restart > previous && restart < count, "dmuon: restarts [",
                      c10::IntArrayRef(config.restarts),
                      "] must be strictly increasing and lie in [1, ", count - 1, "] for ", count,
                      " steps");
    previous = restart;
  }
}

bool gramIsCheaper(const NewtonSchulzConfig& config, double s, double l) {
  if (config.form != NewtonSchulzForm::kAuto) return config.form == NewtonSchulzForm::kGram;
  const auto count = static_cast<int64_t>(config.steps.size());
  return newtonSchulzWork(count, config.restarts).flops(s, l) < directWork(count).flops(s, l);
}

std::vector<int64_t> everyStep(size_t steps) {
  std::vector<int64_t> restarts(steps - 1);
  std::iota(restarts.begin(), restarts.end(), 1);
  return restarts;
}

at::ScalarType iterationType(const at::Tensor& g, const NewtonSchulzConfig& config) {
  const bool is_double = g.scalar_type() == at::kDouble;
  if (!config.dtype && !g.is_cpu()) return at::kHalf;
  const at::ScalarType asked = config.dtype.value_or(at::kFloat);
  return is_double && asked == at::kFloat ? at::kDouble : asked;
}

// out = a b for matrices and batches of them.
void multiply(at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  a.dim() == 2 ? at::mm_out(out, a, b) : at::bmm_out(out, a, b);
}

// Places in the workspace.
enum Place : size_t { kX, kOther, kR, kP, kQ, kT, kAll };

}  // namespace

at::Tensor NewtonSchulzWorkspace::take(size_t place, at::IntArrayRef sizes,
                                       const at::TensorOptions& options) {
  const int64_t numel = c10::multiply_integers(sizes);
  if (places_.size() <= place) places_.resize(place + 1);
  at::Tensor& kept = places_[place];
  if (!kept.defined() || kept.numel() < numel || kept.dtype() != options.dtype() ||
      kept.device() != options.device()) {
    kept.reset();  // first, so that both are never there at once
    kept = at::empty({numel}, options);
  }
  return kept.narrow(0, 0, numel).view(sizes);
}

at::Tensor iterateGram(at::Tensor x, const std::vector<Coefficients>& steps,
                       const std::vector<int64_t>& restarts, NewtonSchulzWorkspace& workspace) {
  // Work on the wide orientation. A view will do: GEMM takes transposed operands as they are.
  const bool tall = x.size(-2) > x.size(-1);
  at::Tensor other = workspace.take(kOther, x.sizes(), x.options());
  at::Tensor wide = tall ? x.mT() : x;
  at::Tensor wide_other = tall ? other.mT() : other;
  std::vector<int64_t> square(x.sizes().begin(), x.sizes().end());
  square[square.size() - 2] = square.back() = wide.size(-2);
  at::Tensor r = workspace.take(kR, square, x.options());
  at::Tensor p = workspace.take(kP, square, x.options());
  at::Tensor q = workspace.take(kQ, square, x.options());
  at::Tensor t = workspace.take(kT, square, x.options());

  // R, P and Q are polynomials of one matrix and commute, but their rounding does not: with R as
  // the left factor, an error in R P or R P^2 stays relative to R's small eigenvalues. P (R P),
  // which would be exactly symmetric, loses 1.3 to 3 times as much on ill-conditioned matrices.
  const auto count = static_cast<int64_t>(steps.size());
  for (int64_t i = 0; i < count; ++i) {
    const auto [a, b, c] = steps[static_cast<size_t>(i)];
    const bool first = i == 0 || contains(restarts, i);
    const bool last = i + 1 == count || contains(restarts, i + 1);
    if (first) symmetricProduct(r, 0, r, 1, wide, wide.mT());  // R = X X^T
    symmetricProduct(p, b, r, c, r, r);                        // P = a I + b R + c R^2
    p.diagonal(0, -2, -1).add_(a);
    if (!first) {  // Q = Q P, which starts as P
      symmetricProduct(t, 0, t, 1, q, p);
      std::swap(q, t);
    } else if (last) {
      std::swap(q, p);
    } else {
      q.copy_(p);
    }
    if (last) {  // X = Q X
      multiply(wide_other, q, wide);
      std::swap(wide, wide_other);
    } else {  // R = R P^2
      symmetricProduct(t, 0, t, 1, r, p);
      symmetricProduct(r, 0, r, 1, t, p);
    }
  }
  return tall ? wide.mT() : wide;
}

NewtonSchulzConfig makeNewtonSchulzConfig(const std::string& coefficients, int64_t steps,
                                          const std::string& mode) {
  NewtonSchulzConfig config;
  try {
    config.steps = coefficientSet(coefficients, steps);
    validateCoefficients(config.steps);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
  if (mode == "fast") {
    config.restarts = fastRestarts(steps);
  } else if (mode == "accurate") {
    config.restarts = accurateRestarts(steps);
  } else {
    TORCH_CHECK_VALUE(mode == "exact", "dmuon: unknown orthogonalization mode '", mode,
                      "', known are 'fast', 'accurate' and 'exact'");
    config.form = NewtonSchulzForm::kDirect;
    config.dtype = at::kFloat;
  }
  checkNewtonSchulzConfig(config, at::kFloat);
  return config;
}

NewtonSchulzConfig makeNewtonSchulzConfig(std::vector<Coefficients> steps,
                                          std::vector<int64_t> restarts) {
  try {
    validateCoefficients(steps);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
  NewtonSchulzConfig config;
  config.steps = std::move(steps);
  config.restarts = std::move(restarts);
  checkNewtonSchulzConfig(config, at::kFloat);
  return config;
}

void checkNewtonSchulzConfig(const NewtonSchulzConfig& config, at::ScalarType dtype) {
  checkOrder(config);
  if (config.form == NewtonSchulzForm::kDirect) return;
  constexpr double kLargest = 0.25;
  double eigenvalue = 0;
  for (size_t i = 0; i < config.steps.size(); ++i) {
    if (i == 0 || contains(config.restarts, static_cast<int64_t>(i))) {
      eigenvalue = -spuriousEigenvalue(dtype);
    }
    TORCH_CHECK_VALUE(std::abs(eigenvalue) <= kLargest, "dmuon: restarts [",
                      c10::IntArrayRef(config.restarts), "] are too far apart for ", dtype,
                      ": before step ", i, " an eigenvalue of -", spuriousEigenvalue(dtype),
                      " from rounding has become ", eigenvalue, ", the limit is -", kLargest,
                      "; restart earlier, or iterate in a wider type");
    const auto [a, b, c] = config.steps[i];
    const double factor = a + eigenvalue * (b + eigenvalue * c);
    eigenvalue *= factor * factor;
  }
}

at::Tensor newtonSchulz(const at::Tensor& g, const NewtonSchulzConfig& config) {
  NewtonSchulzWorkspace workspace;
  return newtonSchulz(g, config, workspace);
}

at::Tensor newtonSchulz(const at::Tensor& g, const NewtonSchulzConfig& config,
                        NewtonSchulzWorkspace& workspace) {
  TORCH_CHECK(g.dim() == 2 || g.dim() == 3,
              "dmuon: newtonSchulz takes (m, n) or (batch, m, n), not ", g.sizes());
  TORCH_CHECK(at::isFloatingType(g.scalar_type()), "dmuon: newtonSchulz on ", g.scalar_type());
  const at::NoGradGuard no_grad;
  const at::ScalarType dtype = iterationType(g, config);
  const int64_t s = std::min(g.size(-2), g.size(-1)), l = std::max(g.size(-2), g.size(-1));
  const bool gram = gramIsCheaper(config, static_cast<double>(s), static_cast<double>(l));
  gram ? checkNewtonSchulzConfig(config, dtype) : checkOrder(config);
  const auto restarts = gram ? config.restarts : everyStep(config.steps.size());
  const auto options = g.options().dtype(dtype);
  const auto one = [&](const at::Tensor& matrices) {
    at::Tensor x = workspace.take(kX, matrices.sizes(), options);
    normalizeMatrices(matrices, x);
    return x.numel() == 0 ? x : iterateGram(x, config.steps, restarts, workspace);
  };
  if (g.dim() == 2 || !g.is_cpu()) return one(g.detach());
  // A batched product is slower than single ones on a CPU. Each matrix is iterated in the same
  // memory: the last bits of a BLAS's product depend on where its operands lie.
  at::Tensor all = workspace.take(kAll, g.sizes(), options);
  for (int64_t i = 0; i < g.size(0); ++i) all.select(0, i).copy_(one(g.detach().select(0, i)));
  return all;
}

double newtonSchulzFlops(int64_t m, int64_t n, const NewtonSchulzConfig& config) {
  const auto s = static_cast<double>(std::min(m, n)), l = static_cast<double>(std::max(m, n));
  const auto count = static_cast<int64_t>(config.steps.size());
  return gramIsCheaper(config, s, l) ? newtonSchulzWork(count, config.restarts).flops(s, l)
                                     : directWork(count).flops(s, l);
}

}  // namespace dmuon::optim
