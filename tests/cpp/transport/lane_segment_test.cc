#include "transport/lane_segment.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <vector>

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

std::size_t slot_bytes(const Placement& placement, int host) {
  return LaneSegment::slot_bytes(LaneTable(placement, host), kCollectiveLanes);
}

TEST(LaneSegmentTest, SlotsAreAsLongOnAllHosts) {
  const Placement placement = make_placement({3, 1, 2});
  EXPECT_EQ(slot_bytes(placement, 0), slot_bytes(placement, 1));
  EXPECT_EQ(slot_bytes(placement, 0), slot_bytes(placement, 2));
}

TEST(LaneSegmentTest, SlotsOfManyHostsAreLongEnoughForTheNetwork) {
  EXPECT_EQ(slot_bytes(make_placement(std::vector<int>(8, 8)), 0), std::size_t{512} << 10);
  EXPECT_EQ(slot_bytes(make_placement(std::vector<int>(64, 8)), 0), std::size_t{64} << 10);
  EXPECT_EQ(slot_bytes(make_placement(std::vector<int>(64, 1)), 0), std::size_t{544} << 10);
}

}  // namespace
}  // namespace pydist::testing
