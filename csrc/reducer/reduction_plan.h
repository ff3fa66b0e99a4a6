// Where the gradients of a module go; the same on every rank.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <vector>

#include "reducer/gradient_slot.h"

namespace pydist {

// A run of slots that travels in one all-reduce.
struct GradientBucket {
  std::string label;
  at::Tensor memory;
  std::vector<std::size_t> slots;  // by index
  // How many of them, and of the sparse gradients that count as part of it, have not come yet.
  std::size_t missing = 0;
};

// Sparse gradients are in no bucket and go one by one, after the buckets.
struct ReductionPlan {
  std::vector<GradientSlot> slots;      // in the order of registration
  std::vector<GradientBucket> buckets;  // in the order of launching
  at::Tensor tail;                      // the end of the last bucket: a word for each slot
};

}  // namespace pydist
