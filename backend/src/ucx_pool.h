// Memory that the other processes of the host can read: payload is copied into it once and summed
// or copied from there by its receivers, without another copy on the way.
//
// Each process has one pool, of 32 slots of 256 KiB unless DMUON_POOL_SLOTS says another number (0:
// no pool), allocated and made known through UCX. Slots are taken by any group and come back when
// their readers have let go of them; who finds none free sends its payload as a message instead, so
// nobody ever waits for a slot. (A reader that has given up never lets go: its slots are lost until
// the end of the process.)
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "peers.h"
#include "ucx_api.h"

namespace dmuon {

class UcxPool {
 public:
  static constexpr int64_t kSlotBytes = 256 << 10;

  struct Slot {
    int64_t index = -1;
    char* data = nullptr;
  };

  // If the memory is not to be had, available() is false. `context` must outlive the pool. Throws
  // std::invalid_argument if DMUON_POOL_SLOTS is not a number from 0 to 4096.
  UcxPool(const UcxApi& api, ucp_context_h context);
  UcxPool(const UcxPool&) = delete;
  UcxPool& operator=(const UcxPool&) = delete;

  bool available() const { return base_ != nullptr; }
  // What a peer's UcxPoolView needs.
  uint64_t address() const { return reinterpret_cast<uint64_t>(base_); }
  const std::string& key() const { return key_; }
  int slots() const { return slots_; }

  // A slot to be written now and read by so many others, if one is free. Thread-safe.
  std::optional<Slot> take(uint32_t readers);

 private:
  int slots_ = 0;
  char* base_ = nullptr;
  std::string key_;
  std::mutex mutex_;
};

// Another process's pool.
class UcxPoolView {
 public:
  // Not available() if that memory cannot be reached from here.
  UcxPoolView(const UcxApi& api, ucp_ep_h ep, uint64_t address, int slots, const std::string& key);

  bool available() const { return base_ != nullptr; }
  // The slot's memory. Its owner gives it back when destroyed. `slot` is what the peer has sent.
  Bytes lend(int64_t slot, int64_t bytes) const;

 private:
  const int slots_;
  char* base_ = nullptr;
};

}  // namespace dmuon
