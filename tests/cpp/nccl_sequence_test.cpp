// The exact calls that an owner collective on NCCL makes, seen through a mock of the interface.
// label: threads
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <thread>

#include "../../backend/src/nccl_owner_collectives.h"

namespace dmuon {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::NiceMock;
using Tensors = std::vector<at::Tensor>;
using Log = std::vector<std::string>;

class MockNccl : public NcclApi {
 public:
  MOCK_METHOD(std::string, version, (), (override));
  MOCK_METHOD(UniqueId, newUniqueId, (), (override));
  MOCK_METHOD(Comm, commInit, (const UniqueId&, int, int, c10::Device), (override));
  MOCK_METHOD(State, commState, (Comm), (override));
  MOCK_METHOD(void, commFinalize, (Comm), (override));
  MOCK_METHOD(void, commDestroy, (Comm), (override));
  MOCK_METHOD(void, commAbort, (Comm), (override));
  MOCK_METHOD(void, groupStart, (), (override));
  MOCK_METHOD(void, groupEnd, (), (override));
  MOCK_METHOD(void, reduce,
              (const void*, void*, int64_t, c10::ScalarType, int, Comm, const c10::Stream&),
              (override));
  MOCK_METHOD(void, broadcast,
              (const void*, void*, int64_t, c10::ScalarType, int, Comm, const c10::Stream&),
              (override));
  MOCK_METHOD(void, reduceScatter,
              (const void*, void*, int64_t, c10::ScalarType, Comm, const c10::Stream&), (override));
  MOCK_METHOD(void, allGather,
              (const void*, void*, int64_t, c10::ScalarType, Comm, const c10::Stream&), (override));
  MOCK_METHOD(void, send, (const void*, int64_t, c10::ScalarType, int, Comm, const c10::Stream&),
              (override));
  MOCK_METHOD(void, recv, (void*, int64_t, c10::ScalarType, int, Comm, const c10::Stream&),
              (override));
  MOCK_METHOD(c10::Device, currentDevice, (), (override));
  MOCK_METHOD(void, useDevice, (c10::Device), (override));
  MOCK_METHOD(c10::Stream, newStream, (c10::Device, bool), (override));
  MOCK_METHOD(c10::Stream, currentStream, (c10::Device), (override));
  MOCK_METHOD(Event, newEvent, (c10::Device), (override));
  MOCK_METHOD(void, destroyEvent, (Event), (override));
  MOCK_METHOD(void, record, (Event, const c10::Stream&), (override));
  MOCK_METHOD(void, streamWait, (const c10::Stream&, Event), (override));
  MOCK_METHOD(bool, query, (Event), (override));
  MOCK_METHOD(void, hostWait, (Event), (override));
  MOCK_METHOD(at::Tensor, empty, (int64_t, c10::ScalarType, const c10::Stream&), (override));
  MOCK_METHOD(at::Tensor, hostBytes, (int64_t), (override));
  MOCK_METHOD(void, enqueue, (const c10::Stream&, std::function<void()>), (override));
  MOCK_METHOD(void, waitFor, (const c10::Stream&, c10d::Work&), (override));
  MOCK_METHOD(std::vector<c10::Device>, futureDevices, (c10::Device), (override));
  MOCK_METHOD(void, rangePush, (const std::string&), (override));
  MOCK_METHOD(void, rangePop, (), (override));
};

c10::Stream streamNumber(int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CPU), id);
}

// A device that writes down what it is told. Memory has names: those of known tensors, and s0, s1,
// ... for scratch; events are e0, e1, ...; the caller's stream is "caller".
class Device {
 public:
  std::shared_ptr<NiceMock<MockNccl>> api = std::make_shared<NiceMock<MockNccl>>();
  std::atomic<bool> stuck{false};  // operations from now on begin, but do not end
  std::string nccl_error;          // what commState() reports
  std::mutex mutex;

  Device() {
    ON_CALL(*api, version).WillByDefault([] { return std::string("mock"); });
    ON_CALL(*api, newUniqueId).WillByDefault([] { return NcclApi::UniqueId{'i', 'd'}; });
    ON_CALL(*api, commInit)
        .WillByDefault([this](const NcclApi::UniqueId& id, int size, int rank, c10::Device) {
          say(c10::str("commInit ", id.data(), " rank ", rank, " of ", size));
          return reinterpret_cast<NcclApi::Comm>(this);
        });
    ON_CALL(*api, commState).WillByDefault([this](NcclApi::Comm) {
      std::lock_guard<std::mutex> lock(mutex);
      if (nccl_error.empty()) return NcclApi::State{};
      return NcclApi::State{NcclApi::State::failed, nccl_error};
    });
    ON_CALL(*api, commFinalize).WillByDefault([this](NcclApi::Comm) { say("commFinalize"); });
    ON_CALL(*api, commDestroy).WillByDefault([this](NcclApi::Comm) { say("commDestroy"); });
    ON_CALL(*api, commAbort).WillByDefault([this](NcclApi::Comm) { say("commAbort"); });
    ON_CALL(*api, groupStart).WillByDefault([this] { say("groupStart"); });
    ON_CALL(*api, groupEnd).WillByDefault([this] { say("groupEnd"); });
    ON_CALL(*api, reduce)
        .WillByDefault([this](const void* from, void* to, int64_t count, c10::ScalarType type,
                              int root, NcclApi::Comm, const c10::Stream& stream) {
          say(call("reduce", from, to, count, type, stream) + c10::str(" root ", root));
        });
    ON_CALL(*api, broadcast)
        .WillByDefault([this](const void* from, void* to, int64_t count, c10::ScalarType type,
                              int root, NcclApi::Comm, const c10::Stream& stream) {
          say(call("broadcast", from, to, count, type, stream) + c10::str(" root ", root));
        });
    ON_CALL(*api, reduceScatter)
        .WillByDefault([this](const void* from, void* to, int64_t count, c10::ScalarType type,
                              NcclApi::Comm, const c10::Stream& stream) {
          say(call("reduceScatter", from, to, count, type, stream));
        });
    ON_CALL(*api, allGather)
        .WillByDefault([this](const void* from, void* to, int64_t count, c10::ScalarType type,
                              NcclApi::Comm, const c10::Stream& stream) {
          say(call("allGather", from, to, count, type, stream));
        });
    ON_CALL(*api, send)
        .WillByDefault([this](const void* from, int64_t count, c10::ScalarType type, int peer,
                              NcclApi::Comm, const c10::Stream& stream) {
          say(c10::str("send ", place(from), " x", count, " ", type, " to ", peer));
        });
    ON_CALL(*api, recv)
        .WillByDefault([this](void* to, int64_t count, c10::ScalarType type, int peer,
                              NcclApi::Comm, const c10::Stream& stream) {
          say(c10::str("recv ", place(to), " x", count, " ", type, " from ", peer));
        });
    ON_CALL(*api, currentDevice).WillByDefault([] { return c10::Device(c10::DeviceType::CPU); });
    ON_CALL(*api, newStream).WillByDefault([this](c10::Device, bool high) {
      say(high ? "newStream high" : "newStream normal");
      return streamNumber(7);
    });
    ON_CALL(*api, currentStream).WillByDefault([](c10::Device) { return streamNumber(0); });
    ON_CALL(*api, newEvent).WillByDefault([this](c10::Device) {
      std::lock_guard<std::mutex> lock(mutex);
      return reinterpret_cast<NcclApi::Event>(++events_);
    });
    ON_CALL(*api, record).WillByDefault([this](NcclApi::Event event, const c10::Stream& stream) {
      say(c10::str("record ", name(event), " on ", name(stream)));
      std::lock_guard<std::mutex> lock(mutex);
      passes_[event] = !stuck || stream.id() == 0 || ++side_records_ % 2 == 1;
    });
    ON_CALL(*api, streamWait)
        .WillByDefault([this](const c10::Stream& stream, NcclApi::Event event) {
          say(c10::str(name(stream), " waits for ", name(event)));
        });
    ON_CALL(*api, query).WillByDefault([this](NcclApi::Event event) {
      std::lock_guard<std::mutex> lock(mutex);
      return passes_[event];
    });
    ON_CALL(*api, hostWait).WillByDefault([this](NcclApi::Event event) {
      say("host waits for " + name(event));
    });
    ON_CALL(*api, empty)
        .WillByDefault([this](int64_t numel, c10::ScalarType type, const c10::Stream&) {
          at::Tensor tensor = at::zeros({numel}, type);
          const std::string scratch = c10::str("s", scratches_++);
          know(scratch, tensor);
          say(c10::str(scratch, " = empty x", numel, " ", type));
          return tensor;
        });
    ON_CALL(*api, hostBytes).WillByDefault([](int64_t count) {
      return at::zeros({count}, at::kByte);
    });
    ON_CALL(*api, enqueue)
        .WillByDefault([this](const c10::Stream& stream, std::function<void()> operations) {
          say("enqueue on " + name(stream));
          operations();
        });
    ON_CALL(*api, rangePush).WillByDefault([this](const std::string& range) {
      ranges.push_back(range);
    });
  }

  std::vector<std::string> ranges;

  // Keeps it, so that no other tensor gets its memory.
  at::Tensor know(const std::string& name, const at::Tensor& tensor) {
    std::lock_guard<std::mutex> lock(mutex);
    known_.emplace_back(name, tensor);
    return tensor;
  }
  Log take() {
    std::lock_guard<std::mutex> lock(mutex);
    return std::exchange(log_, {});
  }
  // From here on, events and scratch are counted from 0.
  void begin() {
    take();
    std::lock_guard<std::mutex> lock(mutex);
    first_event_ = events_ + 1;
    scratches_ = 0;
    std::erase_if(known_, [](const auto& one) { return one.first[0] == 's'; });
  }
  void release() {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& [event, passes] : passes_) passes = true;
  }

 private:
  void say(const std::string& line) {
    std::lock_guard<std::mutex> lock(mutex);
    log_.push_back(line);
  }
  static std::string name(const c10::Stream& stream) {
    return stream.id() == 0 ? "caller" : "side";
  }
  std::string name(NcclApi::Event event) const {
    return c10::str("e", reinterpret_cast<uintptr_t>(event) - first_event_);
  }
  std::string place(const void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    if (data == nullptr) return "nothing";
    for (const auto& [name, tensor] : known_) {
      const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
      const auto offset = static_cast<const char*>(data) - begin;
      if (offset < 0 || offset >= static_cast<int64_t>(tensor.nbytes())) continue;
      return offset == 0 ? name : c10::str(name, "+", offset);
    }
    return "?";
  }
  std::string call(const char* what, const void* from, const void* to, int64_t count,
                   c10::ScalarType type, const c10::Stream& stream) {
    EXPECT_EQ(stream.id(), 7) << what << " on another stream";
    return c10::str(what, " ", place(from), " -> ", place(to), " x", count, " ", type);
  }

  Log log_;
  std::vector<std::pair<std::string, at::Tensor>> known_;
  std::map<NcclApi::Event, bool> passes_;
  uintptr_t events_ = 0;
  uintptr_t first_event_ = 1;
  int scratches_ = 0;
  int side_records_ = 0;
};

constexpr int kRanks = 4;

// A channel of four ranks, of which the test looks at one.
class Channels {
 public:
  explicit Channels(int self, NcclMode mode = {}, const std::string& role = "unshard")
      : device(devices_[self]), collectives(channels_[self]) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        NcclOwnerCollectives::Setting setting;
        setting.api = devices_[rank].api;
        setting.store = store_;
        setting.rank = rank;
        setting.size = kRanks;
        setting.group = "g";
        setting.role = role;
        setting.device = c10::DeviceType::CPU;
        setting.mode = mode;
        setting.timeout = std::chrono::seconds(20);
        channels_[rank] = std::make_shared<NcclOwnerCollectives>(setting);
      });
    }
    for (auto& thread : threads) thread.join();
    set_up = device.take();
    device.begin();
  }
  ~Channels() {
    for (auto& one : devices_) one.release();
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  Device devices_[kRanks];
  std::shared_ptr<OwnerChannel> channels_[kRanks];

 public:
  Device& device;
  std::shared_ptr<OwnerChannel>& collectives;
  Log set_up;
};

// What every operation begins and ends with: e0 is the inputs' event, e1 the beginning, e2 the end.
Log framed(const Log& inner) {
  Log all{"record e0 on caller", "side waits for e0", "record e1 on side"};
  all.insert(all.end(), inner.begin(), inner.end());
  all.push_back("record e2 on side");
  return all;
}

Tensors floats(Device& device, const std::string& name, const std::vector<int64_t>& sizes) {
  Tensors tensors;
  for (size_t i = 0; i < sizes.size(); ++i) {
    tensors.push_back(device.know(c10::str(name, i), at::zeros({sizes[i]}, at::kFloat)));
  }
  return tensors;
}

TEST(NcclSequence, settingUpConnectsAllRanksAndTriesEveryKindOfCall) {
  Channels normal(0, {}, "publish");
  EXPECT_THAT(
      normal.set_up,
      ElementsAre("newStream normal", "commInit id rank 0 of 4", "s0 = empty x4 Float",
                  "s1 = empty x4 Float", "enqueue on side", "groupStart",
                  "reduce s0 -> s1 x1 Float root 0", "broadcast s0 -> s1 x1 Float root 0",
                  "groupEnd", "groupStart", "reduceScatter s0 -> s1 x1 Float", "groupEnd",
                  "groupStart", "allGather s0 -> s1 x1 Float", "groupEnd", HasSubstr("record")));
  Channels urgent(1, {.deterministic = true}, "reduce");
  EXPECT_EQ(urgent.set_up[0], "newStream high");
  EXPECT_THAT(urgent.set_up,
              ::testing::IsSupersetOf({"send s0 x1 Float to 0", "recv s1 x1 Float from 0",
                                       "send s0+12 x1 Float to 3"}));
}

TEST(NcclSequence, oneOwnerIsOneReduce) {
  for (int self : {1, 2}) {
    Channels four(self);
    const Tensors in = floats(four.device, "in", {3, 5});
    const Tensors out = floats(four.device, "out", {3, 5});
    OwnerOptions options;
    options.divisor = 4;
    auto work = four.collectives->reduceToOwners(in, out, {2, 2}, options);
    if (self == 2) {
      EXPECT_EQ(
          four.device.take(),
          framed({"s0 = empty x32 Byte", "enqueue on side", "s1 = empty x32 Byte", "groupStart",
                  "reduce s0 -> s1 x8 Float root 2", "groupEnd", "enqueue on side"}));
    } else {
      EXPECT_EQ(four.device.take(), framed({"s0 = empty x32 Byte", "enqueue on side", "groupStart",
                                            "reduce s0 -> nothing x8 Float root 2", "groupEnd"}));
    }
    work->wait();
    EXPECT_THAT(four.device.take(), ElementsAre("caller waits for e2"));  // and not the host
    EXPECT_THAT(four.device.ranges,
                ElementsAre(HasSubstr("reduce_to_owners on group 'g/unshard'")));
  }
}

TEST(NcclSequence, sumsLandInTheOutputWhereNothingIsLeftToDo) {
  Channels four(2);
  const at::Tensor in = four.device.know("in", at::zeros({8}, at::kFloat));
  const at::Tensor out = four.device.know("out", at::zeros({8}, at::kFloat));
  four.collectives->reduceToOwners({in.narrow(0, 0, 3), in.narrow(0, 3, 5)},
                                   {out.narrow(0, 0, 3), out.narrow(0, 3, 5)}, {2, 2});
  EXPECT_EQ(four.device.take(),
            framed({"groupStart", "reduce in -> out x8 Float root 2", "groupEnd"}));
}

TEST(NcclSequence, evenOwnersAreOneReduceScatter) {
  Channels four(1);
  const Tensors in = floats(four.device, "in", {8, 8, 8, 8});
  const Tensors out = floats(four.device, "out", {8, 8, 8, 8});
  four.collectives->reduceToOwners(in, out, {0, 1, 2, 3});
  EXPECT_EQ(four.device.take(), framed({"s0 = empty x128 Byte", "enqueue on side", "groupStart",
                                        "reduceScatter s0 -> out1 x8 Float", "groupEnd"}));
}

TEST(NcclSequence, almostEvenOwnersArePaddedUpToTheRule) {
  Channels four(1);
  // 4 * 32 bytes against 1.15 * 116.
  const Tensors in = floats(four.device, "in", {8, 7, 7, 7});
  four.collectives->reduceToOwners(in, in, {0, 1, 2, 3});
  EXPECT_EQ(four.device.take(),
            framed({"s0 = empty x128 Byte", "enqueue on side", "groupStart",
                    "reduceScatter s0 -> s0+32 x8 Float", "groupEnd", "enqueue on side"}));
  four.device.begin();
  // 4 * 32 against 1.15 * 108: no longer.
  const Tensors more = floats(four.device, "more", {8, 7, 6, 6});
  four.collectives->reduceToOwners(more, more, {0, 1, 2, 3});
  EXPECT_EQ(four.device.take(), framed({"groupStart", "reduce more0 -> nothing x8 Float root 0",
                                        "reduce more1 -> more1 x7 Float root 1",
                                        "reduce more2 -> nothing x6 Float root 2",
                                        "reduce more3 -> nothing x6 Float root 3", "groupEnd"}));
}

TEST(NcclSequence, aFlatBufferOfEvenBlocksIsUsedInPlace) {
  Channels four(1);
  const at::Tensor flat = four.device.know("flat", at::zeros({32}, at::kFloat));
  Tensors views;
  for (int i = 0; i < 4; ++i) views.push_back(flat.narrow(0, 8 * i, 8));
  four.collectives->reduceToOwners(views, views, {0, 1, 2, 3});
  EXPECT_EQ(four.device.take(),
            framed({"groupStart", "reduceScatter flat -> flat+32 x8 Float", "groupEnd"}));
  four.device.begin();
  four.collectives->broadcastFromOwners(views, {0, 1, 2, 3});
  EXPECT_EQ(four.device.take(),
            framed({"groupStart", "allGather flat+32 -> flat x32 Byte", "groupEnd"}));
}

TEST(NcclSequence, skewedOwnersAreOneGroupOfBroadcasts) {
  Channels four(3);
  const Tensors t = floats(four.device, "t", {100, 50, 3, 4});
  four.collectives->broadcastFromOwners(t, {0, 0, 3, 3});
  EXPECT_EQ(four.device.take(),
            framed({"s0 = empty x32 Byte", "enqueue on side", "s1 = empty x600 Byte", "groupStart",
                    "broadcast s1 -> s1 x600 Byte root 0", "broadcast s0 -> s0 x28 Byte root 3",
                    "groupEnd", "enqueue on side"}));
}

TEST(NcclSequence, everyDtypeOfAReductionHasItsOwnCall) {
  Channels four(0);
  Tensors t{at::zeros({4}, at::kBFloat16), at::zeros({2}, at::kDouble), at::zeros({3}, at::kFloat),
            at::zeros({5}, at::kHalf), at::zeros({0}, at::kHalf)};
  for (size_t i = 0; i < t.size(); ++i) four.device.know(c10::str("t", i), t[i]);
  four.collectives->reduceToOwners(t, t, {1, 1, 1, 1, 2});
  EXPECT_EQ(four.device.take(),
            framed({"groupStart", "reduce t1 -> nothing x2 Double root 1",
                    "reduce t2 -> nothing x3 Float root 1", "reduce t3 -> nothing x5 Half root 1",
                    "reduce t0 -> nothing x4 BFloat16 root 1", "groupEnd"}));
  four.device.begin();
  four.collectives->broadcastFromOwners(t, {1, 1, 1, 1, 2});  // as bytes, together
  EXPECT_EQ(four.device.take(),
            framed({"s0 = empty x46 Byte", "groupStart", "broadcast s0 -> s0 x46 Byte root 1",
                    "groupEnd", "enqueue on side"}));
}

TEST(NcclSequence, noElementsMakeNoCalls) {
  Channels four(0);
  const Tensors t{at::zeros({0, 3}, at::kFloat), at::zeros({0}, at::kHalf)};
  four.collectives->reduceToOwners(t, t, {0, 1});
  EXPECT_EQ(four.device.take(), framed({}));
  four.device.begin();
  four.collectives->broadcastFromOwners({}, {});
  EXPECT_EQ(four.device.take(), framed({}));
}

TEST(NcclSequence, deterministicSumsAreSentToTheirOwner) {
  Channels four(1, {.deterministic = true});
  const Tensors t = floats(four.device, "t", {8, 4, 2, 6});
  four.collectives->reduceToOwners(t, t, {0, 1, 2, 3});
  EXPECT_EQ(four.device.take(),
            framed({"s0 = empty x48 Byte", "groupStart", "send t0 x32 Byte to 0",
                    "recv s0 x16 Byte from 0", "send t2 x8 Byte to 2", "recv s0+16 x16 Byte from 2",
                    "send t3 x24 Byte to 3", "recv s0+32 x16 Byte from 3", "groupEnd",
                    "enqueue on side"}));
}

TEST(NcclSequence, fp32AccumulationConcernsHalfPrecisionOnly) {
  Channels four(0, {.fp32_accumulation = true});
  Tensors t{four.device.know("t0", at::zeros({4}, at::kFloat)),
            four.device.know("t1", at::zeros({6}, at::kHalf))};
  four.collectives->reduceToOwners(t, t, {2, 2});
  EXPECT_EQ(four.device.take(), framed({"groupStart", "send t1 x12 Byte to 2",
                                        "reduce t0 -> nothing x4 Float root 2", "groupEnd"}));
}

TEST(NcclSequence, flagsTravelInTheSameGroup) {
  Channels four(0);
  const Tensors t = floats(four.device, "t", {4});
  OwnerOptions options;
  options.flags = {5, 0, 2};
  auto work = four.collectives->reduceToOwners(t, t, {3}, options);
  EXPECT_EQ(four.device.take(),
            framed({"s0 = empty x3 Byte", "enqueue on side", "s1 = empty x12 Byte", "groupStart",
                    "reduce t0 -> nothing x4 Float root 3", "allGather s0 -> s1 x3 Byte",
                    "groupEnd", "enqueue on side"}));
  EXPECT_EQ(work->flags().size(), 3u);
  EXPECT_THAT(four.device.take(), ElementsAre("host waits for e2"));
}

TEST(NcclSequence, anOperationOnTheDeviceIsWaitedForByTheStreamAlone) {
  Channels four(0);
  const Tensors t = floats(four.device, "t", {4});
  OwnerOptions options;
  options.flags = {1};
  auto one = four.collectives->reduceToOwners(t, t, {3}, options);
  four.device.take();
  options.flags = {};
  options.inputs_from = one;
  options.inputs_at = {0};
  auto two = four.collectives->reduceToOwners(t, t, {2}, options);
  EXPECT_THAT(four.device.take(),
              ElementsAre("record e3 on caller", "side waits for e3", "side waits for e2",
                          "record e4 on side", "s2 = empty x4 Byte", "enqueue on side",
                          "s3 = empty x16 Byte", "groupStart",
                          "reduce t0 -> nothing x4 Float root 2", "allGather s2 -> s3 x4 Byte",
                          "groupEnd", "enqueue on side", "record e5 on side"));
  EXPECT_EQ(two->flags().size(), 1u);
}

TEST(NcclSequence, whatIsRefusedReachesNeitherStreamNorNccl) {
  Channels four(0);
  const Tensors strided{at::zeros({4, 2}).t()};
  try {
    four.collectives->reduceToOwners(strided, strided, {1});
    FAIL() << "accepted";
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what(), HasSubstr("operation 0: input 0 (Float[2, 4] with strides [1, 2])"));
    EXPECT_THAT(error.what(), HasSubstr("DMUON_DEBUG=1"));
  }
  EXPECT_THAT(four.device.take(), IsEmpty());
  const Tensors t = floats(four.device, "t", {4});
  EXPECT_NO_THROW(four.collectives->reduceToOwners(t, t, {1})->wait());
}

TEST(NcclSequence, inputsAndOutputsLiveUntilTheStreamIsOrderedAfterTheEnd) {
  Channels four(0);
  four.device.stuck = true;
  at::Tensor in = at::zeros({4}), out = at::zeros({4});
  const auto users = [](const at::Tensor& tensor) { return tensor.storage().use_count(); };
  const auto before = users(in);
  auto work = four.collectives->reduceToOwners({in}, {out}, {0});
  EXPECT_GT(users(in), before);
  work->synchronize();
  EXPECT_EQ(users(in), before);
}

// Ends with the communicator aborted, the Work failed with `text`, and the group unusable.
void expectFailed(Channels& four, const OwnerWorkPtr& work, const std::string& text) {
  for (int i = 0; i < 1000 && !work->isCompleted(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ASSERT_TRUE(work->isCompleted());
  EXPECT_FALSE(work->isSuccess());
  const auto textOf = [](const OwnerWorkPtr& one) {
    try {
      one->wait();
    } catch (const c10::DistBackendError& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string("no error");
  };
  EXPECT_THAT(textOf(work), HasSubstr(text));
  EXPECT_THAT(textOf(work),
              HasSubstr("reduce_to_owners on group 'g/unshard' rank 0 of 4, operation 0 'u'"));
  four.collectives->drain();
  const Log log = four.device.take();
  EXPECT_EQ(std::count(log.begin(), log.end(), "commAbort"), 1);
  const Tensors t{at::zeros({4})};
  auto next = four.collectives->reduceToOwners(t, t, {1});
  EXPECT_TRUE(next->isCompleted());
  EXPECT_THAT(textOf(next), HasSubstr("operation 1: the group is unusable"));
  EXPECT_THAT(textOf(next), HasSubstr(text));
  EXPECT_THAT(four.device.take(), IsEmpty());
}

OwnerWorkPtr stuckOperation(Channels& four, std::chrono::milliseconds timeout) {
  const Tensors t{at::zeros({4})};
  OwnerOptions options;
  options.label = "u";
  options.timeout = timeout;
  four.device.stuck = true;
  return four.collectives->reduceToOwners(t, t, {1}, options);
}

TEST(NcclSequence, anAsynchronousErrorAbortsTheCommunicator) {
  Channels four(0);
  auto work = stuckOperation(four, std::chrono::seconds(20));
  EXPECT_FALSE(work->isCompleted());
  {
    std::lock_guard<std::mutex> lock(four.device.mutex);
    four.device.nccl_error = "remote process exited";
  }
  expectFailed(four, work, "NCCL reports: remote process exited");
}

TEST(NcclSequence, aTimeOutAbortsTheCommunicatorAndNamesWhoDidNotComeAlong) {
  Channels four(0);
  auto work = stuckOperation(four, std::chrono::milliseconds(300));
  expectFailed(four, work, "ranks 1, 2 and 3 did not take part within 300 ms");
}

TEST(NcclSequence, anErrorOfACallFailsTheOperationAndTheGroup) {
  Channels four(0);
  EXPECT_CALL(*four.device.api, groupEnd()).WillOnce([] {
    throw NcclError("ncclGroupEnd: unhandled cuda error");
  });
  const Tensors t{at::zeros({4})};
  OwnerOptions options;
  options.label = "u";
  auto work = four.collectives->reduceToOwners(t, t, {1}, options);
  expectFailed(four, work, "ncclGroupEnd: unhandled cuda error");
}

TEST(NcclSequence, anOrderlyEndFinalizesAndDestroys) {
  Channels four(0);
  const Tensors t{at::zeros({4})};
  four.collectives->reduceToOwners(t, t, {1})->wait();
  four.device.take();
  four.collectives->shutdown();
  EXPECT_THAT(four.device.take(), ElementsAre("commFinalize", "commDestroy"));
  four.collectives.reset();
  EXPECT_THAT(four.device.take(), IsEmpty());
}

}  // namespace
}  // namespace dmuon
