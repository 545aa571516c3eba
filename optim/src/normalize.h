// Scaling of matrices to Frobenius norm 1 before the iteration.
#pragma once

#include <ATen/core/Tensor.h>

namespace dmuon::optim {

// g: (m, n) or (batch, m, n), floating, any strides. out: contiguous, of that shape, in the dtype
// of the iteration: every matrix divided by its norm. Zero matrices give zeros, non-finite ones NaN
// throughout. The quotient is taken in fp32 or wider and rounded once. Takes the way that fits the
// device:
void normalizeMatrices(const at::Tensor& g, at::Tensor& out);

// Plain loops, fp64 throughout; CPU tensors only.
void normalizeOnCpu(const at::Tensor& g, at::Tensor& out);
// ATen operations only: any device, and never a value that the host waits for.
void normalizeOnDevice(const at::Tensor& g, at::Tensor& out);

}  // namespace dmuon::optim
