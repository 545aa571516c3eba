#include "profiled_range.h"

#include <ATen/core/ivalue.h>

namespace dmuon {
namespace {

// Null before torch has it: then ranges are left open.
template <typename T>
std::shared_ptr<T> profilerOfAllThreads() {
  if constexpr (requires { std::shared_ptr<T>(T::getGlobal()); }) {
    return T::getGlobal();
  } else {
    return {};
  }
}

}  // namespace

ProfiledRange::ProfiledRange(const std::string& title, const std::vector<at::Tensor>& inputs) {
  auto function = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  if (!function->isActive()) return;
  function->_setAsync();
  std::vector<c10::IValue> values(inputs.begin(), inputs.end());
  function->before(title, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
  const auto profiler = profilerOfAllThreads<Profiler>();
  of_all_threads_ = profiler != nullptr;
  profiler_ = profiler;
  thread_info_ = c10::ThreadLocalDebugInfo::current();
  function_ = std::move(function);
}

void ProfiledRange::close() {
  if (!function_) return;
  const auto thread_info = thread_info_.lock();
  const auto profiler = profiler_.lock();
  const bool active = of_all_threads_ ? profiler && profiler == profilerOfAllThreads<Profiler>()
                                      : thread_info != nullptr;
  if (active) {
    const c10::DebugInfoGuard guard(thread_info);
    function_->end();
    function_.reset();
  } else {
    function_.release();  // leaked: its destructor would end it, too
  }
}

}  // namespace dmuon
