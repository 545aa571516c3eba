// Tagged messages between the ranks of a group: what the owner collectives need of a transport.
//
// A Transport belongs to a group; each channel of owner collectives takes Peers of its own from it.
// There are two: over the inner Gloo backend (gloo_peers.h), and over UCX (ucx_peers.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace dmuon {

using Clock = std::chrono::steady_clock;

// Messages carry the tags from here to 2^31 - 1.
constexpr int kReservedTags = 1 << 30;

// Several owner collectives on one transport have a channel each, and with it tags of their own.
constexpr int kMaxChannels = 1 << 14;

// Contiguous host memory, and what keeps it alive (null: somebody else does).
struct Bytes {
  char* data = nullptr;
  int64_t size = 0;
  std::shared_ptr<void> owner;
};

// Uninitialized, aligned to 64 bytes.
Bytes newBytes(int64_t size);

// One message under way.
struct Transfer {
  int peer = -1;
  Bytes bytes;
  int64_t received = 0;         // of a receive that is done: how long the message is
  std::shared_ptr<void> state;  // the transport's; null if it could not even be started
  std::string failure;          // why it failed
  bool done = false;
};

class Peers {
 public:
  enum class Outcome { done, timed_out, gone, interrupted };

  // How messages should be cut for this transport. Equal on all ranks.
  struct Limits {
    // A message may be shorter than its receive by up to this much, and one of this size costs
    // hardly more than an empty one: so much payload may ride along with a header.
    int64_t inline_bytes = 0;
    // Payload goes in pieces of at most this size, of which this many are under way per peer.
    int64_t piece_bytes = std::numeric_limits<int64_t>::max();
    int64_t pieces_ahead = 1;
  };

  virtual ~Peers() = default;
  virtual Limits limits() const { return {}; }

  // Messages of one tag between two ranks arrive in the order in which they were sent. Never
  // throws: a transfer that could not be started says so when it is waited for.
  virtual Transfer send(int peer, int tag, Bytes bytes) = 0;
  virtual Transfer receive(int peer, int tag, Bytes bytes) = 0;

  // Payload that goes to several peers, or that has to be packed first.
  struct Payload {
    int64_t size = 0;
    const char* data = nullptr;        // null if it isn't in one piece
    std::function<void(char*)> write;  // puts it there, in one piece
  };
  // As send() to each of `to`. A payload may be received in other memory than that given: what is
  // then in transfer.bytes belongs to the sender, and must be let go of soon.
  virtual std::vector<Transfer> sendPayload(const std::vector<int>& to, int tag,
                                            const Payload& payload);
  // Whether the payloads of `peer` come so. `bytes.data` may then be null.
  virtual bool lends(int peer) const { return false; }
  virtual Transfer receivePayload(int peer, int tag, Bytes bytes) {
    return receive(peer, tag, std::move(bytes));
  }

  // `gone` fills transfer.failure; after `timed_out`, wait again at will. From one thread at a
  // time.
  virtual Outcome wait(Transfer& transfer, Clock::time_point deadline) = 0;

  // For transfers that have not completed and never will be waited for again; `memory` is kept as
  // long as they need it.
  virtual void giveUp(std::vector<Transfer> transfers, std::shared_ptr<void> memory) = 0;

  // Ends the current and all later waits. From any thread.
  virtual void interrupt() = 0;
  virtual bool interrupted() const = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char* name() const = 0;
  virtual std::unique_ptr<Peers> newPeers() = 0;
};

}  // namespace dmuon
