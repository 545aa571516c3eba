// How blocks are cut into messages: everything once, in order, aligned, no message too long.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "../../backend/src/pieces.h"

namespace dmuon {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

std::vector<TensorSpec> floats(const std::vector<int64_t>& numels) {
  std::vector<TensorSpec> tensors;
  for (int64_t n : numels) tensors.push_back({c10::ScalarType::Float, {n}, 0});
  return tensors;
}

std::vector<Piece> cutOnly(const std::vector<TensorSpec>& tensors, int64_t max_bytes) {
  return cut(layoutByOwner(tensors, 1)[0], tensors, max_bytes);
}

std::vector<int64_t> sizesOf(const std::vector<Piece>& pieces) {
  std::vector<int64_t> sizes;
  for (const Piece& piece : pieces) sizes.push_back(piece.bytes);
  return sizes;
}

// What must hold of any cut.
void expectWhole(const std::vector<Piece>& pieces, const std::vector<TensorSpec>& tensors,
                 const Block& block, int64_t max_bytes) {
  std::vector<int64_t> next(tensors.size(), 0);  // by tensor: up to where it has been cut
  size_t at = 0;                                 // in the block's order of tensors
  for (const Piece& piece : pieces) {
    ASSERT_FALSE(piece.slices.empty());
    EXPECT_LE(piece.bytes, std::max<int64_t>(max_bytes, 16));
    int64_t offset = 0;
    for (const Slice& slice : piece.slices) {
      const auto element = static_cast<int64_t>(c10::elementSize(tensors[slice.tensor].dtype));
      EXPECT_GT(slice.bytes, 0);
      EXPECT_EQ(slice.offset, offset);
      EXPECT_EQ(slice.offset % element, 0);
      EXPECT_EQ(slice.begin % element, 0);
      EXPECT_EQ(slice.bytes % element, 0);
      EXPECT_EQ(slice.begin, next[slice.tensor]);
      while (at < block.tensors.size() && block.tensors[at] != slice.tensor) ++at;
      EXPECT_LT(at, block.tensors.size()) << "tensor " << slice.tensor << " comes out of order";
      next[slice.tensor] += slice.bytes;
      offset += slice.bytes;
    }
    EXPECT_EQ(offset, piece.bytes);
  }
  for (size_t i : block.tensors) EXPECT_EQ(next[i], tensors[i].bytes()) << "tensor " << i;
}

TEST(Pieces, anEmptyBlockHasNone) {
  EXPECT_TRUE(cutOnly({}, 1024).empty());
  EXPECT_TRUE(cutOnly(floats({0, 0}), 1024).empty());
}

TEST(Pieces, withoutALimitTheBlockIsOne) {
  EXPECT_EQ(sizesOf(cutOnly(floats({1 << 20, 3, 0, 1 << 18}), kNoLimit)),
            (std::vector<int64_t>{4 * ((1 << 20) + 3 + (1 << 18))}));
}

TEST(Pieces, smallTensorsShareOneAndLargeOnesAreCutByThemselves) {
  // A limit of 1024 bytes; from 256 on a tensor is large.
  EXPECT_EQ(sizesOf(cutOnly(floats({10, 20, 30}), 1024)), (std::vector<int64_t>{240}));
  EXPECT_EQ(sizesOf(cutOnly(floats({63, 63, 63, 63, 63}), 1024)),
            (std::vector<int64_t>{1008, 252}));
  EXPECT_EQ(sizesOf(cutOnly(floats({10, 64, 10}), 1024)), (std::vector<int64_t>{40, 256, 40}));
  EXPECT_EQ(sizesOf(cutOnly(floats({600}), 1024)), (std::vector<int64_t>{1024, 1024, 352}));
  EXPECT_EQ(sizesOf(cutOnly(floats({512}), 1024)), (std::vector<int64_t>{1024, 1024}));
}

TEST(Pieces, aLimitThatIsNoMultipleOfTheLargestElementIsRoundedDown) {
  EXPECT_EQ(sizesOf(cutOnly(floats({300}), 1030)), (std::vector<int64_t>{1024, 176}));
  // And never below one element.
  EXPECT_EQ(sizesOf(cutOnly(floats({9}), 1)), (std::vector<int64_t>{16, 16, 4}));
}

TEST(Pieces, allBytesAreInOneEachInOrderAndAligned) {
  const c10::ScalarType types[] = {c10::ScalarType::Byte, c10::ScalarType::Half,
                                   c10::ScalarType::Float, c10::ScalarType::Double,
                                   c10::ScalarType::ComplexDouble};
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    std::vector<TensorSpec> tensors(random() % 12);
    for (TensorSpec& tensor : tensors) {
      tensor.dtype = types[random() % 5];
      tensor.sizes = {static_cast<int64_t>(random() % (random() % 3 == 0 ? 5000 : 40)), 1};
      tensor.owner = static_cast<int64_t>(random() % 2);
    }
    const int64_t max_bytes = std::vector<int64_t>{1, 16, 100, 1024, 4096, kNoLimit}[random() % 6];
    for (const Block& block : layoutByOwner(tensors, 2)) {
      SCOPED_TRACE("round " + std::to_string(round) + ", at most " + std::to_string(max_bytes));
      expectWhole(cut(block, tensors, max_bytes), tensors, block, max_bytes);
    }
  }
}

TEST(Pieces, packingAndUnpackingGivesTheTensorsBack) {
  const std::vector<TensorSpec> tensors = floats({5, 100, 0, 7, 300});
  std::vector<std::vector<float>> sent, received;
  std::vector<const void*> from;
  std::vector<void*> to;
  for (const TensorSpec& tensor : tensors) {
    std::vector<float> data(tensor.numel());
    std::iota(data.begin(), data.end(), 1000.f * static_cast<float>(sent.size()));
    sent.push_back(std::move(data));
    received.emplace_back(tensor.numel(), -1.f);
  }
  for (auto& data : sent) from.push_back(data.data());
  for (auto& data : received) to.push_back(data.data());
  for (const Piece& piece : cutOnly(tensors, 512)) {
    std::vector<char> wire(piece.bytes);
    pack(piece, from, wire.data());
    unpack(piece, wire.data(), to);
  }
  EXPECT_EQ(received, sent);
}

TEST(Pieces, memoryIsAdjacentOnlyWhereEverySliceFollowsTheOneBefore) {
  std::vector<float> memory(1000);
  const std::vector<TensorSpec> tensors = floats({10, 20, 30});
  const auto at = [&](int64_t i) { return static_cast<const void*>(memory.data() + i); };
  const std::vector<Piece> pieces = cutOnly(tensors, 1024);
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_EQ(adjacentMemory(pieces[0], {at(5), at(15), at(35)}), at(5));
  EXPECT_EQ(adjacentMemory(pieces[0], {at(5), at(15), at(36)}), nullptr);  // a gap
  EXPECT_EQ(adjacentMemory(pieces[0], {at(5), at(14), at(34)}), nullptr);  // they overlap
  EXPECT_EQ(adjacentMemory(pieces[0], {at(35), at(5), at(25)}), nullptr);  // another order
  EXPECT_EQ(adjacentMemory(Piece{}, {}), nullptr);
}

TEST(Pieces, aLargeTensorsPiecesLieInItsOwnMemory) {
  std::vector<float> memory(600);
  const std::vector<Piece> pieces = cutOnly(floats({600}), 1024);
  for (size_t i = 0; i < pieces.size(); ++i) {
    EXPECT_EQ(adjacentMemory(pieces[i], {memory.data()}),
              reinterpret_cast<char*>(memory.data()) + 1024 * i);
  }
}

// Tensors of no elements lie nowhere: a piece may not depend on where their pointers point.
TEST(Pieces, emptyTensorsDoNotMatter) {
  std::vector<float> memory(100);
  const std::vector<Piece> pieces = cutOnly(floats({10, 0, 20}), 1024);
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_EQ(adjacentMemory(pieces[0], {memory.data(), nullptr, memory.data() + 10}),
            reinterpret_cast<char*>(memory.data()));
}

}  // namespace
}  // namespace dmuon
