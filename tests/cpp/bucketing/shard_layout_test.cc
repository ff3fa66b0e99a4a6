#include "bucketing/shard_layout.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace pydist {
namespace {

using Counts = std::vector<std::size_t>;

// Every element of every slot is in exactly one shard, where the bucket has it.
void expect_exact(const Counts& counts, std::size_t element_bytes, int ranks) {
  const ShardLayout layout(counts, element_bytes, ranks);
  const std::size_t alignment = kShardAlignmentBytes / element_bytes;
  ASSERT_EQ(layout.offsets().size(), counts.size());
  ASSERT_EQ(layout.count(), layout.shard() * static_cast<std::size_t>(ranks));
  EXPECT_EQ(layout.shard() % alignment, 0U);
  std::size_t last_end = 0;
  for (std::size_t slot = 0; slot < counts.size(); ++slot) {
    EXPECT_EQ(layout.offsets()[slot] % alignment, 0U);
    EXPECT_GE(layout.offsets()[slot], last_end);
    last_end = layout.offsets()[slot] + counts[slot];
  }
  EXPECT_LE(last_end, layout.count());
  Counts covered(counts.size(), 0);
  for (int rank = 0; rank < ranks; ++rank) {
    for (const ShardSegment& segment : layout.segments(rank)) {
      EXPECT_EQ(segment.begin, covered[segment.slot]);  // in order, without gaps
      EXPECT_EQ(segment.begin % alignment, 0U);
      EXPECT_GT(segment.count, 0U);
      EXPECT_LE(segment.offset + segment.count, layout.shard());
      EXPECT_EQ(layout.shard() * static_cast<std::size_t>(rank) + segment.offset,
                layout.offsets()[segment.slot] + segment.begin);
      covered[segment.slot] += segment.count;
    }
  }
  EXPECT_EQ(covered, counts);
}

TEST(ShardLayout, CoversEveryElementOnce) {
  for (const std::size_t element_bytes : {1U, 2U, 4U, 8U}) {
    for (const int ranks : {1, 2, 3, 4, 8, 17}) {
      for (const Counts& counts : {Counts{}, Counts{0}, Counts{1}, Counts{0, 5, 0}, Counts{1, 1, 1},
                                   Counts{1000}, Counts{32, 32}, Counts{33, 31, 4096, 7}}) {
        expect_exact(counts, element_bytes, ranks);
      }
    }
  }
  std::mt19937 random(7);
  for (int i = 0; i < 300; ++i) {
    Counts counts(random() % 9);
    for (std::size_t& count : counts) {
      count = random() % (i % 2 == 0 ? 40 : 4000);
    }
    expect_exact(counts, std::size_t{1} << (random() % 4), 1 + static_cast<int>(random() % 9));
  }
}

TEST(ShardLayout, PadsByLessThanOneAlignmentForEachSlotAndRank) {
  const ShardLayout layout({1000000, 3, 500}, 4, 8);
  EXPECT_LE(layout.count(), 1000503U + (3U + 8U) * 32U);
}

TEST(ShardLayout, KeepsFixedBucketsTogether) {
  // In the order of their last slots.
  EXPECT_EQ(with_fixed_buckets({{0, 1}, {2, 3}, {4}}, {{4, 0}, {2, 1}}),
            (BucketPlan{{2, 1}, {3}, {4, 0}}));
  EXPECT_EQ(with_fixed_buckets({{3}, {2}, {1, 0}}, {}), (BucketPlan{{3}, {2}, {1, 0}}));
  EXPECT_EQ(with_fixed_buckets({}, {}), BucketPlan{});
  EXPECT_EQ(with_fixed_buckets({{0}, {1}}, {{1}, {0}}), (BucketPlan{{0}, {1}}));
}

}  // namespace
}  // namespace pydist
