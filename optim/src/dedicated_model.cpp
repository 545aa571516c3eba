#include <dmuon/optim/dedicated_model.h>

#include <c10/util/Exception.h>

#include <utility>

namespace dmuon::optim {

DedicatedModel::DedicatedModel(std::vector<std::shared_ptr<DedicatedUnit>> units,
                               std::function<void()> gradient_outside)
    : units_(std::move(units)),
      gradient_outside_(std::move(gradient_outside)),
      sync_(units_.size()) {}

void DedicatedModel::attach(int64_t index, std::vector<at::Tensor> live_parameters) {
  DedicatedUnit::Callbacks callbacks;
  callbacks.arriving = [weak = weak_from_this()] {
    auto model = weak.lock();
    if (model && !model->in_backward_ && model->gradient_outside_) model->gradient_outside_();
  };
  callbacks.complete = [weak = weak_from_this()] {
    if (auto model = weak.lock()) model->launchReady();
  };
  units_.at(index)->attach(std::move(live_parameters), std::move(callbacks));
}

void DedicatedModel::beginBackward(int graph_task) {
  if (in_backward_) return;
  in_backward_ = true;
  next_ = static_cast<int64_t>(units_.size()) - 1;
  sync_.assign(units_.size(), std::nullopt);
  for (const auto& unit : units_) unit->beginBackward(graph_task);
}

void DedicatedModel::setSync(int64_t index, const GradientSync& sync) { sync_.at(index) = sync; }

void DedicatedModel::launchReady() {
  if (!in_backward_) return;
  for (; next_ >= 0; --next_) {
    const auto& unit = units_[next_];
    if (!unit->trainable()) continue;
    if (!sync_[next_] || !unit->complete()) return;
    if (sync_[next_]->reduce) unit->reduce(*sync_[next_]);
  }
}

std::vector<std::vector<DedicatedUnit::Reduced>> DedicatedModel::finishBackward(
    const std::vector<GradientSync>& fallback) {
  TORCH_CHECK(fallback.size() == units_.size(), "dmuon: ", units_.size(), " units but ",
              fallback.size(), " gradient settings");
  for (; in_backward_ && next_ >= 0; --next_) {
    const auto& unit = units_[next_];
    const auto& sync = sync_[next_] ? *sync_[next_] : fallback[next_];
    if (unit->trainable() && sync.reduce) unit->reduce(sync);
  }
  in_backward_ = false;
  std::vector<std::vector<DedicatedUnit::Reduced>> results(units_.size());
  for (auto i = static_cast<int64_t>(units_.size()) - 1; i >= 0; --i) {
    results[i] = units_[i]->waitReduce();
  }
  return results;
}

void DedicatedModel::abandonBackward() {
  in_backward_ = false;
  for (const auto& unit : units_) unit->dropGradients();
}

}  // namespace dmuon::optim
