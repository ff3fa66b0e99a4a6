#include "topology/told_error.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <string>

#include "topology/hosts.h"

namespace pydist {
namespace {

TEST(ToldErrorTest, WhatARankTellsOfAnErrorComesBack) {
  const ToldError told{3,
                       {ErrorKind::kAborted,
                        "rank 3 has aborted: 5:text",
                        {.ranks = {1, 3},
                         .host = "a b",
                         .pid = 4711,
                         .operation = "all_reduce #8",
                         .cause = "ünicode"}}};
  const ToldError heard = ToldError::from_text(told.to_text());
  EXPECT_EQ(heard.teller, 3);
  EXPECT_EQ(heard.error.kind, ErrorKind::kAborted);
  EXPECT_EQ(heard.error.message, told.error.message);
  EXPECT_EQ(heard.error.blame, told.error.blame);
}

TEST(ToldErrorTest, AnyTextIsAnError) {
  const std::string whole = ToldError{1, {ErrorKind::kTimeout, "late", {.ranks = {2}}}}.to_text();
  for (std::size_t length = 0; length < whole.size(); ++length) {
    static_cast<void>(ToldError::from_text(whole.substr(0, length)));
    std::string other = whole;
    other[length] = '9';
    static_cast<void>(ToldError::from_text(other));
  }
  const ToldError heard = ToldError::from_text("rank 1 has died");
  EXPECT_EQ(heard.teller, -1);
  EXPECT_EQ(heard.error.kind, ErrorKind::kPeerLost);
  EXPECT_EQ(heard.error.message, "rank 1 has died");
  EXPECT_EQ(heard.error.blame, Blame{});
}

TEST(ToldErrorTest, ARankIsToBlameForWhatIsItsOwn) {
  const Blame own = own_blame(2, "enough");
  EXPECT_EQ(own, (Blame{.ranks = {2}, .host = host_name(), .pid = ::getpid(), .cause = "enough"}));
  EXPECT_EQ(blame_of(Aborted("enough"), 2), own);
  EXPECT_EQ(blame_of(Aborted("enough", {.ranks = {1}}), 2).ranks, std::vector<int>{1});
  EXPECT_EQ(blame_of(PeerLost("a rank has died"), 2), Blame{});
}

TEST(ToldErrorTest, APlaceIsAProcessAndAHost) {
  Blame blame{.ranks = {1}};
  for (const char* const nonsense : {"", "4711", "x a", "4711x a", "99999999999 a"}) {
    set_place(blame, nonsense);
    EXPECT_EQ(blame.pid, 0) << nonsense;
  }
  set_place(blame, own_place());
  EXPECT_EQ(blame.pid, ::getpid());
  EXPECT_EQ(blame.host, host_name());
}

}  // namespace
}  // namespace pydist
