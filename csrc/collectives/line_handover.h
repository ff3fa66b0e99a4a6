// How far two cores are from each other: the time that a cache line which one has written takes to
// be seen by the other. Cores that share a cache take some ten nanoseconds, cores that don't
// several times that. Where a hypervisor moves a machine's cores this changes while a program runs,
// and with it what every collective takes.

#pragma once

#include <cstddef>
#include <cstdint>

#include "base/deadline.h"

namespace pydist {

// Bytes that each of the two ranks needs: one line, and its neighbour, which processors fetch with
// it.
inline constexpr std::size_t kHandoverBytes = 128;

// Two ranks hand a count to and fro, `turns` times, rounded to a multiple of ten that is not 0:
// each writes it to its own line and looks at the other's. Returns the nanoseconds of one handover,
// of the quickest tenth of the turns: one in which a rank was interrupted says nothing.
//
// Both lines lie in memory that both ranks share, at a multiple of kHandoverBytes, and hold zeros
// when either of them calls it. One of the two `begins`. Neither sleeps: each has a core of its
// own. Throws Timeout where the other is not heard of by the deadline.
[[nodiscard]] double time_line_handover(std::byte* mine, const std::byte* theirs, bool begins,
                                        std::uint64_t turns, Deadline deadline);

}  // namespace pydist
