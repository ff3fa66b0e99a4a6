// Every collective of the native engine against its promise, bit by bit: kinds, dtypes, ops,
// counts, ranks, algorithms, where the buffers lie, in place or not, flat or in a list, equal or
// ragged.
//
// The expected bits do not depend on the chunk size, so equality for all chunkings is checked by
// running with small chunks (which cross chunk borders at small counts) and with the default.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <thread>
#include <tuple>

#include "collective_case.h"
#include "collectives/shared_memory/route.h"
#include "ranks.h"
#include "run_cases.h"

namespace pydist::testing {
namespace {

constexpr OpKind kDataKinds[] = {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather,
                                 OpKind::kBroadcast, OpKind::kReduce,        OpKind::kGather,
                                 OpKind::kScatter,   OpKind::kAllToAll};
constexpr std::size_t kCounts[] = {0, 1, 2, 3, 5, 17, 100, 1023, 4099};

class NativeConformance : public ::testing::TestWithParam<RanksAndRoad> {
 protected:
  [[nodiscard]] int size() const { return std::get<0>(GetParam()); }
  [[nodiscard]] AlgorithmChoice algorithm() const { return std::get<1>(GetParam()); }
  [[nodiscard]] Placement placement() const { return std::get<2>(GetParam()); }

  // A case whose further properties follow from `seed`.
  [[nodiscard]] Case make_case(OpKind kind, DType dtype, ReduceOp op, std::size_t count,
                               std::uint64_t seed) const {
    return any_case(kind, dtype, op, size(), count, seed);
  }

  // Runs the cases one after the other on all ranks, and checks each.
  void run(const std::vector<Case>& cases, std::size_t chunk_bytes) const {
    run_cases(cases, size(), algorithm(), placement(), chunk_bytes);
  }
};

TEST_P(NativeConformance, ReducesEveryTypeWithEveryOp) {
  std::vector<Case> cases;
  std::uint64_t seed = 1;
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kReduce}) {
    for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
      for (int op = 0; op < kReduceOpCount; ++op) {
        if (!is_supported(static_cast<ReduceOp>(op), static_cast<DType>(dtype))) {
          continue;
        }
        // Two counts each; over the types and ops, all of them.
        for (int i = 0; i < 2; ++i, ++seed) {
          cases.push_back(make_case(kind, static_cast<DType>(dtype), static_cast<ReduceOp>(op),
                                    kCounts[mix(seed) % std::size(kCounts)], seed));
        }
      }
    }
  }
  run(cases, kSmallChunkBytes);
}

TEST_P(NativeConformance, MovesEveryType) {
  std::vector<Case> cases;
  std::uint64_t seed = 1 << 20;
  for (const OpKind kind : kDataKinds) {
    if (is_reduction(kind)) {
      continue;
    }
    for (int dtype = 0; dtype < kDTypeCount; ++dtype, ++seed) {
      cases.push_back(make_case(kind, static_cast<DType>(dtype), ReduceOp::kSum,
                                kCounts[mix(seed) % std::size(kCounts)], seed));
    }
  }
  run(cases, kSmallChunkBytes);
}

TEST_P(NativeConformance, TakesEveryCountRootAndLayout) {
  std::vector<Case> cases;
  std::uint64_t seed = 2 << 20;
  for (const OpKind kind : kDataKinds) {
    for (const std::size_t count : kCounts) {
      for (int root = 0; root < (has_root(kind) ? size() : 1); ++root) {
        for (const bool is_in_place : {false, true}) {
          for (const bool is_flat : {true, false}) {
            if (!is_flat && !has_blocks(kind)) {
              continue;
            }
            Case what = make_case(kind, DType::kInt16, ReduceOp::kSum, count, ++seed);
            // The long ones once each: they cost the time of this test.
            if (count > 1000 && (seed % 4 != 0 || (root != 0 && root != size() - 1))) {
              continue;
            }
            what.root = root;
            what.is_in_place = is_in_place;
            what.is_flat = is_flat;
            cases.push_back(what);
          }
        }
      }
    }
  }
  run(cases, kSmallChunkBytes);
}

TEST_P(NativeConformance, TakesRaggedBlocks) {
  std::vector<Case> cases;
  std::uint64_t seed = 3 << 20;
  for (const OpKind kind : kDataKinds) {
    if (!has_blocks(kind)) {
      continue;
    }
    for (const std::size_t count : {1, 3, 17, 300, 2500}) {
      for (int i = 0; i < 4; ++i) {
        Case what = make_case(kind, i % 2 == 0 ? DType::kFloat32 : DType::kInt8, ReduceOp::kSum,
                              count, ++seed);
        what.counts = ragged_counts(kind, size(), count, seed);
        what.is_flat = false;
        // Blocks that come and blocks that go are of different sizes.
        what.is_in_place = what.is_in_place && kind != OpKind::kAllToAll;
        cases.push_back(what);
      }
    }
  }
  run(cases, kSmallChunkBytes);
}

TEST_P(NativeConformance, CrossesChunks) {
  std::vector<Case> cases;
  std::uint64_t seed = 4 << 20;
  // Around one chunk, and around as many as are in flight.
  for (const OpKind kind : kDataKinds) {
    const std::size_t lanes =
        is_personal(kind) && size() > 1 ? static_cast<std::size_t>(size() - 1) : 1;
    const std::size_t lane_bytes = kSmallChunkBytes / lanes / kLineBytes * kLineBytes;
    for (const std::size_t chunks : {1, 2, 4, 5, 9}) {
      const std::size_t exact = chunks * lane_bytes / element_size(DType::kBFloat16);
      for (const std::size_t count : {exact - 1, exact, exact + 1}) {
        cases.push_back(make_case(kind, DType::kBFloat16, ReduceOp::kMean, count, ++seed));
      }
    }
  }
  run(cases, kSmallChunkBytes);
}

TEST_P(NativeConformance, MovesMuch) {
  std::vector<Case> cases;
  std::uint64_t seed = 5 << 20;
  for (const OpKind kind : kDataKinds) {
    // Over a mebi of elements in all, and over all limits between the ways to move them.
    const std::size_t lanes = kind == OpKind::kAllToAll || kind == OpKind::kReduceScatter ||
                                      kind == OpKind::kAllGather || kind == OpKind::kGather ||
                                      kind == OpKind::kScatter
                                  ? static_cast<std::size_t>(size())
                                  : 1;
    const bool is_whole = kind == OpKind::kAllReduce;
    for (const std::size_t count :
         {std::size_t{9001}, std::size_t{33000}, (std::size_t{1} << (is_whole ? 20 : 18)) + 7}) {
      cases.push_back(make_case(kind, DType::kFloat32, ReduceOp::kSum, count / lanes + 1, ++seed));
    }
  }
  run(cases, test_environment().chunk_bytes);
}

INSTANTIATE_TEST_SUITE_P(
    Direct, NativeConformance,
    ::testing::Combine(::testing::Values(1, 2, 3, 4, 8), ::testing::Values(AlgorithmChoice::kAuto),
                       ::testing::Values(Placement::kOrdinary, Placement::kHeap, Placement::kMixed,
                                         Placement::kShared, Placement::kSharedMixed,
                                         Placement::kBothHeaps)),
    name_of_ranks_and_road);
// The ring looks at no buffer's place.
INSTANTIATE_TEST_SUITE_P(Ring, NativeConformance,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 8),
                                            ::testing::Values(AlgorithmChoice::kRing),
                                            ::testing::Values(Placement::kMixed)),
                         name_of_ranks_and_road);

// -- beyond the matrix ----------------------------------------------------------------------------

TEST(NativeConformanceTest, SixtyFourRanks) {
  constexpr int kRanks = 64;
  for (const AlgorithmChoice algorithm : {AlgorithmChoice::kAuto, AlgorithmChoice::kRing}) {
    std::vector<PreparedCase> cases;
    std::uint64_t seed = 6 << 20;
    for (const OpKind kind : kDataKinds) {
      for (const std::size_t count : {1, 700}) {
        Case what;
        what.kind = kind;
        what.counts =
            equal_counts(kind, kRanks, kind == OpKind::kAllToAll ? count / 50 + 1 : count);
        what.root = kRanks - 2;
        what.seed = ++seed;
        cases.push_back(prepare(what, kRanks, order_of(algorithm)));
      }
    }
    Environment environment = test_environment();
    environment.algorithm = algorithm;
    environment.chunk_bytes = kSmallChunkBytes;
    run_ranks(
        kRanks,
        [&](RankOfTest& self) {
          CaseBuffers buffers({});
          for (const PreparedCase& each : cases) {
            self.communicator->run(buffers.lay_out(each, self.rank, Placement::kOrdinary));
            ASSERT_EQ(buffers.check(), "") << "rank " << self.rank << ", " << each.what.to_string();
          }
          self.communicator->run(barrier());
        },
        environment);
  }
}

TEST(NativeConformanceTest, TakesAnyLimitOfOneShots) {
  constexpr int kRanks = 3;
  std::vector<Case> cases;
  std::uint64_t seed = 7 << 20;
  for (const OpKind kind : kDataKinds) {
    for (const std::size_t count : {9, 700, 5000, 70'001}) {
      Case what;
      what.kind = kind;
      what.dtype = DType::kBFloat16;
      what.counts = equal_counts(kind, kRanks, count);
      what.seed = ++seed;
      cases.push_back(what);
    }
  }
  // None but what rides in a post, and all that fit a chunk.
  for (const std::size_t limit : {std::size_t{0}, std::size_t{1} << 24}) {
    run_cases(cases, kRanks, AlgorithmChoice::kAuto, Placement::kMixed,
              test_environment().chunk_bytes, {}, limit);
  }
}

// The expected bits above come from the kernels; these come from arithmetic.
TEST(NativeConformanceTest, RoundsShortFloatsOnce) {
  for (const AlgorithmChoice algorithm : {AlgorithmChoice::kAuto, AlgorithmChoice::kRing}) {
    for (const int size : {3, 4, 8}) {
      Environment environment = test_environment();
      environment.algorithm = algorithm;
      run_ranks(
          size,
          [&](RankOfTest& self) {
            // bfloat16 has 8 bits: 256 + 1 rounds to 256 every time, 256 + 2 does not.
            constexpr std::uint16_t k256 = 0x4380;
            constexpr std::uint16_t kOne = 0x3F80;
            std::vector<std::uint16_t> values(777, self.rank == 0 ? k256 : kOne);
            self.communicator->run(all_reduce(values));
            // 258, 259 (halfway: to the even 260), 263 (halfway: to the even 264).
            const std::uint16_t expected = size == 3 ? 0x4381 : size == 4 ? 0x4382 : 0x4384;
            EXPECT_EQ(values, std::vector<std::uint16_t>(777, expected));
          },
          environment);
    }
  }
}

TEST(NativeConformanceTest, SumsAreCloseToExactOnes) {
  constexpr int kRanks = 4;
  constexpr std::size_t kCount = 10'007;
  const auto value = [](int rank, std::size_t i) {
    return static_cast<float>(std::sin(static_cast<double>(i) * (rank + 1)));
  };
  for (const AlgorithmChoice algorithm : {AlgorithmChoice::kAuto, AlgorithmChoice::kRing}) {
    Environment environment = test_environment();
    environment.algorithm = algorithm;
    run_ranks(
        kRanks,
        [&](RankOfTest& self) {
          std::vector<float> values(kCount);
          for (std::size_t i = 0; i < kCount; ++i) {
            values[i] = value(self.rank, i);
          }
          self.communicator->run(all_reduce(values, ReduceOp::kMean));
          for (std::size_t i = 0; i < kCount; ++i) {
            double exact = 0;
            double size_of_terms = 0;
            for (int rank = 0; rank < kRanks; ++rank) {
              exact += value(rank, i) / double{kRanks};
              size_of_terms += std::abs(value(rank, i));
            }
            ASSERT_NEAR(values[i], exact, 1.2e-7 * size_of_terms) << i;
          }
        },
        environment);
  }
}

// -- soak -----------------------------------------------------------------------------------------
// Random operations back to back, without barriers: whatever a fast rank overwrites too early, a
// slow one reads wrong (Note [Reuse] in collectives/group.h). PYDIST_TEST_SOAK multiplies the
// number of operations.

int soak_factor() {
  const char* factor = std::getenv("PYDIST_TEST_SOAK");
  return factor == nullptr ? 1 : std::atoi(factor);
}

Case random_case(int size, std::uint64_t seed) {
  std::uint64_t chance = mix(seed ^ 0x50A4);
  const auto next = [&chance](std::uint64_t below) {
    chance = mix(chance);
    return chance % below;
  };
  constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kUInt8, DType::kInt64};
  // Inline, one-shot, pipelined; more of the short ones, where ranks can run far ahead.
  constexpr std::size_t kMost[] = {3, 10, 10, 100, 1000, 3000};
  Case what;
  what.kind = kDataKinds[next(std::size(kDataKinds))];
  if (next(4) == 0) {
    what.kind = OpKind::kBroadcast;
  }
  what.dtype = kTypes[next(std::size(kTypes))];
  what.op = next(2) == 0 ? ReduceOp::kSum : ReduceOp::kMax;
  if (is_reduction(what.kind) && what.dtype == DType::kFloat32 && what.op == ReduceOp::kSum &&
      next(2) == 0) {
    what.wire_dtype = DType::kBFloat16;
  }
  what.root = has_root(what.kind) ? static_cast<int>(next(static_cast<std::uint64_t>(size))) : 0;
  const std::size_t count = next(kMost[next(std::size(kMost))]);
  const bool is_ragged = has_blocks(what.kind) && next(4) == 0;
  what.counts = is_ragged ? ragged_counts(what.kind, size, count, seed)
                          : equal_counts(what.kind, size, count);
  what.is_flat = !is_ragged && next(3) != 0;
  what.is_in_place = next(2) == 0 && !(is_ragged && what.kind == OpKind::kAllToAll);
  if (!has_blocks(what.kind)) {
    what.is_flat = true;
  }
  what.seed = seed;
  return what;
}

void soak(int size, AlgorithmChoice algorithm, int operations, std::uint64_t seed) {
  constexpr std::size_t kWindow = 12;  // more than kPostDepth
  std::vector<PreparedCase> cases;
  for (int i = 0; i < operations; ++i) {
    cases.push_back(prepare(random_case(size, seed + static_cast<std::uint64_t>(i)), size,
                            order_of(algorithm)));
  }
  Environment environment = test_environment();
  environment.algorithm = algorithm;
  environment.chunk_bytes = kSmallChunkBytes;
  run_ranks(
      size,
      [&](RankOfTest& self) {
        constexpr std::size_t kPartBytes = std::size_t{1} << 19;
        const MemoryPtr heap = self.communicator->allocate(kWindow * kPartBytes, Device{});
        std::vector<std::unique_ptr<CaseBuffers>> buffers;
        std::vector<WorkPtr> works(kWindow);
        std::vector<const PreparedCase*> under_way(kWindow);
        for (std::size_t i = 0; i < kWindow; ++i) {
          buffers.push_back(std::make_unique<CaseBuffers>(
              std::span(static_cast<std::byte*>(heap->data()) + i * kPartBytes, kPartBytes)));
        }
        // This rank's own chance: how it calls, and how it dawdles.
        std::uint64_t chance = mix(seed + 77 * static_cast<std::uint64_t>(self.rank));
        bool is_wrong = false;
        const auto check = [&](std::size_t slot, const PreparedCase& each) {
          const std::string wrong = buffers[slot]->check();
          if (!wrong.empty()) {
            is_wrong = true;
            ADD_FAILURE() << "rank " << self.rank << ", seed " << each.what.seed << ", "
                          << each.what.to_string() << ": " << wrong;
          }
        };
        const auto finish = [&](std::size_t slot) {
          if (works[slot] != nullptr) {
            works[slot]->wait();
            works[slot] = nullptr;
            check(slot, *under_way[slot]);
          }
        };
        for (std::size_t i = 0; i < cases.size() && !is_wrong; ++i) {
          chance = mix(chance);
          const std::size_t slot = i % kWindow;
          finish(slot);
          under_way[slot] = &cases[i];
          Operation operation = buffers[slot]->lay_out(cases[i], self.rank, Placement::kMixed);
          if (chance % 8 < 3) {
            works[slot] = self.communicator->submit(std::move(operation));
          } else {
            self.communicator->run(std::move(operation));
            check(slot, cases[i]);
          }
          if ((chance >> 8) % 16 == 0) {
            std::this_thread::yield();
          } else if ((chance >> 8) % 256 == 1) {
            std::this_thread::sleep_for(std::chrono::microseconds((chance >> 16) % 500));
          }
        }
        for (std::size_t slot = 0; slot < kWindow && !is_wrong; ++slot) {
          finish(slot);
        }
        self.communicator->run(barrier());
      },
      environment);
}

class NativeSoak : public ::testing::TestWithParam<std::tuple<int, AlgorithmChoice>> {};

TEST_P(NativeSoak, RandomOperationsBackToBack) {
  for (int turn = 0; turn < soak_factor() && !HasFailure(); ++turn) {
    soak(std::get<0>(GetParam()), std::get<1>(GetParam()), 2000,
         1'000'000 * static_cast<std::uint64_t>(turn + 1));
  }
}

INSTANTIATE_TEST_SUITE_P(All, NativeSoak,
                         ::testing::Combine(::testing::Values(2, 3, 4),
                                            ::testing::Values(AlgorithmChoice::kAuto,
                                                              AlgorithmChoice::kRing)),
                         [](const auto& info) {
                           return join(
                               std::get<0>(info.param), "Ranks",
                               std::get<1>(info.param) == AlgorithmChoice::kRing ? "Ring" : "Auto");
                         });

// A root waits for nobody, so only the depth of the posts and of the transit stops it.
TEST(NativeConformanceTest, RootRunsAheadOfSlowRanks) {
  constexpr int kOperations = 60;
  for (const std::size_t count : {5, 700, 5000}) {
    Environment environment = test_environment();
    environment.chunk_bytes = kSmallChunkBytes;
    run_ranks(
        3,
        [&](RankOfTest& self) {
          for (int i = 0; i < kOperations; ++i) {
            if (self.rank == 2 && i % 20 == 0) {
              std::this_thread::sleep_for(std::chrono::milliseconds(10));
            }
            std::vector<int> values(count, self.rank == 0 ? i : -1);
            self.communicator->run(broadcast(values, 0, self.rank == 0));
            ASSERT_EQ(values, std::vector<int>(count, i)) << "rank " << self.rank;
          }
        },
        environment);
  }
}

}  // namespace
}  // namespace pydist::testing
