// What a group of owner collectives has moved so far.
//
// A plain value; the owner collectives hand out a consistent copy. Bytes are payload bytes on the
// wire as this rank sees them: headers, retries and copies inside the rank do not count.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>

namespace dmuon {

struct PayloadBytes {
  int64_t sent = 0, received = 0;
};

struct OperationCounters {
  int64_t calls = 0;           // operations submitted
  int64_t tensors = 0;         // tensors in those operations
  int64_t bytes_sent = 0;      // payload bytes this rank sent to other ranks
  int64_t bytes_received = 0;  // payload bytes this rank received from other ranks
  std::map<c10::ScalarType, PayloadBytes> bytes_by_dtype;  // the same, by the tensors' dtype
  // From submission to success, summed. CPU tensors only: the host does not see when a device's
  // operation ends.
  double seconds = 0;
};

struct OwnerCounters {
  OperationCounters reduce;                           // reduceToOwners
  OperationCounters broadcast;                        // broadcastFromOwners
  std::map<std::string, OperationCounters> by_label;  // both, by OwnerOptions::label
};

}  // namespace dmuon
