// Those who want to hear of a group's operations: torch's flight recorder above all
// (c10d/Hooks.hpp). Collectives that pass torch's dispatcher are announced there; owner collectives
// do not, and are announced here.
//
// Thread-safe. Hooks run on the thread that reports, without any lock held.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include <dmuon/backend/owner_collectives.h>

namespace dmuon {

class Hooks {
 public:
  using Abort = std::function<void()>;
  using Completion = std::function<void(uint64_t key, std::optional<float> milliseconds)>;
  // Before and after an owner collective is submitted; `after` gets what `before` has returned.
  struct Submission {
    std::function<int64_t(c10d::OpType type, const std::vector<at::Tensor>& inputs,
                          const std::vector<at::Tensor>& outputs)>
        before;
    std::function<void(c10d::OpType type, int64_t id, const WorkPtr& work)> after;
  };

  void addAbort(int64_t id, Abort hook);
  void removeAbort(int64_t id);
  void addCompletion(int64_t id, Completion hook);
  void removeCompletion(int64_t id);
  void setSubmission(Submission hooks);

  // Calls `submit` between the submission hooks.
  OwnerWorkPtr announce(c10d::OpType type, const std::vector<at::Tensor>& inputs,
                        const std::vector<at::Tensor>& outputs,
                        const std::function<OwnerWorkPtr()>& submit) const;
  // The operation with this Work::getCompletionKey() has ended well.
  void completed(uint64_t key, std::optional<float> milliseconds) const;
  // An operation has failed, or will now be made to fail. May take many seconds, and needs Python's
  // interpreter lock if torch's flight recorder listens.
  void failed() const;

  // Reports the end of somebody else's Work, if anybody wants to hear of it. Returns the Work to
  // hand out: the same one, or one around it that sees the end in wait().
  static WorkPtr watch(const std::shared_ptr<Hooks>& hooks, WorkPtr work);

 private:
  bool anyEnds() const;

  mutable std::mutex mutex_;
  std::map<int64_t, Abort> abort_;
  std::map<int64_t, Completion> completion_;
  Submission submission_;
};

// Never given twice in a process.
uint64_t newCompletionKey();

}  // namespace dmuon
