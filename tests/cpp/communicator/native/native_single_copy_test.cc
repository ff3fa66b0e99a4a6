// Ranks that read each other's memory through the kernel: when they do, and what becomes of it when
// one dies. That results are right: native_tuning_test.cc.

#include <gtest/gtest.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "memory/allocation_heap.h"
#include "rank_processes.h"
#include "ranks.h"
#include "restless.h"

namespace pydist::testing {
namespace {

constexpr std::size_t kCount = 60'000;  // of 4 bytes, more than is sent ahead by default

Operation all_gather_of(std::vector<int>& block, std::vector<int>& all) {
  Operation operation;
  operation.kind = OpKind::kAllGather;
  operation.inputs = {buffer_of(block)};
  operation.outputs = {buffer_of(all)};
  return operation;
}

// Several times, with other values each time.
void exchange_often(const CommunicatorPtr& group, int times) {
  const int size = group->size();
  for (int time = 0; time < times; ++time) {
    std::vector<int> block(kCount, 100 * time + group->rank());
    std::vector<int> all(kCount * static_cast<std::size_t>(size));
    group->run(all_gather_of(block, all));
    std::vector<int> expected;
    for (int rank = 0; rank < size; ++rank) {
      expected.insert(expected.end(), kCount, 100 * time + rank);
    }
    ASSERT_EQ(all, expected);
  }
}

bool has_timed_single_copies(int ranks) {
  return timed(ranks)[{OpKind::kAllGather, TunedMemory::kOrdinary}].contains({0, false, true});
}

TEST(NativeSingleCopyTest, OffOnOneRankIsOffOnAll) {
  for (const bool is_off_on_one : {false, true}) {
    TuningTable::of_process().replace({});
    run_ranks(3, [&](RankOfTest& self) {
      Environment environment = test_environment();
      environment.single_copy = !is_off_on_one || self.rank != 1;
      exchange_often(join_restless(self, environment, kShortSessions), 20);
    });
    EXPECT_EQ(has_timed_single_copies(3), !is_off_on_one);
  }
  TuningTable::of_process().replace({});
}

// -- processes ------------------------------------------------------------------------------------

const RankProgram reads_processes("reads_processes", [](RankOfTest& self, const std::string&) {
  // Of the group that is made next; what a user may allow where Yama forbids it.
  ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  exchange_often(join_restless(self, test_environment(), kShortSessions), 20);
  if (self.rank == 0) {
    EXPECT_TRUE(has_timed_single_copies(self.size));
  }
  self.communicator->run(barrier());
});

TEST(NativeSingleCopyTest, ProcessesReadEachOther) {
  for (const int size : {2, 3}) {
    RankProcesses ranks("reads_processes", size);
    for (int rank = 0; rank < size; ++rank) {
      const RankOutcome outcome = ranks.wait(rank);
      EXPECT_TRUE(outcome.has_ended_by_itself) << "rank " << rank;
      EXPECT_FALSE(outcome.error) << "rank " << rank << ": " << outcome.error->message;
    }
  }
}

const RankProgram read_until_it_dies("read_until_it_dies", [](RankOfTest& self,
                                                              const std::string&) {
  ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);  // as above
  std::vector<int> block(4 * kCount, self.rank);
  std::vector<int> all(2 * block.size());
  TuningEntry entry;
  entry.choice = {.piece_bytes = 0, .streams = false, .in_place = true};
  const int size_class = size_class_of(block.size() * sizeof(int));
  TuningTable::of_process().replace(
      {{{OpKind::kAllGather, TunedMemory::kOrdinary, self.size, size_class}, entry}});
  const CommunicatorPtr group =
      join_restless(self, test_environment(), {.uses_before_first = std::size_t{1} << 40});
  const auto exchange = [&] { group->run(all_gather_of(block, all)); };
  exchange();
  self.store->set(join("read/", self.rank), "");
  for (;;) {  // one of them is killed amid one of these
    exchange();
  }
});

TEST(NativeSingleCopyTest, ARankThatDiesAmidIsNamedToTheOther) {
  for (int delay_ms = 0; delay_ms < 8; delay_ms += 3) {
    RankProcesses ranks("read_until_it_dies", 2);
    expect_death_is_named(ranks, 2, "read/", std::chrono::milliseconds(delay_ms));
  }
}

// What a rank sends, of so many numbers; in its allocation heap where it has one.
class Sent {
 public:
  Sent(std::shared_ptr<AllocationHeap> heap, std::size_t count) : heap_(std::move(heap)) {
    if (heap_ == nullptr) {
      ordinary_.resize(count);
      values_ = ordinary_;
    } else {
      values_ = {reinterpret_cast<int*>(heap_->allocate(count * sizeof(int))), count};
    }
  }
  Sent(const Sent&) = delete;
  Sent& operator=(const Sent&) = delete;
  ~Sent() {
    if (heap_ != nullptr) {
      heap_->release(reinterpret_cast<std::byte*>(values_.data()));
    }
  }

  void fill(int value) { std::fill(values_.begin(), values_.end(), value); }
  [[nodiscard]] Operation to(int peer, std::uint64_t tag) const {
    Operation operation;
    operation.kind = OpKind::kSend;
    operation.peer = peer;
    operation.tag = tag;
    operation.inputs = {Buffer{values_.data(), values_.size(), DType::kInt32}};
    return operation;
  }

 private:
  const std::shared_ptr<AllocationHeap> heap_;
  std::vector<int> ordinary_;
  std::span<int> values_;
};

std::shared_ptr<AllocationHeap> heap_of_test(Communicator& group) {
  return group.share_allocations(std::size_t{32} << 20, "");
}

// Messages of a rank that goes on sending, in both directions.
const RankProgram send_until_it_dies("send_until_it_dies", [](RankOfTest& self,
                                                              const std::string& told) {
  const std::size_t count = std::stoul(told);
  const CommunicatorPtr group = join_restless(self, test_environment());  // both ways in turns
  Sent mine(told.ends_with("heap") ? heap_of_test(*group) : nullptr, count);
  std::vector<int> theirs(count);
  const int peer = 1 - self.rank;
  for (int time = 0;; ++time) {
    mine.fill(2 * time + self.rank);
    const WorkPtr sent = group->submit(mine.to(peer, 1));
    group->run(receive_from(peer, 1, theirs));
    sent->wait();
    ASSERT_EQ(theirs, std::vector<int>(count, 2 * time + peer));
    if (time == 0) {
      self.store->set(join("sent/", self.rank), "");
    }
  }
});

TEST(NativeSingleCopyTest, ASenderThatDiesIsNamedToTheReceiver) {
  for (const int count : {2'000, 100'000, 400'000}) {
    for (int delay_ms = 0; delay_ms < 8; delay_ms += 3) {
      for (const char* const memory : {" ordinary", " heap"}) {
        RankProcesses ranks("send_until_it_dies", 2, std::to_string(count) + memory);
        expect_death_is_named(ranks, 2, "sent/", std::chrono::milliseconds(delay_ms));
      }
    }
  }
}

// -- messages of ranks that are threads -----------------------------------------------------------

// Rank 1 asks for a message when its sender has left: nobody knows what lies there now.
void expect_no_message_of_who_has_left(bool is_in_heap) {
  constexpr std::size_t kLong = 3 * kCount;  // it is not filled ahead
  run_ranks(2, [is_in_heap](RankOfTest& self) {
    std::vector<int> values(3, self.rank);
    const auto heap = is_in_heap ? heap_of_test(*self.communicator) : nullptr;
    self.communicator->run(barrier());
    if (self.rank == 0) {
      Sent sent(heap, kLong);
      sent.fill(7);
      const WorkPtr work = self.communicator->submit(sent.to(1, 4));
      self.communicator->run(send_to(1, 5, values));  // once this is there, that is announced
      self.communicator->shutdown();
      EXPECT_NE(error_of([&] { work->wait(); }).message, "");
      sent.fill(8);
      self.store->set("has left", "");
      return;
    }
    self.communicator->run(receive_from(0, 5, values));
    static_cast<void>(self.store->get("has left", Deadline::in(std::chrono::seconds(30))));
    std::vector<int> got(kLong, 0);
    const auto [kind, message, blame] =
        error_of([&] { self.communicator->run(receive_from(0, 4, got)); });
    EXPECT_EQ(kind, ErrorKind::kPeerLost) << message;
    EXPECT_EQ(blame.ranks, std::vector<int>{0}) << message;
  });
}

TEST(NativeSingleCopyTest, AMessageWhoseSenderHasLeftIsNoMessage) {
  expect_no_message_of_who_has_left(/*is_in_heap=*/false);
}

TEST(NativeSingleCopyTest, AMessageInTheHeapOfWhoHasLeftIsNoMessage) {
  expect_no_message_of_who_has_left(/*is_in_heap=*/true);
}

// What is filled ahead was sent when its sender left.
TEST(NativeSingleCopyTest, AMessageFilledAheadOutlivesItsSender) {
  run_ranks(2, [](RankOfTest& self) {
    std::vector<int> values(kCount, 7);
    self.communicator->run(barrier());
    if (self.rank == 0) {
      self.communicator->run(send_to(1, 4, values));
      self.communicator->shutdown();
      self.store->set("has left", "");
      return;
    }
    static_cast<void>(self.store->get("has left", Deadline::in(std::chrono::seconds(30))));
    std::vector<int> got(kCount, 0);
    self.communicator->run(receive_from(0, 4, got));
    EXPECT_EQ(got, values);
  });
}

// Of rank 2, on a host of its own, nobody can read anything.
TEST(NativeSingleCopyTest, MessagesInHeapsReachEveryHost) {
  run_ranks(3,
            [](RankOfTest& self) {
              Sent mine(heap_of_test(*self.communicator), kCount);
              std::vector<int> got(kCount);
              for (int time = 0; time < 5; ++time) {
                mine.fill(10 * time + self.rank);
                const int next = (self.rank + 1) % 3;
                const int previous = (self.rank + 2) % 3;
                const WorkPtr sent = self.communicator->submit(mine.to(next, 1));
                self.communicator->run(receive_from(previous, 1, got));
                sent->wait();
                ASSERT_EQ(got, std::vector<int>(kCount, 10 * time + previous));
              }
            },
            test_environment(), {0, 0, 1});
}

}  // namespace
}  // namespace pydist::testing
