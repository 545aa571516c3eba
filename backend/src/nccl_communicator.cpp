#include "nccl_communicator.h"

#include <cstring>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "agreement.h"

namespace dmuon {
namespace {

std::string keyOf(int rank) { return "rank/" + std::to_string(rank); }

std::vector<uint8_t> bytesOf(const std::string& text) { return {text.begin(), text.end()}; }

// Waits with pauses that begin short, since most waits are.
template <typename Done>
bool waitUntil(Clock::time_point deadline, Done&& done) {
  std::chrono::microseconds pause{1};
  while (!done()) {
    if (Clock::now() >= deadline) return false;
    if (pause.count() < 8) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(pause);
    }
    if (pause < std::chrono::microseconds(500)) pause *= 2;
  }
  return true;
}

}  // namespace

NcclCommunicator::NcclCommunicator(NcclApiPtr api, const c10::intrusive_ptr<c10d::Store>& store,
                                   Setting setting)
    : api_(std::move(api)),
      setting_(std::move(setting)),
      stream_(api_->newStream(setting_.device, setting_.high_priority)) {
  if (setting_.size == 1) return;
  TORCH_CHECK(store, setting_.name, ": there is no store to meet the other ranks in: pass one");
  const auto deadline = Clock::now() + setting_.timeout;
  try {
    requireAgreement(*store, deadline);
    connect(*store, deadline);
    warmUp(deadline);
  } catch (const NcclError& error) {
    abort();
    TORCH_CHECK(false, setting_.name, ": ", error.what());
  } catch (...) {
    abort();
    throw;
  }
}

NcclCommunicator::~NcclCommunicator() { abort(); }

void NcclCommunicator::requireAgreement(c10d::Store& store, Clock::time_point deadline) {
  store.set(keyOf(setting_.rank), bytesOf(setting_.must_match));
  std::vector<int> missing;
  for (int rank = 0; rank < setting_.size; ++rank) {
    const bool there = waitUntil(deadline, [&] { return store.check({keyOf(rank)}); });
    if (!there) missing.push_back(rank);
  }
  TORCH_CHECK(missing.empty(), setting_.name, ": ", rankList(missing), " did not come within ",
              setting_.timeout.count(), " ms. All ranks must make this channel");
  std::vector<Proposal> proposals(setting_.size);
  for (int rank = 0; rank < setting_.size; ++rank) {
    const std::vector<uint8_t> bytes = store.get(keyOf(rank));
    proposals[rank].must_match.assign(bytes.begin(), bytes.end());
  }
  const auto difference = firstDifference(proposals);
  TORCH_CHECK(!difference, setting_.name,
              ": the ranks do not ask for the same channel: ", difference.value_or(""));
}

void NcclCommunicator::connect(c10d::Store& store, Clock::time_point deadline) {
  NcclApi::UniqueId id{};
  if (setting_.rank == 0) {
    id = api_->newUniqueId();
    store.set("id", std::vector<uint8_t>(id.begin(), id.end()));
  } else {
    const bool there = waitUntil(deadline, [&] { return store.check({"id"}); });
    TORCH_CHECK(there, setting_.name, ": rank 0 gave no id for the communicator within ",
                setting_.timeout.count(), " ms");
    const std::vector<uint8_t> bytes = store.get("id");
    TORCH_CHECK(bytes.size() == id.size(), setting_.name, ": the id for the communicator has ",
                bytes.size(), " bytes, not ", id.size(), ". Do all ranks run the same dmuon?");
    std::memcpy(id.data(), bytes.data(), id.size());
  }
  comm_ = api_->commInit(id, setting_.size, setting_.rank, setting_.device);
  settle("setting up the communicator", deadline);
}

// One call of every kind that will be used, of four bytes per rank.
void NcclCommunicator::warmUp(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
  constexpr auto type = c10::ScalarType::Float;
  const at::Tensor from = api_->empty(setting_.size, type, stream_);
  const at::Tensor to = api_->empty(setting_.size, type, stream_);
  api_->enqueue(stream_, [from] { from.zero_(); });
  auto* const send = from.mutable_data_ptr<float>();
  auto* const recv = to.mutable_data_ptr<float>();
  group(left, [&](NcclApi::Comm comm) {
    api_->reduce(send, recv, 1, type, 0, comm, stream_);
    api_->broadcast(send, recv, 1, type, 0, comm, stream_);
  });
  group(left, [&](NcclApi::Comm comm) { api_->reduceScatter(send, recv, 1, type, comm, stream_); });
  group(left, [&](NcclApi::Comm comm) { api_->allGather(send, recv, 1, type, comm, stream_); });
  if (setting_.peer_to_peer) {
    group(left, [&](NcclApi::Comm comm) {
      for (int peer = 0; peer < setting_.size; ++peer) {
        if (peer == setting_.rank) continue;
        api_->send(send + peer, 1, type, peer, comm, stream_);
        api_->recv(recv + peer, 1, type, peer, comm, stream_);
      }
    });
  }
  const NcclEvent done(api_, setting_.device);
  api_->record(done.get(), stream_);
  TORCH_CHECK(waitUntil(deadline,
                        [&] {
                          if (auto failed = error())
                            throw NcclError("the first transfer: " + *failed);
                          return api_->query(done.get());
                        }),
              setting_.name, ": the first transfer did not end within ", setting_.timeout.count(),
              " ms");
}

void NcclCommunicator::settle(const char* what, Clock::time_point deadline) {
  const bool settled = waitUntil(deadline, [&] {
    if (aborted_) throw NcclError(std::string(what) + ": aborted");
    const NcclApi::State state = api_->commState(comm_);
    if (state.kind == NcclApi::State::failed) throw NcclError(what + (": " + state.error));
    return state.kind == NcclApi::State::ready;
  });
  if (!settled) throw NcclError(std::string(what) + " was not over within the time-out");
}

void NcclCommunicator::group(std::chrono::milliseconds timeout,
                             const std::function<void(NcclApi::Comm)>& calls) {
  std::lock_guard<std::mutex> lock(calls_);
  if (aborted_) throw NcclError("the communicator has been aborted");
  api_->groupStart();
  try {
    calls(comm_);
  } catch (...) {
    try {
      api_->groupEnd();  // the thread's group must not stay open
    } catch (const NcclError&) {
    }
    throw;
  }
  api_->groupEnd();
  settle("launching", Clock::now() + timeout);
}

std::optional<std::string> NcclCommunicator::error() {
  // Not while it is being destroyed; a group() under way sees errors itself.
  std::unique_lock<std::mutex> lock(calls_, std::try_to_lock);
  if (!lock || comm_ == nullptr) return std::nullopt;
  NcclApi::State state = api_->commState(comm_);
  if (state.kind != NcclApi::State::failed) return std::nullopt;
  return std::move(state.error);
}

void NcclCommunicator::abort() {
  aborted_ = true;
  std::lock_guard<std::mutex> lock(calls_);
  if (NcclApi::Comm comm = std::exchange(comm_, nullptr)) {
    try {
      api_->commAbort(comm);
    } catch (const std::exception& error) {
      TORCH_WARN(setting_.name, ": aborting the communicator failed: ", error.what());
    }
  }
}

void NcclCommunicator::close(std::chrono::milliseconds timeout) {
  {
    std::lock_guard<std::mutex> lock(calls_);
    if (comm_ == nullptr) return;
    try {
      api_->commFinalize(comm_);
      settle("ending the communicator", Clock::now() + timeout);
      api_->commDestroy(std::exchange(comm_, nullptr));
      return;
    } catch (const std::exception&) {
      // A peer that has gone, or CUDA that has been shut down already: nothing left to be orderly
      // about.
    }
  }
  abort();
}

}  // namespace dmuon
