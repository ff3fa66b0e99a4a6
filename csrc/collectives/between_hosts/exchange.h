// The direct exchange of run_between_hosts(): every rank sends to every other one what that one
// needs. Precondition: all have posted, and agree.

#pragma once

#include "collectives/between_hosts/channels.h"
#include "collectives/collective_steps.h"
#include "collectives/task.h"

namespace pydist {

// all_reduce, reduce_scatter and reduce.
[[nodiscard]] Task exchange_and_reduce(Collective& run, Channels& channels);

// The other kinds, which move blocks as they are.
[[nodiscard]] Task exchange_blocks(Collective& run, Channels& channels);

}  // namespace pydist
