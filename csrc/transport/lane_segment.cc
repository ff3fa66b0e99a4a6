#include "transport/lane_segment.h"

#include <algorithm>
#include <utility>

namespace pydist {
namespace {

constexpr std::size_t kLeastSlotBytes = std::size_t{4} << 10;

std::size_t lanes(int size) noexcept {
  return static_cast<std::size_t>(size) * static_cast<std::size_t>(size);
}

std::size_t slot_bytes(int size, const LaneShape& shape) noexcept {
  const std::size_t share = shape.all_bytes / lanes(size) / shape.slots;
  return std::clamp(share / kLeastSlotBytes * kLeastSlotBytes, kLeastSlotBytes, shape.slot_bytes);
}

std::size_t counters_bytes(int size) noexcept {
  return round_up(lanes(size) * sizeof(LaneCounters), page_bytes());
}

std::size_t rings_bytes() noexcept { return round_up(sizeof(LaneRings), page_bytes()); }

std::size_t lane_bytes(int size, const LaneShape& shape) noexcept {
  return round_up(rings_bytes() + shape.slots * slot_bytes(size, shape), page_bytes());
}

}  // namespace

LaneSegment::LaneSegment(SharedSegment segment, int size, const LaneShape& shape) noexcept
    : segment_(std::move(segment)), size_(size), shape_(shape) {}

std::size_t LaneSegment::bytes(int size, const LaneShape& shape) noexcept {
  return counters_bytes(size) + lanes(size) * lane_bytes(size, shape);
}

void LaneSegment::reserve_counters(int sender) const {
  segment_.reserve(lane(sender, 0) * sizeof(LaneCounters),
                   static_cast<std::size_t>(size_) * sizeof(LaneCounters),
                   "counters between the ranks of a group");
}

std::size_t LaneSegment::lane_offset(int sender, int receiver) const noexcept {
  return counters_bytes(size_) + lane(sender, receiver) * lane_bytes(size_, shape_);
}

void LaneSegment::reserve_lane(int sender, int receiver) const {
  segment_.reserve(lane_offset(sender, receiver), lane_bytes(size_, shape_),
                   "messages between two ranks");
}

LaneCounters& LaneSegment::counters(int sender, int receiver) const noexcept {
  return reinterpret_cast<LaneCounters*>(segment_.data())[lane(sender, receiver)];
}

LaneRings& LaneSegment::rings(int sender, int receiver) const noexcept {
  return *reinterpret_cast<LaneRings*>(segment_.data() + lane_offset(sender, receiver));
}

ShmChannelMemory LaneSegment::channel(int sender, int receiver) const noexcept {
  LaneCounters& ends = counters(sender, receiver);
  return {segment_.data() + lane_offset(sender, receiver) + rings_bytes(),
          slot_bytes(size_, shape_),
          shape_.slots,
          &ends.sent,
          &ends.released,
          rings(sender, receiver).lengths.data(),
          shape_.window,
          shape_.release_every};
}

}  // namespace pydist
