// The Work of one owner collective on NCCL.
//
// wait() and synchronize() make the current stream wait for the operation's end; the host goes on.
// wait() with a time-out blocks the host until the end, and throws if that does not come in time;
// the operation goes on. flags() blocks the host. All of them throw if it is known by then that the
// operation has failed: an error that comes later is found by the next call, and by every operation
// submitted to the group from then on. Whoever must not act on results that may be void asks for
// the flags, or waits with a time-out, first.
//
// The future is complete once the operation has been launched, and its users are ordered after the
// end by streams, as with torch's own NCCL backend; a later error does not reach it. (On a double
// of NCCL that runs on the host, it completes at the end.)
//
// Tensors are kept alive until wait() has ordered the stream on which the operation was submitted
// after its end, or, without a wait(), until the end has been seen. This replaces record_stream():
// with that, memory goes back to the allocator only when a later allocation polls its events, and
// runs ahead of need when the host runs ahead of the device.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <dmuon/backend/owner_collectives.h>

#include "nccl_api.h"

namespace dmuon {

class NcclWork final : public OwnerWork {
 public:
  // `memory`: what must live until the end.
  NcclWork(NcclApiPtr api, c10::Device device, int rank, c10d::OpType type, uint64_t seq,
           std::string name, std::vector<at::Tensor> outputs, std::vector<at::Tensor> memory,
           std::chrono::milliseconds timeout);

  // What the operation leaves for flags(): the flags of all ranks, one after the other, in groups
  // of `length` bytes to be OR-ed. `device`: the same on the device, for an operation that takes
  // them over; may be undefined, and so may `host`, if there are none.
  struct Flags {
    size_t length = 0;
    at::Tensor device;
    at::Tensor host;
    std::vector<uint8_t> known;  // OR-ed in: what the host knew
    at::Tensor taken;            // another operation's, which this one reads until its end
  };

  // Exactly one of launched() and fail() first; after launched(), one of succeed() and fail().
  void launched(const c10::Stream& on, const c10::Stream& submitted_on, NcclEvent end, Flags flags);
  // Its end event has been seen.
  void succeed();
  void fail(std::exception_ptr error);

  // Calls back, with the error's text, if it fails or has failed; at most once, on the thread that
  // fails it.
  void onFailure(std::function<void(const std::string&)> callback);

  // Of an operation that has been launched.
  const NcclEvent& end() const { return end_; }
  const Flags& gathered() const { return flags_; }
  // Whether it was launched and its end has come. Does not look at errors.
  bool endSeen();

  std::vector<uint8_t> flags() override;
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return seq_; }
  std::chrono::milliseconds getTimeout() const { return timeout_; }
  uint64_t getCompletionKey() const { return completion_key_; }  // overrides, from torch 2.15 on

 private:
  enum class Phase { submitted, launched, succeeded, failed };

  void throwIfFailed() const;
  void requireWaited(const char* what);
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages() const;

  const NcclApiPtr api_;
  const c10::Device device_;
  const uint64_t seq_;
  const uint64_t completion_key_;
  const std::string name_;
  const std::vector<at::Tensor> outputs_;
  const std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  const bool future_at_launch_;

  // Written before `launched` is visible, then constant.
  NcclEvent end_;
  Flags flags_;
  std::optional<c10::Stream> submitted_on_;

  mutable std::mutex state_mutex_;
  Phase phase_ = Phase::submitted;
  bool waited_ = false;
  std::exception_ptr error_;
  std::vector<at::Tensor> memory_;
  std::vector<std::function<void(const std::string&)>> on_failure_;
};

using NcclWorkPtr = c10::intrusive_ptr<NcclWork>;

}  // namespace dmuon
