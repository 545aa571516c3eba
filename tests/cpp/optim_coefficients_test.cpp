#include <dmuon/optim/coefficients.h>
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>

namespace dmuon::optim {
namespace {

std::string messageOf(const std::vector<Coefficients>& steps) {
  try {
    validateCoefficients(steps);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

void expectContains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

struct Band {
  double low = INFINITY, high = -INFINITY;
};

Band bandOf(const std::vector<Coefficients>& steps) {
  Band band;
  for (int i = 0; i <= 100000; ++i) {
    const double value = composedMap(steps, 0.01 + 0.99 * i / 100000);
    band.low = std::min(band.low, value);
    band.high = std::max(band.high, value);
  }
  return band;
}

double slopeAtZero(const std::vector<Coefficients>& steps) {
  return composedMap(steps, 1e-12) / 1e-12;
}

TEST(Coefficients, MapSingularValuesIntoTheirKnownBands) {
  const Band keller = bandOf(coefficientSet("keller", 5));
  EXPECT_NEAR(keller.low, 0.682, 1e-3);
  EXPECT_NEAR(keller.high, 1.134, 1e-3);
  const Band you = bandOf(coefficientSet("you", 5));
  EXPECT_NEAR(you.low, 0.978, 1e-3);
  EXPECT_NEAR(you.high, 1.032, 1e-3);
  const Band polar = bandOf(coefficientSet("polar_express", 5));
  EXPECT_NEAR(polar.low, 0.846, 1e-3);
  EXPECT_NEAR(polar.high, 1.124, 1e-3);
  const Band deepseek = bandOf(coefficientSet("deepseek", 10));
  EXPECT_NEAR(deepseek.low, 1.000, 1e-3);
  EXPECT_NEAR(deepseek.high, 1.001, 1e-3);
}

TEST(Coefficients, HaveTheirKnownSlopesAtZero) {
  EXPECT_NEAR(slopeAtZero(coefficientSet("keller", 5)), 485, 1);
  EXPECT_NEAR(slopeAtZero(coefficientSet("you", 5)), 493, 1);
  EXPECT_NEAR(slopeAtZero(coefficientSet("polar_express", 5)), 804, 1);
  // Of the five steps without their safety factor 1049.
  EXPECT_NEAR(slopeAtZero(coefficientSet("cans", 5)) * std::pow(1.05, 5), 1049, 1);
  EXPECT_NEAR(slopeAtZero(coefficientSet("deepseek", 10)) / 1000, 79, 1);
}

TEST(Coefficients, ComposedKellerMapHasItsClosedFormValues) {
  const auto keller = coefficientSet("keller", 5);
  EXPECT_NEAR(composedMap(keller, 1), 0.696436, 1e-6);
  EXPECT_NEAR(composedMap(keller, 1 / std::sqrt(2.0)), 1.108111, 1e-6);
  EXPECT_NEAR(composedMap(keller, 0.5), 0.765439, 1e-6);
  EXPECT_NEAR(composedMap(keller, 1 / std::sqrt(8.0)), 1.066968, 1e-6);
}

TEST(Coefficients, PolarExpressIsSafeOnFiveStepsAndEndsInItsLastTripleForEver) {
  const auto steps = coefficientSet("polar_express", 12);
  EXPECT_DOUBLE_EQ(steps[0].a, 8.28721201814563 / 1.05);
  EXPECT_DOUBLE_EQ(steps[4].c, 0.4188073119525673 / std::pow(1.05, 5));
  EXPECT_DOUBLE_EQ(steps[5].a, 1.891301407787398);
  for (size_t i = 7; i < steps.size(); ++i)
    EXPECT_EQ(steps[i], (Coefficients{1.875, -1.25, 0.375}));
}

TEST(Coefficients, EveryBuiltInSetOfEveryLengthIsValid) {
  for (int64_t steps = 1; steps <= kMaxSteps; ++steps) {
    EXPECT_NO_THROW(validateCoefficients(coefficientSet("keller", steps))) << steps;
    EXPECT_NO_THROW(validateCoefficients(coefficientSet("polar_express", steps))) << steps;
    EXPECT_NO_THROW(validateCoefficients(coefficientSet("deepseek", steps))) << steps;
    for (const char* name : {"you", "cans"}) {
      if (steps > 5) continue;
      EXPECT_NO_THROW(validateCoefficients(coefficientSet(name, steps))) << name << steps;
    }
  }
}

TEST(Coefficients, RefuseWhatCannotBeMeantWithTheValues) {
  const auto message = [](const std::string& name, int64_t steps) {
    try {
      coefficientSet(name, steps);
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  expectContains(message("you", 7), "'you' define 5 steps, 7 were asked for");
  expectContains(message("cans", 6), "'cans' define 5 steps, 6 were asked for");
  expectContains(message("keller", 0), "not 0");
  expectContains(message("keller", kMaxSteps + 1), "not 101");
  expectContains(message("kelvin", 5), "unknown coefficients 'kelvin'");
}

TEST(Coefficients, ValidationNamesStepSingularValueAndResult) {
  // Divergence in the second step: 2.9 x maps values near 1 above 2.
  const std::string diverging = messageOf({{1, 0, 0}, {2.9, 0, 0}});
  expectContains(diverging, "diverges at step 1");
  expectContains(diverging, "a=2.9");
  // A sign flip: x - 2 x^3 is negative above 1/sqrt(2).
  const std::string flipping = messageOf({{1, -2, 0}});
  expectContains(flipping, "changes sign at step 0");
  expectContains(flipping, "becomes -");
  expectContains(messageOf({{NAN, 0, 0}}), "is not finite at step 0");
  expectContains(messageOf({}), "empty list");
}

TEST(Coefficients, ASetThatIsOnlySafeUpToOneIsRefused) {
  // CANS without a safety factor: fine on [0, 1], divergent just above.
  const std::vector<Coefficients> cans = {{8.4703, -25.1081, 18.6293},
                                          {4.1828, -3.1087, 0.5806},
                                          {3.9619, -2.9541, 0.5630},
                                          {3.2866, -2.4647, 0.5074},
                                          {2.2737, -1.6447, 0.4162}};
  expectContains(messageOf(cans), "diverges");
  std::vector<Coefficients> safe = cans;
  for (Coefficients& step : safe) {
    step.a /= 1.05, step.b /= std::pow(1.05, 3), step.c /= std::pow(1.05, 5);
  }
  EXPECT_EQ(messageOf(safe), "");
}

}  // namespace
}  // namespace dmuon::optim
