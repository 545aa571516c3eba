// The NCCL transport in real processes, over a double of NCCL on host memory.
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <thread>

#include <dmuon/backend/factory.h>
#include <dmuon/backend/mesh_owner_collectives.h>

#include "../../backend/src/nccl_owner_collectives.h"
#include "backend_cases.h"
#include "nccl_double.h"
#include "ranks.h"

namespace dmuon {
namespace {

using namespace dmuon::testing;
using namespace std::chrono_literals;

const auto api = ncclDouble();

struct With {
  NcclMode mode = {};
  std::chrono::milliseconds timeout = 20s;
  std::string role = "";
  int number = 0;
  std::shared_ptr<OwnerCollectives> host_channel = {};
};

std::shared_ptr<OwnerChannel> makeGroup(const Store& store, int rank, int size,
                                        const With& with = {}) {
  NcclOwnerCollectives::Setting setting;
  setting.api = api;
  setting.store = store;
  setting.rank = rank;
  setting.size = size;
  setting.number = with.number;
  setting.group = "g";
  setting.role = with.role;
  setting.device = c10::DeviceType::CPU;
  setting.mode = with.mode;
  setting.timeout = with.timeout;
  setting.host_channel = with.host_channel;
  return std::make_shared<NcclOwnerCollectives>(setting);
}

void meet(const Store& store, const std::string& what, int rank, int size) {
  store->set(what + std::to_string(rank), std::vector<uint8_t>{1});
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(what + std::to_string(r));
  store->wait(keys);
}

// Small whole numbers, whose sums are exact in every dtype and order.
at::Tensor exactData(int rank, int tensor, const Shape& shape, at::ScalarType type) {
  at::Tensor data = at::empty(shape, at::kFloat);
  float* out = data.mutable_data_ptr<float>();
  for (int64_t i = 0; i < data.numel(); ++i) out[i] = (rank * 7 + tensor * 3 + i) % 11 - 5;
  return data.to(type);
}

at::Tensor exactSum(int size, int tensor, const Shape& shape, at::ScalarType type) {
  at::Tensor sum = at::zeros(shape, at::kDouble);
  for (int rank = 0; rank < size; ++rank) {
    sum.add_(exactData(rank, tensor, shape, type).to(at::kDouble));
  }
  return sum;
}

// Even owners (padded), uneven ones, one owner, and no elements; one dtype, and all of them.
std::vector<Case> cases() {
  using at::kBFloat16, at::kDouble, at::kFloat, at::kHalf;
  return {
      {{{8, 4}, {32}, {31}, {32}}, {kFloat, kFloat, kFloat, kFloat}, {0, 1, 2, 3}},
      {{{40, 4}, {3}, {31}, {0}}, {kFloat, kFloat, kFloat, kFloat}, {0, 1, 3, 2}},
      {{{5}, {7}, {9}}, {kBFloat16, kBFloat16, kBFloat16}, {2, 2, 2}},
      {{{64}, {64}, {64}, {64}}, {kHalf, kHalf, kHalf, kHalf}, {3, 2, 1, 0}},
      {{{5, 3}, {100}, {0, 2}, {17}, {}, {33}, {64}, {20}},
       {kFloat, kHalf, kHalf, kBFloat16, kDouble, kFloat, kBFloat16, kDouble},
       {1, 3, 0, 1, 2, 1, 0, 0}},
  };
}

TEST(NcclDouble, everyRouteGivesTheExactSum) {
  runRanks(4, [](int rank, const Store& store) {
    const NcclMode modes[] = {{}, {.deterministic = true}, {.fp32_accumulation = true}};
    for (int m = 0; m < 3; ++m) {
      auto group = makeGroup(store, rank, 4, {.mode = modes[m], .number = m});
      for (const Case& c : cases()) {
        for (double divisor : {1.0, 4.0}) {
          Tensors inputs, outputs;
          for (size_t i = 0; i < c.shapes.size(); ++i) {
            inputs.push_back(exactData(rank, static_cast<int>(i), c.shapes[i], c.types[i]));
            outputs.push_back(c.owners[i] == rank ? at::empty(c.shapes[i], c.types[i])
                                                  : at::Tensor());
          }
          OwnerOptions options;
          options.divisor = divisor;
          group->reduceToOwners(inputs, outputs, c.owners, options)->wait();
          for (size_t i = 0; i < c.shapes.size(); ++i) {
            const std::string what = c10::str("mode ", m, " tensor ", i, " by ", divisor);
            expectSame(inputs[i], exactData(rank, static_cast<int>(i), c.shapes[i], c.types[i]),
                       what + " as input");
            if (c.owners[i] != rank) continue;
            const at::Tensor sum = exactSum(4, static_cast<int>(i), c.shapes[i], c.types[i]);
            expectSame(outputs[i], (sum / divisor).to(c.types[i]), what);
          }
        }
      }
    }
  });
}

TEST(NcclDouble, fp32AccumulationIsThatOfTheCpuForHalfPrecision) {
  runRanks(4, [](int rank, const Store& store) {
    auto group = makeGroup(store, rank, 4, {.mode = {.fp32_accumulation = true}});
    auto plain = makeGroup(store, rank, 4, {.number = 1});
    const Case c{{{1000}, {999}}, {at::kBFloat16, at::kHalf}, {1, 2}};
    const Tensors inputs = c.dataOf(rank);
    Tensors wide{at::empty({1000}, at::kFloat), at::empty({999}, at::kFloat)};
    Tensors rounded{at::empty({1000}, at::kBFloat16), at::empty({999}, at::kHalf)};
    OwnerOptions options;
    options.divisor = 3;
    group->reduceToOwners(inputs, wide, c.owners, options)->wait();
    plain->reduceToOwners(inputs, rounded, c.owners, options)->wait();
    for (int i = 0; i < 2; ++i) {
      if (c.owners[i] != rank) continue;
      expectSame(wide[i], serialSum({0, 1, 2, 3}, i, c.shapes[i], c.types[i], at::kFloat, 3),
                 "sum");
      // The test can tell the two apart.
      EXPECT_FALSE(at::equal(rounded[i],
                             serialSum({0, 1, 2, 3}, i, c.shapes[i], c.types[i], c.types[i], 3)));
    }
  });
}

TEST(NcclDouble, flatBuffersAreUsedInPlace) {
  runRanks(4, [](int rank, const Store& store) {
    auto group = makeGroup(store, rank, 4);
    const at::Tensor flat = at::empty({64});
    Tensors views;
    for (int i = 0; i < 4; ++i) {
      views.push_back(flat.narrow(0, 16 * i, 16));
      views[i].copy_(exactData(rank, i, {16}, at::kFloat));
    }
    const std::vector<int64_t> owners{0, 1, 2, 3};
    group->reduceToOwners(views, views, owners)->wait();
    for (int i = 0; i < 4; ++i) {
      const at::Tensor expected = i == rank ? exactSum(4, i, {16}, at::kFloat).to(at::kFloat)
                                            : exactData(rank, i, {16}, at::kFloat);
      expectSame(views[i], expected, "reduce");
    }
    group->broadcastFromOwners(views, owners)->wait();
    for (int i = 0; i < 4; ++i) {
      expectSame(views[i], exactSum(4, i, {16}, at::kFloat).to(at::kFloat), "broadcast");
    }
  });
}

TEST(NcclDouble, aLongChainOverTwoChannelsIsOrderedByEventsAlone) {
  runRanks(2, [](int rank, const Store& store) {
    auto first = makeGroup(store, rank, 2, {.number = 1});
    auto second = makeGroup(store, rank, 2, {.number = 2});
    std::vector<OwnerWorkPtr> works;
    std::vector<Tensors> tensors, sums;
    for (int round = 0; round < 30; ++round) {
      tensors.push_back({at::full({50000}, rank == 0 ? round + 1.0 : -1.0)});
      sums.push_back({at::empty({50000})});
      OwnerOptions options;
      options.flags = {static_cast<uint8_t>(rank == 1 ? 4 : 0)};
      auto one = first->broadcastFromOwners(tensors.back(), {0}, options);
      options.flags = {static_cast<uint8_t>(rank == 0 ? 1 : 0)};
      options.inputs_from = one;
      works.push_back(second->reduceToOwners(tensors.back(), sums.back(), {1}, options));
    }
    for (int round = 0; round < 30; ++round) {
      works[round]->wait();
      EXPECT_EQ(works[round]->flags(), std::vector<uint8_t>{5});
      if (rank == 1) expectSame(sums[round][0], at::full({50000}, 2.0 * (round + 1)), "sum");
    }
    first->drain();
    second->drain();
  });
}

TEST(NcclDouble, anOperationComesAfterAWorkOfTheHost) {
  runRanks(2, [](int rank, const Store& store) {
    auto host = createProcessGroup(store, rank, 2, 20s, "host")->ownerCollectives(at::kCPU);
    auto group = makeGroup(c10::make_intrusive<c10d::PrefixStore>("n", store), rank, 2);
    Tensors t{at::full({100000}, rank == 0 ? 3.0 : 0.0)};
    OwnerOptions options;
    options.flags = {static_cast<uint8_t>(1 << rank)};
    auto one = host->broadcastFromOwners(t, {0}, options);
    options.flags.clear();
    options.inputs_from = one;
    auto two = group->reduceToOwners(t, t, {1}, options);
    two->wait();
    EXPECT_EQ(two->flags(), std::vector<uint8_t>{3});
    if (rank == 1) expectSame(t[0], at::full({100000}, 6.0), "sum");
  });
}

TEST(NcclDouble, ranksThatAskForDifferentChannelsAreNamedAtOnce) {
  runRanks(3, [](int rank, const Store& store) {
    expectError([&] { makeGroup(store, rank, 3, {.mode = {.deterministic = rank == 1}}); },
                {"the ranks do not ask for the same channel", "'deterministic is ", "on rank 1"});
    expectError(
        [&] { makeGroup(store, rank, 3, {.role = rank == 2 ? "reduce" : "unshard", .number = 1}); },
        {"'the channel is 'unshard'' on ranks 0 and 1", "'the channel is 'reduce'' on rank 2"});
    if (rank == 0) return;
    expectError([&] { makeGroup(store, rank, 3, {.timeout = 300ms, .number = 2}); },
                {"new NCCL channel on group 'g'", "rank 0 did not come within 300 ms"});
  });
}

TEST(NcclDouble, aTimeOutNamesTheRankThatDidNotCome) {
  runRanks(3, [](int rank, const Store& store) {
    auto group = makeGroup(store, rank, 3, {.timeout = 1500ms});
    expectUsable(*group);
    if (rank != 1) {
      Tensors t{at::zeros({4})};
      OwnerOptions options;
      options.label = "unit";
      options.flags.assign(1, 0);  // so that every rank waits for every other
      auto work = group->reduceToOwners(t, t, {0}, options);
      expectError([&] { work->wait(); }, {"reduce_to_owners on group 'g'", "operation 1 'unit'",
                                          "rank 1 did not take part within 1500 ms"});
      EXPECT_FALSE(work->isSuccess());
      auto next = group->reduceToOwners(t, t, {0}, options);
      EXPECT_TRUE(next->isCompleted());
      expectError([&] { next->wait(); }, {"operation 2 'unit': the group is unusable", "rank 1"});
    }
    meet(store, "done", rank, 3);
  });
}

TEST(NcclDouble, aRefusalOnOneRankReachesTheOthersLongBeforeTheTimeOut) {
  runRanks(3, [](int rank, const Store& store) {
    auto group = makeGroup(store, rank, 3, {.timeout = 40s});
    Tensors t{rank == 2 ? at::zeros({8, 5}).t() : at::zeros({5, 8})};
    OwnerOptions options;
    options.flags.assign(1, 0);
    if (rank == 2) {
      expectError([&] { group->reduceToOwners(t, t, {0}, options); },
                  {"operation 0: input 0 (Float[5, 8] with strides [1, 5]) is not contiguous",
                   "DMUON_DEBUG=1"});
    } else {
      auto work = group->reduceToOwners(t, t, {0}, options);
      expectError([&] { work->wait(); }, {"operation 0", "rank 2 says", "is not contiguous"});
    }
    meet(store, "done", rank, 3);
  });
}

TEST(NcclDouble, whatAllRanksRefuseLeavesTheGroupUsable) {
  runRanks(3, [](int rank, const Store& store) {
    auto group = makeGroup(store, rank, 3);
    Tensors t{at::zeros({4})};
    expectError([&] { group->reduceToOwners(t, t, {3}); }, {"owner 3 of tensor 0 is out of range"});
    expectUsable(*group);
    EXPECT_EQ(group->counters().reduce.calls, 2);
  });
}

TEST(NcclDouble, callsThatDoNotMatchAreAnError) {
  runRanks(2, [](int rank, const Store& store) {
    auto group = makeGroup(store, rank, 2);
    Tensors t{at::zeros({rank == 0 ? 4 : 5})};
    auto work = group->broadcastFromOwners(t, {0});
    if (rank == 1) expectError([&] { work->wait(); }, {"a peer calls"});
    meet(store, "done", rank, 2);
  });
}

TEST(NcclDouble, abortReachesTheOtherRanksWithItsReason) {
  runRanks(3, [](int rank, const Store& store) {
    auto group = makeGroup(store, rank, 3, {.timeout = 40s});
    Tensors t{at::zeros({4})};
    if (rank == 0) {
      group->abort("enough");
      expectError([&] { group->reduceToOwners(t, t, {1})->wait(); },
                  {"the group is unusable: aborted: enough"});
    } else {
      OwnerOptions options;
      options.flags.assign(1, 0);
      auto work = group->reduceToOwners(t, t, {1}, options);
      expectError([&] { work->wait(); }, {"says: aborted: enough"});
    }
    group->drain();
    meet(store, "done", rank, 3);
  });
}

TEST(NcclDouble, whatComesAfterAFailedOperationFailsOnEveryRankOfItsOwnGroup) {
  runRanks(3, [](int rank, const Store& store) {
    // Ranks 0 and 1 share `pair`, where rank 1 does not come; all share `all`.
    std::shared_ptr<OwnerChannel> pair;
    auto all = makeGroup(store, rank, 3, {.timeout = 40s, .number = 1});
    if (rank < 2) {
      pair = makeGroup(c10::make_intrusive<c10d::PrefixStore>("pair", store), rank, 2,
                       {.timeout = 1000ms});
    }
    Tensors t{at::ones({4})}, sum{at::zeros({4})};
    OwnerOptions options;
    options.flags.assign(1, 0);
    if (rank == 0) options.after = pair->reduceToOwners(t, t, {0});
    auto work = all->reduceToOwners(t, sum, {2}, options);
    expectError([&] { work->wait(); },
                {"operation 0", "the operation that it was to come after has failed",
                 "rank 1 did not take part within 1000 ms"});
    meet(store, "done", rank, 3);
  });
}

TEST(NcclDouble, shuttingDownWithPendingOperationsEnds) {
  runRanks(2, [](int rank, const Store& store) {
    auto group = makeGroup(store, rank, 2, {.timeout = 1000ms});
    Tensors t{at::zeros({4})};
    OwnerWorkPtr work;
    if (rank == 0) work = group->broadcastFromOwners(t, {1});
    group->shutdown();
    if (rank == 0) {
      EXPECT_FALSE(work->isSuccess());
      expectError([&] { work->wait(); }, {"operation 0"});
    }
    expectError([&] { group->reduceToOwners(t, t, {1})->wait(); }, {"the group is unusable"});
  });
}

// Debug mode, over a CPU transport and over the store.
void expectAgreement(bool over_store) {
  runRanks(3, [over_store](int rank, const Store& store) {
    ::setenv("DMUON_DEBUG", "1", 1);
    With with{.timeout = 30s};
    c10::intrusive_ptr<ProcessGroupDMuon> process_group;
    if (!over_store) {
      process_group = createProcessGroup(store, rank, 3, 30s, "host");
      with.host_channel = process_group->newOwnerCollectives(at::kCPU, "");
    }
    auto group = makeGroup(c10::make_intrusive<c10d::PrefixStore>("n", store), rank, 3, with);
    const auto reduce = [&](int64_t length, int64_t owner, const std::string& label) {
      Tensors t{at::zeros({length})};
      OwnerOptions options;
      options.label = label;
      group->reduceToOwners(t, t, {owner}, options)->wait();
    };
    expectUsable(*group);
    expectError([&] { reduce(rank == 2 ? 5 : 4, 0, "u"); },
                {"'u'", "tensor 0 is Float[4] owned by rank 0", "on ranks 0 and 1",
                 "Float[5] owned by rank 0", "on rank 2", "No data has moved"});
    expectUsable(*group);
    expectError([&] { reduce(4, 0, rank == 1 ? "other" : "u"); },
                {"the label is 'u' on ranks 0 and 2, 'other' on rank 1"});
    expectError([&] { reduce(4, rank == 0 ? 7 : 1, "u"); },
                {rank == 0 ? "owner 7 of tensor 0 is out of range" : "rank 0 cannot take part",
                 "owner 7 of tensor 0"});
    expectError(
        [&] {
          Tensors t{at::zeros({4})};
          if (rank == 1) {
            group->broadcastFromOwners(t, {0})->wait();
          } else {
            group->reduceToOwners(t, t, {0})->wait();
          }
        },
        {"the operation is reduce_to_owners on ranks 0 and 2, broadcast_from_owners on rank 1"});
    expectUsable(*group);
  });
}

TEST(NcclDouble, debugModeComparesOverTheCpuTransport) { expectAgreement(false); }
TEST(NcclDouble, debugModeComparesOverTheStore) { expectAgreement(true); }

// With and without parts, which are many small operations on each group.
void expectMeshWorks(int64_t part_bytes, int64_t parts) {
  runRanks(4, [=](int rank, const Store& store) {
    const int row = rank / 2, column = rank % 2;
    const auto part = [&](const std::string& name) {
      return c10::make_intrusive<c10d::PrefixStore>(name, store);
    };
    auto shard = makeGroup(part("row" + std::to_string(row)), column, 2);
    auto replicate = makeGroup(part("column" + std::to_string(column)), row, 2);
    MeshOwnerCollectives mesh(replicate, shard);
    mesh.setPartBytes(part_bytes);
    const std::vector<Slot> owners{{0, 0}, {1, 1}, {1, 0}, {0, 1}, {0, 0}, {1, 1}, {1, 0}, {0, 0}};
    const int count = static_cast<int>(owners.size());
    Tensors inputs, outputs;
    for (int i = 0; i < count; ++i) {
      inputs.push_back(exactData(rank, i, {30 + i}, at::kFloat));
      outputs.push_back(owners[i] == mesh.slot() ? at::empty({30 + i}) : at::Tensor());
    }
    OwnerOptions options;
    options.divisor = 2;
    options.flags = {static_cast<uint8_t>(1 << rank), 0};
    auto work = mesh.reduceToOwners(inputs, outputs, owners, options);
    EXPECT_TRUE(work->wait());
    EXPECT_EQ(work->flags(), (std::vector<uint8_t>{15, 0}));
    EXPECT_EQ(work->result().size(), owners.size());
    EXPECT_EQ(shard->counters().reduce.calls, parts);
    EXPECT_EQ(replicate->counters().reduce.calls, parts);
    work->getFuture()->wait();
    EXPECT_EQ(work->getFuture()->value().toTensorVector().size(), owners.size());
    for (int i = 0; i < count; ++i) {
      if (!outputs[i].defined()) continue;
      expectSame(outputs[i], (exactSum(4, i, {30 + i}, at::kFloat) / 2).to(at::kFloat), "reduce");
    }
    Tensors copies;
    for (int i = 0; i < count; ++i) copies.push_back(exactData(rank, i, {30 + i}, at::kFloat));
    mesh.broadcastFromOwners(copies, owners)->wait();
    for (int i = 0; i < count; ++i) {
      const int owner = static_cast<int>(owners[i].replicate * 2 + owners[i].shard);
      expectSame(copies[i], exactData(owner, i, {30 + i}, at::kFloat), "broadcast");
    }
  });
}

TEST(NcclDouble, aMeshOfChannelsIsOneOperationOnTheDevice) { expectMeshWorks(1 << 20, 1); }
// Owner (0, 0) has 404 bytes in three tensors.
TEST(NcclDouble, aMeshMovesLongListsInParts) { expectMeshWorks(150, 2); }

TEST(NcclDouble, oneRankNeedsNeitherStoreNorCommunicator) {
  runRanks(1, [](int, const Store&) {
    auto group = makeGroup({}, 0, 1, {.mode = {.deterministic = true}});
    Tensors in{at::full({4}, 3.0), at::full({2}, 5.0, at::kHalf)};
    Tensors out{at::empty({4}), at::empty({2})};
    OwnerOptions options;
    options.divisor = 2;
    options.flags = {6};
    auto work = group->reduceToOwners(in, out, {0, 0}, options);
    work->wait();
    EXPECT_EQ(work->flags(), std::vector<uint8_t>{6});
    expectSame(out[0], at::full({4}, 1.5), "sum");
    expectSame(out[1], at::full({2}, 2.5), "half");
    group->broadcastFromOwners(in, {0, 0})->wait();
    expectSame(in[0], at::full({4}, 3.0), "broadcast");
  });
}

}  // namespace
}  // namespace dmuon
