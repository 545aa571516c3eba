// Which tensors travel together, and where each lies in its block.
//
// All tensors of one owner form one contiguous block, so that an operation sends at most one
// payload message per peer and direction. Inside a block, tensors are ordered by falling element
// size and then by position in the list: every tensor is aligned to its element type without
// padding.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace dmuon {

// What the ranks must agree on about one tensor.
struct TensorSpec {
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> sizes;
  int64_t owner = 0;

  int64_t numel() const;
  int64_t bytes() const;
  bool operator==(const TensorSpec&) const = default;
};

struct Block {
  std::vector<size_t> tensors;   // positions in the list
  std::vector<int64_t> offsets;  // in bytes from the start of the block, one per tensor
  int64_t bytes = 0;
};

// One block per rank, empty for a rank that owns nothing. Precondition: owners lie in [0, size).
std::vector<Block> layoutByOwner(const std::vector<TensorSpec>& tensors, int size);

// The block's memory if its tensors, at data[position in the list], already lie one after the other
// as the layout wants them; null if they do not, or if the block is empty.
const char* adjacentMemory(const Block& block, const std::vector<TensorSpec>& tensors,
                           const std::vector<const void*>& data);

// Copies the block's tensors into, or out of, one contiguous piece of memory.
void pack(const Block& block, const std::vector<TensorSpec>& tensors,
          const std::vector<const void*>& data, char* to);
void unpack(const Block& block, const std::vector<TensorSpec>& tensors, const char* from,
            const std::vector<void*>& data);

}  // namespace dmuon
