#include "peers.h"

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

template <typename Start>
Transfer start(int peer, at::Tensor bytes, std::mutex& submission, Start&& start_work) {
  Transfer transfer;
  transfer.peer = peer;
  transfer.bytes = std::move(bytes);
  std::vector<at::Tensor> list{transfer.bytes};
  try {
    std::lock_guard<std::mutex> lock(submission);
    transfer.work = start_work(list);
  } catch (const std::exception& error) {
    transfer.failure = essence(error.what());
  }
  return transfer;
}

}  // namespace

Transfer Peers::send(int peer, int tag, at::Tensor bytes) {
  return start(peer, std::move(bytes), inner_->submission,
               [&](auto& list) { return inner_->backend->send(list, peer, tag); });
}

Transfer Peers::receive(int peer, int tag, at::Tensor bytes) {
  return start(peer, std::move(bytes), inner_->submission,
               [&](auto& list) { return inner_->backend->recv(list, peer, tag); });
}

Peers::Outcome Peers::wait(Transfer& transfer, Clock::time_point deadline) {
  if (transfer.done) return Outcome::done;
  if (!transfer.work) return Outcome::gone;
  inner_->watchdog.arm(&post_, transfer.work.get(), deadline);
  try {
    transfer.done = transfer.work->wait(kWithoutTimeout);
  } catch (const std::exception& error) {
    transfer.failure = essence(error.what());
  }
  const bool aborted = inner_->watchdog.disarm(&post_);
  if (!transfer.failure.empty()) return Outcome::gone;
  if (transfer.done) return Outcome::done;
  return aborted && !interrupted() ? Outcome::timed_out : Outcome::interrupted;
}

void Peers::giveUp(std::vector<Transfer> transfers, const std::vector<at::Tensor>& memory) {
  std::lock_guard<std::mutex> lock(inner_->submission);
  for (Transfer& transfer : transfers) {
    inner_->given_up_transfers.push_back(std::move(transfer));
  }
  inner_->given_up_tensors.insert(inner_->given_up_tensors.end(), memory.begin(), memory.end());
}

}  // namespace dmuon
