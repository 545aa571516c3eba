// Payload between processes of a host, with and without room in the pool that it goes through.
// Where the transport is not UCX these tests show the same of that one.
#include <ATen/ops/empty.h>

#include <cstdlib>

#include <dmuon/backend/factory.h>

#include "backend_cases.h"
#include "ranks.h"

namespace dmuon {
namespace {

using namespace dmuon::testing;

// Two channels at once, so that they compete for slots; packed pieces among plain ones.
void runWithSlots(const char* slots) {
  Case list;
  for (int i = 0; i < 24; ++i) {
    list.shapes.push_back(i % 4 == 3 ? Shape{7, 11 + i} : Shape{300, 500 + 128 * (i % 5)});
    list.types.push_back(i % 6 == 5 ? at::kHalf : at::kFloat);
    list.owners.push_back(i * i % 3);
  }
  runRanks(3, [&](int rank, const Store& store) {
    ::setenv("DMUON_POOL_SLOTS", slots, 1);
    auto group = createProcessGroup(store, rank, 3, std::chrono::seconds(30));
    auto sums = group->newOwnerCollectives(at::kCPU, "sums");
    auto copies = group->newOwnerCollectives(at::kCPU, "copies");
    for (int round = 0; round < 4; ++round) {
      Tensors inputs = list.dataOf(rank), outputs(list.shapes.size()), data = list.dataOf(rank);
      for (size_t i = 0; i < outputs.size(); ++i) {
        if (list.owners[i] == rank) outputs[i] = at::empty(list.shapes[i], list.types[i]);
      }
      auto sum = sums->reduceToOwners(inputs, outputs, list.owners);
      auto copy = copies->broadcastFromOwners(data, list.owners);
      sum->wait();
      copy->wait();
      for (size_t i = 0; i < outputs.size(); ++i) {
        const int n = static_cast<int>(i), owner = static_cast<int>(list.owners[i]);
        const std::string what = "tensor " + std::to_string(i) + ", " + slots + " slots";
        if (owner == rank) {
          expectSame(outputs[i],
                     serialSum({0, 1, 2}, n, list.shapes[i], list.types[i], list.types[i], 1.0),
                     what);
        }
        expectSame(data[i], makeData(owner, n, list.shapes[i], list.types[i]), what);
      }
    }
    group->shutdown();
  });
}

TEST(Pool, payloadFindsSlots) { runWithSlots("32"); }
TEST(Pool, payloadGoesAsMessagesWhenSlotsRunOut) { runWithSlots("1"); }
TEST(Pool, payloadGoesAsMessagesWithoutAPool) { runWithSlots("0"); }

TEST(Pool, aBadNumberOfSlotsIsNamed) {
  runRanks(2, [](int rank, const Store& store) {
    ::setenv("DMUON_POOL_SLOTS", "many", 1);
    ::setenv("DMUON_TRANSPORT", "ucx", 1);
    const std::string text =
        expectError([&] { createProcessGroup(store, rank, 2, std::chrono::seconds(30)); }, {"ucx"});
    if (text.find("without UCX") == std::string::npos &&
        text.find("library was not found") == std::string::npos) {
      EXPECT_NE(text.find("DMUON_POOL_SLOTS is 'many'"), std::string::npos) << text;
    }
  });
}

}  // namespace
}  // namespace dmuon
