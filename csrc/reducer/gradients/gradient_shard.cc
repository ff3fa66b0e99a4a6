#include "reducer/gradients/gradient_shard.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_as_real.h>

#include <utility>

#include "base/error.h"
#include "c10d/device_streams.h"

namespace pydist {
namespace {

// Whether a gradient came when the bucket had no memory, and was not averaged yet.
bool waits_elsewhere(const GradientSlot& slot) {
  return slot.is_pending && slot.parameter.grad().defined() && !shows_shard(slot);
}

}  // namespace

at::Tensor segment_of(const GradientSlot& slot, const at::Tensor& gradient) {
  at::Tensor whole = gradient.detach();
  if (whole.layout() != at::kStrided || whole.strides() != at::IntArrayRef(slot.strides) ||
      whole.scalar_type() != slot.parameter.scalar_type() || whole.is_conj() || whole.is_neg()) {
    whole = at::empty_strided(slot.parameter.sizes(), slot.strides, slot.parameter.options());
    whole.copy_(gradient);
  }
  at::Tensor flat = whole.as_strided({whole.numel()}, {1});
  if (flat.is_complex()) {
    flat = at::view_as_real(flat).view({-1});
  }
  return flat.narrow(0, slot.segment_begin, slot.segment.numel());
}

void move_in(GradientSlot& slot) {
  if (slot.is_bound) {
    return;
  }
  if (slot.parameter.grad().defined() && !shows_shard(slot)) {
    keep_seen(slot, [&] { adopt(slot); });
  }
  slot.is_bound = true;
}

bool Staging::try_take(std::vector<GradientSlot>& slots, const std::vector<std::size_t>& members) {
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
    slots[index].is_bound = !waits_elsewhere(slots[index]);
  }
  return true;
}

bool Staging::serves(const std::vector<std::size_t>& members) const {
  return !users_.empty() && users_.front() == members.front();
}

void Staging::enter() {
  if (before_ != nullptr && !before_->is_completed()) {
    PYDIST_CHECK(does_stream_wait(*before_));
  }
}

bool Staging::does_stream_wait(Work& work) const {
  return !memory_.is_cpu() &&
         work.wait_on_stream(current_stream(device_of(memory_.device())).native_handle());
}

std::optional<std::size_t> Staging::unlaunched() const {
  return users_.empty() || work_ != nullptr ? std::nullopt : std::optional(users_.front());
}

void Staging::wait() const {
  if (!users_.empty()) {
    PYDIST_CHECK(work_ != nullptr);
    work_->wait();
  }
}

void Staging::wait_quietly(Deadline deadline) const {
  PYDIST_CHECK(work_ != nullptr);
  work_->wait_quietly(deadline);
}

void Staging::evict(std::vector<GradientSlot>& slots) {
  for (const std::size_t index : std::exchange(users_, {})) {
    GradientSlot& slot = slots[index];
    if (slot.is_bound && holds_gradient(slot)) {
      slot.parameter.mutable_grad().set_data(slot.view.clone());
    }
    slot.is_bound = false;
  }
}

void Staging::release(std::vector<GradientSlot>& slots) {
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
