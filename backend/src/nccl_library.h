// NCCL itself, behind NcclApi.
#pragma once

#include "nccl_api.h"

namespace dmuon {

// Loaded once per process; found as nccl_library.cpp says. Throws NcclError if this build was made
// without NCCL's header, or if the library is not found or too old.
NcclApiPtr ncclLibrary();

}  // namespace dmuon
