#include "reducer/operations/operations_under_way.h"

#include <algorithm>

#include "c10d/device_streams.h"
#include "c10d/tensors.h"
#include "c10d/work.h"

namespace pydist {

WorkPtr OperationsUnderWay::submit(Operation operation, const at::Tensor& input,
                                   const at::Tensor& output, std::string label,
                                   const std::optional<DeviceShare>& share) {
  DenseTensors tensors(*communicator_, DenseTensors::Lifetime::kHeld);
  operation.label = std::move(label);
  if (input.defined()) {
    operation.inputs = {tensors.input(input)};
  }
  if (output.defined()) {
    operation.outputs = {tensors.output(output)};
  }
  if (share) {
    const auto address = [&tensors](const at::Tensor& number) {
      return static_cast<const double*>(tensors.input(number).data);
    };
    operation.device_factor.numerator = address(share->unit.on_current_stream());
    if (share->total.defined()) {
      operation.device_factor.denominator = address(share->total);
    }
  }
  tensors.attach_to(operation);
  const bool is_captured = tensors.is_captured();
  auto held = std::make_shared<DenseTensors>(std::move(tensors));
  WorkPtr work = communicator_->submit(std::move(operation));
  // A captured operation works on memory of the arena, which stays, so no tensors have to be held.
  return works_.emplace_back(is_captured ? std::move(work)
                                         : with_tensors(std::move(work), std::move(held)));
}

WorkPtr OperationsUnderWay::combine(const Combination& combination, const at::Tensor& memory,
                                    const at::Tensor& shard, std::string label) {
  Operation operation;
  operation.kind = shard.defined() ? OpKind::kReduceScatter : OpKind::kAllReduce;
  operation.op = combination.op;
  operation.factor = combination.factor;
  if (memory.scalar_type() == at::kFloat) {
    operation.wire_dtype = wire_dtype_;
  }
  return submit(std::move(operation), memory, shard.defined() ? shard : memory, std::move(label),
                combination.share);
}

WorkPtr OperationsUnderWay::broadcast(const at::Tensor& memory, int root, std::string label) {
  const bool is_root = communicator_->rank() == root;
  return submit({.kind = OpKind::kBroadcast, .peer = root}, is_root ? memory : at::Tensor(),
                is_root ? at::Tensor() : memory, std::move(label));
}

void OperationsUnderWay::wait_for(Work& work) const {
  const std::optional<Device>& device = arena_.device();
  if (!device || !work.wait_on_stream(current_stream(*device).native_handle())) {
    work.wait();
  }
}

void OperationsUnderWay::wait() const {
  for (const WorkPtr& work : works_) {
    wait_for(*work);
  }
}

void OperationsUnderWay::drain() const {
  for (const WorkPtr& work : works_) {
    // After the end of a capture, no stream can wait for what it has recorded.
    work->is_completed() ? work->wait() : wait_for(*work);
  }
}

bool OperationsUnderWay::is_over() const {
  return std::all_of(works_.begin(), works_.end(),
                     [](const WorkPtr& work) { return work->is_completed(); });
}

}  // namespace pydist
