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

// Note [Leaving amid an operation]
// A rank that leaves sets no failure: the others may finish what needs nothing of it any more. But
// its memory is its own again. So nobody writes there once it has left, and what was read there
// counts only if it had not left afterwards either. No rank leaves in good order before: until an
// operation is over, it waits for those who read its memory or write into it.
[[nodiscard]] inline bool has_left(const Group& group, int rank) noexcept {
  return rank != group.rank() && group.segment().control(rank).has_left.load() != 0;
}

// That a rank which has left amid the operation of the group's round goes on. So the operation
// fails as every wait for that rank does.
[[nodiscard]] inline Condition until_back(const Group& group, int rank) noexcept {
  return group.done_by(&RankControl::consumed, rank, group.round() + 1);
}

// Says for as long as it exists that this rank writes into the symmetric memory of others. Throws
// the group's failure: a rank that fails relies on it that nobody begins to write any more. The two
// sequentially consistent pairs, this rank's word and the failure's, make that sure: either this
// rank sees the failure, or whoever has set it sees the word. It is alike with a rank that leaves:
// has_left() is asked while the word stands.
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
