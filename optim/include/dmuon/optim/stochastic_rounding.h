// fp32 to bf16 by stochastic rounding: x goes to one of its two bf16 neighbours, with probabilities
// such that the mean is x. A running average in bf16 then follows increments far below its last
// bit, which rounding to nearest would lose.
//
// The random bits come from a counter-based generator, Philox4x32-10 (Salmon et al., "Parallel
// random numbers: as easy as 1, 2, 3", SC 2011), and are a function of (seed, parameter, step,
// element) alone: equal on every device, for every number of threads and ranks, and after a resume.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

namespace dmuon::optim {

struct RandomStream {
  uint64_t seed = 0;
  uint32_t parameter = 0;  // its index in the optimizer
  uint64_t step = 0;
};

// Four words of 32 bits: the generator's output for a counter and a key.
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// out <- in, rounded. in: fp32; out: bf16, of the same shape and device, any strides (elements are
// numbered in logical order). Infinities and NaN stay what they are. Fewer than 2^35 elements.
void roundStochastically(const at::Tensor& in, const at::Tensor& out, const RandomStream& stream);

// The same bits by ATen's operations: what other devices than the CPU take.
void roundStochasticallyByOperations(const at::Tensor& in, const at::Tensor& out,
                                     const RandomStream& stream);

}  // namespace dmuon::optim
