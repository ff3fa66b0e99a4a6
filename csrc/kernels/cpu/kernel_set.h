// The kernels of one instruction set: a table that kernels_<set>.cc fills in, where it is compiled,
// and all that it defines with external linkage (Note [One definition rule and instruction sets]).

#pragma once

#include <cstddef>

#include "kernels/cpu/optimizer_step_job.h"
#include "kernels/cpu/reduce_job.h"

namespace pydist::kernels {

struct KernelSet {
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

extern const KernelSet portable_kernels;
extern const KernelSet avx2_kernels;
extern const KernelSet avx512_kernels;
extern const KernelSet neon_kernels;

}  // namespace pydist::kernels
