// One owner collective as one rank asked for it: arguments checked, memory pinned, ready to run.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "agreement.h"
#include "host_work.h"
#include "progress.h"

namespace dmuon {

struct Operation {
  Proposal proposal;
  uint64_t seq = 0;
  std::string name;     // opens every error text: operation, group, rank, sequence number, label
  std::string refusal;  // why this rank cannot take part; empty if it can

  // Per position in the list. Outputs are null where this rank does not write.
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  std::vector<c10::ScalarType> output_dtypes;

  // What keeps that memory alive: aliases without a Python object, so that releasing them on a
  // worker thread never needs the interpreter's lock.
  std::vector<at::Tensor> memory;
  std::vector<at::Tensor> result;

  std::vector<uint8_t> flags;
  WorkPtr after;
  OwnerWorkPtr inputs_from;
  std::vector<int64_t> inputs_at;
  bool held_back = false;  // there was an `after` or an `inputs_from`
  // What inputs_from reports, and this operation's own reports.
  std::shared_ptr<Progress> source;
  std::shared_ptr<Progress> progress;
  std::chrono::milliseconds timeout{0};
  std::chrono::steady_clock::time_point submitted;
  HostWorkPtr work;
};

using OperationPtr = std::shared_ptr<Operation>;

// Both return an operation in any case; bad arguments make its `refusal`. All tensors must be on
// `device`.
OperationPtr makeReduce(const std::vector<at::Tensor>& inputs,
                        const std::vector<at::Tensor>& outputs, const std::vector<int64_t>& owners,
                        OwnerOptions options, int rank, int size,
                        c10::Device device = c10::DeviceType::CPU);
OperationPtr makeBroadcast(const std::vector<at::Tensor>& tensors,
                           const std::vector<int64_t>& owners, OwnerOptions options, int rank,
                           int size, c10::Device device = c10::DeviceType::CPU);

// Both count into counters. `seconds`: what the operation took.
void countSubmission(const Operation& op, OwnerCounters& counters);
void countSuccess(const Operation& op, int rank, int size, double seconds, OwnerCounters& counters);

// "dmuon::reduce_to_owners layers.0:reduce"
std::string profilingTitle(const Operation& op);

// "dmuon: reduce_to_owners on group 'shard' rank 2 of 4".
std::string nameOnGroup(const char* operation, const std::string& group, int rank, int size);

}  // namespace dmuon
