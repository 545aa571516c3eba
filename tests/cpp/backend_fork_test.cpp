// A process that forks after it has made a group, as data loaders do: in the child, using the group
// is an error at once, and however the child ends, the parent does not notice.
// transports: all
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "failure_cases.h"
#include "ranks.h"

// AddressSanitizer asks this at the start. In a child that ends by exit(), LeakSanitizer would find
// what only the parent's threads point to; and in a process that has forked children with UCX in
// use it has died itself (a fault in its tracer). The other tests look for leaks.
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }

namespace dmuon {
namespace {

using namespace dmuon::testing;

// Runs `body` in a forked child and returns how that ended, as waitpid() says it. Kills a child
// that has not ended after 20 s.
int inChild(const std::function<void()>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::alarm(20);
    body();
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = -1;
  ::waitpid(pid, &status, 0);
  return status;
}

// Not kept by anything that the child destroys.
void expectForkError(const std::function<void()>& use, const std::string& operation) {
  EXPECT_LT(secondsOf([&] {
              expectError(
                  use, {operation, "process " + std::to_string(::getpid()) +
                                       " was forked from process " + std::to_string(::getppid())});
            }),
            2.0);
}

TEST(Fork, usingAParentsGroupIsAnErrorAtOnceAndTheParentGoesOn) {
  runRanks(2, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, 2, seconds(20));
    auto owners = group->ownerCollectives(at::kCPU);
    expectUsable(*owners);
    // Pending: rank 1 comes when its child has ended.
    OwnerWorkPtr pending;
    if (rank == 0) pending = submit(*owners, "pending");
    EXPECT_EQ(
        inChild([&] {
          const std::string on_group = " on group 'shard' rank " + std::to_string(rank) + " of 2";
          expectForkError([&] { submit(*owners, "x"); }, "reduce_to_owners" + on_group);
          expectForkError([&] { owners->broadcastFromOwners({at::zeros({1})}, {0}); },
                          "broadcast_from_owners" + on_group);
          expectForkError([&] { owners->drain(); }, "drain" + on_group);
          expectForkError([&] { group->ownerCollectives(at::kCPU); }, on_group);
          if (pending) expectForkError([&] { pending->wait(); }, "operation 1 'pending'");
          std::vector<at::Tensor> one{at::zeros({1})};
          expectForkError([&] { group->allreduce(one, c10d::AllreduceOptions()); },
                          "allreduce" + on_group);
          expectForkError([&] { group->barrier(c10d::BarrierOptions()); }, "barrier" + on_group);
        }),
        0);
    if (rank == 1) pending = submit(*owners, "pending");
    EXPECT_TRUE(pending->wait());
    expectUsable(*owners);
  });
}

TEST(Fork, aChildMayDestroyItsCopyInAnyWay) {
  runRanks(2, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, 2, seconds(20));
    auto owners = group->ownerCollectives(at::kCPU);
    auto channel = group->newOwnerCollectives(at::kCPU, "role");
    expectUsable(*owners);
    OwnerWorkPtr pending;
    if (rank == 0) pending = submit(*owners, "pending", {}, {}, 500000);
    using Way = std::function<void()>;
    const std::vector<Way> ways{
        [] {},
        [&] { group->shutdown(); },
        [&] {
          owners->abort("in the child");
          group->abort();
        },
        [&] {
          pending.reset();
          channel.reset();
          owners.reset();
          group.reset();
        },
        [] { std::exit(0); },
        [&] {
          group.reset();
          owners.reset();
          channel.reset();
          std::exit(0);
        },
    };
    for (size_t i = 0; i < ways.size(); ++i) {
      EXPECT_EQ(inChild(ways[i]), 0) << "way " << i;
      std::vector<at::Tensor> one{at::full({2}, 1.0)};
      group->allreduce(one, c10d::AllreduceOptions())->wait();
      expectSame(one[0], at::full({2}, 2.0), "allreduce");
      expectUsable(*channel);
    }
    if (rank == 1) pending = submit(*owners, "pending", {}, {}, 500000);
    EXPECT_TRUE(pending->wait());
    expectUsable(*owners);
  });
}

TEST(Fork, workersMayComeAndGoWhileOperationsAreUnderWay) {
  runRanks(2, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, 2, seconds(20));
    auto owners = group->ownerCollectives(at::kCPU);
    for (int round = 0; round < 10; ++round) {
      std::vector<OwnerWorkPtr> works;
      for (int i = 0; i < 4; ++i) works.push_back(submit(*owners, "x", {}, {}, 100000));
      EXPECT_EQ(inChild([&] { expectForkError([&] { submit(*owners, "y"); }, "reduce"); }), 0);
      for (auto& work : works) EXPECT_TRUE(work->wait());
    }
    expectUsable(*owners);
  });
}

#if !defined(__SANITIZE_THREAD__)  // it refuses threads in a child of a process with threads
TEST(Fork, childrenMayMakeAGroupOfTheirOwn) {
  runRanks(2, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, 2, seconds(20));
    expectUsable(*group->ownerCollectives(at::kCPU));
    EXPECT_EQ(inChild([&] {
                auto own_store = c10::make_intrusive<c10d::PrefixStore>("child", store);
                if (group->transportName() == "ucx") {  // UCX cannot be used on both sides
                  expectError([&] { makeGroup(own_store, rank, 2, seconds(10)); },
                              {"rank 0", "rank 1", "was forked from one that uses UCX already"});
                  ::setenv("DMUON_TRANSPORT", "auto", 1);
                  own_store = c10::make_intrusive<c10d::PrefixStore>("child 2", store);
                }
                Group own = makeGroup(own_store, rank, 2, seconds(10));
                EXPECT_EQ(own->transportName(), "gloo");
                expectUsable(*own->ownerCollectives(at::kCPU));
                expectError([&] { group->ownerCollectives(at::kCPU); }, {"was forked"});
              }),
              0);
    expectUsable(*group->ownerCollectives(at::kCPU));
  });
}
#endif

}  // namespace
}  // namespace dmuon
