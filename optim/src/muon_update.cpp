#include <dmuon/optim/muon_update.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <utility>

namespace dmuon::optim {
namespace {

// Matrices of equal shape go through one batched iteration on a GPU, up to this many bytes of
// input.
constexpr int64_t kMaxBatchBytes = int64_t{256} << 20;

void checkTensors(const at::Tensor& weight, const at::Tensor& gradient, const at::Tensor& momentum,
                  size_t index) {
  const auto wide = [](const at::Tensor& t) {
    return t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble;
  };
  TORCH_CHECK(wide(weight) && wide(momentum), "dmuon: muonUpdate: weight and momentum ", index,
              " must be fp32 or fp64, not ", weight.scalar_type(), " and ", momentum.scalar_type());
  TORCH_CHECK(at::isFloatingType(gradient.scalar_type()), "dmuon: muonUpdate: gradient ", index,
              " is of ", gradient.scalar_type());
  TORCH_CHECK(weight.sizes() == gradient.sizes() && weight.sizes() == momentum.sizes(),
              "dmuon: muonUpdate: weight, gradient and momentum ", index, " have shapes ",
              weight.sizes(), ", ", gradient.sizes(), " and ", momentum.sizes());
  TORCH_CHECK(weight.device() == gradient.device() && weight.device() == momentum.device(),
              "dmuon: muonUpdate: weight, gradient and momentum ", index, " are on ",
              weight.device(), ", ", gradient.device(), " and ", momentum.device());
}

// Advances the momentum and returns the direction to orthogonalize as (m, n) or (E, m, n). reshape
// follows the logical order, so a channels_last gradient gives the same matrix as a contiguous one.
at::Tensor direction(const at::Tensor& gradient, const at::Tensor& momentum,
                     const MuonHyper& hyper) {
  const at::Tensor g = gradient.detach().to(momentum.scalar_type());
  momentum.lerp_(g, 1.0 - hyper.momentum);
  const at::Tensor u = hyper.nesterov ? g.lerp(momentum, hyper.momentum) : momentum;
  const MatrixView view = matrixView(u.sizes());
  return u.dim() == 3 ? u : u.reshape({view.m, view.n});
}

void descend(const at::Tensor& weight, const at::Tensor& x, const MuonHyper& hyper) {
  const MatrixView view = matrixView(weight.sizes());
  if (hyper.weight_decay != 0) weight.mul_(1.0 - hyper.lr * hyper.weight_decay);
  weight.add_(x.view(weight.sizes()), -hyper.lr * lrRatio(hyper.adjust_lr, view.m, view.n));
}

using Indices = std::vector<size_t>;

// One index a group on CPU; on other devices equal matrices together, in order of first appearance.
std::vector<Indices> groupForBatching(const std::vector<at::Tensor>& weights) {
  std::vector<Indices> groups;
  std::map<std::tuple<std::string, at::ScalarType, int64_t, int64_t>, size_t> open;
  for (size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor& w = weights[i];
    if (w.numel() == 0) continue;
    const MatrixView view = matrixView(w.sizes());
    if (w.is_cpu() || view.batch > 1) {
      groups.push_back({i});
      continue;
    }
    const auto key = std::make_tuple(w.device().str(), w.scalar_type(), view.m, view.n);
    const auto found = open.find(key);
    const int64_t bytes = static_cast<int64_t>(w.nbytes());
    if (found != open.end() &&
        bytes * static_cast<int64_t>(groups[found->second].size() + 1) <= kMaxBatchBytes) {
      groups[found->second].push_back(i);
    } else {
      open[key] = groups.size();
      groups.push_back({i});
    }
  }
  return groups;
}

}  // namespace

LrAdjustment lrAdjustmentFromName(const std::string& name) {
  if (name == "original") return LrAdjustment::kOriginal;
  if (name == "match_rms_adamw") return LrAdjustment::kMatchRmsAdamW;
  if (name == "spectral_unclamped") return LrAdjustment::kSpectralUnclamped;
  TORCH_CHECK_VALUE(name == "none", "dmuon: unknown learning-rate adjustment '", name,
                    "', known are 'original', 'match_rms_adamw', 'spectral_unclamped' and 'none'");
  return LrAdjustment::kNone;
}

double lrRatio(LrAdjustment adjustment, int64_t m, int64_t n) {
  const auto rows = static_cast<double>(m), columns = static_cast<double>(n);
  switch (adjustment) {
    case LrAdjustment::kOriginal:
      return std::sqrt(std::max(1.0, rows / columns));
    case LrAdjustment::kMatchRmsAdamW:
      return 0.2 * std::sqrt(std::max(rows, columns));
    case LrAdjustment::kSpectralUnclamped:
      return std::sqrt(rows / columns);
    case LrAdjustment::kNone:
      break;
  }
  return 1.0;
}

MatrixView matrixView(at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(shape.size() >= 2, "dmuon: Muon needs at least 2 dimensions, not shape ",
                    shape);
  if (shape.size() == 3) return {shape[0], shape[1], shape[2]};
  MatrixView view{1, shape[0], 1};
  for (const int64_t size : shape.slice(1)) view.n *= size;
  return view;
}

void checkMuonHyper(const MuonHyper& hyper) {
  TORCH_CHECK_VALUE(std::isfinite(hyper.lr) && hyper.lr >= 0,
                    "dmuon: Muon: lr must be finite and >= 0, not ", hyper.lr);
  TORCH_CHECK_VALUE(hyper.momentum >= 0 && hyper.momentum < 1,
                    "dmuon: Muon: momentum must lie in [0, 1), not ", hyper.momentum);
  TORCH_CHECK_VALUE(std::isfinite(hyper.weight_decay) && hyper.weight_decay >= 0,
                    "dmuon: Muon: weight_decay must be finite and >= 0, not ", hyper.weight_decay);
  checkNewtonSchulzConfig(hyper.newton_schulz, hyper.newton_schulz.dtype.value_or(at::kFloat));
}

int64_t muonUpdate(const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& gradients,
                   const std::vector<at::Tensor>& momenta, const MuonHyper& hyper) {
  checkMuonHyper(hyper);
  TORCH_CHECK(weights.size() == gradients.size() && weights.size() == momenta.size(),
              "dmuon: muonUpdate got ", weights.size(), " weights, ", gradients.size(),
              " gradients and ", momenta.size(), " momenta");
  for (size_t i = 0; i < weights.size(); ++i) {
    checkTensors(weights[i], gradients[i], momenta[i], i);
  }
  const at::NoGradGuard no_grad;
  int64_t matrices = 0;
  for (const Indices& group : groupForBatching(weights)) {
    std::vector<at::Tensor> directions;
    for (const size_t i : group) {
      directions.push_back(direction(gradients[i], momenta[i], hyper));
      matrices += matrixView(weights[i].sizes()).batch;
    }
    if (group.size() == 1) {
      descend(weights[group[0]], newtonSchulz(directions[0], hyper.newton_schulz), hyper);
      continue;
    }
    const at::Tensor batch = newtonSchulz(at::stack(directions), hyper.newton_schulz);
    for (size_t k = 0; k < group.size(); ++k) {
      descend(weights[group[k]], batch.select(0, static_cast<int64_t>(k)), hyper);
    }
  }
  return matrices;
}

}  // namespace dmuon::optim
