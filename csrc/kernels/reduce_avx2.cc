// The kernels for AVX2 with F16C. Compiled with the flags of that set; called only where it runs.

#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile this file with -mavx2 -mf16c"
#endif
#define PYDIST_KERNELS_AVX2 1
#include "kernels/convert_kernels.inc.h"
#include "kernels/reduce_kernels.inc.h"

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

}  // namespace pydist::kernels
