// A thread of the engine's own: it has a name, and no signal is handled on it. Signals are the
// user's, so a handler must run on one of the user's threads.

#pragma once

#include <functional>
#include <thread>

namespace pydist {

// `name` has at most 15 characters.
[[nodiscard]] std::thread start_engine_thread(const char* name, std::function<void()> run);

}  // namespace pydist
