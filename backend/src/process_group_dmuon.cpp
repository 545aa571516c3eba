#include <dmuon/backend/process_group_dmuon.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <utility>

#include "cpu_owner_collectives.h"
#include "fork_guard.h"
#include "gloo_backend.h"
#include "gloo_peers.h"
#include "hooks.h"
#include "nccl_owner_collectives.h"
#include "transport.h"

namespace dmuon {
namespace {

using OptionsPtr = c10::intrusive_ptr<c10d::Backend::Options>;

void requireShape(const char* device, const BackendPtr& inner, int rank, int size) {
  TORCH_CHECK_VALUE(inner->getRank() == rank && inner->getSize() == size,
                    "dmuon: the inner backend '", inner->getBackendName(), "' for ", device,
                    " is rank ", inner->getRank(), " of ", inner->getSize(),
                    ", but the group is rank ", rank, " of ", size);
}

// Options::clone() where torch has it; split() and merge() write to the options they are given.
template <typename Options>
auto copyOptions(const c10::intrusive_ptr<Options>& options, int) -> decltype(options->clone()) {
  return options->clone();
}
template <typename Options>
OptionsPtr copyOptions(const c10::intrusive_ptr<Options>& options, long) {
  return copyGlooOptions(options);
}

// The inner backend's own options for a group that is to be made as `wanted` says.
OptionsPtr innerOptions(const BackendPtr& inner, const OptionsPtr& wanted) {
  OptionsPtr options = copyOptions(inner->getBackendOptions(), 0);
  options->timeout = wanted->timeout;
  options->group_name = wanted->group_name;
  options->group_desc = wanted->group_desc;
  options->global_ranks_in_group = wanted->global_ranks_in_group;
  return options;
}

c10::intrusive_ptr<c10d::Store> storeFor(const char* device,
                                         const c10::intrusive_ptr<c10d::Store>& store) {
  return c10::make_intrusive<c10d::PrefixStore>(std::string("dmuon/") + device, store);
}

// For a group made from one with the options `from`.
c10::intrusive_ptr<ProcessGroupDMuon::Options> ownOptions(const OptionsPtr& wanted,
                                                          const ProcessGroupDMuon::Options& from) {
  auto options = c10::make_intrusive<ProcessGroupDMuon::Options>(from);
  options->timeout = wanted->timeout;
  options->group_name = wanted->group_name;
  options->group_desc = wanted->group_desc;
  options->global_ranks_in_group = wanted->global_ranks_in_group;
  return options;
}

}  // namespace

ProcessGroupDMuon::ProcessGroupDMuon(int rank, int size, BackendPtr cpu, BackendPtr cuda,
                                     c10::intrusive_ptr<Options> options,
                                     const c10::intrusive_ptr<c10d::Store>& store)
    : c10d::Backend(rank, size),
      fork_(std::make_unique<ForkGuard>()),
      hooks_(std::make_shared<Hooks>()),
      cuda_(std::move(cuda)),
      options_(std::move(options)),
      store_(store) {
  TORCH_CHECK_VALUE(cpu || cuda_, "dmuon: a group needs an inner backend for cpu or for cuda");
  if (cpu) {
    requireShape("cpu", cpu, rank, size);
    cpu_ = std::make_shared<InnerBackend>(std::move(cpu));
    transport_ = makeTransport(cpu_, store, rank, size, options_->timeout,
                               nameOf("set-up of the owner collectives"));
  }
  if (cuda_) requireShape("cuda", cuda_, rank, size);
  init();
}

ProcessGroupDMuon::~ProcessGroupDMuon() {
  if (!fork_->forked()) return;
  leak(std::move(cpu_));
  leak(std::move(transport_));
  leak(std::move(cuda_));
}

void ProcessGroupDMuon::requireOwnProcess(const char* operation) const {
  if (!fork_->forked()) return;
  C10_THROW_ERROR(DistBackendError,
                  c10::str(nameOf(operation), ": ", fork_->explain("this group")));
}

std::string ProcessGroupDMuon::transportName() const {
  return transport_ ? transport_->name() : "";
}

BackendPtr ProcessGroupDMuon::innerBackend(c10::DeviceType device) const {
  if (device == c10::DeviceType::CUDA) return cuda_;
  return device == c10::DeviceType::CPU && cpu_ ? cpu_->backend : BackendPtr();
}

std::string ProcessGroupDMuon::groupName() const {
  if (!pg_desc_.empty() && pg_desc_ != "undefined") return pg_desc_;
  if (!options_->group_name.empty()) return options_->group_name;
  return pg_uid_.empty() ? "unnamed" : pg_uid_;
}

std::string ProcessGroupDMuon::nameOf(const char* operation) const {
  return nameOnGroup(operation, groupName(), rank_, size_);
}

std::shared_ptr<OwnerChannel> ProcessGroupDMuon::makeChannel(c10::DeviceType device, int number,
                                                             const std::string& role) {
  TORCH_CHECK(innerBackend(device), nameOf("owner collectives"), ": there are none for ",
              c10::DeviceTypeName(device, true), ". The group has inner backends for",
              cpu_ ? " cpu" : "", cuda_ ? " cuda" : "");
  std::shared_ptr<NcclApi> api;
  try {
    api = ncclApiFor(device);
  } catch (const NcclError& error) {
    TORCH_CHECK(false, nameOf("owner collectives"), ": there are none for ",
                c10::DeviceTypeName(device, true), ": ", error.what());
  }
  std::shared_ptr<OwnerChannel> channel;
  if (api) {
    channel = makeNcclChannel(api, number, role);
  } else {
    channel = std::make_shared<CpuOwnerCollectives>(transport_, rank_, size_, number, groupName(),
                                                    role, options_->timeout, hooks_);
  }
  addChannel(channel);
  return channel;
}

std::shared_ptr<OwnerChannel> ProcessGroupDMuon::makeNcclChannel(
    const std::shared_ptr<NcclApi>& api, int number, const std::string& role) {
  NcclOwnerCollectives::Setting setting;
  setting.api = api;
  if (store_) setting.store = c10::make_intrusive<c10d::PrefixStore>("nccl", store_);
  setting.rank = rank_;
  setting.size = size_;
  setting.number = number;
  setting.group = groupName();
  setting.role = role;
  setting.device = api->currentDevice();
  if (bound_device_id_ && bound_device_id_->type() == setting.device.type()) {
    setting.device = *bound_device_id_;
  }
  setting.mode =
      NcclMode{options_->nccl_deterministic, options_->nccl_fp32_accumulation}.withEnvironment();
  setting.timeout = options_->timeout;
  setting.hooks = hooks_;
  if (transport_ && size_ > 1 && debugWanted()) {
    // Number 0 is the CPU's own channel, if there is one.
    auto host = std::make_shared<CpuOwnerCollectives>(transport_, rank_, size_,
                                                      number == 0 ? kMaxChannels - 1 : number,
                                                      groupName(), role, options_->timeout);
    addChannel(host);
    setting.host_channel = host;
  }
  return std::make_shared<NcclOwnerCollectives>(setting);
}

void ProcessGroupDMuon::addChannel(const std::shared_ptr<OwnerChannel>& channel) {
  std::erase_if(channels_, [](const auto& known) { return known.expired(); });
  channels_.push_back(channel);
}

std::shared_ptr<OwnerCollectives> ProcessGroupDMuon::ownerCollectives(c10::DeviceType device) {
  requireOwnProcess("owner collectives");
  std::lock_guard<std::mutex> lock(channel_mutex_);
  auto& channel = own_channels_[device];
  if (!channel) channel = makeChannel(device, 0, "");
  return channel;
}

std::shared_ptr<OwnerCollectives> ProcessGroupDMuon::newOwnerCollectives(c10::DeviceType device,
                                                                         const std::string& role) {
  requireOwnProcess("new owner collectives");
  std::lock_guard<std::mutex> lock(channel_mutex_);
  TORCH_CHECK(next_channel_ < kMaxChannels - 1, nameOf("new owner collectives"), ": ", kMaxChannels,
              " have been made already, which is all the tags have room for");
  // Not to be used again, also if this fails: the ranks have left traces of it in the store.
  return makeChannel(device, next_channel_++, role);
}

std::vector<std::shared_ptr<OwnerChannel>> ProcessGroupDMuon::channels() {
  std::lock_guard<std::mutex> lock(channel_mutex_);
  std::vector<std::shared_ptr<OwnerChannel>> alive;
  for (const auto& known : channels_) {
    if (auto channel = known.lock()) alive.push_back(std::move(channel));
  }
  return alive;
}

BackendPtr ProcessGroupDMuon::split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks, const OptionsPtr& opts) {
  requireOwnProcess("split");
  // On every rank, member or not: NCCL's split is collective over the parent.
  BackendPtr cpu, cuda;
  if (cpu_) {
    cpu = cpu_->backend->split(storeFor("cpu", store), ranks, innerOptions(cpu_->backend, opts));
  }
  if (cuda_) cuda = cuda_->split(storeFor("cuda", store), ranks, innerOptions(cuda_, opts));
  const auto self = std::find(ranks.begin(), ranks.end(), rank_);
  if (self == ranks.end()) return {};
  return c10::make_intrusive<ProcessGroupDMuon>(
      static_cast<int>(self - ranks.begin()), static_cast<int>(ranks.size()), std::move(cpu),
      std::move(cuda), ownOptions(opts, *options_), storeFor("transport", store));
}

BackendPtr ProcessGroupDMuon::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                    const OptionsPtr& opts, const int& rank, const int& size) {
  requireOwnProcess("merge");
  BackendPtr cpu, cuda;
  if (cpu_) {
    cpu =
        cpu_->backend->merge(storeFor("cpu", store), innerOptions(cpu_->backend, opts), rank, size);
  }
  if (cuda_) cuda = cuda_->merge(storeFor("cuda", store), innerOptions(cuda_, opts), rank, size);
  return c10::make_intrusive<ProcessGroupDMuon>(rank, size, std::move(cpu), std::move(cuda),
                                                ownOptions(opts, *options_),
                                                storeFor("transport", store));
}

void ProcessGroupDMuon::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  if (cpu_) cpu_->backend->setTimeout(timeout);
  if (cuda_) cuda_->setTimeout(timeout);
  for (const auto& channel : channels()) channel->setTimeout(timeout);
}

void ProcessGroupDMuon::setGroupUid(const std::string& uid) {
  c10d::Backend::setGroupUid(uid);
  if (cpu_) cpu_->backend->setGroupUid(uid);
  if (cuda_) cuda_->setGroupUid(uid);
}

void ProcessGroupDMuon::eagerConnectSingleDevice(at::Device device) {
  if (device.is_cuda() && cuda_) cuda_->eagerConnectSingleDevice(device);
}

void ProcessGroupDMuon::setBoundDeviceId(std::optional<at::Device> device) {
  c10d::Backend::setBoundDeviceId(device);
  if (cuda_) cuda_->setBoundDeviceId(device);
}

void ProcessGroupDMuon::enableCollectivesTiming() {
  if (cpu_) cpu_->backend->enableCollectivesTiming();
  if (cuda_) cuda_->enableCollectivesTiming();
}

void ProcessGroupDMuon::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  requireCuda("registerOnCompletionHook").registerOnCompletionHook(std::move(hook));
}

void ProcessGroupDMuon::waitForPendingWorks() {
  requireCuda("waitForPendingWorks").waitForPendingWorks();
}

std::shared_ptr<c10::Allocator> ProcessGroupDMuon::getMemAllocator() {
  return requireCuda("getMemAllocator").getMemAllocator();
}

at::Tensor ProcessGroupDMuon::allocateTensor(long size, at::TensorOptions options) {
  return requireCuda("allocateTensor").allocateTensor(size, options);
}

bool ProcessGroupDMuon::supportsTensorAlloc(c10::DeviceIndex device) {
  return cuda_ && cuda_->supportsTensorAlloc(device);
}

c10d::ErrorType ProcessGroupDMuon::getError() {
  const auto error = cuda_ ? cuda_->getError() : c10d::ErrorType::SUCCESS;
  return error == c10d::ErrorType::SUCCESS && cpu_ ? cpu_->backend->getError() : error;
}

void ProcessGroupDMuon::abort() {
  if (fork_->forked()) return;
  hooks_->failed();
  for (const auto& channel : channels()) channel->abort("the process group was aborted");
  if (cuda_) cuda_->abort();
  if (cpu_) cpu_->backend->abort();
}

void ProcessGroupDMuon::shutdown() {
  if (fork_->forked()) return;
  for (const auto& channel : channels()) channel->shutdown();
  if (cuda_) cuda_->shutdown();
  if (cpu_) cpu_->backend->shutdown();
}

}  // namespace dmuon
