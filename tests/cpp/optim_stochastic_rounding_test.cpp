#include <ATen/ATen.h>
#include <dmuon/optim/stochastic_rounding.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace dmuon::optim {
namespace {

at::Tensor rounded(const at::Tensor& x, const RandomStream& stream) {
  at::Tensor out = at::empty(x.sizes(), x.options().dtype(at::kBFloat16));
  roundStochastically(x, out, stream);
  return out;
}

TEST(StochasticRounding, PhiloxGivesItsAuthorsKnownAnswers) {
  using Words = std::array<uint32_t, 4>;
  constexpr uint32_t kOnes = 0xFFFFFFFF;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Words{0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}));
  EXPECT_EQ(philox({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Words{0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}));
}

TEST(StochasticRounding, TensorOperationsGiveTheSameBits) {
  at::manual_seed(1);
  for (const int64_t size : {1, 7, 8, 9, 1000}) {
    const at::Tensor x = at::randn({size}) * at::randn({size}).mul(20).exp();
    const RandomStream stream{0xFEDCBA9876543210, 77, uint64_t{1} << 40};
    at::Tensor other = at::empty({size}, at::kBFloat16);
    roundStochasticallyByOperations(x, other, stream);
    EXPECT_TRUE(rounded(x, stream).equal(other)) << size;
  }
}

TEST(StochasticRounding, StreamsDifferInEveryCoordinate) {
  const at::Tensor x = at::full({64}, 1 + 1.0 / 256);  // halfway
  const at::Tensor first = rounded(x, {1, 2, 3});
  EXPECT_TRUE(first.equal(rounded(x, {1, 2, 3})));
  for (const RandomStream stream : {RandomStream{2, 2, 3},
                                    {1, 3, 3},
                                    {1, 2, 4},
                                    {1 + (uint64_t{1} << 32), 2, 3},
                                    {1, 2, 3 + (uint64_t{1} << 32)}}) {
    EXPECT_FALSE(first.equal(rounded(x, stream)));
  }
}

TEST(StochasticRounding, HitsTheMeanOfEveryFraction) {
  for (const double fraction : {0.0, 0.01, 0.25, 0.5, 0.9}) {
    for (const double sign : {1.0, -1.0}) {
      const at::Tensor x = at::full({200000}, sign * (1 + fraction / 128));
      const double mean = rounded(x, {5, 0, 1}).to(at::kDouble).mean().item<double>();
      const double deviation = std::sqrt(fraction * (1 - fraction) / 200000) / 128;
      EXPECT_NEAR(mean, x[0].item<double>(), 5 * deviation + 1e-12) << fraction;
    }
  }
}

TEST(StochasticRounding, KeepsWhatBf16HasAndWhatIsNotFinite) {
  const float inf = std::numeric_limits<float>::infinity();
  const at::Tensor x = at::tensor({0.0f, -0.0f, 1.5f, -384.0f, inf, -inf, 0x1p-133f});
  EXPECT_TRUE(rounded(x, {1, 2, 3}).to(at::kFloat).equal(x));
  EXPECT_TRUE(rounded(at::full({9}, std::nanf("")), {}).isnan().all().item<bool>());
}

TEST(StochasticRounding, NumbersElementsInLogicalOrder) {
  at::manual_seed(2);
  const at::Tensor x = at::randn({6, 10});
  const at::Tensor expected = rounded(x, {1, 2, 3});
  at::Tensor strided = at::zeros({10, 6}, at::kBFloat16).t();
  roundStochastically(x.t().contiguous().t(), strided, {1, 2, 3});
  EXPECT_TRUE(strided.equal(expected));
  EXPECT_TRUE(rounded(at::zeros({0, 3}), {}).numel() == 0);
}

TEST(StochasticRounding, RefusesOtherTypesAndShapes) {
  EXPECT_THROW(roundStochastically(at::zeros({2}, at::kDouble), at::zeros({2}, at::kBFloat16), {}),
               c10::Error);
  EXPECT_THROW(roundStochastically(at::zeros({2}), at::zeros({2}, at::kHalf), {}), c10::Error);
  EXPECT_THROW(roundStochastically(at::zeros({2}), at::zeros({3}, at::kBFloat16), {}), c10::Error);
}

}  // namespace
}  // namespace dmuon::optim
