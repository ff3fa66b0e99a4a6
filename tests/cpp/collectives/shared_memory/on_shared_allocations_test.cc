// Which collectives take Route::kShared, driven by one thread, so that a test can look between two
// steps. That their results are right is the matter of native_conformance_test.cc.

#include "collectives/shared_memory/on_shared_allocations.h"

#include <gtest/gtest.h>

#include <sys/stat.h>

#include <array>
#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "collectives/group.h"
#include "collectives/shared_memory/route.h"
#include "collectives/shared_memory/shared_memory.h"
#include "communicator/operation.h"
#include "communicator/operation_call.h"
#include "health/doorbell.h"
#include "memory/allocation_heap.h"

namespace pydist {
namespace {

constexpr int kRanksThatShare = 3;
constexpr std::size_t kSharedChunkBytes = std::size_t{64} << 10;
constexpr std::size_t kBlockBytes = std::size_t{8} << 20;

// A group whose ranks share allocation heaps, with a block in each.
class SharingRanks {
 public:
  SharingRanks() {
    segment_.reserve_failure();
    for (int rank = 0; rank < kRanksThatShare; ++rank) {
      segment_.reserve_control(rank);
      symmetric_.emplace_back(rank, kRanksThatShare, file_,
                              std::vector<std::string>(kRanksThatShare));
      heaps_.push_back(AllocationHeap::create(3 * kBlockBytes));
      blocks_.push_back(heaps_.back()->allocate(kBlockBytes));
      windows_.emplace_back();
      windows_.back().open(heaps_.back()->segment());
    }
    std::vector<Doorbell*> bells;
    std::vector<const HeapWindow*> windows;
    for (std::size_t rank = 0; rank < kRanksThatShare; ++rank) {
      bells.push_back(&bells_[rank]);
      windows.push_back(&windows_[rank]);
    }
    for (int rank = 0; rank < kRanksThatShare; ++rank) {
      groups_.push_back(std::make_unique<Group>(
          rank, kRanksThatShare, segment_, bells, symmetric_[static_cast<std::size_t>(rank)],
          /*announcer=*/nullptr, /*one_shot_bytes=*/std::nullopt, /*tuning=*/nullptr, windows));
    }
  }
  ~SharingRanks() {
    for (std::size_t rank = 0; rank < kRanksThatShare; ++rank) {
      heaps_[rank]->release(blocks_[rank]);
    }
  }

  void switch_on() {
    for (HeapWindow& window : windows_) {
      window.switch_on();
    }
  }
  [[nodiscard]] std::byte* block(int rank) const { return blocks_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] Group& group(int rank) const { return *groups_[static_cast<std::size_t>(rank)]; }

  // Memory that the group's segment has taken: transit is backed when it is first used.
  [[nodiscard]] std::size_t segment_bytes() const {
    struct stat status{};
    EXPECT_EQ(::fstat(memory_.fd(), &status), 0);
    return static_cast<std::size_t>(status.st_blocks) * 512;
  }

  // One operation for each rank, to its end.
  void run(std::array<Operation, kRanksThatShare>& operations) {
    begin(operations);
    for (int turn = 0; turn < 1000; ++turn) {
      for (int rank = 0; rank < kRanksThatShare; ++rank) {
        step(rank);
      }
    }
    for (const auto& execution : executions_) {
      ASSERT_TRUE(execution->is_done());
    }
  }
  void begin(std::array<Operation, kRanksThatShare>& operations) {
    executions_.clear();
    for (int rank = 0; rank < kRanksThatShare; ++rank) {
      Operation& operation = operations[static_cast<std::size_t>(rank)];
      validate(operation, rank, kRanksThatShare);
      group(rank).begin();
      executions_.push_back(std::make_unique<Execution>(
          run_shared_memory(group(rank), resolve(operation, rank, kRanksThatShare))));
    }
  }
  void step(int rank) {
    Execution& execution = *executions_[static_cast<std::size_t>(rank)];
    if (!execution.is_done() && execution.is_ready()) {
      execution.resume();
    }
  }
  [[nodiscard]] bool is_done(int rank) const {
    return executions_[static_cast<std::size_t>(rank)]->is_done();
  }
  [[nodiscard]] std::uint64_t reduced(int rank) const {
    return segment_.control(rank).reduced.load();
  }
  [[nodiscard]] std::uint64_t consumed(int rank) const {
    return segment_.control(rank).consumed.load();
  }

 private:
  SharedSegment memory_ =
      SharedSegment::create("sharing", GroupSegment::bytes(kRanksThatShare, kSharedChunkBytes));
  GroupSegment segment_{memory_, kRanksThatShare, kSharedChunkBytes};
  SharedFile file_ = SharedFile::create("heap");
  std::deque<SymmetricHeap> symmetric_;
  std::vector<std::shared_ptr<AllocationHeap>> heaps_;
  std::vector<std::byte*> blocks_;
  std::deque<HeapWindow> windows_;
  std::array<Doorbell, kRanksThatShare> bells_{};
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<std::unique_ptr<Execution>> executions_;
};

using SharedOperations = std::array<Operation, kRanksThatShare>;

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

Route route_of(const SharingRanks& ranks, const SharedOperations& operations) {
  return agreed_route(ranks.group(0), resolve(operations[0], 0, kRanksThatShare));
}

void expect_sums(const SharedOperations& operations, float sum) {
  for (const Operation& operation : operations) {
    const auto* const data = static_cast<const float*>(operation.outputs[0].data);
    for (std::size_t i = 0; i < operation.outputs[0].count; ++i) {
      ASSERT_EQ(data[i], sum) << i;
    }
  }
}

TEST(OnSharedAllocationsTest, LargeReductionsUseNoTransit) {
  SharingRanks ranks;
  ranks.switch_on();
  const std::size_t before = ranks.segment_bytes();
  SharedOperations operations = shared_all_reduce(ranks, kBlockBytes / sizeof(float) - 5);
  ranks.run(operations);
  EXPECT_EQ(route_of(ranks, operations), Route::kShared);
  EXPECT_EQ(ranks.segment_bytes(), before);
  expect_sums(operations, 6.0F);
}

TEST(OnSharedAllocationsTest, NothingIsOfferedBeforeItIsSwitchedOn) {
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

TEST(OnSharedAllocationsTest, OneRanksOrdinaryBufferMakesAllGoThroughSlots) {
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
TEST(OnSharedAllocationsTest, ExchangesInPlaceAreNotRead) {
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
TEST(OnSharedAllocationsTest, NobodyIsDoneBeforeItsMemoryHasBeenRead) {
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

TEST(OnSharedAllocationsTest, WhatALeavingRankHeldIsNoResult) {
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

TEST(OnSharedAllocationsTest, AFailedGroupGivesNoResult) {
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
}  // namespace pydist
