// The arithmetic of reductions on the host: plain loops over raw memory, no tensors, no threads.
//
// fp16, bf16 and fp32 are accumulated in fp32, fp64 in fp64; every stored result is rounded once,
// to nearest even. Pointers must be aligned to their element type.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace dmuon {

// fp16, bf16, fp32, fp64.
bool isReducible(c10::ScalarType type);

// What sums of `type` are accumulated in. Precondition: isReducible(type).
c10::ScalarType accumulationType(c10::ScalarType type);

// Whether this processor has the vectors that the faster loops use.
bool canSumWide();

// out[i] = (blocks[0][i] + blocks[1][i] + ... + blocks[count - 1][i]) / divisor, added in this
// order. out_type is the blocks' type or its accumulation type. `out` may be exactly one of the
// blocks. `wide` chooses the loops, not the result.
void sumBlocks(c10::ScalarType type, const void* const* blocks, int count, int64_t numel,
               double divisor, c10::ScalarType out_type, void* out, bool wide = canSumWide());

// data[i] = data[i] * factor and data[i] = data[i] / divisor, computed in the accumulation type.
void multiplyInPlace(c10::ScalarType type, void* data, int64_t numel, double factor);
void divideInPlace(c10::ScalarType type, void* data, int64_t numel, double divisor);

}  // namespace dmuon
