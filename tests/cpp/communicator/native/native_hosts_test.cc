// Groups whose ranks are on several hosts: every collective against the same promise as on one
// host, bit by bit, in many splits of the ranks over hosts; messages, sub-groups, and what becomes
// of the others when a rank goes.

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <tuple>

#include "collective_case.h"
#include "collectives/group_segment.h"
#include "communicator/native/native_communicator.h"
#include "memory/file_descriptor.h"
#include "rank_processes.h"
#include "ranks.h"
#include "run_cases.h"

namespace pydist::testing {
namespace {

constexpr OpKind kKinds[] = {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather,
                             OpKind::kBroadcast, OpKind::kReduce,        OpKind::kGather,
                             OpKind::kScatter,   OpKind::kAllToAll};

// What has so many bytes fits a segment.
constexpr std::size_t kMiddlingChunkBytes = std::size_t{64} << 10;

constexpr std::size_t kNeverInRounds = 1 << 20;
constexpr AlgorithmChoice kAuto = AlgorithmChoice::kAuto;

struct Split {
  HostsOfRanks hosts;
  AlgorithmChoice algorithm = AlgorithmChoice::kAuto;
  bool in_rounds = false;

  [[nodiscard]] int size() const { return static_cast<int>(hosts.size()); }
};

std::string name_of_split(const ::testing::TestParamInfo<Split>& info) {
  std::string name = "hosts";
  for (const int host : info.param.hosts) {
    name += std::to_string(host);
  }
  return name + (info.param.algorithm == AlgorithmChoice::kRing ? "_ring" : "") +
         (info.param.in_rounds ? "_in_rounds" : "");
}

class NativeHosts : public ::testing::TestWithParam<Split> {
 protected:
  void run(const std::vector<Case>& cases, std::size_t chunk_bytes,
           Placement placement = Placement::kMixed,
           std::optional<std::size_t> one_shot_bytes = std::nullopt) const {
    run_cases(cases, GetParam().size(), GetParam().algorithm, placement, chunk_bytes,
              GetParam().hosts, one_shot_bytes, GetParam().in_rounds ? 2 : kNeverInRounds);
  }
};

TEST_P(NativeHosts, ReducesEveryTypeWithEveryOp) {
  std::vector<Case> cases;
  std::uint64_t seed = 1;
  constexpr std::size_t kCounts[] = {0, 1, 3, 17, 100, 1023, 4099};
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kReduce}) {
    for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
      for (int op = 0; op < kReduceOpCount; ++op) {
        if (is_supported(static_cast<ReduceOp>(op), static_cast<DType>(dtype))) {
          ++seed;
          cases.push_back(any_case(kind, static_cast<DType>(dtype), static_cast<ReduceOp>(op),
                                   GetParam().size(), kCounts[mix(seed) % std::size(kCounts)],
                                   seed));
        }
      }
    }
  }
  run(cases, kSmallChunkBytes);
}

TEST_P(NativeHosts, MovesEveryKindAtEverySize) {
  std::vector<Case> cases;
  std::uint64_t seed = 1 << 20;
  // In the post, ahead of it, in one segment and in many.
  for (const OpKind kind : kKinds) {
    for (const std::size_t count : {0, 1, 9, 60, 700, 5000, 70'001}) {
      for (const int root : {0, GetParam().size() - 1}) {
        if (root != 0 && !has_root(kind)) {
          continue;
        }
        Case what =
            any_case(kind, DType::kFloat32, ReduceOp::kSum, GetParam().size(), count, ++seed);
        what.root = root;
        cases.push_back(what);
      }
    }
  }
  run(cases, kMiddlingChunkBytes);
}

TEST_P(NativeHosts, TakesAnyLimitOfOneShots) {
  std::vector<Case> cases;
  std::uint64_t seed = 2 << 20;
  for (const OpKind kind : kKinds) {
    for (const std::size_t count : {9, 700, 5000, 70'001}) {
      cases.push_back(
          any_case(kind, DType::kBFloat16, ReduceOp::kSum, GetParam().size(), count, ++seed));
    }
  }
  // None but what rides in a post, and all that fit a chunk.
  for (const std::size_t limit : {std::size_t{0}, std::size_t{1} << 24}) {
    run(cases, test_environment().chunk_bytes, Placement::kMixed, limit);
  }
}

TEST_P(NativeHosts, TakesRaggedBlocks) {
  std::vector<Case> cases;
  std::uint64_t seed = 3 << 20;
  for (const OpKind kind : kKinds) {
    for (const std::size_t count : {1, 17, 300, 2500, 90'000}) {
      if (has_blocks(kind)) {
        Case what =
            any_case(kind, DType::kFloat32, ReduceOp::kSum, GetParam().size(), count, ++seed);
        what.counts = ragged_counts(kind, GetParam().size(), count, seed);
        what.is_flat = false;
        what.is_in_place = what.is_in_place && kind != OpKind::kAllToAll;
        cases.push_back(what);
      }
    }
  }
  run(cases, kSmallChunkBytes);
}

// Where all ranks of a host have their buffers there, and (in the tests above) where some have.
TEST_P(NativeHosts, ReducesOnTheHeapsOfItsHosts) {
  std::vector<Case> cases;
  std::uint64_t seed = 5 << 20;
  for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
    for (int op = 0; op < kReduceOpCount; ++op) {
      if (is_supported(static_cast<ReduceOp>(op), static_cast<DType>(dtype))) {
        ++seed;
        cases.push_back(any_case(OpKind::kAllReduce, static_cast<DType>(dtype),
                                 static_cast<ReduceOp>(op), GetParam().size(),
                                 5'000 + mix(seed) % 2'000, seed));
      }
    }
  }
  for (const bool is_in_place : {false, true}) {
    cases.push_back(any_case(OpKind::kAllReduce, DType::kFloat32, ReduceOp::kSum, GetParam().size(),
                             200'003, ++seed));
    cases.back().is_in_place = is_in_place;
  }
  for (const DType wire : {DType::kBFloat16, DType::kFloat16}) {
    cases.push_back(any_case(OpKind::kAllReduce, DType::kFloat32, ReduceOp::kMean,
                             GetParam().size(), 70'001, ++seed));
    cases.back().wire_dtype = wire;
  }
  run(cases, kSmallChunkBytes, Placement::kHeap);
}

// More segments than there are slots, also where they travel in half as many bytes.
TEST_P(NativeHosts, TakesManySegments) {
  const auto count = static_cast<std::size_t>(40'000 * GetParam().size()) + 3;
  std::vector<Case> cases{any_case(OpKind::kAllReduce, DType::kFloat32, ReduceOp::kSum,
                                   GetParam().size(), count, 6 << 20)};
  for (const DType wire : {DType::kBFloat16, DType::kFloat16}) {
    cases.push_back(cases.front());
    cases.back().wire_dtype = wire;
  }
  run(cases, kSmallChunkBytes);
}

INSTANTIATE_TEST_SUITE_P(Splits, NativeHosts,
                         ::testing::Values(Split{{0, 1}}, Split{{0, 1, 2}}, Split{{0, 0, 1}},
                                           Split{{0, 1, 0}}, Split{{0, 0, 1, 1}},
                                           Split{{0, 1, 0, 1}}, Split{{0, 1, 1, 1}},
                                           Split{{0, 0, 0, 1, 2, 2}},
                                           Split{{0, 1, 2, 3, 4, 5, 6, 7}},
                                           Split{{0, 1, 2, 3, 4}, kAuto, /*in_rounds=*/true},
                                           Split{{0, 1, 0, 1, 1}, kAuto, /*in_rounds=*/true},
                                           Split{{0, 1}, AlgorithmChoice::kRing},
                                           Split{{0, 0, 1, 1, 2}, AlgorithmChoice::kRing}),
                         name_of_split);

// Its sender is done with a small message while the connection is still being made.
TEST(NativeHostsTest, AMessageOfARankThatLeavesAtOnceArrives) {
  for (int round = 0; round < 10; ++round) {
    run_ranks(4,
              [](RankOfTest& self) {
                std::vector<int> values(1, 7);
                if (self.rank == 0) {
                  self.communicator->run(send_to(3, 1, values));
                  self.communicator = nullptr;
                } else if (self.rank == 3) {
                  values[0] = 0;
                  self.communicator->run(receive_from(0, 1, values));
                  EXPECT_EQ(values[0], 7);
                }
              },
              test_environment(), {0, 0, 1, 1});
  }
}

TEST(NativeHostsTest, HostsMeetByIpv6) {
  if (FileDescriptor(::socket(AF_INET6, SOCK_STREAM, 0)).get() < 0) {
    GTEST_SKIP() << "this machine has no IPv6";
  }
  const auto errors = run_threads(
      2,
      [](RankOfTest& self) {
        NativeOptions options{"world", test_environment()};
        options.environment.host_id = self.host_id;
        options.address = "::1";
        const CommunicatorPtr group =
            create_native_communicator(self.store, self.rank, self.size, options, {self.endpoint});
        EXPECT_TRUE(contains(self.endpoint->network()->card().addresses.at(0), "::1 port "));
        std::vector<int> values(100'000, self.rank + 1);
        group->run(all_reduce(values));
        EXPECT_EQ(values, std::vector<int>(100'000, 3));
      },
      test_environment(), {0, 1});
  for (const auto& error : errors) {
    EXPECT_EQ(error, nullptr) << describe(error).message;
  }
}

// They are done when they have been announced, for which a lane has room whatever was heard before:
// of that, its sender is told now and then.
TEST(NativeHostsTest, SixteenShortMessagesGoBeforeAnybodyAsks) {
  constexpr int kAhead = 16;
  run_ranks(2,
            [](RankOfTest& self) {
              for (int before = 0; before < 10; ++before) {
                std::vector<int> values(3, 7);
                const auto exchange = [&](std::uint64_t tag, int count) {
                  for (int i = 0; i < count; ++i) {
                    if (self.rank == 1) {
                      values.assign(3, 0);
                    }
                    self.communicator->run(self.rank == 0 ? send_to(1, tag, values)
                                                          : receive_from(0, tag, values));
                    ASSERT_EQ(values, std::vector<int>(3, 7));
                  }
                };
                exchange(1, before);
                const std::string key = join("ahead/", before);
                if (self.rank == 1) {
                  static_cast<void>(self.store->get(key, Deadline::in(std::chrono::seconds(30))));
                }
                exchange(2, kAhead);
                if (self.rank == 0) {
                  self.store->set(key, "");
                }
              }
            },
            test_environment(), {0, 1});
}

TEST(NativeHostsTest, MessagesOfAllSizesCrossHosts) {
  run_ranks(3,
            [](RankOfTest& self) {
              const int next = (self.rank + 1) % self.size;
              const int previous = (self.rank + self.size - 1) % self.size;
              for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{8},
                                              std::size_t{1000}, std::size_t{400'003}}) {
                for (std::uint64_t tag = 0; tag < 20; ++tag) {
                  std::vector<float> sent(count, static_cast<float>(self.rank * 100 + int(tag)));
                  std::vector<float> received(count, -1.0f);
                  const WorkPtr sending = self.communicator->submit(send_to(next, tag, sent));
                  self.communicator->run(receive_from(previous, tag, received));
                  sending->wait();
                  ASSERT_EQ(received, std::vector<float>(
                                          count, static_cast<float>(previous * 100 + int(tag))));
                }
              }
            },
            test_environment(), {0, 0, 1});
}

TEST(NativeHostsTest, SubgroupsSpanHostsInAnyOrder) {
  run_ranks(4,
            [](RankOfTest& self) {
              const std::vector<std::vector<int>> groups = {{3, 0}, {2, 1}, {1, 0, 3, 2}};
              for (const std::vector<int>& ranks : groups) {
                const auto place = std::find(ranks.begin(), ranks.end(), self.rank);
                if (place == ranks.end()) {
                  continue;
                }
                const CommunicatorPtr group = self.communicator->split(ranks);
                for (const std::size_t count : {3, 100'000}) {
                  std::vector<int> values(count, 1 + self.rank);
                  group->run(all_reduce(values));
                  int sum = 0;
                  for (const int rank : ranks) {
                    sum += 1 + rank;
                  }
                  ASSERT_EQ(values, std::vector<int>(count, sum));
                }
                std::vector<int> root(5, self.rank);
                group->run(broadcast(root, 0, place == ranks.begin()));
                ASSERT_EQ(root, std::vector<int>(5, ranks[0]));
              }
            },
            test_environment(), {0, 0, 1, 1});
}

TEST(NativeHostsTest, ADisagreementIsToldOnEveryHost) {
  const auto errors = collect_errors(4,
                                     [](RankOfTest& self) {
                                       std::vector<float> values(self.rank == 3 ? 70'000 : 80'000);
                                       self.communicator->run(all_reduce(values));
                                     },
                                     test_environment(), {0, 0, 1, 1});
  for (const auto& error : errors) {
    EXPECT_EQ(describe(error).kind, ErrorKind::kMismatch) << describe(error).message;
  }
}

TEST(NativeHostsTest, ARankThatLeavesIsNamedOnEveryHost) {
  const auto errors = collect_errors(4,
                                     [](RankOfTest& self) {
                                       std::vector<float> values(70'000);
                                       self.communicator->run(all_reduce(values));
                                       if (self.rank == 2) {
                                         self.communicator->shutdown();
                                         return;
                                       }
                                       self.communicator->run(all_reduce(values));
                                     },
                                     test_environment(), {0, 0, 1, 1});
  for (const int rank : {0, 1, 3}) {
    const ErrorDescription error = describe(errors[static_cast<std::size_t>(rank)]);
    EXPECT_EQ(error.kind, ErrorKind::kPeerLost) << error.message;
    EXPECT_EQ(error.blame.ranks, std::vector<int>{2}) << error.message;
  }
}

TEST(NativeHostsTest, AnErrorOnOneHostEndsTheWaitOnAll) {
  const auto errors = collect_errors(4,
                                     [](RankOfTest& self) {
                                       if (self.rank == 3) {
                                         self.communicator->abort(Aborted("enough"));
                                         return;
                                       }
                                       std::vector<float> values(3);
                                       self.communicator->run(all_reduce(values));
                                     },
                                     test_environment(), {0, 0, 1, 1});
  for (const int rank : {0, 1, 2}) {
    const ErrorDescription error = describe(errors[static_cast<std::size_t>(rank)]);
    EXPECT_EQ(error.kind, ErrorKind::kAborted) << error.message;
    EXPECT_TRUE(contains(error.message, "enough")) << error.message;
  }
}

TEST(NativeHostsTest, ALateRankIsNamedAcrossHosts) {
  const auto errors =
      collect_errors(4,
                     [](RankOfTest& self) {
                       std::vector<float> values(3);
                       self.communicator->run(all_reduce(values));
                       if (self.rank != 3) {
                         self.communicator->run(with_timeout(
                             all_reduce(values), std::chrono::milliseconds(500 * kSlowdown)));
                       } else {
                         std::this_thread::sleep_for(std::chrono::seconds(2 * kSlowdown));
                       }
                     },
                     test_environment(), {0, 0, 1, 1});
  for (const int rank : {0, 1, 2}) {
    const ErrorDescription error = describe(errors[static_cast<std::size_t>(rank)]);
    EXPECT_EQ(error.kind, ErrorKind::kTimeout) << error.message;
    EXPECT_EQ(error.blame.ranks, std::vector<int>{3}) << error.message;
    EXPECT_TRUE(contains(error.message, "left all_reduce #1")) << error.message;
  }
}

// Rank 2 drives no connection: rank 1 reads its input and writes its output. Once it has left, its
// memory is its own, and nobody may go on as if it had taken part. Processes: what rank 1 has read
// in the moment of the leave is thrown away, but in one process it would be a race.
const RankProgram leaves_amid("leaves_amid", [](RankOfTest& self, const std::string& pause_us) {
  constexpr std::size_t kCount = (std::size_t{4} << 20) / kSlowdown;
  const MemoryPtr memory = self.communicator->allocate(kCount * sizeof(float), Device{});
  const std::span<float> values(static_cast<float*>(memory->data()), kCount);
  std::fill(values.begin(), values.end(), static_cast<float>(self.rank + 1));
  Operation operation;
  operation.kind = OpKind::kAllReduce;
  operation.inputs = {{values.data(), kCount, DType::kFloat32}};
  operation.outputs = operation.inputs;
  self.communicator->run(barrier());
  const WorkPtr work = self.communicator->submit(operation);
  if (self.rank == 2) {
    std::this_thread::sleep_for(std::chrono::microseconds(std::stoi(pause_us)));
    self.communicator->shutdown();
    std::fill(values.begin(), values.end(), 1000.0F);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    EXPECT_EQ(std::count(values.begin(), values.end(), 1000.0F), kCount);
    return;
  }
  work->wait();
  EXPECT_EQ(std::count(values.begin(), values.end(), 6.0F), kCount);
});

TEST(NativeHostsTest, ARankThatLeavesAmidAnAllReduceOnTheHeapSpoilsNoSum) {
  int lost = 0;
  for (const int pause_us : {0, 200, 1000, 3000}) {
    RankProcesses ranks("leaves_amid", 3, join(pause_us), {0, 1, 1});
    for (int rank = 0; rank < 3; ++rank) {
      const RankOutcome outcome = ranks.wait(rank);
      EXPECT_TRUE(outcome.has_ended_by_itself);
      if (outcome.error) {
        ++lost;
        EXPECT_NE(rank, 2);
        EXPECT_EQ(outcome.error->kind, ErrorKind::kPeerLost) << outcome.error->message;
        EXPECT_PRED2(contains, outcome.error->message, "rank 2 (pid ");
      }
    }
  }
  EXPECT_GT(lost, 0) << "rank 2 never left in the middle";
}

// What the ranks tell each other to allocate rides in posts whose places other data has been in.
TEST(NativeHostsTest, AllocatesAfterSmallCollectives) {
  run_ranks(3,
            [](RankOfTest& self) {
              for (int round = 0; round < 3; ++round) {
                for (std::size_t step = 0; step < kPostDepth; ++step) {
                  std::vector<float> values(64, 1.0F);
                  self.communicator->run(all_reduce(values));
                }
                const std::size_t bytes = std::size_t{1} << (20 + round);
                EXPECT_TRUE(self.communicator->allocate(bytes, Device{})->is_symmetric());
              }
            },
            test_environment(), {0, 1, 1});
}

TEST(NativeHostsTest, WhatOneHostRefusesToAllocateNoHostDoes) {
  constexpr std::size_t kTooMuch = std::size_t{1} << 46;
  const auto errors = collect_errors(
      3,
      [](RankOfTest& self) {
        const ErrorDescription error =
            error_of([&] { static_cast<void>(self.communicator->allocate(kTooMuch, Device{})); });
        EXPECT_TRUE(contains(error.message, "rank ")) << error.message;
        // The group goes on, in step.
        EXPECT_TRUE(self.communicator->allocate(1 << 20, Device{})->is_symmetric());
        std::vector<float> values(3, 1.0F);
        self.communicator->run(all_reduce(values));
        EXPECT_EQ(values[2], 3.0F);
      },
      test_environment(), {0, 1, 1});
  for (const std::exception_ptr& error : errors) {
    EXPECT_EQ(error, nullptr) << describe(error).message;
  }
}

TEST(NativeHostsTest, SymmetricMemoryIsThatOfAHost) {
  run_ranks(3,
            [](RankOfTest& self) {
              EXPECT_TRUE(self.communicator->capabilities().symmetric_memory);
              const MemoryPtr memory = self.communicator->allocate(1 << 20, Device{});
              EXPECT_TRUE(memory->is_symmetric());
              // Not all ranks can be reached.
              EXPECT_TRUE(self.communicator->symmetric_addresses(memory->data(), 8).empty());
              auto* values = static_cast<float*>(memory->data());
              std::fill_n(values, 1 << 18, static_cast<float>(self.rank));
              Operation operation;
              operation.kind = OpKind::kAllReduce;
              operation.inputs = {{values, 1 << 18, DType::kFloat32}};
              operation.outputs = operation.inputs;
              self.communicator->run(operation);
              EXPECT_EQ(values[(1 << 18) - 1], 3.0f);
              EXPECT_EQ(self.communicator->allocate(0, Device{})->bytes(), 0u);
            },
            test_environment(), {0, 1, 1});
}

}  // namespace
}  // namespace pydist::testing
