#include "cpu_owner_collectives.h"

#include <utility>

namespace dmuon {

CpuOwnerCollectives::CpuOwnerCollectives(std::shared_ptr<Transport> transport, int rank, int size,
                                         int channel, std::string group, std::string role,
                                         std::chrono::milliseconds timeout)
    : rank_(rank),
      size_(size),
      group_(role.empty() ? std::move(group) : group + "/" + role),
      role_(std::move(role)) {
  queue_ =
      std::make_shared<OperationQueue>(std::move(transport), rank, size, channel, group_, timeout);
}

CpuOwnerCollectives::~CpuOwnerCollectives() { queue_->shutdown(); }

OwnerWorkPtr CpuOwnerCollectives::reduceToOwners(std::vector<at::Tensor> inputs,
                                                 std::vector<at::Tensor> outputs,
                                                 std::vector<int64_t> owners,
                                                 OwnerOptions options) {
  OperationPtr op = makeReduce(inputs, outputs, owners, std::move(options), rank_, size_);
  op->proposal.role = role_;
  return queue_->submit(op);
}

OwnerWorkPtr CpuOwnerCollectives::broadcastFromOwners(std::vector<at::Tensor> tensors,
                                                      std::vector<int64_t> owners,
                                                      OwnerOptions options) {
  OperationPtr op = makeBroadcast(tensors, owners, std::move(options), rank_, size_);
  op->proposal.role = role_;
  return queue_->submit(op);
}

}  // namespace dmuon
