// Collectives on buffers that the other ranks can read where they lie, in the ranks' allocation
// heaps (memory/allocation_heap.h, Route::kShared) or through the kernel (memory/process_memory.h,
// Route::kSingleCopy): each rank reads what it needs, and writes its own memory alone.
//
//   all_reduce   Of heaps alone. In pieces. Of each piece a rank reduces its slice of everybody's
//                input into its own output, and then copies the other slices out of the outputs of
//                their owners, while they are in cache. Two pieces in flight. By all ranks
//                together: (2p+1)s bytes and as many more, (p-1)s, as have left the cache before
//                they are copied.
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
[[nodiscard]] Task run_in_place(Collective& run);

}  // namespace pydist
