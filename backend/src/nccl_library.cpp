#include "nccl_library.h"

#ifndef DMUON_HAVE_NCCL
namespace dmuon {

NcclApiPtr ncclLibrary() {
  throw NcclError(
      "this dmuon was built without NCCL: install the wheel nvidia-nccl-cu13 (or -cu12) of the "
      "torch "
      "in use, which brings nccl.h, and build again");
}

}  // namespace dmuon
#else
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <nccl.h>
#include <torch/csrc/profiler/stubs/base.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

// CUDA is reached through torch's device-independent facilities, which libtorch_cuda fills in. So
// one build of dmuon serves torch with and without CUDA, and nothing is linked to either.

namespace dmuon {
namespace {

// Beside NCCL's functions, one of torch's: the native handle of a c10::Stream, which torch has
// device-independently only from some version on.
struct Functions {
  decltype(&::ncclGetVersion) get_version;
  decltype(&::ncclGetUniqueId) get_unique_id;
  decltype(&::ncclCommInitRankConfig) comm_init_rank_config;
  decltype(&::ncclCommGetAsyncError) comm_get_async_error;
  decltype(&::ncclCommFinalize) comm_finalize;
  decltype(&::ncclCommDestroy) comm_destroy;
  decltype(&::ncclCommAbort) comm_abort;
  decltype(&::ncclGetErrorString) get_error_string;
  decltype(&::ncclGetLastError) get_last_error;
  decltype(&::ncclGroupStart) group_start;
  decltype(&::ncclGroupEnd) group_end;
  decltype(&::ncclReduce) reduce;
  decltype(&::ncclBroadcast) broadcast;
  decltype(&::ncclReduceScatter) reduce_scatter;
  decltype(&::ncclAllGather) all_gather;
  decltype(&::ncclSend) send;
  decltype(&::ncclRecv) recv;
  cudaStream_t (*native_stream)(const c10::Stream*);
};

void* open(const char* file, int flags) { return dlopen(file, flags | RTLD_NOW | RTLD_LOCAL); }

// The library that torch has loaded already is the one that fits; a second copy in the process
// would have communicators of its own. DMUON_LIBNCCL names another.
void* openNccl() {
  const char* named = std::getenv("DMUON_LIBNCCL");
  const bool wanted = named != nullptr && *named != '\0';
  const char* file = wanted ? named : "libnccl.so.2";
  if (!wanted) {
    if (void* loaded = open(file, RTLD_NOLOAD)) return loaded;
  }
  if (void* library = open(file, 0)) return library;
  const char* error = dlerror();
  throw NcclError(std::string("NCCL's library was not found (") + (error ? error : "unknown") +
                  "): import torch with CUDA first, or name libnccl.so.2 in DMUON_LIBNCCL");
}

template <typename Function>
void find(void* library, const char* where, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) {
    throw NcclError(std::string(where) + " has no function " + name +
                    ": dmuon needs NCCL 2.18 and torch 2.11 or newer");
  }
}

Functions load() {
  Functions f;
  void* const nccl = openNccl();
  const auto in_nccl = [nccl](const char* name, auto& function) {
    find(nccl, "NCCL's library", name, function);
  };
  in_nccl("ncclGetVersion", f.get_version);
  in_nccl("ncclGetUniqueId", f.get_unique_id);
  in_nccl("ncclCommInitRankConfig", f.comm_init_rank_config);
  in_nccl("ncclCommGetAsyncError", f.comm_get_async_error);
  in_nccl("ncclCommFinalize", f.comm_finalize);
  in_nccl("ncclCommDestroy", f.comm_destroy);
  in_nccl("ncclCommAbort", f.comm_abort);
  in_nccl("ncclGetErrorString", f.get_error_string);
  in_nccl("ncclGetLastError", f.get_last_error);
  in_nccl("ncclGroupStart", f.group_start);
  in_nccl("ncclGroupEnd", f.group_end);
  in_nccl("ncclReduce", f.reduce);
  in_nccl("ncclBroadcast", f.broadcast);
  in_nccl("ncclReduceScatter", f.reduce_scatter);
  in_nccl("ncclAllGather", f.all_gather);
  in_nccl("ncclSend", f.send);
  in_nccl("ncclRecv", f.recv);
  void* const c10_cuda = open("libc10_cuda.so", RTLD_NOLOAD);
  if (c10_cuda == nullptr) {
    throw NcclError("torch has not loaded its CUDA part: is this a torch without CUDA?");
  }
  // cudaStream_t c10::cuda::CUDAStream::stream() const. A CUDAStream is a c10::Stream and nothing
  // else.
  find(c10_cuda, "torch's libc10_cuda", "_ZNK3c104cuda10CUDAStream6streamEv", f.native_stream);
  return f;
}

ncclDataType_t typeOf(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Byte:
      return ncclUint8;
    case c10::ScalarType::Half:
      return ncclFloat16;
    case c10::ScalarType::BFloat16:
      return ncclBfloat16;
    case c10::ScalarType::Float:
      return ncclFloat32;
    case c10::ScalarType::Double:
      return ncclFloat64;
    default:
      throw NcclError(std::string("NCCL is not called for ") + c10::toString(type));
  }
}

ncclComm_t native(NcclApi::Comm comm) { return reinterpret_cast<ncclComm_t>(comm); }
c10::Event& native(NcclApi::Event event) { return *reinterpret_cast<c10::Event*>(event); }

class NcclLibrary final : public NcclApi {
 public:
  NcclLibrary() : f_(load()), device_(c10::DeviceType::CUDA) {
    check("ncclGetVersion", f_.get_version(&version_));
    if (version_ < NCCL_VERSION(2, 18, 0)) {
      throw NcclError("NCCL is " + version() + ", but dmuon needs 2.18 or newer");
    }
  }

  std::string version() override {
    return std::to_string(version_ / 10000) + "." + std::to_string(version_ / 100 % 100) + "." +
           std::to_string(version_ % 100);
  }

  UniqueId newUniqueId() override {
    ncclUniqueId id;
    check("ncclGetUniqueId", f_.get_unique_id(&id));
    UniqueId bytes;
    static_assert(sizeof(id) == std::tuple_size_v<UniqueId>);
    std::memcpy(bytes.data(), &id, sizeof(id));
    return bytes;
  }

  Comm commInit(const UniqueId& bytes, int size, int rank, c10::Device device) override {
    ncclUniqueId id;
    std::memcpy(&id, bytes.data(), sizeof(id));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const c10::DeviceGuard guard(device);
    ncclComm_t comm = nullptr;
    check("ncclCommInitRankConfig", f_.comm_init_rank_config(&comm, size, id, rank, &config), comm);
    return reinterpret_cast<Comm>(comm);
  }

  State commState(Comm comm) override {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t result = f_.comm_get_async_error(native(comm), &state);
    if (result != ncclSuccess) state = result;
    if (state == ncclSuccess) return {};
    if (state == ncclInProgress) return {State::in_progress, ""};
    return {State::failed, describe(state, native(comm))};
  }

  void commFinalize(Comm comm) override {
    check("ncclCommFinalize", f_.comm_finalize(native(comm)), native(comm));
  }
  void commDestroy(Comm comm) override { check("ncclCommDestroy", f_.comm_destroy(native(comm))); }
  void commAbort(Comm comm) override { check("ncclCommAbort", f_.comm_abort(native(comm))); }

  void groupStart() override { check("ncclGroupStart", f_.group_start()); }
  void groupEnd() override { check("ncclGroupEnd", f_.group_end()); }
  void reduce(const void* send, void* recv, int64_t count, c10::ScalarType type, int root,
              Comm comm, const c10::Stream& stream) override {
    check("ncclReduce",
          f_.reduce(send, recv, count, typeOf(type), ncclSum, root, native(comm), native(stream)),
          native(comm));
  }
  void broadcast(const void* send, void* recv, int64_t count, c10::ScalarType type, int root,
                 Comm comm, const c10::Stream& stream) override {
    check("ncclBroadcast",
          f_.broadcast(send, recv, count, typeOf(type), root, native(comm), native(stream)),
          native(comm));
  }
  void reduceScatter(const void* send, void* recv, int64_t count, c10::ScalarType type, Comm comm,
                     const c10::Stream& stream) override {
    check("ncclReduceScatter",
          f_.reduce_scatter(send, recv, count, typeOf(type), ncclSum, native(comm), native(stream)),
          native(comm));
  }
  void allGather(const void* send, void* recv, int64_t count, c10::ScalarType type, Comm comm,
                 const c10::Stream& stream) override {
    check("ncclAllGather",
          f_.all_gather(send, recv, count, typeOf(type), native(comm), native(stream)),
          native(comm));
  }
  void send(const void* data, int64_t count, c10::ScalarType type, int peer, Comm comm,
            const c10::Stream& stream) override {
    check("ncclSend", f_.send(data, count, typeOf(type), peer, native(comm), native(stream)),
          native(comm));
  }
  void recv(void* data, int64_t count, c10::ScalarType type, int peer, Comm comm,
            const c10::Stream& stream) override {
    check("ncclRecv", f_.recv(data, count, typeOf(type), peer, native(comm), native(stream)),
          native(comm));
  }

  c10::Device currentDevice() override { return device_.getDevice(); }
  void useDevice(c10::Device device) override { device_.setDevice(device); }
  c10::Stream newStream(c10::Device device, bool high_priority) override;
  c10::Stream currentStream(c10::Device device) override { return device_.getStream(device); }

  Event newEvent(c10::Device device) override {
    return reinterpret_cast<Event>(new c10::Event(device.type(), c10::EventFlag::PYTORCH_DEFAULT));
  }
  void destroyEvent(Event event) override { delete &native(event); }
  void record(Event event, const c10::Stream& stream) override { native(event).record(stream); }
  void streamWait(const c10::Stream& stream, Event event) override { native(event).block(stream); }
  bool query(Event event) override { return native(event).query(); }
  void hostWait(Event event) override { native(event).synchronize(); }

  at::Tensor empty(int64_t numel, c10::ScalarType type, const c10::Stream& stream) override {
    const c10::StreamGuard guard(stream);
    return at::empty({numel}, at::TensorOptions().dtype(type).device(stream.device()));
  }
  at::Tensor hostBytes(int64_t count) override {
    return at::empty({count}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  }
  void enqueue(const c10::Stream& stream, std::function<void()> operations) override {
    const c10::StreamGuard guard(stream);
    operations();
  }
  void waitFor(const c10::Stream& stream, c10d::Work& work) override {
    const c10::StreamGuard guard(stream);
    work.wait();
  }
  std::vector<c10::Device> futureDevices(c10::Device device) override { return {device}; }

  // NVTX, if torch's CUDA part has it.
  void rangePush(const std::string& name) override {
    if (stubs().enabled()) stubs().rangePush(name.c_str());
  }
  void rangePop() override {
    if (stubs().enabled()) stubs().rangePop();
  }

 private:
  static const torch::profiler::impl::ProfilerStubs& stubs() {
    return *torch::profiler::impl::cudaStubs();
  }

  cudaStream_t native(const c10::Stream& stream) const { return f_.native_stream(&stream); }
  static ncclComm_t native(Comm comm) { return dmuon::native(comm); }
  static c10::Event& native(Event event) { return dmuon::native(event); }

  std::string describe(ncclResult_t result, ncclComm_t comm) const {
    std::string text = f_.get_error_string(result);
    const char* last = f_.get_last_error(comm);
    if (last != nullptr && *last != '\0') text += std::string(" (") + last + ")";
    return text;
  }
  void check(const char* function, ncclResult_t result, ncclComm_t comm = nullptr) const {
    if (result == ncclSuccess || result == ncclInProgress) return;
    throw NcclError(std::string(function) + ": " + describe(result, comm));
  }

  const Functions f_;
  const c10::impl::VirtualGuardImpl device_;
  int version_ = 0;
  std::mutex mutex_;
  std::map<c10::DeviceIndex, std::set<c10::StreamId> > streams_;  // given out so far
};

// torch gives out its pool's streams in turn, to everybody. Two communicators on one stream would
// only be slower; still, none is given out here twice before all have been.
c10::Stream NcclLibrary::newStream(c10::Device device, bool high_priority) {
  constexpr int kPool = 32;
  std::lock_guard<std::mutex> lock(mutex_);
  auto& taken = streams_[device.index()];
  c10::Stream stream = device_.getStreamFromGlobalPool(device, high_priority);
  for (int i = 1; i < kPool && taken.count(stream.id()) > 0; ++i) {
    stream = device_.getStreamFromGlobalPool(device, high_priority);
  }
  taken.insert(stream.id());
  return stream;
}

}  // namespace

NcclApiPtr ncclLibrary() {
  static const NcclApiPtr library = std::make_shared<NcclLibrary>();  // tried again if it throws
  return library;
}

}  // namespace dmuon
#endif
