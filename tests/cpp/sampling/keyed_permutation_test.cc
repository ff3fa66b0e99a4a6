// The shuffled order: a bijection at every length, the same everywhere, and what it refuses. How
// random it is, tests/python/sampling/test_orders.py measures.

#include "sampling/keyed_permutation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "base/error.h"

namespace pydist {
namespace {

std::vector<std::int64_t> places(const KeyedPermutation& permutation, std::uint64_t first,
                                 std::uint64_t step, std::size_t count) {
  std::vector<std::int64_t> out(count);
  permutation.fill(first, step, out);
  return out;
}

TEST(KeyedPermutationTest, HoldsEveryIndexOnce) {
  std::vector<std::uint64_t> lengths(300);
  std::iota(lengths.begin(), lengths.end(), 1U);
  // Around the end of the table, squares and their neighbours, which fill the grid to different
  // degrees, and a prime.
  for (const std::uint64_t length :
       {4095U, 4096U, 4097U, 4160U, 4161U, 65535U, 65536U, 65537U, 99991U, 1000000U}) {
    lengths.push_back(length);
  }
  for (const std::uint64_t length : lengths) {
    std::vector<std::int64_t> all = places(KeyedPermutation(length, 3, 1), 0, 1, length);
    std::sort(all.begin(), all.end());
    for (std::size_t i = 0; i < length; ++i) {
      ASSERT_EQ(all[i], static_cast<std::int64_t>(i)) << "of " << length;
    }
  }
}

// Checkpoints rely on these: they must not change, nor differ between platforms.
TEST(KeyedPermutationTest, IsTheSameEverywhere) {
  struct Pinned {
    std::uint64_t length;
    std::uint64_t seed;
    std::uint64_t epoch;
    std::vector<std::int64_t> front;
    std::int64_t last;
  };
  const std::vector<Pinned> all{
      {5, 0, 0, {0, 2, 4, 1, 3}, 3},
      {5, 0, 1, {1, 0, 3, 2, 4}, 4},
      {5, 1, 0, {3, 4, 1, 0, 2}, 2},
      {4096, 7, 3, {2901, 453, 3191, 1327, 2345}, 629},
      {4097, 0, 0, {3348, 568, 2308, 553, 507}, 2188},
      {1000000, 0, 0, {999768, 469224, 668255, 593883, 626008}, 666912},
      {1000000, 1, 0, {613058, 453172, 249458, 231280, 512725}, 724936},
      {1000000000000,
       UINT64_MAX,
       5,
       {677121581586, 682624734450, 615964810097, 61002118598, 570997203654},
       852562358580},
      {KeyedPermutation::kMaxLength,
       0,
       0,
       {7230153497682657603, 3416923369989062209, 7354234855013054719, 574660044324700063,
        6875041953870216402},
       789579278640526078},
  };
  for (const Pinned& pinned : all) {
    const KeyedPermutation permutation(pinned.length, pinned.seed, pinned.epoch);
    EXPECT_EQ(places(permutation, 0, 1, pinned.front.size()), pinned.front);
    EXPECT_EQ(static_cast<std::int64_t>(permutation.at(pinned.length - 1)), pinned.last);
  }
}

TEST(KeyedPermutationTest, FillsWhatStandsAtEachPlace) {
  for (const std::uint64_t length : {std::uint64_t{1000}, std::uint64_t{5000},
                                     std::uint64_t{1} << 40U, KeyedPermutation::kMaxLength}) {
    const KeyedPermutation permutation(length, 11, 2);
    for (const std::uint64_t step :
         {std::uint64_t{1}, std::uint64_t{3}, std::uint64_t{64}, length / 20, length / 16 - 1}) {
      for (const std::size_t count : {1U, 7U, 8U, 9U, 16U}) {
        for (const std::uint64_t first : {std::uint64_t{0}, length - 1 - step * (count - 1)}) {
          const std::vector<std::int64_t> filled = places(permutation, first, step, count);
          for (std::size_t i = 0; i < count; ++i) {
            const std::uint64_t expected = permutation.at(first + i * step);
            ASSERT_LT(expected, length);
            ASSERT_EQ(static_cast<std::uint64_t>(filled[i]), expected)
                << length << " " << first << " " << step << " " << i;
          }
        }
      }
    }
  }
}

TEST(KeyedPermutationTest, RefusesWhatIsNotThere) {
  EXPECT_THROW(KeyedPermutation(0, 0, 0), InvalidUsage);
  EXPECT_THROW(KeyedPermutation(KeyedPermutation::kMaxLength + 1, 0, 0), InvalidUsage);
  for (const std::uint64_t length : {std::uint64_t{10}, std::uint64_t{5000}}) {
    const KeyedPermutation permutation(length, 0, 0);
    EXPECT_NO_THROW((void)places(permutation, length, 1, 0));
    EXPECT_NO_THROW((void)places(permutation, length - 1, 1, 1));
    EXPECT_THROW((void)places(permutation, length, 1, 1), InvalidUsage);
    EXPECT_THROW((void)places(permutation, length - 1, 1, 2), InvalidUsage);
    // A sum that does not fit into 64 bits is no way round.
    EXPECT_THROW((void)places(permutation, 1, UINT64_MAX, 2), InvalidUsage);
  }
}

}  // namespace
}  // namespace pydist
