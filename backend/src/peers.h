// Tagged messages between the ranks of a group, over the inner CPU backend's send and receive.
//
// Send and receive of c10d do not order against collectives, so owner collectives run beside them.
// The price is a range of tags: kReservedTags and above belong to dmuon.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "watchdog.h"

namespace dmuon {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// A user's tag must be smaller.
constexpr int kReservedTags = 1 << 30;

// Several owner collectives on one backend have a channel each, and with it tags of their own.
constexpr int kMaxChannels = 1 << 14;

// One message under way.
struct Transfer {
  int peer = -1;
  at::Tensor bytes;
  c10::intrusive_ptr<c10d::Work> work;  // null if it could not even be started
  std::string failure;                  // why it failed
  bool done = false;
};

// The inner backend as everybody in the process shares it.
struct InnerBackend {
  explicit InnerBackend(BackendPtr inner) : backend(std::move(inner)) {}

  // Gloo keeps a pointer to the memory of a transfer that has not completed, and if that memory
  // goes away before the connection, its thread spins on the connection for ever. So transfers that
  // were given up, and the tensors behind them, stay here until the backend has gone (destroyed
  // first, being declared last).
  std::vector<Transfer> given_up_transfers;
  std::vector<at::Tensor> given_up_tensors;
  // Held while something is handed to the backend (not while it is waited for): c10d expects one
  // submitting thread per backend, and the owner collectives are a second one.
  std::mutex submission;
  Watchdog watchdog;
  BackendPtr backend;
};

class Peers {
 public:
  enum class Outcome { done, timed_out, gone, interrupted };

  explicit Peers(std::shared_ptr<InnerBackend> inner) : inner_(std::move(inner)) {
    inner_->watchdog.add(&post_);
  }
  ~Peers() { inner_->watchdog.remove(&post_); }
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // `bytes`: contiguous CPU memory. Never throws: a transfer that could not be started says so when
  // it is waited for.
  Transfer send(int peer, int tag, at::Tensor bytes);
  Transfer receive(int peer, int tag, at::Tensor bytes);

  // `gone` fills transfer.failure; after `timed_out`, wait again at will. From one thread at a
  // time.
  Outcome wait(Transfer& transfer, Clock::time_point deadline);

  // For transfers that have not completed and never will be waited for again.
  void giveUp(std::vector<Transfer> transfers, const std::vector<at::Tensor>& memory);

  // Ends the current and all later waits. From any thread.
  void interrupt() { inner_->watchdog.interrupt(&post_); }
  bool interrupted() const { return inner_->watchdog.interrupted(&post_); }

 private:
  std::shared_ptr<InnerBackend> inner_;
  Watchdog::Post post_;
};

}  // namespace dmuon
