// How a block (block_layout.h) is cut into the messages it travels in.
//
// All ranks cut alike, from what they have agreed on, so pieces need no description on the wire. A
// large tensor is cut by itself: its pieces are sent from, and a broadcast's received into, the
// tensor's own memory. Runs of small tensors share a piece, which is packed unless they happen to
// lie side by side.
#pragma once

#include <cstdint>
#include <vector>

#include "block_layout.h"

namespace dmuon {

// A part of one tensor.
struct Slice {
  size_t tensor = 0;   // position in the list
  int64_t begin = 0;   // in bytes from the start of the tensor
  int64_t offset = 0;  // in bytes from the start of the piece; aligned to the tensor's element
  int64_t bytes = 0;
};

struct Piece {
  std::vector<Slice> slices;
  int64_t bytes = 0;
};

// No piece exceeds max_bytes, except that no element is cut. A tensor of a quarter of that or more
// shares a piece with no other; without a limit the whole block is one piece. An empty block has
// none.
std::vector<Piece> cut(const Block& block, const std::vector<TensorSpec>& tensors,
                       int64_t max_bytes);

// The piece's memory if its slices, of the tensors at data[position in the list], lie one after the
// other; else null.
char* adjacentMemory(const Piece& piece, const std::vector<const void*>& data);

// Copies the piece's slices into, or out of, one contiguous piece of memory.
void pack(const Piece& piece, const std::vector<const void*>& data, char* to);
void unpack(const Piece& piece, const char* from, const std::vector<void*>& data);

}  // namespace dmuon
