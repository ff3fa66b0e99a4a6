#include "memory/segment_exchange.h"

#include <gtest/gtest.h>

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <set>
#include <string>
#include <thread>

#include "base/error.h"
#include "memory/shared_segment.h"
#include "threads_as_ranks.h"

namespace pydist {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Answers on a thread of its own, as the monitor does.
class ServingThread {
 public:
  explicit ServingThread(SegmentServer& server) : server_(server), thread_([this] { run(); }) {}
  ~ServingThread() {
    stopping_ = true;
    thread_.join();
  }

 private:
  void run() {
    while (!stopping_) {
      pollfd readable{server_.fd(), POLLIN, 0};
      if (::poll(&readable, 1, 5) > 0) {
        server_.serve();
      }
    }
  }

  SegmentServer& server_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

TEST(SegmentExchangeTest, HandsOverWhatWasOffered) {
  SegmentServer server;
  const ServingThread serving(server);
  const SharedSegment a = SharedSegment::create("a", 4096);
  const SharedSegment b = SharedSegment::create("b", 2 * 4096);
  server.offer("group/a", a.fd());
  server.offer("group/b", b.fd());
  FetchedSegment fetched = fetch_segment(server.address(), "group/b", Deadline::in(seconds(10)));
  EXPECT_EQ(fetched.server_pid, ::getpid());
  EXPECT_NE(fetched.fd.get(), b.fd());
  EXPECT_EQ(SharedSegment::map(std::move(fetched.fd)).data(), b.data());
}

TEST(SegmentExchangeTest, AnOfferOutlivesItsDescriptor) {
  SegmentServer server;
  const ServingThread serving(server);
  {
    const SharedSegment gone = SharedSegment::create("gone", 3 * 4096);
    server.offer("key", gone.fd());
  }
  auto fetched = fetch_segment(server.address(), "key", Deadline::in(seconds(10)));
  EXPECT_EQ(SharedSegment::map(std::move(fetched.fd)).bytes(), 3u * 4096);
}

TEST(SegmentExchangeTest, AKeyThatComesLaterIsAskedForAgain) {
  SegmentServer server;
  const ServingThread serving(server);
  const SharedSegment segment = SharedSegment::create("late", 4096);
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(100));
    server.offer("late", segment.fd());
  });
  const auto fetched = fetch_segment(server.address(), "late", Deadline::in(seconds(20)));
  EXPECT_TRUE(fetched.fd);
  later.join();
}

TEST(SegmentExchangeTest, AServerThatIsSlowToServeIsWaitedFor) {
  SegmentServer server;
  const SharedSegment segment = SharedSegment::create("slow", 4096);
  server.offer("slow", segment.fd());
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(150));
    for (int i = 0; i < 200; ++i) {
      server.serve();
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  EXPECT_TRUE(fetch_segment(server.address(), "slow", Deadline::in(seconds(20))).fd);
  later.join();
}

TEST(SegmentExchangeTest, TheDeadlineHolds) {
  SegmentServer server;
  const ServingThread serving(server);
  const auto before = Deadline::Clock::now();
  try {
    static_cast<void>(fetch_segment(server.address(), "never", Deadline::in(milliseconds(100))));
    FAIL() << "a segment came out of nowhere";
  } catch (const Timeout& error) {
    EXPECT_NE(std::string(error.what()).find("never"), std::string::npos) << error.what();
  }
  const auto waited = Deadline::Clock::now() - before;
  EXPECT_GE(waited, milliseconds(100));
  EXPECT_LT(waited, seconds(5));
}

TEST(SegmentExchangeTest, AWithdrawnKeyIsUnknown) {
  SegmentServer server;
  const ServingThread serving(server);
  const SharedSegment segment = SharedSegment::create("withdrawn", 4096);
  server.offer("key", segment.fd());
  server.withdraw("key");
  server.withdraw("key");  // twice is fine
  EXPECT_THROW(
      static_cast<void>(fetch_segment(server.address(), "key", Deadline::in(milliseconds(50)))),
      Timeout);
}

TEST(SegmentExchangeTest, AnOfferReplacesTheOldOne) {
  SegmentServer server;
  const ServingThread serving(server);
  const SharedSegment old_one = SharedSegment::create("old", 4096);
  const SharedSegment new_one = SharedSegment::create("new", 4096);
  server.offer("key", old_one.fd());
  server.offer("key", new_one.fd());
  auto fetched = fetch_segment(server.address(), "key", Deadline::in(seconds(10)));
  EXPECT_EQ(SharedSegment::map(std::move(fetched.fd)).data(), new_one.data());
}

TEST(SegmentExchangeTest, AnAbsentServerIsAnErrorAtOnce) {
  const auto before = Deadline::Clock::now();
  EXPECT_THROW(
      static_cast<void>(fetch_segment("pydist-nobody-is-here", "key", Deadline::in(seconds(50)))),
      TransportError);
  EXPECT_LT(Deadline::Clock::now() - before, seconds(5));
}

TEST(SegmentExchangeTest, AServerThatGoesAwayEndsTheWait) {
  auto server = std::make_unique<SegmentServer>();
  const std::string address = server->address();
  std::thread leaving([&] {
    std::this_thread::sleep_for(milliseconds(60));
    server.reset();
  });
  EXPECT_THROW(static_cast<void>(fetch_segment(address, "key", Deadline::in(seconds(50)))),
               TransportError);
  leaving.join();
}

TEST(SegmentExchangeTest, ManyAskAtOnceForManyKeys) {
  constexpr int kAskers = 16;
  constexpr int kKeys = 8;
  SegmentServer server;
  const ServingThread serving(server);
  std::vector<SharedSegment> segments;
  for (int key = 0; key < kKeys; ++key) {
    segments.push_back(SharedSegment::create("many", 4096));
    server.offer(join("key ", key), segments.back().fd());
  }
  testing::run_ranks(kAskers, [&](int rank) {
    for (int i = 0; i < kKeys; ++i) {
      const int key = (rank + i) % kKeys;
      auto fetched = fetch_segment(server.address(), join("key ", key), Deadline::in(seconds(40)));
      EXPECT_EQ(SharedSegment::map(std::move(fetched.fd)).data(),
                segments[static_cast<std::size_t>(key)].data());
    }
  });
}

TEST(SegmentExchangeTest, ServingWithNothingToDoReturns) {
  SegmentServer server;
  server.serve();
  EXPECT_GE(server.fd(), 0);
}

TEST(SegmentExchangeTest, TokensAreLongAndDiffer) {
  std::set<std::string> tokens;
  for (int i = 0; i < 1000; ++i) {
    const std::string token = random_token();
    EXPECT_EQ(token.size(), 32u);
    EXPECT_EQ(token.find_first_not_of("0123456789abcdef"), std::string::npos) << token;
    tokens.insert(token);
  }
  EXPECT_EQ(tokens.size(), 1000u);
}

}  // namespace
}  // namespace pydist
