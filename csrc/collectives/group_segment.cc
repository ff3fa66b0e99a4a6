#include "collectives/group_segment.h"

#include <utility>

namespace pydist {
namespace {

std::size_t control_bytes(int size) noexcept {
  return round_up(
      sizeof(RankControl) + kPostDepth * static_cast<std::size_t>(size) * sizeof(std::uint64_t),
      kPrefetchBytes);
}

std::size_t transit_begin(int size) noexcept {
  return round_up(sizeof(FailureRecord) + static_cast<std::size_t>(size) * control_bytes(size),
                  page_bytes());
}

std::size_t transit_bytes(std::size_t chunk_bytes) noexcept {
  return round_up(kTransitSlots * chunk_bytes, page_bytes());
}

std::size_t stages_begin(int size, std::size_t chunk_bytes) noexcept {
  return transit_begin(size) + static_cast<std::size_t>(size) * transit_bytes(chunk_bytes);
}

std::size_t stages_bytes(int size) noexcept {
  return round_up(static_cast<std::size_t>(size) * sizeof(std::atomic<MeetingStage>), page_bytes());
}

}  // namespace

GroupSegment::GroupSegment(SharedSegment segment, int size, std::size_t chunk_bytes) noexcept
    : segment_(std::move(segment)),
      size_(size),
      chunk_bytes_(chunk_bytes),
      control_stride_(control_bytes(size)),
      transit_offset_(transit_begin(size)),
      stages_offset_(stages_begin(size, chunk_bytes)) {}

std::size_t GroupSegment::bytes(int size, std::size_t chunk_bytes) noexcept {
  return stages_begin(size, chunk_bytes) + stages_bytes(size);
}

void GroupSegment::reserve_common() const {
  segment_.reserve(0, sizeof(FailureRecord), "the record of failure of a group");
  segment_.reserve(stages_offset_, stages_bytes(size_), "what the ranks of a group meet by");
}

void GroupSegment::reserve_control(int rank) const {
  segment_.reserve(sizeof(FailureRecord) + static_cast<std::size_t>(rank) * control_stride_,
                   control_stride_, "control lines of a group");
}

void GroupSegment::reserve_transit(int rank) const {
  const std::size_t bytes = transit_bytes(chunk_bytes_);
  const std::size_t offset = transit_offset_ + static_cast<std::size_t>(rank) * bytes;
  segment_.reserve(offset, bytes, "transit memory of a rank");
  segment_.populate(offset, bytes);
}

std::uint64_t* GroupSegment::block_counts(int rank, std::size_t post_slot) const noexcept {
  auto* counts = reinterpret_cast<std::uint64_t*>(reinterpret_cast<std::byte*>(&control(rank)) +
                                                  sizeof(RankControl));
  return counts + post_slot * static_cast<std::size_t>(size_);
}

std::byte* GroupSegment::transit(int rank, std::uint64_t round) const noexcept {
  return segment_.data() + transit_offset_ +
         static_cast<std::size_t>(rank) * transit_bytes(chunk_bytes_) +
         (round % kTransitSlots) * chunk_bytes_;
}

}  // namespace pydist
