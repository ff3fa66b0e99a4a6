// The native engine with real processes as ranks: that it works, what happens when one is killed
// or forked, and what an orderly end leaves behind. One that is stopped:
// native_stopped_rank_test.cc.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "collective_case.h"
#include "communicator/native/native_communicator.h"
#include "rank_processes.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kWithinASecond{1000 * kSlowdown};

void expect_good_end(RankProcesses& ranks, int size) {
  for (int rank = 0; rank < size; ++rank) {
    const RankOutcome outcome = ranks.wait(rank);
    EXPECT_TRUE(outcome.has_ended_by_itself) << "rank " << rank;
    EXPECT_FALSE(outcome.error) << "rank " << rank << ": " << outcome.error->message;
  }
}

// -- it works -------------------------------------------------------------------------------------

const RankProgram collectives("collectives", [](RankOfTest& self, const std::string& algorithm) {
  Environment environment = test_environment();
  environment.chunk_bytes = 4096;
  const bool is_ring = algorithm == "ring";
  environment.algorithm = is_ring ? AlgorithmChoice::kRing : AlgorithmChoice::kAuto;
  const CommunicatorPtr group = join_group(self, "other", environment);
  const MemoryPtr heap = group->allocate(std::size_t{8} << 20, Device{});
  CaseBuffers buffers(std::span(static_cast<std::byte*>(heap->data()), heap->bytes()));
  std::uint64_t seed = 100;
  for (const OpKind kind :
       {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kBroadcast,
        OpKind::kReduce, OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll}) {
    for (const Placement placement : {Placement::kOrdinary, Placement::kHeap, Placement::kMixed}) {
      for (const std::size_t count : {0, 1, 100, 5000, 70'001}) {
        Case what;
        what.kind = kind;
        what.counts = equal_counts(kind, self.size, count);
        what.root = has_root(kind) ? self.size - 1 : 0;
        what.seed = ++seed;
        const PreparedCase prepared =
            prepare(what, self.size, is_ring ? SummationOrder::kRing : SummationOrder::kRanks);
        group->run(buffers.lay_out(prepared, self.rank, placement));
        EXPECT_EQ(buffers.check(), "") << "rank " << self.rank << ", " << what.to_string();
      }
    }
  }
  const CommunicatorPtr backwards = [&] {
    std::vector<int> ranks;
    for (int rank = self.size - 1; rank >= 0; --rank) {
      ranks.push_back(rank);
    }
    return group->split(ranks);
  }();
  const int next = (self.rank + 1) % self.size;
  std::vector<int> out(300'000, self.rank);
  std::vector<int> in(300'000);
  const WorkPtr sent = backwards->submit(send_to(self.size - 1 - next, 4, out));
  backwards->run(receive_from(kAnySource, 4, in));
  sent->wait();
  EXPECT_EQ(in[299'999], (self.rank + self.size - 1) % self.size);
  self.communicator->run(barrier());
});

TEST(NativeProcessesTest, Collectives) {
  for (const int size : {1, 2, 4}) {
    RankProcesses ranks("collectives", size, "auto");
    expect_good_end(ranks, size);
  }
}

TEST(NativeProcessesTest, CollectivesInARing) {
  RankProcesses ranks("collectives", 3, "ring");
  expect_good_end(ranks, 3);
}

// -- a rank dies ----------------------------------------------------------------------------------

const RankProgram waits_for_two("waits_for_two", [](RankOfTest& self, const std::string& how) {
  std::vector<int> values(10'000, 1);
  self.communicator->run(all_reduce(values));
  self.store->set(join("ready/", self.rank), "");
  if (self.rank == 2) {
    std::this_thread::sleep_for(std::chrono::seconds(60));
  }
  if (how == "receive") {
    self.communicator->submit(receive_from(2, 0, values))->wait();
  } else if (how == "handle") {
    self.communicator->submit(all_reduce(values))->wait();
  } else {
    self.communicator->run(all_reduce(values));
  }
});

void wait_until_ready(RankProcesses& ranks, int size) {
  for (int rank = 0; rank < size; ++rank) {
    static_cast<void>(
        ranks.store().get(join("ready/", rank), Deadline::in(std::chrono::seconds(30))));
  }
  std::this_thread::sleep_for(milliseconds(50));
}

class NativeKilledRank : public ::testing::TestWithParam<std::string> {};

TEST_P(NativeKilledRank, IsNamedToTheOthersWithinASecond) {
  RankProcesses ranks("waits_for_two", 3, GetParam());
  wait_until_ready(ranks, 3);
  const auto start = Clock::now();
  ranks.signal(2, SIGKILL);
  for (const int rank : {0, 1}) {
    const RankOutcome outcome = ranks.wait(rank);
    EXPECT_LT(Clock::now() - start, kWithinASecond);
    EXPECT_TRUE(outcome.has_ended_by_itself);
    ASSERT_TRUE(outcome.error);
    EXPECT_EQ(outcome.error->kind, ErrorKind::kPeerLost) << outcome.error->message;
    EXPECT_PRED2(contains, outcome.error->message, "rank 2 (pid ");
    EXPECT_PRED2(contains, outcome.error->message, "has died");
  }
  EXPECT_FALSE(ranks.wait(2).has_ended_by_itself);
}

INSTANTIATE_TEST_SUITE_P(Waiting, NativeKilledRank, ::testing::Values("run", "handle", "receive"),
                         [](const auto& info) { return info.param; });

const RankProgram never_stops("never_stops", [](RankOfTest& self, const std::string&) {
  const MemoryPtr memory = self.communicator->allocate(4'000'000, Device{});
  std::vector<float> ordinary(200'000, 1);
  Operation symmetric = all_reduce(ordinary);
  symmetric.inputs[0] = {memory->data(), 1'000'000, DType::kFloat32};
  symmetric.outputs = symmetric.inputs;
  self.communicator->run(symmetric);
  self.store->set(join("ready/", self.rank), "");
  while (true) {
    self.communicator->run(all_reduce(ordinary));
    self.communicator->run(symmetric);
    self.communicator->run(barrier());
  }
});

TEST(NativeProcessesTest, KilledAtAnyMoment) {
  for (int turn = 0; turn < 6; ++turn) {
    RankProcesses ranks("never_stops", 3);
    wait_until_ready(ranks, 3);
    std::this_thread::sleep_for(std::chrono::microseconds(700 * turn));
    const auto start = Clock::now();
    const int victim = turn % 3;
    ranks.signal(victim, SIGKILL);
    for (int rank = 0; rank < 3; ++rank) {
      const RankOutcome outcome = ranks.wait(rank);
      if (rank == victim) {
        continue;
      }
      EXPECT_LT(Clock::now() - start, kWithinASecond);
      ASSERT_TRUE(outcome.error);
      EXPECT_EQ(outcome.error->kind, ErrorKind::kPeerLost) << outcome.error->message;
      EXPECT_PRED2(contains, outcome.error->message, join("rank ", victim, " (pid "));
    }
  }
}

const RankProgram leaves("leaves", [](RankOfTest& self, const std::string& how) {
  self.communicator->run(barrier());
  if (self.rank == 1) {
    if (how == "abruptly") {
      ::_exit(0);
    }
    return;  // in good order
  }
  self.communicator->run(barrier());
});

TEST(NativeProcessesTest, ProcessThatEndsIsNamedHoweverItEnds) {
  for (const std::string how : {"abruptly", "orderly"}) {
    RankProcesses ranks("leaves", 2, how);
    const RankOutcome outcome = ranks.wait(0);
    ASSERT_TRUE(outcome.error);
    EXPECT_EQ(outcome.error->kind, ErrorKind::kPeerLost) << outcome.error->message;
    EXPECT_PRED2(contains, outcome.error->message, "rank 1 (pid ");
    EXPECT_PRED2(contains, outcome.error->message, how == "orderly" ? "has left" : "has died");
  }
}

// -- a rank forks ---------------------------------------------------------------------------------

// Forks, runs `action` in the child and returns its exit status; -1 where the child hangs.
int status_of_child(const std::function<void()>& action) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    action();
    ::_exit(99);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

const RankProgram forks("forks", [](RankOfTest& self, const std::string&) {
  Communicator& group = *self.communicator;
  MemoryPtr memory = group.allocate(100'000, Device{});
  std::vector<int> values(1000, 1);
  std::vector<int> message(1000, self.rank);
  std::vector<int> received(1000);
  const WorkPtr pending = group.submit(receive_from(1 - self.rank, 0, received));
  const auto refuses = [](const std::function<void()>& action) {
    try {
      action();
    } catch (const InvalidUsage& error) {
      return contains(error.what(), "fork");
    }
    return false;
  };
  const int status = status_of_child([&] {
    const bool refuses_all =
        refuses([&] { group.run(all_reduce(values)); }) &&
        refuses([&] { static_cast<void>(group.submit(barrier())); }) &&
        refuses([&] { static_cast<void>(group.submit_grouped({barrier()})); }) &&
        refuses([&] { static_cast<void>(group.split({self.rank})); }) &&
        refuses([&] { static_cast<void>(group.allocate(10, Device{})); }) &&
        refuses([&] { group.abort(Aborted("by a child")); }) && refuses([&] { pending->wait(); }) &&
        refuses([&] { static_cast<void>(join_group(self, "child's own")); });
    // What the child has of the parent's dies here, and nothing happens.
    memory.reset();
    group.shutdown();
    self.communicator.reset();
    ::_exit(refuses_all ? 0 : 1);
  });
  EXPECT_EQ(status, 0);
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
  // The runtimes of the sanitizers have an opinion of their own on a child that ends so.
  EXPECT_EQ(status_of_child([] { std::exit(0); }), 0);
#endif
  // The parent has lost nothing.
  EXPECT_EQ(group.failure(), nullptr);
  const MemoryPtr other = group.allocate(100'000, Device{});
  EXPECT_NE(other->data(), memory->data());
  group.run(send_to(1 - self.rank, 0, message));
  pending->wait();
  EXPECT_EQ(received, std::vector<int>(1000, 1 - self.rank));
  group.run(all_reduce(values));
  EXPECT_EQ(values, std::vector<int>(1000, 2));
});

TEST(NativeProcessesTest, ForkedChildIsRefusedAndHarmsNobody) {
  RankProcesses ranks("forks", 2);
  expect_good_end(ranks, 2);
}

// -- nothing is left behind -----------------------------------------------------------------------

std::size_t entries(const char* folder) {
  std::size_t number = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) {
    ++number;
  }
  return number;
}

std::size_t our_mappings() {
  std::size_t number = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    number += contains(line, "memfd:") ? 1 : 0;
  }
  return number;
}

std::size_t descriptors_like_ours() {
  std::size_t number = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    number +=
        contains(target, "memfd:") || contains(target, "socket:") || contains(target, "anon_inode:")
            ? 1
            : 0;
  }
  return number;
}

const RankProgram cleans_up("cleans_up", [](RankOfTest& self, const std::string&) {
#if defined(__SANITIZE_THREAD__)
  constexpr std::size_t kOwnThreads = 2;  // the runtime has one
#else
  constexpr std::size_t kOwnThreads = 1;
#endif
  std::vector<CommunicatorPtr> groups;
  for (int i = 0; i < 10; ++i) {
    groups.push_back(self.communicator->split({0, 1}));
  }
  MemoryPtr memory = groups[3]->allocate(5'000'000, Device{});
  std::vector<int> values(100'000, 1);
  std::vector<WorkPtr> works;
  for (const CommunicatorPtr& group : groups) {
    works.push_back(group->submit(all_reduce(values)));
    works.back()->wait();
  }
  // One progress thread and one monitor, whatever the number of groups.
  EXPECT_EQ(entries("/proc/self/task"), kOwnThreads + 2);
  EXPECT_GT(our_mappings(), 10U);
  self.communicator->run(barrier());

  memory.reset();
  works.clear();
  groups.clear();
  self.communicator.reset();
  Endpoint::release_process();
  // The kernel takes a moment to clear away a thread that has been joined.
  for (int turn = 0; turn < 100 && entries("/proc/self/task") != kOwnThreads; ++turn) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_EQ(entries("/proc/self/task"), kOwnThreads);
  EXPECT_EQ(our_mappings(), 0U);
  EXPECT_EQ(descriptors_like_ours(), std::stoul(self.store->get("inherited", Deadline::never())));
});

TEST(NativeProcessesTest, NothingIsLeftBehind) {
  RankProcesses ranks("cleans_up", 2);
  // What this process has open of the kind is inherited.
  ranks.store().set("inherited", join(descriptors_like_ours()));
  expect_good_end(ranks, 2);
}

}  // namespace
}  // namespace pydist::testing
