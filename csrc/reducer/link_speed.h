// How long an all-reduce takes, as a function of its size; for choosing the size of buckets.

#pragma once

#include <ATen/core/Tensor.h>

#include "communicator/communicator.h"

namespace pydist {

// seconds = latency_s + bytes * seconds_per_byte
struct LinkSpeed {
  double latency_s = 0.0;
  double seconds_per_byte = 0.0;
};

// Collective. Sums zeros in `memory`, which holds zeros, for some milliseconds. The figures are
// this rank's.
[[nodiscard]] LinkSpeed measure_link(Communicator& communicator, const at::Tensor& memory);

}  // namespace pydist
