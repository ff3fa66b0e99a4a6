#include "base/dtype.h"

#include <gtest/gtest.h>

#include <set>
#include <string_view>

namespace pydist {
namespace {

TEST(DTypeTest, EveryTypeHasItsOwnNameAndASize) {
  std::set<std::string_view> names;
  for (int index = 0; index < kDTypeCount; ++index) {
    const auto dtype = static_cast<DType>(index);
    names.insert(to_string(dtype));
    EXPECT_GT(element_size(dtype), 0u) << to_string(dtype);
    EXPECT_LE(element_size(dtype), 16u) << to_string(dtype);
  }
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kDTypeCount));
  EXPECT_EQ(names.count(to_string(static_cast<DType>(kDTypeCount))), 0u);
  EXPECT_EQ(element_size(static_cast<DType>(kDTypeCount)), 0u);
}

TEST(DTypeTest, NamesSayTheSize) {
  // "float32" has 32 bits; bool alone says nothing.
  for (int index = 0; index < kDTypeCount; ++index) {
    const auto dtype = static_cast<DType>(index);
    const std::string_view name = to_string(dtype);
    if (dtype == DType::kBool) {
      EXPECT_EQ(element_size(dtype), 1u);
      continue;
    }
    const auto digits = name.find_first_of("0123456789");
    // float8 goes by the name of its family.
    const auto bits = std::stoul(std::string(name.substr(digits)));
    EXPECT_EQ(element_size(dtype) * 8, bits) << name;
  }
}

TEST(DTypeTest, EveryTypeIsOfOneKind) {
  for (int index = 0; index < kDTypeCount; ++index) {
    const auto dtype = static_cast<DType>(index);
    const int kinds = (is_floating_point(dtype) ? 1 : 0) + (is_complex(dtype) ? 1 : 0) +
                      (is_integral(dtype) ? 1 : 0);
    EXPECT_EQ(kinds, 1) << to_string(dtype);
  }
  EXPECT_TRUE(is_floating_point(DType::kFloat8));
  EXPECT_TRUE(is_integral(DType::kBool));
  EXPECT_FALSE(is_floating_point(DType::kComplex64));
}

}  // namespace
}  // namespace pydist
