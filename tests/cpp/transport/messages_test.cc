// Messages between ranks that are threads; each drives its own end. The file is long because all
// of it uses one group of such ranks.

#include "transport/messages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "transport/host_of_ranks.h"

namespace pydist::testing {
namespace {

TEST(MessagesTest, EverySizeArrives) {
  HostOfRanks host(2);
  // Around a cache line, what rides along, 8 blocks, what comes ahead, and all blocks.
  const std::size_t riding = host.most_riding();
  const std::vector<std::size_t> counts = {0,          1,      8,          9,      100,
                                           riding - 1, riding, riding + 1, 65535,  65536,
                                           65537,      131072, 262145,     1 << 20};
  host.run([&](int rank, Messages& messages) {
    std::vector<std::vector<std::uint32_t>> all;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      all.push_back(rank == 0 ? text(counts[i], static_cast<std::uint32_t>(i))
                              : std::vector<std::uint32_t>(counts[i], 1));
    }
    for (std::size_t i = 0; i < counts.size(); ++i) {
      if (rank == 0) {
        messages.send(1, i, buffer(all[i]), [](int peer) { EXPECT_EQ(peer, 1); });
      } else {
        messages.receive(0, i, buffer(all[i]), [](int peer) { EXPECT_EQ(peer, 0); });
      }
    }
    host.drain(rank, messages);
    for (std::size_t i = 0; i < counts.size(); ++i) {
      EXPECT_EQ(all[i], text(counts[i], static_cast<std::uint32_t>(i))) << counts[i];
    }
  });
}

TEST(MessagesTest, TagsMatchInAnyOrder) {
  constexpr std::uint64_t kTags = 40;
  HostOfRanks host(2);
  host.run([&](int rank, Messages& messages) {
    std::vector<std::vector<std::uint32_t>> all;
    std::vector<std::uint64_t> order(kTags);
    std::iota(order.begin(), order.end(), 0);
    // The receiver asks in another order than the sender sends.
    std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(rank)));
    for (std::uint64_t tag = 0; tag < kTags; ++tag) {
      const std::size_t count = tag % 3 == 0 ? 1 : 50 * tag;
      all.push_back(rank == 0 ? text(count, static_cast<std::uint32_t>(tag))
                              : std::vector<std::uint32_t>(count));
    }
    for (const std::uint64_t tag : order) {
      if (rank == 0) {
        messages.send(1, tag, buffer(all[tag]), ignore);
      } else {
        messages.receive(0, tag, buffer(all[tag]), ignore);
      }
    }
    host.drain(rank, messages);
    for (std::uint64_t tag = 0; tag < kTags; ++tag) {
      EXPECT_EQ(all[tag], text(all[tag].size(), static_cast<std::uint32_t>(tag))) << tag;
    }
  });
}

TEST(MessagesTest, OneTagMatchesInTheOrderOfSending) {
  for (const std::size_t count : {1u, 100u}) {
    constexpr std::uint32_t kMessages = 60;
    HostOfRanks host(2);
    host.run([&](int rank, Messages& messages) {
      std::vector<std::vector<std::uint32_t>> all;
      for (std::uint32_t i = 0; i < kMessages; ++i) {
        all.push_back(rank == 0 ? text(count, i) : std::vector<std::uint32_t>(count));
      }
      std::vector<std::uint32_t> done;
      for (std::uint32_t i = 0; i < kMessages; ++i) {
        if (rank == 0) {
          messages.send(1, 9, buffer(all[i]), [&done, i](int) { done.push_back(i); });
        } else {
          messages.receive(0, 9, buffer(all[i]), [&done, i](int) { done.push_back(i); });
        }
      }
      host.drain(rank, messages);
      EXPECT_TRUE(std::is_sorted(done.begin(), done.end()));
      for (std::uint32_t i = 0; i < kMessages; ++i) {
        EXPECT_EQ(all[i], text(count, i)) << i;
      }
    });
  }
}

TEST(MessagesTest, CrossedLargeSendsDoNotWaitForEachOther) {
  constexpr int kSize = 3;
  constexpr std::size_t kCount = 2'000'000;
  HostOfRanks host(kSize);
  host.run([&](int rank, Messages& messages) {
    auto mine = text(kCount, static_cast<std::uint32_t>(rank));
    std::vector<std::vector<std::uint32_t>> theirs(kSize, std::vector<std::uint32_t>(kCount));
    for (int peer = 0; peer < kSize; ++peer) {
      messages.send(peer, 1, buffer(mine), ignore);  // to itself as well
    }
    for (int peer = 0; peer < kSize; ++peer) {
      messages.receive(peer, 1, buffer(theirs[static_cast<std::size_t>(peer)]), ignore);
    }
    host.drain(rank, messages);
    for (int peer = 0; peer < kSize; ++peer) {
      EXPECT_EQ(theirs[static_cast<std::size_t>(peer)],
                text(kCount, static_cast<std::uint32_t>(peer)));
    }
  });
}

TEST(MessagesTest, ALargeMessageNobodyAsksForBlocksNoOther) {
  HostOfRanks host(2);
  host.run([&](int rank, Messages& messages) {
    auto large = text(1 << 20, 1);
    auto small = text(100, 2);
    std::vector<std::uint32_t> got_large(large.size());
    std::vector<std::uint32_t> got_small(small.size());
    bool is_small_done = false;
    if (rank == 0) {
      messages.send(1, 1, buffer(large), ignore);
      messages.send(1, 2, buffer(small), ignore);
    } else {
      messages.receive(0, 2, buffer(got_small), [&](int) { is_small_done = true; });
      host.drain(rank, messages);
      EXPECT_TRUE(is_small_done);
      EXPECT_EQ(got_small, small);
      messages.receive(0, 1, buffer(got_large), ignore);
    }
    host.drain(rank, messages);
    if (rank == 1) {
      EXPECT_EQ(got_large, large);
    }
  });
}

// Its sender is done with it at once, its receiver finds it whenever it asks.
TEST(MessagesTest, WhatIsFilledAheadWaitsForNobody) {
  // Blocks of 32 KiB, and of 20, of which as many come ahead as a power of two has room for.
  for (const auto& [ranks, most_bytes] : {std::pair{2, 512 << 10}, std::pair{20, 256 << 10}}) {
    HostOfRanks host(ranks);
    EXPECT_EQ(host.most_ahead() * sizeof(std::uint32_t), static_cast<std::size_t>(most_bytes));
    Messages sender = host.join(0);
    Messages receiver = host.join(1);
    const std::size_t block = host.lanes().ahead_pool(0, 1).block_bytes() / sizeof(std::uint32_t);
    for (const std::size_t count :
         {host.most_riding() + 1, block - 1, block, block + 1, 3 * block + 7, host.most_ahead()}) {
      std::vector<std::uint32_t> sent = text(count, 1);
      std::vector<std::uint32_t> overwritten = sent;
      std::vector<std::uint32_t> got(count, 0);
      sender.send(1, 0, buffer(overwritten), ignore);
      while (sender.advance()) {
      }
      EXPECT_TRUE(sender.is_idle()) << count;
      std::fill(overwritten.begin(), overwritten.end(), 0);
      receiver.receive(0, 0, buffer(got), ignore);
      while (receiver.advance()) {
      }
      EXPECT_TRUE(receiver.is_idle()) << count;
      EXPECT_EQ(got, sent);
    }
    std::vector<std::uint32_t> sent = text(host.most_ahead() + 1, 1);
    sender.send(1, 0, buffer(sent), ignore);
    while (sender.advance()) {
    }
    EXPECT_FALSE(sender.is_idle()) << "that it asks for";
  }
}

// What nobody asks for fills the blocks; others come in pieces meanwhile, and the blocks
// are used again when it has been asked for after all.
TEST(MessagesTest, FullBlocksAreInNobodysWay) {
  HostOfRanks host(2);
  Messages sender = host.join(0);
  Messages receiver = host.join(1);
  const std::size_t count = host.most_ahead() / 3;
  std::vector<std::uint32_t> sent = text(count, 1);
  std::vector<std::uint32_t> got(count, 0);
  const auto advance = [&] {
    while (sender.advance() || receiver.advance()) {
    }
  };
  for (int turn = 0; turn < 3; ++turn) {
    int unasked = 0;
    for (; sender.is_idle(); ++unasked) {
      sender.send(1, 1, buffer(sent), ignore);
      advance();
    }
    EXPECT_EQ(unasked, 6) << "five fit";
    for (int i = 0; i < 3; ++i) {
      std::fill(got.begin(), got.end(), 0);
      sender.send(1, 2, buffer(sent), ignore);
      receiver.receive(0, 2, buffer(got), ignore);
      advance();
      EXPECT_TRUE(receiver.is_idle());
      EXPECT_EQ(got, sent);
    }
    for (int i = 0; i < unasked; ++i) {
      std::fill(got.begin(), got.end(), 0);
      receiver.receive(0, 1, buffer(got), ignore);
      advance();
      EXPECT_EQ(got, sent);
    }
    EXPECT_TRUE(sender.is_idle() && receiver.is_idle());
  }
}

TEST(MessagesTest, BlocksThatCannotBeAreDamage) {
  for (const std::uint64_t blocks : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{7},
                                     std::uint64_t{3} << 31, ~std::uint64_t{0}}) {
    HostOfRanks host(2);
    Messages sender = host.join(0);
    Messages receiver = host.join(1);
    std::vector<std::uint32_t> sent = text(host.most_ahead() / 8, 1);  // two blocks
    std::vector<std::uint32_t> got(sent.size(), 0);
    sender.send(1, 0, buffer(sent), ignore);
    sender.advance();
    host.lanes().announcement(0, 1, 0).address = blocks;
    EXPECT_THROW(static_cast<void>(receiver.try_receive(0, 0, buffer(got))), Error) << blocks;
    receiver.receive(0, 0, buffer(got), ignore);
    expect_damage_by(0, receiver);
  }
}

TEST(MessagesTest, PiecesThatCannotBeAreDamage) {
  for (const std::uint64_t damage : {std::uint64_t{0xff}, std::uint64_t{1} << 20}) {
    HostOfRanks host(2);
    Messages sender = host.join(0);
    Messages receiver = host.join(1);
    std::vector<std::uint32_t> sent = text(host.most_ahead() + 1, 1);
    std::vector<std::uint32_t> got(sent.size(), 0);
    sender.send(1, 0, buffer(sent), ignore);
    receiver.receive(0, 0, buffer(got), ignore);
    sender.advance();
    receiver.advance();
    sender.advance();
    host.lanes().rings(0, 1).pieces[1].fetch_xor(damage);  // its block, and its length
    expect_damage_by(0, receiver);
  }
}

TEST(MessagesTest, AnySourceTakesFromEverybody) {
  constexpr int kSize = 5;
  for (const std::size_t count : {2u, 5'000u, 200'000u}) {
    HostOfRanks host(kSize);
    host.run([&](int rank, Messages& messages) {
      if (rank != 0) {
        auto mine = text(count, static_cast<std::uint32_t>(rank));
        messages.send(0, 3, buffer(mine), ignore);
        host.drain(rank, messages);
        return;
      }
      std::vector<std::vector<std::uint32_t>> got(kSize - 1, std::vector<std::uint32_t>(count));
      std::vector<int> sources(kSize - 1, -1);
      for (std::size_t i = 0; i < got.size(); ++i) {
        messages.receive(std::nullopt, 3, buffer(got[i]),
                         [&sources, i](int peer) { sources[i] = peer; });
      }
      host.drain(rank, messages);
      for (std::size_t i = 0; i < got.size(); ++i) {
        EXPECT_EQ(got[i], text(count, static_cast<std::uint32_t>(sources[i])));
      }
      std::sort(sources.begin(), sources.end());
      EXPECT_EQ(sources, (std::vector<int>{1, 2, 3, 4}));
    });
  }
}

TEST(MessagesTest, AnySourceRespectsTheTagAndWaitsItsTurn) {
  HostOfRanks host(2);
  host.run([&](int rank, Messages& messages) {
    auto first = text(4, 1);
    auto second = text(4, 2);
    std::vector<std::uint32_t> any(4);
    std::vector<std::uint32_t> particular(4);
    if (rank == 1) {
      messages.send(0, 5, buffer(first), ignore);
      messages.send(0, 6, buffer(second), ignore);
    } else {
      messages.receive(std::nullopt, 6, buffer(any), [](int peer) { EXPECT_EQ(peer, 1); });
      messages.receive(1, 5, buffer(particular), ignore);
    }
    host.drain(rank, messages);
    if (rank == 0) {
      EXPECT_EQ(any, second);
      EXPECT_EQ(particular, first);
    }
  });
}

TEST(MessagesTest, ManySmallOnesBeforeAnybodyAsks) {
  // More than a lane announces at a time, sent before the receiver posts its first receive.
  constexpr std::uint32_t kMessages = 100;
  HostOfRanks host(2);
  Messages sender = host.join(0);
  Messages receiver = host.join(1);
  std::vector<std::vector<std::uint32_t>> sent;
  std::vector<std::vector<std::uint32_t>> got(kMessages);
  std::uint32_t sends_done = 0;
  for (std::uint32_t i = 0; i < kMessages; ++i) {
    got[i].resize(i % 2 == 0 ? 3 : host.most_riding());
    sent.push_back(text(got[i].size(), i));
  }
  for (std::uint32_t i = 0; i < kMessages; ++i) {
    sender.send(1, i, buffer(sent[i]), [&](int) { ++sends_done; });
  }
  while (sender.advance() || receiver.advance()) {
  }
  EXPECT_EQ(sends_done, kLaneDepth) << "what rides along is done once it is announced";
  EXPECT_TRUE(receiver.is_idle());
  for (std::uint32_t i = kMessages; i-- > 0;) {
    receiver.receive(0, i, buffer(got[i]), ignore);
    while (sender.advance() || receiver.advance()) {
    }
  }
  EXPECT_TRUE(sender.is_idle());
  EXPECT_TRUE(receiver.is_idle());
  EXPECT_EQ(got, sent);
}

TEST(MessagesTest, ManyLargeOnesBeforeAnybodyAsks) {
  constexpr std::uint32_t kMessages = 50;
  HostOfRanks host(2);
  Messages sender = host.join(0);
  Messages receiver = host.join(1);
  std::vector<std::vector<std::uint32_t>> sent;
  std::vector<std::vector<std::uint32_t>> got(kMessages, std::vector<std::uint32_t>(70'000));
  for (std::uint32_t i = 0; i < kMessages; ++i) {
    sent.push_back(text(70'000, i));
  }
  for (std::uint32_t i = 0; i < kMessages; ++i) {
    sender.send(1, i, buffer(sent[i]), ignore);
  }
  // All at once, from the last to the first: more than there are grants.
  for (std::uint32_t i = kMessages; i-- > 0;) {
    receiver.receive(0, i, buffer(got[i]), ignore);
  }
  while (sender.advance() || receiver.advance()) {
  }
  EXPECT_TRUE(sender.is_idle());
  EXPECT_TRUE(receiver.is_idle());
  EXPECT_EQ(got, sent);
}

TEST(MessagesTest, ARankSendsToItself) {
  HostOfRanks host(1);
  Messages messages = host.join(0);
  for (const std::size_t count : {0u, 3u, 100'000u, 300'000u}) {
    auto sent = text(count, 4);
    std::vector<std::uint32_t> got(count);
    int done = 0;
    messages.receive(count % 2 == 0 ? std::nullopt : std::optional(0), 8, buffer(got),
                     [&](int peer) { done += peer == 0 ? 1 : 100; });
    messages.send(0, 8, buffer(sent), [&](int peer) { done += peer == 0 ? 1 : 100; });
    while (messages.advance()) {
    }
    EXPECT_EQ(done, 2);
    EXPECT_EQ(got, sent);
    EXPECT_TRUE(messages.is_idle());
  }
}

TEST(MessagesTest, NoElementsNeedNoMemory) {
  HostOfRanks host(2);
  host.run([&](int rank, Messages& messages) {
    const Buffer nothing{nullptr, 0, DType::kFloat32, {}};
    int done = 0;
    if (rank == 0) {
      messages.send(1, 0, nothing, [&](int) { ++done; });
    } else {
      messages.receive(0, 0, nothing, [&](int) { ++done; });
    }
    host.drain(rank, messages);
    EXPECT_EQ(done, 1);
  });
}

struct MismatchCase {
  Buffer sent;
  Buffer received;
};

TEST(MessagesTest, ReceiversNameBothSidesOfAMismatch) {
  std::vector<std::byte> memory(4096);
  std::vector<std::byte> untouched(4096, std::byte{0x77});
  void* const from = memory.data();
  void* const to = untouched.data();
  const std::vector<MismatchCase> cases = {
      {{from, 4, DType::kFloat32, {}}, {to, 5, DType::kFloat32, {}}},
      {{from, 4, DType::kFloat32, {}}, {to, 4, DType::kInt32, {}}},
      {{from, 512, DType::kFloat64, {}}, {to, 1024, DType::kFloat32, {}}},
      {{from, 0, DType::kFloat32, {}}, {to, 1, DType::kFloat32, {}}},
      {{from, 1000, DType::kUInt8, {}}, {to, 0, DType::kUInt8, {}}},
  };
  for (const bool asks_first : {true, false}) {
    for (const MismatchCase& each : cases) {
      HostOfRanks host(2);
      Messages sender = host.join(0);
      Messages receiver = host.join(1);
      sender.send(1, 77, each.sent, ignore);
      sender.advance();
      try {
        if (!asks_first) {
          // Heard before its receive is posted.
          std::vector<std::uint32_t> other(1);
          receiver.receive(0, 1, buffer(other), ignore);
          receiver.advance();
          receiver.receive(0, 77, each.received, ignore);
        } else {
          receiver.receive(0, 77, each.received, ignore);
          receiver.advance();
        }
        FAIL() << "a message of another type or size was taken";
      } catch (const Mismatch& error) {
        const std::string what = error.what();
        EXPECT_NE(
            what.find(join(each.received.count, " elements of ", to_string(each.received.dtype))),
            std::string::npos)
            << what;
        EXPECT_NE(what.find(join(each.sent.count, " of ", to_string(each.sent.dtype))),
                  std::string::npos)
            << what;
        EXPECT_NE(what.find("tag 77"), std::string::npos) << what;
      }
      EXPECT_EQ(untouched, std::vector<std::byte>(4096, std::byte{0x77}));
    }
  }
}

TEST(MessagesTest, TheSameBytesAsAnotherTypeAreAMismatch) {
  // 8 float32 and 4 float64 ride along alike; only the types tell them apart.
  HostOfRanks host(2);
  Messages sender = host.join(0);
  Messages receiver = host.join(1);
  std::vector<std::byte> memory(32);
  sender.send(1, 0, {memory.data(), 8, DType::kFloat32, {}}, ignore);
  receiver.receive(0, 0, {memory.data(), 4, DType::kFloat64, {}}, ignore);
  sender.advance();
  EXPECT_THROW(receiver.advance(), Mismatch);
}

TEST(MessagesTest, APingPongOfMessages) {
  // A ping-pong whose next message starts when the last one is through.
  constexpr int kTurns = 500;
  HostOfRanks host(2);
  host.run([&](int rank, Messages& messages) {
    std::vector<std::uint32_t> ball(20, 0);
    for (int turn = 0; turn < kTurns; ++turn) {
      if (turn % 2 == rank) {
        ball[0] = static_cast<std::uint32_t>(turn);
        messages.send(1 - rank, 0, buffer(ball), ignore);
      } else {
        messages.receive(1 - rank, 0, buffer(ball), ignore);
      }
      host.drain(rank, messages);
      EXPECT_EQ(ball[0], static_cast<std::uint32_t>(turn));
    }
  });
}

TEST(MessagesTest, RandomTrafficAmongMoreRanksThanCores) {
  constexpr int kSize = 6;
  constexpr int kMessages = 120;
  struct Letter {
    int from, to;
    std::uint64_t tag;
    std::size_t count;
  };
  std::mt19937 random(11);
  std::vector<Letter> letters;
  for (int i = 0; i < kMessages; ++i) {
    letters.push_back({static_cast<int>(random() % kSize), static_cast<int>(random() % kSize),
                       // Distinct tags, so that each letter has one receive.
                       static_cast<std::uint64_t>(i),
                       random() % 2 == 0 ? random() % 9 : random() % 100'000});
  }
  HostOfRanks host(kSize);
  host.run([&](int rank, Messages& messages) {
    std::mt19937 own(static_cast<unsigned>(rank));
    std::vector<int> order(kMessages);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), own);
    std::vector<std::vector<std::uint32_t>> out(kMessages);
    std::vector<std::vector<std::uint32_t>> in(kMessages);
    for (const int i : order) {
      const auto index = static_cast<std::size_t>(i);
      const Letter& letter = letters[index];
      if (letter.from == rank) {
        out[index] = text(letter.count, static_cast<std::uint32_t>(i));
        messages.send(letter.to, letter.tag, buffer(out[index]), ignore);
      }
      if (letter.to == rank) {
        in[index].resize(letter.count);
        messages.receive(own() % 2 == 0 ? std::nullopt : std::optional(letter.from), letter.tag,
                         buffer(in[index]), [&letter](int peer) { EXPECT_EQ(peer, letter.from); });
      }
      if (own() % 3 == 0) {
        messages.advance();
      }
    }
    host.drain(rank, messages);
    for (int i = 0; i < kMessages; ++i) {
      const auto index = static_cast<std::size_t>(i);
      if (letters[index].to == rank) {
        EXPECT_EQ(in[index], text(letters[index].count, static_cast<std::uint32_t>(i)));
      }
    }
  });
}

}  // namespace
}  // namespace pydist::testing
