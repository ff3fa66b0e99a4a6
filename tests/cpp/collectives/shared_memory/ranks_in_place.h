// A group whose ranks read each other's memory, driven by one thread, so that a test can look
// between two steps.

#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "collectives/group.h"
#include "collectives/shared_memory/route.h"
#include "collectives/shared_memory/shared_memory.h"
#include "collectives/shared_memory/tuning.h"
#include "communicator/operation.h"
#include "communicator/operation_call.h"
#include "health/doorbell.h"
#include "memory/allocation_heap.h"
#include "memory/process_memory.h"

namespace pydist::testing {

inline constexpr int kRanksThatShare = 3;
inline constexpr std::size_t kSharedChunkBytes = std::size_t{64} << 10;
inline constexpr std::size_t kBlockBytes = std::size_t{8} << 20;

// By which this process knows its own memory.
inline const std::uint64_t mark_of_test = 0xA11;
inline ProcessMemory own_memory() {
  return {::getpid(), reinterpret_cast<std::uintptr_t>(&mark_of_test), mark_of_test};
}

// A group whose ranks share allocation heaps, with a block in each. With `processes`, they can read
// each other's memory through the kernel as well.
class SharingRanks {
 public:
  explicit SharingRanks(const std::vector<ProcessMemory>& processes = {}) {
    segment_.reserve_common();
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
        word.next = TuningWord::Next::kInPlace;
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

inline Route route_of(const SharingRanks& ranks, const SharedOperations& operations) {
  return agreed_route(ranks.group(0), resolve(operations[0], 0, kRanksThatShare));
}

}  // namespace pydist::testing
