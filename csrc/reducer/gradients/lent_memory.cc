#include "reducer/gradients/lent_memory.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "base/error.h"
#include "c10d/memory_tensor.h"

namespace pydist {
namespace {

bool is_lent(const GradientSlot& slot) { return slot.home.defined(); }

bool is_at_home(const GradientSlot& slot) { return slot.view.is_same(slot.home); }

// How many tensors and other objects use a storage. A Python object of the storage that nobody
// refers to does not count.
std::size_t uses(const c10::Storage& storage) {
  const std::size_t count = storage.use_count();
  const bool has_idle_object =
      count > 1 && storage.unsafeGetStorageImpl()->pyobj_slot()->has_unique_reference();
  return has_idle_object ? count - 1 : count;
}

// Whether anybody but `parameter.grad` and the slot itself holds the gradient, or memory of it.
bool is_held(const GradientSlot& slot) {
  const at::Tensor& gradient = slot.parameter.grad();
  // Autograd's own question, before it takes a tensor over.
  if (!torch::autograd::impl::is_tensor_stealable(gradient)) {
    return true;
  }
  if (!gradient.has_storage()) {
    return false;
  }
  const c10::Storage& storage = gradient.storage();
  std::size_t own = 1;
  own += slot.view.defined() && slot.view.storage().is_alias_of(storage) ? 1 : 0;
  own += is_lent(slot) && !is_at_home(slot) && slot.home.storage().is_alias_of(storage) ? 1 : 0;
  return uses(storage) > own;
}

// Whether nobody but autograd holds a gradient that arrives, or memory of it.
bool is_autograds_alone(const at::Tensor& gradient) {
  if (!torch::autograd::impl::is_tensor_stealable(gradient)) {
    return false;
  }
  // A view, such as the transposed gradient of a linear layer, keeps what it is a view of.
  const bool has_base = gradient.is_view();
  if (has_base) {
    const at::Tensor base(gradient._base());
    if (!torch::autograd::impl::is_tensor_stealable(base, /*num_expected_refs=*/2)) {
      return false;
    }
  }
  return uses(gradient.storage()) == (has_base ? 2 : 1);
}

// Whether averages can be written where `parameter.grad` lies.
bool can_stay(const at::Tensor& gradient) {
  return gradient.has_storage() && !gradient.is_conj() && !gradient.is_neg() &&
         !gradient._is_zerotensor() && !gradient.is_inference() &&
         at::has_internal_overlap(gradient) != at::MemOverlap::Yes;
}

bool lies_at(const at::Tensor& gradient, const at::Tensor& place) {
  return gradient.const_data_ptr() == place.const_data_ptr() &&
         gradient.strides() == place.strides();
}

// What a tensor's elements span, where they are dense.
std::pair<std::uintptr_t, std::uintptr_t> range_of(const at::Tensor& tensor) {
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  return {begin, begin + tensor.nbytes()};
}

// Lets the slot lie where its gradient is, outside of its home.
void follow(GradientSlot& slot) { slot.view = slot.parameter.grad().variable_data(); }

}  // namespace

void LentMemory::make_room(GradientSlot& slot) {
  if (!is_lent(slot) || (is_at_home(slot) && is_free(slot))) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  if (!is_at_home(slot) && is_leased(slot.view)) {
    // That memory belongs to an earlier plan. It is part of other homes now, perhaps of this one.
    slot.view = slot.home;
  }
  if (is_free(slot)) {
    slot.view = slot.home;
  } else if (!slot.home.is_cpu()) {
    move_holders_of(slot);
    slot.view = slot.home;
  } else if (is_at_home(slot) || uses(slot.view.storage()) > 1) {
    slot.view = at::empty_strided(slot.home.sizes(), slot.home.strides(), slot.home.options());
  }
}

bool LentMemory::has_free_home(const GradientSlot& slot) {
  return is_lent(slot) && is_at_home(slot) && is_free(slot);
}

bool LentMemory::is_made_at_home(const GradientSlot& slot, const at::Tensor& gradient) {
  // The home is used by the slot, and by the allocator on behalf of the gradient's storage.
  constexpr std::size_t kUses = 2;
  // A lazy clone shares the memory by another holder of it, which no count tells of.
  const auto has_block_alone = [&] {
    return gradient.storage().data_ptr().get_context() == slot.home.const_data_ptr();
  };
  return is_lent(slot) && is_at_home(slot) && lies_at(gradient, slot.home) &&
         gradient.scalar_type() == slot.home.scalar_type() &&
         gradient.sizes() == slot.home.sizes() && !gradient.is_conj() && !gradient.is_neg() &&
         has_block_alone() && is_autograds_alone(gradient) && uses(slot.home.storage()) == kUses &&
         !is_leased(slot.home);
}

void LentMemory::take_in(GradientSlot& slot) {
  if (!is_lent(slot)) {
    return adopt(slot);
  }
  require_fitting(slot);
  const at::Tensor& gradient = slot.parameter.grad();
  if (lies_at(gradient, slot.home)) {
    slot.view = slot.home;  // the gradient of an earlier step, which somebody has put back
    return;
  }
  keep_seen(slot, [&] {
    if (can_stay(gradient) && (is_held(slot) || (slot.home.is_cpu() && !is_free(slot)))) {
      return follow(slot);
    }
    make_room(slot);
    adopt(slot);
  });
}

void LentMemory::forget(GradientSlot& slot) {
  if (is_lent(slot) && !slot.parameter.grad().defined()) {
    slot.view = slot.home;
  }
}

at::Tensor LentMemory::load(std::vector<GradientSlot>& slots,
                            const std::vector<std::size_t>& members, const at::Tensor& memory) {
  using Sends = GradientSlot::Sends;
  bool is_at_home_alone = true;
  for (const std::size_t index : members) {
    GradientSlot& slot = slots[index];
    if (!is_lent(slot)) {
      continue;
    }
    renew_home(slot, memory);
    forget(slot);
    go_home(slot);
    is_at_home_alone = may_travel_at_home(slot) && is_at_home_alone;
  }
  at::Tensor travelling = is_at_home_alone ? memory : at::zeros_like(memory);
  for (const std::size_t index : members) {
    GradientSlot& slot = slots[index];
    if (is_at_home_alone && (!is_lent(slot) || is_at_home(slot))) {
      if (slot.sends == Sends::kAgain) {
        slot.before = slot.view.clone();
      } else if (slot.sends == Sends::kZeros) {
        slot.view.zero_();
      }
      continue;
    }
    slot.travels_in =
        is_at_home_alone
            ? slot.home
            : shaped(slot, travelling.narrow(0, slot.offset, real_count(slot.parameter)));
    if (slot.sends != Sends::kZeros) {
      copy(slot.travels_in, slot.view);
    } else if (is_at_home_alone) {
      slot.travels_in.zero_();
    }
  }
  return travelling;
}

// Tensor.share_memory_() gives a storage other memory. The gradient is there then.
void LentMemory::renew_home(GradientSlot& slot, const at::Tensor& memory) {
  const auto* const place = static_cast<const std::byte*>(memory.const_data_ptr()) +
                            static_cast<std::size_t>(slot.offset) * memory.itemsize();
  if (slot.home.numel() != 0 && slot.home.const_data_ptr() != place) {
    slot.home = shaped(slot, part_with_storage(memory, slot.offset, real_count(slot.parameter)));
  }
}

// Whether the slot's home may be written while its bucket travels. On a device it always may, since
// holders can be moved away.
bool LentMemory::may_travel_at_home(GradientSlot& slot) {
  if (is_at_home(slot) && slot.parameter.grad().defined()) {
    // Whoever holds the gradient sees the average appear in it, as with torch's DDP. But if this
    // rank sends no gradient of its own, a holder must see no change unless another rank sends one,
    // nor if the round fails.
    return slot.sends == GradientSlot::Sends::kOwn || !slot.home.is_cpu() || !is_held(slot);
  }
  if (is_free(slot)) {
    return true;
  }
  if (slot.home.is_cpu()) {
    return false;
  }
  move_holders_of(slot);
  return true;
}

at::Tensor LentMemory::load_nothing(std::vector<GradientSlot>& slots,
                                    const std::vector<std::size_t>& members,
                                    const at::Tensor& memory) {
  bool is_anything_held = false;
  for (const std::size_t index : members) {
    GradientSlot& slot = slots[index];
    if (!is_lent(slot)) {
      continue;
    }
    const bool lies_there = is_at_home(slot) && holds_gradient(slot);
    if (lies_there ? !is_held(slot) : is_free(slot)) {
      continue;
    }
    is_anything_held = true;
    if (!memory.is_cpu() && !is_fixed_) {
      move_holders_of(slot);
      slot.view = slot.home;
    }
  }
  return is_anything_held && memory.is_cpu() ? at::zeros_like(memory) : memory;
}

void LentMemory::unload(GradientSlot& slot, bool is_used) {
  if (!is_used) {
    if (slot.before.defined()) {
      slot.view.copy_(slot.before);
    }
    return;
  }
  const bool lies_there = holds_gradient(slot);
  if (!lies_there && !is_absent(slot)) {
    return;  // the program has taken it away in the meantime
  }
  if (slot.travels_in.defined()) {
    if (!lies_there) {
      make_room(slot);
    }
    copy(slot.view, slot.travels_in);
  }
  if (!lies_there) {
    expose(slot);
  }
}

void LentMemory::leave_home(GradientSlot& slot) {
  const bool holds = holds_gradient(slot) && can_stay(slot.parameter.grad()) && fits(slot);
  const bool is_in_arena = slot.view.defined() && (is_at_home(slot) || is_leased(slot.view));
  if (holds && is_in_arena && !is_held(slot)) {
    at::Tensor& gradient = slot.parameter.mutable_grad();
    gradient.set_data(gradient.clone());
  } else if (is_lent(slot) && !slot.home.is_cpu() && uses(slot.home.storage()) > 1) {
    move_holders_of(slot);
  }
  if (is_lent(slot) && uses(slot.home.storage()) > 1) {
    const auto [begin, end] = range_of(slot.home);
    leases_.push_back({begin, end, slot.home.storage().getWeakStorageImpl()});
  }
  slot.home.reset();
  slot.view.reset();
  if (holds) {
    follow(slot);
  }
}

void LentMemory::go_home(GradientSlot& slot) {
  at::Tensor& gradient = slot.parameter.mutable_grad();
  if (!is_lent(slot) || is_at_home(slot) || !holds_gradient(slot) || is_held(slot)) {
    return;
  }
  if (!is_free(slot)) {
    if (is_leased(slot.view)) {
      // It lies in another slot's home, or overlaps its own at another offset.
      gradient.set_data(gradient.clone());
      follow(slot);
    }
    if (!is_free(slot)) {
      return;
    }
  }
  copy(slot.home, gradient);
  slot.view = slot.home;
  gradient.set_data(slot.home);  // the same tensor, as touched as it was
}

// Whether nobody holds the slot's home. Precondition: `parameter.grad` does not lie there.
bool LentMemory::is_free(const GradientSlot& slot) {
  return uses(slot.home.storage()) == 1 && !is_leased(slot.home);
}

bool LentMemory::is_leased(const at::Tensor& tensor) {
  if (leases_.empty()) {
    return false;
  }
  leases_.erase(std::remove_if(leases_.begin(), leases_.end(),
                               [](const Lease& lease) { return lease.holders.expired(); }),
                leases_.end());
  const auto [begin, end] = range_of(tensor);
  return std::any_of(leases_.begin(), leases_.end(),
                     [begin = begin, end = end](const Lease& lease) {
                       return lease.begin < end && begin < lease.end;
                     });
}

void LentMemory::move_holders_of(GradientSlot& slot) {
  if (is_fixed_) {
    throw InvalidUsage(
        join("the program holds a gradient of parameter ", slot.name,
             " of an earlier step, in memory that belongs to a CUDA graph and is written again: "
             "clone what is to be kept, or wrap the module with gradient_as_bucket_view=True"));
  }
  const bool was_at_home = is_at_home(slot);
  copied_bytes_ += static_cast<std::int64_t>(slot.home.nbytes());
  slot.home = move_holders(slot.home);
  if (was_at_home) {
    slot.view = slot.home;
  }
}

void LentMemory::copy(const at::Tensor& target, const at::Tensor& source) {
  target.copy_(source);
  copied_bytes_ += static_cast<std::int64_t>(target.nbytes());
}

}  // namespace pydist
