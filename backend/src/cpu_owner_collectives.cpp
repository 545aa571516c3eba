#include "cpu_owner_collectives.h"

#include <utility>

#include "hooks.h"
#include "open_queues.h"

namespace dmuon {

CpuOwnerCollectives::CpuOwnerCollectives(std::shared_ptr<Transport> transport, int rank, int size,
                                         int channel, std::string group, std::string role,
                                         std::chrono::milliseconds timeout,
                                         std::shared_ptr<const Hooks> hooks)
    : rank_(rank),
      size_(size),
      group_(role.empty() ? std::move(group) : group + "/" + role),
      role_(std::move(role)),
      hooks_(std::move(hooks)) {
  queue_ = std::make_shared<OperationQueue>(std::move(transport), rank, size, channel, group_,
                                            timeout, hooks_);
  addOpenQueue(queue_);
}

CpuOwnerCollectives::~CpuOwnerCollectives() {
  if (queue_->forked()) {
    leak(std::move(queue_));
  } else {
    queue_->shutdown();
  }
}

OwnerWorkPtr CpuOwnerCollectives::reduceToOwners(std::vector<at::Tensor> inputs,
                                                 std::vector<at::Tensor> outputs,
                                                 std::vector<int64_t> owners,
                                                 OwnerOptions options) {
  OperationPtr op = makeReduce(inputs, outputs, owners, std::move(options), rank_, size_);
  op->proposal.role = role_;
  return submit(op, c10d::OpType::REDUCE, inputs);
}

OwnerWorkPtr CpuOwnerCollectives::broadcastFromOwners(std::vector<at::Tensor> tensors,
                                                      std::vector<int64_t> owners,
                                                      OwnerOptions options) {
  OperationPtr op = makeBroadcast(tensors, owners, std::move(options), rank_, size_);
  op->proposal.role = role_;
  return submit(op, c10d::OpType::BROADCAST, tensors);
}

OwnerWorkPtr CpuOwnerCollectives::submit(const OperationPtr& op, c10d::OpType type,
                                         const std::vector<at::Tensor>& tensors) {
  if (!hooks_ || !op->refusal.empty()) return queue_->submit(op);
  return hooks_->announce(type, tensors, {}, [&] { return queue_->submit(op); });
}

}  // namespace dmuon
