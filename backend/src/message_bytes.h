// Messages as tensors of bytes.
#pragma once

#include <ATen/ops/empty.h>

#include <cstring>
#include <string>

namespace dmuon {

inline at::Tensor newBytes(int64_t size) { return at::empty({size}, at::kByte); }

inline at::Tensor copyOf(const void* data, size_t size) {
  at::Tensor bytes = newBytes(static_cast<int64_t>(size));
  std::memcpy(bytes.mutable_data_ptr(), data, size);
  return bytes;
}

inline std::string textOf(const at::Tensor& bytes) {
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
}

}  // namespace dmuon
