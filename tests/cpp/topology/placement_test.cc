#include "topology/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace pydist {
namespace {

std::vector<int> ranks_of(const Placement& placement, int host) {
  const std::span<const int> ranks = placement.ranks_on(host);
  return {ranks.begin(), ranks.end()};
}

TEST(PlacementTest, WithoutIdentitiesAllShareOneHost) {
  for (const int size : {1, 2, 7}) {
    const Placement placement(size);
    EXPECT_EQ(placement.size(), size);
    EXPECT_EQ(placement.hosts(), 1);
    EXPECT_FALSE(placement.spans_hosts());
    EXPECT_EQ(placement.least_on_a_host(), size);
    EXPECT_EQ(placement.leader_of(0), 0);
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(placement.host_of(rank), 0);
      EXPECT_EQ(placement.index_on_host(rank), rank);
      EXPECT_EQ(placement.counterpart(rank, 0), rank);
    }
  }
}

TEST(PlacementTest, HostsAreNumberedByTheirLowestRank) {
  const Placement placement({"z", "a", "z", "m", "a", "z"});
  EXPECT_EQ(placement.hosts(), 3);
  EXPECT_TRUE(placement.spans_hosts());
  EXPECT_EQ(ranks_of(placement, 0), (std::vector<int>{0, 2, 5}));
  EXPECT_EQ(ranks_of(placement, 1), (std::vector<int>{1, 4}));
  EXPECT_EQ(ranks_of(placement, 2), (std::vector<int>{3}));
  EXPECT_EQ(placement.leader_of(1), 1);
  EXPECT_EQ(placement.index_on_host(5), 2);
  EXPECT_EQ(placement.least_on_a_host(), 1);
  EXPECT_TRUE(placement.share_host(0, 5));
  EXPECT_FALSE(placement.share_host(0, 1));
  EXPECT_TRUE(placement.share_host(3, 3));
}

TEST(PlacementTest, ALongerNameIsAnotherHost) {
  EXPECT_EQ(Placement({"a", "a ", "A", ""}).hosts(), 4);
  EXPECT_EQ(Placement({"", ""}).hosts(), 1);
}

TEST(PlacementTest, CounterpartsAreDealtOutInTurn) {
  // Three ranks on one host, two on the other, mixed.
  const Placement placement({"a", "b", "a", "b", "a"});
  EXPECT_EQ(placement.counterpart(0, 1), 1);
  EXPECT_EQ(placement.counterpart(2, 1), 3);
  EXPECT_EQ(placement.counterpart(4, 1), 1);
  EXPECT_EQ(placement.counterpart(1, 0), 0);
  EXPECT_EQ(placement.counterpart(3, 0), 2);
}

TEST(PlacementTest, EveryPlacementIsConsistent) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const int size = 1 + static_cast<int>(random() % 20);
    std::vector<std::string> identities;
    for (int rank = 0; rank < size; ++rank) {
      identities.push_back("host " + std::to_string(random() % (1 + random() % 6)));
    }
    const Placement placement(identities);
    ASSERT_EQ(placement.size(), size);
    ASSERT_EQ(placement.hosts(),
              static_cast<int>(std::set(identities.begin(), identities.end()).size()));
    int least = size;
    int last_leader = -1;
    std::set<int> all;
    for (int host = 0; host < placement.hosts(); ++host) {
      const std::vector<int> ranks = ranks_of(placement, host);
      ASSERT_FALSE(ranks.empty());
      ASSERT_TRUE(std::is_sorted(ranks.begin(), ranks.end()));
      ASSERT_EQ(placement.leader_of(host), ranks.front());
      ASSERT_GT(placement.leader_of(host), last_leader);
      last_leader = placement.leader_of(host);
      least = std::min(least, static_cast<int>(ranks.size()));
      for (std::size_t index = 0; index < ranks.size(); ++index) {
        ASSERT_EQ(placement.host_of(ranks[index]), host);
        ASSERT_EQ(placement.index_on_host(ranks[index]), static_cast<int>(index));
        all.insert(ranks[index]);
      }
    }
    ASSERT_EQ(placement.least_on_a_host(), least);
    ASSERT_EQ(static_cast<int>(all.size()), size);
    // On each host the ranks of another one are shared out as evenly as can be.
    for (int host = 0; host < placement.hosts(); ++host) {
      for (int other = 0; other < placement.hosts(); ++other) {
        std::map<int, int> share;
        for (const int rank : placement.ranks_on(other)) {
          const int counterpart = placement.counterpart(rank, host);
          ASSERT_EQ(placement.host_of(counterpart), host);
          ++share[counterpart];
        }
        const int ranks = static_cast<int>(placement.ranks_on(other).size());
        const int takers = static_cast<int>(placement.ranks_on(host).size());
        for (const auto& [taker, count] : share) {
          ASSERT_LE(count, (ranks + takers - 1) / takers);
        }
      }
    }
    for (int one = 0; one < size; ++one) {
      for (int other = 0; other < size; ++other) {
        ASSERT_EQ(placement.share_host(one, other),
                  identities[static_cast<std::size_t>(one)] ==
                      identities[static_cast<std::size_t>(other)]);
      }
    }
  }
}

}  // namespace
}  // namespace pydist
