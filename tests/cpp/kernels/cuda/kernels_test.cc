// The CUDA kernels' own code, run by the CPU thread after thread, against the kernels of the CPU.
//
// What a device adds to it (instructions, launch geometry) is tested by test_cuda_kernels.py.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cuda/library.h"
#include "kernels/test_buffers.h"

namespace pydist {
namespace {

using namespace test_buffers;

const CudaLibrary& library() {
  static const CudaLibrary opened(PYDIST_TEST_EMULATED_CUDA_LIBRARY);
  return opened;
}

TEST(CudaKernels, TheEmulatedLibraryIsWhole) {
  EXPECT_EQ(library().reason(), "");
  EXPECT_EQ(library().reason_not_to_run(), "");
  library().load_kernels();
}

// ---- reduce -------------------------------------------------------------------------------

PydistCudaReduce describe(ReduceOp op, const std::vector<const void*>& inputs,
                          const std::vector<DType>& dtypes, void* output, DType output_dtype,
                          std::size_t count, const std::vector<double>& factors) {
  return {.inputs = inputs.data(),
          .input_dtypes = dtypes.data(),
          .factors = factors.data(),
          .output = output,
          .count = count,
          .divisor = static_cast<double>(inputs.size()) + 0.5,
          .input_count = static_cast<std::uint32_t>(inputs.size()),
          .op = op,
          .output_dtype = output_dtype,
          .wire_dtype = DType::kFloat32};
}

std::vector<double> some_factors(std::size_t count) {
  std::vector<double> factors;
  for (std::size_t i = 0; i < count; ++i) {
    factors.push_back(0.1 * static_cast<double>(i + 1));
  }
  return factors;
}

Bytes reduced_by_cpu(ReduceOp op, DType dtype, const std::vector<Bytes>& inputs,
                     std::size_t count) {
  const std::vector<double> factors = some_factors(inputs.size());
  std::vector<const void*> from;
  for (const Bytes& input : inputs) {
    from.push_back(input.data());
  }
  Bytes result(count * element_size(dtype));
  void* const to[] = {result.data()};
  reduce({.dtype = dtype,
          .op = op,
          .divisor = static_cast<double>(inputs.size()) + 0.5,
          .factors = factors},
         from, to, count);
  return result;
}

constexpr int kNotInPlace = -1;

// `skews` are in elements (of complex ones, parts), one for each input and the output, repeated.
void check_reduce(ReduceOp op, DType dtype, std::size_t input_count, std::size_t count,
                  const std::vector<std::size_t>& skews, int in_place) {
  const std::size_t part = is_complex(dtype) ? element_size(dtype) / 2 : element_size(dtype);
  std::vector<Bytes> inputs;
  std::vector<GuardedBytes> buffers;
  for (std::size_t i = 0; i <= input_count; ++i) {
    const auto seed = static_cast<std::uint32_t>(count * 131 + i);
    inputs.push_back(random_elements(dtype, count, seed));
    buffers.emplace_back(inputs.back(), skews[i % skews.size()] * part % 64);
  }
  inputs.pop_back();
  std::vector<const void*> from;
  for (std::size_t i = 0; i < input_count; ++i) {
    from.push_back(buffers[i].data());
  }
  GuardedBytes& output = in_place == kNotInPlace ? buffers.back() : buffers[in_place];
  const std::vector<DType> dtypes(input_count, dtype);
  const std::vector<double> factors = some_factors(input_count);
  library().reduce(describe(op, from, dtypes, output.data(), dtype, count, factors), nullptr);
  ASSERT_EQ(output.contents(), reduced_by_cpu(op, dtype, inputs, count))
      << to_string(op) << " " << to_string(dtype) << " inputs " << input_count << " count "
      << count;
  for (GuardedBytes& buffer : buffers) {
    ASSERT_TRUE(buffer.guards_intact()) << to_string(op) << " " << to_string(dtype);
  }
}

TEST(CudaKernels, ReduceGivesTheBitsOfTheCpu) {
  for (int dtype_index = 0; dtype_index < kDTypeCount; ++dtype_index) {
    for (int op_index = 0; op_index < kReduceOpCount; ++op_index) {
      const auto dtype = static_cast<DType>(dtype_index);
      const auto op = static_cast<ReduceOp>(op_index);
      if (!is_supported(op, dtype)) {
        continue;
      }
      for (const std::size_t inputs : {1, 2}) {
        for (const std::size_t count : {0, 1, 15, 33, 1021}) {
          check_reduce(op, dtype, inputs, count, {0}, kNotInPlace);
        }
      }
      check_reduce(op, dtype, 2, 517, {1}, kNotInPlace);        // aligned alike, after a head
      check_reduce(op, dtype, 2, 517, {1, 0, 2}, kNotInPlace);  // never aligned alike
      check_reduce(op, dtype, 2, 333, {0}, /*in_place=*/0);
      check_reduce(op, dtype, 2, 333, {3, 1}, /*in_place=*/1);
    }
  }
}

// Several tiles for each of the three blocks there are here, and edges.
TEST(CudaKernels, ReduceOfManyTiles) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt8, DType::kComplex128}) {
    check_reduce(ReduceOp::kSum, dtype, 2, 40003, {0}, /*in_place=*/1);
    check_reduce(ReduceOp::kSum, dtype, 2, 20003, {1}, kNotInPlace);
    check_reduce(ReduceOp::kSum, dtype, 2, 20003, {1, 0, 0}, kNotInPlace);
  }
}

// ---- mixtures -----------------------------------------------------------------------------

constexpr DType kMixable[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

// Through the wire type and back.
std::vector<float> travelled(DType wire, std::vector<float> values) {
  return wire == DType::kFloat32 ? values : widened(wire, narrowed(wire, values));
}

void check_mixed(ReduceOp op, const std::vector<DType>& dtypes, DType output_dtype, DType wire,
                 std::size_t count, std::size_t skew) {
  std::vector<Bytes> as_float32;
  std::vector<GuardedBytes> buffers;
  std::vector<const void*> from;
  for (std::size_t i = 0; i < dtypes.size(); ++i) {
    const Bytes given =
        random_elements(dtypes[i], count, static_cast<std::uint32_t>(count + 31 * i));
    std::vector<float> values = widened(dtypes[i], given);
    as_float32.push_back(bytes_of(dtypes[i] == DType::kFloat32 ? travelled(wire, values) : values));
    buffers.emplace_back(given, skew * element_size(dtypes[i]));
  }
  for (GuardedBytes& buffer : buffers) {
    from.push_back(buffer.data());
  }
  std::vector<float> expected =
      values_of<float>(reduced_by_cpu(op, DType::kFloat32, as_float32, count));
  if (output_dtype == DType::kFloat32) {
    expected = travelled(wire, expected);
  }
  GuardedBytes output(Bytes(count * element_size(output_dtype)), skew * element_size(output_dtype));
  const std::vector<double> factors = some_factors(dtypes.size());
  PydistCudaReduce reduce = describe(op, from, dtypes, output.data(), output_dtype, count, factors);
  reduce.wire_dtype = wire;
  library().reduce(reduce, nullptr);
  ASSERT_EQ(output.contents(), narrowed(output_dtype, expected))
      << to_string(op) << " " << to_string(dtypes[0]) << " " << to_string(dtypes.back()) << " to "
      << to_string(output_dtype) << " by " << to_string(wire) << " count " << count;
  ASSERT_TRUE(output.guards_intact());
}

TEST(CudaKernels, MixturesAccumulateInFloat32) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMin, ReduceOp::kMax,
                            ReduceOp::kProd, ReduceOp::kPremulSum}) {
    for (const DType first : kMixable) {
      for (const DType second : kMixable) {
        for (const DType output : kMixable) {
          for (const DType wire : kMixable) {
            check_mixed(op, {first, second}, output, wire, 70, 0);
          }
          check_mixed(op, {first, second}, output, DType::kFloat32, 41, 1);
        }
        check_mixed(op, {first}, second, DType::kFloat32, 41, 0);
      }
    }
  }
  check_mixed(ReduceOp::kSum, {DType::kFloat32, DType::kBFloat16}, DType::kFloat32, DType::kFloat32,
              50021, 3);
}

// What the ranks of a ring do in turn gives what one reduction gives that knows all ranks.
TEST(CudaKernels, PartialSumsInFloat32AreOneReduction) {
  constexpr std::size_t kCount = 1000;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    std::vector<Bytes> inputs;
    for (std::uint32_t i = 0; i < 5; ++i) {
      inputs.push_back(random_elements(dtype, kCount, i));
    }
    std::vector<GuardedBytes> own;
    for (const Bytes& input : inputs) {
      own.emplace_back(input);
    }
    GuardedBytes partial(bytes_of(std::vector<float>(kCount)));
    GuardedBytes result(Bytes(kCount * 2));
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const bool is_last = i + 1 == inputs.size();
      std::vector<const void*> from = {partial.data(), own[i].data()};
      std::vector<DType> dtypes = {DType::kFloat32, dtype};
      if (i == 0) {
        from.erase(from.begin());
        dtypes.erase(dtypes.begin());
      }
      PydistCudaReduce reduce = describe(is_last ? ReduceOp::kMean : ReduceOp::kSum, from, dtypes,
                                         is_last ? result.data() : partial.data(),
                                         is_last ? dtype : DType::kFloat32, kCount, {});
      reduce.divisor = static_cast<double>(inputs.size()) + 0.5;
      library().reduce(reduce, nullptr);
    }
    EXPECT_EQ(result.contents(), reduced_by_cpu(ReduceOp::kMean, dtype, inputs, kCount));
  }
}

// ---- conversion ---------------------------------------------------------------------------

struct Pair {
  Bytes from;
  DType from_dtype;
  DType to_dtype;
};

std::vector<Bytes> converted(const std::vector<Pair>& pairs, double scale, std::size_t skew) {
  std::vector<GuardedBytes> from;
  std::vector<GuardedBytes> to;
  std::vector<PydistCudaSegment> segments;
  for (const Pair& pair : pairs) {
    const std::size_t count = pair.from.size() / element_size(pair.from_dtype);
    const std::size_t part = is_complex(pair.to_dtype) ? 2 : 1;
    from.emplace_back(pair.from, skew * element_size(pair.from_dtype) / part % 64);
    to.emplace_back(Bytes(count * element_size(pair.to_dtype)));
  }
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    segments.push_back({.from = from[i].data(),
                        .to = to[i].data(),
                        .count = pairs[i].from.size() / element_size(pairs[i].from_dtype),
                        .from_dtype = pairs[i].from_dtype,
                        .to_dtype = pairs[i].to_dtype});
  }
  library().convert({.segments = segments.data(), .segment_count = segments.size(), .scale = scale},
                    nullptr);
  std::vector<Bytes> results;
  for (GuardedBytes& buffer : to) {
    EXPECT_TRUE(buffer.guards_intact());
    results.push_back(buffer.contents());
  }
  return results;
}

TEST(CudaKernels, EveryHalfWidensAsOnTheCpu) {
  std::vector<std::uint16_t> all(1 << 16);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<std::uint16_t>(i);
  }
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const std::vector<Bytes> results = converted({{bytes_of(all), dtype, DType::kFloat32}}, 1, 0);
    EXPECT_EQ(results[0], bytes_of(widened(dtype, bytes_of(all)))) << to_string(dtype);
  }
}

TEST(CudaKernels, EveryExponentAndUpperMantissaNarrowsAsOnTheCpu) {
  std::vector<float> values;
  for (std::uint32_t upper = 0; upper < 1u << 16; ++upper) {
    for (const std::uint32_t lower :
         {0u, 1u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u}) {
      values.push_back(std::bit_cast<float>(upper << 16 | lower));
    }
  }
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    EXPECT_EQ(converted({{bytes_of(values), DType::kFloat32, dtype}}, 1, 1)[0],
              narrowed(dtype, values))
        << to_string(dtype);
  }
}

// Just beside a tie, where rounding to float32 first would land on it.
TEST(CudaKernels, Float64NarrowsInOneRounding) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    std::vector<double> values;
    std::vector<float> expected;
    const auto infinity =
        values_of<std::uint16_t>(narrowed(dtype, {std::numeric_limits<float>::infinity()}))[0];
    for (std::uint16_t bits = 0; bits < infinity - 1; ++bits) {
      const std::vector<float> both = widened(
          dtype, bytes_of(std::vector<std::uint16_t>{bits, static_cast<std::uint16_t>(bits + 1)}));
      const double tie = (static_cast<double>(both[0]) + both[1]) / 2;
      for (const double sign : {1.0, -1.0}) {
        values.insert(values.end(), {sign * tie * (1 + 1e-13), sign * tie * (1 - 1e-13), sign * tie,
                                     sign * both[0]});
        const float even = static_cast<float>(sign) * both[bits % 2];
        const auto low = static_cast<float>(sign) * both[0];
        expected.insert(expected.end(), {static_cast<float>(sign) * both[1], low, even, low});
      }
    }
    values.insert(values.end(), {1e300, -1e300, std::nan(""), HUGE_VAL, 1e-300});
    expected.insert(expected.end(), {HUGE_VALF, -HUGE_VALF, std::nanf(""), HUGE_VALF, 0.0f});
    EXPECT_EQ(converted({{bytes_of(values), DType::kFloat64, dtype}}, 1, 0)[0],
              narrowed(dtype, expected))
        << to_string(dtype);
  }
}

TEST(CudaKernels, EveryPairOfTypesConvertsWithScale) {
  const DType dtypes[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  for (const DType from : dtypes) {
    for (const DType to : dtypes) {
      for (const std::size_t count : {0, 1, 1023, 9001}) {
        const std::vector<float> values = ordinary(count, 9);
        Bytes given = narrowed(from == DType::kFloat64 ? DType::kFloat32 : from, values);
        const std::vector<float> exact =
            widened(from == DType::kFloat64 ? DType::kFloat32 : from, given);
        if (from == DType::kFloat64) {
          given = bytes_of(std::vector<double>(values.begin(), values.end()));
        }
        // A power of two, so that the expected values are exact.
        Bytes expected;
        if (to == DType::kFloat64) {
          std::vector<double> wide(exact.begin(), exact.end());
          std::for_each(wide.begin(), wide.end(), [](double& value) { value *= 0.5; });
          expected = bytes_of(wide);
        } else {
          std::vector<float> scaled = exact;
          std::for_each(scaled.begin(), scaled.end(), [](float& value) { value *= 0.5f; });
          expected = narrowed(to, scaled);
        }
        for (const std::size_t skew : {0, 1}) {
          EXPECT_EQ(converted({{given, from, to}}, 0.5, skew)[0], expected)
              << to_string(from) << " to " << to_string(to) << " count " << count;
        }
      }
    }
  }
}

TEST(CudaKernels, WithoutConversionBitsStay) {
  std::vector<Pair> pairs;
  for (int index = 0; index < kDTypeCount; ++index) {
    const auto dtype = static_cast<DType>(index);
    for (const std::size_t count : {0, 1, 7, 4096, 5003}) {
      pairs.push_back({random_elements(dtype, count, 5), dtype, dtype});
    }
  }
  for (const std::size_t skew : {0, 1, 2, 4}) {
    const std::vector<Bytes> results = converted(pairs, 1, skew);
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      ASSERT_EQ(results[i], pairs[i].from) << to_string(pairs[i].to_dtype) << " skew " << skew;
    }
  }
}

// More segments than one launch takes, empty ones among them, into one flat buffer.
TEST(CudaKernels, PacksAndUnpacksABucket) {
  constexpr std::size_t kSegments = 500;
  std::vector<std::vector<float>> tensors;
  std::vector<GuardedBytes> sources;
  std::vector<DType> dtypes;
  std::vector<float> expected;
  for (std::size_t i = 0; i < kSegments; ++i) {
    dtypes.push_back(kMixable[i % 3]);
    tensors.push_back(ordinary(i % 7 == 0 ? 0 : i * 37 % 301, static_cast<std::uint32_t>(i)));
    tensors.back() = travelled(dtypes.back(), tensors.back());
    expected.insert(expected.end(), tensors.back().begin(), tensors.back().end());
  }
  std::vector<float> flat(expected.size(), -1.0f);
  std::vector<PydistCudaSegment> pack;
  std::vector<PydistCudaSegment> unpack;
  for (std::size_t i = 0; i < kSegments; ++i) {
    sources.emplace_back(narrowed(dtypes[i], tensors[i]));
  }
  std::size_t offset = 0;
  for (std::size_t i = 0; i < kSegments; ++i) {
    pack.push_back({.from = sources[i].data(),
                    .to = flat.data() + offset,
                    .count = tensors[i].size(),
                    .from_dtype = dtypes[i],
                    .to_dtype = DType::kFloat32});
    unpack.push_back({.from = flat.data() + offset,
                      .to = sources[i].data(),
                      .count = tensors[i].size(),
                      .from_dtype = DType::kFloat32,
                      .to_dtype = dtypes[i]});
    offset += tensors[i].size();
  }
  library().convert({.segments = pack.data(), .segment_count = kSegments, .scale = 1}, nullptr);
  EXPECT_EQ(flat, expected);
  library().convert({.segments = unpack.data(), .segment_count = kSegments, .scale = 2}, nullptr);
  for (std::size_t i = 0; i < kSegments; ++i) {
    for (float& value : tensors[i]) {
      value *= 2;
    }
    EXPECT_EQ(sources[i].contents(), narrowed(dtypes[i], tensors[i])) << i;
    EXPECT_TRUE(sources[i].guards_intact()) << i;
  }
}

// ---- optimizer steps ----------------------------------------------------------------------

// Whose values are compared with the CPU's elsewhere.
TEST(CudaKernels, AStepChangesNothingWhereANumberOfTheDeviceSaysSo) {
  constexpr std::size_t kCount = 1000;
  const std::vector<float> gradient(kCount, 2.0f);
  const std::vector<float> start(kCount, 0.5f);
  for (const float found_inf : {1.0f, std::numeric_limits<float>::quiet_NaN(), 0.0f}) {
    std::vector<float> master = start, average = start, square = start, momentum = start;
    std::vector<float> stepped = start;
    const PydistCudaStep common{
        .lr = 0.1, .weight_decay = 0, .gradient_scale = 1, .maximize = 0, .found_inf = &found_inf};
    const PydistCudaAdamSegment adam{.gradient = gradient.data(),
                                     .master = master.data(),
                                     .exp_avg = average.data(),
                                     .exp_avg_sq = square.data(),
                                     .max_exp_avg_sq = nullptr,
                                     .parameter = nullptr,
                                     .count = kCount,
                                     .gradient_dtype = DType::kFloat32,
                                     .parameter_dtype = DType::kFloat32};
    library().adam({.segments = &adam,
                    .segment_count = 1,
                    .common = common,
                    .beta1 = 0.9,
                    .beta2 = 0.99,
                    .eps = 1e-8,
                    .step = 1,
                    .decoupled_weight_decay = 0,
                    .amsgrad = 0},
                   nullptr);
    const PydistCudaSgdSegment sgd{.gradient = gradient.data(),
                                   .master = stepped.data(),
                                   .momentum = momentum.data(),
                                   .parameter = nullptr,
                                   .count = kCount,
                                   .gradient_dtype = DType::kFloat32,
                                   .parameter_dtype = DType::kFloat32};
    library().sgd({.segments = &sgd,
                   .segment_count = 1,
                   .common = common,
                   .momentum = 0.9,
                   .dampening = 0,
                   .nesterov = 0,
                   .first_step = 1},
                  nullptr);
    for (const auto* values : {&master, &average, &square, &momentum, &stepped}) {
      if (found_inf == 0) {
        EXPECT_EQ(std::count(values->begin(), values->end(), 0.5f), 0);
      } else {
        EXPECT_EQ(*values, start) << found_inf;
      }
    }
  }
}

}  // namespace
}  // namespace pydist
