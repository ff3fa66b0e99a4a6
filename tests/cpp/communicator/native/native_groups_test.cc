// Asynchronous work, several threads, and many groups at once.

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>

#include "ranks.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kShort{50};

// What all_reduce of `rank + offset` yields on p ranks.
int sum_of_ranks(int size, int offset) { return size * (size - 1) / 2 + size * offset; }

void expect_sum(Communicator& group, int offset) {
  std::vector<int> values(33, group.rank() + offset);
  group.run(all_reduce(values));
  EXPECT_EQ(values, std::vector<int>(33, sum_of_ranks(group.size(), offset)));
}

TEST(NativeWorkTest, ManySubmissionsWaitedForInAnyOrder) {
  run_ranks(3, [](RankOfTest& self) {
    constexpr std::size_t kOperations = 100;
    std::vector<std::vector<int>> values;
    for (std::size_t i = 0; i < kOperations; ++i) {
      values.emplace_back(i * 13, self.rank + static_cast<int>(i));
    }
    std::vector<WorkPtr> works;
    for (auto& each : values) {
      works.push_back(self.communicator->submit(all_reduce(each)));
    }
    for (std::size_t turn = 0; turn < kOperations; ++turn) {
      const std::size_t i = (turn * 37 + static_cast<std::size_t>(self.rank)) % kOperations;
      works[i]->wait();
      EXPECT_EQ(values[i], std::vector<int>(i * 13, sum_of_ranks(self.size, static_cast<int>(i))));
    }
  });
}

TEST(NativeWorkTest, CompletesWithoutAnybodyWaiting) {
  run_ranks(2, [](RankOfTest& self) {
    std::vector<int> values(50'000, self.rank + 1);
    const WorkPtr work = self.communicator->submit(all_reduce(values));
    std::atomic<int> calls{0};
    work->on_completion([&calls](const Work::Outcome&) { calls.fetch_add(1); });
    while (calls.load() == 0) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_TRUE(work->is_completed());
    EXPECT_EQ(work->exception(), nullptr);
    EXPECT_EQ(values, std::vector<int>(50'000, 3));
    // Too late to be called later: at once.
    work->on_completion([&calls](const Work::Outcome&) { calls.fetch_add(1); });
    EXPECT_EQ(calls.load(), 2);
  });
}

TEST(NativeWorkTest, CallbackMaySubmit) {
  run_ranks(2, [](RankOfTest& self) {
    std::vector<int> first(10, 1);
    std::vector<int> second(10, 2);
    std::atomic<bool> is_submitted{false};
    WorkPtr next;
    const WorkPtr work = self.communicator->submit(all_reduce(first));
    work->on_completion([&](const Work::Outcome&) {
      next = self.communicator->submit(all_reduce(second));
      is_submitted.store(true);
    });
    work->wait();
    while (!is_submitted.load()) {
      std::this_thread::yield();
    }
    next->wait();
    EXPECT_EQ(second, std::vector<int>(10, 4));
  });
}

TEST(NativeWorkTest, WaitedForBySeveralThreads) {
  run_ranks(2, [](RankOfTest& self) {
    std::vector<int> values(1000, self.rank);
    if (self.rank == 1) {
      std::this_thread::sleep_for(kShort);
    }
    const WorkPtr work = self.communicator->submit(all_reduce(values));
    std::vector<std::thread> waiters;
    std::atomic<int> right{0};
    for (int i = 0; i < 4; ++i) {
      waiters.emplace_back([&] {
        work->wait();
        right.fetch_add(values[999] == 1 ? 1 : 0);
      });
    }
    for (std::thread& waiter : waiters) {
      waiter.join();
    }
    EXPECT_EQ(right.load(), 4);
  });
}

TEST(NativeWorkTest, WaitGivesUpAndMayBeRepeated) {
  run_ranks(2, [](RankOfTest& self) {
    std::vector<int> values(1000, self.rank);
    if (self.rank == 0) {
      const WorkPtr work = self.communicator->submit(all_reduce(values));
      const ErrorDescription error = error_of([&] { work->wait(Deadline::in(kShort)); });
      EXPECT_EQ(error.kind, ErrorKind::kTimeout);
      EXPECT_PRED2(contains, error.message, "rank 1");
      EXPECT_PRED2(contains, error.message, "never entered all_reduce #1");
      EXPECT_FALSE(work->is_completed());
      std::vector<int> go(1, 1);
      self.communicator->run(send_to(1, 0, go));
      work->wait();
    } else {
      std::vector<int> go(1);
      self.communicator->run(receive_from(0, 0, go));
      self.communicator->run(all_reduce(values));
    }
    EXPECT_EQ(values, std::vector<int>(1000, 1));
  });
}

TEST(NativeWorkTest, RunQueuesBehindSubmissions) {
  run_ranks(3, [](RankOfTest& self) {
    for (int i = 0; i < 100; ++i) {
      std::vector<int> first(2000, i);
      std::vector<int> second(1, self.rank);
      const WorkPtr work = self.communicator->submit(all_reduce(first));
      self.communicator->run(all_reduce(second));
      // Collectives complete in order.
      EXPECT_TRUE(work->is_completed());
      EXPECT_EQ(first[1999], 3 * i);
      EXPECT_EQ(second[0], 3);
    }
  });
}

TEST(NativeWorkTest, Grouped) {
  run_ranks(3, [](RankOfTest& self) {
    std::vector<std::vector<float>> values(20);
    std::vector<Operation> operations;
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i].assign(i * 100, static_cast<float>(i));
      operations.push_back(all_reduce(values[i]));
    }
    combine(self.communicator->submit_grouped(std::move(operations)))->wait();
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(values[i], std::vector<float>(i * 100, 3.0F * static_cast<float>(i)));
    }
    // A circle of messages as one operation.
    const int next = (self.rank + 1) % 3;
    const int previous = (self.rank + 2) % 3;
    std::vector<int> out(100'000, self.rank);
    std::vector<int> in(100'000);
    const std::vector<WorkPtr> works =
        self.communicator->submit_grouped({send_to(next, 5, out), receive_from(kAnySource, 5, in)});
    combine(works)->wait();
    EXPECT_EQ(in, std::vector<int>(100'000, previous));
    EXPECT_EQ(works.at(1)->source_rank(), previous);
    EXPECT_TRUE(self.communicator->submit_grouped({}).empty());
  });
}

TEST(NativeWorkTest, GroupedIsCheckedBeforeAnythingStarts) {
  run_ranks(2, [](RankOfTest& self) {
    std::vector<int> values(5, 1);
    std::vector<int> shorter(4, 1);
    Operation wrong = all_reduce(values);
    wrong.outputs = {buffer_of(shorter)};
    const ErrorDescription error = error_of(
        [&] { static_cast<void>(self.communicator->submit_grouped({all_reduce(values), wrong})); });
    EXPECT_EQ(error.kind, ErrorKind::kInvalidUsage);
    EXPECT_EQ(values, std::vector<int>(5, 1));
    expect_sum(*self.communicator, 0);
  });
}

// -- groups ---------------------------------------------------------------------------------------

TEST(NativeGroupsTest, SplitsInAnyOrder) {
  run_ranks(4, [](RankOfTest& self) {
    Communicator& world = *self.communicator;
    // Members name the ranks in the new order; groups that share no rank are made at the same time,
    // and each rank's next group waits for nobody but its members.
    const CommunicatorPtr half = world.split(self.rank < 2 ? std::vector{1, 0} : std::vector{2, 3});
    EXPECT_EQ(half->size(), 2);
    EXPECT_EQ(half->rank(), self.rank < 2 ? 1 - self.rank : self.rank - 2);
    const CommunicatorPtr stride =
        world.split(self.rank % 2 == 0 ? std::vector{0, 2} : std::vector{3, 1});
    expect_sum(*half, 5);
    expect_sum(*stride, 7);
    expect_sum(world, 1);
    // The same members once more: another group.
    const CommunicatorPtr again = world.split({3, 2, 1, 0});
    const CommunicatorPtr yet_again = world.split({3, 2, 1, 0});
    EXPECT_NE(again->name(), yet_again->name());
    expect_sum(*yet_again, 2);
    expect_sum(*again, 3);
    // A group of a group, and a group of one.
    const CommunicatorPtr pair =
        again->split(again->rank() < 2 ? std::vector{0, 1} : std::vector{2, 3});
    expect_sum(*pair, 4);
    expect_sum(*world.split({self.rank}), 9);
  });
}

TEST(NativeGroupsTest, SplitRefusesWhatIsNoGroup) {
  run_ranks(3, [](RankOfTest& self) {
    for (const std::vector<int>& ranks :
         {std::vector{0, 1, 3}, std::vector{0, 1, 2, 2}, std::vector{-1, self.rank},
          std::vector{(self.rank + 1) % 3}, std::vector<int>{}}) {
      const ErrorDescription error =
          error_of([&] { static_cast<void>(self.communicator->split(ranks)); });
      EXPECT_EQ(error.kind, ErrorKind::kInvalidUsage) << error.message;
    }
    expect_sum(*self.communicator, 0);
  });
}

TEST(NativeGroupsTest, FiftyAtOnce) {
  run_ranks(3, [](RankOfTest& self) {
    constexpr std::size_t kGroups = 50;
    std::vector<CommunicatorPtr> groups;
    std::vector<std::vector<int>> values(kGroups, std::vector<int>(700, self.rank));
    for (std::size_t i = 0; i < kGroups; ++i) {
      groups.push_back(self.communicator->split({0, 1, 2}));
    }
    // In another order on every rank: groups do not wait for each other.
    std::vector<WorkPtr> works(kGroups);
    for (std::size_t turn = 0; turn < kGroups; ++turn) {
      const std::size_t i = (turn * 7 + static_cast<std::size_t>(self.rank) * 19) % kGroups;
      works[i] = groups[i]->submit(all_reduce(values[i]));
    }
    for (std::size_t i = 0; i < kGroups; ++i) {
      works[i]->wait();
      EXPECT_EQ(values[i], std::vector<int>(700, 3));
    }
  });
}

TEST(NativeGroupsTest, StuckGroupBlocksNoOther) {
  run_ranks(2, [](RankOfTest& self) {
    const CommunicatorPtr stuck = self.communicator->split({0, 1});
    std::vector<int> values(40'000, 1);
    WorkPtr work;
    if (self.rank == 0) {
      work = stuck->submit(all_reduce(values));
    }
    for (int i = 0; i < 200; ++i) {
      expect_sum(*self.communicator, i);
    }
    if (self.rank == 0) {
      EXPECT_FALSE(work->is_completed());
    } else {
      work = stuck->submit(all_reduce(values));
    }
    work->wait();
    EXPECT_EQ(values, std::vector<int>(40'000, 2));
  });
}

TEST(NativeGroupsTest, ThreadsOnDifferentGroups) {
  run_ranks(3, [](RankOfTest& self) {
    constexpr int kThreads = 4;
    std::vector<CommunicatorPtr> groups;
    for (int i = 0; i < kThreads; ++i) {
      groups.push_back(self.communicator->split({0, 1, 2}));
    }
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        for (int turn = 0; turn < 100; ++turn) {
          expect_sum(*groups[static_cast<std::size_t>(i)], turn * i);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  });
}

// Threads that submit to one group see to the order themselves: here by a lock, and by calling the
// same thing.
TEST(NativeGroupsTest, ThreadsOnOneGroup) {
  run_ranks(2, [](RankOfTest& self) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int turn = 0; turn < 50; ++turn) {
          std::vector<int> values(64, 1);
          if (turn % 2 == 0) {
            self.communicator->run(all_reduce(values));
          } else {
            self.communicator->submit(all_reduce(values))->wait();
          }
          EXPECT_EQ(values, std::vector<int>(64, 2));
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  });
}

TEST(NativeGroupsTest, DestroyedWhileOthersGoOn) {
  run_ranks(3, [](RankOfTest& self) {
    for (int turn = 0; turn < 20; ++turn) {
      CommunicatorPtr passing = self.communicator->split({0, 1, 2});
      std::vector<int> values(5000, 1);
      const WorkPtr work = self.communicator->submit(all_reduce(values));
      expect_sum(*passing, turn);
      passing.reset();
      work->wait();
      EXPECT_EQ(values, std::vector<int>(5000, 3));
    }
  });
}

TEST(NativeGroupsTest, DestroyedWithWorkUnderWay) {
  run_ranks(2, [](RankOfTest& self) {
    CommunicatorPtr passing = self.communicator->split({0, 1});
    std::vector<int> values(40'000, 1);  // takes both ranks to the end
    std::vector<int> go(1, 1);
    if (self.rank == 0) {
      const WorkPtr work = passing->submit(all_reduce(values));
      passing.reset();
      EXPECT_EQ(error_of([&] { work->wait(); }).kind, ErrorKind::kAborted);
      EXPECT_EQ(values, std::vector<int>(40'000, 1));
      self.communicator->run(send_to(1, 0, go));
    } else {
      self.communicator->run(receive_from(0, 0, go));
      EXPECT_EQ(error_of([&] { passing->run(all_reduce(values)); }).kind, ErrorKind::kPeerLost);
    }
    expect_sum(*self.communicator, 3);
  });
}

TEST(NativeGroupsTest, SubgroupsReportTheRankThatTheyWaitFor) {
  run_ranks(2, [](RankOfTest& self) {
    const CommunicatorPtr pair = self.communicator->split({1, 0});
    if (self.rank == 0) {
      // Rank 1 of the pair. It sits in the other group meanwhile, and its journal says so.
      self.communicator->run(barrier());
    } else {
      std::vector<int> values(5, 1);
      const WorkPtr work = pair->submit(all_reduce(values));
      // Rank 0 may not have come to its barrier yet.
      std::string message;
      for (int turn = 0; turn < 100 && !contains(message, "is in barrier #1"); ++turn) {
        message = error_of([&] { work->wait(Deadline::in(milliseconds(20))); }).message;
      }
      EXPECT_PRED2(contains, message, "rank 1 (pid ");
      EXPECT_PRED2(contains, message, "never entered all_reduce #1");
      EXPECT_PRED2(contains, message, "is in barrier #1 of another group");
      self.communicator->run(barrier());
      pair->shutdown();
      // By this rank, or by the other one, which may have gone first.
      const ErrorKind kind = error_of([&] { work->wait(); }).kind;
      EXPECT_TRUE(kind == ErrorKind::kAborted || kind == ErrorKind::kPeerLost);
    }
  });
}

// -- waiting costs nothing ------------------------------------------------------------------------

TEST(NativeGroupsTest, ARankIsKnownByWhatItDidLastInWhateverGroup) {
  const auto errors = collect_errors(2, [](RankOfTest& self) {
    self.communicator->run(barrier());
    const CommunicatorPtr pair = self.communicator->split({0, 1});
    if (self.rank == 1) {
      const Operation alone = with_timeout(barrier(), milliseconds(100));
      EXPECT_EQ(error_of([&] { pair->run(alone); }).kind, ErrorKind::kTimeout);
    }
    while (self.rank == 1 ? !self.communicator->failure() : !pair->failure()) {
      std::this_thread::sleep_for(milliseconds(5));
    }
    self.communicator->run(with_timeout(barrier(), milliseconds(300)));
  });
  for (const auto& error : errors) {
    ASSERT_NE(error, nullptr);
    EXPECT_PRED2(contains, describe(error).message,
                 "never entered barrier #2; it failed in barrier #1 of another group ");
    EXPECT_PRED2(contains, describe(error).message, " ago and is in no operation");
  }
}

double processor_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

class NativeIdleTest : public ::testing::TestWithParam<int> {};

TEST_P(NativeIdleTest, WaitingRankBurnsNoCore) {
  run_ranks(GetParam(), [](RankOfTest& self) {
    constexpr milliseconds kWait{1000};
    self.communicator->run(barrier());
    if (self.rank == 0) {
      std::this_thread::sleep_for(kWait);
    }
    const double before = processor_seconds();
    self.communicator->run(barrier());
    EXPECT_LT(processor_seconds() - before, 0.05 * kSlowdown) << "rank " << self.rank;
    // The same for a work handle, and with a second thread that waits for it.
    if (self.rank == 0) {
      std::this_thread::sleep_for(kWait);
    }
    const WorkPtr work = self.communicator->submit(barrier());
    std::array<double, 2> used{};
    const auto wait = [&work](double& seconds) {
      const double start = processor_seconds();
      work->wait();
      seconds = processor_seconds() - start;
    };
    std::thread second([&] { wait(used[1]); });
    wait(used[0]);
    second.join();
    EXPECT_LT(used[0], 0.05 * kSlowdown) << "rank " << self.rank;
    EXPECT_LT(used[1], 0.05 * kSlowdown) << "rank " << self.rank;
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, NativeIdleTest, ::testing::Values(2, 6));

}  // namespace
}  // namespace pydist::testing
