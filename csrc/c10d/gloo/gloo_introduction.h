// What the ranks of a group on gloo tell each other once gloo has connected them: which processes
// they are, and how they reach each other by connections of our own (gloo_control.h).

#pragma once

#include <string>
#include <vector>

#include "base/deadline.h"
#include "c10d/gloo/gloo_channel.h"
#include "c10d/gloo/gloo_control.h"
#include "health/process_identity.h"

namespace pydist {

// Collective. Returns the processes of all ranks, and gives the channel its connections, on all
// ranks or on none: where some can't be made the log of those ranks says why (at level info), and
// the group goes on without. Throws what the channel does.
[[nodiscard]] std::vector<ProcessIdentity> introduce_on_gloo(GlooChannel& channel,
                                                             const std::string& group,
                                                             const GlooNode::Place& place,
                                                             Deadline deadline);

}  // namespace pydist
