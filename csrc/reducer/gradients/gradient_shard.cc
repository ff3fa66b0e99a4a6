#include "reducer/gradients/gradient_shard.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_as_real.h>

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

void move_in(GradientSlot& slot) {
  if (slot.is_bound) {
    return;
  }
  if (slot.parameter.grad().defined() && !shows_shard(slot)) {
    keep_seen(slot, [&] { adopt(slot); });
  }
  slot.is_bound = true;
}

}  // namespace pydist
