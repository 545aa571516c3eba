#include "host_process.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>

#include "agreement.h"

namespace dmuon {

uint64_t hostId() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat pids, memory;
  if (boot.empty() || ::stat("/proc/self/ns/pid", &pids) != 0 || ::stat("/dev/shm", &memory) != 0) {
    return 0;
  }
  return hashBytes(boot + ' ' + std::to_string(pids.st_ino) + ' ' + std::to_string(memory.st_dev));
}

ProcessWatch::ProcessWatch(int64_t pid) {
#ifdef SYS_pidfd_open
  fd_ = static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0));
  ended_before_ = fd_ < 0 && errno == ESRCH;
#endif
}

ProcessWatch::~ProcessWatch() {
  if (fd_ >= 0) ::close(fd_);
}

bool ProcessWatch::ended() const {
  pollfd watched{fd_, POLLIN, 0};
  return ended_before_ || (fd_ >= 0 && ::poll(&watched, 1, 0) == 1);
}

}  // namespace dmuon
