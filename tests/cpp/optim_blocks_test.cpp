#include <dmuon/optim/blocks.h>
#include <dmuon/optim/muon.h>
#include <gtest/gtest.h>

#include "../../optim/src/orthogonalize_all.h"
#include "optim_reference.h"

namespace dmuon::optim {
namespace {

using testing::referenceMuonStep;
using testing::relativeError;

MuonHyper hyperOf() {
  MuonHyper hyper;
  hyper.lr = 0.1;
  hyper.weight_decay = 0.1;
  hyper.newton_schulz = makeNewtonSchulzConfig("you", 5, "fast");
  return hyper;
}

// Three steps on one parameter against each block by itself.
double errorAfterSteps(at::IntArrayRef shape, const Blocks& blocks) {
  MuonHyper hyper = hyperOf();
  hyper.blocks = blocks;
  at::Tensor w = at::randn(shape), buf = at::zeros(shape);
  at::Tensor w64 = w.to(at::kDouble), buf64 = buf.to(at::kDouble);
  for (int step = 0; step < 3; ++step) {
    const at::Tensor g = at::randn(shape);
    muonUpdate({w}, {g}, {buf}, hyper);
    auto weights = w64.split_with_sizes(blocks.sizes, blocks.dim);
    auto momenta = buf64.split_with_sizes(blocks.sizes, blocks.dim);
    const auto gradients = g.split_with_sizes(blocks.sizes, blocks.dim);
    for (size_t b = 0; b < weights.size(); ++b) {
      const at::Tensor& part = weights[b];
      const bool stack = part.dim() == 3;
      const auto m = static_cast<double>(part.size(stack ? 1 : 0));
      const double n = static_cast<double>(part.numel()) / m / (stack ? part.size(0) : 1);
      const auto flat = [&](const at::Tensor& t) {
        return stack ? t : t.reshape({static_cast<int64_t>(m), -1});
      };
      at::Tensor x = flat(weights[b]), v = flat(momenta[b]);
      referenceMuonStep(x, flat(gradients[b]), v, hyper, m > n ? std::sqrt(m / n) : 1);
      weights[b].copy_(x.view(part.sizes()));
      momenta[b].copy_(v.view(part.sizes()));
    }
  }
  return relativeError(w, w64);
}

TEST(Blocks, EachIsAMatrixOfItsOwn) {
  at::manual_seed(1);
  EXPECT_LE(errorAfterSteps({12, 8}, {0, {8, 2, 2}}), 1e-5);
  EXPECT_LE(errorAfterSteps({6, 20}, {-1, {4, 16}}), 1e-5);
  EXPECT_LE(errorAfterSteps({3, 12, 5}, {1, {6, 6}}), 1e-5);
  EXPECT_LE(errorAfterSteps({8, 6, 3, 2}, {1, {2, 4}}), 1e-5);
}

TEST(Blocks, AreCounted) {
  MuonHyper hyper = hyperOf();
  hyper.blocks = {1, {2, 4}};
  at::Tensor w = at::zeros({5, 3, 6}), other = at::zeros({4, 6});
  hyper.blocks.dim = -1;
  EXPECT_EQ(muonUpdate({w, other}, {at::randn({5, 3, 6}), at::randn({4, 6})},
                       {at::zeros_like(w), at::zeros_like(other)}, hyper),
            5 * 2 + 2);
}

TEST(Blocks, AParametersOwnGoBeforeTheOptions) {
  MuonHyper hyper = hyperOf();
  hyper.blocks = {0, {2, 2}};
  MuonParameter p;
  p.weight = at::zeros({4, 6});
  p.gradient = at::randn({4, 6});
  p.momentum = at::zeros({4, 6});
  p.blocks = {1, {1, 2, 3}};
  EXPECT_EQ(muonUpdate(std::vector<MuonParameter>{p}, hyper), 3);
}

TEST(Blocks, ThatDoNotFitAreRefusedWithTheValues) {
  const auto expect = [](const std::string& part, const Blocks& blocks, at::IntArrayRef shape) {
    try {
      checkBlocks(blocks, shape);
      ADD_FAILURE() << "no error, expected: " << part;
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  expect("[8, 2, 3] add up to 13, but dimension 0 of the parameter of shape [12, 8] is 12",
         {0, {8, 2, 3}}, {12, 8});
  expect("dimension 2 of a parameter of shape [12, 8]", {2, {12}}, {12, 8});
  expect("dimension -3 of a parameter", {-3, {12}}, {12, 8});
  expect("must be positive, not [12, 0]", {0, {12, 0}}, {12, 8});
  expect("its 3 matrices are separate anyway", {-3, {1, 2}}, {3, 4, 4});
  checkBlocks({}, {12, 8});
}

TEST(Blocks, AreAnOptionOfTheOptimizersGroups) {
  at::manual_seed(2);
  const at::Tensor start = at::randn({12, 8});
  const auto blocks = MuonOptions(0.1).block_dim(0).block_sizes({8, 2, 2});
  const auto fused = start.clone().requires_grad_(true);
  const auto plain = start.clone().requires_grad_(true);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>{fused}, std::make_unique<MuonOptions>(blocks));
  groups.emplace_back(std::vector<torch::Tensor>{plain});
  Muon optimizer(groups, MuonOptions(0.1));
  const at::Tensor g = at::randn({12, 8});
  fused.mutable_grad() = g.clone();
  plain.mutable_grad() = g.clone();
  optimizer.step();
  const auto parts = start.split_with_sizes({8, 2, 2}, 0);
  const auto gradients = g.split_with_sizes({8, 2, 2}, 0);
  MuonHyper hyper = hyperOf();
  hyper.weight_decay = 0;
  for (size_t b = 0; b < parts.size(); ++b) {
    at::Tensor w = parts[b].clone();
    muonUpdate({w}, {gradients[b]}, {at::zeros_like(w)}, hyper);
    EXPECT_TRUE(w.equal(fused.detach().split_with_sizes({8, 2, 2}, 0)[b]));
  }
  EXPECT_FALSE(fused.detach().equal(plain.detach()));
  EXPECT_THROW(Muon(std::vector<torch::Tensor>{plain}, MuonOptions(blocks).block_dim(1)),
               c10::Error);
}

// How GPUs take them, on the CPU.
TEST(Blocks, InBatchesAreWhatTheyAreOneByOne) {
  at::manual_seed(3);
  const at::Tensor fused = at::randn({14, 6});
  const std::vector<at::Tensor> pieces = {
      fused.narrow(0, 0, 4), at::randn({3, 5, 6}), fused.narrow(0, 4, 5), at::randn({6, 4}).t(),
      at::randn({2, 4, 6}),  at::randn({7, 7}),    fused.narrow(0, 9, 5)};
  const auto config = makeNewtonSchulzConfig("you", 5, "fast");
  std::vector<at::Tensor> single;
  NewtonSchulzWorkspace workspace;
  orthogonalizeAll(pieces, config, workspace, [&](size_t k, const at::Tensor& x) {
    EXPECT_EQ(k, single.size());
    single.push_back(x.clone());
  });
  const auto batched = orthogonalizeInBatches(pieces, config);
  ASSERT_EQ(batched.size(), pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    ASSERT_EQ(batched[i].sizes(), pieces[i].sizes()) << i;
    EXPECT_TRUE(batched[i].is_contiguous()) << i;
    EXPECT_LE(relativeError(batched[i], single[i]), 1e-6) << i;
    if (pieces[i].dim() == 2) {
      EXPECT_LE(relativeError(batched[i], testing::referenceOrthogonal(pieces[i], config.steps)),
                1e-5);
    }
  }
}

}  // namespace
}  // namespace dmuon::optim
