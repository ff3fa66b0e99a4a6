// The page that a process shows to its peers: its sign of life, whom it waits for and its journal.
// Zeroed shared memory that its owner alone can write. The doorbell, which everybody writes, lies
// elsewhere. Peers on other hosts have a copy, which they ask for now and then.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

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
  // Where the owner itself has `number`, for those who read there through the kernel.
  std::atomic<std::uint64_t> number_address;
  // One more than the owner's rank in its job; 0 before it has joined.
  std::atomic<std::int32_t> rank_plus_one;
  AwaitedRank awaited;
  Journal journal;
};

// What a page holds just now, as bytes: what is written meanwhile may be in it or not.
[[nodiscard]] std::vector<std::byte> copy_of_page(const ProcessPage& page);
// Writes such a copy into the mirror of a page of another host, whose clock is `ahead_ns` behind
// this one's. `bytes` are those of a page.
void write_page(ProcessPage& mirror, std::span<const std::byte> bytes, std::int64_t ahead_ns);

}  // namespace pydist
