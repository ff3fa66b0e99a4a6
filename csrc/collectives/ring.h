// Ring reduce-scatter, all-gather, and all-reduce as the one after the other, over any channel.
//
// Chunks longer than a slot are cut into segments, and as many of them go round at a time as fill
// the channels' window. float16 and bfloat16 travel as float32 until they are complete, so they too
// are rounded once. Where the caller asks for a wire type, partial sums travel in it, and every
// rank that adds to one rounds it: for two ranks that is once, as in shared memory; for more, once
// a hop.
//
// Ranks end with the same bits, and so does every run. But the order of summation depends on the
// chunk (see ring_schedule.h), hence on where an element lies in the buffer: for more than two
// ranks, sums of floating-point numbers are not those of the shared-memory algorithms.

#pragma once

#include <cstddef>

#include "collectives/call.h"
#include "collectives/group.h"
#include "collectives/task.h"
#include "transport/channel.h"

namespace pydist {

// Whether the ring has an algorithm for it.
[[nodiscard]] constexpr bool ring_supports(OpKind kind) noexcept {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter || kind == OpKind::kAllGather;
}

// Runs one collective that ring_supports(). Group::begin() has numbered it; the posts of the group
// carry its fingerprint, the channels to the next and from the previous rank its data, in segments
// of up to `segment_bytes`: the same on all ranks, and no more than a slot of any channel takes.
[[nodiscard]] Task run_ring(Group& group, Call call, SendChannel& next, ReceiveChannel& previous,
                            std::size_t segment_bytes);

}  // namespace pydist
