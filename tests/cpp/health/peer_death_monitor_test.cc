#include "health/peer_death_monitor.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>
#include <cstdlib>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "base/log.h"

namespace pydist {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kCalm{60'000};

template <typename Condition>
bool comes_true(const Condition& condition, milliseconds limit) {
  const auto end = Clock::now() + limit;
  while (!condition()) {
    if (Clock::now() > end) {
      return false;
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

// A child that lives until it is told otherwise.
class Child {
 public:
  Child() : pid_(::fork()) {
    if (pid_ == 0) {
      for (;;) {
        ::pause();
      }
    }
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    if (pid_ > 0) {
      kill();
      reap();
    }
  }
  [[nodiscard]] pid_t pid() const { return pid_; }
  void kill() const { ::kill(pid_, SIGKILL); }
  void reap() {
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_;
};

PeerDeathMonitor::Peer peer(const ProcessPage& page, std::function<void()> on_death) {
  return {"pid 71 on host b", &page, nullptr, std::move(on_death)};
}

class MonitorTest : public ::testing::Test {
 protected:
  MonitorTest() { theirs_->heartbeat_ns = monotonic_ns(); }

  std::unique_ptr<ProcessPage> mine_ = std::make_unique<ProcessPage>();
  std::unique_ptr<ProcessPage> theirs_ = std::make_unique<ProcessPage>();
};

TEST_F(MonitorTest, DeathIsSeenWithinASecond) {
  Child child;
  PeerDeathMonitor monitor(*mine_, kCalm);
  std::atomic<int> deaths{0};
  monitor.watch_peer(child.pid(), peer(*theirs_, [&] { ++deaths; }));
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(deaths.load(), 0);
  child.kill();  // and nobody has reaped it yet
  EXPECT_TRUE(comes_true([&] { return deaths == 1; }, seconds(1)));
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT_EQ(deaths.load(), 1) << "a death is reported once";
}

TEST_F(MonitorTest, ADeathBeforeTheWatchIsSeen) {
  Child child;
  const pid_t pid = child.pid();
  child.kill();
  child.reap();
  PeerDeathMonitor monitor(*mine_, kCalm);
  std::atomic<int> deaths{0};
  monitor.watch_peer(pid, peer(*theirs_, [&] { ++deaths; }));
  EXPECT_TRUE(comes_true([&] { return deaths == 1; }, seconds(1)));
}

TEST_F(MonitorTest, DeathsAreReportedOnTheMonitorsThread) {
  // A caller may hold locks that the report takes.
  Child living;
  Child dead;
  const pid_t dead_pid = dead.pid();
  dead.kill();
  dead.reap();
  PeerDeathMonitor monitor(*mine_, kCalm);
  std::atomic<int> elsewhere{0};
  const auto caller = std::this_thread::get_id();
  const auto report = [&] { elsewhere += std::this_thread::get_id() != caller ? 1 : 100; };
  monitor.watch_peer(dead_pid, peer(*theirs_, report));
  monitor.watch_peer(living.pid(), peer(*theirs_, report));
  living.kill();
  EXPECT_TRUE(comes_true([&] { return elsewhere == 2; }, seconds(2))) << elsewhere;
}

TEST_F(MonitorTest, ManyDeathsAtOnce) {
  std::vector<std::unique_ptr<Child>> children;
  PeerDeathMonitor monitor(*mine_, kCalm);
  std::atomic<int> deaths{0};
  for (int i = 0; i < 5; ++i) {
    children.push_back(std::make_unique<Child>());
    monitor.watch_peer(children.back()->pid(), peer(*theirs_, [&deaths, i] {
                         ++deaths;
                         if (i == 0) {
                           throw std::runtime_error("a report that fails");
                         }
                       }));
  }
  for (const auto& child : children) {
    child->kill();
  }
  EXPECT_TRUE(comes_true([&] { return deaths == 5; }, seconds(2))) << deaths;
}

TEST_F(MonitorTest, TheOwnersHeartBeats) {
  PeerDeathMonitor monitor(*mine_, kCalm);
  const std::int64_t before = mine_->heartbeat_ns.load();
  EXPECT_NE(before, 0);
  EXPECT_TRUE(comes_true([&] { return mine_->heartbeat_ns.load() > before; }, seconds(2)));
}

TEST_F(MonitorTest, AStaleHeartIsWarnedOfOnce) {
  set_log_levels({});
  ::testing::internal::CaptureStderr();
  {
    PeerDeathMonitor monitor(*mine_, milliseconds(100));
    monitor.watch_peer(0, peer(*theirs_, [] { ADD_FAILURE() << "nobody died"; }));
    std::this_thread::sleep_for(milliseconds(1200));
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  const auto first = log.find("pid 71 on host b has shown no sign of life");
  EXPECT_NE(first, std::string::npos) << log;
  EXPECT_EQ(log.find("sign of life", first + 40), std::string::npos) << log;
}

TEST_F(MonitorTest, AHeartThatComesBackMayBeWarnedOfAgain) {
  set_log_levels({});
  ::testing::internal::CaptureStderr();
  {
    PeerDeathMonitor monitor(*mine_, milliseconds(300));
    monitor.watch_peer(0, peer(*theirs_, [] {}));
    std::this_thread::sleep_for(milliseconds(1000));
    for (int i = 0; i < 60; ++i) {
      theirs_->heartbeat_ns = monotonic_ns();
      std::this_thread::sleep_for(milliseconds(10));
    }
    std::this_thread::sleep_for(milliseconds(1000));
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  const auto first = log.find("sign of life");
  ASSERT_NE(first, std::string::npos) << log;
  const auto second = log.find("sign of life", first + 1);
  EXPECT_NE(second, std::string::npos) << log;
  EXPECT_EQ(log.find("sign of life", second + 1), std::string::npos) << log;
}

TEST_F(MonitorTest, APeerThatLeftInGoodOrderIsNotWarnedOf) {
  set_log_levels({});
  ::testing::internal::CaptureStderr();
  {
    theirs_->has_departed = 1;
    PeerDeathMonitor monitor(*mine_, milliseconds(50));
    monitor.watch_peer(0, peer(*theirs_, [] {}));
    std::this_thread::sleep_for(milliseconds(700));
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST_F(MonitorTest, AHeartThatStandsStillIsALossWhereNothingElseTells) {
  set_log_levels({.all = LogLevel::kError, .of_subsystems = {}});
  Child child;
  PeerDeathMonitor monitor(*mine_, milliseconds(50), milliseconds(300));
  std::atomic<int> losses{0};
  std::atomic<int> silences{0};
  auto invisible = peer(*theirs_, [&] { ++losses; });
  invisible.on_silence = [&] { ++silences; };
  monitor.watch_peer(0, std::move(invisible));
  // The system tells that this one lives.
  monitor.watch_peer(child.pid(), peer(*theirs_, [&] { losses += 100; }));
  EXPECT_TRUE(comes_true([&] { return silences == 1; }, seconds(3)));
  std::this_thread::sleep_for(milliseconds(600));
  EXPECT_EQ(silences, 1) << "it is reported once";
  EXPECT_EQ(losses, 0);
}

// Standard error as a pipe that nobody reads, and that is full.
class StalledLog {
 public:
  StalledLog() : usual_(::dup(STDERR_FILENO)) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
      std::abort();
    }
    read_ = FileDescriptor(ends[0]);
    const FileDescriptor write(ends[1]);
    const std::string filler(4096, 'x');
    while (::write(write.get(), filler.data(), filler.size()) > 0) {
    }
    ::fcntl(write.get(), F_SETFL, 0);
    ::dup2(write.get(), STDERR_FILENO);
  }
  StalledLog(const StalledLog&) = delete;
  StalledLog& operator=(const StalledLog&) = delete;
  ~StalledLog() {
    ::dup2(usual_.get(), STDERR_FILENO);
    // Whoever hangs in a write may end.
    std::string text(4096, ' ');
    for (int turn = 0; turn < 50; ++turn) {
      while (::read(read_.get(), text.data(), text.size()) > 0) {
      }
      std::this_thread::sleep_for(milliseconds(2));
    }
  }

 private:
  FileDescriptor usual_;
  FileDescriptor read_;
};

TEST_F(MonitorTest, ALogThatNobodyReadsDoesNotStopTheHeart) {
  set_log_levels({});
  const StalledLog stalled;
  PeerDeathMonitor monitor(*mine_, milliseconds(50));
  monitor.watch_peer(0, peer(*theirs_, [] {}));
  std::this_thread::sleep_for(milliseconds(700));  // the warning is on its way
  for (int beat = 0; beat < 3; ++beat) {
    const std::int64_t before = mine_->heartbeat_ns.load();
    EXPECT_TRUE(comes_true([&] { return mine_->heartbeat_ns.load() > before; }, seconds(2)));
  }
}

TEST_F(MonitorTest, ReadableDescriptorsAreServed) {
  const FileDescriptor event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  PeerDeathMonitor monitor(*mine_, kCalm);
  std::atomic<int> calls{0};
  monitor.watch_readable(event.get(), [&] {
    std::uint64_t count = 0;
    ASSERT_EQ(::read(event.get(), &count, sizeof count), static_cast<ssize_t>(sizeof count));
    ++calls;
  });
  for (int i = 1; i <= 3; ++i) {
    const std::uint64_t one = 1;
    ASSERT_EQ(::write(event.get(), &one, sizeof one), static_cast<ssize_t>(sizeof one));
    EXPECT_TRUE(comes_true([&] { return calls == i; }, seconds(2)));
  }
}

TEST_F(MonitorTest, AnErrorInACallbackDoesNotEndTheWatch) {
  set_log_levels({});
  ::testing::internal::CaptureStderr();
  const FileDescriptor event(::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK));
  std::atomic<int> calls{0};
  {
    PeerDeathMonitor monitor(*mine_, kCalm);
    monitor.watch_readable(event.get(), [&] {
      if (++calls == 1) {
        throw std::runtime_error("the first call fails");
      }
      std::uint64_t count = 0;
      static_cast<void>(::read(event.get(), &count, sizeof count));
    });
    EXPECT_TRUE(comes_true([&] { return calls >= 2; }, seconds(2)));
  }
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("the first call fails"),
            std::string::npos);
}

TEST_F(MonitorTest, ItEndsAtOnceAndTakesNoSignals) {
  const auto before = Clock::now();
  {
    PeerDeathMonitor monitor(*mine_, kCalm);
    // The caller's own mask is as it was.
    sigset_t mask;
    ::pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    EXPECT_EQ(::sigismember(&mask, SIGUSR1), 0);
  }
  EXPECT_LT(Clock::now() - before, seconds(2));
}

}  // namespace
}  // namespace pydist
