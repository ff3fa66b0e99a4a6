// What is refused while a CUDA graph is captured, and that failures and destructors go on at once.
// On an NCCL and a CUDA driver without a GPU (tests/fakes).

#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "../fakes/cuda_driver.h"
#include "../fakes/nccl.h"
#include "communicator/nccl/nccl_communicator.h"
#include "nccl_fakes.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

using std::chrono::seconds;

// A capture of the rank's stream that holds an operation on `group`.
class Capturing {
 public:
  Capturing(const NcclRank& rank, const CommunicatorPtr& group, std::vector<float>& values)
      : stream_(rank.stream.get()) {
    ::fake_driver_begin_capture(stream_);
    EXPECT_TRUE(group->submit(scaled(rank, values))->wait_on_stream(stream_));
  }
  [[nodiscard]] bool is_broken() const { return ::fake_driver_is_broken(stream_) != 0; }
  // Null if it has been broken.
  [[nodiscard]] void* end() const { return ::fake_driver_end_capture(stream_); }

 private:
  void* stream_;
};

template <typename Call>
void expect_refused(const Call& call, const char* sentence) {
  const auto [kind, message, blame] = error_of(call);
  EXPECT_EQ(kind, ErrorKind::kInvalidUsage);
  EXPECT_TRUE(contains(message, sentence)) << message;
}

// And neither the capture nor the groups come to harm.
TEST(NcclCapture, RefusesWhatItWouldNotSurvive) {
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self);
    const CommunicatorPtr other = rank.group->split({0});
    std::vector<float> values(10, 1.0F);
    const auto own = Device{DeviceType::kCuda, rank.device};
    MemoryPtr dropped = rank.group->allocate(1000, own);
    const int before = ::fake_nccl_communicators();
    const Capturing capturing(rank, rank.group, values);
    for (const CommunicatorPtr& each : {rank.group, other}) {
      expect_refused([&] { static_cast<void>(each->allocate(1000, own)); },
                     "allocate on the group 'world");
      expect_refused([&] { static_cast<void>(each->split({0})); }, "joining the group 'world");
      expect_refused([&] { each->check_shutdown(); },
                     "while a CUDA graph is being captured, which would not survive it: call it "
                     "before or after the capture");
    }
    dropped.reset();
    EXPECT_EQ(::fake_nccl_communicators(), before);
    void* const graph = capturing.end();
    ASSERT_NE(graph, nullptr) << "the capture was broken";
    ::fake_driver_replay(graph, rank.stream.get());
    rank.stream.synchronize();
    EXPECT_EQ(values[0], 2.0F);
    ::fake_driver_destroy_graph(graph);
    for (const CommunicatorPtr& each : {other, rank.group}) {
      each->run(rank.all_reduce(values));
      EXPECT_NE(each->allocate(1000, own), nullptr);
      each->check_shutdown();
      each->shutdown();
    }
  });
  let_go_of_nccl();
  EXPECT_EQ(::fake_nccl_blocks(), 0);
  EXPECT_EQ(::fake_driver_blocks(), 0);
}

TEST(NcclCapture, RefusesASecondOneBesideIt) {
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self);
    const FakeStream elsewhere(self.rank);
    const CommunicatorPtr other = rank.group->split({0});
    std::vector<float> values(10, 1.0F);
    std::vector<float> others(10, 1.0F);
    const auto on_other = [&] { return on_device(all_reduce(others), self.rank, elsewhere.get()); };
    const Capturing first(rank, rank.group, values);
    ::fake_driver_begin_capture(elsewhere.get());
    expect_refused([&] { static_cast<void>(other->submit(on_other())); },
                   "while another capture with operations of pydist's is under way: capture one "
                   "graph after the other");
    void* const second = ::fake_driver_end_capture(elsewhere.get());
    ASSERT_NE(second, nullptr);
    other->run(on_other());  // what is not captured goes on beside it
    void* const graph = first.end();
    ASSERT_NE(graph, nullptr) << "the capture was broken";
    ::fake_driver_begin_capture(elsewhere.get());
    EXPECT_TRUE(other->submit(on_other())->wait_on_stream(elsewhere.get()));
    void* const third = ::fake_driver_end_capture(elsewhere.get());
    EXPECT_NE(third, nullptr);
    for (void* const each : {graph, second, third}) {
      ::fake_driver_destroy_graph(each);
    }
    elsewhere.synchronize();
    other->shutdown();
    rank.group->shutdown();
  });
}

// Of captures that hold nothing of pydist's, on another thread, it cannot know. NCCL's threads do
// not mind them, so groups end before.
TEST(NcclCapture, OfOthersIsLeftWhole) {
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
    MemoryPtr next;
    // Scratch memory may be left a moment after the end.
    EXPECT_TRUE(comes_true([&] {
      next.reset();
      next = other->allocate(1000, Device{DeviceType::kCuda, rank.device});
      return ::fake_driver_blocks() == before - 1;
    })) << "the next allocation frees scratch memory";
    EXPECT_EQ(::fake_nccl_blocks(), 1) << "and whatever else was left";
    other->shutdown();
  });
  EXPECT_EQ(::fake_nccl_faults(), 0);
}

// Nothing waits for a capture where a group fails: it goes on at once, and the capture is lost.
TEST(NcclCapture, IsLostWhereItsGroupFails) {
  use_fake_cuda();
  const FakeFault fault("fail:0:2");
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self, test_environment(), {.end = kForTheEnd});
    std::vector<float> values(10, 1.0F);
    const Capturing capturing(rank, rank.group, values);
    const auto [kind, message, blame] =
        error_of([&] { static_cast<void>(rank.group->submit(rank.all_reduce(values))); });
    EXPECT_EQ(kind, ErrorKind::kTransport);
    EXPECT_TRUE(comes_true([&] { return capturing.is_broken(); }))
        << "the fake is to be as strict as NCCL, or this test tells nothing";
    EXPECT_EQ(capturing.end(), nullptr);
    EXPECT_EQ(error_of([&] { rank.group->run(rank.all_reduce(values)); }).message, message)
        << "the group's error says why";
    rank.group->shutdown();
  });
}

// Who waits for an operation is freed, whatever becomes of the capture.
TEST(NcclCapture, IsLostWhereAnotherGroupFails) {
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
    const Capturing capturing(rank, rank.group, values);
    other->abort(Aborted("enough"));
    EXPECT_EQ(error_of([&] { work->wait(); }).message, "enough");
    EXPECT_TRUE(comes_true([&] { return ::fake_nccl_communicators() == before - 1; }));
    EXPECT_EQ(capturing.end(), nullptr);
    other->shutdown();
    rank.group->shutdown();
  });
}

// A destructor refuses nothing.
TEST(NcclCapture, IsLostWhereAGroupIsDropped) {
  run_ranks(1, [](RankOfTest& self) {
    const NcclRank rank(self, test_environment(), {.end = kForTheEnd});
    CommunicatorPtr other = rank.group->split({0});
    std::vector<float> values(10, 1.0F);
    const int before = ::fake_nccl_communicators();
    const Capturing capturing(rank, rank.group, values);
    other.reset();
    EXPECT_TRUE(comes_true([&] { return ::fake_nccl_communicators() == before - 1; }));
    EXPECT_EQ(capturing.end(), nullptr);
    rank.group->run(rank.all_reduce(values));
    rank.group->shutdown();
  });
}

}  // namespace
}  // namespace pydist::testing
