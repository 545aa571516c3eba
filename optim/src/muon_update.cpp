#include <dmuon/optim/muon_update.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/lerp.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <utility>

#include "newton_schulz_engine.h"
#include "orthogonalize_all.h"

namespace dmuon::optim {
namespace {

// Matrices of equal shape go through one batched iteration on a GPU, up to this many bytes of
// input.
constexpr int64_t kMaxBatchBytes = int64_t{256} << 20;

const Blocks& blocksOf(const MuonParameter& p, const MuonHyper& hyper) {
  return p.blocks.sizes.empty() ? hyper.blocks : p.blocks;
}

bool isWide(const at::Tensor& t) {
  return t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble;
}

void checkParameter(const MuonParameter& p, const MuonHyper& hyper, size_t index) {
  const at::Tensor &weight = p.weight, &gradient = p.gradient, &momentum = p.momentum;
  TORCH_CHECK(isWide(weight) && (isWide(momentum) || momentum.scalar_type() == at::kBFloat16),
              "dmuon: muonUpdate: weight and momentum ", index, " must be fp32 or fp64, not ",
              weight.scalar_type(), " and ", momentum.scalar_type(),
              "; a momentum may be bf16, too");
  TORCH_CHECK(at::isFloatingType(gradient.scalar_type()), "dmuon: muonUpdate: gradient ", index,
              " is of ", gradient.scalar_type());
  TORCH_CHECK(weight.sizes() == gradient.sizes() && weight.sizes() == momentum.sizes(),
              "dmuon: muonUpdate: weight, gradient and momentum ", index, " have shapes ",
              weight.sizes(), ", ", gradient.sizes(), " and ", momentum.sizes());
  TORCH_CHECK(weight.device() == gradient.device() && weight.device() == momentum.device(),
              "dmuon: muonUpdate: weight, gradient and momentum ", index, " are on ",
              weight.device(), ", ", gradient.device(), " and ", momentum.device());
  if (weight.numel() == 0) return;
  checkBlocks(blocksOf(p, hyper), weight.sizes());
  if (hyper.variant == MuonVariant::kNone) return;
  const auto shape = secondMomentShape(hyper.variant, weight.sizes(), blocksOf(p, hyper));
  const at::Tensor& moment = p.second_moment;
  TORCH_CHECK(moment.defined(), "dmuon: muonUpdate: parameter ", index, " of shape ",
              weight.sizes(), " has no second moment, which the variant needs");
  TORCH_CHECK(moment.sizes() == at::IntArrayRef(shape) && isWide(moment) &&
                  moment.device() == weight.device(),
              "dmuon: muonUpdate: the second moment of parameter ", index, " of shape ",
              weight.sizes(), " must be fp32 or fp64, of shape ", at::IntArrayRef(shape), " on ",
              weight.device(), ", not ", moment.scalar_type(), ", ", moment.sizes(), " on ",
              moment.device());
}

// Advances the momentum and returns the direction to orthogonalize, in the gradient's shape; on the
// CPU it may lie in the workspace.
at::Tensor direction(const MuonParameter& p, const MuonHyper& hyper,
                     NewtonSchulzWorkspace& workspace) {
  const at::Tensor& kept = p.momentum;
  const bool rounded = kept.scalar_type() == at::kBFloat16;
  const at::Tensor momentum = rounded ? kept.to(at::kFloat) : kept;
  const at::Tensor g = p.gradient.detach().to(momentum.scalar_type());
  momentum.lerp_(g, 1.0 - hyper.momentum);
  if (rounded) roundStochastically(momentum, kept, {hyper.seed, p.index, p.step});
  at::Tensor u = momentum;
  if (hyper.nesterov) {
    u = g.is_cpu() ? workspace.take(kDirection, g.sizes(), g.options()) : at::empty_like(g);
    at::lerp_out(u, g, momentum, hyper.momentum);
  }
  return variantInput(hyper.variant, u);
}

void decay(const at::Tensor& weight, const at::Tensor& x, const MuonHyper& hyper) {
  if (hyper.weight_decay == 0) return;
  const double rate = hyper.lr * hyper.weight_decay;
  if (hyper.cautious) {
    const at::Tensor agree = x.mul(weight).ge_(0);  // 1 or 0
    weight.addcmul_(weight, agree, -rate);
  } else {
    weight.mul_(1.0 - rate);
  }
}

// weight: one block, in its own shape.
void descend(const at::Tensor& weight, const at::Tensor& x, const MuonHyper& hyper) {
  const MatrixView view = matrixView(weight.sizes());
  const at::Tensor shaped = x.view(weight.sizes());
  decay(weight, shaped, hyper);
  weight.add_(shaped, -hyper.lr * lrRatio(hyper.adjust_lr, view.m, view.n));
}

using Indices = std::vector<size_t>;

// One index a group on CPU; on other devices parameters of equal shape together, in order of first
// appearance.
std::vector<Indices> groupForBatching(const std::vector<MuonParameter>& parameters) {
  std::vector<Indices> groups;
  std::map<std::tuple<std::string, at::ScalarType, std::vector<int64_t>>, size_t> open;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& w = parameters[i].weight;
    if (w.numel() == 0) continue;
    if (w.is_cpu() || matrixView(w.sizes()).batch > 1) {
      groups.push_back({i});
      continue;
    }
    const auto key = std::make_tuple(w.device().str(), w.scalar_type(), w.sizes().vec());
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

// What is left to do with one piece once it is orthogonalized.
struct Target {
  at::Tensor weight, second_moment;  // the block's part
};

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

void checkMuonHyper(const MuonHyper& hyper) {
  TORCH_CHECK_VALUE(std::isfinite(hyper.lr) && hyper.lr >= 0,
                    "dmuon: Muon: lr must be finite and >= 0, not ", hyper.lr);
  TORCH_CHECK_VALUE(hyper.momentum >= 0 && hyper.momentum < 1,
                    "dmuon: Muon: momentum must lie in [0, 1), not ", hyper.momentum);
  TORCH_CHECK_VALUE(std::isfinite(hyper.weight_decay) && hyper.weight_decay >= 0,
                    "dmuon: Muon: weight_decay must be finite and >= 0, not ", hyper.weight_decay);
  TORCH_CHECK_VALUE(hyper.beta2 >= 0 && hyper.beta2 < 1,
                    "dmuon: Muon: beta2 must lie in [0, 1), not ", hyper.beta2);
  checkNewtonSchulzConfig(hyper.newton_schulz, hyper.newton_schulz.dtype.value_or(at::kFloat));
}

int64_t muonUpdate(const std::vector<MuonParameter>& parameters, const MuonHyper& hyper) {
  NewtonSchulzWorkspace workspace;
  return muonUpdate(parameters, hyper, workspace);
}

int64_t muonUpdate(const std::vector<MuonParameter>& parameters, const MuonHyper& hyper,
                   NewtonSchulzWorkspace& workspace) {
  checkMuonHyper(hyper);
  for (size_t i = 0; i < parameters.size(); ++i) checkParameter(parameters[i], hyper, i);
  const at::NoGradGuard no_grad;
  int64_t matrices = 0;
  for (const Indices& group : groupForBatching(parameters)) {
    std::vector<at::Tensor> pieces;
    std::vector<Target> targets;
    for (const size_t i : group) {
      const MuonParameter& p = parameters[i];
      const Blocks& blocks = blocksOf(p, hyper);
      const auto weights = blockViews(p.weight.detach(), blocks);
      const auto moments =
          secondMomentViews(hyper.variant, p.second_moment, p.weight.sizes(), blocks);
      const auto directions = blockViews(direction(p, hyper, workspace), blocks);
      for (size_t b = 0; b < directions.size(); ++b) {
        pieces.push_back(asMatrices(directions[b]));
        targets.push_back({weights[b], moments[b]});
        matrices += matrixView(directions[b].sizes()).batch;
      }
    }
    orthogonalizeAll(pieces, hyper.newton_schulz, workspace, [&](size_t k, const at::Tensor& x) {
      const auto& [weight, second_moment] = targets[k];
      descend(weight, applyVariant(hyper.variant, x, second_moment, hyper.beta2), hyper);
    });
  }
  return matrices;
}

int64_t muonUpdate(const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& gradients,
                   const std::vector<at::Tensor>& momenta, const MuonHyper& hyper) {
  TORCH_CHECK(weights.size() == gradients.size() && weights.size() == momenta.size(),
              "dmuon: muonUpdate got ", weights.size(), " weights, ", gradients.size(),
              " gradients and ", momenta.size(), " momenta");
  std::vector<MuonParameter> parameters(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    parameters[i].weight = weights[i];
    parameters[i].gradient = gradients[i];
    parameters[i].momentum = momenta[i];
  }
  return muonUpdate(parameters, hyper);
}

}  // namespace dmuon::optim
