// Ranks that do not come, go away or give up: every other rank hears which and why, in time, and
// nothing hangs or leaks.
// transports: all
#include <ATen/core/ivalue.h>
#include <ATen/ops/zeros.h>

#include <future>
#include <thread>

#include "failure_cases.h"
#include "ranks.h"

namespace dmuon {
namespace {

using namespace dmuon::testing;

TEST(Failure, aRankThatDoesNotTakePartIsNamedAndTheGroupSaysSoFromThenOn) {
  runRanks(3, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, 3, seconds(30));
    auto owners = group->ownerCollectives(at::kCPU);
    if (rank != 2) {
      auto first = submit(*owners, "unit 1", {}, seconds(2));
      auto second = submit(*owners, "unit 2", {}, seconds(2));
      const double waited = secondsOf([&] {
        expectError([&] { first->wait(); },
                    {"reduce_to_owners on group 'shard' rank " + std::to_string(rank) +
                     " of 3, operation 0 'unit 1': rank 2 did not take part within 2000 ms"});
      });
      EXPECT_GT(waited, 1.5);
      EXPECT_LT(waited, 6.0);
      const double immediate = secondsOf([&] {
        expectError([&] { second->wait(); }, {"operation 1 'unit 2': the group is unusable",
                                              "operation 0 'unit 1'", "rank 2"});
        auto third = submit(*owners, "unit 3");
        expectError([&] { third->wait(); }, {"operation 2 'unit 3'", "unusable", "rank 2"});
        owners->drain();
      });
      EXPECT_LT(immediate, 1.0);
    }
    meet(store, "timed out", rank, 3);
    if (rank == 2) {  // late: hears at once that the others have given up, and why
      const double late = secondsOf([&] {
        auto work = submit(*owners, "unit 1");
        expectError([&] { work->wait(); },
                    {"has left the group", "rank 2 did not take part within 2000 ms"});
      });
      EXPECT_LT(late, 10.0);
    }
    // Ordinary collectives do not suffer.
    std::vector<at::Tensor> one{at::ones({2})};
    group->allreduce(one, c10d::AllreduceOptions())->wait();
    expectSame(one[0], at::full({2}, 3.0), "allreduce");
  });
}

TEST(Failure, aRankThatExitsIsNamedAtOnce) {
  runRanks(3, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, 3, seconds(30));
    auto owners = group->ownerCollectives(at::kCPU);
    submit(*owners, "together")->wait();
    if (rank == 2) ::_exit(0);
    const double waited = secondsOf([&] {
      auto work = submit(*owners, "alone");
      expectError([&] { work->wait(); }, {"operation 1 'alone'", "rank 2 is gone: ", "onnection"});
      auto next = submit(*owners, "next");
      expectError([&] { next->wait(); }, {"unusable", "rank 2 is gone"});
    });
    EXPECT_LT(waited, 10.0);
    meet(store, "seen", rank, 2);
  });
}

TEST(Failure, aRankThatExitsWithAnOperationUnderWayIsNamed) {
  runRanks(3, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, 3, seconds(30));
    auto owners = group->ownerCollectives(at::kCPU);
    Tensors big{at::zeros({4000000}), at::zeros({4000000}), at::zeros({4000000})};
    auto work = owners->reduceToOwners(big, big, {0, 1, 2});
    if (rank == 2) {
      std::this_thread::sleep_for(milliseconds(5));
      ::_exit(0);
    }
    const double waited = secondsOf([&] {
      try {
        work->wait();  // may have been fast enough
      } catch (const std::exception&) {
      }
      auto next = submit(*owners, "next");
      expectError([&] { next->wait(); }, {"rank 2"});
      meet(store, "noticed", rank, 2);  // leaving before, this rank would be the next to be named
    });
    EXPECT_LT(waited, 15.0);
    meet(store, "seen", rank, 2);  // neither may exit before the other has seen whose end it was
  });
}

TEST(Failure, aLateRankWithinTheTimeoutIsFine) {
  runRanks(2, [](int rank, const Store& store) {
    auto owners = makeGroup(store, rank, 2, seconds(10))->ownerCollectives(at::kCPU);
    if (rank == 1) std::this_thread::sleep_for(milliseconds(1500));
    submit(*owners, "late")->wait();
  });
}

TEST(Failure, anOperationsOwnTimeoutOverridesTheGroups) {
  runRanks(2, [](int rank, const Store& store) {
    auto owners = makeGroup(store, rank, 2, seconds(60))->ownerCollectives(at::kCPU);
    if (rank == 0) {
      OwnerOptions options;
      options.timeout = milliseconds(300);
      auto work = owners->broadcastFromOwners({at::zeros({1})}, {0}, options);
      expectError([&] { work->wait(); }, {"rank 1 did not take part within 300 ms"});
    }
    meet(store, "done", rank, 2);
  });
}

#ifdef DMUON_TORCH_HAS_ABORT_HOOKS
// torch's flight recorder, which listens there, may take longer than the time-out.
TEST(Failure, anErrorDoesNotWaitForThoseWhoAreToldOfIt) {
  runRanks(2, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, 2, seconds(60));
    std::promise<void> seen;
    std::atomic<int> told{0};
    group->registerAbortHook(1, [&, ended = seen.get_future().share()](auto&&...) {
      ended.wait();
      ++told;
    });
    auto owners = group->ownerCollectives(at::kCPU);
    if (rank == 0) {
      OwnerOptions options;
      options.timeout = milliseconds(300);
      auto work = owners->broadcastFromOwners({at::zeros({1})}, {0}, options);
      expectError([&] { work->wait(); }, {"rank 1 did not take part within 300 ms"});
      seen.set_value();
      group->shutdown();  // waits for whoever is being told
      EXPECT_EQ(told, 1);
    } else {
      seen.set_value();
    }
    meet(store, "done", rank, 2);
  });
}
#endif

TEST(Failure, setTimeoutReachesTheOwnerCollectives) {
  runRanks(2, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, 2, seconds(60));
    auto owners = group->ownerCollectives(at::kCPU);
    group->setTimeout(milliseconds(400));
    if (rank == 0) {
      auto work = submit(*owners, "x");
      expectError([&] { work->wait(); }, {"rank 1 did not take part within 400 ms"});
    }
    meet(store, "done", rank, 2);
  });
}

TEST(Failure, abortFailsWhatIsPendingHereAndOnThePeers) {
  runRanks(3, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, 3, seconds(30));
    auto owners = group->ownerCollectives(at::kCPU);
    const double waited = secondsOf([&] {
      if (rank == 1) {
        owners->abort("the user said so");
        auto work = submit(*owners, "later");
        expectError([&] { work->wait(); }, {"unusable: aborted: the user said so"});
      } else {
        auto work = submit(*owners, "pending");
        auto more = submit(*owners, "behind it");
        expectError([&] { work->wait(); },
                    {"rank 1 has left the group: aborted: the user said so"});
        expectError([&] { more->wait(); }, {"the user said so"});
      }
    });
    EXPECT_LT(waited, 10.0);
    meet(store, "done", rank, 3);
  });
}

TEST(Failure, abortEndsAnOperationThatIsWaitingForAPeer) {
  runRanks(2, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, 2, seconds(60));
    auto owners = group->ownerCollectives(at::kCPU);
    if (rank == 0) {
      auto work = submit(*owners, "waiting");
      std::this_thread::sleep_for(milliseconds(200));
      group->abort();
      const double waited = secondsOf([&] {
        expectError([&] { work->wait(); }, {"'waiting'", "aborted: the process group was aborted"});
      });
      EXPECT_LT(waited, 2.0);
    }
    meet(store, "done", rank, 2);
  });
}

// A Work that ends when the test says so.
class ManualWork : public c10d::Work {
 public:
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  c10::intrusive_ptr<c10::ivalue::Future> future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
};

TEST(Failure, abortEndsAnOperationThatIsWaitingForAnother) {
  runRanks(2, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, 2, seconds(60));
    auto owners = group->ownerCollectives(at::kCPU);
    if (rank == 0) {
      auto work = submit(*owners, "held back", c10::make_intrusive<ManualWork>());
      std::this_thread::sleep_for(milliseconds(100));
      EXPECT_FALSE(work->isCompleted());
      owners->abort("enough");
      const double waited = secondsOf([&] {
        expectError([&] { work->wait(); }, {"'held back'", "aborted: enough"});
      });
      EXPECT_LT(waited, 5.0);
    }
    meet(store, "done", rank, 2);
  });
}

TEST(Failure, anOperationWaitsForAnotherAsLongAsThatTakes) {
  runRanks(2, [](int rank, const Store& store) {
    auto owners = makeGroup(store, rank, 2, seconds(2))->ownerCollectives(at::kCPU);
    auto gate = c10::make_intrusive<ManualWork>();
    auto work = submit(*owners, "held back", gate);
    // Longer than the time-out on one rank; the other, held back as well, allows for it.
    std::this_thread::sleep_for(milliseconds(rank == 0 ? 2500 : 100));
    gate->future->markCompleted(c10::IValue(std::vector<at::Tensor>()));
    work->wait();
  });
}

TEST(Failure, destroyingAGroupWaitsForPendingOperationsAtMostForTheTimeout) {
  runRanks(2, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, 2, seconds(1));
    if (rank == 0) {
      auto work = submit(*group->ownerCollectives(at::kCPU), "never answered");
      const double waited = secondsOf([&] { group.reset(); });
      EXPECT_GT(waited, 0.8);
      EXPECT_LT(waited, 4.0);
      expectError([&] { work->wait(); }, {"'never answered'"});
    }
    meet(store, "destroyed", rank, 2);
  });
}

TEST(Failure, destroyingAGroupCompletesPendingOperationsWhosePeersCome) {
  runRanks(3, [](int rank, const Store& store) {
    std::vector<OwnerWorkPtr> works;
    {
      Group group = makeGroup(store, rank, 3, seconds(20));
      for (int i = 0; i < 10; ++i) works.push_back(submit(*group->ownerCollectives(at::kCPU), "x"));
    }
    for (auto& work : works) EXPECT_TRUE(work->wait());
  });
}

TEST(Failure, afterShutdownOperationsFailAndSayWhy) {
  runRanks(2, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, 2, seconds(10));
    auto owners = group->ownerCollectives(at::kCPU);
    submit(*owners, "before")->wait();
    group->shutdown();
    auto work = submit(*owners, "after");
    expectError([&] { work->wait(); }, {"'after'", "unusable: it was shut down"});
    group->shutdown();
  });
}

TEST(Failure, aGroupMayBeDestroyedByACallbackOfItsOwnOperation) {
  runRanks(2, [](int rank, const Store& store) {
    auto owners = makeGroup(store, rank, 2, seconds(5))->ownerCollectives(at::kCPU);
    std::promise<void> destroyed;
    auto gate = c10::make_intrusive<ManualWork>();
    auto work = submit(*owners, "x", gate);
    // The owner collectives' last reference is the callback's.
    auto holder = std::make_shared<std::shared_ptr<OwnerCollectives>>(std::move(owners));
    work->getFuture()->addCallback([holder, &destroyed](c10::ivalue::Future&) {
      holder->reset();
      destroyed.set_value();
    });
    gate->future->markCompleted(c10::IValue(std::vector<at::Tensor>()));
    EXPECT_EQ(destroyed.get_future().wait_for(seconds(10)), std::future_status::ready);
    EXPECT_TRUE(work->wait());
  });
}

TEST(Resources, creatingAndDestroyingGroupsLeaksNoThreadAndNoFile) {
  runRanks(2, [](int rank, const Store& store) {
    size_t threads = 0, files = 0;
    for (int cycle = 0; cycle < 20; ++cycle) {
      auto prefixed = c10::make_intrusive<c10d::PrefixStore>(std::to_string(cycle), store);
      {
        Group group = makeGroup(prefixed, rank, 2, seconds(20));
        auto channel = group->newOwnerCollectives(at::kCPU, "role");
        submit(*group->ownerCollectives(at::kCPU), "x")->wait();
        submit(*channel, "y")->wait();
      }
      if (cycle == 1) {  // whatever the process starts once
        threads = entriesOf("/proc/self/task");
        files = entriesOf("/proc/self/fd");
      }
    }
    EXPECT_EQ(entriesOf("/proc/self/task"), threads);
    // Fewer is no leak: of two connections that two ranks opened to each other at once, one ends
    // later.
    EXPECT_LE(entriesOf("/proc/self/fd"), files);
  });
}

TEST(Resources, anIdleGroupCostsNoThread) {
  runRanks(2, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, 2, seconds(20));
    const size_t before = entriesOf("/proc/self/task");
    auto owners = group->ownerCollectives(at::kCPU);
    EXPECT_EQ(entriesOf("/proc/self/task"), before);
    submit(*owners, "x")->wait();
    // The worker, and the watchdog that Gloo needs. (UCX's own thread, one per process, is there.)
    EXPECT_EQ(entriesOf("/proc/self/task"), before + (group->transportName() == "gloo" ? 2 : 1));
  });
}

TEST(Resources, aGroupOfOneRankNeedsNoThread) {
  runRanks(1, [](int rank, const Store& store) {
    Group group = makeGroup(store, rank, 1, seconds(20));
    const size_t before = entriesOf("/proc/self/task");
    submit(*group->ownerCollectives(at::kCPU), "x")->wait();
    EXPECT_EQ(entriesOf("/proc/self/task"), before);
  });
}

}  // namespace
}  // namespace dmuon
