#include "transport/lane_segment.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/env.h"

namespace pydist::testing {
namespace {

// Of hosts with so many ranks each, which are dealt out in turn.
Placement make_placement(std::vector<int> ranks) {
  std::vector<std::string> identities;
  while (std::any_of(ranks.begin(), ranks.end(), [](int left) { return left > 0; })) {
    for (std::size_t host = 0; host < ranks.size(); ++host) {
      if (ranks[host]-- > 0) {
        identities.push_back(std::to_string(host));
      }
    }
  }
  return Placement(identities);
}

TEST(LaneTableTest, HasAPlaceForEachLaneOfAHost) {
  for (const auto& ranks : {std::vector<int>{1, 1}, {3, 1, 2}, {1, 4}, {2, 2, 2, 2}}) {
    const Placement placement = make_placement(ranks);
    for (int host = 0; host < placement.hosts(); ++host) {
      const LaneTable table(placement, host);
      std::set<std::size_t> places;
      std::size_t lanes = 0;
      for (int sender = 0; sender < placement.size(); ++sender) {
        std::size_t next = table.first_of(sender);
        for (int receiver = 0; receiver < placement.size(); ++receiver) {
          if (placement.host_of(sender) == host || placement.host_of(receiver) == host) {
            EXPECT_EQ(table.place_of(sender, receiver), next++);
            places.insert(table.place_of(sender, receiver));
            ++lanes;
          }
        }
        EXPECT_EQ(next - table.first_of(sender), table.count_of(sender));
      }
      EXPECT_EQ(places.size(), lanes);
      EXPECT_LT(*places.rbegin(), table.count());
      EXPECT_LE(table.count(), table.most());
    }
  }
}

TEST(LaneTableTest, HasAPlaceForEachPairWhereAllRanksAreHere) {
  const LaneTable table(3);
  for (int sender = 0; sender < 3; ++sender) {
    for (int receiver = 0; receiver < 3; ++receiver) {
      EXPECT_EQ(table.place_of(sender, receiver), static_cast<std::size_t>(3 * sender + receiver));
    }
  }
  EXPECT_EQ(table.count(), 9u);
}

constexpr LaneShape kLanes = collective_lanes(Environment().chunk_bytes);

LaneSegment lanes_of(const Placement& placement, int host, const LaneShape& shape = kLanes) {
  const LaneTable table(placement, host);
  return {SharedSegment::create("lanes", LaneSegment::bytes(table, shape)), table, shape};
}

TEST(LaneSegmentTest, SlotsAreAsLongOnAllHosts) {
  const Placement placement = make_placement({3, 1, 2});
  for (int host = 1; host < 3; ++host) {
    EXPECT_EQ(lanes_of(placement, host).slot_bytes(), lanes_of(placement, 0).slot_bytes());
    EXPECT_EQ(lanes_of(placement, host).slot_bytes_inside(),
              lanes_of(placement, 0).slot_bytes_inside());
  }
}

TEST(LaneSegmentTest, NoLaneReachesIntoAnother) {
  for (const auto& ranks : {std::vector<int>{3}, {1, 1}, {3, 1, 2}, std::vector<int>(40, 2)}) {
    const Placement placement = make_placement(ranks);
    for (const LaneShape& shape : {kMessageLanes, kLanes, collective_lanes(4096)}) {
      const LaneTable table(placement, 0);
      const SharedSegment memory = SharedSegment::create("lanes", LaneSegment::bytes(table, shape));
      const LaneSegment lanes(memory, table, shape);
      std::map<const std::byte*, const std::byte*> ends;  // by begin
      for (int sender = 0; sender < placement.size(); ++sender) {
        for (int receiver = 0; receiver < placement.size(); ++receiver) {
          if (placement.host_of(sender) == 0 || placement.host_of(receiver) == 0) {
            const auto* rings = reinterpret_cast<const std::byte*>(&lanes.rings(sender, receiver));
            const std::byte*& lane_end = ends[rings];
            lane_end = rings + sizeof(LaneRings);
            if (!shape.is_for_messages || !table.is_inside(sender, receiver)) {
              const ShmChannelMemory slots = lanes.channel(sender, receiver);
              EXPECT_LE(lane_end, slots.slots);
              lane_end = slots.slots + slots.slot_bytes * slots.slot_count;
              continue;
            }
            const Announcement& last = lanes.announcement(sender, receiver, kLaneDepth - 1);
            lane_end = last.payload() + lanes.most_riding_bytes(sender, receiver);
            for (const bool is_stream : {false, true}) {
              const auto pool_of = [&](int rank, int peer) {
                return is_stream ? lanes.stream_pool(rank, peer) : lanes.ahead_pool(rank, peer);
              };
              const BlockPool own = pool_of(sender, receiver);
              const BlockPool other = pool_of(receiver, sender);
              const int count = static_cast<int>(is_stream ? kStreamBlocks : kAheadBlocks);
              for (int i = 0; i < 2 * count; ++i) {
                EXPECT_EQ(own.block(i), other.block(i)) << "both ends fill it";
                if ((i >= count) == (sender > receiver)) {
                  EXPECT_LE(lane_end, own.block(i)) << i;
                  lane_end = own.block(i) + own.block_bytes();
                }
              }
            }
          }
        }
      }
      const std::byte* end = memory.data() + table.count() * sizeof(LaneCounters);
      for (const auto& [lane_begins, lane_ends] : ends) {
        EXPECT_LE(end, lane_begins);
        end = lane_ends;
      }
      EXPECT_LE(end, memory.data() + LaneSegment::bytes(table, shape));
    }
  }
}

struct SlotLengths {
  std::size_t hosts;
  int ranks_of_each;
  std::size_t between;  // in KiB
  std::size_t inside;
};

TEST(LaneSegmentTest, SlotsBetweenHostsTakeAChunkUpTo512KiB) {
  const Placement placement = make_placement({2, 2});
  for (const auto& [chunk_bytes, slot_bytes] : std::map<std::size_t, std::size_t>{
           {4096, 4352}, {512 << 10, 544 << 10}, {16 << 20, 544 << 10}}) {
    EXPECT_EQ(lanes_of(placement, 0, collective_lanes(chunk_bytes)).slot_bytes(), slot_bytes);
  }
}

TEST(LaneSegmentTest, SlotsOfManyHostsAreLongEnoughForTheNetwork) {
  for (const SlotLengths& is : {SlotLengths{1, 8, 544, 544},
                                {2, 2, 544, 544},
                                {8, 8, 512, 544},
                                {64, 1, 544, 1024},
                                {64, 8, 64, 1024},
                                {128, 8, 32, 1024}}) {
    const LaneSegment lanes =
        lanes_of(make_placement(std::vector<int>(is.hosts, is.ranks_of_each)), 0);
    EXPECT_EQ(lanes.slot_bytes(), is.between << 10) << is.hosts;
    EXPECT_EQ(lanes.slot_bytes_inside(), is.inside << 10) << is.hosts;
  }
}

}  // namespace
}  // namespace pydist::testing
