// Benchmark of the owner collectives of CPU tensors; see perf_options.cpp for its usage text. This
// file brings the ranks together.
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>

#include "perf_bench.h"

namespace dmuon::perf {
namespace {

int guarded(const std::function<int()>& run) {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "dmuon_perf: %s\n", error.what());
    return 1;
  }
}

int runForked(const Options& o) {
  const std::string folder = std::filesystem::temp_directory_path() / "dmuon_perf_XXXXXX";
  std::vector<char> name(folder.begin(), folder.end());
  name.push_back('\0');
  TORCH_CHECK(::mkdtemp(name.data()) != nullptr, "mkdtemp: ", std::strerror(errno));
  const std::string file = std::string(name.data()) + "/store";
  std::vector<pid_t> children;
  for (int rank = 0; rank < o.ranks; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::_exit(guarded([&] {
        const auto store = c10::make_intrusive<c10d::FileStore>(file, o.ranks);
        return runRank(o, store, rank, o.ranks, o.ranks);
      }));
    }
    children.push_back(child);
  }
  int failed = 0;
  for (pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    failed |= !WIFEXITED(status) || WEXITSTATUS(status) != 0;
  }
  std::filesystem::remove_all(name.data());
  return failed;
}

std::string variable(const char* name, const std::string& otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

int number(const char* name, const std::string& otherwise) {
  const std::string value = variable(name, otherwise);
  try {
    return std::stoi(value);
  } catch (const std::exception&) {
    throw std::runtime_error(std::string(name) + " must be a number, but is '" + value + "'");
  }
}

int runLaunched(const Options& o) {
  const int rank = number("RANK", ""), size = number("WORLD_SIZE", "");
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(number("MASTER_PORT", "29500"));
  // Under torchrun the launcher keeps the store.
  options.isServer = rank == 0 && variable("TORCHELASTIC_USE_AGENT_STORE", "False") != "True";
  options.numWorkers = size;
  const auto tcp =
      c10::make_intrusive<c10d::TCPStore>(variable("MASTER_ADDR", "localhost"), options);
  const auto store = c10::make_intrusive<c10d::PrefixStore>(
      "dmuon_perf/" + variable("TORCHELASTIC_RESTART_COUNT", "0"), tcp);
  const int local_ranks = number("LOCAL_WORLD_SIZE", std::to_string(size));
  const int status = runRank(o, store, rank, size, local_ranks);
  // The store may be rank 0's: it stays until all are done.
  store->add("done", 1);
  while (options.isServer && store->add("done", 0) < size) ::usleep(1000);
  return status;
}

}  // namespace
}  // namespace dmuon::perf

int main(int argc, char** argv) {
  const auto options = dmuon::perf::Options::parse(argc, argv);
  return dmuon::perf::guarded([&] {
    return std::getenv("RANK") != nullptr ? dmuon::perf::runLaunched(options)
                                          : dmuon::perf::runForked(options);
  });
}
