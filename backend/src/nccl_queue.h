// A channel's operations on NCCL: launched by the threads that submit them, in the order in which
// they come, and watched over by a thread of the channel.
//
// Launching where the caller submits keeps the order across channels the caller's own: with a
// thread per channel, ranks could start two channels' kernels in different orders, and kernels that
// fill the device while they wait for each other never end.
//
// The watching thread is started by the first operation. It asks the end events, NCCL's
// asynchronous error and, for an operation that takes long, what other ranks have said
// (nccl_reports.h); it fails what has failed, first the Works that depend on it, then aborts the
// communicator so that its kernels end. It never takes Python's interpreter lock.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "fork_guard.h"
#include "hooks.h"
#include "nccl_agreement.h"
#include "nccl_communicator.h"
#include "nccl_plan.h"
#include "nccl_reports.h"
#include "nccl_work.h"
#include "operation.h"

namespace dmuon {

class NcclQueue : public std::enable_shared_from_this<NcclQueue> {
 public:
  struct Setting {
    NcclApiPtr api;
    c10::intrusive_ptr<c10d::Store> store;  // this channel's own part
    NcclCommunicator::Setting communicator;
    std::string group;  // with the role
    NcclMode mode;
    std::unique_ptr<NcclAgreement> agreement;  // of debug mode; else null
    std::shared_ptr<const Hooks> hooks;        // may be null
  };

  explicit NcclQueue(Setting setting);
  ~NcclQueue();

  // As OperationQueue's.
  OwnerWorkPtr submit(const OperationPtr& op);
  void drain();
  void abort(const std::string& reason);
  void shutdown();
  void setTimeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  OwnerCounters counters() const;
  bool forked() const { return fork_.forked(); }
  c10::Device device() const { return communicator_.device(); }

 private:
  struct Pending {
    NcclWorkPtr work;
    std::string name;
    uint64_t seq = 0;
    NcclEvent begin;                     // the stream has come to this operation
    std::chrono::milliseconds patience;  // from there
    std::optional<Clock::time_point> began;
    bool said_stuck = false;
  };

  NcclWorkPtr number(Operation& op);
  void launch(Operation& op, const NcclWorkPtr& work);
  at::Tensor order(Operation& op, const NcclWorkPtr& work, const c10::Stream& submitted_on);
  void awaitHost(Operation& op);
  void takeFlags(Operation& op, size_t length, const std::vector<uint8_t>& known);

  void watch();
  bool look();
  bool lookAtReports(Pending& front, std::chrono::milliseconds waited);
  std::string timedOut(const Pending& front, std::chrono::milliseconds waited) const;
  // Fails everything that has not ended. `culprit`: the operation whose error text `why` is.
  void becomeUnusable(const std::string& why, const NcclWorkPtr& culprit = {});
  void dependencyFailed(uint64_t seq, const std::string& error);
  std::string unusable() const;
  std::exception_ptr unusableError(const std::string& name) const;
  void requireOwnProcess(const char* operation) const;

  const ForkGuard fork_;
  const NcclApiPtr api_;
  const std::string group_;
  const NcclMode mode_;
  std::atomic<std::chrono::milliseconds> timeout_;
  NcclCommunicator communicator_;
  NcclReports reports_;
  const std::unique_ptr<NcclAgreement> agreement_;
  const std::shared_ptr<const Hooks> hooks_;

  std::mutex issue_mutex_;  // held from an operation's number to its launch

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Pending> pending_;  // launched, end not seen; the watching thread alone removes some
  bool ending_ = false;          // the rest of pending_ is being failed
  std::optional<uint64_t> launching_;  // the operation that is on its way into pending_
  bool stopping_ = false;
  std::string unusable_;
  uint64_t next_seq_ = 0;
  OwnerCounters counters_;
  std::map<uint64_t, std::string> refused_;  // operations that other ranks did not launch
  std::map<uint64_t, std::set<int>> stuck_;  // ranks that said they wait
  std::optional<std::string> ended_;         // what a rank that has ended said
  Clock::time_point next_poll_;
  std::thread thread_;
};

}  // namespace dmuon
