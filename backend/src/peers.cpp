#include "peers.h"

#include <new>

namespace dmuon {

Bytes newBytes(int64_t size) {
  constexpr std::align_val_t kAlignment{64};
  const auto n = static_cast<size_t>(size);
  std::shared_ptr<void> owner(::operator new(n, kAlignment),
                              [kAlignment](void* p) { ::operator delete(p, kAlignment); });
  return {static_cast<char*>(owner.get()), size, owner};
}

std::vector<Transfer> Peers::sendPayload(const std::vector<int>& to, int tag,
                                         const Payload& payload) {
  Bytes bytes{const_cast<char*>(payload.data), payload.size, {}};
  if (payload.data == nullptr) {
    bytes = newBytes(payload.size);
    payload.write(bytes.data);
  }
  std::vector<Transfer> transfers;
  for (int peer : to) transfers.push_back(send(peer, tag, bytes));
  return transfers;
}

}  // namespace dmuon
