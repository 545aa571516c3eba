// Engine, updates and plan: pure functions on tensors.
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>

#include <dmuon/optim/adamw_update.h>
#include <dmuon/optim/all_finite.h>
#include <dmuon/optim/coefficients.h>
#include <dmuon/optim/muon_update.h>
#include <dmuon/optim/newton_schulz.h>
#include <dmuon/optim/ownership_plan.h>

#include "bindings.h"

namespace py = pybind11;

namespace dmuon::bindings {
namespace {

using namespace dmuon::optim;  // NOLINT: this file is about nothing else

using Triple = std::tuple<double, double, double>;

NewtonSchulzConfig configFromTriples(const std::vector<Triple>& triples,
                                     std::vector<int64_t> restarts) {
  std::vector<Coefficients> steps;
  steps.reserve(triples.size());
  for (const auto& [a, b, c] : triples) steps.push_back({a, b, c});
  return makeNewtonSchulzConfig(std::move(steps), std::move(restarts));
}

std::vector<Triple> triplesOf(const NewtonSchulzConfig& config) {
  std::vector<Triple> triples;
  for (const auto& s : config.steps) triples.emplace_back(s.a, s.b, s.c);
  return triples;
}

void registerEngine(py::module_& m) {
  py::class_<NewtonSchulzConfig>(m, "NewtonSchulzConfig")
      .def(py::init([](const std::string& coefficients, int64_t steps, const std::string& mode) {
             return makeNewtonSchulzConfig(coefficients, steps, mode);
           }),
           py::arg("coefficients"), py::arg("steps"), py::arg("mode"))
      .def(py::init(&configFromTriples), py::arg("steps"), py::arg("restarts"))
      .def_property_readonly("steps", &triplesOf)
      .def_readonly("restarts", &NewtonSchulzConfig::restarts)
      .def_readwrite("dtype", &NewtonSchulzConfig::dtype);
  py::class_<NewtonSchulzWorkspace>(m, "NewtonSchulzWorkspace").def(py::init<>());
  m.def("newton_schulz",
        py::overload_cast<const at::Tensor&, const NewtonSchulzConfig&>(&newtonSchulz),
        py::arg("g"), py::arg("config"), py::call_guard<py::gil_scoped_release>());
  m.def("newton_schulz_flops", &newtonSchulzFlops, py::arg("m"), py::arg("n"), py::arg("config"));
  m.def("coefficient_set_names", &coefficientSetNames);
}

// None, or (dimension, sizes).
using BlockPair = std::optional<std::pair<int64_t, std::vector<int64_t>>>;

Blocks blocksOf(const BlockPair& pair) {
  return pair ? Blocks{pair->first, pair->second} : Blocks{};
}

int64_t update(const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& gradients,
               const std::vector<at::Tensor>& momenta, const MuonHyper& hyper,
               const std::vector<at::Tensor>& second_moments, const std::vector<BlockPair>& blocks,
               const std::vector<std::pair<uint32_t, uint64_t>>& streams,
               NewtonSchulzWorkspace* workspace) {
  const size_t count = weights.size();
  const auto fits = [&](size_t size) { return size == 0 || size == count; };
  TORCH_CHECK(gradients.size() == count && momenta.size() == count && fits(second_moments.size()) &&
                  fits(blocks.size()) && fits(streams.size()),
              "dmuon: muon_update got ", count, " weights, ", gradients.size(), " gradients, ",
              momenta.size(), " momenta, ", second_moments.size(), " second moments, ",
              blocks.size(), " blocks and ", streams.size(), " random streams");
  std::vector<MuonParameter> parameters(count);
  for (size_t i = 0; i < count; ++i) {
    MuonParameter& p = parameters[i];
    p.weight = weights[i];
    p.gradient = gradients[i];
    p.momentum = momenta[i];
    if (!second_moments.empty()) p.second_moment = second_moments[i];
    if (!blocks.empty()) p.blocks = blocksOf(blocks[i]);
    if (!streams.empty()) std::tie(p.index, p.step) = streams[i];
  }
  return workspace ? muonUpdate(parameters, hyper, *workspace) : muonUpdate(parameters, hyper);
}

void registerUpdates(py::module_& m) {
  py::class_<MuonHyper>(m, "MuonHyper")
      .def(py::init([](double lr, double momentum, bool nesterov, double weight_decay,
                       const std::string& adjust_lr, const NewtonSchulzConfig& config,
                       const std::string& variant, double beta2, bool cautious, uint64_t seed) {
             MuonHyper hyper;
             hyper.lr = lr;
             hyper.momentum = momentum;
             hyper.nesterov = nesterov;
             hyper.weight_decay = weight_decay;
             hyper.adjust_lr = lrAdjustmentFromName(adjust_lr);
             hyper.newton_schulz = config;
             hyper.variant = variantFromName(variant);
             hyper.beta2 = beta2;
             hyper.cautious = cautious;
             hyper.seed = seed;
             checkMuonHyper(hyper);
             return hyper;
           }),
           py::arg("lr"), py::arg("momentum"), py::arg("nesterov"), py::arg("weight_decay"),
           py::arg("adjust_lr"), py::arg("newton_schulz"), py::arg("variant") = "none",
           py::arg("beta2") = 0.95, py::arg("cautious") = false, py::arg("seed") = 0);
  m.def(
      "check_blocks",
      [](const BlockPair& blocks, const std::vector<int64_t>& shape) {
        checkBlocks(blocksOf(blocks), shape);
      },
      py::arg("blocks"), py::arg("shape"));
  m.def(
      "second_moment_shape",
      [](const std::string& variant, const std::vector<int64_t>& shape, const BlockPair& blocks) {
        return secondMomentShape(variantFromName(variant), shape, blocksOf(blocks));
      },
      py::arg("variant"), py::arg("shape"), py::arg("blocks"));
  m.def(
      "round_stochastically",
      [](const at::Tensor& in, uint64_t seed, uint32_t parameter, uint64_t step) {
        at::Tensor out = at::empty(in.sizes(), in.options().dtype(at::kBFloat16));
        roundStochastically(in.detach(), out, {seed, parameter, step});
        return out;
      },
      py::arg("x"), py::arg("seed"), py::arg("parameter"), py::arg("step"));
  m.def(
      "lr_ratio",
      [](const std::string& name, int64_t rows, int64_t columns) {
        return lrRatio(lrAdjustmentFromName(name), rows, columns);
      },
      py::arg("adjust_lr"), py::arg("m"), py::arg("n"));
  m.def("all_finite", &allFinite, py::arg("tensors"), py::call_guard<py::gil_scoped_release>());
  m.def("muon_update", &update, py::arg("weights"), py::arg("gradients"), py::arg("momenta"),
        py::arg("hyper"), py::kw_only(), py::arg("second_moments") = std::vector<at::Tensor>(),
        py::arg("blocks") = std::vector<BlockPair>(),
        py::arg("streams") = std::vector<std::pair<uint32_t, uint64_t>>(),
        py::arg("workspace") = py::none(), py::call_guard<py::gil_scoped_release>());
  m.def(
      "adamw_update",
      [](const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& gradients,
         const std::vector<at::Tensor>& exp_avgs, const std::vector<at::Tensor>& exp_avg_sqs,
         const std::vector<at::Tensor>& steps, double lr, double beta1, double beta2, double eps,
         double weight_decay) {
        const AdamWHyper hyper{lr, beta1, beta2, eps, weight_decay};
        checkAdamWHyper(hyper);
        adamwUpdate(weights, gradients, exp_avgs, exp_avg_sqs, steps, hyper);
      },
      py::arg("weights"), py::arg("gradients"), py::arg("exp_avgs"), py::arg("exp_avg_sqs"),
      py::arg("steps"), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
      py::arg("eps"), py::arg("weight_decay"), py::call_guard<py::gil_scoped_release>());
}

void registerPlan(py::module_& m) {
  py::class_<PlanEntry>(m, "PlanEntry")
      .def_property_readonly("name", [](const PlanEntry& e) { return e.matrix.name; })
      .def_property_readonly("unit", [](const PlanEntry& e) { return e.matrix.unit; })
      .def_property_readonly("shape",
                             [](const PlanEntry& e) { return py::tuple(py::cast(e.matrix.shape)); })
      .def_property_readonly("bytes", [](const PlanEntry& e) { return e.matrix.bytes; })
      .def_readonly("cost", &PlanEntry::cost)
      .def_property_readonly(
          "owner", [](const PlanEntry& e) { return std::make_pair(e.replicate, e.shard); });
  py::class_<OwnershipPlan>(m, "OwnershipPlan")
      .def(py::init([](const std::vector<std::tuple<std::string, std::string, std::vector<int64_t>,
                                                    int64_t>>& matrices,
                       int64_t replicate_size, int64_t shard_size, const std::string& cost,
                       const std::map<std::string, BlockPair>& blocks) {
             std::vector<PlanMatrix> list;
             for (const auto& [name, unit, shape, bytes] : matrices) {
               list.push_back({name, unit, shape, bytes});
               const auto own = blocks.find(name);
               if (own == blocks.end() || !own->second) continue;
               std::tie(list.back().block_dim, list.back().block_sizes) = *own->second;
             }
             PlanOptions options;
             options.replicate_size = replicate_size;
             options.shard_size = shard_size;
             options.cost = cost;
             return OwnershipPlan(std::move(list), options);
           }),
           py::arg("matrices"), py::arg("replicate_size"), py::arg("shard_size"),
           py::arg("cost") = "measured", py::arg("blocks") = std::map<std::string, BlockPair>())
      .def_property_readonly("entries", &OwnershipPlan::entries)
      .def_property_readonly("mesh_shape",
                             [](const OwnershipPlan& p) {
                               return std::make_pair(p.options().replicate_size,
                                                     p.options().shard_size);
                             })
      .def(
          "owner",
          [](const OwnershipPlan& p, const std::string& name) {
            const auto& entry = p.at(name);
            return std::make_pair(entry.replicate, entry.shard);
          },
          py::arg("name"))
      .def_property_readonly("slot_costs", &OwnershipPlan::slotCosts)
      .def_property_readonly("slot_bytes", &OwnershipPlan::slotBytes)
      .def_property_readonly("imbalance", &OwnershipPlan::imbalance)
      .def_property_readonly("canonical_text", &OwnershipPlan::canonicalText)
      .def_property_readonly("hash", &OwnershipPlan::hash)
      .def("__len__", [](const OwnershipPlan& p) { return p.entries().size(); })
      .def("__str__", &OwnershipPlan::table)
      .def("__repr__", &OwnershipPlan::table);
}

}  // namespace

void registerOptim(py::module_& m) {
  registerEngine(m);
  registerUpdates(m);
  registerPlan(m);
}

}  // namespace dmuon::bindings
