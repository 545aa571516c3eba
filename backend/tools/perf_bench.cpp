#include "perf_bench.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <sched.h>
#include <sys/resource.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

#include <dmuon/backend/factory.h>

#include "../src/reduce_kernels.h"
#include "perf_data.h"
#include "perf_report.h"

namespace dmuon::perf {
namespace {

using Group = c10::intrusive_ptr<ProcessGroupDMuon>;
using Store = c10::intrusive_ptr<c10d::Store>;
using Clock = std::chrono::steady_clock;
using Call = std::function<void()>;

constexpr double kLongestTurn =
    0.1;  // seconds of one way in one round, unless one operation takes more
constexpr int64_t kSmallBuffer = 8 << 10;  // one message in shared memory
constexpr int64_t kSumBuffer = 256 << 10;  // one piece of a reduction

double seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
}

struct CpuTime {
  double all = 0, system = 0;
  static CpuTime now() {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return {seconds(usage.ru_utime) + seconds(usage.ru_stime), seconds(usage.ru_stime)};
  }
};

int coresHere() {
  cpu_set_t set;
  return ::sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

at::Tensor bytes(int64_t n) { return at::full({n}, 1, at::kByte); }

// What an operation's parts cost alone, on memory of its own.
class Parts {
 public:
  Parts(const Data& data, const std::string& op)
      : n_(data.receivedBytes(op)),
        in_cache_(op == "reduce"),
        from_(bytes(n_)),
        to_(bytes(n_)),
        small_(bytes(kSmallBuffer)),
        piece_(bytes(std::min(kSumBuffer, data.tensorBytes()))) {}

  void memcpyAll() const {
    if (n_ > 0) std::memcpy(to_.mutable_data_ptr(), from_.const_data_ptr(), n_);
  }

  // A reduction receives into buffers that stay in the cache, a broadcast into the tensors.
  void copyThrough() const {
    const auto* from = static_cast<const char*>(from_.const_data_ptr());
    auto* small = static_cast<char*>(small_.mutable_data_ptr());
    auto* to = static_cast<char*>(to_.mutable_data_ptr());
    for (int64_t at = 0; at < n_; at += kSmallBuffer) {
      const auto chunk = static_cast<size_t>(std::min(kSmallBuffer, n_ - at));
      std::memcpy(small, from + at, chunk);
      std::memcpy(to + (in_cache_ ? at % kSumBuffer / kSmallBuffer * kSmallBuffer : at), small,
                  chunk);
    }
  }

  void sum(const Data& data) const {
    const int64_t item = data.inputs[0].element_size(), step = piece_.numel() / item;
    std::vector<const void*> blocks(data.size, piece_.const_data_ptr());
    for (size_t i = 0; i < data.inputs.size(); ++i) {
      if (!data.outputs[i].defined()) continue;
      const int64_t numel = data.inputs[i].numel();
      for (int64_t at = 0; at < numel; at += step) {
        blocks[data.rank] = static_cast<const char*>(data.inputs[i].const_data_ptr()) + at * item;
        sumBlocks(data.inputs[i].scalar_type(), blocks.data(), data.size,
                  std::min(step, numel - at), 1.0, data.inputs[i].scalar_type(),
                  static_cast<char*>(data.outputs[i].mutable_data_ptr()) + at * item);
      }
    }
  }

 private:
  const int64_t n_;
  const bool in_cache_;
  const at::Tensor from_, to_, small_, piece_;
};

class Bench {
 public:
  Bench(const Options& options, const Store& store, int rank, int size, int local_ranks)
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
    cores_ = total(std::min(1.0, static_cast<double>(coresHere()) / local_ranks));
  }

  std::vector<Row> run() {
    std::vector<Row> rows;
    for (const std::string& op : o_.ops) {
      for (int64_t bytes = o_.begin; bytes <= o_.end; bytes *= o_.factor) {
        for (Row& row : measure(op, bytes)) rows.push_back(std::move(row));
      }
    }
    return rows;
  }

 private:
  // One way for one pattern of owners.
  struct Entry {
    Row row;
    Data* data;
    ProcessGroupDMuon* group;  // null: the baseline
    Call once;
    int iterations = 1;
  };

  std::vector<Row> measure(const std::string& op, int64_t bytes) {
    std::vector<std::unique_ptr<Data>> data;
    std::vector<std::unique_ptr<Parts>> parts;
    std::vector<Entry> entries;
    for (const std::string& owners : o_.owners) {
      data.push_back(std::make_unique<Data>(o_, owners, rank_, size_, bytes));
      data.back()->fill(op);
      parts.push_back(std::make_unique<Parts>(*data.back(), op));
      if (o_.baseline) entries.push_back(entry(op, owners, *data.back(), nullptr));
      for (const Group& group : groups_) {
        entries.push_back(entry(op, owners, *data.back(), group.get()));
      }
    }
    for (Entry& e : entries) warmUp(e);
    for (int round = 0; round < o_.repeats; ++round) {
      const size_t per_pattern = entries.size() / data.size();
      for (size_t i = 0; i < data.size(); ++i) {
        const Parts& alone = *parts[i];
        Timing memcpy, copies, sum;
        time(memcpy, o_.iterations, [&] { alone.memcpyAll(); });
        time(copies, o_.iterations, [&] { alone.copyThrough(); });
        if (op == "reduce") time(sum, o_.iterations, [&] { alone.sum(*data[i]); });
        for (size_t k = i * per_pattern; k < (i + 1) * per_pattern; ++k) {
          Row& row = entries[k].row;
          add(row.memcpy, memcpy);
          add(row.copies, copies);
          add(row.sum, sum);
          time(row.time, entries[k].iterations, entries[k].once);
        }
      }
    }
    std::vector<Row> rows;
    for (Entry& e : entries) {
      check(e);
      rows.push_back(std::move(e.row));
    }
    return rows;
  }

  Entry entry(const std::string& op, const std::string& owners, Data& data,
              ProcessGroupDMuon* group) {
    Row row;
    row.op = op;
    row.owners = owners;
    row.way = group != nullptr ? group->transportName() : "baseline";
    row.tensor_bytes = data.tensorBytes();
    row.cores = cores_;
    row.largest_share = data.largestShare();
    row.formula = int64_t{o_.tensors} * (size_ - 1) * row.tensor_bytes;
    Call once = [this, op, &data, group] {
      group != nullptr ? owned(*group, op, data) : perTensor(op, data);
    };
    return {std::move(row), &data, group, std::move(once), 1};
  }

  static void owned(ProcessGroupDMuon& group, const std::string& op, Data& data) {
    const auto collectives = group.ownerCollectives(at::kCPU);
    if (op == "reduce") {
      collectives->reduceToOwners(data.inputs, data.outputs, data.owners)->wait();
    } else {
      collectives->broadcastFromOwners(data.inputs, data.owners)->wait();
    }
  }

  void perTensor(const std::string& op, Data& data) const {
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

  // One more operation, from known values, whose result and bytes are looked at.
  void check(Entry& e) {
    const std::string& op = e.row.op;
    e.data->fill(op);
    groups_[0]->barrier(c10d::BarrierOptions())->wait();
    const int64_t before = received(e);
    e.once();
    // Gloo reduces in place.
    const Tensors& results =
        e.group != nullptr && op == "reduce" ? e.data->outputs : e.data->inputs;
    if (o_.spoil) e.data->spoil(op, results);
    e.row.wrong = total(e.data->wrong(op, results));
    e.row.moved = e.group != nullptr ? total(received(e) - before) : e.row.formula;
    e.data->fill(op);  // the baseline of a reduction has changed the inputs
  }

  int64_t received(const Entry& e) const {
    if (e.group == nullptr) return 0;
    const OwnerCounters counters = e.group->ownerCollectives(at::kCPU)->counters();
    return (e.row.op == "reduce" ? counters.reduce : counters.broadcast).bytes_received;
  }

  void warmUp(Entry& e) {
    for (int i = 0; i < o_.warmup; ++i) e.once();
    Timing one;
    time(one, 1, e.once);
    const double fit = kLongestTurn / one.rounds[0];
    e.iterations = fit < o_.iterations ? std::max(1, static_cast<int>(fit)) : o_.iterations;
  }

  // Adds a round.
  void time(Timing& timing, int iterations, const Call& once) {
    groups_[0]->barrier(c10d::BarrierOptions())->wait();
    const CpuTime cpu = CpuTime::now();
    const auto begin = Clock::now();
    for (int i = 0; i < iterations; ++i) once();
    const double own = std::chrono::duration<double>(Clock::now() - begin).count();
    const CpuTime end = CpuTime::now();
    Timing round;
    round.rounds = {allReduced(own, c10d::ReduceOp::MAX) / iterations};
    round.cpu = total(end.all - cpu.all) / (iterations * o_.repeats);
    round.system = total(end.system - cpu.system) / (iterations * o_.repeats);
    add(timing, round);
  }

  static void add(Timing& to, const Timing& round) {
    to.rounds.insert(to.rounds.end(), round.rounds.begin(), round.rounds.end());
    to.cpu += round.cpu;
    to.system += round.system;
  }

  template <typename T>
  T allReduced(T value, c10d::ReduceOp::RedOpType op) {
    Tensors one{at::full({1}, value, std::is_integral_v<T> ? at::kLong : at::kDouble)};
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    groups_[0]->allreduce(one, options)->wait();
    return one[0].item<T>();
  }

  template <typename T>
  T total(T value) {
    return allReduced(value, c10d::ReduceOp::SUM);
  }

  const Options& o_;
  const int rank_, size_;
  std::vector<Group> groups_;
  double cores_ = 0;
};

}  // namespace

int runRank(const Options& o, const Store& store, int rank, int size, int local_ranks) {
  at::set_num_threads(1);
  const std::vector<Row> rows = Bench(o, store, rank, size, local_ranks).run();
  if (rank == 0) {
    print(rows, o, size);
    std::fflush(nullptr);
    if (!o.json.empty()) writeJson(rows, o, size);
  }
  return std::all_of(rows.begin(), rows.end(), good) ? 0 : 1;
}

}  // namespace dmuon::perf
