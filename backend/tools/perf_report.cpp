#include "perf_report.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace dmuon::perf {
namespace {

using Rows = std::vector<Row>;

const Row* find(const Rows& rows, const Row& like, const std::string& way,
                const std::string& owners) {
  for (const Row& other : rows) {
    if (other.op == like.op && other.tensor_bytes == like.tensor_bytes && other.way == way &&
        other.owners == owners) {
      return &other;
    }
  }
  return nullptr;
}

// The median over the rounds of this row's time by another's; 0 without another.
double ratio(const Timing& time, const Row* other) {
  if (other == nullptr) return 0;
  std::vector<double> ratios;
  for (size_t i = 0; i < time.rounds.size(); ++i) {
    ratios.push_back(time.rounds[i] / other->time.rounds[i]);
  }
  return median(ratios);
}

double speedup(const Row& row, const Rows& rows) {
  const double part = ratio(row.time, find(rows, row, "baseline", row.owners));
  return part > 0 ? 1 / part : 0;
}

double share(const Row& row) {
  std::vector<double> shares;
  for (size_t i = 0; i < row.time.rounds.size(); ++i) {
    shares.push_back(row.memcpy.rounds[i] / row.time.rounds[i]);
  }
  return median(shares);
}

double slowdown(const Row& row, const Rows& rows) {
  return ratio(row.time, find(rows, row, row.way, "spread"));
}

// What `slowdown` would be if the busiest owner alone decided.
double expectedSlowdown(const Row& row, const Rows& rows) {
  return row.largest_share / find(rows, row, row.way, "spread")->largest_share;
}

long long whole(int64_t value) { return static_cast<long long>(value); }

void printStart(const Row& row) {
  std::printf("%-10s %-7s %-9s %12lld", row.op.c_str(), row.owners.c_str(), row.way.c_str(),
              whole(row.tensor_bytes));
}

void printTimes(const Rows& rows) {
  std::printf("%-10s %-7s %-9s %12s %12s %8s %6s %8s %14s %7s\n", "op", "owners", "transport",
              "bytes/tensor", "us", "GB/s", "share", "speedup", "moved", "check");
  for (const Row& row : rows) {
    const double seconds = median(row.time.rounds);
    const double faster = speedup(row, rows);
    printStart(row);
    std::printf(" %12.1f %8.2f %6.2f", seconds * 1e6,
                static_cast<double>(row.formula) / seconds / 1e9, share(row));
    faster > 0 ? std::printf(" %7.1fx", faster) : std::printf(" %8s", "-");
    if (row.way == "baseline") {
      std::printf(" %14s", "-");
    } else {
      std::printf(" %13lld%c", whole(row.moved), row.moved == row.formula ? '=' : '!');
    }
    std::printf(" %7lld\n", whole(row.wrong));
  }
}

void printParts(const Rows& rows) {
  std::printf("# where the time goes, %% of the ranks' cores\n");
  std::printf("%-10s %-7s %-9s %12s %7s %7s %7s %7s %7s\n", "op", "owners", "transport",
              "bytes/tensor", "copies", "sum", "system", "other", "idle");
  for (const Row& row : rows) {
    double mean = 0;
    for (double seconds : row.time.rounds) mean += seconds;
    const double all = row.cores * mean / static_cast<double>(row.time.rounds.size());
    const double user = row.time.cpu - row.time.system;
    printStart(row);
    for (double part : {row.copies.cpu, row.sum.cpu, row.time.system,
                        user - row.copies.cpu - row.sum.cpu, all - row.time.cpu}) {
      std::printf(" %7.1f", 100 * part / all);
    }
    std::printf("\n");
  }
}

void printSlowdowns(const Rows& rows) {
  std::printf("# uneven owners: time over that of owners spread\n");
  std::printf("%-10s %-7s %-9s %12s %9s %9s\n", "op", "owners", "transport", "bytes/tensor",
              "measured", "expected");
  for (const Row& row : rows) {
    if (row.owners == "spread") continue;
    printStart(row);
    std::printf(" %9.2f %9.2f\n", slowdown(row, rows), expectedSlowdown(row, rows));
  }
}

void writeRow(std::FILE* file, const Row& row, const Rows& rows) {
  const double best = *std::min_element(row.time.rounds.begin(), row.time.rounds.end());
  const auto text = [&](const char* key, const std::string& value) {
    std::fprintf(file, "\"%s\": \"%s\", ", key, value.c_str());
  };
  const auto number = [&](const char* key, double value) {
    std::fprintf(file, "\"%s\": %.9g, ", key, value);
  };
  const auto count = [&](const char* key, int64_t value) {
    std::fprintf(file, "\"%s\": %lld, ", key, whole(value));
  };
  text("op", row.op);
  text("owners", row.owners);
  text("transport", row.way);
  count("tensor_bytes", row.tensor_bytes);
  number("seconds", median(row.time.rounds));
  number("best_seconds", best);
  number("memcpy_seconds", median(row.memcpy.rounds));
  number("share", share(row));
  number("speedup", speedup(row, rows));
  number("slowdown", slowdown(row, rows));
  number("slowdown_expected", expectedSlowdown(row, rows));
  number("cpu_seconds", row.time.cpu);
  number("system_seconds", row.time.system);
  number("copy_cpu_seconds", row.copies.cpu);
  number("sum_cpu_seconds", row.sum.cpu);
  number("cores", row.cores);
  count("bytes_formula", row.formula);
  count("bytes_moved", row.moved);
  std::fprintf(file, "\"wrong\": %lld", whole(row.wrong));
}

}  // namespace

double median(std::vector<double> values) {
  const size_t middle = values.size() / 2;
  std::sort(values.begin(), values.end());
  return values.size() % 2 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

bool good(const Row& row) { return row.wrong == 0 && row.moved == row.formula; }

void print(const Rows& rows, const Options& o, int size) {
  std::printf(
      "# %d ranks on %.3g cores, %d tensors of %s per operation, %d rounds of up to %d "
      "operations\n",
      size, rows[0].cores, o.tensors, o.dtype.c_str(), o.repeats, o.iterations);
  printTimes(rows);
  printParts(rows);
  if (o.owners.size() > 1) printSlowdowns(rows);
}

void writeJson(const Rows& rows, const Options& o, int size) {
  std::FILE* file = std::fopen(o.json.c_str(), "w");
  if (file == nullptr) {
    throw std::runtime_error("cannot write " + o.json + ": " + std::strerror(errno));
  }
  std::fprintf(file,
               "{\"ranks\": %d, \"tensors\": %d, \"dtype\": \"%s\", \"iterations\": %d, "
               "\"repeats\": %d,\n \"rows\": [",
               size, o.tensors, o.dtype.c_str(), o.iterations, o.repeats);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::fprintf(file, "%s\n  {", i ? "," : "");
    writeRow(file, rows[i], rows);
    std::fprintf(file, "}");
  }
  std::fprintf(file, "]}\n");
  if (std::fclose(file) != 0) {
    throw std::runtime_error("cannot write " + o.json + ": " + std::strerror(errno));
  }
}

}  // namespace dmuon::perf
