// Small collectives that are over on the caller's stack (Note [At once]), and what becomes of them
// where that does not work out: peers that are late, that disagree, that never come or go away, and
// other operations in front.

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "rank_processes.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;

// In the post, in its first line and behind, in a slot, and too long for any.
constexpr std::size_t kCountsOfEachWay[] = {0, 1, 10, 11, 64, 65, 500, 20'000, 100'000};

class NativeAtOnce : public ::testing::TestWithParam<int> {};

// One rank; two, which may have a core each; more than there are cores, of which none may spin.
INSTANTIATE_TEST_SUITE_P(Ranks, NativeAtOnce, ::testing::Values(1, 2, 3, 6));

TEST_P(NativeAtOnce, LatePeersAreWaitedFor) {
  run_ranks(GetParam(), [](RankOfTest& self) {
    for (int turn = 0; turn < 4 * self.size; ++turn) {
      for (const std::size_t count : kCountsOfEachWay) {
        std::vector<int> values(count, self.rank + turn);
        if (turn % self.size == self.rank && count < 1000) {
          std::this_thread::sleep_for(std::chrono::microseconds(turn * 50));
        }
        self.communicator->run(all_reduce(values));
        EXPECT_EQ(values,
                  std::vector<int>(count, self.size * (self.size - 1) / 2 + self.size * turn));
      }
    }
  });
}

// A rank that runs, one that submits and waits, and one whose progress thread does it all.
TEST_P(NativeAtOnce, PeersCannotTellHowAnotherOneRunsIt) {
  run_ranks(GetParam(), [](RankOfTest& self) {
    std::mt19937 same(7);  // on every rank
    std::mt19937 own(static_cast<unsigned>(self.rank));
    for (int turn = 0; turn < 400; ++turn) {
      const std::size_t count = kCountsOfEachWay[same() % std::size(kCountsOfEachWay)];
      std::vector<int> values(count, self.rank + 1);
      const auto how = own() % 4;
      if (how == 0) {
        self.communicator->submit(all_reduce(values))->wait();
      } else if (how == 1) {
        const WorkPtr work = self.communicator->submit(all_reduce(values));
        while (!work->is_completed()) {
          std::this_thread::yield();
        }
      } else {
        self.communicator->run(all_reduce(values));
      }
      ASSERT_EQ(values, std::vector<int>(count, self.size * (self.size + 1) / 2));
    }
  });
}

TEST_P(NativeAtOnce, ThreadsThatRunAndThreadsThatSubmit) {
  run_ranks(GetParam(), [](RankOfTest& self) {
    // All operations are alike, so it does not matter which of them meet.
    constexpr int kTurns = 150;
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 3; ++thread) {
      threads.emplace_back([&, thread] {
        for (int turn = 0; turn < kTurns; ++turn) {
          std::vector<int> values(3, 1);
          if (thread == 0) {
            self.communicator->submit(all_reduce(values))->wait();
          } else {
            self.communicator->run(all_reduce(values));
          }
          wrong.fetch_add(values == std::vector<int>(3, self.size) ? 0 : 1);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    EXPECT_EQ(wrong.load(), 0);
  });
}

// The root of a broadcast waits for nobody, until it is eight operations ahead.
TEST_P(NativeAtOnce, RootsRunAhead) {
  run_ranks(GetParam(), [](RankOfTest& self) {
    for (int turn = 0; turn < 30; ++turn) {
      const int root = turn % self.size;
      for (int i = 0; i < 20; ++i) {
        std::vector<int> word(turn % 2 == 0 ? 2 : 300, self.rank == root ? i : -1);
        if (self.rank != root && i == 9) {
          std::this_thread::yield();
        }
        self.communicator->run(broadcast(word, root, self.rank == root));
        EXPECT_EQ(word.back(), i);
      }
      std::vector<int> values(100, 1);
      self.communicator->run(all_reduce(values));
      EXPECT_EQ(values.back(), self.size);
    }
  });
}

TEST_P(NativeAtOnce, SymmetricBuffersOfEverySize) {
  run_ranks(GetParam(), [](RankOfTest& self) {
    const MemoryPtr memory = self.communicator->allocate(1 << 16, Device{});
    auto* const values = static_cast<int*>(memory->data());
    for (std::size_t count = 1; count <= (1 << 14); count *= 2) {
      // Of every second size, some ranks have the buffer elsewhere.
      std::vector<int> elsewhere(count);
      const bool is_elsewhere = count % 3 == 1 && self.rank % 2 == 1;
      int* const data = is_elsewhere ? elsewhere.data() : values;
      std::fill_n(data, count, self.rank);
      Operation operation;
      operation.kind = OpKind::kAllReduce;
      operation.inputs = {{data, count, DType::kInt32, {}}};
      operation.outputs = operation.inputs;
      self.communicator->run(std::move(operation));
      EXPECT_EQ(std::vector<int>(data, data + count),
                std::vector<int>(count, self.size * (self.size - 1) / 2));
    }
  });
}

// -- what goes wrong ------------------------------------------------------------------------------

void wait_for_failure(const RankOfTest& self) {
  const Deadline end = Deadline::in(std::chrono::seconds(20));
  while (self.communicator->failure() == nullptr && !end.has_passed()) {
    std::this_thread::sleep_for(milliseconds(1));
  }
}

TEST(NativeAtOnceFailureTest, LateRankThatDisagreesIsNamedAndNothingIsTouched) {
  for (const std::size_t count : {3, 300}) {
    for (const int late : {0, 1}) {
      const auto errors = collect_errors(2, [&](RankOfTest& self) {
        std::vector<int> values(self.rank == 0 ? count : count + 1, 1);
        self.communicator->run(barrier());
        if (self.rank == late) {
          std::this_thread::sleep_for(milliseconds(5));
        }
        try {
          self.communicator->run(all_reduce(values));
        } catch (...) {
          EXPECT_EQ(values, std::vector<int>(values.size(), 1));
          throw;
        }
      });
      for (const auto& error : errors) {
        ASSERT_NE(error, nullptr);
        EXPECT_EQ(describe(error).kind, ErrorKind::kMismatch) << describe(error).message;
        EXPECT_PRED2(contains, describe(error).message, join(count + 1, " elements"));
      }
    }
  }
}

TEST(NativeAtOnceFailureTest, RankThatNeverEntersIsATimeout) {
  for (const int size : {2, 3}) {
    for (const bool has_own_deadline : {false, true}) {
      const auto errors = collect_errors(size, [&](RankOfTest& self) {
        std::vector<int> values(3, 1);
        self.communicator->run(all_reduce(values));
        if (self.rank == 1) {
          wait_for_failure(self);
          return;
        }
        self.communicator->set_timeout(milliseconds(has_own_deadline ? 30'000 : 60));
        self.communicator->run(has_own_deadline ? with_timeout(all_reduce(values), milliseconds(60))
                                                : all_reduce(values));
      });
      ASSERT_NE(errors[0], nullptr);
      EXPECT_EQ(describe(errors[0]).kind, ErrorKind::kTimeout) << describe(errors[0]).message;
      EXPECT_PRED2(contains, describe(errors[0]).message, "rank 1");
      EXPECT_PRED2(contains, describe(errors[0]).message, "never entered all_reduce #2");
    }
  }
}

TEST(NativeAtOnceFailureTest, DeadlineThatHasPassedHarmsNoRankThatIsAlone) {
  run_ranks(1, [](RankOfTest& self) {
    std::vector<int> values(3, 1);
    self.communicator->run(with_timeout(all_reduce(values), milliseconds(0)));
  });
}

TEST(NativeAtOnceFailureTest, AbortByAnotherThreadEndsTheWait) {
  const auto errors = collect_errors(2, [](RankOfTest& self) {
    std::vector<int> values(3, 1);
    self.communicator->run(all_reduce(values));
    if (self.rank == 1) {
      wait_for_failure(self);
      return;
    }
    std::thread aborting([&] {
      std::this_thread::sleep_for(milliseconds(20));
      self.communicator->abort(Aborted("enough"));
    });
    const ErrorDescription error = error_of([&] { self.communicator->run(all_reduce(values)); });
    aborting.join();
    EXPECT_EQ(error.kind, ErrorKind::kAborted);
    EXPECT_PRED2(contains, error.message, "enough");
    EXPECT_EQ(values, std::vector<int>(3, 2));
  });
  EXPECT_EQ(errors, std::vector<std::exception_ptr>(2));
}

// -- the journal ----------------------------------------------------------------------------------

TEST(NativeAtOnceJournalTest, TellsWhatAWaitingRankIsInAndWhatItLeft) {
  run_ranks(2, [](RankOfTest& self) {
    std::vector<int> values(3, 1);
    Operation operation = all_reduce(values);
    operation.label = "bucket 7";
    const auto wait_until_rank_0 = [&](const std::string& words) {
      const auto end = Deadline::in(std::chrono::seconds(20));
      std::string line;
      do {
        line = self.communicator->whereabouts()[0];
      } while (!contains(line, words) && !end.has_passed());
      EXPECT_PRED2(contains, line, words);
    };
    if (self.rank == 1) {
      wait_until_rank_0("is in all_reduce #1 (bucket 7)");
    }
    self.communicator->run(operation);
    if (self.rank == 1) {
      wait_until_rank_0("is in barrier #2");
    }
    self.communicator->run(barrier());
    if (self.rank == 1) {
      wait_until_rank_0("left barrier #2");
    }
  });
}

// -- processes ------------------------------------------------------------------------------------

const RankProgram small_until_killed("small_until_killed",
                                     [](RankOfTest& self, const std::string& turns) {
                                       for (int turn = 0;; ++turn) {
                                         if (self.rank == 1 && turn == std::stoi(turns)) {
                                           ::raise(SIGKILL);
                                         }
                                         std::vector<int> values(2, 1);
                                         self.communicator->run(all_reduce(values));
                                       }
                                     });

TEST(NativeAtOnceProcessesTest, KilledRankIsNamed) {
  for (const char* const turns : {"0", "1", "5000"}) {
    RankProcesses ranks("small_until_killed", 2, turns);
    EXPECT_FALSE(ranks.wait(1).has_ended_by_itself);
    const RankOutcome outcome = ranks.wait(0);
    ASSERT_TRUE(outcome.error.has_value());
    EXPECT_EQ(outcome.error->kind, ErrorKind::kPeerLost) << outcome.error->message;
    EXPECT_PRED2(contains, outcome.error->message, "rank 1");
  }
}

}  // namespace
}  // namespace pydist::testing
