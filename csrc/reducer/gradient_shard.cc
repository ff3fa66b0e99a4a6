#include "reducer/gradient_shard.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_as_real.h>

#include <utility>

#include "base/error.h"

namespace pydist {

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

void Staging::take(std::vector<GradientSlot>& slots, const std::vector<std::size_t>& members) {
  PYDIST_CHECK(is_free());
  release(slots);
  users_ = members;
  for (const std::size_t index : members) {
    slots[index].is_bound = true;
  }
}

void Staging::wait() const {
  if (!users_.empty()) {
    PYDIST_CHECK(work_ != nullptr);
    work_->wait();
  }
}

void Staging::evict(std::vector<GradientSlot>& slots) {
  if (work_ != nullptr) {
    return;
  }
  for (const std::size_t index : std::exchange(users_, {})) {
    const GradientSlot& slot = slots[index];
    if (holds_gradient(slot)) {
      slot.parameter.mutable_grad().set_data(slot.view.clone());
    }
    slots[index].is_bound = false;
  }
}

void Staging::release(std::vector<GradientSlot>& slots) {
  for (const std::size_t index : std::exchange(users_, {})) {
    GradientSlot& slot = slots[index];
    if (holds_gradient(slot)) {
      show_shard(slot);
    }
    slot.is_bound = false;
  }
  work_ = nullptr;
}

}  // namespace pydist
