#include "nccl_work.h"

#include <ATen/core/ivalue.h>

#include <thread>
#include <utility>

#include "hooks.h"
#include "host_work.h"
#include "peers.h"

namespace dmuon {

NcclWork::NcclWork(NcclApiPtr api, c10::Device device, int rank, c10d::OpType type, uint64_t seq,
                   std::string name, std::vector<at::Tensor> outputs,
                   std::vector<at::Tensor> memory, std::chrono::milliseconds timeout)
    : OwnerWork(rank, type),
      api_(std::move(api)),
      device_(device),
      seq_(seq),
      completion_key_(newCompletionKey()),
      name_(std::move(name)),
      outputs_(std::move(outputs)),
      timeout_(timeout),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()), api_->futureDevices(device))),
      future_at_launch_(!future_->devices().empty()),
      memory_(std::move(memory)) {}

// Those of the outputs that there are: the future must not look for one in an undefined tensor.
std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> NcclWork::storages() const {
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> all;
  for (const at::Tensor& tensor : outputs_) {
    if (tensor.defined()) all.emplace_back(tensor.storage().getWeakStorageImpl());
  }
  return all;
}

void NcclWork::launched(const c10::Stream& on, const c10::Stream& submitted_on, NcclEvent end,
                        Flags flags) {
  end_ = std::move(end);
  flags_ = std::move(flags);
  submitted_on_ = submitted_on;
  {
    std::lock_guard<std::mutex> lock(state_mutex_);
    phase_ = Phase::launched;
  }
  if (!future_at_launch_) return;
  api_->enqueue(on, [this] { future_->markCompleted(c10::IValue(outputs_), storages()); });
}

void NcclWork::succeed() {
  std::vector<at::Tensor> released;
  {
    std::lock_guard<std::mutex> lock(state_mutex_);
    if (phase_ != Phase::launched) return;
    phase_ = Phase::succeeded;
    released.swap(memory_);
    released.push_back(std::move(flags_.taken));
    on_failure_.clear();
  }
  finish();
  if (future_at_launch_) return;
  try {
    future_->markCompleted(c10::IValue(outputs_));
  } catch (const std::exception& error) {
    TORCH_WARN(name_, ": a callback on its future has thrown: ", error.what());
  }
}

void NcclWork::fail(std::exception_ptr error) {
  std::vector<std::function<void(const std::string&)>> callbacks;
  bool was_launched = false;
  {
    std::lock_guard<std::mutex> lock(state_mutex_);
    if (phase_ == Phase::succeeded || phase_ == Phase::failed) return;
    was_launched = phase_ == Phase::launched;
    phase_ = Phase::failed;
    error_ = error;
    callbacks.swap(on_failure_);
    // Memory that kernels may still touch is kept as long as the Work.
    if (!was_launched) memory_.clear();
  }
  for (const auto& callback : callbacks) callback(messageOf(error));
  finish(error);
  if (was_launched && future_at_launch_) return;
  try {
    future_->setErrorIfNeeded(error);
  } catch (const std::exception& thrown) {
    TORCH_WARN(name_, ": a callback on its future has thrown: ", thrown.what());
  }
}

void NcclWork::onFailure(std::function<void(const std::string&)> callback) {
  std::string text;
  {
    std::lock_guard<std::mutex> lock(state_mutex_);
    if (phase_ == Phase::succeeded) return;
    if (phase_ != Phase::failed) {
      on_failure_.push_back(std::move(callback));
      return;
    }
    text = messageOf(error_);
  }
  callback(text);
}

bool NcclWork::endSeen() {
  {
    std::lock_guard<std::mutex> lock(state_mutex_);
    if (phase_ == Phase::submitted || !end_) return false;
    if (phase_ == Phase::succeeded) return true;
  }
  return api_->query(end_.get());
}

bool NcclWork::isCompleted() {
  {
    std::lock_guard<std::mutex> lock(state_mutex_);
    if (phase_ == Phase::failed || phase_ == Phase::succeeded) return true;
  }
  return endSeen();
}

bool NcclWork::isSuccess() const {
  std::lock_guard<std::mutex> lock(state_mutex_);
  if (phase_ == Phase::succeeded) return true;
  return phase_ == Phase::launched && api_->query(end_.get());
}

std::exception_ptr NcclWork::exception() const {
  std::lock_guard<std::mutex> lock(state_mutex_);
  return error_;
}

void NcclWork::throwIfFailed() const {
  if (auto error = exception()) std::rethrow_exception(error);
}

void NcclWork::synchronize() {
  throwIfFailed();
  const c10::Stream current = api_->currentStream(device_);
  api_->streamWait(current, end_.get());
  std::vector<at::Tensor> released;
  std::lock_guard<std::mutex> lock(state_mutex_);
  waited_ = true;
  if (phase_ != Phase::failed && current == *submitted_on_) released.swap(memory_);
}

bool NcclWork::wait(std::chrono::milliseconds timeout) {
  if (timeout != kNoTimeout) {
    const auto deadline = Clock::now() + timeout;
    while (!isCompleted()) {
      if (Clock::now() >= deadline) {
        C10_THROW_ERROR(DistBackendError,
                        c10::str(name_, ": not complete after the ", timeout.count(),
                                 " ms that wait() was given. It goes on; wait again for its end"));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  synchronize();
  throwIfFailed();
  if (!future_at_launch_) future_->wait();  // never behind the work it came from
  return true;
}

std::vector<uint8_t> NcclWork::flags() {
  throwIfFailed();
  api_->hostWait(end_.get());
  throwIfFailed();
  std::vector<uint8_t> merged = flags_.known;
  merged.resize(flags_.length);
  if (!flags_.host.defined()) return merged;
  const auto* bytes = flags_.host.const_data_ptr<uint8_t>();
  for (int64_t i = 0; i < flags_.host.numel(); ++i) merged[i % flags_.length] |= bytes[i];
  return merged;
}

void NcclWork::requireWaited(const char* what) {
  throwIfFailed();
  std::unique_lock<std::mutex> lock(state_mutex_);
  const bool known = waited_ || phase_ == Phase::succeeded;
  TORCH_CHECK(known, name_, ": ", what, " is known once wait() has returned");
}

std::vector<at::Tensor> NcclWork::result() {
  requireWaited("result()");
  return outputs_;
}

}  // namespace dmuon
