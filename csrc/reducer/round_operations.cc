// The operations of a round: how they are started, waited for and forgotten.

#include <algorithm>
#include <optional>
#include <utility>

#include "c10d/device_streams.h"
#include "c10d/tensors.h"
#include "c10d/work.h"
#include "reducer/reducer.h"

namespace pydist {

WorkPtr Reducer::submit(Operation operation, const at::Tensor& input, const at::Tensor& output,
                        std::string label) {
  DenseTensors tensors(*communicator_, DenseTensors::Lifetime::kHeld);
  operation.label = std::move(label);
  if (input.defined()) {
    operation.inputs = {tensors.input(input)};
  }
  if (output.defined()) {
    operation.outputs = {tensors.output(output)};
  }
  operation.stream = tensors.stream();
  const bool is_captured = tensors.is_captured();
  WorkPtr work = communicator_->submit(std::move(operation));
  // A captured operation works on memory of the arena, which stays, so no tensors have to be held.
  return works_.emplace_back(is_captured ? std::move(work)
                                         : with_tensors(std::move(work), std::move(tensors)));
}

WorkPtr Reducer::combine(const at::Tensor& memory, std::string label) {
  Operation operation;
  operation.kind = OpKind::kAllReduce;
  operation.op = round_.combination->op;
  operation.factor = round_.combination->factor;
  if (options_.wire_dtype && memory.scalar_type() == at::kFloat) {
    operation.wire_dtype = options_.wire_dtype;
  }
  return submit(std::move(operation), memory, memory, std::move(label));
}

WorkPtr Reducer::combine_shards(const at::Tensor& memory, const at::Tensor& shard,
                                std::string label) {
  Operation operation;
  operation.kind = OpKind::kReduceScatter;
  operation.op = round_.combination->op;
  operation.factor = round_.combination->factor;
  if (options_.wire_dtype && memory.scalar_type() == at::kFloat) {
    operation.wire_dtype = options_.wire_dtype;
  }
  return submit(std::move(operation), memory, shard, std::move(label));
}

WorkPtr Reducer::broadcast(const at::Tensor& memory, int root, std::string label) {
  Operation operation;
  operation.kind = OpKind::kBroadcast;
  operation.peer = root;
  const bool is_root = communicator_->rank() == root;
  return submit(std::move(operation), is_root ? memory : at::Tensor(),
                is_root ? at::Tensor() : memory, std::move(label));
}

// For what follows on the current stream, or on the host.
void Reducer::wait_for(Work& work) const {
  const std::optional<Device> device = arena_.device();
  if (!device || !work.wait_on_stream(current_stream(*device).native_handle())) {
    work.wait();
  }
}

void Reducer::wait() {
  for (const WorkPtr& work : works_) {
    wait_for(*work);
  }
  wait_for_hook();
}

void Reducer::wait_for_hook() {
  if (!hook_ || hook_->is_idle()) {
    return;
  }
  if (has_hook_thrown()) {
    // One rank's hook has not taken part, so what the other ranks' hooks wait for may never come.
    hook_->forget();
    return;
  }
  hook_->wait();
}

bool Reducer::is_idle() const { return works_.empty() && (!hook_ || hook_->is_idle()); }

bool Reducer::is_over() const {
  return std::all_of(works_.begin(), works_.end(),
                     [](const WorkPtr& work) { return work->is_completed(); }) &&
         (!hook_ || hook_->is_over());
}

// Waits for what an earlier round has left under way.
void Reducer::drain() {
  if (is_idle()) {
    return;
  }
  try {
    for (const WorkPtr& work : works_) {
      // After the end of a capture, no stream can wait for what it has recorded.
      work->is_completed() ? work->wait() : wait_for(*work);
    }
    wait_for_hook();
  } catch (...) {
    if (is_over()) {
      forget();
    }
    throw;
  }
  forget();
}

void Reducer::forget() {
  works_.clear();
  if (hook_) {
    hook_->forget();
  }
}

}  // namespace pydist
