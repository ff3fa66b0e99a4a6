// A rank that is frozen where the system sees it alive, as a container that is paused keeps it: its
// heart stands still, and whom it shows to wait for no longer counts. The heart of one that is only
// starved goes on.
//
// The other ranks are pages that the test writes.

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "communicator/native/group_health.h"
#include "communicator/native/message_queue.h"
#include "ranks.h"
#include "transport/lane_segment.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;

constexpr int kSize = 3;
constexpr std::size_t kChunkBytes = 65536;

// Rank 0 of three, which waits for rank 1, which waits for rank 2, which waits for rank 0.
class NativeFrozenTest : public ::testing::Test {
 protected:
  NativeFrozenTest() : endpoint_(std::make_shared<Endpoint>(test_environment())) {
    pages_[1].awaited.set(fingerprint_on_host("ring"), 2, 72);
    pages_[2].awaited.set(fingerprint_on_host("ring"), 0, 70);
    beat(1, milliseconds(0));
    std::vector<Doorbell*> doorbells;
    for (int rank = 0; rank < kSize; ++rank) {
      auto peer = std::make_shared<Peer>();
      peer->description = join("pid 7", rank, " on host a");
      peer->host = "a";
      peer->pid = 70 + rank;
      peer->local_pid = ::getpid();  // one that is alive
      peer->page = rank == 0 ? &endpoint_->page() : &pages_[rank];
      peer->doorbell = rank == 0 ? &endpoint_->doorbell() : &doorbells_[rank];
      doorbells.push_back(peer->doorbell);
      peers_.push_back(std::move(peer));
    }
    const SharedSegment group =
        SharedSegment::create("group", GroupSegment::bytes(kSize, kChunkBytes));
    const LaneTable table(kSize);
    const SharedSegment messages =
        SharedSegment::create("messages", LaneSegment::bytes(table, kMessageLanes));
    const LaneSegment lanes(messages, table, kMessageLanes);
    for (int rank = 0; rank < kSize; ++rank) {
      GroupSegment(group, kSize, kChunkBytes).reserve_control(rank);
      lanes.reserve_counters(rank);
    }
    health_ = std::make_shared<GroupHealth>("ring", 0, endpoint_,
                                            GroupSegment(group, kSize, kChunkBytes), peers_,
                                            /*long_wait=*/milliseconds(20));
    queue_ = std::make_shared<MessageQueue>(endpoint_->progress(), health_,
                                            Messages(0, kSize, lanes, doorbells));
  }

  // The last beat of a heart was so long ago.
  void beat(int rank, nanoseconds ago) {
    pages_[rank].heartbeat_ns.store(monotonic_ns() - ago.count());
  }

  // What a receive from rank 1 ends with, for which nobody ever sends. It lasts many times as long
  // as the log's patience, also where no thread of this process has run for a while.
  ErrorDescription timeout_of_a_receive() {
    std::vector<int> values(3);
    return error_of([&] {
      queue_->submit(receive_from(1, 5, values), Deadline::in(milliseconds(400 * kSlowdown)))
          ->wait();
    });
  }

  // Whatever was to be written to the log has been.
  void leave() {
    queue_.reset();
    health_.reset();
    endpoint_.reset();
  }

  ProcessPage pages_[kSize] = {};
  Doorbell doorbells_[kSize] = {};
  std::shared_ptr<Endpoint> endpoint_;
  std::vector<PeerPtr> peers_;
  std::shared_ptr<GroupHealth> health_;
  std::shared_ptr<MessageQueue> queue_;
};

TEST_F(NativeFrozenTest, ARankWhoseHeartStandsStillKeepsAllWaiting) {
  beat(2, seconds(10));
  const GroupHealth::Keeper keeper = health_->keeper_behind(1);
  EXPECT_EQ(keeper.rank, 2);
  EXPECT_EQ(keeper.way, "it waits for rank 1, which waits for rank 2. ");
  EXPECT_EQ(keeper.cause, "has shown no sign of life for 10 s");
}

TEST_F(NativeFrozenTest, AStarvedRankWaitsLikeAnyOther) {
  beat(2, milliseconds(1000));
  const GroupHealth::Keeper keeper = health_->keeper_behind(1);
  EXPECT_EQ(keeper.rank, 1) << "the way leads back, and nobody in particular is to blame";
  EXPECT_EQ(keeper.way, "");
  EXPECT_EQ(keeper.cause, "has not entered any operation yet");
}

TEST_F(NativeFrozenTest, ATimeoutBlamesItAndTheLogWarnsOfItBefore) {
  beat(2, seconds(10));
  ::testing::internal::CaptureStderr();
  const auto [kind, message, blame] = timeout_of_a_receive();
  leave();
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(kind, ErrorKind::kTimeout) << message;
  EXPECT_EQ(blame.ranks, std::vector<int>{2}) << message;
  EXPECT_EQ(blame.pid, 72);
  const std::string cause = "has shown no sign of life for ";
  EXPECT_PRED2(contains, blame.cause, cause);
  const std::string why =
      "it waits for rank 1, which waits for rank 2. rank 2 (pid 72 on host a) " + cause;
  EXPECT_PRED2(contains, message, why);
  EXPECT_PRED2(contains, log, "for 0.02 s: " + why);
}

TEST_F(NativeFrozenTest, ATimeoutBlamesNoRankThatIsOnlyStarved) {
  beat(2, seconds(0));
  const auto [kind, message, blame] = timeout_of_a_receive();
  EXPECT_EQ(kind, ErrorKind::kTimeout) << message;
  EXPECT_EQ(blame.ranks, std::vector<int>{1}) << message;
  EXPECT_FALSE(contains(message, "no sign of life")) << message;
}

}  // namespace
}  // namespace pydist::testing
