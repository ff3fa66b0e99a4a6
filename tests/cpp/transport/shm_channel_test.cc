#include "transport/shm_channel.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "base/error.h"

namespace pydist {
namespace {

struct Road {
  explicit Road(std::size_t bytes, std::size_t count)
      : slots(bytes * count),
        lengths(count),
        memory{slots.data(), bytes, count, &sent, &released, lengths.data()} {}

  std::vector<std::byte> slots;
  std::vector<std::uint32_t> lengths;
  alignas(64) Counter sent{0};
  alignas(64) Counter released{0};
  ShmChannelMemory memory;
  Doorbell sender_bell{};
  Doorbell receiver_bell{};
};

void wait(Condition condition) {
  while (!condition.holds()) {
    std::this_thread::yield();
  }
}

TEST(ShmChannelTest, SlotsFillUpAndAreFreedInOrder) {
  Road road(16, 3);
  ShmSendChannel sender(road.memory, 1, road.receiver_bell);
  ShmReceiveChannel receiver(road.memory, 0, road.sender_bell);
  EXPECT_EQ(sender.slot_bytes(), 16u);
  EXPECT_FALSE(receiver.until_received().holds());
  EXPECT_EQ(receiver.until_received().rank(), 0);
  EXPECT_TRUE(sender.until_reusable().holds());
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(sender.until_free().holds()) << i;
    std::memset(sender.slot(), i + 1, 16);
    sender.send(16);
  }
  EXPECT_FALSE(sender.until_free().holds());
  EXPECT_EQ(sender.until_free().rank(), 1);
  EXPECT_FALSE(sender.until_reusable().holds());
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(receiver.until_received().holds());
    EXPECT_EQ(receiver.slot()[15], static_cast<std::byte>(i + 1));
    receiver.release();
    EXPECT_TRUE(sender.until_free().holds());
    EXPECT_EQ(sender.until_reusable().holds(), i == 2);
  }
  EXPECT_FALSE(receiver.until_received().holds());
}

TEST(ShmChannelTest, TheReceiverLooksAtTheSendersMemory) {
  Road road(64, 2);
  ShmSendChannel sender(road.memory, 1, road.receiver_bell);
  ShmReceiveChannel receiver(road.memory, 0, road.sender_bell);
  std::byte* const filled = sender.slot();
  sender.send(0);  // nothing in it is a message too
  ASSERT_TRUE(receiver.until_received().holds());
  EXPECT_EQ(receiver.slot().data(), filled);
  EXPECT_EQ(receiver.slot().size(), 0u);
}

TEST(ShmChannelTest, ASlotIsAsLongAsItWasSent) {
  Road road(16, 2);
  ShmSendChannel sender(road.memory, 1, road.receiver_bell);
  ShmReceiveChannel receiver(road.memory, 0, road.sender_bell);
  const std::vector<std::byte> elsewhere(11, std::byte{7});
  sender.send_from(elsewhere.data(), elsewhere.size());
  EXPECT_TRUE(sender.until_written().holds());
  sender.send_from(nullptr, 0);
  ASSERT_TRUE(receiver.until_received().holds());
  EXPECT_EQ(std::vector(receiver.slot().begin(), receiver.slot().end()), elsewhere);
  receiver.release();
  ASSERT_TRUE(receiver.until_received().holds());
  EXPECT_EQ(receiver.slot().size(), 0u);
}

TEST(ShmChannelTest, MoreThanASlotIsNoticed) {
  Road road(16, 2);
  ShmSendChannel sender(road.memory, 1, road.receiver_bell);
  EXPECT_THROW(sender.send(17), Error);
  EXPECT_EQ(road.sent.load(), 0u);
}

TEST(ShmChannelTest, NewEndsGoOnWhereTheOldOnesStopped) {
  Road road(8, 2);
  for (int round = 0; round < 7; ++round) {
    ShmSendChannel sender(road.memory, 1, road.receiver_bell);
    ShmReceiveChannel receiver(road.memory, 0, road.sender_bell);
    ASSERT_TRUE(sender.until_free().holds());
    std::memset(sender.slot(), round, 8);
    sender.send(8);
    ASSERT_TRUE(receiver.until_received().holds());
    EXPECT_EQ(receiver.slot()[0], static_cast<std::byte>(round));
    receiver.release();
  }
}

TEST(ShmChannelTest, ThreadsPassALongText) {
  for (const std::size_t slots : {1u, 2u, 5u}) {
    Road road(256, slots);
    constexpr std::uint64_t kMessages = 5'000;
    std::thread receiving([&] {
      ShmReceiveChannel receiver(road.memory, 0, road.sender_bell);
      for (std::uint64_t i = 0; i < kMessages; ++i) {
        wait(receiver.until_received());
        for (std::size_t word = 0; word < 32; ++word) {
          std::uint64_t value = 0;
          std::memcpy(&value, receiver.slot().data() + word * 8, 8);
          ASSERT_EQ(value, i * 32 + word);
        }
        receiver.release();
      }
    });
    ShmSendChannel sender(road.memory, 1, road.receiver_bell);
    for (std::uint64_t i = 0; i < kMessages; ++i) {
      wait(sender.until_free());
      for (std::size_t word = 0; word < 32; ++word) {
        const std::uint64_t value = i * 32 + word;
        std::memcpy(sender.slot() + word * 8, &value, 8);
      }
      sender.send(256);
    }
    wait(sender.until_reusable());
    receiving.join();
  }
}

TEST(ShmChannelTest, EveryStepRingsTheOtherEnd) {
  // Both sleep for longer than the test may take.
  Road road(8, 1);
  const auto sleep_until = [](Condition condition, Doorbell& bell) {
    while (!condition.holds()) {
      Sleeper sleeper(bell);
      if (!condition.holds()) {
        sleeper.sleep(std::chrono::seconds(55));
      }
    }
  };
  constexpr int kMessages = 3'000;
  std::thread receiving([&] {
    ShmReceiveChannel receiver(road.memory, 0, road.sender_bell);
    for (int i = 0; i < kMessages; ++i) {
      sleep_until(receiver.until_received(), road.receiver_bell);
      receiver.release();
    }
  });
  ShmSendChannel sender(road.memory, 1, road.receiver_bell);
  for (int i = 0; i < kMessages; ++i) {
    sleep_until(sender.until_free(), road.sender_bell);
    sender.send(8);
  }
  sleep_until(sender.until_reusable(), road.sender_bell);
  receiving.join();
}

}  // namespace
}  // namespace pydist
