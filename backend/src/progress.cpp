#include "progress.h"

#include <chrono>
#include <utility>

namespace dmuon {
namespace {

constexpr std::chrono::milliseconds kLook{50};  // how soon `stop` is noticed

}  // namespace

void Progress::agreed(std::vector<uint8_t> flags) {
  std::lock_guard<std::mutex> lock(mutex_);
  agreed_ = true;
  flags_ = std::move(flags);
  if (waiting_ > 0) changed_.notify_all();
}

void Progress::advance(const std::vector<Reached>& reached) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Reached& one : reached) ready_[one.tensor] = one.bytes;
  if (waiting_ > 0) changed_.notify_all();
}

void Progress::end(const std::string& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (ended_) return;
  ended_ = true;
  error_ = error;
  changed_.notify_all();
}

Progress::Outcome Progress::await(const std::function<bool()>& there, const Stop& stop) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto over = [&] { return ended_ || there(); };
  ++waiting_;
  while (!changed_.wait_for(lock, kLook, over)) {
    lock.unlock();
    const bool stopped = stop();
    lock.lock();
    if (stopped) break;
  }
  --waiting_;
  if (ended_ && !error_.empty()) return Outcome::failed;
  return over() ? Outcome::reached : Outcome::stopped;
}

Progress::Outcome Progress::awaitAgreed(const Stop& stop) {
  return await([this] { return agreed_; }, stop);
}

Progress::Outcome Progress::awaitBytes(size_t tensor, int64_t bytes, const Stop& stop) {
  return await([=, this] { return ready_[tensor] >= bytes; }, stop);
}

Progress::Outcome Progress::awaitEnd(const Stop& stop) {
  return await([] { return false; }, stop);
}

std::string Progress::error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

std::vector<uint8_t> Progress::flags() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return flags_;
}

}  // namespace dmuon
