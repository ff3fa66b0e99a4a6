// What a collective observes that reads and writes the memory of other ranks, in the symmetric
// heap.

#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

#include "collectives/group.h"

namespace pydist {

// Throws the group's failure, if there is one.
inline void throw_failure(const Group& group) {
  if (group.segment().failure().is_set()) {
    std::rethrow_exception(group.segment().failure().error());
  }
}

// After the memory of others was read: throws where the group has failed since. A rank that has
// raised has its memory to itself again, and may write there what is no input. It sets the failure
// before it raises; the fence keeps the reads before the look at that.
inline void require_right_reads(const Group& group) {
  std::atomic_thread_fence(std::memory_order_acquire);
  throw_failure(group);
}

// Says for as long as it exists that this rank writes into the symmetric memory of others. Throws
// the group's failure: a rank that fails relies on it that nobody begins to write any more. The two
// sequentially consistent pairs, this rank's word and the failure's, make that sure: either this
// rank sees the failure, or whoever has set it sees the word.
class HeapWriting {
 public:
  explicit HeapWriting(const Group& group)
      : word_(group.segment().control(group.rank()).writes_heap) {
    word_.store(1);
    try {
      throw_failure(group);
    } catch (...) {
      word_.store(0, std::memory_order_release);
      throw;
    }
  }
  HeapWriting(const HeapWriting&) = delete;
  HeapWriting& operator=(const HeapWriting&) = delete;
  ~HeapWriting() { word_.store(0, std::memory_order_release); }

 private:
  std::atomic<std::uint32_t>& word_;
};

}  // namespace pydist
