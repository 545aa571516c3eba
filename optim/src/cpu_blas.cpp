#include "cpu_blas.h"

// Weak: a torch whose libraries keep them to themselves leaves them null. Integers are passed as 64
// bits with the value in the low half, which is right for both widths that a BLAS may have been
// built with (on the little-endian machines that torch runs on).
extern "C" {
[[gnu::weak]] void sgemm_(const char*, const char*, const int64_t*, const int64_t*, const int64_t*,
                          const float*, const float*, const int64_t*, const float*, const int64_t*,
                          const float*, float*, const int64_t*);
[[gnu::weak]] void dgemm_(const char*, const char*, const int64_t*, const int64_t*, const int64_t*,
                          const double*, const double*, const int64_t*, const double*,
                          const int64_t*, const double*, double*, const int64_t*);
}

namespace dmuon::optim {
namespace {

// Column-major, as BLAS sees it: out^T = b^T a^T.
template <typename T, typename Gemm>
void call(Gemm&& blas, int64_t m, int64_t n, int64_t k, T alpha, const BlasOperand<T>& a,
          const BlasOperand<T>& b, T beta, T* out, int64_t out_stride) {
  const char a_form = a.transposed ? 'T' : 'N', b_form = b.transposed ? 'T' : 'N';
  blas(&b_form, &a_form, &n, &m, &k, &alpha, b.data, &b.stride, a.data, &a.stride, &beta, out,
       &out_stride);
}

}  // namespace

bool hasBlas() { return sgemm_ != nullptr && dgemm_ != nullptr; }

void gemm(int64_t m, int64_t n, int64_t k, float alpha, const BlasOperand<float>& a,
          const BlasOperand<float>& b, float beta, float* out, int64_t out_stride) {
  call(sgemm_, m, n, k, alpha, a, b, beta, out, out_stride);
}

void gemm(int64_t m, int64_t n, int64_t k, double alpha, const BlasOperand<double>& a,
          const BlasOperand<double>& b, double beta, double* out, int64_t out_stride) {
  call(dgemm_, m, n, k, alpha, a, b, beta, out, out_stride);
}

}  // namespace dmuon::optim
