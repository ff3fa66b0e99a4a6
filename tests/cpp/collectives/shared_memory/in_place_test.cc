// Which collectives take Route::kShared, and when a rank is done. That their results are right is
// the matter of native_conformance_test.cc.

#include "collectives/shared_memory/in_place.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/error.h"
#include "collectives/shared_memory/ranks_in_place.h"

namespace pydist::testing {
namespace {

// Of `count` floats at the beginning of each rank's block, or of `elsewhere` on one rank.
SharedOperations shared_all_reduce(const SharingRanks& ranks, std::size_t count,
                                   float* elsewhere = nullptr, int its_rank = -1) {
  SharedOperations operations;
  for (int rank = 0; rank < kRanksThatShare; ++rank) {
    auto* const data = rank == its_rank ? elsewhere : reinterpret_cast<float*>(ranks.block(rank));
    std::fill(data, data + count, static_cast<float>(rank + 1));
    Operation& operation = operations[static_cast<std::size_t>(rank)];
    operation.kind = OpKind::kAllReduce;
    operation.inputs = {Buffer{data, count, DType::kFloat32}};
    operation.outputs = operation.inputs;
  }
  return operations;
}

void expect_sums(const SharedOperations& operations, float sum) {
  for (const Operation& operation : operations) {
    const auto* const data = static_cast<const float*>(operation.outputs[0].data);
    for (std::size_t i = 0; i < operation.outputs[0].count; ++i) {
      ASSERT_EQ(data[i], sum) << i;
    }
  }
}

TEST(InPlaceTest, LargeReductionsUseNoTransit) {
  SharingRanks ranks;
  ranks.switch_on();
  const std::size_t before = ranks.segment_bytes();
  SharedOperations operations = shared_all_reduce(ranks, kBlockBytes / sizeof(float) - 5);
  ranks.run(operations);
  EXPECT_EQ(route_of(ranks, operations), Route::kShared);
  EXPECT_EQ(ranks.segment_bytes(), before);
  expect_sums(operations, 6.0F);
}

TEST(InPlaceTest, NothingIsOfferedBeforeItIsSwitchedOn) {
  SharingRanks ranks;
  SharedOperations operations = shared_all_reduce(ranks, 100'000);
  ranks.run(operations);
  EXPECT_EQ(route_of(ranks, operations), Route::kPipelined);
  expect_sums(operations, 6.0F);
  ranks.switch_on();
  operations = shared_all_reduce(ranks, 100'000);
  ranks.run(operations);
  EXPECT_EQ(route_of(ranks, operations), Route::kShared);
  expect_sums(operations, 6.0F);
}

TEST(InPlaceTest, OneRanksOrdinaryBufferMakesAllGoThroughSlots) {
  SharingRanks ranks;
  ranks.switch_on();
  constexpr std::size_t kCount = 100'000;
  std::vector<float> elsewhere(kCount);
  SharedOperations operations = shared_all_reduce(ranks, kCount, elsewhere.data(), 1);
  ranks.run(operations);
  EXPECT_EQ(route_of(ranks, operations), Route::kPipelined);
  expect_sums(operations, 6.0F);
}

// What is to be read in place must be as it was until all have read it.
TEST(InPlaceTest, ExchangesInPlaceAreNotRead) {
  SharingRanks ranks;
  ranks.switch_on();
  constexpr std::size_t kCount = 300'000;
  for (const bool is_in_place : {true, false}) {
    SharedOperations operations;
    for (int rank = 0; rank < kRanksThatShare; ++rank) {
      auto* const data = reinterpret_cast<float*>(ranks.block(rank));
      for (std::size_t i = 0; i < kCount; ++i) {
        data[i] = static_cast<float>(10 * rank) + static_cast<float>(i * kRanksThatShare / kCount);
      }
      Operation& operation = operations[static_cast<std::size_t>(rank)];
      operation.kind = OpKind::kAllToAll;
      operation.inputs = {Buffer{data, kCount, DType::kFloat32}};
      operation.outputs = {Buffer{is_in_place ? data : data + kCount, kCount, DType::kFloat32}};
    }
    ranks.run(operations);
    EXPECT_EQ(route_of(ranks, operations), is_in_place ? Route::kPipelined : Route::kShared);
    for (int rank = 0; rank < kRanksThatShare; ++rank) {
      const auto* const data =
          static_cast<const float*>(operations[static_cast<std::size_t>(rank)].outputs[0].data);
      for (std::size_t i = 0; i < kCount; ++i) {
        ASSERT_EQ(data[i], static_cast<float>(10 * (i * kRanksThatShare / kCount)) +
                               static_cast<float>(rank));
      }
    }
  }
}

// No rank may go on with its buffer, or free it, while another one still reads there.
TEST(InPlaceTest, NobodyIsDoneBeforeItsMemoryHasBeenRead) {
  SharingRanks ranks;
  ranks.switch_on();
  SharedOperations operations = shared_all_reduce(ranks, 500'000);
  ranks.begin(operations);
  for (int turn = 0; turn < 100; ++turn) {
    ranks.step(0);
    ranks.step(1);
    if (turn < 2) {
      ranks.step(2);  // posts, and reduces what is its own; its last copy is still to come
    }
  }
  EXPECT_GT(ranks.reduced(2), 0u);
  EXPECT_FALSE(ranks.is_done(2));
  EXPECT_FALSE(ranks.is_done(0));
  EXPECT_FALSE(ranks.is_done(1));
}

TEST(InPlaceTest, WhatALeavingRankHeldIsNoResult) {
  SharingRanks ranks;
  ranks.switch_on();
  SharedOperations operations = shared_all_reduce(ranks, 50'000);  // one piece
  ranks.begin(operations);
  for (const int rank : {0, 1, 2}) {  // the last one sees all posts, and reduces its slice
    ranks.step(rank);
  }
  ASSERT_GT(ranks.reduced(2), 0u);
  ranks.group(2).segment().control(2).has_left.store(1);
  for (int turn = 0; turn < 100; ++turn) {
    ranks.step(0);
    ranks.step(1);
  }
  for (const int rank : {0, 1}) {
    EXPECT_GT(ranks.reduced(rank), 0u);
    EXPECT_FALSE(ranks.is_done(rank));
    EXPECT_EQ(ranks.consumed(rank), 0u);
  }
}

TEST(InPlaceTest, AFailedGroupGivesNoResult) {
  SharingRanks ranks;
  ranks.switch_on();
  SharedOperations operations = shared_all_reduce(ranks, 50'000);
  ranks.begin(operations);
  for (const int rank : {0, 1, 2}) {
    ranks.step(rank);
  }
  EXPECT_TRUE(ranks.group(2).segment().failure().set(ErrorKind::kAborted, "a test", 2));
  ranks.step(0);                         // reduces, and waits for rank 1
  EXPECT_THROW(ranks.step(1), Aborted);  // finds all reduced
  EXPECT_EQ(ranks.consumed(1), 0u);
}

}  // namespace
}  // namespace pydist::testing
