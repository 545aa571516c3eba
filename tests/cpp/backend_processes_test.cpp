// What is known of other processes of the host, and of forks of this one.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <memory>

#include "../../backend/src/fork_guard.h"
#include "../../backend/src/host_process.h"

namespace dmuon {
namespace {

pid_t sleepingChild() {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::alarm(60);
    for (;;) ::pause();
  }
  return pid;
}

int statusOf(const std::function<int()>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(body());
  int status = -1;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

bool readable(int descriptor) {
  pollfd one{descriptor, POLLIN, 0};
  return ::poll(&one, 1, 0) == 1;
}

size_t openFiles() {
  size_t n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++n;
  return n;
}

TEST(HostId, isTheSameInAnotherProcess) {
  const uint64_t here = hostId();
  EXPECT_NE(here, 0u);
  EXPECT_EQ(hostId(), here);
  EXPECT_EQ(statusOf([&] { return hostId() == here ? 7 : 8; }), 7);
}

TEST(ProcessWatch, seesAProcessEndAndNotBefore) {
  const pid_t pid = sleepingChild();
  ProcessWatch watch(pid);
  EXPECT_FALSE(watch.ended());
  ::kill(pid, SIGSTOP);
  EXPECT_FALSE(watch.ended());  // stopped is not ended
  if (watch.descriptor() < 0) GTEST_SKIP() << "no pidfd_open here";
  EXPECT_FALSE(readable(watch.descriptor()));
  ::kill(pid, SIGKILL);
  pollfd one{watch.descriptor(), POLLIN, 0};
  EXPECT_EQ(::poll(&one, 1, 10000), 1);
  EXPECT_TRUE(watch.ended());  // before anybody has waited for it, too
  ::waitpid(pid, nullptr, 0);
  EXPECT_TRUE(watch.ended());
}

TEST(ProcessWatch, ofAProcessThatIsGoneAlreadyHasEnded) {
  const pid_t pid = sleepingChild();
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  EXPECT_TRUE(ProcessWatch(pid).ended());
}

TEST(ProcessWatch, leavesNoFileBehind) {
  const size_t before = openFiles();
  for (int i = 0; i < 5; ++i) ProcessWatch watch(::getpid());
  EXPECT_EQ(openFiles(), before);
}

TEST(ForkGuard, tellsChildrenOfAllGenerations) {
  const ForkGuard guard;
  EXPECT_FALSE(guard.forked());
  EXPECT_EQ(statusOf([&] {
              if (!guard.forked()) return 1;
              const ForkGuard own;
              if (own.forked()) return 2;
              return statusOf([&] { return guard.forked() && own.forked() ? 7 : 3; });
            }),
            7);
  EXPECT_FALSE(guard.forked());
  const std::string text = guard.explain("this group");
  EXPECT_NE(text.find("process " + std::to_string(::getpid()) + ", which made this group"),
            std::string::npos)
      << text;
}

TEST(ForkGuard, leakedObjectsAreNotDestroyed) {
  bool destroyed = false;
  std::shared_ptr<int> object(new int(1), [&](int* p) {
    destroyed = true;
    delete p;
  });
  int* const kept = object.get();
  leak(std::move(object));
  EXPECT_EQ(object, nullptr);
  EXPECT_FALSE(destroyed);
  delete kept;
}

}  // namespace
}  // namespace dmuon
