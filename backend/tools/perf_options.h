// Command line of dmuon_perf.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dmuon::perf {

struct Options {
  int ranks = 4;  // forked, unless RANK and WORLD_SIZE are set
  std::vector<std::string> ops{"reduce", "broadcast"};
  std::vector<std::string> transports;  // default: both that this build has
  std::vector<std::string> owners{"spread"};
  std::string dtype = "float";
  int64_t begin = 1 << 10;  // bytes per tensor
  int64_t end = 1 << 20;
  int64_t factor = 4;
  int tensors = 32;
  int iterations = 10;
  int repeats = 5;
  int warmup = 2;
  bool baseline = true;
  bool spoil = false;
  std::string json;  // file; empty: none

  // Exits with the usage text on an unknown option or value.
  static Options parse(int argc, char** argv);
};

}  // namespace dmuon::perf
