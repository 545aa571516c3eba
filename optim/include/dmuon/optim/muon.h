// Muon as a LibTorch optimizer, without Python.
//
//   dmuon::optim::Muon optimizer(model->parameters(), dmuon::optim::MuonOptions(0.02));
//   loss.backward(); optimizer.step(); optimizer.zero_grad();
//
// Every parameter must have at least 2 dimensions; use torch::optim::AdamW for the rest. State key
// "momentum_buffer", fp32 for fp16/bf16 parameters (which also get an fp32 "master").
// With an OwnerCollectives, gradients are averaged onto each parameter's owner (by OwnershipPlan, over
// the group), the owner updates, and the result is broadcast: data parallel training in two calls.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

#include <dmuon/backend/owner_collectives.h>
#include <dmuon/optim/muon_update.h>

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

 public:
  double get_lr() const override;
  void set_lr(double lr) override;
};

struct MuonParamState : public torch::optim::OptimizerCloneableParamState<MuonParamState> {
  TORCH_ARG(torch::Tensor, momentum_buffer);
  TORCH_ARG(torch::Tensor, master);  // undefined for fp32 and fp64 parameters
};

class Muon : public torch::optim::Optimizer {
 public:
  explicit Muon(std::vector<torch::optim::OptimizerParamGroup> groups, MuonOptions defaults = {},
                std::shared_ptr<OwnerCollectives> group = nullptr);
  explicit Muon(std::vector<torch::Tensor> parameters, MuonOptions defaults = {},
                std::shared_ptr<OwnerCollectives> group = nullptr);

  torch::Tensor step(LossClosure closure = nullptr) override;

 private:
  std::shared_ptr<OwnerCollectives> group_;
};

}  // namespace dmuon::optim
