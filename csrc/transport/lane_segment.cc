#include "transport/lane_segment.h"

#include <algorithm>
#include <utility>

namespace pydist {
namespace {

constexpr std::size_t kLeastSlotBytes = std::size_t{4} << 10;

std::size_t counters_bytes(const LaneTable& table) noexcept {
  return round_up(table.count() * sizeof(LaneCounters), page_bytes());
}

std::size_t rings_bytes() noexcept { return round_up(sizeof(LaneRings), page_bytes()); }

std::size_t lane_bytes(const LaneTable& table, const LaneShape& shape) noexcept {
  return round_up(rings_bytes() + shape.slots * LaneSegment::slot_bytes(table, shape),
                  page_bytes());
}

}  // namespace

LaneTable::LaneTable(const Placement& placement, int host)
    : size_(placement.size()), here_(static_cast<int>(placement.ranks_on(host).size())) {
  for (int each = 0; each < placement.hosts(); ++each) {
    most_ = std::max(most_, 2 * placement.ranks_on(each).size() * static_cast<std::size_t>(size_));
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
    : segment_(std::move(segment)), table_(std::move(table)), shape_(shape) {}

std::size_t LaneSegment::slot_bytes(const LaneTable& table, const LaneShape& shape) noexcept {
  const std::size_t share = shape.all_bytes / table.most() / shape.slots;
  return std::clamp(share / kLeastSlotBytes * kLeastSlotBytes, kLeastSlotBytes, shape.slot_bytes);
}

std::size_t LaneSegment::bytes(const LaneTable& table, const LaneShape& shape) noexcept {
  return counters_bytes(table) + table.count() * lane_bytes(table, shape);
}

void LaneSegment::reserve_counters(int sender) const {
  segment_.reserve(table_.first_of(sender) * sizeof(LaneCounters),
                   table_.count_of(sender) * sizeof(LaneCounters),
                   "counters between the ranks of a group");
}

std::size_t LaneSegment::lane_offset(int sender, int receiver) const noexcept {
  return counters_bytes(table_) + table_.place_of(sender, receiver) * lane_bytes(table_, shape_);
}

void LaneSegment::reserve_lane(int sender, int receiver) const {
  segment_.reserve(lane_offset(sender, receiver), lane_bytes(table_, shape_),
                   "messages between two ranks");
}

LaneCounters& LaneSegment::counters(int sender, int receiver) const noexcept {
  return reinterpret_cast<LaneCounters*>(segment_.data())[table_.place_of(sender, receiver)];
}

LaneRings& LaneSegment::rings(int sender, int receiver) const noexcept {
  return *reinterpret_cast<LaneRings*>(segment_.data() + lane_offset(sender, receiver));
}

ShmChannelMemory LaneSegment::channel(int sender, int receiver) const noexcept {
  LaneCounters& ends = counters(sender, receiver);
  return {segment_.data() + lane_offset(sender, receiver) + rings_bytes(),
          slot_bytes(table_, shape_),
          shape_.slots,
          &ends.sent,
          &ends.released,
          rings(sender, receiver).lengths.data(),
          shape_.window,
          shape_.release_every};
}

}  // namespace pydist
