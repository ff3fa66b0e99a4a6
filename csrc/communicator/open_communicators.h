// The communicators of this process, so that all can be let go of before it ends: peers then learn
// of a departure, not of a death, and nothing is under way when what it refers to is torn down.
//
// Thread safe.

#pragma once

#include <string>

#include "communicator/communicator.h"

namespace pydist {

// Called by the functions that make a communicator. The list does not keep it alive.
void note_open(const CommunicatorPtr& communicator);

// Aborts those that are still alive: on every rank of each, with a message and a cause (Blame).
void abort_all(const std::string& message, const std::string& cause);

// Shuts down those that are still alive, for a process that ends.
void shut_down_all() noexcept;

// Whether the process is ending. Resources that the system reclaims anyway are then not given back,
// because the libraries that would take them end in an unknown order.
[[nodiscard]] bool is_process_ending() noexcept;

}  // namespace pydist
