// The ways in which a collective combines the elements of all ranks.

#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "base/dtype.h"
#include "base/enum_names.h"

namespace pydist {

enum class ReduceOp : std::uint8_t {
  kSum,
  kMean,  // the sum, divided once by the number of ranks
  kMin,   // propagates NaN
  kMax,   // propagates NaN
  kProd,
  kBand,
  kBor,
  kBxor,
  kPremulSum,  // each rank's input is multiplied by that rank's factor, then summed
};

// A factor of kPremulSum on a device: the numerator divided by the denominator. Where either is 0,
// its rank counts as zeros, even where its elements are NaN.
struct DeviceFactor {
  const double* numerator = nullptr;    // null: there is no such factor
  const double* denominator = nullptr;  // null: 1
};

inline constexpr int kReduceOpCount = 9;

inline constexpr std::array<std::string_view, kReduceOpCount> kReduceOpNames = {
    "sum", "mean", "min", "max", "prod", "band", "bor", "bxor", "premul_sum"};

[[nodiscard]] constexpr std::string_view to_string(ReduceOp op) noexcept {
  return name_in(kReduceOpNames, op, "unknown op");
}

// Whether the engine can combine elements of `dtype` with `op`.
//   sum, prod        every type but float8 (bool: logical or, logical and, as torch's gloo does)
//   mean, premul_sum floating point and complex only: an integer mean would round silently
//   min, max         every real type but float8
//   band, bor, bxor  integers and bool
[[nodiscard]] constexpr bool is_supported(ReduceOp op, DType dtype) noexcept {
  if (dtype == DType::kFloat8) {
    return false;
  }
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProd:
      return true;
    case ReduceOp::kMean:
    case ReduceOp::kPremulSum:
      return is_floating_point(dtype) || is_complex(dtype);
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return !is_complex(dtype);
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      return is_integral(dtype);
  }
  return false;
}

}  // namespace pydist
