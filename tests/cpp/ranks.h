// Runs a test body as N processes, one per rank.
//
//   TEST(Suite, property) {
//     runRanks(4, [](int rank, const Store& store) { ... EXPECT_EQ(...); });
//   }
//
// Each rank is a fork of the test program, with one ATen thread. It reports failed expectations and
// exceptions to the parent, which adds them to the test with the rank. A rank that has not ended
// after the limit is killed and reported; no rank outlives the test program.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

namespace dmuon::testing {

using Store = c10::intrusive_ptr<c10d::Store>;
using RankBody = std::function<void(int rank, const Store& store)>;

namespace detail {

// In a rank: sends every failed expectation up the pipe instead of to the terminal.
class FailureWriter : public ::testing::EmptyTestEventListener {
 public:
  explicit FailureWriter(int fd) : fd_(fd) {}
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::ostringstream text;
    text << (result.file_name() ? result.file_name() : "?") << ':' << result.line_number() << ": "
         << result.message() << '\n';
    say(text.str());
  }
  void say(const std::string& text) const {
    if (::write(fd_, text.data(), text.size()) < 0) std::perror("ranks.h: write");
  }

 private:
  int fd_;
};

// Never returns.
[[noreturn]] inline void runRank(int rank, int size, const std::string& store_file, int fd,
                                 pid_t parent, const RankBody& body) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());
  auto* failures = new FailureWriter(fd);
  listeners.Append(failures);
  at::set_num_threads(1);
  try {
    const Store store = c10::make_intrusive<c10d::FileStore>(store_file, size);
    body(rank, store);
  } catch (const std::exception& error) {
    failures->say(std::string("exception: ") + error.what() + '\n');
    ::_exit(1);
  }
#if defined(__SANITIZE_ADDRESS__)
  __lsan_do_leak_check();  // which would come at exit(); ends the process if it finds any
#endif
  ::_exit(::testing::Test::HasFailure() ? 1 : 0);
}

struct Child {
  pid_t pid = -1;
  int fd = -1;
  std::string report;
  bool closed = false;
};

// Reads what the ranks report until all have closed their pipes or the limit is over.
inline void collect(std::vector<Child>& children, std::chrono::steady_clock::time_point limit) {
  for (;;) {
    std::vector<pollfd> waiting;
    std::vector<Child*> owners;
    for (Child& child : children) {
      if (child.closed) continue;
      waiting.push_back({child.fd, POLLIN, 0});
      owners.push_back(&child);
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        limit - std::chrono::steady_clock::now());
    if (waiting.empty() || left.count() <= 0) return;
    ::poll(waiting.data(), waiting.size(), static_cast<int>(left.count()));
    for (size_t i = 0; i < waiting.size(); ++i) {
      if (waiting[i].revents == 0) continue;
      char buffer[4096];
      const ssize_t n = ::read(waiting[i].fd, buffer, sizeof(buffer));
      if (n > 0) owners[i]->report.append(buffer, n);
      if (n == 0) owners[i]->closed = true;
    }
  }
}

}  // namespace detail

// Call before anything in this process has started ATen's threads: forks do not inherit them.
inline void runRanks(int size, const RankBody& body,
                     std::chrono::seconds limit = std::chrono::seconds(60)) {
  std::string folder = std::filesystem::temp_directory_path() / "dmuon_ranks_XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  const std::string store_file = folder + "/store";
  const pid_t parent = ::getpid();
  std::fflush(nullptr);
  std::vector<detail::Child> children(size);
  for (int rank = 0; rank < size; ++rank) {
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    children[rank].fd = ends[0];
    children[rank].pid = ::fork();
    ASSERT_GE(children[rank].pid, 0);
    if (children[rank].pid == 0) {
      for (int other = 0; other <= rank; ++other) ::close(children[other].fd);
      detail::runRank(rank, size, store_file, ends[1], parent, body);
    }
    ::close(ends[1]);
  }
  detail::collect(children, std::chrono::steady_clock::now() + limit);
  for (int rank = 0; rank < size; ++rank) {
    detail::Child& child = children[rank];
    if (!child.closed) {
      ::kill(child.pid, SIGKILL);
      child.report += "killed: not done after " + std::to_string(limit.count()) + " s\n";
    }
    int status = 0;
    ::waitpid(child.pid, &status, 0);
    ::close(child.fd);
    if (WIFSIGNALED(status) && child.closed) {
      child.report += "ended by signal " + std::to_string(WTERMSIG(status)) + "\n";
    }
    if (!child.report.empty() || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      ADD_FAILURE() << "rank " << rank << " of " << size << ":\n" << child.report;
    }
  }
  std::filesystem::remove_all(folder);
}

}  // namespace dmuon::testing
