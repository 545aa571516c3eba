#include "nccl_agreement.h"

#include <cstdlib>
#include <string_view>
#include <utility>

namespace dmuon {
namespace {

std::string linesOf(const Proposal& proposal) {
  std::string lines;
  for (size_t i = 0; i < proposal.tensors.size(); ++i) {
    const TensorSpec& tensor = proposal.tensors[i];
    lines +=
        c10::str("tensor ", i, " is ", shapeText(tensor), " owned by rank ", tensor.owner, "\n");
  }
  return c10::str(lines, "flag bytes: ", proposal.flag_bytes, "\n", proposal.must_match);
}

class OverChannel final : public NcclAgreement {
 public:
  explicit OverChannel(std::shared_ptr<OwnerCollectives> channel) : channel_(std::move(channel)) {}

  // An operation without tensors whose description is the other's.
  void reach(const Operation& op) override {
    OwnerOptions options;
    options.label = op.proposal.label;
    options.divisor = op.proposal.divisor;
    options.timeout = (op.held_back ? 2 : 1) * op.timeout;
    options.must_match = linesOf(op.proposal);
    if (!op.refusal.empty()) {
      auto refused = c10::make_intrusive<HostWork>(-1, c10d::OpType::UNKNOWN, op.seq, op.name,
                                                   std::vector<at::Tensor>{}, kNoTimeout);
      refused->fail(std::make_exception_ptr(std::runtime_error(op.refusal)));
      options.after = refused;
      options.must_match.clear();
    }
    const auto work = op.proposal.op == OwnerOp::reduce
                          ? channel_->reduceToOwners({}, {}, {}, options)
                          : channel_->broadcastFromOwners({}, {}, options);
    work->wait();
  }

 private:
  const std::shared_ptr<OwnerCollectives> channel_;
};

class OverStore final : public NcclAgreement {
 public:
  OverStore(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : store_(std::move(store)), rank_(rank), size_(size) {}

  void reach(const Operation& op) override {
    const bool refuses = !op.refusal.empty();
    std::string said(1, refuses ? 'r' : 'p');
    said += refuses ? op.refusal : encode(op.proposal);
    store_->set(key(op.seq, rank_), std::vector<uint8_t>(said.begin(), said.end()));
    std::vector<Proposal> proposals;
    std::string refusals;
    const auto deadline = std::chrono::steady_clock::now() + (op.held_back ? 2 : 1) * op.timeout;
    for (int rank = 0; rank < size_; ++rank) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      try {
        store_->wait({key(op.seq, rank)}, std::max(left, std::chrono::milliseconds(1)));
      } catch (const std::exception& error) {
        C10_THROW_ERROR(DistBackendError,
                        c10::str(op.name, ": rank ", rank, " did not take part within ",
                                 op.timeout.count(), " ms (", error.what(), ")"));
      }
      const std::vector<uint8_t> bytes = store_->get(key(op.seq, rank));
      const std::string text(bytes.begin() + 1, bytes.end());
      if (bytes[0] == 'r') {
        refusals +=
            c10::str(refusals.empty() ? "" : "; ", "rank ", rank, " cannot take part: ", text);
      } else if (refusals.empty()) {
        proposals.push_back(decode(text));
      }
    }
    // All ranks have come to this operation, so all have read what was said about the last.
    if (op.seq > 0) store_->deleteKey(key(op.seq - 1, rank_));
    TORCH_CHECK(refusals.empty(), op.name, ": ", refusals);
    const auto difference = firstDifference(proposals);
    TORCH_CHECK(!difference, op.name,
                ": the ranks do not ask for the same operation: ", difference.value_or(""),
                ". No data has moved");
  }

 private:
  static std::string key(uint64_t seq, int rank) {
    return "agree/" + std::to_string(seq) + "/" + std::to_string(rank);
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
};

std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

}  // namespace

bool debugWanted() {
  const auto own = environment("DMUON_DEBUG");
  if (!own.empty()) return own != "0";
  return environment("TORCH_DISTRIBUTED_DEBUG") == "DETAIL";
}

std::unique_ptr<NcclAgreement> agreementOver(std::shared_ptr<OwnerCollectives> channel) {
  return std::make_unique<OverChannel>(std::move(channel));
}

std::unique_ptr<NcclAgreement> agreementOver(c10::intrusive_ptr<c10d::Store> store, int rank,
                                             int size) {
  return std::make_unique<OverStore>(std::move(store), rank, size);
}

}  // namespace dmuon
