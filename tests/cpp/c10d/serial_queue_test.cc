#include "c10d/serial_queue.h"

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "base/error.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(SerialQueueTest, JobsRunInOrderAndStopWaitsForThem) {
  std::vector<int> order;
  SerialQueue queue("test-queue");
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(queue.post([&order, i] { order.push_back(i); }));
  }
  queue.stop();
  ASSERT_EQ(order.size(), 100U);
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
  }
  EXPECT_FALSE(queue.post([] {}));
}

TEST(SerialQueueTest, AJobMayStopItsQueue) {
  SerialQueue queue("test-queue");
  std::atomic<int> later{0};
  ASSERT_TRUE(queue.post([&] {
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(queue.post([&] { ++later; }));
    }
    queue.stop();
  }));
  while (queue.post([] {})) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  queue.stop();  // nobody can join the thread any more, but its jobs are waited for
  EXPECT_EQ(later, 3);
}

TEST(SerialQueueTest, AQueueStoppedByItsJobIsDestroyedElsewhere) {
  for (int turn = 0; turn < 50; ++turn) {
    std::atomic<int> runs{0};
    std::promise<void> has_stopped;
    {
      SerialQueue queue("test-queue");
      ASSERT_TRUE(queue.post([&] {
        EXPECT_TRUE(queue.post([&] {
          std::this_thread::sleep_for(milliseconds(1));
          ++runs;
        }));
        queue.stop();
        has_stopped.set_value();
      }));
      has_stopped.get_future().wait();
    }
    EXPECT_EQ(runs, 1) << "the destructor did not wait for what was posted";
  }
}

TEST(SerialQueueTest, TheLastReferenceMayGoOnItsOwnThread) {
  for (int turn = 0; turn < 50; ++turn) {
    std::promise<void> done;
    auto queue = std::make_shared<SerialQueue>("test-queue");
    SerialQueue& posted_to = *queue;
    std::promise<void> is_alone;
    ASSERT_TRUE(posted_to.post([queue, &is_alone] { is_alone.get_future().wait(); }));
    ASSERT_TRUE(posted_to.post([&done] { done.set_value(); }));
    queue = nullptr;
    is_alone.set_value();  // the first job, which has the queue, ends; the second one runs after it
    EXPECT_EQ(done.get_future().wait_for(seconds(20)), std::future_status::ready);
  }
}

TEST(SerialQueueTest, WhatIsPostedWithoutAThreadIsNotKept) {
  SerialQueue queue("test-queue");
  const auto held = std::make_shared<std::atomic<int>>(0);
  {
    const NoThreads no_threads;
    EXPECT_THROW(static_cast<void>(queue.post([held] { ++*held; })), TransportError);
    EXPECT_EQ(held.use_count(), 1);
    EXPECT_TRUE(queue.is_idle());
  }
  std::atomic<int> runs{0};
  ASSERT_TRUE(queue.post([&] { ++runs; }));
  queue.stop();
  EXPECT_EQ(runs, 1);
  EXPECT_EQ(*held, 0);
}

TEST(SerialQueueTest, AnIdleQueueRunsAJobAtItsCallers) {
  SerialQueue queue("test-queue");
  std::vector<int> order;
  EXPECT_TRUE(queue.run_if_idle([&, caller = std::this_thread::get_id()] {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    EXPECT_TRUE(queue.runs_here());
    EXPECT_FALSE(queue.is_idle());
    EXPECT_FALSE(queue.run_if_idle([] {}));
    EXPECT_TRUE(queue.post([&] {
      order.push_back(2);
      EXPECT_FALSE(queue.runs_here());
    }));
    std::this_thread::sleep_for(milliseconds(20));
    order.push_back(1);
  }));
  EXPECT_FALSE(queue.runs_here());
  queue.stop();
  EXPECT_EQ(order, (std::vector{1, 2}));
  EXPECT_FALSE(queue.run_if_idle([] {}));
}

TEST(SerialQueueTest, ABusyQueueRunsNothingAtItsCallers) {
  SerialQueue queue("test-queue");
  std::promise<void> may_end;
  ASSERT_TRUE(queue.post([&] { may_end.get_future().wait(); }));
  EXPECT_FALSE(queue.run_if_idle([] {}));
  may_end.set_value();
  queue.stop();
}

TEST(SerialQueueTest, StopWaitsForAJobAtItsCallers) {
  SerialQueue queue("test-queue");
  std::promise<void> has_begun;
  std::atomic<bool> has_ended{false};
  std::thread caller([&] {
    EXPECT_TRUE(queue.run_if_idle([&] {
      has_begun.set_value();
      std::this_thread::sleep_for(milliseconds(20));
      has_ended = true;
    }));
  });
  has_begun.get_future().wait();
  queue.stop();
  EXPECT_TRUE(has_ended);
  caller.join();
}

TEST(SerialQueueTest, AJobAtItsCallersMayStopTheQueue) {
  SerialQueue queue("test-queue");
  std::atomic<int> later{0};
  EXPECT_TRUE(queue.run_if_idle([&] {
    EXPECT_TRUE(queue.post([&] { ++later; }));
    EXPECT_FALSE(queue.stop());
    EXPECT_EQ(later, 0);
  }));
  EXPECT_TRUE(queue.stop());
  EXPECT_EQ(later, 1);
}

// As a signal handler does that leaves the end to another thread.
TEST(SerialQueueTest, AJobAtItsCallersMayWaitForAStopWhileItIsInOtherCode) {
  SerialQueue queue("test-queue");
  std::atomic<int> later{0};
  EXPECT_TRUE(queue.run_if_idle([&] {
    EXPECT_TRUE(queue.post([&] { ++later; }));
    queue.leave([&] { std::thread([&] { EXPECT_FALSE(queue.stop()); }).join(); });
    EXPECT_THROW(queue.leave([] { throw Timeout("what the other code throws"); }), Timeout);
    EXPECT_EQ(later, 0);
  }));
  EXPECT_TRUE(queue.stop());
  EXPECT_EQ(later, 1);
}

// The child has the lock and the jobs of the queue as they were, and nobody who runs them.
TEST(SerialQueueTest, AForkedChildPostsNothingAndWaitsForNobody) {
  SerialQueue queue("test-queue");
  std::promise<void> may_end;
  ASSERT_TRUE(queue.post([&may_end] { may_end.get_future().wait(); }));
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    const bool is_taken = queue.post([] {});
    queue.stop();
    ::_exit(is_taken || !queue.is_idle() ? 1 : 0);
  }
  may_end.set_value();
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  queue.stop();
}

}  // namespace
}  // namespace pydist::testing
