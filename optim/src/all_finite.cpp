#include <dmuon/optim/all_finite.h>

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <utility>

namespace dmuon::optim {
namespace {

// A float is finite unless all bits of its exponent are set. Looks at a block at a time: the inner
// loop is branchless, for the vectoriser.
template <typename Bits, Bits kExponent>
bool finite(const void* data, int64_t count) {
  constexpr int64_t kBlock = 4096;
  const auto* values = static_cast<const Bits*>(data);
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    Bits bad = 0;
    for (int64_t i = begin; i < end; ++i) bad |= (values[i] & kExponent) == kExponent ? 1 : 0;
    if (bad) return false;
  }
  return true;
}

bool finiteOnCpu(const at::Tensor& tensor) {
  const at::Tensor t = tensor.contiguous();
  switch (t.scalar_type()) {
    case at::kFloat:
      return finite<uint32_t, 0x7f800000>(t.const_data_ptr(), t.numel());
    case at::kDouble:
      return finite<uint64_t, 0x7ff0000000000000>(t.const_data_ptr(), t.numel());
    case at::kBFloat16:
      return finite<uint16_t, 0x7f80>(t.const_data_ptr(), t.numel());
    case at::kHalf:
      return finite<uint16_t, 0x7c00>(t.const_data_ptr(), t.numel());
    default:
      TORCH_CHECK_TYPE(false, "dmuon: allFinite takes floating-point tensors, not ",
                       t.scalar_type());
  }
}

}  // namespace

bool allFinite(const std::vector<at::Tensor>& tensors) {
  std::map<std::pair<int, at::ScalarType>, std::vector<at::Tensor>> elsewhere;
  for (const auto& tensor : tensors) {
    if (!tensor.is_cpu()) {
      elsewhere[{tensor.get_device(), tensor.scalar_type()}].push_back(tensor);
    } else if (!finiteOnCpu(tensor)) {
      return false;
    }
  }
  std::map<int, at::Tensor> found;  // by device
  for (auto& [place, list] : elsewhere) {
    const auto options = list[0].options().dtype(at::kFloat);
    auto& flag = found[place.first];
    if (!flag.defined()) flag = at::zeros({1}, options);
    // Times one: torch's own fused check, which is made for gradient scaling.
    at::_amp_foreach_non_finite_check_and_unscale_(list, flag, at::full({1}, 1.0, options));
  }
  return std::all_of(found.begin(), found.end(),
                     [](const auto& entry) { return entry.second.template item<float>() == 0.0F; });
}

}  // namespace dmuon::optim
