// The queues of owner collectives that this process has open, so that all can be ended before the
// process is.
#pragma once

#include <memory>

#include "operation_queue.h"

namespace dmuon {

// Remembers the queue as long as it exists.
void addOpenQueue(const std::shared_ptr<OperationQueue>& queue);

}  // namespace dmuon
