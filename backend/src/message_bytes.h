// What messages hold besides payload.
#pragma once

#include <cstring>
#include <string>

#include "agreement.h"
#include "peers.h"

namespace dmuon {

inline Bytes copyOf(const void* data, size_t size) {
  Bytes bytes = newBytes(static_cast<int64_t>(size));
  if (size > 0) std::memcpy(bytes.data, data, size);
  return bytes;
}

inline std::string textOf(const Bytes& bytes) {
  return {bytes.data, static_cast<size_t>(bytes.size)};
}

// One without the magic number if the message is too short for a header.
inline Header readHeader(const Transfer& transfer) {
  Header header;
  header.magic = 0;
  if (transfer.received >= static_cast<int64_t>(sizeof(Header))) {
    std::memcpy(&header, transfer.bytes.data, sizeof(Header));
  }
  return header;
}

}  // namespace dmuon
