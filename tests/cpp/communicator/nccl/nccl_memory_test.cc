// What the NCCL backend does where a GPU has no room; on an NCCL and a CUDA driver without a GPU
// (tests/fakes).

#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <vector>

#include "../fakes/cuda_driver.h"
#include "../fakes/nccl.h"
#include "communicator/nccl/late_ends.h"
#include "cuda/device_memory.h"
#include "nccl_fakes.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

constexpr auto kPlenty = static_cast<std::size_t>(std::numeric_limits<long>::max());

// Of all devices, for as long as it lives.
class Room {
 public:
  explicit Room(std::size_t bytes) { ::fake_driver_limit_memory(bytes); }
  ~Room() { ::fake_driver_limit_memory(kPlenty); }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
};

std::atomic<int> times_emptied{0};
std::atomic<bool> is_thread_capturing{false};

// A framework whose cache holds all that there is.
class Framework {
 public:
  Framework() {
    times_emptied = 0;
    cuda::set_framework(
        {.empty_cache =
             [] {
               ++times_emptied;
               ::fake_driver_limit_memory(kPlenty);
             },
         .is_capturing = [](int /*device*/) { return is_thread_capturing.load(); }});
  }
  ~Framework() { cuda::set_framework({}); }
  Framework(const Framework&) = delete;
  Framework& operator=(const Framework&) = delete;
};

TEST(NcclMemory, TakesWhatTorchKeepsInItsCache) {
  use_fake_cuda();
  const Framework framework;
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self);
    const Room none(1);
    EXPECT_NE(allocate(rank), nullptr);
    EXPECT_EQ(times_emptied, 1);
    rank.group->shutdown();
  });
}

TEST(NcclMemory, LeavesTheCacheAloneInACapture) {
  use_fake_cuda();
  const Framework framework;
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self);
    const Room none(1);
    std::vector<float> values(10, 1.0F);
    is_thread_capturing = true;
    ::fake_driver_begin_capture(rank.stream.get());
    const auto [kind, message, blame] =
        error_of([&] { static_cast<void>(rank.group->submit(scaled(rank, values))); });
    is_thread_capturing = false;
    EXPECT_EQ(kind, ErrorKind::kTransport);
    EXPECT_TRUE(contains(message, "cannot be emptied during a capture")) << message;
    EXPECT_EQ(times_emptied, 0);
    EXPECT_TRUE(comes_true([&] { return ::fake_driver_is_broken(rank.stream.get()) != 0; }));
    EXPECT_EQ(::fake_driver_end_capture(rank.stream.get()), nullptr);
    rank.group->shutdown();
  });
}

// Though the capture holds nothing of pydist's yet.
TEST(NcclMemory, IsRefusedOnAThreadThatCaptures) {
  use_fake_cuda();
  const Framework framework;
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self);
    is_thread_capturing = true;
    const auto [kind, message, blame] = error_of([&] { static_cast<void>(allocate(rank)); });
    is_thread_capturing = false;
    EXPECT_EQ(kind, ErrorKind::kInvalidUsage);
    EXPECT_TRUE(contains(message, "while a CUDA graph is being captured")) << message;
    EXPECT_NE(allocate(rank), nullptr);
    rank.group->shutdown();
  });
}

// NCCL's ranks agree about an operation on memory that some of them have registered, or do not.
TEST(NcclMemory, IsRegisteredOnAllRanksOrOnNone) {
  use_fake_cuda();
  const FakeFault fault("no_register:1:0");
  run_ranks(2, [](RankOfTest& self) {
    const NcclRank rank(self);
    const MemoryPtr memory = allocate(rank);
    rank.group->run(barrier());
    EXPECT_EQ(::fake_nccl_registrations(), 0);
    rank.group->run(barrier());
    rank.group->shutdown();
  });
  EXPECT_EQ(::fake_nccl_faults(), 0);
}

int registrations_of_two_ranks() {
  use_fake_cuda();
  std::atomic<int> registrations{0};
  run_ranks(2, [&](RankOfTest& self) {
    const NcclRank rank(self);
    const MemoryPtr memory = allocate(rank);
    rank.group->run(barrier());
    registrations = ::fake_nccl_registrations();
    rank.group->run(barrier());
    rank.group->shutdown();
  });
  LateEnds::of_process().join();  // with the communicators go the registrations
  return registrations;
}

TEST(NcclMemory, IsRegisteredWhereLaunchesDoNotWaitForTheOtherRanks) {
  EXPECT_EQ(registrations_of_two_ranks(), 2);
  const FakeSetting nvswitch("FAKE_NVSWITCH", "1");
  EXPECT_EQ(registrations_of_two_ranks(), 0);
  const FakeSetting without("NCCL_NVLS_ENABLE", "0");
  EXPECT_EQ(registrations_of_two_ranks(), 2);
}

TEST(NcclMemory, SaysOnAllRanksHowMuchIsMissingWhere) {
  use_fake_cuda();
  run_ranks(2, [](RankOfTest& self) {
    const NcclRank rank(self);
    rank.group->run(barrier());
    const Room little(500);
    const auto [kind, message, blame] = error_of([&] { static_cast<void>(allocate(rank)); });
    EXPECT_EQ(kind, ErrorKind::kTransport);
    EXPECT_TRUE(
        contains(message, "Rank 0: 1000 bytes on the GPU: cuda:0 has no room for 1000 bytes"))
        << message;
    EXPECT_TRUE(contains(message, "0 of its 500 bytes are free")) << message;
    // Nothing has been launched, so the group goes on.
    EXPECT_EQ(rank.group->failure(), nullptr);
    rank.group->run(barrier());
    rank.group->shutdown();
  });
}

// A rank that finds no room in the middle of a launch would fail all.
TEST(NcclMemory, TakesScratchMemoryWhereAllRanksCanAgreeThatThereIsNone) {
  use_fake_cuda();
  run_ranks(2, [](RankOfTest& self) {
    const Room little(500);
    const auto [kind, message, blame] = error_of([&] { static_cast<void>(NcclRank(self)); });
    EXPECT_EQ(kind, ErrorKind::kTransport);
    EXPECT_TRUE(contains(message, "has no room for 16777216 bytes")) << message;
  });
}

TEST(NcclMemory, LaunchesWhereNothingIsFree) {
  use_fake_cuda();
  run_ranks(2, [](RankOfTest& self) {
    const NcclRank rank(self);
    rank.group->run(barrier());
    const Room none(1);
    std::vector<float> values(10, 1.0F);
    Operation operation = rank.all_reduce(values, ReduceOp::kPremulSum);
    operation.factor = 2.0;
    rank.group->submit(std::move(operation))->wait();
    EXPECT_EQ(values[0], 4.0F);
    rank.group->shutdown();
  });
}

}  // namespace
}  // namespace pydist::testing
