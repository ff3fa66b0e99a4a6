// Collectives of a group whose ranks are on several hosts.
//
// As on one host, every rank announces the operation, looks at what all have announced, and only
// then moves data. They announce it directly or, from many hosts on, in rounds (announcing.h). The
// way of the data is chosen from what all ranks posted (p ranks, s bytes a rank); but in rounds,
// whose data travels with the posts, from the call alone, which is the same on every rank that
// agrees:
//
//   inline      The data rides in the post.
//   one shot    It is sent ahead of the post, into a transit slot on each other host. Every rank
//               combines all of it.
//   in rounds   all_reduce of what is not much more, between many hosts of one rank (in_rounds.h).
//   by hosts    all_reduce of more than that where hosts have several ranks (by_hosts.h).
//   exchange    Everything else. Each rank sends every other one what that one needs, in segments,
//               through a channel of the pair. all_reduce is a reduce-scatter and an all-gather of
//               slices, interleaved: 2(p-1)/p s sent by each rank, the bytes of a ring, in two
//               steps instead of 2(p-1). So does Thakur, Rabenseifner and Gropp (2005) for few
//               ranks, by the name of pairwise exchange.
//
// Elements are combined in rank order 0 to p-1, in all but that by hosts, as on one host, and
// rounded once. So a result is the same bit by bit, however the ranks are spread over hosts.

#pragma once

#include <cstddef>

#include "base/env.h"
#include "collectives/between_hosts/channels.h"
#include "collectives/call.h"
#include "collectives/group.h"
#include "collectives/task.h"
#include "topology/placement.h"

namespace pydist {

// When ranks talk in rounds. What that saves are messages, of which each takes the system some
// microseconds; what it costs are delays one after the other, and bytes. Between machines a delay
// is as long as several messages, and bytes count the more the fewer messages are saved. Containers
// of one machine have hardly any delay between them, and share the processors.
struct RoundsSettings {
  std::size_t from_hosts;
  std::size_t most_bytes;  // of the largest all_reduce whose data goes so
};

// The same on every rank, as long as both arguments and the environment's two variables are.
[[nodiscard]] RoundsSettings rounds_settings(const Environment& environment, int hosts,
                                             bool are_on_one_machine) noexcept;

// Runs one collective. Group::begin() has numbered it. The call's buffers and the channels outlive
// the task. `rounds` is the same on every rank.
[[nodiscard]] Task run_between_hosts(Group& group, Call call, Channels& channels,
                                     const Placement& placement, RoundsSettings rounds);

}  // namespace pydist
