#include "communicator/work.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"

namespace pydist {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(WorkTest, FinishesOnce) {
  Work work;
  EXPECT_FALSE(work.is_completed());
  EXPECT_EQ(work.exception(), nullptr);
  work.finish(nullptr, 3);
  EXPECT_TRUE(work.is_completed());
  EXPECT_EQ(work.source_rank(), 3);
  work.finish(make_error(ErrorKind::kTimeout, "too late"), 5);
  EXPECT_EQ(work.exception(), nullptr);
  EXPECT_EQ(work.source_rank(), 3);
  EXPECT_NO_THROW(work.wait());
}

TEST(WorkTest, AnErrorComesOutOfEveryWait) {
  Work work;
  work.finish(make_error(ErrorKind::kPeerLost, "rank 3 died"));
  EXPECT_TRUE(work.is_completed());
  EXPECT_THROW(work.wait(), PeerLost);
  EXPECT_THROW(work.wait(Deadline::in(seconds(0))), PeerLost);
  EXPECT_EQ(describe(work.exception()).message, "rank 3 died");
}

TEST(WorkTest, AWaitThatGivesUpMayBeRepeated) {
  Work work;
  EXPECT_THROW(work.wait(Deadline::in(milliseconds(20))), Timeout);
  EXPECT_THROW(work.wait(Deadline::in(milliseconds(-20))), Timeout);
  EXPECT_FALSE(work.is_completed());
  std::thread finisher([&] {
    std::this_thread::sleep_for(milliseconds(30));
    work.finish();
  });
  EXPECT_NO_THROW(work.wait(Deadline::in(seconds(30))));
  finisher.join();
}

TEST(WorkTest, ManyWaitersAllWake) {
  Work work;
  std::atomic<int> awake{0};
  std::vector<std::thread> waiters;
  for (int i = 0; i < 4; ++i) {
    waiters.emplace_back([&, i] {
      EXPECT_THROW(work.wait(i % 2 == 0 ? Deadline::never() : Deadline::in(seconds(50))), Aborted);
      ++awake;
    });
  }
  std::this_thread::sleep_for(milliseconds(20));
  work.finish(make_error(ErrorKind::kAborted, "enough"));
  for (std::thread& waiter : waiters) {
    waiter.join();
  }
  EXPECT_EQ(awake.load(), 4);
}

TEST(WorkTest, CallbacksRunOnceBeforeOrAfter) {
  Work work;
  int calls = 0;
  work.on_completion([&](const Work::Outcome&) {
    EXPECT_TRUE(work.is_completed());
    ++calls;
    // A callback may look at the work, and hang on another one.
    work.on_completion([&](const Work::Outcome&) { ++calls; });
  });
  EXPECT_EQ(calls, 0);
  work.finish(make_error(ErrorKind::kTimeout, ""));
  EXPECT_EQ(calls, 2);
  work.finish();
  EXPECT_EQ(calls, 2);
  work.on_completion([&](const Work::Outcome&) { ++calls; });
  EXPECT_EQ(calls, 3);
}

TEST(WorkTest, CallbacksLearnTheOutcomeWithoutTheWork) {
  auto work = std::make_unique<Work>();
  Work::Outcome outcome;
  work->on_completion([&](const Work::Outcome& told) { outcome = told; });
  const Work::Notice notice = work->settle(make_error(ErrorKind::kAborted, "enough"), 3);
  work.reset();
  notice.deliver();
  EXPECT_EQ(outcome.source_rank, 3);
  EXPECT_THROW(std::rethrow_exception(outcome.error), Aborted);
}

TEST(WorkTest, NoCallbackIsLostInARace) {
  for (int round = 0; round < 300; ++round) {
    Work work;
    std::atomic<int> calls{0};
    std::thread adding([&] {
      for (int i = 0; i < 10; ++i) {
        work.on_completion([&](const Work::Outcome&) { ++calls; });
      }
    });
    std::thread finishing([&] { work.finish(); });
    std::thread failing([&] { work.finish(make_error(ErrorKind::kAborted, "")); });
    adding.join();
    finishing.join();
    failing.join();
    EXPECT_EQ(calls.load(), 10);
    EXPECT_TRUE(work.is_completed());
  }
}

class DiagnosedWork : public Work {
 protected:
  std::string diagnosis() override { return "rank 2 never came"; }
};

TEST(WorkTest, ATimeoutSaysWhoIsWaitedFor) {
  DiagnosedWork work;
  try {
    work.wait(Deadline::in(milliseconds(1)));
    FAIL() << "the wait came to an end";
  } catch (const Timeout& error) {
    EXPECT_NE(std::string(error.what()).find("rank 2 never came"), std::string::npos);
  }
}

TEST(WorkTest, ACompletedWorkIs) {
  EXPECT_TRUE(completed_work()->is_completed());
  EXPECT_NO_THROW(completed_work()->wait(Deadline::in(seconds(0))));
}

std::vector<WorkPtr> several(std::size_t count) {
  std::vector<WorkPtr> parts;
  for (std::size_t i = 0; i < count; ++i) {
    parts.push_back(std::make_shared<Work>());
  }
  return parts;
}

TEST(CombinedWorkTest, NothingIsDoneAndOneIsItself) {
  EXPECT_TRUE(combine({})->is_completed());
  const WorkPtr one = std::make_shared<Work>();
  EXPECT_EQ(combine({one}), one);
}

TEST(CombinedWorkTest, CompletesWithTheLastPart) {
  const auto parts = several(3);
  const WorkPtr all = combine(parts);
  parts[2]->finish();
  parts[0]->finish();
  EXPECT_FALSE(all->is_completed());
  EXPECT_THROW(all->wait(Deadline::in(milliseconds(5))), Timeout);
  parts[1]->finish();
  EXPECT_TRUE(all->is_completed());
  EXPECT_NO_THROW(all->wait());
}

TEST(CombinedWorkTest, FailsWithTheFirstErrorOnceAllAreThrough) {
  const auto parts = several(3);
  const WorkPtr all = combine(parts);
  parts[2]->finish(make_error(ErrorKind::kAborted, "last"));
  parts[1]->finish(make_error(ErrorKind::kMismatch, "middle"));
  EXPECT_FALSE(all->is_completed()) << "the buffers of part 0 are still in use";
  EXPECT_THROW(all->wait(Deadline::in(milliseconds(5))), Timeout);
  parts[0]->finish();
  EXPECT_THROW(all->wait(), Mismatch);
}

TEST(CombinedWorkTest, ForeignErrorsDoNotEndTheWaitEarly) {
  const auto parts = several(2);
  const WorkPtr all = combine(parts);
  parts[0]->finish(std::make_exception_ptr(std::runtime_error("not one of ours")));
  // Part 1 still uses its buffers.
  EXPECT_THROW(all->wait(Deadline::in(milliseconds(5))), Timeout);
  parts[1]->finish();
  try {
    all->wait();
    FAIL() << "the error is lost";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "not one of ours");
  }
}

TEST(CombinedWorkTest, PartsThatAreDoneAlready) {
  EXPECT_TRUE(combine({completed_work(), completed_work()})->is_completed());
}

TEST(CombinedWorkTest, PartsFinishOnSeveralThreads) {
  for (int round = 0; round < 100; ++round) {
    const auto parts = several(4);
    const WorkPtr all = combine(parts);
    std::vector<std::thread> finishers;
    for (const WorkPtr& part : parts) {
      finishers.emplace_back([part] { part->finish(); });
    }
    EXPECT_NO_THROW(all->wait(Deadline::in(seconds(30))));
    EXPECT_TRUE(all->is_completed());
    for (std::thread& finisher : finishers) {
      finisher.join();
    }
  }
}

}  // namespace
}  // namespace pydist
