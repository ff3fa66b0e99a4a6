#include "collectives/slices.h"

#include <gtest/gtest.h>

#include <vector>

namespace pydist {
namespace {

constexpr std::size_t kLineBytes = 64;

void check(std::size_t count, int size, std::size_t element_bytes) {
  const Slices slices(count, size, element_bytes);
  ASSERT_EQ(slices.count(), count);
  std::size_t end = 0;
  std::size_t largest = 0;
  bool has_ended = false;
  for (int rank = 0; rank < size; ++rank) {
    const Slice slice = slices[rank];
    ASSERT_EQ(slice.begin, end) << "a gap or an overlap before rank " << rank;
    if (slice.count != 0) {
      ASSERT_FALSE(has_ended) << "an empty slice before a full one";
      ASSERT_EQ(slice.begin * element_bytes % kLineBytes, 0u) << "two ranks write to one line";
    }
    has_ended = has_ended || slice.count == 0;
    end += slice.count;
    largest = std::max(largest, slice.count);
  }
  ASSERT_EQ(end, count);
  // As equal as whole lines allow: nobody has more lines than the even share, rounded up.
  const std::size_t per_line = kLineBytes / element_bytes;
  const std::size_t lines = (count + per_line - 1) / per_line;
  const std::size_t share =
      (lines + static_cast<std::size_t>(size) - 1) / static_cast<std::size_t>(size);
  ASSERT_LE(largest, share * per_line);
}

TEST(SlicesTest, CoverEverythingOnceInOrder) {
  for (const std::size_t element_bytes : {1u, 2u, 4u, 8u, 16u}) {
    for (int size = 1; size <= 17; ++size) {
      for (std::size_t count = 0; count <= 700; ++count) {
        check(count, size, element_bytes);
        if (::testing::Test::HasFatalFailure()) {
          FAIL() << count << " elements of " << element_bytes << " bytes, " << size << " ranks";
        }
      }
    }
  }
}

TEST(SlicesTest, LargeBuffersToo) {
  for (const int size : {1, 2, 3, 7, 64}) {
    for (const std::size_t count :
         {std::size_t{1} << 20, (std::size_t{1} << 33) + 1, (std::size_t{1} << 40) - 1}) {
      check(count, size, 4);
    }
  }
}

TEST(SlicesTest, FewerElementsThanRanks) {
  const Slices slices(3, 8, 4);
  EXPECT_EQ(slices[0].count, 3u);
  for (int rank = 1; rank < 8; ++rank) {
    EXPECT_EQ(slices[rank].count, 0u);
    EXPECT_EQ(slices[rank].begin, 3u);
  }
}

}  // namespace
}  // namespace pydist
