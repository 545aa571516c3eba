// Which transport the owner collectives of a group's CPU tensors use.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>

#include "peers.h"

namespace dmuon {

struct InnerBackend;

// As DMUON_TRANSPORT says (process_group_dmuon.h). Throws if that is not one of the three words, or
// if it is "ucx" and some rank cannot use UCX; the error, opened by `name`, says which and why.
// A group of one gets Gloo, which it never uses.
std::shared_ptr<Transport> makeTransport(const std::shared_ptr<InnerBackend>& inner,
                                         const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                         int size, std::chrono::milliseconds timeout,
                                         const std::string& name);

}  // namespace dmuon
