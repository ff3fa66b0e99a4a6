// The lock behind the right to drive (wait_loop.h): taken and given back once an operation, mostly
// by one thread. Giving it back is a store and a fence, and the caller needs the fence anyway: see
// Group::ring_after_fence().

#pragma once

#include <atomic>

namespace pydist {

// For std::unique_lock.
class DriveLock {
 public:
  [[nodiscard]] bool try_lock() noexcept {
    int expected = kFree;
    return state_.compare_exchange_strong(expected, kHeld, std::memory_order_acquire,
                                          std::memory_order_relaxed);
  }

  void lock() noexcept {
    if (try_lock()) {
      return;
    }
    waiters_.fetch_add(1, std::memory_order_relaxed);
    // Pairs with the fence in unlock(): either this thread sees that the lock is free, or the one
    // that frees it sees this one.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    while (!try_lock()) {
      state_.wait(kHeld, std::memory_order_relaxed);
    }
    waiters_.fetch_sub(1, std::memory_order_relaxed);
  }

  // With a sequentially consistent fence after the release.
  void unlock() noexcept {
    state_.store(kFree, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (waiters_.load(std::memory_order_relaxed) != 0) {
      state_.notify_one();
    }
  }

 private:
  static constexpr int kFree = 0;
  static constexpr int kHeld = 1;

  std::atomic<int> state_{kFree};
  std::atomic<int> waiters_{0};
};

}  // namespace pydist
