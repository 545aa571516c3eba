// Products of matrices that are known to be symmetric, at little more than half the work.
//
// On the CPU the result is computed in strips of rows, each up to the diagonal by one product of
// the BLAS, and what lies above is copied. Elsewhere, and in half precision, it is a full product,
// unless a kernel has been set (setSymmetricProduct in newton_schulz.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace dmuon::optim {

// out = beta c + alpha a b. out, c: (s, s); a: (s, k); b: (k, s), or batches of them on devices
// other than the CPU, where only out must be contiguous. The result must be symmetric up to
// rounding. `out` is none of the others; with beta = 0, c isn't read.
void symmetricProduct(at::Tensor& out, double beta, const at::Tensor& c, double alpha,
                      const at::Tensor& a, const at::Tensor& b);

// The same without a kernel of somebody else's.
void builtInSymmetricProduct(at::Tensor& out, double beta, const at::Tensor& c, double alpha,
                             const at::Tensor& a, const at::Tensor& b);

}  // namespace dmuon::optim
