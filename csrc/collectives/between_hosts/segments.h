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

// How blocks are cut into parts, which are equally long but the last, which also takes what would
// be little for one of its own.
//
// Note [Whole packets] Linux hands data to a device in packets of up to 64 KiB, which whoever sends
// them on cuts to the size of the network's (TSO): 45 times 1448 bytes in most networks. What such
// a packet costs the processor hardly depends on what it carries. So parts end where it is full.
class Cut {
 public:
  // `most_bytes`: of the longest part there may be.
  Cut(std::size_t most_bytes, std::size_t element_bytes) noexcept
      : longest_(most_bytes / element_bytes),
        elements_(std::max<std::size_t>(
            1, whole_packets(longest_ * element_bytes / 17 * 16) / element_bytes)) {}

  // Elements of the longest part there may be.
  [[nodiscard]] std::size_t longest() const noexcept { return longest_; }
  [[nodiscard]] std::size_t parts_in(std::size_t count) const noexcept {
    return count <= longest_ ? static_cast<std::size_t>(count != 0)
                             : (count - longest_ + elements_ - 1) / elements_ + 1;
  }
  // Part `index`; an empty one behind the last.
  [[nodiscard]] Block part_of(const Block& block, std::size_t index,
                              std::size_t element_bytes) const noexcept {
    const std::size_t parts = parts_in(block.count);
    const std::size_t begin = index < parts ? index * elements_ : block.count;
    return {block.data == nullptr ? nullptr : block.data + begin * element_bytes,
            index + 1 < parts ? elements_ : block.count - begin};
  }

 private:
  static constexpr std::size_t kPacket = 45 * 1448;
  static constexpr std::size_t kAlignment = 64;  // room for a frame's header, too

  static constexpr std::size_t whole_packets(std::size_t bytes) noexcept {
    const std::size_t packets = (bytes + kAlignment) / kPacket * kPacket;
    return packets == 0 ? bytes : (packets - kAlignment) / kAlignment * kAlignment;
  }

  std::size_t longest_;
  std::size_t elements_;
};

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

// Says where the segments of a block belong, which come next from a rank, in the block's type.
inline void expect_segments(ReceiveChannel& channel, const Block& block, const Cut& cut,
                            std::size_t element_bytes) {
  const std::uint64_t first = channel.released() + 1;
  for (std::size_t index = 0; index < cut.parts_in(block.count); ++index) {
    const Block part = cut.part_of(block, index, element_bytes);
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
