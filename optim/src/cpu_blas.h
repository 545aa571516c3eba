// The BLAS that torch brings, without ATen's overhead per call: for products cut into many small
// ones. Free of ATen.
#pragma once

#include <cstdint>

namespace dmuon::optim {

// A matrix in memory: element (i, j) is data[i * stride + j], or data[j * stride + i] if
// transposed.
template <typename T>
struct BlasOperand {
  const T* data = nullptr;
  int64_t stride = 0;
  bool transposed = false;

  BlasOperand rows(int64_t first) const {
    return {data + (transposed ? first : first * stride), stride, transposed};
  }
};

// Whether sgemm and dgemm are there: torch's libraries for x86-64 and AArch64 export them.
bool hasBlas();

// out = beta out + alpha a b; a: (m, k), b: (k, n), out: (m, n), row-major with out_stride elements
// from row to row; m, n, k >= 1. Sizes and strides must fit an int32. Needs hasBlas().
void gemm(int64_t m, int64_t n, int64_t k, float alpha, const BlasOperand<float>& a,
          const BlasOperand<float>& b, float beta, float* out, int64_t out_stride);
void gemm(int64_t m, int64_t n, int64_t k, double alpha, const BlasOperand<double>& a,
          const BlasOperand<double>& b, double beta, double* out, int64_t out_stride);

}  // namespace dmuon::optim
