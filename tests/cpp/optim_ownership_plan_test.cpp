#include <dmuon/optim/ownership_plan.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <stdexcept>

namespace dmuon::optim {
namespace {

PlanMatrix matrixOf(const std::string& name, const std::string& unit, std::vector<int64_t> shape) {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  return {name, unit, std::move(shape), 4 * elements};
}

// A Llama-like model: units of 7 matrices of three shapes.
std::vector<PlanMatrix> model(int layers) {
  std::vector<PlanMatrix> matrices;
  for (int i = 0; i < layers; ++i) {
    const std::string unit = "layers." + std::to_string(i);
    for (const char* name : {".q", ".k", ".v", ".o"}) {
      matrices.push_back(matrixOf(unit + name, unit, {256, 256}));
    }
    matrices.push_back(matrixOf(unit + ".gate", unit, {688, 256}));
    matrices.push_back(matrixOf(unit + ".up", unit, {688, 256}));
    matrices.push_back(matrixOf(unit + ".down", unit, {256, 688}));
  }
  return matrices;
}

PlanOptions mesh(int64_t replicate_size, int64_t shard_size, const std::string& cost = "measured") {
  PlanOptions options;
  options.replicate_size = replicate_size;
  options.shard_size = shard_size;
  options.cost = cost;
  return options;
}

TEST(OwnershipPlan, DoesNotDependOnTheOrderOfMatrices) {
  std::vector<PlanMatrix> matrices = model(5);
  const OwnershipPlan plan(matrices, mesh(2, 3));
  std::mt19937 random(1);
  for (int i = 0; i < 20; ++i) {
    std::shuffle(matrices.begin(), matrices.end(), random);
    const OwnershipPlan other(matrices, mesh(2, 3));
    EXPECT_EQ(other.canonicalText(), plan.canonicalText());
    EXPECT_EQ(other.hash(), plan.hash());
  }
}

TEST(OwnershipPlan, HasASlotOnTheMeshForEveryMatrixSortedByName) {
  const OwnershipPlan plan(model(3), mesh(2, 2));
  ASSERT_EQ(plan.entries().size(), 21u);
  for (size_t i = 0; i < plan.entries().size(); ++i) {
    const PlanEntry& entry = plan.entries()[i];
    if (i > 0) {
      EXPECT_LT(plan.entries()[i - 1].matrix.name, entry.matrix.name);
    }
    EXPECT_TRUE(entry.replicate >= 0 && entry.replicate < 2 && entry.shard >= 0 && entry.shard < 2);
    EXPECT_EQ(&plan.at(entry.matrix.name), &entry);
    EXPECT_EQ(entry.cost, matrixCost(entry.matrix.shape, "measured"));
  }
  EXPECT_THROW(plan.at("layers.9.q"), std::out_of_range);
}

TEST(OwnershipPlan, SpreadsEveryUnitOverColumnsAndSlots) {
  for (const auto& [r, g] : {std::pair<int64_t, int64_t>{1, 4}, {2, 2}, {4, 1}, {2, 3}, {3, 5}}) {
    const OwnershipPlan plan(model(6), mesh(r, g));
    std::map<std::string, std::map<int64_t, int64_t>> columns, slots;
    for (const PlanEntry& entry : plan.entries()) {
      ++columns[entry.matrix.unit][entry.shard];
      ++slots[entry.matrix.unit][entry.replicate * g + entry.shard];
    }
    for (const auto& [unit, counts] : columns) {
      for (const auto& [column, count] : counts) EXPECT_LE(count, (7 + g - 1) / g) << unit;
    }
    for (const auto& [unit, counts] : slots) {
      for (const auto& [slot, count] : counts) EXPECT_LE(count, (7 + r * g - 1) / (r * g)) << unit;
    }
  }
}

TEST(OwnershipPlan, StaysWithinTheBoundOfLongestProcessingTimeFirst) {
  std::mt19937 random(2);
  std::uniform_int_distribution<int64_t> size(16, 1024);
  for (const int64_t slots : {2, 4, 7}) {
    for (const std::string cost : {"measured", "flops"}) {
      std::vector<PlanMatrix> matrices;
      for (int i = 0; i < 40; ++i) {
        const std::string name = std::to_string(i) + ".weight";
        matrices.push_back(matrixOf(name, name, {size(random), size(random)}));
      }
      const OwnershipPlan plan(matrices, mesh(1, slots, cost));
      double total = 0, largest = 0;
      for (const PlanEntry& entry : plan.entries()) {
        total += entry.cost;
        largest = std::max(largest, entry.cost);
      }
      const std::vector<double> costs = plan.slotCosts();
      const double makespan = *std::max_element(costs.begin(), costs.end());
      // Graham: at most 4/3 - 1/(3 slots) of the optimum, which is at least both of these.
      const double optimum = std::max(largest, total / static_cast<double>(slots));
      EXPECT_LE(makespan, optimum * 4 / 3) << slots << " " << cost;
      EXPECT_NEAR(plan.imbalance(), makespan * static_cast<double>(slots) / total, 1e-12);
    }
  }
}

TEST(OwnershipPlan, FollowsTheRuleOnASmallExample) {
  // By cost: a, then b and c equal (b first by name), then d. Two slots: a | b, c | d goes to the
  // lesser.
  const OwnershipPlan plan({matrixOf("d", "d", {32, 32}), matrixOf("c", "c", {64, 64}),
                            matrixOf("a", "a", {96, 96}), matrixOf("b", "b", {64, 64})},
                           mesh(1, 2, "flops"));
  EXPECT_EQ(plan.at("a").shard, 0);
  EXPECT_EQ(plan.at("b").shard, 1);
  EXPECT_EQ(plan.at("c").shard, 1);
  EXPECT_EQ(plan.at("d").shard, 1);  // 2 * 64^3 < 96^3
}

TEST(OwnershipPlan, BalancesAModelOfEqualLayers) {
  const OwnershipPlan plan(model(8), mesh(2, 2));
  EXPECT_LE(plan.imbalance(), 1.1);
  int64_t bytes = 0;
  for (const int64_t slot : plan.slotBytes()) bytes += slot;
  EXPECT_EQ(bytes, 8 * 4 * (4 * 256 * 256 + 3 * 688 * 256));
}

TEST(OwnershipPlan, HashChangesWithEveryField) {
  const auto base = model(1);
  const uint64_t hash = OwnershipPlan(base, mesh(1, 4)).hash();
  EXPECT_NE(OwnershipPlan(base, mesh(4, 1)).hash(), hash);
  EXPECT_NE(OwnershipPlan(base, mesh(1, 4, "flops")).hash(), hash);
  const auto changed = [&](const auto& change) {
    auto matrices = base;
    change(matrices[0]);
    return OwnershipPlan(matrices, mesh(1, 4)).hash();
  };
  EXPECT_NE(changed([](PlanMatrix& m) { m.name += "x"; }), hash);
  EXPECT_NE(changed([](PlanMatrix& m) { m.unit += "x"; }), hash);
  EXPECT_NE(changed([](PlanMatrix& m) { m.bytes += 1; }), hash);
  EXPECT_NE(changed([](PlanMatrix& m) { m.shape[1] += 1; }), hash);
  EXPECT_NE(OwnershipPlan({base[0]}, mesh(1, 4)).hash(), hash);
  // Names cannot imitate the text around them.
  EXPECT_NE(OwnershipPlan({matrixOf("a\tunit b", "c", {1, 1})}, mesh(1, 1)).canonicalText(),
            OwnershipPlan({matrixOf("a", "b\tunit c", {1, 1})}, mesh(1, 1)).canonicalText());
}

TEST(OwnershipPlan, HashIsFnv1aOfTheCanonicalText) {
  const OwnershipPlan plan({}, mesh(1, 1));
  EXPECT_EQ(plan.canonicalText(), "dmuon ownership plan 1\treplicate 1\tshard 1\tcost measured\n");
  uint64_t expected = 0xcbf29ce484222325ULL;
  for (const char c : plan.canonicalText()) {
    expected = (expected ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  }
  EXPECT_EQ(plan.hash(), expected);
}

TEST(OwnershipPlan, TableShowsNamesShapesOwnersAndSlots) {
  const std::string table = OwnershipPlan(model(1), mesh(2, 2)).table();
  for (const char* part : {"layers.0.gate", "688x256", "slot (1, 1)", "imbalance"}) {
    EXPECT_NE(table.find(part), std::string::npos) << part << "\n" << table;
  }
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 1 + 7 + 4 + 1);
}

TEST(OwnershipPlan, CostsFollowTheirModels) {
  EXPECT_EQ(matrixCost({96, 384}, "flops"), 8.0 * 96 * 96 * 384 + 28.0 * 96 * 96 * 96);
  EXPECT_EQ(matrixCost({100, 100}, "flops"), 30e6);
  for (const std::string cost : {"flops", "measured"}) {
    EXPECT_EQ(matrixCost({384, 96}, cost), matrixCost({96, 384}, cost));
    EXPECT_EQ(matrixCost({5, 64, 32}, cost), 5 * matrixCost({64, 32}, cost));
    EXPECT_EQ(matrixCost({64, 8, 2, 2}, cost), matrixCost({64, 32}, cost));
    EXPECT_EQ(matrixCost({0, 32}, cost), 0);
    for (int64_t s = 1; s < 4096; s = s * 3 / 2 + 1) {
      EXPECT_LT(matrixCost({s, s}, cost), matrixCost({s + 1, s + 1}, cost)) << cost << " " << s;
      EXPECT_LT(matrixCost({s, 2 * s}, cost), matrixCost({s, 2 * s + 1}, cost)) << cost << " " << s;
    }
  }
}

TEST(OwnershipPlan, EmptyPlansAndMeshesLargerThanTheModelWork) {
  const OwnershipPlan empty({}, mesh(2, 2));
  EXPECT_EQ(empty.imbalance(), 1);
  EXPECT_EQ(empty.slotCosts(), std::vector<double>(4));
  const OwnershipPlan sparse({matrixOf("a", "u", {4, 4}), matrixOf("b", "u", {4, 4})}, mesh(3, 4));
  EXPECT_NE(sparse.at("a").shard, sparse.at("b").shard);
}

TEST(OwnershipPlan, RefusesWhatCannotBePlannedWithTheValues) {
  const auto expect = [](const std::string& part, const auto& call) {
    try {
      call();
      FAIL() << "no error, expected: " << part;
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  const PlanMatrix good = matrixOf("a", "u", {4, 4});
  expect("'a' appears twice", [&] { OwnershipPlan({good, good}, mesh(1, 1)); });
  expect("(0, 2)", [&] { OwnershipPlan({good}, mesh(0, 2)); });
  expect("'time'", [&] { OwnershipPlan({}, mesh(1, 1, "time")); });
  expect("[7]", [&] { OwnershipPlan({matrixOf("a", "u", {7})}, mesh(1, 1)); });
  expect("negative size: [3, -1]", [&] { OwnershipPlan({{"a", "u", {3, -1}, 0}}, mesh(1, 1)); });
  expect("'a' has -4 bytes", [&] { OwnershipPlan({{"a", "u", {1, 1}, -4}}, mesh(1, 1)); });
}

}  // namespace
}  // namespace dmuon::optim
