#include "operation.h"

#include <array>
#include <cmath>
#include <map>

#include "reduce_kernels.h"

namespace dmuon {
namespace {

constexpr size_t kMaxFlagBytes = UINT16_MAX;

std::string describe(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), tensor.sizes());
}

// Raw memory is read and written, so a tensor must be exactly its memory.
void requirePlain(const char* what, size_t i, const at::Tensor& tensor, c10::Device device) {
  TORCH_CHECK_VALUE(tensor.defined(), what, " ", i, " is undefined");
  TORCH_CHECK_VALUE(tensor.device() == device, what, " ", i, " (", describe(tensor), ") is on ",
                    tensor.device(), ", but this group's owner collectives move ", device,
                    " tensors only");
  TORCH_CHECK_VALUE(tensor.layout() == c10::kStrided, what, " ", i, " (", describe(tensor),
                    ") has layout ", tensor.layout(), ", but must be dense");
  TORCH_CHECK_VALUE(tensor.is_contiguous(), what, " ", i, " (", describe(tensor), " with strides ",
                    tensor.strides(), ") is not contiguous");
  TORCH_CHECK_VALUE(!tensor.is_conj() && !tensor.is_neg(), what, " ", i, " (", describe(tensor),
                    ") is a lazy conjugate or negation: resolve it first");
}

void requireSameLength(const char* what, size_t expected, size_t actual) {
  TORCH_CHECK_VALUE(expected == actual, "there are ", expected, " tensors but ", actual, " ", what);
}

void requireOwner(size_t i, int64_t owner, int size) {
  TORCH_CHECK_VALUE(owner >= 0 && owner < size, "owner ", owner, " of tensor ", i,
                    " is out of range: the group's ranks are 0 to ", size - 1);
}

// On the owner only: where the sum of `input` goes.
void requireOutput(size_t i, const at::Tensor& input, const at::Tensor& output) {
  requirePlain("output", i, output, input.device());
  TORCH_CHECK_VALUE(output.sizes() == input.sizes(), "output ", i, " is ", describe(output),
                    ", but its input is ", describe(input));
  const auto accumulation = accumulationType(input.scalar_type());
  TORCH_CHECK_VALUE(
      output.scalar_type() == input.scalar_type() || output.scalar_type() == accumulation,
      "output ", i, " is ", describe(output), ", but a sum of ", input.scalar_type(),
      " is stored as ", input.scalar_type(), " or ", accumulation);
}

at::Tensor rawAlias(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.tensor_data() : tensor;
}

TensorSpec specOf(const at::Tensor& tensor, int64_t owner) {
  return {tensor.scalar_type(), tensor.sizes().vec(), owner};
}

void addReduceTensor(Operation& op, size_t i, const at::Tensor& input, const at::Tensor& output,
                     int64_t owner, int rank, int size, c10::Device device) {
  requirePlain("input", i, input, device);
  TORCH_CHECK_VALUE(isReducible(input.scalar_type()), "input ", i, " (", describe(input),
                    ") cannot be summed: its dtype must be Half, BFloat16, Float or Double");
  requireOwner(i, owner, size);
  op.inputs.push_back(input.const_data_ptr());
  op.memory.push_back(rawAlias(input));
  if (owner == rank) {
    requireOutput(i, input, output);
    op.outputs.push_back(output.mutable_data_ptr());
    op.output_dtypes.push_back(output.scalar_type());
    op.memory.push_back(rawAlias(output));
  } else {
    op.outputs.push_back(nullptr);
    op.output_dtypes.push_back(input.scalar_type());
  }
  op.proposal.tensors.push_back(specOf(input, owner));
}

void addBroadcastTensor(Operation& op, size_t i, const at::Tensor& tensor, int64_t owner, int rank,
                        int size, c10::Device device) {
  requirePlain("tensor", i, tensor, device);
  requireOwner(i, owner, size);
  op.inputs.push_back(owner == rank ? tensor.const_data_ptr() : nullptr);
  op.outputs.push_back(owner == rank ? nullptr : tensor.mutable_data_ptr());
  op.output_dtypes.push_back(tensor.scalar_type());
  op.memory.push_back(rawAlias(tensor));
  op.proposal.tensors.push_back(specOf(tensor, owner));
}

OperationPtr begin(OwnerOp kind, OwnerOptions options, const std::vector<at::Tensor>& result) {
  auto op = std::make_shared<Operation>();
  op->proposal.op = kind;
  op->proposal.label = std::move(options.label);
  op->proposal.divisor = options.divisor;
  op->proposal.must_match = std::move(options.must_match);
  op->flags = std::move(options.flags);
  op->after = std::move(options.after);
  op->inputs_from = std::move(options.inputs_from);
  op->inputs_at = std::move(options.inputs_at);
  op->held_back = op->after || op->inputs_from;
  op->timeout = options.timeout;
  for (const at::Tensor& tensor : result) op->result.push_back(rawAlias(tensor));
  return op;
}

void checkOptions(Operation& op) {
  const double divisor = op.proposal.divisor;
  TORCH_CHECK_VALUE(std::isfinite(divisor) && divisor != 0, "the divisor is ", divisor,
                    ", but must be finite and not zero");
  TORCH_CHECK_VALUE(op.timeout.count() >= 0, "the time-out is ", op.timeout.count(),
                    " ms, but must not be negative");
  TORCH_CHECK_VALUE(op.flags.size() <= kMaxFlagBytes, "there are ", op.flags.size(),
                    " flag bytes, but at most ", kMaxFlagBytes, " are possible");
  op.proposal.flag_bytes = static_cast<uint32_t>(op.flags.size());
}

void checkInputsAt(const Operation& op) {
  if (op.inputs_at.empty()) return;
  TORCH_CHECK_VALUE(op.inputs_from, "inputs_at is given without inputs_from");
  requireSameLength("entries of inputs_at", op.proposal.tensors.size(), op.inputs_at.size());
}

// Runs the checks; what they throw becomes the refusal.
template <typename Fill>
OperationPtr filled(OperationPtr op, Fill&& fill) {
  try {
    checkOptions(*op);
    fill();
    checkInputsAt(*op);
  } catch (const c10::Error& error) {
    op->refusal = error.what_without_backtrace();
  } catch (const std::exception& error) {
    op->refusal = error.what();
  }
  return op;
}

std::array<OperationCounters*, 2> countersOf(const Operation& op, OwnerCounters& counters) {
  return {op.proposal.op == OwnerOp::reduce ? &counters.reduce : &counters.broadcast,
          &counters.by_label[op.proposal.label]};
}

}  // namespace

OperationPtr makeReduce(const std::vector<at::Tensor>& inputs,
                        const std::vector<at::Tensor>& outputs, const std::vector<int64_t>& owners,
                        OwnerOptions options, int rank, int size, c10::Device device) {
  OperationPtr op = begin(OwnerOp::reduce, std::move(options), outputs);
  return filled(op, [&] {
    requireSameLength("outputs", inputs.size(), outputs.size());
    requireSameLength("owners", inputs.size(), owners.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      addReduceTensor(*op, i, inputs[i], outputs[i], owners[i], rank, size, device);
    }
  });
}

OperationPtr makeBroadcast(const std::vector<at::Tensor>& tensors,
                           const std::vector<int64_t>& owners, OwnerOptions options, int rank,
                           int size, c10::Device device) {
  OperationPtr op = begin(OwnerOp::broadcast, std::move(options), tensors);
  return filled(op, [&] {
    requireSameLength("owners", tensors.size(), owners.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      addBroadcastTensor(*op, i, tensors[i], owners[i], rank, size, device);
    }
  });
}

void countSubmission(const Operation& op, OwnerCounters& counters) {
  for (OperationCounters* c : countersOf(op, counters)) {
    c->calls += 1;
    c->tensors += static_cast<int64_t>(op.proposal.tensors.size());
  }
}

// What every way of moving it sends: a tensor to be summed once from every other rank to its owner,
// one to be broadcast once from its owner to every other rank.
void countSuccess(const Operation& op, int rank, int size, double seconds,
                  OwnerCounters& counters) {
  const bool reducing = op.proposal.op == OwnerOp::reduce;
  std::map<c10::ScalarType, PayloadBytes> moved;
  for (const TensorSpec& tensor : op.proposal.tensors) {
    PayloadBytes& bytes = moved[tensor.dtype];
    const bool owned = tensor.owner == rank;
    (reducing != owned ? bytes.sent : bytes.received) += tensor.bytes() * (owned ? size - 1 : 1);
  }
  for (OperationCounters* c : countersOf(op, counters)) {
    c->seconds += seconds;
    for (const auto& [dtype, bytes] : moved) {
      c->bytes_sent += bytes.sent;
      c->bytes_received += bytes.received;
      c->bytes_by_dtype[dtype].sent += bytes.sent;
      c->bytes_by_dtype[dtype].received += bytes.received;
    }
  }
}

std::string profilingTitle(const Operation& op) {
  const std::string title = op.proposal.op == OwnerOp::reduce ? "dmuon::reduce_to_owners"
                                                              : "dmuon::broadcast_from_owners";
  return op.proposal.label.empty() ? title : title + " " + op.proposal.label;
}

std::string nameOnGroup(const char* operation, const std::string& group, int rank, int size) {
  return c10::str("dmuon: ", operation, " on group '", group, "' rank ", rank, " of ", size);
}

}  // namespace dmuon
