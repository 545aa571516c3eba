// Many matrices in one go. The results are those of newtonSchulz on each.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include <dmuon/optim/newton_schulz.h>

namespace dmuon::optim {

// pieces: (m, n) or (E, m, n), any strides. Returns contiguous tensors of the same shapes. On the
// CPU one after the other, where a batched product would be slower; on other devices in batches.
std::vector<at::Tensor> orthogonalizeAll(const std::vector<at::Tensor>& pieces,
                                         const NewtonSchulzConfig& config);

// The second way: pieces of equal (m, n) together, stacks of them included.
std::vector<at::Tensor> orthogonalizeInBatches(const std::vector<at::Tensor>& pieces,
                                               const NewtonSchulzConfig& config);

}  // namespace dmuon::optim
