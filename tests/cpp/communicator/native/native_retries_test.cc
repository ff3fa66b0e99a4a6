// What fails on one rank of a native group while it is made, or while memory is allocated, is told
// to all within a second, and can be tried again.

#include <gtest/gtest.h>

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "communicator/native/native_communicator.h"
#include "communicator/peers/introduction.h"
#include "few_descriptors.h"
#include "rank_processes.h"
#include "topology/rendezvous.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kSoon{2000 * kSlowdown};

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(rank);
  }
  return ranks;
}

void expect_sum(const CommunicatorPtr& communicator) {
  std::vector<float> values(100, 1.0F);
  communicator->run(all_reduce(values));
  EXPECT_EQ(values[99], static_cast<float>(communicator->size()));
}

// All ranks call it at the same time; expects that it throws an error that names the rank
// `culprit`.
void expect_failure_of(int culprit, const std::function<void()>& action, const std::string& reason,
                       ErrorKind kind = ErrorKind::kTransport) {
  const auto before = Clock::now();
  const ErrorDescription error = error_of(action);
  EXPECT_LT(Clock::now() - before, kSoon);
  EXPECT_EQ(error.kind, kind) << error.message;
  EXPECT_PRED2(contains, error.message, reason);
  EXPECT_PRED2(contains, error.message, join("rank ", culprit));
}

// -- making a group -------------------------------------------------------------------------------

TEST(NativeRetriesTest, ARankWithoutThreadsIsHeardOf) {
  for (const int size : {2, 3}) {
    std::atomic<int> prepared{0};
    std::atomic<int> failed{0};
    const int culprit = size - 1;
    const auto errors = run_threads(
        size,
        [&](RankOfTest& self) {
          const auto wait_for_all = [&](std::atomic<int>& count) {
            ++count;
            while (count < size) {
              std::this_thread::sleep_for(milliseconds(1));
            }
          };
          if (self.rank != culprit) {
            static_cast<void>(self.endpoint->card());  // has its threads already
          }
          wait_for_all(prepared);
          {
            const std::unique_ptr<NoThreads> no_threads =
                self.rank == culprit ? std::make_unique<NoThreads>() : nullptr;
            expect_failure_of(
                culprit, [&] { static_cast<void>(join_group(self, "first")); },
                "gives this process no more threads");
          }
          wait_for_all(failed);
          expect_sum(join_group(self, "second"));
        },
        test_environment());
    EXPECT_EQ(std::count(errors.begin(), errors.end(), nullptr), size);
  }
}

// Rank 2 introduces itself and dies; one of the others knows, and the third only hears of it.
TEST(NativeRetriesTest, WhoOnlyHearsOfADeathDoesNotWaitForTheDead) {
  for (const int witness : {0, 1}) {
    std::atomic<bool> is_dead{false};
    std::atomic<int> ended{0};
    const auto play = [&](RankOfTest& self) {
      const auto before = Clock::now();
      NativeOptions options;
      options.environment = test_environment();
      if (self.rank == 2) {
        Introduction last;
        last.card = self.endpoint->card();
        last.settings = settings_text(options.environment);
        static_cast<void>(exchange(*self.store, join("pydist/", options.name, "/introduction"), 2,
                                   3, last.to_text(), nullptr, Deadline::in(seconds(20))));
        is_dead = true;
        while (ended < 2) {
          std::this_thread::sleep_for(milliseconds(1));
        }
        return;
      }
      if (self.rank == witness) {
        options.check_hope = [&is_dead] {
          if (is_dead) {
            throw PeerLost("the third one has died");
          }
        };
      }
      const ErrorDescription error = error_of([&] {
        static_cast<void>(
            create_native_communicator(self.store, self.rank, 3, options, {self.endpoint}));
      });
      ++ended;
      EXPECT_LT(Clock::now() - before, kSoon);
      EXPECT_EQ(error.kind, ErrorKind::kPeerLost) << error.message;
      EXPECT_PRED2(contains, error.message, join("rank ", witness));
      EXPECT_PRED2(contains, error.message, "the third one has died");
    };
    const auto errors = run_threads(3, play, test_environment());
    EXPECT_EQ(std::count(errors.begin(), errors.end(), nullptr), 3);
  }
}

TEST(NativeRetriesTest, RanksWithDifferentSecretsAreRefusedAtOnce) {
  const auto errors = run_threads(
      2,
      [](RankOfTest& self) {
        Environment environment = test_environment();
        environment.job_secret = std::string(32, self.rank == 0 ? 'a' : 'b');
        expect_failure_of(
            1, [&] { static_cast<void>(join_group(self, "first", environment)); },
            "PYDIST_JOB_SECRET", ErrorKind::kMismatch);
        environment.job_secret = std::string(32, 'c');
        const CommunicatorPtr group = join_group(self, "second", environment);
        expect_sum(group);
        expect_sum(group->split({1, 0}));
      },
      test_environment());
  EXPECT_EQ(std::count(errors.begin(), errors.end(), nullptr), 2);
}

// Nobody's first call is made one with another's second: a rank that comes when the others have
// given up reads so, as often as they have.
TEST(NativeRetriesTest, WhoComesTooLateReadsWhatTheOthersDid) {
  for (const int absent : {0, 1, 2}) {
    std::atomic<int> failures{0};
    run_ranks(3, [absent, &failures](RankOfTest& self) {
      if (self.rank != absent) {
        self.communicator->set_timeout(milliseconds(300 * kSlowdown));
        for (int attempt = 0; attempt < 2; ++attempt) {
          const ErrorDescription error =
              error_of([&] { static_cast<void>(self.communicator->split(all_ranks(3))); });
          EXPECT_EQ(error.kind, ErrorKind::kTimeout) << error.message;
          EXPECT_PRED2(contains, error.message, join(absent));
          ++failures;
        }
        self.communicator->set_timeout(seconds(20));
      }
      while (failures < 4) {
        std::this_thread::sleep_for(milliseconds(1));
      }
      for (int attempt = 0; self.rank == absent && attempt < 2; ++attempt) {
        expect_failure_of(
            absent, [&] { static_cast<void>(self.communicator->split(all_ranks(3))); },
            "did not come in time", ErrorKind::kTimeout);
      }
      const CommunicatorPtr group = self.communicator->split(all_ranks(3));
      expect_sum(group);
      const CommunicatorPtr next = self.communicator->split(all_ranks(3));
      EXPECT_NE(next->name(), group->name());
      expect_sum(next);
    });
  }
}

TEST(NativeRetriesTest, ThreadsThatSplitTheSameRanksMeetOneByOne) {
  run_ranks(2, [](RankOfTest& self) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&self] { expect_sum(self.communicator->split({1, 0})); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  });
}

// Ranks that are processes meet in the store before and after an attempt. `argument`: the culprit,
// and how many descriptors it still has.
void meet(RankOfTest& self, const std::string& where) {
  self.store->set(join(where, "/", self.rank), "here");
  for (int rank = 0; rank < self.size; ++rank) {
    static_cast<void>(self.store->get(join(where, "/", rank), Deadline::in(seconds(30))));
  }
}

const RankProgram without_descriptors("without descriptors", [](RankOfTest& self,
                                                                const std::string& argument) {
  const int culprit = argument[0] - '0';
  for (const int spare : {1, 2, 4}) {  // a store of files needs one when it is asked
    meet(self, join("before ", spare));
    {
      std::unique_ptr<FewDescriptors> few;
      const auto split = [&] { static_cast<void>(self.communicator->split(all_ranks(self.size))); };
      if (self.rank == culprit) {
        few = std::make_unique<FewDescriptors>(spare);
      }
      expect_failure_of(culprit, split, "Too many open files");
    }
    meet(self, join("between ", spare));
    expect_sum(self.communicator->split(all_ranks(self.size)));
  }
});

TEST(NativeRetriesTest, ARankWithoutDescriptorsIsHeardOf) {
  if (kSlowdown != 1) {
    GTEST_SKIP() << "UBSan opens a pipe for each type that it meets for the first time";
  }
  for (const auto& [size, culprit] : {std::pair(2, 0), std::pair(2, 1), std::pair(3, 1)}) {
    RankProcesses ranks("without descriptors", size, join(culprit));
    for (int rank = 0; rank < size; ++rank) {
      const RankOutcome outcome = ranks.wait(rank);
      EXPECT_TRUE(outcome.has_ended_by_itself);
      EXPECT_FALSE(outcome.error) << outcome.error->message;
    }
  }
}

// -- allocating -----------------------------------------------------------------------------------

const RankProgram without_address_space("without address space", [](RankOfTest& self,
                                                                    const std::string& argument) {
  const int culprit = argument[0] - '0';
  const auto allocate = [&] {
    static_cast<void>(self.communicator->allocate(std::size_t{256} << 20, Device{}));
  };
  for (int attempt = 0; attempt < 3; ++attempt) {
    meet(self, join("before ", attempt));
    rlimit usual{};
    ASSERT_EQ(::getrlimit(RLIMIT_AS, &usual), 0);
    if (self.rank == culprit) {
      rlimit limit = usual;
      limit.rlim_cur = std::size_t{64} << 20;  // less than it has
      ASSERT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
    }
    expect_failure_of(culprit, allocate, "Cannot allocate memory");
    ASSERT_EQ(::setrlimit(RLIMIT_AS, &usual), 0);
  }
  meet(self, "after");
  const MemoryPtr memory = self.communicator->allocate(std::size_t{1} << 20, Device{});
  static_cast<std::byte*>(memory->data())[0] = std::byte{1};
  expect_sum(self.communicator);
});

// Host 0 has a block ready, host 1 needs memory for it, which rank 1 does not get: host 0 gives the
// block back, with its memory, and gets it the next time.
const RankProgram without_address_space_beside_a_ready_host(
    "without address space beside a ready host", [](RankOfTest& self, const std::string&) {
      constexpr std::size_t kBytes = std::size_t{256} << 20;
      MemoryPtr first = self.communicator->allocate(kBytes, Device{});
      const void* const place = first->data();
      const MemoryPtr kept = self.rank == 0 ? nullptr : first;
      first.reset();
      for (int attempt = 0; attempt < 2; ++attempt) {
        meet(self, join("before ", attempt));
        rlimit usual{};
        ASSERT_EQ(::getrlimit(RLIMIT_AS, &usual), 0);
        if (self.rank == 1) {
          rlimit limit = usual;
          limit.rlim_cur = std::size_t{64} << 20;  // less than it has
          ASSERT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
        }
        expect_failure_of(
            1, [&] { static_cast<void>(self.communicator->allocate(kBytes, Device{})); },
            "Cannot allocate memory");
        ASSERT_EQ(::setrlimit(RLIMIT_AS, &usual), 0);
      }
      meet(self, "after");
      const MemoryPtr memory = self.communicator->allocate(kBytes, Device{});
      EXPECT_EQ(memory->data() == place, self.rank == 0);
      static_cast<std::byte*>(memory->data())[kBytes - 1] = std::byte{1};
      expect_sum(self.communicator);
    });

TEST(NativeRetriesTest, AHostThatHasTheMemoryGivesItBackWhereAnotherHasNone) {
  if (kSlowdown != 1) {
    GTEST_SKIP() << "sanitizers need address space of their own";
  }
  RankProcesses ranks("without address space beside a ready host", 3, "", {0, 1, 1});
  for (int rank = 0; rank < 3; ++rank) {
    const RankOutcome outcome = ranks.wait(rank);
    EXPECT_TRUE(outcome.has_ended_by_itself);
    EXPECT_FALSE(outcome.error) << outcome.error->message;
  }
}

TEST(NativeRetriesTest, ARankWithoutAddressSpaceIsHeardOf) {
  if (kSlowdown != 1) {
    GTEST_SKIP() << "sanitizers need address space of their own";
  }
  const HostsOfRanks one_host;
  const HostsOfRanks two_hosts{0, 1, 1};
  for (const auto& [size, culprit, hosts] :
       {std::tuple(2, 0, one_host), std::tuple(2, 1, one_host), std::tuple(3, 2, one_host),
        std::tuple(3, 0, two_hosts), std::tuple(3, 1, two_hosts), std::tuple(3, 2, two_hosts)}) {
    RankProcesses ranks("without address space", size, join(culprit), hosts);
    for (int rank = 0; rank < size; ++rank) {
      const RankOutcome outcome = ranks.wait(rank);
      EXPECT_TRUE(outcome.has_ended_by_itself);
      EXPECT_FALSE(outcome.error) << outcome.error->message;
    }
  }
}

// Rank 0 has posted where a block goes, and is stopped before the others have asked it for
// anything.
const RankProgram allocation_with_a_stopped_rank(
    "allocation with a stopped rank", [](RankOfTest& self, const std::string& end) {
      if (self.rank == 0) {
        self.store->set("rank 0 begins", "");
        static_cast<void>(self.communicator->allocate(std::size_t{8} << 20, Device{}));
        return;
      }
      static_cast<void>(self.store->get("rank 0 has stopped", Deadline::in(seconds(30))));
      std::atomic<bool> is_over{false};
      std::thread allocating([&] {
        const ErrorDescription error = error_of([&] {
          static_cast<void>(self.communicator->allocate(std::size_t{8} << 20, Device{}));
        });
        EXPECT_EQ(error.kind, end == "kill" ? ErrorKind::kPeerLost : ErrorKind::kAborted)
            << error.message;
        is_over = true;
      });
      std::this_thread::sleep_for(milliseconds(500));
      EXPECT_FALSE(is_over);
      const auto before = Clock::now();
      if (end == "kill") {
        self.store->set("now", "");
      } else if (end == "abort") {
        self.communicator->abort(Aborted("the test has seen enough"));
      } else {
        self.communicator->shutdown();
      }
      allocating.join();
      EXPECT_LT(Clock::now() - before, kSoon);
      self.store->set("it is over", "");
    });

TEST(NativeRetriesTest, AllocatingEndsAlthoughRank0IsStopped) {
  for (const std::string end : {"abort", "shutdown", "kill"}) {
    RankProcesses ranks("allocation with a stopped rank", 2, end);
    static_cast<void>(ranks.store().get("rank 0 begins", Deadline::in(seconds(30))));
    std::this_thread::sleep_for(milliseconds(300));
    ranks.signal(0, SIGSTOP);
    ranks.store().set("rank 0 has stopped", "");
    if (end == "kill") {
      static_cast<void>(ranks.store().get("now", Deadline::in(seconds(30))));
      ranks.signal(0, SIGKILL);
    }
    const RankOutcome outcome = ranks.wait(1);
    EXPECT_TRUE(outcome.has_ended_by_itself) << end;
    EXPECT_FALSE(outcome.error) << end << ": " << outcome.error->message;
  }
}

}  // namespace
}  // namespace pydist::testing
