// One Muon step on whole matrices, as torch.optim.Muon defines it:
//
//   buf <- buf + (1 - mu)(g - buf)
//   u   <- g + mu (buf - g)  (nesterov)      u <- buf  (otherwise)
//   X   <- orthogonalize(u)
//   W   <- W (1 - lr wd)
//   W   <- W - lr ratio(m, n) X
//
// Options beyond that, all off by default: a parameter cut into blocks (blocks.h), variants that
// scale X (variants.h), a momentum in bf16 (stochastic_rounding.h), and cautious weight decay (Chen
// et al., "Cautious Weight Decay", arXiv 2510.12402): W_ij decays only where X_ij W_ij >= 0, that
// is where the step, too, takes it towards zero, or leaves it.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include <dmuon/optim/blocks.h>
#include <dmuon/optim/newton_schulz.h>
#include <dmuon/optim/stochastic_rounding.h>
#include <dmuon/optim/variants.h>

namespace dmuon::optim {

// ratio(m, n): kOriginal sqrt(max(1, m/n)), kMatchRmsAdamW 0.2 sqrt(max(m, n)),
// kSpectralUnclamped sqrt(m/n), kNone 1.
enum class LrAdjustment { kOriginal, kMatchRmsAdamW, kSpectralUnclamped, kNone };
// "original", "match_rms_adamw", "spectral_unclamped", "none"; throws c10::Error otherwise.
LrAdjustment lrAdjustmentFromName(const std::string& name);
double lrRatio(LrAdjustment adjustment, int64_t m, int64_t n);

struct MuonHyper {
  double lr = 0.02;
  double momentum = 0.95;
  bool nesterov = true;
  double weight_decay = 0.0;
  LrAdjustment adjust_lr = LrAdjustment::kOriginal;
  NewtonSchulzConfig newton_schulz;
  MuonVariant variant = MuonVariant::kNone;
  double beta2 = 0.95;    // of the variant's second moment
  bool cautious = false;  // weight decay
  uint64_t seed = 0;      // of bf16 momenta
  Blocks blocks;          // of parameters that bring none of their own
};

// Throws c10::Error naming the option and its value if one is out of range (lr < 0, ...).
void checkMuonHyper(const MuonHyper& hyper);

// One parameter in one step. Equal shapes and devices, any strides.
struct MuonParameter {
  at::Tensor weight;    // fp32 or fp64 (the master copy); updated in place
  at::Tensor gradient;  // any floating dtype; read only
  // fp32, fp64, or bf16: then fp32 in the step, and rounded stochastically when stored, with the
  // random stream (MuonHyper::seed, index, step). Updated in place.
  at::Tensor momentum;
  at::Tensor second_moment;  // fp32 or fp64, of secondMomentShape; undefined without a variant
  Blocks blocks;             // none: MuonHyper's
  uint32_t index = 0;
  uint64_t step = 0;
};

// Updates weights, momenta and second moments. Empty tensors are skipped. Returns the number of
// orthogonalized matrices.
int64_t muonUpdate(const std::vector<MuonParameter>& parameters, const MuonHyper& hyper);

// The same in memory that is kept from step to step: on the CPU, plain Muon on fp32 gradients
// allocates nothing once the workspace has seen the largest matrix. On other devices, whose
// allocators keep memory anyway and lend it to forward and backward, the workspace stays empty.
int64_t muonUpdate(const std::vector<MuonParameter>& parameters, const MuonHyper& hyper,
                   NewtonSchulzWorkspace& workspace);

// The same for plain parameters, without a variant: lists of equal lengths.
int64_t muonUpdate(const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& gradients,
                   const std::vector<at::Tensor>& momenta, const MuonHyper& hyper);

}  // namespace dmuon::optim
