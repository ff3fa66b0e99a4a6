#include "transport/tcp/tcp_node.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ranks.h"
#include "transport/tcp/raw_peer.h"

namespace pydist::testing {
namespace {

constexpr std::uint64_t kNodeGroup = 11;

NetworkSettings settings_of_node(std::optional<std::size_t> sockets = 2) {
  NetworkSettings settings;
  settings.address = "127.0.0.1";
  settings.sockets = sockets;
  return settings;
}

// What the nodes of a test share.
struct Trusted {
  std::string token = random_token();
  JobSecret secret = JobSecret::random();
};

// A sink that any thread may look at.
class CountingSink final : public FrameSink {
 public:
  std::byte* place(const FrameHeader& header, std::uint64_t) override {
    bytes_.resize(header.bytes);
    return bytes_.data();
  }
  void take(const FrameHeader& header, const std::byte*, std::uint64_t) override {
    std::this_thread::sleep_for(nap.exchange(std::chrono::milliseconds(0)));
    bytes += header.bytes;
    highest.store(header.number);
    ++frames;
  }
  void lose(std::uint64_t) override { ++losses; }

  std::atomic<std::uint64_t> frames{0};
  std::atomic<std::uint64_t> bytes{0};
  std::atomic<std::uint64_t> highest{0};
  std::atomic<int> losses{0};
  std::atomic<std::chrono::milliseconds> nap{std::chrono::milliseconds(0)};  // before the next one

 private:
  std::vector<std::byte> bytes_;
};

// A process on the network.
class Station {
 public:
  explicit Station(const Trusted& trusted, std::size_t sockets = 2)
      : trusted_(trusted), node(settings_of_node(sockets), log) {
    node.expect(trusted.token, trusted.secret);
    node.add_sink(kNodeGroup, sink);
    node.add_sink(0, process_sink);
  }
  ~Station() {
    node.stop();
    node.remove_sink(kNodeGroup);
    node.remove_sink(0);
  }
  void know(const NodeCard& card) {
    link = node.link_to(card, trusted_.token, trusted_.secret, [this](const std::string& why) {
      const std::lock_guard lock(mutex_);
      loss_ = why;
      is_lost = true;
    });
  }
  void connect() { node.connect(*link, Deadline::in(std::chrono::seconds(20))); }
  void send(std::uint64_t number, std::size_t bytes = 0) const {
    FrameHeader header;
    header.kind = FrameKind::kEager;
    header.group = kNodeGroup;
    header.number = number;
    const std::vector<std::byte> payload(bytes);
    link->send(header, payload);
  }
  [[nodiscard]] std::string loss() {
    const std::lock_guard lock(mutex_);
    return loss_;
  }
  [[nodiscard]] SocketAddress address() const {
    return SocketAddress::from_text(node.card().addresses[0]);
  }

 private:
  const Trusted trusted_;
  std::mutex mutex_;
  std::string loss_;  // guarded by mutex_

 public:
  CountingSink sink;
  CountingSink process_sink;
  std::atomic<bool> is_lost{false};
  LinkPtr link;
  LogQueue log;
  TcpNode node;
};

struct Stations {
  explicit Stations(std::size_t sockets = 2) : one(trusted, sockets), other(trusted, sockets) {
    one.know(other.node.card());
    other.know(one.node.card());
  }
  void connect() {
    one.connect();
    ASSERT_TRUE(eventually([this] { return one.link->is_up() && other.link->is_up(); }));
  }

  Trusted trusted;
  Station one;
  Station other;
};

TEST(TcpNodeTest, ACardComesBack) {
  const NodeCard card{random_token(), "a machine", {"127.0.0.1 port 1", "::1 port 65535"}};
  const NodeCard back = NodeCard::from_text(card.to_text());
  EXPECT_EQ(back.name, card.name);
  EXPECT_EQ(back.machine, card.machine);
  EXPECT_EQ(back.addresses, card.addresses);
  for (const std::string& text : {std::string(), std::string("x"), card.to_text().substr(3),
                                  NodeCard{random_token(), "", {}}.to_text()}) {
    EXPECT_THROW(static_cast<void>(NodeCard::from_text(text)), InvalidUsage) << text;
  }
}

TEST(TcpNodeTest, OneConnectionIsMadeToAProcessOfTheSameMachineAndTwoToOthers) {
  const Trusted trusted;
  LogQueue log;
  TcpNode node(settings_of_node(std::nullopt), log);
  for (const bool is_here : {true, false}) {
    const FileDescriptor listener = listen_on({});
    const SocketAddress address =
        SocketAddress::from_host("127.0.0.1").with_port(port_of(listener.get()));
    const NodeCard card{
        random_token(), is_here ? node.card().machine : "another machine", {address.to_text()}};
    const LinkPtr link = node.link_to(card, trusted.token, trusted.secret, nullptr);
    node.connect(*link, Deadline::in(std::chrono::seconds(30)));
    // Nobody answers, so each stays as it is.
    std::vector<FileDescriptor> accepted;
    const auto has_come = [&] {
      if (FileDescriptor socket = accept_one(listener.get())) {
        accepted.push_back(std::move(socket));
      }
      return accepted.size() == (is_here ? 1 : 2);
    };
    EXPECT_TRUE(eventually(has_come));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_FALSE(accept_one(listener.get()));
  }
}

TEST(TcpNodeTest, BothEndsMayConnectAtOnce) {
  for (int round = 0; round < 10; ++round) {
    Stations pair;
    std::thread dialing([&] { pair.other.connect(); });
    pair.one.connect();
    dialing.join();
    ASSERT_TRUE(eventually([&] { return pair.one.link->is_up() && pair.other.link->is_up(); }));
    for (std::uint64_t number = 1; number <= 50; ++number) {
      pair.one.send(number, 1'000);
      pair.other.send(number, 1'000);
    }
    ASSERT_TRUE(
        eventually([&] { return pair.one.sink.frames == 50 && pair.other.sink.frames == 50; }));
    EXPECT_EQ(pair.one.sink.bytes, 50'000u);
    EXPECT_FALSE(pair.one.is_lost);
    EXPECT_FALSE(pair.other.is_lost);
  }
}

TEST(TcpNodeTest, WhatIsSentConnects) {
  Stations pair;
  EXPECT_FALSE(pair.one.link->is_up());
  pair.one.send(7, 100);
  EXPECT_TRUE(eventually([&] { return pair.other.sink.highest == 7; }));
}

TEST(TcpNodeTest, KeepsTryingUntilItIsExpected) {
  const Trusted trusted;
  Station one(trusted);
  Station other(trusted);
  one.know(other.node.card());
  one.send(1);
  ASSERT_TRUE(eventually([&] { return !one.node.hindrance(*one.link).empty(); }));
  EXPECT_TRUE(contains(one.node.hindrance(*one.link), other.node.card().addresses[0]))
      << one.node.hindrance(*one.link);
  EXPECT_FALSE(one.link->is_up());
  other.know(one.node.card());
  EXPECT_TRUE(eventually([&] { return other.sink.highest == 1; }));
  EXPECT_EQ(one.node.hindrance(*one.link), "");
}

TEST(TcpNodeTest, TriesTheNextAddress) {
  const Trusted trusted;
  Station one(trusted);
  Station other(trusted);
  NodeCard card = other.node.card();
  const FileDescriptor unused = listen_on({});
  const std::string nobody = join("127.0.0.1 port ", port_of(unused.get()));
  card.addresses = {"no address at all", nobody, card.addresses[0]};
  one.know(card);
  other.know(one.node.card());
  const_cast<FileDescriptor&>(unused) = FileDescriptor();
  one.send(1);
  EXPECT_TRUE(eventually([&] { return other.sink.highest == 1; }));
}

TEST(TcpNodeTest, WhoKnowsAnotherSecretIsKeptOut) {
  Trusted trusted;
  Station one(trusted);
  trusted.secret = JobSecret::random();
  Station other(trusted);
  one.know(other.node.card());
  other.know(one.node.card());
  one.send(1);
  other.send(1);
  ASSERT_TRUE(eventually([&] {
    return contains(one.node.hindrance(*one.link), "secret") ||
           contains(other.node.hindrance(*other.link), "secret");
  }));
  EXPECT_FALSE(one.link->is_up());
  EXPECT_FALSE(other.link->is_up());
  EXPECT_EQ(one.sink.frames + other.sink.frames, 0u);
}

TEST(TcpNodeTest, StopDeliversWhatWasSentAndSaysGoodbye) {
  for (const std::size_t sockets : {1, 4}) {
    Stations pair(sockets);
    pair.connect();
    for (std::uint64_t number = 1; number <= 100; ++number) {
      pair.one.send(number, 100'000);
    }
    pair.one.node.stop();
    ASSERT_TRUE(eventually([&] { return pair.other.is_lost.load(); }));
    EXPECT_EQ(pair.other.loss(), "");
    EXPECT_EQ(pair.other.sink.bytes, 10'000'000u);
    EXPECT_GE(pair.other.process_sink.frames, 1u);
    EXPECT_EQ(pair.other.sink.losses, 1);
    pair.one.send(1);  // nobody takes it
    pair.one.node.stop();
  }
}

TEST(TcpNodeTest, StopWaitsForAPeerThatIsSlowToRead) {
  Stations pair;
  pair.connect();
  pair.other.sink.nap = std::chrono::milliseconds(2'500);
  for (std::uint64_t number = 1; number <= 100; ++number) {
    pair.one.send(number, 100'000);
    pair.other.send(number, 100'000);
  }
  pair.one.node.stop();
  ASSERT_TRUE(eventually([&] { return pair.other.is_lost.load(); }));
  EXPECT_EQ(pair.other.loss(), "");
  EXPECT_EQ(pair.other.sink.bytes, 10'000'000u);
  EXPECT_GE(pair.other.process_sink.frames, 1u);
}

TEST(TcpNodeTest, APeerThatVanishesIsLost) {
  const Trusted trusted;
  Station one(trusted);
  for (const bool is_amid_a_frame : {false, true}) {
    const NodeCard card{random_token(), "", {"127.0.0.1 port 9"}};
    one.is_lost = false;
    one.know(card);
    FileDescriptor raw =
        connect_as({trusted.token, card.name, one.node.card().name}, trusted.secret, one.address());
    ASSERT_TRUE(raw);
    ASSERT_TRUE(eventually([&] { return one.link->is_up(); }));
    if (is_amid_a_frame) {
      FrameHeader header;
      header.kind = FrameKind::kEager;
      header.group = kNodeGroup;
      ASSERT_TRUE(send_all(raw.get(), frame_text(header, std::string(1'000, 'x')).substr(0, 500)));
    }
    raw = FileDescriptor();  // with a reset, as when a host goes
    ASSERT_TRUE(eventually([&] { return one.is_lost.load(); }));
    EXPECT_TRUE(contains(one.loss(), "has ended")) << one.loss();
    EXPECT_TRUE(one.link->is_lost());
    // It can't come back: its rank is dead for everybody.
    EXPECT_FALSE(connect_as({trusted.token, card.name, one.node.card().name}, trusted.secret,
                            one.address()));
  }
}

TEST(TcpNodeTest, ASinkThatIsRemovedIsNotUsedAgain) {
  Stations pair;
  pair.connect();
  std::atomic<bool> is_over{false};
  std::thread sending([&] {
    for (std::uint64_t number = 1; !is_over; ++number) {
      pair.one.send(number, 20'000);
      std::this_thread::yield();
    }
  });
  for (std::uint64_t round = 0; round < 20; ++round) {
    auto sink = std::make_unique<CountingSink>();
    pair.other.node.add_sink(kNodeGroup, *sink);
    EXPECT_TRUE(eventually([&] { return sink->frames > 3; }));
    pair.other.node.remove_sink(kNodeGroup);
  }
  is_over = true;
  sending.join();
  EXPECT_FALSE(pair.other.is_lost) << pair.other.loss();
}

// -- who serves -----------------------------------------------------------------------------------

TEST(TcpNodeTest, ThreadsTakeTurnsAtServing) {
  Stations pair;
  pair.connect();
  std::atomic<bool> is_over{false};
  std::vector<std::thread> threads;
  for (const unsigned seed : {1, 2}) {
    threads.emplace_back([&, seed] {
      std::minstd_rand random(seed);
      while (!is_over) {
        for (unsigned turns = random() % 100; turns != 0; --turns) {
          pair.other.node.poll(/*stays=*/random() % 4 != 0);
        }
        if (random() % 4 == 0) {
          TcpNode::Sleeper sleeper(pair.other.node);
          if (sleeper.may_sleep() && random() % 4 != 0) {
            sleeper.sleep(std::chrono::milliseconds(random() % 3));
          }
        }
        if (random() % 2 == 0) {
          pair.other.node.hand_over();
        } else if (random() % 8 == 0) {
          // Goes away without a word.
          std::this_thread::sleep_for(std::chrono::milliseconds(3));
        }
      }
    });
  }
  for (std::uint64_t number = 1; number <= 2'000; ++number) {
    pair.one.send(number, number % 100 == 0 ? 100'000 : 50);
    if (number % 100 == 0) {
      ASSERT_TRUE(eventually([&] { return pair.other.sink.frames == number; })) << number;
    }
  }
  is_over = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  // Nobody polls any more: the thread does.
  for (std::uint64_t number = 2'001; number <= 2'010; ++number) {
    pair.one.send(number, 50);
    ASSERT_TRUE(eventually([&] { return pair.other.sink.frames == number; })) << number;
  }
}

constexpr std::chrono::seconds kLongSleep{20};

TEST(TcpNodeTest, WhoSleepsServesAlone) {
  Stations pair;
  pair.connect();
  TcpNode& node = pair.other.node;
  for (std::uint64_t number = 1; number <= 20; ++number) {
    TcpNode::Sleeper sleeper(node);
    ASSERT_TRUE(sleeper.may_sleep());
    pair.one.send(number, 50);
    std::thread([&] {
      EXPECT_FALSE(TcpNode::Sleeper(node).may_sleep());
      node.hand_over();
      for (int turn = 0; turn < 5; ++turn) {
        EXPECT_FALSE(node.poll(/*stays=*/true));
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }).join();
    EXPECT_EQ(pair.other.sink.frames, number - 1);
    sleeper.sleep(kLongSleep);
    EXPECT_TRUE(eventually([&] { return pair.other.sink.frames == number; }));
  }
  // Nobody sleeps any more: the thread serves.
  pair.one.send(21, 50);
  EXPECT_TRUE(eventually([&] { return pair.other.sink.frames == 21; }));
}

// A wake-up that is lost costs what is left until the next sign of life of the other node.
TEST(TcpNodeTest, WhoSleepsIsWokenByWhatComesAndByOtherThreads) {
  Stations pair;
  pair.connect();
  TcpNode& node = pair.other.node;
  constexpr int kRounds = 100;
  std::uint64_t sent = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (int round = 0; round < kRounds; ++round) {
    const bool is_frame = round % 2 == 0;
    sent += is_frame ? 1 : 0;
    std::atomic<bool> is_due{false};
    std::thread waking([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(20 * round));
      is_due.store(true);
      if (is_frame) {
        pair.one.send(sent, 50);
      } else {
        node.wake_sleeper();
      }
    });
    const auto is_over = [&] {
      return is_due.load() && (!is_frame || pair.other.sink.frames == sent);
    };
    while (!is_over()) {
      TcpNode::Sleeper sleeper(node);
      ASSERT_TRUE(sleeper.may_sleep());
      if (!is_over()) {
        sleeper.sleep(kLongSleep);
      }
    }
    waking.join();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kRounds * std::chrono::milliseconds(100));
}

TEST(TcpNodeTest, WhoSleepsWakesInTime) {
  Stations pair;
  pair.connect();
  pair.other.node.wake_sleeper();  // nobody sleeps
  // A sign of life may end it before.
  int attempts = 0;
  for (auto slept = std::chrono::nanoseconds(0); slept < std::chrono::milliseconds(20);) {
    ASSERT_LT(++attempts, 20);
    const auto begin = std::chrono::steady_clock::now();
    TcpNode::Sleeper sleeper(pair.other.node);
    ASSERT_TRUE(sleeper.may_sleep());
    sleeper.sleep(std::chrono::milliseconds(30));
    slept = std::chrono::steady_clock::now() - begin;
    EXPECT_LT(slept, kAtOnce);
  }
}

// What waits for room in a connection, and what comes to wait there during the sleep.
TEST(TcpNodeTest, WhoSleepsSendsWhatWaits) {
  for (const bool comes_during_sleep : {false, true}) {
    Stations pair(/*sockets=*/1);
    pair.connect();
    constexpr std::size_t kMuch = std::size_t{16} << 20;
    const auto begin = std::chrono::steady_clock::now();
    if (!comes_during_sleep) {
      pair.one.send(1, kMuch);
    }
    std::thread sending;
    for (bool is_first = true; is_first || pair.one.link->has_to_send(); is_first = false) {
      TcpNode::Sleeper sleeper(pair.one.node);
      ASSERT_TRUE(sleeper.may_sleep());
      if (is_first && comes_during_sleep) {
        sending = std::thread([&] { pair.one.send(1, kMuch); });
      }
      sleeper.sleep(kLongSleep);
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kLongSleep / 2);
    if (sending.joinable()) {
      sending.join();
    }
    EXPECT_TRUE(eventually([&] { return pair.other.sink.bytes == kMuch; }));
  }
}

// What a large frame brings along must not wait for the next sign of life.
TEST(TcpNodeTest, AFrameBehindALargeOneIsServedAtOnce) {
  Stations pair(/*sockets=*/1);
  pair.connect();
  const auto begin = std::chrono::steady_clock::now();
  constexpr std::uint64_t kRounds = 20;
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    pair.one.send(3 * round - 2, 100'000);
    pair.one.send(3 * round - 1, 20);
    pair.one.send(3 * round, 20);
    ASSERT_TRUE(eventually([&] { return pair.other.sink.frames == 3 * round; }));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kAtOnce);
}

}  // namespace
}  // namespace pydist::testing
