// Collectives on buffers that all ranks can reach, in the symmetric heap: Route::kSymmetric.

#pragma once

#include "collectives/collective_steps.h"
#include "collectives/task.h"

namespace pydist {

// Takes one round: it begins when all have posted, and ends when all have done their part.
[[nodiscard]] Task run_on_symmetric_heap(Collective& run);

}  // namespace pydist
