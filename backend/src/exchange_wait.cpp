// How an exchange waits for its peers, and how it and they part.
#include <algorithm>
#include <iterator>
#include <utility>

#include "exchange.h"
#include "message_bytes.h"

namespace dmuon {
namespace {

const char* toString(Exchange::Phase phase) {
  switch (phase) {
    case Exchange::Phase::header:
      return "header";
    case Exchange::Phase::text:
      return "description of the operation";
    case Exchange::Phase::flags:
      return "flags";
    case Exchange::Phase::payload:
      return "payload";
  }
  return "";
}

// How long one message is waited for before the others are looked at. A message that is there
// already is taken at once, however short the time.
constexpr std::chrono::milliseconds kSlice{100};
constexpr std::chrono::milliseconds kGlance{2};
// A process that was stopped for longer than the time-out finds it over when it goes on: what the
// peers have said meanwhile must come in before they are called silent.
constexpr std::chrono::milliseconds kGrace{250};

std::string describeLoss(const Transfer& transfer) {
  // Gloo closes every connection of a group when one of its own waits times out.
  if (transfer.failure.find("Application timeout") != std::string::npos) {
    return c10::str(
        "the connection to rank ", transfer.peer,
        " was closed because an ordinary collective of this group timed out on this rank");
  }
  return c10::str("rank ", transfer.peer, " is gone: ", transfer.failure);
}

}  // namespace

Exchange::Round Exchange::swapWithAll(uint64_t seq, Phase kind, const Bytes& mine,
                                      const std::function<int64_t(int)>& bytes_from) {
  Round round{kind};
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const int tag = tagOf(seq, kind);
    round.receives.push_back(peers_->receive(peer, tag, newBytes(bytes_from(peer))));
    round.sends.push_back(peers_->send(peer, tag, mine));
  }
  return round;
}

void Exchange::setPatience(std::chrono::milliseconds patience) {
  patience_ = patience;
  deadline_ = Clock::now() + patience;
}

void Exchange::finish(Operation& op, Round& round) {
  await(op, round, round.receives);
  await(op, round, round.sends);
}

// Looks at all messages in turn, so that whichever peer dies or gives up first is noticed while
// others are merely slow. At the deadline, every rank that is still missing is named.
void Exchange::await(Operation& op, Round& round, std::vector<Transfer>& transfers,
                     const std::function<void(const Transfer&)>& on_done) {
  std::vector<Transfer*> pending;
  for (Transfer& transfer : transfers) pending.push_back(&transfer);
  bool grace = false;
  while (!pending.empty()) {
    const bool last_look = Clock::now() >= deadline_;
    if (last_look && !grace) {
      grace = true;
      deadline_ = Clock::now() + kGrace;
      continue;
    }
    pending = look(op, round, pending, last_look ? kGlance : kSlice, on_done);
    if (last_look && !pending.empty()) failSilent(op, round, pending);
  }
}

// One look at each of the pending transfers; returns those that are still pending.
std::vector<Transfer*> Exchange::look(Operation& op, Round& round,
                                      const std::vector<Transfer*>& pending,
                                      std::chrono::milliseconds patience,
                                      const std::function<void(const Transfer&)>& on_done) {
  std::vector<Transfer*> still_pending;
  std::string lost;
  for (Transfer* transfer : pending) {
    const bool patient = still_pending.empty() && lost.empty();
    const auto until = std::min(Clock::now() + (patient ? patience : kGlance), deadline_);
    switch (peers_->wait(*transfer, std::max(until, Clock::now() + kGlance))) {
      case Peers::Outcome::done:
        if (on_done) on_done(*transfer);
        break;
      case Peers::Outcome::interrupted:
        fail(op, round, "interrupted");
      case Peers::Outcome::gone:
        lost += (lost.empty() ? "" : "; ") + describeLoss(*transfer);
        break;
      case Peers::Outcome::timed_out: {
        const auto ended = round.kind == Phase::header
                               ? std::nullopt
                               : endOf(op, round, transfer->peer, Clock::now() + kGlance);
        if (!ended) {
          still_pending.push_back(transfer);
        } else if (peers_->wait(*transfer, Clock::now() + kGlance) == Peers::Outcome::done) {
          if (on_done) on_done(*transfer);  // it came just before the end
        } else {
          lost += (lost.empty() ? "" : "; ") + *ended;
        }
      }
    }
  }
  // All of the lost: the one seen first may have ended only because it saw another's end.
  if (!lost.empty()) fail(op, round, lost);
  return still_pending;
}

void Exchange::failSilent(Operation& op, Round& round, const std::vector<Transfer*>& pending) {
  std::vector<int> silent;
  for (const Transfer* transfer : pending) silent.push_back(transfer->peer);
  fail(op, round,
       c10::str(rankList(silent), " did not take part within ", patience_.count(),
                " ms (waiting for the ", toString(round.kind),
                "). Does every rank submit this operation?"));
}

void Exchange::fail(Operation& op, Round& round, const std::string& why) {
  std::vector<Transfer> transfers = std::move(round.receives);
  std::move(round.sends.begin(), round.sends.end(), std::back_inserter(transfers));
  for (Round& later : ahead_) {
    std::move(later.receives.begin(), later.receives.end(), std::back_inserter(transfers));
    std::move(later.sends.begin(), later.sends.end(), std::back_inserter(transfers));
  }
  ahead_.clear();
  peers_->giveUp(std::move(transfers), std::make_shared<std::vector<at::Tensor>>(op.memory));
  throw Fatal(c10::str(op.name, ": ", why));
}

Transfer& Exchange::nextHeaderOf(int peer, uint64_t seq) {
  auto known = early_.find(peer);
  if (known == early_.end()) {
    Transfer receive =
        peers_->receive(peer, tagOf(seq, Phase::header),
                        newBytes(static_cast<int64_t>(sizeof(Header)) + limits_.inline_bytes));
    known = early_.emplace(peer, std::move(receive)).first;
  }
  return known->second;
}

// Gloo does not report the end of a connection to the message that it is just reading, only to
// those that are still to come: so the peer's next header is what tells.
std::optional<std::string> Exchange::endOf(Operation& op, Round& round, int peer,
                                           Clock::time_point until) {
  Transfer& transfer = nextHeaderOf(peer, op.seq + 1);
  const Peers::Outcome outcome = peers_->wait(transfer, until);
  if (outcome == Peers::Outcome::gone) return describeLoss(transfer);
  if (outcome != Peers::Outcome::done) return std::nullopt;
  const Header header = readHeader(transfer);
  if (header.magic == Header::kMagic && header.state == RankState::leaves) {
    fail(op, round,
         c10::str("rank ", peer,
                  " has left the group: ", receiveText(op.seq + 1, peer, header.text_bytes)));
  }
  return std::nullopt;
}

std::string Exchange::receiveText(uint64_t seq, int peer, uint64_t bytes) {
  Transfer transfer =
      peers_->receive(peer, tagOf(seq, Phase::text), newBytes(static_cast<int64_t>(bytes)));
  if (peers_->wait(transfer, Clock::now() + kSlice) == Peers::Outcome::done) {
    return textOf(transfer.bytes);
  }
  peers_->giveUp({std::move(transfer)}, {});
  return "for a reason that did not arrive";
}

void Exchange::leave(uint64_t seq, const std::string& why) {
  if (!peers_) return;
  Header header;
  header.state = RankState::leaves;
  header.seq = seq;
  header.text_bytes = why.size();
  const Bytes header_bytes = copyOf(&header, sizeof(header));
  const Bytes text = copyOf(why.data(), why.size());
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    transfers.push_back(peers_->send(peer, tagOf(seq, Phase::header), header_bytes));
    transfers.push_back(peers_->send(peer, tagOf(seq, Phase::text), text));
  }
  peers_->giveUp(std::move(transfers), {});
}

}  // namespace dmuon
