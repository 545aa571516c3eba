// The one engine behind both forms.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <dmuon/optim/newton_schulz.h>

namespace dmuon::optim {

// Places in a NewtonSchulzWorkspace.
enum WorkspacePlace : size_t { kX, kOther, kR, kP, kQ, kT, kAll, kDirection };

// x: (m, n) or (batch, m, n), contiguous, normalised; overwritten. Returns a contiguous tensor of
// the same shape, which is x or lies in the workspace. Gram steps with the given restarts; one
// before every step is the direct form. ATen operations only, so a batch works on any device.
at::Tensor iterateGram(at::Tensor x, const std::vector<Coefficients>& steps,
                       const std::vector<int64_t>& restarts, NewtonSchulzWorkspace& workspace);

}  // namespace dmuon::optim
