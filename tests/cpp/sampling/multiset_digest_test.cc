#include "sampling/multiset_digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

namespace pydist {
namespace {

using Words = std::pair<std::uint64_t, std::uint64_t>;

Words digest(const std::vector<std::int64_t>& indices) {
  MultisetDigest all;
  all.add(indices);
  return {all.high, all.low};
}

TEST(MultisetDigestTest, DependsOnWhatIsThereAlone) {
  std::vector<std::int64_t> indices(1000);
  std::iota(indices.begin(), indices.end(), 0);
  const Words whole = digest(indices);
  std::reverse(indices.begin(), indices.end());
  EXPECT_EQ(digest(indices), whole);
  MultisetDigest parts;
  parts.add(std::span(indices).first(377));
  parts.add({});
  parts.add(std::span(indices).subspan(377));
  EXPECT_EQ(Words(parts.high, parts.low), whole);
}

TEST(MultisetDigestTest, TellsLossesRepetitionsAndSwapsApart) {
  std::set<Words> seen;
  const auto is_new = [&](const std::vector<std::int64_t>& indices) {
    return seen.insert(digest(indices)).second;
  };
  // Every multiset of at most four out of seven indices: small differences, the likeliest mistakes.
  std::vector<std::vector<std::int64_t>> all{{}};
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::vector<std::int64_t> chosen = all[i];
    EXPECT_TRUE(is_new(chosen));
    for (std::int64_t next = chosen.empty() ? 0 : chosen.back(); chosen.size() < 4 && next < 7;
         ++next) {
      all.push_back(chosen);
      all.back().push_back(next);
    }
  }
  EXPECT_EQ(all.size(), 330U);
}

// Ledgers in files can be compared with later ones.
TEST(MultisetDigestTest, IsTheSameEverywhere) {
  EXPECT_EQ(digest({}), Words(0, 0));
  EXPECT_EQ(digest({0, 1, 2}), Words(0xd940b1a8cc0397c9, 0x973a0d732d69338b));
  EXPECT_EQ(digest({INT64_MAX}), Words(0xe17b9d0094d7eeae, 0xc0cac7eea584a5a5));
}

}  // namespace
}  // namespace pydist
