#include "watchdog.h"

#include <algorithm>

namespace dmuon {

Watchdog::~Watchdog() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Watchdog::add(Post* post) {
  std::lock_guard<std::mutex> lock(mutex_);
  posts_.push_back(post);
}

void Watchdog::remove(Post* post) {
  std::lock_guard<std::mutex> lock(mutex_);
  posts_.erase(std::find(posts_.begin(), posts_.end(), post));
}

void Watchdog::arm(Post* post, c10d::Work* work, Clock::time_point deadline) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  post->work = work;
  post->deadline = deadline;
  post->aborted = false;
  if (post->interrupted) abort(post);
  if (deadline < wake_) {
    wake_ = deadline;
    changed_.notify_one();
  }
}

bool Watchdog::disarm(Post* post) {
  std::lock_guard<std::mutex> lock(mutex_);
  post->work = nullptr;
  return post->aborted;
}

void Watchdog::interrupt(Post* post) {
  std::lock_guard<std::mutex> lock(mutex_);
  post->interrupted = true;
  if (post->work != nullptr) abort(post);
}

bool Watchdog::interrupted(const Post* post) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return post->interrupted;
}

void Watchdog::abort(Post* post) {
  post->aborted = true;
  post->work->abort();
  post->work = nullptr;
}

void Watchdog::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_) {
    const auto now = Clock::now();
    wake_ = Clock::time_point::max();
    for (Post* post : posts_) {
      if (post->work == nullptr) continue;
      if (now >= post->deadline) {
        abort(post);
      } else {
        wake_ = std::min(wake_, post->deadline);
      }
    }
    if (wake_ == Clock::time_point::max()) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(lock, wake_);
    }
  }
}

}  // namespace dmuon
