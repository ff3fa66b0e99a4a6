// How a collective over shared memory begins: this rank's post, and what follows from everybody's.
//
// For the files of this folder alone.

#pragma once

#include <cstdint>

#include "collectives/call.h"
#include "collectives/group.h"
#include "collectives/shared_memory/route.h"

namespace pydist {

// Fills in this rank's post, and the slot if its data goes there. Precondition: both may be
// written.
void fill_post(Group& group, const Call& call, Given given);

// A root has nothing to learn from the others: it writes and goes.
[[nodiscard]] inline bool waits_for_posts(const Group& group, const Call& call) noexcept {
  return !is_one_to_all(call.kind) || group.rank() != call.root;
}

// Which way all ranks take. Precondition: posted_by_all() holds, if waits_for_posts(). Throws
// Mismatch where the calls of the ranks differ.
[[nodiscard]] Route agree_on_route(Group& group, const Call& call);

}  // namespace pydist
