#include "perf_data.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>

namespace dmuon::perf {
namespace {

constexpr int64_t kPoison = -1;  // no sum and no value

void store(const at::Tensor& tensor, const std::vector<double>& values) {
  const at::Tensor wide = at::empty({static_cast<int64_t>(values.size())}, at::kDouble);
  std::copy(values.begin(), values.end(), wide.mutable_data_ptr<double>());
  tensor.copy_(wide);
}

}  // namespace

at::ScalarType typeOf(const std::string& name) {
  if (name == "half") return at::kHalf;
  if (name == "bfloat16") return at::kBFloat16;
  return name == "double" ? at::kDouble : at::kFloat;
}

std::vector<int64_t> ownersOf(const std::string& pattern, int tensors, int size) {
  std::vector<int64_t> owners;
  for (int i = 0; i < tensors; ++i) {
    if (pattern == "spread") {
      owners.push_back(i % size);
    } else {
      owners.push_back(pattern == "one" || i % 2 == 0 ? 0 : i / 2 % size);
    }
  }
  return owners;
}

// Sums are at most 256 where there are no more ranks than that: exact in every dtype.
Data::Data(const Options& o, const std::string& pattern, int rank, int size, int64_t bytes)
    : rank(rank),
      size(size),
      owners(ownersOf(pattern, o.tensors, size)),
      modulus_(std::clamp(256 / size, 1, 7)) {
  const auto type = typeOf(o.dtype);
  const int64_t numel = bytes / static_cast<int64_t>(c10::elementSize(type));
  for (int64_t owner : owners) {
    inputs.push_back(at::full({numel}, kPoison, type));
    outputs.push_back(owner == rank ? at::full({numel}, kPoison, type) : at::Tensor());
  }
}

int64_t Data::valueOf(int64_t rank, int64_t tensor, int64_t element) const {
  return (element + 2 * tensor + 3 * rank) % modulus_ + 1;
}

bool Data::gets(const std::string& op, size_t tensor) const {
  return op == "broadcast" || owners[tensor] == rank;
}

void Data::fill(const std::string& op) {
  std::vector<double> values(inputs[0].numel());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto tensor = static_cast<int64_t>(i);
    if (outputs[i].defined()) outputs[i].fill_(kPoison);
    if (op == "broadcast" && owners[i] != rank) {
      inputs[i].fill_(kPoison);
      continue;
    }
    for (size_t e = 0; e < values.size(); ++e) {
      values[e] = static_cast<double>(valueOf(rank, tensor, static_cast<int64_t>(e)));
    }
    store(inputs[i], values);
  }
}

int64_t Data::wrong(const std::string& op, const Tensors& results) const {
  int64_t wrong = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    if (!gets(op, i)) continue;
    std::vector<double> expected(modulus_);  // repeats with this period
    for (int64_t e = 0; e < modulus_; ++e) {
      const auto tensor = static_cast<int64_t>(i);
      if (op == "broadcast") {
        expected[e] = static_cast<double>(valueOf(owners[i], tensor, e));
      } else {
        for (int r = 0; r < size; ++r) expected[e] += static_cast<double>(valueOf(r, tensor, e));
      }
    }
    const at::Tensor wide = results[i].to(at::kDouble);
    const auto* got = wide.const_data_ptr<double>();
    for (int64_t e = 0; e < wide.numel(); ++e) wrong += got[e] != expected[e % modulus_];
  }
  return wrong;
}

void Data::spoil(const std::string& op, const Tensors& results) const {
  for (size_t i = 0; i < results.size(); ++i) {
    if (!gets(op, i) || results[i].numel() == 0) continue;
    results[i].view(-1).slice(0, results[i].numel() - 1).neg_();
    return;
  }
}

int64_t Data::tensorBytes() const { return inputs[0].numel() * inputs[0].element_size(); }

int64_t Data::receivedBytes(const std::string& op) const {
  const int64_t own = std::count(owners.begin(), owners.end(), rank);
  const int64_t all = static_cast<int64_t>(owners.size());
  return tensorBytes() * (op == "reduce" ? own * (size - 1) : all - own);
}

double Data::largestShare() const {
  int64_t most = 0;
  for (int r = 0; r < size; ++r) most = std::max(most, std::count(owners.begin(), owners.end(), r));
  return static_cast<double>(most) / static_cast<double>(owners.size());
}

}  // namespace dmuon::perf
