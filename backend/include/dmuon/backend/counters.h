// What a group of owner collectives has moved so far.
//
// A plain value; the owner collectives hand out a consistent copy. Bytes are payload bytes on the
// wire as this rank sees them: headers, retries and copies inside the rank do not count.
#pragma once

#include <cstdint>

namespace dmuon {

struct OperationCounters {
  int64_t calls = 0;           // operations submitted
  int64_t tensors = 0;         // tensors in those operations
  int64_t bytes_sent = 0;      // payload bytes this rank sent to other ranks
  int64_t bytes_received = 0;  // payload bytes this rank received from other ranks
};

struct OwnerCounters {
  OperationCounters reduce;     // reduceToOwners
  OperationCounters broadcast;  // broadcastFromOwners
};

}  // namespace dmuon
