// What two ranks, here threads, hand to and fro.

#include "collectives/line_handover.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <future>

#include "base/error.h"

namespace pydist {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

struct alignas(kHandoverBytes) Lines {
  std::array<std::byte, kHandoverBytes> first{};
  std::array<std::byte, kHandoverBytes> second{};
};

TEST(LineHandoverTest, BothRanksTakeEveryTurn) {
  for (const std::uint64_t turns : {1U, 10U, 95U}) {
    Lines lines;
    auto other = std::async(std::launch::async, [&] {
      return time_line_handover(lines.second.data(), lines.first.data(), false, turns,
                                Deadline::in(seconds(20)));
    });
    const double took = time_line_handover(lines.first.data(), lines.second.data(), true, turns,
                                           Deadline::in(seconds(20)));
    const double seen_by_other = other.get();
    EXPECT_GT(took, 0.0);
    EXPECT_GT(seen_by_other, 0.0);
    // Ten parts of as many turns, one each where there are fewer.
    EXPECT_EQ(lines.first, lines.second);
    EXPECT_EQ(*reinterpret_cast<std::uint64_t*>(lines.first.data()),
              10 * std::max<std::uint64_t>(1, turns / 10));
  }
}

TEST(LineHandoverTest, ARankThatIsNotThereIsATimeout) {
  for (const bool begins : {true, false}) {
    Lines lines;
    EXPECT_THROW(static_cast<void>(time_line_handover(lines.first.data(), lines.second.data(),
                                                      begins, 10, Deadline::in(milliseconds(1)))),
                 Timeout);
  }
}

}  // namespace
}  // namespace pydist
