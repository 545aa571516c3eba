// What must be known of torch's ProcessGroupGloo itself, kept in one unit.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

namespace dmuon {

c10::intrusive_ptr<c10d::Backend> makeGlooBackend(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size,
                                                  std::chrono::milliseconds timeout);

// An independent copy; the same object if these are not ProcessGroupGloo's options.
c10::intrusive_ptr<c10d::Backend::Options> copyGlooOptions(
    const c10::intrusive_ptr<c10d::Backend::Options>& options);

}  // namespace dmuon
