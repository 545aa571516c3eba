#include "pieces.h"

#include <algorithm>
#include <cstring>

namespace dmuon {
namespace {

constexpr int64_t kLargestElement = 16;

class Cutter {
 public:
  // Pieces end at multiples of the largest element, so that slices stay aligned.
  explicit Cutter(int64_t max_bytes)
      : max_bytes_(std::max(max_bytes / kLargestElement, int64_t{1}) * kLargestElement) {}

  void add(size_t tensor, int64_t bytes) {
    const bool large = bytes >= max_bytes_ / 4;
    if (large || bytes > max_bytes_ - piece_.bytes) flush();
    int64_t begin = 0;
    for (; bytes - begin > max_bytes_; begin += max_bytes_) {
      append(tensor, begin, max_bytes_);
      flush();
    }
    append(tensor, begin, bytes - begin);
    if (large) flush();
  }

  std::vector<Piece> take() {
    flush();
    return std::move(pieces_);
  }

 private:
  void append(size_t tensor, int64_t begin, int64_t bytes) {
    if (bytes == 0) return;
    piece_.slices.push_back({tensor, begin, piece_.bytes, bytes});
    piece_.bytes += bytes;
  }
  void flush() {
    if (piece_.bytes > 0) pieces_.push_back(std::move(piece_));
    piece_ = {};
  }

  const int64_t max_bytes_;
  std::vector<Piece> pieces_;
  Piece piece_;
};

}  // namespace

std::vector<Piece> cut(const Block& block, const std::vector<TensorSpec>& tensors,
                       int64_t max_bytes) {
  Cutter cutter(max_bytes);
  for (size_t i : block.tensors) cutter.add(i, tensors[i].bytes());
  return cutter.take();
}

char* adjacentMemory(const Piece& piece, const std::vector<const void*>& data) {
  const auto at = [&](const Slice& slice) {
    return static_cast<const char*>(data[slice.tensor]) + slice.begin;
  };
  if (piece.slices.empty()) return nullptr;
  const char* begin = at(piece.slices[0]);
  for (const Slice& slice : piece.slices) {
    if (at(slice) != begin + slice.offset) return nullptr;
  }
  return const_cast<char*>(begin);
}

void pack(const Piece& piece, const std::vector<const void*>& data, char* to) {
  for (const Slice& slice : piece.slices) {
    std::memcpy(to + slice.offset, static_cast<const char*>(data[slice.tensor]) + slice.begin,
                slice.bytes);
  }
}

void unpack(const Piece& piece, const char* from, const std::vector<void*>& data) {
  for (const Slice& slice : piece.slices) {
    std::memcpy(static_cast<char*>(data[slice.tensor]) + slice.begin, from + slice.offset,
                slice.bytes);
  }
}

}  // namespace dmuon
