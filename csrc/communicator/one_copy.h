// Memory of which all ranks of a group map one and the same copy, where they share a host.
//
// Unlike symmetric memory (Communicator::allocate), of which each rank has a part of its own.
// Nothing orders what ranks read and write there: barriers do.

#pragma once

#include <cstddef>

#include "communicator/communicator.h"
#include "memory/shared_segment.h"

namespace pydist {

// Collective: the same `bytes` on every rank. The memory is zeroed and reserved; it lives until the
// last rank lets go of it. Throws TransportError, on every rank, where ranks are on several hosts
// or there is no room.
[[nodiscard]] SharedSegment allocate_one_copy(Communicator& communicator, std::size_t bytes);

}  // namespace pydist
