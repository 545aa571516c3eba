#include <dmuon/backend/mesh_owner_collectives.h>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "cpu_owner_collectives.h"
#include "nccl_owner_collectives.h"
#include "staged_work.h"

namespace dmuon {
namespace {

using Tensors = std::vector<at::Tensor>;

struct Mesh {
  int64_t rows;
  int64_t columns;
  Slot self;

  int64_t flat(const Slot& slot) const { return slot.replicate * columns + slot.shard; }
};

std::string describe(const Slot& slot) {
  return c10::str("(", slot.replicate, ", ", slot.shard, ")");
}

std::string nameOnMesh(const Mesh& mesh, OwnerOp op, const std::string& label) {
  return c10::str("dmuon: ", toString(op), " on mesh (", mesh.rows, ", ", mesh.columns, ") slot ",
                  describe(mesh.self), label.empty() ? "" : " '" + label + "'");
}

// The owners as ranks of the whole mesh, or why that cannot be said.
std::string flatten(const Mesh& mesh, const std::vector<Slot>& owners, std::vector<int64_t>& flat) {
  for (size_t i = 0; i < owners.size(); ++i) {
    const Slot& owner = owners[i];
    if (owner.replicate < 0 || owner.replicate >= mesh.rows || owner.shard < 0 ||
        owner.shard >= mesh.columns) {
      return c10::str("owner ", describe(owner), " of tensor ", i,
                      " is out of range: slots are (0, 0) to (", mesh.rows - 1, ", ",
                      mesh.columns - 1, ")");
    }
    flat.push_back(mesh.flat(owner));
  }
  return "";
}

// A group sees only its own column's tensors, or only the owners' columns; these lines let both
// stages compare everything.
std::string wholeList(const std::vector<TensorSpec>& tensors, const std::vector<Slot>& owners) {
  std::string lines;
  for (size_t i = 0; i < tensors.size(); ++i) {
    lines += "tensor " + std::to_string(i) + " is " + shapeText(tensors[i]) + " owned by slot (" +
             std::to_string(owners[i].replicate) + ", " + std::to_string(owners[i].shard) + ")\n";
  }
  return lines;
}

OwnerOptions stage(const OwnerOptions& options, int number, std::string must_match) {
  OwnerOptions copy = options;
  copy.label =
      c10::str(options.label, options.label.empty() ? "" : ", ", "stage ", number, " of 2");
  copy.must_match += std::move(must_match);
  return copy;
}

// Stage two goes on with what stage one has finished, piece by piece, and takes its flags over.
OwnerOptions secondStage(const OwnerOptions& options, std::string must_match,
                         const OwnerWorkPtr& first, std::vector<int64_t> inputs_at) {
  OwnerOptions copy = stage(options, 2, std::move(must_match));
  copy.after = {};
  copy.inputs_from = first;
  copy.inputs_at = std::move(inputs_at);
  copy.flags.clear();
  return copy;
}

// The operations of one part of the list.
struct Stages {
  OwnerWorkPtr one, two;
};

// One Work for all. A rank's second stage may end before its first, which may still be sending to
// others. On a device, the last part's streams come after all others.
OwnerWorkPtr wholeWork(const std::vector<Stages>& parts, int rank, const std::string& name,
                       const std::string& label, Tensors outputs) {
  const auto& [one, two] = parts.back();
  if (auto staged = stagedOnDevice(one, two, parts.front().two, rank, outputs)) return staged;
  TORCH_INTERNAL_ASSERT(parts.size() == 1);
  auto whole = c10::make_intrusive<HostWork>(rank, two->retrieveOpType(), two->getSequencenumber(),
                                             name, std::move(outputs), kNoTimeout, label, nullptr);
  auto pending = std::make_shared<std::atomic<int>>(2);
  const auto end = [whole, one = one, two = two, pending](c10::ivalue::Future&) {
    if (pending->fetch_sub(1) > 1) return;
    // The second fails with the first, and says so.
    std::exception_ptr error = two->exception() ? two->exception() : one->exception();
    if (error) {
      whole->fail(error);
    } else {
      whole->succeed(two->flags());
    }
  };
  one->getFuture()->addCallback(end);
  two->getFuture()->addCallback(end);
  return whole;
}

// Tells both groups' peers, who would wait otherwise, and then the caller.
[[noreturn]] void refuse(const std::vector<OwnerCollectives*>& groups, const Operation& op,
                         const OwnerOptions& options, const std::string& text) {
  auto refused =
      c10::make_intrusive<HostWork>(-1, c10d::OpType::UNKNOWN, 0, text, Tensors{}, kNoTimeout);
  const c10::ValueError error({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
  refused->fail(std::make_exception_ptr(error));
  for (OwnerCollectives* group : groups) {
    if (group == nullptr || group->size() == 1) continue;
    OwnerOptions failing;
    failing.label = options.label;
    failing.after = refused;
    if (op.proposal.op == OwnerOp::reduce) {
      group->reduceToOwners({}, {}, {}, failing);
    } else {
      group->broadcastFromOwners({}, {}, failing);
    }
  }
  throw error;
}

std::vector<int64_t> coordinates(const std::vector<Slot>& owners, int64_t Slot::*which) {
  std::vector<int64_t> result;
  for (const Slot& owner : owners) result.push_back(owner.*which);
  return result;
}

// Channels on a device order operations by streams and know nothing of pieces: there the stages
// overlap by parts of the list, in each of which every owner has about the same share. Returns the
// positions of each part.
std::vector<std::vector<size_t>> partsOf(const std::vector<TensorSpec>& tensors, int64_t owners,
                                         int64_t part_bytes) {
  constexpr int64_t kMostParts = 8;
  std::vector<int64_t> total(owners), before(owners);
  for (const TensorSpec& tensor : tensors) total[tensor.owner] += tensor.bytes();
  const int64_t largest = *std::max_element(total.begin(), total.end());
  const int64_t count =
      std::clamp<int64_t>(largest / std::max<int64_t>(part_bytes, 1), 1, kMostParts);
  std::vector<std::vector<size_t>> parts(count);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t owner = tensors[i].owner;
    parts[total[owner] == 0 ? 0 : std::min(before[owner] * count / total[owner], count - 1)]
        .push_back(i);
    before[owner] += tensors[i].bytes();
  }
  std::erase_if(parts, [&](const auto& part) { return part.empty() && parts.size() > 1; });
  return parts;
}

template <typename T>
std::vector<T> select(const std::vector<T>& all, const std::vector<size_t>& positions) {
  std::vector<T> some;
  for (size_t i : positions) some.push_back(all[i]);
  return some;
}

// Flags and dependencies are the first part's.
OwnerOptions optionsOfPart(const OwnerOptions& options, size_t part, size_t parts) {
  OwnerOptions copy = options;
  if (parts == 1) return copy;
  copy.label =
      c10::str(options.label, options.label.empty() ? "" : ", ", "part ", part + 1, " of ", parts);
  if (part == 0) return copy;
  copy.flags.clear();
  copy.after = {};
  copy.inputs_from = {};
  return copy;
}

template <typename Run>
std::vector<Stages> inParts(const Operation& whole, const Mesh& mesh, const OwnerOptions& options,
                            std::optional<int64_t> part_bytes, Run&& run) {
  const std::vector<TensorSpec>& tensors = whole.proposal.tensors;
  std::vector<std::vector<size_t>> parts(1);
  if (part_bytes) {
    parts = partsOf(tensors, mesh.rows * mesh.columns, *part_bytes);
  } else {
    for (size_t i = 0; i < tensors.size(); ++i) parts[0].push_back(i);
  }
  std::vector<Stages> stages;
  for (size_t p = 0; p < parts.size(); ++p) {
    stages.push_back(run(parts[p], optionsOfPart(options, p, parts.size())));
  }
  return stages;
}

// The part of the list that is owned in one column, with the owners' rows.
struct ColumnPart {
  std::vector<size_t> positions;
  std::vector<int64_t> rows;

  ColumnPart(const std::vector<Slot>& owners, int64_t column) {
    for (size_t i = 0; i < owners.size(); ++i) {
      if (owners[i].shard != column) continue;
      positions.push_back(i);
      rows.push_back(owners[i].replicate);
    }
  }
  Tensors of(const Tensors& all) const {
    Tensors part;
    for (size_t i : positions) part.push_back(all[i]);
    return part;
  }
};

}  // namespace

MeshOwnerCollectives::MeshOwnerCollectives(std::shared_ptr<OwnerCollectives> replicate,
                                           std::shared_ptr<OwnerCollectives> shard,
                                           c10::DeviceType device)
    : replicate_(std::move(replicate)), shard_(std::move(shard)) {
  if (replicate_ || shard_) return;
  if (device == c10::DeviceType::CPU) {
    shard_ = std::make_shared<CpuOwnerCollectives>(nullptr, 0, 1, 0, "one rank", "",
                                                   std::chrono::minutes(30));
  } else {
    shard_ = NcclOwnerCollectives::ofOneRank(device);
  }
}

int64_t MeshOwnerCollectives::replicateSize() const { return replicate_ ? replicate_->size() : 1; }
int64_t MeshOwnerCollectives::shardSize() const { return shard_ ? shard_->size() : 1; }

c10::Device MeshOwnerCollectives::device() const {
  return shard_ ? shard_->device() : replicate_->device();
}

std::optional<int64_t> MeshOwnerCollectives::partBytes() const {
  if (dynamic_cast<NcclOwnerCollectives*>(shard_.get()) == nullptr) return std::nullopt;
  return part_bytes_;
}

Slot MeshOwnerCollectives::slot() const {
  return {replicate_ ? replicate_->rank() : 0, shard_ ? shard_->rank() : 0};
}

OwnerWorkPtr MeshOwnerCollectives::reduceToOwners(Tensors inputs, Tensors outputs,
                                                  const std::vector<Slot>& owners,
                                                  OwnerOptions options) {
  const Mesh mesh{replicateSize(), shardSize(), slot()};
  const std::string name = nameOnMesh(mesh, OwnerOp::reduce, options.label);
  std::vector<int64_t> flat;
  std::string refusal = flatten(mesh, owners, flat);
  // Everything is checked before anything is submitted, so that a refusal reaches both groups.
  const OperationPtr whole =
      makeReduce(inputs, outputs, flat, options, static_cast<int>(mesh.flat(mesh.self)),
                 static_cast<int>(mesh.rows * mesh.columns), device());
  if (refusal.empty()) refusal = whole->refusal;
  if (!refusal.empty()) {
    refuse({shard_.get(), replicate_.get()}, *whole, options, name + ": " + refusal);
  }
  if (mesh.rows == 1 && shard_) {
    return shard_->reduceToOwners(std::move(inputs), std::move(outputs),
                                  coordinates(owners, &Slot::shard), std::move(options));
  }
  if (mesh.columns == 1) {
    return replicate_->reduceToOwners(std::move(inputs), std::move(outputs),
                                      coordinates(owners, &Slot::replicate), std::move(options));
  }

  const std::string list = wholeList(whole->proposal.tensors, owners);
  const auto reducePart = [&](const std::vector<size_t>& positions, const OwnerOptions& own) {
    const Tensors part_inputs = select(inputs, positions);
    const std::vector<Slot> part_owners = select(owners, positions);
    const ColumnPart column(part_owners, mesh.self.shard);
    Tensors partial(part_inputs.size());
    for (size_t i : column.positions) partial[i] = at::empty_like(part_inputs[i]);
    const Tensors column_inputs = column.of(partial);
    OwnerOptions first = stage(own, 1, list);
    first.divisor = 1.0;
    const OwnerWorkPtr one = shard_->reduceToOwners(part_inputs, std::move(partial),
                                                    coordinates(part_owners, &Slot::shard), first);
    const std::vector<int64_t> made(column.positions.begin(), column.positions.end());
    const OwnerWorkPtr two =
        replicate_->reduceToOwners(column_inputs, column.of(select(outputs, positions)),
                                   column.rows, secondStage(own, list, one, made));
    return Stages{one, two};
  };
  return wholeWork(inParts(*whole, mesh, options, partBytes(), reducePart),
                   static_cast<int>(mesh.flat(mesh.self)), name, options.label,
                   std::move(whole->result));
}

OwnerWorkPtr MeshOwnerCollectives::broadcastFromOwners(Tensors tensors,
                                                       const std::vector<Slot>& owners,
                                                       OwnerOptions options) {
  const Mesh mesh{replicateSize(), shardSize(), slot()};
  const std::string name = nameOnMesh(mesh, OwnerOp::broadcast, options.label);
  std::vector<int64_t> flat;
  std::string refusal = flatten(mesh, owners, flat);
  const OperationPtr whole =
      makeBroadcast(tensors, flat, options, static_cast<int>(mesh.flat(mesh.self)),
                    static_cast<int>(mesh.rows * mesh.columns), device());
  if (refusal.empty()) refusal = whole->refusal;
  if (!refusal.empty()) {
    refuse({replicate_.get(), shard_.get()}, *whole, options, name + ": " + refusal);
  }
  if (mesh.rows == 1 && shard_) {
    return shard_->broadcastFromOwners(std::move(tensors), coordinates(owners, &Slot::shard),
                                       std::move(options));
  }
  if (mesh.columns == 1) {
    return replicate_->broadcastFromOwners(
        std::move(tensors), coordinates(owners, &Slot::replicate), std::move(options));
  }

  const std::string list = wholeList(whole->proposal.tensors, owners);
  const auto broadcastPart = [&](const std::vector<size_t>& positions, const OwnerOptions& own) {
    const Tensors part = select(tensors, positions);
    const std::vector<Slot> part_owners = select(owners, positions);
    const ColumnPart column(part_owners, mesh.self.shard);
    const OwnerWorkPtr one =
        replicate_->broadcastFromOwners(column.of(part), column.rows, stage(own, 1, list));
    std::vector<int64_t> arrived(part.size(), -1);
    for (size_t k = 0; k < column.positions.size(); ++k) {
      arrived[column.positions[k]] = static_cast<int64_t>(k);
    }
    const OwnerWorkPtr two = shard_->broadcastFromOwners(
        part, coordinates(part_owners, &Slot::shard), secondStage(own, list, one, arrived));
    return Stages{one, two};
  };
  return wholeWork(inParts(*whole, mesh, options, partBytes(), broadcastPart),
                   static_cast<int>(mesh.flat(mesh.self)), name, options.label,
                   std::move(whole->result));
}

}  // namespace dmuon
