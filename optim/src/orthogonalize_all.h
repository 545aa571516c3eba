// Many matrices in one go. The results are those of newtonSchulz on each.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include <dmuon/optim/newton_schulz.h>

namespace dmuon::optim {

// pieces: (m, n) or (E, m, n), any strides, all on one device. Calls use(k, X) for each in turn, X
// contiguous, of piece k's shape and valid until use() returns. On the CPU one after the other in
// the workspace, where a batched product would be slower; on other devices in batches.
void orthogonalizeAll(const std::vector<at::Tensor>& pieces, const NewtonSchulzConfig& config,
                      NewtonSchulzWorkspace& workspace,
                      const std::function<void(size_t, const at::Tensor&)>& use);

// The second way: pieces of equal (m, n) together, stacks of them included.
std::vector<at::Tensor> orthogonalizeInBatches(const std::vector<at::Tensor>& pieces,
                                               const NewtonSchulzConfig& config);

}  // namespace dmuon::optim
