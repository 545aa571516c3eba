// Which matrices a parameter holds: one, a stack of them, or several fused into one weight.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace dmuon::optim {

// How a parameter is seen as matrices: (m, n) is itself; (E, m, n) is E matrices; with 4 or more
// dimensions (a convolution) m = size(0), n = the product of the rest. Fewer than 2: c10::Error.
struct MatrixView {
  int64_t batch = 1, m = 0, n = 0;
};
MatrixView matrixView(at::IntArrayRef shape);

// A fused weight (Q, K and V; gate and up; one block per head), cut along `dim` into blocks of
// `sizes`: each block is a matrix of its own, with its own orthogonalization and its own learning
// rate adjustment. Of a stack (E, m, n), every one of the E matrices is cut. Without sizes the
// parameter is one block.
struct Blocks {
  int64_t dim = 0;  // negative: from the end
  std::vector<int64_t> sizes;
  bool operator==(const Blocks&) const = default;
};

// Throws c10::Error with the values unless the sizes are positive and add up to shape[dim]. `dim`
// must not be that of a stack's matrices, 0 of (E, m, n), which are separate anyway.
void checkBlocks(const Blocks& blocks, at::IntArrayRef shape);

// The blocks of a tensor, in order, as views of it; the tensor itself without sizes.
std::vector<at::Tensor> blockViews(const at::Tensor& tensor, const Blocks& blocks);

// (m, n) or (E, m, n), in logical order: a channels_last convolution gives the same matrix as a
// contiguous one. A view where the strides allow it, else a copy.
at::Tensor asMatrices(const at::Tensor& block);

}  // namespace dmuon::optim
