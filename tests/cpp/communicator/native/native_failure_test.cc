// How the native engine fails: on every rank, by name, in time, and before anybody's data is
// touched. Ranks are threads here; communicator/native_processes_test.cc kills and stops real
// processes.

#include <gtest/gtest.h>

#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <set>
#include <string>
#include <thread>

#include "collective_case.h"
#include "communicator/native/native_communicator.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

TEST(NativeFailureTest, FailedGroupRefusesEverythingWithTheSameError) {
  const auto errors = collect_errors(2, [](RankOfTest& self) {
    std::vector<int> values(3, 1);
    std::vector<float> floats(3, 1);
    const CommunicatorPtr sound = self.communicator->split({0, 1});
    EXPECT_EQ(error_of([&] {
                self.communicator->run(self.rank == 0 ? all_reduce(values) : all_reduce(floats));
              }).kind,
              ErrorKind::kMismatch);
    EXPECT_NE(self.communicator->failure(), nullptr);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(error_of([&] { self.communicator->run(barrier()); }).kind, ErrorKind::kMismatch);
      EXPECT_EQ(
          error_of([&] { self.communicator->submit(receive_from(0, 1, values))->wait(); }).kind,
          ErrorKind::kMismatch);
      EXPECT_EQ(
          error_of([&] { static_cast<void>(self.communicator->allocate(100, Device{})); }).kind,
          ErrorKind::kMismatch);
    }
    // Other groups are as good as ever.
    sound->run(all_reduce(values));
    EXPECT_EQ(values, std::vector<int>(3, 2));
  });
  EXPECT_EQ(errors, std::vector<std::exception_ptr>(2));
}

// -- misuse ---------------------------------------------------------------------------------------

TEST(NativeFailureTest, MalformedOperationsAreRefusedAndTheGroupGoesOn) {
  run_ranks(2, [](RankOfTest& self) {
    std::vector<int> five(5, 1);
    std::vector<int> four(4, 1);
    std::vector<float> floats(5, 1);
    std::vector<Operation> wrong;
    wrong.push_back(all_reduce(five));
    wrong.back().outputs = {buffer_of(four)};
    wrong.push_back(all_reduce(five));
    wrong.back().outputs = {buffer_of(floats)};
    wrong.push_back(all_reduce(five, ReduceOp::kMean));
    wrong.push_back(all_reduce(floats, ReduceOp::kBand));
    wrong.push_back(all_reduce(five));
    wrong.back().outputs.clear();
    wrong.push_back(all_reduce(five));
    wrong.back().inputs[0].data = nullptr;
    wrong.push_back(all_reduce(five));
    wrong.back().inputs[0].device = wrong.back().outputs[0].device = {DeviceType::kCuda, 0};
    wrong.push_back(all_reduce(five));
    wrong.back().wire_dtype = DType::kBFloat16;
    wrong.push_back(broadcast(five, 2, false));
    wrong.push_back(broadcast(five, -1, false));
    wrong.push_back(all_reduce(five));
    wrong.back().kind = OpKind::kReduceScatter;  // 5 elements for 2 ranks
    wrong.emplace_back().kind = OpKind::kAllocate;
    for (std::size_t i = 0; i < wrong.size(); ++i) {
      EXPECT_EQ(error_of([&] { self.communicator->run(wrong[i]); }).kind, ErrorKind::kInvalidUsage)
          << "operation " << i;
      EXPECT_EQ(error_of([&] { static_cast<void>(self.communicator->submit(wrong[i])); }).kind,
                ErrorKind::kInvalidUsage)
          << "operation " << i;
    }
    self.communicator->run(all_reduce(five));
    EXPECT_EQ(five, std::vector<int>(5, 2));
  });
}

TEST(NativeFailureTest, ShutDownGroupRefusesEverything) {
  run_ranks(2, [](RankOfTest& self) {
    const CommunicatorPtr group = self.communicator->split({0, 1});
    group->shutdown();
    group->shutdown();
    std::vector<int> values(3, 1);
    EXPECT_EQ(error_of([&] { group->run(barrier()); }).kind, ErrorKind::kInvalidUsage);
    EXPECT_EQ(error_of([&] { static_cast<void>(group->submit(send_to(0, 0, values))); }).kind,
              ErrorKind::kInvalidUsage);
    EXPECT_EQ(error_of([&] { static_cast<void>(group->allocate(1, Device{})); }).kind,
              ErrorKind::kInvalidUsage);
    EXPECT_EQ(error_of([&] { group->set_timeout(milliseconds(0)); }).kind,
              ErrorKind::kInvalidUsage);
  });
}

// -- submission is all or nothing -----------------------------------------------------------------

// The caller frees the buffers of what was not taken.
TEST(NativeFailureTest, WhatCouldNotBeSubmittedIsNotUnderWay) {
  std::promise<void> is_over;
  const std::shared_future<void> over(is_over.get_future());
  run_ranks(2, [&](RankOfTest& self) {
    std::vector<int> values(3000, 1);
    self.communicator->run(barrier());
    if (self.rank == 0) {
      {
        const NoThreads none;
        std::vector<int> freed(3000, 7);
        const auto tries = {
            error_of([&] { static_cast<void>(self.communicator->submit(all_reduce(freed))); }),
            error_of([&] { static_cast<void>(self.communicator->submit(send_to(1, 0, freed))); }),
            error_of([&] {
              static_cast<void>(
                  self.communicator->submit_grouped({all_reduce(freed), send_to(1, 0, freed)}));
            })};
        for (const ErrorDescription& error : tries) {
          EXPECT_EQ(error.kind, ErrorKind::kTransport) << error.message;
          EXPECT_PRED2(contains, error.message, "thread");
        }
      }
      EXPECT_EQ(self.communicator->failure(), nullptr);
      is_over.set_value();
    }
    over.wait_for(std::chrono::seconds(30));
    self.communicator->submit(all_reduce(values))->wait();
    EXPECT_EQ(values, std::vector<int>(3000, 2));
    self.communicator->run(barrier());
  });
}

// -- deadlines ------------------------------------------------------------------------------------

TEST(NativeFailureTest, TimeoutNamesTheRankThatNeverEnteredAndWhatItDoes) {
  const auto errors = collect_errors(3, [](RankOfTest& self) {
    std::vector<int> values(3, 1);
    const CommunicatorPtr pair = self.rank == 1 ? nullptr : self.communicator->split({0, 2});
    self.communicator->run(all_reduce(values));  // so rank 1 goes on once the pair is made
    if (self.rank == 2) {
      // Elsewhere: in another group.
      pair->run(barrier());
      return;
    }
    Operation operation = all_reduce(values);
    operation.label = "bucket 7, first parameter layer4.bias";
    const auto start = Clock::now();
    try {
      self.communicator->run(with_timeout(operation, milliseconds(300)));
    } catch (...) {
      EXPECT_LT(Clock::now() - start, milliseconds(300) + kAtOnce);
      if (self.rank == 0) {
        pair->run(barrier());  // lets rank 2 go
      }
      throw;
    }
  });
  for (const int rank : {0, 1}) {
    const auto& error = errors[static_cast<std::size_t>(rank)];
    ASSERT_NE(error, nullptr);
    const ErrorDescription what = describe(error);
    EXPECT_EQ(what.kind, ErrorKind::kTimeout);
    EXPECT_PRED2(contains, what.message,
                 "timed out in all_reduce #2 (bucket 7, first parameter layer4.bias)");
    EXPECT_PRED2(contains, what.message, "rank 2 (pid ");
    EXPECT_EQ(what.blame.ranks, std::vector<int>{2});
    EXPECT_EQ(what.blame.pid, ::getpid());
    EXPECT_PRED2(contains, what.blame.operation, "all_reduce #2 (bucket 7");
    EXPECT_PRED2(contains, what.blame.cause, "is in barrier #1");
    EXPECT_PRED2(contains, what.message, "never entered all_reduce #2; it is in barrier #1 of ");
    EXPECT_PRED2(contains, what.message, "of another group since 0.");
  }
  EXPECT_EQ(errors[2], nullptr);
}

TEST(NativeFailureTest, TimeoutSaysThatARankIsInNoOperation) {
  const auto errors = collect_errors(2, [](RankOfTest& self) {
    self.communicator->run(barrier());
    if (self.rank == 1) {
      // Busy with something of its own until the other has given up.
      while (self.communicator->failure() == nullptr) {
        std::this_thread::sleep_for(milliseconds(5));
      }
      self.communicator->run(barrier());
    }
    self.communicator->set_timeout(milliseconds(150));
    self.communicator->run(barrier());
  });
  for (const auto& error : errors) {
    ASSERT_NE(error, nullptr);
    EXPECT_EQ(describe(error).kind, ErrorKind::kTimeout);
    EXPECT_PRED2(contains, describe(error).message, "rank 1 (pid ");
    EXPECT_PRED2(contains, describe(error).message, "never entered barrier #2; it left barrier #1");
    EXPECT_PRED2(contains, describe(error).message, "ago and is in no operation");
  }
}

TEST(NativeFailureTest, WhereaboutsHasALineForEveryRank) {
  run_ranks(3, [](RankOfTest& self) {
    const auto fresh = self.communicator->whereabouts();
    ASSERT_EQ(fresh.size(), 3U);
    self.communicator->run(barrier());
    const auto lines = self.communicator->whereabouts();
    for (int rank = 0; rank < 3; ++rank) {
      const std::string& line = lines[static_cast<std::size_t>(rank)];
      EXPECT_PRED2(contains, line, join("rank ", rank, " (pid "));
      EXPECT_PRED2(contains, line, "barrier #");
    }
    self.communicator->run(barrier());
  });
}

// -- aborts and departures ------------------------------------------------------------------------

TEST(NativeFailureTest, AbortWakesEveryWaiterOnEveryRank) {
  const auto errors = collect_errors(3, [](RankOfTest& self) {
    std::vector<int> values(100, 1);
    std::vector<int> message(100);
    if (self.rank == 1) {
      const WorkPtr work = self.communicator->submit(receive_from(2, 0, message));
      std::thread aborter([&] {
        std::this_thread::sleep_for(milliseconds(100));
        self.communicator->abort(Aborted("the user changed their mind"));
      });
      const auto start = Clock::now();
      EXPECT_EQ(error_of([&] { work->wait(); }).kind, ErrorKind::kAborted);
      EXPECT_LT(Clock::now() - start, milliseconds(100) + kAtOnce);
      aborter.join();
      std::rethrow_exception(self.communicator->failure());
    }
    const auto start = Clock::now();
    try {
      if (self.rank == 0) {
        self.communicator->run(all_reduce(values));
      } else {
        // Three threads wait, in three ways.
        const WorkPtr first = self.communicator->submit(all_reduce(values));
        const WorkPtr second = self.communicator->submit(barrier());
        std::thread other([&] { EXPECT_THROW(second->wait(), Aborted); });
        std::thread third([&] { EXPECT_THROW(first->wait(), Aborted); });
        other.join();
        third.join();
        first->wait();
      }
    } catch (...) {
      EXPECT_LT(Clock::now() - start, milliseconds(100) + kAtOnce);
      EXPECT_EQ(values, std::vector<int>(100, 1));
      throw;
    }
  });
  for (const auto& error : errors) {
    ASSERT_NE(error, nullptr);
    EXPECT_EQ(describe(error).kind, ErrorKind::kAborted);
    EXPECT_PRED2(contains, describe(error).message, "the user changed their mind");
  }
}

// Whoever submitted may keep nothing but the callback (torch's futures do).
TEST(NativeFailureTest, CallbackLearnsTheErrorOfAWorkThatNobodyHolds) {
  run_ranks(2, [](RankOfTest& self) {
    if (self.rank == 1) {
      std::this_thread::sleep_for(milliseconds(20));
      self.communicator->abort(Aborted("enough"));
      return;
    }
    std::vector<int> values(10, 1);
    std::promise<std::exception_ptr> error;
    self.communicator->submit(all_reduce(values))
        ->on_completion([&error](const Work::Outcome& outcome) { error.set_value(outcome.error); });
    EXPECT_THROW(std::rethrow_exception(error.get_future().get()), Aborted);
  });
}

TEST(NativeFailureTest, DepartedRankIsNamedToThoseWhoWaitForIt) {
  for (const bool waits_by_handle : {false, true}) {
    const auto errors = collect_errors(3, [&](RankOfTest& self) {
      std::vector<int> values(5000, 1);
      self.communicator->run(all_reduce(values));
      if (self.rank == 2) {
        std::this_thread::sleep_for(milliseconds(100));
        self.communicator->shutdown();
        return;
      }
      const auto start = Clock::now();
      try {
        if (waits_by_handle) {
          self.communicator->submit(all_reduce(values))->wait();
        } else {
          self.communicator->run(all_reduce(values));
        }
      } catch (...) {
        EXPECT_LT(Clock::now() - start, milliseconds(100) + kAtOnce);
        throw;
      }
    });
    for (const int rank : {0, 1}) {
      const auto& error = errors[static_cast<std::size_t>(rank)];
      ASSERT_NE(error, nullptr);
      EXPECT_EQ(describe(error).kind, ErrorKind::kPeerLost) << describe(error).message;
      EXPECT_PRED2(contains, describe(error).message, "rank 2 (pid ");
      EXPECT_PRED2(contains, describe(error).message, "has left the group");
      EXPECT_EQ(describe(error).blame.ranks, std::vector<int>{2});
      EXPECT_EQ(describe(error).blame.cause, "has left the group (shutdown)");
    }
    EXPECT_EQ(errors[2], nullptr);
  }
}

// What a rank did before it left counts.
TEST(NativeFailureTest, DepartureAfterTheLastOperationHarmsNobody) {
  for (int turn = 0; turn < 30; ++turn) {
    run_ranks(3, [&](RankOfTest& self) {
      std::vector<int> values(turn % 2 == 0 ? 3 : 20'000, 1);
      std::vector<int> word(1, 5);
      if (self.rank == 0) {
        // Through at once, and gone.
        self.communicator->run(all_reduce(values));
        self.communicator->run(broadcast(word, 0, true));
        self.communicator->shutdown();
        return;
      }
      self.communicator->run(all_reduce(values));
      std::this_thread::sleep_for(milliseconds(self.rank));
      self.communicator->run(broadcast(word, 0, false));
      EXPECT_EQ(values, std::vector<int>(values.size(), 3));
      EXPECT_EQ(word[0], 5);
    });
  }
}

// Also where it leaves amid an operation on symmetric memory.
TEST(NativeFailureTest, ALeaverLetsTheOthersFinishWhatItHasDone) {
  run_ranks(2, [&](RankOfTest& self) {
    Communicator& group = *self.communicator;
    const MemoryPtr memory = group.allocate(4000, Device{});
    Operation symmetric;
    symmetric.kind = OpKind::kAllReduce;
    symmetric.inputs = {{memory->data(), 1000, DType::kFloat32}};
    symmetric.outputs = symmetric.inputs;
    std::vector<int> word(1, 5);
    if (self.rank == 0) {
      group.run(broadcast(word, 0, true));  // through at once
      const WorkPtr work = group.submit(std::move(symmetric));
      std::this_thread::sleep_for(milliseconds(20));  // so that it has begun
      group.shutdown();
      EXPECT_THROW(work->wait(), Aborted);
      self.store->set("has left", "");
      return;
    }
    static_cast<void>(self.store->get("has left", Deadline::in(std::chrono::seconds(30))));
    group.run(broadcast(word, 0, false));
    EXPECT_EQ(word[0], 5);
    EXPECT_THROW(group.run(std::move(symmetric)), PeerLost);
  });
}

// -- meeting --------------------------------------------------------------------------------------

TEST(NativeFailureTest, RankThatNeverComesIsNamedOnAll) {
  Environment environment = test_environment();
  environment.timeout = milliseconds(200);
  const auto errors = run_threads(
      4,
      [&](RankOfTest& self) {
        if (self.rank == 2) {
          return;
        }
        static_cast<void>(join_group(self, "world", environment));
      },
      environment);
  for (const int rank : {0, 1, 3}) {
    const auto& error = errors[static_cast<std::size_t>(rank)];
    ASSERT_NE(error, nullptr);
    EXPECT_EQ(describe(error).kind, ErrorKind::kTimeout) << describe(error).message;
    EXPECT_PRED2(contains, describe(error).message, "in time: rank 2.");
  }
}

TEST(NativeFailureTest, RanksWithOtherSettingsGetTheSameError) {
  const auto errors = run_threads(
      2,
      [](RankOfTest& self) {
        Environment environment = test_environment();
        environment.chunk_bytes = self.rank == 0 ? 4096 : 8192;
        static_cast<void>(join_group(self, "world", environment));
      },
      test_environment());
  for (const auto& error : errors) {
    ASSERT_NE(error, nullptr);
    EXPECT_EQ(describe(error).kind, ErrorKind::kMismatch);
    EXPECT_PRED2(contains, describe(error).message, "PYDIST_CHUNK_BYTES=4096");
    EXPECT_PRED2(contains, describe(error).message, "PYDIST_CHUNK_BYTES=8192");
  }
}

TEST(NativeFailureTest, ImpossibleRanksAreRefused) {
  run_ranks(1, [](RankOfTest& self) {
    for (const auto& [rank, size] : {std::pair{0, 0}, std::pair{2, 2}, std::pair{-1, 2}}) {
      EXPECT_EQ(error_of([&, rank = rank, size = size] {
                  static_cast<void>(create_native_communicator(
                      self.store, rank, size, {"other", test_environment()}, {self.endpoint}));
                }).kind,
                ErrorKind::kInvalidUsage);
    }
  });
}

// -- nothing is left behind -----------------------------------------------------------------------

struct Belongings {
  std::size_t descriptors = 0;
  std::size_t threads = 0;
  std::size_t mappings = 0;  // of ours

  [[nodiscard]] static Belongings count() {
    const auto entries = [](const char* folder) {
      std::size_t number = 0;
      for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) {
        ++number;
      }
      return number;
    };
    Belongings counted{entries("/proc/self/fd"), entries("/proc/self/task"), 0};
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      counted.mappings += contains(line, "pydist") && contains(line, "memfd") ? 1 : 0;
    }
    return counted;
  }
  friend bool operator==(const Belongings&, const Belongings&) = default;
  friend std::ostream& operator<<(std::ostream& stream, const Belongings& counted) {
    return stream << counted.descriptors << " descriptors, " << counted.threads << " threads, "
                  << counted.mappings << " mappings";
  }
};

TEST(NativeFailureTest, NothingIsLeftBehind) {
  run_ranks(2, [](RankOfTest& self) { self.communicator->run(barrier()); });
  const Belongings before = Belongings::count();
  for (const bool fails : {false, true}) {
    static_cast<void>(collect_errors(3, [&](RankOfTest& self) {
      const CommunicatorPtr pair = self.rank == 2 ? nullptr : self.communicator->split({0, 1});
      const MemoryPtr memory = self.communicator->allocate(3'000'000, Device{});
      std::vector<int> values(100'000, 1);
      self.communicator->submit(all_reduce(values))->wait();
      if (self.rank == 0) {
        EXPECT_GT(Belongings::count().mappings, before.mappings);
      }
      if (fails) {
        // With work under way that nobody will ever wait for.
        const WorkPtr abandoned = self.communicator->submit(all_reduce(values));
        static_cast<void>(
            self.communicator->allocate(self.rank == 1 ? 9'000'000 : 8'000'000, Device{}));
      }
    }));
    // The kernel takes a moment to clear away a thread that has been joined.
    Belongings after = Belongings::count();
    for (int turn = 0; turn < 100 && !(after == before); ++turn) {
      std::this_thread::sleep_for(milliseconds(10));
      after = Belongings::count();
    }
    EXPECT_EQ(after, before) << (fails ? "after a failure" : "after an orderly end");
  }
}

}  // namespace
}  // namespace pydist::testing
