// Whom a process waits for, as it shows its peers: they follow the waiting from one rank to the
// next, to the one that keeps all waiting.
//
// Two words on the process's page, in zeroed shared memory. The process writes them when a wait has
// lasted a little, and takes them back when the wait is over; where several of its threads wait,
// the last one counts. Thread safe; who reads while they are written may take one wait for another.

#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace pydist {

class AwaitedRank {
 public:
  // `group` is the fingerprint of the group whose ranks are numbered, `page` the number of the
  // rank's page.
  void set(std::uint64_t group, int rank, std::uint64_t page) noexcept {
    page_.store(page, std::memory_order_relaxed);
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

  // The page of whom it waits for, in whatever group; nothing where it waits for nobody.
  [[nodiscard]] std::optional<std::uint64_t> page() const noexcept {
    return word_.load(std::memory_order_relaxed) == 0
               ? std::nullopt
               : std::optional(page_.load(std::memory_order_relaxed));
  }
  // Whether the wait is in that group.
  [[nodiscard]] bool is_in(std::uint64_t group) const noexcept { return in(group).has_value(); }

 private:
  [[nodiscard]] static std::uint64_t mark(std::uint64_t group) noexcept {
    return (group ^ (group << 32)) & 0xffffffff00000000;
  }

  std::atomic<std::uint64_t> word_;
  std::atomic<std::uint64_t> page_;
};

}  // namespace pydist
