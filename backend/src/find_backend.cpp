#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupWrapper.hpp>

#include <dmuon/backend/process_group_dmuon.h>

namespace dmuon {

c10::intrusive_ptr<ProcessGroupDMuon> dmuonBackendOf(const BackendPtr& backend) {
  BackendPtr inner = backend;
  while (auto* wrapper = dynamic_cast<c10d::ProcessGroupWrapper*>(inner.get())) {
    inner = wrapper->getWrappedPg();
  }
  // (c10::dynamic_intrusive_pointer_cast leaks what is not of the type.)
  auto dmuon = c10::intrusive_ptr<ProcessGroupDMuon>::reclaim_copy(
      dynamic_cast<ProcessGroupDMuon*>(inner.get()));
  TORCH_CHECK(dmuon, "dmuon: group '", inner ? inner->getGroupUid() : "", "' has the backend '",
              inner ? inner->getBackendName() : "none", "', but must have the backend 'dmuon': ",
              "make it with init_process_group(\"dmuon\") or new_group(..., backend=\"dmuon\")");
  return dmuon;
}

c10::intrusive_ptr<ProcessGroupDMuon> dmuonBackendOf(c10d::ProcessGroup& group,
                                                     c10::DeviceType device) {
  auto backend = dmuonBackendOf(group.getBackend(device));
  backend->announceTo(group);
  return backend;
}

std::shared_ptr<OwnerCollectives> ownerCollectivesOf(c10d::ProcessGroup& group,
                                                     c10::DeviceType device) {
  return dmuonBackendOf(group, device)->ownerCollectives(device);
}

std::shared_ptr<OwnerCollectives> newOwnerCollectives(c10d::ProcessGroup& group,
                                                      c10::DeviceType device,
                                                      const std::string& role) {
  return dmuonBackendOf(group, device)->newOwnerCollectives(device, role);
}

}  // namespace dmuon
