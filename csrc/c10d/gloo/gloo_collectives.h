// The operations of the seam, composed of what gloo has.
//
// What gloo sums itself (float64, float32, complex, and the 8, 32 and 64-bit integers it knows) is
// one all-reduce on its ring; float16 and bfloat16 travel as float32, are summed there and rounded
// once. Every other combination of operator and type is gathered in chunks and reduced by our own
// kernels, in rank order, which also makes min and max propagate NaN. All else moves as bytes:
//
//   all_reduce                  gloo's ring: 2(p-1)/p s; gathered: (p-1) s; in a 16-bit wire type,
//                               all-to-all, our kernels, all-gather: 2(p-1)/p of the 16-bit bytes
//   reduce_scatter, reduce      an all_reduce into scratch memory (gloo has nothing better)
//   all_gather                  gloo's ring; ragged: p broadcasts
//   gather, scatter             a message for each rank (only the root knows all the sizes)
//   all_to_all                  gloo's all-to-all with sizes
//
// Blocking; one call at a time for each channel.

#pragma once

#include "base/deadline.h"
#include "c10d/gloo/gloo_channel.h"
#include "communicator/operation.h"

namespace pydist {

// Runs a validated collective to its end. Throws what the channel throws.
void run_gloo_collective(GlooChannel& channel, const Operation& operation, Deadline deadline);

}  // namespace pydist
