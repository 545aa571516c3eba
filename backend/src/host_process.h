// Processes of this host, as seen from each other: which share memory, and which have ended.
#pragma once

#include <cstdint>

namespace dmuon {

// Equal in two processes if they run under the same kernel and see the same process numbers and the
// same /dev/shm. Zero if that cannot be found out.
uint64_t hostId();

// Watches another process of this host.
class ProcessWatch {
 public:
  // Watches nothing if the system has no pidfd_open (before Linux 5.3).
  explicit ProcessWatch(int64_t pid);
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  bool ended() const;
  // Becomes readable when the process has ended; -1 if there is none.
  int descriptor() const { return fd_; }

 private:
  int fd_ = -1;
  bool ended_before_ = false;
};

}  // namespace dmuon
