// The order of a backward's reductions, how many are in flight, and what becomes of a gradient,
// over collectives that the test completes itself.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <dmuon/optim/dedicated_model.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace dmuon::optim {
namespace {

// Ends when it is waited for; the other ranks contribute zeros and no flags.
class FakeWork final : public OwnerWork {
 public:
  FakeWork(std::string label, OwnerOptions options, std::vector<at::Tensor> inputs,
           std::vector<at::Tensor> outputs)
      : label(std::move(label)),
        options_(std::move(options)),
        inputs_(std::move(inputs)),
        outputs_(std::move(outputs)) {}
  bool wait(std::chrono::milliseconds) override {
    for (size_t i = 0; i < outputs_.size(); ++i) {
      if (outputs_[i].defined()) outputs_[i].copy_(inputs_[i].to(at::kDouble) / options_.divisor);
    }
    done = true;
    return true;
  }
  std::vector<uint8_t> flags() override { return options_.flags; }

  const std::string label;
  bool done = false;

 private:
  const OwnerOptions options_;
  const std::vector<at::Tensor> inputs_, outputs_;
};

class FakeCollectives final : public OwnerCollectives {
 public:
  int rank() const override { return 0; }
  int size() const override { return 2; }
  const std::string& groupName() const override { return name_; }
  OwnerWorkPtr reduceToOwners(std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                              std::vector<int64_t> owners, OwnerOptions options) override {
    const std::string label = options.label;
    auto work = c10::make_intrusive<FakeWork>(label, std::move(options), std::move(inputs),
                                              std::move(outputs));
    reductions.push_back(work);
    most_in_flight = std::max(most_in_flight, inFlight());
    return work;
  }
  OwnerWorkPtr broadcastFromOwners(std::vector<at::Tensor> tensors, std::vector<int64_t> owners,
                                   OwnerOptions options) override {
    return c10::make_intrusive<FakeWork>("", OwnerOptions{}, std::vector<at::Tensor>{},
                                         std::vector<at::Tensor>{});
  }
  OwnerCounters counters() const override { return {}; }
  void drain() override {}
  void abort(const std::string&) override {}

  int64_t inFlight() const {
    return std::count_if(reductions.begin(), reductions.end(),
                         [](const auto& work) { return !work->done; });
  }
  std::vector<std::string> labels() const {
    std::vector<std::string> all;
    for (const auto& work : reductions) all.push_back(work->label);
    return all;
  }

  std::vector<c10::intrusive_ptr<FakeWork>> reductions;
  int64_t most_in_flight = 0;

 private:
  const std::string name_ = "fake";
};

// Units u0, u1, ... of two 2x3 matrices each; this rank, 0 of 2 shards, owns the first of each.
struct Scene {
  explicit Scene(int64_t units, at::ScalarType compute = at::kFloat,
                 std::optional<at::ScalarType> reduce = std::nullopt) {
    const auto mesh = std::make_shared<MeshOwnerCollectives>(nullptr, fake);
    for (int64_t u = 0; u < units; ++u) {
      std::vector<DedicatedParameter> parameters(2);
      for (int64_t i = 0; i < 2; ++i) {
        parameters[i].name = c10::str("p", i);
        parameters[i].shape = {2, 3};
        parameters[i].owner = {0, i};
        parameters[i].rest = at::empty({i == 0 ? 2 : 0, 3});
        parameters[i].compute_dtype = compute;
      }
      all.push_back(std::make_shared<DedicatedUnit>(c10::str("u", u), parameters,
                                                    UnitChannels{mesh, fake, nullptr}, reduce));
    }
    model = std::make_shared<DedicatedModel>(all, [this] { begin(); });
    for (int64_t u = 0; u < units; ++u) {
      live.push_back(all[u]->live());
      for (auto& tensor : live.back()) tensor.requires_grad_(true);
      model->attach(u, live.back());
    }
  }

  void begin() {
    model->beginBackward(torch::autograd::get_current_graph_task_id());
    for (size_t u = 0; u < all.size(); ++u) model->setSync(static_cast<int64_t>(u), sync);
  }

  // One backward, through the units in this order; every gradient is `value`.
  void backward(std::vector<int64_t> order, double value, GradientSync how = {}) {
    sync = how;
    std::vector<at::Tensor> losses;
    std::reverse(order.begin(), order.end());  // autograd takes the youngest nodes first
    for (const int64_t u : order) {
      all[u]->unshard(false);
      all[u]->waitUnshard();
      for (auto& tensor : live[u]) losses.push_back((tensor * value).sum());
    }
    torch::autograd::backward(losses, {});
    during = static_cast<int64_t>(fake->reductions.size());
    model->finishBackward(std::vector<GradientSync>(all.size(), sync));
  }

  // One that comes to these units, first to last, and then fails, before it has left the last.
  void brokenBackward(const std::vector<int64_t>& units, double value, GradientSync how = {}) {
    sync = how;
    std::vector<at::Tensor> losses;
    for (auto unit = units.rbegin(); unit != units.rend(); ++unit) {
      all[*unit]->unshard(false);
      all[*unit]->waitUnshard();
      for (int64_t i : {0, 1}) {
        auto product = live[*unit][i] * value;
        if (unit == units.rbegin() && i == 0) {
          product.register_hook(
              [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("on purpose"); });
        }
        losses.push_back(product.sum());
      }
    }
    EXPECT_THROW(torch::autograd::backward(losses, {}), std::exception);
    model->abandonBackward();
  }

  bool reduced(int64_t unit, double value) {
    const auto mine = all[unit]->gradients().reduced(0);
    const auto other = all[unit]->gradients().reduced(1);
    return mine.defined() && other.defined() && other.numel() == 0 &&
           mine.equal(at::full({2, 3}, value, mine.options()));
  }

  std::shared_ptr<FakeCollectives> fake = std::make_shared<FakeCollectives>();
  std::vector<std::shared_ptr<DedicatedUnit>> all;
  std::vector<std::vector<at::Tensor>> live;
  std::shared_ptr<DedicatedModel> model;
  GradientSync sync;
  int64_t during = 0;  // reductions that were launched before the end of the backward
};

using Labels = std::vector<std::string>;

TEST(DedicatedModel, reduces_from_the_last_unit_on_whatever_arrives_first) {
  Scene s(3);
  s.backward({1, 0, 2}, 4, {true, true, 2.0});
  EXPECT_EQ(s.during, 3);
  EXPECT_EQ(s.fake->labels(), (Labels{"u2:reduce", "u1:reduce", "u0:reduce"}));
  for (int64_t u = 0; u < 3; ++u) EXPECT_TRUE(s.reduced(u, 2)) << u;
}

TEST(DedicatedModel, a_unit_that_backward_never_reached_contributes_zeros) {
  Scene s(3);
  s.backward({2, 0}, 1);
  EXPECT_EQ(s.during, 1);  // others wait for it until the end
  EXPECT_EQ(s.fake->labels(), (Labels{"u2:reduce", "u1:reduce", "u0:reduce"}));
  EXPECT_FALSE(s.all[1]->gradients().reduced(0).defined());
  EXPECT_TRUE(s.reduced(0, 1));
}

TEST(DedicatedModel, a_unit_that_backward_has_passed_holds_up_no_other) {
  Scene s(2);
  s.sync = {};
  s.begin();
  s.all[1]->unshard(false);
  torch::autograd::backward({s.live[1][0].sum()}, {});  // the other never gets one
  EXPECT_TRUE(s.fake->reductions.empty());
  s.model->pass(1);
  EXPECT_EQ(s.fake->labels(), (Labels{"u1:reduce"}));
  EXPECT_FALSE(s.all[1]->unsharded());
  s.all[1]->unshard(false);
  const auto late = s.live[1][1].sum();
  EXPECT_THROW(torch::autograd::backward({late}, {}), c10::Error);
}

TEST(DedicatedModel, has_at_most_two_reductions_in_flight) {
  Scene s(6);
  s.backward({5, 4, 3, 2, 1, 0}, 1);
  EXPECT_EQ(s.fake->reductions.size(), 6U);
  EXPECT_EQ(s.fake->most_in_flight, 2);
  EXPECT_EQ(s.fake->inFlight(), 2);  // the end of the backward waits for none
  EXPECT_TRUE(s.reduced(1, 1));      // who reads one waits for it alone
  EXPECT_EQ(s.fake->inFlight(), 1);
  EXPECT_FALSE(s.fake->reductions.back()->done);
}

TEST(UnitGradients, add_up_over_backwards) {
  Scene s(1);
  s.backward({0}, 1);
  s.backward({0}, 2);
  EXPECT_TRUE(s.reduced(0, 3));
  EXPECT_TRUE(s.all[0]->gradients().takeReduced(0).defined());
  EXPECT_FALSE(s.all[0]->gradients().reduced(0).defined());
}

TEST(UnitGradients, that_are_dropped_in_flight_never_arrive) {
  Scene s(2);
  s.backward({1, 0}, 1);
  s.all[0]->gradients().drop(0);
  EXPECT_EQ(s.fake->inFlight(), 2);  // nobody waited
  EXPECT_FALSE(s.all[0]->gradients().reduced(0).defined());
  EXPECT_TRUE(s.all[0]->gradients().reduced(1).defined());
  s.all[0]->gradients().drop(1);
  s.backward({1, 0}, 5);
  EXPECT_TRUE(s.reduced(0, 5));
  EXPECT_TRUE(s.reduced(1, 6));
}

TEST(UnitGradients, are_accumulated_without_communication) {
  Scene s(1, at::kBFloat16, at::kFloat);
  s.backward({0}, 256, {false, true, 1.0});
  s.backward({0}, 0.5, {false, true, 1.0});
  EXPECT_TRUE(s.fake->reductions.empty());
  const auto own = s.all[0]->gradients().unreduced(1);  // of the whole shape, owned or not
  EXPECT_TRUE(own.equal(at::full({2, 3}, 256.5, at::kFloat)));
  s.backward({0}, 0.5);
  EXPECT_EQ(s.fake->reductions.size(), 1U);
  EXPECT_TRUE(s.reduced(0, 257));  // in bf16 256 + 0.5 is 256
  EXPECT_FALSE(s.all[0]->gradients().unreduced(1).defined());
}

TEST(UnitGradients, of_a_frozen_parameter_are_reduced_if_some_were_accumulated) {
  Scene s(1);
  s.backward({0}, 1, {false, true, 1.0});
  for (auto& tensor : s.live[0]) tensor.requires_grad_(false);
  s.model->attach(0, s.live[0]);
  s.model->beginBackward(-1);
  s.model->finishBackward({GradientSync{}});
  EXPECT_TRUE(s.reduced(0, 1));
  s.model->beginBackward(-1);
  s.model->finishBackward({GradientSync{}});
  EXPECT_EQ(s.fake->reductions.size(), 1U);  // and then never again
}

TEST(UnitGradients, of_earlier_backwards_outlive_one_that_fails) {
  Scene s(3);
  s.backward({2, 1, 0}, 1);
  EXPECT_TRUE(s.reduced(0, 1));  // settled, the others are in flight
  s.brokenBackward({2, 1}, 4);
  EXPECT_EQ(s.fake->labels().back(), "u2:reduce");
  EXPECT_TRUE(s.reduced(0, 1));
  EXPECT_TRUE(s.reduced(1, 1));  // half of its gradients had come
  EXPECT_TRUE(s.reduced(2, 5));  // as in plain torch
  s.backward({2, 1, 0}, 2);
  EXPECT_TRUE(s.reduced(0, 3));
  EXPECT_TRUE(s.reduced(1, 3));
  EXPECT_TRUE(s.reduced(2, 7));
}

TEST(UnitGradients, accumulated_before_outlive_a_backward_that_fails) {
  for (const auto compute : {at::kFloat, at::kBFloat16}) {
    Scene s(3, compute, at::kFloat);
    const GradientSync no_sync{false, true, 1.0};
    s.backward({2, 1, 0}, 1, no_sync);
    s.brokenBackward({2, 1}, 4, no_sync);
    EXPECT_TRUE(s.all[1]->gradients().unreduced(1).equal(at::full({2, 3}, 1.0)));
    s.brokenBackward({2, 1}, 8);
    s.backward({2, 1, 0}, 2);
    EXPECT_TRUE(s.reduced(0, 3)) << compute;
    EXPECT_TRUE(s.reduced(1, 3)) << compute;
    EXPECT_TRUE(s.reduced(2, 15)) << compute;
  }
}

TEST(UnitGradients, kept_in_the_shard_group_outlive_a_backward_that_fails) {
  Scene s(2);
  s.backward({1, 0}, 1, {true, false, 1.0});
  s.brokenBackward({1, 0}, 4);
  EXPECT_EQ(s.fake->inFlight(), 0);  // its settling communicates: not when somebody reads it
  EXPECT_TRUE(s.reduced(1, 5));
  s.backward({1, 0}, 2);
  EXPECT_TRUE(s.reduced(0, 3));
  EXPECT_TRUE(s.reduced(1, 7));
}

TEST(UnitGradients, kept_in_the_shard_group_are_divided_once_at_the_end) {
  Scene s(1);
  s.backward({0}, 4, {true, false, 2.0});
  EXPECT_FALSE(s.all[0]->gradients().reduced(0).defined());
  EXPECT_TRUE(s.all[0]->gradients().unreduced(0).equal(at::full({2, 3}, 4.0)));
  EXPECT_EQ(s.all[0]->gradients().unreduced(1).numel(), 0);  // its column is the other one
  s.backward({0}, 2, {true, true, 2.0});
  EXPECT_TRUE(s.reduced(0, 3));
  s.backward({0}, 2, {true, false, 2.0});
  for (int64_t i : {0, 1}) s.all[0]->gradients().drop(i);
  s.backward({0}, 2, {true, true, 2.0});
  EXPECT_TRUE(s.reduced(0, 1));
}

}  // namespace
}  // namespace dmuon::optim
