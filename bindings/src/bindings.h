// One register function per part of the extension module dmuon._C; module.cpp calls them all.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace dmuon::bindings {

void registerBackend(pybind11::module_& module);
void registerOptim(pybind11::module_& module);
void registerUnits(pybind11::module_& module);

}  // namespace dmuon::bindings
