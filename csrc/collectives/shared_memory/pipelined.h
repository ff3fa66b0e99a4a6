// Collectives whose chunks travel through transit, several in flight: Route::kPipelined.

#pragma once

#include "collectives/collective_steps.h"
#include "collectives/task.h"

namespace pydist {

// all_reduce and reduce: three chunks in flight. Slot layout: the chunk as it is, in which the
// place of one's own slice, which nobody else needs, takes the reduced slice. Of two ranks, each
// writes the reduced slice into the other one's slot, in the place of what it has combined.
[[nodiscard]] Task reduce_through_transit(Collective& run);

// Everything but all_reduce and reduce: a round takes one piece of each block into the sender's
// slot, those for one receiver alone into a lane for each, and out of it again. Two rounds in
// flight.
[[nodiscard]] Task exchange_through_transit(Collective& run);

}  // namespace pydist
