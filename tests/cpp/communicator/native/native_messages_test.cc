// Point-to-point messages of the native engine.

#include <gtest/gtest.h>

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <deque>
#include <functional>
#include <future>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "ranks.h"

namespace {
std::atomic<bool> has_no_shared_memory{false};
}

// In place of the C library's: fails while a test says so.
extern "C" int posix_fallocate(int fd, off_t offset, off_t length) {
  return has_no_shared_memory ? ENOSPC : ::fallocate(fd, 0, offset, length) == 0 ? 0 : errno;
}

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;

TEST(NativeMessagesTest, BigCrossedSends) {
  run_ranks(2, [](RankOfTest& self) {
    const int peer = 1 - self.rank;
    std::vector<int> out(1'000'003, self.rank + 10);
    std::vector<int> in(1'000'003);
    const WorkPtr sent = self.communicator->submit(send_to(peer, 1, out));
    const WorkPtr received = self.communicator->submit(receive_from(peer, 1, in));
    // The send is waited for first, on both sides.
    sent->wait();
    received->wait();
    EXPECT_EQ(received->source_rank(), peer);
    EXPECT_EQ(in, std::vector<int>(1'000'003, peer + 10));
  });
}

TEST(NativeMessagesTest, ArriveWhereWorksAreOnlyLookedAt) {
  run_ranks(2, [](RankOfTest& self) {
    const int peer = 1 - self.rank;
    std::vector<int> out(100'000, self.rank + 10);
    std::vector<int> in(100'000);
    for (int turn = 0; turn < 50; ++turn) {
      std::fill(in.begin(), in.end(), 0);
      const WorkPtr received = self.communicator->submit(receive_from(peer, 1, in));
      const WorkPtr sent = self.communicator->submit(send_to(peer, 1, out));
      while (!sent->is_completed() || !received->is_completed()) {
        sent->wait_quietly(Deadline::in(std::chrono::nanoseconds(0)));
      }
      ASSERT_EQ(in, std::vector<int>(100'000, peer + 10));
    }
  });
}

TEST(NativeMessagesTest, EverybodyToEverybodyAtOnce) {
  run_ranks(4, [](RankOfTest& self) {
    std::vector<std::vector<int>> out;
    std::vector<std::vector<int>> in;
    std::vector<WorkPtr> works;
    for (int peer = 0; peer < self.size; ++peer) {
      out.emplace_back(30'000 + 1000 * peer, 100 * self.rank + peer);
      in.emplace_back(30'000 + 1000 * self.rank, -1);
    }
    for (int peer = 0; peer < self.size; ++peer) {  // itself included
      const auto index = static_cast<std::size_t>(peer);
      works.push_back(self.communicator->submit(send_to(peer, 3, out[index])));
    }
    for (int peer = self.size - 1; peer >= 0; --peer) {
      const auto index = static_cast<std::size_t>(peer);
      works.push_back(self.communicator->submit(receive_from(peer, 3, in[index])));
    }
    for (const WorkPtr& work : works) {
      work->wait();
    }
    for (int peer = 0; peer < self.size; ++peer) {
      EXPECT_EQ(in[static_cast<std::size_t>(peer)],
                std::vector<int>(30'000 + 1000 * self.rank, 100 * peer + self.rank));
    }
  });
}

TEST(NativeMessagesTest, TagsMatchOutOfOrder) {
  run_ranks(2, [](RankOfTest& self) {
    constexpr std::uint64_t kTags = 60;  // more than the announcements in flight
    std::vector<std::vector<int>> values;
    std::vector<WorkPtr> works;
    for (std::uint64_t tag = 0; tag < kTags; ++tag) {
      values.emplace_back(tag * 97, self.rank == 0 ? static_cast<int>(tag) : -1);
    }
    for (std::uint64_t turn = 0; turn < kTags; ++turn) {
      const std::uint64_t tag = self.rank == 0 ? turn : kTags - 1 - turn;
      works.push_back(self.communicator->submit(
          self.rank == 0 ? send_to(1, tag, values[tag]) : receive_from(0, tag, values[tag])));
    }
    for (const WorkPtr& work : works) {
      work->wait();
    }
    for (std::uint64_t tag = 0; tag < kTags; ++tag) {
      EXPECT_EQ(values[tag], std::vector<int>(tag * 97, static_cast<int>(tag)));
    }
  });
}

TEST(NativeMessagesTest, OneTagMatchesInOrder) {
  run_ranks(2, [](RankOfTest& self) {
    std::vector<std::vector<int>> values;
    std::vector<WorkPtr> works;
    for (int i = 0; i < 200; ++i) {
      // Short and long ones: they travel in different ways.
      values.emplace_back(i % 3 == 0 ? 20'000 : 3, self.rank == 0 ? i : -1);
    }
    for (auto& each : values) {
      works.push_back(self.communicator->submit(self.rank == 0 ? send_to(1, 7, each)
                                                               : receive_from(0, 7, each)));
    }
    for (const WorkPtr& work : works) {
      work->wait();
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(values[i].back(), static_cast<int>(i));
    }
  });
}

// A blocking call may be over at once, and goes behind what is under way otherwise.
TEST(NativeMessagesTest, BlockingOnesKeepTheirPlaceAmongOthers) {
  run_ranks(2, [](RankOfTest& self) {
    constexpr int kMessages = 400;
    std::deque<std::vector<int>> values;
    std::vector<WorkPtr> works;
    std::mt19937 dice(static_cast<unsigned>(self.rank));
    for (int i = 0; i < kMessages; ++i) {
      // Runs of blocking ones, between some that are waited for later; few are too long to ride.
      const bool blocks = (i / 20) % 2 == 0 || dice() % 2 == 0;
      values.emplace_back(i % 25 == 7 ? 5000 : 3, self.rank == 0 ? i : -1);
      Operation operation =
          self.rank == 0 ? send_to(1, 7, values.back()) : receive_from(0, 7, values.back());
      if (blocks) {
        const int source = self.communicator->run(std::move(operation));
        EXPECT_TRUE(self.rank == 0 || source == 0);
      } else {
        works.push_back(self.communicator->submit(std::move(operation)));
      }
      if (i % 50 == 49) {
        for (const WorkPtr& work : works) {
          work->wait();
        }
        works.clear();
      }
    }
    for (const WorkPtr& work : works) {
      work->wait();
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(values[i], std::vector<int>(values[i].size(), static_cast<int>(i)));
    }
  });
}

// Whose ends differ, on both ranks: the sender's call is over by then.
TEST(NativeMessagesTest, AMismatchOfShortOnesFailsBoth) {
  const auto errors = collect_errors(2, [](RankOfTest& self) {
    std::vector<int> values(self.rank == 0 ? 3 : 4, self.rank);
    if (self.rank == 0) {
      self.communicator->run(send_to(1, 0, values));
      self.communicator->run(receive_from(1, 1, values));
    } else {
      self.communicator->run(receive_from(0, 0, values));
    }
  });
  for (const std::exception_ptr& error : errors) {
    ASSERT_NE(error, nullptr);
    EXPECT_EQ(describe(error).kind, ErrorKind::kMismatch);
    EXPECT_EQ(describe(error).blame.ranks, (std::vector<int>{0, 1}));
  }
}

TEST(NativeMessagesTest, FromAnySource) {
  run_ranks(4, [](RankOfTest& self) {
    constexpr int kEach = 25;
    if (self.rank != 0) {
      for (int i = 0; i < kEach; ++i) {
        std::vector<int> value(static_cast<std::size_t>(i % 2 == 0 ? 1 : 5000),
                               1000 * self.rank + i);
        self.communicator->run(send_to(0, static_cast<std::uint64_t>(i % 2), value));
      }
      return;
    }
    std::vector<int> next(4, 0);
    std::vector<int> next_long(4, 1);
    for (int i = 0; i < 3 * kEach; ++i) {
      const bool is_long = i % kEach % 2 != 0;
      std::vector<int> value(is_long ? 5000 : 1);
      const int source = self.communicator->run(
          receive_from(kAnySource, static_cast<std::uint64_t>(is_long ? 1 : 0), value));
      ASSERT_GE(source, 1);
      ASSERT_LE(source, 3);
      // In order from each source, whatever comes in between.
      int& expected = (is_long ? next_long : next)[static_cast<std::size_t>(source)];
      ASSERT_EQ(value.back(), 1000 * source + expected);
      expected += 2;
    }
  });
}

TEST(NativeMessagesTest, ToItself) {
  for (const int size : {1, 2}) {
    run_ranks(size, [](RankOfTest& self) {
      std::vector<int> out(70'000, 4);
      std::vector<int> in(70'000);
      const WorkPtr sent = self.communicator->submit(send_to(self.rank, 9, out));
      EXPECT_EQ(self.communicator->run(receive_from(self.rank, 9, in)), self.rank);
      sent->wait();
      EXPECT_EQ(in, out);
    });
  }
}

TEST(NativeMessagesTest, ZeroElementsAndPendingOnesDisturbNobody) {
  run_ranks(2, [](RankOfTest& self) {
    std::vector<int> nothing;
    std::vector<int> never(100'000, 1);
    std::vector<int> value(17, self.rank);
    WorkPtr unasked;
    if (self.rank == 0) {
      // Big, and not asked for until everything else is through.
      unasked = self.communicator->submit(send_to(1, 99, never));
      self.communicator->run(send_to(1, 1, nothing));
      self.communicator->run(send_to(1, 2, value));
      unasked->wait();
    } else {
      unasked = self.communicator->submit(receive_from(0, 99, never));
      self.communicator->run(receive_from(0, 1, nothing));
      self.communicator->run(receive_from(0, 2, value));
      EXPECT_EQ(value, std::vector<int>(17, 0));
      unasked->wait();
    }
  });
}

TEST(NativeMessagesTest, MixedWithCollectives) {
  run_ranks(3, [](RankOfTest& self) {
    const int next = (self.rank + 1) % 3;
    const int previous = (self.rank + 2) % 3;
    for (int i = 0; i < 100; ++i) {
      std::vector<int> out(static_cast<std::size_t>(i * 50), self.rank + i);
      std::vector<int> in(out.size());
      std::vector<int> sum(100, 1);
      const WorkPtr received = self.communicator->submit(receive_from(previous, 1, in));
      const WorkPtr reduced = self.communicator->submit(all_reduce(sum));
      self.communicator->run(send_to(next, 1, out));
      received->wait();
      reduced->wait();
      ASSERT_EQ(in, std::vector<int>(out.size(), previous + i));
      ASSERT_EQ(sum, std::vector<int>(100, 3));
    }
  });
}

TEST(NativeMessagesTest, ThreadsOnOneGroup) {
  run_ranks(2, [](RankOfTest& self) {
    std::vector<std::thread> threads;
    for (std::uint64_t tag = 0; tag < 4; ++tag) {
      threads.emplace_back([&, tag] {
        for (int i = 0; i < 50; ++i) {
          std::vector<int> value(static_cast<std::size_t>(i * 37), self.rank == 0 ? i : -1);
          self.communicator->run(self.rank == 0 ? send_to(1, tag, value)
                                                : receive_from(0, tag, value));
          EXPECT_EQ(value, std::vector<int>(static_cast<std::size_t>(i * 37), i));
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  });
}

TEST(NativeMessagesTest, OtherSizeIsAMismatchOnBothSides) {
  for (const std::size_t count : {std::size_t{4}, std::size_t{40'000}}) {
    const auto errors = collect_errors(2, [&](RankOfTest& self) {
      std::vector<int> out(count, 1);
      std::vector<int> in(count + 1, -5);
      if (self.rank == 0) {
        // Short ones ride ahead; the sender learns at its next call.
        self.communicator->run(send_to(1, 0, out));
        self.communicator->run(barrier());
      } else {
        try {
          self.communicator->run(receive_from(0, 0, in));
        } catch (...) {
          EXPECT_EQ(in, std::vector<int>(count + 1, -5));
          throw;
        }
      }
    });
    for (const auto& error : errors) {
      ASSERT_NE(error, nullptr);
      EXPECT_EQ(describe(error).kind, ErrorKind::kMismatch) << describe(error).message;
      EXPECT_PRED2(contains, describe(error).message, join(count));
      EXPECT_PRED2(contains, describe(error).message, join(count + 1));
    }
  }
}

TEST(NativeMessagesTest, TimeoutNamesThePeer) {
  const auto errors = collect_errors(2, [](RankOfTest& self) {
    std::vector<int> value(3);
    if (self.rank == 0) {
      self.communicator->run(with_timeout(receive_from(1, 12, value), milliseconds(100)));
    } else {
      self.communicator->run(barrier());
    }
  });
  for (const auto& error : errors) {  // the one fails the group
    ASSERT_NE(error, nullptr);
    EXPECT_EQ(describe(error).kind, ErrorKind::kTimeout);
    EXPECT_PRED2(contains, describe(error).message, "receive from rank 1 (tag 12)");
    EXPECT_PRED2(contains, describe(error).message, "is in barrier #1");
  }
}

TEST(NativeMessagesTest, LostPeerFailsReceivesFromItAndFromAnybody) {
  for (const bool from_anybody : {false, true}) {
    const auto errors = collect_errors(2, [&](RankOfTest& self) {
      if (self.rank == 1) {
        std::this_thread::sleep_for(milliseconds(20));
        self.communicator->shutdown();
        return;
      }
      std::vector<int> value(3);
      self.communicator->run(receive_from(from_anybody ? kAnySource : 1, 0, value));
    });
    ASSERT_NE(errors[0], nullptr);
    const auto [kind, message, blame] = describe(errors[0]);
    EXPECT_EQ(kind, ErrorKind::kPeerLost) << message;
    EXPECT_EQ(blame.ranks, std::vector<int>{1}) << message;
    EXPECT_NE(blame.pid, 0) << message;
    EXPECT_EQ(errors[1], nullptr);
  }
}

TEST(NativeMessagesTest, WrongPeersAreRefused) {
  run_ranks(2, [](RankOfTest& self) {
    std::vector<int> value(3);
    for (const int peer : {2, -2, kAnySource}) {
      EXPECT_EQ(error_of([&] { self.communicator->run(send_to(peer, 0, value)); }).kind,
                ErrorKind::kInvalidUsage);
    }
    for (const int peer : {2, -2}) {
      EXPECT_EQ(error_of([&] { self.communicator->run(receive_from(peer, 0, value)); }).kind,
                ErrorKind::kInvalidUsage);
    }
  });
}

// -- several messages that start together ---------------------------------------------------------

// Calls `submit` where nobody starts a message until all of its messages are queued: in a callback,
// which holds up the progress thread while rank 0 drives nothing itself. Rank 1 sends `first`
// before that, which rank 0 hears and does not receive. Returns what the works ended with.
std::vector<ErrorDescription> errors_of_messages_started_together(
    RankOfTest& self, std::vector<int>& first,
    const std::function<std::vector<WorkPtr>()>& submit) {
  std::vector<int> signal(1);
  if (self.rank == 1) {
    static_cast<void>(self.store->get("rank 0 waits", Deadline::in(std::chrono::seconds(30))));
    self.communicator->run(send_to(0, 1, first));
    self.communicator->run(send_to(0, 2, signal));
    // Until rank 0 has failed.
    static_cast<void>(error_of([&] { self.communicator->run(barrier()); }));
    return {};
  }
  std::promise<std::vector<WorkPtr>> submitted;
  self.communicator->submit(receive_from(1, 2, signal))->on_completion([&](const Work::Outcome&) {
    submitted.set_value(submit());
  });
  self.store->set("rank 0 waits", "");
  std::vector<ErrorDescription> errors;
  for (const WorkPtr& work : submitted.get_future().get()) {
    errors.push_back(error_of([&] { work->wait(); }));
  }
  return errors;
}

TEST(NativeMessagesTest, AReceiveThatCannotStartEndsThoseBehindIt) {
  run_ranks(2, [](RankOfTest& self) {
    std::vector<int> five(5);
    std::vector<std::vector<int>> fours(3, std::vector<int>(4));
    const auto errors = errors_of_messages_started_together(self, five, [&] {
      return std::vector<WorkPtr>{self.communicator->submit(receive_from(1, 1, fours[0])),
                                  self.communicator->submit(receive_from(1, 7, fours[1])),
                                  self.communicator->submit(receive_from(1, 8, fours[2]))};
    });
    EXPECT_EQ(errors.size(), self.rank == 0 ? 3u : 0u);
    for (const ErrorDescription& error : errors) {
      EXPECT_EQ(error.kind, ErrorKind::kMismatch) << error.message;
    }
  });
}

TEST(NativeMessagesTest, ASendThatCannotStartEndsThoseBehindIt) {
  run_ranks(2, [](RankOfTest& self) {
    std::vector<int> values(5);
    const auto errors = errors_of_messages_started_together(self, values, [&] {
      has_no_shared_memory = true;
      return std::vector<WorkPtr>{self.communicator->submit(send_to(1, 1, values)),
                                  self.communicator->submit(send_to(1, 2, values)),
                                  self.communicator->submit(receive_from(1, 8, values))};
    });
    has_no_shared_memory = false;
    EXPECT_EQ(errors.size(), self.rank == 0 ? 3u : 0u);
    for (const ErrorDescription& error : errors) {
      EXPECT_PRED2(contains, error.message, "what passes between two ranks");
    }
  });
}

}  // namespace
}  // namespace pydist::testing
