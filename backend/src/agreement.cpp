#include "agreement.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <sstream>
#include <type_traits>
#include <utility>

namespace dmuon {
namespace {

template <typename T>
void put(std::string& out, T value) {
  static_assert(std::is_trivially_copyable_v<T>);
  out.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  template <typename T>
  T get() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string_view take(uint64_t n) {
    TORCH_CHECK(n <= rest_.size(), "dmuon: a peer's description of an operation is cut short: ", n,
                " bytes wanted, ", rest_.size(), " left. Do all ranks run the same dmuon?");
    std::string_view head = rest_.substr(0, n);
    rest_.remove_prefix(n);
    return head;
  }

 private:
  std::string_view rest_;
};

std::string describe(const TensorSpec& tensor) {
  return shapeText(tensor) + " owned by rank " + std::to_string(tensor.owner);
}

void putText(std::string& out, const std::string& text) {
  put(out, static_cast<uint64_t>(text.size()));
  out += text;
}

std::vector<std::string> linesOf(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::string describe(double value) {
  std::ostringstream out;
  out.precision(17);
  out << value;
  return out.str();
}

// Groups the ranks by what `describe_one` says of their proposal; nothing if all say the same.
std::optional<std::string> differenceIn(
    const std::string& what, const std::vector<Proposal>& proposals,
    const std::function<std::string(const Proposal&)>& describe_one) {
  std::vector<std::pair<std::string, std::vector<int>>> values;
  for (size_t rank = 0; rank < proposals.size(); ++rank) {
    std::string value = describe_one(proposals[rank]);
    auto known = values.begin();
    while (known != values.end() && known->first != value) ++known;
    if (known == values.end()) known = values.insert(known, {std::move(value), {}});
    known->second.push_back(static_cast<int>(rank));
  }
  if (values.size() <= 1) return std::nullopt;
  std::string text = what + " is ";
  for (size_t i = 0; i < values.size(); ++i) {
    text += (i ? ", " : "") + values[i].first + " on " + rankList(values[i].second);
  }
  return text;
}

std::optional<std::string> differenceInLines(const std::vector<Proposal>& proposals) {
  std::vector<std::vector<std::string>> lines;
  size_t most = 0;
  for (const Proposal& proposal : proposals) {
    lines.push_back(linesOf(proposal.must_match));
    most = std::max(most, lines.back().size());
  }
  for (size_t i = 0; i < most; ++i) {
    // differenceIn() visits the proposals in rank order.
    size_t rank = 0;
    if (auto d = differenceIn("of what must match, line " + std::to_string(i + 1), proposals,
                              [&](const Proposal&) {
                                const auto& own = lines[rank++];
                                return i < own.size() ? "'" + own[i] + "'" : "missing";
                              })) {
      return d;
    }
  }
  return std::nullopt;
}

}  // namespace

const char* toString(OwnerOp op) {
  return op == OwnerOp::reduce ? "reduce_to_owners" : "broadcast_from_owners";
}

std::string shapeText(const TensorSpec& tensor) {
  std::string text = std::string(c10::toString(tensor.dtype)) + "[";
  for (size_t d = 0; d < tensor.sizes.size(); ++d) {
    text += (d ? ", " : "") + std::to_string(tensor.sizes[d]);
  }
  return text + "]";
}

std::string encode(const Proposal& proposal) {
  std::string out;
  put(out, proposal.op);
  put(out, proposal.divisor);
  put(out, proposal.flag_bytes);
  putText(out, proposal.role);
  putText(out, proposal.label);
  putText(out, proposal.must_match);
  put(out, static_cast<uint64_t>(proposal.tensors.size()));
  for (const TensorSpec& tensor : proposal.tensors) {
    put(out, tensor.dtype);
    put(out, tensor.owner);
    put(out, static_cast<uint64_t>(tensor.sizes.size()));
    for (int64_t size : tensor.sizes) put(out, size);
  }
  return out;
}

Proposal decode(std::string_view bytes) {
  Reader in(bytes);
  Proposal proposal;
  proposal.op = in.get<OwnerOp>();
  proposal.divisor = in.get<double>();
  proposal.flag_bytes = in.get<uint32_t>();
  proposal.role = std::string(in.take(in.get<uint64_t>()));
  proposal.label = std::string(in.take(in.get<uint64_t>()));
  proposal.must_match = std::string(in.take(in.get<uint64_t>()));
  const auto count = in.get<uint64_t>();
  for (uint64_t i = 0; i < count; ++i) {
    TensorSpec tensor;
    tensor.dtype = in.get<c10::ScalarType>();
    tensor.owner = in.get<int64_t>();
    const auto dims = in.get<uint64_t>();
    for (uint64_t d = 0; d < dims; ++d) tensor.sizes.push_back(in.get<int64_t>());
    proposal.tensors.push_back(std::move(tensor));
  }
  return proposal;
}

std::optional<std::string> firstDifference(const std::vector<Proposal>& proposals) {
  using P = const Proposal&;
  if (auto d = differenceIn("the operation", proposals, [](P p) { return toString(p.op); })) {
    return d;
  }
  if (auto d = differenceIn("the channel", proposals, [](P p) { return "'" + p.role + "'"; })) {
    return d;
  }
  if (auto d = differenceIn("the label", proposals, [](P p) { return "'" + p.label + "'"; })) {
    return d;
  }
  if (auto d = differenceIn("the number of tensors", proposals,
                            [](P p) { return std::to_string(p.tensors.size()); })) {
    return d;
  }
  for (size_t i = 0; !proposals.empty() && i < proposals[0].tensors.size(); ++i) {
    bool same = true;
    for (P p : proposals) same = same && p.tensors[i] == proposals[0].tensors[i];
    if (same) continue;
    return differenceIn("tensor " + std::to_string(i), proposals,
                        [i](P p) { return describe(p.tensors[i]); });
  }
  if (auto d = differenceIn("the divisor", proposals, [](P p) { return describe(p.divisor); })) {
    return d;
  }
  if (auto d = differenceIn("the number of flag bytes", proposals,
                            [](P p) { return std::to_string(p.flag_bytes); })) {
    return d;
  }
  return differenceInLines(proposals);
}

bool Header::agreesWith(const Header& other) const {
  return magic == other.magic && state == other.state && op == other.op &&
         flag_bytes == other.flag_bytes && seq == other.seq && hash == other.hash &&
         text_bytes == other.text_bytes;
}

uint64_t hashBytes(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (unsigned char byte : bytes) hash = (hash ^ byte) * 0x100000001b3ULL;
  return hash;
}

std::string rankList(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace dmuon
