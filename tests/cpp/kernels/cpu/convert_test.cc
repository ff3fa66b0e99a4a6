// Every 16-bit value and a dense sample of float32 values, on every instruction set, against
// scalar references that share nothing with the kernels.

#include "kernels/cpu/convert.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "kernels/cpu/instruction_set.h"

namespace pydist {
namespace {

struct Format {
  DType dtype;
  int mantissa_bits;
  int exponent_bits;

  [[nodiscard]] int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  [[nodiscard]] std::uint16_t infinity() const {
    return static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
  }
  [[nodiscard]] std::uint16_t quiet_nan() const {
    return static_cast<std::uint16_t>(infinity() | (1 << (mantissa_bits - 1)));
  }
};
constexpr Format kFloat16{DType::kFloat16, 10, 5};
constexpr Format kBFloat16{DType::kBFloat16, 7, 8};

double magnitude_of(int bits, const Format& format) {
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int exponent = bits >> format.mantissa_bits;
  return exponent == 0 ? std::ldexp(mantissa, 1 - format.bias() - format.mantissa_bits)
                       : std::ldexp(mantissa + (1 << format.mantissa_bits),
                                    exponent - format.bias() - format.mantissa_bits);
}

std::uint32_t widened_bits(std::uint16_t half, const Format& format) {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint16_t bits = half & 0x7fff;
  if (bits > format.infinity()) {
    return 0x7fc00000u;
  }
  if (bits == format.infinity()) {
    return sign | 0x7f800000u;
  }
  return sign | std::bit_cast<std::uint32_t>(static_cast<float>(magnitude_of(bits, format)));
}

// By definition: the nearest of the two neighbours that a search finds, the even one of a tie.
std::uint16_t narrowed_bits(std::uint32_t bits, const Format& format) {
  const auto value = std::bit_cast<float>(bits);
  if (std::isnan(value)) {
    return format.quiet_nan();
  }
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const double magnitude = std::fabs(static_cast<double>(value));
  // As if the exponents went on: what would have been the next value decides about infinity.
  int low = 0;
  int high = format.infinity();
  if (magnitude >= magnitude_of(high, format)) {
    return sign | format.infinity();
  }
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (magnitude_of(middle, format) <= magnitude ? low : high) = middle;
  }
  const double to_low = magnitude - magnitude_of(low, format);
  const double to_high = magnitude_of(high, format) - magnitude;
  const bool up = to_high < to_low || (to_high == to_low && low % 2 == 1);
  return static_cast<std::uint16_t>(sign | (up ? high : low));
}

class Conversion : public ::testing::TestWithParam<std::tuple<InstructionSet, DType>> {
 protected:
  [[nodiscard]] const kernels::KernelSet& set() const {
    return kernels::kernel_set(std::get<0>(GetParam()));
  }
  [[nodiscard]] const Format& format() const {
    return std::get<1>(GetParam()) == DType::kFloat16 ? kFloat16 : kBFloat16;
  }

  void expect_narrowed(const std::vector<std::uint32_t>& inputs) const {
    std::vector<float> from(inputs.size());
    std::transform(inputs.begin(), inputs.end(), from.begin(),
                   [](std::uint32_t bits) { return std::bit_cast<float>(bits); });
    std::vector<std::uint16_t> to(inputs.size());
    set().narrow(format().dtype, from.data(), to.data(), from.size());
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      ASSERT_EQ(to[i], narrowed_bits(inputs[i], format())) << std::hex << "of bits " << inputs[i];
    }
  }
};

TEST_P(Conversion, WidensEveryValue) {
  std::vector<std::uint16_t> from(1 << 16);
  for (std::size_t i = 0; i < from.size(); ++i) {
    from[i] = static_cast<std::uint16_t>(i);
  }
  std::vector<float> to(from.size());
  set().widen(format().dtype, from.data(), to.data(), from.size());
  for (std::size_t i = 0; i < from.size(); ++i) {
    ASSERT_EQ(std::bit_cast<std::uint32_t>(to[i]), widened_bits(from[i], format()))
        << std::hex << i;
  }
}

TEST_P(Conversion, ComesBackFromEveryValue) {
  std::vector<std::uint16_t> from(1 << 16);
  for (std::size_t i = 0; i < from.size(); ++i) {
    from[i] = static_cast<std::uint16_t>(i);
  }
  std::vector<float> wide(from.size());
  std::vector<std::uint16_t> back(from.size());
  set().widen(format().dtype, from.data(), wide.data(), from.size());
  set().narrow(format().dtype, wide.data(), back.data(), from.size());
  for (std::size_t i = 0; i < from.size(); ++i) {
    const bool is_nan = (from[i] & 0x7fff) > format().infinity();
    ASSERT_EQ(back[i], is_nan ? format().quiet_nan() : from[i]) << std::hex << i;
  }
}

// Every boundary between two neighbours: the tie itself and the float32 values around it.
TEST_P(Conversion, RoundsEveryTie) {
  std::vector<std::uint32_t> inputs;
  for (int bits = 0; bits < format().infinity(); ++bits) {
    const double tie = (magnitude_of(bits, format()) + magnitude_of(bits + 1, format())) / 2;
    const auto middle = std::bit_cast<std::uint32_t>(static_cast<float>(tie));
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      for (const std::uint32_t value : {middle - 1, middle, middle + 1}) {
        inputs.push_back(sign | value);
      }
    }
  }
  expect_narrowed(inputs);
}

TEST_P(Conversion, NarrowsEveryExponentWithEveryUpperMantissa) {
  std::vector<std::uint32_t> inputs;
  for (std::uint32_t upper = 0; upper < 1u << 16; ++upper) {
    for (const std::uint32_t lower : {0u, 1u, 0x0fffu, 0x1000u, 0x7fffu, 0x8000u, 0xffffu}) {
      inputs.push_back(upper << 16 | lower);
    }
  }
  expect_narrowed(inputs);
}

TEST_P(Conversion, NarrowsAnyBits) {
  // An odd step visits bit patterns all over the range.
  std::vector<std::uint32_t> inputs;
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += 20011) {
    inputs.push_back(static_cast<std::uint32_t>(bits));
  }
  expect_narrowed(inputs);
}

TEST_P(Conversion, EveryCountAtAnyAlignmentWritesThatMuch) {
  for (std::size_t count = 0; count <= 133; ++count) {
    for (const std::size_t skew : {0, 1, 7}) {
      std::vector<std::uint16_t> half(count + 64, 0xa5a5);
      std::vector<float> wide(count + 64, -77.0f);
      for (std::size_t i = 0; i < count; ++i) {
        half[skew + i] = static_cast<std::uint16_t>(0x3c00 + i);
      }
      set().widen(format().dtype, half.data() + skew, wide.data() + skew + 1, count);
      for (std::size_t i = 0; i < wide.size(); ++i) {
        const bool inside = i >= skew + 1 && i < skew + 1 + count;
        const auto expected =
            inside ? widened_bits(half[i - 1], format()) : std::bit_cast<std::uint32_t>(-77.0f);
        ASSERT_EQ(std::bit_cast<std::uint32_t>(wide[i]), expected) << count << " " << i;
      }
      std::vector<std::uint16_t> back(count + 64, 0xa5a5);
      set().narrow(format().dtype, wide.data() + skew + 1, back.data() + skew, count);
      ASSERT_EQ(back, half) << count << " " << skew;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sets, Conversion,
                         ::testing::Combine(::testing::ValuesIn(usable_instruction_sets()),
                                            ::testing::Values(DType::kFloat16, DType::kBFloat16)),
                         [](const auto& param) {
                           return join(to_string(std::get<0>(param.param)), "_",
                                       to_string(std::get<1>(param.param)));
                         });

TEST(ConvertCpu, TheChosenSetIsUsed) {
  const std::vector<std::uint16_t> from = {0x3f80, 0xc000, 0x7fff, 0x0001, 0x8000};
  std::vector<float> to(from.size());
  widen_to_float32(DType::kBFloat16, from.data(), to.data(), from.size());
  std::vector<std::uint16_t> back(from.size());
  narrow_from_float32(DType::kBFloat16, to.data(), back.data(), to.size());
  EXPECT_EQ(to[0], 1.0f);
  EXPECT_EQ(to[1], -2.0f);
  EXPECT_EQ(back, (std::vector<std::uint16_t>{0x3f80, 0xc000, 0x7fc0, 0x0001, 0x8000}));
}

TEST(ConvertCpu, ZeroElementsNeedNoBuffers) {
  widen_to_float32(DType::kFloat16, nullptr, nullptr, 0);
  narrow_from_float32(DType::kBFloat16, nullptr, nullptr, 0);
}

TEST(ConvertCpu, OtherTypesAreRefused) {
  float value = 1;
  for (int index = 0; index < kDTypeCount; ++index) {
    const auto dtype = static_cast<DType>(index);
    if (dtype != DType::kFloat16 && dtype != DType::kBFloat16) {
      double buffer = 0;
      EXPECT_THROW(widen_to_float32(dtype, &buffer, &value, 1), Error) << to_string(dtype);
      EXPECT_THROW(narrow_from_float32(dtype, &value, &buffer, 1), Error) << to_string(dtype);
      EXPECT_EQ(buffer, 0) << to_string(dtype);
    }
  }
}

}  // namespace
}  // namespace pydist
