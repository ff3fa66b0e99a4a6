#include "memory/allocation_heap.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "memory/heap_window.h"

namespace pydist {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

// A block that gives itself back.
class HeapBlock {
 public:
  HeapBlock(AllocationHeap& heap, std::size_t bytes)
      : heap_(heap), data_(heap.allocate(bytes)), bytes_(bytes) {
    if (data_ != nullptr) {
      std::memset(data_, 1, bytes_);
    }
  }
  HeapBlock(HeapBlock&& other) noexcept
      : heap_(other.heap_), data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  HeapBlock& operator=(HeapBlock&&) = delete;
  ~HeapBlock() {
    if (data_ != nullptr) {
      heap_.release(data_);
    }
  }

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] bool holds(int value) const {
    return std::all_of(data_, data_ + bytes_,
                       [value](std::byte byte) { return byte == static_cast<std::byte>(value); });
  }
  void fill(int value) const { std::memset(data_, value, bytes_); }

 private:
  AllocationHeap& heap_;
  std::byte* data_;
  std::size_t bytes_;
};

TEST(AllocationHeapTest, BlocksAreAlignedApartAndUsedAgain) {
  const auto heap = AllocationHeap::create(64 * kMiB);
  std::vector<HeapBlock> blocks;
  for (int i = 0; i < 100; ++i) {
    blocks.emplace_back(*heap, 1000 + 777 * static_cast<std::size_t>(i));
    ASSERT_NE(blocks.back().data(), nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(blocks.back().data()) % 256, 0u);
    EXPECT_EQ(AllocationHeap::of(blocks.back().data()), heap);
    blocks.back().fill(i);
  }
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(blocks[static_cast<std::size_t>(i)].holds(i)) << i;
  }
  const std::byte* const freed = blocks.back().data();
  blocks.pop_back();
  EXPECT_EQ(HeapBlock(*heap, 1000 + 777 * 99).data(), freed);
  blocks.clear();
  EXPECT_EQ(heap->used_bytes(), 0u);
}

TEST(AllocationHeapTest, HoldsNoMoreThanItsBound) {
  const auto heap = AllocationHeap::create(5 * kMiB + 1);
  EXPECT_EQ(heap->segment().bytes(), 6 * kMiB);  // whole grains
  std::vector<HeapBlock> blocks;
  for (int i = 0; i < 6; ++i) {
    blocks.emplace_back(*heap, kMiB);
    EXPECT_NE(blocks.back().data(), nullptr) << i;
  }
  EXPECT_EQ(HeapBlock(*heap, 1000).data(), nullptr);
  EXPECT_EQ(HeapBlock(*heap, std::size_t{1} << 63).data(), nullptr);
  blocks.clear();
  // What had been divided serves the whole again.
  EXPECT_NE(HeapBlock(*heap, 6 * kMiB).data(), nullptr);
  EXPECT_LE(heap->reserved_bytes(), 6 * kMiB);
}

TEST(AllocationHeapTest, AHeapHasASize) {
  EXPECT_THROW(static_cast<void>(AllocationHeap::create(0)), InvalidUsage);
  EXPECT_THROW(static_cast<void>(AllocationHeap::create(std::size_t{1} << 60)), InvalidUsage);
}

TEST(AllocationHeapTest, RepeatedPatternsReserveNothingMore) {
  const auto heap = AllocationHeap::create(512 * kMiB);
  const auto step = [&heap](int turn) {
    std::vector<HeapBlock> blocks;
    for (int i = 0; i < 40; ++i) {
      // Sizes that are not the same in each turn, for 50 turns.
      blocks.emplace_back(*heap,
                          kMiB / 2 + static_cast<std::size_t>((turn * 31 + i * 17) % 50) * 20'000);
      ASSERT_NE(blocks.back().data(), nullptr);
    }
  };
  step(0);
  for (int turn = 0; turn < 150; ++turn) {
    step(turn);
  }
  // In use are at most 60 MiB at a time.
  EXPECT_LT(heap->reserved_bytes(), 120 * kMiB);
}

TEST(AllocationHeapTest, GivesBackWhatIsNotNeededAnyMore) {
  const auto heap = AllocationHeap::create(512 * kMiB);
  const HeapBlock kept(*heap, kMiB);
  {
    const HeapBlock large(*heap, 400 * kMiB);
  }
  EXPECT_GE(heap->reserved_bytes(), 400 * kMiB);
  for (int i = 0; i < 10'000; ++i) {
    const HeapBlock small(*heap, 1000);
  }
  EXPECT_LT(heap->reserved_bytes(), 150 * kMiB);
  EXPECT_TRUE(kept.holds(1));
  heap->trim();
  EXPECT_EQ(heap->reserved_bytes(), AllocationHeap::kGrainBytes);
  EXPECT_TRUE(kept.holds(1));
  EXPECT_NE(HeapBlock(*heap, 400 * kMiB).data(), nullptr);
}

TEST(AllocationHeapTest, LivesAsLongAsItsBlocks) {
  auto heap = AllocationHeap::create(8 * kMiB);
  AllocationHeap* const raw = heap.get();
  std::byte* const block = heap->allocate(kMiB);
  heap.reset();
  std::memset(block, 7, kMiB);
  const auto found = AllocationHeap::of(block);
  ASSERT_EQ(found.get(), raw);
  raw->release(block);
  EXPECT_EQ(found.use_count(), 1);
}

TEST(AllocationHeapTest, AnyThreadFrees) {
  const auto heap = AllocationHeap::create(256 * kMiB);
  std::mutex mutex;
  std::vector<HeapBlock> shared;
  const auto work = [&](std::uint64_t chance) {
    for (int i = 0; i < 400; ++i) {
      chance = chance * 6364136223846793005u + 1442695040888963407u;
      HeapBlock block(*heap, 16'000 + (chance >> 40) % 200'000);
      ASSERT_NE(block.data(), nullptr);
      block.fill(static_cast<int>(chance >> 60));
      ASSERT_TRUE(block.holds(static_cast<int>(chance >> 60)));
      const std::lock_guard lock(mutex);
      if (shared.size() > 30) {
        shared.pop_back();
      }
      shared.push_back(std::move(block));
    }
  };
  std::vector<std::thread> threads;
  for (std::uint64_t i = 0; i < 4; ++i) {
    threads.emplace_back(work, i);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  shared.clear();
  EXPECT_EQ(heap->used_bytes(), 0u);
}

TEST(AllocationHeapTest, OthersReadItAndCannotWrite) {
  const auto heap = AllocationHeap::create(8 * kMiB);
  const HeapBlock block(*heap, kMiB);
  block.fill(3);
  const FileDescriptor fd = heap->read_only_descriptor();
  const std::size_t bytes = heap->segment().bytes();
  EXPECT_EQ(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0), MAP_FAILED);
  void* const seen = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd.get(), 0);
  ASSERT_NE(seen, MAP_FAILED);
  EXPECT_EQ(std::memcmp(seen, heap->segment().data(), kMiB), 0);
  EXPECT_NE(::mprotect(seen, bytes, PROT_READ | PROT_WRITE), 0);
  ::munmap(seen, bytes);
}

TEST(AllocationHeapTest, AWindowShowsWhatLiesInTheHeap) {
  const auto heap = AllocationHeap::create(8 * kMiB);
  const HeapBlock block(*heap, kMiB);
  HeapWindow window;
  EXPECT_EQ(window.find(block.data(), 1), 0u);
  EXPECT_FALSE(window.has(1, 0));
  window.open(heap->segment());
  EXPECT_FALSE(window.is_on());
  window.switch_on();
  EXPECT_TRUE(window.is_on());
  const HeapReference there = window.find(block.data() + 5, 100);
  ASSERT_NE(there, 0u);
  EXPECT_TRUE(window.has(there, 100));
  EXPECT_EQ(window.address(there), block.data() + 5);
  std::vector<std::byte> elsewhere(100);
  EXPECT_EQ(window.find(elsewhere.data(), 100), 0u);
  EXPECT_EQ(window.find(block.data(), 9 * kMiB), 0u);
  EXPECT_FALSE(window.has(there, 8 * kMiB));
  EXPECT_FALSE(window.has(0, 1));
  EXPECT_FALSE(window.has(~std::uint64_t{0}, 1));
  EXPECT_FALSE(window.has(1, ~std::uint64_t{0}));
}

// -- forks, see Note [Heaps and forks] --------------------------------------------------------

// Forks; the child's exit status is what `in_child` returns.
int fork_and_wait(
    const std::function<int()>& in_child, const std::function<void()>& in_parent = [] {}) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    ::_exit(in_child());
  }
  in_parent();
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(AllocationHeapForkTest, NeitherSeesWhatTheOtherWrites) {
  const auto heap = AllocationHeap::create(64 * kMiB);
  // Also one that shares its pages with a neighbour, and one that lies apart.
  const HeapBlock first(*heap, 10'000);
  const HeapBlock second(*heap, 10'000);
  std::optional<HeapBlock> gap(std::in_place, *heap, 5 * kMiB);
  const HeapBlock third(*heap, 3 * kMiB);
  gap.reset();
  for (const HeapBlock* each : {&first, &second, &third}) {
    each->fill(1);
  }
  std::array<int, 2> parent_wrote{};
  ASSERT_EQ(::pipe(parent_wrote.data()), 0);
  const auto in_child = [&] {
    char word = 0;
    const bool waited = ::read(parent_wrote[0], &word, 1) == 1;
    const bool sees_old = first.holds(1) && second.holds(1) && third.holds(1);
    for (const HeapBlock* each : {&first, &second, &third}) {
      each->fill(3);
    }
    const bool sees_own = first.holds(3) && second.holds(3) && third.holds(3);
    return waited && sees_old && sees_own ? 0 : 1;
  };
  const auto in_parent = [&] {
    for (const HeapBlock* each : {&first, &second, &third}) {
      each->fill(2);
    }
    EXPECT_EQ(::write(parent_wrote[1], "x", 1), 1);
  };
  EXPECT_EQ(fork_and_wait(in_child, in_parent), 0);
  for (const HeapBlock* each : {&first, &second, &third}) {
    EXPECT_TRUE(each->holds(2));
  }
  ::close(parent_wrote[0]);
  ::close(parent_wrote[1]);
}

TEST(AllocationHeapForkTest, AChildAllocatesAndFreesNothingThere) {
  const auto heap = AllocationHeap::create(64 * kMiB);
  std::byte* const block = heap->allocate(kMiB);
  const std::size_t used = heap->used_bytes();
  AllocationHeap::set_current(heap);
  EXPECT_EQ(fork_and_wait([&] {
              AllocationHeap::of(block)->release(block);
              heap->trim();
              std::memset(block, 9, kMiB);  // what the child has inherited stays its own
              return AllocationHeap::current() == heap && heap->allocate(kMiB) == nullptr ? 0 : 1;
            }),
            0);
  AllocationHeap::set_current(nullptr);
  EXPECT_EQ(heap->used_bytes(), used);
  EXPECT_NE(*block, std::byte{9});
  heap->release(block);
  EXPECT_EQ(heap->used_bytes(), 0u);
}

TEST(AllocationHeapForkTest, AGrandchildHasACopyOfTheChilds) {
  const auto heap = AllocationHeap::create(64 * kMiB);
  const HeapBlock block(*heap, kMiB);
  EXPECT_EQ(fork_and_wait([&] {
              block.fill(4);
              const int below = fork_and_wait([&] {
                const bool sees = block.holds(4);
                block.fill(5);
                return sees ? 0 : 1;
              });
              return below == 0 && block.holds(4) ? 0 : 1;
            }),
            0);
  EXPECT_TRUE(block.holds(1));
}

TEST(AllocationHeapForkTest, OtherThreadsAllocateMeanwhile) {
  const auto heap = AllocationHeap::create(64 * kMiB);
  const HeapBlock block(*heap, kMiB);
  std::atomic<bool> is_over{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (!is_over) {
        const HeapBlock other(*heap, 30'000);
        static_cast<void>(AllocationHeap::of(other.data()));
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(fork_and_wait([&] {
                block.fill(8);
                return heap->allocate(10) == nullptr && AllocationHeap::of(block.data()) ? 0 : 1;
              }),
              0);
    EXPECT_TRUE(block.holds(1));
  }
  is_over = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
// The runtimes of the sanitizers need memory of their own, which the limit below denies.
TEST(AllocationHeapForkTest, AChildWithoutRoomEndsWithASentence) {
  std::array<int, 2> output{};
  ASSERT_EQ(::pipe(output.data()), 0);
  // In a child, for whom the limit stays.
  const int status = fork_and_wait([&] {
    const auto heap = AllocationHeap::create(64 * kMiB);
    const HeapBlock block(*heap, 32 * kMiB);
    ::dup2(output[1], STDERR_FILENO);
    const rlimit little{kMiB, kMiB};  // of writable memory that is the process's alone
    if (::setrlimit(RLIMIT_DATA, &little) != 0) {
      return 98;
    }
    return fork_and_wait([] { return 97; });
  });
  ::close(output[1]);
  EXPECT_EQ(status, 1);
  std::string text(2000, '\0');
  const ssize_t length = ::read(output[0], text.data(), text.size());
  ::close(output[0]);
  text.resize(length > 0 ? static_cast<std::size_t>(length) : 0);
  EXPECT_NE(text.find("needs a copy of 32768 KiB of tensors"), std::string::npos) << text;
  EXPECT_NE(text.find("'spawn'"), std::string::npos) << text;
}
#endif

}  // namespace
}  // namespace pydist
