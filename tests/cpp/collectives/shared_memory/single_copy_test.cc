// Which collectives take Route::kSingleCopy, when a rank is done, and what becomes of it where a
// read fails. That their results are right is the matter of native_tuning_test.cc.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "collectives/shared_memory/ranks_in_place.h"

namespace pydist::testing {
namespace {

// Of ordinary memory, which outlives the operations; of another length on each rank.
struct Gathered {
  std::vector<std::vector<int>> blocks;
  std::vector<std::vector<int>> wholes;
  SharedOperations operations;

  Gathered() {
    for (int rank = 0; rank < kRanksThatShare; ++rank) {
      blocks.emplace_back(length(rank), rank + 1);
    }
    for (int rank = 0; rank < kRanksThatShare; ++rank) {
      const auto place = static_cast<std::size_t>(rank);
      wholes.emplace_back(length(0) + length(1) + length(2), -1);
      operations[place].kind = OpKind::kAllGather;
      operations[place].inputs = {
          Buffer{blocks[place].data(), blocks[place].size(), DType::kInt32}};
      std::size_t begin = 0;
      for (int from = 0; from < kRanksThatShare; ++from) {
        operations[place].outputs.push_back(
            Buffer{wholes[place].data() + begin, length(from), DType::kInt32});
        begin += length(from);
      }
    }
  }
  static std::size_t length(int rank) { return 30'000 + 1000 * static_cast<std::size_t>(rank); }
  void expect_right() const {
    std::vector<int> expected;
    for (const std::vector<int>& block : blocks) {
      expected.insert(expected.end(), block.begin(), block.end());
    }
    for (const std::vector<int>& whole : wholes) {
      EXPECT_EQ(whole, expected);
    }
  }
};

const std::vector<ProcessMemory> kAllReadable(kRanksThatShare, own_memory());

TEST(SingleCopyTest, UsesNoTransit) {
  SharingRanks ranks(kAllReadable);
  Gathered gathered;
  ranks.choose_single_copies(gathered.operations);
  const std::size_t before = ranks.segment_bytes();
  ranks.run(gathered.operations);
  EXPECT_EQ(route_of(ranks, gathered.operations), Route::kSingleCopy);
  EXPECT_EQ(ranks.segment_bytes(), before);
  gathered.expect_right();
}

// Three ranks with one value each for rank 1.
struct ToRoot {
  std::vector<std::vector<int>> values;
  std::vector<int> all = std::vector<int>(kRanksThatShare * kCount, -1);
  SharedOperations operations;

  static constexpr std::size_t kCount = 30'000;
  static constexpr int kRoot = 1;

  ToRoot() {
    for (int rank = 0; rank < kRanksThatShare; ++rank) {
      values.emplace_back(kCount, rank);
    }
    for (int rank = 0; rank < kRanksThatShare; ++rank) {
      Operation& operation = operations[static_cast<std::size_t>(rank)];
      operation.kind = OpKind::kGather;
      operation.peer = kRoot;
      operation.inputs = {
          Buffer{values[static_cast<std::size_t>(rank)].data(), kCount, DType::kInt32}};
      if (rank == kRoot) {
        operation.outputs = {Buffer{all.data(), all.size(), DType::kInt32}};
      }
    }
  }
  void expect_right() const {
    std::vector<int> expected;
    for (const std::vector<int>& each : values) {
      expected.insert(expected.end(), each.begin(), each.end());
    }
    EXPECT_EQ(all, expected);
  }
};

TEST(SingleCopyTest, AGatherUsesNoTransitWhereItsRootIsThere) {
  SharingRanks ranks(kAllReadable);
  ToRoot gathered;
  ranks.choose_single_copies(gathered.operations);
  const std::size_t before = ranks.segment_bytes();
  ranks.begin(gathered.operations);
  for (int turn = 0; turn < 100; ++turn) {
    for (const int rank : {1, 0, 2}) {
      ranks.step(rank);
    }
  }
  EXPECT_TRUE(ranks.is_done(0) && ranks.is_done(1) && ranks.is_done(2));
  EXPECT_EQ(route_of(ranks, gathered.operations), Route::kSingleCopy);
  EXPECT_EQ(ranks.segment_bytes(), before);
  gathered.expect_right();
}

// As without single copies: whoever only sends goes on before the root reads.
TEST(SingleCopyTest, NobodyWaitsForARootThatIsLate) {
  SharingRanks ranks(kAllReadable);
  ToRoot gathered;
  ranks.choose_single_copies(gathered.operations);
  ranks.begin(gathered.operations);
  for (int turn = 0; turn < 100; ++turn) {
    ranks.step(0);
    ranks.step(2);
  }
  // Whether the root agrees is all that a sender waits for.
  EXPECT_FALSE(ranks.is_done(0));
  ranks.step(ToRoot::kRoot);
  for (int turn = 0; turn < 100; ++turn) {
    ranks.step(0);
    ranks.step(2);
  }
  EXPECT_TRUE(ranks.is_done(0));
  for (int turn = 0; turn < 100; ++turn) {
    for (const int rank : {0, 1, 2}) {
      ranks.step(rank);
    }
  }
  EXPECT_EQ(route_of(ranks, gathered.operations), Route::kPipelined);
  gathered.expect_right();
}

// A root goes on before the others come, so nobody asks it to stay.
TEST(SingleCopyTest, ARootThatSendsIsNotRead) {
  for (const OpKind kind : {OpKind::kBroadcast, OpKind::kScatter, OpKind::kAllReduce}) {
    EXPECT_FALSE(has_single_copy(kind)) << to_string(kind);
  }
  for (const OpKind kind : {OpKind::kAllGather, OpKind::kAllToAll, OpKind::kGather}) {
    EXPECT_TRUE(has_single_copy(kind)) << to_string(kind);
  }
}

// What a device maps, say. The others do not know, so all go another way.
TEST(SingleCopyTest, WhatTheKernelDoesNotReadGoesThroughSlots) {
  std::vector<ProcessMemory> processes = kAllReadable;
  processes[1] = ProcessMemory();
  SharingRanks ranks(processes);
  Gathered gathered;
  ranks.choose_single_copies(gathered.operations);
  ranks.run(gathered.operations);
  EXPECT_EQ(route_of(ranks, gathered.operations), Route::kPipelined);
  gathered.expect_right();
}

TEST(SingleCopyTest, ExchangesInPlaceAreNotRead) {
  constexpr std::size_t kBlock = 20'000;
  for (const bool is_in_place : {true, false}) {
    SharingRanks ranks(kAllReadable);
    SharedOperations operations;
    std::vector<std::vector<int>> inputs;
    std::vector<std::vector<int>> outputs(kRanksThatShare, std::vector<int>(3 * kBlock));
    for (int rank = 0; rank < kRanksThatShare; ++rank) {
      inputs.emplace_back();
      for (int to = 0; to < kRanksThatShare; ++to) {
        inputs.back().insert(inputs.back().end(), kBlock, 10 * rank + to);
      }
    }
    for (std::size_t rank = 0; rank < kRanksThatShare; ++rank) {
      std::vector<int>& output = is_in_place ? inputs[rank] : outputs[rank];
      operations[rank].kind = OpKind::kAllToAll;
      operations[rank].inputs = {Buffer{inputs[rank].data(), 3 * kBlock, DType::kInt32}};
      operations[rank].outputs = {Buffer{output.data(), 3 * kBlock, DType::kInt32}};
    }
    ranks.choose_single_copies(operations);
    ranks.run(operations);
    EXPECT_EQ(route_of(ranks, operations), is_in_place ? Route::kPipelined : Route::kSingleCopy);
    for (std::size_t rank = 0; rank < kRanksThatShare; ++rank) {
      const std::vector<int>& output = is_in_place ? inputs[rank] : outputs[rank];
      for (std::size_t i = 0; i < output.size(); ++i) {
        ASSERT_EQ(output[i], static_cast<int>(10 * (i / kBlock) + rank)) << i;
      }
    }
  }
}

TEST(SingleCopyTest, NobodyIsDoneBeforeItsMemoryHasBeenRead) {
  SharingRanks ranks(kAllReadable);
  Gathered gathered;
  ranks.choose_single_copies(gathered.operations);
  ranks.begin(gathered.operations);
  ranks.step(2);  // posts, and then comes too late
  for (int turn = 0; turn < 100; ++turn) {
    ranks.step(0);
    ranks.step(1);
  }
  EXPECT_FALSE(ranks.is_done(0));
  EXPECT_FALSE(ranks.is_done(1));
  ranks.step(2);
  for (int turn = 0; turn < 100; ++turn) {
    for (const int rank : {0, 1, 2}) {
      ranks.step(rank);
    }
  }
  EXPECT_TRUE(ranks.is_done(0) && ranks.is_done(1) && ranks.is_done(2));
  gathered.expect_right();
}

// Of a process that has ended the kernel knows nothing: nobody takes what was read, and the group's
// health tells who it is. The same where the rank has left and its memory is gone.
TEST(SingleCopyTest, WhatIsGoneIsWaitedFor) {
  for (const bool has_ended : {true, false}) {
    std::vector<ProcessMemory> processes = kAllReadable;
    if (has_ended) {
      processes[1] = ProcessMemory(::getpid(), reinterpret_cast<std::uintptr_t>(&mark_of_test),
                                   mark_of_test + 1);
    }
    SharingRanks ranks(processes);
    Gathered gathered;
    ranks.choose_single_copies(gathered.operations);
    ranks.begin(gathered.operations);
    ranks.step(1);
    if (!has_ended) {
      ranks.group(1).my_detail().input = 1;
      ranks.group(1).segment().control(1).has_left.store(1);
    }
    for (int turn = 0; turn < 100; ++turn) {
      ranks.step(0);
      ranks.step(2);
    }
    for (const int rank : {0, 2}) {
      EXPECT_FALSE(ranks.is_done(rank));
      EXPECT_EQ(ranks.consumed(rank), 0u);
    }
  }
}

TEST(SingleCopyTest, WhatTheKernelRefusesNamesTheRank) {
  SharingRanks ranks(kAllReadable);
  Gathered gathered;
  ranks.choose_single_copies(gathered.operations);
  ranks.begin(gathered.operations);
  ranks.step(1);
  ranks.group(1).my_detail().input = 1;  // no memory
  ranks.step(2);
  try {
    ranks.step(0);
    FAIL() << "read it";
  } catch (const TransportError& error) {
    EXPECT_EQ(
        std::string(error.what()),
        "rank 0 can't read the tensor of rank 1 through the kernel: Bad address. Either its "
        "memory has been freed amid the collective, or the system does not let it be read any "
        "more; PYDIST_SINGLE_COPY=off moves data without that.");
    EXPECT_EQ(error.blame().ranks, std::vector<int>{1});
  }
}

TEST(SingleCopyTest, AFailedGroupGivesNoResult) {
  SharingRanks ranks(kAllReadable);
  Gathered gathered;
  ranks.choose_single_copies(gathered.operations);
  ranks.begin(gathered.operations);
  for (const int rank : {0, 1, 2}) {
    ranks.step(rank);
  }
  EXPECT_TRUE(ranks.group(2).segment().failure().set(ErrorKind::kAborted, "a test", 2));
  ranks.group(1).my_detail().input = 1;  // rank 1 has raised, and freed it
  EXPECT_THROW(ranks.step(0), Aborted);
  EXPECT_EQ(ranks.consumed(0), 0u);
}

}  // namespace
}  // namespace pydist::testing
