// What the ranks of a group must agree on before an owner collective moves data, and the words for
// a disagreement. No tensors, no communication: exchange.cpp sends these structures around.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "block_layout.h"

namespace dmuon {

enum class OwnerOp : uint8_t { reduce = 1, broadcast = 2 };

// "reduce_to_owners" or "broadcast_from_owners".
const char* toString(OwnerOp op);

// An operation as one rank asked for it.
struct Proposal {
  OwnerOp op = OwnerOp::reduce;
  std::string role;  // of the channel it is submitted on
  std::string label;
  double divisor = 1.0;
  uint32_t flag_bytes = 0;
  std::vector<TensorSpec> tensors;
  std::string must_match;  // lines of text
};

// "Float[4, 8]".
std::string shapeText(const TensorSpec& tensor);

std::string encode(const Proposal& proposal);
// Throws c10::Error if `bytes` is not what encode() wrote.
Proposal decode(std::string_view bytes);

// The first thing the proposals, one per rank, differ in, with each value and the ranks that have
// it: "tensor 3 is Float[4, 8] owned by rank 1 on ranks 0, 1 and 3, Float[4, 9] owned by ... on
// rank 2". Nothing if they are equal.
std::optional<std::string> firstDifference(const std::vector<Proposal>& proposals);

enum class RankState : uint8_t {
  ready = 1,    // wants the operation it describes
  refuses = 2,  // cannot take part; its text says why. The group goes on.
  leaves = 3,   // takes part in nothing from here on; its text says why
};

// Flags up to this many bytes ride inside the header; longer ones cost a message of their own.
constexpr size_t kInlineFlagBytes = 32;

// The fixed-size message every rank sends to every other at the start of an operation.
struct Header {
  uint32_t magic = kMagic;
  RankState state = RankState::ready;
  OwnerOp op = OwnerOp::reduce;
  uint16_t flag_bytes = 0;
  uint64_t seq = 0;
  uint64_t hash = 0;        // of the encoded proposal
  uint64_t text_bytes = 0;  // of the encoded proposal, or of the reason for not being ready
  std::array<uint8_t, kInlineFlagBytes> flags{};

  static constexpr uint32_t kMagic = 0x4f754d64;
  bool agreesWith(const Header& other) const;
};
static_assert(sizeof(Header) == 64);

// FNV-1a.
uint64_t hashBytes(std::string_view bytes);

// "rank 2", "ranks 0 and 2", "ranks 0, 1 and 3".
std::string rankList(const std::vector<int>& ranks);

}  // namespace dmuon
