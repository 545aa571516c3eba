#include "nccl_launch.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/add.h>
#include <ATen/ops/div.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "nccl_flags.h"
#include "reduce_kernels.h"

namespace dmuon {
namespace {

using Tensors = std::vector<at::Tensor>;
using Calls = std::vector<std::function<void(NcclApi::Comm)>>;

// A tensor over memory that somebody else keeps alive.
at::Tensor viewOf(const void* data, int64_t numel, c10::ScalarType type, c10::Device device) {
  return at::for_blob(const_cast<void*>(data), {numel})
      .options(at::TensorOptions().dtype(type).device(device))
      .target_device(device)
      .make_tensor();
}

// Copies between tensors of equal sizes, as few kernels as possible: one per pair of dtypes.
struct Copies {
  std::map<std::pair<c10::ScalarType, c10::ScalarType>, std::pair<Tensors, Tensors>> by_types;

  void add(at::Tensor to, at::Tensor from) {
    auto& [tos, froms] = by_types[{to.scalar_type(), from.scalar_type()}];
    tos.push_back(std::move(to));
    froms.push_back(std::move(from));
  }
  bool empty() const { return by_types.empty(); }
  void run() const {
    const at::NoGradGuard no_grad;
    for (const auto& [types, lists] : by_types) at::_foreach_copy_(lists.first, lists.second);
  }
};

// An unsigned copy of whole elements: any type of that size will do.
c10::ScalarType carrierOf(c10::ScalarType type) {
  switch (c10::elementSize(type)) {
    case 1:
      return c10::ScalarType::Byte;
    case 2:
      return c10::ScalarType::Short;
    case 4:
      return c10::ScalarType::Int;
    case 8:
      return c10::ScalarType::Long;
    default:
      return type;
  }
}

// One segment of an operation being put on the stream.
class Launcher {
 public:
  Launcher(NcclCommunicator& communicator, const Operation& op, const Segment& segment)
      : communicator_(communicator),
        api_(communicator.api()),
        stream_(communicator.stream()),
        rank_(communicator.rank()),
        size_(communicator.size()),
        op_(op),
        segment_(segment) {
    for (size_t i : segment.positions) {
      inputs_.push_back(op.inputs[i]);
      outputs_.push_back(op.outputs[i]);
      // What a block's memory is made of: on a rank that receives a broadcast, its outputs.
      memory_.push_back(op.inputs[i] != nullptr ? op.inputs[i] : op.outputs[i]);
    }
  }

  void reduce(Calls& calls);
  void broadcast(Calls& calls);
  // After the calls: what turns received bytes into outputs.
  void finish() {
    if (finish_) api_.enqueue(stream_, std::move(finish_));
  }

 private:
  const Block& own() const { return segment_.blocks[rank_]; }
  const char* adjacent(int owner) const {
    return adjacentMemory(segment_.blocks[owner], segment_.tensors, memory_);
  }
  int64_t countOf(int64_t bytes) const {
    return bytes / static_cast<int64_t>(c10::elementSize(segment_.type));
  }
  char* scratch(int64_t bytes);
  std::vector<const char*> packed(const std::vector<int>& owners);
  void pack(Copies& copies, int owner, char* to) const;
  void unpack(Copies& copies, int owner, const char* from) const;
  char* outputBlock() const;
  void enqueueCopies(Copies copies);
  void reducePadded(Calls& calls);
  void reducePerOwner(Calls& calls);
  void sendToOwners(Calls& calls);
  void scaleAndStore(char* sum, bool in_place);
  void addUp(std::vector<const char*> parts);
  void broadcastPadded(Calls& calls);
  void broadcastPerOwner(Calls& calls);

  NcclCommunicator& communicator_;
  NcclApi& api_;
  const c10::Stream stream_;
  const int rank_;
  const int size_;
  const Operation& op_;
  const Segment& segment_;
  std::vector<const void*> inputs_, memory_;
  std::vector<void*> outputs_;
  Tensors scratch_;  // freed with this object: the stream's allocator orders its next use
  std::function<void()> finish_;
};

char* Launcher::scratch(int64_t bytes) {
  scratch_.push_back(api_.empty(bytes, c10::ScalarType::Byte, stream_));
  return static_cast<char*>(scratch_.back().mutable_data_ptr());
}

void Launcher::pack(Copies& copies, int owner, char* to) const {
  const Block& block = segment_.blocks[owner];
  for (size_t k = 0; k < block.tensors.size(); ++k) {
    const TensorSpec& tensor = segment_.tensors[block.tensors[k]];
    if (tensor.numel() == 0) continue;
    const auto type = carrierOf(tensor.dtype);
    copies.add(viewOf(to + block.offsets[k], tensor.numel(), type, stream_.device()),
               viewOf(inputs_[block.tensors[k]], tensor.numel(), type, stream_.device()));
  }
}

void Launcher::unpack(Copies& copies, int owner, const char* from) const {
  const Block& block = segment_.blocks[owner];
  for (size_t k = 0; k < block.tensors.size(); ++k) {
    const TensorSpec& tensor = segment_.tensors[block.tensors[k]];
    if (tensor.numel() == 0) continue;
    const auto type = carrierOf(tensor.dtype);
    copies.add(viewOf(outputs_[block.tensors[k]], tensor.numel(), type, stream_.device()),
               viewOf(from + block.offsets[k], tensor.numel(), type, stream_.device()));
  }
}

void Launcher::enqueueCopies(Copies copies) {
  if (copies.empty()) return;
  api_.enqueue(stream_, [copies = std::move(copies), kept = scratch_] { copies.run(); });
}

// Where each of these owners' blocks lies in one piece: where it is, or in scratch.
std::vector<const char*> Launcher::packed(const std::vector<int>& owners) {
  std::vector<const char*> where(size_, nullptr);
  std::vector<int> scattered;
  int64_t bytes = 0;
  for (int owner : owners) {
    where[owner] = adjacent(owner);
    if (where[owner] != nullptr || segment_.blocks[owner].bytes == 0) continue;
    scattered.push_back(owner);
    bytes += alignedBytes(segment_.blocks[owner].bytes);
  }
  if (scattered.empty()) return where;
  char* next = scratch(bytes);
  Copies copies;
  for (int owner : scattered) {
    pack(copies, owner, next);
    where[owner] = next;
    next += alignedBytes(segment_.blocks[owner].bytes);
  }
  enqueueCopies(std::move(copies));
  return where;
}

// Where a sum of the segment's type can be received in place; null if it has to be stored
// elsewhere.
char* Launcher::outputBlock() const {
  for (size_t i : own().tensors) {
    if (op_.output_dtypes[segment_.positions[i]] != segment_.type) return nullptr;
  }
  const std::vector<const void*> outputs(outputs_.begin(), outputs_.end());
  const char* block = adjacentMemory(own(), segment_.tensors, outputs);
  const bool rounded_twice =
      op_.proposal.divisor != 1.0 && accumulationType(segment_.type) != segment_.type;
  return rounded_twice ? nullptr : const_cast<char*>(block);
}

void Launcher::reduce(Calls& calls) {
  if (segment_.route == Segment::to_owner || size_ == 1) return sendToOwners(calls);
  if (segment_.route == Segment::padded) return reducePadded(calls);
  reducePerOwner(calls);
}

void Launcher::reducePerOwner(Calls& calls) {
  std::vector<int> owners(size_);
  for (int owner = 0; owner < size_; ++owner) owners[owner] = owner;
  const std::vector<const char*> from = packed(owners);
  char* const in_place = outputBlock();
  char* const sum = in_place != nullptr ? in_place
                    : own().bytes > 0   ? scratch(own().bytes)
                                        : nullptr;
  for (int owner = 0; owner < size_; ++owner) {
    const int64_t bytes = segment_.blocks[owner].bytes;
    if (bytes == 0) continue;
    calls.push_back([this, owner, send = from[owner], recv = owner == rank_ ? sum : nullptr,
                     count = countOf(bytes)](NcclApi::Comm comm) {
      api_.reduce(send, recv, count, segment_.type, owner, comm, stream_);
    });
  }
  scaleAndStore(sum, in_place != nullptr);
}

void Launcher::reducePadded(Calls& calls) {
  const int64_t slot = segment_.slot;
  // A flat buffer that is padded already, or needs no padding, is taken as it is.
  const char* all = adjacent(0);
  for (int owner = 0; owner < size_ && all != nullptr; ++owner) {
    if (segment_.blocks[owner].bytes != slot || adjacent(owner) != all + owner * slot)
      all = nullptr;
  }
  char* packed_all = nullptr;
  if (all == nullptr) {
    packed_all = scratch(size_ * slot);
    Copies copies;
    for (int owner = 0; owner < size_; ++owner) pack(copies, owner, packed_all + owner * slot);
    enqueueCopies(std::move(copies));
    all = packed_all;
  }
  char* in_place = own().bytes == slot ? outputBlock() : nullptr;
  // In place where the user's memory may not be written: inside the packed copy.
  char* const sum = in_place != nullptr     ? in_place
                    : packed_all != nullptr ? packed_all + rank_ * slot
                                            : scratch(slot);
  calls.push_back([this, all, sum, count = countOf(slot)](NcclApi::Comm comm) {
    api_.reduceScatter(all, sum, count, segment_.type, comm, stream_);
  });
  scaleAndStore(sum, in_place != nullptr);
}

// Divides in the accumulation type, with a tensor for the divisor: for a number, torch multiplies
// by its reciprocal on CUDA, which may differ from the quotient in the last bit.
at::Tensor divided(const at::Tensor& sum, double divisor, c10::ScalarType type) {
  at::Tensor wide = sum.to(type);
  if (divisor == 1.0) return wide;
  return wide.div_(at::scalar_tensor(divisor, wide.options()));
}

void Launcher::scaleAndStore(char* sum, bool in_place) {
  const double divisor = op_.proposal.divisor;
  if (own().bytes == 0 || (in_place && divisor == 1.0)) return;
  const c10::Device device = stream_.device();
  const at::Tensor flat = viewOf(sum, countOf(own().bytes), segment_.type, device);
  std::vector<std::pair<at::Tensor, int64_t>> stores;  // output, first element of its sum
  for (size_t k = 0; k < own().tensors.size() && !in_place; ++k) {
    const size_t i = own().tensors[k];
    const int64_t numel = segment_.tensors[i].numel();
    if (numel == 0) continue;
    stores.emplace_back(
        viewOf(outputs_[i], numel, op_.output_dtypes[segment_.positions[i]], device),
        countOf(own().offsets[k]));
  }
  finish_ = [flat, stores, divisor, kept = scratch_] {
    const at::NoGradGuard no_grad;
    const auto type = divisor == 1.0 ? flat.scalar_type() : accumulationType(flat.scalar_type());
    const at::Tensor result = divided(flat, divisor, type);
    Copies copies;
    for (const auto& [to, begin] : stores) copies.add(to, result.narrow(0, begin, to.numel()));
    copies.run();
  };
}

void Launcher::sendToOwners(Calls& calls) {
  std::vector<int> owners(size_);
  for (int owner = 0; owner < size_; ++owner) owners[owner] = owner;
  const std::vector<const char*> from = packed(owners);
  std::vector<const char*> parts(size_, nullptr);
  parts[rank_] = from[rank_];
  const int64_t slot = alignedBytes(own().bytes);
  char* const received = own().bytes > 0 && size_ > 1 ? scratch(slot * (size_ - 1)) : nullptr;
  int64_t place = 0;
  constexpr auto type = c10::ScalarType::Byte;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    if (const int64_t bytes = segment_.blocks[peer].bytes; bytes > 0) {
      calls.push_back([this, peer, send = from[peer], bytes](NcclApi::Comm comm) {
        api_.send(send, bytes, type, peer, comm, stream_);
      });
    }
    if (own().bytes == 0) continue;
    char* const to = received + slot * place++;
    parts[peer] = to;
    calls.push_back([this, peer, to, bytes = own().bytes](NcclApi::Comm comm) {
      api_.recv(to, bytes, type, peer, comm, stream_);
    });
  }
  addUp(std::move(parts));
}

void Launcher::addUp(std::vector<const char*> parts) {
  if (own().bytes == 0) return;
  const c10::Device device = stream_.device();
  struct Store {
    at::Tensor to;
    size_t run;
    int64_t begin;
  };
  const std::vector<Run> runs = runsOf(own(), segment_.tensors);
  std::vector<Store> stores;
  for (size_t k = 0; k < own().tensors.size(); ++k) {
    const size_t i = own().tensors[k];
    const TensorSpec& tensor = segment_.tensors[i];
    if (tensor.numel() == 0) continue;
    size_t run = 0;
    while (run + 1 < runs.size() && runs[run + 1].offset <= own().offsets[k]) ++run;
    const auto bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
    stores.push_back(
        {viewOf(outputs_[i], tensor.numel(), op_.output_dtypes[segment_.positions[i]], device), run,
         (own().offsets[k] - runs[run].offset) / bytes});
  }
  std::vector<Tensors> addends;  // by run, by rank
  for (const Run& run : runs) {
    addends.emplace_back();
    for (const char* part : parts) {
      addends.back().push_back(viewOf(part + run.offset, run.numel, run.type, device));
    }
  }
  finish_ = [addends, stores, divisor = op_.proposal.divisor, kept = scratch_] {
    const at::NoGradGuard no_grad;
    Tensors sums;
    for (const Tensors& parts : addends) {
      const auto wide = accumulationType(parts[0].scalar_type());
      // A copy in any case: the first part may be an input.
      at::Tensor sum = parts[0].to(wide, /*non_blocking=*/false, /*copy=*/true);
      for (size_t rank = 1; rank < parts.size(); ++rank) sum.add_(parts[rank]);
      sums.push_back(divided(sum, divisor, wide));
    }
    Copies copies;
    for (const Store& store : stores) {
      copies.add(store.to, sums[store.run].narrow(0, store.begin, store.to.numel()));
    }
    copies.run();
  };
}

void Launcher::broadcast(Calls& calls) {
  if (size_ == 1) return;
  if (segment_.route == Segment::padded) return broadcastPadded(calls);
  broadcastPerOwner(calls);
}

void Launcher::broadcastPerOwner(Calls& calls) {
  const char* const sent = packed({rank_})[rank_];
  Copies copies;
  for (int owner = 0; owner < size_; ++owner) {
    const int64_t bytes = segment_.blocks[owner].bytes;
    if (bytes == 0) continue;
    char* where = const_cast<char*>(owner == rank_ ? sent : adjacent(owner));
    if (where == nullptr) {
      where = scratch(bytes);
      unpack(copies, owner, where);
    }
    calls.push_back([this, owner, where, bytes](NcclApi::Comm comm) {
      api_.broadcast(where, where, bytes, segment_.type, owner, comm, stream_);
    });
  }
  if (copies.empty()) return;
  finish_ = [copies = std::move(copies), kept = scratch_] { copies.run(); };
}

void Launcher::broadcastPadded(Calls& calls) {
  const int64_t slot = segment_.slot;
  char* all = const_cast<char*>(adjacent(0));
  for (int owner = 0; owner < size_ && all != nullptr; ++owner) {
    if (segment_.blocks[owner].bytes != slot || adjacent(owner) != all + owner * slot)
      all = nullptr;
  }
  const bool in_place = all != nullptr;
  Copies copies;
  if (!in_place) {
    all = scratch(size_ * slot);
    Copies own_block;
    pack(own_block, rank_, all + rank_ * slot);
    enqueueCopies(std::move(own_block));
    for (int owner = 0; owner < size_; ++owner) {
      if (owner != rank_) unpack(copies, owner, all + owner * slot);
    }
  }
  calls.push_back([this, all, slot](NcclApi::Comm comm) {
    api_.allGather(all + rank_ * slot, all, slot, segment_.type, comm, stream_);
  });
  if (copies.empty()) return;
  finish_ = [copies = std::move(copies), kept = scratch_] { copies.run(); };
}

}  // namespace

NcclWork::Flags NcclLaunch::run(std::chrono::milliseconds timeout) {
  const bool reducing = op.proposal.op == OwnerOp::reduce;
  std::vector<std::unique_ptr<Launcher>> launchers;
  Calls calls;
  for (const Segment& segment : segments) {
    launchers.push_back(std::make_unique<Launcher>(communicator, op, segment));
    reducing ? launchers.back()->reduce(calls) : launchers.back()->broadcast(calls);
  }
  NcclFlags round(communicator, op, flags_taken);
  if (communicator.size() > 1 && (!calls.empty() || round.travel())) {
    communicator.group(timeout, [&](NcclApi::Comm comm) {
      for (const auto& call : calls) call(comm);
      round.call(comm);
    });
  }
  for (const auto& launcher : launchers) launcher->finish();
  return round.finish();
}

}  // namespace dmuon
