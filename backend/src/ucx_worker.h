// The process's one UCX context and worker, shared by all groups.
//
// Progress. UCX moves data only while somebody polls it. Whoever waits for a message polls for
// everybody; others who wait meanwhile sleep until their message is done or the polling thread
// leaves.
// The polling thread spins a little, then yields its core with every poll (with more ranks than
// cores the peer it waits for needs that core), then sleeps until UCX reports an event. When nobody
// has waited for a few milliseconds, a thread of the worker's own takes over, which sleeps until
// there are events: so messages that a peer still needs leave in any case, and dead peers are
// noticed.
//
// Life. Made at the first use, never destroyed: a connection that closed with one group's end would
// take along what other groups of the peer still have under way. At the end of the process its
// thread is stopped, nothing else. A process forked after the first use cannot use it (getpid()).
//
// Dead peers. Between hosts, UCX finds out. Its shared memory transports cannot, and it would not
// use them if it were asked to: processes of one host are watched here instead.
//
// Settings: environment variables DMUON_UCX_* (or UCX_*) as UCX documents them, e.g. DMUON_UCX_TLS.
// Unless set: TLS without sysv and cma, RNDV_SCHEME am: within a host, everything goes through
// posix shared memory and no other transport costs time; and a check every second that remote peers
// are alive.
//
// No tensors here. Thread-safe, except where noted.
#pragma once

#include <ucp/api/ucp.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "host_process.h"
#include "peers.h"
#include "ucx_api.h"
#include "ucx_pool.h"

namespace dmuon {

// What others need to know of a process to reach it. All of it, for the same process, is the same.
struct UcxContact {
  uint64_t host = 0;  // zero if it cannot use shared memory
  int64_t pid = 0;
  uint64_t pool = 0;     // address there
  int pool_slots = 0;    // zero if there is none
  std::string pool_key;  // UCX's
  std::string address;   // UCX's
};

// A connection to another process.
struct UcxEndpoint {
  ucp_ep_h ep = nullptr;
  std::unique_ptr<ProcessWatch> process;  // of this host; else null
  std::unique_ptr<UcxPoolView> pool;      // null if it cannot be read from here
  std::atomic<bool> failed{false};
  std::string failure;  // written before `failed`
  // UCX says that it has failed; under the worker's mutex. If the process is watched, that is not
  // yet the end: one that has ended in peace has sent all that it owed, which may still lie in
  // shared memory when another of UCX's connections to it is cut.
  const char* broken = nullptr;
  Clock::time_point broken_since;
};

// A message under way.
struct UcxRequest {
  bool receives = false;
  uint64_t tag = 0;
  std::atomic<bool> ended{false};
  ucs_status_t status = UCS_OK;  // once ended
  int64_t received = 0;          // once ended, of a receive
  std::shared_ptr<void> memory;  // until ended, as is `kept`
  std::shared_ptr<void> kept;
  void* handle = nullptr;            // UCX's; under the worker's mutex, null when ended
  std::shared_ptr<UcxRequest> self;  // until ended: UCX has a pointer to this
};
using UcxRequestPtr = std::shared_ptr<UcxRequest>;

class UcxWorker {
 public:
  // Throws std::runtime_error if there is no library, or if it fails.
  static UcxWorker& get();

  const UcxContact& contact() const { return contact_; }
  // Different for every group of the process: the part of a tag that the receiver chooses.
  uint64_t newInbox() { return next_inbox_++; }

  UcxPool& pool() { return *pool_; }
  // The same endpoint for the same process, for ever.
  UcxEndpoint& connect(const UcxContact& contact);

  UcxRequestPtr send(UcxEndpoint& to, const Bytes& bytes, uint64_t tag);
  UcxRequestPtr receive(const Bytes& bytes, uint64_t tag);
  // Asks UCX to end a receive. Sends cannot be called back.
  void cancel(UcxRequest& request);
  // Keeps `memory` until the request has ended.
  void keep(UcxRequest& request, std::shared_ptr<void> memory);
  const char* text(ucs_status_t status) const { return api_.status_string(status); }

  // Returns over(), which is asked again whenever something may have happened and at the deadline.
  // It must be cheap and may be called from this thread only.
  bool wait(const std::function<bool()>& over, Clock::time_point deadline);
  // Makes all threads in wait() ask over() again.
  void wake();

 private:
  static UcxWorker* instance_;

  UcxWorker();
  void makeContext();
  void makeWorker();
  void check(const char* what, ucs_status_t status) const;
  void checkProcess() const;

  UcxRequestPtr track(UcxRequestPtr request, void* handle);
  static void onSent(void* handle, ucs_status_t status, void* request);
  static void onReceived(void* handle, ucs_status_t status, const ucp_tag_recv_info_t* info,
                         void* request);
  static void onPeerFailed(void* endpoint, ucp_ep_h ep, ucs_status_t status);
  void markFailed(UcxEndpoint& endpoint, const char* why);
  static void end(UcxRequest& request, void* handle, ucs_status_t status);
  std::unique_lock<std::mutex> lockWorker();

  bool drive(const std::function<bool()>& over, Clock::time_point deadline);
  bool progress();
  void sleepUntilEvent(const std::function<bool()>& over, std::chrono::milliseconds at_most);
  void noticeEndedProcesses();
  void lookAfter();
  void stopThread();
  friend struct UcxThreadStopper;

  const UcxApi& api_;
  const int process_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  std::unique_ptr<UcxPool> pool_;
  int event_fd_ = -1;
  UcxContact contact_;
  std::atomic<uint64_t> next_inbox_{1};

  // Held while UCX is called.
  std::mutex mutex_;
  std::atomic<int> others_want_mutex_{0};
  std::atomic<int> asleep_{0};    // threads that sleep until an event
  bool something_ended_ = false;  // under mutex_: since waiters were last told
  std::map<std::string, std::unique_ptr<UcxEndpoint>> endpoints_;  // by address
  std::vector<UcxEndpoint*> local_;  // those whose process is watched and has not ended

  // Who polls, and who waits for that.
  std::mutex turn_mutex_;
  std::condition_variable turn_changed_;
  bool driven_ = false;
  std::atomic<int> waiters_{0};
  uint64_t turns_ = 0;

  std::condition_variable stop_changed_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace dmuon
