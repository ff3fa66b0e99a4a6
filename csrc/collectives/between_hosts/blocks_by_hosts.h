// reduce_scatter, reduce, all_gather and broadcast of large buffers where hosts have several ranks:
// what a host has to say of a block crosses to another host once, whatever the number of ranks on
// either.
//
// Each block is of one rank, and every host has one rank that speaks for its host about it: the
// rank's counterpart (Placement), which on the rank's own host is the rank itself.
//
//   reducing     every rank gives its part to the counterpart on its host, which combines what its
//                host gives, in rank order, and sends that to the block's rank; this one combines
//                the hosts' sums in the order of hosts
//   spreading    the block's rank sends it to its counterparts, which pass it on to their hosts
//
// Sums are rounded as those of all_reduce_by_hosts().

#pragma once

#include "collectives/between_hosts/channels.h"
#include "collectives/collective_steps.h"
#include "collectives/task.h"
#include "topology/placement.h"

namespace pydist {

// Precondition of both: all have posted, and agree. Of reduce_scatter or reduce.
[[nodiscard]] Task reduce_blocks_by_hosts(Collective& run, Channels& channels,
                                          const Placement& placement);
// Of all_gather or broadcast.
[[nodiscard]] Task spread_blocks_by_hosts(Collective& run, Channels& channels,
                                          const Placement& placement);

}  // namespace pydist
