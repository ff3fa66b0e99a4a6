// Blocks that a sender fills before anybody asks for the message.

#include "transport/filled_ahead.h"

#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "threads_as_ranks.h"

namespace pydist::testing {
namespace {

constexpr std::size_t kBlockBytes = 48;

struct Blocks {
  std::vector<std::byte> memory = std::vector<std::byte>(kAheadBlocks * kBlockBytes);
  Counter filled{0};
  Counter emptied{0};

  // An end of its own.
  [[nodiscard]] FilledAhead end() { return {memory.data(), kBlockBytes, filled, emptied}; }
};

std::vector<std::byte> bytes_of(std::size_t count, std::uint32_t seed) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) {
    bytes[i] = static_cast<std::byte>((i + 1) * (2 * seed + 1) >> 2);
  }
  return bytes;
}

TEST(FilledAheadTest, AMessageTakesAsManyBlocksAsItNeeds) {
  Blocks blocks;
  const FilledAhead end = blocks.end();
  EXPECT_EQ(end.most_bytes(), kAheadBlocks / 2 * kBlockBytes);
  for (const auto& [bytes, count] : {std::pair<std::size_t, int>{1, 1},
                                     {kBlockBytes, 1},
                                     {kBlockBytes + 1, 2},
                                     {end.most_bytes(), static_cast<int>(kAheadBlocks / 2)}}) {
    const BlockSet found = end.find_free(bytes);
    EXPECT_EQ(std::popcount(found), count) << bytes;
    EXPECT_TRUE(end.fit(found, bytes));
    EXPECT_FALSE(end.fit(found, bytes + kBlockBytes));
    EXPECT_FALSE(end.fit(found & (found - 1), bytes)) << "one too few for " << bytes;
  }
  EXPECT_FALSE(end.fit(0, 0));
  EXPECT_FALSE(end.fit(~BlockSet{0}, kAheadBlocks * kBlockBytes)) << "longer than any";
}

TEST(FilledAheadTest, WhatIsFullIsNotFilledAgainBeforeItIsEmptied) {
  Blocks blocks;
  FilledAhead sender = blocks.end();
  FilledAhead receiver = blocks.end();
  const std::vector<std::byte> kept = bytes_of(3 * kBlockBytes, 1);
  const BlockSet kept_in = sender.find_free(kept.size());
  sender.fill(kept_in, kept.data(), kept.size());
  // Others come and go, in what is left, until everything is full.
  std::vector<BlockSet> full;
  while (const BlockSet found = sender.find_free(2 * kBlockBytes)) {
    EXPECT_EQ(found & kept_in, 0U);
    const std::vector<std::byte> other = bytes_of(2 * kBlockBytes, 2);
    sender.fill(found, other.data(), other.size());
    full.push_back(found);
  }
  EXPECT_EQ(full.size(), (kAheadBlocks - 3) / 2);
  EXPECT_NE(sender.find_free(1), 0U) << "one block is left";
  receiver.empty(full[3]);
  EXPECT_EQ(std::popcount(sender.find_free(3 * kBlockBytes)), 3) << "with the one that was left";
  EXPECT_EQ(sender.find_free(4 * kBlockBytes), 0U);
  std::vector<std::byte> got(kept.size());
  EXPECT_EQ(receiver.copy(kept_in, got.data(), got.size(), 0), got.size());
  EXPECT_EQ(got, kept);
}

TEST(FilledAheadTest, WhatHasComeIsCopiedAndTheRestLater) {
  Blocks blocks;
  FilledAhead sender = blocks.end();
  FilledAhead receiver = blocks.end();
  // Not from the first block on, and with a gap.
  const std::vector<std::byte> other = bytes_of(kBlockBytes, 9);
  const BlockSet first = sender.find_free(1);
  sender.fill(first, other.data(), 1);
  const BlockSet second = sender.find_free(1);
  sender.fill(second, other.data(), 1);
  receiver.empty(first);
  const std::vector<std::byte> sent = bytes_of(4 * kBlockBytes - 5, 3);
  const BlockSet found = sender.find_free(sent.size());
  ASSERT_EQ(found & (first | second), first);
  std::vector<std::byte> got(sent.size());
  EXPECT_EQ(receiver.copy(found, got.data(), got.size(), 0), 0U) << "nothing is there";
  // As if its sender had been stopped in the middle.
  BlockSet begun = found;
  begun &= begun - 1;
  begun &= begun - 1;
  sender.fill(found & ~begun, sent.data(), 2 * kBlockBytes);
  EXPECT_EQ(receiver.copy(found, got.data(), got.size(), 0), 2 * kBlockBytes);
  EXPECT_EQ(receiver.copy(found, got.data(), got.size(), 2 * kBlockBytes), 2 * kBlockBytes);
  sender.fill(begun, sent.data() + 2 * kBlockBytes, sent.size() - 2 * kBlockBytes);
  EXPECT_EQ(receiver.copy(found, got.data(), got.size(), 2 * kBlockBytes), got.size());
  EXPECT_EQ(got, sent);
}

// While the receiver copies what the sender fills, for many turns of each block.
TEST(FilledAheadTest, BothEndsAtOnce) {
  constexpr std::uint32_t kMessages = 20'000;
  Blocks blocks;
  std::vector<BlockSet> announced(kMessages);
  std::atomic<std::uint32_t> count{0};
  const auto length_of = [&](std::uint32_t number) {
    return 1 + number * 7919 % blocks.end().most_bytes();
  };
  run_ranks(2, [&](int rank) {
    FilledAhead end = blocks.end();
    for (std::uint32_t number = 0; number < kMessages; ++number) {
      const std::size_t length = length_of(number);
      if (rank == 0) {
        const std::vector<std::byte> sent = bytes_of(length, number);
        while ((announced[number] = end.find_free(length)) == 0) {
          std::this_thread::yield();
        }
        count.store(number + 1, std::memory_order_release);
        end.fill(announced[number], sent.data(), length);
        continue;
      }
      while (count.load(std::memory_order_acquire) <= number) {
        std::this_thread::yield();
      }
      std::vector<std::byte> got(length);
      for (std::size_t done = 0; done != length;) {
        const std::size_t before =
            std::exchange(done, end.copy(announced[number], got.data(), length, done));
        if (done == before) {
          std::this_thread::yield();
        }
      }
      end.empty(announced[number]);
      ASSERT_EQ(got, bytes_of(length, number)) << number;
    }
  });
}

}  // namespace
}  // namespace pydist::testing
