// What differs between the versions of torch that dmuon is compiled with.
#pragma once

#include <torch/headeronly/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

// c10d::AbortHook and the pre- and post-hooks of c10d::ProcessGroup: torch 2.14.
#ifdef C10D_BACKEND_HAS_HOOKS
#define DMUON_TORCH_HAS_ABORT_HOOKS 1
// c10d::CompletionHook and c10d::Work::getCompletionKey(): torch 2.15.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
#define DMUON_TORCH_HAS_COMPLETION_HOOKS 1
#endif
#endif
