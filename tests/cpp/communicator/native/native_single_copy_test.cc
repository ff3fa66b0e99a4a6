// Ranks that read each other's memory through the kernel: when they do, and what becomes of it when
// one dies. That results are right: native_tuning_test.cc and native_conformance_test.cc.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "collectives/shared_memory/tuning_table.h"
#include "rank_processes.h"
#include "ranks.h"
#include "restless.h"

namespace pydist::testing {
namespace {

// A session of which has ten all_gathers.
constexpr TuningRhythm kShort{.uses_before_first = 0, .rounds = 1, .always_tries = true};

constexpr std::size_t kCount = 60'000;  // of 4 bytes, more than is sent ahead by default

Operation all_gather_of(std::vector<int>& block, std::vector<int>& all) {
  Operation operation;
  operation.kind = OpKind::kAllGather;
  operation.inputs = {Buffer{block.data(), block.size(), DType::kInt32}};
  operation.outputs = {Buffer{all.data(), all.size(), DType::kInt32}};
  return operation;
}

Operation broadcast_from(int root, int rank, std::vector<int>& values) {
  Operation operation;
  operation.kind = OpKind::kBroadcast;
  operation.peer = root;
  const Buffer buffer{values.data(), values.size(), DType::kInt32};
  (rank == root ? operation.inputs : operation.outputs) = {buffer};
  return operation;
}

// Several times, with other values each time; both kinds.
void exchange_often(const CommunicatorPtr& group, int times) {
  const int size = group->size();
  for (int time = 0; time < times; ++time) {
    std::vector<int> block(kCount, 100 * time + group->rank());
    std::vector<int> all(kCount * static_cast<std::size_t>(size));
    group->run(all_gather_of(block, all));
    std::vector<int> expected;
    for (int rank = 0; rank < size; ++rank) {
      expected.insert(expected.end(), kCount, 100 * time + rank);
    }
    ASSERT_EQ(all, expected);
    const int root = time % size;
    group->run(broadcast_from(root, group->rank(), block));
    ASSERT_EQ(block, std::vector<int>(kCount, 100 * time + root));
  }
}

// Whether the tuner of this process has timed single copies of an all_gather. A root is timed only
// where all others wait for it.
bool has_timed_single_copies() {
  const auto entries = TuningTable::of_process().entries();
  return std::any_of(entries.begin(), entries.end(), [](const auto& each) {
    const auto& times = each.second.times_us;
    return each.first.kind == OpKind::kAllGather &&
           std::any_of(times.begin(), times.end(), [](const auto& timed) {
             return timed.first.single_copy && timed.second > 0;
           });
  });
}

TEST(NativeSingleCopyTest, OffOnOneRankIsOffOnAll) {
  for (const bool is_off_on_one : {false, true}) {
    TuningTable::of_process().replace({});
    run_ranks(3, [&](RankOfTest& self) {
      Environment environment = test_environment();
      environment.single_copy = !is_off_on_one || self.rank != 1;
      exchange_often(join_restless(self, environment, kShort), 20);
    });
    EXPECT_EQ(has_timed_single_copies(), !is_off_on_one);
  }
  TuningTable::of_process().replace({});
}

// -- processes ------------------------------------------------------------------------------------

const RankProgram reads_processes("reads_processes", [](RankOfTest& self, const std::string&) {
  // Of the group that is made next; what a user may allow where Yama forbids it.
  ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  exchange_often(join_restless(self, test_environment(), kShort), 20);
  if (self.rank == 0) {
    EXPECT_TRUE(has_timed_single_copies());
  }
  self.communicator->run(barrier());
});

TEST(NativeSingleCopyTest, ProcessesReadEachOther) {
  for (const int size : {2, 3}) {
    RankProcesses ranks("reads_processes", size);
    for (int rank = 0; rank < size; ++rank) {
      const RankOutcome outcome = ranks.wait(rank);
      EXPECT_TRUE(outcome.has_ended_by_itself) << "rank " << rank;
      EXPECT_FALSE(outcome.error) << "rank " << rank << ": " << outcome.error->message;
    }
  }
}

const RankProgram read_until_it_dies("read_until_it_dies", [](RankOfTest& self,
                                                              const std::string& kind) {
  Environment environment = test_environment();
  environment.tuning = TuningChoice::kOff;  // so that each is a single copy, if they are waited for
  const CommunicatorPtr group = join_restless(self, environment);
  std::vector<int> block(4 * kCount, self.rank);
  std::vector<int> all(2 * block.size());
  const auto exchange = [&] {
    group->run(kind == "all_gather" ? all_gather_of(block, all)
                                    : broadcast_from(1, self.rank, block));
  };
  exchange();
  self.store->set(join("read/", self.rank), "");
  for (;;) {  // one of them is killed amid one of these
    exchange();
  }
});

TEST(NativeSingleCopyTest, ARankThatDiesAmidIsNamedToTheOther) {
  for (const std::string kind : {"all_gather", "broadcast"}) {
    for (int delay_ms = 0; delay_ms < 8; delay_ms += 3) {
      RankProcesses ranks("read_until_it_dies", 2, kind);
      for (int rank = 0; rank < 2; ++rank) {
        static_cast<void>(
            ranks.store().get(join("read/", rank), Deadline::in(std::chrono::seconds(30))));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
      const auto start = std::chrono::steady_clock::now();
      ranks.signal(1, SIGKILL);
      const RankOutcome outcome = ranks.wait(0);
      EXPECT_LT(std::chrono::steady_clock::now() - start, kAtOnce);
      ASSERT_TRUE(outcome.error);
      EXPECT_EQ(outcome.error->kind, ErrorKind::kPeerLost) << outcome.error->message;
      EXPECT_PRED2(contains, outcome.error->message, "rank 1 (pid ");
    }
  }
}

}  // namespace
}  // namespace pydist::testing
