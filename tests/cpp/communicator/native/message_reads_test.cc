// What counts of a message that was copied from where its sender has it.

#include "communicator/native/message_reads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/error.h"
#include "collectives/shared_memory/ranks_in_place.h"

namespace pydist::testing {
namespace {

constexpr int kReceiver = 0;
constexpr int kSender = 1;

class MessageReadsTest : public ::testing::Test {
 protected:
  [[nodiscard]] static std::unique_ptr<MessageReads> reads_of(const SharingRanks& ranks, int rank) {
    return message_reads({std::shared_ptr<void>(), &ranks.group(rank)});
  }
  [[nodiscard]] static Buffer buffer(const std::byte* data) {
    return {const_cast<std::byte*>(data), kBytes, DType::kUInt8, {}};
  }
  // Whether the receiver can copy what the sender has there.
  [[nodiscard]] bool read(const SharingRanks& ranks, const std::byte* data) {
    return read(ranks, reads_of(ranks, kSender)->place_of(kReceiver, buffer(data)));
  }
  [[nodiscard]] bool read(const SharingRanks& ranks, const MessagePlace& place) {
    return reads_of(ranks, kReceiver)->read(kSender, place, std::span(got_));
  }

  static constexpr std::size_t kBytes = 10'000;
  std::vector<std::byte> sent_ = std::vector<std::byte>(kBytes, std::byte{7});
  std::vector<std::byte> got_ = std::vector<std::byte>(kBytes);
  SharingRanks ranks_{std::vector<ProcessMemory>(kRanksThatShare, own_memory())};
};

TEST_F(MessageReadsTest, CopiesOutOfAProcess) {
  EXPECT_EQ(reads_of(ranks_, kSender)->place_of(kReceiver, buffer(sent_.data())).in,
            MessagePlace::In::kProcess);
  EXPECT_TRUE(read(ranks_, sent_.data()));
  EXPECT_EQ(got_, sent_);
}

TEST_F(MessageReadsTest, CopiesOutOfASharedHeap) {
  SharingRanks strangers;  // that can't read each other's processes
  std::byte* const data = strangers.block(kSender) + 64;
  std::copy(sent_.begin(), sent_.end(), data);
  EXPECT_EQ(reads_of(strangers, kSender)->place_of(kReceiver, buffer(data)).in,
            MessagePlace::In::kNowhere)
      << "not all have opened their windows";
  strangers.switch_on();
  EXPECT_EQ(reads_of(strangers, kSender)->place_of(kReceiver, buffer(data)).in,
            MessagePlace::In::kSharedHeap);
  EXPECT_TRUE(read(strangers, data));
  EXPECT_EQ(got_, sent_);
}

TEST_F(MessageReadsTest, WhereNotAllMayReadThereIsNoPlace) {
  SharingRanks strangers;
  const MessagePlace place =
      reads_of(strangers, kSender)->place_of(kReceiver, buffer(sent_.data()));
  EXPECT_EQ(place.in, MessagePlace::In::kNowhere);
  EXPECT_FALSE(read(strangers, MessagePlace{MessagePlace::In::kProcess,
                                            reinterpret_cast<std::uintptr_t>(sent_.data())}));
}

TEST_F(MessageReadsTest, WhatCannotBeReadIsNotThere) {
  EXPECT_FALSE(read(ranks_, MessagePlace{MessagePlace::In::kProcess, 8}));
  const MessagePlace in_heap{MessagePlace::In::kSharedHeap, 1};
  EXPECT_FALSE(read(ranks_, in_heap)) << "its window is not on";
  ranks_.switch_on();
  EXPECT_TRUE(read(ranks_, in_heap));
  EXPECT_FALSE(read(ranks_, MessagePlace{MessagePlace::In::kSharedHeap, 0}));
  EXPECT_FALSE(read(ranks_, MessagePlace{MessagePlace::In::kSharedHeap, std::uint64_t{1} << 40}));
  EXPECT_FALSE(read(ranks_, MessagePlace{MessagePlace::In::kSharedHeap, ~std::uint64_t{0}}));
}

// Its memory is its own again: nobody knows what has been read.
TEST_F(MessageReadsTest, WhoHasLeftIsNotBelieved) {
  ranks_.switch_on();
  ranks_.group(kReceiver).segment().control(kSender).has_left.store(1);
  EXPECT_FALSE(read(ranks_, sent_.data()));
  EXPECT_FALSE(read(ranks_, ranks_.block(kSender)));
}

TEST_F(MessageReadsTest, AFailedGroupThrows) {
  ranks_.switch_on();
  EXPECT_TRUE(ranks_.group(2).segment().failure().set(ErrorKind::kAborted, "a test", 2));
  EXPECT_THROW(static_cast<void>(read(ranks_, sent_.data())), Aborted);
  EXPECT_THROW(static_cast<void>(read(ranks_, ranks_.block(kSender))), Aborted);
}

}  // namespace
}  // namespace pydist::testing
