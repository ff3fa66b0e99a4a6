// What the ends of NCCL groups, in order and by failure, do to captures that go on beside them:
// none breaks one, and none waits for one for ever. On an NCCL and a CUDA driver without a GPU
// (tests/fakes).

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../fakes/cuda_driver.h"
#include "../fakes/nccl.h"
#include "communicator/nccl/late_ends.h"
#include "communicator/nccl/nccl_communicator.h"
#include "cuda/driver.h"
#include "nccl_fakes.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// What waits for the device ends captures, so nothing is freed meanwhile.
TEST(NcclTeardown, LeavesCapturesWhole) {
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self);
    const CommunicatorPtr other = rank.group->split({0});
    const CommunicatorPtr third = rank.group->split({0});
    std::vector<float> values(10, 1.0F);
    const auto own = Device{DeviceType::kCuda, rank.device};
    MemoryPtr dropped = rank.group->allocate(1000, own);
    MemoryPtr dropped_later = other->allocate(1000, own);
    const int before = ::fake_nccl_communicators();
    ::fake_driver_begin_capture(rank.stream.get());
    EXPECT_TRUE(rank.group->submit(scaled(rank, values))->wait_on_stream(rank.stream.get()));
    dropped.reset();
    EXPECT_NE(rank.group->allocate(1000, own), nullptr);
    other->abort(Aborted("enough"));
    dropped_later.reset();
    third->shutdown();
    const Deadline at_once = Deadline::in(seconds(1) * kSlowdown);
    other->shutdown();
    third->wait_for_end(Deadline::in(seconds(30) * kSlowdown));
    EXPECT_FALSE(at_once.has_passed()) << "nobody waits for what waits for a capture";
    std::this_thread::sleep_for(milliseconds(200));
    EXPECT_EQ(::fake_nccl_communicators(), before);
    void* const graph = ::fake_driver_end_capture(rank.stream.get());
    ASSERT_NE(graph, nullptr) << "the capture was broken";
    EXPECT_TRUE(comes_true([&] { return ::fake_nccl_communicators() == before - 2; }));
    ::fake_driver_replay(graph, rank.stream.get());
    rank.stream.synchronize();
    EXPECT_EQ(values[0], 2.0F);
    ::fake_driver_destroy_graph(graph);
    rank.group->shutdown();
  });
  let_go_of_nccl();
  EXPECT_EQ(::fake_nccl_blocks(), 0);
  EXPECT_EQ(::fake_driver_blocks(), 0);
}

// Of captures that hold nothing of pydist's, on another thread, it cannot know. NCCL's threads do
// not mind them, so groups end before.
TEST(NcclTeardown, LeavesCapturesOfOthersWhole) {
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self);
    const FakeStream elsewhere(self.rank);
    const CommunicatorPtr other = rank.group->split({0});
    std::vector<float> values(10, 1.0F);
    MemoryPtr dropped_before = allocate(rank);
    MemoryPtr dropped_after = allocate(rank);
    rank.group->submit(scaled(rank, values))->wait();
    dropped_before.reset();
    rank.group->shutdown();
    rank.group->wait_for_end(Deadline::in(seconds(5) * kSlowdown));
    ::fake_driver_begin_capture(elsewhere.get());
    dropped_after.reset();
    void* const graph = ::fake_driver_end_capture(elsewhere.get());
    ASSERT_NE(graph, nullptr) << "the capture was broken";
    ::fake_driver_destroy_graph(graph);
    EXPECT_EQ(::fake_nccl_blocks(), 2);
    const int before = ::fake_driver_blocks();
    const MemoryPtr next = other->allocate(1000, Device{DeviceType::kCuda, rank.device});
    EXPECT_EQ(::fake_nccl_blocks(), 1) << "the next allocation frees what was left";
    EXPECT_EQ(::fake_driver_blocks(), before - 1) << "and so it does with scratch memory";
    other->shutdown();
  });
  EXPECT_EQ(::fake_nccl_faults(), 0);
}

// Of its own group, while what is captured is on the group's stream.
TEST(NcclTeardown, AbortsBesideACapture) {
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self);
    std::vector<float> values(10, 1.0F);
    ::fake_driver_begin_capture(rank.stream.get());
    EXPECT_TRUE(rank.group->submit(scaled(rank, values))->wait_on_stream(rank.stream.get()));
    rank.group->abort(Aborted("enough"));
    std::this_thread::sleep_for(milliseconds(200));
    void* const graph = ::fake_driver_end_capture(rank.stream.get());
    ASSERT_NE(graph, nullptr) << "the capture was broken";
    ::fake_driver_destroy_graph(graph);
    rank.group->shutdown();
  });
  let_go_of_nccl();
  EXPECT_EQ(::fake_driver_blocks(), 0);
}

// The abort of which waits for the capture.
TEST(NcclTeardown, FailsInACapture) {
  use_fake_cuda();
  const FakeFault fault("fail:0:2");
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self, test_environment(), {.end = kForTheEnd});
    std::vector<float> values(10, 1.0F);
    ::fake_driver_begin_capture(rank.stream.get());
    EXPECT_TRUE(rank.group->submit(rank.all_reduce(values))->wait_on_stream(rank.stream.get()));
    EXPECT_EQ(
        error_of([&] { static_cast<void>(rank.group->submit(rank.all_reduce(values))); }).kind,
        ErrorKind::kTransport);
    void* const graph = ::fake_driver_end_capture(rank.stream.get());
    ASSERT_NE(graph, nullptr) << "the capture was broken";
    ::fake_driver_destroy_graph(graph);
    rank.group->shutdown();
  });
}

// Who waits for an operation is freed, whatever becomes of the capture.
TEST(NcclTeardown, FreesWaitersBesideACapture) {
  use_fake_cuda();
  const FakeFault fault("hang:0:2");
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self, test_environment(), {.end = kForTheEnd});
    const FakeStream elsewhere(self.rank);
    const CommunicatorPtr other = rank.group->split({0});
    std::vector<float> values(10, 1.0F);
    std::vector<float> hanging(10, 1.0F);
    other->submit(rank.all_reduce(hanging))->wait();
    const int before = ::fake_nccl_communicators();
    const WorkPtr work =
        other->submit(on_device(all_reduce(hanging, ReduceOp::kSum), self.rank, elsewhere.get()));
    ::fake_driver_begin_capture(rank.stream.get());
    EXPECT_TRUE(rank.group->submit(rank.all_reduce(values))->wait_on_stream(rank.stream.get()));
    other->abort(Aborted("enough"));
    EXPECT_EQ(error_of([&] { work->wait(); }).message, "enough");
    EXPECT_TRUE(comes_true([&] { return ::fake_nccl_communicators() == before - 1; }));
    EXPECT_EQ(::fake_driver_end_capture(rank.stream.get()), nullptr)
        << "the fake is to be as strict as NCCL, or this test tells nothing";
    other->shutdown();
    rank.group->shutdown();
  });
}

TEST(NcclTeardown, DoesNotWaitForEverForACapture) {
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self, test_environment(), {.end = milliseconds(100)});
    const CommunicatorPtr other = rank.group->split({0});
    std::vector<float> values(10, 1.0F);
    const int before = ::fake_nccl_communicators();
    ::fake_driver_begin_capture(rank.stream.get());
    EXPECT_TRUE(rank.group->submit(rank.all_reduce(values))->wait_on_stream(rank.stream.get()));
    other->shutdown();
    EXPECT_TRUE(comes_true([&] { return ::fake_nccl_communicators() == before - 1; }));
    EXPECT_EQ(::fake_driver_end_capture(rank.stream.get()), nullptr);
  });
}

}  // namespace
}  // namespace pydist::testing
