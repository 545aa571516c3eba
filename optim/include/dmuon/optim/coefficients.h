// Coefficient sets of the orthogonalization, and their validation. Free of ATen.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dmuon::optim {

// One step x -> a x + b x^3 + c x^5.
struct Coefficients {
  double a = 0, b = 0, c = 0;
  bool operator==(const Coefficients&) const = default;
};

// Built-in sets for `steps` steps; see the source for where each comes from.
//   "keller"         the same triple at every step
//   "you"            five steps; more than five is an error
//   "polar_express"  eight steps, then (15/8, -10/8, 3/8) for ever; on the first five a safety
//                    factor s = 1.05: (a/s, b/s^3, c/s^5)
//   "cans"           five steps, with the same safety factor; more than five is an error
//   "deepseek"       "keller" for eight steps, then (2, -3/2, 1/2) for ever: ten steps are usual
// Fewer steps are the first ones of a set. Throws std::invalid_argument with the values for an
// unknown name, steps outside [1, kMaxSteps], or more steps than the set defines.
inline constexpr int64_t kMaxSteps = 100;
std::vector<Coefficients> coefficientSet(const std::string& name, int64_t steps);
std::vector<std::string> coefficientSetNames();

// Validation runs over singular values in (0, kMaxSigma]: a normalised matrix has none above 1,
// plus rounding. (polar_express with its safety factor of 1.05 diverges above 1.0547.)
inline constexpr double kMaxSigma = 1.05;
// No step may map a value above this; the next step would throw it further away.
inline constexpr double kMaxMappedValue = 2.0;

// Runs the map step by step over (0, kMaxSigma] and throws std::invalid_argument saying at which
// step (0-based) and singular value the result is not finite, not positive, or above
// kMaxMappedValue, so that a bad set fails when it is built, not in a training run. An empty list
// is refused as well.
void validateCoefficients(const std::vector<Coefficients>& steps);

// The composed map at one singular value.
double composedMap(const std::vector<Coefficients>& steps, double sigma);

}  // namespace dmuon::optim
