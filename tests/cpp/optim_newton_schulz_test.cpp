#include <ATen/Parallel.h>
#include <dmuon/optim/newton_schulz.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "../../optim/src/newton_schulz_engine.h"
#include "../../optim/src/normalize.h"
#include "../../optim/src/symmetric_product.h"
#include "optim_reference.h"

namespace dmuon::optim {
namespace {

using testing::matrixWithSpectrum;
using testing::referenceOrthogonal;
using testing::relativeError;

const std::vector<std::string> kModes = {"fast", "accurate", "exact"};
const auto kWide = at::TensorOptions().dtype(at::kDouble);

class NewtonSchulz : public ::testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    at::manual_seed(7);
  }
};

// As many steps as the set is meant for.
int64_t stepsOf(const std::string& name) { return name == "deepseek" ? 10 : 5; }

// What fp32 can hold depends on the spectrum: rounding of R = X X^T disturbs small eigenvalues, by
// more the longer a segment without a restart is, and empty directions amplify what rounding puts
// there by the map's slope at zero (485 for keller, 79 000 for deepseek's ten steps). The gates
// hold for a slope of 500 and grow with it. "fast" is the mode with the longer segments.
struct Spectrum {
  std::string name;
  double fast_gate, gate;
  at::Tensor values;
};

double amplification(const std::string& coefficients) {
  const double slope =
      composedMap(coefficientSet(coefficients, stepsOf(coefficients)), 1e-12) / 1e-12;
  return std::max(1.0, slope / 500);
}

// To first order, the most that rounding every term of every step to fp32 can do to the result,
// relative to its norm. Where terms cancel, a step's result is less exact than its argument, and
// the steps after it are steep there: for cans and the singular values 0.50 and 0.86 this is 2e-4.
double roundingBound(const std::vector<Coefficients>& steps, const at::Tensor& a) {
  const double eps = std::numeric_limits<float>::epsilon();
  at::Tensor x = at::linalg_svdvals(a.to(at::kDouble));
  x = x / x.norm();
  at::Tensor error = eps * x;
  for (const auto& [a1, a3, a5] : steps) {
    const at::Tensor slope = (a1 + 3 * a3 * x.pow(2) + 5 * a5 * x.pow(4)).abs();
    const at::Tensor terms = std::abs(a1) * x + std::abs(a3) * x.pow(3) + std::abs(a5) * x.pow(5);
    error = error * slope + eps * terms;
    x = a1 * x + a3 * x.pow(3) + a5 * x.pow(5);
  }
  return (error.norm() / x.norm()).item<double>();
}

std::vector<Spectrum> spectra(int64_t s) {
  const at::Tensor linear = at::linspace(1.0 / static_cast<double>(s), 1, s, kWide);
  const auto logarithmic = [&](double low) { return at::logspace(low, 0, s, 10, kWide); };
  const at::Tensor index = at::arange(s, kWide);
  return {{"flat", 1e-5, 1e-5, linear + 0.2},
          {"linear", 1e-4, 1e-5, linear},
          {"log 1e-3", 1.5e-4, 2e-5, logarithmic(-3)},
          {"log 1e-6", 2e-4, 5e-5, logarithmic(-6)},
          {"log 1e-9", 2e-4, 5e-5, logarithmic(-9)},
          {"half zeros", 1e-3, 5e-5, linear * (index >= s / 2).to(at::kDouble)},
          {"rank 2 and a tiny tail", 3e-4, 1e-4, at::where(index < 2, 1.0, 1e-7)}};
}

// Both orientations, primes, vectors, and l / s on both sides of 1.5.
const std::vector<std::pair<int64_t, int64_t>> kSizes = {{1, 1},    {1, 7},    {7, 1},    {2, 3},
                                                         {13, 17},  {31, 31},  {97, 131}, {64, 200},
                                                         {200, 64}, {199, 101}};

at::Tensor normalized(void (*normalize)(const at::Tensor&, at::Tensor&), const at::Tensor& g,
                      at::ScalarType dtype) {
  at::Tensor out = at::empty(g.sizes(), g.options().dtype(dtype));
  normalize(g, out);
  return out;
}

// Every set, mode and spectrum for one size.
void expectPolynomialOfTheSingularValues(int64_t m, int64_t n) {
  for (const Spectrum& spectrum : spectra(std::min(m, n))) {
    const at::Tensor a = matrixWithSpectrum(m, n, spectrum.values).to(at::kFloat);
    const testing::Decomposition decomposition(a);
    for (const std::string& name : coefficientSetNames()) {
      const int64_t steps = stepsOf(name);
      const at::Tensor reference = decomposition.orthogonal(coefficientSet(name, steps));
      const double factor = spectrum.name == "flat" ? 1 : amplification(name);
      const double bound = roundingBound(coefficientSet(name, steps), a);
      for (const std::string& mode : kModes) {
        const at::Tensor x = newtonSchulz(a, makeNewtonSchulzConfig(name, steps, mode));
        const double error = relativeError(x, reference);
        const double gate = factor * (mode == "fast" ? spectrum.fast_gate : spectrum.gate);
        EXPECT_LE(error, std::max(gate, bound))
            << m << "x" << n << " " << spectrum.name << " " << name << " " << mode;
        EXPECT_EQ(x.scalar_type(), at::kFloat);
        EXPECT_TRUE(x.is_contiguous());
      }
    }
  }
}

TEST_F(NewtonSchulz, EqualsThePolynomialOfTheSingularValues) {
  for (const auto& [m, n] : kSizes) expectPolynomialOfTheSingularValues(m, n);
}

TEST_F(NewtonSchulz, EqualsThePolynomialForLargeMatricesToo) {
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>{257, 521}, {1024, 256}}) {
    expectPolynomialOfTheSingularValues(m, n);
  }
}

TEST_F(NewtonSchulz, GaussianMatricesAreWithinTheGateInEveryMode) {
  for (const auto& [m, n] :
       {std::pair{8, 6}, {3, 8}, {97, 151}, {64, 200}, {200, 64}, {128, 192}}) {
    const at::Tensor a = at::randn({m, n});
    for (const std::string& name : coefficientSetNames()) {
      const at::Tensor reference = referenceOrthogonal(a, coefficientSet(name, 5));
      const double gate = std::max(1e-5, roundingBound(coefficientSet(name, 5), a));
      for (const std::string& mode : kModes) {
        EXPECT_LE(relativeError(newtonSchulz(a, makeNewtonSchulzConfig(name, 5, mode)), reference),
                  gate)
            << m << "x" << n << " " << name << " " << mode;
      }
    }
  }
}

TEST_F(NewtonSchulz, HandlesRankOneWithTwoLevelVectorsAndASingleNonZeroRow) {
  const at::Tensor u = at::where(at::arange(60) < 30, 1.0, 1e-3).to(at::kDouble);
  const at::Tensor v = at::where(at::arange(90) < 20, 1.0, 1e-3).to(at::kDouble);
  at::Tensor row = at::zeros({40, 50}, kWide);
  row[3] = at::randn({50}, kWide);
  for (const at::Tensor& wide : {u.unsqueeze(1) * v, row}) {
    const at::Tensor a = wide.to(at::kFloat);
    for (const std::string& name : coefficientSetNames()) {
      const at::Tensor reference = referenceOrthogonal(a, coefficientSet(name, 5));
      for (const std::string& mode : kModes) {
        EXPECT_LE(relativeError(newtonSchulz(a, makeNewtonSchulzConfig(name, 5, mode)), reference),
                  1e-4 * amplification(name))
            << a.sizes() << " " << name << " " << mode;
      }
    }
  }
}

TEST_F(NewtonSchulz, IteratesDoublesInDouble) {
  const at::Tensor a = at::randn({37, 61}, kWide);
  for (const std::string& mode : kModes) {
    const at::Tensor x = newtonSchulz(a, makeNewtonSchulzConfig("you", 5, mode));
    ASSERT_EQ(x.scalar_type(), at::kDouble) << mode;
    EXPECT_LE(relativeError(x, referenceOrthogonal(a, coefficientSet("you", 5))), 1e-13) << mode;
  }
}

TEST_F(NewtonSchulz, HalfPrecisionStaysInsideItsGates) {
  const at::Tensor a = matrixWithSpectrum(48, 128, at::logspace(-3, 0, 48, 10, kWide));
  const at::Tensor reference = referenceOrthogonal(a, coefficientSet("you", 5));
  const auto error = [&](const std::string& mode, NewtonSchulzForm form) {
    NewtonSchulzConfig config = makeNewtonSchulzConfig("you", 5, mode);
    config.form = form;
    config.dtype = at::kHalf;
    const at::Tensor x = newtonSchulz(a.to(at::kFloat), config);
    EXPECT_EQ(x.scalar_type(), at::kHalf);
    return relativeError(x, reference);
  };
  EXPECT_LE(error("fast", NewtonSchulzForm::kGram), 3e-2);
  EXPECT_LE(error("accurate", NewtonSchulzForm::kGram), 1e-2);
  EXPECT_LE(error("fast", NewtonSchulzForm::kDirect), 1e-2);
}

TEST_F(NewtonSchulz, KellerHasItsClosedForms) {
  const auto keller = makeNewtonSchulzConfig("keller", 5, "fast");
  const at::Tensor identity = newtonSchulz(at::eye(4) * 3, keller);
  EXPECT_LE((identity - at::eye(4) * 0.7654385304543397).abs().max().item<double>(), 1e-6);
  const at::Tensor wide = newtonSchulz(at::ones({1, 16}), keller);
  EXPECT_LE((wide - 0.17410910236743798).abs().max().item<double>(), 1e-6);
  const at::Tensor tall = newtonSchulz(at::ones({16, 1}), keller);
  EXPECT_LE((tall - 0.17410910236743798).abs().max().item<double>(), 1e-6);
}

TEST_F(NewtonSchulz, DirectAndGramFormsAgree) {
  for (const auto& [m, n] : kSizes) {
    const at::Tensor a = at::randn({m, n});
    for (const std::string& name : coefficientSetNames()) {
      for (const std::string mode : {"fast", "accurate"}) {
        NewtonSchulzConfig config = makeNewtonSchulzConfig(name, 5, mode);
        config.form = NewtonSchulzForm::kDirect;
        const at::Tensor direct = newtonSchulz(a, config);
        config.form = NewtonSchulzForm::kGram;
        EXPECT_LE(relativeError(newtonSchulz(a, config), direct), mode == "fast" ? 5e-5 : 1e-5)
            << m << "x" << n << " " << name << " " << mode;
      }
    }
  }
}

TEST_F(NewtonSchulz, LongIterationsRestartOftenEnough) {
  const at::Tensor a = at::randn({20, 70});
  for (const int64_t steps : {1, 2, 3, 4, 8, 12}) {
    for (const std::string& mode : kModes) {
      const auto config = makeNewtonSchulzConfig("polar_express", steps, mode);
      EXPECT_LE(relativeError(newtonSchulz(a, config), referenceOrthogonal(a, config.steps)), 1e-5)
          << steps << " " << mode;
    }
  }
}

TEST_F(NewtonSchulz, IsInvariantToTheScaleOfItsInput) {
  const at::Tensor a = at::randn({24, 40}, kWide);
  const auto config = makeNewtonSchulzConfig("you", 5, "fast");
  const at::Tensor reference = referenceOrthogonal(a, config.steps);
  for (const double scale : {1e-36, 1e-30, 1e-20, 1e-7, 1.0, 1e7, 1e20, 1e30, 1e37}) {
    const at::Tensor x = newtonSchulz((a * scale).to(at::kFloat), config);
    EXPECT_LE(relativeError(x, reference), 1e-5) << scale;
  }
  // Denormals have few bits, so the reference sees what fp32 kept of them.
  const at::Tensor denormal = (a * 1e-40).to(at::kFloat);
  EXPECT_LE(relativeError(newtonSchulz(denormal, config),
                          referenceOrthogonal(denormal.to(at::kDouble) * 1e40, config.steps)),
            1e-5);
  for (const double scale : {1e-320, 1e-300, 1e-200, 1e200, 1e307}) {
    const at::Tensor scaled = a * scale;
    const at::Tensor expected = referenceOrthogonal(scaled / scale, config.steps);
    EXPECT_LE(relativeError(newtonSchulz(scaled, config), expected), 1e-10) << scale;
  }
}

TEST_F(NewtonSchulz, TakesTheLargestAndSmallestFiniteNumbers) {
  const auto config = makeNewtonSchulzConfig("keller", 5, "fast");
  for (const float value : {3.4e38f, 1e-45f}) {
    const at::Tensor x = newtonSchulz(at::full({1, 16}, value), config);
    EXPECT_LE((x - 0.174109).abs().max().item<double>(), 1e-6) << value;
  }
  for (const double value : {1.7e308, 5e-324}) {
    const at::Tensor x = newtonSchulz(at::full({1, 16}, value, kWide), config);
    EXPECT_LE((x - 0.174109).abs().max().item<double>(), 1e-6) << value;
  }
}

TEST_F(NewtonSchulz, AccumulatesTheNormOfManyElementsWide) {
  const at::Tensor a = at::randn({2, 2000000});
  const double norm = a.to(at::kDouble).norm().item<double>();
  const at::Tensor expected = a.to(at::kDouble) / norm;
  EXPECT_LE(relativeError(normalized(normalizeOnCpu, a, at::kFloat), expected), 1e-7);
  EXPECT_LE(relativeError(normalized(normalizeOnDevice, a, at::kFloat), expected), 2e-7);
}

TEST_F(NewtonSchulz, ZeroGivesZerosAndNonFiniteGivesNaNThroughoutThatMatrix) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    at::Tensor batch = at::randn({4, 5, 9}, kWide).to(dtype);
    batch[0].zero_();
    batch[1][2][3] = std::numeric_limits<double>::quiet_NaN();
    batch[2].zero_();
    batch[2][0][8] = std::numeric_limits<double>::infinity();
    for (const std::string& mode : kModes) {
      const auto config = makeNewtonSchulzConfig("you", 5, mode);
      const at::Tensor x = newtonSchulz(batch, config);
      EXPECT_TRUE(x[0].eq(0).all().item<bool>()) << mode;
      EXPECT_TRUE(x[1].isnan().all().item<bool>()) << mode;
      EXPECT_TRUE(x[2].isnan().all().item<bool>()) << mode;
      EXPECT_TRUE(x[3].equal(newtonSchulz(batch[3], config))) << mode;
    }
  }
}

TEST_F(NewtonSchulz, ABatchIsItsMatricesOneByOne) {
  const auto config = makeNewtonSchulzConfig("you", 5, "accurate");
  for (const auto& [m, n] : kSizes) {
    const at::Tensor batch = at::randn({3, m, n});
    const at::Tensor x = newtonSchulz(batch, config);
    ASSERT_EQ(x.sizes(), batch.sizes());
    for (int64_t i = 0; i < 3; ++i) EXPECT_TRUE(x[i].equal(newtonSchulz(batch[i], config)));
  }
}

TEST_F(NewtonSchulz, TheWayOfOtherDevicesGivesTheSame) {
  // On a GPU matrices go through the engine as a batch, normalised by ATen operations.
  for (const auto& [m, n] : kSizes) {
    at::Tensor batch = at::randn({4, m, n});
    batch[1] *= 1e-38;
    batch[2] *= 1e37;
    batch[3].zero_();
    const auto config = makeNewtonSchulzConfig("you", 5, "fast");
    NewtonSchulzWorkspace workspace;
    const at::Tensor x = iterateGram(normalized(normalizeOnDevice, batch, at::kFloat), config.steps,
                                     config.restarts, workspace);
    EXPECT_LE(relativeError(x, newtonSchulz(batch, config)), 2e-5) << m << "x" << n;
    EXPECT_TRUE(x[3].eq(0).all().item<bool>());
    EXPECT_TRUE(x.is_contiguous());
  }
  at::Tensor bad = at::ones({2, 3, 4});
  bad[0][1][1] = std::numeric_limits<float>::infinity();
  const at::Tensor half = normalized(normalizeOnDevice, bad, at::kHalf);
  EXPECT_TRUE(half[0].isnan().all().item<bool>());
  EXPECT_TRUE(half[1].isfinite().all().item<bool>());
}

TEST_F(NewtonSchulz, TakesStridedAndLowPrecisionInputAndLeavesItAlone) {
  const auto config = makeNewtonSchulzConfig("you", 5, "fast");
  const at::Tensor a = at::randn({30, 80}).slice(1, 5, 75, 2);
  const at::Tensor copy = a.clone();
  const at::Tensor expected = newtonSchulz(a.contiguous(), config);
  EXPECT_TRUE(newtonSchulz(a, config).equal(expected));
  EXPECT_TRUE(newtonSchulz(a.t(), config).is_contiguous());
  EXPECT_LE(relativeError(newtonSchulz(a.t(), config), expected.t()), 1e-6);
  EXPECT_TRUE(a.equal(copy));
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    const at::Tensor low = a.to(dtype);
    EXPECT_TRUE(newtonSchulz(low, config).equal(newtonSchulz(low.to(at::kFloat), config)));
  }
  EXPECT_EQ(newtonSchulz(at::empty({0, 4}), config).sizes(), at::IntArrayRef({0, 4}));
}

TEST_F(NewtonSchulz, AWorkspaceIsUsedAgainAndChangesNothing) {
  const auto config = makeNewtonSchulzConfig("you", 5, "fast");
  NewtonSchulzWorkspace workspace;
  const void* place = nullptr;
  for (const auto& [m, n] :
       std::vector<std::pair<int64_t, int64_t>>{{300, 700}, {700, 300}, {64, 64}}) {
    const at::Tensor a = at::randn({m, n});
    const at::Tensor x = newtonSchulz(a, config, workspace);
    EXPECT_TRUE(x.equal(newtonSchulz(a, config))) << m << "x" << n;
    EXPECT_TRUE(newtonSchulz(a, config, workspace).equal(newtonSchulz(a, config)));
    if (place == nullptr) place = workspace.take(0, {1}, a.options()).const_data_ptr();
    EXPECT_EQ(workspace.take(0, {1}, a.options()).const_data_ptr(), place);
  }
  const at::Tensor wide = at::randn({20, 30}, at::kDouble);
  EXPECT_TRUE(newtonSchulz(wide, config, workspace).equal(newtonSchulz(wide, config)));
}

TEST_F(NewtonSchulz, AKernelForSymmetricProductsTakesTheirPlace) {
  const auto config = makeNewtonSchulzConfig("you", 5, "fast");
  const at::Tensor a = at::randn({40, 90});
  const at::Tensor expected = newtonSchulz(a, config);
  int calls = 0;
  setSymmetricProduct(at::kCPU, [&](at::Tensor& out, double beta, const at::Tensor& c, double alpha,
                                    const at::Tensor& left, const at::Tensor& right) {
    ++calls;
    out.copy_(alpha * left.matmul(right));
    if (beta != 0) out.add_(c, beta);
  });
  const at::Tensor x = newtonSchulz(a, config);
  setSymmetricProduct(at::kCPU, {});
  // Two segments of 2 and 3 steps: 2 R, 5 P, 3 Q, 3 pairs of T and R.
  EXPECT_EQ(calls, 2 + 5 + 3 + 6);
  EXPECT_LE(relativeError(x, expected), 1e-5);
  newtonSchulz(a, config);
  EXPECT_EQ(calls, 16);
}

TEST(SymmetricProduct, IsTheProductWithItsUpperPartCopied) {
  for (const int64_t s : {1, 5, 127, 128, 223, 400, 768, 1025}) {
    for (const int64_t k : {s, 2 * s + 3}) {
      const at::Tensor x = at::randn({s, k}) / std::sqrt(static_cast<double>(k));
      const at::Tensor c = at::randn({s, s}), symmetric = c + c.t();
      at::Tensor out = at::full({s, s}, NAN);
      builtInSymmetricProduct(out, 0.5, symmetric, -2, x, x.t());
      const at::Tensor wide = x.to(at::kDouble);
      const at::Tensor expected = 0.5 * symmetric.to(at::kDouble) - 2 * wide.matmul(wide.t());
      EXPECT_LE(relativeError(out, expected), 1e-6) << s << " " << k;
      if (s >= 256) {  // strips, of a few rows each
        const int64_t most = s / 4;
        EXPECT_TRUE(out.narrow(0, 0, most)
                        .narrow(1, s - most, most)
                        .equal(out.t().narrow(0, 0, most).narrow(1, s - most, most)));
      }
      out.fill_(NAN);
      builtInSymmetricProduct(out, 0, out, 1, x, x.t());  // c isn't read
      EXPECT_LE(relativeError(out, wide.matmul(wide.t())), 1e-6) << s << " " << k;
      // Of a transposed operand: a tall matrix's Gram matrix.
      const at::Tensor tall = x.t().contiguous();
      builtInSymmetricProduct(out, 0, out, 1, tall.t(), tall);
      EXPECT_LE(relativeError(out, wide.matmul(wide.t())), 1e-6) << s << " " << k;
    }
  }
}

TEST_F(NewtonSchulz, FlopsFollowTheTable) {
  const double s = 96, l = 384;
  NewtonSchulzConfig fast = makeNewtonSchulzConfig("you", 5, "fast");
  NewtonSchulzConfig accurate = makeNewtonSchulzConfig("you", 5, "accurate");
  const NewtonSchulzConfig exact = makeNewtonSchulzConfig("you", 5, "exact");
  const double direct = 20 * s * s * l + 10 * s * s * s;
  EXPECT_EQ(newtonSchulzFlops(384, 96, fast), 8 * s * s * l + 28 * s * s * s);
  EXPECT_EQ(newtonSchulzFlops(96, 384, accurate), 12 * s * s * l + 22 * s * s * s);
  EXPECT_EQ(newtonSchulzFlops(96, 384, exact), direct);
  // At l = 1.5 s both cost the same; below, the direct form is cheaper and is taken.
  EXPECT_EQ(newtonSchulzFlops(100, 150, fast), 20 * 1e4 * 150 + 10 * 1e6);
  EXPECT_EQ(newtonSchulzFlops(100, 100, fast), 30 * 1e6);
  EXPECT_LT(newtonSchulzFlops(100, 151, fast), 20 * 1e4 * 151 + 10 * 1e6);
  // Symmetric products of 1024 rows go by strips of 192, and of 128 where the inner dimension is
  // long: 5 strips and 64 rows, 8 strips.
  const double u = 1024;
  const double square = (192.0 * 192 * (1 + 2 + 3 + 4 + 5) + 64 * u) / (u * u), gram = 9.0 / 16;
  EXPECT_DOUBLE_EQ(newtonSchulzFlops(1024, 4096, fast),
                   u * u * u * (4 * (4 + 4 * gram) + 28 * square));
  EXPECT_DOUBLE_EQ(newtonSchulzFlops(1024, 4096, exact),
                   u * u * u * (4 * (10 + 10 * gram) + 10 * square));
}

std::string messageOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST_F(NewtonSchulz, RefusesBadConfigurationsWithTheValues) {
  const auto expect = [](const std::string& part, const std::function<void()>& call) {
    const std::string message = messageOf(call);
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  const auto you = coefficientSet("you", 5);
  expect("'quick'", [] { makeNewtonSchulzConfig("you", 5, "quick"); });
  expect("'me'", [] { makeNewtonSchulzConfig("me", 5, "fast"); });
  expect("9 were asked for", [] { makeNewtonSchulzConfig("you", 9, "fast"); });
  expect("[1, 4]", [&] { makeNewtonSchulzConfig(you, {0}); });
  expect("[5]", [&] { makeNewtonSchulzConfig(you, {5}); });
  expect("[3, 2]", [&] { makeNewtonSchulzConfig(you, {3, 2}); });
  expect("changes sign", [] { makeNewtonSchulzConfig({{1, -2, 0}}, {}); });
  expect("takes (m, n)",
         [] { newtonSchulz(at::ones({4}), makeNewtonSchulzConfig("you", 5, "fast")); });
}

TEST_F(NewtonSchulz, RefusesRestartsTooFarApartForThePrecision) {
  const NewtonSchulzConfig late = makeNewtonSchulzConfig(coefficientSet("polar_express", 5), {3});
  EXPECT_NO_THROW(checkNewtonSchulzConfig(late, at::kFloat));
  EXPECT_THROW(checkNewtonSchulzConfig(late, at::kHalf), c10::Error);
  const NewtonSchulzConfig fast = makeNewtonSchulzConfig("you", 5, "fast");
  EXPECT_NO_THROW(checkNewtonSchulzConfig(fast, at::kHalf));
  EXPECT_THROW(checkNewtonSchulzConfig(fast, at::kBFloat16), c10::Error);
  EXPECT_NO_THROW(
      checkNewtonSchulzConfig(makeNewtonSchulzConfig("you", 5, "accurate"), at::kBFloat16));
  for (const std::string& name : coefficientSetNames()) {
    for (int64_t steps = 1; steps <= (name == "you" || name == "cans" ? 5 : 30); ++steps) {
      EXPECT_NO_THROW(
          checkNewtonSchulzConfig(makeNewtonSchulzConfig(name, steps, "fast"), at::kHalf))
          << name << steps;
    }
  }
}

}  // namespace
}  // namespace dmuon::optim
