// A parameter's place in the arena of gradients, and how its gradient gets there.
//
// `parameter.grad` lies in the slot. After `zero_grad(set_to_none=True)` it is undefined until the
// next gradient arrives, which lands in the same slot, unless the program still holds the one
// before: see lent_memory.h. A sparse gradient (of an embedding) has no slot: it stays where
// autograd puts it. So does that of a parameter that joined the model in this round.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "reducer/gradients/factor.h"

namespace pydist {

struct GradientSlot {
  std::size_t index = 0;  // in the order of registration
  std::string name;
  at::Tensor parameter;
  bool is_sparse = false;
  // How the gradient lies in the slot: as the parameter did when it was added, if that was dense.
  std::vector<std::int64_t> strides;
  // Where the gradient is, or lands next. Never handed out: Module.to() swaps the memory under
  // `parameter.grad`. Undefined where there is no place.
  at::Tensor view;
  // The slot's part of its bucket's memory, with a storage of its own, where that memory is lent;
  // see lent_memory.h. The same tensor as `view` unless the gradient lies elsewhere. Undefined
  // where nothing is lent: then `view` is that part.
  at::Tensor home;
  std::int64_t offset = 0;  // of that part in the bucket's memory, in elements of that
  // The bucket in which the slot travels. A slot without a place counts as part of the last one.
  std::size_t bucket = 0;
  // The parameter holds a gradient that was not averaged yet.
  bool is_pending = false;
  // What this rank sends of it in this round: nothing yet, a gradient of its own, what an earlier
  // round has left (it counts if another rank adds to it), or zeros.
  enum class Sends { kNothing, kOwn, kAgain, kZeros };
  Sends sends = Sends::kNothing;
  // From where it is sent, and where the average arrives, if that is not `view`.
  at::Tensor travels_in;
  // What to put back into `view` if no rank has used the parameter; undefined: nothing.
  at::Tensor before;
  // Whether the gradient on its way into `parameter.grad` is defined.
  bool has_arrived = false;
  // How many gradients are on their way there. One may have landed in the slot and not be
  // `parameter.grad` yet; until it is, nothing else may use the slot's memory.
  int landing = 0;
  // The round in which it last received a gradient; how often it did in that round, and in the one
  // before. It is complete when it has received as many.
  std::uint64_t fired_in = 0;
  int fires = 0;
  int expected_fires = 1;
  // What came in this round after the slot's bucket was sent.
  at::Tensor late;
  // An averaged gradient that others are added to; see set_aside().
  at::Tensor aside;
  // `parameter.grad` as it was when a gradient last came to it, or was averaged; see is_seen() and
  // is_untouched().
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> seen{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  std::uint32_t seen_version = 0;
  at::Tensor seen_values;  // instead of the version, where that is of other tensors, too

  // The number of the optimizer that updates shards of the parameter; 0 if its gradient is averaged
  // as a whole. The members below serve sharded parameters alone; see gradient_shard.h.
  int owner = 0;
  // Whether the bucket has its memory at present, so that gradients may land there, and no earlier
  // gradient waits elsewhere for move_in().
  bool is_bound = true;
  // What `parameter.grad` is once this rank's part is averaged: it holds no values of its own.
  at::Tensor shown;
  // This rank's part of the averaged gradient: of one dimension, of the real dtype, perhaps empty.
  at::Tensor segment;
  std::int64_t segment_begin = 0;  // in the slot
};

[[nodiscard]] inline bool has_place(const GradientSlot& slot) { return slot.view.defined(); }

// Whether this rank has no gradient of its own in a round that has come to the slot.
[[nodiscard]] inline bool is_absent(const GradientSlot& slot) {
  return slot.sends == GradientSlot::Sends::kAgain || slot.sends == GradientSlot::Sends::kZeros;
}

// Elements of the real type that a slot takes.
[[nodiscard]] std::int64_t real_count(const at::Tensor& parameter);

// `flat`, of one dimension and the real type, as the slot's gradient.
[[nodiscard]] at::Tensor shaped(const GradientSlot& slot, const at::Tensor& flat);

// Whether `parameter.grad` lies in the slot. For one without a place, or that is not bound: whether
// there is one.
[[nodiscard]] bool holds_gradient(const GradientSlot& slot);

// Makes `parameter.grad` a view of the slot, whatever the slot holds.
void expose(const GradientSlot& slot);

// Whether `parameter.grad`, which is there, has the type, shape and device of the slot's.
[[nodiscard]] bool fits(const GradientSlot& slot);

// Throws InvalidUsage: a gradient that has come is not in `parameter.grad`.
[[noreturn]] void throw_taken_away(const GradientSlot& slot);
// Throws InvalidUsage: it is unknown which passes with weights a gradient comes from.
[[noreturn]] void throw_replaced(const GradientSlot& slot);

// Throws InvalidUsage where `parameter.grad` cannot lie in the slot.
void require_fitting(const GradientSlot& slot);

// Moves `parameter.grad`, which lies elsewhere, into the slot. Throws InvalidUsage where it does
// not fit.
void adopt(const GradientSlot& slot);

// Copies `factor` times a gradient that is about to become `parameter.grad` into the slot, and
// returns an alias of the slot, which AccumulateGrad takes over instead of making a copy. Where
// that cannot be done, returns `factor` times `gradient`; adopt() does the rest then.
[[nodiscard]] at::Tensor land(const GradientSlot& slot, const at::Tensor& gradient,
                              const Factor& factor);

// Whether `parameter.grad` is what an earlier round has left, scaled or clipped perhaps.
[[nodiscard]] bool is_averaged(const GradientSlot& slot);

// Whether somebody has put a gradient of this rank's into `parameter.grad`, or replaced what was
// there: it counts like one that a backward has brought.
[[nodiscard]] bool is_by_hand(const GradientSlot& slot);

// Keeps an averaged gradient apart from what is going to be added to it, so that averaging counts
// only the latter; put_back() adds it again. In between, `parameter.grad` is zero until the next
// gradient arrives: the same tensor, for those who hold it. It is undefined where it has no place,
// or is a stand-in for a shard.
void set_aside(GradientSlot& slot);
void put_back(GradientSlot& slot);

// Remembers what `parameter.grad` is now. Views of one buffer have one version, which tells of none
// whether somebody has written there; if `by_value`, what they hold is remembered then.
void note_seen(GradientSlot& slot, bool by_value = false);

// Whether nobody has replaced `parameter.grad` since note_seen().
[[nodiscard]] bool is_seen(const GradientSlot& slot);

// Whether nobody has replaced `parameter.grad` since note_seen(), nor written into it.
[[nodiscard]] bool is_untouched(const GradientSlot& slot);

// Calls `move`, which gives `parameter.grad` other memory without the program's doing. Afterwards
// is_seen() and is_untouched() answer as before.
template <typename Move>
void keep_seen(GradientSlot& slot, const Move& move) {
  const bool was_seen = is_seen(slot);
  const bool was_untouched = is_untouched(slot);
  move();
  if (!was_seen || is_seen(slot)) {
    return;
  }
  note_seen(slot);
  if (!was_untouched) {
    slot.parameter.grad().unsafeGetTensorImpl()->bump_version();
  }
}

// Whether `parameter.grad` is there and zero.
[[nodiscard]] bool is_zero(const GradientSlot& slot);

// Whether the parameter holds what was accumulated and not averaged, zero or not.
[[nodiscard]] bool holds_pending(const GradientSlot& slot);

// Whether the parameter may still hold what was accumulated and not averaged: nobody has set it to
// zero or None since, or it has got something else since then.
[[nodiscard]] bool is_still_pending(const GradientSlot& slot);

// Forgets what was set aside if the gradient was set to zero or None since. Throws InvalidUsage
// where it was changed otherwise, which leaves open what the sum of the two is.
void check_aside(GradientSlot& slot);

// Throws InvalidUsage where the parameter is no longer what the slot was made for.
void require_unchanged(const GradientSlot& slot);

}  // namespace pydist
