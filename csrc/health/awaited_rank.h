// Whom a process waits for, as it shows its peers: they follow the waiting from one rank to the
// next, to the one that keeps all waiting.
//
// One word on the process's page, in zeroed shared memory. The process writes it when a wait has
// lasted a little, and takes it back when the wait is over; where several of its threads wait, the
// last one counts. Thread safe.

#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace pydist {

class AwaitedRank {
 public:
  // `group` is the fingerprint of the group whose ranks are numbered.
  void set(std::uint64_t group, int rank) noexcept {
    word_.store(mark(group) | (static_cast<std::uint32_t>(rank) + 1), std::memory_order_relaxed);
  }
  void clear() noexcept { word_.store(0, std::memory_order_relaxed); }

  // Nothing where the process waits for nobody, or in another group.
  [[nodiscard]] std::optional<int> in(std::uint64_t group) const noexcept {
    const std::uint64_t word = word_.load(std::memory_order_relaxed);
    const auto rank = static_cast<std::uint32_t>(word);
    if (rank == 0 || (word ^ rank) != mark(group)) {
      return std::nullopt;
    }
    return static_cast<int>(rank - 1);
  }

 private:
  [[nodiscard]] static std::uint64_t mark(std::uint64_t group) noexcept {
    return (group ^ (group << 32)) & 0xffffffff00000000;
  }

  std::atomic<std::uint64_t> word_;
};

}  // namespace pydist
