// The kernels for AVX2 with F16C and FMA. Compiled with the flags of that set; called only where it
// runs.

#if !defined(__AVX2__) || !defined(__F16C__) || !defined(__FMA__)
#error "compile this file with -mavx2 -mf16c -mfma"
#endif
#define PYDIST_KERNELS_AVX2 1
#include "kernels/cpu/kernel_set.inc.h"

namespace pydist::kernels {

constinit const KernelSet avx2_kernels = kKernelsHere;

}  // namespace pydist::kernels
