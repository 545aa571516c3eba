// Owner collectives against a serial reference, bit for bit.
// transports: all nccl_double
#include <ATen/ops/zeros.h>

#include <dmuon/backend/factory.h>

#include "backend_cases.h"
#include "nccl_double.h"
#include "ranks.h"

namespace dmuon {
namespace {

using namespace dmuon::testing;

std::shared_ptr<OwnerCollectives> makeGroup(const Store& store, int rank, int size) {
  return createProcessGroup(store, rank, size, std::chrono::seconds(30), "test")
      ->ownerCollectives(at::kCPU);
}

// Ragged sizes, none, one, and more than a socket takes at once; owners: all ranks in turn, one
// rank of everything, the last of almost everything.
std::vector<Case> reduceCases(int size) {
  const std::vector<Shape> shapes{{5, 3},      {0},    {1}, {},        {4, 0, 2},
                                  {257, 1031}, {1025}, {7}, {2, 3, 4}, {64, 64}};
  const at::ScalarType all_types[] = {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble};
  std::vector<Case> cases;
  for (int pattern = 0; pattern < 3; ++pattern) {
    Case c;
    c.shapes = shapes;
    for (size_t i = 0; i < shapes.size(); ++i) {
      c.types.push_back(all_types[(i + pattern) % 4]);
      const int64_t owners[] = {static_cast<int64_t>(i) % size, 0,
                                i == 0 ? 0 : static_cast<int64_t>(size) - 1};
      c.owners.push_back(owners[pattern]);
    }
    cases.push_back(c);
  }
  cases.push_back(Case{});
  return cases;
}

void expectReduced(const Case& c, const Tensors& inputs, const Tensors& outputs, int rank, int size,
                   double divisor) {
  for (size_t i = 0; i < c.shapes.size(); ++i) {
    const std::string what = "tensor " + std::to_string(i);
    if (c.owners[i] == rank) {
      expectSame(outputs[i],
                 serialSum(ranksUpTo(size), static_cast<int>(i), c.shapes[i], c.types[i],
                           outputs[i].scalar_type(), divisor),
                 what);
    }
    if (!outputs[i].defined() || !outputs[i].is_same(inputs[i]) || c.owners[i] != rank) {
      expectSame(inputs[i], makeData(rank, static_cast<int>(i), c.shapes[i], c.types[i]),
                 what + " as input");
    }
  }
}

class OwnerCollectivesOf : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, OwnerCollectivesOf, ::testing::Range(1, 6));

TEST_P(OwnerCollectivesOf, reduceEqualsTheSerialSumBitForBit) {
  const int size = GetParam();
  runRanks(size, [size](int rank, const Store& store) {
    auto group = makeGroup(store, rank, size);
    for (const Case& c : reduceCases(size)) {
      for (double divisor : {1.0, static_cast<double>(size), 3.0}) {
        const Tensors inputs = c.dataOf(rank);
        Tensors outputs;  // the wire's dtype
        for (size_t i = 0; i < inputs.size(); ++i) {
          outputs.push_back(c.owners[i] == rank ? at::empty_like(inputs[i]) : at::Tensor());
        }
        OwnerOptions options;
        options.divisor = divisor;
        auto work = group->reduceToOwners(inputs, outputs, c.owners, options);
        EXPECT_TRUE(work->wait());
        expectReduced(c, inputs, outputs, rank, size, divisor);
        ASSERT_EQ(work->result().size(), inputs.size());
        for (size_t i = 0; i < inputs.size(); ++i) {
          EXPECT_EQ(work->result()[i].defined(), c.owners[i] == rank);
        }
      }
      Tensors inputs = c.dataOf(rank);  // the accumulation type
      Tensors outputs;
      for (const at::Tensor& t : inputs) {
        outputs.push_back(
            at::empty(t.sizes(), t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
      }
      group->reduceToOwners(inputs, outputs, c.owners)->wait();
      expectReduced(c, inputs, outputs, rank, size, 1.0);
      inputs = c.dataOf(rank);  // in place: on the owner only
      group->reduceToOwners(inputs, inputs, c.owners)->wait();
      expectReduced(c, inputs, inputs, rank, size, 1.0);
    }
  });
}

TEST_P(OwnerCollectivesOf, broadcastDeliversTheOwnersBytes) {
  const int size = GetParam();
  runRanks(size, [size](int rank, const Store& store) {
    auto group = makeGroup(store, rank, size);
    const at::ScalarType types[] = {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble,
                                    at::kLong,  at::kByte, at::kBool};
    for (Case c : reduceCases(size)) {
      for (size_t i = 0; i < c.types.size(); ++i) c.types[i] = types[i % 7];
      Tensors tensors = c.dataOf(rank);
      auto work = group->broadcastFromOwners(tensors, c.owners);
      EXPECT_TRUE(work->wait());
      for (size_t i = 0; i < tensors.size(); ++i) {
        expectSame(
            tensors[i],
            makeData(static_cast<int>(c.owners[i]), static_cast<int>(i), c.shapes[i], c.types[i]),
            "tensor " + std::to_string(i));
      }
      EXPECT_EQ(work->result().size(), tensors.size());
    }
  });
}

TEST(OwnerCollectives, sumsRunInRankOrderWhateverTheOwner) {
  runRanks(3, [](int rank, const Store& store) {
    auto group = makeGroup(store, rank, 3);
    // 1e8 + 1 + -1e8 in fp32: 0 from left to right, 1 in any order that cancels first.
    const float values[] = {1e8f, 1.0f, -1e8f};
    Tensors inputs(3, at::full({1}, values[rank], at::kFloat));
    Tensors outputs{at::empty({1}), at::empty({1}), at::empty({1})};
    group->reduceToOwners(inputs, outputs, {0, 1, 2})->wait();
    EXPECT_EQ(outputs[rank].item<float>(), 0.0f);
  });
}

TEST(OwnerCollectives, tensorsSideBySideInMemoryGiveTheSame) {
  runRanks(3, [](int rank, const Store& store) {
    auto group = makeGroup(store, rank, 3);
    // Views of one buffer, which travel without packing, and the same again with a gap.
    for (int64_t gap : {0, 1}) {
      at::Tensor flat = at::empty({300 + 2 * gap}, at::kFloat);
      Tensors views;
      for (int i = 0; i < 3; ++i) {
        views.push_back(flat.narrow(0, i * (100 + gap), 100));
        views[i].copy_(makeData(rank, i, {100}, at::kFloat));
      }
      const std::vector<int64_t> owners{1, 1, 1};
      Tensors outputs{at::empty({100}), at::empty({100}), at::empty({100})};
      group->reduceToOwners(views, outputs, owners)->wait();
      for (int i = 0; i < 3 && rank == 1; ++i) {
        expectSame(outputs[i], serialSum({0, 1, 2}, i, {100}, at::kFloat, at::kFloat, 1), "reduce");
      }
      group->broadcastFromOwners(views, owners)->wait();
      for (int i = 0; i < 3; ++i) {
        expectSame(views[i], makeData(1, i, {100}, at::kFloat), "broadcast");
      }
    }
  });
}

TEST(OwnerCollectives, manyOperationsOverlapWithEachOtherAndWithCollectives) {
  runRanks(4, [](int rank, const Store& store) {
    auto group = createProcessGroup(store, rank, 4, std::chrono::seconds(30));
    auto owners = group->ownerCollectives(at::kCPU);
    constexpr int kRounds = 25;
    std::vector<Tensors> sums, copies, totals;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int round = 0; round < kRounds; ++round) {
      const int64_t n = 1 + 997 * round;
      sums.push_back({at::empty({n}), at::empty({3})});
      copies.push_back({makeData(rank, 100 + round, {n}, at::kHalf)});
      totals.push_back({at::full({n}, rank + 1.0)});
      works.push_back(owners->reduceToOwners(
          {makeData(rank, round, {n}, at::kFloat), makeData(rank, round + 50, {3}, at::kFloat)},
          sums.back(), {round % 4, (round + 1) % 4}));
      works.push_back(group->allreduce(totals.back(), c10d::AllreduceOptions()));
      works.push_back(owners->broadcastFromOwners(copies.back(), {(round + 2) % 4}));
    }
    for (auto& work : works) work->wait();
    for (int round = 0; round < kRounds; ++round) {
      const int64_t n = 1 + 997 * round;
      if (rank == round % 4) {
        expectSame(sums[round][0], serialSum({0, 1, 2, 3}, round, {n}, at::kFloat, at::kFloat, 1),
                   "reduce");
      }
      if (rank == (round + 1) % 4) {
        expectSame(sums[round][1],
                   serialSum({0, 1, 2, 3}, round + 50, {3}, at::kFloat, at::kFloat, 1), "reduce 2");
      }
      expectSame(copies[round][0], makeData((round + 2) % 4, 100 + round, {n}, at::kHalf),
                 "broadcast");
      expectSame(totals[round][0], at::full({n}, 10.0), "allreduce");
    }
  });
}

TEST(OwnerCollectives, channelsOfOneGroupDoNotOrderAgainstEachOther) {
  runRanks(2, [](int rank, const Store& store) {
    auto group = createProcessGroup(store, rank, 2, std::chrono::seconds(30), "g");
    auto a = group->newOwnerCollectives(at::kCPU, "a");
    auto b = group->newOwnerCollectives(at::kCPU, "b");
    EXPECT_EQ(a->groupName(), "g/a");
    Tensors in{at::full({4}, rank + 1.0)}, out_a{at::empty({4})}, out_b{at::empty({4})};
    // Opposite orders on the two ranks, each waited for: would block if they shared an order.
    auto on_a = [&] { a->reduceToOwners(in, out_a, {0})->wait(); };
    auto on_b = [&] { b->reduceToOwners(in, out_b, {1})->wait(); };
    auto first_a = a->reduceToOwners(in, out_a, {0});
    (void)first_a;
    if (rank == 0) {
      auto pending = b->reduceToOwners(in, out_b, {1});
      on_a();
      pending->wait();
    } else {
      on_b();
      on_a();
    }
    first_a->wait();
    if (rank == 0) expectSame(out_a[0], at::full({4}, 3.0), "a");
    if (rank == 1) expectSame(out_b[0], at::full({4}, 3.0), "b");
  });
}

TEST(OwnerCollectives, channelsMadeInAnotherOrderAreAnError) {
  runRanks(2, [](int rank, const Store& store) {
    auto group = createProcessGroup(store, rank, 2, std::chrono::seconds(30), "g");
    // At the first operation, or, over NCCL, when the communicator is set up.
    const auto use = [&] {
      auto first = group->newOwnerCollectives(at::kCPU, rank == 0 ? "a" : "b");
      first->broadcastFromOwners({at::zeros({1})}, {0})->wait();
    };
    expectError(use, {"channel is 'a'", " on rank 0, ", "'b'", " on rank 1"});
  });
}

TEST(OwnerCollectives, subGroupsSumOverTheirMembersOnly) {
  runRanks(5, [](int rank, const Store& store) {
    auto world = createProcessGroup(store, rank, 5, std::chrono::seconds(30), "world");
    auto options = c10::make_intrusive<ProcessGroupDMuon::Options>(std::chrono::seconds(30));
    options->group_name = "some";
    const std::vector<int> members{1, 2, 4};
    auto split =
        world->split(c10::make_intrusive<c10d::PrefixStore>("split", store), members, options);
    const bool member = rank == 1 || rank == 2 || rank == 4;
    ASSERT_EQ(static_cast<bool>(split), member);
    if (member) {
      auto group = dmuonBackendOf(split)->ownerCollectives(at::kCPU);
      EXPECT_EQ(group->groupName(), "some");
      EXPECT_EQ(group->size(), 3);
      Tensors out{at::empty({1000})};
      group->reduceToOwners({makeData(rank, 0, {1000}, at::kFloat)}, out, {2})->wait();
      if (rank == 4) {
        expectSame(out[0], serialSum({1, 2, 4}, 0, {1000}, at::kFloat, at::kFloat, 1), "sub-group");
      }
    }
    expectUsable(*world->ownerCollectives(at::kCPU));
  });
}

TEST(OwnerCollectives, flagsAreOredOverTheRanks) {
  runRanks(3, [](int rank, const Store& store) {
    auto group = makeGroup(store, rank, 3);
    for (size_t length : {0, 1, 32, 33, 700}) {  // inside the header and in a message of their own
      OwnerOptions options;
      options.flags.assign(length, 0);
      for (size_t i = 0; i < length; ++i)
        options.flags[i] = i % 4 == static_cast<size_t>(rank) ? 1 << rank : 0;
      auto work = group->reduceToOwners({}, {}, {}, options);
      work->wait();
      const std::vector<uint8_t> flags = work->flags();
      ASSERT_EQ(flags.size(), length);
      for (size_t i = 0; i < length; ++i) EXPECT_EQ(flags[i], i % 4 == 3 ? 0 : 1 << (i % 4));
    }
  });
}

TEST(OwnerCollectives, anOperationReadsItsInputsAfterTheOneItComesAfter) {
  runRanks(2, [](int rank, const Store& store) {
    auto group = createProcessGroup(store, rank, 2, std::chrono::seconds(30));
    auto first = group->newOwnerCollectives(at::kCPU, "first");
    auto second = group->newOwnerCollectives(at::kCPU, "second");
    for (int round = 0; round < 10; ++round) {
      Tensors tensor{at::full({200000}, rank == 0 ? round + 1.0 : -1.0)};
      OwnerOptions options;
      options.flags = {static_cast<uint8_t>(rank == 1 ? 4 : 0)};
      auto one = first->broadcastFromOwners(tensor, {0}, options);
      Tensors sum{at::empty({200000})};
      options.flags = {static_cast<uint8_t>(rank == 0 ? 1 : 0)};
      options.after = one;
      options.inputs_from = one;
      auto two = second->reduceToOwners(tensor, sum, {1}, options);
      two->wait();
      EXPECT_TRUE(one->isCompleted());
      EXPECT_EQ(two->flags(), std::vector<uint8_t>{5});
      if (rank == 1) expectSame(sum[0], at::full({200000}, 2.0 * (round + 1)), "sum");
    }
  });
}

TEST(OwnerCollectives, theWorkTellsWhatItIsAndHowFarItIs) {
  runRanks(2, [](int rank, const Store& store) {
    auto group = makeGroup(store, rank, 2);
    group->drain();
    Tensors out{at::empty({4})};
    auto work = group->reduceToOwners({at::full({4}, 1.0)}, out, {rank == 0 ? 0 : 0});
    work->wait();
    EXPECT_TRUE(work->isCompleted());
    EXPECT_TRUE(work->isSuccess());
    EXPECT_EQ(work->exception(), nullptr);
    EXPECT_EQ(work->getSequencenumber(), 0u);
    EXPECT_EQ(work->retrieveOpType(), c10d::OpType::REDUCE);
    auto future = work->getFuture();
    EXPECT_TRUE(future->completed());
    EXPECT_EQ(future->value().toTensorVector().size(), 1u);

    // A wait that is too short throws and loses nothing.
    Tensors tensor{at::zeros({3})};
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(400));
    work = group->broadcastFromOwners(tensor, {1});
    if (rank == 0) {
      expectError([&] { work->wait(std::chrono::milliseconds(30)); }, {"operation 1", "30 ms"});
      EXPECT_FALSE(work->isCompleted());
      expectError([&] { work->result(); }, {"operation 1", "wait()"});
    }
    EXPECT_TRUE(work->wait());
    EXPECT_TRUE(work->wait());
  });
}

TEST(OwnerCollectives, countersFollowTheFormulas) {
  runRanks(3, [](int rank, const Store& store) {
    auto group = makeGroup(store, rank, 3);
    const Case c{
        {{100}, {7, 3}, {50}, {0}}, {at::kFloat, at::kHalf, at::kDouble, at::kFloat}, {0, 2, 2, 1}};
    const int64_t owned[] = {400, 0, 42 + 400};
    const int64_t total = 400 + 42 + 400;
    Tensors data = c.dataOf(rank);
    for (int round = 1; round <= 2; ++round) {
      group->reduceToOwners(data, data, c.owners)->wait();
      const OperationCounters reduce = group->counters().reduce;
      EXPECT_EQ(reduce.calls, round);
      EXPECT_EQ(reduce.tensors, 4 * round);
      EXPECT_EQ(reduce.bytes_sent, round * (total - owned[rank]));
      EXPECT_EQ(reduce.bytes_received, round * 2 * owned[rank]);
    }
    EXPECT_EQ(group->counters().broadcast.calls, 0);
    group->broadcastFromOwners(data, c.owners)->wait();
    const OperationCounters broadcast = group->counters().broadcast;
    EXPECT_EQ(broadcast.calls, 1);
    EXPECT_EQ(broadcast.bytes_sent, 2 * owned[rank]);
    EXPECT_EQ(broadcast.bytes_received, total - owned[rank]);
  });
}

}  // namespace
}  // namespace dmuon
