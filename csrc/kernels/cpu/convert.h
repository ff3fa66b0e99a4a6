// Conversion between the 16-bit floating-point types and float32, on the CPU.
//
// Widening is exact; narrowing rounds to nearest, ties to even. Thread safe.

#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace pydist {

// `from` is kFloat16 or kBFloat16. The buffers do not overlap.
void widen_to_float32(DType from, const void* input, float* output, std::size_t count);

// `to` is kFloat16 or kBFloat16. The buffers do not overlap.
void narrow_from_float32(DType to, const float* input, void* output, std::size_t count);

}  // namespace pydist
