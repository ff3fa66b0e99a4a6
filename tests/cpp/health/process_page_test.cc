#include "health/process_page.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"

namespace pydist {
namespace {

// As in shared memory: zeroed, never constructed.
std::unique_ptr<ProcessPage> blank_page() { return std::make_unique<ProcessPage>(); }

TEST(ProcessPageTest, ACopyHoldsWhatThePageHolds) {
  const auto page = blank_page();
  const auto mirror = blank_page();
  page->heartbeat_ns = 5'000'000;
  page->has_departed = 1;
  page->pid = 71;
  page->number = 0x1234567890abcdefull;
  page->rank_plus_one = 4;
  page->awaited.set(9, 3, 77);
  const Journal::Ticket ticket = page->journal.begin(9, 12, 1, 4096, "bucket 3");
  page->journal.begin(9, 13, 1, 4096, "bucket 4");
  page->journal.finish(ticket, JournalState::kSucceeded);
  write_page(*mirror, copy_of_page(*page), 0);
  EXPECT_EQ(mirror->heartbeat_ns.load(), 5'000'000);
  EXPECT_EQ(mirror->has_departed.load(), 1u);
  EXPECT_EQ(mirror->pid.load(), 71);
  EXPECT_EQ(mirror->number.load(), 0x1234567890abcdefull);
  EXPECT_EQ(mirror->rank_plus_one.load(), 4);
  EXPECT_EQ(mirror->awaited.in(9), 3);
  EXPECT_EQ(mirror->awaited.page(), 77u);
  const std::vector<JournalEntry> entries = mirror->journal.read();
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[0].label, "bucket 4");
  EXPECT_EQ(entries[0].state, JournalState::kRunning);
  EXPECT_EQ(entries[1].sequence, 12u);
  EXPECT_EQ(entries[1].state, JournalState::kSucceeded);
  EXPECT_EQ(copy_of_page(*mirror), copy_of_page(*page));
}

TEST(ProcessPageTest, TimesAreThoseOfTheReadersClock) {
  const auto page = blank_page();
  page->heartbeat_ns = 1'000'000'000;
  const Journal::Ticket ticket = page->journal.begin(9, 1, 1, 0, "done");
  page->journal.finish(ticket, JournalState::kSucceeded);
  page->journal.begin(9, 2, 1, 0, "running");
  const std::vector<JournalEntry> own = page->journal.read();
  for (const std::int64_t ahead : {std::int64_t{0}, std::int64_t{7'000'000'000},
                                   std::int64_t{-500'000'000}, std::int64_t{-3'000'000'000}}) {
    const auto mirror = blank_page();
    write_page(*mirror, copy_of_page(*page), ahead);
    EXPECT_EQ(mirror->heartbeat_ns.load(), 1'000'000'000 + ahead);
    const std::vector<JournalEntry> told = mirror->journal.read();
    ASSERT_EQ(told.size(), 2u);
    EXPECT_EQ(told[0].started_ns, own[0].started_ns + ahead);
    EXPECT_EQ(told[0].finished_ns, 0);
    EXPECT_EQ(told[1].started_ns, own[1].started_ns + ahead);
    EXPECT_EQ(told[1].finished_ns, own[1].finished_ns + ahead);
  }
}

TEST(ProcessPageTest, WhatHasNotBeenHasNoTime) {
  const auto mirror = blank_page();
  write_page(*mirror, copy_of_page(*blank_page()), 1'000'000'000);
  EXPECT_EQ(mirror->heartbeat_ns.load(), 0);
  EXPECT_TRUE(mirror->journal.read().empty());
  EXPECT_EQ(copy_of_page(*mirror), copy_of_page(*blank_page()));
}

TEST(ProcessPageTest, OnlyAWholePageIsWritten) {
  const auto mirror = blank_page();
  std::vector<std::byte> bytes(sizeof(ProcessPage) - 1);
  EXPECT_THROW(write_page(*mirror, bytes, 0), Error);
  bytes.resize(sizeof(ProcessPage) + 1);
  EXPECT_THROW(write_page(*mirror, bytes, 0), Error);
}

// The owner goes on while its page is copied, and readers look at the mirror while it is written.
TEST(ProcessPageTest, NobodyWaitsForAnybody) {
  const auto page = blank_page();
  const auto mirror = blank_page();
  std::atomic<bool> is_over{false};
  std::thread owner([&] {
    for (std::uint64_t number = 1; !is_over; ++number) {
      page->heartbeat_ns = static_cast<std::int64_t>(number);
      page->awaited.set(9, static_cast<int>(number % 7), number);
      const Journal::Ticket ticket =
          page->journal.begin(9, number, 1, number, "operation " + std::to_string(number));
      page->journal.finish(ticket, JournalState::kSucceeded);
    }
  });
  std::thread reader([&] {
    while (!is_over) {
      for (const JournalEntry& entry : mirror->journal.read()) {
        EXPECT_LE(entry.label.size(), 64u);
      }
      static_cast<void>(mirror->awaited.in(9));
    }
  });
  std::int64_t last = 0;
  for (int round = 0; round < 300; ++round) {
    write_page(*mirror, copy_of_page(*page), 0);
    const std::int64_t heartbeat = mirror->heartbeat_ns.load();
    EXPECT_GE(heartbeat, last);
    last = heartbeat;
  }
  is_over = true;
  owner.join();
  reader.join();
}

}  // namespace
}  // namespace pydist
