// What counts of a message that was read out of its sender's process.

#include "communicator/native/process_reads.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/error.h"
#include "collectives/shared_memory/ranks_in_place.h"

namespace pydist::testing {
namespace {

constexpr int kSender = 1;

class ProcessReadsTest : public ::testing::Test {
 protected:
  [[nodiscard]] static ReadProcess reads_of(SharingRanks& ranks) {
    return process_reads({std::shared_ptr<void>(), &ranks.group(0)});
  }
  [[nodiscard]] bool read(const ReadProcess& read_process) {
    return read_process(kSender, reinterpret_cast<std::uintptr_t>(sent_.data()),
                        std::as_writable_bytes(std::span(got_)));
  }

  std::vector<int> sent_ = std::vector<int>(10'000, 7);
  std::vector<int> got_ = std::vector<int>(10'000, 0);
  SharingRanks ranks_{std::vector<ProcessMemory>(kRanksThatShare, own_memory())};
};

TEST_F(ProcessReadsTest, CopiesWhatLiesThere) {
  EXPECT_TRUE(read(reads_of(ranks_)));
  EXPECT_EQ(got_, sent_);
}

TEST_F(ProcessReadsTest, ThereAreNoneWhereNotAllMayRead) {
  SharingRanks strangers;
  EXPECT_EQ(reads_of(strangers), nullptr);
}

TEST_F(ProcessReadsTest, WhatCannotBeReadIsNotThere) {
  EXPECT_FALSE(reads_of(ranks_)(kSender, /*address=*/8, std::as_writable_bytes(std::span(got_))));
}

// Its memory is its own again: nobody knows what has been read.
TEST_F(ProcessReadsTest, WhoHasLeftIsNotBelieved) {
  const ReadProcess read_process = reads_of(ranks_);
  ranks_.group(0).segment().control(kSender).has_left.store(1);
  EXPECT_FALSE(read(read_process));
}

TEST_F(ProcessReadsTest, AFailedGroupThrows) {
  const ReadProcess read_process = reads_of(ranks_);
  EXPECT_TRUE(ranks_.group(2).segment().failure().set(ErrorKind::kAborted, "a test", 2));
  EXPECT_THROW(static_cast<void>(read(read_process)), Aborted);
}

}  // namespace
}  // namespace pydist::testing
