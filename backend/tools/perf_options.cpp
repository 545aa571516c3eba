#include "perf_options.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
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
  --owners PATTERN     spread: tensor i belongs to rank i mod N (default); skewed: rank 0 has half of
                       them; one: rank 0 has all
  --dtype NAME         float (default), half, bfloat16, double
  --begin, --end SIZE  bytes per tensor, e.g. 1K, 1M; --factor F between sizes (4)
  --tensors N          per operation (32)
  --iterations N       timed operations, one after the other (10); --repeats N, of which the best
                       counts (3)
  --no-baseline        leave out Gloo's own reduce and broadcast, one call per tensor, all asynchronous
  --json FILE          also write the rows there

Columns: bytes per tensor; time of one operation in microseconds, the slowest rank's; GB/s of payload
that all ranks together receive; share: time that all ranks need to memcpy what they receive, over
the time of the operation; speedup over the baseline; check: wrong elements in the last operation.
)";

[[noreturn]] void usage(const std::string& complaint) {
  std::fprintf(stderr, "%s%s%s", complaint.c_str(), complaint.empty() ? "" : "\n\n", kUsage);
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
  if (unit == "K") return value << 10;
  if (unit == "M") return value << 20;
  if (unit == "G") return value << 30;
  if (!unit.empty()) usage("not a size: " + text);
  return value;
}

std::vector<std::string> listOf(const std::string& option, const std::string& text,
                                const std::vector<std::string>& known) {
  std::vector<std::string> names;
  std::istringstream in(text);
  for (std::string name; std::getline(in, name, ',');) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      usage(option + " does not know '" + name + "'");
    }
    names.push_back(name);
  }
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
    const auto number = [&] { return static_cast<int>(std::max<int64_t>(sizeOf(value()), 1)); };
    if (option == "--help" || option == "-h")
      usage("");
    else if (option == "--ranks")
      o.ranks = number();
    else if (option == "--op")
      o.ops = listOf(option, value(), {"reduce", "broadcast"});
    else if (option == "--transport")
      o.transports = listOf(option, value(), {"gloo", "ucx"});
    else if (option == "--owners")
      o.owners = listOf(option, value(), {"spread", "skewed", "one"})[0];
    else if (option == "--dtype")
      o.dtype = listOf(option, value(), {"float", "half", "bfloat16", "double"})[0];
    else if (option == "--begin")
      o.begin = std::max<int64_t>(sizeOf(value()), 8);
    else if (option == "--end")
      o.end = sizeOf(value());
    else if (option == "--factor")
      o.factor = std::max(number(), 2);
    else if (option == "--tensors")
      o.tensors = number();
    else if (option == "--iterations")
      o.iterations = number();
    else if (option == "--repeats")
      o.repeats = number();
    else if (option == "--no-baseline")
      o.baseline = false;
    else if (option == "--json")
      o.json = value();
    else
      usage("unknown option " + option);
  }
  return o;
}

}  // namespace dmuon::perf
