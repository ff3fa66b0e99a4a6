// How the collectives between hosts cut what they send, and what they check of what comes. For the
// files of this folder alone.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/error.h"
#include "collectives/call.h"
#include "transport/channel.h"

namespace pydist {

// Part `index` of a block that is cut into parts of so many elements.
[[nodiscard]] inline Block part_of(const Block& block, std::size_t index, std::size_t elements,
                                   std::size_t element_bytes) noexcept {
  const std::size_t begin = std::min(block.count, index * elements);
  return {block.data == nullptr ? nullptr : block.data + begin * element_bytes,
          std::min(elements, block.count - begin)};
}

[[nodiscard]] constexpr std::size_t parts_in(std::size_t count, std::size_t elements) noexcept {
  return (count + elements - 1) / elements;
}

// What a rank contributes to the block that `rank` gets, in reduce_scatter and reduce.
[[nodiscard]] inline Block contribution(const Call& call, int rank) noexcept {
  if (call.kind == OpKind::kReduceScatter) {
    return call.inputs[rank];
  }
  return rank == call.root ? call.inputs[0] : Block{};
}

// Elements of the largest block of so many ranks.
template <typename BlockOf>
[[nodiscard]] std::size_t largest_of(int ranks, const BlockOf& block_of) {
  std::size_t largest = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    largest = std::max(largest, block_of(rank).count);
  }
  return largest;
}

// Says where the segments of a block belong, each of so many elements, which come next from a rank,
// in the block's type.
inline void expect_segments(ReceiveChannel& channel, const Block& block, std::size_t elements,
                            std::size_t element_bytes) {
  const std::uint64_t first = channel.released() + 1;
  for (std::size_t index = 0; index < parts_in(block.count, elements); ++index) {
    const Block part = part_of(block, index, elements, element_bytes);
    channel.expect(first + index, {part.data, part.count * element_bytes});
  }
}

// Which segments of a rank are results, where each comes so many steps after the sum, or
// contribution, of its index: see Note [Segments ahead].
class ResultNumbers {
 public:
  // Before the first segment has been released.
  ResultNumbers(const ReceiveChannel& channel, std::size_t sums, std::size_t ahead)
      : first_(channel.released() + 1), sums_(sums), ahead_(ahead) {}

  [[nodiscard]] std::uint64_t of(std::size_t index) const noexcept {
    return first_ + index + std::min(sums_, index + ahead_ + 1);
  }

 private:
  std::uint64_t first_;
  std::size_t sums_;
  std::size_t ahead_;
};

// What has come, which must be `bytes` long.
[[nodiscard]] inline const std::byte* received(ReceiveChannel& channel, std::size_t bytes) {
  const std::span<const std::byte> slot = channel.slot();
  PYDIST_CHECK(slot.size() == bytes);
  return slot.data();
}

}  // namespace pydist
