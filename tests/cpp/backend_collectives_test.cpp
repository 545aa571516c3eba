// Ordinary collectives through ProcessGroupDMuon: right for every layout and reduction, or refused.
#include <ATen/core/ivalue.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <thread>

#include <dmuon/backend/factory.h>

#include "backend_cases.h"
#include "ranks.h"

namespace dmuon {
namespace {

using namespace dmuon::testing;
using c10d::ReduceOp;
using Group = c10::intrusive_ptr<ProcessGroupDMuon>;
using Work = c10::intrusive_ptr<c10d::Work>;

constexpr int kSize = 3;

void onRanks(const std::function<void(int, ProcessGroupDMuon&)>& body, int size = kSize) {
  runRanks(size, [&](int rank, const Store& store) {
    Group group = createProcessGroup(store, rank, size, std::chrono::seconds(20), "g");
    body(rank, *group);
  });
}

enum class Layout { plain, strided };

// The same values in another layout: every second row of a larger tensor.
at::Tensor lay(const at::Tensor& plain, Layout layout) {
  if (layout == Layout::plain) return plain.clone();
  at::Tensor room = at::zeros({plain.size(0), 2, plain.size(1)}, plain.options());
  at::Tensor view = room.select(1, 0);
  view.copy_(plain);
  EXPECT_FALSE(view.is_contiguous());
  return view;
}

// Rank-distinct small integers: sums are exact in every dtype.
at::Tensor data(int rank, int number = 0, at::ScalarType type = at::kFloat) {
  return (at::arange(12, at::kLong).view({4, 3}) * (rank + 1) + number).to(type);
}

at::Tensor sumOverRanks(at::ScalarType type = at::kFloat, int number = 0) {
  at::Tensor sum = data(0, number, type);
  for (int rank = 1; rank < kSize; ++rank) sum = sum + data(rank, number, type);
  return sum;
}

// Waits by wait() or by the future: both must come after everything that is done to the result.
void finish(const Work& work, bool by_future) {
  if (by_future) {
    work->getFuture()->waitAndThrow();
  } else {
    EXPECT_TRUE(work->wait());
  }
}

struct Reduction {
  const char* name;
  ReduceOp op;
  std::function<at::Tensor(const at::Tensor&)> scale;
};

std::vector<Reduction> reductions() {
  return {{"SUM", ReduceOp(ReduceOp::SUM), [](const at::Tensor& sum) { return sum; }},
          {"AVG", ReduceOp(ReduceOp::AVG), [](const at::Tensor& sum) { return sum / kSize; }},
          {"PREMUL_SUM by 0.25", c10d::makePreMulSum(0.25),
           [](const at::Tensor& sum) { return sum * 0.25; }},
          {"PREMUL_SUM by a tensor", c10d::makePreMulSum(at::full({}, 0.5, at::kDouble)),
           [](const at::Tensor& sum) { return sum * 0.5; }}};
}

template <typename Run>
void forAllReductions(Run&& run) {
  onRanks([&](int rank, ProcessGroupDMuon& group) {
    for (const Reduction& reduction : reductions()) {
      for (Layout layout : {Layout::plain, Layout::strided}) {
        for (at::ScalarType type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
          for (bool by_future : {false, true}) {
            run(rank, group, reduction, layout, type, by_future);
          }
        }
      }
    }
  });
}

TEST(Reductions, allreduce) {
  forAllReductions([](int rank, auto& group, const Reduction& reduction, Layout layout,
                      at::ScalarType type, bool by_future) {
    Tensors tensors{lay(data(rank, 0, type), layout)};
    c10d::AllreduceOptions options;
    options.reduceOp = reduction.op;
    finish(group.allreduce(tensors, options), by_future);
    expectSame(tensors[0], reduction.scale(sumOverRanks(type)), reduction.name);
  });
}

TEST(Reductions, allreduceCoalesced) {
  forAllReductions([](int rank, auto& group, const Reduction& reduction, Layout layout,
                      at::ScalarType type, bool by_future) {
    Tensors tensors{lay(data(rank, 0, type), layout), lay(data(rank, 1, type), layout)};
    c10d::AllreduceCoalescedOptions options;
    options.reduceOp = reduction.op;
    finish(group.allreduce_coalesced(tensors, options), by_future);
    for (int i = 0; i < 2; ++i) {
      expectSame(tensors[i], reduction.scale(sumOverRanks(type, i)), reduction.name);
    }
  });
}

TEST(Reductions, reduceGivesTheRootTheResult) {
  forAllReductions([](int rank, auto& group, const Reduction& reduction, Layout layout,
                      at::ScalarType type, bool by_future) {
    Tensors tensors{lay(data(rank, 0, type), layout)};
    c10d::ReduceOptions options;
    options.reduceOp = reduction.op;
    options.rootRank = 1;
    finish(group.reduce(tensors, options), by_future);
    if (rank == 1) expectSame(tensors[0], reduction.scale(sumOverRanks(type)), reduction.name);
  });
}

TEST(Reductions, reduceScatterOfOneTensor) {
  forAllReductions([](int rank, auto& group, const Reduction& reduction, Layout layout,
                      at::ScalarType type, bool by_future) {
    Tensors parts;
    for (int i = 0; i < kSize; ++i) parts.push_back(data(rank, i, type));
    at::Tensor input = lay(at::cat(parts), layout);
    at::Tensor output = lay(at::zeros({4, 3}, type), layout);
    c10d::ReduceScatterOptions options;
    options.reduceOp = reduction.op;
    finish(group._reduce_scatter_base(output, input, options), by_future);
    expectSame(output, reduction.scale(sumOverRanks(type, rank)), reduction.name);
    expectSame(input, at::cat(parts), "input");
  });
}

TEST(Reductions, reduceScatterCoalesced) {
  forAllReductions([](int rank, auto& group, const Reduction& reduction, Layout layout,
                      at::ScalarType type, bool by_future) {
    Tensors parts;
    for (int i = 0; i < kSize; ++i) parts.push_back(data(rank, i, type));
    Tensors inputs{lay(at::cat(parts), layout), lay(at::cat(parts).mul(2), layout)};
    Tensors outputs{lay(at::zeros({4, 3}, type), layout), lay(at::zeros({4, 3}, type), layout)};
    c10d::ReduceScatterOptions options;
    options.reduceOp = reduction.op;
    finish(group.reduce_scatter_tensor_coalesced(outputs, inputs, options), by_future);
    for (int i = 0; i < 2; ++i) {
      expectSame(outputs[i], reduction.scale(sumOverRanks(type, rank) * (i + 1)), reduction.name);
    }
  });
}

TEST(Reductions, reduceScatterOfLists) {
  forAllReductions([](int rank, auto& group, const Reduction& reduction, Layout layout,
                      at::ScalarType type, bool by_future) {
    std::vector<Tensors> inputs(1);
    for (int i = 0; i < kSize; ++i) inputs[0].push_back(lay(data(rank, i, type), layout));
    Tensors outputs{lay(at::zeros({4, 3}, type), layout)};
    c10d::ReduceScatterOptions options;
    options.reduceOp = reduction.op;
    finish(group.reduce_scatter(outputs, inputs, options), by_future);
    expectSame(outputs[0], reduction.scale(sumOverRanks(type, rank)), reduction.name);
  });
}

TEST(Reductions, integersSumButHaveNoAverage) {
  onRanks([](int rank, ProcessGroupDMuon& group) {
    Tensors tensors{data(rank, 0, at::kLong)};
    group.allreduce(tensors, c10d::AllreduceOptions())->wait();
    expectSame(tensors[0], sumOverRanks(at::kLong), "SUM of integers");
    c10d::AllreduceOptions average;
    average.reduceOp = ReduceOp::AVG;
    expectError([&] { group.allreduce(tensors, average); },
                {"allreduce on group 'g' rank " + std::to_string(rank), "AVG", "Long[4, 3]"});
    c10d::ReduceScatterOptions premultiplied;
    premultiplied.reduceOp = c10d::makePreMulSum(0.5);
    at::Tensor output = at::zeros({4}, at::kLong), input = at::zeros({12}, at::kLong);
    expectError([&] { group._reduce_scatter_base(output, input, premultiplied); },
                {"_reduce_scatter_base", "PREMUL_SUM", "Long[4]"});
    group.barrier(c10d::BarrierOptions())->wait();
  });
}

TEST(Reductions, otherOperationsPassThrough) {
  onRanks([](int rank, ProcessGroupDMuon& group) {
    for (Layout layout : {Layout::plain, Layout::strided}) {
      Tensors tensors{lay(data(rank), layout)};
      c10d::AllreduceOptions options;
      options.reduceOp = ReduceOp::MAX;
      group.allreduce(tensors, options)->wait();
      expectSame(tensors[0], data(kSize - 1), "MAX");
    }
  });
}

template <typename Run>
void forAllLayouts(Run&& run) {
  onRanks([&](int rank, ProcessGroupDMuon& group) {
    for (Layout in : {Layout::plain, Layout::strided}) {
      for (Layout out : {Layout::plain, Layout::strided}) {
        for (bool by_future : {false, true}) run(rank, group, in, out, by_future);
      }
    }
  });
}

TEST(Movement, broadcast) {
  forAllLayouts([](int rank, auto& group, Layout in, Layout, bool by_future) {
    Tensors tensors{lay(data(rank), in)};
    c10d::BroadcastOptions options;
    options.rootRank = 2;
    finish(group.broadcast(tensors, options), by_future);
    expectSame(tensors[0], data(2), "broadcast");
  });
}

TEST(Movement, allgather) {
  forAllLayouts([](int rank, auto& group, Layout in, Layout out, bool by_future) {
    Tensors inputs{lay(data(rank), in)};
    std::vector<Tensors> outputs(1);
    for (int i = 0; i < kSize; ++i) outputs[0].push_back(lay(at::zeros({4, 3}), out));
    finish(group.allgather(outputs, inputs, c10d::AllgatherOptions()), by_future);
    for (int i = 0; i < kSize; ++i) expectSame(outputs[0][i], data(i), "allgather");
  });
}

TEST(Movement, allgatherIntoOneTensor) {
  forAllLayouts([](int rank, auto& group, Layout in, Layout out, bool by_future) {
    at::Tensor input = lay(data(rank), in);
    at::Tensor output = lay(at::zeros({4 * kSize, 3}), out);
    finish(group._allgather_base(output, input, c10d::AllgatherOptions()), by_future);
    expectSame(output, at::cat({data(0), data(1), data(2)}), "allgather_base");
  });
}

TEST(Movement, allgatherCoalesced) {
  forAllLayouts([](int rank, auto& group, Layout in, Layout out, bool by_future) {
    Tensors inputs{lay(data(rank), in), lay(data(rank, 5), in)};
    Tensors outputs{lay(at::zeros({4 * kSize, 3}), out), lay(at::zeros({4 * kSize, 3}), out)};
    finish(group.allgather_into_tensor_coalesced(outputs, inputs, c10d::AllgatherOptions()),
           by_future);
    expectSame(outputs[0], at::cat({data(0), data(1), data(2)}), "first");
    expectSame(outputs[1], at::cat({data(0, 5), data(1, 5), data(2, 5)}), "second");

    std::vector<Tensors> lists(kSize);
    for (auto& list : lists) list = {lay(at::zeros({4, 3}), out), lay(at::zeros({4, 3}), out)};
    finish(group.allgather_coalesced(lists, inputs, c10d::AllgatherOptions()), by_future);
    for (int i = 0; i < kSize; ++i) {
      expectSame(lists[i][0], data(i), "list");
      expectSame(lists[i][1], data(i, 5), "list");
    }
  });
}

TEST(Movement, gatherAndScatter) {
  forAllLayouts([](int rank, auto& group, Layout in, Layout out, bool by_future) {
    Tensors inputs{lay(data(rank), in)};
    std::vector<Tensors> outputs;
    if (rank == 1) {
      outputs.emplace_back();
      for (int i = 0; i < kSize; ++i) outputs[0].push_back(lay(at::zeros({4, 3}), out));
    }
    c10d::GatherOptions gather;
    gather.rootRank = 1;
    finish(group.gather(outputs, inputs, gather), by_future);
    for (int i = 0; i < kSize && rank == 1; ++i) expectSame(outputs[0][i], data(i), "gather");

    Tensors received{lay(at::zeros({4, 3}), out)};
    std::vector<Tensors> sent;
    if (rank == 1) sent.push_back({lay(data(0, 7), in), lay(data(1, 7), in), lay(data(2, 7), in)});
    c10d::ScatterOptions scatter;
    scatter.rootRank = 1;
    finish(group.scatter(received, sent, scatter), by_future);
    expectSame(received[0], data(rank, 7), "scatter");
  });
}

TEST(Movement, alltoall) {
  forAllLayouts([](int rank, auto& group, Layout in, Layout out, bool by_future) {
    at::Tensor input = lay(at::cat({data(rank, 0), data(rank, 1), data(rank, 2)}), in);
    at::Tensor output = lay(at::zeros({4 * kSize, 3}), out);
    std::vector<int64_t> even_out, even_in;
    finish(group.alltoall_base(output, input, even_out, even_in, c10d::AllToAllOptions()),
           by_future);
    expectSame(output, at::cat({data(0, rank), data(1, rank), data(2, rank)}), "alltoall_base");

    Tensors inputs, outputs;
    for (int i = 0; i < kSize; ++i) {
      inputs.push_back(lay(data(rank, 10 + i), in));
      outputs.push_back(lay(at::zeros({4, 3}), out));
    }
    finish(group.alltoall(outputs, inputs, c10d::AllToAllOptions()), by_future);
    for (int i = 0; i < kSize; ++i) expectSame(outputs[i], data(i, 10 + rank), "alltoall");
  });
}

TEST(Movement, sendTakesAnyLayoutAndReceiveSaysWhatItNeeds) {
  onRanks([](int rank, ProcessGroupDMuon& group) {
    if (rank == 0) {
      Tensors tensors{lay(data(0), Layout::strided)};
      group.send(tensors, 1, 5)->wait();
      Tensors again{data(0, 1)};
      group.send(again, 1, 6)->wait();
    } else if (rank == 1) {
      Tensors strided{lay(data(1), Layout::strided)};
      expectError(
          [&] { group.recv(strided, 0, 5); },
          {"recv on group 'g' rank 1", "Float[4, 3] with strides [6, 1]", "is not contiguous"});
      Tensors tensors{at::zeros({4, 3})};
      group.recv(tensors, 0, 5)->wait();
      expectSame(tensors[0], data(0), "received");
      group.recvAnysource(tensors, 6)->wait();
      expectSame(tensors[0], data(0, 1), "received from any");
    }
    Tensors tensors{data(0)};
    expectError([&] { group.send(tensors, 1, 1 << 30); }, {"tag 1073741824 is reserved"});
    expectError([&] { group.recv(tensors, 1, (1 << 30) + 7); }, {"tag 1073741831 is reserved"});
  });
}

TEST(Movement, lazyConjugatesAndNegationsAreResolved) {
  onRanks([](int rank, ProcessGroupDMuon& group) {
    at::Tensor negated = data(rank)._neg_view();
    Tensors tensors{negated};
    group.allreduce(tensors, c10d::AllreduceOptions())->wait();
    expectSame(negated.clone(), sumOverRanks().neg(), "sum of negated views");
  });
}

TEST(Refused, outputsThatOverlapThemselves) {
  onRanks([](int rank, ProcessGroupDMuon& group) {
    Tensors tensors{at::ones({1, 3}).expand({4, 3})};
    expectError([&] { group.allreduce(tensors, c10d::AllreduceOptions()); },
                {"allreduce on group 'g'", "Float[4, 3] with strides [0, 1]", "share one place"});
    std::vector<Tensors> outputs{{at::zeros({4, 3}), at::zeros({4, 3}), at::zeros({4, 3})}};
    group.allgather(outputs, tensors, c10d::AllgatherOptions())->wait();  // as an input it is fine
    expectSame(outputs[0][2], at::ones({4, 3}), "gathered");
  });
}

TEST(Refused, noTensorsAndUndefinedOnes) {
  onRanks(
      [](int rank, ProcessGroupDMuon& group) {
        Tensors none;
        expectError([&] { group.allreduce(none, c10d::AllreduceOptions()); },
                    {"allreduce on group 'g' rank 0 of 1", "no tensors"});
        Tensors undefined{at::Tensor()};
        expectError([&] { group.broadcast(undefined, c10d::BroadcastOptions()); },
                    {"broadcast", "undefined"});
      },
      1);
}

at::Tensor cudaTensor() {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 48,
                       c10::DataPtr(nullptr, c10::Device(c10::kCUDA, 0)), nullptr, false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      caffe2::TypeMeta::Make<float>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({4, 3});
  return tensor;
}

TEST(Refused, devicesWithoutABackendAndMixturesOfDevices) {
  onRanks(
      [](int rank, ProcessGroupDMuon& group) {
        Tensors cuda{cudaTensor()};
        expectError([&] { group.allreduce(cuda, c10d::AllreduceOptions()); },
                    {"the tensors are on cuda:0", "inner backends for cpu only"});
        Tensors mixed{at::zeros({4, 3}), cudaTensor()};
        expectError([&] { group.allreduce_coalesced(mixed, c10d::AllreduceCoalescedOptions()); },
                    {"different devices: cpu and cuda:0"});
      },
      1);
}

// What a group with a CUDA backend hands to it, seen without a GPU.
class FakeCuda : public c10d::Backend {
 public:
  using Backend::Backend;
  const std::string getBackendName() const override { return "fake"; }
  Work allreduce(Tensors&, const c10d::AllreduceOptions& opts) override {
    return note(opts.reduceOp == ReduceOp::AVG ? "allreduce AVG" : "allreduce");
  }
  Work _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override {
    return note("_allgather_base");
  }
  Work barrier(const c10d::BarrierOptions&) override { return note("barrier"); }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { note("start"); }
  Work endCoalescing() override { return note("end"); }
  void abort() override { note("abort"); }
  void setTimeout(std::chrono::milliseconds) override { note("setTimeout"); }

  Work note(const std::string& call) {
    calls.push_back(call);
    return {};
  }
  std::vector<std::string> calls;
};

TEST(Cuda, tensorsGoToTheCudaBackendAndBarrierToTheCpu) {
  runRanks(1, [](int rank, const Store& store) {
    auto host = createProcessGroup(store, 0, 1);
    auto cuda = c10::make_intrusive<FakeCuda>(0, 1);
    auto group = c10::make_intrusive<ProcessGroupDMuon>(0, 1, host->innerBackend(at::kCPU), cuda);
    Tensors on_cuda{cudaTensor()}, on_cpu{at::ones({2})};
    c10d::AllreduceOptions average;
    average.reduceOp = ReduceOp::AVG;
    group->allreduce(on_cuda, average);  // NCCL knows AVG: not replaced
    group->allreduce(on_cpu, average)->wait();
    at::Tensor out = cudaTensor(), in = cudaTensor();
    group->_allgather_base(out, in, c10d::AllgatherOptions());
    group->barrier(c10d::BarrierOptions())->wait();
    c10d::BarrierOptions on_device;
    on_device.device_ids = {0};
    group->barrier(on_device);
    EXPECT_TRUE(group->supportsCoalescing());
    group->startCoalescing();
    group->allreduce(on_cuda, c10d::AllreduceOptions());
    group->allreduce(on_cpu, c10d::AllreduceOptions());
    auto work = group->endCoalescing();
    ASSERT_TRUE(work);
    work->wait();
    group->setTimeout(std::chrono::seconds(3));
    group->abort();
    const std::vector<std::string> expected{
        "allreduce AVG", "_allgather_base", "barrier", "start", "allreduce",
        "end",           "setTimeout",      "abort"};
    EXPECT_EQ(cuda->calls, expected);
    EXPECT_EQ(group->getSequenceNumberForGroup(), 7u);
    // There is an inner backend, but no device: torch or NCCL says what is missing.
    expectError([&] { group->ownerCollectives(at::kCUDA); }, {"there are none for cuda: "});
  });
}

TEST(Group, knowsItsNameRankAndOptions) {
  onRanks([](int rank, ProcessGroupDMuon& group) {
    EXPECT_EQ(group.getBackendName(), "dmuon");
    EXPECT_EQ(group.getRank(), rank);
    EXPECT_EQ(group.getSize(), kSize);
    EXPECT_EQ(group.getBackendOptions()->timeout, std::chrono::seconds(20));
    EXPECT_EQ(group.getBackendOptions()->backend, "dmuon");
    EXPECT_TRUE(group.supportsSplitting());
    EXPECT_FALSE(group.supportsCoalescing());
    EXPECT_EQ(group.getError(), c10d::ErrorType::SUCCESS);
    EXPECT_EQ(group.ownerCollectives(at::kCPU), group.ownerCollectives(at::kCPU));
    EXPECT_EQ(group.innerBackend(at::kCUDA), BackendPtr());
    EXPECT_EQ(group.innerBackend(at::kCPU)->getBackendName(), "gloo");
  });
}

TEST(Group, countsCollectivesButNotSendsOrOwnerCollectives) {
  onRanks([](int rank, ProcessGroupDMuon& group) {
    Tensors tensors{data(rank)};
    group.allreduce(tensors, c10d::AllreduceOptions())->wait();
    expectUsable(*group.ownerCollectives(at::kCPU));
    if (rank == 0) group.send(tensors, 1, 0)->wait();
    if (rank == 1) group.recv(tensors, 0, 0)->wait();
    group.barrier(c10d::BarrierOptions())->wait();
    EXPECT_EQ(group.getSequenceNumberForGroup(), 2u);
  });
}

TEST(Group, barriersWaitForAllRanks) {
  runRanks(kSize, [](int rank, const Store& store) {
    Group group = createProcessGroup(store, rank, kSize, std::chrono::seconds(20));
    if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    store->add("arrived", 1);
    group->barrier(c10d::BarrierOptions())->wait();
    EXPECT_EQ(store->add("arrived", 0), kSize);
    group->monitoredBarrier(c10d::BarrierOptions(), false);
  });
}

TEST(Group, coalescedOperationsOnTheHostAreWaitedForTogether) {
  onRanks([](int rank, ProcessGroupDMuon& group) {
    group.startCoalescing();
    EXPECT_FALSE(group.endCoalescing());
    Tensors a{data(rank)}, b{lay(data(rank, 1), Layout::strided)}, c{data(rank)};
    group.startCoalescing();
    group.allreduce(a, c10d::AllreduceOptions());
    group.allreduce(b, c10d::AllreduceOptions());
    if (rank == 0) group.send(c, 2, 3);
    if (rank == 2) group.recv(c, 0, 3);
    auto work = group.endCoalescing();
    ASSERT_TRUE(work);
    EXPECT_TRUE(work->wait());
    expectSame(a[0], sumOverRanks(), "first");
    expectSame(b[0], sumOverRanks(at::kFloat, 1), "second");
    if (rank == 2) expectSame(c[0], data(0), "received");
  });
}

TEST(Group, splitsAndItsPartsAreWholeGroups) {
  runRanks(4, [](int rank, const Store& store) {
    Group world = createProcessGroup(store, rank, 4, std::chrono::seconds(20), "world");
    const std::vector<std::vector<int>> parts{{0, 2}, {3, 1}};
    for (size_t p = 0; p < parts.size(); ++p) {
      auto wanted = c10::make_intrusive<ProcessGroupDMuon::Options>(std::chrono::seconds(7));
      wanted->group_name = "part" + std::to_string(p);
      auto own = c10::make_intrusive<c10d::PrefixStore>(wanted->group_name, store);
      auto split = world->split(own, parts[p], wanted);
      const auto self = std::find(parts[p].begin(), parts[p].end(), rank);
      ASSERT_EQ(static_cast<bool>(split), self != parts[p].end());
      if (!split) continue;
      auto part = dmuonBackendOf(split);
      EXPECT_EQ(part->getRank(), self - parts[p].begin());
      EXPECT_EQ(part->getSize(), 2);
      EXPECT_EQ(part->getBackendOptions()->timeout, std::chrono::seconds(7));
      Tensors tensors{at::full({2}, rank)};
      part->allreduce(tensors, c10d::AllreduceOptions())->wait();
      expectSame(tensors[0], at::full({2}, parts[p][0] + parts[p][1]), "sum in the part");
      expectUsable(*part->ownerCollectives(at::kCPU));
    }
    // The parent's own options are as before.
    EXPECT_EQ(world->getBackendOptions()->timeout, std::chrono::seconds(20));
    EXPECT_EQ(world->innerBackend(at::kCPU)->getBackendOptions()->timeout,
              std::chrono::seconds(20));
    EXPECT_EQ(world->getBackendOptions()->group_name, "world");
  });
}

TEST(Group, anotherBackendIsNotTakenForDMuon) {
  runRanks(1, [](int, const Store&) {
    BackendPtr other = c10::make_intrusive<FakeCuda>(0, 1);
    expectError([&] { dmuonBackendOf(other); }, {"has the backend 'fake'", "'dmuon'"});
  });
}

TEST(Group, innerBackendsMustFit) {
  runRanks(1, [](int, const Store&) {
    BackendPtr other = c10::make_intrusive<FakeCuda>(0, 2);
    expectError([&] { (void)c10::make_intrusive<ProcessGroupDMuon>(0, 1, BackendPtr(), other); },
                {"'fake' for cuda is rank 0 of 2, but the group is rank 0 of 1"});
    expectError(
        [&] { (void)c10::make_intrusive<ProcessGroupDMuon>(0, 1, BackendPtr(), BackendPtr()); },
        {"needs an inner backend"});
  });
}

// Sizes of zero are ordinary in FSDP and checkpoints.
TEST(Movement, emptyTensors) {
  onRanks([](int rank, ProcessGroupDMuon& group) {
    Tensors tensors{at::zeros({0, 3})};
    group.allreduce(tensors, c10d::AllreduceOptions())->wait();
    group.broadcast(tensors, c10d::BroadcastOptions())->wait();
    at::Tensor out = at::zeros({0}), in = at::zeros({0});
    group._allgather_base(out, in, c10d::AllgatherOptions())->wait();
    c10d::ReduceScatterOptions average;
    average.reduceOp = ReduceOp::AVG;
    group._reduce_scatter_base(out, in, average)->wait();
    group.barrier(c10d::BarrierOptions())->wait();
  });
}

}  // namespace
}  // namespace dmuon
