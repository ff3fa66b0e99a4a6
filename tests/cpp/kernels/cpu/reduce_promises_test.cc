// What the CPU's reductions promise, by example, and the calls that they refuse.

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/cpu/reduce.h"
#include "kernels/one_rounding.h"
#include "kernels/scalar_reference.h"

namespace pydist {
namespace {

using scalar::divide;
using scalar::encode;
using scalar::kBFloat16Format;

// ---- promises by example ------------------------------------------------------------------

template <typename T>
T reduce_scalars(const Reduction& reduction, const std::vector<T>& values, InstructionSet set) {
  std::vector<const void*> from;
  for (const T& value : values) {
    from.push_back(&value);
  }
  T result{};
  void* const to[] = {&result};
  reduce(reduction, from, to, 1, StoreHint::kCached, set);
  return result;
}

class Promise : public ::testing::TestWithParam<InstructionSet> {};

TEST_P(Promise, InputsAreAddedInTheirOrder) {
  const Reduction sum{.dtype = DType::kFloat32, .op = ReduceOp::kSum};
  EXPECT_EQ(reduce_scalars<float>(sum, {1e8f, -1e8f, 1.0f}, GetParam()), 1.0f);
  EXPECT_EQ(reduce_scalars<float>(sum, {1e8f, 1.0f, -1e8f}, GetParam()), 0.0f);
}

TEST_P(Promise, SixteenBitSumsRoundOnce) {
  const Reduction sum{.dtype = DType::kBFloat16, .op = ReduceOp::kSum};
  // 256 + 1 is a tie in bfloat16 that would go back to 256 each time.
  const std::uint16_t large = encode(256, kBFloat16Format);
  const std::uint16_t one = encode(1, kBFloat16Format);
  EXPECT_EQ(reduce_scalars<std::uint16_t>(sum, {large, one, one, one, one}, GetParam()),
            encode(260, kBFloat16Format));
}

TEST_P(Promise, NothingIsFused) {
  // The product rounds to 1 + 2^-11; fused, its lost 2^-24 would show.
  const float x = 1.0f + 0x1p-12f;
  const std::vector<double> factors = {1.0, x};
  const Reduction reduction{
      .dtype = DType::kFloat32, .op = ReduceOp::kPremulSum, .factors = factors};
  EXPECT_EQ(reduce_scalars<float>(reduction, {-(1.0f + 0x1p-11f), x}, GetParam()), 0.0f);
}

TEST_P(Promise, MeansDivideTruly) {
  // 5 * (1 / 3 as float32) is not 5 / 3 rounded.
  const Reduction mean{.dtype = DType::kFloat32, .op = ReduceOp::kMean, .divisor = 3};
  for (int i = 1; i < 200; ++i) {
    const auto x = static_cast<float>(i);
    EXPECT_EQ(reduce_scalars<float>(mean, {x, 0, 0}, GetParam()), divide(x, 3.0f));
  }
}

TEST_P(Promise, MinimumAndMaximumPropagateNan) {
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    const Reduction reduction{.dtype = DType::kFloat64, .op = op};
    for (std::size_t at = 0; at < 3; ++at) {
      std::vector<double> values = {1, -HUGE_VAL, HUGE_VAL};
      values[at] = -std::nan("77");
      const double result = reduce_scalars<double>(reduction, values, GetParam());
      EXPECT_EQ(std::bit_cast<std::uint64_t>(result), 0x7ff8000000000000u) << at;
    }
  }
}

TEST_P(Promise, NanIsCanonical) {
  const auto payload = std::bit_cast<float>(0xffc12345u);
  const auto signalling = std::bit_cast<float>(0x7f800001u);
  for (const auto& values : std::vector<std::vector<float>>{
           {payload}, {1, payload}, {payload, signalling}, {HUGE_VALF, -HUGE_VALF}}) {
    const float sum =
        reduce_scalars<float>({.dtype = DType::kFloat32, .op = ReduceOp::kSum}, values, GetParam());
    EXPECT_EQ(std::bit_cast<std::uint32_t>(sum), 0x7fc00000u);
  }
}

TEST_P(Promise, ZerosKeepTheirSign) {
  const auto sign = [&](ReduceOp op, float a, float b) {
    return std::signbit(
        reduce_scalars<float>({.dtype = DType::kFloat32, .op = op}, {a, b}, GetParam()));
  };
  EXPECT_TRUE(sign(ReduceOp::kSum, -0.0f, -0.0f));
  EXPECT_FALSE(sign(ReduceOp::kSum, -0.0f, 0.0f));
  EXPECT_TRUE(sign(ReduceOp::kMax, -0.0f, 0.0f));
  EXPECT_FALSE(sign(ReduceOp::kMin, 0.0f, -0.0f));
}

TEST_P(Promise, IntegersWrapAround) {
  const Reduction sum8{.dtype = DType::kInt8, .op = ReduceOp::kSum};
  EXPECT_EQ(reduce_scalars<std::int8_t>(sum8, {127, 1}, GetParam()), -128);
  const Reduction product16{.dtype = DType::kUInt16, .op = ReduceOp::kProd};
  EXPECT_EQ(reduce_scalars<std::uint16_t>(product16, {65535, 65535}, GetParam()), 1);
  const Reduction sum64{.dtype = DType::kInt64, .op = ReduceOp::kSum};
  using Limits = std::numeric_limits<std::int64_t>;
  EXPECT_EQ(reduce_scalars<std::int64_t>(sum64, {Limits::max(), 1}, GetParam()), Limits::min());
}

TEST_P(Promise, AnyByteButZeroIsTrue) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProd, ReduceOp::kBxor}) {
    const Reduction reduction{.dtype = DType::kBool, .op = op};
    EXPECT_EQ(reduce_scalars<std::uint8_t>(reduction, {0x80, 0x7f}, GetParam()),
              op == ReduceOp::kBxor ? 0 : 1);
    EXPECT_EQ(reduce_scalars<std::uint8_t>(reduction, {0xff}, GetParam()), 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Sets, Promise, ::testing::ValuesIn(usable_instruction_sets()),
                         [](const auto& param) { return std::string(to_string(param.param)); });

// ---- calls that make no sense -------------------------------------------------------------

TEST(Reduce, RefusesWhatIsNotDefined) {
  std::array<unsigned char, 16> buffer{};
  const void* const from[] = {buffer.data(), buffer.data()};
  void* const to[] = {buffer.data()};
  int refused = 0;
  for (int dtype_index = 0; dtype_index < kDTypeCount; ++dtype_index) {
    for (int op_index = 0; op_index < kReduceOpCount; ++op_index) {
      const auto dtype = static_cast<DType>(dtype_index);
      const auto op = static_cast<ReduceOp>(op_index);
      if (!is_supported(op, dtype)) {
        EXPECT_THROW(reduce({.dtype = dtype, .op = op}, from, to, 1), InvalidUsage)
            << to_string(op) << " " << to_string(dtype);
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, kReduceOpCount);
}

TEST(Reduce, RefusesMissingBuffersAndFactors) {
  float value = 1;
  const void* const from[] = {&value, &value};
  void* const to[] = {&value};
  const Reduction sum{.dtype = DType::kFloat32, .op = ReduceOp::kSum};
  EXPECT_THROW(reduce(sum, {}, to, 1), InvalidUsage);
  EXPECT_THROW(reduce(sum, from, {}, 1), InvalidUsage);
  const double factor[] = {2.0};
  const Reduction weighted{.dtype = DType::kFloat32, .op = ReduceOp::kPremulSum, .factors = factor};
  EXPECT_THROW(reduce(weighted, from, to, 1), InvalidUsage);
  EXPECT_EQ(value, 1);
}

}  // namespace
}  // namespace pydist
