// Ranks of the native engine that disagree about an operation: every rank learns of it at once, and
// nobody's data is touched.

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "collective_case.h"
#include "collectives/group_segment.h"
#include "communicator/native/native_communicator.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// What rank 1 calls otherwise than the rest.
struct Disagreement {
  std::string name;
  Case usual;
  Case other;
  std::string usual_words;  // in the message, on every rank
  std::string other_words;
};

Case plain(OpKind kind, DType dtype, std::vector<std::size_t> counts) {
  Case what;
  what.kind = kind;
  what.dtype = dtype;
  what.counts = std::move(counts);
  what.is_flat = false;
  what.seed = 31;
  return what;
}

Case with_op(Case what, ReduceOp op) {
  what.op = op;
  return what;
}

Case with_wire_dtype(Case what, DType wire_dtype) {
  what.wire_dtype = wire_dtype;
  return what;
}

Case with_root(Case what, int root) {
  what.root = root;
  return what;
}

// On three ranks, for short and for long buffers.
std::vector<Disagreement> disagreements() {
  std::vector<Disagreement> all;
  for (const std::size_t n : {3, 3000, 90'000}) {
    const std::string size = n == 3 ? "Short" : n == 3000 ? "Middle" : "Long";
    const auto add = [&](const std::string& name, const Case& usual, const Case& other,
                         const std::string& usual_words, const std::string& other_words) {
      all.push_back({name + size, usual, other, usual_words, other_words});
    };
    const Case reduce_all = plain(OpKind::kAllReduce, DType::kFloat32, {n});
    add("Kind", reduce_all, plain(OpKind::kReduceScatter, DType::kFloat32, {n, n, n}),
        "all_reduce(float32", "reduce_scatter(float32");
    add("KindBarrier", reduce_all, plain(OpKind::kBarrier, DType::kFloat32, {}), "all_reduce(",
        "barrier");
    add("DType", reduce_all, plain(OpKind::kAllReduce, DType::kInt32, {n}), "float32", "int32");
    add("Count", reduce_all, plain(OpKind::kAllReduce, DType::kFloat32, {n + 1}),
        join(n, " elements"), join(n + 1, " elements"));
    add("CountAcrossWays", plain(OpKind::kAllReduce, DType::kFloat32, {1}),
        plain(OpKind::kAllReduce, DType::kFloat32, {n + 1}), "1 elements",
        join(n + 1, " elements"));
    add("Op", reduce_all, with_op(reduce_all, ReduceOp::kMax), "sum", "max");
    const Case as_bfloat16 = with_wire_dtype(reduce_all, DType::kBFloat16);
    add("WireDType", reduce_all, as_bfloat16, "all_reduce(float32, ",
        "all_reduce(float32 travelling as bfloat16, ");
    add("OtherWireDType", as_bfloat16, with_wire_dtype(reduce_all, DType::kFloat16),
        "travelling as bfloat16", "travelling as float16");
    const Case to_root = plain(OpKind::kReduce, DType::kFloat32, {n});
    add("Root", to_root, with_root(to_root, 2), "root 0", "root 2");
    const Case gather = plain(OpKind::kGather, DType::kFloat32, {n, n, n});
    add("GatherRoot", gather, with_root(gather, 1), "root 0", "root 1");
    add("AllGatherBlocks", plain(OpKind::kAllGather, DType::kFloat32, {n, n, n}),
        plain(OpKind::kAllGather, DType::kFloat32, {n, n + 2, n}), join(n), join(n + 2));
    add("ReduceScatterBlocks", plain(OpKind::kReduceScatter, DType::kFloat32, {n, n, n}),
        plain(OpKind::kReduceScatter, DType::kFloat32, {n, n, n + 4}), join(n), join(n + 4));
  }
  return all;
}

using MismatchParameters = std::tuple<Disagreement, AlgorithmChoice, Placement>;

class NativeMismatch : public ::testing::TestWithParam<MismatchParameters> {};

TEST_P(NativeMismatch, IsNamedOnEveryRankAtOnceAndNothingIsTouched) {
  const auto& [disagreement, algorithm, placement] = GetParam();
  const PreparedCase usual = prepare(disagreement.usual, 3, SummationOrder::kRanks);
  const PreparedCase other = prepare(disagreement.other, 3, SummationOrder::kRanks);
  Environment environment = test_environment();
  environment.algorithm = algorithm;
  const auto errors = collect_errors(
      3,
      [&, placement = placement](RankOfTest& self) {
        const MemoryPtr heap = self.communicator->allocate(std::size_t{4} << 20, Device{});
        CaseBuffers buffers(std::span(static_cast<std::byte*>(heap->data()), heap->bytes()));
        const PreparedCase& mine = self.rank == 1 ? other : usual;
        const Operation operation = buffers.lay_out(mine, self.rank, placement);
        std::vector<std::vector<std::byte>> before;
        const auto contents = [&operation] {
          std::vector<std::vector<std::byte>> all;
          for (const auto* list : {&operation.inputs, &operation.outputs}) {
            for (const Buffer& buffer : *list) {
              const auto* data = static_cast<const std::byte*>(buffer.data);
              all.emplace_back(data, data + buffer.bytes());
            }
          }
          return all;
        };
        before = contents();
        self.communicator->run(barrier());
        const auto start = Clock::now();
        try {
          self.communicator->run(operation);
          // Only who learns nothing from the others may get through: it learns at its next call.
          self.communicator->run(barrier());
        } catch (...) {
          EXPECT_LT(Clock::now() - start, kAtOnce);
          EXPECT_EQ(contents(), before) << "rank " << self.rank << ": data was touched";
          throw;
        }
      },
      environment);
  for (const auto& error : errors) {
    ASSERT_NE(error, nullptr);
    const ErrorDescription what = describe(error);
    EXPECT_EQ(what.kind, ErrorKind::kMismatch) << what.message;
    EXPECT_PRED2(contains, what.message, "rank 1 called");
    EXPECT_PRED2(contains, what.message, disagreement.usual_words);
    EXPECT_PRED2(contains, what.message, disagreement.other_words);
  }
}

INSTANTIATE_TEST_SUITE_P(Direct, NativeMismatch,
                         ::testing::Combine(::testing::ValuesIn(disagreements()),
                                            ::testing::Values(AlgorithmChoice::kAuto),
                                            ::testing::Values(Placement::kOrdinary,
                                                              Placement::kHeap)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + to_string(std::get<2>(info.param));
                         });
INSTANTIATE_TEST_SUITE_P(Ring, NativeMismatch,
                         ::testing::Combine(::testing::ValuesIn(disagreements()),
                                            ::testing::Values(AlgorithmChoice::kRing),
                                            ::testing::Values(Placement::kOrdinary)),
                         [](const auto& info) { return std::get<0>(info.param).name; });

// A root that writes and goes may be through before anybody disagrees; it learns at its next call.
TEST(NativeFailureTest, RootThatHasLeftLearnsOfAMismatchAtItsNextCall) {
  const auto errors = collect_errors(3, [](RankOfTest& self) {
    std::vector<int> values(self.rank == 2 ? 11 : 10, self.rank);
    try {
      self.communicator->run(broadcast(values, 0, self.rank == 0));
      self.communicator->run(barrier());
    } catch (...) {
      EXPECT_EQ(values, std::vector<int>(values.size(), self.rank));
      throw;
    }
  });
  for (const auto& error : errors) {
    ASSERT_NE(error, nullptr);
    EXPECT_EQ(describe(error).kind, ErrorKind::kMismatch) << describe(error).message;
    EXPECT_PRED2(contains, describe(error).message, "10 elements");
    EXPECT_PRED2(contains, describe(error).message, "11 elements");
  }
}

// Both have deposited before they know: never in one place, in whatever round that is.
TEST(NativeFailureTest, TwoRanksMayDisagreeInAnyRound) {
  for (std::uint64_t rounds = 0; rounds < 2 * kTransitSlots; ++rounds) {
    const auto errors = collect_errors(2, [rounds](RankOfTest& self) {
      std::vector<int> values(1'000, self.rank);
      for (std::uint64_t round = 0; round < rounds; ++round) {
        self.communicator->run(all_reduce(values));
      }
      const std::vector<int> before = values;
      try {
        self.communicator->run(self.rank == 0 ? all_reduce(values) : broadcast(values, 1, true));
        self.communicator->run(barrier());
      } catch (...) {
        EXPECT_EQ(values, before) << "data was touched after " << rounds << " rounds";
        throw;
      }
    });
    for (const auto& error : errors) {
      ASSERT_NE(error, nullptr);
      EXPECT_EQ(describe(error).kind, ErrorKind::kMismatch) << describe(error).message;
    }
  }
}

TEST(NativeFailureTest, PairThatDisagreesInAllToAllFailsEverybody) {
  const auto errors = collect_errors(3, [](RankOfTest& self) {
    std::vector<int> out(30, self.rank);
    std::vector<int> in(40, -1);
    Operation operation;
    operation.kind = OpKind::kAllToAll;
    for (std::size_t peer = 0; peer < 3; ++peer) {
      operation.inputs.push_back({out.data() + 10 * peer, 10, DType::kInt32});
      // Rank 2 expects one element too many from rank 0.
      const std::size_t count = self.rank == 2 && peer == 0 ? 11 : 10;
      operation.outputs.push_back({in.data() + 12 * peer, count, DType::kInt32});
    }
    self.communicator->run(operation);
    self.communicator->run(barrier());
  });
  for (const auto& error : errors) {
    ASSERT_NE(error, nullptr);
    EXPECT_EQ(describe(error).kind, ErrorKind::kMismatch) << describe(error).message;
    EXPECT_PRED2(contains, describe(error).message, "from rank 0 to rank 2");
  }
}

}  // namespace
}  // namespace pydist::testing
