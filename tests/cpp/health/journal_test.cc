#include "health/journal.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace pydist {
namespace {

constexpr std::size_t kEntries = 64;

// As in shared memory: zeroed, never constructed.
class JournalTest : public ::testing::Test {
 protected:
  Journal& journal() { return page_->journal; }

 private:
  struct Page {
    Journal journal;
  };
  std::unique_ptr<Page> page_ = std::make_unique<Page>();
};

TEST_F(JournalTest, AnEmptyOneHasNothingToSay) { EXPECT_TRUE(journal().read().empty()); }

TEST_F(JournalTest, TellsWhatRunsAndWhatIsDone) {
  const std::int64_t before = coarse_monotonic_ns();
  const auto ticket = journal().begin(7, 42, 3, 1024, "bucket 7");
  ASSERT_EQ(journal().read().size(), 1u);
  JournalEntry entry = journal().read().front();
  EXPECT_EQ(entry.group, 7u);
  EXPECT_EQ(entry.sequence, 42u);
  EXPECT_EQ(entry.kind, 3);
  EXPECT_EQ(entry.bytes, 1024u);
  EXPECT_EQ(entry.label, "bucket 7");
  EXPECT_EQ(entry.state, JournalState::kRunning);
  EXPECT_GE(entry.started_ns, before);
  EXPECT_EQ(entry.finished_ns, 0);

  journal().finish(ticket, JournalState::kFailed);
  ASSERT_EQ(journal().read().size(), 1u);
  entry = journal().read().front();
  EXPECT_EQ(entry.state, JournalState::kFailed);
  EXPECT_EQ(entry.kind, 3);
  EXPECT_GE(entry.finished_ns, entry.started_ns);
}

TEST_F(JournalTest, LabelsOfEveryLengthComeBack) {
  for (std::size_t length = 0; length <= 100; ++length) {
    std::string label;
    for (std::size_t i = 0; i < length; ++i) {
      label += static_cast<char>('a' + (i + length) % 26);
    }
    journal().begin(1, length, 0, 0, label);
    EXPECT_EQ(journal().read().front().label, label.substr(0, 64)) << length;
  }
}

TEST_F(JournalTest, AShortLabelHidesTheLongOneBeforeIt) {
  for (std::size_t i = 0; i < kEntries; ++i) {
    journal().begin(1, i, 0, 0, std::string(64, 'x'));
  }
  for (const std::string label : {"", "1234567", "12345678", "123456789", "1234567812345678"}) {
    for (std::size_t i = 0; i < kEntries; ++i) {
      journal().begin(1, i, 0, 0, label);
    }
    for (const JournalEntry& entry : journal().read()) {
      EXPECT_EQ(entry.label, label);
    }
  }
}

TEST_F(JournalTest, KeepsTheNewestAndForgetsTheRest) {
  constexpr std::uint64_t kBegun = 5 * kEntries + 13;
  for (std::uint64_t i = 0; i < kBegun; ++i) {
    journal().begin(i % 3, i, static_cast<std::uint8_t>(i), i * 10, std::to_string(i));
  }
  const auto entries = journal().read();
  ASSERT_EQ(entries.size(), kEntries);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const std::uint64_t expected = kBegun - 1 - i;
    EXPECT_EQ(entries[i].sequence, expected);
    EXPECT_EQ(entries[i].label, std::to_string(expected));
  }
}

TEST_F(JournalTest, FinishingWhatIsGoneChangesNothing) {
  const auto old_ticket = journal().begin(1, 1, 5, 0, "old");
  for (std::uint64_t i = 0; i < kEntries; ++i) {
    journal().begin(1, 100 + i, 6, 0, "new");
  }
  journal().finish(old_ticket, JournalState::kFailed);
  for (const JournalEntry& entry : journal().read()) {
    EXPECT_EQ(entry.state, JournalState::kRunning);
    EXPECT_EQ(entry.kind, 6);
  }
}

TEST_F(JournalTest, ReadersSeeWholeEntriesWhileAWriterWraps) {
  // Everything in an entry follows from its sequence, so a torn one shows.
  constexpr std::uint64_t kWrites = 60'000;
  std::atomic<bool> stopping{false};
  std::atomic<std::uint64_t> seen{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      while (!stopping) {
        for (const JournalEntry& entry : journal().read()) {
          ASSERT_EQ(entry.group, entry.sequence % 5);
          ASSERT_EQ(entry.bytes, entry.sequence * 3);
          ASSERT_EQ(entry.kind, entry.sequence % 200);
          const std::string label = std::string(entry.sequence % 20, 'l');
          ASSERT_EQ(entry.label, label);
          if (entry.state == JournalState::kRunning) {
            ASSERT_EQ(entry.finished_ns, 0);
          } else {
            ASSERT_EQ(entry.state, JournalState::kSucceeded);
            ASSERT_GE(entry.finished_ns, entry.started_ns);
          }
          ++seen;
        }
      }
    });
  }
  // On a busy machine no reader may have run by then; the test's limit ends a wait in vain.
  for (std::uint64_t i = 0; i < kWrites || seen == 0; ++i) {
    const auto ticket = journal().begin(i % 5, i, static_cast<std::uint8_t>(i % 200), i * 3,
                                        std::string(i % 20, 'l'));
    journal().finish(ticket, JournalState::kSucceeded);
    if (i % 64 == 0) {
      std::this_thread::yield();
    }
  }
  stopping = true;
  for (std::thread& reader : readers) {
    reader.join();
  }
  EXPECT_GT(seen.load(), 0u);
}

TEST_F(JournalTest, ThreadsOfTheOwnerWriteTogether) {
  constexpr std::uint64_t kThreads = 4;
  std::vector<std::thread> writers;
  for (std::uint64_t writer = 0; writer < kThreads; ++writer) {
    writers.emplace_back([&, writer] {
      for (std::uint64_t i = 0; i < 2000; ++i) {
        journal().finish(journal().begin(writer, i, 1, writer, "w"), JournalState::kSucceeded);
      }
    });
  }
  for (std::thread& thread : writers) {
    thread.join();
  }
  const auto entries = journal().read();
  EXPECT_EQ(entries.size(), kEntries);
  for (const JournalEntry& entry : entries) {
    EXPECT_EQ(entry.group, entry.bytes);
    EXPECT_EQ(entry.state, JournalState::kSucceeded);
  }
}

}  // namespace
}  // namespace pydist
