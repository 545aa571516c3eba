#include "bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "dmuon's C++ layers; see _C.pyi for signatures";
  // c10d's types (Backend, Work, ProcessGroup) are registered by torch's own module.
  pybind11::module_::import("torch._C._distributed_c10d");
  dmuon::bindings::registerBackend(module);
  dmuon::bindings::registerOptim(module);
  dmuon::bindings::registerUnits(module);
}
