// Blocks that two ranks pass to and fro.

#include "transport/block_pool.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "threads_as_ranks.h"

namespace pydist::testing {
namespace {

constexpr std::size_t kBlockBytes = 64;
constexpr std::size_t kOfEach = 32;
constexpr int kBlocksOfEach = kOfEach;

// Of two ranks.
struct Blocks {
  std::array<std::vector<std::byte>, 2> areas{std::vector<std::byte>(kOfEach * kBlockBytes),
                                              std::vector<std::byte>(kOfEach * kBlockBytes)};
  std::array<BlockWord, 2> filled{};
  std::array<BlockWord, 2> given_back{};

  [[nodiscard]] BlockPool end(std::size_t rank) {
    const auto words = [this](std::size_t of) {
      return BlockPool::Words{&filled[of], &given_back[of]};
    };
    return {{areas[0].data(), areas[1].data()},
            rank,
            {kOfEach, kBlockBytes},
            words(rank),
            words(1 - rank)};
  }
};

std::vector<std::byte> bytes_of(std::size_t count, std::uint32_t seed) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) {
    bytes[i] = static_cast<std::byte>((i + 1) * (2 * seed + 1) >> 2);
  }
  return bytes;
}

struct Message {
  BlockSet blocks = 0;
  std::vector<std::byte> bytes;
};

Message send(BlockPool& sender, std::size_t bytes, std::uint32_t seed) {
  Message message{sender.find(bytes), bytes_of(bytes, seed)};
  if (message.blocks != 0) {
    sender.fill(message.blocks, message.bytes.data(), bytes);
  }
  return message;
}

void receive(BlockPool& receiver, const Message& message) {
  std::vector<std::byte> got(message.bytes.size());
  ASSERT_TRUE(receiver.may_hold(message.blocks, got.size()));
  EXPECT_EQ(receiver.copy(message.blocks, got.data(), got.size(), 0), got.size());
  EXPECT_EQ(got, message.bytes);
  receiver.empty(message.blocks);
}

TEST(BlockPoolTest, AMessageTakesAsManyBlocksAsItNeeds) {
  Blocks blocks;
  BlockPool sender = blocks.end(0);
  const BlockPool receiver = blocks.end(1);
  EXPECT_EQ(sender.most_bytes(), kOfEach / 2 * kBlockBytes);
  for (const auto& [bytes, count] : {std::pair<std::size_t, int>{1, 1},
                                     {kBlockBytes, 1},
                                     {kBlockBytes + 1, 2},
                                     {sender.most_bytes(), kBlocksOfEach / 2}}) {
    const BlockSet found = sender.find(bytes);
    EXPECT_EQ(std::popcount(found), count) << bytes;
    EXPECT_TRUE(receiver.may_hold(found, bytes));
    EXPECT_FALSE(receiver.may_hold(found, bytes + kBlockBytes));
    EXPECT_FALSE(receiver.may_hold(found & (found - 1), bytes)) << "one too few for " << bytes;
    EXPECT_FALSE(receiver.may_hold(found << kBlocksOfEach, bytes)) << "they are its own";
  }
  EXPECT_FALSE(receiver.may_hold(0, 0));
  EXPECT_FALSE(receiver.may_hold((BlockSet{1} << kBlocksOfEach) - 1, kOfEach * kBlockBytes))
      << "longer than any";
}

TEST(BlockPoolTest, WhatIsFullIsNotFilledAgainBeforeItIsEmptied) {
  Blocks blocks;
  BlockPool sender = blocks.end(0);
  BlockPool receiver = blocks.end(1);
  const Message kept = send(sender, 3 * kBlockBytes, 1);
  // Others come and go, in what is left, until everything is full.
  std::vector<Message> full;
  while (sender.find(2 * kBlockBytes) != 0) {
    full.push_back(send(sender, 2 * kBlockBytes, static_cast<std::uint32_t>(full.size())));
    EXPECT_EQ(full.back().blocks & kept.blocks, 0U);
  }
  EXPECT_EQ(full.size(), (kOfEach - 3) / 2);
  EXPECT_NE(sender.find(1), 0U) << "one block is left";
  // In another order.
  for (std::size_t i = full.size(); i-- > 0;) {
    receive(receiver, full[i]);
    EXPECT_EQ(sender.find(3 * kBlockBytes) & kept.blocks, 0U);
  }
  receive(receiver, kept);
}

// The two of a balanced exchange pass the same blocks to and fro.
TEST(BlockPoolTest, WhatWasEmptiedLastIsFilledFirst) {
  Blocks blocks;
  std::array<BlockPool, 2> ends{blocks.end(0), blocks.end(1)};
  BlockSet used = 0;
  for (std::uint32_t turn = 0; turn < 20; ++turn) {
    std::array<Message, 2> messages;
    for (const std::size_t rank : {0U, 1U}) {
      messages[rank] = send(ends[rank], 5 * kBlockBytes, turn);
    }
    for (const std::size_t rank : {0U, 1U}) {
      receive(ends[rank], messages[1 - rank]);
      EXPECT_EQ(ends[rank].find(5 * kBlockBytes), messages[1 - rank].blocks);
      used |= messages[rank].blocks;
    }
  }
  EXPECT_EQ(std::popcount(used), 10);
  EXPECT_EQ(blocks.given_back[0] | blocks.given_back[1], 0U);
}

// A stream in one direction goes on for ever, through few blocks.
TEST(BlockPoolTest, WhatIsNotFilledIsGivenBack) {
  for (const std::size_t of_message : {1U, 3U, 16U}) {
    Blocks blocks;
    BlockPool sender = blocks.end(0);
    BlockPool receiver = blocks.end(1);
    BlockSet used = 0;
    for (std::uint32_t turn = 0; turn < 200; ++turn) {
      const Message first = send(sender, of_message * kBlockBytes, turn);
      const Message second = send(sender, of_message * kBlockBytes - 1, turn);
      ASSERT_NE(first.blocks, 0U) << turn;
      ASSERT_NE(second.blocks, 0U) << turn;
      receive(receiver, first);
      receive(receiver, second);
      used = turn < 100 ? 0 : used | first.blocks | second.blocks;
    }
    EXPECT_LE(std::popcount(used), 3 * static_cast<int>(of_message)) << of_message;
    // The other direction begins.
    for (std::uint32_t turn = 0; turn < 200; ++turn) {
      receive(sender, send(receiver, of_message * kBlockBytes, turn));
    }
  }
}

// Whoever sends more, and whatever is in between.
TEST(BlockPoolTest, NoBlockIsLost) {
  Blocks blocks;
  std::array<BlockPool, 2> ends{blocks.end(0), blocks.end(1)};
  std::mt19937 random(3);
  std::array<std::deque<Message>, 2> under_way;  // by sender
  for (std::uint32_t turn = 0; turn < 20'000; ++turn) {
    const std::size_t rank = random() % 8 < (turn / 2000 % 2 == 0 ? 1U : 7U) ? 0 : 1;
    if (random() % 2 == 0) {
      Message message = send(ends[rank], 1 + random() % ends[rank].most_bytes(), turn);
      if (message.blocks != 0) {
        under_way[rank].push_back(std::move(message));
      }
    } else if (!under_way[rank].empty()) {
      const std::size_t which = random() % under_way[rank].size();
      std::swap(under_way[rank][which], under_way[rank].front());
      receive(ends[1 - rank], under_way[rank].front());
      under_way[rank].pop_front();
    }
    // Nobody has a block that another one has, or that is under way.
    BlockSet full = 0;
    for (const std::deque<Message>& messages : under_way) {
      for (const Message& message : messages) {
        ASSERT_EQ(full & message.blocks, 0U);
        full |= message.blocks;
      }
    }
    for (BlockPool& end : ends) {
      ASSERT_EQ(full & end.find(kBlockBytes), 0U);
    }
  }
  for (const std::size_t rank : {0U, 1U}) {
    for (const Message& message : under_way[rank]) {
      receive(ends[1 - rank], message);
    }
  }
  BlockSet found = 0;
  for (BlockPool& end : ends) {
    while (end.find(kBlockBytes) != 0) {
      const BlockSet block = send(end, kBlockBytes, 0).blocks;
      ASSERT_EQ(found & block, 0U);
      found |= block;
    }
  }
  EXPECT_EQ(found, ~BlockSet{0});
}

// Each bit that the other end could turn, where there are as many blocks, and where there are
// fewer.
TEST(BlockPoolTest, WhatIsNowhereIsNotTakenBack) {
  for (const std::size_t of_each : {std::size_t{1}, std::size_t{4}, kOfEach}) {
    const BlockSet all = ~BlockSet{0} >> (64 - 2 * of_each);
    for (int bit = 0; bit < 64; ++bit) {
      Blocks blocks;
      BlockPool end({blocks.areas[0].data(), blocks.areas[1].data()}, 0, {of_each, kBlockBytes},
                    {&blocks.filled[0], &blocks.given_back[0]},
                    {&blocks.filled[1], &blocks.given_back[1]});
      end.pass(end.find(1));
      blocks.given_back[1] = BlockSet{1} << bit;
      for (BlockSet found = 0; (found = end.find(1)) != 0;) {
        ASSERT_EQ(found & ~all, 0U) << bit << " of " << of_each;
        end.pass(found);
      }
    }
  }
}

TEST(BlockPoolTest, WhatHasComeIsCopiedAndTheRestLater) {
  Blocks blocks;
  BlockPool sender = blocks.end(1);
  BlockPool receiver = blocks.end(0);
  // So that its blocks are not side by side.
  receive(receiver, send(sender, 3 * kBlockBytes, 1));
  receive(sender, send(receiver, kBlockBytes, 1));
  const std::vector<std::byte> sent = bytes_of(4 * kBlockBytes - 5, 3);
  const BlockSet found = sender.find(sent.size());
  ASSERT_EQ(std::popcount(found), 4);
  std::vector<std::byte> got(sent.size());
  EXPECT_EQ(receiver.copy(found, got.data(), got.size(), 0), 0U) << "nothing is there";
  // As if its sender had been stopped in the middle.
  const BlockSet rest = found & (found - 1) & ((found & (found - 1)) - 1);
  sender.fill(found & ~rest, sent.data(), 2 * kBlockBytes);
  EXPECT_EQ(receiver.copy(found, got.data(), got.size(), 0), 2 * kBlockBytes);
  EXPECT_EQ(receiver.copy(found, got.data(), got.size(), 2 * kBlockBytes), 2 * kBlockBytes);
  sender.fill(rest, sent.data() + 2 * kBlockBytes, sent.size() - 2 * kBlockBytes);
  EXPECT_EQ(receiver.copy(found, got.data(), got.size(), 2 * kBlockBytes), got.size());
  EXPECT_EQ(got, sent);
}

TEST(BlockPoolTest, ARankSendsToItself) {
  Blocks blocks;
  const BlockPool::Words words{&blocks.filled[0], &blocks.given_back[0]};
  BlockPool end({blocks.areas[0].data(), blocks.areas[0].data()}, 0, {kOfEach, kBlockBytes}, words,
                words);
  for (std::uint32_t turn = 0; turn < 100; ++turn) {
    const Message first = send(end, end.most_bytes(), turn);
    const Message second = send(end, end.most_bytes(), turn + 1);
    EXPECT_EQ(end.find(1), 0U);
    receive(end, second);
    receive(end, first);
  }
}

// While the receiver copies what the sender fills, both ways, for many turns of each block.
TEST(BlockPoolTest, BothEndsAtOnce) {
  constexpr std::uint32_t kMessages = 20'000;
  Blocks blocks;
  const std::size_t most = blocks.end(0).most_bytes();
  std::array<std::vector<BlockSet>, 2> announced{std::vector<BlockSet>(kMessages),
                                                 std::vector<BlockSet>(kMessages)};
  std::array<std::atomic<std::uint32_t>, 2> counts{};
  std::atomic<bool> has_failed{false};  // the other one is not to wait for ever
  const auto length_of = [&](std::size_t sender, std::uint32_t number) {
    return 1 + (number + sender) * 7919 % most;
  };
  run_ranks(2, [&](int rank) {
    const auto own = static_cast<std::size_t>(rank);
    const std::size_t other = 1 - own;
    BlockPool end = blocks.end(own);
    std::uint32_t sent = 0;
    std::uint32_t received = 0;
    while (!has_failed && (sent < kMessages || received < kMessages)) {
      bool has_moved = false;
      if (sent < kMessages) {
        const std::size_t length = length_of(own, sent);
        if (const BlockSet found = end.find(length); found != 0) {
          const std::vector<std::byte> bytes = bytes_of(length, sent);
          announced[own][sent] = found;
          counts[own].store(++sent, std::memory_order_release);
          end.fill(found, bytes.data(), length);
          has_moved = true;
        }
      }
      if (received < counts[other].load(std::memory_order_acquire)) {
        const std::size_t length = length_of(other, received);
        std::vector<std::byte> got(length);
        for (std::size_t done = 0; done != length && !has_failed;) {
          const std::size_t before =
              std::exchange(done, end.copy(announced[other][received], got.data(), length, done));
          if (done == before) {
            std::this_thread::yield();
          }
        }
        has_failed = has_failed || !end.may_hold(announced[other][received], length) ||
                     got != bytes_of(length, received);
        end.empty(announced[other][received]);
        ++received;
        has_moved = true;
      }
      if (!has_moved) {
        std::this_thread::yield();
      }
    }
  });
  EXPECT_FALSE(has_failed);
}

}  // namespace
}  // namespace pydist::testing
