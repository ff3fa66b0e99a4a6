// The tensors of a fused optimizer step, checked: segments of flat arrays, all on the CPU or all on
// one CUDA device.
//
// Belongs to one call and one thread; borrows the tensors from the call's arguments.

#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "bindings/arguments.h"
#include "kernels/cpu/optimizer_step.h"
#include "kernels/cpu/step_threads.h"

namespace pydist {

using OptionalTensors = std::optional<TensorsArgument>;

class StepSegments {
 public:
  // Throws InvalidUsage, which names `function` and the argument, for tensors that no kernel takes
  // together. So does add_states.
  StepSegments(const char* function, const TensorsArgument& parameters,
               const TensorsArgument& gradients, const OptionalTensors& masters);

  // The next state of each segment; `name` is the argument's. At most three times.
  void add_states(const char* name, const std::vector<at::Tensor>& tensors);

  [[nodiscard]] std::size_t size() const noexcept { return segments_.size(); }
  [[nodiscard]] std::size_t state_count() const noexcept { return state_count_; }
  [[nodiscard]] const char* function() const noexcept { return function_; }
  [[nodiscard]] const StepSegment& operator[](std::size_t index) const { return segments_[index]; }
  // Of all tensors; the CPU where there are none.
  [[nodiscard]] Device device() const noexcept { return device_; }

  // Throws InvalidUsage where an array that is written shares memory with another.
  void require_apart() const;

  // Calls step(index, segment) for parts of segments that together are all of them, on `threads`,
  // or on torch's where there are none. On the CPU. The GIL is not needed.
  void for_each_part(const std::function<void(std::size_t index, const StepSegment& part)>& step,
                     StepThreads* threads = nullptr) const;

  // Tells autograd which tensors were written, as torch's in-place operators do.
  void bump_versions() const;

 private:
  // One argument of a call: a tensor for each segment.
  struct Role {
    const char* name;
    const std::vector<at::Tensor>* tensors;
    bool is_written;
  };
  struct MemoryRange;

  void add(const Role& role);
  [[nodiscard]] DType supported(const Role& role, std::size_t segment) const;
  void require_type(const Role& role, std::size_t segment) const;
  [[nodiscard]] std::string label(const Role& role, std::size_t segment) const;

  const char* function_;
  const std::vector<at::Tensor>* parameters_;
  bool has_masters_;
  Device device_;
  std::vector<Role> roles_;
  std::vector<StepSegment> segments_;
  std::size_t state_count_ = 0;
};

}  // namespace pydist
