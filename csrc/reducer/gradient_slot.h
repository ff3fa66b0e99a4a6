// A parameter's place in the arena of gradients, and how its gradient gets there.
//
// A sparse gradient (of an embedding) has no place there: it stays where autograd puts it.
//
// `parameter.grad` is a view of the slot. After `zero_grad(set_to_none=True)` it is undefined until
// the next gradient arrives, which lands in the same slot.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace pydist {

struct GradientSlot {
  std::size_t index = 0;  // in the order of registration
  std::string name;
  at::Tensor parameter;
  // Never handed out: Module.to() swaps the memory under `parameter.grad`. Undefined where the
  // gradient is sparse.
  at::Tensor view;
  // Sparse gradients count as part of the last one, in which their words are.
  std::size_t bucket = 0;
  // The parameter holds a gradient that was not averaged yet.
  bool is_pending = false;
  // The gradient on its way into `parameter.grad` is one, not nothing.
  bool has_arrived = false;
  // The round in which it last received a gradient.
  std::uint64_t fired_in = 0;
};

[[nodiscard]] inline bool is_sparse(const GradientSlot& slot) { return !slot.view.defined(); }

// Whether `parameter.grad` lies in the slot. For sparse gradients: whether there is one.
[[nodiscard]] bool holds_gradient(const GradientSlot& slot);

// Makes `parameter.grad` a view of the slot, whatever the slot holds.
void expose(const GradientSlot& slot);

// Moves `parameter.grad`, which lies elsewhere, into the slot. Throws InvalidUsage where it does
// not fit.
void adopt(const GradientSlot& slot);

// Copies a gradient that is about to become `parameter.grad` into the slot, and returns an alias of
// the slot, which AccumulateGrad takes over instead of making a copy. Returns `gradient` itself
// where that cannot be done; adopt() does the rest then.
[[nodiscard]] at::Tensor land(const GradientSlot& slot, const at::Tensor& gradient);

// Throws InvalidUsage where the parameter is no longer what the slot was made for.
void require_unchanged(const GradientSlot& slot);

}  // namespace pydist
