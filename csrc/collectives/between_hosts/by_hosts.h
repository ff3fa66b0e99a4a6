// all_reduce of large buffers where hosts have several ranks: first each host reduces, then the
// hosts exchange, then each host spreads the result. So 2(h-1)/h s cross between two hosts and the
// h - 1 others, whatever the number of ranks on each, instead of as much for every rank.
//
// The buffer is divided into as many lanes as the host with the fewest ranks has of them: on every
// host rank i drives lane i over its own connections. A lane is divided into a piece for each host.
// In every step a part of each piece of all lanes goes through these stations, each some steps
// after the one before:
//
//   1  every rank gives the ranks that drive lanes on its host what they reduce
//   2  these combine it in rank order to the sums of their host, and send them to whose pieces they
//      are
//   3  these combine the hosts' sums in the order of hosts, and send the result to the other hosts
//   4  whoever drives a lane takes the results of its other pieces, and gives all to its host
//   5  every rank takes them
//
// Where all ranks of a host have their buffers in its symmetric heap, 1 and 5 fall away there: who
// drives a lane reads what it reduces where it lies, and puts the results where they belong.
//
// A host's sum is rounded to the type that travels (the buffers' own, or the call's wire type), and
// so is the result. The order depends on the ranks' hosts alone, so results are equal on all ranks
// and from run to run. (Horovod's hierarchical all_reduce and NCCL's "collnet" trees do alike.)

#pragma once

#include "collectives/between_hosts/channels.h"
#include "collectives/collective_steps.h"
#include "collectives/task.h"
#include "topology/placement.h"

namespace pydist {

// Whether a group so placed has anything to gain from it.
[[nodiscard]] bool has_hosts_of_several_ranks(const Placement& placement) noexcept;

// Whether parts of the pieces of all hosts fit into a slot and are still worth a frame each.
[[nodiscard]] bool fits_by_hosts(const Channels& channels, const Placement& placement) noexcept;

// Precondition: all have posted, and agree.
[[nodiscard]] Task all_reduce_by_hosts(Collective& run, Channels& channels,
                                       const Placement& placement);

}  // namespace pydist
