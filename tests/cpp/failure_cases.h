// What the suites about failing ranks share.
#pragma once

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest-spi.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <dmuon/backend/factory.h>

#include "backend_cases.h"
#include "ranks.h"

namespace dmuon::testing {

using std::chrono::milliseconds;
using std::chrono::seconds;

using Group = c10::intrusive_ptr<ProcessGroupDMuon>;

inline Group makeGroup(const Store& store, int rank, int size, milliseconds timeout) {
  return createProcessGroup(store, rank, size, timeout, "shard");
}

// A reduction of three tensors with an owner each, or as many as there are ranks.
inline OwnerWorkPtr submit(OwnerCollectives& group, const std::string& label, WorkPtr after = {},
                           milliseconds timeout = milliseconds(0), int64_t numel = 1000) {
  Tensors data;
  std::vector<int64_t> owners;
  for (int i = 0; i < 3; ++i) {
    data.push_back(at::zeros({numel}));
    owners.push_back(i % group.size());
  }
  OwnerOptions options;
  options.timeout = timeout;
  options.label = label;
  options.after = std::move(after);
  return group.reduceToOwners(data, data, owners, options);
}

inline double secondsOf(const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Ranks tell each other, without the group under test, that they have come to some point.
inline void meet(const Store& store, const std::string& point, int rank, int size) {
  std::vector<std::string> all;
  for (int r = 0; r < size; ++r) all.push_back(point + std::to_string(r));
  store->set(all[rank], std::vector<uint8_t>{1});
  store->wait(all);
}

inline size_t entriesOf(const char* folder) {
  size_t n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++n;
  return n;
}

// runRanks() where one rank ends by SIGKILL, and nothing else goes wrong.
inline void runRanksOneKilled(int size, const RankBody& body) {
  EXPECT_NONFATAL_FAILURE(runRanks(size, body), "ended by signal 9");
}

}  // namespace dmuon::testing
