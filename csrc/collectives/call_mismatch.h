// Whether all ranks called the same collective with the same arguments.
//
// Every post carries what its rank called; no rank touches another's data before all that it has
// seen agree. Ranks that disagree get a Mismatch that names both sides.

#pragma once

#include <cstdint>

#include "collectives/call.h"
#include "collectives/group.h"

namespace pydist {

// Fills in what this rank's post says of the call: all but the data. `flags` of Post::Flag other
// than kRagged. The post itself is written last: see Note [One line at once].
void describe_call(Group& group, const Call& call, std::uint8_t flags = 0);

// Whether the posts of all ranks are identical, flags included. Different posts may still be of
// calls that agree. Identical posts may be of calls that disagree, in the kinds of collectives
// whose blocks differ between ranks. Precondition: all ranks have posted.
[[nodiscard]] bool all_posts_are_alike(const Group& group) noexcept;

// Compares this rank's call with the posts of `first` to `last` - 1. Throws Mismatch.
// Precondition: they are posted.
void check_agreement(const Group& group, const Call& call, int first, int last);

// What `peer` has posted is no call, nor where its data lies.
[[noreturn]] void throw_damaged(const Group& group, int peer);

}  // namespace pydist
