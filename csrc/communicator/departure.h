// How a rank leaves a group: in good order, which it tells the others, or not.

#pragma once

#include <cstdint>

namespace pydist {

enum class Departure : std::uint32_t {
  kShutdown = 1,    // the program has called for it, or dropped the last reference
  kProgramEnd = 2,  // its program is over: with an exit status, or since it had no more to do
  // On another host: it has died, or it can't be reached. Told by one that was connected to it.
  kLost = 3,
};

// "has left the group (shutdown)", "has left the group (its program has ended)".
[[nodiscard]] const char* in_words(Departure departure) noexcept;

// How this process leaves the groups that it leaves now.
[[nodiscard]] Departure own_departure() noexcept;
// The program of this process has come to its end, whatever led to it.
void note_program_end() noexcept;

}  // namespace pydist
