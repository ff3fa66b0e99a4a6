// What a state machine waits for: that a counter of every rank in a range reaches a target.
//
// All waiting between ranks has this one form: counters live in shared memory, only grow, and each
// has one writer. So whoever waits can always say for whom.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace pydist {

using Counter = std::atomic<std::uint64_t>;

class Condition {
 public:
  // Holds at once.
  Condition() = default;

  // That `counter`, which `rank` writes, reaches `target`.
  Condition(const Counter& counter, int rank, std::uint64_t target) noexcept
      : counter_(reinterpret_cast<const std::byte*>(&counter)),
        rank_(rank),
        end_(rank + 1),
        target_(target) {}

  // That the counters of ranks 0 to size - 1 other than `self` reach `target`; they lie `stride`
  // bytes apart, starting at rank 0's.
  Condition(const Counter& first, std::size_t stride, int size, int self,
            std::uint64_t target) noexcept
      : counter_(reinterpret_cast<const std::byte*>(&first)),
        stride_(stride),
        end_(size),
        self_(self),
        target_(target) {}

  // Whether it holds by now. Everything that the writers did before is then visible.
  [[nodiscard]] bool holds() noexcept {
    for (; rank_ < end_; ++rank_, counter_ += stride_) {
      if (rank_ != self_ &&
          reinterpret_cast<const Counter*>(counter_)->load(std::memory_order_acquire) < target_) {
        return false;
      }
    }
    return true;
  }

  // The rank that it waits for.
  [[nodiscard]] int rank() const noexcept { return rank_; }

 private:
  const std::byte* counter_ = nullptr;
  std::size_t stride_ = 0;
  int rank_ = 0;
  int end_ = 0;
  int self_ = -1;
  std::uint64_t target_ = 0;
};

}  // namespace pydist
