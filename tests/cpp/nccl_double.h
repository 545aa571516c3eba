// NCCL on host memory: the transport for CUDA tensors runs on CPU tensors, one process per rank.
//
// What makes it worth testing with:
//   - Streams are threads. What is put on one runs later, so a missing event edge gives wrong data.
//   - Scratch memory is spoiled as soon as its stream has passed the point where it was freed.
//   - Reductions add up in the tensors' own dtype, beginning with the rank after the root.
//   - Ranks whose calls do not match get an error, as an asynchronous error of the communicator.
// The caller's own stream is the host: what waits for an event there blocks.
//
// Messages are files in a folder of the test program, which removes it at its end.
//
// A program that includes this runs the owner collectives of CPU tensors over the double if
// DMUON_TEST_NCCL_DOUBLE=1.
#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../backend/src/nccl_api.h"

namespace dmuon::testing {

namespace nccl_double {

// Made before the ranks are forked; only the process that made it removes it.
struct Folder {
  std::string path = std::filesystem::temp_directory_path() / "dmuon_nccl_XXXXXX";
  pid_t maker = ::getpid();
  Folder() {
    if (::mkdtemp(path.data()) == nullptr) std::abort();
  }
  ~Folder() {
    if (::getpid() == maker) std::filesystem::remove_all(path);
  }
};

class Stream {
 public:
  Stream() : thread_([this] { run(); }) { thread_.detach(); }
  void put(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }

 private:
  void run() {
    const at::NoGradGuard no_grad;
    while (true) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
};

// Counts how often it was recorded, and how many of those the streams have passed.
struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  int recorded = 0;
  int passed = 0;

  void pass(int number) {
    std::lock_guard<std::mutex> lock(mutex);
    passed = std::max(passed, number);
    changed.notify_all();
  }
  void await(int number) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return passed >= number; });
  }
};
using EventPtr = std::shared_ptr<Event>;

struct Call {
  enum Kind { reduce, broadcast, reduce_scatter, all_gather, send, recv } kind;
  const void* from;
  void* to;
  int64_t count;
  c10::ScalarType type;
  int peer;  // or the root
  int64_t bytes() const { return count * static_cast<int64_t>(c10::elementSize(type)); }
};

struct Comm {
  std::string folder;
  int rank = 0;
  int size = 1;
  uint64_t groups = 0;  // issued
  std::atomic<bool> aborted{false};
  std::atomic<int> launching{0};  // how often commState() still says "in progress"
  std::mutex mutex;
  std::string error;

  void fail(const std::string& why) {
    std::lock_guard<std::mutex> lock(mutex);
    if (error.empty()) error = why;
  }

  static std::string describe(const Call& call, int root) {
    return std::to_string(call.kind) + " " + std::to_string(call.count) + " " +
           c10::toString(call.type) + " " + std::to_string(root);
  }
  std::string fileOf(uint64_t group, const std::string& which, int from, int to) const {
    return folder + "/" + std::to_string(group) + "." + which + "." + std::to_string(from) + "." +
           std::to_string(to);
  }
  void write(const std::string& file, const std::string& what, const void* data, int64_t bytes) {
    std::ofstream out(file + ".part", std::ios::binary);
    out << what << '\n';
    out.write(static_cast<const char*>(data), bytes);
    out.close();
    std::rename((file + ".part").c_str(), file.c_str());
  }
  // Returns false if there is nothing to go on with.
  bool read(const std::string& file, const std::string& what, void* data, int64_t bytes) {
    for (int look = 0; ::access(file.c_str(), R_OK) != 0; ++look) {
      if (aborted) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(look < 50 ? 20 : 500));
    }
    std::ifstream in(file, std::ios::binary);
    std::string said;
    std::getline(in, said);
    if (said != what) {
      fail("a peer calls '" + said + "' where this rank calls '" + what + "'");
      while (!aborted) std::this_thread::sleep_for(std::chrono::microseconds(500));
      return false;
    }
    in.read(static_cast<char*>(data), bytes);
    in.close();
    std::remove(file.c_str());
    return true;
  }

  void run(uint64_t group, const std::vector<Call>& calls);
};
using CommPtr = std::shared_ptr<Comm>;

inline at::Tensor asTensor(const void* data, int64_t count, c10::ScalarType type) {
  return at::from_blob(const_cast<void*>(data), {count}, at::TensorOptions().dtype(type));
}

// In the dtype itself, from the rank after `root` around to `root`.
inline void sumInto(void* to, const std::vector<at::Tensor>& parts, int root) {
  const auto size = static_cast<int>(parts.size());
  at::Tensor sum = parts[(root + 1) % size].clone();
  for (int i = 2; i <= size; ++i) sum.add_(parts[(root + i) % size]);
  std::memcpy(to, sum.const_data_ptr(), sum.nbytes());
}

inline void Comm::run(uint64_t group, const std::vector<Call>& calls) {
  if (aborted) return;
  // Collectives are matched in their order, sends and receives of two ranks in theirs.
  std::map<std::pair<int, int>, int> sent, received;
  std::vector<std::string> order;
  int collectives = 0;
  for (const Call& call : calls) {
    const bool alone = call.kind == Call::send || call.kind == Call::recv;
    order.push_back(alone ? "" : std::to_string(collectives++));
  }
  for (size_t k = 0; k < calls.size(); ++k) {
    const Call& call = calls[k];
    const std::string& which = order[k];
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      const auto* bytes = static_cast<const char*>(call.from);
      if (call.kind == Call::send) {
        if (peer != call.peer) continue;
        const int number = sent[{rank, peer}]++;
        write(fileOf(group, "p" + std::to_string(number), rank, peer),
              "p " + std::to_string(call.bytes()), bytes, call.bytes());
      } else if (call.kind == Call::reduce) {
        if (peer == call.peer) {
          write(fileOf(group, which, rank, peer), describe(call, call.peer), bytes, call.bytes());
        }
      } else if (call.kind == Call::broadcast) {
        if (rank == call.peer) {
          write(fileOf(group, which, rank, peer), describe(call, call.peer), bytes, call.bytes());
        }
      } else if (call.kind == Call::reduce_scatter) {
        write(fileOf(group, which, rank, peer), describe(call, 0), bytes + peer * call.bytes(),
              call.bytes());
      } else if (call.kind == Call::all_gather) {
        write(fileOf(group, which, rank, peer), describe(call, 0), bytes, call.bytes());
      }
    }
  }
  for (size_t k = 0; k < calls.size(); ++k) {
    const Call& call = calls[k];
    const std::string& which = order[k];
    const auto take = [&](int peer, void* to, int root) {
      return read(fileOf(group, which, peer, rank), describe(call, root), to, call.bytes());
    };
    if (call.kind == Call::recv) {
      const int number = received[{call.peer, rank}]++;
      if (!read(fileOf(group, "p" + std::to_string(number), call.peer, rank),
                "p " + std::to_string(call.bytes()), call.to, call.bytes())) {
        return;
      }
    } else if (call.kind == Call::broadcast) {
      if (rank == call.peer) {
        if (call.to != call.from) std::memcpy(call.to, call.from, call.bytes());
      } else if (!take(call.peer, call.to, call.peer)) {
        return;
      }
    } else if (call.kind == Call::all_gather) {
      auto* const to = static_cast<char*>(call.to);
      std::memmove(to + rank * call.bytes(), call.from, call.bytes());
      for (int peer = 0; peer < size; ++peer) {
        if (peer != rank && !take(peer, to + peer * call.bytes(), 0)) return;
      }
    } else if (call.kind == Call::reduce_scatter ||
               (call.kind == Call::reduce && call.peer == rank)) {
      const bool scatter = call.kind == Call::reduce_scatter;
      std::vector<at::Tensor> parts;
      for (int peer = 0; peer < size; ++peer) {
        if (peer == rank) {
          parts.push_back(
              asTensor(static_cast<const char*>(call.from) + (scatter ? rank * call.bytes() : 0),
                       call.count, call.type));
        } else {
          parts.push_back(at::empty({call.count}, at::TensorOptions().dtype(call.type)));
          if (!take(peer, parts.back().mutable_data_ptr(), scatter ? 0 : call.peer)) return;
        }
      }
      sumInto(call.to, parts, rank);
    }
  }
}

}  // namespace nccl_double

class NcclDouble final : public NcclApi {
 public:
  std::string version() override { return "double"; }

  UniqueId newUniqueId() override {
    UniqueId id{};
    std::string name = folder_.path + "/comm_XXXXXX";
    if (name.size() >= id.size() || ::mkdtemp(name.data()) == nullptr) {
      throw NcclError("no folder for a communicator");
    }
    std::copy(name.begin(), name.end(), id.begin());
    return id;
  }
  Comm commInit(const UniqueId& id, int size, int rank, c10::Device) override {
    auto comm = std::make_shared<nccl_double::Comm>();
    comm->folder = id.data();
    comm->rank = rank;
    comm->size = size;
    comm->launching = 2;
    return reinterpret_cast<Comm>(new nccl_double::CommPtr(std::move(comm)));
  }
  State commState(Comm handle) override {
    nccl_double::Comm& comm = *of(handle);
    std::lock_guard<std::mutex> lock(comm.mutex);
    if (!comm.error.empty()) return {State::failed, comm.error};
    if (comm.launching > 0) {
      --comm.launching;
      return {State::in_progress, ""};
    }
    return {};
  }
  void commFinalize(Comm comm) override { of(comm)->launching = 1; }
  void commDestroy(Comm comm) override { delete &of(comm); }
  void commAbort(Comm comm) override {
    of(comm)->aborted = true;
    delete &of(comm);
  }

  void groupStart() override { group().open = true; }
  void groupEnd() override {
    Group ended;
    std::swap(ended, group());
    if (ended.calls.empty()) return;
    const nccl_double::CommPtr comm = ended.comm;
    comm->launching = 1;
    streamOf(*ended.stream).put([comm, number = comm->groups++, calls = ended.calls] {
      comm->run(number, calls);
    });
  }
  void reduce(const void* send, void* recv, int64_t count, c10::ScalarType type, int root,
              Comm comm, const c10::Stream& stream) override {
    add({nccl_double::Call::reduce, send, recv, count, type, root}, comm, stream);
  }
  void broadcast(const void* send, void* recv, int64_t count, c10::ScalarType type, int root,
                 Comm comm, const c10::Stream& stream) override {
    add({nccl_double::Call::broadcast, send, recv, count, type, root}, comm, stream);
  }
  void reduceScatter(const void* send, void* recv, int64_t count, c10::ScalarType type, Comm comm,
                     const c10::Stream& stream) override {
    add({nccl_double::Call::reduce_scatter, send, recv, count, type, 0}, comm, stream);
  }
  void allGather(const void* send, void* recv, int64_t count, c10::ScalarType type, Comm comm,
                 const c10::Stream& stream) override {
    add({nccl_double::Call::all_gather, send, recv, count, type, 0}, comm, stream);
  }
  void send(const void* data, int64_t count, c10::ScalarType type, int peer, Comm comm,
            const c10::Stream& stream) override {
    add({nccl_double::Call::send, data, nullptr, count, type, peer}, comm, stream);
  }
  void recv(void* data, int64_t count, c10::ScalarType type, int peer, Comm comm,
            const c10::Stream& stream) override {
    add({nccl_double::Call::recv, nullptr, data, count, type, peer}, comm, stream);
  }

  c10::Device currentDevice() override { return c10::DeviceType::CPU; }
  void useDevice(c10::Device) override {}
  c10::Stream newStream(c10::Device device, bool) override {
    std::lock_guard<std::mutex> lock(mutex_);
    streams_.push_back(std::make_unique<nccl_double::Stream>());
    return c10::Stream(c10::Stream::UNSAFE, device, static_cast<int64_t>(streams_.size()));
  }
  c10::Stream currentStream(c10::Device device) override {
    return c10::Stream(c10::Stream::UNSAFE, device, 0);
  }
  Event newEvent(c10::Device) override {
    return reinterpret_cast<Event>(
        new nccl_double::EventPtr(std::make_shared<nccl_double::Event>()));
  }
  void destroyEvent(Event event) override { delete &of(event); }
  void record(Event handle, const c10::Stream& stream) override {
    const nccl_double::EventPtr event = of(handle);
    int number = 0;
    {
      std::lock_guard<std::mutex> lock(event->mutex);
      number = ++event->recorded;
    }
    put(stream, [event, number] { event->pass(number); });
  }
  void streamWait(const c10::Stream& stream, Event handle) override {
    const nccl_double::EventPtr event = of(handle);
    int number = 0;
    {
      std::lock_guard<std::mutex> lock(event->mutex);
      number = event->recorded;
    }
    put(stream, [event, number] { event->await(number); });
  }
  bool query(Event handle) override {
    nccl_double::Event& event = *of(handle);
    std::lock_guard<std::mutex> lock(event.mutex);
    return event.passed >= event.recorded;
  }
  void hostWait(Event handle) override {
    const nccl_double::EventPtr event = of(handle);
    int number = 0;
    {
      std::lock_guard<std::mutex> lock(event->mutex);
      number = event->recorded;
    }
    event->await(number);
  }

  at::Tensor empty(int64_t numel, c10::ScalarType type, const c10::Stream& stream) override {
    at::Tensor tensor = at::empty({numel}, at::TensorOptions().dtype(type));
    std::lock_guard<std::mutex> lock(mutex_);
    scratch_.emplace_back(stream, tensor);
    return tensor;
  }
  at::Tensor hostBytes(int64_t count) override {
    return at::empty({count}, at::TensorOptions().dtype(at::kByte));
  }
  void enqueue(const c10::Stream& stream, std::function<void()> operations) override {
    put(stream, std::move(operations));
  }
  void waitFor(const c10::Stream&, c10d::Work& work) override { work.wait(); }
  std::vector<c10::Device> futureDevices(c10::Device) override { return {}; }
  void rangePush(const std::string&) override {}
  void rangePop() override { spoilFreed(); }

 private:
  struct Group {
    bool open = false;
    nccl_double::CommPtr comm;
    std::optional<c10::Stream> stream;
    std::vector<nccl_double::Call> calls;
  };

  static nccl_double::CommPtr& of(Comm comm) {
    return *reinterpret_cast<nccl_double::CommPtr*>(comm);
  }
  static nccl_double::EventPtr& of(Event event) {
    return *reinterpret_cast<nccl_double::EventPtr*>(event);
  }
  static Group& group() {
    static thread_local Group current;
    return current;
  }
  void add(const nccl_double::Call& call, Comm comm, const c10::Stream& stream) {
    if (!group().open) throw NcclError("a call outside a group");
    group().comm = of(comm);
    group().stream = stream;
    group().calls.push_back(call);
  }
  nccl_double::Stream& streamOf(const c10::Stream& stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    return *streams_.at(stream.id() - 1);
  }
  void put(const c10::Stream& stream, std::function<void()> task) {
    if (stream.id() == 0) {
      task();
    } else {
      streamOf(stream).put(std::move(task));
    }
  }
  // What nobody else holds any more was freed by now: its stream may spoil it.
  void spoilFreed() {
    std::vector<std::pair<c10::Stream, at::Tensor>> freed;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      std::erase_if(scratch_, [&](auto& one) {
        if (one.second.use_count() > 1) return false;
        freed.push_back(std::move(one));
        return true;
      });
    }
    for (auto& [stream, tensor] : freed) {
      put(stream, [tensor = std::move(tensor)] {
        if (tensor.nbytes() > 0) std::memset(tensor.mutable_data_ptr(), 0xA5, tensor.nbytes());
      });
    }
  }

  const nccl_double::Folder folder_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<nccl_double::Stream>> streams_;
  std::vector<std::pair<c10::Stream, at::Tensor>> scratch_;
};

// One per program, made before it forks.
inline std::shared_ptr<NcclDouble> ncclDouble() {
  static const auto api = std::make_shared<NcclDouble>();
  return api;
}

inline const bool nccl_double_installed = [] {
  const char* asked = std::getenv("DMUON_TEST_NCCL_DOUBLE");
  if (asked == nullptr || std::string(asked) != "1") return false;
  installNcclApi(c10::DeviceType::CPU, ncclDouble());
  return true;
}();

}  // namespace dmuon::testing
