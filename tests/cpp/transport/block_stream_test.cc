// Long messages in blocks that two ranks pass to and fro.

#include "transport/block_stream.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "threads_as_ranks.h"

namespace pydist::testing {
namespace {

constexpr std::size_t kPieceBytes = 40;

// Between two ranks.
struct Stream {
  std::array<std::vector<std::byte>, 2> areas{std::vector<std::byte>(kStreamBlocks * kPieceBytes),
                                              std::vector<std::byte>(kStreamBlocks * kPieceBytes)};
  std::array<BlockWord, 2> given_back{};
  std::array<BlockStream::Pieces, 2> pieces{};

  [[nodiscard]] BlockStream end(std::size_t rank) {
    const auto words = [this](std::size_t of) {
      return BlockPool::Words{.filled = nullptr, .given_back = &given_back[of]};
    };
    return {BlockPool({areas[0].data(), areas[1].data()}, rank, {kStreamBlocks, kPieceBytes},
                      words(rank), words(1 - rank)),
            pieces[rank], pieces[1 - rank]};
  }
};

std::byte byte_of(std::size_t sender, std::uint32_t number, std::size_t index) {
  return static_cast<std::byte>(number * 31 + sender * 7 + index);
}

std::size_t length_of(std::size_t sender, std::uint32_t number) {
  return 1 + (number + sender) % kPieceBytes;
}

// The pieces of one end, each of another length.
struct End {
  std::size_t rank;
  BlockStream stream;
  std::uint32_t sent = 0;
  std::uint32_t received = 0;

  [[nodiscard]] bool send() {
    if (!stream.may_send()) {
      return false;
    }
    std::vector<std::byte> piece(length_of(rank, sent));
    for (std::size_t i = 0; i < piece.size(); ++i) {
      piece[i] = byte_of(rank, sent, i);
    }
    stream.send(piece.data(), piece.size());
    ++sent;
    return true;
  }

  // 1: it was right; 0: nothing has come.
  [[nodiscard]] int receive() {
    const std::optional<BlockStream::Piece> piece = stream.next();
    if (!piece) {
      return 0;
    }
    std::vector<std::byte> got(piece->bytes);
    if (piece->bytes != length_of(1 - rank, received) || !stream.receive(*piece, got.data())) {
      return -1;
    }
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (got[i] != byte_of(1 - rank, received, i)) {
        return -1;
      }
    }
    ++received;
    return 1;
  }
};

TEST(BlockStreamTest, OneWayTheOtherAndBoth) {
  Stream stream;
  std::array<End, 2> ends{End{0, stream.end(0)}, End{1, stream.end(1)}};
  std::mt19937 random(5);
  for (int turn = 0; turn < 30'000; ++turn) {
    // Of which one end does more for a while, or all.
    const unsigned share = turn / 3000 % 5U;
    End& end = ends[random() % 4 < share ? 0 : 1];
    if (random() % 2 == 0) {
      static_cast<void>(end.send());
    } else {
      ASSERT_GE(end.receive(), 0) << turn;
    }
    // Whatever has been: who has no block gets one once all that is under way has been received.
    if (turn % 1000 == 0) {
      for (End& each : ends) {
        while (each.receive() == 1) {
        }
      }
      for (End& each : ends) {
        ASSERT_TRUE(each.send()) << turn;
      }
    }
  }
  EXPECT_GT(ends[0].received, 1000U);
  EXPECT_GT(ends[1].received, 1000U);
}

// Several at a time, to an end that sends nothing.
TEST(BlockStreamTest, ASenderGoesOnForEver) {
  Stream stream;
  std::array<End, 2> ends{End{0, stream.end(0)}, End{1, stream.end(1)}};
  for (int turn = 0; turn < 100; ++turn) {
    for (std::size_t i = 0; i < kStreamBlocks; ++i) {
      ASSERT_TRUE(ends[0].send()) << turn;
    }
    while (ends[1].receive() == 1) {
    }
  }
  EXPECT_EQ(ends[1].received, 100 * kStreamBlocks);
}

TEST(BlockStreamTest, WhatCannotHaveBeenSentIsNotReceived) {
  Stream stream;
  BlockStream sender = stream.end(0);
  BlockStream receiver = stream.end(1);
  std::array<std::byte, kPieceBytes> bytes{};
  EXPECT_FALSE(receiver.next());
  sender.send(bytes.data(), bytes.size());
  const std::optional<BlockStream::Piece> right = receiver.next();
  ASSERT_TRUE(right);
  const int blocks = 2 * kStreamBlocks;
  for (const BlockStream::Piece& wrong :
       {BlockStream::Piece{blocks, 1}, BlockStream::Piece{255, 1},
        BlockStream::Piece{right->block, kPieceBytes + 1},
        BlockStream::Piece{kStreamBlocks, 1}}) {  // the last is the receiver's own
    EXPECT_FALSE(receiver.receive(wrong, bytes.data())) << wrong.block << " " << wrong.bytes;
  }
  EXPECT_TRUE(receiver.receive(*right, bytes.data()));
  EXPECT_FALSE(receiver.next());
}

TEST(BlockStreamTest, BothEndsAtOnce) {
  constexpr std::uint32_t kPieces = 200'000;
  Stream stream;
  std::atomic<bool> has_failed{false};
  run_ranks(2, [&](int rank) {
    End end{static_cast<std::size_t>(rank), stream.end(static_cast<std::size_t>(rank))};
    while (!has_failed && (end.sent < kPieces || end.received < kPieces)) {
      const bool has_sent = end.sent < kPieces && end.send();
      const int come = end.receive();
      has_failed = has_failed || come < 0;
      if (!has_sent && come == 0) {
        std::this_thread::yield();
      }
    }
  });
  EXPECT_FALSE(has_failed);
}

}  // namespace
}  // namespace pydist::testing
