#include "bucketing/arrival_order.h"

#include <gtest/gtest.h>

namespace pydist {
namespace {

using Order = std::vector<std::size_t>;

void round(ArrivalOrder& order, const Order& arrived, const std::vector<bool>& used) {
  for (const std::size_t slot : arrived) {
    order.note(slot);
  }
  order.close_round(used);
}

TEST(ArrivalOrder, ExpectsTheReverseOfRegistrationAtFirst) {
  ArrivalOrder order(3);
  EXPECT_EQ(order.expected().order, (Order{2, 1, 0}));
  EXPECT_EQ(order.expected().regular, 3U);
  order.add_slot();
  EXPECT_EQ(order.expected().order, (Order{3, 2, 1, 0}));
}

TEST(ArrivalOrder, FollowsWhatArrived) {
  ArrivalOrder order(3);
  round(order, {0, 2, 1}, {true, true, true});
  EXPECT_EQ(order.expected().order, (Order{0, 2, 1}));
  // What did not arrive stays where it was, behind what did.
  round(order, {1}, {true, true, true});
  EXPECT_EQ(order.expected().order, (Order{1, 0, 2}));
}

TEST(ArrivalOrder, WantsAPlanWhenABucketWaitsForAnother) {
  ArrivalOrder order(4);
  for (const std::size_t slot : {3, 2, 0, 1}) {
    order.note(slot);
  }
  EXPECT_FALSE(order.wants_plan({{3, 2}, {1, 0}}));
  EXPECT_TRUE(order.wants_plan({{3, 2}, {1}, {0}}));
  EXPECT_FALSE(order.wants_plan({{3, 2}, {0}, {1}}));
}

TEST(ArrivalOrder, PutsWhatIsNotAlwaysUsedLast) {
  ArrivalOrder order(3);
  round(order, {2, 1, 0}, {true, false, true});
  const ArrivalOrder::Expected expected = order.expected();
  EXPECT_EQ(expected.order, (Order{2, 0, 1}));
  EXPECT_EQ(expected.regular, 2U);
  for (const std::size_t slot : {2, 1, 0}) {
    order.note(slot);
  }
  EXPECT_TRUE(order.wants_plan({{2, 1, 0}})) << "it shares a bucket with others";
  EXPECT_TRUE(order.wants_plan({{2}, {1}, {0}})) << "it stands before others";
  EXPECT_FALSE(order.wants_plan({{2}, {0}, {1}})) << "whenever it arrives";
}

TEST(ArrivalOrder, TrustsAParameterAgainAfterAWhile) {
  ArrivalOrder order(2);
  round(order, {1}, {false, true});
  int rounds = 1;
  while (order.expected().regular == 1) {
    round(order, {1, 0}, {true, true});
    ASSERT_LT(++rounds, 1000);
  }
  EXPECT_GT(rounds, 32);
}

TEST(ArrivalOrder, PlansEverMoreRarely) {
  // The order changes in every round, so a plan is always wanted.
  ArrivalOrder order(2);
  BucketPlan plan{{1}, {0}};
  std::vector<int> planned_after;
  for (int number = 1; number <= 100; ++number) {
    const bool is_odd = number % 2 != 0;
    order.note(is_odd ? 0 : 1);
    order.note(is_odd ? 1 : 0);
    plan = is_odd ? BucketPlan{{1}, {0}} : BucketPlan{{0}, {1}};
    if (order.wants_plan(plan)) {
      order.note_plan();
      planned_after.push_back(number);
    }
    order.close_round({true, true});
  }
  EXPECT_EQ(planned_after, (std::vector<int>{1, 2, 4, 8, 16, 32, 64}));
}

TEST(ArrivalOrder, ForgetsARoundThatIsWorthNothing) {
  ArrivalOrder order(2);
  order.note(0);
  order.drop_round();
  EXPECT_EQ(order.expected().order, (Order{1, 0}));
}

}  // namespace
}  // namespace pydist
