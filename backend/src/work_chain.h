// Works made of other Works.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <dmuon/backend/owner_collectives.h>

namespace dmuon {

struct ChainInfo {
  int rank = -1;
  c10d::OpType type = c10d::OpType::UNKNOWN;
  uint64_t seq = 0;
  std::string name;                 // opens error texts
  std::vector<at::Tensor> outputs;  // what result() and the future hold
};

// Completes when all `works` have completed and then `then` has run, on the thread that completes
// the last of them. Fails with the first error. Every work must have a future.
WorkPtr afterAll(const std::vector<WorkPtr>& works, ChainInfo info, std::function<void()> then);

// Its wait() waits for all `works` in turn; they need no futures. For operations coalesced on the
// host, some of which are sends and receives.
WorkPtr waitForAll(std::vector<WorkPtr> works, int rank);

// Null for a Work that has no future, such as a plain send or receive of Gloo.
c10::intrusive_ptr<c10::ivalue::Future> futureOf(const WorkPtr& work);

}  // namespace dmuon
