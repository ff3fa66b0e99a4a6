// How a user ends a wait early: Ctrl-C, or a signal handler that raises.
//
// Python runs signal handlers only between its own instructions, so a thread that waits in the
// engine has to ask now and then whether there is one to run. Who embeds the engine says how.

#pragma once

#include <chrono>
#include <exception>

#include "base/error.h"

namespace pydist {

// Runs what signals have asked for, and throws where the wait is to end. It runs the user's code,
// so nothing may be locked that this code could need.
using InterruptionCheck = void (*)();
void set_interruption_check(InterruptionCheck check) noexcept;

// For a thread that waits: every so often, and not before it has waited that long.
void check_interruption();
inline constexpr std::chrono::milliseconds kInterruptionInterval{50};

// Runs a wait, and keeps in `interruption` what ends it that is none of the engine's errors.
template <typename Wait>
void noting_interruption(std::exception_ptr& interruption, const Wait& wait) {
  try {
    wait();
  } catch (const Error&) {
    throw;
  } catch (...) {
    interruption = std::current_exception();
    throw;
  }
}

// For messages: what an interruption is.
inline constexpr const char* kWhatInterrupts = "Ctrl-C, or a signal handler that raised";

}  // namespace pydist
