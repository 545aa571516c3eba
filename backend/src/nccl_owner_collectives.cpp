#include "nccl_owner_collectives.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <utility>

namespace dmuon {
namespace {

bool isUrgent(const std::string& role) {
  return role.find("unshard") != std::string::npos || role.find("reduce") != std::string::npos;
}

NcclQueue::Setting queueSetting(const NcclOwnerCollectives::Setting& s, const std::string& group) {
  NcclQueue::Setting setting;
  setting.api = s.api;
  if (s.store) {
    setting.store = c10::make_intrusive<c10d::PrefixStore>(std::to_string(s.number), s.store);
  }
  setting.group = group;
  setting.mode = s.mode;
  setting.hooks = s.hooks;
  const bool debug = debugWanted() && s.size > 1;
  if (debug && s.host_channel) {
    setting.agreement = agreementOver(s.host_channel);
  } else if (debug) {
    setting.agreement = agreementOver(setting.store, s.rank, s.size);
  }
  auto& communicator = setting.communicator;
  communicator.name = nameOnGroup("new NCCL channel", group, s.rank, s.size);
  communicator.rank = s.rank;
  communicator.size = s.size;
  communicator.device = s.device;
  communicator.high_priority = isUrgent(s.role);
  communicator.peer_to_peer = s.mode.deterministic || s.mode.fp32_accumulation;
  communicator.timeout = s.timeout;
  communicator.must_match =
      c10::str("the channel is '", s.role, "'\ndeterministic is ", s.mode.deterministic,
               "\nfp32 accumulation is ", s.mode.fp32_accumulation, "\nDMUON_DEBUG is ", debug,
               "\nNCCL is ", s.api->version());
  return setting;
}

}  // namespace

NcclOwnerCollectives::NcclOwnerCollectives(const Setting& setting)
    : rank_(setting.rank),
      size_(setting.size),
      group_(setting.role.empty() ? setting.group : setting.group + "/" + setting.role),
      role_(setting.role),
      hooks_(setting.hooks),
      queue_(std::make_shared<NcclQueue>(queueSetting(setting, group_))) {}

std::shared_ptr<NcclOwnerCollectives> NcclOwnerCollectives::ofOneRank(c10::DeviceType device) {
  Setting setting;
  setting.api = ncclApiFor(device);
  TORCH_CHECK(setting.api, "dmuon: there are no owner collectives for ",
              c10::DeviceTypeName(device, true));
  setting.device = setting.api->currentDevice();
  setting.group = "one rank";
  setting.timeout = std::chrono::minutes(30);
  return std::make_shared<NcclOwnerCollectives>(setting);
}

NcclOwnerCollectives::~NcclOwnerCollectives() {
  if (queue_->forked()) {
    leak(std::move(queue_));
  } else {
    queue_->shutdown();
  }
}

OwnerWorkPtr NcclOwnerCollectives::reduceToOwners(std::vector<at::Tensor> inputs,
                                                  std::vector<at::Tensor> outputs,
                                                  std::vector<int64_t> owners,
                                                  OwnerOptions options) {
  OperationPtr op = makeReduce(inputs, outputs, owners, std::move(options), rank_, size_, device());
  op->proposal.role = role_;
  return submit(op, c10d::OpType::REDUCE, inputs);
}

OwnerWorkPtr NcclOwnerCollectives::broadcastFromOwners(std::vector<at::Tensor> tensors,
                                                       std::vector<int64_t> owners,
                                                       OwnerOptions options) {
  OperationPtr op = makeBroadcast(tensors, owners, std::move(options), rank_, size_, device());
  op->proposal.role = role_;
  return submit(op, c10d::OpType::BROADCAST, tensors);
}

OwnerWorkPtr NcclOwnerCollectives::submit(const OperationPtr& op, c10d::OpType type,
                                          const std::vector<at::Tensor>& tensors) {
  if (!hooks_ || !op->refusal.empty()) return queue_->submit(op);
  return hooks_->announce(type, tensors, {}, [&] { return queue_->submit(op); });
}

}  // namespace dmuon
