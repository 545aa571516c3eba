#include "orthogonalize_all.h"

#include <ATen/ops/cat.h>

#include <map>
#include <utility>

namespace dmuon::optim {

void orthogonalizeAll(const std::vector<at::Tensor>& pieces, const NewtonSchulzConfig& config,
                      NewtonSchulzWorkspace& workspace,
                      const std::function<void(size_t, const at::Tensor&)>& use) {
  if (pieces.empty()) return;
  if (pieces[0].is_cpu()) {
    for (size_t k = 0; k < pieces.size(); ++k) use(k, newtonSchulz(pieces[k], config, workspace));
    return;
  }
  const auto results = orthogonalizeInBatches(pieces, config);
  for (size_t k = 0; k < results.size(); ++k) use(k, results[k]);
}

std::vector<at::Tensor> orthogonalizeInBatches(const std::vector<at::Tensor>& pieces,
                                               const NewtonSchulzConfig& config) {
  std::vector<at::Tensor> results(pieces.size());
  std::map<std::pair<int64_t, int64_t>, std::vector<size_t>> equal;
  for (size_t i = 0; i < pieces.size(); ++i) {
    equal[{pieces[i].size(-2), pieces[i].size(-1)}].push_back(i);
  }
  for (const auto& [shape, indices] : equal) {
    if (indices.size() == 1) {
      results[indices[0]] = newtonSchulz(pieces[indices[0]], config);
      continue;
    }
    std::vector<at::Tensor> stacks;
    std::vector<int64_t> counts;
    for (const size_t i : indices) {
      stacks.push_back(pieces[i].dim() == 3 ? pieces[i] : pieces[i].unsqueeze(0));
      counts.push_back(stacks.back().size(0));
    }
    const auto parts = newtonSchulz(at::cat(stacks), config).split_with_sizes(counts);
    for (size_t k = 0; k < indices.size(); ++k) {
      const size_t i = indices[k];
      results[i] = pieces[i].dim() == 3 ? parts[k] : parts[k].squeeze(0);
    }
  }
  return results;
}

}  // namespace dmuon::optim
