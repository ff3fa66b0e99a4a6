// The reductions of floating point and complex numbers.

#include "kernels/cuda/reduce_kernels.h"

namespace pydist::cuda {

FoundKernel find_float_kernel(ReduceOp op, DType dtype) {
  const bool is_product = op == ReduceOp::kProd;
  switch (dtype) {
    case DType::kFloat64:
      return {&kReduceKernel<Uniform<Plain<double>>>, 8};
    case DType::kFloat32:
      return {&kReduceKernel<Uniform<Plain<float>>>, 4};
    case DType::kFloat16:
      return {&kReduceKernel<Uniform<Float16>>, 2};
    case DType::kBFloat16:
      return {&kReduceKernel<Uniform<BFloat16>>, 2};
    // Sums, means and real factors act on the parts alone.
    case DType::kComplex64:
      return is_product ? FoundKernel{&kReduceKernel<Uniform<Complex<float>>>, 8}
                        : FoundKernel{&kReduceKernel<Uniform<Plain<float>>>, 4};
    case DType::kComplex128:
      return is_product ? FoundKernel{&kReduceKernel<Uniform<Complex<double>>>, 16}
                        : FoundKernel{&kReduceKernel<Uniform<Plain<double>>>, 8};
    default:
      return {};
  }
}

}  // namespace pydist::cuda
