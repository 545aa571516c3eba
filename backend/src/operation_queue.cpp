#include "operation_queue.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "hooks.h"
#include "work_chain.h"

namespace dmuon {
namespace {

float millisecondsSince(Clock::time_point start) {
  return std::chrono::duration<float, std::milli>(Clock::now() - start).count();
}

void refuseAfter(Operation& op, const std::string& error) {
  if (!op.refusal.empty()) return;
  op.refusal = "the operation that it was to come after has failed: " + error;
}

std::exception_ptr groupError(const std::string& text) {
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text));
}

// Signals the end of somebody else's Work to a thread that may stop waiting for it.
struct Ending {
  std::mutex mutex;
  std::condition_variable changed;
  bool ended = false;
  std::string error;
};

}  // namespace

OperationQueue::OperationQueue(std::shared_ptr<Transport> transport, int rank, int size,
                               int channel, std::string group, std::chrono::milliseconds timeout,
                               std::shared_ptr<const Hooks> hooks)
    : rank_(rank),
      size_(size),
      group_(std::move(group)),
      hooks_(std::move(hooks)),
      timeout_(timeout),
      exchange_(transport, rank, size, channel) {}

OperationQueue::~OperationQueue() { shutdown(); }

void OperationQueue::requireOwnProcess(const char* operation) const {
  if (!fork_.forked()) return;
  C10_THROW_ERROR(DistBackendError, c10::str(nameOnGroup(operation, group_, rank_, size_), ": ",
                                             fork_.explain("this group")));
}

OwnerWorkPtr OperationQueue::submit(const OperationPtr& op) {
  const char* const operation = toString(op->proposal.op);
  requireOwnProcess(operation);
  const auto type =
      op->proposal.op == OwnerOp::reduce ? c10d::OpType::REDUCE : c10d::OpType::BROADCAST;
  const std::string refusal = op->refusal;  // the worker may add one of its own
  std::unique_lock<std::mutex> lock(mutex_);
  op->seq = next_seq_++;
  op->name = c10::str(nameOnGroup(operation, group_, rank_, size_), ", operation ", op->seq);
  if (!op->proposal.label.empty()) op->name += " '" + op->proposal.label + "'";
  if (op->timeout.count() <= 0) op->timeout = timeout_.load();
  if (size_ > 1) op->progress = std::make_shared<Progress>(op->proposal.tensors.size());
  op->submitted = Clock::now();
  op->work = c10::make_intrusive<HostWork>(rank_, type, op->seq, op->name, std::move(op->result),
                                           op->timeout, op->proposal.label, op->progress);
  if (at::hasCallbacks()) op->work->profile(profilingTitle(*op), op->memory);
  countSubmission(*op, counters_);
  if (stopping_ || !unusable_.empty()) {
    lock.unlock();
    failUnusable(*op);
  } else if (size_ == 1 && !op->held_back && pending_.empty() && !busy_) {
    busy_ = true;  // nobody to wait for: done here
    lock.unlock();
    execute(*op);
    lock.lock();
    busy_ = false;
    lock.unlock();
    changed_.notify_all();
  } else {
    if (!thread_.joinable()) {
      thread_ = std::thread([self = shared_from_this()] { self->work(); });
    }
    pending_.push_back(op);
    lock.unlock();
    changed_.notify_all();
  }
  TORCH_CHECK_VALUE(refusal.empty(), op->name, ": ", refusal);
  return op->work;
}

void OperationQueue::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !busy_ && (!pending_.empty() || stopping_); });
    if (pending_.empty()) return;
    OperationPtr op = std::move(pending_.front());
    pending_.pop_front();
    busy_ = true;
    lock.unlock();
    execute(*op);
    op.reset();
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

void OperationQueue::execute(Operation& op) {
  const auto started = Clock::now();
  std::exception_ptr error;
  bool fatal_error = false;
  std::vector<uint8_t> flags;
  try {
    awaitDependencies(op);
    flags = exchange_.run(op, op.timeout);
  } catch (const Exchange::Fatal& fatal) {
    fatal_error = true;
    becomeUnusable(fatal.what(), op.seq + 1);
    std::lock_guard<std::mutex> lock(mutex_);
    error = exchange_.interrupted() ? groupError(c10::str(op.name, ": ", unusable_))
                                    : groupError(fatal.what());
  } catch (...) {
    error = std::current_exception();
  }
  op.memory.clear();
  if (error) {
    op.work->fail(std::move(error));
    // Last: torch's flight recorder takes many seconds here if it must load what it needs to
    // describe stacks. What it records does not depend on the Work.
    if (fatal_error && hooks_) hooks_->failed();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const double seconds = std::chrono::duration<double>(Clock::now() - op.submitted).count();
    countSuccess(op, rank_, size_, seconds, counters_);
  }
  op.work->succeed(std::move(flags));
  if (hooks_) hooks_->completed(op.work->getCompletionKey(), millisecondsSince(started));
}

void OperationQueue::awaitDependencies(Operation& op) {
  if (op.after) {
    std::string error;
    if (!awaitEnd(std::exchange(op.after, {}), error)) refuseAfter(op, error);
  }
  if (op.inputs_from) awaitInputs(op, std::exchange(op.inputs_from, {}));
}

// Waits until it is known whether the inputs will come; if it isn't said which of the other's
// outputs they are, until they are all there. Takes the flags over.
void OperationQueue::awaitInputs(Operation& op, const OwnerWorkPtr& from) {
  const auto* work = dynamic_cast<HostWork*>(from.get());
  std::vector<uint8_t> flags;
  if (work != nullptr && work->progress()) {
    op.source = work->progress();
    const auto stop = [this] { return unusable(); };
    const auto outcome = op.inputs_at.empty() || size_ == 1 ? op.source->awaitEnd(stop)
                                                            : op.source->awaitAgreed(stop);
    if (outcome != Progress::Outcome::reached) {
      refuseAfter(op, outcome == Progress::Outcome::failed ? op.source->error() : "stopped");
      return;
    }
    flags = op.source->flags();
  } else {
    std::string error;
    if (!awaitEnd(from, error)) {
      refuseAfter(op, error);
      return;
    }
    flags = from->flags();
  }
  if (op.flags.empty()) op.flags.resize(flags.size());
  if (flags.size() != op.flags.size()) {
    op.refusal = c10::str("it has ", op.flags.size(),
                          " flag bytes, but the operation that it takes "
                          "flags from has ",
                          flags.size());
    return;
  }
  for (size_t i = 0; i < flags.size(); ++i) op.flags[i] |= flags[i];
  op.proposal.flag_bytes = static_cast<uint32_t>(op.flags.size());
}

bool OperationQueue::unusable() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !unusable_.empty();
}

// Returns whether `dependency` ended well. Gives up if the group is aborted meanwhile.
bool OperationQueue::awaitEnd(const WorkPtr& dependency, std::string& error) {
  const auto future = futureOf(dependency);
  if (!future) {
    try {
      dependency->wait();
      return true;
    } catch (...) {
      error = messageOf(std::current_exception());
      return false;
    }
  }
  if (!future->devices().empty()) {
    error = c10::str("it is a Work on ", future->devices()[0], ", whose end the host cannot see");
    return false;
  }
  auto ending = std::make_shared<Ending>();
  future->addCallback([ending](c10::ivalue::Future& ended) {
    std::lock_guard<std::mutex> lock(ending->mutex);
    if (ended.hasError()) ending->error = messageOf(ended.exception_ptr());
    ending->ended = true;
    ending->changed.notify_all();
  });
  constexpr std::chrono::milliseconds kLook{50};  // how soon an abort is noticed
  std::unique_lock<std::mutex> lock(ending->mutex);
  while (!ending->changed.wait_for(lock, kLook, [&] { return ending->ended; })) {
    std::lock_guard<std::mutex> own_lock(mutex_);
    if (!unusable_.empty()) {
      ending->error = unusable_;
      break;
    }
  }
  error = ending->error;
  return error.empty();
}

void OperationQueue::becomeUnusable(const std::string& why, uint64_t next_header) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (unusable_.empty()) unusable_ = why;
  leave(lock, next_header);
}

void OperationQueue::abort(const std::string& reason) {
  if (fork_.forked()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  if (!unusable_.empty()) return;
  unusable_ = "aborted: " + reason;
  exchange_.interrupt();
  if (busy_) return;  // the worker fails its operation, then what is pending
  leave(lock, pending_.empty() ? next_seq_ : pending_.front()->seq);
}

void OperationQueue::leave(std::unique_lock<std::mutex>& lock, uint64_t next_header) {
  const std::string why = unusable_;
  const std::deque<OperationPtr> pending = std::exchange(pending_, {});
  lock.unlock();
  exchange_.leave(next_header, why);
  for (const OperationPtr& op : pending) failUnusable(*op);
}

void OperationQueue::failUnusable(Operation& op) {
  std::string why;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    why = unusable_.empty() ? "it was shut down" : unusable_;
  }
  op.memory.clear();
  op.work->fail(groupError(c10::str(op.name, ": the group is unusable: ", why)));
}

void OperationQueue::drain() {
  requireOwnProcess("drain");
  std::unique_lock<std::mutex> lock(mutex_);
  TORCH_CHECK(!onWorkerThread(), nameOnGroup("drain", group_, rank_, size_),
              ": called from a callback of one of the operations it waits for");
  changed_.wait(lock, [this] { return pending_.empty() && !busy_; });
}

void OperationQueue::shutdown(Clock::time_point deadline) {
  if (fork_.forked()) return;
  std::thread thread;
  bool ended = false;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    // From a callback, the operation it belongs to cannot be waited for.
    if (!onWorkerThread()) {
      ended = changed_.wait_until(lock, std::min(deadline, Clock::now() + timeout_.load()),
                                  [this] { return pending_.empty() && !busy_; });
    }
    thread.swap(thread_);
  }
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();  // it holds the queue and ends with the callback
    return;
  }
  if (!ended) abort("shut down while operations were pending");
  thread.join();
}

OwnerCounters OperationQueue::counters() const {
  requireOwnProcess("counters");
  std::lock_guard<std::mutex> lock(mutex_);
  return counters_;
}

}  // namespace dmuon
