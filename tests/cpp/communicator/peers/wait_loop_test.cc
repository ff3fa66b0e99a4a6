// Who drives what nobody waits for, and when.

#include "communicator/peers/wait_loop.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "base/deadline.h"

namespace pydist {
namespace {

using std::chrono::milliseconds;

// So many steps are to be done.
class Steps final : public Drivable {
 public:
  Steps(std::shared_ptr<ProgressThread> progress, HandOver way)
      : Drivable(std::move(progress), way) {}

  void add() {
    prepare();
    left_.fetch_add(1);
    hand_over();
  }
  [[nodiscard]] int left() const { return left_.load(); }
  [[nodiscard]] bool are_done_soon() const {
    const Deadline deadline = Deadline::in(std::chrono::seconds(30));
    while (left_.load() != 0 && !deadline.has_passed()) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    return left_.load() == 0;
  }

 protected:
  bool drive() override {
    const bool has_step = left_.load() != 0;
    if (has_step) {
      left_.fetch_sub(1);
    }
    return has_step;
  }
  [[nodiscard]] bool has_work() override { return left_.load() != 0; }

 private:
  std::atomic<int> left_{0};
};

class WaitLoopTest : public ::testing::Test {
 protected:
  WaitLoopTest() { progress_->start(); }
  ~WaitLoopTest() override { progress_->stop(); }

  [[nodiscard]] std::shared_ptr<Steps> steps(HandOver way) const {
    return std::make_shared<Steps>(progress_, way);
  }

  static inline Doorbell doorbell_;
  const std::shared_ptr<ProgressThread> progress_ = std::make_shared<ProgressThread>(
      std::shared_ptr<Doorbell>(&doorbell_, [](Doorbell*) {}), std::chrono::nanoseconds(0));
};

TEST_F(WaitLoopTest, WhatIsHandedOverIsDriven) {
  for (const HandOver way : {HandOver::kAtOnce, HandOver::kSoon}) {
    const std::shared_ptr<Steps> some = steps(way);
    // At once one after the other, while the thread naps, and after it has gone to sleep.
    for (const milliseconds pause : {milliseconds(0), milliseconds(1), milliseconds(20)}) {
      for (int i = 0; i < 20; ++i) {
        some->add();
        std::this_thread::sleep_for(pause);
        if (i % 5 == 0) {
          ASSERT_TRUE(some->are_done_soon());
        }
      }
      ASSERT_TRUE(some->are_done_soon());
    }
  }
}

TEST_F(WaitLoopTest, WhoLooksDrivesWhatTheThreadWasNotWokenFor) {
  for (const HandOver way : {HandOver::kAtOnce, HandOver::kSoon}) {
    const std::shared_ptr<Steps> some = steps(way);
    progress_->stop();
    some->add();
    EXPECT_EQ(some->left(), 1);
    some->drive_in_passing();
    EXPECT_EQ(some->left(), way == HandOver::kSoon ? 0 : 1);
  }
}

}  // namespace
}  // namespace pydist
