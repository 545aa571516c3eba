// The gradients of a unit's parameters, from their arrival on the live weights to the mean on the
// owner. Per parameter, a gradient is in up to four places:
//   arriving     on the live parameter, where autograd puts it: of this backward alone
//   accumulated  fp32 (fp64), on every rank: what backwards left that were not reduced
//   partial      fp32 (fp64), on the owner's column: sums of this shard group that still lack the
//                other replicas'
//   reduced      on the owner, in the dtype of the parameter at rest, (0, ...) elsewhere: the sum
//                over the mesh, divided; there on all ranks if one had a gradient, else on none
// A reduction takes what is arriving and accumulated, and at most one is in flight: settle() waits
// for it and adds it to `reduced`.
//
// reduce() is a collective, and so is settle() after a reduction that was not direct: they must run
// in the same order on all ranks. Not thread-safe, but the hooks may run on autograd's thread. None
// of it needs Python's GIL.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <dmuon/optim/dedicated_parameter.h>

namespace dmuon::optim {

// How the gradients of one backward are handled; FSDP2's switches of the same names.
struct GradientSync {
  bool reduce = true;      // requires_gradient_sync
  bool all_reduce = true;  // requires_all_reduce; false: sum inside the shard group only, and keep
  double divisor = 1.0;    // of the sum over the mesh
};

class UnitGradients : public std::enable_shared_from_this<UnitGradients> {
 public:
  // `reduce_dtype`: on the wire; default: each parameter's compute dtype.
  UnitGradients(std::string unit, const std::vector<DedicatedParameter>& parameters,
                std::shared_ptr<MeshOwnerCollectives> channel,
                std::optional<at::ScalarType> reduce_dtype);

  struct Callbacks {
    std::function<void()> arriving;  // a gradient is there; called before it is counted
    std::function<void()> all_here;  // all that are required have come, maybe not for the last time
    std::function<void()> complete;  // nor will there be others in this backward
  };
  // The live weights as autograd sees them. Hooks count arrivals on those that require a gradient,
  // per backward, and call back from autograd's thread.
  void attach(std::vector<at::Tensor> live_parameters, Callbacks callbacks);

  // Counts anew. `graph_task`: autograd's number of this backward. Gradients that arrive in another
  // one, inside it (re-entrant checkpointing), may not be the last: then `complete` never comes.
  void beginBackward(int graph_task);
  // Instead of its end, after an exception: drops what has arrived and was neither reduced nor
  // accumulated. What was stays, as in plain torch, and so does all of earlier backwards.
  void abandonBackward();
  // Nothing more will arrive in this backward: all that is required is here, or pass() said so.
  bool complete() const { return passed_ || arrived_ >= required_; }
  // The backward has left the unit behind: what has not arrived will not. A gradient that does all
  // the same is an error where it arrives, if the unit has been reduced.
  void pass() { passed_ = true; }
  int64_t required() const { return required_; }
  // Something is to be reduced at the end of this backward: a parameter requires a gradient, or did
  // when one was accumulated. The same on all ranks where requires_grad is.
  bool toReduce() const;

  // Starts summing onto the owners. A rank without a gradient contributes zeros.
  void reduce(const GradientSync& sync);
  // Instead of it: keeps what has arrived, for a later reduction.
  void accumulate();
  // A reduction is in flight whose settling communicates.
  bool settlingCommunicates() const { return reduce_ && !reduce_->direct; }
  void settle();

  // --- one parameter -----------------------------------------------------------------------------
  // The reduced gradient; undefined if there is none. Settles.
  at::Tensor reduced(int64_t index);
  at::Tensor takeReduced(int64_t index);  // and forgets it
  // What this rank has that is not reduced: accumulated or arriving (of the whole shape), or its
  // share of a partial sum; undefined if there is nothing. Never waits.
  at::Tensor unreduced(int64_t index) const;
  // Forgets the parameter's gradient wherever it is, also in flight, without waiting.
  void drop(int64_t index);

  int64_t reductions() const { return reductions_; }
  double waitSeconds() const { return wait_s_; }

 private:
  struct Pending {
    GradientSync sync;
    bool direct = true;            // both stages in one operation
    std::vector<int64_t> indices;  // of the parameters in it
    std::vector<bool> dropped;     // like indices
    std::vector<at::Tensor> outputs;
    std::vector<uint8_t> flags;  // this rank's, if there is no work
    OwnerWorkPtr work;
  };

  int64_t size() const { return static_cast<int64_t>(parameters_.size()); }
  bool owns(int64_t index) const { return parameters_[index].owner == slot_; }
  void arrived(int64_t index);
  at::Tensor take(int64_t index);  // what is arriving and accumulated; undefined if nothing
  void addToPartial(const Pending& pending, const std::vector<uint8_t>& flags);
  std::vector<uint8_t> reducePartial(Pending& pending);
  void await(const OwnerWorkPtr& work);
  std::string label(const char* what) const { return unit_ + ":" + what; }

  const std::string unit_;
  const std::vector<DedicatedParameter> parameters_;
  const std::shared_ptr<MeshOwnerCollectives> channel_;
  const std::optional<at::ScalarType> reduce_dtype_;
  const Slot slot_;

  std::vector<at::Tensor> live_parameters_;
  // Autograd's accumulation nodes, which carry the hooks; a smart pointer whose type changed
  // between torch versions, so held without its type.
  std::vector<std::shared_ptr<void>> accumulators_;
  Callbacks callbacks_;
  std::vector<bool> has_arrived_;
  int64_t arrived_ = 0, required_ = 0, generation_ = 0;
  int graph_task_ = -1;
  bool passed_ = false, launched_ = false;  // in this backward
  bool nested_ = false;  // a gradient came from another graph task in this backward

  std::vector<bool> open_;  // required a gradient in a backward since the last reduction
  std::vector<at::Tensor> accumulated_, partial_, reduced_;
  std::vector<bool> partial_open_;      // took part in a sum of a shard group since then
  std::vector<uint8_t> partial_flags_;  // and had a gradient there
  std::optional<Pending> reduce_;
  int64_t reductions_ = 0;
  double wait_s_ = 0;
};

}  // namespace dmuon::optim
