// Independent fp64 references for the tests of layer 2: singular values instead of iterations, and
// the update rules written out as formulas.
#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include <dmuon/optim/coefficients.h>
#include <dmuon/optim/muon_update.h>

namespace dmuon::optim::testing {

// A / |A|_F = U S V^T.
struct Decomposition {
  at::Tensor u, s, vh;

  explicit Decomposition(const at::Tensor& a) {
    const at::Tensor wide = a.to(at::kDouble);
    const double norm = wide.square().sum().sqrt().item<double>();
    std::tie(u, s, vh) = at::linalg_svd(norm > 0 ? wide / norm : wide, /*full_matrices=*/false);
  }

  // U p(S) V^T with the composed map p.
  at::Tensor orthogonal(const std::vector<Coefficients>& steps) const {
    const at::Tensor mapped = s.clone();
    for (int64_t i = 0; i < s.numel(); ++i) mapped[i] = composedMap(steps, s[i].item<double>());
    return u.matmul(mapped.unsqueeze(1) * vh);
  }
};

inline at::Tensor referenceOrthogonal(const at::Tensor& a, const std::vector<Coefficients>& steps) {
  return Decomposition(a).orthogonal(steps);
}

inline double relativeError(const at::Tensor& value, const at::Tensor& reference) {
  const at::Tensor wide = reference.to(at::kDouble);
  const double error = (value.to(at::kDouble) - wide).norm().item<double>();
  const double norm = wide.norm().item<double>();
  return norm > 0 ? error / norm : error;
}

// One Muon step on a stack (E, m, n) or matrix (m, n), all in fp64.
inline void referenceMuonStep(at::Tensor& w, const at::Tensor& gradient, at::Tensor& buf,
                              const MuonHyper& hyper, double ratio) {
  const at::Tensor g = gradient.to(at::kDouble);
  buf = buf + (1 - hyper.momentum) * (g - buf);
  const at::Tensor u = hyper.nesterov ? g + hyper.momentum * (buf - g) : buf;
  at::Tensor x;
  if (u.dim() == 3) {
    std::vector<at::Tensor> slices;
    for (int64_t i = 0; i < u.size(0); ++i) {
      slices.push_back(referenceOrthogonal(u[i], hyper.newton_schulz.steps));
    }
    x = at::stack(slices);
  } else {
    x = referenceOrthogonal(u, hyper.newton_schulz.steps);
  }
  w = w * (1 - hyper.lr * hyper.weight_decay) - hyper.lr * ratio * x;
}

// An (m, n) matrix with the given singular values (as many as min(m, n)) and random singular
// vectors.
inline at::Tensor matrixWithSpectrum(int64_t m, int64_t n, const at::Tensor& spectrum) {
  const int64_t s = std::min(m, n);
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const at::Tensor u = std::get<0>(at::linalg_qr(at::randn({m, s}, options)));
  const at::Tensor v = std::get<0>(at::linalg_qr(at::randn({n, s}, options)));
  return u.matmul(spectrum.unsqueeze(1) * v.t());
}

}  // namespace dmuon::optim::testing
