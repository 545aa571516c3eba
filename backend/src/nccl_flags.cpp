#include "nccl_flags.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

namespace dmuon {

NcclFlags::NcclFlags(NcclCommunicator& communicator, const Operation& op, const at::Tensor& taken)
    : communicator_(communicator) {
  const int64_t taken_bytes = taken.defined() ? taken.numel() : 0;
  const auto own_bytes = static_cast<int64_t>(op.flags.size());
  flags_.length = op.proposal.flag_bytes;
  flags_.taken = taken;
  if (own_bytes + taken_bytes == 0) return;
  if (communicator.size() == 1 && !taken.defined()) {
    flags_.known = op.flags;
    return;
  }
  NcclApi& api = communicator.api();
  const c10::Stream& stream = communicator.stream();
  sent_ = api.empty(own_bytes + taken_bytes, c10::ScalarType::Byte, stream);
  at::Tensor own;
  if (own_bytes > 0) {
    own = api.hostBytes(own_bytes);
    std::copy(op.flags.begin(), op.flags.end(), own.mutable_data_ptr<uint8_t>());
  }
  api.enqueue(stream, [sent = sent_, own, own_bytes, taken, taken_bytes] {
    const at::NoGradGuard no_grad;
    if (own_bytes > 0) sent.narrow(0, 0, own_bytes).copy_(own, /*non_blocking=*/true);
    if (taken_bytes > 0) sent.narrow(0, own_bytes, taken_bytes).copy_(taken, true);
  });
  flags_.device = communicator.size() == 1 ? sent_
                                           : api.empty(sent_.numel() * communicator.size(),
                                                       c10::ScalarType::Byte, stream);
  flags_.host = api.hostBytes(flags_.device.numel());
}

void NcclFlags::call(NcclApi::Comm comm) const {
  if (!travel()) return;
  communicator_.api().allGather(sent_.const_data_ptr(), flags_.device.mutable_data_ptr(),
                                sent_.numel(), c10::ScalarType::Byte, comm, communicator_.stream());
}

NcclWork::Flags NcclFlags::finish() {
  if (travel()) {
    communicator_.api().enqueue(communicator_.stream(),
                                [to = flags_.host, from = flags_.device] { to.copy_(from, true); });
  }
  return std::move(flags_);
}

}  // namespace dmuon
