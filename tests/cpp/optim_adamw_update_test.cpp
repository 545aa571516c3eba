#include <dmuon/optim/adamw_update.h>
#include <gtest/gtest.h>

#include "optim_reference.h"

namespace dmuon::optim {
namespace {

using testing::relativeError;

// AdamW in fp64, by its formulas.
struct Reference {
  at::Tensor w, m, v;
  int steps = 0;

  explicit Reference(const at::Tensor& start)
      : w(start.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true)),
        m(at::zeros_like(w)),
        v(at::zeros_like(w)) {}

  void step(const at::Tensor& gradient, const AdamWHyper& hyper) {
    const at::Tensor g = gradient.to(at::kDouble);
    ++steps;
    m = hyper.beta1 * m + (1 - hyper.beta1) * g;
    v = hyper.beta2 * v + (1 - hyper.beta2) * g * g;
    const at::Tensor m_hat = m / (1 - std::pow(hyper.beta1, steps));
    const at::Tensor v_hat = v / (1 - std::pow(hyper.beta2, steps));
    w = w * (1 - hyper.lr * hyper.weight_decay) - hyper.lr * m_hat / (v_hat.sqrt() + hyper.eps);
  }
};

struct State {
  std::vector<at::Tensor> weights, exp_avgs, exp_avg_sqs, steps;

  void add(const at::Tensor& weight) {
    weights.push_back(weight);
    exp_avgs.push_back(at::zeros_like(weight));
    exp_avg_sqs.push_back(at::zeros_like(weight));
    steps.push_back(at::zeros({}));
  }
  void update(const std::vector<at::Tensor>& gradients, const AdamWHyper& hyper) {
    adamwUpdate(weights, gradients, exp_avgs, exp_avg_sqs, steps, hyper);
  }
};

TEST(AdamWUpdate, EqualsTheFp64ReferenceOverManySteps) {
  at::manual_seed(5);
  for (const double decay : {0.0, 0.2}) {
    AdamWHyper hyper;
    hyper.lr = 0.01;
    hyper.weight_decay = decay;
    const at::Tensor start = at::randn({7, 11});
    State state;
    state.add(start.clone());
    Reference reference(start);
    for (int i = 0; i < 20; ++i) {
      const at::Tensor g = at::randn({7, 11});
      state.update({g}, hyper);
      reference.step(g, hyper);
    }
    EXPECT_LE(relativeError(state.weights[0], reference.w), 1e-6);
    EXPECT_LE(relativeError(state.exp_avgs[0], reference.m), 1e-6);
    EXPECT_LE(relativeError(state.exp_avg_sqs[0], reference.v), 1e-6);
    EXPECT_EQ(state.steps[0].item<float>(), 20);
  }
}

TEST(AdamWUpdate, TakesTypesEmptyTensorsAndStridesInOneCall) {
  at::manual_seed(6);
  AdamWHyper hyper;
  hyper.lr = 0.1;
  hyper.weight_decay = 0.1;
  const at::Tensor storage = at::randn({6, 10});
  State state;
  state.add(at::randn({33}));
  state.add(at::randn({5, 5}).to(at::kBFloat16));
  state.add(at::empty({0}));
  state.add(at::randn({4, 3}, at::kDouble));
  state.add(storage.t().slice(0, 0, 10, 2));
  std::vector<Reference> references(state.weights.begin(), state.weights.end());
  for (int i = 0; i < 3; ++i) {
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& w : state.weights) gradients.push_back(at::randn(w.sizes()));
    state.update(gradients, hyper);
    for (size_t k = 0; k < references.size(); ++k) {
      references[k].step(gradients[k].to(state.weights[k].scalar_type()), hyper);
    }
  }
  for (size_t k = 0; k < references.size(); ++k) {
    const double gate = state.weights[k].scalar_type() == at::kBFloat16 ? 2e-2 : 1e-6;
    EXPECT_LE(relativeError(state.weights[k], references[k].w), gate) << k;
    EXPECT_LE(relativeError(state.exp_avgs[k], references[k].m), gate) << k;
    EXPECT_EQ(state.steps[k].item<float>(), 3) << k;
  }
  EXPECT_TRUE(state.weights[4].equal(storage.t().slice(0, 0, 10, 2)));
}

TEST(AdamWUpdate, RefusesWhatDoesNotFitWithTheValues) {
  const auto expect = [](const std::string& part, const auto& call) {
    try {
      call();
      FAIL() << "no error, expected: " << part;
    } catch (const c10::Error& error) {
      const std::string message = error.what_without_backtrace();
      EXPECT_NE(message.find(part), std::string::npos) << message;
    }
  };
  const at::Tensor a = at::ones({3}), step = at::zeros({});
  const AdamWHyper good;
  expect("2 weights, 1 gradients", [&] { adamwUpdate({a, a}, {a}, {a}, {a}, {step}, good); });
  expect("[3], [4]", [&] { adamwUpdate({a}, {at::ones({4})}, {a}, {a}, {step}, good); });
  expect("one floating dtype",
         [&] { adamwUpdate({a.to(at::kBFloat16)}, {a}, {a}, {a}, {step}, good); });
  expect("0-dim fp32", [&] { adamwUpdate({a}, {a}, {a}, {a}, {at::zeros({1})}, good); });
  const auto refuse = [&](const std::string& part, const auto& change) {
    AdamWHyper bad;
    change(bad);
    expect(part, [&] { checkAdamWHyper(bad); });
  };
  refuse("lr must be finite and >= 0, not -1", [](AdamWHyper& h) { h.lr = -1; });
  refuse("beta1 must lie in [0, 1), not 1", [](AdamWHyper& h) { h.beta1 = 1; });
  refuse("beta2 must lie in [0, 1), not -0.1", [](AdamWHyper& h) { h.beta2 = -0.1; });
  refuse("eps must be finite and >= 0, not -1", [](AdamWHyper& h) { h.eps = -1; });
  refuse("weight_decay must be finite and >= 0, not -2",
         [](AdamWHyper& h) { h.weight_decay = -2; });
}

}  // namespace
}  // namespace dmuon::optim
