#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <dmuon/optim/muon_update.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "optim_reference.h"

namespace dmuon::optim {
namespace {

using testing::referenceMuonStep;
using testing::relativeError;

MuonHyper hyperOf(const std::string& coefficients = "you", const std::string& mode = "fast") {
  MuonHyper hyper;
  hyper.newton_schulz = makeNewtonSchulzConfig(coefficients, 5, mode);
  return hyper;
}

// The ratios of numerics, written out once more.
double expectedRatio(const std::string& name, double m, double n) {
  if (name == "original") return m > n ? std::sqrt(m / n) : 1;
  if (name == "match_rms_adamw") return 0.2 * std::sqrt(m > n ? m : n);
  if (name == "spectral_unclamped") return std::sqrt(m / n);
  return 1;
}

// Five steps with changing gradients against fp64; returns the relative error of weights and
// momentum.
double errorAfterSteps(at::IntArrayRef shape, const MuonHyper& hyper, double ratio,
                       at::ScalarType gradient_type = at::kFloat) {
  at::Tensor w = at::randn(shape), buf = at::zeros(shape);
  at::Tensor w64 = w.to(at::kDouble), buf64 = buf.to(at::kDouble);
  for (int step = 0; step < 5; ++step) {
    const at::Tensor g = at::randn(shape).to(gradient_type);
    muonUpdate({w}, {g}, {buf}, hyper);
    referenceMuonStep(w64, g, buf64, hyper, ratio);
  }
  return std::max(relativeError(w, w64), relativeError(buf, buf64));
}

TEST(MuonUpdate, EqualsTheFp64ReferenceForEveryAdjustmentMomentumAndDecay) {
  at::manual_seed(1);
  for (const std::string name : {"original", "match_rms_adamw", "spectral_unclamped", "none"}) {
    for (const bool nesterov : {true, false}) {
      for (const double decay : {0.0, 0.3}) {
        for (const auto& [m, n] :
             {std::pair{6, 4}, {5, 7}, {3, 8}, {18, 2}, {1, 16}, {16, 1}, {1, 1}}) {
          MuonHyper hyper = hyperOf();
          hyper.lr = 0.1;
          hyper.nesterov = nesterov;
          hyper.weight_decay = decay;
          hyper.adjust_lr = lrAdjustmentFromName(name);
          EXPECT_LE(errorAfterSteps({m, n}, hyper, expectedRatio(name, m, n)), 1e-5)
              << name << " " << m << "x" << n << " nesterov " << nesterov << " decay " << decay;
        }
      }
    }
  }
}

TEST(MuonUpdate, HasTheClosedFormsOfKeller) {
  MuonHyper hyper = hyperOf("keller");
  hyper.lr = 0.1;
  const auto step = [&](const at::Tensor& g) {
    at::Tensor w = at::zeros_like(g), buf = at::zeros_like(g);
    muonUpdate({w}, {g}, {buf}, hyper);
    return w;
  };
  const auto largest = [](const at::Tensor& t) { return t.abs().max().item<double>(); };
  EXPECT_LE(largest(step(at::eye(4) * 7) + at::eye(4) * 0.07654385304543398), 1e-7);
  EXPECT_LE(largest(step(at::ones({1, 16})) + 0.0174109102367438), 1e-7);
  EXPECT_LE(largest(step(at::ones({16, 1})) + 0.06964364094697519), 1e-7);
  const at::Tensor u = at::arange(1, 6, at::kFloat), v = at::arange(1, 4, at::kFloat);
  const at::Tensor expected =
      (u / u.norm()).outer(v / v.norm()) * -0.0696436 * std::sqrt(5.0 / 3.0);
  // Rank 1: rounding in the empty directions is amplified by the map's slope at zero, 485.
  EXPECT_LE(relativeError(step(u.outer(v)), expected), 1e-4);
}

TEST(MuonUpdate, ZeroGradientDecaysExactlyAndTheNextStepIsRight) {
  MuonHyper hyper = hyperOf();
  hyper.lr = 0.1;
  hyper.weight_decay = 0.5;
  at::Tensor w = at::ones({4, 4}), buf = at::zeros({4, 4});
  muonUpdate({w}, {at::zeros({4, 4})}, {buf}, hyper);
  EXPECT_TRUE(w.equal(at::full({4, 4}, 0.95f)));
  EXPECT_TRUE(buf.eq(0).all().item<bool>());
  at::Tensor w64 = w.to(at::kDouble), buf64 = buf.to(at::kDouble);
  const at::Tensor g = at::randn({4, 4});
  muonUpdate({w}, {g}, {buf}, hyper);
  referenceMuonStep(w64, g, buf64, hyper, 1);
  EXPECT_LE(relativeError(w, w64), 1e-5);
}

TEST(MuonUpdate, AStackOfMatricesIsSeparateMatrices) {
  at::manual_seed(2);
  MuonHyper hyper = hyperOf();
  hyper.lr = 0.1;
  EXPECT_LE(errorAfterSteps({3, 4, 6}, hyper, 1), 1e-5);
  EXPECT_LE(errorAfterSteps({3, 6, 4}, hyper, std::sqrt(1.5)), 1e-5);
  at::Tensor w = at::zeros({3, 4, 6}), buf = at::zeros({3, 4, 6});
  EXPECT_EQ(muonUpdate({w}, {at::randn({3, 4, 6})}, {buf}, hyper), 3);
}

TEST(MuonUpdate, AConvolutionInChannelsLastEqualsTheContiguousOneBitForBit) {
  at::manual_seed(3);
  for (const auto& shape : {std::vector<int64_t>{16, 1, 3, 3}, {8, 5, 3, 2}}) {
    MuonHyper hyper = hyperOf();
    hyper.weight_decay = 0.1;
    const at::Tensor start = at::randn(shape);
    at::Tensor plain = start.clone(), plain_buf = at::zeros(shape);
    at::Tensor last = start.contiguous(at::MemoryFormat::ChannelsLast);
    at::Tensor last_buf = at::zeros_like(last);
    at::Tensor w64 = start.to(at::kDouble).reshape({shape[0], -1}), buf64 = at::zeros_like(w64);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor g = at::randn(shape);
      muonUpdate({plain}, {g}, {plain_buf}, hyper);
      muonUpdate({last}, {g.contiguous(at::MemoryFormat::ChannelsLast)}, {last_buf}, hyper);
      const double m = static_cast<double>(w64.size(0)), n = static_cast<double>(w64.size(1));
      referenceMuonStep(w64, g.reshape({shape[0], -1}), buf64, hyper,
                        expectedRatio("original", m, n));
    }
    EXPECT_TRUE(plain.equal(last));
    EXPECT_LE(relativeError(plain.reshape({shape[0], -1}), w64), 1e-5);
  }
}

TEST(MuonUpdate, TakesStridedWeightsAndLowPrecisionGradients) {
  at::manual_seed(4);
  MuonHyper hyper = hyperOf();
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kDouble}) {
    EXPECT_LE(errorAfterSteps({9, 5}, hyper, std::sqrt(9.0 / 5.0), dtype), 1e-5);
  }
  const at::Tensor start = at::randn({6, 8}), g = at::randn({6, 8});
  at::Tensor plain = start.clone(), plain_buf = at::zeros({6, 8});
  muonUpdate({plain}, {g}, {plain_buf}, hyper);
  at::Tensor storage = at::zeros({8, 12}), buf = at::zeros({6, 8});
  at::Tensor view = storage.slice(1, 0, 12, 2).t();  // (6, 8), neither dimension dense
  view.copy_(start);
  muonUpdate({view}, {g}, {buf}, hyper);
  EXPECT_TRUE(view.equal(plain));
  EXPECT_TRUE(storage.slice(1, 1, 12, 2).eq(0).all().item<bool>());
}

TEST(MuonUpdate, CountsMatricesSkipsEmptyOnesAndLeavesGradientsAlone) {
  const MuonHyper hyper = hyperOf();
  std::vector<at::Tensor> weights, gradients, momenta;
  for (const auto& shape : {std::vector<int64_t>{4, 4}, {0, 6}, {2, 3, 5}, {4, 4}}) {
    weights.push_back(at::ones(shape));
    gradients.push_back(at::randn(shape));
    momenta.push_back(at::zeros(shape));
  }
  const at::Tensor copy = gradients[0].clone();
  EXPECT_EQ(muonUpdate(weights, gradients, momenta, hyper), 4);
  EXPECT_TRUE(gradients[0].equal(copy));
  EXPECT_EQ(muonUpdate({}, {}, {}, hyper), 0);
}

TEST(MuonUpdate, WorksOnParametersThatRequireGradients) {
  at::Tensor w = at::ones({3, 3}, at::TensorOptions().requires_grad(true)), buf = at::zeros({3, 3});
  muonUpdate({w}, {at::eye(3)}, {buf}, hyperOf());
  EXPECT_TRUE(w.is_leaf());
  EXPECT_FALSE(buf.requires_grad());
  EXPECT_FALSE(w.detach().equal(at::ones({3, 3})));
}

TEST(MuonUpdate, RefusesWhatDoesNotFitWithTheValues) {
  const auto expect = [](const std::string& part, const auto& call) {
    try {
      call();
      FAIL() << "no error, expected: " << part;
    } catch (const c10::Error& error) {
      const std::string message = error.what_without_backtrace();
      EXPECT_NE(message.find(part), std::string::npos) << message;
    }
  };
  const MuonHyper good = hyperOf();
  const at::Tensor a = at::ones({2, 3});
  expect("1 weights, 2 gradients", [&] { muonUpdate({a}, {a, a}, {a}, good); });
  expect("[2, 3], [3, 2]", [&] { muonUpdate({a}, {a.t()}, {a}, good); });
  expect("must be fp32 or fp64, not Half", [&] { muonUpdate({a.to(at::kHalf)}, {a}, {a}, good); });
  expect("at least 2 dimensions", [&] { matrixView({5}); });
  expect("'linear'", [&] { lrAdjustmentFromName("linear"); });
  const auto refuse = [&](const std::string& part, const auto& change) {
    MuonHyper bad = good;
    change(bad);
    expect(part, [&] { checkMuonHyper(bad); });
  };
  refuse("lr must be finite and >= 0, not -1", [](MuonHyper& h) { h.lr = -1; });
  refuse("lr must be finite and >= 0, not nan",
         [](MuonHyper& h) { h.lr = std::numeric_limits<double>::quiet_NaN(); });
  refuse("momentum must lie in [0, 1), not 1", [](MuonHyper& h) { h.momentum = 1; });
  refuse("weight_decay must be finite and >= 0, not -0.5",
         [](MuonHyper& h) { h.weight_decay = -0.5; });
  refuse("steps, not 0", [](MuonHyper& h) { h.newton_schulz.steps.clear(); });
}

// What torch's CPU allocator is asked for on this thread.
struct Allocations : c10::MemoryReportingInfoBase {
  int64_t largest = 0;
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    largest = std::max(largest, bytes);
  }
  bool memoryProfilingEnabled() const override { return true; }
};

TEST(MuonUpdate, AllocatesNothingOnceItsWorkspaceHasSeenTheLargestMatrix) {
  at::set_num_threads(1);
  const std::vector<std::vector<int64_t>> shapes = {{256, 384}, {384, 256}, {40, 500}, {3, 64, 96}};
  std::vector<MuonParameter> parameters(shapes.size());
  for (size_t i = 0; i < shapes.size(); ++i) {
    parameters[i].weight = at::randn(shapes[i]);
    parameters[i].gradient = at::randn(shapes[i]);
    parameters[i].momentum = at::randn(shapes[i]);
  }
  const auto copies = [&] {
    std::vector<MuonParameter> own = parameters;
    for (MuonParameter& p : own) {
      p.weight = p.weight.clone();
      p.momentum = p.momentum.clone();
    }
    return own;
  };
  const MuonHyper hyper = hyperOf();
  std::vector<MuonParameter> with = copies(), without = copies();
  NewtonSchulzWorkspace workspace;
  muonUpdate(with, hyper, workspace);
  const auto allocations = std::make_shared<Allocations>();
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, allocations);
    muonUpdate(with, hyper, workspace);
  }
  EXPECT_LE(allocations->largest, 64);  // scalars
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, allocations);
    muonUpdate(without, hyper);
  }
  EXPECT_GE(allocations->largest, 256 * 384 * 4);  // the counter counts
  muonUpdate(without, hyper);
  for (size_t i = 0; i < shapes.size(); ++i) {
    EXPECT_TRUE(with[i].weight.equal(without[i].weight)) << i;
    EXPECT_TRUE(with[i].momentum.equal(without[i].momentum)) << i;
  }
}

}  // namespace
}  // namespace dmuon::optim
