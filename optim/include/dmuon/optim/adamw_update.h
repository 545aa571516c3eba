// One AdamW step (Loshchilov & Hutter, decoupled weight decay) on local tensors by ATen's fused
// kernel, one call per group of equal device and dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace dmuon::optim {

struct AdamWHyper {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.0;
};

// Throws c10::Error naming the option and its value if one is out of range.
void checkAdamWHyper(const AdamWHyper& hyper);

// steps[i]: 0-dim fp32 tensor with the number of steps taken so far; incremented here. Empty
// tensors only have their step incremented. Updates weights, exp_avgs and exp_avg_sqs in place.
void adamwUpdate(const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& gradients,
                 const std::vector<at::Tensor>& exp_avgs,
                 const std::vector<at::Tensor>& exp_avg_sqs, const std::vector<at::Tensor>& steps,
                 const AdamWHyper& hyper);

}  // namespace dmuon::optim
