// Puts one operation on a communicator's stream: pack, one group of NCCL calls, add up or scale,
// unpack. Everything is in the order of that stream; the caller orders it after the inputs and the
// readers after its end.
#pragma once

#include <vector>

#include "nccl_communicator.h"
#include "nccl_plan.h"
#include "nccl_work.h"
#include "operation.h"

namespace dmuon {

struct NcclLaunch {
  NcclCommunicator& communicator;
  const Operation& op;
  const std::vector<Segment>& segments;
  // Flags that another operation left on the device, to be taken over; may be undefined.
  at::Tensor flags_taken;

  // `timeout`: for the launch itself. Throws NcclError.
  NcclWork::Flags run(std::chrono::milliseconds timeout);
};

}  // namespace dmuon
