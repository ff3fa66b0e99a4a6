// torch tensors as the buffers of an operation.
//
// Communicators move dense memory, of the CPU or of a CUDA device. A tensor that is contiguous is
// used as it stands; any other (transposed, strided, expanded, lazily conjugated) has a
// *dense copy*, made before the operation, and copied back after it where it is an output.
//
// A DenseTensors belongs to one operation and to one thread at a time.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "communicator/communicator.h"
#include "communicator/operation.h"

namespace pydist {

// The engine's name of an element type; nothing for a type that it can only move as bytes.
[[nodiscard]] std::optional<DType> dtype_of(at::ScalarType type) noexcept;

// torch's name of an element type; kFloat8 is torch.uint8, its bytes.
[[nodiscard]] at::ScalarType scalar_type_of(DType dtype) noexcept;

// Whether an average over ranks of such elements is a sum that is divided behind it.
[[nodiscard]] bool is_averaged_by_division(at::ScalarType type) noexcept;

// Throws InvalidUsage where the engine has no arithmetic for the tensor's elements.
void require_arithmetic(const at::Tensor& tensor, OpKind kind, ReduceOp op);

class DenseTensors {
 public:
  // kHeld keeps the memory of the tensors alive as long as this object; kBorrowed leaves that to
  // the caller, unless it is on a device: see Operation::owner.
  enum class Lifetime { kHeld, kBorrowed };

  // For operations of the communicator, which is looked at here alone.
  DenseTensors(const Communicator& communicator, Lifetime lifetime) noexcept
      : communicator_(&communicator), lifetime_(lifetime) {}

  // Throw InvalidUsage for what the communicator cannot move: other devices, sparse or quantized
  // tensors, tensors without memory.
  [[nodiscard]] Buffer input(const at::Tensor& tensor);
  // finish_outputs() divides the integers of the result by `divisor` and drops the fraction.
  [[nodiscard]] Buffer output(const at::Tensor& tensor, std::int64_t divisor = 1);

  [[nodiscard]] std::vector<Buffer> inputs(const std::vector<at::Tensor>& tensors);
  [[nodiscard]] std::vector<Buffer> outputs(const std::vector<at::Tensor>& tensors);

  // Tells an operation on these tensors its stream, which is the current one of their device, and
  // who keeps their memory there. Once they are all known.
  void attach_to(Operation& operation);

  // That stream; null where the device has no streams.
  [[nodiscard]] void* stream() const noexcept { return stream_; }

  [[nodiscard]] bool is_on_device() const noexcept { return torch_stream_.has_value(); }
  // Of that stream; 0 on the CPU.
  [[nodiscard]] int device_index() const noexcept {
    return torch_stream_ ? torch_stream_->device_index() : 0;
  }

  // Whether that stream is captured into a CUDA graph.
  [[nodiscard]] bool is_captured() const;

  // Whether an output has a dense copy or is to be divided, so that finish_outputs() has something
  // to do.
  [[nodiscard]] bool has_unfinished() const noexcept { return !unfinished_.empty(); }

  [[nodiscard]] bool are_unfinished_on_device() const {
    return has_unfinished() && !unfinished_[0].target.is_cpu();
  }

  // Divides results and writes those in dense copies to where they belong, in the order of the
  // calling thread's stream. Once, and only after the operation has succeeded.
  void finish_outputs() const;
  // The same on a stream of its own; the results are there when it returns. For threads that have
  // nothing to do with the caller's.
  void finish_outputs_and_wait() const;

 private:
  // An output that is not yet what the caller asked for when the operation is over.
  struct Unfinished {
    at::Tensor target;
    at::Tensor dense;  // undefined where the operation writes into the target
    std::int64_t divisor;
  };

  void require_movable(const at::Tensor& tensor) const;
  // `dense` is a tensor itself, or its dense copy.
  [[nodiscard]] Buffer buffer_of(const at::Tensor& dense, void* data);
  void hold(const at::Tensor& tensor);

  class Owner;

  const Communicator* communicator_;
  Lifetime lifetime_;
  void* stream_ = nullptr;
  std::optional<c10::Stream> torch_stream_;  // the same, as torch knows it
  // Storages rather than tensors: releasing a tensor may need the GIL, and the thread that
  // finishes an operation must never wait for that.
  std::vector<c10::Storage> storages_;  // until there is an owner
  std::shared_ptr<const Owner> owner_;
  std::vector<Unfinished> unfinished_;
};

}  // namespace pydist
