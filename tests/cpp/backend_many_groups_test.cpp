// Many operations on many groups at once: nothing deadlocks, everything is right, nothing piles up.
// transports: all
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <random>
#include <thread>

#include <dmuon/backend/factory.h>

#include "backend_cases.h"
#include "failure_cases.h"
#include "ranks.h"

namespace dmuon {
namespace {

using namespace dmuon::testing;

constexpr int kRanks = 4;

// DMUON_TEST_OPERATIONS=10000 is the long form.
int operationsToRun() {
  const char* value = std::getenv("DMUON_TEST_OPERATIONS");
  return value != nullptr ? std::stoi(value) : 500;
}

// What a rank holds, once every group has been used and buffers have grown as far as they do.
struct Holdings {
  double megabytes = 0;
  size_t descriptors = 0;
  size_t threads = 0;
};

double residentMegabytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t all = 0, resident = 0;
  statm >> all >> resident;
  return static_cast<double>(resident * ::sysconf(_SC_PAGESIZE)) / (1 << 20);
}

Holdings holdings() {
  return {residentMegabytes(), entriesOf("/proc/self/fd"), entriesOf("/proc/self/task")};
}

struct Member {
  std::shared_ptr<OwnerCollectives> owners;
  std::vector<int> ranks;  // of the world
};

// The world, its rows {0, 1} and {2, 3}, its columns {0, 2} and {1, 3}, and {0, 1, 2}.
std::vector<Member> groupsOf(const Store& store, int rank) {
  const std::vector<std::vector<int>> all{{0, 1, 2, 3}, {0, 1}, {2, 3}, {0, 2}, {1, 3}, {0, 1, 2}};
  std::vector<Member> groups;
  for (size_t g = 0; g < all.size(); ++g) {
    const auto self = std::find(all[g].begin(), all[g].end(), rank);
    if (self == all[g].end()) {
      groups.push_back({nullptr, all[g]});
      continue;
    }
    auto prefixed = c10::make_intrusive<c10d::PrefixStore>(std::to_string(g), store);
    auto group = createProcessGroup(prefixed, static_cast<int>(self - all[g].begin()),
                                    static_cast<int>(all[g].size()), std::chrono::seconds(60));
    groups.push_back({group->ownerCollectives(at::kCPU), all[g]});
  }
  return groups;
}

// One operation as all ranks know it.
struct Plan {
  size_t group;
  bool reduce;
  int64_t numel;
  int number;
  int64_t owner;
};

std::vector<Plan> makePlans(int count, const std::vector<Member>& groups) {
  std::mt19937 random(7);
  std::vector<Plan> plans;
  for (int n = 0; n < count; ++n) {
    const size_t group = random() % groups.size();
    const int64_t sizes[] = {0, 1, 100, 1500, 3000, 70000};
    plans.push_back({group, random() % 2 == 0, sizes[random() % 6], n,
                     static_cast<int64_t>(random() % groups[group].ranks.size())});
  }
  return plans;
}

struct Pending {
  Plan plan;
  OwnerWorkPtr work;
  at::Tensor tensor;
};

Pending submit(const Plan& plan, const Member& member, int rank) {
  at::Tensor data = makeData(rank, plan.number, {plan.numel}, at::kFloat);
  OwnerWorkPtr work = plan.reduce ? member.owners->reduceToOwners({data}, {data}, {plan.owner})
                                  : member.owners->broadcastFromOwners({data}, {plan.owner});
  return {plan, std::move(work), std::move(data)};
}

void verify(const Pending& pending, const Member& member) {
  pending.work->wait();
  const Plan& plan = pending.plan;
  const std::string what = "operation " + std::to_string(plan.number);
  if (!plan.reduce) {
    expectSame(pending.tensor,
               makeData(member.ranks[plan.owner], plan.number, {plan.numel}, at::kFloat), what);
  } else if (member.owners->rank() == plan.owner) {
    expectSame(pending.tensor,
               serialSum(member.ranks, plan.number, {plan.numel}, at::kFloat, at::kFloat, 1), what);
  }
}

// Nothing may grow with the number of operations: 10 000 leave as much as 3 000 have.
TEST(ManyGroups, mixedOperationsInRankDependentTimingAllCompleteInConstantMemory) {
  runRanks(
      kRanks,
      [](int rank, const Store& store) {
        const std::vector<Member> groups = groupsOf(store, rank);
        for (const Member& member : groups) {  // every thread that a group needs is there now
          if (member.owners) expectUsable(*member.owners);
        }
        const int count = operationsToRun();
        constexpr size_t kUnderWay = 40;
        std::mt19937 random(rank);
        std::vector<Pending> pending;
        Holdings early;
        const std::vector<Plan> plans = makePlans(count, groups);
        for (size_t n = 0; n < plans.size(); ++n) {
          const Member& member = groups[plans[n].group];
          if (!member.owners) continue;
          if (random() % 16 == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
          }
          pending.push_back(submit(plans[n], member, rank));
          if (pending.size() < kUnderWay) continue;
          for (const Pending& one : pending) verify(one, groups[one.plan.group]);
          pending.clear();
          if (n < plans.size() / 3) early = holdings();
        }
        for (const Pending& one : pending) verify(one, groups[one.plan.group]);
        pending.clear();
        const Holdings late = holdings();
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // they hold memory back
        EXPECT_LT(late.megabytes, early.megabytes + 48);
#endif
        EXPECT_LE(late.descriptors, early.descriptors);
        EXPECT_EQ(late.threads, early.threads);
        if (rank == 0 && std::getenv("DMUON_TEST_OPERATIONS") != nullptr) {
          std::printf("%d operations: %.1f MB after a third of them, %.1f MB in the end\n", count,
                      early.megabytes, late.megabytes);
          std::fflush(stdout);  // a rank ends without
        }
      },
      std::chrono::seconds(250));
}

// The first use of every group, each rank beginning with another one.
TEST(ManyGroups, firstUsesMayComeInAnotherOrderOnEachRank) {
  runRanks(kRanks, [](int rank, const Store& store) {
    const std::vector<Member> groups = groupsOf(store, rank);
    std::vector<Pending> pending;
    for (size_t step = 0; step < groups.size(); ++step) {
      const size_t g = (step + rank) % groups.size();
      if (!groups[g].owners) continue;
      pending.push_back(submit({g, true, 5000, static_cast<int>(g), 1}, groups[g], rank));
    }
    for (const Pending& one : pending) verify(one, groups[one.plan.group]);
  });
}

}  // namespace
}  // namespace dmuon
