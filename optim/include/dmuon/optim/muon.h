// Muon as a LibTorch optimizer, without Python.
//
//   dmuon::optim::Muon optimizer(model->parameters(), dmuon::optim::MuonOptions(0.02));
//   loss.backward(); optimizer.step(); optimizer.zero_grad();
//
// Every parameter must have at least 2 dimensions; use torch::optim::AdamW for the rest. State key
// "momentum_buffer", fp32 for fp16/bf16 parameters (which also get an fp32 "master"). With a
// variant also "second_momentum_buffer", with momentum_dtype "bfloat16" also "step".
//
// block_sizes, along block_dim, cut every parameter of the group into matrices of their own, as
// blocks.h says: give a fused weight a group of its own. What the other options mean stands in
// muon_update.h.
//
// With an OwnerCollectives, gradients are averaged onto each parameter's owner (by OwnershipPlan
// over a 1 x N mesh), the owner updates, and the result is broadcast: data parallel training in two
// calls. The plan sees a parameter as "<group>.<index>". All ranks must give the same parameters in
// the same order, with equal values and equal requires_grad, and step together. step() issues one
// reduction of every parameter that requires a gradient, and one broadcast of those that had one on
// some rank; which these are the ranks agree on in the reduction. A rank without a gradient
// contributes zeros; a parameter without one on any rank keeps its bits. p.grad is left as it is:
// local, not averaged. If the reduction fails, step() throws on every rank and neither weights nor
// momentum have changed.
//
// A parameter group's own MuonOptions are taken whole, not merged with the defaults.
//
// save() writes this rank's part: momentum and master live on owners alone. So every rank saves and
// loads its own archive; load() refuses one of another rank, group size or plan.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

#include <dmuon/backend/owner_collectives.h>
#include <dmuon/optim/muon_update.h>
#include <dmuon/optim/ownership_plan.h>

namespace dmuon::optim {

struct MuonOptions : public torch::optim::OptimizerCloneableOptions<MuonOptions> {
  MuonOptions(double lr = 0.02);
  TORCH_ARG(double, lr) = 0.02;
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;
  TORCH_ARG(double, weight_decay) = 0.0;
  TORCH_ARG(int64_t, ns_steps) = 5;
  TORCH_ARG(std::string, ns_coefficients) = "you";
  TORCH_ARG(std::string, ns_mode) = "fast";
  TORCH_ARG(std::string, adjust_lr) = "original";
  TORCH_ARG(int64_t, block_dim) = 0;
  TORCH_ARG(std::vector<int64_t>, block_sizes) = {};
  TORCH_ARG(std::string, variant) = "none";  // "normuon", "adamuon"
  TORCH_ARG(double, beta2) = 0.95;           // the variant's
  TORCH_ARG(bool, cautious) = false;         // weight decay
  // "float32": as wide as the master; "bfloat16": rounded stochastically, by `seed`.
  TORCH_ARG(std::string, momentum_dtype) = "float32";
  TORCH_ARG(int64_t, seed) = 0;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(double lr) override;
};

struct MuonParamState : public torch::optim::OptimizerCloneableParamState<MuonParamState> {
  TORCH_ARG(torch::Tensor, momentum_buffer);
  TORCH_ARG(torch::Tensor, master);  // undefined for fp32 and fp64 parameters
  TORCH_ARG(torch::Tensor, second_momentum_buffer);
  TORCH_ARG(int64_t, step) = 0;  // counted for a bf16 momentum only

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

class Muon : public torch::optim::Optimizer {
 public:
  // Throws c10::Error for a parameter with fewer than 2 dimensions or an option out of range.
  explicit Muon(std::vector<torch::optim::OptimizerParamGroup> groups, MuonOptions defaults = {},
                std::shared_ptr<OwnerCollectives> group = nullptr);
  explicit Muon(std::vector<torch::Tensor> parameters, MuonOptions defaults = {},
                std::shared_ptr<OwnerCollectives> group = nullptr);

  // Hides the base's, which in recent versions replaces the options of a group by the defaults
  // unless the optimizer is one of LibTorch's own.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  // The closure, if any, runs with gradients enabled; its loss is returned.
  torch::Tensor step(LossClosure closure = nullptr) override;

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // Who owns what, for the parameters as they are now; one slot without a group.
  OwnershipPlan plan() const;

 private:
  struct Item;

  std::vector<Item> items();
  void assignOwners(std::vector<Item>& items) const;
  void reduceGradients(std::vector<Item>& items);
  void update(const std::vector<Item>& items, const std::vector<MuonHyper>& hypers);
  void broadcastParameters(const std::vector<Item>& items);

  std::shared_ptr<OwnerCollectives> group_;
  NewtonSchulzWorkspace workspace_;
};

}  // namespace dmuon::optim
