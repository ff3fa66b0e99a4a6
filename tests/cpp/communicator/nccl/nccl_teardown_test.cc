// What the NCCL backend gives back, when, and in which order: memory, registrations, graphs,
// communicators; on an NCCL and a CUDA driver without a GPU (tests/fakes).

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "../fakes/cuda_driver.h"
#include "../fakes/nccl.h"
#include "communicator/nccl/late_ends.h"
#include "communicator/nccl/nccl_communicator.h"
#include "cuda/stream.h"
#include "nccl_fakes.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(NcclTeardown, GivesEverythingBack) {
  run_ranks(2, [](RankOfTest& self) {
    const NcclRank rank(self);
    std::vector<float> values(10, 1.0F);
    MemoryPtr dropped_before = allocate(rank);
    MemoryPtr dropped_after = allocate(rank);
    rank.group->submit(scaled(rank, values))->wait();
    EXPECT_EQ(values[0], 4.0F);
    dropped_before.reset();
    rank.group->shutdown();
    dropped_after.reset();
  });
  let_go_of_nccl();
  EXPECT_EQ(::fake_nccl_blocks(), 0);
  EXPECT_EQ(::fake_driver_blocks(), 0);
  EXPECT_EQ(::fake_nccl_communicators(), 0);
  EXPECT_EQ(::fake_nccl_faults(), 0);
  EXPECT_EQ(::fake_driver_faults(), 0) << "calls without a current context";
}

// A replay overlaps with launches; graphs follow each other.
TEST(NcclTeardown, GivesGraphsScratchMemoryOfTheirOwnThatGoesWithTheGroup) {
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self);
    std::vector<float> values(10, 1.0F);
    const auto make = [&] { return scaled(rank, values); };
    const int before = ::fake_driver_blocks();
    void* const first = captured(rank, make);
    EXPECT_EQ(::fake_driver_blocks(), before + 1);
    void* const second = captured(rank, make);
    EXPECT_EQ(::fake_driver_blocks(), before + 2);
    ::fake_driver_replay(first, rank.stream.get());
    ::fake_driver_replay(second, rank.stream.get());
    rank.stream.synchronize();
    EXPECT_EQ(values[0], 4.0F);
    ::fake_driver_destroy_graph(first);
    ::fake_driver_destroy_graph(second);
    rank.group->shutdown();
  });
  let_go_of_nccl();
  EXPECT_EQ(::fake_driver_blocks(), 0);
}

TEST(NcclTeardown, DoesNotAbortWhileMemoryIsDeregistered) {
  use_fake_cuda();
  const FakeFault fault("slow_deregister:0:0");
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self);
    MemoryPtr memory = allocate(rank);
    memory.reset();
    std::thread other([&] {
      std::this_thread::sleep_for(milliseconds(100));
      rank.group->abort(Aborted("enough"));
    });
    // Frees what has been dropped.
    EXPECT_EQ(error_of([&] { static_cast<void>(allocate(rank)); }).kind, ErrorKind::kAborted);
    other.join();
    rank.group->shutdown();
  });
  EXPECT_EQ(::fake_nccl_faults(), 0);
}

TEST(NcclTeardown, KeepsMemoryThatCannotBeDeregisteredYet) {
  use_fake_cuda();
  const FakeFault fault("slow:0:1");
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self);
    MemoryPtr memory = allocate(rank);
    memory.reset();
    std::vector<float> values(10, 1.0F);
    // Keeps everybody else from NCCL for two seconds.
    std::thread other([&] { rank.group->submit(rank.all_reduce(values))->wait(); });
    std::this_thread::sleep_for(milliseconds(100));
    memory = allocate(rank);
    EXPECT_EQ(::fake_nccl_faults(), 0);
    other.join();
    memory.reset();
    rank.group->shutdown();
  });
  let_go_of_nccl();
  EXPECT_EQ(::fake_nccl_faults(), 0);
  EXPECT_EQ(::fake_nccl_blocks(), 0);
}

// A replay is nobody's operation, but it ends with NCCL's communicator.
TEST(NcclTeardown, EndsAReplayThatHangs) {
  use_fake_cuda();
  const FakeFault fault("hang:0:1");
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self);
    std::vector<float> values(10, 1.0F);
    void* const graph = captured(rank, [&] { return rank.all_reduce(values); });
    ::fake_driver_replay(graph, rank.stream.get());
    rank.group->shutdown();
    EXPECT_TRUE(comes_true([&] {
      const cuda::DeviceGuard guard(rank.device);
      return cuda::Driver::get().is_idle(rank.stream.get());
    }));
    ::fake_driver_destroy_graph(graph);
  });
}

// NCCL finalizes no communicator while a graph holds its operations.
TEST(NcclTeardown, LeavesReplaysTheTimeThatNcclHasToEnd) {
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self, test_environment(), {.end = kForTheEnd});
    std::vector<float> values(10, 1.0F);
    void* const graph = captured(rank, [&] { return rank.all_reduce(values); });
    const std::function<void()> compute = [] { std::this_thread::sleep_for(milliseconds(300)); };
    ::fake_driver_enqueue(rank.stream.get(), &compute);
    ::fake_driver_replay(graph, rank.stream.get());
    rank.group->shutdown();
    EXPECT_EQ(::fake_nccl_communicators(), 1);
    rank.stream.synchronize();
    ::fake_driver_destroy_graph(graph);
  });
  LateEnds::of_process().join();
  EXPECT_EQ(::fake_nccl_communicators(), 0);
}

TEST(NcclTeardown, AbortsACommunicatorThatDoesNotFinalize) {
  use_fake_cuda();
  const FakeFault fault("hang_finalize:0:0");
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self);
    rank.group->shutdown();
  });
  LateEnds::of_process().join();
  EXPECT_EQ(::fake_nccl_communicators(), 0);
}

// NCCL destroys a communicator together with those of its neighbours.
TEST(NcclTeardown, ReturnsWhileItsNeighboursGoOn) {
  use_fake_cuda();
  std::atomic<bool> has_left{false};
  run_ranks(2, [&](RankOfTest& self) {
    const NcclRank rank(self, test_environment(), {.end = kForTheEnd});
    if (self.rank == 1) {
      rank.group->shutdown();
      has_left = true;
      return;
    }
    EXPECT_TRUE(comes_true([&] { return has_left.load(); }));
    EXPECT_EQ(::fake_nccl_communicators(), 2) << "the fake is to wait as NCCL does";
    rank.group->shutdown();
  });
  LateEnds::of_process().join();
  EXPECT_EQ(::fake_nccl_communicators(), 0);
}

// Another thread may be about to abort, and called back meanwhile.
TEST(NcclTeardown, WaitsForAnAbortThatAnotherThreadHasBegun) {
  use_fake_cuda();
  std::atomic<bool> is_joined{false};
  run_ranks(2, [&](RankOfTest& self) {
    const NcclRank rank(self);
    if (self.rank == 1) {
      is_joined = true;
      EXPECT_TRUE(comes_true([&] { return rank.group->failure() != nullptr; }));
      return;
    }
    EXPECT_TRUE(comes_true([&] { return is_joined.load(); }));
    static auto& values = *new std::vector<float>(10);
    std::vector<float> message(10);
    const WorkPtr on_gpu = rank.group->submit(rank.all_reduce(values));  // rank 1 does not come
    EXPECT_TRUE(on_gpu->wait_on_stream(rank.stream.get()));
    std::atomic<bool> is_given_back{false};
    on_gpu->on_completion([&](const Work::Outcome&) {
      const cuda::DeviceGuard guard(rank.device);
      EXPECT_TRUE(
          comes_true([&] { return cuda::Driver::get().is_idle(rank.stream.get()); }, seconds(1)))
          << "values are in use";
      is_given_back = true;
    });
    std::atomic<bool> is_called{false};
    std::atomic<bool> is_over{false};
    const WorkPtr on_host = rank.group->submit(receive_from(1, 0, message));
    on_host->on_completion([&](const Work::Outcome&) {
      is_called = true;
      EXPECT_TRUE(comes_true([&] { return is_given_back.load(); }));
      is_over = true;
    });
    std::thread other([&] { rank.group->abort(Aborted("enough")); });
    EXPECT_TRUE(comes_true([&] { return is_called.load(); }));
    rank.group->shutdown();
    other.join();
    EXPECT_TRUE(comes_true([&] { return is_over.load(); }));
  });
}

// Nor does NCCL's abort return before the graphs that hold its operations are gone.
TEST(NcclTeardown, EndsWaitersWhileAGraphHoldsTheAbortUp) {
  use_fake_cuda();
  const FakeFault fault("hang:0:2");
  const Environment environment = with_timeout_of(milliseconds(1'500));
  const auto body = [&](RankOfTest& self) {
    const NcclRank rank(self, environment, {.end = kForTheEnd});
    std::vector<float> values(10, 1.0F);
    void* const graph = captured(rank, [&] { return rank.all_reduce(values); });
    const auto [kind, message, blame] =
        error_of([&] { rank.group->submit(rank.all_reduce(values))->wait(); });
    EXPECT_EQ(kind, ErrorKind::kTimeout) << message;
    rank.group->shutdown();
    EXPECT_EQ(::fake_nccl_communicators(), 1) << "the fake is to wait as NCCL does";
    ::fake_driver_destroy_graph(graph);
  };
  run_ranks(1, body, environment);
  LateEnds::of_process().join();
  EXPECT_EQ(::fake_nccl_communicators(), 0);
}

// The driver of the fakes ends a child that calls it.
TEST(NcclTeardown, LeavesTheDriverAloneInAForkedChild) {
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self);
    std::vector<float> values(10, 1.0F);
    WorkPtr work = rank.group->submit(rank.all_reduce(values));
    work->wait();
    const pid_t child = ::fork();
    if (child == 0) {
      work.reset();
      let_go_of_nccl();  // as at the exit of a process
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 0);
    rank.group->shutdown();
  });
}

TEST(NcclTeardown, FreesBesideAGroupThatIsBusyForAMoment) {
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self);
    const CommunicatorPtr other = rank.group->split({0});
    std::vector<float> values(10, 1.0F);
    allocate(rank).reset();
    const std::function<void()> compute = [] { std::this_thread::sleep_for(milliseconds(20)); };
    ::fake_driver_enqueue(rank.stream.get(), &compute);
    const WorkPtr work = other->submit(rank.all_reduce(values));
    const MemoryPtr next = allocate(rank);
    EXPECT_EQ(::fake_nccl_blocks(), 1);
    work->wait();
    other->shutdown();
    rank.group->shutdown();
  });
}

// Nobody waits for a device that hangs. Should it come to its end after all, it is as any other.
TEST(NcclTeardown, FreesOnceAGroupHangsNoMore) {
  use_fake_cuda();
  const FakeFault fault("hang:0:1,slow_abort:0:0");
  const Environment environment = with_timeout_of(milliseconds(500));
  const auto body = [&](RankOfTest& self) {
    const NcclRank rank(self, environment, {.end = milliseconds(200)});
    const CommunicatorPtr other = rank.group->split({0});
    static auto& kept = *new std::vector<float>(10);
    allocate(rank).reset();
    EXPECT_EQ(error_of([&] { rank.group->submit(rank.all_reduce(kept))->wait(); }).kind,
              ErrorKind::kTimeout);
    const Device device{DeviceType::kCuda, rank.device};
    MemoryPtr next = other->allocate(1000, device);
    EXPECT_TRUE(comes_true([&] {
      next = other->allocate(1000, device);
      return ::fake_nccl_blocks() == 2;  // this one, and the one before
    }));
    other->shutdown();
  };
  run_ranks(1, body, environment);
}

// What NCCL still knows, as nobody ends it, is not freed.
TEST(NcclTeardown, EndsGroupsWhereNoThreadIsToBeHad) {
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank ending(self);
    const CommunicatorPtr failing = ending.group->split({0});
    const CommunicatorPtr other = ending.group->split({0});
    const Device device{DeviceType::kCuda, self.rank};
    MemoryPtr of_ending = ending.group->allocate(1000, device);
    MemoryPtr of_failing = failing->allocate(1000, device);
    {
      const NoThreads no_threads;
      ending.group->shutdown();
      failing->abort(Aborted("enough"));
      failing->shutdown();
    }
    of_ending.reset();
    of_failing.reset();
    EXPECT_NE(other->allocate(1000, device), nullptr);
    EXPECT_EQ(::fake_nccl_blocks(), 2) << "that of the group that has failed is kept";
    other->shutdown();
  });
  EXPECT_EQ(::fake_nccl_faults(), 0);
}

// The last, as this process has devices that hang from here on.
TEST(NcclTeardown, EndsWaitersWhereNoThreadIsToBeHad) {
  use_fake_cuda();
  const FakeFault fault("hang:0:1");
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self, test_environment(), {.end = kForTheEnd});
    static auto& kept = *new std::vector<float>(10);
    const WorkPtr work = rank.group->submit(rank.all_reduce(kept));
    const NoThreads no_threads;
    rank.group->abort(Aborted("enough"));
    EXPECT_EQ(error_of([&] { work->wait(); }).message, "enough");
    rank.group->shutdown();
  });
}

TEST(NcclTeardown, AllocatesBesideAGroupThatHangsOnTheDevice) {
  use_fake_cuda();
  const FakeFault fault("hang:0:1,hang_abort:0:0");
  const Environment environment = with_timeout_of(milliseconds(1'000));
  const auto body = [&](RankOfTest& self) {
    const NcclRank rank(self, environment);
    const CommunicatorPtr other = rank.group->split({0});
    MemoryPtr memory = allocate(rank);
    static auto& kept = *new std::vector<float>(10);
    EXPECT_EQ(error_of([&] { rank.group->submit(rank.all_reduce(kept))->wait(); }).kind,
              ErrorKind::kTimeout);
    memory.reset();
    EXPECT_NE(other->allocate(1000, Device{DeviceType::kCuda, rank.device}), nullptr);
    other->shutdown();
  };
  run_ranks(1, body, environment);
}

TEST(NcclTeardown, AllocatesAfterAGroupThatHangsOnTheDevice) {
  use_fake_cuda();
  const FakeFault fault("deaf:0:1");
  const Environment environment = with_timeout_of(milliseconds(1'000));
  const auto body = [&](RankOfTest& self) {
    static auto& stream = *new FakeStream(self.rank);
    static auto& kept = *new std::vector<float>(10);
    CommunicatorPtr group = join_nccl(self, environment);
    CommunicatorPtr other = group->split({0});
    const Device device{DeviceType::kCuda, self.rank};
    MemoryPtr memory = group->allocate(1000, device);
    WorkPtr work = group->submit(on_device(all_reduce(kept), self.rank, stream.get()));
    EXPECT_TRUE(work->wait_on_stream(stream.get()));
    EXPECT_EQ(error_of([&] { work->wait(); }).kind, ErrorKind::kTimeout);
    work.reset();
    memory.reset();
    group.reset();
    LateEnds::of_process().join();
    EXPECT_NE(other->allocate(1000, device), nullptr);
    other->shutdown();
    other.reset();
    let_go_of_nccl();
  };
  run_ranks(1, body, environment);
}

}  // namespace
}  // namespace pydist::testing
