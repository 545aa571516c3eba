#include "symmetric_product.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include <dmuon/optim/newton_schulz.h>

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

// Rows and columns [begin, end) of the result.
struct Blocks {
  at::Tensor& out;
  double beta;
  const at::Tensor& c;
  double alpha;
  const at::Tensor& a;
  const at::Tensor& b;

  at::Tensor part(const at::Tensor& m, int64_t row, int64_t rows, int64_t column,
                  int64_t columns) const {
    return m.narrow(0, row, rows).narrow(1, column, columns);
  }
  void block(int64_t row, int64_t rows, int64_t column, int64_t columns) const {
    product(part(out, row, rows, column, columns), beta,
            beta == 0 ? c : part(c, row, rows, column, columns), alpha, a.narrow(0, row, rows),
            b.narrow(1, column, columns));
  }
  void halve(int64_t begin, int64_t end, int halvings) const {
    if (halvings == 0) return block(begin, end - begin, begin, end - begin);
    // A multiple of 16 keeps the blocks' rows aligned to lines of the cache.
    const int64_t middle = begin + (end - begin) / 32 * 16;
    halve(begin, middle, halvings - 1);
    halve(middle, end, halvings - 1);
    block(middle, end - middle, begin, middle - begin);
    part(out, begin, middle - begin, middle, end - middle)
        .copy_(part(out, middle, end - middle, begin, middle - begin).t());
  }
};

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
  blockedSymmetricProduct(out, beta, c, alpha, a, b);
}

void blockedSymmetricProduct(at::Tensor& out, double beta, const at::Tensor& c, double alpha,
                             const at::Tensor& a, const at::Tensor& b) {
  const int64_t s = out.size(-1);
  const int halvings = out.is_cpu() && out.dim() == 2 ? halvingsOf(s) : 0;
  if (halvings == 0) return product(out, beta, c, alpha, a, b);
  Blocks{out, beta, c, alpha, a, b}.halve(0, s, halvings);
}

}  // namespace dmuon::optim
