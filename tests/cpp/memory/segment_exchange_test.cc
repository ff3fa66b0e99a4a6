// Handing over segments, among peers and among hostile neighbours.
//
// The file is long because all its tests need the stranger who speaks the protocol as he likes.

#include "memory/segment_exchange.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iterator>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "few_descriptors.h"
#include "memory/shared_segment.h"
#include "threads_as_ranks.h"

namespace pydist {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::FewDescriptors;

const JobSecret kSecret(std::string(32, 's'));

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
  server.offer("group/a", a.fd(), kSecret);
  server.offer("group/b", b.fd(), kSecret);
  FetchedSegment fetched =
      fetch_segment(server.address(), "group/b", kSecret, Deadline::in(seconds(10)));
  EXPECT_EQ(fetched.server_pid, ::getpid());
  EXPECT_NE(fetched.fd.get(), b.fd());
  EXPECT_EQ(SharedSegment::map(std::move(fetched.fd)).data(), b.data());
}

TEST(SegmentExchangeTest, AnOfferOutlivesItsDescriptor) {
  SegmentServer server;
  const ServingThread serving(server);
  {
    const SharedSegment gone = SharedSegment::create("gone", 3 * 4096);
    server.offer("key", gone.fd(), kSecret);
  }
  auto fetched = fetch_segment(server.address(), "key", kSecret, Deadline::in(seconds(10)));
  EXPECT_EQ(SharedSegment::map(std::move(fetched.fd)).bytes(), 3u * 4096);
}

TEST(SegmentExchangeTest, AKeyThatComesLaterIsWaitedFor) {
  SegmentServer server;
  const ServingThread serving(server);
  const SharedSegment segment = SharedSegment::create("late", 4096);
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(100));
    server.offer("late", segment.fd(), kSecret);
  });
  const auto fetched = fetch_segment(server.address(), "late", kSecret, Deadline::in(seconds(20)));
  EXPECT_TRUE(fetched.fd);
  later.join();
}

TEST(SegmentExchangeTest, AServerThatIsSlowToServeIsWaitedFor) {
  SegmentServer server;
  const SharedSegment segment = SharedSegment::create("slow", 4096);
  server.offer("slow", segment.fd(), kSecret);
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(150));
    for (int i = 0; i < 200; ++i) {
      server.serve();
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  EXPECT_TRUE(fetch_segment(server.address(), "slow", kSecret, Deadline::in(seconds(20))).fd);
  later.join();
}

TEST(SegmentExchangeTest, TheDeadlineHolds) {
  SegmentServer server;
  const ServingThread serving(server);
  const auto before = Deadline::Clock::now();
  try {
    static_cast<void>(
        fetch_segment(server.address(), "never", kSecret, Deadline::in(milliseconds(100))));
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
  server.offer("key", segment.fd(), kSecret);
  server.withdraw("key");
  server.withdraw("key");  // twice is fine
  EXPECT_THROW(static_cast<void>(
                   fetch_segment(server.address(), "key", kSecret, Deadline::in(milliseconds(50)))),
               Timeout);
}

TEST(SegmentExchangeTest, AnOfferReplacesTheOldOne) {
  SegmentServer server;
  const ServingThread serving(server);
  const SharedSegment old_one = SharedSegment::create("old", 4096);
  const SharedSegment new_one = SharedSegment::create("new", 4096);
  server.offer("key", old_one.fd(), kSecret);
  server.offer("key", new_one.fd(), kSecret);
  auto fetched = fetch_segment(server.address(), "key", kSecret, Deadline::in(seconds(10)));
  EXPECT_EQ(SharedSegment::map(std::move(fetched.fd)).data(), new_one.data());
}

TEST(SegmentExchangeTest, AnAbsentServerIsAnErrorAtOnce) {
  const auto before = Deadline::Clock::now();
  EXPECT_THROW(static_cast<void>(fetch_segment("pydist-nobody-is-here", "key", kSecret,
                                               Deadline::in(seconds(50)))),
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
  EXPECT_THROW(static_cast<void>(fetch_segment(address, "key", kSecret, Deadline::in(seconds(50)))),
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
    server.offer(join("key ", key), segments.back().fd(), kSecret);
  }
  testing::run_ranks(kAskers, [&](int rank) {
    for (int i = 0; i < kKeys; ++i) {
      const int key = (rank + i) % kKeys;
      auto fetched =
          fetch_segment(server.address(), join("key ", key), kSecret, Deadline::in(seconds(40)));
      EXPECT_EQ(SharedSegment::map(std::move(fetched.fd)).data(),
                segments[static_cast<std::size_t>(key)].data());
    }
  });
}

// One end of a connection, at which somebody says what he likes.
class Stranger {
 public:
  explicit Stranger(FileDescriptor connection) : connection_(std::move(connection)) {}

  [[nodiscard]] bool is_connected() const noexcept { return static_cast<bool>(connection_); }

  // Whether a message is there; the end of the connection is none.
  [[nodiscard]] bool has_mail() const {
    char byte = 0;
    return ::recv(connection_.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK) > 0;
  }

  [[nodiscard]] std::string receive() const {
    std::array<char, 512> text{};
    const ssize_t got = ::recv(connection_.get(), text.data(), text.size(), 0);
    EXPECT_GE(got, 0);
    return {text.data(), static_cast<std::size_t>(std::max<ssize_t>(got, 0))};
  }

  [[nodiscard]] bool send(const std::string& text, int fds, int flags = 0) const {
    iovec part{const_cast<char*>(text.data()), text.size()};
    std::vector<char> control(CMSG_SPACE(static_cast<std::size_t>(fds) * sizeof(int)));
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    if (fds > 0) {
      header.msg_control = control.data();
      header.msg_controllen = control.size();
      cmsghdr* rights = CMSG_FIRSTHDR(&header);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(static_cast<std::size_t>(fds) * sizeof(int));
      const std::vector<int> sent(static_cast<std::size_t>(fds), connection_.get());
      std::memcpy(CMSG_DATA(rights), sent.data(), sent.size() * sizeof(int));
    }
    return ::sendmsg(connection_.get(), &header, flags | MSG_NOSIGNAL) >= 0;
  }

 private:
  FileDescriptor connection_;
};

std::pair<sockaddr_un, socklen_t> address_of(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(name.begin(), name.end(), address.sun_path + 1);
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

// Connects to a server, unless too many wait there.
Stranger caller_of(const std::string& name) {
  FileDescriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  EXPECT_TRUE(socket);
  const auto [address, length] = address_of(name);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    EXPECT_EQ(errno, EAGAIN);
    return Stranger(FileDescriptor());
  }
  return Stranger(std::move(socket));
}

// Listens at a name of his own, which he may have published as a rank's.
class Impostor {
 public:
  Impostor() : socket_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    const auto [address, length] = address_of(name_);
    EXPECT_EQ(::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), length), 0);
    EXPECT_EQ(::listen(socket_.get(), 8), 0);
  }

  [[nodiscard]] const std::string& name() const noexcept { return name_; }

  // Waits for somebody who connects.
  [[nodiscard]] Stranger accept() const {
    return Stranger(FileDescriptor(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC)));
  }

  // The answer to a request for "key", as one who knows the secret would give it.
  [[nodiscard]] std::string right_answer_to(const std::string& request) const {
    const std::string nonce = request.substr(0, request.find(' '));
    return kSecret.sign(join("answer\n", name_, "\n", nonce, "\nkey"));
  }

 private:
  const std::string name_ = "pydist-test-" + random_token();
  FileDescriptor socket_;
};

// A request for "key" that knows the secret.
std::string right_request_to(const SegmentServer& server) {
  const std::string nonce = random_token();
  return join(nonce, " key ",
              kSecret.sign(join("request\n", server.address(), "\n", nonce, "\nkey")));
}

std::size_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

TEST(SegmentExchangeTest, TheServerTakesNoDescriptors) {
  SegmentServer server;
  for (const int fds : {1, 2, 3, 100, 250}) {
    const Stranger stranger = caller_of(server.address());
    const std::size_t before = open_descriptors();
    ASSERT_TRUE(stranger.send("nonce key", fds));
    server.serve();
    EXPECT_EQ(open_descriptors(), before) << fds;
  }
}

TEST(SegmentExchangeTest, AnAnswerHasOneDescriptor) {
  const Impostor impostor;
  for (const int fds : {1, 2, 3, 100}) {
    const std::size_t before = open_descriptors();
    std::thread answering([&] {
      const Stranger asker = impostor.accept();
      EXPECT_TRUE(asker.send(impostor.right_answer_to(asker.receive()), fds));
    });
    {
      const auto fetched =
          fetch_segment(impostor.name(), "key", kSecret, Deadline::in(seconds(20)));
      EXPECT_TRUE(fetched.fd);
      answering.join();
      EXPECT_EQ(open_descriptors(), before + 1) << fds;
    }
    EXPECT_EQ(open_descriptors(), before) << fds;
  }
}

TEST(SegmentExchangeTest, WhoIsTurnedAwayAsksAgain) {
  const Impostor impostor;
  std::thread answering([&] {
    for (int turn = 0; turn < 3; ++turn) {
      const Stranger asker = impostor.accept();
      if (turn > 0) {
        const std::string request = asker.receive();
        if (turn == 2) {
          EXPECT_TRUE(asker.send(impostor.right_answer_to(request), 1));
        }
      }
    }
  });
  EXPECT_TRUE(fetch_segment(impostor.name(), "key", kSecret, Deadline::in(seconds(20))).fd);
  answering.join();
}

// There is none who could come after an asker under its name, as there is where sockets are bound.
TEST(SegmentExchangeTest, WhatAnAskerLeavesBehindIsAnsweredToNobody) {
  SegmentServer server;
  const SharedSegment segment = SharedSegment::create("left", 4096);
  server.offer("key", segment.fd(), kSecret);
  ASSERT_TRUE(caller_of(server.address()).send(right_request_to(server), 0));
  const std::size_t before = open_descriptors();
  {
    const Stranger next = caller_of(server.address());
    server.serve();
    EXPECT_FALSE(next.has_mail());
  }
  server.serve();
  EXPECT_EQ(open_descriptors(), before);
}

// As one that loses its core in between, on a busy machine.
TEST(SegmentExchangeTest, WhoAsksLongAfterConnectingIsAnswered) {
  SegmentServer server;
  const SharedSegment segment = SharedSegment::create("slow", 4096);
  server.offer("key", segment.fd(), kSecret);
  const Stranger asker = caller_of(server.address());
  server.serve();
  ASSERT_TRUE(asker.send(right_request_to(server), 0));
  server.serve();
  EXPECT_TRUE(asker.has_mail());
}

TEST(SegmentExchangeTest, AnOfferAnswersWhoHasAskedForIt) {
  SegmentServer server;
  const SharedSegment segment = SharedSegment::create("late", 4096);
  const Stranger asker = caller_of(server.address());
  const Stranger other = caller_of(server.address());
  ASSERT_TRUE(asker.send(right_request_to(server), 0));
  ASSERT_TRUE(other.send("nonce key signature", 0));
  server.serve();
  server.offer("another key", segment.fd(), kSecret);
  EXPECT_FALSE(asker.has_mail());
  server.offer("key", segment.fd(), kSecret);
  EXPECT_TRUE(asker.has_mail());
  EXPECT_FALSE(other.has_mail());
  EXPECT_FALSE(other.send("", 0));  // its signature was wrong, so it was turned away
}

TEST(SegmentExchangeTest, WhoSaysMoreThanARequestIsTurnedAway) {
  SegmentServer server;
  const SharedSegment segment = SharedSegment::create("late", 4096);
  const Stranger asker = caller_of(server.address());
  ASSERT_TRUE(asker.send(right_request_to(server), 0));
  server.serve();
  ASSERT_TRUE(asker.send(right_request_to(server), 0));
  server.serve();
  server.offer("key", segment.fd(), kSecret);
  EXPECT_FALSE(asker.has_mail());
  EXPECT_FALSE(asker.send("", 0));
}

TEST(SegmentExchangeTest, WhoNeverAsksIsTurnedAwayInTheEnd) {
  SegmentServer server;
  const std::size_t before = open_descriptors();
  const Stranger idle = caller_of(server.address());
  server.serve();
  EXPECT_EQ(open_descriptors(), before + 2);
  std::this_thread::sleep_for(milliseconds(2100));
  server.serve();
  EXPECT_EQ(open_descriptors(), before + 1);
}

TEST(SegmentExchangeTest, AServerWithoutDescriptorsKeepsNobody) {
  SegmentServer server;
  const SharedSegment segment = SharedSegment::create("scarce", 4096);
  const Stranger idle = caller_of(server.address());
  const Stranger early = caller_of(server.address());
  ASSERT_TRUE(early.send(right_request_to(server), 0));
  {
    const FewDescriptors none(0);
    server.serve();
  }
  EXPECT_FALSE(idle.send("nonce key signature", 0));
  EXPECT_FALSE(early.send("nonce key signature", 0));
}

// It may be what the process needs to tell the others that it has come to the end of them.
TEST(SegmentExchangeTest, AServerKeepsNobodyWithTheLastDescriptor) {
  SegmentServer server;
  const SharedSegment segment = SharedSegment::create("last", 4096);
  const Stranger idle = caller_of(server.address());
  const FewDescriptors one(1);
  server.serve();
  EXPECT_TRUE(FileDescriptor(::dup(segment.fd())));
}

TEST(SegmentExchangeTest, ManyWhoNeverAskTakeFewDescriptorsAndKeepNobodyOut) {
  SegmentServer server;
  const SharedSegment segment = SharedSegment::create("key", 4096);
  server.offer("key", segment.fd(), kSecret);
  const std::size_t before = open_descriptors();
  {
    std::vector<Stranger> idle;
    for (int i = 0; i < 200; ++i) {
      idle.push_back(caller_of(server.address()));
      server.serve();
    }
    EXPECT_LE(open_descriptors(), before + idle.size() + 64);
    const Stranger asker = caller_of(server.address());
    ASSERT_TRUE(asker.send(right_request_to(server), 0));
    server.serve();
    EXPECT_TRUE(asker.has_mail());
  }
  for (int i = 0; i < 4; ++i) {
    server.serve();
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(SegmentExchangeTest, AServerWithoutDescriptorsStillAnswers) {
  SegmentServer server;
  const SharedSegment segment = SharedSegment::create("scarce", 4096);
  server.offer("key", segment.fd(), kSecret);
  std::vector<Stranger> askers;
  for (int i = 0; i < 3; ++i) {
    askers.push_back(caller_of(server.address()));
    ASSERT_TRUE(askers.back().send(right_request_to(server), 0));
  }
  {
    const FewDescriptors none(0);
    server.serve();
    EXPECT_LT(::dup(segment.fd()), 0);
  }
  for (const Stranger& asker : askers) {
    EXPECT_TRUE(asker.has_mail());
  }
}

TEST(SegmentExchangeTest, TheEndOfDescriptorsIsAnErrorAtOnce) {
  SegmentServer server;
  const ServingThread serving(server);
  const SharedSegment segment = SharedSegment::create("last", 4096);
  server.offer("last", segment.fd(), kSecret);
  // UBSan opens a pipe when it meets a type for the first time: that of the error, here.
  EXPECT_THROW(
      static_cast<void>(fetch_segment("pydist-nobody-is-here", "", kSecret, Deadline::in({}))),
      TransportError);
  const auto before = Deadline::Clock::now();
  std::exception_ptr raised;
  {
    const FewDescriptors one(1);
    try {
      static_cast<void>(
          fetch_segment(server.address(), "last", kSecret, Deadline::in(seconds(50))));
    } catch (const TransportError&) {
      raised = std::current_exception();
    }
  }
  std::string said;
  try {
    ASSERT_TRUE(raised);
    std::rethrow_exception(raised);
  } catch (const TransportError& error) {
    said = error.what();
  }
  EXPECT_NE(said.find("'last'"), std::string::npos) << said;
  EXPECT_NE(said.find("Too many open files"), std::string::npos) << said;
  EXPECT_LT(Deadline::Clock::now() - before, seconds(5));
}

// For as long as it lives, strangers connect and say what is no request.
class Flood {
 public:
  explicit Flood(const std::string& address) {
    for (int i = 0; i < 3; ++i) {
      threads_.emplace_back([this, address] {
        while (!stopping_) {
          const Stranger stranger = caller_of(address);
          if (stranger.is_connected()) {
            static_cast<void>(stranger.send("nonce key", 1));
          }
        }
      });
    }
  }
  Flood(const Flood&) = delete;
  Flood& operator=(const Flood&) = delete;
  ~Flood() {
    stopping_ = true;
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

 private:
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> threads_;
};

TEST(SegmentExchangeTest, AFloodDoesNotHoldTheServer) {
  SegmentServer server;
  const Flood flood(server.address());
  for (int i = 0; i < 200; ++i) {
    server.serve();
  }
}

TEST(SegmentExchangeTest, WhoDoesNotKnowTheSecretGetsNothing) {
  SegmentServer server;
  const ServingThread serving(server);
  const SharedSegment segment = SharedSegment::create("secret", 4096);
  server.offer("key", segment.fd(), kSecret);
  EXPECT_THROW(static_cast<void>(fetch_segment(server.address(), "key", JobSecret("a guess"),
                                               Deadline::in(milliseconds(100)))),
               Timeout);
  EXPECT_TRUE(fetch_segment(server.address(), "key", kSecret, Deadline::in(seconds(20))).fd);
}

// Who has published a socket of his own as a rank's passes what he gets on to that rank.
TEST(SegmentExchangeTest, ARequestServesNobodyElse) {
  SegmentServer server;
  const SharedSegment segment = SharedSegment::create("secret", 4096);
  server.offer("key", segment.fd(), kSecret);
  const Impostor impostor;
  std::thread asking([&] {
    EXPECT_THROW(static_cast<void>(fetch_segment(impostor.name(), "key", kSecret,
                                                 Deadline::in(milliseconds(200)))),
                 Timeout);
  });
  const std::string request = impostor.accept().receive();
  asking.join();
  const Stranger relay = caller_of(server.address());
  const Stranger peer = caller_of(server.address());
  ASSERT_TRUE(relay.send(request, 0));
  ASSERT_TRUE(peer.send(right_request_to(server), 0));
  server.serve();
  EXPECT_FALSE(relay.has_mail());
  EXPECT_TRUE(peer.has_mail());
}

TEST(SegmentExchangeTest, AnAnswerWithoutTheSecretIsNoAnswer) {
  const Impostor impostor;
  std::thread asking([&] {
    EXPECT_THROW(static_cast<void>(fetch_segment(impostor.name(), "key", kSecret,
                                                 Deadline::in(milliseconds(300)))),
                 Timeout);
  });
  {
    const Stranger asker = impostor.accept();
    const std::string request = asker.receive();
    const std::string nonce = request.substr(0, request.find(' '));
    const std::size_t before = open_descriptors();
    for (const std::string& answer :
         {nonce + " +", request,
          JobSecret("a guess").sign(join("answer\n", impostor.name(), "\n", nonce, "\nkey"))}) {
      EXPECT_TRUE(asker.send(answer, 1));
    }
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT_LE(open_descriptors(), before);
    asking.join();
  }
}

TEST(SegmentExchangeTest, TheWaitEndsWhenItIsInVain) {
  SegmentServer server;
  const auto before = Deadline::Clock::now();
  EXPECT_THROW(
      static_cast<void>(fetch_segment(server.address(), "key", kSecret, Deadline::in(seconds(50)),
                                      [] { throw PeerLost("it has died"); })),
      PeerLost);
  EXPECT_LT(Deadline::Clock::now() - before, seconds(5));
}

// Runs `body` in a process of another user, who is told nothing but what it knows. True where it
// returns true.
template <typename Body>
bool as_nobody(const Body& body) {
  constexpr uid_t kNobody = 65534;
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(40);
    const bool is_right = ::setgid(kNobody) == 0 && ::setuid(kNobody) == 0 && body();
    ::_exit(is_right ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(SegmentExchangeTest, AnotherUserGetsNothingEvenWithTheSecret) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "only root can become another user";
  }
  SegmentServer server;
  const ServingThread serving(server);
  const SharedSegment segment = SharedSegment::create("secret", 4096);
  server.offer("key", segment.fd(), kSecret);
  EXPECT_TRUE(as_nobody([&] {
    const Stranger stranger = caller_of(server.address());
    static_cast<void>(stranger.send(right_request_to(server), 0));  // unless it is closed already
    std::this_thread::sleep_for(milliseconds(200));
    return !stranger.has_mail();
  }));
}

// Root trusts nobody by being root: a user's process does not answer it, and it asks nobody else's.
TEST(SegmentExchangeTest, RootIsNotTrustedByItsNumber) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "only root can become another user";
  }
  std::array<int, 2> channel{};
  ASSERT_EQ(::pipe(channel.data()), 0);
  std::thread asking([&] {
    std::string address(39, ' ');
    EXPECT_EQ(::read(channel[0], address.data(), address.size()), 39);
    try {
      static_cast<void>(fetch_segment(address, "key", kSecret, Deadline::in(seconds(20))));
      ADD_FAILURE() << "somebody else has answered";
    } catch (const TransportError& error) {
      EXPECT_NE(std::string(error.what()).find("belongs to user 65534"), std::string::npos)
          << error.what();
    }
  });
  EXPECT_TRUE(as_nobody([&] {
    SegmentServer server;
    const SharedSegment segment = SharedSegment::create("secret", 4096);
    server.offer("key", segment.fd(), kSecret);
    const bool is_told =
        ::write(channel[1], server.address().data(), server.address().size()) == 39;
    for (int turn = 0; turn < 400; ++turn) {
      server.serve();
      std::this_thread::sleep_for(milliseconds(1));
    }
    return is_told;
  }));
  asking.join();
  ::close(channel[0]);
  ::close(channel[1]);
}

// A hostile neighbour sends whatever comes to its mind, mostly close to what is right.
// PYDIST_TEST_FUZZ sets how often.
TEST(SegmentExchangeTest, GarbageNeitherHurtsNorLeaksNorKeepsPeersOut) {
  const char* const asked = std::getenv("PYDIST_TEST_FUZZ");
  const int messages = asked != nullptr ? std::atoi(asked) : 5'000;
  SegmentServer server;
  const SharedSegment segment = SharedSegment::create("fuzzed", 4096);
  server.offer("key", segment.fd(), kSecret);
  const std::string right = right_request_to(server);
  std::minstd_rand random(7);
  const auto below = [&random](std::size_t end) { return random() % end; };
  const std::size_t before = open_descriptors();
  int answered = 0;
  for (int i = 0; i < messages; ++i) {
    std::string text;
    switch (below(4)) {
      case 0:  // noise
        text.resize(below(700));
        for (char& letter : text) {
          letter = static_cast<char>(below(256));
        }
        break;
      case 1:  // a mutation
        text = right;
        text[below(text.size())] ^= static_cast<char>(1 + below(255));
        break;
      case 2:  // a piece
        text = right.substr(below(right.size()), below(right.size()));
        break;
      default:  // many separators, or the right thing
        text = below(2) == 0 ? std::string(below(600), ' ') : right;
        break;
    }
    const bool is_right = text == right;
    const Stranger stranger = caller_of(server.address());
    ASSERT_TRUE(stranger.send(text, static_cast<int>(below(3))));
    server.serve();
    ASSERT_EQ(stranger.has_mail(), is_right) << text;
    answered += is_right ? 1 : 0;
  }
  EXPECT_GT(answered, messages / 20);
  EXPECT_EQ(open_descriptors(), before);
  const ServingThread serving(server);
  EXPECT_TRUE(fetch_segment(server.address(), "key", kSecret, Deadline::in(seconds(20))).fd);
}

// The same for who asks somebody that cannot be trusted.
TEST(SegmentExchangeTest, GarbageDoesNotKeepAnAskerFromItsAnswer) {
  const Impostor relay;
  const std::size_t before = open_descriptors();
  std::thread asking([&] {
    EXPECT_TRUE(fetch_segment(relay.name(), "key", kSecret, Deadline::in(seconds(30))).fd);
  });
  std::minstd_rand random(7);
  for (bool is_answered = false; !is_answered;) {
    const Stranger asker = relay.accept();
    const std::string right = relay.right_answer_to(asker.receive());
    for (int i = 0; i < 2000; ++i) {
      std::string text = right;
      text[random() % text.size()] ^= static_cast<char>(1 + random() % 255);
      static_cast<void>(asker.send(text, static_cast<int>(random() % 4), MSG_DONTWAIT));
    }
    is_answered = asker.send(right, 1);  // unless it has turned to another connection meanwhile
  }
  asking.join();
  EXPECT_EQ(open_descriptors(), before);
}

TEST(SegmentExchangeTest, AFloodDoesNotKeepPeersOut) {
  SegmentServer server;
  const ServingThread serving(server);
  const SharedSegment segment = SharedSegment::create("flooded", 4096);
  server.offer("key", segment.fd(), kSecret);
  const Flood flood(server.address());
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(fetch_segment(server.address(), "key", kSecret, Deadline::in(seconds(30))).fd);
  }
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
