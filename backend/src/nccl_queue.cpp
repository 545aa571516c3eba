#include "nccl_queue.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "nccl_launch.h"

namespace dmuon {
namespace {

std::exception_ptr groupError(const std::string& text) {
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text));
}

NcclWork* onDevice(const WorkPtr& work) { return dynamic_cast<NcclWork*>(work.get()); }

// A range in NVTX, ended on every way out.
class Range {
 public:
  Range(NcclApi& api, const std::string& name) : api_(api) { api_.rangePush(name); }
  ~Range() { api_.rangePop(); }

 private:
  NcclApi& api_;
};

}  // namespace

NcclQueue::NcclQueue(Setting setting)
    : api_(setting.api),
      group_(std::move(setting.group)),
      mode_(setting.mode),
      timeout_(setting.communicator.timeout),
      communicator_(setting.api, setting.store, setting.communicator),
      reports_(setting.communicator.size > 1 ? setting.store : c10::intrusive_ptr<c10d::Store>(),
               setting.communicator.rank),
      agreement_(std::move(setting.agreement)),
      hooks_(std::move(setting.hooks)) {}

NcclQueue::~NcclQueue() { shutdown(); }

void NcclQueue::requireOwnProcess(const char* operation) const {
  if (!fork_.forked()) return;
  C10_THROW_ERROR(DistBackendError, c10::str(nameOnGroup(operation, group_, communicator_.rank(),
                                                         communicator_.size()),
                                             ": ", fork_.explain("this group")));
}

NcclWorkPtr NcclQueue::number(Operation& op) {
  std::lock_guard<std::mutex> lock(mutex_);
  op.seq = next_seq_++;
  op.name = c10::str(
      nameOnGroup(toString(op.proposal.op), group_, communicator_.rank(), communicator_.size()),
      ", operation ", op.seq);
  if (!op.proposal.label.empty()) op.name += " '" + op.proposal.label + "'";
  if (op.timeout.count() <= 0) op.timeout = timeout_.load();
  const bool reducing = op.proposal.op == OwnerOp::reduce;
  countSubmission(op, counters_);
  return c10::make_intrusive<NcclWork>(api_, device(), communicator_.rank(),
                                       reducing ? c10d::OpType::REDUCE : c10d::OpType::BROADCAST,
                                       op.seq, op.name, std::move(op.result), std::move(op.memory),
                                       op.timeout);
}

OwnerWorkPtr NcclQueue::submit(const OperationPtr& op) {
  requireOwnProcess(toString(op->proposal.op));
  RECORD_FUNCTION(profilingTitle(*op), std::vector<c10::IValue>{});
  const std::string bad_arguments = op->refusal;
  std::lock_guard<std::mutex> issuing(issue_mutex_);
  const NcclWorkPtr work = number(*op);
  const Range range(*api_, op->name);
  try {
    if (!unusable().empty()) std::rethrow_exception(unusableError(op->name));
    if (op->refusal.empty()) awaitHost(*op);
    if (agreement_) agreement_->reach(*op);
    if (!op->refusal.empty()) {
      reports_.publish(NcclReports::Report::refused, op->seq, op->name + ": " + op->refusal);
      std::rethrow_exception(groupError(op->name + ": " + op->refusal));
    }
    launch(*op, work);
  } catch (const NcclError& error) {
    const std::string text = op->name + ": " + error.what();
    work->fail(groupError(text));
    becomeUnusable(text);
  } catch (...) {
    work->fail(std::current_exception());
  }
  TORCH_CHECK_VALUE(
      bad_arguments.empty(), op->name, ": ", bad_arguments,
      agreement_ || communicator_.size() == 1
          ? ""
          : ". Ranks that did not refuse it, too, wait for this one, and then find "
            "this text. With DMUON_DEBUG=1 all ranks are told before any of them waits");
  return work;
}

// What can only be waited for on the host. A failure makes this rank's refusal.
void NcclQueue::awaitHost(Operation& op) {
  const auto failed = [&op](const std::exception_ptr& error) {
    op.refusal = "the operation that it was to come after has failed: " + messageOf(error);
  };
  try {
    for (const WorkPtr& work : {op.after, WorkPtr(op.inputs_from)}) {
      if (!work) continue;
      if (NcclWork* before = onDevice(work)) {
        if (auto error = before->exception()) return failed(error);
      } else {
        api_->waitFor(communicator_.stream(), *work);
      }
    }
    if (!op.inputs_from) return;
    if (NcclWork* before = onDevice(op.inputs_from)) {
      takeFlags(op, before->gathered().length, before->gathered().known);
    } else {
      const std::vector<uint8_t> flags = op.inputs_from->flags();
      takeFlags(op, flags.size(), flags);
    }
  } catch (...) {
    failed(std::current_exception());
  }
}

void NcclQueue::takeFlags(Operation& op, size_t length, const std::vector<uint8_t>& known) {
  if (length == 0) return;
  if (op.flags.empty()) op.flags.resize(known.empty() ? 0 : length);
  if (op.proposal.flag_bytes != 0 && op.proposal.flag_bytes != length) {
    op.refusal = c10::str("it has ", op.proposal.flag_bytes,
                          " flag bytes, but the operation that it takes flags from has ", length);
    return;
  }
  op.proposal.flag_bytes = static_cast<uint32_t>(length);
  for (size_t i = 0; i < known.size(); ++i) op.flags[i] |= known[i];
}

// Orders the stream after the caller's and after the operations before; returns the flags on the
// device that are taken over.
at::Tensor NcclQueue::order(Operation& op, const NcclWorkPtr& work,
                            const c10::Stream& submitted_on) {
  const NcclEvent ready(api_, device());
  api_->record(ready.get(), submitted_on);
  api_->streamWait(communicator_.stream(), ready.get());
  for (const WorkPtr& before : {op.after, WorkPtr(op.inputs_from)}) {
    NcclWork* const on_device = onDevice(before);
    if (on_device == nullptr) continue;
    api_->streamWait(communicator_.stream(), on_device->end().get());
    on_device->onFailure([weak = weak_from_this(), seq = op.seq](const std::string& error) {
      if (auto queue = weak.lock()) queue->dependencyFailed(seq, error);
    });
  }
  const NcclWork* const from = onDevice(op.inputs_from);
  return from != nullptr ? from->gathered().device : at::Tensor();
}

void NcclQueue::launch(Operation& op, const NcclWorkPtr& work) {
  const int size = communicator_.size();
  const auto& tensors = op.proposal.tensors;
  const std::vector<Segment> segments = op.proposal.op == OwnerOp::reduce
                                            ? planReduce(tensors, size, mode_)
                                            : planBroadcast(tensors, size);
  const c10::Stream submitted_on = api_->currentStream(device());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    launching_ = op.seq;
  }
  const at::Tensor flags_taken = order(op, work, submitted_on);
  Pending pending;
  pending.begin = NcclEvent(api_, device());
  api_->record(pending.begin.get(), communicator_.stream());
  NcclLaunch launch{communicator_, op, segments, flags_taken};
  NcclWork::Flags flags = launch.run(op.timeout);
  NcclEvent end(api_, device());
  api_->record(end.get(), communicator_.stream());
  work->launched(communicator_.stream(), submitted_on, std::move(end), std::move(flags));

  pending.work = work;
  pending.name = op.name;
  pending.seq = op.seq;
  pending.patience = (op.held_back ? 2 : 1) * op.timeout;
  std::string refused;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    launching_.reset();
    countSuccess(op, communicator_.rank(), size, 0, counters_);
    if (const auto found = refused_.find(op.seq); found != refused_.end()) refused = found->second;
    if (unusable_.empty() && !stopping_) {
      pending_.push_back(std::move(pending));
      if (!thread_.joinable()) {
        thread_ = std::thread([self = shared_from_this()] { self->watch(); });
      }
    } else {
      refused = unusable_.empty() ? "it was shut down" : unusable_;  // meanwhile
    }
  }
  changed_.notify_all();
  if (!refused.empty()) becomeUnusable(op.name + ": " + refused, work);
  if (auto why = unusable(); !why.empty()) work->fail(unusableError(op.name));
}

void NcclQueue::drain() {
  requireOwnProcess("drain");
  std::unique_lock<std::mutex> lock(mutex_);
  TORCH_CHECK(thread_.get_id() != std::this_thread::get_id(),
              nameOnGroup("drain", group_, communicator_.rank(), communicator_.size()),
              ": called from a callback of one of the operations it waits for");
  changed_.wait(lock, [this] { return pending_.empty() && !ending_; });
}

void NcclQueue::abort(const std::string& reason) {
  if (fork_.forked()) return;
  becomeUnusable("aborted: " + reason);
}

void NcclQueue::shutdown() {
  if (fork_.forked()) return;
  std::thread thread;
  bool ended = false;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    const auto idle = [this] { return pending_.empty() && !ending_; };
    const bool in_callback = thread_.get_id() == std::this_thread::get_id();
    ended = in_callback ? idle() : changed_.wait_for(lock, timeout_.load(), idle);
    thread.swap(thread_);
  }
  if (!ended) abort("shut down while operations were pending");
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();  // it holds the queue and ends with the callback
  } else if (thread.joinable()) {
    thread.join();
  }
  constexpr std::chrono::milliseconds kPatience{5000};
  communicator_.close(std::min(kPatience, timeout_.load()));
}

OwnerCounters NcclQueue::counters() const {
  requireOwnProcess("counters");
  std::lock_guard<std::mutex> lock(mutex_);
  return counters_;
}

std::string NcclQueue::unusable() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return unusable_.empty() && stopping_ ? "it was shut down" : unusable_;
}

std::exception_ptr NcclQueue::unusableError(const std::string& name) const {
  return groupError(c10::str(name, ": the group is unusable: ", unusable()));
}

}  // namespace dmuon
