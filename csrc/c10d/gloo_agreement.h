// Whether all ranks of a gloo group called the same collective with the same arguments.
//
// gloo itself does not ask: ranks that disagree wait for each other, get each other's bytes, or end
// in gloo's abort(). So every collective starts with a small all_gather of what each rank called.
// It costs about one round trip of gloo's, which large operations do not notice.

#pragma once

#include "base/deadline.h"
#include "c10d/gloo_channel.h"
#include "communicator/operation.h"

namespace pydist {

// Collective. Throws the same Mismatch on every rank where they disagree, before data moves.
void check_gloo_agreement(GlooChannel& channel, const Operation& operation, Deadline deadline);

}  // namespace pydist
