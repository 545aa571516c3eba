// Ends blocking waits from outside, at a deadline or on request.
//
// Why it exists: when Gloo's own wait times out, Gloo closes every connection of the group, so the
// rank could neither tell its peers what happened nor go on with other collectives. The owner
// collectives therefore wait without a time-out of Gloo's and let this thread abort the one wait.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "peers.h"

namespace dmuon {

// One thread for any number of waiting threads; started by the first wait.
class Watchdog {
 public:
  // A thread's place to wait at.
  struct Post {
    c10d::Work* work = nullptr;  // what is being waited for, if anything is
    Clock::time_point deadline;
    bool aborted = false;      // the current wait was ended
    bool interrupted = false;  // every wait is
  };

  Watchdog() = default;
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void add(Post* post);
  void remove(Post* post);

  // From now until disarm(), work->abort() is called at the deadline or on interrupt(), at once if
  // there was an interrupt() before.
  void arm(Post* post, c10d::Work* work, Clock::time_point deadline);
  // Returns whether abort() was called. It will not be called after this has returned.
  bool disarm(Post* post);

  // Aborts the current and all later waits at this post.
  void interrupt(Post* post);
  bool interrupted(const Post* post) const;

 private:
  void run();
  static void abort(Post* post);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Post*> posts_;
  // When the thread wakes next. It is notified only to wake earlier, so that a wait which ends in
  // time, the usual case, costs no context switch.
  Clock::time_point wake_ = Clock::time_point::max();
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace dmuon
