// Owner collectives in two stages over a 2-D mesh (replicate, shard).
//
// A slot (r, g) is a rank's coordinate in the mesh; an owner is a slot. A reduction first sums
// inside each row onto column g (shard group), then along the column onto row r (replicate group).
// A broadcast goes the other way: along the owner's column, then inside each row. So a column rank
// moves P/G bytes across replicas instead of P.
//
// Both groups' operations are submitted at once, so the order of operations on either group is the
// caller's order of calls here and nothing else. The second stage overlaps the first: it moves each
// piece as soon as the first has finished it (OwnerOptions::inputs_from; on CUDA, each part of the
// list, see setPartBytes). A mesh dimension of size 1
// is never communicated on.
//
// Semantics and thread-safety are those of OwnerCollectives. An error on any rank, or a difference
// between any two, fails the operation on all R*G ranks. (A broadcast that fails in its second
// stage has already delivered within the owners' columns.) Error texts name ranks of the stage's
// group. A rank that is lost in the middle of the first stage makes both groups unusable.
//
// The object keeps no tensors and may be destroyed before its Works complete; both groups must
// outlive the Works.
//
// Rounding: between the stages a partial sum is rounded to the wire dtype.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <dmuon/backend/owner_collectives.h>

namespace dmuon {

struct Slot {
  int64_t replicate = 0;
  int64_t shard = 0;
  bool operator==(const Slot&) const = default;
};

class MeshOwnerCollectives {
 public:
  // Either may be null if its mesh dimension has size 1. If both are, `device` says where the
  // tensors will be; else the groups do.
  MeshOwnerCollectives(std::shared_ptr<OwnerCollectives> replicate,
                       std::shared_ptr<OwnerCollectives> shard,
                       c10::DeviceType device = c10::DeviceType::CPU);

  int64_t replicateSize() const;
  int64_t shardSize() const;
  Slot slot() const;  // this rank's
  c10::Device device() const;

  // CUDA only: lists in which one owner has more bytes than this are moved in parts of about so
  // many bytes per owner, at most 8, so that the stages overlap. The same on all ranks. Default: 8
  // MiB.
  void setPartBytes(int64_t bytes) { part_bytes_ = bytes; }

  // As OwnerCollectives::reduceToOwners, the sum running over all R*G ranks. One Work for both
  // stages; its flags() are OR-ed over the whole mesh.
  OwnerWorkPtr reduceToOwners(std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                              const std::vector<Slot>& owners, OwnerOptions options = {});

  // As OwnerCollectives::broadcastFromOwners, to all R*G ranks.
  OwnerWorkPtr broadcastFromOwners(std::vector<at::Tensor> tensors, const std::vector<Slot>& owners,
                                   OwnerOptions options = {});

  const std::shared_ptr<OwnerCollectives>& replicate() const { return replicate_; }
  const std::shared_ptr<OwnerCollectives>& shard() const { return shard_; }

 private:
  std::optional<int64_t> partBytes() const;  // nothing where the stages overlap by pieces

  int64_t part_bytes_ = int64_t{8} << 20;
  std::shared_ptr<OwnerCollectives> replicate_;
  std::shared_ptr<OwnerCollectives> shard_;
};

}  // namespace dmuon
