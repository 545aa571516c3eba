// The flags of an operation on their way to all ranks, in the same group of calls as its payload.
#pragma once

#include "nccl_communicator.h"
#include "nccl_work.h"
#include "operation.h"

namespace dmuon {

class NcclFlags {
 public:
  // `taken`: another operation's, on the device, that go with this rank's own; may be undefined.
  // Puts what is to be sent on the stream.
  NcclFlags(NcclCommunicator& communicator, const Operation& op, const at::Tensor& taken);

  // Whether there is something to send: the same on all ranks.
  bool travel() const { return sent_.defined(); }
  // Inside the group.
  void call(NcclApi::Comm comm) const;
  // After it.
  NcclWork::Flags finish();

 private:
  NcclCommunicator& communicator_;
  at::Tensor sent_;
  NcclWork::Flags flags_;
};

}  // namespace dmuon
