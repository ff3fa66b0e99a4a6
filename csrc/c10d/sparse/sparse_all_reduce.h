// The sums of sparse (COO) tensors over all ranks, as sparse tensors on every rank.
//
//   1. one all_gather for all tensors, of what each rank has: the number of values, the dimensions,
//      the type and the shape of each tensor, so that ranks which disagree get Mismatch;
//   2. all_gather of indices and of values, ragged; tensors whose values have one type travel
//      together, until all ranks' rows of them have a MiB;
//   3. the rows of all ranks, merged (row_sum.h).
//
// 16-bit floats travel, and are multiplied and added up, as float32: they are rounded once.
//
// Bytes received by a rank: those of all the other ranks' indices and values.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "communicator/communicator.h"

namespace pydist {

struct JointSum;

// Sums that are under way.
class SparseSums {
 public:
  // Collective, except for no tensors. Blocks for step 1; the rest is under way when it returns.
  // `op` is a sum, a mean, or kPremulSum, the sum of each rank's tensors times its own `factor`,
  // which is 1 otherwise.
  SparseSums(Communicator& communicator, const std::vector<at::Tensor>& tensors, ReduceOp op,
             double factor, std::optional<Deadline> deadline);

  // Step 2. Whoever waits for these moves them along.
  [[nodiscard]] const std::vector<WorkPtr>& gathered() const noexcept { return gathered_; }
  // Step 3, once they have finished: then the tensors hold the coalesced results. One of these is
  // called, once: finish() adds up on this thread, with others where there is much to do, and
  // finish_elsewhere() on others alone.
  void finish();
  [[nodiscard]] WorkPtr finish_elsewhere();

 private:
  [[nodiscard]] WorkPtr elsewhere(std::size_t first);

  Communicator& communicator_;
  std::vector<std::shared_ptr<JointSum>> joints_;
  std::vector<WorkPtr> gathered_;  // two for each
};

}  // namespace pydist
