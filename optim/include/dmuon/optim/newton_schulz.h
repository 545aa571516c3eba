// Orthogonalization of whole matrices by odd polynomial iteration (Newton-Schulz and kin).
//
// With s = min(m, n), l = max(m, n) and X = U S V^T scaled to |X|_F = 1, T steps of
// p_t(x) = a x + b x^3 + c x^5 are composed; the result is U (p_T o ... o p_1)(S) V^T.
// Two forms compute the same thing:
//   direct   every step multiplies the s x l matrix       20 s^2 l + 10 s^3 FLOPs for T = 5
//   Gram     steps are taken on R = X X^T and collected in Q; X <- Q X only at a restart and at the
//            end                                           8 s^2 l + 28 s^3 with one restart, T = 5
// The direct form is the Gram form with a restart before every step, so one engine does both; the
// cheaper one by FLOPs is taken per shape. All s x s results are symmetric (they are polynomials of
// one R), and so is X X^T: in fp32 and fp64 on the CPU they cost 9/16 to 3/4 of a full product from
// s = 128 on. Free of torch.distributed; thread-safe.
//
// After: Jordan et al., "Muon" (2024) for the iteration; Su et al. / Dao's Gram Newton-Schulz for
// the Gram form; Amsel et al., "The Polar Express" (2025) and Y. You for the coefficients.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <dmuon/optim/coefficients.h>

namespace dmuon::optim {

enum class NewtonSchulzForm { kAuto, kDirect, kGram };

// A description of one orthogonalization; build it with makeNewtonSchulzConfig, which checks it.
struct NewtonSchulzConfig {
  std::vector<Coefficients> steps;  // one per step, T >= 1
  std::vector<int64_t> restarts;    // Gram form: steps (0-based, > 0) before which X is rebuilt
  NewtonSchulzForm form = NewtonSchulzForm::kAuto;
  // Type of the iteration. Unset: fp32 on CPU (fp64 for fp64 input), fp16 on CUDA. kFloat means
  // "no narrower than the input": fp64 input is iterated in fp64.
  std::optional<at::ScalarType> dtype;
};

// coefficients: "keller", "you", ... (see coefficients.h); steps: as many as asked.
// mode: "fast"      Gram, a restart before step 2 and then every third ({2} for T = 5)
//       "accurate"  Gram, a restart before step 1 and then every second ({1, 3} for T = 5)
//       "exact"     direct form in fp32 (fp64 for fp64 input)
// Throws c10::Error with the values for unknown names, steps < 1, or a set that cannot be extended
// to that many steps.
NewtonSchulzConfig makeNewtonSchulzConfig(const std::string& coefficients, int64_t steps,
                                          const std::string& mode);

// The same for a list of one's own; it is validated (coefficients.h). Restarts must be strictly
// increasing and in [1, T - 1], and pass checkNewtonSchulzConfig for fp32.
NewtonSchulzConfig makeNewtonSchulzConfig(std::vector<Coefficients> steps,
                                          std::vector<int64_t> restarts);

// Throws c10::Error if steps or restarts are out of order, or if the Gram form loses its footing
// when iterated in `dtype`: rounding gives R = X X^T eigenvalues down to about -d (d = 5e-4 in
// fp16, 4e-3 in bf16), which every step of a segment multiplies by about a^2. Refused is what grows
// beyond 1/4 before it is next used: then the list needs an earlier restart. newtonSchulz checks
// this itself.
void checkNewtonSchulzConfig(const NewtonSchulzConfig& config, at::ScalarType dtype);

// g: (m, n) or (batch, m, n), fp16, bf16, fp32 or fp64, any strides, any finite scale. Returns a
// new contiguous tensor of the same shape in the iteration's dtype. A zero matrix gives zeros; a
// non-finite one gives NaN throughout that matrix. The norm is accumulated in fp64 and never under-
// or overflows. On CUDA nothing waits for the device.
at::Tensor newtonSchulz(const at::Tensor& g, const NewtonSchulzConfig& config);

// Memory that one orthogonalization after the other uses, so that only the largest of its kind
// allocates: at most twice the input and four matrices (s, s), in the iteration's dtype.
class NewtonSchulzWorkspace {
 public:
  // A contiguous tensor with undefined contents. What was taken at the same place before is
  // invalid.
  at::Tensor take(size_t place, at::IntArrayRef sizes, const at::TensorOptions& options);
  void release() { places_.clear(); }

 private:
  std::vector<at::Tensor> places_;
};

// The same; the result lies in the workspace and is valid until its next use. One thread at a time.
at::Tensor newtonSchulz(const at::Tensor& g, const NewtonSchulzConfig& config,
                        NewtonSchulzWorkspace& workspace);

// out = beta c + alpha a b, where the result is symmetric; out, c: (s, s), a: (s, k), b: (k, s), or
// batches of them. out is none of the others; with beta = 0, c must not be read.
using SymmetricProduct =
    std::function<void(at::Tensor& out, double beta, const at::Tensor& c, double alpha,
                       const at::Tensor& a, const at::Tensor& b)>;

// Puts a kernel for symmetric products in the place of dmuon's own on devices of that type: a place
// for a GPU kernel that computes one triangle. An empty function takes it away. Thread-safe.
void setSymmetricProduct(c10::DeviceType device, SymmetricProduct product);

// FLOPs of one (m, n) matrix with the form that newtonSchulz would take; a multiply-add counts 2.
// Ties go to the direct form.
double newtonSchulzFlops(int64_t m, int64_t n, const NewtonSchulzConfig& config);

}  // namespace dmuon::optim
