#include "health/failure_record.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace pydist {
namespace {

TEST(FailureRecordTest, TheFirstErrorStays) {
  FailureRecord record;
  EXPECT_FALSE(record.is_set());
  EXPECT_EQ(record.error(), nullptr);
  EXPECT_TRUE(record.set(ErrorKind::kPeerLost, "rank 1 has died", 0));
  EXPECT_FALSE(record.set(ErrorKind::kTimeout, "timed out", 2));
  EXPECT_TRUE(record.is_set());
  const auto [kind, message, blame] = describe(record.error());
  EXPECT_EQ(kind, ErrorKind::kPeerLost);
  EXPECT_EQ(message, "rank 1 has died");
  EXPECT_NE(record.error(), record.error()) << "an exception must not be shared by threads";
}

TEST(FailureRecordTest, WhoIsToBlameTravelsWithTheError) {
  FailureRecord record;
  const Blame blame{.ranks = {1, 3},
                    .host = "a",
                    .pid = 4711,
                    .operation = "all_reduce #812 of group 'world'",
                    .cause = "has died"};
  EXPECT_TRUE(record.set(ErrorKind::kPeerLost, "ranks 1 and 3 have died", 2, blame));
  EXPECT_EQ(describe(record.error()).blame, blame);
  EXPECT_EQ(describe(make_error(ErrorKind::kError, "")).blame, Blame{});
}

constexpr std::size_t kEllipsisBytes = 3;

TEST(FailureRecordTest, ALongMessageIsCutAndSaysSo) {
  FailureRecord record;
  EXPECT_TRUE(record.set(ErrorKind::kMismatch, std::string(10'000, 'x'), 0));
  const std::string message = describe(record.error()).message;
  EXPECT_GT(message.size(), 2500u);
  EXPECT_EQ(message, std::string(message.size() - kEllipsisBytes, 'x') + "…");
}

TEST(FailureRecordTest, AZeroInATextEndsItNot) {
  using std::string_literals::operator""s;
  FailureRecord record;
  EXPECT_TRUE(record.set(ErrorKind::kAborted, "loss\0nan"s, 0, {.cause = "\0x"s}));
  EXPECT_EQ(describe(record.error()).message, "loss nan");
  EXPECT_EQ(describe(record.error()).blame.cause, " x");
}

TEST(FailureRecordTest, ATextThatJustFitsIsWhole) {
  const auto kept_of = [](const std::string& cause) {
    FailureRecord record;
    EXPECT_TRUE(record.set(ErrorKind::kAborted, "", 0, {.cause = cause}));
    return describe(record.error()).blame.cause;
  };
  const std::string longest(511, 'x');
  EXPECT_EQ(kept_of(longest), longest);
  std::string cut(511 - kEllipsisBytes, 'x');
  cut += "…";
  EXPECT_EQ(kept_of(std::string(512, 'x')), cut);
}

TEST(FailureRecordTest, ATextIsCutBetweenTwoCharacters) {
  std::string umlauts;
  for (int i = 0; i < 5'000; ++i) {
    umlauts += "ü";
  }
  for (const char* const start : {"", "x"}) {
    FailureRecord record;
    EXPECT_TRUE(record.set(ErrorKind::kAborted, start + umlauts, 0, {.cause = start + umlauts}));
    const auto [kind, message, blame] = describe(record.error());
    for (const std::string& text : {message, blame.cause}) {
      EXPECT_GT(text.size(), 500u);
      EXPECT_EQ(text.substr(text.size() - 2 - kEllipsisBytes), "ü…");
    }
  }
}

TEST(FailureRecordTest, ReadersSeeWholeErrorsOfOneWriter) {
  for (int round = 0; round < 200; ++round) {
    FailureRecord record;
    std::atomic<int> winners{0};
    std::vector<std::thread> threads;
    for (int writer = 0; writer < 3; ++writer) {
      threads.emplace_back([&, writer] {
        const std::string message(2500, static_cast<char>('a' + writer));
        winners += record.set(ErrorKind::kError, message, writer) ? 1 : 0;
        const std::string seen = describe(record.error()).message;
        EXPECT_EQ(seen, std::string(2500, seen[0]));
      });
    }
    for (std::thread& each : threads) {
      each.join();
    }
    EXPECT_EQ(winners, 1);
  }
}

}  // namespace
}  // namespace pydist
