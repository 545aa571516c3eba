// What a collective on CPU tensors needs around a call to Gloo, which takes tensors for their raw
// memory and knows neither AVG nor PREMUL_SUM.
//
// Usage: pass every tensor through in(), out() or inOut() and hand the results to the inner
// backend; when that has completed, run finish(). Does nothing and costs nothing for plain tensors
// and SUM.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>
#include <utility>
#include <vector>

namespace dmuon {

// What to do to a sum once: nothing, or multiply, or divide.
struct Scale {
  enum Kind { none, multiply, divide } kind = none;
  double by = 1.0;
};

class HostStaging {
 public:
  // `name` opens error texts.
  explicit HostStaging(std::string name) : name_(std::move(name)) {}

  at::Tensor in(const at::Tensor& tensor) const;
  at::Tensor out(const at::Tensor& tensor);
  at::Tensor inOut(const at::Tensor& tensor);
  std::vector<at::Tensor> in(const std::vector<at::Tensor>& tensors) const;
  std::vector<at::Tensor> out(const std::vector<at::Tensor>& tensors);
  std::vector<at::Tensor> inOut(const std::vector<at::Tensor>& tensors);

  // Turns AVG and PREMUL_SUM into SUM and returns what is left to do. Refuses both for dtypes other
  // than fp16, bf16, fp32 and fp64. Other operations stay as they are.
  Scale takeScale(c10d::ReduceOp& op, int size, const at::Tensor& tensor) const;
  // `tensor`: one that in(), out() or inOut() returned, or scratch.
  void scaleAtEnd(const at::Tensor& tensor, const Scale& scale);
  // At the end, after scaling: to.copy_(from).
  void copyAtEnd(at::Tensor to, at::Tensor from);

  bool needsEnd() const { return !scaled_.empty() || !copies_.empty(); }
  void finish() const;

  const std::string& name() const { return name_; }

 private:
  void refuseOverlap(const at::Tensor& tensor) const;

  std::string name_;
  std::vector<std::pair<at::Tensor, Scale>> scaled_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

}  // namespace dmuon
