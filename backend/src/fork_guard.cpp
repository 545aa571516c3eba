#include "fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace dmuon {
namespace {

// How many forks lie between this process and the first one.
std::atomic<uint64_t> forks{0};

uint64_t currentForks() {
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { ++forks; });
  (void)registered;
  return forks;
}

}  // namespace

ForkGuard::ForkGuard() : forks_(currentForks()), process_(::getpid()) {}

bool ForkGuard::forked() const { return forks.load(std::memory_order_relaxed) != forks_; }

std::string ForkGuard::explain(const std::string& what) const {
  return "process " + std::to_string(::getpid()) + " was forked from process " +
         std::to_string(process_) + ", which made " + what +
         ", and cannot use it: threads and connections are the parent's alone. Make a group of its "
         "own in the child, start the child by spawn, or leave communication to the parent";
}

}  // namespace dmuon
