// Which calls an owner collective becomes on NCCL: a pure function of what the ranks agree on, so
// that all ranks make the same calls in the same order.
//
// NCCL's calls are typed and one call has one root, and a group of many small calls is slow. So
// tensors are packed per owner, and an operation becomes a few segments:
//   reduction  one segment per dtype; but tensors whose sum must not be NCCL's (see NcclMode) are
//   one
//              segment of bytes together
//   broadcast  one segment of bytes
// and each segment one of three things, all in one NCCL group:
//   padded     every rank's block padded to the largest: one reduce-scatter or all-gather, the
//              fastest that NCCL has; where padding adds at most 15 %
//   per_owner  one reduce or broadcast per owner that has a block
//   to_owner   every rank's contribution is sent to the owner, which adds up in rank order
#pragma once

#include <vector>

#include "block_layout.h"

namespace dmuon {

struct NcclMode {
  // Sums run over ranks 0 to N-1 in that order, in the accumulation type: bit for bit those of the
  // CPU transports. Memory at the owner: N times the bytes it owns.
  bool deterministic = false;
  // The same for fp16 and bf16 alone, which NCCL adds up in fp16 and bf16.
  bool fp32_accumulation = false;
  bool operator==(const NcclMode&) const = default;
  // With DMUON_NCCL_DETERMINISTIC and DMUON_NCCL_FP32_ACCUMULATION of the environment ("1", "0").
  NcclMode withEnvironment() const;
};

struct Segment {
  enum Route { padded, per_owner, to_owner } route = per_owner;
  c10::ScalarType type = c10::ScalarType::Byte;  // of the calls
  std::vector<size_t> positions;                 // in the operation's list of tensors
  std::vector<TensorSpec> tensors;               // those
  std::vector<Block> blocks;                     // by owner; positions within `tensors`
  int64_t slot = 0;                              // padded: bytes per rank
};

std::vector<Segment> planReduce(const std::vector<TensorSpec>& tensors, int size,
                                const NcclMode& mode);
std::vector<Segment> planBroadcast(const std::vector<TensorSpec>& tensors, int size);

// Blocks in scratch memory, and padded ones, begin at multiples of this.
constexpr int64_t kBlockAlignment = 16;
inline int64_t alignedBytes(int64_t bytes) {
  return (bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
}

// Tensors of one dtype that lie one after the other in a block.
struct Run {
  c10::ScalarType type;
  int64_t offset = 0;  // in bytes
  int64_t numel = 0;
};
std::vector<Run> runsOf(const Block& block, const std::vector<TensorSpec>& tensors);

}  // namespace dmuon
