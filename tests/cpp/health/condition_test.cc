#include "health/condition.h"

#include <gtest/gtest.h>

#include <array>
#include <thread>

namespace pydist {
namespace {

// A counter with something beside it, as in shared memory.
struct Line {
  alignas(64) Counter counter{0};
  int data = 0;
};

TEST(ConditionTest, TheEmptyOneHolds) {
  Condition condition;
  EXPECT_TRUE(condition.holds());
  EXPECT_TRUE(condition.holds());
}

TEST(ConditionTest, HoldsOnceTheCounterReachesTheTarget) {
  Counter counter{0};
  Condition condition(counter, 3, 2);
  EXPECT_FALSE(condition.holds());
  EXPECT_EQ(condition.rank(), 3);
  counter = 1;
  EXPECT_FALSE(condition.holds());
  counter = 2;
  EXPECT_TRUE(condition.holds());
  counter = 9;
  EXPECT_TRUE(condition.holds());
}

TEST(ConditionTest, BeyondTheTargetIsReachedToo) {
  Counter counter{5};
  EXPECT_TRUE(Condition(counter, 0, 2).holds());
  EXPECT_TRUE(Condition(counter, 0, 0).holds());
  EXPECT_FALSE(Condition(counter, 0, 6).holds());
}

TEST(ConditionTest, ARangeNamesWhomItWaitsFor) {
  std::array<Line, 4> lines;
  Condition condition(lines[0].counter, sizeof(Line), 4, /*self=*/1, 1);
  EXPECT_FALSE(condition.holds());
  EXPECT_EQ(condition.rank(), 0);
  lines[0].counter = 1;
  lines[3].counter = 1;
  EXPECT_FALSE(condition.holds());
  EXPECT_EQ(condition.rank(), 2) << "rank 1 is the one that asks";
  lines[2].counter = 1;
  EXPECT_TRUE(condition.holds());
}

TEST(ConditionTest, ARankDoesNotWaitForItself) {
  for (int size = 1; size <= 9; ++size) {
    for (int self = 0; self < size; ++self) {
      std::array<Line, 9> lines;
      for (int rank = 0; rank < size; ++rank) {
        lines[static_cast<std::size_t>(rank)].counter = rank == self ? 0 : 1;
      }
      EXPECT_TRUE(Condition(lines[0].counter, sizeof(Line), size, self, 1).holds());
      // And for everybody else.
      for (int late = 0; late < size; ++late) {
        if (late == self) {
          continue;
        }
        lines[static_cast<std::size_t>(late)].counter = 0;
        Condition condition(lines[0].counter, sizeof(Line), size, self, 1);
        EXPECT_FALSE(condition.holds());
        EXPECT_EQ(condition.rank(), late);
        lines[static_cast<std::size_t>(late)].counter = 1;
      }
    }
  }
}

TEST(ConditionTest, WithoutASelfItWaitsForAll) {
  std::array<Line, 2> lines;
  lines[0].counter = 1;
  Condition condition(lines[0].counter, sizeof(Line), 2, /*self=*/-1, 1);
  EXPECT_FALSE(condition.holds());
  EXPECT_EQ(condition.rank(), 1);
}

TEST(ConditionTest, CopiesGoOnByThemselves) {
  std::array<Line, 2> lines;
  Condition original(lines[0].counter, sizeof(Line), 2, -1, 1);
  Condition copy = original;
  lines[0].counter = 1;
  EXPECT_FALSE(copy.holds());
  EXPECT_EQ(copy.rank(), 1);
  EXPECT_EQ(original.rank(), 0);
}

TEST(ConditionTest, WhatTheWritersDidBeforeIsVisible) {
  std::array<Line, 3> lines;
  std::array<std::thread, 3> writers;
  for (std::size_t i = 0; i < 3; ++i) {
    writers[i] = std::thread([&line = lines[i]] {
      line.data = 42;
      line.counter.store(1, std::memory_order_release);
    });
  }
  Condition condition(lines[0].counter, sizeof(Line), 3, -1, 1);
  while (!condition.holds()) {
    std::this_thread::yield();
  }
  for (const Line& line : lines) {
    EXPECT_EQ(line.data, 42);
  }
  for (std::thread& writer : writers) {
    writer.join();
  }
}

}  // namespace
}  // namespace pydist
