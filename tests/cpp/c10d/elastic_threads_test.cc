#include "c10d/elastic_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <thread>

#include "base/error.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

using std::chrono::seconds;

// Keeps the threads of other tests from taking the jobs of this one: idle ones live on for a while.
std::unique_ptr<ElasticThreads> fresh_threads() { return std::make_unique<ElasticThreads>(); }

TEST(ElasticThreadsTest, JobsThatWaitForEachOtherAllRun) {
  const auto threads = fresh_threads();
  std::promise<void> second_runs;
  std::promise<void> first_is_done;
  threads->post([&] {
    second_runs.get_future().wait();
    first_is_done.set_value();
  });
  threads->post([&] { second_runs.set_value(); });
  EXPECT_EQ(first_is_done.get_future().wait_for(seconds(20)), std::future_status::ready);
  threads->close(seconds(10));
}

TEST(ElasticThreadsTest, APostWithoutAThreadThrowsAndLeavesNothingBehind) {
  const auto threads = fresh_threads();
  const auto held = std::make_shared<std::atomic<int>>(0);
  {
    const NoThreads no_threads;
    const ErrorDescription error = error_of([&] { threads->post([held] { ++*held; }); });
    EXPECT_EQ(error.kind, ErrorKind::kTransport);
    EXPECT_PRED2(contains, error.message, "no more threads");
    EXPECT_EQ(held.use_count(), 1);
  }
  std::promise<void> done;
  threads->post([&] { done.set_value(); });
  EXPECT_EQ(done.get_future().wait_for(seconds(20)), std::future_status::ready);
  threads->close(seconds(10));
  EXPECT_EQ(held->load(), 0) << "what was refused has run later";
}

TEST(ElasticThreadsTest, ACallbackWithoutAThreadRunsItsJobItself) {
  const auto threads = fresh_threads();
  std::thread::id ran_on;
  {
    const NoThreads no_threads;
    threads->post_or_run([&] { ran_on = std::this_thread::get_id(); });
  }
  EXPECT_EQ(ran_on, std::this_thread::get_id());
  threads->close(seconds(10));
}

TEST(ElasticThreadsTest, AnIdleThreadIsUsedWhereNoOtherIsToBeHad) {
  const auto threads = fresh_threads();
  const auto run_one = [&] {
    auto done = std::make_shared<std::promise<std::thread::id>>();
    auto ran_on = done->get_future();
    threads->post([done] { done->set_value(std::this_thread::get_id()); });
    return ran_on.get();
  };
  const std::thread::id first = run_one();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // it is idle by now
  const NoThreads no_threads;
  EXPECT_EQ(run_one(), first);
  threads->close(seconds(10));
}

}  // namespace
}  // namespace pydist::testing
