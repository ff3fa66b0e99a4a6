#include "collectives/line_handover.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>

#include "base/error.h"
#include "health/doorbell.h"

namespace pydist {
namespace {

using Count = std::atomic<std::uint64_t>;
static_assert(Count::is_always_lock_free);

constexpr std::uint64_t kParts = 10;
// Between two looks at the clock.
constexpr unsigned kLooks = 1 << 12;

void await(const Count& count, std::uint64_t value, Deadline deadline) {
  for (unsigned looks = 1; count.load(std::memory_order_acquire) < value; ++looks) {
    spin_pause();
    if (looks % kLooks == 0 && deadline.has_passed()) {
      throw Timeout("The other rank did not take its turn at handing over a cache line in time.");
    }
  }
}

}  // namespace

double time_line_handover(std::byte* mine, const std::byte* theirs, bool begins,
                          std::uint64_t turns, Deadline deadline) {
  auto& own = *reinterpret_cast<Count*>(mine);
  const auto& other = *reinterpret_cast<const Count*>(theirs);
  const std::uint64_t of_part = std::max<std::uint64_t>(1, turns / kParts);
  double least = std::numeric_limits<double>::infinity();
  std::uint64_t turn = 0;
  for (std::uint64_t part = 0; part < kParts; ++part) {
    const auto start = Deadline::Clock::now();
    for (const std::uint64_t end = turn + of_part; turn < end;) {
      ++turn;
      if (begins) {
        own.store(turn, std::memory_order_release);
        await(other, turn, deadline);
      } else {
        await(other, turn, deadline);
        own.store(turn, std::memory_order_release);
      }
    }
    const std::chrono::duration<double, std::nano> took = Deadline::Clock::now() - start;
    least = std::min(least, took.count() / (2.0 * static_cast<double>(of_part)));
  }
  return least;
}

}  // namespace pydist
