#include "communicator/nccl/communicator_life.h"

#include <gtest/gtest.h>

#include <initializer_list>

#include "base/error.h"

namespace pydist {
namespace {

using enum LifeStep;

void take(CommunicatorLife& life, std::initializer_list<LifeStep> steps) {
  for (const LifeStep each : steps) {
    life.step_to(each);
    EXPECT_EQ(life.now(), each);
  }
}

TEST(CommunicatorLifeTest, EveryWayThatIsDrawnCanBeGone) {
  for (const auto way : std::initializer_list<std::initializer_list<LifeStep>>{
           {kOpen, kEnding, kFinalizing, kEnded},
           {kOpen, kEnding, kFinalizing, kAborting, kEnded},
           {kOpen, kEnding, kAborting, kEnded},
           {kEnding, kAborting, kEnded},
           {kEnding, kEnded}}) {
    CommunicatorLife life;
    EXPECT_FALSE(life.has_joined());
    EXPECT_FALSE(life.has_begun_to_end());
    take(life, way);
    EXPECT_TRUE(life.has_begun_to_end());
  }
}

TEST(CommunicatorLifeTest, NothingIsOpenAgainAndNothingEndsTwice) {
  for (int step = 0; step < kLifeStepCount; ++step) {
    const auto each = static_cast<LifeStep>(step);
    EXPECT_FALSE(CommunicatorLife::is_legal(each, each));
    EXPECT_FALSE(CommunicatorLife::is_legal(kEnded, each));
    EXPECT_FALSE(CommunicatorLife::is_legal(each, kJoining));
    EXPECT_EQ(CommunicatorLife::is_legal(each, kOpen), each == kJoining);
  }
}

TEST(CommunicatorLifeTest, AnIllegalStepThrowsAndIsNotTaken) {
  CommunicatorLife life;
  take(life, {kOpen});
  EXPECT_THROW(life.step_to(kAborting), Error);
  EXPECT_THROW(life.step_to(kEnded), Error);
  EXPECT_EQ(life.now(), kOpen);
  take(life, {kEnding, kFinalizing});
  EXPECT_THROW(life.step_to(kEnding), Error);
  EXPECT_THROW(life.step_to(kOpen), Error);
  EXPECT_EQ(life.now(), kFinalizing);
}

}  // namespace
}  // namespace pydist
