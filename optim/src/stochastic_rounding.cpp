#include <dmuon/optim/stochastic_rounding.h>

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <vector>

namespace dmuon::optim {
namespace {

constexpr std::array<uint32_t, 2> kMultipliers = {0xD2511F53u, 0xCD9E8D57u};
constexpr std::array<uint32_t, 2> kKeySteps = {0x9E3779B9u, 0xBB67AE85u};
constexpr int kRounds = 10;
constexpr int64_t kPerBlock = 8;  // a block of the generator serves 8 elements, 16 bits each
constexpr uint32_t kExponent = 0x7F800000u;

std::array<uint32_t, 2> keyOf(const RandomStream& stream) {
  return {static_cast<uint32_t>(stream.seed), static_cast<uint32_t>(stream.seed >> 32)};
}

std::array<uint32_t, 4> counterOf(const RandomStream& stream, int64_t block) {
  return {static_cast<uint32_t>(block), stream.parameter, static_cast<uint32_t>(stream.step),
          static_cast<uint32_t>(stream.step >> 32)};
}

// The upper 16 bits of x after adding 16 random ones below them.
uint16_t roundOne(float x, uint32_t random) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if ((bits & kExponent) == kExponent) return c10::BFloat16(x).x;
  return static_cast<uint16_t>((bits + random) >> 16);
}

void roundOnCpu(const float* in, c10::BFloat16* out, int64_t size, const RandomStream& stream) {
  const auto key = keyOf(stream);
  const int64_t blocks = (size + kPerBlock - 1) / kPerBlock;
  at::parallel_for(0, blocks, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const auto words = philox(counterOf(stream, block), key);
      const int64_t first = block * kPerBlock, count = std::min(kPerBlock, size - first);
      for (int64_t j = 0; j < count; ++j) {
        const uint32_t random = words[j / 2] >> (16 * (j % 2)) & 0xFFFFu;
        out[first + j].x = roundOne(in[first + j], random);
      }
    }
  });
}

// 16 random bits per element, as int32. The generator's words are held in int64, whose products
// wrap modulo 2^64.
at::Tensor randomWords(int64_t size, const RandomStream& stream, at::Device device) {
  const int64_t blocks = (size + kPerBlock - 1) / kPerBlock;
  const at::Tensor block = at::arange(blocks, at::TensorOptions().dtype(at::kLong).device(device));
  const auto start = counterOf(stream, 0);
  std::array<at::Tensor, 4> c = {block, at::full_like(block, start[1]),
                                 at::full_like(block, start[2]), at::full_like(block, start[3])};
  auto key = keyOf(stream);
  constexpr int64_t kWord = 0xFFFFFFFF;
  for (int round = 0; round < kRounds; ++round) {
    const at::Tensor p0 = c[0].mul(static_cast<int64_t>(kMultipliers[0]));
    const at::Tensor p1 = c[2].mul(static_cast<int64_t>(kMultipliers[1]));
    const auto high = [](const at::Tensor& p) { return p.__rshift__(32).bitwise_and_(kWord); };
    c = {high(p1).bitwise_xor_(c[1]).bitwise_xor_(static_cast<int64_t>(key[0])),
         p1.bitwise_and(kWord),
         high(p0).bitwise_xor_(c[3]).bitwise_xor_(static_cast<int64_t>(key[1])),
         p0.bitwise_and(kWord)};
    for (int i = 0; i < 2; ++i) key[i] += kKeySteps[i];
  }
  std::vector<at::Tensor> halves;
  for (const at::Tensor& word : c) {
    halves.push_back(word.bitwise_and(0xFFFF));
    halves.push_back(word.__rshift__(16).bitwise_and_(0xFFFF));
  }
  return at::stack(halves, 1).flatten().narrow(0, 0, size).to(at::kInt);
}

}  // namespace

std::array<uint32_t, 4> philox(std::array<uint32_t, 4> c, std::array<uint32_t, 2> key) {
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t p0 = uint64_t{kMultipliers[0]} * c[0], p1 = uint64_t{kMultipliers[1]} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key[0], static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key[1], static_cast<uint32_t>(p0)};
    for (int i = 0; i < 2; ++i) key[i] += kKeySteps[i];
  }
  return c;
}

void roundStochastically(const at::Tensor& in, const at::Tensor& out, const RandomStream& stream) {
  TORCH_CHECK(in.scalar_type() == at::kFloat && out.scalar_type() == at::kBFloat16 &&
                  in.sizes() == out.sizes() && in.device() == out.device(),
              "dmuon: roundStochastically: from ", in.sizes(), " ", in.scalar_type(), " on ",
              in.device(), " to ", out.sizes(), " ", out.scalar_type(), " on ", out.device());
  TORCH_CHECK(in.numel() < int64_t{1} << 35, "dmuon: roundStochastically: ", in.numel(),
              " elements are too many for one random stream");
  if (in.numel() == 0) return;
  if (!in.is_cpu()) return roundStochasticallyByOperations(in, out, stream);
  const at::Tensor dense = in.contiguous();
  const at::Tensor plain = out.is_contiguous() ? out : at::empty(out.sizes(), out.options());
  roundOnCpu(dense.const_data_ptr<float>(), plain.mutable_data_ptr<c10::BFloat16>(), in.numel(),
             stream);
  if (!plain.is_same(out)) out.copy_(plain);
}

void roundStochasticallyByOperations(const at::Tensor& in, const at::Tensor& out,
                                     const RandomStream& stream) {
  const at::Tensor bits = in.contiguous().flatten().view(at::kInt);
  const auto exponent = static_cast<int64_t>(kExponent);
  const at::Tensor special = bits.bitwise_and(exponent).eq(exponent);
  const at::Tensor rounded = bits.add(randomWords(in.numel(), stream, in.device()))
                                 .bitwise_and_(static_cast<int64_t>(-0x10000));
  out.copy_(at::where(special, bits, rounded).view(at::kFloat).view(in.sizes()));
}

}  // namespace dmuon::optim
