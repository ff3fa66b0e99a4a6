// A rank that falls silent without having died: one that is seen to be stopped is told from one of
// which the system tells nothing but that its heart does not beat.

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "rank_processes.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// From now on these system calls fail on this thread, and on those that it starts.
void forbid(std::initializer_list<long> calls) {
  std::vector<sock_filter> filter{BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (const long call : calls) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(call), 0, 1));
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  ASSERT_EQ(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

// Rank 1 falls silent, and rank 0, which has no pidfd of it, waits for it for longer than a heart
// may stand still of which nothing else is known.
const RankProgram falls_silent("falls silent", [](RankOfTest& self, const std::string& how) {
  Environment environment = test_environment();
  environment.heartbeat_warning = milliseconds(500);
  environment.heartbeat_timeout = milliseconds(1000);
  self.endpoint = std::make_shared<Endpoint>(environment);
  forbid({SYS_pidfd_open});
  if (how == "unseen" && self.rank == 0) {
    // The thread that watches cannot look into /proc.
    std::thread([&self] {
      forbid({SYS_openat});
      static_cast<void>(self.endpoint->server());
    }).join();
  }
  const CommunicatorPtr group = join_group(self, "without pidfds", environment);
  group->run(barrier());
  self.store->set(join("ready/", self.rank), "");
  if (self.rank == 1) {
    std::this_thread::sleep_for(seconds(60));
  }
  group->run(with_timeout(barrier(), how == "unseen" ? milliseconds(20'000) : milliseconds(3500)));
});

ErrorDescription error_about_a_silent_rank(const std::string& how) {
  RankProcesses ranks("falls silent", 2, how);
  static_cast<void>(ranks.store().get("ready/1", Deadline::in(seconds(30))));
  ranks.signal(1, SIGSTOP);
  const RankOutcome outcome = ranks.wait(0);
  EXPECT_TRUE(outcome.error);
  return outcome.error.value_or(ErrorDescription{});
}

TEST(NativeSilenceTest, AStoppedRankIsNoLossAndTheDeadlineSaysThatItIsStopped) {
  const ErrorDescription error = error_about_a_silent_rank("stopped");
  EXPECT_EQ(error.kind, ErrorKind::kTimeout) << error.message;
  EXPECT_PRED2(contains, error.message, "rank 1 (pid ");
  EXPECT_PRED2(contains, error.message, "is stopped (SIGSTOP or a debugger)");
  EXPECT_PRED2(contains, error.message, "has shown no sign of life for ");
}

TEST(NativeSilenceTest, ARankOfWhichNothingIsKnownIsLostWhenItsHeartStandsStill) {
  const ErrorDescription error = error_about_a_silent_rank("unseen");
  EXPECT_EQ(error.kind, ErrorKind::kPeerLost) << error.message;
  EXPECT_PRED2(contains, error.message, "rank 1 (pid ");
  EXPECT_PRED2(contains, error.message, "the system does not tell whether it lives");
  EXPECT_FALSE(contains(error.message, "stopped")) << error.message;
}

}  // namespace
}  // namespace pydist::testing
