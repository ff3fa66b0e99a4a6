// Means whose sum is kept in float16 on its way.
//
// The sum of p values leaves float16's range long before their mean does. Not so where each term is
// first multiplied by 2^-k for the smallest 2^k >= p. The price is paid at the other end: terms
// below 2^k times the least normal number, 6e-5, lose bits, and those below 2^k times 3e-8 all of
// them. (torch's fp16_compress_hook divides before the sum, too.)

#pragma once

#include <bit>

#include "base/dtype.h"
#include "base/reduce_op.h"

namespace pydist {

struct ScaledMean {
  double factor = 1.0;   // of every term
  double divisor = 1.0;  // of the sum
};

// `partial` is the type of partial sums.
[[nodiscard]] constexpr bool is_scaled_mean(ReduceOp op, DType partial) noexcept {
  return op == ReduceOp::kMean && partial == DType::kFloat16;
}

[[nodiscard]] constexpr ScaledMean scaled_mean(int ranks) noexcept {
  const double power = std::bit_ceil(static_cast<unsigned>(ranks));
  return {1.0 / power, ranks / power};
}

}  // namespace pydist
