#include "collectives/between_hosts/segments.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <random>
#include <vector>

namespace pydist::testing {
namespace {

void expect_tiles(const Cut& cut, std::size_t count, std::size_t element_bytes) {
  std::vector<std::byte> memory(count * element_bytes + 1);
  std::byte* const data = memory.data();
  const Block block{data, count};
  std::size_t end = 0;
  for (std::size_t index = 0; index < cut.parts_in(count); ++index) {
    const Block part = cut.part_of(block, index, element_bytes);
    ASSERT_EQ(part.data, data + end * element_bytes) << count;
    ASSERT_GT(part.count, 0u) << count;
    ASSERT_LE(part.count, cut.longest()) << count;
    end += part.count;
  }
  ASSERT_EQ(end, count);
  ASSERT_EQ(cut.part_of(block, cut.parts_in(count), element_bytes).count, 0u);
}

TEST(CutTest, PartsTileABlockAndFitASlot) {
  std::mt19937 random(5);
  for (const std::size_t slot_bytes :
       {std::size_t{16}, std::size_t{85}, std::size_t{256}, std::size_t{4} << 10,
        std::size_t{100} << 10, std::size_t{272} << 10, std::size_t{544} << 10}) {
    for (const std::size_t element_bytes : {1, 2, 4, 8, 16}) {
      const Cut cut(slot_bytes, element_bytes);
      const std::size_t most = 5 * cut.longest() + 2;
      for (const std::size_t count :
           {std::size_t{0}, std::size_t{1}, cut.longest() - 1, cut.longest(), cut.longest() + 1,
            2 * cut.longest(), most, random() % most, random() % most}) {
        expect_tiles(cut, count, element_bytes);
      }
    }
  }
}

TEST(CutTest, PartsEndWhereAPacketIsFull) {
  const Cut whole(std::size_t{544} << 10, /*element_bytes=*/4);
  EXPECT_EQ(whole.parts_in(std::size_t{512} << 8), 1u);  // 512 KiB need no second part
  const Block part = whole.part_of({nullptr, 1'000'000}, 0, 4);
  EXPECT_LE(part.count * 4 + 40, 8u * 45 * 1448);
  EXPECT_GT(part.count * 4 + 40 + 64, 8u * 45 * 1448);
}

}  // namespace
}  // namespace pydist::testing
