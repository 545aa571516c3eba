#include "exchange.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "message_bytes.h"
#include "pieces.h"
#include "reduce_kernels.h"

namespace dmuon {
namespace {

std::string refusalOrProposal(const Operation& op) {
  return op.refusal.empty() ? encode(op.proposal) : op.refusal;
}

// The piece's own memory, or how to pack it.
Peers::Payload outgoing(const Piece& piece, const std::vector<const void*>& data) {
  Peers::Payload payload{piece.bytes, adjacentMemory(piece, data), {}};
  if (payload.data == nullptr) {
    payload.write = [&piece, &data](char* to) { pack(piece, data, to); };
  }
  return payload;
}

void append(std::vector<Transfer>& to, std::vector<Transfer> from) {
  std::move(from.begin(), from.end(), std::back_inserter(to));
}

}  // namespace

struct Exchange::Route {
  std::vector<Block> blocks;               // by owner
  std::vector<bool> in_opening;            // by owner
  std::vector<std::vector<Piece>> pieces;  // by owner; none for a block in the opening

  size_t rounds() const {
    size_t most = 0;
    for (const auto& of_owner : pieces) most = std::max(most, of_owner.size());
    return most;
  }
};

Exchange::Exchange(const std::shared_ptr<Transport>& transport, int rank, int size, int channel)
    : rank_(rank), size_(size), channel_(channel) {
  if (size == 1) return;
  peers_ = transport->newPeers();
  limits_ = peers_->limits();
}

Exchange::~Exchange() {
  for (auto& [peer, transfer] : early_) peers_->giveUp({std::move(transfer)}, {});
}

void Exchange::interrupt() {
  if (peers_) peers_->interrupt();
}

std::vector<uint8_t> Exchange::run(Operation& op, std::chrono::milliseconds timeout) {
  Route route = routeOf(op);
  if (!awaitOpeningInputs(op, route)) route = {};
  // Peers may wait for the operation before this one up to their time-out before they come here.
  setPatience((op.held_back ? 2 : 1) * timeout);
  const Opening opening = exchangeHeaders(op, route);
  agree(op, opening.headers);
  setPatience((op.source ? 2 : 1) * timeout);
  std::vector<uint8_t> flags = mergeFlags(op, opening.headers);
  if (op.progress) op.progress->agreed(flags);
  if (op.proposal.op == OwnerOp::reduce) {
    reduce(op, route, opening);
  } else {
    broadcast(op, route, opening);
  }
  return flags;
}

// Small payload travels in the opening, so it must be there first. Returns whether it is; if not,
// this rank cannot take part.
bool Exchange::awaitOpeningInputs(Operation& op, const Route& route) {
  if (!op.source || route.blocks.empty()) return true;
  for (int owner = 0; owner < size_; ++owner) {
    if (!route.in_opening[owner]) continue;
    for (size_t i : route.blocks[owner].tensors) {
      if (op.inputs[i] == nullptr || op.inputs_at.empty() || op.inputs_at[i] < 0) continue;
      const auto outcome = op.source->awaitBytes(op.inputs_at[i], op.proposal.tensors[i].bytes(),
                                                 [this] { return interrupted(); });
      if (outcome == Progress::Outcome::reached) continue;
      op.refusal = "the operation that makes its inputs has failed: " + op.source->error();
      return false;
    }
  }
  return true;
}

void Exchange::awaitInputs(Operation& op, Round& round, const std::vector<Slice>& slices) {
  if (!op.source || op.inputs_at.empty()) return;
  for (const Slice& slice : slices) {
    const int64_t at = op.inputs_at[slice.tensor];
    if (at < 0) continue;
    const auto outcome =
        op.source->awaitBytes(at, slice.begin + slice.bytes, [this] { return interrupted(); });
    if (outcome == Progress::Outcome::reached) continue;
    fail(op, round,
         outcome == Progress::Outcome::stopped
             ? "interrupted"
             : "the operation that makes its inputs has failed: " + op.source->error());
  }
}

void Exchange::reportAll(Operation& op, const Block& block) {
  std::vector<Slice> slices;
  for (size_t k = 0; k < block.tensors.size(); ++k) {
    const size_t i = block.tensors[k];
    slices.push_back({i, 0, block.offsets[k], op.proposal.tensors[i].bytes()});
  }
  report(op, slices);
}

void Exchange::report(Operation& op, const std::vector<Slice>& slices) {
  if (!op.progress) return;
  std::vector<Progress::Reached> reached;
  for (const Slice& slice : slices) {
    const auto in = static_cast<int64_t>(c10::elementSize(op.proposal.tensors[slice.tensor].dtype));
    const auto out = static_cast<int64_t>(c10::elementSize(op.output_dtypes[slice.tensor]));
    reached.push_back({slice.tensor, (slice.begin + slice.bytes) / in * out});
  }
  op.progress->advance(reached);
}

Exchange::Route Exchange::routeOf(const Operation& op) const {
  Route route;
  if (!op.refusal.empty()) return route;
  route.blocks = layoutByOwner(op.proposal.tensors, size_);
  route.in_opening.resize(size_);
  route.pieces.resize(size_);
  for (int owner = 0; owner < size_; ++owner) {
    const int64_t bytes = route.blocks[owner].bytes;
    route.in_opening[owner] = bytes > 0 && bytes <= limits_.inline_bytes;
    if (route.in_opening[owner] || size_ == 1) continue;
    route.pieces[owner] = cut(route.blocks[owner], op.proposal.tensors, limits_.piece_bytes);
  }
  return route;
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

Exchange::Opening Exchange::exchangeHeaders(Operation& op, const Route& route) {
  Opening opening;
  opening.headers.resize(size_);
  opening.messages.resize(size_);
  opening.headers[rank_] = headerOf(op);
  Round round{Phase::header};
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    round.receives.push_back(std::move(nextHeaderOf(peer, op.seq)));
    round.sends.push_back(peers_->send(peer, tagOf(op.seq, Phase::header),
                                       openingFor(peer, opening.headers[rank_], op, route)));
  }
  early_.clear();
  // A rank that has left takes no header from us either: it must be noticed before the sends are
  // waited for.
  await(op, round, round.receives, [&](const Transfer& transfer) {
    takeHeader(op, round, transfer, opening.headers[transfer.peer]);
    opening.messages[transfer.peer] = transfer.bytes;
  });
  await(op, round, round.sends);
  // With the payload in the openings, a rank that comes late would find all it needs and not notice
  // that the others have given up meanwhile.
  for (int peer = 0; peer < size_ && limits_.inline_bytes > 0; ++peer) {
    if (peer != rank_) (void)endOf(op, round, peer, Clock::time_point::min());
  }
  return opening;
}

// Payload is sent before the ranks have agreed, but not looked at by a receiver before that.
Bytes Exchange::openingFor(int peer, const Header& header, const Operation& op,
                           const Route& route) const {
  const int owner = op.proposal.op == OwnerOp::reduce ? peer : rank_;
  const bool with_payload = !route.blocks.empty() && route.in_opening[owner];
  const int64_t payload = with_payload ? route.blocks[owner].bytes : 0;
  Bytes message = newBytes(static_cast<int64_t>(sizeof(Header)) + payload);
  std::memcpy(message.data, &header, sizeof(Header));
  if (with_payload) {
    pack(route.blocks[owner], op.proposal.tensors, op.inputs, message.data + sizeof(Header));
  }
  return message;
}

void Exchange::takeHeader(Operation& op, Round& round, const Transfer& transfer, Header& header) {
  header = readHeader(transfer);
  if (header.magic != Header::kMagic || header.seq != op.seq) {
    fail(op, round,
         c10::str("rank ", transfer.peer, " sent something else than a header. Tags from ",
                  kReservedTags, " on are reserved; do all ranks run the same dmuon?"));
  }
  if (header.state == RankState::leaves) {
    fail(op, round,
         c10::str("rank ", transfer.peer,
                  " has left the group: ", receiveText(op.seq, transfer.peer, header.text_bytes)));
  }
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
    merge(reinterpret_cast<const uint8_t*>(transfer.bytes.data));
  }
  return merged;
}

void Exchange::runRounds(Operation& op, size_t count, const std::function<Round(size_t)>& start,
                         const std::function<void(size_t, Round&)>& consume) {
  size_t started = 0;
  for (size_t i = 0; i < count; ++i) {
    // Every rank has started the rounds up to i before it waits for round i, so each can end.
    for (; started < count && started < i + limits_.pieces_ahead; ++started) {
      ahead_.push_back(start(started));
    }
    Round round = std::move(ahead_.front());
    ahead_.pop_front();
    await(op, round, round.receives);
    consume(i, round);
    await(op, round, round.sends);
  }
}

void Exchange::reduce(Operation& op, const Route& route, const Opening& opening) {
  const std::vector<TensorSpec>& tensors = op.proposal.tensors;
  const std::vector<Piece>& mine = route.pieces[rank_];
  const int tag = tagOf(op.seq, Phase::payload);

  // parts[rank] points to `rank`'s bytes of the piece or block that `slice` lies in.
  std::vector<const char*> parts(size_);
  std::vector<const void*> addends(size_);
  const auto add = [&](const Slice& slice) {
    const size_t i = slice.tensor;
    const auto first = slice.begin / static_cast<int64_t>(c10::elementSize(tensors[i].dtype));
    const auto numel = slice.bytes / static_cast<int64_t>(c10::elementSize(tensors[i].dtype));
    for (int rank = 0; rank < size_; ++rank) {
      addends[rank] = rank == rank_ ? static_cast<const char*>(op.inputs[i]) + slice.begin
                                    : parts[rank] + slice.offset;
    }
    const auto out_first = first * static_cast<int64_t>(c10::elementSize(op.output_dtypes[i]));
    sumBlocks(tensors[i].dtype, addends.data(), size_, numel, op.proposal.divisor,
              op.output_dtypes[i], static_cast<char*>(op.outputs[i]) + out_first);
  };

  if (route.in_opening[rank_] || size_ == 1) {
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_) parts[rank] = opening.payloadOf(rank);
    }
    const Block& block = route.blocks[rank_];
    for (size_t k = 0; k < block.tensors.size(); ++k) {
      const size_t i = block.tensors[k];
      if (tensors[i].bytes() > 0) add({i, 0, block.offsets[k], tensors[i].bytes()});
    }
    reportAll(op, block);
  }
  // Scratch for the rounds that may be under way at once, used in turn.
  const auto turns = std::min<size_t>(limits_.pieces_ahead, mine.size());
  std::vector<Bytes> scratch(turns * size_);
  const auto scratchOf = [&](size_t i, int rank) -> Bytes& {
    return scratch[(i % turns) * size_ + rank];
  };
  const auto start = [&](size_t i) {
    Round round{Phase::payload};
    for (int peer = 0; peer < size_ && i < mine.size(); ++peer) {
      if (peer == rank_) continue;
      Bytes place;
      if (!peers_->lends(peer)) {
        place = scratchOf(i, peer);
        if (!place.owner) {
          place = newBytes(std::min(limits_.piece_bytes, route.blocks[rank_].bytes));
          scratchOf(i, peer) = place;
        }
      }
      round.receives.push_back(
          peers_->receivePayload(peer, tag, {place.data, mine[i].bytes, place.owner}));
    }
    // Each rank starts with another owner, so that no owner is everybody's first.
    for (int step = 1; step < size_; ++step) {
      const int peer = (rank_ + step) % size_;
      if (i >= route.pieces[peer].size()) continue;
      awaitInputs(op, round, route.pieces[peer][i].slices);
      append(round.sends,
             peers_->sendPayload({peer}, tag, outgoing(route.pieces[peer][i], op.inputs)));
    }
    return round;
  };
  runRounds(op, route.rounds(), start, [&](size_t i, Round& round) {
    if (i >= mine.size()) return;
    awaitInputs(op, round, mine[i].slices);
    for (const Transfer& transfer : round.receives) parts[transfer.peer] = transfer.bytes.data;
    for (const Slice& slice : mine[i].slices) add(slice);
    round.receives.clear();  // lets go of the peers' memory
    report(op, mine[i].slices);
  });
}

void Exchange::broadcast(Operation& op, const Route& route, const Opening& opening) {
  const std::vector<const void*> outputs(op.outputs.begin(), op.outputs.end());
  const int tag = tagOf(op.seq, Phase::payload);
  for (int owner = 0; owner < size_; ++owner) {
    if (owner == rank_ || !route.in_opening[owner]) continue;
    unpack(route.blocks[owner], op.proposal.tensors, opening.payloadOf(owner), op.outputs);
  }

  // What this rank owns, and what came with the openings, is there already.
  for (int owner = 0; owner < size_; ++owner) {
    if (owner == rank_ || route.in_opening[owner]) reportAll(op, route.blocks[owner]);
  }

  std::vector<int> others;
  for (int step = 1; step < size_; ++step) others.push_back((rank_ + step) % size_);
  const auto start = [&](size_t i) {
    Round round{Phase::payload};
    for (int owner = 0; owner < size_; ++owner) {
      if (owner == rank_ || i >= route.pieces[owner].size()) continue;
      const Piece& piece = route.pieces[owner][i];
      Bytes place{adjacentMemory(piece, outputs), piece.bytes, {}};
      if (!place.data && !peers_->lends(owner)) place = newBytes(piece.bytes);
      round.receives.push_back(peers_->receivePayload(owner, tag, std::move(place)));
    }
    if (i >= route.pieces[rank_].size()) return round;
    awaitInputs(op, round, route.pieces[rank_][i].slices);
    append(round.sends,
           peers_->sendPayload(others, tag, outgoing(route.pieces[rank_][i], op.inputs)));
    return round;
  };
  runRounds(op, route.rounds(), start, [&](size_t i, Round& round) {
    for (const Transfer& transfer : round.receives) {
      const Piece& piece = route.pieces[transfer.peer][i];
      if (transfer.bytes.data != adjacentMemory(piece, outputs)) {
        unpack(piece, transfer.bytes.data, op.outputs);
      }
      report(op, piece.slices);
    }
    round.receives.clear();  // lets go of the peers' memory
  });
}

}  // namespace dmuon
