// A range in torch.profiler that one thread opens and any thread closes.
//
// The profiler may have been stopped in between, and what it recorded be gone. c10d's own ranges
// then write to freed memory; one of these ends only in the profiler that it was opened in.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <memory>
#include <string>
#include <vector>

namespace dmuon {

class ProfiledRange {
 public:
  // `inputs`: for their shapes. Nothing happens if no profiler is active on this thread.
  ProfiledRange(const std::string& title, const std::vector<at::Tensor>& inputs);
  ~ProfiledRange() { close(); }
  ProfiledRange(const ProfiledRange&) = delete;
  ProfiledRange& operator=(const ProfiledRange&) = delete;

  void close();

 private:
  using Profiler = torch::profiler::impl::ProfilerStateBase;

  std::unique_ptr<at::RecordFunction> function_;  // null: not active, or closed
  // The profiler of all threads, or that of the opening thread.
  bool of_all_threads_ = false;
  std::weak_ptr<Profiler> profiler_;
  std::weak_ptr<c10::ThreadLocalDebugInfo> thread_info_;
};

}  // namespace dmuon
