// Ranks that do not ask for the same, or for something impossible: an error everywhere, with the
// values, nothing changed, and the group goes on.
// transports: all
#include <ATen/ops/zeros.h>

#include <dmuon/backend/factory.h>

#include "backend_cases.h"
#include "ranks.h"

namespace dmuon {
namespace {

using namespace dmuon::testing;

constexpr int kSize = 3;
constexpr int kOdd = 1;  // the rank that asks for something else

std::shared_ptr<OwnerCollectives> makeGroup(const Store& store, int rank) {
  return createProcessGroup(store, rank, kSize, std::chrono::seconds(20), "shard")
      ->ownerCollectives(at::kCPU);
}

// What a rank asks for, and may ask for differently.
struct Request {
  Tensors inputs;
  Tensors outputs;
  std::vector<int64_t> owners{0, 1, 2};
  OwnerOptions options;
  bool broadcast = false;

  explicit Request(int rank) {
    for (int i = 0; i < kSize; ++i) {
      inputs.push_back(makeData(rank, i, {4, 8}, at::kFloat));
      outputs.push_back(makeData(rank, 10 + i, {4, 8}, at::kFloat));
    }
    options.label = "unit 7";
  }
  OwnerWorkPtr submit(OwnerCollectives& group) const {
    return broadcast ? group.broadcastFromOwners(inputs, owners, options)
                     : group.reduceToOwners(inputs, outputs, owners, options);
  }
};

Tensors clones(const Tensors& tensors) {
  Tensors copies;
  for (const at::Tensor& t : tensors) copies.push_back(t.defined() && t.is_cpu() ? t.clone() : t);
  return copies;
}

void expectUnchanged(const Tensors& now, const Tensors& before) {
  for (size_t i = 0; i < now.size(); ++i) {
    if (now[i].defined() && now[i].is_cpu()) expectSame(now[i], before[i], "not changed");
  }
}

// The odd rank's request differs by `change`; every rank's Work fails with all of `parts`.
void expectDisagreement(const std::function<void(Request&)>& change,
                        const std::vector<std::string>& parts) {
  runRanks(kSize, [&](int rank, const Store& store) {
    auto group = makeGroup(store, rank);
    for (bool broadcast : {false, true}) {
      Request request(rank);
      request.broadcast = broadcast;
      if (rank == kOdd) change(request);
      const Tensors inputs = clones(request.inputs), outputs = clones(request.outputs);
      auto work = request.submit(*group);
      std::vector<std::string> expected = parts;
      expected.push_back(request.broadcast ? "broadcast_from_owners" : "reduce_to_owners");
      expected.push_back("on group 'shard' rank " + std::to_string(rank) + " of 3, operation " +
                         std::to_string(broadcast ? 2 : 0));
      expectError([&] { work->wait(); }, expected);
      EXPECT_FALSE(work->isSuccess());
      EXPECT_NE(work->exception(), nullptr);
      EXPECT_TRUE(work->getFuture()->hasError());
      expectUnchanged(request.inputs, inputs);
      expectUnchanged(request.outputs, outputs);
      expectUsable(*group);
    }
  });
}

TEST(Disagreement, aShapeThatDiffersIsNamed) {
  expectDisagreement(
      [](Request& r) {
        r.inputs[2] = r.outputs[2] = at::zeros({4, 9}, at::kFloat);
      },
      {"tensor 2 is Float[4, 8] owned by rank 2 on ranks 0 and 2, Float[4, 9] owned by rank 2 on "
       "rank 1"});
}

TEST(Disagreement, aDtypeThatDiffersIsNamed) {
  expectDisagreement(
      [](Request& r) {
        r.inputs[0] = r.outputs[0] = at::zeros({4, 8}, at::kDouble);
      },
      {"tensor 0 is Float[4, 8] owned by rank 0 on ranks 0 and 2, Double[4, 8] owned by rank 0 on "
       "rank 1"});
}

TEST(Disagreement, anOwnerThatDiffersIsNamed) {
  expectDisagreement([](Request& r) { r.owners[1] = 2; },
                     {"tensor 1 is Float[4, 8] owned by rank 1 on ranks 0 and 2, Float[4, 8] owned "
                      "by rank 2 on rank 1"});
}

TEST(Disagreement, aCountThatDiffersIsNamed) {
  expectDisagreement(
      [](Request& r) {
        r.inputs.pop_back();
        r.outputs.pop_back();
        r.owners.pop_back();
      },
      {"the number of tensors is 3 on ranks 0 and 2, 2 on rank 1"});
}

TEST(Disagreement, aLabelThatDiffersIsNamed) {
  expectDisagreement([](Request& r) { r.options.label = "unit 8"; },
                     {"the label is 'unit 7' on ranks 0 and 2, 'unit 8' on rank 1"});
}

TEST(Disagreement, aDivisorThatDiffersIsNamed) {
  expectDisagreement([](Request& r) { r.options.divisor = 3; },
                     {"the divisor is 1 on ranks 0 and 2, 3 on rank 1"});
}

TEST(Disagreement, anOperationThatDiffersIsNamed) {
  expectDisagreement(
      [](Request& r) { r.broadcast = !r.broadcast; },
      {"the operation is", "reduce_to_owners on rank", "broadcast_from_owners on rank"});
}

TEST(Disagreement, flagsAndTextThatDifferAreNamed) {
  expectDisagreement([](Request& r) { r.options.flags = {1}; },
                     {"the number of flag bytes is 0 on ranks 0 and 2, 1 on rank 1"});
  expectDisagreement([](Request& r) { r.options.must_match = "x"; },
                     {"of what must match, line 1 is missing on ranks 0 and 2, 'x' on rank 1"});
}

// The odd rank's request is impossible: submitting it throws there, and the other ranks' Works fail
// with the same text.
void expectRefusal(const std::function<void(Request&)>& change,
                   const std::vector<std::string>& parts, bool broadcast_too = true) {
  runRanks(kSize, [&](int rank, const Store& store) {
    auto group = makeGroup(store, rank);
    for (bool broadcast : {false, true}) {
      if (broadcast && !broadcast_too) continue;
      Request request(rank);
      request.broadcast = broadcast;
      if (rank == kOdd) change(request);
      const Tensors inputs = clones(request.inputs), outputs = clones(request.outputs);
      std::vector<std::string> expected = parts;
      expected.push_back("'unit 7'");
      expected.push_back("rank " + std::to_string(rank) + " of 3");
      if (rank == kOdd) {
        EXPECT_THROW(request.submit(*group), c10::Error);  // counts as one operation
        expectError([&] { request.submit(*group); }, expected);
      } else {
        expected.push_back("rank 1 cannot take part");
        for (int i = 0; i < 2; ++i) {
          auto work = request.submit(*group);
          expectError([&] { work->wait(); }, expected);
        }
      }
      expectUnchanged(request.inputs, inputs);
      expectUnchanged(request.outputs, outputs);
      expectUsable(*group);
    }
  });
}

TEST(Refusal, anOwnerOutOfRange) {
  expectRefusal([](Request& r) { r.owners[2] = 3; },
                {"owner 3 of tensor 2 is out of range: the group's ranks are 0 to 2"});
  expectRefusal([](Request& r) { r.owners[0] = -1; }, {"owner -1 of tensor 0 is out of range"});
}

TEST(Refusal, aDtypeThatCannotBeSummed) {
  expectRefusal(
      [](Request& r) {
        r.inputs[1] = at::zeros({4, 8}, at::kLong);
      },
      {"input 1 (Long[4, 8]) cannot be summed"}, false);
}

TEST(Refusal, aStridedTensor) {
  expectRefusal(
      [](Request& r) {
        r.inputs[1] = at::zeros({8, 4}).t();
      },
      {" 1 (Float[4, 8] with strides [1, 4]) is not contiguous"});
}

TEST(Refusal, listsOfDifferentLength) {
  expectRefusal([](Request& r) { r.owners.pop_back(); }, {"there are 3 tensors but 2 owners"});
  expectRefusal([](Request& r) { r.outputs.pop_back(); }, {"there are 3 tensors but 2 outputs"},
                false);
}

TEST(Refusal, anOutputThatDoesNotFitOnItsOwner) {
  expectRefusal(
      [](Request& r) {
        r.outputs[1] = at::zeros({8, 4});
      },
      {"output 1 is Float[8, 4], but its input is Float[4, 8]"}, false);
  expectRefusal(
      [](Request& r) {
        r.outputs[1] = at::zeros({4, 8}, at::kHalf);
      },
      {"output 1 is Half[4, 8], but a sum of Float is stored as Float or Float"}, false);
  expectRefusal([](Request& r) { r.outputs[1] = at::Tensor(); }, {"output 1 is undefined"}, false);
  expectRefusal(
      [](Request& r) {
        r.outputs[1] = at::zeros({8, 4}).t();
      },
      {"output 1 (Float[4, 8] with strides [1, 4]) is not contiguous"}, false);
}

TEST(Refusal, anOutputElsewhereIsNotLookedAt) {
  runRanks(kSize, [](int rank, const Store& store) {
    auto group = makeGroup(store, rank);
    Tensors in{makeData(rank, 0, {5}, at::kFloat)};
    Tensors out{rank == 2 ? at::empty({5}) : at::zeros({3, 3}, at::kLong).t()};
    group->reduceToOwners(in, out, {2})->wait();
    if (rank == 2) {
      expectSame(out[0], serialSum({0, 1, 2}, 0, {5}, at::kFloat, at::kFloat, 1), "sum");
    } else {
      expectSame(out[0], at::zeros({3, 3}, at::kLong), "not the owner's");
    }
  });
}

TEST(Refusal, anUndefinedTensor) {
  expectRefusal([](Request& r) { r.inputs[0] = at::Tensor(); }, {" 0 is undefined"});
}

// A tensor that says it lives on a GPU: no CUDA is needed to refuse it.
at::Tensor cudaTensor() {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 128,
                       c10::DataPtr(nullptr, c10::Device(c10::kCUDA, 0)), nullptr, false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      caffe2::TypeMeta::Make<float>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({4, 8});
  return tensor;
}

TEST(Refusal, aTensorOnADeviceWithoutOwnerCollectives) {
  expectRefusal(
      [](Request& r) { r.inputs[0] = cudaTensor(); },
      {" 0 (Float[4, 8]) is on cuda:0, but this group's owner collectives move cpu tensors "
       "only"});
  expectRefusal(
      [](Request& r) {
        r.inputs[0] = at::zeros({4, 8}, at::TensorOptions(at::kMeta));
      },
      {" 0 (Float[4, 8]) is on meta"});
}

TEST(Refusal, optionsThatMakeNoSense) {
  expectRefusal([](Request& r) { r.options.divisor = 0; }, {"the divisor is 0"});
  expectRefusal([](Request& r) { r.options.divisor = std::nan(""); }, {"the divisor is nan"});
  expectRefusal([](Request& r) { r.options.timeout = std::chrono::milliseconds(-5); },
                {"the time-out is -5 ms"});
  expectRefusal([](Request& r) { r.options.flags.resize(70000); }, {"there are 70000 flag bytes"});
}

TEST(Refusal, groupsOfOneRankRefuseTheSame) {
  runRanks(1, [](int rank, const Store& store) {
    auto group = createProcessGroup(store, rank, 1)->ownerCollectives(at::kCPU);
    Tensors t{at::zeros({2})};
    expectError([&] { group->reduceToOwners(t, t, {1}); }, {"owner 1 of tensor 0 is out of range"});
    expectUsable(*group);
  });
}

TEST(Refusal, groupsWithoutABackendForADeviceSayWhatTheyHave) {
  runRanks(1, [](int rank, const Store& store) {
    auto group = createProcessGroup(store, rank, 1, std::chrono::seconds(5), "g");
    expectError([&] { group->ownerCollectives(at::kCUDA); },
                {"group 'g'", "for cuda", "The group has inner backends for cpu"});
  });
}

TEST(Refusal, anOperationAfterAFailedOneFailsOnAllRanks) {
  runRanks(kSize, [](int rank, const Store& store) {
    auto group = makeGroup(store, rank);
    auto other = createProcessGroup(c10::make_intrusive<c10d::PrefixStore>("other", store), rank,
                                    kSize, std::chrono::seconds(20), "other")
                     ->ownerCollectives(at::kCPU);
    OwnerOptions differing;
    differing.label = std::to_string(rank);
    auto failing = other->broadcastFromOwners({}, {}, differing);
    Request request(rank);
    const Tensors outputs = clones(request.outputs);
    if (rank == 0) request.options.after = failing;  // on one rank only: the others hear of it
    auto work = request.submit(*group);
    expectError([&] { work->wait(); },
                {"rank 0 cannot take part: the operation that it was to come after has failed",
                 "on group 'other'", "the label is '0' on rank 0, '1' on rank 1, '2' on rank 2"});
    expectUnchanged(request.outputs, outputs);
    expectUsable(*group);
    expectUsable(*other);
  });
}

}  // namespace
}  // namespace dmuon
