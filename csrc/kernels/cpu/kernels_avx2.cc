// The kernels for AVX2 with F16C and FMA. Compiled with the flags of that set; called only where it
// runs.

#if !defined(__AVX2__) || !defined(__F16C__) || !defined(__FMA__)
#error "compile this file with -mavx2 -mf16c -mfma"
#endif
#define PYDIST_KERNELS_AVX2 1
#include "kernels/cpu/convert_kernels.inc.h"
#include "kernels/cpu/optimizer_step_kernels.inc.h"
#include "kernels/cpu/reduce_kernels.inc.h"

namespace pydist::kernels {

void reduce_avx2(const ReduceJob& job) noexcept { reduce_here(job); }

void copy_streaming_avx2(void* output, const void* input, std::size_t bytes) noexcept {
  copy_streaming_here(output, input, bytes);
}

void widen_avx2(DType from, const void* input, float* output, std::size_t count) noexcept {
  widen_here(from, input, output, count);
}

void narrow_avx2(DType to, const float* input, void* output, std::size_t count) noexcept {
  narrow_here(to, input, output, count);
}

void adam_step_avx2(const AdamFactors& factors, const StepJob& job) noexcept {
  adam_step_here(factors, job);
}

void sgd_step_avx2(const SgdFactors& factors, const StepJob& job) noexcept {
  sgd_step_here(factors, job);
}

void step_traffic_avx2(std::size_t state_count, const StepJob& job) noexcept {
  step_traffic_here(state_count, job);
}

}  // namespace pydist::kernels
