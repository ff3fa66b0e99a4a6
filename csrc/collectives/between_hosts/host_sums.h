// A reduction in two: first of the ranks of a host, in rank order, then of the hosts, in their
// order. A host's sum travels in the call's wire type, to which it is rounded; inside a host
// elements keep the type of the buffers. Used by one thread at a time.

#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "collectives/collective_steps.h"
#include "collectives/wire.h"
#include "topology/placement.h"

namespace pydist {

class HostSums {
 public:
  HostSums(const Collective& run, const Placement& placement);

  // Combines the pieces of the ranks of this host, which lie as in buffers, to `sum`, as it
  // travels. Changes `pieces`.
  void combine_ranks(std::span<const void*> pieces, std::byte* sum, std::size_t count);

  // Combines the hosts' sums, as they have travelled, to `output`, a buffer. Where results travel
  // in another type, `narrow` gets the result as it travels, and may be one of the sums; otherwise
  // it is not used. Changes `sums`.
  void combine_hosts(std::span<const void*> sums, std::byte* narrow, std::byte* output,
                     std::size_t count) const;

 private:
  const Wire wire_;
  const Wire unconverted_;  // between buffers of this host
  const Wire travelling_;   // between what travels
  const std::size_t element_bytes_;
  ReduceOp of_ranks_;
  ReduceOp of_hosts_;
  double divisor_ = 1.0;
  std::vector<double> factors_;       // of the ranks
  std::vector<std::byte> unrounded_;  // a sum, where it is rounded
};

}  // namespace pydist
