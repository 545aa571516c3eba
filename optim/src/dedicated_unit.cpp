#include <dmuon/optim/dedicated_unit.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

namespace dmuon::optim {
namespace {

// Start of every parameter in the flat buffer: a cache line, and enough for any vector load.
constexpr int64_t kAlignment = 64;

int64_t alignedBytes(const DedicatedParameter& p) {
  const int64_t bytes =
      c10::multiply_integers(p.shape) * static_cast<int64_t>(c10::elementSize(p.compute_dtype));
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// A tensor over part of a storage with a version counter of its own (a view would share one).
at::Tensor tensorOver(const c10::Storage& storage, int64_t byte_offset, at::IntArrayRef shape,
                      at::TensorOptions options) {
  auto tensor = at::empty({0}, options);
  std::vector<int64_t> strides(shape.size(), 1);
  for (int64_t d = static_cast<int64_t>(shape.size()) - 2; d >= 0; --d) {
    strides[d] = strides[d + 1] * std::max<int64_t>(shape[d + 1], 1);
  }
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_sizes_and_strides(shape, strides,
                              byte_offset / static_cast<int64_t>(tensor.element_size()));
  return tensor;
}

void allocate(const c10::Storage& storage, int64_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->allocator(), "dmuon: the flat buffer's storage has no allocator");
  impl->set_data_ptr_noswap(impl->allocator()->allocate(static_cast<size_t>(bytes)));
  impl->set_nbytes(static_cast<size_t>(bytes));
}

void release(const c10::Storage& storage) {
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
  impl->set_nbytes(0);
}

void await(const OwnerWorkPtr& work, double& seconds) {
  const auto start = std::chrono::steady_clock::now();
  work->wait();
  seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Counts one arrival per backward on its unit.
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

DedicatedUnit::DedicatedUnit(std::string name, std::vector<DedicatedParameter> parameters,
                             UnitChannels channels, std::optional<at::ScalarType> reduce_dtype)
    : name_(std::move(name)),
      parameters_(std::move(parameters)),
      channels_(std::move(channels)),
      reduce_dtype_(reduce_dtype) {
  TORCH_CHECK(channels_.reduce, "dmuon: unit '", name_, "' has no channel for reductions");
  TORCH_CHECK(!parameters_.empty(), "dmuon: unit '", name_, "' has no parameters");
  slot_ = channels_.reduce->slot();
  replicate_size_ = channels_.reduce->replicateSize();
  shard_size_ = channels_.reduce->shardSize();
  TORCH_CHECK(
      (shard_size_ == 1) == !channels_.unshard && (replicate_size_ == 1) == !channels_.publish,
      "dmuon: unit '", name_, "' on a ", replicate_size_, "x", shard_size_,
      " mesh has the wrong channels");
  for (const auto& p : parameters_) {
    const bool here = p.owner == slot_;
    TORCH_CHECK(p.rest.defined() &&
                    (here ? p.rest.sizes() == at::IntArrayRef(p.shape) : p.rest.numel() == 0),
                "dmuon: parameter '", p.name, "' of shape ", at::IntArrayRef(p.shape),
                " rests with local shape ", p.rest.sizes(), " on slot (", slot_.replicate, ", ",
                slot_.shard, "); its owner is (", p.owner.replicate, ", ", p.owner.shard, ")");
    TORCH_CHECK(!here || p.rest.is_contiguous(), "dmuon: parameter '", p.name,
                "' is not contiguous at rest: sizes ", p.rest.sizes(), ", strides ",
                p.rest.strides());
  }
  layOut();
}

DedicatedUnit::~DedicatedUnit() = default;

bool DedicatedUnit::owns(int64_t index) const { return parameters_.at(index).owner == slot_; }

bool DedicatedUnit::trainable() const { return required_ > 0; }

// Parameters of one owner column (and row, for the publish with G = 1) lie together, each at a
// multiple of kAlignment.
void DedicatedUnit::layOut() {
  const int64_t count = size();
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return parameters_[a].owner.shard < parameters_[b].owner.shard;
  });

  offsets_.resize(count);
  std::vector<std::pair<int64_t, int64_t>> ranges(shard_size_, {-1, -1});  // by column, in bytes
  for (int64_t i : order) {
    offsets_[i] = flat_bytes_;
    flat_bytes_ += alignedBytes(parameters_[i]);
    auto& range = ranges[parameters_[i].owner.shard];
    if (range.first < 0) range.first = offsets_[i];
    range.second = flat_bytes_;
  }

  const auto device = parameters_[0].rest.device();
  const auto bytes = at::TensorOptions().dtype(at::kByte).device(device);
  flat_ = at::empty({flat_bytes_}, bytes);
  const bool permanent = shard_size_ == 1;
  for (int64_t g = 0; g < shard_size_; ++g) {
    const auto [begin, end] = ranges[g];
    if (begin == end) continue;  // owns nothing here
    blocks_.push_back(tensorOver(flat_.storage(), begin, {end - begin}, bytes));
    block_owners_.push_back(g);
  }

  columns_.resize(count);
  versions_.assign(count, -1);
  for (int64_t i = 0; i < count; ++i) {
    const auto& p = parameters_[i];
    const auto options = at::TensorOptions().dtype(p.compute_dtype).device(device);
    live_.push_back(tensorOver(flat_.storage(), offsets_[i], p.shape, options));
    if (!inColumn(i)) continue;
    if (permanent) {
      columns_[i] = tensorOver(flat_.storage(), offsets_[i], p.shape, options);
    } else if (owns(i) && p.rest.scalar_type() == p.compute_dtype) {
      columns_[i] = p.rest.detach();
    } else {
      columns_[i] = at::empty(p.shape, options);
    }
  }
  if (!permanent) release(flat_.storage());
}

// --- weights
// ---------------------------------------------------------------------------------------

void DedicatedUnit::attach(std::vector<at::Tensor> live_parameters, Callbacks callbacks) {
  TORCH_CHECK(static_cast<int64_t>(live_parameters.size()) == size(), "dmuon: unit '", name_,
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
          auto unit = weak.lock();
          if (unit && unit->generation_ == generation) unit->arrived(i);
        }));
    accumulators_.push_back(std::make_shared<decltype(accumulator)>(std::move(accumulator)));
  }
}

void DedicatedUnit::arrived(int64_t index) {
  if (callbacks_.arriving) callbacks_.arriving();
  nested_ = nested_ || torch::autograd::get_current_graph_task_id() != graph_task_;
  if (!has_arrived_[index]) {
    has_arrived_[index] = true;
    ++arrived_;
  }
  if (!complete()) return;
  // A frozen weight may still be needed for the gradient of the unit's input; then the end of the
  // backward frees.
  if (required_ == size()) reshard();
  if (!nested_) {
    if (callbacks_.complete) callbacks_.complete();
    return;
  }
  has_arrived_.assign(has_arrived_.size(), false);  // the next nested backward counts anew
  arrived_ = 0;
}

bool DedicatedUnit::stale() const {
  for (int64_t i = 0; i < size(); ++i) {
    if (parameters_[i].rest._version() != versions_[i]) return true;
  }
  return false;
}

void DedicatedUnit::unshard(bool refresh) {
  if (refresh && stale()) {
    std::vector<bool> changed;
    for (int64_t i = 0; i < size(); ++i) {
      changed.push_back(parameters_[i].rest._version() != versions_[i]);
    }
    publish(changed);
  }
  if (unsharded_) return;
  unsharded_ = true;
  ++counters_.unshards;
  if (shard_size_ == 1) return;  // the columns are the live weights

  waitPublish();
  allocate(flat_.storage(), flat_bytes_);
  // The tensors were laid over an empty storage; CPU kernels take data_ptr() from it anew.
  for (int64_t i = 0; i < size(); ++i) {
    if (!inColumn(i)) continue;
    auto live = tensorOver(flat_.storage(), offsets_[i], parameters_[i].shape, live_[i].options());
    live.copy_(columns_[i]);
  }
  OwnerOptions options;
  options.label = label("unshard");
  unshard_work_ =
      channels_.unshard->broadcastFromOwners(blocks_, block_owners_, std::move(options));
}

void DedicatedUnit::waitUnshard() {
  waitPublish();
  if (auto work = std::exchange(unshard_work_, nullptr)) await(work, counters_.unshard_wait_s);
}

void DedicatedUnit::reshard() {
  if (!unsharded_) return;
  waitUnshard();
  unsharded_ = false;
  if (shard_size_ > 1) release(flat_.storage());
}

void DedicatedUnit::refreshColumns(const std::vector<bool>& changed) {
  for (int64_t i = 0; i < size(); ++i) {
    if (!changed[i]) continue;
    auto& p = parameters_[i];
    if (owns(i) && !columns_[i].is_alias_of(p.rest)) columns_[i].copy_(p.rest.detach());
    versions_[i] = p.rest._version();
  }
}

void DedicatedUnit::publish(const std::vector<bool>& changed) {
  TORCH_CHECK(static_cast<int64_t>(changed.size()) == size(), "dmuon: unit '", name_, "' has ",
              size(), " parameters, but ", changed.size(), " flags were given to publish");
  const int64_t count = std::count(changed.begin(), changed.end(), true);
  if (count == 0) return;
  waitPublish();
  reshard();  // the live weights, if any, are the old ones
  refreshColumns(changed);
  ++counters_.publishes;
  counters_.published_parameters += count;
  if (replicate_size_ == 1) return;

  std::vector<at::Tensor> tensors;
  std::vector<int64_t> owners;
  for (int64_t i = 0; i < size(); ++i) {
    if (!changed[i] || !inColumn(i)) continue;
    tensors.push_back(columns_[i]);
    owners.push_back(parameters_[i].owner.replicate);
  }
  OwnerOptions options;
  options.label = label("publish");
  publish_work_ = channels_.publish->broadcastFromOwners(std::move(tensors), std::move(owners),
                                                         std::move(options));
}

void DedicatedUnit::waitPublish() {
  if (auto work = std::exchange(publish_work_, nullptr)) await(work, counters_.publish_wait_s);
}

// --- gradients ---------------------------------------------------------------------------------

void DedicatedUnit::beginBackward(int graph_task) {
  arrived_ = 0;
  has_arrived_.assign(has_arrived_.size(), false);
  graph_task_ = graph_task;
  nested_ = false;
}

std::vector<at::Tensor> DedicatedUnit::takeGradients(const std::vector<int64_t>& indices,
                                                     std::vector<uint8_t>* flags) {
  std::vector<at::Tensor> gradients;
  for (int64_t i : indices) {
    auto& gradient = live_parameters_[i].mutable_grad();
    const auto dtype = reduce_dtype_.value_or(parameters_[i].compute_dtype);
    flags->push_back(gradient.defined() ? 1 : 0);
    if (gradient.defined()) {
      TORCH_CHECK(gradient.layout() == at::kStrided, "dmuon: the gradient of '",
                  parameters_[i].name, "' has layout ", gradient.layout(),
                  "; dedicated parameters need dense gradients");
      gradients.push_back(gradient.detach().to(dtype).contiguous());
    } else {
      gradients.push_back(at::zeros(parameters_[i].shape, live_[i].options().dtype(dtype)));
    }
    gradient.reset();
  }
  return gradients;
}

void DedicatedUnit::reduce(const GradientSync& sync) {
  TORCH_CHECK(!reduce_, "dmuon: unit '", name_, "' is still being reduced");
  TORCH_CHECK(!live_parameters_.empty(), "dmuon: unit '", name_, "' has no live parameters yet");
  PendingReduce pending;
  pending.sync = sync;
  for (int64_t i = 0; i < size(); ++i) {
    if (live_parameters_[i].requires_grad()) pending.indices.push_back(i);
  }
  if (pending.indices.empty()) return;

  OwnerOptions options;
  options.label = label("reduce");
  auto gradients = takeGradients(pending.indices, &options.flags);
  ++counters_.reduces;

  // The direct way: both stages in one operation, into fp32 (fp64) or the wire's dtype.
  const bool direct = pending.direct = sync.all_reduce && partial_.empty();
  std::vector<Slot> owners;
  for (size_t k = 0; k < pending.indices.size(); ++k) {
    const auto& p = parameters_[pending.indices[k]];
    const auto wire = gradients[k].scalar_type();
    const bool receives = direct ? p.owner == slot_ : p.owner.shard == slot_.shard;
    // Let the sum be rounded once: fp32 out of a half-precision wire where the parameter is wider.
    const bool widen = direct && p.rest.scalar_type() != wire && wire != at::kDouble;
    owners.push_back(p.owner);
    pending.outputs.push_back(
        receives ? at::empty(p.shape, gradients[k].options().dtype(widen ? at::kFloat : wire))
                 : at::Tensor());
  }
  if (direct) {
    options.divisor = sync.divisor;
    pending.work = channels_.reduce->reduceToOwners(std::move(gradients), pending.outputs, owners,
                                                    std::move(options));
  } else if (const auto& shard = channels_.reduce->shard()) {
    std::vector<int64_t> columns;
    for (const auto& owner : owners) columns.push_back(owner.shard);
    pending.work = shard->reduceToOwners(std::move(gradients), pending.outputs, std::move(columns),
                                         std::move(options));
  } else {  // one shard: this rank's gradients are the shard group's sum
    pending.outputs = std::move(gradients);
    pending.flags = std::move(options.flags);
  }
  reduce_ = std::move(pending);
}

std::vector<DedicatedUnit::Reduced> DedicatedUnit::waitReduce() {
  if (!reduce_) return {};
  auto pending = std::exchange(reduce_, std::nullopt);
  if (pending->work) await(pending->work, counters_.reduce_wait_s);
  auto flags = pending->work ? pending->work->flags() : std::move(pending->flags);
  if (!pending->direct) {
    addToPartial(*pending, flags);
    if (!pending->sync.all_reduce) return {};
    flags = reducePartial(*pending);
  }

  std::vector<Reduced> results(size());
  for (size_t k = 0; k < pending->indices.size(); ++k) {
    if (!flags.at(k)) continue;
    const int64_t i = pending->indices[k];
    const auto& p = parameters_[i];
    results[i].participated = true;
    results[i].local = owns(i) ? pending->outputs[k].to(p.rest.scalar_type())
                               : at::empty(p.rest.sizes(), p.rest.options());
  }
  return results;
}

// Adds a shard group's sum to what earlier backwards left there.
void DedicatedUnit::addToPartial(const PendingReduce& pending, const std::vector<uint8_t>& flags) {
  partial_.resize(size());
  partial_flags_.resize(size(), 0);
  for (size_t k = 0; k < pending.indices.size(); ++k) {
    const int64_t i = pending.indices[k];
    partial_flags_[i] |= flags.at(k);
    if (!pending.outputs[k].defined()) continue;
    if (partial_[i].defined()) {
      partial_[i].add_(pending.outputs[k]);
    } else {
      partial_[i] = pending.outputs[k];
    }
  }
}

// The second stage alone, along the columns; waits. Replaces pending's indices and outputs, and
// returns the flags for them.
std::vector<uint8_t> DedicatedUnit::reducePartial(PendingReduce& pending) {
  std::vector<at::Tensor> inputs, outputs;
  std::vector<int64_t> rows;
  OwnerOptions options;
  options.label = label("reduce-partial");
  options.divisor = pending.sync.divisor;
  options.flags = std::exchange(partial_flags_, {});
  const auto partial = std::exchange(partial_, {});
  pending.indices.resize(size());
  std::iota(pending.indices.begin(), pending.indices.end(), 0);
  pending.outputs.assign(size(), at::Tensor());
  for (int64_t i = 0; i < size(); ++i) {
    if (!partial[i].defined()) continue;
    if (owns(i)) pending.outputs[i] = at::empty_like(partial[i]);
    inputs.push_back(partial[i]);
    outputs.push_back(pending.outputs[i]);
    rows.push_back(parameters_[i].owner.replicate);
  }
  const auto& replicate = channels_.reduce->replicate();
  if (!replicate) {
    for (size_t k = 0; k < outputs.size(); ++k) {
      if (outputs[k].defined()) at::div_out(outputs[k], inputs[k], options.divisor);
    }
    return options.flags;
  }
  auto work = replicate->reduceToOwners(std::move(inputs), std::move(outputs), std::move(rows),
                                        std::move(options));
  work->wait();
  return work->flags();
}

void DedicatedUnit::dropGradients() {
  if (reduce_ && reduce_->work) {
    try {
      reduce_->work->wait();
    } catch (const std::exception&) {
      // It is being forgotten; a broken group says so at the next operation.
    }
  }
  reduce_.reset();
  partial_.clear();
  partial_flags_.clear();
  for (const auto& parameter : live_parameters_) parameter.mutable_grad().reset();
}

}  // namespace dmuon::optim
