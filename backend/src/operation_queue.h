// Runs a group's owner collectives one after the other on a worker thread, and ends them all when
// the group can no longer be used.
//
// The thread is started by the first operation that needs it and joined by shutdown(); an idle
// group costs no thread. It never takes Python's interpreter lock.
//
// In a process forked from the one that made it, submit(), drain() and counters() throw, and
// abort() and shutdown() do nothing. It must not be destroyed there (fork_guard.h).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "exchange.h"
#include "fork_guard.h"

namespace dmuon {

class Hooks;

class OperationQueue : public std::enable_shared_from_this<OperationQueue> {
 public:
  OperationQueue(std::shared_ptr<Transport> transport, int rank, int size, int channel,
                 std::string group, std::chrono::milliseconds timeout,
                 std::shared_ptr<const Hooks> hooks = {});
  ~OperationQueue();

  // Gives the operation its number and its Work, and queues it. If the group is unusable, the Work
  // has failed already.
  OwnerWorkPtr submit(const OperationPtr& op);

  void drain();
  void abort(const std::string& reason);
  // Lets what was submitted end, at most for the time-out and until `deadline`, then ends the
  // thread. Never throws.
  void shutdown(Clock::time_point deadline = Clock::time_point::max());
  void setTimeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  OwnerCounters counters() const;
  bool forked() const { return fork_.forked(); }

 private:
  void requireOwnProcess(const char* operation) const;
  void work();
  void execute(Operation& op);
  void awaitDependencies(Operation& op);
  void awaitInputs(Operation& op, const OwnerWorkPtr& from);
  bool unusable() const;
  bool awaitEnd(const WorkPtr& dependency, std::string& error);
  void becomeUnusable(const std::string& why, uint64_t next_header);
  void leave(std::unique_lock<std::mutex>& lock, uint64_t next_header);
  void failUnusable(Operation& op);
  bool onWorkerThread() const { return thread_.get_id() == std::this_thread::get_id(); }

  const int rank_;
  const int size_;
  const std::string group_;
  const std::shared_ptr<const Hooks> hooks_;  // may be null
  const ForkGuard fork_;
  std::atomic<std::chrono::milliseconds> timeout_;
  Exchange exchange_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<OperationPtr> pending_;
  bool busy_ = false;      // the worker is inside an operation
  bool stopping_ = false;  // no operation is accepted any more; the worker ends
  std::string unusable_;   // why the group cannot be used; empty if it can
  uint64_t next_seq_ = 0;
  OwnerCounters counters_;
  std::thread thread_;
};

}  // namespace dmuon
