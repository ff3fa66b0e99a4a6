// What reductions must give, element by element: the reference for kernels.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/cpu/reduce.h"

namespace pydist::scalar {

using Bytes = std::vector<unsigned char>;

// The result of a reduction of `count` elements of each input.
[[nodiscard]] Bytes reference(const Reduction& reduction, const std::vector<Bytes>& inputs,
                              std::size_t count);

// ---- 16-bit floating point ----------------------------------------------------------------

struct HalfFormat {
  int mantissa_bits;
  int smallest_exponent;  // of a normal number
  int exponent_bits;
};
constexpr HalfFormat kFloat16Format{10, -14, 5};
constexpr HalfFormat kBFloat16Format{7, -126, 8};

[[nodiscard]] float decode(std::uint16_t bits, HalfFormat format);

// To the nearest, ties to even; NaN to the canonical one.
[[nodiscard]] std::uint16_t encode(float value, HalfFormat format);

// ---- values in memory ---------------------------------------------------------------------

template <typename T>
T read(const unsigned char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename T>
void write(unsigned char* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

}  // namespace pydist::scalar
