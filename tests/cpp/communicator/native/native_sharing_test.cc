// Communicator::share_allocations() of the native engine: all ranks or none, in every group of the
// same processes, and what becomes of it when a rank dies. That results are right:
// native_conformance_test.cc, with Placement::kShared.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "memory/allocation_heap.h"
#include "memory/memory_room.h"
#include "rank_processes.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

constexpr std::size_t kHeapOfTestBytes = std::size_t{32} << 20;

// A buffer of a rank's heap.
class SharedFloats {
 public:
  SharedFloats(std::shared_ptr<AllocationHeap> heap, std::size_t count, float value)
      : heap_(std::move(heap)), count_(count) {
    data_ = reinterpret_cast<float*>(heap_->allocate(count * sizeof(float)));
    std::fill(data_, data_ + count, value);
  }
  SharedFloats(const SharedFloats&) = delete;
  SharedFloats& operator=(const SharedFloats&) = delete;
  ~SharedFloats() { heap_->release(reinterpret_cast<std::byte*>(data_)); }

  [[nodiscard]] Operation all_reduce() const {
    Operation operation;
    operation.kind = OpKind::kAllReduce;
    operation.inputs = {Buffer{data_, count_, DType::kFloat32}};
    operation.outputs = operation.inputs;
    return operation;
  }
  [[nodiscard]] bool holds(float value) const {
    return std::all_of(data_, data_ + count_, [value](float each) { return each == value; });
  }

 private:
  const std::shared_ptr<AllocationHeap> heap_;
  const std::size_t count_;
  float* data_ = nullptr;
};

bool is_on_with_all(const RankOfTest& self, const CommunicatorPtr& group) {
  // A further call finds everything there: it returns the same heap.
  const auto heap = self.endpoint->allocation_heap();
  return heap != nullptr && group->share_allocations(std::nullopt, "") == heap;
}

TEST(NativeSharingTest, EveryGroupOfTheProcessesFindsTheHeaps) {
  run_ranks(3, [](RankOfTest& self) {
    const CommunicatorPtr before = self.communicator->split({2, 0, 1});
    const auto heap = self.communicator->share_allocations(kHeapOfTestBytes, "");
    ASSERT_NE(heap, nullptr);
    EXPECT_EQ(heap->segment().bytes(), kHeapOfTestBytes);
    EXPECT_TRUE(is_on_with_all(self, self.communicator));
    EXPECT_TRUE(is_on_with_all(self, before));
    const CommunicatorPtr after = self.communicator->split({0, 1, 2});
    for (const CommunicatorPtr& group : {self.communicator, before, after}) {
      const SharedFloats values(heap, 1'000'000, static_cast<float>(self.rank));
      group->run(values.all_reduce());
      EXPECT_TRUE(values.holds(3.0F));
    }
    self.communicator->run(barrier());
  });
}

TEST(NativeSharingTest, ARanksBoundIsItsOwnAndPartOfWhatIsFree) {
  run_ranks(2, [](RankOfTest& self) {
    const std::size_t free = memory_room().bytes;
    const auto heap = self.communicator->share_allocations(
        self.rank == 0 ? std::optional<std::size_t>() : kHeapOfTestBytes, "");
    if (self.rank == 1) {
      EXPECT_EQ(heap->segment().bytes(), kHeapOfTestBytes);
    } else {
      // Half of what is free, for two ranks; somebody else may take or free memory meanwhile.
      EXPECT_GT(heap->segment().bytes(), free / 8);
      EXPECT_LT(heap->segment().bytes(), free / 2);
    }
    self.communicator->run(barrier());
  });
}

TEST(NativeSharingTest, NothingIsSharedInAWorldOfOne) {
  run_ranks(1, [](RankOfTest& self) {
    EXPECT_EQ(self.communicator->share_allocations(std::nullopt, ""), nullptr);
    EXPECT_EQ(self.communicator->share_allocations(std::nullopt, "a reason"), nullptr);
  });
}

TEST(NativeSharingTest, RanksOfOtherHostsShareNothing) {
  run_ranks(3,
            [](RankOfTest& self) {
              const auto heap = self.communicator->share_allocations(kHeapOfTestBytes, "");
              EXPECT_EQ(heap == nullptr, self.rank == 2);
              std::vector<int> values(100'000, 1);
              self.communicator->run(all_reduce(values));
              EXPECT_EQ(values, std::vector<int>(100'000, 3));
              // Those of one host share in their own group.
              if (self.rank < 2) {
                const CommunicatorPtr group = self.communicator->split({0, 1});
                EXPECT_TRUE(is_on_with_all(self, group));
                const SharedFloats ones(heap, 1'000'000, 1.0F);
                group->run(ones.all_reduce());
                EXPECT_TRUE(ones.holds(2.0F));
              }
              self.communicator->run(barrier());
            },
            test_environment(), {0, 0, 1});
}

// Whatever stands in the way on one rank.
TEST(NativeSharingTest, WhereOneRankFailsAllDoAndNothingIsSwitchedOn) {
  run_ranks(3, [](RankOfTest& self) {
    const auto share = [&](std::optional<std::size_t> max_bytes, const std::string& refusal) {
      return error_of(
          [&] { static_cast<void>(self.communicator->share_allocations(max_bytes, refusal)); });
    };
    // One that cannot take part, one with an impossible bound, and one that the system gives no
    // address space.
    const ErrorDescription refused = share(kHeapOfTestBytes, self.rank == 1 ? "a test" : "");
    EXPECT_EQ(refused.kind, ErrorKind::kInvalidUsage);
    EXPECT_PRED2(contains, refused.message, "rank 1: a test");
    EXPECT_EQ(refused.blame.ranks, std::vector<int>{1});
    EXPECT_EQ(self.endpoint->allocation_heap(), nullptr);
    const ErrorDescription none = share(self.rank == 0 ? 0 : kHeapOfTestBytes, "");
    EXPECT_EQ(none.kind, ErrorKind::kInvalidUsage);
    EXPECT_PRED2(contains, none.message, "rank 0: ");
    EXPECT_EQ(self.endpoint->allocation_heap(), nullptr);

    // The group is sound, and all can try again.
    std::vector<int> values(100'000, 1);
    self.communicator->run(all_reduce(values));
    EXPECT_EQ(values, std::vector<int>(100'000, 3));
    const auto heap = self.communicator->share_allocations(kHeapOfTestBytes, "");
    ASSERT_NE(heap, nullptr);

    // Another bound than the first; what is shared stays so.
    const ErrorDescription other =
        share(self.rank == 2 ? kHeapOfTestBytes / 2 : kHeapOfTestBytes, "");
    EXPECT_EQ(other.kind, ErrorKind::kInvalidUsage);
    EXPECT_PRED2(contains, other.message, "max_bytes is 16777216");
    EXPECT_TRUE(is_on_with_all(self, self.communicator));
    self.communicator->run(barrier());
  });
}

// -- processes ------------------------------------------------------------------------------------

// Of all mappings of allocation heaps, how many this process may write, and how many read alone.
std::pair<int, int> mappings_of_heaps() {
  std::ifstream maps("/proc/self/maps");
  std::pair<int, int> found;
  for (std::string line; std::getline(maps, line);) {
    if (contains(line, "memfd:pydist:allocations")) {
      ++(contains(line, " rw-s ") ? found.first : found.second);
      EXPECT_TRUE(contains(line, " rw-s ") || contains(line, " r--s ")) << line;
    }
  }
  return found;
}

const RankProgram shares("shares", [](RankOfTest& self, const std::string&) {
  const auto heap = self.communicator->share_allocations(kHeapOfTestBytes, "");
  EXPECT_EQ(mappings_of_heaps(), std::pair(1, self.size - 1));
  for (int turn = 1; turn < 4; ++turn) {
    // At another address on each rank.
    const SharedFloats before(heap, 1000 + 30'000 * static_cast<std::size_t>(self.rank), 0.0F);
    const SharedFloats values(heap, 1'000'001, static_cast<float>(turn + self.rank));
    self.communicator->run(values.all_reduce());
    EXPECT_TRUE(values.holds(static_cast<float>(3 * turn + 3)));
    EXPECT_TRUE(before.holds(0.0F));
  }
  self.communicator->run(barrier());
});

TEST(NativeSharingTest, ProcessesReadEachOthersHeapsAndWriteTheirOwn) {
  RankProcesses ranks("shares", 3);
  for (int rank = 0; rank < 3; ++rank) {
    const RankOutcome outcome = ranks.wait(rank);
    EXPECT_TRUE(outcome.has_ended_by_itself) << "rank " << rank;
    EXPECT_FALSE(outcome.error) << "rank " << rank << ": " << outcome.error->message;
  }
}

const RankProgram shares_until_it_dies("shares_until_it_dies", [](RankOfTest& self,
                                                                  const std::string&) {
  const auto heap = self.communicator->share_allocations(kHeapOfTestBytes, "");
  const SharedFloats values(heap, 5'000'000, 0.0F);
  self.communicator->run(values.all_reduce());
  self.store->set(join("shared/", self.rank), "");
  for (;;) {  // one of them is killed amid one of these
    self.communicator->run(values.all_reduce());
  }
});

TEST(NativeSharingTest, ARankThatDiesAmidIsNamedToTheOthers) {
  for (int delay_ms = 0; delay_ms < 20; delay_ms += 7) {
    RankProcesses ranks("shares_until_it_dies", 3);
    expect_death_is_named(ranks, 3, "shared/", std::chrono::milliseconds(delay_ms));
  }
}

}  // namespace
}  // namespace pydist::testing
