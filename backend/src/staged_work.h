// One Work for two operations on a device, of which the second goes on with the results of the
// first.
#pragma once

#include <vector>

#include <dmuon/backend/owner_collectives.h>

namespace dmuon {

// Null unless both are Works of NCCL channels. wait() orders the current stream after both; the
// flags are those of `flags_of`, and the rest is the second's.
OwnerWorkPtr stagedOnDevice(const OwnerWorkPtr& one, const OwnerWorkPtr& two,
                            const OwnerWorkPtr& flags_of, int rank,
                            const std::vector<at::Tensor>& outputs);

}  // namespace dmuon
