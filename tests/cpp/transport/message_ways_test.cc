// Which way messages come, by what they take. The clock is the real one: a slow way waits.

#include "transport/message_ways.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <thread>

namespace pydist {
namespace {

using std::chrono::microseconds;

constexpr std::size_t kBytes = 100'000;
constexpr TuningRhythm kShort{.uses_before_first = 4, .rounds = 3};

// Messages one after the other, of which those that come the slow way take longer; how many of them
// were read.
int reads_of(MessageWays& ways, int messages, bool is_read_slow, std::size_t bytes = kBytes,
             bool do_both_send = false) {
  int reads = 0;
  for (int i = 0; i < messages; ++i) {
    const MessageWays::Way way = ways.choose(bytes, do_both_send, /*is_alone=*/true);
    if (way.is_read() == is_read_slow) {
      std::this_thread::sleep_for(microseconds(500));
    }
    MessageWays::note(way);
    reads += way.is_read() ? 1 : 0;
  }
  return reads;
}

TEST(MessageWaysTest, TheQuickerWayIsFound) {
  for (const bool is_read_slow : {false, true}) {
    MessageWays ways(kShort);
    EXPECT_EQ(reads_of(ways, 4, is_read_slow), 0) << "nothing has been tried";
    static_cast<void>(reads_of(ways, 30, is_read_slow));
    EXPECT_EQ(reads_of(ways, 20, is_read_slow), is_read_slow ? 0 : 20);
  }
}

TEST(MessageWaysTest, LengthsAndDirectionsAreChosenForByThemselves) {
  MessageWays ways(kShort);
  static_cast<void>(reads_of(ways, 40, /*is_read_slow=*/false));
  static_cast<void>(reads_of(ways, 40, /*is_read_slow=*/true, kBytes, /*do_both_send=*/true));
  static_cast<void>(reads_of(ways, 40, /*is_read_slow=*/true, 8 * kBytes));
  EXPECT_EQ(reads_of(ways, 10, false), 10);
  EXPECT_EQ(reads_of(ways, 10, true, kBytes, /*do_both_send=*/true), 0);
  EXPECT_EQ(reads_of(ways, 10, true, 8 * kBytes), 0);
}

TEST(MessageWaysTest, OneThatIsNotAloneSaysNothing) {
  MessageWays ways(kShort);
  for (int i = 0; i < 100; ++i) {
    const MessageWays::Way way = ways.choose(kBytes, false, /*is_alone=*/false);
    EXPECT_FALSE(way.is_read());
    MessageWays::note(way);
  }
  static_cast<void>(reads_of(ways, 40, /*is_read_slow=*/false));
  EXPECT_TRUE(ways.choose(kBytes, false, /*is_alone=*/false).is_read()) << "as what was found";
}

TEST(MessageWaysTest, WithoutATunerAllIsAsUsual) {
  for (const bool usually_reads : {false, true}) {
    MessageWays ways(std::nullopt, usually_reads);
    EXPECT_EQ(reads_of(ways, 50, /*is_read_slow=*/!usually_reads), usually_reads ? 50 : 0);
  }
}

TEST(MessageWaysTest, TheLongestAreNotRead) {
  MessageWays ways(std::nullopt, /*usually_reads=*/true);
  EXPECT_TRUE(ways.choose(std::size_t{32} << 20, true, true).is_read());
  EXPECT_FALSE(ways.choose((std::size_t{32} << 20) + 1, true, true).is_read());
}

}  // namespace
}  // namespace pydist
