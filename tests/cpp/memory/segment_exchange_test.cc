#include "memory/segment_exchange.h"

#include <gtest/gtest.h>

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

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

// A socket of the abstract namespace that says what it likes.
class Stranger {
 public:
  explicit Stranger(const std::string& name) : socket_(::socket(AF_UNIX, SOCK_DGRAM, 0)) {
    const sockaddr_un address = address_of(name);
    EXPECT_EQ(::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), length_of(name)),
              0);
  }

  // Returns the text, and to whom an answer goes.
  std::pair<std::string, std::string> receive() const {
    std::array<char, 512> text{};
    sockaddr_un from{};
    socklen_t length = sizeof from;
    const ssize_t got = ::recvfrom(socket_.get(), text.data(), text.size(), 0,
                                   reinterpret_cast<sockaddr*>(&from), &length);
    EXPECT_GE(got, 0);
    const auto name_bytes = length - offsetof(sockaddr_un, sun_path) - 1;
    return {std::string(text.data(), static_cast<std::size_t>(got)),
            std::string(from.sun_path + 1, name_bytes)};
  }

  bool send(const std::string& to, const std::string& text, int fds, int flags = 0) const {
    const sockaddr_un address = address_of(to);
    iovec part{const_cast<char*>(text.data()), text.size()};
    std::vector<char> control(CMSG_SPACE(static_cast<std::size_t>(fds) * sizeof(int)));
    msghdr header{};
    header.msg_name = const_cast<sockaddr_un*>(&address);
    header.msg_namelen = length_of(to);
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    if (fds > 0) {
      header.msg_control = control.data();
      header.msg_controllen = control.size();
      cmsghdr* rights = CMSG_FIRSTHDR(&header);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(static_cast<std::size_t>(fds) * sizeof(int));
      const std::vector<int> sent(static_cast<std::size_t>(fds), socket_.get());
      std::memcpy(CMSG_DATA(rights), sent.data(), sent.size() * sizeof(int));
    }
    return ::sendmsg(socket_.get(), &header, flags) >= 0;
  }

 private:
  static sockaddr_un address_of(const std::string& name) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::copy(name.begin(), name.end(), address.sun_path + 1);
    return address;
  }
  static socklen_t length_of(const std::string& name) {
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }

  FileDescriptor socket_;
};

std::size_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

int highest_descriptor() {
  int highest = -1;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    highest = std::max(highest, std::stoi(entry.path().filename()));
  }
  return highest;
}

TEST(SegmentExchangeTest, TheServerTakesNoDescriptors) {
  SegmentServer server;
  const Stranger stranger("pydist-test-" + random_token());
  const std::size_t before = open_descriptors();
  for (const int fds : {1, 2, 3, 100, 250}) {
    ASSERT_TRUE(stranger.send(server.address(), "nonce key", fds));
    server.serve();
    EXPECT_EQ(open_descriptors(), before) << fds;
  }
}

TEST(SegmentExchangeTest, AnAnswerHasOneDescriptor) {
  const std::string name = "pydist-test-" + random_token();
  const Stranger stranger(name);
  for (const int fds : {1, 2, 3, 100}) {
    const std::size_t before = open_descriptors();
    std::thread answering([&] {
      const auto [request, from] = stranger.receive();
      EXPECT_TRUE(stranger.send(from, request.substr(0, request.find(' ')) + " +", fds));
    });
    EXPECT_TRUE(fetch_segment(name, "key", Deadline::in(seconds(20))).fd);
    answering.join();
    // Those that were asked for again meanwhile stay in the stranger's queue.
    EXPECT_EQ(open_descriptors(), before) << fds;
  }
}

TEST(SegmentExchangeTest, TheEndOfDescriptorsIsAnErrorAtOnce) {
  SegmentServer server;
  const ServingThread serving(server);
  const SharedSegment segment = SharedSegment::create("last", 4096);
  server.offer("last", segment.fd());
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  // No number below the last one is free.
  std::vector<FileDescriptor> taken;
  const int highest = highest_descriptor();
  do {
    taken.emplace_back(::dup(segment.fd()));
    ASSERT_TRUE(taken.back());
  } while (taken.back().get() < highest);
  // UBSan opens a pipe when it meets a type for the first time: that of the error, here.
  EXPECT_THROW(static_cast<void>(fetch_segment("pydist-nobody-is-here", "", Deadline::in({}))),
               TransportError);
  const rlimit one_more{static_cast<rlim_t>(taken.back().get()) + 2, limit.rlim_max};
  const auto before = Deadline::Clock::now();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &one_more), 0);
  std::exception_ptr raised;
  try {
    static_cast<void>(fetch_segment(server.address(), "last", Deadline::in(seconds(50))));
  } catch (const TransportError&) {
    raised = std::current_exception();
  }
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
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

TEST(SegmentExchangeTest, AFloodDoesNotHoldTheServer) {
  SegmentServer server;
  std::atomic<bool> stopping{false};
  std::vector<std::thread> flooding;
  for (int i = 0; i < 3; ++i) {
    flooding.emplace_back([&] {
      const Stranger stranger("pydist-test-" + random_token());
      while (!stopping) {
        static_cast<void>(stranger.send(server.address(), "nonce key", 1, MSG_DONTWAIT));
      }
    });
  }
  for (int i = 0; i < 200; ++i) {
    server.serve();
  }
  stopping = true;
  for (std::thread& thread : flooding) {
    thread.join();
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
