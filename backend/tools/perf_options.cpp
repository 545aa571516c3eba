#include "perf_options.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <sstream>
#include <stdexcept>

namespace dmuon::perf {
namespace {

constexpr char kUsage[] =
    R"(dmuon_perf: how fast owner collectives of CPU tensors are, beside Gloo's calls per tensor

  --ranks N            processes to fork (4); ignored under a launcher that sets RANK, WORLD_SIZE,
                       MASTER_ADDR and MASTER_PORT
  --op NAMES           reduce,broadcast (both)
  --transport NAMES    gloo,ucx (both)
  --owners PATTERNS    spread: tensor i belongs to rank i mod N (default); skewed: rank 0 has half of
                       them and its part of the rest; one: rank 0 has all. Several: spread,skewed.
                       spread is always measured too, to compare with
  --dtype NAME         float (default), half, bfloat16, double
  --begin, --end SIZE  bytes per tensor, e.g. 1K, 1M; --factor F between sizes (4)
  --tensors N          per operation (32)
  --iterations N       timed operations, one after the other (10), but fewer if they would take longer
                       than 0.1 s; --warmup N before all of them (2)
  --repeats N          rounds (5). In a round every way has its turn, so that all see the same machine
  --no-baseline        leave out Gloo's own reduce and broadcast, one call per tensor, all started
                       before the first is waited for
  --json FILE          also write the rows there
  --spoil              change one element of every result before the check, which must then complain

Columns of the first table, all medians over the rounds:
  us        time of one operation in microseconds, that of the slowest rank
  GB/s      payload that all ranks together receive, by that time
  share     of the memcpy rate: the time in which every rank, all at once, can memcpy as many bytes
            as it receives in the operation, by the time of the operation. 1.00 would be an
            operation that costs one copy of the payload and nothing else
  speedup   the baseline's time by this one, round by round
  moved     bytes that all ranks together received in one operation, by dmuon's counters; "=" where
            they are tensors x (N - 1) x bytes, "!" where not
  check     wrong elements, counted against the exact result

Where the rest of the time goes (second table, in percent of what the cores could have done; the
ranks' cores are at most as many as the machine has). Nothing is counted inside the operation: its CPU
time is the kernel's account of the processes, and the parts of it are what the same work costs alone,
by all ranks at once in the same rounds:
  copies    each received byte copied into a small buffer, as into shared memory, and out of it
  sum       the additions, from buffers that stay in the cache
  system    CPU time inside the kernel: sockets, sleeping and waking, giving up a core
  other     the rest of the CPU time: polling, messages, cache misses. Negative where the parts alone
            cost more than inside the operation
  idle      no rank of this program was running: waiting for a message or for a thread to wake

Uneven owners (third table): measured is the time over that with the same bytes spread, and expected
is the largest owner's share of the bytes, by the largest share where they are spread: what it would
be if the busiest rank alone decided.

The exit status is 1 if an element was wrong or the bytes moved were not the formula's.
)";

[[noreturn]] void usage(const std::string& complaint) {
  std::FILE* const to = complaint.empty() ? stdout : stderr;
  std::fprintf(to, "%s%s%s", complaint.c_str(), complaint.empty() ? "" : "\n\n", kUsage);
  std::exit(complaint.empty() ? 0 : 2);
}

int64_t sizeOf(const std::string& text) {
  size_t used = 0;
  int64_t value = 0;
  try {
    value = std::stoll(text, &used);
  } catch (const std::exception&) {
    usage("not a size: " + text);
  }
  const std::string unit = text.substr(used);
  const int shift = unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : 0;
  if (shift == 0 && !unit.empty()) usage("not a size: " + text);
  if (value < 0 || value > std::numeric_limits<int64_t>::max() >> (shift + 10)) {
    usage("out of range: " + text);
  }
  return value << shift;
}

std::vector<std::string> listOf(const std::string& option, const std::string& text,
                                const std::vector<std::string>& known) {
  std::vector<std::string> names;
  std::istringstream in(text);
  for (std::string name; std::getline(in, name, ',');) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      usage(option + " does not know '" + name + "'");
    }
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  if (names.empty()) usage(option + " needs a name");
  return names;
}

}  // namespace

Options Options::parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const auto value = [&]() -> std::string {
      if (i + 1 >= argc) usage(option + " needs a value");
      return argv[++i];
    };
    const auto number = [&](int least) {
      const int64_t given = sizeOf(value());
      if (given < least || given > 1 << 30) {
        usage(option + " must be at least " + std::to_string(least) + ", got " + argv[i]);
      }
      return static_cast<int>(given);
    };
    const auto names = [&](const std::vector<std::string>& known) {
      return listOf(option, value(), known);
    };
    if (option == "--help" || option == "-h")
      usage("");
    else if (option == "--ranks")
      o.ranks = number(1);
    else if (option == "--op")
      o.ops = names({"reduce", "broadcast"});
    else if (option == "--transport")
      o.transports = names({"gloo", "ucx"});
    else if (option == "--owners")
      o.owners = names({"spread", "skewed", "one"});
    else if (option == "--dtype")
      o.dtype = names({"float", "half", "bfloat16", "double"})[0];
    else if (option == "--begin")
      o.begin = std::max<int64_t>(sizeOf(value()), 8);
    else if (option == "--end")
      o.end = sizeOf(value());
    else if (option == "--factor")
      o.factor = number(2);
    else if (option == "--tensors")
      o.tensors = number(1);
    else if (option == "--iterations")
      o.iterations = number(1);
    else if (option == "--repeats")
      o.repeats = number(1);
    else if (option == "--warmup")
      o.warmup = number(0);
    else if (option == "--no-baseline")
      o.baseline = false;
    else if (option == "--spoil")
      o.spoil = true;
    else if (option == "--json")
      o.json = value();
    else
      usage("unknown option " + option);
  }
  if (o.end < o.begin) usage("--end is smaller than --begin");
  std::erase(o.owners, "spread");
  o.owners.insert(o.owners.begin(), "spread");
  return o;
}

}  // namespace dmuon::perf
