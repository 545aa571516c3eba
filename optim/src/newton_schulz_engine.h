// The one engine behind both forms.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <dmuon/optim/coefficients.h>

namespace dmuon::optim {

// x: (m, n) or (batch, m, n), contiguous, normalised; overwritten. Returns a contiguous tensor of
// the same shape, which may or may not be x. Gram steps with the given restarts; one before every
// step is the direct form. ATen operations only, so a batch works on any device.
at::Tensor iterateGram(at::Tensor x, const std::vector<Coefficients>& steps,
                       const std::vector<int64_t>& restarts);

}  // namespace dmuon::optim
