#include "transport.h"

#include <cstdlib>
#include <cstring>

#include "agreement.h"
#include "gloo_peers.h"
#include "ucx_peers.h"

namespace dmuon {
namespace {

// What a rank says in the store: whether it can use UCX, whether it insists, and how to reach it or
// why it cannot.
struct Offer {
  bool usable = false;
  bool insists = false;
  std::string text;
};

Offer offer(const std::string& wanted) {
  Offer own;
  own.insists = wanted == "ucx";
  if (wanted == "gloo") {
    own.text = "DMUON_TRANSPORT is gloo there";
    return own;
  }
#ifdef DMUON_HAVE_UCX
  try {
    own.text = ucxContact();
    own.usable = true;
  } catch (const std::exception& error) {
    own.text = error.what();
  }
#else
  own.text =
      "this dmuon was built without UCX: pip install libucx-cu13 and build again, or set "
      "DMUON_TRANSPORT=gloo";
#endif
  return own;
}

std::string key(int rank) { return std::to_string(rank); }

std::string reasonOf(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
}

// Why the offers are not there: the ranks that are late, or that the store has gone itself.
std::string whatIsMissing(c10d::Store& store, int size, std::chrono::milliseconds timeout,
                          const std::string& failure) {
  std::vector<int> late;
  try {
    for (int r = 0; r < size; ++r) {
      if (!store.check({key(r)})) late.push_back(r);
    }
  } catch (const std::exception&) {
    late.clear();
  }
  if (late.empty()) {
    return c10::str("the store failed while it was asked which transport the other ranks can use: ",
                    failure);
  }
  return c10::str(rankList(late), " did not say in the store within ", timeout.count(),
                  " ms which transport to use. Does every rank make this group?");
}

std::vector<Offer> exchangeOffers(c10d::Store& store, const Offer& own, int rank, int size,
                                  std::chrono::milliseconds timeout, const std::string& name) {
  std::string said;
  said += static_cast<char>(own.usable);
  said += static_cast<char>(own.insists);
  said += own.text;
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(key(r));
  std::vector<std::vector<uint8_t>> answers(size);
  try {
    store.set(key(rank), std::vector<uint8_t>(said.begin(), said.end()));
    store.wait(keys, timeout);
    for (int r = 0; r < size; ++r) answers[r] = store.get(keys[r]);
  } catch (const std::exception& error) {
    TORCH_CHECK(false, name, ": ", whatIsMissing(store, size, timeout, reasonOf(error)));
  }
  std::vector<Offer> offers(size);
  for (int r = 0; r < size; ++r) {
    const std::vector<uint8_t>& bytes = answers[r];
    TORCH_CHECK(bytes.size() >= 2, "key ", keys[r], " of the store has ", bytes.size(),
                " bytes; do all ranks run the same dmuon?");
    offers[r] = {bytes[0] != 0, bytes[1] != 0, std::string(bytes.begin() + 2, bytes.end())};
  }
  return offers;
}

std::string wantedTransport(const std::string& name) {
  const char* value = std::getenv("DMUON_TRANSPORT");
  const std::string wanted = value != nullptr && *value != '\0' ? value : "auto";
  TORCH_CHECK_VALUE(wanted == "ucx" || wanted == "gloo" || wanted == "auto", name,
                    ": DMUON_TRANSPORT is '", wanted, "', but must be ucx, gloo or auto");
  return wanted;
}

}  // namespace

std::shared_ptr<Transport> makeTransport(const std::shared_ptr<InnerBackend>& inner,
                                         const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                         int size, std::chrono::milliseconds timeout,
                                         const std::string& name) {
  const std::string wanted = wantedTransport(name);
  if (size == 1) return std::make_shared<GlooTransport>(inner);
  TORCH_CHECK(store || wanted != "ucx", name,
              ": DMUON_TRANSPORT is ucx, which needs a store to meet in: pass one");
  if (!store) return std::make_shared<GlooTransport>(inner);

  const auto deadline = Clock::now() + timeout;
  const std::vector<Offer> offers =
      exchangeOffers(*store, offer(wanted), rank, size, timeout, name);
  std::string obstacles;
  std::vector<int> insisting;
  std::vector<std::string> contacts;
  for (int r = 0; r < size; ++r) {
    if (offers[r].insists) insisting.push_back(r);
    if (offers[r].usable) {
      contacts.push_back(offers[r].text);
    } else {
      obstacles += c10::str(obstacles.empty() ? "" : "; ", "rank ", r, ": ", offers[r].text);
    }
  }
  TORCH_CHECK(insisting.empty() || obstacles.empty(), name, ": DMUON_TRANSPORT is ucx on ",
              rankList(insisting), ", but not every rank can use UCX. ", obstacles);
  if (!obstacles.empty()) return std::make_shared<GlooTransport>(inner);
#ifdef DMUON_HAVE_UCX
  try {
    return std::make_shared<UcxTransport>(contacts, rank, deadline);
  } catch (const std::runtime_error& error) {
    TORCH_CHECK(false, name, ": ", error.what(), ". DMUON_TRANSPORT=gloo does without UCX");
  }
#endif
  return {};
}

}  // namespace dmuon
