#ifdef DMUON_HAVE_UCX
#include "ucx_api.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <vector>

namespace dmuon {
namespace {

// <site-packages>/dmuon/lib/libdmuon.so and <site-packages>/libucx/lib/libucp.so.0.
std::string besideThisPackage() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&UcxApi::get), &info) == 0) return "";
  const std::string self = info.dli_fname;
  const size_t slash = self.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : self.substr(0, slash);
  return folder + "/../../libucx/lib/libucp.so.0";
}

std::vector<std::string> candidates() {
  const char* named = std::getenv("DMUON_LIBUCP");
  if (named != nullptr && *named != '\0') return {named};
  std::vector<std::string> files;
  for (const std::string& file : {besideThisPackage(), std::string(DMUON_UCX_BUILD_LIBRARY)}) {
    if (!file.empty() && ::access(file.c_str(), R_OK) == 0) files.push_back(file);
  }
  files.push_back("libucp.so.0");
  return files;
}

void* open() {
  std::string errors;
  for (const std::string& file : candidates()) {
    if (void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    errors += std::string(errors.empty() ? "" : "; ") + dlerror();
  }
  throw std::runtime_error("the UCX library was not found (" + errors +
                           "): pip install libucx-cu13, or name libucp.so.0 in DMUON_LIBUCP");
}

template <typename Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) {
    throw std::runtime_error(std::string("the UCX library has no function ") + name +
                             ": dmuon needs UCX 1.12 or newer");
  }
}

// Modules for GPUs would look for devices in every process; only host memory is moved here.
void leaveOutGpuModules(void* library) {
  if (std::getenv("UCX_MODULES") != nullptr) return;
  using SetOption = ucs_status_t (*)(const char*, const char*);
  auto set = reinterpret_cast<SetOption>(dlsym(library, "ucs_global_opts_set_value"));
  if (set != nullptr) set("MODULES", "^cuda,rocm,ze");
}

UcxApi load() {
  void* const library = open();
  UcxApi api;
  find(library, "ucp_get_version", api.get_version);
  find(library, "ucp_config_read", api.config_read);
  find(library, "ucp_config_modify", api.config_modify);
  find(library, "ucp_config_release", api.config_release);
  find(library, "ucp_init_version", api.init_version);
  find(library, "ucp_cleanup", api.cleanup);
  find(library, "ucp_worker_create", api.worker_create);
  find(library, "ucp_worker_destroy", api.worker_destroy);
  find(library, "ucp_worker_get_address", api.worker_get_address);
  find(library, "ucp_worker_release_address", api.worker_release_address);
  find(library, "ucp_worker_get_efd", api.worker_get_efd);
  find(library, "ucp_worker_arm", api.worker_arm);
  find(library, "ucp_worker_signal", api.worker_signal);
  find(library, "ucp_worker_progress", api.worker_progress);
  find(library, "ucp_ep_create", api.ep_create);
  find(library, "ucp_ep_close_nbx", api.ep_close_nbx);
  find(library, "ucp_ep_flush_nbx", api.ep_flush_nbx);
  find(library, "ucp_tag_send_nbx", api.tag_send_nbx);
  find(library, "ucp_tag_recv_nbx", api.tag_recv_nbx);
  find(library, "ucp_request_cancel", api.request_cancel);
  find(library, "ucp_request_free", api.request_free);
  find(library, "ucp_mem_map", api.mem_map);
  find(library, "ucp_mem_query", api.mem_query);
  find(library, "ucp_mem_unmap", api.mem_unmap);
  find(library, "ucp_rkey_pack", api.rkey_pack);
  find(library, "ucp_rkey_buffer_release", api.rkey_buffer_release);
  find(library, "ucp_ep_rkey_unpack", api.ep_rkey_unpack);
  find(library, "ucp_rkey_ptr", api.rkey_ptr);
  find(library, "ucp_rkey_destroy", api.rkey_destroy);
  find(library, "ucs_status_string", api.status_string);
  leaveOutGpuModules(library);
  return api;
}

}  // namespace

const UcxApi& UcxApi::get() {
  static const UcxApi api = load();  // tried again if it throws
  return api;
}

}  // namespace dmuon
#endif
