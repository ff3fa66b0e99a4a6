#include "base/reduce_op.h"

namespace pydist {

std::string_view to_string(ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kMean:
      return "mean";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kProd:
      return "prod";
    case ReduceOp::kBand:
      return "band";
    case ReduceOp::kBor:
      return "bor";
    case ReduceOp::kBxor:
      return "bxor";
    case ReduceOp::kPremulSum:
      return "premul_sum";
  }
  return "unknown op";
}

bool is_supported(ReduceOp op, DType dtype) noexcept {
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
