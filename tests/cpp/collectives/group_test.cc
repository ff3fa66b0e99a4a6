// Where a group's ranks deposit, see Note [Transits that are exchanged] in collectives/group.h.

#include "collectives/group.h"

#include <gtest/gtest.h>

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "memory/shared_segment.h"
#include "memory/symmetric_heap.h"

namespace pydist::testing {
namespace {

constexpr std::size_t kChunkBytes = 4096;

class Silent final : public Announcer {
 public:
  void send_post(std::uint64_t /*sequence*/, std::uint64_t /*round*/) override {}
  void send_posts(std::span<const int> /*ranks*/, int /*receiver*/, std::uint64_t /*sequence*/,
                  std::uint64_t /*round*/, std::span<const std::byte> /*deposit*/) override {}
  void send_deposit(int /*receiver*/, std::uint64_t /*round*/,
                    std::span<const std::byte> /*data*/) override {}
};

struct RankOfGroup {
  explicit RankOfGroup(int size, Announcer* announcer = nullptr)
      : bells(static_cast<std::size_t>(size)),
        heap(/*rank=*/0, size, SharedFile::create("heap"),
             std::vector<std::string>(static_cast<std::size_t>(size))),
        group(/*rank=*/0, size,
              GroupSegment(SharedSegment::create("group", GroupSegment::bytes(size, kChunkBytes)),
                           size, kChunkBytes),
              pointers(), heap, announcer) {}

  std::vector<Doorbell*> pointers() {
    std::vector<Doorbell*> all;
    for (Doorbell& bell : bells) {
      all.push_back(&bell);
    }
    return all;
  }

  std::vector<Doorbell> bells;
  SymmetricHeap heap;
  Group group;
};

TEST(GroupTest, OfTwoRanksEachWritesWhereItHasRead) {
  const RankOfGroup it(2);
  for (std::uint64_t round = 0; round < 3 * kTransitSlots; ++round) {
    for (const int rank : {0, 1}) {
      EXPECT_EQ(it.group.exchanged_transit(rank, round + kTransitSlots),
                it.group.exchanged_transit(1 - rank, round));
    }
    EXPECT_NE(it.group.exchanged_transit(0, round), it.group.exchanged_transit(1, round));
  }
}

std::int64_t blocks_of(const Group& group) {
  struct stat status{};
  EXPECT_EQ(::fstat(group.segment().segment().fd(), &status), 0);
  return status.st_blocks;
}

TEST(GroupTest, WhatTwoRanksWriteIsReservedByTheFirst) {
  RankOfGroup two(2);
  RankOfGroup three(3);
  two.group.prepare_transit();
  three.group.prepare_transit();
  EXPECT_EQ(blocks_of(two.group), 2 * blocks_of(three.group));
}

TEST(GroupTest, OthersKeepTheirTransits) {
  Silent announcer;
  const RankOfGroup three(3);
  const RankOfGroup on_two_hosts(2, &announcer);
  for (std::uint64_t round = 0; round < 3 * kTransitSlots; ++round) {
    for (const int rank : {0, 1}) {
      EXPECT_EQ(three.group.exchanged_transit(rank, round), three.group.transit(rank, round));
      EXPECT_EQ(on_two_hosts.group.exchanged_transit(rank, round),
                on_two_hosts.group.transit(rank, round));
    }
  }
}

}  // namespace
}  // namespace pydist::testing
