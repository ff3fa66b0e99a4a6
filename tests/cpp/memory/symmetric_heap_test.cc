// Several ranks in one process, each with its own view of extents that all share.

#include "memory/symmetric_heap.h"

#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "memory/memory_room.h"

namespace pydist {
namespace {

class Host {
 public:
  explicit Host(int size) {
    for (int rank = 0; rank < size; ++rank) {
      heaps_.push_back(std::make_unique<SymmetricHeap>(rank, size, file_, takers(size)));
    }
  }

  [[nodiscard]] int size() const { return static_cast<int>(heaps_.size()); }
  [[nodiscard]] SymmetricHeap& heap(int rank) { return *heaps_[static_cast<std::size_t>(rank)]; }

  struct Block {
    SymmetricHeap::Placement placement;
    std::vector<std::byte*> data;  // of each rank
  };

  // What the communicator's agreement does.
  Block allocate(std::size_t bytes) {
    Block block{heap(0).choose_place(bytes), {}};
    for (int rank = 0; rank < size(); ++rank) {
      if (block.placement.needs_memory != 0) {
        heap(rank).map(block.placement);
        heap(rank).reserve(block.placement);
      }
      block.data.push_back(heap(rank).take(block.placement));
    }
    return block;
  }

  void release(const Block& block) {
    for (int rank = 0; rank < size(); ++rank) {
      heap(rank).release(block.placement);
    }
  }

  [[nodiscard]] int fd() const { return file_.fd(); }
  [[nodiscard]] std::size_t file_bytes() const {
    struct stat status{};
    EXPECT_EQ(::fstat(file_.fd(), &status), 0);
    return static_cast<std::size_t>(status.st_size);
  }
  // How much memory there is behind the heap.
  [[nodiscard]] std::size_t backed_bytes() const {
    struct stat status{};
    EXPECT_EQ(::fstat(file_.fd(), &status), 0);
    return static_cast<std::size_t>(status.st_blocks) * 512;
  }

 private:
  static std::vector<std::string> takers(int size) {
    return std::vector<std::string>(static_cast<std::size_t>(size), memory_limits());
  }

  const SharedFile file_ = SharedFile::create("heap");
  std::vector<std::unique_ptr<SymmetricHeap>> heaps_;
};

TEST(SymmetricHeapTest, ABlockLiesAtOneOffsetOfEveryRank) {
  Host host(3);
  const auto block = host.allocate(1000);
  for (int rank = 0; rank < 3; ++rank) {
    const HeapReference reference =
        host.heap(rank).find(block.data[static_cast<std::size_t>(rank)], 1000);
    EXPECT_NE(reference, 0u);
    EXPECT_EQ(reference, host.heap(0).find(block.data[0], 1000));
    for (int peer = 0; peer < 3; ++peer) {
      EXPECT_EQ(host.heap(rank).address(peer, reference),
                block.data[static_cast<std::size_t>(peer)]);
    }
  }
  host.release(block);
}

TEST(SymmetricHeapTest, ReferencesReachIntoBlocks) {
  Host host(2);
  const auto block = host.allocate(4096);
  const HeapReference inside = host.heap(1).find(block.data[1] + 100, 50);
  EXPECT_EQ(host.heap(1).address(0, inside), block.data[0] + 100);
  EXPECT_EQ(host.heap(0).address(1, inside), block.data[1] + 100);
}

TEST(SymmetricHeapTest, WhatIsNotInThisRanksPartIsNotFound) {
  Host host(2);
  EXPECT_EQ(host.heap(0).find(&host, 1), 0u);  // before there is any extent
  const auto block = host.allocate(4096);
  int elsewhere = 0;
  EXPECT_EQ(host.heap(0).find(&elsewhere, sizeof elsewhere), 0u);
  EXPECT_EQ(host.heap(0).find(nullptr, 0), 0u);
  // Another rank's part is mapped here too, but is not this rank's.
  EXPECT_EQ(host.heap(0).find(block.data[1], 1), 0u);
  EXPECT_EQ(host.heap(1).find(block.data[0], 1), 0u);
  // A buffer that starts inside and ends outside.
  EXPECT_EQ(host.heap(0).find(block.data[0], std::size_t{1} << 40), 0u);
}

TEST(SymmetricHeapTest, ABlockIsReusedOnlyAfterEveryRankFreedIt) {
  Host host(3);
  const auto first = host.allocate(512);
  host.heap(2).release(first.placement);
  host.heap(0).release(first.placement);
  const auto second = host.allocate(512);
  EXPECT_NE(second.data[0], first.data[0]);
  host.heap(1).release(first.placement);
  const auto third = host.allocate(512);
  EXPECT_EQ(third.data[0], first.data[0]);
  EXPECT_EQ(third.data[2], first.data[2]);
  // The counts of the first use don't free the second.
  const auto fourth = host.allocate(512);
  EXPECT_NE(fourth.data[0], third.data[0]);
}

TEST(SymmetricHeapTest, GivesBackWhatEveryRankFreedAndBacksItAgain) {
  Host host(1);
  SymmetricHeap& heap = host.heap(0);
  const auto first = host.allocate(3 << 20);
  std::byte* const data = first.data[0];
  data[0] = std::byte{7};
  heap.trim();  // in use
  EXPECT_EQ(data[0], std::byte{7});
  host.release(first);
  heap.trim();
  EXPECT_EQ(data[0], std::byte{0});
  const auto again = host.allocate(3 << 20);
  EXPECT_EQ(again.placement.extent_bytes, 0U);  // no new extent
  std::byte* const same = again.data[0];
  EXPECT_EQ(same, data);
  same[(3 << 20) - 1] = std::byte{9};
  host.release(again);
  heap.trim();
  heap.trim();
}

TEST(SymmetricHeapTest, EachRankBacksItsOwnPart) {
  Host host(3);
  constexpr std::size_t kBytes = 4 << 20;
  const auto placement = host.heap(0).choose_place(kBytes);
  ASSERT_NE(placement.needs_memory, 0U);
  EXPECT_EQ(host.backed_bytes(), 0U) << "rank 0 took memory for everybody";
  for (int rank = 0; rank < 3; ++rank) {
    host.heap(rank).map(placement);
  }
  EXPECT_EQ(host.backed_bytes(), 0U);
  for (int rank = 0; rank < 3; ++rank) {
    host.heap(rank).reserve(placement);
    EXPECT_EQ(host.backed_bytes(), static_cast<std::size_t>(rank + 1) * placement.extent_bytes);
  }
}

TEST(SymmetricHeapTest, OthersAreKeptOutOfWhatARankUses) {
  Host host(1);
  SymmetricHeap& heap = host.heap(0);
  constexpr std::size_t kBytes = 100'000;  // neighbours share a page
  const auto first = host.allocate(kBytes);
  const auto second = host.allocate(kBytes);
  const auto freed = host.allocate(std::size_t{8} << 20);
  std::memset(first.data[0], 1, kBytes);
  std::memset(second.data[0], 2, kBytes);
  std::memset(freed.data[0], 3, std::size_t{8} << 20);
  host.release(freed);
  heap.trim();
  const std::size_t backed = host.backed_bytes();
  heap.keep_others_out();
  EXPECT_EQ(host.backed_bytes(), backed) << "what nobody uses got memory";
  // As another process would.
  const std::vector<std::byte> others(host.file_bytes(), std::byte{9});
  ASSERT_EQ(::pwrite(host.fd(), others.data(), others.size(), 0),
            static_cast<ssize_t>(others.size()));
  for (std::size_t i = 0; i < kBytes; ++i) {
    ASSERT_EQ(first.data[0][i], std::byte{1}) << i;
    ASSERT_EQ(second.data[0][i], std::byte{2}) << i;
  }
  EXPECT_NE(heap.find(first.data[0], kBytes), 0U);
  host.release(first);
  host.release(second);
}

TEST(SymmetricHeapTest, WhatIsGivenUpLeavesNothingBehind) {
  Host host(2);
  const auto first = host.heap(0).choose_place(2 << 20);
  host.heap(0).map(first);
  host.heap(0).reserve(first);
  // Rank 1 could not.
  host.heap(0).give_up(first);
  host.heap(1).give_up(first);
  EXPECT_EQ(host.backed_bytes(), 0U);
  const auto block = host.allocate(2 << 20);
  EXPECT_EQ(block.placement.extent, first.extent);
  EXPECT_NE(block.placement.extent_begin, first.extent_begin);
  EXPECT_EQ(block.data[1][(2 << 20) - 1], std::byte{0});
  host.release(block);
  // The same where the extent is there, and only its memory is not.
  host.heap(0).trim();
  const std::size_t least = host.backed_bytes();
  const auto again = host.heap(0).choose_place(2 << 20);
  EXPECT_EQ(again.extent_bytes, 0U);
  ASSERT_NE(again.needs_memory, 0U);
  host.heap(1).map(again);
  host.heap(1).reserve(again);
  host.heap(0).give_up(again);
  host.heap(1).give_up(again);
  EXPECT_LE(host.backed_bytes(), least + 2 * page_bytes());
  for (int turn = 0; turn < 3; ++turn) {
    const auto next = host.allocate(2 << 20);
    EXPECT_EQ(next.placement.offset, block.placement.offset) << "it was not taken back";
    host.release(next);
  }
}

TEST(SymmetricHeapTest, FreedNeighboursMerge) {
  Host host(2);
  const auto a = host.allocate(300'000);
  const auto b = host.allocate(300'000);
  const auto c = host.allocate(300'000);
  ASSERT_EQ(c.placement.extent, a.placement.extent);
  host.release(a);
  host.release(b);
  const auto both = host.allocate(600'000);
  EXPECT_EQ(both.data[0], a.data[0]);
  EXPECT_EQ(both.placement.extent_bytes, 0u) << "it grew where there was room";
  host.release(c);
}

TEST(SymmetricHeapTest, GrowsByExtentsAndKeepsOldAddresses) {
  Host host(2);
  const auto small = host.allocate(100);
  EXPECT_NE(small.placement.extent_bytes, 0u);
  std::memset(small.data[1], 0x5a, 100);
  const auto large = host.allocate(std::size_t{5} << 20);
  EXPECT_EQ(large.placement.extent, 1u);
  EXPECT_NE(large.placement.extent_bytes, 0u);
  std::memset(large.data[1], 0x11, std::size_t{5} << 20);
  EXPECT_EQ(small.data[1][99], std::byte{0x5a});
  const auto next = host.allocate(100);
  EXPECT_EQ(next.placement.extent, 0u);
  EXPECT_EQ(next.placement.extent_bytes, 0u);
  const HeapReference in_second = host.heap(1).find(large.data[1], std::size_t{5} << 20);
  EXPECT_EQ(host.heap(0).address(1, in_second), large.data[1]);
  EXPECT_NE(in_second, host.heap(1).find(small.data[1], 100));
}

TEST(SymmetricHeapTest, NoBytesHaveAnAddressOfTheirOwn) {
  Host host(2);
  const auto a = host.allocate(0);
  const auto b = host.allocate(0);
  EXPECT_NE(a.data[0], b.data[0]);
  EXPECT_NE(host.heap(0).find(a.data[0], 0), 0u);
  host.release(a);
  const auto again = host.allocate(0);
  EXPECT_EQ(again.data[0], a.data[0]);
}

TEST(SymmetricHeapTest, MoreBlocksThanOneExtentCounts) {
  Host host(2);
  std::vector<Host::Block> blocks;
  for (int i = 0; i < 2500; ++i) {
    blocks.push_back(host.allocate(1));
  }
  EXPECT_GE(blocks.back().placement.extent, 2u);
  for (const auto& block : blocks) {
    host.release(block);
  }
  EXPECT_EQ(host.allocate(1).data[0], blocks.front().data[0]);
}

TEST(SymmetricHeapTest, AnAbsurdSizeIsAnErrorAndLeavesTheHeapUsable) {
  Host host(4);
  for (const std::size_t bytes :
       {std::size_t{1} << 50, std::size_t{1} << 62, std::size_t{1} << 63,
        std::numeric_limits<std::size_t>::max() - 1, std::numeric_limits<std::size_t>::max()}) {
    EXPECT_THROW(static_cast<void>(host.heap(0).choose_place(bytes)), TransportError) << bytes;
  }
  const auto block = host.allocate(10);
  EXPECT_EQ(block.placement.extent, 0u);
  EXPECT_NE(block.placement.extent_bytes, 0u);
  // Where there is an extent already, too.
  EXPECT_THROW(
      static_cast<void>(host.heap(0).choose_place(std::numeric_limits<std::size_t>::max())),
      TransportError);
}

TEST(SymmetricHeapTest, AnExtentThatAPeerCannotMapIsGivenUp) {
  Host host(2);
  SymmetricHeap::Placement refused = host.heap(0).choose_place(100);
  ASSERT_NE(refused.extent_bytes, 0u);
  host.heap(0).map(refused);
  SymmetricHeap::Placement longer = refused;
  longer.extent_bytes *= 2;  // than the file
  EXPECT_THROW(host.heap(1).map(longer), TransportError);
  host.heap(0).give_up(refused);
  host.heap(1).give_up(refused);  // which never had it
  const auto block = host.allocate(100);
  EXPECT_EQ(block.placement.extent, 0u);
  EXPECT_NE(block.placement.extent_bytes, 0u) << "peers must map it anew";
}

TEST(SymmetricHeapTest, LiveBlocksNeverOverlap) {
  // Every rank fills its blocks with the number of the block, frees them in its own order, and
  // finds them untouched until then.
  constexpr int kSize = 3;
  Host host(kSize);
  std::mt19937 random(5);
  struct Live {
    Host::Block block;
    std::size_t bytes;
    unsigned char mark;
    std::vector<bool> is_held;
  };
  std::vector<Live> live;
  for (int step = 0; step < 1500; ++step) {
    if (random() % 3 == 0 || live.empty()) {
      const std::size_t bytes = random() % (random() % 8 == 0 ? 200'000 : 3'000);
      Live next{host.allocate(bytes), bytes, static_cast<unsigned char>(step),
                std::vector<bool>(kSize, true)};
      for (std::byte* data : next.block.data) {
        std::memset(data, next.mark, bytes);
      }
      live.push_back(std::move(next));
      continue;
    }
    const std::size_t index = random() % live.size();
    Live& each = live[index];
    const std::size_t rank = random() % kSize;
    if (each.is_held[rank]) {
      const auto* data = reinterpret_cast<const unsigned char*>(each.block.data[rank]);
      for (std::size_t i = 0; i < each.bytes; ++i) {
        ASSERT_EQ(data[i], each.mark) << "step " << step << ", rank " << rank;
      }
      host.heap(static_cast<int>(rank)).release(each.block.placement);
      each.is_held[rank] = false;
    }
    if (each.is_held == std::vector<bool>(kSize, false)) {
      std::swap(each, live.back());
      live.pop_back();
    }
  }
}

TEST(SymmetricHeapTest, RanksFindAndFreeWhileTheHeapGrows) {
  constexpr int kSize = 2;
  Host host(kSize);
  const auto fixed = host.allocate(4096);
  std::atomic<bool> stopping{false};
  std::thread finder([&] {
    const HeapReference expected = host.heap(1).find(fixed.data[1], 4096);
    while (!stopping) {
      EXPECT_EQ(host.heap(1).find(fixed.data[1], 4096), expected);
      EXPECT_EQ(host.heap(1).address(0, expected), fixed.data[0]);
    }
  });
  for (int i = 0; i < 30; ++i) {
    const auto block = host.allocate(std::size_t{600} << 10);
    std::thread freeing([&] { host.heap(1).release(block.placement); });
    if (i % 2 == 0) {
      host.heap(0).release(block.placement);
    }
    freeing.join();
  }
  stopping = true;
  finder.join();
}

}  // namespace
}  // namespace pydist
