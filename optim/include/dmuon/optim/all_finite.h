// A check of gradients before a step.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace dmuon::optim {

// Whether no tensor holds a NaN or an infinity. fp16, bf16, fp32 or fp64, of any shape and device;
// tensors on a GPU are read there, and waited for once per device.
bool allFinite(const std::vector<at::Tensor>& tensors);

}  // namespace dmuon::optim
