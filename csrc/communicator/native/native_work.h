// The handle of an operation of the native backend: whoever waits for it drives it.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "base/interruption.h"
#include "communicator/peers/wait_loop.h"
#include "communicator/work.h"

namespace pydist {

// A Drivable whose operations can be waited for.
class WaitableDrivable : public Drivable {
 public:
  // Whom it waits for at present; for the message of a Timeout.
  [[nodiscard]] virtual std::string diagnosis() = 0;

 protected:
  using Drivable::Drivable;
};

class NativeWork final : public Work {
 public:
  explicit NativeWork(std::shared_ptr<WaitableDrivable> drivable)
      : drivable_(std::move(drivable)) {}

  [[nodiscard]] std::string diagnosis() override { return drivable_->diagnosis(); }

  void go_on_unattended() override {
    if (!is_completed()) {
      drivable_->hand_over_unattended();
    }
  }

  // Whether a thread waits for it now: until then its program goes on.
  [[nodiscard]] bool is_waited_for() const noexcept {
    return waiters_.load(std::memory_order_relaxed) != 0;
  }

 protected:
  void block(Deadline deadline) override {
    if (deadline.has_passed()) {
      drivable_->drive_in_passing();
      return;
    }
    const Waiting waiting(waiters_);
    // How long somebody else is left to drive before this thread tries to take over: ever longer,
    // since the progress thread drives what a waiter leaves.
    std::chrono::microseconds patience{200};
    constexpr std::chrono::microseconds kMostPatience{20'000};
    Deadline slice = Deadline::in(kInterruptionInterval);
    while (!is_completed() && !deadline.has_passed()) {
      if (auto right = drivable_->try_attend()) {
        drivable_->attend_until([this] { return is_completed(); },
                                deadline.remaining(kInterruptionInterval));
        drivable_->leave(std::move(right));
      } else {
        Work::block(deadline.earlier_of(Deadline::in(patience)));
        patience = std::min(2 * patience, kMostPatience);
      }
      if (slice.has_passed() && !is_completed()) {
        check_interruption();
        slice = Deadline::in(kInterruptionInterval);
      }
    }
  }

 private:
  class Waiting {
   public:
    explicit Waiting(std::atomic<int>& waiters) : waiters_(waiters) {
      waiters_.fetch_add(1, std::memory_order_relaxed);
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    ~Waiting() { waiters_.fetch_sub(1, std::memory_order_relaxed); }

   private:
    std::atomic<int>& waiters_;
  };

  const std::shared_ptr<WaitableDrivable> drivable_;
  std::atomic<int> waiters_{0};
};

}  // namespace pydist
