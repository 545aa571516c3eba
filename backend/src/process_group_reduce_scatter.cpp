// reduce_scatter on CPU tensors: an all-reduce of which each rank keeps its part. Gloo has no other
// way either, but its own lacks AVG and a future in some versions of torch.
#include <dmuon/backend/process_group_dmuon.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "gloo_peers.h"
#include "host_staging.h"
#include "work_chain.h"

namespace dmuon {
namespace {

using Tensors = std::vector<at::Tensor>;
using c10d::OpType;

// All ranks' parts one after the other in scratch, and this rank's place in it.
struct Parts {
  at::Tensor scratch;
  at::Tensor mine;
};

Parts gatherParts(const std::string& name, const at::Tensor& output, const Tensors& inputs,
                  int rank) {
  at::NoGradGuard no_grad;
  int64_t numel = 0;
  for (const at::Tensor& input : inputs) {
    TORCH_CHECK_VALUE(input.scalar_type() == output.scalar_type(), name, ": an input is ",
                      input.scalar_type(), " and its output is ", output.scalar_type());
    numel += input.numel();
  }
  Parts parts;
  parts.scratch = at::empty({numel}, at::TensorOptions().dtype(output.dtype()));
  int64_t begin = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    at::Tensor part = parts.scratch.narrow(0, begin, inputs[i].numel());
    part.view(inputs[i].sizes()).copy_(inputs[i]);
    if (static_cast<int>(i) == rank) parts.mine = part;
    begin += inputs[i].numel();
  }
  return parts;
}

}  // namespace

// inputs[i]: the parts of output i for every rank, or one tensor that holds them all.
WorkPtr ProcessGroupDMuon::reduceScatterOnHost(const char* operation, OpType type,
                                               const Tensors& outputs,
                                               const std::vector<Tensors>& inputs,
                                               const c10d::ReduceScatterOptions& opts) {
  HostStaging staging(nameOf(operation));
  const std::string& name = staging.name();
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), name, ": there are ", outputs.size(),
                    " outputs but ", inputs.size(), " inputs");
  std::vector<Tensors> sums;
  c10d::AllreduceOptions sum;
  sum.timeout = opts.timeout;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& output = outputs[i];
    Parts parts = gatherParts(name, output, inputs[i], rank_);
    if (inputs[i].size() == 1) {
      TORCH_CHECK_VALUE(parts.scratch.numel() == output.numel() * size_, name, ": the input ",
                        inputs[i][0].sizes(), " is not ", size_, " times the output ",
                        output.sizes());
      parts.mine = parts.scratch.narrow(0, rank_ * output.numel(), output.numel());
    }
    TORCH_CHECK_VALUE(parts.mine.defined() && parts.mine.numel() == output.numel(), name,
                      ": output ", i, " is ", output.sizes(), ", but of its ", inputs[i].size(),
                      " inputs the one for this rank has ",
                      parts.mine.defined() ? parts.mine.numel() : 0, " elements");
    sum.reduceOp = opts.reduceOp;
    staging.scaleAtEnd(parts.mine, staging.takeScale(sum.reduceOp, size_, output));
    staging.copyAtEnd(output, parts.mine.view(output.sizes()));
    sums.push_back({parts.scratch});
  }
  std::vector<WorkPtr> works;
  {
    std::lock_guard<std::mutex> lock(cpu_->submission);
    for (Tensors& tensors : sums) works.push_back(cpu_->backend->allreduce(tensors, sum));
  }
  auto rest = std::make_shared<HostStaging>(std::move(staging));
  ChainInfo info{rank_, type, sequence_, rest->name(), outputs};
  return submitted(afterAll(works, std::move(info), [rest] { rest->finish(); }));
}

WorkPtr ProcessGroupDMuon::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                          const c10d::ReduceScatterOptions& opts) {
  c10d::Backend& backend = collective("reduce_scatter", outputs, inputs);
  if (!onHost(backend)) return backend.reduce_scatter(outputs, inputs, opts);
  for (const Tensors& parts : inputs) {
    TORCH_CHECK_VALUE(static_cast<int>(parts.size()) == size_, nameOf("reduce_scatter"),
                      ": takes one input per rank, ", size_, ", but got ", parts.size());
  }
  return reduceScatterOnHost("reduce_scatter", OpType::REDUCE_SCATTER, outputs, inputs, opts);
}

WorkPtr ProcessGroupDMuon::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& opts) {
  c10d::Backend& backend = collective("_reduce_scatter_base", {output, input});
  if (!onHost(backend)) return backend._reduce_scatter_base(output, input, opts);
  return reduceScatterOnHost("_reduce_scatter_base", OpType::_REDUCE_SCATTER_BASE, {output},
                             {{input}}, opts);
}

WorkPtr ProcessGroupDMuon::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::ReduceScatterOptions& opts) {
  c10d::Backend& backend = collective("reduce_scatter_tensor_coalesced", outputs, {inputs});
  if (!onHost(backend)) return backend.reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  std::vector<Tensors> lists;
  for (const at::Tensor& input : inputs) lists.push_back({input});
  return reduceScatterOnHost("reduce_scatter_tensor_coalesced", OpType::COALESCED, outputs, lists,
                             opts);
}

}  // namespace dmuon
