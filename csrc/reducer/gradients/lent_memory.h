// Gradients that the program keeps.
//
// Torch's DDP leaves each gradient in memory of its own, so a program may keep one beyond the step:
// by a list, a view, detach(), a NumPy array. Here gradients lie in the buckets' memory, which is
// written again in the next step. So that memory is *lent*: each slot's part of it, its *home*, has
// a storage of its own, and how often that is used tells whether anybody holds it.
//
// Note [Displaced]
// On the CPU, whoever holds memory keeps it, because nobody can tell a NumPy array that its memory
// has moved. The gradient moves instead, and the slot is *displaced*:
//   - When a gradient is about to land and somebody holds the home, it lands in memory of its own.
//   - A gradient that the program has put into `parameter.grad`, and holds itself (a view of a flat
//     buffer, say), stays there, and the average is written there.
//   - When a plan cuts the memory anew, a gradient that somebody holds stays where it is. *Leases*
//     remember such memory until nobody holds it, because it is part of other slots' homes now.
// A displaced gradient is copied into the bucket before it travels, and the average is copied back.
// Where somebody holds a home, the bucket may not be written at all, and travels in a copy.
//
// On a device, the holder moves: its values are copied, and its storage is given the memory of the
// copy. NCCL averages in memory that it has registered on all ranks or on none, so a bucket travels
// in its own memory on every rank. Only a raw pointer (through DLPack, say) stays behind. What a
// CUDA graph may have recorded is an address too, so there holding a gradient raises InvalidUsage.
//
// A displaced gradient goes home as soon as nobody holds it any more. Where nobody holds anything,
// all of this is a look at each storage's count.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "reducer/gradients/gradient_slot.h"

namespace pydist {

// For one thread at a time, like the slots. Functions that take a slot do nothing special for one
// whose memory is not lent.
class LentMemory {
 public:
  // -- where a gradient lies

  // Called before a gradient lands in `view`, if `parameter.grad` does not lie there. Afterwards
  // `view` is memory that nobody holds.
  void make_room(GradientSlot& slot);

  // Where `parameter.grad` lies elsewhere: moves it into the slot, or the slot to where it lies, if
  // somebody else holds it there. Throws InvalidUsage where it does not fit.
  void take_in(GradientSlot& slot);

  // Where `parameter.grad` is undefined: whether the next gradient can be made in the slot's home.
  [[nodiscard]] bool has_free_home(const GradientSlot& slot);
  // Whether a gradient that arrives was made there, and nobody but autograd holds it.
  // Precondition: nobody held the home when its memory was given out for that.
  [[nodiscard]] bool is_made_at_home(const GradientSlot& slot, const at::Tensor& gradient);

  // Between backwards, where there is no `parameter.grad`: keeps no memory but the home.
  void forget(GradientSlot& slot);

  // -- a bucket on its way

  // Once all slots of a bucket have what they send: returns what travels, which is `memory`, the
  // bucket's own, unless somebody holds a part of it.
  [[nodiscard]] at::Tensor load(std::vector<GradientSlot>& slots,
                                const std::vector<std::size_t>& members, const at::Tensor& memory);

  // The same where nobody looks at the values.
  [[nodiscard]] at::Tensor load_nothing(std::vector<GradientSlot>& slots,
                                        const std::vector<std::size_t>& members,
                                        const at::Tensor& memory);

  // Brings what has arrived to `parameter.grad`; or, where no rank has used the parameter, leaves
  // that as it was.
  void unload(GradientSlot& slot, bool is_used);

  // -- another plan

  // Before the slot gets another home: its gradient leaves the old one, or stays if it is held.
  void leave_home(GradientSlot& slot);
  // When all slots have theirs: lets the gradient move in, if it can.
  void go_home(GradientSlot& slot);

  // Whether addresses must stay as they are, because a CUDA graph may hold them.
  void set_fixed(bool is_fixed) noexcept { is_fixed_ = is_fixed; }

  // What was copied since the last call because somebody held a gradient, in bytes.
  [[nodiscard]] std::int64_t take_copied_bytes() noexcept {
    return std::exchange(copied_bytes_, 0);
  }

 private:
  // A part of a block that was a slot's home.
  struct Lease {
    std::uintptr_t begin;
    std::uintptr_t end;
    c10::weak_intrusive_ptr<c10::StorageImpl> holders;
  };

  [[nodiscard]] bool is_free(const GradientSlot& slot);
  [[nodiscard]] bool is_leased(const at::Tensor& tensor);
  [[nodiscard]] bool may_travel_at_home(GradientSlot& slot);
  void renew_home(GradientSlot& slot, const at::Tensor& memory);
  void move_holders_of(GradientSlot& slot);
  void copy(const at::Tensor& target, const at::Tensor& source);

  std::vector<Lease> leases_;
  bool is_fixed_ = false;
  std::int64_t copied_bytes_ = 0;
};

}  // namespace pydist
