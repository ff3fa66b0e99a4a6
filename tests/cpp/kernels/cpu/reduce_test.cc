// Every kernel against a scalar reference, and every instruction set against it bit for bit.

#include "kernels/cpu/reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "kernels/one_rounding.h"
#include "kernels/scalar_reference.h"
#include "ranks.h"

namespace pydist {
namespace {

using scalar::add;
using scalar::Bytes;
using scalar::decode;
using scalar::divide;
using scalar::encode;
using scalar::HalfFormat;
using scalar::kBFloat16Format;
using scalar::kFloat16Format;
using scalar::read;
using scalar::reference;
using scalar::write;

// ---- values -------------------------------------------------------------------------------

// Numbers of ordinary size mixed with any bit pattern and with the awkward ones.
template <typename T, typename Unsigned>
void fill_float(Bytes& bytes, std::mt19937_64& random) {
  using Limits = std::numeric_limits<T>;
  const std::array<T, 14> awkward = {T{0},
                                     -T{0},
                                     Limits::infinity(),
                                     -Limits::infinity(),
                                     Limits::quiet_NaN(),
                                     Limits::max(),
                                     Limits::lowest(),
                                     Limits::min(),
                                     -Limits::min(),
                                     Limits::denorm_min(),
                                     -Limits::denorm_min(),
                                     std::bit_cast<T>(static_cast<Unsigned>(~Unsigned{0})),
                                     T{1},
                                     T{-1}};
  std::normal_distribution<T> ordinary(0, 10);
  for (std::size_t at = 0; at + sizeof(T) <= bytes.size(); at += sizeof(T)) {
    const auto kind = random() % 16;
    if (kind == 0) {
      write(&bytes[at], awkward[random() % awkward.size()]);
    } else if (kind == 1) {
      write(&bytes[at], static_cast<Unsigned>(random()));
    } else {
      write(&bytes[at], ordinary(random));
    }
  }
}

Bytes random_values(DType dtype, std::size_t count, std::mt19937_64& random) {
  Bytes bytes(count * element_size(dtype));
  switch (dtype) {
    case DType::kFloat32:
    case DType::kComplex64:
      fill_float<float, std::uint32_t>(bytes, random);
      return bytes;
    case DType::kFloat64:
    case DType::kComplex128:
      fill_float<double, std::uint64_t>(bytes, random);
      return bytes;
    case DType::kFloat16:
    case DType::kBFloat16: {
      const HalfFormat format = dtype == DType::kFloat16 ? kFloat16Format : kBFloat16Format;
      std::normal_distribution<float> ordinary(0, 10);
      for (std::size_t at = 0; at < bytes.size(); at += 2) {
        write(&bytes[at], random() % 8 == 0 ? static_cast<std::uint16_t>(random())
                                            : encode(ordinary(random), format));
      }
      return bytes;
    }
    default:
      for (unsigned char& byte : bytes) {
        // Plenty of zeros for the sake of bool.
        byte = random() % 4 == 0 ? 0 : static_cast<unsigned char>(random());
      }
      return bytes;
  }
}

// ---- layouts ------------------------------------------------------------------------------

// A buffer at `skew` bytes past a multiple of 64, between two guards.
class Guarded {
 public:
  Guarded(std::size_t bytes, std::size_t skew)
      : bytes_(bytes), storage_(bytes + 2 * kGuardBytes + 128, kGuard) {
    const auto base = reinterpret_cast<std::uintptr_t>(storage_.data()) + kGuardBytes;
    offset_ = kGuardBytes + (64 - base % 64) % 64 + skew;
  }

  [[nodiscard]] unsigned char* data() { return storage_.data() + offset_; }

  [[nodiscard]] bool guards_intact() const {
    const auto untouched = [](unsigned char byte) { return byte == kGuard; };
    const auto begin = storage_.begin() + static_cast<std::ptrdiff_t>(offset_);
    return std::all_of(storage_.begin(), begin, untouched) &&
           std::all_of(begin + static_cast<std::ptrdiff_t>(bytes_), storage_.end(), untouched);
  }

 private:
  static constexpr std::size_t kGuardBytes = 192;
  static constexpr unsigned char kGuard = 0xa5;
  std::size_t bytes_;
  std::size_t offset_ = 0;
  Bytes storage_;
};

struct Layout {
  const char* name;
  bool aligned;
  std::size_t fresh_outputs;
  enum class InPlace { kNone, kFirst, kLast, kAll } in_place;
};

constexpr Layout kLayouts[] = {
    {"aligned", true, 1, Layout::InPlace::kNone},
    {"misaligned", false, 1, Layout::InPlace::kNone},
    {"two outputs", true, 2, Layout::InPlace::kNone},
    {"three misaligned outputs", false, 3, Layout::InPlace::kNone},
    {"in place, misaligned", false, 0, Layout::InPlace::kLast},
    {"one fresh output, one in place", true, 1, Layout::InPlace::kFirst},
    {"symmetric", true, 0, Layout::InPlace::kAll},
    {"symmetric, misaligned, and one fresh output", false, 1, Layout::InPlace::kAll},
};

void check_layout(InstructionSet set, const Reduction& reduction, const std::vector<Bytes>& inputs,
                  const Bytes& expected, std::size_t count, const Layout& layout, StoreHint hint) {
  const std::size_t size = element_size(reduction.dtype);
  const std::size_t bytes = count * size;
  // Complex elements need the alignment of their parts alone.
  const std::size_t step = is_complex(reduction.dtype) ? size / 2 : size;
  std::vector<Guarded> sources, fresh;
  std::vector<const void*> from;
  std::vector<void*> to;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    sources.emplace_back(bytes, layout.aligned ? 0 : (2 * i + 1) * step % 64);
  }
  for (std::size_t k = 0; k < layout.fresh_outputs; ++k) {
    fresh.emplace_back(bytes, layout.aligned ? 0 : (4 * k + 3) * step % 64);
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    std::copy_n(inputs[i].data(), bytes, sources[i].data());
    from.push_back(sources[i].data());
    if (layout.in_place == Layout::InPlace::kAll ||
        (layout.in_place == Layout::InPlace::kFirst && i == 0) ||
        (layout.in_place == Layout::InPlace::kLast && i + 1 == inputs.size())) {
      to.push_back(sources[i].data());
    }
  }
  for (Guarded& output : fresh) {
    to.push_back(output.data());
  }

  reduce(reduction, from, to, count, hint, set);

  const auto where = [&] {
    return join(to_string(set), " ", to_string(reduction.dtype), " ", to_string(reduction.op), ", ",
                inputs.size(), " inputs, ", count, " elements, ", layout.name,
                hint == StoreHint::kStreaming ? ", streaming" : ", cached");
  };
  for (const void* output : to) {
    if (std::memcmp(output, expected.data(), bytes) != 0) {
      const auto* got = static_cast<const unsigned char*>(output);
      const auto differs = std::mismatch(got, got + bytes, expected.begin()).first - got;
      FAIL() << where() << ": element " << static_cast<std::size_t>(differs) / size << " differs";
    }
  }
  for (std::size_t i = 0; i < sources.size(); ++i) {
    ASSERT_TRUE(sources[i].guards_intact()) << where();
    if (std::find(to.begin(), to.end(), from[i]) == to.end()) {
      ASSERT_EQ(std::memcmp(from[i], inputs[i].data(), bytes), 0) << where() << ": input changed";
    }
  }
  for (const Guarded& output : fresh) {
    ASSERT_TRUE(output.guards_intact()) << where();
  }
}

// ---- every kernel -------------------------------------------------------------------------

class EveryKernel : public ::testing::TestWithParam<DType> {};

TEST_P(EveryKernel, MatchesTheReferenceBitForBit) {
  constexpr std::array<std::size_t, 15> kCounts = {0,  1,  2,  3,   7,    15,   16,  17,
                                                   31, 33, 64, 100, 1023, 1500, 4097};
  const DType dtype = GetParam();
  std::mt19937_64 random(17);
  // A sanitizer looks at every seventh combination. There are 240 of one reduction and instruction
  // set, so that the next ones look at others.
  constexpr int kEvery = testing::kSlowdown == 1 ? 1 : 7;
  int turn = 0;
  for (int op_index = 0; op_index < kReduceOpCount; ++op_index) {
    const auto op = static_cast<ReduceOp>(op_index);
    if (!is_supported(op, dtype)) {
      continue;
    }
    for (const std::size_t n : {1, 2, 3, 5, 8}) {
      std::vector<Bytes> inputs;
      std::vector<double> factors;
      for (std::size_t i = 0; i < n; ++i) {
        inputs.push_back(random_values(dtype, kCounts.back(), random));
        factors.push_back(0.1 + static_cast<double>(i) / 3);
      }
      const Reduction reduction{
          .dtype = dtype, .op = op, .divisor = static_cast<double>(n), .factors = factors};
      const Bytes expected = reference(reduction, inputs, kCounts.back());
      for (const InstructionSet set : usable_instruction_sets()) {
        for (const std::size_t count : kCounts) {
          for (const Layout& layout : kLayouts) {
            for (const StoreHint hint : {StoreHint::kCached, StoreHint::kStreaming}) {
              if (++turn % kEvery != 0) {
                continue;
              }
              check_layout(set, reduction, inputs, expected, count, layout, hint);
              if (HasFatalFailure()) {
                return;
              }
            }
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, EveryKernel,
                         ::testing::Values(DType::kFloat64, DType::kFloat32, DType::kFloat16,
                                           DType::kBFloat16, DType::kInt8, DType::kInt16,
                                           DType::kInt32, DType::kInt64, DType::kUInt8,
                                           DType::kUInt16, DType::kUInt32, DType::kUInt64,
                                           DType::kBool, DType::kComplex64, DType::kComplex128),
                         [](const auto& param) { return std::string(to_string(param.param)); });

// ---- 16-bit conversions, exhaustively -----------------------------------------------------

class EverySixteenBitValue : public ::testing::TestWithParam<DType> {
 protected:
  static std::vector<std::uint16_t> all_values() {
    std::vector<std::uint16_t> values(65536);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<std::uint16_t>(i);
    }
    return values;
  }
  static HalfFormat format() {
    return GetParam() == DType::kFloat16 ? kFloat16Format : kBFloat16Format;
  }
  static std::vector<std::uint16_t> run(InstructionSet set, const Reduction& reduction,
                                        const std::vector<std::vector<std::uint16_t>>& inputs) {
    std::vector<const void*> from;
    for (const auto& input : inputs) {
      from.push_back(input.data());
    }
    std::vector<std::uint16_t> result(inputs[0].size());
    void* const to[] = {result.data()};
    reduce(reduction, from, to, result.size(), StoreHint::kCached, set);
    return result;
  }
};

TEST_P(EverySixteenBitValue, OneInputIsReturnedAsItIs) {
  const auto values = all_values();
  for (const InstructionSet set : usable_instruction_sets()) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProd, ReduceOp::kMin, ReduceOp::kMax}) {
      const auto result = run(set, {.dtype = GetParam(), .op = op}, {values});
      for (std::size_t i = 0; i < values.size(); ++i) {
        const bool is_nan = std::isnan(decode(values[i], format()));
        const std::uint16_t expected = is_nan ? encode(NAN, format()) : values[i];
        ASSERT_EQ(result[i], expected) << to_string(set) << " " << to_string(op);
      }
    }
  }
}

TEST_P(EverySixteenBitValue, QuotientsRoundOnceToNearestEven) {
  const auto values = all_values();
  // Halves make ties among the subnormals; 0.4 and less overflow.
  for (const double divisor : {2.0, 3.0, 4.0, 0.4, 0.5, 1.0 / 3, 255.0, 1000.0, 1e-5, -7.0}) {
    for (const InstructionSet set : usable_instruction_sets()) {
      const auto result =
          run(set, {.dtype = GetParam(), .op = ReduceOp::kMean, .divisor = divisor}, {values});
      for (std::size_t i = 0; i < values.size(); ++i) {
        const float quotient = divide(decode(values[i], format()), static_cast<float>(divisor));
        ASSERT_EQ(result[i], encode(quotient, format()))
            << to_string(set) << " " << values[i] << " / " << divisor;
      }
    }
  }
}

// value + half a unit in the last place of it, exactly and a little to both sides.
TEST_P(EverySixteenBitValue, TiesGoToEvenAndTheirNeighboursDoNot) {
  std::vector<std::vector<std::uint16_t>> inputs(3);
  const int mantissa_bits = format().mantissa_bits;
  const int lowest = format().smallest_exponent + 1;
  for (const std::uint16_t value : all_values()) {
    const float x = decode(value, format());
    if (!std::isfinite(x) || x == 0 || std::ilogb(x) < lowest + mantissa_bits) {
      continue;
    }
    const float half_step = std::ldexp(1.0f, std::ilogb(x) - mantissa_bits - 1);
    const float nudge = std::ldexp(half_step, -8);
    for (const float side : {-1.0f, 1.0f}) {
      for (const float nudged : {-nudge, 0.0f, nudge}) {
        inputs[0].push_back(value);
        inputs[1].push_back(encode(side * half_step, format()));
        inputs[2].push_back(encode(nudged, format()));
      }
    }
  }
  ASSERT_GT(inputs[0].size(), 10000u);
  for (const InstructionSet set : usable_instruction_sets()) {
    const auto result = run(set, {.dtype = GetParam(), .op = ReduceOp::kSum}, inputs);
    for (std::size_t i = 0; i < result.size(); ++i) {
      const float sum = add(add(decode(inputs[0][i], format()), decode(inputs[1][i], format())),
                            decode(inputs[2][i], format()));
      ASSERT_EQ(result[i], encode(sum, format())) << to_string(set) << " " << inputs[0][i];
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, EverySixteenBitValue,
                         ::testing::Values(DType::kFloat16, DType::kBFloat16),
                         [](const auto& param) { return std::string(to_string(param.param)); });

// ---- instruction sets against each other --------------------------------------------------

TEST(InstructionSets, AgreeOnArbitraryBits) {
  constexpr std::size_t kCount = 20011;
  std::mt19937_64 random(5);
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                            DType::kComplex64, DType::kComplex128}) {
    std::vector<std::vector<std::uint64_t>> inputs(4);
    std::vector<const void*> from;
    for (auto& input : inputs) {
      input.resize(kCount * element_size(dtype) / 8 + 1);
      std::generate(input.begin(), input.end(), [&] { return random(); });
      from.push_back(input.data());
    }
    const std::vector<double> factors = {1e-3, -2.5, 1.0 / 3, 7e4};
    for (int op_index = 0; op_index < kReduceOpCount; ++op_index) {
      const auto op = static_cast<ReduceOp>(op_index);
      if (!is_supported(op, dtype)) {
        continue;
      }
      Bytes portable;
      for (const InstructionSet set : usable_instruction_sets()) {
        Bytes result(kCount * element_size(dtype));
        void* const to[] = {result.data()};
        reduce({.dtype = dtype, .op = op, .divisor = 3, .factors = factors}, from, to, kCount,
               StoreHint::kStreaming, set);
        if (set == InstructionSet::kPortable) {
          portable = result;
        }
        EXPECT_EQ(result, portable)
            << to_string(set) << " " << to_string(dtype) << " " << to_string(op);
      }
    }
  }
}

TEST(InstructionSets, TheEnvironmentCapsTheChoice) {
  const char* const before = std::getenv("PYDIST_CPU_ISA");
  const std::string saved = before != nullptr ? before : "";
  ASSERT_EQ(::unsetenv("PYDIST_CPU_ISA"), 0);
  const auto all = usable_instruction_sets();
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(all.front(), InstructionSet::kPortable);

  for (std::size_t i = 0; i < all.size(); ++i) {
    ::setenv("PYDIST_CPU_ISA", std::string(to_string(all[i])).c_str(), 1);
    EXPECT_EQ(usable_instruction_sets(),
              std::vector(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(i) + 1));
  }

  ::setenv("PYDIST_CPU_ISA", "avx1024", 1);
  try {
    (void)usable_instruction_sets();
    ADD_FAILURE() << "avx1024 was accepted";
  } catch (const InvalidUsage& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("avx1024"), std::string::npos) << message;
    EXPECT_NE(message.find("portable"), std::string::npos) << message;
  }

  if (before != nullptr) {
    ::setenv("PYDIST_CPU_ISA", saved.c_str(), 1);
  } else {
    ::unsetenv("PYDIST_CPU_ISA");
  }
}

TEST(InstructionSets, OneOfAnotherArchitectureIsRefused) {
#if defined(__x86_64__)
  constexpr InstructionSet kForeign = InstructionSet::kNeon;
#else
  constexpr InstructionSet kForeign = InstructionSet::kAvx2;
#endif
  float value = 1;
  const void* const from[] = {&value};
  void* const to[] = {&value};
  const Reduction sum{.dtype = DType::kFloat32, .op = ReduceOp::kSum};
  EXPECT_THROW(reduce(sum, from, to, 1, StoreHint::kCached, kForeign), InvalidUsage);
}

// ---- beyond the cache ---------------------------------------------------------------------

TEST(Reduce, ManyInputsBeyondTheCache) {
  constexpr std::size_t kCount = (std::size_t{1} << 18) + 3;
  std::vector<std::vector<float>> inputs(64, std::vector<float>(kCount));
  std::vector<const void*> from;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    for (std::size_t e = 0; e < kCount; ++e) {
      inputs[i][e] = static_cast<float>((e + i) % 1024);
    }
    from.push_back(inputs[i].data());
  }
  std::vector<float> expected(kCount);
  for (std::size_t e = 0; e < kCount; ++e) {
    for (const auto& input : inputs) {
      expected[e] += input[e];  // exact: small integers
    }
  }
  std::vector<float> result(kCount);
  void* const to[] = {result.data()};
  for (const InstructionSet set : usable_instruction_sets()) {
    for (const StoreHint hint : {StoreHint::kCached, StoreHint::kStreaming}) {
      std::fill(result.begin(), result.end(), -1.0f);
      reduce({.dtype = DType::kFloat32, .op = ReduceOp::kSum}, from, to, kCount, hint, set);
      EXPECT_EQ(result, expected) << to_string(set);
    }
  }
}

TEST(CopyBytes, CopiesExactlyThatMuch) {
  std::mt19937_64 random(3);
  for (const std::size_t bytes : {0, 1, 63, 64, 65, 1000, 16383, 16384, 16385, 16640, 100003}) {
    for (const std::size_t skew : {0, 1, 31, 63}) {
      for (const StoreHint hint : {StoreHint::kCached, StoreHint::kStreaming}) {
        Guarded source(bytes, (skew * 7) % 64), target(bytes, skew);
        std::generate_n(source.data(), bytes, [&] { return static_cast<unsigned char>(random()); });
        copy_bytes(target.data(), source.data(), bytes, hint);
        EXPECT_EQ(std::memcmp(target.data(), source.data(), bytes), 0) << bytes << " " << skew;
        EXPECT_TRUE(target.guards_intact()) << bytes << " " << skew;
      }
    }
  }
}

}  // namespace
}  // namespace pydist
