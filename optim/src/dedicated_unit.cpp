#include <dmuon/optim/dedicated_unit.h>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

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

}  // namespace

DedicatedUnit::DedicatedUnit(std::string name, std::vector<DedicatedParameter> parameters,
                             UnitChannels channels, std::optional<at::ScalarType> reduce_dtype)
    : name_(std::move(name)), parameters_(std::move(parameters)), channels_(std::move(channels)) {
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
  gradients_ = std::make_shared<UnitGradients>(name_, parameters_, channels_.reduce, reduce_dtype);
}

DedicatedUnit::~DedicatedUnit() = default;

bool DedicatedUnit::owns(int64_t index) const { return parameters_.at(index).owner == slot_; }

UnitCounters DedicatedUnit::counters() const {
  auto counters = counters_;
  counters.reduces = gradients_->reductions();
  counters.reduce_wait_s = gradients_->waitSeconds();
  return counters;
}

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

void DedicatedUnit::attach(std::vector<at::Tensor> live_parameters, std::function<void()> arriving,
                           std::function<void()> complete) {
  UnitGradients::Callbacks callbacks;
  callbacks.arriving = std::move(arriving);
  callbacks.complete = std::move(complete);
  callbacks.all_here = [weak = weak_from_this()] {
    const auto unit = weak.lock();
    // A frozen weight may still be needed for the gradient of the unit's input; then the end of
    // the backward frees.
    if (unit && unit->gradients_->required() == unit->size()) unit->reshard();
  };
  gradients_->attach(std::move(live_parameters), std::move(callbacks));
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

}  // namespace dmuon::optim
