// Scaling of matrices to Frobenius norm 1 before the iteration.
#pragma once

#include <ATen/core/Tensor.h>

namespace dmuon::optim {

// g: (m, n) or (batch, m, n), floating, any strides. Returns a new contiguous tensor of that shape
// in `dtype`, every matrix divided by its norm. Zero matrices give zeros, non-finite ones NaN
// throughout. The quotient is taken in fp32 or wider and rounded once. Takes the way that fits the
// device:
at::Tensor normalizeMatrices(const at::Tensor& g, at::ScalarType dtype);

// Plain loops, fp64 throughout; CPU tensors only.
at::Tensor normalizeOnCpu(const at::Tensor& g, at::ScalarType dtype);
// ATen operations only: any device, and never a value that the host waits for.
at::Tensor normalizeOnDevice(const at::Tensor& g, at::ScalarType dtype);

}  // namespace dmuon::optim
