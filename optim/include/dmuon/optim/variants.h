// Variants of Muon that scale the orthogonalized update by its own second moment. X is one matrix
// (m, n), or each matrix of a stack (E, m, n) by itself; v starts at zero.
//
//   NorMuon (Li et al., "NorMuon: Making Muon more efficient and scalable", arXiv 2510.05491)
//     v_i <- beta2 v_i + (1 - beta2) mean_j X_ij^2            one value per row
//     X'  <- X_ij / (sqrt(v_i) + eps)
//     X   <- X' |X|_F / |X'|_F                                the update keeps its norm
//   The rescaling is that of the authors' implementation; Algorithm 1 of the paper scales to
//   0.2 sqrt(m n), which is the same with LrAdjustment::kMatchRmsAdamW where X is orthogonal.
//
//   AdaMuon (Si et al., "AdaMuon: Adaptive Muon Optimizer", arXiv 2507.11005)
//     X   <- orthogonalize(sign(u))                           signs, not the direction itself
//     v   <- beta2 v + (1 - beta2) X^2                        one value per element
//     X'  <- X / (sqrt(v) + eps)
//     X   <- X' sqrt(min(m, n)) / |X'|_F                      the norm of an orthogonal matrix
//   With LrAdjustment::kMatchRmsAdamW that is the paper's 0.2 sqrt(m n) / |X'|_F.
//
// There is no bias correction: a factor common to all of v cancels in the rescaling. eps = 1e-8.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include <dmuon/optim/blocks.h>

namespace dmuon::optim {

enum class MuonVariant { kNone, kNorMuon, kAdaMuon };
// "none", "normuon", "adamuon"; throws c10::Error otherwise.
MuonVariant variantFromName(const std::string& name);

// The shape of v for a parameter: kNorMuon (m, k) or (E, m, k) with k = 1, or the number of blocks
// if they cut the rows (each block's part of a row has its own value); kAdaMuon the parameter's;
// kNone: empty.
std::vector<int64_t> secondMomentShape(MuonVariant variant, at::IntArrayRef shape,
                                       const Blocks& blocks);

// v's part for each block, as views; undefined tensors for kNone.
std::vector<at::Tensor> secondMomentViews(MuonVariant variant, const at::Tensor& second_moment,
                                          at::IntArrayRef shape, const Blocks& blocks);

// What is orthogonalized in the place of the direction u.
at::Tensor variantInput(MuonVariant variant, const at::Tensor& u);

// Advances v (fp32 or fp64, one block's part) and returns the scaled X in v's type. x: (m, n) or
// (E, m, n), contiguous. Zeros stay zeros. For kNone returns x.
at::Tensor applyVariant(MuonVariant variant, const at::Tensor& x, const at::Tensor& second_moment,
                        double beta2);

}  // namespace dmuon::optim
