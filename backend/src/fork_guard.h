// Whether this process is a fork of the one in which something was made.
//
// A group does not survive a fork: its threads are not there in the child, its mutexes may be held
// by them for ever, and its connections belong to the parent. So the child must neither use nor
// destroy it: it says what is wrong, and leaves all as it is (leak()). Forked children that hold a
// group without meaning to are common: data loaders' workers, for one.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace dmuon {

class ForkGuard {
 public:
  ForkGuard();
  // True in a process that was forked from the one that made this guard. Costs one atomic load.
  bool forked() const;
  // What to tell whoever uses `what` in such a process.
  std::string explain(const std::string& what) const;

 private:
  uint64_t forks_;
  int64_t process_;
};

// Never destroyed: for a child that must not touch what its parent uses.
template <typename T>
void leak(T&& object) {
  new std::decay_t<T>(std::forward<T>(object));
}

}  // namespace dmuon
