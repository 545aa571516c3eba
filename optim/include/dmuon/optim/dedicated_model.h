// The units of one model, and the order in which their gradients are reduced.
//
// Which reductions run, and in which order, follows from the list of units alone: last unit first,
// every trainable unit once per synchronised backward. A unit is launched as soon as its gradients
// are complete and all units before it in that order have been; what is left at the end of the
// backward is launched then, with zeros where a gradient never came. At most two are in flight, so
// that a slow network doesn't pile up gradients; whoever reads a gradient waits for its unit.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <dmuon/optim/dedicated_unit.h>

namespace dmuon::optim {

class DedicatedModel : public std::enable_shared_from_this<DedicatedModel> {
 public:
  // In the order of the plan (forward order as far as it is known).
  // `gradient_outside`: a gradient arrived though no backward was begun; called on autograd's
  // thread, and should begin it. For outputs that hooks could not look into.
  DedicatedModel(std::vector<std::shared_ptr<DedicatedUnit>> units,
                 std::function<void()> gradient_outside);

  const std::vector<std::shared_ptr<DedicatedUnit>>& units() const { return units_; }

  // Hooks of unit `index` fire from now on; `live_parameters` as in DedicatedUnit::attach.
  void attach(int64_t index, std::vector<at::Tensor> live_parameters);

  // `graph_task`: autograd's number of this backward.
  void beginBackward(int graph_task);
  bool inBackward() const { return in_backward_; }
  // How unit `index` is to be handled in this backward; it is not launched before this is known.
  void setSync(int64_t index, const GradientSync& sync);
  // The backward has left unit `index` behind; its weights are freed.
  void pass(int64_t index);
  // Launches what is left (units whose sync was not set use `fallback`). Reductions may still be in
  // flight then, except those whose settling communicates.
  void finishBackward(const std::vector<GradientSync>& fallback);
  // Instead, after an exception in backward; see UnitGradients. The same on all ranks, if all have
  // failed in the same place; else their next collectives do not match, which is an error.
  void abandonBackward();

 private:
  void launchReady();
  void settleCollectively();
  void launch(int64_t index, const GradientSync& sync);

  std::vector<std::shared_ptr<DedicatedUnit>> units_;
  const std::function<void()> gradient_outside_;
  std::vector<std::optional<GradientSync>> sync_;
  int64_t next_ = 0;  // the unit to launch next, counting down; -1 when all have been
  bool in_backward_ = false;
  std::deque<int64_t> in_flight_;  // oldest first
};

}  // namespace dmuon::optim
