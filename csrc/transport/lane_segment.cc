#include "transport/lane_segment.h"

#include <algorithm>
#include <utility>

namespace pydist {
namespace {

constexpr std::size_t kLeastSlotBytes = std::size_t{4} << 10;

std::size_t counters_bytes(const LaneTable& table) noexcept {
  return round_up(table.count() * sizeof(LaneCounters), page_bytes());
}

LaneLayout layout_of(const LaneShape& shape, std::size_t slot_bytes, bool has_blocks) noexcept {
  LaneLayout its{.slot_bytes = slot_bytes};
  // Beyond some KiB, what a message waits for is the copying of its data; and all announcements of
  // a lane together take no more than a part of what its data does.
  its.riding_bytes = std::max(std::size_t{32}, slot_bytes / 64);
  its.announcement_bytes = round_up(sizeof(Announcement) + its.riding_bytes, alignof(LaneRings));
  const std::size_t announcements = shape.is_for_messages ? kLaneDepth * its.announcement_bytes : 0;
  its.data = round_up(sizeof(LaneRings) + announcements, page_bytes());
  // Blocks are short, so that the other end begins soon.
  its.block_bytes = has_blocks ? block_bytes_of(slot_bytes) : 0;
  its.piece_bytes = has_blocks ? piece_bytes_of(slot_bytes) : 0;
  const std::size_t data = has_blocks
                               ? kAheadBlocks * its.block_bytes + kStreamBlocks * its.piece_bytes
                               : shape.slots * slot_bytes;
  its.bytes = its.data + round_up(data, page_bytes());
  return its;
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
      inside_(layout_of(shape, bytes_inside(table_, shape), shape.is_for_messages)),
      between_(layout_of(shape, bytes_between(table_, shape), /*has_blocks=*/false)),
      first_inside_(counters_bytes(table_)),
      first_between_(first_inside_ + table_.count_inside() * inside_.bytes) {}

std::size_t LaneSegment::bytes(const LaneTable& table, const LaneShape& shape) noexcept {
  const LaneSegment its(SharedSegment(), table, shape);
  return its.first_between_ + (table.hosts() == 1 ? 0 : table.count() * its.between_.bytes);
}

void LaneSegment::reserve_counters(int sender) const {
  segment_.reserve(table_.first_of(sender) * sizeof(LaneCounters),
                   table_.count_of(sender) * sizeof(LaneCounters),
                   "counters between the ranks of a group");
}

LaneSegment::Lane LaneSegment::lane(int sender, int receiver) const noexcept {
  if (table_.is_inside(sender, receiver)) {
    return {first_inside_ + table_.place_inside(sender, receiver) * inside_.bytes, &inside_};
  }
  return {first_between_ + table_.place_of(sender, receiver) * between_.bytes, &between_};
}

void LaneSegment::reserve_lane(int sender, int receiver) const {
  constexpr const char* kWhat = "what passes between two ranks";
  const Lane its = lane(sender, receiver);
  segment_.reserve(its.offset, its.layout->bytes, kWhat);
  if (shape_.is_for_messages && its.layout == &inside_) {
    segment_.reserve(lane(receiver, sender).offset + inside_.data, inside_.bytes - inside_.data,
                     kWhat);
  }
}

LaneCounters& LaneSegment::counters(int sender, int receiver) const noexcept {
  return reinterpret_cast<LaneCounters*>(segment_.data())[table_.place_of(sender, receiver)];
}

LaneRings& LaneSegment::rings(int sender, int receiver) const noexcept {
  return *reinterpret_cast<LaneRings*>(at(lane(sender, receiver).offset));
}

Announcement& LaneSegment::announcement(int sender, int receiver,
                                        std::uint64_t number) const noexcept {
  const Lane its = lane(sender, receiver);
  return *reinterpret_cast<Announcement*>(
      at(its.offset + sizeof(LaneRings) + number % kLaneDepth * its.layout->announcement_bytes));
}

std::size_t LaneSegment::most_riding_bytes(int sender, int receiver) const noexcept {
  return lane(sender, receiver).layout->riding_bytes;
}

ShmChannelMemory LaneSegment::channel(int sender, int receiver) const noexcept {
  LaneCounters& ends = counters(sender, receiver);
  const Lane its = lane(sender, receiver);
  return {at(its.offset + its.layout->data),
          its.layout->slot_bytes,
          shape_.slots,
          &ends.sent,
          &ends.released,
          rings(sender, receiver).lengths.data(),
          shape_.window,
          shape_.release_every};
}

BlockPool LaneSegment::pool(int rank, int peer, std::size_t offset, const BlockPool::Shape& shape,
                            BlockWord LaneCounters::* filled,
                            BlockWord LaneCounters::* given_back) const noexcept {
  const auto words = [&](int from, int to) {
    LaneCounters& its = counters(from, to);
    return BlockPool::Words{filled != nullptr ? &(its.*filled) : nullptr, &(its.*given_back)};
  };
  const auto [lower, higher] = std::minmax(rank, peer);
  return {{at(lane(lower, higher).offset + offset), at(lane(higher, lower).offset + offset)},
          /*own_area=*/rank > peer ? std::size_t{1} : std::size_t{0},
          shape,
          words(rank, peer),
          words(peer, rank)};
}

BlockPool LaneSegment::ahead_pool(int rank, int peer) const noexcept {
  return pool(rank, peer, inside_.data, {kAheadBlocks, inside_.block_bytes}, &LaneCounters::filled,
              &LaneCounters::given_back);
}

BlockPool LaneSegment::stream_pool(int rank, int peer) const noexcept {
  return pool(rank, peer, inside_.stream(), {kStreamBlocks, inside_.piece_bytes},
              /*filled=*/nullptr, &LaneCounters::stream_given_back);
}

BlockStream LaneSegment::stream(int rank, int peer) const noexcept {
  return {stream_pool(rank, peer), rings(rank, peer).pieces, rings(peer, rank).pieces};
}

}  // namespace pydist
