#include "topology/packed_rows.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"

namespace pydist {
namespace {

TEST(PackedRowsTest, RowsComeBack) {
  const std::string zero("a\0b", 3);
  const std::string bytes("\xff\x80\x7f", 3);
  const std::vector<std::vector<Row>> tables = {
      {},
      {{""}},
      {{""}, {""}, {""}},
      {{"same", "a"}, {"same", "b"}, {"sam", ""}, {"samely", bytes}},
      {{zero, bytes}, {zero + "c", bytes + bytes}, {"", zero}},
      {{std::string(100'000, 'x')}, {std::string(99'999, 'x') + "y"}, {"x"}},
  };
  for (const std::vector<Row>& rows : tables) {
    EXPECT_EQ(unpack_rows(pack_rows(rows)), rows);
  }
}

TEST(PackedRowsTest, RandomRowsComeBack) {
  std::mt19937 random(1);
  const auto below = [&random](std::size_t end) { return random() % end; };
  for (int round = 0; round < 200; ++round) {
    const std::size_t columns = 1 + below(4);
    std::vector<Row> rows(below(8), Row(columns));
    for (Row& row : rows) {
      for (std::string& each : row) {
        each.assign(below(300), "ab"[below(2)]);
        each.append(below(3), static_cast<char>(below(256)));
      }
    }
    EXPECT_EQ(unpack_rows(pack_rows(rows)), rows);
  }
}

TEST(PackedRowsTest, OnlyWhatDiffersCosts) {
  const std::string common(500, 'c');
  std::vector<Row> rows;
  for (char last = 'a'; last <= 'z'; ++last) {
    rows.push_back({common, common + last});
  }
  const std::size_t first = pack_rows({rows[0]}).size();
  // Two bytes for a length of 500, one for what is left, and the letter.
  EXPECT_EQ(pack_rows(rows).size(), first + (rows.size() - 1) * (3 + 3 + 1));
}

TEST(PackedRowsTest, TornTextsAreRefused) {
  const std::string whole = pack_rows({{"first", "second"}, {"first", "seconds"}});
  for (std::size_t length = 1; length < whole.size(); ++length) {
    // A text that ends after a row is one with fewer rows.
    if (length != 1 && length != pack_rows({{"first", "second"}}).size()) {
      EXPECT_THROW(static_cast<void>(unpack_rows(whole.substr(0, length))), std::exception)
          << length;
    }
  }
  const std::vector<std::string> forged = {
      std::string(1, '\0'),                            // no columns
      "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",  // a number without an end
      std::string("\1\5\0", 3),                        // shares more than there is above
      std::string("\1\0\5ab", 5),                      // longer than the text
  };
  for (const std::string& text : forged) {
    EXPECT_THROW(static_cast<void>(unpack_rows(text)), std::exception);
  }
}

}  // namespace
}  // namespace pydist
