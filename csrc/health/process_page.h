// The page that a process shows to its peers on the host: its sign of life, whom it waits for and
// its journal. Zeroed shared memory that its owner alone can write. The doorbell, which everybody
// writes, lies elsewhere.

#pragma once

#include <atomic>
#include <cstdint>

#include "health/awaited_rank.h"
#include "health/journal.h"

namespace pydist {

struct ProcessPage {
  // Monotonic time of the owner's last sign of life.
  alignas(64) std::atomic<std::int64_t> heartbeat_ns;
  // Set once the owner has shut down in good order: its death is then no failure by itself.
  std::atomic<std::uint32_t> has_departed;
  // The owner's process id, for those who are no peers of it.
  std::atomic<std::int32_t> pid;
  // Tells this page from all others.
  std::atomic<std::uint64_t> number;
  // One more than the owner's rank in its job; 0 before it has joined.
  std::atomic<std::int32_t> rank_plus_one;
  AwaitedRank awaited;
  Journal journal;
};

}  // namespace pydist
