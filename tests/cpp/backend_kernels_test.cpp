// The parts of the backend that neither communicate nor start threads.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "../../backend/src/agreement.h"
#include "../../backend/src/block_layout.h"
#include "../../backend/src/reduce_kernels.h"

namespace dmuon {
namespace {

template <typename T>
struct TypeOf;
template <>
struct TypeOf<c10::Half> {
  static constexpr auto value = c10::ScalarType::Half;
};
template <>
struct TypeOf<c10::BFloat16> {
  static constexpr auto value = c10::ScalarType::BFloat16;
};
template <>
struct TypeOf<float> {
  static constexpr auto value = c10::ScalarType::Float;
};
template <>
struct TypeOf<double> {
  static constexpr auto value = c10::ScalarType::Double;
};

template <typename T>
class SumBlocks : public ::testing::Test {};
using Reducible = ::testing::Types<c10::Half, c10::BFloat16, float, double>;
TYPED_TEST_SUITE(SumBlocks, Reducible);

// Sizes around the kernel's chunk of 1024 and none at all.
TYPED_TEST(SumBlocks, addsInBlockOrderAndRoundsOnce) {
  using T = TypeParam;
  using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  for (int64_t numel : {0, 1, 7, 1023, 1024, 1025, 5000}) {
    for (int count : {1, 2, 3, 4, 5, 8}) {
      std::vector<std::vector<T>> blocks(count, std::vector<T>(numel));
      for (auto& block : blocks) {
        for (T& x : block) x = static_cast<T>(static_cast<float>(normal(random) * 100));
      }
      std::vector<const void*> pointers;
      for (auto& block : blocks) pointers.push_back(block.data());
      std::vector<T> rounded(numel);
      std::vector<Acc> wide(numel);
      const auto type = TypeOf<T>::value;
      for (double divisor : {1.0, 3.0, 4.0}) {
        sumBlocks(type, pointers.data(), count, numel, divisor, type, rounded.data());
        sumBlocks(type, pointers.data(), count, numel, divisor, accumulationType(type),
                  wide.data());
        for (int64_t i = 0; i < numel; ++i) {
          Acc sum = static_cast<Acc>(blocks[0][i]);
          for (int k = 1; k < count; ++k) sum += static_cast<Acc>(blocks[k][i]);
          sum /= static_cast<Acc>(divisor);
          ASSERT_EQ(wide[i], sum) << numel << " elements, " << count << " blocks, at " << i;
          ASSERT_EQ(static_cast<double>(rounded[i]), static_cast<double>(static_cast<T>(sum)))
              << numel << " elements, " << count << " blocks, at " << i;
        }
      }
    }
  }
}

// Over random bits: subnormals, infinities, what overflows, and NaNs (whose bits may differ).
TYPED_TEST(SumBlocks, bothLoopsGiveTheSameBits) {
  using T = TypeParam;
  using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;
  if (!canSumWide()) GTEST_SKIP() << "this processor has no AVX2 and F16C";
  constexpr int64_t kNumel = 70001;
  std::mt19937_64 random(7);
  std::vector<std::vector<T>> blocks(3, std::vector<T>(kNumel));
  for (auto& block : blocks) {
    for (T& value : block) {
      const uint64_t bits = random();
      std::memcpy(&value, &bits, sizeof(T));
    }
  }
  const void* pointers[] = {blocks[0].data(), blocks[1].data(), blocks[2].data()};
  const auto type = TypeOf<T>::value;
  const auto compare = [&](auto zero, c10::ScalarType out_type, int count, double divisor) {
    using Out = decltype(zero);
    std::vector<Out> narrow(kNumel), wide(kNumel);
    sumBlocks(type, pointers, count, kNumel, divisor, out_type, narrow.data(), false);
    sumBlocks(type, pointers, count, kNumel, divisor, out_type, wide.data(), true);
    for (int64_t i = 0; i < kNumel; ++i) {
      Acc sum = static_cast<Acc>(blocks[0][i]);
      for (int k = 1; k < count; ++k) sum += static_cast<Acc>(blocks[k][i]);
      const Out expected = static_cast<Out>(sum / static_cast<Acc>(divisor));
      for (const Out value : {narrow[i], wide[i]}) {
        if (std::isnan(static_cast<double>(expected)) && std::isnan(static_cast<double>(value))) {
          continue;
        }
        ASSERT_EQ(std::memcmp(&value, &expected, sizeof(Out)), 0)
            << i << ": " << static_cast<double>(value) << " " << static_cast<double>(expected);
      }
    }
  };
  for (int count : {1, 2, 3}) {
    for (double divisor : {3.0, 8.0, 0x1p-120}) {
      compare(T{}, type, count, divisor);
      compare(Acc{}, accumulationType(type), count, divisor);
    }
  }
}

TYPED_TEST(SumBlocks, mayWriteOverOneOfItsBlocks) {
  using T = TypeParam;
  const int64_t numel = 3000;
  std::vector<T> a(numel), b(numel);
  for (int64_t i = 0; i < numel; ++i) {
    a[i] = static_cast<T>(static_cast<float>(i % 7));
    b[i] = static_cast<T>(static_cast<float>(i % 5));
  }
  const void* pointers[] = {a.data(), b.data()};
  const auto type = TypeOf<T>::value;
  sumBlocks(type, pointers, 2, numel, 1.0, type, b.data());
  for (int64_t i = 0; i < numel; ++i) {
    ASSERT_EQ(static_cast<float>(b[i]), static_cast<float>(i % 7 + i % 5));
  }
}

TYPED_TEST(SumBlocks, scalingInPlaceIsOneOperationInTheAccumulationType) {
  using T = TypeParam;
  using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;
  std::vector<T> values(100);
  for (int i = 0; i < 100; ++i) values[i] = static_cast<T>(static_cast<float>(i) / 7);
  std::vector<T> multiplied = values, divided = values;
  const auto type = TypeOf<T>::value;
  multiplyInPlace(type, multiplied.data(), 100, 0.3);
  divideInPlace(type, divided.data(), 100, 3.0);
  for (int i = 0; i < 100; ++i) {
    const Acc x = static_cast<Acc>(values[i]);
    EXPECT_EQ(static_cast<double>(multiplied[i]),
              static_cast<double>(static_cast<T>(x * static_cast<Acc>(0.3))));
    EXPECT_EQ(static_cast<double>(divided[i]), static_cast<double>(static_cast<T>(x / Acc(3))));
  }
}

TEST(Kernels, infinitiesAndNansPassThrough) {
  const float inf = std::numeric_limits<float>::infinity();
  const float a[] = {inf, -inf, inf, NAN};
  const float b[] = {1.0f, 1.0f, -inf, 1.0f};
  const void* blocks[] = {a, b};
  float out[4];
  sumBlocks(c10::ScalarType::Float, blocks, 2, 4, 1.0, c10::ScalarType::Float, out);
  EXPECT_EQ(out[0], inf);
  EXPECT_EQ(out[1], -inf);
  EXPECT_TRUE(std::isnan(out[2]));
  EXPECT_TRUE(std::isnan(out[3]));
}

TEST(Kernels, otherTypesAreRefused) {
  EXPECT_FALSE(isReducible(c10::ScalarType::Long));
  long x = 0;
  const void* blocks[] = {&x};
  EXPECT_THROW(sumBlocks(c10::ScalarType::Long, blocks, 1, 1, 1.0, c10::ScalarType::Long, &x),
               c10::Error);
}

std::vector<TensorSpec> mixedList() {
  return {{c10::ScalarType::Half, {3}, 1},     {c10::ScalarType::Double, {2, 2}, 1},
          {c10::ScalarType::Float, {5}, 0},    {c10::ScalarType::Bool, {1}, 1},
          {c10::ScalarType::Float, {0, 9}, 1}, {c10::ScalarType::Float, {}, 1}};
}

TEST(BlockLayout, everyTensorIsAlignedToItsTypeWithoutPadding) {
  const auto list = mixedList();
  const auto blocks = layoutByOwner(list, 3);
  ASSERT_EQ(blocks.size(), 3u);
  EXPECT_EQ(blocks[0].bytes, 20);
  EXPECT_EQ(blocks[1].bytes, 6 + 32 + 1 + 0 + 4);
  EXPECT_EQ(blocks[2].bytes, 0);
  EXPECT_TRUE(blocks[2].tensors.empty());
  int64_t end = 0;
  for (size_t k = 0; k < blocks[1].tensors.size(); ++k) {
    const TensorSpec& spec = list[blocks[1].tensors[k]];
    EXPECT_EQ(blocks[1].offsets[k], end);
    EXPECT_EQ(end % static_cast<int64_t>(c10::elementSize(spec.dtype)), 0);
    end += spec.bytes();
  }
}

TEST(BlockLayout, unpackingGivesBackWhatWasPacked) {
  const auto list = mixedList();
  const Block block = layoutByOwner(list, 2)[1];
  std::vector<std::vector<char>> from, to;
  std::vector<const void*> sources;
  std::vector<void*> targets;
  for (size_t i = 0; i < list.size(); ++i) {
    from.emplace_back(list[i].bytes(), static_cast<char>('a' + i));
    to.emplace_back(list[i].bytes(), '?');
  }
  for (size_t i = 0; i < list.size(); ++i) {
    sources.push_back(from[i].data());
    targets.push_back(to[i].data());
  }
  std::vector<char> packed(block.bytes);
  pack(block, list, sources, packed.data());
  unpack(block, list, packed.data(), targets);
  for (size_t i = 0; i < list.size(); ++i) {
    EXPECT_EQ(to[i] == from[i], list[i].owner == 1 || list[i].bytes() == 0) << "tensor " << i;
  }
}

TEST(BlockLayout, neighboursInMemoryNeedNoPacking) {
  const std::vector<TensorSpec> list{{c10::ScalarType::Float, {4}, 0},
                                     {c10::ScalarType::Float, {0}, 0},
                                     {c10::ScalarType::Float, {2}, 0}};
  const Block block = layoutByOwner(list, 1)[0];
  float memory[8];
  EXPECT_EQ(adjacentMemory(block, list, {memory, nullptr, memory + 4}),
            reinterpret_cast<const char*>(memory));
  EXPECT_EQ(adjacentMemory(block, list, {memory, nullptr, memory + 5}), nullptr);
  EXPECT_EQ(adjacentMemory(block, list, {memory + 4, nullptr, memory}), nullptr);
}

Proposal exampleProposal() {
  Proposal proposal;
  proposal.role = "reduce";
  proposal.label = "unit 3";
  proposal.divisor = 4;
  proposal.flag_bytes = 7;
  proposal.tensors = mixedList();
  proposal.must_match = "a\nb\n";
  return proposal;
}

TEST(Agreement, aProposalSurvivesTheWire) {
  const Proposal proposal = exampleProposal();
  const Proposal back = decode(encode(proposal));
  EXPECT_EQ(encode(back), encode(proposal));
  EXPECT_EQ(back.tensors, proposal.tensors);
  EXPECT_EQ(back.label, "unit 3");
  EXPECT_FALSE(firstDifference({proposal, back, proposal}));
  const std::string bytes = encode(proposal);
  for (size_t n = 0; n < bytes.size(); ++n) {
    EXPECT_THROW(decode(std::string_view(bytes).substr(0, n)), c10::Error) << n;
  }
}

TEST(Agreement, theFirstDifferenceNamesAllRanksAndValues) {
  const auto difference = [](const std::function<void(Proposal&)>& change) {
    std::vector<Proposal> proposals(4, exampleProposal());
    change(proposals[2]);
    return firstDifference(proposals).value_or("none");
  };
  EXPECT_EQ(difference([](Proposal&) {}), "none");
  EXPECT_EQ(
      difference([](Proposal& p) { p.op = OwnerOp::broadcast; }),
      "the operation is reduce_to_owners on ranks 0, 1 and 3, broadcast_from_owners on rank 2");
  EXPECT_EQ(difference([](Proposal& p) { p.role = "publish"; }),
            "the channel is 'reduce' on ranks 0, 1 and 3, 'publish' on rank 2");
  EXPECT_EQ(difference([](Proposal& p) { p.label = "unit 4"; }),
            "the label is 'unit 3' on ranks 0, 1 and 3, 'unit 4' on rank 2");
  EXPECT_EQ(difference([](Proposal& p) { p.tensors.pop_back(); }),
            "the number of tensors is 6 on ranks 0, 1 and 3, 5 on rank 2");
  EXPECT_EQ(difference([](Proposal& p) {
              p.tensors[1].sizes = {4, 1};
            }),
            "tensor 1 is Double[2, 2] owned by rank 1 on ranks 0, 1 and 3, "
            "Double[4, 1] owned by rank 1 on rank 2");
  EXPECT_EQ(difference([](Proposal& p) { p.tensors[5].dtype = c10::ScalarType::Half; }),
            "tensor 5 is Float[] owned by rank 1 on ranks 0, 1 and 3, "
            "Half[] owned by rank 1 on rank 2");
  EXPECT_EQ(difference([](Proposal& p) { p.tensors[5].owner = 0; }),
            "tensor 5 is Float[] owned by rank 1 on ranks 0, 1 and 3, "
            "Float[] owned by rank 0 on rank 2");
  EXPECT_EQ(difference([](Proposal& p) { p.divisor = 0.1; }),
            "the divisor is 4 on ranks 0, 1 and 3, 0.10000000000000001 on rank 2");
  EXPECT_EQ(difference([](Proposal& p) { p.flag_bytes = 8; }),
            "the number of flag bytes is 7 on ranks 0, 1 and 3, 8 on rank 2");
  EXPECT_EQ(difference([](Proposal& p) { p.must_match = "a\nc\n"; }),
            "of what must match, line 2 is 'b' on ranks 0, 1 and 3, 'c' on rank 2");
  EXPECT_EQ(difference([](Proposal& p) { p.must_match = "a\n"; }),
            "of what must match, line 2 is 'b' on ranks 0, 1 and 3, missing on rank 2");
}

TEST(Agreement, everyFieldChangesTheHash) {
  const uint64_t hash = hashBytes(encode(exampleProposal()));
  const auto changed = [&](const std::function<void(Proposal&)>& change) {
    Proposal proposal = exampleProposal();
    change(proposal);
    return hashBytes(encode(proposal)) != hash;
  };
  EXPECT_TRUE(changed([](Proposal& p) { p.op = OwnerOp::broadcast; }));
  EXPECT_TRUE(changed([](Proposal& p) { p.role = "x"; }));
  EXPECT_TRUE(changed([](Proposal& p) { p.label = "x"; }));
  EXPECT_TRUE(changed([](Proposal& p) { p.divisor = 2; }));
  EXPECT_TRUE(changed([](Proposal& p) { p.flag_bytes = 8; }));
  EXPECT_TRUE(changed([](Proposal& p) { p.must_match = "x"; }));
  EXPECT_TRUE(changed([](Proposal& p) { p.tensors[0].owner = 0; }));
  EXPECT_TRUE(changed([](Proposal& p) { p.tensors[0].sizes = {4}; }));
  EXPECT_TRUE(changed([](Proposal& p) { p.tensors[0].dtype = c10::ScalarType::BFloat16; }));
}

}  // namespace
}  // namespace dmuon
