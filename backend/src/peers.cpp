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

}  // namespace dmuon
