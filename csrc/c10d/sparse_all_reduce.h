// The sum of one sparse (COO) tensor of each rank, as a sparse tensor on every rank.
//
//   1. all_gather of [number of values, sparse dims, dense dims, type, shape], so that ranks which
//      disagree get Mismatch;
//   2. all_gather of indices and of values, ragged;
//   3. the concatenation of both, coalesced (which adds up values of equal indices).
//
// Bytes received by a rank: those of all the other ranks' indices and values.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "communicator/communicator.h"

namespace pydist {

// Collective. Blocks for step 1; the rest is under way when it returns. `tensor` holds the
// coalesced result when the work has finished.
[[nodiscard]] WorkPtr sparse_all_reduce(Communicator& communicator, const at::Tensor& tensor,
                                        ReduceOp op, std::optional<Deadline> deadline);

}  // namespace pydist
