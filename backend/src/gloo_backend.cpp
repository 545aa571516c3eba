#include "gloo_backend.h"

#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <csignal>
#include <cstdlib>
#include <sstream>
#include <string>

#include <dmuon/backend/factory.h>

#include "operation.h"

namespace dmuon {
namespace {

using c10d::ProcessGroupGloo;

// The same choice as Python's ProcessGroupGloo(store, rank, size, timeout).
void addDevices(ProcessGroupGloo::Options& options) {
  const char* interfaces = std::getenv("GLOO_SOCKET_IFNAME");
  if (interfaces == nullptr || *interfaces == '\0') {
    options.devices.push_back(ProcessGroupGloo::createDefaultDevice());
    return;
  }
  std::istringstream names(interfaces);
  for (std::string name; std::getline(names, name, ',');) {
    options.devices.push_back(ProcessGroupGloo::createDeviceForInterface(name));
  }
}

// Gloo writes to its sockets without MSG_NOSIGNAL: a peer that has just died would end this
// process, silently, where an error that names it is wanted. Python ignores the signal from its
// start.
void surviveClosedConnections() {
  struct sigaction action {};
  if (sigaction(SIGPIPE, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &action, nullptr);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> makeGlooBackend(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size,
                                                  std::chrono::milliseconds timeout) {
  surviveClosedConnections();
  auto options = ProcessGroupGloo::Options::create(timeout);
  addDevices(*options);
  options->threads = 2 * static_cast<int>(options->devices.size());
  return c10::make_intrusive<ProcessGroupGloo>(store, rank, size, options);
}

c10::intrusive_ptr<c10d::Backend::Options> copyGlooOptions(
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  const auto* gloo = dynamic_cast<const ProcessGroupGloo::Options*>(options.get());
  if (gloo == nullptr) return options;
  return c10::make_intrusive<ProcessGroupGloo::Options>(*gloo);
}

c10::intrusive_ptr<ProcessGroupDMuon> createProcessGroup(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout, const std::string& group_name) {
  auto options = c10::make_intrusive<ProcessGroupDMuon::Options>(timeout);
  options->group_name = group_name;
  BackendPtr gloo;
  try {
    gloo = makeGlooBackend(store, rank, size, timeout);
  } catch (const std::exception& error) {
    const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
    TORCH_CHECK(false, nameOnGroup("set-up", group_name, rank, size),
                ": Gloo has not connected all ranks (for which it has ", timeout.count(),
                " ms, and for which each leaves its addresses in the store): ",
                of_torch != nullptr ? of_torch->what_without_backtrace() : error.what());
  }
  return c10::make_intrusive<ProcessGroupDMuon>(
      rank, size, std::move(gloo), BackendPtr(), std::move(options),
      c10::make_intrusive<c10d::PrefixStore>("dmuon/transport", store));
}

}  // namespace dmuon
