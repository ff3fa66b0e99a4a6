#include "base/children_at_exit.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>
#include <vector>

namespace pydist {
namespace {

using std::chrono::milliseconds;
using ::testing::ExitedWithCode;

constexpr milliseconds kShort{50};
constexpr milliseconds kLong{60'000};

// Each case runs in a new process, which is the one that has children.
class ChildrenAtExitDeathTest : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

template <typename Program>
Child start_child(const char* name, Program program) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    program();
    ::_exit(0);
  }
  return {name, pid};
}

Child that_exits(const char* name, int status) {
  return start_child(name, [status] { ::_exit(status); });
}

Child that_waits(const char* name) {
  return start_child(name, [] {
    while (true) {
      ::pause();
    }
  });
}

Child that_ignores_sigterm(const char* name) {
  // Before the fork, so that no signal can come earlier.
  const auto before = ::signal(SIGTERM, SIG_IGN);
  const Child child = that_waits(name);
  ::signal(SIGTERM, before);
  return child;
}

void exit_with(int status, std::vector<Child> children, milliseconds grace,
               const EarlierFailure& earlier = {}) {
  wait_for_children_at_exit(std::move(children), grace, earlier);
  std::exit(status);
}

TEST_F(ChildrenAtExitDeathTest, TheFirstBadStatusIsTheProgramsOwn) {
  EXPECT_EXIT(exit_with(0, {that_exits("rank 1", 0), that_exits("rank 2", 5)}, kLong),
              ExitedWithCode(5),
              "^pydist: rank 2 \\(pid [0-9]+\\) exited with status 5; all ranks end.\n$");
  EXPECT_EXIT(exit_with(0, {start_child("rank 1", [] { ::raise(SIGUSR1); })}, kLong),
              ExitedWithCode(1), "^pydist: rank 1 \\(pid [0-9]+\\) was killed by signal 10 ");
  EXPECT_EXIT(exit_with(0, {that_exits("rank 1", 0)}, kLong), ExitedWithCode(0), "^$");
}

TEST_F(ChildrenAtExitDeathTest, ChildrenThatFailAfterTheProgramAreNotBlamed) {
  EXPECT_EXIT(exit_with(3, {that_exits("rank 1", 5)}, kLong), ExitedWithCode(3), "^$");
  EXPECT_EXIT(exit_with(3, {that_waits("rank 1")}, kShort), ExitedWithCode(3),
              "^pydist: rank 0 has ended with status 3; rank 1 \\(pid [0-9]+\\) still ran 0.05 s "
              "later: SIGTERM.\n$");
}

TEST_F(ChildrenAtExitDeathTest, AnEarlierFailureCounts) {
  EXPECT_EXIT(exit_with(0, {}, kLong, {6, "words"}), ExitedWithCode(6), "^words\n$");
  EXPECT_EXIT(exit_with(0, {that_exits("rank 2", 5)}, kLong, {6, ""}), ExitedWithCode(6), "^$");
}

TEST_F(ChildrenAtExitDeathTest, TheStatusIsWhatTheKernelMakesOfIt) {
  EXPECT_EXIT(exit_with(256, {that_exits("rank 1", 5)}, kLong), ExitedWithCode(5), "status 5");
  EXPECT_EXIT(exit_with(-1, {that_waits("rank 1")}, kShort), ExitedWithCode(255),
              "ended with status 255; rank 1");
}

TEST_F(ChildrenAtExitDeathTest, WhoeverStaysIsKilled) {
  EXPECT_EXIT(exit_with(3, {that_ignores_sigterm("rank 1")}, kShort), ExitedWithCode(3),
              "later: SIGTERM.\n$");
}

// What has failed is the parent's to tell.
TEST_F(ChildrenAtExitDeathTest, AForkedChildLeavesItsSiblingsAlone) {
  constexpr int kWrong = 7;
  EXPECT_EXIT(
      {
        const Child sibling = that_exits("rank 1", 0);
        wait_for_children_at_exit({sibling}, kLong, {6, "words"});
        // Until the thread that watches has seen it. A checker of leaks hangs in a child that is
        // forked while another thread is in it.
        while (::kill(sibling.pid, 0) == 0) {
          std::this_thread::sleep_for(milliseconds{1});
        }
        const Child forked = start_child("", [] { std::exit(0); });
        int status = 0;
        ::waitpid(forked.pid, &status, 0);
        std::exit(WEXITSTATUS(status) == 6 ? kWrong : 0);
      },
      // That checker may have more, about the thread that isn't forked.
      ExitedWithCode(6), "^words\n");
}

// The thread that watches them does: exit() never gets behind the function that waits.
TEST_F(ChildrenAtExitDeathTest, AFailureIsSeenWhileExitFunctionsRun) {
  EXPECT_EXIT(
      {
        wait_for_children_at_exit({that_exits("rank 1", 5)}, kShort, {});
        while (true) {
          ::pause();
        }
      },
      ::testing::KilledBySignal(SIGTERM), "^pydist: rank 1 \\(pid [0-9]+\\) exited with status 5");
}

}  // namespace
}  // namespace pydist
