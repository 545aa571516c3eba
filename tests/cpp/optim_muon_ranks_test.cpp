// The C++ optimizer over a group: 4 ranks with different gradients against one process on their
// mean.
#include <dmuon/backend/factory.h>
#include <dmuon/optim/muon.h>
#include <gtest/gtest.h>
#include <torch/serialize.h>

#include <sstream>

#include "ranks.h"

namespace dmuon::optim {
namespace {

using dmuon::testing::runRanks;
using dmuon::testing::Store;
using Parameters = std::vector<torch::Tensor>;

constexpr int kRanks = 4;

c10::intrusive_ptr<ProcessGroupDMuon> groupOf(const Store& store, int rank) {
  return createProcessGroup(store, rank, kRanks, std::chrono::seconds(30));
}

// Every kind: wide, tall, a stack, a strided convolution, halves. The same on all ranks.
Parameters model() {
  torch::manual_seed(11);
  Parameters parameters = {torch::randn({6, 4}),
                           torch::randn({3, 10}),
                           torch::randn({3, 4, 5}),
                           torch::randn({4, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast),
                           torch::randn({5, 5}).to(torch::kHalf),
                           torch::randn({7, 2}).to(torch::kBFloat16),
                           torch::randn({4, 4}, torch::kDouble)};
  for (auto& p : parameters) p.requires_grad_(true);
  return parameters;
}

// Small integers: sums and means over 4 ranks are exact in every dtype, so equality is bit for bit.
torch::Tensor gradient(const torch::Tensor& p, int rank, int step, size_t index) {
  torch::manual_seed(1000 * rank + 100 * step + index);
  return torch::randint(-8, 9, p.sizes()).to(p.dtype());
}

bool present(int rank, int step, size_t index) {
  // Parameter 1 has no gradient in step 1 on any rank; in step 2 only rank 3 has any.
  if (step == 1 && index == 1) return false;
  if (step == 2) return rank == 3;
  return (rank + step + static_cast<int>(index)) % 3 != 0;
}

void setGradients(const Parameters& parameters, int rank, int step) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (present(rank, step, i)) {
      parameters[i].mutable_grad() = gradient(parameters[i], rank, step, i);
    }
  }
}

// What one process would see: the mean over all ranks, where a missing gradient counts as zero.
void setMeanGradients(const Parameters& parameters, int step) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    torch::Tensor sum = torch::zeros(parameters[i].sizes(), torch::kDouble);
    bool any = false;
    for (int rank = 0; rank < kRanks; ++rank) {
      if (!present(rank, step, i)) continue;
      sum += gradient(parameters[i], rank, step, i);
      any = true;
    }
    if (any) parameters[i].mutable_grad() = (sum / kRanks).to(parameters[i].dtype());
  }
}

const torch::Tensor& momentumOf(const torch::optim::OptimizerParamState& state) {
  return static_cast<const MuonParamState&>(state).momentum_buffer();
}

MuonOptions options() { return MuonOptions(0.1).weight_decay(0.1); }

void compareWithOneProcess(const MuonOptions& options) {
  runRanks(kRanks, [&](int rank, const Store& store) {
    const auto pg = groupOf(store, rank);
    const Parameters parameters = model(), reference = model();
    Muon optimizer(parameters, options, pg->ownerCollectives(at::kCPU));
    Muon one(reference, options);
    for (int step = 0; step < 6; ++step) {
      optimizer.zero_grad();
      one.zero_grad();
      setGradients(parameters, rank, step);
      setMeanGradients(reference, step);
      optimizer.step();
      one.step();
      for (size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_TRUE(parameters[i].detach().equal(reference[i].detach()))
            << "parameter " << i << " step " << step << "\n"
            << parameters[i] << "\n"
            << reference[i];
      }
    }
    // The update doesn't depend on the gradient's scale, so a wrong divisor shows here alone.
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto mine = optimizer.state().find(parameters[i].unsafeGetTensorImpl());
      if (mine == optimizer.state().end()) continue;
      EXPECT_TRUE(momentumOf(*mine->second)
                      .equal(momentumOf(*one.state().at(reference[i].unsafeGetTensorImpl()))))
          << i;
    }
    pg->shutdown();
  });
}

TEST(MuonOnRanks, EqualsOneProcessOnTheMeanGradientBitForBit) { compareWithOneProcess(options()); }

TEST(MuonOnRanks, OwnersDoVariantsAndRoundAsOneProcessDoes) {
  compareWithOneProcess(options().variant("normuon").momentum_dtype("bfloat16").seed(5));
  compareWithOneProcess(options().variant("adamuon").cautious(true));
}

TEST(MuonOnRanks, LocalGradientsAreLeftAlone) {
  runRanks(kRanks, [](int rank, const Store& store) {
    const auto pg = groupOf(store, rank);
    const Parameters parameters = model();
    Muon optimizer(parameters, options(), pg->ownerCollectives(at::kCPU));
    setGradients(parameters, rank, 0);
    optimizer.step();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (present(rank, 0, i)) {
        EXPECT_TRUE(parameters[i].grad().equal(gradient(parameters[i], rank, 0, i))) << i;
      } else {
        EXPECT_FALSE(parameters[i].grad().defined()) << i;
      }
    }
    pg->shutdown();
  });
}

TEST(MuonOnRanks, OnlyTheOwnerHoldsStateAndEveryStepIsTwoOperations) {
  runRanks(kRanks, [](int rank, const Store& store) {
    const auto pg = groupOf(store, rank);
    const auto group = pg->ownerCollectives(at::kCPU);
    const Parameters parameters = model();
    Muon optimizer(parameters, options(), group);
    const OwnershipPlan plan = optimizer.plan();
    EXPECT_EQ(plan.slotCosts().size(), size_t{kRanks});
    for (const int step : {0, 3, 4}) {  // every parameter has a gradient on some rank
      optimizer.zero_grad();
      setGradients(parameters, rank, step);
      optimizer.step();
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      const bool mine = plan.at("0." + std::to_string(i)).shard == rank;
      EXPECT_EQ(optimizer.state().count(parameters[i].unsafeGetTensorImpl()), mine ? 1u : 0u) << i;
    }
    EXPECT_EQ(group->counters().reduce.calls, 3);
    EXPECT_EQ(group->counters().broadcast.calls, 3);
    optimizer.zero_grad();
    optimizer.step();  // nobody has a gradient: nothing to send back
    EXPECT_EQ(group->counters().reduce.calls, 4);
    EXPECT_EQ(group->counters().broadcast.calls, 3);
    pg->shutdown();
  });
}

TEST(MuonOnRanks, EveryRankResumesFromItsOwnArchiveOnly) {
  runRanks(kRanks, [](int rank, const Store& store) {
    const auto pg = groupOf(store, rank);
    const auto group = pg->ownerCollectives(at::kCPU);
    const auto train = [&](Muon& optimizer, const Parameters& parameters, int from, int to) {
      for (int step = from; step < to; ++step) {
        optimizer.zero_grad();
        setGradients(parameters, rank, step);
        optimizer.step();
      }
    };
    const Parameters straight = model(), resumed = model();
    Muon one(straight, options(), group);
    train(one, straight, 0, 6);
    std::stringstream stream;
    Muon before(resumed, options(), group);
    train(before, resumed, 0, 3);
    torch::save(before, stream);
    const std::string archive = stream.str();
    Muon after(resumed, options(), group);
    torch::load(after, stream);
    train(after, resumed, 3, 6);
    for (size_t i = 0; i < straight.size(); ++i) {
      EXPECT_TRUE(straight[i].detach().equal(resumed[i].detach())) << i;
    }
    // The archive of the rank before this one.
    store->set("archive" + std::to_string(rank), archive);
    std::stringstream foreign(store->get_to_str("archive" + std::to_string((rank + 3) % kRanks)));
    EXPECT_THROW(torch::load(after, foreign), c10::Error);
    pg->shutdown();
  });
}

TEST(MuonOnRanks, AParameterOfAnotherShapeIsAnErrorOnEveryRankAndChangesNothing) {
  runRanks(kRanks, [](int rank, const Store& store) {
    const auto pg = groupOf(store, rank);
    Parameters parameters = {torch::ones({4, 4}), torch::ones({2, rank == 2 ? 3 : 5})};
    for (auto& p : parameters) {
      p.requires_grad_(true);
      p.mutable_grad() = torch::ones_like(p);
    }
    Muon optimizer(parameters, options(), pg->ownerCollectives(at::kCPU));
    try {
      optimizer.step();
      ADD_FAILURE() << "no error";
    } catch (const std::exception& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find("Muon::step"), std::string::npos) << message;
      EXPECT_NE(message.find("[2, 3]"), std::string::npos) << message;
      EXPECT_NE(message.find("[2, 5]"), std::string::npos) << message;
    }
    for (const auto& p : parameters) EXPECT_TRUE(p.detach().eq(1).all().item<bool>());
    EXPECT_TRUE(optimizer.state().empty());
    pg->shutdown();
  });
}

}  // namespace
}  // namespace dmuon::optim
