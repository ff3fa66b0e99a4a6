#include "base/error.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <set>
#include <stdexcept>
#include <string>

namespace pydist {
namespace {

template <typename Expected>
bool is_thrown_as(ErrorKind kind) {
  const std::string text = "what timed out";
  try {
    std::rethrow_exception(make_error(kind, text));
  } catch (const Expected& error) {
    return error.kind() == kind && error.what() == text;
  } catch (...) {
    return false;
  }
}

TEST(ErrorTest, EveryKindHasItsClass) {
  EXPECT_TRUE(is_thrown_as<Error>(ErrorKind::kError));
  EXPECT_TRUE(is_thrown_as<InvalidUsage>(ErrorKind::kInvalidUsage));
  EXPECT_TRUE(is_thrown_as<Mismatch>(ErrorKind::kMismatch));
  EXPECT_TRUE(is_thrown_as<PeerLost>(ErrorKind::kPeerLost));
  EXPECT_TRUE(is_thrown_as<Timeout>(ErrorKind::kTimeout));
  EXPECT_TRUE(is_thrown_as<Aborted>(ErrorKind::kAborted));
  EXPECT_TRUE(is_thrown_as<TransportError>(ErrorKind::kTransport));
  EXPECT_FALSE(is_thrown_as<Timeout>(ErrorKind::kAborted));
}

TEST(ErrorTest, KindsComeBackFromDescriptions) {
  std::set<std::string_view> names;
  for (int index = 0; index < kErrorKindCount; ++index) {
    const auto kind = static_cast<ErrorKind>(index);
    names.insert(to_string(kind));
    const ErrorDescription description = describe(make_error(kind, "what timed out"));
    EXPECT_EQ(description.kind, kind);
    EXPECT_EQ(description.message, "what timed out");
    // Every one of them is a pydist::Error, and a runtime_error.
    EXPECT_THROW(std::rethrow_exception(make_error(kind, "")), std::runtime_error);
  }
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kErrorKindCount));
}

TEST(ErrorTest, ATimeoutSaysTimedOut) {
  EXPECT_STREQ(Timeout("nobody came").what(), "timed out: nobody came");
  EXPECT_STREQ(Timeout("rank 1 timed out in barrier #3").what(), "rank 1 timed out in barrier #3");
  const ErrorDescription first = describe(make_error(ErrorKind::kTimeout, "nobody came"));
  EXPECT_EQ(describe(make_error(first.kind, first.message)).message, first.message);
  EXPECT_STREQ(PeerLost("nobody came").what(), "nobody came");
}

TEST(ErrorTest, ForeignExceptionsAreDescribed) {
  const auto foreign = describe(std::make_exception_ptr(std::out_of_range("far away")));
  EXPECT_EQ(foreign.kind, ErrorKind::kError);
  EXPECT_EQ(foreign.message, "far away");
  const auto strange = describe(std::make_exception_ptr(42));
  EXPECT_EQ(strange.kind, ErrorKind::kError);
  EXPECT_FALSE(strange.message.empty());
}

TEST(ErrorTest, JoinTakesAnythingThatPrints) {
  EXPECT_EQ(join("rank ", 3, " of ", 4u, ": ", 0.5, ' ', std::string("s")), "rank 3 of 4: 0.5 s");
}

TEST(ErrorTest, SystemErrorsSayTheCode) {
  const TransportError error = system_error("Cannot open a door", ENOENT);
  const std::string text = error.what();
  EXPECT_EQ(error.kind(), ErrorKind::kTransport);
  EXPECT_EQ(text.rfind("Cannot open a door: ", 0), 0u) << text;
  EXPECT_NE(text.find(std::to_string(ENOENT)), std::string::npos) << text;
}

TEST(ErrorTest, ABrokenInvariantThrowsWithItsPlace) {
  const auto check = [](int value) { PYDIST_CHECK(value == 7); };
  EXPECT_NO_THROW(check(7));
  try {
    check(8);
    FAIL() << "the check passed";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_EQ(error.kind(), ErrorKind::kError);
    EXPECT_NE(text.find("value == 7"), std::string::npos) << text;
    EXPECT_NE(text.find("base/error_test.cc:"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace pydist
