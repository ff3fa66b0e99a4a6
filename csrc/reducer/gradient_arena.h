// The memory of a module's gradients: blocks, cut into buckets, cut into slots.
//
// The gradients of one dtype and device lie in one *block* of memory that the communicator
// allocated, symmetric where it can, so that collectives on it copy nothing in or out. Parameters
// that join the model later get a block of their own. A block is cut into *buckets*, each of which
// travels in one operation, and those into *slots*, one for each parameter. Complex numbers travel
// as pairs of reals: sums and averages are the same.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <string>
#include <vector>

#include "bucketing/bucket_plan.h"
#include "communicator/communicator.h"
#include "reducer/gradient_slot.h"

namespace pydist {

struct GradientBucket {
  std::string label;
  at::Tensor memory;
  std::vector<std::size_t> slots;  // by index
  // How many of them, and of what counts as part of it, are not complete yet in this round.
  std::size_t missing = 0;
  // On a device: those on which gradients have come in this round. Nearly always one.
  std::vector<c10::Stream> streams;
};

class GradientArena {
 public:
  explicit GradientArena(CommunicatorPtr communicator) : communicator_(std::move(communicator)) {}

  // A slot without a place; the same on every rank, in the same order.
  GradientSlot& add(std::string name, at::Tensor parameter, bool is_sparse);

  // Collective: memory for the slots that need a place and have no block.
  void allocate();

  // Cuts the blocks anew, after allocate(). Gradients that lie there move along. Throws
  // InvalidUsage where the plan does not fit, and has changed nothing.
  void arrange(const BucketPlan& plan);

  [[nodiscard]] const BucketPlan& plan() const noexcept { return plan_; }
  // The block of each slot.
  [[nodiscard]] const std::vector<std::size_t>& blocks() const noexcept { return block_of_; }
  [[nodiscard]] std::vector<GradientSlot>& slots() noexcept { return slots_; }
  [[nodiscard]] const std::vector<GradientSlot>& slots() const noexcept { return slots_; }
  // In the order of launching.
  [[nodiscard]] std::vector<GradientBucket>& buckets() noexcept { return buckets_; }
  [[nodiscard]] const std::vector<GradientBucket>& buckets() const noexcept { return buckets_; }
  // The largest block, to measure with; undefined where there is none.
  [[nodiscard]] at::Tensor largest_block() const;

 private:
  const CommunicatorPtr communicator_;
  std::vector<GradientSlot> slots_;
  std::vector<std::size_t> block_of_;
  std::vector<at::Tensor> blocks_;  // of one dimension, of the real dtype
  BucketPlan plan_;
  std::vector<GradientBucket> buckets_;
};

}  // namespace pydist
