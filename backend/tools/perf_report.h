// What dmuon_perf has measured, and how it is shown. Free of ATen.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "perf_options.h"

namespace dmuon::perf {

// Times of one way to do something, per operation.
struct Timing {
  std::vector<double> rounds;  // wall seconds of the slowest rank, one per round
  double cpu = 0;              // seconds of all ranks together, mean over the rounds
  double system = 0;           // that part of it which the kernel spent
};

struct Row {
  std::string op, owners;
  std::string way;  // "ucx", "gloo", or "baseline"
  int64_t tensor_bytes = 0;
  Timing time;
  Timing memcpy;             // as many bytes as are received, memory to memory
  Timing copies;             // the same bytes into a small buffer and out of it
  Timing sum;                // of a reduction
  double cores = 0;          // that the ranks can use at once
  double largest_share = 0;  // of the bytes, one owner's
  int64_t formula = 0;       // bytes received by all ranks together
  int64_t moved = 0;  // the same by the counters; the formula's for the baseline, which has none
  int64_t wrong = 0;
};

double median(std::vector<double> values);

// Whether a row is right: its elements and its bytes.
bool good(const Row& row);

void print(const std::vector<Row>& rows, const Options& options, int size);
// Throws std::runtime_error if the file cannot be written.
void writeJson(const std::vector<Row>& rows, const Options& options, int size);

}  // namespace dmuon::perf
