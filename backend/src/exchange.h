// Runs one owner collective against the peers of a group: agree, then move the payload.
//
// Everything here runs on one thread at a time. An error of type Fatal means that this rank and its
// peers no longer agree on where they are: the group cannot be used again. Any other error leaves
// every rank at the same point, with all messages delivered and nothing changed.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "operation.h"
#include "peers.h"

namespace dmuon {

class Exchange {
 public:
  struct Fatal : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  enum class Phase : int { header = 0, text = 1, flags = 2, payload = 3 };
  struct Moved {
    int64_t sent = 0;
    int64_t received = 0;
    std::vector<uint8_t> flags;
  };

  // `inner` may be null if size is 1. `channel` separates this exchange's messages from those of
  // others over the same backend.
  Exchange(std::shared_ptr<InnerBackend> inner, int rank, int size, int channel);
  ~Exchange();

  Moved run(Operation& op, std::chrono::milliseconds timeout);

  // Tells every peer, instead of the header of operation `seq`, that this rank takes part in
  // nothing from there on. Does not block; from any thread, but not while run() is active.
  void leave(uint64_t seq, const std::string& why);

  // Makes run() fail soon, now and later. From any thread.
  void interrupt();
  bool interrupted() const { return peers_ && peers_->interrupted(); }

 private:
  // Messages of one kind, at most one per peer and direction.
  struct Round {
    Phase kind = Phase::header;
    std::vector<Transfer> receives = {};
    std::vector<Transfer> sends = {};
  };

  std::vector<Header> exchangeHeaders(Operation& op);
  void agree(Operation& op, const std::vector<Header>& headers);
  void failTogether(Operation& op, const std::vector<Header>& headers);
  std::vector<uint8_t> mergeFlags(Operation& op, const std::vector<Header>& headers);
  void reduce(Operation& op, Moved& moved);
  void broadcast(Operation& op, Moved& moved);

  // Sends `mine` to every peer and receives from each as many bytes as bytes_from(peer) says.
  Round swapWithAll(uint64_t seq, Phase kind, const at::Tensor& mine,
                    const std::function<int64_t(int)>& bytes_from);
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
  void failIfLeft(Operation& op, Round& round, int peer);
  std::string receiveText(uint64_t seq, int peer, uint64_t bytes);

  Header headerOf(const Operation& op) const;
  int tagOf(uint64_t seq, Phase phase) const;

  const int rank_;
  const int size_;
  const int channel_;
  std::optional<Peers> peers_;     // none in a group of one
  std::map<int, Transfer> early_;  // receives of the next operation's headers, by peer
  std::chrono::milliseconds timeout_{0};
  Clock::time_point deadline_;
};

}  // namespace dmuon
