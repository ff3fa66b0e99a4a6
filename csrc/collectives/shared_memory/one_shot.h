// A collective whose data has come with the posts, or in a slot beside each: one synchronisation.

#pragma once

#include "collectives/collective_steps.h"
#include "collectives/shared_memory/route.h"

namespace pydist {

// Takes what each rank contributes from where its post says that it lies. Returns the first rank
// whose process was found to have ended before all was taken; -1 if all was. Throws where the
// kernel refuses to read in a process.
int finish_from_contributions(Collective& run);

// All that is left to do on Route::kInline and Route::kOneShot.
void finish_one_shot(Collective& run, Route route);

}  // namespace pydist
