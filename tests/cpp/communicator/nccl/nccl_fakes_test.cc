// The fakes refuse what the real libraries refuse, with their codes: what passes on them is not to
// fail on a GPU for a reason that they could have shown.

#include "nccl_fakes.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "../fakes/cuda_driver.h"
#include "../fakes/nccl.h"
#include "cuda/stream.h"

namespace pydist::testing {
namespace {

using nccl::DataType;
using nccl::RedOp;
using nccl::Result;

// A function of the fake driver.
template <typename Function>
Function driver(const char* name) {
  use_fake_cuda();
  return reinterpret_cast<Function>(::dlsym(RTLD_DEFAULT, name));  // NOLINT
}

// Waits for what is under way; what comes of it.
Result finish(const nccl::Functions& functions, nccl::CommHandle comm) {
  Result state = Result::kInProgress;
  while (state == Result::kInProgress) {
    EXPECT_EQ(functions.ncclCommGetAsyncError(comm, &state), Result::kSuccess);
  }
  return state;
}

// A communicator of one rank, on the current device.
nccl::CommHandle join_alone(const nccl::Functions& functions) {
  nccl::UniqueId id{};
  nccl::Config config;
  nccl::CommHandle comm = nullptr;
  EXPECT_EQ(functions.ncclGetUniqueId(&id), Result::kSuccess);
  EXPECT_EQ(functions.ncclCommInitRankConfig(&comm, 1, id, 0, &config), Result::kInProgress);
  EXPECT_EQ(finish(functions, comm), Result::kSuccess);
  return comm;
}

constexpr int kSuccess = 0;
constexpr int kInvalidDevice = 101;
constexpr int kInvalidHandle = 400;
constexpr int kCaptureUnsupported = 900;

TEST(FakeDriver, RefusesADeviceByItsOrdinal) {
  const auto retain = driver<int (*)(void**, int)>("cuDevicePrimaryCtxRetain");
  void* context = nullptr;
  EXPECT_EQ(retain(&context, 0), kInvalidDevice);
  int handle = 0;
  EXPECT_EQ(driver<int (*)(int*, int)>("cuDeviceGet")(&handle, 0), kSuccess);
  EXPECT_EQ(retain(&context, handle), kSuccess);
}

TEST(FakeDriver, RefusesWhatIsDestroyedOrOfAnotherContext) {
  const FakeStream stream(0);
  const cuda::DeviceGuard guard(1);
  const auto record = driver<int (*)(void*, void*)>("cuEventRecord");
  const auto query = driver<int (*)(void*)>("cuEventQuery");
  const cuda::Event event = cuda::Driver::get().create_event();
  EXPECT_EQ(record(event, stream.get()), kInvalidHandle);
  EXPECT_EQ(query(event), kSuccess);
  cuda::Driver::get().destroy_event(event, cuda::Driver::get().current_context());
  EXPECT_EQ(query(event), kInvalidHandle);
  int nothing = 0;
  EXPECT_EQ(driver<int (*)(void*)>("cuStreamQuery")(&nothing), kInvalidHandle);
}

// Nor do captures survive what is refused.
TEST(FakeDriver, RefusesToWaitAndToFreeInACapture) {
  const FakeStream stream(0);
  const cuda::DeviceGuard guard(0);
  void* const memory = cuda::Driver::get().try_allocate(100);
  const auto is_broken_by = [&](const auto& call) {
    ::fake_driver_begin_capture(stream.get());
    EXPECT_EQ(call(), kCaptureUnsupported);
    void* const graph = ::fake_driver_end_capture(stream.get());
    if (graph != nullptr) {
      ::fake_driver_destroy_graph(graph);
    }
    return graph == nullptr;
  };
  const auto free = driver<int (*)(std::size_t)>("cuMemFree_v2");
  const auto address = reinterpret_cast<std::size_t>(memory);
  EXPECT_TRUE(is_broken_by([&] { return free(address); }));
  EXPECT_TRUE(is_broken_by([&] {
    const cuda::RelaxedCapture relaxed;
    return driver<int (*)()>("cuCtxSynchronize")();
  }));
  EXPECT_TRUE(is_broken_by([&] {
    const cuda::RelaxedCapture relaxed;
    return driver<int (*)(void*)>("cuStreamQuery")(stream.get());
  }));
  EXPECT_EQ(free(address), kSuccess);
  EXPECT_NE(free(address), kSuccess);
}

TEST(FakeNccl, RefusesWhatNcclRefuses) {
  const nccl::ApiPtr api = fake_nccl();
  const nccl::Functions& functions = api->functions();
  const FakeStream stream(0);
  const FakeStream elsewhere(1);
  const cuda::DeviceGuard guard(0);
  nccl::UniqueId id{};
  nccl::Config config;
  nccl::CommHandle comm = nullptr;
  ASSERT_EQ(functions.ncclGetUniqueId(&id), Result::kSuccess);
  EXPECT_EQ(functions.ncclCommInitRankConfig(&comm, 1, id, 1, &config), Result::kInvalidArgument);
  ASSERT_EQ(functions.ncclCommInitRankConfig(&comm, 1, id, 0, &config), Result::kInProgress);
  EXPECT_EQ(finish(functions, comm), Result::kSuccess);
  std::vector<float> values(4);
  const auto reduce = [&](DataType type, void* on) {
    return functions.ncclAllReduce(values.data(), values.data(), values.size(), type, RedOp::kSum,
                                   comm, on);
  };
  EXPECT_EQ(reduce(DataType::kFloat32, elsewhere.get()), Result::kUnhandledCudaError);
  EXPECT_EQ(reduce(static_cast<DataType>(77), stream.get()), Result::kInvalidArgument);
  EXPECT_EQ(reduce(DataType::kFloat32, stream.get()), Result::kInProgress);
  EXPECT_EQ(reduce(DataType::kFloat32, stream.get()), Result::kInvalidArgument)
      << "the call before is still in progress";
  EXPECT_EQ(functions.ncclCommDestroy(comm), Result::kInvalidArgument);
  EXPECT_EQ(finish(functions, comm), Result::kSuccess);
  EXPECT_EQ(functions.ncclCommDeregister(comm, values.data()), Result::kInvalidUsage);
  EXPECT_EQ(functions.ncclGroupEnd(), Result::kInvalidUsage);
  stream.synchronize();
  EXPECT_EQ(functions.ncclCommDestroy(comm), Result::kSuccess);
  EXPECT_EQ(reduce(DataType::kFloat32, stream.get()), Result::kInvalidArgument);
  EXPECT_EQ(functions.ncclCommAbort(comm), Result::kInvalidArgument);
}

// Operators are of one communicator and one type, until they are destroyed.
TEST(FakeNccl, KnowsItsOwnOperators) {
  const nccl::ApiPtr api = fake_nccl();
  const nccl::Functions& functions = api->functions();
  const FakeStream stream(0);
  const cuda::DeviceGuard guard(0);
  const std::array<nccl::CommHandle, 2> comms{join_alone(functions), join_alone(functions)};
  float factor = 3.0F;
  const auto create = [&](RedOp* op, nccl::ScalarResidence residence) {
    return functions.ncclRedOpCreatePreMulSum(op, &factor, DataType::kFloat32, residence, comms[0]);
  };
  RedOp op{};
  EXPECT_EQ(create(&op, nccl::ScalarResidence::kDevice), Result::kInvalidArgument)
      << "the fake reads nothing on a device";
  ASSERT_EQ(create(&op, nccl::ScalarResidence::kHostImmediate), Result::kSuccess);
  EXPECT_EQ(::fake_nccl_operators(), 1);
  std::vector<float> values(4, 1.0F);
  const auto reduce = [&](DataType type, nccl::CommHandle comm) {
    return functions.ncclAllReduce(values.data(), values.data(), 2, type, op, comm, stream.get());
  };
  EXPECT_EQ(reduce(DataType::kFloat16, comms[0]), Result::kInvalidArgument);
  EXPECT_EQ(reduce(DataType::kFloat32, comms[1]), Result::kInvalidArgument);
  EXPECT_EQ(functions.ncclRedOpDestroy(op, comms[1]), Result::kInvalidArgument);
  EXPECT_EQ(functions.ncclRedOpDestroy(RedOp::kSum, comms[0]), Result::kInvalidArgument);
  EXPECT_EQ(reduce(DataType::kFloat32, comms[0]), Result::kInProgress);
  RedOp other{};
  EXPECT_EQ(create(&other, nccl::ScalarResidence::kHostImmediate), Result::kInvalidArgument)
      << "the call before is still in progress";
  EXPECT_EQ(functions.ncclRedOpDestroy(op, comms[0]), Result::kSuccess);
  EXPECT_EQ(::fake_nccl_operators(), 0);
  EXPECT_EQ(finish(functions, comms[0]), Result::kSuccess);
  stream.synchronize();
  EXPECT_EQ(values[1], 3.0F);
  EXPECT_EQ(functions.ncclRedOpDestroy(op, comms[0]), Result::kInvalidArgument);
  EXPECT_EQ(reduce(DataType::kFloat32, comms[0]), Result::kInvalidArgument);
  ASSERT_EQ(create(&op, nccl::ScalarResidence::kHostImmediate), Result::kSuccess);
  for (const nccl::CommHandle comm : comms) {
    EXPECT_EQ(functions.ncclCommDestroy(comm), Result::kSuccess);
  }
  EXPECT_EQ(::fake_nccl_operators(), 0) << "it goes with its communicator";
}

// On threads of its own, where the caller's own mode counts for nothing.
TEST(FakeNccl, BreaksCapturesWhereACommunicatorEnds) {
  const nccl::ApiPtr api = fake_nccl();
  const nccl::Functions& functions = api->functions();
  const FakeStream stream(0);
  const cuda::DeviceGuard guard(0);
  const auto is_broken_by = [&](const auto& call) {
    const cuda::RelaxedCapture relaxed;
    ::fake_driver_begin_capture(stream.get());
    call();
    void* const graph = ::fake_driver_end_capture(stream.get());
    if (graph != nullptr) {
      ::fake_driver_destroy_graph(graph);
    }
    return graph == nullptr;
  };
  const nccl::CommHandle first = join_alone(functions);
  const nccl::CommHandle second = join_alone(functions);
  EXPECT_FALSE(is_broken_by([&] { finish(functions, first); }));
  EXPECT_TRUE(is_broken_by([&] { functions.ncclCommFinalize(first); }));
  finish(functions, first);
  EXPECT_TRUE(is_broken_by([&] { functions.ncclCommDestroy(first); }));
  EXPECT_TRUE(is_broken_by([&] { functions.ncclCommAbort(second); }));
}

// Ranks of one color, in the order of their keys; and nobody is through before all have come.
TEST(FakeNccl, SplitsAsNcclDoes) {
  const nccl::ApiPtr api = fake_nccl();
  const nccl::Functions& functions = api->functions();
  nccl::UniqueId id{};
  ASSERT_EQ(functions.ncclGetUniqueId(&id), Result::kSuccess);
  constexpr int kRanks = 3;
  std::atomic<bool> is_last{false};
  std::atomic<int> refused{0};
  std::array<float, kRanks> sums{};
  const auto run = [&](int rank) {
    const FakeStream stream(rank);
    const cuda::DeviceGuard guard(rank);
    nccl::Config config;
    nccl::CommHandle comm = nullptr;
    EXPECT_EQ(functions.ncclCommInitRankConfig(&comm, kRanks, id, rank, &config),
              Result::kInProgress);
    EXPECT_EQ(finish(functions, comm), Result::kSuccess);
    while (rank == 2 && refused < 2) {
      std::this_thread::yield();
    }
    is_last = rank == 2;
    nccl::CommHandle child = nullptr;
    // Ranks 2 and 0, in that order.
    EXPECT_EQ(functions.ncclCommSplit(comm, rank == 1 ? -1 : 0, -rank, &child, &config),
              Result::kInProgress);
    if (rank != 2) {
      EXPECT_EQ(functions.ncclCommSplit(comm, 0, 0, &child, &config), Result::kInvalidArgument)
          << "the split before is under way";
      ++refused;
    }
    EXPECT_EQ(finish(functions, comm), Result::kSuccess);
    EXPECT_TRUE(is_last);
    EXPECT_EQ(child == nullptr, rank == 1);
    if (child != nullptr) {
      EXPECT_EQ(finish(functions, child), Result::kSuccess);
      std::array<float, 2> values{};
      const float mine = static_cast<float>(rank) + 1;
      EXPECT_EQ(
          functions.ncclAllGather(&mine, values.data(), 1, DataType::kFloat32, child, stream.get()),
          Result::kInProgress);
      EXPECT_EQ(finish(functions, child), Result::kSuccess);
      stream.synchronize();
      sums.at(static_cast<std::size_t>(rank)) = 10 * values[0] + values[1];
      EXPECT_EQ(functions.ncclCommDestroy(child), Result::kSuccess);
    }
    EXPECT_EQ(functions.ncclCommDestroy(comm), Result::kSuccess);
  };
  std::array<std::thread, kRanks> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.at(static_cast<std::size_t>(rank)) = std::thread(run, rank);
  }
  for (std::thread& each : ranks) {
    each.join();
  }
  EXPECT_EQ(sums, (std::array<float, kRanks>{31.0F, 0.0F, 31.0F}));
}

TEST(FakeNccl, FinalizesTogetherWhereCallsBlock) {
  const nccl::ApiPtr api = fake_nccl();
  const nccl::Functions& functions = api->functions();
  nccl::UniqueId id{};
  ASSERT_EQ(functions.ncclGetUniqueId(&id), Result::kSuccess);
  std::atomic<bool> is_second{false};
  ::setenv("NCCL_COMM_BLOCKING", "1", 1);
  const auto join_and_end = [&](int rank) {
    const cuda::DeviceGuard guard(rank);
    nccl::Config config;
    nccl::CommHandle comm = nullptr;
    EXPECT_EQ(functions.ncclCommInitRankConfig(&comm, 2, id, rank, &config), Result::kSuccess);
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      is_second = true;
    }
    EXPECT_EQ(functions.ncclCommFinalize(comm), Result::kSuccess);
    EXPECT_TRUE(is_second);
    EXPECT_EQ(functions.ncclCommDestroy(comm), Result::kSuccess);
  };
  std::thread first(join_and_end, 0);
  std::thread second(join_and_end, 1);
  first.join();
  second.join();
  ::unsetenv("NCCL_COMM_BLOCKING");
}

}  // namespace
}  // namespace pydist::testing
