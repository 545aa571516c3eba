// The tensors of one operation on one rank, and what must become of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "perf_options.h"

namespace dmuon::perf {

using Tensors = std::vector<at::Tensor>;

at::ScalarType typeOf(const std::string& name);

// tensor -> rank
std::vector<int64_t> ownersOf(const std::string& pattern, int tensors, int size);

class Data {
 public:
  Data(const Options& options, const std::string& pattern, int rank, int size, int64_t bytes);

  // The operation's start: inputs that differ by rank, tensor and element, and no trace of a
  // result.
  void fill(const std::string& op);

  // Elements of `results`, one tensor for each of `owners`, that are not what `op` must give,
  // looked at where this rank gets a result.
  int64_t wrong(const std::string& op, const Tensors& results) const;
  // Changes one element of a result, if this rank gets any.
  void spoil(const std::string& op, const Tensors& results) const;

  int64_t tensorBytes() const;
  int64_t receivedBytes(const std::string& op) const;  // by this rank
  double largestShare() const;                         // of one rank, among the owners

  const int rank, size;
  const std::vector<int64_t> owners;
  Tensors inputs;   // a broadcast works in them
  Tensors outputs;  // of a reduction; undefined where another rank owns

 private:
  bool gets(const std::string& op, size_t tensor) const;
  int64_t valueOf(int64_t rank, int64_t tensor, int64_t element) const;

  const int modulus_;
};

}  // namespace dmuon::perf
