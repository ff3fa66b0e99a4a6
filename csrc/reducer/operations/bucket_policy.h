// What happens to a bucket between the gradients of this rank and what they become.
//
// A reducer has one policy. For each bucket, in the order of the plan, it calls prepare() and
// reduce() as soon as the bucket is complete, and finish() once at the end of the round. Before
// the first bucket of a round it knows the combination; see Combination. For one thread at a time.
//
// A policy that keeps state for gradients keeps it by slot, and lets it follow in adapt(): a plan
// may cut the buckets anew between two rounds.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>

#include "communicator/work.h"
#include "reducer/gradients/gradient_arena.h"
#include "reducer/operations/operations_under_way.h"

namespace pydist {

struct DepartingBucket {
  std::size_t number;
  const std::string& label;
  const at::Tensor& memory;  // what travels
  const at::Tensor& shard;  // where this rank's part of the result goes; undefined: all to `memory`
};

class BucketPolicy {
 public:
  BucketPolicy() = default;
  BucketPolicy(const BucketPolicy&) = delete;
  BucketPolicy& operator=(const BucketPolicy&) = delete;
  virtual ~BucketPolicy() = default;

  // Changes the gradients of this rank, before they leave, to what reduce() expects. Not called
  // where the round is given up, when a bucket leaves only because other ranks wait for it.
  virtual void prepare(const DepartingBucket& /*bucket*/, const Combination& /*combination*/) {}

  // Starts what makes the result. `on_completion` is called when the result is there, on any
  // thread. Returns the operation that is under way, or null where only finish() can wait.
  [[nodiscard]] virtual WorkPtr reduce(const DepartingBucket& bucket,
                                       const Combination& combination,
                                       Work::Callback on_completion) = 0;

  // Both for a sparse gradient, which is a bucket of its own: the one after as many as came before
  // it in this round. Returns the tensor that finish() writes the result into, `gradient` or a
  // copy. Called only where is_of_program(), when all dense buckets have left.
  [[nodiscard]] virtual at::Tensor reduce_sparse(const GradientSlot& /*slot*/,
                                                 const at::Tensor& gradient,
                                                 const Combination& /*combination*/) {
    return gradient;
  }

  // Waits for what has no operation, and writes what comes of it into the buckets' memory.
  virtual void finish() {}
  // Drops what was started, finished or not.
  virtual void forget() noexcept {}
  [[nodiscard]] virtual bool is_idle() const noexcept { return true; }
  // Whether everything that was started has finished.
  [[nodiscard]] virtual bool is_over() const { return true; }

  // After the arena was arranged anew, while nothing is under way.
  virtual void adapt(const GradientArena& /*arena*/) {}

  // Whether code of the program makes the result. It sees whole gradients in their own type, and
  // may keep state for each bucket, so that no plan may follow the first one that was learned.
  [[nodiscard]] virtual bool is_of_program() const noexcept { return false; }
  // Whether that code has raised on this rank. From then on reduce() does nothing.
  [[nodiscard]] virtual bool has_raised() const noexcept { return false; }
};

}  // namespace pydist
