#include <dmuon/optim/coefficients.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>

namespace dmuon::optim {
namespace {

// K. Jordan et al., "Muon" (2024): steepest slope at zero for five equal steps.
constexpr Coefficients kKeller = {3.4445, -4.7750, 2.0315};

// Y. You (2024): five different steps, fitted to land in a narrow band around 1.
const std::vector<Coefficients> kYou = {{4.0848, -6.8946, 2.9270},
                                        {3.9505, -6.3029, 2.6377},
                                        {3.7418, -5.5913, 2.3037},
                                        {2.8769, -3.1427, 1.2046},
                                        {2.8366, -3.0525, 1.2012}};

// Amsel et al., "The Polar Express" (2025): minimax-optimal steps, before the safety factor.
const std::vector<Coefficients> kPolarExpress = {
    {8.28721201814563, -23.595886519098837, 17.300387312530933},
    {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
    {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
    {3.3184196573706015, -2.488488024314874, 0.51004894012372},
    {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
    {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
    {1.8750014808534479, -1.2500016453999487, 0.3750001645474248},
    {1.875, -1.25, 0.375}};
constexpr size_t kPolarExpressSafeSteps = 5;

// Grishina et al., "Accelerating Newton-Schulz Iteration for Orthogonalization via Chebyshev-type
// Polynomials" (2025).
const std::vector<Coefficients> kCans = {{8.4703, -25.1081, 18.6293},
                                         {4.1828, -3.1087, 0.5806},
                                         {3.9619, -2.9541, 0.5630},
                                         {3.2866, -2.4647, 0.5074},
                                         {2.2737, -1.6447, 0.4162}};

// DeepSeek's two stages: keller brings every singular value near 1, then this takes it there.
constexpr size_t kDeepSeekFirstStage = 8;
constexpr Coefficients kDeepSeekSecond = {2, -1.5, 0.5};

// Steps that are optimal on (0, 1] diverge for a singular value that rounding has put above 1.
Coefficients withSafety(const Coefficients& step) {
  constexpr double s = 1.05;
  return {step.a / s, step.b / (s * s * s), step.c / (s * s * s * s * s)};
}

std::vector<Coefficients> prefix(const std::string& name, const std::vector<Coefficients>& set,
                                 size_t steps) {
  if (steps > set.size()) {
    std::ostringstream out;
    out << "dmuon: coefficients '" << name << "' define " << set.size() << " steps, " << steps
        << " were asked for; use 'keller', 'polar_express' or 'deepseek', or give a list";
    throw std::invalid_argument(out.str());
  }
  return {set.begin(), set.begin() + static_cast<std::ptrdiff_t>(steps)};
}

std::vector<Coefficients> polarExpressSteps(size_t steps) {
  std::vector<Coefficients> result;
  for (size_t i = 0; i < steps; ++i) {
    Coefficients step = kPolarExpress[std::min(i, kPolarExpress.size() - 1)];
    result.push_back(i < kPolarExpressSafeSteps ? withSafety(step) : step);
  }
  return result;
}

std::vector<Coefficients> cansSteps(size_t steps) {
  std::vector<Coefficients> result = prefix("cans", kCans, steps);
  for (Coefficients& step : result) step = withSafety(step);
  return result;
}

std::vector<Coefficients> deepSeekSteps(size_t steps) {
  std::vector<Coefficients> result(steps, kKeller);
  for (size_t i = kDeepSeekFirstStage; i < steps; ++i) result[i] = kDeepSeekSecond;
  return result;
}

double apply(const Coefficients& step, double x) {
  const double y = x * x;
  return x * (step.a + y * (step.b + y * step.c));
}

// Log-spaced near zero, where the composed map is steep, and linear above, where it oscillates.
std::vector<double> validationGrid() {
  constexpr int kLogPoints = 600, kLinearPoints = 2100;
  std::vector<double> grid;
  for (int i = 0; i < kLogPoints; ++i) {
    grid.push_back(kMaxSigma * std::pow(10.0, -9.0 + 9.0 * i / kLogPoints));
  }
  for (int i = 1; i <= kLinearPoints; ++i) grid.push_back(kMaxSigma * i / kLinearPoints);
  return grid;
}

const char* complaint(double value) {
  if (!std::isfinite(value)) return "is not finite";
  if (value <= 0) return "changes sign";
  if (value > kMaxMappedValue) return "diverges";
  return nullptr;
}

}  // namespace

std::vector<std::string> coefficientSetNames() {
  return {"keller", "you", "polar_express", "cans", "deepseek"};
}

std::vector<Coefficients> coefficientSet(const std::string& name, int64_t steps) {
  if (steps < 1 || steps > kMaxSteps) {
    throw std::invalid_argument("dmuon: orthogonalization takes 1 to " + std::to_string(kMaxSteps) +
                                " steps, not " + std::to_string(steps));
  }
  const auto count = static_cast<size_t>(steps);
  if (name == "keller") return std::vector<Coefficients>(count, kKeller);
  if (name == "you") return prefix(name, kYou, count);
  if (name == "polar_express") return polarExpressSteps(count);
  if (name == "cans") return cansSteps(count);
  if (name == "deepseek") return deepSeekSteps(count);
  std::string known;
  for (const std::string& one : coefficientSetNames()) known += " '" + one + "'";
  throw std::invalid_argument("dmuon: unknown coefficients '" + name + "', known are" + known);
}

void validateCoefficients(const std::vector<Coefficients>& steps) {
  if (steps.empty()) throw std::invalid_argument("dmuon: an empty list of coefficients");
  for (const double sigma : validationGrid()) {
    double x = sigma;
    for (size_t i = 0; i < steps.size(); ++i) {
      x = apply(steps[i], x);
      const char* what = complaint(x);
      if (what == nullptr) continue;
      std::ostringstream out;
      out << "dmuon: the coefficients' map " << what << " at step " << i << " (a=" << steps[i].a
          << ", b=" << steps[i].b << ", c=" << steps[i].c << "): the singular value " << sigma
          << " becomes " << x << ", which must lie in (0, " << kMaxMappedValue << "]";
      throw std::invalid_argument(out.str());
    }
  }
}

double composedMap(const std::vector<Coefficients>& steps, double sigma) {
  double x = sigma;
  for (const Coefficients& step : steps) x = apply(step, x);
  return x;
}

}  // namespace dmuon::optim
