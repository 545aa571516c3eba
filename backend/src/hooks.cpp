#include "hooks.h"

#include <ATen/core/ivalue.h>

#include <atomic>
#include <memory>
#include <utility>

#include <dmuon/backend/torch_features.h>

#include "work_chain.h"

namespace dmuon {
namespace {

// A hook that throws must not take down the thread that reports.
template <typename Call>
void guarded(const char* what, Call&& call) {
  try {
    call();
  } catch (const std::exception& error) {
    TORCH_WARN("dmuon: ", what, " has thrown: ", error.what());
  }
}

uint64_t keyOf(const c10d::Work& work) {
#ifdef DMUON_TORCH_HAS_COMPLETION_HOOKS
  return work.getCompletionKey();
#else
  return reinterpret_cast<uintptr_t>(&work);
#endif
}

// Around a Work that has no future (a send or a receive of Gloo): reports what wait() sees.
class WatchedWork final : public c10d::Work {
 public:
  WatchedWork(WorkPtr work, std::shared_ptr<Hooks> hooks)
      : c10d::Work(-1, work->retrieveOpType()),
        work_(std::move(work)),
        hooks_(std::move(hooks)),
        key_(newCompletionKey()) {}

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  void synchronize() override { work_->synchronize(); }
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return work_->getFuture(); }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }
  uint64_t getCompletionKey() const { return key_; }  // overrides, from torch 2.15 on
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    bool done = false;
    try {
      done = work_->wait(timeout);
    } catch (...) {
      if (!reported_.exchange(true)) hooks_->failed();
      throw;
    }
    if (done && !reported_.exchange(true)) hooks_->completed(key_, std::nullopt);
    return done;
  }

 private:
  const WorkPtr work_;
  const std::shared_ptr<Hooks> hooks_;
  const uint64_t key_;
  std::atomic<bool> reported_{false};
};

}  // namespace

uint64_t newCompletionKey() {
  // The upper half of the numbers: a Work without a key of its own has its address.
  static std::atomic<uint64_t> next{uint64_t{1} << 63};
  return next++;
}

void Hooks::addAbort(int64_t id, Abort hook) {
  std::lock_guard<std::mutex> lock(mutex_);
  abort_[id] = std::move(hook);
}

void Hooks::removeAbort(int64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  abort_.erase(id);
}

void Hooks::addCompletion(int64_t id, Completion hook) {
  std::lock_guard<std::mutex> lock(mutex_);
  completion_[id] = std::move(hook);
}

void Hooks::removeCompletion(int64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  completion_.erase(id);
}

void Hooks::setSubmission(Submission hooks) {
  std::lock_guard<std::mutex> lock(mutex_);
  submission_ = std::move(hooks);
}

bool Hooks::anyEnds() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !abort_.empty() || !completion_.empty();
}

OwnerWorkPtr Hooks::announce(c10d::OpType type, const std::vector<at::Tensor>& inputs,
                             const std::vector<at::Tensor>& outputs,
                             const std::function<OwnerWorkPtr()>& submit) const {
  Submission hooks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    hooks = submission_;
  }
  if (!hooks.before) return submit();
  const int64_t id = hooks.before(type, inputs, outputs);
  OwnerWorkPtr work = submit();
  hooks.after(type, id, work);
  return work;
}

void Hooks::completed(uint64_t key, std::optional<float> milliseconds) const {
  std::map<int64_t, Completion> hooks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    hooks = completion_;
  }
  for (const auto& [id, hook] : hooks) {
    guarded("a completion hook", [&, &call = hook] { call(key, milliseconds); });
  }
}

void Hooks::failed() const {
  std::map<int64_t, Abort> hooks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    hooks = abort_;
  }
  for (const auto& [id, hook] : hooks) guarded("an abort hook", hook);
}

WorkPtr Hooks::watch(const std::shared_ptr<Hooks>& hooks, WorkPtr work) {
  if (!work || !hooks->anyEnds()) return work;
  const auto future = futureOf(work);
  if (!future) return c10::make_intrusive<WatchedWork>(std::move(work), hooks);
  future->addCallback([hooks, key = keyOf(*work)](c10::ivalue::Future& ended) {
    if (ended.hasError()) {
      hooks->failed();
    } else {
      hooks->completed(key, std::nullopt);
    }
  });
  return work;
}

}  // namespace dmuon
