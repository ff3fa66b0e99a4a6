// Foresees which blocks of memory that autograd asks for become gradients, and has them made in
// their slots at once.
//
// A gradient is computed into memory of its own and then copied to where it travels from, which
// takes about as long as averaging it. But a training repeats itself: in each backward the same
// operations allocate blocks of the same sizes in the same order. So this counts the blocks of each
// size that slots have (c10d/cpu_allocator.h), and notes which one has come as the gradient of
// which slot. Where two backwards in a row agree, the next one's block of that number *is* the
// slot's home: the operation computes the gradient there, and nothing is copied.
//
// Note [Made in place]
// A forecast may be wrong, and may cost time then, but changes no value. A block is offered only
// while nobody holds the home, `parameter.grad` is undefined, and no operation of the ranks uses
// it; and whatever lies in it holds the home like any tensor that a program has kept, see
// lent_memory.h. So a block that has become something else stays what it is, and the gradient lands
// elsewhere; as long as somebody keeps that block, its bucket travels in a copy. The same happens
// to a gradient that somebody besides autograd holds as it arrives, a hook say: that must not
// change when the average is written. What hooks and functions of the program allocate is neither
// counted nor made in a home, since it may well keep that. After a wrong forecast, a slot needs
// twice as many agreeing backwards as before, 1024 at most.
//
// A home lies in memory that a forked child shares. The child makes nothing there, but sees what
// its parent makes, and can write into what a wrong forecast has put there.
//
// For gradients on the CPU whose memory is lent; others are never foreseen.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "reducer/gradients/gradient_slot.h"
#include "reducer/gradients/lent_memory.h"

namespace pydist {

class GradientForecast {
 public:
  // Of gradients of `least_bytes` and more. `may_write`: whether no operation of the ranks uses a
  // slot's home, as far as it is known on the thread of the backward. `may_run_program`: whether
  // code of the program's may run at the moment.
  GradientForecast(std::vector<GradientSlot>& slots, LentMemory& lent, std::size_t least_bytes,
                   std::function<bool(const GradientSlot&)> may_write,
                   std::function<bool()> may_run_program);
  GradientForecast(const GradientForecast&) = delete;
  GradientForecast& operator=(const GradientForecast&) = delete;
  ~GradientForecast();

  // Around a backward that fills gradients. begin() is called on its thread, whose blocks are
  // looked at in between; it does nothing where no slot is large enough to be worth it, or where
  // torch's allocator can't be replaced.
  void begin();
  void end() noexcept;

  // While a gradient arrives at a slot that has none yet: takes note of the block that it has come
  // in. Whether that is the slot's home, and nobody else holds it.
  [[nodiscard]] bool arrives_in_place(GradientSlot& slot, const at::Tensor& gradient);

 private:
  class Listener;
  // What is known of a slot.
  struct History {
    std::size_t number = 0;    // its gradient's, among the blocks of that size
    std::size_t agreeing = 0;  // backwards in a row in which it was that one
    std::size_t needed = 2;
    // In this backward:
    std::optional<std::size_t> came_as;
    bool was_offered = false;
    bool was_made_in_place = false;
  };
  // The blocks of one size, in this backward.
  struct Blocks {
    std::vector<const void*> places;
    std::unordered_map<std::size_t, std::size_t> slots;  // that are foreseen, by number
  };

  [[nodiscard]] bool is_foreseeable(const GradientSlot& slot) const;
  [[nodiscard]] bool is_possible();
  [[nodiscard]] bool looks() const;
  [[nodiscard]] c10::intrusive_ptr<c10::StorageImpl> offer(std::size_t bytes);
  void note(std::size_t bytes, const void* block);
  static void learn(History& history);

  std::vector<GradientSlot>& slots_;
  LentMemory& lent_;
  const std::size_t least_bytes_;
  const std::function<bool(const GradientSlot&)> may_write_;
  const std::function<bool()> may_run_program_;
  std::optional<bool> is_installed_;                // CpuAllocator; nothing: has not tried to
  std::shared_ptr<Listener> listener_;              // of the backward that runs; null: none does
  std::vector<History> histories_;                  // by slot
  std::unordered_map<std::size_t, Blocks> blocks_;  // by bytes
};

}  // namespace pydist
