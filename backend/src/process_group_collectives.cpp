// The ordinary collectives: choose the inner backend by device, and stand between the caller and
// Gloo.
#include <dmuon/backend/process_group_dmuon.h>

#include <ATen/ops/empty.h>

#include <utility>

#include "gloo_peers.h"
#include "hooks.h"
#include "host_staging.h"
#include "work_chain.h"

namespace dmuon {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using c10d::OpType;

c10d::Backend& ProcessGroupDMuon::requireCuda(const char* operation) const {
  TORCH_CHECK(cuda_, nameOf(operation), ": the group has no inner backend for cuda");
  return *cuda_;
}

c10d::Backend& ProcessGroupDMuon::backendOf(const char* operation, const Tensors& tensors,
                                            const TensorLists& lists) const {
  requireOwnProcess(operation);
  const at::Tensor* first = nullptr;
  const auto look = [&](const Tensors& list) {
    for (const at::Tensor& tensor : list) {
      TORCH_CHECK_VALUE(tensor.defined(), nameOf(operation), ": a tensor is undefined");
      if (first == nullptr) first = &tensor;
      TORCH_CHECK_VALUE(tensor.device().type() == first->device().type(), nameOf(operation),
                        ": the tensors are on different devices: ", first->device(), " and ",
                        tensor.device());
    }
  };
  look(tensors);
  for (const Tensors& list : lists) look(list);
  TORCH_CHECK_VALUE(first != nullptr, nameOf(operation), ": no tensors were given");
  const c10::Device device = first->device();
  if (device.is_cpu() && cpu_) return *cpu_->backend;
  if (device.is_cuda() && cuda_) return *cuda_;
  TORCH_CHECK(false, nameOf(operation), ": the tensors are on ", device,
              ", but the group has inner backends for", cpu_ ? " cpu" : "", cuda_ ? " cuda" : "",
              " only");
}

c10d::Backend& ProcessGroupDMuon::collective(const char* operation, const Tensors& tensors,
                                             const TensorLists& lists) {
  c10d::Backend& backend = backendOf(operation, tensors, lists);
  ++sequence_;
  return backend;
}

bool ProcessGroupDMuon::onHost(const c10d::Backend& backend) const {
  return cpu_ && &backend == cpu_->backend.get();
}

// Hands something to the CPU backend.
template <typename Call>
WorkPtr ProcessGroupDMuon::submit(Call&& call) {
  std::lock_guard<std::mutex> lock(cpu_->submission);
  return call(*cpu_->backend);
}

WorkPtr ProcessGroupDMuon::submitted(WorkPtr work) {
  if (coalescing_) coalesced_.push_back(work);
  return Hooks::watch(hooks_, std::move(work));
}

// Hands a collective to the CPU backend; its Work, or if something is left to do after it, a Work
// that completes when that is done.
template <typename Call>
WorkPtr ProcessGroupDMuon::submit(HostStaging& staging, OpType type, const Tensors& outputs,
                                  Call&& call) {
  WorkPtr work = submit(std::forward<Call>(call));
  if (staging.needsEnd()) {
    auto rest = std::make_shared<HostStaging>(std::move(staging));
    ChainInfo info{rank_, type, sequence_, rest->name(), outputs};
    work = afterAll({work}, std::move(info), [rest] { rest->finish(); });
  }
  return submitted(std::move(work));
}

WorkPtr ProcessGroupDMuon::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  c10d::Backend& backend = collective("broadcast", tensors);
  if (!onHost(backend)) return backend.broadcast(tensors, opts);
  HostStaging staging(nameOf("broadcast"));
  Tensors plain = staging.inOut(tensors);
  return submit(staging, OpType::BROADCAST, tensors,
                [&](auto& gloo) { return gloo.broadcast(plain, opts); });
}

WorkPtr ProcessGroupDMuon::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  c10d::Backend& backend = collective("allreduce", tensors);
  if (!onHost(backend)) return backend.allreduce(tensors, opts);
  HostStaging staging(nameOf("allreduce"));
  c10d::AllreduceOptions host_opts = opts;
  const Scale scale = staging.takeScale(host_opts.reduceOp, size_, tensors[0]);
  Tensors plain = staging.inOut(tensors);
  for (const at::Tensor& tensor : plain) staging.scaleAtEnd(tensor, scale);
  return submit(staging, OpType::ALLREDUCE, tensors,
                [&](auto& gloo) { return gloo.allreduce(plain, host_opts); });
}

WorkPtr ProcessGroupDMuon::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  c10d::Backend& backend = collective("allreduce_sparse", tensors);
  if (!onHost(backend)) return backend.allreduce_sparse(tensors, opts);
  return submitted(submit([&](auto& gloo) { return gloo.allreduce_sparse(tensors, opts); }));
}

WorkPtr ProcessGroupDMuon::allreduce_coalesced(Tensors& tensors,
                                               const c10d::AllreduceCoalescedOptions& opts) {
  c10d::Backend& backend = collective("allreduce_coalesced", tensors);
  if (!onHost(backend)) return backend.allreduce_coalesced(tensors, opts);
  HostStaging staging(nameOf("allreduce_coalesced"));
  c10d::AllreduceCoalescedOptions host_opts = opts;
  Scale scale;
  for (const at::Tensor& tensor : tensors) {
    c10d::ReduceOp op = opts.reduceOp;
    scale = staging.takeScale(op, size_, tensor);
    host_opts.reduceOp = op;
  }
  Tensors plain = staging.inOut(tensors);
  for (const at::Tensor& tensor : plain) staging.scaleAtEnd(tensor, scale);
  return submit(staging, OpType::ALLREDUCE_COALESCED, tensors,
                [&](auto& gloo) { return gloo.allreduce_coalesced(plain, host_opts); });
}

WorkPtr ProcessGroupDMuon::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  c10d::Backend& backend = collective("reduce", tensors);
  if (!onHost(backend)) return backend.reduce(tensors, opts);
  HostStaging staging(nameOf("reduce"));
  c10d::ReduceOptions host_opts = opts;
  const Scale scale = staging.takeScale(host_opts.reduceOp, size_, tensors[0]);
  // Elsewhere than on the root there is no result to scale or to write back.
  const bool root = opts.rootRank == rank_;
  Tensors plain = root ? staging.inOut(tensors) : staging.in(tensors);
  for (const at::Tensor& tensor : plain) {
    if (root) staging.scaleAtEnd(tensor, scale);
  }
  return submit(staging, OpType::REDUCE, tensors,
                [&](auto& gloo) { return gloo.reduce(plain, host_opts); });
}

WorkPtr ProcessGroupDMuon::allgather(TensorLists& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& opts) {
  c10d::Backend& backend = collective("allgather", inputs, outputs);
  if (!onHost(backend)) return backend.allgather(outputs, inputs, opts);
  HostStaging staging(nameOf("allgather"));
  TensorLists plain;
  for (const Tensors& list : outputs) plain.push_back(staging.out(list));
  Tensors plain_inputs = staging.in(inputs);
  return submit(staging, OpType::ALLGATHER, outputs.empty() ? Tensors() : outputs[0],
                [&](auto& gloo) { return gloo.allgather(plain, plain_inputs, opts); });
}

WorkPtr ProcessGroupDMuon::_allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& opts) {
  c10d::Backend& backend = collective("_allgather_base", {output, input});
  if (!onHost(backend)) return backend._allgather_base(output, input, opts);
  HostStaging staging(nameOf("_allgather_base"));
  at::Tensor plain = staging.out(output);
  at::Tensor plain_input = staging.in(input);
  return submit(staging, OpType::_ALLGATHER_BASE, {output},
                [&](auto& gloo) { return gloo._allgather_base(plain, plain_input, opts); });
}

WorkPtr ProcessGroupDMuon::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                               const c10d::AllgatherOptions& opts) {
  c10d::Backend& backend = collective("allgather_coalesced", inputs, outputs);
  if (!onHost(backend)) return backend.allgather_coalesced(outputs, inputs, opts);
  HostStaging staging(nameOf("allgather_coalesced"));
  TensorLists plain;
  Tensors all;
  for (const Tensors& list : outputs) {
    plain.push_back(staging.out(list));
    all.insert(all.end(), list.begin(), list.end());
  }
  Tensors plain_inputs = staging.in(inputs);
  return submit(staging, OpType::ALLGATHER_COALESCED, all,
                [&](auto& gloo) { return gloo.allgather_coalesced(plain, plain_inputs, opts); });
}

WorkPtr ProcessGroupDMuon::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& opts) {
  c10d::Backend& backend = collective("allgather_into_tensor_coalesced", inputs, {outputs});
  if (!onHost(backend)) return backend.allgather_into_tensor_coalesced(outputs, inputs, opts);
  HostStaging staging(nameOf("allgather_into_tensor_coalesced"));
  Tensors plain = staging.out(outputs);
  Tensors plain_inputs = staging.in(inputs);
  return submit(staging, OpType::COALESCED, outputs, [&](auto& gloo) {
    return gloo.allgather_into_tensor_coalesced(plain, plain_inputs, opts);
  });
}

WorkPtr ProcessGroupDMuon::gather(TensorLists& outputs, Tensors& inputs,
                                  const c10d::GatherOptions& opts) {
  c10d::Backend& backend = collective("gather", inputs, outputs);
  if (!onHost(backend)) return backend.gather(outputs, inputs, opts);
  HostStaging staging(nameOf("gather"));
  TensorLists plain;
  for (const Tensors& list : outputs) plain.push_back(staging.out(list));
  Tensors plain_inputs = staging.in(inputs);
  return submit(staging, OpType::GATHER, outputs.empty() ? Tensors() : outputs[0],
                [&](auto& gloo) { return gloo.gather(plain, plain_inputs, opts); });
}

WorkPtr ProcessGroupDMuon::scatter(Tensors& outputs, TensorLists& inputs,
                                   const c10d::ScatterOptions& opts) {
  c10d::Backend& backend = collective("scatter", outputs, inputs);
  if (!onHost(backend)) return backend.scatter(outputs, inputs, opts);
  HostStaging staging(nameOf("scatter"));
  Tensors plain = staging.out(outputs);
  TensorLists plain_inputs;
  for (const Tensors& list : inputs) plain_inputs.push_back(staging.in(list));
  return submit(staging, OpType::SCATTER, outputs,
                [&](auto& gloo) { return gloo.scatter(plain, plain_inputs, opts); });
}

WorkPtr ProcessGroupDMuon::alltoall_base(at::Tensor& output, at::Tensor& input,
                                         std::vector<int64_t>& output_splits,
                                         std::vector<int64_t>& input_splits,
                                         const c10d::AllToAllOptions& opts) {
  c10d::Backend& backend = collective("alltoall_base", {output, input});
  if (!onHost(backend)) {
    return backend.alltoall_base(output, input, output_splits, input_splits, opts);
  }
  HostStaging staging(nameOf("alltoall_base"));
  at::Tensor plain = staging.out(output);
  at::Tensor plain_input = staging.in(input);
  return submit(staging, OpType::ALLTOALL_BASE, {output}, [&](auto& gloo) {
    return gloo.alltoall_base(plain, plain_input, output_splits, input_splits, opts);
  });
}

WorkPtr ProcessGroupDMuon::alltoall(Tensors& outputs, Tensors& inputs,
                                    const c10d::AllToAllOptions& opts) {
  c10d::Backend& backend = collective("alltoall", outputs, {inputs});
  if (!onHost(backend)) return backend.alltoall(outputs, inputs, opts);
  HostStaging staging(nameOf("alltoall"));
  Tensors plain = staging.out(outputs);
  Tensors plain_inputs = staging.in(inputs);
  return submit(staging, OpType::ALLTOALL, outputs,
                [&](auto& gloo) { return gloo.alltoall(plain, plain_inputs, opts); });
}

void ProcessGroupDMuon::checkPeerToPeer(const char* operation, const Tensors& tensors,
                                        int tag) const {
  TORCH_CHECK_VALUE(tag < kReservedTags, nameOf(operation), ": tag ", tag,
                    " is reserved for the owner collectives: use tags below ", kReservedTags);
  TORCH_CHECK_VALUE(tensors.size() == 1, nameOf(operation), ": takes one tensor, got ",
                    tensors.size());
}

WorkPtr ProcessGroupDMuon::send(Tensors& tensors, int peer, int tag) {
  c10d::Backend& backend = backendOf("send", tensors);
  if (!onHost(backend)) return backend.send(tensors, peer, tag);
  checkPeerToPeer("send", tensors, tag);
  Tensors plain = HostStaging(nameOf("send")).in(tensors);
  return submitted(submit([&](auto& gloo) { return gloo.send(plain, peer, tag); }));
}

// Gloo's Work for a receive has no future to write scratch back from.
void ProcessGroupDMuon::checkReceive(const char* operation, const at::Tensor& tensor) const {
  TORCH_CHECK_VALUE(tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(),
                    nameOf(operation), ": the tensor ", tensor.scalar_type(), tensor.sizes(),
                    " with strides ", tensor.strides(),
                    " to receive into is not contiguous: receive into a contiguous one and copy");
}

WorkPtr ProcessGroupDMuon::recv(Tensors& tensors, int peer, int tag) {
  c10d::Backend& backend = backendOf("recv", tensors);
  if (!onHost(backend)) return backend.recv(tensors, peer, tag);
  checkPeerToPeer("recv", tensors, tag);
  checkReceive("recv", tensors[0]);
  return submitted(submit([&](auto& gloo) { return gloo.recv(tensors, peer, tag); }));
}

WorkPtr ProcessGroupDMuon::recvAnysource(Tensors& tensors, int tag) {
  c10d::Backend& backend = backendOf("recvAnysource", tensors);
  if (!onHost(backend)) return backend.recvAnysource(tensors, tag);
  checkPeerToPeer("recvAnysource", tensors, tag);
  checkReceive("recvAnysource", tensors[0]);
  return submitted(submit([&](auto& gloo) { return gloo.recvAnysource(tensors, tag); }));
}

WorkPtr ProcessGroupDMuon::barrier(const c10d::BarrierOptions& opts) {
  requireOwnProcess("barrier");
  ++sequence_;
  // The Work of NCCL's barrier blocks the host in wait().
  if (cuda_ && (!cpu_ || !opts.device_ids.empty())) return cuda_->barrier(opts);
  return submitted(submit([&](auto& gloo) { return gloo.barrier(opts); }));
}

void ProcessGroupDMuon::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  requireOwnProcess("monitoredBarrier");
  TORCH_CHECK(cpu_, nameOf("monitoredBarrier"), ": needs an inner backend for cpu");
  ++sequence_;
  // Blocks until all ranks are there, so owner collectives must be able to submit meanwhile.
  cpu_->backend->monitoredBarrier(opts, wait_all_ranks);
}

bool ProcessGroupDMuon::supportsCoalescing() const { return cuda_ && cuda_->supportsCoalescing(); }

void ProcessGroupDMuon::startCoalescing() {
  coalescing_ = true;
  if (supportsCoalescing()) cuda_->startCoalescing();
}

WorkPtr ProcessGroupDMuon::endCoalescing() {
  coalescing_ = false;
  std::vector<WorkPtr> works = std::exchange(coalesced_, {});
  if (supportsCoalescing()) {
    if (WorkPtr work = cuda_->endCoalescing()) works.push_back(std::move(work));
  }
  if (works.empty()) return {};
  return works.size() == 1 ? works[0] : waitForAll(std::move(works), rank_);
}

uint64_t ProcessGroupDMuon::getSequenceNumberForGroup() { return sequence_; }

}  // namespace dmuon
