// An operation as the algorithms see it.

#pragma once

#include "collectives/call.h"
#include "communicator/operation.h"

namespace pydist {

// Of a collective that is valid; refers to the buffers of `operation`, which outlives the call.
[[nodiscard]] Call resolve(const Operation& operation, int rank, int size);

}  // namespace pydist
