#include "host_staging.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "reduce_kernels.h"

namespace dmuon {
namespace {

// Whether the tensor is what its memory says, element by element.
bool isPlain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor scratchLike(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.dtype()));
}

template <typename Convert>
std::vector<at::Tensor> all(const std::vector<at::Tensor>& tensors, Convert&& convert) {
  std::vector<at::Tensor> converted;
  converted.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) converted.push_back(convert(tensor));
  return converted;
}

}  // namespace

at::Tensor HostStaging::in(const at::Tensor& tensor) const {
  if (tensor.layout() != c10::kStrided || isPlain(tensor)) return tensor;
  at::NoGradGuard no_grad;
  return scratchLike(tensor).copy_(tensor);
}

at::Tensor HostStaging::out(const at::Tensor& tensor) {
  if (tensor.layout() != c10::kStrided || isPlain(tensor)) return tensor;
  at::Tensor scratch = scratchLike(tensor);
  copyAtEnd(tensor, scratch);
  return scratch;
}

at::Tensor HostStaging::inOut(const at::Tensor& tensor) {
  at::Tensor scratch = out(tensor);
  at::NoGradGuard no_grad;
  if (!scratch.is_same(tensor)) scratch.copy_(tensor);
  return scratch;
}

std::vector<at::Tensor> HostStaging::in(const std::vector<at::Tensor>& tensors) const {
  return all(tensors, [this](const at::Tensor& tensor) { return in(tensor); });
}

std::vector<at::Tensor> HostStaging::out(const std::vector<at::Tensor>& tensors) {
  return all(tensors, [this](const at::Tensor& tensor) { return out(tensor); });
}

std::vector<at::Tensor> HostStaging::inOut(const std::vector<at::Tensor>& tensors) {
  return all(tensors, [this](const at::Tensor& tensor) { return inOut(tensor); });
}

void HostStaging::refuseOverlap(const at::Tensor& tensor) const {
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, name_, ": the tensor ",
                    tensor.scalar_type(), tensor.sizes(), " with strides ", tensor.strides(),
                    " is written to, but several of its elements share one place in memory");
}

Scale HostStaging::takeScale(c10d::ReduceOp& op, int size, const at::Tensor& tensor) const {
  const bool average = op == c10d::ReduceOp::AVG;
  if (!average && !(op == c10d::ReduceOp::PREMUL_SUM)) return {};
  TORCH_CHECK_VALUE(isReducible(tensor.scalar_type()) && tensor.layout() == c10::kStrided, name_,
                    ": ", average ? "AVG" : "PREMUL_SUM",
                    " is defined for dense Half, BFloat16, Float and Double, but the tensor ",
                    tensor.scalar_type(), tensor.sizes(), " was given. Use SUM for integers");
  Scale scale{Scale::divide, static_cast<double>(size)};
  if (!average) {
    const auto* supplement =
        dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    TORCH_CHECK_VALUE(supplement != nullptr, name_, ": PREMUL_SUM was given without its factor");
    scale.kind = Scale::multiply;
    scale.by = supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>()
                                                   : supplement->double_factor;
  }
  op = c10d::ReduceOp(c10d::ReduceOp::SUM);
  return scale;
}

void HostStaging::scaleAtEnd(const at::Tensor& tensor, const Scale& scale) {
  if (scale.kind != Scale::none) scaled_.emplace_back(tensor, scale);
}

void HostStaging::copyAtEnd(at::Tensor to, at::Tensor from) {
  refuseOverlap(to);
  copies_.emplace_back(std::move(to), std::move(from));
}

void HostStaging::finish() const {
  at::NoGradGuard no_grad;
  for (const auto& [tensor, scale] : scaled_) {
    const auto apply = scale.kind == Scale::multiply ? multiplyInPlace : divideInPlace;
    apply(tensor.scalar_type(), tensor.mutable_data_ptr(), tensor.numel(), scale.by);
  }
  for (const auto& [to, from] : copies_) to.copy_(from);
}

}  // namespace dmuon
