#ifdef DMUON_HAVE_UCX
#include "ucx_peers.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "agreement.h"
#include "message_bytes.h"
#include "ucx_worker.h"

namespace dmuon {
namespace {

constexpr int kMaxRanks = 1 << 16;
constexpr uint64_t kInboxes = 1 << 17;

// A header with so much payload still is one fragment for shared memory and TCP.
constexpr int64_t kInlineBytes = 8192 - 128;

// A piece should fit the second-level cache together with its sum; the scratch of a reduction over
// many ranks should not grow without bound.
constexpr int64_t kPieceBytes = UcxPool::kSlotBytes;
constexpr int64_t kSmallestPiece = 32 << 10;
constexpr int64_t kPiecesAhead = 4;
constexpr int64_t kScratchBytes = 16 << 20;

uint64_t tagOf(uint64_t inbox, int source, uint64_t low) {
  return inbox << 47 | static_cast<uint64_t>(source) << 30 | low;
}
// Set-up messages, and payload that had to be sent after a ticket without a slot.
constexpr uint64_t kAside = uint64_t{1} << 46;

// What stands in front of the pool's key and the address.
struct Contact {
  uint64_t inbox = 0;
  uint64_t host = 0;
  int64_t pid = 0;
  uint64_t pool = 0;
  int64_t pool_slots = 0;
  uint64_t pool_key_bytes = 0;
};

// Says where a payload is: in a slot of the sender's pool, or in a message of its own (slot < 0).
struct Ticket {
  int64_t slot = -1;
  int64_t bytes = 0;
};

// State of a Transfer.
struct Flight {
  UcxRequestPtr request;
  bool ticket = false;  // a ticket is being received, not yet the payload
};

}  // namespace

std::string ucxContact() {
  UcxWorker& worker = UcxWorker::get();
  const UcxContact& own = worker.contact();
  const Contact contact{worker.newInbox() % kInboxes, own.host, own.pid, own.pool, own.pool_slots,
                        own.pool_key.size()};
  return std::string(reinterpret_cast<const char*>(&contact), sizeof(contact)) + own.pool_key +
         own.address;
}

struct UcxTransport::Shared {
  struct Peer {
    uint64_t inbox = 0;
    UcxEndpoint* endpoint = nullptr;
    bool reads_pool = false;  // this process's
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
    return send(peer, low(tag), std::move(bytes));
  }

  Transfer receive(int peer, int tag, Bytes bytes) override {
    return receive(peer, low(tag), std::move(bytes));
  }

  std::vector<Transfer> sendPayload(const std::vector<int>& to, int tag,
                                    const Payload& payload) override {
    std::vector<int> readers, others;
    for (int peer : to) (shared_->peers[peer].reads_pool ? readers : others).push_back(peer);
    std::vector<Transfer> transfers;
    if (!readers.empty()) {
      std::optional<UcxPool::Slot> slot;
      if (payload.size <= UcxPool::kSlotBytes) {
        slot = shared_->worker.pool().take(static_cast<uint32_t>(readers.size()));
      }
      if (slot && payload.data != nullptr) std::memcpy(slot->data, payload.data, payload.size);
      if (slot && payload.data == nullptr) payload.write(slot->data);
      const Ticket ticket{slot ? slot->index : -1, payload.size};
      for (int peer : readers) {
        transfers.push_back(send(peer, low(tag), copyOf(&ticket, sizeof(ticket))));
      }
      if (slot) readers.clear();
    }
    if (readers.empty() && others.empty()) return transfers;
    Bytes bytes{const_cast<char*>(payload.data), payload.size, {}};
    if (bytes.data == nullptr) {
      bytes = newBytes(payload.size);
      payload.write(bytes.data);
    }
    for (int peer : readers) transfers.push_back(send(peer, low(tag) | kAside, bytes));
    for (int peer : others) transfers.push_back(send(peer, low(tag), bytes));
    return transfers;
  }

  bool lends(int peer) const override { return shared_->peers[peer].endpoint->pool != nullptr; }

  Transfer receivePayload(int peer, int tag, Bytes bytes) override {
    if (!lends(peer)) return receive(peer, tag, std::move(bytes));
    Transfer transfer = receive(peer, low(tag), newBytes(sizeof(Ticket)));
    if (transfer.state) static_cast<Flight*>(transfer.state.get())->ticket = true;
    return transfer;
  }

  Outcome wait(Transfer& transfer, Clock::time_point deadline) override {
    if (transfer.done) return Outcome::done;
    if (!transfer.state) return Outcome::gone;
    auto& flight = *static_cast<Flight*>(transfer.state.get());
    Outcome outcome = wait(transfer, *flight.request, deadline);
    if (outcome == Outcome::done && flight.ticket) {
      flight.ticket = false;
      outcome = redeem(transfer, flight, deadline);
    }
    transfer.done = outcome == Outcome::done;
    return outcome;
  }

  // Receives are cancelled. Sends get a moment, for they may be what tells the peers that this rank
  // has given up; then the worker's thread looks after them.
  void giveUp(std::vector<Transfer> transfers, std::shared_ptr<void> memory) override {
    const auto deadline = Clock::now() + std::chrono::milliseconds(50);
    for (Transfer& transfer : transfers) {
      auto* flight = static_cast<Flight*>(transfer.state.get());
      if (flight == nullptr || flight->request->ended) continue;
      const UcxRequestPtr request = flight->request;
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

  Transfer send(int peer, uint64_t tag, Bytes bytes) {
    const auto& to = shared_->peers[peer];
    return start(peer, std::move(bytes), [&](const Bytes& data) {
      return shared_->worker.send(*to.endpoint, data, tagOf(to.inbox, shared_->rank, tag));
    });
  }

  Transfer receive(int peer, uint64_t tag, Bytes bytes) {
    const uint64_t inbox = shared_->peers[shared_->rank].inbox;
    return start(peer, std::move(bytes), [&](const Bytes& data) {
      return shared_->worker.receive(data, tagOf(inbox, peer, tag));
    });
  }

  template <typename Start>
  Transfer start(int peer, Bytes bytes, Start&& start_request) {
    Transfer transfer;
    transfer.peer = peer;
    transfer.bytes = std::move(bytes);
    try {
      transfer.state = std::make_shared<Flight>(Flight{start_request(transfer.bytes)});
    } catch (const std::exception& error) {
      transfer.failure = error.what();
    }
    return transfer;
  }

  Outcome wait(Transfer& transfer, const UcxRequest& request, Clock::time_point deadline) {
    const UcxEndpoint& endpoint = *shared_->peers[transfer.peer].endpoint;
    shared_->worker.wait([&] { return request.ended || interrupted_ || endpoint.failed; },
                         deadline);
    if (request.ended) {
      transfer.received = request.received;
      if (request.status == UCS_OK) return Outcome::done;
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

  // Exchanges a ticket that has come for the payload.
  Outcome redeem(Transfer& transfer, Flight& flight, Clock::time_point deadline) {
    Ticket ticket;
    std::memcpy(&ticket, transfer.bytes.data, sizeof(ticket));
    const auto& from = shared_->peers[transfer.peer];
    try {
      if (ticket.slot >= 0) {
        transfer.bytes = from.endpoint->pool->lend(ticket.slot, ticket.bytes);
        transfer.received = ticket.bytes;
        return Outcome::done;
      }
      transfer.bytes = newBytes(ticket.bytes);
      const uint64_t tag = flight.request->tag | kAside;
      flight.request = shared_->worker.receive(transfer.bytes, tag);
    } catch (const std::exception& error) {
      transfer.failure = error.what();
      return Outcome::gone;
    }
    return wait(transfer, *flight.request, deadline);
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
    const size_t address = sizeof(contact) + contact.pool_key_bytes;
    if (contacts[r].size() <= address) {
      throw std::runtime_error("rank " + std::to_string(r) + " has told " +
                               std::to_string(contacts[r].size()) + " bytes, too few to reach it");
    }
    peer.endpoint = &worker.connect(
        {contact.host, contact.pid, contact.pool, static_cast<int>(contact.pool_slots),
         contacts[r].substr(sizeof(contact), contact.pool_key_bytes), contacts[r].substr(address)});
  }
  // A message to and from everybody: connections are made now, not in a collective. It says whether
  // the sender reads the receiver's pool.
  std::vector<Bytes> answers(size);
  std::vector<UcxRequestPtr> requests;
  for (int r = 0; r < size; ++r) {
    if (r == rank) continue;
    const Shared::Peer& peer = shared_->peers[r];
    const char reads = peer.endpoint->pool != nullptr ? 1 : 0;
    answers[r] = newBytes(sizeof(reads));
    requests.push_back(worker.receive(answers[r], tagOf(shared_->peers[rank].inbox, r, kAside)));
    requests.push_back(worker.send(*peer.endpoint, copyOf(&reads, sizeof(reads)),
                                   tagOf(peer.inbox, rank, kAside)));
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
  if (silent.empty()) {
    for (int r = 0; r < size; ++r) {
      if (r != rank) shared_->peers[r].reads_pool = *answers[r].data != 0;
    }
    return;
  }
  for (const UcxRequestPtr& request : requests) worker.cancel(*request);
  throw std::runtime_error(rankList(silent) + " did not answer over UCX");
}

}  // namespace dmuon
#endif
