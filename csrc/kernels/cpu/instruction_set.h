// Which kernels run on this processor.
//
// Thread safety: the tables are constant; what the processor has is found out once.

#pragma once

#include <optional>

#include "kernels/cpu/kernel_set.h"
#include "kernels/cpu/reduce.h"

namespace pydist::kernels {

// By default the fastest that are usable. Throws InvalidUsage where the kernels were not compiled
// for `set`, the processor lacks it, or PYDIST_CPU_ISA makes no sense.
[[nodiscard]] const KernelSet& kernel_set(std::optional<InstructionSet> set = {});

}  // namespace pydist::kernels
