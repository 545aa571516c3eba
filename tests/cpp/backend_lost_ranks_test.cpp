// Ranks that are killed, stopped or leave, at every moment of an operation: the others hear whose
// fault it is, in time, and what was complete stays right.
// transports: all
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "failure_cases.h"
#include "ranks.h"

namespace dmuon {
namespace {

using namespace dmuon::testing;

constexpr int kSize = 3;
constexpr int kVictim = 2;
// What may pass after the time-out until every rank has its error.
constexpr double kGrace = 5;

void die() { ::kill(::getpid(), SIGKILL); }

// Three tensors of this rank's data, with an owner each.
struct Sum {
  explicit Sum(OwnerCollectives& group, int64_t numel, const std::string& label = "",
               milliseconds timeout = milliseconds(0))
      : rank(group.rank()), numel(numel) {
    for (int i = 0; i < kSize; ++i) inputs.push_back(makeData(rank, i, {numel}, at::kFloat));
    for (int i = 0; i < kSize; ++i) outputs.push_back(at::zeros({numel}));
    OwnerOptions options;
    options.label = label;
    options.timeout = timeout;
    work = group.reduceToOwners(inputs, outputs, {0, 1, 2}, options);
  }
  void expectRight() const {
    expectSame(outputs[rank], serialSum(ranksUpTo(kSize), rank, {numel}, at::kFloat, at::kFloat, 1),
               "the sum");
  }
  // Waits; returns the error, or "" after a look at the sum.
  std::string end() const {
    try {
      work->wait();
    } catch (const std::exception& error) {
      return error.what();
    }
    expectRight();
    return "";
  }

  int rank;
  int64_t numel;
  Tensors inputs, outputs;
  OwnerWorkPtr work;
};

// What a survivor hears of an operation that the victim took no part in.
void expectVictimNamed(OwnerCollectives& group, const std::string& label, seconds timeout) {
  const double waited = secondsOf([&] {
    Sum sum(group, 1000, label, timeout);
    expectError([&] { sum.work->wait(); }, {"reduce_to_owners on group 'shard' rank " +
                                                std::to_string(group.rank()) + " of 3, operation ",
                                            "'" + label + "'", "rank 2"});
  });
  EXPECT_LT(waited, static_cast<double>(timeout.count()) + kGrace);
}

TEST(Killed, beforeItsPartOfAnOperation) {
  runRanksOneKilled(kSize, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, kSize, seconds(30));
    auto owners = group->ownerCollectives(at::kCPU);
    EXPECT_EQ(Sum(*owners, 1000).end(), "");
    if (rank == kVictim) {
      std::this_thread::sleep_for(milliseconds(200));  // the others wait for it already
      die();
    }
    expectVictimNamed(*owners, "second", seconds(5));
    meet(store, "seen", rank, 2);
  });
}

TEST(Killed, inTheMiddleOfAnOperation) {
  // The moments fall before, into and after the payload, on whatever machine.
  for (int delay : {0, 1, 3, 10, 30}) {
    SCOPED_TRACE(delay);
    runRanksOneKilled(kSize, [delay](int rank, const Store& store) {
      Group group = makeGroup(store, rank, kSize, seconds(30));
      auto owners = group->ownerCollectives(at::kCPU);
      meet(store, "ready", rank, kSize);
      Sum sum(*owners, 2000000, "under way", seconds(5));
      if (rank == kVictim) {
        std::this_thread::sleep_for(milliseconds(delay));
        die();
      }
      std::string error;
      EXPECT_LT(secondsOf([&] { error = sum.end(); }), 5 + kGrace);
      if (!error.empty()) {
        EXPECT_NE(error.find("'under way'"), std::string::npos) << error;
        EXPECT_NE(error.find("rank 2"), std::string::npos) << error;
      }
      expectVictimNamed(*owners, "next", seconds(5));
      meet(store, "seen", rank, 2);
    });
  }
}

TEST(Killed, afterItsPartWhichTheOthersStillReceive) {
  for (int64_t numel : {100, 20000, 2000000}) {  // in the opening, in one piece, in many
    SCOPED_TRACE(numel);
    runRanksOneKilled(kSize, [numel](int rank, const Store& store) {
      Group group = makeGroup(store, rank, kSize, seconds(30));
      auto owners = group->ownerCollectives(at::kCPU);
      Sum sum(*owners, numel);
      const std::string error = sum.end();
      EXPECT_EQ(error, "");
      if (rank == kVictim) die();
      expectVictimNamed(*owners, "next", seconds(5));
      meet(store, "seen", rank, 2);
    });
  }
}

TEST(Killed, whileOperationsOfManyChannelsAreUnderWay) {
  runRanksOneKilled(kSize, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, kSize, seconds(5));
    std::vector<std::shared_ptr<OwnerCollectives>> channels;
    for (int i = 0; i < 4; ++i) {
      channels.push_back(group->newOwnerCollectives(at::kCPU, "role " + std::to_string(i)));
    }
    std::vector<Sum> sums;
    for (int round = 0; round < 5; ++round) {
      for (auto& channel : channels) sums.emplace_back(*channel, 300000);
    }
    if (rank == kVictim) {
      sums[1].work->wait();
      die();
    }
    // Each channel by itself: right up to some operation, and none right after a failed one.
    EXPECT_LT(secondsOf([&] {
                for (size_t channel = 0; channel < channels.size(); ++channel) {
                  bool failed = false;
                  for (size_t i = channel; i < sums.size(); i += channels.size()) {
                    const std::string error = sums[i].end();
                    failed = failed || !error.empty();
                    EXPECT_EQ(error.find("rank 2") != std::string::npos, failed) << error;
                  }
                }
              }),
              5 + kGrace);
    meet(store, "seen", rank, 2);
  });
}

void tellPid(const Store& store) {
  const std::string pid = std::to_string(::getpid());
  store->set("pid", std::vector<uint8_t>(pid.begin(), pid.end()));
}

// Lets the stopped rank go on.
void wakeVictim(const Store& store) {
  const std::vector<uint8_t> pid = store->get("pid");
  ASSERT_EQ(::kill(std::stoi(std::string(pid.begin(), pid.end())), SIGCONT), 0);
}

TEST(Stopped, aRankThatStopsBeforeItsPartIsNamedAndHearsWhyWhenItGoesOn) {
  runRanks(kSize, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, kSize, seconds(30));
    auto owners = group->ownerCollectives(at::kCPU);
    EXPECT_EQ(Sum(*owners, 1000).end(), "");
    if (rank == kVictim) {
      tellPid(store);
      ::raise(SIGSTOP);
      Sum late(*owners, 1000, "second");
      expectError([&] { late.work->wait(); }, {"operation 1 'second'", "has left the group",
                                               "rank 2 did not take part within 2000 ms"});
    } else {
      store->wait({"pid"});
      expectVictimNamed(*owners, "second", seconds(2));
      meet(store, "seen", rank, 2);
      if (rank == 0) wakeVictim(store);
    }
    meet(store, "heard", rank, kSize);
  });
}

TEST(Stopped, aRankThatStopsInTheMiddleIsNamedAndHearsWhyWhenItGoesOn) {
  for (int delay : {1, 6}) {
    SCOPED_TRACE(delay);
    runRanks(kSize, [delay](int rank, const Store& store) {
      Group group = makeGroup(store, rank, kSize, seconds(30));
      auto owners = group->ownerCollectives(at::kCPU);
      if (rank == kVictim) tellPid(store);
      meet(store, "ready", rank, kSize);
      Sum sum(*owners, 2000000, "under way", seconds(4));
      if (rank == kVictim) {
        std::this_thread::sleep_for(milliseconds(delay));
        ::raise(SIGSTOP);
        const std::string error = sum.end();  // "": its part was over when it stopped
        if (!error.empty()) {
          EXPECT_NE(error.find("has left the group"), std::string::npos) << error;
        }
        Sum next(*owners, 1000, "next");
        expectError([&] { next.work->wait(); }, {"'next'", "rank 2 did not take part within 4000"});
      } else {
        const std::string error = sum.end();
        if (!error.empty()) {
          EXPECT_NE(error.find("rank 2 did not take part within 4000 ms"), std::string::npos)
              << error;
        }
        expectVictimNamed(*owners, "next", seconds(4));
        meet(store, "seen", rank, 2);
        if (rank == 0) wakeVictim(store);
      }
      meet(store, "heard", rank, kSize);
    });
  }
}

// Stopped for less than the time-out, a rank is merely slow.
TEST(Stopped, aRankThatGoesOnInTimeDoesNoHarm) {
  runRanks(kSize, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, kSize, seconds(20));
    auto owners = group->ownerCollectives(at::kCPU);
    if (rank == kVictim) tellPid(store);
    meet(store, "ready", rank, kSize);
    Sum sum(*owners, 2000000);
    if (rank == kVictim) {
      ::raise(SIGSTOP);
    } else if (rank == 0) {
      std::this_thread::sleep_for(milliseconds(1500));
      wakeVictim(store);
    }
    EXPECT_EQ(sum.end(), "");
    meet(store, "done", rank, kSize);
  });
}

TEST(Leaving, aRankThatDestroysItsGroupIsNamed) {
  runRanks(kSize, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, kSize, seconds(30));
    auto owners = group->ownerCollectives(at::kCPU);
    EXPECT_EQ(Sum(*owners, 1000).end(), "");
    if (rank == kVictim) {
      owners.reset();
      EXPECT_LT(secondsOf([&] { group.reset(); }), 2.0);
    } else {
      expectVictimNamed(*owners, "second", seconds(2));
      EXPECT_LT(secondsOf([&] {
                  owners.reset();
                  group.reset();
                }),
                2.0);
    }
    meet(store, "done", rank, kSize);
  });
}

// The last operation of all: whoever is through with it may go at once.
TEST(Leaving, aRankThatEndsAfterTheLastOperationDisturbsNobody) {
  for (int64_t numel : {1, 3000, 300000}) {
    SCOPED_TRACE(numel);
    runRanks(kSize, [numel](int rank, const Store& store) {
      Group group = makeGroup(store, rank, kSize, seconds(20));
      auto owners = group->ownerCollectives(at::kCPU);
      for (int round = 0; round < 3; ++round) EXPECT_EQ(Sum(*owners, numel).end(), "");
      if (rank == kVictim) group->shutdown();
    });
  }
}

}  // namespace
}  // namespace dmuon
