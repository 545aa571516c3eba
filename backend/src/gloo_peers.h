// Messages over the inner CPU backend's send and receive.
//
// Send and receive of c10d do not order against collectives, so owner collectives run beside them.
// The price is a range of tags: a user's tag must be below kReservedTags.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <mutex>
#include <vector>

#include "peers.h"
#include "watchdog.h"

namespace dmuon {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// The inner backend as everybody in the process shares it.
struct InnerBackend {
  explicit InnerBackend(BackendPtr inner) : backend(std::move(inner)) {}
  ~InnerBackend();  // not inline: tests/sanitizers/thread.supp names it

  // Gloo keeps a pointer to the memory of a transfer that has not completed, and if that memory
  // goes away before the connection, its thread spins on the connection for ever. So transfers that
  // were given up, and the memory behind them, stay here until the backend has gone (destroyed
  // first, being declared last).
  std::vector<Transfer> given_up_transfers;
  std::vector<std::shared_ptr<void>> given_up_memory;
  // Held while something is handed to the backend (not while it is waited for): c10d expects one
  // submitting thread per backend, and the owner collectives are a second one.
  std::mutex submission;
  Watchdog watchdog;
  BackendPtr backend;
};

class GlooTransport final : public Transport {
 public:
  explicit GlooTransport(std::shared_ptr<InnerBackend> inner) : inner_(std::move(inner)) {}
  const char* name() const override { return "gloo"; }
  std::unique_ptr<Peers> newPeers() override;

 private:
  std::shared_ptr<InnerBackend> inner_;
};

class GlooPeers final : public Peers {
 public:
  explicit GlooPeers(std::shared_ptr<InnerBackend> inner) : inner_(std::move(inner)) {
    inner_->watchdog.add(&post_);
  }
  ~GlooPeers() override { inner_->watchdog.remove(&post_); }
  GlooPeers(const GlooPeers&) = delete;
  GlooPeers& operator=(const GlooPeers&) = delete;

  Limits limits() const override;
  Transfer send(int peer, int tag, Bytes bytes) override;
  Transfer receive(int peer, int tag, Bytes bytes) override;
  Outcome wait(Transfer& transfer, Clock::time_point deadline) override;
  void giveUp(std::vector<Transfer> transfers, std::shared_ptr<void> memory) override;
  void interrupt() override { inner_->watchdog.interrupt(&post_); }
  bool interrupted() const override { return inner_->watchdog.interrupted(&post_); }

 private:
  std::shared_ptr<InnerBackend> inner_;
  Watchdog::Post post_;
};

}  // namespace dmuon
