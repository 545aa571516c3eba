// Every call that the NCCL transport makes to NCCL and to the device, as one interface: unit tests
// mock it, a double of it runs on host memory (tests/cpp/nccl_double.h), and nccl_library.cpp is
// the real one. Neither NCCL's header nor CUDA's is needed here.
//
// Calls that fail throw NcclError. Communicators are non-blocking: a call that only starts
// something returns at once, and commState() says when it is over. Of several threads, one at a
// time may make calls for a communicator, except commState(). Calls for streams and events may come
// from any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <array>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace c10d {
class Work;
}

namespace dmuon {

struct NcclError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class NcclApi {
 public:
  using UniqueId = std::array<char, 128>;
  using Comm = struct CommHandle*;    // made by commInit()
  using Event = struct EventHandle*;  // made by newEvent()
  struct State {
    enum Kind { ready, in_progress, failed } kind = ready;
    std::string error;
  };

  virtual ~NcclApi() = default;

  // "2.28.9".
  virtual std::string version() = 0;

  // Communicators.
  virtual UniqueId newUniqueId() = 0;
  virtual Comm commInit(const UniqueId& id, int size, int rank, c10::Device device) = 0;
  virtual State commState(Comm comm) = 0;
  // Flushes what is under way; to be followed, once ready, by commDestroy().
  virtual void commFinalize(Comm comm) = 0;
  virtual void commDestroy(Comm comm) = 0;
  // Ends the kernels that run and those that wait to run. The handle is invalid afterwards.
  virtual void commAbort(Comm comm) = 0;

  // Collectives. Counts are of elements; reductions are sums. `recv` may be where `send` is.
  virtual void groupStart() = 0;
  virtual void groupEnd() = 0;
  virtual void reduce(const void* send, void* recv, int64_t count, c10::ScalarType type, int root,
                      Comm comm, const c10::Stream& stream) = 0;
  virtual void broadcast(const void* send, void* recv, int64_t count, c10::ScalarType type,
                         int root, Comm comm, const c10::Stream& stream) = 0;
  // count: per rank.
  virtual void reduceScatter(const void* send, void* recv, int64_t count, c10::ScalarType type,
                             Comm comm, const c10::Stream& stream) = 0;
  virtual void allGather(const void* send, void* recv, int64_t count, c10::ScalarType type,
                         Comm comm, const c10::Stream& stream) = 0;
  virtual void send(const void* data, int64_t count, c10::ScalarType type, int peer, Comm comm,
                    const c10::Stream& stream) = 0;
  virtual void recv(void* data, int64_t count, c10::ScalarType type, int peer, Comm comm,
                    const c10::Stream& stream) = 0;

  // Streams and events.
  virtual c10::Device currentDevice() = 0;
  // For threads that never had a device: else their first call would make a context on device 0.
  virtual void useDevice(c10::Device device) = 0;
  virtual c10::Stream newStream(c10::Device device, bool high_priority) = 0;
  virtual c10::Stream currentStream(c10::Device device) = 0;
  virtual Event newEvent(c10::Device device) = 0;  // without timing
  virtual void destroyEvent(Event event) = 0;
  virtual void record(Event event, const c10::Stream& stream) = 0;
  virtual void streamWait(const c10::Stream& stream, Event event) = 0;
  virtual bool query(Event event) = 0;
  virtual void hostWait(Event event) = 0;  // blocks

  // Memory. `empty` belongs to the stream: what was freed may be given out again to later work of
  // the same stream. `hostBytes` can be copied to and from asynchronously.
  virtual at::Tensor empty(int64_t numel, c10::ScalarType type, const c10::Stream& stream) = 0;
  virtual at::Tensor hostBytes(int64_t count) = 0;

  // Runs operations on tensors in the order of the stream: calls `operations` at once with the
  // stream as the current one, or, on the host, later on the stream's own thread. Must not throw
  // there.
  virtual void enqueue(const c10::Stream& stream, std::function<void()> operations) = 0;

  // Makes the stream wait for somebody else's Work; the host, if that is a Work of the host. Throws
  // its error.
  virtual void waitFor(const c10::Stream& stream, c10d::Work& work) = 0;

  // What an ivalue::Future needs so that its users are ordered after the stream on which it was
  // completed. Empty: it can only be completed once the results are there.
  virtual std::vector<c10::Device> futureDevices(c10::Device device) = 0;

  // Named ranges in a profiler's timeline.
  virtual void rangePush(const std::string& name) = 0;
  virtual void rangePop() = 0;
};

using NcclApiPtr = std::shared_ptr<NcclApi>;

// The owner collectives of tensors on `type` go through `api` from now on; null takes that back. A
// seam for tests, which give CPU tensors a double.
void installNcclApi(c10::DeviceType type, NcclApiPtr api);
// What was installed; else, for CUDA, NCCL's library, loaded at the first call, and null for other
// types. Throws NcclError if the library cannot be used, saying why.
NcclApiPtr ncclApiFor(c10::DeviceType type);

// An event's owner. Empty if default-constructed.
class NcclEvent {
 public:
  NcclEvent() = default;
  NcclEvent(const NcclApiPtr& api, c10::Device device)
      : event_(api->newEvent(device), [api](NcclApi::Event event) { api->destroyEvent(event); }) {}
  NcclApi::Event get() const { return event_.get(); }
  explicit operator bool() const { return event_ != nullptr; }

 private:
  std::shared_ptr<struct EventHandle> event_;
};

}  // namespace dmuon
