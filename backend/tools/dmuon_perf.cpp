// Benchmark of the owner collectives of CPU tensors; see perf_options.cpp for its usage text.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/zeros.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <optional>

#include <dmuon/backend/factory.h>

#include "perf_options.h"

namespace dmuon::perf {
namespace {

using Group = c10::intrusive_ptr<ProcessGroupDMuon>;
using Store = c10::intrusive_ptr<c10d::Store>;
using Tensors = std::vector<at::Tensor>;
using Clock = std::chrono::steady_clock;

struct Row {
  std::string op, way;  // "ucx", "gloo", or "baseline"
  int64_t tensor_bytes = 0;
  double seconds = 0;
  double memcpy_seconds = 0;
  int64_t moved = 0;  // received by all ranks together
  int64_t wrong = 0;
};

at::ScalarType typeOf(const std::string& name) {
  if (name == "half") return at::kHalf;
  if (name == "bfloat16") return at::kBFloat16;
  return name == "double" ? at::kDouble : at::kFloat;
}

std::vector<int64_t> ownersOf(const Options& o, int size) {
  std::vector<int64_t> owners;
  for (int i = 0; i < o.tensors; ++i) {
    if (o.owners == "spread") {
      owners.push_back(i % size);
    } else {
      owners.push_back(o.owners == "one" || i % 2 == 0 ? 0 : i / 2 % size);
    }
  }
  return owners;
}

// Exact in every dtype, and different on all ranks and for all tensors.
double valueOf(int rank, int tensor) { return rank * 3 + tensor % 5 + 1; }

// One operation's tensors on one rank, and its reference.
struct Data {
  Data(const Options& o, int rank, int size, int64_t bytes)
      : rank(rank), size(size), owners(ownersOf(o, size)) {
    const auto type = typeOf(o.dtype);
    const int64_t numel = bytes / static_cast<int64_t>(c10::elementSize(type));
    for (int i = 0; i < o.tensors; ++i) {
      inputs.push_back(at::full({numel}, valueOf(rank, i), type));
      outputs.push_back(owners[i] == rank ? at::zeros({numel}, type) : at::Tensor());
      received += owners[i] == rank ? 0 : inputs.back().numel() * inputs.back().element_size();
    }
  }

  int64_t wrongAfter(const std::string& op) const {
    int64_t wrong = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const int n = static_cast<int>(i);
      double expected = 0;
      for (int r = 0; r < size; ++r) expected += valueOf(r, n);
      const bool reduced = op == "reduce";
      if (reduced && owners[i] != rank) continue;
      if (!reduced) expected = valueOf(static_cast<int>(owners[i]), n);
      wrong += (reduced ? outputs[i] : inputs[i]).ne(expected).sum().item<int64_t>();
    }
    return wrong;
  }

  const int rank, size;
  const std::vector<int64_t> owners;
  Tensors inputs, outputs;
  int64_t received = 0;  // by this rank in a broadcast
};

class Bench {
 public:
  Bench(const Options& options, const Store& store, int rank, int size)
      : o_(options), rank_(rank), size_(size) {
    std::vector<std::string> names = options.transports;
    if (names.empty()) names = {"gloo", "auto"};
    for (const std::string& name : names) {
      ::setenv("DMUON_TRANSPORT", name.c_str(), 1);
      Group group = createProcessGroup(c10::make_intrusive<c10d::PrefixStore>(name, store), rank,
                                       size, std::chrono::minutes(5), name);
      if (!groups_.empty() && groups_.back()->transportName() == group->transportName()) continue;
      groups_.push_back(std::move(group));
    }
  }

  std::vector<Row> run() {
    std::vector<Row> rows;
    for (const std::string& op : o_.ops) {
      for (int64_t bytes = o_.begin; bytes <= o_.end; bytes *= o_.factor) {
        const double copy_seconds = timeMemcpy(op, bytes);
        if (o_.baseline) rows.push_back(measure(op, bytes, nullptr, copy_seconds));
        for (const Group& group : groups_) {
          rows.push_back(measure(op, bytes, group, copy_seconds));
        }
      }
    }
    return rows;
  }

 private:
  // What this rank receives in one operation.
  int64_t receivedBy(const Data& data, const std::string& op) const {
    if (op == "broadcast") return data.received;
    const int64_t all = data.inputs.size() * data.inputs[0].numel() * data.inputs[0].element_size();
    return (size_ - 1) * (all - data.received);
  }

  Row measure(const std::string& op, int64_t bytes, const Group& group, double copy_seconds) {
    Data data(o_, rank_, size_, bytes);
    Row row{op, group ? group->transportName() : "baseline", bytes, 0, copy_seconds, 0, 0};
    row.moved = total(receivedBy(data, op));
    const auto once = [&] { group ? owned(*group, op, data) : perTensor(op, data); };
    once();
    if (op == "broadcast") {  // a second one must deliver again
      for (size_t i = 0; i < data.inputs.size(); ++i) {
        if (data.owners[i] != rank_) data.inputs[i].zero_();
      }
    }
    row.seconds = best(once);
    // The baseline's reduce works in place and so on other values each time.
    row.wrong = group || op == "broadcast" ? total(data.wrongAfter(op)) : 0;
    return row;
  }

  static void owned(ProcessGroupDMuon& group, const std::string& op, Data& data) {
    const auto owners = group.ownerCollectives(at::kCPU);
    if (op == "reduce") {
      owners->reduceToOwners(data.inputs, data.outputs, data.owners)->wait();
    } else {
      owners->broadcastFromOwners(data.inputs, data.owners)->wait();
    }
  }

  void perTensor(const std::string& op, Data& data) {
    const BackendPtr gloo = groups_[0]->innerBackend(at::kCPU);
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < data.inputs.size(); ++i) {
      Tensors one{data.inputs[i]};
      if (op == "reduce") {
        c10d::ReduceOptions options;
        options.rootRank = data.owners[i];
        works.push_back(gloo->reduce(one, options));
      } else {
        c10d::BroadcastOptions options;
        options.rootRank = data.owners[i];
        works.push_back(gloo->broadcast(one, options));
      }
    }
    for (const WorkPtr& work : works) work->wait();
  }

  double timeMemcpy(const std::string& op, int64_t bytes) {
    const int64_t n = receivedBy(Data(o_, rank_, size_, bytes), op);
    const at::Tensor from = at::full({n}, 1, at::kByte), to = at::zeros({n}, at::kByte);
    return best([&] {
      if (n > 0) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), n);
    });
  }

  // Seconds per call: the slowest rank's mean over the iterations, the best of the repeats.
  double best(const std::function<void()>& once) {
    double best_seconds = 0;
    for (int repeat = 0; repeat < o_.repeats; ++repeat) {
      groups_[0]->barrier(c10d::BarrierOptions())->wait();
      const auto begin = Clock::now();
      for (int i = 0; i < o_.iterations; ++i) once();
      const double own = std::chrono::duration<double>(Clock::now() - begin).count();
      const double seconds = slowest(own) / o_.iterations;
      if (repeat == 0 || seconds < best_seconds) best_seconds = seconds;
    }
    return best_seconds;
  }

  double slowest(double value) {
    Tensors one{at::full({1}, value, at::kDouble)};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    groups_[0]->allreduce(one, options)->wait();
    return one[0].item<double>();
  }

  int64_t total(int64_t value) {
    Tensors one{at::full({1}, value, at::kLong)};
    groups_[0]->allreduce(one, c10d::AllreduceOptions())->wait();
    return one[0].item<int64_t>();
  }

  const Options& o_;
  const int rank_, size_;
  std::vector<Group> groups_;
};

const Row* baselineOf(const Row& row, const std::vector<Row>& rows) {
  for (const Row& other : rows) {
    if (other.way == "baseline" && other.op == row.op && other.tensor_bytes == row.tensor_bytes) {
      return &other;
    }
  }
  return nullptr;
}

void print(const std::vector<Row>& rows, const Options& o, int size) {
  std::printf("# %d ranks, %d tensors of %s per operation, owners %s\n", size, o.tensors,
              o.dtype.c_str(), o.owners.c_str());
  std::printf("%-10s %-9s %12s %12s %8s %7s %8s %6s\n", "op", "transport", "bytes/tensor", "us",
              "GB/s", "share", "speedup", "check");
  for (const Row& row : rows) {
    const Row* baseline = baselineOf(row, rows);
    std::printf("%-10s %-9s %12lld %12.1f %8.2f %7.2f %7.1fx %6lld\n", row.op.c_str(),
                row.way.c_str(), static_cast<long long>(row.tensor_bytes), row.seconds * 1e6,
                row.moved / row.seconds / 1e9, row.memcpy_seconds / row.seconds,
                baseline ? baseline->seconds / row.seconds : 0.0,
                static_cast<long long>(row.wrong));
  }
}

void writeJson(const std::vector<Row>& rows, const Options& o, int size) {
  std::FILE* file = std::fopen(o.json.c_str(), "w");
  TORCH_CHECK(file != nullptr, "dmuon_perf: cannot write ", o.json, ": ", std::strerror(errno));
  std::fprintf(file, "{\"ranks\": %d, \"tensors\": %d, \"dtype\": \"%s\", \"owners\": \"%s\",\n",
               size, o.tensors, o.dtype.c_str(), o.owners.c_str());
  std::fprintf(file, " \"rows\": [");
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    std::fprintf(file,
                 "%s\n  {\"op\": \"%s\", \"transport\": \"%s\", \"tensor_bytes\": %lld, "
                 "\"seconds\": %.9g, \"memcpy_seconds\": %.9g, \"bytes_moved\": %lld, "
                 "\"wrong\": %lld}",
                 i ? "," : "", row.op.c_str(), row.way.c_str(),
                 static_cast<long long>(row.tensor_bytes), row.seconds, row.memcpy_seconds,
                 static_cast<long long>(row.moved), static_cast<long long>(row.wrong));
  }
  std::fprintf(file, "]}\n");
  std::fclose(file);
}

// Returns the exit status: 1 if an element was wrong.
int runRank(const Options& o, const Store& store, int rank, int size) {
  at::set_num_threads(1);
  const std::vector<Row> rows = Bench(o, store, rank, size).run();
  int64_t wrong = 0;
  for (const Row& row : rows) wrong += row.wrong;
  if (rank == 0) {
    print(rows, o, size);
    if (!o.json.empty()) writeJson(rows, o, size);
    std::fflush(nullptr);
  }
  return wrong == 0 ? 0 : 1;
}

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
        return runRank(o, c10::make_intrusive<c10d::FileStore>(file, o.ranks), rank, o.ranks);
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

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? std::optional<std::string>(value) : std::nullopt;
}

int runLaunched(const Options& o) {
  const int rank = std::stoi(*variable("RANK"));
  const int size = std::stoi(variable("WORLD_SIZE").value());
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(variable("MASTER_PORT").value_or("29500")));
  options.isServer = rank == 0 && !variable("TORCHELASTIC_USE_AGENT_STORE");
  options.numWorkers = size;
  const Store store =
      c10::make_intrusive<c10d::TCPStore>(variable("MASTER_ADDR").value_or("localhost"), options);
  const int status = runRank(o, store, rank, size);
  // The store is rank 0's: it stays until all are done.
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
