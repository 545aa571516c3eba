// Every float format, every position of the bad element.
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <dmuon/optim/all_finite.h>
#include <gtest/gtest.h>

#include <limits>

namespace dmuon::optim {
namespace {

TEST(AllFinite, finds_one_bad_element_anywhere_in_every_dtype) {
  const double bad[] = {std::numeric_limits<double>::quiet_NaN(),
                        std::numeric_limits<double>::infinity(),
                        -std::numeric_limits<double>::infinity()};
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    auto tensor = at::randn({3, 3001}).to(dtype);
    EXPECT_TRUE(allFinite({tensor, at::Tensor(tensor.t())})) << dtype;
    for (const int64_t place : {int64_t{0}, int64_t{4095}, int64_t{4096}, tensor.numel() - 1}) {
      for (const double value : bad) {
        auto copy = tensor.clone();
        copy.view({-1})[place].fill_(value);
        EXPECT_FALSE(allFinite({tensor, copy})) << dtype << " at " << place << ": " << value;
        EXPECT_FALSE(allFinite({copy.t()})) << dtype << " at " << place << ": " << value;
      }
    }
  }
}

TEST(AllFinite, takes_the_largest_and_the_smallest_numbers_for_finite) {
  for (const double value : {3.4028234e38, -3.4028234e38, 1e-45, -0.0}) {
    EXPECT_TRUE(allFinite({at::full({5}, value, at::kFloat)})) << value;
  }
  EXPECT_TRUE(allFinite({at::full({5}, 65504.0, at::kHalf)}));
  EXPECT_TRUE(allFinite({at::full({5}, 1.7e308, at::kDouble)}));
  EXPECT_TRUE(allFinite({at::full({0, 4}, 1.0), at::full({}, 1.0)}));
  EXPECT_TRUE(allFinite({}));
}

TEST(AllFinite, refuses_integers) {
  EXPECT_THROW(allFinite({at::full({2}, 1, at::kLong)}), c10::TypeError);
}

}  // namespace
}  // namespace dmuon::optim
