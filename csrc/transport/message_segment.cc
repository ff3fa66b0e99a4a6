#include "transport/message_segment.h"

#include <algorithm>
#include <utility>

namespace pydist {
namespace {

constexpr std::size_t kSlots = 4;
// Address space for the slots of all lanes together; memory is taken by the lanes in use.
constexpr std::size_t kAllSlotsBytes = std::size_t{32} << 20;
constexpr std::size_t kLeastSlotBytes = std::size_t{4} << 10;
constexpr std::size_t kMostSlotBytes = std::size_t{256} << 10;

std::size_t lanes(int size) noexcept {
  return static_cast<std::size_t>(size) * static_cast<std::size_t>(size);
}

std::size_t slot_bytes(int size) noexcept {
  const std::size_t share = kAllSlotsBytes / lanes(size) / kSlots;
  return std::clamp(share / kLeastSlotBytes * kLeastSlotBytes, kLeastSlotBytes, kMostSlotBytes);
}

std::size_t counters_bytes(int size) noexcept {
  return round_up(lanes(size) * sizeof(LaneCounters), page_bytes());
}

std::size_t rings_bytes() noexcept { return round_up(sizeof(LaneRings), page_bytes()); }

std::size_t lane_bytes(int size) noexcept {
  return round_up(rings_bytes() + kSlots * slot_bytes(size), page_bytes());
}

}  // namespace

MessageSegment::MessageSegment(SharedSegment segment, int size) noexcept
    : segment_(std::move(segment)), size_(size) {}

std::size_t MessageSegment::bytes(int size) noexcept {
  return counters_bytes(size) + lanes(size) * lane_bytes(size);
}

void MessageSegment::reserve_counters(int sender) const {
  segment_.reserve(lane(sender, 0) * sizeof(LaneCounters),
                   static_cast<std::size_t>(size_) * sizeof(LaneCounters),
                   "message counters of a group");
}

std::size_t MessageSegment::lane_offset(int sender, int receiver) const noexcept {
  return counters_bytes(size_) + lane(sender, receiver) * lane_bytes(size_);
}

void MessageSegment::reserve_lane(int sender, int receiver) const {
  segment_.reserve(lane_offset(sender, receiver), lane_bytes(size_), "messages between two ranks");
}

LaneCounters& MessageSegment::counters(int sender, int receiver) const noexcept {
  return reinterpret_cast<LaneCounters*>(segment_.data())[lane(sender, receiver)];
}

LaneRings& MessageSegment::rings(int sender, int receiver) const noexcept {
  return *reinterpret_cast<LaneRings*>(segment_.data() + lane_offset(sender, receiver));
}

ShmChannelMemory MessageSegment::channel(int sender, int receiver) const noexcept {
  LaneCounters& ends = counters(sender, receiver);
  return {segment_.data() + lane_offset(sender, receiver) + rings_bytes(), slot_bytes(size_),
          kSlots, &ends.sent, &ends.released};
}

}  // namespace pydist
