// Posts as they travel between hosts, one behind the other in the payload of a frame.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "collectives/group_segment.h"

namespace pydist {

// One of them. What it holds of a post ends with the first line where nothing rides behind that.
struct PostRecord {
  int rank = 0;
  std::span<const std::byte> body;    // from body_of() on
  std::span<const std::byte> detail;  // a PostDetail
  std::span<const std::byte> counts;  // of ragged blocks, one for each rank of the group; or none
};

// The most that the records of all ranks of a group take.
[[nodiscard]] std::size_t most_record_bytes(std::size_t size) noexcept;

// Adds the post that `rank`, of a group of `size`, has in a slot.
void append_post(std::vector<std::byte>& records, const GroupSegment& segment, int rank,
                 std::size_t slot, std::size_t size);

// Takes the first record from the front of `records`, which isn't empty. Throws BadFrame where no
// rank of a group of `size` sends that.
[[nodiscard]] PostRecord take_record(std::span<const std::byte>& records, std::size_t size);

// Writes it to the place of its rank, where it is seen from now on.
void write_post(const PostRecord& record, const GroupSegment& segment, std::uint64_t sequence);

}  // namespace pydist
