#include <dmuon/optim/muon.h>
#include <gtest/gtest.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/serialize.h>

#include <sstream>

#include "optim_reference.h"

namespace dmuon::optim {
namespace {

using testing::relativeError;

torch::Tensor parameter(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  return torch::randn(shape).to(dtype).requires_grad_(true);
}

MuonHyper hyperOf(const MuonOptions& options) {
  MuonHyper hyper;
  hyper.lr = options.lr();
  hyper.momentum = options.momentum();
  hyper.nesterov = options.nesterov();
  hyper.weight_decay = options.weight_decay();
  hyper.adjust_lr = lrAdjustmentFromName(options.adjust_lr());
  hyper.newton_schulz =
      makeNewtonSchulzConfig(options.ns_coefficients(), options.ns_steps(), options.ns_mode());
  return hyper;
}

const MuonParamState& stateOf(const Muon& optimizer, const torch::Tensor& p) {
  return static_cast<const MuonParamState&>(*optimizer.state().at(p.unsafeGetTensorImpl()));
}

TEST(Muon, OneProcessEqualsMuonUpdateBitForBit) {
  torch::manual_seed(1);
  const MuonOptions options = MuonOptions(0.1).weight_decay(0.2).nesterov(false).momentum(0.9);
  std::vector<torch::Tensor> parameters = {parameter({6, 4}), parameter({3, 4, 5}),
                                           parameter({2, 9})};
  std::vector<at::Tensor> weights, momenta;
  for (const auto& p : parameters) {
    weights.push_back(p.detach().clone());
    momenta.push_back(torch::zeros_like(weights.back()));
  }
  Muon optimizer(parameters, options);
  for (int step = 0; step < 5; ++step) {
    std::vector<at::Tensor> gradients;
    for (const auto& p : parameters) {
      gradients.push_back(torch::randn(p.sizes()));
      p.mutable_grad() = gradients.back().clone();
    }
    optimizer.step();
    muonUpdate(weights, gradients, momenta, hyperOf(options));
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(parameters[i].detach().equal(weights[i])) << i;
    EXPECT_TRUE(stateOf(optimizer, parameters[i]).momentum_buffer().equal(momenta[i])) << i;
    EXPECT_FALSE(stateOf(optimizer, parameters[i]).master().defined()) << i;
  }
}

TEST(Muon, HalfParametersFollowAnFp32Master) {
  torch::manual_seed(2);
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    const torch::Tensor p = parameter({8, 5}, dtype);
    at::Tensor master = p.detach().to(at::kFloat), momentum = torch::zeros_like(master);
    Muon optimizer(std::vector<torch::Tensor>{p}, MuonOptions(1e-4));
    for (int step = 0; step < 10; ++step) {
      const at::Tensor g = torch::randn({8, 5}).to(dtype);
      p.mutable_grad() = g.clone();
      optimizer.step();
      muonUpdate({master}, {g}, {momentum}, hyperOf(MuonOptions(1e-4)));
    }
    // Ten such steps would each be lost if they were taken on the rounded weights.
    EXPECT_TRUE(stateOf(optimizer, p).master().equal(master));
    EXPECT_EQ(stateOf(optimizer, p).momentum_buffer().scalar_type(), at::kFloat);
    EXPECT_TRUE(p.detach().equal(master.to(dtype)));
  }
}

TEST(Muon, AParameterWithoutGradientKeepsItsBitsAndHasNoState) {
  const torch::Tensor with = parameter({3, 3}), without = parameter({3, 3});
  const torch::Tensor frozen = parameter({3, 3}).requires_grad_(false);
  const torch::Tensor before = without.detach().clone(), frozen_before = frozen.clone();
  Muon optimizer({with, without, frozen}, MuonOptions(0.1).weight_decay(0.5));
  with.mutable_grad() = torch::eye(3);
  optimizer.step();
  EXPECT_TRUE(without.detach().equal(before));
  EXPECT_TRUE(frozen.equal(frozen_before));
  EXPECT_EQ(optimizer.state().size(), 1u);
}

TEST(Muon, ClosureRunsWithGradientsAndItsLossIsReturned) {
  const torch::Tensor p = parameter({4, 4});
  Muon optimizer(std::vector<torch::Tensor>{p}, MuonOptions(0.1));
  const at::NoGradGuard no_grad;
  const torch::Tensor loss = optimizer.step([&] {
    EXPECT_TRUE(at::GradMode::is_enabled());
    optimizer.zero_grad();
    torch::Tensor value = p.square().sum();
    value.backward();
    return value;
  });
  ASSERT_TRUE(loss.defined());
  EXPECT_LT(p.square().sum().item<float>(), loss.item<float>());
  EXPECT_FALSE(optimizer.step().defined());
}

TEST(Muon, GroupsHaveTheirOwnOptionsAndSchedulersAreSeen) {
  const torch::Tensor a = parameter({4, 4}), b = parameter({4, 4});
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>{a});
  groups.emplace_back(std::vector<torch::Tensor>{b},
                      std::make_unique<MuonOptions>(MuonOptions(0.4).ns_coefficients("keller")));
  Muon optimizer(groups, MuonOptions(0.1).ns_coefficients("keller"));
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, /*gamma=*/0.5);
  std::vector<double> rates;
  for (int step = 0; step < 3; ++step) {
    for (const auto& [p, group] : {std::pair{a, 0}, {b, 1}}) {
      p.mutable_grad() = torch::eye(4);
      const torch::Tensor before = p.detach().clone();
      rates.push_back(optimizer.param_groups()[group].options().get_lr());
      optimizer.step();
      // The keller map of an identity gradient: 0.765439 on the diagonal.
      EXPECT_NEAR((before - p.detach())[2][2].item<double>(), rates.back() * 0.765439, 1e-6);
      optimizer.zero_grad();
    }
    scheduler.step();
  }
  EXPECT_EQ(rates[0], 0.1);
  EXPECT_EQ(rates[1], 0.4);
  EXPECT_LE(rates[4], 0.05);
  EXPECT_LE(rates[5], 0.2);
}

TEST(Muon, ASavedOptimizerContinuesBitForBit) {
  torch::manual_seed(3);
  const auto train = [](Muon& optimizer, const std::vector<torch::Tensor>& parameters, int from,
                        int to) {
    for (int step = from; step < to; ++step) {
      for (size_t i = 0; i < parameters.size(); ++i) {
        torch::manual_seed(100 * step + static_cast<int>(i));
        parameters[i].mutable_grad() =
            torch::randn(parameters[i].sizes()).to(parameters[i].dtype());
      }
      optimizer.step();
    }
  };
  const std::vector<torch::Tensor> straight = {parameter({5, 7}), parameter({6, 6}, at::kHalf)};
  std::vector<torch::Tensor> resumed;
  for (const auto& p : straight) resumed.push_back(p.detach().clone().requires_grad_(true));

  Muon one(straight, MuonOptions(0.05).weight_decay(0.1));
  train(one, straight, 0, 6);

  std::stringstream stream;
  {
    Muon first_half(resumed, MuonOptions(0.05).weight_decay(0.1));
    train(first_half, resumed, 0, 3);
    torch::save(first_half, stream);
  }
  Muon second_half(resumed, MuonOptions(0.7));  // lr and decay come from the archive
  torch::load(second_half, stream);
  train(second_half, resumed, 3, 6);
  for (size_t i = 0; i < straight.size(); ++i) {
    EXPECT_TRUE(straight[i].detach().equal(resumed[i].detach())) << i;
    EXPECT_TRUE(stateOf(one, straight[i])
                    .momentum_buffer()
                    .equal(stateOf(second_half, resumed[i]).momentum_buffer()));
  }
  EXPECT_EQ(static_cast<MuonOptions&>(second_half.param_groups()[0].options()).lr(), 0.05);
}

TEST(Muon, RefusesAnArchiveOfAnotherPlan) {
  std::stringstream stream;
  Muon saved(std::vector<torch::Tensor>{parameter({5, 7})});
  torch::save(saved, stream);
  Muon other(std::vector<torch::Tensor>{parameter({7, 5})});
  EXPECT_THROW(torch::load(other, stream), c10::Error);
}

TEST(Muon, RefusesVectorsIntegersAndOptionsOutOfRange) {
  EXPECT_THROW(Muon(std::vector<torch::Tensor>{parameter({5})}), c10::Error);
  EXPECT_THROW(Muon(std::vector<torch::Tensor>{torch::ones({2, 2}, torch::kLong)}), c10::Error);
  const auto refuse = [](MuonOptions options) {
    EXPECT_THROW(Muon(std::vector<torch::Tensor>{parameter({2, 2})}, options), c10::Error);
  };
  refuse(MuonOptions(-0.1));
  refuse(MuonOptions().momentum(1.5));
  refuse(MuonOptions().ns_steps(6));
  refuse(MuonOptions().ns_mode("slow"));
  refuse(MuonOptions().adjust_lr("double"));
}

}  // namespace
}  // namespace dmuon::optim
