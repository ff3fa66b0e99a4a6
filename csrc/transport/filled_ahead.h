// Blocks of a lane that its sender fills before its receiver has asked for the message: the
// receiver copies it out of there once a receive has matched it, and nobody waits for a grant.
//
// There are so many blocks and no more. A message that finds too few of them free goes another way,
// so one that nobody asks for keeps its blocks and is in nobody's way.
//
// Each end has a counter, of which it alone writes the bits, one for each block: the sender turns a
// block's over when it has filled it, the receiver when it has emptied it. A block is full where
// the two differ.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "health/condition.h"

namespace pydist {

// Some of the blocks, a bit each. The bytes of a message lie in its blocks in their order.
using BlockSet = std::uint32_t;
inline constexpr std::size_t kAheadBlocks = 32;

class FilledAhead {
 public:
  // `blocks` and the counters belong to the caller, are zeroed before the first use, and outlive
  // both ends.
  FilledAhead(std::byte* blocks, std::size_t block_bytes, Counter& filled,
              Counter& emptied) noexcept
      : blocks_(blocks), block_bytes_(block_bytes), filled_(filled), emptied_(emptied) {}

  // Of a message: half of all blocks, so that the next one may be filled while this one is emptied.
  [[nodiscard]] std::size_t most_bytes() const noexcept { return kAheadBlocks / 2 * block_bytes_; }

  // All blocks.
  [[nodiscard]] std::span<const std::byte> memory() const noexcept {
    return {blocks_, kAheadBlocks * block_bytes_};
  }

  // For the sender. Free blocks for so many bytes, more than 0; none where there are too few.
  [[nodiscard]] BlockSet find_free(std::size_t bytes) const noexcept;
  // Each is full as soon as its part of the message is there.
  void fill(BlockSet blocks, const std::byte* data, std::size_t bytes) noexcept;

  // For the receiver. Whether a message of so many bytes may lie in them.
  [[nodiscard]] bool fit(BlockSet blocks, std::size_t bytes) const noexcept;
  // Of a message whose first bytes up to `done`, the end of a block, have been copied: copies what
  // has come since. Returns up to where.
  [[nodiscard]] std::size_t copy(BlockSet blocks, std::byte* target, std::size_t bytes,
                                 std::size_t done) const noexcept;
  // All of the message has been copied.
  void empty(BlockSet blocks) noexcept;

 private:
  [[nodiscard]] std::size_t count_for(std::size_t bytes) const noexcept {
    return (bytes + block_bytes_ - 1) / block_bytes_;
  }

  std::byte* blocks_;
  std::size_t block_bytes_;
  Counter& filled_;
  Counter& emptied_;
};

}  // namespace pydist
