// The kernels for AVX-512 (F, BW, DQ, VL). Compiled with the flags of that set; called only where
// it runs.

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || \
    !defined(__AVX512VL__)
#error "compile this file with -mavx512f -mavx512bw -mavx512dq -mavx512vl"
#endif
#define PYDIST_KERNELS_AVX512 1
#include "kernels/cpu/kernel_set.inc.h"

namespace pydist::kernels {

constinit const KernelSet avx512_kernels = kKernelsHere;

}  // namespace pydist::kernels
