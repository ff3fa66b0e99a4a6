// The ranks of one host as threads, each with the messages of its own.

#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "threads_as_ranks.h"
#include "transport/message_ways.h"
#include "transport/messages.h"

namespace pydist::testing {

class HostOfRanks {
 public:
  explicit HostOfRanks(int size)
      : size_(size),
        memory_(
            SharedSegment::create("messages", LaneSegment::bytes(LaneTable(size), kMessageLanes)),
            LaneTable(size), kMessageLanes),
        bells_(std::make_unique<Doorbell[]>(static_cast<std::size_t>(size))) {
    for (int rank = 0; rank < size; ++rank) {
      memory_.reserve_counters(rank);
    }
  }

  [[nodiscard]] int size() const { return size_; }

  [[nodiscard]] Messages join(int rank, std::unique_ptr<MessageReads> reads = nullptr,
                              MessageWays ways = MessageWays(std::nullopt)) {
    std::vector<Doorbell*> bells;
    for (int peer = 0; peer < size_; ++peer) {
      bells.push_back(&bell(peer));
    }
    return Messages(rank, size_, memory_, bells, /*carrier=*/nullptr, std::move(reads),
                    std::move(ways));
  }

  [[nodiscard]] const LaneSegment& lanes() const { return memory_; }

  // Elements that ride along with an announcement.
  [[nodiscard]] std::size_t most_riding() const {
    return memory_.most_riding_bytes(0, 1) / sizeof(std::uint32_t);
  }

  // Elements of the longest message that is filled ahead.
  [[nodiscard]] std::size_t most_ahead() const {
    return memory_.ahead_pool(0, 1).most_bytes() / sizeof(std::uint32_t);
  }

  // Runs the ranks on threads, each with its Messages.
  void run(const std::function<void(int, Messages&)>& body) {
    run_ranks(size_, [&](int rank) {
      Messages messages = join(rank);
      body(rank, messages);
    });
  }

  // Moves `messages` along until nothing is under way, asleep while nothing can be done.
  void drain(int rank, Messages& messages) {
    const Deadline deadline = Deadline::in(std::chrono::seconds(50));
    while (!messages.is_idle()) {
      if (messages.advance()) {
        continue;
      }
      Sleeper sleeper(bell(rank));
      if (!messages.advance()) {
        // Longer than the test may take: a bell that is not rung fails it.
        sleeper.sleep(std::chrono::seconds(55));
      }
      ASSERT_FALSE(deadline.has_passed()) << "rank " << rank << " has messages under way";
    }
  }

 private:
  [[nodiscard]] Doorbell& bell(int rank) { return bells_[static_cast<std::size_t>(rank)]; }

  int size_;
  LaneSegment memory_;
  std::unique_ptr<Doorbell[]> bells_;
};

// By which reading has turned out to be quicker, for messages of up to so many bits of length.
inline MessageWays ways_that_read(int longest = 25, bool only_if_both_send = false) {
  // Once found out, it is not looked at again.
  MessageWays ways(
      TuningRhythm{.uses_before_first = 4, .rounds = 1, .uses_for_one_look = std::size_t{1} << 40});
  for (const bool do_both_send : {false, true}) {
    if (only_if_both_send && !do_both_send) {
      continue;
    }
    for (int length = 12; length <= longest; ++length) {
      MessageWays::Time now{};
      for (int message = 0; message < 20; ++message) {
        const MessageWays::Way way =
            ways.choose(std::size_t{1} << length, TunedMemory::kOrdinary, do_both_send, now);
        const MessageWays::Time before = now;
        now += std::chrono::microseconds(way.is_read() ? 1 : 5);
        MessageWays::note(way, before, now);
      }
    }
  }
  return ways;
}

inline Buffer buffer(std::vector<std::uint32_t>& values) {
  return {values.data(), values.size(), DType::kUInt32, {}};
}

inline std::vector<std::uint32_t> text(std::size_t count, std::uint32_t seed) {
  std::vector<std::uint32_t> values(count);
  std::iota(values.begin(), values.end(), seed * 1'000'003u);
  return values;
}

inline void ignore(int) {}

// `messages` finds that what `rank` has written can't be.
inline void expect_damage_by(int rank, Messages& messages) {
  try {
    messages.advance();
    ADD_FAILURE() << "it was believed";
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find(join("Rank ", rank)), std::string::npos) << what;
    EXPECT_NE(what.find("shared memory has been damaged"), std::string::npos) << what;
  }
}

}  // namespace pydist::testing
