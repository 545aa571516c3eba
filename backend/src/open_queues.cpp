#include "open_queues.h"

#include <mutex>
#include <utility>
#include <vector>

#include <dmuon/backend/shutdown.h>

namespace dmuon {
namespace {

struct OpenQueues {
  std::mutex mutex;
  std::vector<std::weak_ptr<OperationQueue>> queues;
};

// Never destroyed: groups may outlive all other statics.
OpenQueues& openQueues() {
  static auto* const open = new OpenQueues;
  return *open;
}

}  // namespace

void addOpenQueue(const std::shared_ptr<OperationQueue>& queue) {
  OpenQueues& open = openQueues();
  std::lock_guard<std::mutex> lock(open.mutex);
  std::erase_if(open.queues, [](const auto& known) { return known.expired(); });
  open.queues.push_back(queue);
}

// One after the other, but not longer for that: operations come to their time-outs in all queues at
// the same time.
int shutdownOwnerCollectives(std::chrono::milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  OpenQueues& open = openQueues();
  std::vector<std::weak_ptr<OperationQueue>> queues;
  {
    std::lock_guard<std::mutex> lock(open.mutex);
    queues = std::exchange(open.queues, {});
  }
  int ended = 0;
  for (const auto& known : queues) {
    const auto queue = known.lock();
    if (!queue || queue->forked()) continue;
    queue->shutdown(deadline);
    ++ended;
  }
  return ended;
}

}  // namespace dmuon
