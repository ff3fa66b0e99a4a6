#include "memory/shared_segment.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "memory/memory_room.h"

namespace pydist {
namespace {

FileDescriptor duplicate(const SharedSegment& segment) {
  return FileDescriptor(::fcntl(segment.fd(), F_DUPFD_CLOEXEC, 0));
}

std::size_t backed_bytes(const SharedSegment& segment) {
  struct stat status{};
  EXPECT_EQ(::fstat(segment.fd(), &status), 0);
  return static_cast<std::size_t>(status.st_blocks) * 512;
}

int count_mappings(const std::string& label) {
  std::ifstream maps("/proc/self/maps");
  int found = 0;
  for (std::string line; std::getline(maps, line);) {
    found += line.find("pydist:" + label + " ") != std::string::npos ? 1 : 0;
  }
  return found;
}

TEST(SharedSegmentTest, IsZeroedWholePagesWithALabel) {
  const SharedSegment segment = SharedSegment::create("label-test", 1);
  EXPECT_EQ(segment.bytes(), page_bytes());
  EXPECT_EQ(count_mappings("label-test"), 1);
  segment.reserve(0, segment.bytes(), "a test");
  EXPECT_TRUE(std::all_of(segment.data(), segment.data() + segment.bytes(),
                          [](std::byte byte) { return byte == std::byte{0}; }));
}

TEST(SharedSegmentTest, AnEmptyOneHoldsNothing) {
  const SharedSegment nothing;
  EXPECT_EQ(nothing.data(), nullptr);
  EXPECT_EQ(nothing.bytes(), 0u);
  EXPECT_EQ(nothing.fd(), -1);
}

TEST(SharedSegmentTest, OneProcessMapsItOnce) {
  SharedSegment first = SharedSegment::create("once", 3 * page_bytes());
  first.reserve(0, first.bytes(), "a test");
  std::vector<SharedSegment> others(8);
  std::vector<std::thread> threads;
  for (SharedSegment& other : others) {
    threads.emplace_back([&] { other = SharedSegment::map(duplicate(first), 3 * page_bytes()); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const SharedSegment& other : others) {
    EXPECT_EQ(other.data(), first.data());
  }
  EXPECT_EQ(count_mappings("once"), 1);
  // It lives as long as the last of them.
  std::byte* const data = first.data();
  data[5] = std::byte{42};
  first = SharedSegment();
  others.resize(1);
  EXPECT_EQ(others[0].data()[5], std::byte{42});
  others.clear();
  EXPECT_EQ(count_mappings("once"), 0);
}

TEST(SharedSegmentTest, SegmentsWithOneLabelAreTwoSegments) {
  const SharedSegment a = SharedSegment::create("same", 4096);
  const SharedSegment b = SharedSegment::create("same", 4096);
  EXPECT_NE(a.data(), b.data());
}

TEST(SharedSegmentTest, ADescriptorIsEnoughToMapItElsewhere) {
  // The child stands for another process: it has the descriptor alone.
  const SharedSegment segment = SharedSegment::create("handed", 2 * page_bytes());
  segment.reserve(0, segment.bytes(), "a test");
  segment.data()[0] = std::byte{17};
  const std::size_t last = segment.bytes() - 1;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    void* again = ::mmap(nullptr, last + 1, PROT_READ | PROT_WRITE, MAP_SHARED, segment.fd(), 0);
    if (again == MAP_FAILED || again == segment.data()) {
      ::_exit(1);
    }
    auto* bytes = static_cast<std::byte*>(again);
    const bool is_same = bytes[0] == std::byte{17};
    bytes[last] = std::byte{99};
    ::_exit(is_same ? 0 : 2);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(segment.data()[last], std::byte{99});
}

TEST(SharedSegmentTest, ItTakesMemoryOnlyWhereReserved) {
  const std::size_t page = page_bytes();
  const SharedSegment segment = SharedSegment::create("sparse", std::size_t{1} << 30);
  EXPECT_EQ(backed_bytes(segment), 0u);
  segment.reserve(10 * page, 5 * page, "a test");
  EXPECT_EQ(backed_bytes(segment), 5 * page);
  segment.reserve(10 * page, 5 * page, "a test");  // once more is no more
  EXPECT_EQ(backed_bytes(segment), 5 * page);
  segment.reserve(12 * page + 1, 3 * page, "a test");  // 12 to 16, of which 15 is new
  EXPECT_EQ(backed_bytes(segment), 6 * page);
  segment.reserve(0, 0, "nothing");
  EXPECT_EQ(backed_bytes(segment), 6 * page);
  segment.populate(10 * page + 7, 100);
  EXPECT_EQ(backed_bytes(segment), 6 * page);
}

TEST(SharedSegmentTest, ThreadsReserveTogether) {
  const SharedSegment segment = SharedSegment::create("together", 64 * page_bytes());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 9; ++i) {
    threads.emplace_back(
        [&segment, i] { segment.reserve(i * 3 * page_bytes(), 40 * page_bytes(), "a test"); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  segment.data()[0] = std::byte{1};
  segment.data()[64 * page_bytes() - 1] = std::byte{1};
  EXPECT_EQ(backed_bytes(segment), 64 * page_bytes());
}

TEST(SharedSegmentTest, AReservationThatCannotFitIsAnErrorNotAKill) {
  // Mapping takes addresses alone, so much more than there is can be mapped.
  const SharedSegment segment = SharedSegment::create("huge", 4 * memory_room().bytes);
  try {
    segment.reserve(0, segment.bytes(), "an absurd tensor");
    FAIL() << "more than there is was reserved";
  } catch (const TransportError& error) {
    EXPECT_NE(std::string(error.what()).find("an absurd tensor"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(backed_bytes(segment), 0u);
}

TEST(SharedSegmentTest, NobodyCanResizeIt) {
  const SharedSegment segment = SharedSegment::create("sealed", 4 * page_bytes());
  EXPECT_NE(::ftruncate(segment.fd(), 0), 0);
  EXPECT_NE(::ftruncate(segment.fd(), static_cast<off_t>(8 * page_bytes())), 0);
}

TEST(SharedSegmentTest, TheWrongSizeIsRefused) {
  const SharedSegment segment = SharedSegment::create("size", 2 * page_bytes());
  EXPECT_THROW(static_cast<void>(SharedSegment::map(duplicate(segment), page_bytes())),
               TransportError);
  EXPECT_EQ(SharedSegment::map(duplicate(segment), 0).bytes(), 2 * page_bytes());
}

TEST(SharedSegmentTest, WhatIsNoSegmentIsRefused) {
  EXPECT_THROW(static_cast<void>(SharedSegment::map(FileDescriptor(), 0)), TransportError);
  FileDescriptor null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_THROW(static_cast<void>(SharedSegment::map(std::move(null), 0)), TransportError);
}

TEST(SharedSegmentTest, WhatIsMadePrivateIsReachedByNobody) {
  const std::size_t page = page_bytes();
  const SharedSegment segment = SharedSegment::create("private", 4 * page);
  segment.reserve(0, segment.bytes(), "a test");
  const std::string others(4 * page, 'o');
  const std::string mine(4 * page, 'm');
  std::copy(mine.begin(), mine.end(), reinterpret_cast<char*>(segment.data()));
  segment.make_private(page, 2 * page);
  // As another process would.
  ASSERT_EQ(::pwrite(segment.fd(), others.data(), others.size(), 0),
            static_cast<ssize_t>(others.size()));
  const std::string seen(reinterpret_cast<const char*>(segment.data()), segment.bytes());
  EXPECT_EQ(seen, others.substr(0, page) + mine.substr(0, 2 * page) + others.substr(0, page));
  // Nor does what is written here reach them.
  std::fill_n(segment.data() + page, 2 * page, std::byte{'x'});
  std::string kept(4 * page, ' ');
  ASSERT_EQ(::pread(segment.fd(), kept.data(), kept.size(), 0), static_cast<ssize_t>(kept.size()));
  EXPECT_EQ(kept, others);
}

TEST(SharedSegmentTest, RoundingUp) {
  EXPECT_EQ(round_up(0, 8), 0u);
  EXPECT_EQ(round_up(1, 8), 8u);
  EXPECT_EQ(round_up(8, 8), 8u);
  EXPECT_EQ(round_up(9, 8), 16u);
}

}  // namespace
}  // namespace pydist
