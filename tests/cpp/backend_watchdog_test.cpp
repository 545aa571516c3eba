// The watchdog ends a wait at its deadline or on request, once, and never a wait that is over.
// label: threads
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "../../backend/src/watchdog.h"

namespace dmuon {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Remembers its aborts.
class WaitedFor : public c10d::Work {
 public:
  void abort() override {
    ++aborts;
    if (aborts == 1) aborted.set_value();
  }
  bool abortedWithin(milliseconds limit) {
    return aborted.get_future().wait_for(limit) == std::future_status::ready;
  }
  std::atomic<int> aborts{0};
  std::promise<void> aborted;
};

struct Waiter {
  explicit Waiter(Watchdog& dog) : watchdog(dog) { watchdog.add(&post); }
  ~Waiter() { watchdog.remove(&post); }
  void arm(milliseconds from_now) { watchdog.arm(&post, work.get(), Clock::now() + from_now); }

  Watchdog& watchdog;
  Watchdog::Post post;
  c10::intrusive_ptr<WaitedFor> work = c10::make_intrusive<WaitedFor>();
};

TEST(Watchdog, abortsAWaitAtItsDeadline) {
  Watchdog watchdog;
  Waiter waiter(watchdog);
  const auto begin = Clock::now();
  waiter.arm(milliseconds(100));
  EXPECT_TRUE(waiter.work->abortedWithin(seconds(20)));
  EXPECT_GE(Clock::now() - begin, milliseconds(100));
  EXPECT_TRUE(watchdog.disarm(&waiter.post));
  EXPECT_FALSE(watchdog.interrupted(&waiter.post));
  EXPECT_EQ(waiter.work->aborts, 1);
}

TEST(Watchdog, leavesAWaitAloneThatIsOver) {
  Watchdog watchdog;
  Waiter over(watchdog), next(watchdog);
  over.arm(milliseconds(100));
  if (watchdog.disarm(&over.post)) GTEST_SKIP() << "this machine needs 100 ms for nothing";
  next.arm(milliseconds(200));  // when this one is aborted, the first would have been
  EXPECT_TRUE(next.work->abortedWithin(seconds(20)));
  EXPECT_EQ(over.work->aborts, 0);
}

TEST(Watchdog, aLaterWaitMayHaveTheEarlierDeadline) {
  Watchdog watchdog;
  Waiter patient(watchdog), hasty(watchdog);
  patient.arm(seconds(3600));
  std::this_thread::sleep_for(milliseconds(20));  // the watchdog sleeps until then
  hasty.arm(milliseconds(50));
  EXPECT_TRUE(hasty.work->abortedWithin(seconds(20)));
  EXPECT_FALSE(watchdog.disarm(&patient.post));
}

TEST(Watchdog, anInterruptEndsTheCurrentAndEveryLaterWaitOfItsPostOnly) {
  Watchdog watchdog;
  Waiter interrupted(watchdog), other(watchdog);
  interrupted.arm(seconds(3600));
  other.arm(seconds(3600));
  std::thread([&] { watchdog.interrupt(&interrupted.post); }).join();
  EXPECT_EQ(interrupted.work->aborts, 1);
  EXPECT_TRUE(watchdog.disarm(&interrupted.post));
  EXPECT_TRUE(watchdog.interrupted(&interrupted.post));
  interrupted.arm(seconds(3600));  // aborted at once
  EXPECT_EQ(interrupted.work->aborts, 2);
  EXPECT_TRUE(watchdog.disarm(&interrupted.post));
  EXPECT_EQ(other.work->aborts, 0);
  EXPECT_FALSE(watchdog.disarm(&other.post));
}

TEST(Watchdog, isDestroyedWithoutWaitingForDeadlines) {
  const auto begin = Clock::now();
  {
    Watchdog watchdog;
    Waiter waiter(watchdog);
    waiter.arm(seconds(3600));
    EXPECT_FALSE(watchdog.disarm(&waiter.post));
  }
  EXPECT_LT(Clock::now() - begin, seconds(60));
}

TEST(Watchdog, manyThreadsWaitAtOnce) {
  Watchdog watchdog;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      Waiter waiter(watchdog);
      for (int i = 0; i < 200; ++i) {
        waiter.arm(seconds(3600));
        if (watchdog.disarm(&waiter.post)) ++wrong;
      }
      waiter.arm(milliseconds(5 * t));
      if (!waiter.work->abortedWithin(seconds(20))) ++wrong;
      watchdog.disarm(&waiter.post);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace dmuon
