#include "staged_work.h"

#include <ATen/core/ivalue.h>

#include <tuple>
#include <utility>

#include "nccl_work.h"

namespace dmuon {
namespace {

using Future = c10::ivalue::Future;

class StagedWork final : public OwnerWork {
 public:
  StagedWork(OwnerWorkPtr one, OwnerWorkPtr two, int rank, std::vector<at::Tensor> outputs)
      : OwnerWork(rank, two->retrieveOpType()),
        one_(std::move(one)),
        two_(std::move(two)),
        outputs_(std::move(outputs)) {
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
    for (const at::Tensor& tensor : outputs_) {
      if (tensor.defined()) storages.emplace_back(tensor.storage().getWeakStorageImpl());
    }
    const auto type = c10::ListType::create(c10::TensorType::get());
    future_ = two_->getFuture()->then(
        [outputs = outputs_, storages](Future& ended) {
          if (ended.hasError()) std::rethrow_exception(ended.exception_ptr());
          return std::make_tuple(c10::IValue(outputs), storages);
        },
        type);
  }

  std::vector<uint8_t> flags() override { return two_->flags(); }
  bool isCompleted() override { return two_->isCompleted(); }
  bool isSuccess() const override { return two_->isSuccess(); }
  std::exception_ptr exception() const override { return two_->exception(); }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    if (auto error = exception()) std::rethrow_exception(error);
    one_->synchronize();
    return two_->wait(timeout);
  }
  std::vector<at::Tensor> result() override {
    two_->result();
    return outputs_;
  }
  c10::intrusive_ptr<Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return two_->getSequencenumber(); }

 private:
  const OwnerWorkPtr one_;
  const OwnerWorkPtr two_;
  const std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<Future> future_;
};

}  // namespace

OwnerWorkPtr stagedOnDevice(const OwnerWorkPtr& one, const OwnerWorkPtr& two, int rank,
                            const std::vector<at::Tensor>& outputs) {
  if (dynamic_cast<NcclWork*>(one.get()) == nullptr) return {};
  if (dynamic_cast<NcclWork*>(two.get()) == nullptr) return {};
  return c10::make_intrusive<StagedWork>(one, two, rank, outputs);
}

}  // namespace dmuon
