// Gradients of which this rank needs a part only, because an optimizer has shards.
//
// A bucket of such gradients travels in a reduce_scatter, and each rank gets the average of its
// *shard* of the bucket (bucketing/shard_layout.h). `parameter.grad` is a stand-in then, without
// values: what is there besides the shard is this rank's own, and no average.
//
// In stage 1 a bucket has its place in the arena for good, and the shard is a part of it. In stage
// 2 the shard has memory of its own, and the buckets share a few berths (berth.h). Gradients that
// find none stay where autograd has put them until their bucket has memory and the next one
// arrives, or until it is launched, and are freed then.

#pragma once

#include <ATen/core/Tensor.h>

#include "reducer/gradients/gradient_slot.h"

namespace pydist {

[[nodiscard]] inline bool is_sharded(const GradientSlot& slot) {
  return slot.owner != 0 && has_place(slot);
}

// Whether `parameter.grad` is the stand-in.
[[nodiscard]] inline bool shows_shard(const GradientSlot& slot) {
  return slot.shown.defined() && slot.parameter.grad().is_same(slot.shown);
}

inline void show_shard(const GradientSlot& slot) { slot.parameter.mutable_grad() = slot.shown; }

// This rank's part of a whole gradient, like slot.segment: a view of it, or of a copy.
[[nodiscard]] at::Tensor segment_of(const GradientSlot& slot, const at::Tensor& gradient);

// Moves a gradient that came when the bucket had no memory into that which it has now.
void move_in(GradientSlot& slot);

}  // namespace pydist
