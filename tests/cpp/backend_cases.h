// Data, references and checks that the backend's test suites share.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include <dmuon/backend/owner_collectives.h>

#include "ranks.h"

namespace dmuon::testing {

using Tensors = std::vector<at::Tensor>;
using Shape = std::vector<int64_t>;

// A value in [-2, 2) with 20 significant bits that depends on all arguments.
inline double valueAt(int rank, int tensor, int64_t i) {
  uint64_t x = (static_cast<uint64_t>(rank) * 1000003u + tensor) * 0x9E3779B97F4A7C15ull + i;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return static_cast<double>((x ^ (x >> 31)) >> 44) / (1 << 18) - 2.0;
}

template <typename F>
void withType(at::ScalarType type, F&& f) {
  switch (type) {
    case at::kHalf:
      return f(at::Half{});
    case at::kBFloat16:
      return f(at::BFloat16{});
    case at::kFloat:
      return f(float{});
    case at::kDouble:
      return f(double{});
    case at::kLong:
      return f(int64_t{});
    case at::kByte:
      return f(uint8_t{});
    case at::kBool:
      return f(bool{});
    default:
      FAIL() << "no test data for " << type;
  }
}

// What `rank` holds in the tensor with this number.
inline at::Tensor makeData(int rank, int tensor, const Shape& shape, at::ScalarType type) {
  at::Tensor data = at::empty(shape, type);
  withType(type, [&](auto zero) {
    using T = decltype(zero);
    T* out = data.mutable_data_ptr<T>();
    for (int64_t i = 0; i < data.numel(); ++i) {
      const double value = valueAt(rank, tensor, i);
      out[i] = static_cast<T>(std::is_integral_v<T> ? (value + 2) * 50 : value);
    }
  });
  return data;
}

// The sum over ranks in rank order, element by element, in the accumulation type.
inline at::Tensor serialSum(const std::vector<int>& ranks, int tensor, const Shape& shape,
                            at::ScalarType type, at::ScalarType out_type, double divisor) {
  at::Tensor result = at::empty(shape, out_type);
  Tensors parts;
  for (int rank : ranks) parts.push_back(makeData(rank, tensor, shape, type));
  withType(type, [&](auto zero) {
    using T = decltype(zero);
    using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;
    withType(out_type, [&](auto out_zero) {
      using Out = decltype(out_zero);
      for (int64_t i = 0; i < result.numel(); ++i) {
        Acc sum = static_cast<Acc>(parts[0].const_data_ptr<T>()[i]);
        for (size_t k = 1; k < parts.size(); ++k)
          sum += static_cast<Acc>(parts[k].const_data_ptr<T>()[i]);
        if (divisor != 1.0) sum /= static_cast<Acc>(divisor);
        result.mutable_data_ptr<Out>()[i] = static_cast<Out>(sum);
      }
    });
  });
  return result;
}

inline std::vector<int> ranksUpTo(int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(rank);
  return ranks;
}

inline void expectSame(const at::Tensor& actual, const at::Tensor& expected,
                       const std::string& what) {
  ASSERT_TRUE(actual.defined()) << what;
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  EXPECT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(at::equal(actual, expected)) << what << ": values differ";
}

// The text of the exception that `run` throws, with every one of `parts` in it.
inline std::string expectError(const std::function<void()>& run,
                               const std::vector<std::string>& parts) {
  try {
    run();
  } catch (const std::exception& error) {
    const std::string text = error.what();
    for (const std::string& part : parts) {
      EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
    }
    return text;
  }
  ADD_FAILURE() << "no error, but one with '" << (parts.empty() ? "" : parts[0])
                << "' was expected";
  return "";
}

// One list of tensors: shapes, dtypes and owners of all of them.
struct Case {
  std::vector<Shape> shapes;
  std::vector<at::ScalarType> types;
  std::vector<int64_t> owners;

  Tensors dataOf(int rank) const {
    Tensors all;
    for (size_t i = 0; i < shapes.size(); ++i) {
      all.push_back(makeData(rank, static_cast<int>(i), shapes[i], types[i]));
    }
    return all;
  }
};

// A group works if this does.
inline void expectUsable(OwnerCollectives& group) {
  Tensors one{at::full({3}, group.rank() + 1.0, at::kFloat)};
  Tensors out{at::empty({3}, at::kFloat)};
  group.reduceToOwners(one, out, {group.size() - 1})->wait();
  if (group.rank() == group.size() - 1) {
    expectSame(out[0], at::full({3}, group.size() * (group.size() + 1) / 2.0, at::kFloat),
               "a reduce afterwards");
  }
}

}  // namespace dmuon::testing
