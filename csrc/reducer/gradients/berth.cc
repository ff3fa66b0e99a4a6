#include "reducer/gradients/berth.h"

#include <utility>

#include "base/error.h"
#include "c10d/device_streams.h"
#include "reducer/gradients/gradient_shard.h"

namespace pydist {

bool Berth::try_take(std::vector<GradientSlot>& slots, const std::vector<std::size_t>& members) {
  WorkPtr before;
  if (!users_.empty()) {
    if (work_ == nullptr) {
      return false;
    }
    if (!work_->is_completed()) {
      if (!does_stream_wait(*work_)) {
        return false;
      }
      before = work_;
    }
  }
  release(slots);
  users_ = members;
  before_ = std::move(before);
  for (const std::size_t index : members) {
    // One that came when the bucket had no memory stays where it is until it is averaged.
    slots[index].is_bound = !holds_pending(slots[index]);
  }
  return true;
}

bool Berth::serves(const std::vector<std::size_t>& members) const {
  return !users_.empty() && users_.front() == members.front();
}

void Berth::enter() {
  if (before_ != nullptr && !before_->is_completed()) {
    PYDIST_CHECK(does_stream_wait(*before_));
  }
}

bool Berth::does_stream_wait(Work& work) const {
  return !memory_.is_cpu() &&
         work.wait_on_stream(current_stream(device_of(memory_.device())).native_handle());
}

std::optional<std::size_t> Berth::unlaunched() const {
  return users_.empty() || work_ != nullptr ? std::nullopt : std::optional(users_.front());
}

void Berth::wait() const {
  if (!users_.empty()) {
    PYDIST_CHECK(work_ != nullptr);
    work_->wait();
  }
}

void Berth::wait_quietly(Deadline deadline) const {
  PYDIST_CHECK(work_ != nullptr);
  work_->wait_quietly(deadline);
}

void Berth::evict(std::vector<GradientSlot>& slots) {
  for (const std::size_t index : std::exchange(users_, {})) {
    GradientSlot& slot = slots[index];
    if (slot.is_bound && holds_gradient(slot)) {
      slot.parameter.mutable_grad().set_data(slot.view.clone());
    }
    slot.is_bound = false;
  }
}

void Berth::release(std::vector<GradientSlot>& slots) {
  for (const std::size_t index : std::exchange(users_, {})) {
    GradientSlot& slot = slots[index];
    if (slot.is_bound && holds_gradient(slot)) {
      show_shard(slot);
    }
    slot.is_bound = false;
  }
  work_ = nullptr;
  before_ = nullptr;
}

}  // namespace pydist
