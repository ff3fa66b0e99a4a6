// Every collective of the NCCL backend, on an NCCL and a CUDA driver without a GPU (tests/fakes),
// against the promise of the native engine.
//
// With two ranks the order of a sum changes nothing, so every operation has the native engine's
// bits. With more, what NCCL sums in 16 bits, and what our ring sums in an order of its own, is
// left to the tests of the ring, whose order is promised.

#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include "collective_case.h"
#include "nccl_fakes.h"
#include "ranks.h"
#include "run_cases.h"

namespace pydist::testing {
namespace {

constexpr OpKind kMoves[] = {OpKind::kAllGather, OpKind::kBroadcast, OpKind::kGather,
                             OpKind::kScatter, OpKind::kAllToAll};
constexpr OpKind kReductions[] = {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kReduce};
constexpr std::size_t kSomeCounts[] = {0, 1, 3, 17, 100, 1023, 4099};

using RanksAndAlgorithm = std::tuple<int, AlgorithmChoice>;

class NcclConformance : public ::testing::TestWithParam<RanksAndAlgorithm> {
 protected:
  [[nodiscard]] int size() const { return std::get<0>(GetParam()); }
  [[nodiscard]] bool is_ring() const { return std::get<1>(GetParam()) == AlgorithmChoice::kRing; }

  [[nodiscard]] Case make_case(OpKind kind, DType dtype, ReduceOp op, std::size_t count,
                               std::uint64_t seed) const {
    return any_case(kind, dtype, op, size(), count, seed);
  }

  // Whether the order of summation, and where it is rounded, is that of `prepare`.
  [[nodiscard]] bool has_promised_bits(OpKind kind, DType dtype, ReduceOp op) const {
    if (size() <= 2 || is_integral(dtype) || op == ReduceOp::kMin || op == ReduceOp::kMax) {
      return true;
    }
    if (is_ring()) {
      return kind != OpKind::kReduce;
    }
    const bool is_narrow = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
    return !is_narrow && !(op == ReduceOp::kProd && is_complex(dtype));
  }

  void run(const std::vector<Case>& cases, const CudaLibrary& kernels = fake_kernels()) const {
    Environment environment = test_environment();
    environment.algorithm = std::get<1>(GetParam());
    std::vector<PreparedCase> prepared;
    for (const Case& what : cases) {
      prepared.push_back(prepare(what, size(), order_of(environment.algorithm)));
    }
    run_ranks(
        size(),
        [&](RankOfTest& self) {
          const CommunicatorPtr group = join_nccl(self, environment, &kernels);
          const FakeStream stream(self.rank);
          CaseBuffers buffers({});
          for (std::size_t i = 0; i < prepared.size(); ++i) {
            Operation operation =
                on_device(buffers.lay_out(prepared[i], self.rank, Placement::kOrdinary), self.rank,
                          stream.get());
            if (i % 3 == 0) {
              const WorkPtr work = group->submit(std::move(operation));
              ASSERT_TRUE(work->wait_on_stream(stream.get()));
            } else if (i % 3 == 1) {
              group->submit(std::move(operation))->wait();
            } else {
              group->run(std::move(operation));
            }
            stream.synchronize();
            const std::string wrong = buffers.check();
            ASSERT_TRUE(wrong.empty())
                << prepared[i].what.to_string() << " on rank " << self.rank << ": " << wrong;
          }
          group->shutdown();
        },
        environment);
  }
};

TEST_P(NcclConformance, ReducesEveryTypeWithEveryOp) {
  std::vector<Case> cases;
  std::uint64_t seed = 1;
  for (const OpKind kind : kReductions) {
    for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
      for (int op = 0; op < kReduceOpCount; ++op, ++seed) {
        const auto the_dtype = static_cast<DType>(dtype);
        const auto the_op = static_cast<ReduceOp>(op);
        if (is_supported(the_op, the_dtype) && has_promised_bits(kind, the_dtype, the_op)) {
          cases.push_back(make_case(kind, the_dtype, the_op,
                                    kSomeCounts[mix(seed) % std::size(kSomeCounts)], seed));
        }
      }
    }
  }
  run(cases);
}

TEST_P(NcclConformance, MovesEveryTypeAndLayout) {
  std::vector<Case> cases;
  std::uint64_t seed = 1 << 20;
  for (const OpKind kind : kMoves) {
    for (int dtype = 0; dtype < kDTypeCount; ++dtype, ++seed) {
      Case what = make_case(kind, static_cast<DType>(dtype), ReduceOp::kSum,
                            kSomeCounts[mix(seed) % std::size(kSomeCounts)], seed);
      cases.push_back(what);
      if (has_blocks(kind) && dtype % 4 == 0) {
        what.counts = ragged_counts(kind, size(), 100, seed);
        what.is_flat = false;
        what.is_in_place = kind != OpKind::kAllToAll && dtype % 8 == 0;
        cases.push_back(what);
      }
    }
  }
  run(cases);
}

TEST_P(NcclConformance, ReducesAndScattersUnevenBlocks) {
  std::vector<Case> cases;
  std::uint64_t seed = 2 << 20;
  for (const DType dtype : {DType::kInt8, DType::kInt16, DType::kInt64, DType::kFloat32}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kPremulSum}) {
      // Factors take uneven blocks to the ring, whose order is promised where it is asked for.
      const bool has_other_order =
          op == ReduceOp::kPremulSum && !is_integral(dtype) && size() > 2 && !is_ring();
      if (is_supported(op, dtype) && !has_other_order) {
        Case what = make_case(OpKind::kReduceScatter, dtype, op, 100, ++seed);
        what.counts = ragged_counts(what.kind, size(), 100, seed);
        what.is_flat = false;
        cases.push_back(what);
      }
    }
  }
  run(cases);
}

// By NCCL's own operator. 16-bit types are multiplied and rounded there
// (communicator/nccl_communicator_test.cc).
TEST_P(NcclConformance, MultipliesBeforeItSumsWithoutKernels) {
  if (is_ring()) {
    GTEST_SKIP() << "the ring needs the kernels";
  }
  std::vector<Case> cases;
  std::uint64_t seed = 3 << 20;
  for (const DType dtype :
       {DType::kFloat32, DType::kFloat64, DType::kComplex64, DType::kComplex128}) {
    for (const OpKind kind : kReductions) {
      for (const std::size_t count : {0, 17, 4099}) {
        cases.push_back(make_case(kind, dtype, ReduceOp::kPremulSum, count, ++seed));
      }
    }
    cases.push_back(make_case(OpKind::kReduceScatter, dtype, ReduceOp::kPremulSum, 100, ++seed));
    cases.back().counts = ragged_counts(OpKind::kReduceScatter, size(), 100, seed);
    cases.back().is_flat = false;
  }
  run(cases, no_kernels());
}

// More than the scratch memory holds, and no multiple of anything.
TEST_P(NcclConformance, CutsLargeBuffersIntoPieces) {
  if (size() > 3) {
    GTEST_SKIP() << "cut as for three ranks";
  }
  std::vector<Case> cases;
  constexpr std::size_t kLarge = (std::size_t{16} << 20) / 8 + 1003;
  cases.push_back(make_case(OpKind::kAllReduce, DType::kFloat64, ReduceOp::kPremulSum, kLarge, 7));
  if (size() == 2) {
    cases.push_back(make_case(OpKind::kAllToAll, DType::kInt64, ReduceOp::kSum, kLarge, 9));
    cases.back().is_in_place = true;
  }
  run(cases);
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclConformance,
                         ::testing::Values(RanksAndAlgorithm{1, AlgorithmChoice::kAuto},
                                           RanksAndAlgorithm{2, AlgorithmChoice::kAuto},
                                           RanksAndAlgorithm{2, AlgorithmChoice::kRing},
                                           RanksAndAlgorithm{3, AlgorithmChoice::kAuto},
                                           RanksAndAlgorithm{3, AlgorithmChoice::kRing},
                                           RanksAndAlgorithm{4, AlgorithmChoice::kAuto},
                                           RanksAndAlgorithm{4, AlgorithmChoice::kRing}),
                         [](const auto& info) {
                           return "p" + std::to_string(std::get<0>(info.param)) + "_" +
                                  std::string(to_string(std::get<1>(info.param)));
                         });

}  // namespace
}  // namespace pydist::testing
