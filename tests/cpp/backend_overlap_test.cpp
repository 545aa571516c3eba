// The two stages of a mesh operation overlap: the second moves what the first has finished. Shown
// without a clock: the first stage's messages are held back until the second stage has sent one, so
// an implementation that waits for the end of the first stage cannot end.
// label: threads
#include <thread>

#include <dmuon/backend/mesh_owner_collectives.h>

#include "../../backend/src/cpu_owner_collectives.h"
#include "backend_cases.h"
#include "mailbox.h"

namespace dmuon {
namespace {

using namespace dmuon::testing;
using std::chrono::seconds;

constexpr int kRows = 2;
constexpr int kColumns = 2;
constexpr int kRanks = kRows * kColumns;

// Four ranks as threads; a mailbox per row (shard group) and per column (replicate group).
struct Wires {
  std::vector<std::shared_ptr<Mailbox>> rows, columns;

  Wires() {
    for (int i = 0; i < kRows; ++i) rows.push_back(std::make_shared<Mailbox>());
    for (int i = 0; i < kColumns; ++i) columns.push_back(std::make_shared<Mailbox>());
  }
};

std::shared_ptr<OwnerCollectives> group(const std::shared_ptr<Mailbox>& box, int rank, int size,
                                        const char* name) {
  Peers::Limits limits;
  limits.piece_bytes = 64;
  limits.pieces_ahead = 1;
  auto transport = std::make_shared<MailboxTransport>(box, rank, limits);
  return std::make_shared<CpuOwnerCollectives>(transport, rank, size, 0, name, "", seconds(20));
}

// Runs body(rank, collectives) on all ranks; returns what each threw.
std::vector<std::string> onMesh(const Wires& wires,
                                const std::function<void(int, MeshOwnerCollectives&)>& body) {
  std::vector<std::string> errors(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const int row = rank / kColumns, column = rank % kColumns;
      MeshOwnerCollectives mesh(group(wires.columns[column], row, kRows, "replicate"),
                                group(wires.rows[row], column, kColumns, "shard"));
      try {
        body(rank, mesh);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// Two tensors per column, of 16 pieces each: first the one of row 0's owner, then of row 1's.
const Case kList{
    {{256}, {256}, {256}, {256}}, std::vector<at::ScalarType>(4, at::kFloat), {0, 1, 2, 3}};
const std::vector<Slot> kOwners{{0, 0}, {0, 1}, {1, 0}, {1, 1}};

// Holds back all but the first payload message on every way of `first` until each of `second` has
// seen one.
void holdFirstStage(const std::vector<std::shared_ptr<Mailbox>>& first,
                    const std::vector<std::shared_ptr<Mailbox>>& second) {
  struct Seen {
    std::mutex mutex;
    std::vector<bool> boxes;
  };
  auto seen = std::make_shared<Seen>();
  seen->boxes.resize(second.size());
  for (const auto& box : first) box->holdBack([](int, int, int number) { return number > 0; });
  for (size_t i = 0; i < second.size(); ++i) {
    second[i]->onPayload([seen, i, first] {
      std::lock_guard<std::mutex> lock(seen->mutex);
      seen->boxes[i] = true;
      if (std::find(seen->boxes.begin(), seen->boxes.end(), false) != seen->boxes.end()) return;
      for (const auto& box : first) box->releaseAll();
    });
  }
}

at::Tensor expectedSum(int tensor) {
  const Shape& shape = kList.shapes[tensor];
  return serialSum({0, 1}, tensor, shape, at::kFloat, at::kFloat, 1.0) +
         serialSum({2, 3}, tensor, shape, at::kFloat, at::kFloat, 1.0);
}

TEST(MeshOverlap, theSecondStageOfAReductionStartsBeforeTheFirstHasEnded) {
  Wires wires;
  holdFirstStage(wires.rows, wires.columns);
  const auto errors = onMesh(wires, [](int rank, MeshOwnerCollectives& mesh) {
    Tensors inputs = kList.dataOf(rank), outputs(4);
    outputs[rank] = at::empty(kList.shapes[rank]);
    OwnerOptions options;
    options.flags = {static_cast<uint8_t>(1 << rank)};
    const OwnerWorkPtr work = mesh.reduceToOwners(inputs, outputs, kOwners, options);
    work->wait();
    expectSame(outputs[rank], expectedSum(rank), "sum at rank " + std::to_string(rank));
    EXPECT_EQ(work->flags(), std::vector<uint8_t>{15});
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(MeshOverlap, aReductionInPlaceIsRightWhileTheStagesOverlap) {
  Wires wires;
  holdFirstStage(wires.rows, wires.columns);
  const auto errors = onMesh(wires, [](int rank, MeshOwnerCollectives& mesh) {
    Tensors tensors = kList.dataOf(rank);
    mesh.reduceToOwners(tensors, tensors, kOwners)->wait();
    for (int i = 0; i < kRanks; ++i) {
      const at::Tensor own = makeData(rank, i, kList.shapes[i], at::kFloat);
      expectSame(tensors[i], i == rank ? expectedSum(i) : own, "tensor " + std::to_string(i));
    }
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(MeshOverlap, theSecondStageOfABroadcastStartsBeforeTheFirstHasEnded) {
  Wires wires;
  // Row 1 has nothing of its own at the front of its block: what it sends first came from row 0.
  holdFirstStage(wires.columns, {wires.rows[1]});
  const auto errors = onMesh(wires, [](int rank, MeshOwnerCollectives& mesh) {
    Tensors tensors = kList.dataOf(rank);
    mesh.broadcastFromOwners(tensors, kOwners)->wait();
    for (int i = 0; i < kRanks; ++i) {
      expectSame(tensors[i], makeData(i, i, kList.shapes[i], at::kFloat),
                 "tensor " + std::to_string(i));
    }
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(MeshOverlap, aRankLostInTheMiddleOfTheFirstStageFailsBothStagesOnAllRanks) {
  Wires wires;
  wires.rows[0]->holdBack([](int, int, int number) { return number > 0; });
  for (const auto& box : wires.columns) {
    box->onPayload([&wires] { wires.rows[0]->kill(1); });
  }
  const auto errors = onMesh(wires, [](int rank, MeshOwnerCollectives& mesh) {
    Tensors inputs = kList.dataOf(rank), outputs(4);
    outputs[rank] = at::empty(kList.shapes[rank]);
    OwnerOptions options;
    options.label = "layer 7";
    // Rank 1 would wait for the messages that are held back.
    if (rank == 1) options.timeout = std::chrono::seconds(2);
    mesh.reduceToOwners(inputs, outputs, kOwners, options)->wait();
  });
  for (int rank : {0, 2}) {
    EXPECT_NE(errors[rank].find("rank 1 is gone: its mailbox is closed"), std::string::npos)
        << "rank " << rank << ": " << errors[rank];
    EXPECT_NE(errors[rank].find("'layer 7, stage 1 of 2'"), std::string::npos) << errors[rank];
  }
  for (int rank : {1, 3}) EXPECT_NE(errors[rank], "") << "rank " << rank;
}

}  // namespace
}  // namespace dmuon
