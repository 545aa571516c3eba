#include <dmuon/optim/unit_gradients.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

namespace dmuon::optim {
namespace {

// Sums over backwards and shard groups are kept in this.
at::ScalarType wide(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

void add(at::Tensor& sum, const at::Tensor& value) {
  if (sum.defined()) {
    sum.add_(value);
  } else {
    sum = value;
  }
}

bool any(const std::vector<bool>& flags) {
  return std::find(flags.begin(), flags.end(), true) != flags.end();
}

// Counts one arrival per backward.
class ArrivalHook : public torch::autograd::FunctionPostHook {
 public:
  explicit ArrivalHook(std::function<void()> arrived) : arrived_(std::move(arrived)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    arrived_();
    return outputs;
  }

 private:
  const std::function<void()> arrived_;
};

}  // namespace

UnitGradients::UnitGradients(std::string unit, const std::vector<DedicatedParameter>& parameters,
                             std::shared_ptr<MeshOwnerCollectives> channel,
                             std::optional<at::ScalarType> reduce_dtype)
    : unit_(std::move(unit)),
      parameters_(parameters),
      channel_(std::move(channel)),
      reduce_dtype_(reduce_dtype),
      slot_(channel_->slot()),
      open_(parameters.size(), false),
      accumulated_(parameters.size()),
      partial_(parameters.size()),
      reduced_(parameters.size()),
      partial_open_(parameters.size(), false),
      partial_flags_(parameters.size(), 0) {}

// --- arrival -------------------------------------------------------------------------------------

void UnitGradients::attach(std::vector<at::Tensor> live_parameters, Callbacks callbacks) {
  TORCH_CHECK(static_cast<int64_t>(live_parameters.size()) == size(), "dmuon: unit '", unit_,
              "' has ", size(), " parameters, ", live_parameters.size(), " were attached");
  live_parameters_ = std::move(live_parameters);
  accumulators_.clear();
  callbacks_ = std::move(callbacks);
  required_ = 0;
  has_arrived_.assign(live_parameters_.size(), false);
  // Hooks of an earlier attach stay on nodes that may still be alive; they must not count here.
  const int64_t generation = ++generation_;
  for (int64_t i = 0; i < size(); ++i) {
    const auto& parameter = live_parameters_[i];
    if (!parameter.requires_grad()) continue;
    ++required_;
    auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
    accumulator->add_post_hook(
        std::make_unique<ArrivalHook>([weak = weak_from_this(), generation, i] {
          auto gradients = weak.lock();
          if (gradients && gradients->generation_ == generation) gradients->arrived(i);
        }));
    accumulators_.push_back(std::make_shared<decltype(accumulator)>(std::move(accumulator)));
  }
}

void UnitGradients::arrived(int64_t index) {
  if (callbacks_.arriving) callbacks_.arriving();
  TORCH_CHECK(!launched_, "dmuon: a gradient of '", parameters_[index].name, "' came after unit '",
              unit_,
              "' had been reduced: backward came back to a unit whose input gradients it had "
              "computed already");
  nested_ = nested_ || torch::autograd::get_current_graph_task_id() != graph_task_;
  if (!has_arrived_[index]) {
    has_arrived_[index] = true;
    ++arrived_;
  }
  if (!complete()) return;
  if (callbacks_.all_here) callbacks_.all_here();
  if (!nested_) {
    if (callbacks_.complete) callbacks_.complete();
    return;
  }
  has_arrived_.assign(has_arrived_.size(), false);  // the next nested backward counts anew
  arrived_ = 0;
}

void UnitGradients::beginBackward(int graph_task) {
  arrived_ = 0;
  has_arrived_.assign(has_arrived_.size(), false);
  graph_task_ = graph_task;
  nested_ = passed_ = launched_ = false;
  accumulate();
  for (size_t i = 0; i < live_parameters_.size(); ++i) {
    open_[i] = open_[i] || live_parameters_[i].requires_grad();
  }
}

void UnitGradients::abandonBackward() {
  for (const auto& live : live_parameters_) live.mutable_grad().reset();
}

bool UnitGradients::toReduce() const { return required_ > 0 || any(open_); }

// --- reduction -----------------------------------------------------------------------------------

at::Tensor UnitGradients::take(int64_t index) {
  auto& arriving = live_parameters_[index].mutable_grad();
  TORCH_CHECK(!arriving.defined() || arriving.layout() == at::kStrided, "dmuon: the gradient of '",
              parameters_[index].name, "' has layout ",
              arriving.defined() ? arriving.layout() : at::kStrided,
              "; dedicated parameters need dense gradients");
  at::Tensor sum = std::exchange(accumulated_[index], {});
  if (arriving.defined()) {
    add(sum, arriving.detach());
    arriving.reset();
  }
  return sum;
}

void UnitGradients::accumulate() {
  for (size_t i = 0; i < live_parameters_.size(); ++i) {
    const auto& live = live_parameters_[i];
    if (!live.grad().defined() || live.grad().layout() != at::kStrided) continue;
    accumulated_[i] = take(static_cast<int64_t>(i)).to(wide(live.scalar_type()));
  }
}

void UnitGradients::reduce(const GradientSync& sync) {
  TORCH_CHECK(!live_parameters_.empty(), "dmuon: unit '", unit_, "' has no live parameters yet");
  settle();
  launched_ = true;
  Pending pending;
  pending.sync = sync;
  for (int64_t i = 0; i < size(); ++i) {
    if (open_[i] || live_parameters_[i].requires_grad()) pending.indices.push_back(i);
  }
  open_.assign(open_.size(), false);
  pending.dropped.assign(pending.indices.size(), false);
  if (pending.indices.empty()) return;

  OwnerOptions options;
  options.label = label("reduce");
  std::vector<at::Tensor> gradients;
  for (const int64_t i : pending.indices) {
    const auto& p = parameters_[i];
    const auto dtype = reduce_dtype_.value_or(p.compute_dtype);
    const at::Tensor gradient = take(i);
    options.flags.push_back(gradient.defined() ? 1 : 0);
    gradients.push_back(gradient.defined()
                            ? gradient.to(dtype).contiguous()
                            : at::zeros(p.shape, live_parameters_[i].options().dtype(dtype)));
  }
  ++reductions_;

  // The direct way: both stages in one operation.
  const bool direct = pending.direct = sync.all_reduce && !any(partial_open_);
  std::vector<Slot> owners;
  for (size_t k = 0; k < pending.indices.size(); ++k) {
    const auto& p = parameters_[pending.indices[k]];
    const auto wire = gradients[k].scalar_type();
    const bool receives = direct ? p.owner == slot_ : p.owner.shard == slot_.shard;
    // Let the sum be rounded once: fp32 out of a half-precision wire, unless it ends in that.
    const bool widen = !direct || p.rest.scalar_type() != wire;
    owners.push_back(p.owner);
    pending.outputs.push_back(
        receives ? at::empty(p.shape, gradients[k].options().dtype(widen ? wide(wire) : wire))
                 : at::Tensor());
  }
  if (direct) {
    options.divisor = sync.divisor;
    pending.work =
        channel_->reduceToOwners(std::move(gradients), pending.outputs, owners, std::move(options));
  } else if (const auto& shard = channel_->shard()) {
    std::vector<int64_t> columns;
    for (const auto& owner : owners) columns.push_back(owner.shard);
    pending.work = shard->reduceToOwners(std::move(gradients), pending.outputs, std::move(columns),
                                         std::move(options));
  } else {  // one shard: this rank's gradients are the shard group's sum
    for (size_t k = 0; k < gradients.size(); ++k) {
      pending.outputs[k] = gradients[k].to(wide(gradients[k].scalar_type()));
    }
    pending.flags = std::move(options.flags);
  }
  reduce_ = std::move(pending);
}

void UnitGradients::await(const OwnerWorkPtr& work) {
  const auto start = std::chrono::steady_clock::now();
  work->wait();
  wait_s_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void UnitGradients::settle() {
  if (!reduce_) return;
  auto pending = *std::exchange(reduce_, std::nullopt);
  if (pending.work) await(pending.work);
  auto flags = pending.work ? pending.work->flags() : std::move(pending.flags);
  if (!pending.direct) {
    addToPartial(pending, flags);
    if (!pending.sync.all_reduce) return;
    flags = reducePartial(pending);
  }
  for (size_t k = 0; k < pending.indices.size(); ++k) {
    if (!flags.at(k) || pending.dropped[k]) continue;
    const int64_t i = pending.indices[k];
    const auto& p = parameters_[i];
    add(reduced_[i], owns(i) ? pending.outputs[k].to(p.rest.scalar_type())
                             : at::empty(p.rest.sizes(), p.rest.options()));
  }
}

void UnitGradients::addToPartial(const Pending& pending, const std::vector<uint8_t>& flags) {
  for (size_t k = 0; k < pending.indices.size(); ++k) {
    const int64_t i = pending.indices[k];
    partial_open_[i] = true;  // whatever this shard group has: all must agree on it
    if (pending.dropped[k] || !flags.at(k)) continue;
    partial_flags_[i] = 1;
    if (pending.outputs[k].defined()) add(partial_[i], pending.outputs[k]);
  }
}

// The second stage alone, along the columns; waits. Replaces pending's indices and outputs, and
// returns the flags for them.
std::vector<uint8_t> UnitGradients::reducePartial(Pending& pending) {
  std::vector<at::Tensor> inputs, outputs;
  std::vector<int64_t> rows;
  OwnerOptions options;
  options.label = label("reduce-partial");
  options.divisor = pending.sync.divisor;
  pending.indices.clear();
  pending.outputs.clear();
  for (int64_t i = 0; i < size(); ++i) {
    if (!partial_open_[i]) continue;
    const auto& p = parameters_[i];
    pending.indices.push_back(i);
    pending.outputs.emplace_back();
    options.flags.push_back(std::exchange(partial_flags_[i], 0));
    auto sum = std::exchange(partial_[i], {});
    if (p.owner.shard != slot_.shard) continue;
    if (!sum.defined()) {
      const auto dtype = wide(reduce_dtype_.value_or(p.compute_dtype));
      sum = at::zeros(p.shape, p.rest.options().dtype(dtype));
    }
    if (owns(i)) pending.outputs.back() = at::empty_like(sum);
    inputs.push_back(std::move(sum));
    outputs.push_back(pending.outputs.back());
    rows.push_back(p.owner.replicate);
  }
  partial_open_.assign(partial_open_.size(), false);
  pending.dropped.assign(pending.indices.size(), false);
  const auto& replicate = channel_->replicate();
  if (!replicate) {
    for (size_t k = 0; k < outputs.size(); ++k) {
      if (outputs[k].defined()) at::div_out(outputs[k], inputs[k], options.divisor);
    }
    return options.flags;
  }
  auto work = replicate->reduceToOwners(std::move(inputs), std::move(outputs), std::move(rows),
                                        std::move(options));
  await(work);
  return work->flags();
}

// --- one parameter -------------------------------------------------------------------------------

at::Tensor UnitGradients::reduced(int64_t index) {
  settle();
  return reduced_.at(index);
}

at::Tensor UnitGradients::takeReduced(int64_t index) {
  settle();
  return std::exchange(reduced_.at(index), {});
}

at::Tensor UnitGradients::unreduced(int64_t index) const {
  if (accumulated_.at(index).defined()) return accumulated_[index];
  if (!live_parameters_.empty() && live_parameters_[index].grad().defined()) {
    return live_parameters_[index].grad();
  }
  if (partial_[index].defined()) return partial_[index];
  if (partial_flags_[index]) {
    return at::empty(parameters_[index].rest.sizes(), parameters_[index].rest.options());
  }
  return {};
}

void UnitGradients::drop(int64_t index) {
  if (reduce_) {
    for (size_t k = 0; k < reduce_->indices.size(); ++k) {
      if (reduce_->indices[k] == index) reduce_->dropped[k] = true;
    }
  }
  accumulated_.at(index).reset();
  partial_[index].reset();
  partial_flags_[index] = 0;
  reduced_[index].reset();
  if (!live_parameters_.empty()) live_parameters_[index].mutable_grad().reset();
}

}  // namespace dmuon::optim
