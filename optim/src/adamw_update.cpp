#include <dmuon/optim/adamw_update.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adamw.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace dmuon::optim {
namespace {

void checkTensors(const at::Tensor& weight, const at::Tensor& gradient, const at::Tensor& exp_avg,
                  const at::Tensor& exp_avg_sq, const at::Tensor& step, size_t index) {
  TORCH_CHECK(
      at::isFloatingType(weight.scalar_type()) && weight.scalar_type() == exp_avg.scalar_type() &&
          weight.scalar_type() == exp_avg_sq.scalar_type(),
      "dmuon: adamwUpdate: weight and averages ", index, " must have one floating dtype, not ",
      weight.scalar_type(), ", ", exp_avg.scalar_type(), " and ", exp_avg_sq.scalar_type());
  TORCH_CHECK(weight.sizes() == gradient.sizes() && weight.sizes() == exp_avg.sizes() &&
                  weight.sizes() == exp_avg_sq.sizes(),
              "dmuon: adamwUpdate: weight, gradient and averages ", index, " have shapes ",
              weight.sizes(), ", ", gradient.sizes(), ", ", exp_avg.sizes(), " and ",
              exp_avg_sq.sizes());
  TORCH_CHECK(weight.device() == gradient.device() && weight.device() == exp_avg.device() &&
                  weight.device() == exp_avg_sq.device(),
              "dmuon: adamwUpdate: weight, gradient and averages ", index, " are on ",
              weight.device(), ", ", gradient.device(), ", ", exp_avg.device(), " and ",
              exp_avg_sq.device());
  TORCH_CHECK(step.dim() == 0 && step.scalar_type() == at::kFloat, "dmuon: adamwUpdate: step ",
              index, " must be a 0-dim fp32 tensor, not ", step.sizes(), " of ",
              step.scalar_type());
}

// The kernel walks all four tensors by address. What isn't laid out in plain order is updated in a
// copy and written back.
struct Group {
  std::vector<at::Tensor> weights, gradients, exp_avgs, exp_avg_sqs, steps;
  std::vector<std::pair<at::Tensor, at::Tensor>> write_back;  // (strided original, plain copy)

  at::Tensor plain(const at::Tensor& tensor) {
    if (tensor.is_contiguous()) return tensor.detach();
    write_back.emplace_back(tensor.detach(), tensor.detach().contiguous());
    return write_back.back().second;
  }
};

}  // namespace

void checkAdamWHyper(const AdamWHyper& hyper) {
  TORCH_CHECK_VALUE(std::isfinite(hyper.lr) && hyper.lr >= 0,
                    "dmuon: AdamW: lr must be finite and >= 0, not ", hyper.lr);
  TORCH_CHECK_VALUE(hyper.beta1 >= 0 && hyper.beta1 < 1,
                    "dmuon: AdamW: beta1 must lie in [0, 1), not ", hyper.beta1);
  TORCH_CHECK_VALUE(hyper.beta2 >= 0 && hyper.beta2 < 1,
                    "dmuon: AdamW: beta2 must lie in [0, 1), not ", hyper.beta2);
  TORCH_CHECK_VALUE(std::isfinite(hyper.eps) && hyper.eps >= 0,
                    "dmuon: AdamW: eps must be finite and >= 0, not ", hyper.eps);
  TORCH_CHECK_VALUE(std::isfinite(hyper.weight_decay) && hyper.weight_decay >= 0,
                    "dmuon: AdamW: weight_decay must be finite and >= 0, not ", hyper.weight_decay);
}

void adamwUpdate(const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& gradients,
                 const std::vector<at::Tensor>& exp_avgs,
                 const std::vector<at::Tensor>& exp_avg_sqs, const std::vector<at::Tensor>& steps,
                 const AdamWHyper& hyper) {
  checkAdamWHyper(hyper);
  TORCH_CHECK(weights.size() == gradients.size() && weights.size() == exp_avgs.size() &&
                  weights.size() == exp_avg_sqs.size() && weights.size() == steps.size(),
              "dmuon: adamwUpdate got ", weights.size(), " weights, ", gradients.size(),
              " gradients, ", exp_avgs.size(), " and ", exp_avg_sqs.size(), " averages and ",
              steps.size(), " steps");
  for (size_t i = 0; i < weights.size(); ++i) {
    checkTensors(weights[i], gradients[i], exp_avgs[i], exp_avg_sqs[i], steps[i], i);
  }
  const at::NoGradGuard no_grad;
  std::map<std::pair<std::string, at::ScalarType>, Group> groups;
  for (size_t i = 0; i < weights.size(); ++i) {
    steps[i].add_(1);
    if (weights[i].numel() == 0) continue;
    Group& group = groups[{weights[i].device().str(), weights[i].scalar_type()}];
    group.weights.push_back(group.plain(weights[i]));
    group.gradients.push_back(gradients[i].detach().to(weights[i].scalar_type()).contiguous());
    group.exp_avgs.push_back(group.plain(exp_avgs[i]));
    group.exp_avg_sqs.push_back(group.plain(exp_avg_sqs[i]));
    group.steps.push_back(steps[i]);
  }
  for (auto& [key, group] : groups) {
    at::_fused_adamw_(group.weights, group.gradients, group.exp_avgs, group.exp_avg_sqs,
                      /*max_exp_avg_sqs=*/{}, group.steps, hyper.lr, hyper.beta1, hyper.beta2,
                      hyper.weight_decay, hyper.eps, /*amsgrad=*/false, /*maximize=*/false,
                      /*grad_scale=*/std::nullopt, /*found_inf=*/std::nullopt);
    for (auto& [original, copy] : group.write_back) original.copy_(copy);
  }
}

}  // namespace dmuon::optim
