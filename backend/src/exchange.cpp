#include "exchange.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

#include "message_bytes.h"
#include "reduce_kernels.h"

namespace dmuon {
namespace {

at::Tensor viewOf(const void* data, int64_t size) {
  return at::from_blob(const_cast<void*>(data), {size}, at::kByte);
}

std::string refusalOrProposal(const Operation& op) {
  return op.refusal.empty() ? encode(op.proposal) : op.refusal;
}

}  // namespace

Exchange::Exchange(std::shared_ptr<InnerBackend> inner, int rank, int size, int channel)
    : rank_(rank), size_(size), channel_(channel) {
  if (size > 1) peers_.emplace(std::move(inner));
}

Exchange::~Exchange() {
  for (auto& [peer, transfer] : early_) peers_->giveUp({std::move(transfer)}, {});
}

void Exchange::interrupt() {
  if (peers_) peers_->interrupt();
}

Exchange::Moved Exchange::run(Operation& op, std::chrono::milliseconds timeout) {
  Moved moved;
  timeout_ = timeout;
  // Peers may wait for the operation before this one up to their time-out before they come here.
  deadline_ = Clock::now() + (op.held_back ? 2 : 1) * timeout;
  const std::vector<Header> headers = exchangeHeaders(op);
  agree(op, headers);
  deadline_ = Clock::now() + timeout;
  moved.flags = mergeFlags(op, headers);
  if (op.proposal.op == OwnerOp::reduce) {
    reduce(op, moved);
  } else {
    broadcast(op, moved);
  }
  return moved;
}

// 14 bits for the channel, 14 for the operation, 2 for the phase. The sequence number may wrap
// around: a channel runs one operation at a time, and a peer is at most one ahead.
int Exchange::tagOf(uint64_t seq, Phase phase) const {
  return kReservedTags + (channel_ << 16) + static_cast<int>((seq % (1 << 14)) << 2) +
         static_cast<int>(phase);
}

Header Exchange::headerOf(const Operation& op) const {
  const std::string text = refusalOrProposal(op);
  Header header;
  header.state = op.refusal.empty() ? RankState::ready : RankState::refuses;
  header.op = op.proposal.op;
  header.flag_bytes = static_cast<uint16_t>(op.flags.size());
  header.seq = op.seq;
  header.hash = hashBytes(text);
  header.text_bytes = text.size();
  if (op.flags.size() <= kInlineFlagBytes) {
    std::copy(op.flags.begin(), op.flags.end(), header.flags.begin());
  }
  return header;
}

std::vector<Header> Exchange::exchangeHeaders(Operation& op) {
  std::vector<Header> headers(size_);
  headers[rank_] = headerOf(op);
  Round round{Phase::header};
  const at::Tensor mine = copyOf(&headers[rank_], sizeof(Header));
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    round.receives.push_back(std::move(nextHeaderOf(peer, op.seq)));
    round.sends.push_back(peers_->send(peer, tagOf(op.seq, Phase::header), mine));
  }
  early_.clear();
  // A rank that has left takes no header from us either: it must be noticed before the sends are
  // waited for.
  await(op, round, round.receives, [&](const Transfer& transfer) {
    Header& header = headers[transfer.peer];
    std::memcpy(&header, transfer.bytes.const_data_ptr(), sizeof(Header));
    if (header.magic != Header::kMagic || header.seq != op.seq) {
      fail(op, round,
           c10::str("rank ", transfer.peer, " sent something else than a header. Tags from ",
                    kReservedTags, " on are reserved; do all ranks run the same dmuon?"));
    }
    if (header.state == RankState::leaves) {
      fail(op, round,
           c10::str("rank ", transfer.peer, " has left the group: ",
                    receiveText(op.seq, transfer.peer, header.text_bytes)));
    }
  });
  await(op, round, round.sends);
  return headers;
}

void Exchange::agree(Operation& op, const std::vector<Header>& headers) {
  for (const Header& header : headers) {
    if (header.state != RankState::ready || !header.agreesWith(headers[0])) {
      failTogether(op, headers);
    }
  }
}

// Every rank has seen the same headers, so every rank comes here and sends its text to all others.
void Exchange::failTogether(Operation& op, const std::vector<Header>& headers) {
  std::vector<std::string> texts(size_);
  texts[rank_] = refusalOrProposal(op);
  Round round =
      swapWithAll(op.seq, Phase::text, copyOf(texts[rank_].data(), texts[rank_].size()),
                  [&](int peer) { return static_cast<int64_t>(headers[peer].text_bytes); });
  finish(op, round);
  for (const Transfer& transfer : round.receives) texts[transfer.peer] = textOf(transfer.bytes);

  std::string refusals;
  std::vector<Proposal> proposals;
  for (int rank = 0; rank < size_; ++rank) {
    if (headers[rank].state == RankState::refuses) {
      refusals +=
          c10::str(refusals.empty() ? "" : "; ", "rank ", rank, " cannot take part: ", texts[rank]);
    } else if (refusals.empty()) {
      proposals.push_back(decode(texts[rank]));
    }
  }
  TORCH_CHECK(refusals.empty(), op.name, ": ", refusals);
  TORCH_CHECK(false, op.name, ": the ranks do not ask for the same operation: ",
              firstDifference(proposals).value_or("their descriptions differ"),
              ". No data has moved");
}

std::vector<uint8_t> Exchange::mergeFlags(Operation& op, const std::vector<Header>& headers) {
  std::vector<uint8_t> merged = op.flags;
  const auto merge = [&merged](const uint8_t* flags) {
    for (size_t i = 0; i < merged.size(); ++i) merged[i] |= flags[i];
  };
  if (merged.size() <= kInlineFlagBytes) {
    for (const Header& header : headers) merge(header.flags.data());
    return merged;
  }
  const auto bytes = static_cast<int64_t>(op.flags.size());
  Round round = swapWithAll(op.seq, Phase::flags, copyOf(op.flags.data(), op.flags.size()),
                            [&](int) { return bytes; });
  finish(op, round);
  for (const Transfer& transfer : round.receives) {
    merge(static_cast<const uint8_t*>(transfer.bytes.const_data_ptr()));
  }
  return merged;
}

void Exchange::reduce(Operation& op, Moved& moved) {
  const std::vector<TensorSpec>& tensors = op.proposal.tensors;
  const std::vector<Block> blocks = layoutByOwner(tensors, size_);
  const Block& mine = blocks[rank_];
  const int tag = tagOf(op.seq, Phase::payload);
  Round round{Phase::payload};
  std::vector<const char*> received(size_, nullptr);
  for (int peer = 0; peer < size_ && mine.bytes > 0; ++peer) {
    if (peer == rank_) continue;
    at::Tensor scratch = newBytes(mine.bytes);
    received[peer] = static_cast<const char*>(scratch.const_data_ptr());
    round.receives.push_back(peers_->receive(peer, tag, std::move(scratch)));
    moved.received += mine.bytes;
  }
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || blocks[peer].bytes == 0) continue;
    const char* in_place = adjacentMemory(blocks[peer], tensors, op.inputs);
    at::Tensor bytes =
        in_place ? viewOf(in_place, blocks[peer].bytes) : newBytes(blocks[peer].bytes);
    if (!in_place) {
      pack(blocks[peer], tensors, op.inputs, static_cast<char*>(bytes.mutable_data_ptr()));
    }
    round.sends.push_back(peers_->send(peer, tag, std::move(bytes)));
    moved.sent += blocks[peer].bytes;
  }
  finish(op, round);

  std::vector<const void*> parts(size_);
  for (size_t k = 0; k < mine.tensors.size(); ++k) {
    const size_t i = mine.tensors[k];
    for (int rank = 0; rank < size_; ++rank) {
      parts[rank] = rank == rank_ ? op.inputs[i] : received[rank] + mine.offsets[k];
    }
    sumBlocks(tensors[i].dtype, parts.data(), size_, tensors[i].numel(), op.proposal.divisor,
              op.output_dtypes[i], op.outputs[i]);
  }
}

void Exchange::broadcast(Operation& op, Moved& moved) {
  const std::vector<TensorSpec>& tensors = op.proposal.tensors;
  const std::vector<Block> blocks = layoutByOwner(tensors, size_);
  const std::vector<const void*> outputs(op.outputs.begin(), op.outputs.end());
  const Block& mine = blocks[rank_];
  const int tag = tagOf(op.seq, Phase::payload);
  Round round{Phase::payload};
  std::vector<const char*> to_unpack(size_, nullptr);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || blocks[peer].bytes == 0) continue;
    const char* in_place = adjacentMemory(blocks[peer], tensors, outputs);
    at::Tensor bytes =
        in_place ? viewOf(in_place, blocks[peer].bytes) : newBytes(blocks[peer].bytes);
    if (!in_place) to_unpack[peer] = static_cast<const char*>(bytes.const_data_ptr());
    round.receives.push_back(peers_->receive(peer, tag, std::move(bytes)));
    moved.received += blocks[peer].bytes;
  }
  if (mine.bytes > 0 && size_ > 1) {
    const char* in_place = adjacentMemory(mine, tensors, op.inputs);
    const at::Tensor bytes = in_place ? viewOf(in_place, mine.bytes) : newBytes(mine.bytes);
    if (!in_place) pack(mine, tensors, op.inputs, static_cast<char*>(bytes.mutable_data_ptr()));
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      round.sends.push_back(peers_->send(peer, tag, bytes));
      moved.sent += mine.bytes;
    }
  }
  finish(op, round);
  for (int peer = 0; peer < size_; ++peer) {
    if (to_unpack[peer]) unpack(blocks[peer], tensors, to_unpack[peer], op.outputs);
  }
}

}  // namespace dmuon
