// Owner-aware collectives: many tensors, each with its own owner rank, in one fused asynchronous
// operation.
//
//   reduceToOwners      every tensor is summed over the ranks onto its owner
//   broadcastFromOwners every tensor is copied from its owner to all ranks
//
// Order. Like every collective, operations on one group must be submitted in the same order on all
// ranks. They do not order against, and may overlap, ordinary collectives of the same group.
//
// Agreement. Before any payload moves, the ranks compare operation, sequence number, label, shapes,
// dtypes, owners and divisor. If they differ, the operation fails on every rank with an error that
// names the ranks and both values; nothing has been changed and the group stays usable.
//
// Memory. Inputs and outputs are kept alive until the returned Work completes. Inputs must not be
// written, and outputs must be neither read nor written, before then. A reduction never writes to a
// tensor on a rank that does not own it. Payload moves in pieces, so scratch is bounded. Over UCX,
// between processes of one host: a pool of 8 MiB per process in shared memory, for all groups
// (DMUON_POOL_SLOTS), from which receivers sum and copy. Otherwise, while an operation runs:
// 1 MiB per peer to receive a reduction (beyond 17 ranks 16 MiB for all, but at least 128 KiB
// for each; over Gloo 4 MiB per peer), and as much again for small tensors that are packed; a
// broadcast of large tensors needs none.
//
// Numerics. The sum runs over ranks 0, 1, ..., N-1 in that order, always; fp16, bf16 and fp32 are
// accumulated in fp32, fp64 in fp64. The sum is divided by the divisor once, at the owner, in the
// accumulation type, and rounded once to the output's dtype.
//
// Threads. Submitting is thread-safe, but the order across ranks is the caller's business. Work
// completes on a thread of the group, which never takes Python's GIL. A group that has run an
// operation has a thread, over Gloo two; before that, or with one rank, none. UCX has one more for
// the whole process.
//
// Errors. Bad arguments that this rank alone can see (an owner out of range, an unsupported dtype,
// a strided tensor, a device without a transport) throw c10::ValueError at submission *after* the
// operation has been reported as invalid to the other ranks, whose Works then fail with this
// rank's message: no rank is left waiting. A peer that does not take part within the time-out
// fails the Work with operation, group, sequence number, label and the missing rank; so does one
// that has gone. The group is unusable from then on: every rank of it hears why, in the operations
// it has pending and in those it submits later, whose Works have failed already when they are
// returned. The group's ordinary collectives go on as long as the connections are there.
//
// Forks. A process forked from the one that made a group cannot use it: submitting, and waiting for
// what was pending, throw at once. It may drop the group, or end in whatever way, which leaves the
// parent undisturbed.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <dmuon/backend/counters.h>

namespace dmuon {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Completion of one owner collective. wait() blocks the host (CPU tensors) and rethrows errors.
class OwnerWork : public c10d::Work {
 public:
  using c10d::Work::Work;
  // Bitwise OR over all ranks of OwnerOptions::flags. Valid once completed successfully.
  virtual std::vector<uint8_t> flags() = 0;
};
using OwnerWorkPtr = c10::intrusive_ptr<OwnerWork>;

struct OwnerOptions {
  // Reductions only: the sum is divided by this at the owner. N (the group's size) gives the mean.
  double divisor = 1.0;
  // How long to wait for a peer, from the moment this operation is the group's next. An operation
  // with `after` or `inputs_from` allows twice as long, since its peers may be held back as well.
  // Zero means the group's own time-out.
  std::chrono::milliseconds timeout{0};
  // Inputs are read only after this has completed; if it failed, so does this operation, on every
  // rank. It may belong to another group. A Work of cpu tensors.
  WorkPtr after;
  // The operation that makes the inputs, usually on another group. This one starts when the ranks
  // of that one have agreed, moves each piece as soon as it has been made there, takes over the
  // flags (OR-ed into `flags`), and fails on every rank if that one fails.
  OwnerWorkPtr inputs_from;
  // inputs_from's output that input i is, or -1 for one that is there already. Empty: wait for all
  // of inputs_from.
  std::vector<int64_t> inputs_at;
  // Names the operation in errors, e.g. the unit. Must be equal on all ranks.
  std::string label;
  // A few bytes that ride along and are OR-ed over the ranks. The same length on all ranks; up to
  // 32 bytes are free, more cost a small message per peer.
  std::vector<uint8_t> flags;
  // Lines of text that must be equal on all ranks, for what the tensor list does not say (the mesh
  // forms put the tensors of other columns here). The first line that differs is named in the
  // error.
  std::string must_match;
};

class OwnerCollectives {
 public:
  virtual ~OwnerCollectives() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& groupName() const = 0;
  // Where the tensors of all operations are.
  virtual c10::Device device() const { return c10::DeviceType::CPU; }

  // inputs[i]: contiguous, the same shape and dtype on all ranks; fp16, bf16, fp32 or fp64; zero
  //   elements allowed. owners[i]: the group rank that receives the sum.
  // outputs[i]: looked at on the owner only (elsewhere it may be an undefined tensor): contiguous,
  //   the input's shape, and the input's dtype or the accumulation dtype. May be the input itself.
  // The Work's result() and future hold the outputs, undefined where they were.
  virtual OwnerWorkPtr reduceToOwners(std::vector<at::Tensor> inputs,
                                      std::vector<at::Tensor> outputs, std::vector<int64_t> owners,
                                      OwnerOptions options = {}) = 0;

  // tensors[i]: contiguous, the same shape and dtype on all ranks, any dtype; read on its owner,
  //   overwritten everywhere else.
  virtual OwnerWorkPtr broadcastFromOwners(std::vector<at::Tensor> tensors,
                                           std::vector<int64_t> owners,
                                           OwnerOptions options = {}) = 0;

  virtual OwnerCounters counters() const = 0;

  // Blocks until everything submitted has completed or failed. For orderly shutdown.
  virtual void drain() = 0;
  // Fails everything pending and everything submitted later, here and on the peers, which are told
  // the reason. Does not block on peers.
  virtual void abort(const std::string& reason) = 0;
};

}  // namespace dmuon
