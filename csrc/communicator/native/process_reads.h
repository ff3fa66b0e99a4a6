// How a rank reads a message out of its sender's process.

#pragma once

#include <memory>

#include "collectives/group.h"
#include "transport/messages.h"

namespace pydist {

// Null where not all ranks of the group may read the memory of all.
[[nodiscard]] ReadProcess process_reads(std::shared_ptr<const Group> group);

}  // namespace pydist
