// A transport between threads of one process, whose messages a test can hold back.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../../backend/src/peers.h"

namespace dmuon::testing {

// The wires of one group.
class Mailbox {
 public:
  // Asked, under the lock, for every payload message with its number on its way from -> to; true
  // holds it and what follows on that way back until releaseAll().
  using Hold = std::function<bool(int from, int to, int number)>;
  using Sent = std::function<void()>;

  void holdBack(Hold hold) { hold_ = std::move(hold); }
  // Called after every payload message that was sent, held back or not.
  void onPayload(Sent sent) { sent_ = std::move(sent); }

  void send(int from, int to, int tag, std::string bytes) {
    const bool payload = (tag & 3) == 3;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const Way way{from, to, tag};
      const bool held = payload && hold_ && hold_(from, to, numbers_[{from, to}]++);
      if (held || held_.count(way) > 0) {
        held_[way].push_back(std::move(bytes));
      } else {
        arrived_[way].push_back(std::move(bytes));
      }
      changed_.notify_all();
    }
    if (payload && sent_) sent_();
  }
  void releaseAll() {
    std::lock_guard<std::mutex> lock(mutex_);
    hold_ = {};
    for (auto& [way, messages] : held_) {
      for (std::string& bytes : messages) arrived_[way].push_back(std::move(bytes));
    }
    held_.clear();
    changed_.notify_all();
  }
  // From now on nothing comes from this rank any more.
  void kill(int rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    dead_ = rank;
    changed_.notify_all();
  }

  Peers::Outcome receive(int from, int to, int tag, const Bytes& into, Clock::time_point deadline,
                         const bool& interrupted) {
    std::unique_lock<std::mutex> lock(mutex_);
    std::deque<std::string>& messages = arrived_[{from, to, tag}];
    const auto ready = [&] { return interrupted || !messages.empty() || dead_ == from; };
    if (!changed_.wait_until(lock, deadline, ready)) return Peers::Outcome::timed_out;
    if (interrupted) return Peers::Outcome::interrupted;
    if (messages.empty()) return Peers::Outcome::gone;
    const size_t bytes = std::min(messages.front().size(), static_cast<size_t>(into.size));
    std::memcpy(into.data, messages.front().data(), bytes);
    messages.pop_front();
    return Peers::Outcome::done;
  }
  void interrupt(bool& flag) {
    std::lock_guard<std::mutex> lock(mutex_);
    flag = true;
    changed_.notify_all();
  }

 private:
  using Way = std::tuple<int, int, int>;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Way, std::deque<std::string>> arrived_, held_;
  std::map<std::pair<int, int>, int> numbers_;
  Hold hold_;
  Sent sent_;
  int dead_ = -1;
};

class MailboxPeers final : public Peers {
 public:
  MailboxPeers(std::shared_ptr<Mailbox> box, int rank, Limits limits)
      : box_(std::move(box)), rank_(rank), limits_(limits) {}

  Limits limits() const override { return limits_; }
  Transfer send(int peer, int tag, Bytes bytes) override {
    box_->send(rank_, peer, tag, std::string(bytes.data, bytes.size));
    Transfer transfer;
    transfer.peer = peer;
    transfer.done = true;
    return transfer;
  }
  Transfer receive(int peer, int tag, Bytes bytes) override {
    Transfer transfer;
    transfer.peer = peer;
    transfer.bytes = std::move(bytes);
    transfer.state = std::make_shared<int>(tag);
    return transfer;
  }
  Outcome wait(Transfer& transfer, Clock::time_point deadline) override {
    if (transfer.done) return Outcome::done;
    const int tag = *std::static_pointer_cast<int>(transfer.state);
    const Outcome outcome =
        box_->receive(transfer.peer, rank_, tag, transfer.bytes, deadline, interrupted_);
    transfer.done = outcome == Outcome::done;
    transfer.received = transfer.bytes.size;
    if (outcome == Outcome::gone) transfer.failure = "its mailbox is closed";
    return outcome;
  }
  void giveUp(std::vector<Transfer>, std::shared_ptr<void>) override {}
  void interrupt() override { box_->interrupt(interrupted_); }
  bool interrupted() const override { return interrupted_; }

 private:
  const std::shared_ptr<Mailbox> box_;
  const int rank_;
  const Limits limits_;
  bool interrupted_ = false;
};

class MailboxTransport final : public Transport {
 public:
  MailboxTransport(std::shared_ptr<Mailbox> box, int rank, Peers::Limits limits)
      : box_(std::move(box)), rank_(rank), limits_(limits) {}
  const char* name() const override { return "mailbox"; }
  std::unique_ptr<Peers> newPeers() override {
    return std::make_unique<MailboxPeers>(box_, rank_, limits_);
  }

 private:
  const std::shared_ptr<Mailbox> box_;
  const int rank_;
  const Peers::Limits limits_;
};

}  // namespace dmuon::testing
