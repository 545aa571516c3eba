#include <dmuon/optim/muon.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <string>
#include <utility>

namespace dmuon::optim {
namespace {

const MuonOptions& muonOptions(const torch::optim::OptimizerParamGroup& group) {
  return static_cast<const MuonOptions&>(group.options());
}

MuonHyper hyperOf(const MuonOptions& options) {
  MuonHyper hyper;
  hyper.lr = options.lr();
  hyper.momentum = options.momentum();
  hyper.nesterov = options.nesterov();
  hyper.weight_decay = options.weight_decay();
  hyper.adjust_lr = lrAdjustmentFromName(options.adjust_lr());
  hyper.newton_schulz =
      makeNewtonSchulzConfig(options.ns_coefficients(), options.ns_steps(), options.ns_mode());
  hyper.variant = variantFromName(options.variant());
  hyper.beta2 = options.beta2();
  hyper.cautious = options.cautious();
  hyper.seed = static_cast<uint64_t>(options.seed());
  hyper.blocks = Blocks{options.block_dim(), options.block_sizes()};
  return hyper;
}

at::ScalarType momentumType(const MuonOptions& options, const torch::Tensor& weight) {
  if (options.momentum_dtype() == "bfloat16") return at::kBFloat16;
  TORCH_CHECK_VALUE(options.momentum_dtype() == "float32", "dmuon: Muon: momentum_dtype must be ",
                    "'float32' or 'bfloat16', not '", options.momentum_dtype(), "'");
  return weight.scalar_type();
}

bool isHalf(const torch::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

// Checks the groups, which may have changed since the last step, and returns what each asks for.
std::vector<MuonHyper> checkGroups(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  std::vector<MuonHyper> hypers;
  for (size_t i = 0; i < groups.size(); ++i) {
    hypers.push_back(hyperOf(muonOptions(groups[i])));
    checkMuonHyper(hypers.back());
    for (const torch::Tensor& parameter : groups[i].params()) {
      TORCH_CHECK_VALUE(parameter.dim() >= 2 && at::isFloatingType(parameter.scalar_type()),
                        "dmuon: Muon: parameter group ", i, " has a parameter of shape ",
                        parameter.sizes(), " and type ", parameter.scalar_type(),
                        "; floating types with at least 2 dimensions are possible, give the rest "
                        "to AdamW");
      momentumType(muonOptions(groups[i]), parameter);
      checkBlocks(hypers.back().blocks, parameter.sizes());
    }
  }
  return hypers;
}

torch::Tensor denseGradient(const torch::Tensor& parameter) {
  const torch::Tensor& grad = parameter.grad();
  if (!grad.defined()) return {};
  return (grad.is_sparse() ? grad.to_dense() : grad).detach();
}

}  // namespace

// A parameter that requires a gradient, in one step.
struct Muon::Item {
  torch::Tensor parameter;
  torch::Tensor gradient;  // local at first, then the mean on the owner; undefined if there is none
  size_t group = 0;
  std::string name;
  uint32_t index = 0;  // over all groups
  int64_t owner = 0;
  bool takes_part = false;  // had a gradient on some rank
};

MuonOptions::MuonOptions(double lr) : lr_(lr) {}
double MuonOptions::get_lr() const { return lr(); }
void MuonOptions::set_lr(double new_lr) { lr(new_lr); }

void MuonOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(nesterov);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(ns_steps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(ns_coefficients);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(ns_mode);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(adjust_lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(block_dim);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(block_sizes);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(variant);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(beta2);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(cautious);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum_dtype);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(seed);
}

void MuonOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, momentum);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, nesterov);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, ns_steps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(std::string, ns_coefficients);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(std::string, ns_mode);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(std::string, adjust_lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, block_dim);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(std::vector<int64_t>, block_sizes);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(std::string, variant);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, beta2);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, cautious);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(std::string, momentum_dtype);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, seed);
}

void MuonParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum_buffer);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(master);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(second_momentum_buffer);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
}

void MuonParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, momentum_buffer);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, master);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, second_momentum_buffer);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
}

Muon::Muon(std::vector<torch::optim::OptimizerParamGroup> groups, MuonOptions defaults,
           std::shared_ptr<OwnerCollectives> group)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>{},
                std::make_unique<MuonOptions>(std::move(defaults))),
      group_(std::move(group)) {
  for (const auto& param_group : groups) add_param_group(param_group);
  checkGroups(param_groups_);
}

Muon::Muon(std::vector<torch::Tensor> parameters, MuonOptions defaults,
           std::shared_ptr<OwnerCollectives> group)
    : Muon(std::vector<torch::optim::OptimizerParamGroup>{std::move(parameters)},
           std::move(defaults), std::move(group)) {}

void Muon::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  Optimizer::add_param_group(group);
  if (group.has_options()) param_groups_.back().set_options(group.options().clone());
}

torch::Tensor Muon::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  const std::vector<MuonHyper> hypers = checkGroups(param_groups_);
  std::vector<Item> all = items();
  if (group_) reduceGradients(all);
  update(all, hypers);
  if (group_) broadcastParameters(all);
  return loss;
}

std::vector<Muon::Item> Muon::items() {
  std::vector<Item> result;
  uint32_t index = 0;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const std::vector<torch::Tensor>& parameters = param_groups_[g].params();
    for (size_t i = 0; i < parameters.size(); ++i, ++index) {
      if (!parameters[i].requires_grad()) continue;
      Item item;
      item.index = index;
      item.parameter = parameters[i];
      item.gradient = denseGradient(parameters[i]);
      item.group = g;
      item.name = std::to_string(g) + "." + std::to_string(i);
      item.takes_part = item.gradient.defined();
      result.push_back(std::move(item));
    }
  }
  return result;
}

OwnershipPlan Muon::plan() const {
  std::vector<PlanMatrix> matrices;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const std::vector<torch::Tensor>& parameters = param_groups_[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const std::string name = std::to_string(g) + "." + std::to_string(i);
      // All move together, so nothing is to be spread but the cost: every matrix is its own unit.
      const MuonOptions& own = muonOptions(param_groups_[g]);
      matrices.push_back({name, name, parameters[i].sizes().vec(),
                          static_cast<int64_t>(parameters[i].nbytes()), own.block_dim(),
                          own.block_sizes()});
    }
  }
  PlanOptions options;
  options.shard_size = group_ ? group_->size() : 1;
  return OwnershipPlan(std::move(matrices), std::move(options));
}

void Muon::assignOwners(std::vector<Item>& items) const {
  const OwnershipPlan owners = plan();
  for (Item& item : items) item.owner = owners.at(item.name).shard;
}

void Muon::reduceGradients(std::vector<Item>& items) {
  assignOwners(items);
  std::vector<at::Tensor> inputs, outputs;
  std::vector<int64_t> owners;
  OwnerOptions options;
  options.label = "Muon::step";
  options.divisor = group_->size();
  for (const Item& item : items) {
    const torch::Tensor& parameter = item.parameter;
    inputs.push_back(item.takes_part ? item.gradient.to(parameter.scalar_type()).contiguous()
                                     : at::zeros(parameter.sizes(), parameter.options()));
    const auto wide = isHalf(parameter) ? at::kFloat : parameter.scalar_type();
    outputs.push_back(item.owner == group_->rank()
                          ? at::empty(parameter.sizes(), parameter.options().dtype(wide))
                          : at::Tensor());
    owners.push_back(item.owner);
    options.flags.push_back(item.takes_part ? 1 : 0);
  }
  const OwnerWorkPtr work = group_->reduceToOwners(inputs, outputs, owners, options);
  work->wait();
  const std::vector<uint8_t> took_part = work->flags();
  for (size_t i = 0; i < items.size(); ++i) {
    items[i].takes_part = took_part[i] != 0;
    items[i].gradient = outputs[i];
  }
}

namespace {

// The state that a parameter needs under these options; what it has already is kept.
MuonParamState& prepareState(std::unique_ptr<torch::optim::OptimizerParamState>& slot,
                             const torch::Tensor& parameter, const MuonOptions& options) {
  const torch::Tensor plain = parameter.detach();
  if (!slot) {
    auto fresh = std::make_unique<MuonParamState>();
    if (isHalf(plain)) fresh->master(plain.to(at::kFloat));
    slot = std::move(fresh);
  }
  auto& state = static_cast<MuonParamState&>(*slot);
  const torch::Tensor weight = state.master().defined() ? state.master() : plain;
  const auto dtype = momentumType(options, weight);
  if (!state.momentum_buffer().defined()) {
    state.momentum_buffer(at::zeros_like(weight, weight.options().dtype(dtype)));
  } else if (state.momentum_buffer().scalar_type() != dtype) {
    state.momentum_buffer(state.momentum_buffer().to(dtype));
  }
  const auto variant = variantFromName(options.variant());
  const Blocks blocks{options.block_dim(), options.block_sizes()};
  if (variant != MuonVariant::kNone && !state.second_momentum_buffer().defined()) {
    state.second_momentum_buffer(
        at::zeros(secondMomentShape(variant, plain.sizes(), blocks), weight.options()));
  }
  return state;
}

}  // namespace

void Muon::update(const std::vector<Item>& items, const std::vector<MuonHyper>& hypers) {
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    std::vector<MuonParameter> parameters;
    std::vector<at::Tensor> halves, masters;
    for (const Item& item : items) {
      const bool mine = !group_ || item.owner == group_->rank();
      if (item.group != g || !item.takes_part || !mine) continue;
      auto& state = prepareState(state_[item.parameter.unsafeGetTensorImpl()], item.parameter,
                                 muonOptions(param_groups_[g]));
      if (state.master().defined()) {
        halves.push_back(item.parameter.detach());
        masters.push_back(state.master());
      }
      MuonParameter p;
      p.weight = state.master().defined() ? state.master() : item.parameter.detach();
      p.gradient = item.gradient;
      p.momentum = state.momentum_buffer();
      p.second_moment = state.second_momentum_buffer();
      p.index = item.index;
      if (p.momentum.scalar_type() == at::kBFloat16) state.step(state.step() + 1);
      p.step = static_cast<uint64_t>(state.step());
      parameters.push_back(std::move(p));
    }
    muonUpdate(parameters, hypers[g], workspace_);
    for (size_t i = 0; i < halves.size(); ++i) halves[i].copy_(masters[i]);
  }
}

void Muon::broadcastParameters(const std::vector<Item>& items) {
  std::vector<at::Tensor> targets, tensors;
  std::vector<int64_t> owners;
  for (const Item& item : items) {
    if (!item.takes_part) continue;
    targets.push_back(item.parameter.detach());
    tensors.push_back(targets.back().contiguous());  // itself, unless it is strided
    owners.push_back(item.owner);
  }
  if (tensors.empty()) return;  // on all ranks alike: they agreed on who takes part
  OwnerOptions options;
  options.label = "Muon::step";
  group_->broadcastFromOwners(tensors, owners, options)->wait();
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].is_same(targets[i])) targets[i].copy_(tensors[i]);
  }
}

void Muon::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<MuonParamState, MuonOptions>(archive, *this);
  archive.write("dmuon_rank", c10::IValue(int64_t{group_ ? group_->rank() : 0}));
  archive.write("dmuon_plan", c10::IValue(plan().canonicalText()));
}

void Muon::load(torch::serialize::InputArchive& archive) {
  c10::IValue saved_rank, saved_plan;
  archive.read("dmuon_rank", saved_rank);
  archive.read("dmuon_plan", saved_plan);
  const int64_t rank = group_ ? group_->rank() : 0;
  const std::string text = plan().canonicalText();
  TORCH_CHECK(saved_rank.toInt() == rank && saved_plan.toStringRef() == text,
              "dmuon: Muon::load on rank ", rank, ": the archive holds the state that rank ",
              saved_rank.toInt(), " owned under the plan\n", saved_plan.toStringRef(),
              "which isn't this rank's part of the plan\n", text);
  state_.clear();  // what the archive lacks had no state when it was saved
  torch::optim::serialize<MuonParamState, MuonOptions>(archive, *this);
}

}  // namespace dmuon::optim
