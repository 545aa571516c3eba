#include "nccl_plan.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace dmuon {
namespace {

// The largest owner's bytes times N may be at most this part of all bytes, in percent.
constexpr int64_t kPaddingPercent = 115;

bool paddingPays(const std::vector<Block>& blocks) {
  int64_t total = 0, largest = 0;
  for (const Block& block : blocks) {
    total += block.bytes;
    largest = std::max(largest, block.bytes);
  }
  return total > 0 &&
         largest * static_cast<int64_t>(blocks.size()) * 100 <= total * kPaddingPercent;
}

template <typename Take>
Segment segmentOf(const std::vector<TensorSpec>& tensors, int size, c10::ScalarType type,
                  Take&& take) {
  Segment segment;
  segment.type = type;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!take(tensors[i])) continue;
    segment.positions.push_back(i);
    segment.tensors.push_back(tensors[i]);
  }
  segment.blocks = layoutByOwner(segment.tensors, size);
  if (paddingPays(segment.blocks)) {
    segment.route = Segment::padded;
    for (const Block& block : segment.blocks) {
      segment.slot = std::max(segment.slot, alignedBytes(block.bytes));
    }
  }
  return segment;
}

bool isHalf(c10::ScalarType type) {
  return type == c10::ScalarType::Half || type == c10::ScalarType::BFloat16;
}

bool setInEnvironment(const char* name, bool otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? otherwise : std::string_view(value) != "0";
}

}  // namespace

NcclMode NcclMode::withEnvironment() const {
  return {setInEnvironment("DMUON_NCCL_DETERMINISTIC", deterministic),
          setInEnvironment("DMUON_NCCL_FP32_ACCUMULATION", fp32_accumulation)};
}

std::vector<Segment> planReduce(const std::vector<TensorSpec>& tensors, int size,
                                const NcclMode& mode) {
  const auto added_here = [&](const TensorSpec& tensor) {
    return mode.deterministic || (mode.fp32_accumulation && isHalf(tensor.dtype));
  };
  std::vector<Segment> segments;
  segments.push_back(segmentOf(tensors, size, c10::ScalarType::Byte, added_here));
  segments.back().route = Segment::to_owner;
  for (auto type : {c10::ScalarType::Double, c10::ScalarType::Float, c10::ScalarType::Half,
                    c10::ScalarType::BFloat16}) {
    segments.push_back(segmentOf(tensors, size, type, [&](const TensorSpec& tensor) {
      return tensor.dtype == type && !added_here(tensor);
    }));
  }
  std::erase_if(segments, [](const Segment& segment) { return segment.tensors.empty(); });
  return segments;
}

std::vector<Segment> planBroadcast(const std::vector<TensorSpec>& tensors, int size) {
  if (tensors.empty()) return {};
  return {segmentOf(tensors, size, c10::ScalarType::Byte, [](const TensorSpec&) { return true; })};
}

std::vector<Run> runsOf(const Block& block, const std::vector<TensorSpec>& tensors) {
  std::vector<Run> runs;
  for (size_t k = 0; k < block.tensors.size(); ++k) {
    const TensorSpec& tensor = tensors[block.tensors[k]];
    if (tensor.numel() == 0) continue;
    if (runs.empty() || runs.back().type != tensor.dtype) {
      runs.push_back({tensor.dtype, block.offsets[k], 0});
    }
    runs.back().numel += tensor.numel();
  }
  return runs;
}

}  // namespace dmuon
