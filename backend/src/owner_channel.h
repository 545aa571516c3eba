// The owner collectives as the process group that made them sees them.
#pragma once

#include <chrono>

#include <dmuon/backend/owner_collectives.h>

namespace dmuon {

class OwnerChannel : public OwnerCollectives {
 public:
  virtual void setTimeout(std::chrono::milliseconds timeout) = 0;
  // Lets what was submitted end, at most for the time-out, then ends the threads. Never throws.
  virtual void shutdown() = 0;
};

}  // namespace dmuon
