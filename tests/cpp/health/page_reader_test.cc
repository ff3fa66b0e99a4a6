#include "health/page_reader.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <string>

#include "base/error.h"
#include "health/process_page.h"
#include "memory/file_descriptor.h"
#include "memory/shared_segment.h"

namespace pydist {
namespace {

class PageReaderTest : public ::testing::Test {
 protected:
  PageReaderTest() : segment_(SharedSegment::create("process", sizeof(ProcessPage))) {
    segment_.reserve(0, segment_.bytes(), "a page");
    page_ = reinterpret_cast<ProcessPage*>(segment_.data());
  }

  SharedSegment segment_;
  ProcessPage* page_;
};

TEST_F(PageReaderTest, AnEmptyPageHasNothingToTell) {
  const PageReading reading = read_page(segment_.fd());
  EXPECT_FALSE(reading.has_departed);
  EXPECT_EQ(reading.rank, -1);
  EXPECT_TRUE(reading.entries.empty());
  EXPECT_EQ(reading.silent_s, 0.0);
}

TEST_F(PageReaderTest, ReadsWhatTheOwnerWrote) {
  page_->heartbeat_ns = monotonic_ns() - 3'000'000'000;
  page_->has_departed = 1;
  page_->pid = 4711;
  page_->rank_plus_one = 4;
  const Journal::Ticket first = page_->journal.begin(7, 41, 0, 8, "");
  page_->journal.finish(first, JournalState::kSucceeded);
  static_cast<void>(page_->journal.begin(7, 42, 2, 16, "bucket 1"));
  const PageReading reading = read_page(segment_.fd());
  EXPECT_TRUE(reading.has_departed);
  EXPECT_EQ(reading.pid, 4711);
  EXPECT_EQ(reading.rank, 3);
  EXPECT_GE(reading.silent_s, 3.0);
  ASSERT_EQ(reading.entries.size(), 2u);
  EXPECT_EQ(reading.entries[0].sequence, 42u);
  EXPECT_EQ(reading.entries[0].label, "bucket 1");
  EXPECT_EQ(reading.entries[0].state, JournalState::kRunning);
  EXPECT_EQ(reading.entries[1].state, JournalState::kSucceeded);
}

TEST_F(PageReaderTest, ReadsThroughADescriptorThatCannotWrite) {
  const std::string path = "/proc/self/fd/" + std::to_string(segment_.fd());
  const FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_GE(fd.get(), 0);
  EXPECT_TRUE(read_page(fd.get()).entries.empty());
}

TEST_F(PageReaderTest, RefusesOtherFiles) {
  const SharedSegment small = SharedSegment::create("group", 64);
  EXPECT_THROW(static_cast<void>(read_page(small.fd())), InvalidUsage);
  EXPECT_THROW(static_cast<void>(read_page(-1)), TransportError);
}

}  // namespace
}  // namespace pydist
