// One reduction as the compiled kernels take it: plain data, already validated.
//
// Ownership: borrows everything. Thread safety: the kernels share no state.
//
// Note [One definition rule and instruction sets]
// The kernels are compiled once for every instruction set, from one source. Had two of those
// objects an inline function in common, say a member of std::vector, then the linker would keep
// one copy of the two, maybe the one with AVX-512 in it, and everybody would run that copy, also
// on processors without AVX-512. So those objects define nothing with external linkage but one
// table of kernels (kernel_set.h), call nothing inline of the standard library, and this header
// holds data alone.

#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "base/reduce_op.h"

namespace pydist::kernels {

struct ReduceJob {
  DType dtype;
  ReduceOp op;
  double divisor;
  const double* factors;  // input_count of them for kPremulSum, else unused
  const void* const* inputs;
  std::size_t input_count;  // >= 1
  void* const* outputs;
  std::size_t output_count;  // >= 1
  std::size_t count;         // elements
  bool streaming;
};

}  // namespace pydist::kernels
