// Owner collectives for CPU tensors over a transport of their group.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <dmuon/backend/owner_collectives.h>

#include "operation_queue.h"
#include "owner_channel.h"

namespace dmuon {

class CpuOwnerCollectives final : public OwnerChannel {
 public:
  // `transport` may be null if size is 1. `role` becomes part of the name.
  CpuOwnerCollectives(std::shared_ptr<Transport> transport, int rank, int size, int channel,
                      std::string group, std::string role, std::chrono::milliseconds timeout,
                      std::shared_ptr<const Hooks> hooks = {});
  // Lets pending operations end, at most for the time-out, then fails them.
  ~CpuOwnerCollectives() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::string& groupName() const override { return group_; }

  OwnerWorkPtr reduceToOwners(std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                              std::vector<int64_t> owners, OwnerOptions options) override;
  OwnerWorkPtr broadcastFromOwners(std::vector<at::Tensor> tensors, std::vector<int64_t> owners,
                                   OwnerOptions options) override;
  OwnerCounters counters() const override { return queue_->counters(); }
  void drain() override { queue_->drain(); }
  void abort(const std::string& reason) override { queue_->abort(reason); }

  void setTimeout(std::chrono::milliseconds timeout) override { queue_->setTimeout(timeout); }
  void shutdown() override { queue_->shutdown(); }

 private:
  OwnerWorkPtr submit(const OperationPtr& op, c10d::OpType type,
                      const std::vector<at::Tensor>& tensors);

  const int rank_;
  const int size_;
  const std::string group_;  // with the role
  const std::string role_;
  const std::shared_ptr<const Hooks> hooks_;  // may be null
  std::shared_ptr<OperationQueue> queue_;
};

}  // namespace dmuon
