#include "nccl_api.h"

#include <map>
#include <mutex>
#include <utility>

#include "nccl_library.h"

namespace dmuon {
namespace {

struct Installed {
  std::mutex mutex;
  std::map<c10::DeviceType, NcclApiPtr> apis;
};

// Never destroyed: groups may outlive static objects.
Installed& installed() {
  static auto* const all = new Installed();
  return *all;
}

}  // namespace

void installNcclApi(c10::DeviceType type, NcclApiPtr api) {
  std::lock_guard<std::mutex> lock(installed().mutex);
  installed().apis[type] = std::move(api);
}

NcclApiPtr ncclApiFor(c10::DeviceType type) {
  std::lock_guard<std::mutex> lock(installed().mutex);
  const auto known = installed().apis.find(type);
  if (known != installed().apis.end() && known->second) return known->second;
  return type == c10::DeviceType::CUDA ? ncclLibrary() : nullptr;
}

}  // namespace dmuon
