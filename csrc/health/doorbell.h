// How a thread sleeps until another process wakes it: on a futex. The loop that spins before it
// sleeps is communicator/peers/wait_loop.h.
//
// Each process owns one doorbell in shared memory. Whoever changes something that the process may
// wait for rings it; ringing costs a fence and a load unless somebody sleeps. Because everything a
// process waits for rings the same bell, one thread can wait for any number of peers and groups.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace pydist {

// In shared memory, zeroed; never constructed or destroyed.
class Doorbell {
 public:
  // Wakes the owner's sleepers. Call after the change is published.
  void ring() noexcept {
    // Pairs with the fence in Sleeper: either the sleeper sees the change when it looks once more,
    // or this thread sees the sleeper.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    ring_after_fence();
  }

  // ring() for a caller that rings several bells after one sequentially consistent fence.
  void ring_after_fence() noexcept {
    if (sleepers_.load(std::memory_order_relaxed) != 0) {
      wake();
    }
  }

 private:
  friend class Sleeper;
  void wake() noexcept;

  alignas(64) std::atomic<std::uint32_t> rings_;
  std::atomic<std::uint32_t> sleepers_;
};

// Announces that this thread is about to sleep. Between construction and sleep() the caller checks
// its condition once more.
class Sleeper {
 public:
  explicit Sleeper(Doorbell& bell) noexcept : bell_(bell) {
    bell_.sleepers_.fetch_add(1, std::memory_order_seq_cst);
    seen_ = bell_.rings_.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;
  ~Sleeper() { bell_.sleepers_.fetch_sub(1, std::memory_order_relaxed); }

  // Until the bell rings (or has rung since construction), or for `longest`.
  void sleep(std::chrono::nanoseconds longest) noexcept;

 private:
  Doorbell& bell_;
  std::uint32_t seen_ = 0;
};

// One turn of a spinning loop: tells the processor to be gentle.
inline void spin_pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace pydist
