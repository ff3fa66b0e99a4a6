#include "base/reduce_op.h"

#include <gtest/gtest.h>

#include <set>
#include <string_view>

namespace pydist {
namespace {

TEST(ReduceOpTest, EveryOpHasItsOwnName) {
  std::set<std::string_view> names;
  for (int index = 0; index < kReduceOpCount; ++index) {
    names.insert(to_string(static_cast<ReduceOp>(index)));
  }
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kReduceOpCount));
}

TEST(ReduceOpTest, WhatIsDefinedForWhat) {
  for (int index = 0; index < kDTypeCount; ++index) {
    const auto dtype = static_cast<DType>(index);
    const bool moves_only = dtype == DType::kFloat8;
    const bool inexact = is_floating_point(dtype) || is_complex(dtype);
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProd}) {
      EXPECT_EQ(is_supported(op, dtype), !moves_only) << to_string(op) << to_string(dtype);
    }
    for (const ReduceOp op : {ReduceOp::kMean, ReduceOp::kPremulSum}) {
      EXPECT_EQ(is_supported(op, dtype), inexact && !moves_only)
          << to_string(op) << to_string(dtype);
    }
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      EXPECT_EQ(is_supported(op, dtype), !is_complex(dtype) && !moves_only)
          << to_string(op) << to_string(dtype);
    }
    for (const ReduceOp op : {ReduceOp::kBand, ReduceOp::kBor, ReduceOp::kBxor}) {
      EXPECT_EQ(is_supported(op, dtype), !inexact) << to_string(op) << to_string(dtype);
    }
  }
}

}  // namespace
}  // namespace pydist
