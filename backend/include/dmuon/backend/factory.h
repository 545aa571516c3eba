// Groups for programs without Python. (In Python, init_process_group("dmuon") makes them.)
#pragma once

#include <chrono>
#include <string>

#include <dmuon/backend/process_group_dmuon.h>

namespace dmuon {

// Meets the other ranks in `store` and connects to them with Gloo over TCP; blocks until all are
// there, at most for the time-out. Network interfaces: GLOO_SOCKET_IFNAME (several separated by
// commas) as in Python, else the one this machine's name resolves to, else loopback.
// Ignores SIGPIPE if its action is the default one, as Python does: else a peer's death could end
// this process before it can say whose it was. Two groups on one store need different stores or
// prefixes (c10d::PrefixStore).
c10::intrusive_ptr<ProcessGroupDMuon> createProcessGroup(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout = std::chrono::minutes(30),
    const std::string& group_name = "default");

}  // namespace dmuon
