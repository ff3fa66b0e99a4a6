// How an NCCL group fails: on every rank, in time, and with the name of whoever is the reason; on
// an NCCL and a CUDA driver without a GPU (tests/fakes).

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../fakes/cuda_driver.h"
#include "../fakes/nccl.h"
#include "communicator/nccl/late_ends.h"
#include "communicator/nccl/nccl_communicator.h"
#include "cuda/driver.h"
#include "nccl_fakes.h"
#include "ranks.h"
#include "ranks_log.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

using Rank = NcclRank;

// The errors of a collective, of all ranks, where `faults` come up at some rank.
std::vector<ErrorDescription> errors_of(const char* faults, milliseconds timeout = seconds(20)) {
  use_fake_cuda();
  const FakeFault fault(faults);
  const Environment environment = with_timeout_of(timeout);
  std::vector<ErrorDescription> errors(2);
  run_ranks(
      2,
      [&](RankOfTest& self) {
        std::optional<Rank> rank;  // outlives the error, which its group holds as well
        std::vector<float>& values = kept_values(self.rank);
        errors[static_cast<std::size_t>(self.rank)] = error_of([&] {
          rank.emplace(self, environment);
          for (int i = 0; i < 3; ++i) {
            rank->group->submit(rank->all_reduce(values))->wait();
          }
        });
      },
      environment);
  return errors;
}

TEST(NcclFailure, OfJoiningIsTheSameOnAllRanks) {
  for (const auto& [kind, message, blame] : errors_of("init_fail:1:0")) {
    EXPECT_EQ(kind, ErrorKind::kTransport);
    EXPECT_TRUE(contains(message, "Rank 1: joining the group: NCCL 2.30.7 says")) << message;
  }
}

TEST(NcclFailure, OfADriverWithoutAGpuIsAnError) {
  ::setenv("FAKE_CUDA_DEVICES", "0", 1);
  use_fake_cuda();
  const bool is_first = !cuda::Driver::why_missing().empty();
  ::unsetenv("FAKE_CUDA_DEVICES");
  if (!is_first) {
    GTEST_SKIP() << "the process has seen GPUs";
  }
  run_ranks(2, [](RankOfTest& self) {
    const auto [kind, message, blame] =
        error_of([&] { static_cast<void>(join_nccl(self, test_environment(), &no_kernels())); });
    EXPECT_EQ(kind, ErrorKind::kTransport);
    EXPECT_TRUE(contains(message, "the CUDA driver sees no GPU")) << message;
  });
}

TEST(NcclFailure, OfJoiningLeavesTheHostAsItWas) {
  use_fake_cuda();
  const FakeFault fault("init_fail:0:0");
  run_ranks(2, [](RankOfTest& self) {
    EXPECT_EQ(error_of([&] { Rank rank(self); }).kind, ErrorKind::kTransport);
    std::vector<int> values{1};
    self.communicator->run(testing::all_reduce(values));
    EXPECT_EQ(values[0], 2);
  });
}

TEST(NcclFailure, OfJoiningForEverEndsInTime) {
  for (const auto& [kind, message, blame] : errors_of("init_hang:1:0", milliseconds(1000))) {
    EXPECT_EQ(kind, ErrorKind::kTransport);
    EXPECT_TRUE(contains(message, "joining the group in NCCL did not end in time")) << message;
  }
}

TEST(NcclFailure, OfACallReachesTheOtherRank) {
  for (const auto& [kind, message, blame] : errors_of("fail:1:2")) {
    EXPECT_EQ(kind, ErrorKind::kTransport);
    EXPECT_TRUE(contains(message, "all_reduce #2 on rank 1 of 2: ncclAllReduce: NCCL")) << message;
  }
}

TEST(NcclFailure, OfALaunchEndsWhatTheHostHasOfTheSameGroup) {
  use_fake_cuda();
  const FakeFault fault("fail:1:1");
  std::barrier joined(2);
  std::promise<void> has_thrown;
  std::promise<void> has_sent;
  run_ranks(2, [&](RankOfTest& self) {
    const Rank rank(self);
    joined.arrive_and_wait();
    std::vector<int> message(1000, self.rank);
    ErrorDescription error;
    if (self.rank == 1) {
      std::vector<float>& values = kept_values(1);
      error = error_of([&] {
        std::vector<Operation> both{rank.all_reduce(values), receive_from(0, 3, message)};
        static_cast<void>(rank.group->submit_grouped(std::move(both)));
      });
      has_thrown.set_value();
      has_sent.get_future().wait_for(seconds(30));
      EXPECT_EQ(message, std::vector<int>(1000, 1));
    } else {
      has_thrown.get_future().wait_for(seconds(30));
      error = error_of([&] { rank.group->submit(send_to(1, 3, message))->wait(); });
      has_sent.set_value();
    }
    EXPECT_EQ(error.kind, ErrorKind::kTransport);
    EXPECT_PRED2(contains, error.message, "all_reduce #1 on rank 1 of 2: ncclAllReduce: NCCL");
  });
}

TEST(NcclFailure, ThatComesUpLaterReachesEverybody) {
  for (const auto& [kind, message, blame] : errors_of("async:1:3")) {
    EXPECT_EQ(kind, ErrorKind::kPeerLost);
    EXPECT_TRUE(contains(message, "all_reduce #3 on rank 1 of 2")) << message;
    EXPECT_TRUE(contains(message, "remote process exited")) << message;
  }
}

TEST(NcclFailure, OfNcclsOwnPatienceSaysWhereEverybodyIs) {
  for (const auto& [kind, message, blame] : errors_of("timeout:1:2")) {
    EXPECT_EQ(kind, ErrorKind::kTimeout) << message;
    EXPECT_TRUE(contains(message, "NCCL 2.30.7 says: timeout")) << message;
    EXPECT_TRUE(contains(message, "rank 0 (")) << message;
    EXPECT_TRUE(contains(message, "is in all_reduce #2")) << message;
  }
}

// NCCL notices first that a peer is gone, and cannot say which.
TEST(NcclFailure, WaitsForTheNameOfThePeerThatExplainsIt) {
  for (const char* faults : {"async:0:2", "timeout:0:2", "fail:0:2"}) {
    use_fake_cuda();
    const FakeFault fault(faults);
    run_ranks(2, [&](RankOfTest& self) {
      const Rank rank(self, test_environment(), {.name = seconds(10)});
      std::vector<float> values(10);
      rank.group->submit(rank.all_reduce(values))->wait();
      if (self.rank == 1) {
        std::this_thread::sleep_for(milliseconds(200));
        rank.group->shutdown();
        return;
      }
      const auto [kind, message, blame] =
          error_of([&] { rank.group->submit(rank.all_reduce(values))->wait(); });
      EXPECT_EQ(kind, ErrorKind::kPeerLost) << message;
      EXPECT_TRUE(contains(message, "rank 1 (")) << message;
    });
  }
}

TEST(NcclFailure, OfAHangingOperationSaysWhereEverybodyIs) {
  for (const auto& [kind, message, blame] : errors_of("hang:1:2", milliseconds(1500))) {
    EXPECT_EQ(kind, ErrorKind::kTimeout);
    EXPECT_TRUE(contains(message, "all_reduce #2 on rank")) << message;
    EXPECT_TRUE(contains(message, "did not finish on the GPU in time. rank 0 (")) << message;
    EXPECT_TRUE(contains(message, "rank 1 (")) << message;
    EXPECT_TRUE(contains(message, "is in all_reduce #2")) << message;
    EXPECT_TRUE(blame.ranks.empty()) << "both have launched it";
  }
}

TEST(NcclFailure, OfAnOperationThatARankNeverLaunchesBlamesThatRank) {
  use_fake_cuda();
  run_ranks(2, [](RankOfTest& self) {
    const Rank rank(self);
    std::vector<float>& values = kept_values(self.rank);
    rank.group->submit(rank.all_reduce(values))->wait();
    if (self.rank == 0) {
      static_cast<void>(error_of([&] {
        rank.group->submit(with_timeout(rank.all_reduce(values), milliseconds(500)))->wait();
      }));
    }
    ASSERT_TRUE(comes_true([&] { return rank.group->failure() != nullptr; }));
    const auto [kind, message, blame] = describe(rank.group->failure());
    EXPECT_EQ(kind, ErrorKind::kTimeout) << message;
    EXPECT_EQ(blame.ranks, std::vector<int>{1}) << message;
    EXPECT_EQ(blame.cause, "has not launched it");
    EXPECT_NE(blame.pid, 0);
    EXPECT_TRUE(contains(message, "all_reduce #2 on rank 0 of 2")) << message;
    EXPECT_TRUE(contains(message, "on the GPU in time, not launched by rank 1 (pid ")) << message;
  });
}

TEST(NcclFailure, IsForetoldInTheLogWithTheRankThatHasNotLaunched) {
  use_fake_cuda();
  const std::string log = log_of(2, [](RankOfTest& self) {
    const Rank rank(self, test_environment(), {.long_wait = milliseconds(50)});
    std::vector<float> values(4, 1.0F);
    rank.group->submit(rank.all_reduce(values))->wait();
    if (self.rank == 1) {
      std::this_thread::sleep_for(milliseconds(2000 * kSlowdown));
    }
    Operation operation = rank.all_reduce(values);
    operation.label = "bucket 7";
    const WorkPtr first = rank.group->submit(std::move(operation));
    const WorkPtr second = rank.group->submit(rank.all_reduce(values));
    first->wait();
    second->wait();
  });
  EXPECT_EQ(occurrences(log, "warning: nccl: rank "), 1) << log;
  EXPECT_PRED2(contains, log, "nccl: rank 0 (pid ");
  EXPECT_PRED2(contains, log, "has been in all_reduce #2 (bucket 7) of group '");
  EXPECT_PRED2(contains, log, "for 0.05 s: not launched by rank 1 (pid ");
}

TEST(NcclFailure, DoesNotWaitForAnAbortThatHangs) {
  const auto began = std::chrono::steady_clock::now();
  for (const auto& [kind, message, blame] : errors_of("async:1:1,hang_abort:0:0,hang_abort:1:0")) {
    EXPECT_EQ(kind, ErrorKind::kPeerLost) << message;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - began, seconds(15 * kSlowdown));
}

// The driver keeps whoever asks it waiting until the operation ends: an abort must not depend on
// that.
TEST(NcclFailure, IsSeenWhileTheDriverKeepsAThreadWaiting) {
  use_fake_cuda();
  ::fake_driver_queries_wait(true);
  for (const auto& [kind, message, blame] : errors_of("hang:1:2", milliseconds(1500))) {
    EXPECT_EQ(kind, ErrorKind::kTimeout) << message;
  }
  ::fake_driver_queries_wait(false);
}

// Nor on somebody who waits on the host: streams do as a rule.
TEST(NcclFailure, IsSeenWhileTheDriverAnswersNobody) {
  use_fake_cuda();
  ::fake_driver_queries_wait(true);
  const FakeFault fault("hang:1:1");
  const Environment environment = with_timeout_of(milliseconds(1'500));
  const auto body = [&](RankOfTest& self) {
    const Rank rank(self, environment);
    std::vector<float>& values = kept_values(self.rank);
    const WorkPtr work = rank.group->submit(rank.all_reduce(values));
    const Deadline deadline = Deadline::in(seconds(5 * kSlowdown));
    while (rank.group->failure() == nullptr && !deadline.has_passed()) {
      std::this_thread::sleep_for(milliseconds(5));
    }
    ASSERT_NE(rank.group->failure(), nullptr);
    EXPECT_EQ(describe(rank.group->failure()).kind, ErrorKind::kTimeout);
  };
  run_ranks(2, body, environment);
  ::fake_driver_queries_wait(false);
}

// NCCL's own end waits for graphs that hold its operations.
TEST(NcclFailure, DoesNotWaitForAnAbortThatHasEndedWhatItShould) {
  use_fake_cuda();
  const FakeFault fault("hang:1:2,late_abort:0:0,late_abort:1:0");
  const Environment environment = with_timeout_of(milliseconds(1'500));
  const auto body = [&](RankOfTest& self) {
    const Rank rank(self, environment, {.end = kForTheEnd});
    std::vector<float>& values = kept_values(self.rank);
    rank.group->submit(rank.all_reduce(values))->wait();
    const auto [kind, message, blame] =
        error_of([&] { rank.group->submit(rank.all_reduce(values))->wait(); });
    EXPECT_EQ(kind, ErrorKind::kTimeout) << message;
  };
  run_ranks(2, body, environment);
}

TEST(NcclFailure, OfARankThatLeavesEndsTheOthers) {
  run_ranks(2, [](RankOfTest& self) {
    const Rank rank(self);
    std::vector<float> values(10);
    rank.group->submit(rank.all_reduce(values))->wait();
    if (self.rank == 1) {
      rank.group->shutdown();
      return;
    }
    const auto [kind, message, blame] =
        error_of([&] { rank.group->submit(rank.all_reduce(values))->wait(); });
    EXPECT_EQ(kind, ErrorKind::kPeerLost);
    EXPECT_TRUE(contains(message, "all_reduce #2 on rank 0 of 2")) << message;
    EXPECT_TRUE(contains(message, "rank 1 (")) << message;
    EXPECT_EQ(describe(rank.group->failure()).kind, ErrorKind::kPeerLost);
  });
}

// Whoever leaves has done its part of what the others are still at, and of nothing that follows.
TEST(NcclFailure, IsNoneOfWhatARankDidBeforeItLeft) {
  use_fake_cuda();
  const FakeFault fault("late:0:2");
  run_ranks(2, [](RankOfTest& self) {
    const Rank rank(self);
    std::vector<float> values(10, 1.0F);
    std::vector<float>& more = kept_values(self.rank);
    rank.group->submit(rank.all_reduce(values))->wait();
    const WorkPtr work = rank.group->submit(rank.all_reduce(values));
    if (self.rank == 1) {
      work->wait();
      rank.group->shutdown();
      return;
    }
    const WorkPtr next = rank.group->submit(rank.all_reduce(more));
    work->wait();
    EXPECT_EQ(values[0], 4.0F);
    const auto [kind, message, blame] = error_of([&] { next->wait(); });
    EXPECT_EQ(kind, ErrorKind::kPeerLost);
    EXPECT_TRUE(contains(message, "all_reduce #3 on rank 0 of 2")) << message;
    EXPECT_TRUE(contains(message, "has left the group")) << message;
  });
}

TEST(NcclFailure, AbortEndsEveryRank) {
  run_ranks(2, [](RankOfTest& self) {
    const Rank rank(self);
    std::vector<float> values(10);
    if (self.rank == 1) {
      std::this_thread::sleep_for(milliseconds(100));
      rank.group->abort(Aborted("rank 1 has had enough"));
      EXPECT_EQ(error_of([&] { rank.group->run(rank.all_reduce(values)); }).kind,
                ErrorKind::kAborted);
      return;
    }
    const auto [kind, message, blame] =
        error_of([&] { rank.group->submit(rank.all_reduce(values))->wait(); });
    EXPECT_EQ(kind, ErrorKind::kAborted);
    EXPECT_TRUE(contains(message, "rank 1 has had enough")) << message;
  });
}

}  // namespace
}  // namespace pydist::testing
