// A small network in one process: Muon for the matrices, each group with its own options, AdamW for
// the biases. No Python.
//
//   train_gated
#include <dmuon/optim/muon.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>

#include <cstdio>
#include <memory>
#include <vector>

// silu(gate) * up, with gate and up fused into one weight.
struct GatedImpl : torch::nn::Module {
  GatedImpl(int64_t width, int64_t hidden)
      : gate_up(register_module("gate_up", torch::nn::Linear(width, 2 * hidden))),
        down(register_module("down", torch::nn::Linear(hidden, width))) {}

  torch::Tensor forward(const torch::Tensor& x) {
    const auto parts = gate_up->forward(x).chunk(2, /*dim=*/1);
    return x + down->forward(torch::silu(parts[0]) * parts[1]);
  }

  torch::nn::Linear gate_up, down;
};
TORCH_MODULE(Gated);

int main() {
  constexpr int64_t kWidth = 16, kHidden = 32;
  torch::set_num_threads(1);
  torch::manual_seed(0);
  Gated first(kWidth, kHidden), second(kWidth, kHidden);
  torch::nn::Linear head(kWidth, 4);
  torch::nn::Sequential model(first, second, head);

  using dmuon::optim::MuonOptions;
  const auto options = MuonOptions(0.02).weight_decay(0.01).variant("normuon");
  std::vector<torch::Tensor> fused = {first->gate_up->weight, second->gate_up->weight};
  std::vector<torch::Tensor> plain = {first->down->weight, second->down->weight, head->weight};
  std::vector<torch::optim::OptimizerParamGroup> groups;
  // Gate and up are matrices of their own.
  groups.emplace_back(
      fused, std::make_unique<MuonOptions>(MuonOptions(options).block_sizes({kHidden, kHidden})));
  groups.emplace_back(plain);
  dmuon::optim::Muon muon(groups, options);
  torch::optim::StepLR schedule(muon, /*step_size=*/50, /*gamma=*/0.5);
  std::vector<torch::Tensor> biases;
  for (const auto& p : model->parameters()) {
    if (p.dim() < 2) biases.push_back(p);
  }
  torch::optim::AdamW adamw(biases, torch::optim::AdamWOptions(1e-3));

  const torch::Tensor x = torch::randn({256, kWidth});
  const torch::Tensor y = torch::sin(x.matmul(torch::randn({kWidth, 4}) / 4));
  double initial = 0, loss_value = 0;
  for (int step = 0; step < 100; ++step) {
    model->zero_grad();
    const torch::Tensor loss = torch::mse_loss(model->forward(x), y);
    loss.backward();
    muon.step();
    adamw.step();
    schedule.step();
    loss_value = loss.item<double>();
    if (step == 0) initial = loss_value;
    if (step % 20 == 0) std::printf("step %3d  loss %.4f\n", step, loss_value);
  }
  std::printf("step  99  loss %.4f\n", loss_value);
  return loss_value < 0.1 * initial ? 0 : 1;
}
