#include "bindings/arguments.h"

#include <string>

#include "base/error.h"

namespace pydist {

ReduceOp parse_reduce_op(std::string_view text) {
  // The two that nearly every call has.
  if (text == "sum") {
    return ReduceOp::kSum;
  }
  if (text == "mean" || text == "avg") {
    return ReduceOp::kMean;
  }
  std::string valid;
  for (int i = 0; i < kReduceOpCount; ++i) {
    const auto op = static_cast<ReduceOp>(i);
    if (to_string(op) == text) {
      return op;
    }
    valid += i == 0 ? "" : ", ";
    valid += to_string(op);
  }
  throw InvalidUsage(join("op='", text, "' is not valid; use one of: ", valid, "."));
}

OpKind parse_kind(std::string_view text) {
  std::string valid;
  for (int i = 0; i <= static_cast<int>(OpKind::kBarrier); ++i) {
    const auto kind = static_cast<OpKind>(i);
    if (to_string(kind) == text) {
      return kind;
    }
    valid += i == 0 ? "" : ", ";
    valid += to_string(kind);
  }
  throw InvalidUsage(join("kind='", text, "' is not valid; use one of: ", valid, "."));
}

}  // namespace pydist
