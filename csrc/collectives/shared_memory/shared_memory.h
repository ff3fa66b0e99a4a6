// Collectives straight over shared memory: every rank reads and writes what it needs where it
// lies. Elements are always combined in rank order 0..p-1.
//
// Five ways, chosen from what all ranks posted (p ranks, s bytes a rank, per rank):
//
//   one shot     The data rides in the post (up to 256 bytes) or in one transit slot, written
//                before the post. Everybody reads everybody's. One synchronisation; reads (p-1)s.
//   pipelined    Chunks travel through transit that stays in cache. all_reduce: copy in what others
//                own, reduce one's own slice, copy out what others reduced; three chunks in flight.
//                Everything else: copy in, copy (or reduce) out; two in flight.
//   symmetric    The buffers lie in the symmetric heap. all_reduce: the owner of a slice reads it
//                from p buffers and writes the result to p buffers: 2ps bytes of memory traffic by
//                all ranks together, the lower bound. Two synchronisations.
//   shared       The buffers lie in heaps that the others may read: see in_place.h.
//   single copy  What nobody reduces is read through the kernel, see in_place.h and decision 12.
//
// Where elements travel in a type of their own (wire.h), they are converted in the copies into and
// out of posts and slots, so s is what travels. Such calls never take the symmetric or the shared
// way.

#pragma once

#include "collectives/call.h"
#include "collectives/group.h"
#include "collectives/task.h"

namespace pydist {

// Runs one collective. Group::begin() has numbered it. The call's buffers outlive the task.
// `is_posted`: AtOnce::post() has begun it.
[[nodiscard]] Task run_shared_memory(Group& group, Call call, bool is_posted = false);

}  // namespace pydist
