// A unit: the dedicated parameters under one hook boundary. They are unsharded, resharded, reduced
// and published together.
//
// What a unit holds, per parameter of P elements on a mesh of R replicas of G shards:
//   rest      the parameter at rest: the whole matrix on its owner slot, (0, ...) elsewhere.
//             Belongs to the caller; read here, never written.
//   column    the published weights in the compute dtype, on the R ranks of the owner's column.
//             Is the rest tensor itself on the owner where dtypes agree.
//   live      the whole weight, on every rank, over one flat buffer per unit that exists only
//             while the unit is unsharded. The tensors themselves are permanent, so autograd graphs
//             and gradient hooks on them stay valid; only their memory comes and goes.
// With G = 1 there is nothing to gather: the flat buffer is permanent and the columns are views of
// it.
//
// The flat buffer keeps each owner's parameters together, so a unit is unsharded by one broadcast
// per owner without packing. Writing it does not count as an in-place change for autograd: weights
// that come back before backward have the bits that forward used.
//
// Its gradients are UnitGradients' business.
//
// Every operation below that communicates must be called in the same order on all ranks of the
// mesh. Asynchronous ones return at once; the matching wait is idempotent. Not thread-safe, but the
// gradient hooks may run on autograd's thread. None of it needs Python's GIL.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <dmuon/backend/mesh_owner_collectives.h>
#include <dmuon/optim/dedicated_parameter.h>
#include <dmuon/optim/unit_gradients.h>

namespace dmuon::optim {

// One channel per role, so that no role's order depends on another's.
struct UnitChannels {
  std::shared_ptr<MeshOwnerCollectives> reduce;
  std::shared_ptr<OwnerCollectives> unshard;  // along "shard"; null if G = 1
  std::shared_ptr<OwnerCollectives> publish;  // along "replicate"; null if R = 1
};

struct UnitCounters {
  int64_t unshards = 0;
  int64_t reduces = 0;
  int64_t publishes = 0;
  int64_t published_parameters = 0;
  // Seconds that the host has waited (on CUDA little: there streams wait).
  double unshard_wait_s = 0, publish_wait_s = 0, reduce_wait_s = 0;
};

class DedicatedUnit : public std::enable_shared_from_this<DedicatedUnit> {
 public:
  DedicatedUnit(std::string name, std::vector<DedicatedParameter> parameters, UnitChannels channels,
                std::optional<at::ScalarType> reduce_dtype);
  ~DedicatedUnit();
  DedicatedUnit(const DedicatedUnit&) = delete;
  DedicatedUnit& operator=(const DedicatedUnit&) = delete;

  const std::string& name() const { return name_; }
  int64_t size() const { return static_cast<int64_t>(parameters_.size()); }
  bool owns(int64_t index) const;
  UnitCounters counters() const;
  int64_t unshardedBytes() const { return flat_bytes_; }

  // --- weights ---------------------------------------------------------------------------------
  // The live tensors, to be wrapped as the module's parameters while unsharded.
  std::vector<at::Tensor> live() const { return live_; }
  // Those wrapped tensors: gradients will appear on them. Once all that require a gradient have
  // theirs, the unit reshards (if none is frozen). `arriving` and `complete` as in UnitGradients.
  void attach(std::vector<at::Tensor> live_parameters, std::function<void()> arriving,
              std::function<void()> complete);
  UnitGradients& gradients() { return *gradients_; }

  bool unsharded() const { return unsharded_; }
  // Starts it. With `refresh`, as before a forward, publishes first if a rest tensor was changed
  // from outside; without, as before a backward, the weights that forward used come back.
  void unshard(bool refresh);
  void waitUnshard();  // the live tensors may be read after this
  void reshard();      // frees the live memory; waits for a pending unshard first
  // A rest tensor was written since it was last published (load_state_dict, an initialiser, ...).
  // In-place operations on a DTensor run on all ranks, so all ranks see the same.
  bool stale() const;

  // Brings the rest tensors with changed[i] to their columns in every replica.
  void publish(const std::vector<bool>& changed);
  void waitPublish();

 private:
  void layOut();
  void refreshColumns(const std::vector<bool>& changed);
  bool inColumn(int64_t index) const { return parameters_[index].owner.shard == slot_.shard; }
  std::string label(const char* what) const { return name_ + ":" + what; }

  const std::string name_;
  std::vector<DedicatedParameter> parameters_;
  UnitChannels channels_;
  Slot slot_;
  int64_t replicate_size_ = 1, shard_size_ = 1;

  at::Tensor flat_;  // bytes; memory only while unsharded (always, if shard_size_ == 1)
  int64_t flat_bytes_ = 0;
  std::vector<int64_t> offsets_;    // of each parameter in flat_
  std::vector<at::Tensor> blocks_;  // flat_ by owner column
  std::vector<int64_t> block_owners_;
  std::vector<at::Tensor> live_, columns_;  // columns_[i] undefined outside the owner's column
  std::vector<int64_t> versions_;           // of the rest tensors when last published
  bool unsharded_ = false;
  OwnerWorkPtr unshard_work_, publish_work_;

  std::shared_ptr<UnitGradients> gradients_;
  UnitCounters counters_;
};

}  // namespace dmuon::optim
