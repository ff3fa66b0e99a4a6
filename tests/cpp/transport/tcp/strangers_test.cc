// Strangers on the network, who do not know the job's secret: they cost no link anything, and no
// more than a few descriptors and lines in the log.

#include <gtest/gtest.h>

#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "base/log_queue.h"
#include "ranks.h"
#include "ranks_log.h"
#include "transport/tcp/raw_peer.h"
#include "transport/tcp/tcp_node.h"

namespace pydist::testing {
namespace {

constexpr int kStrangers = 10'000;
// Of the strangers that this test plays, and of those that a node may talk with.
constexpr std::size_t kOpenAtATime = 700;
constexpr std::size_t kMostTalks = 128;

// As many descriptors as the system lets this process have, for a while.
class ManyDescriptors {
 public:
  ManyDescriptors() {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    rlimit wide = before_;
    wide.rlim_cur = std::min<rlim_t>(before_.rlim_max, 8'192);
    ::setrlimit(RLIMIT_NOFILE, &wide);
    has_enough = wide.rlim_cur >= 4'096;
  }
  ~ManyDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  ManyDescriptors(const ManyDescriptors&) = delete;
  ManyDescriptors& operator=(const ManyDescriptors&) = delete;

  bool has_enough = false;

 private:
  rlimit before_{};
};

// Two nodes that are connected, of which one is told who passes by.
class Watched {
 public:
  Watched() {
    NetworkSettings settings;
    settings.address = "127.0.0.1";
    log_ = std::make_unique<LogQueue>();
    node = std::make_unique<TcpNode>(settings, *log_);
    friend_ = std::make_unique<TcpNode>(settings, *log_);
    node->expect(token, secret);
    friend_->expect(token, secret);
    node->add_sink(1, sink_);
    link_ = friend_->link_to(node->card(), token, secret, [](const std::string&) {});
    back_ = node->link_to(friend_->card(), token, secret, [](const std::string&) {});
    friend_->connect(*link_, Deadline::in(std::chrono::seconds(20)));
    EXPECT_TRUE(eventually([this] { return link_->is_up() && back_->is_up(); }));
    // The other connections of the link are made by now, or soon.
    EXPECT_TRUE(eventually([this] { return ping(); }));
  }
  ~Watched() {
    friend_->stop();
    node->stop();
    node->remove_sink(1);
  }

  // That a frame passes over the link.
  [[nodiscard]] bool ping() {
    FrameHeader header;
    header.kind = FrameKind::kEager;
    header.group = 1;
    link_->send(header);
    ++sent_;
    return eventually([this] { return sink_.taken == sent_; });
  }
  [[nodiscard]] SocketAddress address() const {
    return SocketAddress::from_text(node->card().addresses[0]);
  }

  const std::string token = random_token();
  const JobSecret secret = JobSecret::random();
  std::unique_ptr<TcpNode> node;

 private:
  class Sink final : public FrameSink {
   public:
    std::byte* place(const FrameHeader&, std::uint64_t) override { return nullptr; }
    void take(const FrameHeader&, const std::byte*, std::uint64_t) override { ++taken; }
    void lose(std::uint64_t) override {}
    std::atomic<std::uint64_t> taken{0};
  };

  std::unique_ptr<LogQueue> log_;
  std::unique_ptr<TcpNode> friend_;
  Sink sink_;
  LinkPtr link_;
  LinkPtr back_;
  std::uint64_t sent_ = 0;
};

// Lets `kStrangers` connect and say something, of whom the last stay until they are dropped.
void let_strangers_pass(const std::string& what_they_say, const std::string& logged) {
  const ManyDescriptors many;
  if (!many.has_enough) {
    GTEST_SKIP() << "this system gives a process too few descriptors";
  }
  ::testing::internal::CaptureStderr();
  const auto begin = std::chrono::steady_clock::now();
  {
    Watched watched;
    const std::size_t before = descriptors_in_use();
    std::deque<FileDescriptor> open;
    std::size_t most = 0;
    for (int i = 0; i < kStrangers; ++i) {
      open.push_back(connect_raw(watched.address()));
      send_some(open.back().get(), what_they_say);
      if (open.size() > kOpenAtATime) {
        open.pop_front();
      }
      if (i % 500 == 0) {
        ASSERT_TRUE(watched.ping()) << i;
        most = std::max(most, descriptors_in_use() - open.size());
      }
    }
    EXPECT_LE(most, before + kMostTalks + 2);
    // Those who know the secret come through all the same.
    const std::string name = random_token();
    static_cast<void>(watched.node->link_to({name, "", {"127.0.0.1 port 9"}}, watched.token,
                                            watched.secret, [](const std::string&) {}));
    FileDescriptor known;
    EXPECT_TRUE(eventually([&] {
      known = connect_as({watched.token, name, watched.node->card().name}, watched.secret,
                         watched.address());
      return static_cast<bool>(known);
    }));
    open.clear();
    EXPECT_TRUE(eventually([&] { return descriptors_in_use() <= before + 2; }))
        << descriptors_in_use() << " instead of " << before;
    EXPECT_TRUE(watched.ping());
  }
  const auto lasted = std::chrono::steady_clock::now() - begin;
  const std::string log = ::testing::internal::GetCapturedStderr();
  const auto lines = occurrences(log, "Somebody at 127.0.0.1 port ");
  EXPECT_LE(lines, 1 + lasted / std::chrono::seconds(10)) << log;
  if (!logged.empty()) {
    EXPECT_GE(lines, 1);
    EXPECT_TRUE(contains(log, logged)) << log;
  }
  EXPECT_EQ(occurrences(log, "\n"), lines) << log;
}

TEST(StrangersTest, ThoseWhoSayNothingHarmNobody) { let_strangers_pass("", ""); }

TEST(StrangersTest, ThoseWhoSayGarbageHarmNobody) {
  let_strangers_pass(std::string(200, 'x'), "it says something else than a rank");
}

TEST(StrangersTest, ThoseWhoSayHalfAHelloHarmNobody) {
  const DialerHandshake handshake({random_token(), random_token(), random_token()},
                                  JobSecret::random());
  let_strangers_pass(handshake.hello().substr(0, kHelloBytes / 2), "");
}

std::chrono::nanoseconds processor_time() {
  timespec used{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec);
}

// A child of this process, such as one that loads data, has all connections of the time that it was
// forked at.
TEST(StrangersTest, AChildThatHoldsConnectionsOpenKeepsNobodyBusy) {
  const ManyDescriptors many;
  if (!many.has_enough) {
    GTEST_SKIP() << "this system gives a process too few descriptors";
  }
  Watched watched;
  std::deque<FileDescriptor> strangers;
  const std::size_t before = descriptors_in_use();
  const auto let_in = [&](std::size_t count, std::size_t talks) {
    for (std::size_t i = 0; i < count; ++i) {
      strangers.push_back(connect_raw(watched.address()));
    }
    return eventually([&] { return descriptors_in_use() == before + strangers.size() + talks; });
  };
  ASSERT_TRUE(let_in(kMostTalks, kMostTalks));
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::pause();
    ::_exit(0);
  }
  ASSERT_TRUE(let_in(50, kMostTalks));
  for (const FileDescriptor& stranger : strangers) {
    ::shutdown(stranger.get(), SHUT_RDWR);
  }
  ASSERT_TRUE(watched.ping());
  EXPECT_TRUE(eventually([&] {
    const auto begin = processor_time();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    return processor_time() - begin < std::chrono::milliseconds(50);
  }));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST(StrangersTest, OneWhoSaysNothingIsDroppedAfterAWhile) {
  Watched watched;
  const FileDescriptor stranger = connect_raw(watched.address());
  EXPECT_TRUE(is_closed_soon(stranger.get()));
  EXPECT_TRUE(watched.ping());
}

}  // namespace
}  // namespace pydist::testing
