// The kernels of the instruction set that this file is compiled for. Included once by each
// kernels_<set>.cc.

#pragma once

#include "kernels/cpu/convert_kernels.inc.h"
#include "kernels/cpu/kernel_set.h"
#include "kernels/cpu/optimizer_step_kernels.inc.h"
#include "kernels/cpu/reduce_kernels.inc.h"

namespace pydist::kernels {
namespace {

constexpr KernelSet kKernelsHere = {reduce_here,      copy_streaming_here, widen_here,
                                    narrow_here,      adam_step_here,      sgd_step_here,
                                    step_traffic_here};

}  // namespace
}  // namespace pydist::kernels
