// Reductions whose elements travel in 16 bits: every way to move them, bit by bit against
//
//   result = widen(round(reduce_in_float32(widen(round(x of rank 0)), widen(round(x of rank 1)),
//   ...
//
// with the arithmetic of the kernels, which have tests of their own.
// communicator/native_failure_test.cc has ranks that disagree, communicator/operation_test.cc what
// is refused.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

#include "collectives/group_segment.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/reduce.h"
#include "ranks.h"
#include "run_cases.h"

namespace pydist::testing {
namespace {

constexpr std::size_t kUsualChunkBytes = std::size_t{128} << 10;
constexpr std::size_t kWireBytes = 2;

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kPremulSum};

class WireDType : public ::testing::TestWithParam<RanksAndRoad> {
 protected:
  [[nodiscard]] int size() const { return std::get<0>(GetParam()); }
  void run(const std::vector<Case>& cases, std::size_t chunk_bytes) const {
    run_cases(cases, size(), std::get<1>(GetParam()), std::get<2>(GetParam()), chunk_bytes);
  }

  [[nodiscard]] Case make_case(OpKind kind, ReduceOp op, DType wire_dtype, std::size_t count,
                               std::uint64_t seed) const {
    Case what;
    what.kind = kind;
    what.op = op;
    what.wire_dtype = wire_dtype;
    what.counts = equal_counts(kind, size(), count);
    what.root = kind == OpKind::kReduce ? size() - 1 : 0;
    what.is_in_place = mix(seed) % 2 == 0;
    what.is_flat = kind != OpKind::kReduceScatter || (mix(seed) >> 8) % 2 == 0;
    what.seed = seed;
    return what;
  }

  // Every kind, wire type and op, with each count, of a block for reduce_scatter.
  [[nodiscard]] std::vector<Case> all_with(const std::vector<std::size_t>& counts,
                                           std::uint64_t seed) const {
    std::vector<Case> cases;
    for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kReduce}) {
      for (const DType wire_dtype : kWireDTypes) {
        for (const ReduceOp op : kOps) {
          for (const std::size_t count : counts) {
            cases.push_back(make_case(kind, op, wire_dtype, count, ++seed));
          }
        }
      }
    }
    return cases;
  }
};

TEST_P(WireDType, AroundWhatFitsIntoAPost) {
  // What fits into a post, of one block or of all.
  const std::size_t most = kInlineBytes / kWireBytes;
  const std::size_t each = most / static_cast<std::size_t>(size());
  run(all_with({0, 1, 7, each, each + 1, most - 1, most, most + 1}, 1), kSmallChunkBytes);
}

TEST_P(WireDType, AroundChunksAndManyInFlight) {
  const std::size_t chunk = kSmallChunkBytes / kWireBytes;
  run(all_with({chunk - 1, chunk, chunk + 1, 2 * chunk, 5 * chunk + 77}, 1 << 16),
      kSmallChunkBytes);
}

TEST_P(WireDType, AroundOneShotAndChunksOfTheUsualSize) {
  const std::size_t ranks = static_cast<std::size_t>(size());
  const std::size_t chunk = kUsualChunkBytes / kWireBytes;
  const std::size_t one_shot = chunk / std::max<std::size_t>(1, ranks - 1);
  std::vector<Case> cases;
  std::uint64_t seed = 2 << 16;
  for (const DType wire_dtype : kWireDTypes) {
    for (const std::size_t count : {one_shot, one_shot + 1, chunk, chunk + 1, 3 * chunk + 1001}) {
      ++seed;
      cases.push_back(make_case(OpKind::kAllReduce, kOps[seed % 3], wire_dtype, count, seed));
      cases.push_back(
          make_case(OpKind::kReduceScatter, kOps[seed % 3], wire_dtype, count / ranks, seed));
    }
  }
  run(cases, kUsualChunkBytes);
}

TEST_P(WireDType, RaggedBlocks) {
  std::vector<Case> cases;
  for (std::uint64_t seed = 3 << 16; seed < (3 << 16) + 24; ++seed) {
    Case what = make_case(OpKind::kReduceScatter, kOps[seed % 3], kWireDTypes[seed % 2], 0, seed);
    what.counts = ragged_counts(what.kind, size(), seed % 4 == 0 ? 5 : 1500, seed);
    what.is_flat = false;
    cases.push_back(what);
  }
  run(cases, kSmallChunkBytes);
}

INSTANTIATE_TEST_SUITE_P(Direct, WireDType,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4),
                                            ::testing::Values(AlgorithmChoice::kAuto),
                                            ::testing::Values(Placement::kOrdinary,
                                                              Placement::kHeap, Placement::kMixed)),
                         name_of_ranks_and_road);
INSTANTIATE_TEST_SUITE_P(Ring, WireDType,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4),
                                            ::testing::Values(AlgorithmChoice::kRing),
                                            ::testing::Values(Placement::kMixed)),
                         name_of_ranks_and_road);

// -- values ---------------------------------------------------------------------------------------

using Floats = std::vector<float>;

// The formula above.
Floats by_formula(const std::vector<Floats>& inputs, DType wire_dtype, ReduceOp op) {
  const std::size_t count = inputs[0].size();
  std::vector<std::vector<std::uint16_t>> rounded;
  std::vector<const void*> sources;
  std::vector<double> factors;
  for (const Floats& input : inputs) {
    auto& short_floats = rounded.emplace_back(count);
    narrow_from_float32(wire_dtype, input.data(), short_floats.data(), count);
    factors.push_back(premul_factor(static_cast<int>(factors.size())));
  }
  for (const auto& short_floats : rounded) {
    sources.push_back(short_floats.data());
  }
  std::vector<std::uint16_t> sum(count);
  void* target = sum.data();
  reduce({wire_dtype, op, static_cast<double>(inputs.size()), factors}, sources, {&target, 1},
         count);
  Floats result(count);
  widen_to_float32(wire_dtype, sum.data(), result.data(), count);
  return result;
}

std::vector<std::uint32_t> bits_of(const Floats& values) {
  std::vector<std::uint32_t> bits;
  for (const float value : values) {
    bits.push_back(std::bit_cast<std::uint32_t>(value));
  }
  return bits;
}

// What all_reduce gives on every rank.
std::vector<Floats> all_reduced(const std::vector<Floats>& inputs, DType wire_dtype, ReduceOp op,
                                AlgorithmChoice algorithm) {
  std::vector<Floats> results = inputs;
  Environment environment = test_environment();
  environment.algorithm = algorithm;
  environment.chunk_bytes = kSmallChunkBytes;
  run_ranks(
      static_cast<int>(inputs.size()),
      [&](RankOfTest& self) {
        Operation operation = all_reduce(results[static_cast<std::size_t>(self.rank)], op);
        operation.wire_dtype = wire_dtype;
        operation.factor = premul_factor(self.rank);
        self.communicator->run(std::move(operation));
      },
      environment);
  return results;
}

// Every value of the list meets every other one.
std::vector<Floats> special_values(int size) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const Floats values = {
      0.0f,
      -0.0f,
      1.0f,
      -2.5f,
      std::numeric_limits<float>::quiet_NaN(),
      std::bit_cast<float>(0xffc12345u),  // a negative NaN with a payload
      kInfinity,
      -kInfinity,
      65503.0f,  // the largest float16 is 65504
      65520.0f,  // halfway to the one that would follow: infinite as float16
      -40000.0f,
      40000.0f,
      std::numeric_limits<float>::max(),  // infinite as bfloat16
      3.0e-8f,                            // rounds to the smallest float16, 6.0e-8
      2.9e-8f,                            // rounds to zero as float16
      1.0e-40f,                           // subnormal as float32 and bfloat16
      1.00390625f,                        // halfway between two bfloat16
      1.00048828125f,                     // halfway between two float16
  };
  std::vector<Floats> inputs(static_cast<std::size_t>(size));
  std::size_t count = 1;
  for (int rank = 0; rank < std::min(size, 3); ++rank) {
    count *= values.size();
  }
  for (std::size_t i = 0; i < count; ++i) {
    std::size_t index = i;
    for (int rank = 0; rank < size; ++rank) {
      // From the fourth rank on, the values repeat.
      inputs[static_cast<std::size_t>(rank)].push_back(
          values[rank < 3 ? index % values.size() : (i * 7 + 3) % values.size()]);
      index /= values.size();
    }
  }
  return inputs;
}

TEST(WireDTypeTest, SpecialValues) {
  for (const int size : {1, 2, 3, 4}) {
    const std::vector<Floats> inputs = special_values(size);
    for (const DType wire_dtype : kWireDTypes) {
      for (const ReduceOp op : kOps) {
        const auto expected = bits_of(by_formula(inputs, wire_dtype, op));
        for (const AlgorithmChoice algorithm : {AlgorithmChoice::kAuto, AlgorithmChoice::kRing}) {
          const auto results = all_reduced(inputs, wire_dtype, op, algorithm);
          const bool is_ring = algorithm == AlgorithmChoice::kRing;
          for (const Floats& result : results) {
            ASSERT_EQ(bits_of(result), bits_of(results[0]))
                << "equal on all ranks, ring " << is_ring;
            if (!is_ring || size <= 2) {
              ASSERT_EQ(bits_of(result), expected) << size << " ranks, " << to_string(wire_dtype)
                                                   << " " << to_string(op) << " ring " << is_ring;
            }
          }
        }
      }
    }
  }
}

// The expected bits above come from the kernels; these come from arithmetic.
TEST(WireDTypeTest, RoundsContributionsAndResultOnceEach) {
  for (const int size : {1, 2, 3, 4}) {
    // bfloat16 has 8 bits. 257 is halfway between 256 and 258, and goes to the even 256; the ones
    // are not lost, since the sum has 24 bits.
    std::vector<Floats> inputs(static_cast<std::size_t>(size), Floats(777, 1.0f));
    inputs[0].assign(777, 257.0f);
    // 256, 257 (halfway: to 256), 258, 259 (halfway: to 260).
    const float expected[] = {256.0f, 256.0f, 258.0f, 260.0f};
    for (const Floats& result :
         all_reduced(inputs, DType::kBFloat16, ReduceOp::kSum, AlgorithmChoice::kAuto)) {
      EXPECT_EQ(result, Floats(777, expected[size - 1])) << size;
    }
    // float16 has 11 bits: 2049 goes to 2048.
    inputs[0].assign(777, 2049.0f);
    const float expected_half[] = {2048.0f, 2048.0f, 2050.0f, 2052.0f};
    for (const Floats& result :
         all_reduced(inputs, DType::kFloat16, ReduceOp::kSum, AlgorithmChoice::kAuto)) {
      EXPECT_EQ(result, Floats(777, expected_half[size - 1])) << size;
    }
  }
}

TEST(WireDTypeTest, IsCloseToTheExactSum) {
  constexpr std::size_t kCount = 10'007;
  for (const AlgorithmChoice algorithm : {AlgorithmChoice::kAuto, AlgorithmChoice::kRing}) {
    for (const int size : {2, 3, 4}) {
      std::vector<Floats> inputs(static_cast<std::size_t>(size), Floats(kCount));
      for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
        for (std::size_t i = 0; i < kCount; ++i) {
          inputs[rank][i] =
              static_cast<float>(std::sin(static_cast<double>(i) * static_cast<double>(rank + 1)));
        }
      }
      for (const DType wire_dtype : kWireDTypes) {
        const auto results = all_reduced(inputs, wire_dtype, ReduceOp::kMean, algorithm);
        // The contributions and, hop by hop, the sums are rounded.
        const double unit = wire_dtype == DType::kBFloat16 ? 1.0 / 256 : 1.0 / 2048;
        for (std::size_t i = 0; i < kCount; ++i) {
          double sum = 0;
          double terms = 0;
          for (const Floats& input : inputs) {
            sum += input[i];
            terms += std::abs(input[i]);
          }
          for (const Floats& result : results) {
            ASSERT_EQ(result[i], results[0][i]) << i;
            ASSERT_NEAR(result[i], sum / size, (size + 1) * unit * terms / size + 1e-7) << i;
          }
        }
      }
    }
  }
}

TEST(WireDTypeTest, RingOfTwoGivesTheBitsOfSharedMemory) {
  std::vector<Floats> inputs(2, Floats(9001));
  for (std::uint64_t i = 0; i < inputs[0].size(); ++i) {
    inputs[0][i] = static_cast<float>(mix(i) % 2'000'003) / 1009.0f;
    inputs[1][i] = -static_cast<float>(mix(i + 77777) % 2'000'003) / 997.0f;
  }
  for (const DType wire_dtype : kWireDTypes) {
    for (const ReduceOp op : kOps) {
      const auto direct = all_reduced(inputs, wire_dtype, op, AlgorithmChoice::kAuto);
      EXPECT_EQ(direct, all_reduced(inputs, wire_dtype, op, AlgorithmChoice::kRing));
      EXPECT_EQ(direct[0], direct[1]);
    }
  }
}

TEST(WireDTypeTest, TheBuffersOwnTypeIsNone) {
  run_ranks(2, [](RankOfTest& self) {
    // Ranks that name it agree with ranks that do not.
    Floats floats(100, 257.0f);
    Operation operation = all_reduce(floats);
    if (self.rank == 0) {
      operation.wire_dtype = DType::kFloat32;
    }
    self.communicator->run(std::move(operation));
    EXPECT_EQ(floats, Floats(100, 514.0f));
    std::vector<int> integers(100, 257);
    operation = all_reduce(integers, ReduceOp::kMax);
    operation.wire_dtype = DType::kInt32;
    self.communicator->run(std::move(operation));
    EXPECT_EQ(integers, std::vector<int>(100, 257));
  });
}

TEST(WireDTypeTest, CapabilitiesNameTheTypes) {
  run_ranks(1, [](RankOfTest& self) {
    EXPECT_EQ(self.communicator->capabilities().wire_dtypes,
              (std::vector<DType>{DType::kFloat16, DType::kBFloat16}));
  });
}

}  // namespace
}  // namespace pydist::testing
