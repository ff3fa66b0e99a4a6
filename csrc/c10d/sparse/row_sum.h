// The sum of sparse (COO) tensors, whose rows are sorted.

#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace pydist {

// What a coalesced tensor holds: rows in the order of their indices, and no index twice.
struct SparseRows {
  at::Tensor indices;  // of int64, (rows, sparse dimensions), contiguous
  at::Tensor values;   // (rows, dense dimensions...), contiguous, of a type that can be added up
};

// All rows of `summands`, which are alike but for their number; those of equal indices are added up
// in the order of `summands`. Merges them, which takes one comparison a row for each doubling of
// their number, where coalesce() would sort them all anew.
[[nodiscard]] SparseRows sum_of_rows(const std::vector<SparseRows>& summands);

}  // namespace pydist
