// A Work that some host thread completes: of the owner collectives, and of collectives that end
// with a step of our own after the inner backend's.
#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <dmuon/backend/owner_collectives.h>

#include "fork_guard.h"

namespace dmuon {

class Progress;

class HostWork final : public OwnerWork {
 public:
  // `name` opens error texts; `outputs` are what result() and the future hold.
  HostWork(int rank, c10d::OpType type, uint64_t seq, std::string name,
           std::vector<at::Tensor> outputs, std::chrono::milliseconds timeout);
  // Also the label, for what torch.profiler shows of waits, and the progress, which ends with it.
  HostWork(int rank, c10d::OpType type, uint64_t seq, std::string name,
           std::vector<at::Tensor> outputs, std::chrono::milliseconds timeout, std::string label,
           std::shared_ptr<Progress> progress);

  // Makes a range for torch.profiler, from here to the end, on this thread. Before it is shared.
  void profile(const std::string& title, const std::vector<at::Tensor>& inputs);

  // Exactly one of these, once. Callbacks on the future run here, on the calling thread.
  void succeed(std::vector<uint8_t> flags);
  void fail(std::exception_ptr error);

  std::vector<uint8_t> flags() override;
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override {}
  // An expired time-out throws; the operation goes on, and may be waited for again. Throws at once
  // in a process forked from the one that made this, if that one had not seen its end.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return seq_; }
  uint64_t getCompletionKey() const { return completion_key_; }  // overrides, from torch 2.15 on
  std::chrono::milliseconds getTimeout() const { return timeout_; }
  // Of an owner collective of several ranks; else null.
  const std::shared_ptr<Progress>& progress() const { return progress_; }

 private:
  template <typename Complete>
  void completeFuture(Complete&& complete);
  void requireSuccess(const char* what);
  void requireOwnProcess();

  const ForkGuard fork_;
  const uint64_t seq_;
  const uint64_t completion_key_;
  const std::string name_;
  const std::vector<at::Tensor> outputs_;
  const std::chrono::milliseconds timeout_;
  const std::string label_;
  const std::shared_ptr<Progress> progress_;
  std::vector<uint8_t> flags_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

using HostWorkPtr = c10::intrusive_ptr<HostWork>;

// What the error says, without torch's backtrace.
std::string messageOf(const std::exception_ptr& error);

}  // namespace dmuon
