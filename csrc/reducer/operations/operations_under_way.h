// The operations of a round on the communicator: how they are started, waited for and forgotten.
//
// Owned by a reducer; for one thread at a time.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "communicator/communicator.h"
#include "reducer/gradients/gradient_arena.h"
#include "reducer/gradients/weights.h"

namespace pydist {

// How the gradients of all ranks are combined; every rank does the same.
struct Combination {
  ReduceOp op = ReduceOp::kMean;
  // kPremulSum: by what this rank's are multiplied.
  double factor = 1.0;
  std::optional<DeviceShare> share{};  // on the device, in place of the factor
};

class OperationsUnderWay {
 public:
  // `arena` is what the operations work on. Float32 gradients travel in `wire_dtype`, if given.
  OperationsUnderWay(CommunicatorPtr communicator, const GradientArena& arena,
                     std::optional<DType> wire_dtype)
      : communicator_(std::move(communicator)), arena_(arena), wire_dtype_(wire_dtype) {}

  // Tensors may be undefined where the operation has no input or no output.
  WorkPtr submit(Operation operation, const at::Tensor& input, const at::Tensor& output,
                 std::string label, const std::optional<DeviceShare>& share = std::nullopt);
  // Combines gradients in place; or, where a `shard` is defined, into this rank's shard of them.
  WorkPtr combine(const Combination& combination, const at::Tensor& memory, const at::Tensor& shard,
                  std::string label);
  WorkPtr broadcast(const at::Tensor& memory, int root, std::string label);
  // One that was submitted by other means.
  void add(WorkPtr work) { works_.push_back(std::move(work)); }

  // For what follows on the current stream, or on the host.
  void wait_for(Work& work) const;
  void wait() const;
  // The same for what an earlier round has left, which may have been captured into a CUDA graph.
  void drain() const;
  void forget() noexcept { works_.clear(); }

  [[nodiscard]] bool is_idle() const noexcept { return works_.empty(); }
  [[nodiscard]] bool is_over() const;

 private:
  const CommunicatorPtr communicator_;
  const GradientArena& arena_;
  const std::optional<DType> wire_dtype_;
  std::vector<WorkPtr> works_;  // of this round, or left by one that was given up
};

}  // namespace pydist
