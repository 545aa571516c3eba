// UCX's functions, found at run time: the library is optional, and a build that knows UCX must load
// where it is missing.
#pragma once

#include <ucp/api/ucp.h>

#include <string>

namespace dmuon {

struct UcxApi {
  decltype(&::ucp_get_version) get_version;
  decltype(&::ucp_config_read) config_read;
  decltype(&::ucp_config_modify) config_modify;
  decltype(&::ucp_config_release) config_release;
  decltype(&::ucp_init_version) init_version;
  decltype(&::ucp_cleanup) cleanup;
  decltype(&::ucp_worker_create) worker_create;
  decltype(&::ucp_worker_destroy) worker_destroy;
  decltype(&::ucp_worker_get_address) worker_get_address;
  decltype(&::ucp_worker_release_address) worker_release_address;
  decltype(&::ucp_worker_get_efd) worker_get_efd;
  decltype(&::ucp_worker_arm) worker_arm;
  decltype(&::ucp_worker_signal) worker_signal;
  decltype(&::ucp_worker_progress) worker_progress;
  decltype(&::ucp_ep_create) ep_create;
  decltype(&::ucp_ep_close_nbx) ep_close_nbx;
  decltype(&::ucp_ep_flush_nbx) ep_flush_nbx;
  decltype(&::ucp_tag_send_nbx) tag_send_nbx;
  decltype(&::ucp_tag_recv_nbx) tag_recv_nbx;
  decltype(&::ucp_request_cancel) request_cancel;
  decltype(&::ucp_request_free) request_free;
  decltype(&::ucp_mem_map) mem_map;
  decltype(&::ucp_mem_query) mem_query;
  decltype(&::ucp_mem_unmap) mem_unmap;
  decltype(&::ucp_rkey_pack) rkey_pack;
  decltype(&::ucp_rkey_buffer_release) rkey_buffer_release;
  decltype(&::ucp_ep_rkey_unpack) ep_rkey_unpack;
  decltype(&::ucp_rkey_ptr) rkey_ptr;
  decltype(&::ucp_rkey_destroy) rkey_destroy;
  decltype(&::ucs_status_string) status_string;

  // Loads the library once per process. Looked for, in this order: the file that
  // DMUON_LIBUCP names; the wheel libucx beside this library's own package; the library that
  // dmuon was built with; the system's. Throws std::runtime_error that says what to install.
  static const UcxApi& get();
};

}  // namespace dmuon
