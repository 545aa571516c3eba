// Registration of hooks; hooks.h holds and calls them.
#include <dmuon/backend/process_group_dmuon.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>

#include "hooks.h"

namespace dmuon {

#ifdef DMUON_TORCH_HAS_ABORT_HOOKS
void ProcessGroupDMuon::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  if (cuda_ && cuda_->supportsAbortHooks()) cuda_->registerAbortHook(id, hook);
  hooks_->addAbort(id, std::move(hook));
}

void ProcessGroupDMuon::unregisterAbortHook(int64_t id) {
  if (cuda_ && cuda_->supportsAbortHooks()) cuda_->unregisterAbortHook(id);
  hooks_->removeAbort(id);
}
#endif

#ifdef DMUON_TORCH_HAS_COMPLETION_HOOKS
bool ProcessGroupDMuon::supportsCompletionHooks() const {
  return !cuda_ || cuda_->supportsCompletionHooks();
}

void ProcessGroupDMuon::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  TORCH_CHECK(supportsCompletionHooks(), nameOf("registerCompletionHook"), ": the inner backend '",
              cuda_->getBackendName(), "' for cuda has no completion hooks");
  if (cuda_) cuda_->registerCompletionHook(id, hook);
  hooks_->addCompletion(id, [hook](uint64_t key, std::optional<float> milliseconds) {
    hook(c10d::CompletionHookArgs{key, milliseconds});
  });
}

void ProcessGroupDMuon::unregisterCompletionHook(int64_t id) {
  if (cuda_ && supportsCompletionHooks()) cuda_->unregisterCompletionHook(id);
  hooks_->removeCompletion(id);
}
#endif

// The group owns this backend, so the hooks must not own the group.
void ProcessGroupDMuon::announceTo(c10d::ProcessGroup& group) {
#ifdef DMUON_TORCH_HAS_ABORT_HOOKS
  if (announced_.exchange(true)) return;
  const auto owning = c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(&group);
  const c10::weak_intrusive_ptr<c10d::ProcessGroup> weak(owning);
  const auto nameOfType = [](c10d::OpType type) {
    return type == c10d::OpType::REDUCE ? c10d::HookOpName::REDUCE : c10d::HookOpName::BROADCAST;
  };
  Hooks::Submission hooks;
  hooks.before = [weak, nameOfType](c10d::OpType type, const std::vector<at::Tensor>& inputs,
                                    const std::vector<at::Tensor>& outputs) -> int64_t {
    const auto group = weak.lock();
    return group ? group->firePreHook(nameOfType(type), true, -1, inputs, outputs) : 0;
  };
  hooks.after = [weak, nameOfType](c10d::OpType type, int64_t id, const WorkPtr& work) {
    if (const auto group = weak.lock()) group->firePostHook(nameOfType(type), true, id, work);
  };
  hooks_->setSubmission(std::move(hooks));
#endif
}

}  // namespace dmuon
