// The process group, owner collectives on its groups, and their two-stage form over a mesh.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <dmuon/backend/mesh_owner_collectives.h>
#include <dmuon/backend/owner_collectives.h>
#include <dmuon/backend/process_group_dmuon.h>
#include <dmuon/backend/shutdown.h>

#include "bindings.h"
#include "no_gil_ptr.h"

namespace py = pybind11;

namespace dmuon::bindings {
namespace {

using release = py::call_guard<py::gil_scoped_release>;
using c10d::ProcessGroup;
using GroupPtr = c10::intrusive_ptr<ProcessGroup>;

py::dict toDict(const OperationCounters& c) {
  py::dict d;
  d["calls"] = c.calls;
  d["tensors"] = c.tensors;
  d["bytes_sent"] = c.bytes_sent;
  d["bytes_received"] = c.bytes_received;
  d["seconds"] = c.seconds;
  py::dict dtypes;  // torch.dtype: (sent, received)
  for (const auto& [dtype, bytes] : c.bytes_by_dtype) {
    dtypes[py::cast(dtype)] = py::make_tuple(bytes.sent, bytes.received);
  }
  d["bytes_by_dtype"] = dtypes;
  return d;
}

py::dict toDict(const OwnerCounters& c) {
  py::dict d;
  d["reduce"] = toDict(c.reduce);
  d["broadcast"] = toDict(c.broadcast);
  py::dict labels;
  for (const auto& [label, counters] : c.by_label) labels[py::str(label)] = toDict(counters);
  d["by_label"] = labels;
  return d;
}

// Destroying the last reference may wait for a thread that is dropping tensors, which may need the
// GIL: give it up meanwhile.
template <typename T>
std::shared_ptr<T> releasingGil(std::shared_ptr<T> object) {
  if (!object) return object;
  auto* raw = object.get();
  return std::shared_ptr<T>(raw, [object](T*) mutable {
    if (PyGILState_Check()) {
      py::gil_scoped_release release_gil;
      object.reset();
    } else {
      object.reset();
    }
  });
}

std::shared_ptr<OwnerCollectives> channel(const std::optional<GroupPtr>& group,
                                          const std::string& device_type, const std::string& role) {
  if (!group || !*group) return nullptr;
  return releasingGil(newOwnerCollectives(**group, c10::Device(device_type).type(), role));
}

std::vector<Slot> slots(const std::vector<std::pair<int64_t, int64_t>>& owners) {
  std::vector<Slot> result;
  for (const auto& [r, g] : owners) result.push_back({r, g});
  return result;
}

WorkPtr reduceOnGroup(const GroupPtr& group, std::vector<at::Tensor> tensors,
                      std::vector<int64_t> owners, double divisor) {
  const auto device = tensors.empty() ? c10::DeviceType::CPU : tensors[0].device().type();
  OwnerOptions options;
  options.divisor = divisor;
  auto outputs = tensors;
  return ownerCollectivesOf(*group, device)
      ->reduceToOwners(std::move(tensors), std::move(outputs), std::move(owners),
                       std::move(options));
}

WorkPtr broadcastOnGroup(const GroupPtr& group, std::vector<at::Tensor> tensors,
                         std::vector<int64_t> owners) {
  const auto device = tensors.empty() ? c10::DeviceType::CPU : tensors[0].device().type();
  return ownerCollectivesOf(*group, device)
      ->broadcastFromOwners(std::move(tensors), std::move(owners));
}

void registerProcessGroup(py::module_& m) {
  using Backend = c10d::Backend;
  using BackendPtr = c10::intrusive_ptr<Backend>;
  py::class_<ProcessGroupDMuon, Backend, NoGilPtr<ProcessGroupDMuon>> group(m, "ProcessGroupDMuon");
  py::class_<ProcessGroupDMuon::Options, Backend::Options,
             c10::intrusive_ptr<ProcessGroupDMuon::Options>>(group, "Options")
      .def(py::init<>())
      .def_readwrite("nccl_deterministic", &ProcessGroupDMuon::Options::nccl_deterministic)
      .def_readwrite("nccl_fp32_accumulation", &ProcessGroupDMuon::Options::nccl_fp32_accumulation);
  group
      .def(
          py::init([](int rank, int size, const BackendPtr& cpu, const BackendPtr& cuda,
                      std::chrono::milliseconds timeout, const std::string& group_name,
                      const std::optional<c10::intrusive_ptr<c10d::Store>>& store,
                      bool nccl_deterministic, bool nccl_fp32_accumulation) {
            auto options = c10::make_intrusive<ProcessGroupDMuon::Options>();
            options->nccl_deterministic = nccl_deterministic;
            options->nccl_fp32_accumulation = nccl_fp32_accumulation;
            options->timeout = timeout;
            options->group_name = group_name;
            return NoGilPtr<ProcessGroupDMuon>(c10::make_intrusive<ProcessGroupDMuon>(
                rank, size, cpu, cuda, options, store.value_or(c10::intrusive_ptr<c10d::Store>())));
          }),
          py::arg("rank"), py::arg("size"), py::arg("cpu"), py::arg("cuda") = BackendPtr(),
          py::kw_only(), py::arg("timeout"), py::arg("group_name") = "",
          py::arg("store") = py::none(), py::arg("nccl_deterministic") = false,
          py::arg("nccl_fp32_accumulation") = false, release())
      .def_property_readonly("transport", &ProcessGroupDMuon::transportName)
      .def(
          "perform_nocolor_split", [](ProcessGroupDMuon&, const c10::Device&) {},
          "Ranks outside a split have nothing to do: only the members build the new group.");
}

void registerCollectives(py::module_& m) {
  // The base class has no members: a channel is only passed on to units.
  py::class_<OwnerCollectives, std::shared_ptr<OwnerCollectives>>(m, "OwnerCollectives")
      .def_property_readonly("rank", &OwnerCollectives::rank)
      .def_property_readonly("size", &OwnerCollectives::size)
      .def_property_readonly("group_name", &OwnerCollectives::groupName)
      .def("counters", [](const OwnerCollectives& c) { return toDict(c.counters()); });

  py::class_<MeshOwnerCollectives, std::shared_ptr<MeshOwnerCollectives>>(m, "MeshOwnerCollectives")
      .def(py::init([](const std::optional<GroupPtr>& replicate,
                       const std::optional<GroupPtr>& shard, const std::string& device_type,
                       const std::string& role) {
             return std::make_shared<MeshOwnerCollectives>(channel(replicate, device_type, role),
                                                           channel(shard, device_type, role),
                                                           c10::Device(device_type).type());
           }),
           py::arg("replicate"), py::arg("shard"), py::arg("device_type"), py::arg("role"))
      .def_property_readonly("replicate", &MeshOwnerCollectives::replicate)
      .def_property_readonly("shard", &MeshOwnerCollectives::shard)
      .def(
          "reduce_to_owners",
          [](MeshOwnerCollectives& mesh, std::vector<at::Tensor> inputs,
             std::vector<at::Tensor> outputs,
             const std::vector<std::pair<int64_t, int64_t>>& owners, double divisor,
             const std::string& label) -> WorkPtr {
            OwnerOptions options;
            options.divisor = divisor;
            options.label = label;
            return mesh.reduceToOwners(std::move(inputs), std::move(outputs), slots(owners),
                                       std::move(options));
          },
          py::arg("inputs"), py::arg("outputs"), py::arg("owners"), py::arg("divisor"),
          py::arg("label") = "", release())
      .def(
          "broadcast_from_owners",
          [](MeshOwnerCollectives& mesh, std::vector<at::Tensor> tensors,
             const std::vector<std::pair<int64_t, int64_t>>& owners,
             const std::string& label) -> WorkPtr {
            OwnerOptions options;
            options.label = label;
            return mesh.broadcastFromOwners(std::move(tensors), slots(owners), std::move(options));
          },
          py::arg("tensors"), py::arg("owners"), py::arg("label") = "", release())
      .def("counters", [](const MeshOwnerCollectives& mesh) {
        py::dict d;
        if (mesh.replicate()) d["replicate"] = toDict(mesh.replicate()->counters());
        if (mesh.shard()) d["shard"] = toDict(mesh.shard()->counters());
        return d;
      });

  m.def("reduce_to_owners", &reduceOnGroup, py::arg("group"), py::arg("tensors"), py::arg("owners"),
        py::arg("divisor"), release());
  m.def("broadcast_from_owners", &broadcastOnGroup, py::arg("group"), py::arg("tensors"),
        py::arg("owners"), release());
  m.def("shutdown_owner_collectives", &shutdownOwnerCollectives,
        py::arg("limit") = std::chrono::seconds(30), release(),
        "Ends what is pending on all groups, after `limit` (timedelta) at the latest; returns how "
        "many queues there were.");
}

}  // namespace

void registerBackend(py::module_& m) {
  registerProcessGroup(m);
  registerCollectives(m);
}

}  // namespace dmuon::bindings
