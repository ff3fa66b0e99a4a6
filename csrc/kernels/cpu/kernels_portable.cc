// The kernels for what every processor of the target has: SSE2 on x86-64, anything elsewhere.

#define PYDIST_KERNELS_PORTABLE 1
#include "kernels/cpu/convert_kernels.inc.h"
#include "kernels/cpu/optimizer_step_kernels.inc.h"
#include "kernels/cpu/reduce_kernels.inc.h"

namespace pydist::kernels {

void reduce_portable(const ReduceJob& job) noexcept { reduce_here(job); }

void copy_streaming_portable(void* output, const void* input, std::size_t bytes) noexcept {
  copy_streaming_here(output, input, bytes);
}

void widen_portable(DType from, const void* input, float* output, std::size_t count) noexcept {
  widen_here(from, input, output, count);
}

void narrow_portable(DType to, const float* input, void* output, std::size_t count) noexcept {
  narrow_here(to, input, output, count);
}

void adam_step_portable(const AdamFactors& factors, const StepJob& job) noexcept {
  adam_step_here(factors, job);
}

void sgd_step_portable(const SgdFactors& factors, const StepJob& job) noexcept {
  sgd_step_here(factors, job);
}

void step_traffic_portable(std::size_t state_count, const StepJob& job) noexcept {
  step_traffic_here(state_count, job);
}

}  // namespace pydist::kernels
