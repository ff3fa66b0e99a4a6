#include "transport/lane_segment.h"

#include <algorithm>
#include <utility>

namespace pydist {
namespace {

constexpr std::size_t kLeastSlotBytes = std::size_t{4} << 10;

std::size_t counters_bytes(const LaneTable& table) noexcept {
  return round_up(table.count() * sizeof(LaneCounters), page_bytes());
}

// What rides along with an announcement, at most. Beyond some KiB, what a message waits for is the
// copying of its data; and all announcements of a lane together take no more than a part of what
// its slots do.
std::size_t riding_bytes(std::size_t slot_bytes) noexcept {
  return std::max(std::size_t{32}, slot_bytes / 64);
}

// From one announcement to the next.
std::size_t announcement_bytes(std::size_t slot_bytes) noexcept {
  return round_up(sizeof(Announcement) + riding_bytes(slot_bytes), alignof(LaneRings));
}

std::size_t rings_bytes(const LaneShape& shape, std::size_t slot_bytes) noexcept {
  const std::size_t announcements =
      shape.has_announcements ? kLaneDepth * announcement_bytes(slot_bytes) : 0;
  return round_up(sizeof(LaneRings) + announcements, page_bytes());
}

std::size_t lane_bytes(const LaneShape& shape, std::size_t slot_bytes) noexcept {
  return round_up(rings_bytes(shape, slot_bytes) + shape.slots * slot_bytes, page_bytes());
}

// How long a slot may be where there are so many lanes.
std::size_t share_of(std::size_t lanes, const LaneShape& shape, std::size_t most) noexcept {
  const std::size_t share = shape.all_bytes / lanes / shape.slots;
  return std::clamp(share / kLeastSlotBytes * kLeastSlotBytes, kLeastSlotBytes, most);
}

// Of a slot, between hosts and inside one.
std::size_t bytes_between(const LaneTable& table, const LaneShape& shape) noexcept {
  return share_of(table.most(), shape, shape.slot_bytes);
}

std::size_t bytes_inside(const LaneTable& table, const LaneShape& shape) noexcept {
  return share_of(table.most_inside(), shape,
                  std::max(shape.slot_bytes, std::min(table.hosts() * shape.bytes_for_a_host,
                                                      shape.bytes_for_all_hosts)));
}

}  // namespace

LaneTable::LaneTable(const Placement& placement, int host)
    : size_(placement.size()),
      hosts_(static_cast<std::size_t>(placement.hosts())),
      here_(static_cast<int>(placement.ranks_on(host).size())) {
  for (int each = 0; each < placement.hosts(); ++each) {
    most_here_ = std::max(most_here_, static_cast<int>(placement.ranks_on(each).size()));
  }
  if (!placement.spans_hosts()) {
    return;
  }
  std::vector<int> index(static_cast<std::size_t>(size_), -1);
  for (const int rank : placement.ranks_on(host)) {
    index[static_cast<std::size_t>(rank)] = placement.index_on_host(rank);
  }
  index_ = std::make_shared<const std::vector<int>>(std::move(index));
}

std::size_t LaneTable::first_of(int sender) const noexcept {
  return is_here(sender) ? pairs(index_here(sender), size_)
                         : pairs(here_, size_) + pairs(sender, here_);
}

std::size_t LaneTable::place_of(int sender, int receiver) const noexcept {
  return first_of(sender) +
         static_cast<std::size_t>(is_here(sender) ? receiver : index_here(receiver));
}

LaneSegment::LaneSegment(SharedSegment segment, LaneTable table, const LaneShape& shape) noexcept
    : segment_(std::move(segment)),
      table_(std::move(table)),
      shape_(shape),
      slot_bytes_(bytes_between(table_, shape)),
      slot_bytes_inside_(bytes_inside(table_, shape)) {}

std::size_t LaneSegment::bytes(const LaneTable& table, const LaneShape& shape) noexcept {
  const std::size_t between =
      table.hosts() == 1 ? 0 : table.count() * lane_bytes(shape, bytes_between(table, shape));
  return counters_bytes(table) +
         table.count_inside() * lane_bytes(shape, bytes_inside(table, shape)) + between;
}

void LaneSegment::reserve_counters(int sender) const {
  segment_.reserve(table_.first_of(sender) * sizeof(LaneCounters),
                   table_.count_of(sender) * sizeof(LaneCounters),
                   "counters between the ranks of a group");
}

LaneSegment::Lane LaneSegment::lane(int sender, int receiver) const noexcept {
  const std::size_t inside = lane_bytes(shape_, slot_bytes_inside_);
  const std::size_t first = counters_bytes(table_);
  if (table_.is_inside(sender, receiver)) {
    return {first + table_.place_inside(sender, receiver) * inside, slot_bytes_inside_};
  }
  return {first + table_.count_inside() * inside +
              table_.place_of(sender, receiver) * lane_bytes(shape_, slot_bytes_),
          slot_bytes_};
}

void LaneSegment::reserve_lane(int sender, int receiver) const {
  const Lane its = lane(sender, receiver);
  segment_.reserve(its.offset, lane_bytes(shape_, its.slot_bytes), "what passes between two ranks");
}

LaneCounters& LaneSegment::counters(int sender, int receiver) const noexcept {
  return reinterpret_cast<LaneCounters*>(segment_.data())[table_.place_of(sender, receiver)];
}

LaneRings& LaneSegment::rings(int sender, int receiver) const noexcept {
  return *reinterpret_cast<LaneRings*>(segment_.data() + lane(sender, receiver).offset);
}

Announcement& LaneSegment::announcement(int sender, int receiver,
                                        std::uint64_t number) const noexcept {
  const Lane its = lane(sender, receiver);
  return *reinterpret_cast<Announcement*>(segment_.data() + its.offset + sizeof(LaneRings) +
                                          number % kLaneDepth * announcement_bytes(its.slot_bytes));
}

std::size_t LaneSegment::most_riding_bytes(int sender, int receiver) const noexcept {
  return riding_bytes(lane(sender, receiver).slot_bytes);
}

ShmChannelMemory LaneSegment::channel(int sender, int receiver) const noexcept {
  LaneCounters& ends = counters(sender, receiver);
  const Lane its = lane(sender, receiver);
  return {segment_.data() + its.offset + rings_bytes(shape_, its.slot_bytes),
          its.slot_bytes,
          shape_.slots,
          &ends.sent,
          &ends.released,
          rings(sender, receiver).lengths.data(),
          shape_.window,
          shape_.release_every};
}

}  // namespace pydist
