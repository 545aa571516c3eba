#include "work_chain.h"

#include <ATen/core/ivalue.h>

#include <mutex>
#include <utility>

#include "host_work.h"

namespace dmuon {
namespace {

struct Chain {
  c10::intrusive_ptr<HostWork> work;
  std::function<void()> then;
  std::mutex mutex;
  size_t pending = 0;
  std::exception_ptr error;

  void oneEnded(c10::ivalue::Future& ended) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (ended.hasError() && !error) error = ended.exception_ptr();
      if (--pending > 0) return;
    }
    try {
      if (!error) then();
    } catch (...) {
      error = std::current_exception();
    }
    then = {};  // releases scratch
    if (error) {
      work->fail(error);
    } else {
      work->succeed({});
    }
  }
};

class AllWorks final : public c10d::Work {
 public:
  AllWorks(std::vector<WorkPtr> works, int rank)
      : c10d::Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    for (const WorkPtr& work : works_) {
      if (!work->isCompleted()) return false;
    }
    return true;
  }
  bool isSuccess() const override {
    for (const WorkPtr& work : works_) {
      if (!work->isSuccess()) return false;
    }
    return true;
  }
  std::exception_ptr exception() const override {
    for (const WorkPtr& work : works_) {
      if (auto error = work->exception()) return error;
    }
    return nullptr;
  }
  void synchronize() override {
    for (const WorkPtr& work : works_) work->synchronize();
  }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    bool all = true;
    for (const WorkPtr& work : works_) all = work->wait(timeout) && all;
    return all;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
        c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
    for (const WorkPtr& work : works_) futures.push_back(work->getFuture());
    return c10::collectAll(futures);
  }

 private:
  const std::vector<WorkPtr> works_;
};

}  // namespace

WorkPtr afterAll(const std::vector<WorkPtr>& works, ChainInfo info, std::function<void()> then) {
  auto chain = std::make_shared<Chain>();
  chain->work = c10::make_intrusive<HostWork>(info.rank, info.type, info.seq, std::move(info.name),
                                              std::move(info.outputs), kNoTimeout);
  chain->then = std::move(then);
  chain->pending = works.size();
  const WorkPtr result = chain->work;
  for (const WorkPtr& work : works) {
    work->getFuture()->addCallback([chain](c10::ivalue::Future& ended) { chain->oneEnded(ended); });
  }
  return result;
}

c10::intrusive_ptr<c10::ivalue::Future> futureOf(const WorkPtr& work) {
  try {
    return work->getFuture();
  } catch (const std::exception&) {
    return {};
  }
}

WorkPtr waitForAll(std::vector<WorkPtr> works, int rank) {
  return c10::make_intrusive<AllWorks>(std::move(works), rank);
}

}  // namespace dmuon
