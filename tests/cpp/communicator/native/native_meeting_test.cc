// How the ranks of a native group meet, where nothing fails: what they say through the store, and
// what they may have said to each other before.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "communicator/native/group_meeting.h"
#include "communicator/native/native_communicator.h"
#include "communicator/peers/own_introduction.h"
#include "memory_store.h"
#include "ranks.h"
#include "topology/rendezvous.h"

namespace pydist::testing {
namespace {

// Passes all on, and keeps the names of keys that are written.
class WatchedStore final : public KeyValueStore {
 public:
  explicit WatchedStore(StorePtr store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    note(key);
    store_->set(key, value);
  }
  std::string settle(const std::string& key, const std::string& value) override {
    note(key);
    return store_->settle(key, value);
  }
  std::string get(const std::string& key, Deadline deadline) override {
    return store_->get(key, deadline);
  }
  void erase(const std::string& key) override { store_->erase(key); }

  [[nodiscard]] std::vector<std::string> written() const { return written_; }

 private:
  void note(const std::string& key) { written_.push_back(key); }

  const StorePtr store_;
  std::vector<std::string> written_;  // by one rank
};

void expect_works(const CommunicatorPtr& communicator) {
  std::vector<float> values(100, 1.0F);
  communicator->run(all_reduce(values));
  EXPECT_EQ(values[99], static_cast<float>(communicator->size()));
}

CommunicatorPtr join_introduced(const RankOfTest& self, StorePtr store, Introduced introduced) {
  NativeOptions options{"world", test_environment()};
  if (self.host_id) {
    options.environment.host_id = self.host_id;
    options.address = "127.0.0.1";
  }
  return create_native_communicator(std::move(store), self.rank, self.size, options,
                                    std::move(introduced));
}

void expect_no_errors(const std::vector<std::exception_ptr>& errors) {
  for (const std::exception_ptr& error : errors) {
    if (error) {
      ADD_FAILURE() << describe(error).message;
    }
  }
}

TEST(NativeMeetingTest, OnlyTheLowestRankOfAHostTellsTheStoreThatItsRanksShareMemory) {
  expect_no_errors(run_threads(
      4,
      [](RankOfTest& self) {
        const auto store = std::make_shared<WatchedStore>(self.store);
        const CommunicatorPtr group = join_introduced(self, store, {self.endpoint});
        expect_works(group);
        std::vector<std::string> written = store->written();
        std::erase_if(written, [](const std::string& key) { return !contains(key, "joined"); });
        EXPECT_EQ(written.size(), self.rank == 2 ? 1U : 0U);  // of the second host
        group->shutdown();
      },
      test_environment(), {0, 0, 1, 1}));
}

// What the ranks of a group say to each other by other means than its store.
struct Said {
  std::mutex mutex;
  std::vector<std::string> introductions;
  std::string roster;
};

TEST(NativeMeetingTest, RanksThatHaveIntroducedThemselvesNeedNotDoSoAgain) {
  for (const HostsOfRanks& hosts : {HostsOfRanks{0, 0, 0}, HostsOfRanks{0, 1, 0}}) {
    Said said;
    said.introductions.resize(3);
    std::atomic<int> introduced = 0;
    std::atomic<bool> has_roster = false;
    expect_no_errors(run_threads(
        3,
        [&](RankOfTest& self) {
          Environment environment = test_environment();
          environment.host_id = self.host_id;
          const auto own =
              std::make_shared<OwnIntroduction>(self.rank, environment, nullptr, self.endpoint);
          {
            const std::lock_guard lock(said.mutex);
            said.introductions[static_cast<std::size_t>(self.rank)] = own->text();
          }
          ++introduced;
          introduced.notify_all();
          for (int count = introduced; self.rank == 0 && count < 3; count = introduced) {
            introduced.wait(count);
          }
          if (self.rank == 0) {
            KnownProcesses processes = strangers(3);
            said.roster =
                make_native_roster(*own, *self.store, "world", said.introductions, processes);
            has_roster = true;
            has_roster.notify_all();
          }
          has_roster.wait(false);
          const auto store = std::make_shared<WatchedStore>(self.store);
          const CommunicatorPtr group =
              join_introduced(self, store, {.own = own, .roster = said.roster});
          expect_works(group);
          for (const std::string& key : store->written()) {
            EXPECT_FALSE(contains(key, "introduction")) << key;
          }
          group->shutdown();
        },
        test_environment(), hosts));
  }
}

int monitors() {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    count += name == "pydist-monitor" ? 1 : 0;
  }
  return count;
}

TEST(NativeMeetingTest, AnIntroductionKeepsTheProcessInTheJobUntilItsEnd) {
  // The kernel takes a moment to clear away a thread that has been joined.
  const auto has_no_monitor = [] {
    for (int look = 0; look < 100 && monitors() != 0; ++look) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return monitors() == 0;
  };
  Endpoint::release_process();
  ASSERT_TRUE(has_no_monitor());
  OwnIntroduction own(0, test_environment());
  Endpoint::release_process();
  EXPECT_EQ(monitors(), 1);
  own.end();
  EXPECT_TRUE(has_no_monitor());
  own.end();
}

// Fails once the verdict on the group is there: when that is read, or for good.
class FailingAfterVerdict final : public KeyValueStore {
 public:
  FailingAfterVerdict(StorePtr store, bool for_good)
      : store_(std::move(store)), for_good_(for_good) {}

  void set(const std::string& key, const std::string& value) override { store_->set(key, value); }
  std::string settle(const std::string& key, const std::string& value) override {
    if (for_good_ && contains(key, "verdict")) {
      throw TransportError("the store is gone");
    }
    return store_->settle(key, value);
  }
  std::string get(const std::string& key, Deadline deadline) override {
    std::string value = store_->get(key, deadline);
    if (contains(key, "verdict")) {
      throw TransportError("the store is gone");
    }
    return value;
  }
  void erase(const std::string& key) override { store_->erase(key); }

 private:
  const StorePtr store_;
  const bool for_good_;
};

TEST(NativeMeetingTest, AVerdictCountsWhereTheLowestRankOfTheHostDoesNotLiveToTellIt) {
  for (const bool for_good : {false, true}) {
    const std::vector<std::exception_ptr> errors = run_threads(
        3,
        [for_good](RankOfTest& self) {
          const bool fails = self.rank == 1;  // the lowest of its host
          const StorePtr store =
              fails ? std::make_shared<FailingAfterVerdict>(self.store, for_good) : self.store;
          const CommunicatorPtr group = join_introduced(self, store, {self.endpoint});
          EXPECT_EQ(group->size(), 3);
        },
        test_environment(), {0, 1, 1});
    EXPECT_FALSE(errors[0]) << describe(errors[0]).message;
    EXPECT_EQ(errors[1] != nullptr, for_good);
    EXPECT_FALSE(errors[2]) << describe(errors[2]).message;
  }
}

TEST(NativeMeetingTest, ARankThatCannotTakePartSaysSoInItsIntroduction) {
  Environment environment = test_environment();
  std::vector<std::string> texts;
  const auto endpoint = std::make_shared<Endpoint>(environment);
  OwnIntroduction own(0, environment, nullptr, endpoint);
  texts.push_back(own.text());
  {
    const NoThreads none;  // for the monitor of its endpoint
    texts.push_back(
        OwnIntroduction(1, environment, nullptr, std::make_shared<Endpoint>(environment)).text());
  }
  KnownProcesses processes = strangers(2);
  const ErrorDescription error = error_of([&] {
    static_cast<void>(
        make_native_roster(own, *std::make_shared<MemoryStore>(), "world", texts, processes));
  });
  EXPECT_EQ(error.kind, ErrorKind::kTransport);
  EXPECT_EQ(error.blame.ranks, std::vector<int>{1});
  EXPECT_PRED2(contains, error.message, "no more threads");
}

}  // namespace
}  // namespace pydist::testing
