// Gradients of which this rank needs a part only, because an optimizer has shards.
//
// A bucket of such gradients travels in a reduce_scatter, and each rank gets the average of its
// *shard* of the bucket (bucketing/shard_layout.h). `parameter.grad` is a stand-in then, without
// values: what is there besides the shard is this rank's own, and no average.
//
// In stage 1 a bucket has its place in the arena for good, and the shard is a part of it. In stage
// 2 the shard has memory of its own, and buckets take turns in a few *stagings*. A bucket takes its
// staging when the first of its gradients arrives, if no gradient of another bucket is left there,
// and leaves it once it has been reduced. A rank that is ahead of the others waits for a staging,
// see Reducer::take_memory(), or whole gradients would pile up. A gradient that finds none all the
// same stays where autograd has put it. It moves when the next gradient of the bucket finds memory,
// or when the bucket is launched.
//
// On a device whose streams can wait for the reduction, a staging is free as soon as the reduction
// has been submitted. Every stream that writes there waits for it first, so the host, which is far
// ahead of the device, need not.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "base/deadline.h"
#include "communicator/work.h"
#include "reducer/gradient_slot.h"

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

// Memory that one bucket at a time has.
class Staging {
 public:
  explicit Staging(at::Tensor memory) : memory_(std::move(memory)) {}

  [[nodiscard]] const at::Tensor& memory() const noexcept { return memory_; }

  // Gives the memory to a bucket, if no bucket has it or the one that has it was reduced.
  [[nodiscard]] bool try_take(std::vector<GradientSlot>& slots,
                              const std::vector<std::size_t>& members);

  // Whether the bucket of these slots has it.
  [[nodiscard]] bool serves(const std::vector<std::size_t>& members) const;

  // Before the bucket that has it writes there: the current stream waits for whoever had it before.
  void enter();

  // The bucket that has it and has yet to be launched, by its first slot.
  [[nodiscard]] std::optional<std::size_t> unlaunched() const;

  // The operation after which the bucket that has it doesn't need it any more.
  void set_work(WorkPtr work) { work_ = std::move(work); }

  // Waits until it is free. Precondition: the bucket that has it was launched.
  void wait() const;
  // The same until `deadline`, and without a look at errors.
  void wait_quietly(Deadline deadline) const;

  // Takes it from a bucket that has yet to be launched, if such a one has it: gradients that have
  // landed move out.
  void evict(std::vector<GradientSlot>& slots);

  // Takes it back from a bucket that was reduced, or whose gradients are worth nothing.
  void release(std::vector<GradientSlot>& slots);

 private:
  [[nodiscard]] bool does_stream_wait(Work& work) const;

  at::Tensor memory_;
  std::vector<std::size_t> users_;  // slots
  WorkPtr work_;
  WorkPtr before_;  // of the bucket that had it before, where streams wait for that
};

}  // namespace pydist
