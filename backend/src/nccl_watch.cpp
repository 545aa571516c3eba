// The part of NcclQueue that watches over what has been launched.
#include <algorithm>
#include <utility>

#include "nccl_queue.h"

namespace dmuon {
namespace {

constexpr std::chrono::milliseconds kShortestPause{1};
constexpr std::chrono::milliseconds kLongestPause{5};
// From when on, and how often, an operation that takes long is looked up in the store.
constexpr std::chrono::milliseconds kLong{1000};
constexpr std::chrono::milliseconds kBetweenPolls{200};

// A device in a bad state throws instead.
bool hasEnded(NcclWork& work) {
  try {
    return work.endSeen();
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

void NcclQueue::watch() {
  api_->useDevice(device());
  auto pause = kShortestPause;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    if (pending_.empty()) {
      changed_.notify_all();
      changed_.wait(lock, [this] { return stopping_ || !pending_.empty(); });
      if (pending_.empty()) return;
      pause = kShortestPause;
    }
    lock.unlock();
    bool progress = true;
    try {
      progress = look();
    } catch (const std::exception& error) {
      becomeUnusable(std::string("the device reports: ") + error.what());
    }
    lock.lock();
    if (pending_.empty()) continue;
    pause = progress ? kShortestPause : std::min(2 * pause, kLongestPause);
    changed_.wait_for(lock, pause);
  }
}

// Completes what has ended, or fails everything. Returns whether anything has happened.
bool NcclQueue::look() {
  bool progress = false;
  while (true) {
    Pending front;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (pending_.empty()) return true;
      front = pending_.front();
    }
    if (!front.work->endSeen()) break;
    front.work->succeed();
    if (hooks_) hooks_->completed(front.work->getCompletionKey(), std::nullopt);
    std::lock_guard<std::mutex> lock(mutex_);
    if (!pending_.empty() && pending_.front().work == front.work) pending_.pop_front();
    if (!pending_.empty()) stuck_.erase(stuck_.begin(), stuck_.lower_bound(pending_.front().seq));
    progress = true;
  }
  if (auto error = communicator_.error()) {
    NcclWorkPtr first;
    std::string name;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (pending_.empty()) return true;
      first = pending_.front().work;
      name = pending_.front().name;
    }
    becomeUnusable(name + ": NCCL reports: " + *error, first);
    return true;
  }

  Pending front;
  std::chrono::milliseconds waited{0};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (pending_.empty()) return true;
    Pending& oldest = pending_.front();
    if (!oldest.began && api_->query(oldest.begin.get())) oldest.began = Clock::now();
    if (!oldest.began) return progress;
    waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - *oldest.began);
    front = oldest;
    if (2 * waited >= oldest.patience) oldest.said_stuck = true;
  }
  if (2 * waited >= front.patience && !front.said_stuck) {
    reports_.publish(NcclReports::Report::stuck, front.seq, front.name);
  }
  if (lookAtReports(front, waited)) return true;
  if (waited >= front.patience) becomeUnusable(timedOut(front, waited), front.work);
  return progress;
}

// Whether another rank has said why this operation will not end.
bool NcclQueue::lookAtReports(Pending& front, std::chrono::milliseconds waited) {
  if (waited < std::min(kLong, front.patience / 2) || Clock::now() < next_poll_) return false;
  next_poll_ = Clock::now() + std::min(kBetweenPolls, front.patience / 8);
  for (const auto& report : reports_.poll()) {
    std::lock_guard<std::mutex> lock(mutex_);
    const std::string said = c10::str("rank ", report.rank, " says: ", report.text);
    if (report.kind == NcclReports::Report::stuck) {
      stuck_[report.seq].insert(report.rank);
    } else if (report.kind == NcclReports::Report::refused) {
      refused_[report.seq] = said;
    } else if (!ended_) {
      ended_ = said;
    }
  }
  std::string why;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = refused_.find(front.seq); found != refused_.end()) {
      why = found->second;
    } else if (ended_) {
      why = *ended_;
    }
    refused_.erase(refused_.begin(), refused_.lower_bound(front.seq));
  }
  if (why.empty()) return false;
  becomeUnusable(front.name + ": " + why, front.work);
  return true;
}

std::string NcclQueue::timedOut(const Pending& front, std::chrono::milliseconds waited) const {
  std::vector<int> silent;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto said = stuck_.find(front.seq);
    for (int rank = 0; rank < communicator_.size(); ++rank) {
      const bool waits = said != stuck_.end() && said->second.count(rank) > 0;
      if (rank != communicator_.rank() && !waits) silent.push_back(rank);
    }
  }
  if (silent.empty()) {
    return c10::str(front.name, ": not over after ", waited.count(),
                    " ms (the time-out), though every rank waits in it");
  }
  return c10::str(front.name, ": ", rankList(silent), " did not take part within ",
                  front.patience.count(), " ms (by what the ranks say; it is not over after ",
                  waited.count(), " ms). Slow, stopped, gone, or at another operation?");
}

// Called before what the other operation has left undone is let go: this group's kernels that wait
// for it must not run.
void NcclQueue::dependencyFailed(uint64_t seq, const std::string& error) {
  NcclWorkPtr work;
  std::string name = c10::str("operation ", seq);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(pending_.begin(), pending_.end(),
                                    [seq](const Pending& one) { return one.seq == seq; });
    if (found != pending_.end()) {
      work = found->work;
      name = found->name;
    } else if (launching_ != seq) {
      return;
    }
  }
  becomeUnusable(name + ": the operation that it was to come after has failed: " + error, work);
}

void NcclQueue::becomeUnusable(const std::string& why, const NcclWorkPtr& culprit) {
  std::deque<Pending> pending;
  uint64_t first = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!unusable_.empty()) return;
    unusable_ = why;
    pending.swap(pending_);
    first = pending.empty() ? next_seq_ : pending.front().seq;
    ending_ = true;
  }
  // In their order: what had ended before is as good as ever. Those who go on with a result are
  // stopped (NcclWork::onFailure) before the abort below ends the kernels they wait for.
  bool intact = true;
  for (const Pending& one : pending) {
    intact = intact && hasEnded(*one.work);
    if (intact) {
      one.work->succeed();
    } else {
      one.work->fail(one.work == culprit
                         ? std::make_exception_ptr(c10::DistBackendError(
                               {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, why))
                         : unusableError(one.name));
    }
  }
  reports_.publish(NcclReports::Report::ended, first, why);
  communicator_.abort();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = false;
  }
  changed_.notify_all();
  // Last: torch's flight recorder takes many seconds here if it must load what it needs to describe
  // stacks. What it records does not depend on the Works.
  if (hooks_) hooks_->failed();
}

}  // namespace dmuon
