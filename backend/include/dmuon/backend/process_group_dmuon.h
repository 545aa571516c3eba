// The c10d backend "dmuon": ordinary collectives by an inner backend per device (Gloo for CPU, NCCL
// for CUDA), and owner collectives on top.
//
// One object serves both devices. Every collective goes to the inner backend of its tensors'
// device; all tensors of a call must be on the same kind of device. Object collectives and barrier
// take the CPU when there is a CPU backend.
//
// On the CPU, what Gloo would do wrong is done right or refused:
//   - Gloo reads and writes raw memory. A strided tensor goes through contiguous scratch and is
//     written back when the operation is complete; an output whose elements overlap in memory, and
//     a strided tensor to receive into, is refused with its sizes and strides.
//   - AVG and PREMUL_SUM are a SUM, divided or multiplied once afterwards; the Work and its future
//     complete after that. The factor of PREMUL_SUM must be equal on all ranks. On integers both
//     are refused.
//   - reduce_scatter in all forms is an all-reduce of which each rank keeps its part.
// As in all of c10d, `reduce` leaves undefined values in the tensors of ranks other than the root.
//
// Tags of send and receive from 2^30 on are reserved for the owner collectives.
//
// Threads: as c10d's backends, collectives are submitted by one thread at a time; owner collectives
// may be submitted from others at the same time.
//
// Forks: in a process forked from the one that made a group, collectives throw at once; shutdown(),
// abort() and the destructor do nothing, so that the parent's connections stay as they are.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <dmuon/backend/owner_collectives.h>
#include <dmuon/backend/torch_features.h>

namespace c10d {
class ProcessGroup;
}

namespace dmuon {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
class ForkGuard;
class Hooks;
class HostStaging;
class NcclApi;
class OwnerChannel;
class Transport;
struct InnerBackend;

class ProcessGroupDMuon : public c10d::Backend {
 public:
  struct Options : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
        : c10d::Backend::Options("dmuon", timeout) {}
    // How owner collectives of CUDA tensors add up. By default NCCL does, in the tensors' dtype and
    // an order of its own. deterministic: bit for bit as on the CPU, in rank order and fp32 (fp64
    // for fp64); every contribution is sent to the owner, which needs memory for all of them.
    // fp32_accumulation: the same for fp16 and bf16 only. The environment variables
    // DMUON_NCCL_DETERMINISTIC and DMUON_NCCL_FP32_ACCUMULATION (1 or 0) override these. Must be
    // equal on all ranks, which is checked.
    bool nccl_deterministic = false;
    bool nccl_fp32_accumulation = false;
    // Overrides the base's clone() where it has one (not in torch 2.11).
    c10::intrusive_ptr<c10d::Backend::Options> clone() const {
      return c10::make_intrusive<Options>(*this);
    }
  };

  // Either inner backend may be null, not both. They must have this rank and size.
  //
  // `store`: where the ranks meet to set up the transport of the owner collectives of CPU tensors,
  // in the constructor, which then blocks until all ranks are there, at most for the time-out; and
  // later the channels of owner collectives of CUDA tensors, which cannot be made without a store.
  // The environment variable DMUON_TRANSPORT chooses for CPU tensors: "ucx"; "gloo", the inner
  // backend; or "auto", the default, which is UCX if all ranks find its library and Gloo otherwise.
  // Without a store it is Gloo.
  ProcessGroupDMuon(int rank, int size, BackendPtr cpu, BackendPtr cuda,
                    c10::intrusive_ptr<Options> options = c10::make_intrusive<Options>(),
                    const c10::intrusive_ptr<c10d::Store>& store = {});
  ~ProcessGroupDMuon() override;

  // The owner collectives for tensors of `device`: always the same object. Throws if this build or
  // this group has none for it. Named after the group's description, or else its name. For CUDA
  // tensors the first call must be made by all ranks: it sets up a communicator, on the device that
  // is current or that the group is bound to.
  std::shared_ptr<OwnerCollectives> ownerCollectives(c10::DeviceType device);

  // A channel of its own on this group, with its own order of operations and its own thread: what
  // is submitted here neither orders against nor waits for other channels. `role` becomes part of
  // the name. Ranks must make the channels of a group in the same order; another order is an error
  // of the first operation, or, for CUDA tensors, of this call, which waits for the other ranks to
  // set up a communicator. Owned by the caller; abort(), shutdown() and setTimeout() reach it.
  std::shared_ptr<OwnerCollectives> newOwnerCollectives(c10::DeviceType device,
                                                        const std::string& role);

  // Of the owner collectives of CPU tensors: "ucx" or "gloo". Empty without a CPU backend.
  std::string transportName() const;

  // Null if there is none for `device`.
  BackendPtr innerBackend(c10::DeviceType device) const;

  const std::string getBackendName() const override { return "dmuon"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }

  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(std::vector<at::Tensor>& tensors,
                           const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                              std::vector<at::Tensor>& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const c10d::GatherOptions& opts) override;
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(std::vector<at::Tensor>& outputs,
                         std::vector<std::vector<at::Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                   const c10d::AllToAllOptions& opts) override;
  WorkPtr send(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  // On the CPU backend unless there is none, or CUDA device ids are given. wait() blocks the host
  // in either case.
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // True if the CUDA backend coalesces. Between start and end, CUDA operations are fused by it; CPU
  // operations start at once, and the Work of endCoalescing() waits for all of them. It is null if
  // there was nothing.
  bool supportsCoalescing() const override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // Splits every inner backend. Null on ranks that are not in `ranks`.
  bool supportsSplitting() const override { return true; }
  BackendPtr split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                   const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  BackendPtr merge(const c10::intrusive_ptr<c10d::Store>& store,
                   const c10::intrusive_ptr<c10d::Backend::Options>& opts, const int& rank,
                   const int& size) override;

  // Counts the collectives submitted here. Not the inner backend's number: its send and receive
  // count too, and those of the owner collectives do not fall on the same moment on all ranks.
  uint64_t getSequenceNumberForGroup() override;
  void setSequenceNumberForGroup() override {}

  void setTimeout(std::chrono::milliseconds timeout) override;
  void setGroupUid(const std::string& uid) override;
  void eagerConnectSingleDevice(at::Device device) override;
  void setBoundDeviceId(std::optional<at::Device> device);  // overrides, but not in torch 2.11
  void enableCollectivesTiming() override;
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options = {}) override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;

  // Hooks hear of ordinary collectives of CPU tensors and of all owner collectives. Completion
  // hooks get the operation's own time of owner collectives, without the time spent in the queue;
  // of others there is none. With an inner CUDA backend that has no such hooks there are no
  // completion hooks at all, since the end of its operations would be missed.
#ifdef DMUON_TORCH_HAS_ABORT_HOOKS
  bool supportsAbortHooks() const override { return true; }
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t id) override;
#endif
#ifdef DMUON_TORCH_HAS_COMPLETION_HOOKS
  bool supportsCompletionHooks() const override;
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override;
#endif
  // Makes owner collectives known to the hooks of `group`, which this backend belongs to. Called by
  // the functions below that take a group.
  void announceTo(c10d::ProcessGroup& group);

  c10d::ErrorType getError() override;
  // Fails the owner collectives that are pending, on all ranks, and aborts the inner backends.
  void abort() override;
  // Lets pending owner collectives end, at most for the time-out, then shuts everything down.
  void shutdown() override;

 private:
  std::string groupName() const;
  std::string nameOf(const char* operation) const;
  void requireOwnProcess(const char* operation) const;

  // Checks that there are tensors, all on one kind of device, and returns its backend.
  c10d::Backend& backendOf(const char* operation, const std::vector<at::Tensor>& tensors,
                           const std::vector<std::vector<at::Tensor>>& lists = {}) const;
  // The same, for an operation that all ranks take part in: counts it.
  c10d::Backend& collective(const char* operation, const std::vector<at::Tensor>& tensors,
                            const std::vector<std::vector<at::Tensor>>& lists = {});
  c10d::Backend& requireCuda(const char* operation) const;
  bool onHost(const c10d::Backend& backend) const;
  void checkPeerToPeer(const char* operation, const std::vector<at::Tensor>& tensors,
                       int tag) const;
  void checkReceive(const char* operation, const at::Tensor& tensor) const;

  template <typename Call>
  WorkPtr submit(Call&& call);
  template <typename Call>
  WorkPtr submit(HostStaging& staging, c10d::OpType type, const std::vector<at::Tensor>& outputs,
                 Call&& call);
  WorkPtr submitted(WorkPtr work);
  WorkPtr reduceScatterOnHost(const char* operation, c10d::OpType type,
                              const std::vector<at::Tensor>& outputs,
                              const std::vector<std::vector<at::Tensor>>& inputs,
                              const c10d::ReduceScatterOptions& opts);

  std::shared_ptr<OwnerChannel> makeChannel(c10::DeviceType device, int number,
                                            const std::string& role);
  std::shared_ptr<OwnerChannel> makeNcclChannel(const std::shared_ptr<NcclApi>& api, int number,
                                                const std::string& role);
  void addChannel(const std::shared_ptr<OwnerChannel>& channel);
  std::vector<std::shared_ptr<OwnerChannel>> channels();

  std::unique_ptr<const ForkGuard> fork_;
  std::shared_ptr<Hooks> hooks_;
  std::atomic<bool> announced_{false};
  std::shared_ptr<InnerBackend> cpu_;  // null if there is none
  std::shared_ptr<Transport> transport_;
  BackendPtr cuda_;
  c10::intrusive_ptr<Options> options_;
  c10::intrusive_ptr<c10d::Store> store_;  // may be null
  std::atomic<uint64_t> sequence_{0};

  std::mutex channel_mutex_;
  std::map<c10::DeviceType, std::shared_ptr<OwnerChannel>> own_channels_;
  std::vector<std::weak_ptr<OwnerChannel>> channels_;  // with own_channels_
  int next_channel_ = 1;

  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;  // on the CPU, since startCoalescing()
};

// The dmuon backend of `group` for `device`, also below the wrapper that torch puts around backends
// under TORCH_DISTRIBUTED_DEBUG=DETAIL. Throws, naming what it found, if it is another backend.
c10::intrusive_ptr<ProcessGroupDMuon> dmuonBackendOf(c10d::ProcessGroup& group,
                                                     c10::DeviceType device);
c10::intrusive_ptr<ProcessGroupDMuon> dmuonBackendOf(const BackendPtr& backend);

// The same-named members of dmuonBackendOf(group, device).
std::shared_ptr<OwnerCollectives> ownerCollectivesOf(c10d::ProcessGroup& group,
                                                     c10::DeviceType device);
std::shared_ptr<OwnerCollectives> newOwnerCollectives(c10d::ProcessGroup& group,
                                                      c10::DeviceType device,
                                                      const std::string& role);

}  // namespace dmuon
