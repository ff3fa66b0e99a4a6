// Messages that both ends send and receive on the caller's stack.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "transport/host_of_ranks.h"
#include "transport/messages.h"

namespace pydist::testing {
namespace {

using AtOnce = Messages::AtOnce;

// Two ranks of one thread. The lane between them is open: it takes memory with its first message,
// which so goes through the queue.
struct OpenLane {
  HostOfRanks host{2};
  Messages sender = host.join(0);
  Messages receiver = host.join(1);

  OpenLane() {
    std::vector<std::uint32_t> none;
    EXPECT_FALSE(sender.place_at_once(1, buffer(none)));
    sender.send(1, 0, buffer(none), ignore);
    EXPECT_TRUE(sender.advance());
    receiver.receive(0, 0, buffer(none), ignore);
    EXPECT_TRUE(receiver.advance());
  }
};

void send_at_once(Messages& sender, std::uint64_t tag, std::vector<std::uint32_t>& values) {
  const std::optional<MessagePlace> place = sender.place_at_once(1, buffer(values));
  ASSERT_TRUE(place);
  sender.send_at_once(1, tag, buffer(values), *place);
}

TEST(MessagesAtOnceTest, WhatRidesAlongGoesAtOnceUntilTheLaneIsFull) {
  OpenLane lane;
  auto& [host, sender, receiver] = lane;
  std::vector<std::uint32_t> sent = text(host.most_riding(), 1);
  std::vector<std::uint32_t> got(sent.size(), 0);
  std::vector<std::uint32_t> none;
  std::vector<std::uint32_t> long_one(200'000, 0);
  EXPECT_EQ(receiver.try_receive(0, 5, buffer(got)), AtOnce::kNotYet);
  for (std::size_t turn = 0; turn < 3; ++turn) {
    for (std::size_t i = 0; i < kLaneDepth; ++i) {
      send_at_once(sender, 5, i % 2 == 0 ? sent : none);
    }
    EXPECT_FALSE(sender.place_at_once(1, buffer(sent)));
    for (std::size_t i = 0; i < kLaneDepth; ++i) {
      std::fill(got.begin(), got.end(), 0);
      ASSERT_EQ(receiver.try_receive(0, 5, buffer(i % 2 == 0 ? got : none)), AtOnce::kDone);
      EXPECT_EQ(got == sent, i % 2 == 0);
    }
    EXPECT_EQ(receiver.try_receive(0, 5, buffer(got)), AtOnce::kNotYet);
  }
  EXPECT_FALSE(sender.place_at_once(1, buffer(long_one)));
  EXPECT_EQ(receiver.try_receive(0, 5, buffer(long_one)), AtOnce::kNever);
  EXPECT_TRUE(sender.is_idle() && receiver.is_idle());
}

TEST(MessagesAtOnceTest, WhatIsFilledAheadGoesAtOnceUntilTheBlocksAreFull) {
  OpenLane lane;
  auto& [host, sender, receiver] = lane;
  std::vector<std::uint32_t> sent = text(host.most_ahead() - 3, 1);
  std::vector<std::uint32_t> got(sent.size(), 0);
  EXPECT_EQ(receiver.try_receive(0, 5, buffer(got)), AtOnce::kNotYet);
  for (std::size_t turn = 0; turn < 3; ++turn) {
    send_at_once(sender, 5, sent);
    send_at_once(sender, 5, sent);
    EXPECT_FALSE(sender.place_at_once(1, buffer(sent)));
    for (std::size_t i = 0; i < 2; ++i) {
      std::fill(got.begin(), got.end(), 0);
      ASSERT_EQ(receiver.try_receive(0, 5, buffer(got)), AtOnce::kDone);
      EXPECT_EQ(got, sent);
    }
  }
  // One that has been announced, but is not all there, is received by advance().
  send_at_once(sender, 5, sent);
  const LaneCounters& counters = host.lanes().counters(0, 1);
  const BlockSet blocks = host.lanes().announcement(0, 1, counters.announced.load() - 1).address;
  BlockWord& filled = host.lanes().counters(0, 1).filled;
  const std::uint64_t all = filled.load();
  filled.store(all ^ (blocks & (blocks - 1)));  // only the first one is full
  std::fill(got.begin(), got.end(), 0);
  EXPECT_EQ(receiver.try_receive(0, 5, buffer(got), /*looks=*/3), AtOnce::kNever);
  EXPECT_EQ(got[1], sent[1]) << "it was copied";
  EXPECT_EQ(got.back(), 0U);
  receiver.receive(0, 5, buffer(got), ignore);
  while (receiver.advance()) {
  }
  EXPECT_FALSE(receiver.is_idle());
  filled.store(all);
  while (receiver.advance()) {
  }
  EXPECT_TRUE(sender.is_idle() && receiver.is_idle());
  EXPECT_EQ(got, sent);
}

// Both at once all the time, where nothing is under way, and of every length that may go so.
TEST(MessagesAtOnceTest, BothEndsAtOnceOnThreads) {
  constexpr std::uint32_t kMessages = 2'000;
  HostOfRanks host(2);
  const std::size_t most = host.most_ahead();
  host.run([&](int rank, Messages& messages) {
    const int peer = 1 - rank;
    std::vector<std::uint32_t> none;
    messages.send(peer, 0, buffer(none), ignore);
    messages.receive(peer, 0, buffer(none), ignore);
    host.drain(rank, messages);
    for (std::uint32_t number = 0; number < kMessages; ++number) {
      const std::size_t count = number * 7'919 % most;
      std::vector<std::uint32_t> sent = text(count, 2 * number + static_cast<std::uint32_t>(rank));
      std::vector<std::uint32_t> got(count, 0);
      if (const auto place = messages.place_at_once(peer, buffer(sent))) {
        messages.send_at_once(peer, number, buffer(sent), *place);
      } else {
        messages.send(peer, number, buffer(sent), ignore);
      }
      if (messages.try_receive(peer, number, buffer(got), /*looks=*/100) != AtOnce::kDone) {
        messages.receive(peer, number, buffer(got), ignore);
      }
      host.drain(rank, messages);
      EXPECT_EQ(got, text(count, 2 * number + static_cast<std::uint32_t>(peer)));
    }
  });
}

TEST(MessagesAtOnceTest, NothingOvertakesAtOnce) {
  OpenLane lane;
  auto& [host, sender, receiver] = lane;
  std::vector<std::uint32_t> first = text(2, 1);
  std::vector<std::uint32_t> second = text(2, 2);
  std::vector<std::uint32_t> got(2, 0);
  std::vector<std::uint32_t> got_later(2, 0);
  send_at_once(sender, 7, first);
  // Another tag, which is not the next one: nothing has happened.
  EXPECT_EQ(receiver.try_receive(0, 8, buffer(got)), AtOnce::kNever);
  // While a receive waits, another one goes behind it.
  receiver.receive(0, 8, buffer(got_later), ignore);
  EXPECT_EQ(receiver.try_receive(0, 7, buffer(got)), AtOnce::kNever);
  send_at_once(sender, 8, second);
  EXPECT_TRUE(receiver.advance());
  EXPECT_TRUE(receiver.is_idle());
  EXPECT_EQ(got_later, second);
  // The first one has been heard by now, and is where receive() finds it.
  EXPECT_EQ(receiver.try_receive(0, 7, buffer(got)), AtOnce::kNever);
  receiver.receive(0, 7, buffer(got), ignore);
  EXPECT_EQ(got, first);
  // While a message is under way, another one goes behind it.
  std::vector<std::uint32_t> large(200'000, 3);
  sender.send(1, 7, buffer(large), ignore);
  EXPECT_FALSE(sender.place_at_once(1, buffer(first)));
}

TEST(MessagesAtOnceTest, AMismatchAtOnceNamesBothSides) {
  OpenLane lane;
  auto& [host, sender, receiver] = lane;
  std::vector<std::uint32_t> sent = text(2, 1);
  std::vector<std::uint32_t> got(3, 9);
  send_at_once(sender, 0, sent);
  try {
    static_cast<void>(receiver.try_receive(0, 0, buffer(got)));
    FAIL() << "took it";
  } catch (const Mismatch& error) {
    EXPECT_EQ(std::string(error.what()),
              "Rank 1 receives 3 elements of uint32 from rank 0 with tag 0, but rank 0 sends 2 of "
              "uint32. Both ends of a message must have the same dtype and count.");
  }
  EXPECT_EQ(got, std::vector<std::uint32_t>(3, 9));
}

}  // namespace
}  // namespace pydist::testing
