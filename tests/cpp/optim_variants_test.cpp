#include <dmuon/optim/muon.h>
#include <dmuon/optim/variants.h>
#include <gtest/gtest.h>
#include <torch/serialize.h>

#include <sstream>

#include "optim_reference.h"

namespace dmuon::optim {
namespace {

using testing::referenceOrthogonal;
using testing::relativeError;

constexpr double kEps = 1e-8;

// One matrix in fp64, by the formulas of variants.h and muon_update.h.
struct Reference {
  at::Tensor w, buf, v;
  MuonHyper hyper;

  void step(const at::Tensor& gradient) {
    const at::Tensor g = gradient.to(at::kDouble);
    buf = buf + (1 - hyper.momentum) * (g - buf);
    const at::Tensor u = hyper.nesterov ? g + hyper.momentum * (buf - g) : buf;
    const bool ada = hyper.variant == MuonVariant::kAdaMuon;
    at::Tensor x = referenceOrthogonal(ada ? at::sign(u) : u, hyper.newton_schulz.steps);
    if (hyper.variant != MuonVariant::kNone) {
      const at::Tensor square = ada ? x * x : (x * x).mean(1, /*keepdim=*/true);
      v = hyper.beta2 * (v.defined() ? v : at::zeros_like(square)) + (1 - hyper.beta2) * square;
      const at::Tensor scaled = x / (v.sqrt() + kEps);
      const double s = static_cast<double>(std::min(x.size(0), x.size(1)));
      const double norm = ada ? std::sqrt(s) : x.norm().item<double>();
      x = scaled * (norm / scaled.norm().item<double>());
    }
    const at::Tensor decays = hyper.cautious ? (x * w).ge(0).to(at::kDouble) : at::ones_like(w);
    w = w - hyper.lr * hyper.weight_decay * decays * w -
        hyper.lr * lrRatio(hyper.adjust_lr, x.size(0), x.size(1)) * x;
  }
};

TEST(Variants, FollowTheFp64Reference) {
  at::manual_seed(1);
  for (const auto variant : {MuonVariant::kNone, MuonVariant::kNorMuon, MuonVariant::kAdaMuon}) {
    for (const bool cautious : {false, true}) {
      for (const auto& [m, n] : {std::pair{7, 12}, {12, 7}, {1, 5}, {6, 6}}) {
        MuonHyper hyper;
        hyper.newton_schulz = makeNewtonSchulzConfig("you", 5, "fast");
        hyper.lr = 0.05;
        hyper.weight_decay = 0.3;
        hyper.variant = variant;
        hyper.cautious = cautious;
        hyper.beta2 = 0.9;
        MuonParameter p;
        p.weight = at::randn({m, n});
        p.momentum = at::zeros({m, n});
        if (variant != MuonVariant::kNone) {
          p.second_moment = at::zeros(secondMomentShape(variant, {m, n}, {}));
        }
        Reference reference{p.weight.to(at::kDouble), at::zeros({m, n}, at::kDouble), {}, hyper};
        for (int step = 0; step < 10; ++step) {
          p.gradient = at::randn({m, n});
          muonUpdate(std::vector<MuonParameter>{p}, hyper);
          reference.step(p.gradient);
        }
        EXPECT_LE(relativeError(p.weight, reference.w), 1e-5)
            << static_cast<int>(variant) << " " << cautious << " " << m << "x" << n;
        if (p.second_moment.defined()) {
          EXPECT_LE(relativeError(p.second_moment, reference.v), 1e-5);
        }
      }
    }
  }
}

TEST(Variants, SecondMomentsHaveAValuePerRowBlockOrElement) {
  using Shape = std::vector<int64_t>;
  EXPECT_EQ(secondMomentShape(MuonVariant::kNone, {4, 6}, {}), Shape());
  EXPECT_EQ(secondMomentShape(MuonVariant::kNorMuon, {4, 6}, {}), Shape({4, 1}));
  EXPECT_EQ(secondMomentShape(MuonVariant::kNorMuon, {4, 6}, {0, {1, 3}}), Shape({4, 1}));
  EXPECT_EQ(secondMomentShape(MuonVariant::kNorMuon, {4, 6}, {-1, {1, 2, 3}}), Shape({4, 3}));
  EXPECT_EQ(secondMomentShape(MuonVariant::kNorMuon, {2, 4, 6}, {-1, {3, 3}}), Shape({2, 4, 2}));
  EXPECT_EQ(secondMomentShape(MuonVariant::kNorMuon, {4, 6, 3, 3}, {}), Shape({4, 1}));
  EXPECT_EQ(secondMomentShape(MuonVariant::kAdaMuon, {4, 6, 3, 3}, {}), Shape({4, 6, 3, 3}));
}

TEST(Variants, AMissingOrWrongSecondMomentIsRefused) {
  MuonHyper hyper;
  hyper.newton_schulz = makeNewtonSchulzConfig("you", 5, "fast");
  hyper.variant = MuonVariant::kNorMuon;
  MuonParameter p;
  p.weight = at::zeros({4, 6});
  p.gradient = at::randn({4, 6});
  p.momentum = at::zeros({4, 6});
  const auto refuse = [&](const std::string& part) {
    try {
      muonUpdate(std::vector<MuonParameter>{p}, hyper);
      ADD_FAILURE() << "no error, expected: " << part;
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
    EXPECT_TRUE(p.momentum.eq(0).all().item<bool>());
  };
  refuse("parameter 0 of shape [4, 6] has no second moment");
  p.second_moment = at::zeros({6, 1});
  refuse("of shape [4, 1] on cpu, not Float, [6, 1]");
  hyper.beta2 = 1;
  refuse("beta2 must lie in [0, 1), not 1");
  EXPECT_THROW(variantFromName("sgd"), c10::Error);
}

TEST(Variants, ASavedOptimizerContinuesBitForBit) {
  for (const std::string variant : {"none", "normuon", "adamuon"}) {
    const auto options = MuonOptions(0.05).variant(variant).momentum_dtype("bfloat16").seed(4);
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
    torch::manual_seed(3);
    std::vector<torch::Tensor> straight = {torch::randn({5, 7}),
                                           torch::randn({6, 6}).to(torch::kHalf)};
    std::vector<torch::Tensor> resumed;
    for (auto& p : straight) {
      p.requires_grad_(true);
      resumed.push_back(p.detach().clone().requires_grad_(true));
    }
    Muon one(straight, options);
    train(one, straight, 0, 6);
    std::stringstream stream;
    {
      Muon first_half(resumed, options);
      train(first_half, resumed, 0, 3);
      torch::save(first_half, stream);
    }
    Muon second_half(resumed);
    torch::load(second_half, stream);
    train(second_half, resumed, 3, 6);
    for (size_t i = 0; i < straight.size(); ++i) {
      EXPECT_TRUE(straight[i].detach().equal(resumed[i].detach())) << variant << i;
      const auto& state = static_cast<const MuonParamState&>(
          *second_half.state().at(resumed[i].unsafeGetTensorImpl()));
      EXPECT_EQ(state.momentum_buffer().scalar_type(), at::kBFloat16);
      EXPECT_EQ(state.step(), 6);
      EXPECT_EQ(state.second_momentum_buffer().defined(), variant != "none");
    }
  }
  EXPECT_THROW(Muon(std::vector<torch::Tensor>{torch::zeros({2, 2})},
                    MuonOptions().momentum_dtype("float16")),
               c10::Error);
}

}  // namespace
}  // namespace dmuon::optim
