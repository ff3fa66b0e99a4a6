// Which collectives take Route::kShared or kSingleCopy, driven by one thread, so that a test can
// look between two steps. That their results are right is the matter of native_conformance_test.cc.

#include "collectives/shared_memory/in_place.h"

#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

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
#include "collectives/shared_memory/tuning.h"
#include "communicator/operation.h"
#include "communicator/operation_call.h"
#include "health/doorbell.h"
#include "memory/allocation_heap.h"
#include "memory/process_memory.h"

namespace pydist {
namespace {

constexpr int kRanksThatShare = 3;
constexpr std::size_t kSharedChunkBytes = std::size_t{64} << 10;
constexpr std::size_t kBlockBytes = std::size_t{8} << 20;

// By which this process knows its own memory.
const std::uint64_t mark = 0xA11;
ProcessMemory own_memory() { return {::getpid(), reinterpret_cast<std::uintptr_t>(&mark), mark}; }

// A group whose ranks share allocation heaps, with a block in each. With `processes`, they can read
// each other's memory through the kernel as well.
class SharingRanks {
 public:
  explicit SharingRanks(const std::vector<ProcessMemory>& processes = {}) {
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
          /*announcer=*/nullptr, /*one_shot_bytes=*/std::nullopt,
          processes.empty()
              ? nullptr
              : &tunings_.emplace_back(rank, kRanksThatShare, limits_, TuningRhythm(), table_),
          windows, processes));
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

  // Has the next operations like these go through the kernel.
  void choose_single_copies(std::array<Operation, kRanksThatShare>& operations) {
    for (int rank = 0; rank < kRanksThatShare; ++rank) {
      const Call call = resolve(operations[static_cast<std::size_t>(rank)], rank, kRanksThatShare);
      for (std::uint8_t size_class = 14; size_class < 26; ++size_class) {
        TuningWord word;
        word.piece_bytes = kSharedChunkBytes;
        word.size_class = size_class;
        word.next = TuningWord::Next::kSingleCopy;
        Tuning& tuning = tunings_[static_cast<std::size_t>(rank)];
        ASSERT_TRUE(tuning.is_sound(call, word));
        tuning.hear(call, word);
      }
    }
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
  const TuningLimits limits_{kSharedChunkBytes, false, std::nullopt, true};
  TuningTable table_;
  std::deque<Tuning> tunings_;
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

// -- through the kernel ---------------------------------------------------------------------------

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

TEST(SingleCopyTest, ARootIsReadByAll) {
  SharingRanks ranks(kAllReadable);
  std::vector<std::vector<int>> values;
  SharedOperations operations;
  for (int rank = 0; rank < kRanksThatShare; ++rank) {
    values.emplace_back(30'000, rank);
  }
  for (std::size_t rank = 0; rank < kRanksThatShare; ++rank) {
    operations[rank].kind = OpKind::kBroadcast;
    operations[rank].peer = 1;
    const Buffer buffer{values[rank].data(), values[rank].size(), DType::kInt32};
    (rank == 1 ? operations[rank].inputs : operations[rank].outputs) = {buffer};
  }
  ranks.choose_single_copies(operations);
  const std::size_t before = ranks.segment_bytes();
  ranks.run(operations);
  EXPECT_EQ(route_of(ranks, operations), Route::kSingleCopy);
  EXPECT_EQ(ranks.segment_bytes(), before);
  EXPECT_EQ(values, std::vector<std::vector<int>>(3, std::vector<int>(30'000, 1)));
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
      processes[1] = ProcessMemory(::getpid(), reinterpret_cast<std::uintptr_t>(&mark), mark + 1);
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
    EXPECT_EQ(std::string(error.what()),
              "rank 0 could read the memory of rank 1 through the kernel when their group was "
              "made, and now it can't: Bad address. PYDIST_SINGLE_COPY=off moves data without "
              "that.");
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
}  // namespace pydist
