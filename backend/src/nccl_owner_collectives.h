// Owner collectives for CUDA tensors over NCCL. As OwnerCollectives says, with these differences:
//
// Set-up. Making a channel is collective: it has a communicator and a stream of its own, connected
// when the constructor returns (nccl_communicator.h). The stream has high priority for the roles
// whose results are waited for ("unshard", "reduce"), normal priority for the others ("publish").
// All tensors are on the device that was current then, or that the group is bound to.
//
// Streams. An operation reads its inputs after what is on the caller's current stream; what comes
// after is ordered by Work::wait(), which does not block the host (nccl_work.h). An `after` or
// `inputs_from` of the same kind is an edge between streams; one on the host is waited for at
// submission. `inputs_at` is not used: the second operation starts when the first has ended.
//
// Agreement. Ranks compare what they ask for in debug mode only (nccl_agreement.h says why, and
// what happens otherwise when they differ).
//
// Memory. Scratch, from torch's allocator: what is not adjacent already is packed once; a padded
// operation takes N slots of the largest owner's bytes; the sum at an owner takes the bytes it
// owns, N times that in deterministic mode, and, if it is divided or rounded, a copy in fp32.
//
// Numerics. By default NCCL adds up, in the tensors' own dtype and an order of its own. NcclMode
// (nccl_plan.h) gives the CPU transports' sums instead. In both, the sum is divided once, at the
// owner, in the accumulation type.
//
// Ends. An operation ends on a rank when that rank's part in it has: one that only sends may end
// well although another rank fails. With flags, every rank waits for every other.
//
// Errors. An operation that has not ended within the time-out from when the stream came to it, an
// error that NCCL reports, and a rank that ends or refuses fail all that is pending, and the group
// is unusable from then on; its kernels are ended, and what the failed operations were to write is
// undefined. What a rank says reaches the others within about a second of waiting; the time-out is
// the latest. A failure also ends what was to come after it on other channels. (Kernels that wait
// to run are told to quit, but NCCL may still let a few kilobytes of theirs through; the receivers
// of such void data hear of the failure with the next operation.)
#pragma once

#include <dmuon/backend/owner_collectives.h>

#include "nccl_queue.h"
#include "owner_channel.h"

namespace dmuon {

class NcclOwnerCollectives final : public OwnerChannel {
 public:
  struct Setting {
    NcclApiPtr api;
    c10::intrusive_ptr<c10d::Store> store;  // the group's part for NCCL channels
    int rank = 0;
    int size = 1;
    int number = 0;  // of the channel
    std::string group;
    std::string role;
    c10::Device device{c10::DeviceType::CUDA, 0};
    NcclMode mode;
    std::chrono::milliseconds timeout{0};
    // Of the group's CPU transport, for debug mode; may be null.
    std::shared_ptr<OwnerCollectives> host_channel;
    std::shared_ptr<const Hooks> hooks;  // may be null
  };

  explicit NcclOwnerCollectives(const Setting& setting);
  ~NcclOwnerCollectives() override;

  // Without a group and a communicator, on the current device.
  static std::shared_ptr<NcclOwnerCollectives> ofOneRank(c10::DeviceType device);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::string& groupName() const override { return group_; }
  c10::Device device() const override { return queue_->device(); }

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
  std::shared_ptr<NcclQueue> queue_;
};

}  // namespace dmuon
