#include "c10d/gloo/gloo_death_watch.h"

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

namespace pydist {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

template <typename Condition>
bool comes_true(const Condition& condition) {
  const auto end = Clock::now() + seconds(20);
  while (!condition()) {
    if (Clock::now() > end) {
      return false;
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

// Another process, which shows its identity and then waits until it is killed.
class Other {
 public:
  Other() {
    std::array<int, 2> channel{};
    EXPECT_EQ(::pipe(channel.data()), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::alarm(60);
      const ProcessIdentity self = ProcessIdentity::own(std::nullopt);
      if (::write(channel[1], &self, sizeof self) != sizeof self) {
        ::_exit(1);
      }
      for (;;) {
        ::pause();
      }
    }
    EXPECT_EQ(::read(channel[0], &identity_, sizeof identity_),
              static_cast<ssize_t>(sizeof identity_));
    ::close(channel[0]);
    ::close(channel[1]);
  }
  Other(const Other&) = delete;
  Other& operator=(const Other&) = delete;
  ~Other() {
    kill();
    ::waitpid(pid_, nullptr, 0);
  }

  [[nodiscard]] const ProcessIdentity& identity() const { return identity_; }
  void kill() const { ::kill(pid_, SIGKILL); }

 private:
  pid_t pid_ = 0;
  ProcessIdentity identity_;
};

TEST(DeathWatchTest, AProcessIsKnownByHostNumberAndStart) {
  const ProcessIdentity self = ProcessIdentity::own(std::nullopt);
  const Other other;
  EXPECT_EQ(self.pid, ::getpid());
  EXPECT_NE(self.started, 0u);
  EXPECT_EQ(other.identity().machine, self.machine);
  EXPECT_NE(other.identity().pid, self.pid);
  EXPECT_NE(ProcessIdentity::own("elsewhere").machine, self.machine);
  EXPECT_EQ(self.description().find(std::string("pid ") + std::to_string(::getpid()) + " on host "),
            0u);
}

TEST(DeathWatchTest, TheOneThatDiesIsTold) {
  const ProcessIdentity self = ProcessIdentity::own(std::nullopt);
  const Other living;
  const Other dying;
  std::atomic<int> calls{0};
  std::atomic<std::size_t> told{0};
  const DeathWatch watch({self, living.identity(), dying.identity()}, self, [&](std::size_t index) {
    told = index;
    ++calls;
  });
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(calls, 0);
  EXPECT_FALSE(has_ended(dying.identity().pid, dying.identity().started));
  dying.kill();
  EXPECT_TRUE(comes_true([&] { return calls == 1; }));
  EXPECT_EQ(told, 2u);
  EXPECT_TRUE(has_ended(dying.identity().pid, dying.identity().started));
  EXPECT_FALSE(has_ended(living.identity().pid, living.identity().started));
}

TEST(DeathWatchTest, OneThatHadDiedBeforeIsTold) {
  const ProcessIdentity self = ProcessIdentity::own(std::nullopt);
  ProcessIdentity gone;
  {
    const Other other;
    gone = other.identity();
  }
  // The number may be another process's by now: this one's, say, that started at another time.
  ProcessIdentity later = ProcessIdentity::own(std::nullopt);
  const Other other;
  later.pid = other.identity().pid;
  later.started = other.identity().started + 1;
  std::atomic<unsigned> told{0};
  const DeathWatch watch({gone, later}, self, [&](std::size_t index) { told |= 1u << index; });
  EXPECT_TRUE(comes_true([&] { return told == 3u; }));
}

TEST(DeathWatchTest, ProcessesOfOtherHostsAreNotWatched) {
  const ProcessIdentity self = ProcessIdentity::own(std::nullopt);
  ProcessIdentity far;
  {
    const Other other;
    far = other.identity();
  }
  far.machine ^= 1;
  ProcessIdentity unknown = far;
  unknown.machine = self.machine;
  unknown.started = 0;
  std::atomic<int> calls{0};
  {
    const DeathWatch watch({far, unknown}, self, [&](std::size_t) { ++calls; });
    std::this_thread::sleep_for(milliseconds(50));
  }
  EXPECT_EQ(calls, 0);
}

// What a data-loader worker does: it holds everything open that the process had open.
TEST(DeathWatchTest, AForkedProcessHidesNoDeath) {
  const ProcessIdentity self = ProcessIdentity::own(std::nullopt);
  std::array<int, 2> channel{};
  ASSERT_EQ(::pipe(channel.data()), 0);
  const pid_t parent = ::fork();
  if (parent == 0) {
    ::alarm(60);
    const ProcessIdentity identity = ProcessIdentity::own(std::nullopt);
    const pid_t worker = ::fork();
    if (worker == 0) {
      ::alarm(60);
      for (;;) {
        ::pause();
      }
    }
    const std::array<std::int64_t, 2> words{static_cast<std::int64_t>(identity.started), worker};
    if (::write(channel[1], words.data(), sizeof words) != sizeof words) {
      ::_exit(1);
    }
    for (;;) {
      ::pause();
    }
  }
  std::array<std::int64_t, 2> words{};
  ASSERT_EQ(::read(channel[0], words.data(), sizeof words), static_cast<ssize_t>(sizeof words));
  ProcessIdentity watched = self;
  watched.pid = parent;
  watched.started = static_cast<std::uint64_t>(words[0]);
  std::atomic<int> calls{0};
  const DeathWatch watch({watched}, self, [&](std::size_t) { ++calls; });
  ::kill(parent, SIGKILL);
  EXPECT_TRUE(comes_true([&] { return calls == 1; }));
  ::kill(static_cast<pid_t>(words[1]), SIGKILL);
  ::waitpid(parent, nullptr, 0);
  ::close(channel[0]);
  ::close(channel[1]);
}

}  // namespace
}  // namespace pydist
