// One optimizer step on one segment as the compiled kernels take it: plain data, already validated.
//
// Ownership: borrows everything. Thread safety: the kernels share no state. The rules of Note [One
// definition rule and instruction sets] hold here too.

#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "kernels/cpu/update_factors.h"

namespace pydist::kernels {

struct StepJob {
  // float32 or float64: of `values` and of the states.
  DType dtype;
  // float32, bfloat16 or float16 where `dtype` is float32, else float64.
  DType gradient_dtype;
  void* values;          // the parameter, or its master copy
  const void* gradient;  //
  // The parameter in float16 or bfloat16: the rounded values, unless written since; null where
  // `values` is the parameter itself.
  void* rounded;
  DType rounded_dtype;
  // Adam: exp_avg, exp_avg_sq, and with amsgrad max_exp_avg_sq. SGD: the momentum buffer, if any.
  void* states[3];
  std::size_t count;  // elements
};

}  // namespace pydist::kernels
