// The file is long because it holds each collective of c10d::Backend, one function for one.

#include "c10d/process_group.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <exception>
#include <iterator>
#include <optional>
#include <utility>

#include "base/deadline.h"
#include "base/error.h"
#include "c10d/errors.h"
#include "c10d/sparse/sparse_all_reduce.h"

namespace pydist {
namespace {

using std::chrono::milliseconds;
using WorkRef = TorchProcessGroup::WorkRef;
using Tensors = TorchProcessGroup::Tensors;

// Below the tags that the gloo communicator keeps for itself. Each barrier has a tag of its own, so
// that a rank that was late for one does not answer the next with it.
constexpr std::uint64_t kMonitoredBarrierTags = 0x6d000000;
constexpr std::uint64_t kMonitoredBarrierTagCount = 0x01000000;

// How long dist.destroy_process_group(), which all ranks call, waits until the group has ended on
// all of them. Then no thread of the group disturbs what comes next, a capture into a CUDA graph,
// say. It is as long as NCCL waits for a neighbour that goes on.
constexpr std::chrono::seconds kEndPatience{5};

constexpr std::array kReduceOps{
    std::pair(c10d::ReduceOp::SUM, ReduceOp::kSum),
    std::pair(c10d::ReduceOp::AVG, ReduceOp::kMean),
    std::pair(c10d::ReduceOp::PRODUCT, ReduceOp::kProd),
    std::pair(c10d::ReduceOp::MIN, ReduceOp::kMin),
    std::pair(c10d::ReduceOp::MAX, ReduceOp::kMax),
    std::pair(c10d::ReduceOp::BAND, ReduceOp::kBand),
    std::pair(c10d::ReduceOp::BOR, ReduceOp::kBor),
    std::pair(c10d::ReduceOp::BXOR, ReduceOp::kBxor),
    std::pair(c10d::ReduceOp::PREMUL_SUM, ReduceOp::kPremulSum),
};

ReduceOp reduce_op_of(const c10d::ReduceOp& op) {
  for (const auto& [torchs, ours] : kReduceOps) {
    if (torchs == static_cast<c10d::ReduceOp::RedOpType>(op)) {
      return ours;
    }
  }
  throw InvalidUsage("Unknown reduce operator.");
}

// torch 2.11 has no name of its own for them.
template <typename OpType>
constexpr OpType coalesced_reduce_scatters() {
  if constexpr (requires { OpType::REDUCE_SCATTER_TENSOR_COALESCED; }) {
    return OpType::REDUCE_SCATTER_TENSOR_COALESCED;
  } else {
    return OpType::COALESCED;
  }
}

double factor_of(const c10d::ReduceOp& op) {
  // Newer versions of torch call it PreMulSumSupplement as well.
  const auto* const supplement = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) {
    throw InvalidUsage(
        "PREMUL_SUM needs a factor: torch.distributed._make_nccl_premul_sum(factor).");
  }
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>()
                                             : supplement->double_factor;
}

std::optional<Deadline> deadline_of(milliseconds timeout) {
  return timeout > milliseconds::zero() ? std::optional(Deadline::in(timeout)) : std::nullopt;
}

const at::Tensor& only(const Tensors& tensors, OpKind kind) {
  if (tensors.size() != 1) {
    throw InvalidUsage(join(to_string(kind), ": expected one tensor, got ", tensors.size(), "."));
  }
  return tensors[0];
}

const Tensors& only(const std::vector<Tensors>& lists, OpKind kind) {
  if (lists.size() != 1) {
    throw InvalidUsage(
        join(to_string(kind), ": expected one list of tensors, got ", lists.size(), "."));
  }
  return lists[0];
}

// One buffer for each rank: `splits` rows of the tensor's first dimension, or equal parts.
std::vector<Buffer> split_rows(const Buffer& whole, const at::Tensor& tensor,
                               const std::vector<std::int64_t>& splits, int size) {
  if (splits.empty()) {
    return {whole};
  }
  const std::int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  std::int64_t total = 0;
  for (const std::int64_t split : splits) {
    if (split < 0) {
      throw InvalidUsage(join("all_to_all: a split size is ", split, "."));
    }
    total += split;
  }
  if (splits.size() != static_cast<std::size_t>(size) || total != rows) {
    throw InvalidUsage(join("all_to_all: expected ", size, " split sizes that add up to the ", rows,
                            " rows of the tensor, got ", splits.size(), " that add up to ", total,
                            "."));
  }
  const std::size_t row_count = rows == 0 ? 0 : whole.count / static_cast<std::size_t>(rows);
  std::vector<Buffer> buffers;
  Buffer next = whole;
  for (const std::int64_t split : splits) {
    next.count = row_count * static_cast<std::size_t>(split);
    buffers.push_back(next);
    next.data = static_cast<std::byte*>(next.data) + next.bytes();
  }
  return buffers;
}

Tensors flatten(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const Tensors& list : lists) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

bool is_profiled() { return at::hasCallbacks(); }

// What the profiler shows.
std::string title_of(c10d::OpType type) { return "pydist:" + c10d::opTypeToString(type); }

}  // namespace

TorchProcessGroup::Call::Call(const Communicator& communicator, c10d::OpType type,
                              milliseconds timeout, bool is_async)
    : type(type),
      timeout(timeout),
      is_async(is_async),
      tensors(communicator,
              is_async ? DenseTensors::Lifetime::kHeld : DenseTensors::Lifetime::kBorrowed) {}

Operation& TorchProcessGroup::Call::add(OpKind kind, int peer) {
  Operation& operation = operations.emplace_back();
  operation.kind = kind;
  operation.peer = peer;
  operation.deadline = deadline_of(timeout);
  return operation;
}

TorchProcessGroup::TorchProcessGroup(CommunicatorPtr communicator, milliseconds timeout)
    : Backend(communicator->rank(), communicator->size()),
      communicator_(std::move(communicator)),
      options_(c10::make_intrusive<ProcessGroupOptions>("pydist", timeout)) {
  communicator_->set_timeout(timeout);
  options_->group_name = communicator_->name();
}

TorchProcessGroup::~TorchProcessGroup() = default;

// Note [Averages of integers]
// The engine defines no mean of integers, whose fraction nobody should lose by accident. Programs
// for torch.distributed expect what NCCL does: the sum, with the element type's own overflow,
// divided by the number of ranks, and the fraction dropped (towards zero: the average of -1 and -2
// is -1).
std::int64_t TorchProcessGroup::set_op(Operation& operation, const c10d::ReduceOp& op,
                                       const at::Tensor& tensor) const {
  operation.op = reduce_op_of(op);
  if (operation.op == ReduceOp::kPremulSum) {
    operation.factor = factor_of(op);
  }
  require_arithmetic(tensor, operation.kind, operation.op);
  if (operation.op != ReduceOp::kMean || !is_averaged_by_division(tensor.scalar_type())) {
    return 1;
  }
  operation.op = ReduceOp::kSum;
  return size_;
}

WorkRef TorchProcessGroup::wrap(c10d::OpType type, WorkPtr work, Tensors results) {
  const std::string title = is_profiled() ? title_of(type) : std::string();
  return c10::make_intrusive<TorchWork>(rank_, type, std::move(work), std::move(results),
                                        sequence_.load(), title.empty() ? nullptr : title.c_str());
}

TorchProcessGroup::Coalescing* TorchProcessGroup::coalescing() {
  if (coalescing_count_.load(std::memory_order_relaxed) == 0) {
    return nullptr;
  }
  const std::lock_guard lock(coalescing_mutex_);
  const auto found = coalescing_.find(std::this_thread::get_id());
  // References stay valid while other threads insert and erase theirs.
  return found == coalescing_.end() ? nullptr : &found->second;
}

WorkRef TorchProcessGroup::launch(Call call) {
  if (!call.operations.empty() && !is_point_to_point(call.operations[0].kind)) {
    ++sequence_;
  }
  for (Operation& operation : call.operations) {
    call.tensors.attach_to(operation);
  }
  if (Coalescing* const open = coalescing()) {
    auto deferred = std::make_shared<DeferredWork>();
    WorkRef work = wrap(call.type, deferred, call.results);
    open->push_back({std::move(call.operations),
                     std::make_shared<DenseTensors>(std::move(call.tensors)),
                     std::move(call.results), std::move(deferred)});
    return work;
  }
  if (!call.is_async && call.operations.size() == 1) {
    if (is_profiled()) {
      RECORD_USER_SCOPE(title_of(call.type));
      communicator_->run(std::move(call.operations[0]));
    } else {
      communicator_->run(std::move(call.operations[0]));
    }
    call.tensors.finish_outputs();
    static const WorkPtr done = completed_work();
    return c10::make_intrusive<TorchWork>(rank_, call.type, done, std::move(call.results),
                                          sequence_.load());
  }
  const auto tensors = std::make_shared<DenseTensors>(std::move(call.tensors));
  std::vector<WorkPtr> started;
  try {
    if (call.operations.size() == 1) {
      started.push_back(communicator_->submit(std::move(call.operations[0])));
    } else {
      started = communicator_->submit_grouped(std::move(call.operations));
    }
    return wrap(call.type, with_tensors(combine(started), tensors), std::move(call.results));
  } catch (...) {
    std::rethrow_exception(communicator_->fail_started(started));
  }
}

void TorchProcessGroup::startCoalescing() {
  guarded_for_torch([&] {
    const std::lock_guard lock(coalescing_mutex_);
    if (!coalescing_.try_emplace(std::this_thread::get_id()).second) {
      throw InvalidUsage("A coalescing block is open on this thread; they do not nest.");
    }
    ++coalescing_count_;
  });
}

WorkRef TorchProcessGroup::endCoalescing() {
  return guarded_for_torch([&] {
    Coalescing block;
    {
      const std::lock_guard lock(coalescing_mutex_);
      const auto found = coalescing_.find(std::this_thread::get_id());
      if (found == coalescing_.end()) {
        throw InvalidUsage("No coalescing block is open on this thread.");
      }
      block = std::move(found->second);
      coalescing_.erase(found);
      --coalescing_count_;
    }
    std::vector<Operation> operations;
    for (Deferred& call : block) {
      operations.insert(operations.end(), std::make_move_iterator(call.operations.begin()),
                        std::make_move_iterator(call.operations.end()));
    }
    std::vector<WorkPtr> started;
    try {
      started = communicator_->submit_grouped(std::move(operations));
      auto next = started.cbegin();
      std::vector<WorkPtr> works;
      Tensors results;
      for (Deferred& call : block) {
        const auto first = next;
        next += static_cast<std::ptrdiff_t>(call.operations.size());
        call.work->attach(with_tensors(combine({first, next}), call.tensors));
        works.push_back(call.work);
        results.insert(results.end(), call.results.begin(), call.results.end());
      }
      return wrap(c10d::OpType::COALESCED, combine(std::move(works)), std::move(results));
    } catch (...) {
      const std::exception_ptr error = communicator_->fail_started(started);
      for (const Deferred& call : block) {
        call.work->finish(error);
      }
      std::rethrow_exception(error);
    }
  });
}

WorkRef TorchProcessGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return guarded_for_torch([&] {
    const at::Tensor& tensor = only(tensors, OpKind::kBroadcast);
    Call call = new_call(c10d::OpType::BROADCAST, options);
    Operation& operation = call.add(OpKind::kBroadcast, static_cast<int>(options.rootRank));
    if (operation.peer == rank_) {
      operation.inputs = {call.tensors.input(tensor)};
    } else {
      operation.outputs = {call.tensors.output(tensor)};
    }
    call.results = tensors;
    return launch(std::move(call));
  });
}

WorkRef TorchProcessGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return guarded_for_torch([&] {
    if (tensors.size() == 1 && tensors[0].layout() != at::kStrided) {
      return allreduce_sparse(tensors, options);
    }
    Call call = new_call(c10d::OpType::ALLREDUCE, options);
    for (const at::Tensor& tensor : tensors) {
      Operation& operation = call.add(OpKind::kAllReduce);
      const std::int64_t divisor = set_op(operation, options.reduceOp, tensor);
      operation.inputs = {call.tensors.input(tensor)};
      operation.outputs = {call.tensors.output(tensor, divisor)};
    }
    call.results = tensors;
    return launch(std::move(call));
  });
}

WorkRef TorchProcessGroup::allreduce_sparse(Tensors& tensors,
                                            const c10d::AllreduceOptions& options) {
  return guarded_for_torch([&] {
    const at::Tensor& tensor = only(tensors, OpKind::kAllReduce);
    if (coalescing() != nullptr) {
      throw InvalidUsage("all_reduce of a sparse tensor cannot be part of a coalescing block.");
    }
    const ReduceOp op = reduce_op_of(options.reduceOp);
    const double factor = op == ReduceOp::kPremulSum ? factor_of(options.reduceOp) : 1.0;
    ++sequence_;
    SparseSums sums(*communicator_, {tensor}, op, factor, deadline_of(options.timeout));
    return wrap(c10d::OpType::_ALLREDUCE_SPARSE, sums.finish_elsewhere(), tensors);
  });
}

WorkRef TorchProcessGroup::allreduce_coalesced(Tensors& tensors,
                                               const c10d::AllreduceCoalescedOptions& options) {
  return allreduce(tensors, options);
}

WorkRef TorchProcessGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return guarded_for_torch([&] {
    const at::Tensor& tensor = only(tensors, OpKind::kReduce);
    Call call = new_call(c10d::OpType::REDUCE, options);
    Operation& operation = call.add(OpKind::kReduce, static_cast<int>(options.rootRank));
    const std::int64_t divisor = set_op(operation, options.reduceOp, tensor);
    operation.inputs = {call.tensors.input(tensor)};
    if (operation.peer == rank_) {
      operation.outputs = {call.tensors.output(tensor, divisor)};
    }
    call.results = tensors;
    return launch(std::move(call));
  });
}

WorkRef TorchProcessGroup::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) {
  return guarded_for_torch([&] {
    const Tensors& blocks = only(outputs, OpKind::kAllGather);
    Call call = new_call(c10d::OpType::ALLGATHER, options);
    Operation& operation = call.add(OpKind::kAllGather);
    operation.inputs = {call.tensors.input(only(inputs, OpKind::kAllGather))};
    operation.outputs = call.tensors.outputs(blocks);
    call.results = blocks;
    return launch(std::move(call));
  });
}

WorkRef TorchProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& options) {
  return guarded_for_torch([&] {
    Call call = new_call(c10d::OpType::_ALLGATHER_BASE, options);
    Operation& operation = call.add(OpKind::kAllGather);
    operation.inputs = {call.tensors.input(input)};
    operation.outputs = {call.tensors.output(output)};
    call.results = {output};
    return launch(std::move(call));
  });
}

WorkRef TorchProcessGroup::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                               const c10d::AllgatherOptions& options) {
  return guarded_for_torch([&] {
    // One list for each rank, each with one tensor for each input.
    if (outputs.size() != static_cast<std::size_t>(size_)) {
      throw InvalidUsage(
          join("all_gather: expected ", size_, " lists of outputs, got ", outputs.size(), "."));
    }
    Call call(*communicator_, c10d::OpType::ALLGATHER_COALESCED, options.timeout,
              /*is_async=*/true);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      Operation& operation = call.add(OpKind::kAllGather);
      operation.inputs = {call.tensors.input(inputs[i])};
      for (const Tensors& list : outputs) {
        if (list.size() != inputs.size()) {
          throw InvalidUsage(join("all_gather: every list of outputs must have ", inputs.size(),
                                  " tensors as the inputs have, but one has ", list.size(), "."));
        }
        operation.outputs.push_back(call.tensors.output(list[i]));
      }
    }
    call.results = flatten(outputs);
    return launch(std::move(call));
  });
}

WorkRef TorchProcessGroup::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& options) {
  return guarded_for_torch([&] {
    if (outputs.size() != inputs.size()) {
      throw InvalidUsage(
          join("all_gather: ", inputs.size(), " inputs but ", outputs.size(), " outputs."));
    }
    Call call(*communicator_, c10d::OpType::ALLGATHER_COALESCED, options.timeout,
              /*is_async=*/true);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      Operation& operation = call.add(OpKind::kAllGather);
      operation.inputs = {call.tensors.input(inputs[i])};
      operation.outputs = {call.tensors.output(outputs[i])};
    }
    call.results = outputs;
    return launch(std::move(call));
  });
}

WorkRef TorchProcessGroup::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::GatherOptions& options) {
  return guarded_for_torch([&] {
    Call call = new_call(c10d::OpType::GATHER, options);
    Operation& operation = call.add(OpKind::kGather, static_cast<int>(options.rootRank));
    operation.inputs = {call.tensors.input(only(inputs, OpKind::kGather))};
    if (operation.peer == rank_) {
      call.results = only(outputs, OpKind::kGather);
      operation.outputs = call.tensors.outputs(call.results);
    }
    return launch(std::move(call));
  });
}

WorkRef TorchProcessGroup::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                   const c10d::ScatterOptions& options) {
  return guarded_for_torch([&] {
    Call call = new_call(c10d::OpType::SCATTER, options);
    Operation& operation = call.add(OpKind::kScatter, static_cast<int>(options.rootRank));
    if (operation.peer == rank_) {
      operation.inputs = call.tensors.inputs(only(inputs, OpKind::kScatter));
    }
    operation.outputs = {call.tensors.output(only(outputs, OpKind::kScatter))};
    call.results = outputs;
    return launch(std::move(call));
  });
}

WorkRef TorchProcessGroup::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                          const c10d::ReduceScatterOptions& options) {
  return guarded_for_torch([&] {
    const at::Tensor& output = only(outputs, OpKind::kReduceScatter);
    Call call = new_call(c10d::OpType::REDUCE_SCATTER, options);
    Operation& operation = call.add(OpKind::kReduceScatter);
    const std::int64_t divisor = set_op(operation, options.reduceOp, output);
    operation.inputs = call.tensors.inputs(only(inputs, OpKind::kReduceScatter));
    operation.outputs = {call.tensors.output(output, divisor)};
    call.results = outputs;
    return launch(std::move(call));
  });
}

WorkRef TorchProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& options) {
  return guarded_for_torch([&] {
    Call call = new_call(c10d::OpType::_REDUCE_SCATTER_BASE, options);
    Operation& operation = call.add(OpKind::kReduceScatter);
    const std::int64_t divisor = set_op(operation, options.reduceOp, input);
    operation.inputs = {call.tensors.input(input)};
    operation.outputs = {call.tensors.output(output, divisor)};
    call.results = {output};
    return launch(std::move(call));
  });
}

WorkRef TorchProcessGroup::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return guarded_for_torch([&] {
    if (outputs.size() != inputs.size()) {
      throw InvalidUsage(
          join("reduce_scatter: ", inputs.size(), " inputs but ", outputs.size(), " outputs."));
    }
    Call call(*communicator_, coalesced_reduce_scatters<c10d::OpType>(), options.timeout,
              /*is_async=*/true);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      Operation& operation = call.add(OpKind::kReduceScatter);
      const std::int64_t divisor = set_op(operation, options.reduceOp, inputs[i]);
      operation.inputs = {call.tensors.input(inputs[i])};
      operation.outputs = {call.tensors.output(outputs[i], divisor)};
    }
    call.results = outputs;
    return launch(std::move(call));
  });
}

WorkRef TorchProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                         std::vector<std::int64_t>& output_splits,
                                         std::vector<std::int64_t>& input_splits,
                                         const c10d::AllToAllOptions& options) {
  return guarded_for_torch([&] {
    Call call = new_call(c10d::OpType::ALLTOALL_BASE, options);
    Operation& operation = call.add(OpKind::kAllToAll);
    operation.inputs = split_rows(call.tensors.input(input), input, input_splits, size_);
    operation.outputs = split_rows(call.tensors.output(output), output, output_splits, size_);
    call.results = {output};
    return launch(std::move(call));
  });
}

WorkRef TorchProcessGroup::alltoall(Tensors& outputs, Tensors& inputs,
                                    const c10d::AllToAllOptions& options) {
  return guarded_for_torch([&] {
    const auto size = static_cast<std::size_t>(size_);
    if (inputs.size() != size || outputs.size() != size) {
      throw InvalidUsage(join("all_to_all: expected ", size, " inputs and outputs, got ",
                              inputs.size(), " and ", outputs.size(), "."));
    }
    Call call = new_call(c10d::OpType::ALLTOALL, options);
    Operation& operation = call.add(OpKind::kAllToAll);
    operation.inputs = call.tensors.inputs(inputs);
    operation.outputs = call.tensors.outputs(outputs);
    call.results = outputs;
    return launch(std::move(call));
  });
}

WorkRef TorchProcessGroup::send(Tensors& tensors, int peer, int tag) {
  return guarded_for_torch([&] {
    Call call(*communicator_, c10d::OpType::SEND, c10d::kUnsetTimeout, /*is_async=*/true);
    Operation& operation = call.add(OpKind::kSend, peer);
    operation.tag = static_cast<std::uint32_t>(tag);
    operation.inputs = {call.tensors.input(only(tensors, OpKind::kSend))};
    return launch(std::move(call));
  });
}

WorkRef TorchProcessGroup::recv(Tensors& tensors, int peer, int tag) {
  return guarded_for_torch([&] {
    Call call(*communicator_, peer == kAnySource ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV,
              c10d::kUnsetTimeout, /*is_async=*/true);
    Operation& operation = call.add(OpKind::kRecv, peer);
    operation.tag = static_cast<std::uint32_t>(tag);
    operation.outputs = {call.tensors.output(only(tensors, OpKind::kRecv))};
    call.results = tensors;
    return launch(std::move(call));
  });
}

WorkRef TorchProcessGroup::recvAnysource(Tensors& tensors, int tag) {
  return recv(tensors, kAnySource, tag);
}

WorkRef TorchProcessGroup::barrier(const c10d::BarrierOptions& options) {
  return guarded_for_torch([&] {
    Call call = new_call(c10d::OpType::BARRIER, options);
    call.add(OpKind::kBarrier);
    return launch(std::move(call));
  });
}

// Every rank tells rank 0 that it is here, and hears from it once all are.
void TorchProcessGroup::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  guarded_for_torch([&] {
    const milliseconds patience =
        options.timeout > milliseconds::zero() ? options.timeout : communicator_->timeout();
    const Deadline deadline = Deadline::in(patience);
    const std::uint64_t tag =
        kMonitoredBarrierTags + monitored_barriers_++ % kMonitoredBarrierTagCount;
    auto token = std::make_shared<std::vector<std::uint8_t>>(static_cast<std::size_t>(size_));
    const auto start = [&](OpKind kind, int peer) {
      Operation operation;
      operation.kind = kind;
      operation.peer = peer;
      operation.tag = tag;
      // A late rank must not fail the group, so the message may take for ever.
      operation.deadline = Deadline::never();
      operation.label = "monitored_barrier";
      Buffer byte{.data = token->data() + peer, .count = 1, .dtype = DType::kUInt8, .device = {}};
      (kind == OpKind::kSend ? operation.inputs : operation.outputs).push_back(byte);
      WorkPtr work = communicator_->submit(std::move(operation));
      work->on_completion([token](const Work::Outcome&) {});
      return work;
    };
    const auto came = [&](Work& work) {
      try {
        work.wait(deadline);
        return true;
      } catch (const Timeout&) {
        if (work.is_completed()) {
          throw;
        }
        return false;
      }
    };
    if (rank_ != 0) {
      const WorkPtr confirmed = start(OpKind::kRecv, 0);
      const WorkPtr told = start(OpKind::kSend, 0);
      if (!came(*told) || !came(*confirmed)) {
        throw Timeout(join("monitored_barrier: rank ", rank_, " heard nothing from rank 0 within ",
                           patience.count(),
                           " ms: rank 0 or a rank that it waits for is late; its "
                           "error says which."),
                      communicator_->culprit(0, "said nothing in time"));
      }
      return;
    }
    std::vector<WorkPtr> arrivals;
    for (int peer = 1; peer < size_; ++peer) {
      arrivals.push_back(start(OpKind::kRecv, peer));
    }
    std::string late;
    std::vector<int> late_ranks;
    for (int peer = 1; peer < size_; ++peer) {
      if (came(*arrivals[static_cast<std::size_t>(peer - 1)])) {
        continue;
      }
      late += (late.empty() ? "" : ", ") + std::to_string(peer);
      late_ranks.push_back(peer);
      if (!wait_all_ranks) {
        break;
      }
    }
    if (!late.empty()) {
      std::string message =
          join("monitored_barrier: rank ", late, " did not come within ", patience.count(), " ms.");
      for (const std::string& line : communicator_->whereabouts()) {
        message += "\n  " + line;
      }
      Blame blame = communicator_->culprit(late_ranks[0], "did not come in time");
      blame.ranks = late_ranks;
      throw Timeout(message, std::move(blame));
    }
    for (int peer = 1; peer < size_; ++peer) {
      start(OpKind::kSend, peer)->wait(deadline);
    }
  });
}

// The engine counts from the group's creation on every rank alike.
void TorchProcessGroup::setSequenceNumberForGroup() {}

std::uint64_t TorchProcessGroup::getSequenceNumberForGroup() { return sequence_.load(); }

void TorchProcessGroup::setTimeout(milliseconds timeout) {
  communicator_->set_timeout(timeout);
  options_->timeout = timeout;
}

c10d::ErrorType TorchProcessGroup::getError() {
  const std::exception_ptr failure = communicator_->failure();
  if (failure == nullptr) {
    return c10d::ErrorType::SUCCESS;
  }
  switch (describe(failure).kind) {
    case ErrorKind::kTimeout:
      return c10d::ErrorType::TIMEOUT;
    case ErrorKind::kPeerLost:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

c10::intrusive_ptr<c10d::Backend> TorchProcessGroup::split(
    const c10::intrusive_ptr<c10d::Store>& /*store*/, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& options) {
  if (std::find(ranks.begin(), ranks.end(), rank_) == ranks.end()) {
    return nullptr;
  }
  return guarded_for_torch([&]() -> c10::intrusive_ptr<c10d::Backend> {
    // torch hands down its own default where the script gave no time-out.
    const bool is_given = options && options->timeout != kBackendDefaultTimeout;
    return c10::make_intrusive<TorchProcessGroup>(
        communicator_->split(ranks), is_given ? options->timeout : communicator_->timeout());
  });
}

void TorchProcessGroup::abort() {
  communicator_->abort(Aborted(
      join("abort() was called on rank ", rank_, " of group '", communicator_->name(), "'.")));
}

void TorchProcessGroup::shutdown() {
  guarded_for_torch([&] { communicator_->check_shutdown(); });
  communicator_->shutdown();
  communicator_->wait_for_end(Deadline::in(kEndPatience));
}

}  // namespace pydist
