// A rank that is stopped (SIGSTOP): the others name it at the deadline, and an operation that
// failed leaves their memory to them.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "health/process_state.h"
#include "rank_processes.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;

const RankProgram gives_up("gives_up", [](RankOfTest& self, const std::string&) {
  self.communicator->run(barrier());
  self.store->set(join("ready/", self.rank), "");
  if (self.rank == 1) {
    std::this_thread::sleep_for(std::chrono::seconds(60));
  }
  self.communicator->run(with_timeout(barrier(), milliseconds(3500)));
});

TEST(NativeStoppedRankTest, IsNamedAtTheDeadline) {
  RankProcesses ranks("gives_up", 2);
  static_cast<void>(ranks.store().get("ready/1", Deadline::in(std::chrono::seconds(30))));
  ranks.signal(1, SIGSTOP);
  const RankOutcome outcome = ranks.wait(0);
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->kind, ErrorKind::kTimeout) << outcome.error->message;
  EXPECT_PRED2(contains, outcome.error->message, "rank 1 (pid ");
  EXPECT_PRED2(contains, outcome.error->message, "never entered barrier #2");
  EXPECT_PRED2(contains, outcome.error->message, "is stopped (SIGSTOP or a debugger)");
  EXPECT_PRED2(contains, outcome.error->message, "no sign of life for ");
}

// A process that stops itself a moment later, whatever its other threads do then.
void stop_soon(std::chrono::microseconds later) {
  std::thread([later] {
    std::this_thread::sleep_for(later);
    ::kill(::getpid(), SIGSTOP);
  }).detach();
}

const RankProgram waits_for_the_stopped("waits_for_the_stopped", [](RankOfTest& self,
                                                                    const std::string& algorithm) {
  Environment environment = test_environment();
  environment.algorithm = algorithm == "ring" ? AlgorithmChoice::kRing : AlgorithmChoice::kAuto;
  const CommunicatorPtr group = join_group(self, "other", environment);
  std::vector<float> values(300'000, 1);
  group->run(all_reduce(values));
  if (self.rank == 2) {
    stop_soon(milliseconds(30));
  }
  while (true) {
    group->run(with_timeout(all_reduce(values), milliseconds(1500)));
  }
});

class NativeStoppedRankWaits : public ::testing::TestWithParam<std::string> {};

TEST_P(NativeStoppedRankWaits, IsNamedByAllThoseWhoWaitForNeighbours) {
  RankProcesses ranks("waits_for_the_stopped", 4, GetParam());
  for (const int rank : {0, 1, 3}) {
    const RankOutcome outcome = ranks.wait(rank);
    EXPECT_TRUE(outcome.has_ended_by_itself);
    ASSERT_TRUE(outcome.error);
    EXPECT_EQ(outcome.error->kind, ErrorKind::kTimeout) << outcome.error->message;
    EXPECT_PRED2(contains, outcome.error->message, "rank 2 (pid ");
    EXPECT_PRED2(contains, outcome.error->message, "it is stopped (SIGSTOP or a debugger)");
  }
}

INSTANTIATE_TEST_SUITE_P(By, NativeStoppedRankWaits, ::testing::Values("ring", "shared_memory"),
                         [](const auto& info) { return info.param; });

// Ranks gather into symmetric memory; rank 1 is stopped amid its copies into the others' memory.
const RankProgram keeps_its_memory("keeps_its_memory", [](RankOfTest& self,
                                                          const std::string& kind) {
  constexpr std::size_t kBytes = (std::size_t{48} << 20) / kSlowdown;
  const auto size = static_cast<std::size_t>(self.size);
  const MemoryPtr memory = self.communicator->allocate(kBytes * (size + 1), Device{});
  auto* const bytes = static_cast<std::byte*>(memory->data());
  Operation operation;
  operation.inputs = {{bytes, kBytes, DType::kUInt8}};
  if (kind == "all_gather") {
    operation.kind = OpKind::kAllGather;
    operation.outputs = {{bytes + kBytes, kBytes * size, DType::kUInt8}};
  } else {
    operation.kind = OpKind::kAllReduce;
    operation.outputs = {{bytes + kBytes, kBytes, DType::kUInt8}};
  }
  self.communicator->run(operation);
  const auto start = std::chrono::steady_clock::now();
  self.communicator->run(operation);
  const auto whole = std::chrono::steady_clock::now() - start;
  std::memset(bytes, 10 + self.rank, kBytes);
  std::memset(bytes + kBytes, 1, kBytes * size);
  self.communicator->run(barrier());
  if (self.rank == 1) {
    const std::string parts = self.store->get("parts", Deadline::in(std::chrono::seconds(30)));
    stop_soon(std::chrono::duration_cast<std::chrono::microseconds>(whole * std::stoi(parts) / 32));
  }
  const auto run_again = [&] {
    self.communicator->run(with_timeout(operation, milliseconds(1000)));
  };
  if (self.rank == 1) {
    try {
      run_again();  // has all that it needs, if the others had written by then
    } catch (const Error&) {
    }
    return;
  }
  bool has_raised = false;
  try {
    run_again();
  } catch (const Timeout&) {
    has_raised = true;
  }
  const std::vector<std::byte> then(bytes, bytes + kBytes * (size + 1));
  self.store->set(join("raised/", self.rank), has_raised ? "yes" : "no");
  static_cast<void>(self.store->get("goes_on", Deadline::in(std::chrono::seconds(30))));
  std::this_thread::sleep_for(milliseconds(500));
  EXPECT_EQ(std::memcmp(bytes, then.data(), then.size()), 0)
      << "rank " << self.rank << ": somebody has written after the error";
  std::memset(bytes, 7, kBytes * (size + 1));  // it is still memory
});

// When rank 1 is stopped, in parts of 32 of the time that the operation takes. On a busy machine it
// may have written all that it had to by then.
void stop_rank_1(const std::string& kind, std::initializer_list<int> moments, int size,
                 const HostsOfRanks& hosts) {
  int raised = 0;
  for (const int parts : moments) {
    RankProcesses ranks("keeps_its_memory", size, kind, hosts);
    ranks.store().set("parts", std::to_string(parts));
    for (int rank = 0; rank < size; ++rank) {
      const Deadline deadline = Deadline::in(std::chrono::seconds(30));
      if (rank != 1) {
        raised += ranks.store().get(join("raised/", rank), deadline) == "yes" ? 1 : 0;
      }
    }
    ranks.signal(1, SIGCONT);
    ranks.store().set("goes_on", "");
    for (int rank = 0; rank < size; ++rank) {
      const RankOutcome outcome = ranks.wait(rank);
      EXPECT_TRUE(outcome.has_ended_by_itself);
      EXPECT_FALSE(outcome.error) << outcome.error->message;
    }
  }
  EXPECT_GT(raised, 0) << "rank 1 was never stopped amid its copies";
}

TEST(NativeStoppedRankTest, MemoryOfAFailedOperationIsTheRanksOwn) {
  stop_rank_1("all_gather", {1, 2, 4, 8}, 3, {});
}

// Rank 1 puts half of the result into the memory of rank 0, which is on its host.
TEST(NativeStoppedRankTest, MemoryOfAFailedAllReduceByHostsIsTheRanksOwn) {
  stop_rank_1("all_reduce", {8, 20}, 4, {0, 0, 1, 1});
}

// Rank 0 broadcasts out of symmetric memory; rank 1 is stopped amid its reading, and goes on after
// rank 0 has raised and written something else there.
const RankProgram reads_in_time("reads_in_time", [](RankOfTest& self, const std::string&) {
  constexpr std::size_t kBytes = (std::size_t{96} << 20) / kSlowdown;
  const MemoryPtr memory = self.communicator->allocate(kBytes, Device{});
  auto* const bytes = static_cast<std::byte*>(memory->data());
  Operation broadcast;
  broadcast.kind = OpKind::kBroadcast;
  auto& ends = self.rank == 0 ? broadcast.inputs : broadcast.outputs;
  ends = {{bytes, kBytes, DType::kUInt8}};
  self.communicator->run(broadcast);
  const auto start = std::chrono::steady_clock::now();
  self.communicator->run(broadcast);
  const auto whole = std::chrono::steady_clock::now() - start;
  std::memset(bytes, self.rank == 0 ? 5 : 1, kBytes);
  self.communicator->run(barrier());
  if (self.rank == 1) {
    const std::string parts = self.store->get("parts", Deadline::in(std::chrono::seconds(30)));
    stop_soon(std::chrono::duration_cast<std::chrono::microseconds>(whole * std::stoi(parts) / 16));
  }
  bool has_raised = false;
  try {
    self.communicator->run(with_timeout(broadcast, milliseconds(1000)));
  } catch (const Error&) {
    has_raised = true;
  }
  if (self.rank == 0) {
    std::memset(bytes, 9, kBytes);
    self.store->set("raised/0", has_raised ? "yes" : "no");
    static_cast<void>(self.store->get("went_on", Deadline::in(std::chrono::seconds(30))));
    return;
  }
  if (!has_raised) {
    EXPECT_EQ(std::count(bytes, bytes + kBytes, std::byte{5}), static_cast<std::ptrdiff_t>(kBytes))
        << "returned what rank 0 has written after its error";
  }
  self.store->set("went_on", "");
});

TEST(NativeStoppedRankTest, WhatItReadsAfterTheOthersHaveRaisedIsNoResult) {
  int raised = 0;
  for (const int parts : {1, 4, 8}) {
    RankProcesses ranks("reads_in_time", 2);
    ranks.store().set("parts", std::to_string(parts));
    const Deadline deadline = Deadline::in(std::chrono::seconds(30));
    raised += ranks.store().get("raised/0", deadline) == "yes" ? 1 : 0;
    // Again and again: on a busy machine it may stop only after rank 0 has ended.
    while (!look_up(ranks.store(), "went_on") && !deadline.has_passed()) {
      ranks.signal(1, SIGCONT);
      std::this_thread::sleep_for(milliseconds(10));
    }
    for (const int rank : {0, 1}) {
      const RankOutcome outcome = ranks.wait(rank);
      EXPECT_TRUE(outcome.has_ended_by_itself);
      EXPECT_FALSE(outcome.error) << outcome.error->message;
    }
  }
  EXPECT_GT(raised, 0) << "rank 1 was never stopped amid its reading";
}

// Rank 1 is stopped once it has announced an all_reduce on symmetric memory. Rank 0 does its part,
// leaves, and writes something else into its memory; only then does rank 1 go on.
const RankProgram leaves_first("leaves_first", [](RankOfTest& self, const std::string&) {
  constexpr std::size_t kCount = std::size_t{1} << 20;
  const Deadline deadline = Deadline::in(std::chrono::seconds(30));
  const MemoryPtr memory = self.communicator->allocate(kCount * sizeof(float), Device{});
  const std::span<float> values(static_cast<float*>(memory->data()), kCount);
  std::fill(values.begin(), values.end(), static_cast<float>(self.rank + 1));
  Operation sum;
  sum.kind = OpKind::kAllReduce;
  sum.inputs = {{values.data(), kCount, DType::kFloat32}};
  sum.outputs = sum.inputs;
  self.communicator->run(barrier());
  if (self.rank == 1) {
    const WorkPtr work = self.communicator->submit(sum);
    self.store->set("pid", join(::getpid()));
    ::raise(SIGSTOP);
    work->wait();
    EXPECT_EQ(std::count(values.begin(), values.end(), 3.0F), kCount);
    return;
  }
  const pid_t other = std::stoi(self.store->get("pid", deadline));
  while (process_state(other) != ProcessState::kStopped && !deadline.has_passed()) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  const WorkPtr work = self.communicator->submit(sum);
  std::this_thread::sleep_for(milliseconds(100) * kSlowdown);  // most likely it has done its part
  self.communicator->shutdown();
  std::fill(values.begin(), values.end(), 1000.0F);
  self.store->set("left", "");
  static_cast<void>(self.store->get("went_on", deadline));
  EXPECT_EQ(std::count(values.begin(), values.end(), 1000.0F), kCount);
});

TEST(NativeStoppedRankTest, WhoGoesOnAfterAnotherHasLeftTakesNothingOfItsMemory) {
  RankProcesses ranks("leaves_first", 2);
  static_cast<void>(ranks.store().get("left", Deadline::in(std::chrono::seconds(30))));
  ranks.signal(1, SIGCONT);
  const RankOutcome late = ranks.wait(1);
  ranks.store().set("went_on", "");
  EXPECT_TRUE(late.has_ended_by_itself);
  ASSERT_TRUE(late.error);
  EXPECT_EQ(late.error->kind, ErrorKind::kPeerLost) << late.error->message;
  EXPECT_PRED2(contains, late.error->message, "rank 0 (pid ");
  const RankOutcome early = ranks.wait(0);
  EXPECT_TRUE(early.has_ended_by_itself);
  EXPECT_FALSE(early.error) << early.error->message;
}

}  // namespace
}  // namespace pydist::testing
