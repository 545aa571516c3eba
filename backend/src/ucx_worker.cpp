#ifdef DMUON_HAVE_UCX
#include "ucx_worker.h"

#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <sstream>
#include <stdexcept>

namespace dmuon {
namespace {

constexpr int kSpins = 2;      // polls before the core is given up with each: a peer may need it
constexpr int kYields = 2000;  // and before the thread sleeps
constexpr int kLooksPerClock = 64;
constexpr std::chrono::milliseconds kLongestSleep{100};
constexpr std::chrono::milliseconds kBrokenForGood{1000};
constexpr std::chrono::milliseconds kIdle{5};  // before the worker's own thread takes over

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

bool isSet(const char* option) {
  return std::getenv(("DMUON_UCX_" + std::string(option)).c_str()) != nullptr ||
         std::getenv(("UCX_" + std::string(option)).c_str()) != nullptr;
}

// Whether a setting of UCX's TLS leaves shared memory in.
bool allowsSharedMemory() {
  const char* tls = std::getenv("DMUON_UCX_TLS");
  if (tls == nullptr) tls = std::getenv("UCX_TLS");
  if (tls == nullptr) return true;
  std::istringstream names(*tls == '^' ? tls + 1 : tls);
  bool named = false;
  for (std::string name; std::getline(names, name, ',');) {
    if (*tls != '^' && name == "all") return true;
    named = named || name == "posix" || name == "sysv" || name == "sm" || name == "shm";
  }
  return named != (*tls == '^');
}

}  // namespace

// Its destructor runs at exit, before UCX's own.
struct UcxThreadStopper {
  UcxWorker* worker;
  ~UcxThreadStopper() { worker->stopThread(); }
};

UcxWorker* UcxWorker::instance_ = nullptr;

UcxWorker& UcxWorker::get() {
  static UcxThreadStopper stopper{instance_ = new UcxWorker};  // tried again if it throws
  instance_->checkProcess();
  return *instance_;
}

UcxWorker::UcxWorker() : api_(UcxApi::get()), process_(::getpid()) {
  makeContext();
  makeWorker();
}

void UcxWorker::check(const char* what, ucs_status_t status) const {
  if (status != UCS_OK) {
    throw std::runtime_error(std::string(what) + " failed: " + api_.status_string(status));
  }
}

void UcxWorker::checkProcess() const {
  if (::getpid() == process_) return;
  throw std::runtime_error(
      "this process was forked from one that uses UCX already, which UCX cannot do: start "
      "processes by spawn, or set DMUON_TRANSPORT=gloo");
}

void UcxWorker::makeContext() {
  ucp_config_t* config = nullptr;
  check("ucp_config_read", api_.config_read("DMUON", nullptr, &config));
  const auto by_default = [&](const char* option, const char* value) {
    if (!isSet(option)) api_.config_modify(config, option, value);
  };
  by_default("TLS", "^sysv,cma");
  by_default("RNDV_SCHEME", "am");
  by_default("KEEPALIVE_INTERVAL", "1s");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_TAG | UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP;
  params.name = "dmuon";
  const ucs_status_t status =
      api_.init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_);
  api_.config_release(config);
  check("ucp_init", status);
}

void UcxWorker::makeWorker() {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  check("ucp_worker_create", api_.worker_create(context_, &params, &worker_));
  check("ucp_worker_get_efd", api_.worker_get_efd(worker_, &event_fd_));
  ucp_address_t* address = nullptr;
  size_t length = 0;
  check("ucp_worker_get_address", api_.worker_get_address(worker_, &address, &length));
  contact_.address.assign(reinterpret_cast<const char*>(address), length);
  contact_.host = allowsSharedMemory() ? hostId() : 0;
  contact_.pid = process_;
  pool_ = std::make_unique<UcxPool>(api_, context_);
  if (contact_.host != 0 && pool_->available()) {
    contact_.pool = pool_->address();
    contact_.pool_slots = pool_->slots();
    contact_.pool_key = pool_->key();
  }
  api_.worker_release_address(worker_, address);
}

// The polling thread takes the mutex again and again: it must see that others want it.
std::unique_lock<std::mutex> UcxWorker::lockWorker() {
  checkProcess();
  ++others_want_mutex_;
  std::unique_lock<std::mutex> lock(mutex_);
  --others_want_mutex_;
  return lock;
}

UcxEndpoint& UcxWorker::connect(const UcxContact& contact) {
  const auto lock = lockWorker();
  std::unique_ptr<UcxEndpoint>& known = endpoints_[contact.address];
  if (known) return *known;
  auto endpoint = std::make_unique<UcxEndpoint>();
  const bool local = contact.host != 0 && contact.host == contact_.host;
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(contact.address.data());
  params.err_mode = local ? UCP_ERR_HANDLING_MODE_NONE : UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {&UcxWorker::onPeerFailed, endpoint.get()};
  check("ucp_ep_create", api_.ep_create(worker_, &params, &endpoint->ep));
  if (local) {
    endpoint->process = std::make_unique<ProcessWatch>(contact.pid);
    local_.push_back(endpoint.get());
    auto pool = std::make_unique<UcxPoolView>(api_, endpoint->ep, contact.pool, contact.pool_slots,
                                              contact.pool_key);
    if (pool->available()) endpoint->pool = std::move(pool);
  }
  known = std::move(endpoint);
  return *known;
}

void UcxWorker::onPeerFailed(void* endpoint, ucp_ep_h, ucs_status_t status) {
  auto& broken = *static_cast<UcxEndpoint*>(endpoint);
  UcxWorker& worker = *instance_;
  if (!broken.process || broken.process->descriptor() < 0) {
    return worker.markFailed(broken, worker.text(status));
  }
  broken.broken = worker.text(status);
  broken.broken_since = Clock::now();
}

// Under mutex_. Once only: after that, other threads read why.
void UcxWorker::markFailed(UcxEndpoint& endpoint, const char* why) {
  if (endpoint.failed) return;
  endpoint.failure = std::string("connection lost: ") + why;
  endpoint.failed = true;
  something_ended_ = true;
}

void UcxWorker::end(UcxRequest& request, void* handle, ucs_status_t status) {
  UcxWorker& worker = *instance_;
  request.status = status;
  request.handle = nullptr;
  request.memory.reset();
  request.kept.reset();
  if (handle != nullptr) worker.api_.request_free(handle);
  worker.something_ended_ = true;
  const UcxRequestPtr alive = std::move(request.self);
  request.ended = true;
}

void UcxWorker::onSent(void* handle, ucs_status_t status, void* request) {
  end(*static_cast<UcxRequest*>(request), handle, status);
}

void UcxWorker::onReceived(void* handle, ucs_status_t status, const ucp_tag_recv_info_t* info,
                           void* data) {
  auto& request = *static_cast<UcxRequest*>(data);
  if (status == UCS_OK) request.received = static_cast<int64_t>(info->length);
  end(request, handle, status);
}

// `handle` is what UCX returned: null if the message is done already.
UcxRequestPtr UcxWorker::track(UcxRequestPtr request, void* handle) {
  if (UCS_PTR_IS_PTR(handle)) {
    request->handle = handle;
    if (asleep_ > 0) api_.worker_signal(worker_);
  } else {
    end(*request, nullptr, UCS_PTR_STATUS(handle));
  }
  return request;
}

UcxRequestPtr UcxWorker::send(UcxEndpoint& to, const Bytes& bytes, uint64_t tag) {
  auto request = std::make_shared<UcxRequest>();
  request->memory = bytes.owner;
  request->self = request;
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.cb.send = &UcxWorker::onSent;
  params.user_data = request.get();
  const auto lock = lockWorker();
  if (to.failed) return track(std::move(request), UCS_STATUS_PTR(UCS_ERR_CONNECTION_RESET));
  void* handle = api_.tag_send_nbx(to.ep, bytes.data, bytes.size, tag, &params);
  return track(std::move(request), handle);
}

UcxRequestPtr UcxWorker::receive(const Bytes& bytes, uint64_t tag) {
  auto request = std::make_shared<UcxRequest>();
  request->memory = bytes.owner;
  request->self = request;
  request->receives = true;
  request->tag = tag;
  ucp_tag_recv_info_t info{};
  ucp_request_param_t params{};
  params.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_RECV_INFO;
  params.cb.recv = &UcxWorker::onReceived;
  params.user_data = request.get();
  params.recv_info.tag_info = &info;
  const auto lock = lockWorker();
  void* handle = api_.tag_recv_nbx(worker_, bytes.data, bytes.size, tag, ~uint64_t{0}, &params);
  if (handle == nullptr) request->received = static_cast<int64_t>(info.length);
  return track(std::move(request), handle);
}

void UcxWorker::cancel(UcxRequest& request) {
  const auto lock = lockWorker();
  if (request.receives && request.handle != nullptr) api_.request_cancel(worker_, request.handle);
}

void UcxWorker::keep(UcxRequest& request, std::shared_ptr<void> memory) {
  const auto lock = lockWorker();
  if (request.handle != nullptr) request.kept = std::move(memory);
}

bool UcxWorker::wait(const std::function<bool()>& over, Clock::time_point deadline) {
  if (over()) return true;
  if (deadline <= Clock::now()) {  // a glance
    progress();
    return over();
  }
  checkProcess();
  std::unique_lock<std::mutex> lock(turn_mutex_);
  if (!thread_.joinable() && !stop_) thread_ = std::thread([this] { lookAfter(); });
  while (!over()) {
    if (!driven_) {
      driven_ = true;
      ++turns_;
      lock.unlock();
      const bool is_over = drive(over, deadline);
      lock.lock();
      driven_ = false;
      if (waiters_ > 0) turn_changed_.notify_all();
      return is_over;
    }
    if (Clock::now() >= deadline) return false;
    ++waiters_;  // before the last look: who ends a request looks for waiters afterwards
    if (!over()) turn_changed_.wait_until(lock, deadline);
    --waiters_;
  }
  return true;
}

void UcxWorker::wake() {
  {
    std::lock_guard<std::mutex> lock(turn_mutex_);
    turn_changed_.notify_all();
  }
  const auto lock = lockWorker();
  if (asleep_ > 0) api_.worker_signal(worker_);
}

bool UcxWorker::drive(const std::function<bool()>& over, Clock::time_point deadline) {
  int idle = 0;
  for (int look = 1; !over(); ++look) {
    if (look % kLooksPerClock == 0 && Clock::now() >= deadline) return over();
    if (progress()) {
      idle = 0;
    } else if (++idle < kSpins) {
      relax();
    } else if (idle < kYields) {
      ::sched_yield();
    } else {
      noticeEndedProcesses();
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
      if (left.count() <= 0) return over();
      sleepUntilEvent(over, std::min(left, kLongestSleep));
    }
  }
  return true;
}

// Returns whether anything moved.
bool UcxWorker::progress() {
  if (others_want_mutex_ > 0) ::sched_yield();
  bool tell;
  unsigned moved;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    moved = api_.worker_progress(worker_);
    tell = something_ended_ && waiters_ > 0;
    something_ended_ = false;
  }
  if (tell) {
    std::lock_guard<std::mutex> lock(turn_mutex_);
    turn_changed_.notify_all();
  }
  return moved > 0;
}

void UcxWorker::sleepUntilEvent(const std::function<bool()>& over,
                                std::chrono::milliseconds at_most) {
  std::vector<pollfd> events{{event_fd_, POLLIN, 0}};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (api_.worker_arm(worker_) != UCS_OK) return;  // there is something to do already
    ++asleep_;
    for (const UcxEndpoint* endpoint : local_) {
      if (endpoint->process->descriptor() >= 0) {
        events.push_back({endpoint->process->descriptor(), POLLIN, 0});
      }
    }
  }
  if (!over()) ::poll(events.data(), events.size(), static_cast<int>(at_most.count()));
  --asleep_;
}

// A process has ended only when all that it had sent has been taken in. One that lives on behind a
// broken connection is given up after a while.
void UcxWorker::noticeEndedProcesses() {
  std::vector<UcxEndpoint*> ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (UcxEndpoint* endpoint : local_) {
      if (endpoint->process->ended()) {
        ended.push_back(endpoint);
      } else if (endpoint->broken && Clock::now() - endpoint->broken_since > kBrokenForGood) {
        markFailed(*endpoint, endpoint->broken);
      }
    }
  }
  if (ended.empty()) return;
  while (progress()) {
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (UcxEndpoint* endpoint : ended) {
    if (std::erase(local_, endpoint) == 0) continue;  // another thread was faster
    markFailed(*endpoint, "the process has ended");
  }
}

// The worker's own thread.
void UcxWorker::lookAfter() {
  std::unique_lock<std::mutex> lock(turn_mutex_);
  uint64_t seen = turns_;
  while (!stop_) {
    stop_changed_.wait_for(lock, kIdle);
    if (stop_) return;
    if (driven_ || turns_ != seen) {
      seen = turns_;
      continue;
    }
    lock.unlock();
    while (progress()) {
    }
    noticeEndedProcesses();
    sleepUntilEvent([this] { return false; }, std::chrono::seconds(1));
    lock.lock();
  }
}

void UcxWorker::stopThread() {
  if (::getpid() != process_) return;
  {
    std::lock_guard<std::mutex> lock(turn_mutex_);
    stop_ = true;
    stop_changed_.notify_all();
  }
  if (!thread_.joinable()) return;
  {
    const auto lock = lockWorker();
    api_.worker_signal(worker_);
  }
  thread_.join();
}

}  // namespace dmuon
#endif
