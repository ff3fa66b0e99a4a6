// The reductions of integers and bool.

#include "kernels/cuda/reduce_kernels.h"

namespace pydist::cuda {

FoundKernel find_integer_kernel(ReduceOp op, DType dtype) {
  if (dtype == DType::kBool) {
    return {&kReduceKernel<Uniform<Bool>>, 1};
  }
  if (op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor) {
    return {&kReduceKernel<Uniform<Bits>>, 1};
  }
  switch (element_size(dtype)) {
    case 1:
      return {&kReduceKernel<Uniform<Plain<std::uint8_t>>>, 1};
    case 2:
      return {&kReduceKernel<Uniform<Plain<std::uint16_t>>>, 2};
    case 4:
      return {&kReduceKernel<Uniform<Plain<std::uint32_t>>>, 4};
    case 8:
      return {&kReduceKernel<Uniform<Plain<std::uint64_t>>>, 8};
    default:
      return {};
  }
}

}  // namespace pydist::cuda
