// Collectives of a group whose ranks are on several hosts.
//
// As on one host, every rank announces the operation, looks at what all have announced, and only
// then moves data. Three ways, chosen from what all ranks posted (p ranks, s bytes a rank):
//
//   inline      The data rides in the post: one message to each other host.
//   one shot    It is sent ahead of the post, into a transit slot on each other host. Every rank
//               combines all of it.
//   by hosts    all_reduce of more than that where hosts have several ranks (by_hosts.h).
//   exchange    Everything else. Each rank sends every other one what that one needs, in segments,
//               through a channel of the pair. all_reduce is a reduce-scatter and an all-gather of
//               slices, interleaved: 2(p-1)/p s sent by each rank, the bytes of a ring, in two
//               steps instead of 2(p-1). So does Thakur, Rabenseifner and Gropp (2005) for few
//               ranks, by the name of pairwise exchange.
//
// Elements are combined in rank order 0 to p-1, in all three, as on one host, and rounded once. So
// a result is the same bit by bit, however the ranks are spread over hosts.

#pragma once

#include "collectives/between_hosts/channels.h"
#include "collectives/call.h"
#include "collectives/group.h"
#include "collectives/task.h"
#include "topology/placement.h"

namespace pydist {

// Runs one collective. Group::begin() has numbered it. The call's buffers and the channels outlive
// the task.
[[nodiscard]] Task run_between_hosts(Group& group, Call call, Channels& channels,
                                     const Placement& placement);

}  // namespace pydist
