// Memory of which all ranks of a group map one and the same copy, where they share a host.
//
// Symmetric memory (Communicator::allocate) is another thing: there each rank has a part of its
// own. Nothing but barriers orders what ranks read and write in one copy. A rank that must not
// disturb the others uses the view: what it writes there stays its own.

#pragma once

#include <cstddef>

#include "communicator/communicator.h"
#include "memory/private_view.h"
#include "memory/shared_segment.h"

namespace pydist {

struct OneCopy {
  SharedSegment segment;
  PrivateView view;
};

// Collective: the same `bytes` on every rank. The memory is zeroed and reserved; it lives until the
// last rank lets go of it. Throws TransportError, on every rank, where ranks are on several hosts
// or there is no room.
[[nodiscard]] OneCopy allocate_one_copy(Communicator& communicator, std::size_t bytes);

}  // namespace pydist
