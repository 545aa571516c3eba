// Dedicated units, and the one Python-level step that is hot: putting live or resting parameters
// into their modules.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <dmuon/optim/dedicated_model.h>
#include <dmuon/optim/dedicated_unit.h>

#include "bindings.h"

namespace py = pybind11;

namespace dmuon::bindings {
namespace {

using namespace dmuon::optim;  // NOLINT: this file is about nothing else

std::shared_ptr<OwnerCollectives> shared(const py::object& object) {
  return object.is_none() ? nullptr : object.cast<std::shared_ptr<OwnerCollectives>>();
}

std::shared_ptr<DedicatedUnit> makeUnit(
    std::string name,
    const std::vector<std::tuple<std::string, std::vector<int64_t>, std::pair<int64_t, int64_t>,
                                 at::Tensor, at::ScalarType>>& parameters,
    std::shared_ptr<MeshOwnerCollectives> reduce, const py::object& unshard,
    const py::object& publish, std::optional<at::ScalarType> reduce_dtype) {
  std::vector<DedicatedParameter> list;
  for (const auto& [fqn, shape, owner, rest, dtype] : parameters) {
    list.push_back({fqn, shape, Slot{owner.first, owner.second}, rest, dtype});
  }
  UnitChannels channels{std::move(reduce), shared(unshard), shared(publish)};
  return std::make_shared<DedicatedUnit>(std::move(name), std::move(list), std::move(channels),
                                         reduce_dtype);
}

// slots: (module._parameters, name, resting parameter, live parameter) of a whole unit.
void install(const py::list& slots, bool live) {
  for (const auto& item : slots) {
    PyObject* slot = item.ptr();
    if (!PyTuple_Check(slot) || PyTuple_GET_SIZE(slot) != 4) {
      throw py::type_error("dmuon: install expects tuples (dict, name, rest, live)");
    }
    PyObject* value = PyTuple_GET_ITEM(slot, live ? 3 : 2);
    PyObject* found = PyDict_GetItem(PyTuple_GET_ITEM(slot, 0), PyTuple_GET_ITEM(slot, 1));
    if (found != PyTuple_GET_ITEM(slot, 2) && found != PyTuple_GET_ITEM(slot, 3)) {
      throw std::runtime_error(
          "dmuon: dedicated parameter '" + py::cast<std::string>(PyTuple_GET_ITEM(slot, 1)) +
          "' was replaced after its first use (load_state_dict(assign=True), functional_call, "
          "module.weight = ...): copy into the parameter instead, as in p.copy_(tensor)");
    }
    if (PyDict_SetItem(PyTuple_GET_ITEM(slot, 0), PyTuple_GET_ITEM(slot, 1), value) != 0) {
      throw py::error_already_set();
    }
  }
}

void registerUnit(py::module_& m) {
  using release = py::call_guard<py::gil_scoped_release>;
  py::class_<DedicatedUnit, std::shared_ptr<DedicatedUnit>>(m, "DedicatedUnit")
      .def(py::init(&makeUnit), py::arg("name"), py::arg("parameters"), py::arg("reduce"),
           py::arg("unshard"), py::arg("publish"), py::arg("reduce_dtype"))
      .def_property_readonly("name", &DedicatedUnit::name)
      .def_property_readonly("unsharded", &DedicatedUnit::unsharded)
      .def_property_readonly("unsharded_bytes", &DedicatedUnit::unshardedBytes)
      .def_property_readonly("stale", &DedicatedUnit::stale)
      .def_property_readonly("counters",
                             [](const DedicatedUnit& u) {
                               const auto& c = u.counters();
                               py::dict d;
                               d["unshards"] = c.unshards;
                               d["reduces"] = c.reduces;
                               d["publishes"] = c.publishes;
                               d["published_parameters"] = c.published_parameters;
                               d["unshard_wait_s"] = c.unshard_wait_s;
                               d["publish_wait_s"] = c.publish_wait_s;
                               d["reduce_wait_s"] = c.reduce_wait_s;
                               return d;
                             })
      .def("live", &DedicatedUnit::live)
      .def("unshard", &DedicatedUnit::unshard, py::arg("refresh"), release())
      .def("wait_unshard", &DedicatedUnit::waitUnshard, release())
      .def("reshard", &DedicatedUnit::reshard, release())
      .def("publish", &DedicatedUnit::publish, py::arg("changed"), release())
      .def("wait_publish", &DedicatedUnit::waitPublish, release())
      .def(
          "settle", [](DedicatedUnit& u) { u.gradients().settle(); }, release())
      .def(
          "reduced", [](DedicatedUnit& u, int64_t i) { return u.gradients().reduced(i); },
          py::arg("index"), release())
      .def(
          "take_reduced", [](DedicatedUnit& u, int64_t i) { return u.gradients().takeReduced(i); },
          py::arg("index"), release())
      .def(
          "unreduced", [](DedicatedUnit& u, int64_t i) { return u.gradients().unreduced(i); },
          py::arg("index"))
      .def(
          "drop_gradient", [](DedicatedUnit& u, int64_t i) { u.gradients().drop(i); },
          py::arg("index"), release());
}

void registerModel(py::module_& m) {
  py::class_<GradientSync>(m, "GradientSync")
      .def(py::init([](bool reduce, bool all_reduce, double divisor) {
             if (!(divisor > 0)) {
               throw py::value_error("dmuon: gradient divide factor must be positive, got " +
                                     std::to_string(divisor));
             }
             return GradientSync{reduce, all_reduce, divisor};
           }),
           py::arg("reduce"), py::arg("all_reduce"), py::arg("divisor"))
      .def_readonly("reduce", &GradientSync::reduce)
      .def_readonly("all_reduce", &GradientSync::all_reduce)
      .def_readonly("divisor", &GradientSync::divisor);

  py::class_<DedicatedModel, std::shared_ptr<DedicatedModel>>(m, "DedicatedModel")
      .def(py::init<std::vector<std::shared_ptr<DedicatedUnit>>, std::function<void()>>(),
           py::arg("units"), py::arg("gradient_outside"))
      .def("attach", &DedicatedModel::attach, py::arg("index"), py::arg("live_parameters"))
      .def("begin_backward", &DedicatedModel::beginBackward, py::arg("graph_task"))
      .def_property_readonly("in_backward", &DedicatedModel::inBackward)
      .def("set_sync", &DedicatedModel::setSync, py::arg("index"), py::arg("sync"))
      .def("unit_passed", &DedicatedModel::pass, py::arg("index"),
           py::call_guard<py::gil_scoped_release>())
      .def("finish_backward", &DedicatedModel::finishBackward, py::arg("fallback"),
           py::call_guard<py::gil_scoped_release>())
      .def("abandon_backward", &DedicatedModel::abandonBackward,
           py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void registerUnits(py::module_& m) {
  registerUnit(m);
  registerModel(m);
  m.def("install", &install, py::arg("slots"), py::arg("live"));
}

}  // namespace dmuon::bindings
