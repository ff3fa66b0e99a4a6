// The communicators of this process, so that all can be let go of before it ends: peers then learn
// of a departure, not of a death, and nothing is under way when what it refers to is torn down.
//
// Thread safe.

#pragma once

#include "communicator/communicator.h"

namespace pydist {

// For whoever makes a communicator; it is not kept alive.
void note_open(const CommunicatorPtr& communicator);

// Shuts down those that are still alive, for a process that ends.
void shut_down_all() noexcept;

// Whether that has been asked for. What the system takes back from a process is then left to it:
// the libraries that it would have to be given back to end in any order.
[[nodiscard]] bool is_process_ending() noexcept;

}  // namespace pydist
