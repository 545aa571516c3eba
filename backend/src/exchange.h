// Runs one owner collective against the peers of a group: agree, then move the payload.
//
// Where the transport allows, blocks of a few kilobytes ride along with the headers, and larger
// ones go in pieces: a reduction adds piece by piece while others are on their way. Scratch per
// operation is pieces_ahead * piece_bytes per peer to receive a reduction, and as much to send, or
// to receive a broadcast, where small tensors must be packed; none for peers that lend memory.
//
// Everything here runs on one thread at a time. An error of type Fatal means that this rank and its
// peers no longer agree on where they are: the group cannot be used again. Any other error leaves
// every rank at the same point, with all messages delivered and nothing changed.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "operation.h"
#include "peers.h"
#include "pieces.h"

namespace dmuon {

class Exchange {
 public:
  struct Fatal : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  enum class Phase : int { header = 0, text = 1, flags = 2, payload = 3 };

  // `transport` may be null if size is 1. `channel` separates this exchange's messages from those
  // of others over the same transport.
  Exchange(const std::shared_ptr<Transport>& transport, int rank, int size, int channel);
  ~Exchange();

  // Returns the flags of all ranks.
  std::vector<uint8_t> run(Operation& op, std::chrono::milliseconds timeout);

  // Tells every peer, instead of the header of operation `seq`, that this rank takes part in
  // nothing from there on. Does not block; from any thread, but not while run() is active.
  void leave(uint64_t seq, const std::string& why);

  // Makes run() fail soon, now and later. From any thread.
  void interrupt();
  bool interrupted() const { return peers_ && peers_->interrupted(); }

 private:
  // Messages of one kind that are waited for together.
  struct Round {
    Phase kind = Phase::header;
    std::vector<Transfer> receives = {};
    std::vector<Transfer> sends = {};
  };
  // What every rank sends at the start of an operation: a header, and small payload behind it.
  struct Opening {
    std::vector<Header> headers;  // by rank
    std::vector<Bytes> messages;  // by rank; this rank's own is empty
    const char* payloadOf(int rank) const { return messages[rank].data + sizeof(Header); }
  };
  // The payload as it travels: blocks by owner, each inside the opening or in pieces.
  struct Route;

  Route routeOf(const Operation& op) const;
  Opening exchangeHeaders(Operation& op, const Route& route);
  Bytes openingFor(int peer, const Header& header, const Operation& op, const Route& route) const;
  void takeHeader(Operation& op, Round& round, const Transfer& transfer, Header& header);
  void agree(Operation& op, const std::vector<Header>& headers);
  void failTogether(Operation& op, const std::vector<Header>& headers);
  std::vector<uint8_t> mergeFlags(Operation& op, const std::vector<Header>& headers);
  void reduce(Operation& op, const Route& route, const Opening& opening);
  void broadcast(Operation& op, const Route& route, const Opening& opening);
  // Waits until the slices of this rank's inputs are there, if another operation makes them.
  // `round` is given up on failure.
  void awaitInputs(Operation& op, Round& round, const std::vector<Slice>& slices);
  // For the operation itself, and for whoever goes on with its outputs.
  void report(Operation& op, const std::vector<Slice>& slices);
  void reportAll(Operation& op, const Block& block);
  bool awaitOpeningInputs(Operation& op, const Route& route);
  // Runs the rounds 0, 1, ..., count - 1, each made by start(i) some rounds ahead; consume(i) is
  // called when all messages of round i have been received.
  void runRounds(Operation& op, size_t count, const std::function<Round(size_t)>& start,
                 const std::function<void(size_t, Round&)>& consume);

  // Sends `mine` to every peer and receives from each as many bytes as bytes_from(peer) says.
  Round swapWithAll(uint64_t seq, Phase kind, const Bytes& mine,
                    const std::function<int64_t(int)>& bytes_from);
  void setPatience(std::chrono::milliseconds patience);
  void finish(Operation& op, Round& round);
  void await(Operation& op, Round& round, std::vector<Transfer>& transfers,
             const std::function<void(const Transfer&)>& on_done = {});
  std::vector<Transfer*> look(Operation& op, Round& round, const std::vector<Transfer*>& pending,
                              std::chrono::milliseconds patience,
                              const std::function<void(const Transfer&)>& on_done);
  [[noreturn]] void failSilent(Operation& op, Round& round, const std::vector<Transfer*>& pending);
  [[noreturn]] void fail(Operation& op, Round& round, const std::string& why);

  // A peer that gives up says so where the header of its next operation would be. These look there
  // early, while something else of that peer's is being waited for.
  Transfer& nextHeaderOf(int peer, uint64_t seq);
  // Fails if the peer has given up; says so if its connection has ended, which is no fault once
  // everything from it is here.
  std::optional<std::string> endOf(Operation& op, Round& round, int peer, Clock::time_point until);
  std::string receiveText(uint64_t seq, int peer, uint64_t bytes);

  Header headerOf(const Operation& op) const;
  int tagOf(uint64_t seq, Phase phase) const;

  const int rank_;
  const int size_;
  const int channel_;
  std::unique_ptr<Peers> peers_;  // null in a group of one
  Peers::Limits limits_;
  std::map<int, Transfer> early_;          // receives of the next operation's headers, by peer
  std::deque<Round> ahead_;                // rounds that have been started
  std::chrono::milliseconds patience_{0};  // how long peers are waited for in this phase
  Clock::time_point deadline_;
};

}  // namespace dmuon
