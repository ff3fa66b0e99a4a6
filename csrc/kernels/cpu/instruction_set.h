// The kernels of one instruction set, as a table entry.
//
// Thread safety: the tables are constant; what the processor has is found out once.

#pragma once

#include <cstddef>

#include "kernels/cpu/optimizer_step_job.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cpu/reduce_job.h"

namespace pydist::kernels {

struct KernelSet {
  InstructionSet set;
  void (*reduce)(const ReduceJob& job) noexcept;
  // Around the cache on the way out.
  void (*copy_streaming)(void* output, const void* input, std::size_t bytes) noexcept;
  // As in convert.h.
  void (*widen)(DType from, const void* input, float* output, std::size_t count) noexcept;
  void (*narrow)(DType to, const float* input, void* output, std::size_t count) noexcept;
  // As in optimizer_step.h.
  void (*adam_step)(const AdamFactors& factors, const StepJob& job) noexcept;
  void (*sgd_step)(const SgdFactors& factors, const StepJob& job) noexcept;
  void (*step_traffic)(std::size_t state_count, const StepJob& job) noexcept;
};

// Throws InvalidUsage where the kernels were not compiled for `set` or the processor lacks it.
[[nodiscard]] const KernelSet& kernel_set(InstructionSet set);

// The fastest usable one. Throws InvalidUsage where PYDIST_CPU_ISA makes no sense.
[[nodiscard]] const KernelSet& chosen_kernel_set();

}  // namespace pydist::kernels
