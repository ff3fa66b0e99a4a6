#include "topology/rounds.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <set>
#include <utility>
#include <vector>

namespace pydist {
namespace {

std::size_t at(int member) { return static_cast<std::size_t>(member); }

TEST(RoundsTest, AreAsFewAsCanBe) {
  const std::vector<std::pair<int, int>> counts{{1, 0}, {2, 1}, {3, 2}, {4, 2},
                                                {5, 3}, {8, 3}, {9, 4}, {1024, 10}};
  for (const auto& [size, count] : counts) {
    EXPECT_EQ(Rounds(0, size).count(), count) << size;
  }
}

TEST(RoundsTest, WhoSendsToOneIsWhomItHearsFrom) {
  for (int size = 1; size <= 40; ++size) {
    for (int me = 0; me < size; ++me) {
      const Rounds rounds(me, size);
      for (int round = 0; round < rounds.count(); ++round) {
        EXPECT_NE(rounds.to(round), me);
        EXPECT_EQ(Rounds(rounds.to(round), size).from(round), me);
      }
      for (int places = 0; places <= size; ++places) {
        EXPECT_EQ(Rounds(rounds.after(places), size).before(places), me);
        EXPECT_EQ(rounds.places_to(rounds.after(places)), places % size);
      }
    }
  }
}

TEST(RoundsTest, MembersSwapWhereTheirNumberIsAPowerOf2) {
  for (const int size : {2, 4, 32}) {
    for (int me = 0; me < size; ++me) {
      const Rounds rounds(me, size);
      for (int round = 0; round < rounds.count(); ++round) {
        EXPECT_EQ(rounds.from(round), rounds.to(round));
      }
    }
  }
}

TEST(RoundsTest, AllHearOfAllOnce) {
  for (int size = 1; size <= 40; ++size) {
    std::vector<std::set<int>> known(at(size));
    for (int member = 0; member < size; ++member) {
      known[at(member)] = {member};
    }
    for (int round = 0; round < Rounds(0, size).count(); ++round) {
      const std::vector<std::set<int>> before = known;
      for (int member = 0; member < size; ++member) {
        const Rounds sender(Rounds(member, size).from(round), size);
        for (int places = 0; places < sender.told(round); ++places) {
          EXPECT_TRUE(before[at(sender.after(0))].contains(sender.after(places)));
          EXPECT_TRUE(known[at(member)].insert(sender.after(places)).second);
        }
      }
    }
    for (const std::set<int>& each : known) {
      EXPECT_EQ(each.size(), at(size));
    }
  }
}

TEST(RoundsTest, WhatIsForOneComesToIt) {
  for (int size = 1; size <= 40; ++size) {
    for (int source = 0; source < size; ++source) {
      for (int places = 1; places < size; ++places) {
        int holder = source;
        int done = 0;
        for (int round = 0; round < Rounds(0, size).count(); ++round) {
          EXPECT_EQ(Rounds::done(places, round), done);
          if (Rounds::moves(places, round)) {
            holder = Rounds(holder, size).to(round);
            done += 1 << round;
          }
        }
        EXPECT_EQ(done, places);
        EXPECT_EQ(holder, Rounds(source, size).before(places));
      }
    }
  }
}

}  // namespace
}  // namespace pydist
