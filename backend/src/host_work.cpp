#include "host_work.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <mutex>
#include <utility>

#include "hooks.h"
#include "profiled_range.h"
#include "progress.h"

namespace dmuon {

std::string messageOf(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

HostWork::HostWork(int rank, c10d::OpType type, uint64_t seq, std::string name,
                   std::vector<at::Tensor> outputs, std::chrono::milliseconds timeout)
    : HostWork(rank, type, seq, std::move(name), std::move(outputs), timeout, "", {}) {}

HostWork::HostWork(int rank, c10d::OpType type, uint64_t seq, std::string name,
                   std::vector<at::Tensor> outputs, std::chrono::milliseconds timeout,
                   std::string label, std::shared_ptr<Progress> progress)
    : OwnerWork(rank, type),
      seq_(seq),
      completion_key_(newCompletionKey()),
      name_(std::move(name)),
      outputs_(std::move(outputs)),
      timeout_(timeout),
      label_(std::move(label)),
      progress_(std::move(progress)),
      future_(
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {
}

void HostWork::profile(const std::string& title, const std::vector<at::Tensor>& inputs) {
  auto range = std::make_shared<ProfiledRange>(title, inputs);
  recordFunctionEndCallback_ = [range] { range->close(); };
}

// A callback that throws must not take the group's thread with it.
template <typename Complete>
void HostWork::completeFuture(Complete&& complete) {
  try {
    complete();
  } catch (const std::exception& error) {
    TORCH_WARN(name_, ": a callback on its future has thrown: ", error.what());
  }
}

// The work is completed before its future: a callback may wait for the work it belongs to.
void HostWork::succeed(std::vector<uint8_t> flags) {
  {
    std::unique_lock lock(mutex_);
    flags_ = std::move(flags);
  }
  if (progress_) progress_->end("");
  finish();
  completeFuture([this] { future_->markCompleted(c10::IValue(outputs_)); });
}

void HostWork::fail(std::exception_ptr error) {
  if (progress_) progress_->end(messageOf(error));
  finish(error);
  completeFuture([&] { future_->setError(error); });
}

bool HostWork::isCompleted() {
  requireOwnProcess();
  std::unique_lock lock(mutex_);
  return completed_;
}

bool HostWork::isSuccess() const {
  std::unique_lock lock(mutex_);
  return completed_ && !exception_;
}

std::exception_ptr HostWork::exception() const {
  std::unique_lock lock(mutex_);
  return exception_;
}

// The mutex may be held by a thread that is not there in the child.
void HostWork::requireOwnProcess() {
  if (!fork_.forked()) return;
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock && completed_) return;
  C10_THROW_ERROR(DistBackendError, c10::str(name_, ": ", fork_.explain("this operation")));
}

bool HostWork::wait(std::chrono::milliseconds timeout) {
  requireOwnProcess();
  at::RecordFunction range(at::RecordScope::USER_SCOPE);
  if (range.isActive()) range.before("dmuon::wait" + (label_.empty() ? "" : " " + label_));
  {
    std::unique_lock lock(mutex_);
    const auto completed = [this] { return completed_; };
    if (timeout == kNoTimeout) {
      cv_.wait(lock, completed);
    } else if (!cv_.wait_for(lock, timeout, completed)) {
      C10_THROW_ERROR(DistBackendError,
                      c10::str(name_, ": not complete after the ", timeout.count(),
                               " ms that wait() was given. It goes on; wait again for its end"));
    }
  }
  future_->wait();  // so that a future is never behind the work it came from
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void HostWork::requireSuccess(const char* what) {
  std::unique_lock lock(mutex_);
  TORCH_CHECK(completed_, name_, ": ", what, " is known once wait() has returned");
  if (exception_) std::rethrow_exception(exception_);
}

std::vector<uint8_t> HostWork::flags() {
  requireSuccess("flags()");
  return flags_;
}

std::vector<at::Tensor> HostWork::result() {
  requireSuccess("result()");
  return outputs_;
}

}  // namespace dmuon
