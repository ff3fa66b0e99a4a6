// Messages that their receivers copy from where the senders have them, in one process here.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "transport/host_of_ranks.h"
#include "transport/message_ways.h"
#include "transport/messages.h"

namespace pydist::testing {
namespace {

// Reads as the threads of one process do.
struct Reader {
  bool refuses = false;
  MessagePlace::In in = MessagePlace::In::kProcess;
  int reads = 0;

  class Reads final : public MessageReads {
   public:
    explicit Reads(Reader& reader) : reader_(reader) {}

    [[nodiscard]] MessagePlace place_of(int /*peer*/,
                                        const Buffer& buffer) const noexcept override {
      return {reader_.in, reinterpret_cast<std::uintptr_t>(buffer.data)};
    }
    [[nodiscard]] bool may_read_processes() const noexcept override {
      return reader_.in == MessagePlace::In::kProcess;
    }
    [[nodiscard]] bool read(int /*peer*/, const MessagePlace& place,
                            std::span<std::byte> target) const override {
      ++reader_.reads;
      EXPECT_EQ(place.in, reader_.in);
      if (!reader_.refuses) {
        std::memcpy(target.data(), reinterpret_cast<const void*>(place.address), target.size());
      }
      return !reader_.refuses;
    }

   private:
    Reader& reader_;
  };

  [[nodiscard]] std::unique_ptr<MessageReads> reads_of() { return std::make_unique<Reads>(*this); }
};

constexpr TuningRhythm kRestless{.uses_before_first = 0, .rounds = 1, .always_tries = true};

void advance_both(Messages& one, Messages& other) {
  while (one.advance() || other.advance()) {
  }
}

// From rank 0 to rank 1.
void expect_arrives(Messages& sender, Messages& receiver, std::vector<std::uint32_t>& sent) {
  std::vector<std::uint32_t> got(sent.size(), 0);
  sender.send(1, 0, buffer(sent), ignore);
  receiver.receive(0, 0, buffer(got), ignore);
  advance_both(sender, receiver);
  EXPECT_EQ(got, sent);
}

// One message between two ranks arrives as it was sent; how often it was read.
int reads_of_one_message(Reader& reader, const MessageWays& ways) {
  HostOfRanks host(2);
  Messages sender = host.join(0, reader.reads_of(), ways);
  Messages receiver = host.join(1, reader.reads_of(), ways);
  std::vector<std::uint32_t> sent = text(host.most_ahead() + 1, 1);
  expect_arrives(sender, receiver, sent);
  return reader.reads;
}

TEST(MessagesReadTest, WhatIsNotFilledAheadIsReadWhereItLies) {
  for (const bool refuses : {false, true}) {
    HostOfRanks host(2);
    Reader reader{.refuses = refuses};
    Messages sender = host.join(0, reader.reads_of(), ways_that_read());
    Messages receiver = host.join(1, reader.reads_of(), ways_that_read());
    std::vector<std::uint32_t> sent = text(host.most_ahead() + 1, 1);
    std::vector<std::uint32_t> got(sent.size(), 0);
    int done = 0;
    sender.send(1, 3, buffer(sent), [&](int) { ++done; });
    advance_both(sender, receiver);
    EXPECT_EQ(done, 0) << "nobody has asked for it";
    receiver.receive(0, 3, buffer(got), [&](int) { ++done; });
    advance_both(sender, receiver);
    EXPECT_EQ(done, 2);
    EXPECT_EQ(got, sent);
    EXPECT_EQ(reader.reads, 1);
  }
}

// Nobody has to have timed that first.
TEST(MessagesReadTest, WhatLiesInSharedMemoryIsReadFromTheFirstOn) {
  Reader reader{.in = MessagePlace::In::kSharedHeap};
  EXPECT_EQ(reads_of_one_message(reader, MessageWays(TuningRhythm())), 1);
}

// The shortest are filled ahead all the same, while there are blocks.
TEST(MessagesReadTest, TheShortestInSharedMemoryAreNotRead) {
  HostOfRanks host(2);
  Reader reader{.in = MessagePlace::In::kSharedHeap};
  Messages sender = host.join(0, reader.reads_of());
  Messages receiver = host.join(1, reader.reads_of());
  const std::size_t most = Messages::kLongestNeverRead / sizeof(std::uint32_t);
  const int blocks = static_cast<int>(kAheadBlocks);
  // All are announced before any is asked for: more than there are blocks, of the short ones.
  std::vector<std::vector<std::uint32_t>> sent;
  std::vector<std::vector<std::uint32_t>> got;
  for (int i = 0; i < blocks + 5; ++i) {
    sent.push_back(text(i < 3 ? most + 1 : most, static_cast<std::uint32_t>(i)));
    got.emplace_back(sent.back().size(), 0);
    sender.send(1, static_cast<std::uint64_t>(i), buffer(sent.back()), ignore);
  }
  std::vector<std::uint32_t> nothing;
  receiver.receive(0, 99, buffer(nothing), ignore);
  sender.send(1, 99, buffer(nothing), ignore);
  advance_both(sender, receiver);
  for (std::size_t i = 0; i < sent.size(); ++i) {
    receiver.receive(0, i, buffer(got[i]), ignore);
  }
  advance_both(sender, receiver);
  EXPECT_TRUE(sender.is_idle() && receiver.is_idle());
  EXPECT_EQ(got, sent);
  EXPECT_EQ(reader.reads, 5) << "three that are longer, and two for which no block was left";
}

TEST(MessagesReadTest, WhatLiesNowhereComesThroughTheLane) {
  Reader reader{.in = MessagePlace::In::kNowhere};
  EXPECT_EQ(reads_of_one_message(reader, ways_that_read()), 0);
}

// Each end of a lane looks at what the other one has written there.
TEST(MessagesReadTest, AGrantThatCannotBeIsDamage) {
  HostOfRanks host(2);
  Reader reader{.in = MessagePlace::In::kNowhere};
  Messages sender = host.join(0, reader.reads_of());
  std::vector<std::uint32_t> sent = text(host.most_ahead() + 1, 1);
  sender.send(1, 0, buffer(sent), ignore);
  sender.advance();
  host.lanes().counters(0, 1).granted.store(1);
  for (const std::uint64_t grant : {kTaken, std::uint64_t{7}}) {  // one that nobody can read; none
    host.lanes().rings(0, 1).grants[0] = grant;
    expect_damage_by(1, sender);
  }
}

TEST(MessagesReadTest, MemoryOfNoKnownKindIsDamage) {
  HostOfRanks host(2);
  Reader reader;
  Messages sender = host.join(0, reader.reads_of());
  Messages receiver = host.join(1, reader.reads_of());
  std::vector<std::uint32_t> sent = text(100'000, 1);
  std::vector<std::uint32_t> got(sent.size(), 0);
  sender.send(1, 0, buffer(sent), ignore);
  receiver.receive(0, 0, buffer(got), ignore);
  sender.advance();
  host.lanes().announcement(0, 1, 0).in = static_cast<MessagePlace::In>(4);
  expect_damage_by(0, receiver);
}

// In turns, as the tuner has them; both directions at once.
TEST(MessagesReadTest, BothWaysAreTried) {
  constexpr int kTimes = 20;
  HostOfRanks host(2);
  Reader reader;
  Messages one = host.join(0, reader.reads_of(), MessageWays(kRestless));
  Messages other = host.join(1, reader.reads_of(), MessageWays(kRestless));
  for (const std::size_t count : {std::size_t{10'000}, host.most_ahead() + 1}) {
    reader.reads = 0;
    for (std::uint32_t time = 0; time < kTimes; ++time) {
      std::vector<std::uint32_t> sent = text(count, 2 * time);
      std::vector<std::uint32_t> answer = text(count, 2 * time + 1);
      std::vector<std::uint32_t> got(count, 0);
      std::vector<std::uint32_t> got_back(count, 0);
      one.send(1, 0, buffer(sent), ignore);
      one.receive(1, 0, buffer(got_back), ignore);
      other.send(0, 0, buffer(answer), ignore);
      other.receive(0, 0, buffer(got), ignore);
      advance_both(one, other);
      ASSERT_EQ(got, sent);
      ASSERT_EQ(got_back, answer);
      ASSERT_TRUE(one.is_idle() && other.is_idle());
    }
    EXPECT_GT(reader.reads, 0) << count;
    EXPECT_LT(reader.reads, 2 * kTimes) << count;
  }
}

// A receiver that has found reads to be quicker tells its sender with the first message that comes
// another way.
TEST(MessagesReadTest, WhatIsBetterReadIsNoLongerFilledAhead) {
  HostOfRanks host(2);
  Reader reader;
  Messages sender = host.join(0, reader.reads_of());
  Messages receiver = host.join(1, reader.reads_of(), ways_that_read());
  std::vector<std::uint32_t> sent = text(10'000, 1);
  std::vector<std::uint32_t> longer = text(host.most_ahead(), 2);
  for (int time = 0; time < 4; ++time) {
    for (std::vector<std::uint32_t>* const each : {&sent, &longer}) {
      std::vector<std::uint32_t> got(each->size(), 0);
      bool is_sent = false;
      sender.send(1, 0, buffer(*each), [&](int) { is_sent = true; });
      sender.advance();
      EXPECT_EQ(is_sent, time == 0) << "lengths are told of by themselves";
      receiver.receive(0, 0, buffer(got), ignore);
      advance_both(sender, receiver);
      EXPECT_TRUE(is_sent);
      EXPECT_EQ(got, *each);
    }
    EXPECT_EQ(reader.reads, 2 * time);
  }
}

// Where processes can't be read, nobody waits for it.
TEST(MessagesReadTest, WhatCannotBeReadGoesOnComingAhead) {
  HostOfRanks host(2);
  Reader reader{.in = MessagePlace::In::kNowhere};
  Messages sender = host.join(0, reader.reads_of(), MessageWays(kRestless));
  Messages receiver = host.join(1, reader.reads_of(), ways_that_read());
  std::vector<std::uint32_t> sent = text(10'000, 1);
  for (int time = 0; time < 50; ++time) {
    std::vector<std::uint32_t> got(sent.size(), 0);
    sender.send(1, 0, buffer(sent), ignore);
    sender.advance();
    EXPECT_TRUE(sender.is_idle()) << time;
    receiver.receive(0, 0, buffer(got), ignore);
    advance_both(sender, receiver);
    EXPECT_EQ(got, sent);
  }
  EXPECT_EQ(host.lanes().counters(0, 1).reads.load(), 0U);
}

// Whatever else goes on between the two: trying never comes to an end.
TEST(MessagesReadTest, BothWaysAreTriedWhoeverSendsMore) {
  constexpr int kTimes = 100;
  for (const bool is_asked_late : {false, true}) {
    HostOfRanks host(2);
    Reader reader;
    Messages one = host.join(0, reader.reads_of(), MessageWays(kRestless));
    Messages other = host.join(1, reader.reads_of(), MessageWays(kRestless));
    std::vector<std::uint32_t> sent = text(10'000, 1);
    for (int time = 0; time < kTimes; ++time) {
      if (time == kTimes / 2) {
        reader.reads = 0;
      }
      std::vector<std::vector<std::uint32_t>> got(3, std::vector<std::uint32_t>(sent.size(), 0));
      one.send(1, 0, buffer(sent), ignore);
      one.send(1, 0, buffer(sent), ignore);
      other.send(0, 0, buffer(sent), ignore);
      if (is_asked_late) {
        advance_both(one, other);
      }
      other.receive(0, 0, buffer(got[0]), ignore);
      other.receive(0, 0, buffer(got[1]), ignore);
      one.receive(1, 0, buffer(got[2]), ignore);
      advance_both(one, other);
      ASSERT_EQ(got, std::vector(3, sent));
    }
    EXPECT_GT(reader.reads, kTimes / 8);
    EXPECT_LT(reader.reads, 3 * kTimes / 2);
  }
}

// Where blocks are full, short ones are announced like long ones, and both ways are tried.
TEST(MessagesReadTest, ShortOnesThatFindNoBlocksAreTriedBothWays) {
  constexpr int kTimes = 50;
  HostOfRanks host(2);
  Reader reader;
  Messages sender = host.join(0, reader.reads_of(), MessageWays(kRestless));
  Messages receiver = host.join(1, reader.reads_of(), MessageWays(kRestless));
  std::vector<std::uint32_t> unasked = text(host.most_ahead(), 1);
  for (int i = 0; i < 2; ++i) {
    sender.send(1, 9, buffer(unasked), ignore);
  }
  advance_both(sender, receiver);
  std::vector<std::uint32_t> sent = text(5'000, 2);
  for (int time = 0; time < kTimes; ++time) {
    expect_arrives(sender, receiver, sent);
  }
  EXPECT_GT(reader.reads, 0);
  EXPECT_LT(reader.reads, kTimes);
}

// A sender that is told while it is about to fill its blocks goes on as it has begun.
TEST(MessagesReadTest, ASenderIsToldInTheMiddle) {
  HostOfRanks host(2);
  Reader reader;
  Messages sender = host.join(0, reader.reads_of());
  Messages receiver = host.join(1, reader.reads_of());
  std::vector<std::uint32_t> sent = text(10'000, 1);
  for (int time = 0; time < 2; ++time) {
    std::vector<std::uint32_t> got(sent.size(), 0);
    if (time == 0) {
      sender.send(1, 0, buffer(sent), ignore);
      sender.advance();
    } else {
      const std::optional<MessagePlace> place = sender.place_at_once(1, buffer(sent));
      ASSERT_TRUE(place);
      host.lanes().counters(0, 1).reads.store(~std::uint64_t{0});
      EXPECT_FALSE(sender.place_at_once(1, buffer(sent)));
      sender.send_at_once(1, 0, buffer(sent), *place);
    }
    receiver.receive(0, 0, buffer(got), ignore);
    advance_both(sender, receiver);
    EXPECT_EQ(got, sent);
    EXPECT_TRUE(sender.is_idle() && receiver.is_idle());
  }
  EXPECT_EQ(reader.reads, 0);
}

// Of ranks that send to each other the times are taken apart from those of one that only receives.
TEST(MessagesReadTest, DirectionsAreToldApart) {
  HostOfRanks host(2);
  Reader reader;
  const auto ways_of_exchanges = [] {
    return ways_that_read(/*longest=*/25, /*only_if_both_send=*/true);
  };
  Messages one = host.join(0, reader.reads_of(), ways_of_exchanges());
  Messages other = host.join(1, reader.reads_of(), ways_of_exchanges());
  std::vector<std::uint32_t> sent = text(host.most_ahead() + 1, 1);
  std::vector<std::uint32_t> got(sent.size(), 0);
  std::vector<std::uint32_t> got_back(sent.size(), 0);
  for (int time = 0; time < 3; ++time) {
    one.send(1, 0, buffer(sent), ignore);
    other.receive(0, 0, buffer(got), ignore);
    advance_both(one, other);
  }
  EXPECT_EQ(reader.reads, 0) << "one way";
  EXPECT_EQ(got, sent);
  for (int time = 0; time < 3; ++time) {
    one.send(1, 0, buffer(sent), ignore);
    one.receive(1, 0, buffer(got_back), ignore);
    other.send(0, 0, buffer(sent), ignore);
    other.receive(0, 0, buffer(got), ignore);
    advance_both(one, other);
  }
  EXPECT_GE(reader.reads, 5) << "both ways";
  EXPECT_EQ(got_back, sent);
}

// A rank that is asleep hears of none of the grants: there is room for so many and no more.
TEST(MessagesReadTest, ManyAreReadWhileTheirSenderSleeps) {
  constexpr std::uint32_t kMessages = 3 * kLaneDepth;
  HostOfRanks host(2);
  Reader reader{.in = MessagePlace::In::kSharedHeap};
  Messages sender = host.join(0, reader.reads_of());
  Messages receiver = host.join(1, reader.reads_of());
  std::vector<std::vector<std::uint32_t>> sent;
  std::vector<std::vector<std::uint32_t>> got(kMessages, std::vector<std::uint32_t>(10'000));
  int sends_done = 0;
  for (std::uint32_t i = 0; i < kMessages; ++i) {
    sent.push_back(text(got[i].size(), i));
  }
  for (std::uint32_t i = 0; i < kMessages; ++i) {
    sender.send(1, i % 3, buffer(sent[i]), [&](int) { ++sends_done; });
  }
  // All are announced before any is asked for.
  std::vector<std::uint32_t> nothing;
  receiver.receive(0, 99, buffer(nothing), ignore);
  sender.send(1, 99, buffer(nothing), ignore);
  advance_both(sender, receiver);
  for (std::uint32_t i = 0; i < kMessages; ++i) {
    receiver.receive(0, i % 3, buffer(got[i]), ignore);
  }
  while (receiver.advance()) {
  }
  EXPECT_EQ(reader.reads, static_cast<int>(kLaneDepth));
  EXPECT_EQ(sends_done, 0);
  advance_both(sender, receiver);
  EXPECT_EQ(reader.reads, static_cast<int>(kMessages));
  EXPECT_EQ(sends_done, static_cast<int>(kMessages));
  EXPECT_TRUE(sender.is_idle() && receiver.is_idle());
  EXPECT_EQ(got, sent);
}

TEST(MessagesReadTest, AShortOneIsReadWhileALongOneIsOnItsWay) {
  HostOfRanks host(2);
  Reader reader;
  Messages sender = host.join(0, reader.reads_of(), ways_that_read(/*longest=*/20));
  Messages receiver = host.join(1, reader.reads_of(), ways_that_read(/*longest=*/20));
  const std::vector<std::size_t> counts = {300'000, 150'000, 400'000, 160'000, 3};
  std::vector<std::vector<std::uint32_t>> sent;
  std::vector<std::vector<std::uint32_t>> got;
  for (const std::size_t count : counts) {
    sent.push_back(text(count, static_cast<std::uint32_t>(count)));
    got.emplace_back(count, 0);
  }
  for (std::size_t i = 0; i < counts.size(); ++i) {
    sender.send(1, i, buffer(sent[i]), ignore);
    receiver.receive(0, i, buffer(got[i]), ignore);
  }
  sender.advance();
  receiver.advance();  // has granted the long ones, of which nothing has come
  EXPECT_EQ(reader.reads, 2);
  EXPECT_EQ(got[3], sent[3]);
  EXPECT_FALSE(receiver.is_idle());
  advance_both(sender, receiver);
  EXPECT_EQ(reader.reads, 2);
  EXPECT_TRUE(sender.is_idle() && receiver.is_idle());
  EXPECT_EQ(got, sent);
}

}  // namespace
}  // namespace pydist::testing
