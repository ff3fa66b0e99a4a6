#include "communicator/nccl/late_ends.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "base/error.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;

std::atomic<bool> is_ending{false};
std::atomic<bool> may_end{false};

void wait_for(const std::atomic<bool>& flag) {
  while (!flag) {
    std::this_thread::sleep_for(milliseconds(1));
  }
}

struct EndsLate {
  ~EndsLate() {
    is_ending = true;
    wait_for(may_end);
  }
};

// The caller may hold what a thread needs to end: CUDA's locks.
TEST(LateEnds, StartWithoutWaitingForThoseThatAreOver) {
  LateEnds ends;
  const auto first = [] { static thread_local const EndsLate late; };
  ends.start("first", first, Deadline::never(), "");
  wait_for(is_ending);
  std::atomic<bool> has_run{false};
  ends.start("second", [&] { has_run = true; }, Deadline::never(), "");
  wait_for(has_run);  // while the end of the first thread still takes its time
  may_end = true;
  ends.join();
  EXPECT_TRUE(has_run);
}

TEST(LateEnds, LoseNothingWhereNoThreadIsToBeHad) {
  LateEnds ends;
  std::atomic<int> runs{0};
  const auto run = [&] { ++runs; };
  ends.start("first", run, Deadline::never(), "");
  while (runs == 0) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  {
    const NoThreads no_threads;
    const auto held = std::make_shared<int>();
    EXPECT_THROW(ends.start("second", [held] {}, Deadline::never(), ""), TransportError);
    EXPECT_EQ(held.use_count(), 1);
    ends.join();
  }
  ends.start("third", run, Deadline::never(), "");
  ends.join();
  EXPECT_EQ(runs, 2);
}

}  // namespace
}  // namespace pydist::testing
