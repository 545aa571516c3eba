// One parameter of a dedicated unit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include <dmuon/backend/mesh_owner_collectives.h>

namespace dmuon::optim {

struct DedicatedParameter {
  std::string name;
  std::vector<int64_t> shape;
  Slot owner;
  at::Tensor rest;  // the whole matrix on its owner slot, (0, ...) elsewhere
  at::ScalarType compute_dtype = at::kFloat;  // of the weights that forward and backward use
};

}  // namespace dmuon::optim
