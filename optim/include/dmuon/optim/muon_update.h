// One Muon step on whole matrices, as torch.optim.Muon defines it:
//
//   buf <- buf + (1 - mu)(g - buf)
//   u   <- g + mu (buf - g)  (nesterov)      u <- buf  (otherwise)
//   X   <- orthogonalize(u)
//   W   <- W (1 - lr wd)
//   W   <- W - lr ratio(m, n) X
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include <dmuon/optim/newton_schulz.h>

namespace dmuon::optim {

// ratio(m, n): kOriginal sqrt(max(1, m/n)), kMatchRmsAdamW 0.2 sqrt(max(m, n)),
// kSpectralUnclamped sqrt(m/n), kNone 1.
enum class LrAdjustment { kOriginal, kMatchRmsAdamW, kSpectralUnclamped, kNone };
// "original", "match_rms_adamw", "spectral_unclamped", "none"; throws c10::Error otherwise.
LrAdjustment lrAdjustmentFromName(const std::string& name);
double lrRatio(LrAdjustment adjustment, int64_t m, int64_t n);

// How a parameter is seen as matrices: (m, n) is itself; (E, m, n) is E matrices; with 4 or more
// dimensions (a convolution) m = size(0), n = the product of the rest. Fewer than 2: c10::Error.
struct MatrixView {
  int64_t batch = 1, m = 0, n = 0;
};
MatrixView matrixView(at::IntArrayRef shape);

struct MuonHyper {
  double lr = 0.02;
  double momentum = 0.95;
  bool nesterov = true;
  double weight_decay = 0.0;
  LrAdjustment adjust_lr = LrAdjustment::kOriginal;
  NewtonSchulzConfig newton_schulz;
};

// Throws c10::Error naming the option and its value if one is out of range (lr < 0, ...).
void checkMuonHyper(const MuonHyper& hyper);

// Updates weights and momenta in place; gradients are read only. Equal lengths; per index equal
// shapes. weights and momenta: fp32 or fp64 (the master copies); gradients: any floating dtype.
// Empty tensors are skipped. Returns the number of orthogonalized matrices.
int64_t muonUpdate(const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& gradients,
                   const std::vector<at::Tensor>& momenta, const MuonHyper& hyper);

}  // namespace dmuon::optim
