// Owner collectives in two stages over a (replicate, shard) mesh.
// transports: all nccl_double:debug
#include <ATen/ops/zeros.h>

#include <thread>

#include <dmuon/backend/factory.h>
#include <dmuon/backend/mesh_owner_collectives.h>

#include "backend_cases.h"
#include "nccl_double.h"
#include "ranks.h"

namespace dmuon {
namespace {

using namespace dmuon::testing;

struct MeshSize {
  int rows;
  int columns;
  int size() const { return rows * columns; }
};

std::ostream& operator<<(std::ostream& out, const MeshSize& mesh) {
  return out << mesh.rows << "x" << mesh.columns;
}

// Rank r * columns + g is slot (r, g). A dimension of size 1 has no group.
struct Mesh {
  MeshSize shape;
  Slot slot;
  std::shared_ptr<OwnerCollectives> replicate;
  std::shared_ptr<OwnerCollectives> shard;
  std::unique_ptr<MeshOwnerCollectives> collectives;

  Mesh(const Store& store, int rank, MeshSize shape,
       std::chrono::milliseconds timeout = std::chrono::seconds(30))
      : shape(shape), slot{rank / shape.columns, rank % shape.columns} {
    const auto group = [&](const std::string& name, int64_t which, int64_t rank, int size) {
      if (size == 1) return std::shared_ptr<OwnerCollectives>();
      auto own = c10::make_intrusive<c10d::PrefixStore>(name + std::to_string(which), store);
      return createProcessGroup(own, static_cast<int>(rank), size, timeout, name)
          ->ownerCollectives(at::kCPU);
    };
    replicate = group("replicate", slot.shard, slot.replicate, shape.rows);
    shard = group("shard", slot.replicate, slot.shard, shape.columns);
    collectives = std::make_unique<MeshOwnerCollectives>(replicate, shard);
  }
};

struct MeshCase {
  Case list;  // its owners are flat ranks
  std::vector<Slot> owners;

  explicit MeshCase(MeshSize mesh) {
    const at::ScalarType types[] = {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble};
    const std::vector<Shape> shapes{{17, 5}, {0}, {1}, {1000}, {33, 3}, {4, 4}, {257, 31}, {9}};
    for (size_t i = 0; i < shapes.size(); ++i) {
      list.shapes.push_back(shapes[i]);
      list.types.push_back(types[i % 4]);
      list.owners.push_back(static_cast<int64_t>(i * 5 + 1) % mesh.size());
      owners.push_back({list.owners[i] / mesh.columns, list.owners[i] % mesh.columns});
    }
  }
};

// Sum inside each row, rounded to the wire's dtype, then the rows' sums, then one division.
at::Tensor twoStageSum(MeshSize mesh, int tensor, const Shape& shape, at::ScalarType type,
                       at::ScalarType out_type, double divisor) {
  at::Tensor result = at::empty(shape, out_type);
  if (mesh.rows == 1 || mesh.columns == 1) {
    return serialSum(ranksUpTo(mesh.size()), tensor, shape, type, out_type, divisor);
  }
  Tensors rows;
  for (int r = 0; r < mesh.rows; ++r) {
    std::vector<int> ranks;
    for (int g = 0; g < mesh.columns; ++g) ranks.push_back(r * mesh.columns + g);
    rows.push_back(serialSum(ranks, tensor, shape, type, type, 1.0));
  }
  withType(type, [&](auto zero) {
    using T = decltype(zero);
    using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;
    withType(out_type, [&](auto out_zero) {
      using Out = decltype(out_zero);
      for (int64_t i = 0; i < result.numel(); ++i) {
        Acc sum = static_cast<Acc>(rows[0].const_data_ptr<T>()[i]);
        for (int r = 1; r < mesh.rows; ++r) sum += static_cast<Acc>(rows[r].const_data_ptr<T>()[i]);
        if (divisor != 1.0) sum /= static_cast<Acc>(divisor);
        result.mutable_data_ptr<Out>()[i] = static_cast<Out>(sum);
      }
    });
  });
  return result;
}

class MeshCollectives : public ::testing::TestWithParam<MeshSize> {};
INSTANTIATE_TEST_SUITE_P(Shapes, MeshCollectives,
                         ::testing::Values(MeshSize{1, 1}, MeshSize{1, 4}, MeshSize{4, 1},
                                           MeshSize{2, 2}, MeshSize{2, 3}),
                         ::testing::PrintToStringParamName());

TEST_P(MeshCollectives, reduceEqualsTheSerialTwoStageSum) {
  const MeshSize shape = GetParam();
  runRanks(shape.size(), [shape](int rank, const Store& store) {
    Mesh mesh(store, rank, shape);
    EXPECT_EQ(mesh.collectives->slot(), mesh.slot);
    EXPECT_EQ(mesh.collectives->replicateSize(), shape.rows);
    EXPECT_EQ(mesh.collectives->shardSize(), shape.columns);
    const MeshCase c(shape);
    for (double divisor : {1.0, static_cast<double>(shape.size())}) {
      const Tensors inputs = c.list.dataOf(rank);
      Tensors outputs(inputs.size());
      for (size_t i = 0; i < inputs.size(); ++i) {
        // Half of the outputs in the accumulation type.
        const auto type =
            i % 2 == 1 && c.list.types[i] != at::kDouble ? at::kFloat : c.list.types[i];
        if (c.owners[i] == mesh.slot) outputs[i] = at::empty(c.list.shapes[i], type);
      }
      OwnerOptions options;
      options.divisor = divisor;
      options.label = "unit";
      options.flags.assign(shape.size(), 0);
      options.flags[rank] = 1;
      auto work = mesh.collectives->reduceToOwners(inputs, outputs, c.owners, options);
      EXPECT_TRUE(work->wait());
      EXPECT_EQ(work->flags(), std::vector<uint8_t>(shape.size(), 1));
      ASSERT_EQ(work->result().size(), inputs.size());
      for (size_t i = 0; i < inputs.size(); ++i) {
        const std::string what = "tensor " + std::to_string(i);
        expectSame(inputs[i],
                   makeData(rank, static_cast<int>(i), c.list.shapes[i], c.list.types[i]),
                   what + " as input");
        if (c.owners[i] != mesh.slot) continue;
        expectSame(outputs[i],
                   twoStageSum(shape, static_cast<int>(i), c.list.shapes[i], c.list.types[i],
                               outputs[i].scalar_type(), divisor),
                   what);
        expectSame(work->result()[i], outputs[i], what + " in the work's result");
      }
    }
  });
}

TEST_P(MeshCollectives, reduceInPlaceWritesToTheOwnersTensorOnly) {
  const MeshSize shape = GetParam();
  runRanks(shape.size(), [shape](int rank, const Store& store) {
    Mesh mesh(store, rank, shape);
    const MeshCase c(shape);
    const Tensors tensors = c.list.dataOf(rank);
    mesh.collectives->reduceToOwners(tensors, tensors, c.owners)->wait();
    for (size_t i = 0; i < tensors.size(); ++i) {
      const int number = static_cast<int>(i);
      expectSame(
          tensors[i],
          c.owners[i] == mesh.slot
              ? twoStageSum(shape, number, c.list.shapes[i], c.list.types[i], c.list.types[i], 1.0)
              : makeData(rank, number, c.list.shapes[i], c.list.types[i]),
          "tensor " + std::to_string(i));
    }
  });
}

TEST_P(MeshCollectives, broadcastDeliversTheOwnersBytesToAllSlots) {
  const MeshSize shape = GetParam();
  runRanks(shape.size(), [shape](int rank, const Store& store) {
    Mesh mesh(store, rank, shape);
    const MeshCase c(shape);
    const Tensors tensors = c.list.dataOf(rank);
    OwnerOptions options;
    options.flags = {static_cast<uint8_t>(1 << rank)};
    auto work = mesh.collectives->broadcastFromOwners(tensors, c.owners, options);
    work->wait();
    EXPECT_EQ(work->flags(), std::vector<uint8_t>{static_cast<uint8_t>((1 << shape.size()) - 1)});
    for (size_t i = 0; i < tensors.size(); ++i) {
      expectSame(tensors[i],
                 makeData(static_cast<int>(c.list.owners[i]), static_cast<int>(i), c.list.shapes[i],
                          c.list.types[i]),
                 "tensor " + std::to_string(i));
    }
  });
}

// Many pieces per stage, small tensors between large ones, bf16 summed to fp32, again and again
// into the same memory: a piece that the second stage took too early would be wrong.
TEST(Mesh, largeListsAreRightWhileTheStagesOverlap) {
  constexpr MeshSize kShape{2, 2};
  Case list;
  std::vector<Slot> owners;
  for (int i = 0; i < 10; ++i) {
    list.shapes.push_back(i % 3 == 2 ? Shape{3, 5 + i} : Shape{256, 700 + 64 * i});
    list.types.push_back(i % 4 == 3 ? at::kBFloat16 : at::kFloat);
    owners.push_back({i / 2 % 2, i % 2});
  }
  runRanks(4, [&](int rank, const Store& store) {
    Mesh mesh(store, rank, kShape);
    Tensors inputs = list.dataOf(rank), outputs(10);
    for (int i = 0; i < 10; ++i) {
      if (owners[i] == mesh.slot) outputs[i] = at::empty(list.shapes[i], at::kFloat);
    }
    for (int round = 0; round < 5; ++round) {
      OwnerOptions options;
      options.divisor = 4;
      for (at::Tensor& output : outputs) {
        if (output.defined()) output.fill_(-1);
      }
      mesh.collectives->reduceToOwners(inputs, outputs, owners, options)->wait();
      Tensors copies = list.dataOf(rank);
      mesh.collectives->broadcastFromOwners(copies, owners)->wait();
      for (int i = 0; i < 10; ++i) {
        const std::string what =
            "tensor " + std::to_string(i) + " in round " + std::to_string(round);
        if (owners[i] == mesh.slot) {
          expectSame(outputs[i],
                     twoStageSum(kShape, i, list.shapes[i], list.types[i], at::kFloat, 4), what);
        }
        const int owner = static_cast<int>(owners[i].replicate * 2 + owners[i].shard);
        expectSame(copies[i], makeData(owner, i, list.shapes[i], list.types[i]), what);
      }
    }
  });
}

TEST(Mesh, aMeshDimensionOfOneIsNotCommunicatedOn) {
  runRanks(2, [](int rank, const Store& store) {
    // A group of one for the rows, instead of none.
    Mesh mesh(store, rank, {1, 2});
    auto single = createProcessGroup(
        c10::make_intrusive<c10d::PrefixStore>("single" + std::to_string(rank), store), 0, 1);
    MeshOwnerCollectives both(single->ownerCollectives(at::kCPU), mesh.shard);
    Tensors t{at::full({5}, rank + 1.0)};
    both.reduceToOwners(t, t, {{0, 1}})->wait();
    if (rank == 1) expectSame(t[0], at::full({5}, 3.0), "sum");
    EXPECT_EQ(single->ownerCollectives(at::kCPU)->counters().reduce.calls, 0);
    EXPECT_EQ(mesh.shard->counters().reduce.calls, 1);
  });
}

TEST(Mesh, aColumnMovesItsShareOfThePayload) {
  runRanks(4, [](int rank, const Store& store) {
    Mesh mesh(store, rank, {2, 2});
    const std::vector<Slot> owners{{0, 0}, {1, 1}, {1, 0}};
    const int64_t bytes[] = {400, 80, 1200};
    Tensors t{at::zeros({100}), at::zeros({20}), at::zeros({300})};
    mesh.collectives->reduceToOwners(t, t, owners)->wait();
    int64_t row_own = 0, column_own = 0, column = 0, total = 0;
    for (int i = 0; i < 3; ++i) {
      total += bytes[i];
      if (owners[i].shard == mesh.slot.shard) column += bytes[i];
      if (owners[i] == mesh.slot) column_own += bytes[i];
    }
    row_own = column;
    EXPECT_EQ(mesh.shard->counters().reduce.bytes_sent, total - row_own);
    EXPECT_EQ(mesh.shard->counters().reduce.bytes_received, row_own);
    EXPECT_EQ(mesh.replicate->counters().reduce.bytes_sent, column - column_own);
    EXPECT_EQ(mesh.replicate->counters().reduce.bytes_received, column_own);
  });
}

TEST(Mesh, manyOperationsOverlap) {
  runRanks(4, [](int rank, const Store& store) {
    Mesh mesh(store, rank, {2, 2});
    constexpr int kRounds = 20;
    std::vector<Tensors> sums, copies;
    std::vector<OwnerWorkPtr> works;
    for (int round = 0; round < kRounds; ++round) {
      const Slot owner{round / 2 % 2, round % 2};
      sums.push_back({makeData(rank, round, {1 + 501 * round}, at::kFloat)});
      copies.push_back({makeData(rank, 100 + round, {1 + 501 * round}, at::kFloat)});
      works.push_back(mesh.collectives->reduceToOwners(sums.back(), sums.back(), {owner}));
      works.push_back(mesh.collectives->broadcastFromOwners(copies.back(), {owner}));
    }
    for (auto& work : works) work->wait();
    for (int round = 0; round < kRounds; ++round) {
      const Slot owner{round / 2 % 2, round % 2};
      const Shape shape{1 + 501 * round};
      if (owner == mesh.slot) {
        expectSame(sums[round][0], twoStageSum({2, 2}, round, shape, at::kFloat, at::kFloat, 1.0),
                   "sum");
      }
      expectSame(copies[round][0],
                 makeData(static_cast<int>(owner.replicate * 2 + owner.shard), 100 + round, shape,
                          at::kFloat),
                 "copy");
    }
  });
}

void expectMeshUsable(Mesh& mesh, int rank) {
  Tensors t{at::full({2}, rank + 1.0)};
  mesh.collectives->reduceToOwners(t, t, {{1, 0}})->wait();
  const int n = mesh.shape.size();
  if (mesh.slot == Slot{1, 0}) expectSame(t[0], at::full({2}, n * (n + 1) / 2.0), "afterwards");
}

// `change` makes one rank's request differ; every rank of the mesh gets an error with `parts`, also
// those that share no group with that rank.
void expectFailureEverywhere(
    int odd, const std::function<void(Tensors&, std::vector<Slot>&, OwnerOptions&)>& change,
    const std::vector<std::string>& parts) {
  runRanks(6, [&](int rank, const Store& store) {
    Mesh mesh(store, rank, {2, 3});
    for (bool broadcast : {false, true}) {
      Tensors t{makeData(rank, 0, {40}, at::kFloat), makeData(rank, 1, {40}, at::kFloat),
                makeData(rank, 2, {40}, at::kFloat)};
      std::vector<Slot> owners{{0, 0}, {1, 1}, {0, 1}};
      OwnerOptions options;
      options.label = "unit";
      if (rank == odd) change(t, owners, options);
      const Tensors before{t[0].clone(), t[1].clone(), t[2].clone()};
      const auto run = [&] {
        (broadcast ? mesh.collectives->broadcastFromOwners(t, owners, options)
                   : mesh.collectives->reduceToOwners(t, t, owners, options))
            ->wait();
      };
      expectError(run, parts);
      if (!broadcast) {
        for (int i = 0; i < 3; ++i) expectSame(t[i], before[i], "not changed");
      }
      expectMeshUsable(mesh, rank);
    }
  });
}

TEST(Mesh, anOwnerOutsideTheMeshFailsOnAllRanks) {
  expectFailureEverywhere(
      4,
      [](Tensors&, std::vector<Slot>& owners, OwnerOptions&) {
        owners[1] = {0, 3};
      },
      {"unit", "owner (0, 3) of tensor 1 is out of range: slots are (0, 0) to (1, 2)"});
  expectFailureEverywhere(2,
                          [](Tensors&, std::vector<Slot>& owners, OwnerOptions&) {
                            owners[0] = {2, 0};
                          },
                          {"owner (2, 0) of tensor 0 is out of range"});
}

TEST(Mesh, aStridedTensorOnOneRankFailsOnAllRanks) {
  expectFailureEverywhere(
      0,
      [](Tensors& t, std::vector<Slot>&, OwnerOptions&) {
        t[2] = at::zeros({8, 5}).t();
      },
      {"mesh (2, 3) slot (0, 0) 'unit'", " 2 (Float[5, 8] with strides [1, 5]) is not contiguous"});
}

TEST(Mesh, aShapeThatDiffersOnOneRankFailsOnAllRanks) {
  expectFailureEverywhere(
      5, [](Tensors& t, std::vector<Slot>&, OwnerOptions&) { t[2] = at::zeros({41}); },
      {"tensor 2 is Float[40]", "Float[41] owned by", "unit, stage"});
}

TEST(Mesh, anOwnersRowThatDiffersOnOneRankFailsOnAllRanks) {
  expectFailureEverywhere(
      3, [](Tensors&, std::vector<Slot>& owners, OwnerOptions&) { owners[1].replicate = 0; },
      {"tensor 1 is Float[40] owned by slot (1, 1)", "tensor 1 is Float[40] owned by slot (0, 1)"});
}

TEST(Mesh, aLabelThatDiffersOnOneRankFailsOnAllRanks) {
  expectFailureEverywhere(
      1, [](Tensors&, std::vector<Slot>&, OwnerOptions& options) { options.label = "other"; },
      {"the label is", "'other, stage"});
}

TEST(Mesh, rowsThatDifferAsAWholeFailOnAllRanks) {
  runRanks(4, [](int rank, const Store& store) {
    Mesh mesh(store, rank, {2, 2});
    // All tensors in column 0, and the rows disagree: column 1 has nothing to move and still hears.
    Tensors t{at::zeros({mesh.slot.replicate == 0 ? 3 : 4})};
    auto work = mesh.collectives->reduceToOwners(t, t, {{0, 0}});
    expectError([&] { work->wait(); }, {"stage 2 of 2", "Float[3] owned by", "Float[4] owned by"});
    expectMeshUsable(mesh, rank);
  });
}

TEST(Mesh, aRankThatDoesNotComeIsNamedInItsStageAndEveryRankHears) {
  runRanks(4, [](int rank, const Store& store) {
    Mesh mesh(store, rank, {2, 2}, std::chrono::milliseconds(1000));
    if (rank != 3) {
      Tensors t{at::zeros({10})};
      OwnerOptions options;
      options.label = "unit";
      auto work = mesh.collectives->reduceToOwners(t, t, {{0, 0}}, options);
      const auto begin = std::chrono::steady_clock::now();
      expectError([&] { work->wait(); }, {"rank 1 did not take part within"});
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(8));
    }
    store->set("done" + std::to_string(rank), std::vector<uint8_t>{1});
    store->wait({"done0", "done1", "done2", "done3"});
  });
}

}  // namespace
}  // namespace dmuon
