#ifdef DMUON_HAVE_UCX
#include "ucx_peers.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "agreement.h"
#include "ucx_worker.h"

namespace dmuon {
namespace {

constexpr int kMaxRanks = 1 << 16;
constexpr uint64_t kInboxes = 1 << 17;

// A header with so much payload still is one fragment for shared memory and TCP.
constexpr int64_t kInlineBytes = 8192 - 128;

// A piece should fit the second-level cache together with its sum; the scratch of a reduction over
// many ranks should not grow without bound.
constexpr int64_t kPieceBytes = 256 << 10;
constexpr int64_t kSmallestPiece = 32 << 10;
constexpr int64_t kPiecesAhead = 4;
constexpr int64_t kScratchBytes = 16 << 20;

uint64_t tagOf(uint64_t inbox, int source, uint64_t low) {
  return inbox << 47 | static_cast<uint64_t>(source) << 30 | low;
}
constexpr uint64_t kSetUp = uint64_t{1} << 46;

// What stands in front of the address.
struct Contact {
  uint64_t inbox = 0;
  uint64_t host = 0;
  int64_t pid = 0;
};

}  // namespace

std::string ucxContact() {
  UcxWorker& worker = UcxWorker::get();
  const Contact contact{worker.newInbox() % kInboxes, worker.contact().host, worker.contact().pid};
  return std::string(reinterpret_cast<const char*>(&contact), sizeof(contact)) +
         worker.contact().address;
}

struct UcxTransport::Shared {
  struct Peer {
    uint64_t inbox = 0;
    UcxEndpoint* endpoint = nullptr;
  };
  UcxWorker& worker;
  int rank;
  std::vector<Peer> peers;  // by rank; this rank's own has the inbox only
};

class UcxPeers final : public Peers {
 public:
  explicit UcxPeers(std::shared_ptr<UcxTransport::Shared> shared) : shared_(std::move(shared)) {}

  Limits limits() const override {
    const auto peers = std::max<int64_t>(static_cast<int64_t>(shared_->peers.size()) - 1, 1);
    const int64_t piece = kScratchBytes / (kPiecesAhead * peers);
    return {kInlineBytes, std::clamp(piece, kSmallestPiece, kPieceBytes), kPiecesAhead};
  }

  Transfer send(int peer, int tag, Bytes bytes) override {
    const auto& to = shared_->peers[peer];
    return start(peer, std::move(bytes), [&](const Bytes& data) {
      return shared_->worker.send(*to.endpoint, data, tagOf(to.inbox, shared_->rank, low(tag)));
    });
  }

  Transfer receive(int peer, int tag, Bytes bytes) override {
    const uint64_t inbox = shared_->peers[shared_->rank].inbox;
    return start(peer, std::move(bytes), [&](const Bytes& data) {
      return shared_->worker.receive(data, tagOf(inbox, peer, low(tag)));
    });
  }

  Outcome wait(Transfer& transfer, Clock::time_point deadline) override {
    if (transfer.done) return Outcome::done;
    if (!transfer.state) return Outcome::gone;
    const auto& request = *static_cast<UcxRequest*>(transfer.state.get());
    const UcxEndpoint& endpoint = *shared_->peers[transfer.peer].endpoint;
    shared_->worker.wait([&] { return request.ended || interrupted_ || endpoint.failed; },
                         deadline);
    if (request.ended) {
      if (request.status == UCS_OK) {
        transfer.done = true;
        transfer.received = request.received;
        return Outcome::done;
      }
      transfer.failure =
          endpoint.failed ? endpoint.failure
                          : std::string("connection lost: ") + shared_->worker.text(request.status);
      return Outcome::gone;
    }
    if (interrupted_) return Outcome::interrupted;
    if (!endpoint.failed) return Outcome::timed_out;
    transfer.failure = endpoint.failure;
    return Outcome::gone;
  }

  // Receives are cancelled. Sends get a moment, for they may be what tells the peers that this rank
  // has given up; then the worker's thread looks after them.
  void giveUp(std::vector<Transfer> transfers, std::shared_ptr<void> memory) override {
    const auto deadline = Clock::now() + std::chrono::milliseconds(50);
    for (Transfer& transfer : transfers) {
      auto* request = static_cast<UcxRequest*>(transfer.state.get());
      if (request == nullptr || request->ended) continue;
      try {
        shared_->worker.keep(*request, memory);
        shared_->worker.cancel(*request);
        shared_->worker.wait([&] { return request->ended.load(); }, deadline);
      } catch (const std::exception&) {
        return;  // in a process forked from the one that made the group: nothing here is its own
      }
    }
  }

  void interrupt() override {
    interrupted_ = true;
    shared_->worker.wake();
  }
  bool interrupted() const override { return interrupted_; }

 private:
  static uint64_t low(int tag) { return static_cast<uint64_t>(tag - kReservedTags); }

  template <typename Start>
  Transfer start(int peer, Bytes bytes, Start&& start_request) {
    Transfer transfer;
    transfer.peer = peer;
    transfer.bytes = std::move(bytes);
    try {
      transfer.state = start_request(transfer.bytes);
    } catch (const std::exception& error) {
      transfer.failure = error.what();
    }
    return transfer;
  }

  std::shared_ptr<UcxTransport::Shared> shared_;
  std::atomic<bool> interrupted_{false};
};

std::unique_ptr<Peers> UcxTransport::newPeers() { return std::make_unique<UcxPeers>(shared_); }

UcxTransport::UcxTransport(const std::vector<std::string>& contacts, int rank,
                           Clock::time_point deadline) {
  const int size = static_cast<int>(contacts.size());
  if (size > kMaxRanks) throw std::runtime_error("a group over UCX has at most 65536 ranks");
  UcxWorker& worker = UcxWorker::get();
  shared_ = std::make_shared<Shared>(Shared{worker, rank, std::vector<Shared::Peer>(size)});
  for (int r = 0; r < size; ++r) {
    Contact contact;
    if (contacts[r].size() <= sizeof(contact)) {
      throw std::runtime_error("rank " + std::to_string(r) + " has told " +
                               std::to_string(contacts[r].size()) + " bytes, too few to reach it");
    }
    std::memcpy(&contact, contacts[r].data(), sizeof(contact));
    Shared::Peer& peer = shared_->peers[r];
    peer.inbox = contact.inbox;
    if (r == rank) continue;
    peer.endpoint =
        &worker.connect({contact.host, contact.pid, contacts[r].substr(sizeof(contact))});
  }
  // One empty message to and from everybody: connections are made now, not in a collective.
  std::vector<UcxRequestPtr> requests;
  for (int r = 0; r < size; ++r) {
    if (r == rank) continue;
    const Shared::Peer& peer = shared_->peers[r];
    requests.push_back(worker.receive(newBytes(0), tagOf(shared_->peers[rank].inbox, r, kSetUp)));
    requests.push_back(worker.send(*peer.endpoint, newBytes(0), tagOf(peer.inbox, rank, kSetUp)));
  }
  std::vector<int> silent;
  for (size_t i = 0; i < requests.size(); ++i) {
    const int peer = static_cast<int>(i / 2) + (static_cast<int>(i / 2) >= rank ? 1 : 0);
    const UcxRequest& request = *requests[i];
    const UcxEndpoint& endpoint = *shared_->peers[peer].endpoint;
    worker.wait([&] { return request.ended || endpoint.failed; }, deadline);
    if (request.ended && request.status == UCS_OK) continue;
    if (endpoint.failed) {
      throw std::runtime_error("no connection to rank " + std::to_string(peer) + ": " +
                               endpoint.failure);
    }
    if (silent.empty() || silent.back() != peer) silent.push_back(peer);
  }
  if (silent.empty()) return;
  for (const UcxRequestPtr& request : requests) worker.cancel(*request);
  throw std::runtime_error(rankList(silent) + " did not answer over UCX");
}

}  // namespace dmuon
#endif
