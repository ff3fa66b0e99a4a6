// The kernels for what every processor of the target has: SSE2 on x86-64, anything elsewhere.

#define PYDIST_KERNELS_PORTABLE 1
#include "kernels/cpu/kernel_set.inc.h"

namespace pydist::kernels {

constinit const KernelSet portable_kernels = kKernelsHere;

}  // namespace pydist::kernels
