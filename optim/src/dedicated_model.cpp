#include <dmuon/optim/dedicated_model.h>

#include <c10/util/Exception.h>

#include <utility>

namespace dmuon::optim {
namespace {

constexpr size_t kMostInFlight = 2;

}  // namespace

DedicatedModel::DedicatedModel(std::vector<std::shared_ptr<DedicatedUnit>> units,
                               std::function<void()> gradient_outside)
    : units_(std::move(units)),
      gradient_outside_(std::move(gradient_outside)),
      sync_(units_.size()) {}

void DedicatedModel::attach(int64_t index, std::vector<at::Tensor> live_parameters) {
  const auto arriving = [weak = weak_from_this()] {
    auto model = weak.lock();
    if (model && !model->in_backward_ && model->gradient_outside_) model->gradient_outside_();
  };
  const auto complete = [weak = weak_from_this()] {
    if (auto model = weak.lock()) model->launchReady();
  };
  units_.at(index)->attach(std::move(live_parameters), arriving, complete);
}

void DedicatedModel::beginBackward(int graph_task) {
  if (in_backward_) return;
  in_backward_ = true;
  next_ = static_cast<int64_t>(units_.size()) - 1;
  sync_.assign(units_.size(), std::nullopt);
  for (const auto& unit : units_) unit->gradients().beginBackward(graph_task);
}

void DedicatedModel::setSync(int64_t index, const GradientSync& sync) { sync_.at(index) = sync; }

void DedicatedModel::launch(int64_t index, const GradientSync& sync) {
  auto& gradients = units_[index]->gradients();
  if (!sync.reduce) {
    gradients.accumulate();
    return;
  }
  while (in_flight_.size() >= kMostInFlight) {
    units_[in_flight_.front()]->gradients().settle();
    in_flight_.pop_front();
  }
  gradients.reduce(sync);
  in_flight_.push_back(index);
}

void DedicatedModel::launchReady() {
  if (!in_backward_) return;
  for (; next_ >= 0; --next_) {
    const auto& gradients = units_[next_]->gradients();
    if (!gradients.toReduce()) continue;
    if (!sync_[next_] || !gradients.complete()) return;
    launch(next_, *sync_[next_]);
  }
}

void DedicatedModel::pass(int64_t index) {
  if (!in_backward_) return;
  units_.at(index)->gradients().pass();
  units_[index]->reshard();
  launchReady();
}

void DedicatedModel::finishBackward(const std::vector<GradientSync>& fallback) {
  TORCH_CHECK(fallback.size() == units_.size(), "dmuon: ", units_.size(), " units but ",
              fallback.size(), " gradient settings");
  for (; in_backward_ && next_ >= 0; --next_) {
    if (!units_[next_]->gradients().toReduce()) continue;
    launch(next_, sync_[next_] ? *sync_[next_] : fallback[next_]);
  }
  in_backward_ = false;
  settleCollectively();
}

void DedicatedModel::abandonBackward() {
  in_backward_ = false;
  for (const auto& unit : units_) unit->gradients().abandonBackward();
  settleCollectively();
}

void DedicatedModel::settleCollectively() {
  for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) {
    if ((*unit)->gradients().settlingCommunicates()) (*unit)->gradients().settle();
  }
}

}  // namespace dmuon::optim
