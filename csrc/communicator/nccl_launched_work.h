// The handle of what an NCCL group has launched; for the files of the group alone.

#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "base/fork.h"
#include "base/interruption.h"
#include "communicator/nccl_group.h"
#include "communicator/work.h"
#include "cuda/stream.h"

namespace pydist {

class NcclGroup::LaunchedWork : public Work {
 public:
  LaunchedWork(std::weak_ptr<NcclGroup> group, int device, bool is_captured)
      : group_(std::move(group)), device_(device), is_captured_(is_captured) {}

  [[nodiscard]] bool wait_on_stream(void* stream) override {
    require_not_forked();
    if (const std::exception_ptr error = exception()) {
      std::rethrow_exception(error);
    }
    if (is_captured_ || !is_completed()) {
      const cuda::DeviceGuard guard(device_);
      // What was captured runs later, whatever the work says: that is for the capture to wait for,
      // and for nobody once it is over.
      if (!is_captured_ || cuda::Driver::get().is_capturing(stream)) {
        event_.hold_back(stream);
      }
    }
    return true;
  }

  [[nodiscard]] const cuda::OwnedEvent& event() const noexcept { return event_; }

 protected:
  void block(Deadline deadline) override {
    require_not_forked();
    constexpr std::chrono::microseconds kLongestPause{500};
    std::chrono::microseconds pause{10};
    Deadline slice = Deadline::in(kInterruptionInterval);
    while (!is_completed() && !deadline.has_passed()) {
      if (const auto group = group_.lock()) {
        group->settle();
        group->watch();
      }
      Work::block(deadline.earlier_of(Deadline::in(pause)));
      pause = std::min(2 * pause, kLongestPause);
      if (slice.has_passed() && !is_completed()) {
        check_interruption();
        slice = Deadline::in(kInterruptionInterval);
      }
    }
  }

 private:
  const std::weak_ptr<NcclGroup> group_;
  const int device_;
  const bool is_captured_;
  cuda::OwnedEvent event_;
};

}  // namespace pydist
