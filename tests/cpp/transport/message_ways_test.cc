// Which way messages come, by what they take.

#include "transport/message_ways.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include "transport/lane_segment.h"

namespace pydist {
namespace {

using std::chrono::microseconds;

constexpr std::size_t kBytes = 100'000;
constexpr std::uint32_t kPieceBytes = piece_bytes_of(kMessageLanes.slot_bytes);
constexpr TuningRhythm kShort{.uses_before_first = 4, .rounds = 3};

// A receiver with a clock of its own.
class Receiver {
 public:
  explicit Receiver(const std::optional<TuningRhythm>& rhythm, TuningTable* table = nullptr)
      : ways_(rhythm, table) {}

  [[nodiscard]] MessageWays::Way choose(std::size_t bytes = kBytes, bool do_both_send = false,
                                        TunedMemory memory = TunedMemory::kOrdinary,
                                        MessageWays::Came came = MessageWays::Came::kAnnounced) {
    return ways_.choose(bytes, memory, do_both_send, now_, came);
  }
  void note(const MessageWays::Way& way, MessageWays::Time since = {}) {
    MessageWays::note(way, since, now_);
  }
  // The time that passes.
  void pass(int us) { now_ += microseconds(us); }
  [[nodiscard]] MessageWays::Time now() const { return now_; }

  // Messages one after the other, of which the slow ones take twice as long as the others; how many
  // of them are read.
  int reads_of(int messages, bool is_read_slow, std::size_t bytes = kBytes,
               bool do_both_send = false) {
    int reads = 0;
    for (int i = 0; i < messages; ++i) {
      const MessageWays::Way way = choose(bytes, do_both_send);
      const MessageWays::Time before = now_;
      pass(static_cast<int>(bytes / 1000) * (way.is_read() == is_read_slow ? 2 : 1));
      note(way, before);
      reads += way.is_read() ? 1 : 0;
    }
    return reads;
  }

 private:
  MessageWays ways_;
  MessageWays::Time now_{};
};

TEST(MessageWaysTest, TheQuickerWayIsFound) {
  for (const bool is_read_slow : {false, true}) {
    Receiver receiver(kShort);
    EXPECT_EQ(receiver.reads_of(4, is_read_slow), 0) << "nothing has been tried";
    static_cast<void>(receiver.reads_of(20, is_read_slow));
    EXPECT_EQ(receiver.reads_of(20, is_read_slow), is_read_slow ? 0 : 20);
  }
}

TEST(MessageWaysTest, LengthsAndDirectionsAreChosenForByThemselves) {
  Receiver receiver(kShort);
  static_cast<void>(receiver.reads_of(30, /*is_read_slow=*/false));
  static_cast<void>(receiver.reads_of(30, /*is_read_slow=*/true, kBytes, /*do_both_send=*/true));
  static_cast<void>(receiver.reads_of(30, /*is_read_slow=*/true, 8 * kBytes));
  EXPECT_TRUE(receiver.choose().is_read());
  EXPECT_FALSE(receiver.choose(kBytes, /*do_both_send=*/true).is_read());
  EXPECT_FALSE(receiver.choose(8 * kBytes).is_read());
}

// Of one class, of which the longest is nearly twice as long as the shortest.
TEST(MessageWaysTest, TimesCountByLength) {
  Receiver receiver(kShort);
  for (int i = 0; i < 30; ++i) {
    static_cast<void>(receiver.reads_of(1, /*is_read_slow=*/false, i % 3 == 0 ? 66'000 : 130'000));
  }
  EXPECT_TRUE(receiver.choose(66'000).is_read());
}

// All are chosen for at once. Until the one that is timed has come, the others go its way.
TEST(MessageWaysTest, ManyAtOnceAreTimedOneByOne) {
  Receiver receiver(kShort);
  bool has_read = false;
  for (int burst = 0; burst < 100; ++burst) {
    MessageWays::Way ways[8];
    for (MessageWays::Way& way : ways) {
      way = receiver.choose();
    }
    MessageWays::Time last = receiver.now();
    for (const MessageWays::Way& way : ways) {
      EXPECT_TRUE(way.is_read() == ways[0].is_read() || way.is_read() == ways[7].is_read());
      has_read = has_read || way.is_read();
      receiver.pass(way.is_read() ? 100 : 200);
      receiver.note(way, last);
      last = receiver.now();
    }
  }
  EXPECT_TRUE(has_read);
  EXPECT_TRUE(receiver.choose().is_read());
}

// Reads that fail, after less time than the lane would take, tell nothing, and keep nobody from
// being timed.
TEST(MessageWaysTest, WhatComesAnotherWayDoesNotCount) {
  Receiver receiver(kShort);
  for (int i = 0; i < 100; ++i) {
    MessageWays::Way way = receiver.choose();
    const MessageWays::Time before = receiver.now();
    receiver.pass(way.is_read() ? 50 : 100);
    if (way.is_read()) {
      MessageWays::drop(way);
    }
    receiver.note(way, before);
  }
  EXPECT_FALSE(receiver.choose().is_read());
  // They succeed from now on; another session comes in time.
  EXPECT_GT(receiver.reads_of(20'000, /*is_read_slow=*/false), 10'000);
}

TEST(MessageWaysTest, WhatIsFoundIsKeptForGroupsThatFollow) {
  TuningTable table;
  Receiver first(kShort, &table);
  static_cast<void>(first.reads_of(30, /*is_read_slow=*/false));
  static_cast<void>(first.reads_of(30, /*is_read_slow=*/true, kBytes, /*do_both_send=*/true));
  const TuningKey alone{.kind = OpKind::kRecv, .ranks = 2, .size_class = size_class_of(kBytes)};
  TuningKey both = alone;
  both.sends_too = true;
  const auto entries = table.entries();
  ASSERT_EQ(entries.size(), 2U);
  EXPECT_TRUE(entries.at(alone).is_learnt);
  EXPECT_EQ(entries.at(alone).choice, Choice{.in_place = true});
  EXPECT_EQ(entries.at(alone).times_us.size(), 2U);
  EXPECT_EQ(entries.at(both).choice, Choice{.piece_bytes = kPieceBytes});

  Receiver second(kShort, &table);
  EXPECT_TRUE(second.choose().is_read());
  EXPECT_TRUE(second.choose(8 * kBytes).is_read()) << "about as long as what is known";
  EXPECT_FALSE(second.choose(kBytes, /*do_both_send=*/true).is_read());
}

TEST(MessageWaysTest, WhatWasNeverReadIsNotKept) {
  TuningTable table;
  Receiver receiver(kShort, &table);
  for (int i = 0; i < 100; ++i) {
    MessageWays::Way way = receiver.choose();
    const MessageWays::Time before = receiver.now();
    receiver.pass(100);
    if (way.is_read()) {
      MessageWays::drop(way);
    }
    receiver.note(way, before);
  }
  EXPECT_TRUE(table.entries().empty());
}

TEST(MessageWaysTest, MemoriesAreToldApart) {
  TuningTable table;
  Receiver receiver(kShort, &table);
  EXPECT_TRUE(receiver.choose(kBytes, /*do_both_send=*/false, TunedMemory::kShared).is_read());
  EXPECT_FALSE(receiver.choose().is_read());
  TuningKey key{.kind = OpKind::kRecv,
                .memory = TunedMemory::kShared,
                .ranks = 2,
                .size_class = size_class_of(kBytes)};
  table.put(key, {.choice = {.piece_bytes = kPieceBytes}, .times_us = {}});
  Receiver taught(kShort, &table);
  EXPECT_FALSE(taught.choose(kBytes, /*do_both_send=*/false, TunedMemory::kShared).is_read());
}

// Of messages that come ahead unless their sender was told otherwise some messages ago, both ways
// are timed all the same, and each only by those that came that way.
TEST(MessageWaysTest, TheSenderIsToldTheQuickerWay) {
  using Came = MessageWays::Came;
  for (const bool is_read_slow : {false, true}) {
    for (const std::size_t late : {1U, 3U, 20U, 100U}) {
      Receiver receiver(kShort);
      std::deque<bool> told(late, false);
      int reads = 0;
      for (int message = 0; message < 5000; ++message) {
        const bool is_told = told.front();
        told.pop_front();
        const MessageWays::Way way =
            receiver.choose(kBytes, /*do_both_send=*/false, TunedMemory::kOrdinary,
                            is_told ? Came::kNotAhead : Came::kAhead);
        ASSERT_TRUE(is_told || !way.is_read()) << "it is here";
        told.push_back(way.is_next_read());
        const MessageWays::Time before = receiver.now();
        // Through the lane, what is not there yet takes so long that it may not be counted.
        const bool is_slow = way.is_read() == is_read_slow;
        receiver.pass(is_told && !way.is_read() ? 5000 : is_slow ? 200 : 100);
        receiver.note(way, before);
        reads += message >= 3000 && way.is_read() ? 1 : 0;
      }
      // Trying goes on now and then.
      EXPECT_LE(is_read_slow ? reads : 2000 - reads, 100) << late;
    }
  }
}

// Where no message comes ahead any more, since nobody asks for what fills the blocks, all go the
// way that is known to be quicker. Nothing is found out then: their times through the lane don't
// count.
TEST(MessageWaysTest, WhatFindsNoBlocksGoesTheQuickerWay) {
  for (const bool is_read_slow : {false, true}) {
    Receiver receiver(kShort);
    static_cast<void>(receiver.reads_of(50, is_read_slow));
    int reads = 0;
    for (int message = 0; message < 20'000; ++message) {
      const MessageWays::Way way = receiver.choose(
          kBytes, /*do_both_send=*/false, TunedMemory::kOrdinary, MessageWays::Came::kNotAhead);
      const MessageWays::Time before = receiver.now();
      receiver.pass(way.is_read() == is_read_slow ? 200 : 100);
      receiver.note(way, before);
      reads += way.is_read() ? 1 : 0;
    }
    EXPECT_LE(is_read_slow ? reads : 20'000 - reads, 200);
  }
}

// As without the kernel collectives read shared memory where it lies.
TEST(MessageWaysTest, WithoutATunerNothingIsReadThroughTheKernel) {
  Receiver receiver(std::nullopt);
  EXPECT_TRUE(receiver.choose(kBytes, /*do_both_send=*/false, TunedMemory::kShared).is_read());
  EXPECT_EQ(receiver.reads_of(50, /*is_read_slow=*/false), 0);
}

TEST(MessageWaysTest, TheLongestAreNotRead) {
  Receiver receiver(kShort);
  constexpr std::size_t kMost = std::size_t{32} << 20;
  static_cast<void>(receiver.reads_of(30, /*is_read_slow=*/false, kMost));
  EXPECT_TRUE(receiver.choose(kMost).is_read());
  EXPECT_EQ(receiver.reads_of(30, /*is_read_slow=*/false, kMost + 1), 0);
}

}  // namespace
}  // namespace pydist
