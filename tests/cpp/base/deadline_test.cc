#include "base/deadline.h"

#include <gtest/gtest.h>

#include <thread>

namespace pydist {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

TEST(DeadlineTest, NeverNeverPasses) {
  const Deadline never = Deadline::never();
  EXPECT_TRUE(never.is_never());
  EXPECT_FALSE(never.has_passed());
  EXPECT_EQ(never.remaining(milliseconds(7)), milliseconds(7));
  EXPECT_EQ(never.remaining(nanoseconds::max()), nanoseconds::max());
}

TEST(DeadlineTest, DurationsTooLongForTheClockMeanNever) {
  EXPECT_TRUE(Deadline::in(nanoseconds::max()).is_never());
  EXPECT_TRUE(
      Deadline::in(nanoseconds::max() - Deadline::Clock::now().time_since_epoch() / 2).is_never());
  EXPECT_FALSE(Deadline::in(hours(24 * 365 * 100)).is_never());
}

TEST(DeadlineTest, PassesWhenItsTimeHasCome) {
  const Deadline deadline = Deadline::in(milliseconds(20));
  EXPECT_FALSE(deadline.has_passed());
  EXPECT_GT(deadline.remaining(hours(1)), nanoseconds(0));
  EXPECT_LE(deadline.remaining(hours(1)), milliseconds(20));
  std::this_thread::sleep_for(milliseconds(25));
  EXPECT_TRUE(deadline.has_passed());
  EXPECT_EQ(deadline.remaining(hours(1)), nanoseconds(0));
}

TEST(DeadlineTest, NoTimeOrLessHasPassedAtOnce) {
  EXPECT_TRUE(Deadline::in(nanoseconds(0)).has_passed());
  EXPECT_TRUE(Deadline::in(hours(-1)).has_passed());
  EXPECT_EQ(Deadline::in(hours(-1)).remaining(milliseconds(5)), nanoseconds(0));
}

TEST(DeadlineTest, RemainingIsCapped) {
  EXPECT_EQ(Deadline::in(hours(1)).remaining(milliseconds(3)), milliseconds(3));
  EXPECT_EQ(Deadline::in(hours(1)).remaining(nanoseconds(0)), nanoseconds(0));
}

TEST(DeadlineTest, TheEarlierOneWins) {
  const Deadline soon = Deadline::in(milliseconds(1));
  const Deadline late = Deadline::in(hours(1));
  EXPECT_EQ(soon.earlier_of(late).when(), soon.when());
  EXPECT_EQ(late.earlier_of(soon).when(), soon.when());
  EXPECT_EQ(late.earlier_of(Deadline::never()).when(), late.when());
  EXPECT_TRUE(Deadline::never().earlier_of(Deadline::never()).is_never());
}

}  // namespace
}  // namespace pydist
