// Element types of the buffers that the engine moves and reduces.
//
// The engine is free of torch headers, so it names element types itself; c10d/ translates.
// Types without arithmetic here (the float8 family) can be moved but not reduced.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/enum_names.h"

namespace pydist {

enum class DType : std::uint8_t {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kUInt16,
  kUInt32,
  kUInt64,
  kBool,
  kComplex64,
  kComplex128,
  // One byte an element, moved as bytes: float8_e4m3fn, float8_e5m2 and their kin.
  kFloat8,
};

inline constexpr int kDTypeCount = 16;

// The field's names of the types.
inline constexpr std::array<std::string_view, kDTypeCount> kDTypeNames = {
    "float64", "float32", "float16", "bfloat16", "int8", "int16",     "int32",      "int64",
    "uint8",   "uint16",  "uint32",  "uint64",   "bool", "complex64", "complex128", "float8"};

// Bytes of one element.
[[nodiscard]] constexpr std::size_t element_size(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
    case DType::kUInt64:
    case DType::kComplex64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
    case DType::kUInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16:
    case DType::kUInt16:
      return 2;
    case DType::kComplex128:
      return 16;
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kBool:
    case DType::kFloat8:
      return 1;
  }
  return 0;
}

[[nodiscard]] constexpr bool is_floating_point(DType dtype) noexcept {
  return dtype <= DType::kBFloat16 || dtype == DType::kFloat8;
}

[[nodiscard]] constexpr bool is_16_bit_float(DType dtype) noexcept {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

[[nodiscard]] constexpr bool is_complex(DType dtype) noexcept {
  return dtype == DType::kComplex64 || dtype == DType::kComplex128;
}

[[nodiscard]] constexpr bool is_integral(DType dtype) noexcept {
  return dtype >= DType::kInt8 && dtype <= DType::kBool;
}

[[nodiscard]] constexpr std::string_view to_string(DType dtype) noexcept {
  return name_in(kDTypeNames, dtype, "unknown dtype");
}

}  // namespace pydist
