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
  StagedWork(OwnerWorkPtr one, OwnerWorkPtr two, OwnerWorkPtr flags_of, int rank,
             std::vector<at::Tensor> outputs)
      : OwnerWork(rank, two->retrieveOpType()),
        one_(std::move(one)),
        two_(std::move(two)),
        flags_of_(std::move(flags_of)),
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

  std::vector<uint8_t> flags() override { return flags_of_->flags(); }
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
  const OwnerWorkPtr flags_of_;
  const std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<Future> future_;
};

}  // namespace

OwnerWorkPtr stagedOnDevice(const OwnerWorkPtr& one, const OwnerWorkPtr& two,
                            const OwnerWorkPtr& flags_of, int rank,
                            const std::vector<at::Tensor>& outputs) {
  if (dynamic_cast<NcclWork*>(one.get()) == nullptr) return {};
  if (dynamic_cast<NcclWork*>(two.get()) == nullptr) return {};
  return c10::make_intrusive<StagedWork>(one, two, flags_of, rank, outputs);
}

}  // namespace dmuon
