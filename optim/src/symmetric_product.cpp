#include "symmetric_product.h"

#include <ATen/Parallel.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <dmuon/optim/newton_schulz.h>

#include "cpu_blas.h"
#include "newton_schulz_cost.h"

namespace dmuon::optim {
namespace {

constexpr auto kDevices = static_cast<size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES);

struct Kernels {
  std::mutex mutex;
  std::array<std::shared_ptr<const SymmetricProduct>, kDevices> by_device;
  std::atomic<int> count{0};
};

Kernels& kernels() {
  static Kernels all;
  return all;
}

std::shared_ptr<const SymmetricProduct> kernelOf(c10::DeviceType device) {
  Kernels& all = kernels();
  if (all.count == 0) return nullptr;
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.by_device[static_cast<size_t>(device)];
}

void product(at::Tensor out, double beta, const at::Tensor& c, double alpha, const at::Tensor& a,
             const at::Tensor& b) {
  if (beta == 0 && alpha == 1) {
    a.dim() == 2 ? at::mm_out(out, a, b) : at::bmm_out(out, a, b);
  } else {
    const at::Tensor& added = beta == 0 ? out : c;
    a.dim() == 2 ? at::addmm_out(out, added, a, b, beta, alpha)
                 : at::baddbmm_out(out, added, a, b, beta, alpha);
  }
}

// As the BLAS takes it; nothing for a matrix without a dimension whose elements are adjacent.
template <typename T>
std::optional<BlasOperand<T>> operandOf(const at::Tensor& m) {
  const auto* const data = m.const_data_ptr<T>();
  if (m.stride(1) == 1 && m.stride(0) >= m.size(1)) return BlasOperand<T>{data, m.stride(0), false};
  if (m.stride(0) == 1 && m.stride(1) >= m.size(0)) return BlasOperand<T>{data, m.stride(1), true};
  return std::nullopt;
}

template <typename T>
struct Strips {
  int64_t s, k, rows;  // rows of a strip
  BlasOperand<T> a, b;
  const T* c;  // null: not read
  T beta, alpha;
  T* out;

  int64_t count() const { return (s + rows - 1) / rows; }

  void compute(int64_t strip) const {
    const int64_t begin = strip * rows, end = std::min(s, begin + rows);
    for (int64_t i = begin; c != nullptr && i < end; ++i) {
      std::copy_n(c + i * s, end, out + i * s);
    }
    gemm(end - begin, end, k, alpha, a.rows(begin), b, c == nullptr ? T(0) : beta, out + begin * s,
         s);
    mirror(begin, end);
  }

  // Copies what the strip has left of its diagonal block to above the diagonal, tile by tile.
  void mirror(int64_t begin, int64_t end) const {
    constexpr int64_t kTile = 16;
    for (int64_t column = 0; column < begin; column += kTile) {
      const int64_t last_column = std::min(begin, column + kTile);
      for (int64_t row = begin; row < end; row += kTile) {
        const int64_t last_row = std::min(end, row + kTile);
        for (int64_t j = column; j < last_column; ++j) {
          for (int64_t i = row; i < last_row; ++i) out[j * s + i] = out[i * s + j];
        }
      }
    }
  }
};

// Returns false, having done nothing, for what it does not take.
template <typename T>
bool inStrips(at::Tensor& out, double beta, const at::Tensor& c, double alpha, const at::Tensor& a,
              const at::Tensor& b) {
  const int64_t s = a.size(0), k = a.size(1);
  const int64_t rows = stripRows(s, k);
  const auto left = operandOf<T>(a), right = operandOf<T>(b);
  const bool reads_c = beta != 0;
  if (rows >= s || k == 0 || !left || !right || !out.is_contiguous() ||
      (reads_c && !c.is_contiguous()) || std::max(s, k) > std::numeric_limits<int32_t>::max() ||
      std::max(left->stride, right->stride) > std::numeric_limits<int32_t>::max()) {
    return false;
  }
  const Strips<T> strips{s,
                         k,
                         rows,
                         *left,
                         *right,
                         reads_c ? c.const_data_ptr<T>() : nullptr,
                         static_cast<T>(beta),
                         static_cast<T>(alpha),
                         out.mutable_data_ptr<T>()};
  const int64_t count = strips.count();
  // The first and the last strip together are as long as any two like them. Inside a parallel
  // region the BLAS uses one thread, so the bits do not depend on how many there are.
  at::parallel_for(0, (count + 1) / 2, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      strips.compute(i);
      if (count - 1 - i != i) strips.compute(count - 1 - i);
    }
  });
  return true;
}

}  // namespace

void setSymmetricProduct(c10::DeviceType device, SymmetricProduct product) {
  Kernels& all = kernels();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto& place = all.by_device[static_cast<size_t>(device)];
  all.count += (product ? 1 : 0) - (place ? 1 : 0);
  place = product ? std::make_shared<const SymmetricProduct>(std::move(product)) : nullptr;
}

void symmetricProduct(at::Tensor& out, double beta, const at::Tensor& c, double alpha,
                      const at::Tensor& a, const at::Tensor& b) {
  if (const auto kernel = kernelOf(out.device().type()))
    return (*kernel)(out, beta, c, alpha, a, b);
  builtInSymmetricProduct(out, beta, c, alpha, a, b);
}

void builtInSymmetricProduct(at::Tensor& out, double beta, const at::Tensor& c, double alpha,
                             const at::Tensor& a, const at::Tensor& b) {
  if (out.is_cpu() && out.dim() == 2 && hasBlas()) {
    const auto type = out.scalar_type();
    if (type == at::kFloat && inStrips<float>(out, beta, c, alpha, a, b)) return;
    if (type == at::kDouble && inStrips<double>(out, beta, c, alpha, a, b)) return;
  }
  product(out, beta, c, alpha, a, b);
}

}  // namespace dmuon::optim
