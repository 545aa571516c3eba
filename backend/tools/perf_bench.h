// One rank of dmuon_perf.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "perf_options.h"

namespace dmuon::perf {

// Measures together with the other ranks; rank 0 prints. `local_ranks` share this machine's cores.
// Returns the exit status: 1 if anything was wrong.
int runRank(const Options& options, const c10::intrusive_ptr<c10d::Store>& store, int rank,
            int size, int local_ranks);

}  // namespace dmuon::perf
