// Messages of a group over UCX.
//
// Payload between processes of one host goes through the sender's pool (ucx_pool.h), if the
// receiver can read that; everything else as messages.
//
// A tag has, from the top: 17 bits for the receiver's inbox of the group, 1 for what goes aside of
// the order of messages (set-up, and payload behind a ticket), 16 for the
// sender's rank in the group, 30 for the caller's tag.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "peers.h"

namespace dmuon {

class UcxWorker;
struct UcxEndpoint;

// What a rank tells the others so that they can reach it. Throws std::runtime_error, e.g. if the
// library is not there.
std::string ucxContact();

class UcxTransport final : public Transport {
 public:
  // contacts[r] is what ucxContact() returned on rank r, on this rank for this very group. Connects
  // to all ranks: blocks until each has answered, at most until the deadline; then throws
  // std::runtime_error that names the ranks that have not.
  UcxTransport(const std::vector<std::string>& contacts, int rank, Clock::time_point deadline);

  const char* name() const override { return "ucx"; }
  std::unique_ptr<Peers> newPeers() override;

 private:
  friend class UcxPeers;
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace dmuon
