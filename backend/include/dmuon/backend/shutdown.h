// The end of a process that has groups left.
#pragma once

#include <chrono>

namespace dmuon {

// Lets what is pending on the owner collectives of all groups' CPU tensors end, at most for `limit`
// in all and for no longer than the groups' time-outs; what is still pending then fails. Nothing
// more is accepted. Meant for the time when everything that a callback of a pending operation may
// need is still there (Python's interpreter, statics); in Python, dmuon calls it at exit.
//
// Returns how many queues (one per group and channel) it ended; in a forked child, does nothing to
// its parent's. Never throws.
int shutdownOwnerCollectives(std::chrono::milliseconds limit = std::chrono::seconds(30));

}  // namespace dmuon
