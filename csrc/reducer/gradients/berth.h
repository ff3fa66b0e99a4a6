// Memory that the buckets of stage 2 have by turns, one at a time.
//
// A bucket takes its berth when the first of its gradients arrives and none of another bucket is in
// it any more, and leaves it when it was reduced. A rank that is ahead of the others waits for
// that, see Reducer::take_memory(), or whole gradients would pile up.
//
// On a device whose streams can wait for the reduction, a berth is free as soon as the reduction
// has been submitted. Every stream that writes there waits for it first, so the host, which is far
// ahead of the device, need not.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "communicator/work.h"
#include "reducer/gradients/gradient_slot.h"

namespace pydist {

class Berth {
 public:
  explicit Berth(at::Tensor memory) : memory_(std::move(memory)) {}

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
