// Who owns which matrix: a pure function of shapes, mesh and options, so that every rank computes
// the same plan without talking. Free of ATen.
//
// Longest-processing-time-first over the R*G slots: matrices by cost, then bytes, both descending,
// then name; each goes to the slot with the least cost so far, then the fewest bytes, then the
// lowest slot index, among the slots where its unit is not crowded: a unit of k matrices puts at
// most ceil(k / G) in one column and at most ceil(k / (R*G)) in one slot, so that a unit's
// broadcast has many sources. The order in which matrices are listed does not matter.
//
// After: Graham, "Bounds on multiprocessing timing anomalies" (1969).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dmuon::optim {

struct PlanMatrix {
  std::string name;            // unique; the parameter's fully qualified name
  std::string unit;            // the hook boundary it moves with
  std::vector<int64_t> shape;  // >= 2 dimensions
  int64_t bytes = 0;           // in the parameter's dtype
  // A fused weight, as Blocks in blocks.h: each block costs what a matrix of its shape does.
  int64_t block_dim = 0;
  std::vector<int64_t> block_sizes = {};
};

struct PlanEntry {
  PlanMatrix matrix;
  double cost = 0;  // in the cost model's unit, all the parameter's matrices together
  int64_t replicate = 0, shard = 0;  // the owner's slot
};

struct PlanOptions {
  int64_t replicate_size = 1, shard_size = 1;
  // "flops": Newton-Schulz FLOPs of the cheaper form for 5 steps. "measured": the time model of
  // a CPU core in the source (GEMM rate by size plus a memory term), as measured by tests/perf.
  std::string cost = "measured";
};

class OwnershipPlan {
 public:
  // Throws std::invalid_argument for duplicate names, bad shapes or blocks, an unknown cost or mesh
  // sizes < 1.
  OwnershipPlan(std::vector<PlanMatrix> matrices, PlanOptions options);

  // Sorted by name.
  const std::vector<PlanEntry>& entries() const { return entries_; }
  const PlanOptions& options() const { return options_; }
  const PlanEntry& at(const std::string& name) const;  // std::out_of_range naming it

  // Per slot, index r * G + g.
  std::vector<double> slotCosts() const;
  std::vector<int64_t> slotBytes() const;
  // max over mean of slotCosts(); 1 is perfect, 0 matrices give 1.
  double imbalance() const;

  // Everything that must be equal on all ranks, one line per entry, and a 64-bit hash of it.
  std::string canonicalText() const;
  uint64_t hash() const;
  // A table for people: name, shape, unit, owner, share of the cost; then one line per slot.
  std::string table() const;

 private:
  PlanOptions options_;
  std::vector<PlanEntry> entries_;
};

// The cost that the plan uses for a parameter of this shape.
double matrixCost(const std::vector<int64_t>& shape, const std::string& cost_model);

}  // namespace dmuon::optim
