// The handle of what an NCCL group has launched; for the files of the group alone.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "base/fork.h"
#include "base/interruption.h"
#include "communicator/nccl/nccl_group.h"
#include "communicator/work.h"
#include "cuda/stream.h"

namespace pydist {

class NcclGroup::LaunchedWork : public Work {
 public:
  // `capture` is the id of what captures it, if anything.
  LaunchedWork(std::weak_ptr<NcclGroup> group, int device, std::optional<std::uint64_t> capture)
      : group_(std::move(group)), device_(device), capture_(capture) {}

  [[nodiscard]] bool wait_on_stream(void* stream) override {
    require_not_forked();
    rethrow_if_any(exception());
    if (is_to_be_awaited()) {
      const cuda::DeviceGuard guard(device_);
      const std::uint64_t id = cuda::Driver::get().id_of(stream);
      if (awaited_by_ != id) {
        event_.hold_back(stream);
        awaited_by_ = id;  // not before: another thread may go on with that stream
      }
    }
    return true;
  }

  [[nodiscard]] bool is_captured() const override { return capture_.has_value(); }

  [[nodiscard]] std::string diagnosis() override {
    const auto group = group_.lock();
    return group == nullptr ? "" : places_of_ranks(group->control());
  }

  [[nodiscard]] const cuda::OwnedEvent& event() const noexcept { return event_; }

 protected:
  void block(Deadline deadline) override {
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
  static constexpr std::uint64_t kNoStream = std::numeric_limits<std::uint64_t>::max();

  [[nodiscard]] bool is_to_be_awaited() const {
    if (!capture_) {
      return !is_completed();
    }
    // What was captured runs later, whatever the work says.
    const auto group = group_.lock();
    return group != nullptr && group->is_captured_by(*capture_);
  }

  const std::weak_ptr<NcclGroup> group_;
  const int device_;
  const std::optional<std::uint64_t> capture_;
  cuda::OwnedEvent event_;
  // The last stream that waits.
  std::atomic<std::uint64_t> awaited_by_{kNoStream};
};

}  // namespace pydist
