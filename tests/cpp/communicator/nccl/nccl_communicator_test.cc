// What the NCCL backend does beside moving data: streams, capture, memory, groups; on an
// NCCL and a CUDA driver without a GPU (tests/fakes).

#include "communicator/nccl/nccl_communicator.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "../fakes/cuda_driver.h"
#include "../fakes/nccl.h"
#include "cuda/driver.h"
#include "kernels/cpu/convert.h"
#include "nccl_fakes.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

using Rank = NcclRank;

TEST(NcclCommunicator, OrdersStreamsByEventsAlone) {
  use_fake_cuda();
  ::fake_driver_delay_us(300);
  run_ranks(2, [](RankOfTest& self) {
    const Rank rank(self);
    std::vector<float> values(1000);
    std::vector<float> sums(1000);
    for (int step = 0; step < 20; ++step) {
      // "Compute" writes the input and reads the result, both on the caller's stream.
      const std::function<void()> compute = [&values, step, &self] {
        std::fill(values.begin(), values.end(), static_cast<float>(step + self.rank));
      };
      ::fake_driver_enqueue(rank.stream.get(), &compute);
      const WorkPtr work = rank.group->submit(rank.all_reduce(values));
      ASSERT_TRUE(work->wait_on_stream(rank.stream.get()));
      float seen = -1;
      const std::function<void()> use = [&values, &seen] { seen = values[777]; };
      ::fake_driver_enqueue(rank.stream.get(), &use);
      rank.stream.synchronize();
      ASSERT_EQ(seen, static_cast<float>(2 * step + 1));
    }
    rank.group->shutdown();
  });
  ::fake_driver_delay_us(0);
  EXPECT_EQ(::fake_driver_faults(), 0) << "calls without a current context";
}

TEST(NcclCommunicator, TellsWhoeverWaitsOnTheHost) {
  run_ranks(2, [](RankOfTest& self) {
    const Rank rank(self);
    std::vector<double> values{1.0, 2.0};
    std::atomic<bool> is_told{false};
    const WorkPtr work = rank.group->submit(rank.all_reduce(values, ReduceOp::kMean));
    work->on_completion([&](const Work::Outcome& outcome) { is_told = outcome.error == nullptr; });
    work->wait();
    EXPECT_EQ(values[1], 2.0);
    while (!is_told) {  // by the watchdog, or whoever has waited
      std::this_thread::sleep_for(milliseconds(1));
    }
    rank.group->shutdown();
  });
}

TEST(NcclCommunicator, CarriesTheHostsOperationsToo) {
  run_ranks(2, [](RankOfTest& self) {
    const Rank rank(self);
    std::vector<int> on_host{self.rank};
    rank.group->run(testing::all_reduce(on_host));
    EXPECT_EQ(on_host[0], 1);
    std::vector<int> on_gpu{self.rank + 1};
    std::vector<Operation> both{rank.all_reduce(on_gpu), testing::all_reduce(on_host)};
    combine(rank.group->submit_grouped(std::move(both)))->wait();
    EXPECT_EQ(on_gpu[0], 3);
    EXPECT_EQ(on_host[0], 2);
    rank.group->run(barrier());
    rank.group->shutdown();
  });
}

TEST(NcclCommunicator, LaunchesNothingOfAGroupThatTheHostRefuses) {
  run_ranks(2, [](RankOfTest& self) {
    const Rank rank(self);
    std::vector<int> on_gpu{self.rank + 1};
    std::vector<int> on_host{1};
    std::vector<int> longer{1, 1};
    Operation wrong = testing::all_reduce(on_host);
    wrong.outputs = {buffer_of(longer)};
    EXPECT_EQ(error_of([&] {
                std::vector<Operation> both{rank.all_reduce(on_gpu), wrong};
                static_cast<void>(rank.group->submit_grouped(std::move(both)));
              }).kind,
              ErrorKind::kInvalidUsage);
    rank.group->run(barrier());
    EXPECT_EQ(on_gpu[0], self.rank + 1);
    rank.group->submit(rank.all_reduce(on_gpu))->wait();
    EXPECT_EQ(on_gpu[0], 3);
    rank.group->shutdown();
  });
}

TEST(NcclCommunicator, SplitsIntoGroupsAndAllocates) {
  run_ranks(3, [](RankOfTest& self) {
    const Rank rank(self);
    if (self.rank != 1) {
      const CommunicatorPtr pair = rank.group->split({2, 0});
      EXPECT_EQ(pair->rank(), self.rank == 2 ? 0 : 1);
      std::vector<float> values{static_cast<float>(self.rank)};
      pair->submit(rank.all_reduce(values))->wait();
      EXPECT_EQ(values[0], 2.0F);
      pair->shutdown();
    }
    MemoryPtr memory = rank.group->allocate(1000, Device{DeviceType::kCuda, rank.device});
    EXPECT_EQ(memory->bytes(), 1000U);
    EXPECT_NE(memory->data(), nullptr);
    EXPECT_NE(rank.group->allocate(0, Device{})->data(), nullptr);
    memory.reset();
    rank.group->shutdown();
  });
}

// A graph holds the collective, and does it again at every replay.
TEST(NcclCommunicator, IsCapturedIntoAGraph) {
  run_ranks(2, [](RankOfTest& self) {
    const Rank rank(self);
    std::vector<float> values{1.0F};
    // One capture at a time in this process.
    void* graph = nullptr;
    for (int turn = 0; turn < 2; ++turn) {
      if (turn == self.rank) {
        ::fake_driver_begin_capture(rank.stream.get());
        const WorkPtr work = rank.group->submit(rank.all_reduce(values));
        EXPECT_TRUE(work->is_completed());
        EXPECT_TRUE(work->wait_on_stream(rank.stream.get()));
        graph = ::fake_driver_end_capture(rank.stream.get());
        EXPECT_EQ(values[0], 1.0F) << "nothing runs during a capture";
      }
      rank.group->run(barrier());
    }
    ::fake_driver_replay(graph, rank.stream.get());
    ::fake_driver_replay(graph, rank.stream.get());
    rank.stream.synchronize();
    EXPECT_EQ(values[0], 4.0F);
    rank.group->run(barrier());
    ::fake_driver_destroy_graph(graph);
    rank.group->shutdown();
  });
}

// Whether the legacy stream is captured cannot be asked during a capture of others; it never is.
TEST(NcclCommunicator, RunsOnTheLegacyStreamWhileAnotherIsCaptured) {
  run_ranks(2, [](RankOfTest& self) {
    const Rank rank(self);
    const FakeStream captured(self.rank);
    if (self.rank == 0) {
      ::fake_driver_begin_capture(captured.get());
    }
    std::vector<float> values{1.0F};
    Operation operation = rank.all_reduce(values);
    operation.stream = nullptr;
    rank.group->submit(std::move(operation))->wait();
    EXPECT_EQ(values[0], 2.0F);
    rank.group->run(barrier());
    if (self.rank == 0) {
      ::fake_driver_destroy_graph(::fake_driver_end_capture(captured.get()));
    }
    rank.group->run(barrier());
    rank.group->shutdown();
  });
}

TEST(NcclCommunicator, RefusesWhatCannotWork) {
  run_ranks(2, [](RankOfTest& self) {
    const Rank rank(self);
    std::vector<float> values(4);
    Operation elsewhere = rank.all_reduce(values);
    for (Buffers* buffers : {&elsewhere.inputs, &elsewhere.outputs}) {
      (*buffers)[0].device.index = 7;
    }
    const auto [kind, message, blame] = error_of([&] { rank.group->run(std::move(elsewhere)); });
    EXPECT_EQ(kind, ErrorKind::kInvalidUsage);
    EXPECT_TRUE(contains(message, join("a tensor is on cuda:7, but rank ", self.rank))) << message;
    EXPECT_EQ(rank.group->failure(), nullptr);
    rank.group->shutdown();
    EXPECT_EQ(error_of([&] { rank.group->run(rank.all_reduce(values)); }).kind,
              ErrorKind::kInvalidUsage);
  });
}

TEST(NcclCommunicator, DoesWithoutKernelsWhatNcclCanDo) {
  run_ranks(2, [](RankOfTest& self) {
    const CommunicatorPtr group = join_nccl(self, test_environment(), &no_kernels());
    const FakeStream stream(self.rank);
    std::vector<float> values{static_cast<float>(self.rank)};
    group->submit(on_device(all_reduce(values, ReduceOp::kMean), self.rank, stream.get()))->wait();
    EXPECT_EQ(values[0], 0.5F);
    EXPECT_TRUE(group->capabilities().wire_dtypes.empty());
    const auto [kind, message, blame] = error_of([&] {
      group->run(on_device(all_reduce(values, ReduceOp::kMax), self.rank, stream.get()));
    });
    EXPECT_EQ(kind, ErrorKind::kInvalidUsage);
    EXPECT_TRUE(contains(message, "needs pydist's CUDA kernels")) << message;
    group->shutdown();
  });
}

// `count` values from `data`, of one of the types that NCCL multiplies.
std::vector<double> values_at(const std::vector<std::byte>& data, DType dtype, std::size_t count) {
  std::vector<double> values(count);
  if (dtype == DType::kFloat64) {
    std::memcpy(values.data(), data.data(), count * sizeof(double));
    return values;
  }
  std::vector<float> single(count);
  if (dtype == DType::kFloat32) {
    std::memcpy(single.data(), data.data(), count * sizeof(float));
  } else {
    widen_to_float32(dtype, data.data(), single.data(), count);
  }
  values.assign(single.begin(), single.end());
  return values;
}

std::vector<std::byte> data_of(const std::vector<double>& values, DType dtype) {
  std::vector<std::byte> data(values.size() * element_size(dtype));
  const std::vector<float> single(values.begin(), values.end());
  if (dtype == DType::kFloat64) {
    std::memcpy(data.data(), values.data(), data.size());
  } else if (dtype == DType::kFloat32) {
    std::memcpy(data.data(), single.data(), data.size());
  } else {
    narrow_from_float32(dtype, single.data(), data.data(), single.size());
  }
  return data;
}

// On numbers that no type has to round.
TEST(NcclCommunicator, MultipliesByEachRanksFactorWithoutKernels) {
  for (const int size : {2, 3}) {
    run_ranks(size, [size](RankOfTest& self) {
      const CommunicatorPtr group = join_nccl(self, test_environment(), &no_kernels());
      const FakeStream stream(self.rank);
      const auto factor_of = [](int rank) { return 0.75 * (rank + 1); };
      const auto value_of = [](int rank, std::size_t i) { return (rank + 3.0 * i) / 2; };
      constexpr std::size_t kCount = 5;
      for (const DType dtype :
           {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
        std::vector<double> mine(kCount);
        std::vector<double> sums(kCount);
        for (std::size_t i = 0; i < kCount; ++i) {
          mine[i] = value_of(self.rank, i);
          for (int rank = 0; rank < size; ++rank) {
            sums[i] += factor_of(rank) * value_of(rank, i);
          }
        }
        std::vector<std::byte> data = data_of(mine, dtype);
        Operation operation;
        operation.kind = OpKind::kAllReduce;
        operation.op = ReduceOp::kPremulSum;
        operation.factor = factor_of(self.rank);
        operation.inputs = {Buffer{data.data(), data.size() / element_size(dtype), dtype, {}}};
        operation.outputs = operation.inputs;
        group->submit(on_device(std::move(operation), self.rank, stream.get()))->wait();
        EXPECT_EQ(values_at(data, dtype, kCount), sums) << to_string(dtype);
      }
      group->run(barrier());
      EXPECT_EQ(::fake_nccl_operators(), 0);
      group->run(barrier());
      EXPECT_EQ(group->why_unsupported(OpKind::kAllReduce, ReduceOp::kPremulSum, DType::kInt32),
                "op 'premul_sum' is not defined for int32");
      group->shutdown();
    });
  }
}

// The graph has the factor, not the operator, which goes with the launch.
TEST(NcclCommunicator, CapturesAPremultipliedSumWithoutKernels) {
  run_ranks(1, [](RankOfTest& self) {
    const CommunicatorPtr group = join_nccl(self, test_environment(), &no_kernels());
    const FakeStream stream(self.rank);
    std::vector<float> values{1.0F};
    ::fake_driver_begin_capture(stream.get());
    Operation operation = testing::all_reduce(values, ReduceOp::kPremulSum);
    operation.factor = 3.0;
    EXPECT_TRUE(group->submit(on_device(std::move(operation), self.rank, stream.get()))
                    ->wait_on_stream(stream.get()));
    void* const graph = ::fake_driver_end_capture(stream.get());
    EXPECT_EQ(::fake_nccl_operators(), 0);
    ::fake_driver_replay(graph, stream.get());
    ::fake_driver_replay(graph, stream.get());
    stream.synchronize();
    EXPECT_EQ(values[0], 9.0F);
    ::fake_driver_destroy_graph(graph);
    group->shutdown();
  });
}

TEST(NcclCommunicator, LeavesNoOperatorWhereACallFails) {
  use_fake_cuda();
  const FakeFault fault("fail:1:2");
  run_ranks(2, [](RankOfTest& self) {
    const CommunicatorPtr group = join_nccl(self, test_environment(), &no_kernels());
    const FakeStream stream(self.rank);
    std::vector<float>& values = kept_values(self.rank);
    const auto [kind, message, blame] = error_of([&] {
      for (int i = 0; i < 3; ++i) {
        Operation operation = testing::all_reduce(values, ReduceOp::kPremulSum);
        operation.factor = 1.0;
        group->submit(on_device(std::move(operation), self.rank, stream.get()))->wait();
      }
    });
    EXPECT_TRUE(contains(message, "ncclAllReduce")) << message;
    group->shutdown();
  });
  EXPECT_EQ(::fake_nccl_operators(), 0);
}

// What is missing, where, and what to do, in the groups that are split off as well.
TEST(NcclCommunicator, SaysWhyThereAreNoKernels) {
  run_ranks(3, [](RankOfTest& self) {
    const bool lacks_them = self.rank == 1;
    const CommunicatorPtr group =
        join_nccl(self, test_environment(), lacks_them ? &no_kernels() : &fake_kernels());
    const FakeStream stream(self.rank);
    const auto expect_why = [&](Communicator& refusing) {
      std::vector<float> values(4);
      const auto [kind, message, blame] = error_of([&] {
        refusing.run(on_device(all_reduce(values, ReduceOp::kMax), self.rank, stream.get()));
      });
      EXPECT_EQ(kind, ErrorKind::kInvalidUsage);
      EXPECT_TRUE(contains(message, "op 'max' of float32 needs pydist's CUDA kernels")) << message;
      EXPECT_TRUE(contains(message, "pydist was built without nvcc")) << message;
      EXPECT_EQ(contains(message, "rank 1 of group 'world' cannot use them"), !lacks_them)
          << message;
      EXPECT_TRUE(contains(message, "PYDIST_BACKEND=native")) << message;
    };
    expect_why(*group);
    if (self.rank != 1) {  // of those that could
      const CommunicatorPtr pair = group->split({0, 2});
      expect_why(*pair);
      pair->shutdown();
    }
    group->shutdown();
  });
}

TEST(NcclCommunicator, NamesBothSidesOfAMismatchInDebugMode) {
  Environment environment = test_environment();
  environment.debug = true;
  run_ranks(
      2,
      [&](RankOfTest& self) {
        const Rank rank(self, environment);
        std::vector<float> values(self.rank == 0 ? 10 : 11);
        const auto [kind, message, blame] =
            error_of([&] { rank.group->submit(rank.all_reduce(values))->wait(); });
        EXPECT_EQ(kind, ErrorKind::kMismatch);
        EXPECT_TRUE(contains(message, "10 elements")) << message;
        EXPECT_TRUE(contains(message, "11 elements")) << message;
      },
      environment);
}

// One rank gives its blocks as one tensor, the other as a list.
Operation in_one_form(const Rank& rank, OpKind kind, std::vector<std::uint8_t>& own,
                      std::vector<std::uint8_t>& all) {
  Operation operation;
  operation.kind = kind;
  Buffers blocks{buffer_of(all)};
  if (rank.device != 0) {
    const std::size_t half = all.size() / 2;
    blocks = {Buffer{all.data(), half, DType::kUInt8, {}},
              Buffer{all.data() + half, half, DType::kUInt8, {}}};
  }
  const bool gathers = kind == OpKind::kAllGather;
  operation.inputs = gathers ? Buffers{buffer_of(own)} : blocks;
  operation.outputs = gathers ? blocks : Buffers{buffer_of(own)};
  return on_device(std::move(operation), rank.device, rank.stream.get());
}

TEST(NcclCommunicator, TakesBlocksInOneTensorHereAndAListThere) {
  run_ranks(2, [](RankOfTest& self) {
    const Rank rank(self);
    const auto mine = static_cast<std::uint8_t>(self.rank);
    std::vector<std::uint8_t> own(3000, mine);
    std::vector<std::uint8_t> all(6000);
    rank.group->submit(in_one_form(rank, OpKind::kAllGather, own, all))->wait();
    EXPECT_EQ(all[2999], 0);
    EXPECT_EQ(all[3000], 1);
    std::fill(all.begin(), all.begin() + 3000, static_cast<std::uint8_t>(10 + mine));
    std::fill(all.begin() + 3000, all.end(), static_cast<std::uint8_t>(20 + mine));
    rank.group->submit(in_one_form(rank, OpKind::kReduceScatter, own, all))->wait();
    EXPECT_EQ(own[2999], self.rank == 0 ? 21 : 41);
    rank.group->shutdown();
  });
}

// Then they are different calls of NCCL.
TEST(NcclCommunicator, NamesBothFormsOfLargeBlocks) {
  constexpr std::size_t kHalf = (std::size_t{8} << 20) + 1;
  for (const bool debug : {false, true}) {
    Environment environment = with_timeout_of(debug ? seconds(20) : seconds(2));
    environment.debug = debug;
    run_ranks(
        2,
        [&](RankOfTest& self) {
          const Rank rank(self, environment);
          std::vector<std::uint8_t> own(kHalf);
          std::vector<std::uint8_t> all(2 * kHalf);
          const auto [kind, message, blame] = error_of(
              [&] { rank.group->submit(in_one_form(rank, OpKind::kAllGather, own, all))->wait(); });
          EXPECT_EQ(kind, debug ? ErrorKind::kMismatch : ErrorKind::kTimeout) << message;
          EXPECT_TRUE(contains(message, "in one tensor")) << message;
          EXPECT_TRUE(contains(message, "in a list")) << message;
        },
        environment);
  }
}

TEST(NcclCommunicator, RefusesACaptureByOneRankInDebugMode) {
  Environment environment = test_environment();
  environment.debug = true;
  run_ranks(
      2,
      [&](RankOfTest& self) {
        const Rank rank(self, environment);
        std::vector<float> values(10);
        if (self.rank == 1) {
          ::fake_driver_begin_capture(rank.stream.get());
        }
        const auto [kind, message, blame] =
            error_of([&] { rank.group->submit(rank.all_reduce(values))->wait(); });
        EXPECT_EQ(kind, ErrorKind::kInvalidUsage);
        EXPECT_TRUE(contains(message, "rank 1 captures it into a CUDA graph, but rank 0 does not"))
            << message;
        if (self.rank == 1) {
          // It holds nothing of pydist's, so the abort of the group that fails may have broken it.
          if (void* const graph = ::fake_driver_end_capture(rank.stream.get())) {
            ::fake_driver_destroy_graph(graph);
          }
        }
      },
      environment);
}

// NCCL's own variable goes before its configuration.
TEST(NcclCommunicator, WarnsOfCommunicatorsThatBlock) {
  use_fake_cuda();
  ::setenv("NCCL_COMM_BLOCKING", "1", 1);
  ::testing::internal::CaptureStderr();
  run_ranks(2, [](RankOfTest& self) {
    const Rank rank(self);
    std::vector<float> values{1.0F};
    rank.group->submit(rank.all_reduce(values))->wait();
    EXPECT_EQ(values[0], 2.0F);
    rank.group->shutdown();
  });
  const std::string said = ::testing::internal::GetCapturedStderr();
  ::unsetenv("NCCL_COMM_BLOCKING");
  const std::size_t first = said.find("NCCL_COMM_BLOCKING=1");
  EXPECT_NE(first, std::string::npos) << said;
  EXPECT_EQ(said.find("NCCL_COMM_BLOCKING=1", first + 1), std::string::npos) << said;
}

}  // namespace
}  // namespace pydist::testing
