// The kernels for 64-bit Arm: the portable vectors, which the compiler turns into NEON, with the
// float16 conversions of the hardware. NEON is part of the base, so no flags are needed.

#define PYDIST_KERNELS_NEON 1
#include "kernels/cpu/convert_kernels.inc.h"
#include "kernels/cpu/optimizer_step_kernels.inc.h"
#include "kernels/cpu/reduce_kernels.inc.h"

namespace pydist::kernels {

void reduce_neon(const ReduceJob& job) noexcept { reduce_here(job); }

void copy_streaming_neon(void* output, const void* input, std::size_t bytes) noexcept {
  copy_streaming_here(output, input, bytes);
}

void widen_neon(DType from, const void* input, float* output, std::size_t count) noexcept {
  widen_here(from, input, output, count);
}

void narrow_neon(DType to, const float* input, void* output, std::size_t count) noexcept {
  narrow_here(to, input, output, count);
}

void adam_step_neon(const AdamFactors& factors, const StepJob& job) noexcept {
  adam_step_here(factors, job);
}

void sgd_step_neon(const SgdFactors& factors, const StepJob& job) noexcept {
  sgd_step_here(factors, job);
}

void step_traffic_neon(std::size_t state_count, const StepJob& job) noexcept {
  step_traffic_here(state_count, job);
}

}  // namespace pydist::kernels
