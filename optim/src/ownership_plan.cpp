#include <dmuon/optim/ownership_plan.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <tuple>

#include "cost_model.h"

namespace dmuon::optim {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw std::invalid_argument("dmuon: ownership plan: " + what);
}

std::string shapeText(const std::vector<int64_t>& shape, const char* separator) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : separator) + std::to_string(size);
  return text;
}

// Keeps a name on its line and in its column.
std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '\\') {
      result += "\\\\";
    } else if (c == '\n') {
      result += "\\n";
    } else if (c == '\t') {
      result += "\\t";
    } else {
      result += c;
    }
  }
  return result;
}

void checkInputs(const std::vector<PlanMatrix>& matrices, const PlanOptions& options) {
  if (options.replicate_size < 1 || options.shard_size < 1) {
    fail("mesh sizes must be >= 1, not (" + std::to_string(options.replicate_size) + ", " +
         std::to_string(options.shard_size) + ")");
  }
  std::set<std::string> names;
  for (const PlanMatrix& matrix : matrices) {
    if (!names.insert(matrix.name).second) fail("the name '" + matrix.name + "' appears twice");
    if (matrix.bytes < 0) {
      fail("'" + matrix.name + "' has " + std::to_string(matrix.bytes) + " bytes");
    }
  }
}

// All the parameter's matrices together.
double parameterCost(const PlanMatrix& matrix, const std::string& cost_model) {
  if (matrix.block_sizes.empty()) return matrixCost(matrix.shape, cost_model);
  const auto dims = static_cast<int64_t>(matrix.shape.size());
  const int64_t dim = matrix.block_dim < 0 ? matrix.block_dim + dims : matrix.block_dim;
  const std::string blocks = "blocks [" + shapeText(matrix.block_sizes, ", ") +
                             "] along dimension " + std::to_string(matrix.block_dim) + " of '" +
                             matrix.name + "' of shape [" + shapeText(matrix.shape, ", ") + "]";
  if (dim < 0 || dim >= dims) fail(blocks + ": there is no such dimension");
  std::vector<int64_t> shape = matrix.shape;
  double cost = 0;
  int64_t sum = 0;
  for (const int64_t size : matrix.block_sizes) {
    shape[static_cast<size_t>(dim)] = size;
    sum += size;
    cost += matrixCost(shape, cost_model);
  }
  if (sum != matrix.shape[static_cast<size_t>(dim)]) {
    fail(blocks + " add up to " + std::to_string(sum));
  }
  return cost;
}

std::string blocksText(const PlanMatrix& matrix) {
  if (matrix.block_sizes.empty()) return "";
  return "\tblocks " + std::to_string(matrix.block_dim) + ":" + shapeText(matrix.block_sizes, "+");
}

// The state of the greedy assignment: what each slot has, and how full each unit is where.
class Assignment {
 public:
  Assignment(int64_t replicate_size, int64_t shard_size)
      : shards_(static_cast<size_t>(shard_size)),
        costs_(static_cast<size_t>(replicate_size * shard_size)),
        bytes_(costs_.size()) {}

  void countUnit(const std::string& name) {
    Unit& unit = units_[name];
    ++unit.matrices;
    unit.in_column.resize(static_cast<size_t>(shards_));
    unit.in_slot.resize(costs_.size());
  }

  // Puts the matrix where its unit isn't crowded and the least cost is; returns the slot.
  int64_t place(const PlanMatrix& matrix, double cost) {
    Unit& unit = units_[matrix.unit];
    const size_t slots = costs_.size();
    const size_t column_limit = (unit.matrices + shards_ - 1) / shards_;
    const size_t slot_limit = (unit.matrices + slots - 1) / slots;
    size_t best = slots;
    for (size_t slot = 0; slot < slots; ++slot) {
      if (unit.in_column[slot % shards_] >= column_limit || unit.in_slot[slot] >= slot_limit) {
        continue;
      }
      if (best == slots || load(slot) < load(best)) best = slot;
    }
    // Some column is below its limit, and slot_limit * R >= column_limit, so there is a slot.
    ++unit.in_column[best % shards_];
    ++unit.in_slot[best];
    costs_[best] += cost;
    bytes_[best] += matrix.bytes;
    return static_cast<int64_t>(best);
  }

 private:
  struct Unit {
    size_t matrices = 0;
    std::vector<size_t> in_column, in_slot;
  };

  std::pair<double, int64_t> load(size_t slot) const { return {costs_[slot], bytes_[slot]}; }

  size_t shards_;
  std::vector<double> costs_;
  std::vector<int64_t> bytes_;
  std::map<std::string, Unit> units_;
};

std::string ownerText(const PlanEntry& entry) {
  std::ostringstream out;
  out << "(" << entry.replicate << ", " << entry.shard << ")";
  return out.str();
}

}  // namespace

double matrixCost(const std::vector<int64_t>& shape, const std::string& cost_model) {
  if (shape.size() < 2) {
    fail("a matrix needs at least 2 dimensions, not [" + shapeText(shape, ", ") + "]");
  }
  for (const int64_t size : shape) {
    if (size < 0) fail("a shape has a negative size: [" + shapeText(shape, ", ") + "]");
  }
  int64_t batch = 1, m = shape[0], n = 1;
  if (shape.size() == 3) {
    batch = shape[0], m = shape[1], n = shape[2];
  } else {
    for (size_t i = 1; i < shape.size(); ++i) n *= shape[i];
  }
  if (batch * m * n == 0) return 0;
  const auto s = static_cast<double>(std::min(m, n)), l = static_cast<double>(std::max(m, n));
  if (cost_model == "flops") return static_cast<double>(batch) * cheaperFlops(s, l);
  // Whole nanoseconds: sums are then exact and the same in every order.
  if (cost_model == "measured") {
    return static_cast<double>(batch) * std::round(measuredNanoseconds(s, l));
  }
  fail("unknown cost model '" + cost_model + "', known are 'measured' and 'flops'");
}

OwnershipPlan::OwnershipPlan(std::vector<PlanMatrix> matrices, PlanOptions options)
    : options_(std::move(options)) {
  checkInputs(matrices, options_);
  matrixCost({1, 1}, options_.cost);  // an unknown model is an error for an empty plan too
  Assignment assignment(options_.replicate_size, options_.shard_size);
  for (PlanMatrix& matrix : matrices) {
    assignment.countUnit(matrix.unit);
    const double cost = parameterCost(matrix, options_.cost);
    entries_.push_back({std::move(matrix), cost, 0, 0});
  }
  std::sort(entries_.begin(), entries_.end(), [](const PlanEntry& x, const PlanEntry& y) {
    return std::tie(y.cost, y.matrix.bytes, x.matrix.name) <
           std::tie(x.cost, x.matrix.bytes, y.matrix.name);
  });
  for (PlanEntry& entry : entries_) {
    const int64_t slot = assignment.place(entry.matrix, entry.cost);
    entry.replicate = slot / options_.shard_size;
    entry.shard = slot % options_.shard_size;
  }
  std::sort(entries_.begin(), entries_.end(),
            [](const PlanEntry& x, const PlanEntry& y) { return x.matrix.name < y.matrix.name; });
}

const PlanEntry& OwnershipPlan::at(const std::string& name) const {
  const auto found = std::lower_bound(
      entries_.begin(), entries_.end(), name,
      [](const PlanEntry& entry, const std::string& wanted) { return entry.matrix.name < wanted; });
  if (found == entries_.end() || found->matrix.name != name) {
    throw std::out_of_range("dmuon: ownership plan: no matrix is named '" + name + "' among " +
                            std::to_string(entries_.size()));
  }
  return *found;
}

std::vector<double> OwnershipPlan::slotCosts() const {
  std::vector<double> costs(static_cast<size_t>(options_.replicate_size * options_.shard_size));
  for (const PlanEntry& entry : entries_) {
    costs[static_cast<size_t>(entry.replicate * options_.shard_size + entry.shard)] += entry.cost;
  }
  return costs;
}

std::vector<int64_t> OwnershipPlan::slotBytes() const {
  std::vector<int64_t> bytes(static_cast<size_t>(options_.replicate_size * options_.shard_size));
  for (const PlanEntry& entry : entries_) {
    bytes[static_cast<size_t>(entry.replicate * options_.shard_size + entry.shard)] +=
        entry.matrix.bytes;
  }
  return bytes;
}

double OwnershipPlan::imbalance() const {
  const std::vector<double> costs = slotCosts();
  double total = 0;
  for (const double cost : costs) total += cost;
  if (total <= 0) return 1;
  return *std::max_element(costs.begin(), costs.end()) * static_cast<double>(costs.size()) / total;
}

std::string OwnershipPlan::canonicalText() const {
  std::ostringstream out;
  out << "dmuon ownership plan 1\treplicate " << options_.replicate_size << "\tshard "
      << options_.shard_size << "\tcost " << options_.cost << "\n";
  for (const PlanEntry& entry : entries_) {
    out << escaped(entry.matrix.name) << "\tunit " << escaped(entry.matrix.unit) << "\tshape "
        << shapeText(entry.matrix.shape, "x") << "\tbytes " << entry.matrix.bytes
        << blocksText(entry.matrix) << "\towner " << ownerText(entry) << "\n";
  }
  return out.str();
}

uint64_t OwnershipPlan::hash() const {
  uint64_t hash = 14695981039346656037ULL;  // FNV-1a, 64 bits
  for (const char c : canonicalText()) {
    hash ^= static_cast<unsigned char>(c);
    hash *= 1099511628211ULL;
  }
  return hash;
}

std::string OwnershipPlan::table() const {
  std::vector<std::vector<std::string>> rows = {{"name", "shape", "unit", "owner", "cost"}};
  const std::vector<double> costs = slotCosts();
  const std::vector<int64_t> bytes = slotBytes();
  double total = 0;
  for (const double cost : costs) total += cost;
  const auto percent = [total](double cost) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.1f%%", total > 0 ? 100 * cost / total : 0.0);
    return std::string(text);
  };
  for (const PlanEntry& entry : entries_) {
    rows.push_back({entry.matrix.name, shapeText(entry.matrix.shape, "x"), entry.matrix.unit,
                    ownerText(entry), percent(entry.cost)});
  }
  std::vector<size_t> widths(rows[0].size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::ostringstream out;
  for (const auto& row : rows) {
    for (size_t i = 0; i + 1 < row.size(); ++i) {
      out << row[i] << std::string(widths[i] - row[i].size() + 2, ' ');
    }
    out << row.back() << "\n";
  }
  for (size_t slot = 0; slot < costs.size(); ++slot) {
    const auto index = static_cast<int64_t>(slot);
    out << "slot (" << index / options_.shard_size << ", " << index % options_.shard_size
        << "): " << percent(costs[slot]) << " of the cost, " << bytes[slot] << " bytes\n";
  }
  char text[64];
  std::snprintf(text, sizeof(text), "imbalance (max / mean): %.3f\n", imbalance());
  out << text;
  return out.str();
}

}  // namespace dmuon::optim
