#ifdef DMUON_HAVE_UCX
#include "ucx_pool.h"

#include <atomic>
#include <cstdlib>
#include <new>
#include <stdexcept>

namespace dmuon {
namespace {

// In front of the slots, one line of the cache each: how many still read the slot.
struct alignas(64) Readers {
  std::atomic<uint32_t> left;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "it is used between processes");

constexpr int kSlots = 32;
constexpr int kMostSlots = 4096;

Readers& readersOf(char* base, int64_t slot) { return reinterpret_cast<Readers*>(base)[slot]; }
char* dataOf(char* base, int slots, int64_t slot) {
  return base + slots * static_cast<int64_t>(sizeof(Readers)) + slot * UcxPool::kSlotBytes;
}

int wantedSlots() {
  const char* value = std::getenv("DMUON_POOL_SLOTS");
  if (value == nullptr || *value == '\0') return kSlots;
  char* end = nullptr;
  const long slots = std::strtol(value, &end, 10);
  if (*end != '\0' || slots < 0 || slots > kMostSlots) {
    throw std::invalid_argument("DMUON_POOL_SLOTS is '" + std::string(value) +
                                "', but must be a number from 0 to " + std::to_string(kMostSlots));
  }
  return static_cast<int>(slots);
}

}  // namespace

UcxPool::UcxPool(const UcxApi& api, ucp_context_h context) : slots_(wantedSlots()) {
  if (slots_ == 0) return;
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS;
  params.length = slots_ * (sizeof(Readers) + kSlotBytes);
  params.flags = UCP_MEM_MAP_ALLOCATE;
  ucp_mem_h memory = nullptr;
  if (api.mem_map(context, &params, &memory) != UCS_OK) return;
  ucp_mem_attr_t attributes{};
  attributes.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS;
  void* key = nullptr;
  size_t length = 0;
  if (api.mem_query(memory, &attributes) != UCS_OK ||
      api.rkey_pack(context, memory, &key, &length) != UCS_OK) {
    api.mem_unmap(context, memory);
    return;
  }
  key_.assign(static_cast<const char*>(key), length);
  api.rkey_buffer_release(key);
  base_ = static_cast<char*>(attributes.address);
  for (int slot = 0; slot < slots_; ++slot) new (&readersOf(base_, slot)) Readers{{0}};
}

std::optional<UcxPool::Slot> UcxPool::take(uint32_t readers) {
  if (base_ == nullptr) return std::nullopt;
  std::lock_guard<std::mutex> lock(mutex_);
  // The lowest first: those are in the cache.
  for (int slot = 0; slot < slots_; ++slot) {
    std::atomic<uint32_t>& left = readersOf(base_, slot).left;
    if (left.load(std::memory_order_acquire) != 0) continue;
    left.store(readers, std::memory_order_relaxed);
    return Slot{slot, dataOf(base_, slots_, slot)};
  }
  return std::nullopt;
}

UcxPoolView::UcxPoolView(const UcxApi& api, ucp_ep_h ep, uint64_t address, int slots,
                         const std::string& key)
    : slots_(slots) {
  if (key.empty()) return;
  ucp_rkey_h rkey = nullptr;
  if (api.ep_rkey_unpack(ep, key.data(), &rkey) != UCS_OK) return;
  void* here = nullptr;
  if (api.rkey_ptr(rkey, address, &here) == UCS_OK) {
    base_ = static_cast<char*>(here);  // as long as the key, which is kept
  } else {
    api.rkey_destroy(rkey);
  }
}

Bytes UcxPoolView::lend(int64_t slot, int64_t bytes) const {
  if (slot < 0 || slot >= slots_ || bytes < 0 || bytes > UcxPool::kSlotBytes) {
    throw std::runtime_error("a peer offers " + std::to_string(bytes) + " bytes in slot " +
                             std::to_string(slot) + ", which its pool does not have");
  }
  Readers* const readers = &readersOf(base_, slot);
  std::shared_ptr<void> owner(static_cast<void*>(readers), [](void* place) {
    static_cast<Readers*>(place)->left.fetch_sub(1, std::memory_order_release);
  });
  return {dataOf(base_, slots_, slot), bytes, std::move(owner)};
}

}  // namespace dmuon
#endif
