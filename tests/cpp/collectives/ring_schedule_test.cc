// The ring, played out symbolically for every number of ranks up to 17.

#include "collectives/ring_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace pydist {
namespace {

constexpr int kMostRanks = 17;

std::vector<RingSchedule> everybody(int size) {
  std::vector<RingSchedule> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back(rank, size);
  }
  return ranks;
}

std::size_t at(int index) { return static_cast<std::size_t>(index); }

TEST(RingScheduleTest, NeighboursFormOneRing) {
  for (int size = 1; size <= kMostRanks; ++size) {
    const auto ranks = everybody(size);
    std::vector<bool> is_visited(at(size));
    int rank = 0;
    for (int hop = 0; hop < size; ++hop) {
      EXPECT_FALSE(is_visited[at(rank)]);
      is_visited[at(rank)] = true;
      const int next = ranks[at(rank)].next();
      ASSERT_GE(next, 0);
      ASSERT_LT(next, size);
      EXPECT_EQ(ranks[at(next)].previous(), rank);
      rank = next;
    }
    EXPECT_EQ(rank, 0);
  }
}

TEST(RingScheduleTest, WhatIsSentIsWhatIsExpected) {
  for (int size = 1; size <= kMostRanks; ++size) {
    const auto ranks = everybody(size);
    for (const RingSchedule& rank : ranks) {
      EXPECT_EQ(rank.steps(), size - 1);
      for (int step = 0; step < rank.steps(); ++step) {
        const RingSchedule& previous = ranks[at(rank.previous())];
        EXPECT_EQ(rank.reduce_scatter_receives(step), previous.reduce_scatter_sends(step));
        EXPECT_EQ(rank.all_gather_receives(step), previous.all_gather_sends(step));
        // A chunk is passed on in the step after it came.
        if (step + 1 < rank.steps()) {
          EXPECT_EQ(rank.reduce_scatter_sends(step + 1), rank.reduce_scatter_receives(step));
          EXPECT_EQ(rank.all_gather_sends(step + 1), rank.all_gather_receives(step));
        }
      }
    }
  }
}

TEST(RingScheduleTest, EveryChunkIsCompleteOnceAndInTheDocumentedOrder) {
  for (int size = 1; size <= kMostRanks; ++size) {
    const auto ranks = everybody(size);
    // What travels to each rank: the chunk, and who has contributed to it, in order.
    struct Message {
      int chunk;
      std::vector<int> contributions;
    };
    std::vector<Message> in_flight(at(size));
    for (int rank = 0; rank < size && size > 1; ++rank) {
      in_flight[at(ranks[at(rank)].next())] = {ranks[at(rank)].reduce_scatter_sends(0), {rank}};
    }
    std::vector<std::vector<int>> complete(at(size));
    if (size == 1) {
      complete[0] = {0};
    }
    for (int step = 0; step < size - 1; ++step) {
      std::vector<Message> next(at(size));
      for (int rank = 0; rank < size; ++rank) {
        Message message = in_flight[at(rank)];
        ASSERT_EQ(message.chunk, ranks[at(rank)].reduce_scatter_receives(step));
        message.contributions.push_back(rank);
        if (step == size - 2) {
          EXPECT_EQ(message.chunk, rank) << "a rank ends with its own chunk";
          complete[at(message.chunk)] = message.contributions;
        } else {
          next[at(ranks[at(rank)].next())] = message;
        }
      }
      in_flight = next;
    }
    for (int chunk = 0; chunk < size; ++chunk) {
      std::vector<int> expected;
      for (int i = 1; i <= size; ++i) {
        expected.push_back((chunk + i) % size);
      }
      EXPECT_EQ(complete[at(chunk)], expected) << "of " << size;
    }
  }
}

TEST(RingScheduleTest, EverybodyGathersEveryChunkOnce) {
  for (int size = 1; size <= kMostRanks; ++size) {
    const auto ranks = everybody(size);
    // How often each rank got each chunk; its own it has.
    std::vector<std::vector<int>> has(at(size), std::vector<int>(at(size)));
    for (int rank = 0; rank < size; ++rank) {
      has[at(rank)][at(rank)] = 1;
    }
    for (int step = 0; step < size - 1; ++step) {
      auto after = has;
      for (int rank = 0; rank < size; ++rank) {
        const int chunk = ranks[at(rank)].all_gather_sends(step);
        EXPECT_EQ(has[at(rank)][at(chunk)], 1) << "rank " << rank << " sends what it has not";
        ++after[at(ranks[at(rank)].next())][at(chunk)];
      }
      has = after;
    }
    EXPECT_EQ(has, std::vector<std::vector<int>>(at(size), std::vector<int>(at(size), 1)));
  }
}

TEST(RingScheduleTest, LinksCarryTheLeastThatIsPossible) {
  for (int size = 2; size <= kMostRanks; ++size) {
    for (const RingSchedule& rank : everybody(size)) {
      std::vector<int> reduced;
      std::vector<int> gathered;
      for (int step = 0; step < rank.steps(); ++step) {
        reduced.push_back(rank.reduce_scatter_sends(step));
        gathered.push_back(rank.all_gather_sends(step));
      }
      for (std::vector<int>* sent : {&reduced, &gathered}) {
        std::sort(sent->begin(), sent->end());
        EXPECT_EQ(std::unique(sent->begin(), sent->end()), sent->end());
        EXPECT_EQ(sent->size(), at(size - 1));
      }
    }
  }
}

}  // namespace
}  // namespace pydist
