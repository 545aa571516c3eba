#include "reduce_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace dmuon {
namespace {

// Small enough that the accumulators stay in the first-level cache while all blocks stream through.
constexpr int64_t kChunk = 1024;

template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

// The loops below exist twice: for every processor of the architecture, and with the wider vectors
// and fp16 conversions that all but very old ones have. Both give the same bits: only additions,
// one division and correctly rounded conversions.
#if defined(__x86_64__) && defined(__GNUC__)
#define DMUON_WIDE __attribute__((target("avx2,f16c")))

DMUON_WIDE void load(const c10::Half* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(half));
  }
  for (; i < n; ++i) to[i] = from[i];
}

DMUON_WIDE void add(const c10::Half* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_add_ps(_mm256_loadu_ps(to + i), _mm256_cvtph_ps(half)));
  }
  for (; i < n; ++i) to[i] += static_cast<float>(from[i]);
}

DMUON_WIDE void store(const float* from, c10::Half* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 values = _mm256_loadu_ps(from + i);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < n; ++i) to[i] = from[i];
}

bool hasWide() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }
#else
#define DMUON_WIDE

void load(const c10::Half*, float*, int64_t) {}
void add(const c10::Half*, float*, int64_t) {}
void store(const float*, c10::Half*, int64_t) {}
bool hasWide() { return false; }
#endif

// All blocks at once, in registers: for few blocks that need no conversion. `out` may be one of
// them, so the compiler is told that the elements do not depend on each other.
template <int kCount, bool kDivides, typename T>
[[gnu::always_inline]] inline void sumFew(const void* const* blocks, int64_t numel, T divisor,
                                          void* out) {
  const T* block[kCount];
  for (int k = 0; k < kCount; ++k) block[k] = static_cast<const T*>(blocks[k]);
  T* const to = static_cast<T*>(out);
  const T factor = T(1) / divisor;
#pragma GCC ivdep
  for (int64_t i = 0; i < numel; ++i) {
    T total = block[0][i];
    for (int k = 1; k < kCount; ++k) total += block[k][i];
    to[i] = kDivides ? total / divisor : total * factor;
  }
}

// Whether x / divisor and x * (1 / divisor) have the same bits for every x.
template <typename T>
bool isPowerOfTwo(T divisor) {
  int exponent = 0;
  return std::frexp(divisor, &exponent) == T(0.5) && std::isnormal(T(1) / divisor);
}

template <typename T, bool kDivides>
[[gnu::always_inline]] inline bool sumFewBlocks(const void* const* blocks, int count, int64_t numel,
                                                T divisor, void* out) {
  switch (count) {
    case 2:
      return sumFew<2, kDivides>(blocks, numel, divisor, out), true;
    case 3:
      return sumFew<3, kDivides>(blocks, numel, divisor, out), true;
    case 4:
      return sumFew<4, kDivides>(blocks, numel, divisor, out), true;
    case 8:
      return sumFew<8, kDivides>(blocks, numel, divisor, out), true;
    default:
      return false;
  }
}

template <typename T, typename Out, bool kWide>
[[gnu::always_inline]] inline void sumBody(const void* const* blocks, int count, int64_t numel,
                                           double divisor, void* out) {
  constexpr bool kWideHalf = kWide && std::is_same_v<T, c10::Half>;
  using Acc = Accumulator<T>;
  const Acc div = static_cast<Acc>(divisor);
  if constexpr (std::is_same_v<T, Acc> && std::is_same_v<Out, T>) {
    const bool done = isPowerOfTwo(div) ? sumFewBlocks<T, false>(blocks, count, numel, div, out)
                                        : sumFewBlocks<T, true>(blocks, count, numel, div, out);
    if (done) return;
  }
  Acc acc[kChunk];
  for (int64_t begin = 0; begin < numel; begin += kChunk) {
    const int64_t n = std::min(kChunk, numel - begin);
    const T* first = static_cast<const T*>(blocks[0]) + begin;
    if constexpr (kWideHalf) {
      load(first, acc, n);
    } else {
      for (int64_t i = 0; i < n; ++i) acc[i] = static_cast<Acc>(first[i]);
    }
    for (int k = 1; k < count; ++k) {
      const T* block = static_cast<const T*>(blocks[k]) + begin;
      if constexpr (kWideHalf) {
        add(block, acc, n);
      } else {
        for (int64_t i = 0; i < n; ++i) acc[i] += static_cast<Acc>(block[i]);
      }
    }
    if (div != Acc(1)) {
      for (int64_t i = 0; i < n; ++i) acc[i] /= div;
    }
    // All blocks of this chunk have been read, so `out` may be one of them.
    Out* to = static_cast<Out*>(out) + begin;
    if constexpr (kWideHalf && std::is_same_v<Out, c10::Half>) {
      store(acc, to, n);
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = static_cast<Out>(acc[i]);
    }
  }
}

template <typename T, typename Out>
void sum(const void* const* blocks, int count, int64_t numel, double divisor, void* out) {
  sumBody<T, Out, false>(blocks, count, numel, divisor, out);
}

template <typename T, typename Out>
DMUON_WIDE void sumWide(const void* const* blocks, int count, int64_t numel, double divisor,
                        void* out) {
  sumBody<T, Out, true>(blocks, count, numel, divisor, out);
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

bool canSumWide() {
  static const bool can = hasWide();
  return can;
}

void sumBlocks(c10::ScalarType type, const void* const* blocks, int count, int64_t numel,
               double divisor, c10::ScalarType out_type, void* out, bool wide) {
  TORCH_INTERNAL_ASSERT(count >= 1 && (out_type == type || out_type == accumulationType(type)));
  dispatch(type, [&](auto zero) {
    using T = decltype(zero);
    using Acc = Accumulator<T>;
    if (out_type == type) {
      (wide ? sumWide<T, T> : sum<T, T>)(blocks, count, numel, divisor, out);
    } else {
      (wide ? sumWide<T, Acc> : sum<T, Acc>)(blocks, count, numel, divisor, out);
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
