// Collectives on buffers in the allocation heaps of the ranks (memory/allocation_heap.h): each rank
// reads what it needs where it lies, and writes its own memory alone: Route::kShared.
//
//   all_reduce   In pieces. Of each piece a rank reduces its slice of everybody's input into its
//                own output, and then copies the other slices out of the outputs of their owners,
//                while they are in cache. Two pieces in flight. By all ranks together: (2p+1)s
//                bytes and as many more, (p-1)s, as have left the cache before they are copied.
//   the others   Every rank reads what the others contribute, as in one shot. What some ranks
//                have sent ahead is read where they put it.
//
// Nobody writes into the memory of others, so a rank that fails amid an operation has only to be
// kept from taking what it has read for a result.

#pragma once

#include "collectives/collective_steps.h"
#include "collectives/task.h"

namespace pydist {

// Ends when nobody reads this rank's buffers any more.
[[nodiscard]] Task run_on_shared_allocations(Collective& run);

}  // namespace pydist
