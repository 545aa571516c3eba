// Debug mode of the NCCL transport: before an operation is launched, the ranks compare what they
// are about to launch, as the CPU transports always do.
//
// NCCL does not compare: if one rank calls something else, or nothing, the others' kernels wait, or
// data is mangled. A comparison on the host before every launch would end the overlap that the
// transport is for, so it is a mode: DMUON_DEBUG=1, or TORCH_DISTRIBUTED_DEBUG=DETAIL, equal on all
// ranks. Then the host waits for the peers at every submission, and all errors are those of the CPU
// transports: they name the ranks that differ and both values, on all ranks, before anything has
// moved, and the group stays usable.
//
// Without it, a rank that refuses its arguments throws ValueError to its caller and says so in the
// store. Ranks that launched the operation look there once it has not ended within a second, and
// then fail with that rank's own message: soon, but the group is unusable. If all ranks refuse, as
// they do when the program is wrong in the same way everywhere, nothing is launched and the group
// stays usable. Whoever is awake at 3 a.m. is told by the error to set DMUON_DEBUG=1 when what it
// says is not enough.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>

#include <dmuon/backend/owner_collectives.h>

#include "operation.h"

namespace dmuon {

class NcclAgreement {
 public:
  virtual ~NcclAgreement() = default;
  // Blocks until all ranks are there; throws if they differ, if one refuses (op.refusal), or if one
  // does not come. Once per operation, in their order.
  virtual void reach(const Operation& op) = 0;
};

bool debugWanted();

// Over a channel of a CPU transport.
std::unique_ptr<NcclAgreement> agreementOver(std::shared_ptr<OwnerCollectives> channel);
// Over the store, for a group that has no CPU transport.
std::unique_ptr<NcclAgreement> agreementOver(c10::intrusive_ptr<c10d::Store> store, int rank,
                                             int size);

}  // namespace dmuon
