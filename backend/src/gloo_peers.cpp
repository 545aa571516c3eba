#include "gloo_peers.h"

#include <ATen/ops/from_blob.h>

#include <exception>

namespace dmuon {
namespace {

// Longer than any deadline: the watchdog ends a wait, not Gloo.
constexpr std::chrono::hours kWithoutTimeout{24 * 365};

// Gloo's messages start with a source position and go on with general advice; the first sentence is
// the fact.
std::string essence(const std::string& message) {
  size_t begin = message.find("] ");
  begin = message.rfind('[', 0) == 0 && begin != std::string::npos ? begin + 2 : 0;
  size_t end = message.find(". This is typically", begin);
  if (end == std::string::npos) end = message.find('\n', begin);
  return message.substr(begin, end == std::string::npos ? end : end - begin);
}

// What a Transfer's state points to.
using WorkHolder = c10::intrusive_ptr<c10d::Work>;

c10d::Work* workOf(const Transfer& transfer) {
  return transfer.state ? static_cast<WorkHolder*>(transfer.state.get())->get() : nullptr;
}

template <typename Start>
Transfer start(int peer, Bytes bytes, std::mutex& submission, Start&& start_work) {
  Transfer transfer;
  transfer.peer = peer;
  transfer.received = bytes.size;
  std::vector<at::Tensor> list{at::from_blob(bytes.data, {bytes.size}, at::kByte)};
  transfer.bytes = std::move(bytes);
  try {
    std::lock_guard<std::mutex> lock(submission);
    transfer.state = std::make_shared<WorkHolder>(start_work(list));
  } catch (const std::exception& error) {
    transfer.failure = essence(error.what());
  }
  return transfer;
}

}  // namespace

InnerBackend::~InnerBackend() = default;

std::unique_ptr<Peers> GlooTransport::newPeers() { return std::make_unique<GlooPeers>(inner_); }

// Large enough that a message's own cost does not count, and small enough that the sum of one piece
// and the wires of the next overlap.
Peers::Limits GlooPeers::limits() const {
  Limits limits;
  limits.piece_bytes = 1 << 20;
  limits.pieces_ahead = 4;
  return limits;
}

Transfer GlooPeers::send(int peer, int tag, Bytes bytes) {
  return start(peer, std::move(bytes), inner_->submission,
               [&](auto& list) { return inner_->backend->send(list, peer, tag); });
}

Transfer GlooPeers::receive(int peer, int tag, Bytes bytes) {
  return start(peer, std::move(bytes), inner_->submission,
               [&](auto& list) { return inner_->backend->recv(list, peer, tag); });
}

Peers::Outcome GlooPeers::wait(Transfer& transfer, Clock::time_point deadline) {
  if (transfer.done) return Outcome::done;
  c10d::Work* const work = workOf(transfer);
  if (work == nullptr) return Outcome::gone;
  inner_->watchdog.arm(&post_, work, deadline);
  try {
    transfer.done = work->wait(kWithoutTimeout);
  } catch (const std::exception& error) {
    transfer.failure = essence(error.what());
  }
  const bool aborted = inner_->watchdog.disarm(&post_);
  if (!transfer.failure.empty()) return Outcome::gone;
  if (transfer.done) return Outcome::done;
  return aborted && !interrupted() ? Outcome::timed_out : Outcome::interrupted;
}

void GlooPeers::giveUp(std::vector<Transfer> transfers, std::shared_ptr<void> memory) {
  std::lock_guard<std::mutex> lock(inner_->submission);
  for (Transfer& transfer : transfers) {
    inner_->given_up_transfers.push_back(std::move(transfer));
  }
  inner_->given_up_memory.push_back(std::move(memory));
}

}  // namespace dmuon
