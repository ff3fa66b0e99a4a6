// The kernels for 64-bit Arm: the portable vectors, which the compiler turns into NEON, with the
// float16 conversions of the hardware. NEON is part of the base, so no flags are needed.

#define PYDIST_KERNELS_NEON 1
#include "kernels/cpu/kernel_set.inc.h"

namespace pydist::kernels {

constinit const KernelSet neon_kernels = kKernelsHere;

}  // namespace pydist::kernels
