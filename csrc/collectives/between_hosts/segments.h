// How the collectives between hosts cut what they send, and what they check of what comes. For the
// files of this folder alone.

#pragma once

#include <algorithm>
#include <cstddef>
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

// Says where the segments of a block belong, each of so many elements, that come next from a rank:
// the first after `first_after` others, which come alone, and then in turns with such as long as
// there are any; `others` in all. Nothing may travel in another type than the block's.
inline void expect_segments(ReceiveChannel& channel, const Block& block, std::size_t elements,
                            std::size_t element_bytes, std::size_t others = 0,
                            std::size_t first_after = 0) {
  for (std::size_t index = 0; index < parts_in(block.count, elements); ++index) {
    const Block part = part_of(block, index, elements, element_bytes);
    channel.expect(index + std::min(others, first_after + index),
                   {part.data, part.count * element_bytes});
  }
}

// What has come, which must be `bytes` long.
[[nodiscard]] inline const std::byte* received(ReceiveChannel& channel, std::size_t bytes) {
  const std::span<const std::byte> slot = channel.slot();
  PYDIST_CHECK(slot.size() == bytes);
  return slot.data();
}

}  // namespace pydist
