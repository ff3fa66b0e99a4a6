#include "health/doorbell.h"

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "memory/shared_segment.h"

namespace pydist {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;

TEST(DoorbellTest, SleepEndsAfterItsTime) {
  auto bell = std::make_unique<Doorbell>();
  const auto before = Clock::now();
  Sleeper sleeper(*bell);
  sleeper.sleep(milliseconds(30));
  EXPECT_GE(Clock::now() - before, milliseconds(25));
}

TEST(DoorbellTest, NoTimeIsNoSleep) {
  auto bell = std::make_unique<Doorbell>();
  const auto before = Clock::now();
  Sleeper sleeper(*bell);
  sleeper.sleep(nanoseconds(0));
  sleeper.sleep(nanoseconds(-5));
  EXPECT_LT(Clock::now() - before, seconds(5));
}

TEST(DoorbellTest, ARingBetweenAnnouncementAndSleepIsNotLost) {
  auto bell = std::make_unique<Doorbell>();
  const auto before = Clock::now();
  Sleeper sleeper(*bell);
  bell->ring();
  sleeper.sleep(seconds(50));
  EXPECT_LT(Clock::now() - before, seconds(10));
}

TEST(DoorbellTest, ARingBeforeTheAnnouncementWakesNobody) {
  auto bell = std::make_unique<Doorbell>();
  bell->ring();
  const auto before = Clock::now();
  Sleeper sleeper(*bell);
  sleeper.sleep(milliseconds(30));
  EXPECT_GE(Clock::now() - before, milliseconds(25));
}

TEST(DoorbellTest, OneRingWakesAllSleepers) {
  auto bell = std::make_unique<Doorbell>();
  std::atomic<int> awake{0};
  std::atomic<int> announced{0};
  std::vector<std::thread> threads;
  const auto before = Clock::now();
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      Sleeper sleeper(*bell);
      ++announced;
      sleeper.sleep(seconds(50));
      ++awake;
    });
  }
  while (announced != 4) {
    std::this_thread::yield();
  }
  bell->ring();
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(awake.load(), 4);
  EXPECT_LT(Clock::now() - before, seconds(20));
}

// Two sides pass a number to and fro; each sleeps for much longer than the test may take, so that
// one lost wake-up fails it.
void play(std::atomic<std::uint64_t>& ball, Doorbell& mine, Doorbell& other, std::uint64_t start,
          std::uint64_t end, bool spins_a_little) {
  for (std::uint64_t turn = start; turn < end; turn += 2) {
    for (int i = 0; spins_a_little && i < 50 && ball.load(std::memory_order_acquire) != turn; ++i) {
      spin_pause();
    }
    while (ball.load(std::memory_order_acquire) != turn) {
      Sleeper sleeper(mine);
      if (ball.load(std::memory_order_acquire) == turn) {
        break;
      }
      sleeper.sleep(seconds(55));
    }
    ball.store(turn + 1, std::memory_order_release);
    other.ring();
  }
}

TEST(DoorbellTest, NoWakeUpIsLostBetweenThreads) {
  for (const bool spins : {false, true}) {
    auto bells = std::make_unique<Doorbell[]>(2);
    std::atomic<std::uint64_t> ball{0};
    std::thread other([&] { play(ball, bells[1], bells[0], 1, 10'000, spins); });
    play(ball, bells[0], bells[1], 0, 10'000, spins);
    other.join();
    EXPECT_EQ(ball.load(), 10'000u);
  }
}

TEST(DoorbellTest, NoWakeUpIsLostBetweenProcesses) {
  struct Table {
    Doorbell bells[2];
    std::atomic<std::uint64_t> ball;
  };
  const SharedSegment segment = SharedSegment::create("doorbells", sizeof(Table));
  segment.reserve(0, segment.bytes(), "a test");
  auto& table = *reinterpret_cast<Table*>(segment.data());
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    play(table.ball, table.bells[1], table.bells[0], 1, 4'000, false);
    ::_exit(0);
  }
  play(table.ball, table.bells[0], table.bells[1], 0, 4'000, false);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(DoorbellTest, OneSleeperHearsManyRingers) {
  // One thread waits for any number of peers on one bell.
  constexpr std::size_t kRingers = 3;
  constexpr std::uint64_t kRounds = 2'000;
  auto bell = std::make_unique<Doorbell>();
  std::vector<std::atomic<std::uint64_t>> counters(kRingers);
  std::atomic<std::uint64_t> permitted{0};
  std::vector<std::thread> ringers;
  for (auto& counter : counters) {
    ringers.emplace_back([&] {
      for (std::uint64_t round = 1; round <= kRounds; ++round) {
        while (permitted.load(std::memory_order_acquire) < round) {
          std::this_thread::yield();
        }
        counter.store(round, std::memory_order_release);
        bell->ring();
      }
    });
  }
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    permitted.store(round, std::memory_order_release);
    for (auto& counter : counters) {
      while (counter.load(std::memory_order_acquire) < round) {
        Sleeper sleeper(*bell);
        if (counter.load(std::memory_order_acquire) < round) {
          sleeper.sleep(seconds(55));
        }
      }
    }
  }
  for (std::thread& ringer : ringers) {
    ringer.join();
  }
}

}  // namespace
}  // namespace pydist
