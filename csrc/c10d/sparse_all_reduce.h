// The sums of sparse (COO) tensors over all ranks, as sparse tensors on every rank.
//
//   1. one all_gather for all tensors, of what each rank has: the number of values, the dimensions,
//      the type and the shape of each tensor, so that ranks which disagree get Mismatch;
//   2. for each tensor all_gather of indices and of values, ragged;
//   3. the concatenation of both, coalesced (which adds up values of equal indices).
//
// 16-bit floats travel, and are multiplied and added up, as float32: they are rounded once.
//
// Bytes received by a rank: those of all the other ranks' indices and values.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "communicator/communicator.h"

namespace pydist {

// Collective. Blocks for step 1; the rest is under way when it returns. Each of `tensors` holds the
// coalesced result when its work, which has the same place in the returned vector, has finished.
// `op` is a sum, a mean, or kPremulSum, the sum of each rank's tensors times its own `factor`,
// which is 1 otherwise.
[[nodiscard]] std::vector<WorkPtr> sparse_all_reduce(Communicator& communicator,
                                                     const std::vector<at::Tensor>& tensors,
                                                     ReduceOp op, double factor,
                                                     std::optional<Deadline> deadline);

}  // namespace pydist
