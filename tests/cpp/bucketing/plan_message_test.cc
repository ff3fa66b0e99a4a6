#include "bucketing/plan_message.h"

#include <gtest/gtest.h>

#include <array>

namespace pydist {
namespace {

TEST(BucketPlan, SurvivesItsMessage) {
  for (const BucketPlan& plan :
       {BucketPlan{}, BucketPlan{{0}}, BucketPlan{{2, 0}, {1}}, BucketPlan{{0}, {1}, {2}}}) {
    const std::vector<std::int64_t> words = encode(plan, 3);
    EXPECT_EQ(words.size(), encoded_words(3));
    EXPECT_EQ(decode(words), plan);
  }
}

TEST(BucketPlan, SaysWhatIsWrong) {
  const std::array<std::size_t, 4> blocks{0, 0, 1, kNoBlock};
  EXPECT_EQ(why_invalid({{1, 0}, {2}}, blocks), "");
  EXPECT_NE(why_invalid({{1, 0}}, blocks).find("2 is missing"), std::string::npos);
  EXPECT_NE(why_invalid({{1, 0, 1}, {2}}, blocks).find("1 is there twice"), std::string::npos);
  EXPECT_NE(why_invalid({{1, 0}, {2}, {0}}, blocks).find("twice"), std::string::npos);
  EXPECT_NE(why_invalid({{1, 0, 2}}, blocks).find("differ in dtype"), std::string::npos);
  EXPECT_NE(why_invalid({{1, 0}, {2}, {3}}, blocks).find("sparse"), std::string::npos);
  EXPECT_NE(why_invalid({{1, 0}, {2}, {4}}, blocks).find("does not exist"), std::string::npos);
  EXPECT_NE(why_invalid({{1, 0}, {2}, {}}, blocks).find("empty"), std::string::npos);
}

}  // namespace
}  // namespace pydist
