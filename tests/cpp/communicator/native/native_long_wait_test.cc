// What the log says of operations that last, long before their deadline.

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "communicator/native/native_communicator.h"
#include "ranks_log.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;

// Many times as long as the group's own patience.
constexpr milliseconds kLate{500 * kSlowdown};
// Long enough for a circle to be seen.
constexpr milliseconds kCircleSeen{2000 + 500 * kSlowdown};

CommunicatorPtr join_impatiently(const RankOfTest& self, CheckHope check_hope = nullptr) {
  NativeOptions options;
  options.check_hope = std::move(check_hope);
  options.name = "impatient";
  options.environment = test_environment();
  options.long_wait = milliseconds(50);
  return create_native_communicator(self.store, self.rank, self.size, options, {self.endpoint});
}

// Of operations alone: ranks that share cores may also meet for longer than so short a patience.
std::string log_of_operations(int size, const RankFunction& function) {
  std::istringstream lines(log_of(size, function));
  std::string log;
  for (std::string line; std::getline(lines, line);) {
    log += contains(line, "the meeting of group") ? "" : line + '\n';
  }
  return log;
}

TEST(NativeLongWaitTest, ACollectiveIsWarnedOfOnceWithTheRankThatIsMissing) {
  const std::string log = log_of_operations(2, [](RankOfTest& self) {
    const CommunicatorPtr group = join_impatiently(self);
    std::vector<int> values(3, 1);
    group->run(barrier());
    if (self.rank == 1) {
      std::this_thread::sleep_for(kLate);
    }
    Operation operation = all_reduce(values);
    operation.label = "bucket 7";
    const WorkPtr first = group->submit(operation);
    const WorkPtr second = group->submit(barrier());  // has not begun while the first one waits
    first->wait();
    second->wait();
    EXPECT_EQ(values, std::vector<int>(3, 2));
  });
  EXPECT_EQ(occurrences(log, "warning: native: rank 0 (pid "), 1) << log;
  EXPECT_EQ(occurrences(log, "has been in all_reduce #2 (bucket 7) of group 'impatient' for "), 1)
      << log;
  EXPECT_PRED2(contains, log, "0.05 s: rank 1 (pid ");
  EXPECT_PRED2(contains, log, "never entered all_reduce #2; it left barrier #1 ");
}

TEST(NativeLongWaitTest, ACollectiveOnTheCallersThreadIsWarnedOf) {
  const std::string log = log_of_operations(3, [](RankOfTest& self) {
    const CommunicatorPtr group = join_impatiently(self);
    if (self.rank == 2) {
      std::this_thread::sleep_for(kLate);
    }
    group->run(barrier());
  });
  for (const char* const waiting : {"rank 0 (pid ", "rank 1 (pid "}) {
    EXPECT_EQ(occurrences(log, join("native: ", waiting)), 1) << log;
  }
  EXPECT_EQ(occurrences(log, "rank 2 (pid "), 2) << log;
  EXPECT_EQ(occurrences(log, "has been in barrier #1 of group 'impatient' for "), 2) << log;
}

TEST(NativeLongWaitTest, AMessageIsWarnedOfOnce) {
  const std::string log = log_of(2, [](RankOfTest& self) {
    const CommunicatorPtr group = join_impatiently(self);
    std::vector<int> from_one(3);
    std::vector<int> from_anybody(3);
    if (self.rank == 0) {
      const WorkPtr one = group->submit(receive_from(1, 12, from_one));
      const WorkPtr anybody = group->submit(receive_from(kAnySource, 13, from_anybody));
      one->wait();
      anybody->wait();
      return;
    }
    std::this_thread::sleep_for(kLate);
    group->submit(send_to(0, 12, from_one))->wait();
    group->submit(send_to(0, 13, from_anybody))->wait();
  });
  EXPECT_EQ(occurrences(log, "has been in receive from rank 1 (tag 12) in group 'impatient' for "),
            1)
      << log;
  EXPECT_PRED2(contains, log, "0.05 s: rank 1 (pid ");
  EXPECT_EQ(occurrences(log, "has been in receive from any rank (tag 13) in group "), 1) << log;
}

constexpr const char* kCircle = "So they wait for each other, in several groups";

CommunicatorPtr join_named(const RankOfTest& self, const std::string& name) {
  NativeOptions options;
  options.name = name;
  options.environment = test_environment();
  return create_native_communicator(self.store, self.rank, self.size, options, {self.endpoint});
}

TEST(NativeLongWaitTest, RanksThatWaitForEachOtherInTwoGroupsAreToldOfSoon) {
  const std::string log = log_of(2, [](RankOfTest& self) {
    const CommunicatorPtr one = join_named(self, "one");
    const CommunicatorPtr other = join_named(self, "other");
    Communicator& first = self.rank == 0 ? *one : *other;
    const milliseconds timeout = self.rank == 0 ? kCircleSeen : 5 * kCircleSeen;
    const ErrorDescription error = error_of([&] { first.run(with_timeout(barrier(), timeout)); });
    if (self.rank == 0) {
      EXPECT_EQ(error.kind, ErrorKind::kTimeout) << error.message;
      EXPECT_PRED2(contains, error.message, kCircle);
      EXPECT_EQ(error.blame.ranks, std::vector<int>{1});
    } else {  // rank 0 has left then
      EXPECT_EQ(error.kind, ErrorKind::kPeerLost) << error.message;
    }
  });
  EXPECT_EQ(occurrences(log, "has been in barrier #1 of group 'one' for 1 s: rank 1 (pid "), 1)
      << log;
  EXPECT_EQ(occurrences(log, "has been in barrier #1 of group 'other' for 1 s: rank 0 (pid "), 1)
      << log;
  EXPECT_EQ(occurrences(log, "it is in barrier #1 of another group since "), 2) << log;
  EXPECT_EQ(occurrences(log, kCircle), 2) << log;
}

TEST(NativeLongWaitTest, ACircleOfOtherRanksIsToldOf) {
  const std::string log = log_of(3, [](RankOfTest& self) {
    const CommunicatorPtr one = join_named(self, "one");
    const CommunicatorPtr other = join_named(self, "other");
    // Ranks 0 and 2 wait for rank 1, which waits for rank 0 elsewhere.
    Communicator& first = self.rank == 1 ? *other : *one;
    const milliseconds timeout = self.rank == 2 ? kCircleSeen : 5 * kCircleSeen;
    const ErrorDescription error = error_of([&] { first.run(with_timeout(barrier(), timeout)); });
    if (self.rank == 2) {
      EXPECT_EQ(error.kind, ErrorKind::kTimeout) << error.message;
      EXPECT_PRED2(contains, error.message, kCircle);
      EXPECT_EQ(error.blame.ranks, std::vector<int>{1});
    }
  });
  EXPECT_EQ(occurrences(log, kCircle), 3) << log;
}

TEST(NativeLongWaitTest, AnotherThreadMayOpenACircle) {
  const std::string log = log_of(2, [](RankOfTest& self) {
    const CommunicatorPtr one = join_named(self, "one");
    const CommunicatorPtr other = join_named(self, "other");
    if (self.rank == 0) {
      std::thread late([&other] {
        std::this_thread::sleep_for(kCircleSeen);
        other->run(barrier());
      });
      one->run(barrier());
      late.join();
    } else {
      other->run(barrier());
      one->run(barrier());
    }
  });
  EXPECT_EQ(occurrences(log, kCircle), 2) << log;
}

TEST(NativeLongWaitTest, ARankThatWaitsForAThirdOneIsInNoCircle) {
  const std::string log = log_of(3, [](RankOfTest& self) {
    const CommunicatorPtr all = join_named(self, "all");
    const CommunicatorPtr pair = self.rank == 0 ? nullptr : all->split({1, 2});
    if (self.rank == 2) {
      std::this_thread::sleep_for(kCircleSeen);
    }
    if (pair != nullptr) {
      pair->run(barrier());
    }
    all->run(barrier());
  });
  EXPECT_EQ(log, "");
}

TEST(NativeLongWaitTest, AMeetingIsWarnedOfWithARankThatHasNotCome) {
  const std::string log = log_of(3, [](RankOfTest& self) {
    if (self.rank == 1) {
      std::this_thread::sleep_for(kLate);
    }
    join_impatiently(self)->run(barrier());
  });
  const std::string what = "has been in the meeting of group 'impatient' for 0.05 s: ";
  EXPECT_EQ(occurrences(log, what + "it waits for rank 1, which has not come."), 1) << log;
  EXPECT_PRED2(contains, log, what + "it waits for rank 0, which has not come, or waits itself");
}

TEST(NativeLongWaitTest, AMeetingIsWarnedOfWithARankThatDoesNotShareMemory) {
  const std::string log = log_of(2, [](RankOfTest& self) {
    // It has told who it is by the time that it is asked whether there is hope.
    const auto tarry = [is_late = self.rank == 1]() mutable {
      if (std::exchange(is_late, false)) {
        std::this_thread::sleep_for(kLate);
      }
    };
    join_impatiently(self, tarry)->run(barrier());
  });
  EXPECT_EQ(occurrences(log, "0.05 s: it waits for rank 1 (pid "), 1) << log;
  EXPECT_PRED2(contains, log, "has been in the meeting of group 'impatient' for ");
  EXPECT_PRED2(contains, log, "), which has not shared memory yet, or waits itself for one ");
}

}  // namespace
}  // namespace pydist::testing
