// The harness itself: what goes wrong in a rank must fail the test.
#include "ranks.h"

#include <gtest/gtest-spi.h>

#include <thread>

namespace dmuon::testing {
namespace {

TEST(Ranks, aFailedExpectationInOneRankFailsTheTestAndNamesIt) {
  // On a thread of its own: EXPECT_NONFATAL_FAILURE would catch it inside the rank otherwise.
  const auto body = [](int rank, const Store&) {
    std::thread([rank] { EXPECT_NE(rank, 1) << "here"; }).join();
  };
  EXPECT_NONFATAL_FAILURE(runRanks(3, body), "rank 1 of 3");
}

TEST(Ranks, anExceptionInOneRankFailsTheTestWithItsText) {
  EXPECT_NONFATAL_FAILURE(runRanks(2,
                                   [](int rank, const Store&) {
                                     if (rank == 0) throw std::runtime_error("the reason");
                                   }),
                          "the reason");
}

TEST(Ranks, aRankThatCrashesFailsTheTest) {
  EXPECT_NONFATAL_FAILURE(runRanks(2,
                                   [](int rank, const Store&) {
                                     if (rank == 1) ::kill(::getpid(), SIGKILL);
                                   }),
                          "ended by signal 9");
}

TEST(Ranks, aRankThatHangsIsKilled) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_NONFATAL_FAILURE(runRanks(
                              2,
                              [](int rank, const Store&) {
                                if (rank == 1) std::this_thread::sleep_for(std::chrono::hours(1));
                              },
                              std::chrono::seconds(5)),
                          "killed: not done after 5 s");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

TEST(Ranks, allRanksMeetInTheStore) {
  runRanks(3, [](int rank, const Store& store) {
    store->add("count", 1);
    store->set("from " + std::to_string(rank), std::vector<uint8_t>{1});
    store->wait({"from 0", "from 1", "from 2"});
    EXPECT_EQ(store->add("count", 0), 3);
  });
}

}  // namespace
}  // namespace dmuon::testing
