#include "block_layout.h"

#include <algorithm>
#include <cstring>

namespace dmuon {

int64_t TensorSpec::numel() const {
  int64_t n = 1;
  for (int64_t size : sizes) n *= size;
  return n;
}

int64_t TensorSpec::bytes() const {
  return numel() * static_cast<int64_t>(c10::elementSize(dtype));
}

std::vector<Block> layoutByOwner(const std::vector<TensorSpec>& tensors, int size) {
  std::vector<Block> blocks(size);
  for (size_t i = 0; i < tensors.size(); ++i) blocks[tensors[i].owner].tensors.push_back(i);
  for (Block& block : blocks) {
    std::stable_sort(block.tensors.begin(), block.tensors.end(), [&](size_t a, size_t b) {
      return c10::elementSize(tensors[a].dtype) > c10::elementSize(tensors[b].dtype);
    });
    for (size_t i : block.tensors) {
      block.offsets.push_back(block.bytes);
      block.bytes += tensors[i].bytes();
    }
  }
  return blocks;
}

const char* adjacentMemory(const Block& block, const std::vector<TensorSpec>& tensors,
                           const std::vector<const void*>& data) {
  const char* begin = nullptr;
  for (size_t k = 0; k < block.tensors.size(); ++k) {
    const size_t i = block.tensors[k];
    if (tensors[i].bytes() == 0) continue;
    const char* here = static_cast<const char*>(data[i]);
    if (begin == nullptr) begin = here;
    if (here != begin + block.offsets[k]) return nullptr;
  }
  return begin;
}

void pack(const Block& block, const std::vector<TensorSpec>& tensors,
          const std::vector<const void*>& data, char* to) {
  for (size_t k = 0; k < block.tensors.size(); ++k) {
    const size_t i = block.tensors[k];
    const int64_t bytes = tensors[i].bytes();
    if (bytes > 0) std::memcpy(to + block.offsets[k], data[i], bytes);
  }
}

void unpack(const Block& block, const std::vector<TensorSpec>& tensors, const char* from,
            const std::vector<void*>& data) {
  for (size_t k = 0; k < block.tensors.size(); ++k) {
    const size_t i = block.tensors[k];
    const int64_t bytes = tensors[i].bytes();
    if (bytes > 0) std::memcpy(data[i], from + block.offsets[k], bytes);
  }
}

}  // namespace dmuon
