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

namespace dmuon::optim {

struct DedicatedParameter {
  std::string name;
  std::vector<int64_t> shape;
  Slot owner;
  at::Tensor rest;  // see above
  at::ScalarType compute_dtype = at::kFloat;
};

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

// How the gradients of one backward are handled; FSDP2's switches of the same names.
struct GradientSync {
  bool reduce = true;      // requires_gradient_sync
  bool all_reduce = true;  // requires_all_reduce; false: sum inside the shard group only, and keep
  double divisor = 1.0;    // of the sum over the mesh
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
  const UnitCounters& counters() const { return counters_; }
  int64_t unshardedBytes() const { return flat_bytes_; }

  // --- weights ---------------------------------------------------------------------------------
  // The live tensors, to be wrapped as the module's parameters while unsharded.
  std::vector<at::Tensor> live() const { return live_; }
  struct Callbacks {
    // A gradient arrived; called before it is counted, from autograd's thread.
    std::function<void()> arriving;
    // All gradients of this backward are there.
    std::function<void()> complete;
  };
  // Those wrapped tensors: gradients will appear on them. Hooks count them per backward; once all
  // that require a gradient have theirs, the unit reshards (if none is frozen) and calls
  // `complete`.
  void attach(std::vector<at::Tensor> live_parameters, Callbacks callbacks);

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

  // --- gradients -------------------------------------------------------------------------------
  // All gradients of this backward have arrived (true also if none is required).
  bool complete() const { return arrived_ >= required_; }
  bool trainable() const;  // some live parameter requires a gradient
  // Resets the count. `graph_task`: autograd's number of this backward. Gradients that arrive in
  // another one, inside it (re-entrant checkpointing), may not be the last: then the unit reshards
  // when it can, but never calls `complete`.
  void beginBackward(int graph_task);

  // Starts summing the gradients onto their owners and takes them off the live parameters. A rank
  // without a gradient contributes zeros.
  void reduce(const GradientSync& sync);
  bool reducing() const { return reduce_.has_value(); }

  struct Reduced {
    bool participated = false;  // some rank had a gradient since the last complete reduction
    at::Tensor local;           // like the parameter's rest tensor; undefined if not participated
  };
  // Waits; empty if nothing was being reduced, or if the sum stays inside the shard groups for now.
  std::vector<Reduced> waitReduce();
  // Forgets gradients that are pending in whatever form.
  void dropGradients();

 private:
  struct PendingReduce {
    GradientSync sync;
    bool direct = true;            // both stages in one operation
    std::vector<int64_t> indices;  // the trainable parameters
    std::vector<at::Tensor> outputs;
    std::vector<uint8_t> flags;  // this rank's, if there is no work
    OwnerWorkPtr work;
  };

  void layOut();
  void arrived(int64_t index);
  void refreshColumns(const std::vector<bool>& changed);
  std::vector<at::Tensor> takeGradients(const std::vector<int64_t>& indices,
                                        std::vector<uint8_t>* flags);
  void addToPartial(const PendingReduce& pending, const std::vector<uint8_t>& flags);
  std::vector<uint8_t> reducePartial(PendingReduce& pending);
  bool inColumn(int64_t index) const { return parameters_[index].owner.shard == slot_.shard; }
  std::string label(const char* what) const { return name_ + ":" + what; }

  const std::string name_;
  std::vector<DedicatedParameter> parameters_;
  UnitChannels channels_;
  const std::optional<at::ScalarType> reduce_dtype_;
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

  std::vector<at::Tensor> live_parameters_;
  // Autograd's accumulation nodes, which carry the hooks; a smart pointer whose type changed
  // between torch versions, so held without its type.
  std::vector<std::shared_ptr<void>> accumulators_;
  Callbacks callbacks_;
  std::vector<bool> has_arrived_;
  int64_t arrived_ = 0, required_ = 0, generation_ = 0;
  int graph_task_ = -1;
  bool nested_ = false;  // a gradient came from another graph task in this backward
  std::optional<PendingReduce> reduce_;
  // Shard-group sums that still lack the other replicas', by parameter; empty if there are none.
  std::vector<at::Tensor> partial_;
  std::vector<uint8_t> partial_flags_;
  UnitCounters counters_;
};

}  // namespace dmuon::optim
