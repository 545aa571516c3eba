// One communicator of one channel, with the stream that all its calls go to.
//
// It is non-blocking: every wait for NCCL has a deadline and ends when abort() is called, so that a
// peer that does not come costs the time-out and no more. (A blocking communicator's set-up and
// group launches wait inside NCCL, for ever if need be.)
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <string>

#include "nccl_api.h"
#include "peers.h"

namespace dmuon {

class NcclCommunicator {
 public:
  struct Setting {
    std::string name;  // opens error texts
    int rank = 0;
    int size = 1;
    c10::Device device{c10::DeviceType::CUDA, 0};
    bool high_priority = false;
    bool peer_to_peer = false;  // sends and receives will be used: connect all pairs
    // Must be equal on all ranks: lines of text, the first that differs is named.
    std::string must_match;
    std::chrono::milliseconds timeout{0};
  };

  // Meets the other ranks in `store`, connects to all of them and moves a few bytes over every kind
  // of call, so that no later operation has to set up a connection (as far as NCCL lets that be
  // done ahead: for large operations it may choose an algorithm with connections of its own). A
  // group of one has no communicator, only a stream.
  NcclCommunicator(NcclApiPtr api, const c10::intrusive_ptr<c10d::Store>& store, Setting setting);
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  const c10::Stream& stream() const { return stream_; }
  c10::Device device() const { return setting_.device; }
  int rank() const { return setting_.rank; }
  int size() const { return setting_.size; }
  NcclApi& api() const { return *api_; }

  // Makes `calls` as one group and waits until they have been launched. From one thread at a time.
  void group(std::chrono::milliseconds timeout, const std::function<void(NcclApi::Comm)>& calls);

  // What NCCL says has gone wrong, if anything. From any thread.
  std::optional<std::string> error();
  // Ends all that runs or waits to run. From any thread; a group() under way fails. Never throws.
  void abort();
  // For a communicator on which everything has completed: ends it in an orderly way, else aborts.
  void close(std::chrono::milliseconds timeout);

 private:
  void requireAgreement(c10d::Store& store, Clock::time_point deadline);
  void connect(c10d::Store& store, Clock::time_point deadline);
  void warmUp(Clock::time_point deadline);
  void settle(const char* what, Clock::time_point deadline);

  const NcclApiPtr api_;
  const Setting setting_;
  const c10::Stream stream_;
  std::atomic<bool> aborted_{false};
  std::mutex calls_;  // held while calls are made
  NcclApi::Comm comm_ = nullptr;
};

}  // namespace dmuon
