#include "memory/process_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "memory/shared_segment.h"

namespace pydist {
namespace {

std::uint64_t address_of(const void* place) { return reinterpret_cast<std::uintptr_t>(place); }

// What processes of these tests know each other by: a child has it where its parent has.
const std::uint64_t mark = 0x5EED;

// A child that does nothing until it is told to end.
class ReadableChild {
 public:
  ReadableChild() {
    EXPECT_EQ(::pipe(pipe_), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(pipe_[1]);
      char byte = 0;
      static_cast<void>(::read(pipe_[0], &byte, 1));
      ::_exit(0);
    }
    ::close(pipe_[0]);
  }
  ReadableChild(const ReadableChild&) = delete;
  ReadableChild& operator=(const ReadableChild&) = delete;
  ~ReadableChild() {
    if (pid_ > 0) {
      end();
    }
  }

  void end() {
    ::close(pipe_[1]);
    EXPECT_EQ(::waitpid(std::exchange(pid_, 0), nullptr, 0) > 0, true);
  }
  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  [[nodiscard]] ProcessMemory memory() const noexcept { return {pid_, address_of(&mark), mark}; }

 private:
  int pipe_[2] = {-1, -1};
  pid_t pid_ = 0;
};

TEST(ProcessMemoryTest, ReadsWhatAnotherProcessHas) {
  std::vector<int> values(300'001);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<int>(i);
  }
  const ReadableChild child;
  const std::vector<int> before = values;
  values.assign(values.size(), -1);  // of this process alone
  const ProcessMemory memory = child.memory();
  EXPECT_EQ(memory.obstacle(), 0);
  std::vector<int> read(values.size());
  EXPECT_EQ(memory.read(read.data(), address_of(values.data()), read.size() * sizeof(int)), 0);
  EXPECT_EQ(read, before);
  // From and to any byte.
  std::string bytes(7, 'x');
  EXPECT_EQ(memory.read(bytes.data() + 1, address_of(values.data()) + 3, 5), 0);
  EXPECT_EQ(bytes, 'x' + std::string(reinterpret_cast<const char*>(before.data()) + 3, 5) + 'x');
}

TEST(ProcessMemoryTest, AProcessReadsItself) {
  const ProcessMemory memory(::getpid(), address_of(&mark), mark);
  EXPECT_EQ(memory.obstacle(), 0);
  const int value = 5;
  int read = 0;
  EXPECT_EQ(memory.read(&read, address_of(&value), sizeof value), 0);
  EXPECT_EQ(read, 5);
}

TEST(ProcessMemoryTest, WhoHasEndedIsKnownToHave) {
  ReadableChild child;
  const ProcessMemory memory = child.memory();
  child.end();
  int read = 0;
  EXPECT_EQ(memory.obstacle(), ESRCH);
  EXPECT_EQ(memory.read(&read, address_of(&mark), sizeof read), ESRCH);
}

// The number may be another process's by then.
TEST(ProcessMemoryTest, AnotherProcessIsNotTakenForIt) {
  const ReadableChild child;
  int read = 0;
  for (const ProcessMemory& other :
       {ProcessMemory(child.pid(), address_of(&mark), mark + 1), ProcessMemory()}) {
    EXPECT_EQ(other.obstacle(), ESRCH);
    EXPECT_NE(other.read(&read, address_of(&mark), sizeof read), 0);
  }
  const ProcessMemory other(child.pid(), address_of(&mark), mark + 1);
  EXPECT_EQ(other.read(&read, address_of(&mark), sizeof read), ESRCH);
  // Nor where it has nothing at all.
  EXPECT_EQ(other.read(&read, 1, sizeof read), ESRCH);
  EXPECT_EQ(ProcessMemory(child.pid(), 1, mark).read(&read, address_of(&mark), sizeof read), ESRCH);
}

TEST(ProcessMemoryTest, WhatIsNotThereIsNotRead) {
  const std::size_t page = page_bytes();
  void* const pages =
      ::mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(pages, MAP_FAILED);
  ASSERT_EQ(::mprotect(static_cast<char*>(pages) + page, page, PROT_NONE), 0);
  const ProcessMemory memory(::getpid(), address_of(&mark), mark);
  std::vector<char> target(2 * page);
  EXPECT_EQ(memory.read(target.data(), address_of(pages), page), 0);
  EXPECT_TRUE(memory.has(address_of(pages)));
  EXPECT_FALSE(memory.has(address_of(pages) + page));
  EXPECT_EQ(memory.read(target.data(), address_of(pages), page + 1), EFAULT);
  EXPECT_EQ(memory.read(target.data(), address_of(pages) + page, 1), EFAULT);
  EXPECT_EQ(::munmap(pages, 2 * page), 0);
}

// Another user's, which is no sign that it has ended.
TEST(ProcessMemoryTest, WhatTheKernelForbidsIsRefused) {
  if (::geteuid() != 0) {
    EXPECT_EQ(ProcessMemory(1, address_of(&mark), mark).obstacle(), EPERM);
    return;
  }
  const ProcessMemory memory(::getpid(), address_of(&mark), mark);
  const pid_t child = ::fork();
  if (child == 0) {
    int read = 0;
    const bool is_refused = ::setresuid(65534, 65534, 65534) == 0 && memory.obstacle() == EPERM &&
                            memory.read(&read, address_of(&mark), sizeof read) == EPERM;
    ::_exit(is_refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// A process reads such memory itself, but the kernel keeps no pages of it: as with a device's.
TEST(ProcessMemoryTest, WhatTheKernelMapsIsNotOffered) {
  std::ifstream maps("/proc/self/maps");
  std::uint64_t begin = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("[vvar]") != std::string::npos) {
      begin = std::stoull(line.substr(0, line.find('-')), nullptr, 16);
    }
  }
  if (begin == 0) {
    GTEST_SKIP() << "this system maps no [vvar]";
  }
  EXPECT_FALSE(ProcessMemory(::getpid(), address_of(&mark), mark).has(begin));
}

}  // namespace
}  // namespace pydist
