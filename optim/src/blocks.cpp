#include <dmuon/optim/blocks.h>

#include <c10/util/Exception.h>

#include <numeric>

namespace dmuon::optim {

MatrixView matrixView(at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(shape.size() >= 2, "dmuon: Muon needs at least 2 dimensions, not shape ",
                    shape);
  if (shape.size() == 3) return {shape[0], shape[1], shape[2]};
  MatrixView view{1, shape[0], 1};
  for (const int64_t size : shape.slice(1)) view.n *= size;
  return view;
}

void checkBlocks(const Blocks& blocks, at::IntArrayRef shape) {
  if (blocks.sizes.empty()) return;
  const auto dims = static_cast<int64_t>(shape.size());
  const at::IntArrayRef sizes(blocks.sizes);
  TORCH_CHECK_VALUE(dims >= 2 && blocks.dim >= -dims && blocks.dim < dims,
                    "dmuon: blocks along dimension ", blocks.dim, " of a parameter of shape ",
                    shape);
  const int64_t dim = blocks.dim < 0 ? blocks.dim + dims : blocks.dim;
  TORCH_CHECK_VALUE(dims != 3 || dim != 0, "dmuon: blocks along dimension 0 of a parameter of ",
                    "shape ", shape, ": its ", shape[0],
                    " matrices are separate anyway; give dimension 1 or 2");
  for (const int64_t size : sizes) {
    TORCH_CHECK_VALUE(size > 0, "dmuon: block sizes must be positive, not ", sizes);
  }
  const int64_t sum = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  TORCH_CHECK_VALUE(sum == shape[dim], "dmuon: blocks of sizes ", sizes, " add up to ", sum,
                    ", but dimension ", dim, " of the parameter of shape ", shape, " is ",
                    shape[dim]);
}

std::vector<at::Tensor> blockViews(const at::Tensor& tensor, const Blocks& blocks) {
  if (blocks.sizes.empty()) return {tensor};
  return tensor.split_with_sizes(blocks.sizes, blocks.dim);
}

at::Tensor asMatrices(const at::Tensor& block) {
  if (block.dim() == 3) return block;
  const MatrixView view = matrixView(block.sizes());
  return block.reshape({view.m, view.n});
}

}  // namespace dmuon::optim
