#include "reduce_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <type_traits>

namespace dmuon {
namespace {

// Small enough that the accumulators stay in the first-level cache while all blocks stream through.
constexpr int64_t kChunk = 1024;

template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T, typename Out>
void sum(const void* const* blocks, int count, int64_t numel, double divisor, void* out) {
  using Acc = Accumulator<T>;
  const Acc div = static_cast<Acc>(divisor);
  Acc acc[kChunk];
  for (int64_t begin = 0; begin < numel; begin += kChunk) {
    const int64_t n = std::min(kChunk, numel - begin);
    const T* first = static_cast<const T*>(blocks[0]) + begin;
    for (int64_t i = 0; i < n; ++i) acc[i] = static_cast<Acc>(first[i]);
    for (int k = 1; k < count; ++k) {
      const T* block = static_cast<const T*>(blocks[k]) + begin;
      for (int64_t i = 0; i < n; ++i) acc[i] += static_cast<Acc>(block[i]);
    }
    if (div != Acc(1)) {
      for (int64_t i = 0; i < n; ++i) acc[i] /= div;
    }
    // All blocks of this chunk have been read, so `out` may be one of them.
    Out* to = static_cast<Out*>(out) + begin;
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<Out>(acc[i]);
  }
}

// Calls f with a value of the C++ type that `type` names.
template <typename F>
void dispatch(c10::ScalarType type, F&& f) {
  switch (type) {
    case c10::ScalarType::Half:
      return f(c10::Half{});
    case c10::ScalarType::BFloat16:
      return f(c10::BFloat16{});
    case c10::ScalarType::Float:
      return f(float{});
    case c10::ScalarType::Double:
      return f(double{});
    default:
      TORCH_CHECK(false, "dmuon: a sum of ", type,
                  " is not supported: fp16, bf16, fp32 or fp64 is");
  }
}

template <typename Update>
void updateInPlace(c10::ScalarType type, void* data, int64_t numel, Update&& update) {
  dispatch(type, [&](auto zero) {
    using T = decltype(zero);
    using Acc = Accumulator<T>;
    T* values = static_cast<T*>(data);
    for (int64_t i = 0; i < numel; ++i) {
      values[i] = static_cast<T>(update(static_cast<Acc>(values[i])));
    }
  });
}

}  // namespace

bool isReducible(c10::ScalarType type) {
  return type == c10::ScalarType::Half || type == c10::ScalarType::BFloat16 ||
         type == c10::ScalarType::Float || type == c10::ScalarType::Double;
}

c10::ScalarType accumulationType(c10::ScalarType type) {
  return type == c10::ScalarType::Double ? c10::ScalarType::Double : c10::ScalarType::Float;
}

void sumBlocks(c10::ScalarType type, const void* const* blocks, int count, int64_t numel,
               double divisor, c10::ScalarType out_type, void* out) {
  TORCH_INTERNAL_ASSERT(count >= 1 && (out_type == type || out_type == accumulationType(type)));
  dispatch(type, [&](auto zero) {
    using T = decltype(zero);
    if (out_type == type) {
      sum<T, T>(blocks, count, numel, divisor, out);
    } else {
      sum<T, Accumulator<T>>(blocks, count, numel, divisor, out);
    }
  });
}

void multiplyInPlace(c10::ScalarType type, void* data, int64_t numel, double factor) {
  updateInPlace(type, data, numel,
                [factor](auto x) { return x * static_cast<decltype(x)>(factor); });
}

void divideInPlace(c10::ScalarType type, void* data, int64_t numel, double divisor) {
  updateInPlace(type, data, numel,
                [divisor](auto x) { return x / static_cast<decltype(x)>(divisor); });
}

}  // namespace dmuon
